//! NetworkAttachmentDefinitions (NADs) by which pods attach to a network, and the CNI config in them.

use serde::{Deserialize, Serialize};
use serde_json::Value;

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

/// The value of [`NAD_ORIGIN_ANNOTATION`](crate::bridgenetwork::NAD_ORIGIN_ANNOTATION): a digest of the network and the
/// name of the NAD, which a copy of the NAD elsewhere does not match.
pub fn origin_digest(network_uid: &str, at: &NadRef) -> String {
    format!("{:016x}", digest([network_uid, &at.namespace, &at.name]))
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
        for (text, expected) in [
            (
                r#"{"type": "patchbay-bridge", "network": "blue", "ipam": {"type": "patchbay-ipam", "network": "blue"}}"#,
                Some("blue"),
            ),
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
}
