//! Slots that the clients of a listener share fairly.
//!
//! Clients have no credentials, so each address is a source; where the namespace of a request is known, so is each namespace
//! of an address. One source may hold every slot while no other waits. A source that comes then takes a slot of the address
//! that holds the most, and there of the namespace that holds the most. Nothing is reserved, and no source has a quota.

#[cfg(test)]
mod tests;

use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::oneshot,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;

/// A slot that is held for longer than this without progress can be lost to a client of any source, also of its own.
const SLOW_HOLDER: Duration = Duration::from_secs(1);
/// How often a client that waits checks for slow ones.
const SLOW_HOLDER_CHECK: Duration = Duration::from_millis(250);

/// A fixed number of slots. Cheap to clone.
#[derive(Clone)]
pub struct FairSlots {
    table: Arc<Mutex<SlotTable>>,
    /// How long a slot without progress is safe from other sources.
    grace: Duration,
    slow: SlowHolders,
}

/// From whom a client that waits takes a slot that is held for long.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SlowHolders {
    /// Also from its own source.
    All,
    /// From others, and only if the client holds none.
    OfOtherClients,
}

/// On whose account a slot is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    client: IpAddr,
    /// Empty if it does not count.
    namespace: String,
}

/// A slot. Others can use it once it is dropped.
pub struct Slot {
    slots: FairSlots,
    id: u64,
    lost: CancellationToken,
}

struct SlotTable {
    free: usize,
    /// Numbers the grants.
    grants: u64,
    /// By the number of their grant.
    held: HashMap<u64, HeldSlot>,
    /// The sources that hold a slot or wait for one.
    sources: HashMap<Source, SourceAccount>,
}

struct HeldSlot {
    source: Source,
    /// How often it is settled. Unless that is 0, it is on no account and cannot be lost.
    settled: usize,
    progress: Instant,
    lost: CancellationToken,
}

struct SourceAccount {
    held: usize,
    last_grant: u64,
    waiting: VecDeque<oneshot::Sender<Slot>>,
}

/// A slot is settled while this exists.
pub struct SettledSlot(Arc<Slot>);

impl Source {
    /// A listener for IPv6 sees IPv4 addresses as mapped ones.
    pub fn new(client: IpAddr) -> Self {
        Self { client: client.to_canonical(), namespace: String::new() }
    }

    /// A namespace of this client.
    pub fn namespace(&self, namespace: &str) -> Self {
        Self { client: self.client, namespace: namespace.to_owned() }
    }
}

impl FairSlots {
    /// A client that makes progress within `grace` loses its slot to none of another source.
    pub fn new(count: usize, grace: Duration) -> Self {
        let table = SlotTable { free: count, grants: 0, held: HashMap::new(), sources: HashMap::new() };
        Self { table: Arc::new(Mutex::new(table)), grace, slow: SlowHolders::All }
    }

    /// For work whose length its holder does not choose: a client never loses a slot to one of itself.
    pub fn of_bounded_work(self) -> Self {
        Self { slow: SlowHolders::OfOtherClients, ..self }
    }

    /// A free slot, or one of the source that holds the most, if that still holds as many as this source afterwards. A client
    /// without a slot takes the slowest one of all, so that many clients with one slot each keep none out.
    pub fn try_take(&self, source: &Source) -> Option<Slot> {
        let mut table = self.lock();
        self.take_now(&mut table, source).or_else(|| {
            let lost = table.slowest(|_| true, self.grace)?;
            if table.held_by_client().of(source) > 0 {
                return None;
            }
            table.remove(lost);
            Some(self.grant(&mut table, source))
        })
    }

    /// The same, but waits for a slot. The source that holds the fewest slots is served first.
    pub async fn take(&self, source: Source) -> Slot {
        let mut granted = {
            let mut table = self.lock();
            if let Some(slot) = self.take_now(&mut table, &source) {
                return slot;
            }
            let (grant, granted) = oneshot::channel();
            table.account(&source).waiting.push_back(grant);
            granted
        };
        let mut check = self.grace;
        loop {
            match timeout(check, &mut granted).await {
                Ok(granted) => {
                    return granted.expect("the table drops a waiting client only once it no longer waits");
                }
                Err(_) => self.displace(&source),
            }
            check = SLOW_HOLDER_CHECK;
        }
    }

    /// The number of slots that are held.
    #[cfg(test)]
    pub fn held(&self) -> usize {
        self.lock().held.len()
    }

    fn take_now(&self, table: &mut SlotTable, source: &Source) -> Option<Slot> {
        if table.free == 0 {
            let lost = table.excess(source, self.grace)?;
            table.remove(lost);
        }
        Some(self.grant(table, source))
    }

    /// Takes the slot of a slow client, or of a source that holds more than this one, for a client that waits.
    fn displace(&self, source: &Source) {
        let _undelivered = {
            let mut table = self.lock();
            let may_take = self.slow == SlowHolders::All || table.held_by_client().of(source) == 0;
            let slow = || may_take.then(|| table.slowest(|_| true, SLOW_HOLDER)).flatten();
            let lost = table.excess(source, self.grace).or_else(slow);
            let Some(lost) = lost else { return };
            table.remove(lost);
            self.hand_over(&mut table)
        };
    }

