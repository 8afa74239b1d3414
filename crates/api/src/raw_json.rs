//! JSON text that is kept as it was written, so that an edit changes only what it names.
//!
//! Numbers such as `1e3` or `1.0`, big integers, the order of keys, duplicate keys and white space survive. Parsing does not
//! recurse, so input of any depth is safe.

use std::{fmt, ops::Range};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, MapAccess, Visitor},
};
use serde_json::{Value, value::RawValue};

/// The text of one JSON value, without white space around it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawJson(Box<str>);

/// The text of a JSON object. Keys are found as Go's decoder finds them: in any case, and the last of several wins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawObject {
    text: String,
    /// Each key with the place of its value in the text, in the order of the text.
    entries: Vec<(String, Range<usize>)>,
}

impl RawJson {
    /// Checks that the text is one JSON value.
    pub fn parse(text: &str) -> serde_json::Result<Self> {
        let raw: &RawValue = serde_json::from_str(text)?;
        Ok(Self(raw.get().into()))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The value. Fails if it is nested deeper than 127 levels.
    pub fn to_value(&self) -> serde_json::Result<Value> {
        serde_json::from_str(&self.0)
    }
}

impl From<&Value> for RawJson {
    fn from(value: &Value) -> Self {
        Self(value.to_string().into())
    }
}

impl fmt::Display for RawJson {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl RawObject {
    /// Parses a JSON object. White space around it is dropped.
    pub fn parse(text: &str) -> serde_json::Result<Self> {
        let text = text.trim_matches([' ', '\t', '\n', '\r']);
        let Entries(values) = serde_json::from_str(text)?;
        let entries = values.into_iter().map(|(key, value)| (key, span_of(text, value.get())));
        Ok(Self { entries: entries.collect(), text: text.to_owned() })
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Each key with the text of its value, in the order of the text.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.entries.iter().map(|(key, at)| (key.as_str(), &self.text[at.clone()]))
    }

    /// The text of a key's value.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.find(key).map(|index| &self.text[self.entries[index].1.clone()])
    }

    /// The text of the last value of a key that is not `null`. Go leaves a string as it is when it reads `null`.
    pub fn get_not_null(&self, key: &str) -> Option<&str> {
        self.iter().filter(|(name, text)| same_key(name, key) && *text != "null").last().map(|(_, text)| text)
    }

    /// The place of a key's value in the text.
    pub fn span(&self, key: &str) -> Option<Range<usize>> {
        self.find(key).map(|index| self.entries[index].1.clone())
    }

    /// The value of a key in Rust's types. `null` counts as absent, as it does in Go.
    pub fn read<T: DeserializeOwned>(&self, key: &str) -> serde_json::Result<Option<T>> {
        self.get(key).map_or(Ok(None), serde_json::from_str)
    }

    /// Sets the value of a key in its place, or adds the key at the end. All other bytes stay.
    pub fn set(&mut self, key: &str, value: &RawJson) {
        let value = value.as_str();
        if let Some(index) = self.find(key) {
            let old = self.entries[index].1.clone();
            self.text.replace_range(old.clone(), value);
            for (_, at) in &mut self.entries[index + 1..] {
                *at = at.start - old.len() + value.len()..at.end - old.len() + value.len();
            }
            self.entries[index].1 = old.start..old.start + value.len();
            return;
        }
        let at = self.entries.last().map_or(1, |(_, last)| last.end);
        let comma = if self.entries.is_empty() { "" } else { "," };
        let added = format!("{comma}{}:", Value::from(key));
        self.text.insert_str(at, value);
        self.text.insert_str(at, &added);
        let start = at + added.len();
        self.entries.push((key.to_owned(), start..start + value.len()));
    }

    /// The value. Fails if it is nested deeper than 127 levels.
    pub fn to_value(&self) -> serde_json::Result<Value> {
        serde_json::from_str(&self.text)
    }

    fn find(&self, key: &str) -> Option<usize> {
        self.entries.iter().rposition(|(name, _)| same_key(name, key))
    }
}

impl fmt::Display for RawObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The keys and values of an object, in order and with duplicates.
struct Entries<'a>(Vec<(String, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Entries<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor;

        impl<'de> Visitor<'de> for EntriesVisitor {
            type Value = Entries<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries<'de>, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }

        deserializer.deserialize_map(EntriesVisitor)
    }
}

