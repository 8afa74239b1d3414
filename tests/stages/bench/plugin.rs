//! How long CNI plugins take, measured where they run: inside a node, by this program started there.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};

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
}

/// Calls the plugin for one network namespace after another, and prints the microseconds of each call.
pub fn run(calls: &Calls) -> Result<()> {
    let lanes: Vec<_> = (0..calls.at_once)
        .map(|lane| {
            let (plugin, config) = (calls.plugin.clone(), calls.config.clone());
            let count = calls.count / calls.at_once;
            thread::spawn(move || -> Result<Vec<(Duration, Duration)>> {
                (0..count).map(|round| once(&plugin, &config, &format!("bench-{lane}-{round}"))).collect()
            })
        })
        .collect();
    for lane in lanes {
        for (add, del) in lane.join().map_err(|_| anyhow::anyhow!("a lane panicked"))?? {
            println!("{} {}", add.as_micros(), del.as_micros());
        }
    }
    Ok(())
}

fn once(plugin: &str, config: &str, id: &str) -> Result<(Duration, Duration)> {
    let netns = format!("/var/run/netns/{id}");
    let ip = |words: &[&str]| Command::new("ip").args(words).status();
    ensure!(ip(&["netns", "add", id])?.success(), "make a namespace");
    let call = |verb: &str| -> Result<Duration> {
        let begun = Instant::now();
        let mut child = Command::new(plugin)
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", id)
            .env("CNI_NETNS", &netns)
            .env("CNI_IFNAME", "net1")
            .env("CNI_PATH", "/opt/cni/bin")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("run {plugin}"))?;
        child.stdin.take().context("no input")?.write_all(config.as_bytes())?;
        let output = child.wait_with_output()?;
        let spent = begun.elapsed();
        ensure!(output.status.success(), "{verb}: {}", String::from_utf8_lossy(&output.stdout));
        Ok(spent)
    };
    let times = call("ADD").and_then(|add| Ok((add, call("DEL")?)));
    ensure!(ip(&["netns", "del", id])?.success(), "remove a namespace");
    times
}
