//! What is known of multus on a node, and whether a pod may use networks of other namespaces.

use std::path::{Path, PathBuf};

use api::selection::NadRef;
use serde::{Deserialize, Serialize};

/// The namespace in which multus looks for default networks, and whose pods get none, unless it is configured.
const SYSTEM_NAMESPACE: &str = "kube-system";

/// What multus on this node is configured to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MultusConfig {
    /// Whether pods may only use networks of their own namespace and of `global_namespaces`. None if that is not known.
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
    /// The namespaces whose pods do not get `default_networks`.
    #[serde(default = "default_system_namespaces")]
    pub system_namespaces: Vec<String>,
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
            multus_namespace: SYSTEM_NAMESPACE.to_owned(),
            system_namespaces: default_system_namespaces(),
        }
    }
}

fn default_system_namespaces() -> Vec<String> {
    vec![SYSTEM_NAMESPACE.to_owned()]
}

impl MultusConfig {
    /// Whether multus attached the delegate at `index` of the list of a pod without a request of the pod. The first delegate is
    /// the cluster's default network. After it come the default networks, in the order of the configuration.
    pub fn attaches_by_default(&self, index: usize, nad: &NadRef, pod_namespace: &str) -> bool {
        let Some(index) = index.checked_sub(1) else { return true };
        let is_system = self.system_namespaces.iter().any(|namespace| namespace == pod_namespace);
        let default = self.default_networks.get(index).filter(|_| !is_system);
        default.is_some_and(|default| *default == nad.name && nad.namespace == self.multus_namespace)
    }
}

/// What the files, the sockets and the pods of a node show of multus.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MultusFacts {
    /// The configuration that multus uses, if all of it was read.
    pub config: Option<MultusConfig>,
    /// Why a configuration that exists cannot be read.
    pub unreadable: Option<String>,
    /// Whether multus has a configuration or a binary in the directories of the container runtime.
    pub installed: bool,
    /// A pod of the node that installs or runs multus, as `namespace/name`.
    pub pod: Option<String>,
    /// What was not checked yet.
    pub unchecked: Option<&'static str>,
}

/// What counts as the configuration of multus.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MultusState {
    /// On a node without multus, the default. Isolation is None while it is not known whether multus isolates namespaces.
    pub config: MultusConfig,
    /// Why the configuration cannot be read, or isolation is not known, and what to do.
    pub problem: Option<String>,
    /// The configuration exists and cannot be read.
    pub unreadable: bool,
}

impl MultusState {
    /// Whether it is known what multus does. Otherwise its default networks may be others.
    pub fn is_known(&self) -> bool {
        self.config.namespace_isolation.is_some()
    }
}

/// What counts as the configuration of multus, and what to remember for later: the last configuration that was read, while
/// multus is on the node.
///
/// Multus deletes its file when it stops, so the last configuration counts until the file is there again. A configuration
/// that cannot be read may have switched isolation on: then the last one counts only if it isolates.
pub fn decide_multus(facts: MultusFacts, last: Option<&MultusConfig>) -> (MultusState, Option<MultusConfig>) {
    let MultusFacts { config, unreadable, installed, pod, unchecked } = facts;
    if let Some(config) = config {
        return (MultusState { config: config.clone(), ..MultusState::default() }, Some(config));
    }
    let reason = if let Some(error) = &unreadable {
        format!("the configuration of multus on this node cannot be read: {error}; correct it")
    } else if let Some(pod) = pod {
        format!(
            "pod {pod} installs or runs multus on this node, whose configuration is not there yet; wait until it runs"
        )
    } else if installed {
        "multus is installed on this node, but has no configuration or its daemon does not run; start multus, or remove \
         its binaries and configurations"
            .to_owned()
    } else if let Some(unchecked) = unchecked {
        format!("it is not known yet whether the node has multus: {unchecked}")
    } else {
        return (MultusState::default(), None);
    };
    let unreadable = unreadable.is_some();
    let usable = last.filter(|last| !unreadable || last.namespace_isolation == Some(true));
    let (config, problem) = match usable {
        Some(last) => (last.clone(), unreadable.then_some(reason)),
        None => {
            (MultusConfig { namespace_isolation: None, ..last.cloned().unwrap_or_default() }, Some(reason))
        }
    };
    let state = MultusState { config, problem, unreadable };
    (state, last.cloned())
}

/// Whether a pod with volumes of these paths of the host can install CNI configurations in one of these directories. A pod
/// that mounts the root of the host is no sign of it: debug pods do that.
pub fn mounts_cni_config<'a>(
    mut host_paths: impl Iterator<Item = &'a Path>,
    config_dirs: &[PathBuf],
) -> bool {
    host_paths.any(|path| {
        path.parent().is_some()
            && config_dirs.iter().any(|dir| dir.starts_with(path) || path.starts_with(dir))
    })
}

/// What the flags say about namespace isolation. What is None is as multus is configured on the node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IsolationSettings {
    pub enabled: Option<bool>,
    pub global_namespaces: Option<Vec<String>>,
}

