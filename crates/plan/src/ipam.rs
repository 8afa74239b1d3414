//! Addresses: which there are, who has them, and what a node does to have enough of them.
//!
//! The subnets of a network are a grid of equal blocks ([`BlockGrid`]). A node holds blocks and hands out their addresses; what
//! it holds and who has what is its [`Ledger`]. What it does next about its blocks is [`keep`]'s to say.

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
