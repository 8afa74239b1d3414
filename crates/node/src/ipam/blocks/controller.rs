//! The control loop: observes, plans and applies until nothing is left to do.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use api::{
    ErrorChain, IPBlock,
    ipblock::{self, HolderRef, NODE_ROLE_LABEL_PREFIX},
};
use futures::future::pending;
use kube::{
    Api, Client,
    runtime::{utils::Backoff as _, watcher::DefaultBackoff},
};
use plan::ipam::{
    BlockKey, BlockPlanInput, BlockSearch, BlockStep, Borrowing, Contact, Family, IdleBlocks, Ledger,
    LentChecks, ObservedIpBlock, PendingRequests, Pool, RequestKind, Stage, StatusReports, Timings,
    UnansweredCreates, Verification,
};
use tokio::{
    sync::watch,
    time::{sleep, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::{
    acquire::{ExhaustedEvents, RecentLists},
    borrow::LenderWatches,
    ipblocks::{API_TIMEOUT, BlockError},
    observed::ObservedBlocks,
    reclaim::TrackedBlocks,
    rejections::Rejections,
};
use crate::{
    Error,
    cni::Networks,
    event::Events,
    ipam::{
        Ipam, JournalError,
        gc::{GarbageCollector, ListSandboxes},
    },
    watch::{ObjectEvent, ObjectWatch},
};

/// How long the controller collects a burst of changes, unless an ADD waits.
const BATCH_WINDOW: Duration = Duration::from_millis(50);
/// The longest gap between two events of a burst.
const EVENT_GAP: Duration = Duration::from_millis(5);
/// How many attempts one reconcile makes.
pub const MAX_ATTEMPTS: usize = 64;
/// How many steps of one pass may get no answer. The time that they take and [`client::watch::DETECTION_TIME`] together must
/// not exceed [`plan::ipam::limits::UNNOTICED_BREAK`].
const MAX_STEP_TIMEOUTS: usize = 3;

/// The current time, which a test can pause.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Reconciles the address blocks of this node. Its parts remember one thing each.
pub struct BlockController {
    pub(super) ipam: Arc<Ipam>,
    pub(super) api: Api<IPBlock>,
    networks: watch::Receiver<Arc<Networks>>,
    pub(super) events: Events,
    pub(super) sandboxes: ListSandboxes,
    pub(super) timings: Timings,
    /// This node; its UID is empty until the Node object is known.
    pub(super) holder: HolderRef,
    pub(super) pools: BTreeMap<String, Arc<Pool>>,
    pub(super) objects: ObservedBlocks,
    pub(super) search: BlockSearch,
    pub(super) lists: RecentLists,
    pub(super) exhausted_events: ExhaustedEvents,
    pub(super) unanswered_creates: UnansweredCreates,
    pub(super) borrowing: Borrowing,
    pub(super) lenders: LenderWatches,
    pub(super) lent: LentChecks,
    pub(super) idle: IdleBlocks,
    pub(super) verification: Verification,
    pub(super) reports: StatusReports,
    rejections: Rejections,
    retry: Retry,
    gc: GarbageCollector,
    /// The API server dropped a boot ID: its CRD is older than this daemon.
    pub(super) boot_ids_dropped: bool,
}

/// The wait after a failure of the API server or of the disk.
#[derive(Default)]
struct Retry {
    backoff: DefaultBackoff,
    at: Option<Instant>,
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
            objects: ObservedBlocks::default(),
            search: BlockSearch::default(),
            lists: RecentLists::default(),
            exhausted_events: ExhaustedEvents::default(),
            unanswered_creates: UnansweredCreates::default(),
            borrowing: Borrowing::default(),
            lenders: LenderWatches::default(),
            lent: LentChecks::default(),
            idle: IdleBlocks::default(),
            verification: Verification::default(),
            reports: StatusReports::default(),
            rejections: Rejections::default(),
            retry: Retry::default(),
            gc: GarbageCollector::new(now()),
            boot_ids_dropped: false,
        }
    }

    /// Runs until `stop`.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), Error> {
        let mut blocks: Option<ObjectWatch<IPBlock>> = None;
        loop {
            if self.update_networks() {
                let selector = format!("{NODE_ROLE_LABEL_PREFIX}{}", self.holder.uid);
                blocks = Some(ObjectWatch::labelled(self.api.clone(), &selector));
                self.objects.reset();
                self.confirm_blocks();
            }
            let Some(wake) = stop.run_until_cancelled(self.reconcile()).await else { return Ok(()) };
            let ipam = Arc::clone(&self.ipam);
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                changed = self.networks.changed() => if changed.is_err() { return Ok(()) },
                event = next_block_event(&mut blocks) => self.apply_event(event),
                (name, event) = self.lenders.next() => self.lenders.apply_event(&name, event),
                () = ipam.wake.notified() => if !ipam.has_waiters() { sleep(BATCH_WINDOW).await },
                () = sleep_until(wake.into()) => {}
            }
            if stop.run_until_cancelled(self.catch_up(&mut blocks)).await.is_none() {
                return Ok(());
            }
        }
    }

    /// Applies the events that follow closely, so that one status update answers all borrowers. The watch reads events from
    /// the connection one by one: the next is available only a moment after it was polled.
    async fn catch_up(&mut self, blocks: &mut Option<ObjectWatch<IPBlock>>) {
        let started = now();
        while now() < started + BATCH_WINDOW {
            tokio::select! {
                event = next_block_event(blocks) => self.apply_event(event),
                (name, event) = self.lenders.next() => self.lenders.apply_event(&name, event),
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
            let exists = |uid: &str| self.pools.contains_key(uid);
            self.search.retain_networks(exists);
            self.lists.retain_networks(exists);
            self.exhausted_events.retain_networks(exists);
            let closed = networks.by_name.iter().filter(|(_, view)| view.closed);
            let closed = closed.map(|(name, view)| (view.uid.clone(), name.clone())).collect();
            if self.ipam.close(closed) {
                self.gc.expedite(now());
            }
        }
        if networks.node.is_none() && self.objects.is_synced() {
            warn!(
                "the Node object of this node was deleted; no addresses are allocated until it exists again"
            );
            self.holder.uid.clear();
            self.objects.reset();
            self.confirm_blocks();
        }
        match networks.node.clone().map(HolderRef::from) {
            Some(node) if networks.synced && node != self.holder => {
                self.holder = node;
                true
            }
            _ => false,
        }
    }

    fn apply_event(&mut self, event: ObjectEvent<IPBlock>) {
        let contact = match event {
            ObjectEvent::Synced(all) => {
                self.objects.sync(all);
                self.retry.at = None;
                self.confirm_blocks();
                Contact::Now
            }
            ObjectEvent::Changed(one) => {
                self.insert(one);
                Contact::Now
            }
            ObjectEvent::Deleted(one) => {
                if self.objects.remove_object(&one) {
                    self.confirm_blocks();
                }
                Contact::Now
            }
            ObjectEvent::Failed(error) => {
                debug!(error = %ErrorChain(&error), "the watch of IPBlocks failed; retrying");
                Contact::Lost { allocate_until: Instant::now() + self.timings.offline_grace }
            }
        };
        self.ipam.set_contact(contact);
    }

    /// Applies the due steps, and returns when to requeue.
    async fn reconcile(&mut self) -> Instant {
        let started = now();
        if !self.objects.is_synced() {
            if self.holder.uid.is_empty() {
                self.fail_waiters(None, "the Node object of this node does not exist");
            }
            return started + self.timings.gc_interval;
        }
        if let Some(until) = self.retry.at.filter(|until| *until > started) {
            return until;
        }
        if self.gc.is_due(started) {
            // The CRD may have been updated since.
            self.boot_ids_dropped = false;
            self.gc.collect(&self.ipam, &self.sandboxes, &self.timings, started).await;
        }
        match self.run_steps().await {
            Ok(()) => {
                self.retry.backoff.reset();
                self.retry.at = None;
            }
            Err(error) => {
                let wait = self.retry.backoff.next().unwrap_or(API_TIMEOUT);
                let problem = ErrorChain(&error).to_string();
                warn!(error = problem, ?wait, "reconcile of address blocks failed; retrying");
                self.retry.at = Some(now() + wait);
                self.fail_waiters(None, &problem);
            }
        }
        self.requeue_at(started)
    }

    /// When the next timer fires. Timers that fired after `started` may have been missed by this reconcile and count.
    fn requeue_at(&self, started: Instant) -> Instant {
        let idle = self.idle.deadlines(&self.timings);
        let due = idle
            .chain(self.reports.deadlines(&self.timings))
            .chain(self.borrowing.deadlines())
            .chain(self.lenders.deadlines())
            .chain(self.verification.deadline())
            .chain(self.lent.deadlines(&self.timings))
            .chain(self.unanswered_creates.deadlines())
            .chain(self.rejections.deadlines())
            .filter(|at| *at > started)
            .chain(self.retry.at);
        due.chain([self.gc.next()]).min().unwrap_or(started + self.timings.gc_interval)
    }

    /// Fails the ADDs that wait for a block of one network, or of any.
    fn fail_waiters(&self, only: Option<&str>, problem: &str) {
        for request in self.ipam.waiting_requests() {
            let network = request.network();
            if only.is_some_and(|only| only != network) {
                continue;
            }
            let name = self.pools.get(network).map_or("", |pool| &pool.name);
            let reason = format!("no address block of network {name:?} can be acquired now: {problem}");
            self.ipam.fail_request(request, reason);
        }
    }

    /// Backs off from requests of a kind that the API server rejects.
    fn back_off(&mut self, network: &str, kind: RequestKind, error: &BlockError) {
        let problem = ErrorChain(error).to_string();
        let wait = self.rejections.add(network, kind, &problem, now());
        warn!(
            network,
            ?kind,
            error = problem,
            ?wait,
            "the API server rejected a request for address blocks; retrying"
        );
        if self.blocks_adds(network, kind) {
            self.fail_waiters(Some(network), &problem);
        }
    }

    /// Whether an ADD of the network cannot succeed without a request of this kind. A block without a boot ID serves
    /// addresses before it gets one.
    fn blocks_adds(&self, network: &str, kind: RequestKind) -> bool {
        match kind {
            RequestKind::Acquire => true,
            RequestKind::UpdateBoot => self.objects.has_other_boot(network, &self.holder, self.ipam.boot()),
            RequestKind::Lookup | RequestKind::Delete | RequestKind::UpdateStatus => false,
        }
    }

    /// Whether the backoff of a step still runs. If so, fails the ADDs that wait for it.
    fn is_backed_off(&self, step: &BlockStep, now: Instant) -> bool {
        let Some((network, kind)) = step.request_kind() else { return false };
        let Some(problem) = self.rejections.problem(network, kind, now) else { return false };
        if self.blocks_adds(network, kind) {
            self.fail_waiters(Some(network), problem);
        }
        true
    }

    async fn run_steps(&mut self) -> Result<(), BlockError> {
        if !self.ipam.with_ledger(Ledger::is_complete) {
            self.adopt_former_blocks().await?;
        }
        for _ in 0..MAX_ATTEMPTS {
            self.refresh().await;
            let (mut steps, now) = (self.plan_steps()?, now());
            steps.retain(|step| !self.is_backed_off(step, now));
            if steps.is_empty() {
                return Ok(());
            }
            // A step that fails does not stop the others. If the API server does not answer, the rest waits: the watch must
            // notice the loss in time.
            let (mut waiting, mut problem, mut timeouts) = (true, None, 0);
            for step in steps {
                if timeouts == MAX_STEP_TIMEOUTS {
                    break;
                }
                let kind = step.request_kind().map(|(network, kind)| (network.to_owned(), kind));
                match (self.apply_step(step).await, kind) {
                    (Ok(done), _) => waiting &= !done,
                    (Err(error), Some((network, kind))) if error.is_rejection() => {
                        self.back_off(&network, kind, &error);
                    }
                    (Err(error), _) => {
                        timeouts += usize::from(matches!(error, BlockError::Timeout));
                        problem = problem.or(Some(error));
                    }
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

    /// Expires timers, and tracks idle blocks and lenders.
    async fn refresh(&mut self) {
        let now = now();
        self.search.expire(now);
        self.borrowing.expire(now);
        self.rejections.expire(now);
        self.unanswered_creates.expire(now);
        self.reports.expire(&self.timings, now);
        let mut tracked = self.ipam.with_ledger(TrackedBlocks::of);
        self.track_idle(&mut tracked, now).await;
        self.check_lenders(&tracked.acquiring, now);
    }

    fn plan_steps(&mut self) -> Result<Vec<BlockStep>, JournalError> {
        let Some(objects) = self.objects.all() else { return Ok(Vec::new()) };
        let (idle, reported) = (self.idle.expired(&self.timings, now()), self.reports.recent());
        let exhausted = self.search.exhausted();
        let pending = PendingRequests::default();
        let lenders = self.observed_lenders();
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
            returned: self.lent.returned(),
        };
        self.ipam.plan(input)
    }

    /// The enclosing block of each address that this node borrows, as far as it has been read.
    fn observed_lenders(&self) -> BTreeMap<BlockKey, Option<ObservedIpBlock>> {
        let acquiring = self.ipam.with_ledger(|ledger| {
            let acquiring = ledger.holdings().iter().filter(|(_, one)| one.stage == Stage::Acquiring);
            acquiring.map(|(block, one)| (block.clone(), one.network.clone())).collect::<Vec<_>>()
        });
        let enclosing = acquiring.into_iter().filter_map(|(block, network)| {
            let name = self.enclosing_block(&block, &network)?;
            self.lenders.is_read(&name).then(|| (block, self.lenders.block(&name)))
        });
        enclosing.collect()
    }

    /// The name of the block that encloses a single address.
    pub(super) fn enclosing_block(&self, block: &BlockKey, network: &str) -> Option<String> {
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

    pub(super) fn insert(&mut self, block: IPBlock) {
        if self.objects.insert(block) {
            self.confirm_blocks();
        }
    }

    /// Lets only blocks serve addresses that the API server shows as held by this node in the current boot.
    pub(super) fn confirm_blocks(&self) {
        let serving = if self.holder.uid.is_empty() {
            BTreeMap::new()
        } else {
            self.objects.serving(&self.holder, self.ipam.boot())
        };
        self.ipam.set_confirmed(serving);
    }
}

/// The next event of the blocks of this node; pending until the Node is known.
async fn next_block_event(blocks: &mut Option<ObjectWatch<IPBlock>>) -> ObjectEvent<IPBlock> {
    match blocks {
        Some(watch) => watch.next().await,
        None => pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use client::watch::DETECTION_TIME;
    use plan::ipam::limits::UNNOTICED_BREAK;

    use super::*;
    use crate::{
        ipam::Metrics,
        network_snapshot::{NetworkState, NetworkView},
    };

    #[tokio::test]
    async fn a_network_that_is_being_deleted_compares_its_leases_with_the_sandboxes_at_once() {
        let dir = std::env::temp_dir().join(format!("patchbay-close-{}", std::process::id()));
        let ipam = Arc::new(Ipam::open(&dir, "boot", Metrics::default()).unwrap());
        std::fs::remove_dir_all(&dir).unwrap();
        let client = Client::try_from(kube::Config::new("http://127.0.0.1:1".parse().unwrap())).unwrap();
        let (networks, reader) = watch::channel(Arc::new(Networks { synced: true, ..Networks::default() }));
        let (events, _) = Events::new(client.clone(), "a");
        let sandboxes: ListSandboxes = Box::new(|_| Box::pin(async { Ok(BTreeSet::new()) }));
        let timings = Timings::default();
        let mut controller = BlockController::new(ipam, client, reader, events, sandboxes, timings);
        controller.update_networks();
        controller.gc.collect(&controller.ipam, &controller.sandboxes, &timings, now()).await;
        let view = |closed| NetworkView {
            uid: "u".to_owned(),
            state: NetworkState::Ready { bridge_index: 1, mtu: 1500 },
            closed,
            ipam: None,
            has_claims: false,
        };
        for (closed, due) in [(false, false), (true, true)] {
            networks.send_modify(|networks| {
                _ = Arc::make_mut(networks).by_name.insert("blue".to_owned(), view(closed));
            });
            controller.update_networks();
            assert_eq!(controller.gc.is_due(now()), due);
        }
    }

    #[test]
    fn steps_that_get_no_answer_do_not_keep_the_watch_from_noticing_the_loss_in_time() {
        let unpolled = API_TIMEOUT * u32::try_from(MAX_STEP_TIMEOUTS).unwrap();
        assert!(unpolled + DETECTION_TIME <= UNNOTICED_BREAK, "{unpolled:?} + {DETECTION_TIME:?}");
    }
}
