//! The next thing to do for a pod.

use std::{collections::BTreeSet, net::IpAddr};

use api::{
    IfName,
    attachments::Attachment,
    nad_config::NadConfig,
    network_status::NetworkStatus,
    selection::{NadRef, NetworkSelectionElement},
};
use serde_json::{Map, Value};

use super::{
    AttachmentKey, AttachmentRecord, Fingerprint, Origin, PodEvent, PodIdentity, RecordPhase,
    RequestedAddresses, SandboxRef,
};

/// What to do for a pod now, and what its annotations should say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodPlan {
    /// The next step. The caller applies it, observes again and plans again. `None`: nothing to do until an input changes.
    pub step: Option<Step>,
    /// The content of `patchbay.dev/attachments`.
    pub states: Vec<Attachment>,
    /// The new value of [`ObservedPod::requested`](super::ObservedPod::requested), if it changes. The caller records it before
    /// it applies the step, and keeps it over restarts.
    pub requested: Option<BTreeSet<AttachmentKey>>,
    /// The values that the two annotations should have. `None` if they have them, or must not be written now.
    ///
    /// The values may equal the observed ones: then the write, guarded by the old values, confirms them, which the record of a
    /// removed attachment waits for.
    pub annotations: Option<AnnotationUpdate>,
    /// Events to record now. Events about the result of a step come from the step.
    pub events: Vec<PodEvent>,
    /// The attempts whose failures still count. The caller drops all others
    /// ([`Failures::retain`](super::Failures::retain)).
    pub failing: Vec<AttemptKey>,
}

/// New values of the annotations that the daemon writes. `None` means that the annotation is absent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnnotationUpdate {
    pub network_status: Option<String>,
    pub attachments: Option<String>,
}

/// One step. Steps of a pod run one after another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    Add(Box<AddStep>),
    Remove(Box<RemoveStep>),
    /// Delete these default routes, and write this record of an attachment whose ADD succeeded without a record of that.
    Finish(Box<AttachmentRecord>, FilteredRoutes),
    /// Delete this record of the journal. Nothing else refers to the attachment.
    Forget(AttachmentKey),
}

/// Attach an element.
///
/// 1. Write the intent with the links of the namespace to the journal and sync it.
/// 2. Run ADD.
/// 3. If it succeeds, apply `default_route` and `filtered_routes`, and write the record as attached. If it fails, leave the
///    intent and record the failure: the next plan runs DEL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddStep {
    pub attempt: AttemptKey,
    pub fingerprint: Fingerprint,
    /// The index of the element in the annotation, from 0.
    pub index: usize,
    pub element: NetworkSelectionElement,
    pub nad: NadRef,
    pub interface: IfName,
    pub pod: PodIdentity,
    pub sandbox: SandboxRef,
    pub boot: String,
    /// The NAD's configuration with the element's `cni-args` in it.
    pub config: Box<NadConfig>,
    pub cni_args: Vec<(String, String)>,
    pub capability_args: Map<String, Value>,
    pub requested: RequestedAddresses,
    /// The gateways of the pod's default route, if it goes over this interface.
    pub default_route: Vec<IpAddr>,
    /// The entries of earlier attachments with the same key, for [`AttachmentRecord::former_statuses`].
    pub former_statuses: Vec<NetworkStatus>,
    /// The default routes over this interface that are deleted after ADD, because another network has `default-route`.
    pub filtered_routes: FilteredRoutes,
}

/// The address families whose default routes over an interface are deleted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FilteredRoutes {
    pub ipv4: bool,
    pub ipv6: bool,
}

/// Detach an attachment, or undo an unfinished one.
///
/// 1. Write [`RemoveStep::intent`] to the journal. DEL runs even if that fails.
/// 2. Delete `moved_links`. If one is unreachable or unidentified, the step fails here.
///    Restore the replaced default routes if no link is left ([`RemoveStep::has_lost_links`]).
/// 3. Run DEL with the recorded configuration, arguments and result, as `mode` says. If it fails, record the failure.
/// 4. Delete those of `leftover_links` that still exist, and restore the replaced default routes if the namespace exists.
/// 5. For a record of another origin, delete its result in Multus' cache, so that it is not read again.
/// 6. Write [`RemoveStep::removed_record`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoveStep {
    pub attempt: AttemptKey,
    pub fingerprint: Fingerprint,
    pub record: AttachmentRecord,
    pub mode: DelMode,
    pub purpose: RemovePurpose,
    /// The indexes of links in the READY sandbox's namespace that belong to the attachment, whatever their names are now.
    /// No other link may be deleted by index.
    pub leftover_links: Vec<u32>,
    /// The links of the attachment that are in another namespace inside the pod. They are deleted before DEL releases their
    /// addresses.
    pub moved_links: MovedLinks,
    pub errors: DelErrors,
}

