use std::{fs, path::PathBuf};

use api::selection::NadRef;
use plan::hotplug::{AttachedRecord, Origin, PodIdentity};
use serde_json::json;

use super::*;
use crate::store::small_disk::with_small_disk;

struct StateDir(PathBuf);

impl StateDir {
    fn new(test: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("patchbay-hotplug-journal-{}-{test}", std::process::id()));
        _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn journal(&self) -> PathBuf {
        self.0.join("hotplug/journal")
    }
}

impl Drop for StateDir {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

fn record(pod: &str, interface: &str, phase: RecordPhase) -> AttachmentRecord {
    let text = |text: &str| text.to_owned();
    AttachmentRecord {
        key: AttachmentKey { container: format!("container-{pod}"), interface: text(interface) },
        pod: PodIdentity {
            namespace: text("ns"),
            name: text(pod),
            uid: format!("uid-{pod}"),
            runtime_uid: format!("uid-{pod}"),
        },
        nad: NadRef::new("ns", "blue"),
        nad_guessed: false,
        origin: Origin::Hotplug,
        boot: text("boot"),
        netns: format!("/run/netns/{pod}"),
        requested: None,
        config: text(r#"{"name":"blue","type":"veth"}"#),
        cni_args: vec![(text("IgnoreUnknown"), text("true"))],
        capability_args: serde_json::Map::new(),
        former_statuses: Vec::new(),
        removing: false,
        phase,
    }
}

fn intent() -> RecordPhase {
    RecordPhase::Intent { links_before: vec![1, 2] }
}

fn attached() -> RecordPhase {
    let routes = vec![json!({"gateway": "10.0.0.1"})];
    let result = r#"{"cniVersion":"1.0.0"}"#.to_owned();
    RecordPhase::Attached(AttachedRecord { result, replaced_routes: routes, ..AttachedRecord::default() })
}

fn phases(journal: &AttachmentJournal, pod: &str) -> Vec<RecordPhase> {
    journal.records_of(&format!("uid-{pod}")).iter().map(|record| record.phase.clone()).collect()
}

#[tokio::test]
async fn records_survive_a_restart() {
    let dir = StateDir::new("restart");
    let journal = AttachmentJournal::open(&dir.0).unwrap();
    journal.announce(record("a", "net1", intent())).await.unwrap();
    journal.update(record("a", "net1", attached())).await.unwrap();
    journal.announce(record("b", "net1", intent())).await.unwrap();
    journal.announce(record("c", "net1", intent())).await.unwrap();
    journal.remove(record("c", "net1", intent()).key).await.unwrap();
    drop(journal);
    let journal = AttachmentJournal::open(&dir.0).unwrap();
    assert_eq!(phases(&journal, "a"), [attached()]);
    assert_eq!(phases(&journal, "b"), [intent()]);
    assert_eq!(journal.pods(), ["uid-a", "uid-b"].map(str::to_owned).into());
    assert_eq!(journal.pods_in(|netns| netns == "/run/netns/b"), ["uid-b".to_owned()].into());
    assert_eq!(*journal.problem().borrow(), None);
}

#[tokio::test]
async fn saved_routes_end_with_their_attachment() {
    let dir = StateDir::new("routes");
    let (key, routes) = (record("a", "net1", intent()).key, vec![json!({"gateway": "10.0.0.1"})]);
    let journal = AttachmentJournal::open(&dir.0).unwrap();
    journal.announce(record("a", "net1", intent())).await.unwrap();
    assert!(!journal.changes_routes(&key));
    journal.save_routes(key.clone(), Vec::new()).await.unwrap();
    drop(journal);
    let journal = AttachmentJournal::open(&dir.0).unwrap();
    assert!(journal.changes_routes(&key));
    journal.save_routes(key.clone(), routes.clone()).await.unwrap();
    drop(journal);
    let journal = AttachmentJournal::open(&dir.0).unwrap();
    assert_eq!(journal.saved_routes(&key), routes);
    journal.update(record("a", "net1", RecordPhase::Removed)).await.unwrap();
    assert_eq!(journal.saved_routes(&key), [] as [Value; 0]);
    drop(journal);
    assert_eq!(AttachmentJournal::open(&dir.0).unwrap().saved_routes(&key), [] as [Value; 0]);
}

#[tokio::test]
async fn damage_is_reported_and_keeps_what_is_readable() {
    let dir = StateDir::new("damage");
    let journal = AttachmentJournal::open(&dir.0).unwrap();
    for pod in ["a", "b", "c"] {
        journal.announce(record(pod, "net1", intent())).await.unwrap();
    }
    drop(journal);
    let mut content = fs::read(dir.journal()).unwrap();
    let second = content.iter().position(|byte| *byte == b'\n').unwrap() + 40;
    content[second] ^= 1;
    fs::write(dir.journal(), &content).unwrap();
    let journal = AttachmentJournal::open(&dir.0).unwrap();
    assert_eq!(journal.pods(), ["uid-a", "uid-c"].map(str::to_owned).into());
    let problem = journal.problem().borrow().clone().unwrap();
    assert!(problem.contains("damaged"), "{problem}");
    assert_eq!(fs::read(dir.journal().with_extension("damaged")).unwrap(), content);
    // The problem stays although the journal can be written.
    journal.announce(record("d", "net1", intent())).await.unwrap();
    assert_eq!(journal.problem().borrow().as_deref(), Some(problem.as_str()));
    assert!(journal.is_damaged());
}

#[tokio::test]
async fn damage_is_reported_over_restarts_until_the_files_that_were_kept_are_deleted() {
    let dir = StateDir::new("unhandled");
    let open = || AttachmentJournal::open(&dir.0).unwrap();
    let journal = open();
    journal.announce(record("a", "net1", intent())).await.unwrap();
    assert!(!journal.is_damaged());
    drop(journal);
    fs::remove_file(dir.journal()).unwrap();
    open().announce(record("b", "net1", intent())).await.unwrap();
    let damaged = [b"damaged\n", &fs::read(dir.journal()).unwrap()[..]].concat();
    fs::write(dir.journal(), &damaged).unwrap();
    drop(open());
    let journal = open();
    assert_eq!(journal.pods(), ["uid-b".to_owned()].into());
    let kept = ["journal.damaged", "journal.damaged.2"].map(|name| dir.0.join("hotplug").join(name));
    assert_eq!(kept.clone().map(|file| fs::read(file).unwrap()), [Vec::new(), damaged]);
    let mut problem = journal.problem();
    let text = problem.borrow().clone().unwrap();
    assert!(kept.iter().all(|file| text.contains(&file.display().to_string())), "{text}");

    for file in &kept {
        fs::remove_file(file).unwrap();
    }
    // Without a restart and without a write.
    let handled = tokio::time::timeout(4 * RETRY_INTERVAL, problem.wait_for(Option::is_none));
    assert_eq!(*handled.await.expect("the problem stays").unwrap(), None);
    assert!(!journal.is_damaged());
    drop(journal);
    assert!(!open().is_damaged());
}

#[tokio::test]
async fn without_a_disk_nothing_is_announced_and_what_happened_counts() {
    let dir = StateDir::new("full");
    let journal = AttachmentJournal::open(&dir.0).unwrap();
    journal.announce(record("a", "net1", attached())).await.unwrap();
    journal.announce(record("b", "net1", intent())).await.unwrap();
    drop(journal);
    let obstacle = dir.0.join("hotplug/journal.new/x");
    fs::create_dir_all(&obstacle).unwrap();
    let journal = AttachmentJournal::open(&dir.0).unwrap();
    let error = journal.announce(record("c", "net1", intent())).await.unwrap_err();
    assert!(error.to_string().contains("journal.new"), "{error}");
    assert!(journal.problem().borrow().is_some());
    journal.remove(record("a", "net1", intent()).key).await.unwrap_err();
    journal.update(record("b", "net1", attached())).await.unwrap_err();
    assert_eq!((phases(&journal, "a"), phases(&journal, "b")), (vec![], vec![attached()]));
    assert_eq!(phases(&journal, "c"), []);

    fs::remove_dir_all(dir.0.join("hotplug/journal.new")).unwrap();
    journal.announce(record("d", "net1", intent())).await.unwrap();
    assert_eq!(*journal.problem().borrow(), None);
    drop(journal);
    let journal = AttachmentJournal::open(&dir.0).unwrap();
    assert_eq!(journal.pods(), ["uid-b", "uid-d"].map(str::to_owned).into());
    assert_eq!(phases(&journal, "b"), [attached()]);
}

/// An attachment with a result of a usual length.
fn with_result() -> RecordPhase {
    let result = format!(r#"{{"cniVersion":"1.0.0","dns":{{"search":["{}"]}}}}"#, "x".repeat(4000));
    RecordPhase::Attached(AttachedRecord { result, ..AttachedRecord::default() })
}

#[test]
fn the_result_of_an_announced_attachment_is_recorded_on_a_full_disk() {
    with_small_disk("hotplug-result", |disk| {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let journal = AttachmentJournal::open(disk.path()).unwrap();
            for pod in ["a", "b"] {
                journal.announce(record(pod, "net1", intent())).await.unwrap();
            }
            journal.update(record("c", "net1", attached())).await.unwrap();
            disk.fill();
            // An ADD that is announced now has no room for its result.
            journal.announce(record("d", "net1", intent())).await.unwrap_err();
            // Nor has the end of another attachment, which counts all the same.
            let (_, refused, result) = futures::join!(
                journal.update(record("c", "net1", RecordPhase::Removed)),
                journal.announce(record("e", "net1", intent())),
                journal.update(record("a", "net1", with_result())),
            );
            assert!(refused.is_err() && result.is_ok(), "{refused:?} {result:?}");
            assert_eq!(phases(&journal, "c"), [RecordPhase::Removed]);
            journal.update(record("b", "net1", with_result())).await.unwrap();
            assert!(journal.problem().borrow().as_ref().unwrap().contains("cannot be written"));
            drop(journal);
            let journal = AttachmentJournal::open(disk.path()).unwrap();
            assert_eq!([phases(&journal, "a"), phases(&journal, "b")], [[with_result()], [with_result()]]);
            assert_eq!((phases(&journal, "d"), phases(&journal, "e")), (vec![], vec![]));
            disk.empty();
            journal.announce(record("d", "net1", intent())).await.unwrap();
            assert_eq!(*journal.problem().borrow(), None);
        });
    });
}

#[test]
fn the_routes_that_an_announced_attachment_replaces_are_recorded_on_a_full_disk() {
    with_small_disk("hotplug-routes", |disk| {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let journal = AttachmentJournal::open(disk.path()).unwrap();
            let (with, without) = (record("a", "net1", intent()).key, record("b", "net1", intent()).key);
            let routes = vec![json!({"gateway": "10.0.0.1", "more": "x".repeat(8000)})];
            for pod in ["a", "b"] {
                journal.announce(record(pod, "net1", intent())).await.unwrap();
            }
            journal.save_routes(with.clone(), Vec::new()).await.unwrap();
            disk.fill();
            journal.save_routes(without, routes.clone()).await.unwrap_err();
            // No routes are to be replaced.
            journal.save_routes(with.clone(), Vec::new()).await.unwrap();
            let (saved, refused) = futures::join!(
                journal.save_routes(with.clone(), routes.clone()),
                journal.announce(record("c", "net1", intent())),
            );
            assert!(saved.is_ok() && refused.is_err(), "{saved:?} {refused:?}");
            assert_eq!(journal.saved_routes(&with), routes);
            for pod in ["a", "b"] {
                journal.update(record(pod, "net1", with_result())).await.unwrap();
            }
            drop(journal);
            let journal = AttachmentJournal::open(disk.path()).unwrap();
            assert_eq!(journal.saved_routes(&with), routes);
            assert_eq!([phases(&journal, "a"), phases(&journal, "b")], [[with_result()], [with_result()]]);
        });
    });
}

#[test]
fn only_one_daemon_has_the_journal() {
    let dir = StateDir::new("lock");
    let first = AttachmentJournal::open(&dir.0).unwrap();
    let path = dir.0.clone();
    let second = thread::spawn(move || AttachmentJournal::open(&path).map(|_| ()));
    thread::park_timeout(Duration::from_millis(100));
    assert!(!second.is_finished());
    drop(first);
    second.join().unwrap().unwrap();
}
