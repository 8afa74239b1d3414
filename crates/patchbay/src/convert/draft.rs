//! A NetworkService that is being made from another object, and the rules that it must keep.
//!
//! The API server checks the same rules when the NetworkService is created; here they name the field of the input.

use std::collections::{BTreeMap, BTreeSet};

use api::networkservice::{MAX_PORTS, MAX_SELECTOR_LABELS};
use serde_json::{Map, Value, json};

use super::{input::InputObject, quote};

/// The annotation of `kubectl apply`. It describes the input, not the output.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// A NetworkService, and what differs from the object it was made from.
#[derive(Debug, Default)]
pub struct Draft {
    pub namespace: Option<String>,
    pub name: String,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    spec: Map<String, Value>,
    /// What differs for this object.
    pub notes: Vec<String>,
    /// What differs for all objects of its kind.
    pub general: Vec<&'static str>,
}

impl Draft {
    /// Namespace, name, labels and annotations of the object, except the annotations and labels of its controller.
    pub fn new(object: &InputObject, own_keys: &[&str]) -> Result<Self, String> {
        let name = match object.get(&["metadata", "name"]) {
            Some(Value::String(name)) => name.clone(),
            _ => return Err("metadata.name is missing".to_owned()),
        };
        if !is_dns_1035_label(&name) {
            return Err(format!(
                "{} cannot be the name of a Service: it must be at most 63 lower-case letters, digits and '-', starting \
                 with a letter",
                quote(&name)
            ));
        }
        let namespace = match object.get(&["metadata", "namespace"]) {
            None => None,
            Some(Value::String(namespace)) if namespace.is_empty() => None,
            Some(Value::String(namespace)) if is_dns_1123_label(namespace) => Some(namespace.clone()),
            Some(_) => return Err("metadata.namespace is not a valid namespace".to_owned()),
        };
        let keep = |mut all: BTreeMap<String, String>| {
            all.retain(|key, _| key != LAST_APPLIED && !own_keys.contains(&key.as_str()));
            all
        };
        Ok(Self {
            namespace,
            name,
            labels: keep(strings(object, &["metadata", "labels"])?),
            annotations: keep(strings(object, &["metadata", "annotations"])?),
            ..Self::default()
        })
    }

    /// Whether the object has labels of its own.
    pub fn has_labels(&self) -> bool {
        !self.labels.is_empty()
    }

    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    pub fn set(&mut self, key: &str, value: Value) {
        self.spec.insert(key.to_owned(), value);
    }

    /// Sets the network: the name of a NAD, or `namespace/name`.
    pub fn set_network(&mut self, field: &str, value: Option<&Value>) -> Result<(), String> {
        let network = match value {
            Some(Value::String(network)) => network.trim(),
            Some(_) => return Err(format!("{field} is not a string")),
            None => return Err(format!("{field} is missing")),
        };
        let (namespace, name) = match network.split_once('/') {
            Some((namespace, name)) => (Some(namespace), name),
            None => (None, network),
        };
        if !namespace.is_none_or(is_dns_1123_label) || !is_dns_1123_subdomain(name) {
            return Err(format!(
                "{field} is {:?}; expected NAME or NAMESPACE/NAME of a NetworkAttachmentDefinition",
                quote(network)
            ));
        }
        self.set("network", network.into());
        Ok(())
    }

    /// Adds a namespace to the network if it has none. Older controllers compared the name alone, so the NAD may be in any
    /// namespace.
    pub fn complete_network(&mut self, namespace: Option<&str>) {
        let network = self.spec.get("network").and_then(Value::as_str).unwrap_or_default();
        if network.contains('/') {
            return;
        }
        if let Some(namespace) = namespace {
            let network = format!("{namespace}/{network}");
            return self.set("network", network.into());
        }
        let note = format!(
            "network {network} means the NetworkAttachmentDefinition of that name in the namespace of the NetworkService; set \
             --network-namespace if it is in another one"
        );
        self.note(note);
    }

    /// Sets the selector. An empty one would select every pod of the namespace.
    pub fn set_selector(&mut self, object: &InputObject) -> Result<(), String> {
        let selector = strings(object, &["spec", "selector"])?;
        if selector.is_empty() {
            return Err("spec.selector is empty; a NetworkService needs the labels of its pods".to_owned());
        }
        if selector.len() > MAX_SELECTOR_LABELS {
            return Err(format!("spec.selector has more than {MAX_SELECTOR_LABELS} labels"));
        }
        if let Some((key, value)) = selector.iter().find(|(key, value)| !is_label(key, value)) {
            return Err(format!("spec.selector: {}={} is not a label", quote(key), quote(value)));
        }
        self.set("selector", json!(selector));
        Ok(())
    }

