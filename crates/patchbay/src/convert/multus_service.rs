//! Services annotated for multus-service.

use serde_json::{Map, Value};

use super::{
    draft::{Draft, strings},
    input::InputObject,
    quote,
};

/// The annotation that names the network of a Service.
pub const ANNOTATION: &str = "k8s.v1.cni.cncf.io/service-network";
/// The label that made kube-proxy ignore the Service.
const PROXY_LABEL: &str = "service.kubernetes.io/service-proxy-name";
const PROXY: &str = "multus-proxy";

const GENERAL: [&str; 2] = [
    "multus-service: the Services become headless; DNS answers with the addresses of the pods, and clients connect to \
     them without translation of addresses and ports",
    "multus-service: a Service that exists keeps its cluster IP; delete it after you created the NetworkService, which \
     then creates it again",
];

/// Fields of a Service that need no note: they are converted, set by the API server, or have no meaning without a cluster IP.
const SILENT: [&str; 12] = [
    "selector",
    "ports",
    "publishNotReadyAddresses",
    "clusterIP",
    "clusterIPs",
    "type",
    "sessionAffinity",
    "sessionAffinityConfig",
    "ipFamilies",
    "ipFamilyPolicy",
    "internalTrafficPolicy",
    "allocateLoadBalancerNodePorts",
];

pub fn is_annotated(object: &InputObject) -> bool {
    object.kind == "Service"
        && object.api_version == "v1"
        && object.get(&["metadata", "annotations", ANNOTATION]).is_some()
}

pub fn convert(object: &InputObject) -> Result<Draft, String> {
    let mut own_keys = vec![ANNOTATION];
    let labels = strings(object, &["metadata", "labels"])?;
    if labels.get(PROXY_LABEL).is_some_and(|proxy| proxy == PROXY) {
        own_keys.push(PROXY_LABEL);
    }
    let mut draft = Draft::new(object, &own_keys)?;
    draft.set_network(
        &format!("annotation {ANNOTATION}"),
        object.get(&["metadata", "annotations", ANNOTATION]),
    )?;
    let kind = object.text(&["spec", "type"]).unwrap_or("ClusterIP");
    match kind {
        "ClusterIP" => {}
        "NodePort" | "LoadBalancer" => draft.note(format!("type {kind} becomes Headless")),
        other => return Err(format!("a Service of type {} has no pods", quote(other))),
    }
    draft.set_selector(object)?;
    set_ports(&mut draft, object)?;
    match object.get(&["spec", "publishNotReadyAddresses"]) {
        Some(Value::Bool(true)) => draft.set("publishNotReadyAddresses", true.into()),
        Some(Value::Bool(false)) | None => {}
        Some(_) => return Err("spec.publishNotReadyAddresses is not a boolean".to_owned()),
    }
    match object.text(&["spec", "clusterIP"]) {
        None | Some("None" | "") => {}
        Some(address) => draft.note(format!("the cluster IP {} is not kept", quote(address))),
    }
    if object.text(&["spec", "sessionAffinity"]).is_some_and(|affinity| affinity != "None") {
        draft.note("session affinity is dropped");
    }
    if object.text(&["spec", "internalTrafficPolicy"]).is_some_and(|policy| policy != "Cluster") {
        draft.note("internalTrafficPolicy is dropped: DNS answers with the addresses of all nodes");
    }
    if object.get(&["spec", "ipFamilies"]).and_then(Value::as_array).is_some_and(|all| all.len() == 1) {
        draft.note("addresses of both families are published, not only those of spec.ipFamilies");
    }
    draft.note_unknown(object, &["spec"], &SILENT);
    draft.general.extend(GENERAL);
    Ok(draft)
}

fn set_ports(draft: &mut Draft, object: &InputObject) -> Result<(), String> {
    let ports = match object.get(&["spec", "ports"]) {
        None => return Ok(()),
        Some(Value::Array(ports)) => ports,
        Some(_) => return Err("spec.ports is not a list".to_owned()),
    };
    let mut converted = Vec::new();
    for port in ports {
        let Value::Object(port) = port else {
            return Err("spec.ports has an item that is no object".to_owned());
        };
        converted.push(convert_port(draft, port)?);
    }
    draft.set_ports(converted)
}

fn convert_port(draft: &mut Draft, port: &Map<String, Value>) -> Result<Map<String, Value>, String> {
    let mut converted = Map::new();
    for key in ["name", "protocol", "appProtocol"] {
        match port.get(key) {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) if text.is_empty() => {}
            Some(Value::String(text)) => drop(converted.insert(key.to_owned(), text.as_str().into())),
            Some(_) => return Err(format!("{key} of a port is not a string")),
        }
    }
    let number = port.get("port").cloned().unwrap_or_default();
    match port.get("targetPort") {
        None | Some(Value::Null) => {}
        Some(Value::Number(target)) if target.as_u64() == Some(0) => {}
        Some(Value::Number(target)) => {
            let valid = target.as_u64().is_some_and(|target| (1..=65535).contains(&target));
            if !valid {
                return Err(format!("target port {target} is not from 1 to 65535"));
            }
            if Some(target) != number.as_number() {
                draft.note(format!(
                    "clients connect to target port {target} instead of port {number}; SRV records have the target port"
                ));
            }
            converted.insert("targetPort".to_owned(), target.clone().into());
        }
        Some(Value::String(target)) if is_port_name(target) => {
            draft.note(format!(
                "clients connect to the number of container port {target} instead of port {number}; SRV records have it"
            ));
            converted.insert("targetPort".to_owned(), target.as_str().into());
        }
        Some(_) => return Err("targetPort is no number and no name of a port".to_owned()),
    }
    let known = ["name", "protocol", "appProtocol", "port", "targetPort", "nodePort"];
    for key in port.keys().filter(|key| !known.contains(&key.as_str())) {
        draft.note(format!("{} of port {number} is dropped", quote(key)));
    }
    if port.get("nodePort").and_then(Value::as_u64).is_some_and(|port| port != 0) {
        draft.note(format!("the node port of port {number} is dropped"));
    }
    converted.insert("port".to_owned(), number);
    Ok(converted)
}

/// Whether the text can be the name of a container port.
fn is_port_name(text: &str) -> bool {
    (1..=15).contains(&text.len())
        && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
        && text.contains(|c: char| c.is_ascii_lowercase())
        && !text.starts_with('-')
        && !text.ends_with('-')
        && !text.contains("--")
}
