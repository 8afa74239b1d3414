//! Attachments through changes by others and of the list, and networks that should not be.

use anyhow::{Context as _, Result, bail, ensure};
use kube::api::{DeleteParams, Patch, PatchParams};
use lab::{Lab, wait};
use serde_json::{Value, json};

use crate::{
    GONE, SOON,
    cluster::{self, Cluster, condition},
    spec, start,
};

pub async fn every_repair_of_an_attachment_is_counted_once(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "count").await?;
    let outcome = async {
        cluster.create("count", spec(&cluster)).await?;
        let nad = cluster.nad("count", "count").await?;
        cluster.until("count", "a status", |it| it["status"]["mtu"] == 1500).await?;
        let marks = |nad: &Value| ["labels", "annotations"].map(|it| nad["metadata"][it].clone());
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
                cluster.merge(&cluster::nads(), Some("count"), "count", patch).await?;
            }
            wait::until(SOON, &format!("{patch} to be put right"), || async {
                let now = cluster.find_nad("count", "count").await?.context("it is not there")?;
                ensure!(now["spec"] == nad["spec"] && marks(&now) == marks(&nad), "{now:#}");
                ensure!(
                    replica.metric("patchbay_attachment_repairs_total", "")? == number,
                    "not counted yet"
                );
                Ok(Some(()))
            })
            .await?;
        }
        // Without any mark it is nobody's: never adopted, and never deleted.
        let marks = json!({"metadata": {"labels": null, "annotations": null}});
        cluster.merge(&cluster::nads(), Some("count"), "count", &marks).await?;
        let network = cluster.condition("count", "Conflict", "True").await?;
        let message = &condition(&network, "Conflict").context("Conflict")?["message"];
        ensure!(
            message.as_str().is_some_and(|it| it.contains("count/count is somebody else's")),
            "{message}"
        );
        // Who names it uses the network all the same: it leads there.
        let pod = cluster.pod("user", "count").await?;
        cluster.condition("count", "InUse", "True").await?;
        cluster.remove(&pod).await?;
        cluster.delete("count").await?;
        cluster.gone("count", GONE).await?;
        let left = cluster.find_nad("count", "count").await?.context("somebody else's was deleted")?;
        ensure!(left["spec"] == nad["spec"], "{left:#}");
        ensure!(replica.metric("patchbay_attachment_repairs_total", "")? == 4, "more than was repaired");
        Ok(())
    };
    let outcome: Result<()> = outcome.await;
    outcome.with_context(|| replica.tail())
}

pub async fn namespaces_join_and_leave_the_list(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "list").await?;
    let outcome = async {
        cluster.node("list-a", 1500).await?;
        cluster.make_namespace("more").await?;
        let listed = |namespaces: &[&str]| json!({"attachment": {"namespaces": namespaces}});
        let without = async |namespace: &str| {
            wait::until(SOON, &format!("no attachment in {namespace}"), || async {
                Ok(cluster.find_nad(namespace, "list").await?.is_none().then_some(()))
            })
            .await
        };
        cluster.create("list", spec(&cluster)).await?;
        cluster.nad("list", "list").await?;
        cluster.edit("list", listed(&["list", "more", "latest"])).await?;
        cluster.nad("more", "list").await?;
        cluster.report("list-a", "list", true).await?;
        cluster.reason("list", "Ready", "AttachmentsMissing").await?;
        cluster.make_namespace("latest").await?;
        cluster.nad("latest", "list").await?;
        cluster.condition("list", "Ready", "True").await?;
        // Out of the list: what is used stays until it is not.
        let pod = cluster.pod("user", "list").await?;
        cluster.condition("list", "InUse", "True").await?;
        cluster.edit("list", listed(&["more"])).await?;
        without("latest").await?;
        cluster.report("list-a", "list", true).await?;
        let kept = |it: &Value| {
            let message = condition(it, "Ready").and_then(|it| it["message"].as_str());
            message.is_some_and(|it| {
                it.contains("kept although not listed any more") && it.contains("list/list")
            })
        };
        cluster.until("list", "to say what is kept", kept).await?;
        ensure!(cluster.find_nad("list", "list").await?.is_some(), "taken from under a pod");
        cluster.remove(&pod).await?;
        without("list").await?;
        cluster.nad("more", "list").await?;
        cluster.edit("list", json!({"attachment": {"namespaces": null}})).await?;
        without("more").await?;
        cluster.unlist("list-a").await?;
        cluster.delete("list").await?;
        cluster.gone("list", GONE).await
    };
    outcome.await.with_context(|| replica.tail())
}

