//! The result of ADD, in the format of every version.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};

use super::{Code, Error, Version, bytes, truncate};

/// The success result of ADD. Versions differ in what they can express.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Success {
    /// Not in versions before 0.3.0.
    pub interfaces: Vec<Interface>,
    /// At most one of each family in versions before 0.3.0.
    pub ips: Vec<Ip>,
    pub routes: Vec<Route>,
    pub dns: Dns,
}

/// An interface on the host or in a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Interface {
    #[serde(deserialize_with = "null_as_default")]
    pub name: String,
    #[serde(deserialize_with = "filled")]
    pub mac: Option<String>,
    /// Since 1.1.0.
    #[serde(deserialize_with = "positive")]
    pub mtu: Option<u32>,
    /// The sandbox of the interface; `None` on the host.
    #[serde(deserialize_with = "filled")]
    pub sandbox: Option<String>,
    /// The socket of a userspace interface. Since 1.1.0.
    #[serde(deserialize_with = "filled")]
    pub socket_path: Option<String>,
    /// The PCI device. Since 1.1.0.
    #[serde(rename = "pciID", deserialize_with = "filled")]
    pub pci_id: Option<String>,
}

/// An IP address of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Ip {
    pub address: IpNet,
    #[serde(default, deserialize_with = "address")]
    pub gateway: Option<IpAddr>,
    /// The index of its interface in [`Success::interfaces`].
    #[serde(default, deserialize_with = "index")]
    pub interface: Option<usize>,
}

/// A route inside the sandbox. All fields but `dst` and `gw` are in 1.1.0 and later.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Route {
    pub dst: IpNet,
    #[serde(default, deserialize_with = "address")]
    pub gw: Option<IpAddr>,
    #[serde(default, deserialize_with = "positive")]
    pub mtu: Option<u32>,
    #[serde(default, deserialize_with = "positive")]
    pub advmss: Option<u32>,
    #[serde(default, deserialize_with = "positive")]
    pub priority: Option<u32>,
    #[serde(default)]
    pub table: Option<u32>,
    #[serde(default)]
    pub scope: Option<u32>,
}

/// DNS settings for the sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Dns {
    #[serde(deserialize_with = "null_as_default")]
    pub nameservers: Vec<String>,
    #[serde(deserialize_with = "filled")]
    pub domain: Option<String>,
    #[serde(deserialize_with = "null_as_default")]
    pub search: Vec<String>,
    #[serde(deserialize_with = "null_as_default")]
    pub options: Vec<String>,
}

/// A result of any version.
#[derive(Default, Deserialize)]
#[serde(default)]
struct RawResult {
    #[serde(rename = "cniVersion", deserialize_with = "filled")]
    version: Option<String>,
    #[serde(deserialize_with = "null_as_default")]
    interfaces: Vec<Interface>,
    #[serde(deserialize_with = "null_as_default")]
    ips: Vec<Ip>,
    #[serde(deserialize_with = "null_as_default")]
    routes: Vec<Route>,
    ip4: Option<RawFamily>,
    ip6: Option<RawFamily>,
    #[serde(deserialize_with = "null_as_default")]
    dns: Dns,
}

/// The address of one family before 0.3.0.
#[derive(Deserialize)]
struct RawFamily {
    ip: IpNet,
    #[serde(default, deserialize_with = "address")]
    gateway: Option<IpAddr>,
    #[serde(default, deserialize_with = "null_as_default")]
    routes: Vec<Route>,
}

impl Success {
    /// Parses a result of any version, such as a `prevResult`. A result without a version has that of the configuration.
    ///
    /// Unknown keys are ignored, and so is what the version does not have.
    pub fn parse(bytes: &[u8], config: Version) -> Result<Self, Error> {
        let invalid = |error: serde_json::Error| {
            Error::new(Code::Decode, "the result is not valid").details(truncate(&error.to_string()))
        };
        if !is_object(bytes) {
            return Err(Error::new(Code::Decode, "the result is not a JSON object"));
        }
        let raw: RawResult = serde_json::from_slice(bytes).map_err(invalid)?;
        let version = raw.version.as_deref().map_or(Ok(config), str::parse)?;
        let mut result = if version < Version::V0_3_0 {
            let mut result = Self { dns: raw.dns, ..Self::default() };
            for family in [raw.ip4, raw.ip6].into_iter().flatten() {
                result.ips.push(Ip { address: family.ip, gateway: family.gateway, interface: None });
                result.routes.extend(family.routes);
            }
            result
        } else {
            Self { interfaces: raw.interfaces, ips: raw.ips, routes: raw.routes, dns: raw.dns }
        };
        // 1.1.0 introduced these keys, but libcni reads them in 1.0.0 too.
        if version < Version::V1_0_0 {
            for interface in &mut result.interfaces {
                (interface.mtu, interface.socket_path, interface.pci_id) = (None, None, None);
            }
            for route in &mut result.routes {
                *route = Route { dst: route.dst, gw: route.gw, ..Route::default() };
            }
        }
        Ok(result)
    }

