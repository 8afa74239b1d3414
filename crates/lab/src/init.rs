//! The init process (pid 1) of a machine: enters its root file system, starts and signals components on request, and
//! reaps children. When it is killed, the kernel kills every other process of the machine.

use std::{
    collections::BTreeMap,
    fs::{self, OpenOptions},
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use nix::{
    errno::Errno,
    sys::{
        signal::{SigSet, Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{Pid, dup2_stderr, dup2_stdout, sethostname, setsid},
};
use serde::{Deserialize, Serialize};

use crate::{progress::print_progress, rootfs::RootFs};

/// The socket on which init listens, inside the machine.
pub const SOCKET: &str = "/run/lab/init.sock";

/// Everything that init needs to start a machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MachineSpec {
    pub hostname: String,
    pub rootfs: RootFs,
    /// The log of init itself, a path of the host.
    pub log: PathBuf,
}

/// A long-running program of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Component {
    pub name: String,
    pub command: Vec<String>,
    pub environment: BTreeMap<String, String>,
    /// A path inside the machine.
    pub log: PathBuf,
    /// What follows when it exits by itself.
    #[serde(default)]
    pub on_exit: OnExit,
}

/// What follows when a component exits without a signal of the lab.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum OnExit {
    /// It stays dead until `up`.
    #[default]
    Stay,
    /// Init starts it again, as a Deployment does.
    Restart,
}

/// A request to init, sent as one line of JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum InitRequest {
    /// Starts the component, or continues it if it is paused.
    Start(Component),
    Signal {
        name: String,
        number: i32,
    },
    List,
}

/// The response of init, sent as one line of JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum InitResponse {
    Done,
    Components(BTreeMap<String, ComponentState>),
    Failed(String),
}

/// The state of a component.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ComponentState {
    Running {
        /// The pid inside the machine.
        pid: i32,
    },
    #[serde(rename = "ended")]
    Exited {
        /// The exit code or signal, as text.
        #[serde(rename = "how")]
        reason: String,
    },
}

/// How long init waits before it restarts a component.
const RESTART_DELAY: Duration = Duration::from_secs(1);

type ComponentTable = Arc<Mutex<Components>>;

#[derive(Default)]
struct Components {
    states: BTreeMap<String, ComponentState>,
    /// The components to restart when they exit. A signal from outside that ends a component removes it.
    restarted: BTreeMap<String, Component>,
}

/// Runs as pid 1; returns only on failure.
pub fn run(machine: &MachineSpec) -> Result<()> {
    setsid().context("create a session")?;
    // Blocked in every thread, so that only the reaper receives it; std clears the mask of child processes.
    let mut children = SigSet::empty();
    children.add(Signal::SIGCHLD);
    children.thread_block().context("block SIGCHLD")?;
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&machine.log)
        .with_context(|| format!("open {}", machine.log.display()))?;
    machine.rootfs.enter()?;
    sethostname(&machine.hostname).context("set the host name")?;
    let up = Command::new("/usr/sbin/ip").args(["link", "set", "lo", "up"]).status().context("run ip")?;
    if !up.success() {
        bail!("bring lo up: {up}");
    }
    let components: ComponentTable = Arc::default();
    let listener = UnixListener::bind(SOCKET).context("listen for requests")?;
    let reaper = Arc::clone(&components);
    thread::spawn(move || reap(&children, &reaper));

    std::io::stdout().write_all(b"ready\n").context("report readiness")?;
    std::io::stdout().flush().context("report readiness")?;
    dup2_stderr(&log).context("redirect stderr to the log")?;
    dup2_stdout(&log).context("redirect stdout to the log")?;
    for stream in listener.incoming().flatten() {
        let components = Arc::clone(&components);
        thread::spawn(move || serve(stream, &components));
    }
    Ok(())
}

fn reap(children: &SigSet, registry: &ComponentTable) {
    loop {
        // One SIGCHLD may stand for several children.
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => break,
                Ok(status) => record_exit(status, registry),
                Err(_) => {}
            }
        }
        if children.wait().is_err() {
            return;
        }
    }
}

fn record_exit(status: WaitStatus, registry: &ComponentTable) {
    let Some(pid) = status.pid() else { return };
    let reason = match status {
        WaitStatus::Exited(_, code) => format!("exited with {code}"),
        WaitStatus::Signaled(_, signal, _) => format!("killed by {signal}"),
        _ => return,
    };
    let mut components = registry.lock().unwrap_or_else(PoisonError::into_inner);
    let exited = ComponentState::Running { pid: pid.as_raw() };
    let Some(name) =
        components.states.iter().find(|(_, state)| **state == exited).map(|(name, _)| name.clone())
    else {
        return;
    };
    if let Some(component) = components.restarted.get(&name).cloned() {
        let registry = Arc::clone(registry);
        thread::spawn(move || restart(component, &registry));
    }
    components.states.insert(name, ComponentState::Exited { reason });
}

