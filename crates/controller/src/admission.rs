//! Admission: what cannot be seen in one object alone.
//!
//! A check is a plain function of the object and what the caches show, so that webhook and reconcilers judge alike. A
//! new path is one more variant of [`Path`] and its arm in [`judge`].

use std::{sync::Arc, time::Duration};

use api::{
    ErrorChain,
    names::{VALIDATE_BRIDGENETWORKS, VALIDATE_NODENETWORKS, VALIDATE_USERS},
};
use axum::{
    Json, Router,
    body::Bytes,
    extract::{DefaultBodyLimit, FromRequest, Request, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::post,
};
use plan::users::Kind;
use prometheus_client::encoding::EncodeLabelValue;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::time::timeout;
use tracing::debug;

use crate::{http::Replica, metrics::Outcome, object};

mod network;
#[cfg(test)]
mod tests;
mod user;

/// An object is at most 1.5 MiB in etcd, and an update carries two.
const LARGEST_BODY: usize = 3 * 1024 * 1024;

/// So many bodies are read and judged at a time; the others wait.
pub const MOST_BODIES: usize = 16;

/// How long a request waits for its turn before the API server is told to try elsewhere.
const LONGEST_QUEUE: Duration = Duration::from_secs(2);

/// API servers give up on us after five seconds.
const SLOWEST_BODY: Duration = Duration::from_secs(5);

/// What a request says is repeated up to so many characters.
const LONGEST_ECHO: usize = 64;

const REVIEW_VERSION: &str = "admission.k8s.io/v1";

/// An AdmissionReview, as far as anything here reads it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Review {
    api_version: String,
    request: Option<Asked>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Asked {
    uid: String,
    resource: Resource,
    #[serde(default)]
    name: String,
    operation: Operation,
    #[serde(default)]
    namespace: String,
    user_info: User,
    object: Option<Map<String, Value>>,
    old_object: Option<Map<String, Value>>,
}

#[derive(Debug, Deserialize)]
struct Resource {
    group: String,
    resource: String,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
enum Operation {
    Create,
    Update,
    Delete,
    Connect,
}

#[derive(Debug, Deserialize)]
struct User {
    #[serde(default)]
    username: String,
}

/// What the API server asks about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[expect(clippy::enum_variant_names, reason = "a path that changes objects would begin otherwise")]
pub enum Path {
    ValidateNodeNetworks,
    ValidateBridgeNetworks,
    ValidateUsers,
}

/// What a check says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Allow,
    /// Refused, with a sentence that says what to do.
    Deny(String),
}

/// Why a request gets no verdict.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Unanswerable {
    #[error("the body is not an AdmissionReview: {0}")]
    Body(String),
    #[error("the AdmissionReview has no request")]
    NoRequest,
    #[error("the AdmissionReview is of {0:?}, and only admission.k8s.io/v1 is understood")]
    Version(String),
    #[error("this path is about {expected} and was asked about {asked}: mend the webhook configuration")]
    Resource { expected: String, asked: String },
    #[error("too many requests at a time: try again")]
    Busy,
    #[error("the body did not arrive in time")]
    Slow,
    #[error("the body was refused: {0}")]
    Refused(StatusCode, String),
    #[error("the caches are not filled yet: try again")]
    NotSynced,
}

impl Path {
    const ALL: [Self; 3] = [Self::ValidateNodeNetworks, Self::ValidateBridgeNetworks, Self::ValidateUsers];

    fn route(self) -> &'static str {
        match self {
            Self::ValidateNodeNetworks => VALIDATE_NODENETWORKS,
            Self::ValidateBridgeNetworks => VALIDATE_BRIDGENETWORKS,
            Self::ValidateUsers => VALIDATE_USERS,
        }
    }

    /// What this path is about.
    fn about(self) -> &'static str {
        match self {
            Self::ValidateNodeNetworks => "nodenetworks.patchbay.dev",
            Self::ValidateBridgeNetworks => "bridgenetworks.patchbay.dev",
            Self::ValidateUsers => "pods, workloads and virtual machines",
        }
    }

    fn is_about(self, resource: &Resource) -> bool {
        match self {
            Self::ValidateNodeNetworks => resource.is(api::GROUP, "nodenetworks"),
            Self::ValidateBridgeNetworks => resource.is(api::GROUP, "bridgenetworks"),
            Self::ValidateUsers => resource.kind().is_some(),
        }
    }
}

/// All admission paths.
pub fn router() -> Router<Arc<Replica>> {
    let router = Path::ALL.into_iter().fold(Router::new(), |router, path| {
        router.route(path.route(), post(move |State(replica), request| admit(path, replica, request)))
    });
    router.layer(DefaultBodyLimit::max(LARGEST_BODY))
}

async fn admit(path: Path, replica: Arc<Replica>, request: Request) -> Response {
    match answer(path, &replica, request).await {
        Ok((uid, verdict)) => {
            replica.metrics.admission(path, verdict.outcome());
            Json(response(&uid, &verdict)).into_response()
        }
        Err(error) => {
            replica.metrics.admission(path, error.outcome());
            debug!(?path, error = %ErrorChain(&error), "an admission request was not judged");
            (error.status(), error.to_string()).into_response()
        }
    }
}

