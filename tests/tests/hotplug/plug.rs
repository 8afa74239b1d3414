//! Plugging and unplugging by edits of the networks annotation.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use api::IPBlock;
use e2e::{
    bridge::{WAIT_TIMEOUT, attachment_for, delete_network, link, start_network, wait_deleted},
    hotplug::{
        ATTACHMENTS, NETWORKS, bridge_config, bridge_name, create_bridge_nad, create_nad, create_record_nad,
        edit_nad, element, host_local_addresses, network_name, plain_pod, pod_with_networks, start_live_pod,
        start_live_pods,
    },
};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use lab::{
    Lab,
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use serde_json::{Value, json};

const FAIL_MESSAGE: &str = "the switch port is disabled";

pub async fn a_bridge_with_host_local_is_plugged_and_unplugged(lab: Lab) -> Result<()> {
    with_namespace(&lab, "plug", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.101.0.0/24").await?;
        let server = plain_pod("server", "node-1").command(&["tool", "echo", "7000"]);
        let [client, server] = start_live_pods(ns, [plain_pod("client", "node-1"), server]).await?;
        for pod in [&client, &server] {
            pod.set_networks(&json!([element("blue", "net1")])).await?;
        }
        for pod in [&client, &server] {
            pod.wait_interfaces(&["net1"]).await?;
        }
        let target = server.address("net1")?;
        client.wait_reachable(&target).await?;
        let text = "x".repeat(4000);
        let response = client.exec(&["tool", "send", "tcp", &format!("{target}:7000"), &text])?;
        ensure!(response.contains(&text), "{response}");

        let (entry, link) = (client.status("net1").await?, client.link("net1")?.context("net1")?);
        let network = format!("{}/blue", ns.namespace);
        ensure!(entry["name"] == network, "{entry}");
        ensure!(entry["ips"] == json!([client.address("net1")?]), "{entry}");
        ensure!(entry["mac"] == link["address"] && entry["dns"].is_object(), "{entry} of {link}");
        ensure!(entry["default"].is_null(), "{entry}");
        let attachments = client.attachments().await?;
        let [attachment] = &attachments[..] else { anyhow::bail!("{attachments:?}") };
        ensure!(attachment["network"] == network && attachment["interface"] == "net1", "{attachment}");
        ensure!(attachment["state"] == "Attached", "{attachment}");
        let keys: Vec<&String> = attachment.as_object().context("an object")?.keys().collect();
        let known = ["network", "interface", "state", "reason", "message"];
        ensure!(keys.iter().all(|key| known.contains(&key.as_str())), "{attachment}");
        let added = client.wait_event("AddedInterface", "added interface net1 to network: blue").await?;
        ensure!(added.kind == "Normal", "{added:?}");
        ensure!(added.message.starts_with(&format!("pod [{}/client]: ", ns.namespace)), "{added:?}");

        client.set_networks(&json!([])).await?;
        client.wait_interfaces(&[]).await?;
        let removed =
            client.wait_event("RemovedInterface", "removed interface net1 from network: blue").await?;
        ensure!(removed.kind == "Normal", "{removed:?}");
        let left = host_local_addresses(&lab, "node-1", &network_name(ns, "blue"));
        ensure!(left.into_iter().collect::<Vec<_>>() == [target], "only the server has an address");
        let object = client.object().await?;
        ensure!(!object.annotations().contains_key(ATTACHMENTS), "{:?}", object.annotations());
        Ok(())
    })
    .await
}

pub async fn an_empty_or_missing_annotation_removes_all_interfaces(lab: Lab) -> Result<()> {
    with_namespace(&lab, "empty", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.102.0.0/24").await?;
        create_bridge_nad(ns, "red", "10.102.1.0/24").await?;
        // One of the two is made at pod start.
        let pod =
            start_live_pod(ns, pod_with_networks("p", "node-2", &json!([element("red", "net1")]))).await?;
        for cleared in [json!("[]"), json!(""), json!(null)] {
            pod.set_networks(&json!([element("red", "net1"), element("blue", "net2")])).await?;
            pod.wait_interfaces(&["net1", "net2"]).await?;
            pod.annotate(json!({NETWORKS: cleared})).await?;
            pod.wait_interfaces(&[]).await.with_context(|| format!("networks: {cleared}"))?;
            for network in ["red", "blue"] {
                let left = host_local_addresses(&lab, "node-2", &network_name(ns, network));
                ensure!(left.is_empty(), "{cleared} leaks {left:?} of {network}");
            }
        }
        Ok(())
    })
    .await
}

