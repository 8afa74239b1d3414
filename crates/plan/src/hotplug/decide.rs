//! What to do next for a pod.

mod removals;

use std::collections::BTreeSet;

use api::{
    attachments::{self, Attachment, AttachmentState},
    digest::digest,
    network_status::NetworkStatus,
    selection::{NadRef, NetworkSelection},
};

use super::{
    AddStep, AnnotationUpdate, AttachmentKey, AttachmentRecord, AttemptKey, EventReason, FilteredRoutes,
    Fingerprint, NadState, Origin, PlanInput, PlugMode, PodEvent, PodLifecycle, PodPlan, RecordPhase,
    RemovePurpose, Reported, RequestedAddresses, SandboxRef, SandboxState, StateReason, Step,
    annotations::{MAX_ANNOTATIONS, attachments_text, bounded, is_reported},
    effective_records::EffectiveRecords,
    events,
    failures::LastFailure,
    links::{PodLinks, identified},
    matching::{DesiredElement, Match, Matching, interface_order},
    names::{Name, Names},
    request, states,
    status::StatusView,
};

/// Bounds the events of one plan. The annotation reports the rest.
const MAX_EVENTS: usize = 8;

/// What to do for a pod now. `nads` resolves the NADs that its elements refer to.
///
/// In order: records that nothing refers to are forgotten; attachments of ended sandboxes are removed; attachments that are
/// unfinished, lost or no longer requested are removed; requested networks are attached in the order of the annotation. What
/// has to wait is passed over. What has failed comes after all that has not, and what failed longest ago comes first of
/// it: a step that hangs or fails each time delays each of the others at most once.
pub fn plan(input: PlanInput<'_>, nads: impl Fn(&NadRef) -> NadState, reported: &mut Reported) -> PodPlan {
    let observed = input.observed;
    if input.mode == PlugMode::On {
        reported.note_request(input.desired);
    }
    let sandbox = match &observed.sandbox {
        SandboxState::Ready(sandbox) => Some(sandbox),
        SandboxState::Absent => None,
        SandboxState::Unknown => {
            return PodPlan { failing: input.failures.attempts().cloned().collect(), ..PodPlan::default() };
        }
    };
    let is_current = |record: &&AttachmentRecord| {
        sandbox.is_some_and(|sandbox| sandbox.id == record.key.container) && record.boot == observed.boot
    };
    let selection = NetworkSelection::parse(input.desired.networks.as_deref());
    let mut known = EffectiveRecords::new(observed, sandbox);
    known.resolve_guesses(
        observed.network_status.as_deref(),
        &selection,
        &input.desired.pod.namespace,
        &nads,
    );
    let (mut current, ended): (Vec<_>, Vec<_>) =
        known.records.iter().map(AsRef::as_ref).partition(is_current);
    current.sort_by_cached_key(|record| interface_order(&record.key.interface));
    let links = observed.links.as_deref().unwrap_or_default();
    let identified = identified(links, &current);
    let links = PodLinks {
        links,
        host_links: &observed.host_links,
        never_lost: input.desired.virt_launcher,
        identified: &identified,
    };
    let status = StatusView::new(observed.network_status.as_deref(), links).entries();
    let mut planner = Planner {
        input,
        selection: &selection,
        status: &status,
        sandbox,
        current,
        ended,
        unrecorded: &known.unrecorded,
        links,
        confirm: false,
        forget: known.superseded.into_iter().next().filter(|_| input.mode == PlugMode::On).map(Step::Forget),
        next: None,
        failing: Vec::new(),
        states: Vec::new(),
        requested: None,
        events: Vec::new(),
        event_keys: BTreeSet::new(),
    };
    let access = planner.status_access();
    planner.handle_ended(access);
    let handled = access == StatusAccess::Write && planner.handle_current(&nads, reported);
    planner.finish(access, handled, reported)
}

/// Whether the pod's annotations are written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StatusAccess {
    Write,
    /// Not now.
    Wait,
    /// Never again, or another program writes them.
    Skip,
}

