//! The flags of `patchbay install` that configure IPAMClaims in the controller.

use super::parse_dns_label;

/// Flags for the controller. A flag that is not set is not passed on, so that the controller's default applies.
#[derive(Debug, Default, clap::Args)]
pub struct ClaimOptions {
    /// Keep the IPAMClaim of an interface that was unplugged from a virtual machine, with its addresses
    #[arg(long)]
    pub keep_unplugged_claims: bool,

    /// Refer pods to their IPAMClaim also on OVN-Kubernetes networks whose NetworkAttachmentDefinition is in another
    /// namespace
    #[arg(long)]
    pub reference_foreign_nads: bool,

    /// Namespace of the NetworkAttachmentDefinition `default` for primary networks [default: the controller's]
    #[arg(long, value_name = "NAMESPACE", value_parser = parse_dns_label)]
    pub default_network_nad_namespace: Option<String>,
}

impl ClaimOptions {
    /// The arguments of the controller.
    pub fn args(&self) -> Vec<String> {
        let Self { keep_unplugged_claims, reference_foreign_nads, default_network_nad_namespace } = self;
        let flag = |set: bool, name: &str| set.then(|| format!("--{name}"));
        let namespace = default_network_nad_namespace.as_ref();
        [
            flag(*keep_unplugged_claims, "keep-unplugged-claims"),
            flag(*reference_foreign_nads, "reference-foreign-nads"),
            namespace.map(|name| format!("--default-network-nad-namespace={name}")),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}
