//! Reads the API server's audit log, so that tests can count requests by user, user agent, verb and object.

use std::{
    fs,
    io::{Read as _, Seek as _, SeekFrom},
};

use anyhow::{Context as _, Result};
use serde::Deserialize;

use crate::{control_plane::AUDIT_LOG, lab::Lab};

/// One completed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditedRequest {
    pub user: String,
    pub user_agent: String,
    pub verb: String,
    /// The plural name, followed by `/` and the subresource if there is one.
    pub resource: String,
    pub namespace: String,
    pub name: String,
    pub code: u16,
}

impl AuditedRequest {
    /// Whether the verb is a mutating one.
    pub fn is_write(&self) -> bool {
        matches!(self.verb.as_str(), "create" | "update" | "patch" | "delete" | "deletecollection")
    }
}

/// A byte offset in the audit log.
#[derive(Clone, Copy, Debug)]
pub struct AuditOffset(u64);

impl AuditOffset {
    /// The start of the log.
    pub const START: Self = Self(0);
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AuditEvent {
    stage: String,
    verb: String,
    user: AuditUser,
    #[serde(default)]
    user_agent: String,
    #[serde(default)]
    object_ref: ObjectRef,
    #[serde(default)]
    response_status: ResponseStatus,
}

#[derive(Deserialize)]
struct AuditUser {
    #[serde(default)]
    username: String,
}

#[derive(Default, Deserialize)]
struct ObjectRef {
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
struct ResponseStatus {
    #[serde(default)]
    code: u16,
}

impl Lab {
    fn audit_log(&self) -> std::path::PathBuf {
        self.control_plane().disk().join(AUDIT_LOG.trim_start_matches('/'))
    }

    /// The current end of the log.
    pub fn audit_offset(&self) -> Result<AuditOffset> {
        let log = self.audit_log();
        Ok(AuditOffset(fs::metadata(&log).with_context(|| format!("stat {}", log.display()))?.len()))
    }

    /// Every request that completed after the offset.
    pub fn requests_since(&self, offset: AuditOffset) -> Result<Vec<AuditedRequest>> {
        let mut file = fs::File::open(self.audit_log()).context("open the audit log")?;
        file.seek(SeekFrom::Start(offset.0)).context("seek in the audit log")?;
        let mut text = String::new();
        file.read_to_string(&mut text).context("read the audit log")?;
        // The API server is still writing a last line without a newline.
        let complete = text.rfind('\n').map_or("", |end| &text[..end]);
        complete.lines().map(parse).filter_map(Result::transpose).collect()
    }
}

fn parse(line: &str) -> Result<Option<AuditedRequest>> {
    let event: AuditEvent =
        serde_json::from_str(line).with_context(|| format!("parse audit event {line}"))?;
    if event.stage != "ResponseComplete" {
        return Ok(None);
    }
    let resource = match event.object_ref.subresource.as_str() {
        "" => event.object_ref.resource,
        sub => format!("{}/{sub}", event.object_ref.resource),
    };
    Ok(Some(AuditedRequest {
        user: event.user.username,
        user_agent: event.user_agent,
        verb: event.verb,
        resource,
        namespace: event.object_ref.namespace,
        name: event.object_ref.name,
        code: event.response_status.code,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_user_agent_resource_and_code() {
        let line = r#"{"kind":"Event","level":"Metadata","stage":"ResponseComplete","verb":"patch","requestURI":"/x",
            "user":{"username":"u"},"userAgent":"a/1","objectRef":{"resource":"nodenetworks","name":"n","subresource":"status"},
            "responseStatus":{"code":200}}"#;
        let request = parse(line).unwrap().unwrap();
        assert!(request.is_write());
        assert_eq!(
            (request.user_agent.as_str(), request.resource.as_str(), request.code),
            ("a/1", "nodenetworks/status", 200)
        );
    }

    #[test]
    fn ignores_the_start_of_a_watch() {
        let line = r#"{"stage":"ResponseStarted","verb":"watch","user":{"username":"u"}}"#;
        assert_eq!(parse(line).unwrap(), None);
    }
}
