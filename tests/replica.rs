//! Runs controllers as processes in a lab without nodes, with the installed ServiceAccount and its RBAC.

#![allow(clippy::print_stdout, reason = "tests print what they do")]

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, ExitStatus, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
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

/// Installs the manifests and points the webhook's Service at the replicas that the test starts.
pub fn install(lab: &Lab, replicas: u8) -> Result<()> {
    let manifests = patchbay::manifests_dir();
    lab.kubectl(&["apply", "-f", manifests.to_str().context("the path is not UTF-8")?])?;
    // Each replica has its own address in the control plane's network namespace.
    for number in 1..=replicas {
        let address = format!("{}/24", Replica::address(number));
        lab.control_plane().output(&["ip", "addr", "replace", &address, "dev", "sw0"])?;
    }
    set_webhook_endpoints(lab, &(1..=replicas).collect::<Vec<_>>())
}

/// Points the webhook's Service at these replicas, as if only they were ready.
pub fn set_webhook_endpoints(lab: &Lab, replicas: &[u8]) -> Result<()> {
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
    lab.kubectl(&["apply", "-f", file.to_str().context("the path is not UTF-8")?]).map(|_| ())
}

/// A controller process with the token of the installed ServiceAccount; killed on drop.
pub struct Replica {
    child: Mutex<Child>,
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

    pub fn start(lab: &Lab, number: u8, extra_args: &[&str]) -> Result<Self> {
        Self::start_program(lab, number, &program()?, extra_args)
    }

    /// Starts a replica of another build of the program.
    pub fn start_program(lab: &Lab, number: u8, program: &Path, extra_args: &[&str]) -> Result<Self> {
        let token =
            lab.kubectl(&["-n", NAMESPACE, "create", "token", "patchbay-controller", "--duration=1h"])?;
        let admin: serde_json::Value = serde_json::from_slice(&fs::read(lab.kubeconfig())?)?;
        let ca = &admin["clusters"][0]["cluster"]["certificate-authority-data"];
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": "https://172.30.0.1:6443", "certificate-authority-data": ca}}],
            "users": [{"name": "u", "user": {"token": token.trim()}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        });
        let file = lab.kubeconfig().with_file_name(format!("{}.kubeconfig", Self::name(number)));
        fs::write(&file, config.to_string())?;
        Self::launch(lab, number, program, extra_args)
    }

    /// Starts a replica again with the kubeconfig of its previous start: sends no request to the API server.
    pub fn restart(lab: &Lab, number: u8) -> Result<Self> {
        Self::launch(lab, number, &program()?, &[])
    }

    fn launch(lab: &Lab, number: u8, program: &Path, extra_args: &[&str]) -> Result<Self> {
        let child = Mutex::new(Self::spawn(lab, number, program, extra_args)?);
        Ok(Self { child, number, lab: lab.clone() })
    }

