//! One object of each kind that can use a network, in one or another form. They name the network `NAME` in the
//! namespace `SPACE`.

use serde_json::{Value, json};

use crate::cluster::{User, resource};

const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
const DEFAULT: &str = "v1.multus-cni.io/default-network";

/// All kinds, and the forms that an annotation has.
pub fn all() -> Vec<(User, Value)> {
    let text = template(NETWORKS, "red, NAME@eth7");
    let list = template(NETWORKS, r#"[{"name": "NAME", "namespace": "SPACE", "interface": "eth7"}]"#);
    let job = json!({"suspend": true, "template": list});
    vec![
        user("", "Pod", "pods", pod(NETWORKS, "SPACE/NAME")),
        user("", "Pod", "pods", pod(DEFAULT, "SPACE/NAME")),
        user("apps", "Deployment", "deployments", workload(&text, json!({"replicas": 0}))),
        user(
            "apps",
            "StatefulSet",
            "statefulsets",
            workload(&list, json!({"replicas": 0, "serviceName": "x"})),
        ),
        user("apps", "DaemonSet", "daemonsets", workload(&text, json!({}))),
        user("apps", "ReplicaSet", "replicasets", workload(&list, json!({"replicas": 0}))),
        user("batch", "Job", "jobs", json!({"spec": job})),
        user(
            "batch",
            "CronJob",
            "cronjobs",
            json!({"spec": {"schedule": "0 0 1 1 *", "suspend": true, "jobTemplate": {"spec": job}}}),
        ),
        virtual_machine("vm", "NAME"),
        user("kubevirt.io", "VirtualMachine", "virtualmachines", json!({"spec": {"template": text}})),
        user(
            "kubevirt.io",
            "VirtualMachineInstance",
            "virtualmachineinstances",
            json!({"spec": machine("SPACE/NAME")}),
        ),
    ]
}

/// A virtual machine that names this network.
pub fn virtual_machine(name: &str, network: &str) -> (User, Value) {
    let spec = json!({"spec": {"template": {"spec": machine(network)}}});
    let (user, mut object) = user("kubevirt.io", "VirtualMachine", "virtualmachines", spec);
    object["metadata"]["name"] = json!(name);
    (User { name: name.to_owned(), ..user }, object)
}

/// The same under this name, naming this network of this namespace.
pub fn naming((user, object): (User, Value), name: &str, namespace: &str, network: &str) -> (User, Value) {
    let object = object.to_string().replace("SPACE", namespace).replace("NAME", network);
    let mut object: Value = serde_json::from_str(&object).unwrap_or_default();
    object["metadata"]["name"] = json!(name);
    (User { name: name.to_owned(), ..user }, object)
}

/// The same, naming no network at all.
pub fn plain((user, mut object): (User, Value)) -> (User, Value) {
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
    (user, object)
}

/// A patch that makes another object of the kind name what this one names.
pub fn edit(object: &Value) -> Value {
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

/// The same, controlled by this object.
pub fn controlled((user, mut object): (User, Value), owner: &User, uid: &str) -> (User, Value) {
    object["metadata"]["ownerReferences"] = json!([{"apiVersion": owner.resource.api_version,
        "kind": owner.resource.kind, "name": owner.name, "uid": uid, "controller": true}]);
    (user, object)
}

fn user(group: &str, kind: &str, plural: &str, mut object: Value) -> (User, Value) {
    let resource = resource(group, "v1", kind, plural);
    object["apiVersion"] = json!(resource.api_version);
    object["kind"] = json!(kind);
    (User { resource, namespace: String::new(), name: String::new() }, object)
}

fn containers() -> Value {
    // No node is ever chosen: what counts is what the template says.
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

fn workload(template: &Value, mut spec: Value) -> Value {
    spec["selector"] = json!({"matchLabels": {"app": "x"}});
    spec["template"] = template.clone();
    spec["template"]["spec"]["restartPolicy"] = json!("Always");
    json!({"spec": spec})
}

fn machine(network: &str) -> Value {
    json!({"domain": {}, "networks": [{"name": "default", "pod": {}}, {"name": "n", "multus": {"networkName": network}}]})
}
