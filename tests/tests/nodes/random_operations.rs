//! Random creates, edits, deletions, damage and kills on two nodes. Links and objects must converge to a model.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use api::NodeNetwork;
use e2e::{
    bridge::{self, attached_pod, networks},
    patchbay,
    random::SplitMix64,
};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use lab::{
    Lab,
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use serde_json::{Value, json};

use crate::NODES;

const NAMES: [&str; 3] = ["red", "green", "gold"];
const STEPS: u64 = 6;
/// Long enough for a new leader to take over from a killed one.
const CONVERGENCE_TIMEOUT: Duration = Duration::from_secs(60);

/// The desired state of a network.
#[derive(Clone, Debug, PartialEq)]
struct DesiredNetwork {
    mtu: i64,
    overlay: Option<u64>,
    uplink: bool,
    only_node_1: bool,
}

impl DesiredNetwork {
    fn random(name: &str, rng: &mut SplitMix64) -> Self {
        let index = NAMES.iter().position(|n| *n == name).unwrap_or(0) as u64;
        let kind = rng.below(3);
        Self {
            mtu: rng.choose(&[1300, 1400, 1450]),
            overlay: (kind == 1).then_some(100 + index),
            // Two networks with the same uplink would conflict: only one of them may have it.
            uplink: kind == 2 && name == "gold",
            only_node_1: rng.below(4) == 0,
        }
    }

    fn spec(&self) -> Value {
        let mut spec = json!({"mtu": self.mtu, "attachment": {"namespaces": ["default"]}});
        if let Some(vni) = self.overlay {
            spec["overlay"] = json!({"vni": vni});
        }
        if self.uplink {
            spec["uplink"] = json!("eth1");
        }
        if self.only_node_1 {
            spec["nodeSelector"] = json!({"matchLabels": {"kubernetes.io/hostname": "node-1"}});
        }
        spec
    }
}

type Model = BTreeMap<&'static str, DesiredNetwork>;

pub async fn random_operations_converge_to_the_model(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let count = if e2e::soak() { 200 } else { 14 };
    let clean = cluster_state(&lab, &client).await?;
    for seed in 0..count {
        let mut rng = SplitMix64(seed);
        let mut model = Model::new();
        let mut operations = format!("seed {seed}:");
        for _ in 0..STEPS {
            let operation = random_operation(&lab, &client, &mut model, &mut rng).await?;
            write!(operations, " {operation};")?;
        }
        println!("{operations}");
        wait_for_convergence(&lab, &client, &model).await.with_context(|| operations.clone())?;
        for name in model.keys() {
            bridge::delete_network(&client, name).await?;
        }
        for name in NAMES {
            bridge::wait_deleted(&client, name).await.with_context(|| operations.clone())?;
        }
        wait::until(bridge::WAIT_TIMEOUT, "the initial state", || async {
            let now = cluster_state(&lab, &client).await?;
            ensure!(now == clean, "before:\n{clean}\nafter:\n{now}");
            Ok(Some(()))
        })
        .await
        .with_context(|| operations.clone())?;
    }
    Ok(())
}

/// Performs one random operation and describes it.
async fn random_operation(
    lab: &Lab,
    client: &Client,
    model: &mut Model,
    rng: &mut SplitMix64,
) -> Result<String> {
    let name = rng.choose(&NAMES);
    let node = rng.choose(&NODES);
    match (model.get(name).cloned(), rng.below(16)) {
        (None, _) => {
            // An earlier network of this name may still be terminating.
            bridge::wait_deleted(client, name).await?;
            let desired = DesiredNetwork::random(name, rng);
            retry_webhook(|| bridge::create_network(client, name, desired.spec())).await?;
            model.insert(name, desired);
            Ok(format!("create {name}"))
        }
        (Some(_), 0 | 1) => {
            bridge::delete_network(client, name).await?;
            model.remove(name);
            Ok(format!("delete {name}"))
        }
        (Some(mut desired), 2..=5) => {
            desired.mtu = rng.choose(&[1300, 1400, 1450]);
            desired.only_node_1 = rng.below(3) == 0;
            if desired.overlay.is_none() && name == "gold" {
                desired.uplink = rng.below(2) == 0;
            }
            let mut spec = desired.spec();
            for field in ["uplink", "nodeSelector"] {
                if spec.get(field).is_none() {
                    spec[field] = Value::Null;
                }
            }
            let patch = Patch::Merge(json!({"spec": spec}));
            let params = PatchParams::default();
            let all = networks(client);
            retry_webhook(|| async { all.patch(name, &params, &patch).await.context("edit") }).await?;
            model.insert(name, desired);
            Ok(format!("edit {name}"))
        }
        (Some(_), 6 | 7) => {
            kill(lab, client, node, "node").await?;
            Ok(format!("kill the daemon of {node}"))
        }
        (Some(_), 8) => {
            kill(lab, client, node, "controller").await?;
            Ok(format!("kill a controller on {node}"))
        }
        (Some(_), _) => {
            let (bridge, vxlan) = (format!("br-{name}"), format!("vx-{name}"));
            let damage = rng.choose(&[
                &["ip", "link", "del", "BRIDGE"][..],
                &["ip", "link", "set", "BRIDGE", "down"],
                &["ip", "link", "set", "BRIDGE", "mtu", "900"],
                &["ip", "link", "set", "BRIDGE", "alias", "mine"],
                &["ip", "link", "del", "VXLAN"],
                &["ip", "link", "set", "VXLAN", "nomaster"],
                &["bridge", "fdb", "append", "00:00:00:00:00:00", "dev", "VXLAN", "dst", "192.0.2.7"],
            ]);
            let command: Vec<&str> = damage
                .iter()
                .map(|argument| match *argument {
                    "BRIDGE" => bridge.as_str(),
                    "VXLAN" => vxlan.as_str(),
                    argument => argument,
                })
                .collect();
            // Half of the damage hits a ready network, half one that may still be created.
            if rng.below(2) == 0 {
                bridge::wait_ready(client, name).await?;
            }
            // The link may not exist.
            let done = lab.node(node).output(&command).is_ok();
            Ok(format!("{} on {node}{}", command.join(" "), if done { "" } else { " (failed)" }))
        }
    }
}

/// Retries a request, as a user would, while the webhook fails because its controller was just killed.
async fn retry_webhook<T, F: Future<Output = Result<T>>>(change: impl Fn() -> F) -> Result<T> {
    wait::until(CONVERGENCE_TIMEOUT, "the webhook to respond", || async {
        match change().await {
            Err(error) if format!("{error:#}").contains("failed calling webhook") => Ok(None),
            other => Ok(Some(other)),
        }
    })
    .await?
}

/// Kills the processes of a component on a node, and deletes their pods: the kubelet would back off for minutes from a
/// container that crashes repeatedly.
async fn kill(lab: &Lab, client: &Client, node: &str, component: &str) -> Result<()> {
    let script = format!(
        "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline 2>/dev/null | grep -q '^/usr/bin/patchbay {component} ' && kill -9 ${{p#/proc/}}; done; true"
    );
    lab.node(node).output(&["sh", "-c", &script])?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), patchbay::NAMESPACE);
    let params = ListParams::default()
        .labels(&format!("app.kubernetes.io/component={component}"))
        .fields(&format!("spec.nodeName={node}"));
    pods.delete_collection(&DeleteParams::default().grace_period(0), &params)
        .await
        .context("delete the pods")?;
    Ok(())
}

