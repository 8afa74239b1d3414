//! Who uses which attachment: the index that deletion and admission ask.
//!
//! Fed with every pod, workload and virtual machine as it comes and goes; keeps names only. What it answers costs as much
//! as there are users of the attachments in question, however large the cluster is.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeSet, HashMap, HashSet, hash_map},
    fmt,
    sync::Arc,
};

use api::selection::{self, NadRef};

/// The kinds that can use a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
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

impl Kind {
    /// All of them.
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

    /// Its name in manifests.
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

    /// Its API group.
    pub fn group(self) -> &'static str {
        match self {
            Self::CronJob | Self::Job => "batch",
            Self::DaemonSet | Self::Deployment | Self::ReplicaSet | Self::StatefulSet => "apps",
            Self::Pod => "",
            Self::VirtualMachine | Self::VirtualMachineInstance => "kubevirt.io",
        }
    }

    /// The kind that is called so, if it is one of these.
    pub fn find(group: &str, name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.group() == group && kind.name() == name)
    }
}

/// An object that may use networks, as far as anything is decided by it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    pub namespace: String,
    pub name: String,
    /// The annotation that names networks: the pod's own, or that of the template.
    pub networks: Option<String>,
    /// The annotation that names the default network.
    pub default_network: Option<String>,
    /// The networks that a virtual machine names.
    pub multus: Vec<String>,
    /// It has run to its end, for good.
    pub finished: bool,
    /// What controls it, if that is of a kind which is indexed itself.
    pub owner: Option<(Kind, String)>,
}

impl Facts {
    /// The attachments that it names, sorted, each once, and no more than an object may name.
    pub fn references(&self) -> Vec<NadRef> {
        let annotated =
            selection::nad_refs(self.networks.as_deref(), self.default_network.as_deref(), &self.namespace);
        let multus = self.multus.iter().filter_map(|name| NadRef::parse(name, &self.namespace));
        selection::limit_nad_refs(annotated.into_iter().chain(multus))
    }

    /// Whether it counts as a user of what it names. A pod always does while it lives; what something else makes is
    /// counted through that.
    pub fn counts(&self, kind: Kind) -> bool {
        !self.finished && (kind == Kind::Pod || self.owner.is_none())
    }
}

/// A user. Ordered by kind, namespace and name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct User {
    pub kind: Kind,
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.kind.name(), self.namespace, self.name)
    }
}

/// The users of one network: how many, and the first of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Summary {
    pub count: usize,
    pub first: Vec<User>,
}

/// The index.
#[derive(Debug, Default)]
pub struct Index {
    objects: HashMap<Arc<User>, Entry>,
    attachments: HashMap<Arc<NadRef>, Users>,
    namespaces: HashSet<Arc<str>>,
    /// How often each kind was listed anew.
    listings: HashMap<Kind, u32>,
}

#[derive(Debug)]
struct Entry {
    references: Box<[Arc<NadRef>]>,
    counts: bool,
    /// The listing that it was last seen in.
    listing: u32,
}

/// Those who use one attachment. Anybody can make up names, and each has one user then: that one takes no set.
#[derive(Debug)]
enum Users {
    One { user: Arc<User>, several: bool },
    Many(Box<Crowd>),
}

#[derive(Debug, Default)]
struct Crowd {
    all: BTreeSet<Arc<User>>,
    /// Those that name another attachment too, and so may be met twice.
    several: BTreeSet<Arc<User>>,
}

impl Users {
    /// One more, who is not there yet.
    fn add(&mut self, user: Arc<User>, several: bool) {
        let crowd = match self {
            Self::Many(crowd) => crowd,
            Self::One { user: first, several: also } => {
                let mut crowd = Box::<Crowd>::default();
                crowd.add(first.clone(), *also);
                *self = Self::Many(crowd);
                return self.add(user, several);
            }
        };
        crowd.add(user, several);
    }

    /// One less; says whether nobody is left.
    fn remove(&mut self, user: &User) -> bool {
        match self {
            Self::One { user: only, .. } => **only == *user,
            Self::Many(crowd) => {
                crowd.all.remove(user);
                crowd.several.remove(user);
                crowd.all.is_empty()
            }
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::One { .. } => 1,
            Self::Many(crowd) => crowd.all.len(),
        }
    }

    fn first(&self, count: usize) -> impl Iterator<Item = &User> {
        let (one, many) = match self {
            Self::One { user, .. } => (Some(user), None),
            Self::Many(crowd) => (None, Some(&crowd.all)),
        };
        one.into_iter().chain(many.into_iter().flatten()).take(count).map(|user| &**user)
    }

    fn several(&self) -> impl Iterator<Item = &User> {
        let (one, many) = match self {
            Self::One { user, several } => (several.then_some(user), None),
            Self::Many(crowd) => (None, Some(&crowd.several)),
        };
        one.into_iter().chain(many.into_iter().flatten()).map(|user| &**user)
    }
}

