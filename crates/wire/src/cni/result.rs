//! The result of ADD, in the format of every version.

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Map, Value, json};

use super::{Version, bytes};

/// The success result of ADD.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Success {
    pub interfaces: Vec<Interface>,
    pub ips: Vec<Ip>,
    pub routes: Vec<Route>,
}

/// An interface on the host or in a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    pub mac: Option<String>,
    pub mtu: Option<u32>,
    /// The sandbox of the interface; `None` on the host.
    pub sandbox: Option<String>,
}

/// An IP address of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ip {
    pub address: IpNet,
    pub gateway: Option<IpAddr>,
    /// The index of its interface in [`Success::interfaces`].
    pub interface: Option<usize>,
}

/// A route inside the sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    pub dst: IpNet,
    pub gw: Option<IpAddr>,
}

impl Success {
    /// The JSON that the plugin prints.
    pub fn render(&self, version: Version) -> Vec<u8> {
        let mut all = Map::from_iter([("cniVersion".to_owned(), json!(version.to_string()))]);
        if version < Version::V0_3_0 {
            self.per_family(&mut all);
        } else {
            let interfaces = self.interfaces.iter().map(|interface| interface.render(version)).collect();
            let ips = self.ips.iter().map(|ip| ip.render(version)).collect();
            let routes = self.routes.iter().map(Route::render).collect();
            put(&mut all, "interfaces", interfaces);
            put(&mut all, "ips", ips);
            put(&mut all, "routes", routes);
        }
        all.insert("dns".to_owned(), json!({}));
        bytes(&Value::Object(all))
    }

    /// Versions before 0.3.0 have at most one address per family, and no interfaces.
    fn per_family(&self, all: &mut Map<String, Value>) {
        for (key, four) in [("ip4", true), ("ip6", false)] {
            let family = |net: &IpNet| matches!(net, IpNet::V4(_)) == four;
            let Some(ip) = self.ips.iter().find(|ip| family(&ip.address)) else { continue };
            let mut entry = Map::from_iter([("ip".to_owned(), json!(ip.address))]);
            entry.extend(ip.gateway.map(|gateway| ("gateway".to_owned(), json!(gateway))));
            let routes = self.routes.iter().filter(|route| family(&route.dst)).map(Route::render).collect();
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
        if let Some(mtu) = self.mtu.filter(|_| version >= Version::V1_1_0) {
            value["mtu"] = json!(mtu);
        }
        if let Some(sandbox) = &self.sandbox {
            value["sandbox"] = json!(sandbox);
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
    fn render(&self) -> Value {
        let mut value = json!({"dst": self.dst});
        if let Some(gw) = self.gw {
            value["gw"] = json!(gw);
        }
        value
    }
}
