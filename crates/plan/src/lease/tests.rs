use super::*;

const TERM: Duration = Duration::from_secs(10);
const SKEW: Duration = Duration::from_mins(2);

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn record(holder: &str) -> Record {
    Record {
        holder: Some(holder.to_owned()),
        renewed: Some(SystemTime::UNIX_EPOCH + secs(1_000_000)),
        transitions: 1,
        term: Some(TERM),
        released: false,
        version: "1".to_owned(),
    }
}

fn turn_of(seen: &Seen, now: Instant) -> Turn {
    turn(seen, "me", TERM, now)
}

#[test]
fn an_absent_lease_is_free() {
    let t = Instant::now();
    assert_eq!(turn_of(&Seen::first(None, t), t), Turn::Take);
}

fn nobody(holder: Option<&str>) -> Record {
    Record { holder: holder.map(str::to_owned), version: "2".to_owned(), ..record("x") }
}

#[test]
fn a_lease_that_was_given_back_is_free_at_once() {
    let t = Instant::now();
    for holder in [None, Some("")] {
        let released = Record { released: true, ..nobody(holder) };
        assert_eq!(turn_of(&Seen::first(Some(released.clone()), t), t), Turn::Take);
        let seen = Seen::first(Some(record("rival")), t).look(Some(released), t + secs(1));
        assert_eq!(turn_of(&seen, t + secs(1)), Turn::Take);
    }
}

#[test]
fn a_lease_whose_holder_was_wiped_out_stays_the_holders_for_a_term() {
    let t = Instant::now();
    for holder in [None, Some("")] {
        for term in [Some(TERM), Some(secs(1)), None] {
            let wiped = Record { term, ..nobody(holder) };
            let seen = Seen::first(Some(record("rival")), t).look(Some(wiped.clone()), t + secs(3));
            assert_eq!(turn_of(&seen, t + secs(10)), Turn::Wait(secs(3)));
            assert_eq!(turn_of(&seen, t + secs(13)), Turn::Take);
            let first = Seen::first(Some(wiped), t);
            assert_eq!(turn_of(&first, t), Turn::Wait(TERM));
            assert_eq!(turn_of(&first, t + TERM), Turn::Take);
        }
    }
}

#[test]
fn a_lease_that_was_stolen_and_then_emptied_is_not_free_at_once() {
    let t = Instant::now();
    let thief = Record { version: "2".to_owned(), ..record("thief") };
    let emptied = Record { term: Some(secs(1)), version: "3".to_owned(), ..nobody(None) };
    let seen = Seen::first(Some(record("rival")), t).look(Some(thief), t + secs(1));
    let seen = seen.look(Some(emptied), t + secs(2));
    assert_eq!(turn_of(&seen, t + secs(2)), Turn::Wait(TERM));
}

#[test]
fn a_longer_term_outlives_the_holders_name() {
    let t = Instant::now();
    let long = Record { term: Some(secs(30)), ..record("rival") };
    let seen = Seen::first(Some(long), t).look(Some(nobody(None)), t);
    assert_eq!(turn_of(&seen, t), Turn::Wait(secs(30)));
    assert_eq!(turn_of(&seen.look(None, t + secs(1)), t + secs(1)), Turn::Wait(secs(30)));
}

#[test]
fn a_lease_that_nobody_ever_renewed_is_free_at_the_first_look() {
    let t = Instant::now();
    let blank = Record { renewed: None, term: None, ..nobody(None) };
    assert_eq!(turn_of(&Seen::first(Some(blank.clone()), t), t), Turn::Take);
    let seen = Seen::first(Some(record("rival")), t).look(Some(blank), t);
    assert_eq!(turn_of(&seen, t), Turn::Wait(TERM));
}

#[test]
fn a_lease_that_names_us_by_anothers_hand_is_not_ours_yet() {
    let t = Instant::now();
    let named = Record { version: "2".to_owned(), ..record("me") };
    let seen = Seen::first(Some(record("rival")), t).look(Some(named.clone()), t + secs(1));
    assert_eq!(turn_of(&seen, t + secs(1)), Turn::Wait(TERM));
    assert_eq!(turn_of(&seen, t + secs(11)), Turn::Take);
    let again = Seen::first(Some(record("me")), t).look(Some(named), t + secs(1));
    assert_eq!(turn_of(&again, t + secs(1)), Turn::Wait(TERM));
}

#[test]
fn a_write_of_ours_is_known_when_it_is_seen_though_its_answer_was_lost() {
    let t = Instant::now();
    let mut seen = Seen::first(Some(record("rival")), t);
    let mine = Record { version: "2".to_owned(), ..record("me") };
    seen.attempt("me", mine.renewed.unwrap());
    let later = Record { renewed: mine.renewed.map(|at| at + secs(1)), ..mine.clone() };
    assert_eq!(turn_of(&seen.clone().look(Some(mine), t), t), Turn::Keep);
    assert_eq!(turn_of(&seen.look(Some(later), t), t), Turn::Wait(TERM));
}

