//! Runs CNI plugins of the host.

mod cache;
mod children;
mod error;
mod input;
mod limits;
mod metrics;
mod process;
mod result;
#[cfg(test)]
mod tests;

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::{Duration, Instant},
};

use api::{
    nad_config::{NadConfig, PluginConfig},
    network_status::DeviceInfo,
};
use plan::hotplug::DelErrors;
use serde_json::{Map, Value};
use tokio::{
    sync::{oneshot, watch},
    task::JoinSet,
    time::timeout,
};
use tracing::warn;
use wire::cni::{Success, Verb, Version};

pub use children::CHILDREN;
pub use error::ExecError;
pub use metrics::Metrics;
pub use result::attachment_result;

use self::{
    input::{ConfigVersion, PluginResult},
    limits::{CallKind, Limits, NotAdmitted, Permit},
    process::PluginCall,
};
use crate::host_mounts::HostMounts;

/// Settings of the executor. All paths are paths of the host.
#[derive(Debug, Clone)]
pub struct ExecutorConfig {
    /// Where plugins are looked up at first, in order. Also `CNI_PATH`. See [`Executor::set_plugin_dirs`].
    pub plugin_dirs: Vec<PathBuf>,
    /// How long one call of a plugin may take.
    pub timeout: Duration,
    /// The directory of libcni's result cache.
    pub cache_dir: PathBuf,
    /// The directory of device information files.
    pub device_info_dir: PathBuf,
    /// How many plugins run at once.
    pub limits: LimitsConfig,
}

/// How many plugins run at once.
#[derive(Debug, Clone)]
pub struct LimitsConfig {
    /// Calls at once, without the slow ones.
    pub slots: usize,
    /// A call that takes longer is slow: it gives its slot to another call.
    pub slow_after: Duration,
    /// Processes at once, with the slow ones.
    pub processes: usize,
    /// Of these processes, how many only DEL may use.
    pub reserved_for_del: usize,
    /// ADDs of one plugin type at once, with the slow ones. Every running call can become slow, so that more quick calls
    /// would break the limit for slow ones.
    pub adds_per_plugin: usize,
    /// DELs of one plugin type at once, with the slow ones.
    pub dels_per_plugin: usize,
    /// How long an ADD waits for a slot.
    pub add_wait: Duration,
    /// How long a DEL waits for a slot.
    pub del_wait: Duration,
}

impl Default for ExecutorConfig {
    fn default() -> Self {
        Self {
            plugin_dirs: vec![PathBuf::from("/opt/cni/bin")],
            timeout: Duration::from_secs(30),
            cache_dir: PathBuf::from("/var/lib/cni/results"),
            device_info_dir: PathBuf::from("/var/run/k8s.cni.cncf.io/devinfo/cni"),
            limits: LimitsConfig::default(),
        }
    }
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self {
            slots: 16,
            slow_after: Duration::from_secs(2),
            processes: 48,
            reserved_for_del: 8,
            adds_per_plugin: 8,
            dels_per_plugin: 4,
            add_wait: Duration::from_secs(10),
            del_wait: Duration::from_secs(30),
        }
    }
}

/// An attachment to add or to remove.
#[derive(Debug, Clone)]
pub struct CniRequest {
    /// The configuration, with its name. The `cni-args` of the element are already in it.
    pub config: NadConfig,
    /// `namespace/name` of the NAD.
    pub nad: String,
    /// The id of the sandbox.
    pub container_id: String,
    /// The path of the sandbox's network namespace. `None` releases addresses and touches no link.
    pub netns: Option<String>,
    /// The name of the interface in the pod.
    pub ifname: String,
    /// The content of `CNI_ARGS`, in order.
    pub cni_args: Vec<(String, String)>,
    /// The arguments of capabilities. A plugin gets those that it declares.
    pub capability_args: Map<String, Value>,
}

/// The result of an ADD.
#[derive(Debug, Clone)]
pub struct CniAddResult {
    /// The JSON of the last plugin, in the version of the configuration.
    pub result: String,
    pub success: Success,
    pub device_info: Option<DeviceInfo>,
}

/// Runs CNI plugins in the mount namespace of the host. Clones share the limits.
#[derive(Debug, Clone)]
pub struct Executor(Arc<ExecutorState>);

#[derive(Debug)]
struct ExecutorState {
    host: HostMounts,
    config: ExecutorConfig,
    plugin_dirs: RwLock<Vec<PathBuf>>,
    limits: Limits,
    metrics: Metrics,
    /// ADDs and DELs that run.
    operations: watch::Sender<usize>,
    /// Each plugin has a task that ends with its process, also if the caller is gone.
    processes: Mutex<JoinSet<()>>,
}