    /// The JSON that a plugin prints, or the `prevResult` for a plugin. Drops what the version does not have.
    pub fn render(&self, version: Version) -> Vec<u8> {
        let mut all = Map::from_iter([("cniVersion".to_owned(), json!(version.to_string()))]);
        if version < Version::V0_3_0 {
            self.per_family(&mut all, version);
        } else {
            let interfaces = self.interfaces.iter().map(|interface| interface.render(version)).collect();
            let ips = self.ips.iter().map(|ip| ip.render(version)).collect();
            let routes = self.routes.iter().map(|route| route.render(version)).collect();
            put(&mut all, "interfaces", interfaces);
            put(&mut all, "ips", ips);
            put(&mut all, "routes", routes);
        }
        all.insert("dns".to_owned(), self.dns.render());
        bytes(&Value::Object(all))
    }

    /// Versions before 0.3.0 have at most one address per family, and no interfaces.
    fn per_family(&self, all: &mut Map<String, Value>, version: Version) {
        for (key, four) in [("ip4", true), ("ip6", false)] {
            let family = |net: &IpNet| matches!(net, IpNet::V4(_)) == four;
            let Some(ip) = self.ips.iter().find(|ip| family(&ip.address)) else { continue };
            let mut entry = Map::from_iter([("ip".to_owned(), json!(ip.address))]);
            entry.extend(ip.gateway.map(|gateway| ("gateway".to_owned(), json!(gateway))));
            let routes = self.routes.iter().filter(|route| family(&route.dst));
            let routes = routes.map(|route| route.render(version)).collect();
            put(&mut entry, "routes", routes);
            all.insert(key.to_owned(), Value::Object(entry));
        }
    }
}

/// Inserts a list unless it is empty.
fn put(all: &mut Map<String, Value>, key: &str, values: Vec<Value>) {
    if !values.is_empty() {
        all.insert(key.to_owned(), Value::Array(values));
    }
}

impl Interface {
    fn render(&self, version: Version) -> Value {
        let mut value = json!({"name": self.name});
        if let Some(mac) = &self.mac {
            value["mac"] = json!(mac);
        }
        if let Some(sandbox) = &self.sandbox {
            value["sandbox"] = json!(sandbox);
        }
        if version < Version::V1_1_0 {
            return value;
        }
        if let Some(mtu) = self.mtu {
            value["mtu"] = json!(mtu);
        }
        if let Some(socket_path) = &self.socket_path {
            value["socketPath"] = json!(socket_path);
        }
        if let Some(pci_id) = &self.pci_id {
            value["pciID"] = json!(pci_id);
        }
        value
    }
}

impl Ip {
    fn render(&self, version: Version) -> Value {
        let mut value = json!({"address": self.address});
        if version < Version::V1_0_0 {
            value["version"] = json!(if matches!(self.address, IpNet::V4(_)) { "4" } else { "6" });
        }
        if let Some(gateway) = self.gateway {
            value["gateway"] = json!(gateway);
        }
        if let Some(interface) = self.interface {
            value["interface"] = json!(interface);
        }
        value
    }
}

impl Route {
    fn render(&self, version: Version) -> Value {
        let mut value = json!({"dst": self.dst});
        if let Some(gw) = self.gw {
            value["gw"] = json!(gw);
        }
        if version < Version::V1_1_0 {
            return value;
        }
        let numbers = [
            ("mtu", self.mtu),
            ("advmss", self.advmss),
            ("priority", self.priority),
            ("table", self.table),
            ("scope", self.scope),
        ];
        for (key, number) in numbers {
            if let Some(number) = number {
                value[key] = json!(number);
            }
        }
        value
    }
}

impl Dns {
    fn render(&self) -> Value {
        let mut all = Map::new();
        let lists =
            [("nameservers", &self.nameservers), ("search", &self.search), ("options", &self.options)];
        for (key, list) in lists {
            put(&mut all, key, list.iter().map(|text| json!(text)).collect());
        }
        if let Some(domain) = &self.domain {
            all.insert("domain".to_owned(), json!(domain));
        }
        Value::Object(all)
    }
}

/// Whether JSON text is an object. Serde would read a list into a struct too.
pub(super) fn is_object(text: &[u8]) -> bool {
    text.trim_ascii_start().starts_with(b"{")
}

/// Go writes an empty list as null in some cases.
fn null_as_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// A text that is not empty.
fn filled<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    Ok(Option::deserialize(deserializer)?.filter(|text: &String| !text.is_empty()))
}

/// An address; Go writes a missing one as an empty text in some cases.
fn address<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<IpAddr>, D::Error> {
    filled(deserializer)?.map(|text| text.parse().map_err(serde::de::Error::custom)).transpose()
}

/// A number; zero means that it is not known.
fn positive<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    Ok(Option::deserialize(deserializer)?.filter(|&number| number != 0))
}

/// The index of an interface; a negative one means none.
fn index<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<usize>, D::Error> {
    Ok(Option::<i64>::deserialize(deserializer)?.and_then(|index| usize::try_from(index).ok()))
}
