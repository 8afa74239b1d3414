//! The rights that hot-plug needs, and their limits.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use e2e::{
    bridge::WAIT_TIMEOUT,
    hotplug::{
        ATTACHMENTS, NETWORK_STATUS, NETWORKS, RELEASE_LIMIT, create_bridge_nad, create_record_nad, element,
        network_name, plain_pod, start_live_pod, start_live_pods, wait_addresses_within,
    },
    patchbay::{self, NAMESPACE, patch_daemon_container, with_daemon_variable},
};
use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Pod};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use lab::{
    Lab,
    test_namespace::{TestNamespace, pod, with_namespace},
    wait,
};
use serde_json::{Value, json};

pub async fn hot_plug_needs_each_of_its_capabilities(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    let daemons: Api<DaemonSet> = Api::namespaced(client.clone(), NAMESPACE);
    let object = json!(daemons.get("patchbay-node").await?);
    let all = &object["spec"]["template"]["spec"]["containers"][0]["securityContext"]["capabilities"]["add"];
    let all: Vec<String> = serde_json::from_value(all.clone()).context("the capabilities of the daemon")?;
    let set = async |capabilities: &[&String]| {
        patch_daemon_container(&lab, json!({"securityContext": {"capabilities": {"add": capabilities}}}))
            .await
    };
    let outcome = with_namespace(&lab, "caps", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.180.0.0/24").await?;
        let needed = [
            ("SYS_PTRACE", "mount namespace"),
            ("SYS_CHROOT", "mount namespace"),
            ("NET_BROADCAST", "add the capability NET_BROADCAST"),
        ];
        let names = needed.map(|(missing, _)| missing.to_lowercase().replace('_', "-"));
        let pods = start_live_pods(ns, names.map(|name| plain_pod(&name, "node-1"))).await?;
        for (pod, (missing, problem)) in pods.iter().zip(needed) {
            ensure!(all.iter().any(|one| one == missing), "{missing} is not granted: {all:?}");
            let others: Vec<&String> = all.iter().filter(|one| *one != missing).collect();
            set(&others).await?;
            pod.set_networks(&json!([element("blue", "net1")])).await?;
            // The health of the daemon says why; everything else of the daemon works.
            let health = wait::until(WAIT_TIMEOUT, &format!("health without {missing}"), || async {
                // The pod that is replaced may still exist.
                let daemon = patchbay::daemon_pod(&client, "node-1").await?;
                let probe = ["-n", NAMESPACE, "exec", &daemon, "--", "/usr/bin/patchbay", "probe", "ready"];
                let text = lab.kubectl(&probe)?;
                ensure!(text.contains("hot-plug cannot start") && text.contains(problem), "{text}");
                Ok(Some(text))
            })
            .await?;
            println!("without {missing}: {health}");
            ensure!(pod.link_names()?.is_empty(), "{:?}", pod.link_names()?);
        }
        set(&all.iter().collect::<Vec<_>>()).await?;
        for pod in &pods {
            pod.wait_interfaces(&["net1"]).await?;
        }
        Ok(())
    })
    .await;
    if outcome.is_err() {
        set(&all.iter().collect::<Vec<_>>()).await?;
    }
    outcome
}

pub async fn with_hotplug_off_only_own_attachments_are_torn_down(lab: Lab) -> Result<()> {
    with_namespace(&lab, "off", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.182.0.0/24").await?;
        let pods =
            [plain_pod("plugged", "node-1"), plain_pod("new", "node-1"), plain_pod("deleted", "node-1")];
        let [plugged, new, deleted] = start_live_pods(ns, pods).await?;
        for pod in [&plugged, &deleted] {
            pod.set_networks(&json!([element("blue", "net1")])).await?;
        }
        for pod in [&plugged, &deleted] {
            pod.wait_interfaces(&["net1"]).await?;
        }
        with_daemon_variable(&lab, "PATCHBAY_HOTPLUG", "off", async || {
            new.set_networks(&json!([element("blue", "net1")])).await?;
            deleted.delete().await?;
            wait_addresses_within(RELEASE_LIMIT, &lab, "node-1", &network_name(ns, "blue"), 1).await?;
            tokio::time::sleep(Duration::from_secs(2)).await;
            ensure!(new.link_names()?.is_empty(), "{:?}", new.link_names()?);
            ensure!(plugged.link_names()?.contains("net1"), "{:?}", plugged.link_names()?);
            Ok(())
        })
        .await?;
        new.wait_interfaces(&["net1"]).await?;
        plugged.wait_interfaces(&["net1"]).await
    })
    .await
}

