//! NADs that others change, NADs in a changing list of namespaces, and foreign or invalid contents of a network.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use e2e::quiet::{is_controller_write, wait_until_quiet};
use kube::api::{DeleteParams, Patch, PatchParams};
use lab::{Lab, wait};
use serde_json::{Value, json};

use crate::{
    TIMEOUT,
    cluster::{self, TestCluster, condition},
    network_spec, start_controller,
};

pub async fn every_nad_repair_is_counted_once(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "count").await?;
    let outcome = async {
        cluster.create_network("count", network_spec(&cluster)).await?;
        let nad = cluster.wait_for_nad("count", "count").await?;
        cluster.wait_for("count", "status.mtu", |it| it["status"]["mtu"] == 1500).await?;
        let labels_and_annotations =
            |nad: &Value| ["labels", "annotations"].map(|it| nad["metadata"][it].clone());
        let api = cluster.api(&cluster::nads(), Some("count"));
        let patches = [
            json!({"spec": {"config": "{}"}}),
            json!({"metadata": {"labels": {"patchbay.dev/network": null}}}),
            json!({"metadata": {"annotations": {"patchbay.dev/network-uid": null}}}),
            Value::Null,
        ];
        for (number, patch) in (1..).zip(&patches) {
            if patch.is_null() {
                api.delete("count", &DeleteParams::default()).await?;
            } else {
                cluster.merge_patch(&cluster::nads(), Some("count"), "count", patch).await?;
            }
            wait::until(TIMEOUT, &format!("{patch} to be reverted"), || async {
                let now = cluster.get_nad("count", "count").await?.context("the NAD does not exist")?;
                ensure!(
                    now["spec"] == nad["spec"]
                        && labels_and_annotations(&now) == labels_and_annotations(&nad),
                    "{now:#}"
                );
                ensure!(
                    replica.metric("patchbay_attachment_repairs_total", "")? == number,
                    "not counted yet"
                );
                Ok(Some(()))
            })
            .await?;
        }
        // Without labels and annotations the NAD is foreign: never adopted, never deleted.
        let patch = json!({"metadata": {"labels": null, "annotations": null}});
        cluster.merge_patch(&cluster::nads(), Some("count"), "count", &patch).await?;
        let network = cluster.wait_for_condition("count", "Conflict", "True").await?;
        let message = &condition(&network, "Conflict").context("Conflict")?["message"];
        ensure!(
            message.as_str().is_some_and(|it| it.contains("count/count exists and is not managed")),
            "{message}"
        );
        // A pod that refers to it still uses the network, because its config names the network.
        let pod = cluster.create_pod("client", "count").await?;
        cluster.wait_for_condition("count", "InUse", "True").await?;
        cluster.delete_workload(&pod).await?;
        cluster.delete_network("count").await?;
        cluster.wait_until_deleted_in_time("count").await?;
        let left = cluster.get_nad("count", "count").await?.context("the foreign NAD was deleted")?;
        ensure!(left["spec"] == nad["spec"], "{left:#}");
        ensure!(
            replica.metric("patchbay_attachment_repairs_total", "")? == 4,
            "more repairs counted than made"
        );
        Ok(())
    };
    let outcome: Result<()> = outcome.await;
    outcome.with_context(|| replica.tail())
}

pub async fn nads_follow_the_list_of_namespaces(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "list").await?;
    let outcome = async {
        cluster.create_node("list-a", 1500).await?;
        cluster.create_namespace("more").await?;
        let with_namespaces = |namespaces: &[&str]| json!({"attachment": {"namespaces": namespaces}});
        let wait_until_deleted = async |namespace: &str| {
            wait::until(TIMEOUT, &format!("the NAD in {namespace} to be deleted"), || async {
                Ok(cluster.get_nad(namespace, "list").await?.is_none().then_some(()))
            })
            .await
        };
        cluster.create_network("list", network_spec(&cluster)).await?;
        cluster.wait_for_nad("list", "list").await?;
        cluster.patch_spec("list", with_namespaces(&["list", "more", "latest"])).await?;
        cluster.wait_for_nad("more", "list").await?;
        cluster.report_network("list-a", "list", true).await?;
        cluster.wait_for_reason("list", "Ready", "AttachmentsMissing").await?;
        cluster.create_namespace("latest").await?;
        cluster.wait_for_nad("latest", "list").await?;
        cluster.wait_for_condition("list", "Ready", "True").await?;
        // A NAD of a namespace that left the list stays while it is in use.
        let pod = cluster.create_pod("client", "list").await?;
        cluster.wait_for_condition("list", "InUse", "True").await?;
        cluster.patch_spec("list", with_namespaces(&["more"])).await?;
        wait_until_deleted("latest").await?;
        cluster.report_network("list-a", "list", true).await?;
        let reports_kept_nad = |it: &Value| {
            let message = condition(it, "Ready").and_then(|it| it["message"].as_str());
            message.is_some_and(|it| {
                it.contains("kept although no longer in spec.attachment.namespaces")
                    && it.contains("list/list")
            })
        };
        cluster.wait_for("list", "to report the kept NAD", reports_kept_nad).await?;
        ensure!(cluster.get_nad("list", "list").await?.is_some(), "the NAD of a pod was deleted");
        cluster.delete_workload(&pod).await?;
        wait_until_deleted("list").await?;
        cluster.wait_for_nad("more", "list").await?;
        cluster.patch_spec("list", json!({"attachment": {"namespaces": null}})).await?;
        wait_until_deleted("more").await?;
        cluster.clear_report("list-a").await?;
        cluster.delete_network("list").await?;
        cluster.wait_until_deleted_in_time("list").await
    };
    outcome.await.with_context(|| replica.tail())
}

