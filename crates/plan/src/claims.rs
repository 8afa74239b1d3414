//! IPAMClaims: the addresses that virtual machines keep over restart, migration and hot-plug.
//!
//! [`machine::plan`] decides which claims a virtual machine has, and which network each is for. [`allocate::plan`] reserves
//! addresses for the claims of one network in the IPBlocks of the holder `ipamclaims/patchbay`, [`publish::status`] copies
//! them to the claims, and [`release::due`] finds those that nothing needs any more. [`mutate`] and [`validate`] answer the
//! webhooks, [`serve`] decides at CNI ADD.
//!
//! `status.claims` of an IPBlock is authoritative for an address; `status.ips` of a claim is a copy of it.

pub mod allocate;
pub mod facts;
mod lend;
pub mod machine;
pub mod mutate;
pub mod names;
mod owner;
mod place;
pub mod publish;
pub mod release;
pub mod resolve;
pub mod serve;
pub mod shown;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
mod unplug;
pub mod validate;

pub use allocate::{AllocatorInput, AllocatorPlan, Failure, Reserved, Wanted};
pub use facts::{
    Attached, ClaimOptions, ClaimPod, ClaimSchema, ClaimState, MachineNetwork, NadLookup, ObjectKey,
    OwnerKind, OwnerRef, PodElement, VmFacts, VmiFacts,
};
pub use machine::{ClaimEvent, ClaimStep, MachineInput, MachinePlan};
pub use mutate::MutateInput;
pub use publish::StatusWrite;
pub use resolve::{FailureReport, ReservedIn, Resolution};
