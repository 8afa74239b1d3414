//! The CNI errors of calls that get no address.

use api::ErrorChain;
use plan::ipam::{AllocationError, Contact};
use wire::cni::{Code, Error};

use super::JournalError;

pub fn rejection(network: &str, error: &AllocationError) -> Error {
    let code = match error {
        AllocationError::InUse { .. } | AllocationError::Lent(_) => Code::TryAgainLater,
        AllocationError::OutsideSubnets(_)
        | AllocationError::Reserved(_)
        | AllocationError::PrefixLength { .. }
        | AllocationError::SameFamily(..)
        | AllocationError::OtherAddress { .. } => Code::InvalidConfig,
    };
    Error::new(code, format!("network {network:?}: {error}"))
}

/// The reply to a call whose change is not on disk.
pub fn not_recorded(error: &JournalError) -> Error {
    unwritable(&ErrorChain(error).to_string())
}

pub fn unwritable(problem: &str) -> Error {
    let msg = format!(
        "the allocation cannot be recorded on this node: {problem}; free disk space on the node, or make the directory writable"
    );
    Error::new(Code::Io, msg)
}

/// The reply to an ADD whose addresses of a claim the NodeNetwork does not list in time.
pub fn unpublished(network: &str) -> Error {
    let msg = format!(
        "the NodeNetwork of this node does not list the addresses of the IPAMClaim on network {network:?} yet; the kubelet retries. \
        If this goes on, see the log of the patchbay node daemon for why it cannot write the NodeNetwork"
    );
    Error::new(Code::TryAgainLater, msg)
}

pub fn offline_error(contact: Contact) -> Error {
    let msg = match contact {
        Contact::Never => "the patchbay node daemon has not yet read its address blocks from the API server",
        _ => {
            "the patchbay node daemon has lost the API server, so another node may hold its address blocks by now: no new \
            addresses are allocated until it is back"
        }
    };
    Error::new(Code::TryAgainLater, msg)
}

pub fn timeout_message(network: &str, contact: Contact) -> String {
    match contact {
        Contact::Now => {
            format!("no address of network {network:?} became available in time; the kubelet retries")
        }
        _ => offline_error(contact).msg,
    }
}
