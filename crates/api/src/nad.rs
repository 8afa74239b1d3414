//! NetworkAttachmentDefinitions (NADs) by which pods attach to a network, and the CNI config in them.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{bridgenetwork::BRIDGE_PLUGIN, digest::digest, ipam::IPAM_PLUGIN, selection::NadRef};

/// The API group of NetworkAttachmentDefinitions.
pub const NAD_GROUP: &str = "k8s.cni.cncf.io";
/// The plural resource name in API paths.
pub const NAD_PLURAL: &str = "network-attachment-definitions";

/// The spec of a NetworkAttachmentDefinition.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::CustomResource, schemars::JsonSchema))]
#[cfg_attr(
    feature = "kube",
    kube(
        group = "k8s.cni.cncf.io",
        version = "v1",
        kind = "NetworkAttachmentDefinition",
        plural = "network-attachment-definitions",
        shortname = "net-attach-def",
        namespaced,
        derive = "PartialEq"
    )
)]
pub struct NetworkAttachmentDefinitionSpec {
    /// The CNI config as JSON text. If it is not set, the config is a file on the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
}

/// The CNI config of a NAD that Patchbay manages for a network.
pub fn plugin_config(nad: &str, network: &str, mtu: i32, addresses: bool) -> Value {
    let mut config = json!({
        "cniVersion": "1.0.0",
        "name": nad,
        "type": BRIDGE_PLUGIN,
        "network": network,
        "mtu": mtu,
        "capabilities": {"mac": true},
    });
    if addresses {
        config["ipam"] = json!({"type": IPAM_PLUGIN, "network": network});
        config["capabilities"]["ips"] = json!(true);
    }
    config
}

/// The value of [`NAD_ORIGIN_ANNOTATION`](crate::bridgenetwork::NAD_ORIGIN_ANNOTATION): a digest of the network and the
/// name of the NAD, which a copy of the NAD elsewhere does not match.
pub fn origin_digest(network_uid: &str, at: &NadRef) -> String {
    format!("{:016x}", digest([network_uid, &at.namespace, &at.name]))
}

/// Whether this text is JSON that equals the config, whatever its formatting.
pub fn config_equals(text: Option<&str>, config: &Value) -> bool {
    text.and_then(|text| serde_json::from_str::<Value>(text).ok()).as_ref() == Some(config)
}

/// Whether this text is a config from [`plugin_config`] for this NAD and network, with any MTU.
pub fn is_plugin_config(text: &str, nad: &str, network: &str) -> bool {
    let Ok(value) = serde_json::from_str::<Value>(text) else { return false };
    let mtu = value["mtu"].as_i64().and_then(|mtu| i32::try_from(mtu).ok());
    mtu.is_some_and(|mtu| [true, false].iter().any(|ipam| value == plugin_config(nad, network, mtu, *ipam)))
}

/// The BridgeNetwork to which a CNI config attaches pods. The config is a single plugin or a list, written by Patchbay or
/// by a user.
pub fn network_of(config: &str) -> Option<String> {
    let config: Value = serde_json::from_str(config).ok()?;
    // Another plugin that gets its addresses from patchbay-ipam uses the network too.
    let network_of_plugin = |plugin: &Value| {
        let parts = [plugin, &plugin["ipam"]].into_iter().zip([BRIDGE_PLUGIN, IPAM_PLUGIN]);
        let mut matching = parts.filter(|(part, name)| part["type"] == *name);
        matching.find_map(|(part, _)| part["network"].as_str().map(str::to_owned))
    };
    network_of_plugin(&config).or_else(|| config["plugins"].as_array()?.iter().find_map(network_of_plugin))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_network_in_any_config() {
        let ours = plugin_config("nad", "blue", 1450, true).to_string();
        for (text, expected) in [
            (ours.as_str(), Some("blue")),
            (r#"{"type": "bridge", "network": "blue"}"#, None),
            (r#"{"type": "macvlan", "ipam": {"type": "patchbay-ipam", "network": "blue"}}"#, Some("blue")),
            (r#"{"type": "macvlan", "ipam": {"type": "host-local", "network": "blue"}}"#, None),
            (r#"{"type": "macvlan", "ipam": "patchbay-ipam"}"#, None),
            (
                r#"{"plugins": [{"type": "a", "ipam": {"type": "patchbay-ipam", "network": "red"}}]}"#,
                Some("red"),
            ),
            (
                r#"{"plugins": [{"type": "tuning"}, {"type": "patchbay-bridge", "network": "red"}]}"#,
                Some("red"),
            ),
            (r#"{"type": "patchbay-bridge"}"#, None),
            (r#"{"type": "patchbay-bridge", "network": 7}"#, None),
            (r#"{"plugins": {"type": "patchbay-bridge"}}"#, None),
            ("[1]", None),
            ("", None),
            ("{", None),
        ] {
            assert_eq!(network_of(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn configs_are_compared_as_json() {
        let ours = plugin_config("nad", "blue", 1450, false);
        let addresses = plugin_config("nad", "blue", 1450, true);
        assert!(!config_equals(Some(&ours.to_string()), &addresses));
        assert!(is_plugin_config(&addresses.to_string(), "nad", "blue"));
        let pretty = serde_json::to_string_pretty(&ours).unwrap();
        assert!(config_equals(Some(&pretty), &ours) && config_equals(Some(&ours.to_string()), &ours));
        assert!(!config_equals(Some(&pretty), &plugin_config("nad", "blue", 1400, false)));
        assert!(!config_equals(Some("junk"), &ours) && !config_equals(None, &ours));
        assert!(
            is_plugin_config(&pretty, "nad", "blue") && is_plugin_config(&ours.to_string(), "nad", "blue")
        );
        assert!(!is_plugin_config(&pretty, "nad", "red") && !is_plugin_config(&pretty, "copy", "blue"));
        for (key, value) in [("mtu", json!("1450")), ("ipam", json!({})), ("type", json!("bridge"))] {
            let mut edited = ours.clone();
            edited[key] = value;
            assert!(!is_plugin_config(&edited.to_string(), "nad", "blue"), "{edited}");
        }
        assert!(!is_plugin_config("junk", "nad", "blue") && !is_plugin_config("7", "nad", "blue"));
    }
}
