//! Logs of the two programs: JSON lines on stderr.

use std::io;

use tracing_subscriber::EnvFilter;

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
        .with_env_filter(EnvFilter::new(filter));
    // Fails only when a subscriber is there already.
    let _ = subscriber.try_init();
}
