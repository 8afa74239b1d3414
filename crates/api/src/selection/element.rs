//! One network that a pod requests, with every key of the standard and of Multus.

use std::{fmt::Display, net::IpAddr, str::FromStr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;

use super::{NadRef, Parsed, Problem, is_name, split_item, truncate};
use crate::{
    IfName, RawJson, RawObject,
    raw_json::{error_text, list_items, same_key},
};

/// One network that a pod requests.
///
/// Addresses are kept as they are written, because plugins get them as they are written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetworkSelectionElement {
    /// The namespace of the NAD, if it is given.
    pub namespace: Option<String>,
    /// The name of the NAD.
    pub name: String,
    /// The requested name of the interface in the pod.
    pub interface: Option<IfName>,
    /// The requested IP addresses, each with or without a prefix length.
    pub ips: Vec<String>,
    /// The requested MAC address.
    pub mac: Option<String>,
    /// The requested InfiniBand GUID.
    pub infiniband_guid: Option<String>,
    /// Ports of the node that lead to the pod.
    pub port_mappings: Vec<PortMapping>,
    /// The requested bandwidth limits.
    pub bandwidth: Option<Bandwidth>,
    /// Additional arguments for the plugin.
    pub cni_args: Option<RawObject>,
    /// The gateways of the pod's default route, if it uses this network.
    pub default_route: Vec<IpAddr>,
    /// The device that the plugin attaches.
    pub device_id: Option<String>,
    /// The name of the IPAMClaim with its addresses.
    pub ipam_claim: Option<String>,
    /// All other keys with the text of their values, in their order.
    pub other: Vec<(String, RawJson)>,
}

/// A port of the node that leads to a port of the pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PortMapping {
    /// The port on the node.
    #[serde(default)]
    pub host_port: u16,
    /// The port in the pod.
    #[serde(default)]
    pub container_port: u16,
    /// The protocol: tcp, udp or sctp.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub protocol: String,
    /// The address on the node.
    #[serde(default, rename = "hostIP", skip_serializing_if = "String::is_empty")]
    pub host_ip: String,
}

/// Limits of the bandwidth, in bits per second and bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Bandwidth {
    /// The rate towards the pod.
    pub ingress_rate: u64,
    /// The burst towards the pod.
    pub ingress_burst: u64,
    /// The rate from the pod.
    pub egress_rate: u64,
    /// The burst from the pod.
    pub egress_burst: u64,
}

/// The keys of the standard and of Multus.
const KEYS: [&str; 13] = [
    "name",
    "namespace",
    "ips",
    "mac",
    "infiniband-guid",
    "interface",
    INTERFACE_REQUEST,
    "portMappings",
    "bandwidth",
    "cni-args",
    "default-route",
    "deviceID",
    "ipam-claim-reference",
];
/// A deprecated key of Multus, used if `interface` is empty.
const INTERFACE_REQUEST: &str = "interfaceRequest";

impl NetworkSelectionElement {
    /// The NAD that the element refers to in an object of this namespace.
    pub fn reference(&self, namespace: &str) -> NadRef {
        NadRef::new(self.namespace.as_deref().unwrap_or(namespace), self.name.as_str())
    }

    /// The element as an object of the JSON list, in the order of keys in which Multus' client writes it.
    pub fn to_json(&self) -> String {
        let mut object = Fields::default();
        object.put("name", Some(&self.name));
        object.put("namespace", self.namespace.as_ref());
        object.put("ips", filled(&self.ips));
        object.put("mac", self.mac.as_ref());
        object.put("infiniband-guid", self.infiniband_guid.as_ref());
        object.put("interface", self.interface.as_ref());
        object.put("portMappings", filled(&self.port_mappings));
        object.put("bandwidth", self.bandwidth.as_ref());
        if let Some(args) = &self.cni_args {
            object.put_raw("cni-args", args.as_str());
        }
        object.put("default-route", filled(&self.default_route));
        object.put("deviceID", self.device_id.as_ref());
        object.put("ipam-claim-reference", self.ipam_claim.as_ref());
        for (key, value) in &self.other {
            object.put_raw(key, value.as_str());
        }
        object.finish()
    }

