//! The status of a NetworkService, and when it is written.

use std::{fmt, fmt::Write as _, time::Duration};

use api::{
    Condition, NetworkServiceStatus,
    bridgenetwork::{MAX_CONDITIONS, MAX_STATUS_ENTRIES},
    networkservice::EndpointCounts,
    selection::NadRef,
};
use jiff::Timestamp;

use super::{DesiredEndpoints, DuplicateAddress, NetworkState};
use crate::condition::ConditionDraft;

const READY: &str = "Ready";
pub(super) const FOREIGN_ENDPOINTS: &str = "ForeignEndpoints";
pub(super) const DUPLICATE_ADDRESS: &str = "DuplicateAddress";

/// The conditions that the controller owns, in the order in which it writes them.
const MANAGED_CONDITIONS: [&str; 3] = [READY, FOREIGN_ENDPOINTS, DUPLICATE_ADDRESS];

/// Reasons of Ready, by precedence.
const INVALID_SPEC: &str = "InvalidSpec";
const SERVICE_TAKEN: &str = "ServiceTaken";
pub(super) const NETWORK_NOT_FOUND: &str = "NetworkNotFound";
const NO_PODS: &str = "NoPods";
const NO_ADDRESSES: &str = "NoAddresses";
const NOT_READY: &str = "NotReady";

/// The least time between two writes that change nothing but counts.
pub const COUNTS_INTERVAL: Duration = Duration::from_secs(5);

/// How long counts wait after a write of slices, so that a change that follows it at once is not delayed.
const COUNTS_DELAY: Duration = Duration::from_millis(500);

/// The API server limits an event's note to 1024 bytes. Names in it can have two bytes per character.
const MAX_NOTE_CHARS: usize = 500;

const NO_PODS_MESSAGE: &str =
    "the selector matches no running pod of the namespace; check spec.selector and the labels of the pods";

/// The length of an API server's message that is quoted in a condition.
const MAX_CAUSE_CHARS: usize = 300;

/// What the status of a NetworkService depends on.
#[derive(Debug, Clone, Copy)]
pub struct StatusInput<'a> {
    pub generation: i64,
    pub old: &'a NetworkServiceStatus,
    pub state: ServiceState<'a>,
    /// EndpointSlices of other managers and Endpoints of this name, in any order. `None` while they are not known: the
    /// condition stays as it is.
    pub foreign: Option<&'a [ForeignObject]>,
    pub now: Timestamp,
}

/// How far the controller came.
#[derive(Debug, Clone, Copy)]
pub enum ServiceState<'a> {
    /// The spec cannot be read, for this reason.
    Invalid(&'a str),
    /// The Service belongs to another owner; the message of
    /// [`ServiceDecision::Taken`](super::ServiceDecision::Taken).
    Taken(&'a str),
    /// The Service belongs to the NetworkService and cannot have its slices, for this reason: they are withdrawn.
    Withdrawn(&'a str),
    /// The Service and the slices were planned.
    Planned {
        network: (&'a NadRef, &'a NetworkState),
        desired: &'a DesiredEndpoints,
        /// Why the Service or a slice is not as planned.
        fault: Option<WriteFault<'a>>,
    },
}

/// Why the Service or a slice of a NetworkService is not as planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteFault<'a> {
    /// The error of the last write.
    Failed(&'a str),
    /// Writes succeed, and another client changes the Service back; the message of
    /// [`changed_back`](super::changed_back).
    ChangedBack(&'a str),
}

/// An object that publishes endpoints for a Service and is not managed by Patchbay.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ForeignObject {
    pub kind: ForeignKind,
    pub name: String,
    /// The value of the managed-by label.
    pub manager: Option<String>,
}

/// The kind of a [`ForeignObject`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ForeignKind {
    EndpointSlice,
    Endpoints,
}

/// The new status, and events about conditions that begin to report a problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusPlan {
    pub status: NetworkServiceStatus,
    pub events: Vec<StatusEvent>,
}

/// A Warning event about the NetworkService or the annotated Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusEvent {
    pub reason: &'static str,
    pub note: String,
}

/// When a status is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusWrite {
    /// It does not change.
    None,
    Now,
    /// Only counts change: after this time.
    After(Duration),
}

