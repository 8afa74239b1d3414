//! What a node publishes as its NodeNetwork, and when.
//!
//! Owns the plain types for links and what was seen of them; knows no kernel, client or clock.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::{Duration, Instant},
};

use api::{
    Condition, ConditionStatus, Interface, LINK_ALIAS, LinkState, Mac, NetworkOnNode, NodeNetworkStatus,
    Patterns, Vtep,
    nodenetwork::{MAX_ADDRESSES, MAX_ALL_ADDRESSES, MAX_INTERFACES, MAX_NAME},
};
use ipnet::IpNet;
use jiff::Timestamp;

/// The links that are omitted out unless somebody says otherwise: ends of pods and of virtual machines, and what other
/// network software makes for itself. Bridges and bonds of administrators are not among them.
pub const DEFAULT_IGNORED: &str = concat!(
    // Pods and containers: reference plugins, Calico, Cilium, AWS, Azure, GKE, Kube-OVN.
    "veth*,cali*,lxc*,eni[0-9a-f]*,azv*,gke[0-9a-f]*,????????????_h,",
    // OVN-Kubernetes names the host's end after the first 15 digits of the sandbox.
    "[0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f]",
    "[0-9a-f][0-9a-f],",
    // Virtual machines.
    "tap*,vnet*,macvtap*,virbr*,",
    // Primary networks: their bridges, tunnels and dummies.
    "cni*,cilium*,flannel*,tunl*,*.calico,*.cali,vxlan_sys_*,genev_sys_*,ovn-*,ovn0,ovs-*,br-int,antrea-*,weave,",
    "vxlan-6784,datapath,kube-bridge,kube-dummy-if,kube-ipvs*,nodelocaldns*,",
    // Container engines.
    "docker*,podman*,nerdctl*,br-[0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f]",
    "[0-9a-f][0-9a-f][0-9a-f],",
    // What the kernel makes in every namespace once a module is loaded.
    "lo,ifb*,sit*,ip6tnl*,ip6gre*,gre*,erspan*,ip_vti*,ip6_vti*,teql*",
);

/// How long to wait after the first event, so that one look sees all of a small change.
const EVENT_DEBOUNCE: Duration = Duration::from_millis(100);
/// The least time between two looks at the kernel. A storm of events costs three looks a second.
const MIN_OBSERVE_INTERVAL: Duration = Duration::from_millis(350);
/// The least time between two writes.
const MIN_WRITE_INTERVAL: Duration = Duration::from_secs(1);
/// The same if a bridge network came, went, or changed.
const MIN_NETWORK_WRITE_INTERVAL: Duration = Duration::from_millis(100);

/// A link as the kernel describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// The kernel's number for it, unique as long as the link exists.
    pub index: u32,
    /// Its name, with unreadable bytes escaped.
    pub name: String,
    /// The kernel's word for what it is; none for hardware.
    pub kind: Option<String>,
    pub mac: Option<Mac>,
    pub mtu: u32,
    /// Whether an administrator has set it up.
    pub admin: AdminState,
    /// What the driver says of it.
    pub oper: OperState,
    /// Whether it is the namespace's own loopback.
    pub loopback: bool,
    /// The index of the bridge, bond or VRF that it is a port of.
    pub master: Option<u32>,
    /// The index of the link that it lies on, or of the other end of a pair, if that is in the same namespace.
    pub lower: Option<u32>,
    /// Free text that somebody put on it.
    pub alias: String,
    pub addresses: Vec<Address>,
    /// Whether IPv6 is off on it; none if the kernel does not say.
    pub ipv6_disabled: Option<bool>,
    /// Whether the host is deaf to IPv4 on it: it answers no ARP and forwards nothing; none if the kernel does not say.
    pub ipv4_isolated: Option<bool>,
    /// What it is set to, if it is a VXLAN device.
    pub vxlan: Option<Vxlan>,
}

/// The settings of a VXLAN device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vxlan {
    pub vni: u32,
    pub port: u16,
    pub local: Option<IpAddr>,
}

/// An entry of a VXLAN device's flood list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FloodEntry {
    /// The index of the device.
    pub link: u32,
    pub to: IpAddr,
}

/// Whether a link is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminState {
    Up,
    Down,
}

/// The operational states of RFC 2863.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OperState {
    Unknown,
    NotPresent,
    Down,
    LowerLayerDown,
    Testing,
    Dormant,
    Up,
}

/// An address of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address {
    pub net: IpNet,
    /// An IPv6 privacy address that is replaced every day or so.
    pub temporary: bool,
}

