//! Measures NetworkServices next to the built-in EndpointSlice controller of kube-controller-manager, which publishes the
//! primary addresses of the same pods. Pods are API objects without a kubelet.

mod pods;
mod slice_watch;
mod subject;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use api::{NetworkAttachmentDefinition, nad::NetworkAttachmentDefinitionSpec};
use e2e::replica;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{Api, Client, CustomResourceExt as _, api::PostParams};
use lab::{Lab, print_progress};
use pods::{NewPod, PodWriter, Readiness, create_nodes};
use serde_json::{Value, json};
use slice_watch::SliceWatch;
use subject::{RunningSubject, Subject, stop_other_controllers};

use super::{BenchRow, percentiles, wait_idle};

const NAMESPACE: &str = "bench";
/// Sizes of the service whose latency is measured.
const SIZES: [usize; 3] = [10, 1_000, 10_000];
const PODS: usize = 10_000;
const SERVICES: usize = 1_000;
const UNRELATED: usize = 50_000;
const FLIPPED: usize = 2_000;
const ROLLED: usize = 1_000;
/// Pods that a rolling restart replaces at the same time.
const SURGE: usize = 25;
const ROUNDS: usize = 100;
/// No event for this long means that the controller is done.
const QUIET: Duration = Duration::from_secs(3);
const TIMEOUT: Duration = Duration::from_secs(600);

/// What was measured of one controller.
#[derive(Default)]
struct Measured {
    /// Microseconds from the patch of a pod's status until a watcher sees the slice, for each size.
    latencies: Vec<Vec<u64>>,
    writes_per_change: f64,
    rolling_writes: usize,
    rolling: Duration,
    flip_writes: usize,
    flip: Duration,
    writes_at_rest: usize,
    writes_after_restart: usize,
    restart: Duration,
    /// Resident memory in KiB with [`PODS`] pods and [`SERVICES`] services, and with the unrelated pods.
    memory: Vec<u64>,
}

/// Runs all measurements on a lab without nodes.
pub async fn measure(lab: &Lab, rows: &mut Vec<BenchRow>) -> Result<()> {
    replica::install(lab, 1)?;
    stop_other_controllers(lab)?;
    let bench = ServiceBench::set_up(lab).await?;
    let mut measured: Vec<Measured> = Vec::new();
    for subject in Subject::ALL {
        measured.push(bench.run(subject).await.with_context(|| subject.name())?);
    }
    print_progress(format!("creating {UNRELATED} pods that no service selects …"));
    let unrelated = PodWriter::create(&bench.client, "unrelated").await?;
    let pod = |number| NewPod {
        name: format!("other-{number}"),
        number: PODS + ROLLED + number,
        labels: json!({"app": format!("other-{}", number % 500)}),
        nad: None,
    };
    unrelated.create_all((0..UNRELATED).map(pod)).await?;
    for (subject, measured) in [Subject::Patchbay, Subject::Yardstick].into_iter().zip(&mut measured) {
        measured.memory.push(bench.memory(subject).await?);
    }
    print_rows(&measured, rows);
    Ok(())
}

struct ServiceBench<'a> {
    lab: &'a Lab,
    client: Client,
    pods: PodWriter,
    watch: SliceWatch,
}

fn pod_name(number: usize) -> String {
    format!("pod-{number}")
}

/// The labels by which services of each size, and of [`SERVICES`], select the pod.
fn labels(number: usize) -> Value {
    let mut labels = json!({"app": "web", "group": format!("g{}", number * SERVICES / PODS)});
    for size in SIZES.into_iter().chain([FLIPPED]).filter(|size| number < *size) {
        labels[format!("first-{size}")] = json!("yes");
    }
    labels
}

fn first(size: usize) -> Value {
    json!({format!("first-{size}"): "yes"})
}

