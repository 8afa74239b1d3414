//! Every key of an element acts as at pod start.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use e2e::{
    bridge::WAIT_TIMEOUT,
    hotplug::{
        LivePod, RELEASE_LIMIT, bridge_config, bridge_name, create_bridge_nad, create_nad, element,
        host_local_addresses, install_record_plugin_as, network_name, node_address, plain_pod,
        pod_with_networks, start_live_pod, start_live_pods, wait_addresses_within,
    },
};
use lab::{
    Lab,
    plugin_call::PluginCall,
    test_namespace::{TestNamespace, with_namespace},
    wait,
};
use serde_json::{Value, json};

/// All keys that reach a plugin.
fn full_element(network: &str) -> Value {
    json!({
        "name": network, "interface": "net1",
        "ips": ["10.110.0.7/24", "fd00:110::7/64"],
        "mac": "02:00:00:00:01:10",
        "infiniband-guid": "24:8a:07:03:00:8d:ae:2e",
        "cni-args": {"color": "blue", "nested": {"list": [1, 2]}, "number": 7},
        "portMappings": [{"hostPort": 18110, "containerPort": 80, "protocol": "tcp"}],
        "bandwidth": {"ingressRate": 1_000_000, "ingressBurst": 80_000, "egressRate": 2_000_000, "egressBurst": 90_000},
        "default-route": ["10.110.0.1"],
    })
}

/// A config in which two recording plugins see every capability; the second one gets a `prevResult`.
fn recording_conflist(ns: &TestNamespace, name: &str) -> Value {
    let capabilities = json!({
        "ips": true, "mac": true, "infinibandGUID": true, "portMappings": true, "bandwidth": true,
    });
    let delegate = json!({
        "type": "bridge", "bridge": bridge_name(ns, name), "capabilities": {"mac": true, "ips": true},
        "ipam": {"type": "static"},
    });
    json!({
        "cniVersion": "1.0.0", "name": network_name(ns, name),
        "plugins": [
            {"type": "lab-record", "capabilities": capabilities, "delegate": delegate},
            {"type": "lab-record", "capabilities": {"portMappings": true}, "position": "second"},
        ],
    })
}

/// What a plugin received, without the values that differ from pod to pod.
#[derive(Debug, PartialEq)]
struct PluginInput {
    command: String,
    stdin: Value,
    environment: BTreeMap<String, String>,
    mount_namespace: String,
}

/// The inputs of the calls of these commands for a pod.
async fn inputs(pod: &LivePod, commands: &[&str]) -> Result<Vec<PluginInput>> {
    let object = pod.object().await?;
    let uid = object.metadata.uid.context("the pod has no UID")?;
    let normalise = |call: &PluginCall| -> Result<PluginInput> {
        let netns = call.environment.get("CNI_NETNS").cloned().unwrap_or_default();
        let replaced = |text: &str| {
            let text = if netns.is_empty() { text.to_owned() } else { text.replace(&netns, "NETNS") };
            // The host side of a veth has a random name and address.
            text.replace(call.container(), "CONTAINER")
                .replace(&uid, "UID")
                .replace(&format!("K8S_POD_NAME={}", pod.name), "K8S_POD_NAME=POD")
        };
        let mut stdin: Value = serde_json::from_str(&replaced(&call.stdin))?;
        for interface in stdin["prevResult"]["interfaces"].as_array_mut().into_iter().flatten() {
            let in_pod = interface["sandbox"].is_string();
            if let Some(fields) = interface.as_object_mut().filter(|_| !in_pod) {
                fields.remove("mac");
                if fields.get("name").and_then(Value::as_str).is_some_and(|name| name.starts_with("veth")) {
                    fields.remove("name");
                }
            }
        }
        let environment = call.cni_environment();
        let environment = environment.into_iter().map(|(name, value)| (name.to_owned(), replaced(value)));
        Ok(PluginInput {
            command: call.command.clone(),
            stdin,
            environment: environment.collect(),
            mount_namespace: call.mount_namespace.clone(),
        })
    };
    let calls = pod.plugin_calls()?;
    calls.iter().filter(|call| commands.contains(&call.command.as_str())).map(normalise).collect()
}

