//! Controller processes against a real API server, without nodes: leader election, admission and certificate rotation.
#![allow(clippy::print_stdout, reason = "a test without the standard harness prints its measurements")]

use std::{
    fs,
    process::ExitCode,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use e2e::{
    Suite, patchbay,
    replica::{self, Replica},
    run_suites, tests,
};
use k8s_openapi::{
    api::{
        admissionregistration::v1::ValidatingWebhookConfiguration,
        coordination::v1::Lease,
        core::v1::{Pod, Secret},
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
/// The timeout for waits that are not about time; generous, since other suites run in parallel.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Counts admission requests by path.
const REQUESTS: &str = "patchbay_admission_requests_total";

fn main() -> ExitCode {
    run_suites(&[Suite {
        name: "t-controller",
        topology: Topology::ControlPlaneOnly,
        set_up: |lab| Box::pin(async move { replica::install(&lab, 2) }),
        tests: tests![
            the_webhook_denies_a_nodenetwork_without_a_node,
            a_replica_is_not_ready_before_its_caches_have_synced,
            the_leader_releases_the_lease_on_sigterm_and_exits_within_10_s,
            another_replica_leads_within_15_s_after_kill_9,
            a_paused_leader_writes_nothing_after_another_leads,
            replicas_outlive_an_api_server_that_is_silent_and_one_leads_again,
            a_rival_whose_clock_is_two_minutes_off_is_respected,
            certificates_rotate_under_load_without_a_failed_admission,
            damaged_certificates_and_bundles_are_repaired,
        ],
    }])
}

fn leases(client: &Client) -> Api<Lease> {
    Api::namespaced(client.clone(), NAMESPACE)
}

async fn holder(client: &Client) -> Result<String> {
    let lease = leases(client).get_opt("patchbay-controller").await?;
    Ok(lease.and_then(|l| l.spec?.holder_identity).unwrap_or_default())
}

async fn leads(client: &Client, name: &str) -> Result<Option<()>> {
    Ok((holder(client).await? == name).then_some(()))
}

/// Waits until a replica leads; returns how long that took.
async fn wait_for_leader(client: &Client, name: &str) -> Result<Duration> {
    let start = Instant::now();
    wait::until(TIMEOUT, &format!("{name} to lead"), || leads(client, name)).await?;
    Ok(start.elapsed())
}

async fn delete_the_lease(client: &Client) -> Result<()> {
    match leases(client).delete("patchbay-controller", &kube::api::DeleteParams::default()).await {
        Err(kube::Error::Api(e)) if e.is_not_found() => Ok(()),
        other => other.map(|_| ()).context("delete the Lease"),
    }
}

fn nodenetworks(client: &Client) -> Api<DynamicObject> {
    let gvk = GroupVersionKind::gvk("patchbay.dev", "v1alpha1", "NodeNetwork");
    Api::all_with(client.clone(), &ApiResource::from_gvk(&gvk))
}

/// Creates a NodeNetwork as a dry run: returns the result of admission.
async fn admit(client: &Client, name: &str) -> Result<(), kube::Error> {
    let object: DynamicObject = serde_json::from_value(json!({
        "apiVersion": "patchbay.dev/v1alpha1", "kind": "NodeNetwork", "metadata": {"name": name},
    }))
    .expect("an object");
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    nodenetworks(client).create(&dry, &object).await.map(|_| ())
}

const ROTATION: &str = "rotation";

/// The namespace of the launcher pods, with the ServiceAccount that the API server wants for a pod.
fn prepare_launchers(lab: &Lab) -> Result<()> {
    let manifests = json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": ROTATION}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": ROTATION}},
    ]});
    lab.kubectl(&["apply", "-f", &write(lab, "rotation.json", &manifests)?]).map(drop)
}

/// Creates a pod as a dry run that the mutating webhook reviews and leaves as it is.
async fn admit_launcher(client: &Client) -> Result<(), kube::Error> {
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "launcher", "labels": {"kubevirt.io": "virt-launcher"},
            "annotations": {"k8s.v1.cni.cncf.io/networks": "missing"}},
        "spec": {"containers": [{"name": "c", "image": "none"}]},
    }))
    .expect("a pod");
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    Api::<Pod>::namespaced(client.clone(), ROTATION).create(&dry, &pod).await.map(drop)
}

