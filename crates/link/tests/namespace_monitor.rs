//! Link events of all namespaces. Each test uses its own network namespaces.
#![expect(clippy::unwrap_used, reason = "the functions around the tests are test code too")]

mod netns;
mod pod;

use std::{
    env,
    process::Command,
    time::{Duration, Instant},
};

use link::{Error, NamespaceLinkEvent, NamespaceLinkMonitor};
use pod::Namespace;
use tokio::{
    runtime::{Builder, Runtime},
    time::timeout,
};

const EVENT_TIMEOUT: Duration = Duration::from_secs(10);
/// No event follows a finished command after this time.
const QUIET: Duration = Duration::from_millis(200);

/// A host with a monitor.
struct Watched {
    host: Namespace,
    monitor: NamespaceLinkMonitor,
    runtime: Runtime,
}

impl Watched {
    fn new() -> Self {
        let host = Namespace::new();
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let monitor = {
            let _entered = runtime.enter();
            NamespaceLinkMonitor::open_in(&host.0).unwrap()
        };
        Self { host, monitor, runtime }
    }

    /// Waits for events until one matches, and returns all.
    fn until(&self, wanted: impl Fn(&NamespaceLinkEvent) -> bool) -> Vec<NamespaceLinkEvent> {
        let mut seen = Vec::new();
        while !seen.iter().any(&wanted) {
            let events = self.next(EVENT_TIMEOUT);
            assert!(events.is_some(), "the event did not arrive: {seen:?}");
            seen.extend(events.unwrap());
        }
        seen
    }

    /// The events that arrive first. None if there is none for this long.
    fn next(&self, limit: Duration) -> Option<Vec<NamespaceLinkEvent>> {
        let mut events = Vec::new();
        let wait = async { timeout(limit, self.monitor.wait(|more| events.extend_from_slice(more))).await };
        self.runtime.block_on(wait).ok()?.unwrap();
        Some(events)
    }

    /// All events until none arrives any more.
    fn drain(&self) -> Vec<NamespaceLinkEvent> {
        let mut seen = Vec::new();
        while let Some(events) = self.next(QUIET) {
            seen.extend(events);
        }
        seen
    }
}

fn is_removed(event: &NamespaceLinkEvent) -> bool {
    matches!(event, NamespaceLinkEvent::Removed { .. })
}

#[test]
fn a_deleted_link_is_reported_with_the_id_of_its_namespace() {
    let watched = Watched::new();
    let pods = [Namespace::new(), Namespace::new()];
    let nsids = pods.each_ref().map(|pod| watched.monitor.nsid(&pod.0).unwrap());
    assert_ne!(nsids[0], nsids[1]);
    assert_eq!(watched.monitor.nsid(&pods[0].0).unwrap(), nsids[0]);
    for pod in &pods {
        pod.ip("link add br0 type bridge");
    }
    let index = watched.host.link_of(&pods[1], "br0").index;
    watched.drain();
    pods[1].ip("link delete br0");
    let removed = NamespaceLinkEvent::Removed { nsid: Some(nsids[1]), index, moved: false };
    watched.until(|event| *event == removed);
    assert_eq!(watched.drain().iter().filter(|event| is_removed(event)).count(), 0);
}

#[test]
fn a_link_of_the_monitors_own_namespace_has_no_id() {
    let watched = Watched::new();
    watched.host.ip("link add br0 type bridge");
    let index = watched.host.link_of(&watched.host, "br0").index;
    watched.until(|event| *event == NamespaceLinkEvent::Changed { nsid: None, index });
    watched.host.ip("link delete br0");
    watched.until(|event| *event == NamespaceLinkEvent::Removed { nsid: None, index, moved: false });
}

