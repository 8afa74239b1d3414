//! KubeVirt's virt-controller as a component of the control plane, and what an installer creates for it. A task stands in for
//! the virt-handlers of the nodes, see [`VirtHandler`]. There is no virt-operator, and of virt-api only two admission policies: nothing
//! checks what users write.

mod admission;
mod api;
mod crds;
mod guest;
mod handler;
mod launcher_pod;

use std::{fs, time::Duration};

use anyhow::{Context as _, Result};
use k8s_openapi::api::{coordination::v1::Lease, core::v1::Node};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DynamicObject, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use crate::{
    bootstrap::apply_object,
    control_plane::{NAME, api_server_url, component, kubernetes_file, pki_file},
    init::{Component, OnExit},
    machine::Machine,
    pki::{CertSubject, Pki, write_secret},
    program::{VIRT_CONTROLLER, virt_controller_path},
    wait,
};

pub use api::{instances, migrations, pod_interface_name, restart_vm, virtual_machines};
pub use guest::MigrationOutcome;
pub use handler::VirtHandler;

/// The image of launcher pods.
pub const LAUNCHER_IMAGE: &str = "localhost/virt-launcher:1";
/// The namespace of KubeVirt's own objects.
pub const NAMESPACE: &str = "kubevirt";
/// The user name of virt-controller; the same as with KubeVirt's manifests.
const USER: &str = "system:serviceaccount:kubevirt:kubevirt-controller";
/// The label of nodes with a virt-handler.
const SCHEDULABLE: &str = "kubevirt.io/schedulable";
/// More than any test uses.
const DEVICES_PER_NODE: &str = "1000";

/// Writes the certificate and the kubeconfig of virt-controller.
pub fn configure(machine: &Machine, pki: &Pki) -> Result<()> {
    let subject = CertSubject { user: USER, group: None, names: &[NAME], addresses: &[] };
    pki.certificate("ca", VIRT_CONTROLLER, &subject)?;
    let path = machine.disk().join(kubernetes_file("virt-controller.conf").trim_start_matches('/'));
    write_secret(&path, &pki.kubeconfig(VIRT_CONTROLLER, &api_server_url())?)
}

/// The component of the control plane.
pub fn virt_controller() -> Component {
    let mut controller = component(
        VIRT_CONTROLLER,
        [
            // Not on the PATH: the control plane may have started without KubeVirt.
            format!("/lab/programs/{}", virt_controller_path()),
            format!("--kubeconfig={}", kubernetes_file("virt-controller.conf")),
            "--listen=127.0.0.1".to_owned(),
            "--port=8443".to_owned(),
            format!("--launcher-image={LAUNCHER_IMAGE}"),
            format!("--prom-cert-file={}", pki_file("virt-controller.crt")),
            format!("--prom-key-file={}", pki_file("virt-controller.key")),
        ],
    );
    controller.environment =
        [("POD_NAMESPACE".to_owned(), NAMESPACE.to_owned()), ("NODE_NAME".to_owned(), NAME.to_owned())]
            .into();
    // It exits when it cannot renew its Lease for 10 s, for example on a busy machine.
    controller.on_exit = OnExit::Restart;
    controller
}

/// Applies only the kinds of KubeVirt, for a cluster in which tests write the machines.
pub async fn apply_kinds(client: &Client) -> Result<()> {
    for object in crds::definitions() {
        apply_object(client, object).await?;
    }
    Ok(())
}

/// Applies the objects that virt-operator would create.
pub async fn apply(client: &Client, pki: &Pki) -> Result<()> {
    let ca = fs::read_to_string(pki.dir().join("ca.crt")).context("read ca.crt")?;
    let objects = crds::definitions().into_iter().chain(admission::policies()).chain(objects(&ca));
    for object in objects {
        apply_object(client, object).await?;
    }
    Ok(())
}

fn objects(ca: &str) -> [Value; 4] {
    [
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": {"name": "lab:virt-controller"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": USER}],
        }),
        json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": "kubevirt-ca", "namespace": NAMESPACE},
            "data": {"ca-bundle": ca},
        }),
        json!({
            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
            "metadata": {"name": "kubevirt", "namespace": NAMESPACE},
            "spec": {"configuration": {"developerConfiguration": {"useEmulation": true}}},
        }),
    ]
}

/// Gives a node the label and the devices that launcher pods need. The kubelet drops the devices when the node boots.
pub async fn prepare_node(client: &Client, node: &str) -> Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let label = json!({"metadata": {"labels": {SCHEDULABLE: "true"}}});
    nodes
        .patch(node, &PatchParams::default(), &Patch::Merge(&label))
        .await
        .with_context(|| format!("label {node}"))?;
    let resources = json!({
        "devices.kubevirt.io/kvm": DEVICES_PER_NODE,
        "devices.kubevirt.io/tun": DEVICES_PER_NODE,
        "devices.kubevirt.io/vhost-net": DEVICES_PER_NODE,
        "ephemeral-storage": "100Gi",
    });
    let status = json!({"status": {"capacity": resources, "allocatable": resources}});
    nodes
        .patch_status(node, &PatchParams::default(), &Patch::Merge(&status))
        .await
        .with_context(|| format!("add devices to {node}"))
        .map(|_| ())
}

/// Waits until virt-controller leads and the admission policies act.
pub async fn wait_ready(client: &Client) -> Result<()> {
    let migration = json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceMigration",
        "metadata": {"name": "lab-probe"}, "spec": {"vmiName": "lab-probe"},
    });
    let probe: DynamicObject = serde_json::from_value(migration).context("build a migration")?;
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    wait::until(Duration::from_secs(60), "the admission policies of KubeVirt to act", || async {
        let created = migrations(client, NAMESPACE).create(&dry_run, &probe).await?;
        Ok((!created.finalizers().is_empty()).then_some(()))
    })
    .await?;
    let leases: Api<Lease> = Api::namespaced(client.clone(), NAMESPACE);
    wait::until(Duration::from_secs(60), "virt-controller to lead", || async {
        let lease = leases.get_opt(VIRT_CONTROLLER).await?;
        Ok(lease.and_then(|l| l.spec?.holder_identity).filter(|holder| !holder.is_empty()).map(|_| ()))
    })
    .await
}
