//! Consistent reads from the API server, before something is given up that cannot be taken back.

use std::{collections::BTreeMap, sync::Arc};

use api::{ipamclaim::IPAM_EXTENSIONS_WEBHOOKS, ipblock::NETWORK_LABEL};
use client::{
    decode::{Ignored, MetadataObject, Object},
    request::{self, ApiCall},
    watch::PAGE_SIZE,
};
use k8s_openapi::api::{admissionregistration::v1::MutatingWebhookConfiguration, core::v1::Pod};
use kube::{
    Api, Client,
    api::ListParams,
    core::{ApiResource, Status},
};
use plan::{
    claims::{
        ClaimPod, ClaimState, ObjectKey, OwnerKind, OwnerRef, VmiFacts,
        machine::{GoneCheck, KindState, KindsKnown, UnchangedCheck},
    },
    network::{BlockState, NodeReport},
    users::WorkloadKind,
};
use serde::Deserialize;
use tokio::sync::Mutex;

use crate::{
    cache::{
        claims::project::{self, ClaimObject, MachineObject},
        project::{self as cache_project, BlockObject, NodeNetworkObject},
        watches::LIVE_PODS,
    },
    leader::LeaderContext,
    metrics::ApiCallKind,
};

/// Reads claims, virtual machines and pods, past the cache.
pub struct LiveClaims {
    client: Client,
    claim: ApiCall,
    machine: ApiCall,
    list: ApiCall,
    webhook: ApiCall,
}

/// What one reconcile read about pods. Each namespace, pod and node is read once.
#[derive(Default)]
pub struct LivePods {
    by_namespace: Mutex<BTreeMap<Arc<str>, Arc<Vec<ClaimPod>>>>,
    scheduled: Mutex<BTreeMap<Arc<str>, Arc<Vec<ScheduledPod>>>>,
    reports: Mutex<BTreeMap<Arc<str>, Option<Arc<NodeReport>>>>,
}

/// A pod and the name of its node.
pub type ScheduledPod = (ClaimPod, Arc<str>);

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodSpec {
    node_name: Option<Arc<str>>,
}

/// A virtual machine, or its instance.
enum LiveMachine {
    /// The API server serves the kind, and has no such object.
    Gone,
    /// The API server does not serve the kind.
    NotServed,
    Found(Box<MachineObject>),
}

impl LiveClaims {
    pub fn new(context: &LeaderContext) -> Self {
        let LeaderContext { client, metrics, .. } = context;
        Self {
            claim: metrics.api_call(ApiCallKind::Claim),
            machine: metrics.api_call(ApiCallKind::Machine),
            list: metrics.api_call(ApiCallKind::List),
            webhook: metrics.api_call(ApiCallKind::WebhookConfiguration),
            client: client.clone(),
        }
    }

    /// The claim that has this name now. A kind that is not served is an error: its objects may exist.
    pub async fn claim(&self, key: &ObjectKey) -> Result<Option<ClaimState>, request::Error> {
        let api: Api<ClaimObject> =
            Api::namespaced_with(self.client.clone(), &key.namespace, &project::claims());
        let get = async {
            match api.get(&key.name).await {
                Ok(claim) => Ok(Some(claim)),
                Err(kube::Error::Api(status)) if status.code == 404 && names_object(&status) => Ok(None),
                Err(error) => Err(error),
            }
        };
        Ok(self.claim.read(get).await?.and_then(project::claim))
    }

