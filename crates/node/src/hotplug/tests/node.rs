//! A node for tests: an API server in memory, a container runtime, network namespaces, and a CNI plugin that is a script.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    routing::post,
};
use clap::Parser as _;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response};
use http_body_util::{BodyExt as _, Full};
use k8s_openapi::ByteString;
use kube::Client;
use link::namespace;
use nix::{
    sched::{CloneFlags, unshare},
    unistd::geteuid,
};
use prometheus_client::registry::Registry;
use prost::Message as _;
use serde_json::{Value, json};
use tokio::{net::UnixListener, runtime::Builder, sync::mpsc, task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;
use wire::cri::{
    self, ListPodSandboxResponse, PodSandbox, PodSandboxMetadata, PodSandboxStatusRequest,
    PodSandboxStatusResponse,
};

use super::super::*;
use crate::{executor::LimitsConfig, pods};

const DEADLINE: Duration = Duration::from_secs(20);
const OWN_POD: &str = "uid-daemon";
const SOCKET: &str = "/run/containerd/containerd.sock";
static COUNTER: AtomicU32 = AtomicU32::new(0);

/// The objects of the API server.
#[derive(Default)]
pub struct FakeApi {
    state: Mutex<ApiState>,
    version: AtomicU64,
}

#[derive(Default)]
struct ApiState {
    pods: BTreeMap<String, Value>,
    nads: BTreeMap<String, Value>,
    watches: Vec<(&'static str, mpsc::UnboundedSender<String>)>,
    events: Vec<Value>,
    writes: usize,
    /// How many writes of a status fail.
    failures: usize,
}

impl FakeApi {
    fn client(self: &Arc<Self>) -> Client {
        let api = Arc::clone(self);
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let api = Arc::clone(&api);
            async move {
                let (parts, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap();
                let query = parts.uri.query().unwrap_or_default().to_owned();
                Ok::<_, Infallible>(api.respond(&parts.method, parts.uri.path(), &query, &body))
            }
        });
        Client::new(service, "default")
    }

    fn respond(&self, method: &Method, path: &str, query: &str, body: &[u8]) -> Response<Body> {
        let kind = if path.contains("/events") {
            "events"
        } else if path.contains("network-attachment-definitions") {
            "nads"
        } else {
            "pods"
        };
        let mut state = self.state.lock().unwrap();
        match *method {
            Method::POST => {
                state.events.push(serde_json::from_slice(body).unwrap());
                text(201, r#"{"metadata":{"name":"e"},"eventTime":null}"#.to_owned())
            }
            Method::PATCH => {
                let name = path.split('/').nth_back(1).unwrap().to_owned();
                state.writes += 1;
                if state.failures > 0 {
                    state.failures -= 1;
                    return text(500, json!({"kind": "Status", "code": 500, "message": "no"}).to_string());
                }
                let Some(pod) = state.pods.get(&name) else {
                    return text(
                        404,
                        json!({"kind": "Status", "code": 404, "reason": "NotFound"}).to_string(),
                    );
                };
                let mut changed = pod.clone();
                if !patch(&mut changed, &serde_json::from_slice(body).unwrap()) {
                    return text(
                        422,
                        json!({"kind": "Status", "code": 422, "reason": "Invalid"}).to_string(),
                    );
                }
                self.set(&mut state, "pods", &name, Some(changed.clone()));
                text(200, changed.to_string())
            }
            _ if query.contains("watch=") => {
                let (sender, mut events) = mpsc::unbounded_channel();
                state.watches.push((kind, sender));
                let body = futures::stream::poll_fn(move |context| {
                    events.poll_recv(context).map(|line| line.map(Ok::<_, Infallible>))
                });
                Response::new(Body::from_stream(body))
            }
            _ => {
                let objects = if kind == "nads" { &state.nads } else { &state.pods };
                let items: Vec<&Value> = objects.values().collect();
                let version = self.version.load(Ordering::SeqCst).to_string();
                text(200, json!({"metadata": {"resourceVersion": version}, "items": items}).to_string())
            }
        }
    }

    fn set(&self, state: &mut ApiState, kind: &'static str, name: &str, object: Option<Value>) {
        let version = (self.version.fetch_add(1, Ordering::SeqCst) + 1).to_string();
        let objects = if kind == "nads" { &mut state.nads } else { &mut state.pods };
        let (event, mut object) = match object {
            Some(object) => ("MODIFIED", object),
            None => ("DELETED", objects.remove(name).unwrap()),
        };
        object["metadata"]["resourceVersion"] = version.into();
        if event == "MODIFIED" {
            objects.insert(name.to_owned(), object.clone());
        }
        let line = json!({"type": event, "object": object}).to_string() + "\n";
        state.watches.retain(|(watched, sender)| *watched != kind || sender.send(line.clone()).is_ok());
    }

    pub fn set_nad(&self, name: &str, config: Option<Value>) {
        let object = config.map(|config| {
            json!({
                "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
                "metadata": {"name": name, "namespace": "ns"}, "spec": {"config": config.to_string()},
            })
        });
        self.set(&mut self.state.lock().unwrap(), "nads", name, object);
    }

    /// Sets the networks annotation of a pod.
    pub fn request(&self, pod: &str, networks: &Value) {
        self.annotate(pod, &[("k8s.v1.cni.cncf.io/networks", &networks.to_string())]);
    }

    pub fn annotate(&self, pod: &str, annotations: &[(&str, &str)]) {
        let mut state = self.state.lock().unwrap();
        let mut object = state.pods[pod].clone();
        for (name, value) in annotations {
            object["metadata"]["annotations"][name] = (*value).into();
        }
        self.set(&mut state, "pods", pod, Some(object));
    }

    pub fn delete_pod(&self, pod: &str) {
        self.set(&mut self.state.lock().unwrap(), "pods", pod, None);
    }

    pub fn fail_writes(&self, count: usize) {
        self.state.lock().unwrap().failures = count;
    }

    pub fn writes(&self) -> usize {
        self.state.lock().unwrap().writes
    }

    /// The reasons of all events so far.
    pub fn event_reasons(&self) -> Vec<String> {
        let state = self.state.lock().unwrap();
        state.events.iter().map(|event| event["reason"].as_str().unwrap().to_owned()).collect()
    }

    pub fn event_notes(&self) -> Vec<String> {
        let state = self.state.lock().unwrap();
        state.events.iter().map(|event| event["note"].as_str().unwrap().to_owned()).collect()
    }

    /// An annotation of a pod as JSON.
    pub fn annotation(&self, pod: &str, name: &str) -> Value {
        let state = self.state.lock().unwrap();
        let text = state.pods.get(pod).and_then(|pod| pod["metadata"]["annotations"][name].as_str());
        text.map_or(Value::Null, |text| serde_json::from_str(text).unwrap())
    }

    /// The interfaces in network-status.
    pub fn interfaces(&self, pod: &str) -> Vec<String> {
        let status = self.annotation(pod, "k8s.v1.cni.cncf.io/network-status");
        let entries = status.as_array().cloned().unwrap_or_default();
        entries.iter().map(|entry| entry["interface"].as_str().unwrap().to_owned()).collect()
    }

    /// Interface and state of the entries in `patchbay.dev/attachments`.
    pub fn states(&self, pod: &str) -> Vec<(String, String)> {
        let attachments = self.annotation(pod, "patchbay.dev/attachments");
        let field = |entry: &Value, key: &str| entry[key].as_str().unwrap_or_default().to_owned();
        let entries = attachments.as_array().cloned().unwrap_or_default();
        entries.iter().map(|entry| (field(entry, "interface"), field(entry, "state"))).collect()
    }
}

/// Applies a JSON patch as the API server does: a test of null accepts an absent value.
fn patch(object: &mut Value, operations: &Value) -> bool {
    for operation in operations.as_array().unwrap() {
        let pointer = operation["path"].as_str().unwrap();
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        let key = key.replace("~1", "/").replace("~0", "~");
        let Some(parent) = object.pointer_mut(parent) else { return false };
        match operation["op"].as_str().unwrap() {
            "test" if parent[&key] == operation["value"] => {}
            "add" => parent[&key] = operation["value"].clone(),
            "remove" => _ = parent.as_object_mut().unwrap().remove(&key).unwrap(),
            _ => return false,
        }
    }
    true
}

fn text(status: u16, body: String) -> Response<Body> {
    Response::builder().status(status).body(Body::from(body)).unwrap()
}

/// A node, and the directory of its files.
pub struct TestNode {
    pub api: Arc<FakeApi>,
    pub root: PathBuf,
    prefix: String,
    sandboxes: Arc<Mutex<Vec<(PodSandbox, String)>>>,
    runtime: JoinSet<()>,
    /// Files outside of `root`.
    recorded: Mutex<Vec<PathBuf>>,
}

/// A running daemon.
pub struct Daemon {
    stop: CancellationToken,
    tasks: JoinSet<Result<(), Error>>,
    pub health: Arc<Health>,
    /// Signals released addresses.
    pub repairs: Repairs,
    metrics: Metrics,
}

/// The CNI plugin: a veth whose host end is in the namespace of the node, and a file for each address.
const PLUGIN: &str = r#"#!/bin/sh
dir=$(dirname "$0")
cat > /dev/null
echo "$CNI_COMMAND $CNI_IFNAME ${CNI_NETNS:-none}" >> "$dir/calls"
name=$(echo "$CNI_CONTAINERID" | tail -c 7)$CNI_IFNAME
case "$CNI_COMMAND" in
ADD)
  touch "$dir/address-$CNI_CONTAINERID-$CNI_IFNAME"
  [ -e "$dir/fail-add" ] && { echo '{"cniVersion":"1.0.0","code":100,"msg":"no luck"}'; exit 1; }
  while [ -e "$dir/hang" ]; do sleep 0.05; done
  ip link add "$name" type veth peer name "$CNI_IFNAME" netns "$CNI_NETNS" || exit 1
  [ -e "$dir/fail-link" ] && { ip link del "$name"; echo '{"cniVersion":"1.0.0","code":100,"msg":"error '$$'"}'; exit 1; }
  echo '{"cniVersion":"1.0.0","interfaces":[{"name":"'$name'"},{"name":"'$CNI_IFNAME'","sandbox":"'$CNI_NETNS'"}],"ips":[{"address":"10.9.0.2/24","interface":1}]}'
  ;;
DEL)
  [ -e "$dir/fail-del" ] && { echo '{"cniVersion":"1.0.0","code":101,"msg":"cannot leave"}'; exit 1; }
  [ -n "$CNI_NETNS" ] && ip link del "$name" 2>/dev/null
  rm -f "$dir/address-$CNI_CONTAINERID-$CNI_IFNAME"
  ;;
