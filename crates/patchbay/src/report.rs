//! What is told about an error: all of it, once.

/// The error and its causes on one line. Some libraries repeat a cause in their own text; it is not told again.
pub fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn every_cause_is_told_once() {
        let error =
            anyhow!("connection refused").context("dial: connection refused").context("read the Node");
        assert_eq!(chain(&error), "read the Node: dial: connection refused");
    }
}
