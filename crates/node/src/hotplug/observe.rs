//! Observes one pod: its sandbox, the links of its namespace, the records of its attachments, and its annotations.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use api::{
    ErrorChain,
    attachments::{ATTACHMENTS_ANNOTATION, CONFIRM_ANNOTATION},
    selection::{NadRef, NetworkSelection},
};
use plan::hotplug::{
    AttachedRecord, AttachmentKey, AttachmentRecord, DesiredPod, HostLink, LinkIdentity, MultusState,
    NadState, ObservedLink, ObservedPod, Origin, PlugMode, PodIdentity, PodLifecycle, RecordPhase,
    SandboxRef, SandboxState, identify_links, identify_rebuilt, track_moved_links,
};
use tracing::{debug, warn};

use super::{
    Deps,
    metrics::FailureReason,
    multus_cache::{MultusCacheError, RecordedAttachments},
    nads::NadError,
    pod_namespace::{NamespaceError, ObservedNamespace},
    pod_status::PodAnnotations,
    sandboxes::PodNetwork,
};
use crate::pods::{OwnPod, PodPhase};

/// What a worker remembers between observations.
#[derive(Debug, Default)]
pub struct ObservedCache {
    /// The pod of which the rest was observed.
    pod: Option<PodIdentity>,
    /// The sandbox in which the pod runs. Its namespace is opened at each observation, which fails when it ends.
    sandbox: Option<SandboxRef>,
    /// What others recorded about a sandbox. That changes only by steps of the worker.
    recorded: Option<(String, RecordedAttachments)>,
    /// With which configuration of multus that was read.
    multus: Option<Arc<MultusState>>,
    /// The CNI results of others whose links were identified, and these links. A link that is renamed or moved later is found
    /// again by them.
    identified: BTreeMap<AttachmentKey, (String, Vec<LinkIdentity>)>,
    /// The namespace files that are watched.
    watched: BTreeSet<String>,
    /// The sandbox whose lost records were rebuilt.
    rebuilt: Option<String>,
}

impl ObservedCache {
    /// The pod, if others recorded attachments of it.
    pub fn identity(&self) -> Option<PodIdentity> {
        let (_, recorded) = self.recorded.as_ref()?;
        recorded.records.first().map(|record| record.pod.clone())
    }

    /// Forgets everything if the worker's pod is another one now: a mirror pod that was created again, or one that only
    /// claims the UID of a static pod.
    fn enter(&mut self, pod: &PodIdentity) {
        if self.pod.as_ref() != Some(pod) {
            *self = Self { pod: Some(pod.clone()), ..Self::default() };
        }
    }

    /// Forgets what others recorded: it may have changed.
    pub fn forget_recorded(&mut self) {
        self.recorded = None;
    }

    /// Forgets also which links are meant: others may have attached them again.
    pub fn forget_identified(&mut self) {
        self.forget_recorded();
        self.identified.clear();
    }

    /// Completes what others recorded with the index and the end on the host of each link that is identified for certain.
    fn identify(&mut self, links: &[ObservedLink], host_links: &BTreeMap<u32, HostLink>) {
        let Some((_, recorded)) = &mut self.recorded else { return };
        let mut identified = BTreeMap::new();
        for record in &mut recorded.records {
            if let RecordPhase::Attached(attached) = &mut record.phase
                && let Some((result, links)) = self.identified.remove(&record.key)
                && result == attached.result
            {
                attached.links = links;
            }
            identify_links(record, links, host_links);
            if let Some(attached) = record.attached()
                && attached.links.iter().any(|link| link.index.is_some())
            {
                identified.insert(record.key.clone(), (attached.result.clone(), attached.links.clone()));
            }
        }
        self.identified = identified;
    }
}

/// An observation.
#[derive(Debug)]
pub struct Observation {
    pub observed: ObservedPod,
    /// What the plan may do with what could be observed.
    pub mode: PlugMode,
    /// Something could not be observed: observe again later.
    pub incomplete: bool,
}