/// What the kernel had at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KernelState {
    pub links: Vec<Link>,
    /// The indexes of the links that a default route of the main table leads to.
    pub default_routes: Vec<u32>,
    /// The flood lists of all VXLAN devices.
    pub floods: Vec<FloodEntry>,
    /// Whether something may be missing, because the kernel was interrupted each time that it was asked.
    pub partial: bool,
}

/// What the Node object says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeInfo {
    pub name: String,
    pub uid: String,
    /// Its InternalIPs, in its order.
    pub internal_ips: Vec<IpAddr>,
}

/// All that is known when something has to be decided.
#[derive(Debug, Clone, Copy)]
pub struct PublishInput<'a> {
    pub observed: &'a KernelState,
    pub node: &'a NodeInfo,
    /// The names of the links to leave out.
    pub ignored: &'a Patterns,
    /// The newest that is known of the API server's object; none if there is no such object.
    pub server: Option<&'a PublishedState>,
    /// The last write that went through.
    pub written: Option<&'a LastWrite>,
    /// When the last write was tried.
    pub last_write: Option<Instant>,
    /// The bridge networks of the node, sorted by UID.
    pub networks: &'a [NetworkOnNode],
    pub netfilter: Netfilter,
}

/// Whether the kernel shows bridged packets to iptables (`net.bridge.bridge-nf-call-iptables`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Netfilter {
    /// It does not, or cannot.
    Off,
    On,
}

/// What the NodeNetwork should say.
pub fn status(input: &PublishInput<'_>, now: Timestamp) -> NodeNetworkStatus {
    let PublishInput { observed, node, ignored, server, written, last_write: _, networks, netfilter } = input;
    // A condition whose status stays keeps its time. Ours counts before the server's, which somebody may have
    // edited, and which an older schema may have emptied.
    let ours = written.map(|written| &written.desired);
    let theirs = server.and_then(|record| record.status.as_ref());
    let before: Vec<&Condition> =
        ours.into_iter().chain(theirs).flat_map(|status| &status.conditions).collect();

    let vtep = vtep(observed, node, ignored);
    let (interfaces, omitted) = interfaces(observed, ignored, vtep.as_ref());
    let mut drafts = vec![ready(interfaces.len(), &omitted), vtep_found(node, vtep.as_ref())];
    drafts.extend((!networks.is_empty()).then(|| netfilter_off(*netfilter)));
    let conditions = drafts.into_iter().map(|draft| draft.condition(&before, now)).collect();
    NodeNetworkStatus { vtep, interfaces, networks: networks.to_vec(), conditions }
}

/// The tunnel end point of the node.
pub fn vtep(observed: &KernelState, node: &NodeInfo, ignored: &Patterns) -> Option<Vtep> {
    node.internal_ips.iter().find_map(|&address| {
        observed
            .links
            .iter()
            .filter(|link| link.addresses.iter().any(|own| own.net.addr() == address))
            // The same address on several links happens (proxies put it on a dummy): the real one first.
            .min_by_key(|link| (link.loopback, ignored.matches(&link.name), link.index))
            .map(|link| Vtep { address, interface: shown(&link.name), mtu: mtu(link) })
    })
}

/// What did not fit into the object.
struct Omitted {
    links: usize,
    addresses: usize,
}

/// The links to list, sorted by name, and what did not fit.
fn interfaces(observed: &KernelState, ignored: &Patterns, vtep: Option<&Vtep>) -> (Vec<Interface>, Omitted) {
    let names: BTreeMap<u32, &str> =
        observed.links.iter().map(|link| (link.index, link.name.as_str())).collect();
    let default_routes: BTreeSet<u32> = observed.default_routes.iter().copied().collect();
    // What Patchbay made is listed by network: a bridge changes its state with the first pod and the last.
    let ours = |link: &Link| link.alias.starts_with(LINK_ALIAS);

    let mut listed: Vec<&Link> = observed
        .links
        .iter()
        .filter(|link| !link.loopback && !link.name.is_empty())
        .filter(|link| !ours(link) && !ignored.matches(&link.name))
        .collect();
    // The name is the key of the list: a second link of that name, seen because it was renamed while the
    // kernel was counting them up, would make the API server refuse all of it.
    listed.sort_by_cached_key(|link| (shown(&link.name), link.index));
    listed.dedup_by_key(|link| shown(&link.name));

    // When not all fits, what the node needs stays, and the rest goes by name.
    let needed = |link: &Link| {
        default_routes.contains(&link.index) || vtep.is_some_and(|vtep| vtep.interface == shown(&link.name))
    };
    listed.sort_by_cached_key(|link| (!needed(link), shown(&link.name)));
    let mut omitted = Omitted { links: listed.len().saturating_sub(MAX_INTERFACES), addresses: 0 };
    listed.truncate(MAX_INTERFACES);

    let mut room = MAX_ALL_ADDRESSES;
    let interface = |link: &Link| Interface {
        name: shown(&link.name),
        kind: link
            .kind
            .as_deref()
            .filter(|kind| !kind.is_empty())
            .map_or_else(|| "physical".to_owned(), shown),
        mac: link.mac,
        mtu: mtu(link),
        state: state(link.admin, link.oper),
        addresses: {
            let mut nets = addresses(link);
            let fit = nets.len().min(MAX_ADDRESSES).min(room);
            omitted.addresses += nets.len() - fit;
            room -= fit;
            nets.truncate(fit);
            nets
        },
        master: link
            .master
            .and_then(|index| names.get(&index))
            .filter(|name| !name.is_empty())
            .map(|name| shown(name)),
        default_route: default_routes.contains(&link.index),
    };
    let mut interfaces: Vec<Interface> = listed.into_iter().map(interface).collect();
    interfaces.sort_by(|a, b| a.name.cmp(&b.name));
    (interfaces, omitted)
}

