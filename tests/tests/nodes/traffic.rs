//! Traffic between pods on bridge networks: on one node, over an overlay, and through an uplink.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use e2e::bridge::{
    AMID, SOON, address_of, condition, create, delete, gone, host_state, in_namespace, in_pod, join,
    join_all, link, lost, member, networks, reaches, ready, start,
};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use lab::{Lab, scene::Scene, wait};
use serde_json::{Value, json};

use crate::NODES;

pub async fn a_network_is_ready_within_2_s_and_connects_pods_of_one_node(lab: Lab) -> Result<()> {
    Scene::play(&lab, "local", async |scene: &Scene| {
        let client = &scene.client;
        let before = host_state(&lab, "node-1")?;
        create(client, "local", json!({"attachment": in_namespace(scene)})).await?;
        let took = ready(client, "local", SOON).await?;
        println!("ready on two nodes after {took:?}");
        for node in NODES {
            let bridge = link(&lab, node, "br-local").context("the bridge")?;
            ensure!(bridge["mtu"] == 1500 && bridge["flags"].to_string().contains("\"UP\""), "{bridge}");
            let addresses = lab.node(node).output(&["ip", "-o", "addr", "show", "dev", "br-local"])?;
            ensure!(addresses.trim().is_empty(), "the bridge has an address: {addresses}");
            let disabled =
                lab.node(node).output(&["cat", "/proc/sys/net/ipv6/conf/br-local/disable_ipv6"])?;
            ensure!(disabled.trim() == "1", "IPv6 is enabled on the bridge");
            let object = Api::<Node>::all(client.clone()).get(node).await?;
            ensure!(
                object.labels().get("network.patchbay.dev/local").is_some_and(|v| v == "true"),
                "no label on {node}"
            );
        }
        let table = lab.kubectl(&["get", "bnet", "local"])?;
        ensure!(table.contains("br-local") && table.contains("1500") && table.contains("2/2"), "{table}");
        let (client_pod, server_pod) = tokio::join!(
            join(scene, "client", "node-1", "local", "10.9.0.1/24"),
            join(scene, "server", "node-1", "local@lan", "10.9.0.9/24"),
        );
        client_pod?;
        // `join` sets an address on net1, but this interface is called lan.
        server_pod.err().context("the interface of the server is net1, not lan")?;
        address_of(scene, "server", "lan", "10.9.0.2/24")?;
        reaches(scene, "client", "10.9.0.2").await?;
        let object = networks(client).get("local").await?;
        wait::until(Duration::from_secs(3), "two users", || async {
            let users = networks(client).get("local").await?.status.and_then(|s| s.users).unwrap_or_default();
            Ok((users.count == 2 && users.first.iter().all(|u| u.contains(&scene.namespace))).then_some(()))
        })
        .await?;
        ensure!(condition(&object, "Conflict").0 != "True", "{object:?}");
        // A requested MAC address is used.
        let request = r#"[{"name": "local", "mac": "02:00:00:aa:bb:01"}]"#;
        scene.start(member("custom-mac", "node-1", request)).await?;
        let mac = scene.exec("custom-mac", &["cat", "/sys/class/net/net1/address"])?;
        ensure!(mac.trim() == "02:00:00:aa:bb:01", "{mac}");
        for name in ["client", "server", "custom-mac"] {
            scene.pods().delete(name, &DeleteParams::default().grace_period(0)).await?;
        }
        delete(client, "local").await?;
        gone(client, "local", Duration::from_secs(15)).await?;
        let after = host_state(&lab, "node-1")?;
        ensure!(before == after, "before:\n{before}\nafter:\n{after}");
        for node in NODES {
            let object = Api::<Node>::all(client.clone()).get(node).await?;
            ensure!(
                !object.labels().contains_key("network.patchbay.dev/local"),
                "the label was not removed from {node}"
            );
        }
        Ok(())
    })
    .await
}

