//! The files of multus on the host.

use std::{
    fs::{self, File},
    io::{self, ErrorKind, Read as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use api::ErrorChain;
use nix::fcntl::OFlag;
use plan::hotplug::MultusConfig;
use serde_json::{Map, Value};
use wire::cri::CniDirs;

use super::daemon::{self, DaemonFile};
use crate::hotplug::config::DEFAULT_PLUGIN_DIR;

/// Directories of CNI configurations: of most nodes, of OpenShift, of K3s and RKE2, and of MicroK8s.
pub const CONFIG_DIRS: [&str; 5] = [
    "/etc/cni/net.d",
    "/etc/kubernetes/cni/net.d",
    "/var/lib/rancher/k3s/agent/etc/cni/net.d",
    "/var/lib/rancher/rke2/agent/etc/cni/net.d",
    "/var/snap/microk8s/current/args/cni-network",
];
/// The type of the thin plugin.
const THIN: &str = "multus";
/// The type of the thick plugin, which calls the daemon.
const THICK: &str = "multus-shim";
/// Larger files are not read.
const MAX_FILE: u64 = 1024 * 1024;
/// Further files of a directory are not read.
const MAX_FILES: usize = 64;
/// Where a multus pod mounts the root of the host.
const HOST_PREFIXES: [&str; 2] = ["/hostroot", "/host"];

type Object = Map<String, Value>;

/// What the files and the socket of multus show.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct FileFacts {
    /// The configuration that multus uses, if all of it was read.
    pub config: Option<MultusConfig>,
    /// Why a configuration that exists cannot be read.
    pub unreadable: Option<String>,
    /// Whether multus has a configuration or a binary.
    pub installed: bool,
}

/// The directories of CNI configurations: that of the container runtime first.
pub fn config_dirs(dirs: &CniDirs) -> Vec<PathBuf> {
    dirs.config.iter().cloned().chain(CONFIG_DIRS.map(PathBuf::from)).collect()
}

/// Reads the files of a node with this root. `dirs` are the directories of the container runtime.
///
/// As in the container runtime, the first configuration of a directory that can be used counts. The configuration of the thick
/// plugin is that of its running daemon, too. If the runtime names its directory, a file in another one is not used: it is
/// left over, and only shows that multus may be installed.
pub fn read_node(root: &Path, dirs: &CniDirs, last: Option<&MultusConfig>) -> FileFacts {
    let unreadable = |error| FileFacts { unreadable: Some(error), installed: true, config: None };
    let mut left_over = false;
    for dir in config_dirs(dirs) {
        let is_used = dirs.config.as_ref().is_none_or(|used| *used == dir);
        match read_dir(root, &dir) {
            Ok(None) => {}
            Ok(Some(_)) | Err(_) if !is_used => left_over = true,
            Ok(Some(plugin)) => {
                return match complete(root, plugin) {
                    Ok(config) => FileFacts { config, unreadable: None, installed: true },
                    Err(error) => unreadable(error),
                };
            }
            Err(error) => return unreadable(error),
        }
    }
    FileFacts { installed: left_over || has_binaries(root, dirs, last), ..FileFacts::default() }
}

/// The configuration of multus in a directory. Fails if there is none, and a file that may be one cannot be used.
fn read_dir(root: &Path, dir: &Path) -> Result<Option<Object>, String> {
    let path = under(root, dir);
    let paths = match candidates(&path) {
        Ok(paths) => paths,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(error) => return Err(format!("{}: {error}", dir.display())),
    };
    let mut unusable = None;
    for path in paths {
        let cause = match read_regular(&path) {
            Ok(text) => match serde_json::from_slice::<Object>(&text) {
                Ok(object) => match multus_object(object) {
                    Some(plugin) => return Ok(Some(plugin)),
                    // The file of another plugin.
                    None => continue,
                },
                Err(error) => ErrorChain(&error).to_string(),
            },
            // It was deleted meanwhile, or it is a directory.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::IsADirectory) => continue,
            Err(error) => error.to_string(),
        };
        if names_multus(&path) {
            let name = path.file_name().unwrap_or_default();
            unusable.get_or_insert_with(|| format!("{}: {cause}", dir.join(name).display()));
        }
    }
    unusable.map_or(Ok(None), Err)
}

/// The configuration that multus uses with this configuration of its plugin. None if its daemon does not run.
fn complete(root: &Path, mut plugin: Object) -> Result<Option<MultusConfig>, String> {
    if plugin.get("type").and_then(Value::as_str) == Some(THICK) {
        let socket_dir = plugin.get("daemonSocketDir").and_then(Value::as_str).map(host_path);
        let daemon = daemon::read(root, socket_dir.as_deref().filter(|dir| dir.is_absolute()));
        let daemon = daemon.map_err(|error| format!("the daemon of multus: {error}"))?;
        let Some(DaemonFile { path, text }) = daemon else { return Ok(None) };
        let failed = |cause: &dyn std::error::Error| {
            format!("{} in the container of multus' daemon: {cause}", path.display())
        };
        let text = text.map_err(|error| failed(&error))?;
        // The daemon overwrites the keys of its plugin by its own.
        plugin.extend(serde_json::from_slice::<Object>(&text).map_err(|error| failed(&error))?);
    }
    Ok(Some(parse_object(&plugin)))
}

/// Whether a directory of CNI plugins has multus. If that cannot be checked, it may have it.
fn has_binaries(root: &Path, dirs: &CniDirs, last: Option<&MultusConfig>) -> bool {
    let configured = last.and_then(|last| last.bin_dir.as_deref());
    let dirs = dirs.plugins.iter().map(PathBuf::as_path).chain(configured);
    let mut paths =
        dirs.chain([Path::new(DEFAULT_PLUGIN_DIR)]).flat_map(|dir| [THIN, THICK].map(|name| dir.join(name)));
    paths.any(|path| under(root, &path).try_exists().unwrap_or(true))
}

/// The configurations of a directory, sorted as the container runtime sorts them.
fn candidates(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths: Vec<PathBuf> = fs::read_dir(dir)?
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

/// Reads a regular file of a bounded size.
pub fn read_regular(path: &Path) -> io::Result<Vec<u8>> {
    // A pipe in the place of the file must not block.
    let file = File::options().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(ErrorKind::IsADirectory.into());
    }
    if !metadata.is_file() || metadata.len() > MAX_FILE {
        return Err(io::Error::new(ErrorKind::InvalidData, "it is no regular file of at most 1 MiB"));
    }
    let mut text = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut text)?;
    Ok(text)
}

