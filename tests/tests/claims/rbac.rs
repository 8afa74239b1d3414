//! What the token of the controller can write.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use lab::Lab;
use serde_json::{Value, json};

use super::start_controller;

const CONTROLLER: &str = "system:serviceaccount:patchbay-system:patchbay-controller";

/// Creates an object as the controller, as a dry run. Returns the error.
fn rejection(lab: &Lab, object: &Value) -> Result<String> {
    let file = lab.kubeconfig().with_file_name("rejected.json");
    fs::write(&file, object.to_string())?;
    let file = file.to_str().context("the path is not UTF-8")?;
    let outcome = lab.kubectl(&["--as", CONTROLLER, "create", "--dry-run=server", "-f", file]);
    Ok(format!("{:#}", outcome.err().with_context(|| format!("accepted: {object}"))?))
}

/// Policies limit what RBAC cannot: the name of an object that is created, and the holder of a block.
pub async fn the_controller_creates_only_its_own_crd_and_its_own_blocks(lab: Lab) -> Result<()> {
    let (_cluster, replica) = start_controller(&lab, "rights").await?;
    let outcome = async {
        let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
        let crd = json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": "others.example.com"},
            "spec": {
                "group": "example.com", "scope": "Namespaced",
                "names": {"plural": "others", "singular": "other", "kind": "Other", "listKind": "OtherList"},
                "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": schema}}],
            },
        });
        let error = rejection(&lab, &crd)?;
        ensure!(error.contains("the controller may only create ipamclaims.k8s.cni.cncf.io"), "{error}");
        let block = json!({
            "apiVersion": "patchbay.dev/v1alpha1", "kind": "IPBlock",
            "metadata": {"name": "rights.10.9.0.0-28"},
            "spec": {"network": "rights", "networkUID": "1", "cidr": "10.9.0.0/28",
                "holder": {"node": "node-1", "uid": "1"}},
        });
        let error = rejection(&lab, &block)?;
        ensure!(error.contains("may only create and change blocks of ipamclaims/patchbay"), "{error}");
        Ok(())
    };
    outcome.await.with_context(|| replica.tail())
}
