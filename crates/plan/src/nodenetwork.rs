//! The NodeNetwork of a node: its desired status, and when to write it.
//!
//! Owns the plain types of the observed kernel state. Has no access to the kernel, the API server or a clock.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::{Duration, Instant},
};

use api::{
    Condition, ConditionStatus, IfNamePatterns, Interface, LINK_ALIAS_PREFIX, LinkState, Mac, NetworkOnNode,
    NodeNetworkStatus, Vtep,
    nodenetwork::{MAX_ADDRESSES, MAX_INTERFACE_NAME, MAX_INTERFACES, MAX_MESSAGE, MAX_TOTAL_ADDRESSES},
};
use ipnet::IpNet;
use jiff::Timestamp;

use crate::{condition::ConditionDraft, ipam::LeaseReport};

/// The default of `--ignore-interfaces`: links of pods and virtual machines, and links that other network software creates
/// for itself. It matches no bridges and bonds of administrators.
pub const DEFAULT_IGNORED: &str = concat!(
    // Pods and containers: reference plugins, Calico, Cilium, AWS, Azure, GKE, Kube-OVN.
    "veth*,cali*,lxc*,eni[0-9a-f]*,azv*,gke[0-9a-f]*,????????????_h,",
    // OVN-Kubernetes names the host end after the first 15 digits of the sandbox ID.
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
    // Links that the kernel creates in every namespace once a module is loaded.
    "lo,ifb*,sit*,ip6tnl*,ip6gre*,gre*,erspan*,ip_vti*,ip6_vti*,teql*",
);

/// Delay after the first kernel event, so that one observation covers a small burst.
const EVENT_DEBOUNCE: Duration = Duration::from_millis(100);
/// Bounds observations under an event storm to three per second.
const MIN_OBSERVE_INTERVAL: Duration = Duration::from_millis(350);
const MIN_WRITE_INTERVAL: Duration = Duration::from_secs(1);
/// The interval if the status of a bridge network changed: pods wait for it.
const MIN_NETWORK_WRITE_INTERVAL: Duration = Duration::from_millis(100);

/// The condition about the container runtime.
const RUNTIME_FOUND: &str = "RuntimeFound";

/// A link as the kernel describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Unique while the link exists.
    pub index: u32,
    /// With unprintable bytes escaped.
    pub name: String,
    /// `IFLA_INFO_KIND`; none for hardware.
    pub kind: Option<String>,
    pub mac: Option<Mac>,
    pub mtu: u32,
    pub admin: AdminState,
    pub oper: OperState,
    /// `IFF_LOOPBACK`.
    pub loopback: bool,
    /// The index of its bridge, bond or VRF.
    pub master: Option<u32>,
    /// The index of its lower link, or of the other end of a veth pair, if that is in the same namespace.
    pub lower: Option<u32>,
    /// Free text, settable by any privileged program.
    pub alias: String,
    pub addresses: Vec<Address>,
    /// Whether IPv6 is disabled; none if the kernel does not report it.
    pub ipv6_disabled: Option<bool>,
    /// Whether the host answers no ARP on it and forwards nothing from it; none if the kernel does not report it.
    pub ipv4_isolated: Option<bool>,
    /// The settings of a VXLAN device.
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

/// The administrative state of a link (`IFF_UP`).
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

/// The observed network state of the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KernelState {
    pub links: Vec<Link>,
    /// The indexes of the links that default routes of the main table use.
    pub default_routes: Vec<u32>,
    /// The indexes of the links that routes to the VTEPs of the peers use. Looked up only if [`peer_route_targets`]
    /// returns any.
    pub peer_links: Vec<u32>,
    /// The flood lists of all VXLAN devices.
    pub floods: Vec<FloodEntry>,
    /// Whether the kernel interrupted every attempt to dump a list (`NLM_F_DUMP_INTR`), so that entries may be missing.
    pub partial: bool,
}

/// The fields of the Node object that matter here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeInfo {
    pub name: String,
    pub uid: String,
    /// Its InternalIPs, in the order of the Node.
    pub internal_ips: Vec<IpAddr>,
}

