//! The pods of this node: one watch, a snapshot that all consumers share, and the changes of each pod.
//!
//! The watch starts with the first [`OwnPods::subscribe`]. Before that it sends no request, and the daemon needs no
//! permission for pods; a capability that subscribes needs `list` and `watch` of pods in the daemon's ClusterRole. Only
//! what consumers use is decoded and kept of a pod.
//!
//! The snapshot can be older than the object at the API server: who writes to a pod compares with the live object.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use api::{ErrorChain, network_status::NETWORK_STATUS_ANNOTATION, selection::NETWORKS_ANNOTATION};
use client::watch::{ObjectEvent, ObjectWatch, WatchConfig};
use jiff::Timestamp;
use k8s_openapi::{
    NamespaceResourceScope,
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time},
};
use kube::{Api, Client, Resource, api::ListParams};
use plan::claims::{OwnerKind, OwnerRef};
use serde::{Deserialize, Deserializer};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    Error,
    health::{Component, Health, HealthChange},
    watch::backoff,
};

/// The UID of a static pod in the container runtime. Its mirror pod has another one.
const STATIC_POD_ANNOTATION: &str = "kubernetes.io/config.hash";
/// Marks the mirror pod of a static pod.
const MIRROR_POD_ANNOTATION: &str = "kubernetes.io/config.mirror";

/// The label by which the pods of multus-dynamic-networks-controller are recognized.
pub const APP_LABEL: &str = "app";
/// The label of KubeVirt's pods. A pod that runs a virtual machine has the value [`VIRT_LAUNCHER`].
pub const KUBEVIRT_LABEL: &str = "kubevirt.io";
/// The value of [`KUBEVIRT_LABEL`] of a pod that runs a virtual machine.
pub const VIRT_LAUNCHER: &str = "virt-launcher";
/// The label of launcher pods with the UID of their VirtualMachineInstance.
pub const CREATED_BY_LABEL: &str = "kubevirt.io/created-by";
/// The label of launcher pods with a digest of the name of their VirtualMachineInstance.
pub const VMI_ID_LABEL: &str = "vmi.kubevirt.io/id";
/// The labels that are kept of a pod.
const KEPT_LABELS: [&str; 4] = [APP_LABEL, KUBEVIRT_LABEL, CREATED_BY_LABEL, VMI_ID_LABEL];
/// Selects the pods that have not ended.
pub const LIVE_PODS: &str = "status.phase!=Succeeded,status.phase!=Failed";
/// The pods of one page of a live list.
const LIST_PAGE: u32 = 100;

/// The UID of a pod.
pub type PodUid = String;

/// A pod of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnPod {
    pub uid: PodUid,
    pub namespace: String,
    pub name: String,
    pub phase: PodPhase,
    pub created: Timestamp,
    /// When the pod was deleted. It may still run.
    pub deleted: Option<Timestamp>,
    /// What controls the pod.
    pub controller: Option<OwnerRef>,
    /// Whether it uses the host's network.
    pub host_network: bool,
    /// The paths of the host that its volumes mount, if one of its containers names multus.
    pub multus_host_paths: Vec<String>,
    /// Those about networks, those of Patchbay, and the one of static pods.
    annotations: BTreeMap<String, String>,
    /// The [`KEPT_LABELS`].
    labels: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub enum PodPhase {
    Pending,
    Running,
    Succeeded,
    Failed,
    #[default]
    #[serde(other)]
    Unknown,
}

impl OwnPod {
    /// One of the annotations that are kept.
    pub fn annotation(&self, name: &str) -> Option<&str> {
        self.annotations.get(name).map(String::as_str)
    }

    /// The network selection elements, as the user wrote them.
    pub fn networks(&self) -> Option<&str> {
        self.annotation(NETWORKS_ANNOTATION)
    }

    pub fn network_status(&self) -> Option<&str> {
        self.annotation(NETWORK_STATUS_ANNOTATION)
    }

    /// One of the labels that are kept.
    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels.get(name).map(String::as_str)
    }

    /// Whether the pod runs a virtual machine of KubeVirt, which renames and moves the links of its networks.
    pub fn is_virt_launcher(&self) -> bool {
        self.label(KUBEVIRT_LABEL) == Some(VIRT_LAUNCHER)
    }

    /// The UID by which the container runtime knows the pod.
    ///
    /// For a mirror pod it is a claim: users can write these annotations too.
    pub fn runtime_uid(&self) -> &str {
        let is_mirror = self.annotation(MIRROR_POD_ANNOTATION).is_some();
        self.annotation(STATIC_POD_ANNOTATION).filter(|_| is_mirror).unwrap_or(&self.uid)
    }
}

