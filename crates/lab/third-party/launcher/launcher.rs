//! Stands in for the programs of KubeVirt's launcher image. Standard library only, linked statically. What it does depends
//! on the name under which it is started:
//!
//! ```text
//! virt-launcher-monitor …              the guest: print the arguments, wait for SIGTERM, exit with 0
//! virt-tail …                          the log of the serial console: wait for SIGTERM
//! container-disk --no-op               exit with 0: the init container that only fetches the image
//! container-disk --copy-path PATH      offer a disk: create the socket PATH.sock, wait for SIGTERM
//! ```
//!
//! There is no libvirt, no QEMU and no guest. A guest shuts down at once, and never on its own.

use std::{env, fs, io::Read as _, os::unix::net::UnixListener, path::Path, process::exit};

unsafe extern "C" {
    fn signal(number: i32, handler: extern "C" fn(i32)) -> usize;
    fn _exit(code: i32) -> !;
}

extern "C" fn exit_on_signal(_: i32) {
    // SAFETY: `_exit` may be called from a signal handler and does not return.
    unsafe { _exit(0) }
}

fn main() {
    // The kernel ignores SIGTERM for pid 1 without a handler.
    for number in [2, 15] {
        // SAFETY: the handler only calls `_exit`.
        unsafe { signal(number, exit_on_signal) };
    }
    let arguments: Vec<String> = env::args().collect();
    let name = Path::new(&arguments[0]).file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let words: Vec<&str> = arguments.iter().skip(1).map(String::as_str).collect();
    let outcome = match (name, &words[..]) {
        ("virt-launcher-monitor", _) => {
            println!("guest started: {}", words.join(" "));
            wait()
        }
        ("virt-tail", _) => wait(),
        ("container-disk", ["--no-op", ..]) => Ok(()),
        ("container-disk", ["--copy-path", path]) => offer_disk(path),
        _ => Err(format!("{name} {}: not a command of the launcher image", words.join(" "))),
    };
    if let Err(reason) = outcome {
        eprintln!("{name}: {reason}");
        exit(1);
    }
}

/// Blocks on a pipe that is never written to, which uses no CPU time.
fn wait() -> Result<(), String> {
    let (mut reader, _writer) = std::io::pipe().map_err(|e| e.to_string())?;
    reader.read(&mut [0]).map(|_| ()).map_err(|e| e.to_string())
}

fn offer_disk(path: &str) -> Result<(), String> {
    let socket = format!("{path}.sock");
    if let Some(dir) = Path::new(path).parent() {
        fs::create_dir_all(dir).map_err(|e| format!("create {}: {e}", dir.display()))?;
    }
    let _listener = UnixListener::bind(&socket).map_err(|e| format!("listen on {socket}: {e}"))?;
    wait()
}
