//! One lab: its machines, and bringing them up and down.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::{fs::MetadataExt as _, net::UnixStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use k8s_openapi::api::core::v1::Node as KubeNode;
use kube::{
    Api, Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::{
    address::{API_PORT, CONTROL_PLANE, MAX_NODES, Node},
    bootstrap::{self, Scope},
    cgroup::Group,
    control_plane, image,
    machine::{Machine, lab_binary},
    node,
    pki::{Pki, write_secret},
    place::{self, Name},
    program::{CNI_PLUGINS, Programs},
    progress::print_progress,
    switch::{self, Cable},
    wait,
};

/// A lab by its name. Making the value touches nothing.
#[derive(Clone, Debug)]
pub struct Lab {
    pub name: Name,
    pub(crate) dir: PathBuf,
    pub(crate) group: Group,
}

/// How a lab is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    ControlPlaneOnly,
    /// At least that many nodes.
    Nodes(u8),
}

/// What is written down about a lab.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Record {
    pub nodes: Vec<NodeRecord>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NodeRecord {
    pub name: String,
    pub number: u8,
    /// Partitioned; a reboot does not mend a cable.
    #[serde(default)]
    pub cut: bool,
}

impl NodeRecord {
    pub fn address(&self) -> Node {
        Node(self.number)
    }
}

impl Record {
    /// Adds a node with the first free number.
    pub fn add(&mut self) -> Result<NodeRecord> {
        let number = (1..=MAX_NODES).find(|n| self.nodes.iter().all(|node| node.number != *n));
        let number = number.with_context(|| format!("a lab has at most {MAX_NODES} nodes"))?;
        let node = NodeRecord { name: format!("node-{number}"), number, cut: false };
        self.nodes.push(node.clone());
        Ok(node)
    }
}

/// Held while a lab is being changed.
pub(crate) struct Lock {
    _file: Flock<File>,
    path: PathBuf,
}

impl Lab {
    pub fn new(name: Name) -> Self {
        Self { dir: place::lab(&name), group: Group::of_lab(&name), name }
    }

    pub fn control_plane(&self) -> Machine {
        Machine::new(&self.dir, &self.group, control_plane::NAME)
    }

    pub fn node(&self, name: &str) -> Machine {
        Machine::new(&self.dir, &self.group, name)
    }

    /// The names of its nodes.
    pub fn nodes(&self) -> Vec<String> {
        self.record().map(|record| record.nodes.into_iter().map(|n| n.name).collect()).unwrap_or_default()
    }

    /// A machine that exists, by name.
    pub fn machine(&self, name: &str) -> Result<Machine> {
        if name == control_plane::NAME || self.nodes().iter().any(|n| n == name) {
            return Ok(self.node(name));
        }
        let known = self.nodes().join(", ");
        bail!("lab {} has no machine {name}; it has control-plane, {known}", self.name)
    }

    /// The kubeconfig of an administrator, for programs of this machine.
    pub fn kubeconfig(&self) -> PathBuf {
        self.dir.join("kubeconfig")
    }

    pub(crate) fn pki(&self) -> Pki {
        Pki::at(self.dir.join("pki"))
    }

    /// Brings everything up that is not, and waits until it answers.
    pub async fn up(&self, topology: Topology) -> Result<()> {
        require_root()?;
        let programs = Programs::prepare()?;
        let _lock = self.lock()?;
        let record = self.prepare(topology)?;
        if !record.nodes.is_empty() {
            self.keep_image(&image::lab_image(&programs)?, "lab")?;
        }
        self.start_control_plane(&programs)?;
        self.start_nodes(&record, &programs)?;
        self.finish(&record).await
    }

    pub(crate) fn prepare(&self, topology: Topology) -> Result<Record> {
        fs::create_dir_all(&self.dir).with_context(|| format!("make {}", self.dir.display()))?;
        let mut record = if self.dir.join("lab.json").exists() { self.record()? } else { Record::default() };
        if let Topology::Nodes(count) = topology {
            while record.nodes.len() < usize::from(count) {
                record.add()?;
            }
        }
        self.save(&record)?;
        Ok(record)
    }

