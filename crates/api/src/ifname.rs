//! The name of a Linux network interface.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A valid name of a Linux network interface.
///
/// ```
/// assert!("eth1".parse::<api::IfName>().is_ok());
/// assert!("../eth1".parse::<api::IfName>().is_err());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct IfName(String);

/// Why a text is not a valid interface name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The name is empty.
    #[error("an interface name cannot be empty")]
    Empty,
    /// The name is longer than the kernel allows.
    #[error("an interface name has at most {max} bytes, this one has {0}", max = IfName::MAX)]
    TooLong(usize),
    /// `.` or `..`.
    #[error("\".\" and \"..\" are not valid interface names")]
    Dots,
    /// A character that the kernel or Patchbay rejects.
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

/// Whether the kernel or Patchbay rejects this character.
///
/// The kernel (`dev_valid_name`) rejects `/`, `:` and white space, and treats `%` as a template. It allows control
/// characters; Patchbay rejects them because names appear in terminals, paths and sysctl names.
fn is_invalid(c: char) -> bool {
    matches!(c, '/' | ':' | '%') || c.is_whitespace() || c.is_control()
}

/// Whether the character contains the byte 0xA0, which the kernel treats as white space even inside UTF-8.
fn contains_kernel_space(c: char) -> bool {
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
        match text.chars().find(|&c| is_invalid(c) || contains_kernel_space(c)) {
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
    fn rejects_hostile_names_with_the_reason() {
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
    fn json_is_validated_too() {
        assert_eq!(serde_json::from_str::<IfName>("\"eth1\"").unwrap().as_str(), "eth1");
        assert!(serde_json::from_str::<IfName>("\"a/b\"").is_err());
    }
}
