//! Allocates and releases the addresses of this node, and answers questions about them. The journal records every change
//! before a caller is answered.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use api::ErrorChain;
use ipnet::IpNet;
use plan::ipam::{
    AddressInfo, AddressRequest, AttachmentKey, Contact, Grant, Lease, LeaseReport, Ledger, LedgerRecord,
    Pool, Shortage,
};
use tokio::{
    sync::{Notify, watch},
    task::spawn_blocking,
    time::sleep,
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};
use wire::cni::{Code, Error};

use super::{
    JournalError, Metrics,
    journal::Journal,
    replies::{not_recorded, offline_error, rejection, timeout_message, unpublished, unwritable},
    waiters::{PendingRequest, Waiters},
};
use crate::repairs::Repairs;

/// How often a waiting ADD checks that its client is still connected.
const CALLER_POLL: Duration = Duration::from_millis(500);
/// How often a journal that cannot be written is tried again.
const JOURNAL_RETRY: Duration = Duration::from_secs(5);

/// How long an ADD waits for addresses.
pub struct CallerWait<'a> {
    pub deadline: Instant,
    /// Fails once the caller has disconnected.
    pub caller_alive: &'a dyn Fn() -> Result<(), Error>,
    /// Fails once the network is being deleted. It is called with the ledger locked, so an address is either refused or in
    /// every report of [`Ipam::close`] that follows the deletion.
    pub network_open: &'a dyn Fn() -> Result<(), Error>,
}

/// A report, and its number: each change has a higher one. The first is 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumberedReport {
    pub number: u64,
    pub report: LeaseReport,
}

/// The addresses of a node.
pub struct Ipam {
    state: Mutex<IpamState>,
    /// Wakes waiting ADDs.
    pub(super) changed: Condvar,
    /// Wakes the [`BlockController`].
    pub(super) wake: Notify,
    /// Why the journal cannot be written; None while it can.
    journal_problem: watch::Sender<Option<String>>,
    /// What the NodeNetwork says about leases; None until they and the networks are known.
    report: watch::Sender<Option<NumberedReport>>,
    /// The number of the last report that the NodeNetwork has.
    published: AtomicU64,
    boot: String,
    pub(super) metrics: Metrics,
    /// Signals released addresses.
    pub(super) repairs: Repairs,
}

pub(super) struct IpamState {
    pub(super) ledger: Ledger,
    journal: Journal,
    /// Whether this is the first run with this journal.
    is_first_run: bool,
    /// Attachments whose release is not on disk yet. They keep their lease until it is: a crash may lose the release, and
    /// the address must not have another owner then.
    unsaved_releases: BTreeSet<AttachmentKey>,
    pub(super) waiters: Waiters,
    pub(super) contact: Contact,
    /// The UIDs of this node's IPBlocks that the API server is known to have, by name.
    pub(super) confirmed: BTreeMap<String, String>,
    /// The names of the networks that are being deleted, by UID; None until the networks are known.
    pub(super) closed: Option<BTreeMap<String, String>>,
}

