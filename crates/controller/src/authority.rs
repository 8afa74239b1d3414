//! The leader's loop for the webhook's certificates: looks, asks `plan::certs` for the one next step, and does it.
//!
//! Watches only say when to look. What is decided on is read from the API server itself: a decision about whom to trust,
//! taken on a cache that is just behind our own last write, would make one authority too many.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use api::{
    ErrorChain,
    names::{WEBHOOK_CERT_SECRET, WEBHOOK_CONFIGURATION},
};
use futures::{StreamExt, stream};
use k8s_openapi::api::{admissionregistration::v1::ValidatingWebhookConfiguration, core::v1::Secret};
use kube::{Api, Client};
use plan::certs::{self, Id, Next, Observed, Policy, Step, Trust, Validity};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::{
    call,
    certificate::{self, AUTHORITIES, AUTHORITY_KEY, Held, LEAF, LEAF_KEY},
    clock::Clock,
    configuration::{Configuration, Registration},
    metrics::{Call, Metrics},
    secret::Vault,
    tenure::{Tenure, now},
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
    #[error("publish the webhook authorities")]
    Publish(#[source] call::Error),
    #[error("make a webhook certificate")]
    Make(#[source] certificate::Error),
}

impl Error {
    fn is_conflict(&self) -> bool {
        match self {
            Self::Secret(error) | Self::Publish(error) => error.is_conflict(),
            Self::Read(_) | Self::Make(_) => false,
        }
    }
}

/// Where the webhook lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Home {
    pub namespace: String,
    pub service: String,
}

/// The keeper of the certificates.
pub struct Keeper {
    client: Client,
    home: Home,
    policy: Policy,
    metrics: Arc<Metrics>,
    vault: Vault,
    registration: Registration,
    trust: Trust,
}

/// What was read in one look.
struct View {
    secret: Option<Secret>,
    held: Held,
    configuration: Option<Configuration>,
}

impl Keeper {
    pub fn new(client: Client, home: Home, policy: Policy, metrics: Arc<Metrics>, tenure: Tenure) -> Self {
        Self {
            vault: Vault::new(client.clone(), &home.namespace, metrics.clone(), tenure.clone()),
            registration: Registration::new(client.clone(), home.clone(), metrics.clone(), tenure),
            client,
            home,
            policy,
            metrics,
            trust: Trust::default(),
        }
    }

    /// Works until told to stop; a step that was begun is ended.
    pub async fn keep(mut self, stop: CancellationToken) {
        let mut touches = self.touches();
        let mut retry = FIRST_RETRY;
        loop {
            let clock = Clock::new();
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
                    warn!(error = %ErrorChain(&error), ?retry, "the webhook certificates could not be kept, tried again");
                    let rest = retry;
                    retry = (retry * 2).min(LAST_RETRY);
                    rest
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(rest.max(BREATH)) => {}
                () = clock.was_set() => info!("the clock was set, every date is judged anew"),
                touched = touches.next() => match touched {
                    Some(()) => tokio::time::sleep(BREATH).await,
                    None => return,
                },
            }
        }
    }

    fn touches(&self) -> impl futures::Stream<Item = ()> + Unpin + use<> {
        let secret = Api::namespaced(self.client.clone(), &self.home.namespace);
        let configuration = Api::all(self.client.clone());
        stream::select(
            watch::touches::<Secret>(secret, WEBHOOK_CERT_SECRET, self.metrics.clone(), Call::WatchSecret),
            watch::touches::<ValidatingWebhookConfiguration>(
                configuration,
                WEBHOOK_CONFIGURATION,
                self.metrics.clone(),
                Call::WatchWebhookConfiguration,
            ),
        )
    }

    /// One look and at most one step; says for how long all is well.
    async fn round(&mut self) -> Result<Duration, Error> {
        let view = self.look().await.map_err(Error::Read)?;
        let configurations: Vec<_> =
            view.configuration.iter().flat_map(Configuration::bundles).cloned().collect();
        let trusted_for = self.trust.look(view.held.signer.as_ref(), &configurations, now());
        let Held { bundle, signer, leaf } = view.held.clone();
        let observed = Observed { secret: bundle, signer, leaf, configurations, trusted_for };
        match certs::next(&observed, &self.policy, SystemTime::now()) {
            Next::Look(rest) => Ok(rest),
            Next::Step(step) => {
                self.apply(step, view).await?;
                Ok(Duration::ZERO)
            }
        }
    }

    async fn look(&self) -> Result<View, call::Error> {
        let (secret, configuration) = tokio::try_join!(self.vault.read(), self.registration.read())?;
        let held = secret.as_ref().and_then(|secret| secret.data.as_ref()).map(certificate::read_secret);
        Ok(View { secret, held: held.unwrap_or_default(), configuration })
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
        let name = self.policy.name.clone();
        let made = certificate::sign(signer, &key.0, name, validity).map_err(Error::Make)?;
        let parts = [(LEAF, made.certificate), (LEAF_KEY, made.key)].into();
        self.vault.write(view.secret, parts).await.map_err(Error::Secret)?;
        info!("signed a new webhook certificate");
        Ok(())
    }

    async fn publish(&self, view: &View) -> Result<(), Error> {
        let Some(configuration) = &view.configuration else { return Ok(()) };
        self.registration.publish(configuration, &view.held.bundle).await.map_err(Error::Publish)?;
        info!("published the webhook authorities");
        Ok(())
    }
}
