//! The pods, Services, NetworkServices and EndpointSlices of the cluster, indexed by service.
//!
//! A change returns the services that it concerns. The work of a change depends on the services that it concerns, not on the
//! size of the cluster.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use api::{NetworkServiceStatus, selection::NadRef};
use client::fence::now;
use plan::services::{NodeZones, ObservedService, ObservedSlice, PodFacts};

use super::{
    entry::{PodContent, REPAIR_DELAY, ServiceEntry, ServiceSnapshot, StoredPod},
    expectations::SliceExpectations,
    interner::Interner,
    network_service::ObservedNetworkService,
    selectors::SelectorIndex,
};
use crate::services::ServiceKey;

/// The services to reconcile, and how soon.
pub type Concerned = Vec<(ServiceKey, Duration)>;

#[derive(Default)]
pub struct ServiceIndex {
    interner: Interner,
    namespaces: HashMap<Arc<str>, NamespaceIndex>,
    /// Shared with reconciles in progress.
    zones: Arc<NodeZones>,
    listed: HashSet<ServiceSource>,
    /// The number of lists of pods; see [`StoredPod::list`].
    pod_list: u32,
    /// The number of services that need the endpoints of pods.
    needing_pods: usize,
}

/// What the index is filled from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ServiceSource {
    NetworkServices,
    Services,
    Slices,
    /// The rest is watched only while a service needs it. Endpoints depend on pods.
    Pods,
    /// These two are only reported.
    ForeignSlices,
    Endpoints,
}

impl ServiceSource {
    /// What every reconcile reads.
    const ALWAYS: [Self; 3] = [Self::NetworkServices, Self::Services, Self::Slices];
    const FOREIGN: [Self; 2] = [Self::ForeignSlices, Self::Endpoints];
}

#[derive(Default)]
struct NamespaceIndex {
    pods: HashMap<Arc<str>, StoredPod>,
    services: HashMap<Arc<str>, ServiceEntry>,
    selectors: SelectorIndex,
    /// The Service that the label of each slice names, by the name of the slice.
    slices: HashMap<Arc<str>, Arc<str>>,
    /// The same of other managers.
    foreign_slices: HashMap<Arc<str>, Arc<str>>,
}

impl NamespaceIndex {
    /// Selects the pods of a service again if its selector changed.
    fn reselect(&mut self, namespace: &Arc<str>, name: &Arc<str>) {
        let Self { pods, services, selectors, .. } = self;
        let Some(entry) = services.get_mut(name) else { return };
        let Some(spec) = entry.spec(namespace, name) else {
            selectors.remove(name);
            entry.members.clear();
            entry.network = None;
            return;
        };
        if selectors.insert(name, &spec.selector) {
            let selected = pods.iter().filter(|(_, pod)| selectors.selects(name, pod.content.labels()));
            entry.members =
                selected.map(|(pod, stored)| (pod.clone(), stored.content.facts().cloned())).collect();
        }
        entry.network = Some(spec.network);
    }

    /// Puts a pod into the services that select it, and removes it from the others. Returns these services.
    fn change_pod(
        &mut self,
        name: &Arc<str>,
        old: Option<&PodContent>,
        new: Option<&PodContent>,
    ) -> HashSet<Arc<str>> {
        let matching = |content: Option<&PodContent>| match content {
            Some(content) => self.selectors.matching(content.labels()),
            None => Vec::new(),
        };
        let (before, after) = (matching(old), matching(new));
        let kept: HashSet<&Arc<str>> = after.iter().collect();
        for service in before.iter().filter(|service| !kept.contains(service)) {
            if let Some(entry) = self.services.get_mut(service) {
                entry.members.remove(name);
            }
        }
        for service in &after {
            if let (Some(entry), Some(content)) = (self.services.get_mut(service), new) {
                entry.members.insert(name.clone(), content.facts().cloned());
            }
        }
        before.into_iter().chain(after).collect()
    }
}

impl ServiceIndex {
    /// Whether any service needs the endpoints of pods.
    pub fn needs_pods(&self) -> bool {
        self.needing_pods > 0
    }

    /// The number of services that need the endpoints of pods.
    pub fn len(&self) -> usize {
        self.needing_pods
    }

