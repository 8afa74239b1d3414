//! Tests of the CNI server through its socket. Each test has its own network namespaces.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::fd::AsFd as _,
    process::Command,
    thread,
};

use link::namespace;
use nix::{
    sched::{CloneFlags, unshare},
    unistd::geteuid,
};
use plan::{attachment, ipam::PodRef};
use prometheus_client::{encoding::text::encode, registry::Registry};
use serde_json::{Value, json};
use tokio::{
    runtime::Builder,
    sync::watch,
    time::{sleep, timeout},
};

use super::*;
use crate::{
    attach::{AllocatedAddresses, AttachRequest, AttachmentId, AttachmentScope, CheckRequest},
    claims::{Announcer, fake_api::FakeApi},
    ipam::Ipam,
};

mod address;
mod claims;

const MTU: u32 = 1400;

/// A network namespace; deleted on drop.
struct Namespace(File);

impl Namespace {
    fn new() -> Self {
        assert!(geteuid().is_root(), "CNI tests need root: run them as `sudo -E cargo test -p node`");
        let created = thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            File::open("/proc/thread-self/ns/net").unwrap()
        });
        Self(created.join().unwrap())
    }

    /// The output of `ip`, if it succeeds.
    fn ip(&self, args: &str) -> Option<String> {
        let run = || Command::new("ip").args(args.split_whitespace()).output();
        let output =
            namespace::within(&self.0, run).unwrap().expect("cannot run ip: install the package iproute2");
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn links(&self) -> usize {
        self.ip("-o link").unwrap().lines().count()
    }
}

/// A host with a bridge and a running server.
struct TestHost {
    namespace: Namespace,
    bridge: u32,
    paths: TestPaths,
    networks: watch::Sender<Arc<Networks>>,
    metrics: Metrics,
    ipam: Arc<Ipam>,
    attacher: Arc<Attacher>,
    announcer: Announcer,
    /// Is asked about claims only.
    api: Arc<FakeApi>,
}

struct TestPaths {
    run_dir: PathBuf,
    state_dir: PathBuf,
}

impl TestHost {
    fn ready(&self) -> NetworkState {
        NetworkState::Ready { bridge_index: self.bridge, mtu: MTU }
    }

    fn set(&self, name: &str, state: NetworkState) {
        self.networks.send_modify(|networks| {
            let networks = Arc::make_mut(networks);
            let view = NetworkView {
                uid: format!("uid-{name}"),
                state,
                closed: false,
                ipam: None,
                has_claims: false,
            };
            networks.by_name.insert(name.to_owned(), view);
        });
    }

    /// Makes one call as the plugin does.
    async fn call(&self, request: &Request, pod: Option<&Namespace>) -> (u8, Value) {
        let (socket, frame) = (path(&self.paths.run_dir), request.encode().unwrap());
        let pod = pod.map(|pod| pod.0.try_clone().unwrap());
        let reply = spawn_blocking(move || {
            let client = UnixStream::connect(socket).unwrap();
            frames::send(&client, &frame, pod.as_ref().map(|pod| pod.as_fd())).unwrap();
            let (mut reader, mut buffer) = (frames::FrameReader::default(), [0; 4096]);
            loop {
                let length = frames::receive(&client, &mut buffer, &mut None).unwrap();
                assert!(length > 0, "the server closed the connection");
                reader.feed(&buffer[..length]);
                if let Some(Message::Reply(reply)) = reader.message().unwrap() {
                    return reply;
                }
            }
        });
        let reply = reply.await.unwrap();
        (reply.exit, serde_json::from_slice(&reply.stdout).unwrap_or(Value::Null))
    }

    /// Makes a call with the configuration of network `blue` and these changes; it must succeed.
    async fn done(&self, command: &str, id: &str, pod: &Namespace, changes: Value) -> Value {
        let (exit, value) = self.call(&request(command, id, changes), Some(pod)).await;
        assert_eq!(exit, 0, "{value}");
        value
    }

