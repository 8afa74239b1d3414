//! The leader's loop for bridge networks: looks at the cluster, asks `plan::network` what to write next, and writes it.

mod memory;
#[cfg(test)]
mod tests;
mod write;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use api::{ErrorChain, selection::NadRef};
use futures::{StreamExt, stream};
use jiff::Timestamp;
use kube::Client;
use plan::network::{self, Discard, Plan, Relabel, Turn};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use self::{
    memory::Memory,
    write::{Error, Outcome, Writer},
};
use crate::{
    cluster::Cluster,
    direct::Answers,
    metrics::Metrics,
    tenure::{Tenure, now},
};

/// Changes come in bursts: so long is waited for the rest of one.
const BURST: Duration = Duration::from_millis(10);
/// Networks that are written for at a time.
const AT_ONCE: usize = 8;
/// Nothing is polled; this is only how long a wait without a reason may last.
const LONG: Duration = Duration::from_mins(10);

/// The keeper of the networks.
pub struct Steward {
    cluster: Cluster,
    metrics: Arc<Metrics>,
    writer: Writer,
    memory: Memory,
}

impl Steward {
    pub fn new(client: Client, cluster: Cluster, metrics: Arc<Metrics>, tenure: Tenure) -> Self {
        let writer = Writer::new(client, cluster.clone(), metrics.clone(), tenure);
        Self { cluster, metrics, writer, memory: Memory::default() }
    }

