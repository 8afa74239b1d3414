//! `metav1.LabelSelector`, without the client.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

#[cfg(feature = "kube")]
use crate::list_schema;

/// Which objects are meant, by their labels. All that is said must hold; nothing said means every object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct LabelSelector {
    /// Labels that must have exactly these values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "kube", schemars(extend("maxProperties" = 32)))]
    pub match_labels: BTreeMap<String, String>,
    /// Conditions on labels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::atomic(32)))]
    pub match_expressions: Vec<LabelSelectorRequirement>,
}

/// A condition on one label.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[cfg_attr(
    feature = "kube",
    schemars(extend("x-kubernetes-validations" = [{
        "rule": "self.operator in ['In', 'NotIn'] ? has(self.values) && size(self.values) > 0 : !has(self.values) || size(self.values) == 0",
        "message": "In and NotIn need values, Exists and DoesNotExist take none",
    }]))
)]
#[serde(rename_all = "camelCase")]
pub struct LabelSelectorRequirement {
    /// The label.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 317)))]
    pub key: String,
    /// How the label is compared.
    pub operator: LabelSelectorOperator,
    /// The values that In and NotIn compare with.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(with = "Vec<LabelValue>", transform = list_schema::atomic(64)))]
    pub values: Vec<String>,
}

/// The value of a label.
#[cfg(feature = "kube")]
#[derive(schemars::JsonSchema)]
#[schemars(transparent)]
#[expect(dead_code, reason = "only its schema is used")]
struct LabelValue(#[schemars(length(max = 63))] String);

/// How a label is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum LabelSelectorOperator {
    /// The label has one of the values.
    In,
    /// The label has none of the values, or is missing.
    NotIn,
    /// The label is there.
    Exists,
    /// The label is missing.
    DoesNotExist,
}

impl LabelSelector {
    /// Whether an object with these labels is meant.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        let has = |(key, value): (&String, &String)| labels.get(key) == Some(value);
        self.match_labels.iter().all(has) && self.match_expressions.iter().all(|one| one.matches(labels))
    }
}

impl LabelSelectorRequirement {
    fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        let value = labels.get(&self.key);
        let among = value.is_some_and(|value| self.values.contains(value));
        match self.operator {
            LabelSelectorOperator::In => among,
            LabelSelectorOperator::NotIn => !among,
            LabelSelectorOperator::Exists => value.is_some(),
            LabelSelectorOperator::DoesNotExist => value.is_none(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_selector_means_what_kubernetes_means_by_it() {
        let labels = BTreeMap::from([("zone".to_owned(), "a".to_owned())]);
        for (text, matches) in [
            ("{}", true),
            (r#"{"matchLabels": {"zone": "a"}}"#, true),
            (r#"{"matchLabels": {"zone": "b"}}"#, false),
            (r#"{"matchLabels": {"rack": "a"}}"#, false),
            (r#"{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b", "a"]}]}"#, true),
            (r#"{"matchExpressions": [{"key": "rack", "operator": "In", "values": ["a"]}]}"#, false),
            (r#"{"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["a"]}]}"#, false),
            (r#"{"matchExpressions": [{"key": "rack", "operator": "NotIn", "values": ["a"]}]}"#, true),
            (r#"{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}"#, true),
            (r#"{"matchExpressions": [{"key": "zone", "operator": "DoesNotExist"}]}"#, false),
            (
                r#"{"matchLabels": {"zone": "a"}, "matchExpressions": [{"key": "rack", "operator": "Exists"}]}"#,
                false,
            ),
        ] {
            let selector: LabelSelector = serde_json::from_str(text).unwrap();
            assert_eq!(selector.matches(&labels), matches, "{text}");
        }
    }
}
