//! The NetworkAttachmentDefinitions (NADs) of networks: who owns each, and which to create, repair or delete.

use std::collections::{BTreeMap, BTreeSet};

use api::{
    bridgenetwork::BRIDGE_PLUGIN, digest::digest, ipam::IPAM_PLUGIN, nad::origin_digest, selection::NadRef,
};
use serde_json::{Value, json};

use super::{
    ClusterState, EventDraft, NadState, NamespacePhase, NetworkContext, NetworkState, NetworkStep, status,
};
use crate::{shared_map::SharedMap, users::UserLookup};

/// All NADs, by network.
#[derive(Debug, Default)]
pub struct NadIndex<'a> {
    /// By the UID of the owner.
    owned: BTreeMap<&'a str, Vec<&'a NadRef>>,
    /// By the name of the network that the config attaches pods to.
    joining: BTreeMap<&'a str, Vec<&'a NadRef>>,
    all: Option<&'a SharedMap<NadRef, NadState>>,
}

/// The steps for the NADs of a network, and the problems with them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NadPlan {
    pub steps: Vec<NetworkStep>,
    /// Namespaces that do not exist or are terminating.
    pub missing: Vec<String>,
    /// Existing NADs with a desired name that the network does not own.
    pub foreign: Vec<NadRef>,
    /// Owned NADs that are no longer in the spec and still in use.
    pub used: Vec<NadRef>,
    /// Desired NADs that are being deleted.
    pub deleting: Vec<NadRef>,
    /// NADs that the API server rejected, with its message.
    pub rejected: Vec<(NadRef, String)>,
    /// The cluster does not serve the kind.
    pub kind_missing: bool,
    pub events: Vec<EventDraft>,
}

impl<'a> NadIndex<'a> {
    pub fn new(state: &'a ClusterState) -> Self {
        let mut index = Self { all: state.nads.as_ref(), ..Self::default() };
        for (reference, nad) in state.nads.iter().flat_map(SharedMap::iter) {
            if let Some(uid) =
                nad.owner_uid(reference).or_else(|| partially_marked_owner(state, reference, nad))
            {
                index.owned.entry(uid).or_default().push(reference);
            }
            if let Some(name) = &nad.joins {
                index.joining.entry(name).or_default().push(reference);
            }
        }
        index
    }

    /// The NADs by which pods use a network.
    pub fn used_for(&self, state: &ClusterState, network: &NetworkState) -> BTreeSet<NadRef> {
        let owned = self.owned.get(network.uid.as_str()).into_iter().flatten();
        let joining = self.joining.get(network.name.as_str()).into_iter().flatten();
        let mut all: BTreeSet<NadRef> = owned.chain(joining).map(|it| (*it).clone()).collect();
        all.extend(deleted_nads(state, network).cloned());
        // A pod that names a NAD which does not exist yet waits for it.
        let Ok(spec) = &network.spec else { return all };
        let name = spec.attachment_name(&network.name);
        let expected = spec.namespaces().iter().map(|namespace| NadRef::new(namespace, name));
        let exists = |at: &NadRef| state.nads.as_ref().is_some_and(|all| all.contains_key(at));
        all.extend(expected.filter(|at| !exists(at)));
        all
    }

    /// The NADs that the network owns.
    pub fn owned_by(&self, network: &NetworkState) -> Vec<(NadRef, NadState)> {
        let references = self.owned.get(network.uid.as_str()).into_iter().flatten();
        references.filter_map(|at| Some(((*at).clone(), self.all?.get(at)?.clone()))).collect()
    }

    /// The unused NADs of networks that no longer exist. A NAD that was modified since its creation is left alone.
    pub fn orphans(&self, state: &ClusterState, users: &dyn UserLookup) -> Vec<(NadRef, NadState)> {
        let live: BTreeSet<&str> = state.networks.values().map(|network| network.uid.as_str()).collect();
        let left = self.owned.iter().filter(|(uid, _)| !live.contains(*uid)).flat_map(|(_, at)| at);
        let orphans = left.filter_map(|at| Some((*at, self.all?.get(at)?)));
        orphans
            .filter(|(at, nad)| is_unmodified(at, nad) && !nad.deleting && !users.is_used(at))
            .map(|(at, nad)| (at.clone(), nad.clone()))
            .collect()
    }