    fn lock(&self) -> MutexGuard<'_, Child> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spawn(lab: &Lab, number: u8, program: &Path, extra_args: &[&str]) -> Result<Child> {
        let file = lab.kubeconfig().with_file_name(format!("{}.kubeconfig", Self::name(number)));
        let address = Self::address(number);
        let log = fs::OpenOptions::new().create(true).append(true).open(file.with_extension("log"))?;
        lab.control_plane()
            .command_in_netns(program)?
            .args(["controller", "--namespace", NAMESPACE, "--identity", &Self::name(number)])
            .args(["--health-addr", &format!("{address}:8081"), "--webhook-addr", &format!("{address}:9443")])
            .args(extra_args)
            .env("KUBECONFIG", &file)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("start a controller")
    }

    pub async fn start_ready(lab: &Lab, number: u8, extra_args: &[&str]) -> Result<Self> {
        let replica = Self::start(lab, number, extra_args)?;
        replica.wait_ready().await?;
        Ok(replica)
    }

    /// Waits until the replica serves its webhook.
    pub async fn wait_ready(&self) -> Result<()> {
        wait::until(Duration::from_secs(60), "the replica to be ready", || async {
            Ok((self.probe("readyz") == 200).then_some(()))
        })
        .await
        .with_context(|| self.tail())
    }

    /// Waits until the replica knows that it does not lead.
    pub async fn wait_until_it_does_not_lead(&self) -> Result<()> {
        wait::until(Duration::from_secs(60), "the replica to stop leading", || async {
            Ok((self.metric("patchbay_leader", "")? == 0).then_some(()))
        })
        .await
        .with_context(|| self.tail())
    }

    pub fn tail(&self) -> String {
        Self::log(&self.lab, self.number)
    }

    /// The last lines of a replica's log, whether it runs or not.
    pub fn log(lab: &Lab, number: u8) -> String {
        let log = lab.kubeconfig().with_file_name(format!("{}.log", Self::name(number)));
        let text = fs::read_to_string(log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        format!("log of {}:\n{}", Self::name(number), lines[lines.len().saturating_sub(30)..].join("\n"))
    }

    /// The status code of /healthz or /readyz; 0 if the connection fails.
    pub fn probe(&self, path: &str) -> u16 {
        let (machine, address) = (self.lab.control_plane(), Self::address(self.number));
        // A separate thread, because it enters the lab's network namespace.
        let response = thread::scope(|scope| {
            let request = || -> Result<String> {
                machine.enter_netns()?;
                let mut stream = TcpStream::connect((address.as_str(), 8081))?;
                stream.set_read_timeout(Some(Duration::from_secs(2)))?;
                write!(stream, "GET /{path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")?;
                let mut text = String::new();
                stream.read_to_string(&mut text)?;
                Ok(text)
            };
            scope.spawn(request).join()
        });
        let text = response.ok().and_then(Result::ok).unwrap_or_default();
        text.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0)
    }

    /// The sum of a counter over all label sets that contain this text.
    pub fn metric(&self, name: &str, labels: &str) -> Result<u64> {
        let text = self.metrics()?;
        let samples = text.lines().filter(|line| line.starts_with(name) && line.contains(labels));
        samples
            .map(|line| {
                let number = line.rsplit(' ').next().unwrap_or_default();
                number.parse::<u64>().with_context(|| format!("parse the metric {line}"))
            })
            .sum()
    }

    fn metrics(&self) -> Result<String> {
        let (machine, address) = (self.lab.control_plane(), Self::address(self.number));
        let url = format!("https://{address}:9443").parse()?;
        let request = || -> Result<String> {
            machine.enter_netns()?;
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let mut config = Config::new(url);
                config.accept_invalid_certs = true;
                let client = Client::try_from(config)?;
                let get = Request::new("").get("metrics", &GetParams::default())?;
                client.request_text(get).await.context("read the metrics")
            })
        };
        let response = thread::scope(|scope| scope.spawn(request).join());
        response.map_err(|_| anyhow!("the thread that reads the metrics panicked"))?
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(self.pid()?, signal).context("signal a replica")
    }

    pub fn pid(&self) -> Result<Pid> {
        Ok(Pid::from_raw(i32::try_from(self.lock().id())?))
    }

    /// The resident set size in MiB.
    pub fn rss_mib(&self) -> Result<u64> {
        let text = fs::read_to_string(format!("/proc/{}/status", self.pid()?))?;
        let line = text.lines().find(|line| line.starts_with("VmRSS:")).context("no VmRSS in /proc")?;
        let kilobytes: u64 = line.split_whitespace().nth(1).context("VmRSS has no value")?.parse()?;
        Ok(kilobytes / 1024)
    }

    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.lock().try_wait()?.is_none())
    }

    pub async fn wait_for_exit(&mut self, timeout: Duration) -> Result<ExitStatus> {
        wait::until(timeout, "the replica to exit", || {
            let status = self.lock().try_wait();
            async move { Ok(status?) }
        })
        .await
    }

    /// The same within a limit of the product; returns how long it took.
    pub async fn wait_for_exit_within(&mut self, limit: Duration) -> Result<(ExitStatus, Duration)> {
        wait::within(limit, "the replica to exit", || {
            let status = self.lock().try_wait();
            async move { Ok(status?) }
        })
        .await
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        let mut child = self.lock();
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// The `patchbay` binary of the test build, or the one in `PATCHBAY_PROGRAM`: benchmarks measure the release build.
pub fn program() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("PATCHBAY_PROGRAM") {
        return Ok(path.into());
    }
    let path = lab::machine::lab_binary()?.with_file_name("patchbay");
    ensure!(path.exists(), "{} is not built: run `cargo build`", path.display());
    Ok(path)
}
