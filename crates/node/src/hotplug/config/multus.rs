//! The configuration of multus on this node, as far as hot-plug follows it.
//!
//! Multus has a CNI configuration file in the directory of the container runtime, which it may write itself. The thick
//! plugin also has a configuration of its daemon, whose keys override those of the file.
//!
//! Multus deletes its file when it stops. Until it writes the file again, the last configuration counts, also after a restart
//! of the daemon: without it, a tenant could use networks of other namespaces whenever multus restarts.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use api::ErrorChain;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio::{task::spawn_blocking, time::Instant};
use tracing::{info, warn};

use crate::{host_mounts::HostMounts, store::atomic};

/// Directories of CNI configurations: of most nodes, of OpenShift, of K3s and RKE2, and of MicroK8s.
const CONFIG_DIRS: [&str; 5] = [
    "/etc/cni/net.d",
    "/etc/kubernetes/cni/net.d",
    "/var/lib/rancher/k3s/agent/etc/cni/net.d",
    "/var/lib/rancher/rke2/agent/etc/cni/net.d",
    "/var/snap/microk8s/current/args/cni-network",
];
/// The configuration of the daemon of the thick plugin, in a directory of CNI configurations.
const DAEMON_CONFIG: &str = "multus.d/daemon-config.json";
/// The plugin types of multus.
const PLUGIN_TYPES: [&str; 2] = ["multus", "multus-shim"];
/// The file with the last configuration of multus.
const LAST_CONFIG_FILE: &str = "multus.json";
/// How long the configuration is used before its files are checked for changes.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Larger files are not read.
const MAX_FILE: u64 = 1024 * 1024;
/// Further files of a directory are not read.
const MAX_FILES: usize = 64;
/// Where a multus pod mounts the root of the host.
const HOST_PREFIXES: [&str; 2] = ["/hostroot", "/host"];

/// What multus on this node is configured to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MultusConfig {
    /// Whether pods may only use networks of their own namespace and of `global_namespaces`. None if that is not known:
    /// multus is installed, but has no configuration yet.
    pub namespace_isolation: Option<bool>,
    pub global_namespaces: Vec<String>,
    /// The directory of CNI plugins, if it is configured.
    pub bin_dir: Option<PathBuf>,
    /// The directory of what multus records about sandboxes.
    pub cni_dir: PathBuf,
    /// The directory of configurations for NADs that have none.
    pub conf_dir: PathBuf,
    /// Networks that multus attaches to every pod, besides those that the pod requests.
    pub default_networks: Vec<String>,
    /// The namespace of the NADs of `default_networks`.
    pub multus_namespace: String,
}

impl Default for MultusConfig {
    /// What multus does if nothing is configured.
    fn default() -> Self {
        Self {
            namespace_isolation: Some(false),
            global_namespaces: vec!["default".to_owned()],
            bin_dir: None,
            cni_dir: PathBuf::from("/var/lib/cni/multus"),
            conf_dir: PathBuf::from("/etc/cni/multus/net.d"),
            default_networks: Vec::new(),
            multus_namespace: "kube-system".to_owned(),
        }
    }
}

/// Reads the configuration of multus, and again when its files have changed. Clones share it.
#[derive(Clone)]
pub struct MultusConfigReader(Arc<ReaderState>);

struct ReaderState {
    host: HostMounts,
    /// `/`; another directory in tests.
    root: PathBuf,
    /// The file with the last configuration of multus.
    memory: Option<PathBuf>,
    cache: Mutex<ReaderCache>,
}

#[derive(Default)]
struct ReaderCache {
    checked: Option<Instant>,
    /// What the configuration was read from.
    files: Vec<FileVersion>,
    config: Option<Arc<MultusConfig>>,
    /// The last configuration of multus.
    last: Option<MultusConfig>,
    /// Whether the file with the last configuration was read.
    loaded: bool,
    /// Whether the last check failed.
    failed: bool,
}

/// What becomes of the file with the last configuration.
#[derive(Debug, PartialEq, Eq)]
enum LastConfigChange {
    None,
    Write(MultusConfig),
    Delete,
}

/// A file that has changed has another version.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FileVersion {
    path: PathBuf,
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

/// The configuration of multus could not be read.
#[derive(Debug, thiserror::Error)]
pub enum MultusConfigError {
    #[error("read the configuration of multus on this node")]
    Read(#[source] io::Error),
    #[error("the configuration of multus in {} is not valid JSON", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
}

impl MultusConfigReader {
    /// `dir` is a directory of the daemon, for the last configuration.
    pub fn new(host: HostMounts, dir: &Path) -> Self {
        Self::with(host, PathBuf::from("/"), Some(dir.join(LAST_CONFIG_FILE)))
    }

