//! The configuration that the running daemon of the thick multus uses.
//!
//! The file is in the daemon's container, mostly from a ConfigMap. The daemon is the process that listens at its socket,
//! whatever its name is.
//!
//! The file is read in the mount namespace of the daemon and not through `/proc/<pid>/root`: with `chrootDir` the daemon
//! changes its root to that of the host while a plugin runs.

use std::{
    fs,
    io::{self, ErrorKind},
    os::fd::{AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, connect, getsockopt, recv, socket,
        sockopt::PeerCredentials,
    },
};

use super::files::{read_regular, under};
use crate::host_mounts::HostMounts;

/// The socket in the directory of the daemon.
const SOCKET: &str = "multus.sock";
/// Directories of the socket: of the manifests of multus, and of OpenShift.
const SOCKET_DIRS: [&str; 2] = ["/run/multus", "/run/multus/socket"];
/// Where the daemon has its configuration, unless its command line says otherwise.
const DEFAULT_CONFIG: &str = "/etc/cni/net.d/multus.d/daemon-config.json";
/// The flag of the daemon's command line, with one or two hyphens.
const CONFIG_FLAG: &str = "config";

/// The configuration of a running daemon.
pub struct DaemonFile {
    /// Its path in the container of the daemon.
    pub path: PathBuf,
    /// Its content, or why it cannot be read.
    pub text: io::Result<Vec<u8>>,
}

/// Reads the configuration of the daemon whose socket is in `socket_dir` or in one of the usual directories. None if no daemon
/// listens there.
pub fn read(root: &Path, socket_dir: Option<&Path>) -> io::Result<Option<DaemonFile>> {
    for dir in socket_dir.into_iter().chain(SOCKET_DIRS.map(Path::new)) {
        let Some(connection) = connect_to(&under(root, dir).join(SOCKET))? else { continue };
        let pid = getsockopt(&connection, PeerCredentials)?.pid();
        if pid <= 0 {
            return Err(io::Error::other("its daemon runs in a PID namespace that cannot be seen from here"));
        }
        let process = Path::new("/proc").join(pid.to_string());
        let command = fs::read(process.join("cmdline"));
        let path = command.as_deref().map_or_else(|_| PathBuf::from(DEFAULT_CONFIG), config_path);
        let file = path.clone();
        let text = HostMounts::open(&process.join("ns/mnt"))
            .and_then(|container| container.run_blocking(move || read_regular(&file)))
            .flatten();
        // If the daemon has ended meanwhile, the process may be another one.
        if is_open(&connection) {
            return Ok(Some(DaemonFile { path, text }));
        }
    }
    Ok(None)
}

/// Connects without waiting, and sends nothing. None if nothing listens.
fn connect_to(path: &Path) -> io::Result<Option<OwnedFd>> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let connection = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    match connect(connection.as_raw_fd(), &UnixAddr::new(path)?) {
        Ok(()) => Ok(Some(connection)),
        Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ECONNREFUSED) => Ok(None),
        Err(Errno::EAGAIN) => Err(io::Error::new(ErrorKind::TimedOut, "its daemon accepts no connection")),
        Err(error) => Err(error.into()),
    }
}

/// Whether the other side has not closed the connection.
fn is_open(connection: &OwnedFd) -> bool {
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    matches!(recv(connection.as_raw_fd(), &mut [0], flags), Ok(1..) | Err(Errno::EAGAIN))
}

/// The path of the configuration that a command line names.
fn config_path(command: &[u8]) -> PathBuf {
    let arguments: Vec<&str> = command
        .split(|byte| *byte == 0)
        .map(|argument| str::from_utf8(argument).unwrap_or_default())
        .collect();
    let mut path = None;
    for (at, argument) in arguments.iter().enumerate().skip(1) {
        let Some(flag) = argument.strip_prefix("--").or_else(|| argument.strip_prefix('-')) else { continue };
        match flag.split_once('=') {
            Some((CONFIG_FLAG, value)) => path = Some(value),
            None if flag == CONFIG_FLAG => path = arguments.get(at + 1).copied(),
            _ => {}
        }
    }
    // A relative path is one below the root: container images rarely have another working directory.
    path.filter(|path| !path.is_empty())
        .map_or_else(|| PathBuf::from(DEFAULT_CONFIG), |path| Path::new("/").join(path))
}

#[cfg(test)]
mod tests {
    use std::{
        env,
        io::Read as _,
        os::unix::net::UnixListener,
        process::{Child, Command, Stdio},
    };

    use nix::{
        mount::{MntFlags, MsFlags, mount, umount2},
        unistd::{chroot, pivot_root},
    };