    /// Makes the same call; it must fail. Returns code and message.
    async fn refused(&self, command: &str, id: &str, pod: &Namespace, changes: Value) -> (u64, String) {
        let (exit, value) = self.call(&request(command, id, changes), Some(pod)).await;
        assert_eq!(exit, 1, "{value}");
        (value["code"].as_u64().unwrap(), value["msg"].as_str().unwrap().to_owned())
    }
}

fn request(command: &str, id: &str, changes: Value) -> Request {
    let mut config = json!({
        "cniVersion": "1.1.0", "name": "blue", "type": "patchbay-bridge", "network": "blue",
        "capabilities": {"mac": true},
    });
    for (key, value) in changes.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    Request {
        plugin: "patchbay-bridge".to_owned(),
        command: command.to_owned(),
        container_id: id.to_owned(),
        netns: "/run/netns/pod".to_owned(),
        ifname: "net1".to_owned(),
        args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=pod".to_owned(),
        path: "/opt/cni/bin".to_owned(),
        stdin: config.to_string().into_bytes(),
    }
}

fn host_end(id: &str) -> String {
    attachment::host_ifname(id, "net1").unwrap().to_string()
}

/// Stores each report, as the API server does for the daemon. Runs only while the test awaits something.
async fn publish(ipam: &Ipam) {
    let mut reports = ipam.lease_report();
    loop {
        let number = reports.borrow_and_update().as_ref().map(|current| current.number);
        if let Some(number) = number {
            ipam.set_published(number);
        }
        reports.changed().await.unwrap();
    }
}

/// Runs the server and a test in a namespace with a bridge; network `blue` is ready.
fn beside_server(
    name: &str,
    before: impl FnOnce(&TestHost) + Send,
    test: impl AsyncFnOnce(&TestHost) + Send,
) {
    let root = std::env::temp_dir().join(format!("patchbay-node-cni-{}-{name}", std::process::id()));
    let host = Namespace::new();
    host.ip("link add br0 mtu 1400 type bridge").unwrap();
    host.ip("link set br0 up").unwrap();
    let bridge = host.ip("-o link show br0").unwrap().split(':').next().unwrap().parse().unwrap();
    let paths = TestPaths { run_dir: root.join("run"), state_dir: root.join("state") };
    let networks = watch::Sender::new(Arc::new(Networks { synced: true, ..Networks::default() }));
    let inside = File::try_clone(&host.0).unwrap();
    let ipam = Arc::new(Ipam::open(&paths.state_dir, "boot", crate::ipam::Metrics::default()).unwrap());
    ipam.close(BTreeMap::new());
    let (reader, proc_root) = (networks.subscribe(), PathBuf::from("/proc"));
    let announcer = Announcer::default();
    let attacher = Attacher::new(reader, Arc::clone(&ipam), &paths.state_dir, proc_root, announcer.clone());
    let (metrics, attacher) = (Metrics::default(), Arc::new(attacher));
    let api = FakeApi::with_claim(["10.1.0.4/24", "fd01::4/64"], ["10.1.0.0/28", "fd01::/120"]);
    let host = TestHost { namespace: host, bridge, paths, networks, metrics, ipam, attacher, announcer, api };
    host.set("blue", host.ready());
    before(&host);
    let run = || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let attacher = Arc::clone(&host.attacher);
            let claims = host.claims();
            let server = CniServer::bind(&host.paths.run_dir, attacher, claims, host.metrics.clone());
            let (task, stop) = (host.announcer_task(), CancellationToken::new());
            tokio::select! {
                () = publish(&host.ipam) => {}
                ended = server.unwrap().run(stop.clone()) => panic!("the server ended: {ended:?}"),
                ended = task.run(stop) => panic!("the announcer ended: {ended:?}"),
                done = timeout(Duration::from_secs(60), test(&host)) => done.unwrap(),
            }
        });
    };
    namespace::within(inside, run).unwrap();
    fs::remove_dir_all(root).unwrap();
}

