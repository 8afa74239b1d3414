//! The CNI configuration in a NetworkAttachmentDefinition (NAD) of any author: a single plugin or a list of plugins.

use std::collections::BTreeMap;

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use crate::{
    RawJson, RawObject,
    raw_json::{error_text, list_items},
};

/// A CNI configuration. A single plugin is a list of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NadConfig {
    /// The name of the configuration; that of the NAD if the configuration has none.
    pub name: String,
    /// The CNI versions of the configuration: `cniVersion` and `cniVersions`, each once. Empty if it has none.
    pub cni_versions: Vec<String>,
    /// Whether the runtime must not call CHECK.
    pub disable_check: bool,
    /// Whether the runtime must not call GC.
    pub disable_gc: bool,
    /// Whether it is written as a list of plugins.
    pub is_list: bool,
    /// The plugins, in the order in which ADD calls them. There is at least one.
    pub plugins: Vec<PluginConfig>,
    text: RawObject,
}

/// The configuration of one plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginConfig {
    /// The name of the plugin's executable.
    pub plugin: String,
    /// The capabilities that the plugin declares. The runtime passes the arguments of those that are true.
    pub capabilities: BTreeMap<String, bool>,
    /// The name of the IPAM plugin's executable, if the plugin has one.
    pub ipam: Option<String>,
    text: RawObject,
}

/// Why a configuration is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The NAD has no configuration. For a NAD without `spec.config`, it can be a file on the node: that is up to the caller.
    #[error("spec.config is empty; set it to a CNI configuration")]
    Missing,
    /// Invalid JSON, or not an object.
    #[error("spec.config is not a JSON object: {cause} at line {line} column {column}")]
    Json {
        /// What the parser expected.
        cause: String,
        /// The line where it stopped, from 1.
        line: usize,
        /// The column where it stopped, from 1.
        column: usize,
    },
    /// Neither a plugin nor a list of plugins.
    #[error("spec.config has neither a type nor plugins: set the type of the plugin")]
    NoPlugin,
    /// An invalid value.
    #[error("spec.config: {path}: {cause}")]
    Value {
        /// The key, such as `plugins[1].type`.
        path: String,
        /// Why its value is invalid.
        cause: String,
    },
}

impl NadConfig {
    /// Parses `spec.config` of the NAD of this name.
    pub fn parse(config: Option<&str>, nad: &str) -> Result<Self, Error> {
        let config = config.filter(|text| !text.trim().is_empty()).ok_or(Error::Missing)?;
        let mut text = RawObject::parse(config).map_err(|error| Error::Json {
            cause: error_text(&error),
            line: error.line(),
            column: error.column(),
        })?;
        let name: Option<String> = read(&text, "", "name")?;
        let name = if let Some(name) = name.filter(|name| !name.is_empty()) {
            name
        } else {
            text.set("name", &RawJson::from(&Value::from(nad)));
            nad.to_owned()
        };
        check_network_name(&name)?;
        let is_list = plugin_type(&text, "")?.is_empty();
        let plugins =
            if is_list { parse_plugins(&text)? } else { vec![PluginConfig::parse(text.clone(), "")?] };
        Ok(Self {
            name,
            cni_versions: cni_versions(&text)?,
            disable_check: read::<Flag>(&text, "", "disableCheck")?.is_some_and(|flag| flag.0),
            disable_gc: read::<Flag>(&text, "", "disableGC")?.is_some_and(|flag| flag.0),
            is_list,
            plugins,
            text,
        })
    }

    /// The configuration as it is written in the NAD, with a name.
    pub fn text(&self) -> &str {
        self.text.as_str()
    }
}

impl PluginConfig {
    fn parse(text: RawObject, path: &str) -> Result<Self, Error> {
        let plugin = plugin_type(&text, path)?;
        if plugin.is_empty() {
            return Err(value_error(path, "type", "the plugin has no type; set the name of its executable"));
        }
        let ipam = text.get("ipam").filter(|ipam| *ipam != "null").map(RawObject::parse).transpose();
        let ipam = ipam.map_err(|error| value_error(path, "ipam", &error_text(&error)))?;
        let ipam = ipam.map(|ipam| plugin_type(&ipam, &format!("{path}ipam."))).transpose()?;
        let ipam = ipam.filter(|plugin| !plugin.is_empty());
        let capabilities = read(&text, path, "capabilities")?.unwrap_or_default();
        Ok(Self { plugin, capabilities, ipam, text })
    }

