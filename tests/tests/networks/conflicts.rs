//! Networks that need the same uplink or VNI, and nodes with different MTUs.

use anyhow::{Context as _, Result, ensure};
use lab::Lab;
use serde_json::{Value, json};

use crate::{
    cluster::{TestCluster, condition},
    start_controller,
};

/// Selects the nodes with this label, whatever its value.
fn nodes_with_label(label: &str) -> Value {
    json!({"matchExpressions": [{"key": label, "operator": "Exists"}]})
}

async fn wait_for_conflict(cluster: &TestCluster, name: &str, expected: &str) -> Result<()> {
    let network = cluster.wait_for_condition(name, "Conflict", "True").await?;
    let message = &condition(&network, "Conflict").context("Conflict")?["message"];
    println!("{message}");
    ensure!(message.as_str().is_some_and(|it| it.contains(expected)), "{message}");
    Ok(())
}

pub async fn an_uplink_or_a_vni_serves_one_network_per_node(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "uplink").await?;
    let outcome = async {
        for node in ["uplink-a", "uplink-b"] {
            cluster.create_node(node, 1500).await?;
        }
        cluster.patch_node_labels("uplink-a", json!({"old": "yes"})).await?;
        cluster.patch_node_labels("uplink-b", json!({"new": "yes"})).await?;
        cluster
            .create_network("first-nic", json!({"uplink": "eth1", "nodeSelector": nodes_with_label("old")}))
            .await?;
        cluster
            .create_network(
                "first-vni",
                json!({"overlay": {"vni": 5}, "nodeSelector": nodes_with_label("old")}),
            )
            .await?;
        cluster.wait_for_condition("first-nic", "Conflict", "False").await?;
        cluster.wait_for_condition("first-vni", "Conflict", "False").await?;
        for (spec, expected) in [
            (json!({"uplink": "eth1"}), "on node uplink-a, uplink eth1 belongs to BridgeNetwork first-nic"),
            (
                json!({"overlay": {"vni": 5}}),
                "on node uplink-a, VNI 5 on port 4789 belongs to BridgeNetwork first-vni",
            ),
            (
                json!({"overlay": {"vni": 5, "port": 4789}, "nodeSelector": cluster.node_selector()}),
                "VNI 5 on port 4789 belongs to BridgeNetwork first-vni",
            ),
        ] {
            let error = cluster.create_error("new", spec).await?;
            ensure!(error.contains(expected), "{error}");
        }
        // No conflict: another VXLAN port, or another node.
        let other_port =
            json!({"overlay": {"vni": 5, "port": 4790}, "nodeSelector": nodes_with_label("old")});
        cluster.create_network("other-port", other_port).await?;
        cluster
            .create_network("second-nic", json!({"uplink": "eth1", "nodeSelector": nodes_with_label("new")}))
            .await?;
        cluster
            .create_network(
                "second-vni",
                json!({"overlay": {"vni": 5}, "nodeSelector": nodes_with_label("new")}),
            )
            .await?;
        for name in ["other-port", "second-nic", "second-vni"] {
            cluster.wait_for_condition(name, "Conflict", "False").await?;
        }
        // The webhook rejects an edit that adds a conflict. If a node label adds it, the older network wins.
        let result = cluster.patch_spec("second-nic", json!({"nodeSelector": nodes_with_label("old")})).await;
        let error = format!("{:#}", result.err().context("the edit was admitted")?);
        ensure!(error.contains("uplink eth1 belongs to BridgeNetwork first-nic"), "{error}");
        cluster.patch_node_labels("uplink-b", json!({"old": "yes"})).await?;
        wait_for_conflict(&cluster, "second-nic", "uplink eth1 belongs to BridgeNetwork first-nic").await?;
        wait_for_conflict(&cluster, "second-vni", "VNI 5 on port 4789 belongs to BridgeNetwork first-vni")
            .await?;
        for name in ["first-nic", "first-vni", "other-port"] {
            cluster.wait_for_condition(name, "Conflict", "False").await?;
        }
        // Deleting the winner resolves the conflict.
        for name in ["first-nic", "first-vni"] {
            cluster.delete_network(name).await?;
            cluster.wait_until_deleted_in_time(name).await?;
        }
        for name in ["second-nic", "second-vni"] {
            cluster.wait_for_condition(name, "Conflict", "False").await?;
        }
        for name in ["second-nic", "second-vni", "other-port"] {
            cluster.delete_network(name).await?;
            cluster.wait_until_deleted_in_time(name).await?;
        }
        Ok(())
    };
    let outcome: Result<()> = outcome.await;
    outcome.with_context(|| replica.tail())
}

