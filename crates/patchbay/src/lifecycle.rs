//! The cluster that a program works in: how it is reached, and how it says that it is time to go.

use std::{future::Future, pin::pin, time::Duration};

use anyhow::Context;
use kube::{Client, Config};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::info;

const CONNECT: Duration = Duration::from_secs(10);
/// How long a connection may be silent. A little more than the minute after which the programs' watches are renewed: a
/// network that swallows everything without a word is then noticed.
const SILENCE: Duration = Duration::from_secs(75);

/// Runs a program with a client for the cluster it finds itself in, and asks it to stop at SIGTERM or SIGINT.
pub async fn run<P, E>(name: &str, program: impl FnOnce(Client, CancellationToken) -> P) -> anyhow::Result<()>
where
    P: Future<Output = Result<(), E>>,
    anyhow::Error: From<E>,
{
    let mut terminate = signal(SignalKind::terminate()).context("listen for signals")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for signals")?;
    let config = Config::infer().await.context("find the API server: run inside a pod, or set KUBECONFIG")?;
    let client = Client::try_from(tuned(config, name)?).context("make a client for the API server")?;

    let stop = CancellationToken::new();
    let mut program = pin!(program(client, stop.clone()));
    tokio::select! {
        result = &mut program => return Ok(result?),
        _ = terminate.recv() => info!(signal = "SIGTERM", "asked to stop"),
        _ = interrupt.recv() => info!(signal = "SIGINT", "asked to stop"),
    }
    stop.cancel();
    Ok(program.await?)
}

/// No call is ever waited for without end, and who calls is told to the API server, for its audit log and its limits.
fn tuned(mut config: Config, name: &str) -> anyhow::Result<Config> {
    config.connect_timeout = Some(CONNECT);
    config.read_timeout = Some(SILENCE);
    // The time that a connection lay unused between two calls is no silence.
    config.reset_reader_on_write = true;
    // The client's own retries hide a struggling API server for minutes; watches and writes have their own.
    config.default_retry = false;
    let agent = format!("patchbay-{name}/{}", env!("CARGO_PKG_VERSION"));
    config.headers.push(("user-agent".parse()?, agent.parse()?));
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_waits_for_nothing_without_end_and_says_who_it_is() {
        let config = tuned(Config::new("http://127.0.0.1:1".parse().unwrap()), "node").unwrap();
        assert_eq!(config.connect_timeout, Some(Duration::from_secs(10)));
        assert_eq!(config.read_timeout, Some(Duration::from_secs(75)));
        assert!(config.reset_reader_on_write && !config.default_retry);
        let [(name, value)] = &config.headers[..] else { panic!("{:?}", config.headers) };
        assert_eq!(name.as_str(), "user-agent");
        assert_eq!(value.to_str().unwrap(), concat!("patchbay-node/", env!("CARGO_PKG_VERSION")));
    }
}
