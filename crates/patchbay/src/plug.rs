//! `patchbay plug` and `patchbay unplug`: edit the networks of a running pod, and wait until the node daemon applied the edit.

mod edit;
mod pod;
mod progress;

use std::{
    hash::{BuildHasher as _, Hasher as _, RandomState},
    io::{self, Write as _},
    pin::pin,
    time::Duration,
};

use anyhow::{Context as _, bail};
use api::{ErrorChain, IfName, Mac, duration, selection::NadRef};
use client::{
    json_patch::patch_request,
    watch::{self, StreamEvent, WatchConfig},
};
use edit::{PlugRequest, UnplugTarget};
use futures::StreamExt as _;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use pod::PodView;
use progress::{Goal, WaitState};
use tokio::time::{Instant, timeout_at};

use crate::{cli::print_line, cluster::ClusterArgs, terminal};

/// The longest `--timeout`.
const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Flags of `patchbay plug`.
#[derive(Debug, clap::Args)]
pub struct PlugArgs {
    /// The pod.
    #[arg(value_parser = pod_name)]
    pod: String,

    /// The network: the name of a NetworkAttachmentDefinition, or NAMESPACE/NAME if it is in another namespace than the pod
    #[arg(long, value_parser = network_name)]
    network: NetworkName,

    /// The name of the new interface in the pod [default: the next free netN]
    #[arg(long)]
    interface: Option<IfName>,

    /// An IP address of the interface, with or without a prefix length; repeat it for more. The network's plugin must
    /// support the capability "ips"
    #[arg(long = "ip", value_name = "ADDRESS", value_parser = ip_address)]
    ips: Vec<String>,

    /// The MAC address of the interface. The network's plugin must support the capability "mac"
    #[arg(long)]
    mac: Option<Mac>,

    #[command(flatten)]
    wait: WaitArgs,

    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Flags of `patchbay unplug`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("target").required(true).args(["interface", "network"]))]
pub struct UnplugArgs {
    /// The pod.
    #[arg(value_parser = pod_name)]
    pod: String,

    /// The interface to remove.
    #[arg(long)]
    interface: Option<IfName>,

    /// The network whose interface to remove, if the pod has one interface on it: NAME or NAMESPACE/NAME
    #[arg(long, value_parser = network_name)]
    network: Option<NetworkName>,

    #[command(flatten)]
    wait: WaitArgs,

    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Debug, clap::Args)]
struct WaitArgs {
    /// How long to wait for the node daemon, such as 30s
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = wait_timeout)]
    timeout: Duration,
}

/// `[NAMESPACE/]NAME` of a NetworkAttachmentDefinition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkName {
    namespace: Option<String>,
    name: String,
}

impl NetworkName {
    /// The network that a pod of this namespace means.
    fn reference(&self, namespace: &str) -> NadRef {
        NadRef::new(self.namespace.as_deref().unwrap_or(namespace), self.name.as_str())
    }
}

fn network_name(text: &str) -> Result<NetworkName, &'static str> {
    // The separator of interfaces is not part of a name.
    let nad = NadRef::parse(text, "").filter(|_| !text.contains('@'));
    let nad = nad.ok_or("must be NAME or NAMESPACE/NAME of a NetworkAttachmentDefinition")?;
    Ok(NetworkName { namespace: Some(nad.namespace).filter(|it| !it.is_empty()), name: nad.name })
}

/// Also accepts `pod/NAME`, as kubectl prints it.
fn pod_name(text: &str) -> Result<String, &'static str> {
    let name = ["pod/", "pods/", "po/"].iter().find_map(|kind| text.strip_prefix(kind)).unwrap_or(text);
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    if (1..=253).contains(&name.len()) && name.chars().all(inner) {
        Ok(name.to_owned())
    } else {
        Err("must be the name of a pod")
    }
}

fn wait_timeout(text: &str) -> Result<Duration, String> {
    match duration::parse(text) {
        Ok(timeout) if timeout > MAX_TIMEOUT => Err("must be at most 1d".to_owned()),
        Ok(timeout) => Ok(timeout),
        Err(error) => Err(error.to_string()),
    }
}

fn ip_address(text: &str) -> Result<String, &'static str> {
    if text.parse::<IpNet>().is_ok() || text.parse::<std::net::IpAddr>().is_ok() {
        Ok(text.to_owned())
    } else {
        Err("must be an IP address such as 10.1.0.5, or with a prefix length such as 10.1.0.5/24")
    }
}

