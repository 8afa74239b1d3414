//! The text form of a label selector, as `kubectl -l` takes it.

use std::str::FromStr;

use super::{LabelSelector, LabelSelectorOperator, LabelSelectorRequirement};

/// The maximum length of a selector in bytes.
const MAX_LENGTH: usize = 8192;
/// The maximum number of requirements, and of values of one: those of the type of a CustomResourceDefinition.
const MAX_REQUIREMENTS: usize = 32;
const MAX_VALUES: usize = 64;
/// The maximum length of user text in an error.
const MAX_QUOTE: usize = 64;

/// Why a text is not a label selector.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The text is empty: it would select every object.
    #[error("it is empty and would select every object")]
    Empty,
    /// The text is too long.
    #[error("it has {0} bytes, at most {MAX_LENGTH} are allowed")]
    TooLong(usize),
    /// There are too many requirements.
    #[error("it has {0} requirements, at most {MAX_REQUIREMENTS} are allowed; select by fewer labels")]
    TooManyRequirements(usize),
    /// A requirement has too many values.
    #[error(
        "{key:?} has {values} values, at most {MAX_VALUES} are allowed; give the pods a common label and select by it"
    )]
    TooManyValues {
        /// The key of the label.
        key: String,
        /// The number of different values.
        values: usize,
    },
    /// A requirement of another form.
    #[error("{0:?} is not of the form key=value, key!=value, key in (a,b), key notin (a,b), key or !key")]
    Requirement(String),
    /// An invalid label key.
    #[error("{0:?} is not a valid label key")]
    Key(String),
    /// An invalid label value.
    #[error("{0:?} is not a valid label value")]
    Value(String),
}

impl FromStr for LabelSelector {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        if text.len() > MAX_LENGTH {
            return Err(Error::TooLong(text.len()));
        }
        let match_expressions =
            split(text).map(|part| requirement(part.trim())).collect::<Result<Vec<_>, _>>();
        match match_expressions? {
            list if list.is_empty() => Err(Error::Empty),
            list if list.len() > MAX_REQUIREMENTS => Err(Error::TooManyRequirements(list.len())),
            match_expressions => Ok(Self { match_expressions, ..Self::default() }),
        }
    }
}

/// The parts between commas that are not in parentheses.
fn split(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_usize;
    let outside = move |c: char| {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    };
    let empty = text.trim().is_empty();
    text.split(outside).filter(move |_| !empty)
}

fn requirement(text: &str) -> Result<LabelSelectorRequirement, Error> {
    let of = |key: &str, operator, mut values: Vec<String>| {
        let key = key.trim();
        if !is_key(key) {
            return Err(Error::Key(quote(key)));
        }
        values.sort_unstable();
        values.dedup();
        if values.len() > MAX_VALUES {
            return Err(Error::TooManyValues { key: quote(key), values: values.len() });
        }
        match values.iter().find(|value| !is_value(value)) {
            Some(value) => Err(Error::Value(quote(value))),
            None => Ok(LabelSelectorRequirement { key: key.to_owned(), operator, values }),
        }
    };
    let value = |text: &str| vec![text.trim().to_owned()];
    if let Some((key, rest)) = text.split_once("!=") {
        return of(key, LabelSelectorOperator::NotIn, value(rest));
    }
    if let Some((key, rest)) = text.split_once("==").or_else(|| text.split_once('=')) {
        return of(key, LabelSelectorOperator::In, value(rest));
    }
    if let Some(key) = text.strip_prefix('!') {
        return of(key, LabelSelectorOperator::DoesNotExist, Vec::new());
    }
    let Some((head, list)) = text.split_once('(') else {
        if text.is_empty() || text.contains(char::is_whitespace) {
            return Err(Error::Requirement(quote(text)));
        }
        return of(text, LabelSelectorOperator::Exists, Vec::new());
    };
    let list = list.trim_end().strip_suffix(')').filter(|list| !list.contains(['(', ')']));
    let mut words = head.split_whitespace();
    let operator = match (words.next(), words.next(), words.next(), list) {
        (Some(key), Some("in"), None, Some(list)) => (key, LabelSelectorOperator::In, list),
        (Some(key), Some("notin"), None, Some(list)) => (key, LabelSelectorOperator::NotIn, list),
        _ => return Err(Error::Requirement(quote(text))),
    };
    let (key, operator, list) = operator;
    of(key, operator, list.split(',').map(|one| one.trim().to_owned()).collect())
}