impl<'a> ServiceBench<'a> {
    async fn set_up(lab: &'a Lab) -> Result<Self> {
        print_progress(format!("creating {PODS} pods …"));
        let client = lab.client().await?;
        create_nodes(&client).await?;
        let pods = PodWriter::create(&client, NAMESPACE).await?;
        // Multus brings this CRD to a cluster.
        let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
        crds.create(&PostParams::default(), &NetworkAttachmentDefinition::crd())
            .await
            .context("create the CRD")?;
        let crd = format!("crd/{}", NetworkAttachmentDefinition::crd_name());
        lab.kubectl(&["wait", "--for=condition=Established", &crd, "--timeout=30s"])?;
        let nads: Api<NetworkAttachmentDefinition> = Api::namespaced(client.clone(), NAMESPACE);
        let nad = NetworkAttachmentDefinition::new("core", NetworkAttachmentDefinitionSpec { config: None });
        nads.create(&PostParams::default(), &nad).await.context("create the NAD")?;
        let nad = Some(format!("{NAMESPACE}/core"));
        let pod =
            |number| NewPod { name: pod_name(number), number, labels: labels(number), nad: nad.clone() };
        pods.create_all((0..PODS).map(pod)).await?;
        pods.set_all((0..PODS).map(|number| (pod_name(number), number)), Readiness::Ready).await?;
        // Its own client: the connection of the writer may be busy.
        let watch = SliceWatch::start(lab.client().await?, NAMESPACE);
        Ok(Self { lab, client, pods, watch })
    }

    async fn run(&self, subject: Subject) -> Result<Measured> {
        print_progress(format!("{} …", subject.name()));
        let mut measured = Measured::default();
        let mut running = subject.start(self.lab)?;
        let mut changes = 0;
        let mut writes = 0;
        for size in SIZES {
            self.create(subject, "sized", first(size), size).await?;
            if wait_idle().await.is_err() {
                print_progress("the machine is busy with other work; times are upper bounds");
            }
            let offset = self.lab.audit_offset()?;
            measured.latencies.push(self.latencies(size).await?);
            changes += 2 * ROUNDS;
            writes += subject.slice_writes(self.lab, offset)?;
            if size != PODS {
                self.delete(subject).await?;
            }
        }
        measured.writes_per_change = writes as f64 / changes as f64;
        print_progress(format!("{}: one minute at rest with {PODS} endpoints …", subject.name()));
        // Counts in the status of a NetworkService follow the last change within 5 s.
        tokio::time::sleep(Duration::from_secs(6)).await;
        let offset = self.lab.audit_offset()?;
        tokio::time::sleep(Duration::from_secs(60)).await;
        let writes = subject.writes(self.lab, offset)?;
        for write in writes.iter().take(3) {
            print_progress(format!("a write at rest: {write:?}"));
        }
        measured.writes_at_rest = writes.len();
        running = self.restart(subject, running, &mut measured).await?;
        self.delete(subject).await?;
        self.flip(subject, &mut measured).await?;
        self.roll(subject, &mut measured).await?;
        running.stop().await?;
        if subject != Subject::YardstickDefaultLimits {
            measured.memory.push(self.memory(subject).await?);
        }
        Ok(measured)
    }

    async fn create(&self, subject: Subject, name: &str, selector: Value, size: usize) -> Result<()> {
        subject.create_service(&self.client, NAMESPACE, name, selector).await?;
        self.watch.wait_counts(size, size, TIMEOUT).await?;
        self.watch.wait_quiet(QUIET, TIMEOUT).await.map(drop)
    }

    async fn delete(&self, subject: Subject) -> Result<()> {
        subject.delete_services(&self.client, NAMESPACE).await?;
        self.watch.wait_counts(0, 0, TIMEOUT).await
    }

