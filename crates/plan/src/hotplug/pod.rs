//! What the daemon knows about one pod: what is desired, what was observed, and the NADs.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use api::{nad_config::NadConfig, network_status::NetworkStatus};

use super::{AttachedRecord, AttachmentKey, AttachmentRecord, AttemptKey, Failures, PodIdentity};

/// What the API server says about a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredPod {
    pub pod: PodIdentity,
    /// The networks annotation, if the pod has it.
    pub networks: Option<String>,
    /// Names the edit about which the pod asks for a report, if it asks.
    pub confirm: Option<String>,
    pub lifecycle: PodLifecycle,
    pub host_network: bool,
    /// The pod runs a virtual machine of KubeVirt (label `kubevirt.io: virt-launcher`), which renames and replaces links.
    pub virt_launcher: bool,
}

/// How far a pod is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodLifecycle {
    /// It does not run yet (phase `Pending`).
    Pending,
    Running,
    /// It has a deletion timestamp.
    Terminating,
    /// Its phase is `Succeeded` or `Failed`, or the API server has no pod of this UID.
    Ended,
}

/// What the daemon observed on the node, and the annotations that it writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedPod {
    pub sandbox: SandboxState,
    /// The links of the READY sandbox's namespace. `None` if the namespace could not be read: then only records of other
    /// sandboxes are handled.
    pub links: Option<Vec<ObservedLink>>,
    /// Links on the host, by index. Only those that a [`LinkIdentity::peer`](super::LinkIdentity::peer) of the records
    /// names are needed.
    pub host_links: BTreeMap<u32, HostLink>,
    /// The boot ID of the node.
    pub boot: String,
    /// All records of the pod, of all of its sandboxes: first those of the journal, then those of Multus' caches, also if they
    /// have the same key. The plan decides which of the two counts.
    pub records: Vec<AttachmentRecord>,
    /// Why the records of Multus for the READY sandbox cannot be used, and what to do. Then nothing of that sandbox is attached
    /// or detached: it is not known what Multus attached.
    pub unreadable: Option<String>,
    /// Whether the configuration of Multus is known. Otherwise its default networks are among `records`.
    pub defaults_known: bool,
    /// The entries of network-status for what Multus attaches to every pod, as its records show them: the cluster's network
    /// first.
    pub default_statuses: Vec<NetworkStatus>,
    /// What the ADDs of unfinished attachments of the READY sandbox returned and created, as far as the result cache of the
    /// node and the namespace say so. The daemon was killed, or could not write, before it recorded that. Without those with
    /// `default-route`: their routes may be half changed.
    pub results: BTreeMap<AttachmentKey, AttachedRecord>,
    /// The attachments of other programs that an element was seen to request while hot-plug was on
    /// ([`PodPlan::requested`](super::PodPlan::requested)).
    pub requested: BTreeSet<AttachmentKey>,
    /// The paths of network namespaces that exist, of those that `records` and `sandbox` name.
    pub namespaces: BTreeSet<String>,
    /// The network-status annotation. At least as new as the last write of the daemon: not from a cache that does not show
    /// that write yet.
    pub network_status: Option<String>,
    /// The annotation `patchbay.dev/attachments`, likewise.
    pub attachments: Option<String>,
    /// The two annotations are the API server's answer to a request that the daemon sent after its last step. A cache may be
    /// older than what another program wrote before that step. Set after a successful write, cleared by an ADD or a DEL.
    pub annotations_confirmed: bool,
}

/// What the runtime says about the pod's sandboxes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SandboxState {
    /// The runtime does not answer. Nothing happens until it does.
    Unknown,
    /// No sandbox is READY.
    Absent,
    /// The READY sandbox with the highest attempt.
    Ready(SandboxRef),
}

/// A sandbox and its network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxRef {
    pub id: String,
    /// The path of the network namespace, as the runtime reports it.
    pub netns: String,
    /// The runtime, if it has a network stack of its own ([`own_network_stack`]).
    pub own_network_stack: Option<String>,
}

/// Parts of the names of runtimes whose containers have another network stack than that of the sandbox's namespace: it takes
/// over the links that exist when the sandbox starts.
const OWN_NETWORK_STACKS: [&str; 6] = ["kata", "runsc", "gvisor", "firecracker", "urunc", "quark"];

