//! When a NodeNetwork is observed and written.

use super::*;

#[test]
fn observations_are_debounced_and_limited_to_three_per_second() {
    let start = Instant::now();
    let ms = |n| start + Duration::from_millis(n);
    assert_eq!(next_observation(ms(0), None), ms(100));
    assert_eq!(next_observation(ms(5000), Some(ms(0))), ms(5100));
    assert_eq!(next_observation(ms(10), Some(ms(0))), ms(350));
}

/// The inputs of [`publish`], initially with everything written.
pub(super) struct Publisher {
    pub(super) observed: KernelState,
    node: NodeInfo,
    ignored: IfNamePatterns,
    server: Option<PublishedState>,
    written: Option<LastWrite>,
    last_write: Option<Instant>,
    networks: Vec<NetworkOnNode>,
    leases: Option<LeaseReport>,
    netfilter: Netfilter,
    runtime: RuntimeStatus,
    state_problem: Option<String>,
}

impl Publisher {
    pub(super) fn new() -> Self {
        let mut publisher = Self {
            observed: observed(&[link(1, "eth0")]),
            node: node(&["10.0.0.2"]),
            ignored: ignored(),
            server: None,
            written: None,
            last_write: None,
            networks: Vec::new(),
            leases: None,
            netfilter: Netfilter::Off,
            runtime: RuntimeStatus::Unknown,
            state_problem: None,
        };
        publisher.write();
        publisher
    }

    pub(super) fn input(&self) -> PublishInput<'_> {
        PublishInput {
            observed: &self.observed,
            node: &self.node,
            ignored: &self.ignored,
            server: self.server.as_ref(),
            written: self.written.as_ref(),
            last_write: self.last_write,
            networks: &self.networks,
            leases: self.leases.as_ref(),
            netfilter: self.netfilter,
            runtime: &self.runtime,
            state_problem: self.state_problem.as_deref(),
        }
    }

    pub(super) fn desired(&self) -> NodeNetworkStatus {
        status(&self.input(), noon())
    }

    pub(super) fn write(&mut self) {
        let desired = self.desired();
        let accepted = PublishedState { owners: vec![Owner::of(&self.node)], status: Some(desired.clone()) };
        self.server = Some(accepted.clone());
        self.written = Some(LastWrite { uid: self.node.uid.clone(), desired, accepted });
    }

    pub(super) fn publish(&self, now: Instant) -> PublishDecision {
        publish(&self.input(), &self.desired(), now)
    }
}

const BOTH: PublishDecision = PublishDecision::Now(WriteParts { object: true, status: true });
const STATUS: PublishDecision = PublishDecision::Now(WriteParts { object: false, status: true });
const OBJECT: PublishDecision = PublishDecision::Now(WriteParts { object: true, status: false });

#[test]
fn nothing_is_written_without_a_change() {
    assert_eq!(Publisher::new().publish(Instant::now()), PublishDecision::Nothing);
}

#[test]
fn a_new_nic_is_written_immediately_and_the_next_one_a_second_later() {
    let mut publisher = Publisher::new();
    let now = Instant::now();
    publisher.observed.links.push(link(2, "eth1"));
    assert_eq!(publisher.publish(now), STATUS);
    publisher.write();
    publisher.last_write = Some(now);
    publisher.observed.links.push(link(3, "eth2"));
    assert_eq!(
        publisher.publish(now + Duration::from_millis(999)),
        PublishDecision::At(now + MIN_WRITE_INTERVAL)
    );
    assert_eq!(publisher.publish(now + MIN_WRITE_INTERVAL), STATUS);
}

#[test]
fn a_closed_network_is_reported_at_once_and_the_last_report_stays_while_the_leases_are_not_known() {
    let mut publisher = Publisher::new();
    let now = Instant::now();
    publisher.last_write = Some(now);
    let closed = |interfaces| api::ClosedNetwork {
        uid: "u".to_owned(),
        name: "blue".to_owned(),
        interfaces,
        pods: Vec::new(),
        unverified_blocks: 0,
    };
    let report =
        |interfaces| Some(LeaseReport { closed: vec![closed(interfaces)], claims: Some(Vec::new()) });
    publisher.leases = report(1);
    assert_eq!(publisher.publish(now), PublishDecision::At(now + MIN_NETWORK_WRITE_INTERVAL));
    publisher.write();
    // The daemon restarted.
    publisher.leases = None;
    assert_eq!(publisher.publish(now), PublishDecision::Nothing);
    assert_eq!(publisher.desired().closed_networks, [closed(1)]);
    publisher.leases = report(0);
    assert_eq!(publisher.desired().closed_networks, [closed(0)]);
    assert_eq!(publisher.desired().claim_addresses, Some(Vec::new()));
    // An ADD waits until its address is listed.
    publisher.write();
    let claims =
        api::ClaimAddresses { network_uid: "u".to_owned(), addresses: vec!["10.0.0.2".parse().unwrap()] };
    publisher.leases = Some(LeaseReport { claims: Some(vec![claims]), ..publisher.leases.unwrap() });
    assert_eq!(publisher.publish(now), PublishDecision::At(now + MIN_NETWORK_WRITE_INTERVAL));
}

fn network(ready: bool) -> NetworkOnNode {
    NetworkOnNode {
        uid: "uid".to_owned(),
        name: "blue".to_owned(),
        observed_generation: 1,
        ready,
        reason: "Ready".to_owned(),
        message: String::new(),
        bridge: "br-blue".to_owned(),
        mac: None,
        mtu: Some(1500),
        ports: Vec::new(),
        pods_with_old_mtu: 0,
    }
}

