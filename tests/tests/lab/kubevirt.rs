//! Virtual machines through KubeVirt's own controller: start, restart, stop, migration and its abort, hot-plug.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt as _,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use lab::{
    kubevirt::{
        MigrationOutcome, VirtHandler, instances, migrations, pod_interface_name, restart_vm,
        virtual_machines,
    },
    test_namespace::TestNamespace,
    wait,
};
use serde_json::{Value, json};

const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
const NETWORK_STATUS: &str = "k8s.v1.cni.cncf.io/network-status";

/// A machine with the pod network, and a bridge as secondary network, written as in KubeVirt's user guide.
fn virtual_machine(name: &str, secondary: &[(&str, Option<&str>)]) -> Value {
    let (interfaces, networks) = devices(secondary);
    json!({
        "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
        "metadata": {"name": name},
        "spec": {
            "runStrategy": "Always",
            "template": {
                "metadata": {"labels": {"kubevirt.io/domain": name}},
                "spec": {
                    "domain": {
                        "devices": {
                            "disks": [{"name": "root", "disk": {"bus": "virtio"}}],
                            "interfaces": interfaces,
                        },
                        "resources": {"requests": {"memory": "64Mi"}},
                    },
                    "networks": networks,
                    "volumes": [{"name": "root", "containerDisk": {"image": "localhost/lab:1"}}],
                },
            },
        },
    })
}

/// The interfaces and networks of a machine: name and state of each secondary one.
fn devices(secondary: &[(&str, Option<&str>)]) -> (Value, Value) {
    let mut interfaces = vec![json!({"name": "default", "masquerade": {}})];
    let mut networks = vec![json!({"name": "default", "pod": {}})];
    for (name, state) in secondary {
        let mut interface = json!({"name": name, "bridge": {}});
        if let Some(state) = state {
            interface["state"] = json!(state);
        }
        interfaces.push(interface);
        networks.push(json!({"name": name, "multus": {"networkName": name}}));
    }
    (json!(interfaces), json!(networks))
}

/// One machine of a test.
struct TestVm<'a> {
    ns: &'a TestNamespace,
    name: &'static str,
}

