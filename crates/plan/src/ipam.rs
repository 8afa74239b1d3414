//! Address management: the addresses of a network, who has them, and how a holder gets enough of them.
//!
//! The subnets of a network form a grid of equal blocks ([`BlockGrid`]). A holder, usually a node, has blocks and
//! allocates their addresses; its [`Ledger`] records both. [`blocks::plan`] decides the next steps of a holder. Each of
//! the other modules answers one question: when and which block to acquire ([`BlockSearch`]), what to borrow and how long
//! to wait ([`Borrowing`]), what to lend ([`LentChecks`]), what to release ([`IdleBlocks`]), what to trust
//! ([`Verification`]), what to report ([`StatusReports`]) and how long each may take ([`limits`]).

mod acquire;
pub mod blocks;
mod borrow;
mod claimed;
mod grid;
mod lease_report;
mod ledger;
mod lending;
pub mod limits;
mod pool;
mod reclaim;
mod request;
mod status;
#[cfg(test)]
mod tests;
mod verify;

pub(crate) use acquire::overlap;
pub use acquire::{
    AcquireError, AddressSource, BlockSearch, ExhaustedHint, NoFreeBlock, RequestedAddress, SearchStart,
    UnansweredCreates,
};
pub use blocks::{BlockPlanInput, BlockStep, ObservedIpBlock, PendingRequests, RequestKind, is_ours};
pub(crate) use borrow::is_spare;
pub use borrow::{BorrowFailure, BorrowOutcome, Borrowing, WaitingRequest, lending_candidate};
pub use claimed::LeaseClaim;
pub use grid::{BlockGrid, Family};
pub use lease_report::LeaseReport;
pub use ledger::{
    AddressInfo, AttachmentKey, BlockKey, Grant, Holding, Lease, Ledger, LedgerRecord, PodRef, Stage,
};
pub use lending::LentChecks;
pub use limits::{Contact, Timings};
pub use pool::Pool;
pub use reclaim::{IdleBlocks, abandoned};
pub use request::{AddressRequest, AllocationError, Shortage, validate};
pub use status::{StatusReports, network_status};
pub use verify::{UnverifiedBlock, Verification, carries_boot};
