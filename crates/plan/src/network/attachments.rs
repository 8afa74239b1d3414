//! The attachments (NADs) of networks: which are ours, which are missing, and which have to go.

use std::collections::{BTreeMap, BTreeSet};

use api::{
    digest::digest,
    nad::{config_equals, is_plugin_config, origin_digest, plugin_config},
    selection::NadRef,
};

use super::{Attachment, Event, Namespace, Network, Scene, Step, World, status};

/// The attachments there are, by the network that they concern.
#[derive(Debug, Default)]
pub struct Attachments<'a> {
    /// By the UID in their mark.
    marked: BTreeMap<&'a str, Vec<&'a NadRef>>,
    /// By the name of the network that their config joins pods to.
    joining: BTreeMap<&'a str, Vec<&'a NadRef>>,
    all: Option<&'a BTreeMap<NadRef, Attachment>>,
}

/// What keeping the attachments of a network takes, and what stands in the way.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Kept {
    pub steps: Vec<Step>,
    /// Namespaces that are not there, or about to go.
    pub missing: Vec<String>,
    /// Attachments that others made.
    pub foreign: Vec<NadRef>,
    /// Attachments outside the list that somebody still uses.
    pub used: Vec<NadRef>,
    /// Attachments that somebody else is deleting.
    pub going: Vec<NadRef>,
    /// Attachments that the API server does not let be written, and what it says.
    pub refused: Vec<(NadRef, String)>,
    /// The cluster does not know the kind.
    pub unknown: bool,
    pub events: Vec<Event>,
}

impl<'a> Attachments<'a> {
    pub fn new(world: &'a World) -> Self {
        let mut attachments = Self { all: world.attachments.as_ref(), ..Self::default() };
        for (reference, one) in world.attachments.iter().flatten() {
            if let Some(uid) = one.made_by(reference).or_else(|| unsigned(world, reference, one)) {
                attachments.marked.entry(uid).or_default().push(reference);
            }
            if let Some(name) = &one.joins {
                attachments.joining.entry(name).or_default().push(reference);
            }
        }
        attachments
    }

    /// What users of the network name.
    pub fn of(&self, world: &World, network: &Network) -> BTreeSet<NadRef> {
        let marked = self.marked.get(network.uid.as_str()).into_iter().flatten();
        let joining = self.joining.get(network.name.as_str()).into_iter().flatten();
        let mut all: BTreeSet<NadRef> = marked.chain(joining).map(|it| (*it).clone()).collect();
        all.extend(withdrawn(world, network).cloned());
        // Whoever names one that is not there yet waits for it.
        let Ok(spec) = &network.spec else { return all };
        let name = spec.attachment_name(&network.name);
        let expected = spec.namespaces().iter().map(|namespace| NadRef::new(namespace, name));
        let there = |at: &NadRef| world.attachments.as_ref().is_some_and(|all| all.contains_key(at));
        all.extend(expected.filter(|at| !there(at)));
        all
    }

    /// Those that bear the mark of the network.
    pub fn marked(&self, network: &Network) -> Vec<(NadRef, Attachment)> {
        let references = self.marked.get(network.uid.as_str()).into_iter().flatten();
        references.filter_map(|at| Some(((*at).clone(), self.all?.get(at)?.clone()))).collect()
    }

    /// Those that a network made which is no more, and that nobody names. What somebody has changed since is theirs.
    pub fn orphans(&self, world: &World) -> Vec<(NadRef, Attachment)> {
        let live: BTreeSet<&str> = world.networks.values().map(|network| network.uid.as_str()).collect();
        let left = self.marked.iter().filter(|(uid, _)| !live.contains(*uid)).flat_map(|(_, at)| at);
        let orphans = left.filter_map(|at| Some((*at, self.all?.get(at)?)));
        orphans
            .filter(|(at, one)| {
                untouched(at, one) && !one.deleting && world.users.summary([*at], 1).count == 0
            })
            .map(|(at, one)| (at.clone(), one.clone()))
            .collect()
    }

    /// Makes what is missing, puts right what was changed, and removes what is not wanted any more.
    pub fn keep(&self, scene: &Scene<'_>, mtu: Option<i32>) -> Kept {
        let mut kept = Kept::default();
        let Ok(spec) = &scene.network.spec else { return kept };
        let name = spec.attachment_name(&scene.network.name);
        let wanted: BTreeSet<NadRef> =
            spec.namespaces().iter().map(|namespace| NadRef::new(namespace, name)).collect();
        let Some(all) = self.all else {
            kept.unknown = !wanted.is_empty();
            return kept;
        };
        for at in &wanted {
            match (scene.world.namespaces.get(&at.namespace), mtu) {
                (None | Some(Namespace::Terminating), _) => kept.missing.push(at.namespace.clone()),
                (Some(Namespace::Active), None) => {}
                (Some(Namespace::Active), Some(mtu)) => keep_one(scene, at, all.get(at), mtu, &mut kept),
            }
        }
        let mut unwanted = Vec::new();
        for (at, one) in self.marked(scene.network).into_iter().filter(|(at, _)| !wanted.contains(at)) {
            if scene.world.users.summary([&at], 1).count > 0 {
                kept.used.push(at);
            } else if !one.deleting {
                unwanted.push((at, one));
            }
        }
        if !unwanted.is_empty() {
            kept.steps.push(Step::Delete(unwanted));
        }
        Self::bring_back(scene, &wanted, mtu, &mut kept);
        kept.refused = scene.refused(&kept.steps);
        kept
    }