fn restart(component: Component, registry: &ComponentTable) {
    #[allow(clippy::disallowed_methods, reason = "a pause between restarts, not a synchronization")]
    thread::sleep(RESTART_DELAY);
    let name = component.name.clone();
    // A request may have stopped or started it meanwhile.
    let stopped = !registry.lock().unwrap_or_else(PoisonError::into_inner).restarted.contains_key(&name);
    if stopped {
        return;
    }
    match handle(InitRequest::Start(component), registry) {
        Ok(_) => print_progress(format!("restarted {name}")),
        Err(e) => print_progress(format!("restart {name}: {e:#}")),
    }
}

fn serve(stream: UnixStream, registry: &ComponentTable) {
    let response = match read(&stream).and_then(|request| handle(request, registry)) {
        Ok(response) => response,
        Err(e) => InitResponse::Failed(format!("{e:#}")),
    };
    if let Ok(mut line) = serde_json::to_vec(&response) {
        line.push(b'\n');
        // The client may have disconnected.
        let _ = (&stream).write_all(&line);
    }
}

fn read(stream: &UnixStream) -> Result<InitRequest> {
    stream.set_read_timeout(Some(Duration::from_secs(5))).context("set the read timeout")?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).context("read the request")?;
    serde_json::from_str(&line).context("parse the request")
}

fn handle(request: InitRequest, registry: &ComponentTable) -> Result<InitResponse> {
    // Held while a child is started: the reaper must not see one that is not registered yet.
    let mut components = registry.lock().unwrap_or_else(PoisonError::into_inner);
    match request {
        InitRequest::Start(component) => {
            if component.on_exit == OnExit::Restart {
                components.restarted.insert(component.name.clone(), component.clone());
            }
            match components.states.get(&component.name) {
                // Continues a paused component.
                Some(ComponentState::Running { pid }) => {
                    kill(Pid::from_raw(*pid), Signal::SIGCONT)
                        .with_context(|| format!("continue {}", component.name))?;
                }
                Some(ComponentState::Exited { .. }) | None => {
                    let pid = start(&component)?;
                    components.states.insert(component.name, ComponentState::Running { pid });
                }
            }
            Ok(InitResponse::Done)
        }
        InitRequest::Signal { name, number } => {
            let signal = Signal::try_from(number).with_context(|| format!("signal {number}"))?;
            if !matches!(signal, Signal::SIGSTOP | Signal::SIGCONT) {
                components.restarted.remove(&name);
            }
            let Some(ComponentState::Running { pid }) = components.states.get(&name) else {
                bail!("{name} is not running")
            };
            kill(Pid::from_raw(*pid), signal).with_context(|| format!("signal {name}"))?;
            Ok(InitResponse::Done)
        }
        InitRequest::List => Ok(InitResponse::Components(components.states.clone())),
    }
}

fn start(component: &Component) -> Result<i32> {
    let Some((program, arguments)) = component.command.split_first() else { bail!("the command is empty") };
    if let Some(dir) = component.log.parent() {
        fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    }
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&component.log)
        .with_context(|| format!("open {}", component.log.display()))?;
    // Dropping the handle neither waits nor kills; the reaper collects the exit status.
    let child = Command::new(program)
        .args(arguments)
        .env_clear()
        .env("PATH", PATH)
        .env("HOME", "/root")
        .envs(&component.environment)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("duplicate the log's descriptor")?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("start {program}"))?;
    i32::try_from(child.id()).context("the pid does not fit an i32")
}

/// The PATH inside a machine.
pub const PATH: &str = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Sends a request to the init with this pid of the host.
pub fn send(init: i32, request: &InitRequest) -> Result<InitResponse> {
    let path = format!("/proc/{init}/root{SOCKET}");
    let stream = UnixStream::connect(Path::new(&path)).context("connect to the machine's init")?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).context("set the read timeout")?;
    let mut line = serde_json::to_vec(request).context("serialize the request")?;
    line.push(b'\n');
    (&stream).write_all(&line).context("send the request")?;
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).context("read the response")?;
    match serde_json::from_str(&line).context("parse the response")? {
        InitResponse::Failed(reason) => bail!(reason),
        response => Ok(response),
    }
}
