//! The network namespaces whose link events concern hot-plug: those of pods with a worker.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use link::NamespaceLinkEvent;
use plan::hotplug::Departure;
use tokio::sync::Notify;

use crate::repairs::Repairs;

/// The namespaces by the ID that they have in the host's namespace.
#[derive(Debug, Default)]
pub struct WatchedNamespaces {
    namespaces: Mutex<BTreeMap<i32, WatchedNamespace>>,
    changes: Mutex<LinkChanges>,
    changed: Notify,
    repairs: Repairs,
}

/// What link events changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct LinkChanges {
    /// The pods that lost a recorded link or their namespace, or whose moved link may be back.
    pub pods: BTreeSet<String>,
    /// Events are lost: any pod may have changed.
    pub overrun: bool,
}

#[derive(Debug, Default)]
struct WatchedNamespace {
    /// The pod, by the UID that the container runtime uses.
    pod: String,
    /// The links that were recorded or seen.
    links: BTreeSet<u32>,
    /// The ends on the host of the recorded links.
    peers: BTreeSet<u32>,
    /// The links that left the namespace, also those that were created and left before they were seen.
    gone: BTreeMap<u32, Departure>,
}

/// How many links that left before they were seen are remembered per namespace. A program in a pod can create any number.
const MAX_UNSEEN: usize = 1024;

impl WatchedNamespaces {
    /// Changes of the host's links are signalled to `repairs`.
    pub fn new(repairs: Repairs) -> Self {
        Self { repairs, ..Self::default() }
    }

    /// Replaces the links of interest in the namespace of a pod, and their ends on the host. Returns whether one of them was
    /// of no interest before: what happened to it until now may not have been noticed.
    pub fn watch(&self, nsid: i32, pod: &str, links: BTreeSet<u32>, peers: BTreeSet<u32>) -> bool {
        let mut all = self.lock();
        all.retain(|id, namespace| *id == nsid || namespace.pod != pod);
        let namespace = all.entry(nsid).or_default();
        if namespace.pod != pod {
            *namespace = WatchedNamespace { pod: pod.to_owned(), ..WatchedNamespace::default() };
        }
        namespace.gone.retain(|index, _| links.contains(index));
        let is_new = !links.is_subset(&namespace.links) || !peers.is_subset(&namespace.peers);
        (namespace.links, namespace.peers) = (links, peers);
        is_new
    }

    pub fn forget(&self, pod: &str) {
        self.lock().retain(|_, namespace| namespace.pod != pod);
    }

    /// Applies events in the order in which the kernel sent them.
    pub fn apply(&self, events: &[NamespaceLinkEvent]) {
        let mut changes = LinkChanges::default();
        if events.iter().any(is_of_host) {
            self.repairs.signal();
        }
        for event in events {
            match *event {
                NamespaceLinkEvent::Removed { nsid: Some(nsid), index, moved } => {
                    let how = if moved { Departure::Moved } else { Departure::Deleted };
                    changes.pods.extend(self.departed(nsid, index, how));
                }
                NamespaceLinkEvent::NamespaceRemoved { nsid } => {
                    changes.pods.extend(self.namespace_removed(nsid));
                }
                NamespaceLinkEvent::Overrun => changes.overrun = true,
                NamespaceLinkEvent::Removed { nsid: None, index, .. } => {
                    changes.pods.extend(self.peer_departed(index));
                }
                NamespaceLinkEvent::Changed { nsid: Some(nsid), index } => {
                    changes.pods.extend(self.appeared(nsid, index));
                }
                NamespaceLinkEvent::Changed { nsid: None, .. } => {}
            }
        }
        if changes == LinkChanges::default() {
            return;
        }
        let mut pending = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        pending.pods.append(&mut changes.pods);
        pending.overrun |= changes.overrun;
        self.changed.notify_one();
    }

