//! Two candidates with clocks of their own, a network that delays and loses, crashes, releases, and hands that meddle: never
//! two leaders.

use std::{cmp::Reverse, collections::BinaryHeap};

use proptest::prelude::*;

use super::*;

const TERM: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_secs(2);
const DEADLINE: Duration = Duration::from_secs(3);
const END: u64 = 600_000;
const NAMES: [&str; 2] = ["a", "b"];

/// splitmix64: enough to be fair, and the same on every machine.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % below
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.roll(n) == 0
    }
}

/// A local clock: true milliseconds, moved by an offset and run at a speed in permille.
#[derive(Clone, Copy)]
struct Clock {
    base: Instant,
    offset: u64,
    speed: u64,
}

impl Clock {
    fn at(self, truth: u64) -> Instant {
        self.base + Duration::from_millis(self.offset) + Duration::from_micros(truth * self.speed)
    }

    /// The true time at which this clock shows `local`.
    fn truth(self, local: Instant) -> u64 {
        let passed = local.saturating_duration_since(self.base + Duration::from_millis(self.offset));
        u64::try_from(passed.as_micros()).unwrap() / self.speed
    }
}

#[derive(Clone)]
enum Call {
    Look,
    Write { version: Option<String>, holder: Option<String>, renewed: SystemTime },
}

#[derive(Clone)]
enum Answer {
    Shown(Option<Record>),
    Written(Record),
    Conflict,
}

enum Event {
    Arrive {
        who: usize,
        ticket: u64,
        call: Call,
    },
    Answer {
        who: usize,
        ticket: u64,
        answer: Answer,
    },
    /// The deadline of a call, or the end of a pause.
    Wake {
        who: usize,
        ticket: u64,
    },
    Crash {
        who: usize,
    },
    /// SIGTERM: the leader's loops have stopped, the Lease is given back.
    Release {
        who: usize,
    },
    /// Somebody who is no candidate writes the Lease, whatever its version.
    Meddle(Meddling),
}

#[derive(Clone, Copy)]
enum Meddling {
    Empty,
    /// Takes the Lease by force, and gives it back soon after as client-go would.
    Steal,
    GiveBack,
}

struct Candidate {
    clock: Clock,
    seen: Option<Seen>,
    until: Option<Instant>,
    started: Instant,
    /// Answers and wake-ups with another ticket belong to a past that is over.
    ticket: u64,
    writing: bool,
}

