//! The controller as real processes against a real API server, without nodes: who leads, what is admitted, and
//! certificates that change while it works.
#![allow(clippy::print_stdout, reason = "a test without the standard harness prints what it measured")]

use std::{
    fs,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use e2e::{
    Suite, patchbay,
    replica::{self, Replica},
    tests,
};
use k8s_openapi::{
    api::{
        admissionregistration::v1::ValidatingWebhookConfiguration, coordination::v1::Lease, core::v1::Secret,
    },
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::{SignedDuration, Timestamp},
};
use kube::{
    Api, Client,
    api::{DynamicObject, Patch, PatchParams, PostParams},
    core::{ApiResource, GroupVersionKind},
};
use lab::{Lab, Topology, wait};
use nix::sys::signal::Signal;
use serde_json::json;

const NAMESPACE: &str = patchbay::NAMESPACE;

fn main() -> ExitCode {
    Suite {
        name: "t-controller",
        topology: Topology::ControlPlaneOnly,
        set_up: |lab| Box::pin(async move { replica::prepare(&lab, 2) }),
        tests: tests![
            the_webhook_refuses_a_nodenetwork_without_a_node,
            a_replica_is_not_ready_before_it_has_seen_the_cluster,
            the_leader_lets_go_when_told_to_stop_and_ends_within_10_s,
            another_replica_leads_within_15_s_after_kill_9,
            a_paused_leader_never_acts_beside_the_new_one,
            a_rival_whose_clock_is_two_minutes_off_breaks_nothing,
            certificates_change_under_load_without_one_failed_admission,
            damaged_certificates_and_bundles_are_repaired,
        ],
    }
    .run()
}

fn leases(client: &Client) -> Api<Lease> {
    Api::namespaced(client.clone(), NAMESPACE)
}

async fn holder(client: &Client) -> Result<String> {
    let lease = leases(client).get_opt("patchbay-controller").await?;
    Ok(lease.and_then(|l| l.spec?.holder_identity).unwrap_or_default())
}

async fn leads(client: &Client, name: &str, within: Duration) -> Result<Duration> {
    let start = Instant::now();
    wait::until(within, &format!("{name} to lead"), || async {
        Ok((holder(client).await? == name).then_some(()))
    })
    .await?;
    Ok(start.elapsed())
}

async fn free_the_lease(client: &Client) -> Result<()> {
    match leases(client).delete("patchbay-controller", &kube::api::DeleteParams::default()).await {
        Err(kube::Error::Api(e)) if e.is_not_found() => Ok(()),
        other => other.map(|_| ()).context("delete the Lease"),
    }
}

fn nodenetworks(client: &Client) -> Api<DynamicObject> {
    let gvk = GroupVersionKind::gvk("patchbay.dev", "v1alpha1", "NodeNetwork");
    Api::all_with(client.clone(), &ApiResource::from_gvk(&gvk))
}

/// Asks for a NodeNetwork without making one: what admission says.
async fn admission(client: &Client, name: &str) -> Result<(), kube::Error> {
    let object: DynamicObject = serde_json::from_value(json!({
        "apiVersion": "patchbay.dev/v1alpha1", "kind": "NodeNetwork", "metadata": {"name": name},
    }))
    .expect("an object");
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    nodenetworks(client).create(&dry, &object).await.map(|_| ())
}

/// Refused by our webhook, with its sentence.
fn refused_by_us(outcome: &Result<(), kube::Error>) -> bool {
    matches!(outcome, Err(kube::Error::Api(e)) if e.message.contains("nodenetworks.patchbay.dev") && e.message.contains("denied") && e.message.contains("Node"))
}

async fn webhook_answers(client: &Client) -> Result<()> {
    wait::until(Duration::from_secs(20), "the webhook to answer", || async {
        let outcome = admission(client, "nobody").await;
        ensure!(refused_by_us(&outcome), "{outcome:?}");
        Ok(Some(()))
    })
    .await
}

async fn the_webhook_refuses_a_nodenetwork_without_a_node(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let _one = Replica::ready(&lab, 1, &[]).await?;
    let _two = Replica::ready(&lab, 2, &[]).await?;
    webhook_answers(&client).await?;
    let Err(kube::Error::Api(refusal)) = admission(&client, "nobody").await else { bail!("it was let in") };
    println!("{}", refusal.message);
    lab.kubectl(&[
        "create",
        "-f",
        write(
            &lab,
            "node.json",
            &json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "somebody"}}),
        )?
        .as_str(),
    ])?;
    // Every replica learns of the Node from its own watch: ten in a row, whichever of them answers.
    let row = AtomicUsize::new(0);
    wait::until(Duration::from_secs(10), "ten admissions in a row", || async {
        let good = admission(&client, "somebody").await.is_ok();
        row.store(if good { row.load(Ordering::Relaxed) + 1 } else { 0 }, Ordering::Relaxed);
        Ok((row.load(Ordering::Relaxed) >= 10).then_some(()))
    })
    .await?;
    lab.kubectl(&["delete", "node", "somebody"]).map(|_| ())
}

