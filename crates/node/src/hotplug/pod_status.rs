//! Writes the annotations of a pod that report its attachments.
//!
//! The write is a JSON patch of the status subresource, which accepts annotations. It tests the pod's UID and the values
//! that both annotations had when the new ones were computed, so that no change of another writer is lost. A
//! resourceVersion would lose to every write of the kubelet.

use std::collections::BTreeSet;

use api::{ErrorChain, attachments::ATTACHMENTS_ANNOTATION, network_status::NETWORK_STATUS_ANNOTATION};
use client::{
    json_patch::patch_request,
    request::{ApiCall, Error},
};
use k8s_openapi::api::core::v1::Pod;
use kube::{Client, Resource as _};
use serde_json::{Value, json};

/// Writes the annotations of pods.
#[derive(Clone)]
pub struct PodStatusWriter {
    client: Client,
    call: ApiCall,
}

/// A pod whose annotations are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodTarget<'a> {
    pub namespace: &'a str,
    pub name: &'a str,
    pub uid: &'a str,
}

/// The values of both annotations; None where the pod does not have the annotation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodAnnotations {
    pub network_status: Option<String>,
    pub attachments: Option<String>,
}

/// What came of a write.
#[derive(Debug)]
pub enum WriteOutcome {
    Written,
    /// An annotation does not have its old value, or the pod has another UID. Nothing was written: observe the pod again.
    Conflict,
    /// The pod does not exist.
    Gone,
    /// The API server could not be reached, or rejected the write. Retry after a backoff.
    Failed(Error),
}

/// The errors of writes to one pod that were logged as warnings since the last successful write.
#[derive(Debug, Default)]
pub struct WriteWarnings(BTreeSet<String>);

/// Bounds the warnings about one pod: the texts come from the API server.
const MAX_WRITE_WARNINGS: usize = 8;

impl WriteWarnings {
    /// Whether to log a warning: the API server rejects the write, so that no retry succeeds until a person acts, and it
    /// gives this reason for the first time.
    pub fn is_new(&mut self, error: &Error) -> bool {
        // 401 ends with the next token, 409 and 429 end by themselves.
        let rejected = error.status().is_some_and(|status| matches!(status.code, 400 | 403 | 413 | 422));
        rejected && self.0.len() < MAX_WRITE_WARNINGS && self.0.insert(ErrorChain(error).to_string())
    }
}

/// Whether the pod has annotations at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AnnotationMap {
    Present,
    Absent,
}

impl PodStatusWriter {
    pub fn new(client: Client, call: ApiCall) -> Self {
        Self { client, call }
    }

    /// Replaces the annotations `old` by `new`, both or none. If they are equal, it confirms that the pod has them, and
    /// changes nothing.
    pub async fn write(
        &self,
        pod: PodTarget<'_>,
        old: &PodAnnotations,
        new: &PodAnnotations,
    ) -> WriteOutcome {
        let outcome = self.send(pod, operations(pod.uid, old, new, AnnotationMap::Present)).await;
        if matches!(outcome, WriteOutcome::Conflict) && *old == PodAnnotations::default() {
            // The API server rejects all operations on annotations of a pod that has none in the same way.
            return self.send(pod, operations(pod.uid, old, new, AnnotationMap::Absent)).await;
        }
        outcome
    }

    async fn send(&self, pod: PodTarget<'_>, operations: Vec<Value>) -> WriteOutcome {
        let path = format!("{}/{}/status", Pod::url_path(&(), Some(pod.namespace)), pod.name);
        let request = match patch_request(&path, &Value::Array(operations)) {
            Ok(request) => request,
            Err(error) => return WriteOutcome::Failed(Error::Failed(error)),
        };
        match self.call.change(self.client.request::<Pod>(request)).await {
            Ok(_) => WriteOutcome::Written,
            Err(error) if error.is_not_found() => WriteOutcome::Gone,
            Err(error) if error.is_conflict() || is_failed_test(&error) => WriteOutcome::Conflict,
            Err(error) => WriteOutcome::Failed(error),
        }
    }
}

