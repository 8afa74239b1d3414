//! The attachments that other programs made, as multus recorded them on this node, and those of Patchbay that its journal lost.
//!
//! Multus writes the list of a sandbox's delegates to `<cniDir>/<container>` before it attaches the first one, and deletes
//! the list when the sandbox ends. libcni writes `<cniDir>/results/<network>-<container>-<interface>` after each ADD, and
//! deletes it after a DEL. multus-dynamic-networks-controller attaches through multus, so that libcni records its results,
//! but multus does not add them to the list.
//!
//! Hence an attachment of the list that has a result was made at pod start and still exists. A result that is not of the
//! list was made by that controller. Without a list nothing is known about a running sandbox, and nothing is concluded.
//!
//! The executor of Patchbay writes results too, in `/var/lib/cni/results`, and marks them: the container runtime writes those of
//! the cluster's network there. A marked result is always an attachment of Patchbay, and no other is.
//! Files may be incomplete or have any content: what cannot be used is left out.

mod parse;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{self, ErrorKind, Read as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use api::{
    ifname::IfName,
    network_status::{NetworkStatus, NetworkStatusList, StatusEntry},
    selection::NadRef,
};
use nix::fcntl::OFlag;
use plan::hotplug::{
    AttachedRecord, AttachmentKey, AttachmentRecord, LinkIdentity, MultusConfig, Origin, PodIdentity,
    RecordPhase, RequestedAddresses,
};
use tracing::debug;

use self::parse::{CachedResult, Delegate, is_container_id, parse_delegates, parse_result};
use super::{
    apply::names_process,
    config::{MultusConfigReader, under},
    sandboxes::open_namespace,
};
use crate::{executor::attachment_result, host_mounts::HostMounts};

/// The interface of the cluster's default network.
const DEFAULT_INTERFACE: &str = "eth0";
/// The key of the results of Patchbay's executor.
const MARK: &str = "\"patchbay.dev/network\"";
/// Larger files are not read.
const MAX_FILE: u64 = 1024 * 1024;
/// The results of a sandbox are not used if they are larger in all.
const MAX_SANDBOX_SIZE: usize = 16 * 1024 * 1024;
/// Further results of ended sandboxes are read next time.
const MAX_ENDED: usize = 256;
/// Further results of ended sandboxes are read next time.
const MAX_ENDED_SIZE: usize = 4 * 1024 * 1024;

/// Reads what multus recorded. Clones share the files.
#[derive(Clone)]
pub struct MultusCacheReader {
    host: HostMounts,
    multus: MultusConfigReader,
    /// The results of Patchbay's executor.
    own_results: PathBuf,
    /// `/`; another directory in tests.
    root: PathBuf,
    /// The boot ID of the node.
    boot: String,
}

/// The records of multus could not be read.
#[derive(Debug, thiserror::Error)]
pub enum MultusCacheError {
    #[error("read the attachments that multus recorded in {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// It stays so as long as the sandbox exists.
    #[error(
        "what multus recorded about this pod cannot be used: {0}; until then it is not known what multus attached, and \
         nothing is attached or detached: shorten the configurations of the pod's networks and create the pod again"
    )]
    Unusable(io::Error),
    #[error("delete the result of {key:?} in {}", path.display())]
    Delete { key: AttachmentKey, path: PathBuf, source: io::Error },
}

/// What multus recorded about a running sandbox.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RecordedAttachments {
    /// Those of the sandbox's start but the cluster's default networks, and those of multus-dynamic-networks-controller.
    pub records: Vec<AttachmentRecord>,
    /// The entries that multus writes to network-status for the default networks: the cluster's network first.
    pub defaults: Vec<NetworkStatus>,
}

/// The files of one sandbox.
#[derive(Default)]
struct SandboxFiles {
    /// None if there is no list.
    list: Option<Vec<u8>>,
    /// In the order of their times, the newest last.
    results: Vec<Vec<u8>>,
}

impl MultusCacheReader {
    pub fn new(host: HostMounts, multus: MultusConfigReader, own_results: PathBuf, boot: String) -> Self {
        Self { host, multus, own_results, root: PathBuf::from("/"), boot }
    }

    /// Reads the files of a node whose root is this directory.
    #[cfg(test)]
    fn at(self, root: &Path) -> Self {
        Self { root: root.to_owned(), ..self }
    }

