//! The CA bundles in the webhook configurations: reads and patches them.
//!
//! Only webhooks that call our Service are ours; other webhooks in a configuration are not changed.
//!
//! A configuration that does not exist holds up no rotation: no API server calls the webhook because of it. Once it is
//! created, its watch triggers a reconcile, which writes the bundle into it before any other certificate is signed.

use std::{
    fmt::{self, Debug, Display},
    sync::Arc,
};

use api::{CONTROLLER_FIELD_MANAGER, names::WEBHOOK_CONFIGURATION};
use client::{
    fence::LeaseFence,
    request::{self, ApiCall},
};
use futures::future::try_join_all;
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
use plan::certs::CaBundle;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use super::{rotate::WebhookService, x509};
use crate::metrics::{ApiCallKind, Metrics};

/// All configurations that trust the webhook's certificates.
///
/// A capability that needs one more adds it here, to the manifests, and to the rules of the controller's ClusterRole:
/// get, list, watch and patch of the resource, restricted to the name.
pub const CONFIGURATIONS: &[WebhookConfiguration] =
    &[WebhookConfiguration { kind: ConfigurationKind::Validating, name: WEBHOOK_CONFIGURATION }];

/// A webhook configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WebhookConfiguration {
    pub kind: ConfigurationKind,
    pub name: &'static str,
}

/// The kind of a webhook configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigurationKind {
    Validating,
    #[cfg_attr(not(test), expect(dead_code, reason = "no capability mutates yet"))]
    Mutating,
}

impl Display for WebhookConfiguration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            ConfigurationKind::Validating => ValidatingWebhookConfiguration::kind(&()),
            ConfigurationKind::Mutating => MutatingWebhookConfiguration::kind(&()),
        };
        write!(f, "{kind} {}", self.name)
    }
}

/// The CA bundle of each of our webhooks in one configuration, and the resourceVersion they were read at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedBundles {
    configuration: WebhookConfiguration,
    resource_version: Option<String>,
    webhooks: Vec<(String, CaBundle)>,
}

/// Reads and patches the webhook configurations for the leader.
pub struct CaBundlePatcher {
    client: Client,
    service: WebhookService,
    configurations: &'static [WebhookConfiguration],
    call: ApiCall,
}

/// What both kinds of configurations have in common.
trait ConfigurationObject: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned {
    /// The name of each webhook and how API servers call it.
    fn webhooks(&self) -> impl Iterator<Item = (&str, &WebhookClientConfig)>;
}

impl ConfigurationObject for ValidatingWebhookConfiguration {
    fn webhooks(&self) -> impl Iterator<Item = (&str, &WebhookClientConfig)> {
        self.webhooks.iter().flatten().map(|hook| (hook.name.as_str(), &hook.client_config))
    }
}

impl ConfigurationObject for MutatingWebhookConfiguration {
    fn webhooks(&self) -> impl Iterator<Item = (&str, &WebhookClientConfig)> {
        self.webhooks.iter().flatten().map(|hook| (hook.name.as_str(), &hook.client_config))
    }
}

impl CaBundlePatcher {
    pub fn new(
        client: Client,
        service: WebhookService,
        configurations: &'static [WebhookConfiguration],
        metrics: Arc<Metrics>,
        fence: LeaseFence,
    ) -> Self {
        let call = metrics.api_call(ApiCallKind::WebhookConfiguration).fenced(fence);
        Self { client, service, configurations, call }
    }

    /// The configurations that exist.
    pub async fn read(&self) -> Result<Vec<PublishedBundles>, request::Error> {
        let all = self.configurations.iter().map(async |configuration| match configuration.kind {
            ConfigurationKind::Validating => {
                self.read_one::<ValidatingWebhookConfiguration>(*configuration).await
            }
            ConfigurationKind::Mutating => {
                self.read_one::<MutatingWebhookConfiguration>(*configuration).await
            }
        });
        Ok(try_join_all(all).await?.into_iter().flatten().collect())
    }

    async fn read_one<K: ConfigurationObject>(
        &self,
        configuration: WebhookConfiguration,
    ) -> Result<Option<PublishedBundles>, request::Error> {
        let api = Api::<K>::all(self.client.clone());
        let object = self.call.read(api.get_opt(configuration.name)).await?;
        Ok(object.map(|object| published_bundles(configuration, &object, &self.service)))
    }

    /// Writes the bundle into every webhook of ours in one configuration, unless the configuration has changed since it
    /// was read.
    pub async fn publish(
        &self,
        published: &PublishedBundles,
        bundle: &CaBundle,
    ) -> Result<(), request::Error> {
        match published.configuration.kind {
            ConfigurationKind::Validating => {
                self.publish_one::<ValidatingWebhookConfiguration>(published, bundle).await
            }
            ConfigurationKind::Mutating => {
                self.publish_one::<MutatingWebhookConfiguration>(published, bundle).await
            }
        }
    }

    async fn publish_one<K: ConfigurationObject>(
        &self,
        published: &PublishedBundles,
        bundle: &CaBundle,
    ) -> Result<(), request::Error> {
        let api = Api::<K>::all(self.client.clone());
        let patch = Patch::Apply(patch::<K>(published, bundle));
        let params = PatchParams::apply(CONTROLLER_FIELD_MANAGER).force();
        self.call.change(api.patch(published.configuration.name, &params, &patch)).await.map(drop)
    }
}

impl PublishedBundles {
    pub fn configuration(&self) -> WebhookConfiguration {
        self.configuration
    }

    /// The bundle of each webhook.
    pub fn bundles(&self) -> impl Iterator<Item = &CaBundle> {
        self.webhooks.iter().map(|(_, bundle)| bundle)
    }
}