impl Executor {
    pub fn new(host: HostMounts, config: ExecutorConfig, metrics: Metrics) -> Self {
        let limits = Limits::new(config.limits.clone(), metrics.clone());
        let (operations, processes) = (watch::Sender::new(0), Mutex::default());
        let plugin_dirs = RwLock::new(config.plugin_dirs.clone());
        Self(Arc::new(ExecutorState { host, config, plugin_dirs, limits, metrics, operations, processes }))
    }

    /// Replaces the directories in which plugins are looked up.
    pub fn set_plugin_dirs(&self, dirs: Vec<PathBuf>) {
        *self.0.plugin_dirs.write().unwrap_or_else(PoisonError::into_inner) = dirs;
    }

    /// Waits until the first plugin of an ADD may start. Nothing has run if this fails.
    pub async fn admit_add(&self, request: &CniRequest) -> Result<AddPermit, ExecError> {
        let operation = Operation::start(Arc::clone(&self.0));
        input::check(request)?;
        let version = ConfigVersion::of(&request.config)?;
        let Some(plugin) = request.config.plugins.first() else {
            return Err(ExecError::Invalid("the configuration has no plugin".to_owned()));
        };
        let permit = self.0.admit(&plugin.plugin, Verb::Add, request, true).await?;
        Ok(AddPermit { permit, version, _operation: operation })
    }

    /// Runs ADD of all plugins. After an error, the caller runs DEL.
    ///
    /// A plugin that was started runs on if the future or the executor is dropped.
    pub async fn add(&self, request: &CniRequest, permit: AddPermit) -> Result<CniAddResult, ExecError> {
        let AddPermit { permit, version, _operation } = permit;
        let mut permit = Some(permit);
        let device_info = cache::device_info_path(&self.0.config.device_info_dir, request);
        let capability_args = capability_args(request, device_info.as_deref());
        let mut result: Option<PluginResult> = None;
        for plugin in &request.config.plugins {
            let prev_result = result.as_ref().map(|result| &result.json);
            let stdin = input::stdin(request, &version, plugin, &capability_args, prev_result);
            let call = self.0.call(&plugin.plugin, Verb::Add, stdin, request);
            let parse = |stdout: Vec<u8>| {
                let failed = |error| ExecError::Plugin { plugin: plugin.plugin.clone(), error };
                PluginResult::from_output(&stdout, &version).map_err(failed)
            };
            let permit = match permit.take() {
                Some(permit) => permit,
                None => self.0.admit(&plugin.plugin, Verb::Add, request, false).await?,
            };
            result = Some(self.0.run(call, permit, parse).await?);
        }
        let Some(PluginResult { json, success }) = result else {
            return Err(ExecError::Invalid("the configuration has no plugin".to_owned()));
        };
        let result = json.to_string();
        self.0.cache_result(request, &capability_args, &result).await;
        let device_info = self.0.device_info(device_info).await;
        Ok(CniAddResult { result, success, device_info })
    }

    /// The result of an ADD that the result cache has, for a daemon that did not record it.
    pub async fn recorded_result(&self, request: &CniRequest) -> Option<CniAddResult> {
        input::check(request).ok()?;
        let version = ConfigVersion::of(&request.config).ok()?;
        let text = self.0.cached_result(request).await?;
        let PluginResult { json, success } = PluginResult::from_stored(&text, &version)?;
        Some(CniAddResult { result: json.to_string(), success, device_info: None })
    }

    /// Removes the result of an earlier attachment from the result cache.
    pub async fn forget_result(&self, request: &CniRequest) {
        if input::check(request).is_ok() {
            self.0.remove(vec![cache::result_path(&self.0.config.cache_dir, request)]).await;
        }
    }

    /// Runs DEL of all plugins in reverse order, also if one of them fails. Returns the first error.
    ///
    /// The plugins get the result of ADD; if the caller does not have it, that of the result cache.
    pub async fn del(
        &self,
        request: &CniRequest,
        prev_result: Option<&str>,
        errors: DelErrors,
    ) -> Result<(), ExecError> {
        self.del_with(request, prev_result, MissingPlugin::Fails, errors).await
    }

    /// Runs DEL after an ADD that did not finish. A plugin that does not exist, and a configuration that no plugin can be
    /// called with, are no errors: ADD ran nothing of them.
    pub async fn del_unfinished(&self, request: &CniRequest, errors: DelErrors) -> Result<(), ExecError> {
        match self.del_with(request, None, MissingPlugin::Ignored, errors).await {
            Err(ExecError::Invalid(_)) => Ok(()),
            result => result,
        }
    }

