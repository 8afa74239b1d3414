//! What the leader's loop remembers from one look to the next: only what spares writes. All of it may be lost.

use std::{
    collections::{BTreeSet, HashMap, HashSet, VecDeque},
    time::{Duration, Instant},
};

use api::selection::NadRef;
use plan::network::{Relabel, Step, Turn, World};

use super::write::Outcome;

/// A cache that is behind our own write has caught up long before; and if it has not, the write is tried again.
pub const SEEN_AGAIN: Duration = Duration::from_secs(1);
pub const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_mins(1);
/// Keeps a fight with another writer from becoming a storm.
const BREATH: Duration = Duration::from_millis(50);
/// Somebody who undoes our writes is answered at once this often, and then as often in each while.
const ANSWERS: usize = 5;
const WHILE: Duration = Duration::from_secs(10);
/// Events about one attachment are this far apart.
const EVENT_PAUSE: Duration = Duration::from_mins(1);
/// Statuses that differ only in their users are written so often at most.
const USERS_PAUSE: Duration = Duration::from_secs(1);

#[derive(Default)]
pub struct Memory {
    /// By the network's UID.
    networks: HashMap<String, Known>,
    /// The version that an attachment had before it was written, if it was there.
    attachments: HashMap<NadRef, (Option<String>, Instant)>,
    labels: HashMap<String, (Relabel, Instant)>,
    swept: HashMap<String, Instant>,
    /// Attachments that the API server refused, by the network's UID and where they are.
    refused: HashMap<(String, NadRef), Refusal>,
    /// Networks, by UID, about which the API server was asked in vain.
    unanswered: HashMap<String, Refusal>,
    writes: HashMap<NadRef, Writes>,
    /// When the last event about an attachment was sent.
    told: HashMap<NadRef, Instant>,
}

/// What was written to an attachment, and when.
#[derive(Default)]
struct Writes {
    config: String,
    times: VecDeque<Instant>,
}

/// A refusal, and when it is asked for again.
struct Refusal {
    not_before: Instant,
    retry: Duration,
}

impl Refusal {
    /// The next one after this, later each time.
    fn after(last: Option<&Self>, now: Instant) -> Self {
        let retry = last.map_or(FIRST_RETRY, |last| (last.retry * 2).min(LAST_RETRY));
        Self { not_before: now + retry, retry }
    }

    fn rest(&self, now: Instant) -> Option<Duration> {
        Some(self.not_before.saturating_duration_since(now)).filter(|rest| !rest.is_zero())
    }
}

#[derive(Default)]
struct Known {
    /// The version that was written over, and until when it may still be seen.
    stale: Option<(String, Instant)>,
    status_written: Option<Instant>,
    /// The generation of which nothing could be said, and when that is tried again.
    unsaid: Option<(Option<i64>, Refusal)>,
    not_before: Option<Instant>,
    retry: Option<Duration>,
}

impl Memory {
    /// Forgets networks that are no more, and what is long past.
    pub fn tidy(&mut self, world: &World, now: Instant) {
        let past = |then: &Instant, pause| now.saturating_duration_since(*then) >= pause;
        self.writes.retain(|_, writes| writes.times.back().is_some_and(|last| !past(last, WHILE)));
        self.told.retain(|_, last| !past(last, EVENT_PAUSE));
        let live: HashSet<&String> = world.networks.values().map(|network| &network.uid).collect();
        self.networks.retain(|uid, _| live.contains(uid));
        self.unanswered.retain(|uid, _| live.contains(uid));
    }

    /// An attachment that we made and that was seen since need not be waited for: if it is not there, it has gone again.
    pub fn seen(&mut self, stirred: &BTreeSet<NadRef>) {
        self.attachments.retain(|at, (before, _)| before.is_some() || !stirred.contains(at));
    }

    /// How long this turn has to wait, if it has to.
    pub fn wait(&mut self, world: &World, turn: &Turn, now: Instant) -> Option<Duration> {
        self.attachments.retain(|at, (before, until)| {
            let there = world.attachments.as_ref().and_then(|all| all.get(at));
            *until > now && there.map(|one| &one.version) == before.as_ref()
        });
        let known = self.networks.entry(turn.uid.clone()).or_default();
        if let Some(until) = known.not_before.filter(|until| *until > now) {
            return Some(until - now);
        }
        if let Some((_, until)) =
            known.stale.as_ref().filter(|(old, until)| *old == turn.version && *until > now)
        {
            return Some(*until - now);
        }
        let mut waits = turn.places().filter_map(|at| self.attachments.get(at));
        if let Some((_, until)) = waits.next() {
            return Some(*until - now);
        }
        let last = known.status_written.filter(|_| turn.patient)?;
        let rest = USERS_PAUSE.saturating_sub(now.saturating_duration_since(last));
        (!rest.is_zero()).then_some(rest)
    }