fn is_kept(annotation: &str) -> bool {
    let domain = annotation.split('/').next().unwrap_or_default();
    let subdomain = domain.strip_suffix(api::GROUP);
    let standard =
        [NETWORKS_ANNOTATION, NETWORK_STATUS_ANNOTATION, STATIC_POD_ANNOTATION, MIRROR_POD_ANNOTATION];
    standard.contains(&annotation) || subdomain.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// The pods of this node, shared by their consumers.
#[derive(Clone)]
pub struct OwnPods(Arc<Mutex<PodState>>);

struct PodState {
    /// None until the first list.
    pods: Option<BTreeMap<PodUid, Arc<OwnPod>>>,
    subscribers: Vec<Weak<Subscriber>>,
    /// Set by the first subscriber.
    wanted: watch::Sender<bool>,
}

/// The changes that a consumer has not read yet: at most one per pod.
#[derive(Default)]
struct Subscriber {
    pending: Mutex<BTreeSet<PodUid>>,
    changed: Notify,
}

/// The changes of pods, for one consumer.
pub struct PodChanges(Arc<Subscriber>);

/// Keeps [`OwnPods`] up to date.
pub struct OwnPodsWatch {
    pods: OwnPods,
    api: Api<PodObject>,
    node: String,
    health: Arc<Health>,
    wanted: watch::Receiver<bool>,
}

/// The pods of a node, and the task that watches them.
pub fn own_pods(client: Client, node: &str, health: Arc<Health>) -> (OwnPods, OwnPodsWatch) {
    let (sender, wanted) = watch::channel(false);
    let state = PodState { pods: None, subscribers: Vec::new(), wanted: sender };
    let pods = OwnPods(Arc::new(Mutex::new(state)));
    let watch =
        OwnPodsWatch { pods: pods.clone(), api: Api::all(client), node: node.to_owned(), health, wanted };
    (pods, watch)
}

impl OwnPods {
    /// A pod; none if it does not exist or has not been read yet.
    pub fn get(&self, uid: &str) -> Option<Arc<OwnPod>> {
        self.lock().pods.as_ref()?.get(uid).cloned()
    }

    /// Whether the pods have been listed.
    pub fn is_listed(&self) -> bool {
        self.lock().pods.is_some()
    }

    /// All pods; none until they have been listed.
    pub fn snapshot(&self) -> Option<BTreeMap<PodUid, Arc<OwnPod>>> {
        self.lock().pods.clone()
    }

    /// The changes from now on. Pods that are known already count as changed.
    pub fn subscribe(&self) -> PodChanges {
        let mut state = self.lock();
        let known: BTreeSet<PodUid> = state.pods.iter().flat_map(BTreeMap::keys).cloned().collect();
        let subscriber = Arc::new(Subscriber { pending: Mutex::new(known), changed: Notify::new() });
        state.subscribers.push(Arc::downgrade(&subscriber));
        state.wanted.send_replace(true);
        PodChanges(subscriber)
    }

    /// Starts the watch, without a subscriber.
    pub fn want(&self) {
        self.lock().wanted.send_replace(true);
    }

    fn lock(&self) -> MutexGuard<'_, PodState> {
        // No change of the state is left half done by a panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Pods without a watch, for tests of consumers.
#[cfg(test)]
impl OwnPods {
    pub fn unlisted() -> Self {
        let state = PodState { pods: None, subscribers: Vec::new(), wanted: watch::channel(false).0 };
        Self(Arc::new(Mutex::new(state)))
    }

    /// Replaces all pods by these objects.
    pub fn list(&self, objects: Vec<serde_json::Value>) {
        let decode = |object| serde_json::from_value::<PodObject>(object).ok().and_then(PodObject::into_pod);
        self.lock().replace(objects.into_iter().filter_map(decode));
    }
}

impl PodChanges {
    /// The UID of a pod that was created, changed or deleted. Changes of one pod that the consumer has not read yet count
    /// once. Cancel safe.
    pub async fn next(&mut self) -> PodUid {
        loop {
            if let Some(uid) = self.0.pending().pop_first() {
                return uid;
            }
            self.0.changed.notified().await;
        }
    }
}

impl Subscriber {
    fn pending(&self) -> MutexGuard<'_, BTreeSet<PodUid>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PodState {
    fn replace(&mut self, listed: impl IntoIterator<Item = OwnPod>) {
        let new: BTreeMap<PodUid, Arc<OwnPod>> =
            listed.into_iter().map(|pod| (pod.uid.clone(), Arc::new(pod))).collect();
        let old = self.pods.take().unwrap_or_default();
        let changed = new.iter().filter(|(uid, pod)| old.get(*uid) != Some(*pod)).map(|(uid, _)| uid);
        let gone = old.keys().filter(|uid| !new.contains_key(*uid));
        let changed: BTreeSet<PodUid> = changed.chain(gone).cloned().collect();
        self.pods = Some(new);
        self.notify(&changed);
    }

    fn apply(&mut self, pod: OwnPod) {
        let Some(pods) = &mut self.pods else { return };
        if pods.get(&pod.uid).is_some_and(|known| **known == pod) {
            return;
        }
        let uid = pod.uid.clone();
        pods.insert(uid.clone(), Arc::new(pod));
        self.notify(&BTreeSet::from([uid]));
    }

    fn delete(&mut self, uid: &str) {
        if let Some((uid, _)) = self.pods.as_mut().and_then(|pods| pods.remove_entry(uid)) {
            self.notify(&BTreeSet::from([uid]));
        }
    }

    fn notify(&mut self, changed: &BTreeSet<PodUid>) {
        self.subscribers.retain(|subscriber| {
            let Some(subscriber) = subscriber.upgrade() else { return false };
            if !changed.is_empty() {
                subscriber.pending().extend(changed.iter().cloned());
                subscriber.changed.notify_one();
            }
            true
        });
    }
}

impl OwnPodsWatch {
    /// Watches from the first subscription until `stop`. A failed watch informs in health, and is retried.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), Error> {
        let subscribed = self.wanted.wait_for(|wanted| *wanted);
        if !matches!(stop.run_until_cancelled(subscribed).await, Some(Ok(_))) {
            // Nothing can subscribe any more, or the daemon stops.
            stop.cancelled().await;
            return Ok(());
        }
        let selector = format!("spec.nodeName={}", self.node);
        let config = WatchConfig::all().fields(&selector).backoff(backoff());
        let mut watch = ObjectWatch::projected(self.api.clone(), config, PodObject::into_pod);
        while let Some(event) = stop.run_until_cancelled(watch.next()).await {
            match event {
                ObjectEvent::Synced(listed) => {
                    self.pods.lock().replace(listed.into_iter().flatten());
                    self.recovered();
                }
                ObjectEvent::Changed(Some(pod)) => self.pods.lock().apply(pod),
                ObjectEvent::Deleted(Some(pod)) => self.pods.lock().delete(&pod.uid),
                // Every object of the API server has a UID.
                ObjectEvent::Changed(None) | ObjectEvent::Deleted(None) => {}
                ObjectEvent::Resumed => self.recovered(),
                ObjectEvent::Failed(error) => {
                    let problem = format!("watch the pods of this node: {}", ErrorChain(&error));
                    if self.health.fail(Component::PodWatch, problem.clone()) == HealthChange::Changed {
                        warn!(error = problem, "cannot watch the pods of this node; retrying");
                    }
                }
            }
        }
        Ok(())
    }

    fn recovered(&self) {
        if self.health.ok(Component::PodWatch) == HealthChange::Changed {
            info!("watching the pods of this node works again");
        }
    }
}

/// The parts of a Pod that are decoded.
#[derive(Debug, Clone, Deserialize)]
struct PodObject {
    #[serde(deserialize_with = "pod_metadata")]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: PodSpecPart,
    #[serde(default)]
    status: PodStatusPart,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodSpecPart {
    #[serde(default)]
    host_network: bool,
    #[serde(default, deserialize_with = "names_multus")]
    containers: bool,
    #[serde(default, deserialize_with = "names_multus")]
    init_containers: bool,
    #[serde(default, deserialize_with = "host_paths")]
    volumes: Vec<String>,
}

/// Whether one of these containers has the word multus in its name, image or command.
fn names_multus<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    #[derive(Deserialize)]
    struct Container {
        #[serde(default)]
        name: String,
        #[serde(default)]
        image: String,
        #[serde(default)]
        command: Vec<String>,
        #[serde(default)]
        args: Vec<String>,
    }
    let containers = Option::<Vec<Container>>::deserialize(deserializer)?.unwrap_or_default();
    let names = |Container { name, image, command, args }: &Container| {
        let mut texts = [name, image].into_iter().chain(command).chain(args);
        texts.any(|text| text.to_ascii_lowercase().contains("multus"))
    };
    Ok(containers.iter().any(names))
}

/// The paths of the host among these volumes.
fn host_paths<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Volume {
        host_path: Option<HostPath>,
    }
    #[derive(Deserialize)]
    struct HostPath {
        #[serde(default)]
        path: String,
    }
    let volumes = Option::<Vec<Volume>>::deserialize(deserializer)?.unwrap_or_default();
    Ok(volumes.into_iter().filter_map(|volume| Some(volume.host_path?.path)).collect())
}

