//! The kind `IPAMClaim` of the multi-network standard: the addresses that a virtual machine keeps on a network.
//!
//! Other projects ship the CRD too, so it is no part of Patchbay's manifests: the controller creates it if it is absent.

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
