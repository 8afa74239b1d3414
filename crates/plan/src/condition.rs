//! Conditions of every kind that Patchbay writes.

use api::{Condition, ConditionStatus};
use jiff::Timestamp;

/// A condition without its transition time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConditionDraft {
    pub kind: &'static str,
    pub status: ConditionStatus,
    pub reason: &'static str,
    pub message: String,
}

impl ConditionDraft {
    pub fn new(kind: &'static str, holds: bool, reason: &'static str, message: impl Into<String>) -> Self {
        let status = if holds { ConditionStatus::True } else { ConditionStatus::False };
        Self { kind, status, reason, message: message.into() }
    }

    pub fn holds(&self) -> bool {
        self.status == ConditionStatus::True
    }

    /// Completes the condition. The transition time moves only when the status differs from that in `old`.
    pub fn into_condition(
        self,
        old: Option<&Condition>,
        now: Timestamp,
        observed_generation: Option<i64>,
    ) -> Condition {
        let since = old.filter(|old| old.status == self.status).map_or(now, |old| old.last_transition_time);
        Condition {
            r#type: self.kind.to_owned(),
            status: self.status,
            reason: self.reason.to_owned(),
            message: self.message,
            // Kubernetes stores whole seconds; the API server would drop the rest.
            last_transition_time: Timestamp::from_second(since.as_second()).unwrap_or(since),
            observed_generation,
        }
    }
}
