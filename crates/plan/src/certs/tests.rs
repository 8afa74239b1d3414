use super::*;

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn at(n: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + secs(1_000_000 + n)
}

fn valid(from: u64, until: u64) -> Validity {
    Validity { from: at(from), until: at(until) }
}

fn id(name: &str) -> Id {
    Id(name.as_bytes().to_vec())
}

fn authority(name: &str, from: u64, until: u64) -> Authority {
    Authority { id: id(name), validity: valid(from, until), origin: Origin::Ours }
}

fn bundle<const N: usize>(authorities: [&Authority; N]) -> Bundle {
    Bundle { authorities: authorities.into_iter().cloned().collect(), damaged: false }
}

const NAME: &str = "hook.ns.svc";

fn leaf(signed_by: &Authority, from: u64, until: u64) -> Leaf {
    Leaf {
        signed_by: Some(signed_by.id.clone()),
        validity: valid(from, until),
        names: [NAME.to_owned()].into(),
    }
}

fn policy() -> Policy {
    Policy { name: NAME.to_owned(), authority_life: secs(3000), leaf_life: secs(900), settle: secs(5) }
}

/// Everything as it should be at second 100.
fn settled() -> Observed {
    let a = authority("a", 0, 3000);
    Observed {
        secret: bundle([&a]),
        signer: Some(a.id.clone()),
        leaf: Some(leaf(&a, 0, 900)),
        configurations: vec![bundle([&a]), bundle([&a])],
        trusted_for: Some(secs(60)),
    }
}

fn next_at(observed: &Observed, second: u64) -> Next {
    next(observed, &policy(), at(second))
}

fn found(second: u64, keep: &[&str]) -> Next {
    let validity = Validity::starting(at(second), secs(3000));
    Next::Step(Step::Found { validity, keep: keep.iter().map(|name| id(name)).collect() })
}

#[test]
fn nothing_is_done_while_all_is_well_and_the_next_look_is_the_first_renewal() {
    assert_eq!(next_at(&settled(), 100), Next::Look(secs(500)));
}

#[test]
fn an_empty_cluster_gets_an_authority_first() {
    let observed = Observed { configurations: vec![Bundle::default()], ..Observed::default() };
    assert_eq!(next_at(&observed, 100), found(100, &[]));
}

#[test]
fn a_leaf_is_renewed_at_two_thirds_of_its_life() {
    assert_eq!(next_at(&settled(), 599), Next::Look(secs(1)));
    let validity = Validity::starting(at(600), secs(900));
    assert_eq!(next_at(&settled(), 600), Next::Step(Step::Sign { validity }));
    assert_eq!(validity, valid(600 - 90, 1500));
}

#[test]
fn an_authority_is_renewed_at_two_thirds_of_its_life_and_the_old_one_stays_trusted() {
    assert_eq!(next_at(&settled(), 2000), found(2000, &["a"]));
}

#[test]
fn a_leaf_never_outlives_its_authority() {
    let a = authority("a", 0, 1200);
    let observed = Observed { secret: bundle([&a]), configurations: vec![bundle([&a])], ..settled() };
    let Next::Step(Step::Sign { validity }) = next_at(&observed, 700) else { panic!("no leaf is signed") };
    assert_eq!(validity.until, at(1200));
}

#[test]
fn a_new_authority_is_published_before_a_leaf_is_signed() {
    let (a, b) = (authority("a", 0, 3000), authority("b", 1900, 5000));
    let mut observed = settled();
    observed.secret = bundle([&b, &a]);
    observed.signer = Some(id("b"));
    observed.leaf = Some(leaf(&a, 1900, 2800));
    observed.trusted_for = None;
    assert_eq!(next_at(&observed, 2001), Next::Step(Step::Publish));
    observed.configurations[0] = bundle([&b, &a]);
    assert_eq!(next_at(&observed, 2001), Next::Step(Step::Publish));
    observed.configurations[1] = bundle([&a, &b]);
    assert_eq!(next_at(&observed, 2001), Next::Look(secs(5)));
    observed.trusted_for = Some(secs(4));
    assert_eq!(next_at(&observed, 2005), Next::Look(secs(1)));
    observed.trusted_for = Some(secs(5));
    let validity = Validity::starting(at(2006), secs(900));
    assert_eq!(next_at(&observed, 2006), Next::Step(Step::Sign { validity }));
}