/// A mirror pod without a static pod: it claims to run in the sandbox of another pod.
async fn create_claimant(ns: &TestNamespace, name: &str, node: &str, claimed: &str) -> Result<()> {
    let mut builder = pod(name).on(node);
    for key in ["kubernetes.io/config.hash", "kubernetes.io/config.mirror"] {
        builder = builder.annotation(key, claimed);
    }
    ns.create_pod(builder.annotation("kubernetes.io/config.source", "file")).await?;
    let status = json!({"status": {"phase": "Running"}});
    ns.pods().patch_status(name, &PatchParams::default(), &Patch::Merge(&status)).await?;
    Ok(())
}

/// A user who may create pods can create one with the annotations of a mirror pod, and so claim the UID of any pod.
pub async fn a_pod_that_claims_the_uid_of_a_deleted_pod_changes_nothing_there(lab: Lab) -> Result<()> {
    let outcome = with_namespace(&lab, "owner", async |owner: &TestNamespace| {
        with_namespace(&lab, "claimant", async |ns: &TestNamespace| {
            create_record_nad(owner, "blue", "10.183.0.0/24", &json!({})).await?;
            create_record_nad(ns, "red", "10.183.1.0/24", &json!({})).await?;
            let victim = start_live_pod(owner, plain_pod("victim", "node-2")).await?;
            let other = start_live_pod(ns, plain_pod("other", "node-2")).await?;
            victim.set_networks(&json!([element("blue", "net1")])).await?;
            victim.wait_interfaces(&["net1"]).await?;
            let index = victim.link_index("net1")?;
            let uid = victim.object().await?.metadata.uid.context("a UID")?;
            // Without the kubelet, the sandbox of a deleted pod runs on, and a mirror pod without a static pod stays.
            lab.pause("node-2/kubelet")?;
            create_claimant(ns, "hostile", "node-2", &uid).await?;
            let claims = [json!([]), json!([element("red", "net1")]), json!([element("red", "net2")])];
            let claim = async |networks: &Value| {
                let patch = json!({"metadata": {"annotations": {NETWORKS: networks.to_string()}}});
                ns.pods().patch("hostile", &PatchParams::default(), &Patch::Merge(&patch)).await?;
                // The daemon has read the claim when it has applied a later edit.
                other.set_networks(&json!([element("red", "net1")])).await?;
                other.wait_interfaces(&["net1"]).await?;
                other.set_networks(&json!([])).await?;
                other.wait_interfaces(&[]).await?;
                let names: Vec<String> = victim.link_names()?.into_iter().collect();
                ensure!(names == ["net1"] && victim.link_index("net1")? == index, "{networks}: {names:?}");
                let calls = victim.plugin_commands("net1")?;
                ensure!(calls == ["ADD"], "{networks}: {calls:?}");
                let hostile = ns.pods().get("hostile").await?;
                for annotation in [ATTACHMENTS, NETWORK_STATUS] {
                    ensure!(!hostile.annotations().contains_key(annotation), "{:?}", hostile.annotations());
                }
                Ok(())
            };
            for networks in &claims {
                claim(networks).await.context("the victim exists")?;
            }
            victim.delete().await?;
            wait::until(WAIT_TIMEOUT, "the victim to be deleted", || async {
                Ok(owner.pods().get_opt("victim").await?.is_none().then_some(()))
            })
            .await?;
            for networks in &claims {
                claim(networks).await.context("the victim is deleted")?;
            }
            // The same claim counts if the pod has the namespace and the name of the sandbox, as a static pod has.
            ns.pods().delete("hostile", &DeleteParams::default().grace_period(0)).await?;
            create_claimant(owner, "victim", "node-2", &uid).await?;
            let networks = json!([element("blue", "net1"), element("blue", "net2")]);
            victim.set_networks(&networks).await?;
            wait::until(WAIT_TIMEOUT, "the mirror pod of the sandbox to be plugged", || async {
                let names = victim.link_names()?;
                ensure!(names.len() == 2, "{names:?}");
                Ok(Some(()))
            })
            .await?;
            // The kubelet ends the sandbox. Its addresses are released in spite of the claim.
            lab.resume("node-2/kubelet")?;
            let network = network_name(owner, "blue");
            wait_addresses_within(RELEASE_LIMIT * 2, &lab, "node-2", &network, 0).await?;
            let calls = lab.plugin_calls("node-2")?;
            let arguments = calls.iter().filter_map(|call| call.environment.get("CNI_ARGS"));
            let hostile: Vec<&String> =
                arguments.filter(|text| text.contains("K8S_POD_NAME=hostile")).collect();
            ensure!(hostile.is_empty(), "{hostile:?}");
            Ok(())
        })
        .await
    })
    .await;
    lab.resume("node-2/kubelet")?;
    outcome
}

