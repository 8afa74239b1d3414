//! The objects that an installer would create: RBAC for multus and CoreDNS, the DNS Service, and the CRD of
//! NetworkAttachmentDefinition.

use anyhow::{Context as _, Result};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
    core::GroupVersionKind,
};
use serde_json::{Value, json};

use crate::address::{CONTROL_PLANE, DNS_SERVICE};

/// Which objects to apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BootstrapScope {
    ControlPlane,
    WithNodes,
}

/// Applies the objects.
pub async fn apply(client: &Client, scope: BootstrapScope) -> Result<()> {
    for object in dns() {
        apply_object(client, object).await?;
    }
    if scope == BootstrapScope::WithNodes {
        for object in multus() {
            apply_object(client, object).await?;
        }
    }
    Ok(())
}

/// Applies one object; its kind must have a regular plural.
pub async fn apply_object(client: &Client, object: Value) -> Result<()> {
    let field = |name: &str| object[name].as_str().unwrap_or_default().to_owned();
    let (group, version) = match field("apiVersion").split_once('/') {
        Some((group, version)) => (group.to_owned(), version.to_owned()),
        None => (String::new(), field("apiVersion")),
    };
    let resource = ApiResource::from_gvk(&GroupVersionKind { group, version, kind: field("kind") });
    let name = object["metadata"]["name"].as_str().context("the object has no name")?.to_owned();
    let api: Api<DynamicObject> = match object["metadata"]["namespace"].as_str() {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    };
    let params = PatchParams::apply("lab").force();
    api.patch(&name, &params, &Patch::Apply(&object))
        .await
        .with_context(|| format!("apply {} {name}", field("kind")))
        .map(|_| ())
}

fn role(name: &str, subject: &Value, rules: Value) -> [Value; 2] {
    [
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
            "metadata": {"name": name}, "rules": rules,
        }),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
            "subjects": [subject],
        }),
    ]
}

fn dns() -> Vec<Value> {
    let user = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "lab:coredns"});
    let rules = json!([
        {"apiGroups": [""], "resources": ["endpoints", "services", "pods", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]);
    let mut objects = role("lab:coredns", &user, rules).to_vec();
    let ports = |target: Option<i32>| {
        let port = |name: &str, protocol: &str| {
            let mut port = json!({"name": name, "port": 53, "protocol": protocol});
            if let Some(target) = target {
                port["targetPort"] = json!(target);
            }
            port
        };
        json!([port("dns", "UDP"), port("dns-tcp", "TCP")])
    };
    objects.push(json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}},
        "spec": {"clusterIP": DNS_SERVICE, "ports": ports(Some(53))},
    }));
    // No selector: CoreDNS runs on the control plane, so that it survives the failure of a node.
    objects.push(json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": "kube-dns", "namespace": "kube-system",
            "labels": {"kubernetes.io/service-name": "kube-dns", "endpointslice.kubernetes.io/managed-by": "lab"},
        },
        "addressType": "IPv4",
        "ports": ports(None),
        "endpoints": [{"addresses": [CONTROL_PLANE.0.to_string()], "conditions": {"ready": true}}],
    }));
    objects
}

fn multus() -> Vec<Value> {
    let account = json!({"kind": "ServiceAccount", "name": "multus", "namespace": "kube-system"});
    let rules = json!([
        {"apiGroups": ["k8s.cni.cncf.io"], "resources": ["*"], "verbs": ["*"]},
        {"apiGroups": [""], "resources": ["pods", "pods/status"], "verbs": ["get", "list", "watch", "update", "patch"]},
        {"apiGroups": ["", "events.k8s.io"], "resources": ["events"], "verbs": ["create", "patch", "update"]},
    ]);
    let mut objects = vec![nad_crd()];
    objects.push(json!({
        "apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "multus", "namespace": "kube-system"},
    }));
    objects.extend(role("multus", &account, rules));
    objects
}

fn nad_crd() -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "network-attachment-definitions.k8s.cni.cncf.io"},
        "spec": {
            "group": "k8s.cni.cncf.io",
            "scope": "Namespaced",
            "names": {
                "plural": "network-attachment-definitions", "singular": "network-attachment-definition",
                "kind": "NetworkAttachmentDefinition", "shortNames": ["net-attach-def"],
            },
            "versions": [{
                "name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": {
                    "type": "object",
                    "properties": {
                        "apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"},
                        "spec": {"type": "object", "properties": {"config": {"type": "string"}}},
                    },
                }},
            }],
        },
    })
}