/// Adds an interface and waits until it is attached.
pub async fn plug(args: PlugArgs) -> anyhow::Result<()> {
    let PlugArgs { pod, network, interface, ips, mac, wait, cluster } = args;
    let request = PlugRequest { network, interface, ips, mac: mac.map(|mac| mac.to_string()) };
    let session = Session::connect(cluster, &pod, wait.timeout).await?;
    let (edited, planned) = session.edit(|pod| edit::plug(pod, &request)).await?;
    let goal = Goal::Attached { network: planned.network, interface: planned.interface };
    let subject = goal.subject();
    let before = PodView { confirmed: true, ..edited.clone() };
    let already = if !planned.changed && goal.state(&before).is_done() { "is already " } else { "" };
    let done = session.wait(edited, &goal).await?;
    print_line(&format!("pod/{pod}: {subject} {already}{goal}{}", done.addresses(&goal)))
}

/// Removes an interface and waits until it is gone.
pub async fn unplug(args: UnplugArgs) -> anyhow::Result<()> {
    let UnplugArgs { pod, interface, network, wait, cluster } = args;
    let target = match (interface, network) {
        (Some(interface), _) => UnplugTarget::Interface(interface),
        (None, Some(network)) => UnplugTarget::Network(network),
        (None, None) => bail!("set --interface or --network"),
    };
    let session = Session::connect(cluster, &pod, wait.timeout).await?;
    let (mut edited, planned) = session.edit(|pod| edit::unplug(pod, &target)).await?;
    let (network, interface) = (planned.network, planned.interface);
    if !planned.changed {
        edited = session.request_kept(edited, &network, &interface).await?;
    }
    let goal = Goal::Removed { network, interface };
    session.wait(edited, &goal).await?;
    print_line(&format!("pod/{pod}: {} {goal}", goal.subject()))
}

/// One edit of one pod.
struct Session {
    pods: Api<Pod>,
    namespace: String,
    pod: String,
    deadline: Instant,
    timeout: Duration,
}

impl Session {
    async fn connect(cluster: ClusterArgs, pod: &str, timeout: Duration) -> anyhow::Result<Self> {
        let (client, namespace) = cluster.connect().await?;
        let pods = Api::namespaced(client, &namespace);
        let deadline = Instant::now() + timeout;
        Ok(Self { pods, namespace, pod: pod.to_owned(), deadline, timeout })
    }

    fn name(&self) -> String {
        format!("{}/{}", self.namespace, self.pod)
    }

    async fn read(&self) -> anyhow::Result<PodView> {
        let found = self.bounded(self.pods.get_opt(&self.pod)).await?;
        let found = found.with_context(|| format!("read pod {}", self.name()))?;
        let Some(pod) = found else {
            bail!("pod {} does not exist; set --namespace if it is in another namespace", self.name())
        };
        PodView::read(&pod)
    }

    async fn bounded<T>(&self, work: impl Future<Output = T>) -> anyhow::Result<T> {
        let late = || format!("the API server did not respond within {}", text(self.timeout));
        timeout_at(self.deadline, work).await.map_err(|_| anyhow::Error::msg(late()))
    }

    /// Edits the annotation of the live pod, and gives the edit a name of its own. Repeats the edit if the annotation changed
    /// meanwhile.
    async fn edit(
        &self,
        plan: impl Fn(&PodView) -> anyhow::Result<edit::PlannedEdit>,
    ) -> anyhow::Result<(PodView, edit::PlannedEdit)> {
        let mut refused: Option<(PodView, kube::Error)> = None;
        loop {
            let pod = self.read().await?;
            if let Some((before, error)) = refused
                && before.uid == pod.uid
                && before.networks == pod.networks
                && before.annotated == pod.annotated
            {
                // Nothing changed meanwhile: the API server does not accept the new value.
                return Err(error).with_context(|| format!("edit the networks of pod {}", self.name()));
            }
            pod.check_runs()?;
            let planned = plan(&pod)?;
            let patch = pod.patch(planned.annotation.as_deref(), &unique_name());
            let operations = serde_json::to_value(patch)?;
            let path = format!("{}/{}", self.pods.resource_url(), self.pod);
            let request = patch_request(&path, &operations)?;
            let client = self.pods.clone().into_client();
            match self.bounded(client.request::<Pod>(request)).await? {
                Ok(patched) => return Ok((PodView::read(&patched)?, planned)),
                Err(error) if has_code(&error, 409) => refused = None,
                Err(error) if has_code(&error, 422) => refused = Some((pod, error)),
                Err(error) => {
                    return Err(error).with_context(|| format!("edit the networks of pod {}", self.name()));
                }
            }
        }
    }

