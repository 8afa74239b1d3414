//! NetworkAttachmentDefinitions (NADs) by which pods attach to a network, and the CNI config in them.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    RawObject,
    bridgenetwork::BRIDGE_PLUGIN,
    digest::digest,
    ipam::IPAM_PLUGIN,
    nad_config::{Error, check_network_name},
    raw_json::{error_text, list_items},
    selection::NadRef,
};

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

/// The type of the main plugin of OVN-Kubernetes.
const OVN_PLUGIN: &str = "ovn-k8s-cni-overlay";

/// What a CNI config says about IPAMClaims. It is read tolerantly: keys that it does not need may have any value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NadNetwork {
    /// The name of the config, which claims name as their network; that of the NAD if the config has none.
    pub name: String,
    /// Whether virtual machines keep their addresses: `allowPersistentIPs` of the config or of one of its plugins.
    pub persistent: bool,
    /// Who allocates the addresses.
    pub ipam: NadIpam,
}

/// Who allocates the addresses of a NAD.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NadIpam {
    /// `patchbay-ipam`, for this BridgeNetwork.
    Patchbay {
        /// The name of the BridgeNetwork.
        network: String,
    },
    /// OVN-Kubernetes.
    Ovn,
    /// Another plugin, or none.
    Other,
}

impl NadNetwork {
    /// Reads `spec.config` of the NAD of this name. An empty config is not persistent.
    pub fn read(config: Option<&str>, nad: &str) -> Result<Self, Error> {
        let Some(config) = config.filter(|text| !text.trim().is_empty()) else {
            return Ok(Self { name: nad.to_owned(), persistent: false, ipam: NadIpam::Other });
        };
        let config = RawObject::parse(config).map_err(|error| Error::Json {
            cause: error_text(&error),
            line: error.line(),
            column: error.column(),
        })?;
        let name = text(&config, "name").filter(|name| !name.is_empty()).unwrap_or_else(|| nad.to_owned());
        check_network_name(&name)?;
        let mut plugins = vec![config.clone()];
        if text(&config, "type").is_none_or(|plugin| plugin.is_empty()) {
            let list = config.get("plugins").and_then(|list| list_items(list).ok()).unwrap_or_default();
            plugins.extend(list.into_iter().filter_map(|plugin| RawObject::parse(plugin).ok()));
        }
        let persistent = |plugin: &RawObject| matches!(plugin.read("allowPersistentIPs"), Ok(Some(true)));
        let patchbay = plugins.iter().find_map(|plugin| {
            let ipam = plugin.get("ipam").and_then(|ipam| RawObject::parse(ipam).ok())?;
            if text(&ipam, "type").as_deref() != Some(IPAM_PLUGIN) {
                return None;
            }
            // Without `ipam.network`, patchbay-bridge gives addresses of the network that the pod joins.
            let is_bridge = text(plugin, "type").as_deref() == Some(BRIDGE_PLUGIN);
            text(&ipam, "network").or_else(|| text(plugin, "network").filter(|_| is_bridge))
        });
        let ipam = match patchbay {
            Some(network) => NadIpam::Patchbay { network },
            None if plugins.iter().any(|plugin| text(plugin, "type").as_deref() == Some(OVN_PLUGIN)) => {
                NadIpam::Ovn
            }
            None => NadIpam::Other,
        };
        Ok(Self { name, persistent: plugins.iter().any(persistent), ipam })
    }
}

fn text(object: &RawObject, key: &str) -> Option<String> {
    object.read(key).ok().flatten()
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

    #[test]
    fn reads_what_a_config_says_about_claims() {
        let patchbay = || NadIpam::Patchbay { network: "blue".to_owned() };
        for (config, name, persistent, ipam) in [
            (
                r#"{"name":"n","type":"patchbay-bridge","allowPersistentIPs":true,"ipam":{"type":"patchbay-ipam","network":"blue"}}"#,
                "n",
                true,
                patchbay(),
            ),
            (
                r#"{"type":"macvlan","subnets":["10.0.0.0/24"],"ipam":{"type":"patchbay-ipam","network":"blue"}}"#,
                "nad",
                false,
                patchbay(),
            ),
            (
                r#"{"name":"n","type":"patchbay-bridge","network":"blue","allowPersistentIPs":true,"ipam":{"type":"patchbay-ipam"}}"#,
                "n",
                true,
                patchbay(),
            ),
            (
                r#"{"name":"n","allowPersistentIPs":true,"plugins":[{"type":"patchbay-bridge","network":"blue","ipam":{"type":"patchbay-ipam"}}]}"#,
                "n",
                true,
                patchbay(),
            ),
            (
                r#"{"name":"n","type":"macvlan","network":"blue","allowPersistentIPs":true,"ipam":{"type":"patchbay-ipam"}}"#,
                "n",
                true,
                NadIpam::Other,
            ),
            (
                r#"{"name":"n","plugins":[{"type":"macvlan","ipam":{"type":"patchbay-ipam","network":"blue"}},7,{"type":"tuning"}],"allowPersistentIPs":true}"#,
                "n",
                true,
                patchbay(),
            ),
            (
                r#"{"name":"n","plugins":[{"type":"macvlan","allowPersistentIPs":true,"ipam":{"type":"patchbay-ipam","network":"blue"}}]}"#,
                "n",
                true,
                patchbay(),
            ),
            (
                r#"{"name":"n","type":"ovn-k8s-cni-overlay","subnets":"10.0.0.0/24","allowPersistentIPs":true}"#,
                "n",
                true,
                NadIpam::Ovn,
            ),
            (
                r#"{"name":"n","type":"bridge","allowPersistentIPs":true,"ipam":{"type":"host-local"}}"#,
                "n",
                true,
                NadIpam::Other,
            ),
            (r#"{"type":"bridge","allowPersistentIPs":"true","ipam":[]}"#, "nad", false, NadIpam::Other),
            (r#"{"name":7,"plugins":{}}"#, "nad", false, NadIpam::Other),
            ("  ", "nad", false, NadIpam::Other),
        ] {
            let expected = NadNetwork { name: name.to_owned(), persistent, ipam };
            assert_eq!(NadNetwork::read(Some(config), "nad"), Ok(expected), "{config}");
        }
        assert!(!NadNetwork::read(None, "nad").unwrap().persistent);
        for config in ["{", "[]", "7", r#"{"name":"a b"}"#] {
            assert!(NadNetwork::read(Some(config), "nad").is_err(), "{config}");
        }
    }
}
