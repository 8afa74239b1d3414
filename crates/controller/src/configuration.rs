//! The webhook configurations: whom they trust, and making them trust the right ones.

use std::{fmt::Debug, sync::Arc};

use api::CONTROLLER_MANAGER;
use k8s_openapi::{
    ByteString,
    api::admissionregistration::v1::{
        MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
    },
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{Patch, PatchParams},
};
use plan::certs::Bundle;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::{
    call, certificate,
    metrics::{Call, Metrics},
};

/// The name of both configurations.
pub const NAME: &str = "patchbay";

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Validating,
    Mutating,
}

/// One configuration, as far as it concerns its authorities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Configuration {
    pub kind: Kind,
    version: Option<String>,
    webhooks: Vec<(String, Bundle)>,
}

/// Both configurations in the API server.
pub struct Configurations {
    client: Client,
    metrics: Arc<Metrics>,
}

/// The two kinds are the same to us.
trait Hooks: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned {
    const KIND: Kind;

    fn hooks(&self) -> impl Iterator<Item = (&str, &WebhookClientConfig)>;
}

impl Hooks for ValidatingWebhookConfiguration {
    const KIND: Kind = Kind::Validating;

    fn hooks(&self) -> impl Iterator<Item = (&str, &WebhookClientConfig)> {
        self.webhooks.iter().flatten().map(|hook| (hook.name.as_str(), &hook.client_config))
    }
}

impl Hooks for MutatingWebhookConfiguration {
    const KIND: Kind = Kind::Mutating;

    fn hooks(&self) -> impl Iterator<Item = (&str, &WebhookClientConfig)> {
        self.webhooks.iter().flatten().map(|hook| (hook.name.as_str(), &hook.client_config))
    }
}

impl Configurations {
    pub fn new(client: Client, metrics: Arc<Metrics>) -> Self {
        Self { client, metrics }
    }

    /// Those that exist.
    pub async fn read(&self) -> Result<Vec<Configuration>, call::Error> {
        let (validating, mutating) = tokio::try_join!(
            self.read_one::<ValidatingWebhookConfiguration>(),
            self.read_one::<MutatingWebhookConfiguration>()
        )?;
        Ok(validating.into_iter().chain(mutating).collect())
    }

    async fn read_one<K: Hooks>(&self) -> Result<Option<Configuration>, call::Error> {
        let api = Api::<K>::all(self.client.clone());
        let call = api.get_opt(NAME);
        let found = call::within(call::DEADLINE, &self.metrics, Call::WebhookConfiguration, call).await?;
        Ok(found.as_ref().map(configuration))
    }

    /// Makes every webhook of this configuration trust the bundle, unless the configuration has changed since it was read.
    pub async fn publish(&self, configuration: &Configuration, bundle: &Bundle) -> Result<(), call::Error> {
        match configuration.kind {
            Kind::Validating => self.patch::<ValidatingWebhookConfiguration>(configuration, bundle).await,
            Kind::Mutating => self.patch::<MutatingWebhookConfiguration>(configuration, bundle).await,
        }
    }

    async fn patch<K: Hooks>(
        &self,
        configuration: &Configuration,
        bundle: &Bundle,
    ) -> Result<(), call::Error> {
        let api = Api::<K>::all(self.client.clone());
        let patch = Patch::Apply(patch::<K>(configuration, bundle));
        let params = PatchParams::apply(CONTROLLER_MANAGER).force();
        let call = api.patch(NAME, &params, &patch);
        call::within(call::DEADLINE, &self.metrics, Call::WebhookConfiguration, call).await.map(drop)
    }
}

impl Configuration {
    /// Whether every webhook trusts exactly these authorities.
    pub fn trusts(&self, bundle: &Bundle) -> bool {
        self.bundles().all(|trusted| trusted.matches(bundle))
    }

    pub fn bundles(&self) -> impl Iterator<Item = &Bundle> {
        self.webhooks.iter().map(|(_, bundle)| bundle)
    }
}