esac
exit 0
"#;

impl TestNode {
    fn new(test: &str) -> Self {
        assert!(geteuid().is_root(), "hot-plug tests need root: run them as `sudo -E cargo test -p node`");
        let number = COUNTER.fetch_add(1, Ordering::SeqCst);
        let prefix = format!("pbh{}-{number}", std::process::id());
        let root = std::env::temp_dir().join(format!("patchbay-hotplug-{}-{test}", std::process::id()));
        _ = fs::remove_dir_all(&root);
        for dir in ["bin", "state", "results", "devices", "host/run/containerd"] {
            fs::create_dir_all(root.join(dir)).unwrap();
        }
        let plugin = root.join("bin/veth");
        fs::write(&plugin, PLUGIN).unwrap();
        fs::set_permissions(&plugin, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let sandboxes = Arc::<Mutex<Vec<(PodSandbox, String)>>>::default();
        let own = sandbox("daemon", OWN_POD, "daemon");
        sandboxes.lock().unwrap().push((own, String::new()));
        let api = Arc::<FakeApi>::default();
        let recorded = Mutex::default();
        let node = Self { api, root, prefix, sandboxes, runtime: JoinSet::new(), recorded };
        node.api.set_nad("blue", Some(config("blue")));
        node
    }

    /// Serves CRI.
    fn serve_runtime(&mut self) {
        let (listed, asked) = (Arc::clone(&self.sandboxes), Arc::clone(&self.sandboxes));
        let list = move || async move {
            let items = listed.lock().unwrap().iter().map(|(sandbox, _)| sandbox.clone()).collect();
            grpc(&ListPodSandboxResponse { items }.encode_to_vec())
        };
        let status = move |request: Bytes| async move {
            let PodSandboxStatusRequest { pod_sandbox_id, .. } =
                prost::Message::decode(&request[5..]).unwrap();
            let sandboxes = asked.lock().unwrap();
            let found = sandboxes.iter().find(|(sandbox, _)| sandbox.id == pod_sandbox_id);
            let netns = found.map(|(_, netns)| netns.clone()).unwrap_or_default();
            let info = json!({"pid": 1, "runtimeSpec": {"linux": {"namespaces": [{"type": "network", "path": netns}]}}});
            let info = [("info".to_owned(), info.to_string())].into();
            grpc(&PodSandboxStatusResponse { info, ..PodSandboxStatusResponse::default() }.encode_to_vec())
        };
        let router = Router::new()
            .route(cri::LIST_POD_SANDBOX, post(list))
            .route(cri::POD_SANDBOX_STATUS, post(status));
        let listener = UnixListener::bind(self.root.join("host").join(&SOCKET[1..])).unwrap();
        self.runtime.spawn(async move { axum::serve(listener, router).await.unwrap() });
    }

    /// Creates a running pod with a network namespace.
    pub fn run_pod(&self, name: &str) {
        let netns = self.netns(name);
        ip(&format!("netns add {}-{name}", self.prefix)).unwrap();
        let uid = format!("uid-{name}");
        self.sandboxes.lock().unwrap().push((sandbox(&container(name), &uid, name), netns));
        let object = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "ns", "uid": uid, "annotations": {"other": "x"}},
            "spec": {"nodeName": "node-1"}, "status": {"phase": "Running"},
        });
        self.api.set(&mut self.api.state.lock().unwrap(), "pods", name, Some(object));
    }

    /// Creates a running static pod, which the runtime knows by this hash.
    pub fn run_static_pod(&self, name: &str, hash: &str) {
        self.run_pod(name);
        for (sandbox, _) in self.sandboxes.lock().unwrap().iter_mut() {
            if let Some(metadata) = sandbox.metadata.as_mut().filter(|metadata| metadata.name == name) {
                metadata.uid = hash.to_owned();
            }
        }
        self.api
            .annotate(name, &[("kubernetes.io/config.hash", hash), ("kubernetes.io/config.mirror", hash)]);
    }

    pub fn netns(&self, pod: &str) -> String {
        format!("/run/netns/{}-{pod}", self.prefix)
    }

    /// The name of a pod that no other test has: what multus records is in one directory of the machine.
    pub fn unique(&self, pod: &str) -> String {
        format!("{}{pod}", self.prefix)
    }

    /// Attaches an interface as multus does when a pod starts, and records it as multus and libcni do.
    pub fn attach_at_start(&self, pod: &str, network: &str, interface: &str) {
        assert!(pod.starts_with(&self.prefix), "the name of the pod must be unique");
        self.ip_in(pod, &format!("link add {interface} type veth peer name {interface}-peer"));
        let id = container(pod);
        let delegate = |name: &str, network: &str, interface: &str| {
            json!({
                "Conf": {"name": network}, "Name": name, "ifnameRequest": interface,
                "Bytes": ByteString(config(network).to_string().into_bytes()),
            })
        };
        let list =
            json!([delegate("cbr0", "cbr0", ""), delegate(&format!("ns/{network}"), network, interface)]);
        self.record(&id, &list.to_string());
        self.record_result(pod, network, interface);
    }

    /// Records the result of an ADD as libcni does.
    pub fn record_result(&self, pod: &str, network: &str, interface: &str) {
        let (id, netns) = (container(pod), self.netns(pod));
        let result = json!({
            "kind": "cniCacheV1", "containerId": id, "ifName": interface, "networkName": network, "netns": netns,
            "config": ByteString(config(network).to_string().into_bytes()),
            "result": {"cniVersion": "1.0.0", "interfaces": [{"name": interface, "sandbox": netns}]},
        });
        self.record(&format!("results/{network}-{id}-{interface}"), &result.to_string());
    }

    /// Writes a file of multus' caches.
    pub fn record(&self, file: &str, content: &str) {
        let path = Path::new("/var/lib/cni/multus").join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        self.recorded.lock().unwrap().push(path);
    }

    /// The lines of the hot-plug journal that contain this text.
    pub fn journal_lines(&self, text: &str) -> Vec<String> {
        let journal = fs::read_to_string(self.root.join("state/hotplug/journal")).unwrap_or_default();
        journal.lines().filter(|line| line.contains(text)).map(str::to_owned).collect()
    }

    /// Ends the sandbox of a pod as the runtime does.
    pub fn end_sandbox(&self, pod: &str) {
        let id = container(pod);
        self.sandboxes.lock().unwrap().retain(|(sandbox, _)| sandbox.id != id);
        ip(&format!("netns del {}-{pod}", self.prefix)).unwrap();
    }

    /// Starts the daemon.
    pub async fn start(&self) -> Daemon {
        self.start_with(LimitsConfig::default()).await
    }

    /// Starts the daemon with further flags.
    pub async fn start_with_flags(&self, flags: &[&str]) -> Daemon {
        self.start_as(LimitsConfig::default(), flags).await
    }

    /// Starts the daemon with other limits for plugins.
    pub async fn start_with(&self, limits: LimitsConfig) -> Daemon {
        self.start_as(limits, &[]).await
    }

    async fn start_as(&self, limits: LimitsConfig, more_flags: &[&str]) -> Daemon {
        #[derive(clap::Parser)]
        struct Cli {
            #[command(flatten)]
            args: HotplugArgs,
        }
        let bin = self.root.join("bin");
        let flags = [&["patchbay", "--cni-plugin-dirs", bin.to_str().unwrap()], more_flags].concat();
        let settings = Cli::parse_from(flags).args.settings(None).unwrap();
        let (stop, mut tasks, health) = (CancellationToken::new(), JoinSet::new(), Arc::new(Health::new()));
        let (client, metrics, repairs) = (self.api.client(), Metrics::default(), Repairs::default());
        let (pods, watch) = pods::own_pods(client.clone(), "node-1", Arc::clone(&health));
        tasks.spawn(watch.run(stop.clone()));
        let state = self.root.join("state");
        let opened = tokio::task::spawn_blocking(move || AttachmentJournal::open(&state)).await;
        let config = HotplugConfig {
            client,
            node: "node-1",
            pods,
            settings,
            runtime: ContainerRuntime::new(&self.root.join("host"), None, Some(OWN_POD.to_owned())),
            journal: opened.unwrap().unwrap(),
            boot: "boot".to_owned(),
            mount_namespace: Path::new("/proc/self/ns/mnt"),
            health: Arc::clone(&health),
            metrics: metrics.clone(),
            executor: ExecutorConfig {
                cache_dir: self.root.join("results"),
                device_info_dir: self.root.join("devices"),
                limits,
                ..ExecutorConfig::default()
            },
            executor_metrics: executor::Metrics::default(),
            repairs: repairs.clone(),
        };
        start(config, &mut tasks, &stop).unwrap();
        Daemon { stop, tasks, health, repairs, metrics }
    }

    /// The links of a pod but `lo`, with their indexes.
    pub fn links(&self, pod: &str) -> BTreeMap<String, u32> {
        let shown = ip(&format!("-n {}-{pod} -o link", self.prefix)).unwrap();
        let link = |line: &str| {
            let (index, rest) = line.split_once(": ").unwrap();
            (rest.split([':', '@']).next().unwrap().to_owned(), index.parse().unwrap())
        };
        shown.lines().map(link).filter(|(name, _)| name != "lo").collect()
    }

    /// Runs `ip` in the namespace of a pod.
    pub fn ip_in(&self, pod: &str, args: &str) {
        ip(&format!("-n {}-{pod} {args}", self.prefix)).unwrap();
    }

    /// Moves a link of a pod into the namespace of another one.
    pub fn move_link(&self, pod: &str, link: &str, to: &str) {
        self.ip_in(pod, &format!("link set {link} netns {}-{to}", self.prefix));
    }

    /// The calls of the plugin: command, interface, and whether it had a namespace.
    pub fn calls(&self) -> Vec<String> {
        let calls = fs::read_to_string(self.root.join("bin/calls")).unwrap_or_default();
        let short = |line: &str| {
            let (call, netns) = line.rsplit_once(' ').unwrap();
            if netns == "none" { format!("{call} released") } else { call.to_owned() }
        };
        calls.lines().map(short).collect()
    }

    /// How many addresses are allocated.
    pub fn addresses(&self) -> usize {
        let names = fs::read_dir(self.root.join("bin")).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().starts_with("address-")).count()
    }

    /// Makes the plugin fail or hang, or ends that.
    pub fn set_fault(&self, fault: &str, active: bool) {
        let path = self.root.join("bin").join(fault);
        if active { fs::write(path, "").unwrap() } else { fs::remove_file(path).unwrap() }
    }
}

