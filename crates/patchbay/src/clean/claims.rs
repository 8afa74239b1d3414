//! `patchbay clean ipamclaims`: lists the IPAMClaims that have the finalizer of persistent addresses, and removes it.
//!
//! The controller removes the finalizer when the virtual machine of a claim is gone. After Patchbay is removed, and unless
//! ipam-extensions takes over, nothing does: the deletion of the claim, of a virtual machine in the foreground and of the
//! namespace then never ends.

use std::fmt;

use anyhow::{Context as _, bail};
use api::{ErrorChain, ipamclaim::FINALIZER};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams},
    core::{GroupVersionKind, PartialObjectMeta},
};
use serde_json::{Value, json};

use super::table;
use crate::cli::{print, print_line};

/// Claims of one list request.
const PAGE: u32 = 500;

/// A claim that has the finalizer.
#[derive(Debug, Clone, PartialEq)]
struct HeldClaim {
    namespace: String,
    name: String,
    uid: String,
    resource_version: String,
    addresses: Vec<String>,
    /// The other finalizers.
    finalizers: Vec<String>,
    deleting: bool,
    /// The virtual machine that owns it.
    owner: Option<OwnerReference>,
}

/// Whether the virtual machine that owns a claim exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OwnerState {
    Exists,
    Gone,
    /// No virtual machine owns the claim.
    None,
    /// The owner could not be read.
    Unknown,
}

impl fmt::Display for HeldClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl HeldClaim {
    /// `None` if the claim does not have the finalizer.
    fn new(claim: &DynamicObject) -> Option<Self> {
        let metadata = &claim.metadata;
        let finalizers = metadata.finalizers.iter().flatten();
        let (held, finalizers): (Vec<_>, Vec<_>) = finalizers.cloned().partition(|one| one == FINALIZER);
        if held.is_empty() {
            return None;
        }
        let ips = claim.data["status"]["ips"].as_array().cloned().unwrap_or_default();
        let mut owners = metadata.owner_references.iter().flatten();
        Some(Self {
            namespace: claim.namespace().unwrap_or_default(),
            name: claim.name_any(),
            uid: metadata.uid.clone().unwrap_or_default(),
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
            addresses: ips.iter().filter_map(|ip| ip.as_str().map(str::to_owned)).collect(),
            finalizers,
            deleting: metadata.deletion_timestamp.is_some(),
            owner: owners.find(|owner| machine_resource(owner).is_some()).cloned(),
        })
    }

    /// Whether nothing needs the finalizer any more.
    fn is_left_over(&self, owner: OwnerState) -> bool {
        self.deleting || owner == OwnerState::Gone
    }

    fn row(&self, owner: OwnerState) -> [String; 4] {
        let state = if self.deleting { "being deleted" } else { "exists" };
        let machine = self.owner.as_ref().map(|owner| format!("{} {}", owner.kind, owner.name));
        let machine = machine.unwrap_or_default();
        let owner = match owner {
            OwnerState::Exists => machine,
            OwnerState::Gone => format!("{machine} (gone)"),
            OwnerState::None => "none".to_owned(),
            OwnerState::Unknown => format!("{machine} (unknown)"),
        };
        [self.to_string(), state.to_owned(), owner, self.addresses.join(",")]
    }

    /// Removes the finalizer from the claim as it was listed.
    fn patch(&self) -> Value {
        json!({"metadata": {
            "uid": self.uid,
            "resourceVersion": self.resource_version,
            "finalizers": self.finalizers,
        }})
    }
}

/// The resource of an owner that is a VirtualMachine or a VirtualMachineInstance.
fn machine_resource(owner: &OwnerReference) -> Option<ApiResource> {
    let (group, version) = owner.api_version.split_once('/')?;
    let plural = match (group, owner.kind.as_str()) {
        ("kubevirt.io", "VirtualMachine") => "virtualmachines",
        ("kubevirt.io", "VirtualMachineInstance") => "virtualmachineinstances",
        _ => return None,
    };
    Some(ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, &owner.kind), plural))
}

fn claim_resource() -> ApiResource {
    let kind = GroupVersionKind::gvk("k8s.cni.cncf.io", "v1alpha1", "IPAMClaim");
    ApiResource::from_gvk_with_plural(&kind, "ipamclaims")
}

