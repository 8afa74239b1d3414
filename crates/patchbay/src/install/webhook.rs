//! How the API server reaches the controller's admission webhook.

use api::{
    GROUP, VERSION, names,
    selection::{DEFAULT_NETWORK_ANNOTATION, NETWORKS_ANNOTATION},
};
use serde_json::{Value, json};

use super::Options;

/// The Service in front of all replicas.
pub fn service(options: &Options) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": super::namespaced(options, names::WEBHOOK_SERVICE, "controller"),
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

/// The registration. It has no `caBundle`: that field is the controller's, and an apply that never had it leaves it alone.
pub fn configuration(options: &Options) -> Value {
    let mut webhooks = vec![node_networks(options), bridge_networks(options)];
    webhooks.extend(users(options));
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": super::cluster(names::WEBHOOK_CONFIGURATION, "controller"),
        "webhooks": webhooks,
    })
}

fn node_networks(options: &Options) -> Value {
    json!({
        "name": format!("nodenetworks.{GROUP}"),
        "admissionReviewVersions": ["v1"],
        "clientConfig": client_config(options, names::VALIDATE_NODENETWORKS),
        "failurePolicy": "Fail",
        // The admission policy judges the node daemons, without a controller: its outage stops no node from publishing.
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

fn bridge_networks(options: &Options) -> Value {
    json!({
        "name": format!("bridgenetworks.{GROUP}"),
        "admissionReviewVersions": ["v1"],
        "clientConfig": client_config(options, names::VALIDATE_BRIDGENETWORKS),
        "failurePolicy": "Fail",
        // Neither the controller's finalizers nor a deletion under way may ever wait for a controller.
        "matchConditions": [
            not_ours(options),
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

/// One webhook for each shape that networks are named in. A cluster without a controller goes on: what keeps links from
/// being pulled from under pods is the order of deletion, not this.
fn users(options: &Options) -> Vec<Value> {
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
    .map(|(name, group, version, resources, names_a_network)| {
        json!({
            "name": format!("{name}.users.{GROUP}"),
            "admissionReviewVersions": ["v1"],
            "clientConfig": client_config(options, names::VALIDATE_USERS),
            "failurePolicy": "Ignore",
            "matchConditions": [
                not_ours(options),
                {"name": "names-a-network", "expression": names_a_network},
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

/// What our own programs write is judged before they write it.
fn not_ours(options: &Options) -> Value {
    json!({
        "name": "not-patchbay-itself",
        "expression": format!(
            "!(request.userInfo.username in ['{}', '{}'])",
            options.controller_user(),
            options.node_user()
        ),
    })
}

fn client_config(options: &Options, path: &str) -> Value {
    json!({"service": {
        "name": names::WEBHOOK_SERVICE,
        "namespace": options.namespace,
        "path": path,
        "port": 443,
    }})
}
