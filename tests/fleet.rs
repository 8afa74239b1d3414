//! Many simulated nodes in one process, each with its own journal and block controller, against a real API server. Their
//! pods are only names.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    net::IpAddr,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use api::{IPBlock, ipam::IpamSpec as Spec, ipblock::NodeRef};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, Preconditions},
};
use lab::wait;
use node::{
    cni::{NetworkState, NetworkView, Networks},
    event::Events,
    ipam::{BlockController, Ipam, ListSandboxes, Metrics, OFFLINE_GRACE, Timings, uptime},
};
use plan::ipam::{AttachmentKey, Lease, ObservedIpBlock, PodRef, Pool, abandoned};
use tokio::{
    sync::watch,
    task::{JoinSet, spawn_blocking},
};
use tokio_util::sync::CancellationToken;
use wire::cni::Error as CniError;

/// Simulated nodes that share one network.
pub struct Fleet {
    pub network: String,
    pub pool: Arc<Pool>,
    pub machines: Vec<Machine>,
    pub timings: Timings,
    clients: Vec<Client>,
    dir: PathBuf,
}

/// One node.
pub struct Machine {
    pub holder: NodeRef,
    /// The UIDs of its earlier Nodes.
    pub former: Vec<String>,
    dir: PathBuf,
    boot: u64,
    ipam: Option<Arc<Ipam>>,
    networks: watch::Sender<Arc<Networks>>,
    controller: JoinSet<()>,
    sandboxes: Arc<Mutex<BTreeSet<String>>>,
}

/// Short timings: what takes minutes in production takes milliseconds.
pub const FAST: Timings = Timings {
    idle_block: Duration::from_millis(100),
    idle_address: Duration::from_millis(50),
    status_interval: Duration::from_millis(200),
    gc_interval: Duration::from_millis(200),
    // GC lists the sandboxes before it reads the leases: a lease from in between must not be collected.
    min_lease_age: Duration::from_secs(1),
    min_closed_lease_age: Duration::from_secs(1),
    offline_grace: OFFLINE_GRACE,
};

impl Fleet {
    /// Creates this many nodes, all off.
    pub fn new(
        clients: Vec<Client>,
        network: &str,
        spec: &Spec,
        count: usize,
        timings: Timings,
    ) -> Result<Self> {
        let dir = std::env::temp_dir().join(format!("patchbay-fleet-{}-{network}", std::process::id()));
        let pool = Arc::new(Pool::new(network, spec, |family| family.block_length(spec), true));
        let mut fleet =
            Self { network: network.to_owned(), pool, machines: Vec::new(), timings, clients, dir };
        for number in 0..count {
            fleet.add_machine(number);
        }
        Ok(fleet)
    }

    fn add_machine(&mut self, number: usize) {
        // Fleets share an API server, and a node adopts the blocks of an earlier Node of its name.
        let holder = NodeRef {
            node: format!("sim-{number}-{}", self.network),
            uid: format!("{}-{number}", self.network),
        };
        let view = NetworkView {
            uid: self.uid(),
            state: NetworkState::NotSelected,
            closed: false,
            ipam: Some(Arc::clone(&self.pool)),
            has_claims: false,
        };
        let by_name = BTreeMap::from([(self.network.clone(), view)]);
        let networks = Networks { synced: true, node: Some(holder.clone()), by_name };
        self.machines.push(Machine {
            dir: self.dir.join(number.to_string()),
            holder,
            former: Vec::new(),
            boot: 0,
            ipam: None,
            networks: watch::Sender::new(Arc::new(networks)),
            controller: JoinSet::new(),
            sandboxes: Arc::default(),
        });
    }

    pub fn uid(&self) -> String {
        format!("uid-{}", self.network)
    }

    fn api(&self) -> Api<IPBlock> {
        Api::all(self.clients[0].clone())
    }

    /// Starts the daemon of a node, if it is not running.
    pub fn start(&mut self, number: usize) -> Result<()> {
        let client = self.clients[number % self.clients.len()].clone();
        let timings = self.timings;
        let machine = &mut self.machines[number];
        if machine.ipam.is_some() {
            return Ok(());
        }
        let boot = machine.boot.to_string();
        let ipam = Arc::new(Ipam::open(&machine.dir, &boot, Metrics::default()).context("open the journal")?);
        let (events, _) = Events::new(client.clone(), &machine.holder.node);
        let live = Arc::clone(&machine.sandboxes);
        let sandboxes: ListSandboxes = Box::new(move |_| {
            let live = live.lock().unwrap_or_else(PoisonError::into_inner).clone();
            Box::pin(async move { Ok(live) })
        });
        let networks = machine.networks.subscribe();
        let controller =
            BlockController::new(Arc::clone(&ipam), client, networks, events, sandboxes, timings);
        machine.ipam = Some(ipam);
        machine.controller.spawn(async move {
            let _ = Box::pin(controller.run(CancellationToken::new())).await;
        });
        Ok(())
    }