    /// The attachments of a running sandbox. `network_status` is the pod's annotation: only it says from which NAD those of
    /// multus-dynamic-networks-controller are.
    pub async fn attachments(
        &self,
        container: &str,
        pod: &PodIdentity,
        network_status: Option<&str>,
    ) -> Result<RecordedAttachments, MultusCacheError> {
        if !is_container_id(container) {
            return Ok(RecordedAttachments::default());
        }
        let config = &self.multus.read().await.config;
        let (dir, id) = (under(&self.root, &config.cni_dir), container.to_owned());
        let path = dir.clone();
        let files = self.host.run(move || read_sandbox(&dir, &id)).await.and_then(|read| read);
        let files = files.map_err(|source| {
            if is_unusable(&source) {
                MultusCacheError::Unusable(source)
            } else {
                MultusCacheError::Read { path, source }
            }
        })?;
        let status = NetworkStatusList::parse(network_status).unwrap_or_default();
        let sandbox = RecordedSandbox { container, pod, boot: &self.boot, status: &status };
        Ok(sandbox.attachments(&files, config))
    }

    /// The attachments of Patchbay in a running sandbox, as their results describe them. The journal has more of them, unless it
    /// was lost.
    pub async fn own_attachments(
        &self,
        container: &str,
        pod: &PodIdentity,
    ) -> Result<Vec<AttachmentRecord>, MultusCacheError> {
        if !is_container_id(container) {
            return Ok(Vec::new());
        }
        let (dir, part) = (under(&self.root, &self.own_results), format!("-{container}-"));
        let path = dir.clone();
        let read = self.host.run(move || read_results(&dir, |name| name.contains(&part))).await;
        let results = read.and_then(|read| read).map_err(|source| MultusCacheError::Read { path, source })?;
        let status = NetworkStatusList::default();
        let sandbox = RecordedSandbox { container, pod, boot: &self.boot, status: &status };
        Ok(sandbox.own_attachments(&SandboxFiles { list: None, results }))
    }

    /// The attachments of Patchbay and of multus-dynamic-networks-controller in sandboxes that have ended: they are not among
    /// `running`, and their namespace is gone. Nothing but Patchbay runs their DEL. Leaves out those that are `known`.
    pub async fn ended(
        &self,
        running: BTreeSet<String>,
        known: BTreeSet<AttachmentKey>,
    ) -> Result<EndedAttachments, MultusCacheError> {
        let config = &self.multus.read().await.config;
        let (dir, boot) = (under(&self.root, &config.cni_dir), self.boot.clone());
        let (path, own) = (dir.clone(), under(&self.root, &self.own_results));
        let read = self.host.run(move || read_ended(&dir, &own, &boot, &running, &known)).await;
        read.and_then(|read| read).map_err(|source| MultusCacheError::Read { path, source })
    }

    /// Deletes the result of an attachment that counts as removed from then on, as libcni does after DEL.
    pub async fn delete_result(&self, record: &AttachmentRecord) -> Result<(), MultusCacheError> {
        let AttachmentKey { container, interface } = &record.key;
        let name = parse::network_name(record.config.as_bytes());
        let (Some(name), true) = (name, is_container_id(container)) else { return Ok(()) };
        if interface.contains('/') {
            return Ok(());
        }
        let dir = if record.origin == Origin::Hotplug {
            under(&self.root, &self.own_results)
        } else {
            under(&self.root, &self.multus.read().await.config.cni_dir).join("results")
        };
        let path = dir.join(format!("{name}-{container}-{interface}"));
        let file = path.clone();
        let deleted = self.host.run(move || fs::remove_file(&file)).await.and_then(|deleted| deleted);
        match deleted {
            Err(source) if source.kind() != ErrorKind::NotFound => {
                Err(MultusCacheError::Delete { key: record.key.clone(), path, source })
            }
            _ => Ok(()),
        }
    }
}

/// What ended sandboxes left behind.
#[derive(Debug, Default)]
pub struct EndedAttachments {
    pub records: Vec<AttachmentRecord>,
    /// Some results may be left behind later, or could not be read: look again.
    pub incomplete: bool,
}

/// A sandbox whose records are read.
struct RecordedSandbox<'a> {
    container: &'a str,
    pod: &'a PodIdentity,
    boot: &'a str,
    status: &'a NetworkStatusList,
}

