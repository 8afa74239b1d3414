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
    /// The daemon reports about the last edit.
    Reported {
        network: String,
        interface: String,
    },
    /// The daemon has seen a request for an interface that it keeps otherwise.
    Requested {
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
            Self::Attached { network, interface }
            | Self::Removed { network, interface }
            | Self::Reported { network, interface }
            | Self::Requested { network, interface } => (network, interface),
        }
    }

    /// How far the daemon is. A report from before the last edit says nothing.
    ///
    /// The daemon writes both annotations at once. An interface that was attached when the pod started is only in
    /// network-status.
    pub fn state(&self, pod: &PodView) -> WaitState {
        if !pod.confirmed {
            return WaitState::Waiting(None);
        }
        let listed = pod.status(self).is_some();
        match (self, pod.attachment(self)) {
            (Self::Requested { .. }, Some(report)) if report.state == AttachmentState::Kept => {
                WaitState::Waiting(Some(cause(report)))
            }
            (Self::Requested { .. }, Some(report)) if report.state == AttachmentState::Refused => {
                WaitState::Refused(cause(report))
            }
            (Self::Reported { .. } | Self::Requested { .. }, _) => WaitState::Done,
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
                | AttachmentState::Removing
                | AttachmentState::Kept => WaitState::Waiting(Some(cause(report))),
            },
            (Self::Removed { .. }, Some(report)) => match report.state {
                AttachmentState::Attached => WaitState::Waiting(None),
                AttachmentState::Pending
                | AttachmentState::Failed
                | AttachmentState::Refused
                | AttachmentState::Removing
                | AttachmentState::Kept => WaitState::Waiting(Some(cause(report))),
            },
        }
    }

    /// Whether the daemon keeps the interface although nothing requests it: then it is detached only after a request.
    pub fn is_kept(&self, pod: &PodView) -> bool {
        let kept = pod.attachment(self).is_none_or(|report| report.state == AttachmentState::Kept);
        pod.confirmed && kept && pod.status(self).is_some()
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
            Self::Requested { network, interface } => format!(
                "\nThe pod may request interface {interface} on network {network} now. Run the same command again to detach it."
            ),
            Self::Removed { .. } | Self::Reported { .. } => {
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
            Self::Reported { network, .. } => write!(f, "reported on network {network}"),
            Self::Requested { network, .. } => {
                write!(f, "requested on network {network}, so that it can be detached")
            }
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
        PodView { statuses, attachments: report.into_iter().collect(), confirmed: true, ..PodView::default() }
    }

    fn attached() -> Goal {
        Goal::Attached { network: "default/blue".to_owned(), interface: "net2".to_owned() }
    }

    fn removed() -> Goal {
        Goal::Removed { network: "default/blue".to_owned(), interface: "net2".to_owned() }
    }

    fn requested() -> Goal {
        Goal::Requested { network: "default/blue".to_owned(), interface: "net2".to_owned() }
    }

    fn waiting(cause: &str) -> WaitState {
        WaitState::Waiting(Some(cause.to_owned()))
    }

    #[test]
    fn an_interface_is_attached_once_network_status_lists_it_and_the_report_agrees() {
        let state = |listed, report| attached().state(&pod(listed, report));
        assert_eq!(state(false, None), WaitState::Waiting(None));
        assert_eq!(state(true, Some(report(AttachmentState::Attached, "", ""))), WaitState::Done);
        assert_eq!(state(true, None), WaitState::Done, "attached when the pod started");
        assert_eq!(state(false, Some(report(AttachmentState::Pending, "", ""))), waiting("Pending"));
        assert!(!state(false, Some(report(AttachmentState::Attached, "", ""))).is_done());
    }

    #[test]
    fn a_refusal_ends_the_wait_and_a_failure_does_not() {
        let state = |report| attached().state(&pod(false, Some(report)));
        let failed = report(AttachmentState::Failed, "PluginFailed", "no\u{1b}[2J\nlink");
        assert_eq!(state(failed), waiting("Failed (PluginFailed): no\\u{1b}[2J\\nlink"));
        let rejected = report(AttachmentState::Attached, "UpdateRejected", "unplug it first");
        let kept = attached().state(&pod(true, Some(rejected)));
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
        for pod in [pod(false, None), pod(true, None), pod(false, Some(old))] {
            let unconfirmed = PodView { confirmed: false, ..pod };
            for goal in [attached(), removed(), requested()] {
                assert_eq!(goal.state(&unconfirmed), WaitState::Waiting(None));
            }
        }
    }

    #[test]
    fn a_kept_interface_is_requested_once_the_daemon_does_not_keep_it() {
        let kept = report(AttachmentState::Kept, "RemovalNotSeen", "");
        let pods = [pod(true, Some(kept.clone())), pod(true, None), pod(false, Some(kept)), pod(false, None)];
        assert_eq!(pods.each_ref().map(|pod| requested().is_kept(pod)), [true, true, false, false]);
        let removing = pod(true, Some(report(AttachmentState::Removing, "", "")));
        assert!(
            !requested().is_kept(&removing)
                && !requested().is_kept(&PodView { confirmed: false, ..pod(true, None) })
        );
        assert_eq!(requested().state(&pods[0]), waiting("Kept (RemovalNotSeen)"));
        assert_eq!(requested().state(&pods[1]), WaitState::Done);
        assert_eq!(removed().state(&pods[0]), waiting("Kept (RemovalNotSeen)"));
    }

    #[test]
    fn an_interface_is_removed_once_neither_annotation_lists_it() {
        let state = |listed, report| removed().state(&pod(listed, report));
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
        assert_eq!(attached().state(&pod), WaitState::Waiting(None));
        assert_eq!(removed().state(&pod), WaitState::Done);
    }
}
