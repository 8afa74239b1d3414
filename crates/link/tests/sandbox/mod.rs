//! Network namespaces: a host with a bridge, and simulated pods.

use std::{fs, os::fd::AsFd as _, path::Path, process::Command};

use api::{IfName, Mac};
use link::veth::{Announce, VethConfig};

pub use super::netns::Namespace;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

impl Namespace {
    /// A namespace with a bridge `br0` that is up, and the index of the bridge.
    pub fn with_bridge() -> (Self, u32) {
        let ns = Self::new();
        ns.run("ip link add br0 mtu 1400 type bridge");
        ns.run("ip link set br0 up");
        let index = ns.within(|| fs::read_to_string("/proc/thread-self/net/igmp").unwrap());
        let line = index.lines().find(|line| line.contains("br0")).unwrap().to_owned();
        let index = line.split_whitespace().next().unwrap().parse().unwrap();
        (ns, index)
    }

    /// Whether a command succeeds in the namespace.
    pub fn ok(&self, command: &str) -> bool {
        let mut arguments = command.split_whitespace();
        let program = arguments.next().unwrap();
        self.within(|| Command::new(program).args(arguments).output()).unwrap().status.success()
    }

    pub fn run(&self, command: &str) {
        assert!(self.ok(command), "{command}");
    }

    /// The standard output of a command in the namespace.
    pub fn output(&self, command: &str) -> String {
        let mut arguments = command.split_whitespace();
        let program = arguments.next().unwrap();
        let output = self.within(|| Command::new(program).args(arguments).output()).unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

pub fn name(text: &str) -> IfName {
    text.parse().unwrap()
}

/// Calls `with` with the configuration of a pair between this pod and bridge.
pub fn with_config<T>(pod: &Namespace, bridge: u32, host: &str, with: impl FnOnce(VethConfig<'_>) -> T) -> T {
    with(VethConfig {
        namespace: pod.0.as_fd(),
        host: &name(host),
        inside: &name("net1"),
        mac: Mac::from(MAC),
        mtu: 1400,
        bridge,
        alias: "pod/uid/container/net1",
        proc_root: Path::new("/proc"),
        addresses: &[],
        routes: &[],
        announce: Announce::Now,
    })
}