/// Checks that each of the calls had the same input.
fn check_same_input(at_start: &[PluginInput], plugged: &[PluginInput], calls: usize) -> Result<()> {
    for (cold, hot) in at_start.iter().zip(plugged) {
        ensure!(cold.stdin == hot.stdin, "cold: {}\nhot: {}", cold.stdin, hot.stdin);
        let (cold, hot) = (&cold.environment, &hot.environment);
        ensure!(cold == hot, "cold: {cold:#?}\nhot: {hot:#?}");
    }
    ensure!((at_start.len(), plugged.len()) == (calls, calls), "cold: {at_start:#?}\nhot: {plugged:#?}");
    Ok(())
}

const HOST_PORT: u16 = 18080;

/// The rules of `portmap` on node-1 that name the host port.
fn port_rules(lab: &Lab) -> Result<Vec<String>> {
    let rules = lab.node("node-1").output(&["nft", "list", "ruleset"])?;
    Ok(rules.lines().filter(|line| line.contains(&HOST_PORT.to_string())).map(str::to_owned).collect())
}

/// Sends a line to the host port, from another node.
fn send_to_port(lab: &Lab) -> Result<String> {
    let address = node_address(lab, "node-1")?;
    let script = format!("exec 3<>/dev/tcp/{address}/{HOST_PORT} && echo hello >&3 && head -n 1 <&3");
    lab.node("node-2").output(&["timeout", "2", "bash", "-c", &script])
}

pub async fn mapped_ports_of_a_plugged_interface_end_with_it(lab: Lab) -> Result<()> {
    with_namespace(&lab, "ports", async |ns: &TestNamespace| {
        let mut bridge = bridge_config(ns, "blue", "10.119.0.0/24");
        bridge["isGateway"] = json!(true);
        let portmap =
            json!({"type": "portmap", "capabilities": {"portMappings": true}, "backend": "nftables"});
        let config = json!({
            "cniVersion": "1.0.0", "name": network_name(ns, "blue"), "plugins": [bridge, portmap],
        });
        create_nad(ns, "blue", &config).await?;
        let server = plain_pod("server", "node-1").command(&["tool", "echo", "7000"]);
        let pod = start_live_pod(ns, server).await?;
        ensure!(port_rules(&lab)?.is_empty(), "{:?}", port_rules(&lab)?);
        let mut web = element("blue", "net1");
        web["portMappings"] = json!([{"hostPort": HOST_PORT, "containerPort": 7000, "protocol": "tcp"}]);
        for end in ["unplugged", "deleted"] {
            pod.set_networks(&json!([web])).await?;
            pod.wait_interfaces(&["net1"]).await?;
            let answer = wait::until(WAIT_TIMEOUT, "the pod to answer at the port of the node", || async {
                send_to_port(&lab).map(Some)
            })
            .await?;
            ensure!(answer.starts_with("server ") && answer.contains("hello"), "{answer}");
            if end == "unplugged" {
                pod.set_networks(&json!([])).await?;
                pod.wait_interfaces(&[]).await?;
                ensure!(port_rules(&lab)?.is_empty(), "{:?}", port_rules(&lab)?);
                ensure!(send_to_port(&lab).is_err(), "the port of the node still answers");
            } else {
                // The network namespace is gone when the plugin is called.
                pod.delete().await?;
                wait::within(RELEASE_LIMIT, "the rules of the port to be removed", || async {
                    let rules = port_rules(&lab)?;
                    ensure!(rules.is_empty(), "{rules:?}");
                    Ok(Some(()))
                })
                .await?;
            }
        }
        wait_addresses_within(RELEASE_LIMIT, &lab, "node-1", &network_name(ns, "blue"), 0).await.map(drop)
    })
    .await
}

