//! IPAMClaim: addresses that stay with a virtual machine.

use std::{fs, time::Duration};

use anyhow::Result;
use lab::{
    kubevirt::{VirtHandler, restart_vm},
    wait,
};
use serde_json::json;
use tokio::runtime::Runtime;

use super::Tour;

const CLAIM: &str = "ipamclaim/vm-a.anet";
const LAUNCHERS: &str = "get pods -l kubevirt.io=virt-launcher -o wide";
const MIGRATION: &str = "vm-a-1";

/// Deletes what an earlier tour on the same lab may have left.
fn remove_leftovers(tour: &Tour) {
    let _ = tour.lab.kubectl(&["delete", "vm", "vm-a", "--ignore-not-found", "--timeout=30s"]);
    let _ = tour.lab.kubectl(&["delete", "vmim", MIGRATION, "--ignore-not-found", "--timeout=30s"]);
    let _ = tour.lab.kubectl(&["delete", "pod", "client", "--now", "--ignore-not-found"]);
    let _ = tour.lab.kubectl(&["delete", "bnet", "mynet", "--ignore-not-found", "--timeout=30s"]);
}

/// Creates a machine, restarts and migrates it, and reaches it at the same address each time.
pub fn chapter(tour: &Tour, runtime: &Runtime) -> Result<()> {
    super::chapter("Keep the addresses of a virtual machine: IPAMClaim");
    let lab = &tour.lab;
    let client = runtime.block_on(lab.client())?;
    println!("KubeVirt's controller runs in this lab. There are no guests: a process stands in for each.");
    // Plays virt-handler until the end of the chapter.
    let _handler = runtime.block_on(VirtHandler::start(lab, None))?;
    remove_leftovers(tour);
    println!("Create a network with persistent addresses, a pod on it, and a machine:\n");
    print!("{}", fs::read_to_string(e2e::repository().join("docs/examples/mynet.yaml"))?);
    tour.kubectl("apply -f docs/examples/mynet.yaml")?;
    runtime.block_on(e2e::bridge::wait_ready(&client, "mynet"))?;
    tour.attach("client", "node-1", "mynet")?;
    tour.kubectl("apply -f docs/examples/vm.yaml")?;
    let first = wait_launcher(tour, runtime, "")?;
    tour.kubectl("wait pod/client --for=condition=Ready --timeout=60s")?;
    println!("The controller reserved addresses, and the launcher pod has them:");
    tour.kubectl("get ipamclaims")?;
    tour.kubectl(LAUNCHERS)?;
    let address = lab.kubectl(&["get", CLAIM, "-o", "jsonpath={.status.ips[0]}"])?;
    let address = address.split('/').next().unwrap_or_default().to_owned();
    let ping = format!("exec client -- ping -c 2 -i 0.3 {address}");
    tour.kubectl(&ping)?;

    println!("Restart the machine. Its pod is another one, its addresses are the same:");
    println!("$ virtctl restart vm-a");
    runtime.block_on(restart_vm(&client, "default", "vm-a"))?;
    let second = wait_launcher(tour, runtime, &first)?;
    tour.kubectl("get ipamclaims")?;
    tour.kubectl(&ping)?;

    println!(
        "Migrate it. The target holds the addresses together with the source, and announces them at the end:"
    );
    let migration = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstanceMigration",
        "metadata": {"name": MIGRATION}, "spec": {"vmiName": "vm-a"}});
    println!("$ virtctl migrate vm-a");
    tour.create(&migration.to_string())?;
    wait_launcher(tour, runtime, &second)?;
    tour.kubectl("get ipamclaims")?;
    tour.kubectl(LAUNCHERS)?;
    tour.kubectl(&ping)?;
    tour.kubectl("get events --field-selector involvedObject.name=vm-a,reason=IPAMClaimCreated")?;

    println!("Delete the machine. Its claim goes too, and its addresses are free:");
    tour.kubectl("delete vm vm-a --timeout=60s")?;
    runtime.block_on(wait::until(Duration::from_secs(30), "the claim to be deleted", || async {
        Ok(lab.kubectl(&["get", "ipamclaims", "-o", "name"])?.is_empty().then_some(()))
    }))?;
    tour.kubectl("get ipamclaims")?;
    tour.kubectl("delete pod client --now")?;
    tour.kubectl("delete bnet mynet --timeout=60s")
}

/// Waits until a single launcher pod runs that is not `before`; returns its name.
fn wait_launcher(tour: &Tour, runtime: &Runtime, before: &str) -> Result<String> {
    let running = [
        "get",
        "pods",
        "-l",
        "kubevirt.io=virt-launcher",
        "--field-selector=status.phase=Running",
        "-o",
        "jsonpath={.items[*].metadata.name}",
    ];
    runtime.block_on(wait::until(Duration::from_secs(90), "another launcher pod to run alone", || async {
        let names = tour.lab.kubectl(&running)?;
        Ok((!names.is_empty() && !names.contains(' ') && names != before).then_some(names))
    }))
}
