use super::*;

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn at(n: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + secs(1_000_000 + n)
}

fn valid(from: u64, until: u64) -> Validity {
    Validity { not_before: at(from), not_after: at(until) }
}

fn id(name: &str) -> CertId {
    CertId(name.as_bytes().to_vec())
}

fn ca(name: &str, from: u64, until: u64) -> CaCert {
    CaCert { id: id(name), validity: valid(from, until), origin: CaOrigin::Ours }
}

fn bundle<const N: usize>(cas: [&CaCert; N]) -> CaBundle {
    CaBundle { cas: cas.into_iter().cloned().collect(), corrupt: false }
}

const NAME: &str = "hook.ns.svc";

fn leaf(signed_by: &CaCert, from: u64, until: u64) -> LeafCert {
    LeafCert {
        signed_by: Some(signed_by.id.clone()),
        validity: valid(from, until),
        dns_names: [NAME.to_owned()].into(),
    }
}

fn policy() -> CertPolicy {
    CertPolicy {
        dns_name: NAME.to_owned(),
        ca_lifetime: secs(3000),
        leaf_lifetime: secs(900),
        ca_propagation_delay: secs(5),
    }
}

/// Nothing to do at second 100.
fn up_to_date() -> ObservedCerts {
    let a = ca("a", 0, 3000);
    ObservedCerts {
        secret: bundle([&a]),
        signer: Some(a.id.clone()),
        leaf: Some(leaf(&a, 0, 900)),
        webhook_bundles: vec![bundle([&a]), bundle([&a])],
        trusted_for: Some(secs(60)),
    }
}

fn decide_at(observed: &ObservedCerts, second: u64) -> RotationDecision {
    decide(observed, &policy(), at(second))
}

fn create_ca(second: u64, retain: &[&str]) -> RotationDecision {
    let validity = Validity::starting_at(at(second), secs(3000));
    RotationDecision::Apply(RotationStep::CreateCa {
        validity,
        retain: retain.iter().map(|name| id(name)).collect(),
    })
}

#[test]
fn current_certificates_are_checked_again_at_the_first_renewal() {
    assert_eq!(decide_at(&up_to_date(), 100), RotationDecision::RecheckAfter(secs(500)));
}

#[test]
fn an_empty_cluster_gets_a_ca_first() {
    let observed = ObservedCerts { webhook_bundles: vec![CaBundle::default()], ..ObservedCerts::default() };
    assert_eq!(decide_at(&observed, 100), create_ca(100, &[]));
}

#[test]
fn a_leaf_is_renewed_at_two_thirds_of_its_lifetime() {
    assert_eq!(decide_at(&up_to_date(), 599), RotationDecision::RecheckAfter(secs(1)));
    let validity = Validity::starting_at(at(600), secs(900));
    assert_eq!(decide_at(&up_to_date(), 600), RotationDecision::Apply(RotationStep::SignLeaf { validity }));
    assert_eq!(validity, valid(600 - 90, 1500));
}

#[test]
fn a_ca_is_renewed_at_two_thirds_of_its_lifetime_and_the_old_one_stays_trusted() {
    assert_eq!(decide_at(&up_to_date(), 2000), create_ca(2000, &["a"]));
}

#[test]
fn a_leaf_never_outlives_its_ca() {
    let a = ca("a", 0, 1200);
    let observed =
        ObservedCerts { secret: bundle([&a]), webhook_bundles: vec![bundle([&a])], ..up_to_date() };
    let RotationDecision::Apply(RotationStep::SignLeaf { validity }) = decide_at(&observed, 700) else {
        panic!("no leaf is signed")
    };
    assert_eq!(validity.not_after, at(1200));
}

#[test]
fn a_new_ca_is_published_before_a_leaf_is_signed() {
    let (a, b) = (ca("a", 0, 3000), ca("b", 1900, 5000));
    let mut observed = up_to_date();
    observed.secret = bundle([&b, &a]);
    observed.signer = Some(id("b"));
    observed.leaf = Some(leaf(&a, 1900, 2800));
    observed.trusted_for = None;
    assert_eq!(decide_at(&observed, 2001), RotationDecision::Apply(RotationStep::PublishBundle));
    observed.webhook_bundles[0] = bundle([&b, &a]);
    assert_eq!(decide_at(&observed, 2001), RotationDecision::Apply(RotationStep::PublishBundle));
    observed.webhook_bundles[1] = bundle([&a, &b]);
    assert_eq!(decide_at(&observed, 2001), RotationDecision::RecheckAfter(secs(5)));
    observed.trusted_for = Some(secs(4));
    assert_eq!(decide_at(&observed, 2005), RotationDecision::RecheckAfter(secs(1)));
    observed.trusted_for = Some(secs(5));
    let validity = Validity::starting_at(at(2006), secs(900));
    assert_eq!(decide_at(&observed, 2006), RotationDecision::Apply(RotationStep::SignLeaf { validity }));
}