    /// The services that are reconciled.
    pub fn tracked(&self) -> impl Iterator<Item = ServiceKey> {
        self.entries().filter(|(_, entry)| entry.is_tracked()).map(|(key, _)| key)
    }

    fn entries(&self) -> impl Iterator<Item = (ServiceKey, &ServiceEntry)> {
        self.namespaces.iter().flat_map(|(namespace, index)| {
            index
                .services
                .iter()
                .map(|(name, entry)| (ServiceKey { namespace: namespace.clone(), name: name.clone() }, entry))
        })
    }

    /// The services of this namespace that are reconciled.
    pub fn in_namespace(&self, namespace: &str) -> Vec<ServiceKey> {
        let Some((namespace, index)) = self.namespaces.get_key_value(namespace) else { return Vec::new() };
        let tracked = index.services.iter().filter(|(_, entry)| entry.is_tracked());
        keys(namespace, tracked.map(|(name, _)| name.clone()))
    }

    /// The services on this NAD.
    pub fn on_network(&self, nad: &NadRef) -> Vec<ServiceKey> {
        self.entries().filter(|(_, entry)| entry.network.as_ref() == Some(nad)).map(|(key, _)| key).collect()
    }

    // Pods.

    pub fn start_pod_list(&mut self) {
        self.pod_list = self.pod_list.wrapping_add(1);
    }

    pub fn apply_pod(&mut self, pod: PodFacts) -> Vec<ServiceKey> {
        let list = self.pod_list;
        let known = self.namespaces.get_mut(&pod.namespace).and_then(|index| index.pods.get_mut(&pod.name));
        if let Some(known) = known.filter(|known| known.content.equals(&pod)) {
            known.list = list;
            return Vec::new();
        }
        let pod = self.interner.pod(pod);
        let (namespace, name) = (pod.namespace.clone(), pod.name.clone());
        let index = self.namespaces.entry(namespace.clone()).or_default();
        let content = PodContent::new(pod);
        let stored = StoredPod { content: content.clone(), list };
        let old = index.pods.insert(name.clone(), stored);
        let services = index.change_pod(&name, old.as_ref().map(|old| &old.content), Some(&content));
        keys(&namespace, services)
    }

    pub fn delete_pod(&mut self, namespace: &str, name: &str) -> Vec<ServiceKey> {
        let Some((namespace, _)) = self.namespaces.get_key_value(namespace) else { return Vec::new() };
        let namespace = namespace.clone();
        let Some(index) = self.namespaces.get_mut(&namespace) else { return Vec::new() };
        let Some((name, old)) = index.pods.remove_entry(name) else { return Vec::new() };
        let services = index.change_pod(&name, Some(&old.content), None);
        self.remove_empty(&namespace);
        keys(&namespace, services)
    }

    /// Removes the pods that the list did not contain.
    pub fn finish_pod_list(&mut self) -> Vec<ServiceKey> {
        let list = self.pod_list;
        let namespaces = self.namespaces.iter();
        let gone = namespaces.flat_map(|(namespace, index)| {
            let pods = index.pods.iter().filter(|(_, pod)| pod.list != list);
            pods.map(|(name, _)| (namespace.clone(), name.clone()))
        });
        let gone: Vec<(Arc<str>, Arc<str>)> = gone.collect();
        gone.iter().flat_map(|(namespace, name)| self.delete_pod(namespace, name)).collect()
    }

    /// Forgets all pods: they are no longer watched.
    pub fn clear_pods(&mut self) {
        self.mark_unlisted(ServiceSource::Pods);
        for index in self.namespaces.values_mut() {
            index.pods = HashMap::new();
            index.services.values_mut().for_each(|entry| entry.members.clear());
        }
        self.namespaces.retain(|_, index| !index.services.is_empty());
        self.interner = Interner::default();
    }

    /// The source is complete. Returns the services that may have waited for it.
    pub fn mark_listed(&mut self, source: ServiceSource) -> Vec<ServiceKey> {
        if self.listed.insert(source) { self.tracked().collect() } else { Vec::new() }
    }

    pub fn mark_unlisted(&mut self, source: ServiceSource) {
        self.listed.remove(&source);
    }

