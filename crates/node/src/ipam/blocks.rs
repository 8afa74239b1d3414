//! Reconciles the address blocks of this node: acquires enough of them for its pods and releases the others.
//!
//! `plan::ipam::blocks` decides the steps. The controller applies them, one API request at a time.

mod acquire;
mod ipblocks;
mod refresh;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use api::{
    ErrorChain, IPBlock,
    ipblock::{self, HolderRef, NODE_ROLE_LABEL_PREFIX},
};
use futures::future::{BoxFuture, FutureExt as _, pending, select_all};
use ipnet::IpNet;
use kube::{
    Api, Client, ResourceExt as _,
    runtime::{utils::Backoff as _, watcher::DefaultBackoff},
};
use plan::ipam::{
    BlockKey, BlockPlanInput, BlockStep, Family, Ledger, ObservedIpBlock, PendingRequests, Pool, RequestKind,
    Stage, carries_boot,
};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::{Contact, Ipam, JournalError, PendingRequest, uptime};
use crate::{
    Error,
    cni::Networks,
    event::Events,
    watch::{ObjectEvent, ObjectWatch},
};

/// The timeout of an API request.
const API_TIMEOUT: Duration = Duration::from_secs(10);
/// How soon garbage collection runs again after the container runtime did not answer.
const GC_RETRY: Duration = Duration::from_secs(60);
/// How long the controller collects a burst of changes, unless an ADD waits.
const BATCH_WINDOW: Duration = Duration::from_millis(50);
/// How many attempts one reconcile makes.
const MAX_ATTEMPTS: usize = 64;
/// The longest gap between two events of a burst.
const EVENT_GAP: Duration = Duration::from_millis(5);
/// How long a lender may take to answer.
const LENDER_TIMEOUT: Duration = Duration::from_secs(3);
/// How long the API server may still process a create request that timed out.
const UNANSWERED_CREATE_TTL: Duration = Duration::from_secs(90);
/// How often the daemon checks a lent address whose borrower IPBlock the watch does not show.
const LENT_CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// How long a lender may take to answer if it updates its block meanwhile: it is busy, not down.
const BUSY_LENDER_TIMEOUT: Duration = Duration::from_secs(15);
/// How long the daemon does not borrow from a lender that did not answer: first and longest.
const LENDER_BACKOFF: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));
/// How many borrow requests may collide with other nodes before the list of blocks counts as stale.
const MAX_COLLISIONS: usize = 3;
/// How long the daemon waits before it lists again while other nodes borrow the same addresses: first and longest.
const CONTENTION_BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// How long a list of blocks is reused.
const LIST_TTL: Duration = Duration::from_secs(1);
/// The page size when the daemon lists all IPBlocks.
const LIST_PAGE: u32 = 500;
/// How long the daemon assumes that a network has no free block.
const EXHAUSTED_TTL: Duration = Duration::from_secs(30);
/// How long a refused address is not requested again. The status of its block shows when it is free.
const REFUSED_TTL: Duration = Duration::from_millis(500);
/// The delay of the first status update of a new block.
const FIRST_STATUS_DELAY: Duration = Duration::from_secs(2);
/// How often the daemon checks whether an unverified block can be released.
const VERIFY_INTERVAL: Duration = Duration::from_secs(60);
/// How many UIDs of deleted or returned IPBlocks are remembered.
const MAX_REMEMBERED_UIDS: usize = 1024;
/// How long after a rejection its backoff is remembered.
const BACKOFF_MEMORY: Duration = Duration::from_secs(120);
/// How many ranges an event lists.
const MAX_NAMED_RANGES: usize = 5;
/// The minimum time between two events of one network.
const EVENT_INTERVAL: Duration = Duration::from_secs(60);

/// The timings of a [`BlockController`].
#[derive(Debug, Clone, Copy)]
pub struct Timings {
    /// How long an empty block is held.
    pub idle_block: Duration,
    /// How long an unused borrowed address is held.
    pub idle_address: Duration,
    /// The minimum time between two status updates of a block.
    pub status_interval: Duration,
    /// How often leases of sandboxes that no longer exist are collected.
    pub gc_interval: Duration,
    /// The age at which a lease is collected if the runtime does not list its sandbox.
    pub min_lease_age: Duration,
}

