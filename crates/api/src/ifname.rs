//! The name of a Linux network interface, as a user may write it.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A name that Linux takes for a network interface.
///
/// ```
/// assert!("eth1".parse::<api::IfName>().is_ok());
/// assert!("../eth1".parse::<api::IfName>().is_err());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct IfName(String);

/// Why a text is no interface name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Nothing there.
    #[error("an interface name cannot be empty")]
    Empty,
    /// Longer than the kernel's buffer.
    #[error("an interface name has at most {max} bytes, this one has {0}", max = IfName::MAX)]
    TooLong(usize),
    /// A name that means a directory.
    #[error("\".\" and \"..\" are no interface names")]
    Dots,
    /// A character that the kernel refuses, or that would not survive the way there.
    #[error("an interface name cannot contain {0:?}")]
    Character(char),
}

impl IfName {
    /// The longest name in bytes: `IFNAMSIZ` less the final NUL.
    pub const MAX: usize = 15;

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether the kernel or we refuse this character.
///
/// The kernel (`dev_valid_name`) refuses `/`, `:` and white space, and takes `%` for a template. Control
/// characters it allows; they are refused here because they end up in terminals, paths and sysctl names.
fn refused(c: char) -> bool {
    matches!(c, '/' | ':' | '%') || c.is_whitespace() || c.is_control()
}

/// The byte 0xA0 is white space to the kernel, also inside a UTF-8 character.
fn kernel_space(c: char) -> bool {
    c.encode_utf8(&mut [0; 4]).bytes().any(|byte| byte == 0xa0)
}

impl FromStr for IfName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "" => return Err(Error::Empty),
            "." | ".." => return Err(Error::Dots),
            _ if text.len() > Self::MAX => return Err(Error::TooLong(text.len())),
            _ => {}
        }
        match text.chars().find(|&c| refused(c) || kernel_space(c)) {
            Some(c) => Err(Error::Character(c)),
            None => Ok(Self(text.to_owned())),
        }
    }
}

impl TryFrom<String> for IfName {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl From<IfName> for String {
    fn from(name: IfName) -> Self {
        name.0
    }
}

impl fmt::Display for IfName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<IfName, Error> {
        text.parse()
    }

    #[test]
    fn accepts_what_the_kernel_accepts() {
        for name in
            ["e", "eth1", "br-blue", "enp3s0f1np1", "vlan.100", "bond0.4000", "ethø", "123456789012345"]
        {
            assert_eq!(parse(name).map(String::from), Ok(name.to_owned()));
        }
    }

    #[test]
    fn refuses_hostile_names_and_says_why() {
        assert_eq!(parse(""), Err(Error::Empty));
        assert_eq!(parse("."), Err(Error::Dots));
        assert_eq!(parse(".."), Err(Error::Dots));
        assert_eq!(parse("1234567890123456"), Err(Error::TooLong(16)));
        assert_eq!(parse("ääääääää"), Err(Error::TooLong(16)));
        for (name, c) in [
            ("../eth0", '/'),
            ("eth 0", ' '),
            ("eth\t0", '\t'),
            ("eth0\n", '\n'),
            ("eth0\0", '\0'),
            ("eth0:1", ':'),
            ("eth%d", '%'),
            ("\u{1b}[31m", '\u{1b}'),
            ("eth\u{a0}", '\u{a0}'),
            ("eth\u{2003}", '\u{2003}'),
            ("ethà", 'à'),
        ] {
            assert_eq!(parse(name), Err(Error::Character(c)), "{name:?}");
        }
    }

    #[test]
    fn json_goes_through_the_same_door() {
        assert_eq!(serde_json::from_str::<IfName>("\"eth1\"").unwrap().as_str(), "eth1");
        assert!(serde_json::from_str::<IfName>("\"a/b\"").is_err());
    }
}
