//! Access to KubeVirt's objects as users write them.

use anyhow::{Context as _, Result};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
    core::GroupVersionKind,
};
use serde_json::json;

use crate::digest::sha256_hex;

/// The VirtualMachines of a namespace.
pub fn virtual_machines(client: &Client, namespace: &str) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), namespace, &resource("VirtualMachine"))
}

/// The VirtualMachineInstances of a namespace.
pub fn instances(client: &Client, namespace: &str) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), namespace, &resource("VirtualMachineInstance"))
}

/// The VirtualMachineInstanceMigrations of a namespace.
pub fn migrations(client: &Client, namespace: &str) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), namespace, &resource("VirtualMachineInstanceMigration"))
}

/// The VirtualMachineInstances of one namespace or of all.
pub(super) fn watched_instances(client: &Client, namespace: Option<&str>) -> Api<DynamicObject> {
    match namespace {
        Some(namespace) => instances(client, namespace),
        None => Api::all_with(client.clone(), &resource("VirtualMachineInstance")),
    }
}

fn resource(kind: &str) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("kubevirt.io", "v1", kind))
}

/// Restarts a virtual machine. Writes what virt-api writes for `virtctl restart`.
pub async fn restart_vm(client: &Client, namespace: &str, name: &str) -> Result<()> {
    let instance = instances(client, namespace).get(name).await.context("get the running instance")?;
    let uid = instance.metadata.uid.context("the instance has no UID")?;
    let requests = json!([{"action": "Stop", "uid": uid}, {"action": "Start"}]);
    let patch = json!({"status": {"stateChangeRequests": requests}});
    virtual_machines(client, namespace)
        .patch_status(name, &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .with_context(|| format!("request a restart of {namespace}/{name}"))
        .map(|_| ())
}

/// The name that KubeVirt gives to the pod interface of a secondary network of a virtual machine.
pub fn pod_interface_name(network: &str) -> String {
    format!("pod{}", &sha256_hex(network.as_bytes())[..11])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interface_names_are_those_of_kubevirt() {
        // From the tests of KubeVirt.
        assert_eq!(pod_interface_name("red"), "podb1f51a511f1");
    }
}
