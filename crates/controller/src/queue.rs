//! The keys that have to be reconciled: a set, so that many changes of one key cause one reconcile.
//!
//! A key is reconciled by one worker at a time. A change that arrives meanwhile is reconciled afterwards. Groups of keys
//! take turns, and a group has a limited number of workers.

use std::{
    collections::{BTreeSet, HashMap, HashSet, VecDeque},
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::Notify;

/// How long the changes of a burst are collected: from the first time to the second, doubled while the burst lasts, and at
/// least as long as the last reconcile took, up to the third.
const MIN_PAUSE: Duration = Duration::from_millis(20);
const MAX_PAUSE: Duration = Duration::from_millis(200);
const MAX_SLOW_PAUSE: Duration = Duration::from_secs(1);

/// What is queued.
pub trait QueueKey: Clone + Ord + Hash {
    /// Keys whose reconciles can hang together, such as those of one namespace.
    type Group: Clone + Eq + Hash;
    /// How many keys of a group are reconciled at a time.
    const MAX_RUNNING_PER_GROUP: usize;

    fn group(&self) -> Self::Group;
}

/// The least time between two reconciles of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// Only if the key changed during its reconcile: more changes will follow, and are written together. A single change
    /// is not delayed.
    Burst,
    Always(Duration),
}

/// The queue. Cheap to clone. It ignores changes until [`WorkQueue::start_term`].
pub struct WorkQueue<K: QueueKey>(Arc<QueueInner<K>>);

struct QueueInner<K: QueueKey> {
    keys: Mutex<KeySets<K>>,
    changed: Notify,
}

impl<K: QueueKey> Clone for WorkQueue<K> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K: QueueKey> Default for WorkQueue<K> {
    fn default() -> Self {
        Self(Arc::new(QueueInner { keys: Mutex::default(), changed: Notify::new() }))
    }
}

/// The time in which a queue has workers. Nothing of it is left for the next one: a worker that was aborted finishes no key.
pub struct QueueTerm<K: QueueKey>(WorkQueue<K>);

impl<K: QueueKey> Drop for QueueTerm<K> {
    fn drop(&mut self) {
        *self.0.lock() = KeySets::default();
    }
}

/// Each key is in at most one of `ready` and `delayed`, and also in `running` while it is reconciled.
struct KeySets<K: QueueKey> {
    /// Whether there are workers. Without them the sets would only grow.
    started: bool,
    ready: ReadyKeys<K>,
    delayed: BTreeSet<(Instant, K)>,
    due: HashMap<K, Instant>,
    /// When the reconcile of each key started.
    running: HashMap<K, Instant>,
    /// The number of running keys of each group that has any.
    running_in: HashMap<K::Group, usize>,
    /// The last pause of the keys that change in bursts.
    bursts: HashMap<K, Duration>,
    /// No reconcile of the key starts before this time. Kept only while it lies ahead.
    not_before: HashMap<K, Instant>,
}

impl<K: QueueKey> Default for KeySets<K> {
    fn default() -> Self {
        Self {
            started: false,
            ready: ReadyKeys::default(),
            delayed: BTreeSet::new(),
            due: HashMap::new(),
            running: HashMap::new(),
            running_in: HashMap::new(),
            bursts: HashMap::new(),
            not_before: HashMap::new(),
        }
    }
}

/// The keys that are due, by group.
struct ReadyKeys<K: QueueKey> {
    keys: HashSet<K>,
    /// No queue is empty.
    groups: HashMap<K::Group, VecDeque<K>>,
    /// The keys of `groups`; the group whose turn it is comes first.
    turns: VecDeque<K::Group>,
}

impl<K: QueueKey> Default for ReadyKeys<K> {
    fn default() -> Self {
        Self { keys: HashSet::new(), groups: HashMap::new(), turns: VecDeque::new() }
    }
}

impl<K: QueueKey> ReadyKeys<K> {
    fn contains(&self, key: &K) -> bool {
        self.keys.contains(key)
    }

    fn push(&mut self, key: K) {
        if !self.keys.insert(key.clone()) {
            return;
        }
        let group = key.group();
        let queue = self.groups.entry(group.clone()).or_default();
        if queue.is_empty() {
            self.turns.push_back(group);
        }
        queue.push_back(key);
    }

    /// Removes the first key that may run. The other groups get their turn before the next key of its group.
    fn take(&mut self, has_worker: impl Fn(&K::Group) -> bool, is_running: impl Fn(&K) -> bool) -> Option<K> {
        for turn in 0..self.turns.len() {
            let group = &self.turns[turn];
            if !has_worker(group) {
                continue;
            }
            let first = self.groups.get(group).and_then(|queue| queue.iter().find(|key| !is_running(key)));
            if let Some(key) = first.cloned() {
                let group = self.turns.remove(turn);
                self.turns.extend(group);
                self.remove(&key);
                return Some(key);
            }
        }
        None
    }