    /// Detaches an interface that no element requests. The daemon may keep it, because it never saw a request for it. So the
    /// pod requests it, and when the daemon has seen that, no longer.
    async fn request_kept(&self, edited: PodView, network: &str, interface: &str) -> anyhow::Result<PodView> {
        let reported = Goal::Reported { network: network.to_owned(), interface: interface.to_owned() };
        let pod = self.wait(edited, &reported).await?;
        if !reported.is_kept(&pod) {
            return Ok(pod);
        }
        let (edited, _) = self.edit(|pod| edit::request(pod, network, interface)).await?;
        let requested = Goal::Requested { network: network.to_owned(), interface: interface.to_owned() };
        self.wait(edited, &requested).await?;
        let target = UnplugTarget::Interface(interface.parse()?);
        let (edited, _) = self.edit(|pod| edit::unplug(pod, &target)).await?;
        Ok(edited)
    }

    /// Waits until the node daemon reports the goal after this edit. No response of the API server is older than the edit.
    async fn wait(&self, mut pod: PodView, goal: &Goal) -> anyhow::Result<PodView> {
        progress(&format!("pod {}: waiting for {} to be {goal}", self.name(), goal.subject()));
        let mut events = pin!(watch::stream(self.pods.clone(), WatchConfig::one(&self.pod)));
        let uid = pod.uid.clone();
        let (mut reported, mut exists) = (None, false);
        loop {
            match goal.state(&pod) {
                WaitState::Done => return Ok(pod),
                WaitState::Refused(cause) => {
                    bail!("{}: {cause}{}", self.not_done(goal), goal.advice(&pod))
                }
                WaitState::Waiting(cause) => {
                    if let Some(cause) = cause.filter(|cause| reported.as_ref() != Some(cause)) {
                        progress(&format!("waiting: {cause}"));
                        reported = Some(cause);
                    }
                }
            }
            pod = loop {
                let Ok(event) = timeout_at(self.deadline, events.next()).await else {
                    bail!(self.timed_out(goal, &pod))
                };
                match event {
                    Some(StreamEvent::Applied(new)) => {
                        exists = true;
                        break PodView::read(&new)?;
                    }
                    Some(StreamEvent::ListStarted) => exists = false,
                    Some(StreamEvent::ListDone) if exists => {}
                    Some(StreamEvent::ListDone | StreamEvent::Deleted(_)) | None => {
                        bail!("{}: the pod was deleted", self.not_done(goal))
                    }
                    Some(StreamEvent::Failed(error) | StreamEvent::NotServed(error)) => {
                        progress(&format!("cannot watch the pod, trying again: {}", ErrorChain(&error)));
                    }
                    Some(StreamEvent::Resumed) => {}
                }
            };
            pod.check_runs()?;
            if pod.uid != uid {
                bail!("{}: the pod was deleted and created again", self.not_done(goal))
            }
        }
    }

    fn timed_out(&self, goal: &Goal, pod: &PodView) -> String {
        let cause = match goal.state(pod) {
            WaitState::Waiting(Some(cause)) => cause,
            WaitState::Waiting(None) | WaitState::Done | WaitState::Refused(_) => format!(
                "the node daemon reported nothing about this request; check that the patchbay-node pod on node {} is \
                ready and not older than this program, and that hot-plug is on",
                pod.node
            ),
        };
        let within = text(self.timeout);
        format!("{} within {within}: {cause}{}", self.not_done(goal), goal.advice(pod))
    }

    fn not_done(&self, goal: &Goal) -> String {
        format!("pod {}: {} was not {goal}", self.name(), goal.subject())
    }
}

/// A name that no other edit has.
fn unique_name() -> String {
    format!("{:016x}", RandomState::new().build_hasher().finish())
}

/// 409: the API server asks to try again. 422: a test of the patch failed, or the new object is invalid.
fn has_code(error: &kube::Error, code: u16) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == code)
}

fn text(duration: Duration) -> String {
    if duration.subsec_millis() == 0 {
        format!("{}s", duration.as_secs())
    } else {
        format!("{}ms", duration.as_millis())
    }
}

/// Prints a line about the progress. If stderr is closed, the exit code still reports the result.
fn progress(line: &str) {
    let _ = writeln!(io::stderr(), "{}", terminal::line(line));
}
