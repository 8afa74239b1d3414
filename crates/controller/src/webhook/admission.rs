//! The admission webhook: validation that needs other objects, and mutation.
//!
//! A validation is a plain function of the object and the caches, so that the webhook and the reconcilers agree. A new
//! path is one more variant of [`WebhookPath`] and its [`Handler`].

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use api::{
    ErrorChain,
    names::{MUTATE_POD, VALIDATE_BRIDGENETWORKS, VALIDATE_CLAIMS, VALIDATE_NODENETWORKS, VALIDATE_USERS},
};
use axum::{
    Json, Router,
    body::Bytes,
    extract::{ConnectInfo, DefaultBodyLimit, FromRequest, Request, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::post,
};
use futures::future::BoxFuture;
use json_patch::Patch;
use k8s_openapi::ByteString;
use plan::users::WorkloadKind;
use prometheus_client::encoding::EncodeLabelValue;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::time::timeout;
use tracing::debug;

use super::{
    server::WebhookState,
    slots::{Slot, Source},
};
use crate::{
    cache::{CacheSource, project},
    metrics::AdmissionOutcome,
};

mod claim_reference;
mod mutate_pod;
mod network;
#[cfg(test)]
mod tests;
mod user;

/// An object is at most 1.5 MiB in etcd, and an update carries two.
const MAX_BODY_BYTES: usize = 3 * 1024 * 1024;

/// How many bodies are read and validated at a time; further requests wait.
pub const MAX_CONCURRENT_BODIES: usize = 16;

/// How long a client may take for its body while another source waits that reads fewer. The body of an API server follows
/// its headers at once.
pub const BODY_GRACE: Duration = Duration::from_millis(50);

/// How many of these may read from the API server at a time, and how many may wait for that. The others are answered
/// meanwhile.
pub const MAX_LIVE_REVIEWS: usize = 8;
pub const MAX_WAITING_REVIEWS: usize = 4;

/// How long a read is safe from other sources that read less. Most reads are over by then.
pub const LIVE_READ_GRACE: Duration = Duration::from_millis(50);

/// How long a request waits for a slot before the API server is asked to retry.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(2);

/// API servers stop waiting after at most five seconds (`timeoutSeconds`).
const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// How many characters of a request's text are repeated in messages.
const MAX_ECHO_CHARS: usize = 64;

const REVIEW_VERSION: &str = "admission.k8s.io/v1";

/// What the decisions read. A replica is ready once these have been listed.
pub const SOURCES: [CacheSource; 13] = [
    CacheSource::Claims,
    CacheSource::Networks,
    CacheSource::Nodes,
    CacheSource::Nads,
    CacheSource::Users(WorkloadKind::CronJob),
    CacheSource::Users(WorkloadKind::DaemonSet),
    CacheSource::Users(WorkloadKind::Deployment),
    CacheSource::Users(WorkloadKind::Job),
    CacheSource::Users(WorkloadKind::Pod),
    CacheSource::Users(WorkloadKind::ReplicaSet),
    CacheSource::Users(WorkloadKind::StatefulSet),
    CacheSource::Users(WorkloadKind::VirtualMachine),
    CacheSource::Users(WorkloadKind::VirtualMachineInstance),
];

/// The fields of an AdmissionReview that the webhook reads.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ReviewBody {
    api_version: String,
    request: Option<ReviewedRequest>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ReviewedRequest {
    uid: String,
    resource: ReviewedResource,
    #[serde(default)]
    name: String,
    operation: ReviewedOperation,
    #[serde(default)]
    namespace: String,
    user_info: ReviewedUser,
    object: Option<Map<String, Value>>,
    old_object: Option<Map<String, Value>>,
}

#[derive(Debug, Deserialize)]
struct ReviewedResource {
    group: String,
    resource: String,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
enum ReviewedOperation {
    Create,
    Update,
    Delete,
    Connect,
}

#[derive(Debug, Deserialize)]
struct ReviewedUser {
    #[serde(default)]
    username: String,
}

/// A path of the webhook. Variant names are label values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum WebhookPath {
    ValidateNodeNetworks,
    ValidateBridgeNetworks,
    ValidateUsers,
    ValidateClaims,
    MutatePod,
}

/// The result of a validation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdmissionDecision {
    Allow,
    /// Denied, with a message that says what to do next.
    Deny(String),
}

/// The result of a mutation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MutationDecision {
    /// Allowed with these changes to the object of the request, or unchanged if there are none.
    Patch(Patch),
    /// Denied because the object is invalid, with a message that says what to do next.
    Invalid(String),
}

