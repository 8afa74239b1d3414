//! The Container Network Interface, <https://www.cni.dev/docs/spec/>: requests of a runtime, and results in every version.

mod config;
mod output;
mod result;

use std::{fmt, str::FromStr};

use serde_json::{Value, json};

pub use config::{Args, Attachment, Config, Ipam, Pod};
pub use output::PluginError;
pub use result::{Dns, Interface, Ip, Route, Success};

/// A CNI command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verb {
    Add,
    Del,
    Check,
    Status,
    Gc,
    Version,
}

impl Verb {
    /// The first CNI version with this command.
    pub fn since(self) -> Version {
        match self {
            Self::Add | Self::Del | Self::Version => Version::V0_1_0,
            Self::Check => Version::V0_4_0,
            Self::Status | Self::Gc => Version::V1_1_0,
        }
    }

    /// The value of `CNI_COMMAND`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Status => "STATUS",
            Self::Gc => "GC",
            Self::Version => "VERSION",
        }
    }

    /// Fails if the configuration's version does not have this command.
    pub fn allowed_in(self, version: Version) -> Result<(), Error> {
        if version >= self.since() {
            return Ok(());
        }
        let (verb, since) = (self.as_str(), self.since());
        let msg = format!("cniVersion {version} has no {verb}: set {since} or later in the configuration");
        Err(Error::new(Code::IncompatibleVersion, msg))
    }
}

impl FromStr for Verb {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let all = [Self::Add, Self::Del, Self::Check, Self::Status, Self::Gc, Self::Version];
        all.into_iter().find(|verb| verb.as_str() == text).ok_or_else(|| {
            Error::new(Code::InvalidEnvironment, format!("unknown CNI_COMMAND {:?}", truncate(text)))
        })
    }
}

/// A version of CNI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    V0_1_0,
    V0_2_0,
    V0_3_0,
    V0_3_1,
    V0_4_0,
    V1_0_0,
    V1_1_0,
}

impl Version {
    /// The newest version, for replies to a runtime whose version is unknown.
    pub const NEWEST: Self = Self::V1_1_0;
    const ALL: [Self; 7] =
        [Self::V0_1_0, Self::V0_2_0, Self::V0_3_0, Self::V0_3_1, Self::V0_4_0, Self::V1_0_0, Self::V1_1_0];
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V0_1_0 => "0.1.0",
            Self::V0_2_0 => "0.2.0",
            Self::V0_3_0 => "0.3.0",
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        })
    }
}

impl FromStr for Version {
    type Err = Error;

    /// A configuration without a version is version 0.1.0.
    fn from_str(text: &str) -> Result<Self, Error> {
        if text.is_empty() {
            return Ok(Self::V0_1_0);
        }
        Self::ALL.into_iter().find(|version| version.to_string() == text).ok_or_else(|| {
            let (text, supported) = (truncate(text), crate::CNI_VERSIONS.join(", "));
            Error::new(
                Code::IncompatibleVersion,
                format!("unsupported cniVersion {text:?}: set one of {supported}"),
            )
        })
    }
}

/// Error codes of the CNI specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Code {
    IncompatibleVersion = 1,
    UnsupportedField = 2,
    InvalidEnvironment = 4,
    Io = 5,
    Decode = 6,
    InvalidConfig = 7,
    TryAgainLater = 11,
    NotAvailable = 50,
    LimitedConnectivity = 51,
    /// CHECK found a difference to the result of ADD. 100 is the first plugin-specific code.
    Differs = 100,
}

/// An error result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    pub code: Code,
    pub msg: String,
    pub details: String,
}

impl Error {
    pub fn new(code: Code, msg: impl Into<String>) -> Self {
        Self { code, msg: msg.into(), details: String::new() }
    }

    #[must_use]
    pub fn details(self, details: impl Into<String>) -> Self {
        Self { details: details.into(), ..self }
    }

    /// The JSON that the plugin prints.
    pub fn render(&self, version: Version) -> Vec<u8> {
        let mut value = json!({"cniVersion": version.to_string(), "code": self.code as u32, "msg": self.msg});
        if !self.details.is_empty() {
            value["details"] = Value::from(self.details.as_str());
        }
        bytes(&value)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.msg)?;
        if self.details.is_empty() { Ok(()) } else { write!(f, ": {}", self.details) }
    }
}

impl std::error::Error for Error {}

/// The result of VERSION.
pub fn versions() -> Vec<u8> {
    bytes(&json!({"cniVersion": Version::NEWEST.to_string(), "supportedVersions": crate::CNI_VERSIONS}))
}

fn bytes(value: &Value) -> Vec<u8> {
    let mut bytes = value.to_string().into_bytes();
    bytes.push(b'\n');
    bytes
}

/// Truncates untrusted text for a message.
fn truncate(text: &str) -> String {
    text.chars().take(64).collect()
}

#[cfg(test)]
mod tests;
