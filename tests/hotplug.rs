//! Hot-plug in a lab: NADs, edits of a pod's networks, and what the pod has afterwards.

use std::{collections::BTreeSet, fs, time::Duration};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use api::nad::{NetworkAttachmentDefinition, NetworkAttachmentDefinitionSpec};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use lab::{
    Lab,
    plugin_call::PluginCall,
    test_namespace::{PodBuilder, TestNamespace, pod},
    wait,
};
use serde_json::{Value, json};

use crate::bridge::WAIT_TIMEOUT;

/// The desired networks of a pod.
pub const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
/// The networks that a pod has.
pub const NETWORK_STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
/// The state of each attachment that Patchbay handles.
pub const ATTACHMENTS: &str = "patchbay.dev/attachments";
/// How soon a lost link or a NAD that was created late must lead to an attachment.
pub const REPAIR_LIMIT: Duration = Duration::from_secs(5);
/// How soon the addresses of a deleted pod must be released.
pub const RELEASE_LIMIT: Duration = Duration::from_secs(30);

/// The files of a node's host-local networks, one directory per network.
const HOST_LOCAL_DIR: &str = "var/lib/cni/networks";

/// The links that every pod has.
const PRIMARY_LINKS: [&str; 2] = ["lo", "eth0"];

/// Creates a NAD with any text as its config.
pub async fn create_nad_text(ns: &TestNamespace, name: &str, config: &str) -> Result<()> {
    create_nad_object(ns, name, Some(config.to_owned())).await
}

/// Creates a NAD whose config is a file on each node.
pub async fn create_nad_of_file(ns: &TestNamespace, name: &str) -> Result<()> {
    create_nad_object(ns, name, None).await
}

async fn create_nad_object(ns: &TestNamespace, name: &str, config: Option<String>) -> Result<()> {
    let object = NetworkAttachmentDefinition::new(name, NetworkAttachmentDefinitionSpec { config });
    nads(ns).create(&PostParams::default(), &object).await.with_context(|| format!("create NAD {name}"))?;
    Ok(())
}

/// Creates a NAD.
pub async fn create_nad(ns: &TestNamespace, name: &str, config: &Value) -> Result<()> {
    create_nad_text(ns, name, &config.to_string()).await
}

/// Replaces the config of a NAD.
pub async fn edit_nad(ns: &TestNamespace, name: &str, config: &Value) -> Result<()> {
    let patch = json!({"spec": {"config": config.to_string()}});
    nads(ns).patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
    Ok(())
}

pub async fn delete_nad(ns: &TestNamespace, name: &str) -> Result<()> {
    nads(ns).delete(name, &DeleteParams::default()).await?;
    Ok(())
}

pub fn nads(ns: &TestNamespace) -> Api<NetworkAttachmentDefinition> {
    Api::namespaced(ns.client.clone(), &ns.namespace)
}

/// The name of a network in a CNI config: unique in the lab, so that tests share no host-local directory.
pub fn network_name(ns: &TestNamespace, name: &str) -> String {
    format!("{}-{name}", ns.namespace)
}

/// The name of a test's bridge on the nodes, at most 15 bytes and different from those of other tests.
pub fn bridge_name(ns: &TestNamespace, name: &str) -> String {
    let unique = ns.namespace.rsplit('-').next().unwrap_or_default();
    format!("h{unique}{name}").chars().take(15).collect()
}

/// A config of the reference plugin `bridge` with `host-local`.
pub fn bridge_config(ns: &TestNamespace, name: &str, subnet: &str) -> Value {
    json!({
        "cniVersion": "1.0.0", "name": network_name(ns, name), "type": "bridge", "bridge": bridge_name(ns, name),
        "ipam": {"type": "host-local", "subnet": subnet},
    })
}

/// A config of `lab-record`, which records its calls and delegates to `bridge`. `options` are keys to add or replace, such
/// as the options per command.
pub fn record_config(ns: &TestNamespace, name: &str, subnet: &str, options: &Value) -> Value {
    let mut delegate = bridge_config(ns, name, subnet);
    let mut config = json!({"cniVersion": "1.0.0", "name": delegate["name"], "type": "lab-record"});
    for key in ["cniVersion", "name"] {
        delegate.as_object_mut().map(|delegate| delegate.remove(key));
    }
    config["delegate"] = delegate;
    for (key, value) in options.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    config
}

