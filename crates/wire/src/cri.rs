//! CRI, by which a container runtime is asked: the one question that is asked here, and of its answer what is used.
//! A reader skips the rest.

use prost::Message;

/// The method that lists the sandboxes of pods.
pub const LIST_POD_SANDBOX: &str = "/runtime.v1.RuntimeService/ListPodSandbox";

/// Asks for all sandboxes; what narrows the question down is left out.
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
    /// In nanoseconds since 1970.
    #[prost(int64, tag = "4")]
    pub created_at: i64,
}

/// The pod that a sandbox is of.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PodSandboxMetadata {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub uid: String,
    #[prost(string, tag = "3")]
    pub namespace: String,
    /// Counts the sandboxes of one pod.
    #[prost(uint32, tag = "4")]
    pub attempt: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum PodSandboxState {
    Ready = 0,
    NotReady = 1,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_answer_is_read_by_its_numbers_and_what_is_unknown_is_skipped() {
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

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            _ = ListPodSandboxResponse::decode(&bytes[..]);
        }
    }
}
