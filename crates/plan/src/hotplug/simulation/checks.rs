//! What a simulated node shows, and what must hold at rest.

use std::collections::{BTreeMap, BTreeSet};

use api::{
    network_status::NetworkStatusList,
    selection::{NadRef, NetworkSelection},
};

use super::{
    super::{AttachmentKey, NadState, PodLifecycle},
    CLUSTER_ENTRY, SimNode, nad,
};

impl SimNode {
    /// The secondary entries of network-status, as `name@interface`.
    pub fn reported_attachments(&self) -> BTreeSet<String> {
        let list = NetworkStatusList::parse(self.server.network_status.as_deref()).unwrap();
        let entries = list.entries().iter().filter_map(|entry| entry.status());
        let entries = entries.filter(|entry| !entry.default && entry.name.contains('/'));
        entries.map(|entry| format!("{}@{}", entry.name, entry.interface)).collect()
    }

    /// The attachments that have a link, as `name@interface`.
    pub fn linked_attachments(&self) -> BTreeSet<String> {
        let links = self.sandbox.as_ref().map(|_| self.links());
        let owners = links.into_iter().flatten().filter_map(|(_, link)| link.owner.as_ref());
        owners.map(|(key, nad)| format!("{nad}@{}", key.interface)).collect()
    }

    /// The states in `patchbay.dev/attachments`, as `name@interface State/Reason`.
    pub fn states(&self) -> Vec<String> {
        let states = api::attachments::parse(self.server.attachments.as_deref()).unwrap();
        let text = |state: &api::attachments::Attachment| {
            let reason = if state.reason.is_empty() { String::new() } else { format!("/{}", state.reason) };
            format!("{}@{} {}{reason}", state.network, state.interface, state.state)
        };
        states.iter().map(text).collect()
    }

    /// The reasons of the events.
    pub fn reasons(&self) -> Vec<&'static str> {
        self.events.iter().map(|event| event.reason.as_str()).collect()
    }

    /// Checks what must hold at rest in every state.
    pub fn check(&self) {
        let plan = self.plan();
        assert_eq!((plan.step, plan.annotations, plan.events), (None, None, Vec::new()));
        assert_eq!(self.cache, self.server);
        let current = self.sandbox.as_ref().map(|sandbox| sandbox.id.as_str());
        for record in self.journal.values() {
            assert_eq!(Some(record.key.container.as_str()), current, "{record:?}");
            // An attachment whose ADD succeeded waits until the annotation can be parsed.
            let waits = NetworkSelection::parse(self.server.networks.as_deref()).error.is_some()
                && self.results.contains_key(&record.key);
            assert!(record.attached().is_some() || waits, "unfinished at rest: {record:?}");
        }
        let records = self.journal.keys().chain(self.multus.keys()).cloned().collect();
        assert_eq!(self.addresses, records, "addresses");
        if self.lifecycle == PodLifecycle::Running && !self.foreign_entries() {
            assert_eq!(self.reported_attachments(), self.linked_attachments(), "network-status and links");
        }
        let status = self.server.network_status.as_deref().unwrap_or_default();
        assert!(status.contains(CLUSTER_ENTRY), "the entry of the cluster network changed: {status}");
    }

    /// Whether network-status has entries of another writer that no record explains.
    fn foreign_entries(&self) -> bool {
        self.server.network_status.as_deref().unwrap_or_default().contains("other/")
    }

    /// Checks that the feasible part of the annotation is attached, and nothing else.
    pub fn check_annotation(&self) {
        let selection = NetworkSelection::parse(self.server.networks.as_deref());
        if selection.error.is_some() || self.lifecycle != PodLifecycle::Running || self.sandbox.is_none() {
            return;
        }
        let linked = self.linked_attachments();
        let lost = self
            .multus
            .values()
            .filter(|record| !linked.contains(&format!("{}@{}", record.nad, record.key.interface)));
        let (lost, lost_names): (Vec<&NadRef>, BTreeSet<&str>) =
            lost.map(|record| (&record.nad, record.key.interface.as_str())).unzip();
        let mut needed: BTreeMap<NadRef, usize> = BTreeMap::new();
        let mut names = BTreeSet::new();
        for (_, element) in selection.elements() {
            let nad = element.reference("default");
            *needed.entry(nad.clone()).or_default() += 1;
            let Some(name) = element.interface.as_ref().map(ToString::to_string) else { continue };
            let foreign = self.links().values().any(|link| {
                link.name == name && link.owner.as_ref().is_none_or(|(key, _)| key.interface != name)
            });
            let usable = matches!(self.nads.get(&nad), Some(NadState::Ready { .. }));
            let duplicate = !names.insert(name.clone());
            if foreign || duplicate || !usable || self.broken.contains(&nad) || lost.contains(&&nad) {
                continue;
            }
            let attached = linked.contains(&format!("{nad}@{name}"));
            // Another element of the same name may have been attached first.
            let other = linked.iter().any(|other| other.ends_with(&format!("@{name}")));
            let requested_twice =
                selection.elements().filter(|(_, it)| it.interface == element.interface).count() > 1;
            // An attachment that an invalid element may mean keeps its name.
            let recorded = self.journal.keys().any(|key| key.interface == name);
            let kept = (other || recorded) && selection.errors().next().is_some();
            let of_unnamed = other
                && selection.elements().any(|(_, it)| {
                    it.interface.is_none() && linked.contains(&format!("{}@{name}", it.reference("default")))
                });
            let unseen = |key: &AttachmentKey| key.interface == name && !self.requested.contains(key);
            assert!(
                attached
                    || self.multus.keys().any(unseen)
                    || (other && requested_twice)
                    || kept
                    || of_unnamed
                    || lost_names.contains(name.as_str()),
                "{nad}@{name} is not attached: {:?}\n{:?}\n{:?}\n{:?}",
                self.server.networks,
                self.links(),
                self.server.attachments,
                self.calls
            );
        }
        let count = |nad: &NadRef| linked.iter().filter(|it| it.starts_with(&format!("{nad}@"))).count();
        // What multus attached stays until a plan has seen its element.
        let kept = |nad: &NadRef| {
            let unseen = self.multus.iter().filter(|(key, _)| !self.requested.contains(*key));
            unseen.filter(|(_, record)| record.nad == *nad).count()
        };
        let has_invalid = selection.errors().next().is_some();
        for name in ["a", "b", "c", "d"].map(nad) {
            let (have, want) = (count(&name), needed.get(&name).copied().unwrap_or_default());
            assert!(have <= want + kept(&name) || has_invalid, "{name}: {have} attached, {want} requested");
            let usable = matches!(self.nads.get(&name), Some(NadState::Ready { .. }));
            let unnamed = selection.elements().all(|(_, element)| element.interface.is_none());
            if unnamed && usable && !self.broken.contains(&name) && !lost.contains(&&name) {
                assert!(
                    have >= want,
                    "{name}: {have} attached, {want} requested: {:?}\n{:?}\n{:?}\n{:?}",
                    self.server.networks,
                    self.links(),
                    self.server.attachments,
                    self.calls
                );
            }
        }
    }
}
