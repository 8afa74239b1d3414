//! One reconcile of one service.

use std::{sync::Arc, time::Duration};

use api::{ErrorChain, NetworkService};
use client::{
    events::{EventDraft, reference},
    fence::now,
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, Service};
use plan::{
    network::NamespacePhase,
    services::{
        DesiredEndpoints, EndpointInput, Families, ForeignKind, ForeignObject, NetworkServiceFacts,
        NetworkState, ObservedService, ObservedSlice, PackInput, PodFacts, PodFault, ServiceDecision,
        ServiceSpec, ServiceState, SliceOwner, SlicePlan, StatusInput, StatusWrite, WriteFault,
        annotated_service, changed_back, decide_service, decide_status_write, endpoints, is_controlled_by,
        pack, service_warnings, status, why_no_slices, withdraw, withheld,
    },
};
use tracing::{debug, warn};

use super::{Next, ServiceKey, ServiceWorkers, apply::Error, network::network_state, record::ServiceRecord};
use crate::{
    cache::services::{ObservedNetworkService, ServiceSnapshot},
    leader::{EXPECTATION_TTL, MIN_RETRY},
};

/// What became of the Service of a NetworkService.
enum ServiceOutcome {
    /// It is as planned.
    InPlace,
    /// It was written: the watch delivers the change.
    Written(Duration),
    /// It is not written before this time, because another writer changed it back or because it is being deleted.
    Delayed(Duration),
    Taken(String),
    Failed(Error),
}