    fn start_control_plane(&self, programs: &Programs) -> Result<()> {
        let machine = self.control_plane();
        control_plane::configure(&machine, &self.pki())?;
        self.power_on(&machine, programs)?;
        switch::build(&machine)?;
        for component in control_plane::foundation() {
            machine.run(&component)?;
        }
        self.start_forwarder(&machine)
    }

    /// Powers nodes on, all at the same time, as far as they come without an API server.
    pub(crate) fn start_nodes(&self, record: &Record, programs: &Programs) -> Result<()> {
        let control_plane = self.control_plane();
        for node in &record.nodes {
            // Certificates are made one after another: they share a directory.
            node::configure(&self.node(&node.name), node.address(), &self.pki(), programs)?;
        }
        thread::scope(|scope| {
            let starts: Vec<_> = record
                .nodes
                .iter()
                .map(|node| scope.spawn(|| self.start_node(&control_plane, node, programs)))
                .collect();
            starts.into_iter().try_for_each(|s| s.join().unwrap_or_else(|_| bail!("a node's start panicked")))
        })?;
        let addresses: Vec<Node> = record.nodes.iter().map(NodeRecord::address).collect();
        switch::route(&control_plane, &addresses)?;
        for node in &record.nodes {
            let others: Vec<Node> = addresses.iter().copied().filter(|a| *a != node.address()).collect();
            switch::route(&self.node(&node.name), &others)?;
        }
        Ok(())
    }

    fn start_node(&self, control_plane: &Machine, record: &NodeRecord, programs: &Programs) -> Result<()> {
        let machine = self.node(&record.name);
        self.power_on(&machine, programs)?;
        switch::plug(control_plane, &machine, record.address())?;
        if record.cut {
            switch::set(control_plane, record.address(), Cable::Cut)?;
        }
        node::volatile(&machine)?;
        let [containerd, ..] = node::components(&machine, record.address());
        machine.run(&containerd)?;
        self.import_images(&machine)
    }

    /// What needs an API server: controllers, kubelets, multus; then waits for all of them.
    pub(crate) async fn finish(&self, record: &Record) -> Result<()> {
        let client = self.client().await?;
        wait::until(Duration::from_secs(60), "the API server to be ready", || async {
            Ok((text(&client, "/readyz").await? == "ok").then_some(()))
        })
        .await
        .with_context(|| self.tail(&self.control_plane(), "kube-apiserver"))?;
        let control_plane = self.control_plane();
        for component in control_plane::controllers() {
            control_plane.run(&component)?;
        }
        let scope = if record.nodes.is_empty() { Scope::ControlPlane } else { Scope::WithNodes };
        // Roles of the API server's own come a moment after it is ready; a first refusal is no failure.
        wait::until(Duration::from_secs(20), "the cluster's own objects", || async {
            bootstrap::apply(&client, scope).await.map(Some)
        })
        .await?;
        for node in &record.nodes {
            let machine = self.node(&node.name);
            for component in node::components(&machine, node.address()) {
                machine.run(&component)?;
            }
        }
        self.wait_ready(&client, record).await
    }

