//! Many calls at once.

use std::time::Instant;

use futures::{FutureExt as _, future::join_all, stream::FuturesUnordered, stream::StreamExt as _};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};

use super::*;

/// A plugin whose ADD hangs.
const HANG: &str = "[ $CNI_COMMAND = DEL ] || { echo $$ >> $ROOT/started; exec sleep 60; }";

/// A call for a pod in one of two namespaces.
fn on(plugin: &str, number: usize) -> CniRequest {
    let cni_args = vec![("K8S_POD_NAMESPACE".to_owned(), format!("ns{}", number % 2))];
    CniRequest { container_id: format!("pod{number}"), cni_args, ..one(plugin) }
}

/// The hanging plugins, which are killed at the end of a test.
struct Hanging(PathBuf);

impl Hanging {
    fn started(&self) -> Vec<i32> {
        let pids = fs::read_to_string(&self.0).unwrap_or_default();
        pids.lines().filter_map(|pid| pid.parse().ok()).collect()
    }

    async fn wait_for(&self, count: usize) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.started().len() < count {
            assert!(Instant::now() < deadline, "only {} plugins started", self.started().len());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        for pid in self.started() {
            let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

#[tokio::test]
async fn hanging_calls_delay_no_others() {
    // Not even for the time after which a call gives its slot back.
    let node = TestNode::with("load", |config| config.limits.slow_after = Duration::from_secs(60));
    node.plugin("hang", HANG);
    node.plugin("quick", &format!("echo '{}'", result()));
    let running = Hanging(node.root.join("started"));
    let executor = node.executor.clone();
    let hanging: Vec<CniRequest> = (0..50).map(|number| on("hang", number)).collect();
    let quick: Vec<CniRequest> = (0..50).map(|number| on("quick", number)).collect();
    let mut hanging: FuturesUnordered<_> = hanging.iter().map(|request| executor.add_now(request)).collect();
    assert!(hanging.next().now_or_never().is_none());
    let work = async {
        for added in join_all(quick.iter().map(|request| executor.add_now(request))).await {
            added.unwrap();
        }
        // Nor do they delay the removal of an attachment of the same type.
        executor.del_all(&on("hang", 99), None).await.unwrap();
        running.wait_for(8).await;
    };
    tokio::select! {
        () = work => {}
        ended = hanging.next() => panic!("a hanging call ended first: {ended:?}"),
    }
    assert_eq!((running.started().len(), node.metrics.waiting.get()), (8, 42));
}

#[tokio::test]
async fn a_slow_type_lets_no_more_adds_start_and_says_so() {
    let node = TestNode::with("slow", |config| {
        config.limits.slow_after = Duration::from_millis(100);
        config.limits.add_wait = Duration::from_secs(3);
    });
    node.plugin("hang", HANG);
    let running = Hanging(node.root.join("started"));
    let requests: Vec<CniRequest> = (0..9).map(|number| on("hang", number)).collect();
    let mut calls: FuturesUnordered<_> =
        requests.iter().map(|request| node.executor.add_now(request)).collect();
    let error = calls.next().await.unwrap().unwrap_err();
    let expected =
        "plugin hang was not started: 8 ADD calls of it are running, 8 of its calls for over 0.1 s; retrying";
    assert_eq!(error.to_string(), expected);
    let metrics = &node.metrics;
    assert_eq!((metrics.running.get(), metrics.slow.get(), metrics.waiting.get()), (8, 8, 0));
    assert_eq!(running.started().len(), 8);
}

#[tokio::test]
async fn a_dropped_call_is_supervised_until_its_process_ends() {
    let node = TestNode::with("dropped", |config| config.timeout = Duration::from_secs(2));
    node.plugin("hang", HANG);
    let running = Hanging(node.root.join("started"));
    let request = one("hang");
    tokio::select! {
        () = running.wait_for(1) => {}
        ended = node.executor.add_now(&request) => panic!("the hanging call ended: {ended:?}"),
    }
    let process = PathBuf::from(format!("/proc/{}", running.started()[0]));
    assert!(process.exists());
    assert_eq!(node.metrics.running.get(), 1);
    let deadline = Instant::now() + Duration::from_secs(10);
    while node.metrics.running.get() > 0 {
        assert!(Instant::now() < deadline, "the process still runs");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(!process.exists());
    // Its number may belong to another process now.
    fs::remove_file(&running.0).unwrap();
}

#[tokio::test]
async fn draining_finishes_what_has_started_and_starts_nothing() {
    let node = TestNode::new("drain");
    node.plugin("one", &format!("touch $ROOT/one; sleep 0.3; echo '{}'", result()));
    node.plugin("two", &format!("touch $ROOT/two; echo '{}'", result()));
    let config = json!({"cniVersion": "1.0.0", "plugins": [{"type": "one"}, {"type": "two"}]});
    let request = request(&config);
    let drain = async {
        while !node.root.join("one").exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let drained = node.executor.drain(Duration::from_secs(5)).await;
        (drained, node.executor.add_now(&one("two")).await)
    };
    let (added, (drained, refused)) = tokio::join!(node.executor.add_now(&request), drain);
    added.unwrap();
    assert!(drained && node.root.join("two").exists());
    assert!(matches!(refused, Err(ExecError::Stopping)));
    // A plugin that takes too long is left alone.
    let slow = TestNode::new("drain-slow");
    slow.plugin("one", "touch $ROOT/one; sleep 1; touch $ROOT/end");
    let request = one("one");
    let mut adding = Box::pin(slow.executor.add_now(&request));
    while !slow.root.join("one").exists() {
        assert!(timeout(Duration::from_millis(5), &mut adding).await.is_err());
    }
    assert!(!slow.executor.drain(Duration::from_millis(10)).await);
}