/// What a path does with a request. API servers reject a patch from a validating webhook, so only a mutation returns one.
#[derive(Clone, Copy)]
enum Handler {
    Validate(fn(&WebhookState, &ReviewedRequest) -> AdmissionDecision),
    /// May read what the cache does not have.
    Mutate(
        for<'a> fn(
            &'a WebhookState,
            &'a ReviewedRequest,
            &'a Source,
        ) -> BoxFuture<'a, Result<MutationDecision, RequestError>>,
    ),
}

/// The answer to a request. A patch in it is not empty.
#[derive(Debug)]
enum AdmissionAnswer {
    Allowed,
    AllowedWithPatch(Patch),
    Denied(String),
    Invalid(String),
}

/// Why a request cannot be validated.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum RequestError {
    #[error("the body is not an AdmissionReview: {0}")]
    InvalidBody(String),
    #[error("the AdmissionReview has no request")]
    NoRequest,
    #[error("AdmissionReview version {0:?} is not supported; use admission.k8s.io/v1")]
    UnsupportedVersion(String),
    #[error("this path validates {expected}, not {actual}; fix the webhook configuration")]
    WrongResource { expected: String, actual: String },
    #[error("too many concurrent requests; retry")]
    Busy,
    #[error("too many concurrent requests need objects that the controller does not know yet; retry")]
    BusyReading,
    #[error("the body did not arrive in time")]
    BodyTimeout,
    #[error("the body was rejected: {0}")]
    BodyRejected(StatusCode, String),
    #[error("the caches are not synced; retry")]
    NotSynced,
    #[error("{0}")]
    ReadFailed(String),
}

impl WebhookPath {
    const ALL: [Self; 5] = [
        Self::ValidateNodeNetworks,
        Self::ValidateBridgeNetworks,
        Self::ValidateUsers,
        Self::ValidateClaims,
        Self::MutatePod,
    ];

    fn route(self) -> &'static str {
        match self {
            Self::ValidateNodeNetworks => VALIDATE_NODENETWORKS,
            Self::ValidateBridgeNetworks => VALIDATE_BRIDGENETWORKS,
            Self::ValidateUsers => VALIDATE_USERS,
            Self::ValidateClaims => VALIDATE_CLAIMS,
            Self::MutatePod => MUTATE_POD,
        }
    }

    fn handler(self) -> Handler {
        match self {
            Self::ValidateNodeNetworks => Handler::Validate(validate_node_networks),
            Self::ValidateBridgeNetworks => Handler::Validate(validate_bridge_networks),
            Self::ValidateUsers => Handler::Validate(validate_users),
            Self::ValidateClaims => Handler::Validate(claim_reference::validate),
            Self::MutatePod => Handler::Mutate(mutate_pod::mutate),
        }
    }

    /// The resources that this path validates, for messages.
    fn validates(self) -> &'static str {
        match self {
            Self::ValidateNodeNetworks => "nodenetworks.patchbay.dev",
            Self::ValidateBridgeNetworks => "bridgenetworks.patchbay.dev",
            Self::ValidateUsers => "pods, workloads and virtual machines",
            Self::ValidateClaims | Self::MutatePod => "pods",
        }
    }

    fn accepts(self, resource: &ReviewedResource) -> bool {
        match self {
            Self::ValidateNodeNetworks => resource.is(api::GROUP, "nodenetworks"),
            Self::ValidateBridgeNetworks => resource.is(api::GROUP, "bridgenetworks"),
            Self::ValidateUsers => resource.kind().is_some(),
            Self::ValidateClaims | Self::MutatePod => resource.is("", "pods"),
        }
    }
}

/// All admission paths.
pub fn router() -> Router<Arc<WebhookState>> {
    routes(WebhookPath::handler)
}

fn routes(handler_of: fn(WebhookPath) -> Handler) -> Router<Arc<WebhookState>> {
    let router = WebhookPath::ALL.into_iter().fold(Router::new(), |router, path| {
        let handler = handler_of(path);
        router.route(path.route(), post(move |State(state), request| admit(path, handler, state, request)))
    });
    router.layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
}

async fn admit(path: WebhookPath, handler: Handler, state: Arc<WebhookState>, request: Request) -> Response {
    let started = Instant::now();
    let reviewed = review(path, handler, &state, request).await;
    state.metrics.admission_took(path, started.elapsed());
    match reviewed {
        Ok((uid, answer)) => {
            state.metrics.admission(path, answer.outcome());
            Json(response(&uid, &answer)).into_response()
        }
        Err(error) => {
            state.metrics.admission(path, error.outcome());
            debug!(?path, error = %ErrorChain(&error), "could not validate an admission request");
            (error.status(), error.to_string()).into_response()
        }
    }
}

