//! The NodeNetwork in the API server: reading what stands there, and writing what should.

use std::time::Duration;

use api::{NODE_MANAGER, NodeNetwork, NodeNetworkStatus};
use k8s_openapi::{api::core::v1::Node, apimachinery::pkg::apis::meta::v1::OwnerReference};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
    core::Status,
};
use plan::nodenetwork::{Facts, Owner, Record, Writes};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::metrics::{Metrics, ResultLabel, WriteKind, WriteLabels};

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
        self.status().is_some_and(Status::is_not_found)
    }

    /// Whether somebody else was quicker: look again.
    pub fn is_conflict(&self) -> bool {
        self.status().is_some_and(Status::is_conflict)
    }

    fn status(&self) -> Option<&Status> {
        match self {
            Self::Write { source, .. } => match &**source {
                kube::Error::Api(status) => Some(status),
                _ => None,
            },
            Self::Deadline { .. } => None,
        }
    }
}

/// An object as the API server has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    uid: Option<String>,
    version: Option<String>,
    pub record: Record,
}

impl Known {
    /// Reads any object, also one that somebody edited into something that is no NodeNetwork.
    pub fn read(object: &DynamicObject) -> Self {
        let status = object.data.get("status").and_then(|status| serde_json::from_value(status.clone()).ok());
        let owners = object.owner_references().iter().map(owner).collect();
        Self { uid: object.uid(), version: object.resource_version(), record: Record { owners, status } }
    }

    /// The later of two states: the answer to a write overtakes the watch.
    pub fn latest(known: Option<Self>, seen: Self) -> Self {
        match known {
            Some(known) if known.is_newer_than(&seen) => known,
            _ => seen,
        }
    }

    /// Whether `other` is an earlier state of this object.
    fn is_newer_than(&self, other: &Self) -> bool {
        let number = |known: &Self| known.version.as_ref().and_then(|version| version.parse::<u64>().ok());
        self.uid == other.uid && number(self).zip(number(other)).is_some_and(|(own, other)| own > other)
    }

    /// Whether both are the same object in the sense of its UID.
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

/// What the Node says that matters here.
pub fn facts(node: &Node) -> Facts {
    let addresses = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    Facts {
        name: node.name_any(),
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
            let wanted = Owner::of(facts);
            let body = self.body(json!({"name": self.name, "ownerReferences": [reference(&wanted)]}), None);
            let patch = Patch::Apply(body);
            let now = self.call(WriteKind::Object, self.api.patch(&self.name, &apply, &patch)).await?;
            // An apply leaves alone the owners that another manager added.
            let foreign = now.record.owners != [wanted.clone()];
            known = Some(if foreign { self.disown(&now, &wanted).await? } else { now });
        }
        if writes.status {
            let body = self.body(json!({"name": self.name}), Some(wanted));
            let patch = Patch::Apply(body);
            let now = self.call(WriteKind::Status, self.api.patch_status(&self.name, &apply, &patch)).await?;
            // An apply leaves alone what another manager put into the status; all of it is ours.
            let foreign = now.record.status.as_ref() != Some(wanted);
            known = Some(if foreign { self.repair(wanted).await? } else { now });
        }
        Ok(known)
    }

    /// Makes `wanted` the only owner of the object as it was seen.
    async fn disown(&self, seen: &Known, wanted: &Owner) -> Result<Known, Error> {
        let metadata = json!({"resourceVersion": seen.version, "ownerReferences": [reference(wanted)]});
        let patch = Patch::Merge(json!({"metadata": metadata}));
        self.call(WriteKind::Owners, self.api.patch(&self.name, &update(), &patch)).await
    }

    /// Sets the status to exactly what is wanted. After an apply this only removes, so it owns no field of its own that
    /// a later apply could not take away again.
    async fn repair(&self, wanted: &NodeNetworkStatus) -> Result<Known, Error> {
        let NodeNetworkStatus { vtep, interfaces, networks, conditions } = wanted;
        let status =
            json!({"vtep": vtep, "interfaces": interfaces, "networks": networks, "conditions": conditions});
        let patch = Patch::Merge(json!({"status": status}));
        self.call(WriteKind::Repair, self.api.patch_status(&self.name, &update(), &patch)).await
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
        part: WriteKind,
        call: impl Future<Output = kube::Result<DynamicObject>>,
    ) -> Result<Known, Error> {
        let name = || self.name.clone();
        let result = match timeout(LIMIT, call).await {
            Ok(Ok(object)) => Ok(Known::read(&object)),
            Ok(Err(source)) => Err(Error::Write { name: name(), source: Box::new(source) }),
            Err(_) => Err(Error::Deadline { name: name() }),
        };
        self.metrics.writes.get_or_create(&WriteLabels { part, result: ResultLabel::of(&result) }).inc();
        result
    }
}