/// The status of a NetworkService.
pub fn status(input: &StatusInput<'_>) -> StatusPlan {
    let old = |kind: &str| input.old.conditions.iter().find(|condition| condition.r#type == kind);
    let mut events = Vec::new();
    let mut conditions = Vec::new();
    for kind in MANAGED_CONDITIONS {
        let draft = match kind {
            READY => Some(ready(input.state)),
            FOREIGN_ENDPOINTS => input.foreign.map(foreign_endpoints),
            _ => Some(duplicate_address(input.state)),
        };
        let Some(draft) = draft else {
            conditions.extend(old(kind).cloned());
            continue;
        };
        events.extend(transition_event(&draft, old(kind)));
        conditions.push(draft.into_condition(old(kind), input.now, Some(input.generation)));
    }
    let free = MAX_CONDITIONS.saturating_sub(conditions.len());
    let others = |condition: &&Condition| !MANAGED_CONDITIONS.contains(&condition.r#type.as_str());
    conditions.extend(input.old.conditions.iter().filter(others).take(free).cloned());
    let endpoints = match input.state {
        ServiceState::Planned { desired, .. } => Some(desired.counts.clone()),
        ServiceState::Taken(_) | ServiceState::Withdrawn(_) => {
            Some(EndpointCounts { summary: "0/0".to_owned(), ..EndpointCounts::default() })
        }
        ServiceState::Invalid(_) => None,
    };
    let status = NetworkServiceStatus { observed_generation: Some(input.generation), endpoints, conditions };
    StatusPlan { status, events }
}

/// Decides when a status is written: conditions at once, counts at most every [`COUNTS_INTERVAL`], and not in a reconcile that
/// wrote slices, because the next change of a pod waits for the end of the reconcile.
pub fn decide_status_write(
    old: &NetworkServiceStatus,
    new: &NetworkServiceStatus,
    since_last_write: Option<Duration>,
    slices_written: bool,
) -> StatusWrite {
    if old == new {
        return StatusWrite::None;
    }
    if without_counts(old) != without_counts(new) {
        return StatusWrite::Now;
    }
    let wait = since_last_write.map_or(Duration::ZERO, |since| COUNTS_INTERVAL.saturating_sub(since));
    match wait.max(if slices_written { COUNTS_DELAY } else { Duration::ZERO }) {
        Duration::ZERO => StatusWrite::Now,
        wait => StatusWrite::After(wait),
    }
}

/// The status without the counts and without the messages, which have counts and names in them.
fn without_counts(status: &NetworkServiceStatus) -> NetworkServiceStatus {
    let mut status = NetworkServiceStatus { endpoints: None, ..status.clone() };
    for condition in &mut status.conditions {
        condition.message.clear();
    }
    status
}

fn ready(state: ServiceState<'_>) -> ConditionDraft {
    let no = |reason, message: String| ConditionDraft::new(READY, false, reason, message);
    let (network, network_state, desired, fault) = match state {
        ServiceState::Invalid(why) => {
            return no(INVALID_SPEC, format!("the spec is invalid: {why}; correct it"));
        }
        ServiceState::Taken(message) => return no(SERVICE_TAKEN, message.to_owned()),
        ServiceState::Withdrawn(why) => {
            let why: String = why.chars().take(MAX_CAUSE_CHARS).collect();
            return no(NOT_READY, format!("no endpoints are published: {why}; retrying"));
        }
        ServiceState::Planned { network: (network, state), desired, fault } => {
            (network, state, desired, fault)
        }
    };
    let missing = missing_network(network, network_state, "spec.network");
    let counts = &desired.counts;
    let (ready, total) = (counts.ipv4.ready + counts.ipv6.ready, counts.ipv4.total + counts.ipv6.total);
    match fault {
        Some(WriteFault::Failed(why)) => {
            let why: String = why.chars().take(MAX_CAUSE_CHARS).collect();
            let message = format!("the Service or its EndpointSlices could not be written: {why}; retrying");
            return no(NOT_READY, message);
        }
        Some(WriteFault::ChangedBack(message)) => return no(NOT_READY, message.to_owned()),
        None => {}
    }
    match missing {
        Some(missing) if ready == 0 => return no(NETWORK_NOT_FOUND, missing),
        Some(missing) => {
            let message = format!("{ready} of {total} endpoints are ready, and none is added: {missing}");
            return ConditionDraft::new(READY, true, READY, message);
        }
        None if ready > 0 => {
            return ConditionDraft::new(
                READY,
                true,
                READY,
                format!("{ready} of {total} endpoints are ready"),
            );
        }
        None => {}
    }
    if desired.pods == 0 {
        return no(NO_PODS, NO_PODS_MESSAGE.to_owned());
    }
    if total == 0 {
        return no(NO_ADDRESSES, no_addresses(network, desired));
    }
    no(NOT_READY, format!("none of {total} endpoints is ready; check the readiness of the pods"))
}

/// Why no endpoint is added on a network that is not known, and what to do. `reference` is where the user names the network.
pub(super) fn missing_network(network: &NadRef, state: &NetworkState, reference: &str) -> Option<String> {
    match state {
        NetworkState::Found { .. } => None,
        NetworkState::NotFound => Some(format!(
            "NetworkAttachmentDefinition {network} does not exist; create it or correct {reference}"
        )),
        NetworkState::NoBridgeNetwork(name) => Some(format!(
            "BridgeNetwork {name} of NetworkAttachmentDefinition {network} does not exist or cannot be read, so its subnets are not known; create or correct it"
        )),
        NetworkState::KindNotServed => {
            Some("the cluster does not serve the kind NetworkAttachmentDefinition; install multus".to_owned())
        }
    }
}

fn no_addresses(network: &NadRef, desired: &DesiredEndpoints) -> String {
    let pods = desired.pods;
    let mut message =
        format!("none of {pods} pods has an address on network {network} in its network-status annotation");
    let more = |count: usize| if count > 1 { format!("; {} more", count - 1) } else { String::new() };
    if let Some(fault) = desired.faults.first() {
        let _ = write!(message, "; {fault}{}", more(desired.faults.len()));
    } else if let Some(duplicate) = desired.duplicates.first() {
        let _ = write!(message, " of its own: duplicate {duplicate}{}", more(desired.duplicates.len()));
    } else if let Some(node) = desired.missing_nodes.first() {
        let _ = write!(message, "; Node {node} of a pod does not exist{}", more(desired.missing_nodes.len()));
    }
    message
}

fn foreign_endpoints(foreign: &[ForeignObject]) -> ConditionDraft {
    if foreign.is_empty() {
        return ConditionDraft::new(FOREIGN_ENDPOINTS, false, "None", "");
    }
    let message = foreign_message(foreign, "nsvc/NAME");
    ConditionDraft::new(FOREIGN_ENDPOINTS, true, FOREIGN_ENDPOINTS, message)
}

/// What publishes addresses besides Patchbay, and how to remove it. `target` is that of `patchbay clean`.
pub(super) fn foreign_message(foreign: &[ForeignObject], target: &str) -> String {
    let mut foreign: Vec<&ForeignObject> = foreign.iter().collect();
    foreign.sort_unstable();
    let foreign = list(&foreign);
    format!(
        "DNS also answers with the addresses of {foreign}; list and delete them with `patchbay clean {target}`"
    )
}

fn duplicate_address(state: ServiceState<'_>) -> ConditionDraft {
    let duplicates = match state {
        ServiceState::Planned { desired, .. } => &*desired.duplicates,
        ServiceState::Invalid(_) | ServiceState::Taken(_) | ServiceState::Withdrawn(_) => &[],
    };
    if duplicates.is_empty() {
        return ConditionDraft::new(DUPLICATE_ADDRESS, false, "None", "");
    }
    ConditionDraft::new(DUPLICATE_ADDRESS, true, DUPLICATE_ADDRESS, duplicates_message(duplicates))
}

pub(super) fn duplicates_message(duplicates: &[DuplicateAddress]) -> String {
    format!(
        "not published, because it is unknown which pod answers: {}; give each pod an address of its own",
        list(duplicates)
    )
}

/// The first ten, and the number of the rest.
fn list(items: &[impl fmt::Display]) -> String {
    let named: Vec<String> = items.iter().take(MAX_STATUS_ENTRIES).map(ToString::to_string).collect();
    let more = match items.len() - named.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    named.join(", ") + &more
}

/// A warning if a condition begins to report a problem that a person must solve, or another problem than before.
fn transition_event(draft: &ConditionDraft, old: Option<&Condition>) -> Option<StatusEvent> {
    let problem = match draft.kind {
        READY => [SERVICE_TAKEN, INVALID_SPEC].contains(&draft.reason),
        _ => draft.holds(),
    };
    let known = old.is_some_and(|old| {
        old.status == draft.status && old.reason == draft.reason && old.message == draft.message
    });
    (problem && !known).then(|| StatusEvent {
        reason: draft.reason,
        note: draft.message.chars().take(MAX_NOTE_CHARS).collect(),
    })
}

impl fmt::Display for ForeignObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            ForeignKind::EndpointSlice => "EndpointSlice",
            ForeignKind::Endpoints => "Endpoints",
        };
        write!(f, "{kind} {}", self.name)?;
        if let Some(manager) = &self.manager {
            write!(f, " (managed by {manager})")?;
        }
        Ok(())
    }
}
