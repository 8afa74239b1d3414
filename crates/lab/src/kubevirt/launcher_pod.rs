//! What a virt-handler knows about a launcher pod.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde::Deserialize;

const NETWORK_STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
/// The label with the UID of the VirtualMachineInstance.
const CREATED_BY: &str = "kubevirt.io/created-by";

/// A launcher pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LauncherPod {
    pub uid: String,
    pub name: String,
    /// The UID of its VirtualMachineInstance.
    pub instance: String,
    pub node: String,
    pub host_ip: String,
    pub state: LauncherState,
    pub networks: Vec<PodNetwork>,
}

/// The state of the container with the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LauncherState {
    Starting,
    /// All containers are ready.
    Running,
    /// The guest shut down.
    Succeeded,
    Failed,
    /// The pod does not exist any more.
    Deleted,
}

/// An element of the annotation network-status.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct PodNetwork {
    #[serde(default)]
    pub interface: String,
    #[serde(default)]
    pub ips: Vec<String>,
    #[serde(default)]
    pub mac: String,
    #[serde(default)]
    pub default: bool,
}

impl LauncherPod {
    /// Reads a pod; `None` if it is not a launcher.
    pub fn read(pod: &Pod) -> Option<Self> {
        let instance = pod.labels().get(CREATED_BY)?.clone();
        let annotation = pod.annotations().get(NETWORK_STATUS);
        Some(Self {
            uid: pod.uid().unwrap_or_default(),
            name: pod.name_any(),
            instance,
            node: pod.spec.as_ref().and_then(|s| s.node_name.clone()).unwrap_or_default(),
            host_ip: pod.status.as_ref().and_then(|s| s.host_ip.clone()).unwrap_or_default(),
            state: state(pod),
            networks: annotation.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default(),
        })
    }

    pub fn has_ended(&self) -> bool {
        matches!(self.state, LauncherState::Succeeded | LauncherState::Failed | LauncherState::Deleted)
    }
}

fn state(pod: &Pod) -> LauncherState {
    let Some(status) = &pod.status else { return LauncherState::Starting };
    match status.phase.as_deref() {
        Some("Succeeded") => return LauncherState::Succeeded,
        Some("Failed") => return LauncherState::Failed,
        _ => {}
    }
    let containers = status.container_statuses.as_deref().unwrap_or_default();
    let compute = containers.iter().find(|c| c.name == "compute");
    if let Some(end) = compute.and_then(|c| c.state.as_ref()?.terminated.as_ref()) {
        return if end.exit_code == 0 { LauncherState::Succeeded } else { LauncherState::Failed };
    }
    // The pod's own condition says less: virt-controller opens the readiness gate only of the pod with the guest.
    let ready = compute.is_some() && containers.iter().all(|c| c.ready);
    if ready { LauncherState::Running } else { LauncherState::Starting }
}