impl Daemon {
    /// The metrics of hot-plug without the buckets, as Prometheus reads them.
    pub fn metrics(&self) -> String {
        let mut registry = Registry::with_prefix("patchbay_node");
        self.metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let lines = text.lines().filter(|line| !line.starts_with('#') && !line.contains("_bucket"));
        lines.collect::<Vec<_>>().join("\n")
    }

    /// Stops as after SIGTERM.
    pub async fn stop(mut self) {
        self.stop.cancel();
        let ended = async { while self.tasks.join_next().await.is_some() {} };
        timeout(DEADLINE, ended).await.expect("the daemon does not stop");
    }

    /// Ends as after SIGKILL: nothing more is done.
    pub async fn kill(mut self) {
        self.tasks.shutdown().await;
    }
}

/// Waits until `condition` holds.
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    assert!(timeout(DEADLINE, wait).await.is_ok(), "not within {} s: {what}", DEADLINE.as_secs());
}

/// Runs a test on a node, in a network namespace of its own.
pub fn on_node(test: &str, body: impl AsyncFnOnce(&TestNode) + Send) {
    let host = std::thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        File::open("/proc/thread-self/ns/net").unwrap()
    });
    let host = host.join().unwrap();
    namespace::within(host, || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut node = TestNode::new(test);
            node.serve_runtime();
            body(&node).await;
        });
    })
    .unwrap();
}

