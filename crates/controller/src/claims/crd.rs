//! The CRD of IPAMClaim. Other projects ship it too, so it is created only if it is absent, and never changed.

use std::sync::{Arc, Mutex};

use api::{
    CONTROLLER_FIELD_MANAGER, ErrorChain,
    ipamclaim::{self, CRD_NAME},
};
use client::{
    request::{self, ApiCall},
    retry::Backoff,
};
use futures::{StreamExt as _, stream::BoxStream};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{Api, api::PostParams};
use plan::claims::ClaimSchema;
use serde_json::Value;
use tokio::sync::watch;
use tracing::{info, warn};

use super::lock;
use crate::{leader::LeaderContext, metrics::ApiCallKind, watch::object_changes};

/// The version of the kind that is written.
const VERSION: &str = "v1alpha1";

/// Creates the CRD if it is absent, and reads which fields the stored one keeps.
pub struct CrdKeeper {
    api: Api<CustomResourceDefinition>,
    call: ApiCall,
    changes: Mutex<BoxStream<'static, ()>>,
    schema: Arc<Mutex<ClaimSchema>>,
    established: watch::Sender<bool>,
}

impl CrdKeeper {
    pub fn new(context: &LeaderContext, schema: Arc<Mutex<ClaimSchema>>) -> Self {
        let LeaderContext { client, metrics, fence, .. } = context;
        let api: Api<CustomResourceDefinition> = Api::all(client.clone());
        let changes = object_changes(api.clone(), CRD_NAME, metrics.clone(), ApiCallKind::Crd);
        Self {
            call: metrics.api_call(ApiCallKind::Crd).fenced(fence.clone()),
            changes: Mutex::new(changes),
            api,
            schema,
            established: watch::Sender::new(false),
        }
    }

    /// Resolves once the API server serves the kind and the schema was read.
    pub async fn established(&self) {
        // The sender lives as long as `self`.
        let _ = self.established.subscribe().wait_for(|established| *established).await;
    }

    /// Never returns.
    pub async fn run(&self) {
        let mut changes = std::mem::replace(&mut *lock(&self.changes), futures::stream::pending().boxed());
        let mut backoff = Backoff::default();
        loop {
            match self.ensure().await {
                Ok(stored) => {
                    backoff.reset();
                    *lock(&self.schema) = schema(&stored);
                    self.established.send_replace(is_established(&stored));
                    if changes.next().await.is_none() {
                        std::future::pending::<()>().await;
                    }
                }
                Err(error) => {
                    if !error.is_conflict() {
                        warn!(error = %ErrorChain(&error), "could not create the CRD of IPAMClaim, retrying");
                    }
                    tokio::time::sleep(backoff.next_delay()).await;
                }
            }
        }
    }

    async fn ensure(&self) -> Result<CustomResourceDefinition, request::Error> {
        if let Some(stored) = self.call.read(self.api.get_opt(CRD_NAME)).await? {
            return Ok(stored);
        }
        let params =
            PostParams { field_manager: Some(CONTROLLER_FIELD_MANAGER.to_owned()), ..PostParams::default() };
        match self.call.create(self.api.create(&params, &ipamclaim::crd())).await {
            Ok(created) => {
                info!("created the CRD of IPAMClaim");
                Ok(created)
            }
            // Another program was first: read what it created.
            Err(error) => Err(error),
        }
    }
}

/// Whether the API server serves the version that is written. A request before that fails with "not found".
fn is_established(crd: &CustomResourceDefinition) -> bool {
    let conditions = crd.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let mut established = conditions.filter(|one| one.type_ == "Established" && one.status == "True");
    let served = crd.spec.versions.iter().any(|version| version.name == VERSION && version.served);
    established.next().is_some() && served
}

/// The status fields that the API server keeps.
fn schema(crd: &CustomResourceDefinition) -> ClaimSchema {
    let crd = serde_json::to_value(crd).unwrap_or_default();
    let versions = crd["spec"]["versions"].as_array().map_or(&[][..], Vec::as_slice);
    let version = versions.iter().find(|version| version["name"] == VERSION);
    let Some(version) = version else { return ClaimSchema { conditions: false, owner_pod: false } };
    let root = &version["schema"]["openAPIV3Schema"];
    let keeps_all = |part: &Value| part["x-kubernetes-preserve-unknown-fields"] == true;
    let status = &root["properties"]["status"];
    let keeps = |field: &str| {
        keeps_all(root) && status.is_null() || keeps_all(status) || status["properties"][field].is_object()
    };
    ClaimSchema { conditions: keeps("conditions"), owner_pod: keeps("ownerPod") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_crd_is_established_once_the_api_server_serves_the_version() {
        let with = |conditions: Value, served: bool| {
            let mut crd = serde_json::to_value(ipamclaim::crd()).unwrap();
            crd["spec"]["versions"][0]["served"] = json!(served);
            crd["status"] = json!({"conditions": conditions});
            is_established(&serde_json::from_value(crd).unwrap())
        };
        let is = |kind: &str, status: &str| json!({"type": kind, "status": status});
        assert!(!is_established(&ipamclaim::crd()), "a new one has no status");
        assert!(with(json!([is("NamesAccepted", "True"), is("Established", "True")]), true));
        assert!(!with(json!([is("NamesAccepted", "True")]), true));
        assert!(!with(json!([is("Established", "False")]), true));
        assert!(!with(json!([is("Established", "True")]), false));
        // Its deletion waits for claims, whose finalizer the controller removes.
        assert!(with(json!([is("Established", "True"), is("Terminating", "True")]), true));
    }

    #[test]
    fn fields_that_an_older_crd_prunes_are_not_written() {
        assert_eq!(schema(&ipamclaim::crd()), ClaimSchema { conditions: true, owner_pod: true });
        let with_status = |status: Value| {
            let mut crd = serde_json::to_value(ipamclaim::crd()).unwrap();
            crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"] = status;
            schema(&serde_json::from_value(crd).unwrap())
        };
        let ips = json!({"type": "array", "items": {"type": "string"}});
        assert_eq!(
            with_status(json!({"type": "object", "properties": {"ips": ips}})),
            ClaimSchema { conditions: false, owner_pod: false }
        );
        let pod = json!({"type": "object"});
        assert_eq!(
            with_status(json!({"type": "object", "properties": {"ips": ips, "ownerPod": pod}})),
            ClaimSchema { conditions: false, owner_pod: true }
        );
        assert_eq!(
            with_status(json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true})),
            ClaimSchema { conditions: true, owner_pod: true }
        );
    }
}
