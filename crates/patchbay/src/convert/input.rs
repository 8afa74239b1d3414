//! The objects of a YAML or JSON stream, as kubectl reads them: documents, and the items of lists.
//!
//! The stream is split into documents before it is parsed, so that a document with a syntax error does not hide the
//! others.

use std::fmt;

use serde_json::{Map, Value};

use super::quote;

/// The most values of one document. Bounds the memory that a document can take.
const MAX_NODES: usize = 20_000_000;

/// Where an object is in the input, each number from 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Position {
    document: usize,
    /// The place in a list, in the list of a list, and so on.
    items: Vec<usize>,
}

/// One object.
#[derive(Debug)]
pub struct InputObject {
    pub position: Position,
    pub api_version: String,
    pub kind: String,
    pub value: Map<String, Value>,
}

/// Why a part of the input is no object.
#[derive(Debug, PartialEq, Eq)]
pub struct InputError {
    position: Position,
    cause: String,
}

impl fmt::Display for InputError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.position, self.cause)
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "document {}", self.document)?;
        self.items.iter().try_for_each(|item| write!(f, ", item {item}"))
    }
}

impl InputObject {
    /// The value at a path, unless it is absent or null.
    pub fn get(&self, path: &[&str]) -> Option<&Value> {
        let (first, rest) = path.split_first()?;
        let found = rest.iter().try_fold(self.value.get(*first)?, |value, key| value.get(key))?;
        (!found.is_null()).then_some(found)
    }

    pub fn text(&self, path: &[&str]) -> Option<&str> {
        self.get(path)?.as_str()
    }

    /// Kind, namespace, name and position, for messages.
    pub fn title(&self) -> String {
        let name = self.text(&["metadata", "name"]).map(quote);
        let namespace = self.text(&["metadata", "namespace"]).map(quote);
        let name = match (namespace, name) {
            (Some(namespace), Some(name)) => format!(" {namespace}/{name}"),
            (None, Some(name)) => format!(" {name}"),
            (_, None) => String::new(),
        };
        format!("{}{name} ({})", quote(&self.kind), self.position)
    }
}

/// All objects of the input. Empty documents are left out.
pub fn objects(text: &str) -> Vec<Result<InputObject, InputError>> {
    let mut all = Vec::new();
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut document = 0;
    for part in documents(text) {
        if part.trim_start().starts_with('{') {
            // kubectl also accepts JSON objects one after the other, without separators.
            for value in serde_json::Deserializer::from_str(part).into_iter::<Value>() {
                document += 1;
                let position = Position { document, items: Vec::new() };
                match value {
                    Ok(value) => flatten(value, position, ("", ""), &mut all),
                    Err(error) => all.push(invalid(position, &format!("invalid JSON: {error}"))),
                }
            }
            continue;
        }
        document += 1;
        let position = Position { document, items: Vec::new() };
        match parse_yaml(part) {
            Ok(Value::Null) => {}
            Ok(value) => flatten(value, position, ("", ""), &mut all),
            Err(cause) => all.push(invalid(position, &format!("invalid YAML: {cause}"))),
        }
    }
    all
}

fn invalid(position: Position, cause: &str) -> Result<InputObject, InputError> {
    let cause = cause.lines().next().unwrap_or_default().chars().filter(|c| !c.is_control()).collect();
    Err(InputError { position, cause })
}

/// Splits at lines that are `---`, with only blanks or a comment behind it. kubectl splits there too.
fn documents(text: &str) -> Vec<&str> {
    let (mut parts, mut start, mut at) = (Vec::new(), 0, 0);
    for line in text.split_inclusive('\n') {
        let rest = line.strip_prefix("---").map(str::trim);
        if rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('#')) {
            parts.push(&text[start..at]);
            start = at + line.len();
        }
        at += line.len();
    }
    parts.push(&text[start..]);
    // Before the first separator there are often comments only.
    let blank = |part: &str| part.lines().all(|line| line.trim().is_empty() || line.starts_with('#'));
    parts.retain(|part| !blank(part));
    parts
}

fn parse_yaml(text: &str) -> Result<Value, String> {
    let budget = serde_saphyr::budget! { max_nodes: MAX_NODES, max_events: 2 * MAX_NODES };
    let options = serde_saphyr::options! { budget: budget, with_snippet: false };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| error.without_snippet().to_string())
}

