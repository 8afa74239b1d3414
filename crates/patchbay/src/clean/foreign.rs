//! Which objects are foreign, and who manages them. Pure: objects of the API server in, a list out.

use std::fmt;

use api::networkservice::{MANAGED_BY_LABEL, SERVICE_NETWORK_ANNOTATION, SLICE_MANAGER};
use k8s_openapi::{
    api::{
        core::v1::{Endpoints, Service},
        discovery::v1::EndpointSlice,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

/// The label that names the manager of an Endpoints object.
const ENDPOINTS_MANAGER_LABEL: &str = "endpoints.kubernetes.io/managed-by";

/// An object that adds endpoints to a Service and is not Patchbay's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignObject {
    pub kind: ForeignKind,
    pub name: String,
    pub uid: String,
    pub resource_version: String,
    manager: String,
    addresses: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForeignKind {
    Endpoints,
    EndpointSlice,
}

impl fmt::Display for ForeignObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            ForeignKind::Endpoints => "endpoints",
            ForeignKind::EndpointSlice => "endpointslice",
        };
        write!(f, "{kind}/{}", self.name)
    }
}

impl ForeignObject {
    /// `None` if the slice is Patchbay's own.
    pub fn from_slice(slice: &EndpointSlice) -> Option<Self> {
        let manager = label(&slice.metadata, MANAGED_BY_LABEL);
        if manager == Some(SLICE_MANAGER) {
            return None;
        }
        let addresses = slice.endpoints.iter().map(|endpoint| endpoint.addresses.len()).sum();
        Some(Self::new(ForeignKind::EndpointSlice, &slice.metadata, manager, addresses))
    }

    /// Patchbay has no Endpoints objects.
    pub fn from_endpoints(endpoints: &Endpoints) -> Self {
        let subsets = endpoints.subsets.iter().flatten();
        let count = |list: &Option<Vec<_>>| list.as_ref().map_or(0, Vec::len);
        let addresses = subsets.map(|one| count(&one.addresses) + count(&one.not_ready_addresses)).sum();
        let manager = label(&endpoints.metadata, ENDPOINTS_MANAGER_LABEL);
        Self::new(ForeignKind::Endpoints, &endpoints.metadata, manager, addresses)
    }

    fn new(kind: ForeignKind, metadata: &ObjectMeta, manager: Option<&str>, addresses: usize) -> Self {
        Self {
            kind,
            name: metadata.name.clone().unwrap_or_default(),
            uid: metadata.uid.clone().unwrap_or_default(),
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
            manager: manager.map_or_else(|| writers(metadata), str::to_owned),
            addresses,
        }
    }
}

fn label<'a>(metadata: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    metadata.labels.as_ref()?.get(key).map(String::as_str).filter(|value| !value.is_empty())
}

/// The programs that wrote an object without a manager label.
fn writers(metadata: &ObjectMeta) -> String {
    let mut names: Vec<&str> = Vec::new();
    for manager in metadata.managed_fields.iter().flatten().filter_map(|entry| entry.manager.as_deref()) {
        if !names.contains(&manager) {
            names.push(manager);
        }
    }
    if names.is_empty() { "unknown".to_owned() } else { format!("none, written by {}", names.join(", ")) }
}

/// Fails if other controllers rightly publish endpoints for the Service. `owner` is the UID of its NetworkService; without
/// one, the Service must be annotated for Patchbay. Endpoints without a Service may be in use: volumes of GlusterFS name an
/// Endpoints object.
pub fn check_service(service: Option<&Service>, owner: Option<&str>) -> Result<(), &'static str> {
    let Some(service) = service else {
        return Err(match owner {
            Some(_) => {
                "does not exist, so the endpoints of this name may be in use without it; wait until the controller has \
                 created the Service, or read the condition Ready of the NetworkService"
            }
            None => "does not exist; set --namespace if it is in another namespace",
        });
    };
    let metadata = &service.metadata;
    let selects = service.spec.as_ref().and_then(|spec| spec.selector.as_ref());
    let controller =
        metadata.owner_references.iter().flatten().find(|reference| reference.controller == Some(true));
    match owner {
        Some(uid) if controller.is_none_or(|reference| reference.uid != uid) => Err(
            "is not controlled by this NetworkService, so its endpoints may be in use; delete the Service, or let the \
             NetworkService adopt it with annotation patchbay.dev/adopt",
        ),
        None if !metadata.annotations.iter().flatten().any(|(key, _)| key == SERVICE_NETWORK_ANNOTATION) => {
            Err("has no annotation patchbay.dev/service-network, so its endpoints may be in use")
        }
        _ if selects.is_some_and(|selector| !selector.is_empty()) => Err(
            "has a selector, so kube-controller-manager would create its EndpointSlices again; remove spec.selector first",
        ),
        _ if !is_headless(service) => Err(
            "is not headless, so Patchbay publishes nothing for it and its endpoints may be in use; create it again with \
             spec.clusterIP: None first",
        ),
        _ => Ok(()),
    }
}

