//! What `patchbay.dev/attachments` reports about an element or an attachment.

use std::net::IpAddr;

use api::{
    attachments::{Attachment, AttachmentState},
    nad_config::{NadConfig, PluginConfig},
    selection::NadRef,
};

use super::{
    AddStep, AttachmentRecord, EventReason, NadState, Origin, PodEvent, PodIdentity, RequestedAddresses,
    events,
    matching::{DesiredElement, Invalid},
    records::MAX_POD_RECORDS,
    request::MAX_ELEMENT,
    text::one_line,
};

/// The plugin that moves a device of the node. At the end of a pod its DEL needs the network namespace, which is gone then.
const HOST_DEVICE_PLUGIN: &str = "host-device";
/// The maximum length of a message in bytes.
const MAX_MESSAGE: usize = 1024;

/// Why an attachment is in its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StateReason {
    /// ADD failed.
    AddFailed,
    /// DEL failed.
    RemoveFailed,
    /// The NAD does not exist.
    NetworkNotFound,
    /// The NAD's configuration is invalid.
    NetworkInvalid,
    /// Namespace isolation forbids the NAD.
    NamespaceForbidden,
    /// It is not known whether namespace isolation forbids the NAD.
    IsolationUnknown,
    /// The NAD needs a device.
    DeviceRequired,
    /// Another interface has the name.
    InterfaceNameTaken,
    /// The element is invalid.
    InvalidNetworks,
    /// The addresses of an attachment were changed.
    UpdateRejected,
    /// The link was deleted in the pod.
    LinkLost,
    /// The element of an attachment of another program was removed while hot-plug did not act.
    RemovalNotSeen,
    /// What multus recorded about the pod cannot be used.
    RecordsUnreadable,
    /// The runtime of the pod has a network stack of its own, which may not have the interface.
    OwnNetworkStack,
}

impl StateReason {
    /// The reason as a CamelCase word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AddFailed => "AddFailed",
            Self::RemoveFailed => "RemoveFailed",
            Self::NetworkNotFound => "NetworkNotFound",
            Self::NetworkInvalid => "NetworkInvalid",
            Self::NamespaceForbidden => "NamespaceForbidden",
            Self::IsolationUnknown => "IsolationUnknown",
            Self::DeviceRequired => "DeviceRequired",
            Self::InterfaceNameTaken => "InterfaceNameTaken",
            Self::InvalidNetworks => "InvalidNetworks",
            Self::UpdateRejected => "UpdateRejected",
            Self::LinkLost => "LinkLost",
            Self::RemovalNotSeen => "RemovalNotSeen",
            Self::RecordsUnreadable => "RecordsUnreadable",
            Self::OwnNetworkStack => "OwnNetworkStack",
        }
    }
}

/// A state without a reason.
pub(super) fn plain(nad: &NadRef, interface: &str, state: AttachmentState) -> Attachment {
    Attachment {
        network: nad.to_string(),
        interface: interface.to_owned(),
        state,
        reason: String::new(),
        message: String::new(),
    }
}

/// The state of an element that waits.
pub(super) fn pending(nad: &NadRef, interface: &str, message: &str) -> Attachment {
    Attachment { message: one_line(message, MAX_MESSAGE), ..plain(nad, interface, AttachmentState::Pending) }
}

/// A state with a reason.
pub(super) fn with_reason(
    nad: &NadRef,
    interface: &str,
    state: AttachmentState,
    reason: StateReason,
    message: impl AsRef<str>,
) -> Attachment {
    let message = one_line(message.as_ref(), MAX_MESSAGE);
    Attachment { reason: reason.as_str().to_owned(), message, ..plain(nad, interface, state) }
}