/// The annotations that the daemon writes, as the watch shows them.
pub fn annotations_of(pod: &OwnPod) -> PodAnnotations {
    let owned = |text: Option<&str>| text.map(str::to_owned);
    PodAnnotations {
        network_status: owned(pod.network_status()),
        attachments: owned(pod.annotation(ATTACHMENTS_ANNOTATION)),
    }
}

/// The pod as the API server describes it.
pub fn desired_pod(pod: &OwnPod) -> DesiredPod {
    let lifecycle = match pod.phase {
        PodPhase::Succeeded | PodPhase::Failed => PodLifecycle::Ended,
        _ if pod.deleted.is_some() => PodLifecycle::Terminating,
        PodPhase::Running => PodLifecycle::Running,
        PodPhase::Pending | PodPhase::Unknown => PodLifecycle::Pending,
    };
    DesiredPod {
        pod: PodIdentity {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            runtime_uid: pod.runtime_uid().to_owned(),
        },
        networks: pod.networks().map(str::to_owned),
        confirm: pod.annotation(CONFIRM_ANNOTATION).map(str::to_owned),
        lifecycle,
        host_network: pod.host_network,
        virt_launcher: pod.is_virt_launcher(),
    }
}

/// A pod that the API server does not have, or of which it is not known yet whether it does.
pub fn ended_pod(pod: PodIdentity) -> DesiredPod {
    DesiredPod {
        pod,
        networks: None,
        confirm: None,
        lifecycle: PodLifecycle::Ended,
        host_network: false,
        virt_launcher: false,
    }
}

/// The NADs that the annotation of a pod refers to.
pub fn requested_nads(desired: &DesiredPod) -> BTreeSet<NadRef> {
    let selection = NetworkSelection::parse(desired.networks.as_deref());
    selection.references(&desired.pod.namespace).collect()
}

impl Deps {
    /// The NADs that the annotation of a pod refers to. None if they were not listed yet.
    pub async fn resolve_nads(&self, desired: &DesiredPod) -> Option<BTreeMap<NadRef, NadState>> {
        let namespace = desired.pod.namespace.as_str();
        let mut resolved = BTreeMap::new();
        for nad in requested_nads(desired) {
            match self.nads.resolve(&nad, namespace).await {
                Ok(state) => resolved.insert(nad, state),
                Err(NadError::NotListed) => return None,
                Err(error) => {
                    let message = ErrorChain(&error).to_string();
                    resolved.insert(nad, NadState::Unknown { message })
                }
            };
        }
        Some(resolved)
    }

