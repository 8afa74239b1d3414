//! Adds the references to IPAMClaims to launcher pods.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

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
        ClaimPod, ClaimState, MutateInput, NadLookup, ObjectKey, PodElement, VmiFacts, mutate as references,
    },
    users::WorkloadKind,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{MutationDecision, RequestError, ReviewedRequest, WebhookState};
use crate::{
    cache::{
        claims::project::{self, MachineObject},
        project as cache_project,
        project::NadObject,
    },
    claims::nad_lookup,
    metrics::ApiCallKind,
};

/// The annotation of launcher pods with the name of their instance.
const DOMAIN_ANNOTATION: &str = "kubevirt.io/domain";
/// How long one read of an object that the cache does not have may take. The API server waits five seconds for the answer.
const READ_TIMEOUT: Duration = Duration::from_secs(2);

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
) -> BoxFuture<'a, Result<MutationDecision, RequestError>> {
    add_references(state, request).boxed()
}

async fn add_references(
    state: &WebhookState,
    request: &ReviewedRequest,
) -> Result<MutationDecision, RequestError> {
    let unchanged = Ok(MutationDecision::Patch(Patch::default()));
    let Some(metadata) = metadata(request).filter(|_| request.operation.sets_object()) else {
        return unchanged;
    };
    let old =
        request.old_object.as_ref().and_then(|old| read_metadata(old.get("metadata")?, &request.namespace));
    let old_annotation = old.as_ref().and_then(|old| annotation(old, NETWORKS_ANNOTATION));
    let (Some(domain), Some(networks)) =
        (annotation(&metadata, DOMAIN_ANNOTATION), annotation(&metadata, NETWORKS_ANNOTATION))
    else {
        return unchanged;
    };
    if networks.trim().is_empty() || old_annotation == Some(networks) {
        return unchanged;
    }
    let selection = NetworkSelection::parse(Some(networks));
    if let Some(error) = selection.error {
        return Ok(invalid(&error));
    }
    let Some(pod) = project::claim_pod(&metadata) else { return unchanged };
    let key = ObjectKey::new(request.namespace.as_str(), domain);
    let reader = Reader { state, call: state.metrics.api_call_within(READ_TIMEOUT, ApiCallKind::Machine) };
    let Some(mut vmi) = reader.vmi(&key, &pod).await? else { return unchanged };
    // While a NIC is plugged, the cache may have the instance from before.
    if pod.elements.iter().any(|element| element_is_unknown(element, &vmi)) {
        let Some(live) = reader.live_vmi(&key).await? else { return unchanged };
        vmi = live;
    }
    let nads = reader.nads(pod.elements.iter().map(|element| &element.nad)).await?;
    let launchers = state.cluster.claims().read(|index| index.pods_of(&key, &[]));
    let launchers: Vec<&ClaimPod> = launchers.iter().map(Arc::as_ref).collect();
    let claim = |name: &str| {
        let key = ObjectKey { namespace: key.namespace.clone(), name: name.into() };
        state.cluster.claims().read(|index| index.claim(&key).map(|claim| ClaimState::clone(claim)))
    };
    let input = MutateInput {
        namespace: &request.namespace,
        annotation: networks,
        old_annotation,
        vmi: &vmi,
        vmi_name: domain,
        launchers: &launchers,
        nads: &|at: &NadRef| nads.get(at).cloned().unwrap_or(NadLookup::Absent),
        claims: &claim,
        options: state.claims,
    };
    match references::references(&input) {
        Ok(None) => unchanged,
        Ok(Some(text)) => Ok(MutationDecision::Patch(replace_networks(&text)?)),
        Err(error) => Ok(invalid(&error)),
    }
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
}

impl Reader<'_> {
    /// The instance that the pod runs. None if it does not exist: then the pod does not start either.
    async fn vmi(&self, key: &ObjectKey, pod: &ClaimPod) -> Result<Option<Arc<VmiFacts>>, RequestError> {
        let cached = self.state.cluster.claims().read(|index| index.vmi(key).cloned());
        let uid = pod.controller.as_ref().map(|controller| &controller.uid);
        if let Some(vmi) = cached.filter(|vmi| uid.is_none_or(|uid| *uid == vmi.uid)) {
            return Ok(Some(vmi));
        }
        self.live_vmi(key).await
    }

    async fn live_vmi(&self, key: &ObjectKey) -> Result<Option<Arc<VmiFacts>>, RequestError> {
        let resource = cache_project::workloads(WorkloadKind::VirtualMachineInstance);
        let object: Option<MachineObject> = self.get(&resource, &key.namespace, &key.name).await?;
        Ok(object.as_ref().and_then(project::vmi).map(Arc::new))
    }

    async fn nads(
        &self,
        named: impl Iterator<Item = &NadRef>,
    ) -> Result<BTreeMap<NadRef, NadLookup>, RequestError> {
        let cluster = self.state.cluster.snapshot();
        let mut nads = BTreeMap::new();
        for at in named {
            if nads.contains_key(at) {
                continue;
            }
            let mut found = nad_lookup(&cluster, at);
            if found == NadLookup::Absent {
                found = self.nad(at).await?;
            }
            nads.insert(at.clone(), found);
        }
        Ok(nads)
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
        let api: Api<K> = Api::namespaced_with(self.state.client.clone(), namespace, resource);
        self.call.read(api.get_opt(name)).await.map_err(|error| {
            let kind = &resource.kind;
            RequestError::ReadFailed(format!(
                "cannot read {kind} {namespace}/{name}: {}; retry",
                ErrorChain(&error)
            ))
        })
    }
}
