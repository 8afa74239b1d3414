//! `metav1.Condition`, without the client.
//!
//! The same fields as the type of Kubernetes, so that the rules can speak of conditions and still build
//! without a Kubernetes crate.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// One aspect of an object's state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// What the condition is about, such as Ready.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 316)))]
    pub r#type: String,
    /// Whether it holds.
    pub status: ConditionStatus,
    /// Why, in one word for programs.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 1024)))]
    pub reason: String,
    /// Why, and what to do about it, for people.
    #[cfg_attr(feature = "kube", schemars(length(max = 32768)))]
    pub message: String,
    /// When the status last changed.
    #[cfg_attr(feature = "kube", schemars(with = "String", extend("format" = "date-time")))]
    pub last_transition_time: Timestamp,
    /// The generation of the object that this condition speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub observed_generation: Option<i64>,
}

/// Whether a condition holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum ConditionStatus {
    /// It holds.
    True,
    /// It does not hold.
    False,
    /// Nobody can say.
    Unknown,
}