#[test]
fn an_old_ca_is_removed_only_after_it_has_expired_for_every_clock() {
    let (a, b) = (ca("a", 0, 3000), ca("b", 1990, 5000));
    let mut observed = up_to_date();
    observed.secret = bundle([&b, &a]);
    observed.signer = Some(id("b"));
    observed.leaf = Some(leaf(&b, 3000, 3900));
    observed.webhook_bundles = vec![bundle([&b, &a])];
    assert_eq!(decide_at(&observed, 3299), RotationDecision::RecheckAfter(secs(1)));
    assert_eq!(
        decide_at(&observed, 3300),
        RotationDecision::Apply(RotationStep::WriteBundle { retain: vec![id("b")] })
    );
    observed.secret = bundle([&b]);
    assert_eq!(decide_at(&observed, 3300), RotationDecision::Apply(RotationStep::PublishBundle));
}

#[test]
fn an_old_ca_stays_in_every_configuration_until_it_has_expired_and_one_that_lags_does_not_add_it_again() {
    let (a, b) = (ca("a", 0, 3000), ca("b", 1990, 5000));
    let mut observed = up_to_date();
    observed.secret = bundle([&b, &a]);
    observed.signer = Some(id("b"));
    observed.leaf = Some(leaf(&b, 3000, 3900));
    observed.webhook_bundles = vec![bundle([&b, &a]), bundle([&b])];
    assert_eq!(decide_at(&observed, 3299), RotationDecision::Apply(RotationStep::PublishBundle));
    observed.secret = bundle([&b]);
    assert_eq!(
        decide_at(&observed, 3299),
        RotationDecision::Apply(RotationStep::WriteBundle { retain: vec![id("b"), id("a")] })
    );
    assert_eq!(decide_at(&observed, 3300), RotationDecision::Apply(RotationStep::PublishBundle));
    observed.webhook_bundles[0] = bundle([&b]);
    assert_eq!(decide_at(&observed, 3300), RotationDecision::RecheckAfter(secs(300)));
}

#[test]
fn a_manual_edit_of_a_webhook_configuration_is_repaired() {
    let foreign = CaCert { origin: CaOrigin::Foreign, ..ca("foreign", 0, 9000) };
    let a = ca("a", 0, 3000);
    let edits = [
        CaBundle::default(),
        bundle([&foreign]),
        bundle([&a, &foreign]),
        CaBundle { corrupt: true, ..bundle([&a]) },
    ];
    for edit in edits {
        let observed = ObservedCerts { webhook_bundles: vec![bundle([&a]), edit], ..up_to_date() };
        assert_eq!(decide_at(&observed, 100), RotationDecision::Apply(RotationStep::PublishBundle));
    }
}

#[test]
fn after_a_lost_secret_the_published_ca_stays_trusted() {
    let observed = ObservedCerts { secret: CaBundle::default(), signer: None, leaf: None, ..up_to_date() };
    assert_eq!(decide_at(&observed, 100), create_ca(100, &["a"]));
}

#[test]
fn a_ca_without_its_private_key_is_replaced_and_stays_trusted() {
    let observed = ObservedCerts { signer: None, ..up_to_date() };
    assert_eq!(decide_at(&observed, 100), create_ca(100, &["a"]));
}

#[test]
fn a_corrupt_bundle_is_repaired_from_the_webhook_configurations() {
    let (a, b) = (ca("a", 0, 3000), ca("b", 0, 2000));
    let secret = CaBundle { corrupt: true, ..bundle([&a]) };
    let observed = ObservedCerts { secret, webhook_bundles: vec![bundle([&a, &b])], ..up_to_date() };
    assert_eq!(
        decide_at(&observed, 100),
        RotationDecision::Apply(RotationStep::WriteBundle { retain: vec![id("a"), id("b")] })
    );
}

#[test]
fn an_unservable_or_stale_leaf_is_replaced() {
    let good = leaf(&ca("a", 0, 3000), 0, 900);
    let leaves = [
        None,
        Some(LeafCert { signed_by: None, ..good.clone() }),
        Some(LeafCert { signed_by: Some(id("other")), ..good.clone() }),
        Some(LeafCert { dns_names: BTreeSet::new(), ..good.clone() }),
        Some(LeafCert { dns_names: [NAME.to_owned(), "other.example".to_owned()].into(), ..good.clone() }),
        Some(LeafCert { validity: valid(200, 900), ..good.clone() }),
        Some(LeafCert { validity: valid(0, 90), ..good }),
    ];
    for leaf in leaves {
        let observed = ObservedCerts { leaf, ..up_to_date() };
        let validity = Validity::starting_at(at(100), secs(900));
        let validity = Validity { not_before: validity.not_before.max(at(0)), ..validity };
        assert_eq!(decide_at(&observed, 100), RotationDecision::Apply(RotationStep::SignLeaf { validity }));
    }
}

#[test]
fn a_ca_that_is_not_valid_yet_is_replaced() {
    let a = ca("a", 200, 3000);
    let observed =
        ObservedCerts { secret: bundle([&a]), webhook_bundles: vec![bundle([&a])], ..up_to_date() };
    assert_eq!(decide_at(&observed, 100), create_ca(100, &["a"]));
}

