//! Glob patterns for interface names.
//!
//! `*` matches any number of characters, `?` any one, `[0-9a-f]` one of a set and `[!0-9]` one outside of it. Matching
//! takes at most time proportional to the length of the pattern times the length of the name.

use std::{fmt, str::FromStr};

/// A glob for interface names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IfNamePattern {
    text: String,
    tokens: Vec<GlobToken>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum GlobToken {
    AnyChar,
    AnySequence,
    Exactly(char),
    OneOf { ranges: Vec<(char, char)>, negated: bool },
}

/// Why a text is not a valid pattern.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The pattern is empty.
    #[error("a pattern cannot be empty")]
    Empty,
    /// The pattern is too long.
    #[error("a pattern has at most {max} bytes, this one has {0}", max = IfNamePattern::MAX)]
    TooLong(usize),
    /// A character that no interface name contains.
    #[error("the pattern contains {0:?}, which no interface name contains, so it never matches")]
    Character(char),
    /// `[` without `]`.
    #[error("pattern {0:?} has a '[' without a closing ']'")]
    UnclosedSet(String),
    /// `[]`, or a range that ends before it starts.
    #[error("pattern {0:?} has an empty set")]
    EmptySet(String),
}

impl IfNamePattern {
    /// The maximum length in bytes: more than fifteen sets such as `[0-9a-f]`.
    pub const MAX: usize = 255;

    /// Whether the pattern matches the whole name.
    pub fn matches(&self, name: &str) -> bool {
        let name: Vec<char> = name.chars().collect();
        let (mut at, mut token) = (0, 0);
        // Where to continue if the last `*` has to match one character more. Only the last one matters:
        // a different match of an earlier `*` can never reach further.
        let mut retry: Option<(usize, usize)> = None;
        while at < name.len() {
            match self.tokens.get(token) {
                Some(GlobToken::AnySequence) => {
                    retry = Some((token + 1, at + 1));
                    token += 1;
                }
                Some(one) if one.accepts(name[at]) => {
                    at += 1;
                    token += 1;
                }
                _ => {
                    let Some((next, from)) = retry else { return false };
                    retry = Some((next, from + 1));
                    (token, at) = (next, from);
                }
            }
        }
        self.tokens[token..].iter().all(|rest| *rest == GlobToken::AnySequence)
    }
}

impl GlobToken {
    fn accepts(&self, c: char) -> bool {
        match self {
            Self::AnyChar => true,
            Self::AnySequence => false,
            Self::Exactly(own) => *own == c,
            Self::OneOf { ranges, negated } => {
                ranges.iter().any(|&(from, to)| (from..=to).contains(&c)) != *negated
            }
        }
    }
}

/// Parses the set after a `[`.
fn parse_set(text: &str, chars: &mut std::iter::Peekable<std::str::Chars<'_>>) -> Result<GlobToken, Error> {
    let negated = chars.next_if(|&c| c == '!' || c == '^').is_some();
    let mut ranges = Vec::new();
    loop {
        let from = chars.next().ok_or_else(|| Error::UnclosedSet(text.to_owned()))?;
        if from == ']' {
            break;
        }
        let mut to = from;
        if chars.peek() == Some(&'-') {
            chars.next();
            match chars.next().ok_or_else(|| Error::UnclosedSet(text.to_owned()))? {
                // A hyphen at the end is literal.
                ']' => {
                    ranges.extend([(from, from), ('-', '-')]);
                    break;
                }
                end => to = end,
            }
        }
        if to < from {
            return Err(Error::EmptySet(text.to_owned()));
        }
        ranges.push((from, to));
    }
    if ranges.is_empty() {
        return Err(Error::EmptySet(text.to_owned()));
    }
    Ok(GlobToken::OneOf { ranges, negated })
}

impl FromStr for IfNamePattern {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        if text.is_empty() {
            return Err(Error::Empty);
        }
        if text.len() > Self::MAX {
            return Err(Error::TooLong(text.len()));
        }
        if let Some(c) = text.chars().find(|&c| c == '/' || c.is_whitespace() || c.is_control()) {
            return Err(Error::Character(c));
        }
        let mut tokens = Vec::new();
        let mut chars = text.chars().peekable();
        while let Some(c) = chars.next() {
            tokens.push(match c {
                '*' => GlobToken::AnySequence,
                '?' => GlobToken::AnyChar,
                '[' => parse_set(text, &mut chars)?,
                other => GlobToken::Exactly(other),
            });
        }
        tokens.dedup_by(|a, b| *a == GlobToken::AnySequence && *b == GlobToken::AnySequence);
        Ok(Self { text: text.to_owned(), tokens })
    }
}

impl fmt::Display for IfNamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A comma-separated list of patterns. A name matches if any pattern does.
///
/// ```
/// let patterns: api::IfNamePatterns = "veth*, docker?".parse().unwrap();
/// assert!(patterns.matches("docker0") && !patterns.matches("eth0"));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IfNamePatterns(Vec<IfNamePattern>);