/// The state and the event of an element whose NAD cannot be attached.
pub(super) fn unusable_nad(
    pod: &PodIdentity,
    wanted: &DesiredElement<'_>,
    interface: &str,
    nad: &NadState,
) -> Option<(Attachment, PodEvent)> {
    let name = &wanted.nad;
    let failed = |reason: StateReason, message: String| {
        let event = events::failed_adding(pod, interface, name, wanted.element, &message);
        (with_reason(name, interface, AttachmentState::Failed, reason, message), event)
    };
    let refused = |reason: StateReason, event: EventReason, message: String| {
        let event = events::about(pod, event, &message);
        (with_reason(name, interface, AttachmentState::Refused, reason, message), event)
    };
    let device = |cause: &str| {
        let message = format!(
            "{cause}, and Patchbay attaches no devices to a running pod; create a pod with this network"
        );
        Some(refused(StateReason::DeviceRequired, EventReason::DeviceRequired, message))
    };
    let static_device = |config: &NadConfig| config.plugins.iter().find_map(PluginConfig::device_key);
    match nad {
        NadState::Ready { .. } if wanted.element.device_id.is_some() => {
            device(&format!("the element of NAD {name} has deviceID"))
        }
        NadState::Ready { config }
            if config.plugins.iter().any(|plugin| plugin.has_capability("deviceID")) =>
        {
            device(&format!("NAD {name} has a plugin with the capability deviceID"))
        }
        NadState::Ready { config }
            if config.plugins.iter().any(|plugin| plugin.plugin == HOST_DEVICE_PLUGIN) =>
        {
            device(&format!(
                "NAD {name} moves a device of the node into the pod, which the node would lose at the end of the pod"
            ))
        }
        NadState::Ready { config } => static_device(config)
            .and_then(|key| device(&format!("NAD {name} has a plugin with {key}, a device of the node"))),
        // An element whose isolation is unknown waits.
        NadState::IsolationUnknown { .. } => None,
        NadState::Unknown { message } => Some(failed(StateReason::AddFailed, message.clone())),
        NadState::Missing => Some(failed(
            StateReason::NetworkNotFound,
            format!("NAD {name} does not exist; create it or remove the network from the annotation"),
        )),
        NadState::Invalid { message } => {
            Some(failed(StateReason::NetworkInvalid, format!("NAD {name} is invalid: {message}")))
        }
        NadState::DeviceRequired { resource } => Some(refused(
            StateReason::DeviceRequired,
            EventReason::DeviceRequired,
            format!(
                "NAD {name} needs a device of {resource}, which a running pod cannot get; create a pod that requests it"
            ),
        )),
        NadState::Forbidden { message } => Some(refused(
            StateReason::NamespaceForbidden,
            EventReason::NamespaceForbidden,
            format!("NAD {name} is not allowed in namespace {}: {message}", pod.namespace),
        )),
    }
}

/// The state and the event of an attachment to a pod whose runtime has a network stack of its own.
pub(super) fn own_network_stack(
    pod: &PodIdentity,
    nad: &NadRef,
    interface: &str,
    runtime: &str,
) -> (Attachment, PodEvent) {
    let message = format!(
        "interface {interface} is in the network namespace of the pod, but the containers may not see it: the runtime \
         {runtime} has a network stack of its own, which takes over interfaces only when the pod starts; create the pod again \
         with network {nad}"
    );
    let reason = StateReason::OwnNetworkStack;
    let event = events::about(pod, EventReason::OwnNetworkStack, &message);
    (with_reason(nad, interface, AttachmentState::Attached, reason, message), event)
}

/// The state and the event of an attachment whose NAD is forbidden to the pod by now.
pub(super) fn forbidden_attachment(
    pod: &PodIdentity,
    nad: &NadRef,
    interface: &str,
    message: &str,
) -> (Attachment, PodEvent) {
    let message =
        format!("{message}; interface {interface} stays attached until you remove it from the annotation");
    let reason = StateReason::NamespaceForbidden;
    let event = events::about(
        pod,
        EventReason::NamespaceForbidden,
        &format!("interface {interface} of network {nad}: {message}"),
    );
    (with_reason(nad, interface, AttachmentState::Attached, reason, message), event)
}

