//! Forwards one call of the runtime to the daemon.

use std::{
    env,
    ffi::OsStr,
    fs::File,
    io::{self, Read as _},
    os::fd::AsFd as _,
    path::Path,
    time::Duration,
};

use wire::socket::{MAX_FRAME, Request};

use crate::{
    daemon::{self, Error, RESTART_TIMEOUT},
    output::{ErrorCode, PluginOutput},
    tombstone,
};

/// Runs the call that the environment and standard input describe.
pub fn run() -> PluginOutput {
    let mut request = Request {
        plugin: plugin_name(),
        command: variable("CNI_COMMAND"),
        container_id: variable("CNI_CONTAINERID"),
        netns: variable("CNI_NETNS"),
        ifname: variable("CNI_IFNAME"),
        args: variable("CNI_ARGS"),
        path: variable("CNI_PATH"),
        stdin: Vec::new(),
    };
    if let Err(output) = check_environment(&request) {
        return output;
    }
    if request.command == "VERSION" {
        return PluginOutput::versions();
    }
    // This much input alone exceeds a frame.
    if let Err(error) = io::stdin().lock().take(MAX_FRAME as u64).read_to_end(&mut request.stdin) {
        return PluginOutput::error(ErrorCode::Io, &format!("cannot read the configuration: {error}"));
    }
    let frame = match request.encode() {
        Err(_) if request.command == "DEL" => {
            // DEL does not depend on the configuration.
            request.stdin.clear();
            request.encode()
        }
        encoded => encoded,
    };
    let frame = match frame {
        Ok(frame) => frame,
        Err(error) => {
            return PluginOutput::error(ErrorCode::InvalidConfig, &format!("the call is too large: {error}"));
        }
    };
    forward(&request, &frame)
}

/// Sends the call to the daemon. Without a daemon, DEL writes a tombstone, ADD waits for it, and other commands fail.
fn forward(request: &Request, frame: &[u8]) -> PluginOutput {
    let namespace = match open_namespace(request) {
        Ok(namespace) => namespace,
        Err(output) => return output,
    };
    let descriptor = namespace.as_ref().map(|file| file.as_fd());
    let restart = if request.command == "ADD" { RESTART_TIMEOUT } else { Duration::ZERO };
    match daemon::call(request, frame, descriptor, restart) {
        Ok(reply) => PluginOutput { exit: reply.exit, stdout: reply.stdout },
        Err(error) => daemon_unavailable(request, frame, &error),
    }
}

fn daemon_unavailable(request: &Request, frame: &[u8], error: &Error) -> PluginOutput {
    match request.command.as_str() {
        "DEL" => match tombstone::write(request, frame) {
            Ok(()) => PluginOutput::ok(Vec::new()),
            // A disk without room must not keep pods in Terminating. The kernel deletes the link with the pod's namespace,
            // and the daemon's garbage collection releases the addresses.
            Err(failure) if is_disk_unwritable(&failure) => PluginOutput::ok(Vec::new()),
            Err(failure) => {
                let msg = format!("{error}; cannot record the deletion: {failure}");
                PluginOutput::error(ErrorCode::TryAgainLater, &msg)
            }
        },
        "STATUS" => PluginOutput::error(ErrorCode::NotAvailable, &error.to_string()),
        _ => PluginOutput::error(ErrorCode::TryAgainLater, &error.to_string()),
    }
}

fn is_disk_unwritable(error: &io::Error) -> bool {
    use io::ErrorKind;
    /// A disk that fails.
    const EIO: i32 = 5;
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::ReadOnlyFilesystem)
        || error.raw_os_error() == Some(EIO)
}

/// Opens the pod's network namespace for commands that enter it.
fn open_namespace(request: &Request) -> Result<Option<File>, PluginOutput> {
    if !matches!(request.command.as_str(), "ADD" | "CHECK") {
        return Ok(None);
    }
    File::open(&request.netns).map(Some).map_err(|error| {
        let msg = format!("cannot open the network namespace {:?} of CNI_NETNS: {error}", request.netns);
        PluginOutput::error(ErrorCode::InvalidEnvironment, &msg)
    })
}

/// Checks that the variables that the command needs are set.
fn check_environment(request: &Request) -> Result<(), PluginOutput> {
    let Request { container_id, ifname, netns, .. } = request;
    let needed: &[(&str, &String)] = match request.command.as_str() {
        "ADD" | "CHECK" => &[("CNI_CONTAINERID", container_id), ("CNI_NETNS", netns), ("CNI_IFNAME", ifname)],
        "DEL" => &[("CNI_CONTAINERID", container_id), ("CNI_IFNAME", ifname)],
        "GC" | "STATUS" | "VERSION" => &[],
        other => {
            let msg = format!("unknown CNI_COMMAND {other:?}");
            return Err(PluginOutput::error(ErrorCode::InvalidEnvironment, &msg));
        }
    };
    match needed.iter().find(|(_, value)| value.is_empty()) {
        Some((name, _)) => {
            Err(PluginOutput::error(ErrorCode::InvalidEnvironment, &format!("{name} is missing")))
        }
        None => Ok(()),
    }
}

/// The name under which the plugin was started.
fn plugin_name() -> String {
    let program = env::args_os().next().unwrap_or_default();
    Path::new(&program).file_name().map(OsStr::to_string_lossy).unwrap_or_default().into_owned()
}

fn variable(name: &str) -> String {
    env::var_os(name).unwrap_or_default().to_string_lossy().into_owned()
}
