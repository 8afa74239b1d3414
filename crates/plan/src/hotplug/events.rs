//! Events about a pod. Their texts repeat exactly, so that the recorder can leave out repetitions.

use api::selection::{NadRef, NetworkSelectionElement};

use super::{AddStep, PodIdentity, RemovePurpose, RemoveStep, text::one_line};

/// The maximum length of a note in bytes. The API server accepts 1024.
const MAX_NOTE: usize = 1000;
/// The maximum length of the requested addresses and arguments in a note. The error comes after them.
const MAX_ATTRIBUTES: usize = 200;
/// The maximum length of an error in a note.
const MAX_ERROR: usize = 512;

/// An event about a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodEvent {
    pub reason: EventReason,
    /// For people.
    pub note: String,
}

/// The reason of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EventReason {
    AddedInterface,
    FailedAddingInterface,
    RemovedInterface,
    FailedRemovingInterface,
    InterfaceAddRejected,
    AttachmentUpdateRejected,
    NamespaceForbidden,
    InvalidNetworks,
    InterfaceNameTaken,
    DeviceRequired,
    InterfaceKept,
    RecordsUnreadable,
    OwnNetworkStack,
}

impl EventReason {
    /// The reason as a CamelCase word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AddedInterface => "AddedInterface",
            Self::FailedAddingInterface => "FailedAddingInterface",
            Self::RemovedInterface => "RemovedInterface",
            Self::FailedRemovingInterface => "FailedRemovingInterface",
            Self::InterfaceAddRejected => "InterfaceAddRejected",
            Self::AttachmentUpdateRejected => "AttachmentUpdateRejected",
            Self::NamespaceForbidden => "NamespaceForbidden",
            Self::InvalidNetworks => "InvalidNetworks",
            Self::InterfaceNameTaken => "InterfaceNameTaken",
            Self::DeviceRequired => "DeviceRequired",
            Self::InterfaceKept => "InterfaceKept",
            Self::RecordsUnreadable => "RecordsUnreadable",
            Self::OwnNetworkStack => "OwnNetworkStack",
        }
    }

    /// Whether it is a Warning.
    pub fn is_warning(self) -> bool {
        !matches!(self, Self::AddedInterface | Self::RemovedInterface | Self::InterfaceKept)
    }
}

impl AddStep {
    /// The event after ADD succeeded.
    pub fn added(&self) -> PodEvent {
        let note = add_note(&self.pod, "added", self.interface.as_str(), &self.nad);
        let note = complete(&note, &attributes(&self.element), None);
        PodEvent { reason: EventReason::AddedInterface, note }
    }

    /// The event after ADD failed.
    pub fn failed(&self, error: &str) -> PodEvent {
        failed_adding(&self.pod, self.interface.as_str(), &self.nad, &self.element, error)
    }
}

impl RemoveStep {
    /// The event after DEL succeeded. `None` for what the user did not see attached, and for ended sandboxes.
    pub fn removed(&self) -> Option<PodEvent> {
        let note = complete(&remove_note(self, "removed"), "", None);
        (self.purpose == RemovePurpose::Unplug)
            .then_some(PodEvent { reason: EventReason::RemovedInterface, note })
    }

    /// The event after DEL failed.
    pub fn failed(&self, error: &str) -> PodEvent {
        let note = complete(&remove_note(self, "failed removing"), "", Some(error));
        PodEvent { reason: EventReason::FailedRemovingInterface, note }
    }
}

/// The event for an element that could not be attached.
pub(super) fn failed_adding(
    pod: &PodIdentity,
    interface: &str,
    nad: &NadRef,
    element: &NetworkSelectionElement,
    error: &str,
) -> PodEvent {
    let note = add_note(pod, "failed adding", interface, nad);
    let note = complete(&note, &attributes(element), Some(error));
    PodEvent { reason: EventReason::FailedAddingInterface, note }
}

/// The event for a pod in the host's namespace.
pub(super) fn host_network(pod: &PodIdentity) -> PodEvent {
    let note = format!("pod [{}/{}]: will not add interface to host networked pod", pod.namespace, pod.name);
    PodEvent { reason: EventReason::InterfaceAddRejected, note }
}

/// An event that begins with the pod, as the others do.
pub(super) fn about(pod: &PodIdentity, reason: EventReason, message: &str) -> PodEvent {
    let note = format!("pod [{}/{}]: {message}", pod.namespace, pod.name);
    PodEvent { reason, note: complete(&note, "", None) }
}

fn add_note(pod: &PodIdentity, verb: &str, interface: &str, nad: &NadRef) -> String {
    format!("pod [{}/{}]: {verb} interface {interface} to network: {}", pod.namespace, pod.name, nad.name)
}

/// A note of one line. The error matters most: the attributes get the space that it leaves.
fn complete(note: &str, attributes: &str, error: Option<&str>) -> String {
    let mut note = one_line(note, MAX_NOTE);
    let rest = MAX_NOTE.saturating_sub(note.len());
    let error = error.map(|error| format!(": {}", one_line(error, MAX_ERROR.min(rest.saturating_sub(2)))));
    let error = error.unwrap_or_default();
    let max = MAX_ATTRIBUTES.min(rest.saturating_sub(error.len()));
    let mut attributes = one_line(attributes, usize::MAX);
    if attributes.len() > max {
        attributes = format!("{}...)", one_line(&attributes, max.saturating_sub(4)));
    }
    if attributes.len() <= max {
        note.push_str(&attributes);
    }
    note.push_str(&error);
    note
}

fn remove_note(step: &RemoveStep, verb: &str) -> String {
    let (pod, record) = (&step.record.pod, &step.record);
    let (interface, network) = (&record.key.interface, &record.nad.name);
    format!("pod [{}/{}]: {verb} interface {interface} from network: {network}", pod.namespace, pod.name)
}

/// The requested addresses and arguments, in the form in which Go prints them.
fn attributes(element: &NetworkSelectionElement) -> String {
    let args = element.cni_args.as_ref();
    if element.ips.is_empty() && element.mac.is_none() && args.is_none() {
        return String::new();
    }
    let args = args.map_or("<nil>".to_owned(), |args| {
        // A map of Go has each key once.
        let mut pairs: std::collections::BTreeMap<&str, &str> = std::collections::BTreeMap::new();
        pairs.extend(args.iter());
        let pairs: Vec<String> =
            pairs.into_iter().map(|(key, value)| format!("{key}:{}", plain(value))).collect();
        format!("&map[{}]", pairs.join(" "))
    });
    let mac = element.mac.as_deref().unwrap_or_default();
    format!("(ips: [{}], mac: {mac}, cni-args: {args})", element.ips.join(" "))
}

/// A text without its quotes, any other value as JSON.
fn plain(value: &str) -> String {
    serde_json::from_str::<String>(value).unwrap_or_else(|_| value.to_owned())
}
