//! NetworkServices in a lab, and the EndpointSlices of their Services.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use anyhow::{Context as _, Result, bail, ensure};
use api::{NetworkService, networkservice::SERVICE_NAME_LABEL};
use k8s_openapi::api::{
    core::v1::{Pod, Service},
    discovery::v1::EndpointSlice,
};
use kube::{
    Api, ResourceExt as _,
    api::{ListParams, PostParams},
};
use lab::{test_namespace::TestNamespace, wait};
use serde_json::{Value, json};

use crate::{bridge::WAIT_TIMEOUT, hotplug::statuses};

pub fn network_services(ns: &TestNamespace) -> Api<NetworkService> {
    Api::namespaced(ns.client.clone(), &ns.namespace)
}

pub fn services(ns: &TestNamespace) -> Api<Service> {
    Api::namespaced(ns.client.clone(), &ns.namespace)
}

/// Creates a NetworkService.
pub async fn create_network_service(ns: &TestNamespace, name: &str, spec: Value) -> Result<NetworkService> {
    let object: NetworkService = serde_json::from_value(json!({
        "apiVersion": "patchbay.dev/v1alpha1", "kind": "NetworkService", "metadata": {"name": name}, "spec": spec,
    }))?;
    let created = network_services(ns).create(&PostParams::default(), &object).await;
    created.with_context(|| format!("create NetworkService {name}"))
}

/// Creates a Service.
pub async fn create_service(
    ns: &TestNamespace,
    name: &str,
    annotations: Value,
    spec: Value,
) -> Result<Service> {
    let metadata = json!({"name": name, "annotations": annotations});
    let object: Service = serde_json::from_value(json!({"metadata": metadata, "spec": spec}))?;
    let created = services(ns).create(&PostParams::default(), &object).await;
    created.with_context(|| format!("create Service {name}"))
}

/// Status and reason of a condition of a NetworkService; empty if it does not have the condition.
pub fn condition(object: &NetworkService, kind: &str) -> (String, String) {
    let conditions = object.status.iter().flat_map(|status| &status.conditions);
    let found = conditions.filter(|condition| condition.r#type == kind);
    let text = |value: Value| value.as_str().unwrap_or_default().to_owned();
    found.map(|one| (text(json!(one.status)), one.reason.clone())).next().unwrap_or_default()
}

/// Waits until a condition of a NetworkService has this status and reason. An empty reason stands for any.
pub async fn wait_condition(
    ns: &TestNamespace,
    name: &str,
    kind: &str,
    status: &str,
    reason: &str,
) -> Result<()> {
    let what = format!("NetworkService {name} to have {kind}={status} {reason}");
    wait::until(WAIT_TIMEOUT, &what, || async {
        let object = network_services(ns).get(name).await?;
        let found = condition(&object, kind);
        if found.0 == status && (reason.is_empty() || found.1 == reason) {
            return Ok(Some(()));
        }
        bail!("{}", serde_json::to_string(&object.status)?)
    })
    .await
}

/// Waits until a NetworkService is Ready, with kubectl, as a user would.
pub fn wait_ready(ns: &TestNamespace, name: &str) -> Result<()> {
    let object = format!("nsvc/{name}");
    let arguments = ["-n", &ns.namespace, "wait", "--for=condition=Ready", &object, "--timeout=60s"];
    ns.lab.kubectl(&arguments).map(drop)
}

/// The EndpointSlices of a Service, of all managers.
pub async fn slices(ns: &TestNamespace, service: &str) -> Result<Vec<EndpointSlice>> {
    let api: Api<EndpointSlice> = Api::namespaced(ns.client.clone(), &ns.namespace);
    let params = ListParams::default().labels(&format!("{SERVICE_NAME_LABEL}={service}"));
    Ok(api.list(&params).await?.items)
}

/// The addresses of all EndpointSlices of a Service, and whether each is ready.
pub async fn endpoints(ns: &TestNamespace, service: &str) -> Result<BTreeMap<IpAddr, bool>> {
    let mut found = BTreeMap::new();
    for endpoint in slices(ns, service).await?.into_iter().flat_map(|slice| slice.endpoints) {
        // An absent condition means ready.
        let ready = endpoint.conditions.and_then(|all| all.ready).unwrap_or(true);
        for address in &endpoint.addresses {
            let duplicate = found.insert(address.parse()?, ready).is_some();
            ensure!(!duplicate, "{address} is in two slices of {service}");
        }
    }
    Ok(found)
}

/// Waits until exactly these addresses of a Service are ready.
pub async fn wait_ready_addresses(
    ns: &TestNamespace,
    service: &str,
    expected: &BTreeSet<IpAddr>,
) -> Result<()> {
    wait::until(WAIT_TIMEOUT, &format!("Service {service} to have {expected:?}"), || async {
        let found = endpoints(ns, service).await?;
        let ready: BTreeSet<IpAddr> = found.iter().filter(|(_, ready)| **ready).map(|(ip, _)| *ip).collect();
        ensure!(ready == *expected, "{found:?}");
        Ok(Some(()))
    })
    .await
}

/// The addresses of a pod on a NAD, from its network-status.
pub fn addresses_on(pod: &Pod, nad: &str) -> Result<BTreeSet<IpAddr>> {
    let mut found = BTreeSet::new();
    for entry in statuses(pod)?.iter().filter(|entry| entry["name"] == nad) {
        for address in entry["ips"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            found.insert(address.parse()?);
        }
    }
    ensure!(!found.is_empty(), "pod {} has no address on {nad}: {:?}", pod.name_any(), statuses(pod)?);
    Ok(found)
}
