//! The users of each NetworkAttachmentDefinition (NAD): the index that deletion and admission query.
//!
//! The watches of pods, workloads and virtual machines update it; it stores only names. A query costs as much as the NADs in
//! question have users, however large the cluster is.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, hash_map},
    fmt,
    ops::Bound,
    sync::Arc,
};

use api::selection::{NadRef, NetworkSelection};

/// The namespace in which Multus looks up a default network without a namespace.
const MULTUS_NAMESPACE: &str = "kube-system";
/// The maximum number of NADs that count as used by one object. No pod has that many interfaces, and the bound limits
/// the memory that an object with invented names can take.
pub const MAX_NAD_REFS: usize = 64;

/// A kind that can use a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkloadKind {
    CronJob,
    DaemonSet,
    Deployment,
    Job,
    Pod,
    ReplicaSet,
    StatefulSet,
    VirtualMachine,
    VirtualMachineInstance,
}

impl WorkloadKind {
    pub const ALL: [Self; 9] = [
        Self::CronJob,
        Self::DaemonSet,
        Self::Deployment,
        Self::Job,
        Self::Pod,
        Self::ReplicaSet,
        Self::StatefulSet,
        Self::VirtualMachine,
        Self::VirtualMachineInstance,
    ];

    /// The kind in manifests.
    pub fn name(self) -> &'static str {
        match self {
            Self::CronJob => "CronJob",
            Self::DaemonSet => "DaemonSet",
            Self::Deployment => "Deployment",
            Self::Job => "Job",
            Self::Pod => "Pod",
            Self::ReplicaSet => "ReplicaSet",
            Self::StatefulSet => "StatefulSet",
            Self::VirtualMachine => "VirtualMachine",
            Self::VirtualMachineInstance => "VirtualMachineInstance",
        }
    }

    /// The API group.
    pub fn group(self) -> &'static str {
        match self {
            Self::CronJob | Self::Job => "batch",
            Self::DaemonSet | Self::Deployment | Self::ReplicaSet | Self::StatefulSet => "apps",
            Self::Pod => "",
            Self::VirtualMachine | Self::VirtualMachineInstance => "kubevirt.io",
        }
    }

    /// The kind with this group and name.
    pub fn find(group: &str, name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.group() == group && kind.name() == name)
    }
}

/// The part of a pod, workload or virtual machine that decides which NADs it uses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WorkloadRefs {
    pub namespace: String,
    pub name: String,
    /// The networks annotation of the pod or of the pod template.
    pub networks: Option<String>,
    /// The default-network annotation.
    pub default_network: Option<String>,
    /// The multus networks of a virtual machine.
    pub multus: Vec<String>,
    /// It has completed and does not run again.
    pub finished: bool,
    /// The controlling owner, if its kind is indexed.
    pub owner: Option<(WorkloadKind, String)>,
}

impl WorkloadRefs {
    /// The NADs that it names: sorted, without duplicates, limited to [`MAX_NAD_REFS`].
    pub fn references(&self) -> Vec<NadRef> {
        let annotated = nad_refs(self.networks.as_deref(), self.default_network.as_deref(), &self.namespace);
        let multus = self.multus.iter().filter_map(|name| NadRef::parse(name, &self.namespace));
        limit_nad_refs(annotated.into_iter().chain(multus))
    }

    /// Whether it counts as a user. A pod does until it has finished; any other object with an owner is counted through that
    /// owner.
    pub fn is_user(&self, kind: WorkloadKind) -> bool {
        !self.finished && (kind == WorkloadKind::Pod || self.owner.is_none())
    }
}

/// The NADs that an object of this namespace references in its two annotations, sorted and without duplicates, at most
/// [`MAX_NAD_REFS`].
///
/// Multus looks up a default network without a namespace in its own namespace; other consumers may use the pod's. Both
/// count.
fn nad_refs(networks: Option<&str>, default: Option<&str>, namespace: &str) -> Vec<NadRef> {
    let networks = NetworkSelection::parse(networks);
    let default = NetworkSelection::parse(default);
    let namespaces = [namespace, MULTUS_NAMESPACE];
    let default = default
        .entries
        .iter()
        .flat_map(|entry| namespaces.into_iter().filter_map(|namespace| entry.reference(namespace)));
    limit_nad_refs(default.chain(networks.references(namespace)))
}

