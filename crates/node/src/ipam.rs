//! The addresses of this node: hands them out, takes them back, and keeps on disk who has which.
//!
//! A pod is answered out of the blocks that the node holds, without asking anybody. [`BlockController`] sees to it that there are
//! enough of them.

mod blocks;
#[cfg(test)]
mod disk_tests;
mod journal;
mod metrics;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use api::ErrorChain;
use ipnet::IpNet;
use nix::time::{ClockId, clock_gettime};
use plan::ipam::{
    AddressRequest, AllocationError, AttachmentKey, BlockKey, BlockPlanInput, BlockStep, Family, Grant,
    Holding, Lease, Ledger, LedgerRecord, PendingRequests, Pool, Shortage,
};
use tokio::{
    sync::{Notify, watch},
    task::spawn_blocking,
    time::sleep,
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};
use wire::cni::{Code, Error};

use self::journal::Journal;
pub use self::{
    blocks::{BlockController, ListSandboxes, SandboxFilter, Timings},
    journal::Error as JournalError,
    metrics::Metrics,
};

/// How long a node goes on with what it holds after it has lost the API server. A watch can have been dead for two minutes
/// and a half before that is noticed, and after five minutes nothing new may be handed out.
const OFFLINE_GRACE: Duration = Duration::from_secs(5 * 60 - 150);
/// How often somebody who waits looks whether the one is still there for whom.
const CALLER_POLL: Duration = Duration::from_millis(500);
/// How often what follows from records is looked for at once.
const MAX_PLAN_ROUNDS: usize = 64;

/// How often a journal that cannot be written is tried again.
const JOURNAL_RETRY: Duration = Duration::from_secs(5);

/// What pods wait for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum PendingRequest {
    Any(String, Family),
    Address(String, IpAddr),
}

/// How long an interface waits for addresses, and for whom.
pub struct CallerWait<'a> {
    pub deadline: Instant,
    /// Fails once nobody is there who would get the answer.
    pub caller_alive: &'a dyn Fn() -> Result<(), Error>,
}

/// The addresses of a node.
pub struct Ipam {
    state: Mutex<IpamState>,
    /// Something that pods wait for may be there.
    changed: Condvar,
    /// The keeper has something to do.
    wake: Notify,
    /// Why the journal cannot be written; None while it can.
    journal_problem: watch::Sender<Option<String>>,
    boot: String,
    metrics: Metrics,
}

struct IpamState {
    ledger: Ledger,
    journal: Journal,
    /// Attachments whose release is not on disk yet. They keep their lease until it is: a crash may lose the release, and
    /// the address must not have another owner then.
    unsaved_releases: BTreeSet<AttachmentKey>,
    /// How many pods wait for what.
    waiters: BTreeMap<PendingRequest, usize>,
    /// Why there is nothing, for those who wait.
    failures: BTreeMap<PendingRequest, String>,
    contact: Contact,
    /// The UIDs of this node's blocks that the API server is known to have, by their name.
    confirmed: BTreeMap<String, String>,
}

/// Whether the API server was heard of.
#[derive(Debug, Clone, Copy)]
enum Contact {
    Never,
    Now,
    LostAt(Instant),
}

impl Contact {
    fn is_fresh(self) -> bool {
        match self {
            Self::Never => false,
            Self::Now => true,
            Self::LostAt(at) => at.elapsed() < OFFLINE_GRACE,
        }
    }
}

