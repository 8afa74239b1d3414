//! The flags of `patchbay controller`.

use std::{
    net::{Ipv6Addr, SocketAddr},
    time::Duration,
};

use api::{
    duration,
    names::{HEALTH_PORT, WEBHOOK_PORT, WEBHOOK_SERVICE},
};
use plan::{certs::MAX_CA_LIFETIME, lease::MAX_LEASE_DURATION};

/// Settings of one replica. Every flag can also be set by an environment variable.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
pub struct Args {
    /// Namespace of the Lease, the certificate Secret and the webhook Service
    #[arg(long, env = "POD_NAMESPACE")]
    pub namespace: String,

    /// Unique name of this replica, written into the Lease when it leads
    #[arg(long, env = "POD_NAME")]
    pub identity: String,

    /// How long a Lease must stay unchanged before another replica acquires it
    #[arg(long, env = "PATCHBAY_LEASE_DURATION", default_value = "10s", value_parser = duration::parse)]
    pub lease_duration: Duration,

    /// How often the leader renews its Lease
    #[arg(long, env = "PATCHBAY_LEASE_RENEW", default_value = "2s", value_parser = duration::parse)]
    pub lease_renew: Duration,

    /// How often the other replicas try to acquire the Lease
    #[arg(long, env = "PATCHBAY_LEASE_RETRY_PERIOD", default_value = "2s", value_parser = duration::parse)]
    pub lease_retry_period: Duration,

    /// Address of /healthz and /readyz, served over plain HTTP
    #[arg(long, env = "PATCHBAY_HEALTH_ADDR", default_value_t = any_address(HEALTH_PORT))]
    pub health_addr: SocketAddr,

    /// Address of the admission webhook and /metrics, served over TLS
    #[arg(long, env = "PATCHBAY_WEBHOOK_ADDR", default_value_t = any_address(WEBHOOK_PORT))]
    pub webhook_addr: SocketAddr,

    /// Name of the Service through which the API server calls the webhook
    #[arg(long, env = "PATCHBAY_WEBHOOK_SERVICE", default_value = WEBHOOK_SERVICE)]
    pub webhook_service: String,

    /// Lifetime of the webhook's CA certificate; renewed after two thirds of it
    #[arg(long, env = "PATCHBAY_CA_LIFETIME", default_value = "365d", value_parser = duration::parse)]
    pub ca_lifetime: Duration,

    /// Lifetime of the webhook's serving certificate; renewed after two thirds of it
    #[arg(long, env = "PATCHBAY_LEAF_LIFETIME", default_value = "90d", value_parser = duration::parse)]
    pub leaf_lifetime: Duration,

    /// How long a new CA must be in the webhook configurations before it signs a serving certificate
    #[arg(long, env = "PATCHBAY_CA_PROPAGATION_DELAY", default_value = "5s", value_parser = duration::parse)]
    pub ca_propagation_delay: Duration,

    /// How long to keep serving after SIGTERM, until API servers stop sending new requests to this replica
    #[arg(long, env = "PATCHBAY_DRAIN", default_value = "3s", value_parser = duration::parse)]
    pub drain: Duration,

    /// Keep the IPAMClaim of an interface that was unplugged from a virtual machine, with its addresses
    #[arg(long, env = "PATCHBAY_KEEP_UNPLUGGED_CLAIMS")]
    pub keep_unplugged_claims: bool,

    /// Refer pods to their IPAMClaim also on OVN-Kubernetes networks whose NetworkAttachmentDefinition is in another
    /// namespace
    #[arg(long, env = "PATCHBAY_REFERENCE_FOREIGN_NADS")]
    pub reference_foreign_nads: bool,

    /// Namespace of the NetworkAttachmentDefinition `default` for primary networks. Has no effect yet
    #[arg(long, env = "PATCHBAY_DEFAULT_NETWORK_NAD_NAMESPACE", default_value = "ovn-kubernetes")]
    pub default_network_nad_namespace: String,
}

