//! Questions to the API server itself, for what must not be decided on a cache: pages of lists that are as new as can be.

use std::{collections::BTreeSet, fmt::Debug, sync::Arc};

use api::{bridgenetwork::NAD_NETWORK_LABEL, selection::Reference};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, Resource,
    api::ListParams,
    core::{ApiResource, PartialObjectMeta},
};
use plan::{
    network::{self, Attachment},
    users::{Facts, Kind},
};
use serde::de::DeserializeOwned;

use crate::{
    call::{self, Line},
    follow::LIVE_PODS,
    metrics::{Call, Metrics},
    object::{self, AttachmentObject, NetworkObject, ReportObject, WorkloadObject},
};

/// Large enough that most lists are one answer, small enough that none is a burden.
const PAGE: u32 = 2000;
/// NodeNetworks are larger than other objects.
const SMALL_PAGE: u32 = 50;

/// The API server, asked directly.
pub struct Direct {
    client: Client,
    line: Line,
}

impl Direct {
    pub fn new(client: Client, metrics: Arc<Metrics>) -> Self {
        Self { client, line: Line::new(metrics, Call::List, call::DEADLINE) }
    }

    /// One that uses any of these attachments, if there is one.
    pub async fn user(&self, attachments: &BTreeSet<Reference>) -> Result<Option<String>, call::Error> {
        let kinds = Kind::ALL.map(|kind| self.user_of(kind, attachments));
        let found = futures::future::try_join_all(kinds).await?;
        Ok(found.into_iter().flatten().next())
    }

    async fn user_of(
        &self,
        kind: Kind,
        attachments: &BTreeSet<Reference>,
    ) -> Result<Option<String>, call::Error> {
        if kind == Kind::Pod {
            let api = Api::<PartialObjectMeta<Pod>>::all(self.client.clone());
            let params = ListParams::default().fields(LIVE_PODS).limit(PAGE);
            return self.find(api, params, |pod| user(kind, &object::pod(&pod.metadata), attachments)).await;
        }
        let api = self.all::<WorkloadObject>(&object::workloads(kind));
        let params = ListParams::default().limit(PAGE);
        self.find(api, params, |it| user(kind, &object::workload(kind, it), attachments)).await
    }

    /// An attachment that bears the mark of this network, if there is one.
    pub async fn attachment(&self, network: &str, uid: &str) -> Result<Option<Reference>, call::Error> {
        let params = ListParams::default().labels(&format!("{NAD_NETWORK_LABEL}={network}")).limit(PAGE);
        let ours = |at: &Reference, one: &Attachment| one.made_by(at) == Some(uid);
        let api = self.all::<AttachmentObject>(&object::attachments());
        self.find(api, params, |it| {
            object::attachment(it).filter(|(at, one)| ours(at, one)).map(|(at, _)| at)
        })
        .await
    }

    /// A node of these that lists the network, if there is one.
    pub async fn node(
        &self,
        uid: &str,
        exists: impl Fn(&str) -> bool,
    ) -> Result<Option<String>, call::Error> {
        let lists = |(name, report): (String, network::Report)| {
            (report.networks.contains_key(uid) && exists(&name)).then_some(name)
        };
        let api = self.all::<ReportObject>(&object::reports());
        let params = ListParams::default().limit(SMALL_PAGE);
        self.find(api, params, |it| object::report(it).and_then(lists)).await
    }

    /// Whether there is a network of this UID.
    pub async fn network(&self, uid: &str) -> Result<bool, call::Error> {
        let api = self.all::<NetworkObject>(&object::networks());
        let params = ListParams::default().limit(PAGE);
        let found =
            self.find(api, params, |it| (it.metadata.uid.as_deref() == Some(uid)).then_some(())).await?;
        Ok(found.is_some())
    }

    fn all<K: Resource<DynamicType = ApiResource>>(&self, resource: &ApiResource) -> Api<K> {
        Api::all_with(self.client.clone(), resource)
    }

    /// The first that is looked for. A kind that does not exist has no objects.
    async fn find<K: Clone + Debug + DeserializeOwned, T>(
        &self,
        api: Api<K>,
        mut params: ListParams,
        look: impl Fn(K) -> Option<T>,
    ) -> Result<Option<T>, call::Error> {
        loop {
            let list = match self.line.read(api.list(&params)).await {
                Err(call::Error::Refused(kube::Error::Api(status))) if status.code == 404 => {
                    return Ok(None);
                }
                list => list?,
            };
            if let Some(found) = list.items.into_iter().find_map(&look) {
                return Ok(Some(found));
            }
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(None),
            }
        }
    }
}

/// The object by its name, if it counts as a user: judged by the same rule as the index.
fn user(kind: Kind, facts: &Facts, attachments: &BTreeSet<Reference>) -> Option<String> {
    let uses = facts.counts(kind) && facts.references().iter().any(|one| attachments.contains(one));
    uses.then(|| format!("{} {}/{}", kind.name(), facts.namespace, facts.name))
}