/// The links of a node according to the model.
fn expected_links(model: &Model, node: &str) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for (name, desired) in model {
        if desired.only_node_1 && node != "node-1" {
            continue;
        }
        let mtu = desired.mtu;
        all.insert(format!("br-{name} bridge mtu {mtu} up"));
        if desired.overlay.is_some() {
            all.insert(format!("vx-{name} vxlan mtu {mtu} up port of br-{name}"));
        }
        if desired.uplink {
            all.insert(format!("eth1 port of br-{name}"));
        }
    }
    all
}

/// The links that a node has.
fn observed_links(lab: &Lab, node: &str) -> Result<BTreeSet<String>> {
    let links: Vec<Value> = serde_json::from_str(&lab.node(node).output(&["ip", "-d", "-j", "link"])?)?;
    let mut all = BTreeSet::new();
    for link in links {
        let text = |key: &str| link[key].as_str().unwrap_or_default().to_owned();
        let (name, kind) = (text("ifname"), link["linkinfo"]["info_kind"].as_str().unwrap_or_default());
        let port = link["master"].as_str().map(|master| format!(" port of {master}")).unwrap_or_default();
        let up = if link["flags"].to_string().contains("\"UP\"") { "up" } else { "down" };
        match kind {
            "bridge" | "vxlan" => {
                all.insert(format!("{name} {kind} mtu {} {up}{port}", link["mtu"]));
            }
            _ if name == "eth1" && !port.is_empty() => {
                all.insert(format!("{name}{port}"));
            }
            _ => {}
        }
    }
    Ok(all)
}