/// The config of the README of multus-dynamic-networks-controller with another master.
fn readme_config() -> Value {
    json!({
        "cniVersion": "0.4.0",
        "plugins": [
            {
                "type": "macvlan", "capabilities": {"ips": true}, "master": "eth1", "mode": "bridge",
                "ipam": {"type": "static"},
            },
            {"type": "tuning"},
        ],
    })
}

pub async fn the_readme_example_of_the_original_works(lab: Lab) -> Result<()> {
    with_namespace(&lab, "readme", async |ns: &TestNamespace| {
        for node in crate::NODES {
            lab.node(node).output(&["ip", "link", "set", "eth1", "up"])?;
        }
        create_nad(ns, "macvlan1-config", &readme_config()).await?;
        let net1 = json!({"name": "macvlan1-config", "ips": ["10.1.1.11/24"], "interface": "net1"});
        let ens4 = json!({"name": "macvlan1-config", "ips": ["10.1.2.11/24"], "interface": "ens4"});
        let peer = json!([{"name": "macvlan1-config", "ips": ["10.1.2.12/24"], "interface": "net1"}]);
        let [pod, _peer] = start_live_pods(
            ns,
            [
                pod_with_networks("macvlan1-worker1", "node-1", &json!([net1])),
                pod_with_networks("peer", "node-2", &peer),
            ],
        )
        .await?;
        let index = pod.link_index("net1")?;
        pod.set_networks(&json!([net1, ens4])).await?;
        pod.wait_interfaces(&["net1", "ens4"]).await?;
        ensure!(pod.link_index("net1")? == index, "net1 was made again");
        ensure!(pod.status("ens4").await?["ips"] == json!(["10.1.2.11"]), "{:?}", pod.statuses().await?);
        pod.wait_reachable("10.1.2.12").await?;
        pod.set_networks(&json!([])).await?;
        pod.wait_interfaces(&[]).await
    })
    .await
}

/// The number of addresses of a BridgeNetwork that its blocks report as used.
async fn used_addresses(client: &Client, network: &str) -> Result<i32> {
    let params = ListParams::default().labels(&format!("patchbay.dev/network={network}"));
    let blocks = Api::<IPBlock>::all(client.clone()).list(&params).await?.items;
    Ok(blocks.iter().filter_map(|block| Some(block.status.as_ref()?.used)).sum())
}

async fn wait_used_addresses(client: &Client, network: &str, expected: i32) -> Result<()> {
    wait::until(WAIT_TIMEOUT, &format!("{expected} used addresses of {network}"), || async {
        let used = used_addresses(client, network).await?;
        ensure!(used == expected, "{used} are used");
        Ok(Some(()))
    })
    .await
}

pub async fn a_bridge_network_with_patchbay_ipam_is_hot_plugged_across_nodes(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    with_namespace(&lab, "overlay", async |ns: &TestNamespace| {
        let spec = json!({
            "overlay": {"vni": 813}, "attachment": attachment_for(ns), "ipam": {"subnets": ["10.103.0.0/24"]},
        });
        start_network(&client, "hot-over", spec).await?;
        let pods = [plain_pod("client", "node-1"), plain_pod("server", "node-2")];
        let [one, two] = start_live_pods(ns, pods).await?;
        for pod in [&one, &two] {
            pod.set_networks_text("hot-over").await?;
        }
        for pod in [&one, &two] {
            pod.wait_interfaces(&["net1"]).await?;
        }
        one.wait_reachable(&two.address("net1")?).await?;
        wait_used_addresses(&client, "hot-over", 2).await?;
        one.set_networks(&json!([])).await?;
        one.wait_interfaces(&[]).await?;
        wait_used_addresses(&client, "hot-over", 1).await?;
        two.delete().await?;
        wait_used_addresses(&client, "hot-over", 0).await
    })
    .await?;
    delete_network(&client, "hot-over").await?;
    wait_deleted(&client, "hot-over").await.map(drop)
}

