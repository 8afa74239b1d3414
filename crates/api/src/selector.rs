//! `metav1.LabelSelector`, without a dependency on a Kubernetes crate.

mod text;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use text::Error;

#[cfg(feature = "kube")]
use crate::list_schema;

/// Selects objects by their labels. All requirements must match; an empty selector selects every object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct LabelSelector {
    /// The labels that an object must have, with their values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "kube", schemars(extend("maxProperties" = 32)))]
    pub match_labels: BTreeMap<String, String>,
    /// Requirements on labels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::atomic(32)))]
    pub match_expressions: Vec<LabelSelectorRequirement>,
}

/// A requirement on one label.
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
    /// The key of the label.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 317)))]
    pub key: String,
    /// The operator: In, NotIn, Exists or DoesNotExist.
    pub operator: LabelSelectorOperator,
    /// The values for In and NotIn. Must be empty for Exists and DoesNotExist.
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

/// The operator of a requirement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum LabelSelectorOperator {
    /// The label has one of the values.
    In,
    /// The label has none of the values, or does not exist.
    NotIn,
    /// The label exists.
    Exists,
    /// The label does not exist.
    DoesNotExist,
}

impl LabelSelector {
    /// Whether an object with these labels matches.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.matches_by(|key| labels.get(key).map(String::as_str))
    }

    /// Whether an object matches whose labels this function looks up.
    pub fn matches_by<'a>(&self, label: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.match_labels.iter().all(|(key, value)| label(key) == Some(value))
            && self.match_expressions.iter().all(|requirement| requirement.matches(label(&requirement.key)))
    }
}

impl LabelSelectorRequirement {
    fn matches(&self, value: Option<&str>) -> bool {
        let included = value.is_some_and(|value| self.values.iter().any(|one| one == value));
        match self.operator {
            LabelSelectorOperator::In => included,
            LabelSelectorOperator::NotIn => !included,
            LabelSelectorOperator::Exists => value.is_some(),
            LabelSelectorOperator::DoesNotExist => value.is_none(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_like_a_kubernetes_label_selector() {
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
