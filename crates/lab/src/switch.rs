//! The network between the machines: one switch (a bridge) for the nodes' first NICs and the control plane, and one for
//! the spare NICs. Both are in the control plane's network namespace. A cable is a veth pair.

use std::{io::Write as _, path::Path, process::Stdio};

use anyhow::{Context as _, Result, bail};

use crate::{
    address::{CONTROL_PLANE, NodeAddresses, SPARE_NICS},
    machine::Machine,
};

/// The switch of the nodes' first NICs.
pub const PRIMARY_SWITCH: &str = "sw0";
/// The switch of the spare NICs.
pub const SPARE_SWITCH: &str = "sw1";

/// Creates both switches unless they exist.
pub fn create_switches(control_plane: &Machine) -> Result<()> {
    if has_link(control_plane, SPARE_SWITCH) {
        return Ok(());
    }
    let mut lines = Vec::new();
    if has_link(control_plane, PRIMARY_SWITCH) {
        lines.push(format!("link del {PRIMARY_SWITCH}"));
    }
    let (v4, v6) = CONTROL_PLANE;
    lines.extend([
        format!("link add {PRIMARY_SWITCH} type bridge mcast_snooping 0"),
        format!("addr add {v4}/24 dev {PRIMARY_SWITCH}"),
        format!("addr add {v6}/64 dev {PRIMARY_SWITCH} nodad"),
        format!("link set {PRIMARY_SWITCH} up"),
        // Last: its presence marks the set-up as complete.
        format!("link add {SPARE_SWITCH} up type bridge mcast_snooping 0"),
    ]);
    ip_batch(control_plane, &lines)
}

/// Connects a node's NICs to the switches unless they are, and sets its addresses and routes.
pub fn connect_node(control_plane: &Machine, machine: &Machine, node: NodeAddresses) -> Result<()> {
    let init = machine.init().with_context(|| format!("{} is off", machine.name))?;
    let connected =
        (0..=SPARE_NICS).all(|nic| is_cable(control_plane, &node.port(nic), machine, &format!("eth{nic}")));
    if !connected {
        for nic in 0..=SPARE_NICS {
            // Veth ends of an earlier boot; the kernel may be removing them at this moment.
            let _ = ip_batch(control_plane, &[format!("link del {}", node.port(nic))]);
            let _ = ip_batch(machine, &[format!("link del eth{nic}")]);
        }
        let cables = (0..=SPARE_NICS).flat_map(|nic| {
            let (port, mac) = (node.port(nic), node.mac(nic));
            let switch = if nic == 0 { PRIMARY_SWITCH } else { SPARE_SWITCH };
            [
                format!("link add {port} type veth peer name eth{nic} address {mac} netns {init}"),
                format!("link set {port} master {switch} up"),
            ]
        });
        ip_batch(control_plane, &cables.collect::<Vec<_>>())?;
    }
    // Repeated on every start, to repair a start that was interrupted.
    let (gateway4, gateway6) = CONTROL_PLANE;
    let mut lines = vec![
        format!("addr replace {}/24 dev eth0", node.v4()),
        format!("addr replace {}/64 dev eth0 nodad", node.v6()),
    ];
    if !connected {
        lines.extend((1..=SPARE_NICS).map(|nic| format!("link set eth{nic} up")));
    }
    lines.push("link set eth0 up".to_owned());
    lines.push(format!("route replace default via {gateway4}"));
    lines.push(format!("route replace default via {gateway6} dev eth0"));
    ip_batch(machine, &lines)
}

/// Whether two links are the ends of one veth pair.
fn is_cable(control_plane: &Machine, port: &str, machine: &Machine, nic: &str) -> bool {
    let index =
        |machine: &Machine, link: &str, file: &str| read(machine, &format!("sys/class/net/{link}/{file}"));
    let there = (index(control_plane, port, "iflink"), index(machine, nic, "ifindex"));
    let back = (index(machine, nic, "iflink"), index(control_plane, port, "ifindex"));
    there.0.is_some() && there.0 == there.1 && back.0.is_some() && back.0 == back.1
}

/// Adds routes on a machine to the pods of the given nodes.
pub fn add_pod_routes(machine: &Machine, nodes: &[NodeAddresses]) -> Result<()> {
    let lines: Vec<String> = nodes
        .iter()
        .flat_map(|node| {
            [
                format!("route replace {} via {}", node.pods_v4(), node.v4()),
                format!("route replace {} via {}", node.pods_v6(), node.v6()),
            ]
        })
        .collect();
    ip_batch(machine, &lines)
}

/// Deletes the routes on a machine to a node's pods.
pub fn delete_pod_routes(machine: &Machine, node: NodeAddresses) {
    for pods in [node.pods_v4(), node.pods_v6()] {
        // Fails if the route does not exist.
        let _ = ip_batch(machine, &[format!("route del {pods}")]);
    }
}

/// Whether the switches forward a node's frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CableState {
    /// The switches forward frames.
    Connected,
    /// The switches drop frames; the node's NICs keep their carrier, as with a fault further away in the network.
    Partitioned,
}

/// Connects or disconnects a node at the switches.
pub fn set_cable_state(control_plane: &Machine, node: NodeAddresses, cable: CableState) -> Result<()> {
    let state = match cable {
        CableState::Connected => 3,
        CableState::Partitioned => 0,
    };
    let lines: Vec<String> =
        (0..=SPARE_NICS).map(|nic| format!("link set dev {} state {state}", node.port(nic))).collect();
    // Not `ip link set … type bridge_slave state`: it reports success and changes nothing.
    run_batch("bridge", control_plane, &lines)
}

/// The state of a node's first cable; all cables of a node have the same state.
pub fn cable_state(control_plane: &Machine, node: NodeAddresses) -> CableState {
    let port = format!("sys/class/net/{}/brport/state", node.port(0));
    match read(control_plane, &port).as_deref() {
        Some("3") => CableState::Connected,
        _ => CableState::Partitioned,
    }
}

fn has_link(machine: &Machine, link: &str) -> bool {
    read(machine, &format!("sys/class/net/{link}/ifindex")).is_some()
}

fn read(machine: &Machine, path: &str) -> Option<String> {
    let root = format!("/proc/{}/root", machine.init()?);
    std::fs::read_to_string(Path::new(&root).join(path)).ok().map(|text| text.trim().to_owned())
}

fn ip_batch(machine: &Machine, lines: &[String]) -> Result<()> {
    run_batch("ip", machine, lines)
}

fn run_batch(program: &str, machine: &Machine, lines: &[String]) -> Result<()> {
    let text = lines.join("\n") + "\n";
    let mut child = machine
        .command_in_netns(program)?
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("run {program}; install iproute2"))?;
    child
        .stdin
        .take()
        .context("the child has no stdin")?
        .write_all(text.as_bytes())
        .context("write the batch")?;
    let output = child.wait_with_output().context("wait for the batch")?;
    if !output.status.success() {
        bail!(
            "{program} -batch in the network namespace of {}: {}\n{text}",
            machine.name,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}
