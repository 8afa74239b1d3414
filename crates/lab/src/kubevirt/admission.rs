//! The parts of virt-api's mutating webhooks without which virt-controller does not work as in a real cluster, as
//! MutatingAdmissionPolicies: finalizers and the first status.

use serde_json::{Value, json};

/// Like virt-api: the finalizer, the phase, and the user of the launcher.
const INSTANCE: &str = r#"
(has(object.status) ? [] : [JSONPatch{op: "add", path: "/status", value: {}}])
+ [
  JSONPatch{op: "add", path: "/status/phase", value: "Pending"},
  JSONPatch{op: "add", path: "/status/runtimeUser", value: 107},
  JSONPatch{op: "add", path: "/metadata/finalizers", value:
    (has(object.metadata.finalizers) ? object.metadata.finalizers : []) + ["kubevirt.io/foregroundDeleteVirtualMachine"]}
]"#;

/// Like virt-api: the finalizer that makes deletion an abort, and the label of the instance.
const MIGRATION: &str = r#"
(has(object.metadata.labels) ? [] : [JSONPatch{op: "add", path: "/metadata/labels", value: {}}])
+ [
  JSONPatch{op: "add", path: "/metadata/labels/kubevirt.io~1vmi-name", value: object.spec.vmiName},
  JSONPatch{op: "add", path: "/metadata/finalizers", value:
    (has(object.metadata.finalizers) ? object.metadata.finalizers : []) + ["kubevirt.io/migrationJobFinalize"]}
]"#;

/// The policies and their bindings.
pub fn policies() -> Vec<Value> {
    [("virtualmachineinstances", INSTANCE), ("virtualmachineinstancemigrations", MIGRATION)]
        .into_iter()
        .flat_map(|(resource, expression)| policy(resource, expression))
        .collect()
}

fn policy(resource: &str, expression: &str) -> [Value; 2] {
    let name = format!("lab-{resource}");
    [
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingAdmissionPolicy",
            "metadata": {"name": name},
            "spec": {
                "matchConstraints": {"resourceRules": [{
                    "apiGroups": ["kubevirt.io"], "apiVersions": ["*"],
                    "operations": ["CREATE"], "resources": [resource],
                }]},
                "failurePolicy": "Fail",
                "reinvocationPolicy": "Never",
                "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": expression}}],
            },
        }),
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingAdmissionPolicyBinding",
            "metadata": {"name": name},
            "spec": {"policyName": name},
        }),
    ]
}