fn on_server(name: &str, test: impl AsyncFnOnce(&TestHost) + Send) {
    beside_server(name, |_| {}, test);
}

#[test]
fn add_and_del_are_idempotent() {
    on_server("join", async |host| {
        let pod = Namespace::new();
        let result = host.done("ADD", "c1", &pod, json!({})).await;
        let mac = attachment::mac("c1", "net1", "uid-blue").to_string();
        let inside = json!({"name": "net1", "mac": mac, "mtu": MTU, "sandbox": "/run/netns/pod"});
        let wanted = json!([{"name": host_end("c1"), "mtu": MTU}, inside]);
        assert_eq!(result["interfaces"], wanted);
        let shown = pod.ip("link show net1").unwrap();
        assert!(shown.contains(&mac) && shown.contains(",UP"), "{shown}");
        let alias = host.namespace.ip(&format!("link show {}", host_end("c1"))).unwrap();
        assert!(alias.contains("alias pod/uid-blue/blue/c1/net1") && alias.contains("master br0"), "{alias}");

        let index = pod.ip("-o link show net1").unwrap();
        assert_eq!(host.done("ADD", "c1", &pod, json!({})).await, result);
        assert_eq!(pod.ip("-o link show net1").unwrap(), index);
        for _ in 0..2 {
            assert_eq!(host.done("DEL", "c1", &pod, json!({})).await, Value::Null);
            assert_eq!(pod.ip("link show net1"), None);
        }
    });
}

#[test]
fn add_fails_with_the_reason_until_the_network_is_ready() {
    on_server("waits", async |host| {
        let pod = Namespace::new();
        let not_ready = NetworkState::NotReady {
            reason: "UplinkMissing".to_owned(),
            message: "there is no eth7".to_owned(),
        };
        for (state, expected) in [
            (not_ready, "UplinkMissing): there is no eth7"),
            (NetworkState::NotSelected, "network.patchbay.dev/blue=true"),
            (NetworkState::Removing, "is being removed"),
        ] {
            host.set("blue", state);
            let (code, msg) = host.refused("ADD", "c1", &pod, json!({})).await;
            assert!(code == 11 && msg.contains(expected), "{code} {msg}");
        }
        let (code, msg) = host.refused("ADD", "c1", &pod, json!({"network": "green"})).await;
        assert!(code == 11 && msg.contains("there is no BridgeNetwork \"green\""), "{code} {msg}");
        host.networks.send_modify(|networks| Arc::make_mut(networks).synced = false);
        let (code, msg) = host.refused("ADD", "c1", &pod, json!({"network": "green"})).await;
        assert!(code == 11 && msg.contains("has not yet read"), "{code} {msg}");
        assert_eq!((pod.links(), host.namespace.links()), (1, 2));

        host.networks.send_modify(|networks| Arc::make_mut(networks).synced = true);
        host.set("blue", NetworkState::Ready { bridge_index: host.bridge, mtu: MTU });
        host.done("ADD", "c1", &pod, json!({})).await;
        assert_eq!((pod.links(), host.namespace.links()), (2, 3));
    });
}

#[test]
fn only_add_waits_for_the_first_read_of_the_networks() {
    on_server("first-read", async |host| {
        let pod = Namespace::new();
        host.done("ADD", "c2", &pod, json!({})).await;
        host.networks.send_modify(|networks| Arc::make_mut(networks).synced = false);
        let first_read = async {
            let started = Instant::now();
            host.done("CHECK", "c2", &pod, json!({})).await;
            host.done("DEL", "c2", &pod, json!({})).await;
            let (code, msg) = host.refused("STATUS", "", &pod, json!({})).await;
            assert!(code == 50 && msg.contains("has not yet read"), "{code} {msg}");
            assert!(started.elapsed() < Duration::from_secs(5));
            host.networks.send_modify(|networks| Arc::make_mut(networks).synced = true);
        };
        let other = Namespace::new();
        tokio::join!(host.done("ADD", "c1", &other, json!({})), first_read);
        assert_eq!((pod.links(), other.links()), (1, 2));
    });
}