/// Creates a NAD of `lab-record`.
pub async fn create_record_nad(ns: &TestNamespace, name: &str, subnet: &str, options: &Value) -> Result<()> {
    create_nad(ns, name, &record_config(ns, name, subnet, options)).await
}

/// Installs `lab-record` on a node under the name of another plugin.
pub fn install_record_plugin_as(lab: &Lab, node: &str, plugin: &str) -> Result<()> {
    let (program, link) = ("/opt/cni/bin/lab-record", format!("/opt/cni/bin/{plugin}"));
    lab.node(node).output(&["ln", "--force", program, &link]).map(drop)
}

/// Creates a NAD of the reference plugin `bridge` with `host-local`.
pub async fn create_bridge_nad(ns: &TestNamespace, name: &str, subnet: &str) -> Result<()> {
    create_nad(ns, name, &bridge_config(ns, name, subnet)).await
}

/// The addresses that `host-local` has allocated on a node for a network of a CNI config.
pub fn host_local_addresses(lab: &Lab, node: &str, network: &str) -> BTreeSet<String> {
    let dir = lab.node(node).disk().join(HOST_LOCAL_DIR).join(network);
    let names = fs::read_dir(dir).into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(|c: char| c.is_ascii_digit())).collect()
}

/// Waits until `host-local` has exactly this many addresses of a network, for a promise with a limit.
pub async fn wait_addresses_within(
    limit: Duration,
    lab: &Lab,
    node: &str,
    network: &str,
    count: usize,
) -> Result<Duration> {
    let what = format!("{count} addresses of {network} on {node}");
    let ((), took) = wait::within(limit, &what, || async {
        let found = host_local_addresses(lab, node, network);
        ensure!(found.len() == count, "{found:?}");
        Ok(Some(()))
    })
    .await?;
    Ok(took)
}

/// An element of the networks annotation.
pub fn element(network: &str, interface: &str) -> Value {
    json!({"name": network, "interface": interface})
}

/// A pod that runs, with what is needed to look into its network namespace.
#[derive(Clone)]
pub struct LivePod {
    pub ns: TestNamespace,
    pub name: String,
    pub node: String,
    /// A process of the pod, as a pid of its node.
    pid: String,
    /// Sandboxes whose start failed: on a loaded machine the plugin of the primary network gives up, and the
    /// kubelet tries again.
    failed_sandboxes: BTreeSet<String>,
}

/// An event of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodEvent {
    pub kind: String,
    pub reason: String,
    pub message: String,
    pub reporter: String,
    pub count: i32,
}

/// A pod without networks on a node.
pub fn plain_pod(name: &str, node: &str) -> PodBuilder {
    pod(name).on(node).capability("NET_ADMIN")
}

/// A pod with networks from its start.
pub fn pod_with_networks(name: &str, node: &str, networks: &Value) -> PodBuilder {
    plain_pod(name, node).annotation(NETWORKS, &networks.to_string())
}

/// Starts a pod and finds its network namespace.
pub async fn start_live_pod(ns: &TestNamespace, pod: PodBuilder) -> Result<LivePod> {
    let pod = ns.start_pod(pod).await?;
    LivePod::find(ns, &pod.name_any()).await
}

/// Starts several pods in parallel.
pub async fn start_live_pods<const N: usize>(
    ns: &TestNamespace,
    pods: [PodBuilder; N],
) -> Result<[LivePod; N]> {
    let started = try_join_all(pods.map(|pod| start_live_pod(ns, pod))).await?;
    started.try_into().map_err(|_| anyhow!("the number of pods changed"))
}

