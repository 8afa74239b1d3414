//! The endpoints of a service, derived from the pods that it selects.

use std::{
    collections::{BTreeMap, HashMap, HashSet, hash_map},
    net::IpAddr,
    sync::Arc,
};

use api::networkservice::{EndpointCounts, FamilyCounts, Hostnames, TargetPort};
use jiff::Timestamp;

use super::{
    ContainerPort, DuplicateAddress, Endpoint, EndpointConditions, EndpointPort, EndpointPorts, Families,
    Family, FaultReason, Hints, InterfaceFault, NetworkState, ObservedEndpoint, ObservedSlice, PodFacts,
    PodFault, PodPhase, ServicePort, ServiceSpec, TrafficDistribution, duplicates,
};

/// The zone of each Node that exists; `None` if the Node has no zone label.
pub type NodeZones = HashMap<Arc<str>, Option<Arc<str>>>;

/// What the endpoints of a service depend on, besides its pods.
#[derive(Debug, Clone, Copy)]
pub struct EndpointInput<'a> {
    pub spec: &'a ServiceSpec,
    /// The families of the Service (R12).
    pub families: Families,
    pub nodes: &'a NodeZones,
    pub network: &'a NetworkState,
    /// The slices of the Service that Patchbay manages.
    pub published: &'a [&'a ObservedSlice],
}

/// The endpoints that a service should have.
#[derive(Debug, Clone, Default)]
pub struct DesiredEndpoints {
    /// The endpoints by family and ports (R11, R16). An address is in one group only.
    pub groups: Vec<EndpointGroup>,
    /// Where the endpoint of each address is: an index of `positions`, which has `None` for an address that is withheld. There
    /// are two steps, so that each address is hashed once.
    indexes: HashMap<IpAddr, usize>,
    positions: Vec<Option<EndpointIndex>>,
    /// The number of selected pods that have not finished.
    pub pods: usize,
    pub counts: EndpointCounts,
    /// Addresses that are withheld, in order.
    pub duplicates: Vec<DuplicateAddress>,
    /// What is missing and why, in order.
    pub faults: Vec<PodFault>,
    /// Nodes that pods run on and that do not exist. Their pods are left out until the Node exists (R26).
    pub missing_nodes: Vec<Arc<str>>,
}

/// The endpoints of one family with the same ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointGroup {
    pub family: Family,
    pub ports: EndpointPorts,
    pub endpoints: Vec<Endpoint>,
    /// The time of the last change of each pod's readiness, by the index of its endpoint.
    pub(super) ready_since: Vec<Option<Timestamp>>,
}

/// The indexes of a group and of an endpoint in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EndpointIndex {
    pub group: usize,
    pub endpoint: usize,
}

/// An address and the first pod that reports it.
struct ReportedAddress<'a> {
    address: IpAddr,
    pod: &'a PodFacts,
}

/// Derives the endpoints of a service from the pods that it selects.
pub fn endpoints<'a>(
    input: &EndpointInput<'_>,
    pods: impl IntoIterator<Item = &'a PodFacts>,
) -> DesiredEndpoints {
    let mut desired = DesiredEndpoints::default();
    let published = input.published.iter().map(|slice| slice.endpoints.len()).sum();
    desired.indexes.reserve(published);
    let retained = retained(input);
    let mut reported: Vec<ReportedAddress<'_>> = Vec::with_capacity(published);
    // The pods of each address that several report.
    let mut several: BTreeMap<IpAddr, Vec<&PodFacts>> = BTreeMap::new();
    let mut found = Vec::new();
    for pod in pods.into_iter().filter(|pod| pod.phase == PodPhase::Active) {
        desired.pods += 1;
        if pod.host_network || !node_exists(input, pod, &mut desired.missing_nodes) {
            continue;
        }
        addresses(input, pod, &mut found, &mut desired.faults);
        for address in found.drain(..) {
            if retained.as_ref().is_some_and(|retained| !retained.contains(&(address, &*pod.uid))) {
                continue;
            }
            match desired.indexes.entry(address) {
                hash_map::Entry::Vacant(vacant) => {
                    vacant.insert(reported.len());
                    reported.push(ReportedAddress { address, pod });
                }
                hash_map::Entry::Occupied(index) => {
                    let pods = several.entry(address).or_insert_with(|| vec![reported[*index.get()].pod]);
                    // A pod that reports an address twice does so without another pod in between.
                    if pods.last().is_some_and(|last| last.uid != pod.uid) {
                        pods.push(pod);
                    }
                }
            }
        }
    }
    let mut builder = GroupBuilder::new(input.spec, reported.len());
    let mut counts = [FamilyCounts::default(); 2];
    for ReportedAddress { address, pod: first } in reported {
        let pods = if several.is_empty() { None } else { several.get(&address) };
        let pod = pods.map_or(Some(first), |pods| duplicates::winner(pods));
        if pod.is_none() {
            desired.duplicates.extend(pods.and_then(|pods| DuplicateAddress::new(address, pods)));
        }
        desired.positions.push(pod.map(|pod| {
            let endpoint = endpoint(input, pod, address);
            count(&mut counts[usize::from(address.is_ipv6())], &endpoint);
            builder.push(pod, endpoint)
        }));
    }
    desired.groups = builder.groups;
    desired.counts = summary(counts);
    if input.spec.hostnames == Hostnames::PodName {
        desired.faults.extend(bad_hostnames(&desired.groups));
    }
    desired.duplicates.sort_unstable();
    desired.faults.sort_unstable();
    desired.faults.dedup();
    desired.missing_nodes.sort_unstable();
    desired.missing_nodes.dedup();
    desired
}