    async fn del_with(
        &self,
        request: &CniRequest,
        prev_result: Option<&str>,
        missing: MissingPlugin,
        errors: DelErrors,
    ) -> Result<(), ExecError> {
        let _operation = Operation::start(Arc::clone(&self.0));
        input::check(request)?;
        let version = ConfigVersion::of(&request.config)?;
        let device_info = cache::device_info_path(&self.0.config.device_info_dir, request);
        let capability_args = capability_args(request, device_info.as_deref());
        let prev_result = if version.version < Version::V0_4_0 {
            None
        } else if let Some(text) = prev_result {
            PluginResult::from_stored(text, &version)
        } else {
            let text = self.0.cached_result(request).await;
            text.and_then(|text| PluginResult::from_stored(&text, &version))
        };
        let prev_result = prev_result.as_ref().map(|result| &result.json);
        let (mut failed, last) = (None, request.config.plugins.len().saturating_sub(1));
        // Whether the errors so far are no reason to try again.
        let mut abandoned = errors == DelErrors::Abandon;
        for (index, plugin) in request.config.plugins.iter().enumerate().rev() {
            let stdin = input::stdin(request, &version, plugin, &capability_args, prev_result);
            let call = self.0.call(&plugin.plugin, Verb::Del, stdin.clone(), request);
            let run = async {
                let permit = self.0.admit(&plugin.plugin, Verb::Del, request, index == last).await?;
                self.0.run(call, permit, |_| Ok(())).await
            };
            let Err(error) = run.await else { continue };
            if matches!(error, ExecError::Stopping) {
                return Err(error);
            }
            if missing == MissingPlugin::Ignored && matches!(error, ExecError::PluginMissing { .. }) {
                continue;
            }
            warn!(attachment = %attachment(request), "DEL failed: {error}");
            abandoned &= matches!(error, ExecError::Plugin { .. } | ExecError::PluginMissing { .. });
            failed.get_or_insert(error);
            if errors != DelErrors::Fail && index == 0 {
                abandoned &= self.release_addresses(request, plugin, stdin).await;
            }
        }
        // A main plugin that succeeded has released its addresses. One without an IPAM plugin has not said that it did.
        if abandoned
            && request.config.plugins.first().is_some_and(|main| main.ipam.is_some())
            && let Some(error) = failed.take()
        {
            warn!(attachment = %attachment(request), "gives up DEL after many hours; its addresses are released: {error}");
        }
        let mut files: Vec<PathBuf> = device_info.into_iter().collect();
        if failed.is_none() {
            files.push(cache::result_path(&self.0.config.cache_dir, request));
        }
        self.0.remove(files).await;
        failed.map_or(Ok(()), Err)
    }

    /// Calls DEL of a plugin's IPAM plugin, as the plugin does. Returns whether that released the addresses.
    async fn release_addresses(&self, request: &CniRequest, plugin: &PluginConfig, stdin: String) -> bool {
        let Some(ipam) = &plugin.ipam else { return false };
        let call = self.0.call(ipam, Verb::Del, stdin, request);
        let run = async {
            let permit = self.0.admit(ipam, Verb::Del, request, false).await?;
            self.0.run(call, permit, |_| Ok(())).await
        };
        let Err(error) = run.await else { return true };
        warn!(attachment = %attachment(request), "DEL of the IPAM plugin failed: {error}");
        false
    }

    /// Refuses new operations and waits up to `grace` for those that started a plugin. Returns whether all of them
    /// finished. The others run on.
    pub async fn drain(&self, grace: Duration) -> bool {
        self.0.limits.close();
        let mut operations = self.0.operations.subscribe();
        let drained = operations.wait_for(|count| *count == 0);
        timeout(grace, drained).await.is_ok()
    }
}

/// What a plugin without an executable means for DEL.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MissingPlugin {
    Fails,
    Ignored,
}

/// Lets an ADD start.
#[derive(Debug)]
pub struct AddPermit {
    permit: Permit,
    version: ConfigVersion,
    _operation: Operation,
}

/// Counts an ADD or DEL while it runs.
#[derive(Debug)]
struct Operation(Arc<ExecutorState>);

impl Operation {
    fn start(inner: Arc<ExecutorState>) -> Self {
        inner.operations.send_modify(|count| *count += 1);
        Self(inner)
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        self.0.operations.send_modify(|count| *count -= 1);
    }
}

