//! Metrics of IPAMClaims.

use plan::claims::serve::ServeError;
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

#[derive(Debug, Clone, Default)]
pub struct Metrics {
    pub served: Counter,
    pub announcements: Counter,
    refusals: Family<RefusalLabels, Counter>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RefusalLabels {
    reason: RefusalReason,
}

/// Why an ADD got no addresses of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum RefusalReason {
    ClaimMissing,
    NoAddresses,
    OtherMachine,
    OtherNetwork,
    NotReserved,
    NotPublished,
    InUse,
    NoInstance,
    NoElement,
    RequestedAddress,
    /// An object could not be read.
    ApiServer,
}

impl From<&ServeError> for RefusalReason {
    fn from(error: &ServeError) -> Self {
        match error {
            ServeError::Missing(_) => Self::ClaimMissing,
            ServeError::NoAddresses { .. } => Self::NoAddresses,
            ServeError::OtherMachine { .. } => Self::OtherMachine,
            ServeError::OtherNetwork { .. } => Self::OtherNetwork,
            ServeError::NotReserved { .. } => Self::NotReserved,
            ServeError::NotPublished { .. } => Self::NotPublished,
            ServeError::InUse { .. } => Self::InUse,
            ServeError::NoInstance { .. } => Self::NoInstance,
            ServeError::NoElement { .. } => Self::NoElement,
            ServeError::Requested { .. } => Self::RequestedAddress,
        }
    }
}

impl Metrics {
    pub fn refused(&self, reason: RefusalReason) {
        self.refusals.get_or_create(&RefusalLabels { reason }).inc();
    }

    pub fn register(&self, registry: &mut Registry) {
        let help = "Interfaces that got the addresses of an IPAMClaim";
        registry.register("ipam_claims_served", help, self.served.clone());
        let help = "Interfaces that did not get the addresses of an IPAMClaim, by reason";
        registry.register("ipam_claim_refusals", help, self.refusals.clone());
        let help = "Interfaces whose addresses were announced after another pod of the virtual machine ended";
        registry.register("ipam_claim_announcements", help, self.announcements.clone());
    }
}