#[test]
fn a_rename_and_a_port_that_leaves_its_bridge_are_no_removals() {
    let watched = Watched::new();
    let pod = Namespace::new();
    let nsid = Some(watched.monitor.nsid(&pod.0).unwrap());
    watched.host.pair("veth1", &pod, "net1");
    let index = watched.host.link_of(&pod, "net1").index;
    pod.ip("link add br0 type bridge");
    pod.ip("link set net1 master br0 up");
    watched.drain();
    pod.ip("link set net1 nomaster");
    pod.ip("link set net1 down name data0");
    pod.ip("link set data0 up");
    let events = watched.drain();
    assert!(events.contains(&NamespaceLinkEvent::Changed { nsid, index }), "{events:?}");
    assert!(!events.iter().any(is_removed), "{events:?}");
}

#[test]
fn a_move_to_a_nested_namespace_is_not_a_deletion() {
    let watched = Watched::new();
    // The nested namespace has no ID, neither in the pod nor on the host.
    let (pod, nested) = (Namespace::new(), Namespace::new());
    let nsid = Some(watched.monitor.nsid(&pod.0).unwrap());
    watched.host.pair("veth1", &pod, "net1");
    let link = watched.host.link_of(&pod, "net1");
    watched.drain();
    pod.ip(&format!("link set net1 netns {}", nested.path()));
    let removed = |moved| NamespaceLinkEvent::Removed { nsid, index: link.index, moved };
    let events = watched.until(is_removed);
    assert!(events.contains(&removed(true)) && !events.contains(&removed(false)), "{events:?}");
    // Deleted there: only the host end is reported.
    watched.drain();
    nested.ip("link delete net1");
    let peer = link.host_peer().unwrap();
    let events = watched.until(is_removed);
    let host_end = NamespaceLinkEvent::Removed { nsid: None, index: peer, moved: false };
    assert_eq!(events.into_iter().filter(is_removed).collect::<Vec<_>>(), [host_end]);
}

#[test]
fn a_macvlan_that_moves_is_not_a_deletion() {
    let watched = Watched::new();
    let (pod, nested) = (Namespace::new(), Namespace::new());
    let nsid = Some(watched.monitor.nsid(&pod.0).unwrap());
    watched.host.ip("link add lower type veth peer name unused");
    let add = format!("link add link lower name net1 netns {} type macvlan mode bridge", pod.path());
    watched.host.ip(&add);
    let index = watched.host.link_of(&pod, "net1").index;
    watched.drain();
    pod.ip(&format!("link set net1 netns {}", nested.path()));
    let removed = NamespaceLinkEvent::Removed { nsid, index, moved: true };
    assert!(watched.until(is_removed).contains(&removed));
}

#[test]
fn the_event_of_a_link_that_is_missing_in_a_list_is_already_queued() {
    let watched = Watched::new();
    let (pod, nested) = (Namespace::new(), Namespace::new());
    let nsid = Some(watched.monitor.nsid(&pod.0).unwrap());
    watched.host.ip("link add lower type veth peer name unused");
    for round in 0..20 {
        let add = format!("link add link lower name net1 netns {} type macvlan mode bridge", pod.path());
        watched.host.ip(&add);
        let index = watched.host.link_of(&pod, "net1").index;
        watched.monitor.handle_queued(|_| ()).unwrap();
        std::thread::scope(|scope| {
            let moving = scope.spawn(|| pod.ip(&format!("link set net1 netns {}", nested.path())));
            let listed = || link::links_in(&pod.0).unwrap().iter().any(|link| link.index == index);
            while listed() {}
            let mut events = Vec::new();
            watched.monitor.handle_queued(|more| events.extend_from_slice(more)).unwrap();
            let moved = NamespaceLinkEvent::Removed { nsid, index, moved: true };
            assert!(events.contains(&moved), "round {round}: {events:?}");
            moving.join().unwrap();
        });
        nested.ip("link delete net1");
    }
}

#[test]
fn events_need_an_id() {
    let watched = Watched::new();
    let pod = Namespace::new();
    pod.ip("link add br0 type bridge");
    assert_eq!(watched.drain(), []);
    let nsid = Some(watched.monitor.nsid(&pod.0).unwrap());
    pod.ip("link delete br0");
    watched.until(|event| {
        is_removed(event) && matches!(event, NamespaceLinkEvent::Removed { nsid: of, .. } if *of == nsid)
    });
}

