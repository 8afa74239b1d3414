//! The CustomResourceDefinitions of the kinds that virt-controller watches, with KubeVirt's names, versions and columns. The
//! schemas keep unknown fields and check nothing.

use serde_json::{Value, json};

/// One kind.
struct KubeVirtKind {
    group: &'static str,
    /// The last one is stored.
    versions: &'static [&'static str],
    kind: &'static str,
    plural: &'static str,
    short_names: &'static [&'static str],
    scope: &'static str,
    /// Whether the status is a subresource. Not for VirtualMachineInstance: virt-controller and virt-handler write its
    /// status together with the rest.
    status: bool,
}

const CORE: &str = "kubevirt.io";
const V1: &[&str] = &["v1alpha3", "v1"];
const BETA: &[&str] = &["v1alpha1", "v1beta1"];
const NAMESPACED: &str = "Namespaced";
const CLUSTER: &str = "Cluster";

const KINDS: &[KubeVirtKind] = &[
    kind(CORE, V1, "VirtualMachine", "virtualmachines", &["vm", "vms"]),
    KubeVirtKind {
        status: false,
        ..kind(CORE, V1, "VirtualMachineInstance", "virtualmachineinstances", &["vmi", "vmis"])
    },
    kind(CORE, V1, "VirtualMachineInstanceMigration", "virtualmachineinstancemigrations", &["vmim", "vmims"]),
    kind(CORE, V1, "VirtualMachineInstanceReplicaSet", "virtualmachineinstancereplicasets", &["vmirs"]),
    KubeVirtKind {
        status: false,
        ..kind(CORE, V1, "VirtualMachineInstancePreset", "virtualmachineinstancepresets", &["vmipreset"])
    },
    kind(CORE, V1, "KubeVirt", "kubevirts", &["kv", "kvs"]),
    kind("pool.kubevirt.io", BETA, "VirtualMachinePool", "virtualmachinepools", &["vmpool"]),
    kind("snapshot.kubevirt.io", BETA, "VirtualMachineSnapshot", "virtualmachinesnapshots", &["vmsnapshot"]),
    kind(
        "snapshot.kubevirt.io",
        BETA,
        "VirtualMachineSnapshotContent",
        "virtualmachinesnapshotcontents",
        &["vmsnapshotcontent"],
    ),
    kind("snapshot.kubevirt.io", BETA, "VirtualMachineRestore", "virtualmachinerestores", &["vmrestore"]),
    kind("export.kubevirt.io", BETA, "VirtualMachineExport", "virtualmachineexports", &["vmexport"]),
    kind("clone.kubevirt.io", BETA, "VirtualMachineClone", "virtualmachineclones", &["vmclone"]),
    KubeVirtKind {
        scope: CLUSTER,
        ..kind("migrations.kubevirt.io", &["v1alpha1"], "MigrationPolicy", "migrationpolicies", &[])
    },
    instancetype("VirtualMachineInstancetype", "virtualmachineinstancetypes", NAMESPACED),
    instancetype("VirtualMachineClusterInstancetype", "virtualmachineclusterinstancetypes", CLUSTER),
    instancetype("VirtualMachinePreference", "virtualmachinepreferences", NAMESPACED),
    instancetype("VirtualMachineClusterPreference", "virtualmachineclusterpreferences", CLUSTER),
];

const fn kind(
    group: &'static str,
    versions: &'static [&'static str],
    kind: &'static str,
    plural: &'static str,
    short_names: &'static [&'static str],
) -> KubeVirtKind {
    KubeVirtKind { group, versions, kind, plural, short_names, scope: NAMESPACED, status: true }
}

const fn instancetype(kind: &'static str, plural: &'static str, scope: &'static str) -> KubeVirtKind {
    let group = "instancetype.kubevirt.io";
    KubeVirtKind { group, versions: &["v1beta1"], kind, plural, short_names: &[], scope, status: false }
}

/// All definitions.
pub fn definitions() -> Vec<Value> {
    KINDS.iter().map(KubeVirtKind::definition).collect()
}

impl KubeVirtKind {
    fn definition(&self) -> Value {
        let stored = self.versions.last();
        let version = |name: &&str| {
            json!({
                "name": name, "served": true, "storage": Some(name) == stored,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
                "subresources": if self.status { json!({"status": {}}) } else { json!({}) },
                "additionalPrinterColumns": self.columns(),
            })
        };
        json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": format!("{}.{}", self.plural, self.group)},
            "spec": {
                "group": self.group,
                "scope": self.scope,
                "names": {
                    "kind": self.kind, "plural": self.plural, "singular": self.kind.to_lowercase(),
                    "shortNames": self.short_names,
                },
                "versions": self.versions.iter().map(version).collect::<Vec<_>>(),
            },
        })
    }

    fn columns(&self) -> Value {
        let column = |name: &str, path: &str| json!({"name": name, "type": "string", "jsonPath": path});
        let age = json!({"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"});
        let ready = ".status.conditions[?(@.type=='Ready')].status";
        match self.kind {
            "VirtualMachine" => {
                json!([age, column("Status", ".status.printableStatus"), column("Ready", ready)])
            }
            "VirtualMachineInstance" => json!([
                age,
                column("Phase", ".status.phase"),
                column("IP", ".status.interfaces[0].ipAddress"),
                column("NodeName", ".status.nodeName"),
                column("Ready", ready),
            ]),
            "VirtualMachineInstanceMigration" => {
                json!([column("Phase", ".status.phase"), column("VMI", ".spec.vmiName")])
            }
            _ => json!([age]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seventeen_kinds_store_their_last_version_only() {
        let all = definitions();
        assert_eq!(all.len(), 17);
        for definition in &all {
            let versions = definition["spec"]["versions"].as_array().unwrap();
            let stored: Vec<bool> = versions.iter().map(|v| v["storage"].as_bool().unwrap()).collect();
            assert_eq!(stored.iter().filter(|s| **s).count(), 1);
            assert_eq!(stored.last(), Some(&true));
        }
    }

    #[test]
    fn the_status_of_a_vmi_is_written_with_the_rest() {
        let status = |plural: &str| {
            let all = definitions();
            let found = all.iter().find(|d| d["spec"]["names"]["plural"] == plural).unwrap();
            found["spec"]["versions"][0]["subresources"]["status"].is_object()
        };
        assert!(!status("virtualmachineinstances"));
        assert!(status("virtualmachines") && status("virtualmachineinstancemigrations"));
    }
}
