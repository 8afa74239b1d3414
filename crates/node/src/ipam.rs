//! The addresses of this node: hands them out, takes them back, and keeps on disk who has which.
//!
//! A pod is answered out of the blocks that the node holds, without asking anybody. [`Keeper`] sees to it that there are
//! enough of them.

mod journal;
mod keeper;
mod metrics;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use api::ErrorChain;
use ipnet::IpNet;
use nix::time::{ClockId, clock_gettime};
use plan::ipam::{
    Ask, Block, Family, Grant, Holding, Lack, Lease, Ledger, Place, Record, Refusal, Rules, Step, View,
    Wants, keep,
};
use tokio::sync::Notify;
use tracing::{info, warn};
use wire::cni::{Code, Error};

use self::journal::Journal;
pub use self::{
    journal::Error as JournalError,
    keeper::{Keeper, Pace, Sandboxes},
    metrics::Metrics,
};

/// How long a node goes on with what it holds after it has lost the API server. A watch can have been dead for two minutes
/// and a half before that is noticed, and after five minutes nothing new may be handed out.
const CUT_OFF: Duration = Duration::from_secs(5 * 60 - 150);
/// How often somebody who waits looks whether the one is still there for whom.
const GLANCE: Duration = Duration::from_millis(500);
/// How often what follows from records is looked for at once.
const ROUNDS: usize = 64;

/// What pods wait for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Want {
    Any(String, Family),
    Address(String, IpAddr),
}

/// How long an interface waits for addresses, and for whom.
pub struct Wait<'a> {
    pub deadline: Instant,
    /// Fails once nobody is there who would get the answer.
    pub is_there: &'a dyn Fn() -> Result<(), Error>,
}

/// The addresses of a node.
pub struct Ipam {
    state: Mutex<State>,
    /// Something that pods wait for may be there.
    changed: Condvar,
    /// The keeper has something to do.
    wake: Notify,
    boot: String,
    metrics: Metrics,
}

struct State {
    ledger: Ledger,
    journal: Journal,
    /// How many pods wait for what.
    wants: BTreeMap<Want, usize>,
    /// Why there is nothing, for those who wait.
    answers: BTreeMap<Want, String>,
    contact: Contact,
    /// The UIDs of this node's blocks that the API server is known to have, by their name.
    seen: BTreeMap<String, String>,
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
            Self::LostAt(at) => at.elapsed() < CUT_OFF,
        }
    }
}

