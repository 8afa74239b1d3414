//! Every decision of Patchbay as a pure function over plain types.
//!
//! Nothing here awaits, reads a clock, draws a random number or knows a client: callers pass in what a decision needs.

pub mod attachment;
pub mod bridge;
pub mod certs;
pub mod claims;
pub mod condition;
pub mod conflict;
pub mod hotplug;
pub mod ipam;
pub mod lease;
pub mod network;
pub mod nodenetwork;
pub mod services;
pub mod shared_map;
pub mod users;