/// The plugin has its own timeout, which began before the daemon listened.
#[test]
fn an_add_that_waited_for_the_socket_does_not_wait_as_long_for_the_networks() {
    on_server("waited", async |host| {
        let pod = Namespace::new();
        host.networks.send_modify(|networks| Arc::make_mut(networks).synced = false);
        let later = request("ADD", "c1", json!({"network": "green"})).after_waiting(Duration::from_secs(10));
        let started = Instant::now();
        let (exit, value) = host.call(&later, Some(&pod)).await;
        assert!(exit == 1 && value["msg"].as_str().unwrap().contains("has not yet read"), "{value}");
        assert!(started.elapsed() < Duration::from_secs(5));
    });
}

/// After a reboot, the kubelet starts all pods of the node at once, and deletes others.
#[test]
fn waiting_adds_leave_workers_for_other_calls() {
    const MORE: usize = 8;
    on_server("many-wait", async |host| {
        let pod = Namespace::new();
        host.networks.send_modify(|networks| Arc::make_mut(networks).synced = false);
        let adds: Vec<UnixStream> = (0..commands::MAX_WAITING_ADDS + MORE)
            .map(|number| {
                let stream = UnixStream::connect(path(&host.paths.run_dir)).unwrap();
                let frame =
                    request("ADD", &format!("c{number}"), json!({"network": "green"})).encode().unwrap();
                frames::send(&stream, &frame, Some(pod.0.as_fd())).unwrap();
                stream.set_nonblocking(true).unwrap();
                stream
            })
            .collect();
        let mut failed = 0;
        while failed < MORE {
            let replied = |stream: &&UnixStream| {
                frames::receive(stream, &mut [0; 4096], &mut None).is_ok_and(|length| length > 0)
            };
            failed += adds.iter().filter(replied).count();
            sleep(Duration::from_millis(10)).await;
        }
        host.done("DEL", "c0", &pod, json!({})).await;
        assert_eq!(failed, MORE, "the others wait");
    });
}

#[test]
fn add_without_the_bridge_is_retried() {
    on_server("gone", async |host| {
        let pod = Namespace::new();
        host.namespace.ip("link del br0").unwrap();
        assert_eq!(host.refused("ADD", "c1", &pod, json!({})).await.0, 11);
        assert_eq!(pod.links(), 1);
    });
}

#[test]
fn a_new_link_is_deleted_if_its_network_was_removed_meanwhile() {
    on_server("meanwhile", async |host| {
        let pod = Namespace::new();
        let changes = [NetworkState::Removing, NetworkState::Ready { bridge_index: 7777, mtu: MTU }];
        for state in changes {
            host.set("blue", host.ready());
            host.done("ADD", "c1", &pod, json!({})).await;
            let before = Arc::clone(&host.networks.borrow());
            host.set("blue", state);
            let host_end = attachment::host_ifname("c1", "net1").unwrap();
            let error = host.attacher.verify_still_ready(&before, "blue", &host_end);
            assert_eq!(error.unwrap_err().code, Code::TryAgainLater);
            assert_eq!(pod.links(), 1);
        }
    });
}

/// As a caller without a CNI call attaches interface `net1` to network `blue`.
fn direct<'a>(
    id: &'a AttachmentId<'a>,
    pod: &'a Namespace,
    caller_alive: &'a dyn Fn() -> Result<(), protocol::Error>,
) -> AttachRequest<'a> {
    AttachRequest {
        id,
        namespace: pod.0.as_fd(),
        pod: PodRef { namespace: "default".to_owned(), name: "pod".to_owned(), uid: "uid".to_owned() },
        network: "blue",
        config: "blue",
        plugin: "patchbay-bridge",
        addresses: None,
        claim: None,
        mac: None,
        mtu: None,
        caller_alive,
    }
}