impl Ipam {
    /// Reads what earlier runs kept, and frees what pods had before the node was started anew. Waits for the disk.
    pub fn open(state_dir: &Path, boot: &str, metrics: Metrics) -> Result<Self, JournalError> {
        let (journal, ledger) = Journal::open(state_dir)?;
        let state = IpamState {
            ledger,
            journal,
            unsaved_releases: BTreeSet::new(),
            waiters: BTreeMap::new(),
            failures: BTreeMap::new(),
            contact: Contact::Never,
            confirmed: BTreeMap::new(),
        };
        let ipam = Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            wake: Notify::new(),
            journal_problem: watch::Sender::new(None),
            boot: boot.to_owned(),
            metrics,
        };
        // A disk that is full or read-only is retried: the daemon serves what needs no record meanwhile.
        if let Err(error) = ipam.save_pending() {
            warn!(error = %ErrorChain(&error), "cannot record the boot of this machine, retrying");
        }
        Ok(ipam)
    }

    /// Writes what the journal does not have yet: the boot of the machine, and releases that could not be written.
    pub fn save_pending(&self) -> Result<(), JournalError> {
        let mut state = self.lock();
        if !state.journal.is_loaded() {
            let loaded = state.journal.load();
            match loaded {
                Ok(ledger) => state.ledger = ledger,
                Err(error) => {
                    self.report_journal(Err(&error));
                    return Err(error);
                }
            }
        }
        let records = state.boot_records(&self.boot);
        self.append(&mut state, &records)?;
        self.update_metrics(&state);
        drop(state);
        self.changed.notify_all();
        self.wake.notify_one();
        Ok(())
    }

    /// Calls [`Self::save_pending`] every [`JOURNAL_RETRY`] while the journal cannot be written, until `stop`.
    pub async fn retry_journal(self: Arc<Self>, stop: CancellationToken) -> Result<(), crate::Error> {
        let mut problem = self.journal_problem.subscribe();
        loop {
            let failed = async {
                // The sender lives as long as this task.
                let _ = problem.wait_for(Option::is_some).await;
                sleep(JOURNAL_RETRY).await;
            };
            if stop.run_until_cancelled(failed).await.is_none() {
                return Ok(());
            }
            let ipam = Arc::clone(&self);
            let saved = spawn_blocking(move || ipam.save_pending()).await.map_err(crate::Error::Panicked)?;
            match saved {
                Ok(()) => info!("the address journal can be written again"),
                Err(error) => {
                    debug!(error = %ErrorChain(&error), "the address journal still cannot be written")
                }
            }
        }
    }

    /// Why the journal cannot be written, and every change of that.
    pub fn journal_problem(&self) -> watch::Receiver<Option<String>> {
        self.journal_problem.subscribe()
    }

    /// Records changes durably, and applies them once they are.
    fn append(&self, state: &mut IpamState, records: &[LedgerRecord]) -> Result<(), JournalError> {
        let appended = state.append(records);
        self.report_journal(appended.as_ref().map(|()| ()));
        appended
    }

    fn report_journal(&self, written: Result<(), &JournalError>) {
        let problem = written.err().map(|error| ErrorChain(error).to_string());
        self.journal_problem.send_if_modified(|current| {
            let changed = *current != problem;
            *current = problem;
            changed
        });
    }

    pub fn boot(&self) -> &str {
        &self.boot
    }

    fn lock(&self) -> MutexGuard<'_, IpamState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives an interface its addresses on behalf of somebody who stays until the deadline.
    pub fn allocate_until(
        &self,
        pool: &Pool,
        lease: Lease,
        requested: &[IpAddr],
        deadline: Instant,
    ) -> Result<Lease, Error> {
        let requested: Vec<IpNet> = requested.iter().copied().map(IpNet::from).collect();
        let wait = CallerWait { deadline, caller_alive: &|| Ok(()) };
        self.allocate(pool, lease, &requested, &wait).map(|grant| grant.lease)
    }

    /// Gives an interface its addresses; they are on disk when this returns. Waits until there are some, or the deadline.
    /// Nothing is taken for somebody who has gone.
    pub fn allocate(
        &self,
        pool: &Pool,
        lease: Lease,
        requested: &[IpNet],
        wait: &CallerWait<'_>,
    ) -> Result<Grant, Error> {
        let (network, deadline) = (lease.network.clone(), wait.deadline);
        let mut waiting: BTreeSet<PendingRequest> = BTreeSet::new();
        let mut state = self.lock();
        let result = loop {
            // Here every wait ends, and whatever is written is written in this round.
            if let Err(gone) = (wait.caller_alive)() {
                break Err(gone);
            }
            let request = AddressRequest {
                lease: lease.clone(),
                grids: &pool.grids,
                confirmed: &state.confirmed,
                requested,
            };
            let shortage = match state.ledger.offer(request) {
                Ok(offer) if state.ledger.leases().get(&offer.lease.key) == Some(&offer.lease) => {
                    break self.keep_lease(&mut state, &offer.lease.key).map(|()| offer);
                }
                // A daemon that has just been started hears of the API server in a moment.
                Ok(_) if !state.contact.is_fresh() => {
                    let remaining = deadline.checked_duration_since(Instant::now());
                    let Some(remaining) = remaining.filter(|_| matches!(state.contact, Contact::Never))
                    else {
                        break Err(offline_error(state.contact));
                    };
                    state = self.wait(state, remaining);
                    continue;
                }
                Ok(offer) => {
                    let leased = self.append(&mut state, &[LedgerRecord::Leased(offer.clone())]);
                    break leased.map(|()| offer).map_err(|error| not_recorded(&error));
                }
                Err(shortage) => shortage,
            };
            let requests: Vec<PendingRequest> = match shortage {
                Shortage::Rejected(error) => break Err(rejection(&pool.name, &error)),
                Shortage::Families(families) => {
                    families.into_iter().map(|family| PendingRequest::Any(network.clone(), family)).collect()
                }
                Shortage::Address(address) => vec![PendingRequest::Address(network.clone(), address)],
            };
            for request in &requests {
                if waiting.insert(request.clone()) {
                    state.add_waiter(request);
                    self.wake.notify_one();
                }
            }
            if let Some(reason) = requests.iter().find_map(|request| state.failures.get(request)) {
                break Err(Error::new(Code::TryAgainLater, reason.clone()));
            }
            let Some(remaining) = deadline.checked_duration_since(Instant::now()) else {
                break Err(Error::new(Code::TryAgainLater, timeout_message(&pool.name, state.contact)));
            };
            state = self.wait(state, remaining);
        };
        for request in &waiting {
            state.remove_waiter(request);
        }
        if result.is_ok() {
            self.update_metrics(&state);
            // Whether enough is left is the keeper's to see.
            self.wake.notify_one();
        }
        result
    }

    /// Waits until something has changed, and not so long that nobody may be there any more.
    fn wait<'a>(&self, state: MutexGuard<'a, IpamState>, remaining: Duration) -> MutexGuard<'a, IpamState> {
        let waited = self.changed.wait_timeout(state, remaining.min(CALLER_POLL));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Keeps the lease of an interface that asks again, although its release may have been requested before. The failed
    /// write of that release may have reached the disk, so the journal is replaced before the interface is answered.
    fn keep_lease(&self, state: &mut IpamState, key: &AttachmentKey) -> Result<(), Error> {
        if !state.unsaved_releases.remove(key) {
            return Ok(());
        }
        self.append(state, &[]).map_err(|error| {
            state.unsaved_releases.insert(key.clone());
            not_recorded(&error)
        })
    }

    /// Releases the addresses of an interface, of whatever network; returns whether it had any. Never fails: a release that
    /// cannot be written is kept in memory and written later, and the address has no other owner until then.
    pub fn release(&self, key: &AttachmentKey) -> bool {
        let mut state = self.lock();
        // A journal that was not read may have a lease.
        if state.journal.is_loaded() && !state.ledger.leases().contains_key(key) {
            return false;
        }
        let addresses = state.ledger.leases().get(key).map(|lease| lease.addresses.clone());
        let freed = self.append(&mut state, &[LedgerRecord::Freed(key.clone())]);
        match freed {
            Ok(()) => info!(container = key.container, ?addresses, "released the addresses of a pod"),
            Err(error) => {
                state.unsaved_releases.insert(key.clone());
                warn!(
                    container = key.container, ?addresses, error = %ErrorChain(&error),
                    "the release of addresses cannot be recorded yet; they stay allocated until it is"
                );
            }
        }
        self.update_metrics(&state);
        drop(state);
        self.changed.notify_all();
        self.wake.notify_one();
        true
    }

    /// What an interface has, and was told about it.
    pub fn grant(&self, key: &AttachmentKey) -> Option<Grant> {
        let state = self.lock();
        state.ledger.grant(key).filter(|_| !state.unsaved_releases.contains(key))
    }

    /// All that interfaces have.
    pub fn leases(&self) -> Vec<Lease> {
        self.lock().ledger.leases().values().cloned().collect()
    }

    /// The blocks and single addresses that are held, or asked for.
    pub fn holdings(&self) -> Vec<(BlockKey, Holding)> {
        self.lock().ledger.holdings().iter().map(|(block, one)| (block.clone(), one.clone())).collect()
    }

    /// Frees what a configuration of a network has given to others than these.
    pub fn gc_config(
        &self,
        network: &str,
        config: &str,
        valid: &BTreeSet<AttachmentKey>,
    ) -> Result<usize, Error> {
        let keys = self.lock().ledger.leases_outside(network, config, valid);
        self.release_all(keys, "addresses that the runtime has forgotten are free")
    }

    /// Frees what sandboxes had that are not there any more.
    pub fn gc_sandboxes(&self, live: &BTreeSet<String>, before: i64) -> Result<usize, Error> {
        let keys = self.lock().ledger.leases_without_sandbox(live, before);
        let count = self.release_all(keys, "addresses of sandboxes that are gone are free")?;
        self.metrics.collected.inc_by(count as u64);
        Ok(count)
    }

    fn release_all(&self, keys: Vec<AttachmentKey>, why: &str) -> Result<usize, Error> {
        let mut state = self.lock();
        let held = keys.into_iter().filter_map(|key| state.ledger.leases().get(&key).cloned());
        let held: Vec<Lease> = held.collect();
        if held.is_empty() {
            return Ok(0);
        }
        let records: Vec<LedgerRecord> =
            held.iter().map(|lease| LedgerRecord::Freed(lease.key.clone())).collect();
        self.append(&mut state, &records).map_err(|error| not_recorded(&error))?;
        for lease in &held {
            info!(container = lease.key.container, addresses = ?lease.addresses, "{why}");
        }
        self.update_metrics(&state);
        drop(state);
        self.changed.notify_all();
        self.wake.notify_one();
        Ok(held.len())
    }

    /// Whether addresses can be had at all.
    pub fn status(&self) -> Result<(), Error> {
        let state = self.lock();
        if let Some(problem) = &*self.journal_problem.borrow() {
            let msg = format!("the address journal of this node cannot be written: {problem}");
            return Err(Error::new(Code::NotAvailable, msg));
        }
        if state.contact.is_fresh() {
            return Ok(());
        }
        Err(Error { code: Code::NotAvailable, ..offline_error(state.contact) })
    }

    /// Notes which blocks of this node the API server has. What is not among them gives nothing from now on.
    fn set_confirmed(&self, confirmed: BTreeMap<String, String>) {
        self.lock().confirmed = confirmed;
        self.changed.notify_all();
    }

    fn set_contact(&self, contact: Contact) {
        let mut state = self.lock();
        state.contact = match (state.contact, contact) {
            // It is lost since the first time that it was not heard.
            (Contact::LostAt(first), Contact::LostAt(_)) => Contact::LostAt(first),
            (Contact::Never, Contact::LostAt(_)) => Contact::Never,
            (_, new) => new,
        };
        drop(state);
        self.changed.notify_all();
    }

    /// Keeps the records that the rules ask for, and says what else is to be done.
    fn plan(&self, input: BlockPlanInput<'_>) -> Result<Vec<BlockStep>, JournalError> {
        let mut state = self.lock();
        let pending = state.pending_requests();
        let input = BlockPlanInput { pending: &pending, ..input };
        for _ in 0..MAX_PLAN_ROUNDS {
            let (notes, steps): (Vec<BlockStep>, Vec<BlockStep>) =
                plan::ipam::blocks::plan(&state.ledger, input)
                    .into_iter()
                    .partition(|step| matches!(step, BlockStep::Record(_)));
            let records: Vec<LedgerRecord> = notes
                .into_iter()
                .filter_map(|step| if let BlockStep::Record(record) = step { Some(record) } else { None })
                .collect();
            if records.is_empty() {
                return Ok(steps);
            }
            for record in &records {
                info!(?record, "noted");
                if let LedgerRecord::Unverified { block, network, .. } = record {
                    warn!(
                        network,
                        block = %block.range,
                        "the journal does not know this block of this node: pods keep what they have of it, nothing new comes \
                        out of it until the node was started anew or its pods of today are gone"
                    );
                }
            }
            self.append(&mut state, &records)?;
            self.update_metrics(&state);
            self.changed.notify_all();
        }
        warn!("the rules about blocks come to no end");
        Ok(Vec::new())
    }

    /// Keeps a record.
    fn record(&self, record: LedgerRecord) -> Result<(), JournalError> {
        let mut state = self.lock();
        self.append(&mut state, &[record])?;
        self.update_metrics(&state);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Looks at the ledger.
    fn with_ledger<T>(&self, read: impl FnOnce(&Ledger) -> T) -> T {
        read(&self.lock().ledger)
    }

    /// Tells those who wait why they wait in vain.
    fn fail_request(&self, request: PendingRequest, why: String) {
        let mut state = self.lock();
        if state.waiters.contains_key(&request) {
            info!(?request, why, "pods wait in vain for addresses");
            state.failures.insert(request, why);
        }
        drop(state);
        self.changed.notify_all();
    }

    pub(crate) fn has_waiters(&self) -> bool {
        !self.lock().waiters.is_empty()
    }

    fn update_metrics(&self, state: &IpamState) {
        self.metrics.addresses.set(i64::try_from(state.ledger.leases().len()).unwrap_or(i64::MAX));
        self.metrics.blocks.set(i64::try_from(state.ledger.holdings().len()).unwrap_or(i64::MAX));
    }
}

