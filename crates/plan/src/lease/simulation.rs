//! Simulates two candidates with skewed clocks, a network that delays and loses messages, crashes, releases and foreign
//! writes: there are never two leaders.

use std::{cmp::Reverse, collections::BinaryHeap};

use proptest::prelude::*;

use super::*;

const LEASE_DURATION: Duration = Duration::from_secs(10);
const RETRY_PERIOD: Duration = Duration::from_secs(2);
const CALL_TIMEOUT: Duration = Duration::from_secs(3);
const END_MILLIS: u64 = 600_000;
const NAMES: [&str; 2] = ["a", "b"];

/// Deterministic on every machine.
struct SplitMix64(u64);

impl SplitMix64 {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// A local clock: simulated milliseconds, shifted by an offset and scaled by a speed in permille.
#[derive(Clone, Copy)]
struct SkewedClock {
    base: Instant,
    offset: u64,
    speed: u64,
}

impl SkewedClock {
    fn at(self, millis: u64) -> Instant {
        self.base + Duration::from_millis(self.offset) + Duration::from_micros(millis * self.speed)
    }

    /// The simulated time at which this clock shows `local`.
    fn to_simulated(self, local: Instant) -> u64 {
        let elapsed = local.saturating_duration_since(self.base + Duration::from_millis(self.offset));
        u64::try_from(elapsed.as_micros()).unwrap() / self.speed
    }
}

#[derive(Clone)]
enum LeaseRequest {
    Get,
    Write { resource_version: Option<String>, holder: Option<String>, renew_time: SystemTime },
}

#[derive(Clone)]
enum LeaseResponse {
    Read(Option<LeaseRecord>),
    Written(LeaseRecord),
    Conflict,
}

enum SimEvent {
    Arrive {
        index: usize,
        ticket: u64,
        request: LeaseRequest,
    },
    Respond {
        index: usize,
        ticket: u64,
        response: LeaseResponse,
    },
    /// The timeout of a request, or the end of a wait.
    Wake {
        index: usize,
        ticket: u64,
    },
    Crash {
        index: usize,
    },
    /// SIGTERM: the leader's loops have stopped, and it releases the Lease.
    Release {
        index: usize,
    },
    /// A writer that is no candidate changes the Lease, whatever its resourceVersion.
    ForeignWrite(ForeignWrite),
}

#[derive(Clone, Copy)]
enum ForeignWrite {
    ClearHolder,
    /// Takes the Lease by force, and releases it soon after as client-go does.
    Steal,
    Release,
}

struct SimCandidate {
    clock: SkewedClock,
    observed: Option<ObservedLease>,
    until: Option<Instant>,
    started: Instant,
    /// Responses and timeouts with another ticket are stale.
    ticket: u64,
    writing: bool,
}

struct LeaseSimulation {
    rng: SplitMix64,
    now: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    events: std::collections::HashMap<u64, SimEvent>,
    count: u64,
    lease: Option<LeaseRecord>,
    resource_version: u64,
    candidates: Vec<SimCandidate>,
    /// Which candidate led from when to when, in simulated time.
    terms: Vec<(u64, u64, usize)>,
}

impl LeaseSimulation {
    fn new(seed: u64) -> Self {
        let mut rng = SplitMix64(seed);
        let base = Instant::now();
        let candidates = (0..2)
            .map(|_| {
                let clock = SkewedClock { base, offset: rng.below(240_000), speed: 900 + rng.below(201) };
                SimCandidate { clock, observed: None, until: None, started: base, ticket: 0, writing: false }
            })
            .collect();
        let mut simulation = Self {
            rng,
            now: 0,
            queue: BinaryHeap::new(),
            events: std::collections::HashMap::new(),
            count: 0,
            lease: None,
            resource_version: 0,
            candidates,
            terms: Vec::new(),
        };
        for index in 0..2 {
            let delay = simulation.rng.below(3000);
            simulation.wake(index, delay);
            for _ in 0..simulation.rng.below(6) {
                let at = simulation.rng.below(END_MILLIS);
                simulation.schedule(at, SimEvent::Crash { index });
            }
            for _ in 0..simulation.rng.below(6) {
                let at = simulation.rng.below(END_MILLIS);
                simulation.schedule(at, SimEvent::Release { index });
            }
        }
        for _ in 0..simulation.rng.below(20) {
            let at = simulation.rng.below(END_MILLIS);
            let what = if simulation.rng.one_in(2) { ForeignWrite::ClearHolder } else { ForeignWrite::Steal };
            simulation.schedule(at, SimEvent::ForeignWrite(what));
        }
        simulation
    }

