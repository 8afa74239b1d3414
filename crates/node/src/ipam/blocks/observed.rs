//! The IPBlocks of this node and those that borrow from it, as the watch and the answers of the API server show them.

use std::collections::{BTreeMap, VecDeque};

use api::{IPBlock, ipblock::HolderRef};
use kube::ResourceExt as _;
use plan::ipam::{ObservedIpBlock, carries_boot, is_ours};

/// How many UIDs of deleted IPBlocks are remembered.
const MAX_REMEMBERED_UIDS: usize = 1024;

/// The observed IPBlocks by name.
#[derive(Debug, Default)]
pub struct ObservedBlocks {
    /// `None` until the watch has synced.
    objects: Option<BTreeMap<String, ObservedIpBlock>>,
    /// The UIDs of IPBlocks that this node deleted: stale watch events may still arrive.
    deleted: VecDeque<String>,
}

impl ObservedBlocks {
    /// Forgets the objects until the next [`Self::sync`].
    pub fn reset(&mut self) {
        self.objects = None;
    }

    pub fn is_synced(&self) -> bool {
        self.objects.is_some()
    }

    /// `None` until the watch has synced.
    pub fn all(&self) -> Option<&BTreeMap<String, ObservedIpBlock>> {
        self.objects.as_ref()
    }

    pub fn get(&self, name: &str) -> Option<&ObservedIpBlock> {
        self.objects.as_ref()?.get(name)
    }

    /// Replaces the objects by a complete list.
    pub fn sync(&mut self, all: Vec<IPBlock>) {
        let all = all.into_iter().filter_map(observed);
        self.objects = Some(all.filter(|(_, one)| !self.deleted.contains(&one.uid)).collect());
    }

    /// Returns whether the object was inserted.
    pub fn insert(&mut self, block: IPBlock) -> bool {
        let (Some(objects), Some((name, object))) = (&mut self.objects, observed(block)) else {
            return false;
        };
        let is_new = !self.deleted.contains(&object.uid);
        if is_new {
            objects.insert(name, object);
        }
        is_new
    }

    /// Removes an object whatever its UID.
    pub fn remove(&mut self, name: &str) {
        if let Some(objects) = &mut self.objects {
            objects.remove(name);
        }
    }

    /// Removes this very object; returns whether it was there.
    pub fn remove_object(&mut self, block: &IPBlock) -> bool {
        let name = block.name_any();
        let found = self.get(&name).is_some_and(|object| Some(&object.uid) == block.metadata.uid.as_ref());
        if found {
            self.remove(&name);
        }
        found
    }

    /// Records that this node deleted an object.
    pub fn mark_deleted(&mut self, name: &str, uid: &str) {
        self.deleted.push_back(uid.to_owned());
        if self.deleted.len() > MAX_REMEMBERED_UIDS {
            self.deleted.pop_front();
        }
        self.remove(name);
    }

    /// The UIDs of the blocks, by name, that may serve addresses: the API server shows them as held by `holder` in the
    /// current boot.
    pub fn serving(&self, holder: &HolderRef, boot: &str) -> BTreeMap<String, String> {
        let all = self.objects.iter().flatten();
        let ours = all.filter(|(_, one)| is_ours(one, holder) && carries_boot(one, boot));
        ours.map(|(name, one)| (name.clone(), one.uid.clone())).collect()
    }

    /// Whether a block of the network carries another boot ID than the current one.
    pub fn has_other_boot(&self, network: &str, holder: &HolderRef, boot: &str) -> bool {
        let mut all = self.objects.iter().flatten().map(|(_, one)| one);
        all.any(|one| one.spec.network_uid == network && is_ours(one, holder) && !carries_boot(one, boot))
    }
}

/// The name and the content of an IPBlock.
pub fn observed(block: IPBlock) -> Option<(String, ObservedIpBlock)> {
    let name = block.name_any();
    let uid = block.metadata.uid?;
    Some((name, ObservedIpBlock { uid, spec: block.spec, status: block.status.unwrap_or_default() }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn me() -> HolderRef {
        HolderRef { node: "a".to_owned(), uid: "uid-a".to_owned() }
    }

    fn ipblock(uid: &str, node: &str, boot: &str) -> IPBlock {
        serde_json::from_value(json!({
            "apiVersion": "patchbay.dev/v1alpha1", "kind": "IPBlock",
            "metadata": {"name": format!("blue.{uid}"), "uid": uid},
            "spec": {"network": "blue", "networkUID": "net", "cidr": "10.0.0.0/28", "bootID": boot,
                "holder": {"node": node, "uid": "uid-a"}},
        }))
        .unwrap()
    }

    #[test]
    fn only_own_blocks_of_this_boot_serve_and_only_while_they_are_seen() {
        let mut blocks = ObservedBlocks::default();
        assert!(!blocks.insert(ipblock("1", "a", "boot")), "nothing is known before the first list");
        let all = [("1", "a", "boot"), ("2", "a", "other"), ("3", "ipamclaims/patchbay", "boot")];
        blocks.sync(all.map(|(uid, node, boot)| ipblock(uid, node, boot)).to_vec());
        let serving =
            |blocks: &ObservedBlocks| blocks.serving(&me(), "boot").into_values().collect::<Vec<_>>();
        assert_eq!(serving(&blocks), ["1"]);
        assert!(blocks.has_other_boot("net", &me(), "boot"));
        assert!(!blocks.has_other_boot("other", &me(), "boot"));
        assert!(blocks.remove_object(&ipblock("1", "a", "boot")));
        assert_eq!(serving(&blocks), [""; 0]);
        blocks.reset();
        assert!(!blocks.is_synced() && serving(&blocks).is_empty());
    }

    #[test]
    fn a_late_event_of_a_deleted_block_does_not_bring_it_back() {
        let mut blocks = ObservedBlocks::default();
        blocks.sync(vec![ipblock("1", "a", "boot")]);
        blocks.mark_deleted("blue.1", "1");
        assert!(!blocks.insert(ipblock("1", "a", "boot")));
        blocks.sync(vec![ipblock("1", "a", "boot")]);
        assert_eq!(blocks.all().map(BTreeMap::len), Some(0));
        // Another object of this name.
        let mut new = ipblock("2", "a", "boot");
        new.metadata.name = Some("blue.1".to_owned());
        assert!(blocks.insert(new.clone()));
        new.metadata.uid = Some("1".to_owned());
        assert!(!blocks.remove_object(&new), "the deletion of the old object");
        assert!(blocks.get("blue.1").is_some());
    }
}