#[test]
fn attach_and_detach_need_no_cni_call_and_agree_with_cni_calls() {
    on_server("direct", async |host| {
        let (pod, id) = (Namespace::new(), AttachmentId::new("c1", "net1").unwrap());
        let attached = host.attacher.attach(&direct(&id, &pod, &|| Ok(()))).unwrap();
        assert_eq!(attached.host.to_string(), host_end("c1"));
        assert_eq!((attached.inside.to_string(), attached.mtu), ("net1".to_owned(), MTU));
        assert_eq!(attached.mac, attachment::mac("c1", "net1", "uid-blue"));
        assert_eq!(attached.allocated, AllocatedAddresses::default());
        // ADD finds the interface as it is, and CHECK agrees.
        let result = host.done("ADD", "c1", &pod, json!({})).await;
        assert_eq!(result["interfaces"][1]["mac"], attached.mac.to_string());
        host.done("CHECK", "c1", &pod, json!({"prevResult": result})).await;
        let check = |mac| {
            let (namespace, config) = (pod.0.as_fd(), "blue");
            let check = CheckRequest {
                id: &id,
                namespace,
                network: "blue",
                config,
                addresses: None,
                mac,
                mtu: Some(MTU),
            };
            host.attacher.check(&check)
        };
        check(None).unwrap();
        assert_eq!(check(Some("02:00:00:00:00:01".parse().unwrap())).unwrap_err().code, Code::Differs);
        for _ in 0..2 {
            host.attacher.detach(&id, AttachmentScope::Interface).unwrap();
            assert_eq!((pod.links(), host.namespace.links()), (1, 2));
        }
        // What a direct caller attached, DEL detaches.
        host.attacher.attach(&direct(&id, &pod, &|| Ok(()))).unwrap();
        host.done("DEL", "c1", &pod, json!({})).await;
        assert_eq!(pod.links(), 1);
    });
}

#[test]
fn a_direct_attach_fails_as_add_does_and_creates_nothing() {
    on_server("direct-fails", async |host| {
        let (pod, id) = (Namespace::new(), AttachmentId::new("c1", "net1").unwrap());
        let alive = || Ok(());
        let gone = || Err(protocol::Error::new(Code::TryAgainLater, "the caller has gone"));
        let request = || direct(&id, &pod, &alive);
        for (request, text) in [
            (AttachRequest { caller_alive: &gone, ..request() }, "the caller has gone"),
            (AttachRequest { network: "red", ..request() }, "there is no BridgeNetwork \"red\""),
            (AttachRequest { mtu: Some(MTU + 1), ..request() }, "set 1400 or less"),
            (AttachRequest { addresses: Some(&[]), ..request() }, "has no addresses: set spec.ipam"),
        ] {
            let error = host.attacher.attach(&request).unwrap_err();
            assert!(error.code == Code::TryAgainLater && error.msg.contains(text), "{error:?}");
        }
        let invalid = AttachmentId::new("c1", "../net1").unwrap();
        let error = host.attacher.attach(&direct(&invalid, &pod, &alive)).unwrap_err();
        assert_eq!(error.code, Code::InvalidEnvironment);
        assert_eq!((pod.links(), host.namespace.links()), (1, 2));
    });
}

#[test]
fn a_direct_attach_removes_the_tombstone_of_an_earlier_interface() {
    on_server("direct-tombstone", async |host| {
        let (pod, id) = (Namespace::new(), AttachmentId::new("c1", "net1").unwrap());
        let path = tombstone(host, "c1");
        host.attacher.attach(&direct(&id, &pod, &|| Ok(()))).unwrap();
        assert!(!path.exists());
        host.done("DEL", "c2", &Namespace::new(), json!({})).await;
        assert_eq!(pod.links(), 2, "no tombstone is applied to the new link");
    });
}

