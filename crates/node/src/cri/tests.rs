//! Tests with fake runtimes that respond, fail, hang, or do not serve CRI.

use std::{
    fs,
    sync::atomic::{AtomicUsize, Ordering},
};

use axum::{
    Router,
    body::{Body, Bytes},
    http::{HeaderMap, HeaderValue, Response},
    routing::post,
    serve::ListenerExt as _,
};
use http_body_util::{BodyExt as _, Full};
use tokio::{net::UnixListener, sync::Semaphore, task::JoinSet};
use tokio_util::sync::CancellationToken;
use wire::cri::{LinuxPodSandboxStatus, Namespace, NamespaceOption, PodSandboxMetadata, PodSandboxStatus};

use super::*;

const OWN_POD: &str = "uid-own";
const CONTAINERD: &str = DEFAULT_SOCKETS[0];
const CRIO: &str = DEFAULT_SOCKETS[1];
const K3S: &str = DEFAULT_SOCKETS[2];
const CRI_DOCKERD: &str = DEFAULT_SOCKETS[5];

/// The root of a host; removed on drop.
pub struct HostRoot(pub PathBuf);

impl HostRoot {
    pub fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("patchbay-cri-{}-{test}", std::process::id()));
        _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn listen(&self, socket: &str) -> UnixListener {
        let path = self.0.join(socket.strip_prefix('/').unwrap());
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        UnixListener::bind(path).unwrap()
    }

    /// Serves `router` on a socket of the host for as long as the set lives.
    fn serve(&self, socket: &str, router: Router) -> JoinSet<()> {
        let (listener, mut tasks) = (self.listen(socket), JoinSet::new());
        tasks.spawn(async move { axum::serve(listener, router).await.unwrap() });
        tasks
    }

    /// A runtime that lists these sandboxes.
    fn serve_sandboxes(&self, socket: &str, items: Vec<PodSandbox>) -> JoinSet<()> {
        self.serve(socket, listing(ListPodSandboxResponse { items }.encode_to_vec(), "0"))
    }

    fn runtime(&self) -> ContainerRuntime {
        ContainerRuntime::new(&self.0, None, Some(OWN_POD.to_owned()))
    }

    fn runtime_at(&self, socket: &str) -> ContainerRuntime {
        ContainerRuntime::new(&self.0, Some(PathBuf::from(socket)), Some(OWN_POD.to_owned()))
    }
}

impl Drop for HostRoot {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

/// A gRPC response: a message prefixed with its length, then the status.
fn response(message: &[u8], status: &'static str) -> Response<Body> {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    let bytes = [&[0][..], &length, message].concat();
    let trailers = HeaderMap::from_iter([(
        http::HeaderName::from_static("grpc-status"),
        HeaderValue::from_static(status),
    )]);
    let body = Full::new(Bytes::from(bytes)).with_trailers(async { Some(Ok(trailers)) });
    Response::builder().header("content-type", "application/grpc").body(Body::new(body)).unwrap()
}

/// A runtime with this response to ListPodSandbox.
fn listing(message: Vec<u8>, status: &'static str) -> Router {
    let list = move |request: Bytes| async move {
        assert_eq!(request[..], [0; 5]);
        response(&message, status)
    };
    Router::new().route(cri::LIST_POD_SANDBOX, post(list))
}

/// A runtime whose sandboxes with an ID that starts with `host` use the host's network, and how often it was queried for a
/// status.
fn with_status(items: Vec<PodSandbox>) -> (Router, Arc<AtomicUsize>) {
    let queries = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&queries);
    let status = move |request: Bytes| async move {
        counter.fetch_add(1, Ordering::Relaxed);
        let PodSandboxStatusRequest { pod_sandbox_id, .. } = Message::decode(&request[5..]).unwrap();
        if pod_sandbox_id.starts_with("gone") {
            return response(&[], "5");
        }
        let host = pod_sandbox_id.starts_with("host");
        let network = if host { NamespaceMode::Node } else { NamespaceMode::Pod }.into();
        let namespaces = Some(Namespace { options: Some(NamespaceOption { network }) });
        let linux = Some(LinuxPodSandboxStatus { namespaces });
        let status = Some(PodSandboxStatus { linux, ..PodSandboxStatus::default() });
        let status = PodSandboxStatusResponse { status, ..PodSandboxStatusResponse::default() };
        response(&status.encode_to_vec(), "0")
    };
    let list = listing(ListPodSandboxResponse { items }.encode_to_vec(), "0");
    (list.route(cri::POD_SANDBOX_STATUS, post(status)), queries)
}