    use super::*;
    use crate::cri::tests::HostRoot;

    /// The root of the process that plays the daemon.
    const ROOT: &str = "PATCHBAY_TEST_DAEMON_ROOT";
    const CONFIG: &str = "etc/cni/net.d/multus.d/daemon-config.json";
    /// The root of the host in the daemon's container.
    const CHROOT_DIR: &str = "hostroot";

    #[test]
    fn the_path_of_the_configuration_is_the_one_of_the_command_line() {
        for (arguments, expected) in [
            (&["multus-daemon"][..], DEFAULT_CONFIG),
            (&["multus-daemon", "-config", "/a.json"], "/a.json"),
            (&["multus-daemon", "--config=/a.json", "-version"], "/a.json"),
            (&["multus-daemon", "-config=/a.json", "--config", "/b.json"], "/b.json"),
            (&["multus-daemon", "--config="], DEFAULT_CONFIG),
            (&["multus-daemon", "--config"], DEFAULT_CONFIG),
            (&["multus-daemon", "-configuration=/a.json"], DEFAULT_CONFIG),
            (&["/--config=/x", "-config=a.json"], "/a.json"),
            (&[], DEFAULT_CONFIG),
        ] {
            let command: Vec<u8> = arguments.iter().flat_map(|a| [a.as_bytes(), &[0]].concat()).collect();
            assert_eq!(config_path(&command), Path::new(expected), "{arguments:?}");
        }
    }

    /// Does what the daemon does while a plugin runs: listens in a container, and has the root of the host.
    #[test]
    #[ignore = "another test runs it in a process of its own"]
    fn listen_in_another_root() {
        let Ok(root) = env::var(ROOT) else { return };
        let container = Path::new(&root).join("container");
        let listener = UnixListener::bind(Path::new(&root).join("run/multus").join(SOCKET)).unwrap();
        // A new root must be a mount point.
        let none = None::<&Path>;
        mount(Some(&container), &container, none, MsFlags::MS_BIND, none).expect("run this as root");
        env::set_current_dir(&container).unwrap();
        pivot_root(".", ".").unwrap();
        umount2(".", MntFlags::MNT_DETACH).unwrap();
        chroot(CHROOT_DIR).unwrap();
        println!("listening");
        // Until the test ends.
        let _ = io::stdin().read(&mut [0]);
        drop(listener);
    }

    /// A process in a container that listens at the socket of multus.
    fn daemon(host: &HostRoot) -> Child {
        let test = "hotplug::config::multus::daemon::tests::listen_in_another_root";
        let mut child = Command::new("unshare")
            .arg("--mount")
            .arg(env::current_exe().unwrap())
            .args(["--exact", test, "--ignored", "--nocapture"])
            .env(ROOT, &host.0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut output, mut byte) = (String::new(), [0]);
        let mut stdout = child.stdout.take().unwrap();
        while !output.contains("listening") {
            assert_eq!(stdout.read(&mut byte).unwrap(), 1, "{output}");
            output.push(char::from(byte[0]));
        }
        child
    }

    #[test]
    fn the_file_of_a_running_daemon_is_read_in_its_container_although_it_has_another_root() {
        let host = HostRoot::new("multus-peer");
        let container = host.0.join("container");
        for dir in ["run/multus", "container/config", "etc/cni/net.d/multus.d"] {
            fs::create_dir_all(host.0.join(dir)).unwrap();
        }
        for root in [container.clone(), container.join(CHROOT_DIR)] {
            fs::create_dir_all(root.join(CONFIG).parent().unwrap()).unwrap();
        }
        fs::write(host.0.join(CONFIG), "of the host").unwrap();
        fs::write(container.join(CHROOT_DIR).join(CONFIG), "of the host").unwrap();
        // Absolute links are resolved in the container, too.
        fs::write(container.join("config/file"), "of the container").unwrap();
        std::os::unix::fs::symlink("/config/file", container.join(CONFIG)).unwrap();
        assert!(read(&host.0, None).unwrap().is_none(), "no daemon");
        let mut child = daemon(&host);
        let found = read(&host.0, Some(Path::new("/run/other"))).unwrap().unwrap();
        assert_eq!(
            (found.path.as_path(), found.text.unwrap()),
            (Path::new(DEFAULT_CONFIG), b"of the container".to_vec())
        );
        fs::remove_file(container.join(CONFIG)).unwrap();
        let error = read(&host.0, None).unwrap().unwrap().text.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(read(&host.0, None).unwrap().is_none(), "a dead daemon leaves its socket behind");
    }
}
