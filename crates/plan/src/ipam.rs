//! Addresses: which there are, who has them, and what a node does to have enough of them.
//!
//! The subnets of a network are a grid of equal blocks ([`Space`]). A node holds blocks and hands out their addresses; what
//! it holds and who has what is its [`Ledger`]. What it does next about its blocks is [`keep`]'s to say.

mod ask;
mod keep;
mod ledger;
mod space;
#[cfg(test)]
mod tests;

pub use ask::{Ask, Lack, Refusal};
pub use keep::{Object, Plea, Rules, Step, View, Wants, abandoned, candidate, keep, network_status, spare};
pub use ledger::{Block, Grant, Holding, Lease, Ledger, Place, Pod, Record, Stage, Told};
pub use space::{Family, Space};
