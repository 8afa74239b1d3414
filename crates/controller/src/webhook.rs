//! The webhook that every replica serves: the listeners, the admission decisions and the certificates.

pub mod admission;
pub mod certs;
mod connection;
pub mod pod_configuration;
pub mod server;
mod slots;
