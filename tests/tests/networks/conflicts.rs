//! Networks that want the same thing, and nodes that carry less than the others.

use anyhow::{Context as _, Result, ensure};
use lab::Lab;
use serde_json::{Value, json};

use crate::{
    GONE,
    cluster::{Cluster, condition},
    start,
};

/// The nodes that bear this label, whatever its value.
fn labelled(label: &str) -> Value {
    json!({"matchExpressions": [{"key": label, "operator": "Exists"}]})
}

async fn conflict(cluster: &Cluster, name: &str, sentence: &str) -> Result<()> {
    let network = cluster.condition(name, "Conflict", "True").await?;
    let message = &condition(&network, "Conflict").context("Conflict")?["message"];
    println!("{message}");
    ensure!(message.as_str().is_some_and(|it| it.contains(sentence)), "{message}");
    Ok(())
}

pub async fn one_uplink_and_one_vni_serve_one_network_on_a_node(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "uplink").await?;
    let outcome = async {
        for node in ["uplink-a", "uplink-b"] {
            cluster.node(node, 1500).await?;
        }
        cluster.relabel("uplink-a", json!({"old": "yes"})).await?;
        cluster.relabel("uplink-b", json!({"new": "yes"})).await?;
        cluster.create("first-nic", json!({"uplink": "eth1", "nodeSelector": labelled("old")})).await?;
        cluster.create("first-vni", json!({"overlay": {"vni": 5}, "nodeSelector": labelled("old")})).await?;
        cluster.condition("first-nic", "Conflict", "False").await?;
        cluster.condition("first-vni", "Conflict", "False").await?;
        for (spec, sentence) in [
            (json!({"uplink": "eth1"}), "on node uplink-a, uplink eth1 belongs to BridgeNetwork first-nic"),
            (
                json!({"overlay": {"vni": 5}}),
                "on node uplink-a, VNI 5 on port 4789 belongs to BridgeNetwork first-vni",
            ),
            (
                json!({"overlay": {"vni": 5, "port": 4789}, "nodeSelector": cluster.selector()}),
                "VNI 5 on port 4789 belongs to BridgeNetwork first-vni",
            ),
        ] {
            let told = cluster.refusal("new", spec).await?;
            ensure!(told.contains(sentence), "{told}");
        }
        // Another port is another VXLAN, and another node is another NIC.
        let other_port = json!({"overlay": {"vni": 5, "port": 4790}, "nodeSelector": labelled("old")});
        cluster.create("other-port", other_port).await?;
        cluster.create("second-nic", json!({"uplink": "eth1", "nodeSelector": labelled("new")})).await?;
        cluster.create("second-vni", json!({"overlay": {"vni": 5}, "nodeSelector": labelled("new")})).await?;
        for name in ["other-port", "second-nic", "second-vni"] {
            cluster.condition(name, "Conflict", "False").await?;
        }
        // An edit that would clash is refused like a new one; a label that makes them clash is decided by age.
        let told = cluster.edit("second-nic", json!({"nodeSelector": labelled("old")})).await;
        let told = format!("{:#}", told.err().context("the edit passed")?);
        ensure!(told.contains("uplink eth1 belongs to BridgeNetwork first-nic"), "{told}");
        cluster.relabel("uplink-b", json!({"old": "yes"})).await?;
        conflict(&cluster, "second-nic", "uplink eth1 belongs to BridgeNetwork first-nic").await?;
        conflict(&cluster, "second-vni", "VNI 5 on port 4789 belongs to BridgeNetwork first-vni").await?;
        for name in ["first-nic", "first-vni", "other-port"] {
            cluster.condition(name, "Conflict", "False").await?;
        }
        // The winner goes, and what it had is free.
        for name in ["first-nic", "first-vni"] {
            cluster.delete(name).await?;
            cluster.gone(name, GONE).await?;
        }
        for name in ["second-nic", "second-vni"] {
            cluster.condition(name, "Conflict", "False").await?;
        }
        for name in ["second-nic", "second-vni", "other-port"] {
            cluster.delete(name).await?;
            cluster.gone(name, GONE).await?;
        }
        Ok(())
    };
    let outcome: Result<()> = outcome.await;
    outcome.with_context(|| replica.tail())
}

