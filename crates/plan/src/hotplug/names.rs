//! The names of the interfaces of elements that are not attached.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use api::{IfName, network_status::NetworkStatus};

use super::{
    AttachmentRecord, RecordPhase,
    links::PodLinks,
    matching::{DesiredElement, Match, Matching},
};

/// The name of an element's interface, or why it cannot have the one that it requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Name {
    /// It is free.
    Free(IfName),
    /// An attachment has it that is removed first.
    PendingRemoval(IfName),
    /// Another link, attachment or element has it.
    Taken { name: IfName, message: String },
}

impl Name {
    pub fn as_str(&self) -> &str {
        match self {
            Self::Free(name) | Self::PendingRemoval(name) | Self::Taken { name, .. } => name.as_str(),
        }
    }
}

/// Assigns names to the elements that are not attached.
pub(super) struct Names<'a> {
    links: PodLinks<'a>,
    /// The records of the READY sandbox that hold a name.
    records: Vec<&'a AttachmentRecord>,
    /// Those that will be removed.
    removals: Vec<&'a AttachmentRecord>,
    /// The interfaces that network-status lists for the cluster's network.
    cluster: BTreeSet<&'a str>,
    /// The names that elements have, with the index of the element.
    claims: BTreeMap<String, usize>,
    /// The names of all links, recorded or not, and of the cluster's network.
    used: HashSet<&'a str>,
    /// No `net<N>` with a lower number is unused.
    next_number: usize,
}

impl<'a> Names<'a> {
    pub fn new(
        matching: &Matching<'a>,
        records: &[&'a AttachmentRecord],
        removals: Vec<&'a AttachmentRecord>,
        status: &'a [NetworkStatus],
        links: PodLinks<'a>,
    ) -> Self {
        let records: Vec<_> =
            records.iter().copied().filter(|record| record.phase != RecordPhase::Removed).collect();
        let cluster = status.iter().filter(|entry| entry.default || !entry.name.contains('/'));
        let mut claims = BTreeMap::new();
        for wanted in &matching.wanted {
            if let Some(name) = matched_interface(wanted) {
                claims.entry(name.to_owned()).or_insert(wanted.index);
            }
        }
        for wanted in &matching.wanted {
            if let Some(name) = &wanted.element.interface {
                claims.entry(name.to_string()).or_insert(wanted.index);
            }
        }
        let cluster: BTreeSet<&str> = cluster.map(|entry| entry.interface.as_str()).collect();
        let mut used: HashSet<&str> = links.links.iter().map(|link| link.name.as_str()).collect();
        used.extend(&cluster);
        for record in &records {
            let links = record.attached().map_or(&[][..], |attached| &attached.links);
            used.extend(links.iter().map(|link| link.name.as_str()).chain([record.key.interface.as_str()]));
        }
        Self { links, records, removals, cluster, claims, used, next_number: 1 }
    }

    /// The name for an element that is not attached.
    pub fn assign(&mut self, wanted: &DesiredElement<'_>) -> Option<Name> {
        // An unfinished or lost attachment of the element itself is removed first.
        if let Some(name) = matched_interface(wanted) {
            return name.parse().ok().map(Name::PendingRemoval);
        }
        if let Some(name) = &wanted.element.interface {
            return Some(self.check(wanted.index, name));
        }
        let mut name = format!("net{}", wanted.index + 1);
        while !self.is_unused(&name) {
            name = format!("net{}", self.next_number);
            self.next_number += 1;
        }
        self.claims.insert(name.clone(), wanted.index);
        name.parse().ok().map(Name::Free)
    }

    fn is_unused(&self, name: &str) -> bool {
        !self.used.contains(name) && !self.claims.contains_key(name)
    }

    /// Whether the element can have the name that it requests.
    fn check(&self, index: usize, name: &IfName) -> Name {
        let taken = |message: String| Name::Taken { name: name.clone(), message };
        if let Some(other) = self.claims.get(name.as_str()).filter(|other| **other != index) {
            return taken(format!(
                "interface {name} is the interface of element [{other}] too; request another name"
            ));
        }
        if self.cluster.contains(name.as_str()) {
            return taken(format!("interface {name} belongs to the cluster network; request another name"));
        }
        let leaves = |record: &AttachmentRecord| self.removals.iter().any(|other| other.key == record.key);
        let holder = self.records.iter().find(|record| record.key.interface == name.as_str());
        if let Some(link) = self.links.named(name.as_str()) {
            let owner = self.records.iter().find(|record| self.links.owns(record, link));
            return match owner {
                Some(record) if leaves(record) => Name::PendingRemoval(name.clone()),
                Some(record) => taken(format!(
                    "interface {name} belongs to the attachment of {}; request another name",
                    record.nad
                )),
                None => taken(format!(
                    "a link with the name {name} exists in the pod; delete it or request another name"
                )),
            };
        }
        match holder {
            Some(record) if leaves(record) => Name::PendingRemoval(name.clone()),
            Some(record) => taken(format!(
                "interface {name} belongs to the attachment of {}; request another name",
                record.nad
            )),
            None => Name::Free(name.clone()),
        }
    }
}

/// The interface of what an element is matched with.
fn matched_interface<'a>(wanted: &DesiredElement<'a>) -> Option<&'a str> {
    match wanted.matched? {
        Match::Record(record) => Some(&record.key.interface),
        Match::StatusOnly(status) => Some(&status.interface),
    }
}
