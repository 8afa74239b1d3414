//! One object of each kind that can use a network, in one or another form. They name the network `NAME`.

use serde_json::{Value, json};

use crate::cluster::{User, resource};

const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
const DEFAULT: &str = "v1.multus-cni.io/default-network";

/// All kinds, and the forms that an annotation has.
pub fn all() -> Vec<(User, Value)> {
    let text = template(NETWORKS, "red, NAME@eth7");
    let list = template(NETWORKS, r#"[{"name": "NAME", "namespace": "users", "interface": "eth7"}]"#);
    let job = json!({"suspend": true, "template": list});
    vec![
        user("", "Pod", "pods", pod(NETWORKS, "users/NAME")),
        user("", "Pod", "pods", pod(DEFAULT, "users/NAME")),
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
            json!({"spec": machine("users/NAME")}),
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

/// The same, naming this network.
pub fn naming((user, object): (User, Value), network: &str) -> (User, Value) {
    let object = object.to_string().replace("NAME", network);
    let mut object: Value = serde_json::from_str(&object).unwrap_or_default();
    object["metadata"]["name"] = json!(network);
    (User { name: network.to_owned(), ..user }, object)
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