/// A runtime whose sandboxes change, and that can restart.
pub struct FakeRuntime {
    pub host: HostRoot,
    pub state: Arc<FakeState>,
    serving: Option<(CancellationToken, JoinSet<()>)>,
}

/// What a [`FakeRuntime`] answers, and how often it was asked.
pub struct FakeState {
    items: Mutex<Vec<PodSandbox>>,
    /// The verbose information, by sandbox ID.
    infos: Mutex<BTreeMap<String, String>>,
    /// The configuration in the verbose status of the runtime.
    config: Mutex<String>,
    /// Each list takes one permit.
    pub gate: Semaphore,
    pub lists: AtomicUsize,
    pub statuses: AtomicUsize,
    pub connections: AtomicUsize,
}

impl FakeRuntime {
    /// Lists the daemon's own pod, and lets all lists pass.
    pub fn new(test: &str) -> Self {
        let state = FakeState {
            items: Mutex::new(vec![own()]),
            infos: Mutex::default(),
            config: Mutex::default(),
            gate: Semaphore::new(Semaphore::MAX_PERMITS),
            lists: AtomicUsize::new(0),
            statuses: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
        };
        let mut runtime = Self { host: HostRoot::new(test), state: Arc::new(state), serving: None };
        runtime.start();
        runtime
    }

    pub fn runtime(&self) -> ContainerRuntime {
        self.host.runtime()
    }

    /// Adds a sandbox with verbose information.
    pub fn add(&self, sandbox: PodSandbox, info: &str) {
        self.state.infos.lock().unwrap().insert(sandbox.id.clone(), info.to_owned());
        self.state.items.lock().unwrap().push(sandbox);
    }

    /// Sets the configuration that the runtime reports in its status.
    pub fn set_status(&self, config: &str) {
        config.clone_into(&mut self.state.config.lock().unwrap());
    }

    pub fn remove(&self, id: &str) {
        self.state.infos.lock().unwrap().remove(id);
        self.state.items.lock().unwrap().retain(|sandbox| sandbox.id != id);
    }

    pub fn start(&mut self) {
        let (list, status) = (Arc::clone(&self.state), Arc::clone(&self.state));
        let runtime = Arc::clone(&self.state);
        let runtime_status = move |request: Bytes| async move {
            assert_eq!(Message::decode(&request[5..]), Ok(StatusRequest { verbose: true }));
            let info = BTreeMap::from([("config".to_owned(), runtime.config.lock().unwrap().clone())]);
            response(&StatusResponse { info }.encode_to_vec(), "0")
        };
        let list = move || async move {
            list.lists.fetch_add(1, Ordering::Relaxed);
            list.gate.acquire().await.unwrap().forget();
            let items = list.items.lock().unwrap().clone();
            response(&ListPodSandboxResponse { items }.encode_to_vec(), "0")
        };
        let status = move |request: Bytes| async move {
            status.statuses.fetch_add(1, Ordering::Relaxed);
            let request: PodSandboxStatusRequest = Message::decode(&request[5..]).unwrap();
            assert!(request.verbose);
            let info = status.infos.lock().unwrap().get(&request.pod_sandbox_id).cloned();
            let Some(info) = info else { return response(&[], "5") };
            let info = BTreeMap::from([("info".to_owned(), info)]);
            let status = PodSandboxStatusResponse { info, ..PodSandboxStatusResponse::default() };
            response(&status.encode_to_vec(), "0")
        };
        let router = Router::new()
            .route(cri::LIST_POD_SANDBOX, post(list))
            .route(cri::POD_SANDBOX_STATUS, post(status))
            .route(cri::STATUS, post(runtime_status));
        let (stop, mut tasks, state) = (CancellationToken::new(), JoinSet::new(), Arc::clone(&self.state));
        let listener = self.host.listen(CONTAINERD).tap_io(move |_| {
            state.connections.fetch_add(1, Ordering::Relaxed);
        });
        let stopped = stop.clone().cancelled_owned();
        tasks.spawn(
            async move { axum::serve(listener, router).with_graceful_shutdown(stopped).await.unwrap() },
        );
        self.serving = Some((stop, tasks));
    }

