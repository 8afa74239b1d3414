//! A lab: its machines, and bringing it up and down.

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
    address::{API_PORT, CONTROL_PLANE, MAX_NODES, NodeAddresses},
    bootstrap::{self, BootstrapScope},
    cgroup::Cgroup,
    control_plane, image,
    machine::{Machine, lab_binary},
    node,
    paths::{self, LabName},
    pki::{Pki, write_secret},
    program::{CNI_PLUGINS, Programs},
    progress::print_progress,
    switch::{self, CableState},
    wait,
};

/// A lab by its name. Creating the value changes nothing on the host.
#[derive(Clone, Debug)]
pub struct Lab {
    pub name: LabName,
    pub(crate) dir: PathBuf,
    pub(crate) cgroup: Cgroup,
}

/// The machines of a lab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    ControlPlaneOnly,
    /// A control plane and at least this many nodes.
    Nodes(u8),
}

/// The contents of `lab.json`: which nodes a lab has.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct LabRecord {
    pub nodes: Vec<NodeRecord>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NodeRecord {
    pub name: String,
    pub number: u8,
    /// The node is disconnected from the network; reboots do not change that.
    #[serde(default, rename = "cut")]
    pub partitioned: bool,
}

impl NodeRecord {
    pub fn addresses(&self) -> NodeAddresses {
        NodeAddresses(self.number)
    }
}

impl LabRecord {
    /// Adds a node with the lowest free number.
    pub fn add(&mut self) -> Result<NodeRecord> {
        let number = (1..=MAX_NODES).find(|n| self.nodes.iter().all(|node| node.number != *n));
        let number = number.with_context(|| format!("a lab has at most {MAX_NODES} nodes"))?;
        let node = NodeRecord { name: format!("node-{number}"), number, partitioned: false };
        self.nodes.push(node.clone());
        Ok(node)
    }
}

/// The exclusive lock of a lab that every change holds.
pub(crate) struct LabLock {
    _file: Flock<File>,
    path: PathBuf,
}

impl Lab {
    pub fn new(name: LabName) -> Self {
        Self { dir: paths::lab_dir(&name), cgroup: Cgroup::of_lab(&name), name }
    }

    pub fn control_plane(&self) -> Machine {
        Machine::new(&self.dir, &self.cgroup, control_plane::NAME)
    }

    pub fn node(&self, name: &str) -> Machine {
        Machine::new(&self.dir, &self.cgroup, name)
    }

    /// The names of the nodes.
    pub fn nodes(&self) -> Vec<String> {
        self.record().map(|record| record.nodes.into_iter().map(|n| n.name).collect()).unwrap_or_default()
    }

    /// An existing machine, by name.
    pub fn machine(&self, name: &str) -> Result<Machine> {
        if name == control_plane::NAME || self.nodes().iter().any(|n| n == name) {
            return Ok(self.node(name));
        }
        let nodes = self.nodes().join(", ");
        bail!("lab {} has no machine {name}; it has control-plane, {nodes}", self.name)
    }

    /// The administrator's kubeconfig, for programs of the host.
    pub fn kubeconfig(&self) -> PathBuf {
        self.dir.join("kubeconfig")
    }

    pub(crate) fn pki(&self) -> Pki {
        Pki::at(self.dir.join("pki"))
    }

    /// Starts every part that is not running, and waits until the cluster is ready.
    pub async fn up(&self, topology: Topology) -> Result<()> {
        require_root()?;
        let programs = Programs::prepare()?;
        let _lock = self.lock()?;
        let record = self.load_or_create_record(topology)?;
        if !record.nodes.is_empty() {
            self.store_image(&image::lab_image(&programs)?, "lab")?;
        }
        self.start_control_plane(&programs)?;
        self.start_nodes(&record, &programs)?;
        self.start_cluster(&record).await
    }

