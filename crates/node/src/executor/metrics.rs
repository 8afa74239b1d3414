//! Metrics of plugin calls. No label has a name that a user chooses.

use std::time::Duration;

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};
use wire::cni::Verb;

use super::ExecError;

/// Metrics of the executor.
#[derive(Debug, Clone)]
pub struct Metrics {
    calls: Family<PluginCallLabels, Counter>,
    durations: Family<PluginCommandLabels, Histogram>,
    /// Plugin processes, with the slow ones.
    pub running: Gauge,
    /// Plugin processes that gave up their slot.
    pub slow: Gauge,
    /// Calls that wait for a slot.
    pub waiting: Gauge,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PluginCallLabels {
    command: PluginCommand,
    result: PluginResultLabel,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PluginCommandLabels {
    command: PluginCommand,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
enum PluginCommand {
    Add,
    Del,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
enum PluginResultLabel {
    Ok,
    Error,
    Missing,
    Timeout,
    TooLong,
    Signaled,
    Busy,
    Stopping,
    Host,
}

impl Default for Metrics {
    fn default() -> Self {
        // From four milliseconds to 65 seconds.
        let durations = || Histogram::new(exponential_buckets(0.004, 2.0, 15));
        Self {
            calls: Family::default(),
            durations: Family::new_with_constructor(durations),
            running: Gauge::default(),
            slow: Gauge::default(),
            waiting: Gauge::default(),
        }
    }
}

impl Metrics {
    pub fn register(&self, registry: &mut Registry) {
        registry.register("plugin_calls", "Calls of CNI plugins by the daemon", self.calls.clone());
        let help = "Duration of calls of CNI plugins, without the wait for a slot";
        registry.register_with_unit("plugin_duration", help, Unit::Seconds, self.durations.clone());
        registry.register("plugin_processes", "CNI plugins that run", self.running.clone());
        let help = "CNI plugins that run longer than two seconds";
        registry.register("plugin_processes_slow", help, self.slow.clone());
        registry.register("plugin_calls_waiting", "Calls that wait for a slot", self.waiting.clone());
    }

    /// Counts a call of one plugin. `took` is `None` if it was not started.
    pub fn count<T>(&self, verb: Verb, result: &Result<T, ExecError>, took: Option<Duration>) {
        let command = if verb == Verb::Del { PluginCommand::Del } else { PluginCommand::Add };
        let result = match result {
            Ok(_) => PluginResultLabel::Ok,
            Err(ExecError::Invalid(_) | ExecError::Plugin { .. }) => PluginResultLabel::Error,
            Err(ExecError::PluginMissing { .. }) => PluginResultLabel::Missing,
            Err(ExecError::Timeout { .. }) => PluginResultLabel::Timeout,
            Err(ExecError::TooLong { .. }) => PluginResultLabel::TooLong,
            Err(ExecError::Signaled { .. }) => PluginResultLabel::Signaled,
            Err(ExecError::Busy { .. }) => PluginResultLabel::Busy,
            Err(ExecError::Stopping) => PluginResultLabel::Stopping,
            Err(ExecError::Host { .. }) => PluginResultLabel::Host,
        };
        self.calls.get_or_create(&PluginCallLabels { command, result }).inc();
        if let Some(took) = took {
            self.durations.get_or_create(&PluginCommandLabels { command }).observe(took.as_secs_f64());
        }
    }
}
