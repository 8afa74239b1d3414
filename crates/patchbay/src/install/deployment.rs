//! The controller: its Deployment and its PodDisruptionBudget.

use api::names::{HEALTH_PORT, WEBHOOK_PORT};
use serde_json::{Value, json};

use super::{BINARY, CONTROLLER, InstallOptions};

/// The Deployment.
pub fn deployment(options: &InstallOptions) -> Value {
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": super::namespaced_metadata(options, CONTROLLER, "controller"),
        "spec": {
            "replicas": options.controller_replicas,
            "selector": {"matchLabels": super::selector("controller")},
            // The webhook never has fewer replicas than configured. The surge pod can always be scheduled: it is small,
            // has no host port, and anti-affinity is only preferred, so this works on a single node too.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {
                "metadata": {"labels": super::labels("controller")},
                "spec": pod(options),
            },
        },
    })
}

/// The PodDisruptionBudget. An unhealthy replica never blocks a drain.
pub fn disruption_budget(options: &InstallOptions) -> Value {
    json!({
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": super::namespaced_metadata(options, CONTROLLER, "controller"),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": super::selector("controller")},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    })
}

fn pod(options: &InstallOptions) -> Value {
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
        "terminationGracePeriodSeconds": super::TERMINATION_GRACE_PERIOD.as_secs(),
        "containers": [container(options)],
    })
}

/// What a controller of a small cluster uses.
pub const MEMORY_REQUEST_MIB: u32 = 64;

fn container(options: &InstallOptions) -> Value {
    json!({
        "name": "controller",
        "image": options.image,
        "imagePullPolicy": options.image_pull_policy.text(),
        "command": [BINARY],
        "args": args(options),
        "env": [
            super::env_from_field("POD_NAME", "metadata.name"),
            super::env_from_field("POD_NAMESPACE", "metadata.namespace"),
        ],
        "ports": [
            {"name": "webhook", "containerPort": WEBHOOK_PORT, "protocol": "TCP"},
            {"name": "health", "containerPort": HEALTH_PORT, "protocol": "TCP"},
        ],
        "livenessProbe": probe("/healthz", 10, 3),
        "readinessProbe": probe("/readyz", 5, 2),
        // No CPU limit: throttling the webhook would delay every write that it reviews.
        "resources": {
            "requests": {"cpu": "20m", "memory": format!("{MEMORY_REQUEST_MIB}Mi")},
            "limits": {"memory": options.controller_memory},
        },
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    })
}

fn args(options: &InstallOptions) -> Vec<String> {
    let mut args = vec!["controller".to_owned(), format!("--log={}", options.log_level)];
    args.extend(options.claims.args());
    args
}

fn probe(path: &str, period_seconds: u32, failure_threshold: u32) -> Value {
    json!({
        "httpGet": {"path": path, "port": "health", "scheme": "HTTP"},
        "periodSeconds": period_seconds,
        "timeoutSeconds": 3,
        "failureThreshold": failure_threshold,
    })
}
