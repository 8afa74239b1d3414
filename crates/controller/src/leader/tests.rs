use std::{
    convert::Infallible,
    sync::{Mutex, PoisonError},
};

use api::{
    bridgenetwork::{FINALIZER_NODES, FINALIZER_USERS},
    ipblock::HolderRef,
};
use axum::http;
use kube::{client::Body, core::Status};
use plan::network::{NetworkState, NodeReport, NodeState};
use serde_json::{Value, json};

use super::*;
use crate::{
    blocks::tests::block, lease::election::ElectionConfig, networks::tests::deleting,
    nodelabels::tests::ready_on,
};

/// An API server that returns the given lists and accepts every write that is not rejected.
#[derive(Default)]
pub struct FakeApiServer {
    /// The requests: method, path and body.
    pub requests: Mutex<Vec<(String, String, String)>>,
    /// The requests that are never answered: method and a part of the path.
    pub hanging: Mutex<Vec<(&'static str, &'static str)>>,
    /// The items of lists, by the end of the path.
    pub lists: Mutex<Vec<(&'static str, Value)>>,
    /// The objects that a GET returns, by the end of the path.
    pub objects: Mutex<Vec<(&'static str, Value)>>,
    /// The requests to reject: method, end of the path, and message.
    pub rejections: Mutex<Vec<(&'static str, &'static str, String)>>,
    /// The requests whose namespace does not exist: method and end of the path.
    pub missing: Mutex<Vec<(&'static str, &'static str)>>,
    /// The resourceVersion of objects after a write.
    pub version_after_write: Mutex<Option<&'static str>>,
}

impl FakeApiServer {
    /// A context of a leader whose cache has an empty NAD kind.
    pub fn start() -> (LeaderContext, Arc<Self>) {
        let server = Arc::new(Self::default());
        let shared = server.clone();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let server = shared.clone();
            async move {
                let (parts, body) = request.into_parts();
                let body = String::from_utf8(body.collect_bytes().await.unwrap().to_vec()).unwrap();
                let response = server.respond(parts.method.as_str(), parts.uri.path(), body);
                // A watch delivers nothing.
                let watches = parts.uri.query().is_some_and(|query| query.contains("watch=true"));
                if watches || server.hangs(parts.method.as_str(), parts.uri.path()) {
                    std::future::pending::<()>().await;
                }
                Ok::<_, Infallible>(response)
            }
        });
        let cache = ClusterCache::new();
        cache.update(CacheSource::Nads, |state| state.nads.replace([].into()).is_none());
        let (client, fence) = (Client::new(service, "ns"), LeaseFence::expiring_in(Duration::from_hours(1)));
        (LeaderContext { client, cache, metrics: Arc::default(), fence }, server)
    }

    fn hangs(&self, method: &str, path: &str) -> bool {
        self.hanging.lock().unwrap().iter().any(|(how, part)| *how == method && path.contains(part))
    }

