//! One process of a plugin, from its start to its end.

use std::{
    fs,
    io::{self, ErrorKind},
    os::unix::{
        fs::PermissionsExt as _,
        process::{CommandExt as _, ExitStatusExt as _},
    },
    path::{Path, PathBuf},
    pin::pin,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use futures::FutureExt as _;
use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
    process::{Child, ChildStdin, Command},
    runtime::Handle,
    sync::oneshot,
    task::spawn_blocking,
    time::{Instant, sleep, sleep_until, timeout},
};
use tracing::{debug, warn};
use wire::cni::{PluginError, Verb};

use super::{
    ExecError,
    children::{self, CALL_VARIABLE, CHILDREN, CallId},
    limits::Permit,
};
use crate::host_mounts::HostMounts;

/// The longest result. A pod's annotations are at most this long together.
pub const MAX_STDOUT: usize = 256 * 1024;
/// How much of the end of a plugin's log is kept.
const MAX_STDERR: usize = 8 * 1024;
/// How much of it an error repeats.
const MAX_STDERR_TEXT: usize = 512;
/// How long the output of a plugin is read after it exited. Its children may keep the pipes open.
const PIPE_GRACE: Duration = Duration::from_millis(200);
/// How long a killed plugin may take to disappear before its caller goes on.
const KILL_GRACE: Duration = Duration::from_secs(2);
/// How often and how long to wait for a plugin that is being written.
const BUSY_RETRIES: u32 = 25;
const BUSY_RETRY: Duration = Duration::from_millis(200);
/// The kernel kills plugins before the daemon: they share its memory limit.
const OOM_SCORE_ADJ: &str = "1000";
/// Plugins run programs such as iptables.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A call of one plugin.
#[derive(Debug, Clone)]
pub struct PluginCall {
    pub plugin: String,
    pub dirs: Vec<PathBuf>,
    pub verb: Verb,
    pub stdin: String,
    /// The variables of CNI.
    pub env: Vec<(&'static str, String)>,
    pub timeout: Duration,
    pub slow_after: Duration,
}

/// How a process ended.
enum End {
    Exited(ExitStatus),
    Timeout,
    TooLong,
    Lost(io::Error),
}

impl PluginCall {
    /// Runs the plugin and sends what it printed. Returns when its process is gone, and then drops the permit.
    pub async fn run(
        self,
        host: HostMounts,
        mut permit: Permit,
        reply: oneshot::Sender<Result<Vec<u8>, ExecError>>,
    ) {
        let call = CallId::next();
        let mut plugin = match self.start(&host, call).await {
            Ok(plugin) => plugin,
            Err(error) => {
                let _ = reply.send(Err(error));
                return;
            }
        };
        let child = &mut plugin.child;
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let end = self.supervise(child, &mut permit, &mut stdout, &mut stderr).await;
        let mut gone = true;
        if matches!(end, End::Timeout | End::TooLong) {
            kill_call(child, call).await;
            gone = timeout(KILL_GRACE, child.wait()).await.is_ok();
        }
        let _ = reply.send(self.result(end, stdout, &stderr));
        if !gone {
            warn!(plugin = self.plugin, "a killed plugin does not end: it waits for the kernel");
            let _ = child.wait().await;
        }
    }

    /// Starts the plugin in the mount namespace of the host.
    async fn start(&self, host: &HostMounts, id: CallId) -> Result<PluginProcess, ExecError> {
        let failed = |source| ExecError::Host { plugin: self.plugin.clone(), source };
        let mut retries = BUSY_RETRIES;
        loop {
            let (call, runtime) = (self.clone(), Handle::current());
            let started = host
                .run(move || {
                    let Some(path) = find(&call.plugin, &call.dirs) else { return Ok(None) };
                    let _runtime = runtime.enter();
                    let child = CHILDREN.start(|| spawn(&path, &call.env, id), group);
                    let supervise =
                        |child| Some(Unsupervised(Some(PluginProcess { pid: group(&child), child })));
                    child.map(supervise)
                })
                .await
                .map_err(failed)?;
            match started.map(|started| started.and_then(Unsupervised::take)) {
                Ok(Some(plugin)) => {
                    // In the daemon's own /proc, where the number means this process. One that has exited needs no score.
                    if let Some(pid) = group(&plugin.child) {
                        let _ = fs::write(format!("/proc/{pid}/oom_score_adj"), OOM_SCORE_ADJ);
                    }
                    return Ok(plugin);
                }
                Ok(None) => {
                    return Err(ExecError::PluginMissing {
                        plugin: self.plugin.clone(),
                        dirs: self.dirs.clone(),
                    });
                }
                Err(error) if error.kind() == ErrorKind::ExecutableFileBusy && retries > 0 => {
                    retries -= 1;
                    sleep(BUSY_RETRY).await;
                }
                Err(error) => return Err(failed(error)),
            }
        }
    }

