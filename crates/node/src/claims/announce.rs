//! Announces the addresses of a pod once no other pod has them any more.
//!
//! An attachment that shares its addresses is quiet. Its daemon watches the other pods of the virtual machine; when none is
//! live, it announces the addresses.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use api::{ErrorChain, IfName};
use client::{retry::Backoff, watch::ObjectEvent};
use kube::Client;
use link::veth::{self, AnnounceOutcome};
use plan::ipam::{AttachmentKey, Lease};
use tokio::{
    sync::Notify,
    task::{AbortHandle, JoinSet, spawn_blocking},
    time::sleep,
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::Metrics;
use crate::{
    Error,
    host_mounts::HostMounts,
    ipam::Ipam,
    pods::{self, CREATED_BY_LABEL, LIVE_PODS, OwnPod, VMI_ID_LABEL},
};

/// How soon a failed request is repeated.
const RETRY: Duration = Duration::from_secs(1);
/// The first and the longest delay before a failed announcement is repeated.
const MIN_ANNOUNCE_RETRY: Duration = Duration::from_secs(1);
const MAX_ANNOUNCE_RETRY: Duration = Duration::from_secs(30);

/// The pods that may have the addresses of an attachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HolderSelector {
    pub namespace: String,
    /// The label selector.
    pub labels: String,
    /// The UID of the attachment's own pod, which the selector selects too.
    pub own_uid: String,
}

/// The attachments that wait for their announcement. Clones share them.
#[derive(Clone, Default)]
pub struct Announcer(Arc<Waiting>);

#[derive(Default)]
struct Waiting {
    attachments: Mutex<BTreeMap<AttachmentKey, HolderSelector>>,
    changed: Notify,
}

/// Watches the other holders, and announces.
pub struct AnnouncerTask {
    announcer: Announcer,
    deps: Arc<AnnounceDeps>,
}

struct AnnounceDeps {
    client: Client,
    ipam: Arc<Ipam>,
    /// `/proc` of the host.
    proc_root: PathBuf,
    /// The mount namespace in which the paths of network namespaces are valid.
    mount_namespace: PathBuf,
    metrics: Metrics,
}

impl Announcer {
    /// Announces the addresses of an attachment once no other holder is live. Its lease names the link and its namespace.
    pub fn watch(&self, key: AttachmentKey, holders: HolderSelector) {
        self.0.attachments().insert(key, holders);
        self.0.changed.notify_one();
    }

    /// The attachment has ended.
    pub fn forget(&self, key: &AttachmentKey) {
        if self.0.attachments().remove(key).is_some() {
            self.0.changed.notify_one();
        }
    }

    #[cfg(test)]
    pub fn waiting(&self) -> BTreeMap<AttachmentKey, HolderSelector> {
        self.0.attachments().clone()
    }
}

impl Waiting {
    fn attachments(&self) -> std::sync::MutexGuard<'_, BTreeMap<AttachmentKey, HolderSelector>> {
        self.attachments.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AnnouncerTask {
    pub fn new(
        announcer: Announcer,
        client: Client,
        ipam: Arc<Ipam>,
        proc_root: &Path,
        mount_namespace: &Path,
        metrics: Metrics,
    ) -> Self {
        let (proc_root, mount_namespace) = (proc_root.to_owned(), mount_namespace.to_owned());
        Self { announcer, deps: Arc::new(AnnounceDeps { client, ipam, proc_root, mount_namespace, metrics }) }
    }

    /// Runs until `stop`. Attachments that an earlier daemon left quiet are watched again.
    pub async fn run(self, stop: CancellationToken) -> Result<(), Error> {
        let Self { announcer, deps } = self;
        let mut tasks: JoinSet<AttachmentKey> = JoinSet::new();
        let mut running: BTreeMap<AttachmentKey, (HolderSelector, AbortHandle)> = BTreeMap::new();
        let mut restored = JoinSet::new();
        for lease in deps.ipam.leases().into_iter().filter(|lease| is_quiet(lease, deps.ipam.boot())) {
            let (deps, announcer) = (Arc::clone(&deps), announcer.clone());
            restored.spawn(async move { deps.restore(&announcer, lease).await });
        }
        loop {
            let desired = announcer.0.attachments().clone();
            running.retain(|key, (holders, task)| {
                let keep = desired.get(key) == Some(holders) && !task.is_finished();
                if !keep {
                    task.abort();
                }
                keep
            });
            for (key, holders) in desired {
                running.entry(key.clone()).or_insert_with(|| {
                    let (deps, selector) = (Arc::clone(&deps), holders.clone());
                    let task = tasks.spawn(async move {
                        deps.announce_when_alone(&key, &selector).await;
                        key
                    });
                    (holders, task)
                });
            }
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                () = announcer.0.changed.notified() => {}
                Some(ended) = tasks.join_next() => {
                    if let Ok(key) = ended {
                        running.remove(&key);
                        announcer.0.attachments().remove(&key);
                    }
                }
                Some(_) = restored.join_next() => {}
            }
        }
    }
}

/// Whether an attachment of this boot may be quiet.
fn is_quiet(lease: &Lease, boot: &str) -> bool {
    lease.boot == boot && lease.claim.as_ref().is_some_and(|claim| claim.shared)
}