    /// Reads the files of a node whose root is this directory.
    #[cfg(test)]
    pub fn at(host: HostMounts, root: PathBuf) -> Self {
        Self::with(host, root, None)
    }

    fn with(host: HostMounts, root: PathBuf, memory: Option<PathBuf>) -> Self {
        Self(Arc::new(ReaderState { host, root, memory, cache: Mutex::default() }))
    }

    /// The configuration as it is now: that of a file that cannot be read stays until it can be. On a node without multus
    /// it is the default.
    pub async fn read(&self) -> Result<Arc<MultusConfig>, MultusConfigError> {
        {
            let mut cache = self.cache();
            let current = cache.checked.is_some_and(|at| at.elapsed() < CHECK_INTERVAL);
            if let Some(config) = cache.config.as_ref().filter(|_| current) {
                return Ok(Arc::clone(config));
            }
            // One of several concurrent callers checks.
            cache.checked = Some(Instant::now());
        }
        self.load_last_config().await;
        let (root, (known, last)) = (self.0.root.clone(), {
            let cache = self.cache();
            (cache.files.clone(), cache.last.clone())
        });
        let read = self.0.host.run(move || {
            let files = read_files(&root, &known)?;
            Ok((files, is_installed(&root, last.as_ref())))
        });
        let parsed = match read.await.and_then(|read| read).map_err(MultusConfigError::Read) {
            Ok((None, _)) => Ok(None),
            Ok((Some(files), installed)) => {
                let versions = |files: Vec<ReadFile>| files.into_iter().map(|(version, _)| version).collect();
                parse_files(&files).map(|config| Some((versions(files), config, installed)))
            }
            Err(error) => Err(error),
        };
        let (result, change) = self.update(parsed);
        self.save_last_config(change).await;
        result
    }

    /// Takes over what was read. Also returns what is to be saved.
    fn update(
        &self,
        parsed: Result<Option<ParsedFiles>, MultusConfigError>,
    ) -> (Result<Arc<MultusConfig>, MultusConfigError>, LastConfigChange) {
        let mut cache = self.cache();
        let (files, config, installed) = match parsed {
            Ok(Some(parsed)) => parsed,
            Ok(None) => {
                cache.failed = false;
                return (Ok(cache.config.get_or_insert_default().clone()), LastConfigChange::None);
            }
            Err(error) => {
                if !std::mem::replace(&mut cache.failed, true) {
                    warn!(error = %ErrorChain(&error), "cannot read the configuration of multus; retrying");
                }
                let last = cache.last.clone().map(Arc::new);
                return (last.or_else(|| cache.config.clone()).ok_or(error), LastConfigChange::None);
            }
        };
        cache.failed = false;
        let mut change = LastConfigChange::None;
        let effective = if let Some(config) = config {
            cache.files = files;
            if cache.last.as_ref() != Some(&config) {
                cache.last = Some(config.clone());
                change = LastConfigChange::Write(config.clone());
            }
            config
        } else {
            // Read again next time: the directories of multus may change, too.
            cache.files = Vec::new();
            if !installed && cache.last.take().is_some() {
                change = LastConfigChange::Delete;
            }
            let unknown =
                installed.then(|| MultusConfig { namespace_isolation: None, ..MultusConfig::default() });
            cache.last.clone().or(unknown).unwrap_or_default()
        };
        if cache.config.as_deref() != Some(&effective) {
            info!(isolation = ?effective.namespace_isolation, "the configuration of multus changed");
            cache.config = Some(Arc::new(effective));
        }
        (Ok(cache.config.get_or_insert_default().clone()), change)
    }

    /// Reads the configuration that an earlier run of the daemon saved. What is not readable is not known.
    async fn load_last_config(&self) {
        let Some(path) = self.0.memory.clone().filter(|_| !self.cache().loaded) else { return };
        let read = spawn_blocking(move || read_file(&path)).await;
        let last = read.ok().and_then(Result::ok).and_then(|text| serde_json::from_slice(&text).ok());
        let mut cache = self.cache();
        if !std::mem::replace(&mut cache.loaded, true) && cache.last.is_none() {
            cache.last = last;
        }
    }

    /// Writes the configuration for later runs.
    async fn save_last_config(&self, change: LastConfigChange) {
        let Some(path) = self.0.memory.clone().filter(|_| change != LastConfigChange::None) else { return };
        let written = spawn_blocking(move || match change {
            LastConfigChange::None => Ok(()),
            LastConfigChange::Write(config) => {
                atomic::replace(&path, path.with_extension("new"), &serde_json::to_vec(&config)?)
            }
            LastConfigChange::Delete => atomic::remove(&path).map(|_| ()),
        });
        if let Err(error) = written.await.map_err(io::Error::other).flatten() {
            warn!(%error, "cannot save the last configuration of multus");
        }
    }