/// Returns the UID of the request and the answer to it.
async fn review(
    path: WebhookPath,
    handler: Handler,
    state: &WebhookState,
    request: Request,
) -> Result<(String, AdmissionAnswer), RequestError> {
    let source = source(&request);
    let connection = request.extensions().get::<Arc<Slot>>().cloned();
    let slot = timeout(QUEUE_TIMEOUT, state.bodies.take(source.clone())).await;
    let slot = slot.map_err(|_| RequestError::Busy)?;
    let body = timeout(BODY_TIMEOUT, Bytes::from_request(request, &()));
    let Some(Ok(body)) = slot.lost().run_until_cancelled(body).await else {
        return Err(RequestError::BodyTimeout);
    };
    if !slot.settle() {
        return Err(RequestError::Busy);
    }
    // A connection whose client waits for an answer is not given to another one.
    let _connection = connection.as_ref().and_then(Slot::settle_for);
    let body = body.map_err(|error| RequestError::BodyRejected(error.status(), error.body_text()))?;
    let request = parse(path, &body)?;
    if !state.readiness.is_synced() {
        return Err(RequestError::NotSynced);
    }
    let answer = handler.answer(state, &request, &source).await?;
    if let AdmissionAnswer::Denied(_) | AdmissionAnswer::Invalid(_) = answer {
        debug!(
            ?path,
            name = truncate(request.name()),
            user = truncate(&request.user_info.username),
            "denied"
        );
    }
    Ok((request.uid, answer))
}

/// The source of a request. The listener knows it of every request.
fn source(request: &Request) -> Source {
    let client = request.extensions().get::<ConnectInfo<SocketAddr>>();
    Source::new(client.map_or(Ipv4Addr::UNSPECIFIED.into(), |ConnectInfo(client)| client.ip()))
}

fn parse(path: WebhookPath, body: &[u8]) -> Result<ReviewedRequest, RequestError> {
    let review: ReviewBody = serde_json::from_slice(body)
        .map_err(|error| RequestError::InvalidBody(truncate(&error.to_string())))?;
    if review.api_version != REVIEW_VERSION {
        return Err(RequestError::UnsupportedVersion(truncate(&review.api_version)));
    }
    let request = review.request.ok_or(RequestError::NoRequest)?;
    if request.uid.chars().count() > MAX_ECHO_CHARS {
        return Err(RequestError::InvalidBody("the uid is too long".to_owned()));
    }
    if !path.accepts(&request.resource) {
        let ReviewedResource { group, resource } = &request.resource;
        let actual = truncate(&format!("{resource}.{group}"));
        return Err(RequestError::WrongResource { expected: path.validates().to_owned(), actual });
    }
    Ok(request)
}

fn validate_node_networks(state: &WebhookState, request: &ReviewedRequest) -> AdmissionDecision {
    match request.operation {
        ReviewedOperation::Create => {
            validate_node_network(request.name(), state.cluster.snapshot().nodes.contains_key(request.name()))
        }
        ReviewedOperation::Update | ReviewedOperation::Delete | ReviewedOperation::Connect => {
            AdmissionDecision::Allow
        }
    }
}

fn validate_bridge_networks(state: &WebhookState, request: &ReviewedRequest) -> AdmissionDecision {
    if !request.operation.sets_object() {
        return AdmissionDecision::Allow;
    }
    network::validate(
        &state.cluster.snapshot(),
        state.cluster.users(),
        request.name(),
        request.object.as_ref(),
        request.old_object.as_ref(),
    )
}

fn validate_users(state: &WebhookState, request: &ReviewedRequest) -> AdmissionDecision {
    let Some(kind) = request.resource.kind().filter(|_| request.operation.sets_object()) else {
        return AdmissionDecision::Allow;
    };
    let refs =
        |object: &Option<Map<String, Value>>| user::workload_refs(kind, &request.namespace, object.as_ref());
    let new = refs(&request.object);
    let added = user::added_references(&new, &refs(&request.old_object));
    user::validate(&state.cluster.snapshot(), state.cluster.users(), kind, &new, &added)
}

