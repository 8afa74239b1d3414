//! Applies the plans of services. Every write carries the UID and the resourceVersion of what was read, or creates an object,
//! so a former leader cannot overwrite anything.

use std::sync::Arc;

use api::{CONTROLLER_FIELD_MANAGER, NetworkServiceStatus};
use client::{
    decode::MetadataObject,
    fence::now,
    request::{self, ApiCall},
};
use futures::{FutureExt as _, StreamExt as _, future::BoxFuture, stream};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{
    Api, Client, Resource as _,
    api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions},
    core::Request,
};
use plan::services::{SliceContent, SliceOwner, SlicePlan, SliceTarget};
use serde_json::{Value, json};
use tracing::info;

use super::{ServiceKey, slice_object::slice_object};
use crate::{
    cache::{
        ClusterCache,
        services::{ObservedNetworkService, project},
    },
    leader::LeaderContext,
    metrics::{ApiCallKind, Metrics, SliceVerb},
};

/// The number of slices of one service that are written at a time.
const MAX_CONCURRENT_SLICES: usize = 8;

/// Why a write failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("write the Service")]
    Service(#[source] request::Error),
    #[error("write an EndpointSlice")]
    Slice(#[source] request::Error),
    #[error("write the status")]
    Status(#[source] request::Error),
    #[error("the API server drops fields of the status; apply the CustomResourceDefinitions of this version")]
    StatusDropped,
}

impl Error {
    fn request(&self) -> Option<&request::Error> {
        match self {
            Self::Service(error) | Self::Slice(error) | Self::Status(error) => Some(error),
            Self::StatusDropped => None,
        }
    }

    /// Whether another writer was first.
    pub fn is_conflict(&self) -> bool {
        self.request().is_some_and(request::Error::is_conflict)
    }

    /// Whether the object was not created because its namespace is being deleted, or because it does not exist any more
    /// (R35).
    pub fn is_namespace_gone(&self) -> bool {
        let Some(status) = self.request().and_then(request::Error::status) else { return false };
        let causes = status.details.iter().flat_map(|details| &details.causes);
        causes.into_iter().any(|cause| cause.reason == "NamespaceTerminating") || status.is_not_found()
    }
}

/// Applies plans of services, while this replica leads.
pub struct ServiceWriter {
    client: Client,
    cache: ClusterCache,
    metrics: Arc<Metrics>,
    service: ApiCall,
    slice: ApiCall,
    network_service: ApiCall,
}

fn post_params() -> PostParams {
    PostParams { field_manager: Some(CONTROLLER_FIELD_MANAGER.to_owned()), ..PostParams::default() }
}

fn patch_params() -> PatchParams {
    PatchParams { field_manager: Some(CONTROLLER_FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

fn unchanged(uid: &str, resource_version: &str) -> DeleteParams {
    let (uid, resource_version) = (Some(uid.to_owned()), Some(resource_version.to_owned()));
    DeleteParams::background().preconditions(Preconditions { uid, resource_version })
}

impl ServiceWriter {
    pub fn new(context: &LeaderContext) -> Self {
        let LeaderContext { client, cache, metrics, fence } = context;
        let fenced = |call| metrics.api_call(call).fenced(fence.clone());
        Self {
            service: fenced(ApiCallKind::Service),
            slice: fenced(ApiCallKind::Slice),
            network_service: fenced(ApiCallKind::NetworkService),
            client: client.clone(),
            cache: cache.clone(),
            metrics: metrics.clone(),
        }
    }

    pub async fn create_service(&self, key: &ServiceKey, object: Value) -> Result<(), Error> {
        let object = serde_json::from_value(object).map_err(kube::Error::SerdeError);
        let (api, params) = (self.services(key), post_params());
        let create = async { api.create(&params, &object?).await };
        self.service.create(create).await.map_err(Error::Service)?;
        info!(service = %key, "created a Service");
        Ok(())
    }

    pub async fn patch_service(&self, key: &ServiceKey, patch: &Value) -> Result<(), Error> {
        let (api, params) = (self.services(key), patch_params());
        let patched = self.service.change(api.patch(&key.name, &params, &Patch::Merge(patch))).await;
        patched.map_err(Error::Service)?;
        info!(service = %key, "patched a Service");
        Ok(())
    }

    pub async fn delete_service(
        &self,
        key: &ServiceKey,
        uid: &str,
        resource_version: &str,
    ) -> Result<(), Error> {
        let (api, params) = (self.services(key), unchanged(uid, resource_version));
        let deleted = self.service.change(api.delete(&key.name, &params)).await;
        deleted.map_err(Error::Service)?;
        info!(service = %key, "deleted a Service that has a cluster IP");
        Ok(())
    }

    /// Applies a plan: creates, then updates, then deletes, so that no endpoint is missing meanwhile (R21). A failed write
    /// does not stop the others of its kind, but no later step removes what it should have added.
    pub async fn apply_slices(
        &self,
        key: &ServiceKey,
        owner: Option<&SliceOwner>,
        plan: &SlicePlan,
    ) -> Result<(), Error> {
        let mut steps: [Vec<BoxFuture<'_, Result<(), Error>>>; 3] = [Vec::new(), Vec::new(), Vec::new()];
        if let Some(owner) = owner {
            for content in &plan.creates {
                steps[0].push(self.create_slice(key, owner, content).boxed());
            }
            for update in &plan.updates {
                steps[1].push(self.update_slice(key, owner, &update.content, &update.target).boxed());
            }
        }
        for target in &plan.deletes {
            steps[2].push(self.delete_slice(key, target).boxed());
        }
        for step in steps {
            all(step).await?;
        }
        Ok(())
    }

    async fn create_slice(
        &self,
        key: &ServiceKey,
        owner: &SliceOwner,
        content: &SliceContent,
    ) -> Result<(), Error> {
        let object = slice_object(&key.namespace, owner, content, None);
        let create = async {
            let body = serde_json::to_vec(&object).map_err(kube::Error::SerdeError)?;
            let request =
                slice_request(key).create(&post_params(), body).map_err(kube::Error::BuildRequest)?;
            self.client.request::<MetadataObject>(request).await
        };
        let created = self.slice.create(create).await.map_err(Error::Slice)?;
        self.expect(key, &created);
        self.metrics.slice_written(SliceVerb::Create);
        Ok(())
    }

    async fn update_slice(
        &self,
        key: &ServiceKey,
        owner: &SliceOwner,
        content: &SliceContent,
        target: &SliceTarget,
    ) -> Result<(), Error> {
        let object = slice_object(&key.namespace, owner, content, Some(target));
        let replace = async {
            let body = serde_json::to_vec(&object).map_err(kube::Error::SerdeError)?;
            let request = slice_request(key).replace(&target.name, &post_params(), body);
            self.client.request::<MetadataObject>(request.map_err(kube::Error::BuildRequest)?).await
        };
        let replaced = self.slice.change(replace).await.map_err(Error::Slice)?;
        self.expect(key, &replaced);
        self.metrics.slice_written(SliceVerb::Update);
        Ok(())
    }

    async fn delete_slice(&self, key: &ServiceKey, target: &SliceTarget) -> Result<(), Error> {
        let SliceTarget { name, uid, resource_version } = target;
        let api: Api<EndpointSlice> = Api::namespaced(self.client.clone(), &key.namespace);
        let deleted = self.slice.change(api.delete(name, &unchanged(uid, resource_version))).await;
        match deleted {
            // It is gone already: the watch delivers that.
            Err(error) if error.is_not_found() => Ok(()),
            deleted => {
                deleted.map_err(Error::Slice)?;
                self.cache.services().expect_slice_deletion(key, name, uid, now());
                self.metrics.slice_written(SliceVerb::Delete);
                Ok(())
            }
        }
    }

    /// The cache is stale until it shows this write (R31).
    fn expect(&self, key: &ServiceKey, written: &MetadataObject) {
        let metadata = &written.metadata;
        if let (Some(name), Some(uid)) = (&metadata.name, &metadata.uid) {
            let generation = metadata.generation.unwrap_or_default();
            self.cache.services().expect_slice(key, name, uid, generation, now());
        }
    }

    /// Replaces the whole status, which keeps the conditions of others.
    pub async fn write_status(
        &self,
        key: &ServiceKey,
        observed: &ObservedNetworkService,
        status: &NetworkServiceStatus,
    ) -> Result<(), Error> {
        let patch = json!([
            {"op": "test", "path": "/metadata/uid", "value": observed.uid},
            {"op": "replace", "path": "/metadata/resourceVersion", "value": observed.resource_version},
            {"op": "add", "path": "/status", "value": status},
        ]);
        let patch = serde_json::from_value(patch).map_err(kube::Error::SerdeError);
        let resource = project::network_services();
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &key.namespace, &resource);
        let params = patch_params();
        let write = async { api.patch_status(&key.name, &params, &Patch::Json::<()>(patch?)).await };
        let patched = self.network_service.change(write).await.map_err(Error::Status)?;
        if patched.metadata.resource_version.as_ref() == Some(&observed.resource_version) {
            return Err(Error::StatusDropped);
        }
        Ok(())
    }

    fn services(&self, key: &ServiceKey) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), &key.namespace, &project::services())
    }
}

/// Only the metadata of the response are decoded.
fn slice_request(key: &ServiceKey) -> Request {
    Request::new(EndpointSlice::url_path(&(), Some(&key.namespace)))
}

/// Waits for all writes. Returns the first error, a conflict only if there is no other.
async fn all(writes: Vec<BoxFuture<'_, Result<(), Error>>>) -> Result<(), Error> {
    let results: Vec<Result<(), Error>> =
        stream::iter(writes).buffer_unordered(MAX_CONCURRENT_SLICES).collect().await;
    let errors = results.into_iter().filter_map(Result::err);
    errors.min_by_key(Error::is_conflict).map_or(Ok(()), Err)
}