/// The pods whose name cannot be a hostname, although the service asks for it.
fn bad_hostnames(groups: &[EndpointGroup]) -> impl Iterator<Item = PodFault> {
    let unnamed = groups.iter().flat_map(|group| &group.endpoints).filter(|one| one.hostname.is_none());
    unnamed.map(|one| PodFault {
        pod: one.pod.clone(),
        reason: FaultReason::BadHostname,
        detail: "rename the pod or its workload".into(),
    })
}

impl DesiredEndpoints {
    /// Where the endpoint with an address is.
    pub(super) fn index_of(&self, address: IpAddr) -> Option<EndpointIndex> {
        self.positions.get(*self.indexes.get(&address)?).copied().flatten()
    }
}

/// While the NAD does not exist, its subnets are unknown: only addresses that are published already may stay.
fn retained<'a>(input: &EndpointInput<'a>) -> Option<HashSet<(IpAddr, &'a str)>> {
    let known = |endpoint: &'a ObservedEndpoint| match endpoint {
        ObservedEndpoint::Known(endpoint) => Some((endpoint.address, &*endpoint.pod_uid)),
        ObservedEndpoint::Altered => None,
    };
    let network = input.spec.network.to_string();
    let of_network = |slice: &&&ObservedSlice| slice.network.as_deref() == Some(&*network);
    let published = || input.published.iter().filter(of_network).flat_map(|slice| &slice.endpoints);
    (!input.network.is_found()).then(|| published().filter_map(known).collect())
}

/// Whether the Node of a pod exists. If it does not, the pod is still published with publishNotReadyAddresses (R26).
fn node_exists(input: &EndpointInput<'_>, pod: &PodFacts, missing: &mut Vec<Arc<str>>) -> bool {
    match &pod.node {
        Some(node) if input.nodes.contains_key(node) => true,
        Some(node) => {
            missing.push(node.clone());
            input.spec.publish_not_ready
        }
        None => input.spec.publish_not_ready,
    }
}

/// Adds the addresses of a pod on the network of the service.
fn addresses(
    input: &EndpointInput<'_>,
    pod: &PodFacts,
    addresses: &mut Vec<IpAddr>,
    faults: &mut Vec<PodFault>,
) {
    let mut fault =
        |reason, detail: Arc<str>| faults.push(PodFault { pod: pod.name.clone(), reason, detail });
    let interfaces = match &pod.interfaces {
        Ok(interfaces) => interfaces,
        Err(error) => return fault(FaultReason::BadNetworkStatus, error.clone()),
    };
    let named = |name: &str| input.spec.interface.as_ref().is_none_or(|wanted| wanted.as_str() == name);
    for interface in interfaces.iter().filter(|one| *one.nad == input.spec.network && named(&one.interface)) {
        for found in &interface.faults {
            match found {
                InterfaceFault::Address(text) => fault(FaultReason::BadAddress, (**text).into()),
                InterfaceFault::Entry(text) => fault(FaultReason::BadNetworkStatusEntry, (**text).into()),
            }
        }
        for &address in &interface.addresses {
            if !input.families.contains(Family::of(address)) {
                continue;
            }
            match address_fault(input.network, address) {
                None => addresses.push(address),
                Some(reason) => fault(reason, address.to_string().into()),
            }
        }
    }
}

fn address_fault(network: &NetworkState, address: IpAddr) -> Option<FaultReason> {
    match network {
        NetworkState::Found { addresses } => addresses.as_ref()?.fault(address),
        NetworkState::NotFound | NetworkState::NoBridgeNetwork(_) | NetworkState::KindNotServed => None,
    }
}

fn endpoint(input: &EndpointInput<'_>, pod: &PodFacts, address: IpAddr) -> Endpoint {
    let zone = pod.node.as_ref().and_then(|node| input.nodes.get(node)).and_then(Clone::clone);
    let conditions = EndpointConditions {
        ready: input.spec.publish_not_ready || pod.takes_traffic(),
        serving: pod.ready,
        terminating: pod.deleting,
    };
    let hints = match input.spec.traffic {
        Some(TrafficDistribution::SameZone) if conditions.ready && zone.is_some() => Hints::Zone,
        Some(TrafficDistribution::SameNode) if conditions.ready && pod.node.is_some() => Hints::Node,
        Some(_) | None => Hints::None,
    };
    Endpoint {
        address,
        hostname: hostname(input.spec, pod),
        pod: pod.name.clone(),
        pod_uid: pod.uid.clone(),
        node: pod.node.clone(),
        zone,
        conditions,
        hints,
    }
}