    /// Whether the plugin declares this capability.
    pub fn has_capability(&self, name: &str) -> bool {
        self.capabilities.get(name).copied().unwrap_or_default()
    }

    /// The key that names a device of the node in the configuration itself, if there is one. Multus sets these keys to the
    /// device of the pod.
    pub fn device_key(&self) -> Option<&'static str> {
        let names_device = |key: &&str| self.text.get_not_null(key).is_some_and(|value| value != r#""""#);
        ["deviceID", "pciBusID"].into_iter().find(names_device)
    }

    /// The configuration as it is written in the NAD.
    pub fn text(&self) -> &str {
        self.text.as_str()
    }

    /// The standard input of the plugin: its configuration with these keys set, all other bytes as they are written.
    ///
    /// A runtime sets `name` and `cniVersion`, and where they apply `runtimeConfig`, `args` and `prevResult`.
    pub fn input(&self, keys: &[(&str, RawJson)]) -> String {
        let mut text = self.text.clone();
        for (key, value) in keys {
            text.set(key, value);
        }
        text.to_string()
    }
}

fn parse_plugins(text: &RawObject) -> Result<Vec<PluginConfig>, Error> {
    let list = text.get("plugins").filter(|list| *list != "null").ok_or(Error::NoPlugin)?;
    let list = list_items(list).map_err(|error| value_error("", "plugins", &error_text(&error)))?;
    if list.is_empty() {
        return Err(value_error("", "plugins", "the list is empty"));
    }
    let plugins = list.into_iter().enumerate().map(|(index, plugin)| {
        let path = format!("plugins[{index}]");
        let plugin = RawObject::parse(plugin).map_err(|error| value_error("", &path, &error_text(&error)))?;
        PluginConfig::parse(plugin, &format!("{path}."))
    });
    plugins.collect()
}

fn cni_versions(text: &RawObject) -> Result<Vec<String>, Error> {
    let one: Option<String> = read(text, "", "cniVersion")?;
    let more: Option<Vec<String>> = read(text, "", "cniVersions")?;
    let mut versions: Vec<String> = Vec::new();
    for version in one.into_iter().chain(more.unwrap_or_default()).filter(|version| !version.is_empty()) {
        if !versions.contains(&version) {
            versions.push(version);
        }
    }
    Ok(versions)
}

fn plugin_type(text: &RawObject, path: &str) -> Result<String, Error> {
    let plugin = read::<String>(text, path, "type")?.unwrap_or_default();
    match invalid_plugin(&plugin) {
        Some(cause) => Err(value_error(path, "type", &cause)),
        None => Ok(plugin),
    }
}

/// Why this cannot be the name of a plugin's executable. It is looked up in the directories of the runtime only.
fn invalid_plugin(plugin: &str) -> Option<String> {
    let invalid = plugin.contains(['/', '\0']) || plugin == "." || plugin == "..";
    invalid.then(|| {
        format!("{:?} is not a file name; write the name of the executable without a path", quote(plugin))
    })
}

/// The rule of libcni, which uses the name in file names.
pub(crate) fn check_network_name(name: &str) -> Result<(), Error> {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    if name.chars().all(inner) && name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return Ok(());
    }
    let cause = format!(
        "{:?} is not a name of a network: use letters, digits, '_', '.' and '-', and start with a letter or digit",
        quote(name)
    );
    Err(value_error("", "name", &cause))
}

fn read<T: DeserializeOwned>(text: &RawObject, path: &str, key: &str) -> Result<Option<T>, Error> {
    text.read(key).map_err(|error| value_error(path, key, &error_text(&error)))
}