#[test]
fn an_old_authority_leaves_only_after_it_has_expired_for_every_clock() {
    let (a, b) = (authority("a", 0, 3000), authority("b", 1990, 5000));
    let mut observed = settled();
    observed.secret = bundle([&b, &a]);
    observed.signer = Some(id("b"));
    observed.leaf = Some(leaf(&b, 3000, 3900));
    observed.configurations = vec![bundle([&b, &a])];
    assert_eq!(next_at(&observed, 3299), Next::Look(secs(1)));
    assert_eq!(next_at(&observed, 3300), Next::Step(Step::Bundle { keep: vec![id("b")] }));
    observed.secret = bundle([&b]);
    assert_eq!(next_at(&observed, 3300), Next::Step(Step::Publish));
}

#[test]
fn a_hand_edit_of_a_configuration_is_repaired() {
    let foreign = Authority { origin: Origin::Foreign, ..authority("evil", 0, 9000) };
    let a = authority("a", 0, 3000);
    let edits = [
        Bundle::default(),
        bundle([&foreign]),
        bundle([&a, &foreign]),
        Bundle { damaged: true, ..bundle([&a]) },
    ];
    for edit in edits {
        let observed = Observed { configurations: vec![bundle([&a]), edit], ..settled() };
        assert_eq!(next_at(&observed, 100), Next::Step(Step::Publish));
    }
}

#[test]
fn a_lost_secret_keeps_the_authority_that_the_configurations_still_trust() {
    let observed = Observed { secret: Bundle::default(), signer: None, leaf: None, ..settled() };
    assert_eq!(next_at(&observed, 100), found(100, &["a"]));
}

#[test]
fn an_authority_without_its_key_is_replaced_and_stays_trusted() {
    let observed = Observed { signer: None, ..settled() };
    assert_eq!(next_at(&observed, 100), found(100, &["a"]));
}

#[test]
fn a_damaged_bundle_is_mended_from_what_the_configurations_know() {
    let (a, b) = (authority("a", 0, 3000), authority("b", 0, 2000));
    let secret = Bundle { damaged: true, ..bundle([&a]) };
    let observed = Observed { secret, configurations: vec![bundle([&a, &b])], ..settled() };
    assert_eq!(next_at(&observed, 100), Next::Step(Step::Bundle { keep: vec![id("a"), id("b")] }));
}

#[test]
fn an_unfit_leaf_is_replaced() {
    let good = leaf(&authority("a", 0, 3000), 0, 900);
    let leaves = [
        None,
        Some(Leaf { signed_by: None, ..good.clone() }),
        Some(Leaf { signed_by: Some(id("other")), ..good.clone() }),
        Some(Leaf { names: BTreeSet::new(), ..good.clone() }),
        Some(Leaf { names: [NAME.to_owned(), "bank.example".to_owned()].into(), ..good.clone() }),
        Some(Leaf { validity: valid(200, 900), ..good.clone() }),
        Some(Leaf { validity: valid(0, 90), ..good }),
    ];
    for leaf in leaves {
        let observed = Observed { leaf, ..settled() };
        let validity = Validity::starting(at(100), secs(900));
        let validity = Validity { from: validity.from.max(at(0)), ..validity };
        assert_eq!(next_at(&observed, 100), Next::Step(Step::Sign { validity }));
    }
}

#[test]
fn an_authority_from_the_future_is_replaced() {
    let a = authority("a", 200, 3000);
    let observed = Observed { secret: bundle([&a]), configurations: vec![bundle([&a])], ..settled() };
    assert_eq!(next_at(&observed, 100), found(100, &["a"]));
}

#[test]
fn without_any_configuration_the_leaf_is_still_made() {
    let observed = Observed { configurations: vec![], leaf: None, ..settled() };
    assert!(matches!(next_at(&observed, 100), Next::Step(Step::Sign { .. })));
}