pub async fn an_overlay_connects_pods_across_nodes_up_to_its_mtu(lab: Lab) -> Result<()> {
    Scene::play(&lab, "overlay", async |scene: &Scene| {
        let client = &scene.client;
        let spec = json!({"mtu": 9000, "overlay": {"vni": 4711}, "attachment": in_namespace(scene)});
        start(client, "over", spec).await?;
        // A second overlay on the same nodes.
        start(client, "over2", json!({"overlay": {"vni": 4712}, "attachment": in_namespace(scene)})).await?;
        let object = networks(client).get("over").await?;
        ensure!(object.status.as_ref().and_then(|s| s.mtu) == Some(1450), "{object:?}");
        let (reduced, _, message) = condition(&object, "MtuReduced");
        ensure!(reduced == "True" && message.contains("1450"), "{message}");
        let config = lab.kubectl(&[
            "-n",
            &scene.namespace,
            "get",
            "net-attach-def",
            "over",
            "-o",
            "jsonpath={.spec.config}",
        ])?;
        ensure!(serde_json::from_str::<Value>(&config)?["mtu"] == 1450, "{config}");
        let [client_pod, ..] = join_all(
            scene,
            [
                ("client", "node-1", "over", "10.8.0.1/24"),
                ("server", "node-2", "over", "10.8.0.2/24"),
                ("isolated", "node-2", "over2", "10.8.0.3/24"),
            ],
        )
        .await?;
        for (pod, address) in [("client", "fd00:8::1/64"), ("server", "fd00:8::2/64")] {
            address_of(scene, pod, "net1", address)?;
        }
        reaches(scene, "client", "10.8.0.2").await?;
        reaches(scene, "client", "fd00:8::2").await?;
        // Packets of exactly the MTU, and one byte more, with fragmentation prohibited.
        let ping = |size: &str| {
            in_pod(
                &lab,
                &client_pod,
                &["/usr/bin/ping", "-M", "do", "-c", "3", "-i", "0.2", "-W", "2", "-s", size, "10.8.0.2"],
            )
        };
        ensure!(lost(&ping("1422")?)? == 0, "packets of 1450 bytes were lost");
        ensure!(ping("1423").is_err(), "a packet of 1451 bytes passed");
        ensure!(
            scene.exec("client", &["ping", "-c", "1", "-W", "1", "10.8.0.3"]).is_err(),
            "the networks are not isolated"
        );
        // TCP with more data than fits into one packet.
        let text = "x".repeat(4000);
        scene.start(member("tcp-server", "node-2", "over").command(&["tool", "echo", "7000"])).await?;
        address_of(scene, "tcp-server", "net1", "10.8.0.4/24")?;
        wait::until(AMID, "a TCP response", || async {
            let response = scene.exec("client", &["tool", "ask", "tcp", "10.8.0.4:7000", &text])?;
            Ok(response.contains(&text).then_some(()))
        })
        .await?;
        Ok(())
    })
    .await?;
    let client = lab.client().await?;
    for name in ["over", "over2"] {
        delete(&client, name).await?;
    }
    for name in ["over", "over2"] {
        gone(&client, name, Duration::from_secs(30)).await?;
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
    Scene::play(&lab, "uplink", async |scene: &Scene| {
        start(&client, "up", json!({"uplink": "eth1", "attachment": in_namespace(scene)})).await?;
        let eth1 = link(&lab, "node-1", "eth1").context("the uplink")?;
        ensure!(eth1["master"] == "br-up" && eth1["mtu"] == 1500, "{eth1}");
        join_all(
            scene,
            [("client", "node-1", "up", "10.7.0.1/24"), ("server", "node-2", "up", "10.7.0.2/24")],
        )
        .await?;
        reaches(scene, "client", "10.7.0.2").await
    })
    .await?;
    delete(&client, "up").await?;
    gone(&client, "up", Duration::from_secs(30)).await?;
    let after = [host_state(&lab, "node-1")?, host_state(&lab, "node-2")?];
    lab.node("node-1").output(&["ip", "link", "set", "eth1", "mtu", "1500", "up"])?;
    ensure!(before == after, "before: {before:#?}\nafter: {after:#?}");
    Ok(())
}

pub async fn a_network_with_a_small_mtu_connects_pods(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    Scene::play(&lab, "small", async |scene: &Scene| {
        start(&client, "small", json!({"mtu": 600, "attachment": in_namespace(scene)})).await?;
        join_all(
            scene,
            [("client", "node-1", "small", "10.12.0.1/24"), ("server", "node-1", "small", "10.12.0.2/24")],
        )
        .await?;
        reaches(scene, "client", "10.12.0.2").await?;
        let mtu = scene.exec("client", &["cat", "/sys/class/net/net1/mtu"])?;
        ensure!(mtu.trim() == "600", "{mtu}");
        Ok(())
    })
    .await?;
    delete(&client, "small").await?;
    gone(&client, "small", Duration::from_secs(30)).await.map(drop)
}

pub async fn edits_converge_in_place_and_lose_no_packet(lab: Lab) -> Result<()> {
    let client = lab.client().await?;
    Scene::play(&lab, "edits", async |scene: &Scene| {
        start(&client, "edit", json!({"mtu": 1400, "attachment": in_namespace(scene)})).await?;
        let [client_pod, ..] = join_all(
            scene,
            [("client", "node-1", "edit", "10.4.0.1/24"), ("server", "node-1", "edit", "10.4.0.2/24")],
        )
        .await?;
        reaches(scene, "client", "10.4.0.2").await?;
        let ifindex = |l: &Option<Value>| l.as_ref().map(|l| l["ifindex"].clone());
        let before = ifindex(&link(&lab, "node-1", "br-edit"));
        let pinging = {
            let lab = lab.clone();
            std::thread::spawn(move || {
                in_pod(&lab, &client_pod, &["/usr/bin/ping", "-c", "60", "-i", "0.05", "-W", "1", "10.4.0.2"])
            })
        };
        let edit = async |spec: Value| -> Result<()> {
            let patch = Patch::Merge(json!({"spec": spec}));
            networks(&client).patch("edit", &PatchParams::default(), &patch).await?;
            ready(&client, "edit", Duration::from_secs(3)).await.map(drop)
        };
        edit(json!({"mtu": 1480})).await?;
        edit(json!({"uplink": "eth1"})).await?;
        wait::until(Duration::from_secs(3), "pods with the old MTU to be counted", || async {
            let status = networks(&client).get("edit").await?.status.unwrap_or_default();
            Ok((status.mtu == Some(1480) && status.pods_with_old_mtu == Some(2)).then_some(()))
        })
        .await?;
        let summary = pinging.join().map_err(|_| anyhow::anyhow!("ping panicked"))??;
        ensure!(lost(&summary)? == 0, "{summary}");
        ensure!(ifindex(&link(&lab, "node-1", "br-edit")) == before, "the bridge was recreated");
        ensure!(
            link(&lab, "node-1", "br-edit").is_some_and(|l| l["mtu"] == 1480),
            "the bridge does not have the new MTU"
        );
        // The API server rejects a lower MTU while pods use the network, changes of immutable fields, and invalid values.
        for (spec, expected) in [
            (json!({"mtu": 1300}), "the MTU cannot go from 1480 down to 1300"),
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
            link(&lab, "node-1", "eth1").is_some_and(|l| l["master"].is_null()),
            "the uplink was not released"
        );
        Ok(())
    })
    .await?;
    delete(&client, "edit").await?;
    gone(&client, "edit", Duration::from_secs(30)).await.map(drop)
}
