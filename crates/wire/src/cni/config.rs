//! The input of a plugin: the configuration on standard input, and `CNI_ARGS`.

use serde::Deserialize;
use serde_json::{Map, Value, error::Category};

use super::{Code, Error, Version, truncate};

/// The smallest MTU that the kernel accepts for a veth pair.
const MIN_MTU: u32 = 68;
const MAX_MTU: u32 = 65_535;

/// The configuration of a Patchbay plugin. Strings in it are not validated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    pub version: Version,
    /// The name of the configuration; that of the NetworkAttachmentDefinition if Patchbay generated it.
    pub name: String,
    /// The BridgeNetwork.
    pub network: Option<String>,
    pub mtu: Option<u32>,
    /// The requested MAC address: `runtimeConfig.mac`, else `args.cni.mac`.
    pub mac: Option<String>,
    /// The requested IP addresses: `runtimeConfig.ips`, else `args.cni.ips`.
    pub ips: Vec<String>,
    /// The IPAM section, if it is not empty.
    pub ipam: Option<Ipam>,
    /// Whether the key `allowPersistentIPs` is true. A plugin of a list does not get the keys of the list.
    pub allow_persistent_ips: bool,
    /// The result of ADD.
    pub prev_result: Option<Value>,
    /// The attachments that GC keeps.
    pub valid_attachments: Option<Vec<Attachment>>,
}

/// The IPAM section of a configuration.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Ipam {
    /// The name of the IPAM plugin.
    #[serde(rename = "type", default)]
    pub plugin: String,
    /// The BridgeNetwork to allocate from.
    pub network: Option<String>,
}

/// An interface of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Attachment {
    #[serde(rename = "containerID")]
    pub container_id: String,
    pub ifname: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawConfig {
    cni_version: Option<String>,
    name: Option<String>,
    network: Option<String>,
    mtu: Option<u32>,
    runtime_config: Option<RuntimeRequest>,
    args: Option<RawArgs>,
    ipam: Option<Map<String, Value>>,
    /// Of any type: it is a key of others, too.
    #[serde(rename = "allowPersistentIPs")]
    allow_persistent_ips: Option<Value>,
    prev_result: Option<Value>,
    #[serde(rename = "cni.dev/valid-attachments")]
    valid_attachments: Option<Vec<Attachment>>,
}

#[derive(Deserialize)]
struct RawArgs {
    cni: Option<RuntimeRequest>,
}

/// Addresses that the pod requests.
#[derive(Default, Deserialize)]
struct RuntimeRequest {
    mac: Option<String>,
    ips: Option<Vec<String>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct OnlyVersion {
    cni_version: Option<String>,
}

impl Config {
    /// Parses a configuration. Unknown fields are ignored, as the CNI specification requires.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let raw: RawConfig = serde_json::from_slice(bytes).map_err(|error| decode_error(&error))?;
        let version = raw.cni_version.unwrap_or_default().parse()?;
        let ipam = raw.ipam.filter(|ipam| !ipam.is_empty()).map(Value::Object);
        let ipam =
            ipam.map(serde_json::from_value::<Ipam>).transpose().map_err(|error| decode_error(&error))?;
        let mtu = raw.mtu.filter(|&mtu| mtu != 0);
        if let Some(mtu) = mtu.filter(|mtu| !(MIN_MTU..=MAX_MTU).contains(mtu)) {
            let msg = format!("mtu {mtu} is not between {MIN_MTU} and {MAX_MTU}");
            return Err(Error::new(Code::InvalidConfig, msg));
        }
        let runtime = raw.runtime_config.unwrap_or_default();
        let cni_args = raw.args.and_then(|args| args.cni).unwrap_or_default();
        let filled = |mac: Option<String>| mac.filter(|mac| !mac.is_empty());
        let some = |ips: Option<Vec<String>>| ips.filter(|ips| !ips.is_empty());
        Ok(Self {
            version,
            name: raw.name.unwrap_or_default(),
            network: raw.network.filter(|network| !network.is_empty()),
            mtu,
            mac: filled(runtime.mac).or_else(|| filled(cni_args.mac)),
            ips: some(runtime.ips).or_else(|| some(cni_args.ips)).unwrap_or_default(),
            ipam: ipam.map(|ipam| Ipam { network: ipam.network.filter(|name| !name.is_empty()), ..ipam }),
            allow_persistent_ips: raw.allow_persistent_ips == Some(Value::Bool(true)),
            prev_result: raw.prev_result,
            valid_attachments: raw.valid_attachments,
        })
    }
}

impl Version {
    /// The version of a configuration that may be otherwise invalid, for the error result about it.
    pub fn of(bytes: &[u8]) -> Self {
        let version = serde_json::from_slice::<OnlyVersion>(bytes).ok().and_then(|only| only.cni_version);
        version.and_then(|version| version.parse().ok()).unwrap_or(Self::NEWEST)
    }
}

fn decode_error(error: &serde_json::Error) -> Error {
    let (code, msg) = match error.classify() {
        Category::Data => (Code::InvalidConfig, "the configuration has an invalid value"),
        Category::Syntax | Category::Eof | Category::Io => {
            (Code::Decode, "the configuration is not valid JSON")
        }
    };
    Error::new(code, msg).details(truncate(&error.to_string()))
}

/// The content of `CNI_ARGS`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Args {
    pub mac: Option<String>,
    /// The requested IP addresses, written as `IP=a,b`.
    pub ips: Vec<String>,
    pub pod: Pod,
}

/// The pod of the sandbox, as far as the runtime passed it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pod {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

impl Args {
    /// Parses pairs such as `IgnoreUnknown=1;MAC=02:00:5e:10:00:01`.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let refused = |msg: String| Error::new(Code::InvalidEnvironment, msg);
        let (mut args, mut unknown, mut ignore) = (Self::default(), None, false);
        for pair in text.split(';').filter(|pair| !pair.is_empty()) {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(refused(format!("CNI_ARGS has {:?}, which is not key=value", truncate(pair))));
            };
            let value = value.to_owned();
            match key {
                "IgnoreUnknown" => ignore = parse_bool(&value)?,
                // Multus passes all requested addresses in one value if the plugin does not have the capability `ips`.
                "IP" => {
                    let ips = value.split(',').map(str::trim).filter(|ip| !ip.is_empty());
                    args.ips = ips.map(str::to_owned).collect();
                }
                "MAC" => args.mac = Some(value).filter(|mac| !mac.is_empty()),
                "K8S_POD_NAMESPACE" => args.pod.namespace = value,
                "K8S_POD_NAME" => args.pod.name = value,
                "K8S_POD_UID" => args.pod.uid = value,
                // Equals CNI_CONTAINERID.
                "K8S_POD_INFRA_CONTAINER_ID" => {}
                _ => unknown = unknown.or(Some(key)),
            }
        }
        match unknown {
            Some(key) if !ignore => {
                let key = truncate(key);
                Err(refused(format!("CNI_ARGS has the unknown key {key:?} and no IgnoreUnknown=1")))
            }
            _ => Ok(args),
        }
    }
}

fn parse_bool(text: &str) -> Result<bool, Error> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" => Ok(true),
        "0" | "false" | "" => Ok(false),
        _ => {
            let msg = format!("CNI_ARGS has IgnoreUnknown={:?}: use 1 or 0", truncate(text));
            Err(Error::new(Code::InvalidEnvironment, msg))
        }
    }
}
