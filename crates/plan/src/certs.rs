//! The webhook's certificates: which one step comes next, or when to look again.
//!
//! The order is what matters. A new authority joins the trusted bundle first, in the Secret and in every webhook
//! configuration; only after it was seen there for the settle time is a leaf signed by it; it leaves the bundle last, after it has
//! expired, because a replica that is cut off may serve an old leaf until then. Damage goes through the same steps: an authority that
//! only a configuration still knows is taken back into the Secret, since replicas may still serve its leaf.

#[cfg(test)]
mod rotation;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeSet,
    time::{Duration, Instant, SystemTime},
};

/// The most authorities in one bundle. Two or three is normal; this bounds what endless damage can pile up.
pub const MOST_AUTHORITIES: usize = 16;

/// How far the clocks of a cluster are allowed to differ.
const SKEW: Duration = Duration::from_mins(5);

/// No authority is made to live longer, so one that claims more is not believed: it would stay trusted for ever.
pub const LONGEST_LIFE: Duration = Duration::from_hours(3650 * 24);

/// No sleep is longer than this, whatever the dates say.
const LONGEST_LOOK: Duration = Duration::from_hours(1);

/// A wall clock that moves this far against the monotonic one between two looks was set, or the machine slept.
const CLOCK_STEP: Duration = Duration::from_secs(1);

/// A certificate's identity: its DER encoding.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Id(pub Vec<u8>);

/// From when until when a certificate is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Validity {
    pub from: SystemTime,
    pub until: SystemTime,
}

/// A certificate of an authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authority {
    pub id: Id,
    pub validity: Validity,
    pub origin: Origin,
}

/// Whether an authority looks like one that Patchbay made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Ours,
    Foreign,
}

/// A list of trusted authorities, as it stands somewhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bundle {
    pub authorities: Vec<Authority>,
    /// Some part of it could not be read.
    pub damaged: bool,
}

/// A serving certificate whose key is at hand and fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// The authority of the Secret's bundle that signed it.
    pub signed_by: Option<Id>,
    pub validity: Validity,
    pub names: BTreeSet<String>,
}

/// What is there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// The bundle in the Secret.
    pub secret: Bundle,
    /// The authority in the Secret's bundle whose key the Secret has.
    pub signer: Option<Id>,
    /// The Secret's serving certificate; `None` if it is missing, unreadable or does not fit its key.
    pub leaf: Option<Leaf>,
    /// The bundle of every webhook in every configuration.
    pub configurations: Vec<Bundle>,
    /// For how long the signer has been seen in all of them without a break: see [`Trust`].
    pub trusted_for: Option<Duration>,
}

/// What is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The one name by which API servers call the webhook.
    pub name: String,
    pub authority_life: Duration,
    pub leaf_life: Duration,
    /// How long an API server may go on using a bundle after it was changed.
    pub settle: Duration,
}

/// One write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make a new authority; the Secret's bundle becomes it and those to keep, its key replaces the old one's.
    Found { validity: Validity, keep: Vec<Id> },
    /// Make the Secret's bundle exactly these.
    Bundle { keep: Vec<Id> },
    /// Put the Secret's bundle into every configuration that shows another one.
    Publish,
    /// Sign a new leaf with the signer.
    Sign { validity: Validity },
}

/// What to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    Step(Step),
    /// All is well for this long.
    Look(Duration),
}

impl Validity {
    /// The validity of a certificate made `now`, dated back so that a clock that is behind accepts it.
    pub fn starting(now: SystemTime, life: Duration) -> Self {
        Self { from: now - slack(life), until: now + life }
    }

    /// Two thirds of its life.
    pub fn renew_at(&self) -> SystemTime {
        self.from + self.length() * 2 / 3
    }

    /// When even a clock that is behind agrees that it is over.
    pub fn gone_at(&self) -> SystemTime {
        self.until + slack(self.length())
    }

    fn length(&self) -> Duration {
        self.until.duration_since(self.from).unwrap_or_default()
    }

    fn fresh(&self, now: SystemTime) -> bool {
        self.from <= now && now < self.renew_at()
    }

    fn believable(&self) -> bool {
        self.length() <= LONGEST_LIFE + SKEW
    }
}

/// What skew is allowed for a certificate of this life: short lives, as in tests, leave little room.
fn slack(life: Duration) -> Duration {
    (life / 10).min(SKEW)
}

impl Bundle {
    /// Whether both hold the same authorities and nothing else.
    pub fn matches(&self, other: &Self) -> bool {
        !self.damaged && !other.damaged && self.ids() == other.ids()
    }

    fn ids(&self) -> BTreeSet<&Id> {
        self.authorities.iter().map(|authority| &authority.id).collect()
    }

    fn find(&self, id: &Id) -> Option<&Authority> {
        self.authorities.iter().find(|authority| authority.id == *id)
    }
}