async fn wait_for_convergence(lab: &Lab, client: &Client, model: &Model) -> Result<()> {
    wait::until(CONVERGENCE_TIMEOUT, "links and objects to match the model", || async {
        for node in NODES {
            let (expected, found) = (expected_links(model, node), observed_links(lab, node)?);
            ensure!(expected == found, "{node}: expected {expected:#?}, found {found:#?}");
            let object = Api::<NodeNetwork>::all(client.clone()).get(node).await?;
            let listed: BTreeSet<String> = object
                .status
                .iter()
                .flat_map(|s| &s.networks)
                .map(|n| format!("{} {}", n.name, n.ready))
                .collect();
            let here = model.iter().filter(|(_, w)| node == "node-1" || !w.only_node_1);
            let desired: BTreeSet<String> = here.map(|(name, _)| format!("{name} true")).collect();
            ensure!(listed == desired, "{node} lists {listed:?}, expected {desired:?}");
            let object = Api::<Node>::all(client.clone()).get(node).await?;
            let labels = object.labels().keys().filter_map(|k| k.strip_prefix("network.patchbay.dev/"));
            let labels: BTreeSet<String> = labels.map(|name| format!("{name} true")).collect();
            ensure!(labels == desired, "{node} has labels {labels:?}, expected {desired:?}");
        }
        let nads = lab.kubectl(&["-n", "default", "get", "net-attach-def", "-o", "name"])?;
        let nads: BTreeSet<&str> = nads.lines().filter_map(|line| line.rsplit('/').next()).collect();
        ensure!(nads.iter().eq(model.keys().collect::<BTreeSet<_>>()), "NADs: {nads:?}");
        for (name, desired) in model {
            let object = networks(client).get(name).await?;
            let mtu = object.status.as_ref().and_then(|s| s.mtu).unwrap_or_default();
            ensure!(i64::from(mtu) == desired.mtu, "{name}: {:?}", object.status);
            ensure!(bridge::condition(&object, "Ready").0 == "True", "{name}: {:?}", object.status);
        }
        Ok(Some(()))
    })
    .await
}

/// Everything that Patchbay could leave behind, as text.
async fn cluster_state(lab: &Lab, client: &Client) -> Result<String> {
    let mut text = String::new();
    for node in NODES {
        text += &bridge::host_state(lab, node)?;
        text += &lab.node(node).output(&["ls", "/var/lib/patchbay/networks"])?;
        let object = Api::<Node>::all(client.clone()).get(node).await?;
        for label in object.labels().keys().filter(|key| key.contains("patchbay")) {
            writeln!(text, "{node} {label}")?;
        }
    }
    text += &lab.kubectl(&["get", "net-attach-def", "-A", "-o", "name"])?;
    Ok(text)
}

pub async fn a_pod_created_during_deletion_is_rejected_or_keeps_its_network(lab: Lab) -> Result<()> {
    let rounds = if e2e::soak() { 60 } else { 6 };
    let (mut rejected, mut admitted) = (0, 0);
    with_namespace(&lab, "race", async |ns: &TestNamespace| {
        let client = &ns.client;
        let pods: Api<Pod> = ns.pods();
        for round in 0..rounds {
            let name = format!("race-{round}");
            bridge::start_network(client, &name, json!({"attachment": {"namespaces": [ns.namespace]}}))
                .await?;
            let pod: Pod = serde_json::from_value(attached_pod("client", "node-1", &name).object())?;
            let mut rng = SplitMix64(round);
            let delay = Duration::from_millis(rng.below(200));
            let params = PostParams::default();
            let create = async {
                tokio::time::sleep(delay).await;
                pods.create(&params, &pod).await
            };
            let delete = async {
                tokio::time::sleep(Duration::from_millis(100)).await;
                bridge::delete_network(client, &name).await
            };
            let (created, deleted) = tokio::join!(create, delete);
            deleted?;
            match created {
                Err(kube::Error::Api(e)) if e.message.contains(&name) => rejected += 1,
                Err(other) => bail!("round {round}: {other}"),
                Ok(_) => {
                    // An admitted pod must start on its network and keep it.
                    let started = wait::until(
                        Duration::from_secs(60),
                        "the pod to be ready, or its network to be deleted",
                        || async {
                            if networks(client).get_opt(&name).await?.is_none() {
                                return Ok(Some(false));
                            }
                            Ok(ns.wait_pod_ready("client").await.is_ok().then_some(true))
                        },
                    )
                    .await?;
                    ensure!(started, "round {round}: {name} was deleted although its pod was admitted");
                    admitted += 1;
                    ensure!(
                        networks(client).get_opt(&name).await?.is_some(),
                        "round {round}: the network was deleted"
                    );
                    pods.delete("client", &DeleteParams::default().grace_period(0)).await?;
                    wait::until(bridge::WAIT_TIMEOUT, "the pod to be deleted", || async {
                        Ok(pods.get_opt("client").await?.is_none().then_some(()))
                    })
                    .await?;
                }
            }
            bridge::wait_deleted(client, &name).await?;
        }
        Ok(())
    })
    .await?;
    println!("{rounds} rounds: {rejected} pods rejected, {admitted} admitted and kept their network");
    Ok(())
}
