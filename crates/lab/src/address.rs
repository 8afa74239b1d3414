//! The addresses of a lab. Every lab has the same ones: each lives in network namespaces of its own.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The port of the API server.
pub const API_PORT: u16 = 6443;
/// The API server and everything else of the control plane; also the gateway of the nodes.
pub const CONTROL_PLANE: (Ipv4Addr, Ipv6Addr) =
    (Ipv4Addr::new(172, 30, 0, 1), Ipv6Addr::new(0xfd00, 0x30, 0, 0, 0, 0, 0, 1));
pub const SERVICES: &str = "10.96.0.0/16,fd00:96::/108";
pub const PODS: &str = "10.244.0.0/16,fd00:244::/32";
/// The Service of the API server: the first address of the range.
pub const API_SERVICE: (&str, &str) = ("10.96.0.1", "fd00:96::1");
pub const DNS_SERVICE: &str = "10.96.0.10";
/// How many nodes the plan has room for.
pub const MAX_NODES: u8 = 200;
/// NICs of a node beside the first one.
pub const SPARE_NICS: u8 = 2;

/// A node by its number, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Node(pub u8);

impl Node {
    pub fn v4(self) -> Ipv4Addr {
        Ipv4Addr::new(172, 30, 0, 10 + self.0)
    }

    pub fn v6(self) -> Ipv6Addr {
        Ipv6Addr::new(0xfd00, 0x30, 0, 0, 0, 0, 0, 0x10 + u16::from(self.0))
    }

    pub fn addresses(self) -> [IpAddr; 2] {
        [self.v4().into(), self.v6().into()]
    }

    pub fn pods_v4(self) -> String {
        format!("10.244.{}.0/24", self.0)
    }

    pub fn pods_v6(self) -> String {
        format!("fd00:244:0:{:x}::/64", self.0)
    }

    /// The MAC of a NIC; the same after a reboot, as that of real hardware.
    pub fn mac(self, nic: u8) -> String {
        format!("02:1a:b0:00:{:02x}:{nic:02x}", self.0)
    }

    /// The switch's end of a NIC's cable.
    pub fn port(self, nic: u8) -> String {
        format!("n{}p{nic}", self.0)
    }
}
