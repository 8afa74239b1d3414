//! Hot-plug: which interfaces of a running pod are attached and detached, and what its annotations report.
//!
//! Each pod has one worker. It observes the pod, calls [`plan`], applies the one [`Step`] of the plan, and starts again.
//! Every trigger only wakes the worker. When a plan has no step, or the step has been running for two seconds, the worker
//! writes the annotations of the plan.
//!
//! - Desired: the networks annotation.
//! - Observed: the links of the pod's namespace and the [`AttachmentRecord`]s. The network-status annotation is output: an
//!   attachment that only that annotation lists is not removed.

mod annotations;
mod decide;
mod departures;
mod effective_records;
mod events;
mod failures;
mod identify;
mod links;
mod matching;
mod multus;
mod names;
mod pod;
mod records;
mod request;
#[cfg(test)]
mod simulation;
mod states;
mod status;
mod step;
#[cfg(test)]
mod tests;
mod text;

use std::collections::BTreeSet;

pub use decide::plan;
pub use departures::{Departure, track_moved_links};
pub use events::{EventReason, PodEvent};
pub use failures::{FailedAttempt, Failures, Fingerprint, MAX_RETRY, MIN_RETRY};
pub use identify::{identify_links, identify_rebuilt};
pub use multus::{
    IsolationSettings, MultusConfig, MultusFacts, MultusState, NamespaceAccess, decide_multus,
    mounts_cni_config,
};
pub use pod::{
    DesiredPod, HostLink, NadState, ObservedLink, ObservedPod, PlanInput, PlugMode, PodLifecycle, SandboxRef,
    SandboxState, own_network_stack,
};
pub use records::{
    AttachedRecord, AttachmentKey, AttachmentRecord, LinkIdentity, Origin, PodIdentity, RecordPhase,
    RequestedAddresses,
};
pub use request::{ConfigError, capability_args, cni_args, config_with_args};
pub use states::StateReason;
pub use step::{
    AddStep, AnnotationUpdate, AttemptKey, DelErrors, DelMode, FilteredRoutes, HostPeer, MovedLinks, PodPlan,
    RemovePurpose, RemoveStep, Step,
};

/// What plans of a pod remember. The worker keeps it as long as it has the pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reported {
    /// The problems that an event reported and that no annotation records.
    problems: BTreeSet<String>,
    /// The values of the networks annotation since the attachments were compared with it last, the newest last.
    requests: Vec<String>,
}

/// The maximum number of values of the networks annotation that are remembered until they can be compared.
const MAX_REQUESTS: usize = 8;
/// The maximum length of such a value.
const MAX_REQUEST: usize = 64 * 1024;

impl Reported {
    /// Remembers what a pod requests while hot-plug is on. A pod that does not run yet needs nothing else.
    pub fn note_request(&mut self, desired: &DesiredPod) {
        let networks = desired.networks.as_deref().unwrap_or_default();
        if networks.is_empty()
            || networks.len() > MAX_REQUEST
            || self.requests.iter().any(|it| it == networks)
        {
            return;
        }
        if self.requests.len() == MAX_REQUESTS {
            self.requests.remove(0);
        }
        self.requests.push(networks.to_owned());
    }
}
