//! Own writes that the watches have not delivered yet.
//!
//! A plan on the cache alone would repeat a write, and could not publish an address that was just reserved. An entry
//! stands in for the cached object as long as the cache has the version that the write was based on.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use plan::{
    claims::ClaimState,
    network::{BlockState, ClusterState},
};

/// How long an entry stands in for an object that the watch does not deliver, such as one that was deleted meanwhile.
const OVERLAY_TTL: Duration = Duration::from_secs(10);

/// Own writes of one network.
#[derive(Default)]
pub struct Overlay {
    /// By the name of the block.
    blocks: BTreeMap<String, Written<BlockState>>,
    /// By the UID of the claim.
    claims: HashMap<String, Written<Arc<ClaimState>>>,
}

struct Written<T> {
    /// The version that the write was based on; None for a create.
    base: Option<String>,
    /// The version between two writes that belong together.
    between: Option<String>,
    /// None if it was deleted.
    object: Option<T>,
    at: Instant,
}

impl<T> Written<T> {
    /// Whether the cache, which has this version, does not show the write yet.
    fn is_ahead(&self, cached: Option<&str>, now: Instant) -> bool {
        let is_older =
            self.base.as_deref() == cached || self.between.is_some() && self.between.as_deref() == cached;
        is_older && now < self.at + OVERLAY_TTL
    }
}

impl Overlay {
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty() && self.claims.is_empty()
    }

    /// Records a write of a block.
    pub fn wrote_block(&mut self, name: &str, base: Option<&str>, object: Option<BlockState>, now: Instant) {
        // A write on top of one that the cache does not show yet is based on what the cache has.
        let base = match self.blocks.remove(name) {
            Some(before) if before.object.as_ref().map(|one| one.version.as_str()) == base => before.base,
            _ => base.map(str::to_owned),
        };
        self.blocks.insert(name.to_owned(), Written { base, between: None, object, at: now });
    }

    /// Records writes of a claim that were based on this state. `between` is the version after the first of two.
    pub fn wrote_claim(
        &mut self,
        before: &ClaimState,
        between: Option<String>,
        after: ClaimState,
        now: Instant,
    ) {
        let base = match self.claims.remove(&before.uid) {
            Some(earlier) if earlier.object.as_ref().is_some_and(|one| one.version == before.version) => {
                earlier.base
            }
            _ => Some(before.version.clone()),
        };
        let written = Written { base, between, object: Some(Arc::new(after)), at: now };
        self.claims.insert(before.uid.clone(), written);
    }

    /// The blocks of a network, with own writes. Forgets those that the cache shows.
    pub fn blocks(
        &mut self,
        state: &ClusterState,
        network: &str,
        now: Instant,
    ) -> BTreeMap<String, BlockState> {
        let cached = |name: &str| state.blocks.get(name).map(|block| block.version.as_str());
        self.blocks.retain(|name, written| written.is_ahead(cached(name), now));
        let of_network = state.blocks.iter().filter(|(_, block)| block.object.spec.network == network);
        let mut blocks: BTreeMap<String, BlockState> =
            of_network.map(|(name, block)| (name.clone(), block.clone())).collect();
        for (name, written) in &self.blocks {
            match &written.object {
                Some(block) => blocks.insert(name.clone(), block.clone()),
                None => blocks.remove(name),
            };
        }
        blocks
    }

    /// The claim with own writes. Forgets one that the cache shows.
    pub fn claim(&mut self, cached: &Arc<ClaimState>, now: Instant) -> Arc<ClaimState> {
        let Some(written) = self.claims.get(&cached.uid) else { return Arc::clone(cached) };
        if written.is_ahead(Some(&cached.version), now)
            && let Some(claim) = &written.object
        {
            return Arc::clone(claim);
        }
        self.claims.remove(&cached.uid);
        Arc::clone(cached)
    }

    /// Forgets the claims that no longer exist.
    pub fn retain_claims(&mut self, exists: impl Fn(&str) -> bool) {
        self.claims.retain(|uid, _| exists(uid));
    }
}
