//! The NodeNetwork object of this node at the API server: parsing it and writing it.

use std::time::Duration;

use api::{NODE_FIELD_MANAGER, NodeNetwork, NodeNetworkStatus};
use client::{
    decode::{Ignored, Object, Unparsed},
    request::{self, ApiCall},
};
use k8s_openapi::{api::core::v1::Node, apimachinery::pkg::apis::meta::v1::OwnerReference};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, Patch, PatchParams},
};
use plan::{
    bridge::Peer,
    nodenetwork::{NodeInfo, Owner, PublishedState, WriteParts},
};
use serde_json::{Value, json};

use crate::{
    metrics::{Metrics, ResultLabel, WriteKind, WriteLabels},
    network::{self, SharedUids},
};

/// Bounds one write.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a write failed.
#[derive(Debug, thiserror::Error)]
#[error("write NodeNetwork {name}")]
pub struct Error {
    pub name: String,
    pub source: request::Error,
}

impl Error {
    /// Whether the object does not exist.
    pub fn is_missing(&self) -> bool {
        self.source.is_not_found()
    }

    /// Whether another client changed the object first: read it again.
    pub fn is_conflict(&self) -> bool {
        self.source.is_conflict() && !self.is_missing()
    }
}

/// A NodeNetwork of which nothing is parsed: the stored status may be invalid.
pub type NodeNetworkObject = Object<Ignored, Unparsed>;

/// A NodeNetwork as this daemon uses it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WatchedNodeNetwork {
    Own(ServerObject),
    Peer(Peer),
}

impl WatchedNodeNetwork {
    /// Parses the NodeNetwork of the node `own` completely, and those of others only as far as they are used.
    pub fn read(object: &NodeNetworkObject, own: &str, uids: &mut SharedUids) -> Self {
        let name = object.name_any();
        if name == own {
            Self::Own(ServerObject::read(object))
        } else {
            Self::Peer(network::peer(name, object.status.as_ref(), uids))
        }
    }
}

/// The NodeNetwork at the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerObject {
    uid: Option<String>,
    version: Option<String>,
    pub state: PublishedState,
}

impl ServerObject {
    /// Parses any object, also one with an invalid status.
    pub fn read(object: &NodeNetworkObject) -> Self {
        let status = object.status.as_ref().and_then(|status| status.parse().ok());
        let owners = object.owner_references().iter().map(owner).collect();
        Self {
            uid: object.uid(),
            version: object.resource_version(),
            state: PublishedState { owners, status },
        }
    }

    /// The later of two states: the response to a write may arrive before the watch event.
    pub fn latest(known: Option<Self>, received: Self) -> Self {
        match known {
            Some(known) if known.is_newer_than(&received) => known,
            _ => received,
        }
    }

    /// Whether `other` is an earlier state of this object.
    fn is_newer_than(&self, other: &Self) -> bool {
        let number = |object: &Self| object.version.as_ref().and_then(|version| version.parse::<u64>().ok());
        self.uid == other.uid && number(self).zip(number(other)).is_some_and(|(own, other)| own > other)
    }

    /// Whether both have the same UID.
    pub fn is_same_object(&self, other: &Self) -> bool {
        self.uid == other.uid
    }
}

fn owner(reference: &OwnerReference) -> Owner {
    Owner {
        api_version: reference.api_version.clone(),
        kind: reference.kind.clone(),
        name: reference.name.clone(),
        uid: reference.uid.clone(),
        controller: reference.controller.unwrap_or(false),
        blocks_deletion: reference.block_owner_deletion.unwrap_or(false),
    }
}

/// The fields of a Node that `plan` needs.
pub fn node_info(node: &Node) -> NodeInfo {
    let addresses = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    NodeInfo {
        name: node.name_any(),
        uid: node.uid().unwrap_or_default(),
        internal_ips: addresses
            .filter(|address| address.type_ == "InternalIP")
            .filter_map(|address| address.address.parse().ok())
            .collect(),
    }
}

/// Writes the NodeNetwork of one node.
pub struct NodeNetworkClient {
    api: Api<NodeNetworkObject>,
    kind: ApiResource,
    name: String,
    call: ApiCall,
    metrics: Metrics,
}

impl NodeNetworkClient {
    pub fn new(client: Client, name: String, metrics: Metrics) -> Self {
        let kind = ApiResource::erase::<NodeNetwork>(&());
        // Each response is counted by its kind, failures included.
        let call = ApiCall::new(WRITE_TIMEOUT, || ());
        Self { api: Api::all_with(client, &kind), kind, name, call, metrics }
    }

    pub fn api(&self) -> &Api<NodeNetworkObject> {
        &self.api
    }

