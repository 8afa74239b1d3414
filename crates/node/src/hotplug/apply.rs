//! Applies the steps of a plan: runs plugins, and records before and after what they do.

use std::{path::Path, time::Instant};

use api::{ErrorChain, nad_config::NadConfig, network_status::NetworkStatus};
use link::{DefaultRoute, SkipReason};
use plan::{
    hotplug::{
        AddStep, AttachedRecord, AttachmentRecord, DelMode, FilteredRoutes, LinkIdentity, Origin,
        RecordPhase, RemoveStep, Step,
    },
    ipam::AttachmentKey,
};
use tracing::{info, warn};

use super::{
    Deps,
    journal::NotRecorded,
    metrics::FailureReason,
    pod_namespace::{NamespaceError, ObservedNamespace, created_links},
    sandboxes::PodNetwork,
};
use crate::executor::{CniRequest, ExecError, attachment_result};

/// Why a step failed.
#[derive(Debug)]
pub struct AttachmentStepError {
    pub reason: FailureReason,
    /// For events: what failed and why.
    pub text: String,
}

impl AttachmentStepError {
    /// Whether the step only has to wait for a slot. That is no event of the pod.
    pub fn is_wait(&self) -> bool {
        self.reason == FailureReason::Busy
    }

    /// Whether the plugin itself reported the error, or does not exist.
    pub fn is_of_plugin(&self) -> bool {
        matches!(self.reason, FailureReason::Plugin | FailureReason::PluginMissing)
    }
}

/// What became of a step.
#[derive(Debug)]
pub enum StepOutcome {
    Done,
    Failed(AttachmentStepError),
    /// Nothing was done: the daemon stops, or the pod changed since the plan was made.
    Skipped,
}

impl From<NotRecorded> for AttachmentStepError {
    fn from(error: NotRecorded) -> Self {
        Self { reason: FailureReason::Journal, text: error.to_string() }
    }
}

impl From<NamespaceError> for AttachmentStepError {
    fn from(error: NamespaceError) -> Self {
        Self { reason: FailureReason::Links, text: ErrorChain(&error).to_string() }
    }
}

impl From<ExecError> for AttachmentStepError {
    fn from(error: ExecError) -> Self {
        let reason = match &error {
            ExecError::Plugin { .. } => FailureReason::Plugin,
            ExecError::Signaled { .. } => FailureReason::Signaled,
            ExecError::PluginMissing { .. } => FailureReason::PluginMissing,
            ExecError::Timeout { .. } => FailureReason::Timeout,
            ExecError::TooLong { .. } | ExecError::Invalid(_) => FailureReason::InvalidOutput,
            ExecError::Busy { .. } | ExecError::Stopping => FailureReason::Busy,
            ExecError::Host { .. } => FailureReason::Host,
        };
        Self { reason, text: error.to_string() }
    }
}

impl Deps {
    /// Applies a step.
    pub async fn apply(&self, step: Step) -> StepOutcome {
        let applied = match step {
            Step::Add(step) => self.add(&step).await,
            Step::Remove(step) => self.remove(&step).await,
            Step::Finish(record, filtered_routes) => {
                self.finish(*record, filtered_routes).await;
                Ok(StepOutcome::Done)
            }
            Step::Forget(key) => {
                self.forget(key).await;
                Ok(StepOutcome::Done)
            }
        };
        applied.unwrap_or_else(StepOutcome::Failed)
    }

    async fn forget(&self, key: AttachmentKey) {
        if let Err(error) = self.journal.remove(key).await {
            warn!(error = %error, "the end of an attachment cannot be recorded yet");
        }
    }

    /// Records an attachment whose ADD succeeded before the daemon could record that.
    async fn finish(&self, record: AttachmentRecord, filtered_routes: FilteredRoutes) {
        let links = record.attached().map_or(&[][..], |attached| &attached.links);
        if let Some(index) = own_link(&record.key.interface, links)
            && let Err(error) = self.filter_routes(&record.netns, index, filtered_routes).await
        {
            warn!(pod = record.pod.name, interface = record.key.interface, error = %ErrorChain(&error), "cannot complete an attachment, repeating it");
            // Without its result it is undone.
            if let Ok(request) = del_request(&record, DelMode::WithNamespace) {
                self.executor.forget_result(&request).await;
            }
            return;
        }
        info!(
            pod = %format_args!("{}/{}", record.pod.namespace, record.pod.name),
            network = %record.nad,
            interface = record.key.interface,
            "completed the record of an attached interface"
        );
        if let Err(error) = self.journal.update(record).await {
            warn!(error = %error, "an attachment cannot be recorded yet");
        }
    }

