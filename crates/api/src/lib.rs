//! The API of Patchbay: custom resources, names, and the formats that users write and read.
//!
//! Plain data without a client, a clock or the kernel. Without the feature `kube` these are serde structs and parsers;
//! the feature makes the kinds API resources.
#![warn(missing_docs)]

pub mod attachments;
pub mod bridgenetwork;
pub mod condition;
pub mod digest;
pub mod duration;
pub mod error_chain;
pub mod ifname;
pub mod ipam;
pub mod ipamclaim;
pub mod ipblock;
pub mod labels;
#[cfg(feature = "kube")]
mod list_schema;
pub mod mac;
pub mod nad;
pub mod nad_config;
pub mod names;
pub mod network_status;
pub mod networkservice;
pub mod nodenetwork;
pub mod pattern;
pub mod raw_json;
pub mod selection;
pub mod selector;

#[cfg(feature = "kube")]
pub use bridgenetwork::BridgeNetwork;
pub use bridgenetwork::{BridgeNetworkSpec, BridgeNetworkStatus};
pub use condition::{Condition, ConditionStatus};
pub use error_chain::ErrorChain;
pub use ifname::IfName;
#[cfg(feature = "kube")]
pub use ipamclaim::IPAMClaim;
pub use ipamclaim::{IPAMClaimSpec, IPAMClaimStatus};
#[cfg(feature = "kube")]
pub use ipblock::IPBlock;
pub use ipblock::{IPBlockSpec, IPBlockStatus};
pub use mac::Mac;
#[cfg(feature = "kube")]
pub use nad::NetworkAttachmentDefinition;
#[cfg(feature = "kube")]
pub use networkservice::NetworkService;
pub use networkservice::{NetworkServiceSpec, NetworkServiceStatus};
#[cfg(feature = "kube")]
pub use nodenetwork::NodeNetwork;
pub use nodenetwork::{
    ClaimAddresses, ClosedNetwork, Interface, LinkState, NetworkOnNode, NodeNetworkStatus, Vtep,
};
pub use pattern::{IfNamePattern, IfNamePatterns};
pub use raw_json::{RawJson, RawObject};
pub use selector::LabelSelector;

/// The API group of Patchbay's kinds.
pub const GROUP: &str = "patchbay.dev";
/// The API version of Patchbay's kinds.
pub const VERSION: &str = "v1alpha1";
/// The default namespace of the controller and the node daemons.
pub const NAMESPACE: &str = "patchbay-system";
/// The field manager of `patchbay node`.
pub const NODE_FIELD_MANAGER: &str = "patchbay.dev/node";
/// The field manager of `patchbay controller`.
pub const CONTROLLER_FIELD_MANAGER: &str = "patchbay.dev/controller";
/// The prefix of the alias of every link that Patchbay creates.
pub const LINK_ALIAS_PREFIX: &str = "patchbay/";

/// The CRDs, in the order of the install manifest.
#[cfg(feature = "kube")]
pub fn crds()
-> Vec<k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition> {
    use kube::CustomResourceExt as _;

    vec![BridgeNetwork::crd(), IPBlock::crd(), NetworkService::crd(), NodeNetwork::crd()]
}

#[cfg(test)]
#[cfg(feature = "kube")]
mod tests {
    use serde_json::Value;

    /// The name and the schema of every kind.
    fn schemas() -> Vec<(String, Value)> {
        let schema = |crd: &Value| crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone();
        let crds = super::crds().into_iter().map(|crd| serde_json::to_value(crd).unwrap());
        crds.map(|crd| (crd["spec"]["names"]["kind"].as_str().unwrap().to_owned(), schema(&crd))).collect()
    }

    #[test]
    fn schemas_use_only_formats_that_the_api_server_supports() {
        fn formats(value: &Value, found: &mut Vec<String>) {
            match value {
                Value::Object(map) => {
                    found.extend(map.get("format").and_then(Value::as_str).map(str::to_owned));
                    map.values().for_each(|inner| formats(inner, found));
                }
                Value::Array(list) => list.iter().for_each(|inner| formats(inner, found)),
                _ => {}
            }
        }
        let mut found = Vec::new();
        for (_, schema) in schemas() {
            formats(&schema, &mut found);
        }
        found.sort();
        found.dedup();
        assert_eq!(found, ["cidr", "date-time", "int32", "int64"]);
    }

    #[test]
    fn every_field_has_a_description() {
        fn find_undocumented(path: &str, value: &Value, found: &mut Vec<String>) {
            for (name, field) in value["properties"].as_object().into_iter().flatten() {
                let path = format!("{path}.{name}");
                if field["description"].as_str().is_none_or(str::is_empty) {
                    found.push(path.clone());
                }
                find_undocumented(&path, field, found);
                find_undocumented(&path, &field["items"], found);
            }
        }
        let mut found = Vec::new();
        for (kind, schema) in schemas() {
            for part in ["spec", "status"] {
                find_undocumented(&format!("{kind}.{part}"), &schema["properties"][part], &mut found);
            }
        }
        assert_eq!(found, Vec::<String>::new());
    }
}