impl LivePod {
    /// Finds the network namespace of a pod that runs.
    pub async fn find(ns: &TestNamespace, name: &str) -> Result<Self> {
        let pod = ns.wait_pod_ready(name).await?;
        let node =
            pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).context("the pod has no node")?;
        let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
        let mut ids = statuses.filter_map(|status| status.container_id.as_deref());
        let id = ids.next().context("the pod has no container id")?;
        let (_, id) = id.split_once("://").context("the container id has no runtime")?;
        let pid = container_pid(&ns.lab, &node, id)?;
        let mut pod =
            Self { ns: ns.clone(), name: name.to_owned(), node, pid, failed_sandboxes: BTreeSet::new() };
        pod.failed_sandboxes = pod.sandboxes_without_namespace()?;
        Ok(pod)
    }

    fn sandboxes_without_namespace(&self) -> Result<BTreeSet<String>> {
        let calls = self.plugin_calls()?;
        if calls.is_empty() {
            return Ok(BTreeSet::new());
        }
        let files = self.ns.lab.node(&self.node).output(&["ls", "/var/run/netns"])?;
        let exists = |path: &str| files.lines().any(|file| path.rsplit('/').next() == Some(file));
        let ended = calls.iter().filter(|call| !exists(&call.environment["CNI_NETNS"]));
        Ok(ended.map(|call| call.environment["CNI_CONTAINERID"].clone()).collect())
    }

    pub async fn object(&self) -> Result<Pod> {
        Ok(self.ns.pods().get(&self.name).await?)
    }

    /// Sets annotations of the pod; `null` removes one.
    pub async fn annotate(&self, annotations: Value) -> Result<()> {
        let patch = json!({"metadata": {"annotations": annotations}});
        self.ns.pods().patch(&self.name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        Ok(())
    }

    /// Replaces the networks of the pod by a JSON list.
    pub async fn set_networks(&self, networks: &Value) -> Result<()> {
        self.annotate(json!({NETWORKS: networks.to_string()})).await
    }

    /// Replaces the networks of the pod by any text.
    pub async fn set_networks_text(&self, networks: &str) -> Result<()> {
        self.annotate(json!({NETWORKS: networks})).await
    }

    /// Runs a program of the node in the pod's network namespace.
    pub fn run(&self, argv: &[&str]) -> Result<String> {
        self.ns.lab.node(&self.node).output(&[&["nsenter", "-t", &self.pid, "-n"], argv].concat())
    }

    /// Runs a program inside the pod.
    pub fn exec(&self, argv: &[&str]) -> Result<String> {
        self.ns.exec(&self.name, argv)
    }

    /// The links of the pod, as `ip -d -j` prints them.
    pub fn links(&self) -> Result<Vec<Value>> {
        let text = self.run(&["ip", "-d", "-j", "address", "show"])?;
        serde_json::from_str(&text).with_context(|| format!("parse {text}"))
    }

    /// A link of the pod by name.
    pub fn link(&self, name: &str) -> Result<Option<Value>> {
        Ok(self.links()?.into_iter().find(|link| link["ifname"] == name))
    }

    /// The names of the links that are not those of the primary network.
    pub fn link_names(&self) -> Result<BTreeSet<String>> {
        let names = self.links()?;
        let names = names.iter().filter_map(|link| link["ifname"].as_str());
        Ok(names.filter(|name| !PRIMARY_LINKS.contains(name)).map(str::to_owned).collect())
    }

    /// The index of a link, which changes when it is made again.
    pub fn link_index(&self, name: &str) -> Result<u64> {
        let link = self.link(name)?.with_context(|| format!("{} has no link {name}", self.name))?;
        link["ifindex"].as_u64().with_context(|| format!("{link}"))
    }

    /// The addresses of global scope that a link has, without prefix.
    pub fn addresses(&self, name: &str) -> Result<BTreeSet<String>> {
        let link = self.link(name)?.with_context(|| format!("{} has no link {name}", self.name))?;
        let all = link["addr_info"].as_array().cloned().unwrap_or_default();
        let global = all.iter().filter(|address| address["scope"] == "global");
        Ok(global.filter_map(|address| address["local"].as_str().map(str::to_owned)).collect())
    }

    /// The first IPv4 address of a link.
    pub fn address(&self, name: &str) -> Result<String> {
        let all = self.addresses(name)?;
        all.into_iter().find(|a| a.contains('.')).with_context(|| format!("{name} has no IPv4 address"))
    }

    /// The entries of network-status that are not of the default network.
    pub async fn statuses(&self) -> Result<Vec<Value>> {
        statuses(&self.object().await?)
    }

    /// The entry of network-status of an interface.
    pub async fn status(&self, interface: &str) -> Result<Value> {
        let all = self.statuses().await?;
        let found = all.iter().find(|entry| entry["interface"] == interface).cloned();
        found.with_context(|| format!("network-status has no {interface}: {all:?}"))
    }

    /// The content of `patchbay.dev/attachments`.
    pub async fn attachments(&self) -> Result<Vec<Value>> {
        attachments(&self.object().await?)
    }

    /// Waits until network-status, `patchbay.dev/attachments` and the links agree on these interfaces.
    pub async fn wait_interfaces(&self, expected: &[&str]) -> Result<()> {
        let what = format!("pod {} to have {expected:?}", self.name);
        wait::until(WAIT_TIMEOUT, &what, || self.check_interfaces(expected)).await
    }

    /// The same for a promise with a limit; returns how long it took.
    pub async fn wait_interfaces_within(&self, limit: Duration, expected: &[&str]) -> Result<Duration> {
        let what = format!("pod {} to have {expected:?}", self.name);
        let ((), took) = wait::within(limit, &what, || self.check_interfaces(expected)).await?;
        Ok(took)
    }

    async fn check_interfaces(&self, expected: &[&str]) -> Result<Option<()>> {
        let expected: BTreeSet<String> = expected.iter().map(|&name| name.to_owned()).collect();
        let object = self.object().await?;
        let listed = interfaces_of(&statuses(&object)?)?;
        let text = object.annotations().get(ATTACHMENTS);
        ensure!(listed == expected, "network-status lists {listed:?}; attachments: {text:?}");
        for one in attachments(&object)? {
            let attached = one["state"] == "Attached";
            let interface = one["interface"].as_str().unwrap_or_default();
            // An element that asks for a name which another one has is listed under that name.
            let taken = one["reason"] == "InterfaceNameTaken";
            ensure!(taken || attached == expected.contains(interface), "attachments: {text:?}");
        }
        let links = self.link_names()?;
        ensure!(links == expected, "the links are {links:?}");
        Ok(Some(()))
    }

    /// Waits until `patchbay.dev/attachments` has an entry with this state and reason; returns it.
    pub async fn wait_state(&self, network: &str, state: &str, reason: &str) -> Result<Value> {
        let what = format!("attachment {network} of {} to be {state} ({reason})", self.name);
        wait::until(WAIT_TIMEOUT, &what, || async {
            let all = self.attachments().await?;
            let matches = |one: &&Value| {
                let name = one["network"].as_str().unwrap_or_default();
                let name = name.rsplit('/').next().unwrap_or_default();
                name == network && one["state"] == state && (reason.is_empty() || one["reason"] == reason)
            };
            match all.iter().find(matches) {
                Some(found) => Ok(Some(found.clone())),
                None => bail!("{all:?}"),
            }
        })
        .await
    }

    /// The events of this pod that Patchbay reported.
    pub async fn events(&self) -> Result<Vec<PodEvent>> {
        let api: Api<Event> = Api::namespaced(self.ns.client.clone(), &self.ns.namespace);
        let fields = format!("involvedObject.kind=Pod,involvedObject.name={}", self.name);
        let all = api.list(&ListParams::default().fields(&fields)).await?.items;
        let ours = all.into_iter().map(|event| PodEvent {
            kind: event.type_.unwrap_or_default(),
            reason: event.reason.unwrap_or_default(),
            message: event.message.unwrap_or_default(),
            reporter: event.reporting_component.unwrap_or_default(),
            count: event.series.and_then(|s| s.count).or(event.count).unwrap_or(1),
        });
        Ok(ours.filter(|event| event.reporter == "patchbay-node").collect())
    }

    /// Waits for an event with a reason whose message contains the text; returns it.
    pub async fn wait_event(&self, reason: &str, text: &str) -> Result<PodEvent> {
        let what = format!("event {reason} of {} with {text:?}", self.name);
        wait::until(WAIT_TIMEOUT, &what, || async {
            let all = self.events().await?;
            let found = all.iter().find(|event| event.reason == reason && event.message.contains(text));
            found.cloned().map(Some).with_context(|| format!("{all:#?}"))
        })
        .await
    }

    /// Waits until the pod can ping an address.
    pub async fn wait_reachable(&self, address: &str) -> Result<()> {
        let what = format!("{} to reach {address}", self.name);
        wait::until(WAIT_TIMEOUT, &what, || async {
            self.run(&["/usr/bin/ping", "-c", "1", "-W", "1", address]).map(|_| Some(()))
        })
        .await
    }

    /// The calls of `lab-record` for this pod, in the order of their start, without those of sandboxes that
    /// failed before the pod ran.
    pub fn plugin_calls(&self) -> Result<Vec<PluginCall>> {
        let (namespace, name) = (&self.ns.namespace, &self.name);
        let mut calls = self.ns.lab.plugin_calls(&self.node)?;
        calls.retain(|call| {
            let arguments = call.environment.get("CNI_ARGS").map(String::as_str).unwrap_or_default();
            let has = |wanted: &str| arguments.split(';').any(|argument| argument == wanted);
            has(&format!("K8S_POD_NAMESPACE={namespace}"))
                && has(&format!("K8S_POD_NAME={name}"))
                && !self.failed_sandboxes.contains(&call.environment["CNI_CONTAINERID"])
        });
        Ok(calls)
    }

    /// The commands of the calls for an interface, in the order of their start.
    pub fn plugin_commands(&self, interface: &str) -> Result<Vec<String>> {
        let calls = self.plugin_calls()?;
        Ok(calls.into_iter().filter(|call| call.interface() == interface).map(|call| call.command).collect())
    }

    /// Waits until `lab-record` was called with a command this often for an interface.
    pub async fn wait_plugin_call(&self, interface: &str, command: &str, count: usize) -> Result<()> {
        let what = format!("call {count} of {command} for {interface} of {}", self.name);
        wait::until(WAIT_TIMEOUT, &what, || async {
            let found = self.plugin_commands(interface)?;
            ensure!(found.iter().filter(|one| *one == command).count() >= count, "{found:?}");
            Ok(Some(()))
        })
        .await
    }

    /// Deletes the pod without a grace period, and does not wait.
    pub async fn delete(&self) -> Result<()> {
        self.ns.pods().delete(&self.name, &DeleteParams::default().grace_period(0)).await?;
        Ok(())
    }
}

