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
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Namespace, Pod},
    events::v1::Event,
};
use kube::{
    Api, Client, Config,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use lab::{
    Lab,
    audit::{AuditOffset, AuditedRequest},
    test_namespace::{TestNamespace, pod, with_namespace},
    wait,
};
use serde_json::json;

use crate::{NODES, nics::nodenetworks};

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

pub async fn a_node_daemon_can_write_only_two_annotations_of_the_pods_of_its_node(lab: Lab) -> Result<()> {
    let admin = lab.client().await?;
    let daemon = patchbay::daemon_pod(&admin, "node-1").await?;
    let (bound, unbound) = (daemon_client(&lab, Some(&daemon)).await?, daemon_client(&lab, None).await?);
    with_namespace(&lab, "pods", async |ns: &TestNamespace| {
        for node in NODES {
            ns.start_pod(pod(node).on(node).label("app", "t").annotation("t", "x")).await?;
        }
        let namespace = ns.pods().get("node-1").await?.metadata.namespace.context("the namespace")?;
        let api = |client: &Client| Api::<Pod>::namespaced(client.clone(), &namespace);
        check_pod_confinement(&api(&bound), &api(&unbound)).await
    })
    .await
}

async fn check_pod_confinement(bound: &Api<Pod>, unbound: &Api<Pod>) -> Result<()> {
    const STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
    const ATTACHMENTS: &str = "patchbay.dev/attachments";
    let params = PatchParams::default();
    let ours = json!({"metadata": {"annotations": {STATUS: "[]", ATTACHMENTS: "[]"}}});
    let write = async |api: &Api<Pod>, name: &str, patch: &serde_json::Value| {
        api.patch_status(name, &params, &Patch::Merge(patch)).await
    };
    for (token, api, name) in [
        ("bound token", bound, "node-2"),
        ("unbound token", unbound, "node-1"),
        ("unbound token", unbound, "node-2"),
    ] {
        ensure_denied(
            &format!("{token}: pod of {name}"),
            write(api, name, &ours).await,
            "pods of its own node",
        )?;
    }
    for (what, metadata) in [
        ("another annotation", json!({"annotations": {"t": "y"}})),
        ("the networks annotation", json!({"annotations": {"k8s.v1.cni.cncf.io/networks": "default/blue"}})),
        ("a removed annotation", json!({"annotations": {"t": null}})),
        ("a renamed annotation", json!({"annotations": {"t": null, "u": "x"}})),
        ("another annotation besides ours", json!({"annotations": {STATUS: "[]", "t": "y"}})),
        ("a label", json!({"labels": {"app": "u"}})),
        ("a removed label", json!({"labels": {"app": null}})),
        ("a finalizer", json!({"finalizers": ["patchbay.dev/t"]})),
    ] {
        let patch = json!({"metadata": metadata});
        ensure_denied(what, write(bound, "node-1", &patch).await, "may only change the annotations")?;
    }
    let ended = json!({"metadata": ours["metadata"], "status": {"phase": "Failed"}});
    ensure_denied("the phase", write(bound, "node-1", &ended).await, "may only change the annotations")?;
    for annotations in [
        json!({STATUS: "[]", ATTACHMENTS: "[]"}),
        json!({STATUS: "[{}]", ATTACHMENTS: null}),
        json!({STATUS: null}),
    ] {
        let patch = json!({"metadata": {"annotations": annotations}});
        write(bound, "node-1", &patch).await.with_context(|| format!("write {annotations}"))?;
    }
    // RBAC allows no write except to the status.
    match bound.patch("node-1", &params, &Patch::Merge(&ours)).await {
        Err(kube::Error::Api(status)) if status.code == 403 => {}
        other => bail!("a write to the pod itself: {other:?}"),
    }
    Ok(())
}

pub async fn a_node_daemon_records_events_only_in_the_name_of_its_node(lab: Lab) -> Result<()> {
    let admin = lab.client().await?;
    let bound = daemon_client(&lab, Some(&patchbay::daemon_pod(&admin, "node-1").await?)).await?;
    with_namespace(&lab, "events", async |ns: &TestNamespace| {
        let pod = ns.start_pod(pod("client").on("node-1")).await?;
        let namespace = pod.metadata.namespace.context("the namespace")?;
        let create = async |namespace: &str, instance: &str, kind: &str, name: &str| {
            let event: Event = serde_json::from_value(json!({
                "metadata": {"generateName": "t-", "namespace": namespace},
                "eventTime": "2026-01-01T00:00:00.000000Z",
                "reportingController": "patchbay-node",
                "reportingInstance": instance,
                "type": "Normal", "reason": "Test", "action": "Test", "note": "test",
                "regarding": {"apiVersion": "v1", "kind": kind, "name": name, "namespace": namespace},
            }))?;
            let events = Api::<Event>::namespaced(bound.clone(), namespace);
            anyhow::Ok(events.create(&PostParams::default(), &event).await)
        };
        create(&namespace, "node-1", "Pod", "client").await?.context("an event about a pod")?;
        let forged = create(&namespace, "node-2", "Pod", "client").await?;
        ensure_denied("an event of another node", forged, "reportingInstance is its own node")?;
        let secret = create(&namespace, "node-1", "Secret", "client").await?;
        ensure_denied("an event about a Secret", secret, "only write events about pods")?;
        let node = create("default", "node-1", "Node", "node-2").await?;
        ensure_denied("an event about another Node", node, "its own Node")?;
        Ok(())
    })
    .await
}

pub async fn no_request_of_patchbay_is_unauthorized(lab: Lab) -> Result<()> {
    let namespaces: Api<Namespace> = Api::all(lab.client().await?);
    let namespaces = namespaces.list(&ListParams::default()).await?;
    let exists = |name: &str| {
        let found = namespaces.iter().find(|namespace| namespace.metadata.name.as_deref() == Some(name));
        name.is_empty() || found.is_some_and(|namespace| namespace.metadata.deletion_timestamp.is_none())
    };
    // The API server also rejects creates in a namespace that is being deleted with 403.
    let is_rejected =
        |a: &AuditedRequest| a.code == 401 || (a.code == 403 && (a.verb != "create" || exists(&a.namespace)));
    let unauthorized: Vec<AuditedRequest> = lab
        .requests_since(AuditOffset::START)?
        .into_iter()
        .filter(|a| a.user_agent.starts_with("patchbay-") && is_rejected(a))
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
    // DAC_OVERRIDE is bit 1, NET_BROADCAST bit 11, NET_ADMIN bit 12, SYS_CHROOT bit 18, SYS_PTRACE bit 19, SYS_ADMIN bit 21;
    // no other bit is set.
    ensure!(status.contains("CapEff:\t00000000002c1802") && status.contains("Seccomp:\t2"), "{status}");
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
    // The test of `cni_directory` covers DAC_OVERRIDE, those of hot-plug SYS_PTRACE, SYS_CHROOT and NET_BROADCAST.
    let every = ["NET_ADMIN", "SYS_ADMIN", "DAC_OVERRIDE", "SYS_PTRACE", "SYS_CHROOT", "NET_BROADCAST"];
    ensure!(all == json!(every), "{all}: test every capability");
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
    set_capabilities(&every).await?;
    delete_network(&client, "caps").await?;
    wait_deleted(&client, "caps").await?;
    attached
}
