//! The Secret that carries the webhook's certificates: written by the leader, read by every replica.

use std::{collections::BTreeMap, sync::Arc};

use api::{CONTROLLER_FIELD_MANAGER, names::WEBHOOK_CERT_SECRET};
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{
    Api, Client,
    api::{DeleteParams, ObjectMeta, PostParams, Preconditions},
};

use crate::{
    call::{self, Line},
    certificate::{LEAF, LEAF_KEY},
    metrics::{Call, Metrics},
    tenure::Tenure,
};

const TYPE: &str = "kubernetes.io/tls";

/// The Secret in the API server, in the leader's hands.
pub struct Vault {
    api: Api<Secret>,
    namespace: String,
    line: Line,
}

impl Vault {
    pub fn new(client: Client, namespace: &str, metrics: Arc<Metrics>, tenure: Tenure) -> Self {
        let line = Line::of_leader(metrics, Call::Secret, tenure);
        Self { api: Api::namespaced(client, namespace), namespace: namespace.to_owned(), line }
    }

    pub async fn read(&self) -> Result<Option<Secret>, call::Error> {
        self.line.read(self.api.get_opt(WEBHOOK_CERT_SECRET)).await
    }

    /// Puts these parts over those of the Secret that was read, unless it has changed since.
    pub async fn write(&self, old: Option<Secret>, parts: BTreeMap<&str, String>) -> Result<(), call::Error> {
        let params =
            PostParams { field_manager: Some(CONTROLLER_FIELD_MANAGER.to_owned()), ..PostParams::default() };
        let old = match old {
            Some(old) if replaceable(&old) => {
                let new = with(old, parts);
                return self
                    .line
                    .change(self.api.replace(WEBHOOK_CERT_SECRET, &params, &new))
                    .await
                    .map(drop);
            }
            Some(old) => {
                self.line.change(self.api.delete(WEBHOOK_CERT_SECRET, &only_this(&old))).await?;
                old.data
            }
            None => None,
        };
        let new = with(Secret { data: old, ..self.blank() }, parts);
        self.line.create(self.api.create(&params, &new)).await.map(drop)
    }

    fn blank(&self) -> Secret {
        Secret {
            metadata: ObjectMeta {
                name: Some(WEBHOOK_CERT_SECRET.to_owned()),
                namespace: Some(self.namespace.clone()),
                ..ObjectMeta::default()
            },
            type_: Some(TYPE.to_owned()),
            ..Secret::default()
        }
    }
}

/// Neither the type nor anything of an immutable Secret can be changed: such a one is deleted and made anew.
fn replaceable(secret: &Secret) -> bool {
    secret.type_.as_deref() == Some(TYPE) && secret.immutable != Some(true)
}

fn only_this(secret: &Secret) -> DeleteParams {
    DeleteParams::default().preconditions(Preconditions {
        resource_version: secret.metadata.resource_version.clone(),
        uid: secret.metadata.uid.clone(),
    })
}

fn with(mut secret: Secret, parts: BTreeMap<&str, String>) -> Secret {
    secret.metadata.managed_fields = None;
    let data = secret.data.get_or_insert_default();
    data.extend(parts.into_iter().map(|(key, text)| (key.to_owned(), ByteString(text.into_bytes()))));
    // A Secret of this type has to have both, be they empty.
    for key in [LEAF, LEAF_KEY] {
        data.entry(key.to_owned()).or_insert_with(|| ByteString(Vec::new()));
    }
    secret
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::{body::Body, http};

    use super::*;
    use crate::{
        certificate::{AUTHORITIES, AUTHORITY_KEY},
        tenure::tests::tenure,
    };

    fn bytes(text: &str) -> ByteString {
        ByteString(text.as_bytes().to_vec())
    }

    #[test]
    fn a_secret_that_cannot_be_changed_is_made_anew() {
        let tls = Secret { type_: Some(TYPE.to_owned()), ..Secret::default() };
        assert!(replaceable(&tls));
        assert!(!replaceable(&Secret { immutable: Some(true), ..tls }));
        assert!(!replaceable(&Secret { type_: Some("Opaque".to_owned()), ..Secret::default() }));
    }

    #[test]
    fn parts_that_are_not_written_survive_and_required_ones_exist() {
        let old =
            Secret { data: Some([(AUTHORITY_KEY.to_owned(), bytes("key"))].into()), ..Secret::default() };
        let new = with(old, [(AUTHORITIES, "new".to_owned())].into());
        let expected = [(AUTHORITIES, "new"), (AUTHORITY_KEY, "key"), (LEAF, ""), (LEAF_KEY, "")];
        let expected = expected.map(|(key, text)| (key.to_owned(), bytes(text)));
        assert_eq!(new.data, Some(expected.into()));
    }

    /// An API server that agrees to everything and takes four seconds over it; says what it was asked.
    fn slow() -> (Client, Arc<std::sync::Mutex<Vec<http::Method>>>) {
        let asked = Arc::new(std::sync::Mutex::new(Vec::new()));
        let seen = asked.clone();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            seen.lock().unwrap().push(request.method().clone());
            async {
                tokio::time::sleep(Duration::from_secs(4)).await;
                let body = serde_json::to_vec(&Secret::default()).unwrap();
                Ok::<_, std::convert::Infallible>(http::Response::new(Body::from(body)))
            }
        });
        (Client::new(service, "ns"), asked)
    }

    #[tokio::test(start_paused = true)]
    async fn the_second_of_two_writes_is_not_sent_when_the_tenure_ends_with_the_first() {
        for (length, expected) in [(4, 1), (60, 2)] {
            let (client, asked) = slow();
            let vault = Vault::new(client, "ns", Arc::default(), tenure(Duration::from_secs(length)));
            let foreign = Secret { type_: Some("Opaque".to_owned()), ..Secret::default() };
            let result = vault.write(Some(foreign), BTreeMap::new()).await;
            assert_eq!(result.is_ok(), expected == 2, "{result:?}");
            let all = [http::Method::DELETE, http::Method::POST];
            assert_eq!(*asked.lock().unwrap(), all[..expected]);
        }
    }
}