/// The name of the runtime of a sandbox, if that has a network stack of its own.
///
/// The type of the runtime decides if it is known: an administrator chooses the name of the handler.
pub fn own_network_stack(runtime_type: Option<&str>, handler: Option<&str>) -> Option<String> {
    let name = runtime_type.or(handler)?;
    let lower = name.to_ascii_lowercase();
    let own = OWN_NETWORK_STACKS.iter().any(|part| lower.contains(part));
    own.then(|| handler.unwrap_or(name).to_owned())
}

/// A link of the pod's namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ObservedLink {
    pub index: u32,
    pub name: String,
    pub mac: Option<String>,
    /// The index of the veth peer, if the peer is on the host.
    pub peer: Option<u32>,
    /// A dummy in a virt-launcher pod: KubeVirt puts it under the name of a link that it renamed.
    pub placeholder: bool,
}

/// A link of the host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostLink {
    pub name: String,
    pub mac: Option<String>,
}

/// The NAD that an element refers to, for a pod of this namespace.
///
/// The watcher of NADs resolves it: it reads `spec.config` or the file of that name on the node, and applies namespace
/// isolation. Checks run in this order: `IsolationUnknown`, `Forbidden`, `Missing`, `DeviceRequired`, `Invalid`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NadState {
    /// It does not exist.
    Missing,
    /// Its configuration is invalid.
    Invalid {
        /// What is invalid and what to do.
        message: String,
    },
    /// It needs a device of a device plugin.
    DeviceRequired {
        /// The resource name in its annotation.
        resource: String,
    },
    /// Namespace isolation forbids it to the pod.
    Forbidden {
        /// Which setting forbids it and what to do.
        message: String,
    },
    /// It is not known whether namespace isolation forbids it to the pod.
    IsolationUnknown {
        /// Why, and what to do.
        message: String,
    },
    /// It cannot be found out now. The other elements of the pod do not wait for it.
    Unknown {
        /// Why, and what to do.
        message: String,
    },
    /// It can be attached.
    Ready {
        /// Its configuration, with a name.
        config: Box<NadConfig>,
    },
}

/// What hot-plug may do on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlugMode {
    /// Everything.
    On,
    /// `--hotplug=off`. Attachments of ended sandboxes that need a DEL from Patchbay get it. Nothing is attached, re-plugged
    /// or unplugged on a running pod, and no annotation and no event is written.
    Off,
    /// multus-dynamic-networks-controller runs on this node. The same as `Off`: that controller handles running pods, and
    /// would undo what Patchbay does there.
    StandDown,
}

/// Everything that a plan depends on.
#[derive(Debug, Clone, Copy)]
pub struct PlanInput<'a> {
    pub desired: &'a DesiredPod,
    pub observed: &'a ObservedPod,
    pub failures: &'a Failures,
    pub now: Instant,
    pub mode: PlugMode,
    /// The attempt that has been running for more than two seconds. The states then report `Pending` and `Removing`. The
    /// caller ignores the step of such a plan.
    pub running: Option<&'a AttemptKey>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_with_its_own_network_stack_is_known_by_its_type_or_else_by_its_handler() {
        for (runtime_type, handler, expected) in [
            (Some("io.containerd.kata.v2"), Some("vm"), Some("vm")),
            (Some("io.containerd.kata-qemu.v2"), None, Some("io.containerd.kata-qemu.v2")),
            (Some("io.containerd.runsc.v1"), Some("gvisor"), Some("gvisor")),
            (Some("aws.firecracker"), None, Some("aws.firecracker")),
            (Some("io.containerd.runc.v2"), Some("kata"), None),
            (Some("io.containerd.runc.v2"), Some("nvidia"), None),
            (Some("io.containerd.runc.v2"), None, None),
            (None, Some("Kata-clh"), Some("Kata-clh")),
            (None, Some("my-runsc"), Some("my-runsc")),
            (None, Some("nvidia"), None),
            (None, Some("crun"), None),
            (None, None, None),
        ] {
            let found = own_network_stack(runtime_type, handler);
            assert_eq!(found.as_deref(), expected, "{runtime_type:?} {handler:?}");
        }
    }
}