/// The hostname of the endpoints of a pod (R27).
fn hostname(spec: &ServiceSpec, pod: &PodFacts) -> Option<Arc<str>> {
    let name = match spec.hostnames {
        Hostnames::PodName => Some(&pod.name),
        Hostnames::None => {
            let subdomain = pod.subdomain.as_deref() == Some(&*spec.name) && pod.namespace == spec.namespace;
            pod.hostname.as_ref().filter(|_| subdomain)
        }
    };
    name.filter(|name| is_dns_label(name)).cloned()
}

fn is_dns_label(text: &str) -> bool {
    let valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    (1..=63).contains(&text.len())
        && text.chars().all(valid)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

fn count(counts: &mut FamilyCounts, endpoint: &Endpoint) {
    counts.total = counts.total.saturating_add(1);
    counts.ready = counts.ready.saturating_add(i32::from(endpoint.conditions.ready));
}

fn summary([ipv4, ipv6]: [FamilyCounts; 2]) -> EndpointCounts {
    let ready = ipv4.ready.saturating_add(ipv6.ready);
    let total = ipv4.total.saturating_add(ipv6.total);
    EndpointCounts { ipv4, ipv6, summary: format!("{ready}/{total}") }
}

/// Collects endpoints by family and ports.
struct GroupBuilder<'a> {
    ports: &'a [ServicePort],
    /// Whether the ports are the same for every pod.
    fixed: bool,
    /// The ports of the last pod: pods of one workload have the same.
    last: Option<(Arc<[ContainerPort]>, EndpointPorts)>,
    indexes: HashMap<(Family, EndpointPorts), usize>,
    groups: Vec<EndpointGroup>,
    /// The group of the last endpoint of each family.
    current: [Option<usize>; 2],
    /// The expected number of endpoints.
    expected: usize,
}

impl<'a> GroupBuilder<'a> {
    fn new(spec: &'a ServiceSpec, expected: usize) -> Self {
        let named = spec.ports.iter().any(|port| matches!(port.target, TargetPort::Name(_)));
        Self {
            ports: &spec.ports,
            fixed: !named,
            last: None,
            indexes: HashMap::new(),
            groups: Vec::new(),
            current: [None; 2],
            expected,
        }
    }

    fn push(&mut self, pod: &PodFacts, endpoint: Endpoint) -> EndpointIndex {
        let group = self.group(pod, Family::of(endpoint.address));
        let EndpointGroup { endpoints, ready_since, .. } = &mut self.groups[group];
        endpoints.push(endpoint);
        ready_since.push(pod.ready_since);
        EndpointIndex { group, endpoint: endpoints.len() - 1 }
    }

    /// The index of the group of a pod.
    fn group(&mut self, pod: &PodFacts, family: Family) -> usize {
        let of_family = usize::from(family == Family::Ipv6);
        let same_ports = |(ports, _): &(Arc<[ContainerPort]>, EndpointPorts)| *ports == pod.ports;
        if let Some(group) = self.current[of_family]
            && (self.fixed || self.last.as_ref().is_some_and(same_ports))
        {
            return group;
        }
        let ports = match &self.last {
            Some(last) if self.fixed || same_ports(last) => last.1.clone(),
            _ => {
                let ports = resolve(self.ports, &pod.ports);
                self.last = Some((pod.ports.clone(), ports.clone()));
                // The group of the other family is that of the last pod.
                self.current = [None; 2];
                ports
            }
        };
        let (groups, capacity) = (&mut self.groups, if self.fixed { self.expected } else { 0 });
        let group = *self.indexes.entry((family, ports.clone())).or_insert_with(|| {
            let (endpoints, ready_since) = (Vec::with_capacity(capacity), Vec::with_capacity(capacity));
            groups.push(EndpointGroup { family, ports, endpoints, ready_since });
            groups.len() - 1
        });
        self.current[of_family] = Some(group);
        group
    }
}

/// The ports of a slice (R16, R17). A named target port that the pod does not have with this protocol is left out.
fn resolve(ports: &[ServicePort], containers: &[ContainerPort]) -> EndpointPorts {
    let number = |port: &ServicePort| match &port.target {
        TargetPort::Number(number) => u16::try_from(*number).ok(),
        TargetPort::Name(name) => {
            let matches = |one: &&ContainerPort| *one.name == **name && one.protocol == port.protocol;
            containers.iter().find(matches).map(|one| one.port)
        }
    };
    let resolved = |port: &ServicePort| {
        Some(EndpointPort {
            name: port.name.as_str().into(),
            protocol: port.protocol,
            port: number(port)?,
            app_protocol: port.app_protocol.as_deref().map(Into::into),
        })
    };
    EndpointPorts::new(ports.iter().filter_map(resolved))
}