/// Adds the value, or the items if it is a list. Items of a typed list may lack the version and kind that the list implies.
fn flatten(
    value: Value,
    position: Position,
    implied: (&str, &str),
    all: &mut Vec<Result<InputObject, InputError>>,
) {
    let Value::Object(mut value) = value else {
        return all.push(invalid(position, "expected an object with apiVersion and kind"));
    };
    let text = |key: &str, implied: &str| match value.get(key) {
        Some(Value::String(text)) => text.clone(),
        None | Some(Value::Null) => implied.to_owned(),
        Some(_) => String::new(),
    };
    let (api_version, kind) = (text("apiVersion", implied.0), text("kind", implied.1));
    if api_version.is_empty() || kind.is_empty() {
        return all.push(invalid(position, "expected an object with apiVersion and kind"));
    }
    let Some(item_kind) = kind.strip_suffix("List") else {
        return all.push(Ok(InputObject { position, api_version, kind, value }));
    };
    let implied = if item_kind.is_empty() { ("", "") } else { (api_version.as_str(), item_kind) };
    match value.remove("items") {
        None | Some(Value::Null) => {}
        Some(Value::Array(items)) => {
            for (index, item) in items.into_iter().enumerate() {
                let mut position = position.clone();
                position.items.push(index + 1);
                flatten(item, position, implied, all);
            }
        }
        Some(_) => all.push(invalid(position, "items is not a list")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn titles(text: &str) -> Vec<String> {
        let title = |object: Result<InputObject, InputError>| match object {
            Ok(object) => object.title(),
            Err(error) => format!("error: {error}"),
        };
        objects(text).into_iter().map(title).collect()
    }

    #[test]
    fn a_bad_document_does_not_hide_the_others() {
        let text = "# sample\n---\nkind: A\napiVersion: v1\nmetadata: {name: x}\n--- # next\nkind: [\n---\n\n---\n- 1\n---\n\
                    apiVersion: v1\nkind: B\ndata: |\n  --- not a separator\n";
        let titles = titles(text);
        assert_eq!(titles.len(), 4, "{titles:?}");
        assert_eq!(titles[0], "A x (document 1)");
        assert!(titles[1].starts_with("error: document 2: invalid YAML: "), "{titles:?}");
        assert_eq!(titles[2], "error: document 3: expected an object with apiVersion and kind");
        assert_eq!(titles[3], "B (document 4)");
    }

    #[test]
    fn json_objects_may_follow_each_other() {
        let text =
            "{\"apiVersion\":\"v1\",\"kind\":\"A\"}\n{\"apiVersion\":\"v1\",\"kind\":\"B\"} {\"apiVersion\"";
        let titles = titles(text);
        assert_eq!(titles[..2], ["A (document 1)", "B (document 2)"]);
        assert!(titles[2].starts_with("error: document 3: invalid JSON: "), "{titles:?}");
    }

    #[test]
    fn items_of_lists_are_objects_and_may_omit_what_the_list_implies() {
        let text = "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: A}\n- 7\n- apiVersion: g/v1\n  kind: BList\n  \
                    items: [{metadata: {name: b, namespace: lab}}]\n- {kind: C}\n";
        assert_eq!(
            titles(text),
            [
                "A (document 1, item 1)",
                "error: document 1, item 2: expected an object with apiVersion and kind",
                "B lab/b (document 1, item 3, item 1)",
                "error: document 1, item 4: expected an object with apiVersion and kind",
            ]
        );
    }

    #[test]
    fn anchors_that_multiply_and_deep_nesting_are_errors() {
        let line = |number: usize| {
            let before = number - 1;
            format!("a{number}: &a{number} [*a{before}, *a{before}]\n")
        };
        let bomb = format!("a0: &a0 [x, x]\n{}", (1..40).map(line).collect::<String>());
        let deep = format!("a: {}{}", "[".repeat(100_000), "]".repeat(100_000));
        let deep_json = format!("{{\"a\": {}", "[".repeat(100_000));
        for text in [bomb, deep, deep_json] {
            let titles = titles(&text);
            assert!(
                titles.iter().all(|title| title.starts_with("error: document 1: invalid ")),
                "{titles:?}"
            );
            assert_eq!(titles.len(), 1);
        }
    }
}
