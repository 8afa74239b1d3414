//! How many plugins run at once, so that hanging plugins delay no others.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::{sync::oneshot, time::timeout};
use wire::cni::Verb;

use super::{LimitsConfig, Metrics};

/// Admits calls in the order in which they arrive. A call whose plugin type is at its limit lets later calls pass.
#[derive(Debug, Clone)]
pub struct Limits(Arc<LimitsState>);

#[derive(Debug)]
struct LimitsState {
    config: LimitsConfig,
    metrics: Metrics,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    waiters: VecDeque<Waiter>,
    next_waiter: u64,
    slots: usize,
    processes: usize,
    plugins: HashMap<String, PluginLoad>,
    closed: bool,
}

/// The running calls of one plugin type.
#[derive(Debug, Default, Clone, Copy)]
struct PluginLoad {
    adds: usize,
    dels: usize,
    slow: usize,
}

#[derive(Debug)]
struct Waiter {
    id: u64,
    plugin: String,
    verb: Verb,
    /// Whether it is the first call of an ADD or DEL.
    first: bool,
    admit: oneshot::Sender<Permit>,
}

/// Lets one process run. It is held until the process is gone.
#[derive(Debug)]
pub struct Permit {
    limits: Arc<LimitsState>,
    plugin: String,
    verb: Verb,
    has_slot: bool,
}

/// Why a call was not admitted.
#[derive(Debug, PartialEq, Eq)]
pub enum NotAdmitted {
    /// It waited too long.
    Busy(String),
    /// The limits are closed.
    Closed,
}

impl Limits {
    pub fn new(config: LimitsConfig, metrics: Metrics) -> Self {
        Self(Arc::new(LimitsState { config, metrics, state: Mutex::default() }))
    }

    /// Waits until a call may start.
    pub async fn admit(&self, plugin: &str, verb: Verb, first: bool) -> Result<Permit, NotAdmitted> {
        let (admit, admitted) = oneshot::channel();
        let id = {
            let mut state = self.0.lock();
            if state.closed && first {
                return Err(NotAdmitted::Closed);
            }
            let id = state.next_waiter;
            state.next_waiter += 1;
            state.waiters.push_back(Waiter { id, plugin: plugin.to_owned(), verb, first, admit });
            id
        };
        let waiting = QueuedCall { limits: &self.0, id };
        self.0.admit_waiters();
        let config = &self.0.config;
        let limit = if verb == Verb::Del { config.del_wait } else { config.add_wait };
        let result = timeout(limit, admitted).await;
        let reason = self.0.reason(plugin, verb);
        drop(waiting);
        match result {
            Ok(Ok(permit)) => Ok(permit),
            Ok(Err(_)) => Err(NotAdmitted::Closed),
            Err(_) => Err(NotAdmitted::Busy(reason)),
        }
    }

    /// Refuses ADDs and DELs that have not started a plugin yet. The others may finish.
    pub fn close(&self) {
        let mut state = self.0.lock();
        state.closed = true;
        state.waiters.retain(|waiter| !waiter.first);
        self.0.update_metrics(&state);
    }
}

/// Removes its waiter from the queue.
struct QueuedCall<'a> {
    limits: &'a Arc<LimitsState>,
    id: u64,
}

impl Drop for QueuedCall<'_> {
    fn drop(&mut self) {
        let mut state = self.limits.lock();
        state.waiters.retain(|waiter| waiter.id != self.id);
        self.limits.update_metrics(&state);
    }
}

impl LimitsState {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits all waiters that the limits let start.
    fn admit_waiters(self: &Arc<Self>) {
        // A permit that is returned frees its place, so it must not be dropped under the lock.
        let mut returned = Vec::new();
        let mut state = self.lock();
        let mut index = 0;
        while state.slots < self.config.slots && index < state.waiters.len() {
            let waiter = &state.waiters[index];
            if !self.fits(&state, &waiter.plugin, waiter.verb) {
                index += 1;
                continue;
            }
            let Some(Waiter { plugin, verb, admit, .. }) = state.waiters.remove(index) else { break };
            state.slots += 1;
            state.processes += 1;
            let load = state.plugins.entry(plugin.clone()).or_default();
            *(if verb == Verb::Del { &mut load.dels } else { &mut load.adds }) += 1;
            let permit = Permit { limits: Arc::clone(self), plugin, verb, has_slot: true };
            returned.extend(admit.send(permit).err());
        }
        self.update_metrics(&state);
        drop(state);
    }

