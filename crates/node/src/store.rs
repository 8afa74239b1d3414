//! The durable state of the daemon on the node's disk. It knows files, not what they mean.
//!
//! - [`atomic`] replaces a file as a whole.
//! - [`records`] keeps one file per key, for state that is read and written key by key.
//! - [`journal`] appends lines with digests, for state that changes often and must be on disk before an answer.
//!
//! What returned successfully survives a crash and a power cut.

pub mod atomic;
pub mod journal;
pub mod records;
#[cfg(test)]
pub mod small_disk;
