//! Keeps enough blocks for the pods of this node, and gives back what it does not need.
//!
//! Decides little: `plan::ipam` says what to do. Here it is done: blocks are created, looked for, deleted and told about,
//! one request after the other.

mod look;
mod objects;
mod take;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use api::{
    Chain, IPBlock,
    ipblock::{self, Holder, NODE_LABEL_PREFIX},
};
use futures::future::{BoxFuture, FutureExt as _, pending, select_all};
use ipnet::IpNet;
use kube::{
    Api, Client, ResourceExt as _,
    runtime::{utils::Backoff as _, watcher::DefaultBackoff},
};
use plan::ipam::{Block, Family, Ledger, Object, Plea, Rules, Stage, Step, View, Wants};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::{Contact, Ipam, JournalError, Want, uptime};
use crate::{
    Error,
    cni::Networks,
    event::Events,
    watch::{ObjectEvent, ObjectWatch},
};

/// How long the API server may take to answer.
const DEADLINE: Duration = Duration::from_secs(10);
/// Changes come in bursts: so long is waited for the rest of one, unless a pod waits.
const BURST: Duration = Duration::from_millis(50);
/// How often a block or an address is asked for before the rest is left to the next turn.
const TRIES: usize = 64;
/// How soon the next change of a burst follows.
const RIGHT_BEHIND: Duration = Duration::from_millis(5);
/// How long the holder of a block may take to answer whether it lends an address.
const SILENT: Duration = Duration::from_secs(3);
/// How long a request that had no answer may still be carried out.
const UNCERTAIN: Duration = Duration::from_secs(90);
/// How often it is looked whether an address is still lent that nobody tells of.
const LENT: Duration = Duration::from_secs(60);
/// How long the holder of a block may take that was heard of meanwhile: it has much to do.
const BUSY: Duration = Duration::from_secs(15);
/// How long a holder that did not answer is left in peace, the first time and at most.
const SHUNNED: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));
/// How many addresses are asked for in vain before a list is too old to choose from.
const COLLISIONS: usize = 3;
/// How long it is waited at least and at most until the next list, when others ask for the same addresses.
const CROWDED: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// How long a list of blocks is good enough to choose from.
const LISTED: Duration = Duration::from_secs(1);
/// How many blocks are read at once when all of them are.
const LIST_PAGE: u32 = 500;
/// How long it is believed that no block is left.
const BELIEVED: Duration = Duration::from_secs(30);
/// How long an address is not asked for again that was not lent. The status of its block tells when it is free.
const IN_VAIN: Duration = Duration::from_millis(500);
/// How long after a block was taken it is first told how much of it is used.
const FIRST_WORD: Duration = Duration::from_secs(2);
/// How often it is looked whether a doubtful block can go.
const DOUBT: Duration = Duration::from_secs(60);
/// The objects that this node has deleted that are remembered at most.
const REMEMBERED: usize = 1024;
/// How long after a refusal it counts for how patient the next one is met.
const REMEMBERED_FOR: Duration = Duration::from_secs(120);
/// How many ranges an event names.
const NAMED: usize = 5;
/// The least time between two events about one network.
const BETWEEN_EVENTS: Duration = Duration::from_secs(60);

/// How patient a keeper is.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// How long an empty block is kept.
    pub idle: Duration,
    /// How long a borrowed address is kept that nobody has.
    pub idle_address: Duration,
    /// The least time between two words about how much of a block is used.
    pub tell: Duration,
    /// How often leftovers of sandboxes are looked for.
    pub sweep: Duration,
    /// How old a lease is at least whose sandbox counts as gone when it is not there.
    pub young: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            idle: Duration::from_secs(300),
            idle_address: Duration::from_secs(3),
            tell: Duration::from_secs(5),
            sweep: Duration::from_secs(600),
            young: Duration::from_secs(600),
        }
    }
}