    /// Observes a pod. `annotations` are at least as new as the last write of the daemon.
    pub async fn observe(
        &self,
        desired: &DesiredPod,
        annotations: &PodAnnotations,
        cache: &mut ObservedCache,
        mode: PlugMode,
    ) -> Observation {
        cache.enter(&desired.pod);
        let uid = desired.pod.runtime_uid.as_str();
        let mut own = self.journal.records_of(uid);
        let (mut incomplete, mut failed, mut unreadable) = (false, false, None);
        // A pod that claims the UID of a static pod may not be that pod: the runtime knows.
        let is_claim = desired.pod.runtime_uid != desired.pod.uid;
        let mut sandbox = if desired.host_network && own.is_empty() && !is_claim {
            SandboxState::Absent
        } else {
            self.sandbox(desired, cache, false).await
        };
        let mut records: Vec<AttachmentRecord> = own.iter().map(|record| (**record).clone()).collect();
        if let SandboxState::Ready(current) = &sandbox {
            self.watch_namespace(&current.netns, cache).await;
        }
        let mut read = self.read_namespace(&sandbox, &records, cache).await;
        if let Err(NamespaceError::Gone { .. }) = &read {
            // The sandbox has ended.
            cache.sandbox = None;
            self.locator.invalidate();
            sandbox = self.sandbox(desired, cache, true).await;
            read = self.read_namespace(&sandbox, &records, cache).await;
        }
        if let SandboxState::Ready(current) = &sandbox {
            let rebuilt = match &read {
                Ok(Some(namespace)) => self.rebuild_records(desired, current, namespace, &own, cache).await,
                Ok(None) | Err(_) => Ok(Vec::new()),
            };
            let recorded = self.recorded(desired, current, annotations, cache).await;
            match recorded.and(rebuilt) {
                Ok(rebuilt) => {
                    records.extend(rebuilt.iter().cloned());
                    own.extend(rebuilt.into_iter().map(Arc::new));
                    if let Ok(Some(namespace)) = &read {
                        cache.identify(&namespace.links(desired.virt_launcher), &namespace.host_links);
                    }
                    // The plan decides between two records of the same key.
                    let recorded = cache.recorded.iter().flat_map(|(_, recorded)| &recorded.records);
                    records.extend(recorded.cloned());
                }
                // Without it, a plan would attach what is attached.
                Err(error) => {
                    debug!(pod = desired.pod.name, error = %ErrorChain(&error), "cannot read what was recorded on the node");
                    self.metrics.failed(FailureReason::Host);
                    match error {
                        MultusCacheError::Unusable(_) => {
                            (incomplete, unreadable) = (true, Some(error.to_string()));
                        }
                        _ => failed = true,
                    }
                }
            }
        } else if let Some((_, recorded)) = &cache.recorded {
            // The sandbox that had them has ended, or the runtime does not respond.
            let known: BTreeSet<_> = records.iter().map(|record| record.key.clone()).collect();
            let recorded = recorded.records.iter();
            records.extend(recorded.filter(|record| !known.contains(&record.key)).cloned());
        }
        let (mut links, mut host_links, mut results) = (None, BTreeMap::new(), BTreeMap::new());
        match read {
            Ok(Some(mut namespace)) => {
                // A link that left after it was read and before it was watched causes no event.
                if self.watch_links(uid, &namespace, &records)
                    && let Ok(Some(again)) = self.read_namespace(&sandbox, &records, cache).await
                {
                    namespace = again;
                }
                let journalled: BTreeSet<_> = own.iter().map(|record| record.key.clone()).collect();
                let present = namespace.links(desired.virt_launcher);
                self.note_moved_links(uid, &mut records, &journalled, &present, mode).await;
                results = self.unrecorded_results(&sandbox, &own, &namespace).await;
                (links, host_links) = (Some(present), namespace.host_links);
            }
            Ok(None) => {}
            Err(error) => {
                debug!(pod = desired.pod.name, error = %ErrorChain(&error), "cannot read the links of a pod");
                self.metrics.failed(FailureReason::Links);
                incomplete = true;
            }
        }
        let namespaces = self.existing_namespaces(&sandbox, &records, links.is_some(), cache).await;
        let mut mode = mode;
        if failed {
            sandbox = SandboxState::Unknown;
        }
        if sandbox == SandboxState::Unknown {
            // Without the runtime, only a namespace that is gone proves that a sandbox has ended.
            incomplete = true;
            records.retain(|record| !namespaces.contains(&record.netns) || record.boot != self.boot);
            if !records.is_empty() {
                (sandbox, mode) = (SandboxState::Absent, PlugMode::Off);
            }
        }
        if sandbox == SandboxState::Absent
            && desired.lifecycle == PodLifecycle::Running
            && !desired.host_network
        {
            incomplete = true;
        }
        let default_statuses = match (&sandbox, &cache.recorded) {
            (SandboxState::Ready(_), Some((_, recorded))) => recorded.defaults.clone(),
            _ => Vec::new(),
        };
        let observed = ObservedPod {
            sandbox,
            links,
            host_links,
            boot: self.boot.clone(),
            records,
            unreadable,
            defaults_known: cache.multus.as_ref().is_none_or(|multus| multus.is_known()),
            default_statuses,
            results,
            requested: self.journal.requested(uid),
            namespaces,
            network_status: annotations.network_status.clone(),
            attachments: annotations.attachments.clone(),
            annotations_confirmed: false,
        };
        Observation { observed, mode, incomplete }
    }

