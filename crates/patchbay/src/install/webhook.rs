//! How the API server reaches the controller's admission webhook.

use api::{GROUP, VERSION, names};
use serde_json::{Value, json};

use super::Options;

/// The Service in front of all replicas.
pub fn service(options: &Options) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": super::namespaced(options, names::SERVICE, "controller"),
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
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": super::cluster(names::CONFIGURATION, "controller"),
        "webhooks": [{
            "name": format!("nodenetworks.{GROUP}"),
            "admissionReviewVersions": ["v1"],
            "clientConfig": {"service": {
                "name": names::SERVICE,
                "namespace": options.namespace,
                "path": names::VALIDATE_NODENETWORKS,
                "port": 443,
            }},
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
        }],
    })
}