#[test]
fn twenty_pods_are_attached_concurrently() {
    on_server("twenty", async |host| {
        let pods: Vec<Namespace> = (0..20).map(|_| Namespace::new()).collect();
        let ids: Vec<String> = (0..20).map(|index| format!("c{index}")).collect();
        let add = |(id, pod)| host.done("ADD", id, pod, json!({}));
        futures::future::join_all(ids.iter().map(String::as_str).zip(&pods).map(add)).await;
        assert!(pods.iter().all(|pod| pod.links() == 2));
        assert_eq!(host.namespace.links(), 22);
        let del = |(id, pod)| host.done("DEL", id, pod, json!({}));
        futures::future::join_all(ids.iter().map(String::as_str).zip(&pods).map(del)).await;
        assert_eq!(host.namespace.links(), 2);
        let mut registry = Registry::default();
        host.metrics.register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for line in [
            r#"cni_calls_total{command="Add",result="Ok"} 20"#,
            r#"duration_seconds_count{command="Del"} 20"#,
        ] {
            assert!(text.contains(line), "{text}");
        }
    });
}

#[test]
fn a_mac_and_an_mtu_can_be_requested() {
    on_server("asked", async |host| {
        let pod = Namespace::new();
        let requested = json!({"mtu": 1300, "runtimeConfig": {"mac": "02-00-00-00-00-0A"}});
        let result = host.done("ADD", "c1", &pod, requested).await;
        assert_eq!(result["interfaces"][1]["mac"], "02:00:00:00:00:0a");
        let shown = pod.ip("link show net1").unwrap();
        assert!(shown.contains("02:00:00:00:00:0a") && shown.contains("mtu 1300"), "{shown}");

        let mut by_arguments = request("ADD", "c1", json!({}));
        by_arguments.args += ";MAC=02:00:00:00:00:0b";
        assert_eq!(host.call(&by_arguments, Some(&pod)).await.0, 0);
        assert!(pod.ip("link show net1").unwrap().contains("02:00:00:00:00:0b"));
        let (code, msg) = host.refused("ADD", "c2", &Namespace::new(), json!({"mtu": 1401})).await;
        assert!(code == 11 && msg.contains("set 1400 or less"), "{code} {msg}");
    });
}

#[test]
fn an_invalid_call_is_rejected_and_creates_nothing() {
    on_server("hostile", async |host| {
        let pod = Namespace::new();
        for (changes, code) in [
            (json!({"network": null}), 7),
            (json!({"network": 7}), 7),
            (json!({"cniVersion": "9.0.0"}), 1),
            (json!({"mtu": -1}), 7),
            (json!({"mtu": 10}), 7),
            (json!({"ipam": {"type": "host-local"}}), 2),
            (json!({"runtimeConfig": {"mac": "01:00:5e:00:00:01"}}), 7),
            (json!({"runtimeConfig": {"mac": "00:00:00:00:00:00"}}), 7),
            (json!({"runtimeConfig": {"mac": "02:00"}}), 7),
            (json!({"network": "../../etc"}), 11),
        ] {
            assert_eq!(host.refused("ADD", "c1", &pod, changes.clone()).await.0, code, "{changes}");
        }
        for (change, code) in [
            (&(|request: &mut Request| request.stdin = b"{".to_vec()) as &dyn Fn(&mut Request), 6),
            (&|request| request.args = "X=1".to_owned(), 4),
            (&|request| request.ifname = "../net1".to_owned(), 4),
            (&|request| request.ifname = "a-name-that-is-too-long".to_owned(), 4),
            (&|request| request.ifname = "lo".to_owned(), 4),
            (&|request| request.ifname = String::new(), 4),
            (&|request| request.container_id = String::new(), 4),
            (&|request| request.command = "EXPLODE".to_owned(), 4),
            (&|request| request.plugin = "patchbay-ipam".to_owned(), 7),
        ] {
            let mut request = request("ADD", "c1", json!({}));
            change(&mut request);
            let (exit, value) = host.call(&request, Some(&pod)).await;
            assert_eq!((exit, value["code"].as_u64()), (1, Some(code)), "{value}");
        }
        let add = request("ADD", "c1", json!({}));
        assert_eq!(host.call(&add, None).await.1["code"], 4);
        assert_eq!(host.call(&add, Some(&host.namespace)).await.1["code"], 4);
        assert_eq!((pod.links(), host.namespace.links()), (1, 2));
    });
}

