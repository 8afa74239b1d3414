use super::*;

const LEASE_DURATION: Duration = Duration::from_secs(10);
const SKEW: Duration = Duration::from_mins(2);

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn record(holder: &str) -> LeaseRecord {
    LeaseRecord {
        holder: Some(holder.to_owned()),
        renew_time: Some(SystemTime::UNIX_EPOCH + secs(1_000_000)),
        transitions: 1,
        duration: Some(LEASE_DURATION),
        released: false,
        resource_version: "1".to_owned(),
    }
}

fn decision(observed: &ObservedLease, now: Instant) -> ElectionDecision {
    decide_election(observed, "me", LEASE_DURATION, now)
}

#[test]
fn an_absent_lease_is_free() {
    let t = Instant::now();
    assert_eq!(decision(&ObservedLease::first(None, t), t), ElectionDecision::Acquire);
}

fn without_holder(holder: Option<&str>) -> LeaseRecord {
    LeaseRecord { holder: holder.map(str::to_owned), resource_version: "2".to_owned(), ..record("x") }
}

#[test]
fn a_released_lease_is_free_at_once() {
    let t = Instant::now();
    for holder in [None, Some("")] {
        let released = LeaseRecord { released: true, ..without_holder(holder) };
        assert_eq!(decision(&ObservedLease::first(Some(released.clone()), t), t), ElectionDecision::Acquire);
        let observed = ObservedLease::first(Some(record("rival")), t).observe(Some(released), t + secs(1));
        assert_eq!(decision(&observed, t + secs(1)), ElectionDecision::Acquire);
    }
}

#[test]
fn a_lease_whose_holder_was_cleared_stays_held_for_a_lease_duration() {
    let t = Instant::now();
    for holder in [None, Some("")] {
        for duration in [Some(LEASE_DURATION), Some(secs(1)), None] {
            let cleared = LeaseRecord { duration, ..without_holder(holder) };
            let observed =
                ObservedLease::first(Some(record("rival")), t).observe(Some(cleared.clone()), t + secs(3));
            assert_eq!(decision(&observed, t + secs(10)), ElectionDecision::Wait(secs(3)));
            assert_eq!(decision(&observed, t + secs(13)), ElectionDecision::Acquire);
            let first = ObservedLease::first(Some(cleared), t);
            assert_eq!(decision(&first, t), ElectionDecision::Wait(LEASE_DURATION));
            assert_eq!(decision(&first, t + LEASE_DURATION), ElectionDecision::Acquire);
        }
    }
}

#[test]
fn a_lease_that_was_stolen_and_then_cleared_is_not_free_at_once() {
    let t = Instant::now();
    let thief = LeaseRecord { resource_version: "2".to_owned(), ..record("thief") };
    let cleared =
        LeaseRecord { duration: Some(secs(1)), resource_version: "3".to_owned(), ..without_holder(None) };
    let observed = ObservedLease::first(Some(record("rival")), t).observe(Some(thief), t + secs(1));
    let observed = observed.observe(Some(cleared), t + secs(2));
    assert_eq!(decision(&observed, t + secs(2)), ElectionDecision::Wait(LEASE_DURATION));
}

#[test]
fn a_longer_duration_is_respected_after_the_holder_was_cleared() {
    let t = Instant::now();
    let long = LeaseRecord { duration: Some(secs(30)), ..record("rival") };
    let observed = ObservedLease::first(Some(long), t).observe(Some(without_holder(None)), t);
    assert_eq!(decision(&observed, t), ElectionDecision::Wait(secs(30)));
    assert_eq!(decision(&observed.observe(None, t + secs(1)), t + secs(1)), ElectionDecision::Wait(secs(30)));
}

#[test]
fn a_lease_that_was_never_renewed_is_free_at_the_first_observation() {
    let t = Instant::now();
    let blank = LeaseRecord { renew_time: None, duration: None, ..without_holder(None) };
    assert_eq!(decision(&ObservedLease::first(Some(blank.clone()), t), t), ElectionDecision::Acquire);
    let observed = ObservedLease::first(Some(record("rival")), t).observe(Some(blank), t);
    assert_eq!(decision(&observed, t), ElectionDecision::Wait(LEASE_DURATION));
}

#[test]
fn a_lease_in_which_another_writer_named_us_is_not_ours_yet() {
    let t = Instant::now();
    let named = LeaseRecord { resource_version: "2".to_owned(), ..record("me") };
    let observed = ObservedLease::first(Some(record("rival")), t).observe(Some(named.clone()), t + secs(1));
    assert_eq!(decision(&observed, t + secs(1)), ElectionDecision::Wait(LEASE_DURATION));
    assert_eq!(decision(&observed, t + secs(11)), ElectionDecision::Acquire);
    let again = ObservedLease::first(Some(record("me")), t).observe(Some(named), t + secs(1));
    assert_eq!(decision(&again, t + secs(1)), ElectionDecision::Wait(LEASE_DURATION));
}

#[test]
fn our_write_is_recognised_although_its_response_was_lost() {
    let t = Instant::now();
    let mut observed = ObservedLease::first(Some(record("rival")), t);
    let mine = LeaseRecord { resource_version: "2".to_owned(), ..record("me") };
    observed.record_attempt("me", mine.renew_time.unwrap());
    let later = LeaseRecord { renew_time: mine.renew_time.map(|at| at + secs(1)), ..mine.clone() };
    assert_eq!(decision(&observed.clone().observe(Some(mine), t), t), ElectionDecision::Renew);
    assert_eq!(decision(&observed.observe(Some(later), t), t), ElectionDecision::Wait(LEASE_DURATION));
}

