//! A NetworkService in the cache.

use std::collections::BTreeMap;

use api::NetworkServiceStatus;
use client::decode::{Lenient, Object};
use plan::services::{ObservedService, ServiceSpec};

use super::project::NetworkServiceObject;
use crate::services::ServiceKey;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedNetworkService {
    pub uid: String,
    pub resource_version: String,
    pub generation: i64,
    pub deleting: bool,
    pub labels: BTreeMap<String, String>,
    /// An error says why the spec cannot be used.
    pub spec: Result<ServiceSpec, String>,
    pub status: NetworkServiceStatus,
}

impl ObservedNetworkService {
    pub fn new(object: NetworkServiceObject) -> Option<(ServiceKey, Self)> {
        let Object { metadata, spec, status, .. } = object;
        let key = ServiceKey::new(metadata.namespace.as_deref()?, metadata.name.as_deref()?);
        let spec =
            spec.0.and_then(|spec| ServiceSpec::from_network_service(&key.namespace, &key.name, &spec));
        let observed = Self {
            uid: metadata.uid?,
            resource_version: metadata.resource_version?,
            generation: metadata.generation.unwrap_or_default(),
            deleting: metadata.deletion_timestamp.is_some(),
            labels: metadata.labels.unwrap_or_default(),
            spec,
            status: status.map(Lenient::or_default).unwrap_or_default(),
        };
        Some((key, observed))
    }

    /// Whether it controls the Service of its name.
    pub fn controls(&self, service: Option<&ObservedService>) -> bool {
        service.is_some_and(|service| {
            service.owners.iter().any(|owner| owner.uid == self.uid && owner.controller == Some(true))
        })
    }

    /// Whether nothing changed that a reconcile reads, except the status.
    pub fn has_same_desired_state(&self, other: &Self) -> bool {
        let Self { uid, resource_version: _, generation, deleting, labels, spec, status: _ } = self;
        *uid == other.uid
            && *generation == other.generation
            && *deleting == other.deleting
            && *labels == other.labels
            && *spec == other.spec
    }
}