impl ExecutorState {
    fn call(&self, plugin: &str, verb: Verb, stdin: String, request: &CniRequest) -> PluginCall {
        let dirs = self.plugin_dirs.read().unwrap_or_else(PoisonError::into_inner).clone();
        PluginCall {
            plugin: plugin.to_owned(),
            env: input::env(request, verb, &dirs),
            dirs,
            verb,
            stdin,
            timeout: self.config.timeout,
            slow_after: self.config.limits.slow_after,
        }
    }

    /// Waits until a plugin may start.
    async fn admit(
        &self,
        plugin: &str,
        verb: Verb,
        request: &CniRequest,
        first: bool,
    ) -> Result<Permit, ExecError> {
        let namespace = request.cni_args.iter().find(|(name, _)| name == "K8S_POD_NAMESPACE");
        let namespace = namespace.map_or("", |(_, namespace)| namespace);
        let call = CallKind { plugin, verb, namespace, first };
        let admitted = self.limits.admit(call).await.map_err(|refused| match refused {
            NotAdmitted::Closed => ExecError::Stopping,
            NotAdmitted::Busy(reason) => ExecError::Busy { plugin: plugin.to_owned(), reason },
        });
        if admitted.is_err() {
            self.metrics.count(verb, &admitted, None);
        }
        admitted
    }

    /// Runs one plugin and reads its output.
    async fn run<T>(
        &self,
        call: PluginCall,
        permit: Permit,
        parse: impl FnOnce(Vec<u8>) -> Result<T, ExecError>,
    ) -> Result<T, ExecError> {
        let (plugin, verb) = (call.plugin.clone(), call.verb);
        let start = Instant::now();
        let (reply, replied) = oneshot::channel();
        {
            let mut processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
            while processes.try_join_next().is_some() {}
            processes.spawn(call.run(self.host.clone(), permit, reply));
        }
        let lost = || ExecError::Host { plugin, source: io::Error::other("its task panicked") };
        let result = replied.await.unwrap_or_else(|_| Err(lost())).and_then(parse);
        self.metrics.count(verb, &result, Some(start.elapsed()));
        result
    }

    /// Writes the result for other programs. A full disk must not undo an attachment.
    async fn cache_result(&self, request: &CniRequest, capability_args: &Map<String, Value>, result: &str) {
        let path = cache::result_path(&self.config.cache_dir, request);
        let content = cache::render(request, capability_args, result);
        let written = match content {
            Ok(content) => self.host.run(move || cache::write(&path, &content)).await.flatten(),
            Err(error) => Err(error),
        };
        if let Err(error) = written {
            let dir = self.config.cache_dir.display();
            warn!(attachment = %attachment(request), "cannot write the result to the cache {dir}: {error}");
        }
    }

    async fn cached_result(&self, request: &CniRequest) -> Option<String> {
        let path = cache::result_path(&self.config.cache_dir, request);
        let (id, ifname) = (request.container_id.clone(), request.ifname.clone());
        self.host.run(move || cache::read_result(&path, &id, &ifname)).await.ok().flatten()
    }

    async fn device_info(&self, path: Option<PathBuf>) -> Option<DeviceInfo> {
        let path = path?;
        let text = path.display().to_string();
        let info = self.host.run(move || cache::read_device_info(&path)).await.flatten();
        info.unwrap_or_else(|error| {
            warn!(path = text, "cannot read the device information: {error}");
            None
        })
    }

    async fn remove(&self, files: Vec<PathBuf>) {
        let removed = self.host.run(move || files.iter().try_for_each(|path| cache::remove(path))).await;
        if let Err(error) = removed.flatten() {
            warn!("cannot remove the files of an attachment: {error}");
        }
    }
}

/// The arguments of capabilities, with the path for device information as Multus passes it.
fn capability_args(request: &CniRequest, device_info: Option<&Path>) -> Map<String, Value> {
    let mut args = request.capability_args.clone();
    if let Some(path) = device_info {
        args.insert("CNIDeviceInfoFile".to_owned(), Value::from(path.to_string_lossy()));
    }
    args
}

/// The name of an attachment, for the log.
fn attachment(request: &CniRequest) -> String {
    format!("{} {} {}", request.nad, request.container_id, request.ifname)
}

/// The directories as in `PATH`.
fn join_dirs(dirs: &[PathBuf]) -> String {
    let dirs: Vec<_> = dirs.iter().map(|dir| dir.to_string_lossy()).collect();
    dirs.join(":")
}
