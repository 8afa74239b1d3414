//! Builds rtnetlink requests.

use std::net::IpAddr;

use crate::message::{INET, INET6};

/// `NLM_F_REQUEST | NLM_F_ACK`
pub const CHANGE: u16 = 0x5;
/// `CHANGE | NLM_F_CREATE | NLM_F_EXCL`: fails with `EEXIST` if the object exists.
pub const CREATE: u16 = 0x605;
/// `NLA_F_NESTED`
const NESTED: u16 = 0x8000;

/// A request under construction. [`NetlinkRequest::finish`] sets its length and sequence number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetlinkRequest {
    bytes: Vec<u8>,
}

impl NetlinkRequest {
    /// A request of this message type, with the fixed header of its body.
    pub fn new(kind: u16, flags: u16, fixed: &[u8]) -> Self {
        let mut bytes = vec![0; 4];
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend([0; 8]);
        bytes.extend(fixed);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        Self { bytes }
    }

    /// Adds an attribute.
    #[must_use]
    pub fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
        self.bytes.extend(length.to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self
    }

    /// Adds a `u32` attribute.
    #[must_use]
    pub fn number(self, kind: u16, value: u32) -> Self {
        self.attribute(kind, &value.to_ne_bytes())
    }

    /// Adds a string attribute with its final NUL.
    #[must_use]
    pub fn text(self, kind: u16, text: &str) -> Self {
        self.attribute(kind, &[text.as_bytes(), &[0]].concat())
    }

    /// Adds a nested attribute, with an optional fixed header before the inner attributes.
    #[must_use]
    pub fn nested(mut self, kind: u16, fixed: &[u8], inner: impl FnOnce(Self) -> Self) -> Self {
        let start = self.bytes.len();
        self = self.attribute(kind | NESTED, fixed);
        self = inner(self);
        let length = u16::try_from(self.bytes.len() - start).unwrap_or(u16::MAX);
        if let Some(field) = self.bytes.get_mut(start..start + 2) {
            field.copy_from_slice(&length.to_ne_bytes());
        }
        self
    }

    /// The bytes to send.
    pub fn finish(mut self, sequence: u32) -> Vec<u8> {
        let length = u32::try_from(self.bytes.len()).unwrap_or(u32::MAX);
        for (at, value) in [(0, length), (8, sequence)] {
            if let Some(field) = self.bytes.get_mut(at..at + 4) {
                field.copy_from_slice(&value.to_ne_bytes());
            }
        }
        self.bytes
    }
}

/// `struct ifinfomsg`: the link, its flags, and the mask of flags to change.
pub fn link_header(index: u32, flags: u32, change: u32) -> [u8; 16] {
    let mut header = [0; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..12].copy_from_slice(&flags.to_ne_bytes());
    header[12..16].copy_from_slice(&change.to_ne_bytes());
    header
}

/// The family, the length in bits and the bytes of an address.
pub fn address_parts(address: IpAddr) -> (u8, u8, Vec<u8>) {
    match address {
        IpAddr::V4(address) => (INET, 32, address.octets().to_vec()),
        IpAddr::V6(address) => (INET6, 128, address.octets().to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message;

    #[test]
    fn a_nested_request_has_valid_lengths_and_padding() {
        let request = NetlinkRequest::new(16, CREATE, &link_header(7, 1, 1)).text(3, "br-blue").nested(
            18,
            &[],
            |info| info.text(1, "bridge").nested(2, &[], |data| data.number(1, 5)),
        );
        let bytes = request.finish(9);
        assert_eq!(bytes.len() % 4, 0);
        let [message] = message::parse_messages(&bytes).collect::<Vec<_>>()[..] else { panic!("{bytes:?}") };
        assert_eq!((message.kind, message.flags, message.sequence), (16, CREATE, 9));
        assert_eq!(message.body.len() + 16, bytes.len());
        let read = message::parse_link(message.body).unwrap();
        assert_eq!((read.index, read.name.as_str(), read.kind.as_deref()), (7, "br-blue", Some("bridge")));
    }
}