#[cfg(test)]
impl Ipam {
    /// Holds a block of a network as if the API server had given it.
    pub fn hold(&self, network: &str, range: &str) {
        let block = BlockKey { network: network.to_owned(), range: range.parse().unwrap() };
        self.set_contact(Contact::Now);
        self.lock().confirmed.insert(api::ipblock::name("blue", block.range), range.to_owned());
        self.record(LedgerRecord::Acquiring { block: block.clone(), network: "blue".to_owned() }).unwrap();
        self.record(LedgerRecord::Acquired { block, object: range.to_owned() }).unwrap();
    }

    /// Loses the API server, so long ago.
    pub fn lose_contact(&self, since: Duration) {
        self.lock().contact = Contact::LostAt(Instant::now().checked_sub(since).unwrap());
    }
}

impl IpamState {
    /// Records changes durably, releases that could not be written before first, and applies them once they are on disk.
    fn append(&mut self, records: &[LedgerRecord]) -> Result<(), JournalError> {
        let releases = self.unsaved_releases.iter().cloned().map(LedgerRecord::Freed);
        let all: Vec<LedgerRecord> = releases.chain(records.iter().cloned()).collect();
        self.journal.append(&all, &self.ledger)?;
        for record in &all {
            self.ledger.apply(record);
        }
        self.unsaved_releases.clear();
        Ok(())
    }

