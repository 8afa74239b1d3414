//! Leader election: which replica leads, and until when a leader may write (`client::fence`).

pub mod election;
