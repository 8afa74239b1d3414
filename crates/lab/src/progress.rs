//! Progress lines on stderr.
#![allow(clippy::print_stderr, reason = "the lab is a command line tool; progress goes to stderr")]

/// Prints one line of progress to stderr.
pub fn print_progress(line: impl AsRef<str>) {
    eprintln!("lab: {}", line.as_ref());
}
