//! The output of a plugin that Patchbay runs: a result, an error, or something else.

use std::fmt;

use serde::Deserialize;

use super::{Success, Version, result::is_object};

/// The most text of a plugin that an error repeats, in characters.
const MAX_DETAILS: usize = 1024;

/// Why a plugin failed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PluginError {
    /// The code of the CNI error. `None` if the plugin did not print a CNI error.
    pub code: Option<u32>,
    pub msg: String,
    pub details: String,
}

/// An error result of any version.
#[derive(Deserialize)]
struct RawError {
    code: u32,
    #[serde(default)]
    msg: Option<String>,
    #[serde(default)]
    details: Option<String>,
}

impl PluginError {
    /// The error of a plugin that failed: its error result, or what it printed instead.
    pub fn parse(stdout: &[u8], stderr: &[u8]) -> Self {
        if let Some(error) = Self::find(stdout) {
            return error;
        }
        let printed = [excerpt(stdout), excerpt(stderr)];
        let details = printed.into_iter().find(|text| !text.is_empty()).unwrap_or_default();
        Self { code: None, msg: "the plugin failed and printed no CNI error".to_owned(), details }
    }

    /// The error result in an output, if it is one.
    fn find(stdout: &[u8]) -> Option<Self> {
        if !is_object(stdout) {
            return None;
        }
        let raw: RawError = serde_json::from_slice(stdout).ok().filter(|raw: &RawError| raw.code != 0)?;
        let text = |text: Option<String>| excerpt(text.unwrap_or_default().as_bytes());
        Some(Self { code: Some(raw.code), msg: text(raw.msg), details: text(raw.details) })
    }
}

impl Success {
    /// The result that a plugin printed for ADD, if it exited successfully.
    pub fn from_output(stdout: &[u8], config: Version) -> Result<Self, PluginError> {
        if let Some(error) = PluginError::find(stdout) {
            return Err(error);
        }
        let failure = |msg: &str, details| PluginError { code: None, msg: msg.to_owned(), details };
        if stdout.trim_ascii().is_empty() {
            return Err(failure("the plugin printed no result", String::new()));
        }
        if serde_json::from_slice::<serde::de::IgnoredAny>(stdout).is_err() {
            return Err(failure("the plugin printed something that is not JSON", excerpt(stdout)));
        }
        Self::parse(stdout, config)
            .map_err(|error| failure("the plugin printed an invalid result", error.to_string()))
    }
}

impl fmt::Display for PluginError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [self.msg.as_str(), &self.details].into_iter().filter(|part| !part.is_empty());
        let text = parts.collect::<Vec<_>>().join(": ");
        match self.code {
            Some(code) if text.is_empty() => write!(f, "the plugin failed with code {code}"),
            _ => f.write_str(&text),
        }
    }
}

impl std::error::Error for PluginError {}

/// The start of the text, without white space around it.
fn excerpt(bytes: &[u8]) -> String {
    // Four bytes per character at most; cutting one in two shows as a replacement character at the end.
    let start = &bytes[..bytes.len().min(4 * MAX_DETAILS)];
    String::from_utf8_lossy(start.trim_ascii()).chars().take(MAX_DETAILS).collect()
}
