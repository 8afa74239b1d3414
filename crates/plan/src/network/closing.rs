//! Which nodes keep a network from being deleted: those whose interfaces have addresses of it, and those that have not
//! reported yet that none has.
//!
//! Only the node knows its leases. Annotations of pods are written by tenants, and the counts of an IPBlock lag behind.

use std::time::Duration;

use api::ClosedNetwork;
use jiff::SignedDuration;

use super::{NetworkContext, NodeState, status::list};

/// How long nodes usually need to report. After this time, a missing report blocks the deletion visibly.
pub const REPORT_TIME: Duration = Duration::from_secs(10);

/// A node with interfaces that have addresses of the network.
#[derive(Debug, Clone, Copy)]
struct UsingNode<'a> {
    name: &'a str,
    node: &'a NodeState,
    entry: &'a ClosedNetwork,
}

/// A node that has not reported that it closed the network.
#[derive(Debug, Clone, Copy)]
struct SilentNode<'a> {
    name: &'a str,
    node: &'a NodeState,
    has_report: bool,
}

/// The nodes that the deletion of a network waits for.
#[derive(Debug, Default)]
pub struct NodeUsers<'a> {
    using: Vec<UsingNode<'a>>,
    silent: Vec<SilentNode<'a>>,
}

impl<'a> NodeUsers<'a> {
    /// The nodes that a deletion waits for; none unless the network is being deleted.
    ///
    /// A node without a NodeNetwork and without a block of the network never ran a daemon, so it has no address of it. A
    /// network that never had addresses needs no reports.
    pub fn of(context: &NetworkContext<'a>) -> Self {
        let mut users = Self::default();
        let network = context.network;
        if network.deleting.is_none() {
            return users;
        }
        let has_ipam = network.spec.as_ref().is_ok_and(|spec| spec.ipam.is_some());
        let had_addresses = has_ipam || network.status.ipam.is_some() || !context.blocks.is_empty();
        // A Node that was created again has blocks of its former UID until its daemon adopts them.
        let holds = |name: &str, node: &NodeState| {
            let holders = context.blocks.iter().map(|(_, block)| &block.object.spec.holder);
            holders.filter(|it| it.is_node()).any(|holder| holder.uid == node.uid || holder.node == name)
        };
        for (name, node) in context.state.nodes.iter() {
            let report = context.state.reports.get(name);
            match report.and_then(|report| report.closed.get(&network.uid)) {
                Some(entry) if entry.is_unused() => {}
                Some(entry) => users.using.push(UsingNode { name, node, entry }),
                None if had_addresses && (report.is_some() || holds(name, node)) => {
                    users.silent.push(SilentNode { name, node, has_report: report.is_some() });
                }
                None => {}
            }
        }
        users
    }

    /// Whether an interface has an address of the network.
    pub fn is_used(&self) -> bool {
        !self.using.is_empty()
    }

    /// Whether all nodes have reported that no interface has an address of the network.
    pub fn is_empty(&self) -> bool {
        self.using.is_empty() && self.silent.is_empty()
    }

    /// Whether a deletion that began this long ago should no longer wait for reports.
    pub fn is_overdue(&self, since: SignedDuration) -> bool {
        !self.silent.is_empty() && since >= SignedDuration::try_from(REPORT_TIME).unwrap_or_default()
    }

    /// The nodes, why each counts, and what to do.
    pub fn describe(&self) -> String {
        let mut parts = Vec::new();
        if !self.using.is_empty() {
            let using: Vec<String> = self.using.iter().map(UsingNode::describe).collect();
            parts.push(format!(
                "interfaces have addresses of the network: {}; unplug these interfaces, or delete the pods; if a pod is \
                gone, see the conditions of the NodeNetwork",
                list(&using)
            ));
        }
        if !self.silent.is_empty() {
            let silent: Vec<String> = self.silent.iter().map(SilentNode::describe).collect();
            parts.push(format!(
                "nodes have not reported that no interface has an address of the network: {}",
                list(&silent)
            ));
        }
        parts.join("; ")
    }
}

impl UsingNode<'_> {
    fn describe(&self) -> String {
        let ClosedNetwork { interfaces, pods, unverified_blocks, .. } = self.entry;
        let count = if *interfaces > 0 { format!(": {interfaces}") } else { String::new() };
        let pods = if pods.is_empty() { String::new() } else { format!(" ({})", list(pods)) };
        let unverified = match unverified_blocks {
            0 => String::new(),
            number => format!(" with {number} unverified address blocks (drain and reboot the node)"),
        };
        let off = match &self.node.not_ready_reason {
            Some(why) => format!(" ({})", switched_off(why)),
            None => String::new(),
        };
        format!("node {}{count}{pods}{unverified}{off}", self.name)
    }
}

/// A deleted pod keeps its address until its node runs again, because only the node can end its sandbox.
fn switched_off(why: &str) -> String {
    format!("the Node is not ready: {why}; if it is switched off for good, delete its Node")
}

impl SilentNode<'_> {
    fn describe(&self) -> String {
        let Self { name, node, has_report } = self;
        match &node.not_ready_reason {
            Some(why) => {
                format!("{name} ({})", switched_off(why))
            }
            None if *has_report => {
                format!(
                    "{name} (check that its Patchbay daemon runs, and that it and the CustomResourceDefinitions are of the version of the controller)"
                )
            }
            None => format!(
                "{name} (it has address blocks and no NodeNetwork; check that its Patchbay daemon runs)"
            ),
        }
    }
}
