//! The state that the controller keeps between two reconciles: expected watch events, backoff and throttling.
//!
//! It only saves writes. All of it may be lost.

use std::{
    collections::{BTreeSet, HashMap, HashSet, VecDeque},
    time::{Duration, Instant},
};

use api::selection::NadRef;
use client::{
    expectations::Expectations,
    retry::{Backoff, Retry},
};
use plan::network::{ClusterState, NetworkPlan, NetworkStep};

use super::apply::ApplyOutcome;
use crate::leader::{EXPECTATION_TTL, MIN_RETRY};

const MAX_RETRY: Duration = Duration::from_mins(1);
/// The delay after a conflict with another writer.
const CONFLICT_RETRY: Duration = Duration::from_millis(50);
/// Repairs of one NAD are immediate up to this number per window, then throttled.
const REPAIR_BURST: usize = 5;
const REPAIR_WINDOW: Duration = Duration::from_secs(10);
/// The minimum time between two events about one NAD.
const EVENT_INTERVAL: Duration = Duration::from_mins(1);
/// The minimum time between two status writes that differ only in the users.
const USERS_STATUS_INTERVAL: Duration = Duration::from_secs(1);

pub struct PendingState {
    /// By the UID of the network.
    networks: HashMap<String, PendingNetwork>,
    /// The resourceVersion that a written NAD had before; None if it did not exist.
    nads: Expectations<NadRef, Option<String>>,
    /// By the UID of the deleted NAD.
    deletions: Expectations<String>,
    /// NADs that the API server rejected, by the UID of the network.
    rejected: HashMap<(String, NadRef), Retry>,
    /// Networks with a failed live read, by UID.
    live_read_failed: HashMap<String, Retry>,
    writes: HashMap<NadRef, NadWrites>,
    /// When the last event about a NAD was recorded.
    events: HashMap<NadRef, Instant>,
}

/// The recent writes of one config to a NAD.
#[derive(Default)]
struct NadWrites {
    config: String,
    times: VecDeque<Instant>,
}

/// The delays after failures. One leader retries, so they need no random part.
fn backoff() -> Backoff {
    Backoff::exact(MIN_RETRY, MAX_RETRY)
}

fn new_retry() -> Retry {
    Retry::new(backoff())
}

#[derive(Default)]
struct PendingNetwork {
    /// The resourceVersion before the last write, and until when the watch may still show it.
    stale: Option<(String, Instant)>,
    status_written_at: Option<Instant>,
    /// The generation whose status could not be written, and its backoff.
    status_write_failed: Option<(Option<i64>, Retry)>,
    not_before: Option<Instant>,
    backoff: Option<Backoff>,
}

impl Default for PendingState {
    fn default() -> Self {
        Self {
            networks: HashMap::new(),
            nads: Expectations::new(EXPECTATION_TTL),
            deletions: Expectations::new(EXPECTATION_TTL),
            rejected: HashMap::new(),
            live_read_failed: HashMap::new(),
            writes: HashMap::new(),
            events: HashMap::new(),
        }
    }
}

impl PendingState {
    /// Forgets deleted networks and expired entries.
    pub fn prune(&mut self, state: &ClusterState, now: Instant) {
        let expired = |then: &Instant, after| now.saturating_duration_since(*then) >= after;
        self.writes.retain(|_, writes| writes.times.back().is_some_and(|last| !expired(last, REPAIR_WINDOW)));
        self.events.retain(|_, last| !expired(last, EVENT_INTERVAL));
        let live: HashSet<&String> = state.networks.values().map(|network| &network.uid).collect();
        self.networks.retain(|uid, _| live.contains(uid));
        self.live_read_failed.retain(|uid, _| live.contains(uid));
    }

    /// Stops waiting for created NADs that the watch has delivered. If such a NAD is missing now, it was deleted again.
    pub fn observe_nads(&mut self, changed_nads: &BTreeSet<NadRef>) {
        self.nads.retain(|at, before| before.is_some() || !changed_nads.contains(at));
    }