/// Cuts what is longer than a name of the kernel can be.
fn shown(name: &str) -> String {
    name.chars().take(MAX_NAME).collect()
}

fn mtu(link: &Link) -> i32 {
    i32::try_from(link.mtu).unwrap_or(i32::MAX)
}

fn state(admin: AdminState, oper: OperState) -> LinkState {
    match (admin, oper) {
        (_, OperState::NotPresent) => LinkState::NotPresent,
        (AdminState::Down, _) => LinkState::Down,
        (AdminState::Up, OperState::Up) => LinkState::Up,
        (AdminState::Up, OperState::Down) => LinkState::NoCarrier,
        (AdminState::Up, OperState::LowerLayerDown) => LinkState::LowerLayerDown,
        (AdminState::Up, OperState::Testing) => LinkState::Testing,
        (AdminState::Up, OperState::Dormant) => LinkState::Dormant,
        (AdminState::Up, OperState::Unknown) => LinkState::Unknown,
    }
}

/// The addresses worth showing. Link-local and temporary ones come and go by themselves.
fn addresses(link: &Link) -> Vec<IpNet> {
    let mut nets: Vec<IpNet> = link
        .addresses
        .iter()
        .filter(|address| !address.temporary)
        .map(|address| address.net)
        .filter(|net| match net {
            IpNet::V4(_) => true,
            IpNet::V6(net) => !net.addr().is_unicast_link_local(),
        })
        .collect();
    nets.sort_unstable();
    nets.dedup();
    nets
}

/// A condition without its time.
struct NodeConditionDraft {
    r#type: &'static str,
    status: ConditionStatus,
    reason: &'static str,
    message: String,
}

