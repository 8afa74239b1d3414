//! How bytes look: the protocols that Patchbay speaks, each a feature. Decides nothing and opens nothing.

#[cfg(feature = "cni")]
pub mod cni;
#[cfg(feature = "cri")]
pub mod cri;
#[cfg(feature = "socket")]
pub mod socket;

/// Every version of CNI that is spoken, oldest first.
pub const CNI_VERSIONS: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];