    fn respond(&self, method: &str, path: &str, body: String) -> http::Response<Body> {
        self.requests.lock().unwrap().push((method.to_owned(), path.to_owned(), body));
        let rejections = self.rejections.lock().unwrap();
        if let Some((_, _, why)) = rejections.iter().find(|(m, end, _)| *m == method && path.ends_with(end)) {
            let status = serde_json::to_vec(&Status::failure(why, "InternalError").with_code(500)).unwrap();
            return http::Response::builder().status(500).body(Body::from(status)).unwrap();
        }
        if self.missing.lock().unwrap().iter().any(|(m, end)| *m == method && path.ends_with(end)) {
            return not_found();
        }
        if path.contains("/leases") {
            return self.respond_lease(method);
        }
        if method == "GET" && ["/secrets/", "webhookconfigurations/"].iter().any(|part| path.contains(part)) {
            return not_found();
        }
        let objects = self.objects.lock().unwrap();
        let object = objects.iter().find(|(end, _)| method == "GET" && path.ends_with(end));
        let response = if let Some((_, object)) = object {
            object.clone()
        } else if method == "GET" {
            let lists = self.lists.lock().unwrap();
            let items = lists.iter().find(|(end, _)| path.ends_with(end));
            let items = items.map_or_else(|| json!([]), |(_, items)| items.clone());
            json!({"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": "5"}, "items": items})
        } else {
            let version = *self.version_after_write.lock().unwrap();
            json!({"apiVersion": "v1", "kind": "Any", "metadata": {"name": "any", "resourceVersion": version}})
        };
        http::Response::new(Body::from(response.to_string().into_bytes()))
    }

    /// The Lease as it was last written, or 404. A write over another version is a conflict, and changes nothing.
    fn respond_lease(&self, method: &str) -> http::Response<Body> {
        let mut requests = self.requests.lock().unwrap();
        let versions =
            requests.iter().filter(|(how, path, _)| how != "GET" && path.contains("/leases")).count();
        if method == "PUT" {
            let version: Value =
                requests.last().map(|(.., body)| serde_json::from_str(body).unwrap()).unwrap();
            if version["metadata"]["resourceVersion"].as_str() != Some(&(versions - 1).to_string()) {
                requests.pop();
                return failure("Conflict", 409);
            }
        }
        let writes: Vec<&String> = requests
            .iter()
            .filter(|(how, path, _)| how != "GET" && path.contains("/leases"))
            .map(|(.., body)| body)
            .collect();
        let Some(last) = writes.last() else {
            assert_eq!(method, "GET");
            return not_found();
        };
        let mut lease: Value = serde_json::from_str(last).unwrap();
        lease["metadata"]["resourceVersion"] = json!(writes.len().to_string());
        http::Response::new(Body::from(lease.to_string().into_bytes()))
    }

    /// The paths of the requests with this method, in order.
    pub fn paths(&self, method: &str) -> Vec<String> {
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.iter().filter(|(how, ..)| how == method).map(|(_, path, _)| path.clone()).collect()
    }

    /// The last patch of a network's status.
    pub fn status(&self, name: &str) -> Option<String> {
        let requests = self.requests.lock().unwrap();
        let end = format!("bridgenetworks/{name}/status");
        requests
            .iter()
            .rev()
            .find(|(how, path, _)| how == "PATCH" && path.ends_with(&end))
            .map(|it| it.2.clone())
    }
}

fn not_found() -> http::Response<Body> {
    failure("NotFound", 404)
}

fn failure(reason: &str, code: u16) -> http::Response<Body> {
    let status = serde_json::to_vec(&Status::failure("none", reason).with_code(code)).unwrap();
    http::Response::builder().status(code).body(Body::from(status)).unwrap()
}

fn config(context: &LeaderContext) -> LeaderConfig {
    LeaderConfig {
        client: context.client.clone(),
        cache: context.cache.clone(),
        metrics: context.metrics.clone(),
        service: WebhookService { namespace: "ns".to_owned(), name: "hook".to_owned() },
        policy: CertPolicy {
            dns_name: "hook.ns.svc".to_owned(),
            ca_lifetime: Duration::from_hours(48),
            leaf_lifetime: Duration::from_hours(24),
            ca_propagation_delay: Duration::from_secs(1),
        },
        claims: ClaimOptions::default(),
    }
}

fn candidate(context: &LeaderContext) -> Candidate {
    let election = ElectionConfig {
        namespace: "ns".to_owned(),
        identity: "me".to_owned(),
        lease_duration: Duration::from_secs(10),
        renew_interval: Duration::from_secs(2),
        retry_period: Duration::from_secs(2),
    };
    Candidate::new(context.client.clone(), election, context.metrics.clone())
}

async fn leader(context: &LeaderContext) -> Leader {
    candidate(context).acquire(&CancellationToken::new()).await.unwrap()
}

/// Whether a request releases the Lease.
fn is_release((_, path, body): &(String, String, String)) -> bool {
    path.contains("/leases/") && body.contains("patchbay.dev/released-by")
}

/// Wraps each loop so that it reports its end.
fn reporting(loops: Vec<LeaderLoop>, ended: &Arc<Mutex<Vec<&'static str>>>) -> Vec<LeaderLoop> {
    let report = |LeaderLoop { name, task }| {
        let ended = ended.clone();
        LeaderLoop::new(name, async move {
            task.await;
            ended.lock().unwrap().push(name);
        })
    };
    loops.into_iter().map(report).collect()
}