impl NodeConditionDraft {
    fn condition(self, before: &[&Condition], now: Timestamp) -> Condition {
        let since = before
            .iter()
            .find(|old| old.r#type == self.r#type && old.status == self.status)
            .map_or(now, |old| old.last_transition_time);
        Condition {
            r#type: self.r#type.to_owned(),
            status: self.status,
            reason: self.reason.to_owned(),
            message: self.message,
            // Times of Kubernetes have whole seconds, the API server would cut the rest.
            last_transition_time: Timestamp::from_second(since.as_second()).unwrap_or(since),
            observed_generation: None,
        }
    }
}

fn ready(listed: usize, omitted: &Omitted) -> NodeConditionDraft {
    const REMEDY: &str = "leave out links that no network will use with `patchbay node --ignore-interfaces`";
    let (status, reason, message) = match omitted {
        Omitted { links: 0, addresses: 0 } => {
            (ConditionStatus::True, "Published", "the links of this node are listed".to_owned())
        }
        Omitted { links: 0, addresses } => {
            let message = format!(
                "{addresses} addresses are not listed: at most {MAX_ADDRESSES} of a link are, and \
                 {MAX_ALL_ADDRESSES} of all together; remove some, or {REMEDY}"
            );
            (ConditionStatus::False, "TooManyAddresses", message)
        }
        Omitted { links, addresses: _ } => {
            let message = format!("only {listed} of {} links are listed; {REMEDY}", listed + links);
            (ConditionStatus::False, "TooManyLinks", message)
        }
    };
    NodeConditionDraft { r#type: "Ready", status, reason, message }
}

fn vtep_found(node: &NodeInfo, vtep: Option<&Vtep>) -> NodeConditionDraft {
    let (status, reason, message) = match vtep {
        Some(vtep) => {
            let message = format!("overlays use {} on {}", vtep.address, vtep.interface);
            (ConditionStatus::True, "AddressOnLink", message)
        }
        None if node.internal_ips.is_empty() => (
            ConditionStatus::False,
            "NoInternalIP",
            "the Node has no address of type InternalIP, so overlay networks cannot reach it; set the kubelet's \
             --node-ip, or look at the cloud controller that sets Node addresses"
                .to_owned(),
        ),
        None => {
            let ips: Vec<String> = node.internal_ips.iter().take(8).map(ToString::to_string).collect();
            let message = format!(
                "no link of this node has {}, the InternalIP of the Node, so overlay networks cannot reach it; set \
                 the kubelet's --node-ip to an address that is on a link",
                ips.join(" or ")
            );
            (ConditionStatus::False, "AddressNotOnAnyLink", message)
        }
    };
    NodeConditionDraft { r#type: "VtepFound", status, reason, message }
}

fn netfilter_off(netfilter: Netfilter) -> NodeConditionDraft {
    let (status, reason, message) = match netfilter {
        Netfilter::Off => {
            (ConditionStatus::True, "NotCalled", "packets on bridges are not shown to iptables".to_owned())
        }
        Netfilter::On => (
            ConditionStatus::False,
            "CallsIptables",
            "net.bridge.bridge-nf-call-iptables is 1: firewall rules of this node also see, and may drop, packets \
             between pods of a bridge network; set it to 0 if nothing on this node needs it (Patchbay leaves it alone)"
                .to_owned(),
        ),
    };
    NodeConditionDraft { r#type: "BridgeNetfilterOff", status, reason, message }
}

/// When to look at the kernel again: the first event since the last look came at `event`.
pub fn next_observation(event: Instant, last_observation: Option<Instant>) -> Instant {
    let settled = event + EVENT_DEBOUNCE;
    last_observation.map_or(settled, |last| settled.max(last + MIN_OBSERVE_INTERVAL))
}

/// A NodeNetwork, as far as its daemon answers for it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PublishedState {
    /// All that own it, whoever made them so.
    pub owners: Vec<Owner>,
    /// None also when what stands there cannot be read.
    pub status: Option<NodeNetworkStatus>,
}

/// An entry of `metadata.ownerReferences`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    pub api_version: String,
    pub kind: String,
    pub name: String,
    pub uid: String,
    pub controller: bool,
    pub blocks_deletion: bool,
}

impl Owner {
    /// The one owner that a NodeNetwork should have: it goes when its Node goes, and for no other reason.
    pub fn of(node: &NodeInfo) -> Self {
        Self {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: node.name.clone(),
            uid: node.uid.clone(),
            controller: false,
            blocks_deletion: false,
        }
    }
}

/// The last write that went through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastWrite {
    pub uid: String,
    pub desired: NodeNetworkStatus,
    /// What the API server made of it.
    pub accepted: PublishedState,
}

/// What to do about a NodeNetwork.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PublishDecision {
    /// All is as it should be.
    Nothing,
    Now(WriteParts),
    /// Too early to write again.
    At(Instant),
}

/// Which parts to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteParts {
    /// The object itself: it is missing, or not owned by its Node, or by something else too.
    pub object: bool,
    pub status: bool,
}

/// Decides about a write of `desired`.
pub fn publish(input: &PublishInput<'_>, desired: &NodeNetworkStatus, now: Instant) -> PublishDecision {
    let PublishInput { node, server, written, last_write, observed: _, ignored: _, networks, netfilter: _ } =
        *input;
    let writes = match server {
        None => WriteParts { object: true, status: true },
        Some(record) => WriteParts {
            object: record.owners != [Owner::of(node)],
            status: record.status.as_ref() != Some(desired),
        },
    };
    if !writes.object && !writes.status {
        return PublishDecision::Nothing;
    }
    // Something on the way changes what we write (an older schema, a webhook): writing it again changes nothing.
    if let (Some(record), Some(written)) = (server, written)
        && *record == written.accepted
        && *desired == written.desired
        && node.uid == written.uid
    {
        return PublishDecision::Nothing;
    }
    // A network waits for being listed, and pods for being told that it is ready.
    let listed = server.and_then(|record| record.status.as_ref()).map(|status| status.networks.as_slice());
    let pause = if listed == Some(networks) { MIN_WRITE_INTERVAL } else { MIN_NETWORK_WRITE_INTERVAL };
    match last_write.map(|last| last + pause) {
        Some(then) if now < then => PublishDecision::At(then),
        _ => PublishDecision::Now(writes),
    }
}

#[cfg(test)]
mod tests;
