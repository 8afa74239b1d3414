//! The ValidatingAdmissionPolicies: they restrict a node daemon to the objects of its own node, and the controller to its
//! own labels on Nodes, its own IPBlocks, one CustomResourceDefinition and one MutatingWebhookConfiguration.
//!
//! The API server evaluates them in process, so no controller needs to run. The token of a pod carries the name of the
//! pod's node, which the holder of the token cannot forge.

mod claims;
mod pods;

use api::{GROUP, bridgenetwork::READY_LABEL_PREFIX};
use serde_json::{Value, json};

use super::{CONTROLLER, InstallOptions, NODE};

/// The policy for IPBlocks.
const BLOCK_POLICY: &str = "patchbay-ipblocks";
/// The policy for events of node daemons.
const EVENT_POLICY: &str = "patchbay-node-events";

/// The node of the pod that the token is bound to; empty when the token is not bound to a pod.
const USER_NODE: &str = "\
has(request.userInfo.extra) &&
'authentication.kubernetes.io/node-name' in request.userInfo.extra &&
size(request.userInfo.extra['authentication.kubernetes.io/node-name']) == 1
? request.userInfo.extra['authentication.kubernetes.io/node-name'][0] : ''";

/// The name of the object. `request.name` is empty for the objects of a collection delete.
const OBJECT_NAME: &str = "\
object != null
? (has(object.metadata.name) ? object.metadata.name : '')
: (oldObject != null && has(oldObject.metadata.name) ? oldObject.metadata.name : '')";

/// The owner references of the old object.
const OLD_OWNERS: &str = "\
oldObject != null && has(oldObject.metadata.ownerReferences) ? oldObject.metadata.ownerReferences : []";

/// An owner determines when an object is garbage collected, so the daemon may add only its own Node. Owners that were there
/// before are allowed: rejecting them would lock the daemon out of its own object.
const ADDS_ONLY_OWN_NODE_AS_OWNER: &str = "\
object == null || !has(object.metadata.ownerReferences) ||
object.metadata.ownerReferences.all(owner,
  (owner.apiVersion == 'v1' && owner.kind == 'Node' && owner.name == variables.userNode) ||
  variables.oldOwners.exists(old, old.apiVersion == owner.apiVersion && old.kind == owner.kind &&
    old.name == owner.name && old.uid == owner.uid))";

/// Every label of `THESE` without the controller's prefix has the same value in `THOSE`.
const SAME_OTHER_LABELS: &str = "variables.THESE.all(key, key.startsWith('PREFIX') || \
(key in variables.THOSE && variables.THOSE[key] == variables.THESE[key]))";

/// An update of a Node that changes nothing except labels.
const CHANGES_ONLY_LABELS: &str = "\
request.operation == 'UPDATE' && object.spec == oldObject.spec && object.status == oldObject.status &&
(has(object.metadata.annotations) ? object.metadata.annotations : {}) ==
  (has(oldObject.metadata.annotations) ? oldObject.metadata.annotations : {}) &&
(has(object.metadata.finalizers) ? object.metadata.finalizers : []) ==
  (has(oldObject.metadata.finalizers) ? oldObject.metadata.finalizers : []) &&
(has(object.metadata.ownerReferences) ? object.metadata.ownerReferences : []) ==
  (has(oldObject.metadata.ownerReferences) ? oldObject.metadata.ownerReferences : [])";

/// The policies and their bindings.
pub fn policies(options: &InstallOptions) -> Vec<Value> {
    [
        node_policy(options),
        block_policy(options),
        event_policy(options),
        pods::pod_policy(options),
        controller_policy(options),
        claims::crd_policy(options),
        claims::webhook_policy(options),
        claims::block_policy(options),
    ]
    .concat()
}

/// The parts in which the policies differ.
struct AdmissionPolicy<'a> {
    name: &'a str,
    /// The component that it restricts.
    component: &'a str,
    group: &'a str,
    operations: &'a [&'a str],
    resources: &'a [&'a str],
    /// The match condition: its name and its expression.
    match_condition: (&'a str, String),
    variables: Value,
    validations: Value,
}

