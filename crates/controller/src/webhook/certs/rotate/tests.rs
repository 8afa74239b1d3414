//! Rotation with two webhook configurations, against an API server in memory.

use std::{
    convert::Infallible,
    sync::{Mutex, MutexGuard},
};

use axum::{body::Body, http};
use client::fence::LeaseFence;
use k8s_openapi::ByteString;
use kube::core::Status;
use plan::certs::CaBundle;
use serde_json::{Value, json};

use super::*;

const SECRETS: &str = "/api/v1/namespaces/ns/secrets";
const SECRET: &str = "/api/v1/namespaces/ns/secrets/patchbay-webhook-certs";
const VALIDATING: &str = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/patchbay";
const MUTATING: &str = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/pods";

const CONFIGURATIONS: &[WebhookConfiguration] = &[
    WebhookConfiguration { kind: ConfigurationKind::Mutating, name: "pods" },
    WebhookConfiguration { kind: ConfigurationKind::Validating, name: "patchbay" },
];

const PROPAGATION_DELAY: Duration = Duration::from_secs(5);

#[derive(Default)]
struct Objects {
    by_path: BTreeMap<String, Value>,
    version: u64,
    /// The path of an object that nobody may write.
    forbidden: Option<&'static str>,
    /// The method and the path of each write that was accepted.
    writes: Vec<(http::Method, String)>,
    /// The URI of each list.
    lists: Vec<String>,
}

impl Objects {
    fn put(&mut self, path: &str, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.by_path.insert(path.to_owned(), object.clone());
        object
    }

    /// Applies a request to the objects; an error is the code and the reason.
    fn serve(
        &mut self,
        method: &http::Method,
        path: &str,
        body: Value,
    ) -> Result<Value, (u16, &'static str)> {
        if method == http::Method::POST {
            assert_eq!(path, SECRETS);
            self.writes.push((method.clone(), path.to_owned()));
            return Ok(self.put(SECRET, body));
        }
        let old = self.by_path.get(path).cloned().ok_or((404, "NotFound"))?;
        if method == http::Method::GET {
            return Ok(old);
        }
        if self.forbidden == Some(path) {
            return Err((403, "Forbidden"));
        }
        if body["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"] {
            return Err((409, "Conflict"));
        }
        self.writes.push((method.clone(), path.to_owned()));
        if method == http::Method::PUT {
            return Ok(self.put(path, body));
        }
        let mut new = old;
        for (hook, applied) in
            new["webhooks"].as_array_mut().unwrap().iter_mut().zip(body["webhooks"].as_array().unwrap())
        {
            assert_eq!((method, &hook["name"]), (&http::Method::PATCH, &applied["name"]));
            hook["clientConfig"]["caBundle"] = applied["clientConfig"]["caBundle"].clone();
        }
        Ok(self.put(path, new))
    }
}

#[derive(Clone, Default)]
struct ApiServer(Arc<Mutex<Objects>>);

impl ApiServer {
    /// A server that has these configurations, each with one webhook of ours and no CA bundle.
    fn with(configurations: &[&str]) -> Self {
        let server = Self::default();
        for path in configurations {
            server.create_configuration(path);
        }
        server
    }

    fn objects(&self) -> MutexGuard<'_, Objects> {
        self.0.lock().unwrap()
    }

    fn create_configuration(&self, path: &str) {
        let kind =
            if path == MUTATING { "MutatingWebhookConfiguration" } else { "ValidatingWebhookConfiguration" };
        let hook = json!({
            "name": "hook.patchbay.dev",
            "clientConfig": {"service": {"namespace": "ns", "name": "hook"}},
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
        });
        let object = json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": kind,
            "metadata": {"name": path.rsplit('/').next()},
            "webhooks": [hook],
        });
        self.objects().put(path, object);
    }

    fn client(&self) -> Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let server = server.clone();
            async move {
                let (parts, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap();
                let body = serde_json::from_slice(&body).unwrap_or_default();
                let uri = parts.uri.to_string();
                if uri.contains("watch=true") {
                    std::future::pending::<()>().await;
                }
                let result = if uri.contains("fieldSelector=") {
                    server.objects().lists.push(uri);
                    Ok(
                        json!({"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": "1"}, "items": []}),
                    )
                } else {
                    server.objects().serve(&parts.method, parts.uri.path(), body)
                };
                let (code, body) = match result {
                    Ok(object) => (200, object),
                    Err((code, reason)) => (code, json!(Status::failure("no", reason).with_code(code))),
                };
                let response = http::Response::builder().status(code).body(Body::from(body.to_string()));
                Ok::<_, Infallible>(response.unwrap())
            }
        });
        Client::new(service, "ns")
    }

    fn rotator(&self) -> CertRotator {
        let policy = CertPolicy {
            dns_name: "hook.ns.svc".to_owned(),
            ca_lifetime: Duration::from_hours(48),
            leaf_lifetime: Duration::from_hours(24),
            ca_propagation_delay: PROPAGATION_DELAY,
        };
        let service = WebhookService { namespace: "ns".to_owned(), name: "hook".to_owned() };
        let fence = LeaseFence::expiring_in(Duration::from_hours(1));
        CertRotator::with_configurations(
            self.client(),
            service,
            CONFIGURATIONS,
            policy,
            Arc::default(),
            fence,
        )
    }

    fn secret(&self) -> SecretContents {
        let secret: Secret = serde_json::from_value(self.objects().by_path[SECRET].clone()).unwrap();
        x509::parse_secret(&secret.data.unwrap())
    }

    /// The CA that signed the serving certificate.
    fn leaf_ca(&self) -> Option<CertId> {
        self.secret().leaf.and_then(|leaf| leaf.signed_by)
    }

    fn bundle(&self, path: &str) -> CaBundle {
        let text = &self.objects().by_path[path]["webhooks"][0]["clientConfig"]["caBundle"];
        let text: Option<ByteString> = serde_json::from_value(text.clone()).unwrap();
        text.map(|text| x509::parse_bundle(&text.0)).unwrap_or_default()
    }

    fn trusts(&self, path: &str, ca: &CertId) -> bool {
        self.bundle(path).cas.iter().any(|it| it.id == *ca)
    }

    fn lose_ca_key(&self) {
        let mut objects = self.objects();
        let mut secret = objects.by_path[SECRET].clone();
        secret["data"][CA_KEY] = json!("");
        objects.put(SECRET, secret);
    }

    fn take_writes(&self) -> Vec<(http::Method, String)> {
        std::mem::take(&mut self.objects().writes)
    }
}

