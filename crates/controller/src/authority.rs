//! The leader's loop for the webhook's certificates: looks, asks `plan::certs` for the one next step, and does it.
//!
//! Watches only say when to look. What is decided on is read from the API server itself: a decision about whom to trust,
//! taken on a cache that is just behind our own last write, would make one authority too many.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures::{StreamExt, stream};
use k8s_openapi::api::{
    admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration},
    core::v1::Secret,
};
use kube::{Api, Client};
use plan::certs::{self, Id, Next, Observed, Policy, Step, Trust, Validity};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::{
    call,
    certificate::{self, AUTHORITIES, AUTHORITY_KEY, Held, LEAF, LEAF_KEY},
    configuration::{self, Configuration, Configurations, Kind},
    election::{self, Tenure},
    error::Chain,
    metrics::{Call, Metrics},
    secret::{self, Vault},
    watch,
};

/// Keeps a fight with another writer from becoming a storm.
const BREATH: Duration = Duration::from_millis(100);
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_mins(1);

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("read the webhook certificates")]
    Read(#[source] call::Error),
    #[error("write the secret of the webhook certificates")]
    Secret(#[source] call::Error),
    #[error("publish the webhook authorities to the {0:?} configuration")]
    Publish(Kind, #[source] call::Error),
    #[error("make a webhook certificate")]
    Make(#[source] certificate::Error),
    #[error("write as leader")]
    Lead(#[source] election::Error),
}

impl Error {
    fn is_conflict(&self) -> bool {
        match self {
            Self::Secret(error) | Self::Publish(_, error) => error.is_conflict(),
            Self::Read(_) | Self::Make(_) | Self::Lead(_) => false,
        }
    }
}

/// The keeper of the certificates.
pub struct Keeper {
    client: Client,
    namespace: String,
    policy: Policy,
    metrics: Arc<Metrics>,
    tenure: Tenure,
    vault: Vault,
    configurations: Configurations,
    trust: Trust,
}

/// What was read in one look.
struct View {
    secret: Option<Secret>,
    held: Held,
    configurations: Vec<Configuration>,
}

impl Keeper {
    pub fn new(
        client: Client,
        namespace: String,
        policy: Policy,
        metrics: Arc<Metrics>,
        tenure: Tenure,
    ) -> Self {
        Self {
            vault: Vault::new(client.clone(), &namespace, metrics.clone()),
            configurations: Configurations::new(client.clone(), metrics.clone()),
            client,
            namespace,
            policy,
            metrics,
            tenure,
            trust: Trust::default(),
        }
    }

    /// Works until told to stop; a step that was begun is ended.
    pub async fn keep(mut self, stop: CancellationToken) {
        let mut touches = self.touches();
        let mut retry = FIRST_RETRY;
        loop {
            let rest = match self.round().await {
                Ok(rest) => {
                    retry = FIRST_RETRY;
                    rest
                }
                Err(error) if error.is_conflict() => {
                    debug!("another writer was quicker, looking again");
                    Duration::ZERO
                }
                Err(error) => {
                    warn!(error = %Chain(&error), ?retry, "the webhook certificates could not be kept, tried again");
                    let rest = retry;
                    retry = (retry * 2).min(LAST_RETRY);
                    rest
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(rest.max(BREATH)) => {}
                touched = touches.next() => match touched {
                    Some(()) => tokio::time::sleep(BREATH).await,
                    None => return,
                },
            }
        }
    }

    fn touches(&self) -> impl futures::Stream<Item = ()> + Unpin + use<> {
        let secret = Api::namespaced(self.client.clone(), &self.namespace);
        let (validating, mutating) = (Api::all(self.client.clone()), Api::all(self.client.clone()));
        let configuration = Call::WatchWebhookConfiguration;
        stream::select_all([
            watch::touches::<Secret>(secret, secret::NAME, self.metrics.clone(), Call::WatchSecret),
            watch::touches::<ValidatingWebhookConfiguration>(
                validating,
                configuration::NAME,
                self.metrics.clone(),
                configuration,
            ),
            watch::touches::<MutatingWebhookConfiguration>(
                mutating,
                configuration::NAME,
                self.metrics.clone(),
                configuration,
            ),
        ])
    }

    /// One look and at most one step; says for how long all is well.
    async fn round(&mut self) -> Result<Duration, Error> {
        let view = self.look().await.map_err(Error::Read)?;
        let configurations: Vec<_> =
            view.configurations.iter().flat_map(Configuration::bundles).cloned().collect();
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

    async fn look(&self) -> Result<View, call::Error> {
        let (secret, configurations) = tokio::try_join!(self.vault.read(), self.configurations.read())?;
        let held = secret.as_ref().and_then(|secret| secret.data.as_ref()).map(certificate::read_secret);
        Ok(View { secret, held: held.unwrap_or_default(), configurations })
    }

    async fn apply(&self, step: Step, view: View) -> Result<(), Error> {
        match step {
            Step::Found { validity, keep } => self.found(validity, &keep, view).await,
            Step::Bundle { keep } => {
                let parts = [(AUTHORITIES, certificate::bundle_pem(&keep))].into();
                self.vault.write(view.secret, parts).await.map_err(Error::Secret)?;
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
        let mut parts = BTreeMap::from([(AUTHORITIES, text), (AUTHORITY_KEY, made.key)]);
        if view.held.leaf.is_none() {
            // Nobody serves what is unreadable, so it need not be carried along.
            parts.extend([(LEAF, String::new()), (LEAF_KEY, String::new())]);
        }
        self.vault.write(view.secret, parts).await.map_err(Error::Secret)?;
        info!(kept = keep.len(), "made a new webhook authority");
        Ok(())
    }

    async fn sign(&self, validity: Validity, view: View) -> Result<(), Error> {
        let key = view.secret.as_ref().and_then(|secret| secret.data.as_ref()?.get(AUTHORITY_KEY));
        let (Some(signer), Some(key)) = (&view.held.signer, key) else {
            return Ok(());
        };
        let names = self.policy.names.iter().cloned().collect();
        let made = certificate::sign(signer, &key.0, names, validity).map_err(Error::Make)?;
        let parts = [(LEAF, made.certificate), (LEAF_KEY, made.key)].into();
        self.vault.write(view.secret, parts).await.map_err(Error::Secret)?;
        info!("signed a new webhook certificate");
        Ok(())
    }

    /// Every configuration that shows other authorities; one that cannot be written does not hold up the other.
    async fn publish(&self, view: &View) -> Result<(), Error> {
        let mut result = Ok(());
        for configuration in view.configurations.iter().filter(|it| !it.trusts(&view.held.bundle)) {
            match self.configurations.publish(configuration, &view.held.bundle).await {
                Ok(()) => info!(kind = ?configuration.kind, "published the webhook authorities"),
                Err(error) => result = Err(Error::Publish(configuration.kind, error)),
            }
        }
        result
    }
}
