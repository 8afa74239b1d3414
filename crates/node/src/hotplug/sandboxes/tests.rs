use std::{
    fs,
    os::{fd::AsFd as _, unix::fs::symlink},
    path::Path,
    sync::atomic::Ordering,
};

use futures::FutureExt as _;
use tokio::{task::JoinSet, time::timeout};

use super::*;
use crate::cri::tests::{FakeRuntime, HostRoot, sandbox};

const LIMIT: Duration = Duration::from_secs(20);

fn host() -> HostMounts {
    HostMounts::open(Path::new("/proc/self/ns/mnt")).unwrap()
}

fn at_path(path: &str) -> String {
    serde_json::json!({"runtimeSpec": {"linux": {"namespaces": [{"type": "network", "path": path}]}}})
        .to_string()
}

fn attempt(id: &str, uid: &str, attempt: u32, state: i32) -> wire::cri::PodSandbox {
    let mut sandbox = sandbox(id, "web", uid, state);
    sandbox.metadata.as_mut().unwrap().attempt = attempt;
    sandbox
}

fn lists(fake: &FakeRuntime) -> usize {
    fake.state.lists.load(Ordering::Relaxed)
}

#[tokio::test]
async fn a_pod_runs_in_its_ready_sandbox_with_the_highest_attempt() {
    let fake = FakeRuntime::new("attempts");
    fake.add(attempt("old", "uid-1", 9, 1), "{}");
    fake.add(attempt("first", "uid-1", 0, 0), &at_path("/run/netns/first"));
    fake.add(attempt("second", "uid-1", 1, 0), &at_path("/run/netns/second"));
    fake.add(attempt("stopped", "uid-2", 0, 1), "{}");
    let locator = SandboxLocator::new(fake.runtime(), host());
    let found = locator.locate("uid-1").await.unwrap().unwrap();
    let network = PodNetwork::Namespace("/run/netns/second".to_owned());
    assert_eq!((found.id.as_str(), found.attempt, found.network), ("second", 1, network));
    assert_eq!(locator.locate("uid-2").await.unwrap(), None);
    assert_eq!(locator.locate("unknown").await.unwrap(), None);
    let list = locator.list().await.unwrap();
    assert_eq!(list.running_ids(), ["first", "own", "second"].map(str::to_owned).into());
}

