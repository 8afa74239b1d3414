use std::{convert::Infallible, sync::Mutex};

use axum::{body::Body, http};
use kube::core::Status;
use serde_json::Value;

use super::*;

fn config() -> ElectionConfig {
    ElectionConfig {
        namespace: "ns".to_owned(),
        identity: "me".to_owned(),
        lease_duration: Duration::from_millis(9500),
        renew_interval: Duration::from_secs(2),
        retry_period: Duration::from_secs(2),
    }
}

fn time(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn spec(lease: &Lease) -> &LeaseSpec {
    lease.spec.as_ref().unwrap()
}

#[test]
fn a_new_lease_has_no_transitions_and_a_duration_rounded_up() {
    let lease = updated_lease(None, LeaseWrite::Hold, &config(), time(7));
    let expected = LeaseSpec {
        holder_identity: Some("me".to_owned()),
        lease_duration_seconds: Some(10),
        lease_transitions: Some(0),
        acquire_time: Some(MicroTime(time(7))),
        renew_time: Some(MicroTime(time(7))),
        ..LeaseSpec::default()
    };
    assert_eq!((lease.name_any().as_str(), spec(&lease)), (LEASE_NAME, &expected));
}

#[test]
fn a_renewal_changes_only_the_renew_time() {
    let acquired = updated_lease(None, LeaseWrite::Hold, &config(), time(7));
    let renewed = updated_lease(Some(acquired.clone()), LeaseWrite::Hold, &config(), time(9));
    let expected = LeaseSpec { renew_time: Some(MicroTime(time(9))), ..spec(&acquired).clone() };
    assert_eq!(spec(&renewed), &expected);
}

#[test]
fn acquiring_counts_a_transition_and_keeps_foreign_fields() {
    let mut foreign = updated_lease(None, LeaseWrite::Hold, &config(), time(1));
    foreign.metadata.resource_version = Some("42".to_owned());
    foreign.labels_mut().insert("kept".to_owned(), "yes".to_owned());
    let rival = LeaseSpec {
        holder_identity: Some("rival".to_owned()),
        lease_transitions: Some(4),
        ..spec(&foreign).clone()
    };
    foreign.spec = Some(rival);
    let acquired = updated_lease(Some(foreign), LeaseWrite::Hold, &config(), time(9));
    assert_eq!(spec(&acquired).lease_transitions, Some(5));
    assert_eq!(spec(&acquired).acquire_time, Some(MicroTime(time(9))));
    assert_eq!(acquired.resource_version().as_deref(), Some("42"));
    assert_eq!(acquired.labels().get("kept").map(String::as_str), Some("yes"));
}

#[test]
fn a_released_lease_is_free_and_keeps_its_transitions() {
    let acquired = updated_lease(None, LeaseWrite::Hold, &config(), time(7));
    let released = updated_lease(Some(acquired), LeaseWrite::Release, &config(), time(8));
    let observed = ObservedLease::first(Some(lease_record(&released)), now());
    assert_eq!(
        lease::decide_election(&observed, "other", Duration::from_secs(10), now()),
        ElectionDecision::Acquire
    );
    assert_eq!(spec(&released).lease_transitions, Some(0));
    let acquired = updated_lease(Some(released), LeaseWrite::Hold, &config(), time(9));
    assert!(!lease_record(&acquired).released);
}

#[test]
fn our_own_write_is_recognised_when_it_is_read_back() {
    let nanoseconds = Timestamp::from_nanosecond(1_234_567_891_234_567_891).unwrap();
    let lease = updated_lease(None, LeaseWrite::Hold, &config(), nanoseconds);
    let stored: Lease = serde_json::from_value(serde_json::to_value(&lease).unwrap()).unwrap();
    assert_eq!(lease_record(&stored), lease_record(&lease));
}

#[test]
fn a_negative_lease_duration_is_ignored() {
    let lease = Lease {
        spec: Some(LeaseSpec { lease_duration_seconds: Some(-3), ..LeaseSpec::default() }),
        ..Lease::default()
    };
    let record = lease_record(&lease);
    assert_eq!((record.duration, record.holder), (None, None));
}

/// How the fake API server handles a write.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WriteBehavior {
    /// Stored, and answered after this delay.
    Store(Duration),
    /// Rejected with this reason and code.
    Reject(&'static str, u16),
}

/// A fake API server with one Lease.
struct FakeLeaseServer {
    write: WriteBehavior,
    lease: Option<Value>,
    /// When each write arrived.
    writes: Vec<Instant>,
}

impl FakeLeaseServer {
    fn start(write: WriteBehavior) -> (Client, Arc<Mutex<Self>>) {
        let server = Arc::new(Mutex::new(Self { write, lease: None, writes: Vec::new() }));
        let shared = server.clone();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let server = shared.clone();
            async move {
                let (parts, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap();
                let (delay, response) = server.lock().unwrap().response(&parts.method, &body);
                tokio::time::sleep(delay).await;
                Ok::<_, Infallible>(response)
            }
        });
        (Client::new(service, "ns"), server)
    }

    fn response(&mut self, method: &http::Method, body: &[u8]) -> (Duration, http::Response<Body>) {
        let rejection = |reason: &str, code| {
            let status = serde_json::to_vec(&Status::failure("no", reason).with_code(code)).unwrap();
            http::Response::builder().status(code).body(Body::from(status)).unwrap()
        };
        let lease_response = |lease: &Value| http::Response::new(Body::from(lease.to_string()));
        if method == http::Method::GET {
            let response = self.lease.as_ref().map_or_else(|| rejection("NotFound", 404), lease_response);
            return (Duration::ZERO, response);
        }
        self.writes.push(now());
        match self.write {
            WriteBehavior::Reject(reason, code) => (Duration::ZERO, rejection(reason, code)),
            WriteBehavior::Store(delay) => {
                let mut lease: Value = serde_json::from_slice(body).unwrap();
                lease["metadata"]["resourceVersion"] = self.writes.len().to_string().into();
                (delay, lease_response(self.lease.insert(lease)))
            }
        }
    }

    fn record(&self) -> LeaseRecord {
        lease_record(&serde_json::from_value(self.lease.clone().unwrap()).unwrap())
    }
}

