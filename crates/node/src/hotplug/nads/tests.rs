use std::{convert::Infallible, future::pending, time::Duration};

use futures::FutureExt as _;
use http::{Request, Response};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::{sync::mpsc, task::JoinSet, time::timeout};

use super::*;
use crate::cri::tests::HostRoot;

const LIMIT: Duration = Duration::from_secs(60);

/// A server that answers each request with the next reply, and silence after the last.
fn server() -> (Client, mpsc::UnboundedSender<(u16, String)>) {
    let (sender, queue) = mpsc::unbounded_channel::<(u16, String)>();
    let queue = Arc::new(tokio::sync::Mutex::new(queue));
    let service = tower::service_fn(move |request: Request<Body>| {
        let queue = Arc::clone(&queue);
        async move {
            let path = "/apis/k8s.cni.cncf.io/v1/network-attachment-definitions";
            assert_eq!(request.uri().path(), path);
            let query = request.uri().query().unwrap_or_default();
            // A page of the longest NADs must fit into the memory of the daemon.
            assert!(query.contains("watch=") || query.split('&').any(|part| part == "limit=10"), "{query}");
            let Some((status, text)) = queue.lock().await.recv().await else { pending().await };
            Ok::<_, Infallible>(
                Response::builder().status(status).body(Body::from(text.into_bytes())).unwrap(),
            )
        }
    });
    (Client::new(service, "default"), sender)
}

fn nad(namespace: &str, name: &str, version: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": {
            "name": name, "namespace": namespace, "uid": "u", "resourceVersion": version,
            "annotations": {"other": "x"}, "managedFields": [{"manager": "kubectl"}],
        },
        "spec": spec,
    })
}

fn list(version: &str, nads: &[Value]) -> (u16, String) {
    let metadata = json!({"resourceVersion": version});
    (200, json!({"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": nads}).to_string())
}

fn events(events: &[(&str, Value)]) -> (u16, String) {
    let line = |(kind, object): &(&str, Value)| json!({"type": kind, "object": object}).to_string() + "\n";
    (200, events.iter().map(line).collect())
}

fn failure(code: u16) -> (u16, String) {
    (code, json!({"kind": "Status", "code": code, "message": "no", "reason": "no"}).to_string())
}

struct Bench {
    root: HostRoot,
    nads: Nads,
    watch: Option<NadWatch>,
    replies: mpsc::UnboundedSender<(u16, String)>,
    tasks: JoinSet<Result<(), Error>>,
}

impl Bench {
    fn new(test: &str, isolation: IsolationSettings) -> Self {
        let root = HostRoot::new(&format!("nads-{test}"));
        let (client, replies) = server();
        let host = HostMounts::open(Path::new("/proc/self/ns/mnt")).unwrap();
        let multus = MultusConfigReader::at(host.clone(), root.0.clone());
        let (nads, watch) = nads_at(client, host, multus, isolation, &root.0);
        Self { root, nads, watch: Some(watch), replies, tasks: JoinSet::new() }
    }

    /// Without isolation, and with these NADs.
    fn listed(test: &str, objects: &[Value]) -> Self {
        let mut bench = Self::new(test, IsolationSettings::default());
        bench.load(objects);
        bench
    }

    /// Lists the NADs without a server.
    fn load(&mut self, objects: &[Value]) {
        let watch = self.watch.as_mut().unwrap();
        watch.apply(StreamEvent::ListStarted);
        for object in objects {
            watch.apply(StreamEvent::Applied(serde_json::from_value(object.clone()).unwrap()));
        }
        watch.apply(StreamEvent::ListDone);
    }

    fn start(&mut self) {
        let watch = self.watch.take().unwrap();
        self.tasks.spawn(watch.run(CancellationToken::new()));
    }

