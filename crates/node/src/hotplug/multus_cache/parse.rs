//! The formats of the files that multus and libcni write.

use api::{nad_config::NadConfig, selection::NadRef};
use k8s_openapi::ByteString;
use plan::hotplug::{MultusConfig, PodIdentity};
use serde::Deserialize;
use serde_json::{Map, Value, value::RawValue};
use wire::cni::{Success, Version};

/// The kind of libcni's files.
const RESULT_KIND: &str = "cniCacheV1";
/// A list has no more delegates than this.
const MAX_DELEGATES: usize = 1024;

/// One network of a sandbox that multus attached at its start.
#[derive(Debug, PartialEq, Eq)]
pub struct Delegate {
    /// The name of the CNI configuration.
    pub network: String,
    /// `namespace/name` of the NAD, or the name of the configuration if it is not of a NAD.
    pub name: String,
    /// The interface that was requested.
    requested: Option<String>,
}

#[derive(Deserialize)]
struct RawDelegate {
    #[serde(rename = "Conf", default)]
    conf: NamedConfig,
    #[serde(rename = "ConfList", default)]
    conf_list: NamedConfig,
    #[serde(rename = "Name", default)]
    name: String,
    #[serde(rename = "ifnameRequest", default)]
    interface: String,
    /// The configuration.
    #[serde(rename = "Bytes", default)]
    config: Option<ByteString>,
}

#[derive(Default, Deserialize)]
struct NamedConfig {
    #[serde(default)]
    name: String,
}

impl Delegate {
    /// The interface of the delegate at this position of the list.
    pub fn interface(&self, index: usize) -> String {
        match &self.requested {
            Some(interface) => interface.clone(),
            // The first delegate is the cluster's default network.
            None if index == 0 => super::DEFAULT_INTERFACE.to_owned(),
            None => format!("net{index}"),
        }
    }

    /// The NAD; None if it is not one that the pod requested: the cluster's default network, another network that multus
    /// attaches to every pod, or a configuration without a NAD.
    pub fn nad(&self, index: usize, config: &MultusConfig, pod_namespace: &str) -> Option<NadRef> {
        let (namespace, name) = self.name.split_once('/')?;
        let nad = NadRef::new(namespace, name);
        (!config.attaches_by_default(index, &nad, pod_namespace)).then_some(nad)
    }
}

/// The delegates of a sandbox; None if the list is not complete.
pub fn parse_delegates(text: &[u8]) -> Option<Vec<Delegate>> {
    let raw: Vec<RawDelegate> = serde_json::from_slice(text).ok()?;
    if raw.is_empty() || raw.len() > MAX_DELEGATES {
        return None;
    }
    let delegate = |RawDelegate { conf, conf_list, name, interface, config }| {
        let of_config = config.and_then(|config| network_name(&config.0));
        let named = [conf.name, conf_list.name].into_iter().find(|name| !name.is_empty());
        let network = of_config.or(named)?;
        Some(Delegate { network, name, requested: Some(interface).filter(|name| !name.is_empty()) })
    };
    raw.into_iter().map(delegate).collect()
}

/// The name of a CNI configuration.
pub fn network_name(config: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(config).ok()?;
    Some(NadConfig::parse(Some(text), "").ok()?.name)
}

/// Whether this is a container ID as CNI defines it. It is used in file names.
pub fn is_container_id(id: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
    id.len() <= 255 && id.bytes().all(inner) && id.starts_with(|first: char| first.is_ascii_alphanumeric())
}

/// The result of one ADD.
#[derive(Debug)]
pub struct CachedResult {
    pub container_id: String,
    pub if_name: String,
    pub network_name: String,
    pub netns: String,
    /// The configuration as it was used, with a name.
    pub config: String,
    pub cni_args: Vec<(String, String)>,
    pub capability_args: Map<String, Value>,
    /// The NAD, if Patchbay wrote the result.
    pub own_nad: Option<NadRef>,
    result: Option<Box<RawValue>>,
    version: Version,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawResult {
    kind: String,
    container_id: String,
    config: ByteString,
    if_name: String,
    network_name: String,
    #[serde(default)]
    netns: Option<String>,
    #[serde(default)]
    cni_args: Option<Vec<(String, String)>>,
    #[serde(default)]
    capability_args: Option<Map<String, Value>>,
    #[serde(default)]
    result: Option<Box<RawValue>>,
    #[serde(rename = "patchbay.dev/network", default)]
    own_nad: Option<String>,
}

/// The result in a file of libcni; None if it is of another kind, not complete, or its configuration cannot be used for a
/// DEL.
pub fn parse_result(text: &[u8]) -> Option<CachedResult> {
    let raw: RawResult = serde_json::from_slice(text).ok()?;
    if raw.kind != RESULT_KIND || !is_container_id(&raw.container_id) {
        return None;
    }
    let config = NadConfig::parse(std::str::from_utf8(&raw.config.0).ok(), &raw.network_name).ok()?;
    let own_nad = match raw.own_nad {
        Some(name) => Some(name.split_once('/').map(|(namespace, name)| NadRef::new(namespace, name))?),
        None => None,
    };
    let versions = config.cni_versions.iter().filter_map(|version| version.parse::<Version>().ok());
    Some(CachedResult {
        version: versions.max().unwrap_or(Version::V0_1_0),
        container_id: raw.container_id,
        if_name: raw.if_name,
        network_name: raw.network_name,
        netns: raw.netns.unwrap_or_default(),
        config: config.text().to_owned(),
        cni_args: raw.cni_args.unwrap_or_default(),
        capability_args: raw.capability_args.unwrap_or_default(),
        own_nad,
        result: raw.result,
    })
}

impl CachedResult {
    /// What the plugin returned; nothing if it is not a valid result.
    pub fn success(&self) -> Success {
        let parsed = self.result.as_ref().map(|result| Success::parse(result.get().as_bytes(), self.version));
        parsed.and_then(Result::ok).unwrap_or_default()
    }

    /// The result as JSON text.
    pub fn result_text(&self) -> String {
        self.result.as_ref().map(|result| result.get().to_owned()).unwrap_or_default()
    }

    pub fn requested_ips(&self) -> Vec<&str> {
        let ips = self.capability_args.get("ips").and_then(Value::as_array);
        ips.into_iter().flatten().filter_map(Value::as_str).collect()
    }

    pub fn requested_mac(&self) -> Option<&str> {
        self.capability_args.get("mac").and_then(Value::as_str)
    }

    /// The pod for which the plugin was called.
    pub fn pod(&self) -> PodIdentity {
        let argument = |key: &str| {
            let found = self.cni_args.iter().find(|(name, _)| name == key);
            found.map(|(_, value)| value.clone()).unwrap_or_default()
        };
        let uid = argument("K8S_POD_UID");
        PodIdentity {
            namespace: argument("K8S_POD_NAMESPACE"),
            name: argument("K8S_POD_NAME"),
            runtime_uid: uid.clone(),
            uid,
        }
    }
}
