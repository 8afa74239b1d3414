//! Keeps enough blocks for the pods of this node, and gives back what it does not need.
//!
//! Decides little: `plan::ipam` says what to do. Here it is done: blocks are created, looked for, deleted and told about,
//! one request after the other.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use api::{
    Chain, IPBlock, IPBlockSpec, IPBlockStatus, NODE_MANAGER,
    digest::digest,
    ipblock::{self, BORROWED_LABEL, HOLDS, Holder, LENDS, NETWORK_LABEL, NODE_LABEL_PREFIX},
};
use futures::future::{BoxFuture, FutureExt as _, pending, select_all};
use ipnet::IpNet;
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions},
    runtime::{utils::Backoff as _, watcher::DefaultBackoff},
};
use plan::ipam::{Block, Family, Holding, Object, Record, Rules, Space, Stage, Step, View, Wants, candidate};
use serde_json::json;
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{Contact, Ipam, JournalError, Want, uptime};
use crate::{
    Error,
    cni::Networks,
    event::{Events, Reason},
    watch::{Seen, Watch},
};

/// How long the API server may take to answer.
const DEADLINE: Duration = Duration::from_secs(10);
/// Changes come in bursts: so long is waited for the rest of one, unless a pod waits.
const BURST: Duration = Duration::from_millis(50);
/// How often a block or an address is asked for before the rest is left to the next turn.
const TRIES: usize = 64;
/// How many changes are taken in at once.
const AT_ONCE: usize = 1024;
/// How long the holder of a block may take to answer whether it lends an address.
const SILENT: Duration = Duration::from_secs(3);
/// How long a request that had no answer may still be carried out.
const UNCERTAIN: Duration = Duration::from_secs(90);
/// How often it is looked whether an address is still lent that nobody tells of.
const LENT: Duration = Duration::from_secs(60);
/// How long a holder that did not answer is left in peace.
const SHUNNED: Duration = Duration::from_secs(60);
/// How long a list of blocks is good enough to choose from.
const LISTED: Duration = Duration::from_secs(1);
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
            idle_address: Duration::from_secs(30),
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
    /// Holders that did not answer, by their UID, until when that is believed.
    silent: BTreeMap<String, (String, Instant)>,
    /// Networks, by their UID, whose name an earlier one has blocks of.
    earlier: BTreeSet<String>,
    /// What was listed a moment ago, by the network's UID.
    lists: BTreeMap<String, (Instant, Vec<Object>)>,
    /// The sandboxes that were there when a block became doubtful.
    witnesses: BTreeMap<Block, BTreeSet<String>>,
    events_told: BTreeMap<String, Instant>,
    backoff: DefaultBackoff,
    pause: Option<Instant>,
    next_sweep: Instant,
    next_doubt: Instant,
    /// The UIDs of objects that were deleted: word of them can still be under way.
    deleted: VecDeque<String>,
    tries: u64,
}