/// The input of [`status`] and [`publish`].
#[derive(Debug, Clone, Copy)]
pub struct PublishInput<'a> {
    pub observed: &'a KernelState,
    pub node: &'a NodeInfo,
    /// The names of the links that are not listed.
    pub ignored: &'a IfNamePatterns,
    /// The newest known state of the object at the API server; none if it does not exist.
    pub server: Option<&'a PublishedState>,
    /// The last successful write.
    pub written: Option<&'a LastWrite>,
    /// The time of the last attempt to write.
    pub last_write: Option<Instant>,
    /// The bridge networks of the node, sorted by UID.
    pub networks: &'a [NetworkOnNode],
    /// The leases of the node; none until they are known. The last report stays published until then.
    pub leases: Option<&'a LeaseReport>,
    pub netfilter: Netfilter,
    pub runtime: &'a RuntimeStatus,
    /// Why the daemon cannot write its state to disk; none if it can.
    pub state_problem: Option<&'a str>,
}

/// Whether the kernel passes bridged packets to iptables (`net.bridge.bridge-nf-call-iptables`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Netfilter {
    /// Also if the kernel does not support it.
    Off,
    On,
}

/// Whether the daemon found the container runtime that runs its own pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum RuntimeStatus {
    /// The daemon has not queried the runtime since its start.
    #[default]
    Unknown,
    /// The socket that lists the sandboxes of this node.
    Found(String),
    /// Why there is none, and what to do.
    NotFound(String),
}