fn write(lab: &Lab, name: &str, object: &serde_json::Value) -> Result<String> {
    let file = lab.kubeconfig().with_file_name(name);
    fs::write(&file, object.to_string())?;
    Ok(file.to_str().context("a path in UTF-8")?.to_owned())
}

async fn a_replica_is_not_ready_before_it_has_seen_the_cluster(lab: Lab) -> Result<()> {
    // Its token is asked for while the API server still talks.
    let early = Replica::start(&lab, 1, &[])?;
    lab.pause("apiserver")?;
    drop(early);
    let replica = Replica::again(&lab, 1)?;
    let outcome = async {
        wait::until(Duration::from_secs(10), "the replica to live", || async {
            Ok((replica.probe("healthz") == 200).then_some(()))
        })
        .await?;
        ensure!(replica.probe("readyz") == 503, "it says it is ready with an API server that is silent");
        anyhow::Ok(())
    };
    let outcome = outcome.await;
    lab.resume("apiserver")?;
    outcome?;
    wait::until(Duration::from_secs(60), "the replica to be ready", || async {
        Ok((replica.probe("readyz") == 200).then_some(()))
    })
    .await
}

async fn the_leader_lets_go_when_told_to_stop_and_ends_within_10_s(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    free_the_lease(&client).await?;
    let mut one = Replica::ready(&lab, 1, &[]).await?;
    leads(&client, "replica-1", Duration::from_secs(15)).await?;
    let _two = Replica::ready(&lab, 2, &[]).await?;
    one.signal(Signal::SIGTERM)?;
    let stop = Instant::now();
    let status = one.ends_within(Duration::from_secs(10)).await?;
    ensure!(status.success(), "{status}: {}", one.tail());
    let took = leads(&client, "replica-2", Duration::from_secs(6)).await?;
    println!("both took {:?}, of which the other one needed {took:?} to lead", stop.elapsed());
    Ok(())
}

async fn another_replica_leads_within_15_s_after_kill_9(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let rounds = if e2e::soak() { 5 } else { 1 };
    for _ in 0..rounds {
        free_the_lease(&client).await?;
        let one = Replica::ready(&lab, 1, &[]).await?;
        leads(&client, "replica-1", Duration::from_secs(15)).await?;
        let _two = Replica::ready(&lab, 2, &[]).await?;
        one.signal(Signal::SIGKILL)?;
        let took = leads(&client, "replica-2", Duration::from_secs(15)).await?;
        println!("failover after kill -9: {took:?}");
    }
    Ok(())
}

async fn a_paused_leader_never_acts_beside_the_new_one(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    free_the_lease(&client).await?;
    let mut one = Replica::ready(&lab, 1, &[]).await?;
    leads(&client, "replica-1", Duration::from_secs(15)).await?;
    let two = Replica::ready(&lab, 2, &[]).await?;
    webhook_answers(&client).await?;
    one.signal(Signal::SIGSTOP)?;
    leads(&client, "replica-2", Duration::from_secs(15)).await?;
    // With the new leader held too, only the old one could mend what is broken now; and it must not.
    two.signal(Signal::SIGSTOP)?;
    let broken = r#"[{"op":"remove","path":"/webhooks/0/clientConfig/caBundle"}]"#;
    lab.kubectl(&["patch", "validatingwebhookconfiguration", "patchbay", "--type=json", "-p", broken])?;
    let mark = lab.audit_offset()?;
    one.signal(Signal::SIGCONT)?;
    // It wakes up believing that it leads, and must end without having written anything.
    let status = one.ends_within(Duration::from_secs(8)).await?;
    ensure!(!status.success(), "losing the lead is not a success: {status}");
    let ours = |a: &lab::audit::AuditedRequest| {
        a.is_write() && a.code < 300 && a.user.ends_with("patchbay-controller")
    };
    let writes: Vec<_> = lab.requests_since(mark)?.into_iter().filter(ours).collect();
    ensure!(writes.is_empty(), "{writes:?}");
    ensure!(holder(&client).await? == "replica-2", "the new leader keeps the Lease");
    ensure!(bundle(&client).await?.is_empty(), "somebody mended it");
    // It was held for less than its own tenure: it still leads, and mends what was broken meanwhile.
    two.signal(Signal::SIGCONT)?;
    wait::until(Duration::from_secs(20), "the bundle to be mended", || async {
        Ok((!bundle(&client).await?.is_empty()).then_some(()))
    })
    .await?;
    webhook_answers(&client).await
}

