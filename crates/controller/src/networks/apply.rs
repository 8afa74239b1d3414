//! Applies the plans of networks. Every write carries the resourceVersion or the UID of what was read, so a former leader
//! cannot overwrite anything.

use std::{collections::BTreeSet, sync::Arc};

use api::{
    CONTROLLER_FIELD_MANAGER,
    bridgenetwork::{BridgeNetworkStatus, NAD_NETWORK_LABEL, NAD_ORIGIN_ANNOTATION, NAD_UID_ANNOTATION},
    selection::NadRef,
};
use client::request::{self, ApiCall};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Api, Client,
    api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions},
    runtime::events::{self, Recorder, Reporter},
};
use plan::network::{EventDraft, NadState, NetworkPlan, NetworkStep};
use serde_json::{Value, json};
use tracing::{debug, info};

use crate::{
    cache::{ClusterCache, project},
    leader::LeaderContext,
    live_reads::{LiveQuery, LiveReader, LiveResults},
    metrics::{ApiCallKind, Metrics},
};

/// Reported if a status write changes nothing. The status backs off: otherwise it would be written every second.
const STATUS_DROPPED: &str =
    "the API server drops fields of the status; apply the CustomResourceDefinitions of this version";

/// Whether the API server stored a status.
enum StatusWrite {
    Stored,
    /// The object did not change, although the status differed: the CRD is of an older version and lacks a field.
    Dropped,
}

/// Why a write failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("read the state of network {name} from the API server")]
    LiveRead {
        name: String,
        #[source]
        source: Arc<request::Error>,
    },
    #[error("write network {name}")]
    Network {
        name: String,
        #[source]
        source: request::Error,
    },
    #[error("write NetworkAttachmentDefinition {at}")]
    Nad {
        at: NadRef,
        #[source]
        source: request::Error,
    },
}

impl Error {
    pub fn is_conflict(&self) -> bool {
        match self {
            Self::LiveRead { .. } => false,
            Self::Network { source, .. } | Self::Nad { source, .. } => source.is_conflict(),
        }
    }
}

/// What was written, and what was not.
#[derive(Debug, Default)]
pub struct ApplyOutcome {
    /// The BridgeNetwork itself was written.
    pub network_written: bool,
    /// The written NADs, with the resourceVersion before the write.
    pub nads: Vec<(NadRef, Option<String>)>,
    /// A live read found users or nodes that the cache does not have yet: retry soon.
    pub blocked: bool,
    /// Another writer changed an object first.
    pub conflicted: bool,
    /// The NADs that the API server rejected, with its message.
    pub rejected: Vec<(NadRef, String)>,
    /// Why the status could not be written.
    pub status_write_failed: Option<String>,
    /// Why a live read failed.
    pub live_read_failed: Option<String>,
    /// Deleted NADs that had no users.
    pub confirmed_unused: BTreeSet<NadRef>,
}

impl ApplyOutcome {
    /// Whether this NAD was written.
    pub fn wrote(&self, at: &NadRef) -> bool {
        self.nads.iter().any(|(written, _)| written == at)
    }

