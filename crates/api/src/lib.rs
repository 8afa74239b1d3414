//! What users of Patchbay write and read: kinds, names and formats.
//!
//! Plain data that knows no client, clock or kernel. The feature `kube` adds what makes the kinds API
//! resources; without it everything here is serde structs and parsers.
#![warn(missing_docs)]

pub mod bridgenetwork;
pub mod condition;
pub mod digest;
pub mod duration;
pub mod error_chain;
pub mod ifname;
pub mod ipam;
pub mod ipblock;
#[cfg(feature = "kube")]
mod list_schema;
pub mod mac;
pub mod nad;
pub mod names;
pub mod nodenetwork;
pub mod pattern;
pub mod selection;
pub mod selector;

#[cfg(feature = "kube")]
pub use bridgenetwork::BridgeNetwork;
pub use bridgenetwork::{BridgeNetworkSpec, BridgeNetworkStatus};
pub use condition::{Condition, ConditionStatus};
pub use error_chain::ErrorChain;
pub use ifname::IfName;
#[cfg(feature = "kube")]
pub use ipblock::IPBlock;
pub use ipblock::{IPBlockSpec, IPBlockStatus};
pub use mac::Mac;
#[cfg(feature = "kube")]
pub use nad::NetworkAttachmentDefinition;
#[cfg(feature = "kube")]
pub use nodenetwork::NodeNetwork;
pub use nodenetwork::{Interface, LinkState, NetworkOnNode, NodeNetworkStatus, Vtep};
pub use pattern::{IfNamePattern, IfNamePatterns};
pub use selector::LabelSelector;

/// The API group of every kind of ours.
pub const GROUP: &str = "patchbay.dev";
/// The version of every kind of ours.
pub const VERSION: &str = "v1alpha1";
/// Where the programs run.
pub const NAMESPACE: &str = "patchbay-system";
/// The field manager of `patchbay node`.
pub const NODE_FIELD_MANAGER: &str = "patchbay.dev/node";
/// The field manager of `patchbay controller`.
pub const CONTROLLER_FIELD_MANAGER: &str = "patchbay.dev/controller";
/// What the alias of a link made by Patchbay begins with.
pub const LINK_ALIAS_PREFIX: &str = "patchbay/";

/// Every kind of ours, in the order in which the install manifest lists them.
#[cfg(feature = "kube")]
pub fn crds()
-> Vec<k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition> {
    use kube::CustomResourceExt as _;

    vec![BridgeNetwork::crd(), IPBlock::crd(), NodeNetwork::crd()]
}

#[cfg(test)]
#[cfg(feature = "kube")]
mod tests {
    use serde_json::Value;

    /// The schema of every kind, with the kind's name.
    fn schemas() -> Vec<(String, Value)> {
        let schema = |crd: &Value| crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone();
        let crds = super::crds().into_iter().map(|crd| serde_json::to_value(crd).unwrap());
        crds.map(|crd| (crd["spec"]["names"]["kind"].as_str().unwrap().to_owned(), schema(&crd))).collect()
    }

    #[test]
    fn schemas_know_only_formats_that_the_api_server_knows() {
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
    fn every_field_explains_itself() {
        fn silent(path: &str, value: &Value, found: &mut Vec<String>) {
            for (name, field) in value["properties"].as_object().into_iter().flatten() {
                let path = format!("{path}.{name}");
                if field["description"].as_str().is_none_or(str::is_empty) {
                    found.push(path.clone());
                }
                silent(&path, field, found);
                silent(&path, &field["items"], found);
            }
        }
        let mut found = Vec::new();
        for (kind, schema) in schemas() {
            for part in ["spec", "status"] {
                silent(&format!("{kind}.{part}"), &schema["properties"][part], &mut found);
            }
        }
        assert_eq!(found, Vec::<String>::new());
    }
}