fn patches(paths: &[&str]) -> Vec<(http::Method, String)> {
    paths.iter().map(|path| (http::Method::PATCH, (*path).to_owned())).collect()
}

/// Reconciles until nothing is left to do but to wait.
async fn converge(rotator: &mut CertRotator) {
    for _ in 0..10 {
        let wait = rotator.reconcile().await.unwrap();
        if wait > PROPAGATION_DELAY {
            return;
        }
        tokio::time::advance(wait).await;
    }
    panic!("the certificates are never up to date");
}

#[tokio::test(start_paused = true)]
async fn a_configuration_that_lags_holds_up_the_leaf_and_no_other_configuration() {
    let server = ApiServer::with(&[MUTATING, VALIDATING]);
    let mut rotator = server.rotator();
    converge(&mut rotator).await;
    let old = server.leaf_ca().unwrap();
    assert!([MUTATING, VALIDATING].iter().all(|path| server.trusts(path, &old)));

    server.lose_ca_key();
    server.objects().forbidden = Some(MUTATING);
    assert_eq!(rotator.reconcile().await.unwrap(), Duration::ZERO);
    let new = server.secret().signer.unwrap();
    assert_ne!(new, old);
    server.take_writes();
    for expected in [patches(&[VALIDATING]), vec![], vec![]] {
        let error = rotator.reconcile().await.unwrap_err();
        assert_eq!(error.to_string(), "write the CA bundle of MutatingWebhookConfiguration pods");
        assert_eq!(server.take_writes(), expected);
        assert!(server.trusts(VALIDATING, &new) && !server.trusts(MUTATING, &new));
        assert_eq!(server.leaf_ca().as_ref(), Some(&old), "a leaf was signed before both trust its CA");
        tokio::time::advance(PROPAGATION_DELAY * 2).await;
    }

    server.objects().forbidden = None;
    assert_eq!(rotator.reconcile().await.unwrap(), Duration::ZERO);
    assert_eq!(server.take_writes(), patches(&[MUTATING]));
    assert_eq!(rotator.reconcile().await.unwrap(), PROPAGATION_DELAY, "counted from the last configuration");
    assert_eq!(server.leaf_ca().as_ref(), Some(&old));
    tokio::time::advance(PROPAGATION_DELAY).await;
    assert_eq!(rotator.reconcile().await.unwrap(), Duration::ZERO);
    assert_eq!(server.leaf_ca().as_ref(), Some(&new));
    for path in [MUTATING, VALIDATING] {
        assert!(server.trusts(path, &old), "the old CA is removed after it has expired");
    }
}

#[tokio::test(start_paused = true)]
async fn a_configuration_that_is_not_installed_holds_up_nothing_and_gets_the_bundle_once_it_is() {
    let server = ApiServer::with(&[VALIDATING]);
    let mut rotator = server.rotator();
    converge(&mut rotator).await;
    let ca = server.leaf_ca().unwrap();
    assert!(server.trusts(VALIDATING, &ca));

    server.create_configuration(MUTATING);
    server.take_writes();
    converge(&mut rotator).await;
    assert_eq!(server.take_writes(), patches(&[MUTATING]));
    assert!(server.trusts(MUTATING, &ca));
    assert_eq!(server.leaf_ca(), Some(ca), "the serving certificate stays");
}

#[tokio::test(start_paused = true)]
async fn a_ca_that_only_one_configuration_has_is_added_to_the_others_again() {
    let server = ApiServer::with(&[MUTATING, VALIDATING]);
    let mut rotator = server.rotator();
    converge(&mut rotator).await;
    let old = server.leaf_ca().unwrap();
    server.objects().by_path.remove(SECRET);
    server.create_configuration(VALIDATING);
    converge(&mut rotator).await;
    let new = server.leaf_ca().unwrap();
    assert_ne!(new, old);
    for path in [MUTATING, VALIDATING] {
        assert!(server.trusts(path, &new) && server.trusts(path, &old), "{path}");
    }
}

#[tokio::test(start_paused = true)]
async fn each_configuration_is_watched_by_its_name() {
    let server = ApiServer::default();
    let mut changes = server.rotator().changes();
    for _ in 0..3 {
        changes.next().await.unwrap();
    }
    assert!(tokio::time::timeout(Duration::from_secs(1), changes.next()).await.is_err());
    let lists = server.objects().lists.clone();
    for path in [SECRET, VALIDATING, MUTATING] {
        let (collection, name) = path.rsplit_once('/').unwrap();
        let selector = format!("metadata.name%3D{name}");
        let listed = lists.iter().filter(|uri| uri.starts_with(collection) && uri.contains(&selector));
        assert_eq!(listed.count(), 1, "{path}: {lists:?}");
    }
}