    /// The element as `[namespace/]name[@interface]`, if that form can express it for every consumer.
    ///
    /// Some consumers accept there only DNS labels, as names of interfaces too.
    pub(super) fn to_item(&self) -> Option<String> {
        let named = Self {
            namespace: self.namespace.clone(),
            name: self.name.clone(),
            interface: self.interface.clone(),
            ..Self::default()
        };
        let interface = self.interface.as_ref().map(IfName::as_str);
        let parts = [self.namespace.as_deref(), Some(self.name.as_str()), interface];
        if *self != named || !parts.into_iter().flatten().all(is_label) {
            return None;
        }
        let namespace = self.namespace.iter().map(|namespace| format!("{namespace}/"));
        let interface = interface.iter().map(|interface| format!("@{interface}"));
        Some(namespace.chain([self.name.clone()]).chain(interface).collect())
    }
}

/// The text of a JSON object that is being written.
#[derive(Default)]
struct Fields(String);

impl Fields {
    fn put<T: Serialize + ?Sized>(&mut self, key: &str, value: Option<&T>) {
        // Strings, numbers and lists of them can always be serialized.
        if let Some(text) = value.and_then(|value| serde_json::to_string(value).ok()) {
            self.put_raw(key, &text);
        }
    }

    fn put_raw(&mut self, key: &str, value: &str) {
        self.0.push(if self.0.is_empty() { '{' } else { ',' });
        self.0.push_str(&Value::from(key).to_string());
        self.0.push(':');
        self.0.push_str(value);
    }

    fn finish(self) -> String {
        self.0 + "}"
    }
}

fn filled<T>(list: &[T]) -> Option<&[T]> {
    (!list.is_empty()).then_some(list)
}

/// Whether this is a DNS label, apart from its length.
fn is_label(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !text.is_empty() && text.chars().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}

/// Parses an object of the JSON list.
pub(super) fn parse(object: &RawObject) -> Parsed {
    let nad = find_nad(object);
    let element = match &nad {
        Some((namespace, name)) => read(object, namespace.clone(), name.clone()),
        None => Err(invalid_nad(object)),
    };
    Parsed { nad, element }
}

/// The namespace, if it is given, and the name of the NAD.
///
/// The standard does not allow `namespace/name` as a name, but it is in use.
fn find_nad(object: &RawObject) -> Option<(Option<String>, String)> {
    // A later `null` must not hide the reference from those who count users: Multus attaches the network.
    let text = |key| {
        let text = object.get_not_null(key).map(serde_json::from_str::<String>);
        text.and_then(Result::ok).unwrap_or_default()
    };
    let (name, namespace) = (text("name"), text("namespace"));
    let item = split_item(&name)?;
    let namespace = match namespace.trim() {
        "" => item.namespace,
        namespace if is_name(namespace) => Some(namespace),
        _ => return None,
    };
    Some((namespace.map(str::to_owned), item.name.to_owned()))
}

fn invalid_nad(object: &RawObject) -> Problem {
    let read = |key: &'static str| Reader(object).text(key);
    match (read("name"), read("namespace")) {
        (Err(problem), _) | (_, Err(problem)) => problem,
        (Ok(None), _) => Problem { offset: 0, key: Some("name"), message: "the name is missing".to_owned() },
        (Ok(Some(name)), _) if split_item(&name).is_none() => {
            Reader(object).problem("name", format!("name: {:?} is not a name of a NAD", truncate(&name)))
        }
        (Ok(Some(_)), Ok(namespace)) => {
            let namespace = truncate(&namespace.unwrap_or_default());
            Reader(object)
                .problem("namespace", format!("namespace: {namespace:?} is not a name of a namespace"))
        }
    }
}

fn read(
    object: &RawObject,
    namespace: Option<String>,
    name: String,
) -> Result<NetworkSelectionElement, Problem> {
    let reader = Reader(object);
    let interface = match reader.parsed::<IfName>("interface")? {
        Some(interface) => Some(interface),
        None => match reader.parsed(INTERFACE_REQUEST)? {
            Some(interface) => Some(interface),
            None => reader.interface_in_name()?,
        },
    };
    let other = object.iter().filter(|(key, _)| KEYS.iter().all(|known| !same_key(key, known)));
    let other = other.map(|(key, value)| Ok((key.to_owned(), RawJson::parse(value)?)));
    Ok(NetworkSelectionElement {
        namespace,
        name,
        interface,
        ips: reader.list(
            "ips",
            |ip| ip.parse::<IpNet>().is_ok() || ip.parse::<IpAddr>().is_ok(),
            "an IP address",
        )?,
        mac: reader.hardware_address("mac", "a MAC address")?,
        infiniband_guid: reader.hardware_address("infiniband-guid", "a GUID")?,
        port_mappings: reader.fields_list("portMappings")?,
        bandwidth: reader.fields("bandwidth")?,
        cni_args: reader.object("cni-args")?,
        default_route: reader.value("default-route")?.unwrap_or_default(),
        device_id: reader.text("deviceID")?,
        ipam_claim: reader.text("ipam-claim-reference")?,
        other: other.collect::<serde_json::Result<_>>().map_err(|error| Problem {
            offset: 0,
            key: None,
            message: error_text(&error),
        })?,
    })
}

