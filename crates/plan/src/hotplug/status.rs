//! The network-status annotation: the entries of the attachments that exist, and all entries of other writers.

use api::network_status::{NetworkStatus, NetworkStatusList};

use super::{AttachedRecord, AttachmentRecord, Origin, RecordPhase, links::PodLinks, matching::is_secondary};

/// The annotation, and what decides about its entries.
pub(super) struct StatusView<'a> {
    observed: Option<&'a str>,
    list: NetworkStatusList,
    links: PodLinks<'a>,
}

impl<'a> StatusView<'a> {
    /// An annotation that is not a JSON list is of no use to readers and is replaced.
    pub fn new(observed: Option<&'a str>, links: PodLinks<'a>) -> Self {
        Self { observed, list: NetworkStatusList::parse(observed).unwrap_or_default(), links }
    }

    /// The entries that are a network status.
    pub fn entries(&self) -> Vec<NetworkStatus> {
        self.list.entries().iter().filter_map(|entry| entry.status().cloned()).collect()
    }

    /// Whether the annotation reports nothing about a removed attachment.
    pub fn is_clean(&self, record: &AttachmentRecord, is_current: bool, live: &[&AttachmentRecord]) -> bool {
        let stale = |entry: &NetworkStatus| self.is_stale(entry, record, is_current, live);
        !self.list.entries().iter().filter_map(|entry| entry.status()).any(stale)
    }

    /// Whether an entry reports an attachment that does not exist. Only entries that can only be about `record` count.
    fn is_stale(
        &self,
        entry: &NetworkStatus,
        record: &AttachmentRecord,
        is_current: bool,
        live: &[&AttachmentRecord],
    ) -> bool {
        let has_interface = |status: &NetworkStatus| status.interface == entry.interface;
        let former = !reports(record, entry) && record.former_statuses.iter().any(has_interface);
        if !is_secondary(entry)
            || !(former || reports(record, entry))
            || live.iter().any(|live| reports(live, entry))
        {
            return false;
        }
        // Exactly what was written about an attachment that is gone, whatever link has its name now.
        let written =
            record.attached().filter(|_| !is_current).map_or(&[][..], |attached| &attached.statuses);
        if record.former_statuses.contains(entry) || written.contains(entry) {
            return true;
        }
        let link = self.links.named(&entry.interface);
        if !is_current {
            return entry.name == record.nad.to_string() && link.is_none();
        }
        match &record.phase {
            RecordPhase::Attached(_) if former => link.is_none(),
            RecordPhase::Intent { .. } => link.is_none_or(|link| self.links.owns(record, link)),
            RecordPhase::Removed => link.is_none(),
            RecordPhase::Attached(attached) => {
                self.links.is_interface_deleted(attached, &entry.interface)
                    && (link.is_none() || entry.name == record.nad.to_string())
            }
        }
    }

    /// The value that the annotation should have.
    ///
    /// `current` are the records of the READY sandbox in the order of new entries, `ended` those of other sandboxes. `defaults`
    /// are the entries that Multus writes first. If it could not write, the annotation has no default network: then they are
    /// inserted, but none for an interface that another writer reports.
    pub fn update(
        mut self,
        current: &[&AttachmentRecord],
        ended: &[&AttachmentRecord],
        defaults: &[NetworkStatus],
    ) -> Option<String> {
        let before = self.list.clone();
        let live: Vec<&AttachmentRecord> = current
            .iter()
            .copied()
            .filter(|record| record.attached().is_some_and(|attached| !self.links.is_lost(attached)))
            .collect();
        let mut list = std::mem::take(&mut self.list);
        let ours = ended.iter().filter(|record| record.origin != Origin::PodStart);
        for (record, is_current) in
            current.iter().map(|record| (record, true)).chain(ours.map(|record| (record, false)))
        {
            list.retain(|entry| !self.is_stale(entry, record, is_current, &live));
        }
        for record in &live {
            let Some(attached) = record.attached() else { continue };
            let new = self.entries_of(&list, record, attached);
            list.replace(|entry| is_secondary(entry) && reports(record, entry), &new);
        }
        let statuses: Vec<&NetworkStatus> =
            list.entries().iter().filter_map(|entry| entry.status()).collect();
        if !statuses.iter().any(|status| status.default) {
            let is_missing = |default: &&NetworkStatus| {
                !statuses.iter().any(|status| status.interface == default.interface)
            };
            let missing: Vec<NetworkStatus> = defaults.iter().filter(is_missing).cloned().collect();
            list.prepend(&missing);
        }
        if list == before && NetworkStatusList::parse(self.observed).is_ok() {
            return self.observed.map(str::to_owned);
        }
        if list.entries().is_empty() && self.observed.is_none() {
            return None;
        }
        Some(list.render())
    }

    /// The entries of an attachment that exists.
    ///
    /// Those that another program wrote about its own attachment stay as they are.
    fn entries_of(
        &self,
        list: &NetworkStatusList,
        record: &AttachmentRecord,
        attached: &AttachedRecord,
    ) -> Vec<NetworkStatus> {
        let present = |status: &&NetworkStatus| !self.links.is_interface_deleted(attached, &status.interface);
        let statuses: Vec<&NetworkStatus> = attached.statuses.iter().filter(present).collect();
        if record.origin == Origin::Hotplug {
            return statuses.into_iter().cloned().collect();
        }
        let name = record.nad.to_string();
        let written: Vec<&NetworkStatus> = list
            .entries()
            .iter()
            .filter_map(|entry| entry.status())
            .filter(|entry| is_secondary(entry) && reports(record, entry))
            .filter(|entry| record.nad_guessed || entry.name == name)
            .collect();
        let mut new: Vec<NetworkStatus> = written.iter().copied().filter(present).cloned().collect();
        // Multus writes no entry about an attachment without an interface.
        if !attached.links.is_empty() {
            let missing = statuses.into_iter().filter(|status| {
                let has = |entry: &NetworkStatus| entry.interface == status.interface;
                !new.iter().any(has)
            });
            let missing: Vec<NetworkStatus> = missing.cloned().collect();
            new.extend(missing);
        }
        new
    }
}

/// Whether an entry is about an interface of this attachment.
pub(super) fn reports(record: &AttachmentRecord, entry: &NetworkStatus) -> bool {
    let statuses = record.attached().map_or(&[][..], |attached| &attached.statuses);
    entry.interface == record.key.interface
        || statuses.iter().any(|status| status.interface == entry.interface)
}
