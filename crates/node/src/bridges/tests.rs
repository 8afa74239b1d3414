use std::sync::atomic::{AtomicU64, Ordering};

use kube::Client;

use super::*;

/// Networks of a node that knows of none, and would fail to change anything.
pub fn bridges(client: Client, metrics: Metrics) -> Bridges {
    // Tests run at the same time.
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let state = std::env::temp_dir().join(format!("patchbay-bridges-{}-{number}", std::process::id()));
    let records = Records::open(&state).unwrap();
    std::fs::remove_dir_all(&state).unwrap();
    Bridges::new(Tools {
        boot: "boot".to_owned(),
        changer: Changer::open(std::path::Path::new("/nowhere")).unwrap(),
        records,
        servers: Vec::new(),
        tell: watch::channel(Arc::default()).0,
        events: Events::new(client, "a").0,
        metrics,
    })
}

fn record() -> Record {
    Record {
        uid: "u".to_owned(),
        name: "blue".to_owned(),
        boot: "boot".to_owned(),
        bridge: "br-blue".parse().unwrap(),
        vxlan: "vx-blue".parse().unwrap(),
        node_uid: "n".to_owned(),
        uplink: None,
    }
}

fn step(action: Action) -> Step {
    Step { network: "u".to_owned(), action, repair: false }
}

fn client() -> Client {
    Client::try_from(kube::Config::new("http://127.0.0.1:1".parse().unwrap())).unwrap()
}

fn network(spec: serde_json::Value) -> DynamicObject {
    serde_json::from_value(serde_json::json!({
        "metadata": {"name": "blue", "uid": "u", "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": spec, "status": {"mtu": 1500},
    }))
    .unwrap()
}

fn bridge() -> Observed {
    Observed {
        links: vec![nodenetwork::Link {
            index: 7,
            name: "br-blue".to_owned(),
            kind: Some("bridge".to_owned()),
            mac: Some(rules::mark("u", "n", rules::Made::Bridge)),
            mtu: 1400,
            admin: nodenetwork::Admin::Up,
            oper: nodenetwork::Oper::Up,
            loopback: false,
            master: None,
            lower: None,
            alias: rules::alias("u", rules::Made::Bridge),
            addresses: Vec::new(),
            ipv6_off: Some(true),
            ipv4_deaf: Some(true),
            vxlan: None,
        }],
        ..Observed::default()
    }
}

fn facts() -> Facts {
    Facts { name: "a".to_owned(), uid: "n".to_owned(), internal_ips: Vec::new() }
}

fn planned(bridges: &Bridges, observed: &Observed) -> rules::Plan {
    let facts = facts();
    let (labels, ignored, listed) = (Labels::new(), Patterns::default(), BTreeSet::from(["u".to_owned()]));
    let around = Around { facts: &facts, labels: &labels, ignored: &ignored, listed: &listed };
    bridges.plan(around, observed, &BTreeSet::new())
}

#[tokio::test]
async fn a_network_that_cannot_be_read_keeps_its_links_and_one_that_is_gone_does_not() {
    let mut bridges = bridges(client(), Metrics::default());
    bridges.see_all_nodes(&[], "a");
    bridges.see_all_networks(&[network(serde_json::json!({"overlay": "junk"}))]);
    let plan = planned(&bridges, &bridge());
    assert_eq!(plan.steps, []);
    assert_eq!((plan.networks[0].ready, plan.networks[0].reason.as_str()), (false, "Unreadable"));
    bridges.see_all_networks(&[]);
    assert!(!planned(&bridges, &bridge()).steps.is_empty());
    // Unless the kernel may have left out the link of a pod.
    let partial = Observed { partial: true, ..bridge() };
    assert!(
        planned(&bridges, &partial).steps.iter().all(|step| !matches!(step.action, Action::Delete { .. }))
    );
}

#[tokio::test]
async fn a_change_in_place_sends_no_pod_away() {
    let mut bridges = bridges(client(), Metrics::default());
    bridges.see_all_nodes(&[], "a");
    bridges.see_all_networks(&[network(serde_json::json!({}))]);
    bridges.records.insert("u".to_owned(), record());
    let mut told = bridges.tell.subscribe();
    let mut say = |bridges: &mut Bridges, mtu: u32| {
        let mut observed = bridge();
        observed.links[0].mtu = mtu;
        bridges.reports = planned(bridges, &observed).networks;
        let facts = facts();
        let (labels, ignored, listed) = (Labels::new(), Patterns::default(), BTreeSet::new());
        let around = Around { facts: &facts, labels: &labels, ignored: &ignored, listed: &listed };
        bridges.publish(around, &observed);
        told.borrow_and_update().by_name["blue"].state.clone()
    };
    assert!(
        matches!(say(&mut bridges, 1400), NetworkState::NotReady { reason, .. } if reason == reason::APPLYING)
    );
    let ready = |mtu| NetworkState::Ready { bridge_index: 7, mtu, removing: false };
    assert_eq!(say(&mut bridges, 1500), ready(1500));
    assert_eq!(say(&mut bridges, 1400), ready(1400));
}

#[tokio::test]
async fn a_network_that_fails_waits_and_says_why() {
    let mut bridges = bridges(client(), Metrics::default());
    // The record's directory is gone.
    bridges.apply(vec![step(Action::Record(record())), step(Action::Delete { link: u32::MAX })]).await;
    let pause = &bridges.pauses["u"];
    assert_eq!(pause.failure.reason, "RecordFailed");
    assert!(
        pause.failure.message.starts_with("write down what is found: write the record"),
        "{:?}",
        pause.failure
    );
    assert!(!bridges.is_due(&step(Action::Forget)));
    assert!(bridges.records.is_empty());
    // As long as it has something to do, the daemon comes back for it; after that it does not.
    assert!(bridges.rest(&BTreeSet::from(["u".to_owned()])).is_some());
    assert_eq!(bridges.rest(&BTreeSet::new()), None);
}
