//! What was asked of the API server, by whom: its audit log, countable.

use std::{
    fs,
    io::{Read as _, Seek as _, SeekFrom},
};

use anyhow::{Context as _, Result};
use serde::Deserialize;

use crate::{control_plane::AUDIT_LOG, lab::Lab};

/// One finished request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditedRequest {
    pub user: String,
    pub user_agent: String,
    pub verb: String,
    /// Plural, with the subresource behind a slash.
    pub resource: String,
    pub namespace: String,
    pub name: String,
    pub code: u16,
}

impl AuditedRequest {
    /// Whether it was meant to change something.
    pub fn is_write(&self) -> bool {
        matches!(self.verb.as_str(), "create" | "update" | "patch" | "delete" | "deletecollection")
    }
}

/// A place in the log to count from.
#[derive(Clone, Copy, Debug)]
pub struct AuditOffset(u64);

impl AuditOffset {
    /// The beginning of the log.
    pub const START: Self = Self(0);
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    stage: String,
    verb: String,
    user: User,
    #[serde(default)]
    user_agent: String,
    #[serde(default)]
    object_ref: Object,
    #[serde(default)]
    response_status: Response,
}

#[derive(Deserialize)]
struct User {
    #[serde(default)]
    username: String,
}

#[derive(Default, Deserialize)]
struct Object {
    #[serde(default)]
    resource: String,
    #[serde(default)]
    subresource: String,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    name: String,
}

#[derive(Default, Deserialize)]
struct Response {
    #[serde(default)]
    code: u16,
}

impl Lab {
    fn audit_log(&self) -> std::path::PathBuf {
        self.control_plane().disk().join(AUDIT_LOG.trim_start_matches('/'))
    }

    /// Now.
    pub fn audit_offset(&self) -> Result<AuditOffset> {
        let log = self.audit_log();
        Ok(AuditOffset(fs::metadata(&log).with_context(|| format!("look at {}", log.display()))?.len()))
    }

    /// Every request that was answered since the mark.
    pub fn requests_since(&self, mark: AuditOffset) -> Result<Vec<AuditedRequest>> {
        let mut file = fs::File::open(self.audit_log()).context("open the audit log")?;
        file.seek(SeekFrom::Start(mark.0)).context("go to the mark")?;
        let mut text = String::new();
        file.read_to_string(&mut text).context("read the audit log")?;
        // A last line without its end is still being written.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(parse).filter_map(Result::transpose).collect()
    }
}

fn parse(line: &str) -> Result<Option<AuditedRequest>> {
    let line: Line = serde_json::from_str(line).with_context(|| format!("understand {line}"))?;
    if line.stage != "ResponseComplete" {
        return Ok(None);
    }
    let resource = match line.object_ref.subresource.as_str() {
        "" => line.object_ref.resource,
        sub => format!("{}/{sub}", line.object_ref.resource),
    };
    Ok(Some(AuditedRequest {
        user: line.user.username,
        user_agent: line.user_agent,
        verb: line.verb,
        resource,
        namespace: line.object_ref.namespace,
        name: line.object_ref.name,
        code: line.response_status.code,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_tells_who_asked_what() {
        let line = r#"{"kind":"Event","level":"Metadata","stage":"ResponseComplete","verb":"patch","requestURI":"/x",
            "user":{"username":"u"},"userAgent":"a/1","objectRef":{"resource":"nodenetworks","name":"n","subresource":"status"},
            "responseStatus":{"code":200}}"#;
        let asked = parse(line).unwrap().unwrap();
        assert!(asked.is_write());
        assert_eq!(
            (asked.user_agent.as_str(), asked.resource.as_str(), asked.code),
            ("a/1", "nodenetworks/status", 200)
        );
    }

    #[test]
    fn a_watch_that_began_is_not_counted_twice() {
        let line = r#"{"stage":"ResponseStarted","verb":"watch","user":{"username":"u"}}"#;
        assert_eq!(parse(line).unwrap(), None);
    }
}