pub async fn foreign_status_fields_are_reverted_without_a_write_loop(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "foreign-status").await?;
    let outcome = async {
        cluster.create_node("foreign-status-a", 1500).await?;
        cluster.create_network("foreign-status", network_spec(&cluster)).await?;
        cluster.report_network("foreign-status-a", "foreign-status", true).await?;
        cluster.wait_for_condition("foreign-status", "Ready", "True").await?;
        // Another field manager owns what it applies: our server-side apply could not remove it.
        let kind = cluster::bridge_networks();
        let foreign_condition = json!({"type": "Backup", "status": "True", "reason": "Done", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let status = json!({"conditions": [foreign_condition], "podsWithOldMtu": 7,
            "notReady": [{"node": "no-such-node", "reason": "Foreign", "message": ""}]});
        let object = json!({"apiVersion": kind.api_version, "kind": kind.kind,
            "metadata": {"name": "foreign-status"}, "status": status});
        let params = PatchParams::apply("other-manager").force();
        cluster.api(&kind, None).patch_status("foreign-status", &params, &Patch::Apply(&object)).await?;
        let is_reverted = |it: &Value| {
            let status = &it["status"];
            let ours = status["notReady"].is_null() && status["podsWithOldMtu"].is_null();
            ours && condition(it, "Backup").is_some() && condition(it, "Ready").is_some()
        };
        cluster
            .wait_for(
                "foreign-status",
                "foreign fields to be removed and foreign conditions kept",
                is_reverted,
            )
            .await?;
        // Long enough for a write loop to show.
        let offset = wait_until_quiet(&lab, Duration::from_secs(2), is_controller_write).await?;
        tokio::time::sleep(Duration::from_secs(3)).await;
        let writes = TestCluster::controller_writes(&lab, offset)?;
        ensure!(writes.is_empty(), "write loop: {writes:?}");
        cluster.clear_report("foreign-status-a").await?;
        cluster.delete_network("foreign-status").await?;
        cluster.wait_until_deleted_in_time("foreign-status").await
    };
    outcome.await.with_context(|| replica.tail())
}

/// The installed schema, and one that accepts any spec.
async fn schemas(cluster: &TestCluster) -> Result<(Value, Value)> {
    let crds = cluster::crds();
    let object = cluster.api(&crds, None).get("bridgenetworks.patchbay.dev").await?;
    let strict = object.data["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone();
    let mut open = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    open["properties"]["status"] = strict["properties"]["status"].clone();
    Ok((strict, open))
}

async fn set_schema(cluster: &TestCluster, schema: &Value) -> Result<()> {
    let patch: Value =
        json!([{"op": "replace", "path": "/spec/versions/0/schema/openAPIV3Schema", "value": schema}]);
    let patch = Patch::Json::<()>(serde_json::from_value(patch)?);
    let crds = cluster.api(&cluster::crds(), None);
    crds.patch("bridgenetworks.patchbay.dev", &PatchParams::default(), &patch)
        .await
        .map(drop)
        .context("set the schema")
}

/// An older or newer release may have stored a spec that the current schema rejects. A spec in which a map has another type
/// is not tested: the API server then accepts no change of the object.
pub async fn an_invalid_stored_network_can_be_deleted(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "invalid").await?;
    cluster.create_node("invalid-a", 1500).await?;
    let (strict, open) = schemas(&cluster).await?;
    set_schema(&cluster, &open).await?;
    let rows = [
        ("invalid-range", json!({"mtu": 100, "attachment": {"namespaces": ["invalid"]}})),
        ("invalid-name", json!({"bridge": "br/0", "attachment": {"namespaces": ["invalid"]}})),
        ("invalid-type", json!({"mtu": "lots", "attachment": {"namespaces": ["invalid"]}})),
        ("invalid-both", json!({"uplink": "eth1", "overlay": {"vni": 1 << 30}})),
    ];
    let creation = async {
        for (name, spec) in &rows {
            wait::until(TIMEOUT, "the open schema to be in force", || async {
                match cluster.create_network(name, spec.clone()).await {
                    Ok(()) => Ok(Some(())),
                    Err(error) if format!("{error:#}").contains("already exists") => Ok(Some(())),
                    Err(error) => Err(error),
                }
            })
            .await?;
        }
        Ok(())
    };
    let created: Result<()> = creation.await;
    set_schema(&cluster, &strict).await?;
    created.with_context(|| replica.tail())?;
    let outcome = async {
        // The strict schema is in force again.
        wait::until(TIMEOUT, "the strict schema to be in force", || async {
            match cluster.create_network("invalid-probe", json!({"mtu": 100})).await {
                Ok(()) => {
                    cluster.delete_network("invalid-probe").await?;
                    bail!("an invalid network was admitted")
                }
                Err(error) if format!("{error:#}").contains("spec.mtu") => Ok(Some(())),
                Err(error) => Err(error),
            }
        })
        .await?;
        let mut errors = Vec::new();
        for (name, _) in &rows {
            let has_condition = |it: &Value| condition(it, "Ready").is_some();
            let network = cluster.wait_for(name, "a Ready condition", has_condition).await;
            match network {
                Ok(network) => {
                    println!("{name}: {}", condition(&network, "Ready").context("Ready")?["message"]);
                }
                Err(error) => errors.push(format!("{error:#}")),
            }
            cluster.delete_network(name).await?;
            if let Err(error) = cluster.wait_until_deleted_in_time(name).await {
                errors.push(format!("{error:#}"));
            }
        }
        ensure!(errors.is_empty(), "{}", errors.join("\n"));
        Ok(())
    };
    let outcome: Result<()> = outcome.await;
    outcome.with_context(|| replica.tail())
}
