//! The directories of CNI that a runtime names.
//!
//! CRI does not define them. containerd, also that of K3s and RKE2, puts its configuration into the verbose part of its status,
//! as JSON under the key `config`. CRI-O serves its configuration at `/config` of its socket, as TOML.

use std::{collections::BTreeMap, path::PathBuf};

use serde_json::Value;

/// The key of the JSON in `info`.
const CONFIG: &str = "config";

/// The directories that a runtime names: absolute paths on the host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CniDirs {
    /// The directory of CNI configurations.
    pub config: Option<PathBuf>,
    /// The directories of CNI plugins.
    pub plugins: Vec<PathBuf>,
}

impl CniDirs {
    /// What the runtime names. What it does not name, or in another format, is left out.
    #[must_use]
    pub fn parse(info: &BTreeMap<String, String>) -> Self {
        let config: Value =
            info.get(CONFIG).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        let cni = &config["cni"];
        let directory = |value: &Value| value.as_str().map(PathBuf::from).filter(|path| path.is_absolute());
        let several = cni["binDirs"].as_array().into_iter().flatten();
        Self {
            config: directory(&cni["confDir"]),
            plugins: several.chain([&cni["binDir"]]).filter_map(directory).collect(),
        }
    }
}

impl CniDirs {
    /// What the configuration of CRI-O names, with or without HTTP headers before it.
    #[must_use]
    pub fn parse_crio(config: &str) -> Self {
        let value = |key: &str| {
            let mut lines = config
                .lines()
                .filter_map(|line| line.trim().strip_prefix(key)?.trim_start().strip_prefix('='));
            lines.next().unwrap_or_default()
        };
        // Every second part is between quotation marks.
        let paths = |value: &str| -> Vec<PathBuf> {
            value.split('"').skip(1).step_by(2).map(PathBuf::from).filter(|path| path.is_absolute()).collect()
        };
        Self { config: paths(value("network_dir")).into_iter().next(), plugins: paths(value("plugin_dirs")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directories_of_containerd_are_read_and_anything_else_names_none() {
        let parse = |text: &str| CniDirs::parse(&BTreeMap::from([(CONFIG.to_owned(), text.to_owned())]));
        let dirs = |config: &str, plugins: &[&str]| CniDirs {
            config: Some(PathBuf::from(config)),
            plugins: plugins.iter().map(PathBuf::from).collect(),
        };
        for (text, expected) in [
            (r#"{"cni":{"binDir":"","binDirs":["/a","/b"],"confDir":"/c"}}"#, dirs("/c", &["/a", "/b"])),
            (r#"{"cni":{"binDir":"/a","confDir":"/c/"}}"#, dirs("/c/", &["/a"])),
            // CRI-O.
            (r#"{"sandboxImage":"i","crio":{"Root":"/x"}}"#, CniDirs::default()),
            (r#"{"cni":{"binDir":7,"confDir":"relative","binDirs":{"a":1}}}"#, CniDirs::default()),
            ("[]", CniDirs::default()),
            ("no json", CniDirs::default()),
        ] {
            assert_eq!(parse(text), expected, "{text}");
        }
        assert_eq!(CniDirs::parse(&BTreeMap::new()), CniDirs::default());
    }

    #[test]
    fn the_directories_of_crio_are_read() {
        let config = "HTTP/1.0 200 OK\r\n\r\n[crio]\n  [crio.network]\n    cni_default_network = \"\"\n    \
                      network_dir = \"/etc/kubernetes/cni/net.d/\"\n    plugin_dirs = [\"/a\", \"/b/\"]\n";
        let expected = CniDirs {
            config: Some(PathBuf::from("/etc/kubernetes/cni/net.d")),
            plugins: vec![PathBuf::from("/a"), PathBuf::from("/b")],
        };
        assert_eq!(CniDirs::parse_crio(config), expected);
        for text in
            ["", "network_dir", "network_dir = relative", "network_dir_x = \"/a\"", "plugin_dirs = [\"x"]
        {
            assert_eq!(CniDirs::parse_crio(text), CniDirs::default(), "{text}");
        }
    }
}
