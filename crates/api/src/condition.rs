//! `metav1.Condition`, without a dependency on a Kubernetes crate.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// One aspect of the current state of an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// The type of the condition, such as Ready.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 316)))]
    pub r#type: String,
    /// The status of the condition: True, False or Unknown.
    pub status: ConditionStatus,
    /// The reason for the current status, as a CamelCase word for programs.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 1024)))]
    pub reason: String,
    /// The details of the reason and what to do about it, for people.
    #[cfg_attr(feature = "kube", schemars(length(max = 32768)))]
    pub message: String,
    /// The time at which the status last changed.
    #[cfg_attr(feature = "kube", schemars(with = "String", extend("format" = "date-time")))]
    pub last_transition_time: Timestamp,
    /// The generation of the object for which the condition was computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(range(min = 0)))]
    pub observed_generation: Option<i64>,
}

/// The status of a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub enum ConditionStatus {
    /// The condition holds.
    True,
    /// The condition does not hold.
    False,
    /// It cannot be determined whether the condition holds.
    Unknown,
}
