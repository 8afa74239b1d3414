//! ServiceAccounts, and the minimal roles of the controller and the node daemon.
//!
//! Each rule names the call that needs it, and restricts by resource name where RBAC can. The admission policy restricts a
//! node daemon to the objects of its own node.

use api::{
    GROUP,
    ipamclaim::IPAM_EXTENSIONS_WEBHOOKS,
    nad::{NAD_GROUP, NAD_PLURAL},
    names,
};
use serde_json::{Value, json};

use super::{CONTROLLER, InstallOptions, NODE};

/// The ClusterRoles that extend the built-in roles of users.
const VIEW: &str = "patchbay-view";
const EDIT: &str = "patchbay-edit";

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
        user_role(VIEW, &["view"], view_rules()),
        user_role(EDIT, &["edit", "admin"], edit_rules()),
    ]
}

/// A ClusterRole whose rules the control plane adds to these built-in roles. Each of them includes the one before it in the
/// order view, edit, admin.
fn user_role(name: &str, built_in: &[&str], rules: Value) -> Value {
    let mut role = cluster_role(name, "users", rules);
    for role_name in built_in {
        let label = format!("rbac.authorization.k8s.io/aggregate-to-{role_name}");
        role["metadata"]["labels"][label] = json!("true");
    }
    role
}

fn view_rules() -> Value {
    json!([{
        "apiGroups": [GROUP],
        "resources": ["networkservices", "networkservices/status"],
        "verbs": ["get", "list", "watch"],
    }])
}