#[test]
fn without_any_webhook_configuration_the_leaf_is_still_signed() {
    let observed = ObservedCerts { webhook_bundles: vec![], leaf: None, ..up_to_date() };
    assert!(matches!(decide_at(&observed, 100), RotationDecision::Apply(RotationStep::SignLeaf { .. })));
}

#[test]
fn repeated_damage_does_not_grow_the_bundle_without_limit() {
    let many: Vec<_> = (0..40).map(|n| ca(&n.to_string(), 0, 3000 + n)).collect();
    let secret = CaBundle { cas: many.clone(), corrupt: false };
    let leaf = leaf(&many[0], 0, 900);
    let observed = ObservedCerts { secret, signer: None, leaf: Some(leaf), ..up_to_date() };
    let RotationDecision::Apply(RotationStep::CreateCa { retain, .. }) = decide_at(&observed, 100) else {
        panic!("no CA is created")
    };
    assert_eq!(retain.len(), MAX_CAS - 1);
    assert_eq!(retain[..2], [id("0"), id("39")]);
}

#[test]
fn certificates_are_backdated_by_a_tenth_of_their_lifetime_and_five_minutes_at_most() {
    assert_eq!(Validity::starting_at(at(100), secs(30)), valid(97, 130));
    assert_eq!(Validity::starting_at(at(1000), secs(90_000)), valid(700, 91_000));
}

#[test]
fn a_ca_with_an_implausible_lifetime_is_removed_from_every_bundle() {
    let longest = MAX_CA_LIFETIME.as_secs();
    let a = ca("a", 0, 3000);
    for (until, retained) in [(longest, true), (longest + 1000, false)] {
        let old = ca("old", 0, until);
        let webhook_bundles = vec![bundle([&a, &old]), bundle([&a])];
        let published = ObservedCerts { webhook_bundles, ..up_to_date() };
        let both = [a.id.clone(), old.id.clone()].into();
        let expected =
            if retained { RotationStep::WriteBundle { retain: both } } else { RotationStep::PublishBundle };
        assert_eq!(decide_at(&published, 100), RotationDecision::Apply(expected));
        let in_secret = ObservedCerts { secret: bundle([&a, &old]), ..up_to_date() };
        let expected = if retained {
            RotationStep::PublishBundle
        } else {
            RotationStep::WriteBundle { retain: vec![a.id.clone()] }
        };
        assert_eq!(decide_at(&in_secret, 100), RotationDecision::Apply(expected));
    }
    let signer = ca("s", 0, longest + 1000);
    let signs = ObservedCerts { secret: bundle([&signer, &a]), signer: Some(signer.id), ..up_to_date() };
    assert_eq!(decide_at(&signs, 100), create_ca(100, &["a"]));
}

#[test]
fn a_wall_clock_step_is_distinguished_from_elapsed_time() {
    let t = Instant::now();
    let stepped = |wall: SystemTime| wall_clock_stepped((at(1000), t), (wall, t + secs(60)));
    assert!(!stepped(at(1060)) && !stepped(at(1059)) && !stepped(at(1061)));
    assert!(stepped(at(1058)) && stepped(at(1062)) && stepped(at(0)) && stepped(at(1_000_000)));
}

#[test]
fn a_ca_that_ends_before_it_begins_is_replaced() {
    let observed = ObservedCerts { secret: bundle([&ca("a", 3000, 0)]), ..up_to_date() };
    assert!(matches!(decide_at(&observed, 5000), RotationDecision::Apply(RotationStep::CreateCa { .. })));
}

#[test]
fn trust_is_counted_from_the_first_observation_and_restarts_after_an_interruption() {
    let (a, b) = (ca("a", 0, 3000), ca("b", 0, 3000));
    let t = Instant::now();
    let mut trust = SignerTrust::default();
    let both = [bundle([&a]), bundle([&a, &b])];
    assert_eq!(trust.observe(Some(&a.id), &both, t), Some(secs(0)));
    assert_eq!(trust.observe(Some(&a.id), &both, t + secs(3)), Some(secs(3)));
    assert_eq!(trust.observe(Some(&b.id), &both, t + secs(4)), None);
    assert_eq!(trust.observe(Some(&a.id), &both, t + secs(5)), Some(secs(0)));
    assert_eq!(trust.observe(Some(&b.id), &both[1..], t + secs(6)), Some(secs(0)));
    assert_eq!(trust.observe(None, &both, t + secs(7)), None);
}

#[test]
fn a_replica_serves_only_a_leaf_that_is_signed_for_its_dns_name() {
    let good = leaf(&ca("a", 0, 1), 0, 1);
    assert_eq!(check_servable(Some(&good), NAME), Ok(()));
    assert_eq!(check_servable(None, NAME), Err(UnservableLeaf::Unreadable));
    assert_eq!(
        check_servable(Some(&LeafCert { signed_by: None, ..good.clone() }), NAME),
        Err(UnservableLeaf::Unsigned)
    );
    assert_eq!(
        check_servable(Some(&LeafCert { dns_names: BTreeSet::new(), ..good }), NAME),
        Err(UnservableLeaf::WrongName)
    );
}
