//! Which element of the annotation each attachment belongs to.

use std::collections::{BTreeMap, BTreeSet};

use api::{
    IfName,
    network_status::NetworkStatus,
    selection::{NadRef, NetworkSelection, NetworkSelectionElement},
};

use super::{
    AttachmentKey, AttachmentRecord, AttemptKey, Origin, RecordPhase, RequestedAddresses, links::PodLinks,
    status::reports,
};

/// The maximum number of networks of a pod. Further elements are refused.
pub(super) const MAX_WANTED: usize = 64;
/// The maximum number of refused elements that are reported.
const MAX_REPORTED: usize = 64;

/// A valid element of the annotation.
pub(super) struct DesiredElement<'a> {
    /// Its index in the annotation, from 0.
    pub index: usize,
    pub element: &'a NetworkSelectionElement,
    pub nad: NadRef,
    pub requested: RequestedAddresses,
    pub attempt: AttemptKey,
    pub matched: Option<Match<'a>>,
}

/// What an element is matched with.
#[derive(Clone, Copy)]
pub(super) enum Match<'a> {
    /// An attachment, finished or not.
    Record(&'a AttachmentRecord),
    /// A link and its entry in network-status, without a record.
    StatusOnly(&'a NetworkStatus),
}

/// An element of the annotation that is invalid or one too many.
pub(super) struct Invalid {
    /// The NAD that it names, if it names one.
    pub nad: Option<NadRef>,
    /// Why it is refused, and what to do.
    pub message: String,
}

/// The elements of an annotation, each with its attachment, and the attachments that no element requests.
pub(super) struct Matching<'a> {
    pub wanted: Vec<DesiredElement<'a>>,
    /// Those to report, at most [`MAX_REPORTED`].
    pub invalid: Vec<Invalid>,
    /// The attachments that no element requests, and those whose removal has begun.
    pub unwanted: Vec<&'a AttachmentRecord>,
    /// The attachments that an invalid element may request, and those from an unknown NAD. They stay as they are.
    pub protected: Vec<&'a AttachmentRecord>,
    /// The attachments of other programs that no element requests, and that none was seen to request. They stay too.
    pub kept: Vec<&'a AttachmentRecord>,
}

impl<'a> Matching<'a> {
    /// Matches each attachment at most once: elements with an interface by NAD and interface, then the others by NAD and in
    /// order, of which those with the same addresses come first.
    ///
    /// `records` are those of the READY sandbox.
    pub fn new(
        selection: &'a NetworkSelection,
        namespace: &str,
        records: &[&'a AttachmentRecord],
        status: &'a [NetworkStatus],
        links: PodLinks<'_>,
    ) -> Self {
        let (mut wanted, excess) = wanted(selection, namespace);
        let unfinished = records.iter().copied().filter(|record| record.phase != RecordPhase::Removed);
        let (removing, mut free): (Vec<_>, Vec<&AttachmentRecord>) =
            unfinished.partition(|record| record.removing);
        // Unfinished ones come and go with each attempt, so they must not change what the others belong to.
        free.sort_by_cached_key(|record| {
            (record.attached().is_none(), interface_order(&record.key.interface))
        });
        let mut take = |wanted: &DesiredElement<'_>, suits: &dyn Fn(&AttachmentRecord) -> bool| {
            let at = free.iter().position(|record| record.nad == wanted.nad && suits(record))?;
            Some(Match::Record(free.remove(at)))
        };
        for element in &mut wanted {
            if let Some(interface) = &element.element.interface {
                element.matched = take(element, &|record| record.key.interface == interface.as_str());
            }
        }
        for same_addresses in [true, false] {
            for element in &mut wanted {
                if element.element.interface.is_none() && element.matched.is_none() {
                    let requested = element.requested.clone();
                    element.matched = take(element, &|record| {
                        !same_addresses || record.requested.as_ref() == Some(&requested)
                    });
                }
            }
        }
        match_status(&mut wanted, records, status, links);
        // The NADs of what is refused. `None`: it may be any.
        let mut refused: BTreeSet<Option<NadRef>> = BTreeSet::new();
        let mut invalid = Vec::new();
        for entry in &selection.entries {
            let Err(error) = &entry.element else { continue };
            let nad = entry.reference(namespace);
            refused.insert(nad.clone());
            if invalid.len() < MAX_REPORTED {
                let message = format!("{error}; correct the networks annotation");
                invalid.push(Invalid { nad, message });
            }
        }
        refused.extend(excess.iter().map(|(_, nad)| Some(nad.clone())));
        let (protected, mut unwanted): (Vec<&AttachmentRecord>, Vec<_>) =
            free.into_iter().partition(|record| {
                let may_mean = refused.contains(&None) || refused.contains(&Some(record.nad.clone()));
                record.nad_guessed || (record.attached().is_some() && may_mean)
            });
        // Those of the pod's start are attached.
        let attached: BTreeSet<&NadRef> = protected.iter().map(|record| &record.nad).collect();
        let unattached = excess.into_iter().filter(|(_, nad)| !attached.contains(nad));
        for (index, nad) in unattached.take(MAX_REPORTED.saturating_sub(invalid.len())) {
            let message = format!(
                "element [{index}]: Patchbay handles at most {MAX_WANTED} networks of a pod; remove networks from the \
                 annotation"
            );
            invalid.push(Invalid { nad: Some(nad), message });
        }
        unwanted.extend(removing);
        Self { wanted, invalid, unwanted, protected, kept: Vec::new() }
    }

