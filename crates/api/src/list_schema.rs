//! Schema transforms for lists: the maximum length and the list type for server-side apply.

use schemars::Schema;

/// A list that a writer replaces as a whole.
pub fn atomic(max_items: usize) -> impl Fn(&mut Schema) {
    of_type("atomic", max_items)
}

/// A list of unique values.
pub fn set(max_items: usize) -> impl Fn(&mut Schema) {
    of_type("set", max_items)
}

/// A list of objects with this field as unique key.
pub fn map(key: &'static str, max_items: usize) -> impl Fn(&mut Schema) {
    move |schema| {
        of_type("map", max_items)(schema);
        schema.insert("x-kubernetes-list-map-keys".to_owned(), vec![key].into());
    }
}

/// A list of objects with this field as unique key, of any length.
pub fn keyed_map(key: &'static str) -> impl Fn(&mut Schema) {
    move |schema| {
        schema.insert("x-kubernetes-list-type".to_owned(), "map".into());
        schema.insert("x-kubernetes-list-map-keys".to_owned(), vec![key].into());
    }
}

fn of_type(name: &'static str, max_items: usize) -> impl Fn(&mut Schema) {
    move |schema| {
        schema.insert("maxItems".to_owned(), max_items.into());
        schema.insert("x-kubernetes-list-type".to_owned(), name.into());
    }
}