    /// How long the plan has to wait for the watch or a backoff, if it has to.
    pub fn wait(&mut self, state: &ClusterState, plan: &NetworkPlan, now: Instant) -> Option<Duration> {
        self.nads.retain(|at, before| {
            let current = state.nads.as_ref().and_then(|all| all.get(at));
            current.map(|nad| &nad.version) == before.as_ref()
        });
        let network = self.networks.entry(plan.uid.clone()).or_default();
        if let Some(until) = network.not_before.filter(|until| *until > now) {
            return Some(until - now);
        }
        if let Some((_, until)) =
            network.stale.as_ref().filter(|(old, until)| *old == plan.version && *until > now)
        {
            return Some(*until - now);
        }
        if let Some(rest) = plan.nads().find_map(|at| self.nads.remaining(at, now, |_| true)) {
            return Some(rest);
        }
        let last = network.status_written_at.filter(|_| plan.deferrable)?;
        let rest = USERS_STATUS_INTERVAL.saturating_sub(now.saturating_duration_since(last));
        (!rest.is_zero()).then_some(rest)
    }

    pub fn written(&mut self, plan: &NetworkPlan, outcome: ApplyOutcome, now: Instant) {
        let network = self.networks.entry(plan.uid.clone()).or_default();
        network.backoff = None;
        network.not_before = outcome.blocked.then(|| now + MIN_RETRY / 5);
        network.stale = outcome.network_written.then(|| (plan.version.clone(), now + EXPECTATION_TTL));
        if plan.status.is_some() && outcome.network_written {
            network.status_written_at = Some(now);
            network.status_write_failed = None;
        }
        for step in &plan.steps {
            self.record_step(step, &outcome, now);
        }
        let sent = plan.events.iter().filter_map(|event| event.nad.clone());
        self.events.extend(sent.filter(|at| outcome.wrote(at)).map(|at| (at, now)));
        for (at, old) in outcome.nads {
            self.nads.expect(at, old, now);
        }
    }

    fn record_step(&mut self, step: &NetworkStep, outcome: &ApplyOutcome, now: Instant) {
        match step {
            NetworkStep::CreateNad { at, config, .. } | NetworkStep::ApplyNad { at, config, .. }
                if outcome.wrote(at) =>
            {
                let writes = self.writes.entry(at.clone()).or_default();
                if writes.config != *config {
                    *writes = NadWrites { config: config.clone(), ..NadWrites::default() };
                }
                writes.times.push_back(now);
                while writes.times.len() > REPAIR_BURST {
                    writes.times.pop_front();
                }
            }
            NetworkStep::DeleteNads(all) => all.iter().for_each(|(at, _)| _ = self.writes.remove(at)),
            _ => {}
        }
    }

    /// How long to hold back a repair that was written too often, because another writer keeps undoing it.
    fn throttle(&self, at: &NadRef, config: &str, now: Instant) -> Option<Duration> {
        let writes = self.writes.get(at).filter(|writes| writes.config == config)?;
        let first = writes.times.front().filter(|_| writes.times.len() >= REPAIR_BURST)?;
        Some(REPAIR_WINDOW.saturating_sub(now.saturating_duration_since(*first)))
    }

    /// Another writer changed the object first: the watch will deliver its change.
    pub fn conflicted(&mut self, plan: &NetworkPlan, now: Instant) -> Duration {
        self.networks.entry(plan.uid.clone()).or_default().not_before = Some(now + CONFLICT_RETRY);
        CONFLICT_RETRY
    }

    pub fn failed(&mut self, plan: &NetworkPlan, now: Instant) -> Duration {
        let network = self.networks.entry(plan.uid.clone()).or_default();
        let wait = network.backoff.get_or_insert_with(backoff).next_delay();
        network.not_before = Some(now + wait);
        wait
    }