/// Invalid flags.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("--{0} is empty; set the flag or its environment variable")]
    Empty(&'static str),
    #[error("--lease-duration must be between 1s and {}s", MAX_LEASE_DURATION.as_secs())]
    LeaseDuration,
    #[error(
        "--lease-renew and --lease-retry-period must be greater than 0 and at most a third of --lease-duration"
    )]
    LeaseInterval,
    #[error(
        "--leaf-lifetime must be at least 3s; --ca-lifetime must be at least --leaf-lifetime and at most 3650d"
    )]
    Lifetime,
    #[error(
        "--ca-propagation-delay must be at most a twelfth of --leaf-lifetime, so that certificates are renewed in time"
    )]
    CaPropagationDelay,
    #[error("--drain must be at most {}s, so that the replica stops within 10s", MAX_DRAIN.as_secs())]
    Drain,
}

const MAX_DRAIN: Duration = Duration::from_secs(5);

fn any_address(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))
}

impl Args {
    /// Checks that the flags are valid together.
    pub fn check(&self) -> Result<(), Error> {
        let required = [
            ("namespace", &self.namespace),
            ("identity", &self.identity),
            ("webhook-service", &self.webhook_service),
        ];
        if let Some((name, _)) = required.into_iter().find(|(_, text)| text.trim().is_empty()) {
            return Err(Error::Empty(name));
        }
        if self.lease_duration < Duration::from_secs(1) || self.lease_duration > MAX_LEASE_DURATION {
            return Err(Error::LeaseDuration);
        }
        let intervals = [self.lease_renew, self.lease_retry_period];
        if intervals.iter().any(|interval| interval.is_zero() || *interval > self.lease_duration / 3) {
            return Err(Error::LeaseInterval);
        }
        let ca_too_short = self.ca_lifetime < self.leaf_lifetime;
        if self.leaf_lifetime < Duration::from_secs(3) || ca_too_short || self.ca_lifetime > MAX_CA_LIFETIME {
            return Err(Error::Lifetime);
        }
        if self.ca_propagation_delay > self.leaf_lifetime / 12 {
            return Err(Error::CaPropagationDelay);
        }
        if self.drain > MAX_DRAIN {
            return Err(Error::Drain);
        }
        Ok(())
    }

    /// The DNS name by which API servers call the webhook.
    pub fn webhook_dns_name(&self) -> String {
        format!("{}.{}.svc", self.webhook_service, self.namespace)
    }
}

#[cfg(test)]
pub mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct TestCommand {
        #[command(flatten)]
        args: Args,
    }

    pub fn args(extra: &[&str]) -> Args {
        let required = ["controller", "--namespace", "ns", "--identity", "a"];
        TestCommand::try_parse_from(required.iter().chain(extra)).unwrap().args
    }

    #[test]
    fn the_defaults_are_valid() {
        assert_eq!(args(&[]).check(), Ok(()));
    }

    #[test]
    fn short_durations_for_tests_are_valid() {
        let short = [
            "--ca-lifetime",
            "30s",
            "--leaf-lifetime",
            "12s",
            "--ca-propagation-delay",
            "1s",
            "--lease-duration",
            "3s",
        ];
        let intervals = ["--lease-renew", "500ms", "--lease-retry-period", "500ms"];
        assert_eq!(args(&[short.as_slice(), &intervals].concat()).check(), Ok(()));
    }

    #[test]
    fn invalid_combinations_are_rejected() {
        let cases: [(&[&str], Error); 9] = [
            (&["--webhook-service", ""], Error::Empty("webhook-service")),
            (&["--lease-duration", "999ms"], Error::LeaseDuration),
            (&["--lease-duration", "61s"], Error::LeaseDuration),
            (&["--lease-renew", "4s"], Error::LeaseInterval),
            (&["--lease-retry-period", "0s"], Error::LeaseInterval),
            (&["--leaf-lifetime", "366d"], Error::Lifetime),
            (&["--ca-lifetime", "99999d"], Error::Lifetime),
            (&["--leaf-lifetime", "59s"], Error::CaPropagationDelay),
            (&["--drain", "6s"], Error::Drain),
        ];
        for (extra, error) in cases {
            assert_eq!(args(extra).check(), Err(error), "{extra:?}");
        }
    }

    #[test]
    fn the_webhook_dns_name_is_the_services() {
        assert_eq!(args(&[]).webhook_dns_name(), "patchbay-webhook.ns.svc");
    }
}
