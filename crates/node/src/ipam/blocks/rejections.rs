//! Requests that the API server rejects: each network and kind of request has a backoff of its own.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use kube::runtime::watcher::DefaultBackoff;
use plan::ipam::RequestKind;

use super::ipblocks::API_TIMEOUT;

/// How long after a rejection its backoff is remembered.
const BACKOFF_MEMORY: Duration = Duration::from_secs(120);

/// The rejected requests, by the UID of the network.
#[derive(Default)]
pub struct Rejections(BTreeMap<(String, RequestKind), RejectedRequest>);

struct RejectedRequest {
    /// Until when the request is not repeated.
    until: Instant,
    backoff: DefaultBackoff,
    problem: String,
}

impl Rejections {
    pub fn expire(&mut self, now: Instant) {
        self.0.retain(|_, one| one.until + BACKOFF_MEMORY > now);
    }

    /// Records a rejection, and returns how long the request is not repeated.
    pub fn add(&mut self, network: &str, kind: RequestKind, problem: &str, now: Instant) -> Duration {
        let new =
            || RejectedRequest { until: now, backoff: DefaultBackoff::default(), problem: String::new() };
        let one = self.0.entry((network.to_owned(), kind)).or_insert_with(new);
        let wait = one.backoff.next().unwrap_or(API_TIMEOUT).min(API_TIMEOUT);
        one.until = now + wait;
        problem.clone_into(&mut one.problem);
        wait
    }

    /// Why a request is not repeated now.
    pub fn problem(&self, network: &str, kind: RequestKind, now: Instant) -> Option<&str> {
        let one = self.0.get(&(network.to_owned(), kind)).filter(|one| one.until > now)?;
        Some(&one.problem)
    }

    /// When the requests are repeated.
    pub fn deadlines(&self) -> impl Iterator<Item = Instant> {
        self.0.values().map(|one| one.until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rejection_delays_one_kind_of_request_of_one_network() {
        let (mut rejections, now) = (Rejections::default(), Instant::now());
        let wait = rejections.add("net", RequestKind::Acquire, "no", now);
        assert!(!wait.is_zero() && wait <= API_TIMEOUT);
        assert_eq!(rejections.problem("net", RequestKind::Acquire, now), Some("no"));
        assert_eq!(rejections.problem("net", RequestKind::Delete, now), None);
        assert_eq!(rejections.problem("other", RequestKind::Acquire, now), None);
        assert_eq!(rejections.problem("net", RequestKind::Acquire, now + wait), None);
        assert_eq!(rejections.deadlines().collect::<Vec<_>>(), [now + wait]);
        rejections.expire(now + wait);
        assert_eq!(rejections.deadlines().count(), 1, "the backoff is remembered");
        rejections.expire(now + wait + BACKOFF_MEMORY);
        assert_eq!(rejections.deadlines().count(), 0);
    }
}