    /// Writes the input and reads the output until the process exits.
    async fn supervise(
        &self,
        child: &mut Child,
        permit: &mut Permit,
        stdout: &mut Vec<u8>,
        stderr: &mut Vec<u8>,
    ) -> End {
        let (stdin, out, err) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        // DEL has no result. What it prints does not matter, and it must not be killed for it.
        let keep_all = self.verb != Verb::Del;
        let mut exchange = pin!(async {
            tokio::try_join!(
                feed(stdin, self.stdin.as_bytes()).map(Ok),
                read_start(out, stdout, keep_all),
                read_end(err, stderr).map(Ok)
            )
        });
        let start = Instant::now();
        let mut slow = pin!(sleep_until(start + self.slow_after));
        let mut deadline = pin!(sleep_until(start + self.timeout));
        let (mut exited, mut drained) = (None, false);
        loop {
            if let (Some(status), true) = (exited, drained) {
                return End::Exited(status);
            }
            tokio::select! {
                read = &mut exchange, if !drained => {
                    if read.is_err() {
                        return End::TooLong;
                    }
                    drained = true;
                }
                status = child.wait(), if exited.is_none() => {
                    match status {
                        Ok(status) => exited = Some(status),
                        Err(error) => return End::Lost(error),
                    }
                    deadline.as_mut().reset(Instant::now() + PIPE_GRACE);
                }
                () = &mut slow, if exited.is_none() && !slow.is_elapsed() => permit.give_up_slot(),
                () = &mut deadline => return exited.map_or(End::Timeout, End::Exited),
            }
        }
    }

    fn result(&self, end: End, stdout: Vec<u8>, stderr: &[u8]) -> Result<Vec<u8>, ExecError> {
        let plugin = self.plugin.clone();
        match end {
            End::Exited(status) if status.success() => {
                if !stderr.is_empty() {
                    debug!(plugin, stderr = stderr_text(stderr), "a CNI plugin wrote to its log");
                }
                Ok(stdout)
            }
            End::Exited(status) => match status.signal() {
                Some(signal) => {
                    let stderr = stderr_text(stderr);
                    let stderr = if stderr.is_empty() { stderr } else { format!(": {stderr}") };
                    Err(ExecError::Signaled { plugin, signal, stderr })
                }
                None => Err(ExecError::Plugin { plugin, error: PluginError::parse(&stdout, stderr) }),
            },
            End::Timeout => Err(ExecError::Timeout { plugin, limit: self.timeout }),
            End::TooLong => Err(ExecError::TooLong { plugin, limit: MAX_STDOUT }),
            End::Lost(source) => Err(ExecError::Host { plugin, source }),
        }
    }
}

/// The process of a plugin. Only tokio reaps it while this value lives.
struct PluginProcess {
    child: Child,
    pid: Option<Pid>,
}

impl Drop for PluginProcess {
    fn drop(&mut self) {
        if let Some(pid) = self.pid {
            CHILDREN.ended(pid);
        }
    }
}

/// A process that no task supervises yet. It is killed if it is dropped, because its caller gave up.
struct Unsupervised(Option<PluginProcess>);

impl Unsupervised {
    fn take(mut self) -> Option<PluginProcess> {
        self.0.take()
    }
}

impl Drop for Unsupervised {
    fn drop(&mut self) {
        if let Some(plugin) = &self.0 {
            kill(&plugin.child);
        }
    }
}

/// Starts a process that leads its own process group.
fn spawn(path: &Path, env: &[(&'static str, String)], call: CallId) -> io::Result<Child> {
    let mut command = std::process::Command::new(path);
    command
        .env_clear()
        .env("PATH", PATH)
        .envs(env.iter().map(|(key, value)| (key, value)))
        .env(CALL_VARIABLE, call.value())
        .current_dir("/")
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    Command::from(command).spawn()
}

/// The number of the process group, while the process is not reaped. Afterwards another process may get the number.
fn group(child: &Child) -> Option<Pid> {
    child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw)
}

/// Kills the processes of a call.
async fn kill_call(child: &Child, call: CallId) {
    let plugin = group(child);
    let deadline = Instant::now().into_std() + KILL_GRACE;
    let _ = timeout(KILL_GRACE, spawn_blocking(move || children::kill_call(plugin, call, deadline))).await;
    kill(child);
}

/// Kills the process group.
fn kill(child: &Child) {
    if let Some(group) = group(child) {
        let _ = killpg(group, Signal::SIGKILL);
    }
}

/// The executable of a plugin.
fn find(plugin: &str, dirs: &[PathBuf]) -> Option<PathBuf> {
    let executable = |path: &PathBuf| {
        fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    };
    dirs.iter().map(|dir| dir.join(plugin)).find(executable)
}

/// Writes the input. A plugin may exit without reading it.
async fn feed(stdin: Option<ChildStdin>, input: &[u8]) {
    if let Some(mut stdin) = stdin {
        let _ = stdin.write_all(input).await;
    }
}

/// A plugin printed too much.
struct DoesNotFit;

/// Reads the output into a buffer. If it need not fit, the rest is dropped.
async fn read_start(
    pipe: Option<impl AsyncRead + Unpin>,
    buffer: &mut Vec<u8>,
    must_fit: bool,
) -> Result<(), DoesNotFit> {
    let Some(mut pipe) = pipe else { return Ok(()) };
    let mut chunk = [0; 4096];
    while let Ok(length @ 1..) = pipe.read(&mut chunk).await {
        let fits = length.min(MAX_STDOUT - buffer.len());
        buffer.extend_from_slice(&chunk[..fits]);
        if fits < length && must_fit {
            return Err(DoesNotFit);
        }
    }
    Ok(())
}

/// Reads the output and keeps its end.
async fn read_end(pipe: Option<impl AsyncRead + Unpin>, buffer: &mut Vec<u8>) {
    let Some(mut pipe) = pipe else { return };
    let mut chunk = [0; 4096];
    while let Ok(length @ 1..) = pipe.read(&mut chunk).await {
        buffer.extend_from_slice(&chunk[..length]);
        buffer.drain(..buffer.len().saturating_sub(MAX_STDERR));
    }
}

/// The end of a plugin's log, for an error.
fn stderr_text(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let text = text.trim();
    let skipped = text.chars().count().saturating_sub(MAX_STDERR_TEXT);
    text.chars().skip(skipped).collect()
}
