//! Finds the services of a namespace that select a pod, without asking every service.

use std::{collections::HashMap, sync::Arc};

use api::{LabelSelector, selector::LabelSelectorOperator};
use plan::services::Labels;

type ServicesByValue = HashMap<Box<str>, Vec<Arc<str>>>;

/// The selectors of the services of one namespace. A selector that requires a label is found by one of these labels.
#[derive(Default)]
pub struct SelectorIndex {
    selectors: HashMap<Arc<str>, IndexedSelector>,
    /// The services by the key and the value of the label under which they are indexed.
    by_label: HashMap<Box<str>, ServicesByValue>,
    /// The services whose selectors require no single label.
    unindexed: Vec<Arc<str>>,
}

struct IndexedSelector {
    selector: LabelSelector,
    label: Option<(Box<str>, Box<str>)>,
}

impl SelectorIndex {
    /// Sets the selector of a service. Returns whether it differs from the last one.
    pub fn insert(&mut self, service: &Arc<str>, selector: &LabelSelector) -> bool {
        if self.selectors.get(service).is_some_and(|known| known.selector == *selector) {
            return false;
        }
        self.remove(service);
        // The label with the fewest services, so that a label that all services share does not make the index useless.
        let label = required_labels(selector).min_by_key(|(key, value)| self.with_label(key, value).len());
        let label = label.map(|(key, value)| (key.into(), value.into()));
        let services = match label.clone() {
            Some((key, value)) => self.by_label.entry(key).or_default().entry(value).or_default(),
            None => &mut self.unindexed,
        };
        services.push(service.clone());
        let indexed = IndexedSelector { selector: selector.clone(), label };
        self.selectors.insert(service.clone(), indexed);
        true
    }

    /// Removes a service. Returns whether it had a selector.
    pub fn remove(&mut self, service: &str) -> bool {
        let Some(IndexedSelector { label, .. }) = self.selectors.remove(service) else { return false };
        match label {
            Some((key, value)) => {
                let Some(values) = self.by_label.get_mut(&key) else { return true };
                let Some(services) = values.get_mut(&value) else { return true };
                services.retain(|one| **one != *service);
                if services.is_empty() {
                    values.remove(&value);
                }
                if values.is_empty() {
                    self.by_label.remove(&key);
                }
            }
            None => self.unindexed.retain(|one| **one != *service),
        }
        true
    }

    pub fn is_empty(&self) -> bool {
        self.selectors.is_empty()
    }

    /// The services that select a pod with these labels, each once.
    pub fn matching(&self, labels: &Labels) -> Vec<Arc<str>> {
        if self.is_empty() {
            return Vec::new();
        }
        let indexed = labels.iter().flat_map(|(key, value)| self.with_label(key, value));
        let candidates = indexed.chain(&self.unindexed);
        candidates.filter(|service| self.selects(service, labels)).cloned().collect()
    }

    /// The services that are indexed under this label.
    fn with_label(&self, key: &str, value: &str) -> &[Arc<str>] {
        self.by_label.get(key).and_then(|values| values.get(value)).map_or(&[], Vec::as_slice)
    }

    pub fn selects(&self, service: &str, labels: &Labels) -> bool {
        let selector = self.selectors.get(service).map(|known| &known.selector);
        selector.is_some_and(|selector| selector.matches_by(|key| labels.get(key)))
    }
}

/// The labels that every selected pod has. The text `app=db` is an expression with one value.
fn required_labels(selector: &LabelSelector) -> impl Iterator<Item = (&str, &str)> {
    let labels = selector.match_labels.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    let single = selector.match_expressions.iter().filter_map(|requirement| {
        let [value] = requirement.values.as_slice() else { return None };
        (requirement.operator == LabelSelectorOperator::In)
            .then_some((requirement.key.as_str(), value.as_str()))
    });
    labels.chain(single)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selector(text: &str) -> LabelSelector {
        serde_json::from_str(text).unwrap()
    }

    fn matching(index: &SelectorIndex, labels: &[(&str, &str)]) -> Vec<String> {
        let mut found: Vec<String> =
            index.matching(&Labels::new(labels.iter().copied())).iter().map(ToString::to_string).collect();
        found.sort();
        found
    }

    #[test]
    fn a_pod_is_selected_by_every_service_whose_labels_it_has() {
        let mut index = SelectorIndex::default();
        for (name, text) in [
            ("db", r#"{"matchLabels": {"app": "db"}}"#),
            ("db-a", r#"{"matchLabels": {"app": "db", "zone": "a"}}"#),
            ("any", r#"{"matchExpressions": [{"key": "app", "operator": "Exists"}]}"#),
            ("web", r#"{"matchLabels": {"app": "web"}}"#),
        ] {
            assert!(index.insert(&name.into(), &selector(text)));
        }
        assert_eq!(matching(&index, &[("app", "db"), ("zone", "a")]), ["any", "db", "db-a"]);
        assert_eq!(matching(&index, &[("app", "db")]), ["any", "db"]);
        assert_eq!(matching(&index, &[("zone", "a")]), [""; 0]);
        assert!(!index.insert(&"db".into(), &selector(r#"{"matchLabels": {"app": "db"}}"#)), "unchanged");
        assert!(index.insert(&"db".into(), &selector(r#"{"matchLabels": {"app": "web"}}"#)));
        assert_eq!(matching(&index, &[("app", "web")]), ["any", "db", "web"]);
        for name in ["db", "db-a", "any", "web"] {
            assert!(index.remove(name) && !index.remove(name));
        }
        assert!(index.is_empty() && index.by_label.is_empty() && index.unindexed.is_empty());
    }

    #[test]
    fn a_selector_of_an_annotation_is_indexed() {
        let mut index = SelectorIndex::default();
        for (name, text, unindexed) in [
            ("equal", "app=db", 0),
            ("one", "app in (db),tier", 0),
            ("several", "app in (db, web)", 1),
            ("not", "app!=db", 2),
        ] {
            assert!(index.insert(&name.into(), &text.parse().unwrap()));
            assert_eq!(index.unindexed.len(), unindexed, "{name}");
        }
        assert_eq!(matching(&index, &[("app", "db")]), ["equal", "several"]);
        assert_eq!(matching(&index, &[("app", "db"), ("tier", "x")]), ["equal", "one", "several"]);
        assert_eq!(matching(&index, &[("app", "web")]), ["not", "several"]);
    }
}
