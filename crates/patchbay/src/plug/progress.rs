//! What the annotations of a pod say about a requested change. Pure.

use std::fmt::{self, Write as _};

use api::attachments::{Attachment, AttachmentState};

use super::pod::PodView;
use crate::terminal;

/// What to wait for. Networks are `namespace/name`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Goal {
    Attached {
        network: String,
        interface: String,
    },
    /// The interface may have no name yet, if it was never attached.
    Removed {
        network: String,
        interface: String,
    },
}

/// How far the daemon is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WaitState {
    Done,
    /// The daemon will not do it, and why.
    Refused(String),
    /// The daemon has not done it yet, with what it reports.
    Waiting(Option<String>),
}

/// The reason of an attachment that keeps the addresses of an earlier request.
const UPDATE_REJECTED: &str = "UpdateRejected";

impl WaitState {
    pub fn is_done(&self) -> bool {
        *self == Self::Done
    }
}

impl Goal {
    /// The network and the interface.
    pub fn names(&self) -> (&str, &str) {
        match self {
            Self::Attached { network, interface } | Self::Removed { network, interface } => {
                (network, interface)
            }
        }
    }

    /// How far the daemon is. A report that equals `stale`, the one before the edit, says nothing about the edit.
    ///
    /// The daemon writes both annotations at once. An interface that was attached when the pod started is only in
    /// network-status.
    pub fn state(&self, pod: &PodView, stale: Option<&Attachment>) -> WaitState {
        let listed = pod.status(self).is_some();
        let report = match pod.attachment(self) {
            Some(report) if Some(report) == stale => return WaitState::Waiting(None),
            report => report,
        };
        match (self, report) {
            (Self::Attached { .. }, None) if listed => WaitState::Done,
            (Self::Removed { .. }, None) if !listed => WaitState::Done,
            (_, None) => WaitState::Waiting(None),
            (Self::Attached { .. }, Some(report)) => match report.state {
                // The interface has other addresses than requested.
                AttachmentState::Attached if report.reason == UPDATE_REJECTED => {
                    WaitState::Refused(cause(report))
                }
                AttachmentState::Attached if listed => WaitState::Done,
                AttachmentState::Refused => WaitState::Refused(cause(report)),
                AttachmentState::Attached
                | AttachmentState::Pending
                | AttachmentState::Failed
                | AttachmentState::Removing => WaitState::Waiting(Some(cause(report))),
            },
            (Self::Removed { .. }, Some(report)) => match report.state {
                AttachmentState::Attached => WaitState::Waiting(None),
                AttachmentState::Pending
                | AttachmentState::Failed
                | AttachmentState::Refused
                | AttachmentState::Removing => WaitState::Waiting(Some(cause(report))),
            },
        }
    }

    /// The interface, as the subject of a sentence.
    pub fn subject(&self) -> String {
        match self.names() {
            (_, "") => "an interface".to_owned(),
            (_, interface) => format!("interface {interface}"),
        }
    }

    /// What the user can do after a failure.
    pub fn advice(&self, pod: &PodView) -> String {
        match self {
            Self::Attached { interface, .. } => format!(
                "\nThe pod still requests the interface. To withdraw the request, run: patchbay unplug -n {} {} --interface \
                {interface}",
                pod.namespace, pod.name
            ),
            Self::Removed { .. } => {
                "\nThe pod does not request the interface any more; the node daemon keeps trying to detach it.".to_owned()
            }
        }
    }
}

/// The predicate of the sentence.
impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Attached { network, .. } => write!(f, "attached to network {network}"),
            Self::Removed { network, .. } => write!(f, "detached from network {network}"),
        }
    }
}

/// State, reason and message in one line. The message can contain text of a CNI plugin.
fn cause(report: &Attachment) -> String {
    let mut text = report.state.to_string();
    if !report.reason.is_empty() {
        let _ = write!(text, " ({})", report.reason);
    }
    if !report.message.is_empty() {
        let _ = write!(text, ": {}", report.message);
    }
    terminal::line(&text).into_owned()
}

#[cfg(test)]
mod tests {
    use api::network_status::NetworkStatus;

    use super::*;

