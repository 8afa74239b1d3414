//! What the controller measures about claims.

use anyhow::{Context as _, Result, ensure};
use kube::api::DeleteParams;
use lab::{Lab, wait};
use serde_json::json;

use super::{
    TIMEOUT,
    cluster::{claims, virtual_machine, vms},
    start_controller,
};

/// The numbers are of all claims of the cluster, so the test compares them with those before.
pub async fn the_metrics_count_the_claims(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "measured").await?;
    let outcome = async {
        let state = |state: &str| replica.metric("patchbay_ipam_claims{", &format!("state=\"{state}\""));
        let allocations = || replica.metric("patchbay_ipam_claim_allocation_duration_seconds_count", "");
        let reviews = || replica.metric("patchbay_admission_duration_seconds_count", "path=\"MutatePod\"");
        cluster.create_network("measured", &["10.86.0.0/24"]).await?;
        let (allocated, failed, reviewed) = (state("Allocated")?, state("Failed")?, reviews()?);
        let measured = allocations()?;
        cluster.create_vm(&virtual_machine("vm1", &[("blue", "measured")])).await?;
        let mut bad = virtual_machine("vm2", &[("blue", "measured")]);
        bad["spec"]["template"]["metadata"]["annotations"] =
            json!({"network.kubevirt.io/addresses": r#"{"blue": ["10.9.9.9"]}"#});
        cluster.create_vm(&bad).await?;
        cluster.wait_for_addresses("vm1.blue", 1).await?;
        cluster.wait_for_failure("vm2.blue", "InternalError").await?;
        cluster.wait_for_launcher("vm1").await?;
        wait::until(TIMEOUT, "the metrics to count the claims", || async {
            let now = (state("Allocated")?, state("Failed")?, state("Pending")?, allocations()?);
            ensure!(now == (allocated + 1, failed + 1, 0, measured + 1), "{now:?}");
            Ok(Some(()))
        })
        .await?;
        ensure!(reviews()? > reviewed, "the webhook answered for the launcher pod");
        ensure!(replica.metric("patchbay_ipam_claim_stuck_finalizers", "")? == 0);
        ensure!(replica.metric("patchbay_ipam_claim_oldest_pending_seconds", "")? == 0);
        // A claim that a running machine needs waits with its finalizer.
        cluster.delete(&claims(), "vm1.blue", &DeleteParams::background()).await?;
        wait::until(TIMEOUT, "a terminating claim", || async {
            Ok((state("Terminating")? >= 1 && state("Allocated")? == allocated).then_some(()))
        })
        .await?;
        for vm in ["vm1", "vm2"] {
            cluster.delete(&vms(), vm, &DeleteParams::background()).await?;
        }
        for vm in ["vm1", "vm2"] {
            cluster.wait_until_gone(&claims(), &format!("{vm}.blue")).await?;
        }
        wait::until(TIMEOUT, "the metrics to forget the claims", || async {
            Ok(((state("Allocated")?, state("Failed")?) == (allocated, failed)).then_some(()))
        })
        .await
    };
    outcome.await.with_context(|| replica.tail())
}