#[derive(Debug, Clone, Default, Deserialize)]
struct PodStatusPart {
    #[serde(default)]
    phase: PodPhase,
}

/// Decodes the metadata that are used; the others, managedFields above all, take no memory.
fn pod_metadata<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Part {
        name: Option<String>,
        namespace: Option<String>,
        uid: Option<String>,
        resource_version: Option<String>,
        creation_timestamp: Option<Time>,
        deletion_timestamp: Option<Time>,
        owner_references: Option<Vec<OwnerReference>>,
        annotations: Option<BTreeMap<String, String>>,
        labels: Option<BTreeMap<String, String>>,
    }
    let part = Part::deserialize(deserializer)?;
    let Part { name, namespace, uid, resource_version, creation_timestamp, deletion_timestamp, .. } = part;
    let annotations = part.annotations.map(|mut annotations| {
        annotations.retain(|name, _| is_kept(name));
        annotations
    });
    let labels = part.labels.map(|mut labels| {
        labels.retain(|name, _| KEPT_LABELS.contains(&name.as_str()));
        labels
    });
    let owner_references = part.owner_references;
    let named = ObjectMeta { name, namespace, uid, resource_version, ..ObjectMeta::default() };
    let timed = ObjectMeta { creation_timestamp, deletion_timestamp, ..named };
    Ok(ObjectMeta { owner_references, annotations, labels, ..timed })
}

