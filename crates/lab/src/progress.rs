//! What the lab tells the person who waits.
#![allow(clippy::print_stderr, reason = "the lab is a command line tool; progress goes to stderr")]

/// One line of progress.
pub fn say(line: impl AsRef<str>) {
    eprintln!("lab: {}", line.as_ref());
}
