//! Encodings of the protocols that Patchbay uses, one per feature. No policy and no I/O beyond a given socket.

#[cfg(feature = "cni")]
pub mod cni;
#[cfg(feature = "cri")]
pub mod cri;
#[cfg(feature = "socket")]
pub mod socket;

/// Supported CNI versions, oldest first.
pub const CNI_VERSIONS: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];
