//! A machine of the lab as seen from outside: start it, kill it, run things in it.

use std::{
    collections::BTreeMap,
    env,
    ffi::OsStr,
    fs::{self, File},
    io::{BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sched::{CloneFlags, setns, unshare},
    sys::signal::Signal,
};

use crate::{
    cgroup::Group,
    init::{self, Answer, Component, Request, State},
    root::Root,
    wait,
};

/// One machine: a network, mount, UTS, IPC and pid namespace, and what runs in it.
#[derive(Clone, Debug)]
pub struct Machine {
    pub name: String,
    dir: PathBuf,
    pub group: Group,
}

impl Machine {
    /// The machine `name` below a lab's directory and group. Nothing is touched.
    pub fn new(lab_dir: &Path, lab: &Group, name: &str) -> Self {
        Self { name: name.to_owned(), dir: lab_dir.join("machines").join(name), group: lab.child(name) }
    }

    /// What survives a reboot.
    pub fn disk(&self) -> PathBuf {
        self.dir.join("disk")
    }

    /// The log of one component, on this machine's file system.
    pub fn log(&self, component: &str) -> PathBuf {
        self.disk().join("var/log/lab").join(format!("{component}.log"))
    }

    /// The pid of its first process, if it runs.
    pub fn init(&self) -> Option<i32> {
        self.group.init()
    }

    fn require(&self) -> Result<i32> {
        self.init().with_context(|| format!("{} is not running: lab up starts it", self.name))
    }

    /// Powers it on, unless it is.
    pub fn start(&self, read_only: &[(PathBuf, PathBuf)], programs: &[(String, PathBuf)]) -> Result<()> {
        if self.init().is_some() {
            return Ok(());
        }
        // What a killed start may have left.
        self.group.destroy()?;
        self.group.create()?;
        fs::create_dir_all(self.disk()).with_context(|| format!("make {}", self.disk().display()))?;
        let machine = init::Machine {
            hostname: self.name.clone(),
            root: Root {
                at: self.dir.join("root"),
                disk: self.disk(),
                read_only: read_only.to_vec(),
                programs: programs.to_vec(),
                group: self.group.root().trim_start_matches('/').to_owned(),
                boot_id: fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim().to_owned(),
            },
            log: self.dir.join("init.log"),
        };
        let file = self.dir.join("machine.json");
        fs::write(&file, serde_json::to_vec_pretty(&machine)?).context("write machine.json")?;
        let errors = self.dir.join("start.log");
        let status = Command::new(lab_binary()?)
            .arg("machine")
            .arg(self.group.root().trim_start_matches('/'))
            .arg(&file)
            .stdin(Stdio::null())
            .stderr(File::create(&errors)?)
            .status()
            .context("run lab machine")?;
        if !status.success() {
            let reason = fs::read_to_string(&errors).unwrap_or_default();
            bail!("start {}: {}", self.name, reason.trim());
        }
        Ok(())
    }

    /// What the machine's `/proc` says of this boot.
    pub fn boot_id(&self) -> Result<String> {
        let path = format!("/proc/{}/root/proc/sys/kernel/random/boot_id", self.require()?);
        let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        Ok(text.trim().to_owned())
    }

    /// Powers it off, hard: everything in it dies, its links and mounts are gone, the disk stays.
    pub fn kill(&self) -> Result<()> {
        self.group.destroy()
    }

    /// Starts a component, unless it runs.
    pub fn run(&self, component: &Component) -> Result<()> {
        init::ask(self.require()?, &Request::Start(component.clone()))
            .with_context(|| format!("start {} on {}", component.name, self.name))
            .map(|_| ())
    }

    /// Sends a signal to a running component.
    pub fn signal(&self, component: &str, signal: Signal) -> Result<()> {
        let request = Request::Signal { name: component.to_owned(), number: signal as i32 };
        init::ask(self.require()?, &request)
            .with_context(|| format!("signal {component} on {}", self.name))
            .map(|_| ())
    }

    /// How its components are; empty when it is off.
    pub fn components(&self) -> Result<BTreeMap<String, State>> {
        let Some(init) = self.init() else {
            return Ok(BTreeMap::new());
        };
        match init::ask(init, &Request::List)? {
            Answer::Components(components) => Ok(components),
            other => bail!("{} answered {other:?} to List", self.name),
        }
    }

    /// Ends a component: politely first, then not.
    pub fn stop(&self, component: &str) -> Result<()> {
        let ended = || {
            let running = matches!(self.components()?.get(component), Some(State::Running { .. }));
            Ok((!running).then_some(()))
        };
        if ended()?.is_some() {
            return Ok(());
        }
        // Stopped processes take no SIGTERM.
        let _ = self.signal(component, Signal::SIGCONT);
        let _ = self.signal(component, Signal::SIGTERM);
        let what = format!("{component} on {} to end", self.name);
        if wait::blocking(Duration::from_secs(5), &what, ended).is_ok() {
            return Ok(());
        }
        let _ = self.signal(component, Signal::SIGKILL);
        wait::blocking(Duration::from_secs(5), &what, ended)
    }

    /// A command inside the machine: its files, its network, its processes.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        let mut command = self.enter(&["--mount", "--uts", "--ipc", "--net", "--pid"], program)?;
        command
            .env_clear()
            .env("PATH", init::PATH)
            .env("HOME", "/root")
            .env("TERM", env::var_os("TERM").unwrap_or_else(|| "dumb".into()));
        Ok(command)
    }

    /// A command with this machine's files in the other one's network.
    pub fn command_in_network(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        self.enter(&["--net"], program)
    }

    /// Through `lab enter`, so that it is born in the machine's cgroup and ends with the lab.
    fn enter(&self, namespaces: &[&str], program: impl AsRef<OsStr>) -> Result<Command> {
        let mut command = Command::new(lab_binary()?);
        command
            .arg("enter")
            .arg(self.group.root().trim_start_matches('/'))
            .arg(self.require()?.to_string())
            .args(["nsenter", &format!("--target={}", self.require()?)])
            .args(namespaces)
            .arg("--")
            .arg(program);
        Ok(command)
    }

    /// Runs a command inside and returns what it printed; a failure carries its messages.
    pub fn output<S: AsRef<OsStr>>(&self, argv: &[S]) -> Result<String> {
        let Some((program, arguments)) = argv.split_first() else { bail!("nothing to run") };
        capture(self.command(program)?.args(arguments))
    }

    /// The network namespace, to be entered by a thread.
    pub fn network(&self) -> Result<File> {
        let path = format!("/proc/{}/ns/net", self.require()?);
        File::open(&path).with_context(|| format!("open {path}"))
    }

    /// Moves the calling thread into the machine's network; threads that it starts follow.
    pub fn enter_network(&self) -> Result<()> {
        setns(self.network()?, CloneFlags::CLONE_NEWNET).context("enter the network namespace")
    }
}