impl Default for Timings {
    fn default() -> Self {
        Self {
            idle_block: Duration::from_secs(300),
            idle_address: Duration::from_secs(3),
            status_interval: Duration::from_secs(5),
            gc_interval: Duration::from_secs(600),
            min_lease_age: Duration::from_secs(600),
        }
    }
}

/// Lists the IDs of the container runtime's sandboxes.
pub type ListSandboxes =
    Box<dyn Fn(SandboxFilter) -> BoxFuture<'static, Result<BTreeSet<String>, String>> + Send + Sync>;

/// Which sandboxes to list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SandboxFilter {
    /// Every sandbox: none of them loses its lease.
    All,
    /// Those that may use an address of a network: neither the daemon's own nor one on the host's network. As long as one of
    /// them exists, an unverified block stays closed.
    Witnesses,
}

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
enum BlockError {
    #[error("the API server did not answer within {} s", API_TIMEOUT.as_secs())]
    Timeout,
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error(transparent)]
    Journal(#[from] JournalError),
}

impl BlockError {
    /// Whether the API server rejected this request. Other requests may still succeed.
    fn is_rejection(&self) -> bool {
        match self {
            Self::Api(kube::Error::Api(status)) => {
                (400..500).contains(&status.code) && !matches!(status.code, 401 | 408 | 409 | 410 | 429)
            }
            _ => false,
        }
    }
}

/// The outcome of a create request.
enum CreateOutcome {
    Created,
    /// An IPBlock of this name exists.
    Exists,
}

/// Reconciles the address blocks of this node.
pub struct BlockController {
    ipam: Arc<Ipam>,
    api: Api<IPBlock>,
    networks: watch::Receiver<Arc<Networks>>,
    events: Events,
    sandboxes: ListSandboxes,
    timings: Timings,
    /// This node; its UID is empty until the Node object is known.
    holder: HolderRef,
    pools: BTreeMap<String, Arc<Pool>>,
    /// IPBlocks that this node holds and those that borrow from it, by name. `None` until the watch has synced.
    objects: Option<BTreeMap<String, ObservedIpBlock>>,
    /// The enclosing blocks of the addresses that this node borrows, by name.
    lenders: BTreeMap<String, LenderWatch>,
    /// Ranges that other nodes were seen to hold, by the UID of the network.
    taken_ranges: BTreeMap<String, BTreeSet<IpNet>>,
    /// Until when a network is assumed to have no free block.
    exhausted: BTreeMap<(String, Family), Instant>,
    /// Addresses that were refused, and until when they are not requested again.
    refused_addresses: BTreeMap<(String, IpAddr), Instant>,
    /// Since when each block is empty.
    idle: BTreeMap<BlockKey, Instant>,
    /// When the status of each block was last written.
    reported: BTreeMap<BlockKey, Instant>,
    /// Since when this node waits for the lender of a single address.
    borrowing_since: BTreeMap<BlockKey, Instant>,
    /// Blocks whose create request timed out, and when.
    unanswered_creates: BTreeMap<BlockKey, Instant>,
    /// When the IPBlock of a lent address was last seen to exist although the watch does not show it.
    lent_checked: BTreeMap<(BlockKey, IpAddr), Instant>,
    /// The UIDs of IPBlocks whose borrowed address has been returned.
    returned: BTreeSet<String>,
    /// Networks whose last addresses several nodes borrow at once.
    contended: BTreeMap<(String, Family), Contention>,
    /// Lenders that did not answer, by UID.
    silent_lenders: BTreeMap<String, SilentLender>,
    /// The UIDs of networks for whose name blocks of an earlier network still exist.
    reused_names: BTreeSet<String>,
    /// The last list of blocks, by the UID of the network.
    list_cache: BTreeMap<String, (Instant, Vec<ObservedIpBlock>)>,
    /// When a block became unverified, and the sandboxes that existed or were being created then.
    witnesses: BTreeMap<BlockKey, (Instant, BTreeSet<String>)>,
    /// The unverified blocks that an event has reported.
    unverified_reported: BTreeSet<BlockKey>,
    /// When an event last reported that a network is exhausted, by its UID.
    exhausted_events: BTreeMap<String, Instant>,
    /// Requests that the API server rejects, by the UID of the network.
    rejected: BTreeMap<(String, RequestKind), RejectedRequest>,
    backoff: DefaultBackoff,
    /// When to continue after a failure of the API server or of the disk.
    retry_at: Option<Instant>,
    next_gc: Instant,
    next_verify: Instant,
    /// The UIDs of IPBlocks that this node deleted: stale watch events may still arrive.
    deleted_uids: VecDeque<String>,
    /// The API server dropped a boot ID: its CRD is older than this daemon.
    boot_ids_dropped: bool,
    /// Varies the choice of blocks and addresses.
    attempts: u64,
}

