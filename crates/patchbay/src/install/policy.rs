//! The admission policies: one keeps a node daemon to its own node's objects, one the controller to its labels of Nodes.
//!
//! The API server decides it alone, in process: no controller needs to run. A token says which node its pod runs on,
//! and that cannot be forged by whoever holds the token. A later capability adds its kinds here.

use api::{GROUP, bridgenetwork::READY_LABEL_PREFIX};
use serde_json::{Value, json};

use super::{CONTROLLER, NODE, Options};

/// The policy about address blocks.
const BLOCKS: &str = "patchbay-ipblocks";
/// The policy about events of node daemons.
const NODE_EVENTS: &str = "patchbay-node-events";

/// The node of the pod that the token was made for, as the API server saw it; empty when the token has none.
const USER_NODE: &str = "\
has(request.userInfo.extra) &&
'authentication.kubernetes.io/node-name' in request.userInfo.extra &&
size(request.userInfo.extra['authentication.kubernetes.io/node-name']) == 1
? request.userInfo.extra['authentication.kubernetes.io/node-name'][0] : ''";

/// The name of the object in question. `request.name` would not do: it is empty for each object of a collection delete.
const OBJECT_NAME: &str = "\
object != null
? (has(object.metadata.name) ? object.metadata.name : '')
: (oldObject != null && has(oldObject.metadata.name) ? oldObject.metadata.name : '')";

/// The owners that the object had before.
const OLD_OWNERS: &str = "\
oldObject != null && has(oldObject.metadata.ownerReferences) ? oldObject.metadata.ownerReferences : []";

/// An owner decides when an object is deleted, so the own Node is the only one to add. One that somebody else put there
/// is not the daemon's fault: judging it would lock the daemon out of its own object for good.
const NEW_OWNERS_ARE_THE_NODE: &str = "\
object == null || !has(object.metadata.ownerReferences) ||
object.metadata.ownerReferences.all(owner,
  (owner.apiVersion == 'v1' && owner.kind == 'Node' && owner.name == variables.userNode) ||
  variables.oldOwners.exists(old, old.apiVersion == owner.apiVersion && old.kind == owner.kind &&
    old.name == owner.name && old.uid == owner.uid))";

/// Every label that one of the two has beside those of the controller's prefix, the other has too.
const SAME_LABELS: &str = "variables.THESE.all(key, key.startsWith('PREFIX') || \
(key in variables.THOSE && variables.THOSE[key] == variables.THESE[key]))";

/// Nothing of a Node but its labels differs.
const NOTHING_ELSE: &str = "\
request.operation == 'UPDATE' && object.spec == oldObject.spec && object.status == oldObject.status &&
(has(object.metadata.annotations) ? object.metadata.annotations : {}) ==
  (has(oldObject.metadata.annotations) ? oldObject.metadata.annotations : {}) &&
(has(object.metadata.finalizers) ? object.metadata.finalizers : []) ==
  (has(oldObject.metadata.finalizers) ? oldObject.metadata.finalizers : []) &&
(has(object.metadata.ownerReferences) ? object.metadata.ownerReferences : []) ==
  (has(oldObject.metadata.ownerReferences) ? oldObject.metadata.ownerReferences : [])";

/// The policies and their bindings.
pub fn policy(options: &Options) -> Vec<Value> {
    [node_policy(options), block_policy(options), event_policy(options), controller_policy(options)].concat()
}

/// What is peculiar to a policy.
struct Policy<'a> {
    name: &'a str,
    /// The program that it keeps within its limits.
    component: &'a str,
    group: &'a str,
    operations: &'a [&'a str],
    resources: &'a [&'a str],
    /// The requests that it judges: a name, and the rule that picks them.
    condition: (&'a str, String),
    variables: Value,
    validations: Value,
}

impl Policy<'_> {
    /// The policy, and what makes it count for everybody, without exception.
    fn objects(self) -> Vec<Value> {
        let Self { name, component, group, operations, resources, condition, variables, validations } = self;
        let policy = json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicy",
            "metadata": super::cluster(name, component),
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": [{
                    "apiGroups": [group],
                    // Every version: a policy that a new version of the kind could pass by would be none.
                    "apiVersions": ["*"],
                    "operations": operations,
                    "resources": resources,
                    // The default, written down: without it every apply finds a difference to the server's list.
                    "scope": "*",
                }]},
                "matchConditions": [{"name": condition.0, "expression": condition.1}],
                "variables": variables,
                "validations": validations,
            },
        });
        let binding = json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": super::cluster(name, component),
            "spec": {"policyName": name, "validationActions": ["Deny"]},
        });
        vec![policy, binding]
    }
}

/// Whether a request is this user's.
fn is_user(user: &str) -> String {
    format!("request.userInfo.username == '{user}'")
}

