//! Random histories of bridge networks on two nodes: whatever is made, edited, deleted, damaged and killed, in the end
//! links and objects are what the model says.

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
/// Long enough for a controller that was killed to be followed.
const CONVERGED: Duration = Duration::from_secs(60);

/// SplitMix64: the same histories for the same seed, everywhere.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides
    }

    fn one<T: Copy>(&mut self, all: &[T]) -> T {
        all[usize::try_from(self.roll(all.len() as u64)).unwrap_or(0)]
    }
}

/// What a network should be.
#[derive(Clone, Debug, PartialEq)]
struct Wanted {
    mtu: i64,
    overlay: Option<u64>,
    uplink: bool,
    only_node_1: bool,
}

impl Wanted {
    fn random(name: &str, dice: &mut Dice) -> Self {
        let index = NAMES.iter().position(|n| *n == name).unwrap_or(0) as u64;
        let kind = dice.roll(3);
        Self {
            mtu: dice.one(&[1300, 1400, 1450]),
            overlay: (kind == 1).then_some(100 + index),
            // Two networks that want one NIC clash: the model gives it to one name only.
            uplink: kind == 2 && name == "gold",
            only_node_1: dice.roll(4) == 0,
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

type Model = BTreeMap<&'static str, Wanted>;

pub async fn random_histories_end_as_the_model_says(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let count = if e2e::soak() { 200 } else { 14 };
    let clean = state(&lab, &client).await?;
    for seed in 0..count {
        let mut dice = Dice(seed);
        let mut model = Model::new();
        let mut told = format!("seed {seed}:");
        for _ in 0..STEPS {
            let step = step(&lab, &client, &mut model, &mut dice).await?;
            write!(told, " {step};")?;
        }
        println!("{told}");
        converged(&lab, &client, &model).await.with_context(|| told.clone())?;
        for name in model.keys() {
            bridge::delete_network(&client, name).await?;
        }
        for name in NAMES {
            bridge::wait_deleted(&client, name, CONVERGED).await.with_context(|| told.clone())?;
        }
        wait::until(Duration::from_secs(5), "the state of the beginning", || async {
            let now = state(&lab, &client).await?;
            ensure!(now == clean, "before:\n{clean}\nafter:\n{now}");
            Ok(Some(()))
        })
        .await
        .with_context(|| told.clone())?;
    }
    Ok(())
}

/// One thing that happens.
async fn step(lab: &Lab, client: &Client, model: &mut Model, dice: &mut Dice) -> Result<String> {
    let name = dice.one(&NAMES);
    let node = dice.one(&NODES);
    match (model.get(name).cloned(), dice.roll(16)) {
        (None, _) => {
            // The one of this name may still be on its way out.
            bridge::wait_deleted(client, name, CONVERGED).await?;
            let wanted = Wanted::random(name, dice);
            insist(|| bridge::create_network(client, name, wanted.spec())).await?;
            model.insert(name, wanted);
            Ok(format!("create {name}"))
        }
        (Some(_), 0 | 1) => {
            bridge::delete_network(client, name).await?;
            model.remove(name);
            Ok(format!("delete {name}"))
        }
        (Some(mut wanted), 2..=5) => {
            wanted.mtu = dice.one(&[1300, 1400, 1450]);
            wanted.only_node_1 = dice.roll(3) == 0;
            if wanted.overlay.is_none() && name == "gold" {
                wanted.uplink = dice.roll(2) == 0;
            }
            let mut spec = wanted.spec();
            for field in ["uplink", "nodeSelector"] {
                if spec.get(field).is_none() {
                    spec[field] = Value::Null;
                }
            }
            let patch = Patch::Merge(json!({"spec": spec}));
            let params = PatchParams::default();
            let all = networks(client);
            insist(|| async { all.patch(name, &params, &patch).await.context("edit") }).await?;
            model.insert(name, wanted);
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
            let damage = dice.one(&[
                &["ip", "link", "del", "BRIDGE"][..],
                &["ip", "link", "set", "BRIDGE", "down"],
                &["ip", "link", "set", "BRIDGE", "mtu", "900"],
                &["ip", "link", "set", "BRIDGE", "alias", "mine"],
                &["ip", "link", "del", "VXLAN"],
                &["ip", "link", "set", "VXLAN", "nomaster"],
                &["bridge", "fdb", "append", "00:00:00:00:00:00", "dev", "VXLAN", "dst", "192.0.2.7"],
            ]);
            let words: Vec<&str> = damage
                .iter()
                .map(|word| match *word {
                    "BRIDGE" => bridge.as_str(),
                    "VXLAN" => vxlan.as_str(),
                    word => word,
                })
                .collect();
            // Half of the damage hits a network that works, half one that is being made.
            if dice.roll(2) == 0 {
                bridge::wait_ready(client, name, CONVERGED).await?;
            }
            // What is not there cannot be damaged.
            let done = lab.node(node).output(&words).is_ok();
            Ok(format!("{} on {node}{}", words.join(" "), if done { "" } else { " (not there)" }))
        }
    }
}

/// Does what a user does: a change that the API server refuses because the controller that it asks was just killed is
/// asked for again. Nothing has become of it.
async fn insist<T, F: Future<Output = Result<T>>>(change: impl Fn() -> F) -> Result<T> {
    wait::until(CONVERGED, "a controller to answer", || async {
        match change().await {
            Err(error) if format!("{error:#}").contains("failed calling webhook") => Ok(None),
            other => Ok(Some(other)),
        }
    })
    .await?
}

/// Kills the processes of one program on a node, each by its number. Their pods go too: the kubelet would let one that
/// died several times wait for minutes.
async fn kill(lab: &Lab, client: &Client, node: &str, program: &str) -> Result<()> {
    let script = format!(
        "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline 2>/dev/null | grep -q '^/usr/bin/patchbay {program} ' && kill -9 ${{p#/proc/}}; done; true"
    );
    lab.node(node).output(&["sh", "-c", &script])?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), patchbay::NAMESPACE);
    let params = ListParams::default()
        .labels(&format!("app.kubernetes.io/component={program}"))
        .fields(&format!("spec.nodeName={node}"));
    pods.delete_collection(&DeleteParams::default().grace_period(0), &params)
        .await
        .context("delete the pods")?;
    Ok(())
}

/// What the model says, link by link.
fn expected(model: &Model, node: &str) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for (name, wanted) in model {
        if wanted.only_node_1 && node != "node-1" {
            continue;
        }
        let mtu = wanted.mtu;
        all.insert(format!("br-{name} bridge mtu {mtu} up"));
        if wanted.overlay.is_some() {
            all.insert(format!("vx-{name} vxlan mtu {mtu} up port of br-{name}"));
        }
        if wanted.uplink {
            all.insert(format!("eth1 port of br-{name}"));
        }
    }
    all
}