    /// Writes these parts, and returns the resulting object.
    pub async fn write(
        &self,
        node_info: &NodeInfo,
        desired: &NodeNetworkStatus,
        parts: WriteParts,
    ) -> Result<Option<ServerObject>, Error> {
        let apply = PatchParams::apply(NODE_FIELD_MANAGER).force();
        let mut written = None;
        if parts.object {
            let desired = Owner::of(node_info);
            let body = self.body(json!({"name": self.name, "ownerReferences": [reference(&desired)]}), None);
            let patch = Patch::Apply(body);
            let object = self.send(WriteKind::Object, self.api.patch(&self.name, &apply, &patch)).await?;
            // An apply does not remove owner references that other field managers added.
            let foreign = object.state.owners != [desired.clone()];
            written = Some(if foreign { self.replace_owners(&object, &desired).await? } else { object });
        }
        if parts.status {
            let body = self.body(json!({"name": self.name}), Some(desired));
            let patch = Patch::Apply(body);
            let object =
                self.send(WriteKind::Status, self.api.patch_status(&self.name, &apply, &patch)).await?;
            // An apply does not remove status fields of other field managers; the whole status is ours.
            let foreign = object.state.status.as_ref() != Some(desired);
            written = Some(if foreign { self.replace_status(desired).await? } else { object });
        }
        Ok(written)
    }

    /// Makes `desired` the only owner, unless the object changed meanwhile.
    async fn replace_owners(&self, current: &ServerObject, desired: &Owner) -> Result<ServerObject, Error> {
        let metadata = json!({"resourceVersion": current.version, "ownerReferences": [reference(desired)]});
        let patch = Patch::Merge(json!({"metadata": metadata}));
        self.send(WriteKind::Owners, self.api.patch(&self.name, &update(), &patch)).await
    }

    /// Replaces the whole status. After an apply this only removes fields, so it owns no field that a later apply could
    /// not remove. An empty list is removed too: an apply would leave null of a list that has another owner.
    async fn replace_status(&self, desired: &NodeNetworkStatus) -> Result<ServerObject, Error> {
        let NodeNetworkStatus { vtep, interfaces, networks, closed_networks, claim_addresses, conditions } =
            desired;
        let status = json!({
            "vtep": vtep, "interfaces": unless_empty(interfaces), "networks": unless_empty(networks),
            "closedNetworks": unless_empty(closed_networks), "claimAddresses": claim_addresses,
            "conditions": unless_empty(conditions),
        });
        let patch = Patch::Merge(json!({"status": status}));
        self.send(WriteKind::Repair, self.api.patch_status(&self.name, &update(), &patch)).await
    }

    fn body(&self, metadata: Value, status: Option<&NodeNetworkStatus>) -> Value {
        let mut body =
            json!({"apiVersion": self.kind.api_version, "kind": self.kind.kind, "metadata": metadata});
        if let Some(status) = status {
            body["status"] = json!(status);
        }
        body
    }

    async fn send(
        &self,
        part: WriteKind,
        request: impl Future<Output = kube::Result<NodeNetworkObject>>,
    ) -> Result<ServerObject, Error> {
        let result = match self.call.change(Box::pin(request)).await {
            Ok(object) => Ok(ServerObject::read(&object)),
            Err(source) => Err(Error { name: self.name.clone(), source }),
        };
        self.metrics.writes.get_or_create(&WriteLabels { part, result: ResultLabel::of(&result) }).inc();
        result
    }
}

fn unless_empty<T>(list: &[T]) -> Option<&[T]> {
    (!list.is_empty()).then_some(list)
}

