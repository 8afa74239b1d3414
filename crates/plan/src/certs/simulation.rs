//! Simulates the steps over whole CA lifetimes, with leader changes, damage and API servers that apply changes late.

use proptest::prelude::*;

use super::*;

const PROPAGATION_DELAY: u64 = 5;

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn at(second: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + secs(1_000_000 + second)
}

fn policy() -> CertPolicy {
    CertPolicy {
        dns_name: "hook".to_owned(),
        ca_lifetime: secs(300),
        leaf_lifetime: secs(90),
        ca_propagation_delay: secs(PROPAGATION_DELAY),
    }
}

struct RotationSimulation {
    second: u64,
    start: Instant,
    created: u8,
    secret: CaBundle,
    signer: Option<CertId>,
    leaf: Option<LeafCert>,
    webhook_bundles: Vec<CaBundle>,
    /// A webhook configuration that cannot be written.
    lagging: Option<usize>,
    trust: SignerTrust,
    /// Every leaf ever signed: a replica that is cut off may serve any of them until it expires.
    leaves: Vec<LeafCert>,
    /// Former bundles of the webhook configurations and the second of their replacement: an API server may use one for the
    /// propagation delay after that.
    former: Vec<(u64, CaBundle)>,
}

impl RotationSimulation {
    fn new() -> Self {
        Self {
            second: 0,
            start: Instant::now(),
            created: 0,
            secret: CaBundle::default(),
            signer: None,
            leaf: None,
            webhook_bundles: vec![CaBundle::default(); 3],
            lagging: None,
            trust: SignerTrust::default(),
            leaves: Vec::new(),
            former: Vec::new(),
        }
    }

    fn observe(&mut self) -> ObservedCerts {
        let now = self.start + secs(self.second);
        ObservedCerts {
            secret: self.secret.clone(),
            signer: self.signer.clone(),
            leaf: self.leaf.clone(),
            webhook_bundles: self.webhook_bundles.clone(),
            trusted_for: self.trust.observe(self.signer.as_ref(), &self.webhook_bundles, now),
        }
    }

    fn decide(&mut self) -> RotationDecision {
        decide(&self.observe(), &policy(), at(self.second))
    }

    fn find_ca(&self, id: &CertId) -> CaCert {
        let all = self.webhook_bundles.iter().chain([&self.secret]);
        all.flat_map(|bundle| &bundle.cas).find(|ca| ca.id == *id).unwrap().clone()
    }

    fn apply(&mut self, step: RotationStep) {
        match step {
            RotationStep::CreateCa { validity, retain } => {
                self.created += 1;
                let new = CaCert { id: CertId(vec![self.created]), validity, origin: CaOrigin::Ours };
                let retained = retain.iter().map(|id| self.find_ca(id)).collect::<Vec<_>>();
                self.signer = Some(new.id.clone());
                let cas = std::iter::once(new).chain(retained).collect();
                self.secret = CaBundle { cas, corrupt: false };
            }
            RotationStep::WriteBundle { retain } => {
                let cas = retain.iter().map(|id| self.find_ca(id)).collect();
                self.secret = CaBundle { cas, corrupt: false };
            }
            RotationStep::PublishBundle => {
                let lagging = self.lagging;
                let all = self.webhook_bundles.iter_mut().enumerate();
                for (_, bundle) in all.filter(|(index, _)| Some(*index) != lagging) {
                    let old = std::mem::replace(bundle, self.secret.clone());
                    self.former.push((self.second, old));
                }
            }
            RotationStep::SignLeaf { validity } => {
                let leaf = LeafCert {
                    signed_by: self.signer.clone(),
                    validity,
                    dns_names: [policy().dns_name].into(),
                };
                self.leaves.push(leaf.clone());
                self.leaf = Some(leaf);
            }
        }
    }

    /// Applies steps until there is nothing to do at this second; returns how many.
    fn converge(&mut self, check: bool) -> usize {
        for n in 0..10 {
            let RotationDecision::Apply(step) = self.decide() else { return n };
            self.apply(step);
            if check {
                self.check();
            }
        }
        panic!("does not converge: {:?}", self.decide());
    }

    fn check(&self) {
        let now = at(self.second);
        let former = self
            .former
            .iter()
            .filter(|(until, _)| self.second < until + PROPAGATION_DELAY)
            .map(|(_, bundle)| bundle);
        for bundle in former.chain(&self.webhook_bundles) {
            for leaf in self.leaves.iter().filter(|leaf| now < leaf.validity.not_after) {
                let signer = leaf.signed_by.as_ref().unwrap();
                assert!(
                    bundle.find(signer).is_some(),
                    "second {}: {leaf:?} is not trusted by {bundle:?}",
                    self.second
                );
            }
        }
    }

    fn has_valid_leaf(&self) -> bool {
        self.leaf.as_ref().is_some_and(|leaf| at(self.second) < leaf.validity.not_after)
    }

    fn advance(&mut self, seconds: u64) {
        self.second += seconds;
    }
}

