//! A real Kubernetes cluster on one Linux host, and support code for tests.
//!
//! A lab is a control plane and nodes. Each runs in its own set of Linux namespaces; programs of the host reach the API
//! server through one port on 127.0.0.1. A lab adds nothing to the host's network namespace, and `down` removes all of it.

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
pub mod kubevirt;
mod lab;
mod lab_record;
pub mod machine;
mod native_program;
mod node;
mod node_options;
mod operations;
pub mod paths;
mod pki;
pub mod plugin_call;
pub mod program;
mod progress;
mod rootfs;
mod runtime;
pub mod snapshot;
pub mod stall;
mod status;
mod switch;
pub mod tar;
pub mod test_namespace;
pub mod wait;

pub use init::ComponentState;
pub use lab::{Lab, Topology};
pub use machine::Machine;
pub use node_options::{Multus, NodeOptions, Runtime};
pub use operations::ComponentRef;
pub use paths::LabName;
pub use progress::print_progress;
pub use status::LabStatus;

/// Installs ring as the crypto provider of rustls; a second call has no effect.
pub fn install_crypto() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}