/// Links that were moved out of the pod's namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MovedLinks {
    /// Their ends on the host. A link goes with its other end.
    pub host_peers: Vec<HostPeer>,
    /// The name of one without an end on the host: it cannot be reached, so DEL does not run.
    pub unreachable: Option<String>,
    /// The recorded name of a link that is perhaps still in the pod under another name: only its MAC address says so, which
    /// is not enough to delete it. DEL does not run, because it would release the addresses that the link uses.
    pub unidentified: Option<String>,
}

/// The end of a link on the host, as it was recorded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostPeer {
    pub index: u32,
    pub name: Option<String>,
    pub mac: Option<String>,
}

/// What an error of a plugin means for DEL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DelErrors {
    /// DEL failed.
    Fail,
    /// DEL failed. If the main plugin failed, its IPAM plugin is called too: without a namespace some plugins never get that
    /// far, and the addresses are needed.
    ReleaseAddresses,
    /// As `ReleaseAddresses`, but DEL counts as done if the IPAM plugin released the addresses, and every plugin that failed
    /// reported its error itself or does not exist. Without an IPAM plugin DEL failed: nothing else releases what the plugin
    /// has allocated.
    Abandon,
}

/// How DEL runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DelMode {
    /// With the namespace.
    WithNamespace,
    /// With an empty `CNI_NETNS`: plugins release addresses and delete no link. Used if the namespace is gone, if the node
    /// was rebooted, or if a link has the attachment's name that is not the attachment's.
    ReleaseOnly,
}

/// Why an attachment is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemovePurpose {
    /// The annotation does not request it any more.
    Unplug,
    /// Its links were deleted. It is attached again.
    Replug,
    /// Its ADD failed, or the daemon stopped before it recorded the result.
    Undo,
    /// Its sandbox ended.
    SandboxEnded,
}

/// What can fail and is retried with backoff: see [`Failures`](super::Failures).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AttemptKey {
    /// Attaching an element.
    Add {
        nad: NadRef,
        /// The interface that the element requests.
        interface: Option<IfName>,
        /// Counts the elements with the same NAD and interface, from 0.
        ordinal: usize,
    },
    /// Detaching an attachment.
    Remove(AttachmentKey),
    /// Attaching again an attachment whose links were deleted. It does not fail, but it has a backoff of its own, so that a
    /// program in the pod that deletes the link each time does not keep the node busy.
    Replug(AttachmentKey),
}

impl Step {
    /// The attempt, unless the step cannot fail.
    pub fn attempt(&self) -> Option<(&AttemptKey, Fingerprint)> {
        match self {
            Self::Add(step) => Some((&step.attempt, step.fingerprint)),
            Self::Remove(step) => Some((&step.attempt, step.fingerprint)),
            Self::Finish(..) | Self::Forget(_) => None,
        }
    }

    /// Whether it cleans up after an ADD that failed or did not finish.
    pub fn is_cleanup(&self) -> bool {
        matches!(self, Self::Remove(step) if step.purpose == RemovePurpose::Undo)
    }
}

impl AddStep {
    /// The record to write before ADD.
    ///
    /// `links_before` are the indexes of all links of the namespace, read after the plan was made and before ADD.
    pub fn intent(&self, links_before: Vec<u32>) -> AttachmentRecord {
        AttachmentRecord {
            key: AttachmentKey { container: self.sandbox.id.clone(), interface: self.interface.to_string() },
            pod: self.pod.clone(),
            nad: self.nad.clone(),
            nad_guessed: false,
            origin: Origin::Hotplug,
            boot: self.boot.clone(),
            netns: self.sandbox.netns.clone(),
            requested: Some(self.requested.clone()),
            config: self.config.text().to_owned(),
            cni_args: self.cni_args.clone(),
            capability_args: self.capability_args.clone(),
            former_statuses: self.former_statuses.clone(),
            removing: false,
            phase: RecordPhase::Intent { links_before },
        }
    }
}

impl RemoveStep {
    /// Whether no link of the attachment is left, neither in the pod's namespace nor elsewhere. Then the default routes that it
    /// replaced are restored before DEL, which may fail.
    pub fn has_lost_links(&self) -> bool {
        let ended = self.purpose == RemovePurpose::SandboxEnded;
        let exists = !self.leftover_links.is_empty() || self.moved_links != MovedLinks::default();
        self.record.attached().is_some() && !ended && !exists
    }

    /// The record to write before DEL, unless the journal has it.
    ///
    /// An unfinished attachment and one of an ended sandbox are removed in any case.
    pub fn intent(&self) -> Option<AttachmentRecord> {
        let cancellable = matches!(self.purpose, RemovePurpose::Unplug | RemovePurpose::Replug);
        (cancellable && !self.record.removing)
            .then(|| AttachmentRecord { removing: true, ..self.record.clone() })
    }

    /// The record to write after DEL.
    pub fn removed_record(&self) -> AttachmentRecord {
        let mut record = self.record.clone();
        let statuses = self.record.attached().map_or(&[][..], |attached| &attached.statuses);
        for status in statuses {
            if !record.former_statuses.contains(status) {
                record.former_statuses.push(status.clone());
            }
        }
        record.phase = RecordPhase::Removed;
        record
    }
}
