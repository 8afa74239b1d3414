//! Finds the addresses of a claim for ADD. All objects are read from the API server: a cache may be older than a restart.

use std::{
    fmt::Display,
    future::Future,
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use api::{
    ErrorChain, IPAMClaim, IPBlock,
    ipblock::{self, CLAIMS_HOLDER_UID, HOLDER_ROLE, NETWORK_LABEL, NODE_ROLE_LABEL_PREFIX},
};
use ipnet::IpNet;
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams},
};
use plan::{
    claims::{
        ClaimPod, ClaimState, OwnerKind, VmiFacts,
        serve::{self, ElementMatch, HeldClaim, ServeCode, ServeError, ServeInput},
    },
    ipam::{AddressInfo, AttachmentKey, Family, LeaseClaim, ObservedIpBlock, PodRef, Pool},
};
use tokio::{runtime::Handle, time::timeout};
use tracing::info;
use wire::cni::{Code, Error};

use super::{
    HolderSelector, Metrics, PersistentNads,
    metrics::RefusalReason,
    objects::{block, claim_pod, claim_state, instance},
};
use crate::{
    ipam::Ipam,
    network_snapshot::NetworksReader,
    pods::{self, LIVE_PODS, OwnPod, OwnPods},
};

/// The interface of the default network: the runtime sets it, and no element is for it.
const DEFAULT_INTERFACE: &str = "eth0";
/// How long one request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// How long all requests of an ADD may take. The kubelet retries after a failure.
pub const LOOKUP_TIMEOUT: Duration = Duration::from_secs(8);

/// Finds the claims of attachments.
pub struct ClaimLookup {
    pub client: Client,
    /// The runtime of the daemon. ADD runs on threads outside of it.
    pub runtime: Handle,
    pub pods: OwnPods,
    pub networks: NetworksReader,
    pub persistent: PersistentNads,
    pub ipam: Arc<Ipam>,
    pub metrics: Metrics,
}

/// An attachment that gets addresses of `patchbay-ipam`.
pub struct ClaimQuery<'a> {
    pub pod: &'a PodRef,
    pub key: AttachmentKey,
    /// The name of the CNI config.
    pub config: &'a str,
    /// Whether the config itself says that addresses are persistent.
    pub persistent: bool,
    /// The BridgeNetwork.
    pub network: &'a str,
    pub requested: &'a [IpNet],
    /// The path of the pod's network namespace.
    pub netns: &'a str,
    /// Fails once the caller has gone.
    pub caller_alive: &'a dyn Fn() -> Result<(), Error>,
}

/// The addresses of a claim that an attachment gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedClaim {
    pub infos: Vec<AddressInfo>,
    pub claim: LeaseClaim,
    /// The pods that may have them too.
    pub holders: Option<HolderSelector>,
}

/// Why a lookup failed.
enum LookupError {
    Refused(ServeError),
    /// CNI error 11.
    Unreadable {
        what: String,
        cause: String,
    },
    Cni(Error),
}

impl From<ServeError> for LookupError {
    fn from(error: ServeError) -> Self {
        Self::Refused(error)
    }
}

/// One lookup.
struct Session<'a> {
    lookup: &'a ClaimLookup,
    query: &'a ClaimQuery<'a>,
    deadline: Instant,
}

impl ClaimLookup {
    /// The claim of an attachment and its addresses; None if it gets any address. Sends requests only if the network has
    /// persistent addresses or the pod has a reference. Blocks; must not be called on a thread of the runtime.
    pub fn resolve(&self, query: &ClaimQuery<'_>) -> Result<Option<ServedClaim>, Error> {
        let cached = self.cached_element(query);
        let known = self.ipam.grant(&query.key).and_then(|grant| grant.lease.claim);
        let persistent = query.persistent
            || known.is_some()
            || matches!(cached, Some(ElementMatch::Claim(_) | ElementMatch::Doubt))
            || match self.persistent.contains(query.config, query.network) {
                Some(persistent) => persistent,
                // Until the NADs are listed, only the pod can say it.
                None => !matches!(cached, Some(ElementMatch::Ordinary)),
            }
            // Persistence was switched off, and pods keep their references: a pod that is not in the snapshot may have one.
            || cached.is_none() && self.networks.borrow().has_claims(query.network);
        // A call that is not about a pod has no reference.
        if !persistent || query.pod.name.is_empty() {
            return Ok(None);
        }
        let deadline = Instant::now() + LOOKUP_TIMEOUT;
        let session = Session { lookup: self, query, deadline };
        let found = self.runtime.block_on(session.run(known.as_ref()));
        found.map_err(|error| self.refuse(query, error))
    }

    /// What the snapshot of the node's pods says; None if it does not have the pod.
    fn cached_element(&self, query: &ClaimQuery<'_>) -> Option<ElementMatch> {
        let pod = self.pods.get(&query.pod.uid)?;
        Some(serve::element(&claim_pod(&pod), &query.key.interface))
    }