    /// Creates missing NADs, repairs changed ones, and deletes those that are no longer desired.
    pub fn plan(&self, context: &NetworkContext<'_>, mtu: Option<i32>) -> NadPlan {
        let mut nad_plan = NadPlan::default();
        let Ok(spec) = &context.network.spec else { return nad_plan };
        let name = spec.attachment_name(&context.network.name);
        let desired: BTreeSet<NadRef> =
            spec.namespaces().iter().map(|namespace| NadRef::new(namespace, name)).collect();
        let Some(all) = self.all else {
            nad_plan.kind_missing = !desired.is_empty();
            return nad_plan;
        };
        for at in &desired {
            match (context.state.namespaces.get(&at.namespace), mtu) {
                (None | Some(NamespacePhase::Terminating), _) => nad_plan.missing.push(at.namespace.clone()),
                (Some(NamespacePhase::Active), None) => {}
                (Some(NamespacePhase::Active), Some(mtu)) => {
                    plan_nad(context, at, all.get(at), mtu, &mut nad_plan);
                }
            }
        }
        let mut unwanted = Vec::new();
        for (at, nad) in self.owned_by(context.network).into_iter().filter(|(at, _)| !desired.contains(at)) {
            if context.user_lookup.is_used(&at) {
                nad_plan.used.push(at);
            } else if !nad.deleting {
                unwanted.push((at, nad));
            }
        }
        if !unwanted.is_empty() {
            nad_plan.steps.push(NetworkStep::DeleteNads(unwanted));
        }
        Self::restore_used(context, &desired, mtu, &mut nad_plan);
        nad_plan.rejected = context.rejected(&nad_plan.steps);
        nad_plan
    }

    /// Creates a deleted NAD again if a pod began to use it just before the deletion. It stays until its users are gone.
    fn restore_used(
        context: &NetworkContext<'_>,
        desired: &BTreeSet<NadRef>,
        mtu: Option<i32>,
        nad_plan: &mut NadPlan,
    ) {
        let mut unconfirmed = BTreeSet::new();
        for at in deleted_nads(context.state, context.network).filter(|at| !desired.contains(at)) {
            if !context.user_lookup.is_used(at) {
                unconfirmed.insert(at.clone());
                continue;
            }
            let active = context.state.namespaces.get(&at.namespace) == Some(&NamespacePhase::Active);
            if let Some(mtu) = mtu.filter(|_| active) {
                plan_nad(context, at, None, mtu, nad_plan);
                nad_plan.used.push(at.clone());
            }
        }
        if !unconfirmed.is_empty() {
            nad_plan.steps.push(NetworkStep::ConfirmNadsUnused(unconfirmed));
        }
    }
}

/// The networks that use one NAD name, whether the NAD exists or not. Agrees with [`NadIndex::used_for`].
pub struct NadOwners<'a> {
    at: &'a NadRef,
    exists: bool,
    /// The UID of the network that owns the NAD, or owned it before its deletion.
    owner: Option<&'a str>,
    /// The name of the network that its config attaches pods to.
    joins: Option<&'a str>,
}

impl<'a> NadOwners<'a> {
    pub fn new(state: &'a ClusterState, at: &'a NadRef) -> Self {
        let found = state.nads.as_ref().and_then(|all| all.get(at));
        let owner = match found {
            Some(nad) => nad.owner_uid(at).or_else(|| partially_marked_owner(state, at, nad)),
            None => state.deleted_nads.get(at).map(|it| it.network.as_str()),
        };
        Self { at, exists: found.is_some(), owner, joins: found.and_then(|nad| nad.joins.as_deref()) }
    }