impl AnnounceDeps {
    /// Watches an attachment of an earlier daemon again. Announcing an address twice is harmless.
    async fn restore(&self, announcer: &Announcer, lease: Lease) {
        let pod = &lease.pod;
        let fields = format!("metadata.name={},{LIVE_PODS}", pod.name);
        let found = loop {
            match pods::list_live(self.client.clone(), &pod.namespace, None, &fields).await {
                Ok(listed) => break listed.into_iter().find(|one| one.uid == pod.uid),
                Err(error) => {
                    debug!(error = %ErrorChain(&error), "cannot read a pod that shares its addresses");
                }
            }
            sleep(RETRY).await;
        };
        // A launcher has one of the labels.
        if let Some(holders) = found.as_ref().and_then(HolderSelector::of) {
            announcer.watch(lease.key, holders);
        }
    }

    /// Waits until no other holder is live, and announces.
    async fn announce_when_alone(&self, key: &AttachmentKey, holders: &HolderSelector) {
        let mut watch = pods::watch_live(self.client.clone(), &holders.namespace, &holders.labels);
        let mut others: Option<BTreeSet<String>> = None;
        let other = |pod: Option<OwnPod>| pod.map(|pod| pod.uid).filter(|uid| *uid != holders.own_uid);
        while others.as_ref().is_none_or(|others| !others.is_empty()) {
            match watch.next().await {
                ObjectEvent::Synced(listed) => others = Some(listed.into_iter().filter_map(other).collect()),
                ObjectEvent::Changed(pod) => {
                    if let Some(others) = &mut others {
                        others.extend(other(pod));
                    }
                }
                ObjectEvent::Deleted(pod) => {
                    if let (Some(others), Some(uid)) = (&mut others, other(pod)) {
                        others.remove(&uid);
                    }
                }
                ObjectEvent::Resumed => {}
                ObjectEvent::Failed(error) => {
                    debug!(error = %ErrorChain(&error), "cannot watch the pods that share addresses; retrying");
                }
            }
        }
        until_announced(key, || self.announce(key)).await;
    }

    /// Announces the addresses of an attachment, unless it has ended.
    async fn announce(&self, key: &AttachmentKey) -> Result<(), String> {
        let Some(grant) = self.ipam.grant(key) else { return Ok(()) };
        let Some(claim) = grant.lease.claim else { return Ok(()) };
        let link: IfName = key.interface.parse().map_err(|error: api::ifname::Error| error.to_string())?;
        let (mounts, proc_root) = (self.mount_namespace.clone(), self.proc_root.clone());
        let netns = PathBuf::from(claim.netns);
        let announced = spawn_blocking(move || {
            // Opened only now: an open descriptor would outlive the pod.
            let opened = HostMounts::open(&mounts)?.run_blocking(move || File::open(netns))?;
            let namespace = match opened {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(error),
            };
            let announced = veth::announce(namespace.as_fd(), &link, &proc_root);
            announced.map(Some).map_err(|error| io::Error::other(ErrorChain(&error).to_string()))
        });
        let announced = announced.await.map_err(|error| error.to_string())?;
        match announced.map_err(|error| error.to_string())? {
            Some(AnnounceOutcome::Announced) => {
                self.metrics.announcements.inc();
                info!(
                    container_id = key.container, ifname = key.interface, addresses = ?grant.lease.addresses,
                    "announced the addresses of a pod: no other pod has them any more"
                );
            }
            Some(AnnounceOutcome::NoLink) => {
                debug!(
                    container_id = key.container,
                    "the pod has moved its link; the guest announces its addresses"
                );
            }
            None => {
                debug!(container_id = key.container, "the network namespace is gone; nothing is announced");
            }
        }
        Ok(())
    }
}

/// Repeats an announcement until it succeeds: until then the link does not answer ARP. It also succeeds once the attachment
/// has no lease any more.
async fn until_announced<F: Future<Output = Result<(), String>>>(
    key: &AttachmentKey,
    mut announce: impl FnMut() -> F,
) {
    let mut backoff = Backoff::new(MIN_ANNOUNCE_RETRY, MAX_ANNOUNCE_RETRY);
    while let Err(problem) = announce().await {
        let (container_id, ifname) = (&key.container, &key.interface);
        warn!(%container_id, %ifname, problem, "cannot announce the addresses of a pod; retrying");
        sleep(backoff.next_delay()).await;
    }
}

impl HolderSelector {
    /// The launchers of the virtual machine of a launcher, of any instance of its name.
    pub fn of(pod: &OwnPod) -> Option<Self> {
        let label = |name: &str| pod.label(name).map(|value| format!("{name}={value}"));
        let labels = label(VMI_ID_LABEL).or_else(|| label(CREATED_BY_LABEL))?;
        Some(Self { namespace: pod.namespace.clone(), labels, own_uid: pod.uid.clone() })
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_failed_announcement_is_repeated_until_it_succeeds() {
        let key = AttachmentKey { container: "c".to_owned(), interface: "net1".to_owned() };
        let (mut attempts, start) = (0, Instant::now());
        until_announced(&key, || {
            attempts += 1;
            std::future::ready(if attempts < 40 { Err("busy".to_owned()) } else { Ok(()) })
        })
        .await;
        assert_eq!(attempts, 40);
        let taken = start.elapsed();
        assert!(taken > 30 * MAX_ANNOUNCE_RETRY && taken < 50 * MAX_ANNOUNCE_RETRY, "{taken:?}");
    }
}