impl RecordedSandbox<'_> {
    fn attachments(&self, files: &SandboxFiles, config: &MultusConfig) -> RecordedAttachments {
        // Without its list, the results of the pod's start cannot be distinguished from the others.
        let Some(delegates) = files.list.as_deref().and_then(parse_delegates) else {
            return RecordedAttachments::default();
        };
        let defaults = |interface: &str| {
            let mut statuses = self.status.entries().iter().filter_map(StatusEntry::status);
            statuses.any(|status| status.default && status.interface == interface)
        };
        let mut records: BTreeMap<String, AttachmentRecord> = BTreeMap::new();
        let mut default_statuses: BTreeMap<usize, Vec<NetworkStatus>> = BTreeMap::new();
        for result in self.results(files).filter(|result| result.own_nad.is_none()) {
            let delegate = delegates.iter().enumerate().find(|(index, delegate)| {
                delegate.network == result.network_name && delegate.interface(*index) == result.if_name
            });
            let (nad, origin) = match delegate {
                Some((index, delegate)) => {
                    let Some(nad) = delegate.nad(index, config, &self.pod.namespace) else {
                        default_statuses.insert(index, default_network(&result, &delegate.name, index == 0));
                        continue;
                    };
                    ((nad, false), Origin::PodStart)
                }
                None if result.if_name == DEFAULT_INTERFACE || defaults(&result.if_name) => continue,
                None => (self.reported_nad(&result), Origin::Original),
            };
            // Of several results for one interface only the newest can be of a link that exists.
            if let Some(record) = self.record(result, nad, origin) {
                records.insert(record.key.interface.clone(), record);
            }
        }
        RecordedAttachments {
            records: records.into_values().collect(),
            defaults: default_statuses.into_values().flatten().collect(),
        }
    }

    fn own_attachments(&self, files: &SandboxFiles) -> Vec<AttachmentRecord> {
        let mut records: BTreeMap<String, AttachmentRecord> = BTreeMap::new();
        for mut result in self.results(files).filter(|result| result.if_name != DEFAULT_INTERFACE) {
            let Some(nad) = result.own_nad.take() else { continue };
            if let Some(record) = self.record(result, (nad, false), Origin::Hotplug) {
                records.insert(record.key.interface.clone(), record);
            }
        }
        records.into_values().collect()
    }

    fn results(&self, files: &SandboxFiles) -> impl Iterator<Item = CachedResult> {
        let results = files.results.iter().filter_map(|text| parse_result(text));
        results.filter(|result| result.container_id == self.container)
    }

    /// The NAD of an interface in the pod's network-status. Without an entry it is a guess, which is returned too: the
    /// controller attaches NADs whose configuration mostly has their name.
    fn reported_nad(&self, result: &CachedResult) -> (NadRef, bool) {
        let mut statuses = self.status.entries().iter().filter_map(StatusEntry::status);
        let reported = statuses.find_map(|status| {
            let (namespace, name) = status.name.split_once('/')?;
            (status.interface == result.if_name).then(|| NadRef::new(namespace, name))
        });
        let guess = || NadRef::new(self.pod.namespace.as_str(), result.network_name.as_str());
        reported.map_or_else(|| (guess(), true), |nad| (nad, false))
    }

    fn record(
        &self,
        result: CachedResult,
        (nad, nad_guessed): (NadRef, bool),
        origin: Origin,
    ) -> Option<AttachmentRecord> {
        let Ok(interface) = result.if_name.parse::<IfName>() else {
            debug!(
                container = self.container,
                interface = result.if_name,
                "multus recorded an invalid interface"
            );
            return None;
        };
        let success = result.success();
        let in_pod = success.interfaces.iter().filter(|interface| interface.sandbox.is_some());
        let links = in_pod.map(|interface| LinkIdentity {
            name: interface.name.clone(),
            mac: interface.mac.clone(),
            ..LinkIdentity::default()
        });
        let mut statuses = attachment_result(&success).statuses(&nad, &interface, None);
        for status in &mut statuses {
            status.device_info = self.reported_device(&status.name, &status.interface);
        }
        let attached = AttachedRecord {
            links: links.collect(),
            statuses,
            result: result.result_text(),
            replaced_routes: Vec::new(),
        };
        let (container, interface) = (self.container.to_owned(), interface.to_string());
        Some(AttachmentRecord {
            key: AttachmentKey { container, interface },
            pod: self.pod.clone(),
            nad,
            nad_guessed,
            origin,
            boot: self.boot.to_owned(),
            requested: Some(RequestedAddresses::new(&result.requested_ips(), result.requested_mac())),
            netns: result.netns,
            config: result.config,
            cni_args: result.cni_args,
            capability_args: result.capability_args,
            former_statuses: Vec::new(),
            removing: false,
            phase: RecordPhase::Attached(attached),
        })
    }

    /// The device in the pod's network-status: a result has none.
    fn reported_device(&self, name: &str, interface: &str) -> Option<api::network_status::DeviceInfo> {
        let mut statuses = self.status.entries().iter().filter_map(StatusEntry::status);
        let reported = statuses.find(|status| status.name == name && status.interface == interface);
        reported.and_then(|status| status.device_info.clone())
    }
}

