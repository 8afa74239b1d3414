//! Adds the references to IPAMClaims to launcher pods.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use api::{
    ErrorChain,
    selection::{NETWORKS_ANNOTATION, NadRef, NetworkSelection},
};
use client::request::ApiCall;
use futures::{FutureExt as _, future::BoxFuture};
use json_patch::Patch;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{
    Api,
    core::{ApiResource, DynamicResourceScope},
};
use plan::{
    claims::{
        ClaimPod, ClaimState, MutateInput, NadLookup, ObjectKey, OwnerKind, OwnerRef, PodElement, VmiFacts,
        mutate as references,
    },
    users::WorkloadKind,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::{sync::OnceCell, time::timeout};

use super::{MutationDecision, RequestError, ReviewedRequest, WebhookState, truncate};
use crate::{
    cache::{
        claims::project::{self, MachineObject},
        project as cache_project,
        project::NadObject,
    },
    claims::nad_lookup,
    metrics::ApiCallKind,
    webhook::slots::{Slot, Source},
};

/// How long one read of an object that the cache does not have may take. The API server waits five seconds for the answer.
const READ_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a request waits until it may read.
const LIVE_READ_QUEUE_TIMEOUT: Duration = Duration::from_secs(1);
/// How many NADs that the cache does not have are read for one pod. Usually there is none: NADs are older than pods.
const MAX_LIVE_NADS: usize = 16;

/// The metadata of the object of a request, with its namespace.
pub fn metadata(request: &ReviewedRequest) -> Option<ObjectMeta> {
    read_metadata(request.object.as_ref()?.get("metadata")?, &request.namespace)
}

fn read_metadata(metadata: &Value, namespace: &str) -> Option<ObjectMeta> {
    let mut metadata = metadata.clone();
    // Never needed, and the largest part.
    metadata.as_object_mut()?.remove("managedFields");
    let mut metadata: ObjectMeta = serde_json::from_value(metadata).ok()?;
    metadata.namespace = Some(namespace.to_owned());
    // A pod that is being created has no UID, and may have no name yet.
    metadata.uid.get_or_insert_default();
    metadata.name.get_or_insert_default();
    Some(metadata)
}

fn annotation<'a>(metadata: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

pub fn mutate<'a>(
    state: &'a WebhookState,
    request: &'a ReviewedRequest,
    source: &'a Source,
) -> BoxFuture<'a, Result<MutationDecision, RequestError>> {
    add_references(state, request, source).boxed()
}

async fn add_references(
    state: &WebhookState,
    request: &ReviewedRequest,
    source: &Source,
) -> Result<MutationDecision, RequestError> {
    let unchanged = Ok(MutationDecision::Patch(Patch::default()));
    let Some(metadata) = metadata(request).filter(|_| request.operation.sets_object()) else {
        return unchanged;
    };
    let old =
        request.old_object.as_ref().and_then(|old| read_metadata(old.get("metadata")?, &request.namespace));
    let old_annotation = old.as_ref().and_then(|old| annotation(old, NETWORKS_ANNOTATION));
    let Some(networks) = annotation(&metadata, NETWORKS_ANNOTATION) else { return unchanged };
    if networks.trim().is_empty() || old_annotation == Some(networks) {
        return unchanged;
    }
    let selection = NetworkSelection::parse(Some(networks));
    if let Some(error) = selection.error {
        return Ok(invalid(&error));
    }
    let Some(pod) = project::claim_pod(&metadata).filter(|pod| pod.launcher && !pod.deleting) else {
        return unchanged;
    };
    // A pod that no instance owns runs none, whatever its labels and annotations say.
    let Some(owner) = pod.controller.as_ref().filter(|it| it.kind == OwnerKind::VirtualMachineInstance)
    else {
        return unchanged;
    };
    let key = ObjectKey::new(request.namespace.as_str(), owner.name.clone());
    let call = state.metrics.api_call_within(READ_TIMEOUT, ApiCallKind::Machine);
    let source = source.namespace(&request.namespace);
    let reader = Reader { state, call, source, slot: OnceCell::new() };
    let Some(mut vmi) = reader.vmi(&key, &owner.uid).await? else { return Ok(no_instance(&key, owner)) };
    // While a NIC is plugged, the cache may have the instance from before.
    if pod.elements.iter().any(|element| element_is_unknown(element, &vmi)) {
        let Some(live) = reader.live_vmi(&key, &owner.uid).await? else {
            return Ok(no_instance(&key, owner));
        };
        vmi = live;
    }
    let launchers = state.cluster.claims().read(|index| index.pods_of(&key, &[]));
    let launchers: Vec<&ClaimPod> = launchers.iter().map(Arc::as_ref).collect();
    let claim = |name: &str| {
        let key = ObjectKey { namespace: key.namespace.clone(), name: name.into() };
        state.cluster.claims().read(|index| index.claim(&key).map(|claim| ClaimState::clone(claim)))
    };
    let decide = |nads: &dyn Fn(&NadRef) -> NadLookup| {
        references::references(&MutateInput {
            namespace: &request.namespace,
            annotation: networks,
            old_annotation,
            vmi: &vmi,
            vmi_name: &key.name,
            launchers: &launchers,
            nads,
            claims: &claim,
            options: state.claims,
        })
    };
    let cluster = state.cluster.snapshot();
    // The NADs that decide something and that the cache does not have: those of other elements are not read.
    let absent = RefCell::new(BTreeSet::new());
    let mut decided = decide(&|at| {
        let found = nad_lookup(&cluster, at);
        if found == NadLookup::Absent {
            absent.borrow_mut().insert(at.clone());
        }
        found
    });
    let absent = absent.into_inner();
    if absent.len() > MAX_LIVE_NADS {
        return Ok(too_many_absent(&absent));
    }
    if !absent.is_empty() {
        let live = reader.nads(absent).await?;
        decided = decide(&|at| live.get(at).cloned().unwrap_or_else(|| nad_lookup(&cluster, at)));
    }
    match decided {
        Ok(None) => unchanged,
        Ok(Some(text)) => Ok(MutationDecision::Patch(replace_networks(&text)?)),
        Err(error) => Ok(invalid(&error)),
    }
}