/// A client with the token of the daemon on a node.
async fn daemon_client(lab: &Lab, node: &str) -> Result<Client> {
    let pod = patchbay::daemon_pod(&lab.client().await?, node).await?;
    let bound = ["--bound-object-kind", "Pod", "--bound-object-name", &pod];
    let token =
        lab.kubectl(&[&["-n", NAMESPACE, "create", "token", "patchbay-node"][..], &bound].concat())?;
    let mut config = lab.client_config().await?;
    config.auth_info =
        kube::config::AuthInfo { token: Some(token.trim().to_owned().into()), ..Default::default() };
    Ok(Client::try_from(config)?)
}

pub async fn a_daemon_can_patch_only_two_annotations_of_pods_of_its_node(lab: Lab) -> Result<()> {
    with_namespace(&lab, "token", async |ns: &TestNamespace| {
        start_live_pods(ns, [plain_pod("own", "node-1"), plain_pod("other", "node-2")]).await?;
        let pods: Api<Pod> = Api::namespaced(daemon_client(&lab, "node-1").await?, &ns.namespace);
        let annotate = |name: &str| json!({"metadata": {"annotations": {name: "[]"}}});
        let params = PatchParams::default();
        let patched = wait::until(WAIT_TIMEOUT, "the daemon's token to patch a pod of its node", || async {
            // The daemon of the node soon removes what it did not write.
            let patched = pods.patch_status("own", &params, &Patch::Merge(annotate(ATTACHMENTS))).await?;
            pods.patch_status("own", &params, &Patch::Merge(annotate(NETWORK_STATUS))).await?;
            Ok(Some(patched))
        })
        .await?;
        ensure!(
            patched.metadata.annotations.is_some_and(|all| all.contains_key(ATTACHMENTS)),
            "no annotation"
        );
        let denied = |what: &str, outcome: Result<Pod, kube::Error>| match outcome {
            Err(kube::Error::Api(e)) if e.code == 403 || e.code == 422 => Ok(()),
            other => bail!("{what}: {other:?}"),
        };
        let phase = json!({"status": {"phase": "Failed", "podIP": "192.0.2.1"}});
        let condition = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
        for (what, name, patch) in [
            ("a pod of another node", "other", annotate(ATTACHMENTS)),
            ("another annotation", "own", annotate("example.com/other")),
            ("the networks", "own", annotate(NETWORKS)),
            ("a label", "own", json!({"metadata": {"labels": {"app": "x"}}})),
            ("a finalizer", "own", json!({"metadata": {"finalizers": ["example.com/x"]}})),
            ("the phase", "own", phase),
            ("a condition", "own", condition),
        ] {
            denied(what, pods.patch_status(name, &params, &Patch::Merge(&patch)).await)?;
        }
        denied("the pod itself", pods.patch("own", &params, &Patch::Merge(annotate(ATTACHMENTS))).await)
    })
    .await
}

/// All annotations of a pod share 256 KiB.
pub async fn a_pod_with_long_annotations_gets_its_status(lab: Lab) -> Result<()> {
    with_namespace(&lab, "long", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.185.0.0/24").await?;
        let pod = start_live_pod(ns, plain_pod("p", "node-1")).await?;
        pod.annotate(json!({"example.com/long": "x".repeat(250 * 1024)})).await?;
        pod.set_networks(&json!([element("blue", "net1")])).await?;
        pod.wait_interfaces(&["net1"]).await?;
        pod.set_networks(&json!([])).await?;
        pod.wait_interfaces(&[]).await.map(drop)
    })
    .await
}
