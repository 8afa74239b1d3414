//! The leader's loop for the webhook's certificates: looks, asks `plan::certs` for the one next step, and does it.
//!
//! Watches only say when to look. What is decided on is read from the API server itself: a decision about who is trusted that is taken
//! on a cache just behind our own last write would sign or drop the wrong thing.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures::{StreamExt, stream};
use k8s_openapi::{
    ByteString,
    api::{
        admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration},
        core::v1::Secret,
    },
};
use kube::{
    Api, Client,
    api::{DeleteParams, ObjectMeta, Patch, PatchParams, PostParams, Preconditions},
};
use plan::certs::{self, Bundle, Id, Next, Observed, Policy, Step, Trust, Validity};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::{
    call,
    certificate::{self, AUTHORITIES, AUTHORITY_KEY, Held, LEAF, LEAF_KEY},
    election::{self, Tenure},
    metrics::{Call, Metrics},
    watch,
};

/// The Secret that carries the webhook's certificates.
pub const SECRET: &str = "patchbay-webhook-certs";

/// The name of both webhook configurations.
pub const CONFIGURATION: &str = "patchbay";

const MANAGER: &str = "patchbay.dev/controller";
const SECRET_TYPE: &str = "kubernetes.io/tls";

/// Keeps a fight with another writer from becoming a storm.
const BREATH: Duration = Duration::from_millis(100);
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(60);

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("read the {0}")]
    Read(Object, #[source] call::Error),
    #[error("write the {0}")]
    Write(Object, #[source] call::Error),
    #[error("make a certificate")]
    Make(#[source] certificate::Error),
    #[error("write as leader")]
    Lead(#[source] election::Error),
}

/// What is read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Object {
    Secret,
    Validating,
    Mutating,
}

impl std::fmt::Display for Object {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Secret => "webhook certificate secret",
            Self::Validating => "validating webhook configuration",
            Self::Mutating => "mutating webhook configuration",
        })
    }
}

/// The keeper of the certificates.
pub struct Keeper {
    secrets: Api<Secret>,
    client: Client,
    namespace: String,
    policy: Policy,
    metrics: Arc<Metrics>,
    tenure: Tenure,
    trust: Trust,
}

/// What was read in one look.
struct View {
    secret: Option<Secret>,
    held: Held,
    configurations: Vec<Configuration>,
}

/// One webhook configuration, as far as it concerns us.
struct Configuration {
    object: Object,
    version: Option<String>,
    webhooks: Vec<(String, Bundle)>,
}

impl Keeper {
    pub fn new(client: Client, namespace: String, policy: Policy, metrics: Arc<Metrics>, tenure: Tenure) -> Self {
        let secrets = Api::namespaced(client.clone(), &namespace);
        Self { secrets, client, namespace, policy, metrics, tenure, trust: Trust::default() }
    }

