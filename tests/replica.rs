//! Controllers as real processes in a lab without nodes, with the installed account and its rights.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    path::PathBuf,
    process::{Child, ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use kube::{Client, Config, api::GetParams, core::Request};
use lab::{Lab, wait};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use crate::patchbay::{self, NAMESPACE};

/// Installs the manifests, and makes the webhook's Service lead to so many processes that tests start.
pub fn prepare(lab: &Lab, replicas: u8) -> Result<()> {
    let manifests = patchbay::manifests_dir();
    lab.kubectl(&["apply", "-f", manifests.to_str().context("a path in UTF-8")?])?;
    // Replicas run as processes in the control plane's network, each with an address of its own.
    for number in 1..=replicas {
        let address = format!("{}/24", Replica::address(number));
        lab.control_plane().output(&["ip", "addr", "add", &address, "dev", "sw0"])?;
    }
    serve(lab, &(1..=replicas).collect::<Vec<_>>())
}

/// Makes the webhook's Service lead to these replicas, as if they alone were ready.
pub fn serve(lab: &Lab, replicas: &[u8]) -> Result<()> {
    let endpoints = replicas
        .iter()
        .map(|number| json!({"addresses": [Replica::address(*number)], "conditions": {"ready": true}}));
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": "replicas", "namespace": NAMESPACE,
            "labels": {"kubernetes.io/service-name": "patchbay-webhook", "endpointslice.kubernetes.io/managed-by": "test"}},
        "ports": [{"name": "webhook", "port": 9443, "protocol": "TCP"}],
        "endpoints": endpoints.collect::<Vec<_>>(),
    });
    let file = lab.kubeconfig().with_file_name("slice.json");
    fs::write(&file, slice.to_string())?;
    lab.kubectl(&["apply", "-f", file.to_str().context("a path in UTF-8")?]).map(|_| ())
}

/// One controller, a real process with the installed account's token; killed with the value.
pub struct Replica {
    child: Child,
    number: u8,
    lab: Lab,
}

impl Replica {
    pub fn address(number: u8) -> String {
        format!("172.30.0.{}", 1 + number)
    }

    pub fn name(number: u8) -> String {
        format!("replica-{number}")
    }

    pub fn start(lab: &Lab, number: u8, more: &[&str]) -> Result<Self> {
        let token =
            lab.kubectl(&["-n", NAMESPACE, "create", "token", "patchbay-controller", "--duration=1h"])?;
        let admin: serde_json::Value = serde_json::from_slice(&fs::read(lab.kubeconfig())?)?;
        let authority = &admin["clusters"][0]["cluster"]["certificate-authority-data"];
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": "https://172.30.0.1:6443", "certificate-authority-data": authority}}],
            "users": [{"name": "u", "user": {"token": token.trim()}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        });
        let file = lab.kubeconfig().with_file_name(format!("{}.kubeconfig", Self::name(number)));
        fs::write(&file, config.to_string())?;
        Self::spawn(lab, number, more)
    }

    /// Starts one that was started before, with the account that it was given then: asks the API server for nothing.
    pub fn again(lab: &Lab, number: u8) -> Result<Self> {
        Self::spawn(lab, number, &[])
    }

    fn spawn(lab: &Lab, number: u8, more: &[&str]) -> Result<Self> {
        let file = lab.kubeconfig().with_file_name(format!("{}.kubeconfig", Self::name(number)));
        let address = Self::address(number);
        let log = fs::OpenOptions::new().create(true).append(true).open(file.with_extension("log"))?;
        let child = lab
            .control_plane()
            .command_in_netns(program()?)?
            .args(["controller", "--namespace", NAMESPACE, "--identity", &Self::name(number)])
            .args(["--health-addr", &format!("{address}:8081"), "--webhook-addr", &format!("{address}:9443")])
            .args(more)
            .env("KUBECONFIG", &file)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("start a controller")?;
        Ok(Self { child, number, lab: lab.clone() })
    }