/// kube's `AdmissionResponse` is not used: it encodes a patch as a list of numbers, not in base64.
fn response(uid: &str, answer: &AdmissionAnswer) -> Value {
    let response = match answer {
        AdmissionAnswer::Allowed => json!({"uid": uid, "allowed": true}),
        AdmissionAnswer::AllowedWithPatch(patch) => {
            let patch = ByteString(json!(patch).to_string().into_bytes());
            json!({"uid": uid, "allowed": true, "patchType": "JSONPatch", "patch": patch})
        }
        AdmissionAnswer::Denied(message) => {
            let status =
                json!({"code": StatusCode::FORBIDDEN.as_u16(), "reason": "Forbidden", "message": message});
            json!({"uid": uid, "allowed": false, "status": status})
        }
        AdmissionAnswer::Invalid(message) => {
            let status =
                json!({"code": StatusCode::BAD_REQUEST.as_u16(), "reason": "BadRequest", "message": message});
            json!({"uid": uid, "allowed": false, "status": status})
        }
    };
    json!({"apiVersion": REVIEW_VERSION, "kind": "AdmissionReview", "response": response})
}

/// Shortens text that comes from a request.
fn truncate(text: &str) -> String {
    match text.char_indices().nth(MAX_ECHO_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

impl ReviewedResource {
    fn is(&self, group: &str, resource: &str) -> bool {
        self.group == group && self.resource == resource
    }

    /// The workload kind of this resource.
    fn kind(&self) -> Option<WorkloadKind> {
        WorkloadKind::ALL.into_iter().find(|kind| self.is(kind.group(), &project::workloads(*kind).plural))
    }
}

impl ReviewedOperation {
    /// Whether the request has a new object.
    fn sets_object(self) -> bool {
        match self {
            Self::Create | Self::Update => true,
            Self::Delete | Self::Connect => false,
        }
    }
}

impl ReviewedRequest {
    /// A generated name is in the object only.
    fn name(&self) -> &str {
        let named = self.object.as_ref().and_then(|object| object.get("metadata")?.get("name")?.as_str());
        named.unwrap_or(&self.name)
    }
}

/// Whether a NodeNetwork of this name may be created.
pub fn validate_node_network(name: &str, node_exists: bool) -> AdmissionDecision {
    if node_exists {
        return AdmissionDecision::Allow;
    }
    AdmissionDecision::Deny(format!(
        "Node {:?} does not exist; the Patchbay daemon creates the NodeNetwork of its Node. \
         Do not create it yourself; if the Node has just joined, retry",
        truncate(name)
    ))
}

impl Handler {
    async fn answer(
        self,
        state: &WebhookState,
        request: &ReviewedRequest,
        source: &Source,
    ) -> Result<AdmissionAnswer, RequestError> {
        Ok(match self {
            Self::Validate(validate) => match validate(state, request) {
                AdmissionDecision::Allow => AdmissionAnswer::Allowed,
                AdmissionDecision::Deny(message) => AdmissionAnswer::Denied(message),
            },
            Self::Mutate(mutate) => match mutate(state, request, source).await? {
                MutationDecision::Patch(patch) if patch.is_empty() => AdmissionAnswer::Allowed,
                MutationDecision::Patch(patch) => AdmissionAnswer::AllowedWithPatch(patch),
                MutationDecision::Invalid(message) => AdmissionAnswer::Invalid(message),
            },
        })
    }
}

impl AdmissionAnswer {
    fn outcome(&self) -> AdmissionOutcome {
        match self {
            Self::Allowed | Self::AllowedWithPatch(_) => AdmissionOutcome::Allowed,
            Self::Denied(_) | Self::Invalid(_) => AdmissionOutcome::Denied,
        }
    }
}

impl RequestError {
    fn status(&self) -> StatusCode {
        match self {
            Self::InvalidBody(_)
            | Self::NoRequest
            | Self::UnsupportedVersion(_)
            | Self::WrongResource { .. } => StatusCode::BAD_REQUEST,
            Self::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::BodyRejected(status, _) => *status,
            Self::Busy | Self::BusyReading | Self::NotSynced => StatusCode::SERVICE_UNAVAILABLE,
            Self::ReadFailed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    fn outcome(&self) -> AdmissionOutcome {
        match self {
            Self::Busy | Self::BusyReading | Self::NotSynced | Self::ReadFailed(_) => {
                AdmissionOutcome::Unavailable
            }
            Self::InvalidBody(_)
            | Self::NoRequest
            | Self::UnsupportedVersion(_)
            | Self::WrongResource { .. }
            | Self::BodyTimeout
            | Self::BodyRejected(..) => AdmissionOutcome::Malformed,
        }
    }
}
