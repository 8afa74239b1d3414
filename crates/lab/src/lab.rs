//! A lab: its machines, and bringing it up and down.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::MetadataExt as _,
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

use crate::{
    address::{API_PORT, CONTROL_PLANE, NodeAddresses},
    bootstrap::{self, BootstrapScope},
    cgroup::Cgroup,
    control_plane, image,
    init::Component,
    kubevirt,
    lab_record::{LabRecord, NodeRecord},
    machine::{Machine, lab_binary},
    node,
    node_options::NodeOptions,
    paths::{self, LabName},
    pki::{Pki, write_secret},
    program::{CNI_PLUGINS, MULTUS_PLUGINS, Programs, VIRT_CONTROLLER},
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
    /// A control plane and at least these nodes, from `node-1`.
    NodesWith(&'static [NodeOptions]),
    /// A control plane with KubeVirt's virt-controller, and at least this many nodes for virtual machines.
    KubeVirt(u8),
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
        let default_nodes = |count: u8| vec![NodeOptions::default(); usize::from(count)];
        match topology {
            Topology::ControlPlaneOnly => self.up_with(&[]).await,
            Topology::Nodes(count) => self.up_with(&default_nodes(count)).await,
            Topology::NodesWith(nodes) => self.up_with(nodes).await,
            Topology::KubeVirt(count) => self.up_with_kubevirt(&default_nodes(count)).await,
        }
    }

    /// The same as [`Lab::up`] with at least these nodes, from `node-1`. A node that exists keeps its options if the
    /// default ones are requested.
    pub async fn up_with(&self, nodes: &[NodeOptions]) -> Result<()> {
        self.start(nodes, false).await
    }

    /// The same as [`Lab::up_with`], and KubeVirt's virt-controller. A lab that has KubeVirt keeps it.
    pub async fn up_with_kubevirt(&self, nodes: &[NodeOptions]) -> Result<()> {
        self.start(nodes, true).await
    }

    async fn start(&self, nodes: &[NodeOptions], kubevirt: bool) -> Result<()> {
        require_root()?;
        // Building can take minutes, during which the lab is not locked.
        LabRecord { kubevirt, ..LabRecord::default() }.programs()?;
        let _lock = self.lock()?;
        let record = self.load_or_create_record(nodes, kubevirt)?;
        let programs = record.programs()?;
        self.store_images(&record, &programs)?;
        self.start_control_plane(&record, &programs)?;
        self.start_nodes(&record, &programs)?;
        self.start_cluster(&record).await
    }

    /// Stores the lab's own images for the nodes.
    pub(crate) fn store_images(&self, record: &LabRecord, programs: &Programs) -> Result<()> {
        if record.nodes.is_empty() {
            return Ok(());
        }
        self.store_image(&image::lab_image(programs)?, "lab")?;
        if record.kubevirt {
            self.store_image(&image::launcher_image(programs)?, "virt-launcher")?;
        }
        Ok(())
    }

    fn load_or_create_record(&self, nodes: &[NodeOptions], kubevirt: bool) -> Result<LabRecord> {
        fs::create_dir_all(&self.dir).with_context(|| format!("create {}", self.dir.display()))?;
        let mut record =
            if self.dir.join("lab.json").exists() { self.record()? } else { LabRecord::default() };
        let requested = |number: u8| nodes.get(usize::from(number) - 1).copied().unwrap_or_default();
        for node in &record.nodes {
            let requested = requested(node.number);
            if requested != NodeOptions::default() && requested != node.options {
                bail!(
                    "{} exists with {:?}, not with {requested:?}; remove it with `lab remove-node` first",
                    node.name,
                    node.options
                );
            }
        }
        while record.nodes.len() < nodes.len() {
            record.add(requested)?;
        }
        record.kubevirt |= kubevirt;
        self.save(&record)?;
        Ok(record)
    }

    fn start_control_plane(&self, record: &LabRecord, programs: &Programs) -> Result<()> {
        let machine = self.control_plane();
        control_plane::configure(&machine, &self.pki())?;
        if record.kubevirt {
            kubevirt::configure(&machine, &self.pki())?;
        }
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
            node::configure(&self.node(&node.name), node, &self.pki(), programs)?;
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
        node::write_run_files(&machine, record)?;
        machine.start_component(&record.options.runtime.component())?;
        self.import_images(&machine, record.options.runtime)
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
        wait::until(Duration::from_secs(60), "the bootstrap objects to be applied", || async {
            bootstrap::apply(&client, scope).await.map(Some)
        })
        .await?;
        for node in &record.nodes {
            let machine = self.node(&node.name);
            for component in node::components(&machine, node) {
                machine.start_component(&component)?;
            }
        }
        if record.kubevirt {
            self.start_kubevirt(&client).await?;
        }
        self.wait_ready(&client, record).await?;
        if record.kubevirt {
            for node in &record.nodes {
                kubevirt::prepare_node(&client, &node.name).await?;
            }
            kubevirt::wait_ready(&client)
                .await
                .with_context(|| self.tail(&control_plane, VIRT_CONTROLLER))?;
        }
        Ok(())
    }

    async fn start_kubevirt(&self, client: &Client) -> Result<()> {
        // The API server serves a new kind a moment after its definition was created.
        wait::until(Duration::from_secs(60), "the objects of KubeVirt to be applied", || async {
            kubevirt::apply(client, &self.pki()).await.map(Some)
        })
        .await?;
        self.control_plane().start_component(&kubevirt::virt_controller())
    }

    /// The components of the control plane in start order.
    pub(crate) fn control_plane_components(&self) -> Vec<Component> {
        let has_kubevirt = self.record().is_ok_and(|record| record.kubevirt);
        control_plane::storage_and_api()
            .into_iter()
            .chain(control_plane::controllers())
            .chain(has_kubevirt.then(kubevirt::virt_controller))
            .collect()
    }

    async fn wait_ready(&self, client: &Client, record: &LabRecord) -> Result<()> {
        let nodes: Api<KubeNode> = Api::all(client.clone());
        for node in &record.nodes {
            let machine = self.node(&node.name);
            wait::until(Duration::from_secs(60), &format!("the network of {}", node.name), || async {
                let NodeOptions { runtime, multus } = node.options;
                let ready = runtime.listens(&machine)? && node::multus_is_ready(&machine, multus)?;
                Ok(ready.then_some(()))
            })
            .await
            .with_context(|| self.tail(&machine, "multus"))?;
            let kubelet = node::kubelet(&machine, node.addresses());
            wait::until(Duration::from_secs(60), &format!("the kubelet on {}", node.name), || async {
                // It exits if the runtime listens and does not serve CRI yet. Like kubelet.service, start it again.
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
        wait::until(Duration::from_secs(60), "DNS to answer", || async { machine.output(&argv).map(Some) })
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
            .filter(|name| !CNI_PLUGINS.contains(name) && !MULTUS_PLUGINS.contains(name))
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
        let port = wait::blocking(Duration::from_secs(60), "the forwarder to listen", || {
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
