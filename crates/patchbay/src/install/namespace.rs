//! The namespace that everything lives in.

use serde_json::{Value, json};

use super::Options;

/// The Namespace. Pod security is off in it because the node daemon works on its host.
pub fn namespace(options: &Options) -> Value {
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
