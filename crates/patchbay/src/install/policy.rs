//! The admission policy that keeps a node daemon to its own node's objects.
//!
//! The API server decides it alone, in process: no controller needs to run. A token says which node its pod runs on,
//! and that cannot be forged by whoever holds the token. A later capability adds its kinds here.

use serde_json::{Value, json};

use super::{NODE, Options};

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

/// An owner decides when an object is deleted, so only the own Node may be one.
const OWNERS_ARE_THE_NODE: &str = "\
object == null || !has(object.metadata.ownerReferences) ||
object.metadata.ownerReferences.all(owner,
  owner.apiVersion == 'v1' && owner.kind == 'Node' && owner.name == variables.userNode)";

/// The policy and its binding.
pub fn policy(options: &Options) -> Vec<Value> {
    vec![
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicy",
            "metadata": super::cluster(NODE, "node"),
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": [{
                    "apiGroups": ["patchbay.dev"],
                    // Every version: a policy that a new version of the kind could pass by would be none.
                    "apiVersions": ["*"],
                    "operations": ["CREATE", "UPDATE", "DELETE"],
                    "resources": ["nodenetworks", "nodenetworks/status"],
                    // The default, written down: without it every apply finds a difference to the server's list.
                    "scope": "*",
                }]},
                "matchConditions": [{
                    "name": "node-daemon",
                    "expression": format!("request.userInfo.username == '{}'", options.node_user()),
                }],
                "variables": [
                    {"name": "userNode", "expression": USER_NODE},
                    {"name": "objectName", "expression": OBJECT_NAME},
                ],
                "validations": validations(),
            },
        }),
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": super::cluster(NODE, "node"),
            "spec": {"policyName": NODE, "validationActions": ["Deny"]},
        }),
    ]
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
            "expression": OWNERS_ARE_THE_NODE,
            "reason": "Forbidden",
            "message": "The node daemon may only make its own Node an owner of the object.",
            "messageExpression": "'The node daemon on node \"' + variables.userNode + \
                '\" may only make its own Node an owner of \"' + variables.objectName + '\".'",
        },
    ])
}
