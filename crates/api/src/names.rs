//! The names by which the parts of an installation find each other: what the manifests say and the programs read.

/// The Lease of the controller that leads.
pub const LEASE_NAME: &str = "patchbay-controller";
/// The Secret with the webhook's certificates.
pub const WEBHOOK_CERT_SECRET: &str = "patchbay-webhook-certs";
/// The configuration of the webhooks.
pub const WEBHOOK_CONFIGURATION: &str = "patchbay";
/// The Service through which the API server reaches the webhooks.
pub const WEBHOOK_SERVICE: &str = "patchbay-webhook";

/// The controller's port of `/healthz` and `/readyz`, in the clear.
pub const HEALTH_PORT: u16 = 8081;
/// The controller's port of the webhooks and `/metrics`, over TLS.
pub const WEBHOOK_PORT: u16 = 9443;
/// Where the webhook judges NodeNetworks.
pub const VALIDATE_NODENETWORKS: &str = "/validate/nodenetworks";
/// Where the webhook judges BridgeNetworks.
pub const VALIDATE_BRIDGENETWORKS: &str = "/validate/bridgenetworks";
/// Where the webhook judges whatever may use a network.
pub const VALIDATE_USERS: &str = "/validate/users";

/// Where the node daemon has its sockets, on the host and in the pod.
pub const RUN_DIR: &str = "/run/patchbay";
/// Where the node daemon keeps what must survive a restart, on the host and in the pod.
pub const STATE_DIR: &str = "/var/lib/patchbay";
/// Where the node daemon's pod has the root of its host.
pub const HOST_ROOT: &str = "/host";
/// Where runtimes look for CNI plugins, on the host and in the node daemon's pod.
pub const CNI_BIN_DIR: &str = "/opt/cni/bin";
/// Where the image has the CNI plugin that is copied there.
pub const CNI_SHIM: &str = "/usr/bin/patchbay-cni";