    fn refuse(&self, query: &ClaimQuery<'_>, error: LookupError) -> Error {
        let (reason, error) = match error {
            LookupError::Cni(error) => return error,
            LookupError::Refused(error) => {
                let code = match error.code() {
                    ServeCode::Retry => Code::TryAgainLater,
                    ServeCode::Invalid => Code::InvalidConfig,
                };
                (RefusalReason::from(&error), Error::new(code, error.to_string()))
            }
            LookupError::Unreadable { what, cause } => {
                let msg = format!("cannot read {what} from the API server: {cause}; the kubelet retries");
                (RefusalReason::ApiServer, Error::new(Code::TryAgainLater, msg))
            }
        };
        self.metrics.refused(reason);
        let pod = format!("{}/{}", query.pod.namespace, query.pod.name);
        info!(pod, interface = query.key.interface, network = query.network, %error, "no addresses of a claim");
        error
    }
}

impl Session<'_> {
    async fn run(&self, known: Option<&LeaseClaim>) -> Result<Option<ServedClaim>, LookupError> {
        let (lookup, query) = (self.lookup, self.query);
        let Some((pod, claim_name)) = self.find_element().await? else { return Ok(None) };
        let own = claim_pod(&pod);
        let view = Arc::clone(&lookup.networks.borrow());
        let (network_uid, pool) = view.pool(query.network).map_err(LookupError::Cni)?;
        let claim = self.claim(&claim_name).await?;
        let vmi = match &claim {
            Some(claim) if claim.has_machine_owner() => self.instance(&own).await?,
            _ => None,
        };
        let blocks = match &claim {
            Some(claim) => self.blocks(claim, pool).await?,
            None => Vec::new(),
        };
        // Without a machine, any pod of the namespace may hold the addresses.
        let machine = claim.as_ref().filter(|claim| claim.has_machine_owner());
        let holders = machine.and_then(|_| HolderSelector::of(&pod));
        let others = match &claim {
            Some(_) => self.live_pods(holders.as_ref()).await?,
            None => Vec::new(),
        };
        let held = known.map(|known| HeldClaim {
            uid: known.uid.clone(),
            name: known.name.clone(),
            shared: known.shared,
        });
        let served = serve::decide(&ServeInput {
            pod: &own,
            ifname: &query.key.interface,
            config_name: query.config,
            requested: query.requested,
            claim_name: &claim_name,
            claim: claim.as_ref(),
            vmi: vmi.as_ref(),
            blocks: &blocks,
            network_uid,
            others: &others,
            known: held.as_ref(),
        })?;
        let HeldClaim { uid, name, shared } = served.claim;
        lookup.metrics.served.inc();
        Ok(Some(ServedClaim {
            infos: served.addresses.iter().map(|net| info(pool, *net)).collect(),
            claim: LeaseClaim { uid, name, shared, netns: query.netns.to_owned() },
            holders: holders.filter(|_| shared),
        }))
    }

    /// The pod and the claim that its element references; None if the element has no reference. An element in the snapshot is
    /// current: a reference is in the annotation before the interface is requested, and is never added later.
    async fn find_element(&self) -> Result<Option<(Arc<OwnPod>, Arc<str>)>, LookupError> {
        let (lookup, query) = (self.lookup, self.query);
        if let Some(pod) = lookup.pods.get(&query.pod.uid) {
            match serve::element(&claim_pod(&pod), &query.key.interface) {
                ElementMatch::Claim(name) => return Ok(Some((pod, name))),
                ElementMatch::Ordinary => return self.ordinary(&claim_pod(&pod)).await,
                ElementMatch::None | ElementMatch::Doubt => {}
            }
        }
        let pod = Arc::new(self.live_pod().await?);
        let own = claim_pod(&pod);
        match serve::element(&own, &query.key.interface) {
            ElementMatch::Claim(name) => Ok(Some((pod, name))),
            ElementMatch::None if query.key.interface == DEFAULT_INTERFACE => Ok(None),
            ElementMatch::Ordinary | ElementMatch::None => self.ordinary(&own).await,
            ElementMatch::Doubt => {
                let interface = query.key.interface.clone();
                Err(ServeError::NoElement { pod: own.key, interface }.into())
            }
        }
    }

    /// An interface without a reference gets any address. Not that of a launcher whose instance does not exist: no webhook gave
    /// it the reference that it should have.
    async fn ordinary<T>(&self, pod: &ClaimPod) -> Result<Option<T>, LookupError> {
        let vmi = if pod.launcher { self.instance(pod).await? } else { None };
        serve::check_instance(pod, vmi.as_ref())?;
        Ok(None)
    }

    /// The pod as the API server has it. The daemon may list pods, but not get one.
    async fn live_pod(&self) -> Result<OwnPod, LookupError> {
        let PodRef { namespace, name, uid } = self.query.pod;
        let fields = format!("metadata.name={name}");
        let what = format!("pod {namespace}/{name}");
        let list = pods::list_live(self.lookup.client.clone(), namespace, None, &fields);
        let found = self.read(&what, list).await?.into_iter().next();
        let same = |pod: &OwnPod| uid.is_empty() || pod.uid == *uid || pod.runtime_uid() == uid;
        found.filter(same).ok_or_else(|| LookupError::Unreadable {
            what,
            cause: format!("no pod of this name has the UID {uid}"),
        })
    }

    async fn claim(&self, name: &str) -> Result<Option<ClaimState>, LookupError> {
        let namespace = &self.query.pod.namespace;
        let api: Api<IPAMClaim> = Api::namespaced(self.lookup.client.clone(), namespace);
        let found = self.read(&format!("IPAMClaim {namespace}/{name}"), api.get_opt(name)).await?;
        Ok(found.map(claim_state))
    }

    /// The VirtualMachineInstance that controls the pod.
    async fn instance(&self, pod: &ClaimPod) -> Result<Option<VmiFacts>, LookupError> {
        let is_instance = |kind| kind == OwnerKind::VirtualMachineInstance;
        let Some(owner) = pod.controller.as_ref().filter(|owner| is_instance(owner.kind)) else {
            return Ok(None);
        };
        let kind = GroupVersionKind::gvk("kubevirt.io", "v1", "VirtualMachineInstance");
        let resource = ApiResource::from_gvk_with_plural(&kind, "virtualmachineinstances");
        let namespace = &self.query.pod.namespace;
        let api: Api<DynamicObject> = Api::namespaced_with(self.lookup.client.clone(), namespace, &resource);
        let what = format!("VirtualMachineInstance {namespace}/{}", owner.name);
        let found = self.read(&what, api.get_metadata_opt(&owner.name)).await?;
        Ok(found.map(|found| instance(found.metadata)))
    }

    /// The IPBlocks that may have the reservations of a claim.
    async fn blocks(&self, claim: &ClaimState, pool: &Pool) -> Result<Vec<ObservedIpBlock>, LookupError> {
        let api: Api<IPBlock> = Api::all(self.lookup.client.clone());
        let published: Vec<IpAddr> = claim.published().iter().map(IpNet::addr).collect();
        let has = |family: Family| published.iter().any(|address| Family::of(*address) == family);
        // A family without an address may have a reservation that is not in the status any more; one without a subnet may have
        // an address.
        if !published.is_empty() && Family::ALL.iter().any(|it| pool.grid(*it).is_some() != has(*it)) {
            return self.list_blocks(&api).await;
        }
        let mut blocks: Vec<ObservedIpBlock> = Vec::new();
        for address in published {
            let Some(grid) = pool.grid(Family::of(address)) else { continue };
            let reserved = |one: &ObservedIpBlock| one.status.claims.iter().any(|one| one.address == address);
            // A single address is borrowed.
            for range in grid.block_of(address).into_iter().chain([IpNet::from(address)]) {
                let name = ipblock::name(self.query.network, range);
                let found = self.read(&format!("IPBlock {name}"), api.get_opt(&name)).await?;
                let found = found.map(block);
                let done = found.as_ref().is_some_and(reserved);
                blocks.extend(found);
                if done {
                    break;
                }
            }
        }
        Ok(blocks)
    }

    /// All blocks of claims of the network.
    async fn list_blocks(&self, api: &Api<IPBlock>) -> Result<Vec<ObservedIpBlock>, LookupError> {
        let holder = format!("{NODE_ROLE_LABEL_PREFIX}{CLAIMS_HOLDER_UID}={HOLDER_ROLE}");
        let selector = format!("{NETWORK_LABEL}={},{holder}", self.query.network);
        let params = ListParams::default().labels(&selector);
        let what = format!("IPBlocks of network {}", self.query.network);
        Ok(self.read(&what, api.list(&params)).await?.items.into_iter().map(block).collect())
    }

    /// The live pods that may hold the addresses: those of one virtual machine, or all of the namespace.
    async fn live_pods(&self, holders: Option<&HolderSelector>) -> Result<Vec<ClaimPod>, LookupError> {
        let namespace = &self.query.pod.namespace;
        let labels = holders.map(|holders| holders.labels.as_str());
        let list = pods::list_live(self.lookup.client.clone(), namespace, labels, LIVE_PODS);
        let listed = self.read(&format!("pods of namespace {namespace}"), list).await?;
        Ok(listed.iter().map(claim_pod).collect())
    }

    /// Makes a request within the limits.
    async fn read<T>(
        &self,
        what: &(impl Display + ?Sized),
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, LookupError> {
        (self.query.caller_alive)().map_err(LookupError::Cni)?;
        let limit = self.deadline.saturating_duration_since(Instant::now()).min(REQUEST_TIMEOUT);
        let cause = match timeout(limit, request).await {
            Ok(Ok(read)) => return Ok(read),
            Ok(Err(kube::Error::Api(status))) => status.message,
            Ok(Err(error)) => ErrorChain(&error).to_string(),
            Err(_) => "it did not respond in time".to_owned(),
        };
        Err(LookupError::Unreadable { what: what.to_string(), cause })
    }
}

/// What the CNI result says about an address of a claim. The prefix length is the claim's.
fn info(pool: &Pool, net: IpNet) -> AddressInfo {
    let grid = pool.grid(Family::of(net.addr()));
    AddressInfo { net, gateway: grid.and_then(|grid| grid.address_info(net.addr()).gateway) }
}

#[cfg(test)]
mod tests;