    /// Closes all connections and removes the socket.
    pub async fn stop(&mut self) {
        let Some((stop, mut tasks)) = self.serving.take() else { return };
        stop.cancel();
        while tasks.join_next().await.is_some() {}
        fs::remove_file(self.host.0.join(CONTAINERD.strip_prefix('/').unwrap())).unwrap();
    }
}

pub fn sandbox(id: &str, name: &str, uid: &str, state: i32) -> PodSandbox {
    let [name, uid, namespace] = [name, uid, "shop"].map(str::to_owned);
    let metadata = PodSandboxMetadata { name, uid, namespace, attempt: 1 };
    PodSandbox { id: id.to_owned(), metadata: Some(metadata), state, created_at: 1 }
}

fn own() -> PodSandbox {
    sandbox("own", "patchbay-node-x7k2p", OWN_POD, 0)
}

fn ids(ids: &[&str]) -> BTreeSet<String> {
    ids.iter().copied().map(str::to_owned).collect()
}

#[test]
fn a_sandbox_has_its_pod_and_whether_it_runs() {
    let read = |state| Sandbox::from(sandbox("id", "web", "uid", state));
    assert_eq!((read(0).ready, read(1).ready, read(9).ready), (true, false, true));
    let Sandbox { id, pod_uid, pod_namespace, pod_name, attempt, ready: _ } = read(0);
    assert_eq!(attempt, 1);
    assert_eq!([id, pod_uid, pod_namespace, pod_name], ["id", "uid", "shop", "web"]);
    let nameless = PodSandbox { id: "bare".to_owned(), ..PodSandbox::default() };
    assert_eq!(Sandbox::from(nameless).pod_uid, "");
}

#[tokio::test]
async fn no_sandbox_is_missing_from_the_live_set_whatever_the_name_of_its_pod() {
    let host = HostRoot::new("live");
    let tenant = sandbox("tenant", "patchbay-node-debug", "uid-1", 0);
    let stopped = sandbox("stopped", "web", "uid-2", 1);
    let _tasks = host.serve_sandboxes(CONTAINERD, vec![own(), tenant, stopped]);
    assert_eq!(host.runtime().live().await.unwrap(), ids(&["own", "stopped", "tenant"]));
}

#[tokio::test]
async fn the_own_pod_and_host_network_pods_are_no_witnesses() {
    let host = HostRoot::new("witnesses");
    let all = vec![
        own(),
        sandbox("tenant", "patchbay-node-debug", "uid-1", 0),
        sandbox("host-1", "kube-proxy", "uid-2", 0),
        sandbox("stopped", "web", "uid-3", 1),
        // Without a status it may have an address.
        sandbox("gone-1", "web", "uid-4", 0),
    ];
    let (router, queries) = with_status(all);
    let _tasks = host.serve(CONTAINERD, router);
    let runtime = host.runtime();
    assert_eq!(runtime.witnesses().await.unwrap(), ids(&["gone-1", "stopped", "tenant"]));
    assert_eq!(queries.load(Ordering::Relaxed), 4);
    // The network mode of a sandbox never changes, so that it is queried once.
    assert_eq!(runtime.witnesses().await.unwrap(), ids(&["gone-1", "stopped", "tenant"]));
    assert_eq!(queries.load(Ordering::Relaxed), 5);
    assert_eq!(runtime.live().await.unwrap().len(), 5);
}

