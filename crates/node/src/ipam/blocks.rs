//! Keeps enough blocks for the pods of this node, and gives back what it does not need.
//!
//! Decides little: `plan::ipam` says what to do. Here it is done: blocks are created, looked for, deleted and told about,
//! one request after the other.

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
    ipblock::{self, NODE_ROLE_LABEL_PREFIX, NodeRef},
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

/// How long the API server may take to answer.
const API_TIMEOUT: Duration = Duration::from_secs(10);
/// Changes come in bursts: so long is waited for the rest of one, unless a pod waits.
const BATCH_WINDOW: Duration = Duration::from_millis(50);
/// How often a block or an address is asked for before the rest is left to the next turn.
const MAX_ATTEMPTS: usize = 64;
/// How soon the next change of a burst follows.
const EVENT_GAP: Duration = Duration::from_millis(5);
/// How long the holder of a block may take to answer whether it lends an address.
const LENDER_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a request that had no answer may still be carried out.
const UNANSWERED_CREATE_TTL: Duration = Duration::from_secs(90);
/// How often it is looked whether an address is still lent that nobody tells of.
const LENT_CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// How long the holder of a block may take that was last_update of meanwhile: it has much to do.
const BUSY_LENDER_TIMEOUT: Duration = Duration::from_secs(15);
/// How long a holder that did not answer is left in peace, the first time and at most.
const LENDER_BACKOFF: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));
/// How many addresses are asked for in vain before a list is too old to choose from.
const MAX_COLLISIONS: usize = 3;
/// How long it is waited at least and at most until the next list, when others ask for the same addresses.
const CONTENTION_BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// How long a list of blocks is good enough to choose from.
const LIST_TTL: Duration = Duration::from_secs(1);
/// How many blocks are read at once when all of them are.
const LIST_PAGE: u32 = 500;
/// How long it is believed that no block is left.
const EXHAUSTED_TTL: Duration = Duration::from_secs(30);
/// How long an address is not asked for again that was not lent. The status of its block tells when it is free.
const REFUSED_TTL: Duration = Duration::from_millis(500);
/// How long after a block was taken it is first told how much of it is used.
const FIRST_STATUS_DELAY: Duration = Duration::from_secs(2);
/// How often it is looked whether a doubtful block can go.
const VERIFY_INTERVAL: Duration = Duration::from_secs(60);
/// The objects that this node has deleted that are remembered at most.
const MAX_REMEMBERED_UIDS: usize = 1024;
/// How long after a refusal it counts for how patient the next one is met.
const BACKOFF_MEMORY: Duration = Duration::from_secs(120);
/// How many ranges an event names.
const MAX_NAMED_RANGES: usize = 5;
/// The least time between two events about one network.
const EVENT_INTERVAL: Duration = Duration::from_secs(60);