    /// The boot of the machine, if it is another one than before, and the release of what earlier boots allocated.
    fn boot_records(&self, boot: &str) -> Vec<LedgerRecord> {
        let leases = self.ledger.leases_of_other_boots(boot);
        let mut records: Vec<LedgerRecord> = leases.into_iter().map(LedgerRecord::Freed).collect();
        if !boot.is_empty() && self.ledger.boot() != boot {
            if !self.ledger.boot().is_empty() {
                info!(
                    count = records.len(),
                    "the machine booted; releasing the addresses of its former sandboxes"
                );
            }
            records.push(LedgerRecord::Booted(boot.to_owned()));
        }
        records
    }

    fn add_waiter(&mut self, request: &PendingRequest) {
        let count = self.waiters.entry(request.clone()).or_insert(0);
        *count += 1;
        if *count == 1 {
            self.failures.remove(request);
        }
    }

    fn remove_waiter(&mut self, request: &PendingRequest) {
        if let Some(count) = self.waiters.get_mut(request) {
            *count -= 1;
            if *count == 0 {
                self.waiters.remove(request);
                self.failures.remove(request);
            }
        }
    }

    fn pending_requests(&self) -> PendingRequests {
        let mut pending = PendingRequests::default();
        for (request, count) in &self.waiters {
            match request {
                PendingRequest::Any(network, family) => {
                    _ = pending.any.insert((network.clone(), *family), *count)
                }
                PendingRequest::Address(network, address) => {
                    _ = pending.addresses.insert((network.clone(), *address))
                }
            }
        }
        pending
    }
}