#[tokio::test]
async fn the_runtime_is_the_one_that_lists_the_own_pod() {
    let host = HostRoot::new("right");
    // Docker's containerd with CRI disabled, a runtime of other pods, and the kubelet's.
    let _docker = host.serve(CONTAINERD, Router::new());
    let _other = host.serve_sandboxes(CRIO, vec![sandbox("a", "patchbay-node-1", "uid-1", 0)]);
    let runtime = host.runtime();
    let error = runtime.live().await.unwrap_err().to_string();
    for part in [
        "containerd.sock does not serve CRI v1",
        "/run/crio/crio.sock does not run this pod",
        "set --runtime-socket",
    ] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(runtime.socket(), None);
    let _k3s = host.serve_sandboxes(K3S, vec![own()]);
    assert_eq!(runtime.live().await.unwrap(), ids(&["own"]));
    assert_eq!(runtime.socket(), Some(PathBuf::from(K3S)));
}

#[tokio::test]
async fn a_socket_without_a_listener_does_not_hide_the_next_one() {
    let host = HostRoot::new("stale");
    drop(host.listen(CONTAINERD));
    let _tasks = host.serve_sandboxes(CRI_DOCKERD, vec![own()]);
    assert_eq!(host.runtime().live().await.unwrap(), ids(&["own"]));
}

#[tokio::test]
async fn an_explicit_socket_is_the_only_candidate() {
    let host = HostRoot::new("explicit");
    let _default = host.serve_sandboxes(CONTAINERD, vec![own()]);
    let error = host.runtime_at("/run/my.sock").live().await.unwrap_err();
    assert!(matches!(&error, Error::NoSocket { tried } if tried == &["/run/my.sock"]), "{error}");
    let _tasks = host.serve_sandboxes("/run/my.sock", vec![own(), sandbox("a", "web", "uid-1", 0)]);
    for socket in ["/run/my.sock", "/var/run/my.sock"] {
        assert_eq!(host.runtime_at(socket).live().await.unwrap(), ids(&["a", "own"]));
    }
}

#[tokio::test]
async fn without_its_pod_uid_the_daemon_trusts_no_runtime() {
    let host = HostRoot::new("no-uid");
    let _tasks = host.serve_sandboxes(CONTAINERD, vec![own()]);
    for own_pod in [None, Some(String::new())] {
        let error = ContainerRuntime::new(&host.0, None, own_pod).live().await.unwrap_err();
        assert!(matches!(error, Error::NoPodUid), "{error}");
    }
}

#[tokio::test]
async fn without_a_socket_the_error_names_all_candidates() {
    let host = HostRoot::new("missing");
    let error = host.runtime().live().await.unwrap_err().to_string();
    for socket in DEFAULT_SOCKETS {
        assert!(error.contains(socket), "{error}");
    }
}

#[tokio::test]
async fn thousands_of_sandboxes_with_long_annotations_are_listed() {
    let host = HostRoot::new("many");
    let mut message = Vec::new();
    for number in 0..5000 {
        let uid = if number == 4999 { OWN_POD } else { "uid" };
        let mut one = sandbox(&format!("id-{number}"), "web", uid, 0).encode_to_vec();
        // Field 7, one annotation.
        let annotation = [b"\x0a\x01a\x12".to_vec(), length(4000), vec![b'x'; 4000]].concat();
        one.extend([b"\x3a".to_vec(), length(annotation.len()), annotation].concat());
        message.extend([b"\x0a".to_vec(), length(one.len()), one].concat());
    }
    assert!(message.len() > 16 * 1024 * 1024);
    let _tasks = host.serve(CONTAINERD, listing(message, "0"));
    assert_eq!(host.runtime().live().await.unwrap().len(), 5000);
}

fn length(length: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    prost::encoding::encode_varint(length as u64, &mut bytes);
    bytes
}