/// Reads the keys of an element.
struct Reader<'a>(&'a RawObject);

impl Reader<'_> {
    fn problem(&self, key: &'static str, message: String) -> Problem {
        let offset = self.0.span(key).map_or(0, |span| span.start);
        Problem { offset, key: Some(key), message }
    }

    fn value<T: DeserializeOwned>(&self, key: &'static str) -> Result<Option<T>, Problem> {
        self.0
            .read(key)
            .map_err(|error| self.problem(key, format!("{key}: {}", truncate(&error_text(&error)))))
    }

    /// An object in Rust's types. Serde alone would read a list into a struct too.
    fn fields<T: DeserializeOwned>(&self, key: &'static str) -> Result<Option<T>, Problem> {
        if self.0.get(key).is_some_and(|text| text.starts_with('[')) {
            return Err(self.problem(key, format!("{key}: expected an object")));
        }
        self.value(key)
    }

    /// A list of objects in Rust's types.
    fn fields_list<T: DeserializeOwned>(&self, key: &'static str) -> Result<Vec<T>, Problem> {
        let items = self.0.get(key).and_then(|text| list_items(text).ok()).unwrap_or_default();
        if items.iter().any(|item| item.starts_with('[')) {
            return Err(self.problem(key, format!("{key}: expected a list of objects")));
        }
        Ok(self.value(key)?.unwrap_or_default())
    }

    /// A text that is not blank.
    fn text(&self, key: &'static str) -> Result<Option<String>, Problem> {
        let text: Option<String> = self.value(key)?;
        Ok(text.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty()))
    }

    fn parsed<T: FromStr<Err: Display>>(&self, key: &'static str) -> Result<Option<T>, Problem> {
        let Some(text) = self.text(key)? else { return Ok(None) };
        let invalid = |error| self.problem(key, format!("{key}: {:?}: {error}", truncate(&text)));
        text.parse().map(Some).map_err(invalid)
    }

    fn interface_in_name(&self) -> Result<Option<IfName>, Problem> {
        let name = self.text("name")?.unwrap_or_default();
        let interface = split_item(&name).and_then(|item| item.interface);
        let invalid = |error| self.problem("name", format!("name: {:?}: {error}", truncate(&name)));
        interface.map(str::parse).transpose().map_err(invalid)
    }

    fn list(
        &self,
        key: &'static str,
        valid: fn(&str) -> bool,
        expected: &str,
    ) -> Result<Vec<String>, Problem> {
        let list: Vec<String> = self.value(key)?.unwrap_or_default();
        match list.iter().position(|text| !valid(text)) {
            Some(index) => {
                let text = truncate(&list[index]);
                Err(self.problem(key, format!("{key}[{index}]: {text:?} is not {expected}")))
            }
            None => Ok(list),
        }
    }

    fn hardware_address(&self, key: &'static str, expected: &str) -> Result<Option<String>, Problem> {
        let text = self.text(key)?;
        match text.as_ref().filter(|text| !is_hardware_address(text)) {
            Some(text) => Err(self.problem(key, format!("{key}: {:?} is not {expected}", truncate(text)))),
            None => Ok(text),
        }
    }

    fn object(&self, key: &'static str) -> Result<Option<RawObject>, Problem> {
        let Some(text) = self.0.get(key).filter(|text| *text != "null") else { return Ok(None) };
        let object = RawObject::parse(text).and_then(|object| object.to_value().map(|_| object));
        object
            .map(Some)
            .map_err(|error| self.problem(key, format!("{key}: {}", truncate(&error_text(&error)))))
    }
}

/// Whether this is an address of 6, 8 or 20 octets, in a form that Go parses: pairs of digits with `:` or `-` between them,
/// or groups of four digits with dots.
fn is_hardware_address(text: &str) -> bool {
    let groups = |separator: char, length: usize, counts: [usize; 3]| {
        let all: Vec<&str> = text.split(separator).collect();
        let hex = |group: &&str| group.len() == length && group.bytes().all(|byte| byte.is_ascii_hexdigit());
        counts.contains(&all.len()) && all.iter().all(hex)
    };
    groups(':', 2, [6, 8, 20]) || groups('-', 2, [6, 8, 20]) || groups('.', 4, [3, 4, 10])
}
