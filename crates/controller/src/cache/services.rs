//! The cache of NetworkServices and of everything that their endpoints depend on.
//!
//! It has its own lock and its own queue: a change of a pod wakes the services that select it, and no network.

mod entry;
mod expectations;
mod index;
mod interner;
mod network_service;
pub mod project;
mod selectors;
#[cfg(test)]
pub mod tests;
pub mod watches;

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use api::{NetworkServiceStatus, selection::NadRef};
use plan::services::{ObservedService, ObservedSlice, PodFacts};
use tokio::sync::watch as channel;

use self::index::{Concerned, ServiceIndex};
pub use self::{entry::ServiceSnapshot, index::ServiceSource, network_service::ObservedNetworkService};
use crate::services::{ServiceKey, ServiceQueue};

/// The services, their pods and their slices.
#[derive(Default)]
pub struct ServiceCache {
    index: Mutex<ServiceIndex>,
    queue: ServiceQueue,
    needs_pods: channel::Sender<bool>,
}

impl ServiceCache {
    /// The services that have to be reconciled.
    pub fn queue(&self) -> &ServiceQueue {
        &self.queue
    }

    /// Whether any service needs the endpoints of pods.
    pub fn needs_pods(&self) -> channel::Receiver<bool> {
        self.needs_pods.subscribe()
    }

    /// What a reconcile of this service reads. None while a source is not listed; then the service is marked again.
    pub fn snapshot(&self, key: &ServiceKey) -> Option<ServiceSnapshot> {
        self.lock().snapshot(key)
    }

    /// The number of NetworkServices and annotated Services.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Forgets what a leader wrote and did not see again. Another one may have led since.
    pub fn forget_own_writes(&self) {
        self.lock().forget_own_writes();
    }

    /// Marks all services: a new leader has reconciled none.
    pub fn mark_all(&self) {
        let tracked: Vec<ServiceKey> = self.lock().tracked().collect();
        self.mark(tracked);
    }

    /// Marks the services on this NAD.
    pub fn mark_network(&self, nad: &NadRef) {
        let services = self.lock().on_network(nad);
        self.mark(services);
    }

    /// Marks the services of a namespace.
    pub fn mark_namespace(&self, namespace: &str) {
        let services = self.lock().in_namespace(namespace);
        self.mark(services);
    }

    /// Records an own write of a slice, which has this generation now.
    pub fn expect_slice(&self, key: &ServiceKey, name: &str, uid: &str, generation: i64, now: Instant) {
        self.lock().expect(key, |expectations| expectations.written(name, uid, generation, now));
    }

    pub fn expect_slice_deletion(&self, key: &ServiceKey, name: &str, uid: &str, now: Instant) {
        self.lock().expect(key, |expectations| expectations.deleted(name, uid, now));
    }

    /// Records an own write of a status: the watch delivers it, and it needs no reconcile.
    pub fn expect_status(&self, key: &ServiceKey, status: NetworkServiceStatus) {
        self.lock().expect_status(key, status);
    }

    /// The next change of the status marks the service. Returns whether the NetworkService still has this version.
    pub fn wake_on_status(&self, key: &ServiceKey, resource_version: &str) -> bool {
        self.lock().wake_on_status(key, resource_version)
    }

    pub fn start_pod_list(&self) {
        self.lock().start_pod_list();
    }

    pub fn apply_pod(&self, pod: PodFacts) {
        let services = self.lock().apply_pod(pod);
        self.mark(services);
    }

    pub fn delete_pod(&self, namespace: &str, name: &str) {
        let services = self.lock().delete_pod(namespace, name);
        self.mark(services);
    }

    pub fn finish_pod_list(&self) {
        let services = self.lock().finish_pod_list();
        self.mark(services);
        self.mark_listed(ServiceSource::Pods);
    }

    pub fn clear_pods(&self) {
        self.lock().clear_pods();
    }

    pub fn set_node(&self, node: &str, zone: Option<&str>) {
        let services = self.lock().set_node(node, zone);
        self.mark(services);
    }

    pub fn delete_node(&self, node: &str) {
        let services = self.lock().delete_node(node);
        self.mark(services);
    }

    fn set_network_service(&self, key: &ServiceKey, new: Option<ObservedNetworkService>) {
        self.change(|index| index.set_network_service(key, new));
    }

    fn set_service(&self, key: &ServiceKey, new: Option<ObservedService>) {
        self.change(|index| index.set_service(key, new));
    }

    fn apply_slice(&self, key: &ServiceKey, slice: ObservedSlice) {
        self.change(|index| index.apply_slice(key, slice));
    }

    fn delete_slice(&self, key: &ServiceKey, name: &str, uid: &str) {
        self.change(|index| index.delete_slice(key, name, uid));
    }

    fn retain_slices(&self, listed: &HashSet<Arc<str>>, started: Instant) {
        self.change(|index| index.retain_slices(listed, started));
    }

    fn apply_foreign_slice(&self, key: &ServiceKey, name: &str, manager: &str) {
        self.change(|index| index.apply_foreign_slice(key, name, manager));
    }

    fn delete_foreign_slice(&self, namespace: &Arc<str>, name: &str) {
        self.change(|index| index.delete_foreign_slice(namespace, name));
    }

    fn retain_foreign_slices(&self, listed: &HashSet<(Arc<str>, Arc<str>)>) {
        self.change(|index| index.retain_foreign_slices(listed));
    }

    fn set_endpoints(&self, key: &ServiceKey, exists: bool) {
        self.change(|index| index.set_endpoints(key, exists));
    }

    fn mark_listed(&self, source: ServiceSource) {
        let services = self.lock().mark_listed(source);
        self.mark(services);
    }

    /// Forgets the objects of a source that is no longer watched.
    fn clear_foreign(&self, source: ServiceSource) {
        self.lock().mark_unlisted(source);
        match source {
            ServiceSource::ForeignSlices => self.retain_foreign_slices(&HashSet::new()),
            ServiceSource::Endpoints => self.change(ServiceIndex::clear_endpoints),
            ServiceSource::NetworkServices
            | ServiceSource::Services
            | ServiceSource::Slices
            | ServiceSource::Pods => {}
        }
    }

    fn change(&self, change: impl FnOnce(&mut ServiceIndex) -> Concerned) {
        let mut index = self.lock();
        let concerned = change(&mut index);
        let needs_pods = index.needs_pods();
        drop(index);
        self.needs_pods.send_if_modified(|needed| std::mem::replace(needed, needs_pods) != needs_pods);
        for (key, delay) in concerned {
            self.queue.mark_after(&key, delay);
        }
    }

    fn mark(&self, services: Vec<ServiceKey>) {
        for key in services {
            self.queue.mark_after(&key, Duration::ZERO);
        }
    }

    fn lock(&self) -> MutexGuard<'_, ServiceIndex> {
        // Nothing that holds the lock can panic in the middle of a change.
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
