//! How many plugins run at once, so that hanging plugins delay no others.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::{sync::oneshot, time::timeout};
use wire::cni::Verb;

use super::{LimitsConfig, Metrics};

/// Shares the places of plugins between the namespaces of pods. A call whose plugin type or namespace is at its limit lets
/// others pass.
#[derive(Debug, Clone)]
pub struct Limits(Arc<LimitsState>);

/// A call of a plugin.
#[derive(Debug, Clone, Copy)]
pub struct CallKind<'a> {
    pub plugin: &'a str,
    pub verb: Verb,
    /// The namespace of the pod. Calls without one count as those of one namespace.
    pub namespace: &'a str,
    /// Whether it is the first call of an ADD or DEL.
    pub first: bool,
}

#[derive(Debug)]
struct LimitsState {
    config: LimitsConfig,
    metrics: Metrics,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// In the order of arrival.
    waiters: VecDeque<Waiter>,
    next_waiter: u64,
    loads: HashMap<Scope, Load>,
    closed: bool,
}

/// Of which calls a [`Load`] is: those of a plugin type, of a namespace, of both, or all.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Scope {
    plugin: Option<Arc<str>>,
    namespace: Option<Arc<str>>,
}

/// Running calls.
#[derive(Debug, Default, Clone, Copy)]
struct Load {
    adds: usize,
    dels: usize,
    /// How many of them gave up their slot.
    slow: usize,
}

#[derive(Debug)]
struct Waiter {
    id: u64,
    plugin: Arc<str>,
    namespace: Arc<str>,
    verb: Verb,
    first: bool,
    admit: oneshot::Sender<Permit>,
}

/// Lets one process run. It is held until the process is gone.
#[derive(Debug)]
pub struct Permit {
    limits: Arc<LimitsState>,
    scopes: Scopes,
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
    pub async fn admit(&self, call: CallKind<'_>) -> Result<Permit, NotAdmitted> {
        let CallKind { verb, first, .. } = call;
        let (plugin, namespace): (Arc<str>, Arc<str>) = (call.plugin.into(), call.namespace.into());
        let scopes = Scope::of(&plugin, &namespace);
        let (admit, admitted) = oneshot::channel();
        let id = {
            let mut state = self.0.lock();
            if state.closed && first {
                return Err(NotAdmitted::Closed);
            }
            let id = state.next_waiter;
            state.next_waiter += 1;
            state.waiters.push_back(Waiter { id, plugin, namespace, verb, first, admit });
            id
        };
        let waiting = QueuedCall { limits: &self.0, id };
        self.0.admit_waiters();
        let config = &self.0.config;
        let limit = if verb == Verb::Del { config.del_wait } else { config.add_wait };
        let result = timeout(limit, admitted).await;
        let reason = self.0.reason(&scopes, verb);
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

    /// Admits all waiters that the limits let start: first that one whose namespace has the fewest running calls.
    fn admit_waiters(self: &Arc<Self>) {
        // A permit that is returned frees its place, so it must not be dropped under the lock.
        let mut returned = Vec::new();
        let mut state = self.lock();
        while let Some(index) = self.next_waiter(&state) {
            let Some(Waiter { plugin, namespace, verb, admit, .. }) = state.waiters.remove(index) else {
                break;
            };
            let scopes = Scope::of(&plugin, &namespace);
            for scope in &scopes {
                *state.loads.entry(scope.clone()).or_default().calls_mut(verb) += 1;
            }
            let permit = Permit { limits: Arc::clone(self), scopes, verb, has_slot: true };
            returned.extend(admit.send(permit).err());
        }
        self.update_metrics(&state);
        drop(state);
    }

    fn next_waiter(&self, state: &State) -> Option<usize> {
        let waiters = state.waiters.iter().enumerate().filter_map(|(index, waiter)| {
            let scopes = Scope::of(&waiter.plugin, &waiter.namespace);
            let running = state.load(&scopes[NAMESPACE]).processes();
            self.fits(state, &scopes, waiter.verb).then_some((running, index))
        });
        waiters.min().map(|(_, index)| index)
    }

    fn fits(&self, state: &State, scopes: &Scopes, verb: Verb) -> bool {
        let [all, plugin, namespace, both] = scopes.each_ref().map(|scope| state.load(scope));
        let config = &self.config;
        let limit = config.calls_per_plugin(verb);
        let reserved = if verb == Verb::Del { 0 } else { config.reserved_for_del };
        all.slots() < config.slots
            && namespace.slots() < share(config.slots)
            && all.processes() < config.processes.saturating_sub(reserved)
            && namespace.processes() < share(config.processes)
            && plugin.calls(verb) < limit
            && both.calls(verb) < share(limit)
    }

    /// Why a call waits, for people.
    fn reason(&self, scopes: &Scopes, verb: Verb) -> String {
        let state = self.lock();
        let [all, plugin, _, both] = scopes.each_ref().map(|scope| state.load(scope));
        let limit = self.config.calls_per_plugin(verb);
        let of_plugin = |load: Load, of: &str| {
            let (calls, slow) = (load.calls(verb), load.slow);
            let (verb, seconds) = (verb.as_str(), self.config.slow_after.as_secs_f32());
            format!("{calls} {verb} calls of it{of} are running, {slow} of its calls for over {seconds} s")
        };
        if plugin.calls(verb) >= limit {
            return of_plugin(plugin, "");
        }
        if both.calls(verb) >= share(limit) {
            return of_plugin(both, " by pods of this namespace");
        }
        format!("{} CNI plugins are running on the node", all.processes())
    }

    fn update_metrics(&self, state: &State) {
        let gauge = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let all = state.load(&Scope { plugin: None, namespace: None });
        self.metrics.running.set(gauge(all.processes()));
        self.metrics.slow.set(gauge(all.slow));
        self.metrics.waiting.set(gauge(state.waiters.len()));
    }
}

/// How many of `limit` places one namespace may hold.
fn share(limit: usize) -> usize {
    (limit * 3 / 4).max(1)
}

impl LimitsConfig {
    fn calls_per_plugin(&self, verb: Verb) -> usize {
        if verb == Verb::Del { self.dels_per_plugin } else { self.adds_per_plugin }
    }
}

impl State {
    fn load(&self, scope: &Scope) -> Load {
        self.loads.get(scope).copied().unwrap_or_default()
    }
}

/// All calls, those of a plugin type, of a namespace, and of both.
type Scopes = [Scope; 4];
const NAMESPACE: usize = 2;

impl Scope {
    fn of(plugin: &Arc<str>, namespace: &Arc<str>) -> Scopes {
        let (plugin, namespace) = (|| Some(Arc::clone(plugin)), || Some(Arc::clone(namespace)));
        [(None, None), (plugin(), None), (None, namespace()), (plugin(), namespace())]
            .map(|(plugin, namespace)| Self { plugin, namespace })
    }
}

impl Load {
    fn calls(&self, verb: Verb) -> usize {
        if verb == Verb::Del { self.dels } else { self.adds }
    }