    /// The sandbox in which the pod runs. `fresh`: not from the cache.
    async fn sandbox(&self, desired: &DesiredPod, cache: &mut ObservedCache, fresh: bool) -> SandboxState {
        let runs = matches!(desired.lifecycle, PodLifecycle::Running | PodLifecycle::Terminating);
        if let Some(known) = cache.sandbox.as_ref().filter(|_| runs && !fresh) {
            return SandboxState::Ready(known.clone());
        }
        let located = self.locator.locate(&desired.pod.runtime_uid).await;
        self.report_runtime(located.as_ref().err());
        if let Ok(Some(found)) = &located {
            self.note_runtime_pod(&desired.pod.runtime_uid, &found.pod_namespace, &found.pod_name);
        }
        match located {
            Ok(None) => SandboxState::Absent,
            // A mirror pod only claims the UID of its static pod. Another pod's sandbox is never touched.
            Ok(Some(found))
                if (&found.pod_namespace, &found.pod_name) != (&desired.pod.namespace, &desired.pod.name) =>
            {
                SandboxState::Unknown
            }
            Ok(Some(found)) => match found.network {
                PodNetwork::Namespace(netns) => {
                    let sandbox =
                        SandboxRef { id: found.id, netns, own_network_stack: found.own_network_stack };
                    self.note_sandbox(&desired.pod.runtime_uid, Some(&sandbox.netns));
                    cache.sandbox = Some(sandbox.clone());
                    SandboxState::Ready(sandbox)
                }
                PodNetwork::Host => SandboxState::Absent,
                PodNetwork::Unavailable => SandboxState::Unknown,
            },
            Err(error) => {
                debug!(pod = desired.pod.name, error = %ErrorChain(&error), "cannot find the sandbox of a pod");
                self.metrics.failed(FailureReason::Runtime);
                SandboxState::Unknown
            }
        }
    }

    /// What ADDs without a recorded end returned and created, as far as the node knows it.
    async fn unrecorded_results(
        &self,
        sandbox: &SandboxState,
        own: &[Arc<AttachmentRecord>],
        namespace: &ObservedNamespace,
    ) -> BTreeMap<AttachmentKey, AttachedRecord> {
        let mut results = BTreeMap::new();
        let SandboxState::Ready(sandbox) = sandbox else { return results };
        for record in
            own.iter().filter(|record| record.boot == self.boot && record.key.container == sandbox.id)
        {
            let attached = self.cached_attachment(record, namespace).await;
            results.extend(attached.map(|attached| (record.key.clone(), attached)));
        }
        results
    }

    async fn read_namespace(
        &self,
        sandbox: &SandboxState,
        records: &[AttachmentRecord],
        cache: &ObservedCache,
    ) -> Result<Option<ObservedNamespace>, NamespaceError> {
        let SandboxState::Ready(sandbox) = sandbox else { return Ok(None) };
        let others = cache.recorded.iter().flat_map(|(_, recorded)| &recorded.records);
        let attached = records.iter().chain(others).filter_map(AttachmentRecord::attached);
        let peers =
            attached.flat_map(|attached| attached.links.iter().filter_map(|link| link.peer)).collect();
        self.namespaces.observe(&sandbox.netns, peers).await.map(Some)
    }

    /// Reads into the cache what others recorded about a sandbox.
    async fn recorded(
        &self,
        desired: &DesiredPod,
        sandbox: &SandboxRef,
        annotations: &PodAnnotations,
        cache: &mut ObservedCache,
    ) -> Result<(), MultusCacheError> {
        let multus = self.multus.read().await;
        let same_config = cache.multus.as_ref().is_some_and(|before| Arc::ptr_eq(before, &multus));
        if same_config && cache.recorded.as_ref().is_some_and(|(container, _)| *container == sandbox.id) {
            return Ok(());
        }
        let status = annotations.network_status.as_deref();
        // What was read before does not count if this fails.
        cache.recorded = None;
        let recorded = self.recorded.attachments(&sandbox.id, &desired.pod, status).await?;
        (cache.multus, cache.recorded) = (Some(multus), Some((sandbox.id.clone(), recorded)));
        Ok(())
    }

