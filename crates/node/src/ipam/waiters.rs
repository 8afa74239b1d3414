//! The ADDs that wait for addresses, by what they wait for.

use std::{collections::BTreeMap, net::IpAddr};

use plan::ipam::{Family, PendingRequests};

/// Addresses that waiting ADDs need, by the UID of the network.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum PendingRequest {
    Any(String, Family),
    Address(String, IpAddr),
}

impl PendingRequest {
    /// The UID of the network.
    pub fn network(&self) -> &str {
        match self {
            Self::Any(network, _) | Self::Address(network, _) => network,
        }
    }
}

/// The waiting ADDs, and why they fail.
#[derive(Debug, Default)]
pub struct Waiters {
    counts: BTreeMap<PendingRequest, usize>,
    /// Why a request fails, for the ADDs that wait for it.
    failures: BTreeMap<PendingRequest, String>,
}

impl Waiters {
    /// The first ADD that waits for a request starts without its earlier failure.
    pub fn add(&mut self, request: &PendingRequest) {
        let count = self.counts.entry(request.clone()).or_insert(0);
        *count += 1;
        if *count == 1 {
            self.failures.remove(request);
        }
    }

    pub fn remove(&mut self, request: &PendingRequest) {
        if let Some(count) = self.counts.get_mut(request) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(request);
                self.failures.remove(request);
            }
        }
    }

    /// Fails the ADDs that wait for a request; returns whether there are any.
    pub fn fail(&mut self, request: PendingRequest, reason: String) -> bool {
        let waits = self.counts.contains_key(&request);
        if waits {
            self.failures.insert(request, reason);
        }
        waits
    }

    pub fn failure(&self, request: &PendingRequest) -> Option<String> {
        self.failures.get(request).cloned()
    }

    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    pub fn contains(&self, request: &PendingRequest) -> bool {
        self.counts.contains_key(request)
    }

    pub fn requests(&self) -> impl Iterator<Item = &PendingRequest> {
        self.counts.keys()
    }

    /// What the block planner needs to know.
    pub fn pending(&self) -> PendingRequests {
        let mut pending = PendingRequests::default();
        for (request, count) in &self.counts {
            match request {
                PendingRequest::Any(network, family) => {
                    _ = pending.any.insert((network.clone(), *family), *count);
                }
                PendingRequest::Address(network, address) => {
                    _ = pending.addresses.insert((network.clone(), *address));
                }
            }
        }
        pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_reaches_every_add_that_waits_and_none_that_comes_later() {
        let (mut waiters, any) = (Waiters::default(), PendingRequest::Any("net".to_owned(), Family::V4));
        assert!(!waiters.fail(any.clone(), "full".to_owned()), "no ADD waits");
        waiters.add(&any);
        assert_eq!(waiters.failure(&any), None);
        waiters.add(&any);
        assert_eq!(waiters.pending().any, BTreeMap::from([(("net".to_owned(), Family::V4), 2)]));
        assert!(waiters.fail(any.clone(), "full".to_owned()));
        for _ in 0..2 {
            assert_eq!(waiters.failure(&any).as_deref(), Some("full"));
            waiters.remove(&any);
        }
        assert!(waiters.is_empty());
        waiters.add(&any);
        assert_eq!(waiters.failure(&any), None);
    }

    #[test]
    fn a_request_for_an_address_is_planned_once_however_many_adds_wait() {
        let mut waiters = Waiters::default();
        let address = PendingRequest::Address("net".to_owned(), "10.0.0.1".parse().unwrap());
        waiters.add(&address);
        waiters.add(&address);
        assert_eq!(waiters.pending().addresses.len(), 1);
        waiters.remove(&address);
        assert!(waiters.contains(&address));
        assert_eq!(address.network(), "net");
    }
}
