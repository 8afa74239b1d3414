//! The labels of every object that Patchbay installs.

use std::collections::BTreeMap;

/// The labels that select the pods of a component. They must never change: the selector of a workload is immutable.
pub fn selector(component: &str) -> BTreeMap<String, String> {
    to_map([("app.kubernetes.io/name", "patchbay"), ("app.kubernetes.io/component", component)])
}

/// The labels of the objects of a component.
pub fn labels(component: &str) -> BTreeMap<String, String> {
    let mut labels = selector(component);
    labels.extend(to_map([
        ("app.kubernetes.io/part-of", "patchbay"),
        ("app.kubernetes.io/version", concat!("v", env!("CARGO_PKG_VERSION"))),
    ]));
    labels
}

fn to_map<const N: usize>(labels: [(&str, &str); N]) -> BTreeMap<String, String> {
    labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}
