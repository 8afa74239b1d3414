//! Questions to the API server itself, for what must not be decided on a cache: pages of lists that are as new as can be.
//!
//! They are asked together, once for all that has to be decided: however many networks go, everything is listed once.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
    sync::Arc,
};

use api::{bridgenetwork::FINALIZER_USERS, selection::NadRef};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, Resource,
    api::ListParams,
    core::{ApiResource, ObjectList, Request},
};
use plan::users::{Facts, Kind};
use serde::de::DeserializeOwned;

use crate::{
    call::{self, Line},
    follow::LIVE_PODS,
    metrics::{Call, Metrics},
    object::{self, AttachmentObject, NetworkObject, NodeObject, PodObject, ReportObject, WorkloadObject},
};

/// Large enough that most lists are one answer, small enough that none is a burden.
const PAGE: u32 = 2000;
/// NodeNetworks are larger than other objects.
const SMALL_PAGE: u32 = 50;
/// Who uses what was not asked for: nothing is taken away from them.
const NOBODY_KNOWS: &str = "somebody who was not looked for";

/// What has to be known.
#[derive(Debug, Default)]
pub struct Question {
    /// The networks, by UID, whose attachments have to be gone before anybody looks for users.
    pub emptied: BTreeSet<String>,
    /// The attachments whose users are looked for.
    pub attachments: BTreeSet<NadRef>,
    /// The networks, by UID, that nodes may list.
    pub undone: BTreeSet<String>,
    /// The networks, by UID, that may be no more.
    pub lost: BTreeSet<String>,
}

type Answer<T> = Result<T, Arc<call::Error>>;

/// What the API server said. What was not asked is answered so that nothing is taken away.
#[derive(Debug)]
pub struct Answers {
    question: Question,
    left: Answer<BTreeSet<String>>,
    users: Answer<BTreeMap<NadRef, String>>,
    nodes: Answer<BTreeMap<String, String>>,
    networks: Answer<BTreeSet<String>>,
}

impl Answers {
    /// To no question at all.
    pub fn none() -> Self {
        Self {
            question: Question::default(),
            left: Ok(BTreeSet::new()),
            users: Ok(BTreeMap::new()),
            nodes: Ok(BTreeMap::new()),
            networks: Ok(BTreeSet::new()),
        }
    }

    /// Whether there is an attachment that bears the mark of this network.
    pub fn is_left(&self, uid: &str) -> Answer<bool> {
        let left = self.left.as_ref().map_err(Arc::clone)?;
        Ok(!self.question.emptied.contains(uid) || left.contains(uid))
    }

    /// One that uses any of these attachments, if there is one.
    pub fn user(&self, attachments: &BTreeSet<NadRef>) -> Answer<Option<&str>> {
        let users = self.users.as_ref().map_err(Arc::clone)?;
        if !attachments.is_subset(&self.question.attachments) {
            return Ok(Some(NOBODY_KNOWS));
        }
        Ok(attachments.iter().find_map(|at| users.get(at)).map(String::as_str))
    }

    /// A node that lists the network, if there is one.
    pub fn node(&self, uid: &str) -> Answer<Option<&str>> {
        let nodes = self.nodes.as_ref().map_err(Arc::clone)?;
        if !self.question.undone.contains(uid) {
            return Ok(Some(NOBODY_KNOWS));
        }
        Ok(nodes.get(uid).map(String::as_str))
    }

    /// Whether there is a network of this UID.
    pub fn lives(&self, uid: &str) -> Answer<bool> {
        let networks = self.networks.as_ref().map_err(Arc::clone)?;
        Ok(!self.question.lost.contains(uid) || networks.contains(uid))
    }
}

/// The API server, asked directly.
pub struct Direct {
    client: Client,
    line: Line,
}

impl Direct {
    pub fn new(client: Client, metrics: Arc<Metrics>) -> Self {
        Self { client, line: Line::new(metrics, Call::List, call::DEADLINE) }
    }

    /// Asks for all of it; of the nodes, only for those that exist. Users are looked for only when it is known which
    /// attachments are left: a user that is not found then came when they had gone.
    pub async fn ask(&self, question: Question, exists: impl Fn(&str) -> bool) -> Answers {
        let left = self.attached(&question.emptied).await.map_err(Arc::new);
        let (users, nodes, networks) = futures::join!(
            self.users(&question.attachments),
            self.nodes(&question.undone, exists),
            self.networks(&question.lost),
        );
        Answers {
            left,
            users: users.map_err(Arc::new),
            nodes: nodes.map_err(Arc::new),
            networks: networks.map_err(Arc::new),
            question,
        }
    }

    /// Those of these networks that have attachments.
    async fn attached(&self, networks: &BTreeSet<String>) -> Result<BTreeSet<String>, call::Error> {
        let mut left = BTreeSet::new();
        if networks.is_empty() {
            return Ok(left);
        }
        let api = self.all::<AttachmentObject>(&object::attachments());
        let look = |it| {
            if let Some((at, one)) = object::attachment(it)
                && let Some(uid) = one.made_by(&at).filter(|uid| networks.contains(*uid))
            {
                left.insert(uid.to_owned());
            }
        };
        self.each(api, ListParams::default().limit(PAGE), look).await?;
        Ok(left)
    }