#[tokio::test(start_paused = true)]
async fn the_lease_is_released_only_after_every_loop_has_ended() {
    let (context, server) = FakeApiServer::start();
    for source in CacheSource::ALL {
        context.cache.mark_listed(source);
    }
    let stop = CancellationToken::new();
    let leader = leader(&context).await;
    let ended = Arc::new(Mutex::new(Vec::new()));
    let mut loops = reporting(loops(config(&context), leader.fence(), &stop), &ended);
    let names: Vec<&str> = loops.iter().map(|one| one.name).collect();
    assert_eq!(names, ["certificates", "networks", "blocks", "node labels", "services", "claims"]);
    // A loop that takes two seconds to finish its step, and observes whether the Lease is released before that.
    let (observer, token) = (server.clone(), stop.clone());
    let slow = LeaderLoop::new("slow", async move {
        token.cancelled().await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(!observer.requests.lock().unwrap().iter().any(is_release), "released too early");
    });
    loops.extend(reporting(vec![slow], &ended));
    let cancel = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        stop.cancel();
    };
    let (result, ()) = tokio::join!(run_loops(leader, loops, stop.clone()), cancel);
    result.unwrap();
    let mut ended = ended.lock().unwrap().clone();
    ended.sort_unstable();
    assert_eq!(ended, ["blocks", "certificates", "claims", "networks", "node labels", "services", "slow"]);
    assert!(is_release(server.requests.lock().unwrap().last().unwrap()), "the release is the last request");
}

#[tokio::test(start_paused = true)]
async fn a_loop_that_does_not_end_is_aborted_before_the_lease_is_released() {
    struct OnDrop(Arc<FakeApiServer>, Arc<Mutex<Option<bool>>>);
    impl Drop for OnDrop {
        fn drop(&mut self) {
            let released = self.0.requests.lock().unwrap().iter().any(is_release);
            *self.1.lock().unwrap() = Some(released);
        }
    }
    let (context, server) = FakeApiServer::start();
    let leader = leader(&context).await;
    let dropped = Arc::new(Mutex::new(None));
    let guard = OnDrop(server.clone(), dropped.clone());
    let stuck = LeaderLoop::new("stuck", async move {
        let _guard = guard;
        std::future::pending::<()>().await;
    });
    let stop = CancellationToken::new();
    stop.cancel();
    run_loops(leader, vec![stuck], stop).await.unwrap();
    assert_eq!(*dropped.lock().unwrap(), Some(false));
    assert!(server.requests.lock().unwrap().iter().any(is_release));
}

#[tokio::test(start_paused = true)]
async fn all_loops_share_the_fence_of_the_leader() {
    let (context, _) = FakeApiServer::start();
    let until = tokio::sync::watch::Sender::new(client::fence::now());
    let loops = loops(config(&context), LeaseFence::new(&until), &CancellationToken::new());
    // The certificates use it for the Secret and the configurations, networks for networks, NADs and events.
    assert!(until.receiver_count() >= loops.len(), "{}", until.receiver_count());
    drop(loops);
    assert_eq!(until.receiver_count(), 0, "no loop leaves a fence behind");
}

/// A cluster in which networks, blocks and Node labels have something to write.
fn busy_cluster() -> (LeaderContext, Arc<FakeApiServer>) {
    let (context, server) = FakeApiServer::start();
    let network = deleting("blue", &[FINALIZER_USERS, FINALIZER_NODES]);
    let ready = NetworkState { deleting: None, ..deleting("red", &[]) };
    context.cache.update(CacheSource::Networks, |state| {
        let (node, report): (NodeState, NodeReport) = ready_on(&ready);
        let report = NodeReport { claim_addresses: Some([].into()), ..report };
        state.nodes.insert("n".to_owned(), node);
        state.reports.insert("n".to_owned(), report);
        let mut lost = block("lost", "uid-gone", "gone");
        lost.object.spec.holder = HolderRef::claims();
        state.blocks.insert("lost".to_owned(), lost);
        state.networks.insert("red".to_owned(), ready);
        state.networks.insert("blue".to_owned(), network)
    });
    for source in CacheSource::ALL {
        context.cache.mark_listed(source);
    }
    (context, server)
}

