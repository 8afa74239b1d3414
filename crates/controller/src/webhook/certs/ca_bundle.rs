//! The webhook configurations: reads them, writes the CA bundles into them, and creates the one of launcher pods.
//!
//! Only webhooks that call our Service are ours; other webhooks in a configuration are not changed.
//!
//! A configuration that does not exist holds up no rotation: no API server calls the webhook because of it. The manifests
//! create the ValidatingWebhookConfiguration; its watch triggers a reconcile, which writes the bundle into it before any
//! other certificate is signed. The leader creates the MutatingWebhookConfiguration, with the bundle in it.

use std::{
    fmt::{self, Debug, Display},
    sync::Arc,
};

use api::{CONTROLLER_FIELD_MANAGER, names::WEBHOOK_CONFIGURATION};
use client::{
    fence::LeaseFence,
    request::{self, ApiCall},
};
use k8s_openapi::{
    ByteString,
    api::admissionregistration::v1::{
        MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
    },
    apimachinery::pkg::apis::meta::v1::OwnerReference,
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{Patch, PatchParams, PostParams},
};
use plan::certs::CaBundle;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use super::{rotate::WebhookService, x509};
use crate::{
    metrics::{ApiCallKind, Metrics},
    webhook::pod_configuration,
};

/// The kind of a webhook configuration. The name of both is [`WEBHOOK_CONFIGURATION`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigurationKind {
    Validating,
    Mutating,
}

impl Display for ConfigurationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Self::Validating => ValidatingWebhookConfiguration::kind(&()),
            Self::Mutating => MutatingWebhookConfiguration::kind(&()),
        };
        write!(f, "{kind} {WEBHOOK_CONFIGURATION}")
    }
}

/// The webhook configurations that exist.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PublishedConfigurations {
    pub validating: Option<PublishedBundles>,
    pub mutating: Option<PublishedBundles>,
    /// The owner of the MutatingWebhookConfiguration. `None` if the ValidatingWebhookConfiguration does not exist.
    owner: Option<OwnerReference>,
}

/// The CA bundle of each of our webhooks in one configuration, and the resourceVersion they were read at.
#[derive(Clone, Debug, PartialEq)]
pub struct PublishedBundles {
    kind: ConfigurationKind,
    resource_version: Option<String>,
    webhooks: Vec<(String, CaBundle)>,
    /// The fields besides the CA bundles that the leader sets. `None` if the manifests set them.
    desired: Option<Box<MutatingWebhookConfiguration>>,
    has_drifted: bool,
}

/// Reads and writes the webhook configurations for the leader.
pub struct CaBundlePatcher {
    client: Client,
    service: WebhookService,
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
    pub fn new(client: Client, service: WebhookService, metrics: Arc<Metrics>, fence: LeaseFence) -> Self {
        let call = metrics.api_call(ApiCallKind::WebhookConfiguration).fenced(fence);
        Self { client, service, call }
    }

    /// The configurations that exist.
    pub async fn read(&self) -> Result<PublishedConfigurations, request::Error> {
        let (validating, mutating) = tokio::try_join!(
            self.read_one::<ValidatingWebhookConfiguration>(),
            self.read_one::<MutatingWebhookConfiguration>()
        )?;
        Ok(published_configurations(validating.as_ref(), mutating.as_ref(), &self.service))
    }

    async fn read_one<K: ConfigurationObject>(&self) -> Result<Option<K>, request::Error> {
        let api = Api::<K>::all(self.client.clone());
        self.call.read(api.get_opt(WEBHOOK_CONFIGURATION)).await
    }

    /// Writes the bundle into every webhook of ours in one configuration, and repairs the fields that the leader sets,
    /// unless the configuration has changed since it was read.
    pub async fn publish(
        &self,
        published: &PublishedBundles,
        bundle: &CaBundle,
    ) -> Result<(), request::Error> {
        match published.kind {
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
        self.call.change(api.patch(WEBHOOK_CONFIGURATION, &params, &patch)).await.map(drop)
    }

    /// Creates the MutatingWebhookConfiguration if it is absent. Without its owner it is not created: the garbage collector
    /// would not delete it when Patchbay is removed. Returns whether it was created.
    pub async fn create_absent(
        &self,
        published: &PublishedConfigurations,
        bundle: &CaBundle,
    ) -> Result<bool, request::Error> {
        let (None, Some(owner)) = (&published.mutating, &published.owner) else { return Ok(false) };
        let mut object = pod_configuration::configuration(&self.service, Some(owner.clone()));
        for webhook in object.webhooks.iter_mut().flatten() {
            webhook.client_config.ca_bundle = Some(pem(bundle));
        }
        let params =
            PostParams { field_manager: Some(CONTROLLER_FIELD_MANAGER.to_owned()), ..PostParams::default() };
        let api = Api::<MutatingWebhookConfiguration>::all(self.client.clone());
        self.call.create(api.create(&params, &object)).await.map(|_| true)
    }
}

impl PublishedConfigurations {
    pub fn existing(&self) -> impl Iterator<Item = &PublishedBundles> {
        self.validating.iter().chain(&self.mutating)
    }
}

impl PublishedBundles {
    pub fn kind(&self) -> ConfigurationKind {
        self.kind
    }

    /// The bundle of each webhook.
    pub fn bundles(&self) -> impl Iterator<Item = &CaBundle> {
        self.webhooks.iter().map(|(_, bundle)| bundle)
    }