    fn fits(&self, state: &State, plugin: &str, verb: Verb) -> bool {
        let load = state.plugins.get(plugin).copied().unwrap_or_default();
        let config = &self.config;
        if verb == Verb::Del {
            return load.dels < config.dels_per_plugin && state.processes < config.processes;
        }
        let processes = config.processes.saturating_sub(config.reserved_for_del);
        load.adds < config.adds_per_plugin && state.processes < processes
    }

    /// Why a call of this plugin waits, for people.
    fn reason(&self, plugin: &str, verb: Verb) -> String {
        let state = self.lock();
        let load = state.plugins.get(plugin).copied().unwrap_or_default();
        let (calls, limit) = match verb {
            Verb::Del => (load.dels, self.config.dels_per_plugin),
            _ => (load.adds, self.config.adds_per_plugin),
        };
        if calls >= limit {
            let (verb, slow, seconds) = (verb.as_str(), load.slow, self.config.slow_after.as_secs_f32());
            return format!(
                "{calls} {verb} calls of it are running, {slow} of its calls for over {seconds} s"
            );
        }
        format!("{} CNI plugins are running on the node", state.processes)
    }

    fn update_metrics(&self, state: &State) {
        let gauge = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.metrics.running.set(gauge(state.processes));
        self.metrics.slow.set(gauge(state.plugins.values().map(|load| load.slow).sum()));
        self.metrics.waiting.set(gauge(state.waiters.len()));
    }
}

impl Permit {
    /// Gives the slot to another call. The process keeps its place.
    pub fn give_up_slot(&mut self) {
        if !std::mem::take(&mut self.has_slot) {
            return;
        }
        let mut state = self.limits.lock();
        state.slots -= 1;
        if let Some(load) = state.plugins.get_mut(&self.plugin) {
            load.slow += 1;
        }
        drop(state);
        self.limits.admit_waiters();
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.limits.lock();
        state.slots -= usize::from(self.has_slot);
        state.processes -= 1;
        if let Some(load) = state.plugins.get_mut(&self.plugin) {
            *(if self.verb == Verb::Del { &mut load.dels } else { &mut load.adds }) -= 1;
            load.slow -= usize::from(!self.has_slot);
            if load.adds + load.dels == 0 {
                state.plugins.remove(&self.plugin);
            }
        }
        drop(state);
        self.limits.admit_waiters();
    }
}