    async fn wait_ready(&self, client: &Client, record: &Record) -> Result<()> {
        let nodes: Api<KubeNode> = Api::all(client.clone());
        for node in &record.nodes {
            let machine = self.node(&node.name);
            wait::until(Duration::from_secs(60), &format!("multus on {}", node.name), || async {
                let root = format!("/proc/{}/root", machine.init().context("the node is off")?);
                // The files of a daemon that was killed are still there; nobody answers on its socket.
                let answers = |path: &str| UnixStream::connect(Path::new(&root).join(path)).is_ok();
                let configured = Path::new(&root).join("etc/cni/net.d/00-multus.conf").exists();
                let up = answers("run/multus/multus.sock") && answers("run/containerd/containerd.sock");
                Ok((configured && up).then_some(()))
            })
            .await
            .with_context(|| self.tail(&machine, "multus"))?;
            wait::until(Duration::from_secs(60), &format!("the kubelet on {}", node.name), || async {
                machine
                    .output(&["busybox", "wget", "-q", "-O", "-", "http://127.0.0.1:10248/healthz"])
                    .map(Some)
            })
            .await
            .with_context(|| self.tail(&machine, "kubelet"))?;
            let boot = machine.boot_id()?;
            wait::until(Duration::from_secs(60), &format!("{} to be Ready", node.name), || async {
                Ok(nodes.get_opt(&node.name).await?.filter(|n| is_ready(n, &boot)).map(|_| ()))
            })
            .await
            .with_context(|| self.tail(&machine, "kubelet"))?;
        }
        let asked: &[&str] = &["busybox", "nslookup", "kubernetes.default.svc.cluster.local"];
        let (machine, server) = match record.nodes.first() {
            Some(node) => (self.node(&node.name), crate::address::DNS_SERVICE.to_owned()),
            None => (self.control_plane(), "127.0.0.1".to_owned()),
        };
        let argv: Vec<&str> = asked.iter().copied().chain([server.as_str()]).collect();
        wait::until(Duration::from_secs(30), "DNS to answer", || async { machine.output(&argv).map(Some) })
            .await
            .with_context(|| self.tail(&self.control_plane(), "coredns"))
            .map(|_| ())
    }

    /// The end of a component's log, for a failure's text.
    fn tail(&self, machine: &Machine, component: &str) -> String {
        let last = machine.tail(component);
        format!("the end of {component}'s log on {} (lab {}):\n{last}", machine.name, self.name)
    }

    fn power_on(&self, machine: &Machine, programs: &Programs) -> Result<()> {
        let read_only = [
            (programs.root().to_path_buf(), "/lab/programs".into()),
            (self.pki().dir().to_path_buf(), "/etc/kubernetes/pki".into()),
        ];
        // A node has no business with the lab's keys.
        let pki = if machine.name == control_plane::NAME { 2 } else { 1 };
        // CNI plugins have a place of their own; here they would hide iproute2's `bridge`.
        let names: Result<Vec<(String, PathBuf)>> = Programs::names()
            .filter(|name| !CNI_PLUGINS.contains(name))
            .map(|name| Ok((name.to_owned(), Path::new("/lab/programs").join(programs.relative(name)?))))
            .collect();
        let mut names = names?;
        names.extend(["ping", "nslookup", "nc", "wget"].map(|n| (n.to_owned(), "/bin/busybox".into())));
        machine.start(&read_only[..pki], &names)
    }

    fn door(&self) -> Group {
        self.group.child("door")
    }

    /// Whether programs of this machine can reach the API server.
    pub(crate) fn forwarder_is_running(&self) -> bool {
        !self.door().processes().is_empty()
    }

    /// Every process of the lab, as numbered on this machine.
    pub fn processes(&self) -> Vec<i32> {
        self.group.processes()
    }

    /// The forwarder's processes.
    pub fn forwarder_processes(&self) -> Vec<i32> {
        self.door().processes()
    }

    /// Starts the forwarder, unless it runs, and writes the kubeconfig.
    fn start_forwarder(&self, control_plane: &Machine) -> Result<()> {
        let port_file = self.dir.join("port");
        let old = fs::read_to_string(&port_file).unwrap_or_default();
        // One that was started for an earlier control plane leads into a network that is gone.
        let astray = self
            .door()
            .processes()
            .iter()
            .any(|pid| network_of(*pid) != control_plane.init().and_then(network_of));
        if !self.forwarder_is_running() || astray || old.is_empty() {
            self.door().destroy()?;
            self.door().create()?;
            remove_file(&port_file)?;
            let log = File::create(self.dir.join("door.log")).context("make the forwarder's log")?;
            let init = control_plane.init().context("the control plane is off")?;
            let mut child = Command::new(lab_binary()?)
                .arg("forward")
                .arg(self.door().root().trim_start_matches('/'))
                .arg(format!("/proc/{init}/ns/net"))
                .arg(format!("{}:{API_PORT}", CONTROL_PLANE.0))
                .arg(&port_file)
                .arg(if old.is_empty() { "0" } else { old.trim() })
                .stdin(Stdio::null())
                .stdout(log.try_clone()?)
                .stderr(log)
                .spawn()
                .context("start the forwarder")?;
            // It outlives this program; if it ends before, nobody must be left unburied.
            thread::spawn(move || child.wait());
        }
        let port = wait::blocking(Duration::from_secs(5), "the forwarder to listen", || {
            Ok(fs::read_to_string(&port_file).ok().filter(|text| !text.is_empty()))
        })?;
        let config = self.pki().kubeconfig("admin", &format!("https://127.0.0.1:{}", port.trim()))?;
        write_secret(&self.kubeconfig(), &config)
    }

