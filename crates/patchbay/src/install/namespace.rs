//! The namespace of Patchbay.

use serde_json::{Value, json};

use super::InstallOptions;

/// The Namespace. Its pod security level is `privileged`: the node daemon uses the host network and host paths.
pub fn namespace(options: &InstallOptions) -> Value {
    let mut labels = super::labels("namespace");
    for mode in ["enforce", "audit", "warn"] {
        labels[format!("pod-security.kubernetes.io/{mode}")] = json!("privileged");
    }
    json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": options.namespace, "labels": labels},
    })
}
