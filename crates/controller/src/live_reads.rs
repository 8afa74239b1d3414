//! Consistent reads from the API server, for decisions that a stale cache could get wrong.
//!
//! One query serves all networks of a reconcile, so every kind is listed at most once however many networks are deleted.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
    sync::Arc,
};

use api::{
    bridgenetwork::FINALIZER_USERS,
    ipblock::{CLAIMS_HOLDER_UID, HOLDER_ROLE, NODE_ROLE_LABEL_PREFIX},
    selection::NadRef,
};
use client::{
    request::{self, ApiCall},
    watch::PAGE_SIZE,
};
use futures::FutureExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, Resource,
    api::ListParams,
    core::{ApiResource, ObjectList, Request},
};
use plan::users::{WorkloadKind, WorkloadRefs};
use serde::de::DeserializeOwned;

use crate::{
    cache::{
        project::{
            self, BlockObject, NadObject, NetworkObject, NodeNetworkObject, NodeObject, PodObject,
            WorkloadObject,
        },
        watches::LIVE_PODS,
    },
    metrics::{ApiCallKind, Metrics},
};

/// The user or node of an object that was not in the query, so that nothing of it is removed.
const NOT_QUERIED: &str = "unknown (not queried)";

/// What to read.
#[derive(Debug, Default)]
pub struct LiveQuery {
    /// The UIDs of networks to look up NADs and addresses of IPAMClaims of.
    pub held: BTreeSet<String>,
    /// The NADs to look up users of.
    pub nads: BTreeSet<NadRef>,
    /// The UIDs of networks to look up in NodeNetworks.
    pub listed: BTreeSet<String>,
    /// The UIDs of networks to check for existence.
    pub existing: BTreeSet<String>,
}

type ReadResult<T> = Result<T, Arc<request::Error>>;

/// The results of a [`LiveQuery`]. What was not queried counts as in use.
#[derive(Debug)]
pub struct LiveResults {
    query: LiveQuery,
    nad_owners: ReadResult<BTreeSet<String>>,
    users: ReadResult<BTreeMap<NadRef, String>>,
    nodes: ReadResult<BTreeMap<String, String>>,
    networks: ReadResult<BTreeSet<String>>,
    claimed: ReadResult<BTreeSet<String>>,
}

impl LiveResults {
    /// The results of an empty query.
    pub fn none() -> Self {
        Self {
            query: LiveQuery::default(),
            nad_owners: Ok(BTreeSet::new()),
            users: Ok(BTreeMap::new()),
            nodes: Ok(BTreeMap::new()),
            networks: Ok(BTreeSet::new()),
            claimed: Ok(BTreeSet::new()),
        }
    }

    /// Whether the network owns a NAD, or an IPAMClaim has an address of it.
    pub fn is_held(&self, uid: &str) -> ReadResult<bool> {
        let owners = self.nad_owners.as_ref().map_err(Arc::clone)?;
        let claimed = self.claimed.as_ref().map_err(Arc::clone)?;
        Ok(!self.query.held.contains(uid) || owners.contains(uid) || claimed.contains(uid))
    }

    /// A user of any of these NADs.
    pub fn user_of(&self, nads: &BTreeSet<NadRef>) -> ReadResult<Option<&str>> {
        let users = self.users.as_ref().map_err(Arc::clone)?;
        if !nads.is_subset(&self.query.nads) {
            return Ok(Some(NOT_QUERIED));
        }
        Ok(nads.iter().find_map(|at| users.get(at)).map(String::as_str))
    }

    /// A node whose NodeNetwork lists the network.
    pub fn node_listing(&self, uid: &str) -> ReadResult<Option<&str>> {
        let nodes = self.nodes.as_ref().map_err(Arc::clone)?;
        if !self.query.listed.contains(uid) {
            return Ok(Some(NOT_QUERIED));
        }
        Ok(nodes.get(uid).map(String::as_str))
    }

    /// Whether the network exists.
    pub fn network_exists(&self, uid: &str) -> ReadResult<bool> {
        let networks = self.networks.as_ref().map_err(Arc::clone)?;
        Ok(!self.query.existing.contains(uid) || networks.contains(uid))
    }
}

