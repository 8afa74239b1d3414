//! Plugins that fail in every way.

use std::time::Instant;

use prometheus_client::{encoding::text::encode, registry::Registry};

use super::*;

async fn fail(node: &TestNode, script: &str) -> String {
    node.plugin("bad", script);
    node.executor.add_now(&one("bad")).await.unwrap_err().to_string()
}

/// Whether a process runs. One that init has not reaped yet does not.
fn runs(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

async fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "waited for {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_hanging_plugin_is_killed_with_its_children() {
    let node = TestNode::with("hang", |config| config.timeout = Duration::from_secs(2));
    let start = Instant::now();
    let error = fail(&node, "sleep 60 & echo $! > $ROOT/child; sleep 60 & wait").await;
    let expected = "plugin bad did not finish within 2 s and was killed; check what it waits for, or raise --plugin-timeout";
    assert_eq!(error, expected);
    assert!(start.elapsed() < Duration::from_secs(20));
    let child = node.read("child");
    wait_until("the end of the child", || !runs(&child)).await;
}

/// The directory in /proc of the process whose number is in this file. It exists until the process is reaped.
fn process(node: &TestNode, file: &str) -> PathBuf {
    Path::new("/proc").join(node.read(file).trim())
}

/// Runs a test of this file in a process of its own, because it changes who reaps the processes of all tests.
fn run_alone(test: &str) {
    let test = format!("executor::tests::faults::{test}");
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", &test, "--ignored", "--nocapture"]).output().unwrap();
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
fn children_that_left_the_session_of_a_killed_plugin_are_killed_and_reaped() {
    run_alone("a_killed_plugin_with_sessions");
}

#[tokio::test]
#[ignore = "another test runs it in a process of its own"]
async fn a_killed_plugin_with_sessions() {
    let node = TestNode::with("sessions", |config| config.timeout = Duration::from_secs(2));
    let mut reaper = JoinSet::new();
    reaper.spawn(CHILDREN.reap());
    // A helper that another call left on purpose.
    node.plugin(
        "helper",
        &format!("setsid sleep 60 >/dev/null 2>&1 & echo $! > $ROOT/helper; echo '{}'", result()),
    );
    node.executor.add_now(&one("helper")).await.unwrap();
    // `orphan` has no parent any more when the plugin is killed, and `clean` has not the environment of the call.
    let script = "(setsid sh -c 'sleep 60 & echo $! > $0/orphan' $ROOT)
        setsid sh -c 'sleep 60 & echo $! > $0/grandchild; wait' $ROOT &
        setsid env -i /bin/sh -c 'echo $$ > $0/clean; exec sleep 60' $ROOT &
        sleep 60";
    let error = fail(&node, script).await;
    assert!(error.contains("was killed"), "{error}");
    for name in ["orphan", "grandchild", "clean"] {
        let process = process(&node, name);
        wait_until(&format!("the end of {name}"), || !process.exists()).await;
    }
    let helper = process(&node, "helper");
    assert!(helper.exists(), "a helper of another call lives on");
    let pid = helper.file_name().unwrap().to_str().unwrap().parse().unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
    wait_until("the helper to be reaped", || !helper.exists()).await;
}

#[test]
fn reaping_orphans_takes_no_result_of_a_plugin() {
    run_alone("plugins_with_orphans");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "another test runs it in a process of its own"]
async fn plugins_with_orphans() {
    let node = TestNode::new("orphans");
    let mut reaper = JoinSet::new();
    reaper.spawn(CHILDREN.reap());
    node.plugin("orphans", "(setsid true &) ; (setsid true &); cat >/dev/null; exit 3");
    let mut calls = JoinSet::new();
    for _ in 0..200 {
        let executor = node.executor.clone();
        calls.spawn(async move { executor.add_now(&one("orphans")).await.unwrap_err().to_string() });
    }
    while let Some(error) = calls.join_next().await {
        assert_eq!(error.unwrap(), "plugin orphans failed: the plugin failed and printed no CNI error");
    }
    wait_until("all processes to be reaped", || {
        let tasks = fs::read_dir("/proc/self/task").unwrap();
        let children =
            |task: fs::DirEntry| fs::read_to_string(task.path().join("children")).unwrap_or_default();
        tasks.flatten().map(children).all(|list| list.is_empty())
    })
    .await;
}

#[tokio::test]
async fn a_child_that_keeps_the_pipes_open_delays_nothing() {
    let node = TestNode::new("daemon");
    node.plugin("daemon", &format!("sleep 60 & echo $! > $ROOT/child; echo '{}'", result()));
    let start = Instant::now();
    node.executor.add_now(&one("daemon")).await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(20));
    let child = node.read("child");
    assert!(runs(&child), "a plugin that succeeded may leave a process");
    let child = nix::unistd::Pid::from_raw(child.trim().parse().unwrap());
    nix::sys::signal::kill(child, nix::sys::signal::Signal::SIGKILL).unwrap();
}