    // Nodes.

    /// Sets the zone of a Node. Returns the services with a pod on it, if that changes anything.
    pub fn set_node(&mut self, node: &str, zone: Option<&str>) -> Vec<ServiceKey> {
        if self.zones.get(node).is_some_and(|known| known.as_deref() == zone) {
            return Vec::new();
        }
        let (name, zone) =
            (self.interner.text(node.into()), zone.map(|zone| self.interner.text(zone.into())));
        Arc::make_mut(&mut self.zones).insert(name, zone);
        self.on_node(node)
    }

    pub fn delete_node(&mut self, node: &str) -> Vec<ServiceKey> {
        if !self.zones.contains_key(node) {
            return Vec::new();
        }
        Arc::make_mut(&mut self.zones).remove(node);
        self.on_node(node)
    }

    fn on_node(&self, node: &str) -> Vec<ServiceKey> {
        let on_node = |entry: &ServiceEntry| {
            let mut pods = entry.members.values().flatten();
            pods.any(|pod| pod.node.as_deref() == Some(node))
        };
        self.entries().filter(|(_, entry)| on_node(entry)).map(|(key, _)| key).collect()
    }

    // Services and NetworkServices.

    pub fn set_network_service(
        &mut self,
        key: &ServiceKey,
        new: Option<ObservedNetworkService>,
    ) -> Concerned {
        let entry = self.entry(key);
        let written = entry.and_then(|entry| entry.written_status.as_ref());
        let own = new.as_ref().is_some_and(|new| written == Some(&new.status));
        let relevant = match (entry.and_then(|entry| entry.network_service.as_deref()), &new) {
            (Some(known), Some(new)) => {
                !known.has_same_desired_state(new) || !own && known.status != new.status
            }
            (known, new) => known.is_some() != new.is_some(),
        };
        self.change_desired(key, |entry| {
            if own || new.is_none() {
                entry.written_status = None;
            }
            entry.network_service = new.map(Arc::new);
        });
        if relevant { vec![(key.clone(), Duration::ZERO)] } else { Vec::new() }
    }

    pub fn set_service(&mut self, key: &ServiceKey, new: Option<ObservedService>) -> Concerned {
        let entry = self.entry(key);
        if entry.and_then(|entry| entry.service.as_deref()) == new.as_ref() {
            return Vec::new();
        }
        let was_tracked = entry.is_some_and(ServiceEntry::is_tracked);
        self.change_desired(key, |entry| entry.service = new.map(Arc::new));
        let tracked = was_tracked || self.entry(key).is_some_and(ServiceEntry::is_tracked);
        if tracked { vec![(key.clone(), Duration::ZERO)] } else { Vec::new() }
    }

    // Slices.

    /// An own slice as the watch delivers it.
    pub fn apply_slice(&mut self, key: &ServiceKey, slice: ObservedSlice) -> Concerned {
        let slice = self.interner.slice(slice);
        let name = slice.name.clone();
        let mut concerned = Vec::new();
        let named = self
            .namespaces
            .entry(key.namespace.clone())
            .or_default()
            .slices
            .insert(name.clone(), key.name.clone());
        if let Some(old) = named.filter(|old| *old != key.name) {
            let old = ServiceKey { namespace: key.namespace.clone(), name: old };
            self.change(&old, |entry| _ = entry.slices.remove(&name));
            concerned.push((old, REPAIR_DELAY));
        }
        self.change(key, |entry| {
            let own = entry.expectations.observe(&slice);
            let same = entry.slices.get(&name).is_some_and(|known| **known == slice);
            entry.slices.insert(name, Arc::new(slice));
            concerned.extend(entry.wake(key, own || same));
        });
        concerned
    }

    pub fn delete_slice(&mut self, key: &ServiceKey, name: &str, uid: &str) -> Concerned {
        let mut concerned = Vec::new();
        if let Some(index) = self.namespaces.get_mut(&key.namespace) {
            index.slices.remove(name);
        }
        self.change(key, |entry| {
            let own = entry.expectations.observe_deletion(uid);
            if entry.slices.get(name).is_some_and(|slice| *slice.uid == *uid) {
                entry.slices.remove(name);
            }
            concerned.extend(entry.wake(key, own));
        });
        concerned
    }

