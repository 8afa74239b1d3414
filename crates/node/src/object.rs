//! The NodeNetwork in the API server: reading what stands there, and writing what should.

use std::time::Duration;

use api::{NODE_MANAGER, NodeNetwork, NodeNetworkStatus};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
};
use plan::nodenetwork::{Facts, Record, Writes};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::metrics::{Metrics, Outcome, Write, Written};

/// How long the API server may take for one write.
const LIMIT: Duration = Duration::from_secs(10);

/// Why a write did not go through.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("write NodeNetwork {name}: the API server gave no answer within {} s", LIMIT.as_secs())]
    Deadline { name: String },
    #[error("write NodeNetwork {name}")]
    Write { name: String, source: Box<kube::Error> },
}

impl Error {
    /// Whether the object is not there.
    pub fn is_missing(&self) -> bool {
        match self {
            Self::Write { source, .. } => {
                matches!(&**source, kube::Error::Api(status) if status.is_not_found())
            }
            Self::Deadline { .. } => false,
        }
    }
}

/// An object as the API server has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    uid: Option<String>,
    version: Option<u64>,
    pub record: Record,
}

impl Known {
    /// Reads any object, also one that somebody edited into something that is no NodeNetwork.
    pub fn read(object: &DynamicObject) -> Self {
        let status = object.data.get("status").and_then(|status| serde_json::from_value(status.clone()).ok());
        let nodes = object
            .owner_references()
            .iter()
            .filter(|owner| owner.kind == "Node" && owner.api_version == "v1");
        Self {
            uid: object.uid(),
            version: object.resource_version().and_then(|version| version.parse().ok()),
            record: Record { owners: nodes.map(|owner| owner.uid.clone()).collect(), status },
        }
    }

    /// Whether `other` is an earlier state of this object: the answer to a write overtakes the watch.
    pub fn is_newer_than(&self, other: &Self) -> bool {
        self.uid == other.uid && self.version.zip(other.version).is_some_and(|(own, other)| own > other)
    }

    /// Whether both are the same object in the sense of its UID.
    pub fn is_same_object(&self, other: &Self) -> bool {
        self.uid == other.uid
    }
}

/// What the Node says that matters here.
pub fn facts(node: &Node) -> Facts {
    let addresses = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    Facts {
        uid: node.uid().unwrap_or_default(),
        internal_ips: addresses
            .filter(|address| address.type_ == "InternalIP")
            .filter_map(|address| address.address.parse().ok())
            .collect(),
    }
}

/// The NodeNetwork of one node. Untyped, because what stands there may be anything.
pub struct Object {
    api: Api<DynamicObject>,
    kind: ApiResource,
    name: String,
    metrics: Metrics,
}

impl Object {
    pub fn new(client: Client, name: String, metrics: Metrics) -> Self {
        let kind = ApiResource::erase::<NodeNetwork>(&());
        Self { api: Api::all_with(client, &kind), kind, name, metrics }
    }

    pub fn api(&self) -> &Api<DynamicObject> {
        &self.api
    }

    /// Writes the parts that are asked for, and returns what the API server made of them.
    pub async fn write(
        &self,
        facts: &Facts,
        wanted: &NodeNetworkStatus,
        writes: Writes,
    ) -> Result<Option<Known>, Error> {
        let apply = PatchParams::apply(NODE_MANAGER).force();
        let mut known = None;
        if writes.object {
            let owner = json!({"apiVersion": "v1", "kind": "Node", "name": self.name, "uid": facts.uid});
            let body = self.body(json!({"name": self.name, "ownerReferences": [owner]}), None);
            let patch = Patch::Apply(body);
            known = Some(self.call(Written::Object, self.api.patch(&self.name, &apply, &patch)).await?);
        }
        if writes.status {
            let body = self.body(json!({"name": self.name}), Some(wanted));
            let patch = Patch::Apply(body);
            let now = self.call(Written::Status, self.api.patch_status(&self.name, &apply, &patch)).await?;
            // An apply leaves alone what another manager put into the status; all of it is ours.
            let foreign = now.record.status.as_ref() != Some(wanted);
            known = Some(if foreign { self.repair(wanted).await? } else { now });
        }
        Ok(known)
    }

    /// Sets the status to exactly what is wanted. After an apply this only removes, so it owns no field of its own that
    /// a later apply could not take away again.
    async fn repair(&self, wanted: &NodeNetworkStatus) -> Result<Known, Error> {
        let NodeNetworkStatus { vtep, interfaces, conditions } = wanted;
        let status = json!({"vtep": vtep, "interfaces": interfaces, "conditions": conditions});
        let patch = Patch::Merge(json!({"status": status}));
        let params = PatchParams { field_manager: Some(NODE_MANAGER.to_owned()), ..PatchParams::default() };
        self.call(Written::Repair, self.api.patch_status(&self.name, &params, &patch)).await
    }

    fn body(&self, metadata: Value, status: Option<&NodeNetworkStatus>) -> Value {
        let mut body =
            json!({"apiVersion": self.kind.api_version, "kind": self.kind.kind, "metadata": metadata});
        if let Some(status) = status {
            body["status"] = json!(status);
        }
        body
    }

    async fn call(
        &self,
        part: Written,
        call: impl Future<Output = kube::Result<DynamicObject>>,
    ) -> Result<Known, Error> {
        let name = || self.name.clone();
        let result = match timeout(LIMIT, call).await {
            Ok(Ok(object)) => Ok(Known::read(&object)),
            Ok(Err(source)) => Err(Error::Write { name: name(), source: Box::new(source) }),
            Err(_) => Err(Error::Deadline { name: name() }),
        };
        self.metrics.writes.get_or_create(&Write { part, result: Outcome::of(&result) }).inc();
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(value: Value) -> Known {
        Known::read(&serde_json::from_value(value).unwrap())
    }

    #[test]
    fn the_facts_of_a_node_are_its_uid_and_its_internal_ips_in_order() {
        let node: Node = serde_json::from_value(json!({
            "metadata": {"name": "a", "uid": "u"},
            "status": {"addresses": [
                {"type": "Hostname", "address": "10.0.0.9"},
                {"type": "InternalIP", "address": "fd00::1"},
                {"type": "InternalIP", "address": "nonsense"},
                {"type": "InternalIP", "address": "10.0.0.1"},
            ]},
        }))
        .unwrap();
        let internal_ips = vec!["fd00::1".parse().unwrap(), "10.0.0.1".parse().unwrap()];
        assert_eq!(facts(&node), Facts { uid: "u".to_owned(), internal_ips });
    }

    #[test]
    fn a_status_that_is_no_status_is_none() {
        let known = object(json!({
            "metadata": {"name": "a", "ownerReferences": [
                {"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "u"},
                {"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "p"},
            ]},
            "status": {"vtep": {"address": "nonsense"}},
        }));
        assert_eq!(known.record, Record { owners: vec!["u".to_owned()], status: None });
    }

    #[test]
    fn an_earlier_state_never_replaces_a_later_one_of_the_same_object() {
        let at =
            |uid: &str, version: &str| object(json!({"metadata": {"uid": uid, "resourceVersion": version}}));
        assert!(at("u", "10").is_newer_than(&at("u", "9")));
        assert!(!at("u", "10").is_newer_than(&at("u", "10")));
        assert!(!at("u", "9").is_newer_than(&at("u", "10")));
        assert!(!at("u", "10").is_newer_than(&at("v", "9")));
        assert!(!at("u", "what").is_newer_than(&at("u", "9")));
    }
}
