//! The cables of a lab: a switch for the nodes' first NICs with the control plane on it, and a second one for the
//! spare NICs. Both live in the control plane's network namespace.

use std::{io::Write as _, path::Path, process::Stdio};

use anyhow::{Context as _, Result, bail};

use crate::{
    address::{CONTROL_PLANE, Node, SPARE_NICS},
    machine::Machine,
};

/// The switch of the first NICs.
pub const FIRST: &str = "sw0";
/// The switch of the spare NICs.
pub const SECOND: &str = "sw1";

/// Makes both switches, unless they are there.
pub fn build(control_plane: &Machine) -> Result<()> {
    if has_link(control_plane, SECOND) {
        return Ok(());
    }
    let mut lines = Vec::new();
    if has_link(control_plane, FIRST) {
        lines.push(format!("link del {FIRST}"));
    }
    let (v4, v6) = CONTROL_PLANE;
    lines.extend([
        format!("link add {FIRST} type bridge mcast_snooping 0"),
        format!("addr add {v4}/24 dev {FIRST}"),
        format!("addr add {v6}/64 dev {FIRST} nodad"),
        format!("link set {FIRST} up"),
        // Last: its presence says that the work is complete.
        format!("link add {SECOND} up type bridge mcast_snooping 0"),
    ]);
    batch(control_plane, &lines)
}

/// Plugs a node's NICs in, unless they are, and sets its addresses and routes.
pub fn plug(control_plane: &Machine, machine: &Machine, node: Node) -> Result<()> {
    let init = machine.init().with_context(|| format!("{} is off", machine.name))?;
    let plugged =
        (0..=SPARE_NICS).all(|nic| is_cable(control_plane, &node.port(nic), machine, &format!("eth{nic}")));
    if !plugged {
        for nic in 0..=SPARE_NICS {
            // What is left of cables to a machine that died; the kernel may be taking it away at this moment.
            let _ = batch(control_plane, &[format!("link del {}", node.port(nic))]);
            let _ = batch(machine, &[format!("link del eth{nic}")]);
        }
        let cables = (0..=SPARE_NICS).flat_map(|nic| {
            let (port, mac) = (node.port(nic), node.mac(nic));
            let switch = if nic == 0 { FIRST } else { SECOND };
            [
                format!("link add {port} type veth peer name eth{nic} address {mac} netns {init}"),
                format!("link set {port} master {switch} up"),
            ]
        });
        batch(control_plane, &cables.collect::<Vec<_>>())?;
    }
    // Said again on every start: one that was killed in between is repaired by the next.
    let (gateway4, gateway6) = CONTROL_PLANE;
    let mut lines = vec![
        format!("addr replace {}/24 dev eth0", node.v4()),
        format!("addr replace {}/64 dev eth0 nodad", node.v6()),
    ];
    if !plugged {
        lines.extend((1..=SPARE_NICS).map(|nic| format!("link set eth{nic} up")));
    }
    lines.push("link set eth0 up".to_owned());
    lines.push(format!("route replace default via {gateway4}"));
    lines.push(format!("route replace default via {gateway6} dev eth0"));
    batch(machine, &lines)
}

/// Whether two links are the two ends of one cable.
fn is_cable(control_plane: &Machine, port: &str, machine: &Machine, nic: &str) -> bool {
    let number =
        |machine: &Machine, link: &str, file: &str| read(machine, &format!("sys/class/net/{link}/{file}"));
    let ends = (number(control_plane, port, "iflink"), number(machine, nic, "ifindex"));
    let back = (number(machine, nic, "iflink"), number(control_plane, port, "ifindex"));
    ends.0.is_some() && ends.0 == ends.1 && back.0.is_some() && back.0 == back.1
}

/// Tells a machine the way to the pods of the given nodes.
pub fn route(machine: &Machine, nodes: &[Node]) -> Result<()> {
    let lines: Vec<String> = nodes
        .iter()
        .flat_map(|node| {
            [
                format!("route replace {} via {}", node.pods_v4(), node.v4()),
                format!("route replace {} via {}", node.pods_v6(), node.v6()),
            ]
        })
        .collect();
    batch(machine, &lines)
}

/// Takes the way to a node's pods away.
pub fn unroute(machine: &Machine, node: Node) {
    for pods in [node.pods_v4(), node.pods_v6()] {
        // Gone already is what we want.
        let _ = batch(machine, &[format!("route del {pods}")]);
    }
}

/// Whether a node's cables carry anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cable {
    /// Frames pass.
    Whole,
    /// Frames are dropped at the switch; the node's NICs keep their carrier, as with a fault further away.
    Cut,
}

/// Cuts a node off from everything, or lets it back.
pub fn set(control_plane: &Machine, node: Node, cable: Cable) -> Result<()> {
    let state = match cable {
        Cable::Whole => 3,
        Cable::Cut => 0,
    };
    let lines: Vec<String> =
        (0..=SPARE_NICS).map(|nic| format!("link set dev {} state {state}", node.port(nic))).collect();
    // Not `ip link set … type bridge_slave state`: it answers success and changes nothing.
    batch_of("bridge", control_plane, &lines)
}

/// How a node's cables are.
pub fn cable(control_plane: &Machine, node: Node) -> Cable {
    let port = format!("sys/class/net/{}/brport/state", node.port(0));
    match read(control_plane, &port).as_deref() {
        Some("3") => Cable::Whole,
        _ => Cable::Cut,
    }
}

fn has_link(machine: &Machine, link: &str) -> bool {
    read(machine, &format!("sys/class/net/{link}/ifindex")).is_some()
}

fn read(machine: &Machine, path: &str) -> Option<String> {
    let root = format!("/proc/{}/root", machine.init()?);
    std::fs::read_to_string(Path::new(&root).join(path)).ok().map(|text| text.trim().to_owned())
}

fn batch(machine: &Machine, lines: &[String]) -> Result<()> {
    batch_of("ip", machine, lines)
}

fn batch_of(program: &str, machine: &Machine, lines: &[String]) -> Result<()> {
    let text = lines.join("\n") + "\n";
    let mut child = machine
        .command_in_network(program)?
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("run {program}: install iproute2"))?;
    child.stdin.take().context("no input")?.write_all(text.as_bytes()).context("write the batch")?;
    let output = child.wait_with_output().context("wait for the batch")?;
    if !output.status.success() {
        bail!(
            "in the network of {}: {}\n{text}",
            machine.name,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}
