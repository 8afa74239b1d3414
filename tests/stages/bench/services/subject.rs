//! What is measured: Patchbay's controller, or the built-in EndpointSlice controller as yardstick. Only one of them runs.

use std::{
    fs,
    process::{Child, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use api::NetworkService;
use e2e::replica::Replica;
use k8s_openapi::api::{core::v1::Service, discovery::v1::EndpointSlice};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, PostParams},
};
use lab::{
    Lab,
    audit::{AuditOffset, AuditedRequest},
    program::Programs,
    wait,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::image;

/// The user that the built-in controller writes as.
const YARDSTICK_USER: &str = "system:serviceaccount:kube-system:endpointslice-controller";
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// A controller under measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    Patchbay,
    /// kube-controller-manager with only the EndpointSlice controller, and raised limits for requests.
    Yardstick,
    /// The same with its default limits.
    YardstickDefaultLimits,
}

/// A controller that runs.
pub enum RunningSubject {
    Patchbay(Box<Replica>),
    Yardstick(Child),
}

impl Subject {
    pub const ALL: [Self; 3] = [Self::Patchbay, Self::Yardstick, Self::YardstickDefaultLimits];

    pub fn name(self) -> &'static str {
        match self {
            Self::Patchbay => "Patchbay",
            Self::Yardstick => "kube-controller-manager",
            Self::YardstickDefaultLimits => "kube-controller-manager, default limits",
        }
    }

    /// Starts the controller; does not wait until it works.
    pub fn start(self, lab: &Lab) -> Result<RunningSubject> {
        let limits: &[&str] = match self {
            Self::Patchbay => {
                let replica = Replica::start_program(lab, 1, &image::program(), &[])?;
                return Ok(RunningSubject::Patchbay(Box::new(replica)));
            }
            Self::Yardstick => &["--kube-api-qps=1000", "--kube-api-burst=2000"],
            Self::YardstickDefaultLimits => &[],
        };
        let machine = lab.control_plane();
        let config = machine.disk().join("etc/kubernetes/controller-manager.conf");
        let config = config.to_str().context("the path is not UTF-8")?;
        let log = fs::File::create(lab.kubeconfig().with_file_name("yardstick.log"))?;
        let child = machine
            .command_in_netns(Programs::prepare()?.path("kube-controller-manager")?)?
            .args(
                ["kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"]
                    .map(|flag| format!("--{flag}={config}")),
            )
            .args(["--controllers=endpointslice-controller", "--use-service-account-credentials=true"])
            .args(["--leader-elect=false", "--bind-address=127.0.0.1"])
            .args(limits)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("start kube-controller-manager")?;
        Ok(RunningSubject::Yardstick(child))
    }

    /// Creates a service that selects pods by a label.
    pub async fn create_service(
        self,
        client: &Client,
        namespace: &str,
        name: &str,
        selector: Value,
    ) -> Result<()> {
        let ports = json!([{"name": "http", "port": 80, "targetPort": "http"}]);
        let params = PostParams::default();
        if self == Self::Patchbay {
            let object = serde_json::from_value(json!({
                "apiVersion": "patchbay.dev/v1alpha1", "kind": "NetworkService", "metadata": {"name": name},
                "spec": {"network": "core", "selector": selector, "ports": ports},
            }))?;
            let api: Api<NetworkService> = Api::namespaced(client.clone(), namespace);
            api.create(&params, &object).await.context("create a NetworkService")?;
        } else {
            let spec = json!({"clusterIP": "None", "selector": selector, "ports": ports});
            let object = serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec}))?;
            let api: Api<Service> = Api::namespaced(client.clone(), namespace);
            api.create(&params, &object).await.context("create a Service")?;
        }
        Ok(())
    }

    /// Deletes all services of the namespace, and what the garbage collector, which does not run, would delete with them.
    pub async fn delete_services(self, client: &Client, namespace: &str) -> Result<()> {
        let (params, all) = (DeleteParams::default(), ListParams::default());
        if self == Self::Patchbay {
            let api: Api<NetworkService> = Api::namespaced(client.clone(), namespace);
            api.delete_collection(&params, &all).await.context("delete the NetworkServices")?;
            wait::until(Duration::from_secs(60), "the NetworkServices to be deleted", || async {
                Ok(api.list(&all).await?.items.is_empty().then_some(()))
            })
            .await?;
        }
        let services: Api<Service> = Api::namespaced(client.clone(), namespace);
        for service in services.list(&all).await?.items {
            services.delete(&service.name_any(), &params).await.context("delete a Service")?;
        }
        let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), namespace);
        wait::until(Duration::from_secs(60), "the EndpointSlices to be deleted", || async {
            slices.delete_collection(&params, &all).await.context("delete the EndpointSlices")?;
            Ok(slices.list(&all).await?.items.is_empty().then_some(()))
        })
        .await
    }

    /// The writes of the controller since the offset, without Leases and events.
    pub fn writes(self, lab: &Lab, offset: AuditOffset) -> Result<Vec<AuditedRequest>> {
        let ours = |request: &AuditedRequest| match self {
            Self::Patchbay => request.user_agent.starts_with("patchbay-controller"),
            Self::Yardstick | Self::YardstickDefaultLimits => request.user == YARDSTICK_USER,
        };
        let mut requests = lab.requests_since(offset)?;
        requests.retain(|request| {
            request.is_write() && ours(request) && !["leases", "events"].contains(&request.resource.as_str())
        });
        Ok(requests)
    }

    /// The number of writes to EndpointSlices since the offset.
    pub fn slice_writes(self, lab: &Lab, offset: AuditOffset) -> Result<usize> {
        let writes = self.writes(lab, offset)?;
        Ok(writes.iter().filter(|request| request.resource == "endpointslices").count())
    }
}

impl RunningSubject {
    fn pid(&self) -> Result<Pid> {
        match self {
            Self::Patchbay(replica) => replica.pid(),
            Self::Yardstick(child) => Ok(Pid::from_raw(i32::try_from(child.id())?)),
        }
    }

    /// The resident memory in KiB.
    pub fn memory(&self) -> Result<u64> {
        let text = fs::read_to_string(format!("/proc/{}/status", self.pid()?))?;
        let line = text.lines().find(|line| line.starts_with("VmRSS:")).context("no VmRSS in /proc")?;
        Ok(line.split_whitespace().nth(1).context("VmRSS has no value")?.parse()?)
    }

    /// Ends the controller with SIGTERM, so that it releases its Lease.
    pub async fn stop(mut self) -> Result<()> {
        kill(self.pid()?, Signal::SIGTERM).context("stop the controller")?;
        match &mut self {
            Self::Patchbay(replica) => replica.wait_for_exit(STOP_TIMEOUT).await.map(drop),
            Self::Yardstick(child) => wait::until(STOP_TIMEOUT, "kube-controller-manager to exit", || {
                let exited = child.try_wait();
                async move { Ok(exited?) }
            })
            .await
            .map(drop),
        }
    }
}

impl Drop for RunningSubject {
    fn drop(&mut self) {
        // A replica ends itself when it is dropped.
        if let Self::Yardstick(child) = self {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Stops the controllers of the lab: no other controller may touch Nodes, pods or slices.
pub fn stop_other_controllers(lab: &Lab) -> Result<()> {
    let machine = lab.control_plane();
    for component in ["kube-controller-manager", "kube-scheduler", "coredns"] {
        machine.stop_component(component)?;
    }
    let running = machine.components()?;
    ensure!(running.contains_key("kube-apiserver"), "{running:?}");
    Ok(())
}