#[derive(Debug, Clone, Copy)]
struct Contention {
    until: Instant,
    /// The last wait, before jitter.
    pause: Duration,
}

struct RejectedRequest {
    /// Until when the request is not repeated.
    until: Instant,
    backoff: DefaultBackoff,
    problem: String,
}

struct SilentLender {
    node: String,
    /// Until when this node does not borrow from it.
    until: Instant,
    /// How long that is in total.
    backoff: Duration,
}

struct LenderWatch {
    watch: ObjectWatch<IPBlock>,
    /// Whether the block has been read.
    synced: bool,
    /// When its holder last changed it.
    last_update: Option<Instant>,
    /// `None` if it has no holder.
    block: Option<ObservedIpBlock>,
}

impl BlockController {
    pub fn new(
        ipam: Arc<Ipam>,
        client: Client,
        networks: watch::Receiver<Arc<Networks>>,
        events: Events,
        sandboxes: ListSandboxes,
        timings: Timings,
    ) -> Self {
        Self {
            ipam,
            api: Api::all(client),
            networks,
            events,
            sandboxes,
            timings,
            holder: HolderRef { node: String::new(), uid: String::new() },
            pools: BTreeMap::new(),
            objects: None,
            lenders: BTreeMap::new(),
            taken_ranges: BTreeMap::new(),
            exhausted: BTreeMap::new(),
            refused_addresses: BTreeMap::new(),
            idle: BTreeMap::new(),
            reported: BTreeMap::new(),
            borrowing_since: BTreeMap::new(),
            unanswered_creates: BTreeMap::new(),
            lent_checked: BTreeMap::new(),
            returned: BTreeSet::new(),
            contended: BTreeMap::new(),
            silent_lenders: BTreeMap::new(),
            reused_names: BTreeSet::new(),
            list_cache: BTreeMap::new(),
            witnesses: BTreeMap::new(),
            unverified_reported: BTreeSet::new(),
            rejected: BTreeMap::new(),
            exhausted_events: BTreeMap::new(),
            backoff: DefaultBackoff::default(),
            retry_at: None,
            next_gc: Instant::now(),
            next_verify: Instant::now(),
            deleted_uids: VecDeque::new(),
            boot_ids_dropped: false,
            attempts: 0,
        }
    }

