//! How long CNI plugins take, measured where they run: inside a node, by this program started there.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use lab::{Lab, machine::Machine};
use serde_json::Value;

/// What to call, and how often.
#[derive(Debug, clap::Args)]
pub struct Calls {
    /// The plugin.
    #[arg(long)]
    plugin: String,
    /// Its configuration.
    #[arg(long)]
    config: String,
    /// How many ADDs and DELs.
    #[arg(long)]
    count: usize,
    /// How many at once.
    #[arg(long, default_value_t = 1)]
    at_once: usize,
    /// What to ask for each interface, one after the other.
    #[arg(long, value_delimiter = ',', default_value = "ADD,DEL")]
    verbs: Vec<String>,
    /// Whether the plugin only hands out addresses: then one namespace does for many.
    #[arg(long)]
    addresses: bool,
}

/// Calls the plugin for one interface after another, and prints the microseconds of each call.
pub fn run(calls: &Calls) -> Result<()> {
    let times = thread::scope(|scope| {
        let lane = |lane| scope.spawn(move || calls.lane(lane));
        let lanes: Vec<_> = (0..calls.at_once).map(lane).collect();
        let joined = lanes.into_iter().map(|lane| lane.join().map_err(|_| anyhow!("a lane panicked"))?);
        joined.collect::<Result<Vec<_>>>()
    })?;
    for spent in times.into_iter().flatten() {
        let words: Vec<String> = spent.iter().map(|one| one.as_micros().to_string()).collect();
        println!("{}", words.join(" "));
    }
    Ok(())
}

impl Calls {
    fn lane(&self, lane: usize) -> Result<Vec<Vec<Duration>>> {
        let rounds = 0..self.count / self.at_once;
        let id = |round: usize| format!("bench-{lane}-{round}");
        let each = |id: &str, netns: &str| self.verbs.iter().map(|verb| self.call(verb, id, netns)).collect();
        if self.addresses {
            let all = |netns: &str| rounds.map(|round| each(&id(round), netns)).collect();
            return in_namespace(&format!("bench-{lane}"), all);
        }
        rounds.map(|round| in_namespace(&id(round), |netns| each(&id(round), netns))).collect()
    }

    fn call(&self, verb: &str, id: &str, netns: &str) -> Result<Duration> {
        let begun = Instant::now();
        let mut child = Command::new(&self.plugin)
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", id)
            .env("CNI_NETNS", netns)
            .env("CNI_IFNAME", "net1")
            .env("CNI_PATH", "/opt/cni/bin")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("run {}", self.plugin))?;
        child.stdin.take().context("no input")?.write_all(self.config.as_bytes())?;
        let output = child.wait_with_output()?;
        let spent = begun.elapsed();
        ensure!(output.status.success(), "{verb}: {}", String::from_utf8_lossy(&output.stdout));
        Ok(spent)
    }
}

/// Does something with the path of a network namespace that is there meanwhile.
fn in_namespace<T>(name: &str, work: impl FnOnce(&str) -> Result<T>) -> Result<T> {
    let ip = |words: &[&str]| Command::new("ip").args(words).status();
    ensure!(ip(&["netns", "add", name])?.success(), "make a namespace");
    let done = work(&format!("/var/run/netns/{name}"));
    ensure!(ip(&["netns", "del", name])?.success(), "remove a namespace");
    done
}

/// This very program, where a node can run it.
pub struct Stopwatch(Machine);

impl Stopwatch {
    const PROGRAM: &str = "/run/bench-stages";

    pub fn new(lab: &Lab) -> Result<Self> {
        let node = lab.node("node-1");
        let init = node.init().context("node-1 runs")?;
        std::fs::copy(std::env::current_exe()?, format!("/proc/{init}/root{}", Self::PROGRAM))
            .context("copy this program")?;
        Ok(Self(node))
    }

    /// Calls a plugin as these words say: the microseconds of every call, by verb.
    pub fn times<const N: usize>(
        &self,
        plugin: &str,
        config: &Value,
        words: &[&str],
    ) -> Result<[Vec<u64>; N]> {
        let (path, config) = (format!("/opt/cni/bin/{plugin}"), config.to_string());
        let call = [Self::PROGRAM, "plugin", "--plugin", &path, "--config", &config];
        let text = self.0.output(&[&call, words].concat())?;
        let mut times = [const { Vec::new() }; N];
        for line in text.lines() {
            let numbers = line.split(' ').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
            ensure!(numbers.len() == N, "{N} numbers in {line:?}");
            times.iter_mut().zip(numbers).for_each(|(all, one)| all.push(one));
        }
        Ok(times)
    }
}
