//! Watches all EndpointSlices of the histories, of every manager, for addresses of the primary network.

use std::{collections::BTreeSet, convert::Infallible, net::IpAddr};

use anyhow::{Context as _, Result, bail, ensure};
use futures::StreamExt as _;
use ipnet::IpNet;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{
    Api, ResourceExt as _,
    api::{ListParams, WatchEvent, WatchParams},
};
use serde_json::json;
use tokio::sync::watch;

use crate::{
    TIMEOUT,
    cluster::{TestCluster, slices},
};

/// The address of every pod on its primary network.
pub const PRIMARY: &str = "10.244.0.7";
const PRIMARY_SUBNET: &str = "10.244.0.0/16";
/// A slice with a primary address that the test creates last: events arrive in order, so the watch saw all earlier ones.
const MARKER: &str = "marker";

/// The slices that ever contained a primary address, as namespace and name.
pub struct PrimaryAddressWatch {
    cluster: TestCluster,
    /// The namespaces of the histories start with this text.
    prefix: &'static str,
    subnet: IpNet,
    start_version: String,
    found: watch::Sender<BTreeSet<(String, String)>>,
}

impl PrimaryAddressWatch {
    /// Takes the current resource version; [`Self::run_during`] watches the slices since then.
    pub async fn start(cluster: &TestCluster, prefix: &'static str) -> Result<Self> {
        let api: Api<EndpointSlice> = Api::all(cluster.client.clone());
        let listed = api.list(&ListParams::default().limit(1)).await.context("list EndpointSlices")?;
        Ok(Self {
            cluster: cluster.clone(),
            prefix,
            subnet: PRIMARY_SUBNET.parse()?,
            start_version: listed.metadata.resource_version.context("a resource version")?,
            found: watch::Sender::new(BTreeSet::new()),
        })
    }

    /// Watches while the future runs, and then fails if a slice of a history ever contained a primary address.
    pub async fn run_during<T>(&self, other: impl Future<Output = Result<T>>) -> Result<T> {
        let checked = async {
            let done = other.await?;
            self.check().await?;
            Ok(done)
        };
        tokio::select! {
            ended = self.watch() => ended.map(|never| match never {}),
            done = checked => done,
        }
    }

    async fn watch(&self) -> Result<Infallible> {
        let api: Api<EndpointSlice> = Api::all(self.cluster.client.clone());
        let mut version = self.start_version.clone();
        // The API server ends every watch after some time. The next one starts where it ended, so no event is missed.
        loop {
            let mut events = api.watch(&WatchParams::default(), &version).await?.boxed();
            while let Some(Ok(event)) = events.next().await {
                match event {
                    WatchEvent::Added(slice) | WatchEvent::Modified(slice) | WatchEvent::Deleted(slice) => {
                        version = slice.resource_version().context("a resource version")?;
                        self.record(&slice);
                    }
                    WatchEvent::Bookmark(bookmark) => version = bookmark.metadata.resource_version,
                    WatchEvent::Error(status) => bail!("the watch of EndpointSlices ended: {status:?}"),
                }
            }
        }
    }

    fn record(&self, slice: &EndpointSlice) {
        let namespace = slice.namespace().unwrap_or_default();
        let is_primary =
            |text: &String| text.parse::<IpAddr>().is_ok_and(|address| self.subnet.contains(&address));
        let watched = namespace == self.cluster.namespace || namespace.starts_with(self.prefix);
        if watched && slice.endpoints.iter().flat_map(|endpoint| &endpoint.addresses).any(is_primary) {
            self.found.send_modify(|found| {
                found.insert((namespace, slice.name_any()));
            });
        }
    }

    /// Finds the marker, which shows that the watch recognizes a primary address, and nothing else.
    async fn check(&self) -> Result<()> {
        let slice = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": MARKER}, "addressType": "IPv4", "endpoints": [{"addresses": [PRIMARY]}]});
        self.cluster.create(&slices(), &slice).await.context("create the marker")?;
        let marker = (self.cluster.namespace.clone(), MARKER.to_owned());
        let mut found = self.found.subscribe();
        let waited = tokio::time::timeout(TIMEOUT, found.wait_for(|found| found.contains(&marker))).await;
        waited.context("the watch did not deliver the marker")??;
        let mut found = self.found.borrow().clone();
        found.remove(&marker);
        ensure!(found.is_empty(), "EndpointSlices contained a primary address: {found:?}");
        Ok(())
    }
}