    fn remove(&mut self, key: &K) -> bool {
        if !self.keys.remove(key) {
            return false;
        }
        let group = key.group();
        if let Some(queue) = self.groups.get_mut(&group) {
            if let Some(position) = queue.iter().position(|queued| queued == key) {
                queue.remove(position);
            }
            if queue.is_empty() {
                self.groups.remove(&group);
                self.turns.retain(|turn| *turn != group);
            }
        }
        true
    }
}

impl<K: QueueKey> KeySets<K> {
    /// Adds a key that is due at `at`. A key that is due earlier stays as it is. Returns whether anything changed.
    fn add(&mut self, key: K, at: Instant, now: Instant) -> bool {
        let at = self.not_before.get(&key).map_or(at, |not_before| at.max(*not_before));
        if self.ready.contains(&key) {
            return false;
        }
        if let Some(due) = self.due.get(&key).copied() {
            if due <= at {
                return false;
            }
            self.due.remove(&key);
            self.delayed.remove(&(due, key.clone()));
        }
        if at <= now {
            self.ready.push(key);
        } else {
            self.due.insert(key.clone(), at);
            self.delayed.insert((at, key));
        }
        true
    }

    /// Makes the delayed keys ready that are due. Returns whether there are any.
    fn promote(&mut self, now: Instant) -> bool {
        let mut promoted = false;
        while self.delayed.first().is_some_and(|(at, _)| *at <= now) {
            let Some((_, key)) = self.delayed.pop_first() else { break };
            self.due.remove(&key);
            self.ready.push(key);
            promoted = true;
        }
        promoted
    }

    /// Takes the next key that is due and not being reconciled, of a group with a free worker.
    fn take(&mut self, now: Instant) -> Option<K> {
        self.promote(now);
        let Self { ready, running, running_in, .. } = self;
        let has_worker =
            |group: &K::Group| running_in.get(group).is_none_or(|count| *count < K::MAX_RUNNING_PER_GROUP);
        let key = ready.take(has_worker, |key| running.contains_key(key))?;
        running.insert(key.clone(), now);
        *running_in.entry(key.group()).or_default() += 1;
        self.not_before.remove(&key);
        Some(key)
    }

    /// The key is no longer being reconciled.
    fn finish(&mut self, key: &K, pause: Pause, now: Instant) {
        let took = self.stop_running(key).map_or(Duration::ZERO, |started| now - started);
        let until = match pause {
            Pause::Burst if self.ready.contains(key) => {
                let last = self.bursts.get(key).copied();
                let pause = last.map_or(MIN_PAUSE, |last| (last * 2).min(MAX_PAUSE));
                self.bursts.insert(key.clone(), pause);
                now + pause.max(took.min(MAX_SLOW_PAUSE))
            }
            Pause::Burst => {
                self.bursts.remove(key);
                return;
            }
            Pause::Always(pause) => now + pause,
        };
        self.not_before.insert(key.clone(), until);
        if self.ready.remove(key) {
            self.add(key.clone(), until, now);
        } else if let Some(due) = self.due.get(key).copied().filter(|due| *due < until) {
            self.due.remove(key);
            self.delayed.remove(&(due, key.clone()));
            self.add(key.clone(), until, now);
        }
    }

    /// Returns when the reconcile of the key started.
    fn stop_running(&mut self, key: &K) -> Option<Instant> {
        let started = self.running.remove(key)?;
        let group = key.group();
        if let Some(count) = self.running_in.get_mut(&group) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.running_in.remove(&group);
            }
        }
        Some(started)
    }

    /// When the next delayed key is due.
    fn next_due(&self) -> Option<Instant> {
        self.delayed.first().map(|(at, _)| *at)
    }

    /// Forgets intervals that have passed.
    fn prune(&mut self, now: Instant) {
        self.not_before.retain(|_, at| *at > now);
    }
}

impl<K: QueueKey> WorkQueue<K> {
    /// There are workers until the result is dropped. Mark all keys afterwards: earlier changes were ignored.
    #[must_use]
    pub fn start_term(&self) -> QueueTerm<K> {
        *self.lock() = KeySets { started: true, ..KeySets::default() };
        QueueTerm(self.clone())
    }

    /// There are workers for the rest of the test.
    #[cfg(test)]
    pub fn start(&self) {
        std::mem::forget(self.start_term());
    }

    /// The key has to be reconciled after `delay`, unless it is due earlier.
    pub fn mark_after(&self, key: &K, delay: Duration) {
        let now = client::fence::now();
        let mut keys = self.lock();
        if keys.started && keys.add(key.clone(), now + delay, now) {
            self.0.changed.notify_one();
        }
    }

