//! The controller's admission webhook: its Service and its ValidatingWebhookConfiguration.

use api::{
    GROUP, VERSION, names,
    selection::{DEFAULT_NETWORK_ANNOTATION, NETWORKS_ANNOTATION},
};
use serde_json::{Value, json};

use super::InstallOptions;

/// The Service of all controller replicas.
pub fn service(options: &InstallOptions) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": super::namespaced_metadata(options, names::WEBHOOK_SERVICE, "controller"),
        "spec": {
            "selector": super::selector("controller"),
            "ports": [{
                "name": "webhook",
                "port": 443,
                "targetPort": "webhook",
                "protocol": "TCP",
                "appProtocol": "https",
            }],
        },
    })
}

/// The ValidatingWebhookConfiguration. It omits `caBundle`, which the controller owns; `kubectl apply` keeps fields
/// that the manifest never had.
pub fn configuration(options: &InstallOptions) -> Value {
    let mut webhooks = vec![node_networks(options), bridge_networks(options)];
    webhooks.extend(network_users(options));
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": super::cluster_metadata(names::WEBHOOK_CONFIGURATION, "controller"),
        "webhooks": webhooks,
    })
}

fn node_networks(options: &InstallOptions) -> Value {
    json!({
        "name": format!("nodenetworks.{GROUP}"),
        "admissionReviewVersions": ["v1"],
        "clientConfig": client_config(options, names::VALIDATE_NODENETWORKS),
        "failurePolicy": "Fail",
        // The admission policy checks the node daemons, so they can publish while no controller runs.
        "matchConditions": [{
            "name": "not-the-node-daemon",
            "expression": format!("request.userInfo.username != '{}'", options.node_user()),
        }],
        "rules": [{
            "apiGroups": [GROUP],
            "apiVersions": [VERSION],
            "operations": ["CREATE"],
            "resources": ["nodenetworks"],
            "scope": "Cluster",
        }],
        "sideEffects": "None",
        "timeoutSeconds": 5,
    })
}

fn bridge_networks(options: &InstallOptions) -> Value {
    json!({
        "name": format!("bridgenetworks.{GROUP}"),
        "admissionReviewVersions": ["v1"],
        "clientConfig": client_config(options, names::VALIDATE_BRIDGENETWORKS),
        "failurePolicy": "Fail",
        // Neither the controller's finalizer updates nor a deletion in progress may depend on a running controller.
        "matchConditions": [
            not_patchbay(options),
            {
                "name": "spec-changes",
                "expression": "oldObject == null || \
                    (!has(object.metadata.deletionTimestamp) && \
                    (!has(object.spec) || !has(oldObject.spec) || object.spec != oldObject.spec))",
            },
        ],
        "rules": [{
            "apiGroups": [GROUP],
            "apiVersions": [VERSION],
            "operations": ["CREATE", "UPDATE"],
            "resources": ["bridgenetworks"],
            "scope": "Cluster",
        }],
        "sideEffects": "None",
        "timeoutSeconds": 5,
    })
}

/// One webhook per way of referring to a network. They fail open, so that pods can be created while no controller runs:
/// the order of deletion, not this webhook, keeps the links of running pods.
fn network_users(options: &InstallOptions) -> Vec<Value> {
    let annotated = |at: &str| {
        let annotations = format!("{at}.annotations");
        format!(
            "has({annotations}) && ('{NETWORKS_ANNOTATION}' in {annotations} || '{DEFAULT_NETWORK_ANNOTATION}' in {annotations})"
        )
    };
    let template = |at: &str| format!("has({at}.metadata) && {}", annotated(&format!("{at}.metadata")));
    let pods = annotated("object.metadata");
    let workloads = template("object.spec.template");
    let cronjobs = template("object.spec.jobTemplate.spec.template");
    let machines = format!("has(object.spec.template.spec.networks) || ({workloads})");
    let instances = format!("has(object.spec.networks) || ({pods})");
    [
        ("pods", "", "v1", &["pods"][..], pods),
        (
            "apps",
            "apps",
            "v1",
            &["daemonsets", "deployments", "replicasets", "statefulsets"],
            workloads.clone(),
        ),
        ("jobs", "batch", "v1", &["jobs"], workloads),
        ("cronjobs", "batch", "v1", &["cronjobs"], cronjobs),
        ("virtualmachines", "kubevirt.io", "v1", &["virtualmachines"], machines),
        ("virtualmachineinstances", "kubevirt.io", "v1", &["virtualmachineinstances"], instances),
    ]
    .into_iter()
    .map(|(name, group, version, resources, refers_to_network)| {
        json!({
            "name": format!("{name}.users.{GROUP}"),
            "admissionReviewVersions": ["v1"],
            "clientConfig": client_config(options, names::VALIDATE_USERS),
            "failurePolicy": "Ignore",
            "matchConditions": [
                not_patchbay(options),
                {"name": "names-a-network", "expression": refers_to_network},
            ],
            "rules": [{
                "apiGroups": [group],
                "apiVersions": [version],
                "operations": ["CREATE", "UPDATE"],
                "resources": resources,
                "scope": "Namespaced",
            }],
            "sideEffects": "None",
            "timeoutSeconds": 2,
        })
    })
    .collect()
}

/// Skips requests of the controller and the node daemons: they validate their own writes.
fn not_patchbay(options: &InstallOptions) -> Value {
    json!({
        "name": "not-patchbay-itself",
        "expression": format!(
            "!(request.userInfo.username in ['{}', '{}'])",
            options.controller_user(),
            options.node_user()
        ),
    })
}

fn client_config(options: &InstallOptions, path: &str) -> Value {
    json!({"service": {
        "name": names::WEBHOOK_SERVICE,
        "namespace": options.namespace,
        "path": path,
        "port": 443,
    }})
}