    /// Records again what the journal lost: attachments whose result is on the node and whose link is in the pod.
    async fn rebuild_records(
        &self,
        desired: &DesiredPod,
        sandbox: &SandboxRef,
        namespace: &ObservedNamespace,
        own: &[Arc<AttachmentRecord>],
        cache: &mut ObservedCache,
    ) -> Result<Vec<AttachmentRecord>, MultusCacheError> {
        if !self.journal.is_damaged() || cache.rebuilt.as_ref() == Some(&sandbox.id) {
            return Ok(Vec::new());
        }
        let mut records = self.recorded.own_attachments(&sandbox.id, &desired.pod).await?;
        let links = namespace.links(desired.virt_launcher);
        records.retain_mut(|record| {
            let exists = identify_rebuilt(record, &links, &namespace.host_links);
            exists && !own.iter().any(|own| own.key == record.key)
        });
        for record in &records {
            warn!(pod = desired.pod.name, network = %record.nad, interface = record.key.interface, "rebuilt the record of an attached interface, which the hot-plug journal lost");
            if let Err(error) = self.journal.update(record.clone()).await {
                warn!(error = %error, "a rebuilt record cannot be written yet");
            }
        }
        cache.rebuilt = Some(sandbox.id.clone());
        Ok(records)
    }

    async fn watch_namespace(&self, path: &str, cache: &mut ObservedCache) {
        if let Some(watch) = self.namespace_watch.get()
            && cache.watched.insert(path.to_owned())
        {
            watch.add(path).await;
        }
    }

    /// The namespaces of the records and of the sandbox that exist.
    async fn existing_namespaces(
        &self,
        sandbox: &SandboxState,
        records: &[AttachmentRecord],
        readable: bool,
        cache: &mut ObservedCache,
    ) -> BTreeSet<String> {
        let mut paths: BTreeSet<String> = records.iter().map(|record| record.netns.clone()).collect();
        let mut existing = BTreeSet::new();
        if let SandboxState::Ready(sandbox) = sandbox {
            paths.insert(sandbox.netns.clone());
            if readable {
                existing.insert(sandbox.netns.clone());
            }
        }
        for path in paths {
            self.watch_namespace(&path, cache).await;
            if !existing.contains(&path) && self.namespaces.exists(&path).await {
                existing.insert(path);
            }
        }
        cache.watched.retain(|path| existing.contains(path));
        existing
    }

    /// Records which links were moved to another namespace, and which came back: those that were moved are not lost.
    ///
    /// The journal gets an attachment of another program when its link was moved or renamed, because after a restart of the
    /// daemon only the journal identifies the link. `journalled` are those that it has.
    async fn note_moved_links(
        &self,
        uid: &str,
        records: &mut [AttachmentRecord],
        journalled: &BTreeSet<AttachmentKey>,
        links: &[ObservedLink],
        mode: PlugMode,
    ) {
        let present: BTreeSet<u32> = links.iter().map(|link| link.index).collect();
        // The event of a link that is missing may still be queued.
        if recorded_links(records).any(|(index, _)| index.is_some_and(|index| !present.contains(&index)))
            && let Err(error) = self.monitor.handle_queued(|events| self.watched.apply(events))
        {
            warn!(error = %ErrorChain(&error), "cannot read link events of pods");
        }
        let own = journalled.len();
        let owned: BTreeSet<u32> = recorded_links(records).filter_map(|(index, _)| index).collect();
        for (at, record) in records.iter_mut().enumerate() {
            let RecordPhase::Attached(attached) = &record.phase else { continue };
            // The records of the journal come first.
            let is_new = at >= own;
            if is_new && (journalled.contains(&record.key) || mode != PlugMode::On) {
                continue;
            }
            let mut updated: AttachedRecord = attached.clone();
            track_moved_links(&mut updated, links, &owned, |index| self.watched.departure(uid, index));
            let renamed = is_new && record.origin != Origin::Hotplug && has_renamed_link(&updated, links);
            if updated == *attached && !renamed {
                continue;
            }
            record.phase = RecordPhase::Attached(updated);
            if let Err(error) = self.journal.update(record.clone()).await {
                warn!(error = %error, "a moved link cannot be recorded yet");
            }
        }
    }

