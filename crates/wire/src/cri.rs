//! The part of the Container Runtime Interface (CRI) v1 that Patchbay uses. Decoding skips all other fields.

mod cni_dirs;
mod sandbox_info;

use std::collections::BTreeMap;

pub use cni_dirs::CniDirs;
pub use prost::Message;
pub use sandbox_info::{InfoError, SandboxInfo, SandboxNetwork};

/// The method that lists pod sandboxes.
pub const LIST_POD_SANDBOX: &str = "/runtime.v1.RuntimeService/ListPodSandbox";

/// Lists all sandboxes; the optional filter is not used.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct ListPodSandboxRequest {}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct ListPodSandboxResponse {
    #[prost(message, repeated, tag = "1")]
    pub items: Vec<PodSandbox>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct PodSandbox {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(message, optional, tag = "2")]
    pub metadata: Option<PodSandboxMetadata>,
    #[prost(enumeration = "PodSandboxState", tag = "3")]
    pub state: i32,
    /// Unix time in nanoseconds.
    #[prost(int64, tag = "4")]
    pub created_at: i64,
}

/// The pod of a sandbox.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PodSandboxMetadata {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub uid: String,
    #[prost(string, tag = "3")]
    pub namespace: String,
    /// Number of the sandbox among those of the pod.
    #[prost(uint32, tag = "4")]
    pub attempt: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum PodSandboxState {
    Ready = 0,
    NotReady = 1,
}

/// The method that returns the status of one sandbox.
pub const POD_SANDBOX_STATUS: &str = "/runtime.v1.RuntimeService/PodSandboxStatus";

#[derive(Clone, PartialEq, Eq, Message)]
pub struct PodSandboxStatusRequest {
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: String,
    /// Whether the response has `info`.
    #[prost(bool, tag = "2")]
    pub verbose: bool,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct PodSandboxStatusResponse {
    #[prost(message, optional, tag = "1")]
    pub status: Option<PodSandboxStatus>,
    /// What the runtime says in its own format: see [`SandboxInfo`].
    #[prost(btree_map = "string, string", tag = "2")]
    pub info: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct PodSandboxStatus {
    #[prost(enumeration = "PodSandboxState", tag = "3")]
    pub state: i32,
    #[prost(message, optional, tag = "6")]
    pub linux: Option<LinuxPodSandboxStatus>,
    /// The name of the runtime class' handler; empty for the default one.
    #[prost(string, tag = "9")]
    pub runtime_handler: String,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct LinuxPodSandboxStatus {
    #[prost(message, optional, tag = "1")]
    pub namespaces: Option<Namespace>,
}

/// The namespaces of a sandbox.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Namespace {
    #[prost(message, optional, tag = "2")]
    pub options: Option<NamespaceOption>,
}

#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct NamespaceOption {
    #[prost(enumeration = "NamespaceMode", tag = "1")]
    pub network: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum NamespaceMode {
    Pod = 0,
    Container = 1,
    /// The namespace of the node.
    Node = 2,
    Target = 3,
}

/// The method that returns the status of the runtime.
pub const STATUS: &str = "/runtime.v1.RuntimeService/Status";

#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct StatusRequest {
    /// Whether the response has `info`.
    #[prost(bool, tag = "1")]
    pub verbose: bool,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct StatusResponse {
    /// What the runtime says in its own format: see [`CniDirs`].
    #[prost(btree_map = "string, string", tag = "2")]
    pub info: BTreeMap<String, String>,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_response_is_decoded_by_field_number_and_unknown_fields_are_skipped() {
        let bytes = b"\x0a\x24\
            \x0a\x02s1\
            \x12\x0e\x0a\x03web\x12\x01u\x1a\x02ns\x20\x03\
            \x18\x01\
            \x20\x07\
            \x2a\x04\x0a\x00\x12\x00\
            \x3a\x04runc";
        let read = ListPodSandboxResponse::decode(&bytes[..]).unwrap();
        let metadata =
            PodSandboxMetadata { name: "web".into(), uid: "u".into(), namespace: "ns".into(), attempt: 3 };
        let state = PodSandboxState::NotReady.into();
        let sandbox = PodSandbox { id: "s1".into(), metadata: Some(metadata), state, created_at: 7 };
        assert_eq!(read.items, [sandbox]);
        assert_eq!(ListPodSandboxRequest {}.encode_to_vec(), b"");
    }

    #[test]
    fn the_network_mode_of_a_sandbox_is_decoded() {
        let bytes = b"\x0a\x0e\x0a\x02s1\x32\x08\x0a\x06\x12\x04\x08\x02\x10\x01";
        let response = PodSandboxStatusResponse::decode(&bytes[..]).unwrap();
        let options = NamespaceOption { network: NamespaceMode::Node.into() };
        let namespaces = Some(Namespace { options: Some(options) });
        let linux = Some(LinuxPodSandboxStatus { namespaces });
        assert_eq!(response.status, Some(PodSandboxStatus { linux, ..PodSandboxStatus::default() }));
        let request = PodSandboxStatusRequest { pod_sandbox_id: "s1".into(), verbose: false };
        assert_eq!(request.encode_to_vec(), b"\x0a\x02s1");
    }

    #[test]
    fn a_verbose_status_is_decoded_by_field_number() {
        let request = PodSandboxStatusRequest { pod_sandbox_id: "s1".into(), verbose: true };
        assert_eq!(request.encode_to_vec(), b"\x0a\x02s1\x10\x01");
        let bytes = b"\x0a\x0c\x0a\x02s1\x18\x01\x4a\x04runc\x12\x0a\x0a\x04info\x12\x02{}";
        let response = PodSandboxStatusResponse::decode(&bytes[..]).unwrap();
        let status = response.status.unwrap();
        assert_eq!((status.state(), status.runtime_handler.as_str()), (PodSandboxState::NotReady, "runc"));
        assert_eq!(response.info, BTreeMap::from([("info".to_owned(), "{}".to_owned())]));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_make_the_decoder_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            _ = ListPodSandboxResponse::decode(&bytes[..]);
            _ = PodSandboxStatusResponse::decode(&bytes[..]);
        }
    }
}
