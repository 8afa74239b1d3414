//! The flags of `patchbay controller`.

use std::{
    net::{Ipv6Addr, SocketAddr},
    time::Duration,
};

use api::names::{HEALTH_PORT, WEBHOOK_PORT, WEBHOOK_SERVICE};
use plan::{certs::LONGEST_LIFE, lease::LONGEST_TERM};

use api::duration;

/// Settings of one replica. Every flag can also be given through the environment.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
pub struct Args {
    /// Namespace of the Lease, the certificate Secret and the webhook Service
    #[arg(long, env = "POD_NAMESPACE")]
    pub namespace: String,

    /// Name of this replica, unlike any other's
    #[arg(long, env = "POD_NAME")]
    pub identity: String,

    /// How long a Lease has to be seen unchanged before another replica takes it
    #[arg(long, env = "PATCHBAY_LEASE_TERM", default_value = "10s", value_parser = duration::parse)]
    pub lease_term: Duration,

    /// How often the leader renews its Lease
    #[arg(long, env = "PATCHBAY_LEASE_RENEW", default_value = "2s", value_parser = duration::parse)]
    pub lease_renew: Duration,

    /// How often the other replicas look at the Lease
    #[arg(long, env = "PATCHBAY_LEASE_LOOK", default_value = "2s", value_parser = duration::parse)]
    pub lease_look: Duration,

    /// Where /healthz and /readyz are served, in the clear
    #[arg(long, env = "PATCHBAY_HEALTH_ADDR", default_value_t = any(HEALTH_PORT))]
    pub health_addr: SocketAddr,

    /// Where admission and /metrics are served, over TLS
    #[arg(long, env = "PATCHBAY_WEBHOOK_ADDR", default_value_t = any(WEBHOOK_PORT))]
    pub webhook_addr: SocketAddr,

    /// Name of the Service through which the API server calls the webhook
    #[arg(long, env = "PATCHBAY_WEBHOOK_SERVICE", default_value = WEBHOOK_SERVICE)]
    pub webhook_service: String,

    /// Lifetime of the webhook's certificate authority; renewed after two thirds of it
    #[arg(long, env = "PATCHBAY_CA_LIFETIME", default_value = "365d", value_parser = duration::parse)]
    pub ca_lifetime: Duration,

    /// Lifetime of the webhook's serving certificate; renewed after two thirds of it
    #[arg(long, env = "PATCHBAY_LEAF_LIFETIME", default_value = "90d", value_parser = duration::parse)]
    pub leaf_lifetime: Duration,

    /// How long a new authority stands in the webhook configurations before a certificate is signed by it
    #[arg(long, env = "PATCHBAY_SETTLE", default_value = "5s", value_parser = duration::parse)]
    pub settle: Duration,

    /// How long to go on serving after SIGTERM, until no API server sends new requests here
    #[arg(long, env = "PATCHBAY_DRAIN", default_value = "3s", value_parser = duration::parse)]
    pub drain: Duration,
}

/// Settings that cannot work.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("--{0} is empty: set it, or the variable that {0} is read from")]
    Empty(&'static str),
    #[error("--lease-term must be between 1s and {}s", LONGEST_TERM.as_secs())]
    Term,
    #[error("--lease-renew and --lease-look must be above 0 and at most a third of --lease-term")]
    Renew,
    #[error("--leaf-lifetime must be at least 3s, and --ca-lifetime no shorter than it and at most 3650d")]
    Lifetime,
    #[error("--settle must be at most a twelfth of --leaf-lifetime, or no certificate is renewed in time")]
    Settle,
    #[error("--drain must be at most {}s: all has to end within ten", LONGEST_DRAIN.as_secs())]
    Drain,
}

const LONGEST_DRAIN: Duration = Duration::from_secs(5);

fn any(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))
}

impl Args {
    /// Whether these settings can work together.
    pub fn check(&self) -> Result<(), Error> {
        let texts = [
            ("namespace", &self.namespace),
            ("identity", &self.identity),
            ("webhook-service", &self.webhook_service),
        ];
        if let Some((name, _)) = texts.into_iter().find(|(_, text)| text.trim().is_empty()) {
            return Err(Error::Empty(name));
        }
        if self.lease_term < Duration::from_secs(1) || self.lease_term > LONGEST_TERM {
            return Err(Error::Term);
        }
        let pauses = [self.lease_renew, self.lease_look];
        if pauses.iter().any(|pause| pause.is_zero() || *pause > self.lease_term / 3) {
            return Err(Error::Renew);
        }
        let authority_too_short = self.ca_lifetime < self.leaf_lifetime;
        if self.leaf_lifetime < Duration::from_secs(3)
            || authority_too_short
            || self.ca_lifetime > LONGEST_LIFE
        {
            return Err(Error::Lifetime);
        }
        if self.settle > self.leaf_lifetime / 12 {
            return Err(Error::Settle);
        }
        if self.drain > LONGEST_DRAIN {
            return Err(Error::Drain);
        }
        Ok(())
    }

    /// The name by which API servers call the webhook.
    pub fn webhook_name(&self) -> String {
        format!("{}.{}.svc", self.webhook_service, self.namespace)
    }
}

#[cfg(test)]
pub mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    pub fn args(more: &[&str]) -> Args {
        let line = ["controller", "--namespace", "ns", "--identity", "a"];
        Line::try_parse_from(line.iter().chain(more)).unwrap().args
    }

    #[test]
    fn the_defaults_work_together() {
        assert_eq!(args(&[]).check(), Ok(()));
    }

    #[test]
    fn short_lifetimes_for_tests_work() {
        let short =
            ["--ca-lifetime", "30s", "--leaf-lifetime", "12s", "--settle", "1s", "--lease-term", "3s"];
        let pauses = ["--lease-renew", "500ms", "--lease-look", "500ms"];
        assert_eq!(args(&[short.as_slice(), &pauses].concat()).check(), Ok(()));
    }

    #[test]
    fn settings_that_cannot_work_are_refused_with_a_sentence() {
        let cases: [(&[&str], Error); 9] = [
            (&["--webhook-service", ""], Error::Empty("webhook-service")),
            (&["--lease-term", "999ms"], Error::Term),
            (&["--lease-term", "61s"], Error::Term),
            (&["--lease-renew", "4s"], Error::Renew),
            (&["--lease-look", "0s"], Error::Renew),
            (&["--leaf-lifetime", "366d"], Error::Lifetime),
            (&["--ca-lifetime", "99999d"], Error::Lifetime),
            (&["--leaf-lifetime", "59s"], Error::Settle),
            (&["--drain", "6s"], Error::Drain),
        ];
        for (more, error) in cases {
            assert_eq!(args(more).check(), Err(error), "{more:?}");
        }
    }

    #[test]
    fn the_webhook_is_known_by_its_service_in_the_namespace() {
        assert_eq!(args(&[]).webhook_name(), "patchbay-webhook.ns.svc");
    }
}
