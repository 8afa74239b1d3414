use std::fs;

use serde_json::{Value, json};

use super::*;
use crate::cri::tests::{FakeRuntime, HostRoot};

fn host() -> HostMounts {
    HostMounts::open(Path::new("/proc/self/ns/mnt")).unwrap()
}

fn reader(root: &HostRoot) -> MultusConfigReader {
    MultusConfigReader::at(host(), root.0.clone())
}

fn write(root: &HostRoot, path: &str, content: impl AsRef<[u8]>) {
    let path = under(&root.0, Path::new(path));
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

/// The configuration after a check of the files.
async fn read(reader: &MultusConfigReader) -> Arc<MultusState> {
    reader.cache().checked = None;
    reader.read().await
}

async fn isolation(reader: &MultusConfigReader) -> Option<bool> {
    read(reader).await.config.namespace_isolation
}

/// A node with files, a runtime and pods.
struct TestNode {
    root: HostRoot,
    state: HostRoot,
    runtime: FakeRuntime,
    pods: OwnPods,
}

impl TestNode {
    fn new(test: &str) -> Self {
        let root = |part: &str| HostRoot::new(&format!("multus-{test}-{part}"));
        let runtime = FakeRuntime::new(&format!("multus-{test}-cri"));
        Self { root: root("root"), state: root("state"), runtime, pods: OwnPods::unlisted() }
    }

    /// A reader of a daemon that has just started.
    fn reader(&self) -> MultusConfigReader {
        let (runtime, pods, dir) = (self.runtime.runtime(), self.pods.clone(), self.state.0.clone());
        MultusConfigReader::with(host(), self.root.0.clone(), Some(NodeSources { runtime, pods, dir }))
    }
}

/// A pod as the DaemonSet of multus makes it.
fn multus_pod(image: &str, host_path: &str) -> Value {
    json!({
        "metadata": {"name": "p", "namespace": "kube-system", "uid": "u"},
        "spec": {
            "containers": [{"name": "c", "image": image}],
            "volumes": [{"name": "v", "hostPath": {"path": host_path}}],
        },
        "status": {"phase": "Pending"},
    })
}

#[tokio::test]
async fn a_node_without_multus_has_the_defaults() {
    let root = HostRoot::new("multus-none");
    assert_eq!(*reader(&root).read().await, MultusState::default());
    write(&root, "/etc/cni/net.d/10-flannel.conflist", r#"{"plugins":[{"type":"flannel"}]}"#);
    write(&root, "/etc/cni/net.d/20-broken.conf", "{");
    fs::create_dir_all(root.0.join("etc/cni/net.d/30-multus.conf")).unwrap();
    // A daemon's file without a daemon, and the directory of its records, are left behind by an uninstall.
    write(&root, "/etc/cni/net.d/multus.d/daemon-config.json", r#"{"namespaceIsolation":true}"#);
    fs::create_dir_all(root.0.join("var/lib/cni/multus")).unwrap();
    assert_eq!(*reader(&root).read().await, MultusState::default());
}

#[tokio::test]
async fn the_first_file_of_multus_counts() {
    let root = HostRoot::new("multus-first");
    let file = json!({
        "type": "multus", "namespaceIsolation": true, "globalNamespaces": "a, b", "confDir": "/host/conf",
        "binDir": "/hostroot/usr/bin", "cniDir": "/data", "defaultNetworks": ["x", 7], "multusNamespace": "m",
        "systemNamespaces": ["infra"],
    });
    write(&root, "/etc/cni/net.d/00-multus.conf", file.to_string());
    write(&root, "/etc/cni/net.d/01-multus.conf", r#"{"type":"multus","namespaceIsolation":false}"#);
    let expected = MultusConfig {
        namespace_isolation: Some(true),
        global_namespaces: vec!["a".to_owned(), "b".to_owned()],
        bin_dir: Some(PathBuf::from("/usr/bin")),
        cni_dir: PathBuf::from("/data"),
        conf_dir: PathBuf::from("/conf"),
        default_networks: vec!["x".to_owned()],
        multus_namespace: "m".to_owned(),
        system_namespaces: vec!["infra".to_owned()],
    };
    assert_eq!(reader(&root).read().await.config, expected);
}

#[tokio::test]
async fn multus_is_found_in_a_list_of_plugins_and_in_other_directories() {
    let root = HostRoot::new("multus-list");
    let list = r#"{"plugins":[{"type":"a"},{"type":"multus","namespaceIsolation":"true"}]}"#;
    write(&root, "/etc/kubernetes/cni/net.d/00-multus.conflist", list);
    assert_eq!(reader(&root).read().await.config.namespace_isolation, Some(true));
}

#[tokio::test]
async fn only_the_directory_of_the_container_runtime_counts_if_it_names_one() {
    let node = TestNode::new("runtime");
    node.pods.list(Vec::new());
    let (used, stale) = ("/data/cni/00-multus.conf", "/etc/cni/net.d/00-multus.conf");
    let config = json!({"cni": {"confDir": "/data/cni/", "binDir": "", "binDirs": ["/data/bin"]}});
    node.runtime.set_status(&config.to_string());
    write(&node.root, stale, r#"{"type":"multus"}"#);
    let state = node.reader().read().await;
    assert_eq!(state.config.namespace_isolation, None, "a file elsewhere shows that multus may be installed");
    write(&node.root, used, r#"{"type":"multus","namespaceIsolation":true}"#);
    let reader = node.reader();
    assert_eq!(isolation(&reader).await, Some(true));
    fs::remove_file(under(&node.root.0, Path::new(used))).unwrap();
    assert_eq!(isolation(&reader).await, Some(true), "multus restarts");
    assert_eq!(isolation(&node.reader()).await, Some(true), "and so does the daemon");
    write(&node.root, stale, "{");
    assert_eq!(isolation(&reader).await, Some(true), "a broken file elsewhere changes nothing");
    fs::remove_file(under(&node.root.0, Path::new(stale))).unwrap();
    write(&node.root, "/data/bin/multus-shim", "");
    fs::remove_dir_all(&node.state.0).unwrap();
    assert_eq!(isolation(&node.reader()).await, None, "multus is installed in the runtime's directory");
}

#[tokio::test]
async fn no_file_is_believed_until_the_runtime_has_named_its_directory() {
    let mut node = TestNode::new("silent");
    node.pods.list(Vec::new());
    let config = json!({"cni": {"confDir": "/data/cni", "binDir": "", "binDirs": ["/data/bin"]}});
    node.runtime.set_status(&config.to_string());
    write(&node.root, "/etc/cni/net.d/00-multus.conf", r#"{"type":"multus"}"#);
    node.runtime.stop().await;
    assert_eq!(isolation(&node.reader()).await, None);
    assert!(!node.state.0.join(LAST_CONFIG_FILE).exists());
    node.runtime.start();
    write(&node.root, "/data/cni/00-multus.conf", r#"{"type":"multus","namespaceIsolation":true}"#);
    assert_eq!(isolation(&node.reader()).await, Some(true));
    node.runtime.stop().await;
    assert_eq!(isolation(&node.reader()).await, Some(true), "the saved one counts");
    node.runtime.start();
    assert_eq!(isolation(&node.reader()).await, Some(true), "and was not overwritten");
}

#[tokio::test]
async fn isolation_is_not_known_until_the_runtime_and_the_pods_show_that_there_is_no_multus() {
    let mut node = TestNode::new("closed");
    node.runtime.stop().await;
    let reader = node.reader();
    let problem = async |reader: &MultusConfigReader| {
        let state = read(reader).await;
        assert_eq!(state.config.namespace_isolation.is_none(), state.problem.is_some());
        state.problem.clone().unwrap_or_default()
    };
    assert!(problem(&reader).await.contains("the container runtime does not answer"));
    node.runtime.start();
    assert!(problem(&reader).await.contains("have not been listed"));
    for (image, path, expected) in [
        ("example/multus-cni:v4", "/etc/cni/net.d", "pod kube-system/p installs or runs multus"),
        ("example/multus-cni:v4", "/run/multus", ""),
        ("example/other", "/etc/cni/net.d", ""),
    ] {
        node.pods.list(vec![multus_pod(image, path)]);
        let problem = problem(&reader).await;
        assert!(
            problem.contains(expected) && problem.is_empty() == expected.is_empty(),
            "{image} {path}: {problem}"
        );
    }
    let mut ended = multus_pod("multus", "/etc/cni/net.d");
    ended["status"]["phase"] = "Failed".into();
    node.pods.list(vec![ended]);
    assert_eq!(problem(&reader).await, "");
    node.pods.list(Vec::new());
    assert_eq!(*read(&reader).await, MultusState::default(), "no multus, no setting");
}

#[tokio::test]
async fn a_half_written_file_changes_nothing_that_isolates_and_stops_nothing() {
    let root = HostRoot::new("multus-change");
    let path = "/etc/cni/net.d/00-multus.conf";
    write(&root, path, r#"{"type":"multus","names"#);
    let reader = reader(&root);
    let state = reader.read().await;
    assert_eq!(state.config.namespace_isolation, None);
    let problem = state.problem.as_deref().unwrap();
    assert!(
        problem.contains("/etc/cni/net.d/00-multus.conf: ") && problem.contains("correct it"),
        "{problem}"
    );
    write(&root, path, r#"{"type":"multus","namespaceIsolation":true}"#);
    assert_eq!(isolation(&reader).await, Some(true));
    write(&root, path, r#"{"type":"multus","namespaceIs"#);
    let state = read(&reader).await;
    assert_eq!(state.config.namespace_isolation, Some(true), "the last one stays");
    assert!(state.problem.is_some());
    write(&root, path, r#"{"type":"multus"}"#);
    assert_eq!(isolation(&reader).await, Some(false));
    write(&root, path, r#"{"type":"multus","namespaceIs"#);
    assert_eq!(isolation(&reader).await, None, "it may isolate now");
    fs::remove_file(under(&root.0, Path::new(path))).unwrap();
    assert_eq!(*read(&reader).await, MultusState::default());
}

#[tokio::test]
async fn a_file_that_cannot_be_used_does_not_freeze_the_configuration_beside_it() {
    let root = HostRoot::new("multus-beside");
    let path = "/etc/cni/net.d/10-multus.conf";
    write(&root, path, r#"{"type":"multus","namespaceIsolation":true}"#);
    write(&root, "/etc/cni/net.d/00-multus-backup.json", "{");
    write(&root, "/etc/cni/net.d/99-multus.conf", "[]");
    let reader = reader(&root);
    assert_eq!(isolation(&reader).await, Some(true));
    write(&root, path, r#"{"type":"multus"}"#);
    assert_eq!(*read(&reader).await, MultusState::default());
}

#[tokio::test]
async fn the_thick_plugin_is_not_known_without_its_daemon() {
    let root = HostRoot::new("multus-thick");
    write(&root, "/etc/cni/net.d/00-multus.conf", r#"{"type":"multus-shim"}"#);
    write(&root, "/etc/cni/net.d/multus.d/daemon-config.json", r#"{"namespaceIsolation":false}"#);
    let state = reader(&root).read().await;
    assert_eq!(state.config.namespace_isolation, None);
    assert!(state.problem.as_deref().unwrap().contains("its daemon does not run"), "{state:?}");
}

#[tokio::test]
async fn isolation_stays_while_multus_restarts_and_ends_when_it_is_removed() {
    let node = TestNode::new("restart");
    node.pods.list(Vec::new());
    let path = "/etc/cni/net.d/00-multus.conf";
    write(&node.root, "/opt/cni/bin/multus", "");
    let reader = node.reader();
    assert_eq!(isolation(&reader).await, None, "multus has not written its file yet");
    write(&node.root, path, r#"{"type":"multus","namespaceIsolation":true}"#);
    assert_eq!(isolation(&reader).await, Some(true));
    fs::remove_file(under(&node.root.0, Path::new(path))).unwrap();
    assert_eq!(isolation(&reader).await, Some(true), "multus restarts");
    let reader = node.reader();
    assert_eq!(isolation(&reader).await, Some(true), "the daemon restarts, too");
    write(&node.root, path, r#"{"type":"multus"}"#);
    assert_eq!(isolation(&reader).await, Some(false));
    write(&node.root, path, r#"{"type":"multus","namespaceIsolation":true}"#);
    assert_eq!(isolation(&reader).await, Some(true));
    fs::remove_file(under(&node.root.0, Path::new(path))).unwrap();
    fs::remove_file(node.root.0.join("opt/cni/bin/multus")).unwrap();
    node.pods.list(vec![multus_pod("multus", "/etc/cni")]);
    assert_eq!(isolation(&reader).await, Some(true), "its pod is still there");
    node.pods.list(Vec::new());
    assert_eq!(isolation(&reader).await, Some(false), "multus is removed");
    assert!(!node.state.0.join(LAST_CONFIG_FILE).exists());
    assert_eq!(isolation(&node.reader()).await, Some(false));
}
