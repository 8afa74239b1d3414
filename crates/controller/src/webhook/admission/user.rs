//! Validates that an object does not start to use a network that is being deleted.
//!
//! This only reports the error early. The order of deletion of a network keeps its links while pods use them.

use std::collections::BTreeSet;

use api::selection::NadRef;
use plan::{
    network::{self, ClusterState},
    users::{UserLookup, WorkloadKind, WorkloadRefs},
};
use serde_json::{Map, Value};

use super::AdmissionDecision;
use crate::cache::project::{self, WorkloadObject};

/// The references of the object; none if it is missing or cannot be parsed.
pub fn workload_refs(
    kind: WorkloadKind,
    namespace: &str,
    object: Option<&Map<String, Value>>,
) -> WorkloadRefs {
    let object = object.cloned().map(Value::Object).unwrap_or_default();
    let Ok(object) = serde_json::from_value::<WorkloadObject>(object) else { return WorkloadRefs::default() };
    let refs = project::workload(kind, object);
    // Some requests have the namespace only in their URL.
    let namespace = if refs.namespace.is_empty() { namespace.to_owned() } else { refs.namespace };
    WorkloadRefs { namespace, ..refs }
}

/// The references that the object adds. Parses long annotations, so it runs before the cache is locked.
pub fn added_references(new: &WorkloadRefs, old: &WorkloadRefs) -> BTreeSet<NadRef> {
    if new.finished {
        return BTreeSet::new();
    }
    let previous = old.references();
    new.references().into_iter().filter(|reference| !previous.contains(reference)).collect()
}

/// Denies new references to a network that is being deleted, unless the object's controller already has one.
pub fn validate(
    cluster: &ClusterState,
    users: &dyn UserLookup,
    kind: WorkloadKind,
    new: &WorkloadRefs,
    added: &BTreeSet<NadRef>,
) -> AdmissionDecision {
    if added.is_empty() {
        return AdmissionDecision::Allow;
    }
    let owner = new.owner.iter();
    let owned: Vec<NadRef> =
        owner.flat_map(|(kind, name)| users.references_of(*kind, &new.namespace, name)).collect();
    let deleting = |at| network::networks_of(cluster, at).filter(|network| network.deleting.is_some());
    let denied = added.iter().flat_map(|at| deleting(at).map(move |network| (at, network)));
    for (attachment, network) in denied {
        if owned.iter().flat_map(deleting).any(|other| other.uid == network.uid) {
            continue;
        }
        return AdmissionDecision::Deny(format!(
            "this {} references NetworkAttachmentDefinition {attachment} of BridgeNetwork {}, which is being deleted; \
             use another network, or wait for the deletion and create the network again",
            kind.name(),
            network.name
        ));
    }
    AdmissionDecision::Allow
}
