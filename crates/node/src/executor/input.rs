//! What a plugin reads: its configuration and its environment.

use std::{borrow::Cow, path::PathBuf};

use api::{
    RawJson, RawObject,
    nad_config::{NadConfig, PluginConfig},
};
use serde_json::{Map, Value};
use wire::cni::{Success, Verb, Version};

use super::{CniRequest, ExecError, join_dirs};

/// The CNI version of a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigVersion {
    /// As the plugins read it. Empty if the configuration has none.
    pub text: String,
    pub version: Version,
}

impl ConfigVersion {
    /// The version that libcni uses: a list of plugins may offer several, and the newest that both know is used.
    pub fn of(config: &NadConfig) -> Result<Self, ExecError> {
        let invalid = |error: wire::cni::Error| ExecError::Invalid(error.to_string());
        let object = RawObject::parse(config.text()).ok();
        let has = |key: &str| object.as_ref().and_then(|object| object.get_not_null(key)).is_some();
        let known = |text: &String| Some((text.parse::<Version>().ok()?, text.clone()));
        if config.is_list && has("cniVersions") {
            let newest = config.cni_versions.iter().filter_map(known).max();
            if let Some((version, text)) = newest {
                return Ok(Self { text, version });
            }
        }
        let one = config.cni_versions.first().filter(|text| !text.is_empty() && has("cniVersion"));
        let text = one.cloned().unwrap_or_default();
        let version = text.parse().map_err(invalid)?;
        Ok(Self { text, version })
    }
}

/// The result of a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginResult {
    /// The result as the plugin printed it if it is in the version of the configuration, else converted to that version.
    pub json: RawJson,
    pub success: Success,
}

impl PluginResult {
    /// Reads the output of a plugin that succeeded.
    pub fn from_output(stdout: &[u8], config: &ConfigVersion) -> Result<Self, wire::cni::PluginError> {
        // libcni takes it for a result without content.
        let stdout = if stdout.trim_ascii() == b"null" { b"{}" } else { stdout };
        let success = Success::from_output(stdout, config.version)?;
        Ok(Self::new(&String::from_utf8_lossy(stdout), success, config))
    }

    /// Reads a result of ADD that was stored. `None` if it is not a result.
    pub fn from_stored(text: &str, config: &ConfigVersion) -> Option<Self> {
        let success = Success::parse(text.as_bytes(), config.version).ok()?;
        Some(Self::new(text, success, config))
    }

    fn new(text: &str, success: Success, config: &ConfigVersion) -> Self {
        let rendered = || String::from_utf8_lossy(&success.render(config.version)).into_owned();
        let json = keep(text, config).or_else(|| keep(&rendered(), config));
        let json = json.unwrap_or_else(|| RawJson::from(&Value::Object(Map::new())));
        Self { json, success }
    }
}

/// The text of a result with the version, and with empty DNS settings in the versions in which libcni writes them. `None` if
/// it is in another version.
fn keep(text: &str, config: &ConfigVersion) -> Option<RawJson> {
    let mut object = RawObject::parse(text).ok()?;
    let version = object.read::<String>("cniVersion").ok()?.unwrap_or_default();
    if version.is_empty() {
        // libcni writes the version that plugins without one have.
        object.set("cniVersion", &RawJson::from(&Value::from(config.version.to_string())));
    } else if version.parse::<Version>().ok()? != config.version {
        return None;
    }
    let dns = object.read::<Map<String, Value>>("dns").ok()?.unwrap_or_default();
    if dns.is_empty() && config.version < Version::V1_0_0 {
        object.set("dns", &RawJson::from(&Value::Object(dns)));
    } else if dns.is_empty() {
        return without(&object, "dns");
    }
    RawJson::parse(object.as_str()).ok()
}

/// The object without a key.
fn without(object: &RawObject, key: &str) -> Option<RawJson> {
    let entries = object.iter().filter(|(name, _)| !name.eq_ignore_ascii_case(key));
    let entries: Vec<String> =
        entries.map(|(name, value)| format!("{}:{value}", Value::from(name))).collect();
    RawJson::parse(&format!("{{{}}}", entries.join(","))).ok()
}

/// The standard input of a plugin.
pub fn stdin(
    request: &CniRequest,
    version: &ConfigVersion,
    plugin: &PluginConfig,
    capability_args: &Map<String, Value>,
    prev_result: Option<&RawJson>,
) -> String {
    let text = |text: &str| RawJson::from(&Value::from(text));
    let mut keys = vec![("name", text(&request.config.name)), ("cniVersion", text(&version.text))];
    keys.extend(prev_result.map(|result| ("prevResult", result.clone())));
    let declared = capability_args.iter().filter(|(name, _)| plugin.has_capability(name));
    let runtime: Map<String, Value> = declared.map(|(name, value)| (name.clone(), value.clone())).collect();
    if !runtime.is_empty() {
        keys.push(("runtimeConfig", RawJson::from(&Value::Object(runtime))));
    }
    plugin.input(&keys)
}

/// The environment of a plugin, without `PATH`.
pub fn env(request: &CniRequest, verb: Verb, plugin_dirs: &[PathBuf]) -> Vec<(&'static str, String)> {
    let args: Vec<String> = request.cni_args.iter().map(|(key, value)| format!("{key}={value}")).collect();
    vec![
        ("CNI_COMMAND", verb.as_str().to_owned()),
        ("CNI_CONTAINERID", request.container_id.clone()),
        ("CNI_NETNS", request.netns.clone().unwrap_or_default()),
        ("CNI_IFNAME", request.ifname.clone()),
        ("CNI_ARGS", args.join(";")),
        ("CNI_PATH", join_dirs(plugin_dirs)),
    ]
}

/// The maximum length of an environment value. The kernel starts no program with one of more than 128 KiB.
const MAX_ENV: usize = 64 * 1024;

/// Rejects what libcni rejects, and what would not be a file name or an environment variable.
pub fn check(request: &CniRequest) -> Result<(), ExecError> {
    let invalid = |what: &str, value: &str| {
        let value: String = value.chars().take(64).collect();
        Err(ExecError::Invalid(format!("{what} {value:?} is not valid")))
    };
    let (id, ifname) = (&request.container_id, &request.ifname);
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    if !id.chars().all(inner) || !id.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return invalid("the container id", id);
    }
    let bad = |c: char| c == '/' || c == ':' || c == '\0' || c.is_whitespace();
    if ifname.is_empty() || ifname.len() > 15 || ifname == "." || ifname == ".." || ifname.contains(bad) {
        return invalid("the interface name", ifname);
    }
    let netns = request.netns.as_deref().map(Cow::from);
    let args = request.cni_args.iter().flat_map(|(key, value)| [Cow::from(key), Cow::from(value)]);
    if let Some(text) = netns.into_iter().chain(args).find(|text| text.contains('\0')) {
        return invalid("the environment value", &text);
    }
    let length: usize = request.cni_args.iter().map(|(key, value)| key.len() + value.len() + 2).sum();
    if length > MAX_ENV {
        return Err(ExecError::Invalid(format!(
            "CNI_ARGS would have {length} bytes; request fewer addresses, at most {MAX_ENV} bytes are possible"
        )));
    }
    Ok(())
}
