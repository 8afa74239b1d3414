//! ServiceAccounts, and the minimal roles of the controller and the node daemon.
//!
//! Each rule names the call that needs it, and restricts by resource name where RBAC can. The admission policy restricts a
//! node daemon to the objects of its own node.

use api::{
    GROUP,
    nad::{NAD_GROUP, NAD_PLURAL},
    names,
};
use serde_json::{Value, json};

use super::{CONTROLLER, InstallOptions, NODE};

/// The Role for events.
const EVENTS: &str = "patchbay-events";

/// ServiceAccounts come first, so that every binding refers to an existing one.
pub fn rbac(options: &InstallOptions) -> Vec<Value> {
    vec![
        service_account(options, CONTROLLER, "controller"),
        service_account(options, NODE, "node"),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": super::namespaced_metadata(options, CONTROLLER, "controller"),
            "rules": controller_namespaced_rules(),
        }),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": super::namespaced_metadata(options, CONTROLLER, "controller"),
            "roleRef": role_ref("Role", CONTROLLER),
            "subjects": [subject(options, CONTROLLER)],
        }),
        cluster_role(CONTROLLER, "controller", controller_cluster_rules()),
        cluster_role_binding(options, CONTROLLER, "controller"),
        cluster_role(NODE, "node", node_cluster_rules()),
        cluster_role_binding(options, NODE, "node"),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": events_metadata(),
            "rules": event_rules(),
        }),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": events_metadata(),
            "roleRef": role_ref("Role", EVENTS),
            "subjects": [subject(options, CONTROLLER), subject(options, NODE)],
        }),
    ]
}

/// Events about cluster-scoped objects are stored in namespace `default`.
fn events_metadata() -> Value {
    json!({"name": EVENTS, "namespace": "default", "labels": super::labels("events")})
}

/// Create records an event; patch increments the count of a repeated one.
fn event_rules() -> Value {
    json!([{"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch"]}])
}

/// RBAC cannot restrict create by name: the name is not known when the request is authorized. A list or watch with a field
/// selector for one name is authorized by that name.
fn controller_namespaced_rules() -> Value {
    json!([
        // Leader election.
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": [names::LEASE_NAME],
            "verbs": ["get", "update"],
        },
        // The certificates of the webhook. Deleted only to recreate a Secret that was made immutable or has another type.
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
        {
            "apiGroups": [""],
            "resources": ["secrets"],
            "resourceNames": [names::WEBHOOK_CERT_SECRET],
            "verbs": ["get", "list", "watch", "update", "delete"],
        },
    ])
}

fn controller_cluster_rules() -> Value {
    json!([
        // The nodes that a network selects. The admission policy restricts the patch to our labels.
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch", "patch"]},
        // The networks: finalizers are patched on the object, conditions on its status.
        {"apiGroups": [GROUP], "resources": ["bridgenetworks"], "verbs": ["list", "watch", "patch"]},
        {"apiGroups": [GROUP], "resources": ["bridgenetworks/status"], "verbs": ["patch"]},
        // The reports of the nodes.
        {"apiGroups": [GROUP], "resources": ["nodenetworks"], "verbs": ["list", "watch"]},
        // The address blocks of deleted networks and deleted nodes.
        {"apiGroups": [GROUP], "resources": ["ipblocks"], "verbs": ["list", "watch", "delete"]},
        // The NetworkAttachmentDefinitions of the networks.
        {
            "apiGroups": [NAD_GROUP],
            "resources": [NAD_PLURAL],
            "verbs": ["list", "watch", "create", "patch", "delete"],
        },
        // The namespaces of the NetworkAttachmentDefinitions, and the workloads that use them.
        {"apiGroups": [""], "resources": ["namespaces", "pods"], "verbs": ["list", "watch"]},
        {
            "apiGroups": ["apps"],
            "resources": ["daemonsets", "deployments", "replicasets", "statefulsets"],
            "verbs": ["list", "watch"],
        },
        {"apiGroups": ["batch"], "resources": ["cronjobs", "jobs"], "verbs": ["list", "watch"]},
        {
            "apiGroups": ["kubevirt.io"],
            "resources": ["virtualmachineinstances", "virtualmachines"],
            "verbs": ["list", "watch"],
        },
        // Which CRDs of other projects the cluster has.
        {
            "apiGroups": ["apiextensions.k8s.io"],
            "resources": ["customresourcedefinitions"],
            "resourceNames": [
                format!("{NAD_PLURAL}.{NAD_GROUP}"),
                "virtualmachineinstances.kubevirt.io",
                "virtualmachines.kubevirt.io",
            ],
            "verbs": ["list", "watch"],
        },
        // The CA bundle of the webhook: the list of configurations in the controller's `webhook/certs/ca_bundle.rs`, each
        // by its name. A MutatingWebhookConfiguration needs a rule of its own for its resource.
        {
            "apiGroups": ["admissionregistration.k8s.io"],
            "resources": ["validatingwebhookconfigurations"],
            "resourceNames": [names::WEBHOOK_CONFIGURATION],
            "verbs": ["get", "list", "watch", "patch"],
        },
    ])
}

fn node_cluster_rules() -> Value {
    json!([
        // The own Node: its UID owns the NodeNetwork; its InternalIP is the VTEP address.
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]},
        // A server-side apply that creates the object needs create and patch. Patch also removes foreign owner references.
        {
            "apiGroups": [GROUP],
            "resources": ["nodenetworks"],
            "verbs": ["list", "watch", "create", "patch"],
        },
        {"apiGroups": [GROUP], "resources": ["nodenetworks/status"], "verbs": ["patch"]},
        // The addresses of its pods: the daemon creates a block to acquire it, updates it to adopt one that the same node
        // holds under an earlier Node UID, patches its spec.bootID after a boot, and deletes it to release it.
        {
            "apiGroups": [GROUP],
            "resources": ["ipblocks"],
            "verbs": ["get", "list", "watch", "create", "update", "patch", "delete"],
        },
        {"apiGroups": [GROUP], "resources": ["ipblocks/status"], "verbs": ["patch"]},
        // The desired networks of the node.
        {"apiGroups": [GROUP], "resources": ["bridgenetworks"], "verbs": ["list", "watch"]},
    ])
}

fn service_account(options: &InstallOptions, name: &str, component: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": super::namespaced_metadata(options, name, component),
    })
}

fn cluster_role(name: &str, component: &str, rules: Value) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": super::cluster_metadata(name, component),
        "rules": rules,
    })
}

fn cluster_role_binding(options: &InstallOptions, name: &str, component: &str) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": super::cluster_metadata(name, component),
        "roleRef": role_ref("ClusterRole", name),
        "subjects": [subject(options, name)],
    })
}

fn role_ref(kind: &str, name: &str) -> Value {
    json!({"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name})
}

fn subject(options: &InstallOptions, name: &str) -> Value {
    json!({"kind": "ServiceAccount", "name": name, "namespace": options.namespace})
}
