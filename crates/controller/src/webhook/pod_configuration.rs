//! The MutatingWebhookConfiguration that adds the IPAMClaims of a virtual machine to its launcher pods.
//!
//! Its webhook fails closed, so it must exist only while controllers serve it. The leader creates it, with the CA bundle,
//! once the serving certificate is signed: the manifests do not have it, because an install or an upgrade whose controllers
//! never start would reject every launcher pod. It is owned by the ValidatingWebhookConfiguration of the manifests, so that
//! the garbage collector deletes it when Patchbay is removed.

use api::{
    labels,
    names::{MUTATE_POD, WEBHOOK_CONFIGURATION},
    selection::NETWORKS_ANNOTATION,
};
use k8s_openapi::{
    api::admissionregistration::v1::{
        MatchCondition, MutatingWebhook, MutatingWebhookConfiguration, RuleWithOperations, ServiceReference,
        ValidatingWebhookConfiguration, WebhookClientConfig,
    },
    apimachinery::pkg::apis::meta::v1::{LabelSelector, OwnerReference},
};
use kube::{Resource as _, api::ObjectMeta};
use serde_json::Value;

use super::certs::rotate::WebhookService;

/// The name in ipam-extensions, whose place it takes.
const WEBHOOK: &str = "ipam-claims.k8s.cni.cncf.io";
/// The port of the webhook's Service.
const SERVICE_PORT: i32 = 443;

/// The configuration without a CA bundle.
pub fn configuration(
    service: &WebhookService,
    owner: Option<OwnerReference>,
) -> MutatingWebhookConfiguration {
    let webhook = MutatingWebhook {
        name: WEBHOOK.to_owned(),
        admission_review_versions: vec!["v1".to_owned()],
        client_config: WebhookClientConfig {
            service: Some(ServiceReference {
                name: service.name.clone(),
                namespace: service.namespace.clone(),
                path: Some(MUTATE_POD.to_owned()),
                port: Some(SERVICE_PORT),
            }),
            ..WebhookClientConfig::default()
        },
        // Without its claim a virtual machine would start with another address.
        failure_policy: Some("Fail".to_owned()),
        match_conditions: Some(vec![has_networks(), networks_change()]),
        match_policy: Some("Equivalent".to_owned()),
        object_selector: Some(LabelSelector {
            match_labels: Some([("kubevirt.io".to_owned(), "virt-launcher".to_owned())].into()),
            ..LabelSelector::default()
        }),
        reinvocation_policy: Some("Never".to_owned()),
        rules: Some(vec![pod_rule()]),
        side_effects: "None".to_owned(),
        timeout_seconds: Some(5),
        ..MutatingWebhook::default()
    };
    MutatingWebhookConfiguration {
        metadata: ObjectMeta {
            name: Some(WEBHOOK_CONFIGURATION.to_owned()),
            labels: Some(labels::labels("controller")),
            owner_references: owner.map(|owner| vec![owner]),
            ..ObjectMeta::default()
        },
        webhooks: Some(vec![webhook]),
    }
}

/// The reference to the ValidatingWebhookConfiguration of this UID. It does not block the deletion of the owner: where the
/// admission plugin OwnerReferencesPermissionEnforcement is enabled, that would need another right.
pub fn owner(uid: String) -> OwnerReference {
    OwnerReference {
        api_version: ValidatingWebhookConfiguration::api_version(&()).into_owned(),
        kind: ValidatingWebhookConfiguration::kind(&()).into_owned(),
        name: WEBHOOK_CONFIGURATION.to_owned(),
        uid,
        ..OwnerReference::default()
    }
}

/// The reference to a ValidatingWebhookConfiguration of ours that the object has.
pub fn owner_of(object: &MutatingWebhookConfiguration) -> Option<OwnerReference> {
    let mut owners = object.metadata.owner_references.iter().flatten();
    owners.find(|one| **one == owner(one.uid.clone())).cloned()
}

/// Whether a field that the desired configuration sets has another value in the object. Other fields, other webhooks and
/// the CA bundle do not count.
pub fn has_drifted(object: &MutatingWebhookConfiguration, desired: &MutatingWebhookConfiguration) -> bool {
    match (serde_json::to_value(object), serde_json::to_value(desired)) {
        (Ok(object), Ok(desired)) => !includes(&object, &desired),
        _ => true,
    }
}

fn includes(object: &Value, desired: &Value) -> bool {
    match (object, desired) {
        (Value::Object(object), Value::Object(desired)) => desired
            .iter()
            .all(|(key, desired)| object.get(key).is_some_and(|object| includes(object, desired))),
        (Value::Array(object), Value::Array(desired)) => {
            let keyed = |value: &Value| value.get("name").or(value.get("uid")).is_some();
            if desired.iter().all(keyed) {
                desired.iter().all(|desired| object.iter().any(|object| includes(object, desired)))
            } else {
                object == desired
            }
        }
        _ => object == desired,
    }
}

/// Creating pods, and changing them except for their status.
pub fn pod_rule() -> RuleWithOperations {
    let list = |values: &[&str]| Some(values.iter().map(|value| (*value).to_owned()).collect());
    RuleWithOperations {
        api_groups: list(&[""]),
        api_versions: list(&["v1"]),
        operations: list(&["CREATE", "UPDATE"]),
        resources: list(&["pods"]),
        scope: Some("Namespaced".to_owned()),
    }
}

