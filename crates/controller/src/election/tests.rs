use std::{convert::Infallible, sync::Mutex};

use axum::{body::Body, http};
use kube::core::Status;
use serde_json::Value;

use super::*;

fn settings() -> Settings {
    Settings {
        namespace: "ns".to_owned(),
        identity: "me".to_owned(),
        term: Duration::from_millis(9500),
        renew: Duration::from_secs(2),
        look: Duration::from_secs(2),
    }
}

fn time(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn spec(lease: &Lease) -> &LeaseSpec {
    lease.spec.as_ref().unwrap()
}

#[test]
fn a_new_lease_starts_with_no_transition_and_a_term_rounded_up() {
    let lease = written(None, Holder::Me, &settings(), time(7));
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
fn renewing_moves_only_the_renew_time() {
    let taken = written(None, Holder::Me, &settings(), time(7));
    let renewed = written(Some(taken.clone()), Holder::Me, &settings(), time(9));
    let expected = LeaseSpec { renew_time: Some(MicroTime(time(9))), ..spec(&taken).clone() };
    assert_eq!(spec(&renewed), &expected);
}

#[test]
fn taking_over_counts_a_transition_and_keeps_what_others_wrote() {
    let mut foreign = written(None, Holder::Me, &settings(), time(1));
    foreign.metadata.resource_version = Some("42".to_owned());
    foreign.labels_mut().insert("kept".to_owned(), "yes".to_owned());
    let rival = LeaseSpec {
        holder_identity: Some("rival".to_owned()),
        lease_transitions: Some(4),
        ..spec(&foreign).clone()
    };
    foreign.spec = Some(rival);
    let taken = written(Some(foreign), Holder::Me, &settings(), time(9));
    assert_eq!(spec(&taken).lease_transitions, Some(5));
    assert_eq!(spec(&taken).acquire_time, Some(MicroTime(time(9))));
    assert_eq!(taken.resource_version().as_deref(), Some("42"));
    assert_eq!(taken.labels().get("kept").map(String::as_str), Some("yes"));
}

#[test]
fn a_released_lease_is_free_and_remembers_its_transitions() {
    let taken = written(None, Holder::Me, &settings(), time(7));
    let released = written(Some(taken), Holder::Nobody, &settings(), time(8));
    let seen = Seen::first(Some(record(&released)), now());
    assert_eq!(lease::turn(&seen, "other", Duration::from_secs(10), now()), Turn::Take);
    assert_eq!(spec(&released).lease_transitions, Some(0));
    let taken = written(Some(released), Holder::Me, &settings(), time(9));
    assert!(!record(&taken).released);
}

#[test]
fn our_own_writing_is_known_when_the_api_server_shows_it() {
    let nanoseconds = Timestamp::from_nanosecond(1_234_567_891_234_567_891).unwrap();
    let lease = written(None, Holder::Me, &settings(), nanoseconds);
    let shown: Lease = serde_json::from_value(serde_json::to_value(&lease).unwrap()).unwrap();
    assert_eq!(record(&shown), record(&lease));
}

#[test]
fn a_lease_with_nonsense_in_it_is_read() {
    let lease = Lease {
        spec: Some(LeaseSpec { lease_duration_seconds: Some(-3), ..LeaseSpec::default() }),
        ..Lease::default()
    };
    let record = record(&lease);
    assert_eq!((record.term, record.holder), (None, None));
}

/// What the API server of a test does with a write.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Write {
    /// Kept, and answered after so long.
    Kept(Duration),
    /// Refused with this reason and code.
    Refused(&'static str, u16),
}

/// An API server with one Lease.
struct Server {
    write: Write,
    lease: Option<Value>,
    /// When it was written to.
    writes: Vec<Instant>,
}

impl Server {
    fn start(write: Write) -> (Client, Arc<Mutex<Self>>) {
        let server = Arc::new(Mutex::new(Self { write, lease: None, writes: Vec::new() }));
        let shared = server.clone();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let server = shared.clone();
            async move {
                let (parts, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap();
                let (pause, answer) = server.lock().unwrap().answer(&parts.method, &body);
                tokio::time::sleep(pause).await;
                Ok::<_, Infallible>(answer)
            }
        });
        (Client::new(service, "ns"), server)
    }

    fn answer(&mut self, method: &http::Method, body: &[u8]) -> (Duration, http::Response<Body>) {
        let refusal = |reason: &str, code| {
            let status = serde_json::to_vec(&Status::failure("no", reason).with_code(code)).unwrap();
            http::Response::builder().status(code).body(Body::from(status)).unwrap()
        };
        let shown = |lease: &Value| http::Response::new(Body::from(lease.to_string()));
        if method == http::Method::GET {
            let answer = self.lease.as_ref().map_or_else(|| refusal("NotFound", 404), shown);
            return (Duration::ZERO, answer);
        }
        self.writes.push(now());
        match self.write {
            Write::Refused(reason, code) => (Duration::ZERO, refusal(reason, code)),
            Write::Kept(pause) => {
                let mut lease: Value = serde_json::from_slice(body).unwrap();
                lease["metadata"]["resourceVersion"] = self.writes.len().to_string().into();
                (pause, shown(self.lease.insert(lease)))
            }
        }
    }

    fn record(&self) -> Record {
        record(&serde_json::from_value(self.lease.clone().unwrap()).unwrap())
    }
}

async fn win(client: Client, metrics: &Arc<Metrics>, stop_after: Duration) -> Option<Leader> {
    let stop = CancellationToken::new();
    let candidate = Candidate::new(client, settings(), metrics.clone());
    let cancel = async {
        tokio::time::sleep(stop_after).await;
        stop.cancel();
    };
    tokio::join!(candidate.win(&stop), cancel).0
}

#[tokio::test(start_paused = true)]
async fn a_namespace_that_does_not_exist_is_an_error_that_is_tried_again_now_and_then() {
    let (client, server) = Server::start(Write::Refused("NotFound", 404));
    let metrics = Arc::new(Metrics::default());
    assert!(win(client, &metrics, Duration::from_secs(9)).await.is_none());
    assert_eq!(server.lock().unwrap().writes.len(), 5);
    assert!(metrics.text().unwrap().contains("patchbay_api_errors_total{call=\"Lease\"} 5"));
}

#[tokio::test(start_paused = true)]
async fn a_conflict_is_looked_at_again_after_a_breath() {
    let (client, server) = Server::start(Write::Refused("AlreadyExists", 409));
    let metrics = Arc::new(Metrics::default());
    assert!(win(client, &metrics, Duration::from_secs(1)).await.is_none());
    let writes = &server.lock().unwrap().writes;
    assert!(writes.len() >= 5 && writes.windows(2).all(|pair| pair[1] - pair[0] >= BREATH), "{writes:?}");
    assert!(!metrics.text().unwrap().contains("api_errors_total{"));
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_taken_while_the_replica_stops_is_given_back() {
    let metrics = Arc::new(Metrics::default());
    let half = Duration::from_millis(500);
    // The answer arrives after the wish to stop.
    let (client, server) = Server::start(Write::Kept(half * 2));
    let leader = win(client, &metrics, half).await.unwrap();
    assert_eq!(server.lock().unwrap().record().holder.as_deref(), Some("me"));
    leader.release().await;
    assert!(server.lock().unwrap().record().released);
    // The answer never arrives in time, but the Lease names us.
    let (client, server) = Server::start(Write::Kept(Duration::from_secs(3)));
    assert!(win(client, &metrics, half).await.is_none());
    let record = server.lock().unwrap().record();
    assert_eq!((record.holder.as_deref(), record.released), (Some(""), true));
}

#[tokio::test(start_paused = true)]
async fn a_take_whose_answer_was_lost_is_known_as_ours_at_the_next_look() {
    let (client, server) = Server::start(Write::Kept(Duration::from_secs(3)));
    let quick = async {
        tokio::time::sleep(Duration::from_millis(2500)).await;
        server.lock().unwrap().write = Write::Kept(Duration::ZERO);
    };
    let stop = CancellationToken::new();
    let candidate = Candidate::new(client, settings(), Arc::default());
    let begun = now();
    let (leader, ()) = tokio::join!(candidate.win(&stop), quick);
    assert!(leader.is_some() && now() - begun < Duration::from_secs(5));
}