impl Drop for TestNode {
    fn drop(&mut self) {
        // Also after a failure: a plugin that hangs ends when its directory is gone.
        _ = fs::remove_dir_all(&self.root);
        for path in self.recorded.lock().unwrap().iter() {
            _ = fs::remove_file(path);
        }
        for name in ip("netns list").unwrap_or_default().lines() {
            let name = name.split_whitespace().next().unwrap_or_default();
            if name.starts_with(&format!("{}-", self.prefix)) {
                ip(&format!("netns del {name}"));
            }
        }
    }
}

pub fn container(pod: &str) -> String {
    format!("container-{pod}")
}

/// A network of the plugin.
pub fn config(name: &str) -> Value {
    json!({"cniVersion": "1.0.0", "name": name, "type": "veth"})
}

fn ip(args: &str) -> Option<String> {
    let output = Command::new("ip").args(args.split_whitespace()).output();
    let output = output.expect("cannot run ip: install the package iproute2");
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn sandbox(id: &str, uid: &str, pod: &str) -> PodSandbox {
    let [id, uid, name, namespace] = [id, uid, pod, "ns"].map(str::to_owned);
    let metadata = PodSandboxMetadata { name, uid, namespace, attempt: 0 };
    PodSandbox { id, metadata: Some(metadata), state: 0, created_at: 1 }
}

/// A gRPC response: a message prefixed with its length, then the status.
fn grpc(message: &[u8]) -> Response<Body> {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    let bytes = [&[0][..], &length, message].concat();
    let trailers =
        HeaderMap::from_iter([(HeaderName::from_static("grpc-status"), HeaderValue::from_static("0"))]);
    let body = Full::new(Bytes::from(bytes)).with_trailers(async { Some(Ok(trailers)) });
    Response::builder().header("content-type", "application/grpc").body(Body::new(body)).unwrap()
}
