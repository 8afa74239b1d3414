//! Requests that change something: their bytes, piece by piece.

use std::net::IpAddr;

use crate::message::{INET, INET6};

/// `NLM_F_REQUEST | NLM_F_ACK`
pub const CHANGE: u16 = 0x5;
/// `CHANGE | NLM_F_CREATE | NLM_F_EXCL`: fails if it is there.
pub const CREATE: u16 = 0x605;
/// `NLA_F_NESTED`
const NESTED: u16 = 0x8000;

/// A request under construction. The sequence number is filled in when it is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    bytes: Vec<u8>,
}

impl Request {
    /// A request of this kind whose body begins with the fixed part.
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

    /// Adds a number.
    #[must_use]
    pub fn number(self, kind: u16, value: u32) -> Self {
        self.attribute(kind, &value.to_ne_bytes())
    }

    /// Adds text with its final NUL.
    #[must_use]
    pub fn text(self, kind: u16, text: &str) -> Self {
        self.attribute(kind, &[text.as_bytes(), &[0]].concat())
    }

    /// Adds an attribute that holds others, and before them possibly a fixed part.
    #[must_use]
    pub fn nested(mut self, kind: u16, fixed: &[u8], inner: impl FnOnce(Self) -> Self) -> Self {
        let start = self.bytes.len();
        self = self.attribute(kind | NESTED, fixed);
        self = inner(self);
        let length = u16::try_from(self.bytes.len() - start).unwrap_or(u16::MAX);
        if let Some(place) = self.bytes.get_mut(start..start + 2) {
            place.copy_from_slice(&length.to_ne_bytes());
        }
        self
    }

    /// The bytes to send.
    pub fn finish(mut self, sequence: u32) -> Vec<u8> {
        let length = u32::try_from(self.bytes.len()).unwrap_or(u32::MAX);
        for (at, value) in [(0, length), (8, sequence)] {
            if let Some(place) = self.bytes.get_mut(at..at + 4) {
                place.copy_from_slice(&value.to_ne_bytes());
            }
        }
        self.bytes
    }
}

/// `struct ifinfomsg`: the link, its flags and which of them are meant.
pub fn link_header(index: u32, flags: u32, change: u32) -> [u8; 16] {
    let mut header = [0; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..12].copy_from_slice(&flags.to_ne_bytes());
    header[12..16].copy_from_slice(&change.to_ne_bytes());
    header
}

/// An address as the kernel has it: its family, how many bits it has, and its bytes.
pub fn wire(address: IpAddr) -> (u8, u8, Vec<u8>) {
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
    fn lengths_and_padding_are_the_kernels() {
        let request =
            Request::new(16, CREATE, &link_header(7, 1, 1))
                .text(3, "br-blue")
                .nested(18, &[], |info| info.text(1, "bridge").nested(2, &[], |data| data.number(1, 5)));
        let bytes = request.finish(9);
        assert_eq!(bytes.len() % 4, 0);
        let [message] = message::messages(&bytes).collect::<Vec<_>>()[..] else { panic!("{bytes:?}") };
        assert_eq!((message.kind, message.flags, message.sequence), (16, CREATE, 9));
        assert_eq!(message.body.len() + 16, bytes.len());
        let read = message::link(message.body).unwrap();
        assert_eq!((read.index, read.name.as_str(), read.kind.as_deref()), (7, "br-blue", Some("bridge")));
    }
}
