use std::time::{Duration, SystemTime};

use api::network_status::NETWORK_STATUS_ANNOTATION;
use k8s_openapi::ByteString;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::cri::tests::HostRoot;

const CONTAINER: &str = "0123abcd";
const NETNS: &str = "/proc/self/ns/net";
const GONE: &str = "/run/netns/patchbay-no-such-namespace";

struct Node {
    root: HostRoot,
    reader: MultusCacheReader,
}

impl Node {
    fn new(test: &str) -> Self {
        let root = HostRoot::new(&format!("recorded-{test}"));
        let host = HostMounts::open(Path::new("/proc/self/ns/mnt")).unwrap();
        let multus = MultusConfigReader::at(host.clone(), root.0.clone());
        let own = PathBuf::from("/var/lib/cni/results");
        let reader = MultusCacheReader::new(host, multus, own, "boot-1".to_owned()).at(&root.0);
        Self { root, reader }
    }

    fn write(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = under(&self.root.0, Path::new(path));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn list(&self, container: &str, delegates: &[Value]) {
        self.write(&format!("/var/lib/cni/multus/{container}"), Value::from(delegates).to_string());
    }

    fn result(&self, container: &str, network: &str, interface: &str, netns: &str) -> PathBuf {
        let name = format!("/var/lib/cni/multus/results/{network}-{container}-{interface}");
        self.write(&name, result(container, network, interface, netns).to_string());
        under(&self.root.0, Path::new(&name))
    }

    async fn attachments(&self, status: Option<&str>) -> Vec<AttachmentRecord> {
        self.reader.attachments(CONTAINER, &pod(), status).await.unwrap().records
    }

    async fn default_statuses(&self) -> Vec<NetworkStatus> {
        self.reader.attachments(CONTAINER, &pod(), None).await.unwrap().defaults
    }

    async fn ended(&self, running: &[&str]) -> Vec<AttachmentRecord> {
        self.left_behind(running, &[]).await.records
    }

    async fn left_behind(&self, running: &[&str], known: &[AttachmentKey]) -> EndedAttachments {
        let running = running.iter().copied().map(str::to_owned).collect();
        self.reader.ended(running, known.iter().cloned().collect()).await.unwrap()
    }
}

fn pod() -> PodIdentity {
    let [namespace, name, uid, runtime_uid] = ["shop", "web", "uid-1", "uid-1"].map(str::to_owned);
    PodIdentity { namespace, name, uid, runtime_uid }
}

fn config(network: &str) -> String {
    json!({"cniVersion": "1.0.0", "name": network, "type": "bridge", "ipam": {"type": "host-local"}})
        .to_string()
}

/// A delegate as multus 4.2 writes it.
fn delegate(name: &str, network: &str, interface: Option<&str>) -> Value {
    let mut delegate = json!({
        "Conf": {"cniVersion": "1.0.0", "name": network, "type": "bridge", "ipam": {}, "dns": {}},
        "ConfList": {"name": ""},
        "CNINetworkConfigList": {"Name": "", "CNIVersion": "", "DisableCheck": false, "Plugins": null, "Bytes": null},
        "Name": name, "IsFilterV4Gateway": false, "IsFilterV6Gateway": false,
        "Bytes": ByteString(config(network).into_bytes()),
    });
    if let Some(interface) = interface {
        delegate["ifnameRequest"] = interface.into();
    }
    delegate
}

/// A result as libcni 1.3 writes it.
fn result(container: &str, network: &str, interface: &str, netns: &str) -> Value {
    json!({
        "kind": "cniCacheV1", "containerId": container, "config": ByteString(config(network).into_bytes()),
        "ifName": interface, "networkName": network, "netns": netns,
        "cniArgs": [
            ["IgnoreUnknown", "true"], ["K8S_POD_NAMESPACE", "shop"], ["K8S_POD_NAME", "web"],
            ["K8S_POD_INFRA_CONTAINER_ID", ""], ["K8S_POD_UID", "uid-1"],
        ],
        "capabilityArgs": {"ips": ["10.1.0.7/24"], "mac": "02:00:00:00:00:0A"},
        "result": {
            "cniVersion": "1.0.0", "dns": {},
            "interfaces": [
                {"name": "br0", "mac": "02:00:00:00:00:01"},
                {"name": interface, "mac": "02:00:00:00:00:0a", "sandbox": netns},
            ],
            "ips": [{"address": "10.1.0.7/24", "interface": 1}],
        },
    })
}

/// The interface, the NAD and the origin of each record.
fn summary(records: &[AttachmentRecord]) -> Vec<(&str, String, Origin)> {
    records
        .iter()
        .map(|record| (record.key.interface.as_str(), record.nad.to_string(), record.origin))
        .collect()
}

/// A pod with the default network, two networks of its start, and one that was plugged later.
fn plugged(test: &str) -> Node {
    let node = Node::new(test);
    let delegates = [
        delegate("cbr0", "cbr0", None),
        delegate("shop/blue", "blue", None),
        delegate("default/red", "red-config", Some("data.1")),
    ];
    node.list(CONTAINER, &delegates);
    node.result(CONTAINER, "cbr0", "eth0", NETNS);
    node.result(CONTAINER, "blue", "net1", NETNS);
    node.result(CONTAINER, "red-config", "data.1", NETNS);
    node.result(CONTAINER, "green-config", "net3", NETNS);
    // Of another pod.
    node.result("other", "blue", "net1", NETNS);
    node
}

#[tokio::test]
async fn attachments_of_the_list_are_of_pod_start_and_others_of_the_original() {
    let node = plugged("origins");
    let status = json!([
        {"name": "cbr0", "interface": "eth0", "default": true},
        {"name": "default/green", "interface": "net3", "device-info": {"type": "pci", "version": "1.1.0"}},
    ]);
    let records = node.attachments(Some(&status.to_string())).await;
    assert_eq!(
        summary(&records),
        [
            ("data.1", "default/red".to_owned(), Origin::PodStart),
            ("net1", "shop/blue".to_owned(), Origin::PodStart),
            ("net3", "default/green".to_owned(), Origin::Original),
        ]
    );
    let [_, _, green] = &records[..] else { panic!("{records:?}") };
    assert_eq!((&green.pod, green.boot.as_str(), green.netns.as_str()), (&pod(), "boot-1", NETNS));
    assert_eq!(green.config, config("green-config"));
    assert_eq!(green.cni_args[2], ("K8S_POD_NAME".to_owned(), "web".to_owned()));
    assert_eq!(green.capability_args["mac"], "02:00:00:00:00:0A");
    assert_eq!(green.requested, Some(RequestedAddresses::new(&["10.1.0.7/24"], Some("02-00-00-00-00-0a"))));
    let attached = green.attached().unwrap();
    assert_eq!(serde_json::from_str::<Value>(&attached.result).unwrap()["cniVersion"], "1.0.0");
    let link = LinkIdentity {
        name: "net3".to_owned(),
        mac: Some("02:00:00:00:00:0a".to_owned()),
        ..LinkIdentity::default()
    };
    assert_eq!(attached.links, [link]);
    let [entry] = &attached.statuses[..] else { panic!("{NETWORK_STATUS_ANNOTATION}: {attached:?}") };
    assert_eq!((entry.name.as_str(), entry.ips.as_slice()), ("default/green", &["10.1.0.7".to_owned()][..]));
    assert!(entry.device_info.is_some());
}

#[tokio::test]
async fn without_network_status_the_nad_of_the_original_has_the_name_of_its_network() {
    for status in [None, Some("not JSON"), Some("[7]"), Some(r#"[{"name":"green","interface":"net3"}]"#)] {
        let records = plugged("no-status").attachments(status).await;
        assert_eq!(records[2].nad, NadRef::new("shop", "green-config"), "{status:?}");
    }
}

#[tokio::test]
async fn an_attachment_without_a_result_was_unplugged() {
    let node = plugged("unplugged");
    let records = node.attachments(None).await;
    let blue = records.iter().find(|record| record.key.interface == "net1").unwrap();
    for _ in 0..2 {
        node.reader.delete_result(blue).await.unwrap();
    }
    assert_eq!(node.attachments(None).await.len(), 2);
    // The same interface with another network is not the attachment of the list.
    node.result(CONTAINER, "yellow", "net1", NETNS);
    let records = node.attachments(None).await;
    assert_eq!(summary(&records)[1], ("net1", "shop/yellow".to_owned(), Origin::Original));
}

#[tokio::test]
async fn nothing_is_concluded_without_a_readable_list() {
    let node = plugged("no-list");
    let list = format!("/var/lib/cni/multus/{CONTAINER}");
    for content in
        ["", "[]", "{}", "[{", "[7]", r#"[{"Name":"cbr0"}]"#, r#"[{"Name":7,"Conf":{"name":"x"}}]"#]
    {
        node.write(&list, content);
        assert_eq!(node.attachments(None).await, [], "{content}");
    }
    fs::remove_file(under(&node.root.0, Path::new(&list))).unwrap();
    assert_eq!(node.attachments(None).await, []);
    assert_eq!(Node::new("empty").attachments(None).await, []);
}

#[tokio::test]
async fn a_bad_result_does_not_hide_the_others() {
    let node = plugged("bad-results");
    let expected = node.attachments(None).await;
    let results = "/var/lib/cni/multus/results";
    let changed = |pointer: &str, value: Value| {
        let mut result = result(CONTAINER, "bad", "net9", NETNS);
        *result.pointer_mut(pointer).unwrap() = value;
        result.to_string()
    };
    for content in [
        "{".to_owned(),
        String::new(),
        changed("/kind", json!("other")),
        changed("/containerId", json!("else")),
        changed("/ifName", json!("a/b")),
        changed("/ifName", json!("")),
        changed("/config", json!("%%%")),
        changed("/config", json!(ByteString(b"{\"type\":\"../sh\",\"name\":\"x\"}".to_vec()))),
        changed("/cniArgs", json!([["one"]])),
    ] {
        node.write(&format!("{results}/bad-{CONTAINER}-net9"), &content);
        assert_eq!(node.attachments(None).await, expected, "{content:.80}");
    }
    fs::create_dir(under(&node.root.0, Path::new(&format!("{results}/dir-{CONTAINER}-net8")))).unwrap();
    assert_eq!(node.attachments(None).await, expected);
    // An attachment without a valid result can still be unplugged.
    node.write(&format!("{results}/bad-{CONTAINER}-net9"), changed("/result", json!({"interfaces": 7})));
    assert_eq!(node.attachments(None).await.len(), expected.len() + 1);
}

#[tokio::test]
async fn a_list_or_a_result_that_is_too_large_is_named_with_its_size_and_the_limit() {
    let large = " ".repeat(usize::try_from(MAX_FILE).unwrap() + 1);
    let result = format!("results/bad-{CONTAINER}-net9");
    for file in [CONTAINER, &result] {
        let node = plugged("large");
        node.write(&format!("/var/lib/cni/multus/{file}"), &large);
        let error = node.reader.attachments(CONTAINER, &pod(), None).await.unwrap_err();
        assert!(matches!(error, MultusCacheError::Unusable(_)), "{error:?}");
        let text = error.to_string();
        let expected = format!("/var/lib/cni/multus/{file} has 1048577 bytes, the limit is 1048576 bytes");
        assert!(text.contains(&expected) && text.contains("create the pod again"), "{text}");
        // Other pods are not affected.
        assert!(node.reader.attachments("other", &pod(), None).await.is_ok());
    }
    let node = plugged("no-file");
    fs::remove_file(under(&node.root.0, Path::new(&format!("/var/lib/cni/multus/{CONTAINER}")))).unwrap();
    fs::create_dir(under(&node.root.0, Path::new(&format!("/var/lib/cni/multus/{CONTAINER}")))).unwrap();
    let error = node.reader.attachments(CONTAINER, &pod(), None).await.unwrap_err();
    assert!(error.to_string().contains(&format!("{CONTAINER} is no regular file")), "{error}");
}

/// Name, interface and whether it is the default of each entry.
fn names(statuses: &[NetworkStatus]) -> Vec<(&str, &str, bool)> {
    statuses.iter().map(|status| (status.name.as_str(), status.interface.as_str(), status.default)).collect()
}

#[tokio::test]
async fn the_entries_of_default_networks_are_those_that_multus_writes() {
    let node = Node::new("default-entries");
    node.write(
        "/etc/cni/net.d/00-multus.conf",
        json!({"type": "multus", "defaultNetworks": ["extra"]}).to_string(),
    );
    let delegates = [
        delegate("cbr0", "cbr0", None),
        delegate("kube-system/extra", "extra-config", None),
        delegate("shop/blue", "blue", None),
    ];
    node.list(CONTAINER, &delegates);
    node.result(CONTAINER, "blue", "net2", NETNS);
    assert_eq!(node.default_statuses().await, [], "nothing is invented without a result");
    node.result(CONTAINER, "extra-config", "net1", NETNS);
    let mut cluster = result(CONTAINER, "cbr0", "eth0", NETNS);
    cluster["result"]["routes"] = json!([{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}]);
    cluster["result"]["dns"] = json!({"nameservers": ["10.1.0.2"]});
    let path = format!("/var/lib/cni/multus/results/cbr0-{CONTAINER}-eth0");
    node.write(&path, cluster.to_string());
    let defaults = node.default_statuses().await;
    assert_eq!(names(&defaults), [("cbr0", "eth0", true), ("kube-system/extra", "net1", false)]);
    let entry = json!({
        "name": "cbr0", "interface": "eth0", "ips": ["10.1.0.7"], "mac": "02:00:00:00:00:0a", "default": true,
        "dns": {"nameservers": ["10.1.0.2"]}, "gateway": ["10.1.0.1"],
    });
    assert_eq!(serde_json::to_value(&defaults[0]).unwrap(), entry);
    // The interface of the gateway is the default one.
    let interfaces = json!([
        {"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": NETNS},
        {"name": "ovn-udn1", "mac": "02:00:00:00:00:02", "sandbox": NETNS},
    ]);
    cluster["result"]["interfaces"] = interfaces;
    cluster["result"]["ips"] = json!([{"address": "10.1.0.7/24", "gateway": "10.1.0.1", "interface": 1}]);
    node.write(&path, cluster.to_string());
    let defaults = node.default_statuses().await;
    assert_eq!(names(&defaults)[..2], [("cbr0", "eth0", false), ("cbr0", "ovn-udn1", true)]);
    // Multus writes nothing about a result without an interface in the pod.
    cluster["result"]["interfaces"] = json!([]);
    node.write(&path, cluster.to_string());
    assert_eq!(names(&node.default_statuses().await), [("kube-system/extra", "net1", false)]);
}

#[tokio::test]
async fn default_networks_are_never_recorded() {
    let node = Node::new("defaults");
    let config = json!({"type": "multus", "defaultNetworks": ["extra", "file"], "clusterNetwork": "main"});
    node.write("/etc/cni/net.d/00-multus.conf", config.to_string());
    let delegates = [
        // The default network of a pod can be a NAD, too.
        delegate("kube-system/main", "main", None),
        delegate("kube-system/extra", "extra", None),
        delegate("file", "file", None),
        delegate("kube-system/extra", "extra", None),
    ];
    node.list(CONTAINER, &delegates);
    for (network, interface) in [
        ("main", "eth0"),
        ("extra", "net1"),
        ("file", "net2"),
        ("extra", "net3"),
        ("x", "eth0"),
        ("y", "ovn"),
    ] {
        node.result(CONTAINER, network, interface, NETNS);
    }
    let status = r#"[{"name":"ovn-kubernetes","interface":"ovn","default":true}]"#;
    let records = node.attachments(Some(status)).await;
    assert_eq!(summary(&records), [("net3", "kube-system/extra".to_owned(), Origin::PodStart)]);
}

#[tokio::test]
async fn of_two_results_for_one_interface_the_newest_counts() {
    let node = plugged("newest");
    let old = node.result(CONTAINER, "zebra", "net3", NETNS);
    let hour_ago = SystemTime::now() - Duration::from_secs(3600);
    File::options().write(true).open(old).unwrap().set_modified(hour_ago).unwrap();
    let records = node.attachments(None).await;
    assert_eq!(summary(&records)[2].1, "shop/green-config");
}

#[tokio::test]
async fn an_ended_sandbox_leaves_the_attachments_of_the_original() {
    let node = Node::new("ended");
    // Multus has ended it, and deleted its list and its results.
    node.result("ended", "green", "net3", GONE);
    node.result("ended", "cbr0", "eth0", GONE);
    // Multus has not ended it yet.
    node.list("listed", &[delegate("cbr0", "cbr0", None), delegate("shop/blue", "blue", None)]);
    node.result("listed", "blue", "net1", GONE);
    node.result("listed", "green", "net2", GONE);
    // It is not known what is in its list.
    node.write("/var/lib/cni/multus/unreadable", "[{");
    node.result("unreadable", "green", "net1", GONE);
    // They run, or are being created.
    node.result("running", "green", "net1", GONE);
    node.result("creating", "green", "net1", NETNS);
    let records = node.ended(&["running"]).await;
    let mut keys: Vec<(&str, &str)> =
        records.iter().map(|record| (record.key.container.as_str(), record.key.interface.as_str())).collect();
    keys.sort_unstable();
    assert_eq!(keys, [("ended", "net3"), ("listed", "net2")]);
    assert_eq!((records[0].origin, &records[0].pod), (Origin::Original, &pod()));
    for record in &records {
        node.reader.delete_result(record).await.unwrap();
    }
    assert_eq!(node.ended(&["running"]).await, []);
}

/// The container runtime writes the results of the cluster's network into the directory of Patchbay's.
#[tokio::test]
async fn only_marked_results_are_attachments_of_patchbay() {
    for (cni_dir, own) in [("/var/lib/cni/multus", false), ("/var/lib/cni", true)] {
        let node = Node::new("own");
        node.write("/etc/cni/net.d/00-multus.conf", json!({"type": "multus", "cniDir": cni_dir}).to_string());
        let marked = |container: &str, interface: &str, netns: &str, nad: Value| {
            let mut result = result(container, "green", interface, netns);
            result["patchbay.dev/network"] = nad;
            node.write(&format!("/var/lib/cni/results/green-{container}-{interface}"), result.to_string());
        };
        for (container, netns) in [(CONTAINER, NETNS), ("ended", GONE)] {
            marked(container, "net3", netns, json!("shop/green"));
            for (interface, nad) in [("eth0", "shop/green"), ("net4", "green")] {
                marked(container, interface, netns, json!(nad));
            }
            if !own {
                let unmarked = result(container, "cbr0", "net5", netns);
                node.write(&format!("/var/lib/cni/results/cbr0-{container}-net5"), unmarked.to_string());
            }
        }
        node.write(&format!("{cni_dir}/{CONTAINER}"), json!([delegate("cbr0", "cbr0", None)]).to_string());
        let expected = [("net3", "shop/green".to_owned(), Origin::Hotplug)];
        let records = node.reader.own_attachments(CONTAINER, &pod()).await.unwrap();
        assert_eq!(summary(&records), expected, "{cni_dir}");
        assert_eq!((&records[0].key.container[..], records[0].nad_guessed), (CONTAINER, false));
        assert_eq!(summary(&node.ended(&[CONTAINER]).await), expected, "{cni_dir}");
        // It is not taken for one of multus-dynamic-networks-controller.
        assert_eq!(node.attachments(None).await, [], "{cni_dir}");
    }
}

#[tokio::test]
async fn own_results_of_ended_sandboxes_are_taken_over_once() {
    let node = Node::new("own-ended");
    let own = |container: &str, netns: &str| {
        let mut result = result(container, "blue", "net1", netns);
        result["patchbay.dev/network"] = json!("shop/blue");
        result.to_string()
    };
    // Another process has the number of the one that had the namespace.
    node.write("/var/lib/cni/results/blue-ended-net1", own("ended", NETNS));
    // The daemon was killed while it wrote these.
    node.write("/var/lib/cni/results/.blue-written-net1.tmp", own("written", GONE));
    node.write(&format!("/var/lib/cni/results/.blue-{CONTAINER}-net1.tmp"), own(CONTAINER, GONE));
    let left = node.left_behind(&["running"], &[]).await;
    let found: Vec<&str> = left.records.iter().map(|record| record.key.container.as_str()).collect();
    assert_eq!((found, left.incomplete), (vec!["ended"], false));
    assert_eq!(node.reader.own_attachments(CONTAINER, &pod()).await.unwrap(), []);
    node.reader.delete_result(&left.records[0]).await.unwrap();
    assert_eq!(node.left_behind(&["running"], &[]).await.records, []);
}

#[tokio::test]
async fn results_that_may_be_left_behind_later_are_read_again() {
    let node = Node::new("again");
    node.result("ended", "green", "net1", GONE);
    // Without a reason to look again, for which a file of a running sandbox is not even read.
    node.write("/var/lib/cni/multus/results/green-running-net1", "{");
    let left = node.left_behind(&["running"], &[]).await;
    assert_eq!((left.records.len(), left.incomplete), (1, false));
    let known = left.records[0].key.clone();
    assert!(node.left_behind(&["running"], &[known]).await.records.is_empty(), "it is recorded");
    // The runtime is about to remove its namespace.
    node.result("ending", "green", "net1", NETNS);
    assert!(node.left_behind(&["running"], &[]).await.incomplete);
    node.result("ending", "green", "net1", GONE);
    let left = node.left_behind(&["running"], &[]).await;
    assert_eq!((left.records.len(), left.incomplete), (2, false));
    node.write("/var/lib/cni/multus/ending", "[{");
    assert!(node.left_behind(&["running"], &[]).await.incomplete);
}

#[tokio::test]
async fn many_results_are_taken_over_one_part_after_the_other() {
    let node = Node::new("many");
    let count = MAX_ENDED + 3;
    for number in 0..count {
        node.result(&format!("ended{number}"), "green", "net1", GONE);
    }
    let first = node.left_behind(&[], &[]).await;
    assert_eq!((first.records.len(), first.incomplete), (MAX_ENDED, true));
    let known: Vec<_> = first.records.into_iter().map(|record| record.key).collect();
    let second = node.left_behind(&[], &known).await;
    assert_eq!((second.records.len(), second.incomplete), (3, false));
}

#[tokio::test]
async fn no_record_leads_out_of_the_directory() {
    let node = plugged("escape");
    let records = node.attachments(None).await;
    node.write("/var/lib/cni/multus/victim", "");
    for key in [("../victim", "net1"), ("", "net1"), (CONTAINER, "/../../victim"), ("..", "x")] {
        let key = AttachmentKey { container: key.0.to_owned(), interface: key.1.to_owned() };
        let record = AttachmentRecord { key, ..records[0].clone() };
        node.reader.delete_result(&record).await.unwrap();
        let recorded = node.reader.attachments(&record.key.container, &pod(), None).await.unwrap();
        assert_eq!(recorded.records.len() % 3, 0);
    }
    assert!(under(&node.root.0, Path::new("/var/lib/cni/multus/victim")).exists());
    assert_eq!(node.attachments(None).await.len(), 3);
}

proptest! {
    #[test]
    fn no_content_makes_the_parsers_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..80),
        text in ".{0,12}",
        number in any::<i64>(),
    ) {
        _ = parse_delegates(&bytes);
        _ = parse_result(&bytes);
        for value in [json!(text), json!(number), json!([text]), json!({"name": text}), Value::Null] {
            for pointer in ["/containerId", "/config", "/ifName", "/networkName", "/netns", "/cniArgs",
                "/capabilityArgs", "/capabilityArgs/ips", "/result", "/result/interfaces", "/result/ips"] {
                let mut changed = result(CONTAINER, "n", "net1", NETNS);
                *changed.pointer_mut(pointer).unwrap() = value.clone();
                let Some(parsed) = parse_result(changed.to_string().as_bytes()) else { continue };
                prop_assert!(is_container_id(&parsed.container_id));
                _ = (parsed.success(), parsed.requested_ips(), parsed.requested_mac(), parsed.pod());
            }
            for key in ["Conf", "ConfList", "Name", "ifnameRequest", "Bytes"] {
                let mut changed = delegate("shop/blue", "blue", None);
                changed[key] = value.clone();
                let list = parse_delegates(json!([changed]).to_string().as_bytes()).unwrap_or_default();
                for (index, delegate) in list.iter().enumerate() {
                    _ = (delegate.interface(index), delegate.nad(index, &MultusConfig::default(), "shop"));
                }
            }
        }
    }
}
