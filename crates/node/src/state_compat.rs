//! State that the daemon of commit 6841d7b wrote on a two-node cluster: journals, link records and a tombstone. Node-1 lends
//! two addresses of network `tiny` to node-2. Its daemon was stopped when pod `db-0` was deleted, so there is a tombstone.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use api::ipam::IpamSpec;
use plan::{
    ipam::{AttachmentKey, Lease, PodRef, Pool, Stage},
    nodenetwork::AdminState,
};
use wire::cni::Code;

use crate::{
    cni::{address::attachment_key, tombstone},
    ipam::{self, Ipam},
    link_records::LinkRecords,
};

/// The boot ID of node-1 when the state was recorded.
const BOOT: &str = "c9b89d43-aa64-45a7-8fd6-5208f12f131a";

/// A copy of a node's recorded state.
struct RecordedState(PathBuf);

impl RecordedState {
    fn of(node: &str) -> Self {
        Self::copy(node, node)
    }

    fn copy(node: &str, name: &str) -> Self {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/state-6841d7b").join(node);
        let target = std::env::temp_dir().join(format!("patchbay-state-{}-{name}", std::process::id()));
        for dir in fs::read_dir(source).unwrap() {
            let dir = dir.unwrap();
            let copy = target.join(dir.file_name());
            fs::create_dir_all(&copy).unwrap();
            for file in fs::read_dir(dir.path()).unwrap() {
                let file = file.unwrap();
                fs::copy(file.path(), copy.join(file.file_name())).unwrap();
            }
        }
        Self(target)
    }

    fn open(&self, boot: &str) -> Ipam {
        Ipam::open(&self.0, boot, ipam::Metrics::default()).unwrap()
    }
}

impl Drop for RecordedState {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The addresses of each pod.
fn addresses(ipam: &Ipam) -> BTreeMap<String, Vec<String>> {
    let one =
        |lease: Lease| (lease.pod.name, lease.addresses.iter().map(ToString::to_string).collect::<Vec<_>>());
    ipam.leases().into_iter().map(one).collect()
}

#[test]
fn journals_link_records_and_tombstones_of_6841d7b_are_continued() {
    let state = RecordedState::of("node-1");
    let boot = BOOT;
    let ipam = state.open(boot);
    let before = addresses(&ipam);
    let pods: Vec<&str> = before.keys().map(String::as_str).collect();
    assert_eq!(pods, ["db-0", "t-0", "t-1", "t-2", "t-3"], "db-1 was deleted");
    assert_eq!(before["db-0"].len(), 2, "dual stack");
    let holdings = ipam.holdings();
    assert_eq!(holdings.len(), 4);
    assert!(holdings.iter().all(|(_, holding)| holding.stage == Stage::Open), "{holdings:?}");
    assert_eq!(holdings.iter().map(|(_, holding)| holding.lent.len()).sum::<usize>(), 2);

    // The daemon that starts applies the tombstone and nothing else.
    let released = RefCell::new(0);
    tombstone::apply_all(&state.0.join("tombstones"), |_, request| {
        *released.borrow_mut() += usize::from(ipam.release(&attachment_key(request)));
        true
    });
    assert_eq!(released.into_inner(), 1);
    assert_eq!(fs::read_dir(state.0.join("tombstones")).unwrap().count(), 0);
    let after = addresses(&ipam);
    assert_eq!(after.keys().map(String::as_str).collect::<Vec<_>>(), ["t-0", "t-1", "t-2", "t-3"]);
    assert!(after.iter().all(|(pod, addresses)| before[pod] == *addresses));
    drop(ipam);
    assert_eq!(addresses(&state.open(boot)), after, "this version continues with what it wrote");

    let records = LinkRecords::open(&state.0).unwrap();
    let names: Vec<&str> = records.all().values().map(|record| record.name.as_str()).collect();
    assert_eq!(names, ["tiny", "up", "green"]);
    assert!(records.all().values().all(|record| record.boot == boot));
    let uplink = records.all().values().find_map(|record| record.uplink.clone()).unwrap();
    assert_eq!((uplink.name.as_str(), uplink.index, uplink.mtu), ("eth1", 3, 1500));
    assert_eq!(uplink.admin, AdminState::Up);
}

#[test]
fn a_journal_of_6841d7b_with_borrowed_addresses_is_continued() {
    let state = RecordedState::of("node-2");
    let ipam = state.open("");
    let pods = addresses(&ipam);
    assert_eq!(pods.keys().map(String::as_str).collect::<Vec<_>>(), ["t-4", "t-5", "web-0"]);
    let borrowed = ipam.holdings().into_iter().filter(|(block, _)| block.is_single()).count();
    assert_eq!(borrowed, 2);
    drop(ipam);
    // After a boot, all of it is free.
    assert!(addresses(&state.open("another boot")).is_empty());
}

/// A later version wrote the journal, and the user went back to this one.
#[test]
fn a_journal_of_a_newer_format_serves_del_and_refuses_add_with_the_reason() {
    let state = RecordedState::copy("node-1", "newer");
    let (journal, format) = (state.0.join("ipam/journal"), state.0.join("ipam/format"));
    let bytes = fs::read(&journal).unwrap();
    fs::write(&format, "2\n").unwrap();
    let ipam = state.open(BOOT);
    let problem = ipam.journal_problem().borrow().clone().unwrap();
    assert!(problem.contains("says format 2") && problem.contains("upgrade the node daemon"), "{problem}");
    assert!(ipam.leases().is_empty() && ipam.holdings().is_empty(), "nothing of it is read");

    let spec: IpamSpec = serde_json::from_str(r#"{"subnets": ["10.0.0.0/24"]}"#).unwrap();
    let pool = Pool::new("blue", &spec, |family| family.block_length(&spec), true);
    let key = AttachmentKey { container: "new".to_owned(), interface: "net1".to_owned() };
    let lease = Lease {
        key: key.clone(),
        pod: PodRef::default(),
        network: "net".to_owned(),
        config: "blue".to_owned(),
        boot: BOOT.to_owned(),
        since: 1,
        addresses: Vec::new(),
        claim: None,
    };
    let refused = ipam.allocate_until(&pool, lease, &[], Instant::now()).unwrap_err();
    assert!(refused.msg.contains("says format 2"), "{refused:?}");
    assert_eq!(ipam.status().unwrap_err().code, Code::NotAvailable);
    assert_eq!(ipam.require_loaded().unwrap_err().code, Code::TryAgainLater);
    assert!(ipam.release(&key), "whether it has addresses is unknown");
    assert!(ipam.save_pending().is_err());
    assert_eq!((fs::read(&journal).unwrap(), fs::read(&format).unwrap()), (bytes, b"2\n".to_vec()));

    // A daemon that knows the format, or a user who removed the file, continues.
    fs::remove_file(&format).unwrap();
    ipam.save_pending().unwrap();
    assert_eq!(addresses(&ipam).len(), 5);
    assert_eq!(ipam.journal_problem().borrow().clone(), None);
    assert_eq!(fs::read(&format).unwrap(), b"1\n");
}