impl Ipam {
    /// Reads what earlier runs kept, and frees what pods had before the node was started anew. Waits for the disk.
    pub fn open(state_dir: &Path, boot: &str, metrics: Metrics) -> Result<Self, JournalError> {
        let (journal, ledger) = Journal::open(state_dir)?;
        let state = State {
            ledger,
            journal,
            wants: BTreeMap::new(),
            answers: BTreeMap::new(),
            contact: Contact::Never,
            seen: BTreeMap::new(),
        };
        let ipam = Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            wake: Notify::new(),
            boot: boot.to_owned(),
            metrics,
        };
        let mut state = ipam.lock();
        let mut dead: Vec<Record> =
            state.ledger.of_other_boots(boot).into_iter().map(Record::Freed).collect();
        if !boot.is_empty() && state.ledger.boot() != boot {
            if !state.ledger.boot().is_empty() {
                info!(count = dead.len(), "the node was started: addresses of its former sandboxes are free");
            }
            dead.push(Record::Booted(boot.to_owned()));
        }
        if !dead.is_empty() {
            state.keep(&dead)?;
        }
        ipam.count(&state);
        drop(state);
        Ok(ipam)
    }

    pub fn boot(&self) -> &str {
        &self.boot
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives an interface its addresses on behalf of somebody who stays until the deadline.
    pub fn add(
        &self,
        rules: &Rules,
        lease: Lease,
        requested: &[IpAddr],
        deadline: Instant,
    ) -> Result<Lease, Error> {
        let requested: Vec<IpNet> = requested.iter().copied().map(IpNet::from).collect();
        let wait = Wait { deadline, is_there: &|| Ok(()) };
        self.give(rules, lease, &requested, &wait).map(|grant| grant.lease)
    }

    /// Gives an interface its addresses; they are on disk when this returns. Waits until there are some, or the deadline.
    /// Nothing is taken for somebody who has gone.
    pub fn give(
        &self,
        rules: &Rules,
        lease: Lease,
        requested: &[IpNet],
        wait: &Wait<'_>,
    ) -> Result<Grant, Error> {
        let (network, deadline) = (lease.network.clone(), wait.deadline);
        let mut waiting: BTreeSet<Want> = BTreeSet::new();
        let mut state = self.lock();
        let outcome = loop {
            // Here every wait ends, and whatever is written is written in this round.
            if let Err(gone) = (wait.is_there)() {
                break Err(gone);
            }
            let ask = Ask { lease: lease.clone(), spaces: &rules.spaces, seen: &state.seen, requested };
            let lack = match state.ledger.offer(ask) {
                Ok(offer) if state.ledger.leases().get(&offer.lease.place) == Some(&offer.lease) => {
                    break Ok(offer);
                }
                // A daemon that has just been started hears of the API server in a moment.
                Ok(_) if !state.contact.is_fresh() => {
                    let rest = deadline.checked_duration_since(Instant::now());
                    let Some(rest) = rest.filter(|_| matches!(state.contact, Contact::Never)) else {
                        break Err(cut_off(state.contact));
                    };
                    state = self.wait(state, rest);
                    continue;
                }
                Ok(offer) => {
                    break match state.keep(&[Record::Leased(offer.clone())]) {
                        Ok(()) => Ok(offer),
                        Err(error) => Err(Error::new(Code::Io, ErrorChain(&error).to_string())),
                    };
                }
                Err(lack) => lack,
            };
            let wants: Vec<Want> = match lack {
                Lack::Refused(refusal) => break Err(refused(&rules.name, &refusal)),
                Lack::Families(families) => {
                    families.into_iter().map(|family| Want::Any(network.clone(), family)).collect()
                }
                Lack::Address(address) => vec![Want::Address(network.clone(), address)],
            };
            for want in &wants {
                if waiting.insert(want.clone()) {
                    state.want(want);
                    self.wake.notify_one();
                }
            }
            if let Some(answer) = wants.iter().find_map(|want| state.answers.get(want)) {
                break Err(Error::new(Code::TryAgainLater, answer.clone()));
            }
            let Some(rest) = deadline.checked_duration_since(Instant::now()) else {
                break Err(Error::new(Code::TryAgainLater, late(&rules.name, state.contact)));
            };
            state = self.wait(state, rest);
        };
        for want in &waiting {
            state.want_no_more(want);
        }
        if outcome.is_ok() {
            self.count(&state);
            // Whether enough is left is the keeper's to see.
            self.wake.notify_one();
        }
        outcome
    }

    /// Waits until something has changed, and not so long that nobody may be there any more.
    fn wait<'a>(&self, state: MutexGuard<'a, State>, rest: Duration) -> MutexGuard<'a, State> {
        let waited = self.changed.wait_timeout(state, rest.min(GLANCE));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Frees what an interface has, of whatever network; says whether there was anything.
    pub fn delete(&self, place: &Place) -> Result<bool, Error> {
        self.free(vec![place.clone()], "a pod gave its addresses back").map(|count| count > 0)
    }

    /// What an interface has, and was told about it.
    pub fn grant(&self, place: &Place) -> Option<Grant> {
        self.lock().ledger.grant(place)
    }

    /// All that interfaces have.
    pub fn leases(&self) -> Vec<Lease> {
        self.lock().ledger.leases().values().cloned().collect()
    }

    /// The blocks and single addresses that are held, or asked for.
    pub fn holdings(&self) -> Vec<(Block, Holding)> {
        self.lock().ledger.holdings().iter().map(|(block, one)| (block.clone(), one.clone())).collect()
    }

    /// Frees what a configuration of a network has given to others than these.
    pub fn collect(&self, network: &str, config: &str, valid: &BTreeSet<Place>) -> Result<usize, Error> {
        let places = self.lock().ledger.not_among(network, config, valid);
        self.free(places, "addresses that the runtime has forgotten are free")
    }

    /// Frees what sandboxes had that are not there any more.
    pub fn sweep(&self, live: &BTreeSet<String>, before: i64) -> Result<usize, Error> {
        let places = self.lock().ledger.left_over(live, before);
        let count = self.free(places, "addresses of sandboxes that are gone are free")?;
        self.metrics.swept.inc_by(count as u64);
        Ok(count)
    }

    fn free(&self, places: Vec<Place>, why: &str) -> Result<usize, Error> {
        let mut state = self.lock();
        let held = places.into_iter().filter_map(|place| state.ledger.leases().get(&place).cloned());
        let held: Vec<Lease> = held.collect();
        if held.is_empty() {
            return Ok(0);
        }
        let records: Vec<Record> = held.iter().map(|lease| Record::Freed(lease.place.clone())).collect();
        state.keep(&records).map_err(|error| Error::new(Code::Io, ErrorChain(&error).to_string()))?;
        for lease in &held {
            info!(container = lease.place.container, addresses = ?lease.addresses, "{why}");
        }
        self.count(&state);
        drop(state);
        self.changed.notify_all();
        self.wake.notify_one();
        Ok(held.len())
    }

    /// Whether addresses can be had at all.
    pub fn status(&self) -> Result<(), Error> {
        let state = self.lock();
        if state.contact.is_fresh() {
            return Ok(());
        }
        Err(Error { code: Code::NotAvailable, ..cut_off(state.contact) })
    }

    /// Notes which blocks of this node the API server has. What is not among them gives nothing from now on.
    fn confirm(&self, seen: BTreeMap<String, String>) {
        self.lock().seen = seen;
    }

    fn hear(&self, contact: Contact) {
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
    fn plan(&self, view: View<'_>) -> Result<Vec<Step>, JournalError> {
        let mut state = self.lock();
        let wants = state.wants();
        let view = View { wants: &wants, ..view };
        for _ in 0..ROUNDS {
            let (notes, steps): (Vec<Step>, Vec<Step>) =
                keep(&state.ledger, view).into_iter().partition(|step| matches!(step, Step::Note(_)));
            let records: Vec<Record> = notes
                .into_iter()
                .filter_map(|step| if let Step::Note(record) = step { Some(record) } else { None })
                .collect();
            if records.is_empty() {
                return Ok(steps);
            }
            for record in &records {
                info!(?record, "noted");
                if let Record::Doubted { block, network, .. } = record {
                    warn!(
                        network,
                        block = %block.range,
                        "the journal does not know this block of this node: pods keep what they have of it, nothing new comes \
                        out of it until the node was started anew or its pods of today are gone"
                    );
                }
            }
            state.keep(&records)?;
            self.count(&state);
            self.changed.notify_all();
        }
        warn!("the rules about blocks come to no end");
        Ok(Vec::new())
    }

    /// Keeps a record.
    fn note(&self, record: Record) -> Result<(), JournalError> {
        let mut state = self.lock();
        state.keep(&[record])?;
        self.count(&state);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Looks at the ledger.
    fn look<T>(&self, at: impl FnOnce(&Ledger) -> T) -> T {
        at(&self.lock().ledger)
    }

    /// Tells those who wait why they wait in vain.
    fn answer(&self, want: Want, why: String) {
        let mut state = self.lock();
        if state.wants.contains_key(&want) {
            info!(?want, why, "pods wait in vain for addresses");
            state.answers.insert(want, why);
        }
        drop(state);
        self.changed.notify_all();
    }

    pub(crate) fn is_wanted(&self) -> bool {
        !self.lock().wants.is_empty()
    }

    fn count(&self, state: &State) {
        self.metrics.addresses.set(i64::try_from(state.ledger.leases().len()).unwrap_or(i64::MAX));
        self.metrics.blocks.set(i64::try_from(state.ledger.holdings().len()).unwrap_or(i64::MAX));
    }
}

#[cfg(test)]
impl Ipam {
    /// Holds a block of a network as if the API server had given it.
    pub fn hold(&self, network: &str, range: &str) {
        let block = Block { network: network.to_owned(), range: range.parse().unwrap() };
        self.hear(Contact::Now);
        self.lock().seen.insert(api::ipblock::name("blue", block.range), range.to_owned());
        self.note(Record::Asked { block: block.clone(), network: "blue".to_owned() }).unwrap();
        self.note(Record::Took { block, object: range.to_owned() }).unwrap();
    }

    /// Loses the API server, so long ago.
    pub fn lose(&self, since: Duration) {
        self.lock().contact = Contact::LostAt(Instant::now().checked_sub(since).unwrap());
    }
}

impl State {
    fn keep(&mut self, records: &[Record]) -> Result<(), JournalError> {
        self.journal.append(records, &self.ledger)?;
        for record in records {
            self.ledger.apply(record);
        }
        Ok(())
    }

    fn want(&mut self, want: &Want) {
        let count = self.wants.entry(want.clone()).or_insert(0);
        *count += 1;
        if *count == 1 {
            self.answers.remove(want);
        }
    }

    fn want_no_more(&mut self, want: &Want) {
        if let Some(count) = self.wants.get_mut(want) {
            *count -= 1;
            if *count == 0 {
                self.wants.remove(want);
                self.answers.remove(want);
            }
        }
    }

    fn wants(&self) -> Wants {
        let mut wants = Wants::default();
        for (want, count) in &self.wants {
            match want {
                Want::Any(network, family) => _ = wants.any.insert((network.clone(), *family), *count),
                Want::Address(network, address) => _ = wants.addresses.insert((network.clone(), *address)),
            }
        }
        wants
    }
}

fn refused(network: &str, refusal: &Refusal) -> Error {
    let code = match refusal {
        Refusal::Used { .. } | Refusal::Lent(_) => Code::TryAgainLater,
        Refusal::Outside(_)
        | Refusal::Reserved(_)
        | Refusal::Length { .. }
        | Refusal::Two(..)
        | Refusal::Other { .. } => Code::InvalidConfig,
    };
    Error::new(code, format!("network {network:?}: {refusal}"))
}

/// Seconds since the node was started, whatever happens to its clock.
pub fn uptime() -> i64 {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(0, |time| time.tv_sec())
}

fn cut_off(contact: Contact) -> Error {
    let msg = match contact {
        Contact::Never => "the patchbay node daemon has not yet read its address blocks from the API server",
        _ => {
            "the patchbay node daemon has not reached the API server for minutes, so that its address blocks may be \
            somebody else's: no new address is handed out until it is back"
        }
    };
    Error::new(Code::TryAgainLater, msg)
}

fn late(network: &str, contact: Contact) -> String {
    match contact {
        Contact::Now => format!("no address of network {network:?} could be had in time: tried again"),
        _ => cut_off(contact).msg,
    }
}