    /// A client for programs of this machine, as administrator.
    pub async fn client(&self) -> Result<Client> {
        Ok(Client::try_from(self.client_config().await?)?)
    }

    /// The configuration behind [`Lab::client`].
    pub async fn client_config(&self) -> Result<Config> {
        crate::install_crypto();
        let file = Kubeconfig::read_from(self.kubeconfig()).context("read the kubeconfig: is the lab up?")?;
        let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
        config.read_timeout = Some(Duration::from_secs(60));
        config.headers.push((http::header::USER_AGENT, http::HeaderValue::from_static("lab")));
        Ok(config)
    }

    /// Takes everything away, whatever state it is in. Nothing there is success.
    pub fn down(&self) -> Result<()> {
        require_root()?;
        let lock = self.lock()?;
        self.group.destroy()?;
        place::remove(&self.dir)?;
        remove_file(&lock.path)?;
        drop(lock);
        // Another lab may still be in it.
        let _ = fs::remove_dir(place::labs());
        Ok(())
    }

    pub(crate) fn record(&self) -> Result<Record> {
        let text =
            fs::read(self.dir.join("lab.json")).with_context(|| format!("lab {} is not up", self.name))?;
        serde_json::from_slice(&text).context("understand lab.json")
    }

    pub(crate) fn save(&self, record: &Record) -> Result<()> {
        write_secret(&self.dir.join("lab.json"), &serde_json::to_string_pretty(record)?)
    }

    /// One change at a time.
    pub(crate) fn lock(&self) -> Result<Lock> {
        let path = place::labs().join(format!(".{}.lock", self.name));
        loop {
            place::make_labs().with_context(|| format!("make {}", place::labs().display()))?;
            let file = match OpenOptions::new().write(true).create(true).truncate(false).open(&path) {
                // The directory may have gone with the last lab in between.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                other => other.with_context(|| format!("make {}", path.display()))?,
            };
            let file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(file) => file,
                Err((file, _)) => {
                    print_progress(format!("another lab command is changing {}; waiting for it", self.name));
                    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| e).context("lock the lab")?
                }
            };
            // `down` removes the file: a lock on a file that is gone protects nothing.
            let same = fs::metadata(&path).is_ok_and(|m| file.metadata().is_ok_and(|f| f.ino() == m.ino()));
            if same {
                return Ok(Lock { _file: file, path });
            }
        }
    }
}

/// Which network namespace a process lives in.
fn network_of(pid: i32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/net")).ok()
}

/// Asks the API server for a plain text.
pub(crate) async fn text(client: &Client, path: &str) -> Result<String> {
    let request = http::Request::get(path).body(Vec::new()).context("build a request")?;
    let answer = tokio::time::timeout(Duration::from_secs(5), client.request_text(request)).await;
    answer.with_context(|| format!("{path}: no answer"))?.with_context(|| format!("ask for {path}"))
}

/// Ready, and said so since the machine was powered on.
fn is_ready(node: &KubeNode, boot: &str) -> bool {
    let Some(status) = &node.status else { return false };
    let conditions = status.conditions.as_deref().unwrap_or_default();
    conditions.iter().any(|c| c.type_ == "Ready" && c.status == "True")
        && status.node_info.as_ref().is_some_and(|info| info.boot_id == boot)
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

pub(crate) fn require_root() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("the lab makes namespaces, links and mounts: run it as root, for instance with sudo");
    }
    Ok(())
}
