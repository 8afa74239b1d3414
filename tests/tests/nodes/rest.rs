//! A cluster in which nothing happens: the two programs write nothing.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use e2e::bridge::{delete_network, start_network, wait_deleted};
use lab::{
    Lab,
    audit::{AuditOffset, AuditedRequest},
    wait,
};
use serde_json::json;

/// What the two programs wrote since the mark, leases apart: these are renewed all the time.
pub fn writes(lab: &Lab, mark: AuditOffset) -> Result<Vec<AuditedRequest>> {
    let ours =
        |a: &AuditedRequest| a.user_agent.starts_with("patchbay-") && a.is_write() && a.resource != "leases";
    Ok(lab.requests_since(mark)?.into_iter().filter(ours).collect())
}

/// Waits for a second without a write: at most one a second is what a program writes of something that changed.
pub async fn at_rest(lab: &Lab) -> Result<AuditOffset> {
    let mut since = (lab.audit_offset()?, Instant::now());
    wait::until(Duration::from_secs(10), "a second without a write", || {
        let looked = lab.audit_offset().and_then(|now| Ok((now, writes(lab, since.0)?)));
        let outcome = looked.map(|(now, found)| {
            if !found.is_empty() {
                since = (now, Instant::now());
            }
            (since.1.elapsed() > Duration::from_millis(1100)).then_some(now)
        });
        async move { outcome }
    })
    .await
}

pub async fn nothing_is_written_while_nothing_changes(lab: Lab) -> Result<()> {
    let quiet = Duration::from_secs(if e2e::soak() { 120 } else { 15 });
    let mark = lab.audit_offset()?;
    tokio::time::sleep(quiet).await;
    let found = writes(&lab, mark)?;
    println!("{} writes in {quiet:?} at rest", found.len());
    ensure!(found.is_empty(), "{found:?}");
    Ok(())
}

pub async fn nothing_is_written_while_nothing_changes_and_little_when_something_does(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let mark = lab.audit_offset()?;
    start_network(&client, "rest", json!({"attachment": {"namespaces": ["default"]}})).await?;
    let mut made = writes(&lab, mark)?;
    made.retain(|asked| asked.resource != "events");
    println!("{} writes to make a network on two nodes", made.len());
    ensure!(made.len() <= 14, "{made:#?}");
    let mark = at_rest(&lab).await?;
    let quiet = Duration::from_secs(if e2e::soak() { 120 } else { 10 });
    tokio::time::sleep(quiet).await;
    let found = writes(&lab, mark)?;
    ensure!(found.is_empty(), "{found:#?}");
    delete_network(&client, "rest").await?;
    wait_deleted(&client, "rest", Duration::from_secs(5)).await.map(drop)
}
