//! The CNI plugin of Patchbay: forwards each call to the daemon of its node and prints the reply.
//!
//! The runtime starts it for every pod, so it is small. Without the daemon it does three things: it answers VERSION, reports
//! that the daemon does not answer, and durably records DEL calls as tombstones.

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
        Some(_) => PluginOutput::ok(
            "patchbay-cni is a CNI plugin: container runtimes start it, and it takes no arguments\n".into(),
        ),
        None => forward::run(),
    };
    let mut out = io::stdout().lock();
    match out.write_all(&stdout).and_then(|()| out.flush()) {
        Ok(()) => ExitCode::from(exit),
        Err(_) => ExitCode::FAILURE,
    }
}