/// Whether a pod may use networks of another namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NamespaceAccess {
    Allowed,
    Forbidden {
        /// Which setting forbids it and what to do.
        message: String,
    },
    /// Not known yet.
    Unknown {
        /// Why, and what to do.
        message: String,
    },
}

impl IsolationSettings {
    /// What to report about the node. With the flag, the configuration still names directories and default networks.
    pub fn problem(&self, multus: &MultusState) -> Option<String> {
        let problem = multus.problem.as_ref()?;
        match self.enabled {
            Some(_) => multus.unreadable.then(|| problem.clone()),
            None => Some(format!(
                "{problem}, or set --namespace-isolation; until then, running pods of this node get no networks of other \
                 namespaces"
            )),
        }
    }

    /// Whether pods of a namespace may use a NAD.
    pub fn access(&self, multus: &MultusState, nad: &NadRef, pod_namespace: &str) -> NamespaceAccess {
        let globals = self.global_namespaces.as_ref();
        if nad.namespace == pod_namespace || globals.is_some_and(|globals| globals.contains(&nad.namespace)) {
            return NamespaceAccess::Allowed;
        }
        let globals = globals.unwrap_or(&multus.config.global_namespaces);
        match self.enabled.or(multus.config.namespace_isolation) {
            None => {
                let problem = multus.problem.as_deref().unwrap_or("it was not read yet");
                let message = format!(
                    "it is not known whether pods of namespace {pod_namespace} may use networks of namespace {}: {problem}, \
                     or set --namespace-isolation",
                    nad.namespace
                );
                NamespaceAccess::Unknown { message }
            }
            Some(true) if !globals.contains(&nad.namespace) => {
                let source = match self.enabled {
                    Some(_) => "--namespace-isolation",
                    None => "namespaceIsolation in the configuration of multus on this node",
                };
                let message = format!(
                    "{source} forbids pods of namespace {pod_namespace} to use networks of namespace {}; use a network of \
                     namespace {pod_namespace}, or add {} to the global namespaces",
                    nad.namespace, nad.namespace
                );
                NamespaceAccess::Forbidden { message }
            }
            Some(_) => NamespaceAccess::Allowed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(isolation: bool) -> MultusConfig {
        MultusConfig {
            namespace_isolation: Some(isolation),
            default_networks: vec!["x".to_owned()],
            ..MultusConfig::default()
        }
    }

    /// Isolation, whether there is a problem, and what is remembered.
    fn decided(facts: MultusFacts, last: Option<bool>) -> (Option<bool>, bool, Option<bool>) {
        let last = last.map(config);
        let (state, remembered) = decide_multus(facts, last.as_ref());
        let remembered = remembered.map(|config| config.namespace_isolation.unwrap());
        (state.config.namespace_isolation, state.problem.is_some(), remembered)
    }

    #[test]
    fn isolation_is_closed_until_it_is_known_that_multus_is_not_there() {
        let absent = MultusFacts::default;
        let unchecked = || MultusFacts { unchecked: Some("not listed"), ..absent() };
        let pod = || MultusFacts { pod: Some("kube-system/multus".to_owned()), ..absent() };
        let installed = || MultusFacts { installed: true, ..absent() };
        let unreadable = || MultusFacts { unreadable: Some("no".to_owned()), ..installed() };
        let read = |isolation| MultusFacts { config: Some(config(isolation)), ..unreadable() };
        for (facts, last, expected) in [
            (absent(), None, (Some(false), false, None)),
            (absent(), Some(true), (Some(false), false, None)),
            (unchecked(), None, (None, true, None)),
            (pod(), None, (None, true, None)),
            (installed(), None, (None, true, None)),
            (unreadable(), None, (None, true, None)),
            // Multus restarts.
            (unchecked(), Some(true), (Some(true), false, Some(true))),
            (pod(), Some(false), (Some(false), false, Some(false))),
            (installed(), Some(true), (Some(true), false, Some(true))),
            // What cannot be read may have switched isolation on.
            (unreadable(), Some(true), (Some(true), true, Some(true))),
            (unreadable(), Some(false), (None, true, Some(false))),
            (read(true), None, (Some(true), false, Some(true))),
            (read(false), Some(true), (Some(false), false, Some(false))),
        ] {
            assert_eq!(decided(facts.clone(), last), expected, "{facts:?}, last {last:?}");
        }
    }

    #[test]
    fn while_isolation_is_not_known_the_last_default_networks_count() {
        let facts = MultusFacts { unreadable: Some("no".to_owned()), ..MultusFacts::default() };
        let (state, _) = decide_multus(facts, Some(&config(false)));
        assert_eq!(state.config, MultusConfig { namespace_isolation: None, ..config(false) });
    }

    #[test]
    fn only_a_pod_that_mounts_the_configurations_of_cni_can_install_multus() {
        let dirs = ["/etc/cni/net.d", "/var/lib/rancher/k3s/agent/etc/cni/net.d"].map(PathBuf::from);
        for (path, expected) in [
            ("/etc/cni/net.d", true),
            ("/etc/cni", true),
            ("/etc/cni/net.d/multus.d", true),
            ("/var/lib/rancher/k3s/agent/etc/cni/net.d/", true),
            ("/", false),
            ("/opt/cni/bin", false),
            ("/etc/cni/net.data", false),
        ] {
            assert_eq!(mounts_cni_config([Path::new(path)].into_iter(), &dirs), expected, "{path}");
        }
    }

    #[test]
    fn a_namespace_is_open_only_if_a_flag_or_multus_says_so() {
        let nad = NadRef::new("net", "blue");
        let flag = |enabled| IsolationSettings { enabled, ..IsolationSettings::default() };
        let state = |isolation| MultusState {
            config: MultusConfig { namespace_isolation: isolation, ..MultusConfig::default() },
            problem: isolation.is_none().then(|| "wait".to_owned()),
            unreadable: false,
        };
        for (enabled, isolation, expected) in [
            (None, None, "unknown"),
            (None, Some(true), "forbidden"),
            (None, Some(false), "allowed"),
            (Some(false), None, "allowed"),
            (Some(true), None, "forbidden"),
            (Some(false), Some(true), "allowed"),
        ] {
            let access = match flag(enabled).access(&state(isolation), &nad, "shop") {
                NamespaceAccess::Allowed => "allowed",
                NamespaceAccess::Forbidden { .. } => "forbidden",
                NamespaceAccess::Unknown { message } => {
                    assert!(message.contains("wait, or set --namespace-isolation"), "{message}");
                    "unknown"
                }
            };
            assert_eq!(access, expected, "{enabled:?} {isolation:?}");
        }
        let own = flag(None).access(&state(None), &NadRef::new("shop", "blue"), "shop");
        assert_eq!(own, NamespaceAccess::Allowed);
        let global = flag(None).access(&state(Some(true)), &NadRef::new("default", "blue"), "shop");
        assert_eq!(global, NamespaceAccess::Allowed);
        // The flag needs no configuration.
        let named = IsolationSettings { enabled: None, global_namespaces: Some(vec!["net".to_owned()]) };
        for isolation in [None, Some(true)] {
            assert_eq!(named.access(&state(isolation), &nad, "shop"), NamespaceAccess::Allowed);
        }
        let other = named.access(&state(None), &NadRef::new("default", "blue"), "shop");
        assert!(matches!(other, NamespaceAccess::Unknown { .. }), "{other:?}");
    }

    #[test]
    fn with_the_flag_only_a_configuration_that_cannot_be_read_is_reported() {
        for (enabled, facts, expected) in [
            (None, MultusFacts { installed: true, ..MultusFacts::default() }, Some("--namespace-isolation")),
            (Some(true), MultusFacts { installed: true, ..MultusFacts::default() }, None),
            (Some(false), MultusFacts { unchecked: Some("not listed"), ..MultusFacts::default() }, None),
            (
                Some(false),
                MultusFacts { unreadable: Some("/a: no".to_owned()), ..MultusFacts::default() },
                Some("cannot be read: /a: no; correct it"),
            ),
            (None, MultusFacts::default(), None),
        ] {
            let (state, _) = decide_multus(facts.clone(), None);
            let problem = IsolationSettings { enabled, global_namespaces: None }.problem(&state);
            match (&problem, expected) {
                (Some(problem), Some(expected)) => assert!(problem.contains(expected), "{problem}"),
                _ => assert_eq!(problem.as_deref(), expected, "{enabled:?} {facts:?}"),
            }
            let advises = problem.is_some_and(|problem| problem.contains("--namespace-isolation"));
            assert!(!advises || enabled.is_none(), "{facts:?}");
        }
    }

    #[test]
    fn default_networks_are_those_of_the_configured_namespaces() {
        let config = MultusConfig {
            default_networks: vec!["x".to_owned()],
            multus_namespace: "net".to_owned(),
            system_namespaces: vec!["infra".to_owned()],
            ..MultusConfig::default()
        };
        let is_default = |index, nad: (&str, &str), pod| {
            config.attaches_by_default(index, &NadRef::new(nad.0, nad.1), pod)
        };
        assert!(is_default(0, ("shop", "y"), "shop"), "the cluster's network");
        assert!(is_default(1, ("net", "x"), "shop"));
        assert!(is_default(1, ("net", "x"), "kube-system"), "not a system namespace here");
        assert!(!is_default(1, ("net", "x"), "infra"), "its pods get no default networks");
        assert!(!is_default(1, ("kube-system", "x"), "shop"));
        assert!(!is_default(2, ("net", "x"), "shop"));
    }

    #[test]
    fn a_configuration_that_an_earlier_version_saved_is_read() {
        let saved = serde_json::json!({
            "namespaceIsolation": true, "globalNamespaces": [], "binDir": null, "cniDir": "/a", "confDir": "/b",
            "defaultNetworks": [], "multusNamespace": "m",
        });
        let config: MultusConfig = serde_json::from_value(saved).unwrap();
        assert_eq!(config.system_namespaces, ["kube-system"]);
    }
}