fn published_bundles<K: ConfigurationObject>(
    configuration: WebhookConfiguration,
    object: &K,
    service: &WebhookService,
) -> PublishedBundles {
    let bundle = |config: &WebhookClientConfig| match &config.ca_bundle {
        Some(text) => x509::parse_bundle(&text.0),
        None => CaBundle::default(),
    };
    let webhooks = object.webhooks().filter(|(_, config)| calls_service(config, service));
    PublishedBundles {
        configuration,
        resource_version: object.resource_version(),
        webhooks: webhooks.map(|(name, config)| (name.to_owned(), bundle(config))).collect(),
    }
}

fn calls_service(config: &WebhookClientConfig, service: &WebhookService) -> bool {
    let reference = config.service.as_ref();
    reference.is_some_and(|it| it.namespace == service.namespace && it.name == service.name)
}

/// Server-side apply of the one field that we own; the resourceVersion fences writes of a former leader.
fn patch<K: Resource<DynamicType = ()>>(published: &PublishedBundles, bundle: &CaBundle) -> Value {
    let pem = x509::bundle_pem(bundle.cas.iter().map(|ca| &ca.id));
    let pem = ByteString(pem.into_bytes());
    json!({
        "apiVersion": K::api_version(&()),
        "kind": K::kind(&()),
        "metadata": {"name": published.configuration.name, "resourceVersion": published.resource_version},
        "webhooks": published.webhooks.iter().map(|(name, _)| WebhookPatch::new(name, &pem)).collect::<Vec<_>>(),
    })
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct WebhookPatch<'a> {
    name: &'a str,
    client_config: ClientConfigPatch<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ClientConfigPatch<'a> {
    ca_bundle: &'a ByteString,
}

impl<'a> WebhookPatch<'a> {
    fn new(name: &'a str, ca_bundle: &'a ByteString) -> Self {
        Self { name, client_config: ClientConfigPatch { ca_bundle } }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use k8s_openapi::api::admissionregistration::v1::{MutatingWebhook, ServiceReference, ValidatingWebhook};
    use plan::certs::Validity;

    use super::*;

    fn service() -> WebhookService {
        WebhookService { namespace: "ns".to_owned(), name: "hook".to_owned() }
    }

    fn client_config(service: Option<(&str, &str)>, ca_bundle: Option<&str>) -> WebhookClientConfig {
        let service = service.map(|(namespace, name)| ServiceReference {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            ..ServiceReference::default()
        });
        let ca_bundle = ca_bundle.map(|text| ByteString(text.as_bytes().to_vec()));
        WebhookClientConfig { ca_bundle, service, ..WebhookClientConfig::default() }
    }

    fn hook(name: &str, service: Option<(&str, &str)>, ca_bundle: Option<&str>) -> ValidatingWebhook {
        let client_config = client_config(service, ca_bundle);
        ValidatingWebhook { name: name.to_owned(), client_config, ..ValidatingWebhook::default() }
    }

    fn read(hooks: Vec<ValidatingWebhook>) -> PublishedBundles {
        let mut object = ValidatingWebhookConfiguration { webhooks: Some(hooks), ..Default::default() };
        object.metadata.resource_version = Some("7".to_owned());
        published_bundles(CONFIGURATIONS[0], &object, &service())
    }

    fn bundle() -> CaBundle {
        let validity = Validity::starting_at(SystemTime::now(), Duration::from_mins(1));
        x509::parse_bundle(x509::create_ca(validity).unwrap().certificate.as_bytes())
    }

    #[test]
    fn only_webhooks_that_call_our_service_are_ours() {
        let published = read(vec![
            hook("other-name", Some(("ns", "other")), None),
            hook("ours", Some(("ns", "hook")), Some("junk")),
            hook("other-namespace", Some(("other", "hook")), None),
            hook("url", None, None),
        ]);
        let junk = x509::parse_bundle(b"junk");
        assert_eq!(published.webhooks, [("ours".to_owned(), junk)]);
    }

    #[test]
    fn only_the_bundles_of_our_webhooks_are_applied_at_the_version_that_was_read() {
        let bundle = bundle();
        let hooks = vec![hook("a", Some(("ns", "hook")), None), hook("foreign", None, None)];
        let applied = patch::<ValidatingWebhookConfiguration>(&read(hooks), &bundle);
        let text = x509::bundle_pem([&bundle.cas[0].id]);
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

    #[test]
    fn a_mutating_configuration_is_read_and_patched_as_a_validating_one() {
        let hook = |name: &str, service| MutatingWebhook {
            name: name.to_owned(),
            client_config: client_config(service, None),
            ..MutatingWebhook::default()
        };
        let hooks = vec![hook("a", Some(("ns", "hook"))), hook("foreign", None)];
        let mut object = MutatingWebhookConfiguration { webhooks: Some(hooks), ..Default::default() };
        object.metadata.resource_version = Some("8".to_owned());
        let configuration = WebhookConfiguration { kind: ConfigurationKind::Mutating, name: "pods" };
        let published = published_bundles(configuration, &object, &service());
        let bundle = bundle();
        let text = x509::bundle_pem([&bundle.cas[0].id]);
        assert_eq!(
            patch::<MutatingWebhookConfiguration>(&published, &bundle),
            json!({
                "apiVersion": "admissionregistration.k8s.io/v1",
                "kind": "MutatingWebhookConfiguration",
                "metadata": {"name": "pods", "resourceVersion": "8"},
                "webhooks": [{"name": "a", "clientConfig": {"caBundle": ByteString(text.into_bytes())}}],
            })
        );
    }
}
