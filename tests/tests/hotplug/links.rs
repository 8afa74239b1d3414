//! Links that are deleted, renamed or moved, and NADs that come late or go early.

use std::time::Duration;

use anyhow::{Result, ensure};
use e2e::{
    bridge::WAIT_TIMEOUT,
    hotplug::{
        REPAIR_LIMIT, bridge_config, create_bridge_nad, create_nad, create_nad_of_file, create_record_nad,
        delete_nad, edit_nad, element, host_local_addresses, network_name, plain_pod, pod_with_networks,
        start_live_pod, start_live_pods,
    },
};
use lab::{
    Lab,
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use serde_json::json;

pub async fn a_deleted_link_is_plugged_again_within_5_s(lab: Lab) -> Result<()> {
    with_namespace(&lab, "lost", async |ns: &TestNamespace| {
        create_record_nad(ns, "blue", "10.140.0.0/24", &json!({})).await?;
        let pod = start_live_pod(ns, plain_pod("p", "node-1")).await?;
        pod.set_networks(&json!([element("blue", "net1"), element("blue", "net2")])).await?;
        pod.wait_interfaces(&["net1", "net2"]).await?;
        let (index, other) = (pod.link_index("net1")?, pod.link_index("net2")?);
        pod.run(&["ip", "link", "delete", "net1"])?;
        let ((), took) = wait::within(REPAIR_LIMIT, "net1 to be made again", || async {
            Ok(pod.link("net1")?.filter(|link| link["ifindex"] != index).map(drop))
        })
        .await?;
        println!("made again after {took:?}");
        pod.wait_interfaces(&["net1", "net2"]).await?;
        ensure!(pod.link_index("net2")? == other, "net2 was made again");
        // The entry of the deleted link is there until the daemon writes the new one.
        wait::until(WAIT_TIMEOUT, "network-status to list the new address", || async {
            Ok((pod.status("net1").await?["ips"] == json!([pod.address("net1")?])).then_some(()))
        })
        .await?;
        let held = host_local_addresses(&lab, "node-1", &network_name(ns, "blue"));
        ensure!(held.len() == 2, "{held:?}");
        Ok(())
    })
    .await
}

pub async fn a_renamed_or_moved_link_is_not_plugged_again(lab: Lab) -> Result<()> {
    with_namespace(&lab, "moved", async |ns: &TestNamespace| {
        create_record_nad(ns, "blue", "10.141.0.0/24", &json!({})).await?;
        let launcher = plain_pod("launcher", "node-1").label("kubevirt.io", "virt-launcher");
        let [pod, launcher] = start_live_pods(ns, [plain_pod("p", "node-1"), launcher]).await?;
        let networks = json!([element("blue", "net1"), element("blue", "net2")]);
        for pod in [&pod, &launcher] {
            pod.set_networks(&networks).await?;
        }
        for pod in [&pod, &launcher] {
            pod.wait_interfaces(&["net1", "net2"]).await?;
        }
        let nested = format!("nested-{}", ns.namespace);
        lab.node("node-1").output(&["ip", "netns", "add", &nested])?;
        let renamed = pod.link_index("net1")?;
        pod.run(&["ip", "link", "set", "net1", "down"])?;
        pod.run(&["ip", "link", "set", "net1", "name", "net1-nic"])?;
        pod.run(&["ip", "link", "set", "net2", "netns", &nested])?;
        launcher.run(&["ip", "link", "delete", "net1"])?;
        tokio::time::sleep(REPAIR_LIMIT + Duration::from_secs(1)).await;
        for (pod, expected) in [(&pod, "net1-nic"), (&launcher, "net2")] {
            let links = pod.link_names()?;
            ensure!(links.len() == 1 && links.contains(expected), "{}: {links:?}", pod.name);
            for interface in ["net1", "net2"] {
                let commands = pod.plugin_commands(interface)?;
                ensure!(commands == ["ADD"], "{} {interface}: {commands:?}", pod.name);
            }
        }
        ensure!(pod.link_index("net1-nic")? == renamed, "the renamed link was replaced");
        // KubeVirt puts a dummy under the old name. The unplug removes the link that was made, whatever its name is.
        pod.run(&["ip", "link", "add", "net1", "type", "veth", "peer", "name", "net1-peer"])?;
        pod.set_networks(&json!([])).await?;
        wait::until(WAIT_TIMEOUT, "the renamed link to be deleted", || async {
            let links = pod.link_names()?;
            ensure!(!links.contains("net1-nic"), "{links:?}");
            Ok(Some(()))
        })
        .await?;
        let held = || host_local_addresses(&lab, "node-1", &network_name(ns, "blue"));
        wait::until(WAIT_TIMEOUT, "its addresses to be released", || async {
            ensure!(held().len() == 2, "{:?}", held());
            Ok(Some(()))
        })
        .await?;
        lab.node("node-1").output(&["ip", "netns", "delete", &nested]).map(drop)
    })
    .await
}

/// The caches of multus have only the name and the MAC address of a link.
pub async fn a_renamed_or_moved_link_of_pod_start_is_unplugged(lab: Lab) -> Result<()> {
    with_namespace(&lab, "coldmoved", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.146.0.0/24").await?;
        let networks = json!([element("blue", "net1"), element("blue", "net2"), element("blue", "net3")]);
        let pod = start_live_pod(ns, pod_with_networks("p", "node-1", &networks)).await?;
        let held = || host_local_addresses(&lab, "node-1", &network_name(ns, "blue"));
        ensure!(held().len() == 3, "{:?}", held());
        // The daemon has seen the links once it has attached another one.
        let four = json!([networks[0], networks[1], networks[2], element("blue", "net4")]);
        pod.set_networks(&four).await?;
        pod.wait_interfaces(&["net1", "net2", "net3", "net4"]).await?;
        let nested = format!("cold-{}", ns.namespace);
        lab.node("node-1").output(&["ip", "netns", "add", &nested])?;
        pod.run(&["ip", "link", "set", "net1", "down"])?;
        pod.run(&["ip", "link", "set", "net1", "name", "net1-nic"])?;
        pod.run(&["ip", "link", "set", "net2", "netns", &nested])?;
        // KubeVirt puts a dummy under the old name.
        pod.run(&["ip", "link", "add", "net1", "type", "veth", "peer", "name", "net1-peer"])?;
        pod.set_networks(&json!([networks[2]])).await?;
        wait::until(WAIT_TIMEOUT, "the renamed and the moved link to be deleted", || async {
            let links = pod.link_names()?;
            ensure!(!links.contains("net1-nic") && !links.contains("net4"), "{links:?}");
            ensure!(links.contains("net1") && links.contains("net3"), "{links:?}");
            let moved = lab.node("node-1").output(&["ip", "-n", &nested, "-o", "link"])?;
            ensure!(!moved.contains("net2"), "{moved}");
            ensure!(held().len() == 1, "{:?}", held());
            Ok(Some(()))
        })
        .await?;
        lab.node("node-1").output(&["ip", "netns", "delete", &nested]).map(drop)
    })
    .await
}

