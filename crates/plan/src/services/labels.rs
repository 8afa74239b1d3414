//! Labels of pods and slices in little memory.

use std::collections::BTreeMap;

/// The labels of an object, sorted by key. Pods of one workload often have equal labels: share them in an `Arc`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Labels(Box<[(Box<str>, Box<str>)]>);

impl Labels {
    pub fn new<K: Into<Box<str>>, V: Into<Box<str>>>(labels: impl IntoIterator<Item = (K, V)>) -> Self {
        let labels: BTreeMap<Box<str>, Box<str>> =
            labels.into_iter().map(|(key, value)| (key.into(), value.into())).collect();
        Self(labels.into_iter().collect())
    }

    pub fn get(&self, key: &str) -> Option<&str> {
        let at = self.0.binary_search_by(|(one, _)| (**one).cmp(key)).ok()?;
        self.0.get(at).map(|(_, value)| &**value)
    }

    /// The labels in the order of their keys.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (&**key, &**value))
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
