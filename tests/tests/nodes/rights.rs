//! What the two programs may do, and that they need it.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use api::NodeNetwork;
use e2e::{
    bridge::{
        attached_pod, create_network, delete_network, node_report, wait_deleted, wait_for_event, wait_ready,
    },
    patchbay::{self, NAMESPACE},
};
use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Pod};
use kube::{
    Api, Client, Config,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use lab::{
    Lab,
    audit::{AuditOffset, AuditedRequest},
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use serde_json::json;

use crate::nics::nodenetworks;

pub async fn the_webhook_is_reached_through_its_service(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let stranger: NodeNetwork = serde_json::from_value(json!({
        "apiVersion": "patchbay.dev/v1alpha1", "kind": "NodeNetwork", "metadata": {"name": "nowhere"},
    }))?;
    match nodenetworks(&client).create(&PostParams::default(), &stranger).await {
        Err(kube::Error::Api(e)) if e.message.contains("there is no Node \"nowhere\"") => Ok(()),
        other => bail!("{other:?}"),
    }
}

/// A client with the token of the node daemon; bound to a pod or to nothing.
async fn as_daemon(lab: &Lab, bound: Option<&str>) -> Result<Client> {
    let mut arguments = vec!["-n", NAMESPACE, "create", "token", "patchbay-node"];
    if let Some(pod) = bound {
        arguments.extend(["--bound-object-kind", "Pod", "--bound-object-name", pod]);
    }
    let token = lab.kubectl(&arguments)?;
    let mut config: Config = lab.client_config().await?;
    config.auth_info =
        kube::config::AuthInfo { token: Some(token.trim().to_owned().into()), ..Default::default() };
    Ok(Client::try_from(config)?)
}

fn denied<T: std::fmt::Debug>(what: &str, outcome: Result<T, kube::Error>, words: &str) -> Result<()> {
    match outcome {
        Err(kube::Error::Api(e))
            if e.message.contains("ValidatingAdmissionPolicy") && e.message.contains(words) =>
        {
            Ok(())
        }
        other => bail!("{what}: {other:?}, expected the policy's refusal with {words:?}"),
    }
}

pub async fn a_node_daemon_can_write_only_its_own_nodes_objects(lab: Lab) -> Result<()> {
    let admin = lab.client().await?;
    // More rights than installed, so that what refuses is the policy and not a missing verb.
    lab.kubectl(&[
        "create",
        "clusterrole",
        "t-more",
        "--verb=*",
        "--resource=nodenetworks.patchbay.dev,nodenetworks.patchbay.dev/status",
    ])?;
    lab.kubectl(&[
        "create",
        "clusterrolebinding",
        "t-more",
        "--clusterrole=t-more",
        "--serviceaccount=patchbay-system:patchbay-node",
    ])?;
    let outcome = confinement(&lab, &admin).await;
    lab.kubectl(&["delete", "clusterrolebinding/t-more", "clusterrole/t-more"])?;
    outcome
}

async fn confinement(lab: &Lab, admin: &Client) -> Result<()> {
    let mine = nodenetworks(&as_daemon(lab, Some(&patchbay::daemon_pod(admin, "node-1").await?)).await?);
    let nobody = nodenetworks(&as_daemon(lab, None).await?);
    let label = json!({"metadata": {"labels": {"t": "x"}}});
    let lie = json!({"status": {"vtep": {"address": "192.0.2.1", "interface": "eth0", "mtu": 1500}}});
    let params = PatchParams::default();
    // Roles take a moment to reach the authorizer.
    wait::until(Duration::from_secs(5), "the own object to be writable", || async {
        mine.patch("node-1", &params, &Patch::Merge(&label)).await?;
        Ok(Some(()))
    })
    .await?;
    for (who, api, words) in [("another node's", &mine, "own node"), ("nobody's", &nobody, "names no node")] {
        denied(&format!("{who} update"), api.patch("node-2", &params, &Patch::Merge(&label)).await, words)?;
        denied(
            &format!("{who} status"),
            api.patch_status("node-2", &params, &Patch::Merge(&lie)).await,
            words,
        )?;
        denied(&format!("{who} delete"), api.delete("node-2", &DeleteParams::default()).await, words)?;
        let all = api
            .delete_collection(
                &DeleteParams::default(),
                &ListParams::default().fields("metadata.name=node-2"),
            )
            .await;
        denied(&format!("{who} collection delete"), all, words)?;
        let fresh: NodeNetwork = serde_json::from_value(json!({
            "apiVersion": "patchbay.dev/v1alpha1", "kind": "NodeNetwork", "metadata": {"name": "node-7"},
        }))?;
        denied(&format!("{who} create"), api.create(&PostParams::default(), &fresh).await, words)?;
    }
    let foreign = json!({"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "node-2", "uid": "x"}]}});
    denied("a foreign owner", mine.patch("node-1", &params, &Patch::Merge(&foreign)).await, "own Node")?;
    denied(
        "nobody's delete of node-1",
        nobody.delete("node-1", &DeleteParams::default()).await,
        "names no node",
    )?;
    ensure!(nodenetworks(admin).get_opt("node-2").await?.is_some(), "node-2 has its object");
    Ok(())
}

pub async fn both_programs_run_under_the_installed_roles_without_one_refusal(lab: Lab) -> Result<()> {
    let refused: Vec<AuditedRequest> = lab
        .requests_since(AuditOffset::START)?
        .into_iter()
        .filter(|a| a.user_agent.starts_with("patchbay-") && (a.code == 401 || a.code == 403))
        .collect();
    ensure!(refused.is_empty(), "{refused:#?}");
    let asked = lab.requests_since(AuditOffset::START)?;
    for program in ["patchbay-controller", "patchbay-node"] {
        let user = format!("system:serviceaccount:{NAMESPACE}:{program}");
        ensure!(asked.iter().any(|a| a.user == user), "{program} never asked anything as {user}");
    }
    Ok(())
}

pub async fn no_container_is_privileged_and_the_image_tells_its_commit(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let all = pods.list(&ListParams::default()).await?.items;
    ensure!(all.len() == 4, "two controllers and two daemons: {}", all.len());
    for pod in &all {
        let spec = pod.spec.as_ref().context("a spec")?;
        for container in &spec.containers {
            let security = container.security_context.as_ref().context("a security context")?;
            ensure!(
                security.privileged != Some(true) && security.allow_privilege_escalation == Some(false),
                "{security:?}"
            );
        }
    }
    // What the kernel says of the running daemon, not what the manifest wishes.
    let status = lab.node("node-1").output(&["sh", "-c", "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline | grep -q 'patchbay node' && grep -E 'CapEff|Seccomp:' $p/status; done; true"])?;
    // DAC_OVERRIDE is bit 1, NET_ADMIN bit 12, SYS_ADMIN bit 21, and there is no other.
    ensure!(status.contains("CapEff:\t0000000000201002") && status.contains("Seccomp:\t2"), "{status}");
    let ran = lab.kubectl(&[
        "-n",
        NAMESPACE,
        "exec",
        "daemonset/patchbay-node",
        "--",
        "/usr/bin/patchbay",
        "version",
    ])?;
    let commit = ran.lines().find_map(|l| l.strip_prefix("commit ")).context("a commit")?.to_owned();
    let inspected = lab.node("node-1").output(&[
        "ctr",
        "-n",
        "k8s.io",
        "images",
        "inspect",
        "--content",
        patchbay::IMAGE_REFERENCE,
    ])?;
    ensure!(commit.len() >= 40 && inspected.contains(&commit), "{commit} in {inspected}");
    let size = std::fs::metadata(patchbay::image_tar())?.len();
    ensure!(size <= 30_000_000, "{size} bytes");
    Ok(())
}

pub async fn each_capability_of_the_daemon_is_needed(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let daemons: Api<DaemonSet> = Api::namespaced(client.clone(), NAMESPACE);
    let with = async |capabilities: &[&str]| -> Result<()> {
        let security = json!({"capabilities": {"add": capabilities}});
        let containers = json!([{"name": "node", "securityContext": security}]);
        patchbay::patch_daemons(&client, json!({"containers": containers})).await?;
        patchbay::wait_ready(&lab).await
    };
    let all = daemons.get("patchbay-node").await?;
    let all =
        json!(all)["spec"]["template"]["spec"]["containers"][0]["securityContext"]["capabilities"]["add"]
            .clone();
    // DAC_OVERRIDE has a test of its own, `cni_directory`.
    ensure!(
        all == json!(["NET_ADMIN", "SYS_ADMIN", "DAC_OVERRIDE"]),
        "{all}: each needs its part of this test"
    );
    with(&["SYS_ADMIN"]).await?;
    create_network(&client, "caps", json!({"attachment": {"namespaces": ["default"]}})).await?;
    let entry = wait::until(Duration::from_secs(5), "the kernel's refusal", || async {
        Ok(node_report(&client, "node-1", "caps").await?.filter(|entry| entry["reason"] == "KernelRefused"))
    })
    .await?;
    println!("without NET_ADMIN: {}", entry["message"]);
    with(&["NET_ADMIN"]).await?;
    wait_ready(&client, "caps", Duration::from_secs(40)).await?;
    let joined = with_namespace(&lab, "caps", async |ns: &TestNamespace| {
        ns.create_pod(attached_pod("p", "node-1", "default/caps")).await?;
        wait_for_event(ns, "enter the network namespace", Duration::from_secs(20)).await?;
        with(&["NET_ADMIN", "SYS_ADMIN"]).await?;
        ns.wait_pod_ready("p").await.map(drop)
    })
    .await;
    with(&["NET_ADMIN", "SYS_ADMIN", "DAC_OVERRIDE"]).await?;
    delete_network(&client, "caps").await?;
    wait_deleted(&client, "caps", Duration::from_secs(30)).await?;
    joined
}