/// The directory or file of the host below its root.
pub fn under(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

fn names_multus(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.contains("multus"))
}

/// The configuration of multus in a CNI configuration, which may be a list of plugins.
fn multus_object(object: Object) -> Option<Object> {
    let is_multus = |object: &Object| {
        object.get("type").and_then(Value::as_str).is_some_and(|kind| [THIN, THICK].contains(&kind))
    };
    if is_multus(&object) {
        return Some(object);
    }
    let plugins = object.get("plugins")?.as_array()?;
    plugins.iter().filter_map(Value::as_object).find(|plugin| is_multus(plugin)).cloned()
}

fn parse_object(object: &Object) -> MultusConfig {
    let default = MultusConfig::default();
    let text = |key: &str| object.get(key).and_then(Value::as_str).filter(|text| !text.is_empty());
    let directory = |key: &str| text(key).map(host_path).filter(|path| path.is_absolute());
    let flag = |key: &str| match object.get(key) {
        Some(Value::Bool(flag)) => *flag,
        Some(Value::String(text)) => text.eq_ignore_ascii_case("true"),
        _ => false,
    };
    let list = |key: &str| {
        let items = object.get(key).and_then(Value::as_array)?;
        Some(items.iter().filter_map(Value::as_str).map(str::to_owned).collect())
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
        default_networks: list("defaultNetworks").unwrap_or_default(),
        multus_namespace: text("multusNamespace").map_or(default.multus_namespace, str::to_owned),
        system_namespaces: list("systemNamespaces").unwrap_or(default.system_namespaces),
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

    proptest! {
        #[test]
        fn no_content_makes_the_parser_panic(text in prop::collection::vec(any::<u8>(), 0..60), value in ".{0,8}") {
            _ = serde_json::from_slice::<Object>(&text).ok().and_then(multus_object);
            let object = json!({
                "type": "multus", "globalNamespaces": value, "binDir": value, "namespaceIsolation": value,
                "defaultNetworks": value, "confDir": [value], "systemNamespaces": [7, value],
            });
            let plugin = multus_object(object.as_object().unwrap().clone()).unwrap();
            let parsed = parse_object(&plugin);
            prop_assert!(parsed.bin_dir.is_none_or(|dir| dir.is_absolute()));
            prop_assert_eq!(parsed.system_namespaces, [value]);
        }
    }
}