fn configuration<K: Hooks>(object: &K) -> Configuration {
    let trusted = |config: &WebhookClientConfig| match &config.ca_bundle {
        Some(text) => certificate::read_bundle(&text.0),
        None => Bundle::default(),
    };
    Configuration {
        kind: K::KIND,
        version: object.resource_version(),
        webhooks: object.hooks().map(|(name, config)| (name.to_owned(), trusted(config))).collect(),
    }
}

/// Server-side apply of the one field that is ours; the resourceVersion keeps a leader of yesterday from undoing today's.
fn patch<K: Hooks>(configuration: &Configuration, bundle: &Bundle) -> Value {
    let text = certificate::bundle_pem(bundle.authorities.iter().map(|authority| &authority.id));
    let text = ByteString(text.into_bytes());
    json!({
        "apiVersion": K::api_version(&()),
        "kind": K::kind(&()),
        "metadata": {"name": NAME, "resourceVersion": configuration.version},
        "webhooks": configuration.webhooks.iter().map(|(name, _)| Hook::new(name, &text)).collect::<Vec<_>>(),
    })
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Hook<'a> {
    name: &'a str,
    client_config: Trusted<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Trusted<'a> {
    ca_bundle: &'a ByteString,
}

impl<'a> Hook<'a> {
    fn new(name: &'a str, ca_bundle: &'a ByteString) -> Self {
        Self { name, client_config: Trusted { ca_bundle } }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use k8s_openapi::api::admissionregistration::v1::ValidatingWebhook;
    use plan::certs::Validity;

    use super::*;

    fn hook(name: &str, trusted: Option<&str>) -> ValidatingWebhook {
        let ca_bundle = trusted.map(|text| ByteString(text.as_bytes().to_vec()));
        let client_config = WebhookClientConfig { ca_bundle, ..WebhookClientConfig::default() };
        ValidatingWebhook { name: name.to_owned(), client_config, ..ValidatingWebhook::default() }
    }

    fn read(hooks: Vec<ValidatingWebhook>) -> Configuration {
        let mut object = ValidatingWebhookConfiguration { webhooks: Some(hooks), ..Default::default() };
        object.metadata.resource_version = Some("7".to_owned());
        configuration(&object)
    }

    fn pem() -> String {
        certificate::found(Validity::starting(SystemTime::now(), Duration::from_mins(1))).unwrap().certificate
    }

    #[test]
    fn a_configuration_trusts_a_bundle_when_each_of_its_webhooks_does() {
        let (ours, other) = (pem(), pem());
        let bundle = certificate::read_bundle(ours.as_bytes());
        assert!(read(vec![hook("a", Some(&ours)), hook("b", Some(&ours))]).trusts(&bundle));
        assert!(read(vec![]).trusts(&bundle));
        for wrong in [None, Some(""), Some("junk"), Some(&other), Some(&(ours.clone() + &other))] {
            let wrong = wrong.map(str::to_owned);
            let configuration = read(vec![hook("a", Some(&ours)), hook("b", wrong.as_deref())]);
            assert!(!configuration.trusts(&bundle), "{wrong:?}");
        }
    }

    #[test]
    fn only_the_bundle_of_each_webhook_is_applied_and_only_to_what_was_read() {
        let bundle = certificate::read_bundle(pem().as_bytes());
        let applied = patch::<ValidatingWebhookConfiguration>(&read(vec![hook("a", None)]), &bundle);
        let text = certificate::bundle_pem([&bundle.authorities[0].id]);
        assert_eq!(
            applied,
            json!({
                "apiVersion": "admissionregistration.k8s.io/v1",
                "kind": "ValidatingWebhookConfiguration",
                "metadata": {"name": "patchbay", "resourceVersion": "7"},
                "webhooks": [{"name": "a", "clientConfig": {"caBundle": ByteString(text.into_bytes())}}],
            })
        );
    }
}
