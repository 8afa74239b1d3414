//! Starts every task of a replica and shuts them down in order.

use std::{future::Future, io, net::SocketAddr, sync::Arc, time::Duration};

use axum_server::Handle;
use kube::Client;
use plan::{certs::CertPolicy, claims::ClaimOptions};
use tokio::{task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    Args, Error,
    cache::{ClusterCache, watches::CacheFiller},
    leader::{LeaderConfig, lead},
    lease::election::{Candidate, ElectionConfig},
    metrics::Metrics,
    task::{TaskExit, named, unexpected_exit, wait_for_all},
    webhook::{
        admission,
        certs::{reload::CertReloader, rotate::WebhookService},
        server::{self, Readiness, WebhookState},
    },
};

/// From the stop until every task has ended: a pod has ten seconds, one of them for the process itself.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(9);

/// How long requests in flight may take when the listeners close.
const REQUEST_GRACE: Duration = Duration::from_secs(3);

/// Runs one replica until `stop` is cancelled. Shares nothing with other replicas in the same process.
pub async fn run(client: Client, args: Args, stop: CancellationToken) -> Result<(), Error> {
    args.check().map_err(Error::Args)?;
    let dns_name = args.webhook_dns_name();
    let Args {
        namespace,
        identity,
        lease_duration,
        lease_renew,
        lease_retry_period,
        health_addr,
        webhook_addr,
        webhook_service,
        ca_lifetime,
        leaf_lifetime,
        ca_propagation_delay,
        drain,
        keep_unplugged_claims,
        reference_foreign_nads,
        default_network_nad_namespace,
    } = args;
    info!(
        namespace,
        identity,
        ?lease_duration,
        ?lease_renew,
        ?lease_retry_period,
        %health_addr,
        %webhook_addr,
        webhook_service,
        ?ca_lifetime,
        ?leaf_lifetime,
        ?ca_propagation_delay,
        ?drain,
        keep_unplugged_claims,
        reference_foreign_nads,
        default_network_nad_namespace,
        "starting"
    );

    let readiness = Arc::new(Readiness::default());
    let metrics = Arc::new(Metrics::default());
    let cluster = ClusterCache::new();
    let reloader = CertReloader::new(dns_name.clone(), readiness.clone(), metrics.clone());
    let claims = ClaimOptions { keep_unplugged: keep_unplugged_claims, reference_foreign_nads };
    let state =
        WebhookState::new(readiness.clone(), metrics.clone(), cluster.clone(), client.clone(), claims);
    let state = Arc::new(state);
    let config = ElectionConfig {
        namespace: namespace.clone(),
        identity,
        lease_duration,
        renew_interval: lease_renew,
        retry_period: lease_retry_period,
    };
    let policy = CertPolicy { dns_name, ca_lifetime, leaf_lifetime, ca_propagation_delay };
    let candidate = Candidate::new(client.clone(), config, metrics.clone());
    let leader = LeaderConfig {
        client: client.clone(),
        service: WebhookService { namespace: namespace.clone(), name: webhook_service },
        policy,
        metrics: metrics.clone(),
        cache: cluster.clone(),
        claims,
    };
    let health = server::listen(health_addr).map_err(|source| Error::Listen { addr: health_addr, source })?;
    let webhook =
        server::listen(webhook_addr).map_err(|source| Error::Listen { addr: webhook_addr, source })?;

    let handles = [Handle::new(), Handle::new()];
    let (resign, close) = (CancellationToken::new(), CancellationToken::new());
    let mut tasks = JoinSet::new();
    let serve = server::serve_plain(health, server::health_router(readiness.clone()), handles[0].clone());
    tasks.spawn(named("health listener", served(health_addr, serve)));
    let certificate = server::first_certificate(reloader.tls(), close.clone());
    let serve = server::serve_tls(webhook, server::router(state), handles[1].clone(), certificate);
    tasks.spawn(named("webhook listener", served(webhook_addr, serve)));
    let reload = reloader.run(client.clone(), namespace);
    tasks.spawn(named("certificate watch", until_cancelled(close.clone(), reload)));
    let filler = CacheFiller { client, cache: cluster.clone(), metrics };
    tasks.spawn(named("cluster watch", until_cancelled(close.clone(), filler.run())));
    tasks.spawn(named("cache sync", wait_for_sync(cluster, readiness.clone(), close.clone())));
    tasks.spawn(named("election", lead(candidate, leader, resign.clone())));

    let shutdown = Shutdown { readiness, handles, resign, close, drain };
    shutdown.run(stop, tasks).await
}

/// Ends the tasks of a replica in order.
struct Shutdown {
    readiness: Arc<Readiness>,
    handles: [Handle<SocketAddr>; 2],
    /// Ends the leader's loops and releases the Lease.
    resign: CancellationToken,
    /// Ends the watches.
    close: CancellationToken,
    drain: Duration,
}

impl Shutdown {
    /// Waits for `stop` or for a task that ends unexpectedly, then ends all tasks in order.
    async fn run(self, stop: CancellationToken, mut tasks: JoinSet<TaskExit>) -> Result<(), Error> {
        let result = tokio::select! {
            biased;
            () = stop.cancelled() => Ok(()),
            error = unexpected_exit(&mut tasks) => Err(error),
        };
        self.readiness.set_draining();
        self.resign.cancel();
        // After a failure there is no reason to drain; requests in flight are still answered.
        let drain = if result.is_ok() { self.drain } else { Duration::ZERO };
        if timeout(SHUTDOWN_TIMEOUT, self.close_listeners(&mut tasks, drain)).await.is_err() {
            warn!("some tasks did not end in time; aborting them");
        }
        for handle in &self.handles {
            handle.shutdown();
        }
        tasks.shutdown().await;
        info!("stopped");
        result
    }

    /// Keeps serving for `drain`, then closes the listeners and waits for every task.
    async fn close_listeners(&self, tasks: &mut JoinSet<TaskExit>, drain: Duration) {
        tokio::time::sleep(drain).await;
        self.close.cancel();
        for handle in &self.handles {
            handle.graceful_shutdown(Some(REQUEST_GRACE));
        }
        wait_for_all(tasks).await;
    }
}

async fn served(addr: SocketAddr, serve: impl Future<Output = io::Result<()>>) -> Result<(), Error> {
    serve.await.map_err(|source| Error::Serve { addr, source })
}

/// A watch has nothing to finish, so it is dropped at any await point.
async fn until_cancelled(close: CancellationToken, watch: impl Future<Output = ()>) -> Result<(), Error> {
    close.run_until_cancelled(watch).await;
    Ok(())
}

/// Sets readiness when the caches that the webhook reads have synced. Then waits for `close`, because a task that ends early counts as failed.
async fn wait_for_sync(
    cluster: ClusterCache,
    readiness: Arc<Readiness>,
    close: CancellationToken,
) -> Result<(), Error> {
    if close.run_until_cancelled(cluster.synced(&admission::SOURCES)).await.is_some() {
        readiness.set_synced();
    }
    close.cancelled().await;
    Ok(())
}
