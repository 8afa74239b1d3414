//! IPBlocks that are deleted in spite of the policy.

use anyhow::{Context as _, Result, ensure};
use api::IPBlock;
use e2e::{
    bridge::{
        WAIT_TIMEOUT, attached_pod, attachment_for, blocks, delete_network, start_network, wait_deleted,
        wait_for_used,
    },
    patchbay,
};
use k8s_openapi::api::core::v1::Event;
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams},
};
use lab::{
    Lab,
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use serde_json::json;

use crate::addresses::net1_addresses;

/// The user whose deletions of IPBlocks no policy rejects.
const EXEMPT: &str = "system:serviceaccount:patchbay-system:patchbay-controller";
const NETWORK: &str = "stolen";

/// The only block of the network.
async fn only_block(client: &Client) -> Result<IPBlock> {
    let mut all = blocks(client, NETWORK).await?;
    ensure!(all.len() == 1, "{all:?}");
    all.pop().context("a block")
}

pub async fn a_deleted_ipblock_is_created_again_or_its_loss_is_reported(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let delete = |name: &str| lab.kubectl(&["--as", EXEMPT, "delete", "ipblock", name, "--wait=false"]);
    with_namespace(&lab, NETWORK, async |ns: &TestNamespace| {
        let spec = json!({"attachment": attachment_for(ns), "ipam": {"subnets": ["10.62.0.0/30"]}});
        start_network(&client, NETWORK, spec).await?;
        let first = ns.start_pod(attached_pod("first", "node-1", NETWORK)).await?;
        let address = net1_addresses(&first)?;
        wait_for_used(&client, NETWORK, 1).await?;
        let block = only_block(&client).await?;
        delete(&block.name_any())?;
        let again = wait::until(WAIT_TIMEOUT, "the IPBlock to be created again", || async {
            Ok(Some(only_block(&client).await?).filter(|found| found.uid() != block.uid()))
        })
        .await?;
        ensure!(again.name_any() == block.name_any(), "{} became {}", block.name_any(), again.name_any());
        ensure!(again.spec.holder == block.spec.holder, "{:?} became {:?}", block.spec, again.spec);
        wait_for_used(&client, NETWORK, 1).await?;
        let second = ns.start_pod(attached_pod("second", "node-1", NETWORK)).await?;
        ensure!(net1_addresses(&second)? != address, "{address:?} was allocated twice");

        // While the daemon of node-1 does not run, node-2 takes the block.
        ns.pods().delete("second", &DeleteParams::default().grace_period(0)).await?;
        wait_for_used(&client, NETWORK, 1).await?;
        lab.kubectl(&["label", "node", "node-2", "lab/daemon=wanted", "--overwrite"])?;
        patchbay::patch_daemons(&client, json!({"nodeSelector": {"lab/daemon": "wanted"}})).await?;
        wait::until(WAIT_TIMEOUT, "node-1 to have no daemon", || async {
            Ok(patchbay::daemon_pod(&client, "node-1").await.is_err().then_some(()))
        })
        .await?;
        delete(&again.name_any())?;
        let outcome = ns.start_pod(attached_pod("thief", "node-2", NETWORK)).await;
        let taken = only_block(&client).await;
        patchbay::patch_daemons(&client, json!({"nodeSelector": {"lab/daemon": null}})).await?;
        patchbay::wait_ready(&lab).await?;
        outcome?;
        let taken = taken?;
        ensure!(taken.spec.holder.node == "node-2", "{:?}", taken.spec);
        let message = wait_block_lost(&client).await?;
        let expected = format!(
            "IPBlock {} was deleted while pods of node node-1 used its addresses, and now has another holder: addresses may be \
             in use twice; delete these pods",
            taken.name_any()
        );
        ensure!(message == expected, "{message}");
        // The pods keep what they have, and the block stays with its new holder.
        ensure!(net1_addresses(&ns.pods().get("first").await?)? == address, "the pod no longer has {address:?}");
        ensure!(only_block(&client).await?.uid() == taken.uid(), "the block changed its holder again");
        Ok(())
    })
    .await?;
    lab.kubectl(&["label", "node", "node-2", "lab/daemon-"])?;
    delete_network(&client, NETWORK).await?;
    wait_deleted(&client, NETWORK).await.map(drop)
}

/// Waits for the event about the network; returns its message.
async fn wait_block_lost(client: &Client) -> Result<String> {
    let events: Api<Event> = Api::all(client.clone());
    let fields =
        format!("involvedObject.kind=BridgeNetwork,involvedObject.name={NETWORK},reason=AddressBlockLost");
    wait::until(WAIT_TIMEOUT, "the event AddressBlockLost of the network", || async {
        let all = events.list(&ListParams::default().fields(&fields)).await?.items;
        let warning = all.into_iter().find(|event| event.type_.as_deref() == Some("Warning"));
        Ok(warning.and_then(|event| event.message))
    })
    .await
}
