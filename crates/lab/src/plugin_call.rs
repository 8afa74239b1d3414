//! The calls that the CNI plugin `lab-record` recorded on a node.
//!
//! `lab-record` is in `/opt/cni/bin` of every node. It can stand anywhere in a configuration, and delegates the work to a
//! real plugin if its configuration says so:
//!
//! ```json
//! {"cniVersion": "1.0.0", "type": "lab-record", "capabilities": {"ips": true},
//!  "delegate": {"type": "bridge", "bridge": "br-t", "ipam": {"type": "host-local", "subnet": "10.9.0.0/24"}},
//!  "add": {"hang": 60}, "del": {"fail": {"code": 11, "msg": "try again"}}}
//! ```
//!
//! The options of `add`, `del` and `check` are listed in `third-party/record/record.rs`: hang, fail, print garbage or too
//! much, change the result, write a device-info file. As the last plugin of a conflist without `delegate` it returns
//! `prevResult`. A link to it (`ln /opt/cni/bin/lab-record /opt/cni/bin/slow`) is a plugin of another type.
//!
//! ```no_run
//! # fn example(lab: &lab::Lab) -> anyhow::Result<()> {
//! lab.clear_plugin_calls("node-1")?;
//! for call in lab.plugin_calls("node-1")? {
//!     assert_eq!(call.stdin_json()?["runtimeConfig"]["ips"][0], "10.9.0.7/24");
//!     assert_eq!(call.cni_environment()["CNI_IFNAME"], "net1");
//! }
//! # Ok(())
//! # }
//! ```

use std::{collections::BTreeMap, fs, io, path::PathBuf};

use anyhow::{Context as _, Result};
use serde::Deserialize;
use serde_json::Value;

use crate::Lab;

/// One call of `lab-record`. Namespaces, cgroup and capabilities are those of the plugin's process.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PluginCall {
    /// The file name of the plugin: `lab-record` or the name of a link to it.
    pub program: String,
    /// `CNI_COMMAND`.
    pub command: String,
    pub stdin: String,
    /// The whole environment.
    pub environment: BTreeMap<String, String>,
    /// The name of the process that started the plugin.
    pub caller: String,
    pub pid: i32,
    pub process_group: i32,
    /// As in `/proc/PID/ns/mnt`: `mnt:[4026531840]`.
    pub mount_namespace: String,
    pub network_namespace: String,
    /// The text of `/proc/PID/cgroup`.
    pub cgroup: String,
    pub oom_score_adj: i32,
    /// The effective capabilities, in hexadecimal.
    pub capabilities: String,
    /// Nanoseconds since 1970.
    pub started: u64,
    /// Missing while the call lasts, and after it was killed.
    pub ended: Option<u64>,
    pub exit_code: Option<i32>,
    /// At most 100,000 characters.
    pub stdout: Option<String>,
}

impl PluginCall {
    /// The configuration that the plugin received.
    pub fn stdin_json(&self) -> Result<Value> {
        serde_json::from_str(&self.stdin)
            .with_context(|| format!("parse the plugin's stdin {:?}", self.stdin))
    }

    /// The variables `CNI_*`.
    pub fn cni_environment(&self) -> BTreeMap<&str, &str> {
        let all = self.environment.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        all.filter(|(name, _)| name.starts_with("CNI_")).collect()
    }

    /// `CNI_IFNAME`.
    pub fn interface(&self) -> &str {
        self.environment.get("CNI_IFNAME").map_or("", String::as_str)
    }

    /// `CNI_CONTAINERID`.
    pub fn container(&self) -> &str {
        self.environment.get("CNI_CONTAINERID").map_or("", String::as_str)
    }
}

impl Lab {
    fn plugin_call_dir(&self, node: &str) -> Result<PathBuf> {
        Ok(self.machine(node)?.disk().join("var/log/lab/cni-calls"))
    }

    /// The calls of `lab-record` on a node, in the order of their start.
    pub fn plugin_calls(&self, node: &str) -> Result<Vec<PluginCall>> {
        let dir = self.plugin_call_dir(node)?;
        let entries = match fs::read_dir(&dir) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.with_context(|| format!("list {}", dir.display()))?,
        };
        let mut calls = Vec::new();
        for entry in entries {
            let path = entry.with_context(|| format!("list {}", dir.display()))?.path();
            if path.extension().is_none_or(|e| e != "json") {
                continue;
            }
            let text = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
            let call: PluginCall =
                serde_json::from_slice(&text).with_context(|| format!("parse {}", path.display()))?;
            calls.push(call);
        }
        calls.sort_by_key(|call| call.started);
        Ok(calls)
    }

    /// Deletes the recorded calls of a node. A call that still runs is recorded again at its end.
    pub fn clear_plugin_calls(&self, node: &str) -> Result<()> {
        let dir = self.plugin_call_dir(node)?;
        match fs::remove_dir_all(&dir) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(e).with_context(|| format!("remove {}", dir.display()))
            }
            _ => Ok(()),
        }
    }
}