#[test]
fn our_own_lease_is_kept_however_old_it_is() {
    let t = Instant::now();
    let seen = Seen::first(Some(record("me")), t);
    assert_eq!(turn_of(&seen, t + secs(1000)), Turn::Keep);
}

#[test]
fn a_rivals_lease_is_free_one_full_term_after_it_was_last_seen_to_change() {
    let t = Instant::now();
    let seen = Seen::first(Some(record("rival")), t);
    let look = |seconds| seen.clone().look(Some(record("rival")), t + secs(seconds));
    assert_eq!(turn_of(&look(0), t), Turn::Wait(TERM));
    assert_eq!(turn_of(&look(9), t + secs(9)), Turn::Wait(secs(1)));
    assert_eq!(turn_of(&look(10), t + secs(10)), Turn::Take);
}

#[test]
fn a_rival_whose_renew_time_is_two_minutes_off_holds_while_it_renews_and_no_longer() {
    let base = SystemTime::now();
    for written in [base - SKEW, base + SKEW] {
        let t = Instant::now();
        let renewal = |n: u64| Record {
            renewed: Some(written + secs(2 * n)),
            version: n.to_string(),
            ..record("rival")
        };
        let mut seen = Seen::first(Some(renewal(0)), t);
        for n in 1..100 {
            let now = t + secs(2 * n);
            seen = seen.look(Some(renewal(n)), now);
            assert_eq!(turn_of(&seen, now), Turn::Wait(TERM));
        }
        let last = t + secs(2 * 99);
        seen = seen.look(Some(renewal(99)), last + secs(9));
        assert_eq!(turn_of(&seen, last + secs(9)), Turn::Wait(secs(1)));
        assert_eq!(turn_of(&seen, last + TERM), Turn::Take);
    }
}

#[test]
fn any_changed_field_counts_as_a_sign_of_life() {
    let t = Instant::now();
    let changes: [fn(&mut Record); 6] = [
        |r| r.holder = Some("third".to_owned()),
        |r| r.renewed = None,
        |r| r.transitions += 1,
        |r| r.term = None,
        |r| r.released = true,
        |r| r.version = "2".to_owned(),
    ];
    for change in changes {
        let mut changed = record("rival");
        change(&mut changed);
        let seen = Seen::first(Some(record("rival")), t).look(Some(changed), t + secs(9));
        assert_eq!(turn_of(&seen, t + secs(10)), Turn::Wait(secs(9)));
    }
}

#[test]
fn a_rivals_longer_term_is_respected_but_an_absurd_one_is_not() {
    let t = Instant::now();
    let wait = |term| {
        let seen = Seen::first(Some(Record { term: Some(term), ..record("rival") }), t);
        turn_of(&seen, t)
    };
    assert_eq!(wait(secs(1)), Turn::Wait(TERM));
    assert_eq!(wait(secs(15)), Turn::Wait(secs(15)));
    assert_eq!(wait(secs(1 << 31)), Turn::Wait(LONGEST_TERM));
}

#[test]
fn a_lease_deleted_under_its_holder_stays_the_holders_for_a_term() {
    let t = Instant::now();
    let seen = Seen::first(Some(record("rival")), t).look(None, t + secs(3));
    assert_eq!(turn_of(&seen, t + secs(10)), Turn::Wait(secs(3)));
    assert_eq!(turn_of(&seen, t + secs(13)), Turn::Take);
    // It may have been another's when it was deleted.
    let ours = Seen::first(Some(record("me")), t).look(None, t);
    assert_eq!((turn_of(&ours, t), ours.record()), (Turn::Wait(TERM), None));
}

#[test]
fn a_leader_gives_up_two_thirds_of_a_term_after_the_start_of_its_last_renewal() {
    let started = Instant::now();
    let term = secs(9);
    let until = tenure(started, term);
    let seen = Seen::first(Some(record("me")), started);
    assert_eq!(until, started + secs(6));
    assert_eq!(office(&seen, "me", until, started + secs(5)), Office::Renew);
    assert_eq!(office(&seen, "me", until, started + secs(6)), Office::GiveUp);
}

#[test]
fn a_leader_gives_up_at_once_when_another_holds_the_lease() {
    let t = Instant::now();
    let seen = Seen::first(Some(record("rival")), t);
    assert_eq!(office(&seen, "me", t + secs(5), t), Office::GiveUp);
}

#[test]
fn a_leader_writes_again_what_was_emptied_or_deleted_under_its_feet() {
    let t = Instant::now();
    let emptied = Seen::first(Some(record("me")), t).look(Some(nobody(None)), t);
    let deleted = Seen::first(Some(record("me")), t).look(None, t);
    assert_eq!(office(&emptied, "me", t + secs(5), t), Office::Renew);
    assert_eq!(office(&deleted, "me", t + secs(5), t), Office::Renew);
}