impl Crowd {
    fn add(&mut self, user: Arc<User>, several: bool) {
        if several {
            self.several.insert(user.clone());
        }
        self.all.insert(user);
    }
}

impl Index {
    /// Takes in an object as it is now, and says whether that is news. One that names nothing takes no room.
    pub fn apply(&mut self, kind: Kind, facts: &Facts) -> bool {
        let references = facts.references();
        if references.is_empty() {
            return self.delete(kind, &facts.namespace, &facts.name);
        }
        let user = self.user(kind, &facts.namespace, &facts.name);
        let counts = facts.counts(kind);
        let listing = self.listings.get(&kind).copied().unwrap_or_default();
        if let Some(old) = self.objects.get_mut(&user)
            && old.counts == counts
            && old.references.iter().map(|one| &**one).eq(&references)
        {
            old.listing = listing;
            return false;
        }
        self.remove(&user);
        let references: Box<[_]> = references.into_iter().map(|one| self.reference(one)).collect();
        if counts {
            let several = references.len() > 1;
            for reference in &references {
                let user = user.clone();
                match self.attachments.entry(reference.clone()) {
                    hash_map::Entry::Occupied(mut users) => users.get_mut().add(user, several),
                    hash_map::Entry::Vacant(empty) => _ = empty.insert(Users::One { user, several }),
                }
            }
        }
        self.objects.insert(user, Entry { references, counts, listing });
        true
    }

    /// Forgets an object, and says whether it was known.
    pub fn delete(&mut self, kind: Kind, namespace: &str, name: &str) -> bool {
        let user = User { kind, namespace: namespace.into(), name: name.into() };
        self.remove(&user)
    }

    /// A new list of this kind begins: what it does not name has gone when it ends.
    pub fn begin(&mut self, kind: Kind) {
        *self.listings.entry(kind).or_default() += 1;
    }

    /// The list is complete; says whether anything has gone.
    pub fn end(&mut self, kind: Kind) -> bool {
        let listing = self.listings.get(&kind).copied().unwrap_or_default();
        let gone = |(user, entry): (&Arc<User>, &Entry)| {
            (user.kind == kind && entry.listing != listing).then(|| user.clone())
        };
        let gone: Vec<Arc<User>> = self.objects.iter().filter_map(gone).collect();
        for user in &gone {
            self.remove(user);
        }
        !gone.is_empty()
    }

    /// Forgets all objects of a kind, because the kind itself is gone.
    pub fn clear(&mut self, kind: Kind) -> bool {
        self.begin(kind);
        self.end(kind)
    }

    /// The users of any of these attachments, each counted once, and the first of them in order.
    pub fn summary<'a>(&self, attachments: impl IntoIterator<Item = &'a NadRef>, first: usize) -> Summary {
        let found: Vec<&Users> = attachments.into_iter().filter_map(|it| self.attachments.get(it)).collect();
        if let [only] = found[..] {
            return Summary { count: only.len(), first: only.first(first).cloned().collect() };
        }
        let mut met = HashSet::new();
        let mut count = 0;
        let mut heads = BTreeSet::new();
        for users in found {
            let again = users.several().filter(|user| !met.insert(*user)).count();
            count += users.len() - again;
            heads.extend(users.first(first));
        }
        Summary { count, first: heads.into_iter().take(first).cloned().collect() }
    }

    /// What this object, as last seen, names; it need not count as a user itself.
    pub fn named(&self, kind: Kind, namespace: &str, name: &str) -> impl Iterator<Item = &NadRef> {
        let user = User { kind, namespace: namespace.into(), name: name.into() };
        let entry = self.objects.get(&user);
        entry.into_iter().flat_map(|entry| &entry.references).map(|one| &**one)
    }

    /// How many objects name a network at all.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Whether nobody names any network.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    fn remove(&mut self, user: &User) -> bool {
        let Some(entry) = self.objects.remove(user) else { return false };
        for reference in entry.references.iter().filter(|_| entry.counts) {
            let Some(users) = self.attachments.get_mut(reference) else { continue };
            if users.remove(user) {
                self.attachments.remove(reference);
            }
        }
        true
    }

    /// Namespaces are few and named often: each is kept once.
    fn user(&mut self, kind: Kind, namespace: &str, name: &str) -> Arc<User> {
        let known = self.namespaces.get(namespace).cloned();
        let namespace = known.unwrap_or_else(|| {
            let namespace: Arc<str> = namespace.into();
            self.namespaces.insert(namespace.clone());
            namespace
        });
        Arc::new(User { kind, namespace, name: name.into() })
    }

    fn reference(&self, reference: NadRef) -> Arc<NadRef> {
        match self.attachments.get_key_value(&reference) {
            Some((known, _)) => known.clone(),
            None => Arc::new(reference),
        }
    }
}