/// A name of at most 63 characters, with an optional DNS subdomain as prefix.
fn is_key(key: &str) -> bool {
    let (prefix, name) = key.rsplit_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    let dns = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
    let prefix_is_valid = |prefix: &str| (1..=253).contains(&prefix.len()) && prefix.chars().all(dns);
    !name.is_empty() && is_value(name) && prefix.is_none_or(prefix_is_valid)
}

fn is_value(value: &str) -> bool {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let end = |c: Option<char>| c.is_none_or(|c| c.is_ascii_alphanumeric());
    value.len() <= 63
        && value.chars().all(inner)
        && end(value.chars().next())
        && end(value.chars().next_back())
}

fn quote(text: &str) -> String {
    text.chars().take(MAX_QUOTE).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn parse(text: &str) -> Result<LabelSelector, Error> {
        text.parse()
    }

    #[test]
    fn selects_what_kubectl_selects() {
        let labels = [("app", "db"), ("tier", "back"), ("empty", ""), ("example.com/role", "main")];
        let labels: BTreeMap<String, String> =
            labels.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        for (text, matches) in [
            ("app=db", true),
            ("app==db", true),
            (" app = db , tier=back ", true),
            ("app=db,tier=front", false),
            ("app!=db", false),
            ("app != web", true),
            ("other!=web", true),
            ("app in (web, db)", true),
            ("app in (web)", false),
            ("app in (web,db),tier in (back)", true),
            ("app notin (web,db)", false),
            ("other notin (x)", true),
            ("tier", true),
            ("!tier", false),
            ("!other,app", true),
            ("empty=", true),
            ("empty in ()", true),
            ("example.com/role=main", true),
        ] {
            assert_eq!(parse(text).map(|selector| selector.matches(&labels)), Ok(matches), "{text}");
        }
    }

    #[test]
    fn refuses_other_texts_with_the_reason() {
        for (text, message) in [
            ("", "it is empty and would select every object"),
            ("  ", "it is empty and would select every object"),
            (",", "is not of the form"),
            ("app=db,", "is not of the form"),
            ("app db", "is not of the form"),
            ("app > 3", "is not of the form"),
            ("app in web", "is not of the form"),
            ("app in (web", "is not of the form"),
            ("app in (web))", "is not of the form"),
            ("app in ((web)", "is not of the form"),
            ("app within (web)", "is not of the form"),
            ("in (web)", "is not of the form"),
            ("=db", "\"\" is not a valid label key"),
            ("a/b/c=db", "\"a/b/c\" is not a valid label key"),
            ("-app=db", "\"-app\" is not a valid label key"),
            ("app=a b", "\"a b\" is not a valid label value"),
            ("app=a=b", "\"a=b\" is not a valid label value"),
            ("app=-", "\"-\" is not a valid label value"),
            ("!", "\"\" is not a valid label key"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(message), "{text}: {error}");
        }
        let long = format!("app={}", "x".repeat(64));
        assert!(matches!(parse(&long), Err(Error::Value(_))));
        assert_eq!(parse(&"a,".repeat(5000)), Err(Error::TooLong(10_000)));
    }

    #[test]
    fn a_selector_has_no_more_requirements_and_values_than_the_type_allows() {
        let values = |count: usize| {
            let values: Vec<String> = (0..count).map(|number| number.to_string()).collect();
            parse(&format!("app in ({})", values.join(",")))
        };
        assert!(values(64).is_ok());
        let error = values(65).unwrap_err();
        assert_eq!(error, Error::TooManyValues { key: "app".to_owned(), values: 65 });
        assert!(error.to_string().contains("give the pods a common label"));
        let doubled = parse(&format!("app in ({}a)", "b,a,".repeat(500))).unwrap();
        assert_eq!(doubled.match_expressions[0].values, ["a", "b"], "sorted, each once");
        let keys =
            |count: usize| parse(&(0..count).map(|key| format!("k{key}")).collect::<Vec<_>>().join(","));
        assert!(keys(32).is_ok());
        assert_eq!(keys(33), Err(Error::TooManyRequirements(33)));
    }
}