fn update() -> PatchParams {
    PatchParams { field_manager: Some(NODE_MANAGER.to_owned()), ..PatchParams::default() }
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
        assert_eq!(facts(&node), Facts { name: "a".to_owned(), uid: "u".to_owned(), internal_ips });
    }

    fn node_facts() -> Facts {
        Facts { name: "a".to_owned(), uid: "u".to_owned(), internal_ips: Vec::new() }
    }

    #[test]
    fn a_status_that_is_no_status_is_none_and_every_owner_is_seen() {
        let known = object(json!({
            "metadata": {"name": "a", "ownerReferences": [
                {"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "u"},
                {"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "p", "controller": true},
            ]},
            "status": {"vtep": {"address": "nonsense"}},
        }));
        let ours = Owner::of(&node_facts());
        let pod = Owner { kind: "Pod".to_owned(), uid: "p".to_owned(), controller: true, ..ours.clone() };
        assert_eq!(known.record, Record { owners: vec![ours, pod], status: None });
    }

    /// The type and body of each request.
    type Asked = Arc<Mutex<Vec<(String, Value)>>>;

    /// A server that gives these answers, and keeps what it was asked.
    fn server(answers: Vec<Value>) -> (Client, Asked) {
        let asked = Asked::default();
        let kept = Arc::clone(&asked);
        let answers = Arc::new(Mutex::new(answers.into_iter()));
        let service = tower::service_fn(move |request: Request<Body>| {
            let (kept, answers) = (Arc::clone(&kept), Arc::clone(&answers));
            async move {
                let kind = request.headers()["content-type"].to_str().unwrap().to_owned();
                let body = request.into_body().collect_bytes().await.unwrap();
                kept.lock().unwrap().push((kind, serde_json::from_slice(&body).unwrap()));
                let answer = answers.lock().unwrap().next().unwrap();
                Ok::<_, Infallible>(Response::new(Body::from(answer.to_string().into_bytes())))
            }
        });
        (Client::new(service, "default"), asked)
    }

    #[tokio::test]
    async fn an_owner_that_somebody_else_added_is_taken_away() {
        let ours = json!({"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "u"});
        let foreign = json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "b", "uid": "v"});
        let answer = |version: &str, owners: &[&Value]| {
            json!({"apiVersion": "patchbay.dev/v1alpha1", "kind": "NodeNetwork", "metadata": {
                "name": "a", "uid": "n", "resourceVersion": version, "ownerReferences": owners}})
        };
        let (client, asked) = server(vec![answer("7", &[&foreign, &ours]), answer("8", &[&ours])]);
        let object = Object::new(client, "a".to_owned(), Metrics::default());
        let writes = Writes { object: true, status: false };
        let known =
            object.write(&node_facts(), &NodeNetworkStatus::default(), writes).await.unwrap().unwrap();

        assert_eq!(known.record.owners, [Owner::of(&node_facts())]);
        let asked = asked.lock().unwrap().clone();
        let [(apply, _), (merge, patch)] = &asked[..] else { panic!("{asked:?}") };
        assert_eq!(apply, "application/apply-patch+yaml");
        assert_eq!(merge, "application/merge-patch+json");
        assert_eq!(*patch, json!({"metadata": {"resourceVersion": "7", "ownerReferences": [ours]}}));
    }

    #[test]
    fn an_earlier_state_never_replaces_a_later_one_of_the_same_object() {
        let at =
            |uid: &str, version: &str| object(json!({"metadata": {"uid": uid, "resourceVersion": version}}));
        for (known, seen, latest) in [
            (("u", "10"), ("u", "9"), ("u", "10")),
            (("u", "9"), ("u", "10"), ("u", "10")),
            (("u", "10"), ("v", "9"), ("v", "9")),
            (("u", "what"), ("u", "9"), ("u", "9")),
        ] {
            let latest = at(latest.0, latest.1);
            assert_eq!(Known::latest(Some(at(known.0, known.1)), at(seen.0, seen.1)), latest);
        }
        assert_eq!(Known::latest(None, at("u", "1")), at("u", "1"));
    }
}
