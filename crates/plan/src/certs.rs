//! Rotation of the webhook's certificates: the next single step, or when to check again.
//!
//! The order matters. A new CA is added to the trusted bundle first, in the Secret and in every webhook configuration. A leaf
//! is signed by it only after the CA was observed there for the propagation delay. The old CA is removed last, after it has
//! expired, because a replica that is cut off may serve an old leaf until then. Damage is repaired by the same steps: a CA
//! that only a webhook configuration still has is added to the Secret again, since replicas may still serve its leaf.

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeSet,
    time::{Duration, Instant, SystemTime},
};

/// The most CAs in one bundle. Two or three are normal; this bounds what repeated damage can add.
pub const MAX_CAS: usize = 16;

/// How far the clocks of a cluster may differ.
const MAX_CLOCK_SKEW: Duration = Duration::from_mins(5);

/// The longest lifetime of a CA that Patchbay creates. A CA that claims more is dropped: it would stay trusted for ever.
pub const MAX_CA_LIFETIME: Duration = Duration::from_hours(3650 * 24);

/// The longest wait between two checks, whatever the dates say.
const MAX_RECHECK: Duration = Duration::from_hours(1);

/// A wall clock that moves this far against the monotonic clock between two checks was set, or the machine was suspended.
const CLOCK_STEP_THRESHOLD: Duration = Duration::from_secs(1);

/// A certificate's identity: its DER encoding.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CertId(pub Vec<u8>);

/// When a certificate is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Validity {
    pub not_before: SystemTime,
    pub not_after: SystemTime,
}

/// A CA certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaCert {
    pub id: CertId,
    pub validity: Validity,
    pub origin: CaOrigin,
}

/// Whether Patchbay created a CA, judged by its subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaOrigin {
    Ours,
    Foreign,
}

/// A list of trusted CAs, as the Secret or a webhook configuration holds it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CaBundle {
    pub cas: Vec<CaCert>,
    /// Whether some part of it could not be parsed.
    pub corrupt: bool,
}

/// A serving certificate whose private key is present and matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeafCert {
    /// The CA of the Secret's bundle that signed it.
    pub signed_by: Option<CertId>,
    pub validity: Validity,
    pub dns_names: BTreeSet<String>,
}

/// The observed state of the Secret and of the webhook configurations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservedCerts {
    /// The bundle in the Secret.
    pub secret: CaBundle,
    /// The CA in the Secret's bundle whose private key the Secret has.
    pub signer: Option<CertId>,
    /// The Secret's leaf; `None` if it is missing, cannot be parsed or does not match its private key.
    pub leaf: Option<LeafCert>,
    /// The bundle of every webhook in every configuration that exists.
    pub webhook_bundles: Vec<CaBundle>,
    /// For how long the signer has been in all of them without interruption: see [`SignerTrust`].
    pub trusted_for: Option<Duration>,
}

/// The desired certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertPolicy {
    /// The DNS name by which API servers call the webhook.
    pub dns_name: String,
    pub ca_lifetime: Duration,
    pub leaf_lifetime: Duration,
    /// How long an API server may use a bundle after it was changed.
    pub ca_propagation_delay: Duration,
}

/// One write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RotationStep {
    /// Create a CA. The Secret's bundle becomes it and the retained ones; its private key replaces the old one.
    CreateCa { validity: Validity, retain: Vec<CertId> },
    /// Set the Secret's bundle to exactly these.
    WriteBundle { retain: Vec<CertId> },
    /// Write the Secret's bundle into every webhook configuration that differs from it.
    PublishBundle,
    /// Sign a new leaf with the signer.
    SignLeaf { validity: Validity },
}

/// What to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RotationDecision {
    Apply(RotationStep),
    /// Nothing to do for this long.
    RecheckAfter(Duration),
}

impl Validity {
    /// The validity of a certificate created `now`, backdated so that a clock that is behind accepts it.
    pub fn starting_at(now: SystemTime, lifetime: Duration) -> Self {
        Self { not_before: now - skew_allowance(lifetime), not_after: now + lifetime }
    }