pub async fn comma_form_and_unnamed_elements_are_plugged(lab: Lab) -> Result<()> {
    with_namespace(&lab, "comma", async |ns: &TestNamespace| {
        for (name, subnet) in
            [("blue", "10.104.0.0/24"), ("red", "10.104.1.0/24"), ("green", "10.104.2.0/24")]
        {
            create_bridge_nad(ns, name, subnet).await?;
        }
        let comma = plain_pod("comma", "node-1").annotation(NETWORKS, "blue");
        let [comma, hot] = start_live_pods(ns, [comma, plain_pod("hot", "node-1")]).await?;
        let index = comma.link_index("net1")?;
        // Names of interfaces that multus accepts.
        let edits = [
            ("blue,red@eth0.100,green@Data_1", &["net1", "eth0.100", "Data_1"][..]),
            // Two unnamed elements of one NAD are two attachments.
            ("blue, blue", &["net1", "net2"][..]),
            ("blue", &["net1"][..]),
        ];
        for (text, expected) in edits {
            comma.set_networks_text(text).await?;
            comma.wait_interfaces(expected).await.with_context(|| text.to_owned())?;
            ensure!(comma.link_index("net1")? == index, "{text}: net1 was made again");
        }
        // An unnamed element followed by two named ones, all of them plugged into a running pod.
        hot.set_networks(&json!([{"name": "blue"}, element("red", "lan"), element("green", "net7")])).await?;
        hot.wait_interfaces(&["net1", "lan", "net7"]).await?;
        let order: Vec<Value> =
            hot.statuses().await?.iter().map(|entry| entry["interface"].clone()).collect();
        ensure!(order == ["net1", "lan", "net7"], "{order:?}");
        let warnings: Vec<_> = comma.events().await?.into_iter().filter(|e| e.kind == "Warning").collect();
        ensure!(warnings.is_empty(), "{warnings:?}");
        Ok(())
    })
    .await
}

pub async fn an_edit_before_the_pod_runs_is_applied_once_it_runs(lab: Lab) -> Result<()> {
    with_namespace(&lab, "init", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.105.0.0/24").await?;
        create_bridge_nad(ns, "red", "10.105.1.0/24").await?;
        let mut object = pod_with_networks("p", "node-1", &json!([element("red", "net1")])).object();
        object["spec"]["initContainers"] = json!([{
            "name": "init", "image": object["spec"]["containers"][0]["image"], "imagePullPolicy": "Never",
            "command": ["sleep", "4"],
        }]);
        let object: Pod = serde_json::from_value(object)?;
        wait::until(WAIT_TIMEOUT, "the pod to be admitted", || async {
            Ok(ns.pods().create(&PostParams::default(), &object).await.map(Some)?)
        })
        .await?;
        wait::until(WAIT_TIMEOUT, "the init container to run", || async {
            let statuses = ns.pods().get("p").await?.status.and_then(|s| s.init_container_statuses);
            let running = |s: &k8s_openapi::api::core::v1::ContainerStatus| {
                s.state.as_ref().is_some_and(|state| state.running.is_some())
            };
            Ok(statuses.unwrap_or_default().iter().any(running).then_some(()))
        })
        .await?;
        let networks = json!([element("red", "net1"), element("blue", "net2")]).to_string();
        let patch = json!({"metadata": {"annotations": {NETWORKS: networks}}});
        ns.pods().patch("p", &PatchParams::default(), &Patch::Merge(&patch)).await?;
        let pod = e2e::hotplug::LivePod::find(ns, "p").await?;
        pod.wait_interfaces(&["net1", "net2"]).await
    })
    .await
}

pub async fn seven_quick_edits_end_in_the_last_one_and_leak_no_address(lab: Lab) -> Result<()> {
    let rounds = if e2e::soak() { 100 } else { 3 };
    with_namespace(&lab, "quick", async |ns: &TestNamespace| {
        let networks = ["blue", "red", "green"];
        for (number, name) in networks.iter().enumerate() {
            create_bridge_nad(ns, name, &format!("10.106.{number}.0/24")).await?;
        }
        let pod = start_live_pod(ns, plain_pod("p", "node-2")).await?;
        let [blue, red, green] = networks;
        let edits: [Vec<Value>; 7] = [
            vec![element(blue, "net1")],
            vec![element(blue, "net1"), element(red, "net2")],
            vec![element(red, "net2")],
            vec![],
            vec![element(green, "net1"), element(blue, "net2")],
            vec![element(blue, "net1"), element(green, "net3")],
            vec![element(red, "net1"), element(blue, "net2"), element(green, "net3")],
        ];
        for round in 0..rounds {
            for edit in &edits {
                pod.set_networks(&json!(edit)).await?;
                tokio::time::sleep(Duration::from_millis(40 * (round % 4))).await;
            }
            pod.wait_interfaces(&["net1", "net2", "net3"]).await?;
            for (network, interface) in [(red, "net1"), (blue, "net2"), (green, "net3")] {
                let entry = pod.status(interface).await?;
                ensure!(entry["name"] == format!("{}/{network}", ns.namespace), "{entry}");
                let held = host_local_addresses(&lab, "node-2", &network_name(ns, network));
                let held: Vec<String> = held.into_iter().collect();
                ensure!(held == [pod.address(interface)?], "round {round}: {network} holds {held:?}");
            }
            pod.set_networks(&json!([])).await?;
            pod.wait_interfaces(&[]).await?;
        }
        for network in networks {
            let held = host_local_addresses(&lab, "node-2", &network_name(ns, network));
            ensure!(held.is_empty(), "{network} leaks {held:?}");
        }
        Ok(())
    })
    .await
}