async fn acquire(client: Client, metrics: &Arc<Metrics>, stop_after: Duration) -> Option<Leader> {
    let stop = CancellationToken::new();
    let candidate = Candidate::new(client, config(), metrics.clone());
    let cancel = async {
        tokio::time::sleep(stop_after).await;
        stop.cancel();
    };
    tokio::join!(candidate.acquire(&stop), cancel).0
}

#[tokio::test(start_paused = true)]
async fn a_missing_namespace_is_an_error_that_is_retried_each_retry_period() {
    let (client, server) = FakeLeaseServer::start(WriteBehavior::Reject("NotFound", 404));
    let metrics = Arc::new(Metrics::default());
    assert!(acquire(client, &metrics, Duration::from_secs(9)).await.is_none());
    assert_eq!(server.lock().unwrap().writes.len(), 5);
    assert!(metrics.text().unwrap().contains("patchbay_api_errors_total{call=\"Lease\"} 5"));
}

#[tokio::test(start_paused = true)]
async fn a_conflict_is_retried_after_a_minimum_wait() {
    let (client, server) = FakeLeaseServer::start(WriteBehavior::Reject("AlreadyExists", 409));
    let metrics = Arc::new(Metrics::default());
    assert!(acquire(client, &metrics, Duration::from_secs(1)).await.is_none());
    let writes = &server.lock().unwrap().writes;
    assert!(
        writes.len() >= 5 && writes.windows(2).all(|pair| pair[1] - pair[0] >= CONFLICT_RETRY),
        "{writes:?}"
    );
    assert!(!metrics.text().unwrap().contains("api_errors_total{"));
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_acquired_during_shutdown_is_released() {
    let metrics = Arc::new(Metrics::default());
    let half = Duration::from_millis(500);
    // The response arrives after the stop.
    let (client, server) = FakeLeaseServer::start(WriteBehavior::Store(half * 2));
    let leader = acquire(client, &metrics, half).await.unwrap();
    assert_eq!(server.lock().unwrap().record().holder.as_deref(), Some("me"));
    leader.release().await;
    assert!(server.lock().unwrap().record().released);
    // The response never arrives in time, but the Lease names us.
    let (client, server) = FakeLeaseServer::start(WriteBehavior::Store(Duration::from_secs(3)));
    assert!(acquire(client, &metrics, half).await.is_none());
    let record = server.lock().unwrap().record();
    assert_eq!((record.holder.as_deref(), record.released), (Some(""), true));
}

#[tokio::test(start_paused = true)]
async fn an_acquired_lease_is_recognised_although_the_response_was_lost() {
    let (client, server) = FakeLeaseServer::start(WriteBehavior::Store(Duration::from_secs(3)));
    let speed_up = async {
        tokio::time::sleep(Duration::from_millis(2500)).await;
        server.lock().unwrap().write = WriteBehavior::Store(Duration::ZERO);
    };
    let stop = CancellationToken::new();
    let candidate = Candidate::new(client, config(), Arc::default());
    let start = now();
    let (leader, ()) = tokio::join!(candidate.acquire(&stop), speed_up);
    assert!(leader.is_some() && now() - start < Duration::from_secs(5));
}