    pub fn include(&self, network: &NetworkState) -> bool {
        let expected = || {
            let Ok(spec) = &network.spec else { return false };
            self.at.name == spec.attachment_name(&network.name)
                && spec.namespaces().contains(&self.at.namespace)
        };
        self.owner == Some(&network.uid) || self.joins == Some(&network.name) || !self.exists && expected()
    }
}

/// The deleted NADs of a network for which no live read has confirmed yet that they had no users.
fn deleted_nads<'a>(state: &'a ClusterState, network: &NetworkState) -> impl Iterator<Item = &'a NadRef> {
    let exists = |at: &NadRef| state.nads.as_ref().is_some_and(|all| all.contains_key(at));
    let of_network = state.deleted_nads.iter().filter(|(_, it)| it.network == network.uid);
    of_network.map(|(at, _)| at).filter(move |at| !exists(at))
}

/// Whether the NAD has exactly the content with which the controller created it under this name.
fn is_unmodified(at: &NadRef, nad: &NadState) -> bool {
    let (Some(network), Some(config)) = (&nad.network, &nad.config) else { return false };
    nad.owner_uid(at).is_some() && is_plugin_config(config, &at.name, network)
}

/// The UID of the network that desires a NAD of this name, if some of the NAD's ownership marks were removed and the rest
/// still identify the network. A NAD that was created under another name is a copy and has no owner.
fn partially_marked_owner<'a>(state: &'a ClusterState, at: &NadRef, nad: &NadState) -> Option<&'a str> {
    let network = state.networks.get(nad.network.as_ref()?)?;
    let matches = match (&nad.network_uid, &nad.origin) {
        (Some(uid), None) => *uid == network.uid,
        (None, Some(marked)) => *marked == origin_digest(&network.uid, at),
        (None, None) => nad.joins == nad.network,
        (Some(_), Some(_)) => false,
    };
    if !matches {
        return None;
    }
    let spec = network.spec.as_ref().ok()?;
    let desired = at.name == spec.attachment_name(&network.name) && spec.namespaces().contains(&at.namespace);
    desired.then_some(&network.uid)
}

fn plan_nad(
    context: &NetworkContext<'_>,
    at: &NadRef,
    found: Option<&NadState>,
    mtu: i32,
    nad_plan: &mut NadPlan,
) {
    let network = context.network;
    let ipam = network.spec.as_ref().ok().and_then(|spec| spec.ipam.as_ref());
    let addresses = ipam.map_or(Addresses::None, |ipam| Addresses::of(ipam.persistent));
    let config = plugin_config(&at.name, &network.name, mtu, addresses);
    // It was in sync with this very content, so another client changed or deleted it.
    let synced = context.records.synced_nads.get(at);
    let repair = synced == Some(&digest([network.uid.as_str(), &config.to_string()]));
    let Some(found) = found else {
        nad_plan.steps.push(NetworkStep::CreateNad { at: at.clone(), config: config.to_string(), repair });
        if repair {
            nad_plan.events.push(repair_event(at, "was deleted and has been created again"));
        }
        return;
    };
    let owner_uid = found.owner_uid(at);
    let owner = owner_uid.or_else(|| partially_marked_owner(context.state, at, found));
    if owner != Some(network.uid.as_str()) {
        nad_plan.foreign.push(at.clone());
    } else if found.deleting {
        nad_plan.deleting.push(at.clone());
    } else if !config_equals(found.config.as_deref(), &config)
        || found.network.as_ref() != Some(&network.name)
        || owner_uid.is_none()
    {
        let (uid, version) = (found.uid.clone(), found.version.clone());
        nad_plan.steps.push(NetworkStep::ApplyNad {
            at: at.clone(),
            uid,
            version,
            config: config.to_string(),
            repair,
        });
        if repair {
            nad_plan.events.push(repair_event(at, "was changed and has been restored"));
        }
    }
}

