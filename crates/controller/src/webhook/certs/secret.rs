//! The Secret of the webhook's certificates: written by the leader, read by every replica.

use std::{collections::BTreeMap, sync::Arc};

use api::{CONTROLLER_FIELD_MANAGER, names::WEBHOOK_CERT_SECRET};
use client::{
    fence::LeaseFence,
    request::{self, ApiCall},
};
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{
    Api, Client,
    api::{DeleteParams, ObjectMeta, PostParams, Preconditions},
};

use super::x509::{TLS_CRT, TLS_KEY};
use crate::metrics::{ApiCallKind, Metrics};

const TLS_TYPE: &str = "kubernetes.io/tls";

/// Reads and writes the Secret for the leader.
pub struct CertSecret {
    api: Api<Secret>,
    namespace: String,
    call: ApiCall,
}

impl CertSecret {
    pub fn new(client: Client, namespace: &str, metrics: Arc<Metrics>, fence: LeaseFence) -> Self {
        let call = metrics.api_call(ApiCallKind::Secret).fenced(fence);
        Self { api: Api::namespaced(client, namespace), namespace: namespace.to_owned(), call }
    }

    pub async fn read(&self) -> Result<Option<Secret>, request::Error> {
        self.call.read(self.api.get_opt(WEBHOOK_CERT_SECRET)).await
    }

    /// Writes these data keys over those of the Secret that was read, unless the Secret has changed since.
    pub async fn write(
        &self,
        old: Option<Secret>,
        data: BTreeMap<&str, String>,
    ) -> Result<(), request::Error> {
        let params =
            PostParams { field_manager: Some(CONTROLLER_FIELD_MANAGER.to_owned()), ..PostParams::default() };
        let old = match old {
            Some(old) if is_replaceable(&old) => {
                let new = merge_data(old, data);
                return self
                    .call
                    .change(self.api.replace(WEBHOOK_CERT_SECRET, &params, &new))
                    .await
                    .map(drop);
            }
            Some(old) => {
                self.call.change(self.api.delete(WEBHOOK_CERT_SECRET, &if_unchanged(&old))).await?;
                old.data
            }
            None => None,
        };
        let new = merge_data(Secret { data: old, ..self.empty() }, data);
        self.call.create(self.api.create(&params, &new)).await.map(drop)
    }

    fn empty(&self) -> Secret {
        Secret {
            metadata: ObjectMeta {
                name: Some(WEBHOOK_CERT_SECRET.to_owned()),
                namespace: Some(self.namespace.clone()),
                ..ObjectMeta::default()
            },
            type_: Some(TLS_TYPE.to_owned()),
            ..Secret::default()
        }
    }
}

/// The type of a Secret and the data of an immutable Secret cannot change: such a Secret is deleted and created again.
fn is_replaceable(secret: &Secret) -> bool {
    secret.type_.as_deref() == Some(TLS_TYPE) && secret.immutable != Some(true)
}

fn if_unchanged(secret: &Secret) -> DeleteParams {
    DeleteParams::default().preconditions(Preconditions {
        resource_version: secret.metadata.resource_version.clone(),
        uid: secret.metadata.uid.clone(),
    })
}

fn merge_data(mut secret: Secret, data: BTreeMap<&str, String>) -> Secret {
    secret.metadata.managed_fields = None;
    let merged = secret.data.get_or_insert_default();
    merged.extend(data.into_iter().map(|(key, text)| (key.to_owned(), ByteString(text.into_bytes()))));
    // The API server requires both keys in a Secret of this type; they may be empty.
    for key in [TLS_CRT, TLS_KEY] {
        merged.entry(key.to_owned()).or_insert_with(|| ByteString(Vec::new()));
    }
    secret
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::{body::Body, http};

    use super::*;
    use crate::webhook::certs::x509::{CA_CRT, CA_KEY};

    fn bytes(text: &str) -> ByteString {
        ByteString(text.as_bytes().to_vec())
    }

    #[test]
    fn a_secret_that_cannot_be_updated_is_recreated() {
        let tls = Secret { type_: Some(TLS_TYPE.to_owned()), ..Secret::default() };
        assert!(is_replaceable(&tls));
        assert!(!is_replaceable(&Secret { immutable: Some(true), ..tls }));
        assert!(!is_replaceable(&Secret { type_: Some("Opaque".to_owned()), ..Secret::default() }));
    }

    #[test]
    fn other_data_keys_survive_and_required_ones_are_added() {
        let old = Secret { data: Some([(CA_KEY.to_owned(), bytes("key"))].into()), ..Secret::default() };
        let new = merge_data(old, [(CA_CRT, "new".to_owned())].into());
        let expected = [(CA_CRT, "new"), (CA_KEY, "key"), (TLS_CRT, ""), (TLS_KEY, "")];
        let expected = expected.map(|(key, text)| (key.to_owned(), bytes(text)));
        assert_eq!(new.data, Some(expected.into()));
    }

    /// A fake API server that accepts every request after four seconds and records the methods.
    fn slow_server() -> (Client, Arc<std::sync::Mutex<Vec<http::Method>>>) {
        let requests = Arc::new(std::sync::Mutex::new(Vec::new()));
        let recorder = requests.clone();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            recorder.lock().unwrap().push(request.method().clone());
            async {
                tokio::time::sleep(Duration::from_secs(4)).await;
                let body = serde_json::to_vec(&Secret::default()).unwrap();
                Ok::<_, std::convert::Infallible>(http::Response::new(Body::from(body)))
            }
        });
        (Client::new(service, "ns"), requests)
    }

    #[tokio::test(start_paused = true)]
    async fn the_second_of_two_writes_is_not_sent_when_the_fence_expires_during_the_first() {
        for (fence_secs, expected) in [(4, 1), (60, 2)] {
            let (client, requests) = slow_server();
            let secret = CertSecret::new(
                client,
                "ns",
                Arc::default(),
                LeaseFence::expiring_in(Duration::from_secs(fence_secs)),
            );
            let foreign = Secret { type_: Some("Opaque".to_owned()), ..Secret::default() };
            let result = secret.write(Some(foreign), BTreeMap::new()).await;
            assert_eq!(result.is_ok(), expected == 2, "{result:?}");
            let methods = [http::Method::DELETE, http::Method::POST];
            assert_eq!(*requests.lock().unwrap(), methods[..expected]);
        }
    }
}