/// Lists the claims of one namespace or of all, and removes the finalizer of those that are left over, or of all.
pub async fn clean(client: Client, namespace: Option<&str>, yes: bool, all: bool) -> anyhow::Result<()> {
    let mut held = Vec::new();
    for claim in list(&client, namespace).await? {
        let owner = owner_state(&client, &claim).await?;
        held.push((claim, owner));
    }
    if held.is_empty() {
        return print(&format!("No IPAMClaim has the finalizer {FINALIZER}\n"));
    }
    let rows: Vec<_> = held.iter().map(|(claim, owner)| claim.row(*owner)).collect();
    print(&table::table(["CLAIM", "STATE", "OWNER", "ADDRESSES"], &rows))?;
    let chosen = choose(held, all);
    print(&summary(&chosen, yes, all))?;
    if yes { remove(&client, &chosen).await } else { Ok(()) }
}

/// The claims whose finalizer is removed.
fn choose(held: Vec<(HeldClaim, OwnerState)>, all: bool) -> Vec<HeldClaim> {
    let chosen = held.into_iter().filter(|(claim, owner)| all || claim.is_left_over(*owner));
    chosen.map(|(claim, _)| claim).collect()
}

fn summary(chosen: &[HeldClaim], yes: bool, all: bool) -> String {
    match (chosen.len(), yes) {
        (0, _) => {
            "No claim is being deleted or has lost its owner, so nothing needs to be changed. With --all the \
             finalizer is removed from every claim.\n"
                .to_owned()
        }
        (_, true) => String::new(),
        (count, false) => {
            let which =
                if all { "every claim" } else { "claims that are being deleted or have lost their owner" };
            format!(
                "Nothing was changed. Repeat the command with --yes to remove the finalizer from {which}: {count}.\n"
            )
        }
    }
}

async fn list(client: &Client, namespace: Option<&str>) -> anyhow::Result<Vec<HeldClaim>> {
    let resource = claim_resource();
    let api: Api<DynamicObject> = match namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    };
    let mut held = Vec::new();
    let mut params = ListParams::default().limit(PAGE);
    loop {
        let page = match api.list(&params).await {
            Ok(page) => page,
            // The CRD does not exist.
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(held),
            Err(error) => return Err(error).context("list the IPAMClaims"),
        };
        held.extend(page.items.iter().filter_map(HeldClaim::new));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = ListParams::default().limit(PAGE).continue_token(&token),
            None => return Ok(held),
        }
    }
}

async fn owner_state(client: &Client, claim: &HeldClaim) -> anyhow::Result<OwnerState> {
    let Some(owner) = &claim.owner else { return Ok(OwnerState::None) };
    let Some(resource) = machine_resource(owner) else { return Ok(OwnerState::None) };
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &claim.namespace, &resource);
    match api.get_metadata_opt(&owner.name).await {
        Ok(found) => Ok(state_of(owner, found.as_ref())),
        Err(error) => {
            let (kind, name) = (&owner.kind, &owner.name);
            print_line(&format!("{claim}: could not read {kind} {name}: {}", ErrorChain(&error)))?;
            Ok(OwnerState::Unknown)
        }
    }
}

/// A machine of the same name with another UID is not the owner.
fn state_of(owner: &OwnerReference, found: Option<&PartialObjectMeta<DynamicObject>>) -> OwnerState {
    let uid = found.and_then(|found| found.metadata.uid.as_ref());
    if uid == Some(&owner.uid) { OwnerState::Exists } else { OwnerState::Gone }
}