    pub(crate) fn load_or_create_record(&self, topology: Topology) -> Result<LabRecord> {
        fs::create_dir_all(&self.dir).with_context(|| format!("create {}", self.dir.display()))?;
        let mut record =
            if self.dir.join("lab.json").exists() { self.record()? } else { LabRecord::default() };
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
        switch::create_switches(&machine)?;
        for component in control_plane::storage_and_api() {
            machine.start_component(&component)?;
        }
        self.start_forwarder(&machine)
    }

    /// Powers nodes on in parallel and starts what does not need the API server.
    pub(crate) fn start_nodes(&self, record: &LabRecord, programs: &Programs) -> Result<()> {
        let control_plane = self.control_plane();
        for node in &record.nodes {
            // Sequential: certificates share a directory.
            node::configure(&self.node(&node.name), node.addresses(), &self.pki(), programs)?;
        }
        thread::scope(|scope| {
            let starts: Vec<_> = record
                .nodes
                .iter()
                .map(|node| scope.spawn(|| self.start_node(&control_plane, node, programs)))
                .collect();
            starts.into_iter().try_for_each(|s| {
                s.join().unwrap_or_else(|_| bail!("the thread that starts a node panicked"))
            })
        })?;
        let addresses: Vec<NodeAddresses> = record.nodes.iter().map(NodeRecord::addresses).collect();
        switch::add_pod_routes(&control_plane, &addresses)?;
        for node in &record.nodes {
            let others: Vec<NodeAddresses> =
                addresses.iter().copied().filter(|a| *a != node.addresses()).collect();
            switch::add_pod_routes(&self.node(&node.name), &others)?;
        }
        Ok(())
    }

    fn start_node(&self, control_plane: &Machine, record: &NodeRecord, programs: &Programs) -> Result<()> {
        let machine = self.node(&record.name);
        self.power_on(&machine, programs)?;
        switch::connect_node(control_plane, &machine, record.addresses())?;
        if record.partitioned {
            switch::set_cable_state(control_plane, record.addresses(), CableState::Partitioned)?;
        }
        node::write_run_files(&machine)?;
        let [containerd, ..] = node::components(&machine, record.addresses());
        machine.start_component(&containerd)?;
        self.import_images(&machine)
    }

    /// Starts what needs the API server (controllers, kubelets, kube-proxies, multus) and waits until it is ready.
    pub(crate) async fn start_cluster(&self, record: &LabRecord) -> Result<()> {
        let client = self.client().await?;
        wait::until(Duration::from_secs(60), "the API server to be ready", || async {
            Ok((get_text(&client, "/readyz").await? == "ok").then_some(()))
        })
        .await
        .with_context(|| self.tail(&self.control_plane(), "kube-apiserver"))?;
        let control_plane = self.control_plane();
        for component in control_plane::controllers() {
            control_plane.start_component(&component)?;
        }
        let scope =
            if record.nodes.is_empty() { BootstrapScope::ControlPlane } else { BootstrapScope::WithNodes };
        // The API server creates its bootstrap roles a moment after it is ready; until then it may deny requests.
        wait::until(Duration::from_secs(20), "the bootstrap objects to be applied", || async {
            bootstrap::apply(&client, scope).await.map(Some)
        })
        .await?;
        for node in &record.nodes {
            let machine = self.node(&node.name);
            for component in node::components(&machine, node.addresses()) {
                machine.start_component(&component)?;
            }
        }
        self.wait_ready(&client, record).await
    }