    /// Lets single pods become unready and ready, one after the other.
    async fn latencies(&self, size: usize) -> Result<Vec<u64>> {
        let mut latencies = Vec::new();
        for round in 0..ROUNDS {
            let number = round * size / ROUNDS;
            let name = pod_name(number);
            self.pods.set(&name, number, Readiness::Unready).await?;
            self.watch.wait_pod(&name, false, TIMEOUT).await?;
            // The watcher may be faster than the response to the patch.
            let start = Instant::now();
            self.pods.set(&name, number, Readiness::Ready).await?;
            let seen = self.watch.wait_pod(&name, true, TIMEOUT).await?;
            latencies.push(u64::try_from(seen.saturating_duration_since(start).as_micros())?);
            // A user's changes rarely follow each other at once, and the limiter of the yardstick recovers.
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(latencies)
    }

    /// Restarts the controller twice: without a change, and with a pod that became unready meanwhile.
    async fn restart(
        &self,
        subject: Subject,
        running: RunningSubject,
        measured: &mut Measured,
    ) -> Result<RunningSubject> {
        print_progress(format!("{}: restart with {PODS} endpoints …", subject.name()));
        running.stop().await?;
        let offset = self.lab.audit_offset()?;
        let running = subject.start(self.lab)?;
        tokio::time::sleep(Duration::from_secs(20)).await;
        measured.writes_after_restart = subject.slice_writes(self.lab, offset)?;
        running.stop().await?;
        self.pods.set(&pod_name(0), 0, Readiness::Unready).await?;
        let start = Instant::now();
        let running = subject.start(self.lab)?;
        let seen = self.watch.wait_pod(&pod_name(0), false, TIMEOUT).await?;
        measured.restart = seen.saturating_duration_since(start);
        self.pods.set(&pod_name(0), 0, Readiness::Ready).await?;
        self.watch.wait_counts(PODS, PODS, TIMEOUT).await?;
        Ok(running)
    }

    /// Lets all pods of a service become ready at once.
    async fn flip(&self, subject: Subject, measured: &mut Measured) -> Result<()> {
        print_progress(format!("{}: {FLIPPED} pods flip at once …", subject.name()));
        let all = || (0..FLIPPED).map(|number| (pod_name(number), number));
        self.create(subject, "flip", first(FLIPPED), FLIPPED).await?;
        self.pods.set_all(all(), Readiness::Unready).await?;
        self.watch.wait_counts(FLIPPED, 0, TIMEOUT).await?;
        self.watch.wait_quiet(QUIET, TIMEOUT).await?;
        let offset = self.lab.audit_offset()?;
        let start = Instant::now();
        self.pods.set_all(all(), Readiness::Ready).await?;
        self.watch.wait_counts(FLIPPED, FLIPPED, TIMEOUT).await?;
        let last = self.watch.wait_quiet(QUIET, TIMEOUT).await?.context("no event")?;
        measured.flip = last.saturating_duration_since(start);
        measured.flip_writes = subject.slice_writes(self.lab, offset)?;
        self.delete(subject).await
    }

    /// Replaces all pods of a service, as a Deployment does.
    async fn roll(&self, subject: Subject, measured: &mut Measured) -> Result<()> {
        print_progress(format!("{}: rolling restart of {ROLLED} pods …", subject.name()));
        let pod = |generation: &str, number: usize| NewPod {
            name: format!("{generation}-{number}"),
            // Two generations have different addresses.
            number: PODS + number + if generation == "new" { ROLLED } else { 0 },
            labels: json!({"app": "rolled"}),
            nad: Some(format!("{NAMESPACE}/core")),
        };
        let old = (0..ROLLED).map(|number| pod("old", number));
        self.pods.create_all(old).await?;
        let names = |generation: &'static str| {
            (0..ROLLED).map(move |number| pod(generation, number)).map(|pod| (pod.name, pod.number))
        };
        self.pods.set_all(names("old"), Readiness::Ready).await?;
        self.create(subject, "rolled", json!({"app": "rolled"}), ROLLED).await?;
        let offset = self.lab.audit_offset()?;
        let start = Instant::now();
        let replace = |number: usize| async move {
            let (old, new) = (pod("old", number), pod("new", number));
            self.pods.create_pod(&new).await?;
            self.pods.set(&new.name, new.number, Readiness::Unready).await?;
            self.pods.set(&new.name, new.number, Readiness::Ready).await?;
            self.pods.delete(&old.name, 30).await?;
            self.pods.set(&old.name, old.number, Readiness::Unready).await?;
            self.pods.delete(&old.name, 0).await
        };
        stream::iter(0..ROLLED).map(replace).buffer_unordered(SURGE).try_collect::<()>().await?;
        self.watch.wait_counts(ROLLED, ROLLED, TIMEOUT).await?;
        let last = self.watch.wait_quiet(QUIET, TIMEOUT).await?.context("no event")?;
        measured.rolling = last.saturating_duration_since(start);
        measured.rolling_writes = subject.slice_writes(self.lab, offset)?;
        self.delete(subject).await?;
        self.pods.delete_all(names("new").map(|(name, _)| name)).await
    }