#[tokio::test]
async fn endless_output_is_cut_off() {
    let node = TestNode::new("flood");
    let error = fail(&node, "head -c 10000000 /dev/zero; sleep 60").await;
    assert_eq!(error, "plugin bad printed more than 256 KiB and was killed");
    // DEL has no result. Its plugin runs to its end, whatever it prints.
    node.plugin("bad", "head -c 10000000 /dev/zero; head -c 10000000 /dev/zero >&2; touch $ROOT/done");
    node.executor.del_all(&one("bad"), None).await.unwrap();
    assert!(node.root.join("done").exists());
}

#[tokio::test]
async fn output_that_is_no_result_is_an_error() {
    let node = TestNode::new("output");
    for (script, expected) in [
        ("", "the plugin printed no result"),
        ("echo hello", "the plugin printed something that is not JSON: hello"),
        ("echo '[]'", "the plugin printed an invalid result: the result is not valid"),
        (
            "echo '{\"cniVersion\":\"1.0.0\",\"ips\":[{\"address\":7}]}'",
            "the plugin printed an invalid result",
        ),
        ("echo '{\"code\":7,\"msg\":\"no\",\"details\":\"why\"}'", "no: why"),
        ("echo '{\"code\":7,\"msg\":\"no\",\"details\":\"why\"}'; exit 3", "no: why"),
        ("echo oops >&2; exit 3", "the plugin failed and printed no CNI error: oops"),
        ("exit 3", "the plugin failed and printed no CNI error"),
    ] {
        let error = fail(&node, script).await;
        let expected = format!("plugin bad failed: {expected}");
        let expected = expected.strip_suffix(": the result is not valid").unwrap_or(&expected);
        assert!(error.starts_with(expected), "{script}: {error}");
    }
    // libcni accepts it.
    node.plugin("null", "echo null");
    let added = node.executor.add_now(&one("null")).await.unwrap();
    assert_eq!(added.success, Success::default());
}

#[tokio::test]
async fn a_plugin_that_a_signal_killed_is_reported() {
    let node = TestNode::new("signal");
    let error = fail(&node, "echo trace >&2; kill -9 $$").await;
    let expected = "plugin bad was killed by signal 9 (SIGKILL; if the node or the daemon is out of memory, \
        the kernel kills plugins: see the kernel log): trace";
    assert_eq!(error, expected);
    assert_eq!(fail(&node, "kill -11 $$").await, "plugin bad was killed by signal 11");
}

#[tokio::test]
async fn a_file_that_is_no_program_is_reported() {
    let node = TestNode::new("program");
    let path = node.root.join("bin/text");
    fs::write(&path, "text").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let error = node.executor.add_now(&one("text")).await.unwrap_err();
    assert!(error.to_string().starts_with("cannot run plugin text: Exec format error"), "{error}");
}

#[tokio::test]
async fn a_plugin_that_is_being_written_is_awaited() {
    let node = TestNode::new("busy");
    node.plugin("one", &format!("echo '{}'", result()));
    let file = fs::File::options().append(true).open(node.root.join("bin/one")).unwrap();
    let written = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        drop(file);
    };
    let request = one("one");
    let (added, ()) = tokio::join!(node.executor.add_now(&request), written);
    added.unwrap();
}

#[tokio::test]
async fn the_kernel_kills_plugins_before_the_daemon() {
    let node = TestNode::new("oom");
    // The daemon writes the score after the start of the plugin.
    let wait = "until [ $(cat /proc/self/oom_score_adj) = 1000 ]; do :; done; cat /proc/self/oom_score_adj > $ROOT/score";
    node.plugin("one", &format!("{wait}; echo '{}'", result()));
    node.executor.add_now(&one("one")).await.unwrap();
    assert_eq!(node.read("score"), "1000\n");
    assert_ne!(fs::read_to_string("/proc/self/oom_score_adj").unwrap(), "1000\n");
}

#[tokio::test]
async fn input_that_is_not_read_blocks_nothing() {
    let node = TestNode::new("input");
    node.plugin("one", &format!("echo '{}'", result()));
    let config = json!({"cniVersion": "1.0.0", "type": "one", "long": "x".repeat(500_000)});
    node.executor.add_now(&request(&config)).await.unwrap();
}

#[tokio::test]
async fn metrics_have_no_names_of_plugins() {
    let node = TestNode::with("metrics", |config| config.timeout = Duration::from_secs(2));
    fail(&node, "exit 1").await;
    fail(&node, "exec sleep 60").await;
    node.executor.del_all(&one("away"), None).await.unwrap_err();
    let mut registry = Registry::default();
    node.metrics.register(&mut registry);
    let mut text = String::new();
    encode(&mut text, &registry).unwrap();
    for line in [
        r#"plugin_calls_total{command="Add",result="Error"} 1"#,
        r#"plugin_calls_total{command="Add",result="Timeout"} 1"#,
        r#"plugin_calls_total{command="Del",result="Missing"} 1"#,
        r#"plugin_duration_seconds_count{command="Add"} 2"#,
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    assert!(!text.contains("bad") && !text.contains("away"));
}