    pub fn written(&mut self, turn: &Turn, outcome: Outcome, now: Instant) {
        let known = self.networks.entry(turn.uid.clone()).or_default();
        known.retry = None;
        known.not_before = outcome.blocked.then(|| now + FIRST_RETRY / 5);
        known.stale = outcome.network.then(|| (turn.version.clone(), now + SEEN_AGAIN));
        if turn.status.is_some() && outcome.network {
            known.status_written = Some(now);
            known.unsaid = None;
        }
        for step in &turn.steps {
            self.wrote(step, &outcome, now);
        }
        let sent = turn.events.iter().filter_map(|event| event.about.clone());
        self.told.extend(sent.filter(|at| outcome.wrote(at)).map(|at| (at, now)));
        self.attachments
            .extend(outcome.attachments.into_iter().map(|(at, old)| (at, (old, now + SEEN_AGAIN))));
    }

    fn wrote(&mut self, step: &Step, outcome: &Outcome, now: Instant) {
        match step {
            Step::Create { at, config, .. } | Step::Apply { at, config, .. } if outcome.wrote(at) => {
                let writes = self.writes.entry(at.clone()).or_default();
                if writes.config != *config {
                    *writes = Writes { config: config.clone(), ..Writes::default() };
                }
                writes.times.push_back(now);
                while writes.times.len() > ANSWERS {
                    writes.times.pop_front();
                }
            }
            Step::Delete(all) => all.iter().for_each(|(at, _)| _ = self.writes.remove(at)),
            _ => {}
        }
    }

    /// How long an attachment rests that was written just so, again and again: somebody else wants it otherwise.
    fn contested(&self, at: &NadRef, config: &str, now: Instant) -> Option<Duration> {
        let writes = self.writes.get(at).filter(|writes| writes.config == config)?;
        let first = writes.times.front().filter(|_| writes.times.len() >= ANSWERS)?;
        Some(WHILE.saturating_sub(now.saturating_duration_since(*first)))
    }

    /// Somebody else was quicker: the cache will tell.
    pub fn beaten(&mut self, turn: &Turn, now: Instant) -> Duration {
        self.networks.entry(turn.uid.clone()).or_default().not_before = Some(now + BREATH);
        BREATH
    }

    pub fn failed(&mut self, turn: &Turn, now: Instant) -> Duration {
        let known = self.networks.entry(turn.uid.clone()).or_default();
        let wait = known.retry.map_or(FIRST_RETRY, |last| (last * 2).min(LAST_RETRY));
        known.retry = Some(wait);
        known.not_before = Some(now + wait);
        wait
    }

    /// The API server refused to write this attachment.
    pub fn refused(&mut self, uid: &str, at: &NadRef, now: Instant) {
        let key = (uid.to_owned(), at.clone());
        let again = Refusal::after(self.refused.get(&key), now);
        self.refused.insert(key, again);
    }

    /// The API server did not say whether this network may go.
    pub fn unanswered(&mut self, uid: &str, now: Instant) -> Duration {
        let again = Refusal::after(self.unanswered.get(uid), now);
        let wait = again.retry;
        self.unanswered.insert(uid.to_owned(), again);
        wait
    }

    /// The status could not be written.
    pub fn unsaid(&mut self, turn: &Turn, now: Instant) -> Duration {
        let known = self.networks.entry(turn.uid.clone()).or_default();
        let generation = turn.status.as_ref().and_then(|status| status.observed_generation);
        let last = known.unsaid.take().filter(|(old, _)| *old == generation).map(|(_, last)| last);
        let again = Refusal::after(last.as_ref(), now);
        let wait = again.retry;
        known.unsaid = Some((generation, again));
        wait
    }

    pub fn answered(&mut self, uid: &str) {
        self.unanswered.remove(uid);
    }

    /// Takes out of a turn what was refused a moment ago or is written too often, and says when to try that again; and
    /// events that were told a moment ago.
    pub fn put_off(&mut self, turn: &mut Turn, now: Instant) -> Option<Duration> {
        let unanswered = self.unanswered.get(&turn.uid).and_then(|it| it.rest(now));
        let mut first = unanswered.filter(|_| turn.lets_go());
        let unsaid = self.networks.get(&turn.uid).and_then(|known| known.unsaid.as_ref());
        if let (Some(status), Some((generation, again))) = (&turn.status, unsaid)
            && status.observed_generation == *generation
            && let Some(rest) = again.rest(now)
        {
            turn.status = None;
            first = Some(first.map_or(rest, |first: Duration| first.min(rest)));
        }
        turn.events.retain(|event| event.about.as_ref().is_none_or(|at| !self.told.contains_key(at)));
        let mut rests = |at: &NadRef, config: &str| {
            let refusal = self.refused.get(&(turn.uid.clone(), at.clone()));
            let contest = self.contested(at, config, now).filter(|rest| !rest.is_zero());
            let rest = refusal.and_then(|it| it.rest(now)).max(contest);
            first = [first, rest].into_iter().flatten().min();
            rest.is_some()
        };
        turn.steps.retain_mut(|step| match step {
            Step::Create { at, config, .. } | Step::Apply { at, config, .. } => !rests(at, config),
            Step::Delete(all) => {
                all.retain(|(at, _)| !rests(at, ""));
                !all.is_empty()
            }
            Step::Confirm(all) => {
                all.retain(|at| !rests(at, ""));
                !all.is_empty()
            }
            Step::Release { .. } | Step::Finish { .. } => unanswered.is_none(),
            Step::Finalizers(_) => true,
        });
        first
    }

