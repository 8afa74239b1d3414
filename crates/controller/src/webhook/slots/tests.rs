use futures::FutureExt as _;
use tokio::time::advance;

use super::*;

const GRACE: Duration = Duration::from_millis(50);

fn address(number: u8) -> Source {
    Source::new(IpAddr::from([10, 0, 0, number]))
}

/// Slots that are all held by source 1.
fn taken(count: usize) -> (FairSlots, Vec<Slot>) {
    let slots = FairSlots::new(count, GRACE);
    let held = (0..count).map(|_| slots.try_take(&address(1)).expect("free")).collect();
    (slots, held)
}

fn lost(slots: &[Slot]) -> Vec<bool> {
    slots.iter().map(|slot| slot.lost().is_cancelled()).collect()
}

#[tokio::test(start_paused = true)]
async fn one_source_uses_all_slots_while_no_other_waits() {
    let (slots, held) = taken(4);
    assert!(slots.try_take(&address(1)).is_none());
    advance(GRACE * 2).await;
    assert!(slots.try_take(&address(1)).is_none(), "a source does not take from itself");
    assert_eq!(lost(&held), [false; 4]);
}

#[tokio::test(start_paused = true)]
async fn another_source_takes_the_slowest_slots_up_to_its_share() {
    let (slots, held) = taken(4);
    assert!(slots.try_take(&address(2)).is_none(), "all are new");
    advance(GRACE).await;
    held[0].touch();
    let second = slots.try_take(&address(2)).unwrap();
    assert_eq!(lost(&held), [false, true, false, false]);
    let third = slots.try_take(&address(2)).unwrap();
    assert_eq!(lost(&held), [false, true, true, false]);
    assert!(slots.try_take(&address(2)).is_none(), "both have two");
    drop((second, third));
    assert_eq!(slots.held(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_source_without_a_slot_takes_the_slowest_of_sources_with_one_each() {
    let slots = FairSlots::new(128, Duration::ZERO);
    let held: Vec<Slot> = (0..128).map(|source| slots.try_take(&address(source)).unwrap()).collect();
    advance(Duration::from_secs(1)).await;
    held[0].touch();
    let other = slots.try_take(&address(128)).unwrap();
    assert!(held[1].lost().is_cancelled());
    assert_eq!(lost(&held).iter().filter(|lost| **lost).count(), 1);
    assert!(slots.try_take(&address(128)).is_none(), "it has one");
    assert!(slots.try_take(&address(128).namespace("made-up")).is_none(), "its client has one");
    drop(other);
}

#[tokio::test(start_paused = true)]
async fn a_slot_is_not_lost_while_it_is_settled_for_a_time() {
    let (slots, held) = taken(2);
    let held: Vec<Arc<Slot>> = held.into_iter().map(Arc::new).collect();
    let lost = || [0, 1].map(|at: usize| held[at].lost().is_cancelled());
    let requests = [held[0].settle_for(), held[0].settle_for()];
    let second = slots.try_take(&address(2));
    assert!(second.is_none(), "the other slot is new, and its source has one");
    advance(GRACE).await;
    let _second = slots.try_take(&address(2)).unwrap();
    assert_eq!(lost(), [false, true]);
    assert!(slots.try_take(&address(3)).is_none(), "all that can be lost are new");
    drop(requests);
    assert!(slots.try_take(&address(3)).is_none(), "its client still reads the answer");
    advance(GRACE).await;
    held[0].touch();
    let _third = slots.try_take(&address(3)).unwrap();
    assert_eq!(lost(), [false, true], "that of source 2 was slower");
    advance(GRACE).await;
    let _fourth = slots.try_take(&address(4)).unwrap();
    assert_eq!(lost(), [true, true]);
    assert!(held[0].settle_for().is_none());
}

/// A client that makes up namespaces has the share of one client, and the namespaces of one client share its slots.
#[tokio::test(start_paused = true)]
async fn clients_share_first_and_then_their_namespaces() {
    let namespace = |client: u8, namespace: u8| address(client).namespace(&format!("ns-{namespace}"));
    let slots = FairSlots::new(8, Duration::ZERO);
    let many: Vec<Slot> = (0..8).map(|at| slots.try_take(&namespace(1, at)).unwrap()).collect();
    let waiting = slots.take(namespace(1, 9));
    tokio::pin!(waiting);
    assert!(waiting.as_mut().now_or_never().is_none());
    let other: Vec<Slot> = (0..4).map(|_| slots.take(namespace(2, 0)).now_or_never().unwrap()).collect();
    assert_eq!(lost(&many).iter().filter(|lost| **lost).count(), 4);
    assert!(slots.take(namespace(2, 0)).now_or_never().is_none(), "both clients have four");
    let neighbour = slots.take(namespace(2, 1)).now_or_never();
    assert!(neighbour.is_some() && lost(&other) == [true, false, false, false]);
}

#[tokio::test(start_paused = true)]
async fn a_settled_slot_leaves_the_account_of_its_source_and_is_never_lost() {
    let (slots, held) = taken(4);
    advance(GRACE).await;
    assert!(held.iter().take(3).all(Slot::settle));
    let waiting = slots.take(address(2));
    tokio::pin!(waiting);
    assert!(waiting.as_mut().now_or_never().is_none());
    drop(held.into_iter().next());
    let slot = waiting.now_or_never().unwrap();
    assert!(!slot.lost().is_cancelled() && slot.settle());
    drop(slot);
    assert_eq!(slots.held(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_source_that_waits_gets_its_slot_after_the_grace() {
    let (slots, held) = taken(4);
    let start = Instant::now();
    let slot = slots.take(address(2)).await;
    assert_eq!((start.elapsed(), lost(&held)), (GRACE, vec![true, false, false, false]));
    assert!(!held[0].settle(), "the slot is gone");
    drop((slot, held));
    assert_eq!(slots.held(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_free_slot_goes_to_the_source_with_the_fewest_however_many_wait_before_it() {
    let (slots, mut held) = taken(4);
    let mut many: Vec<_> = (0..80).map(|_| Box::pin(slots.take(address(1)))).collect();
    assert!(many.iter_mut().all(|one| one.as_mut().now_or_never().is_none()));
    // The waiting clients used up what a task may poll without a pause.
    tokio::task::yield_now().await;
    let mut few = Box::pin(slots.take(address(2)));
    assert!(few.as_mut().now_or_never().is_none());
    drop(held.pop());
    let slot = few.now_or_never();
    assert!(slot.is_some() && many.iter_mut().all(|one| one.as_mut().now_or_never().is_none()));
}

#[tokio::test(start_paused = true)]
async fn sources_that_hold_as_many_take_turns() {
    let (slots, mut held) = taken(4);
    assert!(held.iter().all(Slot::settle));
    let mut waiting: Vec<_> =
        [2, 2, 2, 3, 3].map(|source| (source, Box::pin(slots.take(address(source))))).into();
    for (_, one) in &mut waiting {
        assert!(one.as_mut().now_or_never().is_none());
    }
    let mut order = Vec::new();
    for _ in 0..5 {
        held.pop();
        let (at, slot) = waiting
            .iter_mut()
            .enumerate()
            .find_map(|(at, (_, one))| one.as_mut().now_or_never().map(|slot| (at, slot)))
            .unwrap();
        assert!(slot.settle());
        held.push(slot);
        order.push(waiting.remove(at).0);
    }
    assert!(order == [2, 3, 2, 3, 2] || order == [3, 2, 3, 2, 2], "{order:?}");
}

#[tokio::test(start_paused = true)]
async fn a_slow_client_loses_its_slot_also_to_its_own_source() {
    let (slots, held) = taken(2);
    let start = Instant::now();
    let slot = slots.take(address(1)).await;
    assert!(start.elapsed() >= SLOW_HOLDER && start.elapsed() < SLOW_HOLDER * 2);
    assert_eq!(lost(&held), [true, false]);
    drop(slot);
}

/// Otherwise the reads of a slow API server would end each other.
#[tokio::test(start_paused = true)]
async fn bounded_work_ends_for_a_client_without_a_slot_only() {
    let slots = FairSlots::new(2, GRACE).of_bounded_work();
    let held: Vec<Slot> = [1, 2].map(|source| slots.try_take(&address(source)).unwrap()).into();
    advance(SLOW_HOLDER * 2).await;
    assert!(timeout(SLOW_HOLDER * 10, slots.take(address(1))).await.is_err());
    assert_eq!(lost(&held), [false; 2]);
    let slot = slots.take(address(3)).await;
    assert_eq!(lost(&held), [true, false]);
    drop(slot);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_no_longer_waits_keeps_no_slot() {
    let (slots, held) = taken(1);
    held[0].settle();
    let mut gone = Box::pin(slots.take(address(2)));
    assert!(gone.as_mut().now_or_never().is_none());
    drop(gone);
    let mut waits = Box::pin(slots.take(address(3)));
    assert!(waits.as_mut().now_or_never().is_none());
    drop(held);
    let mut delivered = Box::pin(slots.take(address(4)));
    assert!(delivered.as_mut().now_or_never().is_none());
    drop(waits);
    assert!(delivered.as_mut().now_or_never().is_some(), "a slot that was sent and not received");
    drop(delivered);
    assert_eq!(slots.held(), 0);
    assert!(slots.lock().sources.is_empty(), "no source stays behind");
}

#[test]
fn an_ipv4_client_is_one_source_on_a_listener_for_ipv6() {
    assert_eq!(Source::new("::ffff:10.0.0.1".parse().unwrap()), address(1));
}