    /// Backs off a NAD that the API server rejected.
    pub fn rejected(&mut self, uid: &str, at: &NadRef, now: Instant) {
        self.rejected.entry((uid.to_owned(), at.clone())).or_insert_with(new_retry).failed(now);
    }

    /// Backs off the live reads of a network.
    pub fn live_read_failed(&mut self, uid: &str, now: Instant) -> Duration {
        self.live_read_failed.entry(uid.to_owned()).or_insert_with(new_retry).failed(now)
    }

    /// Backs off the status of a network, unless its generation changes.
    pub fn status_write_failed(&mut self, plan: &NetworkPlan, now: Instant) -> Duration {
        let network = self.networks.entry(plan.uid.clone()).or_default();
        let generation = plan.status.as_ref().and_then(|status| status.observed_generation);
        let last =
            network.status_write_failed.take().filter(|(old, _)| *old == generation).map(|(_, last)| last);
        let mut retry = last.unwrap_or_else(new_retry);
        let wait = retry.failed(now);
        network.status_write_failed = Some((generation, retry));
        wait
    }

    pub fn live_read_succeeded(&mut self, uid: &str) {
        self.live_read_failed.remove(uid);
    }

    /// Drops steps that back off or are throttled, and events that were recorded recently. Returns when the first dropped
    /// step is due.
    pub fn drop_backed_off(&mut self, plan: &mut NetworkPlan, now: Instant) -> Option<Duration> {
        let live_read_failed = self.live_read_failed.get(&plan.uid).and_then(|it| it.remaining(now));
        let mut first = live_read_failed.filter(|_| plan.removes_finalizer());
        let status_write_failed =
            self.networks.get(&plan.uid).and_then(|network| network.status_write_failed.as_ref());
        if let (Some(status), Some((generation, retry))) = (&plan.status, status_write_failed)
            && status.observed_generation == *generation
            && let Some(rest) = retry.remaining(now)
        {
            plan.status = None;
            first = Some(first.map_or(rest, |first: Duration| first.min(rest)));
        }
        plan.events.retain(|event| event.nad.as_ref().is_none_or(|at| !self.events.contains_key(at)));
        let mut backed_off = |at: &NadRef, config: &str| {
            let rejection = self.rejected.get(&(plan.uid.clone(), at.clone()));
            let throttled = self.throttle(at, config, now).filter(|rest| !rest.is_zero());
            let rest = rejection.and_then(|it| it.remaining(now)).max(throttled);
            first = [first, rest].into_iter().flatten().min();
            rest.is_some()
        };
        plan.steps.retain_mut(|step| match step {
            NetworkStep::CreateNad { at, config, .. } | NetworkStep::ApplyNad { at, config, .. } => {
                !backed_off(at, config)
            }
            NetworkStep::DeleteNads(all) => {
                all.retain(|(at, _)| !backed_off(at, ""));
                !all.is_empty()
            }
            NetworkStep::ConfirmNadsUnused(all) => {
                all.retain(|at| !backed_off(at, ""));
                !all.is_empty()
            }
            NetworkStep::RemoveUsersFinalizer { .. } | NetworkStep::RemoveNodesFinalizer { .. } => {
                live_read_failed.is_none()
            }
            NetworkStep::SetFinalizers(_) => true,
        });
        first
    }

    /// Forgets rejections of NADs that were written since or are no longer planned.
    pub fn retain_rejected(&mut self, planned: impl Fn(&str, &NadRef) -> bool) {
        self.rejected.retain(|(uid, at), _| planned(uid, at));
    }

    /// Whether the object's deletion was sent and the watch has not had time to deliver it.
    pub fn deletion_pending(&self, uid: &str, now: Instant) -> bool {
        self.deletions.is_pending(&uid.to_owned(), now)
    }

    pub fn deletion_sent(&mut self, uid: String, now: Instant) {
        self.deletions.expect(uid, (), now);
    }
}

#[cfg(test)]
mod tests {
    use plan::network::EventDraft;