/// A warning that events report while it holds.
#[derive(Hash)]
enum Warning<'a> {
    Service(&'static str, String),
    Pod(&'a PodFault),
}

/// What became of the slices.
struct SliceOutcome {
    desired: DesiredEndpoints,
    network: NetworkState,
    /// Whether there was anything to write.
    written: bool,
    result: Result<(), Error>,
}

impl ServiceWorkers {
    pub(super) async fn reconcile(&self, key: &ServiceKey, record: &mut ServiceRecord) -> Next {
        let started = now();
        let Some(snapshot) = self.cache.services().snapshot(key) else { return Next::ON_CHANGE };
        // The API server rejects every create there (R35). Endpoints follow the pods until these are gone.
        let terminating = self.cache.read(|state| {
            state.namespaces.get(&*key.namespace).is_some_and(|phase| *phase == NamespacePhase::Terminating)
        });
        let next = match (&snapshot.network_service, &snapshot.service) {
            (Some(network_service), _) if !network_service.deleting && !terminating => {
                self.reconcile_network_service(key, network_service, &snapshot, record).await
            }
            // The garbage collector deletes what a deleted NetworkService or Service owned. Until then the endpoints follow
            // the pods.
            (Some(network_service), Some(service)) if is_controlled_by(&network_service.uid, service) => {
                self.follow_pods(key, network_service, service, &snapshot, record).await
            }
            (Some(_), None) => Next::ON_CHANGE,
            (None, None) => {
                let next = self
                    .withdraw_slices(key, &snapshot, record, |slice| {
                        slice.owner.is_none() || key.name.is_empty()
                    })
                    .await;
                if next == Next::ON_CHANGE {
                    record.clear();
                }
                next
            }
            (_, Some(service)) => self.reconcile_service(key, service, &snapshot, record, terminating).await,
        };
        self.metrics
            .service_reconciled(self.cache.services().len(), now().saturating_duration_since(started));
        next
    }

    async fn reconcile_network_service(
        &self,
        key: &ServiceKey,
        observed: &Arc<ObservedNetworkService>,
        snapshot: &ServiceSnapshot,
        record: &mut ServiceRecord,
    ) -> Next {
        let spec = match &observed.spec {
            Ok(spec) => spec,
            Err(why) => {
                let state = ServiceState::Invalid(why);
                let next = self.write_status(key, observed, snapshot, state, false, record).await;
                return next.merge(self.withdraw_slices(key, snapshot, record, |_| true).await);
            }
        };
        let next;
        // Whether the watch soon delivers another state of the Service.
        let mut expects_change = false;
        match self.apply_service(key, observed, spec, snapshot, record).await {
            ServiceOutcome::Written(wait) => {
                next = Next::after(wait);
                expects_change = true;
            }
            ServiceOutcome::Delayed(wait) => next = Next::after(wait),
            ServiceOutcome::Taken(message) => {
                let state = ServiceState::Taken(&message);
                let next = self.write_status(key, observed, snapshot, state, false, record).await;
                // A user may have annotated the Service.
                let slices = match &snapshot.service {
                    Some(service) => self.reconcile_service(key, service, snapshot, record, false).await,
                    None => Next::ON_CHANGE,
                };
                return next.merge(slices);
            }
            ServiceOutcome::Failed(error) if error.is_namespace_gone() => return namespace_gone(record),
            ServiceOutcome::Failed(error) if error.is_conflict() => {
                let wait = record.record_conflict();
                next = Next::after(wait);
                // A Service that exists and is missing in the cache is delivered by the watch.
                expects_change = snapshot.service.is_none() || ServiceRecord::is_first_conflict(wait);
            }
            ServiceOutcome::Failed(error) => {
                let wait = record.service_failed(ErrorChain(&error).to_string(), now());
                warn!(service = %key, error = %ErrorChain(&error), ?wait, "could not write a Service, retrying");
                next = Next::after(wait).not_before(MIN_RETRY);
            }
            ServiceOutcome::InPlace => {
                next = record.service_in_place(now()).map_or(Next::ON_CHANGE, Next::after);
            }
        }
        // A Service that is not as planned in every respect still has endpoints.
        let takes_slices = |service: &&Arc<ObservedService>| {
            is_controlled_by(&observed.uid, service) && why_no_slices(service).is_none()
        };
        let Some(service) = snapshot.service.as_ref().filter(takes_slices) else {
            if expects_change {
                return next;
            }
            return next.merge(self.withhold_endpoints(key, observed, snapshot, record).await);
        };
        if snapshot.stale {
            // The watch wakes the service up when the cache has caught up.
            return next.merge(Next::after(EXPECTATION_TTL));
        }
        let outcome = self.apply_slices(key, spec, service, snapshot, record).await;
        let regarding = reference::<NetworkService>(Some(&key.namespace), &key.name, &observed.uid);
        let next = next.merge(self.report(&regarding, pod_warnings(&outcome.desired), record));
        let next = next.merge(record_slices(key, &outcome, record));
        if outcome.result.as_ref().is_err_and(|error| error.is_conflict() || error.is_namespace_gone()) {
            return next;
        }
        let failed = outcome.result.as_ref().err().map(|error| ErrorChain(error).to_string());
        let failed = failed.or_else(|| record.service_failure.clone());
        let changed_back = record.changed_back.clone();
        let fault = failed.as_deref().map(WriteFault::Failed);
        let fault = fault.or(changed_back.as_deref().map(WriteFault::ChangedBack));
        let network = (&spec.network, &outcome.network);
        let state = ServiceState::Planned { network, desired: &outcome.desired, fault };
        next.merge(self.write_status(key, observed, snapshot, state, outcome.written, record).await)
    }

    /// Withdraws the endpoints of a Service that is missing or must not have any (R7, R8), and reports why.
    async fn withhold_endpoints(
        &self,
        key: &ServiceKey,
        observed: &ObservedNetworkService,
        snapshot: &ServiceSnapshot,
        record: &mut ServiceRecord,
    ) -> Next {
        let service = snapshot.service.as_ref();
        let why = withheld(&key.name, service.map(|service| &**service), record.service_failure.as_deref());
        let slices = match service {
            // The garbage collector deletes the slices of a Service that is gone.
            None => Next::ON_CHANGE,
            Some(service) if is_controlled_by(&observed.uid, service) => {
                self.withdraw_slices(key, snapshot, record, |_| true).await
            }
            // A user may have annotated the Service that is handed over.
            Some(service) => self.reconcile_service(key, service, snapshot, record, false).await,
        };
        let state = ServiceState::Withdrawn(&why);
        slices.merge(self.write_status(key, observed, snapshot, state, false, record).await)
    }

    /// Updates the slices of a NetworkService that is being deleted. None is created.
    async fn follow_pods(
        &self,
        key: &ServiceKey,
        observed: &ObservedNetworkService,
        service: &ObservedService,
        snapshot: &ServiceSnapshot,
        record: &mut ServiceRecord,
    ) -> Next {
        let spec = observed.spec.as_ref().ok().filter(|_| why_no_slices(service).is_none());
        let Some(spec) = spec else {
            return self.withdraw_slices(key, snapshot, record, |_| true).await;
        };
        if snapshot.stale {
            return Next::after(EXPECTATION_TTL);
        }
        let outcome = self.apply_slices(key, spec, &without_creates(service), snapshot, record).await;
        record_slices(key, &outcome, record)
    }

    /// Creates, patches or adopts the Service of a NetworkService.
    async fn apply_service(
        &self,
        key: &ServiceKey,
        observed: &ObservedNetworkService,
        spec: &ServiceSpec,
        snapshot: &ServiceSnapshot,
        record: &mut ServiceRecord,
    ) -> ServiceOutcome {
        let facts = NetworkServiceFacts { uid: &observed.uid, labels: &observed.labels, spec };
        let service = snapshot.service.as_deref();
        let decision = decide_service(&facts, service);
        let before = service.map(|service| &service.resource_version);
        record.service_planned((&observed.uid, observed.generation, &observed.labels));
        let creates = matches!(decision, ServiceDecision::Create(_));
        if creates || matches!(decision, ServiceDecision::Patch { .. } | ServiceDecision::Delete { .. }) {
            record.service_drifted(now());
            if let Some(wait) = record.awaits_service(before, now()) {
                return ServiceOutcome::Written(wait);
            }
            if let Some(wait) = record.paces_service(creates, now()) {
                if let ServiceDecision::Patch { patch, .. } = &decision {
                    record.service_changed_back(changed_back(&key.name, patch));
                }
                return ServiceOutcome::Delayed(wait);
            }
        }
        let written = match decision {
            ServiceDecision::Keep => return ServiceOutcome::InPlace,
            ServiceDecision::Wait => return ServiceOutcome::Delayed(MIN_RETRY),
            ServiceDecision::Taken { message } => return ServiceOutcome::Taken(message),
            ServiceDecision::Create(object) => self.writer.create_service(key, object).await,
            ServiceDecision::Patch { patch, .. } => self.writer.patch_service(key, &patch).await,
            ServiceDecision::Delete { uid, resource_version } => {
                self.writer.delete_service(key, &uid, &resource_version).await
            }
        };
        match written {
            Ok(()) => {
                record.service_written(before.cloned(), now());
                ServiceOutcome::Written(EXPECTATION_TTL)
            }
            Err(error) => ServiceOutcome::Failed(error),
        }
    }

    /// Reconciles a Service that no NetworkService controls: one that a user annotated, or one that is none of ours. Creates
    /// nothing in a namespace that is terminating.
    async fn reconcile_service(
        &self,
        key: &ServiceKey,
        service: &ObservedService,
        snapshot: &ServiceSnapshot,
        record: &mut ServiceRecord,
        terminating: bool,
    ) -> Next {
        let regarding = || reference::<Service>(Some(&key.namespace), &key.name, &service.uid);
        match annotated_service(&key.namespace, &key.name, service) {
            None if service.is_controlled_by_network_service() => {
                match record.awaits_orphan(&service.uid, now()) {
                    Some(wait) => Next::after(wait),
                    None => self.withdraw_slices(key, snapshot, record, |_| true).await,
                }
            }
            None => self.withdraw_slices(key, snapshot, record, |_| true).await,
            Some(Err(fault)) => {
                // The event is all that the user sees.
                let fault = (!terminating).then_some(Warning::Service(fault.reason, fault.note));
                let next = self.report(&regarding(), fault, record);
                next.merge(self.withdraw_slices(key, snapshot, record, |_| true).await)
            }
            Some(Ok(_)) if snapshot.stale => Next::after(EXPECTATION_TTL),
            Some(Ok(annotated)) if terminating => {
                let service = without_creates(service);
                let outcome = self.apply_slices(key, &annotated.spec, &service, snapshot, record).await;
                record_slices(key, &outcome, record)
            }
            Some(Ok(annotated)) => {
                let outcome = self.apply_slices(key, &annotated.spec, service, snapshot, record).await;
                let foreign = foreign(snapshot).unwrap_or_default();
                let warnings =
                    service_warnings(&annotated.spec, &outcome.network, &outcome.desired, &foreign);
                let warnings = warnings.into_iter().map(|event| Warning::Service(event.reason, event.note));
                let warnings = warnings.chain(pod_warnings(&outcome.desired));
                let next = self.report(&regarding(), warnings, record);
                next.merge(record_slices(key, &outcome, record))
            }
        }
    }

    fn plan_endpoints(
        &self,
        spec: &ServiceSpec,
        families: Families,
        snapshot: &ServiceSnapshot,
    ) -> (DesiredEndpoints, NetworkState) {
        let network = self.cache.read(|state| network_state(state, &spec.network));
        let published: Vec<&ObservedSlice> = snapshot.slices.iter().map(|slice| &**slice).collect();
        let input = EndpointInput {
            spec,
            families,
            nodes: &snapshot.zones,
            network: &network,
            published: &published,
        };
        let pods = snapshot.pods.iter().map(|pod: &Arc<PodFacts>| &**pod);
        let mut desired = endpoints(&input, pods);
        desired.pods += snapshot.plain_pods;
        (desired, network)
    }

    /// Plans and writes the slices of a Service.
    async fn apply_slices(
        &self,
        key: &ServiceKey,
        spec: &ServiceSpec,
        service: &ObservedService,
        snapshot: &ServiceSnapshot,
        record: &mut ServiceRecord,
    ) -> SliceOutcome {
        let owner = service.slice_owner(spec);
        let (desired, network, plan) = self.plan_slices(spec, &owner, service, snapshot, record.last_planned);
        let planned = Timestamp::now();
        let result = self.writer.apply_slices(key, Some(&owner), &plan).await;
        if result.is_ok() {
            record.last_planned = Some(planned);
        }
        SliceOutcome { desired, network, written: !plan.is_empty(), result }
    }

    fn plan_slices(
        &self,
        spec: &ServiceSpec,
        owner: &SliceOwner,
        service: &ObservedService,
        snapshot: &ServiceSnapshot,
        last_planned: Option<Timestamp>,
    ) -> (DesiredEndpoints, NetworkState, SlicePlan) {
        let (desired, network) = self.plan_endpoints(spec, service.families, snapshot);
        let observed: Vec<&ObservedSlice> = snapshot.slices.iter().map(|slice| &**slice).collect();
        let input = PackInput { last_planned, ..PackInput::new(owner, &observed) };
        let plan = pack(&desired, &input);
        (desired, network, plan)
    }

    /// Deletes the slices of a Service that gets none.
    async fn withdraw_slices(
        &self,
        key: &ServiceKey,
        snapshot: &ServiceSnapshot,
        record: &mut ServiceRecord,
        selected: impl Fn(&ObservedSlice) -> bool,
    ) -> Next {
        let plan = withdraw(snapshot.slices.iter().map(|slice| &**slice).filter(|slice| selected(slice)));
        if plan.is_empty() || snapshot.stale {
            return if snapshot.stale { Next::after(EXPECTATION_TTL) } else { Next::ON_CHANGE };
        }
        match self.writer.apply_slices(key, None, &plan).await {
            Ok(()) => Next::ON_CHANGE,
            Err(error) if error.is_conflict() => Next::after(record.record_conflict()),
            Err(error) => record_failure(key, &error, record),
        }
    }

    /// Writes the status of a NetworkService if it changes: conditions at once, counts at most every 5 s.
    async fn write_status(
        &self,
        key: &ServiceKey,
        observed: &ObservedNetworkService,
        snapshot: &ServiceSnapshot,
        state: ServiceState<'_>,
        slices_written: bool,
        record: &mut ServiceRecord,
    ) -> Next {
        let foreign = foreign(snapshot);
        let old = &observed.status;
        let (generation, time) = (observed.generation, Timestamp::now());
        let plan = status(&StatusInput { generation, old, state, foreign: foreign.as_deref(), now: time });
        let since = record.status_written_at.map(|at| now().saturating_duration_since(at));
        match decide_status_write(old, &plan.status, since, slices_written) {
            StatusWrite::None => return Next::ON_CHANGE,
            StatusWrite::After(wait) => return Next::after(wait),
            StatusWrite::Now => {}
        }
        let services = self.cache.services();
        if let Some(wait) = record.awaits_status(&observed.resource_version, now()) {
            let unchanged = services.wake_on_status(key, &observed.resource_version);
            return Next::after(if unchanged { wait } else { Duration::ZERO });
        }
        services.expect_status(key, plan.status.clone());
        match self.writer.write_status(key, observed, &plan.status).await {
            Ok(()) => {
                record.status_written(&observed.resource_version, now());
                let regarding = reference::<NetworkService>(Some(&key.namespace), &key.name, &observed.uid);
                for event in plan.events {
                    self.record_warning(&regarding, event.reason, event.note);
                }
                Next::ON_CHANGE
            }
            Err(error) => {
                services.wake_on_status(key, &observed.resource_version);
                if error.is_conflict() {
                    Next::after(record.record_conflict())
                } else {
                    record_failure(key, &error, record)
                }
            }
        }
    }

    /// Records an event about each warning that is due. Returns when to record the others.
    fn report<'a>(
        &self,
        regarding: &ObjectReference,
        warnings: impl IntoIterator<Item = Warning<'a>>,
        record: &mut ServiceRecord,
    ) -> Next {
        let (due, later) = record.unreported(warnings, now());
        let mut next = later.map_or(Next::ON_CHANGE, Next::after);
        for warning in due {
            let (reason, note) = match &warning {
                Warning::Service(reason, note) => (*reason, note.clone()),
                Warning::Pod(fault) => (fault.reason.as_str(), fault.to_string()),
            };
            if !self.record_warning(regarding, reason, note) {
                next = next.merge(Next::after(record.event_dropped(&warning)));
            }
        }
        next
    }

    /// Returns false if the event was dropped.
    fn record_warning(&self, regarding: &ObjectReference, reason: &'static str, note: String) -> bool {
        let event = EventDraft { warning: true, reason, action: "Reconcile", note };
        self.recorder.record(regarding.clone(), event)
    }
}

