//! What `plug` and `unplug` read of a pod, and the patch of its networks annotation.

use std::fmt::Write as _;

use anyhow::{Context as _, bail};
use api::{
    attachments::{self, ATTACHMENTS_ANNOTATION, Attachment, CONFIRM_ANNOTATION},
    network_status::{NETWORK_STATUS_ANNOTATION, NetworkStatus, NetworkStatusList},
    selection::NETWORKS_ANNOTATION,
};
use json_patch::{AddOperation, Patch, PatchOperation, RemoveOperation, TestOperation, jsonptr::PointerBuf};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::progress::Goal;

/// A pod, as one response of the API server shows it.
#[derive(Debug, Clone, Default)]
pub struct PodView {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    /// Empty until the pod is scheduled.
    pub node: String,
    /// Whether the pod has any annotation.
    pub annotated: bool,
    /// The networks annotation.
    pub networks: Option<String>,
    /// The entries of network-status.
    pub statuses: Vec<NetworkStatus>,
    /// The entries of patchbay.dev/attachments.
    pub attachments: Vec<Attachment>,
    /// Whether the annotations report about the last edit of the pod.
    pub confirmed: bool,
    /// Why its interfaces cannot be changed now.
    pub ended: Option<String>,
}

impl PodView {
    pub fn read(pod: &Pod) -> anyhow::Result<Self> {
        let metadata = &pod.metadata;
        let namespace = metadata.namespace.clone().unwrap_or_default();
        let name = metadata.name.clone().unwrap_or_default();
        let annotation = |key: &str| metadata.annotations.as_ref()?.get(key).map(String::as_str);
        // A pod whose status another program damaged can still be edited: the daemon reports the damage.
        let statuses = NetworkStatusList::parse(annotation(NETWORK_STATUS_ANNOTATION)).unwrap_or_default();
        let statuses = statuses.entries().iter().filter_map(|entry| entry.status().cloned()).collect();
        let networks = annotation(NETWORKS_ANNOTATION);
        let reported = attachments::confirmed_networks(annotation(ATTACHMENTS_ANNOTATION));
        let edit = annotation(CONFIRM_ANNOTATION);
        Ok(Self {
            confirmed: edit
                .is_some_and(|edit| reported == Some(attachments::networks_digest(edit, networks))),
            uid: metadata.uid.clone().with_context(|| format!("pod {namespace}/{name} has no UID"))?,
            node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default(),
            annotated: metadata.annotations.as_ref().is_some_and(|all| !all.is_empty()),
            networks: networks.map(str::to_owned),
            statuses,
            attachments: attachments::parse(annotation(ATTACHMENTS_ANNOTATION)).unwrap_or_default(),
            ended: why_not_running(pod),
            namespace,
            name,
        })
    }

    /// Fails unless the interfaces of the pod can be changed now.
    pub fn check_runs(&self) -> anyhow::Result<()> {
        match &self.ended {
            Some(reason) => bail!("pod {}/{} {reason}", self.namespace, self.name),
            None => Ok(()),
        }
    }

    /// The report of the daemon about the interface.
    pub fn attachment(&self, goal: &Goal) -> Option<&Attachment> {
        let (network, interface) = goal.names();
        let ours = |one: &&Attachment| one.interface == interface && one.network == network;
        self.attachments.iter().find(ours)
    }

    /// The entry of network-status for the interface.
    pub fn status(&self, goal: &Goal) -> Option<&NetworkStatus> {
        let (network, interface) = goal.names();
        self.statuses.iter().find(|status| status.interface == interface && status.name == network)
    }

    /// The addresses of the interface, to continue a sentence.
    pub fn addresses(&self, goal: &Goal) -> String {
        let mut text = String::new();
        let Some(status) = self.status(goal) else { return text };
        if !status.ips.is_empty() {
            let _ = write!(text, ", addresses {}", status.ips.join(", "));
        }
        if !status.mac.is_empty() {
            let _ = write!(text, ", MAC address {}", status.mac);
        }
        text
    }

    /// Sets the networks annotation of this pod, if it still has the value that was read, and asks the daemon to confirm the
    /// edit of this name. `None` removes it.
    pub fn patch(&self, new: Option<&str>, edit: &str) -> Patch {
        let annotations = || PointerBuf::from_tokens(["metadata", "annotations"]);
        let annotation = |name| PointerBuf::from_tokens(["metadata", "annotations", name]);
        let key = || annotation(NETWORKS_ANNOTATION);
        let test = |path, value| PatchOperation::Test(TestOperation { path, value });
        let add = |path, value| PatchOperation::Add(AddOperation { path, value });
        let mut operations =
            vec![test(PointerBuf::from_tokens(["metadata", "uid"]), Value::from(self.uid.as_str()))];
        // The API server compares a missing value with null; a missing parent fails the test.
        match (&self.networks, self.annotated) {
            (None, false) => operations.push(test(annotations(), Value::Null)),
            (old, _) => operations.push(test(key(), json!(old))),
        }
        if !self.annotated {
            operations.push(add(annotations(), json!({})));
        }
        match new {
            Some(text) => operations.push(add(key(), Value::from(text))),
            None if self.networks.is_none() => {}
            None => operations.push(PatchOperation::Remove(RemoveOperation { path: key() })),
        }
        operations.push(add(annotation(CONFIRM_ANNOTATION), Value::from(edit)));
        Patch(operations)
    }
}

