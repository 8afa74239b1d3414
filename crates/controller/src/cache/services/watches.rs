//! The watches of NetworkServices, Services, EndpointSlices and Endpoints.

use std::{collections::HashSet, future::Future, pin::pin, sync::Arc, time::Duration};

use api::networkservice::{MANAGED_BY_LABEL, SERVICE_NAME_LABEL, SLICE_MANAGER};
use client::{
    decode::MetadataObject,
    fence::now,
    watch::{StreamEvent, WatchConfig},
};
use futures::{Stream, StreamExt as _};
use k8s_openapi::api::{core::v1::Service, discovery::v1::EndpointSlice};
use kube::Api;
use tokio::{sync::watch, time::timeout};

use super::{
    ServiceCache, ServiceSource,
    network_service::ObservedNetworkService,
    project::{self, NetworkServiceObject},
};
use crate::{
    cache::{pods::KEEP_ENDPOINTS, watches::CacheFiller},
    metrics::ApiCallKind,
    services::ServiceKey,
    watch::events,
};

/// A slice has up to a hundred endpoints of several hundred bytes each.
const SLICE_PAGE_SIZE: u32 = 50;

impl CacheFiller {
    /// Runs all watches of services, except that of pods. Never returns.
    pub async fn services(&self) {
        futures::join!(
            self.network_services(),
            self.kubernetes_services(),
            self.slices(),
            self.while_needed(ServiceSource::ForeignSlices, || self.foreign_slices()),
            self.while_needed(ServiceSource::Endpoints, || self.endpoints()),
        );
    }

    async fn network_services(&self) {
        let stream =
            self.all::<NetworkServiceObject>(&project::network_services(), ApiCallKind::WatchNetworkServices);
        let set = ServiceCache::set_network_service;
        self.mirror_services(ServiceSource::NetworkServices, stream, ObservedNetworkService::new, set).await;
    }

    async fn kubernetes_services(&self) {
        let api: Api<Service> = Api::all(self.client.clone());
        let stream = events(api, WatchConfig::all(), self.metrics.clone(), ApiCallKind::WatchServices);
        self.mirror_services(ServiceSource::Services, stream, project::service, ServiceCache::set_service)
            .await;
    }

    async fn endpoints(&self) {
        let stream = self.all::<MetadataObject>(&project::endpoints(), ApiCallKind::WatchEndpoints);
        let read = |object: MetadataObject| {
            let metadata = object.metadata;
            Some((ServiceKey::new(metadata.namespace.as_deref()?, metadata.name.as_deref()?), ()))
        };
        let set = |services: &ServiceCache, key: &ServiceKey, exists: Option<()>| {
            services.set_endpoints(key, exists.is_some());
        };
        self.mirror_services(ServiceSource::Endpoints, stream, read, set).await;
    }

    /// Mirrors a watch of objects that have the name of a service.
    async fn mirror_services<K, T>(
        &self,
        source: ServiceSource,
        stream: impl Stream<Item = StreamEvent<K>>,
        read: impl Fn(K) -> Option<(ServiceKey, T)>,
        set: impl Fn(&ServiceCache, &ServiceKey, Option<T>),
    ) {
        let services = self.cache.services();
        let mut stream = pin!(stream);
        let mut known: HashSet<ServiceKey> = HashSet::new();
        let mut listing: Option<HashSet<ServiceKey>> = None;
        while let Some(event) = stream.next().await {
            match event {
                StreamEvent::Failed(_) | StreamEvent::Resumed => {}
                StreamEvent::ListStarted => listing = Some(HashSet::new()),
                StreamEvent::Applied(object) => {
                    let Some((key, value)) = read(object) else { continue };
                    set(services, &key, Some(value));
                    if let Some(listing) = &mut listing {
                        listing.insert(key.clone());
                    }
                    known.insert(key);
                }
                StreamEvent::Deleted(object) => {
                    let Some((key, _)) = read(object) else { continue };
                    set(services, &key, None);
                    known.remove(&key);
                }
                StreamEvent::ListDone => {
                    let listed = listing.take().unwrap_or_default();
                    for key in known.extract_if(|key| !listed.contains(key)) {
                        set(services, &key, None);
                    }
                    services.mark_listed(source);
                }
                // The kind does not exist, so there are no objects.
                StreamEvent::NotServed(_) => {
                    for key in known.drain() {
                        set(services, &key, None);
                    }
                    services.mark_listed(source);
                }
            }
        }
    }

