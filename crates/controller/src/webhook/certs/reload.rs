//! Reloads the serving certificate of this replica when the Secret changes, without a restart.

use std::{collections::BTreeMap, pin::pin, sync::Arc};

use api::{ErrorChain, names::WEBHOOK_CERT_SECRET};
use axum_server::tls_rustls::RustlsConfig;
use client::watch::{StreamEvent, WatchConfig};
use futures::StreamExt;
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{Api, Client};
use plan::certs;
use tokio::sync::watch;
use tracing::{info, warn};

use super::x509::{self, TLS_CRT, TLS_KEY};
use crate::{
    metrics::{ApiCallKind, Metrics},
    watch::events,
    webhook::server::Readiness,
};

/// Why a certificate is not loaded.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the certificate cannot be served")]
    Unservable(#[source] certs::UnservableLeaf),
    #[error("load the certificate")]
    Load(#[source] x509::Error),
}

/// The serving certificate. An unservable certificate never replaces one that is served.
pub struct CertReloader {
    dns_name: String,
    tls: watch::Sender<Option<RustlsConfig>>,
    loaded: Option<BTreeMap<String, ByteString>>,
    readiness: Arc<Readiness>,
    metrics: Arc<Metrics>,
}

impl CertReloader {
    pub fn new(dns_name: String, readiness: Arc<Readiness>, metrics: Arc<Metrics>) -> Self {
        Self { dns_name, tls: watch::Sender::new(None), loaded: None, readiness, metrics }
    }

    /// Receives the TLS configuration once the first certificate is loaded. Later certificates replace it in place.
    pub fn tls(&self) -> watch::Receiver<Option<RustlsConfig>> {
        self.tls.subscribe()
    }

    /// Watches the Secret; ends only when it is dropped.
    pub async fn run(mut self, client: Client, namespace: String) {
        let api = Api::<Secret>::namespaced(client, &namespace);
        let config = WatchConfig::one(WEBHOOK_CERT_SECRET);
        let mut secrets = pin!(events(api, config, self.metrics.clone(), ApiCallKind::WatchSecret));
        while let Some(event) = secrets.next().await {
            let StreamEvent::Applied(secret) = event else { continue };
            if let Err(error) = self.load(&secret.data.unwrap_or_default()) {
                warn!(error = %ErrorChain(&error), "could not load the webhook certificate; serving the previous one");
            }
        }
    }

    /// Loads the certificate from the Secret's data if it can be served.
    fn load(&mut self, data: &BTreeMap<String, ByteString>) -> Result<(), Error> {
        let keys = [TLS_CRT, TLS_KEY];
        let serving: BTreeMap<_, _> =
            keys.iter().filter_map(|key| Some(((*key).to_owned(), data.get(*key)?.clone()))).collect();
        // A CA that is added or removed changes the Secret but not the leaf. Before the first leaf both keys are empty.
        if self.loaded.as_ref() == Some(&serving) || serving.values().all(|bytes| bytes.0.is_empty()) {
            return Ok(());
        }
        let leaf = x509::parse_secret(data).leaf;
        certs::check_servable(leaf.as_ref(), &self.dns_name).map_err(Error::Unservable)?;
        let config = x509::server_config(&serving).map_err(Error::Load)?;
        self.tls.send_if_modified(|tls| match tls {
            Some(tls) => {
                tls.reload_from_config(config);
                false
            }
            none => {
                *none = Some(RustlsConfig::from_config(config));
                true
            }
        });
        if let Some(leaf) = leaf {
            self.metrics.certificate_expires(leaf.validity.not_after);
        }
        self.loaded = Some(serving);
        self.readiness.set_certificate_loaded();
        info!("loaded a webhook certificate");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use plan::certs::Validity;

    use super::*;

    const NAME: &str = "hook.ns.svc";

    fn reloader() -> CertReloader {
        CertReloader::new(NAME.to_owned(), Arc::default(), Arc::default())
    }

    fn secret(name: &str) -> BTreeMap<String, ByteString> {
        let validity = Validity::starting_at(SystemTime::now(), Duration::from_hours(1));
        let ca = x509::create_ca(validity).unwrap();
        let id = x509::parse_bundle(ca.certificate.as_bytes()).cas.remove(0).id;
        let leaf = x509::sign_leaf(&id, ca.key.as_bytes(), name.to_owned(), validity).unwrap();
        let parts = [
            (x509::CA_CRT, ca.certificate),
            (x509::CA_KEY, ca.key),
            (TLS_CRT, leaf.certificate),
            (TLS_KEY, leaf.key),
        ];
        parts.map(|(key, text)| (key.to_owned(), ByteString(text.into_bytes()))).into()
    }

    fn ready(reloader: &CertReloader) -> bool {
        reloader.readiness.set_synced();
        reloader.readiness.check().is_ok()
    }

    #[test]
    fn a_replica_is_ready_with_its_first_certificate_and_reloads_the_next_one_in_place() {
        let mut reloader = reloader();
        let tls = reloader.tls();
        assert!(!ready(&reloader));
        reloader.load(&secret(NAME)).unwrap();
        assert!(ready(&reloader));
        let config = tls.borrow().clone().unwrap();
        let first = config.get_inner();
        reloader.load(&secret(NAME)).unwrap();
        assert!(!Arc::ptr_eq(&first, &config.get_inner()));
    }

    #[test]
    fn nothing_is_reloaded_when_only_the_ca_bundle_changed() {
        let mut reloader = reloader();
        let mut data = secret(NAME);
        reloader.load(&data).unwrap();
        let config = reloader.tls().borrow().clone().unwrap();
        let first = config.get_inner();
        let bundle = data.get_mut(x509::CA_CRT).unwrap();
        bundle.0.extend(secret(NAME)[x509::CA_CRT].0.clone());
        reloader.load(&data).unwrap();
        assert!(Arc::ptr_eq(&first, &config.get_inner()));
    }

    #[test]
    fn an_unservable_certificate_never_replaces_the_current_one() {
        let mut reloader = reloader();
        let good = secret(NAME);
        reloader.load(&good).unwrap();
        let config = reloader.tls().borrow().clone().unwrap();
        let first = config.get_inner();
        let with = |key: &str, text: &[u8]| {
            let mut data = good.clone();
            data.insert(key.to_owned(), ByteString(text.to_vec()));
            data
        };
        let other = secret(NAME);
        let bad = [
            secret("other.example"),
            with(TLS_CRT, b"junk"),
            with(TLS_KEY, b"\xff\xfe"),
            with(TLS_KEY, &other[TLS_KEY].0),
            with(TLS_CRT, &other[TLS_CRT].0),
        ];
        for data in bad {
            assert!(reloader.load(&data).is_err());
        }
        reloader.load(&BTreeMap::new()).unwrap();
        assert!(Arc::ptr_eq(&first, &config.get_inner()) && ready(&reloader));
    }
}
