//! Admission: what cannot be seen in one object alone.
//!
//! A check is a plain function of the object and what the caches show, so that webhook and reconcilers judge alike. A
//! new path is one more variant of [`Path`] and its arm in [`judge`].

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::Bytes,
    extract::{DefaultBodyLimit, FromRequest, Request, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::post,
};
use kube::core::{
    DynamicObject,
    admission::{AdmissionRequest, AdmissionResponse, AdmissionReview, Operation},
};
use prometheus_client::encoding::EncodeLabelValue;
use tracing::{info, warn};

use crate::{error::Chain, http::Replica, metrics::Outcome};

/// An object is at most 1.5 MiB in etcd, and an update carries two.
const LARGEST_BODY: usize = 3 * 1024 * 1024;

/// API servers give up after 30 s at most.
const SLOWEST_BODY: Duration = Duration::from_secs(10);

/// What the API server asks about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Path {
    ValidateNodeNetworks,
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
    #[error("the body did not arrive in time")]
    Slow,
    #[error("the body was refused: {0}")]
    Refused(StatusCode, String),
    #[error("the cache of nodes is not filled yet: try again")]
    NotSynced,
}

impl Path {
    const ALL: [Self; 1] = [Self::ValidateNodeNetworks];

    fn route(self) -> &'static str {
        match self {
            Self::ValidateNodeNetworks => "/validate/nodenetworks",
        }
    }

    /// Group and resource that this path is about.
    fn resource(self) -> (&'static str, &'static str) {
        match self {
            Self::ValidateNodeNetworks => (api::GROUP, "nodenetworks"),
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
        Ok((verdict, response)) => {
            replica.metrics.admission(path, verdict.outcome());
            Json(response.into_review()).into_response()
        }
        Err(error) => {
            replica.metrics.admission(path, error.outcome());
            warn!(?path, error = %Chain(&error), "an admission request was not understood");
            (error.status(), error.to_string()).into_response()
        }
    }
}

async fn answer(
    path: Path,
    replica: &Replica,
    request: Request,
) -> Result<(Verdict, AdmissionResponse), Unanswerable> {
    let body = tokio::time::timeout(SLOWEST_BODY, Bytes::from_request(request, &())).await;
    let body = body.map_err(|_| Unanswerable::Slow)?;
    let body = body.map_err(|refused| Unanswerable::Refused(refused.status(), refused.body_text()))?;
    let request = read(path, &body)?;
    if !replica.readiness.is_synced() {
        return Err(Unanswerable::NotSynced);
    }
    let verdict = judge(path, replica, &request);
    let response = AdmissionResponse::from(&request);
    let Verdict::Deny(message) = &verdict else {
        return Ok((verdict, response));
    };
    info!(?path, name = name(&request), user = request.user_info.username, "refused");
    let mut response = response.deny(message);
    response.result.code = StatusCode::FORBIDDEN.as_u16();
    "Forbidden".clone_into(&mut response.result.reason);
    Ok((verdict, response))
}

fn read(path: Path, body: &[u8]) -> Result<AdmissionRequest<DynamicObject>, Unanswerable> {
    let review: AdmissionReview<DynamicObject> =
        serde_json::from_slice(body).map_err(|error| Unanswerable::Body(error.to_string()))?;
    if review.types.api_version != "admission.k8s.io/v1" {
        return Err(Unanswerable::Version(review.types.api_version));
    }
    let request: AdmissionRequest<_> = review.try_into().map_err(|_| Unanswerable::NoRequest)?;
    let asked = (request.resource.group.as_str(), request.resource.resource.as_str());
    if asked != path.resource() {
        let full = |(group, resource): (&str, &str)| format!("{resource}.{group}");
        return Err(Unanswerable::Resource { expected: full(path.resource()), asked: full(asked) });
    }
    Ok(request)
}

fn judge(path: Path, replica: &Replica, request: &AdmissionRequest<DynamicObject>) -> Verdict {
    match (path, &request.operation) {
        (Path::ValidateNodeNetworks, Operation::Create) => {
            let name = name(request);
            node_network(name, replica.nodes.exists(name))
        }
        (Path::ValidateNodeNetworks, Operation::Update | Operation::Delete | Operation::Connect) => {
            Verdict::Allow
        }
    }
}

/// A generated name stands in the object only.
fn name(request: &AdmissionRequest<DynamicObject>) -> &str {
    let named = request.object.as_ref().and_then(|object| object.metadata.name.as_deref());
    named.unwrap_or(&request.name)
}

/// Whether a NodeNetwork of this name may be, given whether a Node of this name exists.
pub fn node_network(name: &str, node_exists: bool) -> Verdict {
    if node_exists {
        return Verdict::Allow;
    }
    Verdict::Deny(format!(
        "there is no Node {name:?}: a NodeNetwork bears the name of its Node and is made by the Patchbay daemon on it. \
         Do not create it by hand; if the Node has only just joined, try again in a moment"
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
            Self::NotSynced => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn outcome(&self) -> Outcome {
        match self {
            Self::NotSynced => Outcome::Unavailable,
            Self::Body(_)
            | Self::NoRequest
            | Self::Version(_)
            | Self::Resource { .. }
            | Self::Slow
            | Self::Refused(..) => Outcome::Malformed,
        }
    }
}
