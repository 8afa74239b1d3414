//! Reconciles the address blocks of this node: acquires enough of them for its pods and releases the others.
//!
//! `plan::ipam` decides. [`BlockController`] observes and applies, one API request at a time: `acquire` gets blocks,
//! `borrow` single addresses of other nodes, `lookup` finds blocks that the watch does not show, `reclaim` releases what
//! is no longer needed, `ipblocks` has the API requests, `observed` and `rejections` remember what the API server said.

mod acquire;
mod borrow;
mod controller;
mod ipblocks;
mod lookup;
mod observed;
mod reclaim;
mod rejections;

pub use controller::BlockController;