/// The values of a JSON list, each a part of the text.
pub(crate) fn list_items(text: &str) -> serde_json::Result<Vec<&str>> {
    let items: Vec<&RawValue> = serde_json::from_str(text)?;
    Ok(items.into_iter().map(RawValue::get).collect())
}

/// The place of a part in the text that it was cut from.
pub(crate) fn span_of(text: &str, part: &str) -> Range<usize> {
    let start = part.as_ptr().addr() - text.as_ptr().addr();
    start..start + part.len()
}

/// The message of a JSON error without its position.
pub(crate) fn error_text(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let position = format!(" at line {} column {}", error.line(), error.column());
    text.strip_suffix(&position).map_or(text.clone(), str::to_owned)
}

/// Whether Go's decoder stores a key in the field of this name. It compares letters without case, and two letters outside
/// of ASCII count as ASCII letters.
pub(crate) fn same_key(key: &str, name: &str) -> bool {
    let fold = |c: char| match c {
        'ſ' => 's',
        '\u{212a}' => 'k',
        other => other.to_ascii_lowercase(),
    };
    key.chars().map(fold).eq(name.chars().map(fold))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn values_keep_their_text() {
        let text = r#" { "b" : 1e3,"a":{ "x" : 1.0 } , "B":18446744073709551616, "c\u0041": [ ] } "#;
        let object = RawObject::parse(text).unwrap();
        assert_eq!(object.as_str(), text.trim());
        assert_eq!(object.get("a"), Some(r#"{ "x" : 1.0 }"#));
        assert_eq!(object.get("b"), Some("18446744073709551616"));
        assert_eq!(object.get("cA"), Some("[ ]"));
        assert_eq!(object.get("d"), None);
        let keys: Vec<_> = object.iter().map(|(key, _)| key).collect();
        assert_eq!(keys, ["b", "a", "B", "cA"]);
    }

    #[test]
    fn keys_match_as_in_go() {
        let object = RawObject::parse("{\"Name\u{17f}\":1,\"\u{212a}ind\":2}").unwrap();
        assert_eq!(
            (object.get("names"), object.get("kind"), object.get("kin")),
            (Some("1"), Some("2"), None)
        );
    }

    #[test]
    fn setting_a_key_changes_nothing_else() {
        for (text, key, expected) in [
            ("{}", "a", r#"{"a":[7]}"#),
            ("{ }", "a", r#"{"a":[7] }"#),
            (r#"{ "b" : 1.0 }"#, "a", r#"{ "b" : 1.0,"a":[7] }"#),
            (r#"{"a":1, "b":2}"#, "a", r#"{"a":[7], "b":2}"#),
            (r#"{"a":1, "A": "x" ,"b":2}"#, "a", r#"{"a":1, "A": [7] ,"b":2}"#),
            ("{}", "\"", r#"{"\"":[7]}"#),
        ] {
            let mut object = RawObject::parse(text).unwrap();
            object.set(key, &RawJson::parse(" [7]").unwrap());
            assert_eq!(object.as_str(), expected);
            assert_eq!(object, RawObject::parse(expected).unwrap());
        }
    }

    #[test]
    fn text_that_is_no_object_is_rejected_and_depth_is_harmless() {
        for text in ["", "[]", "7", "{", "{} {}", r#"{"a":}"#, "{'a':1}"] {
            assert!(RawObject::parse(text).is_err(), "{text}");
        }
        let deep = format!(r#"{{"a":{}{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
        let object = RawObject::parse(&deep).unwrap();
        assert!(object.to_value().is_err() && object.get("a").unwrap().len() == 200_000);
    }

    proptest! {
        #[test]
        fn any_text_is_safe(text in r#"[ {}"a-c:,0-9\[\]]{0,40}"#, key in "[a-c]") {
            if let Ok(mut object) = RawObject::parse(&text) {
                prop_assert_eq!(object.as_str(), text.trim());
                let others: Vec<_> = object.iter().filter(|(name, _)| *name != key)
                    .map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
                object.set(&key, &RawJson::from(&Value::from("new")));
                prop_assert_eq!(object.get(&key), Some("\"new\""));
                let again = RawObject::parse(object.as_str()).unwrap();
                prop_assert_eq!(&again, &object);
                let kept: Vec<_> = again.iter().filter(|(name, _)| *name != key)
                    .map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
                prop_assert_eq!(kept, others);
            }
        }
    }
}
