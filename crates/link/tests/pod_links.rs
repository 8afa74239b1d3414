//! Links in a pod's namespace. Each test uses its own network namespaces.
#![expect(clippy::unwrap_used, reason = "the functions around the tests are test code too")]

mod netns;
mod pod;

use std::{collections::BTreeSet, ffi::OsStr, fs::File, os::unix::ffi::OsStrExt as _, process::Command};

use link::{
    Error, HostLink, LinkPeer, PeerPlace, delete_in, delete_veth, existing_links, link_indexes, links_in,
};
use pod::Namespace;

#[test]
fn a_veth_names_its_peer_on_the_host() {
    let (host, pod) = (Namespace::new(), Namespace::new());
    host.pair("veth1", &pod, "net1");
    pod.ip("link set net1 address 02:00:00:00:00:07 mtu 1400 up");
    let link = host.link_of(&pod, "net1");
    assert_eq!(link.kind.as_deref(), Some("veth"));
    assert_eq!(link.mac.unwrap().to_string(), "02:00:00:00:00:07");
    assert_eq!((link.mtu, link.up), (1400, true));
    let outside = host.link_of(&host, "veth1");
    assert_eq!(link.peer, Some(LinkPeer { index: outside.index, place: PeerPlace::Host }));
    assert_eq!(link.host_peer(), Some(outside.index));
}

#[test]
fn peers_elsewhere_are_not_host_peers() {
    let (host, pod, other) = (Namespace::new(), Namespace::new(), Namespace::new());
    pod.ip("link add in0 type veth peer name in1");
    pod.pair("out0", &other, "out1");
    host.ip("link add lower type veth peer name unused");
    host.ip(&format!("link add link lower name mac0 netns {} type macvlan mode bridge", pod.path()));
    let place = |name| host.link_of(&pod, name).peer.map(|peer| peer.place);
    assert_eq!(place("lo"), None);
    assert_eq!(place("in0"), Some(PeerPlace::SameNamespace));
    assert_eq!(place("out0"), Some(PeerPlace::Other));
    assert_eq!(place("mac0"), Some(PeerPlace::Host));
    for name in ["in0", "in1", "out0", "mac0"] {
        assert_eq!(host.link_of(&pod, name).host_peer(), None, "{name}");
    }
}

#[test]
fn a_name_or_alias_that_is_not_utf8_does_not_hide_a_link() {
    let (host, pod) = (Namespace::new(), Namespace::new());
    host.pair("veth1", &pod, "net1");
    let bytes = OsStr::from_bytes(b"a\xffb");
    for arguments in [["alias"], ["name"]] {
        let set = pod
            .within(|| Command::new("ip").args(["link", "set", "net1"]).args(arguments).arg(bytes).status());
        assert!(set.unwrap().success());
    }
    assert_eq!(host.link_of(&pod, "a\\xffb").kind.as_deref(), Some("veth"));
}

#[test]
fn an_index_survives_a_rename() {
    let (host, pod) = (Namespace::new(), Namespace::new());
    host.pair("veth1", &pod, "net1");
    let before = host.link_of(&pod, "net1");
    pod.ip("link set net1 name data0");
    let after = host.link_of(&pod, "data0");
    assert_eq!((after.index, after.host_peer()), (before.index, before.host_peer()));
}

#[test]
fn deletes_by_index_and_reports_a_missing_link() {
    let (host, pod) = (Namespace::new(), Namespace::new());
    host.pair("veth1", &pod, "net1");
    host.pair("veth2", &pod, "net2");
    let (first, second) = (host.link_of(&pod, "net1"), host.link_of(&pod, "net2"));
    let peers = [first.host_peer().unwrap(), second.host_peer().unwrap()];
    assert!(host.within(|| delete_in(&pod.0, first.index)).unwrap());
    assert!(!host.within(|| delete_in(&pod.0, first.index)).unwrap());
    assert_eq!(host.links_of(&pod).iter().filter(|link| link.name != "lo").count(), 1);
    // The host end went with it, and no other link of the host.
    let existing = host.within(|| existing_links([0, u32::MAX, peers[0], peers[1]])).unwrap();
    assert_eq!(existing.keys().collect::<Vec<_>>(), [&peers[1]]);
    assert_eq!(existing[&peers[1]].name.as_deref(), Some("veth2"));
    let indexes = host.within(link_indexes).unwrap();
    assert!(indexes.contains(&peers[1]) && !indexes.contains(&peers[0]), "{indexes:?}");
}

#[test]
fn a_veth_with_another_name_or_mac_than_recorded_is_not_deleted() {
    let (host, pod) = (Namespace::new(), Namespace::new());
    host.pair("veth1", &pod, "net1");
    let index = host.link_of(&pod, "net1").host_peer().unwrap();
    let recorded = host.within(|| existing_links([index])).unwrap().remove(&index).unwrap();
    assert_eq!((recorded.name.as_deref(), recorded.mac.is_some()), (Some("veth1"), true));
    for other in [
        HostLink { name: Some("veth9".to_owned()), ..recorded.clone() },
        HostLink { mac: Some("02:00:00:00:00:99".parse().unwrap()), ..recorded.clone() },
    ] {
        host.within(|| delete_veth(&other)).unwrap();
        assert_eq!(host.link_of(&pod, "net1").host_peer(), Some(index));
    }
    // A record of an older version has only the index.
    host.within(|| delete_veth(&HostLink { index, name: None, mac: None })).unwrap();
    assert!(host.within(link_indexes).unwrap().is_disjoint(&BTreeSet::from([index])));
}

#[test]
fn the_loopback_device_cannot_be_deleted() {
    let (host, pod) = (Namespace::new(), Namespace::new());
    let error = host.within(|| delete_in(&pod.0, 1)).unwrap_err();
    assert!(matches!(error, Error::Rejected { .. }), "{error:?}");
    assert_eq!(host.link_of(&pod, "lo").index, 1);
}

#[test]
fn a_file_that_is_not_a_namespace_is_an_error() {
    let error = links_in(File::open("/proc/self/status").unwrap()).unwrap_err();
    assert!(matches!(error, Error::Enter(_)), "{error:?}");
}