fn why_not_running(pod: &Pod) -> Option<String> {
    let host_network = pod.spec.as_ref().and_then(|spec| spec.host_network) == Some(true);
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending");
    if pod.metadata.deletion_timestamp.is_some() {
        Some("is being deleted: its interfaces cannot be changed any more".to_owned())
    } else if host_network {
        Some("uses the network of its node (hostNetwork): it cannot have interfaces of its own".to_owned())
    } else if phase != "Running" {
        Some(format!("is {phase}, not Running: its interfaces can be changed only while it runs"))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(mut object: Value) -> PodView {
        object["metadata"]["namespace"] = json!("default");
        object["metadata"]["name"] = json!("web");
        object["metadata"]["uid"] = json!("u");
        PodView::read(&serde_json::from_value(object).unwrap()).unwrap()
    }

    fn running(annotations: Value) -> PodView {
        pod(json!({
            "metadata": {"annotations": annotations},
            "spec": {"nodeName": "n", "containers": []},
            "status": {"phase": "Running"},
        }))
    }

    #[test]
    fn the_patch_tests_the_uid_and_the_old_annotation() {
        let patch = |pod: &PodView, new: Option<&str>| json!(pod.patch(new, "e2"));
        let key = "/metadata/annotations/k8s.v1.cni.cncf.io~1networks";
        let uid = json!({"op": "test", "path": "/metadata/uid", "value": "u"});
        let ask = json!({"op": "add", "path": "/metadata/annotations/patchbay.dev~1confirm-networks", "value": "e2"});
        assert_eq!(
            patch(&running(json!({"k8s.v1.cni.cncf.io/networks": "blue"})), Some("blue,red")),
            json!([
                uid,
                {"op": "test", "path": key, "value": "blue"},
                {"op": "add", "path": key, "value": "blue,red"},
                ask,
            ])
        );
        assert_eq!(
            patch(&running(json!({"a": "b"})), Some("blue")),
            json!([
                uid,
                {"op": "test", "path": key, "value": null},
                {"op": "add", "path": key, "value": "blue"},
                ask,
            ])
        );
        assert_eq!(
            patch(&running(Value::Null), Some("blue")),
            json!([
                uid,
                {"op": "test", "path": "/metadata/annotations", "value": null},
                {"op": "add", "path": "/metadata/annotations", "value": {}},
                {"op": "add", "path": key, "value": "blue"},
                ask,
            ])
        );
        assert_eq!(
            patch(&running(json!({"patchbay.dev/confirm-networks": "e1"})), None),
            json!([uid, {"op": "test", "path": key, "value": null}, ask])
        );
    }

    #[test]
    fn a_report_is_confirmed_if_it_is_about_the_last_edit() {
        let edited = |edit: Option<&str>, networks: &str, report: Value| {
            let mut annotations = json!({"k8s.v1.cni.cncf.io/networks": networks, "patchbay.dev/attachments": report.to_string()});
            if let Some(edit) = edit {
                annotations["patchbay.dev/confirm-networks"] = json!(edit);
            }
            running(annotations)
        };
        let pod = |networks: &str, report: Value| edited(Some("e1"), networks, report);
        let digest = attachments::networks_digest("e1", Some("blue"));
        let entry = json!({"network": "default/blue", "interface": "net1", "state": "Attached"});
        for (networks, report, confirmed) in [
            ("blue", json!([entry, {"networksDigest": digest}]), true),
            ("blue", json!([{"networksDigest": digest}]), true),
            ("blue,red", json!([entry, {"networksDigest": digest}]), false),
            ("blue", json!([entry]), false),
            ("blue", json!("nonsense"), false),
        ] {
            assert_eq!(pod(networks, report).confirmed, confirmed, "{networks}");
        }
        // Changed and changed back: the report is from before.
        for edit in [Some("e2"), None] {
            assert!(!edited(edit, "blue", json!([entry, {"networksDigest": digest}])).confirmed);
        }
    }

    #[test]
    fn only_a_running_pod_with_its_own_network_namespace_can_be_edited() {
        assert!(running(json!({})).check_runs().is_ok());
        for (object, expected) in [
            (json!({"metadata": {}}), "is Pending, not Running"),
            (json!({"metadata": {}, "status": {"phase": "Succeeded"}}), "is Succeeded"),
            (
                json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "status": {"phase": "Running"}}),
                "is being deleted",
            ),
            (
                json!({"metadata": {}, "spec": {"hostNetwork": true, "containers": []}, "status": {"phase": "Running"}}),
                "hostNetwork",
            ),
        ] {
            let error = pod(object).check_runs().unwrap_err().to_string();
            assert!(error.starts_with("pod default/web ") && error.contains(expected), "{error}");
        }
    }

    #[test]
    fn damaged_annotations_of_other_programs_are_ignored() {
        let pod = running(
            json!({"k8s.v1.cni.cncf.io/network-status": "[{", "patchbay.dev/attachments": "nonsense"}),
        );
        assert!(pod.statuses.is_empty() && pod.attachments.is_empty());
    }
}