    fn processes(&self) -> usize {
        self.adds + self.dels
    }

    fn slots(&self) -> usize {
        self.processes() - self.slow
    }

    fn calls_mut(&mut self, verb: Verb) -> &mut usize {
        if verb == Verb::Del { &mut self.dels } else { &mut self.adds }
    }
}

impl Permit {
    /// Gives the slot to another call. The process keeps its place.
    pub fn give_up_slot(&mut self) {
        if !std::mem::take(&mut self.has_slot) {
            return;
        }
        let mut state = self.limits.lock();
        for scope in &self.scopes {
            state.loads.entry(scope.clone()).or_default().slow += 1;
        }
        drop(state);
        self.limits.admit_waiters();
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.limits.lock();
        for scope in &self.scopes {
            let Some(load) = state.loads.get_mut(scope) else { continue };
            *load.calls_mut(self.verb) -= 1;
            load.slow -= usize::from(!self.has_slot);
            if load.processes() == 0 {
                state.loads.remove(scope);
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

    fn call<'a>(plugin: &'a str, verb: Verb, namespace: &'a str) -> CallKind<'a> {
        CallKind { plugin, verb, namespace, first: true }
    }

    /// Admits a call that must not wait.
    fn now(limits: &Limits, plugin: &str, verb: Verb, namespace: &str) -> Option<Permit> {
        limits.admit(call(plugin, verb, namespace)).now_or_never()?.ok()
    }

    /// Admits calls of two namespaces.
    fn many(limits: &Limits, count: usize, plugin: &str, verb: Verb) -> Vec<Permit> {
        (0..count).filter_map(|number| now(limits, plugin, verb, ["x", "y"][number % 2])).collect()
    }

    fn all(limits: &Limits) -> Load {
        limits.0.lock().load(&Scope { plugin: None, namespace: None })
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
        assert!(now(&limits, "hang", Verb::Add, "z").is_none());
        assert_eq!(all(&limits).slow, 8);
    }

    #[tokio::test]
    async fn slots_and_processes_are_bounded_and_del_has_a_reserve() {
        let limits = limits();
        let mut hanging = Vec::new();
        for plugin in ["a", "b", "c", "d", "e", "f"] {
            let mut permits = many(&limits, 8, plugin, Verb::Add);
            assert_eq!(permits.len(), if plugin == "f" { 0 } else { 8 }, "{plugin}");
            slow_down(&mut permits);
            hanging.extend(permits);
        }
        for plugin in ["a", "b", "c"] {
            let mut permits = many(&limits, 8, plugin, Verb::Del);
            assert_eq!(permits.len(), if plugin == "c" { 0 } else { 4 }, "{plugin}");
            slow_down(&mut permits);
            hanging.extend(permits);
        }
        assert_eq!((all(&limits).slots(), all(&limits).processes()), (0, 48));
        drop(hanging);
        assert!(limits.0.lock().loads.is_empty());
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
                let permit = limits.admit(call(plugin, Verb::Add, "z")).await;
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
        let error = limits.admit(call("bridge", Verb::Add, "z")).await.unwrap_err();
        assert_eq!(start.elapsed(), Duration::from_secs(10));
        let reason = "8 ADD calls of it are running, 3 of its calls for over 2 s";
        assert_eq!(error, NotAdmitted::Busy(reason.to_owned()));
        assert!(limits.0.lock().waiters.is_empty());
    }

    #[tokio::test]
    async fn a_dropped_call_leaves_the_queue() {
        let limits = limits();
        let running = many(&limits, 8, "a", Verb::Add);
        let mut waiting = Box::pin(limits.admit(call("a", Verb::Add, "z")));
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(waiting);
        assert!(limits.0.lock().waiters.is_empty());
        // The permit was sent, and its receiver is dropped before it reads it.
        let mut admitted = Box::pin(limits.admit(call("a", Verb::Add, "z")));
        assert!(admitted.as_mut().now_or_never().is_none());
        drop(running);
        drop(admitted);
        assert_eq!(all(&limits).processes(), 0);
    }

    #[tokio::test]
    async fn closed_limits_let_started_operations_finish() {
        let limits = limits();
        let mut running = many(&limits, 8, "a", Verb::Add);
        let later = CallKind { first: false, ..call("a", Verb::Add, "z") };
        let (new, started, ()) =
            tokio::join!(limits.admit(call("a", Verb::Add, "z")), limits.admit(later), async {
                limits.close();
                running.pop();
            });
        assert_eq!(new.unwrap_err(), NotAdmitted::Closed);
        assert!(started.is_ok());
        assert!(now(&limits, "b", Verb::Add, "z").is_none());
    }

    #[tokio::test]
    async fn a_namespace_whose_plugins_hang_leaves_places_for_others_at_once() {
        let limits = limits();
        let of = |plugin: &str, verb: Verb, namespace: &str| {
            (0..50).filter_map(|_| now(&limits, plugin, verb, namespace)).collect::<Vec<_>>()
        };
        let hanging = (of("hang", Verb::Add, "bad"), of("hang", Verb::Del, "bad"));
        assert_eq!((hanging.0.len(), hanging.1.len()), (6, 3));
        let others = (of("hang", Verb::Add, "good"), of("hang", Verb::Del, "good"));
        assert_eq!((others.0.len(), others.1.len()), (2, 1));
        drop((hanging, others));
        // Of many plugin types: 12 of 16 slots, and 36 of 48 processes.
        let mut hanging: Vec<Permit> =
            ["a", "b", "c"].map(|plugin| of(plugin, Verb::Add, "bad")).into_iter().flatten().collect();
        assert_eq!(hanging.len(), 12);
        assert!(now(&limits, "a", Verb::Add, "good").is_some());
        slow_down(&mut hanging);
        for plugin in ["c", "d", "e", "f", "g", "h"] {
            hanging.append(&mut of(plugin, Verb::Add, "bad"));
            slow_down(&mut hanging);
            assert!(now(&limits, plugin, Verb::Add, "good").is_some(), "{plugin}");
        }
        assert_eq!(hanging.len(), 36);
        assert!(now(&limits, "i", Verb::Del, "bad").is_none());
        assert!(now(&limits, "i", Verb::Del, "good").is_some());
    }

    #[tokio::test]
    async fn places_go_to_the_namespace_with_the_fewest_running_calls() {
        let limits = limits();
        let mut running = many(&limits, 8, "a", Verb::Add);
        let order = Mutex::new(Vec::new());
        let wait = |namespace: &'static str| {
            let (limits, order) = (&limits, &order);
            async move {
                let permit = limits.admit(call("a", Verb::Add, namespace)).await;
                order.lock().unwrap().push(namespace);
                permit
            }
        };
        let free = async {
            for _ in 0..6 {
                running.pop();
                tokio::task::yield_now().await;
                tokio::task::yield_now().await;
            }
        };
        let waiting = ["crowd", "crowd", "crowd", "crowd", "late", "late"].map(wait);
        let (permits, ()) = tokio::join!(join_all(waiting), free);
        assert!(permits.iter().all(Result::is_ok));
        assert_eq!(*order.lock().unwrap(), ["crowd", "late", "crowd", "late", "crowd", "crowd"]);
    }
}
