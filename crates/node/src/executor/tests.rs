//! Tests with real processes: plugins are shell scripts.

mod chains;
mod faults;
mod load;

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::mpsc::{Sender, channel},
    thread::JoinHandle,
    time::Duration,
};

use api::nad_config::NadConfig;
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use serde_json::{Map, Value, json};

use super::*;

impl Executor {
    async fn add_now(&self, request: &CniRequest) -> Result<CniAddResult, ExecError> {
        let permit = self.admit_add(request).await?;
        self.add(request, permit).await
    }

    async fn del_all(&self, request: &CniRequest, prev_result: Option<&str>) -> Result<(), ExecError> {
        self.del(request, prev_result, DelErrors::Fail).await
    }
}

/// Directories of a node with plugins.
struct TestNode {
    root: PathBuf,
    executor: Executor,
    metrics: Metrics,
}

impl TestNode {
    fn new(name: &str) -> Self {
        Self::with(name, |_| ())
    }

    fn with(name: &str, change: impl FnOnce(&mut ExecutorConfig)) -> Self {
        let root = std::env::temp_dir().join(format!("patchbay-executor-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        for dir in ["first", "bin", "calls"] {
            fs::create_dir_all(root.join(dir)).unwrap();
        }
        let mut config = ExecutorConfig {
            plugin_dirs: vec![root.join("first"), root.join("bin")],
            cache_dir: root.join("cni/results"),
            device_info_dir: root.join("devinfo/cni"),
            ..ExecutorConfig::default()
        };
        change(&mut config);
        let host = HostMounts::open(Path::new("/proc/self/ns/mnt")).unwrap();
        let metrics = Metrics::default();
        Self { root, executor: Executor::new(host, config, metrics.clone()), metrics }
    }

    /// Writes a plugin. In its script, `$ROOT` is the directory of this test.
    fn plugin(&self, name: &str, script: &str) {
        write_plugin(&self.root.join("bin").join(name), &self.root, script);
    }

    /// Writes a plugin that records its calls and prints a result.
    fn recorder(&self, name: &str, result: &Value) {
        let script = format!(
            r"call=$ROOT/calls/$(ls $ROOT/calls | wc -l)-$CNI_COMMAND-{name}
            mkdir $call; cat > $call/stdin; cat /proc/self/environ > $call/env; pwd > $call/pwd
            [ $CNI_COMMAND = DEL ] || echo '{result}'"
        );
        self.plugin(name, &script);
    }

    /// The names of the recorded calls, in order.
    fn calls(&self) -> Vec<String> {
        let calls = fs::read_dir(self.root.join("calls")).unwrap();
        let mut calls: Vec<_> = calls.map(|call| call.unwrap().file_name().into_string().unwrap()).collect();
        calls.sort();
        calls
    }

    fn stdin(&self, call: &str) -> Value {
        serde_json::from_str(&self.read(&format!("calls/{call}/stdin"))).unwrap()
    }

    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.root.join(path)).unwrap()
    }

    fn cache_file(&self, request: &CniRequest) -> PathBuf {
        cache::result_path(&self.root.join("cni/results"), request)
    }
}