struct Planner<'a> {
    input: PlanInput<'a>,
    /// The networks annotation.
    selection: &'a NetworkSelection,
    /// The entries of network-status.
    status: &'a [NetworkStatus],
    sandbox: Option<&'a SandboxRef>,
    /// The records of the READY sandbox.
    current: Vec<&'a AttachmentRecord>,
    /// The records of other sandboxes.
    ended: Vec<&'a AttachmentRecord>,
    /// Those of the records that the journal does not have as attached.
    unrecorded: &'a BTreeSet<AttachmentKey>,
    links: PodLinks<'a>,
    /// The annotations must be confirmed by a write.
    confirm: bool,
    forget: Option<Step>,
    /// The step that comes after `forget`, and when it failed last.
    next: Option<(LastFailure, Step)>,
    failing: Vec<AttemptKey>,
    states: Vec<Attachment>,
    requested: Option<BTreeSet<AttachmentKey>>,
    /// Events, each with the state that reports the same in the annotation.
    events: Vec<(PodEvent, Option<Attachment>)>,
    /// What was reported by the events that no state repeats.
    event_keys: BTreeSet<String>,
}

impl<'a> Planner<'a> {
    fn status_access(&self) -> StatusAccess {
        let desired = self.input.desired;
        let absent = self.sandbox.is_none();
        match desired.lifecycle {
            _ if self.input.mode != PlugMode::On || desired.host_network => StatusAccess::Skip,
            PodLifecycle::Ended => StatusAccess::Skip,
            PodLifecycle::Terminating if absent => StatusAccess::Skip,
            _ if !absent && self.input.observed.links.is_none() => StatusAccess::Wait,
            PodLifecycle::Pending | PodLifecycle::Running | PodLifecycle::Terminating => StatusAccess::Write,
        }
    }

    /// Removes what is left of other sandboxes. That goes on in every mode, because nothing else does it.
    ///
    /// Multus runs the DEL of what it attached when the pod started.
    fn handle_ended(&mut self, access: StatusAccess) {
        let view = self.status_view();
        for record in self.ended.clone() {
            match (&record.phase, record.origin) {
                (RecordPhase::Removed, origin) => {
                    let leave = origin == Origin::PodStart || access == StatusAccess::Skip;
                    if leave || (access == StatusAccess::Write && self.is_unreported(&view, record, false)) {
                        self.forget.get_or_insert_with(|| Step::Forget(record.key.clone()));
                    }
                }
                (RecordPhase::Intent { .. } | RecordPhase::Attached(_), Origin::PodStart) => {
                    // Only then it is in the journal.
                    if record.removing {
                        self.forget.get_or_insert_with(|| Step::Forget(record.key.clone()));
                    }
                }
                (
                    RecordPhase::Intent { .. } | RecordPhase::Attached(_),
                    Origin::Hotplug | Origin::Original,
                ) => {
                    self.propose_remove(record, RemovePurpose::SandboxEnded);
                }
            }
        }
    }

    /// Whether network-status does not report a removed attachment, for certain. If that must be confirmed, the annotations are
    /// written as they are.
    fn is_unreported(&mut self, view: &StatusView<'_>, record: &AttachmentRecord, is_current: bool) -> bool {
        let clean = view.is_clean(record, is_current, &self.live());
        // What the daemon never wrote needs no confirmation. Other programs wrote about their own attachments.
        let confirmed = record.former_statuses.is_empty() || self.input.observed.annotations_confirmed;
        self.confirm |= clean && !confirmed;
        clean && confirmed
    }