/// What a node has.
fn found(lab: &Lab, node: &str) -> Result<BTreeSet<String>> {
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

async fn converged(lab: &Lab, client: &Client, model: &Model) -> Result<()> {
    wait::until(CONVERGED, "links and objects to be what the model says", || async {
        for node in NODES {
            let (expected, found) = (expected(model, node), found(lab, node)?);
            ensure!(expected == found, "{node}: expected {expected:#?}, found {found:#?}");
            let object = Api::<NodeNetwork>::all(client.clone()).get(node).await?;
            let listed: BTreeSet<String> = object
                .status
                .iter()
                .flat_map(|s| &s.networks)
                .map(|n| format!("{} {}", n.name, n.ready))
                .collect();
            let here = model.iter().filter(|(_, w)| node == "node-1" || !w.only_node_1);
            let wanted: BTreeSet<String> = here.map(|(name, _)| format!("{name} true")).collect();
            ensure!(listed == wanted, "{node} lists {listed:?}, expected {wanted:?}");
            let object = Api::<Node>::all(client.clone()).get(node).await?;
            let labels = object.labels().keys().filter_map(|k| k.strip_prefix("network.patchbay.dev/"));
            let labels: BTreeSet<String> = labels.map(|name| format!("{name} true")).collect();
            ensure!(labels == wanted, "{node} has labels {labels:?}, expected {wanted:?}");
        }
        let nads = lab.kubectl(&["-n", "default", "get", "net-attach-def", "-o", "name"])?;
        let nads: BTreeSet<&str> = nads.lines().filter_map(|line| line.rsplit('/').next()).collect();
        ensure!(nads.iter().eq(model.keys().collect::<BTreeSet<_>>()), "attachments: {nads:?}");
        for (name, wanted) in model {
            let object = networks(client).get(name).await?;
            let mtu = object.status.as_ref().and_then(|s| s.mtu).unwrap_or_default();
            ensure!(i64::from(mtu) == wanted.mtu, "{name}: {:?}", object.status);
            ensure!(bridge::condition(&object, "Ready").0 == "True", "{name}: {:?}", object.status);
        }
        Ok(Some(()))
    })
    .await
}

/// Everything that Patchbay could leave behind, as text.
async fn state(lab: &Lab, client: &Client) -> Result<String> {
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

pub async fn a_pod_and_a_deletion_at_the_same_time_strand_nothing(lab: Lab) -> Result<()> {
    let rounds = if e2e::soak() { 60 } else { 6 };
    let (mut refused, mut ran) = (0, 0);
    with_namespace(&lab, "race", async |ns: &TestNamespace| {
        let client = &ns.client;
        let pods: Api<Pod> = ns.pods();
        for round in 0..rounds {
            let name = format!("race-{round}");
            bridge::start_network(client, &name, json!({"attachment": {"namespaces": [ns.namespace]}}))
                .await?;
            let pod: Pod = serde_json::from_value(attached_pod("p", "node-1", &name).object())?;
            let mut dice = Dice(round);
            let pause = Duration::from_millis(dice.roll(200));
            let params = PostParams::default();
            let create = async {
                tokio::time::sleep(pause).await;
                pods.create(&params, &pod).await
            };
            let delete = async {
                tokio::time::sleep(Duration::from_millis(100)).await;
                bridge::delete_network(client, &name).await
            };
            let (created, deleted) = tokio::join!(create, delete);
            deleted?;
            match created {
                Err(kube::Error::Api(e)) if e.message.contains(&name) => refused += 1,
                Err(other) => bail!("round {round}: {other}"),
                Ok(_) => {
                    // Either the pod comes up on its network and keeps it, or it came after the end of the network.
                    let came = wait::until(
                        Duration::from_secs(60),
                        "the pod to run, or its network to be gone",
                        || async {
                            if networks(client).get_opt(&name).await?.is_none() {
                                return Ok(Some(false));
                            }
                            Ok(ns.wait_pod_ready("p").await.is_ok().then_some(true))
                        },
                    )
                    .await?;
                    ensure!(came, "round {round}: {name} went away under a pod that was let in");
                    ran += 1;
                    ensure!(
                        networks(client).get_opt(&name).await?.is_some(),
                        "round {round}: the network is gone"
                    );
                    pods.delete("p", &DeleteParams::default().grace_period(0)).await?;
                    wait::until(bridge::WAIT_TIMEOUT, "the pod to go", || async {
                        Ok(pods.get_opt("p").await?.is_none().then_some(()))
                    })
                    .await?;
                }
            }
            bridge::wait_deleted(client, &name, Duration::from_secs(20)).await?;
        }
        Ok(())
    })
    .await?;
    println!("{rounds} rounds: {refused} pods refused, {ran} ran and kept their network");
    Ok(())
}