    fn status(network: &str, interface: &str) -> NetworkStatus {
        NetworkStatus {
            name: network.to_owned(),
            interface: interface.to_owned(),
            ..NetworkStatus::default()
        }
    }

    fn report(state: AttachmentState, reason: &str, message: &str) -> Attachment {
        Attachment {
            network: "default/blue".to_owned(),
            interface: "net2".to_owned(),
            state,
            reason: reason.to_owned(),
            message: message.to_owned(),
        }
    }

    fn pod(listed: bool, report: Option<Attachment>) -> PodView {
        let mut statuses = vec![status("cbr0", "eth0"), status("default/blue", "net1")];
        if listed {
            statuses.push(status("default/blue", "net2"));
        }
        PodView { statuses, attachments: report.into_iter().collect(), ..PodView::default() }
    }

    fn attached() -> Goal {
        Goal::Attached { network: "default/blue".to_owned(), interface: "net2".to_owned() }
    }

    fn removed() -> Goal {
        Goal::Removed { network: "default/blue".to_owned(), interface: "net2".to_owned() }
    }

    fn waiting(cause: &str) -> WaitState {
        WaitState::Waiting(Some(cause.to_owned()))
    }

    #[test]
    fn an_interface_is_attached_once_network_status_lists_it_and_the_report_agrees() {
        let state = |listed, report| attached().state(&pod(listed, report), None);
        assert_eq!(state(false, None), WaitState::Waiting(None));
        assert_eq!(state(true, Some(report(AttachmentState::Attached, "", ""))), WaitState::Done);
        assert_eq!(state(true, None), WaitState::Done, "attached when the pod started");
        assert_eq!(state(false, Some(report(AttachmentState::Pending, "", ""))), waiting("Pending"));
        assert!(!state(false, Some(report(AttachmentState::Attached, "", ""))).is_done());
    }

    #[test]
    fn a_refusal_ends_the_wait_and_a_failure_does_not() {
        let state = |report| attached().state(&pod(false, Some(report)), None);
        let failed = report(AttachmentState::Failed, "PluginFailed", "no\u{1b}[2J\nlink");
        assert_eq!(state(failed), waiting("Failed (PluginFailed): no\\u{1b}[2J\\nlink"));
        let rejected = report(AttachmentState::Attached, "UpdateRejected", "unplug it first");
        let kept = attached().state(&pod(true, Some(rejected)), None);
        assert_eq!(kept, WaitState::Refused("Attached (UpdateRejected): unplug it first".to_owned()));
        let refused = report(AttachmentState::Refused, "NamespaceForbidden", "not allowed");
        assert_eq!(
            state(refused),
            WaitState::Refused("Refused (NamespaceForbidden): not allowed".to_owned())
        );
    }

    #[test]
    fn a_report_from_before_the_edit_does_not_count() {
        let old = report(AttachmentState::Refused, "InterfaceNameTaken", "");
        let pod = pod(false, Some(old.clone()));
        assert_eq!(attached().state(&pod, Some(&old)), WaitState::Waiting(None));
        assert!(matches!(attached().state(&pod, None), WaitState::Refused(_)));
    }

    #[test]
    fn an_interface_is_removed_once_neither_annotation_lists_it() {
        let state = |listed, report| removed().state(&pod(listed, report), None);
        assert_eq!(state(false, None), WaitState::Done);
        assert_eq!(state(true, None), WaitState::Waiting(None));
        assert_eq!(state(true, Some(report(AttachmentState::Attached, "", ""))), WaitState::Waiting(None));
        assert_eq!(state(true, Some(report(AttachmentState::Removing, "", ""))), waiting("Removing"));
        let failed = report(AttachmentState::Failed, "PluginFailed", "busy");
        assert_eq!(state(false, Some(failed)), waiting("Failed (PluginFailed): busy"));
    }

    #[test]
    fn entries_of_other_networks_and_interfaces_do_not_count() {
        let mut pod = pod(true, None);
        pod.statuses[2].name = "default/red".to_owned();
        assert_eq!(attached().state(&pod, None), WaitState::Waiting(None));
        assert_eq!(removed().state(&pod, None), WaitState::Done);
    }
}