/// The webhook may admit both of two concurrent networks, because its cache has neither of them yet.
pub async fn the_older_of_two_concurrent_conflicting_networks_wins(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "concurrent").await?;
    let outcome = async {
        cluster.create_node("concurrent-a", 1500).await?;
        let mut both = 0;
        for round in 0..6 {
            let names = ["x", "y"].map(|it| format!("{it}-{round}"));
            let spec = json!({"uplink": format!("nic{round}"), "nodeSelector": cluster.node_selector()});
            let (x, y) = tokio::join!(
                cluster.create_network(&names[0], spec.clone()),
                cluster.create_network(&names[1], spec)
            );
            let created: Vec<&String> =
                names.iter().zip([&x, &y]).filter(|(_, it)| it.is_ok()).map(|(it, _)| it).collect();
            ensure!(!created.is_empty(), "both were rejected: {x:?} {y:?}");
            if let [x, y] = created[..] {
                both += 1;
                // Creation times are whole seconds; for equal times, the name decides.
                let creation_time = async |name: &str| -> Result<Value> {
                    let network = cluster.get_network(name).await?.context("the network does not exist")?;
                    Ok(network["metadata"]["creationTimestamp"].clone())
                };
                let older = creation_time(x).await?.as_str() <= creation_time(y).await?.as_str();
                let (winner, loser) = if older { (x, y) } else { (y, x) };
                wait_for_conflict(&cluster, loser, &format!("belongs to BridgeNetwork {winner}")).await?;
                cluster.wait_for_condition(winner, "Conflict", "False").await?;
            }
            for name in created {
                cluster.delete_network(name).await?;
            }
        }
        println!("the webhook admitted both networks of {both} of 6 pairs");
        for round in 0..6 {
            for name in ["x", "y"] {
                cluster.wait_until_deleted_in_time(&format!("{name}-{round}")).await?;
            }
        }
        Ok(())
    };
    let outcome: Result<()> = outcome.await;
    outcome.with_context(|| replica.tail())
}

pub async fn a_node_with_a_smaller_mtu_joins_an_overlay_in_use(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "joins").await?;
    let outcome = async {
        cluster.create_node("joins-a", 1500).await?;
        let overlay = |vni: u32| {
            json!({"overlay": {"vni": vni}, "nodeSelector": cluster.node_selector(),
            "attachment": {"namespaces": ["joins"]}})
        };
        cluster.create_network("joins", overlay(31)).await?;
        cluster.create_network("unused", overlay(32)).await?;
        let mut explicit = overlay(33);
        explicit["mtu"] = json!(1450);
        cluster.create_network("explicit", explicit).await?;
        for name in ["joins", "unused", "explicit"] {
            cluster.wait_for(name, "its MTU", |it| it["status"]["mtu"] == 1450).await?;
        }
        let pod = cluster.create_pod("client", "joins, explicit").await?;
        cluster.wait_for_condition("joins", "InUse", "True").await?;
        cluster.wait_for_condition("explicit", "InUse", "True").await?;
        cluster.create_node("joins-b", 1400).await?;
        let network = cluster.wait_for_reason("joins", "MtuReduced", "HeldByUsers").await?;
        println!("{}", condition(&network, "MtuReduced").context("MtuReduced")?["message"]);
        ensure!(network["status"]["mtu"] == 1450, "{network:#}");
        // If spec.mtu is more than the new node supports, the condition says so, and which MTU stays in effect.
        let network = cluster.wait_for_condition("explicit", "MtuReduced", "True").await?;
        let message = &condition(&network, "MtuReduced").context("MtuReduced")?["message"];
        println!("{message}");
        let expected = "spec.mtu is 1450, but node joins-b carries at most 1350; MTU 1450 stays in effect";
        ensure!(message.as_str().is_some_and(|it| it.contains(expected)), "{message}");
        ensure!(network["status"]["mtu"] == 1450, "{network:#}");
        cluster.wait_for("unused", "the MTU of the new node", |it| it["status"]["mtu"] == 1350).await?;
        let nad = cluster.wait_for_nad("joins", "joins").await?;
        ensure!(nad["spec"]["config"].as_str().is_some_and(|it| it.contains("\"mtu\":1450")), "{nad}");
        cluster.delete_workload(&pod).await?;
        for name in ["joins", "explicit"] {
            cluster.wait_for(name, "the smaller MTU", |it| it["status"]["mtu"] == 1350).await?;
        }
        // VXLAN over IPv6 has 20 bytes more overhead. The MTU rises only when spec.mtu changes.
        for node in ["joins-a", "joins-b"] {
            cluster.set_vtep(node, "fd00::1", 1500).await?;
        }
        cluster.wait_for_reason("joins", "MtuReduced", "HigherPossible").await?;
        cluster.patch_spec("joins", json!({"mtu": 9000})).await?;
        cluster.wait_for("joins", "its MTU over IPv6", |it| it["status"]["mtu"] == 1430).await?;
        for name in ["joins", "unused", "explicit"] {
            cluster.delete_network(name).await?;
            cluster.wait_until_deleted_in_time(name).await?;
        }
        Ok(())
    };
    let outcome: Result<()> = outcome.await;
    outcome.with_context(|| replica.tail())
}
