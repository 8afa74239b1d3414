//! The webhook's certificates: created and rotated by the leader, served by every replica.

pub mod ca_bundle;
mod clock;
pub mod reload;
pub mod rotate;
pub mod secret;
pub mod x509;
