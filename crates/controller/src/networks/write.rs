//! The leader's writes for networks. Each carries the version or the UID of what was read, so that one who led yesterday
//! changes nothing today.

use std::{collections::BTreeSet, sync::Arc};

use api::{
    CONTROLLER_FIELD_MANAGER,
    bridgenetwork::{BridgeNetworkStatus, NAD_NETWORK_LABEL, NAD_ORIGIN_ANNOTATION, NAD_UID_ANNOTATION},
    selection::NadRef,
};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Api, Client,
    api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions},
    runtime::events::{self, Recorder, Reporter},
};
use plan::network::{Attachment, Discard, Event, Relabel, Step, Turn};
use serde_json::{Value, json};
use tracing::{debug, info};

use crate::{
    call::{self, Line},
    cluster::Cluster,
    direct::{Answers, Direct, Question},
    metrics::{Call, Metrics},
    object,
    tenure::Tenure,
};

/// Why something was not written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("ask the API server about network {name}")]
    Ask {
        name: String,
        #[source]
        source: Arc<call::Error>,
    },
    #[error("write network {name}")]
    Network {
        name: String,
        #[source]
        source: call::Error,
    },
    #[error("write attachment {at}")]
    Attachment {
        at: NadRef,
        #[source]
        source: call::Error,
    },
    #[error("remove the address block {name}")]
    Block {
        name: String,
        #[source]
        source: call::Error,
    },
    #[error("write the labels of node {name}")]
    Node {
        name: String,
        #[source]
        source: call::Error,
    },
}

impl Error {
    pub fn is_conflict(&self) -> bool {
        match self {
            Self::Ask { .. } => false,
            Self::Network { source, .. }
            | Self::Attachment { source, .. }
            | Self::Block { source, .. }
            | Self::Node { source, .. } => source.is_conflict(),
        }
    }
}

/// What was written.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The network itself.
    pub network: bool,
    /// Attachments, with the version that each had before.
    pub attachments: Vec<(NadRef, Option<String>)>,
    /// The API server knows something that the cache does not: look again soon.
    pub blocked: bool,
    /// Another writer was quicker with an attachment.
    pub beaten: bool,
    /// Attachments that the API server did not let be written, with its words.
    pub refused: Vec<(NadRef, String)>,
    /// Why the status was not written.
    pub unsaid: Option<String>,
    /// What the API server said instead of an answer.
    pub unanswered: Option<String>,
    /// Attachments that are gone, and nobody had begun to use them.
    pub confirmed: BTreeSet<NadRef>,
}

impl Outcome {
    /// Whether this attachment was written.
    pub fn wrote(&self, at: &NadRef) -> bool {
        self.attachments.iter().any(|(written, _)| written == at)
    }