    async fn wait_ready(&self, client: &Client, record: &LabRecord) -> Result<()> {
        let nodes: Api<KubeNode> = Api::all(client.clone());
        for node in &record.nodes {
            let machine = self.node(&node.name);
            wait::until(Duration::from_secs(60), &format!("multus on {}", node.name), || async {
                let root = format!("/proc/{}/root", machine.init().context("the node is off")?);
                // A killed daemon leaves its socket file behind, so connect to it.
                let listening = |path: &str| UnixStream::connect(Path::new(&root).join(path)).is_ok();
                let configured = Path::new(&root).join("etc/cni/net.d/00-multus.conf").exists();
                let up = listening("run/multus/multus.sock") && listening("run/containerd/containerd.sock");
                Ok((configured && up).then_some(()))
            })
            .await
            .with_context(|| self.tail(&machine, "multus"))?;
            let [_, kubelet, ..] = node::components(&machine, node.addresses());
            wait::until(Duration::from_secs(60), &format!("the kubelet on {}", node.name), || async {
                // It exits if containerd listens and does not serve CRI yet. Like kubelet.service, start it again.
                machine.start_component(&kubelet)?;
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
        let lookup: &[&str] = &["busybox", "nslookup", "kubernetes.default.svc.cluster.local"];
        let (machine, server) = match record.nodes.first() {
            Some(node) => (self.node(&node.name), crate::address::DNS_SERVICE.to_owned()),
            None => (self.control_plane(), "127.0.0.1".to_owned()),
        };
        let argv: Vec<&str> = lookup.iter().copied().chain([server.as_str()]).collect();
        wait::until(Duration::from_secs(30), "DNS to answer", || async { machine.output(&argv).map(Some) })
            .await
            .with_context(|| self.tail(&self.control_plane(), "coredns"))
            .map(|_| ())
    }

    /// The last lines of a component's log, as context of an error.
    fn tail(&self, machine: &Machine, component: &str) -> String {
        let lines = machine.tail(component);
        format!("last lines of the log of {component} on {} (lab {}):\n{lines}", machine.name, self.name)
    }

    fn power_on(&self, machine: &Machine, programs: &Programs) -> Result<()> {
        let read_only = [
            (programs.root().to_path_buf(), "/lab/programs".into()),
            (self.pki().dir().to_path_buf(), "/etc/kubernetes/pki".into()),
        ];
        // Nodes have no access to the lab's private keys.
        let mounts = if machine.name == control_plane::NAME { &read_only[..] } else { &read_only[..1] };
        // CNI plugins are in /opt/cni/bin; on the PATH they would hide iproute2's `bridge`.
        let names: Result<Vec<(String, PathBuf)>> = Programs::names()
            .filter(|name| !CNI_PLUGINS.contains(name))
            .map(|name| Ok((name.to_owned(), Path::new("/lab/programs").join(programs.relative(name)?))))
            .collect();
        let mut names = names?;
        names.extend(["ping", "nslookup", "nc", "wget"].map(|n| (n.to_owned(), "/bin/busybox".into())));
        machine.start(mounts, &names)
    }

    fn forwarder(&self) -> Cgroup {
        self.cgroup.child("forwarder")
    }

    /// Whether the forwarder to the API server is running.
    pub(crate) fn forwarder_is_running(&self) -> bool {
        !self.forwarder().processes().is_empty()
    }

    /// The pids of all processes of the lab, as pids of the host.
    pub fn processes(&self) -> Vec<i32> {
        self.cgroup.processes()
    }

    /// The pids of the forwarder.
    pub fn forwarder_processes(&self) -> Vec<i32> {
        self.forwarder().processes()
    }

    /// Starts the forwarder unless it is running, and writes the kubeconfig.
    fn start_forwarder(&self, control_plane: &Machine) -> Result<()> {
        let port_file = self.dir.join("port");
        let old = fs::read_to_string(&port_file).unwrap_or_default();
        // A forwarder of an earlier control plane is in a network namespace that no longer exists.
        let stale = self
            .forwarder()
            .processes()
            .iter()
            .any(|pid| netns_of(*pid) != control_plane.init().and_then(netns_of));
        if !self.forwarder_is_running() || stale || old.is_empty() {
            self.forwarder().destroy()?;
            self.forwarder().create()?;
            remove_file(&port_file)?;
            let log = File::create(self.dir.join("forwarder.log")).context("create the forwarder's log")?;
            let init = control_plane.init().context("the control plane is off")?;
            let mut child = Command::new(lab_binary()?)
                .arg("forward")
                .arg(self.forwarder().root().trim_start_matches('/'))
                .arg(format!("/proc/{init}/ns/net"))
                .arg(format!("{}:{API_PORT}", CONTROL_PLANE.0))
                .arg(&port_file)
                .arg(if old.is_empty() { "0" } else { old.trim() })
                .stdin(Stdio::null())
                .stdout(log.try_clone()?)
                .stderr(log)
                .spawn()
                .context("start the forwarder")?;
            // The forwarder outlives this program; if it exits earlier, reap it.
            thread::spawn(move || child.wait());
        }
        let port = wait::blocking(Duration::from_secs(5), "the forwarder to listen", || {
            Ok(fs::read_to_string(&port_file).ok().filter(|text| !text.is_empty()))
        })?;
        let config = self.pki().kubeconfig("admin", &format!("https://127.0.0.1:{}", port.trim()))?;
        write_secret(&self.kubeconfig(), &config)
    }

    /// A client with administrator rights, for programs of the host.
    pub async fn client(&self) -> Result<Client> {
        Ok(Client::try_from(self.client_config().await?)?)
    }

    /// The configuration behind [`Lab::client`].
    pub async fn client_config(&self) -> Result<Config> {
        crate::install_crypto();
        let file = Kubeconfig::read_from(self.kubeconfig()).context("read the kubeconfig; is the lab up?")?;
        let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
        config.read_timeout = Some(Duration::from_secs(60));
        config.headers.push((http::header::USER_AGENT, http::HeaderValue::from_static("lab")));
        Ok(config)
    }

    /// Removes the lab in whatever state it is. Succeeds if it does not exist.
    pub fn down(&self) -> Result<()> {
        require_root()?;
        let lock = self.lock()?;
        self.cgroup.destroy()?;
        paths::remove_dir(&self.dir)?;
        remove_file(&lock.path)?;
        drop(lock);
        // Fails if another lab still has its directory there.
        let _ = fs::remove_dir(paths::state_dir());
        Ok(())
    }

    pub(crate) fn record(&self) -> Result<LabRecord> {
        let text =
            fs::read(self.dir.join("lab.json")).with_context(|| format!("lab {} is not up", self.name))?;
        serde_json::from_slice(&text).context("parse lab.json")
    }

    pub(crate) fn save(&self, record: &LabRecord) -> Result<()> {
        write_secret(&self.dir.join("lab.json"), &serde_json::to_string_pretty(record)?)
    }

    /// Locks the lab; waits while another command holds the lock.
    pub(crate) fn lock(&self) -> Result<LabLock> {
        let path = paths::state_dir().join(format!(".{}.lock", self.name));
        loop {
            paths::create_state_dir().with_context(|| format!("create {}", paths::state_dir().display()))?;
            let file = match OpenOptions::new().write(true).create(true).truncate(false).open(&path) {
                // `down` of the last lab may have removed the directory meanwhile.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                other => other.with_context(|| format!("create {}", path.display()))?,
            };
            let file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(file) => file,
                Err((file, _)) => {
                    print_progress(format!("waiting for another command that is changing lab {}", self.name));
                    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| e).context("lock the lab")?
                }
            };
            // `down` removes the lock file; a lock on a removed file protects nothing.
            let same = fs::metadata(&path).is_ok_and(|m| file.metadata().is_ok_and(|f| f.ino() == m.ino()));
            if same {
                return Ok(LabLock { _file: file, path });
            }
        }
    }
}

/// The network namespace of a process.
fn netns_of(pid: i32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/net")).ok()
}

/// Sends a GET to the API server and returns the body.
pub(crate) async fn get_text(client: &Client, path: &str) -> Result<String> {
    let request = http::Request::get(path).body(Vec::new()).context("build a request")?;
    let response = tokio::time::timeout(Duration::from_secs(5), client.request_text(request)).await;
    response.with_context(|| format!("GET {path}: timeout"))?.with_context(|| format!("GET {path}"))
}

/// Whether the node is Ready and its kubelet has reported since this boot.
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
        bail!("the lab creates namespaces, links and mounts; run it as root, for example with sudo");
    }
    Ok(())
}
