//! A MAC address.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A MAC address, written in lower case with colons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Mac([u8; 6]);

/// Why a text is not a MAC address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a MAC address; write six pairs of hexadecimal digits, such as 02:00:5e:10:00:01")]
pub struct Error(String);

impl Mac {
    /// The six bytes.
    pub fn octets(self) -> [u8; 6] {
        self.0
    }
}

impl From<[u8; 6]> for Mac {
    fn from(octets: [u8; 6]) -> Self {
        Self(octets)
    }
}

impl FromStr for Mac {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let invalid = || Error(text.chars().take(32).collect());
        let mut octets = [0; 6];
        let mut pairs = text.split([':', '-']);
        for octet in &mut octets {
            let pair = pairs.next().ok_or_else(invalid)?;
            // from_str_radix accepts a sign, a MAC address must not have one.
            if pair.len() != 2 || !pair.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(invalid());
            }
            *octet = u8::from_str_radix(pair, 16).map_err(|_| invalid())?;
        }
        if pairs.next().is_some() {
            return Err(invalid());
        }
        Ok(Self(octets))
    }
}

impl TryFrom<String> for Mac {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl From<Mac> for String {
    fn from(mac: Mac) -> Self {
        mac.to_string()
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, octet) in self.0.iter().enumerate() {
            write!(f, "{}{octet:02x}", if index == 0 { "" } else { ":" })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_notation_is_normalized() {
        for text in ["02:00:5e:10:00:0A", "02-00-5E-10-00-0a"] {
            assert_eq!(text.parse::<Mac>().unwrap().to_string(), "02:00:5e:10:00:0a");
        }
    }

    #[test]
    fn rejects_text_that_is_not_a_mac_address() {
        for text in [
            "",
            "02:00:5e:10:00",
            "02:00:5e:10:00:0a:0b",
            "2:0:5e:10:0:a",
            "+2:00:5e:10:00:0a",
            "é:00:5e:10:00:0a",
        ] {
            assert!(text.parse::<Mac>().is_err(), "{text:?}");
        }
    }
}