    /// Whether an attachment was written. One that the API server refuses stands in no other's way; an API server that
    /// does not answer does.
    fn passed(&mut self, at: &NadRef, written: Result<(), Error>) -> Result<bool, Error> {
        match written {
            Ok(()) => Ok(true),
            Err(error) if error.is_conflict() => {
                self.beaten = true;
                Ok(false)
            }
            Err(Error::Attachment { source: call::Error::Refused(kube::Error::Api(status)), .. }) => {
                self.refused.push((at.clone(), status.message.clone()));
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}

pub struct Writer {
    client: Client,
    cluster: Cluster,
    metrics: Arc<Metrics>,
    direct: Direct,
    recorder: Recorder,
    network: Line,
    attachment: Line,
    node: Line,
    block: Line,
    event: Line,
}

impl Writer {
    pub fn new(client: Client, cluster: Cluster, metrics: Arc<Metrics>, tenure: Tenure) -> Self {
        let line = |call| Line::of_leader(metrics.clone(), call, tenure.clone());
        let reporter = Reporter { controller: CONTROLLER_FIELD_MANAGER.to_owned(), instance: None };
        Self {
            direct: Direct::new(client.clone(), metrics.clone()),
            recorder: Recorder::new(client.clone(), reporter),
            network: line(Call::Network),
            attachment: line(Call::Attachment),
            node: line(Call::Node),
            block: line(Call::Block),
            event: line(Call::Event),
            client,
            cluster,
            metrics,
        }
    }

    /// Asks the API server itself what these turns, and what is done about orphans, must not be decided without. What makes
    /// them due has to hold before this is called.
    pub async fn ask(&self, turns: &[Turn], orphans: &[(NadRef, Attachment)]) -> Answers {
        let mut question = Question::default();
        for turn in turns {
            turn.steps.iter().for_each(|step| put(&mut question, &turn.uid, step));
        }
        for (at, one) in orphans {
            question.attachments.insert(at.clone());
            question.lost.extend(one.network_uid.clone());
        }
        self.direct.ask(question, |name| self.cluster.world().nodes.contains_key(name)).await
    }

    /// Does what a turn asks for, as far as the API server agrees.
    pub async fn turn(&self, turn: &Turn, answers: &Answers) -> Result<Outcome, Error> {
        let mut outcome = Outcome::default();
        for step in &turn.steps {
            match self.step(turn, step, answers, &mut outcome).await {
                // It is asked again, and told.
                Err(Error::Ask { source, .. }) => {
                    outcome.unanswered = Some(api::ErrorChain(&*source).to_string());
                    break;
                }
                done => done?,
            }
        }
        // It is made anew once the refusals are known; until then it would say that all is well.
        let whole = !outcome.network && !outcome.beaten && outcome.refused.is_empty();
        if let Some(status) = turn.status.as_deref().filter(|_| whole) {
            match self.status(turn, status).await {
                Ok(()) => outcome.network = true,
                Err(error) if error.is_conflict() => outcome.beaten = true,
                // Nothing that is done waits for what is said.
                Err(error) => outcome.unsaid = Some(api::ErrorChain(&error).to_string()),
            }
        }
        // What was not written is planned again, and told then.
        let done = |event: &&Event| match &event.about {
            Some(at) => outcome.wrote(at),
            None => outcome.network,
        };
        for event in turn.events.iter().filter(done) {
            self.tell(turn, event).await;
        }
        Ok(outcome)
    }

    async fn step(
        &self,
        turn: &Turn,
        step: &Step,
        answers: &Answers,
        outcome: &mut Outcome,
    ) -> Result<(), Error> {
        match step {
            Step::Finalizers(finalizers) => self.finalizers(turn, finalizers, outcome).await,
            Step::Create { at, config, repair } => {
                let created = self.create(turn, at, config).await;
                if !outcome.passed(at, created)? {
                    return Ok(());
                }
                outcome.attachments.push((at.clone(), None));
                self.count(*repair);
                info!(network = turn.name, attachment = %at, repair, "made an attachment");
                Ok(())
            }
            Step::Apply { at, uid, version, config, repair } => {
                let applied = self.apply(turn, at, uid, config).await;
                if !outcome.passed(at, applied)? {
                    return Ok(());
                }
                outcome.attachments.push((at.clone(), Some(version.clone())));
                self.count(*repair);
                info!(network = turn.name, attachment = %at, repair, "put an attachment right");
                Ok(())
            }
            Step::Delete(attachments) => self.delete(turn, attachments, answers, outcome).await,
            Step::Confirm(attachments) => {
                if unused(turn, attachments, answers, outcome) {
                    outcome.confirmed.extend(attachments.iter().cloned());
                }
                Ok(())
            }
            Step::Release { attachments, finalizers } => {
                let left = answers.is_left(&turn.uid).map_err(|source| ask(turn, source))?;
                if left || used(turn, attachments, answers)? {
                    outcome.blocked = true;
                    return Ok(());
                }
                self.finalizers(turn, finalizers, outcome).await?;
                info!(network = turn.name, "nobody uses the network, the nodes may undo it");
                Ok(())
            }
            Step::Finish { finalizers } => {
                if let Some(node) = answers.node(&turn.uid).map_err(|source| ask(turn, source))? {
                    debug!(network = turn.name, node, "a node has just listed the network");
                    outcome.blocked = true;
                    return Ok(());
                }
                self.finalizers(turn, finalizers, outcome).await?;
                info!(network = turn.name, "the network is gone");
                Ok(())
            }
        }
    }

    async fn finalizers(
        &self,
        turn: &Turn,
        finalizers: &[String],
        outcome: &mut Outcome,
    ) -> Result<(), Error> {
        let patch = json!({"metadata": {
            "uid": turn.uid, "resourceVersion": turn.version, "finalizers": finalizers,
        }});
        let params = PatchParams {
            field_manager: Some(CONTROLLER_FIELD_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let api = self.networks();
        let patched = self.network.change(api.patch(&turn.name, &params, &Patch::Merge(&patch))).await;
        patched.map_err(|source| Error::Network { name: turn.name.clone(), source })?;
        outcome.network = true;
        Ok(())
    }

    async fn delete(
        &self,
        turn: &Turn,
        attachments: &[(NadRef, Attachment)],
        answers: &Answers,
        outcome: &mut Outcome,
    ) -> Result<(), Error> {
        let names: BTreeSet<NadRef> = attachments.iter().map(|(at, _)| at.clone()).collect();
        if !unused(turn, &names, answers, outcome) {
            return Ok(());
        }
        for (at, one) in attachments {
            let removed = self.remove(at, one).await;
            if !outcome.passed(at, removed)? {
                continue;
            }
            outcome.attachments.push((at.clone(), Some(one.version.clone())));
            info!(network = turn.name, attachment = %at, "removed an attachment");
        }
        Ok(())
    }

    async fn remove(&self, at: &NadRef, one: &Attachment) -> Result<(), Error> {
        let only = Preconditions { uid: Some(one.uid.clone()), resource_version: Some(one.version.clone()) };
        let params = DeleteParams::default().preconditions(only);
        let api = self.attachments(&at.namespace);
        let deleted = self.attachment.change(api.delete(&at.name, &params)).await;
        deleted.map(drop).map_err(|source| Error::Attachment { at: at.clone(), source })
    }

    /// Removes what a network left that is no more, if that is so and nobody names it.
    pub async fn sweep(&self, at: &NadRef, one: &Attachment, answers: &Answers) -> Result<(), Error> {
        let turn = Turn { name: one.network.clone().unwrap_or_default(), ..Turn::default() };
        let uid = one.network_uid.as_deref().unwrap_or_default();
        let lives = answers.lives(uid).map_err(|source| ask(&turn, source))?;
        if lives || used(&turn, &BTreeSet::from([at.clone()]), answers)? {
            return Ok(());
        }
        self.remove(at, one).await?;
        let note = format!("NetworkAttachmentDefinition {at} was removed: its BridgeNetwork is no more");
        let event = Event { about: None, warning: false, reason: "AttachmentRemoved", note };
        self.tell(&Turn { uid: uid.to_owned(), ..turn }, &event).await;
        info!(attachment = %at, "removed an attachment whose network is no more");
        Ok(())
    }

    /// Removes an address block, if it still is as it was seen and its network and its node are still gone, as the API
    /// server itself says.
    pub async fn discard(&self, one: &Discard) -> Result<(), Error> {
        let failed = |source| Error::Block { name: one.name.clone(), source };
        let holds = match &one.node {
            Some(node) => self.direct.has_node(node, &one.holder).await,
            None => self.direct.is_joined(&one.network).await,
        };
        if holds.map_err(failed)? {
            return Ok(());
        }
        let only = Preconditions { uid: Some(one.uid.clone()), resource_version: Some(one.version.clone()) };
        let params = DeleteParams::default().preconditions(only);
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &object::blocks());
        let deleted = self.block.change(api.delete(&one.name, &params)).await;
        deleted.map_err(|source| Error::Block { name: one.name.clone(), source })?;
        info!(block = one.name, node = one.node, "removed an address block that nobody holds");
        Ok(())
    }

    async fn create(&self, turn: &Turn, at: &NadRef, config: &str) -> Result<(), Error> {
        let object =
            serde_json::from_value(attachment(turn, at, config, None)).map_err(kube::Error::SerdeError);
        let params =
            PostParams { field_manager: Some(CONTROLLER_FIELD_MANAGER.to_owned()), ..PostParams::default() };
        let api = self.attachments(&at.namespace);
        let create = async { api.create(&params, &object?).await };
        let created = self.attachment.create(create).await;
        created.map(drop).map_err(|source| Error::Attachment { at: at.clone(), source })
    }

    /// With the UID, an apply changes this object and no other, and makes none.
    async fn apply(&self, turn: &Turn, at: &NadRef, uid: &str, config: &str) -> Result<(), Error> {
        let object = attachment(turn, at, config, Some(uid));
        let params = PatchParams::apply(CONTROLLER_FIELD_MANAGER).force();
        let api = self.attachments(&at.namespace);
        let applied = self.attachment.change(api.patch(&at.name, &params, &Patch::Apply(&object))).await;
        applied.map(drop).map_err(|source| Error::Attachment { at: at.clone(), source })
    }

    /// Puts this in place of the whole status that was read. An apply could not take away what others have added, and is
    /// refused where anything in the spec has another type than the schema says.
    async fn status(&self, turn: &Turn, status: &BridgeNetworkStatus) -> Result<(), Error> {
        let patch = json!([
            {"op": "replace", "path": "/metadata/resourceVersion", "value": turn.version},
            {"op": "add", "path": "/status", "value": status},
        ]);
        let patch = serde_json::from_value(patch).map_err(kube::Error::SerdeError);
        let params = PatchParams {
            field_manager: Some(CONTROLLER_FIELD_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let api = self.networks();
        let write = async { api.patch_status(&turn.name, &params, &Patch::Json::<()>(patch?)).await };
        let patched = self.network.change(write).await;
        patched.map(drop).map_err(|source| Error::Network { name: turn.name.clone(), source })
    }

    /// The UID keeps it from a Node that was made anew under the same name.
    pub async fn relabel(&self, relabel: &Relabel) -> Result<(), Error> {
        let patch = json!({"metadata": {"uid": relabel.uid, "labels": relabel.labels}});
        let params = PatchParams {
            field_manager: Some(CONTROLLER_FIELD_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &object::nodes());
        let patched = self.node.change(api.patch(&relabel.node, &params, &Patch::Merge(&patch))).await;
        patched.map_err(|source| Error::Node { name: relabel.node.clone(), source })?;
        info!(node = relabel.node, labels = ?relabel.labels, "labelled a node");
        Ok(())
    }

    /// An event that is lost is lost: the condition says the same.
    async fn tell(&self, turn: &Turn, event: &Event) {
        let resource = object::networks();
        let regarding = ObjectReference {
            api_version: Some(resource.api_version),
            kind: Some(resource.kind),
            name: Some(turn.name.clone()),
            uid: Some(turn.uid.clone()),
            ..ObjectReference::default()
        };
        let event = events::Event {
            type_: if event.warning { events::EventType::Warning } else { events::EventType::Normal },
            reason: event.reason.to_owned(),
            note: Some(event.note.clone()),
            action: "Keep".to_owned(),
            secondary: None,
        };
        if let Err(error) = self.event.create(self.recorder.publish(&event, &regarding)).await {
            debug!(network = turn.name, error = %api::ErrorChain(&error), "an event was lost");
        }
    }

    fn count(&self, repair: bool) {
        if repair {
            self.metrics.attachment_repaired();
        }
    }

    fn networks(&self) -> Api<DynamicObject> {
        Api::all_with(self.client.clone(), &object::networks())
    }

    fn attachments(&self, namespace: &str) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), namespace, &object::attachments())
    }
}

fn ask(turn: &Turn, source: Arc<call::Error>) -> Error {
    Error::Ask { name: turn.name.clone(), source }
}

/// Adds what has to be known before a step is done.
fn put(question: &mut Question, uid: &str, step: &Step) {
    match step {
        Step::Delete(all) => question.attachments.extend(all.iter().map(|(at, _)| at.clone())),
        Step::Confirm(all) => question.attachments.extend(all.iter().cloned()),
        Step::Release { attachments, .. } => {
            question.emptied.insert(uid.to_owned());
            question.attachments.extend(attachments.iter().cloned());
        }
        Step::Finish { .. } => _ = question.undone.insert(uid.to_owned()),
        Step::Finalizers(_) | Step::Create { .. } | Step::Apply { .. } => {}
    }
}

/// Whether nobody uses any of these; that nobody can say stands in the way of these alone.
fn unused(turn: &Turn, attachments: &BTreeSet<NadRef>, answers: &Answers, outcome: &mut Outcome) -> bool {
    match used(turn, attachments, answers) {
        Ok(used) => {
            outcome.blocked |= used;
            !used
        }
        Err(error) => {
            let why = api::ErrorChain(&error).to_string();
            outcome.refused.extend(attachments.iter().map(|at| (at.clone(), why.clone())));
            false
        }
    }
}

fn used(turn: &Turn, attachments: &BTreeSet<NadRef>, answers: &Answers) -> Result<bool, Error> {
    let user = answers.user(attachments).map_err(|source| ask(turn, source))?;
    if let Some(user) = user {
        debug!(network = turn.name, user, "somebody has just begun to use the network");
    }
    Ok(user.is_some())
}

fn attachment(turn: &Turn, at: &NadRef, config: &str, uid: Option<&str>) -> Value {
    let resource = object::attachments();
    let mut object = json!({
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {
            "name": at.name,
            "namespace": at.namespace,
            "labels": {NAD_NETWORK_LABEL: turn.name},
            "annotations": {
                NAD_UID_ANNOTATION: turn.uid,
                NAD_ORIGIN_ANNOTATION: api::nad::origin_digest(&turn.uid, at),
            },
        },
        "spec": {"config": config},
    });
    if let Some(uid) = uid {
        object["metadata"]["uid"] = json!(uid);
    }
    object
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    fn answer(reason: &str, code: u16) -> Error {
        let error = kube::Error::Api(Box::new(Status::failure("quota", reason).with_code(code)));
        let source = if code == 409 { call::Error::Conflict(error) } else { call::Error::Refused(error) };
        Error::Attachment { at: NadRef::new("ns", "blue"), source }
    }

    #[test]
    fn a_refusal_is_kept_a_lost_race_is_noted_and_silence_ends_the_turn() {
        let at = NadRef::new("ns", "blue");
        let mut outcome = Outcome::default();
        assert!(outcome.passed(&at, Ok(())).unwrap());
        assert!(!outcome.passed(&at, Err(answer("Forbidden", 403))).unwrap());
        assert_eq!(outcome.refused, [(at.clone(), "quota".to_owned())]);
        assert!(!outcome.beaten && !outcome.passed(&at, Err(answer("Conflict", 409))).unwrap());
        assert!(outcome.beaten);
        let silence = Error::Attachment { at: at.clone(), source: call::Error::Over };
        assert!(outcome.passed(&at, Err(silence)).is_err());
    }
}
