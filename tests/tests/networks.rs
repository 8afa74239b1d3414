//! BridgeNetworks on the cluster's side: the controller as a real process against a real API server, with Nodes and
//! NodeNetworks written by the test in place of kubelets and daemons.
#![allow(clippy::print_stdout, reason = "a test without the standard harness prints what it measured")]

#[path = "networks/cluster.rs"]
mod cluster;

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cluster::Cluster;
use e2e::{Suite, replica, replica::Replica, tests};
use lab::{Lab, Shape};
use serde_json::json;

fn main() -> ExitCode {
    Suite {
        name: "t-networks",
        shape: Shape::ControlPlaneOnly,
        set_up: |lab| Box::pin(async move { set_up(&lab).await }),
        tests: tests![a_network_gets_its_attachments_its_status_and_its_labels_and_goes_in_order,],
    }
    .run()
}

async fn set_up(lab: &Lab) -> Result<()> {
    replica::prepare(lab, 1)?;
    let cluster = Cluster::new(lab, "set-up").await?;
    cluster.install_attachments().await?;
    cluster.install_machines().await
}

const SOON: Duration = Duration::from_secs(5);

async fn a_network_gets_its_attachments_its_status_and_its_labels_and_goes_in_order(lab: Lab) -> Result<()> {
    let cluster = Cluster::new(&lab, "basic").await?;
    let replica = Replica::ready(&lab, 1, &[]).await?;
    cluster.node("basic-a", 1500).await?;
    let outcome = async {
        cluster.webhook_answers().await?;
        let begun = Instant::now();
        let spec = json!({"overlay": {"vni": 17}, "nodeSelector": cluster.selector(), "attachment": {"namespaces": ["basic"]}});
        cluster.create("basic", spec).await?;
        let nad = cluster.nad("basic", "basic").await?;
        ensure!(nad["spec"]["config"].as_str().is_some_and(|it| it.contains("\"mtu\":1450")), "{nad}");
        println!("attachment after {:?}", begun.elapsed());
        cluster.report("basic-a", "basic", true).await?;
        let network = cluster.condition("basic", "Ready", "True").await?;
        ensure!(
            network["status"]["mtu"] == 1450 && network["status"]["nodes"]["summary"] == "1/1",
            "{network}"
        );
        cluster.label("basic-a", "basic", true).await?;
        let pod = cluster.pod("basic", "user", "basic").await?;
        cluster.condition("basic", "InUse", "True").await?;
        cluster.delete("basic").await?;
        let network = cluster.reason("basic", "Ready", "DeletionBlocked").await?;
        println!("{}", network["status"]["conditions"][0]["message"]);
        ensure!(cluster.refused("basic", "late", "basic").await?, "a new user was let in");
        cluster.remove(&pod).await?;
        let begun = Instant::now();
        cluster.finalizer("basic", "patchbay.dev/users", false).await?;
        ensure!(cluster.find_nad("basic", "basic").await?.is_none(), "the attachment is still there");
        cluster.unlist("basic-a", "basic").await?;
        cluster.gone("basic", Duration::from_secs(3)).await?;
        println!("gone {:?} after its last user", begun.elapsed());
        cluster.label("basic-a", "basic", false).await
    };
    outcome.await.with_context(|| replica.tail())
}