    /// Somebody may have begun to use an attachment just before it was taken off: then it is made again, and stays until
    /// they go.
    fn bring_back(scene: &Scene<'_>, wanted: &BTreeSet<NadRef>, mtu: Option<i32>, kept: &mut Kept) {
        let mut unsure = BTreeSet::new();
        for at in withdrawn(scene.world, scene.network).filter(|at| !wanted.contains(at)) {
            if scene.world.users.summary([at], 1).count == 0 {
                unsure.insert(at.clone());
                continue;
            }
            let active = scene.world.namespaces.get(&at.namespace) == Some(&Namespace::Active);
            if let Some(mtu) = mtu.filter(|_| active) {
                keep_one(scene, at, None, mtu, kept);
                kept.used.push(at.clone());
            }
        }
        if !unsure.is_empty() {
            kept.steps.push(Step::Confirm(unsure));
        }
    }
}

/// Whom one attachment concerns, there or not. Says the same as [`Attachments::of`].
pub struct Concern<'a> {
    at: &'a NadRef,
    there: bool,
    /// The UID of the network that keeps it, or kept it.
    keeper: Option<&'a str>,
    /// The name of the network that it joins pods to.
    joins: Option<&'a str>,
}

impl<'a> Concern<'a> {
    pub fn new(world: &'a World, at: &'a NadRef) -> Self {
        let found = world.attachments.as_ref().and_then(|all| all.get(at));
        let keeper = match found {
            Some(one) => one.made_by(at).or_else(|| unsigned(world, at, one)),
            None => world.withdrawn.get(at).map(|it| it.network.as_str()),
        };
        Self { at, there: found.is_some(), keeper, joins: found.and_then(|one| one.joins.as_deref()) }
    }

    pub fn is_of(&self, network: &Network) -> bool {
        let expected = || {
            let Ok(spec) = &network.spec else { return false };
            self.at.name == spec.attachment_name(&network.name)
                && spec.namespaces().contains(&self.at.namespace)
        };
        self.keeper == Some(&network.uid) || self.joins == Some(&network.name) || !self.there && expected()
    }
}

/// What was taken away of a network, and nobody knows yet whether that was right.
fn withdrawn<'a>(world: &'a World, network: &Network) -> impl Iterator<Item = &'a NadRef> {
    let there = |at: &NadRef| world.attachments.as_ref().is_some_and(|all| all.contains_key(at));
    let ours = world.withdrawn.iter().filter(|(_, it)| it.network == network.uid);
    ours.map(|(at, _)| at).filter(move |at| !there(at))
}

/// Whether it says what we wrote when we made it just here, and nothing else.
fn untouched(at: &NadRef, one: &Attachment) -> bool {
    let (Some(network), Some(config)) = (&one.network, &one.config) else { return false };
    one.made_by(at).is_some() && is_plugin_config(config, &at.name, network)
}

/// The UID of the network that wants an attachment just here, if a part of the mark was taken off it and the rest still
/// says that it is the network's. One that was made elsewhere is a copy.
fn unsigned<'a>(world: &'a World, at: &NadRef, one: &Attachment) -> Option<&'a str> {
    let network = world.networks.get(one.network.as_ref()?)?;
    let left = match (&one.network_uid, &one.place) {
        (Some(uid), None) => *uid == network.uid,
        (None, Some(said)) => *said == origin_digest(&network.uid, at),
        (None, None) => one.joins == one.network,
        (Some(_), Some(_)) => false,
    };
    if !left {
        return None;
    }
    let spec = network.spec.as_ref().ok()?;
    let wanted = at.name == spec.attachment_name(&network.name) && spec.namespaces().contains(&at.namespace);
    wanted.then_some(&network.uid)
}

fn keep_one(scene: &Scene<'_>, at: &NadRef, found: Option<&Attachment>, mtu: i32, kept: &mut Kept) {
    let network = scene.network;
    let addresses = network.spec.as_ref().is_ok_and(|spec| spec.ipam.is_some());
    let config = plugin_config(&at.name, &network.name, mtu, addresses);
    // It was seen in place, just as it should be: then somebody else took it away or changed it.
    let seen = scene.world.in_place.get(at);
    let repair = seen == Some(&digest([network.uid.as_str(), &config.to_string()]));
    let Some(found) = found else {
        kept.steps.push(Step::Create { at: at.clone(), config: config.to_string(), repair });
        if repair {
            kept.events.push(mended(at, "was deleted by somebody else and is made anew"));
        }
        return;
    };
    let made_by = found.made_by(at);
    let whose = made_by.or_else(|| unsigned(scene.world, at, found));
    if whose != Some(network.uid.as_str()) {
        kept.foreign.push(at.clone());
    } else if found.deleting {
        kept.going.push(at.clone());
    } else if !config_equals(found.config.as_deref(), &config)
        || found.network.as_ref() != Some(&network.name)
        || made_by.is_none()
    {
        let (uid, version) = (found.uid.clone(), found.version.clone());
        kept.steps.push(Step::Apply { at: at.clone(), uid, version, config: config.to_string(), repair });
        if repair {
            kept.events.push(mended(at, "was changed by somebody else and is put right"));
        }
    }
}

fn mended(at: &NadRef, what: &str) -> Event {
    let note = format!(
        "NetworkAttachmentDefinition {at} {what}: change the BridgeNetwork, which it is made from, or delete that"
    );
    Event { about: Some(at.clone()), warning: true, reason: status::ATTACHMENT_REPAIRED, note }
}