/// A block is its holder's. As long as it is there nobody else has its addresses, so nobody else takes it away either,
/// but for the controller, which knows when its node is gone.
fn block_policy(options: &Options) -> Vec<Value> {
    let not_controller = format!("request.userInfo.username != '{}'", options.controller_user());
    Policy {
        name: BLOCKS,
        component: "node",
        group: GROUP,
        operations: &["CREATE", "UPDATE", "DELETE"],
        resources: &["ipblocks", "ipblocks/status"],
        condition: ("not-controller", not_controller),
        variables: json!([
            {"name": "userNode", "expression": USER_NODE},
            {"name": "daemon", "expression": is_user(&options.node_user())},
            {"name": "blocks", "expression": "[object, oldObject].filter(block, block != null)"},
        ]),
        validations: json!([
            {
                "expression": "!variables.daemon || (variables.userNode != '' && \
                    variables.blocks.all(block, block.spec.holder.node == variables.userNode))",
                "reason": "Forbidden",
                "message": "The node daemon may only write address blocks that its own node holds.",
            },
            {
                // Whoever stores an object anew as it was changes nothing.
                "expression": "variables.daemon || (request.operation == 'UPDATE' && \
                    object.spec == oldObject.spec && has(object.status) == has(oldObject.status) && \
                    (!has(object.status) || object.status == oldObject.status))",
                "reason": "Forbidden",
                "message": "Address blocks are made and removed by the nodes that hold them: pods may have their \
                    addresses. A block goes by itself once nobody has any; if its node is gone for good, delete the Node.",
            },
        ]),
    }
    .objects()
}

/// What a node daemon tells, it tells in the name of its own node.
fn event_policy(options: &Options) -> Vec<Value> {
    Policy {
        name: NODE_EVENTS,
        component: "node",
        group: "events.k8s.io",
        operations: &["CREATE", "UPDATE"],
        resources: &["events"],
        condition: ("node-daemon", is_user(&options.node_user())),
        variables: json!([
            {"name": "userNode", "expression": USER_NODE},
            {"name": "told", "expression": "oldObject == null ? object : oldObject"},
        ]),
        validations: json!([{
            "expression": "variables.userNode != '' && [object, variables.told].all(event, \
                has(event.reportingController) && event.reportingController == 'patchbay-node' && \
                has(event.reportingInstance) && event.reportingInstance == variables.userNode)",
            "reason": "Forbidden",
            "message": "The node daemon may only tell events in the name of its own node.",
        }]),
    }
    .objects()
}

/// RBAC cannot say which labels of a Node may be patched; this can.
fn controller_policy(options: &Options) -> Vec<Value> {
    let labels = |node: &str| format!("has({node}.metadata.labels) ? {node}.metadata.labels : {{}}");
    let same = |these: &str, those: &str| {
        SAME_LABELS.replace("THESE", these).replace("THOSE", those).replace("PREFIX", READY_LABEL_PREFIX)
    };
    let same = format!("{} && {}", same("labels", "oldLabels"), same("oldLabels", "labels"));
    Policy {
        name: CONTROLLER,
        component: "controller",
        group: "",
        operations: &["CREATE", "UPDATE", "DELETE"],
        resources: &["nodes", "nodes/status"],
        condition: ("controller", is_user(&options.controller_user())),
        variables: json!([
            {"name": "labels", "expression": labels("object")},
            {"name": "oldLabels", "expression": labels("oldObject")},
        ]),
        validations: json!([{
            "expression": format!("{NOTHING_ELSE} && {same}"),
            "reason": "Forbidden",
            "message": format!("The controller may only change labels of a Node that begin with {READY_LABEL_PREFIX}."),
        }]),
    }
    .objects()
}

fn node_policy(options: &Options) -> Vec<Value> {
    Policy {
        name: NODE,
        component: "node",
        group: GROUP,
        operations: &["CREATE", "UPDATE", "DELETE"],
        resources: &["nodenetworks", "nodenetworks/status"],
        condition: ("node-daemon", is_user(&options.node_user())),
        variables: json!([
            {"name": "userNode", "expression": USER_NODE},
            {"name": "objectName", "expression": OBJECT_NAME},
            {"name": "oldOwners", "expression": OLD_OWNERS},
        ]),
        validations: validations(),
    }
    .objects()
}

fn validations() -> Value {
    json!([
        {
            "expression": "variables.userNode != ''",
            "reason": "Forbidden",
            "message": "The token of the node daemon names no node: use the token of a running patchbay-node pod.",
        },
        {
            "expression": "variables.userNode == '' || variables.objectName == variables.userNode",
            "reason": "Forbidden",
            "message": "The node daemon may only write the objects of its own node.",
            "messageExpression": "'The node daemon on node \"' + variables.userNode + \
                '\" may only write the objects of its own node, not those of \"' + variables.objectName + '\".'",
        },
        {
            "expression": NEW_OWNERS_ARE_THE_NODE,
            "reason": "Forbidden",
            "message": "The node daemon may only make its own Node an owner of the object.",
            "messageExpression": "'The node daemon on node \"' + variables.userNode + \
                '\" may only make its own Node an owner of \"' + variables.objectName + '\".'",
        },
    ])
}