/// Whether our webhook denied the request.
fn denied_by_webhook(outcome: &Result<(), kube::Error>) -> bool {
    matches!(outcome, Err(kube::Error::Api(e)) if e.message.contains("nodenetworks.patchbay.dev") && e.message.contains("denied") && e.message.contains("Node"))
}

async fn wait_for_webhook(client: &Client) -> Result<()> {
    wait::until(TIMEOUT, "the webhook to answer", || async {
        let outcome = admit(client, "missing").await;
        ensure!(denied_by_webhook(&outcome), "{outcome:?}");
        Ok(Some(()))
    })
    .await
}

async fn the_webhook_denies_a_nodenetwork_without_a_node(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let _one = Replica::start_ready(&lab, 1, &[]).await?;
    let _two = Replica::start_ready(&lab, 2, &[]).await?;
    wait_for_webhook(&client).await?;
    let Err(kube::Error::Api(denial)) = admit(&client, "missing").await else {
        bail!("the NodeNetwork was admitted")
    };
    println!("{}", denial.message);
    lab.kubectl(&[
        "create",
        "-f",
        write(
            &lab,
            "node.json",
            &json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "present"}}),
        )?
        .as_str(),
    ])?;
    // Every replica has its own watch: ten admissions in a row, because the Service picks the replica.
    let consecutive = AtomicUsize::new(0);
    wait::until(TIMEOUT, "ten admissions in a row", || async {
        let allowed = admit(&client, "present").await.is_ok();
        consecutive
            .store(if allowed { consecutive.load(Ordering::Relaxed) + 1 } else { 0 }, Ordering::Relaxed);
        Ok((consecutive.load(Ordering::Relaxed) >= 10).then_some(()))
    })
    .await?;
    lab.kubectl(&["delete", "node", "present"]).map(|_| ())
}

fn write(lab: &Lab, name: &str, object: &serde_json::Value) -> Result<String> {
    let file = lab.kubeconfig().with_file_name(name);
    fs::write(&file, object.to_string())?;
    Ok(file.to_str().context("the path is not UTF-8")?.to_owned())
}

async fn a_replica_is_not_ready_before_its_caches_have_synced(lab: Lab) -> Result<()> {
    // The token is requested while the API server still responds.
    let first = Replica::start(&lab, 1, &[])?;
    lab.pause("apiserver")?;
    drop(first);
    let replica = Replica::restart(&lab, 1)?;
    let outcome = async {
        wait::until(TIMEOUT, "the replica to be healthy", || async {
            Ok((replica.probe("healthz") == 200).then_some(()))
        })
        .await?;
        ensure!(
            replica.probe("readyz") != 200,
            "the replica is ready although the API server does not respond"
        );
        anyhow::Ok(())
    };
    let outcome = outcome.await;
    lab.resume("apiserver")?;
    outcome?;
    wait::until(TIMEOUT, "the replica to be ready", || async {
        Ok((replica.probe("readyz") == 200).then_some(()))
    })
    .await
}

async fn the_leader_releases_the_lease_on_sigterm_and_exits_within_10_s(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    delete_the_lease(&client).await?;
    let mut one = Replica::start_ready(&lab, 1, &[]).await?;
    wait_for_leader(&client, "replica-1").await?;
    let _two = Replica::start_ready(&lab, 2, &[]).await?;
    one.signal(Signal::SIGTERM)?;
    let (status, stopped) = one.wait_for_exit_within(Duration::from_secs(10)).await?;
    ensure!(status.success(), "{status}: {}", one.tail());
    let took = wait_for_leader(&client, "replica-2").await?;
    println!("shutdown took {stopped:?}; replica-2 led {took:?} after the exit");
    Ok(())
}