/// Skips updates that leave the networks annotation as it is.
pub fn networks_change() -> MatchCondition {
    let (networks, old) = (networks("object"), networks("oldObject"));
    MatchCondition {
        name: "networks-change".to_owned(),
        expression: format!("oldObject == null || !({}) || {networks} != {old}", is_annotated("oldObject")),
    }
}

fn has_networks() -> MatchCondition {
    MatchCondition {
        name: "has-networks".to_owned(),
        expression: format!("{} && {} != ''", is_annotated("object"), networks("object")),
    }
}

/// The networks annotation of a pod, in CEL.
pub fn networks(object: &str) -> String {
    format!("{object}.metadata.annotations['{NETWORKS_ANNOTATION}']")
}

/// Whether the pod has the networks annotation, in CEL.
pub fn is_annotated(object: &str) -> String {
    format!("has({object}.metadata.annotations) && '{NETWORKS_ANNOTATION}' in {object}.metadata.annotations")
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;
    use serde_json::json;

    use super::*;

    fn desired() -> MutatingWebhookConfiguration {
        let service =
            WebhookService { namespace: "patchbay-system".to_owned(), name: "patchbay-webhook".to_owned() };
        configuration(&service, Some(owner("u".to_owned())))
    }

    #[test]
    fn only_launchers_with_networks_call_the_webhook_and_it_fails_closed() {
        let object = serde_json::to_value(desired()).unwrap();
        let annotated = |object: &str| {
            format!(
                "has({object}.metadata.annotations) && 'k8s.v1.cni.cncf.io/networks' in {object}.metadata.annotations"
            )
        };
        let networks = "object.metadata.annotations['k8s.v1.cni.cncf.io/networks']";
        let old = "oldObject.metadata.annotations['k8s.v1.cni.cncf.io/networks']";
        assert_eq!(
            object["webhooks"],
            json!([{
                "name": "ipam-claims.k8s.cni.cncf.io",
                "admissionReviewVersions": ["v1"],
                "clientConfig": {"service": {
                    "name": "patchbay-webhook",
                    "namespace": "patchbay-system",
                    "path": "/mutate-v1-pod",
                    "port": 443,
                }},
                "failurePolicy": "Fail",
                "matchConditions": [
                    {"name": "has-networks", "expression": format!("{} && {networks} != ''", annotated("object"))},
                    {
                        "name": "networks-change",
                        "expression":
                            format!("oldObject == null || !({}) || {networks} != {old}", annotated("oldObject")),
                    },
                ],
                "matchPolicy": "Equivalent",
                "objectSelector": {"matchLabels": {"kubevirt.io": "virt-launcher"}},
                "reinvocationPolicy": "Never",
                "rules": [{
                    "apiGroups": [""],
                    "apiVersions": ["v1"],
                    "operations": ["CREATE", "UPDATE"],
                    "resources": ["pods"],
                    "scope": "Namespaced",
                }],
                "sideEffects": "None",
                "timeoutSeconds": 5,
            }])
        );
    }

    #[test]
    fn it_is_owned_by_the_validating_configuration_and_does_not_block_its_deletion() {
        let object = serde_json::to_value(desired()).unwrap();
        assert_eq!(
            object["metadata"]["ownerReferences"],
            json!([{
                "apiVersion": "admissionregistration.k8s.io/v1",
                "kind": "ValidatingWebhookConfiguration",
                "name": "patchbay",
                "uid": "u",
            }])
        );
        assert_eq!(owner_of(&desired()), Some(owner("u".to_owned())));
        assert_eq!(owner_of(&MutatingWebhookConfiguration::default()), None);
    }

    #[test]
    fn only_fields_that_are_set_drift() {
        let mut object = desired();
        let webhooks = object.webhooks.as_mut().unwrap();
        webhooks[0].client_config.ca_bundle = Some(ByteString(b"bundle".to_vec()));
        webhooks[0].namespace_selector = Some(LabelSelector::default());
        webhooks.insert(0, MutatingWebhook { name: "foreign".to_owned(), ..MutatingWebhook::default() });
        object.metadata.labels.as_mut().unwrap().insert("team".to_owned(), "net".to_owned());
        object.metadata.owner_references.as_mut().unwrap().insert(0, owner("other".to_owned()));
        assert!(!has_drifted(&object, &desired()));

        let changes: [fn(&mut MutatingWebhookConfiguration); 7] = [
            |it| it.webhooks = None,
            |it| it.metadata.labels = None,
            |it| it.metadata.owner_references = Some(vec![owner("other".to_owned())]),
            |it| it.webhooks.as_mut().unwrap()[1].failure_policy = Some("Ignore".to_owned()),
            |it| it.webhooks.as_mut().unwrap()[1].object_selector = None,
            |it| it.webhooks.as_mut().unwrap()[1].match_conditions.as_mut().unwrap().truncate(1),
            |it| it.webhooks.as_mut().unwrap()[1].rules.as_mut().unwrap().push(pod_rule()),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let mut object = object.clone();
            change(&mut object);
            assert!(has_drifted(&object, &desired()), "change {number}");
        }
    }
}