    /// Records the result of a NAD write and returns whether it succeeded. A rejection or a conflict does not stop the
    /// other steps; an API server that does not respond does.
    fn check(&mut self, at: &NadRef, written: Result<(), Error>) -> Result<bool, Error> {
        match written {
            Ok(()) => Ok(true),
            Err(error) if error.is_conflict() => {
                self.conflicted = true;
                Ok(false)
            }
            Err(Error::Nad { source: request::Error::Failed(kube::Error::Api(status)), .. }) => {
                self.rejected.push((at.clone(), status.message.clone()));
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}

/// Applies plans of networks, while this replica leads.
pub struct NetworkWriter {
    client: Client,
    cache: ClusterCache,
    metrics: Arc<Metrics>,
    live_reader: LiveReader,
    recorder: Recorder,
    network: ApiCall,
    nad: ApiCall,
    event: ApiCall,
}

impl NetworkWriter {
    pub fn new(context: &LeaderContext) -> Self {
        let LeaderContext { client, cache, metrics, fence } = context;
        let fenced = |call| metrics.api_call(call).fenced(fence.clone());
        let reporter = Reporter { controller: CONTROLLER_FIELD_MANAGER.to_owned(), instance: None };
        Self {
            live_reader: LiveReader::new(client.clone(), metrics.clone()),
            recorder: Recorder::new(client.clone(), reporter),
            network: fenced(ApiCallKind::Network),
            nad: fenced(ApiCallKind::Attachment),
            event: fenced(ApiCallKind::Event),
            client: client.clone(),
            cache: cache.clone(),
            metrics: metrics.clone(),
        }
    }

    /// Reads from the API server what the steps of these plans and the deletion of orphans depend on. Must be called after
    /// the plan, so that the results are newer than the cache.
    pub async fn read_live(&self, plans: &[NetworkPlan], orphan_nads: &[(NadRef, NadState)]) -> LiveResults {
        let mut query = LiveQuery::default();
        for plan in plans {
            plan.steps.iter().for_each(|step| add_to_query(&mut query, &plan.uid, step));
        }
        for (at, nad) in orphan_nads {
            query.nads.insert(at.clone());
            query.existing.extend(nad.network_uid.clone());
        }
        // A Node that is created during the read counts.
        self.live_reader.read(query, |name| self.cache.snapshot().nodes.contains_key(name)).await
    }

    /// Applies the steps, the status and the events of a plan.
    pub async fn apply(&self, plan: &NetworkPlan, live: &LiveResults) -> Result<ApplyOutcome, Error> {
        let mut outcome = ApplyOutcome::default();
        for step in &plan.steps {
            match self.apply_step(plan, step, live, &mut outcome).await {
                // The next plan retries the read and reports the failure.
                Err(Error::LiveRead { source, .. }) => {
                    outcome.live_read_failed = Some(api::ErrorChain(&*source).to_string());
                    break;
                }
                done => done?,
            }
        }
        // After a rejection the status waits for the next plan, which reports the rejection.
        let complete = !outcome.network_written && !outcome.conflicted && outcome.rejected.is_empty();
        if let Some(status) = plan.status.as_deref().filter(|_| complete) {
            match self.write_status(plan, status).await {
                Ok(StatusWrite::Stored) => outcome.network_written = true,
                Ok(StatusWrite::Dropped) => outcome.status_write_failed = Some(STATUS_DROPPED.to_owned()),
                Err(error) if error.is_conflict() => outcome.conflicted = true,
                // A failed status write does not fail the steps.
                Err(error) => outcome.status_write_failed = Some(api::ErrorChain(&error).to_string()),
            }
        }
        // Writes that failed are planned again, with their events.
        let done = |event: &&EventDraft| match &event.nad {
            Some(at) => outcome.wrote(at),
            None => outcome.network_written,
        };
        for event in plan.events.iter().filter(done) {
            self.record_event(plan, event).await;
        }
        Ok(outcome)
    }

    async fn apply_step(
        &self,
        plan: &NetworkPlan,
        step: &NetworkStep,
        live: &LiveResults,
        outcome: &mut ApplyOutcome,
    ) -> Result<(), Error> {
        match step {
            NetworkStep::SetFinalizers(finalizers) => self.set_finalizers(plan, finalizers, outcome).await,
            NetworkStep::CreateNad { at, config, repair } => {
                let created = self.create_nad(plan, at, config).await;
                if !outcome.check(at, created)? {
                    return Ok(());
                }
                outcome.nads.push((at.clone(), None));
                self.count_repair(*repair);
                info!(network = plan.name, nad = %at, repair, "created a NAD");
                Ok(())
            }
            NetworkStep::ApplyNad { at, uid, version, config, repair } => {
                let applied = self.apply_nad(plan, at, uid, config).await;
                if !outcome.check(at, applied)? {
                    return Ok(());
                }
                outcome.nads.push((at.clone(), Some(version.clone())));
                self.count_repair(*repair);
                info!(network = plan.name, nad = %at, repair, "updated a NAD");
                Ok(())
            }
            NetworkStep::DeleteNads(nads) => self.delete_nads(plan, nads, live, outcome).await,
            NetworkStep::ConfirmNadsUnused(nads) => {
                if unused(plan, nads, live, outcome) {
                    outcome.confirmed_unused.extend(nads.iter().cloned());
                }
                Ok(())
            }
            NetworkStep::RemoveUsersFinalizer { nads, finalizers } => {
                let left = live.is_held(&plan.uid).map_err(|source| live_read_error(plan, source))?;
                if left || used(plan, nads, live)? {
                    outcome.blocked = true;
                    return Ok(());
                }
                self.set_finalizers(plan, finalizers, outcome).await?;
                info!(network = plan.name, "no users left, removed the users finalizer");
                Ok(())
            }
            NetworkStep::RemoveNodesFinalizer { finalizers } => {
                if let Some(node) =
                    live.node_listing(&plan.uid).map_err(|source| live_read_error(plan, source))?
                {
                    debug!(network = plan.name, node, "a node reports the network");
                    outcome.blocked = true;
                    return Ok(());
                }
                self.set_finalizers(plan, finalizers, outcome).await?;
                info!(network = plan.name, "no node has links of the network, removed the nodes finalizer");
                Ok(())
            }
        }
    }

    async fn set_finalizers(
        &self,
        plan: &NetworkPlan,
        finalizers: &[String],
        outcome: &mut ApplyOutcome,
    ) -> Result<(), Error> {
        let patch = json!({"metadata": {
            "uid": plan.uid, "resourceVersion": plan.version, "finalizers": finalizers,
        }});
        let params = PatchParams {
            field_manager: Some(CONTROLLER_FIELD_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let api = self.networks();
        let patched = self.network.change(api.patch(&plan.name, &params, &Patch::Merge(&patch))).await;
        patched.map_err(|source| Error::Network { name: plan.name.clone(), source })?;
        outcome.network_written = true;
        Ok(())
    }

    async fn delete_nads(
        &self,
        plan: &NetworkPlan,
        nads: &[(NadRef, NadState)],
        live: &LiveResults,
        outcome: &mut ApplyOutcome,
    ) -> Result<(), Error> {
        let names: BTreeSet<NadRef> = nads.iter().map(|(at, _)| at.clone()).collect();
        if !unused(plan, &names, live, outcome) {
            return Ok(());
        }
        for (at, nad) in nads {
            let deleted = self.delete_nad(at, nad).await;
            if !outcome.check(at, deleted)? {
                continue;
            }
            outcome.nads.push((at.clone(), Some(nad.version.clone())));
            info!(network = plan.name, nad = %at, "deleted a NAD");
        }
        Ok(())
    }

    async fn delete_nad(&self, at: &NadRef, nad: &NadState) -> Result<(), Error> {
        let unchanged =
            Preconditions { uid: Some(nad.uid.clone()), resource_version: Some(nad.version.clone()) };
        let params = DeleteParams::default().preconditions(unchanged);
        let api = self.nads(&at.namespace);
        let deleted = self.nad.change(api.delete(&at.name, &params)).await;
        deleted.map(drop).map_err(|source| Error::Nad { at: at.clone(), source })
    }

    /// Deletes a NAD whose network no longer exists, if the live results confirm that and show no user.
    pub async fn delete_orphan(&self, at: &NadRef, nad: &NadState, live: &LiveResults) -> Result<(), Error> {
        let plan = NetworkPlan { name: nad.network.clone().unwrap_or_default(), ..NetworkPlan::default() };
        let uid = nad.network_uid.as_deref().unwrap_or_default();
        let exists = live.network_exists(uid).map_err(|source| live_read_error(&plan, source))?;
        if exists || used(&plan, &BTreeSet::from([at.clone()]), live)? {
            return Ok(());
        }
        self.delete_nad(at, nad).await?;
        let note = format!(
            "NetworkAttachmentDefinition {at} was deleted because its BridgeNetwork no longer exists"
        );
        let event = EventDraft { nad: None, warning: false, reason: "AttachmentRemoved", note };
        self.record_event(&NetworkPlan { uid: uid.to_owned(), ..plan }, &event).await;
        info!(nad = %at, "deleted an orphan NAD");
        Ok(())
    }

    async fn create_nad(&self, plan: &NetworkPlan, at: &NadRef, config: &str) -> Result<(), Error> {
        let object =
            serde_json::from_value(nad_object(plan, at, config, None)).map_err(kube::Error::SerdeError);
        let params =
            PostParams { field_manager: Some(CONTROLLER_FIELD_MANAGER.to_owned()), ..PostParams::default() };
        let api = self.nads(&at.namespace);
        let create = async { api.create(&params, &object?).await };
        let created = self.nad.create(create).await;
        created.map(drop).map_err(|source| Error::Nad { at: at.clone(), source })
    }

    /// The UID makes the apply update this very object and never create one.
    async fn apply_nad(&self, plan: &NetworkPlan, at: &NadRef, uid: &str, config: &str) -> Result<(), Error> {
        let object = nad_object(plan, at, config, Some(uid));
        let params = PatchParams::apply(CONTROLLER_FIELD_MANAGER).force();
        let api = self.nads(&at.namespace);
        let applied = self.nad.change(api.patch(&at.name, &params, &Patch::Apply(&object))).await;
        applied.map(drop).map_err(|source| Error::Nad { at: at.clone(), source })
    }

    /// Replaces the whole status. A server-side apply could not remove what others added, and the API server rejects it if
    /// the stored spec violates the schema.
    async fn write_status(
        &self,
        plan: &NetworkPlan,
        status: &BridgeNetworkStatus,
    ) -> Result<StatusWrite, Error> {
        let patch = json!([
            {"op": "replace", "path": "/metadata/resourceVersion", "value": plan.version},
            {"op": "add", "path": "/status", "value": status},
        ]);
        let patch = serde_json::from_value(patch).map_err(kube::Error::SerdeError);
        let params = PatchParams {
            field_manager: Some(CONTROLLER_FIELD_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let api = self.networks();
        let write = async { api.patch_status(&plan.name, &params, &Patch::Json::<()>(patch?)).await };
        let patched = self.network.change(write).await;
        let patched = patched.map_err(|source| Error::Network { name: plan.name.clone(), source })?;
        let unchanged = patched.metadata.resource_version.as_ref() == Some(&plan.version);
        Ok(if unchanged { StatusWrite::Dropped } else { StatusWrite::Stored })
    }

    /// Best effort: a condition reports the same.
    async fn record_event(&self, plan: &NetworkPlan, event: &EventDraft) {
        let resource = project::networks();
        let regarding = ObjectReference {
            api_version: Some(resource.api_version),
            kind: Some(resource.kind),
            name: Some(plan.name.clone()),
            uid: Some(plan.uid.clone()),
            ..ObjectReference::default()
        };
        let event = events::Event {
            type_: if event.warning { events::EventType::Warning } else { events::EventType::Normal },
            reason: event.reason.to_owned(),
            note: Some(event.note.clone()),
            action: "Reconcile".to_owned(),
            secondary: None,
        };
        if let Err(error) = self.event.create(self.recorder.publish(&event, &regarding)).await {
            debug!(network = plan.name, error = %api::ErrorChain(&error), "could not record an event");
        }
    }

    fn count_repair(&self, repair: bool) {
        if repair {
            self.metrics.attachment_repaired();
        }
    }

    fn networks(&self) -> Api<DynamicObject> {
        Api::all_with(self.client.clone(), &project::networks())
    }

    fn nads(&self, namespace: &str) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), namespace, &project::nads())
    }
}

fn live_read_error(plan: &NetworkPlan, source: Arc<request::Error>) -> Error {
    Error::LiveRead { name: plan.name.clone(), source }
}

/// Adds what a step depends on to the query.
fn add_to_query(query: &mut LiveQuery, uid: &str, step: &NetworkStep) {
    match step {
        NetworkStep::DeleteNads(all) => query.nads.extend(all.iter().map(|(at, _)| at.clone())),
        NetworkStep::ConfirmNadsUnused(all) => query.nads.extend(all.iter().cloned()),
        NetworkStep::RemoveUsersFinalizer { nads, .. } => {
            query.held.insert(uid.to_owned());
            query.nads.extend(nads.iter().cloned());
        }
        NetworkStep::RemoveNodesFinalizer { .. } => _ = query.listed.insert(uid.to_owned()),
        NetworkStep::SetFinalizers(_) | NetworkStep::CreateNad { .. } | NetworkStep::ApplyNad { .. } => {}
    }
}

/// Whether these NADs have no users. A failed read counts as a rejection of these NADs and does not stop other steps.
fn unused(
    plan: &NetworkPlan,
    nads: &BTreeSet<NadRef>,
    live: &LiveResults,
    outcome: &mut ApplyOutcome,
) -> bool {
    match used(plan, nads, live) {
        Ok(used) => {
            outcome.blocked |= used;
            !used
        }
        Err(error) => {
            let why = api::ErrorChain(&error).to_string();
            outcome.rejected.extend(nads.iter().map(|at| (at.clone(), why.clone())));
            false
        }
    }
}

fn used(plan: &NetworkPlan, nads: &BTreeSet<NadRef>, live: &LiveResults) -> Result<bool, Error> {
    let user = live.user_of(nads).map_err(|source| live_read_error(plan, source))?;
    if let Some(user) = user {
        debug!(network = plan.name, user, "the network has a new user");
    }
    Ok(user.is_some())
}

fn nad_object(plan: &NetworkPlan, at: &NadRef, config: &str, uid: Option<&str>) -> Value {
    let resource = project::nads();
    let mut object = json!({
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {
            "name": at.name,
            "namespace": at.namespace,
            "labels": {NAD_NETWORK_LABEL: plan.name},
            "annotations": {
                NAD_UID_ANNOTATION: plan.uid,
                NAD_ORIGIN_ANNOTATION: api::nad::origin_digest(&plan.uid, at),
            },
        },
        "spec": {"config": config},
    });
    if let Some(uid) = uid {
        object["metadata"]["uid"] = json!(uid);
    }
    object
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    fn failure(reason: &str, code: u16) -> Error {
        let error = kube::Error::Api(Box::new(Status::failure("quota", reason).with_code(code)));
        let source =
            if code == 409 { request::Error::Conflict(error) } else { request::Error::Failed(error) };
        Error::Nad { at: NadRef::new("ns", "blue"), source }
    }

    #[test]
    fn a_rejection_or_conflict_is_recorded_and_a_missing_response_ends_the_plan() {
        let at = NadRef::new("ns", "blue");
        let mut outcome = ApplyOutcome::default();
        assert!(outcome.check(&at, Ok(())).unwrap());
        assert!(!outcome.check(&at, Err(failure("Forbidden", 403))).unwrap());
        assert_eq!(outcome.rejected, [(at.clone(), "quota".to_owned())]);
        assert!(!outcome.conflicted && !outcome.check(&at, Err(failure("Conflict", 409))).unwrap());
        assert!(outcome.conflicted);
        let no_response = Error::Nad { at: at.clone(), source: request::Error::LeaseExpired };
        assert!(outcome.check(&at, Err(no_response)).is_err());
    }
}
