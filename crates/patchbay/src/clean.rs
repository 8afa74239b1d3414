//! `patchbay clean`: lists and deletes endpoints that other controllers or users left for a Service of Patchbay, and removes
//! the finalizer of IPAMClaims that no controller removes.
//!
//! DNS answers with the endpoints of all EndpointSlices of a Service, of every manager. After a selector is removed,
//! kube-controller-manager keeps the slices that it made for it (kubernetes/kubernetes#118376), so that the Service answers
//! with primary addresses too.

mod claims;
mod foreign;
mod table;

use anyhow::{Context as _, bail};
use api::{
    ErrorChain,
    networkservice::{NetworkService, SERVICE_NAME_LABEL},
};
use foreign::{ForeignKind, ForeignObject};
use k8s_openapi::api::{
    core::v1::{Endpoints, Service},
    discovery::v1::EndpointSlice,
};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, Preconditions},
};

use crate::{
    cli::{print, print_line},
    cluster::ClusterArgs,
};

/// Flags of `patchbay clean`.
#[derive(Debug, clap::Args)]
pub struct CleanArgs {
    /// The NetworkService, as nsvc/NAME, a Service annotated for Patchbay, as svc/NAME, or `ipamclaims`: those of all
    /// namespaces, or of that of --namespace
    #[arg(value_parser = target)]
    target: CleanTarget,

    /// Delete what is listed; with `ipamclaims`, remove the finalizer from claims that are being deleted or whose virtual
    /// machine is gone
    #[arg(long)]
    yes: bool,

    /// With `ipamclaims`: remove the finalizer from every claim, also of running virtual machines. Their addresses are then
    /// no longer protected
    #[arg(long)]
    all: bool,

    #[command(flatten)]
    cluster: ClusterArgs,
}

/// What is cleaned.
#[derive(Debug, Clone, PartialEq, Eq)]
enum CleanTarget {
    Endpoints(EndpointsTarget),
    IpamClaims,
}

/// Whose endpoints are cleaned.
#[derive(Debug, Clone, PartialEq, Eq)]
enum EndpointsTarget {
    NetworkService(String),
    Service(String),
}

impl EndpointsTarget {
    /// The name of the Service, which is that of its NetworkService.
    fn name(&self) -> &str {
        match self {
            Self::NetworkService(name) | Self::Service(name) => name,
        }
    }
}

const TARGETS: &str = "must be nsvc/NAME, svc/NAME or ipamclaims";

fn target(text: &str) -> Result<CleanTarget, &'static str> {
    let valid = |name: &str| {
        let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        (1..=63).contains(&name.len()) && name.chars().all(inner)
    };
    if matches!(text, "ipamclaims" | "ipamclaim" | "ipamclaims.k8s.cni.cncf.io") {
        return Ok(CleanTarget::IpamClaims);
    }
    let (kind, name) = text.split_once('/').ok_or(TARGETS)?;
    match kind {
        _ if !valid(name) => Err("must be nsvc/NAME or svc/NAME, with the name of a Service"),
        "nsvc" | "networkservice" | "networkservices" | "networkservice.patchbay.dev" => {
            Ok(CleanTarget::Endpoints(EndpointsTarget::NetworkService(name.to_owned())))
        }
        "svc" | "service" | "services" => {
            Ok(CleanTarget::Endpoints(EndpointsTarget::Service(name.to_owned())))
        }
        _ => Err(TARGETS),
    }
}

/// Lists what is left over, and removes it if the user asks for it.
pub async fn clean(args: CleanArgs) -> anyhow::Result<()> {
    let CleanArgs { target, yes, all, cluster } = args;
    let target = match target {
        CleanTarget::IpamClaims => {
            let namespace = cluster.namespace().map(str::to_owned);
            let (client, _) = cluster.connect().await?;
            return claims::clean(client, namespace.as_deref(), yes, all).await;
        }
        CleanTarget::Endpoints(_) if all => bail!("--all is only for `patchbay clean ipamclaims`"),
        CleanTarget::Endpoints(target) => target,
    };
    let (client, namespace) = cluster.connect().await?;
    let session = Session { client, namespace, name: target.name().to_owned() };
    session.check_ours(&target).await?;
    let found = session.foreign_objects().await?;
    if found.is_empty() {
        return print(&format!("Service {} has no foreign endpoints\n", session.path()));
    }
    print(&foreign::table(&found))?;
    if !yes {
        return print("Nothing was deleted. Repeat the command with --yes to delete these objects.\n");
    }
    session.delete(&found).await
}

struct Session {
    client: Client,
    namespace: String,
    name: String,
}