/// The entries that multus writes for a network that it attaches to every pod. `is_cluster`: it is the cluster's. None without
/// an interface in the pod.
fn default_network(result: &CachedResult, name: &str, is_cluster: bool) -> Vec<NetworkStatus> {
    let success = result.success();
    let in_pod: Vec<usize> =
        (0..success.interfaces.len()).filter(|&at| success.interfaces[at].sandbox.is_some()).collect();
    let Ok(interface) = result.if_name.parse::<IfName>() else { return Vec::new() };
    if in_pod.is_empty() {
        return Vec::new();
    }
    // The interface of the first gateway, or else the first one, is the default.
    let gateway = success.ips.iter().find_map(|ip| ip.gateway.and(ip.interface));
    let default = gateway.and_then(|gateway| in_pod.iter().position(|&at| at == gateway)).unwrap_or(0);
    let mut statuses = attachment_result(&success).statuses(&NadRef::new("", name), &interface, None);
    for (at, status) in statuses.iter_mut().enumerate() {
        name.clone_into(&mut status.name);
        status.default = is_cluster && at == default;
    }
    statuses
}

fn read_sandbox(dir: &Path, container: &str) -> io::Result<SandboxFiles> {
    // The list first: multus writes it before the results, and the other controller adds results only.
    let list = match read_file(&dir.join(container)) {
        Ok(list) => Some(list),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let part = format!("-{container}-");
    let results = read_results(&dir.join("results"), |name| name.contains(&part))?;
    Ok(SandboxFiles { list, results })
}

/// Reads the results of sandboxes that have ended, one after the other: there may be many of running sandboxes.
fn read_ended(
    dir: &Path,
    own: &Path,
    boot: &str,
    running: &BTreeSet<String>,
    known: &BTreeSet<AttachmentKey>,
) -> io::Result<EndedAttachments> {
    let mut left = EndedAttachments::default();
    let mut size = 0;
    let status = NetworkStatusList::default();
    let of_multus = dir.join("results");
    let dirs = [Some(of_multus.as_path()), Some(own).filter(|own| *own != of_multus)];
    let dirs = dirs.into_iter().flatten().map(read_dir).collect::<io::Result<Vec<_>>>()?;
    for entry in dirs.into_iter().flatten().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        // Mostly there is no hyphen in a container ID. A file whose name starts with a dot is being written.
        if name.starts_with('.') || name.split('-').any(|part| running.contains(part)) {
            continue;
        }
        let text = match read_file(&entry.path()) {
            Ok(text) => text,
            // Multus deleted it meanwhile, or it is no result.
            Err(error) if error.kind() == ErrorKind::NotFound || is_unusable(&error) => continue,
            Err(error) => {
                debug!(file = name, %error, "cannot read a result that multus recorded");
                left.incomplete = true;
                continue;
            }
        };
        // Of the cluster's network: the container runtime runs its DEL. There may be thousands, so they are not parsed.
        let of_runtime = |text: &[u8]| !text.windows(MARK.len()).any(|part| part == MARK.as_bytes());
        if entry.path().parent() != Some(&of_multus) && of_runtime(&text) {
            continue;
        }
        let Some(mut result) = parse_result(&text) else { continue };
        let own_nad = result.own_nad.take();
        if own_nad.is_none() && entry.path().parent() != Some(&of_multus) {
            continue;
        }
        let id = result.container_id.clone();
        let key = AttachmentKey { container: id.clone(), interface: result.if_name.clone() };
        if running.contains(&id) || known.contains(&key) || result.if_name == DEFAULT_INTERFACE {
            continue;
        }
        // Another process may have the number of one that has ended. The sandbox of an own result existed before the result.
        let of_ended_process = own_nad.is_some() && names_process(&result.netns);
        if !of_ended_process && !is_gone(&result.netns) {
            // The sandbox is being created or removed.
            left.incomplete = true;
            continue;
        }
        match is_listed(dir, &result) {
            _ if own_nad.is_some() => {}
            Ok(false) => {}
            // Multus deletes those of its list itself.
            Ok(true) => continue,
            Err(error) => {
                debug!(container = id, %error, "cannot read a list of multus");
                left.incomplete = true;
                continue;
            }
        }
        size += text.len();
        if left.records.len() == MAX_ENDED || size > MAX_ENDED_SIZE {
            left.incomplete = true;
            break;
        }
        let pod = result.pod();
        let sandbox = RecordedSandbox { container: &id, pod: &pod, boot, status: &status };
        let (nad, origin) = match own_nad {
            Some(nad) => ((nad, false), Origin::Hotplug),
            None => (sandbox.reported_nad(&result), Origin::Original),
        };
        left.records.extend(sandbox.record(result, nad, origin));
    }
    Ok(left)
}