fn rejection(network: &str, error: &AllocationError) -> Error {
    let code = match error {
        AllocationError::InUse { .. } | AllocationError::Lent(_) => Code::TryAgainLater,
        AllocationError::OutsideSubnets(_)
        | AllocationError::Reserved(_)
        | AllocationError::PrefixLength { .. }
        | AllocationError::SameFamily(..)
        | AllocationError::OtherAddress { .. } => Code::InvalidConfig,
    };
    Error::new(code, format!("network {network:?}: {error}"))
}

/// The answer to an ADD whose allocation is not on disk.
fn not_recorded(error: &JournalError) -> Error {
    let msg = format!(
        "the allocation cannot be recorded on this node: {}; free disk space on the node, or make the directory writable",
        ErrorChain(error)
    );
    Error::new(Code::Io, msg)
}

/// Seconds since the node was started, whatever happens to its clock.
pub fn uptime() -> i64 {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(0, |time| time.tv_sec())
}

fn offline_error(contact: Contact) -> Error {
    let msg = match contact {
        Contact::Never => "the patchbay node daemon has not yet read its address blocks from the API server",
        _ => {
            "the patchbay node daemon has not reached the API server for minutes, so that its address blocks may be \
            somebody else's: no new address is handed out until it is back"
        }
    };
    Error::new(Code::TryAgainLater, msg)
}

fn timeout_message(network: &str, contact: Contact) -> String {
    match contact {
        Contact::Now => format!("no address of network {network:?} could be had in time: tried again"),
        _ => offline_error(contact).msg,
    }
}
