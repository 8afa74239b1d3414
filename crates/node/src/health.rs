//! What keeps the daemon from being ready, and whether its loop still turns.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// How long a turn of the loop may take. The calls of one turn have deadlines that are shorter together.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// A component of the daemon that must be well.
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

/// The problems of each component, and the last turn of the loop. Ready means no problem.
#[derive(Debug)]
pub struct Health(Mutex<HealthState>);

#[derive(Debug)]
struct HealthState {
    problems: BTreeMap<Component, String>,
    last_heartbeat: Instant,
}

/// Whether saying so was news.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthChange {
    Changed,
    Unchanged,
}

impl Health {
    /// A daemon that has only just started.
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

    /// This component is well.
    pub fn ok(&self, component: Component) -> HealthChange {
        if self.state().problems.remove(&component).is_some() {
            HealthChange::Changed
        } else {
            HealthChange::Unchanged
        }
    }

    /// This component is not well, because of `problem`.
    pub fn fail(&self, component: Component, problem: String) -> HealthChange {
        let problems = &mut self.state().problems;
        if problems.get(&component) == Some(&problem) {
            return HealthChange::Unchanged;
        }
        problems.insert(component, problem);
        HealthChange::Changed
    }

    /// The loop has come this far.
    pub fn heartbeat(&self) {
        self.state().last_heartbeat = Instant::now();
    }

    /// Why the daemon is not ready; none if it is.
    pub fn problem(&self) -> Option<String> {
        let state = self.state();
        let all: Vec<&str> = state.problems.values().map(String::as_str).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    /// Why only a restart can help; none if the loop turns.
    pub fn stalled(&self) -> Option<String> {
        let since = self.state().last_heartbeat.elapsed();
        (since >= STALL_TIMEOUT).then(|| format!("the loop has stood still for {} s", since.as_secs()))
    }

    fn state(&self) -> MutexGuard<'_, HealthState> {
        // Texts and a time are as good after a panic as before.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[test]
    fn ready_means_that_every_part_is_well() {
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
    fn the_same_problem_is_news_once() {
        let health = Health::new();
        assert_eq!(health.fail(Component::Node, "gone".into()), HealthChange::Changed);
        assert_eq!(health.fail(Component::Node, "gone".into()), HealthChange::Unchanged);
        assert_eq!(health.ok(Component::Node), HealthChange::Changed);
        assert_eq!(health.ok(Component::Node), HealthChange::Unchanged);
    }

    #[tokio::test(start_paused = true)]
    async fn a_loop_that_stands_still_for_a_minute_hangs() {
        let health = Health::new();
        advance(Duration::from_secs(59)).await;
        assert_eq!(health.stalled(), None);
        health.heartbeat();
        advance(Duration::from_secs(61)).await;
        assert_eq!(health.stalled().unwrap(), "the loop has stood still for 61 s");
        health.heartbeat();
        assert_eq!(health.stalled(), None);
    }
}
