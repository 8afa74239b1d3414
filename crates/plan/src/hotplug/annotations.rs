//! The values of the annotations that the daemon writes.

use api::attachments::{self, Attachment};

/// The maximum length of both annotations together. All annotations of a pod share 256 KiB.
pub(super) const MAX_ANNOTATIONS: usize = 200 * 1024;

/// Whether the annotation has the state. Its message may be cut there.
pub(super) fn is_reported(old: &Attachment, state: &Attachment) -> bool {
    state.message.starts_with(&old.message)
        && Attachment { message: String::new(), ..old.clone() }
            == Attachment { message: String::new(), ..state.clone() }
}

/// The value of network-status, unless it gets too long for an annotation: then it stays as it is.
pub(super) fn bounded(observed: Option<&String>, new: Option<String>) -> Option<String> {
    let length = |text: Option<&String>| text.map_or(0, String::len);
    let too_long = length(new.as_ref()) > MAX_ANNOTATIONS - attachments::MAX_LENGTH;
    if too_long && length(new.as_ref()) > length(observed) { observed.cloned() } else { new }
}

/// The value of the annotation. It keeps its text if it says the same. `networks_digest` is the one that the pod asks for.
pub(super) fn attachments_text(
    observed: Option<&str>,
    states: &[Attachment],
    networks_digest: Option<&str>,
    max: usize,
) -> Option<String> {
    let new = attachments::render_within(states, networks_digest, max);
    let same = match (observed, &new) {
        (Some(observed), Some(new)) => {
            let parse = |text| attachments::parse(Some(text)).ok();
            let confirmed = |text| attachments::confirmed_networks(Some(text));
            parse(observed).is_some()
                && (parse(observed), confirmed(observed)) == (parse(new.as_str()), confirmed(new.as_str()))
        }
        (None, None) => true,
        _ => false,
    };
    if same { observed.map(str::to_owned) } else { new }
}