#[tokio::test(start_paused = true)]
async fn a_capability_whose_requests_hang_does_not_delay_another() {
    let writes =
        [("PATCH", "/bridgenetworks/"), ("DELETE", "/ipblocks/"), ("PATCH", "/nodes/"), ("POST", "/secrets")];
    for hanging in [None, Some(0), Some(1), Some(2), Some(3)] {
        let (context, server) = busy_cluster();
        server.hanging.lock().unwrap().extend(hanging.map(|index| writes[index]));
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        for LeaderLoop { task, .. } in loops(config(&context), context.fence.clone(), &stop) {
            tasks.spawn(task);
        }
        // Less than the timeout of one request.
        tokio::time::sleep(Duration::from_millis(500)).await;
        for (method, part) in writes {
            let sent = server.paths(method).iter().any(|path| path.contains(part));
            assert!(sent, "{method} {part} is missing while {hanging:?} hangs");
        }
        tasks.shutdown().await;
    }
}

fn is_leader(context: &LeaderContext) -> bool {
    context.metrics.text().unwrap().lines().any(|line| line == "patchbay_leader 1")
}

/// Waits until this replica leads, or no longer does. Returns how long it took.
async fn wait_leader(context: &LeaderContext, leads: bool) -> Duration {
    let start = tokio::time::Instant::now();
    while is_leader(context) != leads {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    start.elapsed()
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_loses_the_lease_stands_for_election_again() {
    let (context, server) = busy_cluster();
    let resign = CancellationToken::new();
    let mut leading = JoinSet::new();
    leading.spawn(lead(candidate(&context), config(&context), resign.clone()));
    wait_leader(&context, true).await;
    tokio::time::sleep(Duration::from_secs(3)).await;

    // The API server answers nothing. The fence ends two thirds of a lease duration after the last renewal.
    server.hanging.lock().unwrap().extend(["GET", "PUT", "POST", "PATCH", "DELETE"].map(|how| (how, "/")));
    let silent = wait_leader(&context, false).await;
    assert!(silent <= Duration::from_secs(7), "{silent:?}");
    let before = server.requests.lock().unwrap().len();
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert!(leading.try_join_next().is_none(), "the replica goes on");
    let sent = server.requests.lock().unwrap().split_off(before);
    assert!(sent.iter().all(|(how, path, _)| how == "GET" && path.contains("/leases/")), "{sent:?}");

    // The next term plans everything again.
    server.hanging.lock().unwrap().clear();
    wait_leader(&context, true).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let sent = server.requests.lock().unwrap().split_off(before);
    for (method, part) in [("PATCH", "/bridgenetworks/"), ("PATCH", "/nodes/")] {
        assert!(sent.iter().any(|(how, path, _)| how == method && path.contains(part)), "{method} {part}");
    }
    server.requests.lock().unwrap().extend(sent);
    resign.cancel();
    leading.join_next().await.unwrap().unwrap().unwrap();
    assert!(is_release(server.requests.lock().unwrap().last().unwrap()));
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_cannot_end_its_term_exits_instead_of_never_leading_again() {
    let (context, server) = FakeApiServer::start();
    let leader = leader(&context).await;
    let _leaked = leader.fence();
    server.hanging.lock().unwrap().extend(["GET", "PUT", "PATCH"].map(|how| (how, "/")));
    let start = tokio::time::Instant::now();
    let waits = LeaderLoop::new("waits", std::future::pending());
    let ended = run_loops(leader, vec![waits], CancellationToken::new()).await;
    assert!(matches!(ended, Err(Error::StepDown(_))), "{:?}", ended.err());
    assert!(start.elapsed() < STEP_DOWN_TIMEOUT + Duration::from_secs(10));
    assert!(!is_leader(&context));
}

#[tokio::test(start_paused = true)]
async fn a_replica_whose_lease_another_one_took_waits_until_that_one_is_gone() {
    let (context, server) = busy_cluster();
    let resign = CancellationToken::new();
    let mut leading = JoinSet::new();
    leading.spawn(lead(candidate(&context), config(&context), resign.clone()));
    wait_leader(&context, true).await;
    let rival = json!({
        "metadata": {"name": "patchbay-controller"},
        "spec": {"holderIdentity": "rival", "leaseDurationSeconds": 10, "renewTime": "2026-01-01T00:00:00.000000Z"},
    });
    server.requests.lock().unwrap().push(("PUT".to_owned(), "/leases/rival".to_owned(), rival.to_string()));
    wait_leader(&context, false).await;
    let waited = wait_leader(&context, true).await;
    assert!(waited >= Duration::from_secs(9), "a whole lease duration: {waited:?}");
    resign.cancel();
    leading.join_next().await.unwrap().unwrap().unwrap();
}