#[test]
fn neither_the_monitor_nor_an_id_keeps_a_namespace_alive() {
    let watched = Watched::new();
    let pod = Namespace::new();
    let nsid = watched.monitor.nsid(&pod.0).unwrap();
    watched.host.pair("veth1", &pod, "net1");
    let inside = watched.host.link_of(&pod, "net1");
    let host_end = inside.host_peer().unwrap();
    watched.drain();
    let started = Instant::now();
    drop(pod);
    let gone = NamespaceLinkEvent::Removed { nsid: None, index: host_end, moved: false };
    let mut events = watched.until(|event| *event == gone);
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    events.extend(watched.drain());
    assert!(events.contains(&NamespaceLinkEvent::NamespaceRemoved { nsid }), "{events:?}");
    // The end of a namespace is not a deletion of its links.
    let inside = NamespaceLinkEvent::Removed { nsid: Some(nsid), index: inside.index, moved: false };
    assert!(!events.contains(&inside), "{events:?}");
    // The next namespace may get the same ID.
    watched.monitor.nsid(&Namespace::new().0).unwrap();
}

#[test]
fn lost_events_are_reported_as_an_overrun() {
    let watched = Watched::new();
    let pod = Namespace::new();
    watched.monitor.nsid(&pod.0).unwrap();
    pod.ip("link add br0 type bridge");
    let batch = "link set br0 mtu 1000\nlink set br0 mtu 1001\n".repeat(10_000);
    let file = env::temp_dir().join(format!("patchbay-link-overrun-{}", std::process::id()));
    std::fs::write(&file, batch).unwrap();
    let output = pod.output("ip", &["-batch", file.to_str().unwrap()]);
    std::fs::remove_file(&file).unwrap();
    assert!(output.status.success(), "{output:?}");
    watched.until(|event| *event == NamespaceLinkEvent::Overrun);
    // The monitor goes on.
    watched.drain();
    pod.ip("link delete br0");
    watched.until(is_removed);
}

#[test]
fn a_long_event_is_still_understood() {
    let watched = Watched::new();
    let (pod, nested) = (Namespace::new(), Namespace::new());
    let nsid = Some(watched.monitor.nsid(&pod.0).unwrap());
    // About 25 KiB of alternative names.
    let lengthen = |link: &str| {
        for n in 0..20 {
            let name = |m| format!("altname {link}{:0>110}", n * 10 + m);
            let names: Vec<String> = (0..10).map(name).collect();
            pod.ip(&format!("link property add dev {link} {}", names.join(" ")));
        }
        watched.host.link_of(&pod, link).index
    };
    pod.ip("link add br0 type bridge");
    pod.ip("link add veth0 type veth peer name veth1");
    let [deleted, moved] = ["br0", "veth0"].map(lengthen);
    watched.drain();
    pod.ip("link delete br0");
    let removed = NamespaceLinkEvent::Removed { nsid, index: deleted, moved: false };
    assert!(watched.until(is_removed).contains(&removed));
    watched.drain();
    pod.ip(&format!("link set veth0 netns {}", nested.path()));
    let removed = NamespaceLinkEvent::Removed { nsid, index: moved, moved: true };
    assert!(watched.until(is_removed).contains(&removed));
}

/// Runs this test again in a process without the capability.
#[test]
fn the_monitor_needs_the_capability_net_broadcast() {
    const WITHOUT: &str = "PATCHBAY_TEST_WITHOUT_NET_BROADCAST";
    if env::var_os(WITHOUT).is_some() {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let _entered = runtime.enter();
        let error = NamespaceLinkMonitor::open().err().unwrap();
        assert!(matches!(error, Error::AllNamespaces(_)), "{error:?}");
        return;
    }
    let status = Command::new("setpriv")
        .args(["--bounding-set", "-net_broadcast", "--"])
        .arg(env::current_exe().unwrap())
        .args(["--exact", "the_monitor_needs_the_capability_net_broadcast"])
        .env(WITHOUT, "1")
        .status();
    assert!(status.expect("install the package util-linux").success());
}