    /// Keeps the attachments of other programs unless they are `requested`: the pod may have lost the element while nothing
    /// acted on its annotation, and no element ever requests the `defaultNetworks` of Multus.
    pub fn keep_unrequested(&mut self, requested: &BTreeSet<AttachmentKey>) {
        let unwanted = std::mem::take(&mut self.unwanted);
        (self.kept, self.unwanted) = unwanted.into_iter().partition(|record| {
            record.origin != Origin::Hotplug && !record.removing && !requested.contains(&record.key)
        });
    }

    /// The attachments of other programs that an element was seen to request: the former ones that exist, and those of now.
    pub fn requested(
        &self,
        former: &BTreeSet<AttachmentKey>,
        records: &[&AttachmentRecord],
    ) -> BTreeSet<AttachmentKey> {
        let foreign =
            |record: &&AttachmentRecord| record.origin != Origin::Hotplug && record.attached().is_some();
        let now = self.wanted.iter().filter_map(|wanted| match wanted.matched {
            Some(Match::Record(record)) => Some(record),
            Some(Match::StatusOnly(_)) | None => None,
        });
        let existing = records.iter().copied().filter(|record| former.contains(&record.key));
        now.chain(existing).filter(foreign).map(|record| record.key.clone()).collect()
    }
}

/// The elements that are handled, and the index and the NAD of the others.
fn wanted<'a>(
    selection: &'a NetworkSelection,
    namespace: &str,
) -> (Vec<DesiredElement<'a>>, Vec<(usize, NadRef)>) {
    let mut counts: BTreeMap<(NadRef, Option<&IfName>), usize> = BTreeMap::new();
    let (mut wanted, mut excess) = (Vec::new(), Vec::new());
    for (index, element) in selection.elements() {
        let nad = element.reference(namespace);
        if wanted.len() >= MAX_WANTED {
            excess.push((index, nad));
            continue;
        }
        let interface = element.interface.as_ref();
        let count = counts.entry((nad.clone(), interface)).or_default();
        let attempt = AttemptKey::Add { nad: nad.clone(), interface: interface.cloned(), ordinal: *count };
        *count += 1;
        let requested = RequestedAddresses::of(element);
        wanted.push(DesiredElement { index, element, nad, requested, attempt, matched: None });
    }
    (wanted, excess)
}

/// Matches elements with links that only network-status relates to a NAD.
fn match_status<'a>(
    wanted: &mut [DesiredElement<'a>],
    records: &[&AttachmentRecord],
    status: &'a [NetworkStatus],
    links: PodLinks<'_>,
) {
    // An entry about a recorded attachment stays that if its link was renamed and another link has the name now.
    let explains = |record: &AttachmentRecord, entry: &NetworkStatus| {
        (record.attached().is_some() && reports(record, entry)) || record.former_statuses.contains(entry)
    };
    let unrecorded = |entry: &&NetworkStatus| {
        let link = links.named(&entry.interface);
        is_secondary(entry)
            && link.is_some_and(|link| !records.iter().any(|record| links.owns(record, link)))
            && !records.iter().any(|record| explains(record, entry))
    };
    let mut free: Vec<&NetworkStatus> = status.iter().filter(unrecorded).collect();
    for named in [true, false] {
        for element in wanted.iter_mut().filter(|element| element.matched.is_none()) {
            let interface = element.element.interface.as_ref();
            if interface.is_some() != named {
                continue;
            }
            let name = element.nad.to_string();
            let suits = |entry: &&NetworkStatus| {
                entry.name == name && interface.is_none_or(|interface| entry.interface == interface.as_str())
            };
            if let Some(at) = free.iter().position(suits) {
                element.matched = Some(Match::StatusOnly(free.remove(at)));
            }
        }
    }
}

/// Whether an entry of network-status is about an attachment to a NAD, and not about the cluster's network.
pub(super) fn is_secondary(status: &NetworkStatus) -> bool {
    !status.default && status.name.contains('/') && !status.interface.is_empty()
}

/// Sorts `net2` before `net10`.
pub(super) fn interface_order(name: &str) -> (String, u64, String) {
    let text = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let number = name[text.len()..].parse().unwrap_or_default();
    (text.to_owned(), number, name.to_owned())
}