struct Lender {
    watch: Watch<IPBlock>,
    /// Whether it has been read.
    read: bool,
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
            silent: BTreeMap::new(),
            earlier: BTreeSet::new(),
            lists: BTreeMap::new(),
            witnesses: BTreeMap::new(),
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
        let mut blocks: Option<Watch<IPBlock>> = None;
        loop {
            if self.learn() {
                let selector = format!("{NODE_LABEL_PREFIX}{}", self.me.uid);
                blocks = Some(Watch::labelled(self.api.clone(), &selector));
                self.objects = None;
                self.confirm();
            }
            let Some(wake) = stop.run_until_cancelled(self.turn()).await else { return Ok(()) };
            let ipam = Arc::clone(&self.ipam);
            let seen = async {
                match &mut blocks {
                    Some(watch) => watch.next().await,
                    None => pending().await,
                }
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                changed = self.networks.changed() => if changed.is_err() { return Ok(()) },
                seen = seen => self.see(seen),
                (name, seen) = answers(&mut self.lenders) => self.see_lender(&name, seen),
                () = ipam.wake.notified() => if !ipam.is_wanted() { sleep(BURST).await },
                () = sleep_until(wake) => {}
            }
            self.catch_up(blocks.as_mut());
        }
    }

    /// Takes in what else has been seen by now, so that all who ask are answered with one word.
    fn catch_up(&mut self, blocks: Option<&mut Watch<IPBlock>>) {
        if let Some(watch) = blocks {
            for _ in 0..AT_ONCE {
                let Some(seen) = watch.next().now_or_never() else { break };
                self.see(seen);
            }
        }
        for _ in 0..AT_ONCE {
            let Some((name, seen)) = answers(&mut self.lenders).now_or_never() else { break };
            self.see_lender(&name, seen);
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

    fn see(&mut self, seen: Seen<IPBlock>) {
        match seen {
            Seen::Synced(all) => {
                let all = all.into_iter().filter_map(read);
                self.objects = Some(all.filter(|(_, one)| !self.deleted.contains(&one.uid)).collect());
                self.pause = None;
                self.confirm();
                self.ipam.hear(Contact::Now);
            }
            Seen::Changed(one) => {
                self.insert(one);
                self.ipam.hear(Contact::Now);
            }
            Seen::Gone(one) => {
                let (name, uid) = (one.name_any(), one.uid());
                if let Some(objects) = &mut self.objects
                    && objects.get(&name).map(|object| &object.uid) == uid.as_ref()
                {
                    objects.remove(&name);
                    self.confirm();
                }
                self.ipam.hear(Contact::Now);
            }
            Seen::Failed(error) => {
                debug!(error = %Chain(&error), "the watch of address blocks broke and is tried again");
                self.ipam.hear(Contact::LostAt(std::time::Instant::now()));
            }
        }
    }

    fn see_lender(&mut self, name: &str, seen: Seen<IPBlock>) {
        let Some(lender) = self.lenders.get_mut(name) else { return };
        let now = match seen {
            Seen::Synced(all) => all.into_iter().next(),
            Seen::Changed(one) => Some(one),
            Seen::Gone(_) => None,
            Seen::Failed(_) => return,
        };
        (lender.read, lender.seen) = (true, now.and_then(read).map(|(_, object)| object));
    }

    /// Does what is due, and says when to come back unless something happens before.
    async fn turn(&mut self) -> Instant {
        let now = Instant::now();
        if self.objects.is_none() {
            if self.me.uid.is_empty() {
                self.excuse("the node has no Node object at the API server");
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
                self.excuse(&problem);
            }
        }
        self.wake()
    }

    /// Tells whoever waits that the API server is the reason.
    fn excuse(&self, problem: &str) {
        let wants: Vec<Want> = self.ipam.lock().wants.keys().cloned().collect();
        for want in wants {
            let network = match &want {
                Want::Any(network, _) | Want::Address(network, _) => self.rules.get(network),
            };
            let name = network.map_or("", |rules| &rules.name);
            self.ipam
                .answer(want, format!("no address block of network {name:?} can be taken now: {problem}"));
        }
    }

    /// When something is due although nothing happens.
    fn wake(&self) -> Instant {
        let now = Instant::now();
        let single = |block: &Block| if block.is_single() { self.pace.idle_address } else { self.pace.idle };
        let idle = self.idle.iter().map(|(block, since)| *since + single(block));
        let told = self.told.values().map(|at| *at + self.pace.tell);
        let asked = self.asked.values().map(|at| *at + SILENT);
        let doubt = (!self.witnesses.is_empty()).then_some(self.next_doubt);
        let lent = self.lent_seen.values().map(|at| *at + LENT.min(self.pace.sweep));
        let uncertain = self.uncertain.values().map(|at| *at + UNCERTAIN);
        let due = idle
            .chain(told)
            .chain(asked)
            .chain(doubt)
            .chain(lent)
            .chain(uncertain)
            .filter(|at| *at > now)
            .chain(self.pause);
        due.chain([self.next_sweep]).min().unwrap_or(now + self.pace.sweep)
    }

    async fn work(&mut self) -> Result<(), Failure> {
        for _ in 0..TRIES {
            self.tidy().await;
            let steps = self.plan()?;
            if steps.is_empty() {
                return Ok(());
            }
            // One that fails stands in no other's way.
            let (mut waits, mut problem) = (true, None);
            for step in steps {
                match self.apply(step).await {
                    Ok(done) => waits &= !done,
                    Err(error) => problem = problem.or(Some(error)),
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
            whole: false,
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

    /// Forgets what is past, and notes since when blocks are empty.
    async fn tidy(&mut self) {
        let now = Instant::now();
        self.full.retain(|_, until| *until > now);
        self.refused.retain(|_, until| *until > now);
        self.silent.retain(|_, (_, until)| *until > now);
        self.uncertain.retain(|_, at| *at + UNCERTAIN > now);
        let pace = self.pace.tell;
        self.told.retain(|_, at| *at + pace > now);
        let (mut empty, mut asked, mut doubtful) = (BTreeSet::new(), BTreeMap::new(), Vec::new());
        self.ipam.look(|ledger| {
            for (block, holding) in ledger.holdings() {
                match holding.stage {
                    Stage::Open if ledger.is_empty(block) => _ = empty.insert(block.clone()),
                    Stage::Doubtful => doubtful.push((block.clone(), ledger.is_empty(block))),
                    Stage::Asked => _ = asked.insert(block.clone(), holding.network.clone()),
                    _ => {}
                }
            }
        });
        self.believe(doubtful, &mut empty).await;
        self.idle.retain(|block, _| empty.contains(block));
        for block in empty {
            self.idle.entry(block).or_insert(now);
        }
        self.asked.retain(|block, _| asked.contains_key(block));
        let names: BTreeSet<String> =
            asked.iter().filter_map(|(block, network)| self.around(block, network)).collect();
        self.lenders.retain(|name, _| names.contains(name));
        for name in names {
            let watch = || Lender { watch: Watch::one(self.api.clone(), &name), read: false, seen: None };
            self.lenders.entry(name.clone()).or_insert_with(watch);
        }
        self.judge(asked, now);
    }

    /// Doubtful blocks can go once no sandbox is left that was there when they became so.
    async fn believe(&mut self, doubtful: Vec<(Block, bool)>, empty: &mut BTreeSet<Block>) {
        self.witnesses.retain(|block, _| doubtful.iter().any(|(one, _)| one == block));
        if doubtful.is_empty() {
            return;
        }
        let now = Instant::now();
        if now < self.next_doubt {
            let gone = doubtful.iter().filter(|(block, empty)| *empty && self.idle.contains_key(block));
            empty.extend(gone.map(|(block, _)| block.clone()));
            return;
        }
        self.next_doubt = now + DOUBT.min(self.pace.sweep);
        let Ok(live) = (self.sandboxes)().await else { return };
        for (block, is_empty) in doubtful {
            let witnesses = self.witnesses.entry(block.clone()).or_insert_with(|| live.clone());
            if is_empty && witnesses.is_disjoint(&live) {
                empty.insert(block);
            }
        }
    }

    /// Answers to what was asked of other nodes.
    fn judge(&mut self, asked: BTreeMap<Block, String>, now: Instant) {
        for (block, network) in asked {
            let Some(lender) = self.around(&block, &network).and_then(|name| self.lenders.get(&name)) else {
                continue;
            };
            let since = *self.asked.entry(block.clone()).or_insert(now);
            let object = self.objects.as_ref().and_then(|all| all.get(&ipblock::name(&network, block.range)));
            let (Some(object), Some(around)) = (object, &lender.seen) else { continue };
            let address = block.range.addr();
            let granted = around.status.lent.iter().any(|lent| lent.block == object.uid);
            let refused = around.status.refused.contains(&object.uid);
            let silent = !granted && since + SILENT <= now;
            if !refused && !silent {
                continue;
            }
            let node = &around.spec.holder.node;
            let why = if refused {
                format!("address {address} of network {network:?} is in use on node {node}")
            } else {
                format!(
                    "node {node} holds the block of address {address} of network {network:?} and does not answer: \
                    is it up? If it is gone for good, delete its Node"
                )
            };
            let believed = if refused { IN_VAIN } else { SILENT };
            self.refused.insert((block.network.clone(), address), now + believed);
            self.ipam.answer(Want::Address(block.network.clone(), address), why.clone());
            if silent {
                let holder = around.spec.holder.clone();
                self.silent.insert(holder.uid, (holder.node, now + SHUNNED));
                if let Err(error) = self.ipam.note(Record::Closing { block }) {
                    warn!(error = %Chain(&error), "an address that nobody lends is still asked for");
                }
            }
        }
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

    /// Finds out what became of a block that is not seen: it may be of a Node of the same name that was deleted.
    async fn find(&mut self, block: Block) -> Result<bool, Failure> {
        let Some(holding) = self.ipam.look(|ledger| ledger.holdings().get(&block).cloned()) else {
            return Ok(false);
        };
        let name = ipblock::name(&holding.network, block.range);
        let found = call(self.api.get_opt(&name)).await?;
        let Some(found) = found else { return self.missing(block, &holding, &name).await };
        self.uncertain.remove(&block);
        let ours = found.spec.network_uid == block.network && found.spec.holder.node == self.me.node;
        if !ours {
            self.ipam.note(Record::Lost { block })?;
            return Ok(true);
        }
        let found = if found.spec.holder.uid == self.me.uid { found } else { self.adopt(&found).await? };
        self.insert(found);
        Ok(true)
    }

    /// What to do about a block whose object is not there.
    async fn missing(&mut self, block: Block, holding: &Holding, name: &str) -> Result<bool, Failure> {
        let now = Instant::now();
        // A create without an answer may still be carried out.
        if self.uncertain.get(&block).is_some_and(|at| *at + UNCERTAIN > now) {
            return Ok(false);
        }
        self.uncertain.remove(&block);
        if self.ipam.look(|ledger| ledger.is_empty(&block)) {
            self.ipam.note(Record::Dropped { block })?;
            return Ok(true);
        }
        self.ipam.note(Record::Lost { block: block.clone() })?;
        if !self.rules.get(&block.network).is_some_and(|rules| rules.live) {
            return Ok(true);
        }
        warn!(block = name, "somebody deleted an address block that is in use: it is made again");
        // A borrowed address is asked for again: its lender may have given it to somebody else.
        let lender = match self.around(&block, &holding.network) {
            Some(around) => match call(self.api.get_opt(&around)).await? {
                Some(around) if around.spec.holder.uid != self.me.uid => Some(around.spec.holder),
                _ => return Ok(true),
            },
            None => None,
        };
        if let Created::Exists = self.create(&block, &holding.network, lender).await? {
            let note = format!(
                "IPBlock {name} was deleted while pods of node {} had its addresses, and is somebody else's by now: \
                addresses may be in use twice; delete these pods",
                self.me.node
            );
            warn!("{note}");
            self.events.tell(&holding.network, &block.network, Reason::AddressesExhausted, note);
        }
        Ok(true)
    }

    /// Whether an address that was lent is back. Its object may bear the mark of an earlier Node of this name only.
    async fn find_lent(&mut self, block: Block, address: IpAddr, object: &str) -> Result<bool, Failure> {
        let key = (block.clone(), address);
        let now = Instant::now();
        if self.lent_seen.get(&key).is_some_and(|at| *at + LENT.min(self.pace.sweep) > now) {
            return Ok(false);
        }
        let Some(network) =
            self.ipam.look(|ledger| ledger.holdings().get(&block).map(|one| one.network.clone()))
        else {
            return Ok(false);
        };
        let found = call(self.api.get_opt(&ipblock::name(&network, address.into()))).await?;
        if found.is_some_and(|found| found.uid().as_deref() == Some(object)) {
            self.lent_seen.insert(key, now);
            return Ok(false);
        }
        self.lent_seen.remove(&key);
        if self.returned.len() > REMEMBERED {
            self.returned.clear();
        }
        self.returned.insert(object.to_owned());
        self.ipam.note(Record::Returned { block, address })?;
        Ok(true)
    }

    /// The Node was deleted and made anew while the machine ran on: its blocks are still its own.
    async fn adopt(&mut self, found: &IPBlock) -> Result<IPBlock, Failure> {
        let mut labels = found.metadata.labels.clone().unwrap_or_default();
        labels.remove(&format!("{NODE_LABEL_PREFIX}{}", found.spec.holder.uid));
        labels.insert(format!("{NODE_LABEL_PREFIX}{}", self.me.uid), HOLDS.to_owned());
        let mut new = found.clone();
        new.metadata.labels = Some(labels);
        new.spec.holder.uid.clone_from(&self.me.uid);
        info!(block = found.name_any(), "the Node is another one than before: its block is taken over");
        let params = PostParams { field_manager: Some(NODE_MANAGER.to_owned()), ..PostParams::default() };
        call(self.api.replace(&found.name_any(), &params, &new)).await
    }

    async fn delete(&mut self, block: Block, object: &str) -> Result<(), Failure> {
        let Some(network) =
            self.ipam.look(|ledger| ledger.holdings().get(&block).map(|one| one.network.clone()))
        else {
            return Ok(());
        };
        let name = ipblock::name(&network, block.range);
        let only = Preconditions { uid: Some(object.to_owned()), resource_version: None };
        let params = DeleteParams::default().preconditions(only);
        match call(self.api.delete(&name, &params)).await {
            Ok(_) => {}
            Err(Failure::Refused(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => {}
            Err(error) => return Err(error),
        }
        info!(block = name, "a block was given back");
        self.deleted.push_back(object.to_owned());
        if self.deleted.len() > REMEMBERED {
            self.deleted.pop_front();
        }
        self.ipam.metrics.given_back.inc();
        if let Some(objects) = &mut self.objects {
            objects.remove(&name);
        }
        self.ipam.note(Record::Dropped { block })?;
        Ok(())
    }

    async fn tell(&mut self, block: Block, object: &str, status: IPBlockStatus) -> Result<(), Failure> {
        let network = self.ipam.look(|ledger| ledger.holdings().get(&block).map(|one| one.network.clone()));
        let name = ipblock::name(&network.unwrap_or_default(), block.range);
        let IPBlockStatus { used, free, spare, lent, refused, closed, draining } = &status;
        let patch = json!({"metadata": {"uid": object}, "status": {
            "used": used, "free": free, "spare": spare, "lent": lent, "refused": refused, "closed": closed,
            "draining": draining,
        }});
        let params = PatchParams { field_manager: Some(NODE_MANAGER.to_owned()), ..PatchParams::default() };
        match call(self.api.patch_status(&name, &params, &Patch::Merge(&patch))).await {
            Ok(told) => self.insert(told),
            // It is gone, or another one: the watch tells.
            Err(Failure::Refused(kube::Error::Api(answer))) if matches!(answer.code, 404 | 409) => {
                if let Some(objects) = &mut self.objects {
                    objects.remove(&name);
                }
            }
            Err(error) => return Err(error),
        }
        self.told.insert(block, Instant::now());
        Ok(())
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

    /// Creates the object of a block. It is in the journal before, so that a crash leaves nothing that nobody knows.
    async fn create(
        &mut self,
        block: &Block,
        network: &str,
        lender: Option<Holder>,
    ) -> Result<Created, Failure> {
        // What is held is not asked for: the answer would be that somebody has it.
        let free = |stage: Option<Stage>| matches!(stage, None | Some(Stage::Lost));
        if !self.ipam.look(|ledger| free(ledger.holdings().get(block).map(|one| one.stage))) {
            return Ok(Created::Exists);
        }
        self.ipam.note(Record::Asked { block: block.clone(), network: network.to_owned() })?;
        let name = ipblock::name(network, block.range);
        let spec = IPBlockSpec {
            network: network.to_owned(),
            network_uid: block.network.clone(),
            cidr: block.range,
            holder: self.me.clone(),
            lender,
        };
        let mut object = IPBlock::new(&name, spec);
        let labels = object.labels_mut();
        labels.insert(NETWORK_LABEL.to_owned(), network.to_owned());
        labels.insert(format!("{NODE_LABEL_PREFIX}{}", self.me.uid), HOLDS.to_owned());
        if let Some(lender) = &object.spec.lender {
            let label = format!("{NODE_LABEL_PREFIX}{}", lender.uid);
            object.labels_mut().insert(label, LENDS.to_owned());
            object.labels_mut().insert(BORROWED_LABEL.to_owned(), "true".to_owned());
        }
        let params = PostParams { field_manager: Some(NODE_MANAGER.to_owned()), ..PostParams::default() };
        match call(self.api.create(&params, &object)).await {
            Ok(made) => {
                info!(block = name, "a block was taken");
                self.insert(made);
                Ok(Created::Ours)
            }
            Err(Failure::Refused(kube::Error::Api(status))) if status.code == 409 => {
                self.ipam.note(Record::Dropped { block: block.clone() })?;
                Ok(Created::Exists)
            }
            // Whether it was made is found out later.
            Err(error) => {
                self.uncertain.insert(block.clone(), Instant::now());
                Err(error)
            }
        }
    }

    /// The blocks of a network, from the API server itself.
    async fn list(&mut self, network: &str, rules: &Rules) -> Result<Vec<Object>, Failure> {
        let now = Instant::now();
        if let Some((_, all)) = self.lists.get(network).filter(|(at, _)| *at + LISTED > now) {
            return Ok(all.clone());
        }
        // Without what is borrowed, which may be a lot: the blocks around it tell.
        let params =
            ListParams::default().labels(&format!("{NETWORK_LABEL}={},!{BORROWED_LABEL}", rules.name));
        let all = call(self.api.list(&params)).await?;
        let all: Vec<Object> = all.items.into_iter().filter_map(read).map(|(_, object)| object).collect();
        // Blocks of a network of this name that is no more take their names too.
        self.known.insert(network.to_owned(), all.iter().map(|object| object.spec.cidr).collect());
        let count = all.len();
        let all: Vec<Object> = all.into_iter().filter(|object| object.spec.network_uid == network).collect();
        if all.len() < count {
            self.earlier.insert(network.to_owned());
        } else {
            self.earlier.remove(network);
        }
        Ok(all)
    }

    async fn take(&mut self, network: &str, family: Family, missing: usize) -> Result<bool, Failure> {
        let Some(rules) = self.rules.get(network).cloned() else { return Ok(false) };
        let Some(space) = rules.space(family) else { return Ok(false) };
        let key = (network.to_owned(), family);
        let waiting = self.ipam.lock().wants.contains_key(&Want::Any(network.to_owned(), family));
        let full = self.full.contains_key(&key);
        if full && !waiting {
            return Ok(false);
        }
        let mut listed = if full { Some(self.list(network, &rules).await?) } else { None };
        for _ in 0..TRIES {
            let Some(range) = self.choose(network, space) else {
                if listed.is_some() {
                    break;
                }
                // What was seen before may have been given back.
                listed = Some(self.list(network, &rules).await?);
                continue;
            };
            let block = Block { network: network.to_owned(), range };
            if let Created::Ours = self.create(&block, &rules.name, None).await? {
                self.ipam.metrics.taken.inc();
                self.tell_soon(block);
                return Ok(true);
            }
            self.known.entry(network.to_owned()).or_default().insert(range);
            if listed.is_none() {
                listed = Some(self.list(network, &rules).await?);
            }
        }
        self.full.insert(key, Instant::now() + BELIEVED);
        debug!(network = rules.name, ?family, "no block is left");
        // Blocks of an earlier network of this name are on their way out: no reason to say that all is used up.
        if waiting && self.earlier.contains(network) {
            self.full.remove(&(network.to_owned(), family));
            self.ipam.answer(Want::Any(network.to_owned(), family), earlier(&rules.name));
            return Ok(false);
        }
        match listed.filter(|_| waiting) {
            Some(listed) => self.borrow(network, &rules, space, listed, missing).await,
            None => Ok(false),
        }
    }

    /// Pods come in bursts: how a new block is used is told after the first of them.
    fn tell_soon(&mut self, block: Block) {
        let now = Instant::now();
        let earlier = self.pace.tell.saturating_sub(FIRST_WORD);
        self.told.insert(block, now.checked_sub(earlier).unwrap_or(now));
    }

    /// A block that is not known to be taken, another one on each node.
    fn choose(&mut self, network: &str, space: &Space) -> Option<IpNet> {
        let known = self.known.get(network);
        let held: BTreeSet<IpNet> =
            self.ipam.look(|ledger| ledger.of_network(network).map(|(block, _)| block.range).collect());
        self.tries += 1;
        let start = digest([self.me.uid.as_str(), network, &self.tries.to_string()]);
        let taken = |range: IpNet| held.contains(&range) || known.is_some_and(|known| known.contains(&range));
        space.free_block(u128::from(start), taken)
    }

    async fn borrow(
        &mut self,
        network: &str,
        rules: &Rules,
        space: &Space,
        listed: Vec<Object>,
        missing: usize,
    ) -> Result<bool, Failure> {
        let family = space.family();
        let mut asked = 0;
        for _ in 0..TRIES {
            if asked >= missing {
                break;
            }
            let refused =
                self.refused.keys().filter(|(uid, _)| uid == network).map(|(_, address)| *address).collect();
            self.tries += 1;
            let seed = digest([self.me.uid.as_str(), network, &self.tries.to_string()]);
            let silent = self.silent.keys().cloned().collect();
            let found = candidate(&listed, space, &self.me, &refused, &silent, seed);
            let Some((address, around)) = found else { break };
            let block = Block { network: network.to_owned(), range: address.into() };
            // Tried once only, whatever comes of it: what the list says of it is old by then.
            self.refused.insert((network.to_owned(), address), Instant::now() + IN_VAIN);
            if let Created::Ours = self.create(&block, &rules.name, Some(around.spec.holder)).await? {
                self.ipam.metrics.borrowed.inc();
                self.tell_soon(block.clone());
                self.asked.insert(block, Instant::now());
                asked += 1;
            }
        }
        let coming = |block: &Block, stage| stage == Stage::Asked && Family::of(block.range.addr()) == family;
        let coming =
            self.ipam.look(|ledger| ledger.of_network(network).any(|(block, one)| coming(block, one.stage)));
        if !coming {
            // Others who come for an address in the same moment need no list of their own.
            let now = Instant::now();
            let listing = self.lists.entry(network.to_owned()).or_insert((now, Vec::new()));
            if listing.0 + LISTED <= now || listing.0 == now {
                *listing = (now, listed);
            }
            self.exhausted(network, rules, family);
        }
        Ok(asked > 0)
    }

    fn exhausted(&mut self, network: &str, rules: &Rules, family: Family) {
        let which = match family {
            Family::V4 => "IPv4",
            Family::V6 => "IPv6",
        };
        let mut why = format!(
            "network {:?} has no free {which} address left: add a subnet to spec.ipam.subnets of the BridgeNetwork, or \
            delete pods that use it",
            rules.name
        );
        if let Some((node, _)) = self.silent.values().next() {
            why = format!(
                "{why}; node {node} may have some and does not answer: is it up? If it is gone for good, delete its Node"
            );
        }
        self.ipam.metrics.exhausted.inc();
        let now = Instant::now();
        let last = self.events_told.get(network);
        if last.is_none_or(|last| *last + BETWEEN_EVENTS <= now) {
            self.events_told.insert(network.to_owned(), now);
            self.events.tell(&rules.name, network, Reason::AddressesExhausted, why.clone());
        }
        self.ipam.answer(Want::Any(network.to_owned(), family), why);
    }

    async fn take_address(&mut self, network: &str, address: IpAddr) -> Result<bool, Failure> {
        let Some(rules) = self.rules.get(network).cloned() else { return Ok(false) };
        let space = rules.space(Family::of(address));
        let Some(range) = space.and_then(|space| space.block_of(address)) else { return Ok(false) };
        let block = Block { network: network.to_owned(), range };
        let held = self.ipam.look(|ledger| Some(ledger.holding_of(network, address)?.1.stage));
        if let Some(stage @ (Stage::Doubtful | Stage::Lost)) = held {
            let state =
                if stage == Stage::Lost { "was taken from this node" } else { "is not known in full" };
            let why = format!(
                "address {address} of network {:?} lies in a block of this node that {state}, so it may be in use: ask \
                for another",
                rules.name
            );
            self.ipam.answer(Want::Address(network.to_owned(), address), why);
            return Ok(false);
        }
        let whole = self.ipam.look(|ledger| ledger.holdings().contains_key(&block));
        if !whole && let Created::Ours = self.create(&block, &rules.name, None).await? {
            self.ipam.metrics.taken.inc();
            self.tell_soon(block);
            return Ok(true);
        }
        let single = Block { network: network.to_owned(), range: address.into() };
        let around = call(self.api.get_opt(&ipblock::name(&rules.name, range))).await?;
        if around.as_ref().is_some_and(|around| around.spec.network_uid != network) {
            let want = Want::Address(network.to_owned(), address);
            self.ipam.answer(want, earlier(&rules.name));
            return Ok(false);
        }
        let holder = around.map(|around| around.spec.holder);
        let in_vain = self.refused.contains_key(&(network.to_owned(), address));
        let want = Want::Address(network.to_owned(), address);
        if single == block || in_vain || whole {
            let node =
                holder.map_or_else(|| "another node".to_owned(), |holder| format!("node {}", holder.node));
            self.ipam
                .answer(want, format!("address {address} of network {:?} belongs to {node}", rules.name));
            return Ok(false);
        }
        // It has just gone: looked at again.
        let Some(holder) = holder else { return Ok(true) };
        if let Created::Ours = self.create(&single, &rules.name, Some(holder)).await? {
            self.ipam.metrics.borrowed.inc();
            self.tell_soon(single.clone());
            self.asked.insert(single, Instant::now());
            return Ok(true);
        }
        let found = call(self.api.get_opt(&ipblock::name(&rules.name, single.range))).await?;
        let node = found.map_or_else(String::new, |found| format!(" node {}", found.spec.holder.node));
        self.ipam.answer(want, format!("address {address} of network {:?} is lent to{node}", rules.name));
        Ok(false)
    }

    /// Frees what sandboxes had that are gone.
    async fn sweep(&mut self) {
        let live = match (self.sandboxes)().await {
            Ok(live) => live,
            Err(problem) => {
                return debug!(problem, "the runtime does not say which sandboxes there are");
            }
        };
        let young = i64::try_from(self.pace.young.as_secs()).unwrap_or(i64::MAX);
        if let Err(error) = self.ipam.sweep(&live, uptime().saturating_sub(young)) {
            warn!(%error, "leftovers of sandboxes cannot be freed yet");
        }
    }
}

fn earlier(network: &str) -> String {
    format!("address blocks of an earlier network {network:?} are still being freed: tried again")
}

/// The next word about a block that an address is asked of.
async fn answers(lenders: &mut BTreeMap<String, Lender>) -> (String, Seen<IPBlock>) {
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
