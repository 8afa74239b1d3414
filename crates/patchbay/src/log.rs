//! Logging of the controller and the node daemon: JSON lines on stderr.

use std::{borrow::Cow, io};

use tracing_subscriber::EnvFilter;

/// Logs an ERROR for every failed API call. The caller logs the failure too, at the level that it deserves.
const KUBE_CLIENT_ERRORS: &str = "kube_client::client::builder";

/// The log filter, and the flags of one service.
#[derive(Debug, clap::Args)]
pub struct ServiceArgs<A: clap::Args> {
    /// The log filter: a level, or a list of directives such as `info,node=debug`.
    #[arg(long, env = "PATCHBAY_LOG", value_name = "FILTER", default_value = "info", value_parser = parse_filter)]
    pub log: String,

    #[command(flatten)]
    pub args: A,
}

/// Validates a log filter. Returns the text, which `patchbay install` writes into the manifests.
pub fn parse_filter(text: &str) -> Result<String, String> {
    EnvFilter::try_new(text).map(|_| text.to_owned()).map_err(|error| error.to_string())
}

/// Installs the global subscriber. A second call has no effect.
pub fn init(filter: &str) {
    let subscriber = tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_span_list(false)
        .with_writer(io::stderr)
        .with_env_filter(EnvFilter::new(without_duplicate_errors(filter)));
    // Fails only if a subscriber is already installed.
    let _ = subscriber.try_init();
}

/// Turns off the duplicate errors of the kube client, unless the filter mentions it.
fn without_duplicate_errors(filter: &str) -> Cow<'_, str> {
    if filter.contains("kube_client") {
        Cow::Borrowed(filter)
    } else {
        Cow::Owned(format!("{filter},{KUBE_CLIENT_ERRORS}=off"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duplicate_errors_of_the_kube_client_are_off_unless_the_filter_mentions_it() {
        for (filter, expected) in [
            ("info", "info,kube_client::client::builder=off"),
            ("debug,node=trace", "debug,node=trace,kube_client::client::builder=off"),
            ("info,kube_client=debug", "info,kube_client=debug"),
            ("kube_client::client::builder=error", "kube_client::client::builder=error"),
        ] {
            assert_eq!(without_duplicate_errors(filter), expected);
            assert!(EnvFilter::try_new(without_duplicate_errors(filter)).is_ok(), "{filter}");
        }
    }
}
