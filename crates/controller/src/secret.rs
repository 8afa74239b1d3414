//! The Secret that carries the webhook's certificates: written by the leader, read by every replica.

use std::{collections::BTreeMap, future::Future, sync::Arc};

use api::CONTROLLER_MANAGER;
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{
    Api, Client,
    api::{DeleteParams, ObjectMeta, PostParams, Preconditions},
};

use crate::{
    call,
    metrics::{Call, Metrics},
};

/// Its name.
pub const NAME: &str = "patchbay-webhook-certs";

const TYPE: &str = "kubernetes.io/tls";

/// The Secret in the API server.
pub struct Vault {
    api: Api<Secret>,
    namespace: String,
    metrics: Arc<Metrics>,
}

impl Vault {
    pub fn new(client: Client, namespace: &str, metrics: Arc<Metrics>) -> Self {
        Self { api: Api::namespaced(client, namespace), namespace: namespace.to_owned(), metrics }
    }

    pub async fn read(&self) -> Result<Option<Secret>, call::Error> {
        self.call(self.api.get_opt(NAME)).await
    }

    /// Puts these parts over those of the Secret that was read, unless it has changed since.
    pub async fn write(&self, old: Option<Secret>, parts: BTreeMap<&str, String>) -> Result<(), call::Error> {
        let params =
            PostParams { field_manager: Some(CONTROLLER_MANAGER.to_owned()), ..PostParams::default() };
        let old = match old {
            Some(old) if replaceable(&old) => {
                let new = with(old, parts);
                return self.call(self.api.replace(NAME, &params, &new)).await.map(drop);
            }
            Some(old) => {
                self.call(self.api.delete(NAME, &only_this(&old))).await?;
                old.data
            }
            None => None,
        };
        let new = with(Secret { data: old, ..self.blank() }, parts);
        self.call(self.api.create(&params, &new)).await.map(drop)
    }

    async fn call<T>(&self, call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, call::Error> {
        call::within(call::DEADLINE, &self.metrics, Call::Secret, call).await
    }

    fn blank(&self) -> Secret {
        Secret {
            metadata: ObjectMeta {
                name: Some(NAME.to_owned()),
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
    for key in ["tls.crt", "tls.key"] {
        data.entry(key.to_owned()).or_insert_with(|| ByteString(Vec::new()));
    }
    secret
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let old = Secret { data: Some([("ca.key".to_owned(), bytes("key"))].into()), ..Secret::default() };
        let new = with(old, [("ca.crt", "new".to_owned())].into());
        let expected = [("ca.crt", "new"), ("ca.key", "key"), ("tls.crt", ""), ("tls.key", "")];
        let expected = expected.map(|(key, text)| (key.to_owned(), bytes(text)));
        assert_eq!(new.data, Some(expected.into()));
    }
}