    /// The slices that Patchbay manages.
    async fn slices(&self) {
        let services = self.cache.services();
        let api: Api<EndpointSlice> = Api::all(self.client.clone());
        let selector = format!("{MANAGED_BY_LABEL}={SLICE_MANAGER}");
        let config = WatchConfig::labelled(&selector).page_size(SLICE_PAGE_SIZE);
        let mut stream = pin!(events(api, config, self.metrics.clone(), ApiCallKind::WatchSlices));
        let mut listing = None;
        while let Some(event) = stream.next().await {
            match event {
                StreamEvent::Failed(_) | StreamEvent::Resumed | StreamEvent::NotServed(_) => {}
                StreamEvent::ListStarted => listing = Some((HashSet::new(), now())),
                StreamEvent::Applied(object) => {
                    let Some((key, slice)) = project::slice(object) else { continue };
                    if let Some((listed, _)) = &mut listing {
                        listed.insert(slice.uid.clone());
                    }
                    services.apply_slice(&key, slice);
                }
                StreamEvent::Deleted(object) => {
                    let Some((key, slice)) = project::slice(object) else { continue };
                    services.delete_slice(&key, &slice.name, &slice.uid);
                }
                StreamEvent::ListDone => {
                    if let Some((listed, started)) = listing.take() {
                        services.retain_slices(&listed, started);
                    }
                    services.mark_listed(ServiceSource::Slices);
                }
            }
        }
    }

    /// The slices of other managers, by their metadata.
    async fn foreign_slices(&self) {
        let services = self.cache.services();
        let selector = format!("{MANAGED_BY_LABEL}!={SLICE_MANAGER}");
        let config = WatchConfig::labelled(&selector);
        let stream = self.selected::<MetadataObject>(&project::slices(), config, ApiCallKind::WatchSlices);
        let mut stream = pin!(stream);
        let mut listing: Option<HashSet<(Arc<str>, Arc<str>)>> = None;
        while let Some(event) = stream.next().await {
            match event {
                StreamEvent::Failed(_) | StreamEvent::Resumed | StreamEvent::NotServed(_) => {}
                StreamEvent::ListStarted => listing = Some(HashSet::new()),
                StreamEvent::Applied(object) => {
                    let Some((namespace, name)) = name(&object) else { continue };
                    if let Some(listing) = &mut listing {
                        listing.insert((namespace.clone(), name.clone()));
                    }
                    let labels = object.metadata.labels.unwrap_or_default();
                    match labels.get(SERVICE_NAME_LABEL) {
                        Some(service) => {
                            let manager = labels.get(MANAGED_BY_LABEL).map_or("", String::as_str);
                            let key = ServiceKey { namespace, name: service.as_str().into() };
                            services.apply_foreign_slice(&key, &name, manager);
                        }
                        None => services.delete_foreign_slice(&namespace, &name),
                    }
                }
                StreamEvent::Deleted(object) => {
                    let Some((namespace, name)) = name(&object) else { continue };
                    services.delete_foreign_slice(&namespace, &name);
                }
                StreamEvent::ListDone => {
                    services.retain_foreign_slices(&listing.take().unwrap_or_default());
                    services.mark_listed(ServiceSource::ForeignSlices);
                }
            }
        }
    }

    /// Runs a watch while any service needs it, and for a while afterwards: a service that is deleted and created again does
    /// not list everything again.
    async fn while_needed<F: Future<Output = ()>>(&self, source: ServiceSource, watch: impl Fn() -> F) {
        let services = self.cache.services();
        let mut needed = services.needs_pods();
        loop {
            if needed.wait_for(|needed| *needed).await.is_err() {
                return;
            }
            tokio::select! {
                () = watch() => {}
                () = unneeded_for(KEEP_ENDPOINTS, &mut needed) => {}
            }
            services.clear_foreign(source);
        }
    }
}

/// Waits until the value was false for a time. Never returns if the sender is gone.
async fn unneeded_for(time: Duration, needed: &mut watch::Receiver<bool>) {
    while needed.wait_for(|needed| !*needed).await.is_ok() {
        if timeout(time, needed.wait_for(|needed| *needed)).await.is_err() {
            return;
        }
    }
    std::future::pending::<()>().await;
}

fn name(object: &MetadataObject) -> Option<(Arc<str>, Arc<str>)> {
    Some((object.metadata.namespace.as_deref()?.into(), object.metadata.name.as_deref()?.into()))
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use tokio::time::{Instant, advance};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_watch_ends_when_no_service_needed_it_for_a_while() {
        let (sender, mut needed) = watch::channel(true);
        let mut unneeded = pin!(unneeded_for(KEEP_ENDPOINTS, &mut needed));
        assert!(unneeded.as_mut().now_or_never().is_none(), "it is needed");
        for _ in 0..3 {
            sender.send_replace(false);
            assert!(unneeded.as_mut().now_or_never().is_none());
            advance(KEEP_ENDPOINTS / 2).await;
            sender.send_replace(true);
            assert!(unneeded.as_mut().now_or_never().is_none(), "the service was created again");
            advance(KEEP_ENDPOINTS).await;
        }
        sender.send_replace(false);
        let start = Instant::now();
        unneeded.await;
        assert_eq!(start.elapsed().as_secs(), KEEP_ENDPOINTS.as_secs());
    }
}