/// The desired status of the NodeNetwork.
pub fn status(input: &PublishInput<'_>, now: Timestamp) -> NodeNetworkStatus {
    let PublishInput {
        observed,
        node,
        ignored,
        server,
        written,
        last_write: _,
        networks,
        leases,
        netfilter,
        runtime,
        state_problem,
    } = input;
    // A condition keeps its transition time while its status stays the same. Our last write takes precedence over the
    // server's state, which may have been edited by others or pruned by an older schema.
    let ours = written.map(|written| &written.desired);
    let theirs = server.and_then(|record| record.status.as_ref());
    let before: Vec<&Condition> =
        ours.into_iter().chain(theirs).flat_map(|status| &status.conditions).collect();

    let vtep = vtep(observed, node, ignored);
    let (interfaces, omitted) = interfaces(observed, ignored, vtep.as_ref());
    let mut drafts = vec![ready(interfaces.len(), &omitted), vtep_found(observed, node, vtep.as_ref())];
    drafts.extend((!networks.is_empty()).then(|| netfilter_off(*netfilter)));
    drafts.push(state_writable(*state_problem));
    drafts.extend(runtime_found(runtime));
    let complete = |draft: ConditionDraft| {
        let old = before.iter().find(|old| old.r#type == draft.kind && old.status == draft.status);
        draft.into_condition(old.copied(), now, None)
    };
    let mut conditions: Vec<Condition> = drafts.into_iter().map(complete).collect();
    if **runtime == RuntimeStatus::Unknown {
        // After a restart the last known state stays published until the runtime has been queried.
        conditions.extend(before.iter().find(|old| old.r#type == RUNTIME_FOUND).map(|old| (*old).clone()));
    }
    let (closed_networks, claim_addresses) = match (leases, theirs) {
        (Some(LeaseReport { closed, claims }), _) => (closed.clone(), claims.clone()),
        (None, Some(status)) => (status.closed_networks.clone(), status.claim_addresses.clone()),
        (None, None) => (Vec::new(), None),
    };
    NodeNetworkStatus {
        vtep,
        interfaces,
        networks: networks.to_vec(),
        closed_networks,
        claim_addresses,
        conditions,
    }
}

/// The VTEP of the node: the first InternalIP that is on a link.
///
/// Its MTU is that of the link, unless the link is a loopback interface, whose 65536 bytes no packet to a peer can have:
/// then it is the smallest MTU of the links that lead to the peers.
pub fn vtep(observed: &KernelState, node: &NodeInfo, ignored: &IfNamePatterns) -> Option<Vtep> {
    let (address, link) = vtep_link(observed, node, ignored)?;
    let mtu = if link.loopback { underlay_mtu(observed, ignored) } else { link.mtu };
    Some(Vtep { address, interface: shown(&link.name), mtu: i32::try_from(mtu).unwrap_or(i32::MAX) })
}

fn vtep_link<'a>(
    observed: &'a KernelState,
    node: &NodeInfo,
    ignored: &IfNamePatterns,
) -> Option<(IpAddr, &'a Link)> {
    node.internal_ips.iter().find_map(|&address| {
        observed
            .links
            .iter()
            .filter(|link| link.addresses.iter().any(|own| own.net.addr() == address))
            // An address may be on several links (proxies add it to a dummy): prefer the real one.
            .min_by_key(|link| (link.loopback, ignored.matches(&link.name), link.index))
            .map(|link| (address, link))
    })
}

/// Whether the VTEP is on a loopback interface.
pub fn is_loopback(observed: &KernelState, vtep: &Vtep) -> bool {
    observed.links.iter().any(|link| link.loopback && shown(&link.name) == vtep.interface)
}

/// The addresses whose routes decide the MTU of the VTEP, for [`KernelState::peer_links`]. Empty unless the VTEP is on a
/// loopback interface.
pub fn peer_route_targets(
    observed: &KernelState,
    node: &NodeInfo,
    ignored: &IfNamePatterns,
    peer_vteps: impl Iterator<Item = IpAddr>,
) -> BTreeSet<IpAddr> {
    match vtep_link(observed, node, ignored) {
        Some((own, link)) if link.loopback => {
            peer_vteps.filter(|vtep| *vtep != own && vtep.is_ipv4() == own.is_ipv4()).collect()
        }
        _ => BTreeSet::new(),
    }
}

/// The MTU of a VTEP on a loopback interface: the smallest of the links that routes to the peers use.
///
/// Without such a link (no peer has a VTEP yet, or none has a route), the smallest of all links that could carry a route
/// to a peer: the links of default routes, and all links that are up and have an address. This errs on the small side. A
/// network with an MTU that is too large loses packets and cannot be lowered while pods use it; one that is too small
/// works.
fn underlay_mtu(observed: &KernelState, ignored: &IfNamePatterns) -> u32 {
    /// For a node that has no link besides loopback interfaces.
    const ETHERNET_MTU: u32 = 1500;

    let links = || observed.links.iter().filter(|link| !link.loopback);
    let to_peers = links().filter(|link| observed.peer_links.contains(&link.index));
    let possible = links().filter(|link| {
        observed.default_routes.contains(&link.index) || carries_routes(link) && !ignored.matches(&link.name)
    });
    let to_peers = to_peers.map(|link| link.mtu).min();
    to_peers.or_else(|| possible.map(|link| link.mtu).min()).unwrap_or(ETHERNET_MTU)
}

/// Whether a link may be the output of a route: it is up and has an address, which may be link-local. Not a dummy, which
/// transmits nothing, and not a link of Patchbay: the MTU of a network must not limit itself.
fn carries_routes(link: &Link) -> bool {
    link.admin == AdminState::Up
        && matches!(link.oper, OperState::Up | OperState::Unknown)
        && !link.addresses.is_empty()
        && link.kind.as_deref() != Some("dummy")
        && !link.alias.starts_with(LINK_ALIAS_PREFIX)
}

/// How much exceeds the limits of the object.
struct Omitted {
    links: usize,
    addresses: usize,
}

/// The links to list, sorted by name, and how many do not fit.
fn interfaces(
    observed: &KernelState,
    ignored: &IfNamePatterns,
    vtep: Option<&Vtep>,
) -> (Vec<Interface>, Omitted) {
    let names: BTreeMap<u32, &str> =
        observed.links.iter().map(|link| (link.index, link.name.as_str())).collect();
    let default_routes: BTreeSet<u32> = observed.default_routes.iter().copied().collect();
    // Links of Patchbay are reported per network instead. A bridge changes its state with the first and the last pod.
    let ours = |link: &Link| link.alias.starts_with(LINK_ALIAS_PREFIX);

    let mut listed: Vec<&Link> = observed
        .links
        .iter()
        .filter(|link| !link.loopback && !link.name.is_empty())
        .filter(|link| !ours(link) && !ignored.matches(&link.name))
        .collect();
    // The name is the key of the list. A link that is renamed during the dump can appear twice, and the API server would
    // reject the whole list.
    listed.sort_by_cached_key(|link| (shown(&link.name), link.index));
    listed.dedup_by_key(|link| shown(&link.name));

    // Beyond the limit, the links that the node needs come first, then the others by name.
    let needed = |link: &Link| {
        default_routes.contains(&link.index)
            || observed.peer_links.contains(&link.index)
            || vtep.is_some_and(|vtep| vtep.interface == shown(&link.name))
    };
    listed.sort_by_cached_key(|link| (!needed(link), shown(&link.name)));
    let mut omitted = Omitted { links: listed.len().saturating_sub(MAX_INTERFACES), addresses: 0 };
    listed.truncate(MAX_INTERFACES);

    let mut remaining = MAX_TOTAL_ADDRESSES;
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
            let fit = nets.len().min(MAX_ADDRESSES).min(remaining);
            omitted.addresses += nets.len() - fit;
            remaining -= fit;
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

/// Truncates a name to the length that the schema allows.
fn shown(name: &str) -> String {
    name.chars().take(MAX_INTERFACE_NAME).collect()
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

/// The addresses to list. Link-local and temporary addresses are left out because they change by themselves.
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

fn ready(listed: usize, omitted: &Omitted) -> ConditionDraft {
    const REMEDY: &str = "exclude links that no network uses with `patchbay node --ignore-interfaces`";
    let (status, reason, message) = match omitted {
        Omitted { links: 0, addresses: 0 } => {
            (ConditionStatus::True, "Published", "all links of this node are listed".to_owned())
        }
        Omitted { links: 0, addresses } => {
            let message = format!(
                "{addresses} addresses are not listed: the limits are {MAX_ADDRESSES} per link and \
                 {MAX_TOTAL_ADDRESSES} in total; remove some, or {REMEDY}"
            );
            (ConditionStatus::False, "TooManyAddresses", message)
        }
        Omitted { links, addresses: _ } => {
            let message = format!("only {listed} of {} links are listed; {REMEDY}", listed + links);
            (ConditionStatus::False, "TooManyLinks", message)
        }
    };
    ConditionDraft { kind: "Ready", status, reason, message }
}

fn vtep_found(observed: &KernelState, node: &NodeInfo, vtep: Option<&Vtep>) -> ConditionDraft {
    let (status, reason, message) = match vtep {
        Some(vtep) => {
            let Vtep { address, interface, mtu } = vtep;
            let message = if is_loopback(observed, vtep) {
                format!("overlays use {address} on {interface}; MTU {mtu} is that of the links to the other nodes")
            } else {
                format!("overlays use {address} on {interface}")
            };
            (ConditionStatus::True, "AddressOnLink", message)
        }
        None if node.internal_ips.is_empty() => (
            ConditionStatus::False,
            "NoInternalIP",
            "the Node has no address of type InternalIP, so overlay networks cannot reach it; set the kubelet's \
             --node-ip, or check the cloud controller that sets the Node's addresses"
                .to_owned(),
        ),
        None => {
            let ips: Vec<String> = node.internal_ips.iter().take(8).map(ToString::to_string).collect();
            let message = format!(
                "no link of this node has the Node's InternalIP {}, so overlay networks cannot reach it; set the \
                 kubelet's --node-ip to an address of a link",
                ips.join(" or ")
            );
            (ConditionStatus::False, "AddressNotOnAnyLink", message)
        }
    };
    ConditionDraft { kind: "VtepFound", status, reason, message }
}

fn netfilter_off(netfilter: Netfilter) -> ConditionDraft {
    let (status, reason, message) = match netfilter {
        Netfilter::Off => {
            (ConditionStatus::True, "NotCalled", "bridged packets bypass iptables".to_owned())
        }
        Netfilter::On => (
            ConditionStatus::False,
            "CallsIptables",
            "net.bridge.bridge-nf-call-iptables is 1: the firewall rules of this node apply to packets between pods of \
             a bridge network and may drop them; set it to 0 if nothing on this node needs it (Patchbay does not \
             change it)"
                .to_owned(),
        ),
    };
    ConditionDraft { kind: "BridgeNetfilterOff", status, reason, message }
}

fn state_writable(problem: Option<&str>) -> ConditionDraft {
    let (reason, message) = match problem {
        None => ("Writable", "the daemon can write its address journal".to_owned()),
        Some(problem) => {
            let advice = "free disk space on the node, or make the directory writable";
            let effect = "pods can be deleted, but new pods get no address from this node";
            ("NotWritable", format!("{effect}: {problem}; {advice}"))
        }
    };
    ConditionDraft::new(
        "StateWritable",
        problem.is_none(),
        reason,
        message.chars().take(MAX_MESSAGE).collect::<String>(),
    )
}

fn runtime_found(runtime: &RuntimeStatus) -> Option<ConditionDraft> {
    let (status, reason, message) = match runtime {
        RuntimeStatus::Unknown => return None,
        RuntimeStatus::Found(socket) => {
            (ConditionStatus::True, "SocketFound", format!("the container runtime listens on {socket}"))
        }
        RuntimeStatus::NotFound(problem) => {
            let message = format!("addresses of deleted sandboxes are not released: {problem}");
            (ConditionStatus::False, "SocketNotFound", message.chars().take(MAX_MESSAGE).collect())
        }
    };
    Some(ConditionDraft { kind: RUNTIME_FOUND, status, reason, message })
}

/// When to observe the kernel again. `event` is the time of the first event since the last observation.
pub fn next_observation(event: Instant, last_observation: Option<Instant>) -> Instant {
    let settled = event + EVENT_DEBOUNCE;
    last_observation.map_or(settled, |last| settled.max(last + MIN_OBSERVE_INTERVAL))
}

/// The parts of a NodeNetwork that its daemon writes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PublishedState {
    /// All owner references, also those of other clients.
    pub owners: Vec<Owner>,
    /// None also if it cannot be parsed.
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
    /// The only owner of a NodeNetwork: garbage collection deletes it with its Node and for no other reason.
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

/// The last successful write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastWrite {
    pub uid: String,
    pub desired: NodeNetworkStatus,
    /// The state that the API server returned.
    pub accepted: PublishedState,
}

/// Whether to write the NodeNetwork.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PublishDecision {
    /// The API server has the desired state.
    Nothing,
    Now(WriteParts),
    /// Not before this time.
    At(Instant),
}

/// Which parts to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteParts {
    /// The object itself: it does not exist, or its Node is not its only owner.
    pub object: bool,
    pub status: bool,
}

/// Decides whether to write `desired`.
pub fn publish(input: &PublishInput<'_>, desired: &NodeNetworkStatus, now: Instant) -> PublishDecision {
    let PublishInput { node, server, written, last_write, observed: _, ignored: _, .. } = *input;
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
    // An older schema or a webhook changes our writes: writing again has no effect.
    if let (Some(record), Some(written)) = (server, written)
        && *record == written.accepted
        && *desired == written.desired
        && node.uid == written.uid
    {
        return PublishDecision::Nothing;
    }
    // The daemon waits for the listing before it creates links, pods wait for the network to be ready and for their addresses
    // of claims to be listed, and the deletion of a network waits for its addresses.
    let urgent = |status: &NodeNetworkStatus| {
        status.networks != desired.networks
            || status.closed_networks != desired.closed_networks
            || status.claim_addresses != desired.claim_addresses
    };
    let stored = server.and_then(|record| record.status.as_ref());
    let interval = if stored.is_none_or(urgent) { MIN_NETWORK_WRITE_INTERVAL } else { MIN_WRITE_INTERVAL };
    match last_write.map(|last| last + interval) {
        Some(next) if now < next => PublishDecision::At(next),
        _ => PublishDecision::Now(writes),
    }
}

#[cfg(test)]
mod tests;