#[test]
fn endless_damage_does_not_grow_the_bundle_without_end() {
    let many: Vec<_> = (0..40).map(|n| authority(&n.to_string(), 0, 3000 + n)).collect();
    let secret = Bundle { authorities: many.clone(), damaged: false };
    let leaf = leaf(&many[0], 0, 900);
    let observed = Observed { secret, signer: None, leaf: Some(leaf), ..settled() };
    let Next::Step(Step::Found { keep, .. }) = next_at(&observed, 100) else { panic!("no new authority") };
    assert_eq!(keep.len(), MOST_AUTHORITIES - 1);
    assert_eq!(keep[..2], [id("0"), id("39")]);
}

#[test]
fn certificates_are_dated_back_by_a_tenth_of_their_life_and_five_minutes_at_most() {
    assert_eq!(Validity::starting(at(100), secs(30)), valid(97, 130));
    assert_eq!(Validity::starting(at(1000), secs(90_000)), valid(700, 91_000));
}

#[test]
fn an_authority_that_claims_to_live_for_ever_is_not_kept_wherever_it_stands() {
    let longest = LONGEST_LIFE.as_secs();
    let a = authority("a", 0, 3000);
    for (until, kept) in [(longest, true), (longest + 1000, false)] {
        let old = authority("old", 0, until);
        let configurations = vec![bundle([&a, &old]), bundle([&a])];
        let there = Observed { configurations, ..settled() };
        let both = [a.id.clone(), old.id.clone()].into();
        let expected = if kept { Step::Bundle { keep: both } } else { Step::Publish };
        assert_eq!(next_at(&there, 100), Next::Step(expected));
        let here = Observed { secret: bundle([&a, &old]), ..settled() };
        let expected = if kept { Step::Publish } else { Step::Bundle { keep: vec![a.id.clone()] } };
        assert_eq!(next_at(&here, 100), Next::Step(expected));
    }
    let signer = authority("s", 0, longest + 1000);
    let signs = Observed { secret: bundle([&signer, &a]), signer: Some(signer.id), ..settled() };
    assert_eq!(next_at(&signs, 100), found(100, &["a"]));
}

#[test]
fn a_step_of_the_wall_clock_is_told_from_time_that_passes() {
    let t = Instant::now();
    let was_set = |wall: SystemTime| clock_was_set((at(1000), t), (wall, t + secs(60)));
    assert!(!was_set(at(1060)) && !was_set(at(1059)) && !was_set(at(1061)));
    assert!(was_set(at(1058)) && was_set(at(1062)) && was_set(at(0)) && was_set(at(1_000_000)));
}

#[test]
fn nonsense_dates_do_no_harm() {
    let observed = Observed { secret: bundle([&authority("a", 3000, 0)]), ..settled() };
    assert!(matches!(next_at(&observed, 5000), Next::Step(Step::Found { .. })));
}

#[test]
fn trust_is_counted_from_the_first_look_and_starts_anew_after_a_break() {
    let (a, b) = (authority("a", 0, 3000), authority("b", 0, 3000));
    let t = Instant::now();
    let mut trust = Trust::default();
    let both = [bundle([&a]), bundle([&a, &b])];
    assert_eq!(trust.look(Some(&a.id), &both, t), Some(secs(0)));
    assert_eq!(trust.look(Some(&a.id), &both, t + secs(3)), Some(secs(3)));
    assert_eq!(trust.look(Some(&b.id), &both, t + secs(4)), None);
    assert_eq!(trust.look(Some(&a.id), &both, t + secs(5)), Some(secs(0)));
    assert_eq!(trust.look(Some(&b.id), &both[1..], t + secs(6)), Some(secs(0)));
    assert_eq!(trust.look(None, &both, t + secs(7)), None);
}

#[test]
fn a_replica_serves_only_what_was_signed_for_its_names() {
    let good = leaf(&authority("a", 0, 1), 0, 1);
    assert_eq!(fit(Some(&good), NAME), Ok(()));
    assert_eq!(fit(None, NAME), Err(Unfit::Unreadable));
    assert_eq!(fit(Some(&Leaf { signed_by: None, ..good.clone() }), NAME), Err(Unfit::Unsigned));
    assert_eq!(fit(Some(&Leaf { names: BTreeSet::new(), ..good }), NAME), Err(Unfit::OtherNames));
}