#[tokio::test]
async fn a_truncated_or_malformed_response_is_an_error() {
    for (test, message, status) in [
        ("garbage", vec![0xff; 40], "0"),
        ("failed", Vec::new(), "13"),
        ("broken", vec![0x0a, 0x7f, 0x0a], "0"),
    ] {
        let host = HostRoot::new(test);
        let _tasks = host.serve(CONTAINERD, listing(message, status));
        let Err(Error::NotFound { attempts }) = host.runtime().live().await else { panic!("{test}") };
        assert!(matches!(attempts[..], [Error::List { .. }]), "{test}: {attempts:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_hangs_is_abandoned_after_the_timeout() {
    let host = HostRoot::new("hangs");
    let _listener = host.listen(CONTAINERD);
    let started = Instant::now();
    let Err(Error::NotFound { attempts }) = host.runtime().live().await else { panic!("it hangs") };
    assert!(matches!(attempts[..], [Error::Timeout { .. }]), "{attempts:?}");
    assert_eq!(started.elapsed().as_secs(), CRI_TIMEOUT.as_secs());
}

#[tokio::test]
async fn one_connection_serves_all_calls_and_is_made_again_after_a_restart() {
    let mut fake = FakeRuntime::new("restart");
    fake.add(sandbox("a", "web", "uid-1", 0), r#"{"pid": 7}"#);
    let runtime = fake.runtime();
    for _ in 0..3 {
        assert_eq!(runtime.sandboxes().await.unwrap().len(), 2);
        assert_eq!(runtime.sandbox_info("a").await.unwrap().unwrap().pid, Some(7));
    }
    assert_eq!(fake.state.connections.load(Ordering::Relaxed), 1);

    fake.stop().await;
    assert!(runtime.sandboxes().await.is_err());
    assert!(runtime.sandbox_info("a").await.is_err());
    fake.start();
    assert_eq!(runtime.sandbox_info("a").await.unwrap().unwrap().pid, Some(7));
    assert_eq!(runtime.sandboxes().await.unwrap().len(), 2);

    // A restart that no call has noticed.
    fake.stop().await;
    fake.start();
    assert_eq!(runtime.sandboxes().await.unwrap().len(), 2);
    assert_eq!(runtime.sandbox_info("a").await.unwrap().unwrap().pid, Some(7));
}

#[tokio::test]
async fn a_sandbox_that_does_not_exist_has_no_information() {
    let fake = FakeRuntime::new("no-info");
    fake.add(sandbox("odd", "web", "uid-1", 0), "[]");
    assert_eq!(fake.runtime().sandbox_info("gone").await.unwrap(), None);
    let error = fake.runtime().sandbox_info("odd").await.unwrap_err();
    assert!(matches!(error, Error::Info { .. }), "{error}");
}

#[tokio::test]
async fn the_directories_of_cni_are_those_of_the_runtime() {
    let fake = FakeRuntime::new("dirs");
    fake.set_status(r#"{"cni":{"confDir":"/c","binDirs":["/b"]}}"#);
    let dirs = |config: &str, plugins: &str| CniDirs {
        config: Some(PathBuf::from(config)),
        plugins: vec![PathBuf::from(plugins)],
    };
    assert_eq!(fake.runtime().cni_dirs().await.unwrap(), dirs("/c", "/b"));
    fake.set_status("{}");
    assert_eq!(fake.runtime().cni_dirs().await.unwrap(), CniDirs::default());
    // CRI-O serves HTTP at the same socket.
    let host = HostRoot::new("dirs-crio");
    let status = async || response(&StatusResponse::default().encode_to_vec(), "0");
    let config = async || "[crio.network]\n  network_dir = \"/c/\"\n  plugin_dirs = [\"/b\"]\n";
    let router = listing(ListPodSandboxResponse { items: vec![own()] }.encode_to_vec(), "0")
        .route(cri::STATUS, post(status))
        .route("/config", axum::routing::get(config));
    let _serving = host.serve(CRIO, router);
    assert_eq!(host.runtime().cni_dirs().await.unwrap(), dirs("/c", "/b"));
    // A runtime without this method names none.
    let host = HostRoot::new("dirs-none");
    let _serving = host.serve_sandboxes(CONTAINERD, vec![own()]);
    assert_eq!(host.runtime().cni_dirs().await.unwrap(), CniDirs::default());
}
