//! A world that applies the steps: whole lives of authorities, with leaders that change, damage, and readers that lag.

use proptest::prelude::*;

use super::*;

const SETTLE: u64 = 5;

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn at(second: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + secs(1_000_000 + second)
}

fn policy() -> Policy {
    Policy { name: "hook".to_owned(), authority_life: secs(300), leaf_life: secs(90), settle: secs(SETTLE) }
}

struct World {
    second: u64,
    start: Instant,
    made: u8,
    secret: Bundle,
    signer: Option<Id>,
    leaf: Option<Leaf>,
    configurations: Vec<Bundle>,
    trust: Trust,
    /// Every leaf ever written: a replica that is cut off may serve any of them until it expires.
    leaves: Vec<Leaf>,
    /// What stood in a configuration and until which second: an API server may use it a settle time longer.
    past: Vec<(u64, Bundle)>,
}

impl World {
    fn new() -> Self {
        Self {
            second: 0,
            start: Instant::now(),
            made: 0,
            secret: Bundle::default(),
            signer: None,
            leaf: None,
            configurations: vec![Bundle::default(); 3],
            trust: Trust::default(),
            leaves: Vec::new(),
            past: Vec::new(),
        }
    }

    fn observe(&mut self) -> Observed {
        let now = self.start + secs(self.second);
        Observed {
            secret: self.secret.clone(),
            signer: self.signer.clone(),
            leaf: self.leaf.clone(),
            configurations: self.configurations.clone(),
            trusted_for: self.trust.look(self.signer.as_ref(), &self.configurations, now),
        }
    }

    fn next(&mut self) -> Next {
        next(&self.observe(), &policy(), at(self.second))
    }

    fn known(&self, id: &Id) -> Authority {
        let all = self.configurations.iter().chain([&self.secret]);
        all.flat_map(|bundle| &bundle.authorities).find(|authority| authority.id == *id).unwrap().clone()
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Found { validity, keep } => {
                self.made += 1;
                let new = Authority { id: Id(vec![self.made]), validity, origin: Origin::Ours };
                let kept = keep.iter().map(|id| self.known(id)).collect::<Vec<_>>();
                self.signer = Some(new.id.clone());
                let authorities = std::iter::once(new).chain(kept).collect();
                self.secret = Bundle { authorities, damaged: false };
            }
            Step::Bundle { keep } => {
                let authorities = keep.iter().map(|id| self.known(id)).collect();
                self.secret = Bundle { authorities, damaged: false };
            }
            Step::Publish => {
                for bundle in &mut self.configurations {
                    let old = std::mem::replace(bundle, self.secret.clone());
                    self.past.push((self.second, old));
                }
            }
            Step::Sign { validity } => {
                let leaf = Leaf { signed_by: self.signer.clone(), validity, names: [policy().name].into() };
                self.leaves.push(leaf.clone());
                self.leaf = Some(leaf);
            }
        }
    }

    /// Acts until there is nothing to do at this second; says how often.
    fn settle(&mut self, check: bool) -> usize {
        for n in 0..10 {
            let Next::Step(step) = self.next() else { return n };
            self.apply(step);
            if check {
                self.check();
            }
        }
        panic!("never at rest: {:?}", self.next());
    }

    fn check(&self) {
        let now = at(self.second);
        let past =
            self.past.iter().filter(|(until, _)| self.second < until + SETTLE).map(|(_, bundle)| bundle);
        for bundle in past.chain(&self.configurations) {
            for leaf in self.leaves.iter().filter(|leaf| now < leaf.validity.until) {
                let signer = leaf.signed_by.as_ref().unwrap();
                assert!(
                    bundle.find(signer).is_some(),
                    "second {}: {leaf:?} is not in {bundle:?}",
                    self.second
                );
            }
        }
    }

    fn served(&self) -> bool {
        self.leaf.as_ref().is_some_and(|leaf| at(self.second) < leaf.validity.until)
    }

    fn pass(&mut self, seconds: u64) {
        self.second += seconds;
    }
}

#[test]
fn a_whole_rotation_never_shows_a_leaf_that_an_api_server_may_not_know() {
    let mut world = World::new();
    let mut most = 0;
    for _ in 0..3000 {
        world.settle(true);
        world.check();
        assert!(world.second < SETTLE || world.served(), "second {}: nothing to serve", world.second);
        most = most.max(world.secret.authorities.len());
        world.pass(1);
    }
    assert_eq!(most, 2);
    assert!(world.made >= 12, "{} authorities in ten lives", world.made);
}

#[test]
fn nothing_is_written_between_renewals() {
    let mut world = World::new();
    world.settle(true);
    world.pass(SETTLE);
    world.settle(true);
    let Next::Look(rest) = world.next() else { panic!("not at rest") };
    for _ in 1..rest.as_secs() {
        world.pass(1);
        assert_eq!(world.settle(true), 0);
    }
    world.pass(1);
    assert_eq!(world.settle(true), 1);
}

#[derive(Clone, Copy, Debug)]
enum Fate {
    Pass(u64),
    NewLeader,
    LoseSecret,
    LoseKey,
    LoseLeaf,
    TearBundle,
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        20 => (1..40u64).prop_map(Fate::Pass),
        2 => Just(Fate::NewLeader),
        1 => Just(Fate::LoseSecret),
        1 => Just(Fate::LoseKey),
        1 => Just(Fate::LoseLeaf),
        1 => Just(Fate::TearBundle),
    ]
}

proptest! {
    #[test]
    fn damage_to_the_secret_at_any_moment_is_healed_in_the_safe_order(fates in prop::collection::vec(fate(), 1..80)) {
        let mut world = World::new();
        for fate in fates {
            match fate {
                Fate::Pass(seconds) => world.pass(seconds),
                Fate::NewLeader => world.trust = Trust::default(),
                Fate::LoseSecret => {
                    (world.secret, world.signer, world.leaf) = (Bundle::default(), None, None);
                }
                Fate::LoseKey => world.signer = None,
                Fate::LoseLeaf => world.leaf = None,
                Fate::TearBundle => {
                    world.secret.authorities.pop();
                    world.secret.damaged = true;
                    let signer = world.signer.take();
                    world.signer = signer.filter(|id| world.secret.find(id).is_some());
                }
            }
            world.settle(true);
            world.check();
        }
        world.pass(SETTLE);
        world.settle(true);
        world.pass(SETTLE);
        world.settle(true);
        prop_assert!(world.served());
        prop_assert!(matches!(world.next(), Next::Look(_)), "a plan applied is empty the second time");
    }
}
