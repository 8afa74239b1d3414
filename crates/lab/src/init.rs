//! The first process of a machine: enters its file system, starts and signals components on request, reaps what
//! dies. When it is killed the kernel ends everything else in the machine.

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

use crate::root::Root;

/// Where the first process listens, inside the machine.
pub const SOCKET: &str = "/run/lab/init.sock";

/// What a machine is started with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    pub hostname: String,
    pub root: Root,
    /// Its own messages, on this machine's file system.
    pub log: PathBuf,
}

/// A program that runs in a machine for as long as it lives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Component {
    pub name: String,
    pub command: Vec<String>,
    pub environment: BTreeMap<String, String>,
    /// Inside the machine.
    pub log: PathBuf,
}

/// A question to the first process; one line of JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Request {
    /// Starts it, or wakes it if it is paused.
    Start(Component),
    Signal {
        name: String,
        number: i32,
    },
    List,
}

/// The answer; one line of JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Answer {
    Done,
    Components(BTreeMap<String, State>),
    Failed(String),
}

/// How a component is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum State {
    Running {
        /// As numbered inside the machine.
        pid: i32,
    },
    Ended {
        how: String,
    },
}

type Register = Arc<Mutex<BTreeMap<String, State>>>;

/// Runs as the first process; returns only on failure.
pub fn run(machine: &Machine) -> Result<()> {
    setsid().context("leave the terminal")?;
    // Blocked in every thread, so that the reaper alone takes it; std clears the mask of what it starts.
    let mut children = SigSet::empty();
    children.add(Signal::SIGCHLD);
    children.thread_block().context("block SIGCHLD")?;
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&machine.log)
        .with_context(|| format!("open {}", machine.log.display()))?;
    machine.root.enter()?;
    sethostname(&machine.hostname).context("set the host name")?;
    let up = Command::new("/usr/sbin/ip").args(["link", "set", "lo", "up"]).status().context("run ip")?;
    if !up.success() {
        bail!("bring lo up: {up}");
    }
    let register: Register = Arc::default();
    let listener = UnixListener::bind(SOCKET).context("listen for requests")?;
    let reaper = Arc::clone(&register);
    thread::spawn(move || reap(&children, &reaper));

    std::io::stdout().write_all(b"ready\n").context("say ready")?;
    std::io::stdout().flush().context("say ready")?;
    dup2_stderr(&log).context("send messages to the log")?;
    dup2_stdout(&log).context("send output to the log")?;
    for stream in listener.incoming().flatten() {
        let register = Arc::clone(&register);
        thread::spawn(move || serve(stream, &register));
    }
    Ok(())
}

fn reap(children: &SigSet, register: &Register) {
    loop {
        // Several children may have ended for one signal.
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => break,
                Ok(status) => note(status, register),
                Err(_) => {}
            }
        }
        if children.wait().is_err() {
            return;
        }
    }
}

fn note(status: WaitStatus, register: &Register) {
    let Some(pid) = status.pid() else { return };
    let how = match status {
        WaitStatus::Exited(_, code) => format!("exited with {code}"),
        WaitStatus::Signaled(_, signal, _) => format!("killed by {signal}"),
        _ => return,
    };
    let mut components = register.lock().unwrap_or_else(PoisonError::into_inner);
    for state in components.values_mut() {
        if *state == (State::Running { pid: pid.as_raw() }) {
            *state = State::Ended { how: how.clone() };
        }
    }
}

fn serve(stream: UnixStream, register: &Register) {
    let answer = match read(&stream).and_then(|request| act(request, register)) {
        Ok(answer) => answer,
        Err(e) => Answer::Failed(format!("{e:#}")),
    };
    if let Ok(mut line) = serde_json::to_vec(&answer) {
        line.push(b'\n');
        // The asker may have gone.
        let _ = (&stream).write_all(&line);
    }
}

fn read(stream: &UnixStream) -> Result<Request> {
    stream.set_read_timeout(Some(Duration::from_secs(5))).context("set a deadline")?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).context("read the request")?;
    serde_json::from_str(&line).context("understand the request")
}

fn act(request: Request, register: &Register) -> Result<Answer> {
    // Held while starting: the reaper must not see a child that is not registered yet.
    let mut components = register.lock().unwrap_or_else(PoisonError::into_inner);
    match request {
        Request::Start(component) => {
            match components.get(&component.name) {
                // One that is paused runs again.
                Some(State::Running { pid }) => {
                    kill(Pid::from_raw(*pid), Signal::SIGCONT)
                        .with_context(|| format!("wake {}", component.name))?;
                }
                Some(State::Ended { .. }) | None => {
                    let pid = start(&component)?;
                    components.insert(component.name, State::Running { pid });
                }
            }
            Ok(Answer::Done)
        }
        Request::Signal { name, number } => {
            let Some(State::Running { pid }) = components.get(&name) else { bail!("{name} is not running") };
            let signal = Signal::try_from(number).with_context(|| format!("signal {number}"))?;
            kill(Pid::from_raw(*pid), signal).with_context(|| format!("signal {name}"))?;
            Ok(Answer::Done)
        }
        Request::List => Ok(Answer::Components(components.clone())),
    }
}

fn start(component: &Component) -> Result<i32> {
    let Some((program, arguments)) = component.command.split_first() else { bail!("nothing to run") };
    if let Some(dir) = component.log.parent() {
        fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
    }
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&component.log)
        .with_context(|| format!("open {}", component.log.display()))?;
    // Dropping the handle neither waits nor kills: the reaper takes care of it.
    let child = Command::new(program)
        .args(arguments)
        .env_clear()
        .env("PATH", PATH)
        .env("HOME", "/root")
        .envs(&component.environment)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("share the log")?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("start {program}"))?;
    i32::try_from(child.id()).context("a pid beyond the kernel's limit")
}

/// Where programs are found inside a machine.
pub const PATH: &str = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Asks the first process of a machine, found by its pid here.
pub fn ask(init: i32, request: &Request) -> Result<Answer> {
    let path = format!("/proc/{init}/root{SOCKET}");
    let stream = UnixStream::connect(Path::new(&path)).context("reach the machine's first process")?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).context("set a deadline")?;
    let mut line = serde_json::to_vec(request).context("write the request")?;
    line.push(b'\n');
    (&stream).write_all(&line).context("send the request")?;
    let mut answer = String::new();
    BufReader::new(&stream).read_line(&mut answer).context("read the answer")?;
    match serde_json::from_str(&answer).context("understand the answer")? {
        Answer::Failed(reason) => bail!(reason),
        answer => Ok(answer),
    }
}
