//! Which attachments of a pod are removed, how, and what is reported about them.

use std::time::Duration;

use api::{
    attachments::{self, AttachmentState},
    digest::digest,
};

use super::{
    super::{
        AttachmentRecord, AttemptKey, DelErrors, DelMode, Fingerprint, MovedLinks, Origin, RecordPhase,
        RemovePurpose, RemoveStep, StateReason, Step,
        annotations::is_reported,
        matching::{Match, Matching, interface_order},
        states,
    },
    Planner,
};

/// If an attachment cannot be released without a namespace for this time, its IPAM plugin is called too. A pod with one
/// failing attachment has then failed five times.
const RELEASE_AFTER: Duration = Duration::from_secs(20);
/// If the plugin itself reports errors or does not exist for this time, the attachment is abandoned once its addresses are
/// released.
const ABANDON_AFTER: Duration = Duration::from_hours(12);

impl<'a> Planner<'a> {
    /// The attachments of the READY sandbox to remove, and why.
    pub(super) fn removals(&self, matching: &Matching<'a>) -> Vec<(&'a AttachmentRecord, RemovePurpose)> {
        let mut removals: Vec<(&AttachmentRecord, RemovePurpose)> = Vec::new();
        for wanted in &matching.wanted {
            let Some(Match::Record(record)) = wanted.matched else { continue };
            match &record.phase {
                RecordPhase::Intent { .. } => removals.push((record, RemovePurpose::Undo)),
                RecordPhase::Attached(attached) => {
                    let replug = self.links.is_lost(attached)
                        && is_replugged(record.origin)
                        && self.plugs()
                        && !self.input.failures.delays_replug(&record.key, self.input.now);
                    if replug {
                        removals.push((record, RemovePurpose::Replug));
                    }
                }
                RecordPhase::Removed => {}
            }
        }
        // In reverse order of attachment: a link may be on top of an earlier one.
        let position = |record: &&AttachmentRecord| {
            let interface = record.key.interface.as_str();
            let at = self.status.iter().position(|status| status.interface == interface);
            (at, interface_order(interface))
        };
        let mut unwanted = matching.unwanted.clone();
        unwanted.sort_by_cached_key(position);
        for record in unwanted.into_iter().rev() {
            let purpose =
                if record.attached().is_some() { RemovePurpose::Unplug } else { RemovePurpose::Undo };
            removals.push((record, purpose));
        }
        removals
    }

    /// Lists what is being removed, unless an element of the same interface reports it.
    pub(super) fn report_removals(
        &mut self,
        matching: &Matching<'a>,
        removals: &[(&'a AttachmentRecord, RemovePurpose)],
    ) {
        for (record, purpose) in removals {
            let requested = matching.wanted.iter().any(
                |wanted| matches!(wanted.matched, Some(Match::Record(other)) if other.key == record.key),
            );
            if requested {
                continue;
            }
            let interface = &record.key.interface;
            if let Some(error) = self.removal_error(record, *purpose) {
                self.states.push(states::with_reason(
                    &record.nad,
                    interface,
                    AttachmentState::Failed,
                    StateReason::RemoveFailed,
                    error,
                ));
            } else if self.input.running.is_some() {
                self.states.push(states::plain(&record.nad, interface, AttachmentState::Removing));
            }
        }
        for record in &matching.protected {
            let Some(attached) = record.attached().filter(|_| record.origin == Origin::Hotplug) else {
                continue;
            };
            let (nad, interface) = (&record.nad, &record.key.interface);
            if self.links.is_lost(attached) {
                self.states.push(states::with_reason(
                    nad,
                    interface,
                    AttachmentState::Failed,
                    StateReason::LinkLost,
                    "the link was deleted, and an invalid element may request it; correct the networks annotation",
                ));
            } else {
                self.report_attached(nad, interface);
            }
        }
    }

    /// Lists what another program attached and no element was seen to request. What may be a default network of Multus is
    /// attached to every pod and not listed; until its configuration is known, only what was listed before is.
    pub(super) fn report_kept(&mut self, matching: &Matching<'a>) {
        let pod = &self.input.desired.pod;
        let listed = attachments::parse(self.input.observed.attachments.as_deref()).unwrap_or_default();
        for record in matching.kept.iter().filter(|record| !record.may_be_default_network()) {
            let Some(attached) = record.attached() else { continue };
            if self.links.is_lost(attached) {
                continue;
            }
            let (state, event) = states::kept(pod, record);
            if !self.input.observed.defaults_known && !listed.iter().any(|old| is_reported(old, &state)) {
                continue;
            }
            self.events.push((event, Some(state.clone())));
            self.states.push(state);
        }
    }

    fn remove_step(&self, record: &AttachmentRecord, purpose: RemovePurpose) -> RemoveStep {
        let is_current = purpose != RemovePurpose::SandboxEnded;
        let mode = self.del_mode(record, is_current);
        let how = match mode {
            DelMode::WithNamespace => "with namespace",
            DelMode::ReleaseOnly => "release only",
        };
        RemoveStep {
            attempt: AttemptKey::Remove(record.key.clone()),
            fingerprint: Fingerprint(digest([record.config.as_str(), record.boot.as_str(), how])),
            mode,
            purpose,
            leftover_links: if is_current { self.links.owned(record) } else { Vec::new() },
            moved_links: if is_current { self.links.moved(record) } else { MovedLinks::default() },
            errors: DelErrors::Fail,
            record: record.clone(),
        }
    }

    fn del_mode(&self, record: &AttachmentRecord, is_current: bool) -> DelMode {
        let observed = self.input.observed;
        if record.boot != observed.boot || !observed.namespaces.contains(&record.netns) {
            return DelMode::ReleaseOnly;
        }
        // The links of another sandbox's namespace are not known.
        let unknown = !is_current && record.attached().is_none();
        let foreign = |link| is_current && !self.links.owns(record, link);
        if unknown || self.links.named(&record.key.interface).is_some_and(foreign) {
            return DelMode::ReleaseOnly;
        }
        DelMode::WithNamespace
    }

    /// Proposes to remove an attachment, unless that is in backoff.
    pub(super) fn propose_remove(&mut self, record: &AttachmentRecord, purpose: RemovePurpose) {
        let mut step = self.remove_step(record, purpose);
        let failures = self.input.failures;
        if failures.has_failed(&step.attempt) {
            self.failing.push(step.attempt.clone());
        }
        let failure = failures.get(&step.attempt, step.fingerprint);
        if let Some(failure) = failure.filter(|_| step.mode == DelMode::ReleaseOnly) {
            step.errors = if failure.plugin_failing_for(self.input.now) >= ABANDON_AFTER {
                DelErrors::Abandon
            } else if failure.failing_for(self.input.now) >= RELEASE_AFTER {
                DelErrors::ReleaseAddresses
            } else {
                DelErrors::Fail
            };
        }
        if !failures.is_delayed(&step.attempt, step.fingerprint, self.input.now) {
            self.propose(Step::Remove(Box::new(step)));
        }
    }

    pub(super) fn removal_error(&self, record: &AttachmentRecord, purpose: RemovePurpose) -> Option<String> {
        let step = self.remove_step(record, purpose);
        let failure = self.input.failures.get(&step.attempt, step.fingerprint)?;
        Some(failure.error.clone())
    }
}

/// Whether a lost attachment is attached again. The records of other programs do not have the index of the link, so that
/// the link may still exist under another name.
fn is_replugged(origin: Origin) -> bool {
    origin == Origin::Hotplug
}