impl PodObject {
    fn into_pod(self) -> Option<OwnPod> {
        let meta = self.metadata;
        Some(OwnPod {
            uid: meta.uid?,
            namespace: meta.namespace?,
            name: meta.name?,
            phase: self.status.phase,
            created: meta.creation_timestamp.map(|at| at.0).unwrap_or_default(),
            deleted: meta.deletion_timestamp.map(|at| at.0),
            controller: controller(meta.owner_references.unwrap_or_default()),
            host_network: self.spec.host_network,
            multus_host_paths: if self.spec.containers || self.spec.init_containers {
                self.spec.volumes
            } else {
                Vec::new()
            },
            annotations: meta.annotations.unwrap_or_default(),
            labels: meta.labels.unwrap_or_default(),
        })
    }
}

/// The owner that controls an object.
pub fn controller(owners: Vec<OwnerReference>) -> Option<OwnerRef> {
    let owner = owners.into_iter().find(|owner| owner.controller == Some(true))?;
    let kind = OwnerKind::of(&owner.api_version, &owner.kind);
    Some(OwnerRef { kind, name: owner.name.into(), uid: owner.uid })
}

/// Lists pods of a namespace at the API server. The snapshot of [`OwnPods`] has those of this node only, and may be older.
pub async fn list_live(
    client: Client,
    namespace: &str,
    labels: Option<&str>,
    fields: &str,
) -> kube::Result<Vec<OwnPod>> {
    let api: Api<PodObject> = Api::namespaced(client, namespace);
    let mut params = ListParams::default().fields(fields).limit(LIST_PAGE);
    params.label_selector = labels.map(str::to_owned);
    let mut pods = Vec::new();
    loop {
        let page = api.list(&params).await?;
        pods.extend(page.items.into_iter().filter_map(PodObject::into_pod));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(pods),
        }
    }
}

/// Watches the live pods of a namespace that a label selector selects.
pub fn watch_live(client: Client, namespace: &str, labels: &str) -> ObjectWatch<Option<OwnPod>> {
    let config = WatchConfig::labelled(labels).fields(LIVE_PODS).backoff(backoff());
    ObjectWatch::projected(Api::namespaced(client, namespace), config, PodObject::into_pod)
}

impl Resource for PodObject {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "Pod".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        "".into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        "pods".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests;