/// The results of CNI 0.2.0 list no interfaces.
pub async fn a_network_of_cni_0_2_0_is_unplugged_although_it_was_made_at_pod_start(lab: Lab) -> Result<()> {
    with_namespace(&lab, "coldold", async |ns: &TestNamespace| {
        let mut config = bridge_config(ns, "old", "10.147.0.0/24");
        config["cniVersion"] = json!("0.2.0");
        create_nad(ns, "old", &config).await?;
        let networks = json!([element("old", "net1")]);
        let pod = start_live_pod(ns, pod_with_networks("p", "node-1", &networks)).await?;
        ensure!(pod.link_names()?.contains("net1"), "{:?}", pod.link_names()?);
        pod.set_networks(&json!([])).await?;
        wait::until(WAIT_TIMEOUT, "net1 and its address to go", || async {
            let (links, held) =
                (pod.link_names()?, host_local_addresses(&lab, "node-1", &network_name(ns, "old")));
            ensure!(links.is_empty() && held.is_empty(), "{links:?} {held:?}");
            Ok(Some(()))
        })
        .await
    })
    .await
}

pub async fn a_lost_link_of_pod_start_is_only_reported(lab: Lab) -> Result<()> {
    with_namespace(&lab, "coldlost", async |ns: &TestNamespace| {
        create_record_nad(ns, "blue", "10.142.0.0/24", &json!({})).await?;
        let networks = json!([element("blue", "net1"), element("blue", "net2")]);
        let pod = start_live_pod(ns, pod_with_networks("p", "node-1", &networks)).await?;
        pod.run(&["ip", "link", "delete", "net1"])?;
        let state = wait::until(WAIT_TIMEOUT, "the lost link to be reported", || async {
            let all = pod.attachments().await?;
            Ok(all.into_iter().find(|one| one["interface"] == "net1" && one["state"] != "Attached"))
        })
        .await?;
        println!("{state}");
        tokio::time::sleep(REPAIR_LIMIT + Duration::from_secs(1)).await;
        ensure!(pod.plugin_commands("net1")? == ["ADD"], "{:?}", pod.plugin_commands("net1")?);
        ensure!(!pod.link_names()?.contains("net1"), "net1 was made again");
        // The pod can still be edited.
        pod.set_networks(&json!([element("blue", "net2"), element("blue", "net3")])).await?;
        pod.wait_interfaces(&["net2", "net3"]).await?;
        let held = host_local_addresses(&lab, "node-1", &network_name(ns, "blue"));
        ensure!(held.len() == 2, "the address of the lost link is not released: {held:?}");
        Ok(())
    })
    .await
}