/// How patient a keeper is.
#[derive(Debug, Clone, Copy)]
pub struct Timings {
    /// How long an empty block is kept.
    pub idle_block: Duration,
    /// How long a borrowed address is kept that nobody has.
    pub idle_address: Duration,
    /// The least time between two words about how much of a block is used.
    pub status_interval: Duration,
    /// How often leftovers of sandboxes are looked for.
    pub gc_interval: Duration,
    /// How old a lease is at least whose sandbox counts as gone when it is not there.
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

/// Lists IDs of the container runtime's sandboxes.
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

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
enum BlockError {
    #[error("the API server gave no answer within {} s", API_TIMEOUT.as_secs())]
    Timeout,
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error(transparent)]
    Journal(#[from] JournalError),
}

impl BlockError {
    /// Whether the API server has understood the request and does not want it, which says nothing about others.
    fn is_rejection(&self) -> bool {
        match self {
            Self::Api(kube::Error::Api(status)) => {
                (400..500).contains(&status.code) && !matches!(status.code, 401 | 408 | 409 | 410 | 429)
            }
            _ => false,
        }
    }
}

/// What became of a create.
enum CreateOutcome {
    Created,
    /// Somebody has an object of this name.
    Exists,
}

/// The keeper of a node's blocks.
pub struct BlockController {
    ipam: Arc<Ipam>,
    api: Api<IPBlock>,
    networks: watch::Receiver<Arc<Networks>>,
    events: Events,
    sandboxes: ListSandboxes,
    timings: Timings,
    holder: NodeRef,
    pools: BTreeMap<String, Arc<Pool>>,
    /// Blocks of this node and those that ask it for an address, by name. None until all of them have been read.
    objects: Option<BTreeMap<String, ObservedIpBlock>>,
    /// Names of the blocks around addresses that this node asks for, each with who holds it.
    lenders: BTreeMap<String, LenderWatch>,
    /// What was seen of others' blocks, by the network's UID.
    taken_ranges: BTreeMap<String, BTreeSet<IpNet>>,
    /// Until when it is believed that no block is left.
    exhausted: BTreeMap<(String, Family), Instant>,
    /// Addresses that were asked for in vain, until when that is believed.
    refused_addresses: BTreeMap<(String, IpAddr), Instant>,
    idle: BTreeMap<BlockKey, Instant>,
    reported: BTreeMap<BlockKey, Instant>,
    borrowing_since: BTreeMap<BlockKey, Instant>,
    /// Blocks whose create had no answer, and when that was.
    unanswered_creates: BTreeMap<BlockKey, Instant>,
    /// Lent addresses whose object is there although it is not watched, and when that was seen.
    lent_checked: BTreeMap<(BlockKey, IpAddr), Instant>,
    /// The UIDs of objects whose address was lent and is back.
    returned: BTreeSet<String>,
    /// Networks whose last addresses many nodes ask for at once, and when it is this one's turn again.
    contended: BTreeMap<(String, Family), Contention>,
    /// Holders that did not answer, by their UID.
    silent_lenders: BTreeMap<String, SilentLender>,
    /// Networks, by their UID, whose name an earlier one has blocks of.
    reused_names: BTreeSet<String>,
    /// What was listed a moment ago, by the network's UID.
    list_cache: BTreeMap<String, (Instant, Vec<ObservedIpBlock>)>,
    /// When a block became doubtful, and the sandboxes that were there, or were being made.
    witnesses: BTreeMap<BlockKey, (Instant, BTreeSet<String>)>,
    /// The doubtful blocks that were told of.
    unverified_reported: BTreeSet<BlockKey>,
    exhausted_events: BTreeMap<String, Instant>,
    /// What the API server refuses, by the UID of the network that it is for.
    rejected: BTreeMap<(String, RequestKind), RejectedRequest>,
    backoff: DefaultBackoff,
    retry_at: Option<Instant>,
    next_gc: Instant,
    next_verify: Instant,
    /// The UIDs of objects that were deleted: word of them can still be under way.
    deleted_uids: VecDeque<String>,
    /// The API server dropped a boot ID: its CRD is older than this daemon.
    boot_ids_dropped: bool,
    attempts: u64,
}

#[derive(Debug, Clone, Copy)]
struct Contention {
    until: Instant,
    /// What was waited before.
    pause: Duration,
}

struct RejectedRequest {
    /// Until when it is not asked for again.
    until: Instant,
    backoff: DefaultBackoff,
    problem: String,
}

struct SilentLender {
    node: String,
    /// Until when it is left in peace.
    until: Instant,
    /// How long that was.
    backoff: Duration,
}

struct LenderWatch {
    watch: ObjectWatch<IPBlock>,
    /// Whether it has been read.
    synced: bool,
    /// When its holder last said anything.
    last_update: Option<Instant>,
    /// None if nobody holds it.
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
            holder: NodeRef { node: String::new(), uid: String::new() },
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

    /// Takes in what comes right behind, so that all who ask are answered with one word. What the API server has sent is
    /// read from the connection piece by piece: the next one is there a moment after it was asked for, never at once.
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

