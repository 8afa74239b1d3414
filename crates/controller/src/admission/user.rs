//! Whether an object may begin to use a network: not one whose deletion has begun.
//!
//! This spares users a surprise, no more. What keeps links from being pulled away is the order in which a network goes.

use std::collections::BTreeSet;

use api::selection::NadRef;
use plan::{
    network::{self, World},
    users::{Facts, Kind},
};
use serde_json::{Map, Value};

use super::Verdict;
use crate::object::{self, WorkloadObject};

/// What the object says, if there is one that can be read.
pub fn read(kind: Kind, namespace: &str, object: Option<&Map<String, Value>>) -> Facts {
    let object = object.cloned().map(Value::Object).unwrap_or_default();
    let Ok(object) = serde_json::from_value::<WorkloadObject>(object) else { return Facts::default() };
    let facts = object::workload(kind, object);
    // Some requests name the namespace in their address only.
    let namespace = if facts.namespace.is_empty() { namespace.to_owned() } else { facts.namespace };
    Facts { namespace, ..facts }
}

/// What the object names and did not name before. Annotations can be long: they are read before anything is locked.
pub fn added(new: &Facts, old: &Facts) -> BTreeSet<NadRef> {
    if new.finished {
        return BTreeSet::new();
    }
    let had = old.references();
    new.references().into_iter().filter(|one| !had.contains(one)).collect()
}

/// Refuses new references to a network that is going, unless whatever controls the object has had one all along.
pub fn judge(world: &World, kind: Kind, new: &Facts, added: &BTreeSet<NadRef>) -> Verdict {
    let going = |at| network::networks_of(world, at).filter(|network| network.deleting.is_some());
    let asked = added.iter().flat_map(|at| going(at).map(move |network| (at, network)));
    for (attachment, network) in asked {
        let owned = new.owner.iter().flat_map(|(kind, name)| world.users.named(*kind, &new.namespace, name));
        if owned.flat_map(going).any(|had| had.uid == network.uid) {
            continue;
        }
        return Verdict::Deny(format!(
            "this {} names NetworkAttachmentDefinition {attachment} of BridgeNetwork {}, which is being deleted: \
             name another network, or wait until it is gone and make it anew",
            kind.name(),
            network.name
        ));
    }
    Verdict::Allow
}