    /// What the ADD of an unfinished attachment returned and created, if the result cache of the node says so. `links` are those
    /// of its namespace.
    pub async fn cached_attachment(
        &self,
        record: &AttachmentRecord,
        namespace: &ObservedNamespace,
    ) -> Option<AttachedRecord> {
        let RecordPhase::Intent { links_before } = &record.phase else { return None };
        // The default routes of the pod were about to change, and may be half changed.
        if self.journal.changes_routes(&record.key) {
            return None;
        }
        let request = del_request(record, DelMode::WithNamespace).ok()?;
        let added = self.executor.recorded_result(&request).await?;
        let statuses = attachment_result(&added.success).statuses(
            &record.nad,
            &record.key.interface.parse().ok()?,
            added.device_info.as_ref(),
        );
        let created = created_links(links_before, &namespace.links, &namespace.host_links);
        let links = attachment_links(&record.key.interface, &statuses, created);
        Some(AttachedRecord { result: added.result, statuses, links, replaced_routes: Vec::new() })
    }

    /// Whether a path is of the namespace of this sandbox, if it still exists. A path with the number of a process is so only
    /// while the sandbox runs: the number may be of another process later.
    async fn is_namespace_of(
        &self,
        uid: &str,
        container: &str,
        netns: &str,
    ) -> Result<bool, AttachmentStepError> {
        if !names_process(netns) {
            return Ok(true);
        }
        let located = self.locator.locate(uid).await.map_err(|error| AttachmentStepError {
            reason: FailureReason::Runtime,
            text: ErrorChain(&error).to_string(),
        })?;
        let network = PodNetwork::Namespace(netns.to_owned());
        Ok(located.is_some_and(|found| found.id == container && found.network == network))
    }

    async fn add(&self, step: &AddStep) -> Result<StepOutcome, AttachmentStepError> {
        let (started, netns) = (Instant::now(), step.sandbox.netns.as_str());
        if !self.is_namespace_of(&step.pod.runtime_uid, &step.sandbox.id, netns).await? {
            let text = format!("the process of the network namespace {netns} has ended");
            return Err(AttachmentStepError { reason: FailureReason::Runtime, text });
        }
        self.refresh_plugin_dirs().await;
        let request = add_request(step);
        // The wait comes before the list of links, so that no link of another program appears in between.
        let permit = match self.executor.admit_add(&request).await {
            Err(ExecError::Stopping) => return Ok(StepOutcome::Skipped),
            permit => permit?,
        };
        let before = match self.namespaces.links(netns).await {
            Err(NamespaceError::Gone { .. }) => return Ok(StepOutcome::Skipped),
            before => before?,
        };
        // A link that was created since the plan was made.
        if before.iter().any(|link| link.name == step.interface.as_str()) {
            return Ok(StepOutcome::Skipped);
        }
        // A result that is found beside the intent later is of this ADD.
        self.executor.forget_result(&request).await;
        let before: Vec<u32> = before.iter().map(|link| link.index).collect();
        let intent = step.intent(before.clone());
        let key = intent.key.clone();
        self.journal.announce(intent.clone()).await?;
        if !step.default_route.is_empty()
            && let Err(error) = self.journal.save_routes(key.clone(), Vec::new()).await
        {
            self.record_nothing_ran(intent).await;
            return Err(error.into());
        }
        let added = match self.executor.add(&request, permit).await {
            Err(ExecError::Stopping) => return Ok(StepOutcome::Skipped),
            Err(error) => {
                if ran_nothing(&error, &request) {
                    self.record_nothing_ran(intent).await;
                }
                return Err(error.into());
            }
            Ok(added) => added,
        };
        let (after, host_links) = self.namespaces.links_with_peers(netns).await?;
        let result = attachment_result(&added.success);
        let statuses = result.statuses(&step.nad, &step.interface, added.device_info.as_ref());
        let links =
            attachment_links(step.interface.as_str(), &statuses, created_links(&before, &after, &host_links));
        if links.is_empty() && !added.success.interfaces.iter().any(|interface| interface.sandbox.is_some()) {
            let text = "the plugin reported success but created no interface in the pod".to_owned();
            return Err(AttachmentStepError { reason: FailureReason::InvalidOutput, text });
        }
        let replaced = self.set_default_routes(step, &key, &links).await?;
        let attached = AttachedRecord { result: added.result, statuses, links, replaced_routes: replaced };
        let record = AttachmentRecord { phase: RecordPhase::Attached(attached), ..intent };
        if let Err(error) = self.journal.update(record).await {
            warn!(error = %error, "an attachment cannot be recorded yet; a restart of the daemon would repeat it");
        }
        info!(
            pod = %format_args!("{}/{}", step.pod.namespace, step.pod.name),
            network = %step.nad,
            interface = %step.interface,
            took_ms = millis(started),
            "attached an interface"
        );
        Ok(StepOutcome::Done)
    }

