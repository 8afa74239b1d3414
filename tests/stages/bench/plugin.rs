//! Measures the duration of CNI plugin calls inside a node, where this program runs itself.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use lab::{Lab, machine::Machine};
use serde_json::Value;

/// Which plugin to call, and how often.
#[derive(Debug, clap::Args)]
pub struct PluginCalls {
    /// The path of the plugin.
    #[arg(long)]
    plugin: String,
    /// The network configuration.
    #[arg(long)]
    config: String,
    /// The number of interfaces.
    #[arg(long)]
    count: usize,
    /// The number of parallel workers.
    #[arg(long, default_value_t = 1)]
    parallel: usize,
    /// The CNI commands for each interface, in order.
    #[arg(long, value_delimiter = ',', default_value = "ADD,DEL")]
    verbs: Vec<String>,
    /// The plugin is an IPAM plugin: use one network namespace for all calls of a worker.
    #[arg(long)]
    ipam: bool,
}

/// Calls the plugin and prints the microseconds of each call, one line per interface.
pub fn run(calls: &PluginCalls) -> Result<()> {
    let times = thread::scope(|scope| {
        let start = |worker| scope.spawn(move || calls.run_worker(worker));
        let workers: Vec<_> = (0..calls.parallel).map(start).collect();
        let joined =
            workers.into_iter().map(|worker| worker.join().map_err(|_| anyhow!("a worker panicked"))?);
        joined.collect::<Result<Vec<_>>>()
    })?;
    for durations in times.into_iter().flatten() {
        let micros: Vec<String> = durations.iter().map(|duration| duration.as_micros().to_string()).collect();
        println!("{}", micros.join(" "));
    }
    Ok(())
}

impl PluginCalls {
    fn run_worker(&self, worker: usize) -> Result<Vec<Vec<Duration>>> {
        let rounds = 0..self.count / self.parallel;
        let id = |round: usize| format!("bench-{worker}-{round}");
        let each = |id: &str, netns: &str| self.verbs.iter().map(|verb| self.call(verb, id, netns)).collect();
        if self.ipam {
            let all = |netns: &str| rounds.map(|round| each(&id(round), netns)).collect();
            return with_netns(&format!("bench-{worker}"), all);
        }
        rounds.map(|round| with_netns(&id(round), |netns| each(&id(round), netns))).collect()
    }

    fn call(&self, verb: &str, id: &str, netns: &str) -> Result<Duration> {
        let start = Instant::now();
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
        child.stdin.take().context("the plugin has no stdin")?.write_all(self.config.as_bytes())?;
        let output = child.wait_with_output()?;
        let elapsed = start.elapsed();
        ensure!(output.status.success(), "{verb}: {}", String::from_utf8_lossy(&output.stdout));
        Ok(elapsed)
    }
}

/// Runs an action with the path of a temporary network namespace.
fn with_netns<T>(name: &str, action: impl FnOnce(&str) -> Result<T>) -> Result<T> {
    let ip = |arguments: &[&str]| Command::new("ip").args(arguments).status();
    ensure!(ip(&["netns", "add", name])?.success(), "create network namespace {name}");
    let result = action(&format!("/var/run/netns/{name}"));
    ensure!(ip(&["netns", "del", name])?.success(), "delete network namespace {name}");
    result
}

/// A copy of this program on a node that calls plugins and measures them.
pub struct PluginTimer(Machine);

impl PluginTimer {
    const PROGRAM: &str = "/run/bench-stages";

    pub fn new(lab: &Lab) -> Result<Self> {
        let node = lab.node("node-1");
        let init = node.init().context("node-1 is not running")?;
        std::fs::copy(std::env::current_exe()?, format!("/proc/{init}/root{}", Self::PROGRAM))
            .context("copy this program")?;
        Ok(Self(node))
    }

    /// Calls a plugin with these arguments of [`PluginCalls`]; returns the microseconds of each call, by CNI command.
    pub fn times<const N: usize>(
        &self,
        plugin: &str,
        config: &Value,
        arguments: &[&str],
    ) -> Result<[Vec<u64>; N]> {
        let (path, config) = (format!("/opt/cni/bin/{plugin}"), config.to_string());
        let call = [Self::PROGRAM, "plugin", "--plugin", &path, "--config", &config];
        let text = self.0.output(&[&call, arguments].concat())?;
        let mut times = [const { Vec::new() }; N];
        for line in text.lines() {
            let numbers = line.split(' ').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
            ensure!(numbers.len() == N, "{N} numbers in {line:?}");
            times.iter_mut().zip(numbers).for_each(|(all, micros)| all.push(micros));
        }
        Ok(times)
    }
}
