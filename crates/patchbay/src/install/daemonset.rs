//! The node daemon: a DaemonSet with only the host access that its work needs.

use api::names::{CNI_BIN_DIR, HOST_ROOT, RUN_DIR, STATE_DIR};
use serde_json::{Value, json};

use super::{BINARY, InstallOptions, NODE};

/// Capabilities of the node daemon. `rbac.rs` and `cni_directory.rs` in `tests/tests/nodes` and the tests in
/// `tests/tests/hotplug` show what fails without each.
const CAPABILITIES: &[&str] = &[
    // Create and change links and their settings, also the pod's end inside the pod's network namespace.
    "NET_ADMIN",
    // Enter a pod's network namespace to inspect its links.
    "SYS_ADMIN",
    // Write to a CNI directory that root does not own, as with the official cni-plugins archives and Kubespray.
    "DAC_OVERRIDE",
    // Open /proc/1/ns/mnt, the host's mount namespace, in which hot-plug runs the CNI plugins.
    "SYS_PTRACE",
    // Enter that mount namespace.
    "SYS_CHROOT",
    // Receive the link events of all network namespaces over one socket of the host: hot-plug notices deleted links.
    "NET_BROADCAST",
];

/// The CNI plugins that hot-plug runs share the daemon's cgroup. At most 48 of them run at once, and a plugin in Go has 6
/// to 8 MiB of anonymous memory: 384 MiB. The rest is for the daemon, and for the page cache of the plugins' files.
const MEMORY_LIMIT: &str = "512Mi";

/// The DaemonSet.
pub fn daemonset(options: &InstallOptions) -> Value {
    json!({
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": super::namespaced_metadata(options, NODE, "node"),
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

/// The old daemon stops before the new one starts; a node loses no link in the seconds between. With a surge, both pods'
/// probes would reach the daemon that owns the socket, so a new daemon that never gets ready would look like a failure
/// of the old one. Updating a tenth of the nodes at a time limits the damage of a bad version.
fn update_strategy() -> Value {
    json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "10%"}})
}

fn pod(options: &InstallOptions) -> Value {
    json!({
        "serviceAccountName": NODE,
        "automountServiceAccountToken": true,
        "priorityClassName": "system-node-critical",
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"operator": "Exists"}],
        "hostNetwork": true,
        "hostPID": true,
        // The node's resolver: the daemon resolves no cluster names, and must not depend on cluster DNS, which may itself
        // wait for one of our networks.
        "dnsPolicy": "Default",
        "terminationGracePeriodSeconds": super::TERMINATION_GRACE_PERIOD.as_secs(),
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

fn container(options: &InstallOptions) -> Value {
    let mut args = vec![String::from("node"), format!("--log={}", options.log_level)];
    args.extend(options.ignore_interfaces.iter().map(|pattern| format!("--ignore-interfaces={pattern}")));
    args.extend(options.runtime_socket.iter().map(|path| format!("--runtime-socket={path}")));
    args.extend(options.hotplug.args());
    json!({
        "name": "node",
        "image": options.image,
        "imagePullPolicy": options.image_pull_policy.text(),
        "command": [BINARY],
        "args": args,
        "env": [
            super::env_from_field("NODE_NAME", "spec.nodeName"),
            super::env_from_field("PATCHBAY_POD_UID", "metadata.uid"),
            // Threads that work for a moment would each keep freed memory in an arena of their own.
            {"name": "MALLOC_ARENA_MAX", "value": "2"},
        ],
        "livenessProbe": probe("live", 10, 3),
        "readinessProbe": probe("ready", 5, 2),
        "resources": {"requests": {"cpu": "100m", "memory": "32Mi"}, "limits": {"memory": MEMORY_LIMIT}},
        "securityContext": security_context(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            // Read-only: the daemon writes only to the other mounts. Without mount propagation, because it needs
            // nothing that the host mounts later, and a pod with `HostToContainer` does not start where `/` is a
            // private mount.
            {"name": "host", "mountPath": HOST_ROOT, "readOnly": true},
            {"name": "state", "mountPath": STATE_DIR},
            {"name": "run", "mountPath": RUN_DIR},
            {"name": "cni-bin", "mountPath": CNI_BIN_DIR},
        ],
    })
}

/// Root on the host, but not privileged.
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
        // The default AppArmor profile and the default SELinux type both deny access to host files.
        "appArmorProfile": {"type": "Unconfined"},
        "seLinuxOptions": {"type": "spc_t"},
    })
}

/// An exec probe: in the host network, a port could already be in use, and old and new daemon could not overlap.
fn probe(question: &str, period_seconds: u32, failure_threshold: u32) -> Value {
    json!({
        "exec": {"command": [BINARY, "probe", question]},
        "periodSeconds": period_seconds,
        // Slightly more than the timeout of `patchbay probe`, so that its error message is reported.
        "timeoutSeconds": 6,
        "failureThreshold": failure_threshold,
    })
}
