//! The annotation in which Patchbay reports the attachments of a pod that it handles.
//!
//! It lists the interfaces that Patchbay attached to the running pod, and every requested network that is not attached. A
//! pod whose interfaces were all attached when it started, and that needs nothing, does not have the annotation, unless it
//! asks for a confirmation.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::digest::digest;

/// The annotation that reports the attachments of a pod that Patchbay handles.
pub const ATTACHMENTS_ANNOTATION: &str = "patchbay.dev/attachments";
/// Asks the daemon to report in [`ATTACHMENTS_ANNOTATION`] which networks annotation, together with this value, the rest of the
/// report is about. `patchbay plug` and `patchbay unplug` set another value with each edit: an annotation that was changed and
/// changed back is not confirmed by a report from before.
pub const CONFIRM_ANNOTATION: &str = "patchbay.dev/confirm-networks";
/// The maximum length of the annotation in bytes. All annotations of an object share 256 KiB.
pub const MAX_LENGTH: usize = 48 * 1024;

/// One attachment of a pod, or one element of its networks annotation that is not attached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// `namespace/name` of the NAD. Empty if the element does not name one.
    #[serde(default)]
    pub network: String,
    /// The name of the interface in the pod. Empty if it is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub interface: String,
    /// Whether it is attached.
    pub state: AttachmentState,
    /// A CamelCase word for programs. Empty if there is nothing to report.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// For people: what failed and what to do next.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// The state of an attachment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum AttachmentState {
    /// The interface is in the pod.
    Attached,
    /// The daemon is attaching it. Reported only if that takes more than two seconds.
    Pending,
    /// Attaching or detaching it failed. The daemon retries.
    Failed,
    /// The request is invalid or not allowed. The daemon retries when the request or what it refers to changes.
    Refused,
    /// The daemon is detaching it. Reported only if that takes more than two seconds.
    Removing,
    /// Another program attached it, and the daemon never saw a request for it. It stays.
    Kept,
}

impl fmt::Display for AttachmentState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Parses the value of the annotation. An absent or empty annotation is an empty list; entries that are not an attachment
/// are left out.
pub fn parse(text: Option<&str>) -> serde_json::Result<Vec<Attachment>> {
    let Some(text) = text.filter(|text| !text.trim().is_empty()) else { return Ok(Vec::new()) };
    let entries: Vec<serde_json::Value> = serde_json::from_str(text)?;
    // Serde would read a list into a struct too.
    let objects = entries.into_iter().filter(serde_json::Value::is_object);
    Ok(objects.filter_map(|entry| serde_json::from_value(entry).ok()).collect())
}

/// The last entry of the annotation, if the pod asks for it. It is no attachment: readers that do not know it leave it out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Confirmation {
    /// The [`networks_digest`] of the annotations that the report is about.
    networks_digest: String,
}

/// A text that stands for the values of [`CONFIRM_ANNOTATION`] and of a networks annotation.
pub fn networks_digest(confirm: &str, networks: Option<&str>) -> String {
    format!("{:016x}", digest([confirm, networks.unwrap_or_default()]))
}

/// The [`networks_digest`] of the networks annotation that a report is about, if it has one.
pub fn confirmed_networks(text: Option<&str>) -> Option<String> {
    let entries: Vec<serde_json::Value> = serde_json::from_str(text?).ok()?;
    let last = entries.into_iter().next_back().filter(serde_json::Value::is_object)?;
    serde_json::from_value::<Confirmation>(last).ok().map(|confirmation| confirmation.networks_digest)
}

/// The value of the annotation, of at most [`MAX_LENGTH`] bytes. An empty list is an absent annotation.
pub fn render(attachments: &[Attachment]) -> Option<String> {
    render_within(attachments, None, MAX_LENGTH)
}

