//! The plugin binary against a fake daemon.
#![expect(clippy::unwrap_used, clippy::panic, reason = "the functions around the tests are test code too")]

use std::{
    fs::{self, File},
    io::Write as _,
    os::{
        fd::OwnedFd,
        unix::{
            fs::{MetadataExt as _, PermissionsExt as _, symlink},
            net::UnixListener,
        },
    },
    path::PathBuf,
    process::{Command, Output, Stdio},
    thread,
    time::Instant,
};

use wire::socket::{FrameReader, MAX_FRAME, Message, Reply, Request, receive, send};

/// A directory with the plugin, a socket and the state directory; removed on drop.
struct TempDir(PathBuf);

impl TempDir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("patchbay-cni-{}-{name}", std::process::id()));
        _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        symlink(env!("CARGO_BIN_EXE_patchbay-cni"), path.join("patchbay-bridge")).unwrap();
        File::create(path.join("netns")).unwrap();
        Self(path)
    }

    fn listen(&self) -> UnixListener {
        UnixListener::bind(self.0.join("cni.sock")).unwrap()
    }

    fn tombstones(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.0.join("state/tombstones")).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    }

    fn call(&self, command: &str, changes: &[(&str, &str)]) -> Output {
        self.call_with(command, changes, br#"{"cniVersion":"1.0.0"}"#)
    }

    fn call_with(&self, command: &str, changes: &[(&str, &str)], stdin: &[u8]) -> Output {
        self.run(&mut Command::new(self.0.join("patchbay-bridge")), command, changes, stdin)
    }

    /// Calls the plugin where the state directory is on a file system that cannot be written: run as root.
    fn call_with_read_only_state(&self, command: &str) -> Output {
        fs::create_dir_all(self.0.join("state")).unwrap();
        let script = r#"mount -t tmpfs -o ro none "$1/state" && exec "$1/patchbay-bridge""#;
        let mut shell = Command::new("/usr/bin/unshare");
        shell.args(["-m", "/bin/sh", "-c", script, "sh"]).arg(&self.0);
        self.run(&mut shell, command, &[("PATH", "/usr/bin:/bin")], br#"{"cniVersion":"1.0.0"}"#)
    }

    fn run(&self, program: &mut Command, command: &str, changes: &[(&str, &str)], stdin: &[u8]) -> Output {
        let mut plugin = program
            .env_clear()
            .env("PATCHBAY_CNI_SOCKET", self.0.join("cni.sock"))
            .env("PATCHBAY_STATE_DIR", self.0.join("state"))
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", "container")
            .env("CNI_NETNS", self.0.join("netns"))
            .env("CNI_IFNAME", "net1")
            .env("CNI_ARGS", "IgnoreUnknown=1")
            .env("CNI_PATH", "/opt/cni/bin")
            .envs(changes.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // A plugin that needs no configuration may exit before it reads.
        _ = plugin.stdin.take().unwrap().write_all(stdin);
        plugin.wait_with_output().unwrap()
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

/// Accepts one call and sends the reply, if there is one.
fn serve(listener: &UnixListener, reply: Option<&Reply>) -> (Request, Option<OwnedFd>) {
    let (socket, _) = listener.accept().unwrap();
    let (mut reader, mut descriptor, mut buffer) = (FrameReader::default(), None, [0; 4096]);
    loop {
        let length = receive(&socket, &mut buffer, &mut descriptor).unwrap();
        assert!(length > 0, "the plugin closed the connection");
        reader.feed(&buffer[..length]);
        if let Some(message) = reader.message().unwrap() {
            let Message::Request(request) = message else { panic!("{message:?}") };
            if let Some(reply) = reply {
                send(&socket, &reply.encode().unwrap(), None).unwrap();
            }
            return (request, descriptor);
        }
    }
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn has_code(output: &Output, code: u32) {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(text(output).contains(&format!("\"code\":{code},")), "{output:?}");
}

#[test]
fn a_call_is_forwarded_in_full_and_the_reply_printed() {
    let dir = TempDir::new("add");
    let listener = dir.listen();
    let reply = Reply { exit: 7, stdout: b"{\"anything\":1}\n".to_vec() };
    let (output, (request, descriptor)) = thread::scope(|scope| {
        let served = scope.spawn(|| serve(&listener, Some(&reply)));
        (dir.call("ADD", &[]), served.join().unwrap())
    });
    assert_eq!((output.status.code(), text(&output).as_bytes()), (Some(7), reply.stdout.as_slice()));
    let netns = dir.0.join("netns");
    let wanted = Request {
        plugin: "patchbay-bridge".to_owned(),
        command: "ADD".to_owned(),
        container_id: "container".to_owned(),
        netns: netns.to_str().unwrap().to_owned(),
        ifname: "net1".to_owned(),
        args: "IgnoreUnknown=1".to_owned(),
        path: "/opt/cni/bin".to_owned(),
        stdin: br#"{"cniVersion":"1.0.0"}"#.to_vec(),
    };
    assert_eq!(request, wanted);
    let received = File::from(descriptor.unwrap()).metadata().unwrap();
    assert_eq!(received.ino(), fs::metadata(netns).unwrap().ino());
}

#[test]
fn version_needs_no_daemon() {
    let output = TempDir::new("version").call("VERSION", &[("CNI_CONTAINERID", "")]);
    assert!(output.status.success());
    let wanted = r#"{"cniVersion":"1.1.0","supportedVersions":["0.1.0","0.2.0","0.3.0","0.3.1","0.4.0","1.0.0","1.1.0"]}"#;
    assert_eq!(text(&output).trim(), wanted);
}

#[test]
fn without_a_daemon_every_command_but_del_fails_and_only_add_waits() {
    let dir = TempDir::new("away");
    for (command, code) in [("ADD", 11), ("CHECK", 11), ("GC", 11), ("STATUS", 50)] {
        let started = Instant::now();
        let output = dir.call(command, &[]);
        let waited = started.elapsed();
        let expected = if command == "ADD" { 10..15 } else { 0..5 };
        assert!(expected.contains(&waited.as_secs()), "{command} waited {waited:?}");
        has_code(&output, code);
        assert!(
            text(&output).contains("the patchbay node daemon does not answer on this node"),
            "{output:?}"
        );
    }
    assert_eq!(dir.tombstones(), Vec::<PathBuf>::new());
}

#[test]
fn an_add_outlives_a_restart_of_the_daemon() {
    let dir = TempDir::new("restart");
    let socket = dir.0.join("cni.sock");
    let stopping = dir.listen();
    let reply = Reply { exit: 0, stdout: b"{}".to_vec() };
    let output = thread::scope(|scope| {
        let call = scope.spawn(|| dir.call("ADD", &[]));
        // The first daemon stops before it reads the request.
        drop(stopping.accept().unwrap());
        drop(stopping);
        fs::remove_file(&socket).unwrap();
        let (request, namespace) = serve(&dir.listen(), Some(&reply));
        assert!(request.command == "ADD" && namespace.is_some());
        assert!(!request.waited().is_zero(), "the daemon learns how long: {request:?}");
        call.join().unwrap()
    });
    assert_eq!((output.status.code(), text(&output)), (Some(0), "{}".to_owned()));
}

#[test]
fn without_a_daemon_del_writes_one_tombstone_and_succeeds() {
    let dir = TempDir::new("tombstone");
    for _ in 0..3 {
        let output = dir.call("DEL", &[("CNI_NETNS", "")]);
        assert_eq!((output.status.code(), text(&output)), (Some(0), String::new()));
    }
    let [tombstone] = dir.tombstones().try_into().unwrap();
    assert_eq!(fs::metadata(&tombstone).unwrap().permissions().mode() & 0o777, 0o600);
    let mut reader = FrameReader::default();
    reader.feed(&fs::read(tombstone).unwrap());
    let Ok(Some(Message::Request(request))) = reader.message() else { panic!("no request") };
    assert_eq!((request.command.as_str(), request.container_id.as_str()), ("DEL", "container"));

    dir.call("DEL", &[("CNI_IFNAME", "net2")]);
    assert_eq!(dir.tombstones().len(), 2);
}

#[test]
fn without_a_daemon_and_without_a_disk_del_succeeds_and_add_fails() {
    let dir = TempDir::new("read-only");
    let output = dir.call_with_read_only_state("DEL");
    assert_eq!((output.status.code(), text(&output)), (Some(0), String::new()));
    assert_eq!(dir.call_with_read_only_state("ADD").status.code(), Some(1));
}

#[test]
fn a_hostile_container_id_cannot_escape_the_tombstone_directory() {
    let dir = TempDir::new("hostile");
    for id in ["../../../etc/passwd", "/etc/passwd", "..", &"a".repeat(1000), "\n\u{1b}[31m"] {
        assert!(dir.call("DEL", &[("CNI_CONTAINERID", id)]).status.success());
    }
    assert_eq!(dir.tombstones().len(), 5);
    let state: Vec<_> = fs::read_dir(dir.0.join("state")).unwrap().flatten().collect();
    assert_eq!(state.len(), 1);
}

#[test]
fn del_fails_if_the_state_directory_is_not_writable() {
    let dir = TempDir::new("unwritable");
    File::create(dir.0.join("state")).unwrap();
    has_code(&dir.call("DEL", &[]), 11);
}

#[test]
fn a_closed_connection_counts_as_no_answer() {
    for (command, code) in [("ADD", Some(11)), ("STATUS", Some(50)), ("DEL", None)] {
        let dir = TempDir::new(&format!("hangup-{command}"));
        let listener = dir.listen();
        let output = thread::scope(|scope| {
            scope.spawn(|| serve(&listener, None));
            dir.call(command, &[])
        });
        match code {
            Some(code) => has_code(&output, code),
            None => assert!(output.status.success()),
        }
        assert_eq!(dir.tombstones().len(), usize::from(code.is_none()));
    }
}

#[test]
fn a_malformed_reply_counts_as_no_answer() {
    let dir = TempDir::new("garbage");
    let listener = dir.listen();
    let output = thread::scope(|scope| {
        scope.spawn(|| {
            let (mut socket, _) = listener.accept().unwrap();
            assert!(receive(&socket, &mut [0; 4096], &mut None).unwrap() > 0);
            socket.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        });
        dir.call("ADD", &[])
    });
    has_code(&output, 11);
}

#[test]
fn a_call_with_missing_variables_is_rejected() {
    let dir = TempDir::new("lacks");
    for (command, variable, value) in [
        ("", "CNI_IFNAME", "net1"),
        ("REMOVE", "CNI_IFNAME", "net1"),
        ("ADD", "CNI_CONTAINERID", ""),
        ("ADD", "CNI_NETNS", ""),
        ("ADD", "CNI_NETNS", "/nowhere/\"quoted\"\n"),
        ("CHECK", "CNI_IFNAME", ""),
        ("DEL", "CNI_CONTAINERID", ""),
    ] {
        has_code(&dir.call(command, &[(variable, value)]), 4);
    }
}

#[test]
fn an_oversized_configuration_is_rejected_except_by_del() {
    let dir = TempDir::new("long");
    let long = vec![b' '; MAX_FRAME + 1];
    has_code(&dir.call_with("ADD", &[], &long), 7);
    assert!(dir.call_with("DEL", &[], &long).status.success());
    assert_eq!(dir.tombstones().len(), 1);
}

#[test]
fn the_plugin_prints_its_version() {
    let output = Command::new(env!("CARGO_BIN_EXE_patchbay-cni")).arg("--version").output().unwrap();
    assert!(text(&output).starts_with("patchbay-cni "), "{output:?}");
}