pub async fn a_nad_created_later_is_attached_within_5_s(lab: Lab) -> Result<()> {
    with_namespace(&lab, "late", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.143.0.0/24").await?;
        let pod = start_live_pod(ns, plain_pod("p", "node-2")).await?;
        pod.set_networks(&json!([element("late", "net1"), element("blue", "net2")])).await?;
        pod.wait_interfaces(&["net2"]).await?;
        let event = pod.wait_event("FailedAddingInterface", "late").await?;
        ensure!(event.kind == "Warning", "{event:?}");
        let state = pod.wait_state("late", "Failed", "").await?;
        println!("{state}");
        // Long enough for the retries to be far apart.
        tokio::time::sleep(Duration::from_secs(8)).await;
        create_bridge_nad(ns, "late", "10.143.1.0/24").await?;
        let took = pod.wait_interfaces_within(REPAIR_LIMIT, &["net1", "net2"]).await?;
        println!("attached after {took:?}");
        Ok(())
    })
    .await
}

pub async fn an_unplug_uses_the_config_of_the_plug(lab: Lab) -> Result<()> {
    with_namespace(&lab, "stale", async |ns: &TestNamespace| {
        for (name, subnet) in [("deleted", "10.144.0.0/24"), ("edited", "10.144.1.0/24")] {
            create_bridge_nad(ns, name, subnet).await?;
        }
        let networks = json!([element("deleted", "net1"), element("edited", "net2")]);
        let [hot, cold] =
            start_live_pods(ns, [plain_pod("hot", "node-1"), pod_with_networks("cold", "node-1", &networks)])
                .await?;
        hot.set_networks(&networks).await?;
        hot.wait_interfaces(&["net1", "net2"]).await?;
        let index = hot.link_index("net2")?;
        delete_nad(ns, "deleted").await?;
        let mut other = bridge_config(ns, "other", "10.144.2.0/24");
        other["name"] = json!(network_name(ns, "other"));
        edit_nad(ns, "edited", &other).await?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        ensure!(hot.link_index("net2")? == index, "an edit of the NAD replaced a live link");
        // The attachment that is left out goes, the others stay although their NADs changed.
        hot.set_networks(&json!([element("edited", "net2")])).await?;
        hot.wait_interfaces(&["net2"]).await?;
        ensure!(hot.link_index("net2")? == index, "net2 was made again");
        for pod in [&hot, &cold] {
            pod.set_networks(&json!([])).await?;
        }
        for pod in [&hot, &cold] {
            pod.wait_interfaces(&[]).await?;
        }
        for network in ["deleted", "edited", "other"] {
            let held = host_local_addresses(&lab, "node-1", &network_name(ns, network));
            ensure!(held.is_empty(), "{network}: {held:?}");
        }
        Ok(())
    })
    .await
}

pub async fn a_nad_without_config_means_a_file_of_the_node(lab: Lab) -> Result<()> {
    with_namespace(&lab, "file", async |ns: &TestNamespace| {
        // The default of multus' confDir.
        let dir = lab.node("node-1").disk().join("etc/cni/multus/net.d");
        std::fs::create_dir_all(&dir)?;
        let mut config = bridge_config(ns, "disk", "10.145.0.0/24");
        config["name"] = json!("on-disk");
        std::fs::write(dir.join("on-disk.conf"), config.to_string())?;
        create_nad_of_file(ns, "on-disk").await?;
        let pod = start_live_pod(ns, plain_pod("p", "node-1")).await?;
        pod.set_networks(&json!([element("on-disk", "net1")])).await?;
        pod.wait_interfaces(&["net1"]).await?;
        pod.set_networks(&json!([])).await?;
        pod.wait_interfaces(&[]).await?;
        let held = host_local_addresses(&lab, "node-1", "on-disk");
        ensure!(held.is_empty(), "{held:?}");
        std::fs::remove_file(dir.join("on-disk.conf"))?;
        Ok(())
    })
    .await
}
