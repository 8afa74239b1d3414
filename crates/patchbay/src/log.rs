//! Logs of the two programs: JSON lines on stderr.

use std::{borrow::Cow, io};

use tracing_subscriber::EnvFilter;

/// Logs an ERROR for every call that fails, beside the one line of whoever made the call and knows whether it matters.
const ECHO: &str = "kube_client::client::builder";

/// What to log, and a program's own flags.
#[derive(Debug, clap::Args)]
pub struct Logged<A: clap::Args> {
    /// What to log: a level, or a filter such as `info,node=debug`.
    #[arg(long, env = "PATCHBAY_LOG", value_name = "FILTER", default_value = "info", value_parser = filter)]
    pub log: String,

    #[command(flatten)]
    pub args: A,
}

/// Checks a filter at the door; the text is kept, because it is also written into manifests.
pub fn filter(text: &str) -> Result<String, String> {
    EnvFilter::try_new(text).map(|_| text.to_owned()).map_err(|error| error.to_string())
}

/// Starts logging. A second call changes nothing.
pub fn start(filter: &str) {
    let subscriber = tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_span_list(false)
        .with_writer(io::stderr)
        .with_env_filter(EnvFilter::new(without_echo(filter)));
    // Fails only when a subscriber is there already.
    let _ = subscriber.try_init();
}

/// Leaves out what says everything twice, unless somebody asks for it by name.
fn without_echo(filter: &str) -> Cow<'_, str> {
    if filter.contains("kube_client") {
        Cow::Borrowed(filter)
    } else {
        Cow::Owned(format!("{filter},{ECHO}=off"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_echo_of_failed_calls_is_silent_unless_it_is_asked_for() {
        for (filter, wanted) in [
            ("info", "info,kube_client::client::builder=off"),
            ("debug,node=trace", "debug,node=trace,kube_client::client::builder=off"),
            ("info,kube_client=debug", "info,kube_client=debug"),
            ("kube_client::client::builder=error", "kube_client::client::builder=error"),
        ] {
            assert_eq!(without_echo(filter), wanted);
            assert!(EnvFilter::try_new(without_echo(filter)).is_ok(), "{filter}");
        }
    }
}