pub async fn a_network_is_swapped_on_one_interface_name(lab: Lab) -> Result<()> {
    with_namespace(&lab, "swap", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.107.0.0/24").await?;
        create_bridge_nad(ns, "red", "10.107.1.0/24").await?;
        // The first network is made at pod start, the others are plugged.
        let pod =
            start_live_pod(ns, pod_with_networks("p", "node-1", &json!([element("blue", "net1")]))).await?;
        for (network, other) in [("red", "blue"), ("blue", "red")] {
            pod.set_networks(&json!([element(network, "net1")])).await?;
            wait::until(WAIT_TIMEOUT, &format!("net1 to be of {network}"), || async {
                let entry = pod.status("net1").await?;
                ensure!(entry["name"] == format!("{}/{network}", ns.namespace), "{entry}");
                Ok(Some(()))
            })
            .await?;
            pod.wait_interfaces(&["net1"]).await?;
            let held = host_local_addresses(&lab, "node-1", &network_name(ns, network));
            ensure!(held.into_iter().collect::<Vec<_>>() == [pod.address("net1")?], "{network}");
            let left = host_local_addresses(&lab, "node-1", &network_name(ns, other));
            ensure!(left.is_empty(), "{other} leaks {left:?}");
            // The host side is a port of the right bridge.
            let bridge = link(&lab, "node-1", &bridge_name(ns, network)).context("the bridge")?;
            ensure!(bridge["flags"].to_string().contains("LOWER_UP"), "{bridge}");
        }
        Ok(())
    })
    .await
}

pub async fn a_failing_element_neither_stops_nor_undoes_others(lab: Lab) -> Result<()> {
    with_namespace(&lab, "fails", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.108.0.0/24").await?;
        create_bridge_nad(ns, "red", "10.108.1.0/24").await?;
        let error = json!({"cniVersion": "1.0.0", "code": 100, "msg": FAIL_MESSAGE});
        create_record_nad(ns, "bad", "10.108.2.0/24", &json!({"add": {"fail": error}})).await?;
        let pod = start_live_pod(ns, plain_pod("p", "node-1")).await?;
        let networks = json!([element("blue", "net1"), element("bad", "net2"), element("red", "net3")]);
        pod.set_networks(&networks).await?;
        pod.wait_interfaces(&["net1", "net3"]).await?;
        let state = pod.wait_state("bad", "Failed", "").await?;
        ensure!(state["message"].as_str().is_some_and(|text| text.contains(FAIL_MESSAGE)), "{state}");
        ensure!(state["interface"] == "net2", "{state}");
        let event = pod.wait_event("FailedAddingInterface", FAIL_MESSAGE).await?;
        ensure!(event.kind == "Warning", "{event:?}");
        ensure!(event.message.contains("failed adding interface net2 to network: bad"), "{event:?}");
        let indexes = [pod.link_index("net1")?, pod.link_index("net3")?];
        // Some retries later the others are as they were, and the same error was reported once.
        tokio::time::sleep(Duration::from_secs(4)).await;
        ensure!(indexes == [pod.link_index("net1")?, pod.link_index("net3")?], "a live link was replaced");
        let all = pod.events().await?;
        let warnings: Vec<_> = all.iter().filter(|event| event.kind == "Warning").collect();
        ensure!(warnings.len() == 1 && warnings[0].count == 1, "{warnings:?}");
        // It is retried until it works, without an edit.
        edit_nad(ns, "bad", &bridge_config(ns, "bad", "10.108.2.0/24")).await?;
        pod.wait_interfaces(&["net1", "net2", "net3"]).await
    })
    .await
}