impl Session {
    fn path(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Fails if the endpoints of other managers are the ones that the Service is meant to have.
    async fn check_ours(&self, target: &EndpointsTarget) -> anyhow::Result<()> {
        let services: Api<Service> = Api::namespaced(self.client.clone(), &self.namespace);
        let path = self.path();
        let service = services.get_opt(&self.name).await.with_context(|| format!("read Service {path}"))?;
        let owner = match target {
            EndpointsTarget::NetworkService(_) => Some(self.network_service_uid().await?),
            EndpointsTarget::Service(_) => None,
        };
        foreign::check_service(service.as_ref(), owner.as_deref())
            .map_err(|cause| anyhow::Error::msg(format!("Service {path} {cause}")))
    }

    async fn network_service_uid(&self) -> anyhow::Result<String> {
        let services: Api<NetworkService> = Api::namespaced(self.client.clone(), &self.namespace);
        let path = self.path();
        let found = services.get_metadata_opt(&self.name).await;
        let Some(found) = found.with_context(|| format!("read NetworkService {path}"))? else {
            bail!("NetworkService {path} does not exist; set --namespace if it is in another namespace")
        };
        found.metadata.uid.with_context(|| format!("NetworkService {path} has no UID"))
    }

    fn slices(&self) -> Api<EndpointSlice> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn endpoints(&self) -> Api<Endpoints> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// The Endpoints object first: while it exists, kube-controller-manager copies it to EndpointSlices.
    async fn foreign_objects(&self) -> anyhow::Result<Vec<ForeignObject>> {
        let path = self.path();
        let endpoints = self.endpoints().get_opt(&self.name).await;
        let endpoints = endpoints.with_context(|| format!("read Endpoints {path}"))?;
        let selector = format!("{SERVICE_NAME_LABEL}={}", self.name);
        let slices = self.slices().list(&ListParams::default().labels(&selector)).await;
        let slices = slices.with_context(|| format!("list the EndpointSlices of Service {path}"))?;
        let mut found: Vec<ForeignObject> = endpoints.iter().map(ForeignObject::from_endpoints).collect();
        found.extend(slices.items.iter().filter_map(ForeignObject::from_slice));
        Ok(found)
    }

    /// Deletes each object, unless it changed after it was listed. One that cannot be deleted does not stop the others.
    async fn delete(&self, found: &[ForeignObject]) -> anyhow::Result<()> {
        let mut failed = 0;
        for object in found {
            let params = delete_params(object);
            let outcome = match object.kind {
                ForeignKind::Endpoints => self.endpoints().delete(&object.name, &params).await.map(drop),
                ForeignKind::EndpointSlice => self.slices().delete(&object.name, &params).await.map(drop),
            };
            let line = match outcome {
                Ok(()) => format!("{object} deleted"),
                // kube-controller-manager deletes the slices that it copied from Endpoints.
                Err(kube::Error::Api(status)) if status.code == 404 => format!("{object} is gone"),
                Err(kube::Error::Api(status)) if status.code == 409 => {
                    failed += 1;
                    format!("{object} was not deleted: it changed after it was listed")
                }
                Err(error) => {
                    failed += 1;
                    format!("{object} was not deleted: {}", ErrorChain(&error))
                }
            };
            print_line(&line)?;
        }
        if failed > 0 {
            bail!("{failed} of {} objects were not deleted", found.len());
        }
        Ok(())
    }
}

/// Deletes an object only as it was listed: the API server rejects the request if the object was changed or created again.
fn delete_params(object: &ForeignObject) -> DeleteParams {
    let preconditions = Preconditions {
        uid: Some(object.uid.clone()),
        resource_version: Some(object.resource_version.clone()),
    };
    DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn an_object_that_changed_after_it_was_listed_is_not_deleted() {
        let metadata = json!({"name": "web-1", "uid": "u", "resourceVersion": "7"});
        let slice = json!({"metadata": metadata, "addressType": "IPv4", "endpoints": []});
        let slice: EndpointSlice = serde_json::from_value(slice).unwrap();
        let endpoints: Endpoints = serde_json::from_value(json!({"metadata": metadata})).unwrap();
        let found = [ForeignObject::from_slice(&slice).unwrap(), ForeignObject::from_endpoints(&endpoints)];
        for object in found {
            let request = kube::core::Request::new("/objects").delete("web-1", &delete_params(&object));
            let body: Value = serde_json::from_slice(request.unwrap().body()).unwrap();
            assert_eq!(body["preconditions"], json!({"uid": "u", "resourceVersion": "7"}), "{object}");
        }
    }

    #[test]
    fn the_target_names_its_kind() {
        let service = Ok(CleanTarget::Endpoints(EndpointsTarget::NetworkService("web".into())));
        assert_eq!(target("nsvc/web"), service);
        assert_eq!(target("networkservice.patchbay.dev/web"), service);
        assert_eq!(target("svc/web"), Ok(CleanTarget::Endpoints(EndpointsTarget::Service("web".into()))));
        assert_eq!(target("ipamclaims"), Ok(CleanTarget::IpamClaims));
        for text in
            ["web", "", "nsvc/", "pod/web", "nsvc/a/b", "nsvc/A", "nsvc/..", "svc/a,b=c", "ipamclaims/a"]
        {
            assert!(target(text).is_err(), "{text}");
        }
    }
}