/// The UID of what was asked, and the verdict.
async fn answer(path: Path, replica: &Replica, request: Request) -> Result<(String, Verdict), Unanswerable> {
    let turn = timeout(LONGEST_QUEUE, replica.bodies.acquire()).await;
    let Ok(Ok(_turn)) = turn else { return Err(Unanswerable::Busy) };
    let body = timeout(SLOWEST_BODY, Bytes::from_request(request, &())).await;
    let body = body.map_err(|_| Unanswerable::Slow)?;
    let body = body.map_err(|refused| Unanswerable::Refused(refused.status(), refused.body_text()))?;
    let asked = read(path, &body)?;
    if !replica.readiness.is_synced() {
        return Err(Unanswerable::NotSynced);
    }
    let verdict = judge(path, replica, &asked);
    if let Verdict::Deny(_) = verdict {
        debug!(?path, name = short(asked.name()), user = short(&asked.user_info.username), "refused");
    }
    Ok((asked.uid, verdict))
}

fn read(path: Path, body: &[u8]) -> Result<Asked, Unanswerable> {
    let review: Review =
        serde_json::from_slice(body).map_err(|error| Unanswerable::Body(short(&error.to_string())))?;
    if review.api_version != REVIEW_VERSION {
        return Err(Unanswerable::Version(short(&review.api_version)));
    }
    let request = review.request.ok_or(Unanswerable::NoRequest)?;
    if request.uid.chars().count() > LONGEST_ECHO {
        return Err(Unanswerable::Body("its uid is none".to_owned()));
    }
    if !path.is_about(&request.resource) {
        let Resource { group, resource } = &request.resource;
        let asked = short(&format!("{resource}.{group}"));
        return Err(Unanswerable::Resource { expected: path.about().to_owned(), asked });
    }
    Ok(request)
}

fn judge(path: Path, replica: &Replica, asked: &Asked) -> Verdict {
    let world = || replica.cluster.world();
    match (path, asked.operation) {
        (_, Operation::Delete | Operation::Connect) | (Path::ValidateNodeNetworks, Operation::Update) => {
            Verdict::Allow
        }
        (Path::ValidateNodeNetworks, Operation::Create) => {
            node_network(asked.name(), world().nodes.contains_key(asked.name()))
        }
        (Path::ValidateBridgeNetworks, Operation::Create | Operation::Update) => {
            network::judge(&world(), asked.name(), asked.object.as_ref(), asked.old_object.as_ref())
        }
        (Path::ValidateUsers, Operation::Create | Operation::Update) => {
            let Some(kind) = asked.resource.kind() else { return Verdict::Allow };
            let read =
                |object: &Option<Map<String, Value>>| user::read(kind, &asked.namespace, object.as_ref());
            let new = read(&asked.object);
            let added = user::added(&new, &read(&asked.old_object));
            user::judge(&world(), kind, &new, &added)
        }
    }
}

fn response(uid: &str, verdict: &Verdict) -> Value {
    let response = match verdict {
        Verdict::Allow => json!({"uid": uid, "allowed": true}),
        Verdict::Deny(message) => {
            let status =
                json!({"code": StatusCode::FORBIDDEN.as_u16(), "reason": "Forbidden", "message": message});
            json!({"uid": uid, "allowed": false, "status": status})
        }
    };
    json!({"apiVersion": REVIEW_VERSION, "kind": "AdmissionReview", "response": response})
}

/// What is repeated of a text that anybody may have written.
fn short(text: &str) -> String {
    match text.char_indices().nth(LONGEST_ECHO) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

impl Resource {
    fn is(&self, group: &str, resource: &str) -> bool {
        self.group == group && self.resource == resource
    }

    /// The kind of user that this is about.
    fn kind(&self) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| self.is(kind.group(), &object::workloads(*kind).plural))
    }
}

impl Asked {
    /// A generated name stands in the object only.
    fn name(&self) -> &str {
        let named = self.object.as_ref().and_then(|object| object.get("metadata")?.get("name")?.as_str());
        named.unwrap_or(&self.name)
    }
}

/// Whether a NodeNetwork of this name may be, given whether a Node of this name exists.
pub fn node_network(name: &str, node_exists: bool) -> Verdict {
    if node_exists {
        return Verdict::Allow;
    }
    Verdict::Deny(format!(
        "there is no Node {:?}: a NodeNetwork bears the name of its Node and is made by the Patchbay daemon on it. \
         Do not create it by hand; if the Node has only just joined, try again in a moment",
        short(name)
    ))
}

impl Verdict {
    fn outcome(&self) -> Outcome {
        match self {
            Self::Allow => Outcome::Allowed,
            Self::Deny(_) => Outcome::Denied,
        }
    }
}

impl Unanswerable {
    fn status(&self) -> StatusCode {
        match self {
            Self::Body(_) | Self::NoRequest | Self::Version(_) | Self::Resource { .. } => {
                StatusCode::BAD_REQUEST
            }
            Self::Slow => StatusCode::REQUEST_TIMEOUT,
            Self::Refused(status, _) => *status,
            Self::Busy | Self::NotSynced => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn outcome(&self) -> Outcome {
        match self {
            Self::Busy | Self::NotSynced => Outcome::Unavailable,
            Self::Body(_)
            | Self::NoRequest
            | Self::Version(_)
            | Self::Resource { .. }
            | Self::Slow
            | Self::Refused(..) => Outcome::Malformed,
        }
    }
}