#[test]
fn invalid_bytes_do_not_disturb_other_calls() {
    on_server("garbage", async |host| {
        for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[1, 2, 0, 0, 0, 0], &[1, 1, 255, 255, 255, 255], b""] {
            let mut stream = UnixStream::connect(path(&host.paths.run_dir)).unwrap();
            stream.write_all(bytes).unwrap();
        }
        host.done("ADD", "c1", &Namespace::new(), json!({})).await;
    });
}

#[test]
fn del_succeeds_despite_an_otherwise_invalid_call() {
    on_server("del", async |host| {
        let pod = Namespace::new();
        for change in [
            &(|request: &mut Request| request.stdin = b"nonsense".to_vec()) as &dyn Fn(&mut Request),
            &|request| request.netns = String::new(),
            &|request| request.args = "=;=".to_owned(),
        ] {
            host.set("blue", host.ready());
            host.done("ADD", "c1", &pod, json!({})).await;
            host.networks.send_replace(Arc::default());
            let mut request = request("DEL", "c1", json!({}));
            change(&mut request);
            assert_eq!(host.call(&request, None).await, (0, Value::Null));
            assert_eq!(pod.links(), 1);
        }
        host.namespace.ip(&format!("link add {} type bridge", host_end("c1"))).unwrap();
        host.done("DEL", "c1", &pod, json!({})).await;
        assert!(host.namespace.ip(&format!("link show {}", host_end("c1"))).is_some());
    });
}

#[test]
fn check_reports_differences() {
    on_server("check", async |host| {
        let pod = Namespace::new();
        let result = host.done("ADD", "c1", &pod, json!({"mtu": 1300})).await;
        let with = json!({"prevResult": result, "mtu": 1300});
        host.done("CHECK", "c1", &pod, with.clone()).await;
        host.done("CHECK", "c1", &pod, json!({"cniVersion": "0.4.0"})).await;
        assert_eq!(host.refused("CHECK", "c1", &pod, json!({"cniVersion": "0.3.1"})).await.0, 1);
        pod.ip("link set net1 mtu 1200").unwrap();
        assert_eq!(host.refused("CHECK", "c1", &pod, with.clone()).await.0, 100);
        pod.ip("link set net1 mtu 1300").unwrap();
        host.done("CHECK", "c1", &pod, with.clone()).await;
        host.namespace.ip(&format!("link set {} nomaster", host_end("c1"))).unwrap();
        assert_eq!(host.refused("CHECK", "c1", &pod, with).await.0, 100);
    });
}

#[test]
fn status_succeeds_once_the_networks_are_synced() {
    on_server("status", async |host| {
        let pod = Namespace::new();
        host.done("STATUS", "", &pod, json!({})).await;
        assert_eq!(host.refused("STATUS", "", &pod, json!({"cniVersion": "1.0.0"})).await.0, 1);
        host.networks.send_replace(Arc::default());
        assert_eq!(host.refused("STATUS", "", &pod, json!({})).await.0, 50);
        let (exit, value) = host.call(&request("VERSION", "", json!({})), None).await;
        assert_eq!((exit, &value["supportedVersions"]), (0, &json!(wire::CNI_VERSIONS)));
    });
}