/// Reads from the API server, past the cache.
pub struct LiveReader {
    client: Client,
    call: ApiCall,
}

impl LiveReader {
    pub fn new(client: Client, metrics: Arc<Metrics>) -> Self {
        Self { client, call: metrics.api_call(ApiCallKind::List) }
    }

    /// Runs the query. NodeNetworks count only if `exists` says that their Node does. NADs are listed before users: a pod
    /// that the list of users misses was created after the NADs were gone.
    pub async fn read(&self, query: LiveQuery, exists: impl Fn(&str) -> bool) -> LiveResults {
        let nad_owners = self.nad_owners(&query.held).await.map_err(Arc::new);
        let (users, nodes, networks, claimed) = futures::join!(
            self.users(&query.nads),
            self.nodes(&query.listed, exists),
            self.networks(&query.existing),
            self.claimed(&query.held).boxed(),
        );
        LiveResults {
            nad_owners,
            users: users.map_err(Arc::new),
            nodes: nodes.map_err(Arc::new),
            networks: networks.map_err(Arc::new),
            claimed: claimed.map_err(Arc::new),
            query,
        }
    }

    /// The networks of these that own NADs.
    async fn nad_owners(&self, networks: &BTreeSet<String>) -> Result<BTreeSet<String>, request::Error> {
        let mut owners = BTreeSet::new();
        if networks.is_empty() {
            return Ok(owners);
        }
        let api = self.all::<NadObject>(&project::nads());
        let visit = |it| {
            if let Some((at, nad)) = project::nad(it)
                && let Some(uid) = nad.owner_uid(&at).filter(|uid| networks.contains(*uid))
            {
                owners.insert(uid.to_owned());
            }
        };
        self.each(api, ListParams::default().limit(PAGE_SIZE), visit).await?;
        Ok(owners)
    }

    /// The NADs of these that are used, each with one user.
    async fn users(&self, nads: &BTreeSet<NadRef>) -> Result<BTreeMap<NadRef, String>, request::Error> {
        if nads.is_empty() {
            return Ok(BTreeMap::new());
        }
        let kinds = WorkloadKind::ALL.map(|kind| self.users_of(kind, nads));
        let found = futures::future::try_join_all(kinds).await?;
        Ok(found.into_iter().flatten().collect())
    }

    async fn users_of(
        &self,
        kind: WorkloadKind,
        nads: &BTreeSet<NadRef>,
    ) -> Result<BTreeMap<NadRef, String>, request::Error> {
        let mut used = BTreeMap::new();
        let params = ListParams::default().limit(PAGE_SIZE);
        if kind == WorkloadKind::Pod {
            let visit = |pod| used.extend(uses(kind, &project::listed_pod(pod), nads));
            self.pages(|params| self.pods(params), params.fields(LIVE_PODS), visit).await?;
        } else {
            let api = self.all::<WorkloadObject>(&project::workloads(kind));
            self.each(api, params, |it| used.extend(uses(kind, &project::workload(kind, it), nads))).await?;
        }
        Ok(used)
    }

    /// The networks of these that NodeNetworks list, each with one node.
    async fn nodes(
        &self,
        networks: &BTreeSet<String>,
        exists: impl Fn(&str) -> bool,
    ) -> Result<BTreeMap<String, String>, request::Error> {
        let mut listed = BTreeMap::new();
        if networks.is_empty() {
            return Ok(listed);
        }
        let api = self.all::<NodeNetworkObject>(&project::node_networks());
        let visit = |it| {
            let Some((node, report)) = project::node_report(it).filter(|(node, _)| exists(node)) else {
                return;
            };
            let uids = report.networks.into_keys().filter(|uid| networks.contains(uid));
            listed.extend(uids.map(|uid| (uid, node.clone())));
        };
        self.each(api, ListParams::default().limit(PAGE_SIZE), visit).await?;
        Ok(listed)
    }

    /// The networks of these that exist.
    async fn networks(&self, uids: &BTreeSet<String>) -> Result<BTreeSet<String>, request::Error> {
        let mut live = BTreeSet::new();
        if uids.is_empty() {
            return Ok(live);
        }
        let api = self.all::<NetworkObject>(&project::networks());
        let visit = |it: NetworkObject| live.extend(it.metadata.uid.filter(|uid| uids.contains(uid)));
        self.each(api, ListParams::default().limit(PAGE_SIZE), visit).await?;
        Ok(live)
    }