impl AdmissionPolicy<'_> {
    /// The policy, and a binding that applies it to the whole cluster.
    fn objects(self) -> Vec<Value> {
        let Self { name, component, group, operations, resources, match_condition, variables, validations } =
            self;
        let policy = json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicy",
            "metadata": super::cluster_metadata(name, component),
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": [{
                    "apiGroups": [group],
                    // All versions: a new version of the kind must not bypass the policy.
                    "apiVersions": ["*"],
                    "operations": operations,
                    "resources": resources,
                    // The default, made explicit: without it, every apply would show a difference.
                    "scope": "*",
                }]},
                "matchConditions": [{"name": match_condition.0, "expression": match_condition.1}],
                "variables": variables,
                "validations": validations,
            },
        });
        let binding = json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": super::cluster_metadata(name, component),
            "spec": {"policyName": name, "validationActions": ["Deny"]},
        });
        vec![policy, binding]
    }
}

/// The expression that matches requests of a user.
fn is_user(user: &str) -> String {
    format!("request.userInfo.username == '{user}'")
}

/// Only the holder of a block may write it: while the block exists, no other node may allocate its addresses, and the
/// holder trusts its spec.bootID. The controller is exempt, because it deletes the blocks of deleted nodes and
/// networks. A node daemon can neither create nor change a block of a holder that is not a Node: the name in its token is
/// that of a Node, which has no slash.
fn block_policy(options: &InstallOptions) -> Vec<Value> {
    let not_controller = format!("request.userInfo.username != '{}'", options.controller_user());
    AdmissionPolicy {
        name: BLOCK_POLICY,
        component: "node",
        group: GROUP,
        operations: &["CREATE", "UPDATE", "DELETE"],
        resources: &["ipblocks", "ipblocks/status"],
        match_condition: ("not-controller", not_controller),
        variables: json!([
            {"name": "userNode", "expression": USER_NODE},
            {"name": "daemon", "expression": is_user(&options.node_user())},
            {"name": "blocks", "expression": "[object, oldObject].filter(block, block != null)"},
        ]),
        validations: json!([
            {
                "expression": "!variables.daemon || (variables.userNode != '' && \
                    variables.blocks.all(block, block.spec.holder.node == variables.userNode && \
                    !block.spec.holder.node.contains('/')))",
                "reason": "Forbidden",
                "message": "IPBlock rejected: a node daemon may only write blocks whose spec.holder.node is its own node; \
                    use the token of the patchbay-node pod on that node.",
            },
            {
                // An update without changes is allowed: storage migration rewrites objects as they are.
                "expression": "variables.daemon || (request.operation == 'UPDATE' && \
                    object.spec == oldObject.spec && has(object.status) == has(oldObject.status) && \
                    (!has(object.status) || object.status == oldObject.status))",
                "reason": "Forbidden",
                "message": "IPBlock rejected: only the node daemon of its holder may create, change or delete a block, \
                    because running pods may use its addresses. The daemon deletes a block that is no longer used. If \
                    the node is gone for good, delete the Node: the controller then deletes its blocks. Only the controller \
                    writes blocks of a holder that is not a Node.",
            },
        ]),
    }
    .objects()
}

/// A node daemon writes events only in the name of its own node: about pods in every namespace, and about cluster-scoped
/// objects, whose events are stored in namespace `default`. Of Nodes only its own: users read the events of a Node as
/// reports of that Node.
fn event_policy(options: &InstallOptions) -> Vec<Value> {
    AdmissionPolicy {
        name: EVENT_POLICY,
        component: "node",
        group: "events.k8s.io",
        operations: &["CREATE", "UPDATE"],
        resources: &["events"],
        match_condition: ("node-daemon", is_user(&options.node_user())),
        variables: json!([
            {"name": "userNode", "expression": USER_NODE},
            {"name": "previous", "expression": "oldObject == null ? object : oldObject"},
        ]),
        validations: json!([
          {
            "expression": "variables.userNode != '' && [object, variables.previous].all(event, \
                has(event.reportingController) && event.reportingController == 'patchbay-node' && \
                has(event.reportingInstance) && event.reportingInstance == variables.userNode)",
            "reason": "Forbidden",
            "message": "Event rejected: a node daemon may only write events whose reportingController is patchbay-node and \
                whose reportingInstance is its own node; use the token of the patchbay-node pod on that node.",
          },
          {
            "expression": "has(object.regarding) && has(object.regarding.kind) && (object.regarding.kind == 'Pod' || \
                (object.metadata.namespace == 'default' && (object.regarding.kind != 'Node' || \
                (has(object.regarding.name) && object.regarding.name == variables.userNode))))",
            "reason": "Forbidden",
            "message": "Event rejected: a node daemon may only write events about pods, about its own Node, and about \
                other objects without a namespace; set regarding to one of these.",
          },
        ]),
    }
    .objects()
}