    /// Removes the slices that a list did not contain. `listed` has the UIDs of the others, and `started` is the time of the
    /// request.
    pub fn retain_slices(&mut self, listed: &HashSet<Arc<str>>, started: Instant) -> Concerned {
        let all: Vec<ServiceKey> = self.entries().map(|(key, _)| key).collect();
        let mut concerned = Vec::new();
        for key in all {
            let Some(entry) = self.entry(&key) else { continue };
            let gone: Vec<_> =
                entry.slices.values().filter(|slice| !listed.contains(&slice.uid)).cloned().collect();
            // What was written before the list is in it, or was deleted since.
            self.change(&key, |entry| entry.expectations.relisted(started));
            for slice in gone {
                concerned.extend(self.delete_slice(&key, &slice.name, &slice.uid));
            }
        }
        concerned
    }

    /// A slice of another manager.
    pub fn apply_foreign_slice(&mut self, key: &ServiceKey, name: &str, manager: &str) -> Concerned {
        let known = self.entry(key).is_some_and(|entry| {
            let mut slices = entry.foreign_slices.iter();
            slices.any(|(known, known_manager)| **known == *name && **known_manager == *manager)
        });
        if known {
            return Vec::new();
        }
        let mut concerned = self.delete_foreign_slice(&key.namespace, name);
        let (name, manager) = (self.interner.text(name.into()), self.interner.text(manager.into()));
        let namespace = self.namespaces.entry(key.namespace.clone()).or_default();
        namespace.foreign_slices.insert(name.clone(), key.name.clone());
        concerned.extend(self.change_foreign(key, |entry| entry.foreign_slices.push((name, manager))));
        concerned
    }

    pub fn delete_foreign_slice(&mut self, namespace: &Arc<str>, name: &str) -> Concerned {
        let index = self.namespaces.get_mut(namespace);
        let Some(service) = index.and_then(|index| index.foreign_slices.remove(name)) else {
            return Vec::new();
        };
        let key = ServiceKey { namespace: namespace.clone(), name: service };
        self.change_foreign(&key, |entry| entry.foreign_slices.retain(|(known, _)| **known != *name))
    }

    /// Removes the foreign slices that a list did not contain.
    pub fn retain_foreign_slices(&mut self, listed: &HashSet<(Arc<str>, Arc<str>)>) -> Concerned {
        let namespaces = self.namespaces.iter();
        let all = namespaces.flat_map(|(namespace, index)| {
            index.foreign_slices.keys().map(move |name| (namespace.clone(), name.clone()))
        });
        let gone: Vec<(Arc<str>, Arc<str>)> = all.filter(|slice| !listed.contains(slice)).collect();
        gone.iter().flat_map(|(namespace, name)| self.delete_foreign_slice(namespace, name)).collect()
    }

    pub fn set_endpoints(&mut self, key: &ServiceKey, exists: bool) -> Concerned {
        if self.entry(key).is_some_and(|entry| entry.has_endpoints) == exists {
            return Vec::new();
        }
        self.change_foreign(key, |entry| entry.has_endpoints = exists)
    }

    /// Forgets all Endpoints objects: they are no longer watched.
    pub fn clear_endpoints(&mut self) -> Concerned {
        let all: Vec<ServiceKey> =
            self.entries().filter(|(_, entry)| entry.has_endpoints).map(|(key, _)| key).collect();
        all.iter().flat_map(|key| self.set_endpoints(key, false)).collect()
    }

    fn change_foreign(&mut self, key: &ServiceKey, change: impl FnOnce(&mut ServiceEntry)) -> Concerned {
        self.change(key, change);
        let tracked = self.entry(key).is_some_and(ServiceEntry::is_tracked);
        if tracked { vec![(key.clone(), Duration::ZERO)] } else { Vec::new() }
    }

    // Reconciles.