    /// Nothing of an announced attachment is to be undone.
    async fn record_nothing_ran(&self, intent: AttachmentRecord) {
        let removed = AttachmentRecord { phase: RecordPhase::Removed, ..intent };
        if let Err(error) = self.journal.update(removed).await {
            warn!(error = %error, "a failed attachment cannot be recorded yet");
        }
    }

    /// Deletes default routes over a link.
    async fn filter_routes(
        &self,
        netns: &str,
        index: u32,
        filtered_routes: FilteredRoutes,
    ) -> Result<(), NamespaceError> {
        if filtered_routes == FilteredRoutes::default() {
            return Ok(());
        }
        self.namespaces.remove_default_routes(netns, index, filtered_routes).await
    }

    /// Directs the default routes of the pod through the new interface, or removes the ones over it. Returns those that
    /// were replaced, in the form of the record.
    async fn set_default_routes(
        &self,
        step: &AddStep,
        key: &AttachmentKey,
        links: &[LinkIdentity],
    ) -> Result<Vec<serde_json::Value>, AttachmentStepError> {
        let netns = step.sandbox.netns.as_str();
        let failed = |error: NamespaceError| AttachmentStepError {
            reason: FailureReason::Route,
            text: format!("cannot set the default route: {}", ErrorChain(&error)),
        };
        let Some(index) = own_link(step.interface.as_str(), links) else {
            if step.default_route.is_empty() {
                return Ok(Vec::new());
            }
            let text = "cannot set the default route: the plugin created no interface in the pod".to_owned();
            return Err(AttachmentStepError { reason: FailureReason::Route, text });
        };
        self.filter_routes(netns, index, step.filtered_routes).await.map_err(failed)?;
        if step.default_route.is_empty() {
            return Ok(Vec::new());
        }
        // On disk before they change: after a crash they are restored.
        let present = self.namespaces.default_routes(netns).await.map_err(failed)?;
        let is_replaced = |route: &&DefaultRoute| {
            let requested = step.default_route.iter().any(|gateway| gateway.is_ipv6() == route.ipv6);
            requested && !route.is_advertised() && !route.links.contains(&index)
        };
        let others = present.iter().filter(is_replaced).filter_map(to_value).collect();
        self.journal.save_routes(key.clone(), others).await?;
        let gateways = step.default_route.clone();
        let replaced =
            self.namespaces.replace_default_routes(netns, index, gateways).await.map_err(failed)?;
        Ok(replaced.iter().filter_map(to_value).collect())
    }