impl Drop for TestNode {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

fn write_plugin(path: &Path, root: &Path, script: &str) {
    let text = format!("#!/bin/sh\nROOT={}\n{script}\n", root.display());
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn request(config: &Value) -> CniRequest {
    CniRequest {
        config: NadConfig::parse(Some(&config.to_string()), "blue").unwrap(),
        nad: "default/blue".to_owned(),
        container_id: "abc".to_owned(),
        netns: Some("/var/run/netns/x".to_owned()),
        ifname: "net1".to_owned(),
        cni_args: vec![
            ("IgnoreUnknown".to_owned(), "true".to_owned()),
            ("K8S_POD_NAME".to_owned(), "p".to_owned()),
        ],
        capability_args: Map::new(),
    }
}

/// A request for one plugin.
fn one(plugin: &str) -> CniRequest {
    request(&json!({"cniVersion": "1.0.0", "type": plugin}))
}

fn result() -> Value {
    json!({
        "cniVersion": "1.0.0",
        "interfaces": [{"name": "net1", "mac": "02:00:00:00:00:01", "sandbox": "/var/run/netns/x"}],
        "ips": [{"address": "10.0.0.2/24", "interface": 0}],
    })
}

/// A mount namespace with a tmpfs on the directory, while this value lives.
struct MountNamespace {
    path: PathBuf,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl MountNamespace {
    fn new(dir: &Path, fill: impl FnOnce() + Send + 'static) -> Self {
        let (dir, (stop, stopped), (ready, path)) = (dir.to_owned(), channel::<()>(), channel());
        let thread = std::thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNS).expect("make a mount namespace: run this as root");
            let none = None::<&str>;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
            mount(Some("tmpfs"), &dir, Some("tmpfs"), MsFlags::empty(), none).unwrap();
            fill();
            let thread = nix::unistd::gettid();
            ready.send(PathBuf::from(format!("/proc/{}/task/{thread}/ns/mnt", std::process::id()))).unwrap();
            let _ = stopped.recv();
        });
        Self { path: path.recv().unwrap(), stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for MountNamespace {
    fn drop(&mut self) {
        self.stop.take();
        self.thread.take().map(JoinHandle::join);
    }
}

#[tokio::test]
async fn plugins_run_in_the_given_mount_namespace() {
    let node = TestNode::new("mounts");
    let dir = node.root.join("bin");
    node.plugin("where", "echo outside >&2; exit 1");
    let (root, bin) = (node.root.clone(), dir.clone());
    let namespace = MountNamespace::new(&dir, move || {
        write_plugin(&bin.join("where"), &root, &format!("cat {}/result", bin.display()));
        fs::write(bin.join("result"), result().to_string()).unwrap();
    });
    let host = HostMounts::open(&namespace.path).unwrap();
    let config = ExecutorConfig {
        plugin_dirs: vec![dir.clone()],
        cache_dir: dir.join("cache"),
        ..ExecutorConfig::default()
    };
    let executor = Executor::new(host.clone(), config, Metrics::default());
    executor.add_now(&one("where")).await.unwrap();
    // The cache is written there too.
    let cached = dir.join("cache/blue-abc-net1");
    assert!(!cached.exists());
    assert!(host.run(move || cached.exists()).await.unwrap());
    let error = node.executor.add_now(&one("where")).await.unwrap_err();
    assert!(error.to_string().contains("outside"), "{error}");
}

#[test]
fn a_result_becomes_the_network_status() {
    let result = json!({
        "cniVersion": "1.1.0",
        "interfaces": [{"name": "veth1"}, {"name": "net1", "mac": "02:00:00:00:00:01", "mtu": 1400, "sandbox": "/x"}],
        "ips": [{"address": "10.0.0.2/24", "gateway": "10.0.0.9", "interface": 1}, {"address": "fd00::2/64"}],
        "routes": [{"dst": "0.0.0.0/0", "gw": "10.0.0.1"}, {"dst": "10.1.0.0/16", "gw": "10.0.0.3"},
                   {"dst": "::/0", "gw": "fd00::1"}, {"dst": "0.0.0.0/0"}],
        "dns": {"nameservers": ["10.0.0.53"], "domain": "example.com"},
    });
    let success = Success::parse(result.to_string().as_bytes(), Version::V1_1_0).unwrap();
    let attached = attachment_result(&success);
    let names: Vec<_> = attached.interfaces.iter().map(|it| (it.name.as_str(), it.mtu, it.in_pod)).collect();
    assert_eq!(names, [("veth1", None, false), ("net1", Some(1400), true)]);
    let ips: Vec<_> = attached.ips.iter().map(|(ip, index)| (ip.to_string(), *index)).collect();
    assert_eq!(ips, [("10.0.0.2".to_owned(), Some(1)), ("fd00::2".to_owned(), None)]);
    let gateways: Vec<_> = attached.gateways.iter().map(ToString::to_string).collect();
    assert_eq!(gateways, ["10.0.0.1", "fd00::1"]);
    assert_eq!(
        (attached.dns.nameservers, attached.dns.domain),
        (vec!["10.0.0.53".to_owned()], "example.com".to_owned())
    );
}
