//! Addresses that several pods of a service report.

use std::{fmt, net::IpAddr, sync::Arc};

use super::PodFacts;

/// An address that is not published, because several pods report it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DuplicateAddress {
    pub address: IpAddr,
    /// The first two of the pods, by name.
    pub pods: [Arc<str>; 2],
    /// The number of further pods.
    pub more: usize,
}

impl DuplicateAddress {
    pub(super) fn new(address: IpAddr, pods: &[&PodFacts]) -> Option<Self> {
        let mut names: Vec<&Arc<str>> = pods.iter().map(|pod| &pod.name).collect();
        names.sort();
        let [first, second, rest @ ..] = &*names else { return None };
        Some(Self { address, pods: [(*first).clone(), (*second).clone()], more: rest.len() })
    }
}

impl fmt::Display for DuplicateAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, pods: [first, second], more } = self;
        write!(f, "{address} of the pods {first} and {second}")?;
        if *more > 0 {
            write!(f, " and {more} more")?;
        }
        Ok(())
    }
}

/// The pod whose endpoint is published, among pods that report the same address; `None` if the address is withheld.
///
/// - A pod that is being deleted and is not ready has no process left that answers, and its address may already belong to
///   another pod: it counts only against pods of the same kind.
/// - The pods of one virtual machine share its address while it migrates: the pod that takes traffic wins, then the one that is
///   ready, then the newer. So the address stays published during the whole migration.
/// - Otherwise it is unknown which pod the address reaches.
pub(super) fn winner<'a>(pods: &[&'a PodFacts]) -> Option<&'a PodFacts> {
    let lives = |pod: &&&PodFacts| !pod.deleting || pod.ready;
    let living: Vec<&PodFacts> = pods.iter().filter(lives).copied().collect();
    let claimants = if living.is_empty() { pods } else { &living };
    let [first, rest @ ..] = claimants else { return None };
    let one_machine = first.virtual_machine().is_some()
        && rest.iter().all(|pod| pod.virtual_machine() == first.virtual_machine());
    if !rest.is_empty() && !one_machine {
        return None;
    }
    let rank = |pod: &&&PodFacts| (pod.takes_traffic(), pod.ready, pod.created, pod.uid.clone());
    claimants.iter().max_by_key(rank).copied()
}