    /// The next key that is due, and that no worker reconciles.
    pub fn take(&self) -> Option<K> {
        self.lock().take(client::fence::now())
    }

    /// The worker has reconciled the key.
    pub fn finish(&self, key: &K, pause: Pause) {
        let now = client::fence::now();
        let mut keys = self.lock();
        keys.finish(key, pause, now);
        keys.prune(now);
        drop(keys);
        self.0.changed.notify_one();
    }

    /// Resolves when a key may have become due: once for each change, also if no worker takes the key.
    pub async fn changed(&self) {
        let due = {
            let mut keys = self.lock();
            if keys.promote(client::fence::now()) {
                return;
            }
            keys.next_due()
        };
        let due = async {
            match due {
                Some(due) => tokio::time::sleep_until(due.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = due => {}
            () = self.0.changed.notified() => {}
        }
    }

    fn lock(&self) -> MutexGuard<'_, KeySets<K>> {
        // Nothing that holds the lock can panic in the middle of a change.
        self.0.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// The group is the first character.
    impl QueueKey for &'static str {
        type Group = Option<char>;
        const MAX_RUNNING_PER_GROUP: usize = 2;

        fn group(&self) -> Option<char> {
            self.chars().next()
        }
    }

    /// Keys of one group without a limit.
    impl QueueKey for u32 {
        type Group = ();
        const MAX_RUNNING_PER_GROUP: usize = usize::MAX;

        fn group(&self) {}
    }

    #[tokio::test(start_paused = true)]
    async fn a_due_key_wakes_the_workers_once_while_all_of_them_are_busy() {
        let queue = WorkQueue::default();
        queue.start();
        for key in 0..33 {
            queue.mark_after(&key, Duration::ZERO);
        }
        queue.mark_after(&33, SECOND);
        // All 32 workers hang.
        assert!((0..32).all(|_| queue.take().is_some()));
        queue.changed().now_or_never();
        assert!(queue.changed().now_or_never().is_none(), "nothing is due");
        tokio::time::advance(SECOND).await;
        let wakes = (0..100).filter(|_| queue.changed().now_or_never().is_some()).count();
        assert_eq!(wakes, 1);
        queue.finish(&0, Pause::Burst);
        assert!(queue.changed().now_or_never().is_some());
        assert_eq!((queue.take(), queue.take()), (Some(32), Some(33)));
    }

    #[test]
    fn a_group_has_a_limited_number_of_workers_and_groups_take_turns() {
        let (mut keys, now) = (KeySets::default(), Instant::now());
        for key in ["a1", "a2", "a3", "a4", "b1", "b2"] {
            keys.add(key, now, now);
        }
        let taken: Vec<_> = std::iter::from_fn(|| keys.take(now)).collect();
        assert_eq!(taken, ["a1", "b1", "a2", "b2"]);
        keys.finish(&"a1", Pause::Burst, now);
        keys.add("c1", now, now);
        let taken: Vec<_> = std::iter::from_fn(|| keys.take(now)).collect();
        assert_eq!(taken, ["a3", "c1"]);
        for key in ["a2", "a3", "b1", "b2", "c1"] {
            keys.finish(&key, Pause::Burst, now);
        }
        assert_eq!(keys.take(now), Some("a4"));
        keys.finish(&"a4", Pause::Burst, now);
        let ReadyKeys { keys: ready, groups, turns } = &keys.ready;
        assert!(ready.is_empty() && groups.is_empty() && turns.is_empty() && keys.running_in.is_empty());
    }

    #[test]
    fn nothing_of_a_term_is_left_for_the_next_one() {
        let queue = WorkQueue::default();
        let term = queue.start_term();
        for key in [1, 2, 3] {
            queue.mark_after(&key, if key == 3 { SECOND } else { Duration::ZERO });
        }
        // Its worker is aborted.
        assert_eq!(queue.take(), Some(1));
        drop(term);
        queue.mark_after(&4, Duration::ZERO);
        assert!(queue.take().is_none() && queue.lock().next_due().is_none());
        queue.start();
        assert!(queue.take().is_none());
        queue.mark_after(&1, Duration::ZERO);
        assert_eq!(queue.take(), Some(1));
    }

    #[test]
    fn changes_are_ignored_until_there_are_workers() {
        let queue = WorkQueue::default();
        queue.mark_after(&1, Duration::ZERO);
        queue.mark_after(&2, SECOND);
        assert!(queue.take().is_none() && queue.lock().next_due().is_none());
        queue.start();
        queue.mark_after(&1, Duration::ZERO);
        assert_eq!(queue.take(), Some(1));
    }

    #[test]
    fn many_changes_of_a_service_cause_one_reconcile() {
        let (mut keys, now) = (KeySets::default(), Instant::now());
        assert!(keys.add("a", now, now));
        assert!(!keys.add("a", now, now) && !keys.add("a", now + SECOND, now));
        assert_eq!((keys.take(now), keys.take(now)), (Some("a"), None));
    }

    #[test]
    fn a_change_during_a_reconcile_is_reconciled_afterwards_and_blocks_no_other_service() {
        let (mut keys, now) = (KeySets::default(), Instant::now());
        keys.add("a", now, now);
        assert_eq!(keys.take(now), Some("a"));
        keys.add("a", now, now);
        keys.add("b", now, now);
        assert_eq!((keys.take(now), keys.take(now)), (Some("b"), None), "a is being reconciled");
        keys.finish(&"a", Pause::Burst, now);
        assert_eq!(keys.take(now + MIN_PAUSE), Some("a"));
    }

    #[test]
    fn a_delayed_service_waits_unless_a_change_is_due_earlier() {
        let (mut keys, now) = (KeySets::default(), Instant::now());
        keys.add("a", now + SECOND * 9, now);
        assert_eq!((keys.take(now), keys.next_due()), (None, Some(now + SECOND * 9)));
        keys.add("a", now + SECOND, now);
        assert_eq!((keys.next_due(), keys.take(now + SECOND)), (Some(now + SECOND), Some("a")));
        keys.finish(&"a", Pause::Burst, now + SECOND);
        assert_eq!((keys.take(now + SECOND * 10), keys.next_due()), (None, None));
    }

    #[test]
    fn reconciles_of_a_failing_service_keep_their_interval() {
        let (mut keys, now) = (KeySets::default(), Instant::now());
        let pause = Pause::Always(SECOND);
        keys.add("a", now, now);
        keys.take(now);
        keys.add("a", now, now);
        keys.finish(&"a", pause, now);
        assert_eq!((keys.take(now), keys.take(now + SECOND)), (None, Some("a")));
        keys.finish(&"a", pause, now + SECOND);
        keys.add("a", now + SECOND, now + SECOND);
        assert_eq!(keys.take(now + SECOND), None, "also a change after the reconcile");
        keys.prune(now + SECOND * 2);
        assert!(keys.not_before.is_empty());
        assert_eq!(keys.take(now + SECOND * 2), Some("a"));
    }

    /// Reconciles a key that changes meanwhile. Returns the pause after it.
    fn reconcile_in_burst(keys: &mut KeySets<&'static str>, took: Duration, now: &mut Instant) -> Duration {
        keys.add("a", *now, *now);
        assert_eq!(keys.take(*now), Some("a"));
        keys.add("a", *now, *now);
        *now += took;
        keys.finish(&"a", Pause::Burst, *now);
        let pause = keys.next_due().unwrap() - *now;
        *now += pause;
        pause
    }

    #[test]
    fn changes_of_a_burst_are_collected_the_longer_it_lasts() {
        let (mut keys, mut now) = (KeySets::default(), Instant::now());
        let mut pauses = |took, count: usize| -> Vec<u128> {
            (0..count).map(|_| reconcile_in_burst(&mut keys, took, &mut now).as_millis()).collect()
        };
        assert_eq!(pauses(Duration::ZERO, 6), [20, 40, 80, 160, 200, 200]);
        assert_eq!(pauses(Duration::from_millis(300), 1), [300], "a slow API server gets fewer requests");
        assert_eq!(pauses(Duration::from_secs(5), 1), [1000]);
        // The last change of the burst.
        assert_eq!(keys.take(now), Some("a"));
        keys.finish(&"a", Pause::Burst, now);
        assert_eq!(reconcile_in_burst(&mut keys, Duration::ZERO, &mut now), MIN_PAUSE);
    }

    #[test]
    fn a_single_change_is_not_delayed() {
        let (mut keys, now) = (KeySets::default(), Instant::now());
        for _ in 0..3 {
            keys.add("a", now, now);
            assert_eq!(keys.take(now), Some("a"));
            keys.finish(&"a", Pause::Burst, now);
        }
        assert!(keys.bursts.is_empty() && keys.not_before.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn the_queue_wakes_up_for_changes_and_for_delayed_services() {
        let (queue, key) = (WorkQueue::default(), "a");
        queue.start();
        queue.mark_after(&key, Duration::ZERO);
        queue.changed().await;
        assert_eq!(queue.take(), Some(key));
        queue.mark_after(&key, SECOND);
        queue.finish(&key, Pause::Burst);
        let start = tokio::time::Instant::now();
        loop {
            queue.changed().await;
            if queue.take().is_some() {
                break;
            }
        }
        assert_eq!(start.elapsed(), SECOND);
    }
}
