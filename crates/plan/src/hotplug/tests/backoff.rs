//! The backoff that the failed attempts of a pod share.

use std::time::{Duration, Instant};

use super::*;

/// Plans of many elements take long without optimization.
const FEW: usize = 8;
const MINUTE: Duration = Duration::from_mins(1);
const HOUR: Duration = Duration::from_hours(1);

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// This many elements of the network a.
fn elements(count: usize, mac: usize) -> String {
    let element = |number| {
        let mac = format!("02:00:00:00:{mac:02x}:{number:02x}");
        serde_json::json!({"name": "a", "interface": format!("a{number}"), "mac": mac})
    };
    serde_json::Value::from((0..count).map(element).collect::<Vec<_>>()).to_string()
}

/// A pod with networks that all fail.
fn failing_pod() -> SimNode {
    let mut node = SimNode::with(&elements(FEW, 0));
    node.broken.insert(nad("a"));
    node.settle();
    node
}

/// Works for this time: when a delay ends, and after `happens`, which is called at each of these intervals.
fn work_for(
    node: &mut SimNode,
    time: Duration,
    interval: Duration,
    mut happens: impl FnMut(&mut SimNode, usize),
) {
    let (end, mut next, mut count) = (node.now + time, node.now, 0);
    while node.now < end {
        if node.now >= next {
            happens(node, count);
            (next, count) = (next + interval, count + 1);
        }
        node.settle();
        let retry = node.failures.next_retry(node.now).unwrap_or(end);
        node.now = retry.min(next).min(end);
    }
}

fn wait(node: &mut SimNode, time: Duration) {
    work_for(node, time, time, |_, _| ());
}

/// How many ADDs there were since the last call.
fn adds(node: &mut SimNode) -> usize {
    std::mem::take(&mut node.calls).iter().filter(|call| call.starts_with("ADD a")).count()
}

/// The delays until the next retries, each of which fails.
fn delays(node: &mut SimNode, count: usize) -> Vec<u64> {
    let mut next = || {
        let before = node.now;
        node.now = node.failures.next_retry(node.now).unwrap();
        node.settle();
        // A fifth is left for jitter.
        ((node.now - before) * 5 / 4).as_secs()
    };
    (0..count).map(|_| next()).collect()
}

#[test]
fn many_failing_elements_cost_as_much_as_one() {
    for count in [1, 64] {
        let mut node = SimNode::with(&elements(count, 0));
        node.broken.insert(nad("a"));
        node.settle();
        assert_eq!(adds(&mut node), count);
        let started = node.now;
        let mut delays = delays(&mut node, 85);
        let quick = delays.iter().filter(|delay| **delay == 30).count();
        assert!((60..=75).contains(&quick), "{delays:?}");
        delays.dedup();
        assert_eq!(delays, [1, 2, 4, 8, 16, 30, 60, 120, 240, 300]);
        let took = node.now - started;
        assert!(took > 45 * MINUTE && took < 90 * MINUTE, "{took:?}");
        adds(&mut node);
        wait(&mut node, HOUR);
        let later = adds(&mut node);
        assert!((12..=16).contains(&later), "{later}");
    }
}

#[test]
fn failing_elements_take_turns() {
    let mut node = SimNode::with("a@net1,b@net2,c@net3");
    node.broken.extend(["a", "b", "c"].map(nad));
    node.settle();
    node.calls.clear();
    delays(&mut node, 6);
    let calls: Vec<&str> =
        node.calls.iter().map(String::as_str).filter(|call| call.starts_with("ADD")).collect();
    let turn = ["ADD a net1", "ADD b net2", "ADD c net3"];
    assert_eq!(calls, [turn, turn].concat());
}