    /// Sets the ports after it checked them.
    pub fn set_ports(&mut self, ports: Vec<Map<String, Value>>) -> Result<(), String> {
        if ports.len() > MAX_PORTS {
            return Err(format!("{} ports; a NetworkService has at most {MAX_PORTS}", ports.len()));
        }
        let (mut names, mut numbers) = (BTreeSet::new(), BTreeSet::new());
        for port in &ports {
            let name = port.get("name").and_then(Value::as_str).unwrap_or_default();
            if name.is_empty() && ports.len() > 1 {
                return Err("several ports, and one of them has no name".to_owned());
            }
            if !name.is_empty() && !is_dns_1123_label(name) {
                return Err(format!("{} is not a valid name of a port", quote(name)));
            }
            if !names.insert(name) {
                return Err(format!("two ports have the name {}", quote(name)));
            }
            let number = port.get("port").and_then(Value::as_u64);
            let number = number.filter(|number| (1..=65535).contains(number));
            let Some(number) = number else {
                return Err(format!("port {} has no number from 1 to 65535", quote(name)));
            };
            let protocol = port.get("protocol").and_then(Value::as_str).unwrap_or("TCP");
            if !["TCP", "UDP", "SCTP"].contains(&protocol) {
                return Err(format!("port {number} has the protocol {}", quote(protocol)));
            }
            if !numbers.insert((number, protocol)) {
                return Err(format!("two ports have the number {number} and the protocol {protocol}"));
            }
        }
        if !ports.is_empty() {
            self.set("ports", Value::Array(ports.into_iter().map(Value::Object).collect()));
        }
        Ok(())
    }

    /// Reports the fields of an object that the conversion does not know.
    pub fn note_unknown(&mut self, object: &InputObject, path: &[&str], known: &[&str]) {
        let Some(fields) = object.get(path).and_then(Value::as_object) else { return };
        for field in fields.keys().filter(|field| !known.contains(&field.as_str())) {
            self.note(format!("{}.{} is dropped", path.join("."), quote(field)));
        }
    }

    /// The manifest.
    pub fn object(&self) -> Value {
        let mut metadata = Map::new();
        metadata.insert("name".to_owned(), self.name.as_str().into());
        if let Some(namespace) = &self.namespace {
            metadata.insert("namespace".to_owned(), namespace.as_str().into());
        }
        for (key, values) in [("labels", &self.labels), ("annotations", &self.annotations)] {
            if !values.is_empty() {
                metadata.insert(key.to_owned(), json!(values));
            }
        }
        json!({
            "apiVersion": "patchbay.dev/v1alpha1",
            "kind": "NetworkService",
            "metadata": metadata,
            "spec": self.spec,
        })
    }
}

/// A map of strings, such as labels.
pub fn strings(object: &InputObject, path: &[&str]) -> Result<BTreeMap<String, String>, String> {
    let path_text = || path.join(".");
    let map = match object.get(path) {
        None => return Ok(BTreeMap::new()),
        Some(Value::Object(map)) => map,
        Some(_) => return Err(format!("{} is not a map of strings", path_text())),
    };
    let entry = |(key, value): (&String, &Value)| match value {
        Value::String(text) => Ok((key.clone(), text.clone())),
        _ => Err(format!("{}: the value of {} is not a string; quote it", path_text(), quote(key))),
    };
    map.iter().map(entry).collect()
}

pub fn is_dns_1123_label(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    (1..=63).contains(&text.len())
        && text.chars().all(inner)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

fn is_dns_1035_label(text: &str) -> bool {
    is_dns_1123_label(text) && text.starts_with(|c: char| c.is_ascii_lowercase())
}

fn is_dns_1123_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_dns_1123_label)
}

/// Whether a pod can have this label.
fn is_label(key: &str, value: &str) -> bool {
    let (prefix, name) = match key.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    prefix.is_none_or(is_dns_1123_subdomain)
        && !name.is_empty()
        && is_label_value(name)
        && is_label_value(value)
}

fn is_label_value(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let outer = |c: char| c.is_ascii_alphanumeric();
    text.len() <= 63
        && text.chars().all(inner)
        && text.chars().next().is_none_or(outer)
        && text.chars().next_back().is_none_or(outer)
}
