//! Address management: the addresses of a network, who has them, and how a node gets enough of them.
//!
//! The subnets of a network form a grid of equal blocks ([`BlockGrid`]). A node holds blocks and allocates their addresses
//! to pods; its [`Ledger`] records both. [`blocks::plan`] decides which blocks the node acquires and releases.

pub mod blocks;
mod grid;
mod ledger;
mod request;
#[cfg(test)]
mod tests;

pub use blocks::{
    BlockPlanInput, BlockStep, ObservedIpBlock, PendingRequests, Pool, RequestKind, abandoned, carries_boot,
    lending_candidate, network_status,
};
pub use grid::{BlockGrid, Family};
pub use ledger::{
    AddressInfo, AttachmentKey, BlockKey, Grant, Holding, Lease, Ledger, LedgerRecord, PodRef, Stage,
};
pub use request::{AddressRequest, AllocationError, Shortage};
