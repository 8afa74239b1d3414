//! The cluster side of Patchbay: one leader's loops, and the admission webhook that every replica serves.
//!
//! [`run`] is one replica, with a client and a stop of the caller's. Rules are in `plan`; this crate watches, asks them and writes.

mod admission;
mod args;
mod authority;
mod cache;
mod call;
mod certificate;
mod clock;
mod configuration;
mod connection;
mod duration;
mod election;
mod error;
mod http;
mod live_reads;
mod metrics;
mod networks;
mod run;
mod secret;
mod serving;
mod tenure;
mod watch;

pub use args::Args;
pub use error::Error;
pub use run::run;