    pub fn start_all(&mut self) -> Result<()> {
        (0..self.machines.len()).try_for_each(|number| self.start(number))
    }

    /// Kills the daemon of a node at any point.
    pub async fn crash(&mut self, number: usize) {
        let machine = &mut self.machines[number];
        machine.controller.shutdown().await;
        machine.ipam = None;
    }

    /// Crashes a node with all its sandboxes; the next start is a new boot.
    pub async fn power_off(&mut self, number: usize) {
        self.crash(number).await;
        let machine = &mut self.machines[number];
        machine.boot += 1;
        machine.live().clear();
    }

    /// Crashes the daemon and deletes its state; the sandboxes keep running.
    pub async fn lose_disk(&mut self, number: usize) {
        self.crash(number).await;
        let _ = fs::remove_dir_all(&self.machines[number].dir);
    }

    /// Crashes the daemon and zeroes `count` lines of its journal from line `first`; the sandboxes keep running.
    pub async fn damage(&mut self, number: usize, first: usize, count: usize) -> Result<()> {
        self.crash(number).await;
        let path = self.machines[number].dir.join("ipam/journal");
        let Ok(mut bytes) = fs::read(&path) else { return Ok(()) };
        let ends = bytes.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(index, _)| index + 1);
        let starts: Vec<usize> = std::iter::once(0).chain(ends).collect();
        let first = first % starts.len();
        let last = starts.get(first + count).copied().unwrap_or(bytes.len());
        bytes[starts[first]..last].fill(0);
        fs::write(&path, bytes).context("damage a journal")
    }

    /// Deletes the Node of a machine and creates it again with this UID.
    pub fn recreate_node(&mut self, number: usize, uid: &str) {
        let machine = &mut self.machines[number];
        machine.former.push(std::mem::replace(&mut machine.holder.uid, uid.to_owned()));
        let holder = machine.holder.clone();
        machine.networks.send_modify(|networks| Arc::make_mut(networks).node = Some(holder));
    }

    pub fn is_up(&self, number: usize) -> bool {
        self.machines[number].ipam.is_some()
    }

    /// Calls ADD for a sandbox.
    pub fn add(
        &self,
        number: usize,
        container: &str,
        requested: Vec<IpAddr>,
        timeout: Duration,
    ) -> impl Future<Output = Result<Result<Vec<IpAddr>, CniError>>> + use<> {
        let machine = &self.machines[number];
        let ipam = machine.ipam.clone();
        machine.live().insert(container.to_owned());
        let lease = Lease {
            key: attachment_key(container),
            pod: PodRef {
                namespace: "sim".to_owned(),
                name: container.to_owned(),
                uid: container.to_owned(),
            },
            network: self.uid(),
            config: self.network.clone(),
            boot: machine.boot.to_string(),
            since: uptime(),
            addresses: Vec::new(),
            claim: None,
        };
        let pool = Arc::clone(&self.pool);
        async move {
            let ipam = ipam.context("the node is off")?;
            let until = Instant::now() + timeout;
            let added = spawn_blocking(move || ipam.allocate_until(&pool, lease, &requested, until)).await?;
            Ok(added.map(|lease| lease.addresses))
        }
    }

    /// Calls STATUS: whether the node allocates addresses.
    pub fn status(&self, number: usize) -> Result<Result<(), CniError>> {
        Ok(self.machines[number].ipam.as_ref().context("the node is off")?.status())
    }

    /// Calls DEL.
    pub fn delete(&self, number: usize, container: &str) -> Result<()> {
        let machine = &self.machines[number];
        machine.live().remove(container);
        let ipam = machine.ipam.as_ref().context("the node is off")?;
        ipam.release(&attachment_key(container));
        Ok(())
    }

    /// Removes a sandbox without DEL.
    pub fn remove_sandbox(&self, number: usize, container: &str) {
        self.machines[number].live().remove(container);
    }

    /// The leases of all nodes that are up.
    pub fn leases(&self) -> Vec<(usize, Lease)> {
        let up = self.machines.iter().enumerate();
        up.filter_map(|(number, one)| Some((number, one.ipam.as_ref()?)))
            .flat_map(|(number, ipam)| ipam.leases().into_iter().map(move |lease| (number, lease)))
            .collect()
    }

    /// Fails if an address belongs to two sandboxes. Returns the number of addresses in use.
    pub fn check_no_duplicates(&self) -> Result<usize> {
        let mut owners: BTreeMap<IpAddr, (usize, AttachmentKey)> = BTreeMap::new();
        for (number, lease) in self.leases() {
            for address in &lease.addresses {
                let before = owners.insert(*address, (number, lease.key.clone()));
                // A damaged journal may restore the lease of a removed sandbox, until GC collects it.
                let live = |number: usize, key: &AttachmentKey| {
                    self.machines[number].live().contains(&key.container)
                };
                if let Some((other, key)) = before
                    && live(other, &key)
                    && live(number, &lease.key)
                {
                    bail!("{address} belongs to {key:?} on {other} and to {:?} on {number}", lease.key);
                }
            }
        }
        Ok(owners.len())
    }

    /// The blocks of all nodes that are up.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        for machine in &self.machines {
            let Some(ipam) = &machine.ipam else { continue };
            for (block, one) in ipam.holdings() {
                let used: Vec<IpAddr> = ipam.leases().into_iter().flat_map(|lease| lease.addresses).collect();
                let (node, range) = (&machine.holder.node, block.range);
                let _ = writeln!(text, "{node}: {range} {:?} lent {:?} (uses {used:?})", one.stage, one.lent);
            }
        }
        text
    }

    /// The number of blocks and single addresses of each node that is up, by stage, and of its pods.
    pub fn summary(&self) -> String {
        let mut text = String::new();
        for machine in &self.machines {
            let Some(ipam) = &machine.ipam else { continue };
            let mut counts: BTreeMap<String, usize> = BTreeMap::new();
            for (block, one) in ipam.holdings() {
                let kind = if block.is_single() { "single" } else { "block" };
                *counts.entry(format!("{kind} {:?}", one.stage)).or_default() += 1;
                *counts.entry("lent".to_owned()).or_default() += one.lent.len();
            }
            let _ = writeln!(text, "{}: {counts:?}, {} pods", machine.holder.node, ipam.leases().len());
        }
        text
    }

    /// The IPBlocks of the network.
    pub async fn objects(&self) -> Result<Vec<IPBlock>> {
        let params = ListParams::default().labels(&format!("patchbay.dev/network={}", self.network));
        Ok(self.api().list(&params).await?.items)
    }

    /// Deletes the abandoned blocks of deleted nodes, as the controller does.
    pub async fn delete_abandoned(&self, deleted_nodes: &BTreeSet<String>) -> Result<usize> {
        let all = self.objects().await?;
        let read = |block: &IPBlock| {
            let (spec, status) = (block.spec.clone(), block.status.clone().unwrap_or_default());
            ObservedIpBlock { uid: block.uid().unwrap_or_default(), spec, status }
        };
        let objects: Vec<ObservedIpBlock> = all.iter().map(read).collect();
        let blocks = abandoned(&objects, |holder| deleted_nodes.contains(&holder.uid));
        let count = blocks.len();
        for object in blocks {
            let found = all
                .iter()
                .find(|block| block.uid().as_ref() == Some(&object.uid))
                .context("the abandoned IPBlock")?;
            let only = Preconditions { uid: found.uid(), resource_version: found.resource_version() };
            let params = DeleteParams::default().preconditions(only);
            match self.api().delete(&found.name_any(), &params).await {
                Ok(_) => {}
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(count)
    }

    /// Waits until all nodes have released their blocks.
    pub async fn wait_until_released(&self, within: Duration) -> Result<()> {
        ensure!(self.leases().is_empty(), "there are still leases: {:?}", self.leases());
        wait::until(within, "every block to be released", || async {
            let left = self.objects().await?;
            let names: Vec<String> = left.iter().map(kube::ResourceExt::name_any).collect();
            ensure!(names.is_empty(), "{names:?}");
            Ok(Some(()))
        })
        .await
    }

    /// Stops all nodes and removes their state.
    pub async fn shutdown(mut self) {
        for number in 0..self.machines.len() {
            self.crash(number).await;
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}

impl Machine {
    fn live(&self) -> std::sync::MutexGuard<'_, BTreeSet<String>> {
        self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn attachment_key(container: &str) -> AttachmentKey {
    AttachmentKey { container: container.to_owned(), interface: "net1".to_owned() }
}