    fn write(&self, path: &str, content: &str) {
        let path = under(&self.root.0, Path::new(path));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    async fn resolve(&self, nad: &str) -> NadState {
        self.nads.resolve(&NadRef::parse(nad, "shop").unwrap(), "shop").await.unwrap()
    }

    /// What is known of a NAD, without the files of the node: their threads do not wait for a paused clock.
    fn known(&self, nad: &str) -> Option<Nad> {
        let objects = self.nads.objects();
        objects.nads.as_ref().expect("listed").get(&NadRef::parse(nad, "shop").unwrap()).cloned()
    }

    async fn changed(&self) -> String {
        timeout(LIMIT, self.nads.changed()).await.unwrap().to_string()
    }
}

fn config_of(state: &NadState) -> (&str, &str) {
    match state {
        NadState::Ready { config } => (&config.name, &config.plugins[0].plugin),
        other => panic!("{other:?}"),
    }
}

fn message_of(state: NadState) -> String {
    match state {
        NadState::Invalid { message } | NadState::Forbidden { message } => message,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn changes_are_reported_once_and_only_if_something_used_changed() {
    let mut bench = Bench::new("changes", IsolationSettings::default());
    bench.start();
    let (a, b) = (json!({"config": r#"{"type":"a"}"#}), json!({"config": r#"{"type":"b"}"#}));
    bench
        .replies
        .send(list("1", &[nad("x", "one", "1", a.clone()), nad("x", "two", "1", a.clone())]))
        .unwrap();
    assert_eq!([bench.changed().await, bench.changed().await], ["x/one", "x/two"]);
    let replies = [
        ("MODIFIED", nad("x", "one", "2", a.clone())),
        ("MODIFIED", nad("x", "two", "3", b)),
        ("ADDED", nad("x", "three", "4", a.clone())),
        ("DELETED", nad("x", "one", "5", a)),
    ];
    bench.replies.send(events(&replies)).unwrap();
    let mut changed = BTreeSet::new();
    while changed.len() < 3 {
        changed.insert(bench.changed().await);
    }
    assert_eq!(changed, ["x/one", "x/three", "x/two"].map(str::to_owned).into());
    assert_eq!(bench.nads.changed().now_or_never(), None);
}

#[tokio::test(start_paused = true)]
async fn an_absent_kind_means_that_no_nad_exists_and_its_arrival_is_noticed() {
    let mut bench = Bench::new("absent", IsolationSettings::default());
    bench.start();
    for _ in 0..20 {
        bench.replies.send(failure(404)).unwrap();
    }
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(bench.known("blue"), None);
    bench.replies.send(list("1", &[nad("shop", "blue", "1", json!({"config": r#"{"type":"a"}"#}))])).unwrap();
    let start = Instant::now();
    assert_eq!(bench.changed().await, "shop/blue");
    assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
    assert!(bench.known("blue").is_some());
}

#[tokio::test(start_paused = true)]
async fn a_failed_watch_keeps_what_is_known_and_reports_what_it_missed() {
    let mut bench = Bench::new("failed", IsolationSettings::default());
    bench.start();
    let spec = json!({"config": r#"{"type":"a"}"#});
    bench.replies.send(failure(500)).unwrap();
    bench.replies.send(list("1", &[nad("shop", "blue", "1", spec.clone())])).unwrap();
    assert_eq!(bench.changed().await, "shop/blue");
    bench.replies.send(failure(410)).unwrap();
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert!(bench.known("blue").is_some());
    bench.replies.send(list("9", &[nad("shop", "red", "8", spec)])).unwrap();
    assert_eq!([bench.changed().await, bench.changed().await], ["shop/blue", "shop/red"]);
    assert_eq!(bench.known("blue"), None);
}

#[tokio::test]
async fn a_nad_is_not_missing_before_the_first_list() {
    let bench = Bench::new("unlisted", IsolationSettings::default());
    let unknown = bench.nads.resolve(&NadRef::new("shop", "blue"), "shop").await;
    assert!(matches!(unknown, Err(NadError::NotListed)), "{unknown:?}");
}

#[tokio::test]
async fn every_state_of_a_nad_is_resolved() {
    let mut device = nad("shop", "device", "1", json!({"config": "{"}));
    device["metadata"]["annotations"][RESOURCE_ANNOTATION] = "intel.com/sriov".into();
    let mut no_device = nad("shop", "no-device", "1", json!({"config": r#"{"name":"n","type":"a"}"#}));
    no_device["metadata"]["annotations"][RESOURCE_ANNOTATION] = "".into();
    let bench = Bench::listed(
        "states",
        &[
            device,
            no_device,
            nad("shop", "bad", "1", json!({"config": r#"{"type":"../sh"}"#})),
            nad("shop", "object", "1", json!({"config": {"type": 7}})),
            nad("shop", "blank", "1", json!({"config": " "})),
            nad("other", "far", "1", json!({"config": r#"{"type":"b"}"#})),
        ],
    );
    assert_eq!(bench.resolve("nothing").await, NadState::Missing);
    let required = NadState::DeviceRequired { resource: "intel.com/sriov".to_owned() };
    assert_eq!(bench.resolve("device").await, required);
    assert_eq!(config_of(&bench.resolve("no-device").await), ("n", "a"));
    assert_eq!(config_of(&bench.resolve("other/far").await), ("far", "b"), "without isolation");
    assert!(message_of(bench.resolve("bad").await).contains("is not a file name"));
    assert!(message_of(bench.resolve("object").await).contains("type"));
    assert!(message_of(bench.resolve("blank").await).contains("spec.config is empty"));
}

#[tokio::test]
async fn a_nad_without_a_configuration_means_the_file_with_its_network() {
    let empty = [Value::Null, json!({}), json!({"config": ""}), json!({"config": null})];
    for (index, spec) in empty.into_iter().enumerate() {
        let bench = Bench::listed(&format!("file-{index}"), &[nad("shop", "blue", "1", spec)]);
        let missing = message_of(bench.resolve("blue").await);
        assert!(missing.contains("/etc/cni/multus/net.d") && missing.contains("blue"), "{missing}");
        let dir = "/etc/cni/multus/net.d";
        bench.write(&format!("{dir}/00-broken.conf"), "{");
        bench.write(&format!("{dir}/01-list.conf"), "[]");
        bench.write(&format!("{dir}/05-other.conf"), r#"{"name":"red","type":"x"}"#);
        bench.write(&format!("{dir}/06-ignored.txt"), r#"{"name":"blue","type":"x"}"#);
        fs::create_dir_all(bench.root.0.join("etc/cni/multus/net.d/07.conf")).unwrap();
        bench.write(&format!("{dir}/20-blue.conflist"), r#"{"name":"blue","plugins":[{"type":"a"}]}"#);
        bench.write(&format!("{dir}/30-blue.json"), r#"{"name":"blue","type":"later"}"#);
        assert_eq!(config_of(&bench.resolve("blue").await), ("blue", "a"));
        bench.write(&format!("{dir}/20-blue.conflist"), r#"{"name":"blue","plugins":[{"type":"a/b"}]}"#);
        assert!(message_of(bench.resolve("blue").await).contains("is not a file name"));
    }
}

#[tokio::test]
async fn the_directory_of_the_files_is_that_of_multus() {
    let bench = Bench::listed("conf-dir", &[nad("shop", "blue", "1", json!({}))]);
    bench.write("/etc/cni/net.d/00-multus.conf", r#"{"type":"multus","confDir":"/my/dir"}"#);
    bench.write("/my/dir/blue.conf", r#"{"name":"blue","type":"mine"}"#);
    assert_eq!(config_of(&bench.resolve("blue").await), ("blue", "mine"));
}

#[tokio::test]
async fn isolation_follows_the_flags_and_else_multus() {
    let isolated = r#"{"type":"multus","namespaceIsolation":true,"globalNamespaces":"shared"}"#;
    let globals = |names: &[&str]| Some(names.iter().copied().map(str::to_owned).collect::<Vec<_>>());
    let flags = |enabled, global_namespaces| IsolationSettings { enabled, global_namespaces };
    for (number, (multus, settings, namespace, allowed)) in [
        ("{}", flags(None, None), "other", true),
        ("{}", flags(Some(true), None), "other", false),
        ("{}", flags(Some(true), None), "default", true),
        ("{}", flags(Some(true), None), "shop", true),
        ("{}", flags(Some(true), globals(&["other"])), "other", true),
        ("{}", flags(Some(true), globals(&["other"])), "default", false),
        (isolated, flags(None, None), "other", false),
        (isolated, flags(None, None), "shared", true),
        (isolated, flags(None, None), "default", false),
        (isolated, flags(Some(false), None), "other", true),
        (isolated, flags(None, globals(&["other"])), "other", true),
    ]
    .into_iter()
    .enumerate()
    {
        let mut bench = Bench::new(&format!("isolation-{number}"), settings.clone());
        bench.write("/etc/cni/net.d/00-multus.conf", multus);
        bench.load(&[]);
        let state = bench.resolve(&format!("{namespace}/blue")).await;
        if allowed {
            assert_eq!(state, NadState::Missing, "{number}");
            continue;
        }
        let message = message_of(state);
        let source = if settings.enabled.is_some() { "--namespace-isolation" } else { "namespaceIsolation" };
        assert!(message.contains(source) && message.contains("global namespaces"), "{number}: {message}");
    }
}

#[test]
fn only_what_is_used_of_a_nad_is_decoded() {
    let object: NadObject = serde_json::from_value(nad("ns", "n", "1", json!({"config": "x"}))).unwrap();
    assert_eq!(object.metadata.managed_fields, None);
    assert_eq!(object.metadata.annotations, Some(BTreeMap::new()));
    let (at, decoded) = object.into_nad().unwrap();
    let config = Some(NadText::Kept("x".to_owned()));
    assert_eq!((at, decoded), (NadRef::new("ns", "n"), Nad { config, resource: None }));
    let nameless: NadObject =
        serde_json::from_value(json!({"metadata": {"name": "n"}, "spec": [1]})).unwrap();
    assert_eq!(nameless.into_nad(), None);
}

#[tokio::test]
async fn long_configurations_are_not_kept() {
    let config = |len: usize| {
        let text = json!({"type": "bridge", "x": "y".repeat(len)}).to_string();
        json!({"config": text})
    };
    let mut bench = Bench::listed(
        "long",
        &[nad("shop", "long", "1", config(MAX_CONFIG)), nad("shop", "short", "1", config(MAX_CONFIG - 100))],
    );
    assert!(matches!(bench.resolve("short").await, NadState::Ready { .. }));
    let message = message_of(bench.resolve("long").await);
    assert!(message.contains("shorten it to at most 65536"), "{message}");
    assert!(bench.known("long").unwrap().len() == 0);

    let many: Vec<Value> = (0..MAX_CONFIGS / MAX_CONFIG + 20)
        .map(|number| nad("shop", &format!("nad-{number}"), "1", config(MAX_CONFIG - 100)))
        .collect();
    bench.load(&many);
    assert!(bench.nads.objects().len <= MAX_CONFIGS);
    let message = message_of(bench.resolve(&format!("nad-{}", many.len() - 1)).await);
    assert!(message.contains("delete unused ones"), "{message}");
    // One that is deleted makes room for another one.
    let watch = bench.watch.as_mut().unwrap();
    for object in many.iter().take(20) {
        watch.apply(StreamEvent::Deleted(serde_json::from_value(object.clone()).unwrap()));
    }
    watch.apply(StreamEvent::Applied(serde_json::from_value(many[many.len() - 1].clone()).unwrap()));
    assert!(matches!(bench.resolve(&format!("nad-{}", many.len() - 1)).await, NadState::Ready { .. }));
}

#[tokio::test]
async fn while_isolation_is_unknown_only_networks_of_the_own_namespace_are_used() {
    let spec = || json!({"config": r#"{"type":"bridge"}"#});
    let bench =
        Bench::listed("unknown", &[nad("shop", "own", "1", spec()), nad("other", "foreign", "1", spec())]);
    bench.write("/opt/cni/bin/multus", "");
    assert!(matches!(bench.resolve("own").await, NadState::Ready { .. }));
    let foreign = NadRef::parse("other/foreign", "shop").unwrap();
    let state = bench.nads.resolve(&foreign, "shop").await.unwrap();
    assert!(matches!(state, NadState::IsolationUnknown { .. }), "{state:?}");
}

#[test]
fn daemons_do_not_list_again_at_once_or_often() {
    let start = Instant::now();
    let minutes = Duration::from_mins;
    assert_eq!(relist_due(start, start + minutes(1), minutes(12)), start + minutes(12));
    // The last list was long ago: only the random part is waited for.
    assert_eq!(relist_due(start, start + minutes(60), minutes(12)), start + minutes(62));
    assert_eq!(relist_due(start, start + minutes(60), MIN_RELIST), start + minutes(60));
}
