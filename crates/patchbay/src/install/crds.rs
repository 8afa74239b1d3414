//! The CustomResourceDefinitions of Patchbay.

use serde_json::Value;

/// Every CustomResourceDefinition, in the order of `api`.
pub fn crds() -> Vec<Value> {
    api::crds()
        .iter()
        .map(|crd| {
            let mut crd = serde_json::to_value(crd).expect("a CustomResourceDefinition serializes");
            crd["metadata"]["labels"] = super::labels("api");
            crd
        })
        .collect()
}