pub async fn a_plugin_gets_the_same_input_as_at_pod_start(lab: Lab) -> Result<()> {
    with_namespace(&lab, "full", async |ns: &TestNamespace| {
        create_nad(ns, "full", &recording_conflist(ns, "full")).await?;
        // The element has one address, so the pods run one after the other, each on its own node.
        let networks = json!([full_element("full")]);
        let [cold, hot] =
            start_live_pods(ns, [pod_with_networks("cold", "node-1", &networks), plain_pod("hot", "node-2")])
                .await?;
        hot.set_networks(&networks).await?;
        hot.wait_interfaces(&["net1"]).await?;
        let (at_start, plugged) = (inputs(&cold, &["ADD"]).await?, inputs(&hot, &["ADD"]).await?);
        let init = lab.node("node-2").output(&["readlink", "/proc/1/ns/mnt"])?;
        for input in &plugged {
            ensure!(input.mount_namespace == init.trim(), "{init}: {input:#?}");
        }
        check_same_input(&at_start, &plugged, 2)?;
        let runtime = &plugged[0].stdin["runtimeConfig"];
        for key in ["ips", "mac", "portMappings", "bandwidth", "infinibandGUID"] {
            ensure!(!runtime[key].is_null(), "{key} is missing: {runtime}");
        }
        // The status is equal as well, except for what belongs to the pod.
        let (a, b) = (cold.status("net1").await?, hot.status("net1").await?);
        ensure!(a == b, "cold: {a}\nhot: {b}");
        // A result cache as libcni keeps it.
        let container = hot.plugin_calls()?.first().context("a call")?.container().to_owned();
        let file = format!("/var/lib/cni/results/{}-{container}-net1", network_name(ns, "full"));
        let cache: Value = serde_json::from_str(&lab.node("node-2").output(&["cat", &file])?)?;
        ensure!(cache["kind"] == "cniCacheV1" && cache["containerId"] == container, "{cache}");
        ensure!(cache["ifName"] == "net1" && cache["result"]["ips"].is_array(), "{cache}");

        // A DEL by multus at the end of the pod, and a DEL by us.
        hot.set_networks(&json!([])).await?;
        hot.wait_interfaces(&[]).await?;
        ensure!(lab.node("node-2").output(&["ls", &file]).is_err(), "{file} was not removed");
        let unplugged = inputs(&hot, &["DEL"]).await?;
        let object = cold.object().await?;
        cold.delete().await?;
        drop(object);
        wait::until(WAIT_TIMEOUT, "multus to call DEL", || async {
            let calls = cold.plugin_calls()?;
            Ok((calls.iter().filter(|call| call.command == "DEL").count() >= 2).then_some(()))
        })
        .await?;
        ensure!(unplugged.len() == 2, "{unplugged:#?}");
        ensure!(unplugged[0].stdin["position"] == "second", "DEL runs in reverse order: {unplugged:#?}");
        for input in &unplugged {
            ensure!(input.stdin["prevResult"]["ips"].is_array(), "DEL without prevResult: {input:#?}");
        }
        Ok(())
    })
    .await
}

/// A VLAN on a link of the pod. The kernel of the lab has no VLAN devices: `lab-record` runs in place of `vlan`, and lets
/// `macvlan` create the link, which needs the same master.
fn vlan_config(ns: &TestNamespace, name: &str, master: &str, subnet: &str) -> Value {
    let ipam = json!({"type": "host-local", "subnet": subnet});
    json!({
        "cniVersion": "1.0.0", "name": network_name(ns, name), "type": "vlan", "master": master, "vlanId": 100,
        "linkInContainer": true, "ipam": ipam,
        "delegate": {"type": "macvlan", "master": master, "linkInContainer": true, "mode": "bridge", "ipam": ipam},
    })
}

/// Checks that the first calls of a command are for these interfaces.
fn check_call_order(pod: &LivePod, command: &str, expected: &[&str]) -> Result<()> {
    let calls = pod.plugin_calls()?;
    let calls = calls.iter().filter(|call| call.command == command).map(PluginCall::interface);
    let interfaces: Vec<&str> = calls.take(expected.len()).collect();
    ensure!(interfaces == expected, "{command} of {}: {interfaces:?}", pod.name);
    Ok(())
}