    pub async fn ready(lab: &Lab, number: u8, more: &[&str]) -> Result<Self> {
        let replica = Self::start(lab, number, more)?;
        wait::until(Duration::from_secs(20), "the replica to be ready", || async {
            Ok((replica.probe("readyz") == 200).then_some(()))
        })
        .await
        .with_context(|| replica.tail())?;
        Ok(replica)
    }

    pub fn tail(&self) -> String {
        Self::log(&self.lab, self.number)
    }

    /// The end of what it has logged, dead or alive.
    pub fn log(lab: &Lab, number: u8) -> String {
        let log = lab.kubeconfig().with_file_name(format!("{}.log", Self::name(number)));
        let text = fs::read_to_string(log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        format!("log of {}:\n{}", Self::name(number), lines[lines.len().saturating_sub(30)..].join("\n"))
    }

    /// The status code of /healthz or /readyz; 0 when nobody listens.
    pub fn probe(&self, path: &str) -> u16 {
        let (machine, address) = (self.lab.control_plane(), Self::address(self.number));
        // A thread of its own: it moves to the lab's network and ends there.
        let asked = std::thread::scope(|scope| {
            let ask = || -> Result<String> {
                machine.enter_netns()?;
                let mut stream = TcpStream::connect((address.as_str(), 8081))?;
                stream.set_read_timeout(Some(Duration::from_secs(2)))?;
                write!(stream, "GET /{path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")?;
                let mut text = String::new();
                stream.read_to_string(&mut text)?;
                Ok(text)
            };
            scope.spawn(ask).join()
        });
        let text = asked.ok().and_then(Result::ok).unwrap_or_default();
        text.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0)
    }

    /// What it has counted under this name, over all labels that have this text in them.
    pub fn metric(&self, name: &str, labels: &str) -> Result<u64> {
        let text = self.metrics()?;
        let ours = text.lines().filter(|line| line.starts_with(name) && line.contains(labels));
        ours.map(|line| {
            let number = line.rsplit(' ').next().unwrap_or_default();
            number.parse::<u64>().with_context(|| format!("a count: {line}"))
        })
        .sum()
    }

    fn metrics(&self) -> Result<String> {
        let (machine, address) = (self.lab.control_plane(), Self::address(self.number));
        let url = format!("https://{address}:9443").parse()?;
        let ask = || -> Result<String> {
            machine.enter_netns()?;
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let mut config = Config::new(url);
                config.accept_invalid_certs = true;
                let client = Client::try_from(config)?;
                let request = Request::new("").get("metrics", &GetParams::default())?;
                client.request_text(request).await.context("ask for metrics")
            })
        };
        let asked = std::thread::scope(|scope| scope.spawn(ask).join());
        asked.map_err(|_| anyhow!("the thread that asks panicked"))?
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(self.pid()?, signal).context("signal a replica")
    }

    pub fn pid(&self) -> Result<Pid> {
        Ok(Pid::from_raw(i32::try_from(self.child.id())?))
    }

    /// What it has in memory, in MiB.
    pub fn memory(&self) -> Result<u64> {
        let text = fs::read_to_string(format!("/proc/{}/status", self.pid()?))?;
        let line =
            text.lines().find(|line| line.starts_with("VmRSS:")).context("the process has no memory")?;
        let kilobytes: u64 = line.split_whitespace().nth(1).context("a number")?.parse()?;
        Ok(kilobytes / 1024)
    }

    pub fn alive(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    pub async fn ends_within(&mut self, limit: Duration) -> Result<ExitStatus> {
        wait::until(limit, "the replica to end", || {
            let ended = self.child.try_wait();
            async move { Ok(ended?) }
        })
        .await
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The product as built for tests, or another build of it: numbers are of the one that is shipped.
fn program() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("PATCHBAY_PROGRAM") {
        return Ok(path.into());
    }
    let path = lab::machine::lab_binary()?.with_file_name("patchbay");
    ensure!(path.exists(), "{} is not built: run `cargo build`", path.display());
    Ok(path)
}