    /// Runs until `stop`.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), Error> {
        let mut blocks: Option<ObjectWatch<IPBlock>> = None;
        loop {
            if self.update_networks() {
                let selector = format!("{NODE_ROLE_LABEL_PREFIX}{}", self.holder.uid);
                blocks = Some(ObjectWatch::labelled(self.api.clone(), &selector));
                self.objects = None;
                self.confirm_blocks();
            }
            let Some(wake) = stop.run_until_cancelled(self.reconcile()).await else { return Ok(()) };
            let ipam = Arc::clone(&self.ipam);
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                changed = self.networks.changed() => if changed.is_err() { return Ok(()) },
                event = next_block_event(&mut blocks) => self.apply_event(event),
                (name, event) = next_lender_event(&mut self.lenders) => self.apply_lender_event(&name, event),
                () = ipam.wake.notified() => if !ipam.has_waiters() { sleep(BATCH_WINDOW).await },
                () = sleep_until(wake) => {}
            }
            if stop.run_until_cancelled(self.catch_up(&mut blocks)).await.is_none() {
                return Ok(());
            }
        }
    }

    /// Applies the events that follow closely, so that one status update answers all borrowers. The watch reads events from
    /// the connection one by one: the next is available only a moment after it was polled.
    async fn catch_up(&mut self, blocks: &mut Option<ObjectWatch<IPBlock>>) {
        let started = Instant::now();
        while started.elapsed() < BATCH_WINDOW {
            tokio::select! {
                event = next_block_event(blocks) => self.apply_event(event),
                (name, event) = next_lender_event(&mut self.lenders) => self.apply_lender_event(&name, event),
                () = sleep(EVENT_GAP) => return,
            }
        }
    }

    /// Applies the current networks and Node. Returns whether the Node has another UID than before.
    fn update_networks(&mut self) -> bool {
        let networks = Arc::clone(&self.networks.borrow_and_update());
        if networks.synced {
            let views = networks.by_name.values();
            self.pools = views.filter_map(|view| Some((view.uid.clone(), view.ipam.clone()?))).collect();
            self.taken_ranges.retain(|uid, _| self.pools.contains_key(uid));
            self.list_cache.retain(|uid, _| self.pools.contains_key(uid));
            self.reused_names.retain(|uid| self.pools.contains_key(uid));
            self.exhausted_events.retain(|uid, _| self.pools.contains_key(uid));
        }
        if networks.node.is_none() && self.objects.is_some() {
            warn!(
                "the Node object of this node was deleted; no addresses are allocated until it exists again"
            );
            self.holder.uid.clear();
            self.objects = None;
            self.confirm_blocks();
        }
        match &networks.node {
            Some(node) if networks.synced => {
                let node = HolderRef::from(node.clone());
                let changed = node != self.holder;
                self.holder = node;
                changed
            }
            _ => false,
        }
    }

    fn apply_event(&mut self, event: ObjectEvent<IPBlock>) {
        match event {
            ObjectEvent::Synced(all) => {
                let all = all.into_iter().filter_map(observed);
                self.objects = Some(all.filter(|(_, one)| !self.deleted_uids.contains(&one.uid)).collect());
                self.retry_at = None;
                self.confirm_blocks();
                self.ipam.set_contact(Contact::Now);
            }
            ObjectEvent::Changed(one) => {
                self.insert(one);
                self.ipam.set_contact(Contact::Now);
            }
            ObjectEvent::Deleted(one) => {
                let (name, uid) = (one.name_any(), one.uid());
                if let Some(objects) = &mut self.objects
                    && objects.get(&name).map(|object| &object.uid) == uid.as_ref()
                {
                    objects.remove(&name);
                    self.confirm_blocks();
                }
                self.ipam.set_contact(Contact::Now);
            }
            ObjectEvent::Failed(error) => {
                debug!(error = %ErrorChain(&error), "the watch of IPBlocks failed; retrying");
                self.ipam.set_contact(Contact::LostAt(std::time::Instant::now()));
            }
        }
    }

    fn apply_lender_event(&mut self, name: &str, event: ObjectEvent<IPBlock>) {
        let Some(lender) = self.lenders.get_mut(name) else { return };
        let now = match event {
            ObjectEvent::Synced(all) => all.into_iter().next(),
            ObjectEvent::Changed(one) => {
                lender.last_update = Some(Instant::now());
                Some(one)
            }
            ObjectEvent::Deleted(_) => None,
            ObjectEvent::Failed(_) => return,
        };
        (lender.synced, lender.block) = (true, now.and_then(observed).map(|(_, object)| object));
    }

    /// Applies the due steps, and returns when to requeue.
    async fn reconcile(&mut self) -> Instant {
        let now = Instant::now();
        if self.objects.is_none() {
            if self.holder.uid.is_empty() {
                self.fail_waiters(None, "the Node object of this node does not exist");
            }
            return now + self.timings.gc_interval;
        }
        if let Some(until) = self.retry_at.filter(|until| *until > now) {
            return until;
        }
        if now >= self.next_gc {
            self.next_gc = now + self.timings.gc_interval;
            // The CRD may have been updated since.
            self.boot_ids_dropped = false;
            self.collect_garbage().await;
        }
        match self.run_steps().await {
            Ok(()) => {
                self.backoff.reset();
                self.retry_at = None;
            }
            Err(error) => {
                let wait = self.backoff.next().unwrap_or(API_TIMEOUT);
                let problem = ErrorChain(&error).to_string();
                warn!(error = problem, ?wait, "reconcile of address blocks failed; retrying");
                self.retry_at = Some(Instant::now() + wait);
                self.fail_waiters(None, &problem);
            }
        }
        self.requeue_at(now)
    }

    /// Fails the ADDs that wait for a block of one network, or of any.
    fn fail_waiters(&self, only: Option<&str>, problem: &str) {
        let requests: Vec<PendingRequest> = self.ipam.lock().waiters.keys().cloned().collect();
        for request in requests {
            let (PendingRequest::Any(network, _) | PendingRequest::Address(network, _)) = &request;
            if only.is_some_and(|only| only != network) {
                continue;
            }
            let name = self.pools.get(network).map_or("", |pool| &pool.name);
            let reason = format!("no address block of network {name:?} can be acquired now: {problem}");
            self.ipam.fail_request(request, reason);
        }
    }

    /// Backs off from requests of a kind that the API server rejects.
    fn back_off(&mut self, network: String, kind: RequestKind, error: &BlockError) {
        let now = Instant::now();
        let new =
            || RejectedRequest { until: now, backoff: DefaultBackoff::default(), problem: String::new() };
        let problem = ErrorChain(error).to_string();
        let one = self.rejected.entry((network.clone(), kind)).or_insert_with(new);
        let wait = one.backoff.next().unwrap_or(API_TIMEOUT).min(API_TIMEOUT);
        one.until = now + wait;
        one.problem.clone_from(&problem);
        warn!(
            network,
            ?kind,
            error = problem,
            ?wait,
            "the API server rejected a request for address blocks; retrying"
        );
        if self.blocks_adds(&network, kind) {
            self.fail_waiters(Some(&network), &problem);
        }
    }

    /// Whether an ADD of the network cannot succeed without a request of this kind. A block without a boot ID serves
    /// addresses before it gets one.
    fn blocks_adds(&self, network: &str, kind: RequestKind) -> bool {
        let of_another_boot = |one: &ObservedIpBlock| {
            let ours = one.spec.network_uid == network && one.spec.holder.uid == self.holder.uid;
            ours && !carries_boot(one, self.ipam.boot())
        };
        match kind {
            RequestKind::Acquire => true,
            RequestKind::UpdateBoot => self.objects.iter().flatten().any(|(_, one)| of_another_boot(one)),
            RequestKind::Lookup | RequestKind::Delete | RequestKind::UpdateStatus => false,
        }
    }

    /// Whether the backoff of a step still runs. If so, fails the ADDs that wait for it.
    fn is_backed_off(&self, step: &BlockStep, now: Instant) -> bool {
        let Some((network, kind)) = step.request_kind() else { return false };
        let rejected = self.rejected.get(&(network.to_owned(), kind));
        let Some(rejected) = rejected.filter(|one| one.until > now) else { return false };
        if self.blocks_adds(network, kind) {
            self.fail_waiters(Some(network), &rejected.problem);
        }
        true
    }

    /// When the next timer fires. Timers that fired after `started` may have been missed by this reconcile and count.
    fn requeue_at(&self, started: Instant) -> Instant {
        let idle_time = |block: &BlockKey| {
            if block.is_single() { self.timings.idle_address } else { self.timings.idle_block }
        };
        let idle = self.idle.iter().map(|(block, since)| *since + idle_time(block));
        let reported = self.reported.values().map(|at| *at + self.timings.status_interval);
        let borrowing =
            self.borrowing_since.values().flat_map(|at| [*at + LENDER_TIMEOUT, *at + BUSY_LENDER_TIMEOUT]);
        let last_update =
            self.lenders.values().filter_map(|lender| Some(lender.last_update? + LENDER_TIMEOUT));
        let verify = (!self.witnesses.is_empty()).then_some(self.next_verify);
        let lent =
            self.lent_checked.values().map(|at| *at + LENT_CHECK_INTERVAL.min(self.timings.gc_interval));
        let unanswered = self.unanswered_creates.values().map(|at| *at + UNANSWERED_CREATE_TTL);
        let contended = self.contended.values().map(|one| one.until);
        let rejected = self.rejected.values().map(|one| one.until);
        let due = idle
            .chain(reported)
            .chain(contended)
            .chain(rejected)
            .chain(borrowing)
            .chain(last_update)
            .chain(verify)
            .chain(lent)
            .chain(unanswered)
            .filter(|at| *at > started)
            .chain(self.retry_at);
        due.chain([self.next_gc]).min().unwrap_or(started + self.timings.gc_interval)
    }

    async fn run_steps(&mut self) -> Result<(), BlockError> {
        if !self.ipam.with_ledger(Ledger::is_complete) {
            self.adopt_former_blocks().await?;
        }
        for _ in 0..MAX_ATTEMPTS {
            self.refresh().await;
            let (mut steps, now) = (self.plan_steps()?, Instant::now());
            steps.retain(|step| !self.is_backed_off(step, now));
            if steps.is_empty() {
                return Ok(());
            }
            // A step that fails does not stop the others.
            let (mut waiting, mut problem) = (true, None);
            for step in steps {
                let kind = step.request_kind().map(|(network, kind)| (network.to_owned(), kind));
                match (self.apply_step(step).await, kind) {
                    (Ok(done), _) => waiting &= !done,
                    (Err(error), Some((network, kind))) if error.is_rejection() => {
                        self.back_off(network, kind, &error);
                    }
                    (Err(error), _) => problem = problem.or(Some(error)),
                }
            }
            if let Some(problem) = problem {
                return Err(problem);
            }
            // Nothing more to do until another node or the API server acts.
            if waiting {
                return Ok(());
            }
        }
        Ok(())
    }

    fn plan_steps(&mut self) -> Result<Vec<BlockStep>, JournalError> {
        let Some(objects) = &self.objects else { return Ok(Vec::new()) };
        let now = Instant::now();
        let idle_time = |block: &BlockKey| {
            if block.is_single() { self.timings.idle_address } else { self.timings.idle_block }
        };
        let idle: BTreeSet<BlockKey> = self
            .idle
            .iter()
            .filter(|(block, since)| **since + idle_time(block) <= now)
            .map(|(block, _)| block.clone())
            .collect();
        let reported = self.reported.keys().cloned().collect();
        let exhausted = self.exhausted.keys().cloned().collect();
        let acquiring = self.ipam.with_ledger(|ledger| {
            let acquiring = ledger.holdings().iter().filter(|(_, one)| one.stage == Stage::Acquiring);
            acquiring.map(|(block, one)| (block.clone(), one.network.clone())).collect::<Vec<_>>()
        });
        let enclosing = acquiring.into_iter().filter_map(|(block, network)| {
            let lender = self.lenders.get(&self.enclosing_block(&block, &network)?)?;
            lender.synced.then(|| (block, lender.block.clone()))
        });
        let lenders = enclosing.collect();
        let pending = PendingRequests::default();
        let input = BlockPlanInput {
            holder: &self.holder,
            boot: (!self.boot_ids_dropped).then(|| self.ipam.boot()),
            networks: &self.pools,
            objects,
            lenders: &lenders,
            pending: &pending,
            exhausted: &exhausted,
            idle: &idle,
            reported: &reported,
            returned: &self.returned,
        };
        self.ipam.plan(input)
    }

    /// The name of the block that encloses a single address.
    fn enclosing_block(&self, block: &BlockKey, network: &str) -> Option<String> {
        let grid = self.pools.get(&block.network)?.grid(Family::of(block.range.addr()))?;
        let enclosing = grid.block_of(block.range.addr()).filter(|_| block.is_single())?;
        (enclosing != block.range).then(|| ipblock::name(network, enclosing))
    }

    /// Applies a step. Returns whether it changed anything.
    async fn apply_step(&mut self, step: BlockStep) -> Result<bool, BlockError> {
        match step {
            BlockStep::Record(record) => self.ipam.record(record)?,
            BlockStep::Lookup(block) => return self.lookup(block).await,
            BlockStep::LookupLent { block, address, object } => {
                return self.lookup_lent(block, address, &object).await;
            }
            BlockStep::Delete { block, object } => self.delete_block(block, &object).await?,
            BlockStep::UpdateBoot { block, object } => return self.update_boot(&block, &object).await,
            BlockStep::UpdateStatus { block, object, status } => {
                self.update_status(block, &object, status).await?;
            }
            BlockStep::Acquire { network, family, missing } => {
                return self.acquire(&network, family, missing).await;
            }
            BlockStep::AcquireAddress { network, address } => {
                return self.acquire_address(&network, address).await;
            }
        }
        Ok(true)
    }

    fn insert(&mut self, block: IPBlock) {
        if let (Some(objects), Some((name, object))) = (&mut self.objects, observed(block))
            && !self.deleted_uids.contains(&object.uid)
        {
            objects.insert(name, object);
            self.confirm_blocks();
        }
    }

    /// Lets only blocks serve addresses that the API server shows as held by this node in the current boot.
    fn confirm_blocks(&self) {
        let all = self.objects.iter().flatten();
        let ours =
            all.filter(|(_, one)| one.spec.holder.uid == self.holder.uid && !self.holder.uid.is_empty());
        let ours = ours.filter(|(_, one)| carries_boot(one, self.ipam.boot()));
        self.ipam.set_confirmed(ours.map(|(name, one)| (name.clone(), one.uid.clone())).collect());
    }

    /// Releases the leases of sandboxes that no longer exist.
    async fn collect_garbage(&mut self) {
        // Sandboxes that are created during the list call are not in its result.
        let started = uptime();
        let live = match (self.sandboxes)(SandboxFilter::All).await {
            Ok(live) => live,
            Err(problem) => {
                // The runtime may only be restarting.
                self.next_gc = Instant::now() + GC_RETRY.min(self.timings.gc_interval);
                return debug!(problem, "cannot list sandboxes; leases are not collected");
            }
        };
        let min_age = i64::try_from(self.timings.min_lease_age.as_secs()).unwrap_or(i64::MAX);
        if let Err(error) = self.ipam.gc_sandboxes(&live, started.saturating_sub(min_age)) {
            warn!(%error, "cannot release leases of sandboxes that no longer exist; retrying");
        }
    }
}

