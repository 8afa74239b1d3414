//! Reads and changes the links and default routes of a pod's network namespace.
//!
//! Each function opens the namespace for one operation and closes it afterwards: an open namespace outlives its pod.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    io,
    net::IpAddr,
    os::fd::OwnedFd,
    sync::Arc,
};

use link::{DefaultRoute, NamespaceLinkMonitor, PodLink, RestoreOutcome};
use plan::hotplug::{FilteredRoutes, HostLink, HostPeer, LinkIdentity, ObservedLink};
use tokio::task::spawn_blocking;

use super::sandboxes::SandboxLocator;

/// Opens namespaces of pods.
#[derive(Clone)]
pub struct PodNamespaces {
    locator: SandboxLocator,
    monitor: Arc<NamespaceLinkMonitor>,
}

/// Why a namespace could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum NamespaceError {
    #[error("the network namespace {path} does not exist")]
    Gone { path: String },
    #[error("open the network namespace {path}")]
    Open { path: String, source: io::Error },
    #[error("access the network namespace {path}")]
    Kernel { path: String, source: link::Error },
    #[error("the read of the network namespace {path} panicked")]
    Panicked { path: String },
}

/// The links of a namespace.
#[derive(Debug)]
pub struct ObservedNamespace {
    /// The ID of the namespace in link events.
    pub nsid: i32,
    pub links: Vec<PodLink>,
    /// The links on the host that are an end of one of the links, and those of the requested ones that exist.
    pub host_links: BTreeMap<u32, HostLink>,
}

impl ObservedNamespace {
    /// The links, of a pod that runs a virtual machine or not.
    pub fn links(&self, virt_launcher: bool) -> Vec<ObservedLink> {
        let link = |link: &PodLink| ObservedLink {
            index: link.index,
            name: link.name.clone(),
            mac: link.mac.map(|mac| mac.to_string()),
            peer: link.host_peer(),
            placeholder: virt_launcher && link.kind.as_deref() == Some("dummy"),
        };
        self.links.iter().map(link).collect()
    }
}

impl PodNamespaces {
    pub fn new(locator: SandboxLocator, monitor: Arc<NamespaceLinkMonitor>) -> Self {
        Self { locator, monitor }
    }

    /// The links of a namespace, from now on with events, their ends on the host, and which of the `peers` exist there.
    pub async fn observe(
        &self,
        path: &str,
        mut peers: BTreeSet<u32>,
    ) -> Result<ObservedNamespace, NamespaceError> {
        let monitor = Arc::clone(&self.monitor);
        self.within(path, move |namespace| {
            // First: a link that vanishes afterwards has an event.
            let nsid = monitor.nsid(&namespace)?;
            let links = link::links_in(&namespace)?;
            peers.extend(links.iter().filter_map(PodLink::host_peer));
            let host_links = host_links(peers)?;
            Ok(ObservedNamespace { nsid, links, host_links })
        })
        .await
    }

    pub async fn links(&self, path: &str) -> Result<Vec<PodLink>, NamespaceError> {
        self.within(path, link::links_in).await
    }

    /// The links of a namespace, and their ends on the host.
    pub async fn links_with_peers(
        &self,
        path: &str,
    ) -> Result<(Vec<PodLink>, BTreeMap<u32, HostLink>), NamespaceError> {
        self.within(path, |namespace| {
            let links = link::links_in(namespace)?;
            let host_links = host_links(links.iter().filter_map(PodLink::host_peer).collect())?;
            Ok((links, host_links))
        })
        .await
    }

    /// Whether the namespace exists. One that cannot be checked exists.
    pub async fn exists(&self, path: &str) -> bool {
        !matches!(self.open(path).await, Err(NamespaceError::Gone { .. }))
    }

    /// Deletes those of the links that exist.
    pub async fn delete_links(&self, path: &str, indexes: Vec<u32>) -> Result<(), NamespaceError> {
        self.within(path, move |namespace| {
            for index in indexes {
                link::delete_in(&namespace, index)?;
            }
            Ok(())
        })
        .await
    }