    use super::*;

    fn create(name: &str) -> NetworkStep {
        NetworkStep::CreateNad { at: NadRef::new("ns", name), config: String::new(), repair: false }
    }

    #[test]
    fn a_rejected_nad_backs_off_and_the_others_do_not() {
        let mut pending = PendingState::default();
        let start = Instant::now();
        let bad = NadRef::new("ns", "bad");
        let planned = NetworkPlan {
            uid: "u".to_owned(),
            steps: vec![create("bad"), create("good")],
            ..NetworkPlan::default()
        };
        for (retry, wait) in [1, 2, 4, 8, 16, 32, 60, 60].into_iter().enumerate() {
            pending.rejected("u", &bad, start);
            let mut plan = planned.clone();
            assert_eq!(pending.drop_backed_off(&mut plan, start), Some(Duration::from_secs(wait)), "{retry}");
            assert_eq!(plan.steps, [create("good")]);
            assert_eq!(
                pending.drop_backed_off(&mut planned.clone(), start + Duration::from_secs(wait)),
                None
            );
        }
        pending.retain_rejected(|_, _| false);
        assert_eq!(pending.drop_backed_off(&mut planned.clone(), start), None);
    }

    #[test]
    fn a_created_nad_is_awaited_until_the_watch_delivers_it() {
        let mut pending = PendingState::default();
        let (start, at) = (Instant::now(), NadRef::new("ns", "blue"));
        let plan = NetworkPlan { uid: "u".to_owned(), steps: vec![create("blue")], ..NetworkPlan::default() };
        let created = || ApplyOutcome { nads: vec![(at.clone(), None)], ..ApplyOutcome::default() };
        pending.written(&plan, created(), start);
        assert_eq!(pending.wait(&ClusterState::default(), &plan, start), Some(EXPECTATION_TTL));
        pending.observe_nads(&BTreeSet::from([NadRef::new("ns", "other")]));
        assert_eq!(pending.wait(&ClusterState::default(), &plan, start), Some(EXPECTATION_TTL));
        // Created and deleted again.
        pending.observe_nads(&BTreeSet::from([at.clone()]));
        assert_eq!(pending.wait(&ClusterState::default(), &plan, start), None);
        pending.written(&plan, created(), start);
        assert_eq!(pending.wait(&ClusterState::default(), &plan, start + EXPECTATION_TTL), None);
    }

    #[test]
    fn repairs_are_throttled_and_a_new_config_is_not() {
        let mut pending = PendingState::default();
        let start = Instant::now();
        let at = NadRef::new("ns", "blue");
        let event = EventDraft {
            nad: Some(at.clone()),
            warning: true,
            reason: "AttachmentRepaired",
            note: String::new(),
        };
        let planned = |config: &str| {
            let step = NetworkStep::CreateNad { at: at.clone(), config: config.to_owned(), repair: true };
            NetworkPlan {
                uid: "u".to_owned(),
                steps: vec![step],
                events: vec![event.clone()],
                ..NetworkPlan::default()
            }
        };
        let (mut writes, mut events) = (0, 0);
        for tenth in 0..1200 {
            let now = start + Duration::from_millis(100) * tenth;
            pending.prune(&ClusterState::default(), now);
            let mut plan = planned("a");
            pending.drop_backed_off(&mut plan, now);
            if tenth < 5 {
                assert_eq!(plan.steps.len(), 1, "the first repairs are immediate");
            }
            if !plan.steps.is_empty() {
                let outcome = ApplyOutcome { nads: vec![(at.clone(), None)], ..ApplyOutcome::default() };
                (writes, events) = (writes + 1, events + plan.events.len());
                pending.written(&plan, outcome, now);
            }
            assert_eq!(
                pending.drop_backed_off(&mut planned("b"), now),
                None,
                "another config is written at once"
            );
        }
        assert_eq!((writes, events), (60, 2), "in two minutes");
    }
}