    /// The live pods of a namespace: any of them may have the addresses of a claim.
    pub async fn pods(
        &self,
        namespace: &Arc<str>,
        listed: &LivePods,
    ) -> Result<Arc<Vec<ClaimPod>>, request::Error> {
        let mut listed = listed.by_namespace.lock().await;
        if let Some(pods) = listed.get(namespace) {
            return Ok(Arc::clone(pods));
        }
        let resource = ApiResource::erase::<Pod>(&());
        let api: Api<MetadataObject> = Api::namespaced_with(self.client.clone(), namespace, &resource);
        let mut params = ListParams::default().limit(PAGE_SIZE).fields(LIVE_PODS);
        let mut pods = Vec::new();
        loop {
            let list = self.list.read(api.list_metadata(&params)).await?;
            pods.extend(list.items.iter().filter_map(|pod| project::any_pod(&pod.metadata)));
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => break,
            }
        }
        let pods = Arc::new(pods);
        listed.insert(Arc::clone(namespace), Arc::clone(&pods));
        Ok(pods)
    }

    /// Those that have a node: no other has an interface.
    pub async fn scheduled_pods(
        &self,
        namespace: &Arc<str>,
        listed: &LivePods,
    ) -> Result<Arc<Vec<ScheduledPod>>, request::Error> {
        let mut listed = listed.scheduled.lock().await;
        if let Some(pods) = listed.get(namespace) {
            return Ok(Arc::clone(pods));
        }
        let resource = ApiResource::erase::<Pod>(&());
        let api: Api<Object<PodSpec, Ignored>> =
            Api::namespaced_with(self.client.clone(), namespace, &resource);
        let fields = format!("{LIVE_PODS},spec.nodeName!=");
        let mut params = ListParams::default().limit(PAGE_SIZE).fields(&fields);
        let mut pods = Vec::new();
        loop {
            let list = self.list.read(api.list(&params)).await?;
            let found = list
                .items
                .into_iter()
                .filter_map(|pod| Some((project::any_pod(&pod.metadata)?, pod.spec.node_name?)));
            pods.extend(found);
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => break,
            }
        }
        let pods = Arc::new(pods);
        listed.insert(Arc::clone(namespace), Arc::clone(&pods));
        Ok(pods)
    }

    /// What the daemon of a node reports. None without a NodeNetwork.
    pub async fn node_report(
        &self,
        node: &Arc<str>,
        listed: &LivePods,
    ) -> Result<Option<Arc<NodeReport>>, request::Error> {
        let mut reports = listed.reports.lock().await;
        if let Some(report) = reports.get(node) {
            return Ok(report.clone());
        }
        let api: Api<NodeNetworkObject> = Api::all_with(self.client.clone(), &cache_project::node_networks());
        let params = ListParams::default().fields(&format!("metadata.name={node}"));
        let list = self.list.read(api.list(&params)).await?;
        let found = list.items.into_iter().next().and_then(cache_project::node_report);
        let report = found.map(|(_, report)| Arc::new(report));
        reports.insert(Arc::clone(node), report.clone());
        Ok(report)
    }

    /// The IPBlocks of a network, by name.
    pub async fn blocks(&self, network: &str) -> Result<BTreeMap<String, BlockState>, request::Error> {
        let api: Api<BlockObject> = Api::all_with(self.client.clone(), &cache_project::blocks());
        let mut params = ListParams::default().limit(PAGE_SIZE).labels(&format!("{NETWORK_LABEL}={network}"));
        let mut blocks = BTreeMap::new();
        loop {
            let list = self.list.read(api.list(&params)).await?;
            blocks.extend(list.items.into_iter().filter_map(cache_project::block));
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(blocks),
            }
        }
    }

    /// Whether all checks hold. A kind that the cluster does not have has no objects; one that it has and does not serve
    /// may have any.
    pub async fn are_gone(
        &self,
        checks: &[GoneCheck],
        kinds: KindsKnown,
        listed: &LivePods,
    ) -> Result<bool, request::Error> {
        for check in checks {
            if !self.is_gone(check, kinds, listed).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether an owner exists and is not being deleted. The garbage collector deletes a claim whose owner is gone.
    pub async fn owner_lives(&self, namespace: &Arc<str>, owner: &OwnerRef) -> Result<bool, request::Error> {
        let key = ObjectKey { namespace: Arc::clone(namespace), name: owner.name.clone() };
        Ok(match self.machine(owner.kind, &key).await? {
            LiveMachine::Gone | LiveMachine::NotServed => false,
            LiveMachine::Found(object) => {
                let metadata = &object.metadata;
                metadata.uid.as_deref() == Some(&owner.uid) && metadata.deletion_timestamp.is_none()
            }
        })
    }

    /// Whether the virtual machine is what a decision was based on.
    pub async fn are_unchanged(
        &self,
        checks: &[UnchangedCheck],
        kinds: KindsKnown,
    ) -> Result<bool, request::Error> {
        for check in checks {
            let (kind, key, state, is_cached) = match check {
                UnchangedCheck::Vm { key, cached } => {
                    (OwnerKind::VirtualMachine, key, kinds.vm, cached.is_some())
                }
                UnchangedCheck::Vmi { key, cached } => {
                    (OwnerKind::VirtualMachineInstance, key, kinds.vmi, cached.is_some())
                }
            };
            let same = match self.machine(kind, key).await? {
                LiveMachine::Gone => !is_cached,
                LiveMachine::NotServed => !is_cached && state == KindState::Absent,
                LiveMachine::Found(_) if !is_cached => false,
                LiveMachine::Found(object) => match check {
                    UnchangedCheck::Vm { cached, .. } => project::vm(&object) == *cached,
                    UnchangedCheck::Vmi { cached, .. } => project::vmi(&object) == *cached,
                },
            };
            if !same {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether a live pod uses a claim.
    pub async fn is_used(&self, claim: &ObjectKey, listed: &LivePods) -> Result<bool, request::Error> {
        let pods = self.pods(&claim.namespace, listed).await?;
        Ok(pods.iter().any(|pod: &ClaimPod| pod.uses(claim)))
    }

    /// Whether the webhook of ipam-extensions is registered.
    async fn has_ipam_extensions(&self) -> Result<bool, request::Error> {
        let api: Api<MutatingWebhookConfiguration> = Api::all(self.client.clone());
        for name in IPAM_EXTENSIONS_WEBHOOKS {
            if self.webhook.read(api.get_metadata_opt(name)).await?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    async fn is_gone(
        &self,
        check: &GoneCheck,
        kinds: KindsKnown,
        listed: &LivePods,
    ) -> Result<bool, request::Error> {
        let (kind, key) = match check {
            GoneCheck::Unused { claim } => return Ok(!self.is_used(claim, listed).await?),
            GoneCheck::NoIpamExtensions => return Ok(!self.has_ipam_extensions().await?),
            GoneCheck::Object { kind, key, .. } | GoneCheck::Name { kind, key } => (*kind, key),
            GoneCheck::NoInstanceOf { key, .. } | GoneCheck::Inactive { key, .. } => {
                (OwnerKind::VirtualMachineInstance, key)
            }
        };
        let state = match kind {
            OwnerKind::VirtualMachine => kinds.vm,
            OwnerKind::VirtualMachineInstance => kinds.vmi,
            OwnerKind::Other => return Ok(false),
        };
        let object = match self.machine(kind, key).await? {
            LiveMachine::Gone => return Ok(true),
            LiveMachine::NotServed => return Ok(state == KindState::Absent),
            LiveMachine::Found(object) => object,
        };
        let uid = object.metadata.uid.as_deref();
        Ok(match check {
            GoneCheck::Name { .. } | GoneCheck::Unused { .. } | GoneCheck::NoIpamExtensions => false,
            GoneCheck::Object { uid: gone, .. } => uid != Some(gone),
            GoneCheck::NoInstanceOf { vm, .. } => {
                let controller = project::vmi(&object).and_then(|vmi| vmi.controller);
                controller.is_none_or(|controller| controller.uid != *vm)
            }
            GoneCheck::Inactive { uid: gone, .. } => {
                uid != Some(gone)
                    || project::vmi(&object).is_some_and(|vmi: VmiFacts| vmi.deleting && vmi.active_pods == 0)
            }
        })
    }

    async fn machine(&self, kind: OwnerKind, key: &ObjectKey) -> Result<LiveMachine, request::Error> {
        let kind = match kind {
            OwnerKind::VirtualMachine => WorkloadKind::VirtualMachine,
            OwnerKind::VirtualMachineInstance | OwnerKind::Other => WorkloadKind::VirtualMachineInstance,
        };
        let resource = cache_project::workloads(kind);
        let api: Api<MachineObject> = Api::namespaced_with(self.client.clone(), &key.namespace, &resource);
        match self.machine.read(found(api.get(&key.name))).await? {
            Ok(object) => Ok(LiveMachine::Found(Box::new(object))),
            Err(status) if names_object(&status) => Ok(LiveMachine::Gone),
            Err(_) => Ok(LiveMachine::NotServed),
        }
    }
}

/// Whether "not found" is about an object. A status about an object names it; that of an unknown path does not.
fn names_object(status: &Status) -> bool {
    status.details.as_ref().is_some_and(|details| !details.name.is_empty())
}

/// "Not found" is an answer, and no failure.
async fn found<T>(get: impl Future<Output = kube::Result<T>>) -> kube::Result<Result<T, Status>> {
    match get.await {
        Ok(object) => Ok(Ok(object)),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(Err(*status)),
        Err(error) => Err(error),
    }
}
