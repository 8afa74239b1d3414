//! The leader's loop for the webhook's certificates: reads, asks `plan::certs` for the next single step, and applies it.
//!
//! Watches only trigger a reconcile. Decisions use objects read from the API server, not a cache: a cache that lags behind
//! our own last write would cause one CA too many.

#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use api::{
    ErrorChain,
    names::{WEBHOOK_CERT_SECRET, WEBHOOK_CONFIGURATION},
};
use client::{
    fence::{LeaseFence, now},
    request,
};
use futures::{StreamExt, stream};
use k8s_openapi::api::{
    admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration},
    core::v1::Secret,
};
use kube::{Api, Client};
use plan::certs::{
    self, CertId, CertPolicy, ObservedCerts, RotationDecision, RotationStep, SignerTrust, Validity,
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{
    ca_bundle::{CaBundlePatcher, ConfigurationKind, PublishedBundles, PublishedConfigurations},
    clock::WallClockMonitor,
    secret::CertSecret,
    x509::{self, CA_CRT, CA_KEY, SecretContents, TLS_CRT, TLS_KEY},
};
use crate::{
    metrics::{ApiCallKind, Metrics},
    watch,
};

/// The minimum wait between two reconciles, which also limits conflicts with another writer.
const CONFLICT_RETRY: Duration = Duration::from_millis(100);
const MIN_RETRY: Duration = Duration::from_secs(1);
const MAX_RETRY: Duration = Duration::from_mins(1);

/// Why a reconcile failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("read the webhook certificates")]
    Read(#[source] request::Error),
    #[error("write the Secret of the webhook certificates")]
    WriteSecret(#[source] request::Error),
    #[error("write {0}")]
    Publish(ConfigurationKind, #[source] request::Error),
    #[error("create {}", ConfigurationKind::Mutating)]
    CreateConfiguration(#[source] request::Error),
    #[error("create a webhook certificate")]
    Create(#[source] x509::Error),
}

impl Error {
    fn is_conflict(&self) -> bool {
        match self {
            Self::WriteSecret(error) | Self::Publish(_, error) | Self::CreateConfiguration(error) => {
                error.is_conflict()
            }
            Self::Read(_) | Self::Create(_) => false,
        }
    }
}

/// The Service through which API servers call the webhook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookService {
    pub namespace: String,
    pub name: String,
}

/// Creates, renews and publishes the webhook's certificates.
pub struct CertRotator {
    client: Client,
    service: WebhookService,
    policy: CertPolicy,
    metrics: Arc<Metrics>,
    secret: CertSecret,
    ca_bundle: CaBundlePatcher,
    trust: SignerTrust,
}

/// The objects that one reconcile has read.
struct CertObjects {
    secret: Option<Secret>,
    contents: SecretContents,
    published: PublishedConfigurations,
}

impl CertRotator {
    pub fn new(
        client: Client,
        service: WebhookService,
        policy: CertPolicy,
        metrics: Arc<Metrics>,
        fence: LeaseFence,
    ) -> Self {
        Self {
            secret: CertSecret::new(client.clone(), &service.namespace, metrics.clone(), fence.clone()),
            ca_bundle: CaBundlePatcher::new(client.clone(), service.clone(), metrics.clone(), fence),
            client,
            service,
            policy,
            metrics,
            trust: SignerTrust::default(),
        }
    }

    /// Runs until `stop` is cancelled; finishes a step that it has started.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut changes = self.changes();
        let mut retry = MIN_RETRY;
        loop {
            let clock = WallClockMonitor::new();
            let requeue_after = match self.reconcile().await {
                Ok(requeue_after) => {
                    retry = MIN_RETRY;
                    requeue_after
                }
                Err(error) if error.is_conflict() => {
                    debug!("conflict with another writer; reading the webhook certificates again");
                    Duration::ZERO
                }
                Err(error) => {
                    warn!(error = %ErrorChain(&error), ?retry, "could not reconcile the webhook certificates; retrying");
                    let requeue_after = retry;
                    retry = (retry * 2).min(MAX_RETRY);
                    requeue_after
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(requeue_after.max(CONFLICT_RETRY)) => {}
                () = clock.stepped() => info!("the wall clock was set; checking all certificate dates again"),
                change = changes.next() => match change {
                    Some(()) => tokio::time::sleep(CONFLICT_RETRY).await,
                    None => return,
                },
            }
        }
    }

    fn changes(&self) -> impl futures::Stream<Item = ()> + Unpin + use<> {
        let secrets = Api::namespaced(self.client.clone(), &self.service.namespace);
        let secrets = watch::object_changes::<Secret>(
            secrets,
            WEBHOOK_CERT_SECRET,
            self.metrics.clone(),
            ApiCallKind::WatchSecret,
        );
        let validating = watch::object_changes::<ValidatingWebhookConfiguration>(
            Api::all(self.client.clone()),
            WEBHOOK_CONFIGURATION,
            self.metrics.clone(),
            ApiCallKind::WatchWebhookConfiguration,
        );
        let mutating = watch::object_changes::<MutatingWebhookConfiguration>(
            Api::all(self.client.clone()),
            WEBHOOK_CONFIGURATION,
            self.metrics.clone(),
            ApiCallKind::WatchWebhookConfiguration,
        );
        stream::select_all([secrets, validating, mutating])
    }

    /// Applies at most one step; returns when to reconcile again.
    async fn reconcile(&mut self) -> Result<Duration, Error> {
        let objects = Box::pin(self.read()).await.map_err(Error::Read)?;
        let webhook_bundles: Vec<_> =
            objects.published.existing().flat_map(PublishedBundles::bundles).cloned().collect();
        let trusted_for = self.trust.observe(objects.contents.signer.as_ref(), &webhook_bundles, now());
        let SecretContents { bundle, signer, leaf } = objects.contents.clone();
        let observed = ObservedCerts { secret: bundle, signer, leaf, webhook_bundles, trusted_for };
        match certs::decide(&observed, &self.policy, SystemTime::now()) {
            RotationDecision::RecheckAfter(wait) => {
                let changed = self.ensure_mutating_configuration(&objects).await?;
                Ok(if changed { wait.min(MIN_RETRY) } else { wait })
            }
            RotationDecision::Apply(step) => {
                self.apply(step, objects).await?;
                Ok(Duration::ZERO)
            }
        }
    }

    async fn read(&self) -> Result<CertObjects, request::Error> {
        let (secret, published) = tokio::try_join!(self.secret.read(), self.ca_bundle.read())?;
        let contents = secret.as_ref().and_then(|secret| secret.data.as_ref()).map(x509::parse_secret);
        Ok(CertObjects { secret, contents: contents.unwrap_or_default(), published })
    }

    async fn apply(&self, step: RotationStep, objects: CertObjects) -> Result<(), Error> {
        match step {
            RotationStep::CreateCa { validity, retain } => self.create_ca(validity, &retain, objects).await,
            RotationStep::WriteBundle { retain } => {
                let data = [(CA_CRT, x509::bundle_pem(&retain))].into();
                self.secret.write(objects.secret, data).await.map_err(Error::WriteSecret)?;
                info!(cas = retain.len(), "rewrote the CA bundle in the webhook Secret");
                Ok(())
            }
            RotationStep::PublishBundle => self.publish(&objects).await,
            RotationStep::SignLeaf { validity } => self.sign_leaf(validity, objects).await,
        }
    }

    async fn create_ca(
        &self,
        validity: Validity,
        retain: &[CertId],
        objects: CertObjects,
    ) -> Result<(), Error> {
        let ca = x509::create_ca(validity).map_err(Error::Create)?;
        let bundle = ca.certificate + &x509::bundle_pem(retain);
        let mut data = BTreeMap::from([(CA_CRT, bundle), (CA_KEY, ca.key)]);
        if objects.contents.leaf.is_none() {
            // No replica serves a leaf that cannot be parsed, so it is not kept.
            data.extend([(TLS_CRT, String::new()), (TLS_KEY, String::new())]);
        }
        self.secret.write(objects.secret, data).await.map_err(Error::WriteSecret)?;
        info!(retained = retain.len(), "created a webhook CA");
        Ok(())
    }

    async fn sign_leaf(&self, validity: Validity, objects: CertObjects) -> Result<(), Error> {
        let key = objects.secret.as_ref().and_then(|secret| secret.data.as_ref()?.get(CA_KEY));
        let (Some(signer), Some(key)) = (&objects.contents.signer, key) else {
            return Ok(());
        };
        let dns_name = self.policy.dns_name.clone();
        let leaf = x509::sign_leaf(signer, &key.0, dns_name, validity).map_err(Error::Create)?;
        let data = [(TLS_CRT, leaf.certificate), (TLS_KEY, leaf.key)].into();
        self.secret.write(objects.secret, data).await.map_err(Error::WriteSecret)?;
        info!("signed a webhook serving certificate");
        Ok(())
    }

    /// A configuration that cannot be written does not keep the bundle out of the others. The first failure is returned.
    async fn publish(&self, objects: &CertObjects) -> Result<(), Error> {
        let bundle = &objects.contents.bundle;
        let mut result = Ok(());
        for published in objects.published.existing() {
            if published.bundles().all(|it| it.matches(bundle)) && !published.has_drifted() {
                continue;
            }
            let configuration = published.kind();
            match self.ca_bundle.publish(published, bundle).await {
                Ok(()) => info!(%configuration, "wrote the CA bundle into the webhook configuration"),
                Err(error) => result = result.and(Err(Error::Publish(configuration, error))),
            }
        }
        result
    }

    /// Creates the configuration of launcher pods once replicas can serve it, and repairs it. Returns whether it wrote.
    ///
    /// API servers that see the new object trust the CA of the leaf that replicas serve: the bundle has every CA of the
    /// Secret.
    async fn ensure_mutating_configuration(&self, objects: &CertObjects) -> Result<bool, Error> {
        let CertObjects { contents, published, .. } = objects;
        if let Some(mutating) = published.mutating.as_ref().filter(|it| it.has_drifted()) {
            let configuration = mutating.kind();
            self.ca_bundle
                .publish(mutating, &contents.bundle)
                .await
                .map_err(|error| Error::Publish(configuration, error))?;
            info!(%configuration, "repaired the webhook configuration");
            return Ok(true);
        }
        if contents.leaf.as_ref().is_none_or(|leaf| leaf.signed_by.is_none()) {
            return Ok(false);
        }
        let created = self.ca_bundle.create_absent(published, &contents.bundle).await;
        let created = created.map_err(Error::CreateConfiguration)?;
        if created {
            info!(configuration = %ConfigurationKind::Mutating, "created the webhook configuration");
        }
        Ok(created)
    }
}