#[test]
fn no_leaf_is_served_before_every_api_server_trusts_its_ca() {
    let mut simulation = RotationSimulation::new();
    let mut max_cas = 0;
    for _ in 0..3000 {
        simulation.converge(true);
        simulation.check();
        assert!(
            simulation.second < PROPAGATION_DELAY || simulation.has_valid_leaf(),
            "second {}: no valid leaf",
            simulation.second
        );
        max_cas = max_cas.max(simulation.secret.cas.len());
        simulation.advance(1);
    }
    assert_eq!(max_cas, 2);
    assert!(simulation.created >= 12, "{} CAs in ten lifetimes", simulation.created);
}

#[test]
fn a_configuration_that_lags_holds_up_every_leaf_of_the_new_ca() {
    let mut simulation = RotationSimulation::new();
    simulation.converge(true);
    simulation.advance(PROPAGATION_DELAY);
    simulation.converge(true);
    simulation.lagging = Some(1);
    while simulation.created == 1 {
        simulation.advance(1);
        if let RotationDecision::Apply(step) = simulation.decide() {
            simulation.apply(step);
            simulation.check();
        }
    }
    let new = simulation.signer.clone();
    let leaves = simulation.leaves.len();
    for _ in 0..3 * PROPAGATION_DELAY {
        assert_eq!(simulation.decide(), RotationDecision::Apply(RotationStep::PublishBundle));
        simulation.apply(RotationStep::PublishBundle);
        simulation.check();
        simulation.advance(1);
    }
    let trusting = |simulation: &RotationSimulation| {
        let trusts = |bundle: &CaBundle| new.as_ref().is_some_and(|id| bundle.find(id).is_some());
        simulation.webhook_bundles.iter().map(trusts).collect::<Vec<_>>()
    };
    assert_eq!(trusting(&simulation), [true, false, true]);
    assert_eq!(simulation.leaves.len(), leaves);
    simulation.lagging = None;
    for _ in 0..PROPAGATION_DELAY {
        simulation.converge(true);
        assert_eq!((trusting(&simulation), simulation.leaves.len()), (vec![true; 3], leaves));
        simulation.advance(1);
    }
    simulation.converge(true);
    let signed_by = simulation.leaves[leaves..].iter().map(|leaf| leaf.signed_by.clone());
    assert_eq!(signed_by.collect::<Vec<_>>(), [new]);
    for bundle in &simulation.webhook_bundles {
        assert_eq!(bundle.cas.len(), 2, "the old CA is removed last, after it has expired");
    }
}

#[test]
fn nothing_is_written_between_renewals() {
    let mut simulation = RotationSimulation::new();
    simulation.converge(true);
    simulation.advance(PROPAGATION_DELAY);
    simulation.converge(true);
    let RotationDecision::RecheckAfter(wait) = simulation.decide() else { panic!("does not converge") };
    for _ in 1..wait.as_secs() {
        simulation.advance(1);
        assert_eq!(simulation.converge(true), 0);
    }
    simulation.advance(1);
    assert_eq!(simulation.converge(true), 1);
}

#[derive(Clone, Copy, Debug)]
enum Disturbance {
    Advance(u64),
    NewLeader,
    LoseSecret,
    LoseKey,
    LoseLeaf,
    CorruptBundle,
}

fn disturbance() -> impl Strategy<Value = Disturbance> {
    prop_oneof![
        20 => (1..40u64).prop_map(Disturbance::Advance),
        2 => Just(Disturbance::NewLeader),
        1 => Just(Disturbance::LoseSecret),
        1 => Just(Disturbance::LoseKey),
        1 => Just(Disturbance::LoseLeaf),
        1 => Just(Disturbance::CorruptBundle),
    ]
}

proptest! {
    #[test]
    fn damage_to_the_secret_at_any_time_is_repaired_in_the_safe_order(disturbances in prop::collection::vec(disturbance(), 1..80)) {
        let mut simulation = RotationSimulation::new();
        for disturbance in disturbances {
            match disturbance {
                Disturbance::Advance(seconds) => simulation.advance(seconds),
                Disturbance::NewLeader => simulation.trust = SignerTrust::default(),
                Disturbance::LoseSecret => {
                    (simulation.secret, simulation.signer, simulation.leaf) = (CaBundle::default(), None, None);
                }
                Disturbance::LoseKey => simulation.signer = None,
                Disturbance::LoseLeaf => simulation.leaf = None,
                Disturbance::CorruptBundle => {
                    simulation.secret.cas.pop();
                    simulation.secret.corrupt = true;
                    let signer = simulation.signer.take();
                    simulation.signer = signer.filter(|id| simulation.secret.find(id).is_some());
                }
            }
            simulation.converge(true);
            simulation.check();
        }
        simulation.advance(PROPAGATION_DELAY);
        simulation.converge(true);
        simulation.advance(PROPAGATION_DELAY);
        simulation.converge(true);
        prop_assert!(simulation.has_valid_leaf());
        prop_assert!(matches!(simulation.decide(), RotationDecision::RecheckAfter(_)), "an applied plan is empty the second time");
    }
}