    fn schedule(&mut self, at: u64, event: SimEvent) {
        self.count += 1;
        self.events.insert(self.count, event);
        self.queue.push(Reverse((at, self.count)));
    }

    fn wake(&mut self, index: usize, delay: u64) {
        self.candidates[index].ticket = self.count;
        let ticket = self.count;
        self.schedule(self.now + delay, SimEvent::Wake { index, ticket });
    }

    fn delay(&mut self) -> u64 {
        match self.rng.below(10) {
            0 => self.rng.below(30_000),
            1 | 2 => self.rng.below(3_000),
            _ => self.rng.below(50),
        }
    }

    fn send(&mut self, index: usize, request: LeaseRequest) {
        let deadline = u64::try_from(CALL_TIMEOUT.as_millis()).unwrap();
        self.wake(index, deadline);
        let candidate = &mut self.candidates[index];
        candidate.started = candidate.clock.at(self.now);
        candidate.writing = matches!(request, LeaseRequest::Write { .. });
        let ticket = candidate.ticket;
        if self.rng.one_in(12) {
            return;
        }
        let at = self.now + self.delay();
        self.schedule(at, SimEvent::Arrive { index, ticket, request });
    }

    /// The API server: compares resourceVersions, nothing else.
    fn handle_request(&mut self, request: LeaseRequest) -> LeaseResponse {
        match request {
            LeaseRequest::Get => LeaseResponse::Read(self.lease.clone()),
            LeaseRequest::Write { resource_version, .. }
                if resource_version != self.lease.as_ref().map(|lease| lease.resource_version.clone()) =>
            {
                LeaseResponse::Conflict
            }
            LeaseRequest::Write { holder, renew_time, .. } => {
                self.resource_version += 1;
                let resource_version = self.resource_version.to_string();
                let released = holder.is_none();
                let duration = Some(if released { Duration::from_secs(1) } else { LEASE_DURATION });
                let record = LeaseRecord {
                    holder,
                    renew_time: Some(renew_time),
                    transitions: 0,
                    duration,
                    released,
                    resource_version,
                };
                self.lease = Some(record.clone());
                LeaseResponse::Written(record)
            }
        }
    }

    /// A merge patch: fields that it does not name stay, the release annotation among them.
    fn foreign_write(&mut self, what: ForeignWrite) {
        let Some(lease) = &mut self.lease else { return };
        self.resource_version += 1;
        lease.resource_version = self.resource_version.to_string();
        match what {
            ForeignWrite::ClearHolder => lease.holder = None,
            ForeignWrite::Steal => {
                (lease.holder, lease.duration) = (Some("thief".to_owned()), Some(LEASE_DURATION));
            }
            ForeignWrite::Release => (lease.holder, lease.duration) = (None, Some(Duration::from_secs(1))),
        }
        if let ForeignWrite::Steal = what {
            let at = self.now + self.rng.below(4_000);
            self.schedule(at, SimEvent::ForeignWrite(ForeignWrite::Release));
        }
    }

    fn write(&mut self, index: usize, holder: Option<String>) {
        let resource_version = self.candidates[index]
            .observed
            .as_ref()
            .and_then(ObservedLease::record)
            .map(|r| r.resource_version.clone());
        // The wall clock is up to two minutes off, and no candidate may depend on it.
        let renew_time = SystemTime::UNIX_EPOCH + Duration::from_millis(self.now + self.rng.below(240_000));
        if let (Some(observed), Some(me)) = (&mut self.candidates[index].observed, &holder) {
            observed.record_attempt(me, renew_time);
        }
        self.send(index, LeaseRequest::Write { resource_version, holder, renew_time });
    }

    fn wait(&mut self, index: usize, max_wait: Duration) {
        let pause = u64::try_from(max_wait.min(RETRY_PERIOD).as_millis()).unwrap();
        // The process may be stopped at any time.
        let late = if self.rng.one_in(20) { self.rng.below(30_000) } else { 0 };
        self.wake(index, pause + 1 + late);
    }

    fn end_term(&mut self, index: usize) {
        self.candidates[index].until = None;
        for term in self.terms.iter_mut().filter(|term| term.2 == index) {
            term.1 = term.1.min(self.now);
        }
    }

    fn act(&mut self, index: usize) {
        let candidate = &self.candidates[index];
        let now = candidate.clock.at(self.now);
        let Some(observed) = candidate.observed.clone() else {
            return self.send(index, LeaseRequest::Get);
        };
        if let Some(until) = candidate.until {
            match decide_renewal(&observed, NAMES[index], until, now) {
                RenewDecision::Renew => self.write(index, Some(NAMES[index].to_owned())),
                RenewDecision::StepDown => self.crash(index),
            }
            return;
        }
        match decide_election(&observed, NAMES[index], LEASE_DURATION, now) {
            ElectionDecision::Acquire | ElectionDecision::Renew => {
                self.write(index, Some(NAMES[index].to_owned()));
            }
            ElectionDecision::Wait(_) => self.send(index, LeaseRequest::Get),
        }
    }