fn operations(uid: &str, old: &PodAnnotations, new: &PodAnnotations, map: AnnotationMap) -> Vec<Value> {
    let mut operations = vec![json!({"op": "test", "path": "/metadata/uid", "value": uid})];
    if map == AnnotationMap::Absent {
        operations.push(json!({"op": "test", "path": "/metadata/annotations", "value": null}));
        if old == new {
            return operations;
        }
        operations.push(json!({"op": "add", "path": "/metadata/annotations", "value": {}}));
    }
    let annotations = [
        (NETWORK_STATUS_ANNOTATION, &old.network_status, &new.network_status),
        (ATTACHMENTS_ANNOTATION, &old.attachments, &new.attachments),
    ];
    let path = |name: &str| format!("/metadata/annotations/{}", name.replace('~', "~0").replace('/', "~1"));
    for (name, old, _) in annotations {
        // Null means that the pod does not have the annotation.
        operations.push(json!({"op": "test", "path": path(name), "value": old}));
    }
    for (name, _, new) in annotations.into_iter().filter(|(_, old, new)| old != new) {
        operations.push(match new {
            Some(new) => json!({"op": "add", "path": path(name), "value": new}),
            None => json!({"op": "remove", "path": path(name)}),
        });
    }
    operations
}

/// Whether a test of the patch failed. The API server does not say which. A patch whose result is invalid, and one that an
/// admission policy denies, get the same code with details.
fn is_failed_test(error: &Error) -> bool {
    error.status().is_some_and(|status| {
        let details = status.details.as_ref();
        status.code == 422
            && details.is_none_or(|details| details.causes.is_empty() && details.name.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, sync::Arc};

    use client::request::DEFAULT_TIMEOUT;
    use http::{Method, Request, Response};
    use kube::client::Body;
    use tokio::sync::Mutex;

    use super::*;

    const POD: PodTarget<'static> = PodTarget { namespace: "ns", name: "web", uid: "u1" };
    /// What the API server of Kubernetes 1.36 answers if a test fails.
    const FAILED_TEST: (u16, &str) = (
        422,
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"the server rejected our request due to an error in our request","reason":"Invalid","details":{},"code":422}"#,
    );
    const WRITTEN: (u16, &str) = (200, r#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"web"}}"#);

    type Requests = Arc<Mutex<Vec<(Method, String, Value)>>>;

    fn writer(replies: &[(u16, &'static str)]) -> (PodStatusWriter, Requests) {
        let requests = Requests::default();
        let (recorded, replies) = (Arc::clone(&requests), Arc::new(Mutex::new(replies.to_vec())));
        let service = tower::service_fn(move |request: Request<Body>| {
            let (recorded, replies) = (Arc::clone(&recorded), Arc::clone(&replies));
            async move {
                let (parts, body) = request.into_parts();
                let body = serde_json::from_slice(&body.collect_bytes().await.unwrap()).unwrap();
                recorded.lock().await.push((parts.method, parts.uri.path().to_owned(), body));
                let (code, text) = replies.lock().await.remove(0);
                let response = Response::builder().status(code).body(Body::from(text.as_bytes().to_vec()));
                Ok::<_, Infallible>(response.unwrap())
            }
        });
        let call = ApiCall::new(DEFAULT_TIMEOUT, || ());
        (PodStatusWriter::new(Client::new(service, "default"), call), requests)
    }

    fn annotations(network_status: Option<&str>, attachments: Option<&str>) -> PodAnnotations {
        let [network_status, attachments] = [network_status, attachments].map(|text| text.map(str::to_owned));
        PodAnnotations { network_status, attachments }
    }

    #[tokio::test]
    async fn a_write_tests_the_uid_and_both_old_values() {
        let (writer, requests) = writer(&[WRITTEN]);
        let (old, new) = (annotations(Some("[]"), Some("a")), annotations(Some("[1]"), None));
        assert!(matches!(writer.write(POD, &old, &new).await, WriteOutcome::Written));
        let [(method, path, body)] = &requests.lock().await[..] else { panic!("one request") };
        assert_eq!((method, path.as_str()), (&Method::PATCH, "/api/v1/namespaces/ns/pods/web/status"));
        let status = "/metadata/annotations/k8s.v1.cni.cncf.io~1network-status";
        let attachments = "/metadata/annotations/patchbay.dev~1attachments";
        let expected = json!([
            {"op": "test", "path": "/metadata/uid", "value": "u1"},
            {"op": "test", "path": status, "value": "[]"},
            {"op": "test", "path": attachments, "value": "a"},
            {"op": "add", "path": status, "value": "[1]"},
            {"op": "remove", "path": attachments},
        ]);
        assert_eq!(*body, expected);
    }

    #[tokio::test]
    async fn an_annotation_that_does_not_change_is_tested_only() {
        let (writer, requests) = writer(&[WRITTEN]);
        let (old, new) = (annotations(None, Some("a")), annotations(None, Some("b")));
        assert!(matches!(writer.write(POD, &old, &new).await, WriteOutcome::Written));
        let requests = requests.lock().await;
        let operations: Vec<(&str, &Value)> = requests[0]
            .2
            .as_array()
            .unwrap()
            .iter()
            .map(|operation| (operation["op"].as_str().unwrap(), &operation["value"]))
            .collect();
        let (uid, null, a, b) = (json!("u1"), Value::Null, json!("a"), json!("b"));
        assert_eq!(operations, [("test", &uid), ("test", &null), ("test", &a), ("add", &b)]);
    }

    #[tokio::test]
    async fn equal_annotations_are_confirmed() {
        let (writer, requests) = writer(&[WRITTEN, FAILED_TEST, WRITTEN]);
        let same = annotations(Some("[]"), None);
        assert!(matches!(writer.write(POD, &same, &same).await, WriteOutcome::Written));
        let none = PodAnnotations::default();
        assert!(matches!(writer.write(POD, &none, &none).await, WriteOutcome::Written));
        let requests = requests.lock().await;
        assert_eq!(requests.len(), 3);
        let operations = requests.iter().flat_map(|(_, _, body)| body.as_array().unwrap());
        assert!(operations.into_iter().all(|operation| operation["op"] == "test"), "{requests:?}");
    }

    #[tokio::test]
    async fn a_pod_without_any_annotation_gets_the_map_first() {
        let (writer, requests) = writer(&[FAILED_TEST, WRITTEN]);
        let new = annotations(Some("[]"), None);
        assert!(matches!(writer.write(POD, &PodAnnotations::default(), &new).await, WriteOutcome::Written));
        let requests = requests.lock().await;
        let [_, (_, _, body)] = &requests[..] else { panic!("two requests") };
        assert_eq!(body[0]["path"], "/metadata/uid");
        assert_eq!(body[1], json!({"op": "test", "path": "/metadata/annotations", "value": null}));
        assert_eq!(body[2], json!({"op": "add", "path": "/metadata/annotations", "value": {}}));
    }

    #[tokio::test]
    async fn every_answer_of_the_api_server_has_its_outcome() {
        let conflict =
            (409, r#"{"kind":"Status","status":"Failure","reason":"Conflict","code":409,"message":"x"}"#);
        let gone = (
            404,
            r#"{"kind":"Status","status":"Failure","reason":"NotFound","code":404,"message":"x","details":{"name":"web","kind":"pods"}}"#,
        );
        let invalid = (
            422,
            r#"{"kind":"Status","status":"Failure","reason":"Invalid","code":422,"message":"x","details":{"name":"web","kind":"Pod","causes":[{"reason":"FieldValueTooLong","message":"x","field":"metadata.annotations"}]}}"#,
        );
        let forbidden =
            (403, r#"{"kind":"Status","status":"Failure","reason":"Forbidden","code":403,"message":"x"}"#);
        let (old, new) = (annotations(Some("[]"), None), annotations(Some("[1]"), None));
        for (reply, expected) in [
            (FAILED_TEST, "Conflict"),
            (conflict, "Conflict"),
            (gone, "Gone"),
            (invalid, "Failed"),
            (forbidden, "Failed"),
            ((500, "oops"), "Failed"),
        ] {
            let (writer, requests) = writer(&[reply]);
            let outcome = format!("{:?}", writer.write(POD, &old, &new).await);
            assert!(outcome.starts_with(expected), "{reply:?}: {outcome}");
            assert_eq!(requests.lock().await.len(), 1);
        }
    }

    #[tokio::test]
    async fn a_rejected_write_is_a_warning_once_per_reason() {
        let forbidden = |message: &'static str| (403, message);
        let replies = [
            forbidden(
                r#"{"kind":"Status","status":"Failure","reason":"Forbidden","code":403,"message":"x"}"#,
            ),
            forbidden(
                r#"{"kind":"Status","status":"Failure","reason":"Forbidden","code":403,"message":"x"}"#,
            ),
            forbidden(
                r#"{"kind":"Status","status":"Failure","reason":"Forbidden","code":403,"message":"y"}"#,
            ),
            (500, "oops"),
        ];
        let (writer, _) = writer(&replies);
        let mut warnings = WriteWarnings::default();
        let (old, new) = (annotations(Some("[]"), None), annotations(Some("[1]"), None));
        for expected in [true, false, true, false] {
            let WriteOutcome::Failed(error) = writer.write(POD, &old, &new).await else { panic!("written") };
            assert_eq!(warnings.is_new(&error), expected, "{error:?}");
        }
    }
}