impl TestVm<'_> {
    async fn create(&self, secondary: &[(&str, Option<&str>)]) -> Result<()> {
        let object: DynamicObject = serde_json::from_value(virtual_machine(self.name, secondary))?;
        let vms = virtual_machines(&self.ns.client, &self.ns.namespace);
        vms.create(&PostParams::default(), &object).await.context("create the VM")?;
        Ok(())
    }

    async fn patch(&self, spec: Value) -> Result<()> {
        let vms = virtual_machines(&self.ns.client, &self.ns.namespace);
        let patch = json!({"spec": spec});
        vms.patch(self.name, &PatchParams::default(), &Patch::Merge(&patch)).await.context("edit the VM")?;
        Ok(())
    }

    async fn set_secondary(&self, secondary: &[(&str, Option<&str>)]) -> Result<()> {
        let (interfaces, networks) = devices(secondary);
        let domain = json!({"devices": {"interfaces": interfaces}});
        self.patch(json!({"template": {"spec": {"domain": domain, "networks": networks}}})).await
    }

    async fn instance(&self) -> Result<Option<Value>> {
        let found = instances(&self.ns.client, &self.ns.namespace).get_opt(self.name).await?;
        Ok(found.map(serde_json::to_value).transpose()?)
    }

    /// Waits until the instance satisfies a condition.
    async fn wait_instance(&self, what: &str, condition: impl Fn(&Value) -> bool) -> Result<Value> {
        let what = format!("{} {what}", self.name);
        wait::until(Duration::from_secs(90), &what, || async {
            Ok(self.instance().await?.filter(|instance| condition(instance)))
        })
        .await
        .with_context(|| format!("while waiting for {what}"))
    }

    /// Waits until it runs as another instance than before.
    async fn wait_running(&self, before: Option<&Value>) -> Result<Value> {
        let old = before.map_or(Value::Null, |instance| instance["metadata"]["uid"].clone());
        self.wait_instance("to run", |instance| {
            instance["status"]["phase"] == "Running" && instance["metadata"]["uid"] != old
        })
        .await
    }

    /// Its launcher pods, also those that ended.
    async fn pods(&self) -> Result<Vec<Pod>> {
        let params = ListParams::default().labels(&format!("vm.kubevirt.io/name={}", self.name));
        Ok(self.ns.pods().list(&params).await?.items)
    }

    /// The pod with the guest.
    async fn launcher(&self) -> Result<Pod> {
        let node = self.instance().await?.context("no instance")?["status"]["nodeName"].clone();
        let mut running = self.pods().await?.into_iter().filter(|pod| {
            let on_node = json!(pod.spec.as_ref().and_then(|s| s.node_name.clone())) == node;
            on_node && !has_ended(pod) && pod.metadata.deletion_timestamp.is_none()
        });
        running.next().with_context(|| format!("{} has no launcher on {node}", self.name))
    }

    /// Waits until the networks annotation of the launcher names exactly these networks.
    async fn wait_annotation(&self, networks: &[&str]) -> Result<()> {
        let expected: Vec<String> = networks.iter().map(|name| pod_interface_name(name)).collect();
        wait::until(Duration::from_secs(60), &format!("the annotation of {networks:?}"), || async {
            let launcher = self.launcher().await?;
            let text = launcher.annotations().get(NETWORKS).map_or("[]", String::as_str);
            let elements: Vec<Value> = serde_json::from_str(text)?;
            let found: Vec<&str> = elements.iter().filter_map(|e| e["interface"].as_str()).collect();
            Ok((found == expected).then_some(()))
        })
        .await
    }

    /// Starts a migration and waits until it reaches a phase.
    async fn migrate(&self, name: &str, phase: &str) -> Result<()> {
        let object: DynamicObject = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceMigration",
            "metadata": {"name": name}, "spec": {"vmiName": self.name},
        }))?;
        let api = migrations(&self.ns.client, &self.ns.namespace);
        api.create(&PostParams::default(), &object).await.context("create the migration")?;
        wait::until(Duration::from_secs(90), &format!("migration {name} to be {phase}"), || async {
            let found = api.get(name).await?.data["status"]["phase"].clone();
            ensure!(found != "Failed", "migration {name} failed");
            Ok((found == phase).then_some(()))
        })
        .await
    }
}

/// The interfaces of a pod that multus attached.
fn attached(pod: &Pod) -> Result<Vec<String>> {
    let text = pod.annotations().get(NETWORK_STATUS).context("the pod has no network-status")?;
    let statuses: Vec<Value> = serde_json::from_str(text)?;
    Ok(statuses.iter().filter_map(|s| s["interface"].as_str().map(str::to_owned)).collect())
}

fn info_source(instance: &Value, network: &str) -> Option<String> {
    let interfaces = instance["status"]["interfaces"].as_array()?;
    let found = interfaces.iter().find(|i| i["name"] == network)?;
    Some(found["infoSource"].as_str().unwrap_or_default().to_owned())
}

pub async fn run_virtual_machines(ns: &TestNamespace) -> Result<()> {
    for (name, subnet) in [("blue", "10.9.0.0/24"), ("green", "10.8.0.0/24")] {
        let config = json!({
            "cniVersion": "1.0.0", "name": name, "type": "bridge", "bridge": format!("br-{name}"),
            "ipam": {"type": "host-local", "subnet": subnet},
        });
        let definition = json!({
            "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
            "metadata": {"name": name, "namespace": ns.namespace}, "spec": {"config": config.to_string()},
        });
        let file = ns.lab.kubeconfig().with_file_name(format!("{name}.json"));
        std::fs::write(&file, definition.to_string())?;
        ns.lab.kubectl(&["apply", "-f", file.to_str().context("the path is not UTF-8")?])?;
    }
    let handler = VirtHandler::start(&ns.lab, Some(&ns.namespace)).await?;
    tokio::try_join!(restart_stop_and_start(ns), plug_and_migrate(ns, &handler)).map(|_| ())
}