pub async fn a_vlan_on_a_macvlan_is_plugged_after_it_and_unplugged_before_it(lab: Lab) -> Result<()> {
    with_namespace(&lab, "vlan", async |ns: &TestNamespace| {
        for node in crate::NODES {
            lab.node(node).output(&["ip", "link", "set", "eth1", "up"])?;
            install_record_plugin_as(&lab, node, "vlan")?;
        }
        let macvlan = json!({
            "cniVersion": "1.0.0", "name": network_name(ns, "macvlan"), "type": "lab-record",
            "delegate": {
                "type": "macvlan", "master": "eth1", "mode": "bridge",
                "ipam": {"type": "host-local", "subnet": "10.113.0.0/24"},
            },
        });
        create_nad(ns, "macvlan", &macvlan).await?;
        let vlan = vlan_config(ns, "vlan", "net1", "10.113.1.0/24");
        create_nad(ns, "vlan", &vlan).await?;
        create_nad(ns, "vlan-first", &vlan_config(ns, "vlan-first", "lower", "10.113.2.0/24")).await?;
        let networks = json!([element("macvlan", "net1"), element("vlan", "net2")]);
        let pods = [
            pod_with_networks("cold", "node-1", &networks),
            plain_pod("hot", "node-2"),
            plain_pod("first", "node-2"),
        ];
        let [cold, hot, first] = start_live_pods(ns, pods).await?;
        // The order of the annotation counts, not that of the names.
        first.set_networks(&json!([element("macvlan", "lower"), element("vlan-first", "a100")])).await?;
        hot.set_networks(&networks).await?;
        hot.wait_interfaces(&["net1", "net2"]).await?;
        first.wait_interfaces(&["lower", "a100"]).await?;
        for (pod, expected) in
            [(&cold, ["net1", "net2"]), (&hot, ["net1", "net2"]), (&first, ["lower", "a100"])]
        {
            check_call_order(pod, "ADD", &expected)?;
        }
        let (at_start, plugged) = (inputs(&cold, &["ADD"]).await?, inputs(&hot, &["ADD"]).await?);
        check_same_input(&at_start, &plugged, 2)?;
        let stdin = &plugged[1].stdin;
        for key in ["type", "master", "vlanId", "linkInContainer", "ipam"] {
            ensure!(stdin[key] == vlan[key], "{key}: {stdin}");
        }

        // multus removes in reverse order, too. `vlan` needs its master for DEL: without it, the plugin fails before it
        // releases the address.
        for pod in [&hot, &first] {
            pod.set_networks(&json!([])).await?;
        }
        for pod in [&hot, &first] {
            pod.wait_interfaces(&[]).await?;
        }
        cold.delete().await?;
        wait::until(WAIT_TIMEOUT, "multus to call DEL in reverse order", || async {
            check_call_order(&cold, "DEL", &["net2", "net1"]).map(Some)
        })
        .await?;
        check_call_order(&hot, "DEL", &["net2", "net1"])?;
        check_call_order(&first, "DEL", &["a100", "lower"])?;
        for network in ["macvlan", "vlan", "vlan-first"] {
            let held = host_local_addresses(&lab, "node-2", &network_name(ns, network));
            ensure!(held.is_empty(), "{network}: {held:?}");
        }
        Ok(())
    })
    .await
}

pub async fn an_infiniband_guid_reaches_the_plugin_as_at_pod_start(lab: Lab) -> Result<()> {
    const GUID: &str = "c2:11:22:33:44:55:66:77";
    with_namespace(&lab, "ib", async |ns: &TestNamespace| {
        for node in crate::NODES {
            install_record_plugin_as(&lab, node, "ib-sriov")?;
        }
        let mut delegate = bridge_config(ns, "ib", "10.114.0.0/24");
        let name = delegate["name"].take();
        delegate.as_object_mut().map(|keys| keys.remove("name"));
        let config = json!({
            "cniVersion": "1.0.0", "name": name, "type": "ib-sriov", "pkey": "0x8001",
            "capabilities": {"infinibandGUID": true}, "delegate": delegate,
        });
        create_nad(ns, "ib", &config).await?;
        // The plugin has no capability for the MAC address.
        let networks = json!([
            {"name": "ib", "interface": "net1", "infiniband-guid": GUID},
            {"name": "ib", "interface": "net2", "infiniband-guid": GUID, "mac": "02:00:00:00:01:14"},
        ]);
        let [cold, hot] =
            start_live_pods(ns, [pod_with_networks("cold", "node-1", &networks), plain_pod("hot", "node-2")])
                .await?;
        hot.set_networks(&networks).await?;
        hot.wait_interfaces(&["net1", "net2"]).await?;
        let (at_start, plugged) = (inputs(&cold, &["ADD"]).await?, inputs(&hot, &["ADD"]).await?);
        check_same_input(&at_start, &plugged, 2)?;
        for input in &plugged {
            ensure!(input.stdin["runtimeConfig"] == json!({"infinibandGUID": GUID}), "{}", input.stdin);
        }
        // DEL gets the same argument.
        hot.set_networks(&json!([])).await?;
        hot.wait_interfaces(&[]).await?;
        let unplugged = inputs(&hot, &["DEL"]).await?;
        ensure!(unplugged.len() == 2, "{unplugged:#?}");
        for input in &unplugged {
            ensure!(input.stdin["runtimeConfig"] == json!({"infinibandGUID": GUID}), "{}", input.stdin);
        }
        // A GUID that cannot be parsed is refused.
        hot.set_networks(&json!([{"name": "ib", "interface": "net1", "infiniband-guid": "c2:11"}])).await?;
        let event = hot.wait_event("InvalidNetworks", "infiniband-guid").await?;
        println!("{}", event.message);
        ensure!(hot.link_names()?.is_empty(), "{:?}", hot.link_names()?);
        Ok(())
    })
    .await
}

