//! Leader election: which replica leads, and until when a leader may write.

pub mod election;
pub mod fence;