impl Ipam {
    /// Opens the journal and releases the leases of earlier boots. Blocks on the disk.
    pub fn open(state_dir: &Path, boot: &str, metrics: Metrics) -> Result<Self, JournalError> {
        let (journal, ledger) = Journal::open(state_dir)?;
        let state = IpamState {
            is_first_run: ledger.boot().is_empty(),
            ledger,
            journal,
            unsaved_releases: BTreeSet::new(),
            waiters: Waiters::default(),
            contact: Contact::Never,
            confirmed: BTreeMap::new(),
            closed: None,
        };
        let ipam = Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            wake: Notify::new(),
            journal_problem: watch::Sender::new(None),
            report: watch::Sender::new(None),
            published: AtomicU64::new(0),
            boot: boot.to_owned(),
            metrics,
            repairs: Repairs::default(),
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
                Ok(ledger) => {
                    state.is_first_run = ledger.boot().is_empty();
                    state.ledger = ledger;
                }
                Err(error) => {
                    self.report_journal(Some(&error));
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
        self.repairs.signal();
        Ok(())
    }

    /// The NodeNetwork lists addresses of claims, so this node had a journal before. If this one is new, that one was lost, and
    /// attachments may have addresses of claims that the ledger does not know.
    pub fn expect_former_claims(&self) {
        let mut state = self.lock();
        if !std::mem::take(&mut state.is_first_run) {
            return;
        }
        warn!(
            "the address journal was lost; which addresses of claims interfaces on this node have is unknown until it reboots"
        );
        // In memory even if the write fails: the next one replaces the journal.
        let records = [LedgerRecord::Booted(String::new()), LedgerRecord::Booted(self.boot.clone())];
        for record in &records {
            state.ledger.apply(record);
        }
        if let Err(error) = self.append(&mut state, &records) {
            warn!(error = %ErrorChain(&error), "cannot record the loss of the address journal, retrying");
        }
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
                    debug!(error = %ErrorChain(&error), "the address journal still cannot be written");
                }
            }
        }
    }

    /// Why the journal cannot be written, and every change of that.
    pub fn journal_problem(&self) -> watch::Receiver<Option<String>> {
        self.journal_problem.subscribe()
    }

    /// Records changes durably, and applies them once they are.
    pub(super) fn append(&self, state: &mut IpamState, records: &[LedgerRecord]) -> Result<(), JournalError> {
        let appended = state.append(records);
        self.report_journal(appended.as_ref().err());
        self.report_leases(state);
        appended
    }

    /// Sets the names of the networks that are being deleted, by UID, after the snapshot of the networks says so. Returns
    /// whether a network is new among them.
    pub fn close(&self, closed: BTreeMap<String, String>) -> bool {
        let mut state = self.lock();
        let known = state.closed.as_ref();
        let new = closed.keys().any(|uid| known.is_none_or(|known| !known.contains_key(uid)));
        state.closed = Some(closed);
        self.report_leases(&state);
        new
    }

    /// What the NodeNetwork says about leases, and every change of it.
    pub fn lease_report(&self) -> watch::Receiver<Option<NumberedReport>> {
        self.report.subscribe()
    }

    /// The API server has stored the report of this number. ADDs of claims wait for it.
    pub fn set_published(&self, number: u64) {
        if self.published.swap(number, Ordering::SeqCst) != number {
            drop(self.lock());
            self.changed.notify_all();
        }
    }

    /// Whether an interface has an address of a network that is being deleted.
    pub fn is_close_pending(&self) -> bool {
        self.report.borrow().as_ref().is_some_and(|one| one.report.is_waiting())
    }

    /// Updates the report. The last one stays while the journal cannot be read.
    fn report_leases(&self, state: &IpamState) {
        let closed = state.closed.as_ref().filter(|_| state.journal.is_loaded());
        let Some(report) = closed.map(|closed| state.ledger.report(closed)) else { return };
        self.report.send_if_modified(|current| {
            let number = current.as_ref().map_or(0, |current| current.number) + 1;
            let changed = current.as_ref().is_none_or(|current| current.report != report);
            if changed {
                *current = Some(NumberedReport { number, report });
            }
            changed
        });
    }

    fn report_journal(&self, error: Option<&JournalError>) {
        let problem = error.map(|error| ErrorChain(error).to_string());
        self.journal_problem.send_if_modified(|current| {
            let changed = *current != problem;
            *current = problem;
            changed
        });
    }

    pub fn boot(&self) -> &str {
        &self.boot
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, IpamState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Like [`Self::allocate`], for a caller that stays connected until the deadline.
    pub fn allocate_until(
        &self,
        pool: &Pool,
        lease: Lease,
        requested: &[IpAddr],
        deadline: Instant,
    ) -> Result<Lease, Error> {
        let requested: Vec<IpNet> = requested.iter().copied().map(IpNet::from).collect();
        let wait = CallerWait { deadline, caller_alive: &|| Ok(()), network_open: &|| Ok(()) };
        self.allocate(pool, lease, &requested, &wait).map(|grant| grant.lease)
    }

    /// Allocates addresses for an attachment. The lease is on disk when this returns. Waits for free addresses until the
    /// deadline; allocates nothing for a caller that has disconnected.
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
            // Checked after every wait and before every write.
            if let Err(error) = (wait.caller_alive)() {
                break Err(error);
            }
            let request = AddressRequest {
                lease: lease.clone(),
                grids: &pool.grids,
                confirmed: &state.confirmed,
                requested,
            };
            let offered = state.ledger.offer(request);
            let is_repeated =
                |offer: &Grant| state.ledger.leases().get(&offer.lease.key) == Some(&offer.lease);
            let shortage = match offered {
                Ok(offer) if is_repeated(&offer) => {
                    break self.keep_lease(&mut state, &offer.lease.key).map(|()| offer);
                }
                offered => match (wait.network_open)() {
                    Ok(()) => offered,
                    Err(error) => break Err(error),
                },
            };
            let shortage = match shortage {
                // A daemon that has just started is about to reach the API server.
                Ok(_) if !state.contact.is_fresh(Instant::now()) => {
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
            // A block is acquired, and an address released, only with a record.
            if let Some(problem) = &*self.journal_problem.borrow() {
                break Err(unwritable(problem));
            }
            let requests: Vec<PendingRequest> = match shortage {
                Shortage::Rejected(error) => break Err(rejection(&pool.name, &error)),
                Shortage::Families(families) => {
                    families.into_iter().map(|family| PendingRequest::Any(network.clone(), family)).collect()
                }
                Shortage::Address(address) => vec![PendingRequest::Address(network.clone(), address)],
            };
            for request in &requests {
                if waiting.insert(request.clone()) {
                    state.waiters.add(request);
                    self.wake.notify_one();
                }
            }
            if let Some(reason) = requests.iter().find_map(|request| state.waiters.failure(request)) {
                break Err(Error::new(Code::TryAgainLater, reason));
            }
            let Some(remaining) = deadline.checked_duration_since(Instant::now()) else {
                break Err(Error::new(Code::TryAgainLater, timeout_message(&pool.name, state.contact)));
            };
            state = self.wait(state, remaining);
        };
        for request in &waiting {
            state.waiters.remove(request);
        }
        if result.is_ok() {
            self.update_metrics(&state);
            // The controller may have to acquire the next block.
            self.wake.notify_one();
        }
        result
    }

    /// Leases addresses of an IPAMClaim, which belong to no block of this node. The lease is on disk when this returns, and the
    /// NodeNetwork lists the addresses: the controller gives those that no node lists to other claims. `network` is the name of
    /// the network.
    pub fn serve(
        &self,
        network: &str,
        lease: Lease,
        infos: Vec<AddressInfo>,
        wait: &CallerWait<'_>,
    ) -> Result<Grant, Error> {
        let mut state = self.lock();
        (wait.caller_alive)()?;
        let grant = state.ledger.serve(lease, infos).map_err(|error| rejection(network, &error))?;
        if state.ledger.leases().get(&grant.lease.key) == Some(&grant.lease) {
            self.keep_lease(&mut state, &grant.lease.key)?;
        } else {
            (wait.network_open)()?;
            let leased = self.append(&mut state, &[LedgerRecord::Leased(grant.clone())]);
            leased.map_err(|error| not_recorded(&error))?;
            self.update_metrics(&state);
        }
        // Not by content: an earlier lease of the same address may have been published before its release was.
        let number = self.report.borrow().as_ref().map_or(1, |current| current.number);
        while self.published.load(Ordering::SeqCst) < number {
            (wait.caller_alive)()?;
            let Some(remaining) = wait.deadline.checked_duration_since(Instant::now()) else {
                return Err(unpublished(network));
            };
            state = self.wait(state, remaining);
        }
        Ok(grant)
    }

    /// Waits for a change, at most [`CALLER_POLL`].
    fn wait<'a>(&self, state: MutexGuard<'a, IpamState>, remaining: Duration) -> MutexGuard<'a, IpamState> {
        let waited = self.changed.wait_timeout(state, remaining.min(CALLER_POLL));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Keeps the lease of an attachment whose ADD is repeated after a release that is not on disk yet. The failed write of
    /// that release may have reached the disk, so the journal is replaced before the ADD succeeds.
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
            Ok(()) => {
                info!(container = key.container, ?addresses, "released the addresses of a pod");
                self.repairs.signal();
            }
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

    /// Where released addresses are signalled.
    pub fn repairs(&self) -> Repairs {
        self.repairs.clone()
    }

    /// The lease of an attachment, with what its CNI result said.
    pub fn grant(&self, key: &AttachmentKey) -> Option<Grant> {
        let state = self.lock();
        state.ledger.grant(key).filter(|_| !state.unsaved_releases.contains(key))
    }

    /// Fails while the journal has not been read: an attachment may then have a lease that [`Self::grant`] does not know.
    pub fn require_loaded(&self) -> Result<(), Error> {
        if self.lock().journal.is_loaded() {
            return Ok(());
        }
        let problem = self.journal_problem.borrow().clone().unwrap_or_default();
        Err(Error::new(
            Code::TryAgainLater,
            format!("the addresses of this node are not known yet: {problem}"),
        ))
    }

    pub fn leases(&self) -> Vec<Lease> {
        self.lock().ledger.leases().values().cloned().collect()
    }

    /// CNI STATUS: whether addresses can be allocated at all.
    pub fn status(&self) -> Result<(), Error> {
        let state = self.lock();
        if let Some(problem) = &*self.journal_problem.borrow() {
            let msg = format!("the address journal of this node cannot be written: {problem}");
            return Err(Error::new(Code::NotAvailable, msg));
        }
        if state.contact.is_fresh(Instant::now()) {
            return Ok(());
        }
        Err(Error { code: Code::NotAvailable, ..offline_error(state.contact) })
    }

    pub(super) fn update_metrics(&self, state: &IpamState) {
        self.metrics.addresses.set(i64::try_from(state.ledger.leases().len()).unwrap_or(i64::MAX));
        self.metrics.blocks.set(i64::try_from(state.ledger.holdings().len()).unwrap_or(i64::MAX));
    }
}

#[cfg(test)]
impl Ipam {
    /// Adds a block of a network as if the API server had confirmed it.
    pub fn hold(&self, network: &str, range: &str) {
        let block = plan::ipam::BlockKey { network: network.to_owned(), range: range.parse().unwrap() };
        self.set_contact(Contact::Now);
        self.lock().confirmed.insert(api::ipblock::name("blue", block.range), range.to_owned());
        self.record(LedgerRecord::Acquiring { block: block.clone(), network: "blue".to_owned() }).unwrap();
        self.record(LedgerRecord::Acquired { block, object: range.to_owned() }).unwrap();
    }

    /// The number of the last report that the NodeNetwork has.
    pub fn published(&self) -> u64 {
        self.published.load(Ordering::SeqCst)
    }

    /// Records that the ledger knows all blocks of this node.
    pub fn record_complete(&self) {
        self.record(LedgerRecord::Complete).unwrap();
    }

    /// Pretends that contact with the API server was lost this long ago.
    pub fn lose_contact(&self, since: Duration) {
        let lost = Instant::now().checked_sub(since).unwrap();
        self.lock().contact = Contact::Lost { allocate_until: lost + super::OFFLINE_GRACE };
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
}
