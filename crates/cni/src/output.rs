//! Output of the plugin that does not come from the daemon.

use std::fmt::Write as _;

use wire::CNI_VERSIONS;

/// Exit code and standard output for the runtime.
pub struct PluginOutput {
    pub exit: u8,
    pub stdout: Vec<u8>,
}

/// The CNI error codes that the plugin itself returns.
#[derive(Debug, Clone, Copy)]
pub enum ErrorCode {
    InvalidEnvironment = 4,
    Io = 5,
    InvalidConfig = 7,
    TryAgainLater = 11,
    NotAvailable = 50,
}

impl PluginOutput {
    pub fn ok(stdout: Vec<u8>) -> Self {
        Self { exit: 0, stdout }
    }

    pub fn error(code: ErrorCode, msg: &str) -> Self {
        let newest = CNI_VERSIONS.last().copied().unwrap_or_default();
        let mut json = format!(r#"{{"cniVersion":"{newest}","code":{},"msg":"#, code as u8);
        quote(&mut json, msg);
        json.push_str("}\n");
        Self { exit: 1, stdout: json.into_bytes() }
    }

    /// The result of VERSION.
    pub fn versions() -> Self {
        let newest = CNI_VERSIONS.last().copied().unwrap_or_default();
        let all = CNI_VERSIONS.join(r#"",""#);
        Self::ok(format!("{{\"cniVersion\":\"{newest}\",\"supportedVersions\":[\"{all}\"]}}\n").into_bytes())
    }
}

/// Appends a JSON string.
fn quote(json: &mut String, text: &str) {
    json.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => json.extend(['\\', c]),
            // Writing to a String does not fail.
            c if c.is_control() => _ = write!(json, "\\u{:04x}", u32::from(c)),
            c => json.push(c),
        }
    }
    json.push('"');
}