async fn another_replica_leads_within_15_s_after_kill_9(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let repetitions = if e2e::soak() { 5 } else { 1 };
    for _ in 0..repetitions {
        delete_the_lease(&client).await?;
        let one = Replica::start_ready(&lab, 1, &[]).await?;
        wait_for_leader(&client, "replica-1").await?;
        let _two = Replica::start_ready(&lab, 2, &[]).await?;
        one.signal(Signal::SIGKILL)?;
        let limit = Duration::from_secs(15);
        let ((), took) = wait::within(limit, "replica-2 to lead", || leads(&client, "replica-2")).await?;
        println!("failover after kill -9: {took:?}");
    }
    Ok(())
}

async fn a_paused_leader_writes_nothing_after_another_leads(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    delete_the_lease(&client).await?;
    let mut one = Replica::start_ready(&lab, 1, &[]).await?;
    wait_for_leader(&client, "replica-1").await?;
    let two = Replica::start_ready(&lab, 2, &[]).await?;
    wait_for_webhook(&client).await?;
    one.signal(Signal::SIGSTOP)?;
    wait_for_leader(&client, "replica-2").await?;
    // With the new leader stopped too, only the old one could repair the bundle; it must not.
    two.signal(Signal::SIGSTOP)?;
    let broken = r#"[{"op":"remove","path":"/webhooks/0/clientConfig/caBundle"}]"#;
    lab.kubectl(&["patch", "validatingwebhookconfiguration", "patchbay", "--type=json", "-p", broken])?;
    let offset = lab.audit_offset()?;
    one.signal(Signal::SIGCONT)?;
    // It resumes as if it still led, and must stop without a write.
    one.wait_until_it_does_not_lead().await?;
    let ours = |a: &lab::audit::AuditedRequest| {
        a.is_write() && a.code < 300 && a.user.ends_with("patchbay-controller")
    };
    let writes: Vec<_> = lab.requests_since(offset)?.into_iter().filter(ours).collect();
    ensure!(writes.is_empty(), "{writes:?}");
    ensure!(holder(&client).await? == "replica-2", "the new leader lost the Lease");
    ensure!(
        ca_bundle(&client).await?.is_empty(),
        "the bundle was repaired while both replicas must not write"
    );
    ensure!(one.is_running()?, "the replica that lost the Lease exited");
    two.signal(Signal::SIGCONT)?;
    wait::until(TIMEOUT, "the bundle to be repaired", || async {
        Ok((!ca_bundle(&client).await?.is_empty()).then_some(()))
    })
    .await?;
    wait_for_webhook(&client).await
}

async fn replicas_outlive_an_api_server_that_is_silent_and_one_leads_again(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    delete_the_lease(&client).await?;
    let mut one = Replica::start_ready(&lab, 1, &SHORT_LEASE).await?;
    wait_for_leader(&client, "replica-1").await?;
    let mut two = Replica::start_ready(&lab, 2, &SHORT_LEASE).await?;
    wait_for_webhook(&client).await?;
    lab.pause("apiserver")?;
    let silent = one.wait_until_it_does_not_lead().await;
    let running = one.is_running()? && two.is_running()? && one.probe("readyz") == 200;
    lab.resume("apiserver")?;
    silent?;
    ensure!(running, "{}\n{}", one.tail(), two.tail());
    wait_for_webhook(&client).await?;
    wait::until(TIMEOUT, "a replica to lead", || async {
        Ok((one.metric("patchbay_leader", "")? + two.metric("patchbay_leader", "")? == 1).then_some(()))
    })
    .await?;
    ensure!(one.is_running()? && two.is_running()?, "a replica exited");
    // The new term does what the former one did.
    let broken = r#"[{"op":"remove","path":"/webhooks/0/clientConfig/caBundle"}]"#;
    lab.kubectl(&["patch", "validatingwebhookconfiguration", "patchbay", "--type=json", "-p", broken])?;
    wait::until(TIMEOUT, "the bundle to be repaired", || async {
        Ok((!ca_bundle(&client).await?.is_empty()).then_some(()))
    })
    .await
}