    /// Watches the links of a pod. Returns whether a link was not watched before.
    fn watch_links(&self, uid: &str, namespace: &ObservedNamespace, records: &[AttachmentRecord]) -> bool {
        // Others record no index, so any link may be theirs. Without records no link matters.
        let present = namespace.links.iter().map(|link| link.index).filter(|_| !records.is_empty());
        let recorded = recorded_links(records).filter_map(|(index, _)| index);
        let peers = recorded_links(records).filter_map(|(_, peer)| peer).collect();
        self.watched.watch(namespace.nsid, uid, present.chain(recorded).collect(), peers)
    }
}

/// Whether a link of an attachment has another name than recorded.
fn has_renamed_link(attached: &AttachedRecord, links: &[ObservedLink]) -> bool {
    attached.links.iter().any(|recorded| {
        let link = links.iter().find(|link| Some(link.index) == recorded.index);
        link.is_some_and(|link| link.name != recorded.name)
    })
}

/// The index and the host peer of each recorded link.
fn recorded_links(records: &[AttachmentRecord]) -> impl Iterator<Item = (Option<u32>, Option<u32>)> {
    let attached = records.iter().filter_map(AttachmentRecord::attached);
    attached.flat_map(|attached| attached.links.iter().map(|link| (link.index, link.peer)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn record(result: &str) -> AttachmentRecord {
        let record = json!({
            "key": {"container": "c", "interface": "net1"}, "nad": "ns/blue", "origin": "PodStart", "boot": "b",
            "pod": {"namespace": "ns", "name": "p", "uid": "u", "runtime_uid": "u"}, "netns": "/n", "config": "{}",
            "phase": {"Attached": {"result": result, "links": [{"name": "net1", "mac": "02:00:00:00:00:01"}]}},
        });
        serde_json::from_value(record).unwrap()
    }

    /// The index by which the link of the only record is known.
    fn identified(cache: &mut ObservedCache, result: &str, links: &[ObservedLink]) -> Option<u32> {
        cache.recorded.get_or_insert_with(|| {
            let recorded = RecordedAttachments { records: vec![record(result)], ..Default::default() };
            ("c".to_owned(), recorded)
        });
        cache.identify(links, &BTreeMap::new());
        let (_, recorded) = cache.recorded.as_ref().unwrap();
        recorded.records[0].attached().unwrap().links[0].index
    }

    #[test]
    fn a_link_of_pod_start_that_was_seen_is_known_by_its_index_until_others_may_have_replaced_it() {
        let link = |name: &str| {
            let (name, mac) = (name.to_owned(), Some("02:00:00:00:00:01".to_owned()));
            [ObservedLink { index: 7, name, mac, ..ObservedLink::default() }]
        };
        let mut cache = ObservedCache::default();
        assert_eq!(identified(&mut cache, "{}", &link("other")), None);
        assert_eq!(identified(&mut cache, "{}", &link("net1")), Some(7));
        // After a step of the worker the records are read again.
        cache.forget_recorded();
        assert_eq!(identified(&mut cache, "{}", &link("renamed")), Some(7));
        cache.forget_recorded();
        assert_eq!(identified(&mut cache, "another result", &link("renamed")), None);
        cache.forget_recorded();
        assert_eq!(identified(&mut cache, "{}", &link("net1")), Some(7));
        cache.forget_identified();
        assert_eq!(identified(&mut cache, "{}", &link("renamed")), None);
    }
}
