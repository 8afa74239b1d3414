//! Who may do what: a ServiceAccount for each program, and the least that each needs.
//!
//! Rules name the call that needs them. What a rule can say by name it says by name; the rest of the node daemon's
//! confinement (only its own node's objects) is the admission policy's.

use api::{
    GROUP,
    nad::{NAD_GROUP, NAD_PLURAL},
    names,
};
use serde_json::{Value, json};

use super::{CONTROLLER, NODE, Options};

/// The Role for events.
const EVENTS: &str = "patchbay-events";

/// ServiceAccounts first, so that no binding ever names a missing one.
pub fn rbac(options: &Options) -> Vec<Value> {
    vec![
        service_account(options, CONTROLLER, "controller"),
        service_account(options, NODE, "node"),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": super::namespaced(options, CONTROLLER, "controller"),
            "rules": controller_in_its_namespace(),
        }),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": super::namespaced(options, CONTROLLER, "controller"),
            "roleRef": role_ref("Role", CONTROLLER),
            "subjects": [subject(options, CONTROLLER)],
        }),
        cluster_role(CONTROLLER, "controller", controller_in_the_cluster()),
        cluster_role_binding(options, CONTROLLER, "controller"),
        cluster_role(NODE, "node", node_in_the_cluster()),
        cluster_role_binding(options, NODE, "node"),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": events_metadata(),
            "rules": events(),
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

/// Events about objects without a namespace are kept in this one.
fn events_metadata() -> Value {
    json!({"name": EVENTS, "namespace": "default", "labels": super::labels("events")})
}

/// What happened, told on the object. Patch counts what happened again.
fn events() -> Value {
    json!([{"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch"]}])
}

/// A create cannot be limited by name: the name is not known when the request is authorized. A list or watch that selects
/// one name is allowed by that name.
fn controller_in_its_namespace() -> Value {
    json!([
        // Leader election.
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": [names::LEASE_NAME],
            "verbs": ["get", "update"],
        },
        // The webhook's certificates. Deleted only to make anew what somebody made immutable or of another type.
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
        {
            "apiGroups": [""],
            "resources": ["secrets"],
            "resourceNames": [names::WEBHOOK_CERT_SECRET],
            "verbs": ["get", "list", "watch", "update", "delete"],
        },
    ])
}

fn controller_in_the_cluster() -> Value {
    json!([
        // Which nodes a network selects. The admission policy keeps the patch to labels of ours.
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch", "patch"]},
        // The networks: finalizers are patched on the object, what became of it on its status.
        {"apiGroups": [GROUP], "resources": ["bridgenetworks"], "verbs": ["list", "watch", "patch"]},
        {"apiGroups": [GROUP], "resources": ["bridgenetworks/status"], "verbs": ["patch"]},
        // What the nodes say about them.
        {"apiGroups": [GROUP], "resources": ["nodenetworks"], "verbs": ["list", "watch"]},
        // The addresses of networks and of nodes that are gone.
        {"apiGroups": [GROUP], "resources": ["ipblocks"], "verbs": ["list", "watch", "delete"]},
        // The attachments that a network keeps.
        {
            "apiGroups": [NAD_GROUP],
            "resources": [NAD_PLURAL],
            "verbs": ["list", "watch", "create", "patch", "delete"],
        },
        // Where attachments can be, and who uses them.
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
        // Whether the cluster has the kinds of others.
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
        // The authorities of the webhook.
        {
            "apiGroups": ["admissionregistration.k8s.io"],
            "resources": ["validatingwebhookconfigurations"],
            "resourceNames": [names::WEBHOOK_CONFIGURATION],
            "verbs": ["get", "list", "watch", "patch"],
        },
    ])
}

fn node_in_the_cluster() -> Value {
    json!([
        // The own Node: its UID owns the NodeNetwork, its InternalIP is the VTEP address.
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]},
        // An apply that makes the object needs both create and patch. Patch also takes away owners that others added.
        {
            "apiGroups": [GROUP],
            "resources": ["nodenetworks"],
            "verbs": ["list", "watch", "create", "patch"],
        },
        {"apiGroups": [GROUP], "resources": ["nodenetworks/status"], "verbs": ["patch"]},
        // The addresses of its pods: a block is taken by creating it, told about, taken over from the same node under an
        // earlier Node, and given back.
        {
            "apiGroups": [GROUP],
            "resources": ["ipblocks"],
            "verbs": ["get", "list", "watch", "create", "update", "patch", "delete"],
        },
        {"apiGroups": [GROUP], "resources": ["ipblocks/status"], "verbs": ["patch"]},
        // What to keep up on the node.
        {"apiGroups": [GROUP], "resources": ["bridgenetworks"], "verbs": ["list", "watch"]},
    ])
}

fn service_account(options: &Options, name: &str, component: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": super::namespaced(options, name, component),
    })
}

fn cluster_role(name: &str, component: &str, rules: Value) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": super::cluster(name, component),
        "rules": rules,
    })
}

fn cluster_role_binding(options: &Options, name: &str, component: &str) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": super::cluster(name, component),
        "roleRef": role_ref("ClusterRole", name),
        "subjects": [subject(options, name)],
    })
}

fn role_ref(kind: &str, name: &str) -> Value {
    json!({"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name})
}

fn subject(options: &Options, name: &str) -> Value {
    json!({"kind": "ServiceAccount", "name": name, "namespace": options.namespace})
}