/// The sandboxes that the runtime has.
pub type Sandboxes = Box<dyn Fn() -> BoxFuture<'static, Result<BTreeSet<String>, String>> + Send + Sync>;

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("the API server gave no answer within {} s", DEADLINE.as_secs())]
    Deadline,
    #[error(transparent)]
    Refused(#[from] kube::Error),
    #[error(transparent)]
    Disk(#[from] JournalError),
}

impl Failure {
    /// Whether the API server has understood the request and does not want it, which says nothing about others.
    fn is_refusal(&self) -> bool {
        match self {
            Self::Refused(kube::Error::Api(status)) => {
                (400..500).contains(&status.code) && !matches!(status.code, 401 | 408 | 409 | 410 | 429)
            }
            _ => false,
        }
    }
}

/// What became of a create.
enum Created {
    Ours,
    /// Somebody has an object of this name.
    Exists,
}

/// The keeper of a node's blocks.
pub struct Keeper {
    ipam: Arc<Ipam>,
    api: Api<IPBlock>,
    networks: watch::Receiver<Arc<Networks>>,
    events: Events,
    sandboxes: Sandboxes,
    pace: Pace,
    me: Holder,
    rules: BTreeMap<String, Arc<Rules>>,
    /// Blocks of this node and those that ask it for an address, by name. None until all of them have been read.
    objects: Option<BTreeMap<String, Object>>,
    /// Names of the blocks around addresses that this node asks for, each with who holds it.
    lenders: BTreeMap<String, Lender>,
    /// What was seen of others' blocks, by the network's UID.
    known: BTreeMap<String, BTreeSet<IpNet>>,
    /// Until when it is believed that no block is left.
    full: BTreeMap<(String, Family), Instant>,
    /// Addresses that were asked for in vain, until when that is believed.
    refused: BTreeMap<(String, IpAddr), Instant>,
    idle: BTreeMap<Block, Instant>,
    told: BTreeMap<Block, Instant>,
    asked: BTreeMap<Block, Instant>,
    /// Blocks whose create had no answer, and when that was.
    uncertain: BTreeMap<Block, Instant>,
    /// Lent addresses whose object is there although it is not watched, and when that was seen.
    lent_seen: BTreeMap<(Block, IpAddr), Instant>,
    /// The UIDs of objects whose address was lent and is back.
    returned: BTreeSet<String>,
    /// Networks whose last addresses many nodes ask for at once, and when it is this one's turn again.
    crowded: BTreeMap<(String, Family), Crowded>,
    /// Holders that did not answer, by their UID.
    silent: BTreeMap<String, Silent>,
    /// Networks, by their UID, whose name an earlier one has blocks of.
    earlier: BTreeSet<String>,
    /// What was listed a moment ago, by the network's UID.
    lists: BTreeMap<String, (Instant, Vec<Object>)>,
    /// When a block became doubtful, and the sandboxes that were there, or were being made.
    witnesses: BTreeMap<Block, (Instant, BTreeSet<String>)>,
    /// The doubtful blocks that were told of.
    doubts_told: BTreeSet<Block>,
    events_told: BTreeMap<String, Instant>,
    /// What the API server refuses, by the UID of the network that it is for.
    refusals: BTreeMap<(String, Plea), Refusal>,
    backoff: DefaultBackoff,
    pause: Option<Instant>,
    next_sweep: Instant,
    next_doubt: Instant,
    /// The UIDs of objects that were deleted: word of them can still be under way.
    deleted: VecDeque<String>,
    tries: u64,
}

#[derive(Debug, Clone, Copy)]
struct Crowded {
    until: Instant,
    /// What was waited before.
    pause: Duration,
}

struct Refusal {
    /// Until when it is not asked for again.
    until: Instant,
    backoff: DefaultBackoff,
    problem: String,
}

struct Silent {
    node: String,
    /// Until when it is left in peace.
    until: Instant,
    /// How long that was.
    shunned: Duration,
}

struct Lender {
    watch: ObjectWatch<IPBlock>,
    /// Whether it has been read.
    read: bool,
    /// When its holder last said anything.
    heard: Option<Instant>,
    /// None if nobody holds it.
    seen: Option<Object>,
}

impl Keeper {
    pub fn new(
        ipam: Arc<Ipam>,
        client: Client,
        networks: watch::Receiver<Arc<Networks>>,
        events: Events,
        sandboxes: Sandboxes,
        pace: Pace,
    ) -> Self {
        Self {
            ipam,
            api: Api::all(client),
            networks,
            events,
            sandboxes,
            pace,
            me: Holder { node: String::new(), uid: String::new() },
            rules: BTreeMap::new(),
            objects: None,
            lenders: BTreeMap::new(),
            known: BTreeMap::new(),
            full: BTreeMap::new(),
            refused: BTreeMap::new(),
            idle: BTreeMap::new(),
            told: BTreeMap::new(),
            asked: BTreeMap::new(),
            uncertain: BTreeMap::new(),
            lent_seen: BTreeMap::new(),
            returned: BTreeSet::new(),
            crowded: BTreeMap::new(),
            silent: BTreeMap::new(),
            earlier: BTreeSet::new(),
            lists: BTreeMap::new(),
            witnesses: BTreeMap::new(),
            doubts_told: BTreeSet::new(),
            refusals: BTreeMap::new(),
            events_told: BTreeMap::new(),
            backoff: DefaultBackoff::default(),
            pause: None,
            next_sweep: Instant::now(),
            next_doubt: Instant::now(),
            deleted: VecDeque::new(),
            tries: 0,
        }
    }

    /// Runs until `stop`.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), Error> {
        let mut blocks: Option<ObjectWatch<IPBlock>> = None;
        loop {
            if self.learn() {
                let selector = format!("{NODE_LABEL_PREFIX}{}", self.me.uid);
                blocks = Some(ObjectWatch::labelled(self.api.clone(), &selector));
                self.objects = None;
                self.confirm();
            }
            let Some(wake) = stop.run_until_cancelled(self.turn()).await else { return Ok(()) };
            let ipam = Arc::clone(&self.ipam);
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                changed = self.networks.changed() => if changed.is_err() { return Ok(()) },
                seen = next(&mut blocks) => self.see(seen),
                (name, seen) = answers(&mut self.lenders) => self.see_lender(&name, seen),
                () = ipam.wake.notified() => if !ipam.is_wanted() { sleep(BURST).await },
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
        let begun = Instant::now();
        while begun.elapsed() < BURST {
            tokio::select! {
                seen = next(blocks) => self.see(seen),
                (name, seen) = answers(&mut self.lenders) => self.see_lender(&name, seen),
                () = sleep(RIGHT_BEHIND) => return,
            }
        }
    }

    /// Takes over what the rest of the daemon knows; says whether this node is another one than before.
    fn learn(&mut self) -> bool {
        let networks = Arc::clone(&self.networks.borrow_and_update());
        if networks.synced {
            let views = networks.by_name.values();
            self.rules = views.filter_map(|view| Some((view.uid.clone(), view.ipam.clone()?))).collect();
            self.known.retain(|uid, _| self.rules.contains_key(uid));
            self.lists.retain(|uid, _| self.rules.contains_key(uid));
            self.earlier.retain(|uid| self.rules.contains_key(uid));
            self.events_told.retain(|uid, _| self.rules.contains_key(uid));
        }
        if networks.node.is_none() && self.objects.is_some() {
            warn!("this node has no Node any more: no address is handed out until it has one");
            self.me.uid.clear();
            self.objects = None;
            self.confirm();
        }
        match &networks.node {
            Some(node) if networks.synced && *node != self.me => {
                self.me = node.clone();
                true
            }
            _ => false,
        }
    }

    fn see(&mut self, seen: ObjectEvent<IPBlock>) {
        match seen {
            ObjectEvent::Synced(all) => {
                let all = all.into_iter().filter_map(read);
                self.objects = Some(all.filter(|(_, one)| !self.deleted.contains(&one.uid)).collect());
                self.pause = None;
                self.confirm();
                self.ipam.hear(Contact::Now);
            }
            ObjectEvent::Changed(one) => {
                self.insert(one);
                self.ipam.hear(Contact::Now);
            }
            ObjectEvent::Deleted(one) => {
                let (name, uid) = (one.name_any(), one.uid());
                if let Some(objects) = &mut self.objects
                    && objects.get(&name).map(|object| &object.uid) == uid.as_ref()
                {
                    objects.remove(&name);
                    self.confirm();
                }
                self.ipam.hear(Contact::Now);
            }
            ObjectEvent::Failed(error) => {
                debug!(error = %Chain(&error), "the watch of address blocks broke and is tried again");
                self.ipam.hear(Contact::LostAt(std::time::Instant::now()));
            }
        }
    }

    fn see_lender(&mut self, name: &str, seen: ObjectEvent<IPBlock>) {
        let Some(lender) = self.lenders.get_mut(name) else { return };
        let now = match seen {
            ObjectEvent::Synced(all) => all.into_iter().next(),
            ObjectEvent::Changed(one) => {
                lender.heard = Some(Instant::now());
                Some(one)
            }
            ObjectEvent::Deleted(_) => None,
            ObjectEvent::Failed(_) => return,
        };
        (lender.read, lender.seen) = (true, now.and_then(read).map(|(_, object)| object));
    }

    /// Does what is due, and says when to come back unless something happens before.
    async fn turn(&mut self) -> Instant {
        let now = Instant::now();
        if self.objects.is_none() {
            if self.me.uid.is_empty() {
                self.excuse(None, "the node has no Node object at the API server");
            }
            return now + self.pace.sweep;
        }
        if let Some(until) = self.pause.filter(|until| *until > now) {
            return until;
        }
        if now >= self.next_sweep {
            self.next_sweep = now + self.pace.sweep;
            self.sweep().await;
        }
        match self.work().await {
            Ok(()) => {
                self.backoff.reset();
                self.pause = None;
            }
            Err(error) => {
                let wait = self.backoff.next().unwrap_or(DEADLINE);
                let problem = Chain(&error).to_string();
                warn!(error = problem, ?wait, "address blocks cannot be kept, trying again");
                self.pause = Some(Instant::now() + wait);
                self.excuse(None, &problem);
            }
        }
        self.wake(now)
    }

    /// Tells whoever waits, for this network or for any, that the API server is the reason.
    fn excuse(&self, of: Option<&str>, problem: &str) {
        let wants: Vec<Want> = self.ipam.lock().wants.keys().cloned().collect();
        for want in wants {
            let (Want::Any(network, _) | Want::Address(network, _)) = &want;
            if of.is_some_and(|of| of != network) {
                continue;
            }
            let name = self.rules.get(network).map_or("", |rules| &rules.name);
            let why = format!("no address block of network {name:?} can be taken now: {problem}");
            self.ipam.answer(want, why);
        }
    }

    /// Does not ask for a while for what the API server refuses.
    fn leave(&mut self, network: String, plea: Plea, error: &Failure) {
        let now = Instant::now();
        let begin = || Refusal { until: now, backoff: DefaultBackoff::default(), problem: String::new() };
        let problem = Chain(error).to_string();
        let one = self.refusals.entry((network.clone(), plea)).or_insert_with(begin);
        let wait = one.backoff.next().unwrap_or(DEADLINE).min(DEADLINE);
        one.until = now + wait;
        one.problem.clone_from(&problem);
        warn!(
            network,
            ?plea,
            error = problem,
            ?wait,
            "the API server refuses what a network needs, trying again"
        );
        if plea == Plea::Take {
            self.excuse(Some(&network), &problem);
        }
    }

    /// Whether a step is not to be tried yet; those who wait for it are told why.
    fn is_left(&self, step: &Step, now: Instant) -> bool {
        let Some((network, plea)) = step.plea() else { return false };
        let refusal = self.refusals.get(&(network.to_owned(), plea));
        let Some(refusal) = refusal.filter(|one| one.until > now) else { return false };
        if plea == Plea::Take {
            self.excuse(Some(network), &refusal.problem);
        }
        true
    }

    /// When something is due although nothing happens. What became due since this turn began may not have been seen in it.
    fn wake(&self, begun: Instant) -> Instant {
        let single = |block: &Block| if block.is_single() { self.pace.idle_address } else { self.pace.idle };
        let idle = self.idle.iter().map(|(block, since)| *since + single(block));
        let told = self.told.values().map(|at| *at + self.pace.tell);
        let asked = self.asked.values().flat_map(|at| [*at + SILENT, *at + BUSY]);
        let heard = self.lenders.values().filter_map(|lender| Some(lender.heard? + SILENT));
        let doubt = (!self.witnesses.is_empty()).then_some(self.next_doubt);
        let lent = self.lent_seen.values().map(|at| *at + LENT.min(self.pace.sweep));
        let uncertain = self.uncertain.values().map(|at| *at + UNCERTAIN);
        let crowded = self.crowded.values().map(|one| one.until);
        let refused = self.refusals.values().map(|one| one.until);
        let due = idle
            .chain(told)
            .chain(crowded)
            .chain(refused)
            .chain(asked)
            .chain(heard)
            .chain(doubt)
            .chain(lent)
            .chain(uncertain)
            .filter(|at| *at > begun)
            .chain(self.pause);
        due.chain([self.next_sweep]).min().unwrap_or(begun + self.pace.sweep)
    }

    async fn work(&mut self) -> Result<(), Failure> {
        if !self.ipam.look(Ledger::is_sure) {
            self.reclaim().await?;
        }
        for _ in 0..TRIES {
            self.tidy().await;
            let (mut steps, now) = (self.plan()?, Instant::now());
            steps.retain(|step| !self.is_left(step, now));
            if steps.is_empty() {
                return Ok(());
            }
            // One that fails stands in no other's way.
            let (mut waits, mut problem) = (true, None);
            for step in steps {
                let plea = step.plea().map(|(network, plea)| (network.to_owned(), plea));
                match (self.apply(step).await, plea) {
                    (Ok(done), _) => waits &= !done,
                    (Err(error), Some((network, plea))) if error.is_refusal() => {
                        self.leave(network, plea, &error);
                    }
                    (Err(error), _) => problem = problem.or(Some(error)),
                }
            }
            if let Some(problem) = problem {
                return Err(problem);
            }
            // Somebody else has to do something first.
            if waits {
                return Ok(());
            }
        }
        Ok(())
    }

    fn plan(&mut self) -> Result<Vec<Step>, JournalError> {
        let Some(objects) = &self.objects else { return Ok(Vec::new()) };
        let now = Instant::now();
        let single = |block: &Block| if block.is_single() { self.pace.idle_address } else { self.pace.idle };
        let idle: BTreeSet<Block> = self
            .idle
            .iter()
            .filter(|(block, since)| **since + single(block) <= now)
            .map(|(block, _)| block.clone())
            .collect();
        let told = self.told.keys().cloned().collect();
        let full = self.full.keys().cloned().collect();
        let asked = self.ipam.look(|ledger| {
            let asked = ledger.holdings().iter().filter(|(_, one)| one.stage == Stage::Asked);
            asked.map(|(block, one)| (block.clone(), one.network.clone())).collect::<Vec<_>>()
        });
        let around = asked.into_iter().filter_map(|(block, network)| {
            let lender = self.lenders.get(&self.around(&block, &network)?)?;
            lender.read.then(|| (block, lender.seen.clone()))
        });
        let lenders = around.collect();
        let wants = Wants::default();
        let view = View {
            me: &self.me,
            networks: &self.rules,
            objects,
            lenders: &lenders,
            wants: &wants,
            full: &full,
            idle: &idle,
            told: &told,
            returned: &self.returned,
        };
        self.ipam.plan(view)
    }

    /// The name of the block around a single address.
    fn around(&self, block: &Block, network: &str) -> Option<String> {
        let space = self.rules.get(&block.network)?.space(Family::of(block.range.addr()))?;
        let around = space.block_of(block.range.addr()).filter(|_| block.is_single())?;
        (around != block.range).then(|| ipblock::name(network, around))
    }

    /// Does a step, and says whether anything came of it.
    async fn apply(&mut self, step: Step) -> Result<bool, Failure> {
        match step {
            Step::Note(record) => self.ipam.note(record)?,
            Step::Find(block) => return self.find(block).await,
            Step::FindLent { block, address, object } => {
                return self.find_lent(block, address, &object).await;
            }
            Step::Delete { block, object } => self.delete(block, &object).await?,
            Step::Tell { block, object, status } => self.tell(block, &object, status).await?,
            Step::Take { network, family, missing } => return self.take(&network, family, missing).await,
            Step::TakeAddress { network, address } => return self.take_address(&network, address).await,
        }
        Ok(true)
    }

    fn insert(&mut self, block: IPBlock) {
        if let (Some(objects), Some((name, object))) = (&mut self.objects, read(block))
            && !self.deleted.contains(&object.uid)
        {
            objects.insert(name, object);
            self.confirm();
        }
    }

    /// Nothing is handed out of a block that is not there as it was.
    fn confirm(&self) {
        let all = self.objects.iter().flatten();
        let ours = all.filter(|(_, one)| one.spec.holder.uid == self.me.uid && !self.me.uid.is_empty());
        self.ipam.confirm(ours.map(|(name, one)| (name.clone(), one.uid.clone())).collect());
    }

    /// Frees what sandboxes had that are gone.
    async fn sweep(&mut self) {
        // What is made while the runtime answers cannot be in its answer.
        let begun = uptime();
        let live = match (self.sandboxes)().await {
            Ok(live) => live,
            Err(problem) => {
                return debug!(problem, "the runtime does not say which sandboxes there are");
            }
        };
        let young = i64::try_from(self.pace.young.as_secs()).unwrap_or(i64::MAX);
        if let Err(error) = self.ipam.sweep(&live, begun.saturating_sub(young)) {
            warn!(%error, "leftovers of sandboxes cannot be freed yet");
        }
    }
}

/// The next word about the blocks of this node, once it is known which node it is.
async fn next(blocks: &mut Option<ObjectWatch<IPBlock>>) -> ObjectEvent<IPBlock> {
    match blocks {
        Some(watch) => watch.next().await,
        None => pending().await,
    }
}

/// The next word about a block that an address is asked of.
async fn answers(lenders: &mut BTreeMap<String, Lender>) -> (String, ObjectEvent<IPBlock>) {
    if lenders.is_empty() {
        return pending().await;
    }
    let next = lenders.iter_mut().map(|(name, lender)| {
        async move {
            let seen = lender.watch.next().await;
            (name.clone(), seen)
        }
        .boxed()
    });
    select_all(next).await.0
}

async fn call<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, Failure> {
    Ok(timeout(DEADLINE, request).await.map_err(|_| Failure::Deadline)??)
}

fn read(block: IPBlock) -> Option<(String, Object)> {
    let name = block.name_any();
    let uid = block.metadata.uid?;
    Some((name, Object { uid, spec: block.spec, status: block.status.unwrap_or_default() }))
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn a_no_is_a_refusal_and_anything_else_may_still_be_done() {
        let answered =
            |code| Failure::Refused(kube::Error::Api(Box::new(Status { code, ..Status::default() })));
        for code in [400, 403, 404, 405, 413, 422] {
            assert!(answered(code).is_refusal(), "{code}");
        }
        for code in [401, 408, 409, 410, 429, 500, 503, 504] {
            assert!(!answered(code).is_refusal(), "{code}");
        }
        assert!(!Failure::Deadline.is_refusal());
    }
}
