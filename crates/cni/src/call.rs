//! One call: what the runtime says, and who answers it.

use std::{
    env,
    ffi::OsStr,
    fs::File,
    io::{self, Read as _},
    os::fd::AsFd as _,
    path::Path,
};

use wire::socket::{LIMIT, Request};

use crate::{
    answer::{Answer, Code},
    daemon::{self, Error},
    tombstone,
};

/// Answers the call that the environment and the standard input describe.
pub fn answer() -> Answer {
    let mut request = Request {
        plugin: plugin(),
        command: variable("CNI_COMMAND"),
        container_id: variable("CNI_CONTAINERID"),
        netns: variable("CNI_NETNS"),
        ifname: variable("CNI_IFNAME"),
        args: variable("CNI_ARGS"),
        path: variable("CNI_PATH"),
        stdin: Vec::new(),
    };
    if let Err(answer) = complete(&request) {
        return answer;
    }
    if request.command == "VERSION" {
        return Answer::versions();
    }
    // So much alone is more than a frame holds.
    if let Err(error) = io::stdin().lock().take(LIMIT as u64).read_to_end(&mut request.stdin) {
        return Answer::error(Code::Io, &format!("read the configuration: {error}"));
    }
    let frame = match request.encode() {
        Err(_) if request.command == "DEL" => {
            // What is gone is gone whatever the configuration says, so that is left out.
            request.stdin.clear();
            request.encode()
        }
        encoded => encoded,
    };
    let frame = match frame {
        Ok(frame) => frame,
        Err(error) => return Answer::error(Code::InvalidConfig, &format!("the call is too long: {error}")),
    };
    pass(&request, &frame)
}

/// Passes the call to the daemon, and answers for one that is not there.
fn pass(request: &Request, frame: &[u8]) -> Answer {
    let namespace = match namespace(request) {
        Ok(namespace) => namespace,
        Err(answer) => return answer,
    };
    let descriptor = namespace.as_ref().map(|file| file.as_fd());
    match daemon::ask(frame, descriptor) {
        Ok(reply) => Answer { exit: reply.exit, stdout: reply.stdout },
        Err(error) => unanswered(request, frame, &error),
    }
}

fn unanswered(request: &Request, frame: &[u8], error: &Error) -> Answer {
    match request.command.as_str() {
        "DEL" => match tombstone::write(request, frame) {
            Ok(()) => Answer::ok(Vec::new()),
            Err(failure) => {
                let msg = format!("{error}, and that the pod is gone cannot be written down: {failure}");
                Answer::error(Code::TryAgainLater, &msg)
            }
        },
        "STATUS" => Answer::error(Code::NotAvailable, &error.to_string()),
        _ => Answer::error(Code::TryAgainLater, &error.to_string()),
    }
}

/// The pod's network namespace, where the call is about the inside of it.
fn namespace(request: &Request) -> Result<Option<File>, Answer> {
    if !matches!(request.command.as_str(), "ADD" | "CHECK") {
        return Ok(None);
    }
    File::open(&request.netns).map(Some).map_err(|error| {
        let msg = format!("open the network namespace {:?} of CNI_NETNS: {error}", request.netns);
        Answer::error(Code::InvalidEnvironment, &msg)
    })
}

/// Refuses a call that lacks what its command needs.
fn complete(request: &Request) -> Result<(), Answer> {
    let Request { container_id, ifname, netns, .. } = request;
    let needed: &[(&str, &String)] = match request.command.as_str() {
        "ADD" | "CHECK" => &[("CNI_CONTAINERID", container_id), ("CNI_NETNS", netns), ("CNI_IFNAME", ifname)],
        "DEL" => &[("CNI_CONTAINERID", container_id), ("CNI_IFNAME", ifname)],
        "GC" | "STATUS" | "VERSION" => &[],
        other => {
            let msg = format!("CNI_COMMAND is {other:?}, which is no command");
            return Err(Answer::error(Code::InvalidEnvironment, &msg));
        }
    };
    match needed.iter().find(|(_, value)| value.is_empty()) {
        Some((name, _)) => Err(Answer::error(Code::InvalidEnvironment, &format!("{name} is missing"))),
        None => Ok(()),
    }
}

/// The name that the plugin was called by.
fn plugin() -> String {
    let called = env::args_os().next().unwrap_or_default();
    Path::new(&called).file_name().map(OsStr::to_string_lossy).unwrap_or_default().into_owned()
}

fn variable(name: &str) -> String {
    env::var_os(name).unwrap_or_default().to_string_lossy().into_owned()
}
