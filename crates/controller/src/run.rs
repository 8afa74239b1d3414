//! The wiring: every task of a replica, and the order in which they end.

use std::{future::Future, io, net::SocketAddr, sync::Arc, time::Duration};

use axum_server::Handle;
use kube::Client;
use plan::certs::Policy;
use tokio::{task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    Args, Error,
    authority::{Home, Keeper},
    cache::{ClusterCache, watch::CacheFiller},
    election::{self, Candidate},
    http::{self, Readiness, Replica},
    metrics::Metrics,
    networks::NetworkController,
    serving::Served,
};

/// From the wish to stop until everything has: a pod is given ten seconds, one of them for the process itself.
const END: Duration = Duration::from_secs(9);

/// How long a leader's loop may take to end the step it is at.
const LAST_STEP: Duration = Duration::from_secs(3);

/// How long requests that are under way may take when the listeners close.
const LAST_REQUESTS: Duration = Duration::from_secs(3);

/// A task and how it ended.
type Ended = (&'static str, Result<(), Error>);

/// Runs one replica until `stop`. Shares nothing with other replicas in the same process.
pub async fn run(client: Client, args: Args, stop: CancellationToken) -> Result<(), Error> {
    args.check().map_err(Error::Settings)?;
    let name = args.webhook_name();
    let Args {
        namespace,
        identity,
        lease_term,
        lease_renew,
        lease_look,
        health_addr,
        webhook_addr,
        webhook_service,
        ca_lifetime,
        leaf_lifetime,
        settle,
        drain,
    } = args;
    info!(
        namespace,
        identity,
        ?lease_term,
        ?lease_renew,
        ?lease_look,
        %health_addr,
        %webhook_addr,
        webhook_service,
        ?ca_lifetime,
        ?leaf_lifetime,
        ?settle,
        ?drain,
        "starting"
    );

    let readiness = Arc::new(Readiness::default());
    let metrics = Arc::new(Metrics::default());
    let cluster = ClusterCache::new();
    let served = Served::new(name.clone(), readiness.clone(), metrics.clone());
    let replica = Arc::new(Replica::new(readiness.clone(), metrics.clone(), cluster.clone()));
    let settings = election::Settings {
        namespace: namespace.clone(),
        identity,
        term: lease_term,
        renew: lease_renew,
        look: lease_look,
    };
    let policy = Policy { name, authority_life: ca_lifetime, leaf_life: leaf_lifetime, settle };
    let candidate = Candidate::new(client.clone(), settings, metrics.clone());
    let leader = LeaderLoops {
        client: client.clone(),
        home: Home { namespace: namespace.clone(), service: webhook_service },
        policy,
        metrics: metrics.clone(),
        cluster: cluster.clone(),
    };
    let health = http::listen(health_addr).map_err(|source| Error::Listen { addr: health_addr, source })?;
    let webhook =
        http::listen(webhook_addr).map_err(|source| Error::Listen { addr: webhook_addr, source })?;

    let handles = [Handle::new(), Handle::new()];
    let (resign, close) = (CancellationToken::new(), CancellationToken::new());
    let mut tasks = JoinSet::new();
    let serve = http::serve_plain(health, http::health_router(readiness.clone()), handles[0].clone());
    tasks.spawn(named("health listener", server(health_addr, serve)));
    let certificate = http::first_certificate(served.tls(), close.clone());
    let serve = http::serve_tls(webhook, http::router(replica), handles[1].clone(), certificate);
    tasks.spawn(named("webhook listener", server(webhook_addr, serve)));
    let follow = served.follow(client.clone(), namespace);
    tasks.spawn(named("certificate watch", until(close.clone(), follow)));
    let filler = CacheFiller { client, cache: cluster.clone(), metrics };
    tasks.spawn(named("cluster watch", until(close.clone(), filler.run())));
    tasks.spawn(named("sync", sync(cluster, readiness.clone(), close.clone())));
    tasks.spawn(named("election", lead(candidate, leader, resign.clone())));

    let closing = Closing { readiness, handles, resign, close, drain };
    closing.after(stop, tasks).await
}

/// What it takes to end a replica.
struct Closing {
    readiness: Arc<Readiness>,
    handles: [Handle<SocketAddr>; 2],
    /// Ends the leader's loops and gives the Lease back.
    resign: CancellationToken,
    /// Ends the watches.
    close: CancellationToken,
    drain: Duration,
}

impl Closing {
    /// Waits for the wish to stop, or for a task that ends although nobody wished it; then ends all of them in order.
    async fn after(self, stop: CancellationToken, mut tasks: JoinSet<Ended>) -> Result<(), Error> {
        let result = tokio::select! {
            biased;
            () = stop.cancelled() => Ok(()),
            ended = unexpected(&mut tasks) => Err(ended),
        };
        self.readiness.drain();
        self.resign.cancel();
        // After a failure nobody is helped by waiting; requests that are under way are answered all the same.
        let pause = if result.is_ok() { self.drain } else { Duration::ZERO };
        if timeout(END, self.wind_down(&mut tasks, pause)).await.is_err() {
            warn!("not everything ended in time, the rest is cut off");
        }
        for handle in &self.handles {
            handle.shutdown();
        }
        tasks.shutdown().await;
        info!("stopped");
        result
    }

    /// Serves on for a while, then closes the listeners and waits for all that is under way.
    async fn wind_down(&self, tasks: &mut JoinSet<Ended>, pause: Duration) {
        tokio::time::sleep(pause).await;
        self.close.cancel();
        for handle in &self.handles {
            handle.graceful_shutdown(Some(LAST_REQUESTS));
        }
        finished(tasks).await;
    }
}

/// What only the leader does.
struct LeaderLoops {
    client: Client,
    home: Home,
    policy: Policy,
    metrics: Arc<Metrics>,
    cluster: ClusterCache,
}

/// Stands for election and, once elected, leads until told to resign. Losing the Lease is an error: a restart is the simplest way
/// to be sure that nothing of a leader is left.
async fn lead(candidate: Candidate, loops: LeaderLoops, resign: CancellationToken) -> Result<(), Error> {
    let Some(mut leader) = candidate.win(&resign).await else {
        return Ok(());
    };
    if resign.is_cancelled() {
        leader.release().await;
        return Ok(());
    }
    let LeaderLoops { client, home, policy, metrics, cluster } = loops;
    let networks = NetworkController::new(client.clone(), cluster, metrics.clone(), leader.tenure());
    let keeper = Keeper::new(client, home, policy, metrics, leader.tenure());
    let mut tasks = JoinSet::new();
    tasks.spawn(named("certificates", endless(keeper.keep(resign.clone()))));
    tasks.spawn(named("networks", endless(networks.run(resign.clone()))));
    let result = tokio::select! {
        biased;
        () = resign.cancelled() => Ok(()),
        lost = leader.keep() => Err(Error::Lead(lost)),
        ended = unexpected(&mut tasks) => Err(ended),
    };
    if let Err(Error::Lead(_)) = result {
        // Another may lead already: nothing is ended in order, and there is no Lease to give back.
        tasks.shutdown().await;
        return result;
    }
    resign.cancel();
    if timeout(LAST_STEP, finished(&mut tasks)).await.is_err() {
        warn!("a leader's loop did not end its step in time and is cut off");
    }
    tasks.shutdown().await;
    leader.release().await;
    result
}

async fn named(name: &'static str, task: impl Future<Output = Result<(), Error>>) -> Ended {
    (name, task.await)
}

async fn server(addr: SocketAddr, serve: impl Future<Output = io::Result<()>>) -> Result<(), Error> {
    serve.await.map_err(|source| Error::Serve { addr, source })
}

/// A loop has nothing to say when it ends; that it did is noticed by its name.
async fn endless(task: impl Future<Output = ()>) -> Result<(), Error> {
    task.await;
    Ok(())
}

/// A watch has nothing to finish, so it is dropped where it stands.
async fn until(close: CancellationToken, watch: impl Future<Output = ()>) -> Result<(), Error> {
    close.run_until_cancelled(watch).await;
    Ok(())
}

/// Tells readiness when the caches are filled, and stays, because a task that ends is taken for a failure.
async fn sync(
    cluster: ClusterCache,
    readiness: Arc<Readiness>,
    close: CancellationToken,
) -> Result<(), Error> {
    if close.run_until_cancelled(cluster.synced()).await == Some(true) {
        readiness.synced();
    }
    close.cancelled().await;
    Ok(())
}

/// Resolves with the first task that ends, which none should.
async fn unexpected(tasks: &mut JoinSet<Ended>) -> Error {
    match tasks.join_next().await {
        Some(Ok((_, Err(error)))) => error,
        Some(Ok((name, Ok(())))) => Error::Ended(name),
        Some(Err(broken)) => Error::Broken(broken),
        None => Error::Ended("all"),
    }
}

async fn finished(tasks: &mut JoinSet<Ended>) {
    while tasks.join_next().await.is_some() {}
}
