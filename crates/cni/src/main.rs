//! The CNI plugin of Patchbay: passes each call to the daemon of its node and prints the answer.
//!
//! The runtime starts it for every pod, so it is small and does nothing by itself but three things: it answers VERSION, it
//! says that the daemon does not answer, and it writes down durably that a pod is gone.

mod daemon;
mod forward;
mod output;
mod tombstone;

use std::{
    env,
    io::{self, Write as _},
    process::ExitCode,
};

use output::PluginOutput;

fn main() -> ExitCode {
    let PluginOutput { exit, stdout } = match env::args_os().nth(1) {
        Some(argument) if argument == "--version" => {
            PluginOutput::ok(concat!("patchbay-cni ", env!("CARGO_PKG_VERSION"), "\n").into())
        }
        Some(_) => {
            PluginOutput::ok("a CNI plugin: it is run by a container runtime and takes no arguments\n".into())
        }
        None => forward::run(),
    };
    let mut out = io::stdout().lock();
    match out.write_all(&stdout).and_then(|()| out.flush()) {
        Ok(()) => ExitCode::from(exit),
        Err(_) => ExitCode::FAILURE,
    }
}