/// The value of the annotation, of at most `max` and [`MAX_LENGTH`] bytes. `networks_digest` is the one that the pod asks for.
///
/// If it does not fit, messages are cut, then left out, and then the last attachments.
pub fn render_within(
    attachments: &[Attachment],
    networks_digest: Option<&str>,
    max: usize,
) -> Option<String> {
    let confirmation = networks_digest.map(|digest| Confirmation { networks_digest: digest.to_owned() });
    let render = |attachments: &[Attachment]| {
        // Strings and enums can always be serialized.
        let value = |entry: &Attachment| serde_json::to_string(entry).ok();
        let mut entries: Vec<String> = attachments.iter().filter_map(value).collect();
        entries.extend(confirmation.as_ref().and_then(|last| serde_json::to_string(last).ok()));
        Some(format!("[{}]", entries.join(","))).filter(|text| text.len() <= max.min(MAX_LENGTH))
    };
    if attachments.is_empty() {
        return confirmation.as_ref().and_then(|_| render(attachments));
    }
    let mut short: Vec<Attachment> = attachments.to_vec();
    for length in [usize::MAX, 256, 64, 0] {
        for attachment in &mut short {
            attachment.message.truncate(attachment.message.floor_char_boundary(length));
        }
        if let Some(text) = render(&short) {
            return Some(text);
        }
    }
    while !short.is_empty() {
        short.truncate(short.len() * 3 / 4);
        if let Some(text) = render(&short).filter(|_| !short.is_empty()) {
            return Some(text);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn attachment(interface: &str) -> Attachment {
        Attachment {
            network: "default/blue".to_owned(),
            interface: interface.to_owned(),
            state: AttachmentState::Attached,
            reason: String::new(),
            message: String::new(),
        }
    }

    #[test]
    fn an_attachment_has_the_documented_keys() {
        let failed = Attachment {
            state: AttachmentState::Failed,
            reason: "NetworkNotFound".to_owned(),
            message: "NAD default/blue does not exist".to_owned(),
            ..attachment("net2")
        };
        let text = render(&[attachment("net1"), failed.clone()]).unwrap();
        assert_eq!(
            text,
            r#"[{"network":"default/blue","interface":"net1","state":"Attached"},{"network":"default/blue","interface":"net2","state":"Failed","reason":"NetworkNotFound","message":"NAD default/blue does not exist"}]"#
        );
        assert_eq!(parse(Some(&text)).unwrap(), [attachment("net1"), failed]);
    }

    #[test]
    fn an_empty_list_is_an_absent_annotation() {
        assert_eq!(render(&[]), None);
        for text in [None, Some(""), Some(" "), Some("[]")] {
            assert_eq!(parse(text).unwrap(), []);
        }
    }

    #[test]
    fn a_confirmation_is_the_last_entry_and_no_attachment() {
        let digest = networks_digest("1", Some("blue"));
        assert_ne!(digest, networks_digest("2", Some("blue")), "another edit to the same value");
        assert_eq!(networks_digest("1", None), networks_digest("1", Some("")));
        for list in [&[][..], &[attachment("net1")]] {
            let text = render_within(list, Some(&digest), MAX_LENGTH);
            assert_eq!(confirmed_networks(text.as_deref()).as_deref(), Some(digest.as_str()));
            assert_eq!(parse(text.as_deref()).unwrap(), list);
        }
        for text in [
            None,
            Some("[]"),
            Some("[{}]"),
            Some("7"),
            Some(r#"[["a"]]"#),
            render(&[attachment("net1")]).as_deref(),
        ] {
            assert_eq!(confirmed_networks(text), None);
        }
    }

    #[test]
    fn unknown_keys_and_entries_do_not_hide_the_others() {
        let text = r#"[7,["default/blue"],{"network":"default/blue","interface":"net1","state":"Attached","new":1},{"state":"Later"}]"#;
        assert_eq!(parse(Some(text)).unwrap(), [attachment("net1")]);
        assert!(parse(Some("{")).is_err() && parse(Some("{}")).is_err());
    }

    #[test]
    fn a_long_list_fits_into_an_annotation() {
        let long = |message: &str, count: usize| {
            let all: Vec<_> = (0..count)
                .map(|number| Attachment { message: message.to_owned(), ..attachment(&format!("n{number}")) })
                .collect();
            parse(render(&all).as_deref()).unwrap()
        };
        for (count, length) in [(100, 256), (300, 64), (600, 0)] {
            let cut = long(&"x".repeat(1000), count);
            assert_eq!((cut.len(), cut[count - 1].message.len()), (count, length));
        }
        assert!((100..4096).contains(&long("", 4096).len()));
    }

    #[test]
    fn a_list_fits_into_what_is_left() {
        let list = vec![Attachment { message: "\u{e9}".repeat(100), ..attachment("net1") }; 3];
        let whole = render(&list).unwrap().len();
        for max in 0..=whole {
            assert!(render_within(&list, None, max).is_none_or(|text| text.len() <= max));
        }
        assert_eq!(
            (render_within(&list, None, 20), render_within(&list, None, whole)),
            (None, render(&list))
        );
    }

    proptest! {
        #[test]
        fn any_text_is_safe(text in r#"[ {}"a-z:,0-9\[\]]{0,60}"#) {
            if let Ok(list) = parse(Some(&text)) {
                prop_assert_eq!(parse(render(&list).as_deref()).unwrap(), list);
            }
        }
    }
}
