//! The kind `IPAMClaim` of the multi-network standard: the addresses that a virtual machine keeps on a network.
//!
//! Other projects ship the CRD too, so it is no part of Patchbay's manifests: the controller creates it if it is absent.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::Condition;
#[cfg(feature = "kube")]
use crate::list_schema;

/// The name of the CRD.
pub const CRD_NAME: &str = "ipamclaims.k8s.cni.cncf.io";
/// The finalizer that keeps a claim until its virtual machine is gone.
pub const FINALIZER: &str = "kubevirt.io/persistent-ipam";
/// Label on a claim: the name of its virtual machine.
pub const VM_LABEL: &str = "kubevirt.io/vm";
/// Annotation on a virtual machine instance: the addresses that its networks request, as a JSON map.
pub const ADDRESSES_ANNOTATION: &str = "network.kubevirt.io/addresses";
/// Annotation on a claim with the value `true`: Patchbay creates and deletes it as its virtual machine needs. A claim without
/// it belongs to another controller.
pub const MANAGED_ANNOTATION: &str = "patchbay.dev/managed";
/// Annotation on a claim that a user sets to `true`: a claim without a virtual machine is kept for good.
pub const KEEP_ANNOTATION: &str = "patchbay.dev/keep";
/// Annotation on a claim: its [`RecordedAddresses`]. Backups drop the status of an object, and keep its annotations.
pub const RECORD_ANNOTATION: &str = "patchbay.dev/addresses";
/// Annotation on a pod: the claim of its primary network, as ipam-extensions writes it for OVN-Kubernetes.
pub const PRIMARY_CLAIM_ANNOTATION: &str = "k8s.ovn.org/primary-udn-ipamclaim";
/// The MutatingWebhookConfigurations of ipam-extensions and of its earlier name. While one exists, it counts as running.
pub const IPAM_EXTENSIONS_WEBHOOKS: [&str; 2] = [
    "kubevirt-ipam-controller-mutating-webhook-configuration",
    "kubevirt-ipam-claims-mutating-webhook-configuration",
];
/// The key of a network selection element that names the claim.
pub const CLAIM_KEY: &str = "ipam-claim-reference";
/// The condition of a claim: whether it has addresses.
pub const IPS_ALLOCATED: &str = "IPsAllocated";

/// What a claim is for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::CustomResource, schemars::JsonSchema))]
#[cfg_attr(
    feature = "kube",
    kube(
        group = "k8s.cni.cncf.io",
        version = "v1alpha1",
        kind = "IPAMClaim",
        plural = "ipamclaims",
        singular = "ipamclaim",
        namespaced,
        status = "IPAMClaimStatus",
        derive = "PartialEq",
        doc = "IPAMClaim is the Schema for the IPAMClaim API.",
        printcolumn = r#"{"name": "Network", "type": "string", "jsonPath": ".spec.network", "description": "Name of the network's CNI configuration"}"#,
        printcolumn = r#"{"name": "Addresses", "type": "string", "jsonPath": ".status.ips", "description": "Addresses that are reserved for the claim"}"#,
        printcolumn = r#"{"name": "Pod", "type": "string", "jsonPath": ".status.ownerPod.name", "description": "Pod that has the addresses, or had them last"}"#,
        printcolumn = r#"{"name": "State", "type": "string", "jsonPath": ".status.conditions[?(@.type==\"IPsAllocated\")].reason", "description": "Whether the claim has addresses, and if not, why"}"#,
        printcolumn = r#"{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
    )
)]
pub struct IPAMClaimSpec {
    /// The network name for which this persistent allocation was created.
    #[cfg_attr(feature = "kube", schemars(length(max = 253)))]
    pub network: String,
    /// The pod interface name for which this allocation was created.
    #[cfg_attr(feature = "kube", schemars(length(max = 63)))]
    pub interface: String,
}

/// The addresses of a claim.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct IPAMClaimStatus {
    /// The list of IP addresses (v4, v6) that were allocated for the pod interface.
    pub ips: Vec<String>,
    /// The pod that has the addresses, or had them last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner_pod: Option<OwnerPod>,
    /// The conditions of the claim.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(transform = list_schema::keyed_map("type")))]
    pub conditions: Vec<Condition>,
}

