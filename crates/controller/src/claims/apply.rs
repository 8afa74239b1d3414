//! Writes of the controller for claims. Every write creates an object, or carries the UID and the resourceVersion of what
//! was read, so a former leader cannot overwrite anything.

use api::{
    CONTROLLER_FIELD_MANAGER, IPAMClaimStatus, IPBlockSpec, IPBlockStatus,
    ipamclaim::{FINALIZER, MANAGED_ANNOTATION, RECORD_ANNOTATION, RecordedAddresses, VM_LABEL},
    ipblock::{
        self, BORROWED_LABEL, CLAIMS_HOLDER_UID, ClaimedAddress, HOLDER_ROLE, HolderRef, LENDER_ROLE,
        NETWORK_LABEL, NODE_ROLE_LABEL_PREFIX,
    },
};
use client::request::{self, ApiCall};
use kube::{
    Api, Client,
    api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions},
};
use plan::{
    claims::{
        ClaimState, ObjectKey, OwnerKind, OwnerRef,
        allocate::{BlockCreate, BlockDelete, BlockWrite},
        machine::ClaimDraft,
    },
    network::BlockState,
};
use serde_json::{Value, json};
use tracing::info;

use crate::{
    cache::{
        claims::project::{self, ClaimObject},
        project as cache_project,
        project::BlockObject,
    },
    leader::LeaderContext,
    metrics::ApiCallKind,
};

/// Writes claims and the blocks of claims, while this replica leads.
pub struct ClaimWriter {
    client: Client,
    claim: ApiCall,
    claim_status: ApiCall,
    block: ApiCall,
}

