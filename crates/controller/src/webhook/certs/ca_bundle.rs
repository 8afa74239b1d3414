//! The CA bundles in the webhook configuration: reads and patches them.
//!
//! Only webhooks that call our Service are ours; other webhooks in the configuration are not changed.

use std::sync::Arc;

use api::{CONTROLLER_FIELD_MANAGER, names::WEBHOOK_CONFIGURATION};
use client::{
    fence::LeaseFence,
    request::{self, ApiCall},
};
use k8s_openapi::{
    ByteString,
    api::admissionregistration::v1::{ValidatingWebhookConfiguration, WebhookClientConfig},
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{Patch, PatchParams},
};
use plan::certs::CaBundle;
use serde::Serialize;
use serde_json::{Value, json};

use super::{rotate::WebhookService, x509};
use crate::metrics::{ApiCallKind, Metrics};

/// The CA bundle of each of our webhooks, and the resourceVersion they were read at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedBundles {
    resource_version: Option<String>,
    webhooks: Vec<(String, CaBundle)>,
}

/// Reads and patches the webhook configuration for the leader.
pub struct CaBundlePatcher {
    api: Api<ValidatingWebhookConfiguration>,
    service: WebhookService,
    call: ApiCall,
}

impl CaBundlePatcher {
    pub fn new(client: Client, service: WebhookService, metrics: Arc<Metrics>, fence: LeaseFence) -> Self {
        let call = metrics.api_call(ApiCallKind::WebhookConfiguration).fenced(fence);
        Self { api: Api::all(client), service, call }
    }

    /// `None` if the configuration does not exist.
    pub async fn read(&self) -> Result<Option<PublishedBundles>, request::Error> {
        let object = self.call.read(self.api.get_opt(WEBHOOK_CONFIGURATION)).await?;
        Ok(object.map(|object| published_bundles(&object, &self.service)))
    }

    /// Writes the bundle into every webhook of ours, unless the configuration has changed since it was read.
    pub async fn publish(
        &self,
        published: &PublishedBundles,
        bundle: &CaBundle,
    ) -> Result<(), request::Error> {
        let patch = Patch::Apply(patch(published, bundle));
        let params = PatchParams::apply(CONTROLLER_FIELD_MANAGER).force();
        self.call.change(self.api.patch(WEBHOOK_CONFIGURATION, &params, &patch)).await.map(drop)
    }
}

impl PublishedBundles {
    /// The bundle of each webhook.
    pub fn bundles(&self) -> impl Iterator<Item = &CaBundle> {
        self.webhooks.iter().map(|(_, bundle)| bundle)
    }
}

fn published_bundles(object: &ValidatingWebhookConfiguration, service: &WebhookService) -> PublishedBundles {
    let bundle = |config: &WebhookClientConfig| match &config.ca_bundle {
        Some(text) => x509::parse_bundle(&text.0),
        None => CaBundle::default(),
    };
    let webhooks =
        object.webhooks.iter().flatten().filter(|hook| calls_service(&hook.client_config, service));
    PublishedBundles {
        resource_version: object.resource_version(),
        webhooks: webhooks.map(|hook| (hook.name.clone(), bundle(&hook.client_config))).collect(),
    }
}

fn calls_service(config: &WebhookClientConfig, service: &WebhookService) -> bool {
    let reference = config.service.as_ref();
    reference.is_some_and(|it| it.namespace == service.namespace && it.name == service.name)
}

/// Server-side apply of the one field that we own; the resourceVersion fences writes of a former leader.
fn patch(published: &PublishedBundles, bundle: &CaBundle) -> Value {
    let pem = x509::bundle_pem(bundle.cas.iter().map(|ca| &ca.id));
    let pem = ByteString(pem.into_bytes());
    json!({
        "apiVersion": ValidatingWebhookConfiguration::api_version(&()),
        "kind": ValidatingWebhookConfiguration::kind(&()),
        "metadata": {"name": WEBHOOK_CONFIGURATION, "resourceVersion": published.resource_version},
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

    use k8s_openapi::api::admissionregistration::v1::{ServiceReference, ValidatingWebhook};
    use plan::certs::Validity;

    use super::*;

    fn service() -> WebhookService {
        WebhookService { namespace: "ns".to_owned(), name: "hook".to_owned() }
    }

    fn hook(name: &str, service: Option<(&str, &str)>, ca_bundle: Option<&str>) -> ValidatingWebhook {
        let service = service.map(|(namespace, name)| ServiceReference {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            ..ServiceReference::default()
        });
        let ca_bundle = ca_bundle.map(|text| ByteString(text.as_bytes().to_vec()));
        let client_config = WebhookClientConfig { ca_bundle, service, ..WebhookClientConfig::default() };
        ValidatingWebhook { name: name.to_owned(), client_config, ..ValidatingWebhook::default() }
    }

    fn read(hooks: Vec<ValidatingWebhook>) -> PublishedBundles {
        let mut object = ValidatingWebhookConfiguration { webhooks: Some(hooks), ..Default::default() };
        object.metadata.resource_version = Some("7".to_owned());
        published_bundles(&object, &service())
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
        let applied = patch(&read(hooks), &bundle);
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
}