    fn cache(&self) -> MutexGuard<'_, ReaderCache> {
        self.0.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type ReadFile = (FileVersion, Vec<u8>);
/// The files, the configuration of multus in them, and whether multus is installed.
type ParsedFiles = (Vec<FileVersion>, Option<MultusConfig>, bool);

/// Whether the node has directories or binaries of multus. If that cannot be checked, it may have them.
fn is_installed(root: &Path, last: Option<&MultusConfig>) -> bool {
    let default = MultusConfig::default();
    let configs = || [&default].into_iter().chain(last);
    let bin_dirs = configs().filter_map(|config| config.bin_dir.as_deref());
    let bin_dirs = bin_dirs.chain([Path::new(super::DEFAULT_PLUGIN_DIR)]);
    let binaries = bin_dirs.flat_map(|dir| PLUGIN_TYPES.map(|name| dir.join(name)));
    let mut paths = configs().map(|config| config.cni_dir.clone()).chain(binaries);
    paths.any(|path| under(root, &path).try_exists().unwrap_or(true))
}

/// The files that can be configurations of multus; None if they are the same versions as before.
fn read_files(root: &Path, known: &[FileVersion]) -> io::Result<Option<Vec<ReadFile>>> {
    let mut versions = Vec::new();
    for dir in CONFIG_DIRS.map(|dir| under(root, Path::new(dir))) {
        for path in candidates(&dir)?.into_iter().chain([dir.join(DAEMON_CONFIG)]) {
            // A file that was deleted meanwhile, and a directory of such a name, are no configurations.
            if let Ok(metadata) = fs::metadata(&path)
                && metadata.is_file()
                && metadata.len() <= MAX_FILE
            {
                let (inode, size) = (metadata.ino(), metadata.len());
                let modified = (metadata.mtime(), metadata.mtime_nsec());
                versions.push(FileVersion { path, inode, size, modified });
            }
        }
    }
    if versions == known && !known.is_empty() {
        return Ok(None);
    }
    let read = versions.into_iter().filter_map(|version| match read_file(&version.path) {
        Ok(text) => Some(Ok((version, text))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => Some(Err(error)),
    });
    read.collect::<io::Result<_>>().map(Some)
}

/// The configurations of a directory, sorted as the container runtime sorts them.
fn candidates(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(error),
    };
    let mut paths: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let extension = path.extension().and_then(|extension| extension.to_str());
            matches!(extension, Some("conf" | "conflist" | "json"))
        })
        .collect();
    paths.sort();
    paths.truncate(MAX_FILES);
    Ok(paths)
}

fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(path)?.take(MAX_FILE).read_to_end(&mut text)?;
    Ok(text)
}

/// The directory or file of the host below its root.
pub fn under(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// The configuration that results from the first file of multus and from that of its daemon. None without the file of multus.
fn parse_files(files: &[ReadFile]) -> Result<Option<MultusConfig>, MultusConfigError> {
    let mut plugin: Option<Map<String, Value>> = None;
    let mut daemon: Option<Map<String, Value>> = None;
    for (FileVersion { path, .. }, text) in files {
        let is_daemon = path.ends_with(DAEMON_CONFIG);
        let object = match serde_json::from_slice::<Map<String, Value>>(text) {
            Ok(object) => object,
            Err(source) if is_daemon || names_multus(path) => {
                return Err(MultusConfigError::Json { path: path.clone(), source });
            }
            // The file of another plugin.
            Err(_) => continue,
        };
        if is_daemon {
            daemon.get_or_insert(object);
        } else if plugin.is_none() {
            plugin = multus_object(object);
        }
    }
    // The daemon of the thick plugin may leave its file behind. Its plugin's file has other keys, such as the isolation.
    let Some(mut merged) = plugin else { return Ok(None) };
    merged.extend(daemon.unwrap_or_default());
    Ok(Some(parse_object(&merged)))
}

fn names_multus(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.contains("multus"))
}

/// The configuration of multus in a CNI configuration, which may be a list of plugins.
fn multus_object(object: Map<String, Value>) -> Option<Map<String, Value>> {
    let is_multus = |object: &Map<String, Value>| {
        object.get("type").and_then(Value::as_str).is_some_and(|kind| PLUGIN_TYPES.contains(&kind))
    };
    if is_multus(&object) {
        return Some(object);
    }
    let plugins = object.get("plugins")?.as_array()?;
    plugins.iter().filter_map(Value::as_object).find(|plugin| is_multus(plugin)).cloned()
}