    /// Those of these attachments that are used, each with one who does.
    async fn users(&self, attachments: &BTreeSet<NadRef>) -> Result<BTreeMap<NadRef, String>, call::Error> {
        if attachments.is_empty() {
            return Ok(BTreeMap::new());
        }
        let kinds = Kind::ALL.map(|kind| self.users_of(kind, attachments));
        let found = futures::future::try_join_all(kinds).await?;
        Ok(found.into_iter().flatten().collect())
    }

    async fn users_of(
        &self,
        kind: Kind,
        attachments: &BTreeSet<NadRef>,
    ) -> Result<BTreeMap<NadRef, String>, call::Error> {
        let mut used = BTreeMap::new();
        let params = ListParams::default().limit(PAGE);
        if kind == Kind::Pod {
            let look = |pod| used.extend(uses(kind, &object::listed_pod(pod), attachments));
            self.pages(|params| self.pods(params), params.fields(LIVE_PODS), look).await?;
        } else {
            let api = self.all::<WorkloadObject>(&object::workloads(kind));
            self.each(api, params, |it| used.extend(uses(kind, &object::workload(kind, it), attachments)))
                .await?;
        }
        Ok(used)
    }

    /// Those of these networks that a node lists, each with one that does.
    async fn nodes(
        &self,
        networks: &BTreeSet<String>,
        exists: impl Fn(&str) -> bool,
    ) -> Result<BTreeMap<String, String>, call::Error> {
        let mut listed = BTreeMap::new();
        if networks.is_empty() {
            return Ok(listed);
        }
        let api = self.all::<ReportObject>(&object::reports());
        let look = |it| {
            let Some((node, report)) = object::report(it).filter(|(node, _)| exists(node)) else { return };
            let uids = report.networks.into_keys().filter(|uid| networks.contains(uid));
            listed.extend(uids.map(|uid| (uid, node.clone())));
        };
        self.each(api, ListParams::default().limit(SMALL_PAGE), look).await?;
        Ok(listed)
    }

    /// Those of these networks that there are.
    async fn networks(&self, wanted: &BTreeSet<String>) -> Result<BTreeSet<String>, call::Error> {
        let mut live = BTreeSet::new();
        if wanted.is_empty() {
            return Ok(live);
        }
        let api = self.all::<NetworkObject>(&object::networks());
        let look = |it: NetworkObject| live.extend(it.metadata.uid.filter(|uid| wanted.contains(uid)));
        self.each(api, ListParams::default().limit(PAGE), look).await?;
        Ok(live)
    }

    /// Whether there is this Node.
    pub async fn has_node(&self, name: &str, uid: &str) -> Result<bool, call::Error> {
        let mut found = false;
        let api = self.all::<NodeObject>(&object::nodes());
        let params = ListParams::default().fields(&format!("metadata.name={name}"));
        self.each(api, params, |it| found |= it.metadata.uid.as_deref() == Some(uid)).await?;
        Ok(found)
    }

    /// Whether there is this network, and pods can join it.
    pub async fn is_joined(&self, uid: &str) -> Result<bool, call::Error> {
        let mut found = false;
        let api = self.all::<NetworkObject>(&object::networks());
        let look = |it: NetworkObject| {
            let held = it.metadata.finalizers.iter().flatten().any(|one| one == FINALIZER_USERS);
            let going = it.metadata.deletion_timestamp.is_some() && !held;
            found |= it.metadata.uid.as_deref() == Some(uid) && !going;
        };
        self.each(api, ListParams::default().limit(PAGE), look).await?;
        Ok(found)
    }

    fn all<K: Resource<DynamicType = ApiResource>>(&self, resource: &ApiResource) -> Api<K> {
        Api::all_with(self.client.clone(), resource)
    }

    /// A page of the metadata of pods: in large clusters there is nothing that there is more of.
    async fn pods(&self, params: ListParams) -> kube::Result<ObjectList<PodObject>> {
        let request = Request::new(Pod::url_path(&(), None)).list_metadata(&params);
        self.client.request(request.map_err(kube::Error::BuildRequest)?).await
    }

    async fn each<K: Clone + Debug + DeserializeOwned>(
        &self,
        api: Api<K>,
        params: ListParams,
        look: impl FnMut(K),
    ) -> Result<(), call::Error> {
        let page = |params| {
            let api = api.clone();
            async move { api.list(&params).await }
        };
        self.pages(page, params, look).await
    }

    /// Looks at every object, page by page. A kind that does not exist has none.
    async fn pages<K: Clone, F: Future<Output = kube::Result<ObjectList<K>>>>(
        &self,
        page: impl Fn(ListParams) -> F,
        mut params: ListParams,
        mut look: impl FnMut(K),
    ) -> Result<(), call::Error> {
        loop {
            let list = match self.line.read(page(params.clone())).await {
                Err(call::Error::Refused(kube::Error::Api(status))) if status.code == 404 => return Ok(()),
                list => list?,
            };
            list.items.into_iter().for_each(&mut look);
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(()),
            }
        }
    }
}

/// What the object uses of these, if it counts as a user: judged by the same rule as the index.
fn uses(kind: Kind, facts: &Facts, attachments: &BTreeSet<NadRef>) -> Vec<(NadRef, String)> {
    if !facts.counts(kind) {
        return Vec::new();
    }
    let named = facts.references().into_iter().filter(|one| attachments.contains(one));
    named.map(|one| (one, format!("{} {}/{}", kind.name(), facts.namespace, facts.name))).collect()
}
