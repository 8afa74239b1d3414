//! Patchbay on two nodes, installed from its image and its manifests as a user would do it.
#![allow(clippy::print_stdout, reason = "a test without the standard harness prints what it measured")]

use std::{
    collections::BTreeMap,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use api::NodeNetwork;
use e2e::{Suite, patchbay, tests};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, Config, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use lab::{
    Lab, Shape,
    audit::{Asked, Mark},
    scene::{Scene, pod},
    wait,
};
use serde_json::{Value, json};

const NAMESPACE: &str = patchbay::NAMESPACE;

fn main() -> ExitCode {
    Suite {
        name: "t-cluster",
        shape: Shape::Nodes(2),
        set_up: |lab| Box::pin(async move { patchbay::install(&lab).await }),
        tests: tests![
            every_node_publishes_its_nics_and_its_vtep_address,
            nothing_is_written_while_nothing_changes,
            twenty_pods_starting_cause_no_write,
            a_new_nic_shows_within_1_s_and_goes_as_fast,
            a_flapping_nic_costs_at_most_one_write_a_second,
            what_people_do_to_a_nodenetwork_is_repaired,
            the_webhook_is_reached_through_its_service,
            a_node_daemon_can_write_only_its_own_nodes_objects,
            both_programs_run_under_the_installed_roles_without_one_refusal,
            no_container_is_privileged_and_the_image_tells_its_commit,
            a_leader_pod_that_is_deleted_is_followed_within_15_s,
            a_silent_api_server_is_survived,
            what_happens_during_a_partition_is_published_after_it,
            a_node_that_reboots_joins_or_leaves_is_followed,
            kubernetes_can_be_left_without_patchbay_and_get_it_back,
        ],
    }
    .run()
}

fn networks(client: &Client) -> Api<NodeNetwork> {
    Api::all(client.clone())
}

/// The interfaces that a node publishes, by name.
async fn interfaces(client: &Client, node: &str) -> Result<BTreeMap<String, Value>> {
    let object = networks(client).get(node).await?;
    let status = serde_json::to_value(object.status)?;
    let list = status["interfaces"].as_array().cloned().unwrap_or_default();
    Ok(list.into_iter().map(|i| (i["name"].as_str().unwrap_or_default().to_owned(), i)).collect())
}

async fn shows(client: &Client, node: &str, nic: &str, there: bool, within: Duration) -> Result<Duration> {
    let start = Instant::now();
    let what = format!("{nic} to {} NodeNetwork {node}", if there { "appear in" } else { "leave" });
    wait::until(within, &what, || async {
        Ok((interfaces(client, node).await?.contains_key(nic) == there).then_some(()))
    })
    .await?;
    Ok(start.elapsed())
}

/// What the two programs wrote since the mark, leases apart: these are renewed all the time.
fn writes(lab: &Lab, mark: Mark) -> Result<Vec<Asked>> {
    let ours = |a: &Asked| a.agent.starts_with("patchbay-") && a.is_write() && a.resource != "leases";
    Ok(lab.asked_since(mark)?.into_iter().filter(ours).collect())
}

async fn every_node_publishes_its_nics_and_its_vtep_address(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    for (node, address) in [("node-1", "172.30.0.11"), ("node-2", "172.30.0.12")] {
        let found = interfaces(&client, node).await?;
        ensure!(found.keys().eq(["eth0", "eth1", "eth2"]), "{found:#?}");
        let first = &found["eth0"];
        ensure!(first["defaultRoute"] == true && first["state"] == "Up" && first["mtu"] == 1500, "{first}");
        ensure!(first["addresses"][0] == format!("{address}/24"), "{first}");
        ensure!(found["eth1"].get("defaultRoute").is_none_or(|v| v == false), "{}", found["eth1"]);
        let mac = lab.node(node).output(&["cat", "/sys/class/net/eth1/address"])?;
        ensure!(found["eth1"]["mac"] == mac.trim(), "{}", found["eth1"]);
        let object = networks(&client).get(node).await?;
        let status = serde_json::to_value(&object.status)?;
        ensure!(status["vtep"]["address"] == address && status["vtep"]["interface"] == "eth0", "{status}");
        let owners = object.metadata.owner_references.unwrap_or_default();
        ensure!(owners.len() == 1 && owners[0].kind == "Node" && owners[0].name == node, "{owners:?}");
    }
    let table = lab.kubectl(&["get", "nnet"])?;
    ensure!(table.contains("172.30.0.11") && table.contains("eth0"), "{table}");
    Ok(())
}

async fn nothing_is_written_while_nothing_changes(lab: Lab) -> Result<()> {
    let quiet = Duration::from_secs(if e2e::soak() { 120 } else { 15 });
    let mark = lab.audit_mark()?;
    tokio::time::sleep(quiet).await;
    let found = writes(&lab, mark)?;
    println!("{} writes in {quiet:?} at rest", found.len());
    ensure!(found.is_empty(), "{found:?}");
    Ok(())
}

async fn twenty_pods_starting_cause_no_write(lab: Lab) -> Result<()> {
    let mark = lab.audit_mark()?;
    Scene::play(&lab, "twenty", async |scene: &Scene| {
        let names: Vec<String> = (0..20).map(|n| format!("p{n}")).collect();
        for (number, name) in names.iter().enumerate() {
            scene.create(pod(name).on(if number % 2 == 0 { "node-1" } else { "node-2" })).await?;
        }
        for name in &names {
            scene.ready(name).await?;
        }
        let links = lab.node("node-1").output(&["ls", "/sys/class/net"])?;
        ensure!(links.matches("veth").count() >= 10, "the pods have links: {links}");
        Ok(())
    })
    .await?;
    let found = writes(&lab, mark)?;
    ensure!(found.is_empty(), "{found:?}");
    Ok(())
}

async fn a_new_nic_shows_within_1_s_and_goes_as_fast(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let node = lab.node("node-2");
    for round in 0..if e2e::soak() { 50 } else { 3 } {
        // A second after the last write: the promise is for a node at rest, and at most one write a second.
        let mark = lab.audit_mark()?;
        tokio::time::sleep(Duration::from_millis(1100)).await;
        ensure!(writes(&lab, mark)?.is_empty(), "the node is not at rest");
        node.output(&[
            "ip",
            "link",
            "add",
            "nic9",
            "up",
            "mtu",
            "1400",
            "address",
            "02:00:00:00:09:01",
            "type",
            "veth",
            "peer",
            "vethnic9",
        ])?;
        let came = shows(&client, "node-2", "nic9", true, Duration::from_secs(1)).await?;
        let nic = interfaces(&client, "node-2").await?.remove("nic9").context("the NIC")?;
        ensure!(nic["mac"] == "02:00:00:00:09:01" && nic["mtu"] == 1400 && nic["kind"] == "veth", "{nic}");
        node.output(&["ip", "link", "del", "nic9"])?;
        let went = shows(&client, "node-2", "nic9", false, Duration::from_millis(1500)).await?;
        println!("round {round}: shown after {came:?}, gone after {went:?}");
        ensure!(came <= Duration::from_secs(1), "{came:?}");
        let found = writes(&lab, mark)?;
        ensure!(found.len() <= 3, "{found:?}");
    }
    Ok(())
}

async fn a_flapping_nic_costs_at_most_one_write_a_second(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let node = lab.node("node-1");
    let (mark, begun) = (lab.audit_mark()?, Instant::now());
    while begun.elapsed() < Duration::from_secs(5) {
        for state in ["down", "up"] {
            node.output(&["ip", "link", "set", "eth2", state])?;
        }
    }
    let seconds = begun.elapsed().as_secs();
    wait::until(Duration::from_secs(3), "the last state to be published", || async {
        Ok((interfaces(&client, "node-1").await?["eth2"]["state"] == "Up").then_some(()))
    })
    .await?;
    let found = writes(&lab, mark)?;
    println!("{} writes in {seconds} s of flapping", found.len());
    ensure!(!found.is_empty() && found.len() as u64 <= seconds + 2, "{} writes in {seconds} s", found.len());
    Ok(())
}

async fn what_people_do_to_a_nodenetwork_is_repaired(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let api = networks(&client);
    let before = api.get("node-1").await?;
    let lie = json!({"status": {"vtep": {"address": "192.0.2.1", "interface": "eth9", "mtu": 1500}, "interfaces": []}});
    api.patch_status("node-1", &PatchParams::default(), &Patch::Merge(&lie))
        .await
        .context("edit the status")?;
    wait::until(Duration::from_secs(3), "the status to tell the truth", || async {
        Ok((api.get("node-1").await?.status == before.status).then_some(()))
    })
    .await?;
    let foreign = json!({"metadata": {"ownerReferences": [
        {"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "00000000-0000-0000-0000-000000000000"},
    ]}});
    api.patch("node-1", &PatchParams::default(), &Patch::Merge(&foreign))
        .await
        .context("give it another owner")?;
    wait::until(Duration::from_secs(5), "the owner to be its Node alone", || async {
        let owners =
            api.get_opt("node-1").await?.and_then(|n| n.metadata.owner_references).unwrap_or_default();
        Ok((owners.len() == 1 && owners[0].kind == "Node").then_some(()))
    })
    .await?;
    api.delete("node-1", &DeleteParams::default()).await.context("delete it")?;
    wait::until(Duration::from_secs(3), "a new NodeNetwork", || async {
        let now = api.get_opt("node-1").await?;
        Ok(now
            .filter(|n| {
                n.uid() != before.uid()
                    && serde_json::to_value(&n.status).is_ok_and(|s| s["vtep"]["address"] == "172.30.0.11")
            })
            .map(|_| ()))
    })
    .await
}

async fn the_webhook_is_reached_through_its_service(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let stranger: NodeNetwork = serde_json::from_value(json!({
        "apiVersion": "patchbay.dev/v1alpha1", "kind": "NodeNetwork", "metadata": {"name": "nowhere"},
    }))?;
    match networks(&client).create(&PostParams::default(), &stranger).await {
        Err(kube::Error::Api(e)) if e.message.contains("there is no Node \"nowhere\"") => Ok(()),
        other => bail!("{other:?}"),
    }
}

/// A client with the token of the node daemon; bound to a pod or to nothing.
async fn as_daemon(lab: &Lab, bound: Option<&str>) -> Result<Client> {
    let mut arguments = vec!["-n", NAMESPACE, "create", "token", "patchbay-node"];
    if let Some(pod) = bound {
        arguments.extend(["--bound-object-kind", "Pod", "--bound-object-name", pod]);
    }
    let token = lab.kubectl(&arguments)?;
    let mut config: Config = lab.client_config().await?;
    config.auth_info =
        kube::config::AuthInfo { token: Some(token.trim().to_owned().into()), ..Default::default() };
    Ok(Client::try_from(config)?)
}

fn denied<T: std::fmt::Debug>(what: &str, outcome: Result<T, kube::Error>, words: &str) -> Result<()> {
    match outcome {
        Err(kube::Error::Api(e))
            if e.message.contains("ValidatingAdmissionPolicy") && e.message.contains(words) =>
        {
            Ok(())
        }
        other => bail!("{what}: {other:?}, expected the policy's refusal with {words:?}"),
    }
}

async fn a_node_daemon_can_write_only_its_own_nodes_objects(lab: Lab) -> Result<()> {
    let admin = lab.client().await?;
    // More rights than installed, so that what refuses is the policy and not a missing verb.
    lab.kubectl(&[
        "create",
        "clusterrole",
        "t-more",
        "--verb=*",
        "--resource=nodenetworks.patchbay.dev,nodenetworks.patchbay.dev/status",
    ])?;
    lab.kubectl(&[
        "create",
        "clusterrolebinding",
        "t-more",
        "--clusterrole=t-more",
        "--serviceaccount=patchbay-system:patchbay-node",
    ])?;
    let outcome = confinement(&lab, &admin).await;
    lab.kubectl(&["delete", "clusterrolebinding/t-more", "clusterrole/t-more"])?;
    outcome
}

async fn confinement(lab: &Lab, admin: &Client) -> Result<()> {
    let mine = networks(&as_daemon(lab, Some(&patchbay::daemon(admin, "node-1").await?)).await?);
    let nobody = networks(&as_daemon(lab, None).await?);
    let label = json!({"metadata": {"labels": {"t": "x"}}});
    let lie = json!({"status": {"vtep": {"address": "192.0.2.1", "interface": "eth0", "mtu": 1500}}});
    let params = PatchParams::default();
    // Roles take a moment to reach the authorizer.
    wait::until(Duration::from_secs(5), "the own object to be writable", || async {
        mine.patch("node-1", &params, &Patch::Merge(&label)).await?;
        Ok(Some(()))
    })
    .await?;
    for (who, api, words) in [("another node's", &mine, "own node"), ("nobody's", &nobody, "names no node")] {
        denied(&format!("{who} update"), api.patch("node-2", &params, &Patch::Merge(&label)).await, words)?;
        denied(
            &format!("{who} status"),
            api.patch_status("node-2", &params, &Patch::Merge(&lie)).await,
            words,
        )?;
        denied(&format!("{who} delete"), api.delete("node-2", &DeleteParams::default()).await, words)?;
        let all = api
            .delete_collection(
                &DeleteParams::default(),
                &ListParams::default().fields("metadata.name=node-2"),
            )
            .await;
        denied(&format!("{who} collection delete"), all, words)?;
        let fresh: NodeNetwork = serde_json::from_value(json!({
            "apiVersion": "patchbay.dev/v1alpha1", "kind": "NodeNetwork", "metadata": {"name": "node-7"},
        }))?;
        denied(&format!("{who} create"), api.create(&PostParams::default(), &fresh).await, words)?;
    }
    let foreign = json!({"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "node-2", "uid": "x"}]}});
    denied("a foreign owner", mine.patch("node-1", &params, &Patch::Merge(&foreign)).await, "own Node")?;
    denied(
        "nobody's delete of node-1",
        nobody.delete("node-1", &DeleteParams::default()).await,
        "names no node",
    )?;
    ensure!(networks(admin).get_opt("node-2").await?.is_some(), "node-2 has its object");
    Ok(())
}

async fn both_programs_run_under_the_installed_roles_without_one_refusal(lab: Lab) -> Result<()> {
    let refused: Vec<Asked> = lab
        .asked_since(Mark::START)?
        .into_iter()
        .filter(|a| a.agent.starts_with("patchbay-") && (a.code == 401 || a.code == 403))
        .collect();
    ensure!(refused.is_empty(), "{refused:#?}");
    let asked = lab.asked_since(Mark::START)?;
    for program in ["patchbay-controller", "patchbay-node"] {
        let user = format!("system:serviceaccount:{NAMESPACE}:{program}");
        ensure!(asked.iter().any(|a| a.user == user), "{program} never asked anything as {user}");
    }
    Ok(())
}

async fn no_container_is_privileged_and_the_image_tells_its_commit(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let all = pods.list(&ListParams::default()).await?.items;
    ensure!(all.len() == 4, "two controllers and two daemons: {}", all.len());
    for pod in &all {
        let spec = pod.spec.as_ref().context("a spec")?;
        for container in &spec.containers {
            let security = container.security_context.as_ref().context("a security context")?;
            ensure!(
                security.privileged != Some(true) && security.allow_privilege_escalation == Some(false),
                "{security:?}"
            );
        }
    }
    // What the kernel says of the running daemon, not what the manifest wishes.
    let status = lab.node("node-1").output(&["sh", "-c", "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline | grep -q 'patchbay node' && grep -E 'CapEff|Seccomp:' $p/status; done; true"])?;
    // NET_ADMIN is bit 12, SYS_ADMIN bit 21, and there is no other.
    ensure!(status.contains("CapEff:\t0000000000201000") && status.contains("Seccomp:\t2"), "{status}");
    let ran = lab.kubectl(&[
        "-n",
        NAMESPACE,
        "exec",
        "daemonset/patchbay-node",
        "--",
        "/usr/bin/patchbay",
        "version",
    ])?;
    let commit = ran.lines().find_map(|l| l.strip_prefix("commit ")).context("a commit")?.to_owned();
    let inspected = lab.node("node-1").output(&[
        "ctr",
        "-n",
        "k8s.io",
        "images",
        "inspect",
        "--content",
        patchbay::REFERENCE,
    ])?;
    ensure!(commit.len() >= 40 && inspected.contains(&commit), "{commit} in {inspected}");
    let size = std::fs::metadata(patchbay::image())?.len();
    ensure!(size <= 30_000_000, "{size} bytes");
    Ok(())
}

async fn a_leader_pod_that_is_deleted_is_followed_within_15_s(lab: Lab) -> Result<()> {
    let holder = || {
        lab.kubectl(&[
            "-n",
            NAMESPACE,
            "get",
            "lease",
            "patchbay-controller",
            "-o",
            "jsonpath={.spec.holderIdentity}",
        ])
    };
    let leader = holder()?;
    lab.kubectl(&["-n", NAMESPACE, "delete", "pod", &leader, "--force", "--grace-period=0"])?;
    let start = Instant::now();
    wait::until(Duration::from_secs(15), "another leader", || async {
        let now = holder()?;
        Ok((now != leader && !now.is_empty()).then_some(()))
    })
    .await?;
    println!("followed after {:?}", start.elapsed());
    patchbay::ready(&lab).await
}

async fn a_silent_api_server_is_survived(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let restarts = || {
        lab.kubectl(&[
            "-n",
            NAMESPACE,
            "get",
            "pods",
            "-l",
            "app.kubernetes.io/component=node",
            "-o",
            "jsonpath={.items[*].status.containerStatuses[0].restartCount}",
        ])
    };
    let before = restarts()?;
    // Connections that hang, then connections that are refused; something happens while nobody can be told.
    lab.pause("apiserver")?;
    lab.node("node-1").output(&["ip", "link", "add", "nic8", "type", "veth", "peer", "vethnic8"])?;
    tokio::time::sleep(Duration::from_secs(12)).await;
    lab.resume("apiserver")?;
    let took = shows(&client, "node-1", "nic8", true, Duration::from_secs(60)).await?;
    println!("published {took:?} after the API server woke up");
    lab.kill("apiserver")?;
    lab.node("node-1").output(&["ip", "link", "add", "nic7", "type", "veth", "peer", "vethnic7"])?;
    lab.up(Shape::Nodes(2)).await?;
    let took = shows(&client, "node-1", "nic7", true, Duration::from_secs(60)).await?;
    println!("published {took:?} after the API server was back");
    lab.node("node-1").output(&["ip", "link", "del", "nic7"])?;
    lab.node("node-1").output(&["ip", "link", "del", "nic8"])?;
    shows(&client, "node-1", "nic8", false, Duration::from_secs(5)).await?;
    ensure!(restarts()? == before, "no daemon was restarted: {} then {}", before, restarts()?);
    patchbay::ready(&lab).await
}

async fn what_happens_during_a_partition_is_published_after_it(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    lab.partition("node-2")?;
    lab.node("node-2").output(&["ip", "link", "add", "nic5", "type", "veth", "peer", "vethnic5"])?;
    // Long enough for a write to be given up.
    tokio::time::sleep(Duration::from_secs(12)).await;
    let unknown = !interfaces(&client, "node-2").await?.contains_key("nic5");
    lab.heal("node-2")?;
    ensure!(unknown, "a cut-off node cannot have told anybody");
    let took = shows(&client, "node-2", "nic5", true, Duration::from_secs(45)).await?;
    println!("published {took:?} after the partition ended");
    lab.node("node-2").output(&["ip", "link", "del", "nic5"])?;
    shows(&client, "node-2", "nic5", false, Duration::from_secs(5)).await?;
    patchbay::ready(&lab).await
}

async fn a_node_that_reboots_joins_or_leaves_is_followed(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    lab.node("node-1").output(&["ip", "link", "add", "nic7", "type", "veth", "peer", "vethnic7"])?;
    shows(&client, "node-1", "nic7", true, Duration::from_secs(2)).await?;
    let begun = Instant::now();
    lab.reboot("node-1").await?;
    println!("rebooted after {:?}", begun.elapsed());
    shows(&client, "node-1", "nic7", false, Duration::from_secs(60)).await.context("what a reboot took")?;
    println!("published after {:?}", begun.elapsed());
    let name = lab.add_node().await?;
    wait::until(Duration::from_secs(60), "the new node's NodeNetwork", || async {
        Ok(networks(&client).get_opt(&name).await?.filter(|n| n.status.is_some()).map(|_| ()))
    })
    .await?;
    println!("the new node published after {:?}", begun.elapsed());
    lab.remove_node(&name).await?;
    wait::until(Duration::from_secs(60), "its NodeNetwork to go with it", || async {
        Ok(networks(&client).get_opt(&name).await?.is_none().then_some(()))
    })
    .await?;
    println!("all of it took {:?}", begun.elapsed());
    // As an admin does whose machine is off: otherwise Kubernetes counts its pods for a minute.
    let lost = format!("--field-selector=spec.nodeName={name}");
    lab.kubectl(&["delete", "pods", "-A", &lost, "--force", "--grace-period=0"])?;
    patchbay::ready(&lab).await
}

async fn kubernetes_can_be_left_without_patchbay_and_get_it_back(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let links = || lab.node("node-1").output(&["ip", "-br", "link", "show", "type", "veth"]);
    let before = links()?;
    let file = patchbay::manifests().join("10-patchbay.yaml");
    let file = file.to_str().context("a path in UTF-8")?;
    let start = Instant::now();
    lab.kubectl(&["delete", "-f", file, "--timeout=90s"])?;
    println!("removed in {:?}", start.elapsed());
    ensure!(lab.kubectl(&["get", "namespace", NAMESPACE]).is_err(), "the namespace is gone");
    ensure!(networks(&client).get_opt("node-1").await?.is_some(), "objects of the kinds stay");
    let eths =
        |text: &str| text.lines().filter(|l| l.starts_with("eth")).map(str::to_owned).collect::<Vec<_>>();
    ensure!(eths(&before) == eths(&links()?) && eths(&before).len() == 3, "links are as they were");
    patchbay::install(&lab).await?;
    let mark = lab.audit_mark()?;
    lab.node("node-1").output(&["ip", "link", "add", "nic6", "type", "veth", "peer", "vethnic6"])?;
    shows(&client, "node-1", "nic6", true, Duration::from_secs(2)).await?;
    lab.node("node-1").output(&["ip", "link", "del", "nic6"])?;
    ensure!(!writes(&lab, mark)?.is_empty(), "the audit log sees it");
    Ok(())
}