fn update() -> PatchParams {
    PatchParams { field_manager: Some(NODE_FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

fn reference(owner: &Owner) -> Value {
    let Owner { api_version, kind, name, uid, controller: _, blocks_deletion: _ } = owner;
    json!({"apiVersion": api_version, "kind": kind, "name": name, "uid": uid})
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::{Arc, Mutex},
    };

    use http::{Request, Response};
    use kube::client::Body;

    use super::*;

    fn object(value: Value) -> ServerObject {
        ServerObject::read(&serde_json::from_value(value).unwrap())
    }

    #[test]
    fn node_info_has_the_uid_and_the_internal_ips_in_order() {
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
        assert_eq!(node_info(&node), NodeInfo { name: "a".to_owned(), uid: "u".to_owned(), internal_ips });
    }

    fn test_node() -> NodeInfo {
        NodeInfo { name: "a".to_owned(), uid: "u".to_owned(), internal_ips: Vec::new() }
    }

    #[test]
    fn an_invalid_status_is_none_and_all_owners_are_parsed() {
        let server = object(json!({
            "metadata": {"name": "a", "ownerReferences": [
                {"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "u"},
                {"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "p", "controller": true},
            ]},
            "status": {"vtep": {"address": "nonsense"}},
        }));
        let ours = Owner::of(&test_node());
        let pod = Owner { kind: "Pod".to_owned(), uid: "p".to_owned(), controller: true, ..ours.clone() };
        assert_eq!(server.state, PublishedState { owners: vec![ours, pod], status: None });
    }

    /// The type and body of each request.
    type SentRequests = Arc<Mutex<Vec<(String, Value)>>>;

    /// A server that sends these responses and records the requests.
    fn server(responses: Vec<Value>) -> (Client, SentRequests) {
        let requests = SentRequests::default();
        let recorded = Arc::clone(&requests);
        let responses = Arc::new(Mutex::new(responses.into_iter()));
        let service = tower::service_fn(move |request: Request<Body>| {
            let (recorded, responses) = (Arc::clone(&recorded), Arc::clone(&responses));
            async move {
                let kind = request.headers()["content-type"].to_str().unwrap().to_owned();
                let body = request.into_body().collect_bytes().await.unwrap();
                recorded.lock().unwrap().push((kind, serde_json::from_slice(&body).unwrap()));
                let response = responses.lock().unwrap().next().unwrap();
                Ok::<_, Infallible>(Response::new(Body::from(response.to_string().into_bytes())))
            }
        });
        (Client::new(service, "default"), requests)
    }

    #[tokio::test]
    async fn a_foreign_owner_reference_is_removed() {
        let ours = json!({"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "u"});
        let foreign = json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "b", "uid": "v"});
        let response = |version: &str, owners: &[&Value]| {
            json!({"apiVersion": "patchbay.dev/v1alpha1", "kind": "NodeNetwork", "metadata": {
                "name": "a", "uid": "n", "resourceVersion": version, "ownerReferences": owners}})
        };
        let (client, requests) = server(vec![response("7", &[&foreign, &ours]), response("8", &[&ours])]);
        let client = NodeNetworkClient::new(client, "a".to_owned(), Metrics::default());
        let parts = WriteParts { object: true, status: false };
        let server = client.write(&test_node(), &NodeNetworkStatus::default(), parts).await.unwrap().unwrap();

        assert_eq!(server.state.owners, [Owner::of(&test_node())]);
        let requests = requests.lock().unwrap().clone();
        let [(apply, _), (merge, patch)] = &requests[..] else { panic!("{requests:?}") };
        assert_eq!(apply, "application/apply-patch+yaml");
        assert_eq!(merge, "application/merge-patch+json");
        assert_eq!(*patch, json!({"metadata": {"resourceVersion": "7", "ownerReferences": [ours]}}));
    }

    #[tokio::test]
    async fn a_repaired_status_owns_no_empty_list() {
        let response = |status: Value| {
            json!({"apiVersion": "patchbay.dev/v1alpha1", "kind": "NodeNetwork",
                "metadata": {"name": "a", "uid": "n", "resourceVersion": "7"}, "status": status})
        };
        let link = json!({"name": "x", "kind": "veth", "mtu": 1500, "state": "Up"});
        let (client, requests) = server(vec![response(json!({"interfaces": [link]})), response(json!({}))]);
        let client = NodeNetworkClient::new(client, "a".to_owned(), Metrics::default());
        let parts = WriteParts { object: false, status: true };
        let desired = NodeNetworkStatus { claim_addresses: Some(Vec::new()), ..NodeNetworkStatus::default() };
        client.write(&test_node(), &desired, parts).await.unwrap();
        let requests = requests.lock().unwrap().clone();
        let status = json!({
            "vtep": null, "interfaces": null, "networks": null, "closedNetworks": null, "claimAddresses": [],
            "conditions": null,
        });
        assert_eq!(requests[1].1, json!({"status": status}));
    }

    #[test]
    fn an_earlier_state_never_replaces_a_later_one_of_the_same_object() {
        let at =
            |uid: &str, version: &str| object(json!({"metadata": {"uid": uid, "resourceVersion": version}}));
        for (known, received, latest) in [
            (("u", "10"), ("u", "9"), ("u", "10")),
            (("u", "9"), ("u", "10"), ("u", "10")),
            (("u", "10"), ("v", "9"), ("v", "9")),
            (("u", "what"), ("u", "9"), ("u", "9")),
        ] {
            let latest = at(latest.0, latest.1);
            assert_eq!(ServerObject::latest(Some(at(known.0, known.1)), at(received.0, received.1)), latest);
        }
        assert_eq!(ServerObject::latest(None, at("u", "1")), at("u", "1"));
    }
}
