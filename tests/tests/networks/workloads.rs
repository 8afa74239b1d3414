//! Objects of every kind that can use a network. As templates, they refer to the network `NAME` in the namespace `SPACE`.

use serde_json::{Value, json};

use crate::cluster::{Workload, resource};

const NETWORKS_ANNOTATION: &str = "k8s.v1.cni.cncf.io/networks";
const DEFAULT_NETWORK_ANNOTATION: &str = "v1.multus-cni.io/default-network";

/// Every kind, and every form of the annotation.
pub fn all() -> Vec<(Workload, Value)> {
    let text = template(NETWORKS_ANNOTATION, "red, NAME@eth7");
    let list =
        template(NETWORKS_ANNOTATION, r#"[{"name": "NAME", "namespace": "SPACE", "interface": "eth7"}]"#);
    let job = json!({"suspend": true, "template": list});
    vec![
        workload("", "Pod", "pods", pod(NETWORKS_ANNOTATION, "SPACE/NAME")),
        workload("", "Pod", "pods", pod(DEFAULT_NETWORK_ANNOTATION, "SPACE/NAME")),
        workload("apps", "Deployment", "deployments", workload_spec(&text, json!({"replicas": 0}))),
        workload(
            "apps",
            "StatefulSet",
            "statefulsets",
            workload_spec(&list, json!({"replicas": 0, "serviceName": "x"})),
        ),
        workload("apps", "DaemonSet", "daemonsets", workload_spec(&text, json!({}))),
        workload("apps", "ReplicaSet", "replicasets", workload_spec(&list, json!({"replicas": 0}))),
        workload("batch", "Job", "jobs", json!({"spec": job})),
        workload(
            "batch",
            "CronJob",
            "cronjobs",
            json!({"spec": {"schedule": "0 0 1 1 *", "suspend": true, "jobTemplate": {"spec": job}}}),
        ),
        virtual_machine("vm", "NAME"),
        workload("kubevirt.io", "VirtualMachine", "virtualmachines", json!({"spec": {"template": text}})),
        workload(
            "kubevirt.io",
            "VirtualMachineInstance",
            "virtualmachineinstances",
            json!({"spec": vm_spec("SPACE/NAME")}),
        ),
    ]
}

/// A VirtualMachine on this network.
pub fn virtual_machine(name: &str, network: &str) -> (Workload, Value) {
    let spec = json!({"spec": {"template": {"spec": vm_spec(network)}}});
    let (vm, mut object) = workload("kubevirt.io", "VirtualMachine", "virtualmachines", spec);
    object["metadata"]["name"] = json!(name);
    (Workload { name: name.to_owned(), ..vm }, object)
}

/// Fills a template: the name of the object, and the namespace and name of its network.
pub fn from_template(
    (workload, object): (Workload, Value),
    name: &str,
    namespace: &str,
    network: &str,
) -> (Workload, Value) {
    let object = object.to_string().replace("SPACE", namespace).replace("NAME", network);
    let mut object: Value = serde_json::from_str(&object).unwrap_or_default();
    object["metadata"]["name"] = json!(name);
    (Workload { name: name.to_owned(), ..workload }, object)
}

/// Removes all references to networks.
pub fn without_networks((workload, mut object): (Workload, Value)) -> (Workload, Value) {
    for place in [
        "/metadata",
        "/spec",
        "/spec/template/metadata",
        "/spec/template/spec",
        "/spec/jobTemplate/spec/template/metadata",
    ] {
        if let Some(part) = object.pointer_mut(place).and_then(Value::as_object_mut) {
            part.remove("annotations");
            part.remove("networks");
        }
    }
    (workload, object)
}

/// A patch that adds the network references of this object to another object of its kind.
pub fn reference_patch(object: &Value) -> Value {
    let mut patch = json!({"metadata": {"annotations": object["metadata"]["annotations"]}});
    for place in ["/spec/template", "/spec/jobTemplate/spec/template"] {
        let Some(annotations) = object.pointer(&format!("{place}/metadata/annotations")) else { continue };
        let template = json!({"metadata": {"annotations": annotations}});
        patch["spec"] = match place {
            "/spec/template" => json!({"template": template}),
            _ => json!({"jobTemplate": {"spec": {"template": template}}}),
        };
    }
    if object.pointer("/spec/networks").is_some() {
        patch["spec"] = json!({"networks": object["spec"]["networks"]});
    }
    if let Some(networks) = object.pointer("/spec/template/spec/networks") {
        patch["spec"] = json!({"template": {"spec": {"networks": networks}}});
    }
    patch
}

/// Sets the controlling owner.
pub fn controlled(
    (workload, mut object): (Workload, Value),
    owner: &Workload,
    uid: &str,
) -> (Workload, Value) {
    object["metadata"]["ownerReferences"] = json!([{"apiVersion": owner.resource.api_version,
        "kind": owner.resource.kind, "name": owner.name, "uid": uid, "controller": true}]);
    (workload, object)
}

fn workload(group: &str, kind: &str, plural: &str, mut object: Value) -> (Workload, Value) {
    let resource = resource(group, "v1", kind, plural);
    object["apiVersion"] = json!(resource.api_version);
    object["kind"] = json!(kind);
    (Workload { resource, namespace: String::new(), name: String::new() }, object)
}

fn containers() -> Value {
    // Never scheduled: only the pod template matters.
    json!({"containers": [{"name": "c", "image": "none"}], "nodeSelector": {"none": "such"}, "restartPolicy": "Always"})
}

fn pod(annotation: &str, value: &str) -> Value {
    json!({"metadata": {"annotations": {annotation: value}}, "spec": containers()})
}

fn template(annotation: &str, value: &str) -> Value {
    let mut spec = containers();
    spec["restartPolicy"] = json!("Never");
    json!({"metadata": {"labels": {"app": "x"}, "annotations": {annotation: value}}, "spec": spec})
}

fn workload_spec(template: &Value, mut spec: Value) -> Value {
    spec["selector"] = json!({"matchLabels": {"app": "x"}});
    spec["template"] = template.clone();
    spec["template"]["spec"]["restartPolicy"] = json!("Always");
    json!({"spec": spec})
}

fn vm_spec(network: &str) -> Value {
    json!({"domain": {}, "networks": [{"name": "default", "pod": {}}, {"name": "n", "multus": {"networkName": network}}]})
}