/// The one thing to do now.
pub fn next(observed: &Observed, policy: &Policy, now: SystemTime) -> Next {
    let keep = keep(observed, now);
    let signer = observed.signer.as_ref().and_then(|id| observed.secret.find(id));
    let Some(signer) = signer.filter(|signer| signer.validity.believable() && signer.validity.fresh(now))
    else {
        let keep =
            keep.into_iter().take(MOST_AUTHORITIES - 1).map(|authority| authority.id.clone()).collect();
        return Next::Step(Step::Found { validity: Validity::starting(now, policy.authority_life), keep });
    };
    let wanted: BTreeSet<_> = keep.iter().map(|authority| &authority.id).collect();
    if observed.secret.damaged || observed.secret.ids() != wanted {
        return Next::Step(Step::Bundle {
            keep: keep.iter().map(|authority| authority.id.clone()).collect(),
        });
    }
    if observed.configurations.iter().any(|bundle| bundle.damaged || bundle.ids() != wanted) {
        return Next::Step(Step::Publish);
    }
    let Some(leaf) = observed.leaf.as_ref().filter(|leaf| serves(leaf, signer, policy, now)) else {
        let trusted = observed.trusted_for.unwrap_or_default();
        return match policy.settle.checked_sub(trusted) {
            Some(rest) if !rest.is_zero() => Next::Look(rest),
            Some(_) | None => Next::Step(Step::Sign { validity: leaf_validity(signer, policy, now) }),
        };
    };
    let others = keep.iter().filter(|other| other.id != signer.id).map(|other| other.validity.gone_at());
    let look = others.chain([signer.validity.renew_at(), leaf.validity.renew_at()]).min();
    let rest = look.and_then(|at| at.duration_since(now).ok()).unwrap_or_default();
    Next::Look(rest.min(LONGEST_LOOK))
}

/// The authorities that have to stay trusted: the signer first, then the current leaf's, then the youngest.
fn keep(observed: &Observed, now: SystemTime) -> Vec<&Authority> {
    let leaf = observed.leaf.as_ref().and_then(|leaf| leaf.signed_by.as_ref());
    let known = observed.configurations.iter().flat_map(|bundle| &bundle.authorities);
    let mut keep: Vec<_> = observed
        .secret
        .authorities
        .iter()
        // A foreign authority in a configuration is a hand edit; one of ours there is what is left of a damaged Secret.
        .chain(known.filter(|authority| authority.origin == Origin::Ours))
        .filter(|authority| authority.validity.believable() && now < authority.validity.gone_at())
        .collect();
    let rank = |authority: &Authority| {
        let first = if Some(&authority.id) == observed.signer.as_ref() {
            0
        } else if Some(&authority.id) == leaf {
            1
        } else {
            2
        };
        (first, std::cmp::Reverse(authority.validity.until))
    };
    keep.sort_by(|a, b| (rank(a), &a.id).cmp(&(rank(b), &b.id)));
    keep.dedup_by(|a, b| a.id == b.id);
    keep.truncate(MOST_AUTHORITIES);
    keep
}

fn serves(leaf: &Leaf, signer: &Authority, policy: &Policy, now: SystemTime) -> bool {
    leaf.signed_by.as_ref() == Some(&signer.id)
        && leaf.names.iter().eq([&policy.name])
        && leaf.validity.fresh(now)
}

/// A leaf never outlives its authority.
fn leaf_validity(signer: &Authority, policy: &Policy, now: SystemTime) -> Validity {
    let rest = signer.validity.until.duration_since(now).unwrap_or_default();
    let validity = Validity::starting(now, policy.leaf_life.min(rest));
    Validity { from: validity.from.max(signer.validity.from), ..validity }
}

/// Why a replica does not serve a certificate. Its dates are for the leader to judge: a replica whose clock is wrong had better serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    #[error("it is missing, unreadable or does not fit its key")]
    Unreadable,
    #[error("no authority in the same Secret signed it")]
    Unsigned,
    #[error("it is not made out for this webhook's name")]
    OtherNames,
}

/// Whether a replica may serve what the Secret holds.
pub fn fit(leaf: Option<&Leaf>, name: &str) -> Result<(), Unfit> {
    let leaf = leaf.ok_or(Unfit::Unreadable)?;
    if leaf.signed_by.is_none() {
        return Err(Unfit::Unsigned);
    }
    if !leaf.names.contains(name) {
        return Err(Unfit::OtherNames);
    }
    Ok(())
}

/// Whether the wall clock was set between two looks at it and at the monotonic clock: then every date has to be judged anew.
pub fn clock_was_set(before: (SystemTime, Instant), now: (SystemTime, Instant)) -> bool {
    let expected = before.0 + now.1.saturating_duration_since(before.1);
    let step = expected.duration_since(now.0).unwrap_or_else(|ahead| ahead.duration());
    step > CLOCK_STEP
}

/// Since when the signer has been seen in every configuration, on the own clock.
#[derive(Clone, Debug, Default)]
pub struct Trust(Option<(Id, Instant)>);

impl Trust {
    /// Takes in what was seen at `now` and says for how long the signer has been trusted without a break.
    pub fn look(&mut self, signer: Option<&Id>, configurations: &[Bundle], now: Instant) -> Option<Duration> {
        let trusted = signer.filter(|id| configurations.iter().all(|bundle| bundle.find(id).is_some()));
        self.0 = match (trusted, self.0.take()) {
            (Some(id), Some((held, since))) if *id == held => Some((held, since)),
            (Some(id), _) => Some((id.clone(), now)),
            (None, _) => None,
        };
        self.0.as_ref().map(|(_, since)| now.saturating_duration_since(*since))
    }
}
