//! Readiness and liveness of the daemon.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// How long one pass of the reconcile loop may take. The timeouts of all calls in one pass add up to less.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// A component that must work for the daemon to be ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Component {
    Kernel,
    NodeWatch,
    Node,
    NetworkWatch,
    NodeNetworkWatch,
    Publish,
    Plugin,
}

/// The problem of each component, and the last heartbeat of the reconcile loop. The daemon is ready if there is no problem.
#[derive(Debug)]
pub struct Health(Mutex<HealthState>);

#[derive(Debug)]
struct HealthState {
    problems: BTreeMap<Component, String>,
    last_heartbeat: Instant,
}

/// Whether a report changed the recorded health.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthChange {
    Changed,
    Unchanged,
}

impl Health {
    /// The health of a daemon that has just started.
    pub fn new() -> Self {
        let problems = [
            (Component::Kernel, "the links of this node have not been read yet"),
            (Component::NodeWatch, "the Node has not been read yet"),
            (Component::NetworkWatch, "the BridgeNetworks have not been read yet"),
            (Component::NodeNetworkWatch, "the NodeNetworks have not been read yet"),
            (Component::Publish, "the NodeNetwork has not been published yet"),
        ];
        let problems = problems.map(|(component, text)| (component, text.to_owned())).into();
        Self(Mutex::new(HealthState { problems, last_heartbeat: Instant::now() }))
    }

    /// Records that a component works.
    pub fn ok(&self, component: Component) -> HealthChange {
        if self.state().problems.remove(&component).is_some() {
            HealthChange::Changed
        } else {
            HealthChange::Unchanged
        }
    }

    /// Records why a component does not work.
    pub fn fail(&self, component: Component, problem: String) -> HealthChange {
        let problems = &mut self.state().problems;
        if problems.get(&component) == Some(&problem) {
            return HealthChange::Unchanged;
        }
        problems.insert(component, problem);
        HealthChange::Changed
    }

    /// Records that the reconcile loop makes progress.
    pub fn heartbeat(&self) {
        self.state().last_heartbeat = Instant::now();
    }

    /// Why the daemon is not ready; `None` if it is ready.
    pub fn problem(&self) -> Option<String> {
        let state = self.state();
        let all: Vec<&str> = state.problems.values().map(String::as_str).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    /// Why the daemon must be restarted; `None` if the reconcile loop makes progress.
    pub fn stalled(&self) -> Option<String> {
        let since = self.state().last_heartbeat.elapsed();
        (since >= STALL_TIMEOUT)
            .then(|| format!("the reconcile loop made no progress for {} s", since.as_secs()))
    }

    fn state(&self) -> MutexGuard<'_, HealthState> {
        // The state has no invariant that a panic could break.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[test]
    fn ready_means_that_every_component_works() {
        let health = Health::new();
        for component in
            [Component::Kernel, Component::NodeWatch, Component::NetworkWatch, Component::NodeNetworkWatch]
        {
            assert_eq!(health.ok(component), HealthChange::Changed);
        }
        assert_eq!(health.problem().unwrap(), "the NodeNetwork has not been published yet");
        health.ok(Component::Publish);
        assert_eq!(health.problem(), None);
    }

    #[test]
    fn a_repeated_problem_is_no_change() {
        let health = Health::new();
        assert_eq!(health.fail(Component::Node, "gone".into()), HealthChange::Changed);
        assert_eq!(health.fail(Component::Node, "gone".into()), HealthChange::Unchanged);
        assert_eq!(health.ok(Component::Node), HealthChange::Changed);
        assert_eq!(health.ok(Component::Node), HealthChange::Unchanged);
    }

    #[tokio::test(start_paused = true)]
    async fn a_loop_without_progress_for_a_minute_is_stalled() {
        let health = Health::new();
        advance(Duration::from_secs(59)).await;
        assert_eq!(health.stalled(), None);
        health.heartbeat();
        advance(Duration::from_secs(61)).await;
        assert_eq!(health.stalled().unwrap(), "the reconcile loop made no progress for 61 s");
        health.heartbeat();
        assert_eq!(health.stalled(), None);
    }
}