/// The state and the event of an invalid element.
pub(super) fn invalid(pod: &PodIdentity, invalid: &Invalid) -> (Attachment, PodEvent) {
    let message = one_line(&invalid.message, MAX_MESSAGE);
    let event = events::about(pod, EventReason::InvalidNetworks, &message);
    let state = Attachment {
        network: invalid.nad.as_ref().map(ToString::to_string).unwrap_or_default(),
        interface: String::new(),
        state: AttachmentState::Refused,
        reason: StateReason::InvalidNetworks.as_str().to_owned(),
        message,
    };
    (state, event)
}

/// The state and the event of an attachment of another program that no element was seen to request.
pub(super) fn kept(pod: &PodIdentity, record: &AttachmentRecord) -> (Attachment, PodEvent) {
    let (nad, interface) = (&record.nad, record.key.interface.as_str());
    let message = format!(
        "the annotation does not request interface {interface} of network {nad}, and did not since hot-plug is on for this \
         pod, so it stays; to detach it, run: patchbay unplug -n {} {} --interface {interface}",
        pod.namespace, pod.name
    );
    let event = events::about(pod, EventReason::InterfaceKept, &message);
    (with_reason(nad, interface, AttachmentState::Kept, StateReason::RemovalNotSeen, message), event)
}

/// Why an element is too long to be passed to plugins and recorded.
pub(super) fn too_long(wanted: &DesiredElement<'_>) -> Option<String> {
    let length = wanted.element.to_json().as_str().len();
    (length > MAX_ELEMENT)
        .then(|| format!("the element has {length} bytes as JSON; shorten it to at most {MAX_ELEMENT}"))
}

/// Why the record of an attachment does not fit beside the other `records` of the pod. A record with the same key is
/// replaced.
pub(super) fn exceeds_records(step: &AddStep, records: &[AttachmentRecord]) -> Option<String> {
    let new = step.intent(Vec::new());
    let kept = records.iter().filter(|record| record.origin == Origin::Hotplug && record.key != new.key);
    let kept: usize = kept.map(AttachmentRecord::length).sum();
    // A number that changes with the other attachments would repeat the event.
    (kept.saturating_add(new.length()) > MAX_POD_RECORDS).then(|| {
        format!(
            "with it, the records of the pod's attachments would have more than {} KiB; shorten cni-args or the \
             configuration of the NAD, or remove networks from the annotation",
            MAX_POD_RECORDS / 1024
        )
    })
}

/// Why the default route of an element cannot be set, as Multus would not set it when the pod starts.
pub(super) fn default_route_conflict(
    wanted: &DesiredElement<'_>,
    all: &[DesiredElement<'_>],
) -> Option<String> {
    let has = |other: &DesiredElement<'_>, ipv4: bool| {
        other.element.default_route.iter().any(|ip| ip.is_ipv4() == ipv4)
    };
    for (family, ipv4) in [("IPv4", true), ("IPv6", false)] {
        let count = wanted.element.default_route.iter().filter(|ip: &&IpAddr| ip.is_ipv4() == ipv4).count();
        if count > 1 {
            return Some(format!("default-route has several {family} gateways; keep one"));
        }
        let earlier = |other: &&DesiredElement<'_>| {
            other.index != wanted.index && (other.matched.is_some() || other.index < wanted.index)
        };
        let other = all.iter().filter(earlier).find(|other| count > 0 && has(other, ipv4));
        if let Some(other) = other {
            return Some(format!(
                "element [{}] has an {family} default-route too; keep it on one network",
                other.index
            ));
        }
    }
    None
}

/// What to do about changed addresses.
pub(super) fn update_message(requested: &RequestedAddresses, attached: &RequestedAddresses) -> String {
    format!(
        "the annotation requests {}, the interface was attached with {}; unplug the interface, then plug it again",
        describe(requested),
        describe(attached)
    )
}

fn describe(addresses: &RequestedAddresses) -> String {
    let ips = (!addresses.ips.is_empty()).then(|| format!("ips {}", addresses.ips.join(", ")));
    let mac = addresses.mac.as_ref().map(|mac| format!("mac {mac}"));
    let parts: Vec<String> = ips.into_iter().chain(mac).collect();
    if parts.is_empty() { "no addresses".to_owned() } else { parts.join(" and ") }
}
