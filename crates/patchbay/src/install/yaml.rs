//! Writes values as readable YAML.
//!
//! The order of keys is fixed, so equal values give equal text. Strings that any YAML version could read as another
//! type are quoted: kubectl still reads YAML 1.1, where `no` is a boolean and `1:30` a number.

use std::fmt::Write;

use serde_json::{Map, Value};

/// Keys that are written first, in this order; all others follow in alphabetical order.
const LEADING_KEYS: [&str; 8] =
    ["apiVersion", "kind", "metadata", "name", "namespace", "image", "command", "args"];

/// Lists of strings up to this width are written on one line.
const FLOW_WIDTH: usize = 80;

/// Writes one document, ending with a line break.
pub fn document(value: &Value) -> String {
    let mut out = String::new();
    match value {
        Value::Object(map) if !map.is_empty() => mapping(&mut out, map, 0, FirstKey::Indented),
        Value::Array(items) if !items.is_empty() => sequence(&mut out, items, 0),
        _ => {
            out.push_str(&scalar(value, 0));
            out.push('\n');
        }
    }
    out
}

/// Where the first key of a mapping is written.
#[derive(Clone, Copy)]
enum FirstKey {
    /// On its own line.
    Indented,
    /// After the `- ` of a list item.
    AfterDash,
}

fn mapping(out: &mut String, map: &Map<String, Value>, depth: usize, first_key: FirstKey) {
    let mut first_key = first_key;
    for (key, value) in sorted_entries(map) {
        if matches!(first_key, FirstKey::Indented) {
            indent(out, depth);
        }
        first_key = FirstKey::Indented;
        out.push_str(&plain_or_quoted(key));
        out.push(':');
        match value {
            Value::Object(inner) if !inner.is_empty() => {
                out.push('\n');
                mapping(out, inner, depth + 1, FirstKey::Indented);
            }
            Value::Array(items) if !items.is_empty() => {
                if let Some(line) = flow(items) {
                    end_line(out, &line);
                } else {
                    out.push('\n');
                    sequence(out, items, depth);
                }
            }
            _ => end_line(out, &scalar(value, depth + 1)),
        }
    }
}

fn sequence(out: &mut String, items: &[Value], depth: usize) {
    for item in items {
        indent(out, depth);
        out.push('-');
        match item {
            Value::Object(map) if !map.is_empty() => {
                out.push(' ');
                mapping(out, map, depth + 1, FirstKey::AfterDash);
            }
            Value::Array(inner) if !inner.is_empty() => {
                out.push('\n');
                sequence(out, inner, depth + 1);
            }
            _ => end_line(out, &scalar(item, depth + 1)),
        }
    }
}

fn end_line(out: &mut String, text: &str) {
    out.push(' ');
    out.push_str(text);
    out.push('\n');
}

fn indent(out: &mut String, depth: usize) {
    out.extend(std::iter::repeat_n("  ", depth));
}

fn sorted_entries(map: &Map<String, Value>) -> Vec<(&String, &Value)> {
    let mut entries: Vec<_> = map.iter().collect();
    entries.sort_by_key(|(key, _)| {
        (LEADING_KEYS.iter().position(|leading| leading == key).unwrap_or(LEADING_KEYS.len()), key.as_str())
    });
    entries
}

/// A short list of strings, on one line.
fn flow(items: &[Value]) -> Option<String> {
    let items: Option<Vec<String>> = items.iter().map(|item| item.as_str().map(plain_or_quoted)).collect();
    let line = format!("[{}]", items?.join(", "));
    (line.len() <= FLOW_WIDTH).then_some(line)
}

/// A key, or an item of a list that is written on one line.
fn plain_or_quoted(text: &str) -> String {
    if is_plain_in_flow(text) { text.to_owned() } else { quoted(text) }
}

