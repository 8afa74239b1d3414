//! The certificate that this replica serves: follows the Secret, swapped without a restart.

use std::{collections::BTreeMap, sync::Arc};

use api::{ErrorChain, names::WEBHOOK_CERT_SECRET};
use axum_server::tls_rustls::RustlsConfig;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{
    Api, Client,
    runtime::{WatchStreamExt, watcher::watcher},
};
use plan::certs;
use tokio::sync::watch;
use tracing::{info, warn};

use crate::{
    certificate,
    http::Readiness,
    metrics::{Call, Metrics},
    watch::{failed, only},
};

/// Why a certificate is not served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the certificate is not fit to serve")]
    Unfit(#[source] certs::Unfit),
    #[error("the certificate cannot be loaded")]
    Load(#[source] certificate::Error),
}

/// What is served. Once there is a certificate there always is one: a worse one never replaces a good one.
pub struct Served {
    name: String,
    tls: watch::Sender<Option<RustlsConfig>>,
    data: Option<BTreeMap<String, ByteString>>,
    readiness: Arc<Readiness>,
    metrics: Arc<Metrics>,
}

impl Served {
    pub fn new(name: String, readiness: Arc<Readiness>, metrics: Arc<Metrics>) -> Self {
        Self { name, tls: watch::Sender::new(None), data: None, readiness, metrics }
    }

    /// Where the listener finds its certificate as soon as there is one. Later ones arrive in the same configuration.
    pub fn tls(&self) -> watch::Receiver<Option<RustlsConfig>> {
        self.tls.subscribe()
    }

    /// Follows the Secret; ends only when it is dropped.
    pub async fn follow(mut self, client: Client, namespace: String) {
        let metrics = self.metrics.clone();
        let mut secrets = watcher(Api::<Secret>::namespaced(client, &namespace), only(WEBHOOK_CERT_SECRET))
            .default_backoff()
            .inspect_err(|error| failed(&metrics, Call::WatchSecret, error))
            .applied_objects()
            .boxed();
        while let Some(secret) = secrets.next().await {
            let Ok(secret) = secret else { continue };
            if let Err(error) = self.load(&secret.data.unwrap_or_default()) {
                warn!(error = %ErrorChain(&error), "a webhook certificate was left out, the one before it is served on");
            }
        }
    }

    /// Serves what the Secret holds, if it is fit to be served.
    fn load(&mut self, data: &BTreeMap<String, ByteString>) -> Result<(), Error> {
        let serving = [certificate::LEAF, certificate::LEAF_KEY];
        let part: BTreeMap<_, _> =
            serving.iter().filter_map(|key| Some(((*key).to_owned(), data.get(*key)?.clone()))).collect();
        // An authority that joins or leaves changes the Secret, not what is served; before the first leaf there is nothing to serve.
        if self.data.as_ref() == Some(&part) || part.values().all(|bytes| bytes.0.is_empty()) {
            return Ok(());
        }
        let leaf = certificate::read_secret(data).leaf;
        certs::fit(leaf.as_ref(), &self.name).map_err(Error::Unfit)?;
        let config = certificate::server_config(&part).map_err(Error::Load)?;
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
            self.metrics.certificate_expires(leaf.validity.until);
        }
        self.data = Some(part);
        self.readiness.has_certificate();
        info!("serves a new webhook certificate");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use plan::certs::Validity;

    use super::*;

    const NAME: &str = "hook.ns.svc";

    fn served() -> Served {
        Served::new(NAME.to_owned(), Arc::default(), Arc::default())
    }

    fn secret(name: &str) -> BTreeMap<String, ByteString> {
        let validity = Validity::starting(SystemTime::now(), Duration::from_hours(1));
        let authority = certificate::found(validity).unwrap();
        let id = certificate::read_bundle(authority.certificate.as_bytes()).authorities.remove(0).id;
        let leaf = certificate::sign(&id, authority.key.as_bytes(), name.to_owned(), validity).unwrap();
        let parts = [
            (certificate::AUTHORITIES, authority.certificate),
            (certificate::AUTHORITY_KEY, authority.key),
            (certificate::LEAF, leaf.certificate),
            (certificate::LEAF_KEY, leaf.key),
        ];
        parts.map(|(key, text)| (key.to_owned(), ByteString(text.into_bytes()))).into()
    }

    fn ready(served: &Served) -> bool {
        served.readiness.synced();
        served.readiness.state().is_ok()
    }

    #[test]
    fn a_replica_is_ready_with_its_first_certificate_and_swaps_the_next_one_in_place() {
        let mut served = served();
        let tls = served.tls();
        assert!(!ready(&served));
        served.load(&secret(NAME)).unwrap();
        assert!(ready(&served));
        let config = tls.borrow().clone().unwrap();
        let first = config.get_inner();
        served.load(&secret(NAME)).unwrap();
        assert!(!Arc::ptr_eq(&first, &config.get_inner()));
    }

    #[test]
    fn nothing_is_swapped_when_only_the_authorities_changed() {
        let mut served = served();
        let mut data = secret(NAME);
        served.load(&data).unwrap();
        let config = served.tls().borrow().clone().unwrap();
        let first = config.get_inner();
        let bundle = data.get_mut(certificate::AUTHORITIES).unwrap();
        bundle.0.extend(secret(NAME)[certificate::AUTHORITIES].0.clone());
        served.load(&data).unwrap();
        assert!(Arc::ptr_eq(&first, &config.get_inner()));
    }

    #[test]
    fn a_worse_certificate_never_replaces_a_good_one() {
        let mut served = served();
        let good = secret(NAME);
        served.load(&good).unwrap();
        let config = served.tls().borrow().clone().unwrap();
        let first = config.get_inner();
        let with = |key: &str, text: &[u8]| {
            let mut data = good.clone();
            data.insert(key.to_owned(), ByteString(text.to_vec()));
            data
        };
        let other = secret(NAME);
        let bad = [
            secret("bank.example"),
            with(certificate::LEAF, b"junk"),
            with(certificate::LEAF_KEY, b"\xff\xfe"),
            with(certificate::LEAF_KEY, &other[certificate::LEAF_KEY].0),
            with(certificate::LEAF, &other[certificate::LEAF].0),
        ];
        for data in bad {
            assert!(served.load(&data).is_err());
        }
        served.load(&BTreeMap::new()).unwrap();
        assert!(Arc::ptr_eq(&first, &config.get_inner()) && ready(&served));
    }
}
