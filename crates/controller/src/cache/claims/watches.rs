//! The watches of claims and virtual machines.

use std::{collections::HashSet, future::Future, pin::pin};

use api::ipamclaim::CRD_NAME;
use client::watch::{StreamEvent, WatchConfig};
use futures::{Stream, StreamExt as _};
use plan::{
    claims::{ObjectKey, machine::KindState},
    users::WorkloadKind,
};
use tracing::info;

use super::project::{self, ClaimObject, MachineObject};
use crate::{
    cache::{CacheSource, project as cache_project, watches::CacheFiller},
    metrics::ApiCallKind,
};

impl CacheFiller {
    /// Watches IPAMClaims, for as long as their kind exists. Never returns.
    pub(in crate::cache) async fn claims(&self) {
        let claims = self.cache.claims();
        let watch = || async {
            loop {
                let config = WatchConfig::all();
                self.mirror_claims(self.selected(&project::claims(), config, ApiCallKind::WatchClaims)).await;
                info!("the kind IPAMClaim is no longer served, listing it again");
            }
        };
        let clear = || claims.retain_claims(&HashSet::new());
        self.watch_optional(CRD_NAME, CacheSource::Claims, watch, clear).await;
    }

    /// Returns when a kind that was listed is no longer served.
    async fn mirror_claims(&self, stream: impl Stream<Item = StreamEvent<ClaimObject>>) {
        let claims = self.cache.claims();
        let mut listing: Option<HashSet<ObjectKey>> = None;
        let mut listed = false;
        let mut stream = pin!(stream);
        while let Some(event) = stream.next().await {
            let complete = CacheSource::Claims.is_complete(&event);
            match event {
                StreamEvent::ListStarted => listing = Some(HashSet::new()),
                StreamEvent::Applied(object) => {
                    let Some(claim) = project::claim(object) else { continue };
                    if let Some(listing) = &mut listing {
                        listing.insert(claim.key.clone());
                    }
                    claims.set_claim(&claim.key.clone(), Some(claim));
                }
                StreamEvent::Deleted(object) => {
                    let Some(key) = project::key(&object.metadata) else { continue };
                    claims.set_claim(&key, None);
                }
                StreamEvent::ListDone => {
                    listed = true;
                    if let Some(seen) = listing.take() {
                        claims.retain_claims(&seen);
                    }
                }
                StreamEvent::NotServed(_) if listed => return,
                StreamEvent::NotServed(_) | StreamEvent::Failed(_) | StreamEvent::Resumed => {}
            }
            if complete {
                self.cache.mark_listed(CacheSource::Claims);
            }
        }
    }

    /// Watches VirtualMachines or their instances, for as long as the kind exists. Never returns.
    pub(in crate::cache) async fn machines(&self, kind: WorkloadKind) {
        let name = match kind {
            WorkloadKind::VirtualMachine => "virtualmachines.kubevirt.io",
            _ => "virtualmachineinstances.kubevirt.io",
        };
        let clear = || {
            if self.cache.users().clear(kind) {
                self.cache.wake(CacheSource::Users(kind));
            }
            self.retain_machines(kind, &HashSet::new());
            self.set_kind(kind, KindState::Absent);
        };
        let watch = || async move {
            loop {
                self.mirror_machines(kind).await;
                info!(kind = name, "the kind is no longer served, listing it again");
            }
        };
        self.watch_optional(name, CacheSource::Users(kind), watch, clear).await;
    }

    /// Feeds the index of users and that of claims. Returns when a kind that was listed is no longer served.
    fn mirror_machines(&self, kind: WorkloadKind) -> impl Future<Output = ()> + Send + '_ {
        let config = WatchConfig::all();
        let resource = cache_project::workloads(kind);
        let stream = self.selected::<MachineObject>(&resource, config, ApiCallKind::WatchUsers);
        let mut listing: Option<HashSet<ObjectKey>> = None;
        let stream = stream.inspect(move |event| match event {
            StreamEvent::ListStarted => listing = Some(HashSet::new()),
            StreamEvent::Applied(object) => {
                let Some(key) = project::key(&object.metadata) else { return };
                if let Some(listing) = &mut listing {
                    listing.insert(key.clone());
                }
                self.set_machine(kind, &key, Some(object));
            }
            StreamEvent::Deleted(object) => {
                let Some(key) = project::key(&object.metadata) else { return };
                self.set_machine(kind, &key, None);
            }
            StreamEvent::ListDone => {
                if let Some(seen) = listing.take() {
                    self.retain_machines(kind, &seen);
                }
                self.set_kind(kind, KindState::Listed);
            }
            // What exists is not known any more, so nothing is decided from it.
            StreamEvent::NotServed(_) => self.set_kind(kind, KindState::NotServed),
            StreamEvent::Failed(_) | StreamEvent::Resumed => {}
        });
        self.index_users(kind, stream, move |object| project::machine_refs(kind, &object))
    }

    fn set_machine(&self, kind: WorkloadKind, key: &ObjectKey, object: Option<&MachineObject>) {
        let claims = self.cache.claims();
        match kind {
            WorkloadKind::VirtualMachine => claims.set_vm(key, object.and_then(project::vm)),
            _ => claims.set_vmi(key, object.and_then(project::vmi)),
        }
    }

    fn retain_machines(&self, kind: WorkloadKind, listed: &HashSet<ObjectKey>) {
        let claims = self.cache.claims();
        match kind {
            WorkloadKind::VirtualMachine => claims.retain_vms(listed),
            _ => claims.retain_vmis(listed),
        }
    }

    fn set_kind(&self, kind: WorkloadKind, state: KindState) {
        let claims = self.cache.claims();
        match kind {
            WorkloadKind::VirtualMachine => claims.set_vm_kind(state),
            _ => claims.set_vmi_kind(state),
        }
    }
}