    /// Two thirds of its lifetime.
    pub fn renew_at(&self) -> SystemTime {
        self.not_before + self.lifetime() * 2 / 3
    }

    /// When it has expired for a clock that is behind, too.
    pub fn expired_everywhere_at(&self) -> SystemTime {
        self.not_after + skew_allowance(self.lifetime())
    }

    fn lifetime(&self) -> Duration {
        self.not_after.duration_since(self.not_before).unwrap_or_default()
    }

    fn is_fresh(&self, now: SystemTime) -> bool {
        self.not_before <= now && now < self.renew_at()
    }

    fn is_plausible(&self) -> bool {
        self.lifetime() <= MAX_CA_LIFETIME + MAX_CLOCK_SKEW
    }
}

/// The clock skew to allow for a certificate of this lifetime: a tenth of it, because tests use short lifetimes.
fn skew_allowance(lifetime: Duration) -> Duration {
    (lifetime / 10).min(MAX_CLOCK_SKEW)
}

impl CaBundle {
    /// Whether both hold the same CAs and nothing else.
    pub fn matches(&self, other: &Self) -> bool {
        !self.corrupt && !other.corrupt && self.ids() == other.ids()
    }

    fn ids(&self) -> BTreeSet<&CertId> {
        self.cas.iter().map(|ca| &ca.id).collect()
    }

    fn find(&self, id: &CertId) -> Option<&CaCert> {
        self.cas.iter().find(|ca| ca.id == *id)
    }
}

/// Decides the next single step.
pub fn decide(observed: &ObservedCerts, policy: &CertPolicy, now: SystemTime) -> RotationDecision {
    let trusted = cas_to_trust(observed, now);
    let signer = observed.signer.as_ref().and_then(|id| observed.secret.find(id));
    let Some(signer) =
        signer.filter(|signer| signer.validity.is_plausible() && signer.validity.is_fresh(now))
    else {
        let retain = trusted.into_iter().take(MAX_CAS - 1).map(|ca| ca.id.clone()).collect();
        let validity = Validity::starting_at(now, policy.ca_lifetime);
        return RotationDecision::Apply(RotationStep::CreateCa { validity, retain });
    };
    let desired: BTreeSet<_> = trusted.iter().map(|ca| &ca.id).collect();
    if observed.secret.corrupt || observed.secret.ids() != desired {
        let retain = trusted.iter().map(|ca| ca.id.clone()).collect();
        return RotationDecision::Apply(RotationStep::WriteBundle { retain });
    }
    if observed.webhook_bundles.iter().any(|bundle| bundle.corrupt || bundle.ids() != desired) {
        return RotationDecision::Apply(RotationStep::PublishBundle);
    }
    let Some(leaf) = observed.leaf.as_ref().filter(|leaf| is_current(leaf, signer, policy, now)) else {
        let trusted_for = observed.trusted_for.unwrap_or_default();
        return match policy.ca_propagation_delay.checked_sub(trusted_for) {
            Some(remaining) if !remaining.is_zero() => RotationDecision::RecheckAfter(remaining),
            Some(_) | None => {
                let validity = leaf_validity(signer, policy, now);
                RotationDecision::Apply(RotationStep::SignLeaf { validity })
            }
        };
    };
    let others = trusted.iter().filter(|ca| ca.id != signer.id).map(|ca| ca.validity.expired_everywhere_at());
    let recheck_at = others.chain([signer.validity.renew_at(), leaf.validity.renew_at()]).min();
    let remaining = recheck_at.and_then(|at| at.duration_since(now).ok()).unwrap_or_default();
    RotationDecision::RecheckAfter(remaining.min(MAX_RECHECK))
}