/// The authorities that the API server is told to trust.
async fn bundle(client: &Client) -> Result<String> {
    let api: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
    let hooks = api.get("patchbay").await?.webhooks.unwrap_or_default();
    let first = hooks.into_iter().next().and_then(|hook| hook.client_config.ca_bundle);
    Ok(first.map(|b| String::from_utf8_lossy(&b.0).into_owned()).unwrap_or_default())
}

/// A shorter term than the default, and all that follows from it in proportion: these tests mostly wait.
const TERM: Duration = Duration::from_secs(4);
const SHORT_TERM: [&str; 4] = ["--lease-term=4s", "--lease-renew=800ms", "--lease-look=800ms", "--drain=1s"];

/// Holds the Lease as somebody whose clock is off, until the other work is done.
async fn rival<T>(
    client: &Client,
    off: SignedDuration,
    meanwhile: impl Future<Output = Result<T>>,
) -> Result<T> {
    let renew = async || -> Result<()> {
        let now = MicroTime(Timestamp::now().checked_add(off).context("a time")?);
        let spec = json!({"spec": {
            "holderIdentity": "rival", "leaseDurationSeconds": TERM.as_secs(), "renewTime": now,
        }});
        leases(client)
            .patch("patchbay-controller", &PatchParams::default(), &Patch::Merge(&spec))
            .await
            .context("the rival's renewal")?;
        wait::until(TERM * 3 / 10, "the rival to keep the Lease", || async {
            ensure!(holder(client).await? == "rival", "the Lease was taken from a rival that renews it");
            Ok(Some(()))
        })
        .await?;
        tokio::time::sleep(TERM / 10).await;
        ensure!(holder(client).await? == "rival", "the Lease was taken from a rival that renews it");
        Ok(())
    };
    // Once before anything else: whatever is done meanwhile finds the Lease taken.
    renew().await?;
    let renewing = async {
        loop {
            if let Err(e) = renew().await {
                return e;
            }
        }
    };
    tokio::select! {
        lost = renewing => Err(lost),
        done = meanwhile => done,
    }
}

async fn a_rival_whose_clock_is_two_minutes_off_breaks_nothing(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    for minutes in [-2, 2] {
        free_the_lease(&client).await?;
        let mut one = Replica::ready(&lab, 1, &SHORT_TERM).await?;
        leads(&client, "replica-1", TERM * 3 / 2).await?;
        // The rival takes the Lease by force: the one that led must stop, not lead beside it.
        let off = SignedDuration::from_mins(minutes);
        let ended = async {
            let (ended, ()) =
                tokio::join!(one.ends_within(TERM * 14 / 10), tokio::time::sleep(TERM * 14 / 10));
            ended.context("the old leader goes on")
        };
        rival(&client, off, ended).await?;
        // A newcomer waits while the rival renews, whatever its clock says, and leads soon after it stops.
        let newcomer = async {
            let two = Replica::ready(&lab, 2, &SHORT_TERM).await?;
            tokio::time::sleep(TERM * 13 / 10).await;
            Ok(two)
        };
        let mut two = rival(&client, off, newcomer).await?;
        ensure!(two.alive()?, "waiting is no reason to end");
        let took = leads(&client, "replica-2", TERM * 3 / 2).await?;
        println!("clock {minutes} min off: led {took:?} after the rival's last renewal");
        ensure!(took >= TERM * 7 / 10, "a full term has to pass: {took:?}");
    }
    Ok(())
}

/// Serial numbers that were served or trusted in the course of time.
async fn certificates(client: &Client) -> Result<(String, usize)> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    let data = secrets.get("patchbay-webhook-certs").await?.data.unwrap_or_default();
    let text =
        |key: &str| data.get(key).map(|b| String::from_utf8_lossy(&b.0).into_owned()).unwrap_or_default();
    Ok((text("tls.crt"), text("ca.crt").matches("BEGIN CERTIFICATE").count()))
}