fn parse_object(object: &Map<String, Value>) -> MultusConfig {
    let default = MultusConfig::default();
    let text = |key: &str| object.get(key).and_then(Value::as_str).filter(|text| !text.is_empty());
    let directory = |key: &str| text(key).map(host_path).filter(|path| path.is_absolute());
    let flag = |key: &str| match object.get(key) {
        Some(Value::Bool(flag)) => *flag,
        Some(Value::String(text)) => text.eq_ignore_ascii_case("true"),
        _ => false,
    };
    let list = |key: &str| {
        let items = object.get(key).and_then(Value::as_array).into_iter().flatten();
        items.filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let globals = text("globalNamespaces").map(|names| {
        names.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
    });
    MultusConfig {
        namespace_isolation: Some(flag("namespaceIsolation")),
        global_namespaces: globals.unwrap_or(default.global_namespaces),
        bin_dir: directory("binDir"),
        cni_dir: directory("cniDir").unwrap_or(default.cni_dir),
        conf_dir: directory("confDir").unwrap_or(default.conf_dir),
        default_networks: list("defaultNetworks"),
        multus_namespace: text("multusNamespace").map_or(default.multus_namespace, str::to_owned),
    }
}

/// The path on the host of a path in a multus pod.
fn host_path(path: &str) -> PathBuf {
    let path = Path::new(path);
    let stripped = HOST_PREFIXES.iter().find_map(|prefix| path.strip_prefix(prefix).ok());
    stripped.map_or_else(|| path.to_owned(), |rest| Path::new("/").join(rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::cri::tests::HostRoot;

    fn reader(root: &HostRoot) -> MultusConfigReader {
        let host = HostMounts::open(Path::new("/proc/self/ns/mnt")).unwrap();
        MultusConfigReader::at(host, root.0.clone())
    }

    fn write(root: &HostRoot, path: &str, content: impl AsRef<[u8]>) {
        let path = under(&root.0, Path::new(path));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// The configuration after a check of the files.
    async fn read(reader: &MultusConfigReader) -> Result<Arc<MultusConfig>, MultusConfigError> {
        reader.cache().checked = None;
        reader.read().await
    }

    #[tokio::test]
    async fn a_node_without_multus_has_the_defaults() {
        let root = HostRoot::new("multus-none");
        assert_eq!(*reader(&root).read().await.unwrap(), MultusConfig::default());
        write(&root, "/etc/cni/net.d/10-flannel.conflist", r#"{"plugins":[{"type":"flannel"}]}"#);
        write(&root, "/etc/cni/net.d/20-broken.conf", "{");
        fs::create_dir_all(root.0.join("etc/cni/net.d/30-dir.conf")).unwrap();
        assert_eq!(*reader(&root).read().await.unwrap(), MultusConfig::default());
    }

    #[tokio::test]
    async fn the_first_file_of_multus_counts_and_its_daemon_overrides_it() {
        let root = HostRoot::new("multus-daemon");
        let file = json!({
            "type": "multus-shim", "namespaceIsolation": true, "globalNamespaces": "a, b", "confDir": "/host/conf",
            "binDir": "/hostroot/usr/bin", "cniDir": "/data", "defaultNetworks": ["x", 7], "multusNamespace": "m",
        });
        write(&root, "/etc/cni/net.d/00-multus.conf", file.to_string());
        write(&root, "/etc/cni/net.d/01-multus.conf", r#"{"type":"multus","namespaceIsolation":false}"#);
        let reader = reader(&root);
        let expected = MultusConfig {
            namespace_isolation: Some(true),
            global_namespaces: vec!["a".to_owned(), "b".to_owned()],
            bin_dir: Some(PathBuf::from("/usr/bin")),
            cni_dir: PathBuf::from("/data"),
            conf_dir: PathBuf::from("/conf"),
            default_networks: vec!["x".to_owned()],
            multus_namespace: "m".to_owned(),
        };
        assert_eq!(*reader.read().await.unwrap(), expected);
        let daemon = r#"{"namespaceIsolation":false,"binDir":"/opt/x"}"#;
        write(&root, "/etc/cni/net.d/multus.d/daemon-config.json", daemon);
        let overridden = MultusConfig {
            namespace_isolation: Some(false),
            bin_dir: Some(PathBuf::from("/opt/x")),
            ..expected
        };
        assert_eq!(*read(&reader).await.unwrap(), overridden);
    }

    #[tokio::test]
    async fn multus_is_found_in_a_list_of_plugins_and_in_other_directories() {
        let root = HostRoot::new("multus-list");
        let list = r#"{"plugins":[{"type":"a"},{"type":"multus","namespaceIsolation":"true"}]}"#;
        write(&root, "/etc/kubernetes/cni/net.d/00-multus.conflist", list);
        assert_eq!(reader(&root).read().await.unwrap().namespace_isolation, Some(true));
    }

    #[tokio::test]
    async fn a_change_is_noticed_and_a_half_written_file_changes_nothing() {
        let root = HostRoot::new("multus-change");
        let path = "/etc/cni/net.d/00-multus.conf";
        write(&root, path, r#"{"type":"multus","names"#);
        let reader = reader(&root);
        let error = reader.read().await.unwrap_err();
        assert!(matches!(error, MultusConfigError::Json { .. }), "isolation is unknown: {error}");
        write(&root, path, r#"{"type":"multus","namespaceIsolation":true}"#);
        assert_eq!(read(&reader).await.unwrap().namespace_isolation, Some(true));
        write(&root, path, r#"{"type":"multus","namespaceIs"#);
        assert_eq!(read(&reader).await.unwrap().namespace_isolation, Some(true), "the last one stays");
        write(&root, path, r#"{"type":"multus"}"#);
        assert_eq!(read(&reader).await.unwrap().namespace_isolation, Some(false));
        fs::remove_file(under(&root.0, Path::new(path))).unwrap();
        assert_eq!(*read(&reader).await.unwrap(), MultusConfig::default());
    }

    #[tokio::test]
    async fn isolation_stays_while_multus_restarts_and_ends_when_it_is_removed() {
        let root = HostRoot::new("multus-restart");
        let state = HostRoot::new("multus-restart-state");
        let host = HostMounts::open(Path::new("/proc/self/ns/mnt")).unwrap();
        let memory = Some(state.0.join(LAST_CONFIG_FILE));
        let start = || MultusConfigReader::with(host.clone(), root.0.clone(), memory.clone());
        let isolation = async |reader: &MultusConfigReader| read(reader).await.unwrap().namespace_isolation;
        let path = "/etc/cni/net.d/00-multus.conf";
        write(&root, "/opt/cni/bin/multus-shim", "");
        let reader = start();
        assert_eq!(isolation(&reader).await, None, "multus has not written its file yet");
        write(&root, path, r#"{"type":"multus-shim","namespaceIsolation":true}"#);
        assert_eq!(isolation(&reader).await, Some(true));
        fs::remove_file(under(&root.0, Path::new(path))).unwrap();
        assert_eq!(isolation(&reader).await, Some(true), "multus restarts");
        let reader = start();
        assert_eq!(isolation(&reader).await, Some(true), "the daemon restarts, too");
        write(&root, path, r#"{"type":"multus-shim"}"#);
        assert_eq!(isolation(&reader).await, Some(false));
        write(&root, path, r#"{"type":"multus-shim","namespaceIsolation":true}"#);
        assert_eq!(isolation(&reader).await, Some(true));
        fs::remove_file(under(&root.0, Path::new(path))).unwrap();
        fs::remove_file(root.0.join("opt/cni/bin/multus-shim")).unwrap();
        assert_eq!(isolation(&reader).await, Some(false), "multus is removed");
        assert!(!state.0.join(LAST_CONFIG_FILE).exists());
        assert_eq!(isolation(&start()).await, Some(false));
    }

    #[tokio::test]
    async fn unchanged_files_are_not_read_again() {
        let root = HostRoot::new("multus-same");
        write(&root, "/etc/cni/net.d/00-multus.conf", r#"{"type":"multus"}"#);
        let known: Vec<FileVersion> =
            read_files(&root.0, &[]).unwrap().unwrap().into_iter().map(|(version, _)| version).collect();
        assert_eq!(known.len(), 1);
        assert_eq!(read_files(&root.0, &known).unwrap(), None);
    }

    proptest! {
        #[test]
        fn no_file_makes_the_parser_panic(text in prop::collection::vec(any::<u8>(), 0..60), value in ".{0,8}") {
            let version = FileVersion { path: "multus.conf".into(), inode: 0, size: 0, modified: (0, 0) };
            _ = parse_files(&[(version.clone(), text)]);
            let object = json!({
                "type": "multus", "globalNamespaces": value, "binDir": value, "namespaceIsolation": value,
                "defaultNetworks": value, "confDir": [value],
            });
            let parsed = parse_files(&[(version, object.to_string().into_bytes())]).unwrap().unwrap();
            prop_assert!(parsed.bin_dir.is_none_or(|dir| dir.is_absolute()));
        }
    }
}
