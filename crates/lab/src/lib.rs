//! A real Kubernetes on one Linux machine, and the support that tests use.
//!
//! A lab is a control plane and nodes, each a set of namespaces of its own, all reachable through one port on
//! 127.0.0.1. Nothing of it appears in this machine's network, and `down` leaves nothing behind.

mod address;
pub mod audit;
mod bootstrap;
mod cgroup;
mod control_plane;
mod digest;
mod dump;
pub mod forward;
pub mod image;
mod init;
mod lab;
pub mod machine;
mod node;
mod pki;
pub mod place;
mod power;
pub mod program;
mod progress;
mod root;
pub mod snapshot;
mod status;
mod switch;
pub mod tar;
pub mod test_namespace;
pub mod wait;

pub use init::State;
pub use lab::{Lab, Topology};
pub use machine::Machine;
pub use place::Name;
pub use power::Target;
pub use progress::print_progress;
pub use status::Status;

/// One crypto for everything; a second call changes nothing.
pub fn install_crypto() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}