    /// Gives a free slot to the next client that waits. Returns it if that no longer does: drop it after the lock, so that the
    /// next one gets it.
    fn hand_over(&self, table: &mut SlotTable) -> Option<Slot> {
        for account in table.sources.values_mut() {
            account.waiting.retain(|waiting| !waiting.is_closed());
        }
        table.sources.retain(|_, account| account.held > 0 || !account.waiting.is_empty());
        let by_client = table.held_by_client();
        let waiting = table.sources.iter_mut().filter(|(_, account)| !account.waiting.is_empty());
        let (source, account) = waiting
            .min_by_key(|(source, account)| (by_client.of(source), account.held, account.last_grant))?;
        let (source, client) = (source.clone(), account.waiting.pop_front()?);
        let slot = self.grant(table, &source);
        client.send(slot).err()
    }

    /// Grants a free slot.
    fn grant(&self, table: &mut SlotTable, source: &Source) -> Slot {
        table.free -= 1;
        table.grants += 1;
        let (id, lost) = (table.grants, CancellationToken::new());
        let account = table.account(source);
        account.held += 1;
        account.last_grant = id;
        let held =
            HeldSlot { source: source.clone(), settled: 0, progress: Instant::now(), lost: lost.clone() };
        table.held.insert(id, held);
        Slot { slots: self.clone(), id, lost }
    }

    fn lock(&self) -> MutexGuard<'_, SlotTable> {
        // Nothing that holds the lock can panic in the middle of a change.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many slots the clients hold, over all their namespaces.
struct HeldByClient(HashMap<IpAddr, usize>);

impl HeldByClient {
    fn of(&self, source: &Source) -> usize {
        self.0.get(&source.client).copied().unwrap_or_default()
    }
}

impl SlotTable {
    /// The account of a source. A new one comes after those that already wait.
    fn account(&mut self, source: &Source) -> &mut SourceAccount {
        let last_grant = self.grants;
        let new = || SourceAccount { held: 0, last_grant, waiting: VecDeque::new() };
        self.sources.entry(source.clone()).or_insert_with(new)
    }

    fn held_by(&self, source: &Source) -> usize {
        self.sources.get(source).map_or(0, |account| account.held)
    }

    fn held_by_client(&self) -> HeldByClient {
        let mut held = HashMap::new();
        for slot in self.held.values().filter(|slot| slot.settled == 0) {
            *held.entry(slot.source.client).or_default() += 1;
        }
        HeldByClient(held)
    }

    /// The slot that another source loses to this one: of the client that holds the most, else of the namespace of the same
    /// client that holds the most, if that still holds as many as this one afterwards.
    fn excess(&self, source: &Source, grace: Duration) -> Option<u64> {
        let by_client = self.held_by_client();
        let (same, others): (Vec<_>, Vec<_>) =
            self.sources.iter().partition(|(at, _)| at.client == source.client);
        let largest = others.into_iter().max_by_key(|(at, account)| (by_client.of(at), account.held));
        let largest = largest.filter(|(at, _)| by_client.of(at) > by_client.of(source) + 1).or_else(|| {
            let largest = same.into_iter().max_by_key(|(_, account)| account.held);
            largest.filter(|(_, account)| account.held > self.held_by(source) + 1)
        });
        self.slowest(|at| largest.is_some_and(|(largest, _)| at == largest), grace)
    }

    /// The slot of these sources whose last progress is the oldest, if that is at least so long ago.
    fn slowest(&self, of: impl Fn(&Source) -> bool, age: Duration) -> Option<u64> {
        let held = self.held.iter().filter(|(_, slot)| slot.settled == 0 && of(&slot.source));
        let (id, slot) = held.min_by_key(|(id, slot)| (slot.progress, **id))?;
        (slot.progress.elapsed() >= age).then_some(*id)
    }

    /// Frees a slot, which its holder loses. Returns whether it was held.
    fn remove(&mut self, id: u64) -> bool {
        let Some(slot) = self.held.remove(&id) else { return false };
        slot.lost.cancel();
        self.free += 1;
        if slot.settled == 0 {
            self.debit(&slot.source);
        }
        true
    }

    /// Takes a slot from the account of a source.
    fn debit(&mut self, source: &Source) {
        if let Some(account) = self.sources.get_mut(source) {
            account.held -= 1;
            if account.held == 0 && account.waiting.is_empty() {
                self.sources.remove(source);
            }
        }
    }
}

impl Slot {
    /// Cancelled when another client took the slot.
    pub fn lost(&self) -> &CancellationToken {
        &self.lost
    }

    /// Its client made progress.
    pub fn touch(&self) {
        if let Some(slot) = self.slots.lock().held.get_mut(&self.id) {
            slot.progress = Instant::now();
        }
    }

    /// Its client has done its part: the slot leaves the account of its source, and cannot be lost any more. Returns whether
    /// it was not lost before.
    pub fn settle(&self) -> bool {
        let mut table = self.slots.lock();
        let Some(slot) = table.held.get_mut(&self.id) else { return false };
        slot.settled += 1;
        if slot.settled == 1 {
            let source = slot.source.clone();
            table.debit(&source);
        }
        true
    }

    /// Settles the slot for a while. None if it was lost before.
    pub fn settle_for(self: &Arc<Self>) -> Option<SettledSlot> {
        self.settle().then(|| SettledSlot(Arc::clone(self)))
    }
}

impl Drop for SettledSlot {
    fn drop(&mut self) {
        let mut table = self.0.slots.lock();
        let Some(slot) = table.held.get_mut(&self.0.id) else { return };
        slot.settled -= 1;
        if slot.settled == 0 {
            // Its client still reads the answer.
            slot.progress = Instant::now();
            let source = slot.source.clone();
            table.account(&source).held += 1;
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let _undelivered = {
            let mut table = self.slots.lock();
            if !table.remove(self.id) {
                return;
            }
            self.slots.hand_over(&mut table)
        };
    }
}