impl IfNamePatterns {
    /// Whether any pattern matches the name.
    pub fn matches(&self, name: &str) -> bool {
        self.0.iter().any(|pattern| pattern.matches(name))
    }
}

impl FromStr for IfNamePatterns {
    type Err = Error;

    /// Empty entries are ignored. An empty list matches nothing.
    fn from_str(text: &str) -> Result<Self, Error> {
        text.split(',').map(str::trim).filter(|one| !one.is_empty()).map(str::parse).collect()
    }
}

impl FromIterator<IfNamePattern> for IfNamePatterns {
    fn from_iter<I: IntoIterator<Item = IfNamePattern>>(patterns: I) -> Self {
        Self(patterns.into_iter().collect())
    }
}

impl fmt::Display for IfNamePatterns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, pattern) in self.0.iter().enumerate() {
            write!(f, "{}{pattern}", if index == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn glob_matches(pattern: &str, name: &str) -> bool {
        pattern.parse::<IfNamePattern>().unwrap().matches(name)
    }

    #[test]
    fn matches_like_a_shell() {
        for (pattern, name, expected) in [
            ("eth0", "eth0", true),
            ("eth0", "eth01", false),
            ("eth0", "xeth0", false),
            ("veth*", "veth", true),
            ("veth*", "veth12ab", true),
            ("veth*", "eth0", false),
            ("*", "", true),
            ("*", "anything", true),
            ("?", "", false),
            ("eth?", "eth1", true),
            ("eth?", "eth10", false),
            ("*.calico", "vxlan.calico", true),
            ("a*b*c", "aXbXbXc", true),
            ("a*b*c", "aXbXbX", false),
            ("**a", "bba", true),
            ("eth?", "ethø", true),
            ("[0-9a-f][0-9a-f]", "3f", true),
            ("[0-9a-f][0-9a-f]", "3g", false),
            ("eth[!0]", "eth1", true),
            ("eth[!0]", "eth0", false),
            ("eth[a-]", "eth-", true),
            ("[0-9]*_h", "12ab_h", true),
        ] {
            assert_eq!(glob_matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn rejects_patterns_that_can_never_match() {
        let parse = |text: &str| text.parse::<IfNamePattern>();
        assert_eq!(parse(""), Err(Error::Empty));
        assert_eq!(parse("a b"), Err(Error::Character(' ')));
        assert_eq!(parse("a/b"), Err(Error::Character('/')));
        assert_eq!(parse("a[b"), Err(Error::UnclosedSet("a[b".into())));
        assert_eq!(parse("a[b-"), Err(Error::UnclosedSet("a[b-".into())));
        assert_eq!(parse("a[]"), Err(Error::EmptySet("a[]".into())));
        assert_eq!(parse("a[z-a]"), Err(Error::EmptySet("a[z-a]".into())));
        assert_eq!(parse(&"a".repeat(256)), Err(Error::TooLong(256)));
    }

    #[test]
    fn a_list_ignores_blanks_and_empty_entries() {
        let list: IfNamePatterns = " veth* ,,docker?, ".parse().unwrap();
        assert_eq!(list.to_string(), "veth*,docker?");
        assert!(list.matches("veth1") && list.matches("docker0") && !list.matches("eth0"));
        assert_eq!("".parse::<IfNamePatterns>().unwrap(), IfNamePatterns::default());
        assert!(!IfNamePatterns::default().matches("eth0"));
    }

    #[test]
    fn many_wildcards_against_a_long_name_take_no_exponential_time() {
        let pattern = "*a".repeat(127) + "b";
        assert!(!glob_matches(&pattern, &"a".repeat(4096)));
    }

    /// The definition of glob matching, in exponential time.
    fn naive_matches(tokens: &[GlobToken], name: &[char]) -> bool {
        match (tokens.split_first(), name.split_first()) {
            (None, rest) => rest.is_none(),
            (Some((GlobToken::AnySequence, tail)), None) => naive_matches(tail, name),
            (Some((GlobToken::AnySequence, tail)), Some((_, rest))) => {
                naive_matches(tail, name) || naive_matches(tokens, rest)
            }
            (Some((one, tail)), Some((&c, rest))) => one.accepts(c) && naive_matches(tail, rest),
            (Some(_), None) => false,
        }
    }

    proptest! {
        #[test]
        fn agrees_with_the_naive_definition(pattern in "[ab*?]{1,8}", name in "[ab]{0,10}") {
            let pattern: IfNamePattern = pattern.parse().unwrap();
            let chars: Vec<char> = name.chars().collect();
            prop_assert_eq!(pattern.matches(&name), naive_matches(&pattern.tokens, &chars));
        }

        #[test]
        fn never_panics(pattern in any::<String>(), name in any::<String>()) {
            if let Ok(patterns) = pattern.parse::<IfNamePatterns>() {
                patterns.matches(&name);
            }
        }
    }
}