    async fn remove(&self, step: &RemoveStep) -> Result<StepOutcome, AttachmentStepError> {
        let (started, record) = (Instant::now(), &step.record);
        if let Some(intent) = step.intent()
            && let Err(error) = self.journal.update(intent).await
        {
            warn!(error = %error, "the start of a DEL cannot be recorded yet");
        }
        let is_same_namespace =
            self.is_namespace_of(&record.pod.runtime_uid, &record.key.container, &record.netns).await?;
        let mode = if is_same_namespace { step.mode } else { DelMode::ReleaseOnly };
        self.delete_moved_links(step).await?;
        let restores = is_same_namespace && record.boot == self.boot;
        // The pod has no default route as long as DEL fails.
        if restores && step.has_lost_links() {
            self.restore_default_routes(record).await?;
        }
        self.refresh_plugin_dirs().await;
        let request = del_request(record, mode)?;
        let deleted = match record.attached() {
            Some(attached) => {
                let result = Some(attached.result.as_str()).filter(|result| !result.is_empty());
                self.executor.del(&request, result, step.errors).await
            }
            None => self.executor.del_unfinished(&request, step.errors).await,
        };
        match deleted {
            Err(ExecError::Stopping) => return Ok(StepOutcome::Skipped),
            deleted => deleted?,
        }
        if is_same_namespace && !step.leftover_links.is_empty() {
            match self.namespaces.delete_links(&record.netns, step.leftover_links.clone()).await {
                Ok(()) | Err(NamespaceError::Gone { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        // The routes over the interface are gone with it. What it replaced stays recorded until this has worked.
        if restores {
            self.restore_default_routes(record).await?;
        }
        if record.origin != Origin::Hotplug {
            self.recorded.delete_result(record).await.map_err(|error| AttachmentStepError {
                reason: FailureReason::Host,
                text: ErrorChain(&error).to_string(),
            })?;
        }
        if let Err(error) = self.journal.update(step.removed_record()).await {
            warn!(error = %error, "the end of an attachment cannot be recorded yet; a restart of the daemon would repeat its DEL");
        }
        info!(
            pod = %format_args!("{}/{}", record.pod.namespace, record.pod.name),
            network = %record.nad,
            interface = record.key.interface,
            purpose = ?step.purpose,
            took_ms = millis(started),
            "detached an interface"
        );
        Ok(StepOutcome::Done)
    }

    /// Deletes the links of an attachment that were moved to another namespace inside the pod, because DEL does not find
    /// them there and releases their addresses.
    async fn delete_moved_links(&self, step: &RemoveStep) -> Result<(), AttachmentStepError> {
        if let Some(name) = &step.moved_links.unreachable {
            let text = format!(
                "interface {name} was moved to another network namespace inside the pod, where it still uses its \
                 addresses; move it back, or delete the pod"
            );
            return Err(AttachmentStepError { reason: FailureReason::Links, text });
        }
        if let Some(name) = &step.moved_links.unidentified {
            let text = format!(
                "interface {name} was renamed before Patchbay saw it: another link has its MAC address and may still use \
                 its addresses; rename that link to {name}, or delete the pod"
            );
            return Err(AttachmentStepError { reason: FailureReason::Links, text });
        }
        Ok(self.namespaces.delete_host_veths(step.moved_links.host_peers.clone()).await?)
    }

    /// Uses the plugin directories that the configuration of Multus names now.
    async fn refresh_plugin_dirs(&self) {
        let multus = self.multus.read().await;
        self.executor.set_plugin_dirs(self.settings.plugin_dirs(&multus.config));
    }

    /// Brings back the default routes that an attachment replaced. Without a namespace there is nothing to restore.
    async fn restore_default_routes(&self, record: &AttachmentRecord) -> Result<(), AttachmentStepError> {
        let routes = match record.attached() {
            Some(attached) => attached.replaced_routes.clone(),
            None => self.journal.saved_routes(&record.key),
        };
        // The record was written by this program. What is not a route cannot be restored.
        let routes: Vec<DefaultRoute> =
            routes.into_iter().filter_map(|route| serde_json::from_value(route).ok()).collect();
        if routes.is_empty() {
            return Ok(());
        }
        let links = record.attached().map_or(&[][..], |attached| &attached.links);
        // No link has the index 0.
        let unplugged = links.iter().find_map(|link| link.index).unwrap_or(0);
        let outcome = match self.namespaces.restore_default_routes(&record.netns, routes, unplugged).await {
            Ok(outcome) => outcome,
            Err(NamespaceError::Gone { .. }) => return Ok(()),
            Err(error) => {
                let text = format!("cannot restore the default route: {}", ErrorChain(&error));
                return Err(AttachmentStepError { reason: FailureReason::Route, text });
            }
        };
        for skipped in outcome.skipped {
            match &skipped.reason {
                SkipReason::OtherDefaultRoute { links }
                    if self.inherit_route(record, links, &skipped.route).await => {}
                reason => warn!(pod = record.pod.name, %reason, "a default route of a pod is not restored"),
            }
        }
        Ok(())
    }

    /// Another attachment of the pod has the default route now: it restores the route when it is removed.
    async fn inherit_route(&self, record: &AttachmentRecord, links: &[u32], route: &DefaultRoute) -> bool {
        for other in self.journal.records_of(&record.pod.runtime_uid) {
            let Some(attached) = other.attached().filter(|_| other.key.container == record.key.container)
            else {
                continue;
            };
            let owns =
                attached.links.iter().any(|link| link.index.is_some_and(|index| links.contains(&index)));
            let Some(value) = to_value(route).filter(|_| owns && other.key != record.key) else { continue };
            let mut attached = attached.clone();
            if !attached.replaced_routes.contains(&value) {
                attached.replaced_routes.push(value);
            }
            let update = AttachmentRecord { phase: RecordPhase::Attached(attached), ..(*other).clone() };
            if let Err(error) = self.journal.update(update).await {
                warn!(error = %error, "a replaced default route cannot be recorded yet");
            }
            return true;
        }
        false
    }
}

/// The links of an attachment: those that ADD created, and that have the requested name or one of the result. If none has, a
/// program in the pod has renamed them: then those with a MAC address of the result.
fn attachment_links(
    interface: &str,
    statuses: &[NetworkStatus],
    created: Vec<LinkIdentity>,
) -> Vec<LinkIdentity> {
    let is_named = |link: &LinkIdentity| {
        link.name == interface || statuses.iter().any(|status| status.interface == link.name)
    };
    let has_mac = |link: &LinkIdentity| {
        let mac = link.mac.as_deref().unwrap_or_default();
        statuses.iter().any(|status| !mac.is_empty() && status.mac.eq_ignore_ascii_case(mac))
    };
    let (named, others): (Vec<_>, Vec<_>) = created.into_iter().partition(is_named);
    if named.is_empty() { others.into_iter().filter(has_mac).collect() } else { named }
}

/// The index of the link that has the requested name, or of the first one.
fn own_link(interface: &str, links: &[LinkIdentity]) -> Option<u32> {
    links.iter().find(|link| link.name == interface).or(links.first())?.index
}

/// Whether no plugin was started before an ADD failed.
fn ran_nothing(error: &ExecError, request: &CniRequest) -> bool {
    let is_first = |plugin: &str| request.config.plugins.first().is_some_and(|first| first.plugin == plugin);
    match error {
        ExecError::Invalid(_) | ExecError::Stopping => true,
        ExecError::PluginMissing { plugin, .. } => is_first(plugin),
        ExecError::Busy { plugin, .. } => {
            let plugins = request.config.plugins.iter();
            is_first(plugin) && plugins.filter(|other| other.plugin == *plugin).count() == 1
        }
        ExecError::Plugin { .. }
        | ExecError::Timeout { .. }
        | ExecError::TooLong { .. }
        | ExecError::Signaled { .. }
        | ExecError::Host { .. } => false,
    }
}

fn add_request(step: &AddStep) -> CniRequest {
    CniRequest {
        config: (*step.config).clone(),
        nad: step.nad.to_string(),
        container_id: step.sandbox.id.clone(),
        netns: Some(step.sandbox.netns.clone()),
        ifname: step.interface.to_string(),
        cni_args: step.cni_args.clone(),
        capability_args: step.capability_args.clone(),
    }
}

fn del_request(record: &AttachmentRecord, mode: DelMode) -> Result<CniRequest, AttachmentStepError> {
    let config =
        NadConfig::parse(Some(&record.config), &record.nad.name).map_err(|error| AttachmentStepError {
            reason: FailureReason::InvalidOutput,
            text: format!("the recorded CNI configuration is invalid: {error}"),
        })?;
    Ok(CniRequest {
        config,
        nad: record.nad.to_string(),
        container_id: record.key.container.clone(),
        netns: match mode {
            DelMode::WithNamespace => Some(record.netns.clone()),
            DelMode::ReleaseOnly => None,
        },
        ifname: record.key.interface.clone(),
        cni_args: record.cni_args.clone(),
        capability_args: record.capability_args.clone(),
    })
}

/// Whether a path of a namespace has the number of a process in it.
pub fn names_process(netns: &str) -> bool {
    Path::new(netns).starts_with("/proc")
}

fn to_value(route: &DefaultRoute) -> Option<serde_json::Value> {
    serde_json::to_value(route).ok()
}

fn millis(started: Instant) -> u64 {
    u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX)
}
