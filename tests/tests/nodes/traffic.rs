//! Traffic between pods on bridge networks: on one node, over an overlay, and through an uplink.

use anyhow::{Context as _, Result, bail, ensure};
use e2e::bridge::{
    WAIT_TIMEOUT, add_address, attached_pod, attachment_for, condition, create_network, delete_network,
    exec_in_pod_netns, host_state, link, networks, packets_lost, start_network, start_pod_with_address,
    start_pods_with_addresses, wait_deleted, wait_reachable, wait_ready, wait_ready_in_time,
};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use lab::{
    Lab,
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use serde_json::{Value, json};

use crate::NODES;

pub async fn a_network_is_ready_within_2_s_and_connects_pods_of_one_node(lab: Lab) -> Result<()> {
    with_namespace(&lab, "local", async |ns: &TestNamespace| {
        let client = &ns.client;
        let before = host_state(&lab, "node-1")?;
        create_network(client, "local", json!({"attachment": attachment_for(ns)})).await?;
        let took = wait_ready_in_time(client, "local").await?;
        println!("ready on two nodes after {took:?}");
        for node in NODES {
            let bridge = link(&lab, node, "br-local").context("the bridge")?;
            ensure!(bridge["mtu"] == 1500 && bridge["flags"].to_string().contains("\"UP\""), "{bridge}");
            let addresses = lab.node(node).output(&["ip", "-o", "addr", "show", "dev", "br-local"])?;
            ensure!(addresses.trim().is_empty(), "the bridge has an address: {addresses}");
            let disabled =
                lab.node(node).output(&["cat", "/proc/sys/net/ipv6/conf/br-local/disable_ipv6"])?;
            ensure!(disabled.trim() == "1", "IPv6 is enabled on the bridge");
            wait_for_label(client, node, Some("true")).await?;
        }
        let table = lab.kubectl(&["get", "bnet", "local"])?;
        ensure!(table.contains("br-local") && table.contains("1500") && table.contains("2/2"), "{table}");
        let (client_pod, server_pod) = tokio::join!(
            start_pod_with_address(ns, "client", "node-1", "local", "10.9.0.1/24"),
            start_pod_with_address(ns, "server", "node-1", "local@lan", "10.9.0.9/24"),
        );
        client_pod?;
        // The helper adds the address to net1, but the interface of the server is lan.
        server_pod.err().context("the server has net1 instead of lan")?;
        add_address(ns, "server", "lan", "10.9.0.2/24")?;
        wait_reachable(ns, "client", "10.9.0.2").await?;
        let object = networks(client).get("local").await?;
        wait::until(WAIT_TIMEOUT, "two users", || async {
            let users = networks(client).get("local").await?.status.and_then(|s| s.users).unwrap_or_default();
            Ok((users.count == 2 && users.first.iter().all(|u| u.contains(&ns.namespace))).then_some(()))
        })
        .await?;
        ensure!(condition(&object, "Conflict").0 != "True", "{object:?}");
        // A requested MAC address is used.
        let request = r#"[{"name": "local", "mac": "02:00:00:aa:bb:01"}]"#;
        ns.start_pod(attached_pod("custom-mac", "node-1", request)).await?;
        let mac = ns.exec("custom-mac", &["cat", "/sys/class/net/net1/address"])?;
        ensure!(mac.trim() == "02:00:00:aa:bb:01", "{mac}");
        for name in ["client", "server", "custom-mac"] {
            ns.pods().delete(name, &DeleteParams::default().grace_period(0)).await?;
        }
        delete_network(client, "local").await?;
        wait_deleted(client, "local").await?;
        let after = host_state(&lab, "node-1")?;
        ensure!(before == after, "before:\n{before}\nafter:\n{after}");
        for node in NODES {
            wait_for_label(client, node, None).await?;
        }
        Ok(())
    })
    .await
}

/// The controller writes Node labels beside the status.
async fn wait_for_label(client: &Client, node: &str, value: Option<&str>) -> Result<()> {
    wait::until(WAIT_TIMEOUT, &format!("the label of {node}"), || async {
        let object = Api::<Node>::all(client.clone()).get(node).await?;
        let found = object.labels().get("network.patchbay.dev/local").map(String::as_str);
        ensure!(found == value, "{found:?}, not {value:?}");
        Ok(Some(()))
    })
    .await
}

pub async fn an_overlay_connects_pods_across_nodes_up_to_its_mtu(lab: Lab) -> Result<()> {
    with_namespace(&lab, "overlay", async |ns: &TestNamespace| {
        let client = &ns.client;
        let spec = json!({"mtu": 9000, "overlay": {"vni": 4711}, "attachment": attachment_for(ns)});
        start_network(client, "over", spec).await?;
        // A second overlay on the same nodes.
        start_network(client, "over2", json!({"overlay": {"vni": 4712}, "attachment": attachment_for(ns)}))
            .await?;
        let object = networks(client).get("over").await?;
        ensure!(object.status.as_ref().and_then(|s| s.mtu) == Some(1450), "{object:?}");
        let (reduced, _, message) = condition(&object, "MtuReduced");
        ensure!(reduced == "True" && message.contains("1450"), "{message}");
        let config = lab.kubectl(&[
            "-n",
            &ns.namespace,
            "get",
            "net-attach-def",
            "over",
            "-o",
            "jsonpath={.spec.config}",
        ])?;
        ensure!(serde_json::from_str::<Value>(&config)?["mtu"] == 1450, "{config}");
        let [client_pod, ..] = start_pods_with_addresses(
            ns,
            [
                ("client", "node-1", "over", "10.8.0.1/24"),
                ("server", "node-2", "over", "10.8.0.2/24"),
                ("isolated", "node-2", "over2", "10.8.0.3/24"),
            ],
        )
        .await?;
        for (pod, address) in [("client", "fd00:8::1/64"), ("server", "fd00:8::2/64")] {
            add_address(ns, pod, "net1", address)?;
        }
        wait_reachable(ns, "client", "10.8.0.2").await?;
        wait_reachable(ns, "client", "fd00:8::2").await?;
        // Packets of exactly the MTU, and one byte more, with fragmentation prohibited.
        let ping = |size: &str| {
            exec_in_pod_netns(
                &lab,
                &client_pod,
                &["/usr/bin/ping", "-M", "do", "-c", "3", "-i", "0.2", "-W", "2", "-s", size, "10.8.0.2"],
            )
        };
        ensure!(packets_lost(&ping("1422")?)? == 0, "packets of 1450 bytes were lost");
        ensure!(ping("1423").is_err(), "a packet of 1451 bytes passed");
        ensure!(
            ns.exec("client", &["ping", "-c", "1", "-W", "1", "10.8.0.3"]).is_err(),
            "the networks are not isolated"
        );
        // TCP with more data than fits into one packet.
        let text = "x".repeat(4000);
        ns.start_pod(attached_pod("tcp-server", "node-2", "over").command(&["tool", "echo", "7000"])).await?;
        add_address(ns, "tcp-server", "net1", "10.8.0.4/24")?;
        wait::until(WAIT_TIMEOUT, "a TCP response", || async {
            let response = ns.exec("client", &["tool", "send", "tcp", "10.8.0.4:7000", &text])?;
            Ok(response.contains(&text).then_some(()))
        })
        .await?;
        Ok(())
    })
    .await?;
    let client = lab.client().await?;
    for name in ["over", "over2"] {
        delete_network(&client, name).await?;
    }
    for name in ["over", "over2"] {
        wait_deleted(&client, name).await?;
    }
    ensure!(
        link(&lab, "node-1", "vx-over").is_none() && link(&lab, "node-2", "br-over").is_none(),
        "links were not deleted"
    );
    Ok(())
}

pub async fn an_uplink_connects_pods_and_is_restored_after_deletion(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    for (node, mtu, state) in [("node-1", "1400", "down"), ("node-2", "1500", "up")] {
        lab.node(node).output(&["ip", "link", "set", "eth1", "mtu", mtu])?;
        lab.node(node).output(&["ip", "link", "set", "eth1", state])?;
    }
    let before = [host_state(&lab, "node-1")?, host_state(&lab, "node-2")?];
    with_namespace(&lab, "uplink", async |ns: &TestNamespace| {
        start_network(&client, "up", json!({"uplink": "eth1", "attachment": attachment_for(ns)})).await?;
        let eth1 = link(&lab, "node-1", "eth1").context("the uplink")?;
        ensure!(eth1["master"] == "br-up" && eth1["mtu"] == 1500, "{eth1}");
        start_pods_with_addresses(
            ns,
            [("client", "node-1", "up", "10.7.0.1/24"), ("server", "node-2", "up", "10.7.0.2/24")],
        )
        .await?;
        wait_reachable(ns, "client", "10.7.0.2").await
    })
    .await?;
    delete_network(&client, "up").await?;
    wait_deleted(&client, "up").await?;
    let after = [host_state(&lab, "node-1")?, host_state(&lab, "node-2")?];
    lab.node("node-1").output(&["ip", "link", "set", "eth1", "mtu", "1500", "up"])?;
    ensure!(before == after, "before: {before:#?}\nafter: {after:#?}");
    Ok(())
}

pub async fn a_network_with_a_small_mtu_connects_pods(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    with_namespace(&lab, "small", async |ns: &TestNamespace| {
        start_network(&client, "small", json!({"mtu": 600, "attachment": attachment_for(ns)})).await?;
        start_pods_with_addresses(
            ns,
            [("client", "node-1", "small", "10.12.0.1/24"), ("server", "node-1", "small", "10.12.0.2/24")],
        )
        .await?;
        wait_reachable(ns, "client", "10.12.0.2").await?;
        let mtu = ns.exec("client", &["cat", "/sys/class/net/net1/mtu"])?;
        ensure!(mtu.trim() == "600", "{mtu}");
        Ok(())
    })
    .await?;
    delete_network(&client, "small").await?;
    wait_deleted(&client, "small").await.map(drop)
}

pub async fn edits_converge_in_place_and_lose_no_packet(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    with_namespace(&lab, "edits", async |ns: &TestNamespace| {
        start_network(&client, "edit", json!({"mtu": 1400, "attachment": attachment_for(ns)})).await?;
        let [client_pod, ..] = start_pods_with_addresses(
            ns,
            [("client", "node-1", "edit", "10.4.0.1/24"), ("server", "node-1", "edit", "10.4.0.2/24")],
        )
        .await?;
        wait_reachable(ns, "client", "10.4.0.2").await?;
        let ifindex = |l: &Option<Value>| l.as_ref().map(|l| l["ifindex"].clone());
        let before = ifindex(&link(&lab, "node-1", "br-edit"));
        let pinging = {
            let lab = lab.clone();
            std::thread::spawn(move || {
                exec_in_pod_netns(
                    &lab,
                    &client_pod,
                    &["/usr/bin/ping", "-c", "60", "-i", "0.05", "-W", "1", "10.4.0.2"],
                )
            })
        };
        let edit = async |spec: Value| -> Result<()> {
            let patch = Patch::Merge(json!({"spec": spec}));
            networks(&client).patch("edit", &PatchParams::default(), &patch).await?;
            wait_ready(&client, "edit").await.map(drop)
        };
        edit(json!({"mtu": 1480})).await?;
        edit(json!({"uplink": "eth2"})).await?;
        wait::until(WAIT_TIMEOUT, "pods with the old MTU to be counted", || async {
            let status = networks(&client).get("edit").await?.status.unwrap_or_default();
            Ok((status.mtu == Some(1480) && status.pods_with_old_mtu == Some(2)).then_some(()))
        })
        .await?;
        let summary = pinging.join().map_err(|_| anyhow::anyhow!("ping panicked"))??;
        ensure!(packets_lost(&summary)? == 0, "{summary}");
        ensure!(ifindex(&link(&lab, "node-1", "br-edit")) == before, "the bridge was recreated");
        ensure!(
            link(&lab, "node-1", "br-edit").is_some_and(|l| l["mtu"] == 1480),
            "the bridge does not have the new MTU"
        );
        // The API server rejects a lower MTU while pods use the network, changes of immutable fields, and invalid values.
        for (spec, expected) in [
            (json!({"mtu": 1300}), "the MTU cannot be lowered from 1480 to 1300"),
            (json!({"bridge": "other"}), "spec.bridge cannot be changed"),
            (json!({"overlay": {"vni": 5}}), "spec.overlay cannot be set"),
            (json!({"attachment": {"name": "x"}}), "spec.attachment.name cannot be changed"),
            (json!({"uplink": "a/b"}), "spec.uplink"),
        ] {
            let patch = Patch::Merge(json!({"spec": spec}));
            match networks(&client).patch("edit", &PatchParams::default(), &patch).await {
                Err(kube::Error::Api(e)) if e.message.contains(expected) => {}
                other => bail!("{spec}: {other:?}"),
            }
        }
        edit(json!({"uplink": null})).await?;
        ensure!(
            link(&lab, "node-1", "eth2").is_some_and(|l| l["master"].is_null()),
            "the uplink was not released"
        );
        Ok(())
    })
    .await?;
    delete_network(&client, "edit").await?;
    wait_deleted(&client, "edit").await.map(drop)
}
