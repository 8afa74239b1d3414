//! A machine of the lab, seen from the host: start it, kill it, run commands in it.

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
    cgroup::Cgroup,
    init::{self, Component, ComponentState, InitRequest, InitResponse},
    rootfs::RootFs,
    wait,
};

/// A node or the control plane: a network, mount, UTS, IPC and pid namespace with its processes.
#[derive(Clone, Debug)]
pub struct Machine {
    pub name: String,
    dir: PathBuf,
    pub cgroup: Cgroup,
}

impl Machine {
    /// The machine `name` below a lab's directory and cgroup. Changes nothing on the host.
    pub fn new(lab_dir: &Path, lab: &Cgroup, name: &str) -> Self {
        Self { name: name.to_owned(), dir: lab_dir.join("machines").join(name), cgroup: lab.child(name) }
    }

    /// The directory of everything that survives a reboot.
    pub fn disk(&self) -> PathBuf {
        self.dir.join("disk")
    }

    /// The log of a component, as a path of the host.
    pub fn log(&self, component: &str) -> PathBuf {
        self.disk().join("var/log/lab").join(format!("{component}.log"))
    }

    /// The pid of its init on the host, if the machine is running.
    pub fn init(&self) -> Option<i32> {
        self.cgroup.init()
    }

    fn require_init(&self) -> Result<i32> {
        self.init().with_context(|| format!("{} is not running; start it with `lab up`", self.name))
    }

    /// Powers the machine on, unless it is running.
    pub fn start(&self, read_only: &[(PathBuf, PathBuf)], programs: &[(String, PathBuf)]) -> Result<()> {
        if self.init().is_some() {
            return Ok(());
        }
        // An interrupted start may have left processes.
        self.cgroup.destroy()?;
        self.cgroup.create()?;
        fs::create_dir_all(self.disk()).with_context(|| format!("create {}", self.disk().display()))?;
        let machine = init::MachineSpec {
            hostname: self.name.clone(),
            rootfs: RootFs {
                mount_point: self.dir.join("root"),
                disk: self.disk(),
                read_only: read_only.to_vec(),
                programs: programs.to_vec(),
                cgroup: self.cgroup.root().trim_start_matches('/').to_owned(),
                boot_id: fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim().to_owned(),
            },
            log: self.dir.join("init.log"),
        };
        let file = self.dir.join("machine.json");
        fs::write(&file, serde_json::to_vec_pretty(&machine)?).context("write machine.json")?;
        let errors = self.dir.join("start.log");
        let status = Command::new(lab_binary()?)
            .arg("machine")
            .arg(self.cgroup.root().trim_start_matches('/'))
            .arg(&file)
            .stdin(Stdio::null())
            .stderr(File::create(&errors)?)
            .status()
            .context("run lab machine")?;
        if !status.success() {
            let stderr = fs::read_to_string(&errors).unwrap_or_default();
            bail!("start {}: {}", self.name, stderr.trim());
        }
        Ok(())
    }

    /// The machine's boot id.
    pub fn boot_id(&self) -> Result<String> {
        let path = format!("/proc/{}/root/proc/sys/kernel/random/boot_id", self.require_init()?);
        let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        Ok(text.trim().to_owned())
    }

    /// Powers the machine off: kills all its processes, which removes its links and mounts. The disk stays.
    pub fn power_off(&self) -> Result<()> {
        self.cgroup.destroy()
    }

    /// Starts a component unless it is running; continues it if it is paused.
    pub fn start_component(&self, component: &Component) -> Result<()> {
        init::send(self.require_init()?, &InitRequest::Start(component.clone()))
            .with_context(|| format!("start {} on {}", component.name, self.name))
            .map(|_| ())
    }

    /// Sends a signal to a running component.
    pub fn signal_component(&self, component: &str, signal: Signal) -> Result<()> {
        let request = InitRequest::Signal { name: component.to_owned(), number: signal as i32 };
        init::send(self.require_init()?, &request)
            .with_context(|| format!("signal {component} on {}", self.name))
            .map(|_| ())
    }

    /// The state of its components; empty when the machine is off.
    pub fn components(&self) -> Result<BTreeMap<String, ComponentState>> {
        let Some(init) = self.init() else {
            return Ok(BTreeMap::new());
        };
        match init::send(init, &InitRequest::List)? {
            InitResponse::Components(components) => Ok(components),
            other => bail!("unexpected response of {} to List: {other:?}", self.name),
        }
    }

    /// Stops a component: SIGTERM, then SIGKILL after 5 s.
    pub fn stop_component(&self, component: &str) -> Result<()> {
        let exited = || {
            let running = matches!(self.components()?.get(component), Some(ComponentState::Running { .. }));
            Ok((!running).then_some(()))
        };
        if exited()?.is_some() {
            return Ok(());
        }
        // A stopped process does not handle SIGTERM.
        let _ = self.signal_component(component, Signal::SIGCONT);
        let _ = self.signal_component(component, Signal::SIGTERM);
        let what = format!("{component} on {} to exit", self.name);
        if wait::blocking(Duration::from_secs(5), &what, exited).is_ok() {
            return Ok(());
        }
        let _ = self.signal_component(component, Signal::SIGKILL);
        wait::blocking(Duration::from_secs(5), &what, exited)
    }

