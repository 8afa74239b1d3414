//! The arguments of an attachment, as Multus passes them when a pod starts.

use std::collections::BTreeMap;

use api::{
    IfName, RawJson, RawObject,
    nad_config::NadConfig,
    selection::{NadRef, NetworkSelectionElement},
};
use serde_json::{Map, Value};

use super::PodIdentity;

/// The directory in which plugins describe their devices.
const DEVICE_INFO_DIR: &str = "/var/run/k8s.cni.cncf.io/devinfo/cni";

/// The maximum length of an element as JSON. Everything in it is passed to plugins and recorded.
pub const MAX_ELEMENT: usize = 16 * 1024;
/// The maximum length of a configuration with the arguments of an element: each plugin of a list gets a copy of them.
const MAX_CONFIG: usize = 128 * 1024;

/// The capability arguments of an element. The executor passes each plugin those that it declares.
///
/// `CNIDeviceInfoFile` is among them if the element names a device. The executor reads that file after ADD and deletes it
/// after DEL.
pub fn capability_args(
    element: &NetworkSelectionElement,
    nad: &NadRef,
    container: &str,
    interface: &IfName,
) -> Map<String, Value> {
    let mut args = Map::new();
    let mut put = |key: &str, value: Value| _ = args.insert(key.to_owned(), value);
    if !element.port_mappings.is_empty() {
        put("portMappings", json(&element.port_mappings));
    }
    if let Some(bandwidth) = &element.bandwidth {
        put("bandwidth", json(bandwidth));
    }
    if !element.ips.is_empty() {
        put("ips", json(&element.ips));
    }
    if let Some(mac) = &element.mac {
        put("mac", json(mac));
    }
    if let Some(guid) = &element.infiniband_guid {
        put("infinibandGUID", json(guid));
    }
    if let Some(device) = &element.device_id {
        put("deviceID", json(device));
        let file = format!("{nad}-{container}_{interface}").replace('/', "-");
        put("CNIDeviceInfoFile", json(&format!("{DEVICE_INFO_DIR}/{file}")));
    }
    args
}

/// `CNI_ARGS`, in the order of Multus.
pub fn cni_args(
    pod: &PodIdentity,
    container: &str,
    element: &NetworkSelectionElement,
) -> Vec<(String, String)> {
    let fixed = [
        ("IgnoreUnknown", "true"),
        ("K8S_POD_NAMESPACE", &pod.namespace),
        ("K8S_POD_NAME", &pod.name),
        ("K8S_POD_INFRA_CONTAINER_ID", container),
        ("K8S_POD_UID", &pod.runtime_uid),
    ];
    let mac = element.mac.clone().map(|mac| ("MAC", mac));
    let ips = (!element.ips.is_empty()).then(|| ("IP", element.ips.join(",")));
    let fixed = fixed.into_iter().map(|(key, value)| (key, value.to_owned()));
    fixed.chain(mac).chain(ips).map(|(key, value)| (key.to_owned(), value)).collect()
}

/// The NAD's configuration with `cni-args` of the element in `args.cni` of each plugin.
pub fn config_with_args(
    config: &NadConfig,
    element: &NetworkSelectionElement,
) -> Result<NadConfig, ConfigError> {
    let Some(args) = &element.cni_args else { return Ok(config.clone()) };
    let mut text = RawObject::parse(config.text()).map_err(ConfigError::json)?;
    if config.is_list {
        let plugins = config.plugins.iter().map(|plugin| {
            let mut plugin = RawObject::parse(plugin.text()).map_err(ConfigError::json)?;
            set_args(&mut plugin, args)?;
            Ok(plugin.to_string())
        });
        let plugins = plugins.collect::<Result<Vec<String>, ConfigError>>()?;
        let list = RawJson::parse(&format!("[{}]", plugins.join(","))).map_err(ConfigError::json)?;
        text.set("plugins", &list);
    } else {
        set_args(&mut text, args)?;
    }
    if text.as_str().len() > MAX_CONFIG {
        return Err(ConfigError::TooLong(text.as_str().len()));
    }
    NadConfig::parse(Some(text.as_str()), &config.name).map_err(ConfigError::Config)
}

/// Why the arguments of an element do not fit into a configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("cni-args: the configuration of the NAD has a key {0} that is not an object; remove it")]
    NotAnObject(&'static str),
    #[error("cni-args: {0}")]
    Json(String),
    #[error(
        "the configuration has {0} bytes with cni-args; shorten them to at most {MAX_CONFIG} bytes in all"
    )]
    TooLong(usize),
    #[error(transparent)]
    Config(api::nad_config::Error),
}

impl ConfigError {
    fn json(error: serde_json::Error) -> Self {
        Self::Json(error.to_string())
    }
}

fn set_args(plugin: &mut RawObject, args: &RawObject) -> Result<(), ConfigError> {
    let mut all = object(plugin, "args", "args")?;
    let cni = object(&all, "cni", "args.cni")?;
    // Other than the keys of a configuration, those of arguments differ by case.
    let merged: BTreeMap<&str, &str> = cni.iter().chain(args.iter()).collect();
    let merged: Vec<String> =
        merged.into_iter().map(|(key, value)| format!("{}:{value}", Value::from(key))).collect();
    let merged = format!("{{{}}}", merged.join(","));
    all.set("cni", &RawJson::parse(&merged).map_err(ConfigError::json)?);
    plugin.set("args", &RawJson::parse(all.as_str()).map_err(ConfigError::json)?);
    Ok(())
}

fn object(parent: &RawObject, key: &str, path: &'static str) -> Result<RawObject, ConfigError> {
    let text = parent.get(key).filter(|text| *text != "null").unwrap_or("{}");
    RawObject::parse(text).map_err(|_| ConfigError::NotAnObject(path))
}

fn json<T: serde::Serialize + ?Sized>(value: &T) -> Value {
    // Strings, numbers and lists of them can always be serialized.
    serde_json::to_value(value).unwrap_or_default()
}
