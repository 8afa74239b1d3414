//! Virtual machines on BridgeNetworks in a lab with KubeVirt's controller.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use api::IPAMClaim;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use lab::{
    kubevirt::{instances, migrations, pod_interface_name, virtual_machines},
    test_namespace::TestNamespace,
    wait,
};
use serde_json::{Value, json};

/// The timeout for waits that are not about time.
const TIMEOUT: Duration = Duration::from_secs(90);
const NETWORK_STATUS: &str = "k8s.v1.cni.cncf.io/network-status";

/// A secondary network of a machine: its logical name, its NAD, and the state of its interface.
pub type MachineNic<'a> = (&'a str, &'a str, Option<&'a str>);

/// What a launcher pod has on an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachedNic {
    pub ips: Vec<IpAddr>,
    pub mac: String,
}

/// One machine of a test.
pub struct TestVm<'a> {
    pub ns: &'a TestNamespace,
    pub name: &'static str,
}

/// The interfaces and networks of a machine with the pod network.
fn devices(nics: &[MachineNic<'_>]) -> (Value, Value) {
    let mut interfaces = vec![json!({"name": "default", "masquerade": {}})];
    let mut networks = vec![json!({"name": "default", "pod": {}})];
    for (name, nad, state) in nics {
        let mut interface = json!({"name": name, "bridge": {}});
        if let Some(state) = state {
            interface["state"] = json!(state);
        }
        interfaces.push(interface);
        networks.push(json!({"name": name, "multus": {"networkName": nad}}));
    }
    (json!(interfaces), json!(networks))
}

impl TestVm<'_> {
    /// Creates and starts the machine.
    pub async fn create(&self, nics: &[MachineNic<'_>]) -> Result<()> {
        let (interfaces, networks) = devices(nics);
        let disks = json!([{"name": "root", "disk": {"bus": "virtio"}}]);
        let spec = json!({
            "domain": {
                "devices": {"disks": disks, "interfaces": interfaces},
                "resources": {"requests": {"memory": "64Mi"}},
            },
            "networks": networks,
            "volumes": [{"name": "root", "containerDisk": {"image": "localhost/lab:1"}}],
        });
        let object: DynamicObject = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": self.name},
            "spec": {
                "runStrategy": "Always",
                "template": {"metadata": {"labels": {"kubevirt.io/domain": self.name}}, "spec": spec},
            },
        }))?;
        let vms = virtual_machines(&self.ns.client, &self.ns.namespace);
        vms.create(&PostParams::default(), &object).await.context("create the VM")?;
        Ok(())
    }

    pub async fn patch(&self, spec: Value) -> Result<()> {
        let vms = virtual_machines(&self.ns.client, &self.ns.namespace);
        let patch = json!({"spec": spec});
        vms.patch(self.name, &PatchParams::default(), &Patch::Merge(&patch)).await.context("edit the VM")?;
        Ok(())
    }

    /// Plugs and unplugs interfaces.
    pub async fn set_nics(&self, nics: &[MachineNic<'_>]) -> Result<()> {
        let (interfaces, networks) = devices(nics);
        let domain = json!({"devices": {"interfaces": interfaces}});
        self.patch(json!({"template": {"spec": {"domain": domain, "networks": networks}}})).await
    }

    pub async fn instance(&self) -> Result<Option<Value>> {
        let found = instances(&self.ns.client, &self.ns.namespace).get_opt(self.name).await?;
        Ok(found.map(serde_json::to_value).transpose()?)
    }

    /// Waits until it runs as another instance than before.
    pub async fn wait_running(&self, before: Option<&Value>) -> Result<Value> {
        let old = before.map_or(Value::Null, |instance| instance["metadata"]["uid"].clone());
        wait::until(TIMEOUT, &format!("{} to run", self.name), || async {
            let runs = |instance: &Value| {
                instance["status"]["phase"] == "Running" && instance["metadata"]["uid"] != old
            };
            Ok(self.instance().await?.filter(runs))
        })
        .await
    }

    /// Stops the machine, and waits until it has no pod.
    pub async fn stop(&self) -> Result<()> {
        self.patch(json!({"runStrategy": "Halted"})).await?;
        wait::until(TIMEOUT, "the stopped VM to have no instance and no pod", || async {
            Ok((self.instance().await?.is_none() && self.pods().await?.is_empty()).then_some(()))
        })
        .await
    }

    /// Deletes the machine, and waits until it is gone with its pods.
    pub async fn delete(&self) -> Result<()> {
        let vms = virtual_machines(&self.ns.client, &self.ns.namespace);
        vms.delete(self.name, &DeleteParams::background()).await.context("delete the VM")?;
        wait::until(TIMEOUT, "the deleted VM to have no instance and no pod", || async {
            Ok((self.instance().await?.is_none() && self.pods().await?.is_empty()).then_some(()))
        })
        .await
    }

    /// Its launcher pods, also those that ended.
    pub async fn pods(&self) -> Result<Vec<Pod>> {
        let params = ListParams::default().labels(&format!("vm.kubevirt.io/name={}", self.name));
        Ok(self.ns.pods().list(&params).await?.items)
    }

    /// Its launcher pods that have not ended.
    pub async fn live_pods(&self) -> Result<Vec<Pod>> {
        Ok(self.pods().await?.into_iter().filter(|pod| !has_ended(pod)).collect())
    }

    /// The pod with the guest.
    pub async fn launcher(&self) -> Result<Pod> {
        let node = self.instance().await?.context("no instance")?["status"]["nodeName"].clone();
        let mut running = self.live_pods().await?.into_iter().filter(|pod| {
            let on_node = json!(pod.spec.as_ref().and_then(|spec| spec.node_name.clone())) == node;
            on_node && pod.metadata.deletion_timestamp.is_none()
        });
        running.next().with_context(|| format!("{} has no launcher on {node}", self.name))
    }

    /// Waits until the launcher has an interface for the network.
    pub async fn wait_attached(&self, network: &str) -> Result<AttachedNic> {
        wait::until(TIMEOUT, &format!("{} to have {network}", self.name), || async {
            attached(&self.launcher().await?, network)
        })
        .await
    }

    /// Starts a migration.
    pub async fn start_migration(&self, name: &str) -> Result<()> {
        let object: DynamicObject = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceMigration",
            "metadata": {"name": name}, "spec": {"vmiName": self.name},
        }))?;
        let api = migrations(&self.ns.client, &self.ns.namespace);
        api.create(&PostParams::default(), &object).await.context("create the migration")?;
        Ok(())
    }

    /// Waits until a migration reaches a phase.
    pub async fn wait_migration(&self, name: &str, phase: &str) -> Result<()> {
        let api = migrations(&self.ns.client, &self.ns.namespace);
        wait::until(TIMEOUT, &format!("migration {name} to be {phase}"), || async {
            let found = api.get(name).await?.data["status"]["phase"].clone();
            ensure!(found == phase || found != "Failed", "migration {name} failed");
            Ok((found == phase).then_some(()))
        })
        .await
    }

    /// Waits until a migration has a target pod with an interface for the network.
    pub async fn wait_target(&self, source: &Pod, network: &str) -> Result<(Pod, AttachedNic)> {
        wait::until(TIMEOUT, &format!("a target of {} with {network}", self.name), || async {
            let mut others = self.live_pods().await?.into_iter().filter(|pod| pod.uid() != source.uid());
            let Some(target) = others.next() else { return Ok(None) };
            Ok(attached(&target, network)?.map(|nic| (target, nic)))
        })
        .await
    }

    /// The claim of a network.
    pub async fn claim(&self, network: &str) -> Result<Option<IPAMClaim>> {
        let api: Api<IPAMClaim> = Api::namespaced(self.ns.client.clone(), &self.ns.namespace);
        Ok(api.get_opt(&format!("{}.{network}", self.name)).await?)
    }
}

/// What network-status shows for a network of a machine.
pub fn attached(pod: &Pod, network: &str) -> Result<Option<AttachedNic>> {
    let Some(text) = pod.annotations().get(NETWORK_STATUS) else { return Ok(None) };
    let statuses: Vec<Value> = serde_json::from_str(text)?;
    let interface = pod_interface_name(network);
    let Some(found) = statuses.iter().find(|status| status["interface"] == interface.as_str()) else {
        return Ok(None);
    };
    let ips = found["ips"].as_array().cloned().unwrap_or_default();
    let ips = ips.iter().filter_map(Value::as_str).map(str::parse).collect::<Result<_, _>>()?;
    Ok(Some(AttachedNic { ips, mac: found["mac"].as_str().unwrap_or_default().to_owned() }))
}

pub fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}
