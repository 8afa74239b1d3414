//! Random histories of pods and services. Whatever happens, the slices end as the model says, and never contain an address
//! that no selected pod reports for the network. No slice of any manager ever contains a primary address.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use anyhow::{Context as _, Result};
use e2e::random::SplitMix64;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::jiff::Timestamp;
use lab::Lab;
use serde_json::{Value, json};

use crate::{
    TIMEOUT,
    cluster::{Endpoints, NODES, TestCluster, TestPod, nads, network_services, pods, services, slices},
    primary_addresses::{PRIMARY, PrimaryAddressWatch},
    start_controller,
};

const HISTORIES: u64 = 50;
const SOAK_HISTORIES: u64 = 1000;
const PARALLEL: usize = 8;
const STEPS: u64 = 14;
const PODS: [&str; 5] = ["p0", "p1", "p2", "p3", "p4"];
const APPS: [&str; 2] = ["db", "web"];
const NETWORKS: [&str; 2] = ["blue", "red"];
const ADDRESSES: [&str; 5] = ["192.168.9.1", "192.168.9.2", "192.168.9.3", "fd00:9::1", "fd00:9::2"];
/// The namespaces of the histories start with this text.
const NAMESPACE_PREFIX: &str = "history-";

/// What the test knows about a pod.
#[derive(Clone, Debug)]
struct ModelPod {
    app: &'static str,
    ready: bool,
    /// The addresses on each network. None if the annotation cannot be read.
    addresses: Option<BTreeMap<&'static str, BTreeSet<&'static str>>>,
    finished: bool,
    machine: bool,
    /// The creation time, which has whole seconds, and the UID.
    created: (Timestamp, String),
}

#[derive(Clone, Debug)]
struct ModelService {
    app: &'static str,
    network: &'static str,
    not_ready: bool,
}

struct History {
    cluster: TestCluster,
    rng: SplitMix64,
    pods: BTreeMap<&'static str, ModelPod>,
    services: BTreeMap<&'static str, ModelService>,
    log: Vec<String>,
}