    fn crash(&mut self, index: usize) {
        self.end_term(index);
        self.candidates[index].observed = None;
        let delay = self.rng.below(5_000);
        self.wake(index, delay);
    }

    fn handle_response(&mut self, index: usize, response: LeaseResponse) {
        let now = self.candidates[index].clock.at(self.now);
        let candidate = &mut self.candidates[index];
        let observe = |observed: Option<ObservedLease>, record| match observed {
            Some(observed) => observed.observe(record, now),
            None => ObservedLease::first(record, now),
        };
        match response {
            LeaseResponse::Conflict => {
                self.send(index, LeaseRequest::Get);
                return;
            }
            LeaseResponse::Read(record) => {
                candidate.observed = Some(observe(candidate.observed.take(), record));
            }
            LeaseResponse::Written(record) if record.holder.is_none() => return self.crash(index),
            LeaseResponse::Written(record) => {
                candidate.observed = Some(observe(candidate.observed.take(), Some(record)));
                let until = fence_until(candidate.started, LEASE_DURATION);
                candidate.until = Some(until);
                let end = candidate.clock.to_simulated(until);
                if self.now < end {
                    self.terms.push((self.now, end, index));
                }
                return self.wait(index, RETRY_PERIOD);
            }
        }
        let candidate = &self.candidates[index];
        match candidate
            .observed
            .as_ref()
            .map(|observed| decide_election(observed, NAMES[index], LEASE_DURATION, now))
        {
            Some(ElectionDecision::Wait(remaining)) if candidate.until.is_none() => {
                self.wait(index, remaining);
            }
            Some(_) | None => self.act(index),
        }
    }

    fn handle(&mut self, event: SimEvent) {
        match event {
            SimEvent::Arrive { index, ticket, request } => {
                let response = self.handle_request(request);
                if !self.rng.one_in(12) {
                    let at = self.now + self.delay();
                    self.schedule(at, SimEvent::Respond { index, ticket, response });
                }
            }
            SimEvent::Respond { index, ticket, response } if ticket == self.candidates[index].ticket => {
                self.handle_response(index, response);
            }
            SimEvent::Wake { index, ticket } if ticket == self.candidates[index].ticket => {
                // After a write with unknown outcome the record has to be read.
                if std::mem::take(&mut self.candidates[index].writing)
                    || self.candidates[index].until.is_none()
                {
                    let expired = self.candidates[index]
                        .until
                        .is_some_and(|until| self.candidates[index].clock.at(self.now) >= until);
                    if expired {
                        return self.crash(index);
                    }
                    return self.send(index, LeaseRequest::Get);
                }
                self.act(index);
            }
            SimEvent::Crash { index } => self.crash(index),
            SimEvent::ForeignWrite(what) => self.foreign_write(what),
            SimEvent::Release { index } if self.candidates[index].until.is_some() => {
                self.end_term(index);
                self.write(index, None);
            }
            SimEvent::Respond { .. } | SimEvent::Wake { .. } | SimEvent::Release { .. } => {}
        }
    }

    fn run(mut self) -> Vec<(u64, u64, usize)> {
        while let Some(Reverse((at, id))) = self.queue.pop() {
            self.now = at;
            if at > END_MILLIS {
                break;
            }
            let event = self.events.remove(&id).unwrap();
            self.handle(event);
        }
        self.terms.sort_unstable();
        self.terms
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn there_is_never_a_moment_with_two_leaders(seed: u64) {
        let terms = LeaseSimulation::new(seed).run();
        prop_assert!(!terms.is_empty(), "no candidate ever led");
        for (n, a) in terms.iter().enumerate() {
            for b in terms[n + 1..].iter().take_while(|b| b.0 < a.1) {
                prop_assert_eq!(a.2, b.2, "{:?} and {:?} led at the same time", a, b);
            }
        }
    }
}

#[test]
fn the_simulation_detects_a_leader_that_acts_past_its_fence() {
    // Leaders that act for one and a half lease durations must be detected within a few seeds.
    let overlaps = (0..200).any(|seed| {
        let terms = LeaseSimulation::new(seed).run();
        let extended: Vec<_> =
            terms.iter().map(|&(from, to, index)| (from, from + (to - from) * 9 / 4, index)).collect();
        extended.iter().enumerate().any(|(n, a)| extended[n + 1..].iter().any(|b| b.0 < a.1 && a.2 != b.2))
    });
    assert!(overlaps);
}