    /// Deletes those of the links on the host that are a veth, and still the recorded one.
    pub async fn delete_host_veths(&self, peers: Vec<HostPeer>) -> Result<(), NamespaceError> {
        if peers.is_empty() {
            return Ok(());
        }
        let path = "of the host";
        let veth = |HostPeer { index, name, mac }| {
            let mac = mac.and_then(|mac| mac.parse().ok());
            link::HostLink { index, name, mac }
        };
        let veths: Vec<link::HostLink> = peers.into_iter().map(veth).collect();
        let done = spawn_blocking(move || veths.iter().try_for_each(link::delete_veth)).await;
        let done = done.map_err(|_| NamespaceError::Panicked { path: path.to_owned() })?;
        done.map_err(|source| NamespaceError::Kernel { path: path.to_owned(), source })
    }

    pub async fn default_routes(&self, path: &str) -> Result<Vec<DefaultRoute>, NamespaceError> {
        self.within(path, link::default_routes_in).await
    }

    pub async fn replace_default_routes(
        &self,
        path: &str,
        link: u32,
        gateways: Vec<IpAddr>,
    ) -> Result<Vec<DefaultRoute>, NamespaceError> {
        self.within(path, move |namespace| link::replace_default_routes(&namespace, link, &gateways)).await
    }

    /// Deletes the default routes over a link, of the families that `filtered` names.
    pub async fn remove_default_routes(
        &self,
        path: &str,
        link: u32,
        filtered: FilteredRoutes,
    ) -> Result<(), NamespaceError> {
        self.within(path, move |namespace| {
            link::remove_default_routes(&namespace, link, filtered.ipv4, filtered.ipv6).map(|_| ())
        })
        .await
    }

    pub async fn restore_default_routes(
        &self,
        path: &str,
        routes: Vec<DefaultRoute>,
        unplugged: u32,
    ) -> Result<RestoreOutcome, NamespaceError> {
        self.within(path, move |namespace| link::restore_default_routes(&namespace, &routes, unplugged)).await
    }

    async fn open(&self, path: &str) -> Result<OwnedFd, NamespaceError> {
        self.locator.open(path).await.map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => NamespaceError::Gone { path: path.to_owned() },
            _ => NamespaceError::Open { path: path.to_owned(), source },
        })
    }

    async fn within<T: Send + 'static>(
        &self,
        path: &str,
        work: impl FnOnce(OwnedFd) -> Result<T, link::Error> + Send + 'static,
    ) -> Result<T, NamespaceError> {
        let namespace = self.open(path).await?;
        let done = spawn_blocking(move || work(namespace)).await;
        let done = done.map_err(|_| NamespaceError::Panicked { path: path.to_owned() })?;
        done.map_err(|source| NamespaceError::Kernel { path: path.to_owned(), source })
    }
}

/// Those of these links that exist on the host.
fn host_links(indexes: BTreeSet<u32>) -> Result<BTreeMap<u32, HostLink>, link::Error> {
    if indexes.is_empty() {
        return Ok(BTreeMap::new());
    }
    let host = |link: link::HostLink| HostLink {
        name: link.name.unwrap_or_default(),
        mac: link.mac.map(|mac| mac.to_string()),
    };
    Ok(link::existing_links(indexes)?.into_iter().map(|(index, link)| (index, host(link))).collect())
}

/// The links that an ADD created: those of `after` whose indexes are not among those of before.
pub fn created_links(
    before: &[u32],
    after: &[PodLink],
    host_links: &BTreeMap<u32, HostLink>,
) -> Vec<LinkIdentity> {
    let known: HashSet<u32> = before.iter().copied().collect();
    let created = after.iter().filter(|link| !known.contains(&link.index));
    let identity = |link: &PodLink| {
        let host = link.host_peer().and_then(|peer| host_links.get(&peer));
        LinkIdentity {
            index: Some(link.index),
            name: link.name.clone(),
            mac: link.mac.map(|mac| mac.to_string()),
            peer: link.host_peer(),
            peer_name: host.map(|host| host.name.clone()),
            peer_mac: host.and_then(|host| host.mac.clone()),
            moved: false,
        }
    };
    created.map(identity).collect()
}
