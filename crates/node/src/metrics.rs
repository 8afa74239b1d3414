//! Metrics of the daemon.

use std::sync::atomic::AtomicU64;

use plan::bridge::Action;
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};

/// Counters and gauges of the daemon; the CNI server and IPAM have their own.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    pub writes: Family<WriteLabels, Counter>,
    pub observations: Family<ObserveLabels, Counter>,
    pub events: Counter,
    pub overruns: Counter,
    pub watch_failures: Family<WatchLabels, Counter>,
    pub interfaces: Gauge,
    pub networks: Gauge,
    pub networks_ready: Gauge,
    pub changes: Family<ChangeLabels, Counter>,
    pub repairs: Counter,
    pub published: Gauge<f64, AtomicU64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WriteLabels {
    pub part: WriteKind,
    pub result: ResultLabel,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ObserveLabels {
    pub result: ResultLabel,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ChangeLabels {
    pub verb: ChangeVerb,
    pub result: ResultLabel,
}

/// A change to the kernel or to the link records on disk, as a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum ChangeVerb {
    Record,
    Forget,
    CreateBridge,
    CreateVxlan,
    Delete,
    Rename,
    SetAlias,
    SetMac,
    SetMtu,
    SetAdmin,
    DisableIpv6,
    IsolateIpv4,
    RemoveAddress,
    SetMaster,
    ClearMaster,
    AddFlood,
    RemoveFlood,
}

impl ChangeVerb {
    pub fn of(action: &Action) -> Self {
        match action {
            Action::WriteRecord(_) => Self::Record,
            Action::RemoveRecord => Self::Forget,
            Action::CreateBridge { .. } => Self::CreateBridge,
            Action::CreateVxlan { .. } => Self::CreateVxlan,
            Action::Delete { .. } => Self::Delete,
            Action::Rename { .. } => Self::Rename,
            Action::SetAlias { .. } => Self::SetAlias,
            Action::SetMac { .. } => Self::SetMac,
            Action::SetMtu { .. } => Self::SetMtu,
            Action::SetAdmin { .. } => Self::SetAdmin,
            Action::DisableIpv6 { .. } => Self::DisableIpv6,
            Action::IsolateIpv4 { .. } => Self::IsolateIpv4,
            Action::RemoveAddress { .. } => Self::RemoveAddress,
            Action::SetMaster { .. } => Self::SetMaster,
            Action::ClearMaster { .. } => Self::ClearMaster,
            Action::AddFlood { .. } => Self::AddFlood,
            Action::RemoveFlood { .. } => Self::RemoveFlood,
        }
    }

    /// The attempted change, for messages.
    pub fn sentence(self) -> &'static str {
        match self {
            Self::Record => "record the original state of a link",
            Self::Forget => "delete the record of a link",
            Self::CreateBridge => "create the bridge",
            Self::CreateVxlan => "create the VXLAN device",
            Self::Delete => "delete a link of the network",
            Self::Rename => "rename a link of the network",
            Self::SetAlias => "set the alias of a link",
            Self::SetMac => "set a MAC address",
            Self::SetMtu => "set an MTU",
            Self::SetAdmin => "set a link up or down",
            Self::DisableIpv6 => "disable IPv6 on a link",
            Self::IsolateIpv4 => "isolate a link from the host's IPv4",
            Self::RemoveAddress => "remove an address from the bridge",
            Self::SetMaster => "attach a port to the bridge",
            Self::ClearMaster => "detach a port from the bridge",
            Self::AddFlood => "add a node to the overlay's flood list",
            Self::RemoveFlood => "remove a node from the overlay's flood list",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WatchLabels {
    pub kind: WatchedKind,
}

/// The kind of a write to the NodeNetwork, as a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum WriteKind {
    Object,
    Status,
    /// A second write that removes owner references added by others.
    Owners,
    /// A second status write that removes fields set by others.
    Repair,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum ResultLabel {
    Ok,
    Error,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum WatchedKind {
    Node,
    NodeNetwork,
    BridgeNetwork,
}

impl ResultLabel {
    pub fn of<T, E>(result: &Result<T, E>) -> Self {
        if result.is_ok() { Self::Ok } else { Self::Error }
    }
}

impl Metrics {
    /// Creates the metrics and the registry that exposes them.
    pub fn new() -> (Self, Registry) {
        let metrics = Self::default();
        let mut all = Registry::with_prefix("patchbay_node");
        all.register("writes", "Writes to the NodeNetwork", metrics.writes.clone());
        all.register("looks", "Observations of all links of the node", metrics.observations.clone());
        all.register("events", "Link events received from the kernel", metrics.events.clone());
        all.register("overruns", "Times that the kernel dropped events", metrics.overruns.clone());
        all.register("watch_failures", "Watch failures", metrics.watch_failures.clone());
        all.register("interfaces", "Links listed in the NodeNetwork", metrics.interfaces.clone());
        all.register("networks", "Bridge networks listed in the NodeNetwork", metrics.networks.clone());
        all.register(
            "networks_ready",
            "Bridge networks that are ready on this node",
            metrics.networks_ready.clone(),
        );
        all.register("changes", "Changes to links of bridge networks", metrics.changes.clone());
        all.register("repairs", "Changes that repaired drift", metrics.repairs.clone());
        let help = "Unix time of the last write to the NodeNetwork";
        all.register_with_unit("last_publish_timestamp", help, Unit::Seconds, metrics.published.clone());
        (metrics, all)
    }
}