#[test]
fn our_own_lease_is_renewed_however_old_it_is() {
    let t = Instant::now();
    let observed = ObservedLease::first(Some(record("me")), t);
    assert_eq!(decision(&observed, t + secs(1000)), ElectionDecision::Renew);
}

#[test]
fn a_rivals_lease_is_free_one_lease_duration_after_its_last_observed_change() {
    let t = Instant::now();
    let observed = ObservedLease::first(Some(record("rival")), t);
    let observe_at = |seconds| observed.clone().observe(Some(record("rival")), t + secs(seconds));
    assert_eq!(decision(&observe_at(0), t), ElectionDecision::Wait(LEASE_DURATION));
    assert_eq!(decision(&observe_at(9), t + secs(9)), ElectionDecision::Wait(secs(1)));
    assert_eq!(decision(&observe_at(10), t + secs(10)), ElectionDecision::Acquire);
}

#[test]
fn a_rival_whose_renew_time_is_two_minutes_off_holds_while_it_renews_and_no_longer() {
    let base = SystemTime::now();
    for written in [base - SKEW, base + SKEW] {
        let t = Instant::now();
        let renewal = |n: u64| LeaseRecord {
            renew_time: Some(written + secs(2 * n)),
            resource_version: n.to_string(),
            ..record("rival")
        };
        let mut observed = ObservedLease::first(Some(renewal(0)), t);
        for n in 1..100 {
            let now = t + secs(2 * n);
            observed = observed.observe(Some(renewal(n)), now);
            assert_eq!(decision(&observed, now), ElectionDecision::Wait(LEASE_DURATION));
        }
        let last = t + secs(2 * 99);
        observed = observed.observe(Some(renewal(99)), last + secs(9));
        assert_eq!(decision(&observed, last + secs(9)), ElectionDecision::Wait(secs(1)));
        assert_eq!(decision(&observed, last + LEASE_DURATION), ElectionDecision::Acquire);
    }
}

#[test]
fn any_changed_field_counts_as_a_renewal() {
    let t = Instant::now();
    let changes: [fn(&mut LeaseRecord); 6] = [
        |r| r.holder = Some("third".to_owned()),
        |r| r.renew_time = None,
        |r| r.transitions += 1,
        |r| r.duration = None,
        |r| r.released = true,
        |r| r.resource_version = "2".to_owned(),
    ];
    for change in changes {
        let mut changed = record("rival");
        change(&mut changed);
        let observed = ObservedLease::first(Some(record("rival")), t).observe(Some(changed), t + secs(9));
        assert_eq!(decision(&observed, t + secs(10)), ElectionDecision::Wait(secs(9)));
    }
}

#[test]
fn a_rivals_longer_duration_is_respected_up_to_the_maximum() {
    let t = Instant::now();
    let wait = |duration| {
        let observed =
            ObservedLease::first(Some(LeaseRecord { duration: Some(duration), ..record("rival") }), t);
        decision(&observed, t)
    };
    assert_eq!(wait(secs(1)), ElectionDecision::Wait(LEASE_DURATION));
    assert_eq!(wait(secs(15)), ElectionDecision::Wait(secs(15)));
    assert_eq!(wait(secs(1 << 31)), ElectionDecision::Wait(MAX_LEASE_DURATION));
}

#[test]
fn a_deleted_lease_stays_held_for_a_lease_duration() {
    let t = Instant::now();
    let observed = ObservedLease::first(Some(record("rival")), t).observe(None, t + secs(3));
    assert_eq!(decision(&observed, t + secs(10)), ElectionDecision::Wait(secs(3)));
    assert_eq!(decision(&observed, t + secs(13)), ElectionDecision::Acquire);
    // Another replica may have held it when it was deleted.
    let ours = ObservedLease::first(Some(record("me")), t).observe(None, t);
    assert_eq!((decision(&ours, t), ours.record()), (ElectionDecision::Wait(LEASE_DURATION), None));
}

#[test]
fn a_leader_steps_down_two_thirds_of_a_lease_duration_after_the_start_of_its_last_renewal() {
    let started = Instant::now();
    let duration = secs(9);
    let until = fence_until(started, duration);
    let observed = ObservedLease::first(Some(record("me")), started);
    assert_eq!(until, started + secs(6));
    assert_eq!(decide_renewal(&observed, "me", until, started + secs(5)), RenewDecision::Renew);
    assert_eq!(decide_renewal(&observed, "me", until, started + secs(6)), RenewDecision::StepDown);
}

#[test]
fn a_leader_steps_down_at_once_when_another_replica_holds_the_lease() {
    let t = Instant::now();
    let observed = ObservedLease::first(Some(record("rival")), t);
    assert_eq!(decide_renewal(&observed, "me", t + secs(5), t), RenewDecision::StepDown);
}

#[test]
fn a_leader_rewrites_a_cleared_or_deleted_lease() {
    let t = Instant::now();
    let cleared = ObservedLease::first(Some(record("me")), t).observe(Some(without_holder(None)), t);
    let deleted = ObservedLease::first(Some(record("me")), t).observe(None, t);
    assert_eq!(decide_renewal(&cleared, "me", t + secs(5), t), RenewDecision::Renew);
    assert_eq!(decide_renewal(&deleted, "me", t + secs(5), t), RenewDecision::Renew);
}
