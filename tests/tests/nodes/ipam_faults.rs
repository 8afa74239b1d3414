//! IPAM on machines that lose their disk, or cannot write to it.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use api::IPBlock;
use e2e::{
    bridge::{attached_pod, attachment_for, delete_network, start_network, wait_deleted, wait_for_event},
    patchbay,
};
use kube::Client;
use lab::{
    Lab,
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use serde_json::json;

use crate::addresses::{blocks, net1_addresses, wait_for_used};

/// Long enough for a daemon to start and for the kubelet to retry.
const TIMEOUT: Duration = Duration::from_secs(90);
const STATE_DIR: &str = "/var/lib/patchbay";
const COPY: &str = "/run/patchbay-state";

pub async fn a_reimaged_node_reuses_its_blocks(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    with_namespace(&lab, "reimage", async |ns: &TestNamespace| {
        let spec = json!({"attachment": attachment_for(ns), "ipam": {"subnets": ["10.59.0.0/24"]}});
        start_network(&client, "reimage", spec).await?;
        let names = ["server-0", "server-1"];
        for name in names {
            ns.start_pod(attached_pod(name, "node-2", "reimage")).await?;
        }
        wait_for_used(&client, "reimage", 2).await?;
        let before = block_names(&client).await?;
        for round in 1..=if e2e::soak() { 3 } else { 1 } {
            // The same Node, a new boot, and nothing of Patchbay on the disk.
            lab.node("node-2").output(&["rm", "-rf", STATE_DIR])?;
            lab.reboot("node-2").await?;
            for name in names {
                wait_for_restart(ns, name, round).await?;
            }
            wait_for_used(&client, "reimage", 2).await?;
            let closed = |block: &IPBlock| block.status.as_ref().is_some_and(|status| status.closed);
            let all = blocks(&client, "reimage").await?;
            ensure!(!all.iter().any(closed), "a block is closed: {all:?}");
            ensure!(
                block_names(&client).await? == before,
                "{before:?} became {:?}",
                block_names(&client).await?
            );
            let boot = lab.node("node-2").boot_id()?;
            ensure!(all.iter().all(|block| block.spec.boot_id == boot), "{boot}: {all:?}");
        }
        let [first, second] = [ns.pods().get(names[0]).await?, ns.pods().get(names[1]).await?];
        ensure!(net1_addresses(&first)? != net1_addresses(&second)?, "two pods have one address");
        Ok(())
    })
    .await?;
    patchbay::wait_ready(&lab).await?;
    delete_network(&client, "reimage").await?;
    wait_deleted(&client, "reimage").await.map(drop)
}

async fn block_names(client: &Client) -> Result<Vec<String>> {
    let mut names: Vec<String> =
        blocks(client, "reimage").await?.iter().map(kube::ResourceExt::name_any).collect();
    names.sort();
    Ok(names)
}

async fn wait_for_restart(ns: &TestNamespace, name: &str, restarts: i32) -> Result<()> {
    wait::until(TIMEOUT, &format!("restart {restarts} of pod {name}"), || async {
        let status = ns.pods().get(name).await?.status.unwrap_or_default();
        let ready =
            status.conditions.iter().flatten().any(|one| one.type_ == "Ready" && one.status == "True");
        let count: i32 = status.container_statuses.iter().flatten().map(|one| one.restart_count).sum();
        Ok((ready && count >= restarts).then_some(()))
    })
    .await
}

pub async fn pods_terminate_while_the_daemon_cannot_write_its_state(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    with_namespace(&lab, "disk", async |ns: &TestNamespace| {
        let spec = json!({"attachment": attachment_for(ns), "ipam": {"subnets": ["10.60.0.0/24"]}});
        start_network(&client, "disk", spec).await?;
        for name in ["kept", "deleted"] {
            ns.start_pod(attached_pod(name, "node-1", "disk")).await?;
        }
        wait_for_used(&client, "disk", 2).await?;
        mount_small_disk(&lab)?;
        let outcome = without_disk(&lab, ns).await;
        unmount_small_disk(&lab)?;
        patchbay::restart_daemon(&lab, &client, "node-1").await?;
        outcome
    })
    .await?;
    patchbay::wait_ready(&lab).await?;
    delete_network(&client, "disk").await?;
    wait_deleted(&client, "disk").await.map(drop)
}

async fn without_disk(lab: &Lab, ns: &TestNamespace) -> Result<()> {
    let (client, node) = (&ns.client, lab.node("node-1"));
    let kept = net1_addresses(&ns.pods().get("kept").await?)?;
    node.output(&["sh", "-c", &format!("dd if=/dev/zero of={STATE_DIR}/ballast bs=4k 2>/dev/null; true")])?;
    patchbay::restart_daemon(lab, client, "node-1").await?;
    wait_for_condition(lab, "False").await?;
    lab.kubectl(&["-n", &ns.namespace, "delete", "pod", "deleted", "--timeout=60s"])
        .context("a pod stays Terminating")?;
    ns.create_pod(attached_pod("new", "node-1", "disk")).await?;
    wait_for_event(ns, "cannot be recorded on this node").await?;
    node.output(&["rm", &format!("{STATE_DIR}/ballast")])?;
    wait_for_condition(lab, "True").await?;
    let new = ns.wait_pod_ready("new").await?;
    ensure!(net1_addresses(&new)? != kept, "{kept:?} has two owners");
    // The address of the deleted pod is released.
    wait_for_used(client, "disk", 2).await
}

/// Puts the state of node-1's daemon on a file system of 1 MiB.
fn mount_small_disk(lab: &Lab) -> Result<()> {
    let script = format!(
        "rm -rf {COPY} && cp -a {STATE_DIR} {COPY} && mount -t tmpfs -o size=1m,mode=755 tmpfs {STATE_DIR} && cp -a {COPY}/. {STATE_DIR}/"
    );
    lab.node("node-1").output(&["sh", "-c", &script]).map(drop)
}

fn unmount_small_disk(lab: &Lab) -> Result<()> {
    let script = format!(
        "rm -f {STATE_DIR}/ballast; rm -rf {COPY} && cp -a {STATE_DIR} {COPY} && \
         umount {STATE_DIR} && rm -rf {STATE_DIR}/* && cp -a {COPY}/. {STATE_DIR}/ && rm -rf {COPY}"
    );
    lab.node("node-1").output(&["sh", "-c", &script]).map(drop)
}

async fn wait_for_condition(lab: &Lab, status: &str) -> Result<()> {
    let path = r#"jsonpath={.status.conditions[?(@.type=="StateWritable")].status}"#;
    wait::until(TIMEOUT, &format!("StateWritable={status}"), || async {
        let found = lab.kubectl(&["get", "nodenetwork", "node-1", "-o", path])?;
        ensure!(found == status, "{found}");
        Ok(Some(()))
    })
    .await
}