/// The CA bundle of the first webhook.
async fn ca_bundle(client: &Client) -> Result<String> {
    let api: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
    let hooks = api.get("patchbay").await?.webhooks.unwrap_or_default();
    let first = hooks.into_iter().next().and_then(|hook| hook.client_config.ca_bundle);
    Ok(first.map(|b| String::from_utf8_lossy(&b.0).into_owned()).unwrap_or_default())
}

/// A shorter lease duration than the default, and the other durations in proportion: these tests mostly wait.
const LEASE_DURATION: Duration = Duration::from_secs(4);
const SHORT_LEASE: [&str; 4] =
    ["--lease-duration=4s", "--lease-renew=800ms", "--lease-retry-period=800ms", "--drain=1s"];

/// Holds the Lease as a rival whose clock is off by `skew`, until `meanwhile` is done. Returns when the rival began its last
/// renewal; `None` if the machine was so busy that the rival itself was late and lost the Lease.
async fn hold_lease_as_rival<T>(
    client: &Client,
    skew: SignedDuration,
    meanwhile: impl Future<Output = Result<T>>,
) -> Result<Option<(T, Instant)>> {
    // A Mutex, because the future of a test moves between threads.
    let renewed = Mutex::new(Instant::now());
    let last_renewal = || renewed.lock().map_or_else(|e| *e.into_inner(), |at| *at);
    let renew = async || -> Result<()> {
        *renewed.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        let now = MicroTime(Timestamp::now().checked_add(skew).context("a time")?);
        let spec = json!({"spec": {
            "holderIdentity": "rival", "leaseDurationSeconds": LEASE_DURATION.as_secs(), "renewTime": now,
        }});
        leases(client)
            .patch("patchbay-controller", &PatchParams::default(), &Patch::Merge(&spec))
            .await
            .context("the rival's renewal")?;
        tokio::time::sleep(LEASE_DURATION / 10).await;
        let holder = holder(client).await?;
        ensure!(holder == "rival", "{holder} acquired the Lease although the rival renews it");
        Ok(())
    };
    // Once first, so that `meanwhile` starts with the Lease held.
    renew().await?;
    let renewing = async {
        loop {
            let before = last_renewal();
            if let Err(e) = renew().await {
                // A replica may acquire the Lease a full duration after it saw the last renewal.
                return (before.elapsed() < LEASE_DURATION).then_some(e);
            }
        }
    };
    tokio::select! {
        lost = renewing => lost.map_or(Ok(None), Err),
        done = meanwhile => Ok(Some((done?, last_renewal()))),
    }
}

async fn a_rival_whose_clock_is_two_minutes_off_is_respected(lab: Lab) -> Result<()> {
    for minutes in [-2, 2] {
        let mut rounds = 0..5;
        while !a_rival_is_respected(&lab, SignedDuration::from_mins(minutes)).await? {
            rounds.next().context("the machine is too busy to renew a Lease in time")?;
        }
    }
    Ok(())
}

/// Returns whether the rival could renew the Lease in time.
async fn a_rival_is_respected(lab: &Lab, skew: SignedDuration) -> Result<bool> {
    let client = lab.client().await?;
    delete_the_lease(&client).await?;
    let mut one = Replica::start_ready(lab, 1, &SHORT_LEASE).await?;
    wait_for_leader(&client, "replica-1").await?;
    // The rival takes the Lease by force: the leader must not lead at the same time.
    if hold_lease_as_rival(&client, skew, one.wait_until_it_does_not_lead()).await?.is_none() {
        return Ok(false);
    }
    ensure!(one.is_running()?, "the old leader exited");
    drop(one);
    // A new replica waits while the rival renews, whatever the rival's clock says, and leads soon after it stops.
    let new_replica = async {
        let two = Replica::start_ready(lab, 2, &SHORT_LEASE).await?;
        tokio::time::sleep(LEASE_DURATION * 13 / 10).await;
        Ok(two)
    };
    let Some((mut two, renewed)) = hold_lease_as_rival(&client, skew, new_replica).await? else {
        return Ok(false);
    };
    ensure!(two.is_running()?, "a waiting replica must not exit");
    wait_for_leader(&client, "replica-2").await?;
    let took = renewed.elapsed();
    println!("clock {skew:?} off: led {took:?} after the rival's last renewal");
    ensure!(took >= LEASE_DURATION, "acquired before a full lease duration: {took:?}");
    Ok(true)
}

