//! The controller's admission webhook: its Service and its ValidatingWebhookConfiguration. The leader creates the
//! MutatingWebhookConfiguration: see `controller::pod_configuration`.

use api::{
    GROUP, VERSION,
    ipamclaim::CLAIM_KEY,
    names,
    selection::{DEFAULT_NETWORK_ANNOTATION, NETWORKS_ANNOTATION},
};
use controller::pod_configuration;
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
    let mut webhooks = vec![node_networks(options), bridge_networks(options), claim_references(options)];
    webhooks.extend(network_users(options));
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": super::cluster_metadata(names::WEBHOOK_CONFIGURATION, "controller"),
        "webhooks": webhooks,
    })
}

/// Rejects a pod that refers to the IPAMClaim of a virtual machine and is no launcher of it. Only such pods depend on a
/// running controller.
fn claim_references(options: &InstallOptions) -> Value {
    // Multus ignores the case of keys and decodes escapes in them.
    let networks = pod_configuration::networks("object");
    let refers = format!(
        r"{} && ({networks}.lowerAscii().contains('{CLAIM_KEY}') || {networks}.contains('\\u'))",
        pod_configuration::is_annotated("object")
    );
    json!({
        "name": format!("claims.pods.{GROUP}"),
        "admissionReviewVersions": ["v1"],
        "clientConfig": client_config(options, names::VALIDATE_CLAIMS),
        "failurePolicy": "Fail",
        "matchConditions": [
            {"name": "refers-to-a-claim", "expression": refers},
            pod_configuration::networks_change(),
        ],
        "rules": [pod_configuration::pod_rule()],
        "sideEffects": "None",
        "timeoutSeconds": 5,
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