/// The first process of a container. The conmon of CRI-O is in the same cgroup. The runtime
/// is not asked: with hundreds of containers its list takes seconds.
fn container_pid(lab: &Lab, node: &str, container: &str) -> Result<String> {
    let script = format!(
        "for p in $(grep -l {container} /proc/[0-9]*/cgroup); do p=${{p%/cgroup}}; \
         [ \"$(cat $p/comm)\" != conmon ] && echo ${{p#/proc/}}; done | sort -n; true"
    );
    let text = lab.node(node).output(&["sh", "-c", &script])?;
    let pid = text.lines().next().map(str::to_owned);
    pid.with_context(|| format!("no process of container {container} on {node}"))
}

/// The IPv4 address of a node.
pub fn node_address(lab: &Lab, node: &str) -> Result<String> {
    let text = lab.node(node).output(&["ip", "-4", "-o", "address", "show", "dev", "eth0"])?;
    let address = text.split_whitespace().nth(3).and_then(|cidr| cidr.split('/').next());
    address.map(str::to_owned).with_context(|| format!("{node} has no address: {text}"))
}

/// The entries of network-status that are not of the default network.
pub fn statuses(pod: &Pod) -> Result<Vec<Value>> {
    let all = annotation_list(pod, NETWORK_STATUS)?;
    Ok(all.into_iter().filter(|entry| entry["default"] != true).collect())
}

/// The content of `patchbay.dev/attachments`.
pub fn attachments(pod: &Pod) -> Result<Vec<Value>> {
    annotation_list(pod, ATTACHMENTS)
}

fn annotation_list(pod: &Pod, name: &str) -> Result<Vec<Value>> {
    let Some(text) = pod.annotations().get(name) else { return Ok(Vec::new()) };
    serde_json::from_str(text).with_context(|| format!("parse {name}: {text}"))
}

fn interfaces_of(statuses: &[Value]) -> Result<BTreeSet<String>> {
    let names = statuses.iter().map(|entry| entry["interface"].as_str().map(str::to_owned));
    names.collect::<Option<_>>().with_context(|| format!("an entry has no interface: {statuses:?}"))
}