#[test]
fn a_network_change_is_written_within_a_tenth_of_a_second() {
    let mut publisher = Publisher::new();
    let now = Instant::now();
    publisher.last_write = Some(now);
    publisher.networks = vec![network(false)];
    let soon = now + MIN_NETWORK_WRITE_INTERVAL;
    assert_eq!(publisher.publish(now), PublishDecision::At(soon));
    assert_eq!(publisher.publish(soon), STATUS);
    publisher.write();
    assert_eq!(publisher.publish(soon), PublishDecision::Nothing);
    publisher.observed.links.push(link(2, "eth1"));
    assert_eq!(publisher.publish(soon), PublishDecision::At(now + MIN_WRITE_INTERVAL));
    publisher.networks = vec![network(true)];
    assert_eq!(publisher.publish(soon), STATUS);
}

#[test]
fn bridge_netfilter_is_reported_only_on_nodes_with_bridge_networks() {
    let mut publisher = Publisher::new();
    publisher.netfilter = Netfilter::On;
    assert!(publisher.desired().conditions.iter().all(|condition| condition.r#type != "BridgeNetfilterOff"));
    publisher.networks = vec![network(true)];
    let desired = publisher.desired();
    let warning = condition(&desired, "BridgeNetfilterOff");
    assert_eq!((warning.status, warning.reason.as_str()), (ConditionStatus::False, "CallsIptables"));
    publisher.netfilter = Netfilter::Off;
    assert_eq!(condition(&publisher.desired(), "BridgeNetfilterOff").status, ConditionStatus::True);
}

#[test]
fn a_missing_container_runtime_is_a_condition_that_survives_a_restart_of_the_daemon() {
    let mut publisher = Publisher::new();
    assert!(publisher.desired().conditions.iter().all(|condition| condition.r#type != "RuntimeFound"));
    publisher.runtime = RuntimeStatus::NotFound("set --runtime-socket".to_owned());
    let desired = publisher.desired();
    let missing = condition(&desired, "RuntimeFound");
    assert_eq!((missing.status, missing.reason.as_str()), (ConditionStatus::False, "SocketNotFound"));
    assert!(missing.message.ends_with("are not released: set --runtime-socket"), "{}", missing.message);

    publisher.write();
    publisher.runtime = RuntimeStatus::Unknown;
    assert_eq!(publisher.desired(), desired);
    publisher.runtime = RuntimeStatus::Found("/run/crio/crio.sock".to_owned());
    assert_eq!(condition(&publisher.desired(), "RuntimeFound").status, ConditionStatus::True);
}

#[test]
fn a_disk_that_cannot_be_written_is_a_condition_with_what_to_do() {
    let mut publisher = Publisher::new();
    assert_eq!(condition(&publisher.desired(), "StateWritable").status, ConditionStatus::True);
    publisher.state_problem =
        Some("write /var/lib/patchbay/ipam/journal: No space left on device".to_owned());
    let desired = publisher.desired();
    let problem = condition(&desired, "StateWritable");
    assert_eq!((problem.status, problem.reason.as_str()), (ConditionStatus::False, "NotWritable"));
    assert!(
        problem.message.contains("No space left") && problem.message.contains("free disk space"),
        "{problem:?}"
    );
}

#[test]
fn a_missing_object_is_created_and_a_foreign_edit_reverted() {
    let now = Instant::now();
    let mut publisher = Publisher::new();
    publisher.server = None;
    assert_eq!(publisher.publish(now), BOTH);

    let mut publisher = Publisher::new();
    publisher.server.as_mut().unwrap().status = None;
    assert_eq!(publisher.publish(now), STATUS);

    let mut publisher = Publisher::new();
    publisher.server.as_mut().unwrap().status.as_mut().unwrap().interfaces.clear();
    assert_eq!(publisher.publish(now), STATUS);

    let mut publisher = Publisher::new();
    publisher.server.as_mut().unwrap().owners.clear();
    assert_eq!(publisher.publish(now), OBJECT);
}

#[test]
fn a_foreign_owner_reference_is_reverted() {
    let mut owners = [Owner::of(&node(&[])), Owner::of(&node(&[])), Owner::of(&node(&[]))];
    owners[0].kind = "Pod".to_owned();
    owners[1].uid = "uid-0".to_owned();
    owners[2].blocks_deletion = true;
    for owner in owners {
        let mut publisher = Publisher::new();
        publisher.server.as_mut().unwrap().owners.push(owner.clone());
        assert_eq!(publisher.publish(Instant::now()), OBJECT, "{owner:?} beside ours");
        publisher.server.as_mut().unwrap().owners.remove(0);
        assert_eq!(publisher.publish(Instant::now()), OBJECT, "{owner:?} alone");
    }
}

#[test]
fn a_recreated_node_becomes_the_owner() {
    let mut publisher = Publisher::new();
    publisher.node.uid = "uid-2".to_owned();
    assert_eq!(publisher.publish(Instant::now()), OBJECT);
}

#[test]
fn no_write_loop_with_a_server_that_changes_the_written_status() {
    let mut publisher = Publisher::new();
    for record in [publisher.server.as_mut().unwrap(), &mut publisher.written.as_mut().unwrap().accepted] {
        record.status.as_mut().unwrap().conditions.clear();
    }
    let much_later: Timestamp = "2026-01-01T15:00:00Z".parse().unwrap();
    let desired = status(&publisher.input(), much_later);
    assert_eq!(publish(&publisher.input(), &desired, Instant::now()), PublishDecision::Nothing);
    publisher.observed.links.push(link(2, "eth1"));
    assert_eq!(publisher.publish(Instant::now()), STATUS);
}
