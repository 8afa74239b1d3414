//! What can be counted.

use std::sync::atomic::AtomicU64;

use plan::bridge::Action;
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};

/// The numbers of one daemon.
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

/// A change to the kernel or to the records on disk.
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
            Action::Record(_) => Self::Record,
            Action::Forget => Self::Forget,
            Action::CreateBridge { .. } => Self::CreateBridge,
            Action::CreateVxlan { .. } => Self::CreateVxlan,
            Action::Delete { .. } => Self::Delete,
            Action::Rename { .. } => Self::Rename,
            Action::SetAlias { .. } => Self::SetAlias,
            Action::SetMac { .. } => Self::SetMac,
            Action::SetMtu { .. } => Self::SetMtu,
            Action::SetAdmin { .. } => Self::SetAdmin,
            Action::DisableIpv6 { .. } => Self::DisableIpv6,
            Action::DeafenIpv4 { .. } => Self::IsolateIpv4,
            Action::RemoveAddress { .. } => Self::RemoveAddress,
            Action::Join { .. } => Self::SetMaster,
            Action::Part { .. } => Self::ClearMaster,
            Action::AddFlood { .. } => Self::AddFlood,
            Action::RemoveFlood { .. } => Self::RemoveFlood,
        }
    }

    /// What was tried, for people.
    pub fn sentence(self) -> &'static str {
        match self {
            Self::Record => "write down what is found",
            Self::Forget => "remove what was written down",
            Self::CreateBridge => "make the bridge",
            Self::CreateVxlan => "make the VXLAN device",
            Self::Delete => "delete a link of the network",
            Self::Rename => "rename a link of the network",
            Self::SetAlias => "mark a link",
            Self::SetMac => "set a hardware address",
            Self::SetMtu => "set an MTU",
            Self::SetAdmin => "set a link up or down",
            Self::DisableIpv6 => "switch IPv6 off on a link",
            Self::IsolateIpv4 => "keep IPv4 of the host off a link",
            Self::RemoveAddress => "remove an address from the bridge",
            Self::SetMaster => "make a link a port of the bridge",
            Self::ClearMaster => "take a port off the bridge",
            Self::AddFlood => "add a node to the overlay",
            Self::RemoveFlood => "remove a node from the overlay",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WatchLabels {
    pub kind: WatchedKind,
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum WriteKind {
    Object,
    Status,
    /// The owners again, to remove those that somebody else added.
    Owners,
    /// The status again, to remove what somebody else put there.
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
    /// The numbers, and the registry that shows them.
    pub fn new() -> (Self, Registry) {
        let metrics = Self::default();
        let mut all = Registry::with_prefix("patchbay_node");
        all.register("writes", "Writes to the NodeNetwork", metrics.writes.clone());
        all.register("looks", "Looks at all links of the node", metrics.observations.clone());
        all.register("events", "Events of the kernel about links", metrics.events.clone());
        all.register("overruns", "Times that the kernel threw events away", metrics.overruns.clone());
        all.register("watch_failures", "Failures of a watch", metrics.watch_failures.clone());
        all.register("interfaces", "Links listed in the NodeNetwork", metrics.interfaces.clone());
        all.register("networks", "Bridge networks listed in the NodeNetwork", metrics.networks.clone());
        all.register(
            "networks_ready",
            "Bridge networks that work on this node",
            metrics.networks_ready.clone(),
        );
        all.register("changes", "Changes to links of bridge networks", metrics.changes.clone());
        all.register(
            "repairs",
            "Changes that put right what somebody changed by hand",
            metrics.repairs.clone(),
        );
        let help = "When the NodeNetwork was last written, in seconds since 1970";
        all.register_with_unit("last_publish_timestamp", help, Unit::Seconds, metrics.published.clone());
        (metrics, all)
    }
}