pub async fn what_others_write_into_the_status_goes_and_all_is_quiet_again(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "meddle").await?;
    let outcome = async {
        cluster.node("meddle-a", 1500).await?;
        cluster.create("meddle", spec(&cluster)).await?;
        cluster.report("meddle-a", "meddle", true).await?;
        cluster.condition("meddle", "Ready", "True").await?;
        // Another manager owns what it applies: an apply of ours could not take it away.
        let kind = cluster::networks();
        let theirs = json!({"type": "Backup", "status": "True", "reason": "Done", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let status = json!({"conditions": [theirs], "podsWithOldMtu": 7,
            "notReady": [{"node": "nowhere", "reason": "MadeUp", "message": ""}]});
        let object = json!({"apiVersion": kind.api_version, "kind": kind.kind,
            "metadata": {"name": "meddle"}, "status": status});
        let params = PatchParams::apply("meddler").force();
        cluster.api(&kind, None).patch_status("meddle", &params, &Patch::Apply(&object)).await?;
        let clean = |it: &Value| {
            let status = &it["status"];
            let ours = status["notReady"].is_null() && status["podsWithOldMtu"].is_null();
            ours && condition(it, "Backup").is_some() && condition(it, "Ready").is_some()
        };
        cluster.until("meddle", "to say only what is so, and what others add", clean).await?;
        // Long enough for a fight to show.
        let mark = lab.audit_offset()?;
        tokio::time::sleep(GONE).await;
        let writes = Cluster::writes(&lab, mark)?;
        ensure!(writes.is_empty(), "no end of it: {writes:?}");
        cluster.unlist("meddle-a").await?;
        cluster.delete("meddle").await?;
        cluster.gone("meddle", GONE).await
    };
    outcome.await.with_context(|| replica.tail())
}

/// The kind as installed, and as it would be if anything went.
async fn schemas(cluster: &Cluster) -> Result<(Value, Value)> {
    let kinds = cluster::definitions();
    let object = cluster.api(&kinds, None).get("bridgenetworks.patchbay.dev").await?;
    let strict = object.data["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone();
    let mut open = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    open["properties"]["status"] = strict["properties"]["status"].clone();
    Ok((strict, open))
}

async fn set_schema(cluster: &Cluster, schema: &Value) -> Result<()> {
    let patch: Value =
        json!([{"op": "replace", "path": "/spec/versions/0/schema/openAPIV3Schema", "value": schema}]);
    let patch = Patch::Json::<()>(serde_json::from_value(patch)?);
    let kinds = cluster.api(&cluster::definitions(), None);
    kinds
        .patch("bridgenetworks.patchbay.dev", &PatchParams::default(), &patch)
        .await
        .map(drop)
        .context("set a schema")
}

/// As an older release, or one to come, may have left it: the rules of today would never let it in. One in which a map
/// is something else is left out: the API server then takes no change of it from anybody.
pub async fn a_network_that_cannot_be_read_can_go(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "odd").await?;
    cluster.node("odd-a", 1500).await?;
    let (strict, open) = schemas(&cluster).await?;
    set_schema(&cluster, &open).await?;
    let rows = [
        ("odd-range", json!({"mtu": 100, "attachment": {"namespaces": ["odd"]}})),
        ("odd-name", json!({"bridge": "br/0", "attachment": {"namespaces": ["odd"]}})),
        ("odd-type", json!({"mtu": "lots", "attachment": {"namespaces": ["odd"]}})),
        ("odd-both", json!({"uplink": "eth1", "overlay": {"vni": 1 << 30}})),
    ];
    let made = async {
        for (name, spec) in &rows {
            wait::until(SOON * 2, "the rules to be relaxed", || async {
                match cluster.create(name, spec.clone()).await {
                    Ok(()) => Ok(Some(())),
                    Err(error) if format!("{error:#}").contains("already exists") => Ok(Some(())),
                    Err(error) => Err(error),
                }
            })
            .await?;
        }
        Ok(())
    };
    let made: Result<()> = made.await;
    set_schema(&cluster, &strict).await?;
    made.with_context(|| replica.tail())?;
    let outcome = async {
        // The rules hold again.
        wait::until(SOON * 2, "the rules to be back", || async {
            match cluster.create("odd-probe", json!({"mtu": 100})).await {
                Ok(()) => {
                    cluster.delete("odd-probe").await?;
                    bail!("let in")
                }
                Err(error) if format!("{error:#}").contains("spec.mtu") => Ok(Some(())),
                Err(error) => Err(error),
            }
        })
        .await?;
        let mut wrong = Vec::new();
        for (name, _) in &rows {
            let told = |it: &Value| condition(it, "Ready").is_some();
            let network = cluster.until(name, "a word about it", told).await;
            match network {
                Ok(network) => {
                    println!("{name}: {}", condition(&network, "Ready").context("Ready")?["message"]);
                }
                Err(error) => wrong.push(format!("{error:#}")),
            }
            cluster.delete(name).await?;
            if let Err(error) = cluster.gone(name, GONE).await {
                wrong.push(format!("{error:#}"));
            }
        }
        ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
        Ok(())
    };
    let outcome: Result<()> = outcome.await;
    outcome.with_context(|| replica.tail())
}
