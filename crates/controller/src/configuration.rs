//! The webhook configuration: whom it trusts, and making it trust the right ones.
//!
//! Only webhooks that call our Service are ours; what else somebody put into the configuration is left alone.

use std::sync::Arc;

use api::{CONTROLLER_FIELD_MANAGER, names::WEBHOOK_CONFIGURATION};
use k8s_openapi::{
    ByteString,
    api::admissionregistration::v1::{ValidatingWebhookConfiguration, WebhookClientConfig},
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{Patch, PatchParams},
};
use plan::certs::Bundle;
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    authority::Home,
    call::{self, Line},
    certificate,
    metrics::{Call, Metrics},
    tenure::Tenure,
};

/// The configuration, as far as it concerns our webhooks and their authorities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Configuration {
    version: Option<String>,
    webhooks: Vec<(String, Bundle)>,
}

/// The configuration in the API server, in the leader's hands.
pub struct Registration {
    api: Api<ValidatingWebhookConfiguration>,
    home: Home,
    line: Line,
}

impl Registration {
    pub fn new(client: Client, home: Home, metrics: Arc<Metrics>, tenure: Tenure) -> Self {
        let line = Line::of_leader(metrics, Call::WebhookConfiguration, tenure);
        Self { api: Api::all(client), home, line }
    }

    /// It need not exist.
    pub async fn read(&self) -> Result<Option<Configuration>, call::Error> {
        let found = self.line.read(self.api.get_opt(WEBHOOK_CONFIGURATION)).await?;
        Ok(found.map(|object| configuration(&object, &self.home)))
    }

    /// Makes every webhook of ours trust the bundle, unless the configuration has changed since it was read.
    pub async fn publish(&self, configuration: &Configuration, bundle: &Bundle) -> Result<(), call::Error> {
        let patch = Patch::Apply(patch(configuration, bundle));
        let params = PatchParams::apply(CONTROLLER_FIELD_MANAGER).force();
        self.line.change(self.api.patch(WEBHOOK_CONFIGURATION, &params, &patch)).await.map(drop)
    }
}

impl Configuration {
    /// The bundle of each webhook.
    pub fn bundles(&self) -> impl Iterator<Item = &Bundle> {
        self.webhooks.iter().map(|(_, bundle)| bundle)
    }
}

fn configuration(object: &ValidatingWebhookConfiguration, home: &Home) -> Configuration {
    let trusted = |config: &WebhookClientConfig| match &config.ca_bundle {
        Some(text) => certificate::read_bundle(&text.0),
        None => Bundle::default(),
    };
    let webhooks = object.webhooks.iter().flatten().filter(|hook| calls(&hook.client_config, home));
    Configuration {
        version: object.resource_version(),
        webhooks: webhooks.map(|hook| (hook.name.clone(), trusted(&hook.client_config))).collect(),
    }
}

fn calls(config: &WebhookClientConfig, home: &Home) -> bool {
    let service = config.service.as_ref();
    service.is_some_and(|it| it.namespace == home.namespace && it.name == home.service)
}

/// Server-side apply of the one field that is ours; the resourceVersion keeps a leader of yesterday from undoing today's.
fn patch(configuration: &Configuration, bundle: &Bundle) -> Value {
    let text = certificate::bundle_pem(bundle.authorities.iter().map(|authority| &authority.id));
    let text = ByteString(text.into_bytes());
    json!({
        "apiVersion": ValidatingWebhookConfiguration::api_version(&()),
        "kind": ValidatingWebhookConfiguration::kind(&()),
        "metadata": {"name": WEBHOOK_CONFIGURATION, "resourceVersion": configuration.version},
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

    use k8s_openapi::api::admissionregistration::v1::{ServiceReference, ValidatingWebhook};
    use plan::certs::Validity;

    use super::*;

    fn home() -> Home {
        Home { namespace: "ns".to_owned(), service: "hook".to_owned() }
    }

    fn hook(name: &str, service: Option<(&str, &str)>, trusted: Option<&str>) -> ValidatingWebhook {
        let service = service.map(|(namespace, name)| ServiceReference {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            ..ServiceReference::default()
        });
        let ca_bundle = trusted.map(|text| ByteString(text.as_bytes().to_vec()));
        let client_config = WebhookClientConfig { ca_bundle, service, ..WebhookClientConfig::default() };
        ValidatingWebhook { name: name.to_owned(), client_config, ..ValidatingWebhook::default() }
    }

    fn read(hooks: Vec<ValidatingWebhook>) -> Configuration {
        let mut object = ValidatingWebhookConfiguration { webhooks: Some(hooks), ..Default::default() };
        object.metadata.resource_version = Some("7".to_owned());
        configuration(&object, &home())
    }

    fn bundle() -> Bundle {
        let validity = Validity::starting(SystemTime::now(), Duration::from_mins(1));
        certificate::read_bundle(certificate::found(validity).unwrap().certificate.as_bytes())
    }

    #[test]
    fn only_webhooks_that_call_our_service_are_ours() {
        let configuration = read(vec![
            hook("other-name", Some(("ns", "other")), None),
            hook("ours", Some(("ns", "hook")), Some("junk")),
            hook("other-namespace", Some(("other", "hook")), None),
            hook("url", None, None),
        ]);
        let junk = certificate::read_bundle(b"junk");
        assert_eq!(configuration.webhooks, [("ours".to_owned(), junk)]);
    }

    #[test]
    fn only_the_bundle_of_each_webhook_is_applied_and_only_to_what_was_read() {
        let bundle = bundle();
        let hooks = vec![hook("a", Some(("ns", "hook")), None), hook("theirs", None, None)];
        let applied = patch(&read(hooks), &bundle);
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