fn value_error(path: &str, key: &str, cause: &str) -> Error {
    Error::Value { path: format!("{path}{key}"), cause: cause.to_owned() }
}

fn quote(text: &str) -> String {
    text.chars().take(64).collect()
}

/// A boolean that may be written as a string.
#[derive(Deserialize)]
#[serde(try_from = "Value")]
struct Flag(bool);

impl TryFrom<Value> for Flag {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, String> {
        match &value {
            Value::Bool(flag) => Ok(Self(*flag)),
            Value::String(text) if text.eq_ignore_ascii_case("true") => Ok(Self(true)),
            Value::String(text) if text.eq_ignore_ascii_case("false") => Ok(Self(false)),
            _ => Err("expected true or false".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn parse(text: &str) -> Result<NadConfig, Error> {
        NadConfig::parse(Some(text), "blue")
    }

    fn types(config: &NadConfig) -> Vec<&str> {
        config.plugins.iter().map(|plugin| plugin.plugin.as_str()).collect()
    }

    #[test]
    fn a_single_plugin_is_a_list_of_one() {
        let text = r#"{ "cniVersion" : "0.3.1", "name": "n", "type": "macvlan", "rate": 1e3,
            "capabilities": {"ips": true, "mac": false}, "ipam": {"type": "host-local", "ranges": []} }"#;
        let config = parse(text).unwrap();
        assert_eq!((config.name.as_str(), config.is_list, config.text()), ("n", false, text));
        assert_eq!(
            (config.cni_versions.as_slice(), types(&config)),
            (&["0.3.1".to_owned()][..], vec!["macvlan"])
        );
        let plugin = &config.plugins[0];
        assert_eq!((plugin.text(), plugin.ipam.as_deref()), (text, Some("host-local")));
        assert!(plugin.has_capability("ips") && !plugin.has_capability("mac") && !plugin.has_capability("x"));
    }

    #[test]
    fn a_list_has_its_plugins_in_order() {
        let config = parse(
            r#"{"cniVersion": "1.0.0", "cniVersions": ["0.4.0", "1.0.0"], "name": "n", "disableCheck": "True", "disableGC": true,
                "plugins": [ { "type":"bridge", "x" : 1.0 } ,{"type":"tuning", "capabilities":{"mac":true}}]}"#,
        );
        let config = config.unwrap();
        assert_eq!((types(&config), config.is_list), (vec!["bridge", "tuning"], true));
        assert_eq!(config.plugins[0].text(), r#"{ "type":"bridge", "x" : 1.0 }"#);
        assert!(config.plugins[1].has_capability("mac") && config.disable_check && config.disable_gc);
        assert_eq!(config.cni_versions, ["1.0.0", "0.4.0"]);
    }

    #[test]
    fn a_configuration_without_a_name_gets_that_of_the_nad() {
        for (text, expected) in [
            (r#"{"type":"a"}"#, r#"{"type":"a","name":"blue"}"#),
            (r#"{"name":"", "type":"a"}"#, r#"{"name":"blue", "type":"a"}"#),
            (r#"{"name":null,"plugins":[{"type":"a"}]}"#, r#"{"name":"blue","plugins":[{"type":"a"}]}"#),
        ] {
            let config = parse(text).unwrap();
            assert_eq!((config.name.as_str(), config.text()), ("blue", expected));
            assert!(config.is_list || config.plugins[0].text() == expected);
        }
    }

    #[test]
    fn the_input_of_a_plugin_keeps_what_is_not_set() {
        let config =
            parse(r#"{"plugins":[{ "type":"a", "big": 18446744073709551616, "cniVersion":"x" }]}"#).unwrap();
        let input = config.plugins[0].input(&[
            ("name", RawJson::from(&json!("blue"))),
            ("cniVersion", RawJson::from(&json!("1.0.0"))),
            ("prevResult", RawJson::parse(r#"{"ips" : []}"#).unwrap()),
        ]);
        assert_eq!(
            input,
            r#"{ "type":"a", "big": 18446744073709551616, "cniVersion":"1.0.0","name":"blue","prevResult":{"ips" : []} }"#
        );
    }

    #[test]
    fn an_invalid_configuration_is_rejected_with_the_reason() {
        assert_eq!(NadConfig::parse(None, "blue"), Err(Error::Missing));
        assert_eq!(parse(" \n"), Err(Error::Missing));
        for (text, message) in [
            ("{\n\"type\" 7}", "spec.config is not a JSON object: expected `:` at line 2 column 8"),
            (
                "[]",
                "spec.config is not a JSON object: invalid type: sequence, expected an object at line 1 column 0",
            ),
            ("{}", "spec.config has neither a type nor plugins: set the type of the plugin"),
            (r#"{"plugins":null}"#, "spec.config has neither a type nor plugins: set the type of the plugin"),
            (r#"{"plugins":[]}"#, "spec.config: plugins: the list is empty"),
            (r#"{"plugins":{}}"#, "spec.config: plugins: invalid type: map, expected a sequence"),
            (r#"{"plugins":[7]}"#, "spec.config: plugins[0]: invalid type: integer `7`, expected an object"),
            (
                r#"{"plugins":[{"type":"a"},{"name":"b"}]}"#,
                "spec.config: plugins[1].type: the plugin has no type; set the name of its executable",
            ),
            (r#"{"type":7}"#, "spec.config: type: invalid type: integer `7`, expected a string"),
            (
                r#"{"type":"../sh"}"#,
                "spec.config: type: \"../sh\" is not a file name; write the name of the executable without a path",
            ),
            (
                r#"{"plugins":[{"type":"a","ipam":{"type":"/bin/sh"}}]}"#,
                "spec.config: plugins[0].ipam.type: \"/bin/sh\" is not a file name; write the name of the executable without a path",
            ),
            (
                r#"{"type":"a","name":"a b"}"#,
                "spec.config: name: \"a b\" is not a name of a network: use letters, digits, '_', '.' and '-', and start with a letter or digit",
            ),
            (r#"{"type":"a","ipam":["x"]}"#, "spec.config: ipam: invalid type: sequence, expected an object"),
            (r#"{"type":"a","name":7}"#, "spec.config: name: invalid type: integer `7`, expected a string"),
            (
                r#"{"type":"a","capabilities":{"mac":1}}"#,
                "spec.config: capabilities: invalid type: integer `1`, expected a boolean",
            ),
            (
                r#"{"type":"a","cniVersion":1}"#,
                "spec.config: cniVersion: invalid type: integer `1`, expected a string",
            ),
            (r#"{"type":"a","disableCheck":7}"#, "spec.config: disableCheck: expected true or false"),
        ] {
            assert_eq!(parse(text).unwrap_err().to_string(), message, "{text}");
        }
        for name in ["-a", "_a", ".a", "a/b", "ä", "a\0"] {
            let text = json!({"type": "a", "name": name}).to_string();
            assert!(matches!(parse(&text), Err(Error::Value { path, .. }) if path == "name"), "{name}");
        }
        for plugin in ["/", ".", "..", "a\0"] {
            let text = json!({"type": plugin}).to_string();
            assert!(matches!(parse(&text), Err(Error::Value { path, .. }) if path == "type"), "{plugin}");
        }
    }

    #[test]
    fn deep_input_is_safe() {
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(parse(&deep).is_err());
        assert!(parse(&format!(r#"{{"type":"a","x":{deep}}}"#)).is_ok());
        assert!(
            parse(&format!(r#"{{"type":"a","ipam":{{"type":"b","x":{deep}}}}}"#))
                .is_ok_and(|it| it.plugins[0].ipam.is_some())
        );
    }

    proptest! {
        #[test]
        fn never_panics(text in any::<String>(), json in r#"\{("(type|name|plugins|ipam|capabilities)":["\[\]{}a:/0-9]{1,6},?){0,4}\}"#) {
            for text in [text, json] {
                if let Ok(config) = parse(&text) {
                    prop_assert!(!config.plugins.is_empty());
                    prop_assert_eq!(parse(config.text()), Ok(config));
                }
            }
        }
    }
}