/// The serving certificate, and the number of CAs in the Secret.
async fn certificates(client: &Client) -> Result<(String, usize)> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    let data = secrets.get("patchbay-webhook-certs").await?.data.unwrap_or_default();
    let text =
        |key: &str| data.get(key).map(|b| String::from_utf8_lossy(&b.0).into_owned()).unwrap_or_default();
    Ok((text("tls.crt"), text("ca.crt").matches("BEGIN CERTIFICATE").count()))
}

async fn certificates_rotate_under_load_without_a_failed_admission(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    delete_the_lease(&client).await?;
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    let _ = secrets.delete("patchbay-webhook-certs", &kube::api::DeleteParams::default()).await;
    prepare_launchers(&lab)?;
    let short = ["--leaf-lifetime=24s", "--ca-lifetime=48s", "--ca-propagation-delay=1s"];
    let mut one = Replica::start_ready(&lab, 1, &short).await?;
    let mut two = Replica::start_ready(&lab, 2, &short).await?;
    wait_for_webhook(&client).await?;
    wait::until(TIMEOUT, "the mutating webhook to answer", || async {
        Ok(Some(admit_launcher(&client).await?))
    })
    .await?;
    let mutations = || anyhow::Ok(one.metric(REQUESTS, "MutatePod")? + two.metric(REQUESTS, "MutatePod")?);
    let mutations_before: u64 = mutations()?;

    let stop = Arc::new(AtomicBool::new(false));
    let admissions = Arc::new(AtomicUsize::new(0));
    let mut load = tokio::task::JoinSet::new();
    for number in 0..4 {
        let (client, stop, admissions) = (client.clone(), Arc::clone(&stop), Arc::clone(&admissions));
        load.spawn(async move {
            let mut failed = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                // Both configurations have the CA before a certificate is signed with it.
                let (admitted, outcome) = if number % 2 == 0 {
                    let outcome = admit(&client, "missing").await;
                    (denied_by_webhook(&outcome), outcome)
                } else {
                    let outcome = admit_launcher(&client).await;
                    (outcome.is_ok(), outcome)
                };
                admissions.fetch_add(1, Ordering::Relaxed);
                // Every certificate serves many admissions, and other suites get their share of the machine.
                tokio::time::sleep(Duration::from_millis(10)).await;
                if !admitted {
                    failed.push(format!("{outcome:?}"));
                }
            }
            failed
        });
    }
    let (mut leaves, mut bundles, mut new_cas) = (Vec::new(), Vec::new(), 0);
    let (rotations, limit) = if e2e::soak() { (12, TIMEOUT * 15) } else { (1, TIMEOUT * 3) };
    let start = Instant::now();
    while start.elapsed() < limit && (leaves.len() < 2 * rotations || new_cas < rotations) {
        let (leaf, count) = certificates(&client).await?;
        if leaves.last() != Some(&leaf) {
            leaves.push(leaf);
        }
        if bundles.last() != Some(&count) {
            new_cas += usize::from(bundles.last().is_some_and(|last| count > *last));
            bundles.push(count);
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    stop.store(true, Ordering::Relaxed);
    let failed: Vec<String> = load.join_all().await.into_iter().flatten().collect();
    let admissions = admissions.load(Ordering::Relaxed);
    println!(
        "{admissions} admissions, {} failed, {} certificates served in {:?}, bundle sizes {bundles:?}",
        failed.len(),
        leaves.len(),
        start.elapsed()
    );
    ensure!(
        failed.is_empty(),
        "{} of {admissions} failed, first: {:?}\n{}\n{}",
        failed.len(),
        failed.first(),
        one.tail(),
        two.tail()
    );
    ensure!(admissions > 100, "too little load: {admissions} admissions");
    let mutated: u64 = mutations()? - mutations_before;
    ensure!(mutated > 50, "only {mutated} of {admissions} were by the mutating webhook");
    ensure!(
        leaves.len() >= 2 * rotations && new_cas >= rotations,
        "too few rotations: {} certificates, bundles {bundles:?}",
        leaves.len()
    );
    ensure!(one.is_running()? && two.is_running()?, "a replica exited");
    Ok(())
}

/// Removes all certificates. An earlier test leaves CAs that expire within seconds, and a controller drops expired CAs from
/// the bundle.
fn reset_certificates(lab: &Lab) -> Result<()> {
    lab.kubectl(&["delete", "validatingwebhookconfiguration", "patchbay"])?;
    // The leader creates it again.
    lab.kubectl(&["delete", "mutatingwebhookconfiguration", "patchbay", "--ignore-not-found"])?;
    lab.kubectl(&["-n", NAMESPACE, "delete", "secret", "patchbay-webhook-certs", "--ignore-not-found"])?;
    let manifests = patchbay::manifests_dir();
    lab.kubectl(&["apply", "-f", manifests.to_str().context("the path is not UTF-8")?]).map(drop)
}

async fn damaged_certificates_and_bundles_are_repaired(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    delete_the_lease(&client).await?;
    reset_certificates(&lab)?;
    // The API server must not call the replica of an earlier test, which no longer runs.
    replica::set_webhook_endpoints(&lab, &[1])?;
    let _one = Replica::start_ready(&lab, 1, &[]).await?;
    wait_for_webhook(&client).await?;
    let damage = [
        r#"[{"op":"replace","path":"/webhooks/0/clientConfig/caBundle","value":"bm90aGluZw=="}]"#,
        r#"[{"op":"remove","path":"/webhooks/0/clientConfig/caBundle"}]"#,
    ];
    let good = ca_bundle(&client).await?;
    ensure!(good.contains("BEGIN CERTIFICATE"), "{good}");
    for patch in damage {
        // The API server itself may reject an invalid bundle.
        let _ =
            lab.kubectl(&["patch", "validatingwebhookconfiguration", "patchbay", "--type=json", "-p", patch]);
        wait::until(TIMEOUT, "the bundle to be repaired", || async {
            Ok((ca_bundle(&client).await? == good).then_some(()))
        })
        .await?;
        wait_for_webhook(&client).await?;
    }
    let manifests = patchbay::manifests_dir();
    lab.kubectl(&["apply", "-f", manifests.to_str().context("the path is not UTF-8")?])?;
    let outcome = admit(&client, "missing").await;
    ensure!(
        denied_by_webhook(&outcome),
        "an apply of the manifests must not interrupt admission: {outcome:?}"
    );
    let secrets = ["-n", NAMESPACE, "patch", "secret", "patchbay-webhook-certs", "--type=merge", "-p"];
    for patch in [
        r#"{"data":{"tls.crt":"Z2FyYmFnZQ==","tls.key":"Z2FyYmFnZQ=="}}"#,
        r#"{"data":{"ca.key":"Z2FyYmFnZQ=="}}"#,
        r#"{"data":{"ca.crt":""}}"#,
    ] {
        lab.kubectl(&[&secrets[..], &[patch]].concat())?;
        wait::until(TIMEOUT, &format!("the Secret to be repaired after {patch}"), || async {
            let api: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
            let data = api.get("patchbay-webhook-certs").await?.data.unwrap_or_default();
            let is_pem = |key: &str| data.get(key).is_some_and(|b| b.0.starts_with(b"-----BEGIN"));
            Ok(["tls.crt", "tls.key", "ca.crt", "ca.key"].into_iter().all(is_pem).then_some(()))
        })
        .await?;
        wait_for_webhook(&client).await?;
    }
    lab.kubectl(&["-n", NAMESPACE, "delete", "secret", "patchbay-webhook-certs"])?;
    wait::until(TIMEOUT, "a new Secret", || async { certificates(&client).await.map(|_| Some(())) }).await?;
    wait_for_webhook(&client).await
}
