//! EndpointSlices as they are observed and as they are written.

use std::{collections::BTreeMap, sync::Arc};

use api::networkservice::{HEADLESS_LABEL, MANAGED_BY_LABEL, SERVICE_NAME_LABEL, SLICE_MANAGER};
use jiff::Timestamp;

use super::{Endpoint, EndpointPorts, Families, Family, Labels};

/// The maximum number of endpoints of a slice (R18).
pub const MAX_ENDPOINTS: usize = 100;

/// An EndpointSlice in the cache, managed by Patchbay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedSlice {
    pub name: Arc<str>,
    pub uid: Arc<str>,
    pub resource_version: Arc<str>,
    pub generation: i64,
    /// Whether the slice has a deletion timestamp. It counts as gone.
    pub deleting: bool,
    pub labels: Arc<Labels>,
    /// The annotation `patchbay.dev/service-network`.
    pub network: Option<Arc<str>>,
    /// The UID of the owner reference that is a controlling Service with `blockOwnerDeletion`; `None` if no reference is.
    pub owner: Option<Arc<str>>,
    /// `None` if it is neither IPv4 nor IPv6.
    pub family: Option<Family>,
    /// `None` if a port has a form that Patchbay does not write.
    pub ports: Option<EndpointPorts>,
    pub endpoints: Vec<ObservedEndpoint>,
}

/// An endpoint of an observed slice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ObservedEndpoint {
    Known(Endpoint),
    /// An endpoint of a form that Patchbay does not write: several addresses, another target, hints or topology that do not
    /// follow from it, an absent condition. The slice is written again.
    Altered,
}

/// The Service that owns slices, and what all of them share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceOwner {
    pub service: Arc<str>,
    pub uid: Arc<str>,
    /// The creation time of the Service.
    pub created: Timestamp,
    /// Whether the Service is being deleted: no slice is created then (R35).
    pub deleting: bool,
    /// Whether the Service has no cluster IP (R6).
    pub headless: bool,
    /// The families of the Service (R12).
    pub families: Families,
    /// The labels of the Service, which the slices copy (R5).
    pub labels: BTreeMap<String, String>,
    /// `namespace/name` of the NAD.
    pub network: Arc<str>,
}

/// The content of a slice that is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceContent {
    pub family: Family,
    /// All labels of the slice.
    pub labels: Arc<Labels>,
    /// The annotation `patchbay.dev/service-network`.
    pub network: Arc<str>,
    /// The trigger time annotation (R33); absent if no readiness of a pod caused the write. Written as RFC 3339 by `Display`.
    pub trigger_time: Option<Timestamp>,
    pub ports: EndpointPorts,
    pub endpoints: Vec<Endpoint>,
}

/// The slice that a write or deletion is for. Both carry UID and resource version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceTarget {
    pub name: Arc<str>,
    pub uid: Arc<str>,
    pub resource_version: Arc<str>,
}

/// A slice that gets another content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceUpdate {
    pub target: SliceTarget,
    pub content: SliceContent,
}

impl SliceOwner {
    /// The labels of every slice: those of the Service, except the reserved ones, and the three of R1, R2 and R6.
    pub fn slice_labels(&self) -> Labels {
        const RESERVED: [&str; 3] = [SERVICE_NAME_LABEL, MANAGED_BY_LABEL, HEADLESS_LABEL];
        let copied = self.labels.iter().filter(|(key, _)| !RESERVED.contains(&key.as_str()));
        let copied = copied.map(|(key, value)| (key.as_str(), value.as_str()));
        let headless = self.headless.then_some((HEADLESS_LABEL, ""));
        let own = [(SERVICE_NAME_LABEL, &*self.service), (MANAGED_BY_LABEL, SLICE_MANAGER)];
        Labels::new(copied.chain(own).chain(headless))
    }

    /// `generateName` of a slice (R4). The name of a Service is a DNS label, so the prefix is always valid.
    pub fn generate_name(&self) -> String {
        format!("{}-", self.service)
    }
}

impl ObservedSlice {
    pub fn target(&self) -> SliceTarget {
        SliceTarget {
            name: self.name.clone(),
            uid: self.uid.clone(),
            resource_version: self.resource_version.clone(),
        }
    }
}