/// A launcher without its instance would start with addresses that no claim has.
fn no_instance(key: &ObjectKey, owner: &OwnerRef) -> MutationDecision {
    MutationDecision::Invalid(format!(
        "VirtualMachineInstance {key} (UID {}), which owns this launcher pod, does not exist; create the virtual machine, and \
         let KubeVirt create its pod",
        owner.uid
    ))
}

fn too_many_absent(absent: &BTreeSet<NadRef>) -> MutationDecision {
    let first = absent.first().map(|at| truncate(&at.to_string())).unwrap_or_default();
    MutationDecision::Invalid(format!(
        "the controller does not know {} NetworkAttachmentDefinitions of this pod, such as {first}, and looks up at most \
         {MAX_LIVE_NADS}; create them before the virtual machine, or retry if you just did",
        absent.len()
    ))
}

/// Whether an element has an interface name of KubeVirt that no network of the instance has.
fn element_is_unknown(element: &PodElement, vmi: &VmiFacts) -> bool {
    let Some(interface) = element.interface.as_deref() else { return false };
    let hashed = interface.strip_prefix("pod").is_some_and(|hash| hash.len() == 11);
    hashed && !vmi.networks.iter().any(|network| *network.pod_interface == *interface)
}

fn invalid(error: &api::selection::Error) -> MutationDecision {
    MutationDecision::Invalid(format!("failed to parse pod network selection elements: {error}"))
}

fn replace_networks(text: &str) -> Result<Patch, RequestError> {
    let path = format!("/metadata/annotations/{}", NETWORKS_ANNOTATION.replace('~', "~0").replace('/', "~1"));
    serde_json::from_value(json!([{"op": "replace", "path": path, "value": text}]))
        .map_err(|error| RequestError::ReadFailed(error.to_string()))
}

/// Reads from the cache, and from the API server what the cache does not have.
struct Reader<'a> {
    state: &'a WebhookState,
    call: ApiCall,
    source: Source,
    /// Taken by the first read.
    slot: OnceCell<Slot>,
}

impl Reader<'_> {
    /// Sources share the places of those that wait too, so that one of them never keeps the others from waiting.
    async fn take_slot(&self) -> Result<Slot, RequestError> {
        let Self { state, source, .. } = self;
        let place = state.live_read_queue.try_take(source).ok_or(RequestError::BusyReading)?;
        let slot = timeout(LIVE_READ_QUEUE_TIMEOUT, state.live_reads.take(source.clone()));
        let slot = place.lost().run_until_cancelled(slot).await;
        slot.and_then(Result::ok).ok_or(RequestError::BusyReading)
    }

    /// The instance of this UID. None if the API server says that it does not exist.
    async fn vmi(&self, key: &ObjectKey, uid: &str) -> Result<Option<Arc<VmiFacts>>, RequestError> {
        let cached = self.state.cluster.claims().read(|index| index.vmi(key).cloned());
        if let Some(vmi) = cached.filter(|vmi| vmi.uid == uid) {
            return Ok(Some(vmi));
        }
        self.live_vmi(key, uid).await
    }

    async fn live_vmi(&self, key: &ObjectKey, uid: &str) -> Result<Option<Arc<VmiFacts>>, RequestError> {
        let resource = cache_project::workloads(WorkloadKind::VirtualMachineInstance);
        let object: Option<MachineObject> = self.get(&resource, &key.namespace, &key.name).await?;
        Ok(object.as_ref().and_then(project::vmi).filter(|vmi| vmi.uid == uid).map(Arc::new))
    }

    async fn nads(&self, absent: BTreeSet<NadRef>) -> Result<BTreeMap<NadRef, NadLookup>, RequestError> {
        let reads = absent.into_iter().map(async |at| Ok((at.clone(), self.nad(&at).await?)));
        Ok(futures::future::try_join_all(reads).await?.into_iter().collect())
    }

    async fn nad(&self, at: &NadRef) -> Result<NadLookup, RequestError> {
        let object: Option<NadObject> = self.get(&cache_project::nads(), &at.namespace, &at.name).await?;
        let nad = object.and_then(cache_project::nad).filter(|(_, nad)| !nad.deleting);
        Ok(match nad.map(|(_, nad)| nad.network_config) {
            None => NadLookup::Absent,
            Some(Ok(config)) => NadLookup::Found(config),
            Some(Err(cause)) => NadLookup::Invalid(cause),
        })
    }

    async fn get<K>(
        &self,
        resource: &ApiResource,
        namespace: &str,
        name: &str,
    ) -> Result<Option<K>, RequestError>
    where
        K: kube::Resource<DynamicType = ApiResource, Scope = DynamicResourceScope>
            + Clone
            + std::fmt::Debug
            + DeserializeOwned,
    {
        let slot = self.slot.get_or_try_init(async || self.take_slot().await).await?;
        let api: Api<K> = Api::namespaced_with(self.state.client.clone(), namespace, resource);
        let read = slot.lost().run_until_cancelled(self.call.read(api.get_opt(name))).await;
        read.ok_or(RequestError::BusyReading)?.map_err(|error| {
            let kind = &resource.kind;
            RequestError::ReadFailed(format!(
                "cannot read {kind} {namespace}/{name}: {}; retry",
                ErrorChain(&error)
            ))
        })
    }
}
