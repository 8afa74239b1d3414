//! An idle cluster: the controller and the node daemons write nothing.

use std::time::Duration;

use anyhow::{Result, ensure};
use e2e::{
    bridge::{WAIT_TIMEOUT, delete_network, start_network, wait_deleted},
    quiet::wait_until_quiet,
};
use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, api::ListParams};
use lab::{
    Lab,
    audit::{AuditOffset, AuditedRequest},
    wait,
};
use serde_json::json;

/// The writes of the controller and the node daemons since the offset.
pub fn patchbay_writes(lab: &Lab, offset: AuditOffset) -> Result<Vec<AuditedRequest>> {
    Ok(lab.requests_since(offset)?.into_iter().filter(is_patchbay_write).collect())
}

/// Whether a request is a write of the controller or a node daemon, without Leases, which are renewed all the time.
fn is_patchbay_write(request: &AuditedRequest) -> bool {
    request.user_agent.starts_with("patchbay-") && request.is_write() && request.resource != "leases"
}

/// Waits for a second without writes: a pending change is written within a second.
pub async fn wait_until_idle(lab: &Lab) -> Result<AuditOffset> {
    wait_for_terminating_namespaces(lab).await?;
    wait_until_quiet(lab, Duration::from_millis(1100), is_patchbay_write).await
}

/// The objects of an earlier test go with its namespace, which causes writes.
async fn wait_for_terminating_namespaces(lab: &Lab) -> Result<()> {
    let namespaces: Api<Namespace> = Api::all(lab.client().await?);
    wait::until(WAIT_TIMEOUT, "terminating namespaces to be gone", || async {
        let all = namespaces.list(&ListParams::default()).await?;
        let terminating = all.iter().any(|namespace| namespace.metadata.deletion_timestamp.is_some());
        Ok((!terminating).then_some(()))
    })
    .await
}

pub async fn an_idle_cluster_causes_no_writes(lab: Lab) -> Result<()> {
    let period = Duration::from_secs(if e2e::soak() { 120 } else { 15 });
    let offset = wait_until_idle(&lab).await?;
    tokio::time::sleep(period).await;
    let found = patchbay_writes(&lab, offset)?;
    println!("{} writes in {period:?}", found.len());
    ensure!(found.is_empty(), "{found:?}");
    Ok(())
}

pub async fn a_new_network_causes_few_writes_and_then_none(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let offset = wait_until_idle(&lab).await?;
    start_network(&client, "idle", json!({"attachment": {"namespaces": ["default"]}})).await?;
    let mut creation = patchbay_writes(&lab, offset)?;
    creation.retain(|request| request.resource != "events");
    println!("{} writes to create a network on two nodes", creation.len());
    ensure!(creation.len() <= 14, "{creation:#?}");
    let offset = wait_until_idle(&lab).await?;
    let period = Duration::from_secs(if e2e::soak() { 120 } else { 10 });
    tokio::time::sleep(period).await;
    let found = patchbay_writes(&lab, offset)?;
    ensure!(found.is_empty(), "{found:#?}");
    delete_network(&client, "idle").await?;
    wait_deleted(&client, "idle").await.map(drop)
}
