//! Formats an error with its causes.

use std::{error::Error, fmt, iter};

/// Displays an error and all its causes on one line.
///
/// Some libraries repeat the cause in their own text. Such a cause is printed once.
///
/// ```
/// let cause = std::io::Error::other("no route");
/// assert_eq!(api::ErrorChain(&cause).to_string(), "no route");
/// ```
#[derive(Debug, Clone, Copy)]
pub struct ErrorChain<'a>(pub &'a (dyn Error + 'static));

impl fmt::Display for ErrorChain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = self.0.to_string();
        let causes = iter::successors(self.0.source(), |&error| error.source());
        for cause in causes.map(ToString::to_string) {
            if !text.ends_with(&cause) {
                text = format!("{text}: {cause}");
            }
        }
        f.write_str(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Layer {
        text: &'static str,
        source: Option<Box<Layer>>,
    }

    fn chain(texts: &[&'static str]) -> String {
        let layers = texts.iter().rev().fold(None, |source, text| Some(Box::new(Layer { text, source })));
        ErrorChain(&*layers.unwrap()).to_string()
    }

    #[test]
    fn every_cause_is_printed_once() {
        for (texts, expected) in [
            (&["refused"][..], "refused"),
            (&["read the Node", "dial", "refused"], "read the Node: dial: refused"),
            (&["read the Node", "dial: refused", "refused"], "read the Node: dial: refused"),
            (&["dial: refused", "dial: refused", "refused"], "dial: refused"),
            (&["read: dial: refused", "dial: refused", "refused", "by host"], "read: dial: refused: by host"),
            (&["read", ""], "read"),
        ] {
            assert_eq!(chain(texts), expected);
        }
    }
}