fn patch_params() -> PatchParams {
    PatchParams { field_manager: Some(CONTROLLER_FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

fn post_params() -> PostParams {
    PostParams { field_manager: Some(CONTROLLER_FIELD_MANAGER.to_owned()), ..PostParams::default() }
}

fn unchanged(uid: &str, version: &str) -> DeleteParams {
    let (uid, resource_version) = (Some(uid.to_owned()), Some(version.to_owned()));
    DeleteParams::background().preconditions(Preconditions { uid, resource_version })
}

fn owner_reference(owner: &OwnerRef) -> Value {
    json!({
        "apiVersion": OwnerKind::API_VERSION,
        "kind": owner.kind.to_string(),
        "name": &*owner.name,
        "uid": owner.uid,
        "controller": true,
        "blockOwnerDeletion": true,
    })
}

/// A claim as ipam-extensions creates it, with the name of the pod interface.
fn claim_object(draft: &ClaimDraft) -> Value {
    json!({
        "apiVersion": "k8s.cni.cncf.io/v1alpha1",
        "kind": "IPAMClaim",
        "metadata": {
            "namespace": &*draft.key.namespace,
            "name": &*draft.key.name,
            "labels": {VM_LABEL: draft.label},
            "annotations": {MANAGED_ANNOTATION: "true"},
            "finalizers": [FINALIZER],
            "ownerReferences": [owner_reference(&draft.owner)],
        },
        "spec": {"network": draft.network, "interface": &*draft.interface},
    })
}

/// Every field, because a merge patch leaves a field that is missing as it is.
fn status_fields(status: &IPBlockStatus) -> Value {
    let IPBlockStatus { used, free, spare, lent, refused, closed, draining, claims } = status;
    json!({
        "used": used, "free": free, "spare": spare, "lent": lent, "refused": refused, "closed": closed,
        "draining": draining, "claims": claims,
    })
}

impl ClaimWriter {
    pub fn new(context: &LeaderContext) -> Self {
        let LeaderContext { client, metrics, fence, .. } = context;
        let fenced = |call| metrics.api_call(call).fenced(fence.clone());
        Self {
            claim: fenced(ApiCallKind::Claim),
            claim_status: fenced(ApiCallKind::ClaimStatus),
            block: fenced(ApiCallKind::Block),
            client: client.clone(),
        }
    }

    pub async fn create_claim(&self, draft: &ClaimDraft) -> Result<Option<ClaimState>, request::Error> {
        let object = serde_json::from_value(claim_object(draft)).map_err(kube::Error::SerdeError);
        let (api, params) = (self.dynamic_claims(&draft.key), post_params());
        let create = async { api.create(&params, &object?).await };
        let created = self.claim.create(create).await?;
        info!(claim = %draft.key, network = draft.network, "created an IPAMClaim");
        Ok(claim_state(&created))
    }

    pub async fn set_owner(
        &self,
        claim: &ObjectKey,
        uid: &str,
        version: &str,
        owner: &OwnerRef,
    ) -> Result<(), request::Error> {
        let metadata =
            json!({"uid": uid, "resourceVersion": version, "ownerReferences": [owner_reference(owner)]});
        self.patch_claim(claim, &json!({"metadata": metadata})).await?;
        info!(%claim, owner = %owner.name, kind = %owner.kind, "set the owner of an IPAMClaim");
        Ok(())
    }

    pub async fn set_network(
        &self,
        claim: &ObjectKey,
        uid: &str,
        version: &str,
        network: &str,
    ) -> Result<(), request::Error> {
        let metadata = json!({"uid": uid, "resourceVersion": version});
        self.patch_claim(claim, &json!({"metadata": metadata, "spec": {"network": network}})).await?;
        info!(%claim, network, "set the network of an IPAMClaim");
        Ok(())
    }

    pub async fn mark(&self, claim: &ObjectKey, uid: &str, version: &str) -> Result<(), request::Error> {
        let annotations = json!({MANAGED_ANNOTATION: "true"});
        let metadata = json!({"uid": uid, "resourceVersion": version, "annotations": annotations});
        self.patch_claim(claim, &json!({"metadata": metadata})).await?;
        info!(%claim, "took over an IPAMClaim");
        Ok(())
    }

    /// Records the addresses of a claim in its annotation. Returns the claim as it is stored.
    pub async fn record_addresses(
        &self,
        claim: &ClaimState,
        record: &RecordedAddresses,
    ) -> Result<Option<ClaimState>, request::Error> {
        let annotations = json!({RECORD_ANNOTATION: record.text()});
        let metadata =
            json!({"uid": claim.uid, "resourceVersion": claim.version, "annotations": annotations});
        let (api, params) = (self.claims(&claim.key), patch_params());
        let patch = Patch::Merge(json!({"metadata": metadata}));
        Ok(project::claim(self.claim.change(api.patch(&claim.key.name, &params, &patch)).await?))
    }

    pub async fn remove_finalizer(
        &self,
        claim: &ObjectKey,
        uid: &str,
        version: &str,
        left: &[String],
    ) -> Result<(), request::Error> {
        let metadata = json!({"uid": uid, "resourceVersion": version, "finalizers": left});
        self.patch_claim(claim, &json!({"metadata": metadata})).await?;
        info!(%claim, "removed the finalizer of an IPAMClaim");
        Ok(())
    }

    async fn patch_claim(&self, claim: &ObjectKey, patch: &Value) -> Result<(), request::Error> {
        let (api, params) = (self.claims(claim), patch_params());
        self.claim.change(api.patch(&claim.name, &params, &Patch::Merge(patch))).await.map(drop)
    }

    pub async fn delete_claim(
        &self,
        claim: &ObjectKey,
        uid: &str,
        version: &str,
    ) -> Result<(), request::Error> {
        let (api, params) = (self.dynamic_claims(claim), unchanged(uid, version));
        self.claim.change(api.delete(&claim.name, &params)).await?;
        info!(%claim, "deleted an IPAMClaim");
        Ok(())
    }

    /// Replaces the status. Returns the claim as it is stored.
    pub async fn write_claim_status(
        &self,
        claim: &ClaimState,
        status: &IPAMClaimStatus,
    ) -> Result<Option<ClaimState>, request::Error> {
        let IPAMClaimStatus { ips, owner_pod, conditions } = status;
        let mut fields = json!({"ips": ips});
        // A field that the CRD prunes is not written, so that the answer differs only where something changed.
        if *owner_pod != claim.status.owner_pod {
            fields["ownerPod"] = json!(owner_pod);
        }
        if *conditions != claim.status.conditions {
            fields["conditions"] = json!(conditions);
        }
        let patch =
            json!({"metadata": {"uid": claim.uid, "resourceVersion": claim.version}, "status": fields});
        let (api, params) = (self.claims(&claim.key), patch_params());
        let patch = Patch::Merge(&patch);
        let write = api.patch_status(&claim.key.name, &params, &patch);
        Ok(project::claim(self.claim_status.change(write).await?))
    }

    /// Writes the status of a block. Returns the block as it is stored.
    pub async fn write_block(&self, write: &BlockWrite) -> Result<Option<BlockState>, request::Error> {
        let patch = json!({
            "metadata": {"uid": write.uid, "resourceVersion": write.version},
            "status": status_fields(&write.status),
        });
        let (api, params) = (self.blocks(), patch_params());
        let written =
            self.block.change(api.patch_status(&write.name, &params, &Patch::Merge(&patch))).await?;
        Ok(cache_project::block(written).map(|(_, block)| block))
    }

    /// Whether the API server stores reservations, by a dry run that adds one to a block without any.
    pub async fn stores_claims(&self, name: &str, block: &BlockState) -> Result<bool, request::Error> {
        let probe = ClaimedAddress {
            address: block.object.spec.cidr.addr(),
            claim: "dry/run".to_owned(),
            uid: "dry-run".to_owned(),
        };
        let patch = json!({
            "metadata": {"uid": block.object.uid, "resourceVersion": block.version},
            "status": {"claims": [probe]},
        });
        let (api, params) = (self.blocks(), PatchParams { dry_run: true, ..patch_params() });
        let patched = self.block.change(api.patch_status(name, &params, &Patch::Merge(&patch))).await?;
        let block = cache_project::block(patched);
        Ok(block.is_some_and(|(_, block)| !block.object.status.claims.is_empty()))
    }

    /// Acquires a block, or asks to borrow an address. Returns its name and the block.
    pub async fn create_block(
        &self,
        network: &str,
        network_uid: &str,
        create: &BlockCreate,
    ) -> Result<Option<(String, BlockState)>, request::Error> {
        let name = ipblock::name(network, create.range);
        let spec = IPBlockSpec {
            network: network.to_owned(),
            network_uid: network_uid.to_owned(),
            cidr: create.range,
            holder: HolderRef::claims(),
            lender: create.lender.clone(),
            boot_id: String::new(),
        };
        let mut labels = json!({
            NETWORK_LABEL: network,
            format!("{NODE_ROLE_LABEL_PREFIX}{CLAIMS_HOLDER_UID}"): HOLDER_ROLE,
        });
        if let Some(lender) = &create.lender {
            labels[format!("{NODE_ROLE_LABEL_PREFIX}{}", lender.uid)] = json!(LENDER_ROLE);
            labels[BORROWED_LABEL] = json!("true");
        }
        let object = json!({
            "apiVersion": format!("{}/{}", api::GROUP, api::VERSION),
            "kind": "IPBlock",
            "metadata": {"name": name, "labels": labels},
            "spec": spec,
        });
        let object = serde_json::from_value(object).map_err(kube::Error::SerdeError);
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &cache_project::blocks());
        let params = post_params();
        let created = self.block.create(async { api.create(&params, &object?).await }).await?;
        info!(block = name, lender = ?create.lender.as_ref().map(|lender| &lender.node), "acquired a block for IPAMClaims");
        let object = serde_json::to_value(&created).and_then(serde_json::from_value::<BlockObject>).ok();
        Ok(object.and_then(cache_project::block))
    }

    pub async fn delete_block(&self, delete: &BlockDelete) -> Result<(), request::Error> {
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &cache_project::blocks());
        self.block.change(api.delete(&delete.name, &unchanged(&delete.uid, &delete.version))).await?;
        info!(block = delete.name, why = ?delete.why, "released a block of IPAMClaims");
        Ok(())
    }

    fn claims(&self, key: &ObjectKey) -> Api<ClaimObject> {
        Api::namespaced_with(self.client.clone(), &key.namespace, &project::claims())
    }

    fn dynamic_claims(&self, key: &ObjectKey) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), &key.namespace, &project::claims())
    }

    fn blocks(&self) -> Api<BlockObject> {
        Api::all_with(self.client.clone(), &cache_project::blocks())
    }
}

fn claim_state(object: &DynamicObject) -> Option<ClaimState> {
    let object = serde_json::to_value(object).and_then(serde_json::from_value::<ClaimObject>).ok()?;
    project::claim(object)
}
