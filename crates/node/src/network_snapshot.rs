//! The networks of this node as pods can join them: one snapshot, which is replaced as a whole.
//!
//! The [`BridgeController`](crate::bridges::BridgeController) owns the only [`NetworksWriter`]. It publishes a change before
//! it changes links, so that a reader that attached a pod meanwhile sees either the old network, whose links are then
//! observed with the new pod, or the new state. Readers are attach and detach (`attach`), the CNI server and the
//! [`BlockController`](crate::ipam::BlockController); none of them waits for the API server.

use std::{collections::BTreeMap, sync::Arc};

use api::ipblock::NodeRef;
use plan::ipam::Pool;
use tokio::sync::watch;
use wire::cni::{Code, Error};

use crate::bridges::UNREADABLE;

const NOT_SYNCED: &str = "the patchbay node daemon has not yet read the networks from the API server; \
    if this persists, see the log of its pod on this node";

/// The networks that this node knows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Networks {
    /// Whether the list from the API server is complete.
    pub synced: bool,
    /// This node, once its Node has been read.
    pub node: Option<NodeRef>,
    pub by_name: BTreeMap<String, NetworkView>,
}

/// A network as the CNI server sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkView {
    pub uid: String,
    pub state: NetworkState,
    /// Whether it is being deleted: the node allocates no more addresses of it.
    pub closed: bool,
    /// Its address pool, if it has IPAM.
    pub ipam: Option<Arc<Pool>>,
    /// Whether IPAMClaims have addresses of it.
    pub has_claims: bool,
}

/// The state of a network on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NetworkState {
    /// The bridge exists. A network without IPAM that is being deleted and still has users accepts more pods, so that a pod
    /// that was created just before is not stranded.
    Ready {
        bridge_index: u32,
        mtu: u32,
    },
    NotReady {
        reason: String,
        message: String,
    },
    /// The network's selector does not match this node.
    NotSelected,
    /// The daemon is removing its links.
    Removing,
}

/// A network that a pod can join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadyNetwork<'a> {
    pub uid: &'a str,
    /// The index of the bridge.
    pub bridge: u32,
    pub mtu: u32,
}

/// Reads the snapshot, and every change of it.
pub type NetworksReader = watch::Receiver<Arc<Networks>>;

/// Publishes the snapshot. There is one per daemon.
#[derive(Debug, Default)]
pub struct NetworksWriter(watch::Sender<Arc<Networks>>);

impl NetworksWriter {
    pub fn subscribe(&self) -> NetworksReader {
        self.0.subscribe()
    }

    pub fn current(&self) -> Arc<Networks> {
        Arc::clone(&self.0.borrow())
    }

    /// Replaces the snapshot if it differs, and returns whether it did.
    pub fn publish(&self, networks: Networks) -> bool {
        self.0.send_if_modified(|published| {
            let changed = **published != networks;
            if changed {
                *published = Arc::new(networks);
            }
            changed
        })
    }

    /// Publishes that the Node object does not exist.
    pub fn clear_node(&self) {
        self.0.send_if_modified(|networks| {
            let changed = networks.node.is_some();
            if changed {
                Arc::make_mut(networks).node = None;
            }
            changed
        });
    }
}

impl Networks {
    /// Fails until the networks have been read from the API server.
    pub fn require_synced(&self, code: Code) -> Result<(), Error> {
        if self.synced { Ok(()) } else { Err(Error::new(code, NOT_SYNCED)) }
    }