    /// What a reconcile of this service reads. None while a source is not listed; then the service is marked again.
    pub fn snapshot(&mut self, key: &ServiceKey) -> Option<ServiceSnapshot> {
        let are_listed =
            |sources: &[ServiceSource]| sources.iter().all(|source| self.listed.contains(source));
        if !are_listed(&ServiceSource::ALWAYS) {
            return None;
        }
        let pods_listed = are_listed(&[ServiceSource::Pods]);
        let foreign_listed = are_listed(&ServiceSource::FOREIGN);
        let zones = Arc::clone(&self.zones);
        let entry =
            self.namespaces.get_mut(&key.namespace).and_then(|index| index.services.get_mut(&key.name));
        let Some(entry) = entry else {
            return Some(ServiceSnapshot::default());
        };
        if entry.needs_pods() && !pods_listed {
            return None;
        }
        let slices: Vec<Arc<ObservedSlice>> = entry.slices.values().cloned().collect();
        let stale = entry.expectations.is_stale(&entry.slices, now());
        entry.awaits_slices = stale;
        let pods: Vec<Arc<PodFacts>> = entry.members.values().flatten().cloned().collect();
        Some(ServiceSnapshot {
            name: key.name.clone(),
            network_service: entry.network_service.clone(),
            service: entry.service.clone(),
            slices,
            foreign_slices: entry.foreign_slices.clone(),
            has_endpoints: entry.has_endpoints,
            foreign_listed,
            plain_pods: entry.members.len() - pods.len(),
            pods,
            zones,
            stale,
        })
    }

    /// The watch delivers this status, which needs no reconcile.
    pub fn expect_status(&mut self, key: &ServiceKey, status: NetworkServiceStatus) {
        self.change(key, |entry| {
            if entry.network_service.is_some() {
                entry.written_status = Some(status);
            }
        });
    }

    /// The next change of the status needs a reconcile. Returns whether the NetworkService still has this version.
    pub fn wake_on_status(&mut self, key: &ServiceKey, resource_version: &str) -> bool {
        let mut unchanged = false;
        self.change(key, |entry| {
            entry.written_status = None;
            let current = entry.network_service.as_ref();
            unchanged = current.is_some_and(|current| current.resource_version == resource_version);
        });
        unchanged
    }

    pub fn forget_own_writes(&mut self) {
        for entry in self.namespaces.values_mut().flat_map(|index| index.services.values_mut()) {
            entry.expectations = SliceExpectations::default();
            entry.awaits_slices = false;
            entry.written_status = None;
        }
    }

    pub fn expect(&mut self, key: &ServiceKey, record: impl FnOnce(&mut SliceExpectations)) {
        self.change(key, |entry| record(&mut entry.expectations));
    }

    fn entry(&self, key: &ServiceKey) -> Option<&ServiceEntry> {
        self.namespaces.get(&key.namespace)?.services.get(&key.name)
    }

    /// Changes what decides which pods a service selects.
    fn change_desired(&mut self, key: &ServiceKey, change: impl FnOnce(&mut ServiceEntry)) {
        let needs = |index: &Self| usize::from(index.entry(key).is_some_and(ServiceEntry::needs_pods));
        let before = needs(self);
        self.change(key, change);
        if let Some(index) = self.namespaces.get_mut(&key.namespace) {
            index.reselect(&key.namespace, &key.name);
        }
        self.needing_pods = self.needing_pods + needs(self) - before;
    }

    fn change(&mut self, key: &ServiceKey, change: impl FnOnce(&mut ServiceEntry)) {
        let (namespace, name) =
            (self.interner.text(key.namespace.clone()), self.interner.text(key.name.clone()));
        let index = self.namespaces.entry(namespace.clone()).or_default();
        let entry = index.services.entry(name.clone()).or_default();
        change(entry);
        if entry.is_empty() {
            index.services.remove(&name);
            index.selectors.remove(&name);
        }
        self.remove_empty(&namespace);
    }

    fn remove_empty(&mut self, namespace: &Arc<str>) {
        if self
            .namespaces
            .get(namespace)
            .is_some_and(|index| index.pods.is_empty() && index.services.is_empty())
        {
            self.namespaces.remove(namespace);
        }
    }
}

fn keys(namespace: &Arc<str>, names: impl IntoIterator<Item = Arc<str>>) -> Vec<ServiceKey> {
    names.into_iter().map(|name| ServiceKey { namespace: namespace.clone(), name }).collect()
}