    /// Waits for changes and returns those since the last call. Cancel safe.
    pub async fn changes(&self) -> LinkChanges {
        self.changed.notified().await;
        std::mem::take(&mut *self.changes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Forgets a namespace that was destroyed. Returns its pod.
    fn namespace_removed(&self, nsid: i32) -> Option<String> {
        self.lock().remove(&nsid).map(|namespace| namespace.pod)
    }

    /// Records that a link has left. Returns its pod if the link was recorded or seen.
    fn departed(&self, nsid: i32, index: u32, how: Departure) -> Option<String> {
        let mut all = self.lock();
        let namespace = all.get_mut(&nsid)?;
        let is_known = namespace.links.contains(&index);
        if is_known || namespace.gone.len() < namespace.links.len() + MAX_UNSEEN {
            namespace.gone.insert(index, how);
        }
        is_known.then(|| namespace.pod.clone())
    }

    /// Records that a link is in the namespace. Returns the pod if this may be a recorded link that was moved and comes back,
    /// with its old index or with a new one.
    fn appeared(&self, nsid: i32, index: u32) -> Option<String> {
        let mut all = self.lock();
        let namespace = all.get_mut(&nsid)?;
        let is_known = namespace.links.contains(&index);
        let before = namespace.gone.get_mut(&index).map(|how| std::mem::replace(how, Departure::Returned));
        let returned = is_known && before.is_some_and(|how| how != Departure::Returned);
        let is_moved =
            |(gone, how): (&u32, &Departure)| *how == Departure::Moved && namespace.links.contains(gone);
        let may_return = !is_known && namespace.gone.iter().any(is_moved);
        (returned || may_return).then(|| namespace.pod.clone())
    }

    /// The pod that had a recorded link whose end on the host has left.
    fn peer_departed(&self, index: u32) -> Option<String> {
        let all = self.lock();
        let mut namespaces = all.values();
        namespaces.find(|namespace| namespace.peers.contains(&index)).map(|namespace| namespace.pod.clone())
    }

    /// How a link of a pod left, or that it came back; None if the kernel reported nothing.
    pub fn departure(&self, pod: &str, index: u32) -> Option<Departure> {
        let all = self.lock();
        let mut of_pod = all.values().filter(|namespace| namespace.pod == pod);
        of_pod.find_map(|namespace| namespace.gone.get(&index).copied())
    }

    /// All pods.
    pub fn pods(&self) -> BTreeSet<String> {
        self.lock().values().map(|namespace| namespace.pod.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<i32, WatchedNamespace>> {
        self.namespaces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether an event is about a link of the host, or may be.
fn is_of_host(event: &NamespaceLinkEvent) -> bool {
    matches!(
        event,
        NamespaceLinkEvent::Removed { nsid: None, .. }
            | NamespaceLinkEvent::Changed { nsid: None, .. }
            | NamespaceLinkEvent::Overrun
    )
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn only_recorded_links_concern_a_pod() {
        let namespaces = WatchedNamespaces::default();
        namespaces.watch(7, "a", BTreeSet::from([2, 3]), BTreeSet::from([20]));
        assert_eq!(namespaces.departed(7, 4, Departure::Moved), None);
        assert_eq!(namespaces.departure("a", 4), Some(Departure::Moved), "it may be recorded later");
        assert_eq!((namespaces.peer_departed(20).as_deref(), namespaces.peer_departed(2)), (Some("a"), None));
        assert_eq!(namespaces.departed(8, 2, Departure::Deleted), None);
        assert_eq!(namespaces.departed(7, 3, Departure::Moved).as_deref(), Some("a"));
        assert_eq!(namespaces.departure("a", 3), Some(Departure::Moved));
        assert_eq!(namespaces.departure("a", 2), None);
        namespaces.watch(7, "a", BTreeSet::from([2]), BTreeSet::new());
        assert_eq!(namespaces.departure("a", 3), None, "it is not recorded any more");
    }

    #[test]
    fn a_moved_link_that_comes_back_wakes_its_pod_once() {
        let namespaces = WatchedNamespaces::default();
        namespaces.watch(7, "a", BTreeSet::from([2, 3]), BTreeSet::new());
        assert_eq!((namespaces.appeared(7, 2), namespaces.appeared(7, 9)), (None, None));
        namespaces.departed(7, 2, Departure::Moved);
        assert_eq!(namespaces.appeared(7, 3), None, "another link changed");
        assert_eq!(namespaces.appeared(7, 9).as_deref(), Some("a"), "it may have a new index");
        assert_eq!(namespaces.appeared(7, 2).as_deref(), Some("a"));
        let departure = namespaces.departure("a", 2);
        assert_eq!((departure, namespaces.appeared(7, 2)), (Some(Departure::Returned), None));
        namespaces.departed(7, 2, Departure::Deleted);
        assert_eq!(namespaces.appeared(7, 9), None);
    }

    #[test]
    fn a_program_that_creates_links_without_end_uses_bounded_memory() {
        let namespaces = WatchedNamespaces::default();
        namespaces.watch(7, "a", BTreeSet::from([2]), BTreeSet::new());
        for index in 3..100_000 {
            assert_eq!(namespaces.departed(7, index, Departure::Deleted), None);
        }
        assert_eq!(namespaces.lock()[&7].gone.len(), MAX_UNSEEN + 1);
        assert_eq!(namespaces.departed(7, 2, Departure::Moved).as_deref(), Some("a"));
        assert_eq!(namespaces.departure("a", 2), Some(Departure::Moved));
    }

    #[tokio::test]
    async fn changes_are_reported_once_and_only_for_recorded_links() {
        let namespaces = WatchedNamespaces::default();
        namespaces.watch(7, "a", BTreeSet::from([2, 3]), BTreeSet::new());
        let removed = |nsid, index| NamespaceLinkEvent::Removed { nsid, index, moved: false };
        let changed = NamespaceLinkEvent::Changed { nsid: Some(7), index: 2 };
        namespaces.apply(&[changed, removed(None, 2), removed(Some(8), 2), removed(Some(7), 4)]);
        assert!(namespaces.changes().now_or_never().is_none());
        namespaces.apply(&[removed(Some(7), 2)]);
        namespaces.apply(&[NamespaceLinkEvent::Overrun]);
        let changes = LinkChanges { pods: BTreeSet::from(["a".to_owned()]), overrun: true };
        assert_eq!(namespaces.changes().now_or_never(), Some(changes));
        assert!(namespaces.changes().now_or_never().is_none());
        namespaces.apply(&[NamespaceLinkEvent::NamespaceRemoved { nsid: 7 }]);
        let changes = LinkChanges { pods: BTreeSet::from(["a".to_owned()]), overrun: false };
        assert_eq!(namespaces.changes().now_or_never(), Some(changes));
        assert!(namespaces.pods().is_empty());
    }

    #[test]
    fn links_of_the_host_may_repair_failed_attempts() {
        let repairs = Repairs::default();
        let (namespaces, mut received) = (WatchedNamespaces::new(repairs.clone()), repairs.subscribe());
        let changed = |nsid| NamespaceLinkEvent::Changed { nsid, index: 2 };
        for (event, expected) in
            [(changed(Some(7)), false), (changed(None), true), (NamespaceLinkEvent::Overrun, true)]
        {
            namespaces.apply(&[event]);
            assert_eq!(received.changed().now_or_never().is_some(), expected, "{event:?}");
        }
    }

    #[test]
    fn an_id_that_the_kernel_gives_to_another_namespace_has_no_history() {
        let namespaces = WatchedNamespaces::default();
        namespaces.watch(7, "a", BTreeSet::from([2]), BTreeSet::new());
        namespaces.departed(7, 2, Departure::Deleted);
        namespaces.watch(7, "b", BTreeSet::from([2]), BTreeSet::new());
        assert_eq!((namespaces.departure("a", 2), namespaces.departure("b", 2)), (None, None));
        namespaces.watch(9, "b", BTreeSet::from([2]), BTreeSet::new());
        assert_eq!(namespaces.departed(7, 2, Departure::Deleted), None, "the pod has a new sandbox");
        namespaces.forget("b");
        assert!(namespaces.pods().is_empty());
    }
}
