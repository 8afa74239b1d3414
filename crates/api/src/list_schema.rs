//! What the schemas of lists have in common: how long they are at most, and what two writers do to each other in them.

use schemars::Schema;

/// A list that one writer replaces as a whole.
pub fn atomic(most: usize) -> impl Fn(&mut Schema) {
    of_type("atomic", most)
}

/// A list of things that it has once.
pub fn set(most: usize) -> impl Fn(&mut Schema) {
    of_type("set", most)
}

/// A list of things that are told apart by this field.
pub fn map(key: &'static str, most: usize) -> impl Fn(&mut Schema) {
    move |schema| {
        of_type("map", most)(schema);
        schema.insert("x-kubernetes-list-map-keys".to_owned(), vec![key].into());
    }
}

fn of_type(name: &'static str, most: usize) -> impl Fn(&mut Schema) {
    move |schema| {
        schema.insert("maxItems".to_owned(), most.into());
        schema.insert("x-kubernetes-list-type".to_owned(), name.into());
    }
}