/// The first [`MAX_NAD_REFS`] of these references, sorted and without duplicates.
fn limit_nad_refs(references: impl IntoIterator<Item = NadRef>) -> Vec<NadRef> {
    let mut found = BTreeSet::new();
    for reference in references {
        if found.len() >= MAX_NAD_REFS {
            break;
        }
        found.insert(reference);
    }
    found.into_iter().collect()
}

/// An object that uses a NAD. Ordered by kind, namespace and name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct User {
    pub kind: WorkloadKind,
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.kind.name(), self.namespace, self.name)
    }
}

/// The number of users of a network, and the first of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UserSummary {
    pub count: usize,
    pub first: Vec<User>,
}

/// Answers which objects use a network. [`UserIndex`] does, and so does a handle that locks one for each query.
pub trait UserLookup {
    /// The users of any of these NADs, each counted once, and the first of them in order.
    fn summary(&self, nads: &BTreeSet<NadRef>, first: usize) -> UserSummary;

    /// Whether the NAD has a user.
    fn is_used(&self, nad: &NadRef) -> bool;

    /// The NADs that an indexed object names, whether or not it counts as a user.
    fn references_of(&self, kind: WorkloadKind, namespace: &str, name: &str) -> Vec<NadRef>;
}

impl UserLookup for UserIndex {
    fn summary(&self, nads: &BTreeSet<NadRef>, first: usize) -> UserSummary {
        Self::summary(self, nads, first)
    }

    fn is_used(&self, nad: &NadRef) -> bool {
        self.nads.contains_key(nad)
    }

    fn references_of(&self, kind: WorkloadKind, namespace: &str, name: &str) -> Vec<NadRef> {
        Self::references_of(self, kind, namespace, name).cloned().collect()
    }
}

/// The users by NAD, and the NADs by user.
#[derive(Debug, Default)]
pub struct UserIndex {
    /// Ordered, so that a relist can be finished in batches.
    objects: BTreeMap<Arc<User>, IndexEntry>,
    nads: HashMap<Arc<NadRef>, NadUsers>,
    namespaces: HashSet<Arc<str>>,
    /// The number of relists of each kind.
    relists: HashMap<WorkloadKind, u32>,
}

/// The result of a batch of [`UserIndex::remove_unlisted`].
#[derive(Debug)]
pub struct RelistBatch {
    /// Whether objects were removed.
    pub removed: bool,
    /// Where the next batch starts; None after the last one.
    pub next: Option<Arc<User>>,
}

/// A summary that is computed in batches: see [`UserIndex::advance`].
#[derive(Debug)]
pub struct SummaryQuery<'a> {
    /// The NADs that are left; the last one is in progress.
    nads: Vec<&'a NadRef>,
    /// The last visited user of that NAD.
    after: Option<Arc<User>>,
    first: usize,
    /// The users of the last batch that name several NADs.
    visited: Vec<Arc<User>>,
    /// The users of earlier batches that name several NADs.
    seen: HashSet<Arc<User>>,
    count: usize,
    first_users: BTreeSet<User>,
}

impl<'a> SummaryQuery<'a> {
    pub fn new(nads: impl IntoIterator<Item = &'a NadRef>, first: usize) -> Self {
        Self {
            nads: nads.into_iter().collect(),
            after: None,
            first,
            visited: Vec::new(),
            seen: HashSet::new(),
            count: 0,
            first_users: BTreeSet::new(),
        }
    }

    /// Counts the users of the last batch that name several NADs once. Call after each batch, without a lock on the index:
    /// the set of users may grow.
    pub fn count_visited(&mut self) {
        for user in self.visited.drain(..) {
            if !self.seen.insert(user) {
                self.count = self.count.saturating_sub(1);
            }
        }
    }

    /// The result, once the query is complete.
    pub fn summary(mut self) -> UserSummary {
        self.count_visited();
        UserSummary { count: self.count, first: self.first_users.into_iter().take(self.first).collect() }
    }

    /// Continues with the next NAD. Returns whether none is left.
    fn next_nad(&mut self) -> bool {
        self.after = None;
        self.nads.pop();
        self.nads.is_empty()
    }
}

#[derive(Debug)]
struct IndexEntry {
    references: Box<[Arc<NadRef>]>,
    is_user: bool,
    /// The last relist that contained the object.
    relist: u32,
}