    /// Whether a field besides the CA bundles that the leader sets was changed.
    pub fn has_drifted(&self) -> bool {
        self.has_drifted
    }
}

fn published_configurations(
    validating: Option<&ValidatingWebhookConfiguration>,
    mutating: Option<&MutatingWebhookConfiguration>,
    service: &WebhookService,
) -> PublishedConfigurations {
    let owner = validating.and_then(ResourceExt::uid).map(pod_configuration::owner);
    let of_mutating = |object: &MutatingWebhookConfiguration| {
        // If the owner is gone, the reference to it stays, so that the garbage collector deletes the object.
        let owner = owner.clone().or_else(|| pod_configuration::owner_of(object));
        let desired = pod_configuration::configuration(service, owner);
        PublishedBundles {
            has_drifted: pod_configuration::has_drifted(object, &desired),
            desired: Some(Box::new(desired)),
            ..published_bundles(ConfigurationKind::Mutating, object, service)
        }
    };
    PublishedConfigurations {
        validating: validating
            .map(|object| published_bundles(ConfigurationKind::Validating, object, service)),
        mutating: mutating.map(of_mutating),
        owner,
    }
}

fn published_bundles<K: ConfigurationObject>(
    kind: ConfigurationKind,
    object: &K,
    service: &WebhookService,
) -> PublishedBundles {
    let bundle = |config: &WebhookClientConfig| match &config.ca_bundle {
        Some(text) => x509::parse_bundle(&text.0),
        None => CaBundle::default(),
    };
    let webhooks = object.webhooks().filter(|(_, config)| calls_service(config, service));
    PublishedBundles {
        kind,
        resource_version: object.resource_version(),
        webhooks: webhooks.map(|(name, config)| (name.to_owned(), bundle(config))).collect(),
        desired: None,
        has_drifted: false,
    }
}

fn calls_service(config: &WebhookClientConfig, service: &WebhookService) -> bool {
    let reference = config.service.as_ref();
    reference.is_some_and(|it| it.namespace == service.namespace && it.name == service.name)
}

fn pem(bundle: &CaBundle) -> ByteString {
    ByteString(x509::bundle_pem(bundle.cas.iter().map(|ca| &ca.id)).into_bytes())
}

/// Server-side apply of all fields that we own; the resourceVersion fences writes of a former leader.
fn patch<K: Resource<DynamicType = ()>>(published: &PublishedBundles, bundle: &CaBundle) -> Value {
    let pem = pem(bundle);
    let mut webhooks: Vec<Value> = Vec::new();
    let mut metadata = json!({"name": WEBHOOK_CONFIGURATION});
    if let Some(desired) = &published.desired {
        metadata = json!(desired.metadata);
        let desired = desired.webhooks.iter().flatten();
        webhooks.extend(desired.map(|webhook| {
            let mut webhook = webhook.clone();
            webhook.client_config.ca_bundle = Some(pem.clone());
            json!(webhook)
        }));
    }
    metadata["resourceVersion"] = json!(published.resource_version);
    for (name, _) in &published.webhooks {
        if !webhooks.iter().any(|webhook| webhook["name"] == **name) {
            webhooks.push(json!(WebhookPatch::new(name, &pem)));
        }
    }
    json!({
        "apiVersion": K::api_version(&()),
        "kind": K::kind(&()),
        "metadata": metadata,
        "webhooks": webhooks,
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
        published_bundles(ConfigurationKind::Validating, &object, &service())
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
    fn a_mutating_configuration_is_applied_whole_with_other_webhooks_of_our_service() {
        let hook = |name: &str, service| MutatingWebhook {
            name: name.to_owned(),
            client_config: client_config(service, None),
            ..MutatingWebhook::default()
        };
        let hooks = vec![hook("a", Some(("ns", "hook"))), hook("foreign", None)];
        let mut object = MutatingWebhookConfiguration { webhooks: Some(hooks), ..Default::default() };
        object.metadata.resource_version = Some("8".to_owned());
        let mut validating = ValidatingWebhookConfiguration::default();
        validating.metadata.uid = Some("u".to_owned());
        let all = published_configurations(Some(&validating), Some(&object), &service());
        let published = all.mutating.unwrap();
        assert!(published.has_drifted());
        let bundle = bundle();
        let pem = pem(&bundle);
        let mut desired =
            pod_configuration::configuration(&service(), Some(pod_configuration::owner("u".to_owned())));
        desired.metadata.resource_version = Some("8".to_owned());
        desired.webhooks.as_mut().unwrap()[0].client_config.ca_bundle = Some(pem.clone());
        let mut expected = json!(desired);
        expected["webhooks"]
            .as_array_mut()
            .unwrap()
            .push(json!({"name": "a", "clientConfig": {"caBundle": pem}}));
        assert_eq!(patch::<MutatingWebhookConfiguration>(&published, &bundle), expected);
    }

    /// A webhook that fails closed must not outlive the controllers.
    #[test]
    fn a_mutating_configuration_keeps_the_reference_to_an_owner_that_is_gone() {
        let owner = pod_configuration::owner("gone".to_owned());
        let object = pod_configuration::configuration(&service(), Some(owner.clone()));
        let all = published_configurations(None, Some(&object), &service());
        let published = all.mutating.unwrap();
        assert!(!published.has_drifted());
        let applied = patch::<MutatingWebhookConfiguration>(&published, &bundle());
        assert_eq!(applied["metadata"]["ownerReferences"], json!([owner]));
    }
}
