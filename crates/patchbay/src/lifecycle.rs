//! Runs a service (controller or node daemon) with a client for its cluster, until it ends or receives a signal.

use std::{future::Future, pin::pin, time::Duration};

use anyhow::Context;
use kube::{Client, Config};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::info;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a connection may receive nothing. Slightly more than the minute after which the services renew their watches,
/// so that a network that silently drops packets is detected.
const READ_TIMEOUT: Duration = Duration::from_secs(75);

/// Runs a service with a client for its cluster, and cancels its token on SIGTERM or SIGINT.
pub async fn run<S, E>(name: &str, service: impl FnOnce(Client, CancellationToken) -> S) -> anyhow::Result<()>
where
    S: Future<Output = Result<(), E>>,
    anyhow::Error: From<E>,
{
    let mut terminate = signal(SignalKind::terminate()).context("listen for signals")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for signals")?;
    let config = Config::infer().await.context("find the API server: run inside a pod, or set KUBECONFIG")?;
    let client =
        Client::try_from(client_config(config, name)?).context("create a client for the API server")?;

    let stop = CancellationToken::new();
    let mut service = pin!(service(client, stop.clone()));
    tokio::select! {
        result = &mut service => return Ok(result?),
        _ = terminate.recv() => info!(signal = "SIGTERM", "shutting down"),
        _ = interrupt.recv() => info!(signal = "SIGINT", "shutting down"),
    }
    stop.cancel();
    Ok(service.await?)
}

/// Bounds every call, and sets the user agent, which the API server uses for audit logs and flow control.
pub fn client_config(mut config: Config, name: &str) -> anyhow::Result<Config> {
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(READ_TIMEOUT);
    // Idle time between two calls does not count.
    config.reset_reader_on_write = true;
    // The client's retries would hide an overloaded API server for minutes; watches and writes retry by themselves.
    config.default_retry = false;
    let agent = format!("patchbay-{name}/{}", env!("CARGO_PKG_VERSION"));
    config.headers.push(("user-agent".parse()?, agent.parse()?));
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_has_a_timeout_and_a_user_agent() {
        let config = client_config(Config::new("http://127.0.0.1:1".parse().unwrap()), "node").unwrap();
        assert_eq!(config.connect_timeout, Some(Duration::from_secs(10)));
        assert_eq!(config.read_timeout, Some(Duration::from_secs(75)));
        assert!(config.reset_reader_on_write && !config.default_retry);
        let [(name, value)] = &config.headers[..] else { panic!("{:?}", config.headers) };
        assert_eq!(name.as_str(), "user-agent");
        assert_eq!(value.to_str().unwrap(), concat!("patchbay-node/", env!("CARGO_PKG_VERSION")));
    }
}