/// The users of one NAD. Anyone can create pods that name many nonexistent NADs, so a single user needs no set.
#[derive(Debug)]
enum NadUsers {
    One { user: Arc<User>, names_several: bool },
    Many(Box<UserSet>),
}

#[derive(Debug, Default)]
struct UserSet {
    all: BTreeSet<Arc<User>>,
    /// The users that name more than one NAD, so that a query over several NADs may find them twice.
    names_several: BTreeSet<Arc<User>>,
}

impl NadUsers {
    /// Adds a user that is not in the set.
    fn add(&mut self, user: Arc<User>, names_several: bool) {
        let set = match self {
            Self::Many(set) => set,
            Self::One { user: first, names_several: also } => {
                let mut set = Box::<UserSet>::default();
                set.add(first.clone(), *also);
                *self = Self::Many(set);
                return self.add(user, names_several);
            }
        };
        set.add(user, names_several);
    }

    /// Removes a user and returns whether none is left.
    fn remove(&mut self, user: &User) -> bool {
        match self {
            Self::One { user: only, .. } => **only == *user,
            Self::Many(set) => {
                set.all.remove(user);
                set.names_several.remove(user);
                set.all.is_empty()
            }
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::One { .. } => 1,
            Self::Many(set) => set.all.len(),
        }
    }

    fn first(&self, count: usize) -> impl Iterator<Item = &User> {
        let (one, many) = match self {
            Self::One { user, .. } => (Some(user), None),
            Self::Many(set) => (None, Some(&set.all)),
        };
        one.into_iter().chain(many.into_iter().flatten()).take(count).map(|user| &**user)
    }

    /// The users after `after` that name several NADs.
    fn names_several(&self, after: Option<&User>) -> impl Iterator<Item = &Arc<User>> {
        let (one, many) = match self {
            Self::One { user, names_several } => (names_several.then_some(user), None),
            Self::Many(set) => (None, Some(&set.names_several)),
        };
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let one = one.filter(move |user| after.is_none_or(|after| ***user > *after));
        let many = many.into_iter().flat_map(move |set| set.range::<User, _>((start, Bound::Unbounded)));
        one.into_iter().chain(many)
    }
}

impl UserSet {
    fn add(&mut self, user: Arc<User>, names_several: bool) {
        if names_several {
            self.names_several.insert(user.clone());
        }
        self.all.insert(user);
    }
}

impl UserIndex {
    /// Updates an object and returns whether that changed the index. An object that names no NAD is not stored.
    pub fn apply(&mut self, kind: WorkloadKind, refs: &WorkloadRefs) -> bool {
        self.apply_parsed(kind, refs, refs.references())
    }

    /// [`UserIndex::apply`] for a caller that has parsed the references already, which may take long.
    pub fn apply_parsed(&mut self, kind: WorkloadKind, refs: &WorkloadRefs, references: Vec<NadRef>) -> bool {
        if references.is_empty() {
            return self.delete(kind, &refs.namespace, &refs.name);
        }
        let user = self.user(kind, &refs.namespace, &refs.name);
        let is_user = refs.is_user(kind);
        let relist = self.relists.get(&kind).copied().unwrap_or_default();
        if let Some(old) = self.objects.get_mut(&user)
            && old.is_user == is_user
            && old.references.iter().map(|one| &**one).eq(&references)
        {
            old.relist = relist;
            return false;
        }
        self.remove(&user);
        let references: Box<[_]> = references.into_iter().map(|one| self.reference(one)).collect();
        if is_user {
            let names_several = references.len() > 1;
            for reference in &references {
                let user = user.clone();
                match self.nads.entry(reference.clone()) {
                    hash_map::Entry::Occupied(mut users) => users.get_mut().add(user, names_several),
                    hash_map::Entry::Vacant(empty) => _ = empty.insert(NadUsers::One { user, names_several }),
                }
            }
        }
        self.objects.insert(user, IndexEntry { references, is_user, relist });
        true
    }

    /// Removes an object and returns whether it was in the index.
    pub fn delete(&mut self, kind: WorkloadKind, namespace: &str, name: &str) -> bool {
        let user = User { kind, namespace: namespace.into(), name: name.into() };
        self.remove(&user)
    }

    /// Starts a relist of this kind. [`UserIndex::finish_relist`] removes the objects that it does not contain.
    pub fn start_relist(&mut self, kind: WorkloadKind) {
        *self.relists.entry(kind).or_default() += 1;
    }