    /// Compares the annotation with the attachments of the READY sandbox. Returns whether it could.
    fn handle_current(&mut self, nads: &impl Fn(&NadRef) -> NadState, reported: &mut Reported) -> bool {
        let desired = self.input.desired;
        if self.sandbox.is_none() || !self.runs() {
            return false;
        }
        let view = self.status_view();
        for record in self.current.clone() {
            if record.phase == RecordPhase::Removed && self.is_unreported(&view, record, true) {
                self.forget.get_or_insert_with(|| Step::Forget(record.key.clone()));
            }
        }
        if let Some(error) = &self.selection.error {
            let message = format!(
                "the networks annotation is invalid: {error}; correct it, until then no interface is attached or detached"
            );
            self.report(events::about(&desired.pod, EventReason::InvalidNetworks, &message));
            self.keep_failures();
            // What is half attached or half removed is nothing that the user has. An attachment whose ADD succeeded waits:
            // the annotation says whether its routes are filtered.
            for record in self.current.clone() {
                match &record.phase {
                    RecordPhase::Intent { .. } => self.propose_remove(record, RemovePurpose::Undo),
                    RecordPhase::Attached(_) if record.removing => {
                        self.propose_remove(record, RemovePurpose::Unplug);
                    }
                    RecordPhase::Attached(_) | RecordPhase::Removed => {}
                }
            }
            return false;
        }
        let mut matching = self.matching(self.selection);
        if self.input.observed.unreadable.is_none() {
            self.note_requested(&matching, reported);
        }
        matching.keep_unrequested(&self.input.observed.requested);
        let status = self.status;
        let removals = self.removals(&matching);
        let mut names = Names::new(
            &matching,
            &self.current,
            removals.iter().map(|(record, _)| *record).collect(),
            status,
            self.links,
        );
        for (record, purpose) in &removals {
            self.propose_remove(record, *purpose);
        }
        // None of them has `default-route` itself: what the ADD of such an element did is not completed.
        let filters = matching.wanted.iter().any(|wanted| !wanted.element.default_route.is_empty());
        for record in self.current.clone() {
            let removed = removals.iter().any(|(other, _)| other.key == record.key);
            if self.unrecorded.contains(&record.key) && !removed {
                let filtered_routes = FilteredRoutes { ipv4: filters, ipv6: filters };
                self.propose(Step::Finish(Box::new(record.clone()), filtered_routes));
            }
        }
        for invalid in &matching.invalid {
            let (state, event) = states::invalid(&desired.pod, invalid);
            self.events.push((event, Some(state.clone())));
            self.states.push(state);
        }
        for wanted in &matching.wanted {
            self.handle_element(wanted, &matching, &removals, &mut names, nads);
        }
        self.report_removals(&matching, &removals);
        self.report_kept(&matching);
        // Those of attached elements too: which element an attachment belongs to may change.
        let requested: BTreeSet<&AttemptKey> = matching.wanted.iter().map(|wanted| &wanted.attempt).collect();
        let failures = self.input.failures.attempts();
        self.failing.extend(failures.filter(|attempt| requested.contains(attempt)).cloned());
        let order = |record: &&AttachmentRecord| {
            let at = matching.wanted.iter().position(
                |wanted| matches!(wanted.matched, Some(Match::Record(other)) if other.key == record.key),
            );
            (at.unwrap_or(usize::MAX), interface_order(&record.key.interface))
        };
        self.current.sort_by_cached_key(order);
        true
    }