/// The pod that has the addresses of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(schemars::JsonSchema))]
pub struct OwnerPod {
    /// The name of the pod.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 253)))]
    pub name: String,
}

/// The addresses that a claim got. Users write annotations: this is a request, and no proof.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedAddresses {
    /// The UID of the claim that got them. A claim that was restored from a backup has another one.
    pub uid: String,
    /// One of each family.
    pub ips: Vec<IpNet>,
}

impl RecordedAddresses {
    /// Reads the annotation. None if it is not valid, or has two addresses of one family.
    pub fn read(annotation: &str) -> Option<Self> {
        let read: Self = serde_json::from_str(annotation).ok()?;
        let count = |v4: bool| read.ips.iter().filter(|net| net.addr().is_ipv4() == v4).count();
        (count(true) <= 1 && count(false) <= 1).then_some(read)
    }

    /// The value of the annotation.
    pub fn text(&self) -> String {
        serde_json::to_string(self).expect("strings can always be serialized")
    }

    /// The addresses without prefix lengths.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.ips.iter().map(IpNet::addr)
    }
}

/// What the annotations of a claim say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClaimAnnotations {
    /// [`MANAGED_ANNOTATION`]
    pub managed: bool,
    /// [`KEEP_ANNOTATION`]
    pub keep: bool,
    /// [`RECORD_ANNOTATION`]
    pub recorded: Option<RecordedAddresses>,
}

impl ClaimAnnotations {
    /// Reads the annotations of a claim. An invalid one says nothing.
    pub fn read(annotations: Option<&BTreeMap<String, String>>) -> Self {
        let get = |key| annotations.and_then(|all| all.get(key)).map(String::as_str);
        Self {
            managed: get(MANAGED_ANNOTATION) == Some("true"),
            keep: get(KEEP_ANNOTATION) == Some("true"),
            recorded: get(RECORD_ANNOTATION).and_then(RecordedAddresses::read),
        }
    }
}

/// The reason of the condition [`IPS_ALLOCATED`]. The standard has one more, about MAC addresses, which only
/// OVN-Kubernetes uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AllocationReason {
    /// The claim has addresses.
    SuccessfulAllocation,
    /// The network has no free address.
    SubnetExhausted,
    /// A requested address is in use.
    IpAddressConflict,
    /// Anything else, which the message explains.
    InternalError,
}

impl AllocationReason {
    /// The text of the reason, also of the event.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::SuccessfulAllocation => "SuccessfulAllocation",
            Self::SubnetExhausted => "SubnetExhausted",
            Self::IpAddressConflict => "IPAddressConflict",
            Self::InternalError => "InternalError",
        }
    }
}

/// The CRD that the controller creates if there is none: upstream's schema with columns and lengths.
#[cfg(feature = "kube")]
pub fn crd() -> k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition {
    use kube::CustomResourceExt as _;

    IPAMClaim::crd()
}

#[cfg(test)]
#[cfg(feature = "kube")]
mod tests {
    use serde_json::json;

    #[test]
    fn the_crd_has_the_fields_of_upstream() {
        let crd = serde_json::to_value(super::crd()).unwrap();
        assert_eq!(crd["metadata"]["name"], super::CRD_NAME);
        assert_eq!(crd["spec"]["scope"], "Namespaced");
        let version = &crd["spec"]["versions"][0];
        assert_eq!(
            (&version["name"], &version["subresources"]),
            (&json!("v1alpha1"), &json!({"status": {}}))
        );
        let schema = &version["schema"]["openAPIV3Schema"]["properties"];
        assert_eq!(schema["spec"]["required"], json!(["interface", "network"]));
        let spec = &schema["spec"]["properties"];
        assert_eq!(
            (&spec["network"]["maxLength"], &spec["interface"]["maxLength"]),
            (&json!(253), &json!(63))
        );
        assert_eq!(schema["status"]["required"], json!(["ips"]));
        let status = &schema["status"]["properties"];
        assert_eq!(status["ips"]["items"]["type"], "string");
        assert_eq!(status["ownerPod"]["required"], json!(["name"]));
        assert_eq!(status["conditions"]["x-kubernetes-list-map-keys"], json!(["type"]));
        let columns = version["additionalPrinterColumns"].as_array().unwrap();
        let names: Vec<_> = columns.iter().map(|column| column["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["Network", "Addresses", "Pod", "State", "Age"]);
    }
}
