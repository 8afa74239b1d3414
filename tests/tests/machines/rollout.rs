//! The controller is replaced while launcher pods are created.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use e2e::{bridge::start_network, flood::Flood, machine::TestVm, patchbay};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, PostParams},
};
use lab::{
    Lab,
    kubevirt::VirtHandler,
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::{TIMEOUT, end_network, spec};

const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";

/// A launcher of the same instance, as virt-controller creates it: without a reference.
fn launcher_like(launcher: &Pod) -> Result<Pod> {
    let text = launcher.annotations().get(NETWORKS).context("the networks annotation")?;
    let mut elements: Vec<Value> = serde_json::from_str(text)?;
    for element in &mut elements {
        element.as_object_mut().context("an element")?.remove("ipam-claim-reference");
    }
    let annotations = json!({
        "kubevirt.io/domain": launcher.annotations().get("kubevirt.io/domain"),
        NETWORKS: json!(elements).to_string(),
    });
    let metadata = json!({"generateName": "virt-launcher-copy-", "labels": launcher.labels(),
        "annotations": annotations, "ownerReferences": launcher.owner_references()});
    let spec = json!({"containers": [{"name": "c", "image": "localhost/lab:1"}]});
    Ok(serde_json::from_value(json!({"metadata": metadata, "spec": spec}))?)
}

/// Directs the flood at all controllers that run.
async fn flood_controllers(flood: &Flood, client: &Client) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), patchbay::NAMESPACE);
    let selector = ListParams::default().labels("app.kubernetes.io/component=controller");
    let addresses = pods.list(&selector).await?.items.into_iter().filter_map(|pod| pod.status?.pod_ip);
    flood.set_targets(addresses.filter_map(|address| address.parse().ok()).collect());
    Ok(())
}

/// A pod without credentials uses all places of every controller meanwhile.
pub async fn no_launcher_is_rejected_during_a_rolling_update(lab: Lab) -> Result<()> {
    with_namespace(&lab, "machine-rollout", async |ns: &TestNamespace| {
        let _handler = VirtHandler::start(&lab, Some(&ns.namespace)).await?;
        start_network(&ns.client, "rollout", spec(ns, 80, ["10.80.0.0/24", "fd80::/64"], true)).await?;
        let vm = TestVm { ns, name: "rollout" };
        vm.create(&[("blue", "rollout", None)]).await?;
        vm.wait_running(None).await?;
        let pod = launcher_like(&vm.launcher().await?)?;
        let (stop, created) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let mut load = JoinSet::new();
        for _ in 0..4 {
            let (api, pod) = (ns.pods(), pod.clone());
            let (stop, created) = (Arc::clone(&stop), Arc::clone(&created));
            load.spawn(async move {
                let dry_run = PostParams { dry_run: true, ..PostParams::default() };
                let mut failed = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    match api.create(&dry_run, &pod).await {
                        Ok(pod) if has_reference(&pod) => _ = created.fetch_add(1, Ordering::Relaxed),
                        Ok(pod) => failed.push(format!("no reference: {:?}", pod.annotations())),
                        Err(error) => failed.push(error.to_string()),
                    }
                    // 80 pods a second: both replicas get many.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                failed
            });
        }
        let flood = Arc::new(Flood::start(&lab, "node-1", &ns.client).await?);
        let (flooding, client, stopped) = (Arc::clone(&flood), ns.client.clone(), Arc::clone(&stop));
        let mut floods = JoinSet::new();
        floods.spawn(async move {
            while !stopped.load(Ordering::Relaxed) {
                // A controller that has just started is flooded soon.
                let _ = flood_controllers(&flooding, &client).await;
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        });
        let filled = wait::until(TIMEOUT, "all places to be used", || async {
            Ok((flood.displaced() > 0).then_some(()))
        });
        let filled = filled.await;
        let before = flood.displaced();
        let (lab, rollout) = (lab.clone(), ["deployment/patchbay-controller", "-n", patchbay::NAMESPACE]);
        let replaced = tokio::task::spawn_blocking(move || {
            lab.kubectl(&[&["rollout", "restart"], &rollout[..]].concat())?;
            lab.kubectl(&[&["rollout", "status", "--timeout=120s"], &rollout[..]].concat())
        });
        let replaced = replaced.await;
        // Both replicas of the new version serve some.
        let enough = wait::until(TIMEOUT, "100 launchers", || async {
            Ok((created.load(Ordering::Relaxed) > 100).then_some(()))
        });
        let enough = enough.await;
        stop.store(true, Ordering::Relaxed);
        let failed: Vec<String> = load.join_all().await.into_iter().flatten().collect();
        floods.join_all().await;
        filled?;
        replaced??;
        enough?;
        let displaced = flood.displaced() - before;
        drop(flood);
        let created = created.load(Ordering::Relaxed);
        println!(
            "{created} launchers admitted during a rolling update, {} rejected, {displaced} bodies displaced",
            failed.len()
        );
        ensure!(displaced > 0, "the controllers had free places all the time");
        ensure!(
            failed.is_empty(),
            "{} rejected, {created} admitted, first: {:?}",
            failed.len(),
            failed.first()
        );
        Ok(())
    })
    .await?;
    end_network(&lab.client().await?, "rollout").await
}

fn has_reference(pod: &Pod) -> bool {
    let elements =
        pod.annotations().get(NETWORKS).and_then(|text| serde_json::from_str::<Vec<Value>>(text).ok());
    elements.is_some_and(|all| all.iter().any(|element| element["ipam-claim-reference"] == "rollout.blue"))
}
