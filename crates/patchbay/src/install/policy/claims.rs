//! The policies that restrict what the controller may write for IPAMClaims.

use api::{
    GROUP,
    ipamclaim::CRD_NAME,
    ipblock::{CLAIMS_HOLDER, CLAIMS_HOLDER_UID},
    names::WEBHOOK_CONFIGURATION,
};
use serde_json::{Value, json};

use super::{AdmissionPolicy, InstallOptions, is_user};

/// The policy for CustomResourceDefinitions.
const CRD_POLICY: &str = "patchbay-controller-crds";
/// The policy for MutatingWebhookConfigurations.
const WEBHOOK_POLICY: &str = "patchbay-controller-webhooks";
/// The policy for IPBlocks that the controller writes. The policy for those of the nodes exempts the controller.
const BLOCK_POLICY: &str = "patchbay-controller-ipblocks";

/// RBAC cannot restrict create by name.
pub fn crd_policy(options: &InstallOptions) -> Vec<Value> {
    AdmissionPolicy {
        name: CRD_POLICY,
        component: "controller",
        group: "apiextensions.k8s.io",
        operations: &["CREATE"],
        resources: &["customresourcedefinitions"],
        match_condition: ("controller", is_user(&options.controller_user())),
        variables: json!([]),
        validations: json!([{
            "expression": format!("object.metadata.name == '{CRD_NAME}'"),
            "reason": "Forbidden",
            "message": format!(
                "CustomResourceDefinition rejected: the controller may only create {CRD_NAME}; create others as another \
                user."
            ),
        }]),
    }
    .objects()
}

/// RBAC cannot restrict create by name.
pub fn webhook_policy(options: &InstallOptions) -> Vec<Value> {
    AdmissionPolicy {
        name: WEBHOOK_POLICY,
        component: "controller",
        group: "admissionregistration.k8s.io",
        operations: &["CREATE"],
        resources: &["mutatingwebhookconfigurations"],
        match_condition: ("controller", is_user(&options.controller_user())),
        variables: json!([]),
        validations: json!([{
            "expression": format!("object.metadata.name == '{WEBHOOK_CONFIGURATION}'"),
            "reason": "Forbidden",
            "message": format!(
                "MutatingWebhookConfiguration rejected: the controller may only create {WEBHOOK_CONFIGURATION}; create \
                others as another user."
            ),
        }]),
    }
    .objects()
}

/// The controller allocates addresses only from its own blocks: those of a node belong to the node's daemon.
pub fn block_policy(options: &InstallOptions) -> Vec<Value> {
    AdmissionPolicy {
        name: BLOCK_POLICY,
        component: "controller",
        group: GROUP,
        operations: &["CREATE", "UPDATE"],
        resources: &["ipblocks", "ipblocks/status"],
        match_condition: ("controller", is_user(&options.controller_user())),
        variables: json!([
            {"name": "blocks", "expression": "[object, oldObject].filter(block, block != null)"},
        ]),
        validations: json!([{
            "expression": format!(
                "variables.blocks.all(block, block.spec.holder.node == '{CLAIMS_HOLDER}' && \
                block.spec.holder.uid == '{CLAIMS_HOLDER_UID}')"
            ),
            "reason": "Forbidden",
            "message": format!(
                "IPBlock rejected: the controller may only create and change blocks of {CLAIMS_HOLDER}; it may delete \
                others."
            ),
        }]),
    }
    .objects()
}
