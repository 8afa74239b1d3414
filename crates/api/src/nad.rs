//! NetworkAttachmentDefinitions: the kind of others by which pods join a network, and the config in it.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{bridgenetwork::BRIDGE_PLUGIN, digest::digest, ipam::IPAM_PLUGIN, selection::NadRef};

/// The API group of the kind.
pub const NAD_GROUP: &str = "k8s.cni.cncf.io";
/// Its name in addresses.
pub const NAD_PLURAL: &str = "network-attachment-definitions";

/// What an attachment says, as far as it is read here.
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
    /// The config of the plugin, as text. None means: a file on the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
}

/// The config of an attachment to a network of ours.
pub fn plugin_config(attachment: &str, network: &str, mtu: i32, addresses: bool) -> Value {
    let mut config = json!({
        "cniVersion": "1.0.0",
        "name": attachment,
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

/// What the mark of an attachment says about where it was made for a network.
pub fn origin_digest(network_uid: &str, at: &NadRef) -> String {
    format!("{:016x}", digest([network_uid, &at.namespace, &at.name]))
}

/// Whether this text says the same as the config, however it is written.
pub fn config_equals(text: Option<&str>, config: &Value) -> bool {
    text.and_then(|text| serde_json::from_str::<Value>(text).ok()).as_ref() == Some(config)
}

/// Whether this text is the config of an attachment to this network as it is written here, whatever its MTU.
pub fn is_plugin_config(text: &str, attachment: &str, network: &str) -> bool {
    let Ok(value) = serde_json::from_str::<Value>(text) else { return false };
    let mtu = value["mtu"].as_i64().and_then(|mtu| i32::try_from(mtu).ok());
    mtu.is_some_and(|mtu| {
        [true, false].iter().any(|ipam| value == plugin_config(attachment, network, mtu, *ipam))
    })
}

/// The network of ours that a config joins pods to, whoever wrote it: a single plugin or a list of them.
pub fn network_of(config: &str) -> Option<String> {
    let config: Value = serde_json::from_str(config).ok()?;
    // A plugin of somebody else's that has its addresses from us is one of ours in that.
    let joins = |plugin: &Value| {
        let ours = [plugin, &plugin["ipam"]].into_iter().zip([BRIDGE_PLUGIN, IPAM_PLUGIN]);
        let mut named = ours.filter(|(part, name)| part["type"] == *name);
        named.find_map(|(part, _)| part["network"].as_str().map(str::to_owned))
    };
    joins(&config).or_else(|| config["plugins"].as_array()?.iter().find_map(joins))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_network_is_read_out_of_any_config() {
        let ours = plugin_config("nad", "blue", 1450, true).to_string();
        for (text, wanted) in [
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
            assert_eq!(network_of(text).as_deref(), wanted, "{text}");
        }
    }

    #[test]
    fn a_config_is_compared_by_what_it_says() {
        let ours = plugin_config("nad", "blue", 1450, false);
        let addresses = plugin_config("nad", "blue", 1450, true);
        assert!(!config_equals(Some(&ours.to_string()), &addresses));
        assert!(is_plugin_config(&addresses.to_string(), "nad", "blue"));
        let spread = serde_json::to_string_pretty(&ours).unwrap();
        assert!(config_equals(Some(&spread), &ours) && config_equals(Some(&ours.to_string()), &ours));
        assert!(!config_equals(Some(&spread), &plugin_config("nad", "blue", 1400, false)));
        assert!(!config_equals(Some("junk"), &ours) && !config_equals(None, &ours));
        assert!(
            is_plugin_config(&spread, "nad", "blue") && is_plugin_config(&ours.to_string(), "nad", "blue")
        );
        assert!(!is_plugin_config(&spread, "nad", "red") && !is_plugin_config(&spread, "copy", "blue"));
        for (key, value) in [("mtu", json!("1450")), ("ipam", json!({})), ("type", json!("bridge"))] {
            let mut edited = ours.clone();
            edited[key] = value;
            assert!(!is_plugin_config(&edited.to_string(), "nad", "blue"), "{edited}");
        }
        assert!(!is_plugin_config("junk", "nad", "blue") && !is_plugin_config("7", "nad", "blue"));
    }
}