    /// Takes over what the rest of the daemon knows; says whether this node is another one than before.
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
            warn!("this node has no Node any more: no address is handed out until it has one");
            self.holder.uid.clear();
            self.objects = None;
            self.confirm_blocks();
        }
        match &networks.node {
            Some(node) if networks.synced && *node != self.holder => {
                self.holder = node.clone();
                true
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
                debug!(error = %ErrorChain(&error), "the watch of address blocks broke and is tried again");
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

    /// Does what is due, and says when to come back unless something happens before.
    async fn reconcile(&mut self) -> Instant {
        let now = Instant::now();
        if self.objects.is_none() {
            if self.holder.uid.is_empty() {
                self.fail_waiters(None, "the node has no Node object at the API server");
            }
            return now + self.timings.gc_interval;
        }
        if let Some(until) = self.retry_at.filter(|until| *until > now) {
            return until;
        }
        if now >= self.next_gc {
            self.next_gc = now + self.timings.gc_interval;
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
                warn!(error = problem, ?wait, "address blocks cannot be kept, trying again");
                self.retry_at = Some(Instant::now() + wait);
                self.fail_waiters(None, &problem);
            }
        }
        self.requeue_at(now)
    }

    /// Tells whoever waits, for this network or for any, that the API server is the reason.
    fn fail_waiters(&self, only: Option<&str>, problem: &str) {
        let requests: Vec<PendingRequest> = self.ipam.lock().waiters.keys().cloned().collect();
        for request in requests {
            let (PendingRequest::Any(network, _) | PendingRequest::Address(network, _)) = &request;
            if only.is_some_and(|only| only != network) {
                continue;
            }
            let name = self.pools.get(network).map_or("", |pool| &pool.name);
            let why = format!("no address block of network {name:?} can be taken now: {problem}");
            self.ipam.fail_request(request, why);
        }
    }

    /// Does not ask for a while for what the API server refuses.
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
            "the API server refuses what a network needs, trying again"
        );
        if matches!(kind, RequestKind::Acquire | RequestKind::UpdateBoot) {
            self.fail_waiters(Some(&network), &problem);
        }
    }

    /// Whether a step is not to be tried yet; those who wait for it are told why.
    fn is_backed_off(&self, step: &BlockStep, now: Instant) -> bool {
        let Some((network, kind)) = step.request_kind() else { return false };
        let refusal = self.rejected.get(&(network.to_owned(), kind));
        let Some(refusal) = refusal.filter(|one| one.until > now) else { return false };
        if matches!(kind, RequestKind::Acquire | RequestKind::UpdateBoot) {
            self.fail_waiters(Some(network), &refusal.problem);
        }
        true
    }

    /// When something is due although nothing happens. What became due since this turn began may not have been seen in it.
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
            // One that fails stands in no other's way.
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
            // Somebody else has to do something first.
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

    /// The name of the block around a single address.
    fn enclosing_block(&self, block: &BlockKey, network: &str) -> Option<String> {
        let grid = self.pools.get(&block.network)?.grid(Family::of(block.range.addr()))?;
        let enclosing = grid.block_of(block.range.addr()).filter(|_| block.is_single())?;
        (enclosing != block.range).then(|| ipblock::name(network, enclosing))
    }

    /// Does a step, and says whether anything came of it.
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
                self.update_status(block, &object, status).await?
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

    /// Nothing is handed out of a block that is not there as it was.
    fn confirm_blocks(&self) {
        let all = self.objects.iter().flatten();
        let ours =
            all.filter(|(_, one)| one.spec.holder.uid == self.holder.uid && !self.holder.uid.is_empty());
        let ours = ours.filter(|(_, one)| carries_boot(one, self.ipam.boot()));
        self.ipam.set_confirmed(ours.map(|(name, one)| (name.clone(), one.uid.clone())).collect());
    }

    /// Frees what sandboxes had that are gone.
    async fn collect_garbage(&mut self) {
        // What is made while the runtime answers cannot be in its answer.
        let started = uptime();
        let live = match (self.sandboxes)(SandboxFilter::All).await {
            Ok(live) => live,
            Err(problem) => {
                return debug!(problem, "the runtime does not say which sandboxes there are");
            }
        };
        let min_age = i64::try_from(self.timings.min_lease_age.as_secs()).unwrap_or(i64::MAX);
        if let Err(error) = self.ipam.gc_sandboxes(&live, started.saturating_sub(min_age)) {
            warn!(%error, "leftovers of sandboxes cannot be freed yet");
        }
    }
}

/// The next word about the blocks of this node, once it is known which node it is.
async fn next_block_event(blocks: &mut Option<ObjectWatch<IPBlock>>) -> ObjectEvent<IPBlock> {
    match blocks {
        Some(watch) => watch.next().await,
        None => pending().await,
    }
}

/// The next word about a block that an address is asked of.
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
    fn a_no_is_a_refusal_and_anything_else_may_still_be_done() {
        let answered =
            |code| BlockError::Api(kube::Error::Api(Box::new(Status { code, ..Status::default() })));
        for code in [400, 403, 404, 405, 413, 422] {
            assert!(answered(code).is_rejection(), "{code}");
        }
        for code in [401, 408, 409, 410, 429, 500, 503, 504] {
            assert!(!answered(code).is_rejection(), "{code}");
        }
        assert!(!BlockError::Timeout.is_rejection());
    }
}