#[test]
fn new_and_corrected_elements_do_not_wait_for_the_failing_ones() {
    let mut node = failing_pod();
    wait(&mut node, HOUR);
    let others: Vec<serde_json::Value> = serde_json::from_str(&elements(FEW, 0)).unwrap();
    let networks = serde_json::Value::from([others, vec![serde_json::json!({"name": "b"})]].concat());
    node.edit(&networks.to_string());
    node.settle();
    assert_eq!(node.linked_attachments(), set(&["default/b@net9"]));
    // The others may need the new interface. The delay goes on.
    assert_eq!(delays(&mut node, 3)[1..], [300, 300]);
    node.edit(&networks.to_string().replacen(r#""name":"a""#, r#""name":"c""#, 1));
    node.settle();
    assert_eq!(node.linked_attachments(), set(&["default/b@net9", "default/c@a0"]));
}

#[test]
fn one_repaired_cause_attaches_all_elements_at_once() {
    let mut node = failing_pod();
    wait(&mut node, 2 * HOUR);
    node.broken.clear();
    node.now = node.failures.next_retry(node.now).unwrap();
    node.settle();
    assert_eq!(node.linked_attachments().len(), FEW);
    // The next failure starts with a short delay.
    node.broken.insert(nad("b"));
    node.edit("b@net1");
    node.settle();
    assert_eq!(delays(&mut node, 3), [1, 2, 4]);
}

/// How many of 64 attempts fail in an hour that starts at `now`: each whenever it may, in each second. `inputs` returns the
/// element and the inputs of an attempt in a second.
fn failures_in_an_hour(
    failures: &mut Failures,
    now: &mut Instant,
    inputs: impl Fn(usize, usize) -> (usize, u64),
) -> usize {
    let mut count = 0;
    for second in 0..3600 {
        let mut attempts: Vec<_> = (0..64)
            .map(|number| {
                let (element, fingerprint) = inputs(second, number);
                let interface = format!("a{element}").parse().ok();
                (AttemptKey::Add { nad: nad("a"), interface, ordinal: 0 }, Fingerprint(fingerprint))
            })
            .collect();
        let wanted: Vec<AttemptKey> = attempts.iter().map(|(attempt, _)| attempt.clone()).collect();
        failures.retain(&wanted);
        attempts.sort_by_key(|(attempt, _)| failures.last_failure(attempt));
        for (attempt, fingerprint) in attempts {
            if !failures.is_delayed(&attempt, fingerprint, *now) {
                failures.record(attempt, fingerprint, "no", *now);
                count += 1;
            }
        }
        *now += seconds(1);
    }
    count
}

#[test]
fn edits_and_interfaces_that_come_and_go_do_not_defeat_the_backoff() {
    type Inputs = fn(usize, usize) -> (usize, u64);
    let cases: [(&str, Inputs); 3] = [
        ("other inputs", |second, number| (number, second as u64)),
        ("the same inputs again", |second, number| (number, second as u64 % 2)),
        ("other elements", |second, number| (second * 64 + number, 0)),
    ];
    for (name, inputs) in cases {
        let (mut failures, mut now) = (Failures::default(), Instant::now());
        // 240 first failures and one per 30 s, and in half an hour one per 3 s.
        let first = failures_in_an_hour(&mut failures, &mut now, inputs);
        assert!((240..=1300).contains(&first), "{name}: {first}");
        // One per 30 s, and one per tenth of five minutes.
        let later = failures_in_an_hour(&mut failures, &mut now, inputs);
        assert!((100..=300).contains(&later), "{name}: {later}");
    }
}

#[test]
fn an_annotation_that_is_emptied_and_restored_does_not_defeat_the_backoff() {
    let (mut node, networks) = (SimNode::with(""), elements(8, 0));
    node.broken.insert(nad("a"));
    let edit =
        |node: &mut SimNode, count: usize| node.edit(if count.is_multiple_of(2) { "[]" } else { &networks });
    work_for(&mut node, HOUR, seconds(20), edit);
    assert!(adds(&mut node) <= 600);
    work_for(&mut node, HOUR, seconds(20), edit);
    let later = adds(&mut node);
    assert!(later <= 260, "{later}");
}

#[test]
fn a_wake_up_brings_the_retry_forward_and_not_before_a_tenth_of_the_delay() {
    let mut node = failing_pod();
    for (retries, delay, earliest) in
        [(1, 2, 1000), (1, 4, 1000), (1, 8, 1000), (1, 16, 1600), (1, 30, 3000), (80, 300, 30_000)]
    {
        delays(&mut node, retries);
        let failures = &mut node.failures;
        let at = |failures: &Failures| failures.next_retry(node.now).unwrap() - node.now;
        assert_eq!(at(failures), seconds(delay) * 4 / 5);
        let mut later = failures.clone();
        assert!(failures.can_wake(node.now));
        failures.wake(node.now);
        let earliest = Duration::from_millis(earliest);
        assert_eq!((at(failures), failures.can_wake(node.now)), (earliest, false));
        // Once that time is over, it is retried at once.
        let passed = node.now + seconds(delay) * 3 / 4;
        later.wake(passed);
        assert_eq!(later.next_retry(passed), None, "{delay}");
    }
}

#[test]
fn wake_ups_without_end_retry_ten_times_as_often() {
    let mut node = failing_pod();
    adds(&mut node);
    let wake: fn(&mut SimNode, usize) = |node, _| node.failures.wake(node.now);
    work_for(&mut node, HOUR, seconds(3), wake);
    let first = adds(&mut node);
    assert!((600..=760).contains(&first), "{first}");
    work_for(&mut node, HOUR, seconds(30), wake);
    let later = adds(&mut node);
    assert!((110..=130).contains(&later), "{later}");
}

#[test]
fn the_cleanup_after_a_failed_add_does_not_end_the_backoff() {
    let mut node = SimNode::with("a@net1,b@net2");
    node.broken.extend(["a", "b"].map(nad));
    let (mut last, mut gap) = (node.now, Duration::ZERO);
    for _ in 0..40 {
        while let Some(step) = node.plan().step {
            // The first DEL after each ADD fails.
            let removes = matches!(step, Step::Remove(_));
            let failed = step.attempt().is_some_and(|(attempt, _)| node.failures.has_failed(attempt));
            node.work((removes && !failed).then_some(Fault::PluginFails));
        }
        node.now = node.failures.next_retry(node.now).unwrap();
        (last, gap) = (node.now, node.now - last);
    }
    assert_eq!(gap, MAX_RETRY * 4 / 5);
}

#[test]
fn a_failure_with_an_error_that_varies_is_reported_once_in_five_minutes() {
    let mut node = SimNode::with("a@net1");
    let Some(Step::Add(step)) = node.plan().step else { panic!("{:?}", node.plan()) };
    let started = node.now;
    let record = |node: &mut SimNode, fingerprint: Fingerprint, at: u64| {
        let error = format!("error {at}");
        node.failures.record(step.attempt.clone(), fingerprint, &error, started + seconds(at))
    };
    let reports: Vec<u64> =
        (0..1000).step_by(50).filter(|at| record(&mut node, step.fingerprint, *at)).collect();
    assert_eq!(reports, [0, 300, 600, 900]);
    assert!(record(&mut node, Fingerprint(1), 1001), "other inputs");
    assert!(!record(&mut node, Fingerprint(1), 1002));
    // Inputs that change all the time are reported as little.
    let reports = (0..1000).filter(|at| record(&mut node, Fingerprint(2 + at), 1003)).count();
    assert!((200..=240).contains(&reports), "{reports}");
}

#[test]
fn a_pod_in_which_nothing_fails_any_more_has_a_short_delay_again() {
    let mut node = failing_pod();
    wait(&mut node, HOUR);
    node.edit("[]");
    wait(&mut node, 6 * MINUTE);
    node.edit("a@net1");
    node.settle();
    assert_eq!(delays(&mut node, 2), [1, 2]);
}
