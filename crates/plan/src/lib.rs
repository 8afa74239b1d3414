//! What should happen: every rule of Patchbay as a pure function over plain types.
//!
//! Nothing here awaits, reads a clock, draws a random number or knows a client: whatever a rule needs is passed in.

pub mod attachment;
pub mod bridge;
pub mod certs;
pub mod clash;
pub mod condition;
pub mod ipam;
pub mod lease;
pub mod network;
pub mod nodenetwork;
pub mod users;