/// Whether a result is of the list of its sandbox. A list that is not readable may contain any result.
fn is_listed(dir: &Path, result: &CachedResult) -> io::Result<bool> {
    let list = match read_file(&dir.join(&result.container_id)) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        list => list?,
    };
    let delegates = parse_delegates(&list).ok_or(ErrorKind::InvalidData)?;
    let mut delegates = delegates.iter().enumerate();
    Ok(delegates.any(|(index, delegate): (usize, &Delegate)| {
        delegate.network == result.network_name && delegate.interface(index) == result.if_name
    }))
}

/// Whether a namespace does not exist any more. If that is not known, it may exist.
fn is_gone(namespace: &str) -> bool {
    namespace.is_empty()
        || open_namespace(Path::new(namespace)).is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// The entries of a directory; None if it does not exist.
fn read_dir(dir: &Path) -> io::Result<Option<fs::ReadDir>> {
    match fs::read_dir(dir) {
        Ok(entries) => Ok(Some(entries)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The results whose file names match, the newest last. Those that cannot be read are left out. Fails if one is too large, or
/// all of them.
fn read_results(dir: &Path, matches: impl Fn(&str) -> bool) -> io::Result<Vec<Vec<u8>>> {
    let entries = read_dir(dir)?.into_iter().flatten().flatten();
    let (mut results, mut size) = (Vec::new(), 0);
    let is_result = |name: &str| !name.starts_with('.') && matches(name);
    for entry in entries.filter(|entry| entry.file_name().to_str().is_some_and(is_result)) {
        let read = entry.metadata().and_then(|metadata| Ok((metadata, read_file(&entry.path())?)));
        match read {
            Ok((metadata, text)) => {
                size += text.len();
                results.push(((metadata.mtime(), metadata.mtime_nsec()), text));
            }
            Err(error) if error.kind() == ErrorKind::FileTooLarge => return Err(error),
            Err(error) => debug!(file = ?entry.path(), %error, "cannot read a result that multus recorded"),
        }
        if size > MAX_SANDBOX_SIZE {
            let text = format!(
                "its results in {} have more than {MAX_SANDBOX_SIZE} bytes, which is the limit",
                dir.display()
            );
            return Err(io::Error::new(ErrorKind::FileTooLarge, text));
        }
    }
    results.sort();
    Ok(results.into_iter().map(|(_, text)| text).collect())
}

/// Whether a file that was read stays as it is.
fn is_unusable(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidData | ErrorKind::FileTooLarge)
}

/// Reads a regular file of a bounded size.
fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    // A pipe in the place of the file must not block.
    let file = File::options().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        let text = format!("{} is no regular file", path.display());
        return Err(io::Error::new(ErrorKind::InvalidData, text));
    }
    if metadata.len() > MAX_FILE {
        let text = format!("{} has {} bytes, the limit is {MAX_FILE} bytes", path.display(), metadata.len());
        return Err(io::Error::new(ErrorKind::FileTooLarge, text));
    }
    let mut text = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests;
