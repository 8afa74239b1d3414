//! Readiness and liveness of the daemon, and problems that affect neither.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{family::Family, gauge::Gauge},
    registry::Registry,
};
use tokio::time::Instant;

/// How long one pass of the reconcile loop may take. The timeouts of all calls in one pass add up to less.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// A part of the daemon that works or does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, EncodeLabelValue)]
pub enum Component {
    Kernel,
    NodeWatch,
    Node,
    NetworkWatch,
    NodeNetworkWatch,
    Publish,
    Plugin,
    /// Without it, addresses of deleted sandboxes are not released.
    Runtime,
    /// The address journal. Without it, no address is allocated.
    Journal,
    /// Without it, changes of pods are not seen.
    PodWatch,
    /// Without it, interfaces of running pods are not attached or detached.
    Hotplug,
}

/// What the problem of a component means for the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Impact {
    /// The daemon is not ready.
    NotReady,
    /// The daemon stays ready: a restart or another node would not help, or most pods need nothing of it.
    Informative,
}

impl Component {
    const ALL: [Self; 11] = [
        Self::Kernel,
        Self::NodeWatch,
        Self::Node,
        Self::NetworkWatch,
        Self::NodeNetworkWatch,
        Self::Publish,
        Self::Plugin,
        Self::Runtime,
        Self::Journal,
        Self::PodWatch,
        Self::Hotplug,
    ];

    fn impact(self) -> Impact {
        match self {
            Self::Kernel
            | Self::NodeWatch
            | Self::Node
            | Self::NetworkWatch
            | Self::NodeNetworkWatch
            | Self::Publish
            | Self::Plugin => Impact::NotReady,
            Self::Runtime | Self::Journal | Self::PodWatch | Self::Hotplug => Impact::Informative,
        }
    }
}

/// The problem of each component, and the last heartbeat of the reconcile loop. The daemon is ready if there is no problem
/// with [`Impact::NotReady`].
#[derive(Debug)]
pub struct Health {
    state: Mutex<HealthState>,
    /// 1 for a component with a problem.
    gauges: Family<ComponentLabels, Gauge>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ComponentLabels {
    component: Component,
}

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
            (Component::Plugin, "the CNI plugin has not been installed yet"),
        ];
        let problems: BTreeMap<Component, String> =
            problems.map(|(component, text)| (component, text.to_owned())).into();
        let gauges = Family::<ComponentLabels, Gauge>::default();
        for component in Component::ALL {
            let failed = problems.contains_key(&component);
            gauges.get_or_create(&ComponentLabels { component }).set(i64::from(failed));
        }
        Self { state: Mutex::new(HealthState { problems, last_heartbeat: Instant::now() }), gauges }
    }

    pub fn register(&self, registry: &mut Registry) {
        let help =
            "Whether a component of the daemon has a problem; the log and the readiness probe say which";
        registry.register("component_failed", help, self.gauges.clone());
    }

    /// Records that a component works.
    pub fn ok(&self, component: Component) -> HealthChange {
        if self.state().problems.remove(&component).is_some() {
            self.gauges.get_or_create(&ComponentLabels { component }).set(0);
            HealthChange::Changed
        } else {
            HealthChange::Unchanged
        }
    }

    /// Records why a component does not work.
    pub fn fail(&self, component: Component, problem: String) -> HealthChange {
        let mut state = self.state();
        let problems = &mut state.problems;
        if problems.get(&component) == Some(&problem) {
            return HealthChange::Unchanged;
        }
        problems.insert(component, problem);
        self.gauges.get_or_create(&ComponentLabels { component }).set(1);
        HealthChange::Changed
    }

    /// Records that the reconcile loop makes progress.
    pub fn heartbeat(&self) {
        self.state().last_heartbeat = Instant::now();
    }

    /// Why the daemon is not ready; `None` if it is ready.
    pub fn problem(&self) -> Option<String> {
        let all = self.problems(Impact::NotReady);
        (!all.is_empty()).then(|| all.join("; "))
    }

    /// The problems that do not make the daemon unready.
    pub fn warnings(&self) -> Vec<String> {
        self.problems(Impact::Informative)
    }

    fn problems(&self, impact: Impact) -> Vec<String> {
        let state = self.state();
        let all = state.problems.iter().filter(|(component, _)| component.impact() == impact);
        all.map(|(_, problem)| problem.clone()).collect()
    }

    /// Why the daemon must be restarted; `None` if the reconcile loop makes progress.
    pub fn stalled(&self) -> Option<String> {
        let since = self.state().last_heartbeat.elapsed();
        (since >= STALL_TIMEOUT)
            .then(|| format!("the reconcile loop made no progress for {} s", since.as_secs()))
    }

    fn state(&self) -> MutexGuard<'_, HealthState> {
        // The state has no invariant that a panic could break.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use tokio::time::advance;

    use super::*;

    #[test]
    fn ready_means_that_every_component_works() {
        let health = Health::new();
        for component in [
            Component::Kernel,
            Component::NodeWatch,
            Component::NetworkWatch,
            Component::NodeNetworkWatch,
            Component::Plugin,
        ] {
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

    #[test]
    fn an_informative_component_is_reported_and_does_not_make_the_daemon_unready() {
        let health = Health::new();
        for component in Component::ALL {
            health.ok(component);
        }
        let informative = [Component::Runtime, Component::Journal, Component::PodWatch, Component::Hotplug];
        for component in informative {
            assert_eq!(health.fail(component, format!("{component:?}")), HealthChange::Changed);
        }
        assert_eq!(health.problem(), None);
        assert_eq!(health.warnings(), ["Runtime", "Journal", "PodWatch", "Hotplug"]);
        // Every other one does.
        for component in Component::ALL.into_iter().filter(|component| !informative.contains(component)) {
            health.fail(component, "broken".to_owned());
            assert_eq!(health.problem().as_deref(), Some("broken"), "{component:?}");
            health.ok(component);
        }
        for component in informative {
            health.ok(component);
        }
        assert_eq!(health.warnings(), [] as [String; 0]);
    }

    #[test]
    fn the_metric_shows_the_components_with_a_problem() {
        let health = Health::new();
        let mut registry = Registry::default();
        health.register(&mut registry);
        health.ok(Component::Kernel);
        health.fail(Component::Journal, "full".to_owned());
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for line in [
            r#"component_failed{component="Kernel"} 0"#,
            r#"component_failed{component="Journal"} 1"#,
            r#"component_failed{component="Publish"} 1"#,
            r#"component_failed{component="Plugin"} 1"#,
            r#"component_failed{component="Runtime"} 0"#,
        ] {
            assert!(text.contains(line), "{text}");
        }
        health.ok(Component::Journal);
        text.clear();
        encode(&mut text, &registry).unwrap();
        assert!(text.contains(r#"component_failed{component="Journal"} 0"#), "{text}");
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