#[tokio::test]
async fn every_kind_of_network_is_understood() {
    let fake = FakeRuntime::new("networks");
    for (uid, info, expected) in [
        ("path", at_path("/var/run/netns/a"), PodNetwork::Namespace("/var/run/netns/a".to_owned())),
        (
            "process",
            r#"{"pid": 7, "runtimeSpec": {"linux": {"namespaces": [{"type": "network"}]}}}"#.to_owned(),
            PodNetwork::Namespace("/proc/7/ns/net".to_owned()),
        ),
        (
            "no-process",
            r#"{"runtimeSpec": {"linux": {"namespaces": [{"type": "network"}]}}}"#.to_owned(),
            PodNetwork::Unavailable,
        ),
        (
            "host",
            r#"{"runtimeSpec": {"linux": {"namespaces": [{"type": "pid"}]}}}"#.to_owned(),
            PodNetwork::Host,
        ),
        (
            "closed",
            r#"{"netNamespaceClosed": true, "runtimeSpec": null}"#.to_owned(),
            PodNetwork::Unavailable,
        ),
        ("unknown", r#"{"runtimeSpec": null}"#.to_owned(), PodNetwork::Unavailable),
    ] {
        fake.add(attempt(&format!("id-{uid}"), uid, 0, 0), &info);
        let found = SandboxLocator::new(fake.runtime(), host()).locate(uid).await.unwrap();
        assert_eq!(found.unwrap().network, expected, "{uid}");
    }
}

#[tokio::test]
async fn a_runtime_with_its_own_network_stack_is_reported_also_from_the_cache() {
    let fake = FakeRuntime::new("own-stack");
    let kata = at_path("/run/netns/kata").replacen('{', r#"{"runtimeType":"io.containerd.kata.v2","#, 1);
    fake.add(attempt("vm", "uid-1", 0, 0), &kata);
    fake.add(attempt("plain", "uid-2", 0, 0), &at_path("/run/netns/plain"));
    let locator = SandboxLocator::new(fake.runtime(), host());
    for _ in 0..2 {
        let found = locator.locate("uid-1").await.unwrap().unwrap();
        assert_eq!(found.own_network_stack.as_deref(), Some("io.containerd.kata.v2"));
        assert_eq!(locator.locate("uid-2").await.unwrap().unwrap().own_network_stack, None);
    }
}

#[tokio::test]
async fn the_namespace_of_a_sandbox_is_asked_for_once() {
    let fake = FakeRuntime::new("namespace-cache");
    fake.add(attempt("a", "uid-1", 0, 0), &at_path("/run/netns/a"));
    fake.add(attempt("b", "uid-2", 0, 0), r#"{"runtimeSpec": null}"#);
    let locator = SandboxLocator::new(fake.runtime(), host());
    let statuses = || fake.state.statuses.load(Ordering::Relaxed);
    for _ in 0..3 {
        locator.locate("uid-1").await.unwrap();
    }
    assert_eq!(statuses(), 1);
    for _ in 0..3 {
        locator.locate("uid-2").await.unwrap();
    }
    assert_eq!(statuses(), 4, "what the runtime does not say yet is asked for again");
    fake.remove("a");
    locator.list().await.unwrap();
    assert!(locator.cache().networks.is_empty(), "a sandbox that is gone is forgotten");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_pods_at_once_share_the_lists() {
    let fake = FakeRuntime::new("coalesce");
    for pod in 0..50 {
        fake.add(attempt(&format!("id-{pod}"), &format!("uid-{pod}"), 0, 0), &at_path("/run/netns/x"));
    }
    let locator = SandboxLocator::new(fake.runtime(), host());
    let mut tasks = JoinSet::new();
    for pod in 0..50 {
        let locator = locator.clone();
        tasks.spawn(async move { locator.locate(&format!("uid-{pod}")).await.unwrap().unwrap() });
    }
    while let Some(found) = tasks.join_next().await {
        found.unwrap();
    }
    // Those that came while the first list was under way share the second one.
    assert!(lists(&fake) <= 2, "{}", lists(&fake));
}

#[tokio::test]
async fn a_list_that_started_before_the_call_is_not_shared() {
    let fake = FakeRuntime::new("stale-list");
    fake.state.gate.forget_permits(tokio::sync::Semaphore::MAX_PERMITS);
    let locator = SandboxLocator::new(fake.runtime(), host());
    let mut tasks = JoinSet::new();
    let first = locator.clone();
    tasks.spawn(async move { first.list().await.unwrap() });
    while lists(&fake) == 0 {
        tokio::task::yield_now().await;
    }
    for _ in 0..3 {
        let locator = locator.clone();
        tasks.spawn(async move { locator.list().await.unwrap() });
    }
    // Runs all three until they wait.
    tokio::task::yield_now().await;
    fake.state.gate.add_permits(4);
    let all = async { while tasks.join_next().await.is_some() {} };
    timeout(LIMIT, all).await.unwrap();
    assert_eq!(lists(&fake), 2, "the three that came later share a list of their own");
}

#[tokio::test]
async fn a_list_is_used_again_until_it_is_old_or_invalid_or_lacks_the_pod() {
    let fake = FakeRuntime::new("list-cache");
    fake.add(attempt("a", "uid-1", 0, 0), &at_path("/run/netns/a"));
    let locator = SandboxLocator::new(fake.runtime(), host());
    for _ in 0..5 {
        locator.locate("uid-1").await.unwrap().unwrap();
    }
    assert_eq!(lists(&fake), 1);
    locator.invalidate();
    locator.locate("uid-1").await.unwrap().unwrap();
    assert_eq!(lists(&fake), 2);
    fake.add(attempt("b", "uid-2", 0, 0), &at_path("/run/netns/b"));
    assert_eq!(locator.locate("uid-2").await.unwrap().unwrap().id, "b");
    assert_eq!(lists(&fake), 3);
    locator.cache().listed.as_mut().unwrap().started -= LIST_MAX_AGE;
    locator.locate("uid-1").await.unwrap().unwrap();
    assert_eq!(lists(&fake), 4);
}

#[tokio::test]
async fn a_runtime_that_is_away_is_an_error_and_not_the_end_of_a_pod() {
    let mut fake = FakeRuntime::new("away");
    fake.add(attempt("a", "uid-1", 0, 0), &at_path("/run/netns/a"));
    let locator = SandboxLocator::new(fake.runtime(), host());
    locator.locate("uid-1").await.unwrap().unwrap();
    fake.stop().await;
    locator.invalidate();
    assert!(matches!(locator.locate("uid-1").await, Err(LocateError::List(_))));
    fake.start();
    assert_eq!(locator.locate("uid-1").await.unwrap().unwrap().id, "a");
}

#[tokio::test]
async fn only_a_namespace_is_opened() {
    let root = HostRoot::new("open");
    let locator = SandboxLocator::new(FakeRuntime::new("open-runtime").runtime(), host());
    let file = root.0.join("netns");
    fs::write(&file, "").unwrap();
    for path in [file, root.0.join("missing")] {
        let error = locator.open(path.to_str().unwrap()).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound, "{error}");
    }
    let opened = locator.open("/proc/self/ns/net").await.unwrap();
    assert!(fstatfs(opened.as_fd()).is_ok());
}

async fn next(watch: &NamespaceWatch) -> NamespaceEvent {
    timeout(LIMIT, watch.next()).await.unwrap()
}

#[tokio::test]
async fn namespace_files_are_seen_to_come_and_go_by_every_path_of_their_directory() {
    let root = HostRoot::new("watch");
    let dir = root.0.join("run/netns");
    fs::create_dir_all(&dir).unwrap();
    symlink("run", root.0.join("var-run")).unwrap();
    let watch = NamespaceWatch::new(host()).unwrap();
    let alias = root.0.join("var-run/netns/cni-1");
    watch.add(dir.join("cni-1").to_str().unwrap()).await;
    watch.add(alias.to_str().unwrap()).await;
    watch.add("/proc/1/ns/net").await;
    watch.add("relative").await;
    assert_eq!(watch.next().now_or_never(), None);
    let paths = [dir.join("cni-1"), alias].map(|path| path.to_str().unwrap().to_owned());
    fs::write(dir.join("cni-1"), "").unwrap();
    fs::remove_file(dir.join("cni-1")).unwrap();
    for path in &paths {
        assert_eq!(next(&watch).await, NamespaceEvent::Created(path.clone()));
    }
    for path in &paths {
        assert_eq!(next(&watch).await, NamespaceEvent::Deleted(path.clone()));
    }
    assert_eq!(watch.next().now_or_never(), None);
}

#[tokio::test]
async fn a_directory_that_appears_or_is_replaced_is_watched() {
    let root = HostRoot::new("watch-missing");
    let dir = root.0.join("netns");
    let file = dir.join("cni-1").to_str().unwrap().to_owned();
    let watch = NamespaceWatch::new(host()).unwrap();
    watch.add(&file).await;
    for change in ["created", "replaced", "moved"] {
        fs::create_dir(&dir).unwrap();
        assert_eq!(next(&watch).await, NamespaceEvent::CheckAll, "{change}");
        fs::write(&file, "").unwrap();
        assert_eq!(next(&watch).await, NamespaceEvent::Created(file.clone()), "{change}");
        fs::remove_file(&file).unwrap();
        assert_eq!(next(&watch).await, NamespaceEvent::Deleted(file.clone()), "{change}");
        if change == "created" {
            fs::remove_dir(&dir).unwrap();
        } else {
            fs::rename(&dir, root.0.join(change)).unwrap();
        }
        assert_eq!(next(&watch).await, NamespaceEvent::CheckAll, "{change}");
    }
}

/// The controller cancels the wait at each event of another kind.
#[tokio::test]
async fn a_directory_that_appears_is_found_although_the_wait_for_it_is_cancelled_again_and_again() {
    let root = HostRoot::new("watch-cancelled");
    let dir = root.0.join("netns");
    let watch = NamespaceWatch::new(host()).unwrap();
    watch.add(dir.join("cni-1").to_str().unwrap()).await;
    fs::create_dir(&dir).unwrap();
    let started = std::time::Instant::now();
    let event = loop {
        assert!(started.elapsed() < LIMIT, "the directory is not found");
        if let Ok(event) = timeout(Duration::from_millis(50), watch.next()).await {
            break event;
        }
    };
    assert_eq!(event, NamespaceEvent::CheckAll);
}