/// Removes the finalizer of each claim, unless the claim changed after it was listed. A claim that cannot be changed does not
/// stop the others.
async fn remove(client: &Client, claims: &[HeldClaim]) -> anyhow::Result<()> {
    let mut failed = 0;
    for claim in claims {
        let api: Api<DynamicObject> =
            Api::namespaced_with(client.clone(), &claim.namespace, &claim_resource());
        let patched = api.patch(&claim.name, &PatchParams::default(), &Patch::Merge(claim.patch())).await;
        let line = match patched {
            Ok(_) => format!("{claim} is free of the finalizer"),
            Err(kube::Error::Api(status)) if status.code == 404 => format!("{claim} is gone"),
            Err(kube::Error::Api(status)) if status.code == 409 => {
                failed += 1;
                format!("{claim} keeps the finalizer: it changed after it was listed")
            }
            Err(error) => {
                failed += 1;
                format!("{claim} keeps the finalizer: {}", ErrorChain(&error))
            }
        };
        print_line(&line)?;
    }
    if failed > 0 {
        bail!("{failed} of {} claims keep the finalizer; repeat the command", claims.len());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(extra: Value) -> DynamicObject {
        let mut object = json!({
            "apiVersion": "k8s.cni.cncf.io/v1alpha1",
            "kind": "IPAMClaim",
            "metadata": {
                "namespace": "apps", "name": "vm1.blue", "uid": "u", "resourceVersion": "7",
                "finalizers": ["example/other", FINALIZER],
                "ownerReferences": [{
                    "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "vm1", "uid": "v",
                    "controller": true, "blockOwnerDeletion": true,
                }],
            },
            "spec": {"network": "blue", "interface": "pod1"},
            "status": {"ips": ["10.0.0.5/24", "fd00::5/64"]},
        });
        for (key, value) in extra.as_object().cloned().unwrap_or_default() {
            object["metadata"][key] = value;
        }
        serde_json::from_value(object).unwrap()
    }

    fn held(extra: Value) -> HeldClaim {
        HeldClaim::new(&claim(extra)).unwrap()
    }

    fn deleting() -> Value {
        json!({"deletionTimestamp": "2026-01-01T00:00:00Z"})
    }

    #[test]
    fn only_claims_with_the_finalizer_are_listed() {
        for finalizers in [json!([]), json!(["example/other"]), Value::Null] {
            assert_eq!(HeldClaim::new(&claim(json!({"finalizers": finalizers}))), None);
        }
        let found = held(json!({}));
        assert_eq!(found.to_string(), "apps/vm1.blue");
        assert_eq!(found.addresses, ["10.0.0.5/24", "fd00::5/64"]);
        assert!(!found.deleting && found.owner.is_some());
    }

    #[test]
    fn only_the_finalizer_is_removed_and_only_from_the_claim_that_was_listed() {
        assert_eq!(
            held(json!({})).patch(),
            json!({"metadata": {"uid": "u", "resourceVersion": "7", "finalizers": ["example/other"]}})
        );
    }

    #[test]
    fn a_claim_keeps_its_finalizer_while_its_owner_exists() {
        let cases = [
            (json!({}), OwnerState::Exists, false),
            (json!({}), OwnerState::Gone, true),
            (json!({}), OwnerState::Unknown, false),
            (json!({"ownerReferences": []}), OwnerState::None, false),
            (deleting(), OwnerState::Exists, true),
            (deleting(), OwnerState::Unknown, true),
        ];
        for (extra, owner, expected) in cases {
            let one = held(extra.clone());
            assert_eq!(
                choose(vec![(one.clone(), owner)], false).len(),
                usize::from(expected),
                "{extra} {owner:?}"
            );
            assert_eq!(choose(vec![(one, owner)], true).len(), 1, "--all takes every claim");
        }
    }

    #[test]
    fn the_owner_is_found_by_its_uid() {
        let owner = held(json!({})).owner.unwrap();
        let found = |uid: &str| -> PartialObjectMeta<DynamicObject> {
            serde_json::from_value(json!({"metadata": {"name": "vm1", "uid": uid}})).unwrap()
        };
        assert_eq!(state_of(&owner, Some(&found("v"))), OwnerState::Exists);
        assert_eq!(state_of(&owner, Some(&found("new"))), OwnerState::Gone, "a new machine of the name");
        assert_eq!(state_of(&owner, None), OwnerState::Gone);
        let foreign = json!({"ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "Deployment", "name": "a", "uid": "d"},
        ]});
        assert_eq!(held(foreign).owner, None, "only virtual machines are read");
    }

    #[test]
    fn the_table_says_why_a_claim_is_left_over() {
        let rows = [held(json!({})).row(OwnerState::Exists), held(deleting()).row(OwnerState::Gone)];
        let expected = "\
CLAIM           STATE           OWNER                       ADDRESSES
apps/vm1.blue   exists          VirtualMachine vm1          10.0.0.5/24,fd00::5/64
apps/vm1.blue   being deleted   VirtualMachine vm1 (gone)   10.0.0.5/24,fd00::5/64
";
        assert_eq!(table::table(["CLAIM", "STATE", "OWNER", "ADDRESSES"], &rows), expected);
    }

    #[test]
    fn without_yes_the_summary_says_what_would_change() {
        assert!(summary(&[], true, false).contains("--all"));
        assert_eq!(summary(&[held(deleting())], true, false), "");
        assert!(summary(&[held(deleting())], false, false).ends_with("have lost their owner: 1.\n"));
        assert!(summary(&[held(json!({}))], false, true).contains("every claim: 1"));
    }
}