struct World {
    dice: Dice,
    now: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    events: std::collections::HashMap<u64, Event>,
    count: u64,
    lease: Option<Record>,
    version: u64,
    candidates: Vec<Candidate>,
    /// Who led from when to when, in true time.
    reigns: Vec<(u64, u64, usize)>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut dice = Dice(seed);
        let base = Instant::now();
        let candidates = (0..2)
            .map(|_| {
                let clock = Clock { base, offset: dice.roll(240_000), speed: 900 + dice.roll(201) };
                Candidate { clock, seen: None, until: None, started: base, ticket: 0, writing: false }
            })
            .collect();
        let mut world = Self {
            dice,
            now: 0,
            queue: BinaryHeap::new(),
            events: std::collections::HashMap::new(),
            count: 0,
            lease: None,
            version: 0,
            candidates,
            reigns: Vec::new(),
        };
        for who in 0..2 {
            let delay = world.dice.roll(3000);
            world.wake(who, delay);
            for _ in 0..world.dice.roll(6) {
                let at = world.dice.roll(END);
                world.put(at, Event::Crash { who });
            }
            for _ in 0..world.dice.roll(6) {
                let at = world.dice.roll(END);
                world.put(at, Event::Release { who });
            }
        }
        for _ in 0..world.dice.roll(20) {
            let at = world.dice.roll(END);
            let what = if world.dice.one_in(2) { Meddling::Empty } else { Meddling::Steal };
            world.put(at, Event::Meddle(what));
        }
        world
    }

    fn put(&mut self, at: u64, event: Event) {
        self.count += 1;
        self.events.insert(self.count, event);
        self.queue.push(Reverse((at, self.count)));
    }

    fn wake(&mut self, who: usize, delay: u64) {
        self.candidates[who].ticket = self.count;
        let ticket = self.count;
        self.put(self.now + delay, Event::Wake { who, ticket });
    }

    fn delay(&mut self) -> u64 {
        match self.dice.roll(10) {
            0 => self.dice.roll(30_000),
            1 | 2 => self.dice.roll(3_000),
            _ => self.dice.roll(50),
        }
    }

    fn send(&mut self, who: usize, call: Call) {
        let deadline = u64::try_from(DEADLINE.as_millis()).unwrap();
        self.wake(who, deadline);
        let candidate = &mut self.candidates[who];
        candidate.started = candidate.clock.at(self.now);
        candidate.writing = matches!(call, Call::Write { .. });
        let ticket = candidate.ticket;
        if self.dice.one_in(12) {
            return;
        }
        let at = self.now + self.delay();
        self.put(at, Event::Arrive { who, ticket, call });
    }

    /// The API server: compares versions, nothing else.
    fn serve(&mut self, call: Call) -> Answer {
        match call {
            Call::Look => Answer::Shown(self.lease.clone()),
            Call::Write { version, .. }
                if version != self.lease.as_ref().map(|lease| lease.version.clone()) =>
            {
                Answer::Conflict
            }
            Call::Write { holder, renewed, .. } => {
                self.version += 1;
                let version = self.version.to_string();
                let released = holder.is_none();
                let term = Some(if released { Duration::from_secs(1) } else { TERM });
                let record =
                    Record { holder, renewed: Some(renewed), transitions: 0, term, released, version };
                self.lease = Some(record.clone());
                Answer::Written(record)
            }
        }
    }

    /// A merge patch: what it does not name stays, the mark of a release among it.
    fn meddle(&mut self, what: Meddling) {
        let Some(lease) = &mut self.lease else { return };
        self.version += 1;
        lease.version = self.version.to_string();
        match what {
            Meddling::Empty => lease.holder = None,
            Meddling::Steal => (lease.holder, lease.term) = (Some("thief".to_owned()), Some(TERM)),
            Meddling::GiveBack => (lease.holder, lease.term) = (None, Some(Duration::from_secs(1))),
        }
        if let Meddling::Steal = what {
            let at = self.now + self.dice.roll(4_000);
            self.put(at, Event::Meddle(Meddling::GiveBack));
        }
    }

    fn write(&mut self, who: usize, holder: Option<String>) {
        let version = self.candidates[who].seen.as_ref().and_then(Seen::record).map(|r| r.version.clone());
        // A wall clock up to two minutes off, which nobody may care about.
        let renewed = SystemTime::UNIX_EPOCH + Duration::from_millis(self.now + self.dice.roll(240_000));
        if let (Some(seen), Some(me)) = (&mut self.candidates[who].seen, &holder) {
            seen.attempt(me, renewed);
        }
        self.send(who, Call::Write { version, holder, renewed });
    }

    fn rest(&mut self, who: usize, at_most: Duration) {
        let pause = u64::try_from(at_most.min(PAUSE).as_millis()).unwrap();
        // A process may be stopped for a while at any time.
        let late = if self.dice.one_in(20) { self.dice.roll(30_000) } else { 0 };
        self.wake(who, pause + 1 + late);
    }

    fn end_reign(&mut self, who: usize) {
        self.candidates[who].until = None;
        for reign in self.reigns.iter_mut().filter(|reign| reign.2 == who) {
            reign.1 = reign.1.min(self.now);
        }
    }

    fn act(&mut self, who: usize) {
        let candidate = &self.candidates[who];
        let now = candidate.clock.at(self.now);
        let Some(seen) = candidate.seen.clone() else {
            return self.send(who, Call::Look);
        };
        if let Some(until) = candidate.until {
            match office(&seen, NAMES[who], until, now) {
                Office::Renew => self.write(who, Some(NAMES[who].to_owned())),
                Office::GiveUp => self.crash(who),
            }
            return;
        }
        match turn(&seen, NAMES[who], TERM, now) {
            Turn::Take | Turn::Keep => self.write(who, Some(NAMES[who].to_owned())),
            Turn::Wait(_) => self.send(who, Call::Look),
        }
    }

    fn crash(&mut self, who: usize) {
        self.end_reign(who);
        self.candidates[who].seen = None;
        let delay = self.dice.roll(5_000);
        self.wake(who, delay);
    }

    fn answered(&mut self, who: usize, answer: Answer) {
        let now = self.candidates[who].clock.at(self.now);
        let candidate = &mut self.candidates[who];
        let look = |seen: Option<Seen>, record| match seen {
            Some(seen) => seen.look(record, now),
            None => Seen::first(record, now),
        };
        match answer {
            Answer::Conflict => {
                self.send(who, Call::Look);
                return;
            }
            Answer::Shown(record) => candidate.seen = Some(look(candidate.seen.take(), record)),
            Answer::Written(record) if record.holder.is_none() => return self.crash(who),
            Answer::Written(record) => {
                candidate.seen = Some(look(candidate.seen.take(), Some(record)));
                let until = tenure(candidate.started, TERM);
                candidate.until = Some(until);
                let end = candidate.clock.truth(until);
                if self.now < end {
                    self.reigns.push((self.now, end, who));
                }
                return self.rest(who, PAUSE);
            }
        }
        let candidate = &self.candidates[who];
        match candidate.seen.as_ref().map(|seen| turn(seen, NAMES[who], TERM, now)) {
            Some(Turn::Wait(rest)) if candidate.until.is_none() => self.rest(who, rest),
            Some(_) | None => self.act(who),
        }
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Arrive { who, ticket, call } => {
                let answer = self.serve(call);
                if !self.dice.one_in(12) {
                    let at = self.now + self.delay();
                    self.put(at, Event::Answer { who, ticket, answer });
                }
            }
            Event::Answer { who, ticket, answer } if ticket == self.candidates[who].ticket => {
                self.answered(who, answer);
            }
            Event::Wake { who, ticket } if ticket == self.candidates[who].ticket => {
                // After a write whose fate is unknown the record has to be looked at.
                if std::mem::take(&mut self.candidates[who].writing) || self.candidates[who].until.is_none() {
                    let expired = self.candidates[who]
                        .until
                        .is_some_and(|until| self.candidates[who].clock.at(self.now) >= until);
                    if expired {
                        return self.crash(who);
                    }
                    return self.send(who, Call::Look);
                }
                self.act(who);
            }
            Event::Crash { who } => self.crash(who),
            Event::Meddle(what) => self.meddle(what),
            Event::Release { who } if self.candidates[who].until.is_some() => {
                self.end_reign(who);
                self.write(who, None);
            }
            Event::Answer { .. } | Event::Wake { .. } | Event::Release { .. } => {}
        }
    }

    fn run(mut self) -> Vec<(u64, u64, usize)> {
        while let Some(Reverse((at, id))) = self.queue.pop() {
            self.now = at;
            if at > END {
                break;
            }
            let event = self.events.remove(&id).unwrap();
            self.step(event);
        }
        self.reigns.sort_unstable();
        self.reigns
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn there_is_never_a_moment_with_two_leaders(seed: u64) {
        let reigns = World::new(seed).run();
        prop_assert!(!reigns.is_empty(), "nobody ever led");
        for (n, a) in reigns.iter().enumerate() {
            for b in reigns[n + 1..].iter().take_while(|b| b.0 < a.1) {
                prop_assert_eq!(a.2, b.2, "{:?} and {:?} led at the same time", a, b);
            }
        }
    }
}

#[test]
fn the_simulation_finds_the_fault_when_a_leader_overstays() {
    // The checker itself is checked: leaders that act for a term and a half are caught within a few seeds.
    let overlaps = (0..200).any(|seed| {
        let reigns = World::new(seed).run();
        let long: Vec<_> =
            reigns.iter().map(|&(from, to, who)| (from, from + (to - from) * 9 / 4, who)).collect();
        long.iter().enumerate().any(|(n, a)| long[n + 1..].iter().any(|b| b.0 < a.1 && a.2 != b.2))
    });
    assert!(overlaps);
}