fn is_headless(service: &Service) -> bool {
    let spec = service.spec.clone().unwrap_or_default();
    spec.type_.as_deref().unwrap_or("ClusterIP") == "ClusterIP" && spec.cluster_ip.as_deref() == Some("None")
}

/// A table in the style of kubectl.
pub fn table(found: &[ForeignObject]) -> String {
    let rows: Vec<[String; 3]> = found
        .iter()
        .map(|object| [object.to_string(), object.addresses.to_string(), object.manager.clone()])
        .collect();
    super::table::table(["OBJECT", "ADDRESSES", "MANAGER"], &rows)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn slice(labels: Value) -> EndpointSlice {
        serde_json::from_value(json!({
            "metadata": {"name": "web-1", "uid": "u", "resourceVersion": "7", "labels": labels,
                "managedFields": [{"manager": "kubectl"}, {"manager": "helm"}, {"manager": "kubectl"}]},
            "addressType": "IPv4",
            "endpoints": [{"addresses": ["10.0.0.1"]}, {"addresses": ["10.0.0.2", "10.0.0.3"]}],
        }))
        .unwrap()
    }

    fn service(extra: Value) -> Service {
        serde_json::from_value(extra).unwrap()
    }

    #[test]
    fn slices_of_every_other_manager_are_foreign() {
        let managed = |manager: &str| ForeignObject::from_slice(&slice(json!({MANAGED_BY_LABEL: manager})));
        assert_eq!(managed("networkservice.patchbay.dev"), None);
        let found = managed("endpointslice-controller.k8s.io").unwrap();
        assert_eq!(found.to_string(), "endpointslice/web-1");
        assert_eq!((found.uid.as_str(), found.resource_version.as_str(), found.addresses), ("u", "7", 3));
        assert_eq!(found.manager, "endpointslice-controller.k8s.io");
        for labels in [json!({}), json!({MANAGED_BY_LABEL: ""}), Value::Null] {
            let found = ForeignObject::from_slice(&slice(labels)).unwrap();
            assert_eq!(found.manager, "none, written by kubectl, helm");
        }
    }

    #[test]
    fn addresses_of_endpoints_are_counted_in_all_subsets() {
        let endpoints: Endpoints = serde_json::from_value(json!({
            "metadata": {"name": "web", "uid": "u", "resourceVersion": "7"},
            "subsets": [{"addresses": [{"ip": "10.0.0.1"}], "notReadyAddresses": [{"ip": "10.0.0.2"}]}, {}],
        }))
        .unwrap();
        let found = ForeignObject::from_endpoints(&endpoints);
        assert_eq!((found.addresses, found.manager.as_str()), (2, "unknown"));
        let text = table(&[found, ForeignObject::from_slice(&slice(json!({}))).unwrap()]);
        let expected = "\
OBJECT                ADDRESSES   MANAGER
endpoints/web         2           unknown
endpointslice/web-1   3           none, written by kubectl, helm
";
        assert_eq!(text, expected);
    }

    #[test]
    fn endpoints_without_a_service_are_not_deleted() {
        assert!(check_service(None, Some("u")).unwrap_err().contains("may be in use without it"));
        assert!(check_service(None, None).unwrap_err().contains("set --namespace"));
    }

    #[test]
    fn endpoints_of_a_service_that_is_not_ours_are_not_deleted() {
        let headless = json!({"clusterIP": "None"});
        let owned = |uid: &str, controller: bool| {
            json!({"spec": headless, "metadata": {"ownerReferences": [
                {"apiVersion": "patchbay.dev/v1alpha1", "kind": "NetworkService", "name": "web", "uid": uid, "controller": controller},
            ]}})
        };
        assert_eq!(check_service(Some(&service(owned("u", true))), Some("u")), Ok(()));
        for other in [owned("x", true), owned("u", false), json!({})] {
            assert!(
                check_service(Some(&service(other)), Some("u")).unwrap_err().contains("not controlled by")
            );
        }
        let annotated =
            json!({"spec": headless, "metadata": {"annotations": {"patchbay.dev/service-network": "core"}}});
        assert_eq!(check_service(Some(&service(annotated.clone())), None), Ok(()));
        assert!(check_service(Some(&service(json!({}))), None).unwrap_err().contains("no annotation"));
        for (mut selecting, owner) in [(owned("u", true), Some("u")), (annotated, None)] {
            selecting["spec"] = json!({"selector": {"app": "web"}});
            assert!(
                check_service(Some(&service(selecting.clone())), owner)
                    .unwrap_err()
                    .contains("has a selector")
            );
            for spec in [json!({"clusterIP": "10.96.0.9"}), json!({"type": "ExternalName"})] {
                selecting["spec"] = spec;
                assert!(
                    check_service(Some(&service(selecting.clone())), owner)
                        .unwrap_err()
                        .contains("not headless")
                );
            }
        }
    }
}
