//! Which records of a pod count, and from which NAD they are.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use api::{
    nad_config::NadConfig,
    network_status::NetworkStatusList,
    selection::{NadRef, NetworkSelection},
};

use super::{
    AttachmentKey, AttachmentRecord, NadState, ObservedPod, RecordPhase, SandboxRef, links::PodLinks,
    matching::is_secondary,
};

/// The records of a pod, at most one of each key.
pub(super) struct EffectiveRecords<'a> {
    pub records: Vec<Cow<'a, AttachmentRecord>>,
    /// The records of the journal whose interface another program attached again.
    pub superseded: Vec<AttachmentKey>,
    /// The records of the journal that say nothing of the result of their ADD. Here they are attached.
    pub unrecorded: BTreeSet<AttachmentKey>,
}

impl<'a> EffectiveRecords<'a> {
    /// Of two records with the same key, that of the journal counts. But if its links were deleted and another link has the
    /// name, then that link is the one of which Multus' cache has the result: its address must not be released.
    pub fn new(observed: &'a ObservedPod, sandbox: Option<&SandboxRef>) -> Self {
        let (none, mut superseded) = (BTreeSet::new(), Vec::new());
        let links = PodLinks {
            links: observed.links.as_deref().unwrap_or_default(),
            host_links: &observed.host_links,
            never_lost: false,
            identified: &none,
        };
        let mut chosen: BTreeMap<&AttachmentKey, &AttachmentRecord> = BTreeMap::new();
        for record in &observed.records {
            // Those of the journal come first.
            let (Some(journal), cached) = (chosen.insert(&record.key, record), record) else { continue };
            let is_current = sandbox.is_some_and(|sandbox| sandbox.id == record.key.container);
            let lost = journal.attached().is_some_and(|attached| links.is_lost(attached));
            if is_current && lost && links.named(&record.key.interface).is_some() {
                superseded.push(record.key.clone());
                chosen.insert(&record.key, cached);
            } else {
                chosen.insert(&record.key, journal);
            }
        }
        let counts = |record: &&AttachmentRecord| {
            chosen.get(&record.key).is_some_and(|chosen| std::ptr::eq(*chosen, *record))
        };
        let records = observed.records.iter().filter(counts).map(Cow::Borrowed).collect();
        let mut effective = Self { records, superseded, unrecorded: BTreeSet::new() };
        effective.complete(observed);
        effective
    }

    /// Completes attachments whose ADD succeeded, and whose links live, with what it returned and created: the pod has the
    /// interface, whatever its annotation requests now.
    fn complete(&mut self, observed: &ObservedPod) {
        let links = observed.links.as_deref().unwrap_or_default();
        for record in &mut self.records {
            let RecordPhase::Intent { links_before } = &record.phase else { continue };
            let Some(attached) = observed.results.get(&record.key) else { continue };
            let lives =
                |index: u32| !links_before.contains(&index) && links.iter().any(|link| link.index == index);
            if !attached.links.is_empty() && attached.links.iter().all(|link| link.index.is_some_and(lives)) {
                self.unrecorded.insert(record.key.clone());
                record.to_mut().phase = RecordPhase::Attached(attached.clone());
            }
        }
    }

    /// Replaces guessed NADs: by that of the entry in network-status, or else by that of the only NAD with the same network
    /// name that an element requests for the interface.
    ///
    /// The latter stays a guess, but network-status can report it. Of any other guess it reports nothing.
    pub fn resolve_guesses(
        &mut self,
        network_status: Option<&str>,
        selection: &NetworkSelection,
        namespace: &str,
        nads: &impl Fn(&NadRef) -> NadState,
    ) {
        if !self.records.iter().any(|record| record.nad_guessed) {
            return;
        }
        let list = NetworkStatusList::parse(network_status).unwrap_or_default();
        let entries: Vec<_> = list.entries().iter().filter_map(|entry| entry.status()).collect();
        for record in self.records.iter_mut().filter(|record| record.nad_guessed) {
            let interface = record.key.interface.clone();
            let entry = entries.iter().find(|entry| is_secondary(entry) && entry.interface == interface);
            if let Some((of, name)) = entry.and_then(|entry| entry.name.split_once('/')) {
                let record = record.to_mut();
                record.nad_guessed = false;
                set_nad(record, NadRef::new(of, name));
                continue;
            }
            let network = NadConfig::parse(Some(&record.config), "").map(|config| config.name).ok();
            let suits = |nad: &NadRef| match nads(nad) {
                NadState::Ready { config } => Some(&config.name) == network.as_ref(),
                _ => false,
            };
            let requested = selection.elements().filter(|(_, element)| {
                element.interface.as_ref().is_none_or(|name| name.as_str() == interface)
            });
            let requested: BTreeSet<NadRef> =
                requested.map(|(_, element)| element.reference(namespace)).collect();
            let mut requested = requested.into_iter().filter(suits);
            match (requested.next(), requested.next()) {
                (Some(nad), None) => set_nad(record.to_mut(), nad),
                _ => {
                    if let RecordPhase::Attached(attached) = &mut record.to_mut().phase {
                        attached.statuses.clear();
                    }
                }
            }
        }
    }
}

fn set_nad(record: &mut AttachmentRecord, nad: NadRef) {
    if let RecordPhase::Attached(attached) = &mut record.phase {
        for status in &mut attached.statuses {
            status.name = nad.to_string();
        }
    }
    record.nad = nad;
}