/// The IPv4 default routes of a pod.
fn default_routes(pod: &LivePod) -> Result<Vec<Value>> {
    let text = pod.run(&["ip", "-4", "-j", "route", "show", "default"])?;
    Ok(if text.trim().is_empty() { Vec::new() } else { serde_json::from_str(&text)? })
}

pub async fn a_default_route_acts_and_the_replaced_one_comes_back(lab: Lab) -> Result<()> {
    with_namespace(&lab, "route", async |ns: &TestNamespace| {
        create_bridge_nad(ns, "blue", "10.111.0.0/24").await?;
        let element = json!({"name": "blue", "interface": "net1", "default-route": ["10.111.0.1"]});
        let hot = start_live_pod(ns, plain_pod("hot", "node-1")).await?;
        let before = default_routes(&hot)?;
        ensure!(before.iter().all(|route| route["dev"] == "eth0") && !before.is_empty(), "{before:?}");
        hot.set_networks(&json!([element])).await?;
        hot.wait_interfaces(&["net1"]).await?;
        // multus 4.2.4 means to do this at pod start, but it leaves the default route of IPv4 on eth0.
        let found = default_routes(&hot)?;
        let [route] = &found[..] else { bail!("one default route instead of {found:?}") };
        ensure!(route["dev"] == "net1" && route["gateway"] == "10.111.0.1", "{route}");
        println!("{}", hot.status("net1").await?);
        hot.set_networks(&json!([])).await?;
        hot.wait_interfaces(&[]).await?;
        let after = default_routes(&hot)?;
        ensure!(after == before, "before: {before:?}\nafter: {after:?}");
        hot.wait_reachable(&node_address(&lab, "node-2")?).await
    })
    .await
}

pub async fn bandwidth_limits_a_hot_plugged_interface(lab: Lab) -> Result<()> {
    with_namespace(&lab, "rate", async |ns: &TestNamespace| {
        let mut bridge = bridge_config(ns, "rate", "10.112.0.0/24");
        let config = json!({
            "cniVersion": "1.0.0", "name": bridge["name"].take(),
            "plugins": [bridge, {"type": "bandwidth", "capabilities": {"bandwidth": true}}],
        });
        create_nad(ns, "rate", &config).await?;
        let pod = start_live_pod(ns, plain_pod("p", "node-1")).await?;
        let mut limited = element("rate", "net1");
        limited["bandwidth"] =
            json!({"ingressRate": 1_000_000, "ingressBurst": 1_000_000, "egressRate": 1_000_000, "egressBurst": 1_000_000});
        pod.set_networks(&json!([limited])).await?;
        pod.wait_interfaces(&["net1"]).await?;
        let peer = pod.link("net1")?.context("net1")?["link_index"].as_u64().context("the peer's index")?;
        let host: Vec<Value> = serde_json::from_str(&lab.node("node-1").output(&["ip", "-j", "link"])?)?;
        let host = host.iter().find(|link| link["ifindex"] == peer).context("the host side of net1")?;
        let host = host["ifname"].as_str().context("its name")?;
        let queues = lab.node("node-1").output(&["tc", "qdisc", "show", "dev", host])?;
        ensure!(queues.contains("tbf") && queues.contains("rate 1Mbit"), "{queues}");
        pod.set_networks(&json!([])).await?;
        pod.wait_interfaces(&[]).await?;
        // The egress limit is a link of its own on the node.
        wait::until(Duration::from_secs(60), "the link of the egress limit to be deleted", || async {
            let links = lab.node("node-1").output(&["ip", "-o", "link", "show", "type", "ifb"])?;
            ensure!(links.trim().is_empty(), "{links}");
            Ok(Some(()))
        })
        .await
    })
    .await
}