/// Two at once may both pass the webhook, which sees neither of them yet. Then age decides.
pub async fn of_two_networks_made_at_once_one_wins(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "atonce").await?;
    let outcome = async {
        cluster.node("atonce-a", 1500).await?;
        let mut both = 0;
        for round in 0..6 {
            let names = ["x", "y"].map(|it| format!("{it}-{round}"));
            let spec = json!({"uplink": format!("nic{round}"), "nodeSelector": cluster.selector()});
            let (x, y) =
                tokio::join!(cluster.create(&names[0], spec.clone()), cluster.create(&names[1], spec));
            let made: Vec<&String> =
                names.iter().zip([&x, &y]).filter(|(_, it)| it.is_ok()).map(|(it, _)| it).collect();
            ensure!(!made.is_empty(), "both were refused: {x:?} {y:?}");
            if let [x, y] = made[..] {
                both += 1;
                // Times are whole seconds: of one age, the name decides.
                let made = async |name: &str| -> Result<Value> {
                    let network = cluster.network(name).await?.context("it is there")?;
                    Ok(network["metadata"]["creationTimestamp"].clone())
                };
                let older = made(x).await?.as_str() <= made(y).await?.as_str();
                let (winner, loser) = if older { (x, y) } else { (y, x) };
                conflict(&cluster, loser, &format!("belongs to BridgeNetwork {winner}")).await?;
                cluster.condition(winner, "Conflict", "False").await?;
            }
            for name in made {
                cluster.delete(name).await?;
            }
        }
        println!("{both} of 6 pairs passed the webhook together");
        for round in 0..6 {
            for name in ["x", "y"] {
                cluster.gone(&format!("{name}-{round}"), GONE).await?;
            }
        }
        Ok(())
    };
    let outcome: Result<()> = outcome.await;
    outcome.with_context(|| replica.tail())
}

pub async fn a_node_that_carries_less_joins_a_used_overlay(lab: Lab) -> Result<()> {
    let (cluster, replica) = start(&lab, "joins").await?;
    let outcome = async {
        cluster.node("joins-a", 1500).await?;
        let overlay = |vni: u32| {
            json!({"overlay": {"vni": vni}, "nodeSelector": cluster.selector(),
            "attachment": {"namespaces": ["joins"]}})
        };
        cluster.create("joins", overlay(31)).await?;
        cluster.create("unused", overlay(32)).await?;
        let mut asks = overlay(33);
        asks["mtu"] = json!(1450);
        cluster.create("asks", asks).await?;
        for name in ["joins", "unused", "asks"] {
            cluster.until(name, "its MTU", |it| it["status"]["mtu"] == 1450).await?;
        }
        let pod = cluster.pod("user", "joins, asks").await?;
        cluster.condition("joins", "InUse", "True").await?;
        cluster.condition("asks", "InUse", "True").await?;
        cluster.node("joins-b", 1400).await?;
        let network = cluster.reason("joins", "MtuReduced", "HeldByUsers").await?;
        println!("{}", condition(&network, "MtuReduced").context("MtuReduced")?["message"]);
        ensure!(network["status"]["mtu"] == 1450, "{network:#}");
        // Who asked for more than the new node carries is told so, and what holds meanwhile.
        let network = cluster.condition("asks", "MtuReduced", "True").await?;
        let message = &condition(&network, "MtuReduced").context("MtuReduced")?["message"];
        println!("{message}");
        let told = "spec.mtu is 1450, but node joins-b can carry 1350; 1450 stays in force";
        ensure!(message.as_str().is_some_and(|it| it.contains(told)), "{message}");
        ensure!(network["status"]["mtu"] == 1450, "{network:#}");
        cluster.until("unused", "what the new node carries", |it| it["status"]["mtu"] == 1350).await?;
        let nad = cluster.nad("joins", "joins").await?;
        ensure!(nad["spec"]["config"].as_str().is_some_and(|it| it.contains("\"mtu\":1450")), "{nad}");
        cluster.remove(&pod).await?;
        for name in ["joins", "asks"] {
            cluster.until(name, "the smaller", |it| it["status"]["mtu"] == 1350).await?;
        }
        // Over IPv6 a packet has less room.
        for node in ["joins-a", "joins-b"] {
            cluster.vtep_at(node, "fd00::1", 1500).await?;
        }
        cluster.until("joins", "its MTU over IPv6", |it| it["status"]["mtu"] == 1430).await?;
        for name in ["joins", "unused", "asks"] {
            cluster.delete(name).await?;
            cluster.gone(name, GONE).await?;
        }
        Ok(())
    };
    let outcome: Result<()> = outcome.await;
    outcome.with_context(|| replica.tail())
}