/// Restricts the labels of a Node that the controller may patch, which RBAC cannot.
fn controller_policy(options: &InstallOptions) -> Vec<Value> {
    let labels = |node: &str| format!("has({node}.metadata.labels) ? {node}.metadata.labels : {{}}");
    let same = |these: &str, those: &str| {
        SAME_OTHER_LABELS
            .replace("THESE", these)
            .replace("THOSE", those)
            .replace("PREFIX", READY_LABEL_PREFIX)
    };
    let same = format!("{} && {}", same("labels", "oldLabels"), same("oldLabels", "labels"));
    AdmissionPolicy {
        name: CONTROLLER,
        component: "controller",
        group: "",
        operations: &["CREATE", "UPDATE", "DELETE"],
        resources: &["nodes", "nodes/status"],
        match_condition: ("controller", is_user(&options.controller_user())),
        variables: json!([
            {"name": "labels", "expression": labels("object")},
            {"name": "oldLabels", "expression": labels("oldObject")},
        ]),
        validations: json!([{
            "expression": format!("{CHANGES_ONLY_LABELS} && {same}"),
            "reason": "Forbidden",
            "message": format!(
                "Node rejected: the controller may only change labels that start with {READY_LABEL_PREFIX}; \
                change anything else of a Node as another user."
            ),
        }]),
    }
    .objects()
}

fn node_policy(options: &InstallOptions) -> Vec<Value> {
    AdmissionPolicy {
        name: NODE,
        component: "node",
        group: GROUP,
        operations: &["CREATE", "UPDATE", "DELETE"],
        resources: &["nodenetworks", "nodenetworks/status"],
        match_condition: ("node-daemon", is_user(&options.node_user())),
        variables: json!([
            {"name": "userNode", "expression": USER_NODE},
            {"name": "objectName", "expression": OBJECT_NAME},
            {"name": "oldOwners", "expression": OLD_OWNERS},
        ]),
        validations: node_validations(),
    }
    .objects()
}

fn node_validations() -> Value {
    json!([
        {
            "expression": "variables.userNode != ''",
            "reason": "Forbidden",
            "message": "NodeNetwork rejected: the token of the node daemon names no node; use the token of a running \
                patchbay-node pod.",
        },
        {
            "expression": "variables.userNode == '' || variables.objectName == variables.userNode",
            "reason": "Forbidden",
            "message": "NodeNetwork rejected: a node daemon may only write the NodeNetwork of its own node.",
            "messageExpression": "'NodeNetwork \"' + variables.objectName + '\" rejected: the node daemon on node \"' + \
                variables.userNode + '\" may only write the NodeNetwork of its own node; use the token of the \
                patchbay-node pod on node \"' + variables.objectName + '\".'",
        },
        {
            "expression": ADDS_ONLY_OWN_NODE_AS_OWNER,
            "reason": "Forbidden",
            "message": "NodeNetwork rejected: a node daemon may only add its own Node as an owner; remove the other owner \
                references that the request adds.",
            "messageExpression": "'NodeNetwork \"' + variables.objectName + '\" rejected: the node daemon on node \"' + \
                variables.userNode + '\" may only add its own Node as an owner; remove the other owner references \
                that the request adds.'",
        },
    ])
}