pub async fn random_histories_of_pods_and_services_end_as_the_model(lab: Lab) -> Result<()> {
    let (cluster, replica) = start_controller(&lab, "histories").await?;
    let seed = std::env::var("PATCHBAY_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let count = if e2e::soak() { SOAK_HISTORIES } else { HISTORIES };
    println!("{count} histories from seed {seed}");
    let run = |number: u64| {
        let cluster = cluster.clone();
        async move {
            let mut history = History::start(&cluster, number).await?;
            let outcome = history.run().await;
            outcome.with_context(|| format!("seed {number}:\n{}", history.log.join("\n")))
        }
    };
    let histories = stream::iter(seed..seed + count).map(run).buffer_unordered(PARALLEL);
    let watch = PrimaryAddressWatch::start(&cluster, NAMESPACE_PREFIX).await?;
    let outcome = watch.run_during(histories.try_collect::<Vec<()>>()).await;
    outcome.map(drop).with_context(|| replica.tail())
}

impl History {
    async fn start(cluster: &TestCluster, number: u64) -> Result<Self> {
        let cluster = cluster.sibling(&format!("{NAMESPACE_PREFIX}{number}")).await?;
        cluster.create_nad("red").await?;
        Ok(Self {
            cluster,
            rng: SplitMix64(number),
            pods: BTreeMap::new(),
            services: BTreeMap::new(),
            log: Vec::new(),
        })
    }

    async fn run(&mut self) -> Result<()> {
        for step in 0..STEPS {
            self.step().await.with_context(|| format!("step {step}"))?;
            if step % 5 == 4 {
                self.check().await?;
            }
        }
        self.check().await?;
        self.clean_up().await
    }

    async fn step(&mut self) -> Result<()> {
        match self.rng.below(13) {
            0..3 => self.create_pod().await,
            3 => self.delete_pod().await,
            4..6 => self.change_readiness().await,
            6 => self.change_addresses().await,
            7 => self.change_app().await,
            8 => self.finish_pod().await,
            9 | 10 => self.change_service().await,
            11 => self.damage_slices().await,
            _ => self.delete_service().await,
        }
    }

    fn some_pod(&mut self) -> Option<&'static str> {
        let names: Vec<&'static str> = self.pods.keys().copied().collect();
        (!names.is_empty()).then(|| self.rng.choose(&names))
    }

    fn random_addresses(&mut self) -> BTreeMap<&'static str, BTreeSet<&'static str>> {
        let mut addresses: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        for _ in 0..self.rng.below(4) {
            let (network, address) = (self.rng.choose(&NETWORKS), self.rng.choose(&ADDRESSES));
            addresses.entry(network).or_default().insert(address);
        }
        addresses
    }

    fn annotation(&self, pod: &ModelPod) -> String {
        let Some(addresses) = &pod.addresses else { return "{".to_owned() };
        let mut entries =
            vec![json!({"name": "primary", "interface": "eth0", "ips": [PRIMARY], "default": true})];
        for (network, addresses) in addresses {
            entries.push(json!({"name": format!("{}/{network}", self.cluster.namespace), "ips": addresses}));
        }
        Value::from(entries).to_string()
    }

    async fn create_pod(&mut self) -> Result<()> {
        let name = self.rng.choose(&PODS);
        if self.pods.contains_key(name) {
            return Ok(());
        }
        let mut pod = ModelPod {
            app: self.rng.choose(&APPS),
            ready: self.rng.below(3) > 0,
            addresses: Some(self.random_addresses()).filter(|_| self.rng.below(8) > 0),
            finished: false,
            machine: self.rng.below(2) == 0,
            created: Default::default(),
        };
        self.log.push(format!("create {name} {pod:?}"));
        let mut object = TestPod::new(name, pod.app, &[]).status(&self.annotation(&pod)).ready(pod.ready);
        object.node = self.rng.choose(&NODES).to_owned();
        if pod.machine {
            object.labels["kubevirt.io/created-by"] = json!("vm");
        }
        pod.created = self.cluster.create_pod(&object).await?;
        self.pods.insert(name, pod);
        // What the built-in controller would publish if a Service had a selector.
        self.patch_status(name, &json!({"podIP": PRIMARY, "podIPs": [{"ip": PRIMARY}]})).await
    }

    async fn patch_status(&self, pod: &str, status: &Value) -> Result<()> {
        let patch = kube::api::Patch::Merge(json!({"status": status}));
        let patched =
            self.cluster.api(&pods()).patch_status(pod, &kube::api::PatchParams::default(), &patch).await;
        patched.map(drop).with_context(|| format!("patch the status of pod {pod}"))
    }

    async fn delete_pod(&mut self) -> Result<()> {
        let Some(name) = self.some_pod() else { return Ok(()) };
        self.log.push(format!("delete {name}"));
        self.pods.remove(name);
        self.cluster.delete(&pods(), name).await
    }

    async fn change_readiness(&mut self) -> Result<()> {
        let Some(name) = self.some_pod() else { return Ok(()) };
        let Some(pod) = self.pods.get_mut(name).filter(|pod| !pod.finished) else { return Ok(()) };
        pod.ready = !pod.ready;
        self.log.push(format!("ready {name} {}", pod.ready));
        self.cluster.set_ready(name, pod.ready).await
    }

    async fn change_addresses(&mut self) -> Result<()> {
        let Some(name) = self.some_pod() else { return Ok(()) };
        let addresses = self.random_addresses();
        let Some(pod) = self.pods.get_mut(name) else { return Ok(()) };
        pod.addresses = Some(addresses);
        let pod = pod.clone();
        self.log.push(format!("addresses {name} {:?}", pod.addresses));
        self.cluster.set_network_status(name, Some(&self.annotation(&pod))).await
    }

    async fn change_app(&mut self) -> Result<()> {
        let Some(name) = self.some_pod() else { return Ok(()) };
        let app = self.rng.choose(&APPS);
        if let Some(pod) = self.pods.get_mut(name) {
            pod.app = app;
        }
        self.log.push(format!("app {name} {app}"));
        self.cluster.merge_patch(&pods(), name, &json!({"metadata": {"labels": {"app": app}}})).await
    }

    async fn finish_pod(&mut self) -> Result<()> {
        let Some(name) = self.some_pod() else { return Ok(()) };
        if let Some(pod) = self.pods.get_mut(name) {
            pod.finished = true;
        }
        self.log.push(format!("finish {name}"));
        self.patch_status(name, &json!({"phase": "Succeeded"})).await
    }

    async fn change_service(&mut self) -> Result<()> {
        let name = self.rng.choose(&["one", "two", "annotated"]);
        let service = ModelService {
            app: self.rng.choose(&APPS),
            network: self.rng.choose(&NETWORKS),
            not_ready: self.rng.below(4) == 0,
        };
        self.log.push(format!("service {name} {service:?}"));
        if name == "annotated" {
            let object = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "annotations": {
                    "patchbay.dev/service-network": service.network, "patchbay.dev/selector": format!("app={}", service.app)}},
                "spec": {"clusterIP": "None", "publishNotReadyAddresses": service.not_ready, "ports": [{"port": 1, "protocol": "TCP"}]}});
            self.cluster.apply(&services(), &object).await?;
        } else {
            let object = json!({"apiVersion": "patchbay.dev/v1alpha1", "kind": "NetworkService", "metadata": {"name": name},
                "spec": {"network": service.network, "selector": {"app": service.app}, "publishNotReadyAddresses": service.not_ready}});
            self.cluster.apply(&network_services(), &object).await?;
        }
        self.services.insert(name, service);
        Ok(())
    }

    async fn delete_service(&mut self) -> Result<()> {
        let names: Vec<&'static str> = self.services.keys().copied().collect();
        if names.is_empty() {
            return Ok(());
        }
        let name = self.rng.choose(&names);
        self.log.push(format!("delete service {name}"));
        self.services.remove(name);
        if name == "annotated" {
            self.cluster.delete(&services(), name).await
        } else {
            self.cluster.delete(&network_services(), name).await
        }
    }

    async fn damage_slices(&mut self) -> Result<()> {
        let names: Vec<&'static str> = self.services.keys().copied().collect();
        if names.is_empty() {
            return Ok(());
        }
        let name = self.rng.choose(&names);
        let Some(slice) = self.cluster.slices(name).await?.into_iter().next() else { return Ok(()) };
        let slice = slice.metadata.name.context("metadata.name")?;
        self.log.push(format!("damage {slice} of {name}"));
        if self.rng.below(2) == 0 {
            return self.cluster.delete(&slices(), &slice).await;
        }
        let patch = kube::api::Patch::Merge(json!({"endpoints": []}));
        let api = self.cluster.api(&slices());
        match api.patch(&slice, &kube::api::PatchParams::default(), &patch).await {
            // The controller deleted it meanwhile.
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            patched => patched.map(drop).context("damage a slice"),
        }
    }

    /// The endpoints of a service, derived in another way than the controller does.
    fn model(&self, service: &ModelService) -> Result<Endpoints> {
        let mut claims: BTreeMap<&str, Vec<(&str, &ModelPod)>> = BTreeMap::new();
        for (name, pod) in &self.pods {
            if pod.finished || pod.app != service.app {
                continue;
            }
            let addresses = pod.addresses.as_ref().and_then(|all| all.get(service.network));
            for address in addresses.into_iter().flatten() {
                claims.entry(address).or_default().push((name, pod));
            }
        }
        let mut endpoints = Endpoints::new();
        for (address, claimants) in claims {
            if claimants.len() > 1 && !claimants.iter().all(|(_, pod)| pod.machine) {
                continue;
            }
            let winner = claimants.iter().max_by_key(|(_, pod)| (pod.ready, &pod.created));
            let (name, pod) = winner.context("a claimant")?;
            let address: IpAddr = address.parse()?;
            endpoints.insert((address, (*name).to_owned(), pod.ready || service.not_ready));
        }
        Ok(endpoints)
    }

    async fn check(&self) -> Result<()> {
        for name in ["one", "two", "annotated"] {
            let expected = match self.services.get(name) {
                Some(service) => self.model(service)?,
                None => Endpoints::new(),
            };
            self.cluster.wait_for_model(TIMEOUT, name, &expected).await?;
        }
        Ok(())
    }

    /// Keeps the cluster small.
    async fn clean_up(&self) -> Result<()> {
        for name in self.services.keys() {
            let kind = if *name == "annotated" { services() } else { network_services() };
            self.cluster.delete(&kind, name).await?;
        }
        for name in self.pods.keys() {
            self.cluster.delete(&pods(), name).await?;
        }
        for name in NETWORKS {
            self.cluster.delete(&nads(), name).await?;
        }
        Ok(())
    }
}