    /// A command in all of the machine's namespaces.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        let mut command = self.enter(&["--mount", "--uts", "--ipc", "--net", "--pid"], program)?;
        command
            .env_clear()
            .env("PATH", init::PATH)
            .env("HOME", "/root")
            .env("TERM", env::var_os("TERM").unwrap_or_else(|| "dumb".into()));
        Ok(command)
    }

    /// A command with the host's file system in the machine's network namespace.
    pub fn command_in_netns(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        self.enter(&["--net"], program)
    }

    /// Runs through `lab enter`, so that the command starts in the machine's cgroup and `down` kills it.
    fn enter(&self, namespaces: &[&str], program: impl AsRef<OsStr>) -> Result<Command> {
        let mut command = Command::new(lab_binary()?);
        command
            .arg("enter")
            .arg(self.cgroup.root().trim_start_matches('/'))
            .arg(self.require_init()?.to_string())
            .args(["nsenter", &format!("--target={}", self.require_init()?)])
            .args(namespaces)
            .arg("--")
            .arg(program);
        Ok(command)
    }

    /// Runs a command in the machine and returns its output. The error of a failed command carries its stderr.
    pub fn output<S: AsRef<OsStr>>(&self, argv: &[S]) -> Result<String> {
        let Some((program, arguments)) = argv.split_first() else { bail!("the command is empty") };
        capture(self.command(program)?.args(arguments))
    }

    /// The machine's network namespace.
    pub fn netns(&self) -> Result<File> {
        let path = format!("/proc/{}/ns/net", self.require_init()?);
        File::open(&path).with_context(|| format!("open {path}"))
    }

    /// Moves the calling thread, and the threads that it starts later, into the machine's network namespace.
    pub fn enter_netns(&self) -> Result<()> {
        setns(self.netns()?, CloneFlags::CLONE_NEWNET).context("enter the network namespace")
    }
}

/// Runs a command and returns its output. The error of a failed command carries its stderr and stdout.
pub fn capture(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("run {command:?}"))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let stdout = String::from_utf8_lossy(&output.stdout);
        bail!("{command:?}: {}: {}{}", output.status, stderr.trim(), stdout.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The path of the `lab` program: the current one, or the one built beside the current test.
pub fn lab_binary() -> Result<PathBuf> {
    if let Some(path) = env::var_os("PATCHBAY_LAB_BIN") {
        return Ok(path.into());
    }
    let current = env::current_exe().context("find the current program")?;
    current
        .ancestors()
        .skip(1)
        .take(3)
        .map(|dir| dir.join("lab"))
        .chain([current.clone()])
        .find(|path| path.is_file() && path.file_name() == Some(OsStr::new("lab")))
        .context("the lab program is not built: run `cargo build -p lab`")
}

/// `lab machine CGROUP FILE`: creates the namespaces and starts init in them. Must run before any thread exists.
pub fn run_machine(cgroup: &str, file: &Path) -> Result<()> {
    let machine: init::MachineSpec = serde_json::from_slice(&fs::read(file).context("read machine.json")?)
        .context("parse machine.json")?;
    Cgroup::at(cgroup).enter()?;
    unshare(
        CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWNET
            | CloneFlags::CLONE_NEWUTS
            | CloneFlags::CLONE_NEWIPC
            | CloneFlags::CLONE_NEWPID,
    )
    .context("create namespaces; this needs root")?;
    let mut init = Command::new(env::current_exe()?)
        .arg("init")
        .arg(file)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("start the init of {}", machine.hostname))?;
    let stdout = init.stdout.take().context("init has no stdout")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line).context("wait for init")?;
    if line.trim() != "ready" {
        let _ = init.wait();
        bail!("init exited before it was ready");
    }
    Ok(())
}

/// `lab enter CGROUP PID COMMAND…`: executes the command as a process of the machine whose init has this PID.
pub fn run_enter(cgroup: &str, init: i32, command: &[String]) -> Result<()> {
    let cgroup = Cgroup::at(cgroup);
    cgroup.enter()?;
    // If the pid was reused, the command must not run in the host's network namespace.
    let current = fs::read_link("/proc/self/ns/net").context("read the current network namespace")?;
    let target =
        fs::read_link(format!("/proc/{init}/ns/net")).context("read the machine's network namespace")?;
    if cgroup.init() != Some(init) || current == target {
        bail!("the machine has just stopped");
    }
    let Some((program, arguments)) = command.split_first() else { bail!("the command is empty") };
    Err(Command::new(program).args(arguments).exec()).with_context(|| format!("run {program}"))
}

/// `lab init FILE`: the init process of a machine.
pub fn run_init(file: &Path) -> Result<()> {
    let machine: init::MachineSpec = serde_json::from_slice(&fs::read(file).context("read machine.json")?)
        .context("parse machine.json")?;
    init::run(&machine)
}