#[test]
fn gc_deletes_only_unused_links_of_its_own_configuration() {
    on_server("gc", async |host| {
        let pods: Vec<Namespace> = (0..4).map(|_| Namespace::new()).collect();
        host.set("green", host.ready());
        host.done("ADD", "kept", &pods[0], json!({})).await;
        host.done("ADD", "forgotten", &pods[1], json!({})).await;
        host.done("ADD", "other", &pods[2], json!({"network": "green"})).await;
        // Another configuration of the same network, which this GC call does not cover.
        host.done("ADD", "elsewhere", &pods[3], json!({"name": "blue-too"})).await;
        let valid = json!({"cni.dev/valid-attachments": [{"containerID": "kept", "ifname": "net1"}]});
        assert_eq!(host.refused("GC", "", &pods[0], json!({})).await.0, 7);
        assert_eq!(pods.iter().map(Namespace::links).collect::<Vec<_>>(), [2, 2, 2, 2]);
        host.done("GC", "", &pods[0], valid.clone()).await;
        assert_eq!(pods.iter().map(Namespace::links).collect::<Vec<_>>(), [2, 1, 2, 2]);
        host.networks.send_replace(Arc::default());
        assert_eq!(host.refused("GC", "", &pods[0], valid).await.0, 11);
    });
}

fn tombstone(host: &TestHost, id: &str) -> PathBuf {
    let directory = host.paths.state_dir.join(frames::TOMBSTONE_DIR);
    fs::create_dir_all(&directory).unwrap();
    let request = request("DEL", id, json!({}));
    let path = directory.join(request.key());
    fs::write(&path, request.encode().unwrap()).unwrap();
    path
}

#[test]
fn tombstones_are_applied_before_the_first_call() {
    let pod = Namespace::new();
    let before = |host: &TestHost| {
        host.namespace.ip(&format!("link add {} type veth peer name x", host_end("c1"))).unwrap();
        tombstone(host, "c1");
        tombstone(host, "never-there");
        fs::write(host.paths.state_dir.join("tombstones/garbage"), "garbage").unwrap();
    };
    beside_server("tombstones", before, async |host| {
        host.done("STATUS", "", &pod, json!({})).await;
        assert_eq!(host.namespace.links(), 2);
        assert_eq!(fs::read_dir(host.paths.state_dir.join("tombstones")).unwrap().count(), 0);
    });
}

#[test]
fn a_tombstone_is_applied_after_the_next_del_but_never_to_a_newer_link() {
    on_server("later", async |host| {
        let (one, other) = (Namespace::new(), Namespace::new());
        host.done("ADD", "c1", &one, json!({})).await;
        let path = tombstone(host, "c1");
        host.done("DEL", "c2", &other, json!({})).await;
        assert!(one.links() == 1 && !path.exists());

        tombstone(host, "c1");
        host.done("ADD", "c1", &one, json!({})).await;
        host.done("DEL", "c2", &other, json!({})).await;
        assert!(one.links() == 2 && !path.exists());
    });
}

#[test]
fn the_plugin_is_installed_atomically_and_only_if_it_differs() {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    let root = std::env::temp_dir().join(format!("patchbay-node-cni-{}-install", std::process::id()));
    let (shim, bin) = (root.join("patchbay-cni"), root.join("opt/cni/bin"));
    fs::create_dir_all(&root).unwrap();
    assert!(install(&shim, &bin).is_err());
    fs::write(&shim, "one").unwrap();
    assert!(install(&shim, &bin).unwrap());
    let bridge = bin.join("patchbay-bridge");
    let inode = fs::metadata(&bridge).unwrap().ino();
    assert_eq!(fs::metadata(&bridge).unwrap().permissions().mode() & 0o7777, 0o755);
    fs::write(bin.join(".patchbay-ipam.patchbay-new"), "half").unwrap();
    assert!(!install(&shim, &bin).unwrap());
    assert_eq!(fs::metadata(&bridge).unwrap().ino(), inode);

    fs::write(&shim, "two").unwrap();
    assert!(install(&shim, &bin).unwrap());
    let names: Vec<_> = fs::read_dir(&bin).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
    assert_eq!(fs::read_to_string(bin.join("patchbay-ipam")).unwrap(), "two");
    fs::remove_dir_all(root).unwrap();
}
