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
use crate::webhook::pod_configuration;

const SECRETS: &str = "/api/v1/namespaces/ns/secrets";
const SECRET: &str = "/api/v1/namespaces/ns/secrets/patchbay-webhook-certs";
const VALIDATING: &str = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/patchbay";
const MUTATINGS: &str = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations";
const MUTATING: &str = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/patchbay";

const PROPAGATION_DELAY: Duration = Duration::from_secs(5);

fn service() -> WebhookService {
    WebhookService { namespace: "ns".to_owned(), name: "hook".to_owned() }
}

#[derive(Default)]
struct Objects {
    by_path: BTreeMap<String, Value>,
    version: u64,
    /// The path of an object that the rotator may not write.
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
            let created = if path == SECRETS { SECRET } else { MUTATING };
            assert_eq!(created.rsplit_once('/').map(|(collection, _)| collection), Some(path));
            if self.forbidden == Some(created) {
                return Err((403, "Forbidden"));
            }
            assert!(!self.by_path.contains_key(created), "{created} exists");
            self.writes.push((method.clone(), path.to_owned()));
            return Ok(self.put(created, body));
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
        assert_eq!(method, http::Method::PATCH);
        let mut new = old;
        json_patch::merge(&mut new["metadata"], &body["metadata"]);
        for applied in body["webhooks"].as_array().unwrap() {
            let hooks = new["webhooks"].as_array_mut().unwrap();
            match hooks.iter_mut().find(|hook| hook["name"] == applied["name"]) {
                Some(hook) => json_patch::merge(hook, applied),
                None => hooks.push(applied.clone()),
            }
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
        if path == MUTATING {
            let object =
                pod_configuration::configuration(&service(), Some(pod_configuration::owner("v".into())));
            self.objects().put(path, json!(object));
            return;
        }
        let hook = json!({
            "name": "hook.patchbay.dev",
            "clientConfig": {"service": {"namespace": "ns", "name": "hook"}},
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
        });
        let object = json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": "patchbay", "uid": "v"},
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
        let fence = LeaseFence::expiring_in(Duration::from_hours(1));
        CertRotator::new(self.client(), service(), policy, Arc::default(), fence)
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
        assert_eq!(error.to_string(), "write MutatingWebhookConfiguration patchbay");
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
async fn the_mutating_configuration_is_created_with_the_bundle_after_the_first_leaf() {
    let server = ApiServer::with(&[VALIDATING]);
    let mut rotator = server.rotator();
    while !server.objects().by_path.contains_key(SECRET) || server.leaf_ca().is_none() {
        assert!(!server.objects().by_path.contains_key(MUTATING), "no replica could serve it");
        let wait = rotator.reconcile().await.unwrap();
        tokio::time::advance(wait).await;
    }
    server.take_writes();
    converge(&mut rotator).await;
    assert_eq!(server.take_writes(), [(http::Method::POST, MUTATINGS.to_owned())]);
    let ca = server.leaf_ca().unwrap();
    assert!(server.trusts(VALIDATING, &ca) && server.trusts(MUTATING, &ca));
    let created = server.objects().by_path[MUTATING].clone();
    assert_eq!(created["metadata"]["ownerReferences"][0]["uid"], "v");
    assert_eq!(created["webhooks"][0]["failurePolicy"], "Fail");

    server.objects().by_path.remove(MUTATING);
    converge(&mut rotator).await;
    assert_eq!(server.take_writes(), [(http::Method::POST, MUTATINGS.to_owned())], "it is created again");
    assert!(server.trusts(MUTATING, &ca));
    assert_eq!(server.leaf_ca(), Some(ca), "the serving certificate stays");
}

/// A webhook that fails closed must not outlive the controllers.
#[tokio::test(start_paused = true)]
async fn without_the_validating_configuration_the_mutating_one_is_not_created() {
    let server = ApiServer::default();
    let mut rotator = server.rotator();
    converge(&mut rotator).await;
    let ca = server.leaf_ca().unwrap();
    assert!(!server.objects().by_path.contains_key(MUTATING));

    server.create_configuration(VALIDATING);
    converge(&mut rotator).await;
    assert!(server.trusts(VALIDATING, &ca) && server.trusts(MUTATING, &ca));
    assert_eq!(server.leaf_ca(), Some(ca), "the serving certificate stays");
}

#[tokio::test(start_paused = true)]
async fn a_mutating_configuration_that_cannot_be_created_holds_up_no_certificate() {
    let server = ApiServer::with(&[VALIDATING]);
    server.objects().forbidden = Some(MUTATING);
    let mut rotator = server.rotator();
    let error = loop {
        match rotator.reconcile().await {
            Ok(wait) => tokio::time::advance(wait).await,
            Err(error) => break error,
        }
    };
    assert_eq!(error.to_string(), "create MutatingWebhookConfiguration patchbay");
    let old = server.leaf_ca().unwrap();
    server.lose_ca_key();
    for _ in 0..6 {
        let _ = rotator.reconcile().await;
        tokio::time::advance(PROPAGATION_DELAY).await;
    }
    assert_ne!(server.leaf_ca().unwrap(), old);
}

#[tokio::test(start_paused = true)]
async fn changes_of_the_mutating_configuration_are_undone() {
    let server = ApiServer::with(&[VALIDATING]);
    let mut rotator = server.rotator();
    converge(&mut rotator).await;
    let good = server.objects().by_path[MUTATING].clone();
    let damage: [fn(&mut Value); 4] = [
        |object| object["webhooks"][0]["failurePolicy"] = json!("Ignore"),
        |object| object["webhooks"] = json!([]),
        |object| object["metadata"]["ownerReferences"] = json!([]),
        |object| object["webhooks"][0]["clientConfig"]["caBundle"] = Value::Null,
    ];
    for (number, damage) in damage.into_iter().enumerate() {
        let mut object = good.clone();
        damage(&mut object);
        server.objects().put(MUTATING, object);
        server.take_writes();
        converge(&mut rotator).await;
        assert_eq!(server.take_writes(), patches(&[MUTATING]), "damage {number}");
        let mut repaired = server.objects().by_path[MUTATING].clone();
        repaired["metadata"]["resourceVersion"] = good["metadata"]["resourceVersion"].clone();
        assert_eq!(repaired, good, "damage {number}");
    }
    // The ValidatingWebhookConfiguration was deleted and created again.
    let mut validating = server.objects().by_path[VALIDATING].clone();
    validating["metadata"]["uid"] = json!("w");
    server.objects().put(VALIDATING, validating);
    converge(&mut rotator).await;
    assert_eq!(server.objects().by_path[MUTATING]["metadata"]["ownerReferences"][0]["uid"], "w");
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