    /// Finishes a relist and returns whether objects were removed.
    pub fn finish_relist(&mut self, kind: WorkloadKind) -> bool {
        self.remove_unlisted(kind, None, usize::MAX).removed
    }

    /// One batch of [`UserIndex::finish_relist`]: checks at most `limit` objects after `after`.
    pub fn remove_unlisted(
        &mut self,
        kind: WorkloadKind,
        after: Option<&Arc<User>>,
        limit: usize,
    ) -> RelistBatch {
        let relist = self.relists.get(&kind).copied().unwrap_or_default();
        let start = User { kind, namespace: "".into(), name: "".into() };
        let start = after.map_or(Bound::Included(&start), |after| Bound::Excluded(&**after));
        let rest = self.objects.range::<User, _>((start, Bound::Unbounded));
        let mut batch = rest.take_while(|(user, _)| user.kind == kind);
        let (mut next, mut unlisted) = (None, Vec::new());
        for (user, entry) in batch.by_ref().take(limit) {
            next = Some(user.clone());
            if entry.relist != relist {
                unlisted.push(user.clone());
            }
        }
        let next = next.filter(|_| batch.next().is_some());
        for user in &unlisted {
            self.remove(user);
        }
        RelistBatch { removed: !unlisted.is_empty(), next }
    }

    /// Removes all objects of a kind that no longer exists.
    pub fn clear(&mut self, kind: WorkloadKind) -> bool {
        self.start_relist(kind);
        self.finish_relist(kind)
    }

    /// The users of any of these NADs, each counted once, and the first of them in order.
    pub fn summary<'a>(&self, nads: impl IntoIterator<Item = &'a NadRef>, first: usize) -> UserSummary {
        let mut query = SummaryQuery::new(nads, first);
        while !self.advance(&mut query, usize::MAX) {
            query.count_visited();
        }
        query.summary()
    }

    /// One batch of [`UserIndex::summary`]: visits at most `limit` users. Returns whether the summary is complete. A change
    /// of the index between two batches may be counted or not.
    pub fn advance(&self, query: &mut SummaryQuery<'_>, limit: usize) -> bool {
        let Some(nad) = query.nads.last() else { return true };
        let Some(users) = self.nads.get(*nad) else {
            return query.next_nad();
        };
        if query.after.is_none() {
            query.count += users.len();
            query.first_users.extend(users.first(query.first).cloned());
            // A user that names several NADs of the query is counted for each of them.
            if query.nads.len() == 1 && query.seen.is_empty() && query.visited.is_empty() {
                return query.next_nad();
            }
        }
        let (after, mut visited) = (query.after.take(), 0);
        for user in users.names_several(after.as_deref()).take(limit) {
            visited += 1;
            query.visited.push(user.clone());
            query.after = Some(user.clone());
        }
        if visited == limit { false } else { query.next_nad() }
    }

    /// The NADs that an indexed object names, whether or not it counts as a user.
    pub fn references_of(
        &self,
        kind: WorkloadKind,
        namespace: &str,
        name: &str,
    ) -> impl Iterator<Item = &NadRef> {
        let user = User { kind, namespace: namespace.into(), name: name.into() };
        let entry = self.objects.get(&user);
        entry.into_iter().flat_map(|entry| &entry.references).map(|one| &**one)
    }

    /// The number of objects that name any NAD.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Whether no object names any NAD.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    fn remove(&mut self, user: &User) -> bool {
        let Some(entry) = self.objects.remove(user) else { return false };
        for reference in entry.references.iter().filter(|_| entry.is_user) {
            let Some(users) = self.nads.get_mut(reference) else { continue };
            if users.remove(user) {
                self.nads.remove(reference);
            }
        }
        true
    }

    /// Interns the namespace: there are few, and each has many users.
    fn user(&mut self, kind: WorkloadKind, namespace: &str, name: &str) -> Arc<User> {
        let interned = self.namespaces.get(namespace).cloned();
        let namespace = interned.unwrap_or_else(|| {
            let namespace: Arc<str> = namespace.into();
            self.namespaces.insert(namespace.clone());
            namespace
        });
        Arc::new(User { kind, namespace, name: name.into() })
    }

    fn reference(&self, reference: NadRef) -> Arc<NadRef> {
        match self.nads.get_key_value(&reference) {
            Some((known, _)) => known.clone(),
            None => Arc::new(reference),
        }
    }
}
