//! The addresses of this node: which attachment has which, and the blocks that they come from.
//!
//! [`Ipam`] (`allocator`) serves an ADD from blocks that the node holds, without a request to the API server, and journals
//! it (`journal`). [`BlockController`] (`blocks`) acquires enough blocks; `holdings` is what it sees of [`Ipam`]. `gc`
//! releases the leases of sandboxes that no longer exist.

mod allocator;
mod blocks;
#[cfg(test)]
mod disk_tests;
mod gc;
mod holdings;
mod journal;
mod metrics;
mod replies;
mod waiters;

pub use plan::ipam::{
    Timings,
    limits::{OFFLINE_GRACE, OFFLINE_LIMIT},
};

pub use self::{
    allocator::{CallerWait, Ipam, NumberedReport},
    blocks::BlockController,
    gc::{ListSandboxes, SandboxFilter, uptime},
    journal::Error as JournalError,
    metrics::Metrics,
};