/// Records what was written. Returns when to reconcile again.
fn record_slices(key: &ServiceKey, outcome: &SliceOutcome, record: &mut ServiceRecord) -> Next {
    match &outcome.result {
        Ok(()) => Next::ON_CHANGE,
        Err(error) if error.is_conflict() => {
            debug!(service = %key, "conflict with another writer, planning again");
            Next::after(record.record_conflict())
        }
        Err(error) if error.is_namespace_gone() => namespace_gone(record),
        Err(error) => record_failure(key, error, record),
    }
}

/// Everything in the namespace goes with it, unless a list of namespaces shows only the one that replaced it.
fn namespace_gone(record: &mut ServiceRecord) -> Next {
    Next::after(record.record_failure(now())).not_before(MIN_RETRY)
}

fn record_failure(key: &ServiceKey, error: &Error, record: &mut ServiceRecord) -> Next {
    let wait = record.record_failure(now());
    warn!(service = %key, error = %ErrorChain(error), ?wait, "could not reconcile a service, retrying");
    // A change of a pod does not cause more requests than retries do at first.
    Next::after(wait).not_before(MIN_RETRY)
}

/// The Service as one whose slices are only updated and deleted (R35).
fn without_creates(service: &ObservedService) -> ObservedService {
    ObservedService { deleting: true, ..service.clone() }
}

fn pod_warnings(desired: &DesiredEndpoints) -> impl Iterator<Item = Warning<'_>> {
    desired.faults.iter().map(Warning::Pod)
}

/// What publishes endpoints for the Service and is not managed by Patchbay. None while that is not known.
fn foreign(snapshot: &ServiceSnapshot) -> Option<Vec<ForeignObject>> {
    let slices = snapshot.foreign_slices.iter().map(|(name, manager)| ForeignObject {
        kind: ForeignKind::EndpointSlice,
        name: name.to_string(),
        manager: (!manager.is_empty()).then(|| manager.to_string()),
    });
    let endpoints = snapshot.has_endpoints.then(|| ForeignObject {
        kind: ForeignKind::Endpoints,
        name: snapshot.name.to_string(),
        manager: None,
    });
    snapshot.foreign_listed.then(|| slices.chain(endpoints).collect())
}
