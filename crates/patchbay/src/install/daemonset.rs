//! The node daemon on its host: a DaemonSet with just the reach into the host that its work needs.

use api::names::{CNI_BIN_DIR, HOST_ROOT, RUN_DIR, STATE_DIR};
use serde_json::{Value, json};

use super::{NODE, Options, PROGRAM};

/// Capabilities of the node daemon, each with the work that fails without it (`tests/tests/nodes/rights.rs`).
const CAPABILITIES: &[&str] = &[
    // Making and changing links, also a pod's end inside the pod's network namespace, and their settings.
    "NET_ADMIN",
    // Entering a pod's network namespace, to look at what is there.
    "SYS_ADMIN",
    // Writing into a CNI directory that does not belong to root, as the official cni-plugins archives and Kubespray leave it.
    "DAC_OVERRIDE",
];

/// The DaemonSet.
pub fn daemonset(options: &Options) -> Value {
    json!({
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": super::namespaced(options, NODE, "node"),
        "spec": {
            "selector": {"matchLabels": super::selector("node")},
            "updateStrategy": update_strategy(),
            "template": {
                "metadata": {"labels": super::labels("node")},
                "spec": pod(options),
            },
        },
    })
}

/// The old daemon goes before the new one comes: a node loses no link in the seconds between. A surge would leave no gap,
/// but both pods' probes would then be answered by whichever daemon has the socket, and a new one that never gets
/// ready would show as a fault of the old. A tenth of the nodes at a time bounds what a bad version can reach.
fn update_strategy() -> Value {
    json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "10%"}})
}

fn pod(options: &Options) -> Value {
    json!({
        "serviceAccountName": NODE,
        "automountServiceAccountToken": true,
        "priorityClassName": "system-node-critical",
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"operator": "Exists"}],
        "hostNetwork": true,
        "hostPID": true,
        // The node's own resolver: the daemon looks up no cluster name, and must not wait for cluster DNS, which may
        // itself wait for a network of ours.
        "dnsPolicy": "Default",
        "terminationGracePeriodSeconds": super::GRACE.as_secs(),
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container(options)],
        "volumes": [
            {"name": "host", "hostPath": {"path": "/", "type": "Directory"}},
            {"name": "state", "hostPath": {"path": STATE_DIR, "type": "DirectoryOrCreate"}},
            {"name": "run", "hostPath": {"path": RUN_DIR, "type": "DirectoryOrCreate"}},
            {"name": "cni-bin", "hostPath": {"path": options.cni_bin_dir, "type": "DirectoryOrCreate"}},
        ],
    })
}

fn container(options: &Options) -> Value {
    let mut args = vec![String::from("node"), format!("--log={}", options.log_level)];
    args.extend(options.ignore_interfaces.iter().map(|pattern| format!("--ignore-interfaces={pattern}")));
    args.extend(options.runtime_socket.iter().map(|path| format!("--runtime-socket={path}")));
    json!({
        "name": "node",
        "image": options.image,
        "imagePullPolicy": options.image_pull_policy.text(),
        "command": [PROGRAM],
        "args": args,
        "env": [
            super::from_field("NODE_NAME", "spec.nodeName"),
            super::from_field("PATCHBAY_POD_UID", "metadata.uid"),
        ],
        "livenessProbe": probe("live", 10, 3),
        "readinessProbe": probe("ready", 5, 2),
        "resources": {"requests": {"cpu": "100m", "memory": "32Mi"}, "limits": {"memory": "128Mi"}},
        "securityContext": security_context(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            // Read-only until something has to be written there. Without mount propagation: a host whose root is a private
            // mount would refuse to start the container, and the daemon needs no later mount of the host.
            {"name": "host", "mountPath": HOST_ROOT, "readOnly": true},
            {"name": "state", "mountPath": STATE_DIR},
            {"name": "run", "mountPath": RUN_DIR},
            {"name": "cni-bin", "mountPath": CNI_BIN_DIR},
        ],
    })
}

/// Root on its host, and yet never privileged.
fn security_context() -> Value {
    let mut capabilities = json!({"drop": ["ALL"]});
    if !CAPABILITIES.is_empty() {
        capabilities["add"] = json!(CAPABILITIES);
    }
    json!({
        "privileged": false,
        "allowPrivilegeEscalation": false,
        "runAsUser": 0,
        "runAsGroup": 0,
        "readOnlyRootFilesystem": true,
        "capabilities": capabilities,
        // The default profile of AppArmor and the default type of SELinux both forbid work on the host's files.
        "appArmorProfile": {"type": "Unconfined"},
        "seLinuxOptions": {"type": "spc_t"},
    })
}

/// By exec: on the host's network a port could be taken, and two generations could not overlap.
fn probe(question: &str, every_seconds: u32, failures: u32) -> Value {
    json!({
        "exec": {"command": [PROGRAM, "probe", question]},
        "periodSeconds": every_seconds,
        // A little more than the program itself waits for an answer, so that its own message is seen.
        "timeoutSeconds": 6,
        "failureThreshold": failures,
    })
}
