//! The NetworkAttachmentDefinitions (NADs) of the cluster: one watch, lookups, and which of them changed.
//!
//! The kind need not exist: the API server then says so, and is asked again every few seconds.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{self, ErrorKind, Read as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use api::{
    ErrorChain,
    nad::{NAD_GROUP, NAD_PLURAL},
    nad_config::NadConfig,
    selection::NadRef,
};
use client::{
    retry::Backoff,
    watch::{self, StreamEvent, WatchConfig},
};
use futures::StreamExt as _;
use k8s_openapi::{NamespaceResourceScope, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::{Api, Client, Resource};
use nix::fcntl::OFlag;
use plan::hotplug::{IsolationSettings, MultusConfig, NadState, NamespaceAccess};
use serde::{Deserialize, Deserializer};
use tokio::{
    select,
    sync::Notify,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::config::{MultusConfigReader, under};
use crate::{Error, host_mounts::HostMounts, watch::backoff};

/// The annotation of a NAD that needs a device of this resource.
const RESOURCE_ANNOTATION: &str = "k8s.v1.cni.cncf.io/resourceName";
/// Longer configurations are not kept. They are of all namespaces, and every user who may create NADs chooses them.
const MAX_CONFIG: usize = 64 * 1024;
/// Bounds the configurations of all NADs.
const MAX_CONFIGS: usize = 64 * 1024 * 1024;
/// The least time between lists that only look for room. Up to a quarter is added at random, so that the daemons of all nodes
/// do not list at once.
const MIN_RELIST: Duration = Duration::from_mins(10);
/// The NADs of one page of a list. The API server accepts NADs of 1.5 MB, and a page is held in memory as text and decoded.
pub const NAD_LIST_PAGE: u32 = 10;
/// Larger files are not read.
const MAX_FILE: u64 = 1024 * 1024;
/// Further files of the directory are not read.
const MAX_FILES: usize = 1024;

/// What is used of a NAD.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Nad {
    /// The CNI configuration; None if it is a file on the node.
    config: Option<NadText>,
    /// The resource of which it needs a device.
    resource: Option<String>,
}

/// The CNI configuration of a NAD.
#[derive(Debug, Clone, PartialEq, Eq)]
enum NadText {
    Kept(String),
    /// It is too long to be kept. Its length in bytes.
    TooLong(usize),
    /// The configurations of all NADs are too long to be kept.
    NoRoom,
}

impl Nad {
    fn len(&self) -> usize {
        match &self.config {
            Some(NadText::Kept(text)) => text.len(),
            _ => 0,
        }
    }

    /// Does not keep the configuration if all would be too long with it. `others` is the length of the others.
    fn limit(&mut self, others: usize) {
        if others.saturating_add(self.len()) > MAX_CONFIGS {
            self.config = Some(NadText::NoRoom);
        }
    }
}

/// The NADs of the cluster, shared by their consumers.
#[derive(Clone)]
pub struct Nads(Arc<NadsState>);

struct NadsState {
    host: HostMounts,
    multus: MultusConfigReader,
    isolation: IsolationSettings,
    /// `/`; another directory in tests.
    root: PathBuf,
    objects: Mutex<NadObjects>,
    changed: Notify,
}

#[derive(Default)]
struct NadObjects {
    /// None until the API server has listed them, or said that the kind does not exist.
    nads: Option<BTreeMap<NadRef, Nad>>,
    /// The length of their configurations.
    len: usize,
    /// Those that the consumer has not read yet.
    pending: BTreeSet<NadRef>,
    /// The watch has failed, or the kind does not exist.
    problem: Option<WatchProblem>,
}

impl NadObjects {
    /// Whether there is a configuration for which there was no room.
    fn without_room(&self) -> bool {
        let mut nads = self.nads.iter().flatten();
        nads.any(|(_, nad)| nad.config == Some(NadText::NoRoom))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WatchProblem {
    NotServed,
    Failed,
}

/// Fills [`Nads`].
pub struct NadWatch {
    api: Api<NadObject>,
    nads: Nads,
    /// Ends with the watch.
    listing: Option<BTreeMap<NadRef, Nad>>,
    /// The length of the configurations in `listing`.
    listed_len: usize,
}

/// Why it is not known what a NAD is. Look again later.
#[derive(Debug, thiserror::Error)]
pub enum NadError {
    #[error("the NetworkAttachmentDefinitions have not been listed yet")]
    NotListed,
    #[error("read the configurations in {}", path.display())]
    Files { path: PathBuf, source: io::Error },
}

/// The NADs and the watch that must run for them.
pub fn nads(
    client: Client,
    host: HostMounts,
    multus: MultusConfigReader,
    isolation: IsolationSettings,
) -> (Nads, NadWatch) {
    nads_at(client, host, multus, isolation, Path::new("/"))
}

/// Reads the files of a node whose root is this directory.
fn nads_at(
    client: Client,
    host: HostMounts,
    multus: MultusConfigReader,
    isolation: IsolationSettings,
    root: &Path,
) -> (Nads, NadWatch) {
    let (root, objects, changed) = (root.to_owned(), Mutex::default(), Notify::new());
    let nads = Nads(Arc::new(NadsState { host, multus, isolation, root, objects, changed }));
    let watch = NadWatch { api: Api::all(client), nads: nads.clone(), listing: None, listed_len: 0 };
    (nads, watch)
}

impl Nads {
    /// A NAD that was created, changed or deleted since the last call. Changes of one NAD that were not read yet count
    /// once. At the start, all NADs count as changed. For one consumer. Cancel safe.
    pub async fn changed(&self) -> NadRef {
        loop {
            if let Some(nad) = self.objects().pending.pop_first() {
                return nad;
            }
            self.0.changed.notified().await;
        }
    }

    /// What a NAD is for the pods of a namespace.
    pub async fn resolve(&self, nad: &NadRef, pod_namespace: &str) -> Result<NadState, NadError> {
        if nad.namespace != pod_namespace {
            match self.0.isolation.access(&*self.0.multus.read().await, nad, pod_namespace) {
                NamespaceAccess::Allowed => {}
                NamespaceAccess::Forbidden { message } => return Ok(NadState::Forbidden { message }),
                NamespaceAccess::Unknown { message } => return Ok(NadState::IsolationUnknown { message }),
            }
        }
        let found = {
            let objects = self.objects();
            objects.nads.as_ref().ok_or(NadError::NotListed)?.get(nad).cloned()
        };
        let Some(Nad { config: text, resource }) = found else { return Ok(NadState::Missing) };
        if let Some(resource) = resource {
            return Ok(NadState::DeviceRequired { resource });
        }
        match text {
            Some(NadText::TooLong(len)) => Ok(NadState::Invalid {
                message: format!("spec.config has {len} bytes; shorten it to at most {MAX_CONFIG}"),
            }),
            Some(NadText::NoRoom) => Ok(NadState::Invalid {
                message: format!(
                    "the NetworkAttachmentDefinitions of the cluster have more than {MAX_CONFIGS} bytes in all; delete \
                     unused ones"
                ),
            }),
            Some(NadText::Kept(text)) => Ok(ready(NadConfig::parse(Some(&text), &nad.name))),
            None => self.resolve_file(nad, &self.0.multus.read().await.config).await,
        }
    }

    /// The configuration of a NAD that has none in its object: the file whose network has its name.
    async fn resolve_file(&self, nad: &NadRef, config: &MultusConfig) -> Result<NadState, NadError> {
        let (dir, name) = (under(&self.0.root, &config.conf_dir), nad.name.clone());
        let path = dir.clone();
        let found = self.0.host.run(move || find_file(&dir, &name)).await.and_then(|found| found);
        Ok(match found.map_err(|source| NadError::Files { path, source })? {
            Some((_, text)) => ready(NadConfig::parse(Some(&text), &nad.name)),
            None => NadState::Invalid {
                message: format!(
                    "spec.config is empty, and no file in {} has a network of the name {}; set spec.config, or add the file",
                    config.conf_dir.display(),
                    nad.name
                ),
            },
        })
    }

    fn objects(&self) -> MutexGuard<'_, NadObjects> {
        // No change of the objects is left half done by a panic.
        self.0.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn ready(parsed: Result<NadConfig, api::nad_config::Error>) -> NadState {
    match parsed {
        Ok(config) => NadState::Ready { config: Box::new(config) },
        Err(error) => NadState::Invalid { message: error.to_string() },
    }
}

/// The first configuration whose network has this name. Files that cannot be used are left out.
fn find_file(dir: &Path, network: &str) -> io::Result<Option<(PathBuf, String)>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| {
        let extension = path.extension().and_then(|extension| extension.to_str());
        matches!(extension, Some("conf" | "json" | "conflist"))
    });
    paths.sort();
    let texts = paths.into_iter().take(MAX_FILES).filter_map(|path| {
        let text = read_file(&path).ok()?;
        Some((path, text))
    });
    Ok(texts.into_iter().find(|(_, text)| file_network(text).as_deref() == Some(network)))
}

/// The network of a configuration. The rest of it need not be valid: the error is reported to the user.
fn file_network(text: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Named {
        name: String,
    }
    // Serde would read a list into a struct too.
    let named = text.trim_start().starts_with('{').then(|| serde_json::from_str::<Named>(text).ok());
    named.flatten().map(|named| named.name)
}

/// Reads a regular file of a bounded size.
fn read_file(path: &Path) -> io::Result<String> {
    let file = File::options().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() > MAX_FILE {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut text = String::new();
    file.take(MAX_FILE).read_to_string(&mut text)?;
    Ok(text)
}

/// When to list again, if the last list started at `started`. What is more than [`MIN_RELIST`] of the interval is random, and
/// is waited for in any case.
fn relist_due(started: Instant, now: Instant, interval: Duration) -> Instant {
    (started + interval).max(now + interval.saturating_sub(MIN_RELIST))
}

async fn sleep_until_due(due: Option<Instant>) {
    match due {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

impl NadWatch {
    /// Watches until `stop`. Failures are retried; they and a kind that does not exist are logged once.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), Error> {
        let api = self.api.clone();
        let config = || WatchConfig::all().page_size(NAD_LIST_PAGE).backoff(backoff());
        let stream = || watch::stream(api.clone(), config());
        let (mut events, mut started) = (stream().boxed(), Instant::now());
        let mut relist: Option<Instant> = None;
        loop {
            let event = select! {
                () = stop.cancelled() => return Ok(()),
                event = events.next() => event,
                () = sleep_until_due(relist) => {
                    (self.listing, events, started) = (None, stream().boxed(), Instant::now());
                    relist = None;
                    continue;
                }
            };
            let Some(event) = event else { return Ok(()) };
            let deleted = matches!(event, StreamEvent::Deleted(_));
            self.apply(event);
            // The text of the others was not kept: list them again.
            if deleted && relist.is_none() && self.nads.objects().without_room() {
                let interval = Backoff::new(MIN_RELIST, MIN_RELIST).next_delay();
                relist = Some(relist_due(started, Instant::now(), interval));
            }
        }
    }

    fn apply(&mut self, event: StreamEvent<NadObject>) {
        match event {
            StreamEvent::ListStarted => (self.listing, self.listed_len) = (Some(BTreeMap::new()), 0),
            StreamEvent::Applied(object) => {
                let Some((at, mut nad)) = object.into_nad() else { return };
                match &mut self.listing {
                    Some(listing) => {
                        nad.limit(self.listed_len);
                        self.listed_len += nad.len();
                        listing.insert(at, nad);
                    }
                    None => self.set(at, Some(nad)),
                }
            }
            StreamEvent::Deleted(object) => {
                if let Some((at, _)) = object.into_nad() {
                    self.set(at, None);
                }
            }
            StreamEvent::ListDone => {
                let listed = self.listing.take().unwrap_or_default();
                self.replace(listed);
                self.recovered();
            }
            StreamEvent::Resumed => self.recovered(),
            StreamEvent::NotServed(_) => {
                self.listing = None;
                self.replace(BTreeMap::new());
                if self.report(WatchProblem::NotServed) {
                    info!("the kind NetworkAttachmentDefinition is not installed; waiting for it");
                }
            }
            StreamEvent::Failed(error) => {
                self.listing = None;
                if self.report(WatchProblem::Failed) {
                    warn!(error = %ErrorChain(&error), "cannot watch NetworkAttachmentDefinitions; retrying");
                }
            }
        }
    }

    fn set(&self, at: NadRef, mut nad: Option<Nad>) {
        let mut objects = self.nads.objects();
        let objects = &mut *objects;
        let Some(nads) = &mut objects.nads else { return };
        objects.len -= nads.get(&at).map_or(0, Nad::len);
        if let Some(nad) = &mut nad {
            nad.limit(objects.len);
            objects.len += nad.len();
        }
        let old = match nad.clone() {
            Some(nad) => nads.insert(at.clone(), nad),
            None => nads.remove(&at),
        };
        if old != nad {
            objects.pending.insert(at);
            self.nads.0.changed.notify_one();
        }
    }

    fn replace(&self, listed: BTreeMap<NadRef, Nad>) {
        let mut objects = self.nads.objects();
        let old = objects.nads.take().unwrap_or_default();
        let changed = listed.iter().filter(|(at, nad)| old.get(at) != Some(nad)).map(|(at, _)| at);
        let gone = old.keys().filter(|at| !listed.contains_key(at));
        let changed: Vec<NadRef> = changed.chain(gone).cloned().collect();
        objects.len = listed.values().map(Nad::len).sum();
        objects.nads = Some(listed);
        objects.pending.extend(changed);
        if !objects.pending.is_empty() {
            self.nads.0.changed.notify_one();
        }
    }

    /// Returns whether this is another problem than before.
    fn report(&self, problem: WatchProblem) -> bool {
        self.nads.objects().problem.replace(problem) != Some(problem)
    }

    fn recovered(&self) {
        if self.nads.objects().problem.take().is_some() {
            info!("watching NetworkAttachmentDefinitions works");
        }
    }
}

/// The parts of a NetworkAttachmentDefinition that are decoded.
#[derive(Debug, Clone, Deserialize)]
pub struct NadObject {
    #[serde(deserialize_with = "nad_metadata")]
    metadata: ObjectMeta,
    /// Of any type: the API server checks it only if the CRD has a schema.
    #[serde(default)]
    spec: serde_json::Value,
}

/// Decodes the metadata that are used.
fn nad_metadata<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Part {
        name: Option<String>,
        namespace: Option<String>,
        resource_version: Option<String>,
        annotations: Option<BTreeMap<String, String>>,
    }
    let Part { name, namespace, resource_version, annotations } = Part::deserialize(deserializer)?;
    let annotations = annotations.map(|mut annotations| {
        annotations.retain(|name, _| name == RESOURCE_ANNOTATION);
        annotations
    });
    Ok(ObjectMeta { name, namespace, resource_version, annotations, ..ObjectMeta::default() })
}

impl NadObject {
    /// The CNI configuration.
    pub fn take_config(&mut self) -> Option<String> {
        match self.spec.get_mut("config").map(serde_json::Value::take) {
            None | Some(serde_json::Value::Null) => None,
            Some(serde_json::Value::String(text)) => Some(text),
            // The parser of configurations reports what is wrong.
            Some(other) => Some(other.to_string()),
        }
    }

    fn into_nad(mut self) -> Option<(NadRef, Nad)> {
        let config = self.take_config();
        let ObjectMeta { name, namespace, annotations, .. } = self.metadata;
        let resource = annotations.and_then(|mut annotations| annotations.remove(RESOURCE_ANNOTATION));
        let nad = Nad {
            config: config.filter(|text| !text.is_empty()).map(|text| match text.len() {
                len if len > MAX_CONFIG => NadText::TooLong(len),
                _ => NadText::Kept(text),
            }),
            resource: resource.filter(|resource| !resource.is_empty()),
        };
        Some((NadRef::new(namespace?, name?), nad))
    }
}

impl Resource for NadObject {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "NetworkAttachmentDefinition".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        NAD_GROUP.into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        NAD_PLURAL.into()
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
