//! The Kubernetes client code that the controller and the node daemon share. It decides nothing.
//!
//! | Module | Content |
//! |---|---|
//! | [`request`] | one request: deadline, fence, conflicts, counted failures |
//! | [`fence`] | until when a leader may write |
//! | [`watch`] | list and watch of a kind, as a stream or as complete lists |
//! | [`decode`] | tolerant decoding of objects into the fields that are used |
//! | [`retry`] | exponential backoff |
//! | [`expectations`] | own writes that the watch has not delivered yet |
//! | [`events`] | Kubernetes Events about any object |
//! | [`json_patch`] | JSON patches that test strings |
//!
//! `plan::condition::ConditionDraft` builds conditions: they are decided in `plan`, without a client.

pub mod decode;
pub mod events;
pub mod expectations;
pub mod fence;
pub mod json_patch;
pub mod request;
pub mod retry;
#[cfg(test)]
mod testing;
pub mod watch;