/// The status is left to the controller.
fn edit_rules() -> Value {
    json!([{
        "apiGroups": [GROUP],
        "resources": ["networkservices"],
        "verbs": ["create", "update", "patch", "delete"],
    }])
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
        // The address blocks of deleted networks and deleted nodes, and those of IPAMClaims, which the admission policy
        // restricts create and patch to.
        {
            "apiGroups": [GROUP],
            "resources": ["ipblocks"],
            "verbs": ["list", "watch", "create", "patch", "delete"],
        },
        {"apiGroups": [GROUP], "resources": ["ipblocks/status"], "verbs": ["patch"]},
        // The IPAMClaims of virtual machines: created, given another owner or fewer finalizers, deleted after an unplug, and
        // their addresses.
        {
            "apiGroups": [NAD_GROUP],
            "resources": ["ipamclaims"],
            "verbs": ["get", "list", "watch", "create", "patch", "delete"],
        },
        {"apiGroups": [NAD_GROUP], "resources": ["ipamclaims/status"], "verbs": ["patch"]},
        // The NetworkAttachmentDefinitions of the networks. The webhook reads one that its cache does not have yet.
        {
            "apiGroups": [NAD_GROUP],
            "resources": [NAD_PLURAL],
            "verbs": ["get", "list", "watch", "create", "patch", "delete"],
        },
        // The namespaces of the NetworkAttachmentDefinitions, and the workloads that use them.
        {"apiGroups": [""], "resources": ["namespaces", "pods"], "verbs": ["list", "watch"]},
        {
            "apiGroups": ["apps"],
            "resources": ["daemonsets", "deployments", "replicasets", "statefulsets"],
            "verbs": ["list", "watch"],
        },
        {"apiGroups": ["batch"], "resources": ["cronjobs", "jobs"], "verbs": ["list", "watch"]},
        // Get confirms that a virtual machine is gone before the finalizer of its IPAMClaim is removed.
        {
            "apiGroups": ["kubevirt.io"],
            "resources": ["virtualmachineinstances", "virtualmachines"],
            "verbs": ["get", "list", "watch"],
        },
        // The NetworkServices and their conditions.
        {"apiGroups": [GROUP], "resources": ["networkservices"], "verbs": ["list", "watch"]},
        {"apiGroups": [GROUP], "resources": ["networkservices/status"], "verbs": ["patch"]},
        // The headless Services of NetworkServices, and Services that users annotate. Deleted only to create an own Service
        // again that was given a cluster IP.
        {"apiGroups": [""], "resources": ["services"], "verbs": ["list", "watch", "create", "patch", "delete"]},
        // The endpoints of these Services. Those of other managers are only watched.
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch", "create", "update", "delete"],
        },
        {"apiGroups": [""], "resources": ["endpoints"], "verbs": ["list", "watch"]},
        // Owner references that block deletion, where the admission plugin OwnerReferencesPermissionEnforcement is enabled.
        {"apiGroups": [GROUP], "resources": ["networkservices/finalizers"], "verbs": ["update"]},
        {"apiGroups": [""], "resources": ["services/finalizers"], "verbs": ["update"]},
        {
            "apiGroups": ["kubevirt.io"],
            "resources": ["virtualmachineinstances/finalizers", "virtualmachines/finalizers"],
            "verbs": ["update"],
        },
        // Events about NetworkServices, Services and virtual machines, in their namespaces, and about networks, in namespace `default`: create
        // records an event; patch increments the count of a repeated one.
        {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch"]},
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
        // The CRD of IPAMClaim, which is shared with other projects: created if it is absent, never changed. The admission
        // policy restricts create to it.
        {
            "apiGroups": ["apiextensions.k8s.io"],
            "resources": ["customresourcedefinitions"],
            "verbs": ["create"],
        },
        {
            "apiGroups": ["apiextensions.k8s.io"],
            "resources": ["customresourcedefinitions"],
            "resourceNames": [format!("ipamclaims.{NAD_GROUP}")],
            "verbs": ["get", "list", "watch"],
        },
        // The CA bundles of the webhooks.
        {
            "apiGroups": ["admissionregistration.k8s.io"],
            "resources": ["validatingwebhookconfigurations"],
            "resourceNames": [names::WEBHOOK_CONFIGURATION],
            "verbs": ["get", "list", "watch", "patch"],
        },
        // The leader creates this one. The admission policy restricts create to its name. Where the admission plugin
        // OwnerReferencesPermissionEnforcement is enabled, the repair of its owner reference needs the right to delete it.
        {
            "apiGroups": ["admissionregistration.k8s.io"],
            "resources": ["mutatingwebhookconfigurations"],
            "verbs": ["create"],
        },
        {
            "apiGroups": ["admissionregistration.k8s.io"],
            "resources": ["mutatingwebhookconfigurations"],
            "resourceNames": [names::WEBHOOK_CONFIGURATION],
            "verbs": ["get", "list", "watch", "patch", "delete"],
        },
        // Whether ipam-extensions runs: it owns the claims of primary networks then.
        {
            "apiGroups": ["admissionregistration.k8s.io"],
            "resources": ["mutatingwebhookconfigurations"],
            "resourceNames": IPAM_EXTENSIONS_WEBHOOKS,
            "verbs": ["get"],
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
        // Hot-plug: the pods of the node, with their annotations. RBAC cannot restrict the watch to one node.
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
        // Hot-plug: one guarded patch writes the annotations network-status and patchbay.dev/attachments. The admission
        // policy restricts it to these two, and to pods of the node.
        {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]},
        // Hot-plug: the CNI configurations of the networks that pods request.
        {"apiGroups": [NAD_GROUP], "resources": [NAD_PLURAL], "verbs": ["get", "list", "watch"]},
        // Persistent addresses: the claim that a pod refers to, and the virtual machine that it belongs to.
        {"apiGroups": [NAD_GROUP], "resources": ["ipamclaims"], "verbs": ["get"]},
        {"apiGroups": ["kubevirt.io"], "resources": ["virtualmachineinstances"], "verbs": ["get"]},
        // Events about pods, in the namespaces of the pods, and about cluster-scoped objects, in namespace `default`:
        // create records an event; patch increments the count of a repeated one. The admission policy restricts both to
        // events in the name of the node.
        {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch"]},
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