fn repair_event(at: &NadRef, what: &str) -> EventDraft {
    let note = format!(
        "NetworkAttachmentDefinition {at} {what}: its BridgeNetwork owns it; edit or delete the BridgeNetwork instead"
    );
    EventDraft { nad: Some(at.clone()), warning: true, reason: status::ATTACHMENT_REPAIRED, note }
}

/// Which addresses pods get on a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Addresses {
    None,
    PerPod,
    /// Virtual machines keep theirs.
    Persistent,
}

impl Addresses {
    const ALL: [Self; 3] = [Self::None, Self::PerPod, Self::Persistent];

    fn of(persistent: bool) -> Self {
        if persistent { Self::Persistent } else { Self::PerPod }
    }
}

/// The CNI config of a NAD that Patchbay manages for a network.
fn plugin_config(nad: &str, network: &str, mtu: i32, addresses: Addresses) -> Value {
    let mut config = json!({
        "cniVersion": "1.0.0",
        "name": nad,
        "type": BRIDGE_PLUGIN,
        "network": network,
        "mtu": mtu,
        "capabilities": {"mac": true},
    });
    if addresses != Addresses::None {
        config["ipam"] = json!({"type": IPAM_PLUGIN, "network": network});
        config["capabilities"]["ips"] = json!(true);
    }
    if addresses == Addresses::Persistent {
        config["allowPersistentIPs"] = json!(true);
    }
    config
}

/// Whether this text is JSON that equals the config, whatever its formatting.
fn config_equals(text: Option<&str>, config: &Value) -> bool {
    text.and_then(|text| serde_json::from_str::<Value>(text).ok()).as_ref() == Some(config)
}

/// Whether this text is a config from [`plugin_config`] for this NAD and network, with any MTU.
fn is_plugin_config(text: &str, nad: &str, network: &str) -> bool {
    let Ok(value) = serde_json::from_str::<Value>(text) else { return false };
    let mtu = value["mtu"].as_i64().and_then(|mtu| i32::try_from(mtu).ok());
    mtu.is_some_and(|mtu| Addresses::ALL.iter().any(|ipam| value == plugin_config(nad, network, mtu, *ipam)))
}

#[cfg(test)]
mod config_tests {
    use super::*;

    #[test]
    fn configs_are_compared_as_json() {
        let ours = plugin_config("nad", "blue", 1450, Addresses::None);
        let addresses = plugin_config("nad", "blue", 1450, Addresses::PerPod);
        let persistent = plugin_config("nad", "blue", 1450, Addresses::Persistent);
        assert_eq!(persistent["allowPersistentIPs"], true);
        assert!(is_plugin_config(&persistent.to_string(), "nad", "blue"));
        assert!(!config_equals(Some(&persistent.to_string()), &addresses));
        assert!(!config_equals(Some(&ours.to_string()), &addresses));
        assert!(is_plugin_config(&addresses.to_string(), "nad", "blue"));
        let pretty = serde_json::to_string_pretty(&ours).unwrap();
        assert!(config_equals(Some(&pretty), &ours) && config_equals(Some(&ours.to_string()), &ours));
        assert!(!config_equals(Some(&pretty), &plugin_config("nad", "blue", 1400, Addresses::None)));
        assert!(!config_equals(Some("junk"), &ours) && !config_equals(None, &ours));
        assert!(
            is_plugin_config(&pretty, "nad", "blue") && is_plugin_config(&ours.to_string(), "nad", "blue")
        );
        assert!(!is_plugin_config(&pretty, "nad", "red") && !is_plugin_config(&pretty, "copy", "blue"));
        for (key, value) in [("mtu", json!("1450")), ("ipam", json!({})), ("type", json!("bridge"))] {
            let mut edited = ours.clone();
            edited[key] = value;
            assert!(!is_plugin_config(&edited.to_string(), "nad", "blue"), "{edited}");
        }
        assert!(!is_plugin_config("junk", "nad", "blue") && !is_plugin_config("7", "nad", "blue"));
    }
}
