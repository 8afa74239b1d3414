//! Network namespaces: a host and simulated pods, with commands of iproute2.

use std::{
    os::fd::AsRawFd as _,
    process::{self, Command, Output},
};

use link::{PodLink, links_in};

pub use super::netns::Namespace;

impl Namespace {
    /// The standard output of `ip` with these arguments, in the namespace.
    pub fn ip(&self, arguments: &str) -> String {
        let output = self.output("ip", &arguments.split_whitespace().collect::<Vec<_>>());
        assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    pub fn output(&self, program: &str, arguments: &[&str]) -> Output {
        self.within(|| Command::new(program).args(arguments).output()).expect("install the package iproute2")
    }

    /// The path by which other programs open the namespace.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", process::id(), self.0.as_raw_fd())
    }

    /// Creates a veth pair between this namespace and a pod.
    pub fn pair(&self, here: &str, pod: &Self, there: &str) {
        self.ip(&format!("link add {here} type veth peer name {there} netns {}", pod.path()));
    }

    /// The links of a pod, as the daemon in this namespace lists them.
    pub fn links_of(&self, pod: &Self) -> Vec<PodLink> {
        self.within(|| links_in(&pod.0)).unwrap()
    }

    /// One link of a pod.
    pub fn link_of(&self, pod: &Self, name: &str) -> PodLink {
        let links = self.links_of(pod);
        links.into_iter().find(|link| link.name == name).expect(name)
    }
}