/// Runs a command to its end and returns what it printed.
pub fn capture(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("run {command:?}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let printed = String::from_utf8_lossy(&output.stdout);
        bail!("{command:?}: {}: {}{}", output.status, said.trim(), printed.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The `lab` program: this one, or the one that was built beside this test.
pub fn lab_binary() -> Result<PathBuf> {
    if let Some(path) = env::var_os("PATCHBAY_LAB_BIN") {
        return Ok(path.into());
    }
    let me = env::current_exe().context("find this program")?;
    me.ancestors()
        .skip(1)
        .take(3)
        .map(|dir| dir.join("lab"))
        .chain([me.clone()])
        .find(|path| path.is_file() && path.file_name() == Some(OsStr::new("lab")))
        .context("the lab program is not built: run `cargo build -p lab`")
}

/// `lab machine GROUP FILE`: makes the namespaces and starts the first process in them. Runs before any thread exists.
pub fn power_on(group: &str, file: &Path) -> Result<()> {
    let machine: init::Machine = serde_json::from_slice(&fs::read(file).context("read the machine's file")?)
        .context("understand it")?;
    Group::at(group).enter()?;
    unshare(
        CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWNET
            | CloneFlags::CLONE_NEWUTS
            | CloneFlags::CLONE_NEWIPC
            | CloneFlags::CLONE_NEWPID,
    )
    .context("make the namespaces: this needs root")?;
    let mut first = Command::new(env::current_exe()?)
        .arg("init")
        .arg(file)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("start the first process of {}", machine.hostname))?;
    let stdout = first.stdout.take().context("the first process has no output")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line).context("wait for the first process")?;
    if line.trim() != "ready" {
        let _ = first.wait();
        bail!("the first process ended");
    }
    Ok(())
}

/// `lab enter GROUP PID COMMAND…`: becomes the command, as a process of the machine whose first process is PID.
pub fn enter(group: &str, init: i32, command: &[String]) -> Result<()> {
    let group = Group::at(group);
    group.enter()?;
    // A pid that has come to mean another process must not turn this into a command for our own network.
    let ours = fs::read_link("/proc/self/ns/net").context("look at the own network")?;
    let theirs = fs::read_link(format!("/proc/{init}/ns/net")).context("look at the machine's network")?;
    if group.init() != Some(init) || ours == theirs {
        bail!("the machine has just ended");
    }
    let Some((program, arguments)) = command.split_first() else { bail!("nothing to run") };
    Err(Command::new(program).args(arguments).exec()).with_context(|| format!("run {program}"))
}

/// `lab init FILE`: the first process of a machine.
pub fn first_process(file: &Path) -> Result<()> {
    let machine: init::Machine = serde_json::from_slice(&fs::read(file).context("read the machine's file")?)
        .context("understand it")?;
    init::run(&machine)
}