async fn certificates_change_under_load_without_one_failed_admission(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    free_the_lease(&client).await?;
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    let _ = secrets.delete("patchbay-webhook-certs", &kube::api::DeleteParams::default()).await;
    let short = ["--leaf-lifetime=6s", "--ca-lifetime=12s", "--settle=500ms"];
    let mut one = Replica::ready(&lab, 1, &short).await?;
    let mut two = Replica::ready(&lab, 2, &short).await?;
    webhook_answers(&client).await?;

    let seconds = if e2e::soak() { 180 } else { 24 };
    let stop = Arc::new(AtomicBool::new(false));
    let answered = Arc::new(AtomicUsize::new(0));
    let mut load = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let (client, stop, answered) = (client.clone(), Arc::clone(&stop), Arc::clone(&answered));
        load.spawn(async move {
            let mut failed = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let outcome = admission(&client, "nobody").await;
                answered.fetch_add(1, Ordering::Relaxed);
                if !refused_by_us(&outcome) {
                    failed.push(format!("{outcome:?}"));
                }
            }
            failed
        });
    }
    let (mut leaves, mut bundles, mut authorities) = (Vec::new(), Vec::new(), 0);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(seconds) {
        let (leaf, count) = certificates(&client).await?;
        if leaves.last() != Some(&leaf) {
            leaves.push(leaf);
        }
        if bundles.last() != Some(&count) {
            authorities += usize::from(bundles.last().is_some_and(|last| count > *last));
            bundles.push(count);
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    stop.store(true, Ordering::Relaxed);
    let failed: Vec<String> = load.join_all().await.into_iter().flatten().collect();
    let answered = answered.load(Ordering::Relaxed);
    println!(
        "{answered} admissions, {} failed, {} certificates served, bundle sizes {bundles:?}",
        failed.len(),
        leaves.len()
    );
    ensure!(
        failed.is_empty(),
        "{} of {answered} failed, first: {:?}\n{}\n{}",
        failed.len(),
        failed.first(),
        one.tail(),
        two.tail()
    );
    ensure!(answered > 100, "too little load to tell: {answered}");
    ensure!(
        leaves.len() >= 4 && authorities >= 2,
        "too few changes to tell: {} certificates, bundles {bundles:?}",
        leaves.len()
    );
    ensure!(one.alive()? && two.alive()?, "no restart is needed");
    Ok(())
}

async fn damaged_certificates_and_bundles_are_repaired(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    free_the_lease(&client).await?;
    let _one = Replica::ready(&lab, 1, &[]).await?;
    webhook_answers(&client).await?;
    let mangle = [
        r#"[{"op":"replace","path":"/webhooks/0/clientConfig/caBundle","value":"bm90aGluZw=="}]"#,
        r#"[{"op":"remove","path":"/webhooks/0/clientConfig/caBundle"}]"#,
    ];
    let good = bundle(&client).await?;
    ensure!(good.contains("BEGIN CERTIFICATE"), "{good}");
    for patch in mangle {
        // The API server itself may refuse a bundle that is none.
        let _ =
            lab.kubectl(&["patch", "validatingwebhookconfiguration", "patchbay", "--type=json", "-p", patch]);
        wait::until(Duration::from_secs(5), "the bundle to be mended", || async {
            Ok((bundle(&client).await? == good).then_some(()))
        })
        .await?;
        webhook_answers(&client).await?;
    }
    let manifests = patchbay::manifests_dir();
    lab.kubectl(&["apply", "-f", manifests.to_str().context("a path in UTF-8")?])?;
    let outcome = admission(&client, "nobody").await;
    ensure!(refused_by_us(&outcome), "an apply of the manifests must not interrupt admission: {outcome:?}");
    let secrets = ["-n", NAMESPACE, "patch", "secret", "patchbay-webhook-certs", "--type=merge", "-p"];
    for patch in [
        r#"{"data":{"tls.crt":"Z2FyYmFnZQ==","tls.key":"Z2FyYmFnZQ=="}}"#,
        r#"{"data":{"ca.key":"Z2FyYmFnZQ=="}}"#,
        r#"{"data":{"ca.crt":""}}"#,
    ] {
        lab.kubectl(&[&secrets[..], &[patch]].concat())?;
        wait::until(Duration::from_secs(30), &format!("the Secret to be mended after {patch}"), || async {
            let api: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
            let data = api.get("patchbay-webhook-certs").await?.data.unwrap_or_default();
            let whole = |key: &str| data.get(key).is_some_and(|b| b.0.starts_with(b"-----BEGIN"));
            Ok(["tls.crt", "tls.key", "ca.crt", "ca.key"].into_iter().all(whole).then_some(()))
        })
        .await?;
        webhook_answers(&client).await?;
    }
    lab.kubectl(&["-n", NAMESPACE, "delete", "secret", "patchbay-webhook-certs"])?;
    wait::until(Duration::from_secs(20), "a new Secret", || async {
        certificates(&client).await.map(|_| Some(()))
    })
    .await?;
    webhook_answers(&client).await
}