/// The next event of the blocks of this node; pending until the Node is known.
async fn next_block_event(blocks: &mut Option<ObjectWatch<IPBlock>>) -> ObjectEvent<IPBlock> {
    match blocks {
        Some(watch) => watch.next().await,
        None => pending().await,
    }
}

/// The next event of a block that this node borrows from.
async fn next_lender_event(lenders: &mut BTreeMap<String, LenderWatch>) -> (String, ObjectEvent<IPBlock>) {
    if lenders.is_empty() {
        return pending().await;
    }
    let next = lenders.iter_mut().map(|(name, lender)| {
        async move {
            let event = lender.watch.next().await;
            (name.clone(), event)
        }
        .boxed()
    });
    select_all(next).await.0
}

async fn with_timeout<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, BlockError> {
    Ok(timeout(API_TIMEOUT, request).await.map_err(|_| BlockError::Timeout)??)
}

fn observed(block: IPBlock) -> Option<(String, ObservedIpBlock)> {
    let name = block.name_any();
    let uid = block.metadata.uid?;
    Some((name, ObservedIpBlock { uid, spec: block.spec, status: block.status.unwrap_or_default() }))
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn client_errors_are_rejections_and_other_errors_are_transient() {
        let error = |code| BlockError::Api(kube::Error::Api(Box::new(Status { code, ..Status::default() })));
        for code in [400, 403, 404, 405, 413, 422] {
            assert!(error(code).is_rejection(), "{code}");
        }
        for code in [401, 408, 409, 410, 429, 500, 503, 504] {
            assert!(!error(code).is_rejection(), "{code}");
        }
        assert!(!BlockError::Timeout.is_rejection());
    }
}
