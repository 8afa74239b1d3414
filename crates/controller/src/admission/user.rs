//! Whether an object may begin to use a network: not one whose deletion has begun.
//!
//! This spares users a surprise, no more. What keeps links from being pulled away is the order in which a network goes.

use std::collections::BTreeSet;

use api::selection::Reference;
use plan::{
    network::{World, attachments_of},
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

/// Refuses new references to a network that is going, unless whatever controls the object has had one all along.
pub fn judge(world: &World, kind: Kind, new: &Facts, old: &Facts) -> Verdict {
    let had: BTreeSet<Reference> = old.references().into_iter().collect();
    let added: BTreeSet<Reference> = new.references().into_iter().filter(|one| !had.contains(one)).collect();
    if added.is_empty() || new.finished {
        return Verdict::Allow;
    }
    for network in world.networks.values().filter(|network| network.deleting.is_some()) {
        let attachments = attachments_of(world, network);
        let Some(attachment) = added.intersection(&attachments).next() else { continue };
        let owner = new.owner.as_ref();
        if owner.is_some_and(|(kind, name)| world.users.names(*kind, &new.namespace, name, &attachments)) {
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
