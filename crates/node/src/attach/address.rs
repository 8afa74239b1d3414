//! The addresses of an attachment.

use std::time::{Duration, Instant};

use ipnet::IpNet;
use link::veth;
use plan::ipam::{AddressInfo, AttachmentKey, Family, Grant, Lease, LeaseClaim, PodRef, Pool};
use tracing::info;
use wire::cni::{Code, Error};

use super::{Attacher, AttachmentId};
use crate::{
    claims::ServedClaim,
    ipam::{CallerWait, uptime},
    network_snapshot::Networks,
};

/// How long an ADD waits for an address. The kubelet retries after a failure.
pub const ADD_TIMEOUT: Duration = Duration::from_secs(8);

/// The addresses that an interface requests.
pub struct AddressRequest<'a> {
    pub id: &'a AttachmentId<'a>,
    pub pod: PodRef,
    pub network: &'a str,
    /// The name of the CNI configuration.
    pub config: &'a str,
    /// The CNI plugin whose DEL releases them.
    pub plugin: &'a str,
    /// None for any.
    pub requested: &'a [IpNet],
    /// The claim whose addresses the pod gets.
    pub claim: Option<&'a ServedClaim>,
    /// Fails once the caller has gone. Then nothing is allocated.
    pub caller_alive: &'a dyn Fn() -> Result<(), Error>,
}

/// The addresses and routes of an interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllocatedAddresses {
    pub addresses: Vec<AddressInfo>,
    pub routes: Vec<veth::Route>,
    /// The claim that has the addresses.
    pub claim: Option<LeaseClaim>,
}

impl Attacher {
    /// Allocates addresses for an interface that another plugin creates. A repeated call returns the same addresses.
    pub fn allocate(&self, request: &AddressRequest<'_>) -> Result<AllocatedAddresses, Error> {
        let _lock = self.lock(&request.id.host);
        (request.caller_alive)()?;
        self.remove_tombstone(request.plugin, request.id).map_err(|error| {
            Error::new(Code::Io, "cannot remove the tombstone of earlier addresses")
                .details(error.to_string())
        })?;
        self.allocate_locked(&self.networks(), request)
    }

    /// Allocates the addresses of an attachment whose links are locked.
    pub(super) fn allocate_locked(
        &self,
        view: &Networks,
        request: &AddressRequest<'_>,
    ) -> Result<AllocatedAddresses, Error> {
        let AddressRequest { id, pod, network, config, requested, .. } = request;
        let (uid, pool) = view.pool(network)?;
        let lease = Lease {
            key: id.key(),
            pod: pod.clone(),
            network: uid.to_owned(),
            config: (*config).to_owned(),
            boot: self.ipam.boot().to_owned(),
            since: uptime(),
            addresses: Vec::new(),
            claim: request.claim.map(|served| served.claim.clone()),
        };
        let wait = CallerWait {
            deadline: Instant::now() + ADD_TIMEOUT,
            caller_alive: request.caller_alive,
            network_open: &|| self.networks().require_open(network, uid),
        };
        let grant = if let Some(served) = request.claim {
            self.ipam.serve(&pool.name, lease, served.infos.clone(), &wait)?
        } else {
            self.ipam.allocate(pool, lease, requested, &wait)?
        };
        info!(
            network,
            container_id = id.container_id,
            ifname = id.ifname,
            pod = format!("{}/{}", pod.namespace, pod.name),
            addresses = ?grant.lease.addresses,
            claim = grant.lease.claim.as_ref().map(|claim| claim.name.as_str()),
            "allocated addresses"
        );
        Ok(allocated_addresses(pool, &grant))
    }

    /// Compares the lease with what the result of attaching contained, and returns its addresses.
    pub fn check_lease(&self, key: &AttachmentKey, reported: &[IpNet]) -> Result<Vec<IpNet>, Error> {
        let differs = |msg: String| Err(Error::new(Code::Differs, msg));
        let Some(grant) = self.ipam.grant(key) else {
            self.ipam.require_loaded()?;
            return differs(
                "the interface no longer has an address of patchbay-ipam; delete the pod".to_owned(),
            );
        };
        let mut all = Vec::new();
        for address in &grant.lease.addresses {
            let Some(reported) = reported.iter().find(|net| net.addr() == *address) else {
                let msg = format!("the interface has address {address}, which prevResult does not contain");
                return differs(msg);
            };
            if let Some(info) = grant.info(*address).filter(|info| info.net != *reported) {
                let msg = format!("the interface was given {}, but prevResult contains {reported}", info.net);
                return differs(msg);
            }
            all.push(*reported);
        }
        Ok(all)
    }
}

/// The addresses of a grant, and the routes of their families.
fn allocated_addresses(pool: &Pool, grant: &Grant) -> AllocatedAddresses {
    let routes = pool.routes.iter().filter_map(|route| {
        let family = Family::of(route.dst.addr());
        let info = grant.infos.iter().find(|info| Family::of(info.net.addr()) == family)?;
        Some(veth::Route { dst: route.dst, gw: route.gw.or(info.gateway) })
    });
    AllocatedAddresses {
        addresses: grant.infos.clone(),
        routes: routes.collect(),
        claim: grant.lease.claim.clone(),
    }
}
