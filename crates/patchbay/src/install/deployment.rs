//! The controller: a Deployment, and the budget that keeps a drain from taking all of it.

use api::names::{HEALTH_PORT, WEBHOOK_PORT};
use serde_json::{Value, json};

use super::{CONTROLLER, Options, PROGRAM};

/// The Deployment.
pub fn deployment(options: &Options) -> Value {
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": super::namespaced(options, CONTROLLER, "controller"),
        "spec": {
            "replicas": options.controller_replicas,
            "selector": {"matchLabels": super::selector("controller")},
            // The webhook never has fewer replicas than asked for. One more pod always finds a place: it is small, has no
            // host port, and replicas only prefer to be apart, so that this also works on one node.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {
                "metadata": {"labels": super::labels("controller")},
                "spec": pod(options),
            },
        },
    })
}

/// The PodDisruptionBudget. A broken replica never blocks a drain.
pub fn disruption_budget(options: &Options) -> Value {
    json!({
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": super::namespaced(options, CONTROLLER, "controller"),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": super::selector("controller")},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    })
}

fn pod(options: &Options) -> Value {
    json!({
        "serviceAccountName": CONTROLLER,
        "automountServiceAccountToken": true,
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [
            {"key": "node-role.kubernetes.io/control-plane", "operator": "Exists", "effect": "NoSchedule"},
        ],
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{
            "weight": 100,
            "podAffinityTerm": {
                "labelSelector": {"matchLabels": super::selector("controller")},
                "topologyKey": "kubernetes.io/hostname",
            },
        }]}},
        "securityContext": {
            "runAsNonRoot": true,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": super::GRACE.as_secs(),
        "containers": [container(options)],
    })
}

fn container(options: &Options) -> Value {
    json!({
        "name": "controller",
        "image": options.image,
        "imagePullPolicy": options.image_pull_policy.text(),
        "command": [PROGRAM],
        "args": ["controller", format!("--log={}", options.log_level)],
        "env": [
            super::from_field("POD_NAME", "metadata.name"),
            super::from_field("POD_NAMESPACE", "metadata.namespace"),
        ],
        "ports": [
            {"name": "webhook", "containerPort": WEBHOOK_PORT, "protocol": "TCP"},
            {"name": "health", "containerPort": HEALTH_PORT, "protocol": "TCP"},
        ],
        "livenessProbe": probe("/healthz", 10, 3),
        "readinessProbe": probe("/readyz", 5, 2),
        // No cpu limit: throttling a webhook slows every write that it judges.
        "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    })
}

fn probe(path: &str, every_seconds: u32, failures: u32) -> Value {
    json!({
        "httpGet": {"path": path, "port": "health", "scheme": "HTTP"},
        "periodSeconds": every_seconds,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    })
}