    /// Forgets refusals of what was written since, or is not asked for any more.
    pub fn keep_refusals(&mut self, still: impl Fn(&str, &NadRef) -> bool) {
        self.refused.retain(|(uid, at), _| still(uid, at));
    }

    /// Whether exactly this was written just now.
    pub fn labelled(&self, relabel: &Relabel, now: Instant) -> bool {
        self.labels.get(&relabel.node).is_some_and(|(last, until)| last == relabel && *until > now)
    }

    pub fn label(&mut self, relabel: Relabel, now: Instant) {
        self.labels.retain(|_, (_, until)| *until > now);
        self.labels.insert(relabel.node.clone(), (relabel, now + SEEN_AGAIN));
    }

    pub fn swept(&self, uid: &str, now: Instant) -> bool {
        self.swept.get(uid).is_some_and(|until| *until > now)
    }

    pub fn sweep(&mut self, uid: String, now: Instant) {
        self.swept.retain(|_, until| *until > now);
        self.swept.insert(uid, now + SEEN_AGAIN);
    }
}

#[cfg(test)]
mod tests {
    use plan::network::Event;

    use super::*;

    fn create(name: &str) -> Step {
        Step::Create { at: NadRef::new("ns", name), config: String::new(), repair: false }
    }

    #[test]
    fn what_was_refused_rests_longer_each_time_and_the_others_do_not() {
        let mut memory = Memory::default();
        let start = Instant::now();
        let bad = NadRef::new("ns", "bad");
        let asked =
            Turn { uid: "u".to_owned(), steps: vec![create("bad"), create("good")], ..Turn::default() };
        for (retry, wait) in [1, 2, 4, 8, 16, 32, 60, 60].into_iter().enumerate() {
            memory.refused("u", &bad, start);
            let mut turn = asked.clone();
            assert_eq!(memory.put_off(&mut turn, start), Some(Duration::from_secs(wait)), "{retry}");
            assert_eq!(turn.steps, [create("good")]);
            assert_eq!(memory.put_off(&mut asked.clone(), start + Duration::from_secs(wait)), None);
        }
        memory.keep_refusals(|_, _| false);
        assert_eq!(memory.put_off(&mut asked.clone(), start), None);
    }

    #[test]
    fn what_was_made_is_waited_for_until_it_was_seen() {
        let mut memory = Memory::default();
        let (start, at) = (Instant::now(), NadRef::new("ns", "blue"));
        let turn = Turn { uid: "u".to_owned(), steps: vec![create("blue")], ..Turn::default() };
        let made = || Outcome { attachments: vec![(at.clone(), None)], ..Outcome::default() };
        memory.written(&turn, made(), start);
        assert_eq!(memory.wait(&World::default(), &turn, start), Some(SEEN_AGAIN));
        memory.seen(&BTreeSet::from([NadRef::new("ns", "other")]));
        assert_eq!(memory.wait(&World::default(), &turn, start), Some(SEEN_AGAIN));
        // It came and went again.
        memory.seen(&BTreeSet::from([at.clone()]));
        assert_eq!(memory.wait(&World::default(), &turn, start), None);
        memory.written(&turn, made(), start);
        assert_eq!(memory.wait(&World::default(), &turn, start + SEEN_AGAIN), None);
    }

    #[test]
    fn a_fight_over_an_attachment_is_no_storm_and_an_edit_does_not_wait_for_it() {
        let mut memory = Memory::default();
        let start = Instant::now();
        let at = NadRef::new("ns", "blue");
        let event = Event {
            about: Some(at.clone()),
            warning: true,
            reason: "AttachmentRepaired",
            note: String::new(),
        };
        let asked = |config: &str| {
            let step = Step::Create { at: at.clone(), config: config.to_owned(), repair: true };
            Turn { uid: "u".to_owned(), steps: vec![step], events: vec![event.clone()], ..Turn::default() }
        };
        let (mut writes, mut events) = (0, 0);
        for tenth in 0..1200 {
            let now = start + Duration::from_millis(100) * tenth;
            memory.tidy(&World::default(), now);
            let mut turn = asked("a");
            memory.put_off(&mut turn, now);
            if tenth < 5 {
                assert_eq!(turn.steps.len(), 1, "it is answered at once at first");
            }
            if !turn.steps.is_empty() {
                let outcome = Outcome { attachments: vec![(at.clone(), None)], ..Outcome::default() };
                (writes, events) = (writes + 1, events + turn.events.len());
                memory.written(&turn, outcome, now);
            }
            assert_eq!(memory.put_off(&mut asked("b"), now), None, "another config is written at once");
        }
        assert_eq!((writes, events), (60, 2), "in two minutes");
    }
}