/// The CAs that have to be trusted: the signer first, then the CA of the current leaf, then by latest expiry.
fn cas_to_trust(observed: &ObservedCerts, now: SystemTime) -> Vec<&CaCert> {
    let leaf_ca = observed.leaf.as_ref().and_then(|leaf| leaf.signed_by.as_ref());
    let published = observed.webhook_bundles.iter().flat_map(|bundle| &bundle.cas);
    let mut cas: Vec<_> = observed
        .secret
        .cas
        .iter()
        // A foreign CA in a configuration is a manual edit; one of ours there is left over from a damaged Secret.
        .chain(published.filter(|ca| ca.origin == CaOrigin::Ours))
        .filter(|ca| ca.validity.is_plausible() && now < ca.validity.expired_everywhere_at())
        .collect();
    let rank = |ca: &CaCert| {
        let role = if Some(&ca.id) == observed.signer.as_ref() {
            0
        } else if Some(&ca.id) == leaf_ca {
            1
        } else {
            2
        };
        (role, std::cmp::Reverse(ca.validity.not_after))
    };
    cas.sort_by(|a, b| (rank(a), &a.id).cmp(&(rank(b), &b.id)));
    cas.dedup_by(|a, b| a.id == b.id);
    cas.truncate(MAX_CAS);
    cas
}

fn is_current(leaf: &LeafCert, signer: &CaCert, policy: &CertPolicy, now: SystemTime) -> bool {
    leaf.signed_by.as_ref() == Some(&signer.id)
        && leaf.dns_names.iter().eq([&policy.dns_name])
        && leaf.validity.is_fresh(now)
}

/// A leaf never outlives its CA.
fn leaf_validity(signer: &CaCert, policy: &CertPolicy, now: SystemTime) -> Validity {
    let remaining = signer.validity.not_after.duration_since(now).unwrap_or_default();
    let validity = Validity::starting_at(now, policy.leaf_lifetime.min(remaining));
    Validity { not_before: validity.not_before.max(signer.validity.not_before), ..validity }
}

/// Why a replica does not serve a leaf. Only the leader judges its dates: a replica whose clock is wrong keeps serving.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnservableLeaf {
    #[error("tls.crt is missing, cannot be parsed or does not match tls.key")]
    Unreadable,
    #[error("tls.crt is not signed by any CA in ca.crt of the same Secret")]
    Unsigned,
    #[error("tls.crt is not valid for the webhook's DNS name")]
    WrongName,
}

/// Whether a replica may serve the Secret's leaf.
pub fn check_servable(leaf: Option<&LeafCert>, dns_name: &str) -> Result<(), UnservableLeaf> {
    let leaf = leaf.ok_or(UnservableLeaf::Unreadable)?;
    if leaf.signed_by.is_none() {
        return Err(UnservableLeaf::Unsigned);
    }
    if !leaf.dns_names.contains(dns_name) {
        return Err(UnservableLeaf::WrongName);
    }
    Ok(())
}

/// Whether the wall clock was set between two readings of it and of the monotonic clock: every date must be checked again.
pub fn wall_clock_stepped(before: (SystemTime, Instant), now: (SystemTime, Instant)) -> bool {
    let expected = before.0 + now.1.saturating_duration_since(before.1);
    let step = expected.duration_since(now.0).unwrap_or_else(|ahead| ahead.duration());
    step > CLOCK_STEP_THRESHOLD
}

/// Since when the signer has been in every webhook configuration, on the local clock.
#[derive(Clone, Debug, Default)]
pub struct SignerTrust(Option<(CertId, Instant)>);

impl SignerTrust {
    /// Records an observation at `now` and returns for how long the signer has been trusted without interruption.
    pub fn observe(
        &mut self,
        signer: Option<&CertId>,
        webhook_bundles: &[CaBundle],
        now: Instant,
    ) -> Option<Duration> {
        let trusted = signer.filter(|id| webhook_bundles.iter().all(|bundle| bundle.find(id).is_some()));
        self.0 = match (trusted, self.0.take()) {
            (Some(id), Some((known, since))) if *id == known => Some((known, since)),
            (Some(id), _) => Some((id.clone(), now)),
            (None, _) => None,
        };
        self.0.as_ref().map(|(_, since)| now.saturating_duration_since(*since))
    }
}