    /// The networks of these that have addresses of IPAMClaims.
    async fn claimed(&self, uids: &BTreeSet<String>) -> Result<BTreeSet<String>, request::Error> {
        let mut claimed = BTreeSet::new();
        if uids.is_empty() {
            return Ok(claimed);
        }
        let api = self.all::<BlockObject>(&project::blocks());
        let label = format!("{NODE_ROLE_LABEL_PREFIX}{CLAIMS_HOLDER_UID}={HOLDER_ROLE}");
        let visit = |it| {
            let Some((_, block)) = project::block(it) else { return };
            let network = block.object.spec.network_uid;
            if !block.object.status.claims.is_empty() && uids.contains(&network) {
                claimed.insert(network);
            }
        };
        self.each(api, ListParams::default().limit(PAGE_SIZE).labels(&label), visit).await?;
        Ok(claimed)
    }

    /// Whether the Node exists.
    pub async fn node_exists(&self, name: &str, uid: &str) -> Result<bool, request::Error> {
        let mut found = false;
        let api = self.all::<NodeObject>(&project::nodes());
        let params = ListParams::default().fields(&format!("metadata.name={name}"));
        self.each(api, params, |it| found |= it.metadata.uid.as_deref() == Some(uid)).await?;
        Ok(found)
    }

    /// The UIDs of the networks to which pods can still attach.
    pub async fn networks_accepting_pods(&self) -> Result<BTreeSet<String>, request::Error> {
        let mut found = BTreeSet::new();
        let api = self.all::<NetworkObject>(&project::networks());
        let visit = |it: NetworkObject| {
            let held = it.metadata.finalizers.iter().flatten().any(|one| one == FINALIZER_USERS);
            let releasing = it.metadata.deletion_timestamp.is_some() && !held;
            found.extend(it.metadata.uid.filter(|_| !releasing));
        };
        self.each(api, ListParams::default().limit(PAGE_SIZE), visit).await?;
        Ok(found)
    }

    fn all<K: Resource<DynamicType = ApiResource>>(&self, resource: &ApiResource) -> Api<K> {
        Api::all_with(self.client.clone(), resource)
    }

    /// A page of pods, metadata only: a large cluster has more pods than anything else.
    async fn pods(&self, params: ListParams) -> kube::Result<ObjectList<PodObject>> {
        let request = Request::new(Pod::url_path(&(), None)).list_metadata(&params);
        self.client.request(request.map_err(kube::Error::BuildRequest)?).await
    }

    async fn each<K: Clone + Debug + DeserializeOwned>(
        &self,
        api: Api<K>,
        params: ListParams,
        visit: impl FnMut(K),
    ) -> Result<(), request::Error> {
        let page = |params| {
            let api = api.clone();
            async move { api.list(&params).await }
        };
        self.pages(page, params, visit).await
    }

    /// Visits every object, page by page. A kind that the API server does not serve has none.
    async fn pages<K: Clone, F: Future<Output = kube::Result<ObjectList<K>>>>(
        &self,
        page: impl Fn(ListParams) -> F,
        mut params: ListParams,
        mut visit: impl FnMut(K),
    ) -> Result<(), request::Error> {
        loop {
            let list = match self.call.read(page(params.clone())).await {
                Err(request::Error::Failed(kube::Error::Api(status))) if status.code == 404 => return Ok(()),
                list => list?,
            };
            list.items.into_iter().for_each(&mut visit);
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(()),
            }
        }
    }
}

/// The NADs of these that the object uses, by the same rule as the index of users.
fn uses(kind: WorkloadKind, refs: &WorkloadRefs, nads: &BTreeSet<NadRef>) -> Vec<(NadRef, String)> {
    if !refs.is_user(kind) {
        return Vec::new();
    }
    let named = refs.references().into_iter().filter(|at| nads.contains(at));
    named.map(|at| (at, format!("{} {}/{}", kind.name(), refs.namespace, refs.name))).collect()
}