impl fmt::Display for NotAdmitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy(reason) => f.write_str(reason),
            Self::Closed => f.write_str("closed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::{FutureExt as _, future::join_all};
    use tokio::time::Instant;

    use super::*;

    fn limits() -> Limits {
        Limits::new(LimitsConfig::default(), Metrics::default())
    }

    /// Admits a call that must not wait.
    fn now(limits: &Limits, plugin: &str, verb: Verb) -> Option<Permit> {
        limits.admit(plugin, verb, true).now_or_never()?.ok()
    }

    fn many(limits: &Limits, count: usize, plugin: &str, verb: Verb) -> Vec<Permit> {
        (0..count).filter_map(|_| now(limits, plugin, verb)).collect()
    }

    fn slow_down(permits: &mut [Permit]) {
        permits.iter_mut().for_each(Permit::give_up_slot);
    }

    #[tokio::test]
    async fn one_plugin_type_never_takes_all_slots() {
        let limits = limits();
        let mut hanging = many(&limits, 50, "hang", Verb::Add);
        assert_eq!(hanging.len(), 8);
        assert_eq!(many(&limits, 50, "hang", Verb::Del).len(), 4);
        // Dropped permits are free at once.
        assert_eq!(many(&limits, 50, "quick", Verb::Add).len(), 8);
        slow_down(&mut hanging);
        assert!(now(&limits, "hang", Verb::Add).is_none());
        assert_eq!(limits.0.lock().slots, 0);
    }

    #[tokio::test]
    async fn slots_and_processes_are_bounded_and_del_has_a_reserve() {
        let limits = limits();
        let mut all = Vec::new();
        for plugin in ["a", "b", "c", "d", "e", "f"] {
            let mut permits = many(&limits, 8, plugin, Verb::Add);
            assert_eq!(permits.len(), if plugin == "f" { 0 } else { 8 }, "{plugin}");
            slow_down(&mut permits);
            all.extend(permits);
        }
        for plugin in ["a", "b", "c"] {
            let mut permits = many(&limits, 8, plugin, Verb::Del);
            assert_eq!(permits.len(), if plugin == "c" { 0 } else { 4 }, "{plugin}");
            slow_down(&mut permits);
            all.extend(permits);
        }
        let state = |limits: &Limits| {
            let state = limits.0.lock();
            (state.slots, state.processes)
        };
        assert_eq!(state(&limits), (0, 48));
        drop(all);
        assert_eq!(state(&limits), (0, 0));
        assert!(limits.0.lock().plugins.is_empty());
        let quick: Vec<Permit> =
            ["a", "b", "c"].iter().flat_map(|plugin| many(&limits, 8, plugin, Verb::Add)).collect();
        assert_eq!(quick.len(), 16);
    }

    #[tokio::test]
    async fn calls_start_in_the_order_of_arrival() {
        let limits = limits();
        let mut running = many(&limits, 8, "a", Verb::Add);
        let order = Mutex::new(Vec::new());
        let wait = |name: &'static str, plugin: &'static str| {
            let (limits, order) = (&limits, &order);
            async move {
                let permit = limits.admit(plugin, Verb::Add, true).await;
                order.lock().unwrap().push(name);
                permit
            }
        };
        let free = async {
            for _ in 0..3 {
                running.pop();
                tokio::task::yield_now().await;
                tokio::task::yield_now().await;
            }
        };
        let (permits, ()) = tokio::join!(
            join_all([wait("1", "a"), wait("2", "a"), wait("other", "b"), wait("3", "a")]),
            free
        );
        assert!(permits.iter().all(Result::is_ok));
        assert_eq!(*order.lock().unwrap(), ["other", "1", "2", "3"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_waits_too_long_says_why() {
        let limits = limits();
        let mut running = many(&limits, 8, "bridge", Verb::Add);
        slow_down(&mut running[..3]);
        let start = Instant::now();
        let error = limits.admit("bridge", Verb::Add, true).await.unwrap_err();
        assert_eq!(start.elapsed(), Duration::from_secs(10));
        let reason = "8 ADD calls of it are running, 3 of its calls for over 2 s";
        assert_eq!(error, NotAdmitted::Busy(reason.to_owned()));
        assert!(limits.0.lock().waiters.is_empty());
    }

    #[tokio::test]
    async fn a_dropped_call_leaves_the_queue() {
        let limits = limits();
        let running = many(&limits, 8, "a", Verb::Add);
        let mut waiting = Box::pin(limits.admit("a", Verb::Add, true));
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(waiting);
        assert!(limits.0.lock().waiters.is_empty());
        // The permit was sent, and its receiver is dropped before it reads it.
        let mut admitted = Box::pin(limits.admit("a", Verb::Add, true));
        assert!(admitted.as_mut().now_or_never().is_none());
        drop(running);
        drop(admitted);
        assert_eq!(limits.0.lock().processes, 0);
    }

    #[tokio::test]
    async fn closed_limits_let_started_operations_finish() {
        let limits = limits();
        let mut running = many(&limits, 8, "a", Verb::Add);
        let (new, started, ()) =
            tokio::join!(limits.admit("a", Verb::Add, true), limits.admit("a", Verb::Add, false), async {
                limits.close();
                running.pop();
            });
        assert_eq!(new.unwrap_err(), NotAdmitted::Closed);
        assert!(started.is_ok());
        assert!(now(&limits, "b", Verb::Add).is_none());
    }
}