async fn restart_stop_and_start(ns: &TestNamespace) -> Result<()> {
    let vm = TestVm { ns, name: "restarted" };
    vm.create(&[("blue", None)]).await?;
    let first = vm.wait_running(None).await?;
    let launcher = vm.launcher().await?;
    ensure!(attached(&launcher)? == ["eth0", &pod_interface_name("blue")], "{:?}", launcher.annotations());
    let links = ns.exec(&launcher.name_any(), &["ip", "-br", "link"])?;
    ensure!(links.contains(&pod_interface_name("blue")), "{links}");
    ensure!(info_source(&first, "blue").as_deref() == Some("domain, multus-status"), "{first}");

    restart_vm(&ns.client, &ns.namespace, vm.name).await?;
    let second = vm.wait_running(Some(&first)).await?;
    ensure!(vm.launcher().await?.name_any() != launcher.name_any(), "the restarted VM has a new pod");

    vm.patch(json!({"runStrategy": "Halted"})).await?;
    wait::until(Duration::from_secs(60), "the stopped VM to have no instance and no pod", || async {
        Ok((vm.instance().await?.is_none() && vm.pods().await?.is_empty()).then_some(()))
    })
    .await?;
    vm.patch(json!({"runStrategy": "Always"})).await?;
    vm.wait_running(Some(&second)).await.map(drop)
}

async fn plug_and_migrate(ns: &TestNamespace, handler: &VirtHandler) -> Result<()> {
    let vm = TestVm { ns, name: "migrated" };
    vm.create(&[("blue", None)]).await?;
    let first = vm.wait_running(None).await?;
    let source = vm.launcher().await?;

    // The launcher is annotated at once. No program of the lab attaches interfaces to running pods, so a migration does it.
    vm.set_secondary(&[("blue", None), ("green", None)]).await?;
    vm.wait_annotation(&["blue", "green"]).await?;
    vm.migrate("plug", "Succeeded").await?;
    let moved = vm
        .wait_instance("to have the new NIC", |i| {
            info_source(i, "green").as_deref() == Some("domain, multus-status")
        })
        .await?;
    ensure!(moved["metadata"]["uid"] == first["metadata"]["uid"], "a migration keeps the instance");
    ensure!(moved["status"]["nodeName"] != first["status"]["nodeName"], "{moved}");
    let target = vm.launcher().await?;
    let all = ["eth0".to_owned(), pod_interface_name("blue"), pod_interface_name("green")];
    ensure!(attached(&target)? == all, "{:?}", target.annotations());
    wait::until(Duration::from_secs(60), "the source pod to end", || async {
        let pod = ns.pods().get(&source.name_any()).await?;
        Ok((pod.status.and_then(|s| s.phase).as_deref() == Some("Succeeded")).then_some(()))
    })
    .await?;

    handler.set_migrations(MigrationOutcome::Hold);
    vm.migrate("aborted", "Running").await?;
    let api = migrations(&ns.client, &ns.namespace);
    api.delete("aborted", &DeleteParams::default()).await.context("abort the migration")?;
    let stayed = vm
        .wait_instance("to report the abort", |i| i["status"]["migrationState"]["abortStatus"] == "Succeeded")
        .await?;
    ensure!(stayed["status"]["nodeName"] == moved["status"]["nodeName"], "{stayed}");
    wait::until(Duration::from_secs(60), "the aborted migration and its target to be gone", || async {
        let ended = |pod: &Pod| pod.name_any() == target.name_any() || has_ended(pod);
        Ok((api.get_opt("aborted").await?.is_none() && vm.pods().await?.iter().all(ended)).then_some(()))
    })
    .await?;

    handler.set_migrations(MigrationOutcome::Succeed);
    vm.set_secondary(&[("blue", None), ("green", Some("absent"))]).await?;
    vm.wait_annotation(&["blue"]).await?;
    vm.wait_instance("to detach the NIC", |i| info_source(i, "green").as_deref() == Some("multus-status"))
        .await?;
    vm.migrate("unplug", "Succeeded").await?;
    vm.wait_instance("to lose the NIC", |i| {
        i["spec"]["networks"].as_array().is_some_and(|n| n.len() == 2) && info_source(i, "green").is_none()
    })
    .await?;
    ensure!(attached(&vm.launcher().await?)? == all[..2], "the new pod has no interface for the NIC");
    let spec = virtual_machines(&ns.client, &ns.namespace).get(vm.name).await?.data["spec"].clone();
    ensure!(spec["template"]["spec"]["networks"].as_array().map(Vec::len) == Some(2), "{spec}");
    Ok(())
}

fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}
