//! Names, ports and paths that the install manifests and the programs share.

/// The Lease for leader election of the controllers.
pub const LEASE_NAME: &str = "patchbay-controller";
/// The Secret with the webhook's certificates.
pub const WEBHOOK_CERT_SECRET: &str = "patchbay-webhook-certs";
/// The ValidatingWebhookConfiguration and the MutatingWebhookConfiguration.
pub const WEBHOOK_CONFIGURATION: &str = "patchbay";
/// The Service through which the API server reaches the webhooks.
pub const WEBHOOK_SERVICE: &str = "patchbay-webhook";

/// The controller's HTTP port for `/healthz` and `/readyz`.
pub const HEALTH_PORT: u16 = 8081;
/// The controller's HTTPS port for the webhooks and `/metrics`.
pub const WEBHOOK_PORT: u16 = 9443;
/// The path of the webhook that validates NodeNetworks.
pub const VALIDATE_NODENETWORKS: &str = "/validate/nodenetworks";
/// The path of the webhook that validates BridgeNetworks.
pub const VALIDATE_BRIDGENETWORKS: &str = "/validate/bridgenetworks";
/// The path of the webhook that validates pods and other objects that may use a network.
pub const VALIDATE_USERS: &str = "/validate/users";
/// The path of the webhook that adds IPAMClaims to the launcher pods of virtual machines. The same as that of
/// ipam-extensions.
pub const MUTATE_POD: &str = "/mutate-v1-pod";
/// The path of the webhook that validates pods which reference IPAMClaims.
pub const VALIDATE_CLAIMS: &str = "/validate/claims";

/// The directory of the node daemon's sockets, on the host and in its pod.
pub const RUN_DIR: &str = "/run/patchbay";
/// The directory of the node daemon's persistent state, on the host and in its pod.
pub const STATE_DIR: &str = "/var/lib/patchbay";
/// The path at which the host's root is mounted in the node daemon's pod.
pub const HOST_ROOT: &str = "/host";
/// The directory of CNI plugins, on the host and in the node daemon's pod.
pub const CNI_BIN_DIR: &str = "/opt/cni/bin";