    /// Works until told to stop; what was begun is ended.
    pub async fn keep(mut self, stop: CancellationToken) {
        if stop.run_until_cancelled(self.cluster.synced()).await != Some(true) {
            return;
        }
        let mut changes = self.cluster.changes();
        loop {
            changes.mark_unchanged();
            let pause = self.round().await;
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
                changed = changes.changed() => match changed {
                    Ok(()) => tokio::time::sleep(BURST).await,
                    Err(_) => return,
                },
            }
        }
    }

    /// One look and all writes that it asks for; says for how long nothing more is due.
    async fn round(&mut self) -> Duration {
        let Plan { turns, orphans, labels, discarded, look } = self.plan();
        self.memory.tidy(&self.cluster.world(), now());
        let mut pause = look.unwrap_or(LONG);
        self.settle_refusals(&turns);
        let mut due = Vec::new();
        for mut turn in turns {
            if let Some(wait) = self.memory.put_off(&mut turn, now()) {
                pause = pause.min(wait);
            }
            if turn.steps.is_empty() && turn.status.is_none() {
                continue;
            }
            match self.memory.wait(&self.cluster.world(), &turn, now()) {
                Some(wait) => pause = pause.min(wait),
                None => due.push(turn),
            }
        }
        let (orphans, rest): (Vec<_>, Vec<_>) =
            orphans.into_iter().partition(|(_, one)| !self.memory.swept(&one.uid, now()));
        if !rest.is_empty() {
            pause = pause.min(memory::SEEN_AGAIN);
        }
        // The plan is made: what is listed from now on is newer than all that it was made of.
        let (asking, plain): (Vec<Turn>, Vec<Turn>) = due.into_iter().partition(Turn::asks);
        let none = Answers::none();
        let ask = async {
            let answers = self.writer.ask(&asking, &orphans).await;
            (self.write(asking, &answers).await, answers)
        };
        let (written, (decided, answers)) = futures::join!(self.write(plain, &none), ask);
        for (turn, outcome) in written.into_iter().chain(decided) {
            pause = pause.min(self.remember(&turn, outcome));
        }
        pause = pause.min(self.relabel(labels).await);
        pause = pause.min(self.discard(discarded).await);
        for (at, one) in orphans {
            self.memory.sweep(one.uid.clone(), now());
            if let Err(error) = self.writer.sweep(&at, &one, &answers).await {
                pause = pause.min(failed(&error, "an attachment without a network could not be removed"));
            }
        }
        pause
    }

    /// Frees address blocks that nobody holds any more.
    async fn discard(&mut self, discarded: Vec<Discard>) -> Duration {
        let mut pause = LONG;
        for one in discarded {
            if self.memory.swept(&one.uid, now()) {
                pause = pause.min(memory::SEEN_AGAIN);
                continue;
            }
            self.memory.sweep(one.uid.clone(), now());
            if let Err(error) = self.writer.discard(&one).await {
                pause = pause.min(failed(&error, "an address block that nobody holds could not be removed"));
            }
        }
        pause
    }

    async fn relabel(&mut self, labels: Vec<Relabel>) -> Duration {
        let mut pause = LONG;
        for relabel in labels {
            if self.memory.labelled(&relabel, now()) {
                pause = pause.min(memory::SEEN_AGAIN);
                continue;
            }
            match self.writer.relabel(&relabel).await {
                Ok(()) => self.memory.label(relabel, now()),
                Err(error) => pause = pause.min(failed(&error, "the labels of a node could not be set")),
            }
        }
        pause
    }

    async fn write(&self, turns: Vec<Turn>, answers: &Answers) -> Vec<(Turn, Result<Outcome, Error>)> {
        let written = stream::iter(turns).map(async |turn| {
            let outcome = self.writer.turn(&turn, answers).await;
            (turn, outcome)
        });
        written.buffer_unordered(AT_ONCE).collect().await
    }

    fn plan(&mut self) -> Plan {
        let begun = now();
        let mut world = self.cluster.world();
        self.memory.seen(&std::mem::take(&mut world.stirred));
        world.notice(begun);
        let plan = network::plan(&world, Timestamp::now());
        world.remember(&plan);
        self.metrics.planned(world.networks.len(), world.users.len(), begun.elapsed());
        plan
    }

    /// Makes refusals known to the next plan, which tells of them.
    fn refuse(&mut self, turn: &Turn, refused: &[(NadRef, String)]) {
        for (at, why) in refused {
            debug!(network = turn.name, attachment = %at, why, "an attachment was refused, tried again");
            self.memory.refused(&turn.uid, at, now());
        }
        self.cluster.change(|world| {
            let known = world.refused.get(&turn.uid).cloned().unwrap_or_default();
            let mut all = known.clone();
            all.extend(refused.iter().cloned());
            let news = all != known;
            if news {
                world.refused.insert(turn.uid.clone(), all);
            }
            news
        });
    }

    /// Makes known to the next plan that a network was asked about in vain, or that there was an answer.
    fn answered(&mut self, turn: &Turn, unanswered: Option<&String>) -> Duration {
        let Some(why) = unanswered else {
            if turn.lets_go() {
                self.memory.answered(&turn.uid);
                self.cluster.world().unanswered.remove(&turn.uid);
            }
            return LONG;
        };
        let wait = self.memory.unanswered(&turn.uid, now());
        warn!(network = turn.name, error = why, ?wait, "the API server was asked in vain, asked again");
        self.cluster
            .change(|world| world.unanswered.insert(turn.uid.clone(), why.clone()).as_ref() != Some(why));
        wait
    }

    /// What is not asked for any more is refused no more.
    fn settle_refusals(&mut self, turns: &[Turn]) {
        let asked: HashMap<&str, HashSet<&NadRef>> =
            turns.iter().map(|turn| (turn.uid.as_str(), turn.places().collect())).collect();
        let still = |uid: &str, at: &NadRef| asked.get(uid).is_some_and(|all| all.contains(at));
        self.memory.keep_refusals(still);
        let going: HashSet<&str> =
            turns.iter().filter(|turn| turn.lets_go()).map(|turn| turn.uid.as_str()).collect();
        // No plan asks about those that go: nobody has to be woken.
        let mut world = self.cluster.world();
        world.unanswered.retain(|uid, _| going.contains(uid.as_str()));
        world.refused.retain(|uid, all| {
            all.retain(|at, _| still(uid, at));
            !all.is_empty()
        });
    }

    fn remember(&mut self, turn: &Turn, outcome: Result<Outcome, Error>) -> Duration {
        match outcome {
            Ok(outcome) => {
                let Outcome { beaten, refused, .. } = &outcome;
                let beaten = *beaten;
                self.refuse(turn, refused);
                let mut wait = self.answered(turn, outcome.unanswered.as_ref());
                if let Some(error) = &outcome.unsaid {
                    wait = wait.min(self.memory.unsaid(turn, now()));
                    warn!(
                        network = turn.name,
                        error, "the status of a network could not be written, tried again"
                    );
                }
                self.cluster.world().confirmed(&outcome.confirmed);
                for step in &turn.steps {
                    self.cluster.world().wrote(&turn.uid, step, |at| outcome.wrote(at));
                }
                self.memory.written(turn, outcome, now());
                let next = if beaten { self.memory.beaten(turn, now()) } else { memory::SEEN_AGAIN };
                next.min(wait)
            }
            Err(error) if error.is_conflict() => {
                debug!(network = turn.name, "another writer was quicker, looking again");
                self.memory.beaten(turn, now())
            }
            Err(error) => {
                let wait = self.memory.failed(turn, now());
                warn!(network = turn.name, error = %ErrorChain(&error), ?wait, "a network could not be kept, tried again");
                wait
            }
        }
    }
}

fn failed(error: &Error, what: &'static str) -> Duration {
    if !error.is_conflict() {
        warn!(error = %ErrorChain(error), "{what}, tried again");
    }
    memory::FIRST_RETRY
}