    /// The memory of a fresh controller with [`SERVICES`] services and all pods that exist.
    async fn memory(&self, subject: Subject) -> Result<u64> {
        print_progress(format!("{}: memory with {SERVICES} services …", subject.name()));
        let running = subject.start(self.lab)?;
        let create = |number: usize| async move {
            let selector = json!({"group": format!("g{number}")});
            subject.create_service(&self.client, NAMESPACE, &format!("s{number}"), selector).await
        };
        stream::iter(0..SERVICES).map(create).buffer_unordered(SURGE).try_collect::<()>().await?;
        self.watch.wait_counts(PODS, PODS, TIMEOUT).await?;
        self.watch.wait_quiet(QUIET, TIMEOUT).await?;
        // A controller that starts with all objects, as after an upgrade.
        running.stop().await?;
        let running = subject.start(self.lab)?;
        tokio::time::sleep(Duration::from_secs(20)).await;
        self.pods.set(&pod_name(0), 0, Readiness::Unready).await?;
        self.watch.wait_pod(&pod_name(0), false, TIMEOUT).await?;
        self.pods.set(&pod_name(0), 0, Readiness::Ready).await?;
        self.watch.wait_pod(&pod_name(0), true, TIMEOUT).await?;
        let memory = running.memory()?;
        self.delete(subject).await?;
        running.stop().await?;
        Ok(memory)
    }
}

fn print_rows(measured: &[Measured], rows: &mut Vec<BenchRow>) {
    let [ours, reference, limited] = measured else { return };
    let all = [ours, reference, limited];
    let mut row = |what: String, values: [String; 3]| {
        let [ours, reference, limited] = values;
        rows.push(BenchRow(
            what,
            format!("{ours}; kube-controller-manager {reference}, with default limits {limited}"),
        ));
    };
    for (index, size) in SIZES.into_iter().enumerate() {
        let values = all.map(|one| {
            let (p50, p99) = percentiles(one.latencies[index].clone());
            format!("{:.1} / {:.1} ms", p50 as f64 / 1000.0, p99 as f64 / 1000.0)
        });
        row(format!("{size} endpoints: pod ready to its slice seen, p50 / p99 of {ROUNDS}"), values);
    }
    row(
        "slice writes per change of one pod".to_owned(),
        all.map(|one| format!("{:.2}", one.writes_per_change)),
    );
    row(
        format!("rolling restart of {ROLLED} pods, {SURGE} at a time: slice writes, time to quiet"),
        all.map(|one| format!("{}, {:.1} s", one.rolling_writes, one.rolling.as_secs_f64())),
    );
    row(
        format!("{FLIPPED} pods flip at once: slice writes, time to quiet"),
        all.map(|one| format!("{}, {:.1} s", one.flip_writes, one.flip.as_secs_f64())),
    );
    row(
        format!("one minute at rest with {PODS} endpoints: writes"),
        all.map(|one| one.writes_at_rest.to_string()),
    );
    row(
        format!("restart with {PODS} endpoints: slice writes; start until a missed change is published"),
        all.map(|one| format!("{}; {:.1} s", one.writes_after_restart, one.restart.as_secs_f64())),
    );
    let mib = |kib: u64| kib as f64 / 1024.0;
    for (index, what) in [String::new(), format!(" and {UNRELATED} unrelated pods")].into_iter().enumerate() {
        let memory = |one: &Measured| one.memory.get(index).copied().unwrap_or_default();
        let (ours, reference) = (memory(ours), memory(reference));
        rows.push(BenchRow(
            format!("controller: memory with {PODS} pods in {SERVICES} services{what}"),
            format!(
                "{:.1} MiB; kube-controller-manager {:.1} MiB: ratio {:.2}",
                mib(ours),
                mib(reference),
                ours as f64 / reference as f64
            ),
        ));
    }
}
