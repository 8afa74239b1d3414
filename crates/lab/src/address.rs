//! The addresses of a lab. All labs use the same ones, since each has its own network namespaces.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The port of the API server.
pub const API_PORT: u16 = 6443;
/// The addresses of the control plane; also the nodes' default gateway.
pub const CONTROL_PLANE: (Ipv4Addr, Ipv6Addr) =
    (Ipv4Addr::new(172, 30, 0, 1), Ipv6Addr::new(0xfd00, 0x30, 0, 0, 0, 0, 0, 1));
pub const SERVICES: &str = "10.96.0.0/16,fd00:96::/108";
pub const PODS: &str = "10.244.0.0/16,fd00:244::/32";
/// The addresses of the `kubernetes` Service: the first of each range.
pub const API_SERVICE: (&str, &str) = ("10.96.0.1", "fd00:96::1");
pub const DNS_SERVICE: &str = "10.96.0.10";
/// The number of nodes that fit into the address plan.
pub const MAX_NODES: u8 = 63;
/// NICs of a node besides `eth0`.
pub const SPARE_NICS: u8 = 2;

/// The addresses of a node, derived from its number (from 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeAddresses(pub u8);

impl NodeAddresses {
    pub fn v4(self) -> Ipv4Addr {
        Ipv4Addr::new(172, 30, 0, 10 + self.0)
    }

    pub fn v6(self) -> Ipv6Addr {
        Ipv6Addr::new(0xfd00, 0x30, 0, 0, 0, 0, 0, 0x10 + u16::from(self.0))
    }

    pub fn node_ips(self) -> [IpAddr; 2] {
        [self.v4().into(), self.v6().into()]
    }

    /// Room for about a thousand pods.
    pub fn pods_v4(self) -> String {
        format!("10.244.{}.0/22", u16::from(self.0) * 4)
    }

    pub fn pods_v6(self) -> String {
        format!("fd00:244:0:{:x}::/64", self.0)
    }

    /// The MAC address of a NIC; it survives reboots.
    pub fn mac(self, nic: u8) -> String {
        format!("02:1a:b0:00:{:02x}:{nic:02x}", self.0)
    }

    /// The name of the switch port that a NIC is connected to.
    pub fn port(self, nic: u8) -> String {
        format!("n{}p{nic}", self.0)
    }
}
