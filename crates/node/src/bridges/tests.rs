use std::sync::atomic::{AtomicU64, Ordering};

use kube::Client;

use super::*;

/// A controller without networks, whose steps all fail.
pub fn bridges(client: Client, metrics: Metrics) -> BridgeController {
    // Tests run in parallel.
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let state = std::env::temp_dir().join(format!("patchbay-bridges-{}-{number}", std::process::id()));
    let records = LinkRecords::open(&state).unwrap();
    std::fs::remove_dir_all(&state).unwrap();
    BridgeController::new(Deps {
        boot: "boot".to_owned(),
        editor: LinkEditor::open(std::path::Path::new("/nonexistent")).unwrap(),
        records,
        servers: Vec::new(),
        published: NetworksWriter::default(),
        events: Events::new(client, "a").0,
        metrics,
    })
}

fn record() -> LinkRecord {
    LinkRecord {
        uid: "u".to_owned(),
        name: "blue".to_owned(),
        boot: "boot".to_owned(),
        bridge: "br-blue".parse().unwrap(),
        vxlan: "vx-blue".parse().unwrap(),
        node_uid: "n".to_owned(),
        uplink: None,
    }
}

fn step(action: Action) -> BridgeStep {
    BridgeStep { network: "u".to_owned(), action, repair: false }
}

fn client() -> Client {
    Client::try_from(kube::Config::new("http://127.0.0.1:1".parse().unwrap())).unwrap()
}

fn network(spec: serde_json::Value) -> WatchedNetwork {
    let object = serde_json::from_value(serde_json::json!({
        "metadata": {"name": "blue", "uid": "u", "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": spec, "status": {"mtu": 1500},
    }));
    WatchedNetwork::read(&object.unwrap())
}

fn bridge() -> KernelState {
    KernelState {
        links: vec![nodenetwork::Link {
            index: 7,
            name: "br-blue".to_owned(),
            kind: Some("bridge".to_owned()),
            mac: Some(rules::ownership_mac("u", "n", rules::LinkKind::Bridge)),
            mtu: 1400,
            admin: nodenetwork::AdminState::Up,
            oper: nodenetwork::OperState::Up,
            loopback: false,
            master: None,
            lower: None,
            alias: rules::ownership_alias("u", rules::LinkKind::Bridge),
            addresses: Vec::new(),
            ipv6_disabled: Some(true),
            ipv4_isolated: Some(true),
            vxlan: None,
        }],
        ..KernelState::default()
    }
}

fn node() -> NodeInfo {
    NodeInfo { name: "a".to_owned(), uid: "n".to_owned(), internal_ips: Vec::new() }
}

fn planned(bridges: &BridgeController, observed: &KernelState) -> rules::BridgePlan {
    let node = node();
    let (labels, ignored, listed) =
        (Labels::new(), IfNamePatterns::default(), BTreeSet::from(["u".to_owned()]));
    let context = NodeContext { node: &node, labels: &labels, ignored: &ignored, listed: &listed };
    bridges.plan(context, observed, &BTreeSet::new())
}

#[tokio::test]
async fn an_unreadable_network_keeps_its_links_and_a_deleted_one_does_not() {
    let mut bridges = bridges(client(), Metrics::default());
    bridges.replace_peers(Vec::new());
    bridges.replace_networks(vec![network(serde_json::json!({"overlay": "junk"}))]);
    let plan = planned(&bridges, &bridge());
    assert_eq!(plan.steps, []);
    assert_eq!((plan.networks[0].ready, plan.networks[0].reason.as_str()), (false, "Unreadable"));
    bridges.replace_networks(Vec::new());
    assert!(!planned(&bridges, &bridge()).steps.is_empty());
    // Except when the dump may lack the link of a pod.
    let partial = KernelState { partial: true, ..bridge() };
    assert!(
        planned(&bridges, &partial).steps.iter().all(|step| !matches!(step.action, Action::Delete { .. }))
    );
}

#[tokio::test]
async fn a_change_in_place_keeps_a_network_ready_for_pods() {
    let mut bridges = bridges(client(), Metrics::default());
    bridges.replace_peers(Vec::new());
    bridges.replace_networks(vec![network(serde_json::json!({}))]);
    bridges.records.insert("u".to_owned(), record());
    let mut published = bridges.published.subscribe();
    let mut publish = |bridges: &mut BridgeController, mtu: u32| {
        let mut observed = bridge();
        observed.links[0].mtu = mtu;
        bridges.reports = planned(bridges, &observed).networks;
        let node = node();
        let (labels, ignored, listed) = (Labels::new(), IfNamePatterns::default(), BTreeSet::new());
        let context = NodeContext { node: &node, labels: &labels, ignored: &ignored, listed: &listed };
        bridges.publish(context, &observed);
        published.borrow_and_update().by_name["blue"].state.clone()
    };
    assert!(
        matches!(publish(&mut bridges, 1400), NetworkState::NotReady { reason, .. } if reason == reason::APPLYING)
    );
    let ready = |mtu| NetworkState::Ready { bridge_index: 7, mtu };
    assert_eq!(publish(&mut bridges, 1500), ready(1500));
    assert_eq!(publish(&mut bridges, 1400), ready(1400));
}

#[tokio::test]
async fn a_failed_network_backs_off_and_reports_the_cause() {
    let mut bridges = bridges(client(), Metrics::default());
    // The directory of the records does not exist.
    bridges.apply(vec![step(Action::WriteRecord(record())), step(Action::Delete { link: u32::MAX })]).await;
    let backoff = &bridges.backoffs["u"];
    assert_eq!(backoff.failure.reason, "RecordFailed");
    assert!(
        backoff.failure.message.starts_with("record the original state of a link: write the record"),
        "{:?}",
        backoff.failure
    );
    assert!(!bridges.is_due(&step(Action::RemoveRecord)));
    assert!(bridges.records.is_empty());
    // The network is retried only while it has pending steps.
    assert!(bridges.next_retry(&BTreeSet::from(["u".to_owned()])).is_some());
    assert_eq!(bridges.next_retry(&BTreeSet::new()), None);
}
