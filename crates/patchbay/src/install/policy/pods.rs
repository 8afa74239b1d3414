//! The policy that restricts what a node daemon may write to pods.

use api::{attachments::ATTACHMENTS_ANNOTATION, network_status::NETWORK_STATUS_ANNOTATION};
use serde_json::{Value, json};

use super::{AdmissionPolicy, InstallOptions, USER_NODE, is_user};

/// The policy for pods.
pub const POD_POLICY: &str = "patchbay-node-pods";

/// The annotations that a node daemon may write.
const WRITABLE: [&str; 2] = [NETWORK_STATUS_ANNOTATION, ATTACHMENTS_ANNOTATION];

/// The fields of the metadata that a client can write, besides annotations, each with the value of a pod without it.
///
/// The API server itself guards the identity and the deletion of the pod. `managedFields` and `resourceVersion` differ in
/// every write.
const METADATA: [(&str, &str); 4] =
    [("labels", "{}"), ("finalizers", "[]"), ("ownerReferences", "[]"), ("generateName", "''")];

/// Nothing that RBAC grants restricts a daemon to the pods of its node or to single annotations: a stolen token could take
/// pods out of their Services, or report containers as ready.
pub fn pod_policy(options: &InstallOptions) -> Vec<Value> {
    AdmissionPolicy {
        name: POD_POLICY,
        component: "node",
        group: "",
        operations: &["CREATE", "UPDATE", "DELETE"],
        resources: &["pods", "pods/status"],
        match_condition: ("node-daemon", is_user(&options.node_user())),
        variables: json!([
            {"name": "userNode", "expression": USER_NODE},
            {"name": "podNode", "expression": "oldObject != null && has(oldObject.spec.nodeName) ? oldObject.spec.nodeName : ''"},
            {"name": "annotations", "expression": annotations("object")},
            {"name": "oldAnnotations", "expression": annotations("oldObject")},
        ]),
        validations: json!([
            {
                "expression": "variables.userNode != '' && variables.podNode == variables.userNode",
                "reason": "Forbidden",
                "message": "Pod rejected: a node daemon may only write to pods of its own node; use the token of the \
                    patchbay-node pod on the node of the pod.",
            },
            {
                "expression": changes_only_annotations(),
                "reason": "Forbidden",
                "message": rejection(),
            },
            {
                "expression": keeps_other_annotations(),
                "reason": "Forbidden",
                "message": rejection(),
            },
        ]),
    }
    .objects()
}

fn rejection() -> String {
    format!(
        "Pod rejected: a node daemon may only change the annotations {} and {}; change anything else of a pod as another \
        user.",
        WRITABLE[0], WRITABLE[1]
    )
}

fn annotations(pod: &str) -> String {
    field(pod, "annotations", "{}")
}

fn field(pod: &str, name: &str, absent: &str) -> String {
    format!("{pod} != null && has({pod}.metadata.{name}) ? {pod}.metadata.{name} : {absent}")
}

/// The update changes no part of the pod except annotations.
fn changes_only_annotations() -> String {
    let same = |(name, absent): (&str, &str)| {
        format!("({}) ==\n  ({})", field("object", name, absent), field("oldObject", name, absent))
    };
    let metadata = METADATA.map(same).join(" &&\n");
    format!(
        "request.operation == 'UPDATE' && object.spec == oldObject.spec && object.status == oldObject.status &&\n{metadata}"
    )
}

/// Every annotation that the daemon may not write has its old value, and none is removed.
///
/// A pod can have 256 KiB of annotations. The expression visits each once and compares the number of the old ones instead of
/// visiting these too, so that its cost stays below the limit of the API server.
fn keeps_other_annotations() -> String {
    let [status, attachments] = WRITABLE;
    let others = |map: &str| {
        format!(
            "size(variables.{map}) - ('{status}' in variables.{map} ? 1 : 0) - ('{attachments}' in variables.{map} ? 1 : 0)"
        )
    };
    format!(
        "{} ==\n  {} &&\nvariables.annotations.all(key, key == '{status}' || key == '{attachments}' ||\n  \
        (key in variables.oldAnnotations && variables.oldAnnotations[key] == variables.annotations[key]))",
        others("annotations"),
        others("oldAnnotations")
    )
}