    /// Works until told to stop, which is between two writes.
    pub async fn keep(mut self, stop: CancellationToken) {
        let mut touches = stream::select_all([
            watch::touches::<Secret>(
                Api::namespaced(self.client.clone(), &self.namespace),
                SECRET,
                self.metrics.clone(),
                Call::WatchSecret,
            ),
            watch::touches::<ValidatingWebhookConfiguration>(
                Api::all(self.client.clone()),
                CONFIGURATION,
                self.metrics.clone(),
                Call::WatchWebhookConfiguration,
            ),
            watch::touches::<MutatingWebhookConfiguration>(
                Api::all(self.client.clone()),
                CONFIGURATION,
                self.metrics.clone(),
                Call::WatchWebhookConfiguration,
            ),
        ]);
        let mut retry = FIRST_RETRY;
        loop {
            let rest = match self.round().await {
                Ok(rest) => {
                    retry = FIRST_RETRY;
                    rest
                }
                Err(Error::Read(_, error) | Error::Write(_, error)) if error.is_conflict() => {
                    debug!("another writer was quicker, looking again");
                    Duration::ZERO
                }
                Err(error) => {
                    let error: &(dyn std::error::Error + 'static) = &error;
                    warn!(error, ?retry, "the webhook certificates could not be kept, tried again");
                    std::mem::replace(&mut retry, (retry * 2).min(LAST_RETRY))
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(rest.max(BREATH)) => {}
                touched = touches.next() => if touched.is_none() { return },
            }
        }
    }

    /// One look and at most one step; says how long all is well.
    async fn round(&mut self) -> Result<Duration, Error> {
        let view = self.look().await?;
        let configurations: Vec<_> = view.bundles().cloned().collect();
        let now = tokio::time::Instant::now().into_std();
        let trusted_for = self.trust.look(view.held.signer.as_ref(), &configurations, now);
        let Held { bundle, signer, leaf } = view.held.clone();
        let observed = Observed { secret: bundle, signer, leaf, configurations, trusted_for };
        match certs::next(&observed, &self.policy, SystemTime::now()) {
            Next::Look(rest) => Ok(rest),
            Next::Step(step) => {
                self.tenure.check().map_err(Error::Lead)?;
                self.apply(step, view).await?;
                Ok(Duration::ZERO)
            }
        }
    }

    async fn look(&self) -> Result<View, Error> {
        let (secret, validating, mutating) = tokio::try_join!(
            self.read(Object::Secret, &self.secrets, SECRET),
            self.read(Object::Validating, &Api::all(self.client.clone()), CONFIGURATION),
            self.read(Object::Mutating, &Api::all(self.client.clone()), CONFIGURATION),
        )?;
        let held = secret.as_ref().and_then(|secret| secret.data.as_ref()).map(certificate::read_secret);
        let configurations = validating.map(of_validating).into_iter().chain(mutating.map(of_mutating)).collect();
        Ok(View { secret, held: held.unwrap_or_default(), configurations })
    }

    async fn read<K>(&self, object: Object, api: &Api<K>, name: &str) -> Result<Option<K>, Error>
    where
        K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
    {
        let read = call::within(call::DEADLINE, &self.metrics, object.call(), api.get_opt(name)).await;
        read.map_err(|error| Error::Read(object, error))
    }

    async fn apply(&self, step: Step, view: View) -> Result<(), Error> {
        match step {
            Step::Found { validity, keep } => self.found(validity, &keep, view).await,
            Step::Bundle { keep } => {
                let text = certificate::bundle_pem(&keep);
                self.write_secret(view.secret, [(AUTHORITIES, text)].into()).await?;
                info!(authorities = keep.len(), "rewrote the bundle of webhook authorities");
                Ok(())
            }
            Step::Publish => self.publish(&view).await,
            Step::Sign { validity } => self.sign(validity, view).await,
        }
    }

    async fn found(&self, validity: Validity, keep: &[Id], view: View) -> Result<(), Error> {
        let made = certificate::found(validity).map_err(Error::Make)?;
        let text = made.certificate + &certificate::bundle_pem(keep);
        let mut data = BTreeMap::from([(AUTHORITIES, text), (AUTHORITY_KEY, made.key)]);
        if view.held.leaf.is_none() {
            // A Secret of this type has to have them, and nobody serves what is unreadable.
            data.extend([(LEAF, String::new()), (LEAF_KEY, String::new())]);
        }
        self.write_secret(view.secret, data).await?;
        info!(kept = keep.len(), "made a new webhook authority");
        Ok(())
    }

    async fn sign(&self, validity: Validity, view: View) -> Result<(), Error> {
        let key = view.secret.as_ref().and_then(|secret| secret.data.as_ref()?.get(AUTHORITY_KEY));
        let (Some(signer), Some(key)) = (&view.held.signer, key) else { return Ok(()) };
        let names = self.policy.names.iter().cloned().collect();
        let made = certificate::sign(signer, &key.0, names, validity).map_err(Error::Make)?;
        let data = BTreeMap::from([(LEAF, made.certificate), (LEAF_KEY, made.key)]);
        self.write_secret(view.secret, data).await?;
        info!("signed a new webhook certificate");
        Ok(())
    }

    async fn write_secret(&self, old: Option<Secret>, data: BTreeMap<&str, String>) -> Result<(), Error> {
        let params = PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() };
        let result = match old {
            Some(old) if writable(&old) => {
                let new = written(old, data);
                self.secret_call(self.secrets.replace(SECRET, &params, &new)).await.map(drop)
            }
            // Neither the type nor an immutable Secret can be changed: its content moves to a new one.
            Some(old) => {
                let gone = DeleteParams::default().preconditions(Preconditions {
                    resource_version: old.metadata.resource_version.clone(),
                    uid: old.metadata.uid.clone(),
                });
                self.secret_call(self.secrets.delete(SECRET, &gone)).await.map_err(|e| Error::Write(Object::Secret, e))?;
                let new = written(Secret { data: old.data, ..self.blank() }, data);
                self.secret_call(self.secrets.create(&params, &new)).await.map(drop)
            }
            None => {
                let new = written(self.blank(), data);
                self.secret_call(self.secrets.create(&params, &new)).await.map(drop)
            }
        };
        result.map_err(|error| Error::Write(Object::Secret, error))
    }

    async fn secret_call<T>(&self, call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, call::Error> {
        call::within(call::DEADLINE, &self.metrics, Call::Secret, call).await
    }

    fn blank(&self) -> Secret {
        Secret {
            metadata: ObjectMeta {
                name: Some(SECRET.to_owned()),
                namespace: Some(self.namespace.clone()),
                ..ObjectMeta::default()
            },
            ..Secret::default()
        }
    }

    /// Writes every configuration that differs; one that cannot be written does not hold up the other.
    async fn publish(&self, view: &View) -> Result<(), Error> {
        let mut result = Ok(());
        for configuration in &view.configurations {
            if configuration.shows(&view.held.bundle) {
                continue;
            }
            match self.publish_to(configuration, &view.held.bundle).await {
                Ok(()) => info!(object = %configuration.object, "published the webhook authorities"),
                Err(error) => result = Err(Error::Write(configuration.object, error)),
            }
        }
        result
    }

    async fn publish_to(&self, configuration: &Configuration, bundle: &Bundle) -> Result<(), call::Error> {
        let text = certificate::bundle_pem(bundle.authorities.iter().map(|authority| &authority.id));
        let kind = configuration.object.kind();
        let patch = Patch::Apply(patch(configuration, kind, text.into_bytes()));
        let params = PatchParams::apply(MANAGER).force();
        let call = async {
            match configuration.object {
                Object::Mutating => {
                    let api = Api::<MutatingWebhookConfiguration>::all(self.client.clone());
                    api.patch(CONFIGURATION, &params, &patch).await.map(drop)
                }
                Object::Validating | Object::Secret => {
                    let api = Api::<ValidatingWebhookConfiguration>::all(self.client.clone());
                    api.patch(CONFIGURATION, &params, &patch).await.map(drop)
                }
            }
        };
        call::within(call::DEADLINE, &self.metrics, Call::WebhookConfiguration, call).await
    }
}

impl View {
    fn bundles(&self) -> impl Iterator<Item = &Bundle> {
        self.configurations.iter().flat_map(|configuration| &configuration.webhooks).map(|(_, bundle)| bundle)
    }
}