    /// The network that a pod wants to join, or why it cannot join now.
    pub fn ready(&self, name: &str) -> Result<ReadyNetwork<'_>, Error> {
        let later = |msg: String| Err(Error::new(Code::TryAgainLater, msg));
        match self.by_name.get(name) {
            None if !self.synced => later(NOT_SYNCED.to_owned()),
            None => {
                later(format!("there is no BridgeNetwork {name:?}: create it, or correct the configuration"))
            }
            Some(NetworkView { uid, state, .. }) => match state {
                NetworkState::Ready { bridge_index, mtu } => {
                    Ok(ReadyNetwork { uid, bridge: *bridge_index, mtu: *mtu })
                }
                NetworkState::NotReady { reason, message } => later(format!(
                    "network {name:?} is not ready on this node ({reason}): {message}; \
                    the pod starts once the network is ready"
                )),
                NetworkState::NotSelected => later(format!(
                    "network {name:?} does not select this node: run the pod on a node with the label \
                    network.patchbay.dev/{name}=true, or change spec.nodeSelector of the BridgeNetwork"
                )),
                NetworkState::Removing => later(format!(
                    "network {name:?} is being removed from this node: remove it from the pod, or create it again"
                )),
            },
        }
    }

    /// Whether IPAMClaims have addresses of a network.
    pub fn has_claims(&self, name: &str) -> bool {
        self.by_name.get(name).is_some_and(|network| network.has_claims)
    }

    /// Fails unless the network still exists and is not being deleted: no address of any other is allocated.
    pub fn require_open(&self, name: &str, uid: &str) -> Result<(), Error> {
        match self.by_name.get(name) {
            Some(view) if view.uid == uid && !view.closed => Ok(()),
            _ => Err(Error::new(
                Code::TryAgainLater,
                format!(
                    "network {name:?} is being deleted, so no address of it is allocated: remove it from the pod, or create it again"
                ),
            )),
        }
    }

    /// The UID and the address pool of a network. Its bridge need not be on this node.
    pub fn pool(&self, name: &str) -> Result<(&str, &Pool), Error> {
        let later = |msg: String| Err(Error::new(Code::TryAgainLater, msg));
        let Some(network) = self.by_name.get(name) else {
            self.require_synced(Code::TryAgainLater)?;
            return later(format!(
                "BridgeNetwork {name:?} does not exist: create it, or correct the configuration"
            ));
        };
        if network.state == NetworkState::Removing {
            return later(format!(
                "network {name:?} is being deleted: remove it from the pod, or create it again"
            ));
        }
        match &network.ipam {
            None if matches!(&network.state, NetworkState::NotReady { reason, .. } if reason == UNREADABLE) => {
                later(format!(
                    "BridgeNetwork {name:?} cannot be parsed on this node: check that the node daemon is not older than the CRD"
                ))
            }
            None => later(format!("network {name:?} has no addresses: set spec.ipam of the BridgeNetwork")),
            Some(pool) if pool.grids.is_empty() => later(format!(
                "network {name:?} has no block length yet: check that the patchbay controller runs"
            )),
            Some(pool) => Ok((&network.uid, pool)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn networks(state: NetworkState) -> Networks {
        let view = NetworkView { uid: "u".to_owned(), state, closed: false, ipam: None, has_claims: false };
        Networks { synced: true, node: None, by_name: [("blue".to_owned(), view)].into() }
    }

    #[test]
    fn a_pod_joins_a_ready_network_only_and_the_error_says_why() {
        let ready = NetworkState::Ready { bridge_index: 7, mtu: 1400 };
        let blue = networks(ready.clone());
        assert_eq!(blue.ready("blue").unwrap(), ReadyNetwork { uid: "u", bridge: 7, mtu: 1400 });
        let not_ready = NetworkState::NotReady { reason: "Conflict".to_owned(), message: "why".to_owned() };
        for (networks, text) in [
            (Networks::default(), "has not yet read the networks"),
            (Networks { by_name: BTreeMap::new(), ..blue }, "there is no BridgeNetwork \"blue\""),
            (networks(not_ready), "is not ready on this node (Conflict): why"),
            (networks(NetworkState::NotSelected), "network.patchbay.dev/blue=true"),
            (networks(NetworkState::Removing), "is being removed from this node"),
        ] {
            let error = networks.ready("blue").unwrap_err();
            assert!(error.code == Code::TryAgainLater && error.msg.contains(text), "{error:?}");
        }
        // A network that is known can be joined before the list is complete.
        assert!(Networks { synced: false, ..networks(ready) }.ready("blue").is_ok());
    }

    #[test]
    fn readers_are_woken_by_a_difference_only() {
        let writer = NetworksWriter::default();
        let mut reader = writer.subscribe();
        let node = NodeRef { node: "a".to_owned(), uid: "n".to_owned() };
        let networks = Networks { node: Some(node), ..networks(NetworkState::Removing) };
        assert!(writer.publish(networks.clone()) && reader.has_changed().unwrap());
        assert_eq!(**reader.borrow_and_update(), networks);
        assert!(!writer.publish(networks.clone()) && !reader.has_changed().unwrap());
        writer.clear_node();
        assert_eq!(**reader.borrow_and_update(), Networks { node: None, ..networks });
        writer.clear_node();
        assert!(!reader.has_changed().unwrap());
        assert_eq!(writer.current(), *reader.borrow());
    }
}
