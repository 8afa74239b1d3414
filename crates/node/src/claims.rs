//! Addresses that IPAMClaims have: which attachments get them, and when they are announced.
//!
//! [`ClaimLookup`] answers each ADD. On networks without persistent addresses it sends no request. [`Announcer`] announces
//! the addresses of a pod once no other pod has them any more, for example after a migration.

mod announce;
#[cfg(test)]
pub mod fake_api;
mod lookup;
mod metrics;
mod objects;
mod persistent;

pub use announce::{Announcer, AnnouncerTask, HolderSelector};
pub use lookup::{ClaimLookup, ClaimQuery, LOOKUP_TIMEOUT, ServedClaim};
pub use metrics::Metrics;
pub use persistent::{PersistentNads, persistent_nads};
