//! The Patchbay controller: the leader's control loops, and the admission webhook that every replica serves.
//!
//! [`run`] runs one replica with the caller's client and cancellation token. The rules are in `plan`; this crate
//! watches the API server, asks `plan` for decisions and applies them.

mod args;
mod blocks;
mod cache;
mod claims;
mod error;
mod leader;
mod lease;
mod live_reads;
mod metrics;
mod networks;
mod nodelabels;
mod queue;
mod run;
mod services;
mod task;
mod watch;
mod webhook;

pub use args::Args;
pub use error::Error;
pub use run::run;
pub use webhook::pod_configuration;