    fn matching<'s>(&self, selection: &'s NetworkSelection) -> Matching<'s>
    where
        'a: 's,
    {
        let namespace = &self.input.desired.pod.namespace;
        Matching::new(selection, namespace, &self.current, self.status, self.links)
    }

    /// Remembers which attachments of other programs the annotation requests, or did when nothing could be compared.
    fn note_requested(&mut self, matching: &Matching<'a>, reported: &mut Reported) {
        let former = &self.input.observed.requested;
        let mut requested = matching.requested(former, &self.current);
        for networks in std::mem::take(&mut reported.requests) {
            let selection = NetworkSelection::parse(Some(&networks));
            requested.extend(self.matching(&selection).requested(former, &self.current));
        }
        self.requested = Some(requested).filter(|new| new != former);
    }

    /// Whether networks are attached and attached again.
    fn plugs(&self) -> bool {
        self.input.desired.lifecycle == PodLifecycle::Running
    }

    fn handle_element(
        &mut self,
        wanted: &DesiredElement<'a>,
        matching: &Matching<'a>,
        removals: &[(&'a AttachmentRecord, RemovePurpose)],
        names: &mut Names<'a>,
        nads: &impl Fn(&NadRef) -> NadState,
    ) {
        match wanted.matched {
            Some(Match::StatusOnly(_)) => {}
            Some(Match::Record(record)) if !removals.iter().any(|(other, _)| other.key == record.key) => {
                self.handle_attached(wanted, record, &nads(&wanted.nad));
            }
            Some(Match::Record(_)) | None => {
                let Some(name) = names.assign(wanted) else { return };
                self.handle_unattached(wanted, &name, matching, removals, &nads(&wanted.nad));
            }
        }
    }

    /// An element whose attachment stays.
    fn handle_attached(
        &mut self,
        wanted: &DesiredElement<'_>,
        record: &AttachmentRecord,
        nad_state: &NadState,
    ) {
        let Some(attached) = record.attached() else { return };
        let (nad, interface) = (&record.nad, record.key.interface.as_str());
        if self.links.is_lost(attached) {
            let message = match record.origin {
                Origin::Hotplug => "the link was deleted",
                Origin::PodStart => {
                    "the link was deleted; multus attached it when the pod started, so Patchbay does not attach it again: remove \
                     the network from the annotation and add it again"
                }
                Origin::Original => {
                    "the link was deleted; multus-dynamic-networks-controller attached it, so Patchbay does not attach it \
                     again: remove the network from the annotation and add it again"
                }
            };
            self.states.push(states::with_reason(
                nad,
                interface,
                AttachmentState::Failed,
                StateReason::LinkLost,
                message,
            ));
            return;
        }
        if let NadState::Forbidden { message } = nad_state {
            let (state, event) =
                states::forbidden_attachment(&self.input.desired.pod, nad, interface, message);
            self.events.push((event, Some(state.clone())));
            self.states.push(state);
            return;
        }
        let changed = record.requested.as_ref().filter(|requested| **requested != wanted.requested);
        if let Some(before) = changed {
            let message = states::update_message(&wanted.requested, before);
            let event = events::about(
                &self.input.desired.pod,
                EventReason::AttachmentUpdateRejected,
                &format!("interface {interface} of network {nad}: {message}"),
            );
            let state = states::with_reason(
                nad,
                interface,
                AttachmentState::Attached,
                StateReason::UpdateRejected,
                message,
            );
            self.events.push((event, Some(state.clone())));
            self.states.push(state);
        } else if record.origin == Origin::Hotplug {
            self.report_attached(nad, interface);
        }
    }

    /// Lists what the daemon attached.
    fn report_attached(&mut self, nad: &NadRef, interface: &str) {
        let Some(runtime) = self.sandbox.and_then(|sandbox| sandbox.own_network_stack.as_deref()) else {
            self.states.push(states::plain(nad, interface, AttachmentState::Attached));
            return;
        };
        let (state, event) = states::own_network_stack(&self.input.desired.pod, nad, interface, runtime);
        self.events.push((event, Some(state.clone())));
        self.states.push(state);
    }

    /// An element without an attachment, or with one that is removed first.
    fn handle_unattached(
        &mut self,
        wanted: &DesiredElement<'a>,
        name: &Name,
        matching: &Matching<'a>,
        removals: &[(&'a AttachmentRecord, RemovePurpose)],
        nad: &NadState,
    ) {
        let pod = &self.input.desired.pod;
        let interface = name.as_str();
        if let Some(message) = &self.input.observed.unreadable {
            let event = events::about(pod, EventReason::RecordsUnreadable, message);
            let (state, reason) = (AttachmentState::Failed, StateReason::RecordsUnreadable);
            let state = states::with_reason(&wanted.nad, interface, state, reason, message);
            // One event for all elements.
            if !self.events.iter().any(|(other, _)| *other == event) {
                self.events.push((event, Some(state.clone())));
            }
            self.states.push(state);
            return;
        }
        if let NadState::IsolationUnknown { message } = nad {
            let (state, reason) = (AttachmentState::Pending, StateReason::IsolationUnknown);
            self.states.push(states::with_reason(&wanted.nad, interface, state, reason, message));
            return;
        }
        let refused = |reason: StateReason, event: EventReason, message: String| {
            let event = events::about(pod, event, &format!("network {}: {message}", wanted.nad));
            (states::with_reason(&wanted.nad, interface, AttachmentState::Refused, reason, message), event)
        };
        let refusal = states::unusable_nad(pod, wanted, interface, nad)
            .or_else(|| {
                let message = states::too_long(wanted)
                    .or_else(|| states::default_route_conflict(wanted, &matching.wanted))?;
                Some(refused(StateReason::InvalidNetworks, EventReason::InvalidNetworks, message))
            })
            .or_else(|| {
                let Name::Taken { message, .. } = name else { return None };
                Some(refused(
                    StateReason::InterfaceNameTaken,
                    EventReason::InterfaceNameTaken,
                    message.clone(),
                ))
            });
        if let Some((state, event)) = refusal {
            self.events.push((event, Some(state.clone())));
            self.states.push(state);
            return;
        }
        let step = match self.add_step(wanted, name, matching, nad) {
            Ok(Some(step)) => step,
            Ok(None) => return,
            Err(error) => {
                let nad = NadState::Invalid { message: error.to_string() };
                if let Some((state, event)) = states::unusable_nad(pod, wanted, interface, &nad) {
                    self.events.push((event, Some(state.clone())));
                    self.states.push(state);
                }
                return;
            }
        };
        if let Some(message) = states::exceeds_records(&step, &self.input.observed.records) {
            let (state, event) = refused(StateReason::InvalidNetworks, EventReason::InvalidNetworks, message);
            self.events.push((event, Some(state.clone())));
            self.states.push(state);
            return;
        }
        let failures = self.input.failures;
        let failure = failures.get(&step.attempt, step.fingerprint);
        let is_delayed = failures.is_delayed(&step.attempt, step.fingerprint, self.input.now);
        let removal = removals
            .iter()
            .find(|(record, _)| record.key.interface == interface)
            .and_then(|(record, purpose)| self.removal_error(record, *purpose));
        let state = |reason: StateReason, message: String| {
            states::with_reason(&wanted.nad, interface, AttachmentState::Failed, reason, message)
        };
        if let Some(error) = removal {
            self.states.push(state(
                StateReason::RemoveFailed,
                format!(
                    "the earlier attachment of this interface must be detached first, which failed: {error}"
                ),
            ));
        } else if let Some(failure) = failure.filter(|failure| failure.is_wait()) {
            self.states.push(states::pending(&wanted.nad, interface, &failure.error));
        } else if let Some(failure) = failure {
            self.states.push(state(StateReason::AddFailed, failure.error.clone()));
        } else if is_delayed {
            let message = "too many attempts of this pod failed; retrying soon";
            self.states.push(states::pending(&wanted.nad, interface, message));
        } else if self.input.running.is_some() {
            self.states.push(states::plain(&wanted.nad, interface, AttachmentState::Pending));
        }
        if matches!(name, Name::Free(_)) && !is_delayed && self.plugs() {
            self.propose(Step::Add(Box::new(step)));
        }
    }

    /// Takes a step that is not in backoff, unless one that comes before it was proposed earlier.
    fn propose(&mut self, step: Step) {
        let ended = matches!(&step, Step::Remove(remove) if remove.purpose == RemovePurpose::SandboxEnded);
        if self.input.observed.unreadable.is_some() && !ended {
            return;
        }
        let attempt = step.attempt().map(|(attempt, _)| attempt);
        let last = attempt.map_or(LastFailure::Never, |attempt| self.input.failures.last_failure(attempt));
        if self.next.as_ref().is_none_or(|(other, _)| last < *other) {
            self.next = Some((last, step));
        }
    }

    fn add_step(
        &self,
        wanted: &DesiredElement<'a>,
        name: &Name,
        matching: &Matching<'a>,
        nad: &NadState,
    ) -> Result<Option<AddStep>, request::ConfigError> {
        let (NadState::Ready { config }, Some(sandbox), Ok(interface)) =
            (nad, self.sandbox, name.as_str().parse())
        else {
            return Ok(None);
        };
        let config = request::config_with_args(config, wanted.element)?;
        let gateways = |ipv4: bool, element: &DesiredElement<'_>| {
            element.element.default_route.iter().any(|gateway| gateway.is_ipv4() == ipv4)
        };
        let filters = matching.wanted.iter().any(|other| !other.element.default_route.is_empty());
        let former = self.current.iter().find(|record| record.key.interface == name.as_str());
        Ok(Some(AddStep {
            attempt: wanted.attempt.clone(),
            fingerprint: self.add_fingerprint(wanted, config.text(), sandbox),
            index: wanted.index,
            element: wanted.element.clone(),
            nad: wanted.nad.clone(),
            pod: self.input.desired.pod.clone(),
            sandbox: sandbox.clone(),
            boot: self.input.observed.boot.clone(),
            cni_args: request::cni_args(&self.input.desired.pod, &sandbox.id, wanted.element),
            capability_args: request::capability_args(wanted.element, &wanted.nad, &sandbox.id, &interface),
            interface,
            config: Box::new(config),
            requested: RequestedAddresses::of(wanted.element),
            default_route: wanted.element.default_route.clone(),
            former_statuses: former.map(|record| record.former_statuses.clone()).unwrap_or_default(),
            filtered_routes: FilteredRoutes {
                ipv4: filters && !gateways(true, wanted),
                ipv6: filters && !gateways(false, wanted),
            },
        }))
    }

    /// A network may need another interface of the pod, so a new attachment lets the others be tried again.
    fn add_fingerprint(
        &self,
        wanted: &DesiredElement<'_>,
        config: &str,
        sandbox: &SandboxRef,
    ) -> Fingerprint {
        let element = wanted.element.to_json();
        let attached = self.current.iter().filter(|record| record.attached().is_some());
        let texts = [element.as_str(), config, &sandbox.id].into_iter();
        Fingerprint(digest(texts.chain(attached.map(|record| record.key.interface.as_str()))))
    }

    /// Failures of elements count as long as the annotation is not compared.
    fn keep_failures(&mut self) {
        let adds = self.input.failures.attempts().filter(|attempt| matches!(attempt, AttemptKey::Add { .. }));
        self.failing.extend(adds.cloned());
    }

    fn report(&mut self, event: PodEvent) {
        self.events.push((event, None));
    }

    /// The attachments of the READY sandbox that exist.
    fn live(&self) -> Vec<&'a AttachmentRecord> {
        let live = |record: &&&AttachmentRecord| {
            record.attached().is_some_and(|attached| !self.links.is_lost(attached))
        };
        self.current.iter().filter(live).copied().collect()
    }

    fn status_view(&self) -> StatusView<'a> {
        StatusView::new(self.input.observed.network_status.as_deref(), self.links)
    }

    fn finish(mut self, access: StatusAccess, handled: bool, reported: &mut Reported) -> PodPlan {
        let observed = self.input.observed;
        if access == StatusAccess::Write && !handled {
            self.keep_failures();
        }
        let replugs = self.input.failures.attempts().filter(|attempt| {
            matches!((attempt, self.sandbox), (AttemptKey::Replug(key), Some(sandbox)) if key.container == sandbox.id)
        });
        self.failing.extend(replugs.cloned());
        self.report_host_network();
        let annotations = (access == StatusAccess::Write).then(|| {
            let current = if self.runs() { self.current.as_slice() } else { &[] };
            // Multus has written about a pod that runs, or could not.
            let defaults = if self.plugs() { observed.default_statuses.as_slice() } else { &[] };
            let network_status = if observed.unreadable.is_some() {
                observed.network_status.clone()
            } else {
                let status = self.status_view().update(current, &self.ended, defaults);
                bounded(observed.network_status.as_ref(), status)
            };
            let rest = MAX_ANNOTATIONS.saturating_sub(network_status.as_ref().map_or(0, String::len));
            AnnotationUpdate {
                network_status,
                attachments: if handled {
                    let desired = self.input.desired;
                    let confirm = desired.confirm.as_deref();
                    let digest =
                        confirm.map(|edit| attachments::networks_digest(edit, desired.networks.as_deref()));
                    attachments_text(observed.attachments.as_deref(), &self.states, digest.as_deref(), rest)
                } else {
                    observed.attachments.clone()
                },
            }
        });
        let annotations = annotations.filter(|update| {
            self.confirm
                || (&update.network_status, &update.attachments)
                    != (&observed.network_status, &observed.attachments)
        });
        let events = self.new_events(reported);
        PodPlan {
            step: self.forget.or(self.next.map(|(_, step)| step)),
            states: self.states,
            requested: self.requested,
            annotations,
            events,
            failing: self.failing,
        }
    }

    fn runs(&self) -> bool {
        matches!(self.input.desired.lifecycle, PodLifecycle::Running | PodLifecycle::Terminating)
    }

    fn report_host_network(&mut self) {
        let desired = self.input.desired;
        if self.input.mode != PlugMode::On || !desired.host_network || !self.runs() {
            return;
        }
        if !self.selection.entries.is_empty() || self.selection.error.is_some() {
            self.report(events::host_network(&desired.pod));
        }
    }

    /// The events that neither this process nor the annotation reported.
    fn new_events(&mut self, reported: &mut Reported) -> Vec<PodEvent> {
        let old = attachments::parse(self.input.observed.attachments.as_deref()).unwrap_or_default();
        let networks = self.input.desired.networks.as_deref().unwrap_or_default();
        let mut new = Vec::new();
        for (event, state) in std::mem::take(&mut self.events) {
            // Without a state, each change of the annotation is reported.
            let key = match &state {
                Some(_) => event.note.clone(),
                None => format!("{}\n{:016x}", event.note, digest([networks])),
            };
            let known = reported.problems.contains(&key)
                || state.is_some_and(|state| old.iter().any(|old| is_reported(old, &state)));
            self.event_keys.insert(key);
            if !known && new.len() < MAX_EVENTS {
                new.push(event);
            }
        }
        reported.problems = std::mem::take(&mut self.event_keys);
        new
    }
}
