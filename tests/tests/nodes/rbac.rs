//! Permissions of the controller and the node daemon: RBAC, admission policies and capabilities.

use anyhow::{Context as _, Result, bail, ensure};
use api::NodeNetwork;
use e2e::{
    bridge::{
        WAIT_TIMEOUT, attached_pod, create_network, delete_network, node_report, wait_deleted,
        wait_for_event, wait_ready,
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

pub async fn the_webhook_is_reachable_through_its_service(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let unknown: NodeNetwork = serde_json::from_value(json!({
        "apiVersion": "patchbay.dev/v1alpha1", "kind": "NodeNetwork", "metadata": {"name": "nowhere"},
    }))?;
    match nodenetworks(&client).create(&PostParams::default(), &unknown).await {
        Err(kube::Error::Api(e)) if e.message.contains("Node \"nowhere\" does not exist") => Ok(()),
        other => bail!("{other:?}"),
    }
}

/// A client with a token of the node daemon, bound to a pod or unbound.
async fn daemon_client(lab: &Lab, pod: Option<&str>) -> Result<Client> {
    let mut arguments = vec!["-n", NAMESPACE, "create", "token", "patchbay-node"];
    if let Some(pod) = pod {
        arguments.extend(["--bound-object-kind", "Pod", "--bound-object-name", pod]);
    }
    let token = lab.kubectl(&arguments)?;
    let mut config: Config = lab.client_config().await?;
    config.auth_info =
        kube::config::AuthInfo { token: Some(token.trim().to_owned().into()), ..Default::default() };
    Ok(Client::try_from(config)?)
}

fn ensure_denied<T: std::fmt::Debug>(
    what: &str,
    outcome: Result<T, kube::Error>,
    expected: &str,
) -> Result<()> {
    match outcome {
        Err(kube::Error::Api(e))
            if e.message.contains("ValidatingAdmissionPolicy") && e.message.contains(expected) =>
        {
            Ok(())
        }
        other => bail!("{what}: {other:?}, expected a rejection by the policy with {expected:?}"),
    }
}

pub async fn a_node_daemon_can_write_only_the_objects_of_its_own_node(lab: Lab) -> Result<()> {
    let admin = lab.client().await?;
    // Broader RBAC than installed, so that the policy rejects the requests, not a missing verb.
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
    let outcome = check_confinement(&lab, &admin).await;
    lab.kubectl(&["delete", "clusterrolebinding/t-more", "clusterrole/t-more"])?;
    outcome
}

async fn check_confinement(lab: &Lab, admin: &Client) -> Result<()> {
    let bound = nodenetworks(&daemon_client(lab, Some(&patchbay::daemon_pod(admin, "node-1").await?)).await?);
    let unbound = nodenetworks(&daemon_client(lab, None).await?);
    let label = json!({"metadata": {"labels": {"t": "x"}}});
    let status = json!({"status": {"vtep": {"address": "192.0.2.1", "interface": "eth0", "mtu": 1500}}});
    let params = PatchParams::default();
    // The authorizer sees new roles with a delay.
    wait::until(WAIT_TIMEOUT, "the own NodeNetwork to be writable", || async {
        bound.patch("node-1", &params, &Patch::Merge(&label)).await?;
        Ok(Some(()))
    })
    .await?;
    for (token, api, expected) in
        [("bound token", &bound, "own node"), ("unbound token", &unbound, "names no node")]
    {
        ensure_denied(
            &format!("{token}: update"),
            api.patch("node-2", &params, &Patch::Merge(&label)).await,
            expected,
        )?;
        ensure_denied(
            &format!("{token}: status"),
            api.patch_status("node-2", &params, &Patch::Merge(&status)).await,
            expected,
        )?;
        ensure_denied(
            &format!("{token}: delete"),
            api.delete("node-2", &DeleteParams::default()).await,
            expected,
        )?;
        let deleted = api
            .delete_collection(
                &DeleteParams::default(),
                &ListParams::default().fields("metadata.name=node-2"),
            )
            .await;
        ensure_denied(&format!("{token}: collection delete"), deleted, expected)?;
        let new: NodeNetwork = serde_json::from_value(json!({
            "apiVersion": "patchbay.dev/v1alpha1", "kind": "NodeNetwork", "metadata": {"name": "node-7"},
        }))?;
        ensure_denied(&format!("{token}: create"), api.create(&PostParams::default(), &new).await, expected)?;
    }
    let foreign = json!({"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "node-2", "uid": "x"}]}});
    ensure_denied(
        "a foreign owner",
        bound.patch("node-1", &params, &Patch::Merge(&foreign)).await,
        "own Node",
    )?;
    ensure_denied(
        "unbound token: delete of node-1",
        unbound.delete("node-1", &DeleteParams::default()).await,
        "names no node",
    )?;
    ensure!(nodenetworks(admin).get_opt("node-2").await?.is_some(), "NodeNetwork node-2 was deleted");
    Ok(())
}

pub async fn no_request_of_patchbay_is_unauthorized(lab: Lab) -> Result<()> {
    let unauthorized: Vec<AuditedRequest> = lab
        .requests_since(AuditOffset::START)?
        .into_iter()
        .filter(|a| a.user_agent.starts_with("patchbay-") && (a.code == 401 || a.code == 403))
        .collect();
    ensure!(unauthorized.is_empty(), "{unauthorized:#?}");
    let requests = lab.requests_since(AuditOffset::START)?;
    for component in ["patchbay-controller", "patchbay-node"] {
        let user = format!("system:serviceaccount:{NAMESPACE}:{component}");
        ensure!(requests.iter().any(|a| a.user == user), "{component} sent no request as {user}");
    }
    Ok(())
}

pub async fn no_container_is_privileged_and_the_image_carries_its_commit(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let all = pods.list(&ListParams::default()).await?.items;
    ensure!(all.len() == 4, "two controllers and two daemons: {}", all.len());
    for pod in &all {
        let spec = pod.spec.as_ref().context("spec")?;
        for container in &spec.containers {
            let security = container.security_context.as_ref().context("securityContext")?;
            ensure!(
                security.privileged != Some(true) && security.allow_privilege_escalation == Some(false),
                "{security:?}"
            );
        }
    }
    // The capabilities of the running daemon, as the kernel reports them.
    let status = lab.node("node-1").output(&["sh", "-c", "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline | grep -q 'patchbay node' && grep -E 'CapEff|Seccomp:' $p/status; done; true"])?;
    // DAC_OVERRIDE is bit 1, NET_ADMIN bit 12, SYS_ADMIN bit 21; no other bit is set.
    ensure!(status.contains("CapEff:\t0000000000201002") && status.contains("Seccomp:\t2"), "{status}");
    let version = lab.kubectl(&[
        "-n",
        NAMESPACE,
        "exec",
        "daemonset/patchbay-node",
        "--",
        "/usr/bin/patchbay",
        "version",
    ])?;
    let commit = version.lines().find_map(|l| l.strip_prefix("commit ")).context("the commit")?.to_owned();
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
    Ok(())
}

pub async fn the_daemon_needs_each_of_its_capabilities(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let daemons: Api<DaemonSet> = Api::namespaced(client.clone(), NAMESPACE);
    let set_capabilities = async |capabilities: &[&str]| -> Result<()> {
        let security = json!({"capabilities": {"add": capabilities}});
        let containers = json!([{"name": "node", "securityContext": security}]);
        patchbay::patch_daemons(&client, json!({"containers": containers})).await?;
        patchbay::wait_ready(&lab).await
    };
    let all = daemons.get("patchbay-node").await?;
    let all =
        json!(all)["spec"]["template"]["spec"]["containers"][0]["securityContext"]["capabilities"]["add"]
            .clone();
    // The test of `cni_directory` covers DAC_OVERRIDE.
    ensure!(all == json!(["NET_ADMIN", "SYS_ADMIN", "DAC_OVERRIDE"]), "{all}: test every capability");
    set_capabilities(&["SYS_ADMIN"]).await?;
    create_network(&client, "caps", json!({"attachment": {"namespaces": ["default"]}})).await?;
    let entry = wait::until(WAIT_TIMEOUT, "reason KernelRefused", || async {
        Ok(node_report(&client, "node-1", "caps").await?.filter(|entry| entry["reason"] == "KernelRefused"))
    })
    .await?;
    println!("without NET_ADMIN: {}", entry["message"]);
    set_capabilities(&["NET_ADMIN"]).await?;
    wait_ready(&client, "caps").await?;
    let attached = with_namespace(&lab, "caps", async |ns: &TestNamespace| {
        ns.create_pod(attached_pod("client", "node-1", "default/caps")).await?;
        wait_for_event(ns, "enter the network namespace").await?;
        set_capabilities(&["NET_ADMIN", "SYS_ADMIN"]).await?;
        ns.wait_pod_ready("client").await.map(drop)
    })
    .await;
    set_capabilities(&["NET_ADMIN", "SYS_ADMIN", "DAC_OVERRIDE"]).await?;
    delete_network(&client, "caps").await?;
    wait_deleted(&client, "caps").await?;
    attached
}