/// Writes a scalar, or an empty mapping or list. `depth` is the indentation of block lines.
fn scalar(value: &Value, depth: usize) -> String {
    match value {
        Value::Null => String::from("null"),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) if is_plain_scalar(text) => text.clone(),
        Value::String(text) if is_block(text) => block(text, depth),
        Value::String(text) => quoted(text),
        Value::Array(_) => String::from("[]"),
        Value::Object(_) => String::from("{}"),
    }
}

/// A literal block, indented by `depth`.
fn block(text: &str, depth: usize) -> String {
    let mut out = String::from(if text.ends_with('\n') { "|" } else { "|-" });
    for line in text.trim_end_matches('\n').split('\n') {
        out.push('\n');
        if !line.is_empty() {
            indent(&mut out, depth);
            out.push_str(line);
        }
    }
    out
}

/// Whether a literal block represents this multi-line text exactly.
fn is_block(text: &str) -> bool {
    let body = text.strip_suffix('\n').unwrap_or(text);
    text.contains('\n')
        && !body.starts_with([' ', '\n'])
        && !body.ends_with('\n')
        && !body.is_empty()
        && body.chars().all(|c| c == '\n' || is_printable(c))
        && body.split('\n').all(|line| line.is_empty() || !line.trim().is_empty())
}

/// Whether the text is safe without quotes in a list on one line.
fn is_plain_in_flow(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "_./-".contains(c))
        && !is_reserved(text)
}

/// Whether the text is safe without quotes as the rest of a line.
fn is_plain_scalar(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/')
        && text.chars().all(|c| c == ' ' || c.is_ascii_graphic())
        && !text.contains(": ")
        && !text.contains(" #")
        && !text.ends_with([' ', ':'])
        && !is_reserved(text)
}

/// Whether the text is a boolean or null in YAML 1.1 or 1.2.
fn is_reserved(text: &str) -> bool {
    ["true", "false", "yes", "no", "on", "off", "y", "n", "null"]
        .iter()
        .any(|reserved| text.eq_ignore_ascii_case(reserved))
}

fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            c if is_printable(c) => out.push(c),
            c => {
                // Writing to a String cannot fail.
                let _ = write!(out, "\\U{:08X}", u32::from(c));
            }
        }
    }
    out.push('"');
    out
}

/// Whether the character needs no escape. Line separators other than `\n` are escaped on purpose.
fn is_printable(c: char) -> bool {
    !c.is_control() && !matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn read(text: &str) -> Value {
        serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    #[test]
    fn an_object_reads_like_a_hand_written_manifest() {
        let object = json!({
            "spec": {"ports": [{"targetPort": "webhook", "port": 443, "name": "webhook"}], "empty": {}, "none": []},
            "rules": [{"verbs": ["get", "list"], "apiGroups": [""]}],
            "metadata": {"namespace": "lab", "name": "web", "annotations": {"note": "one\n\ntwo"}},
            "kind": "Service",
            "apiVersion": "v1",
        });
        let text = "\
apiVersion: v1
kind: Service
metadata:
  name: web
  namespace: lab
  annotations:
    note: |-
      one

      two
rules:
- apiGroups: [\"\"]
  verbs: [get, list]
spec:
  empty: {}
  none: []
  ports:
  - name: webhook
    port: 443
    targetPort: webhook
";
        assert_eq!(document(&object), text);
        assert_eq!(read(text), object);
    }

    #[test]
    fn text_that_looks_like_another_type_is_quoted() {
        for text in [
            "", "no", "Yes", "NULL", "1", "1:30", "0x1f", "1e3", ".5", "~", "- a", "*", "10%", "a: b",
            "a #b", "a:", "é",
        ] {
            assert_eq!(document(&json!(text)), format!("\"{text}\"\n"));
        }
    }

    proptest! {
        #[test]
        fn any_text_survives_a_round_trip(text in any::<String>(), lines in "[ -~\n\té\u{85}]{0,40}") {
            for text in [text, lines] {
                let value = json!({"a": {"b": [text, {"c": text}, [text]], "d": text}});
                prop_assert_eq!(read(&document(&value)), value);
            }
        }
    }
}
