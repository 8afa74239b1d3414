//! A map whose clones are cheap, so that a plan can work on a snapshot while the original changes.

use std::{borrow::Borrow, collections::BTreeMap, ops::Index, sync::Arc};

/// An ordered map that copies on write. A clone shares all content. The first change of a map that is shared copies its
/// keys; the values stay shared until they are changed themselves.
#[derive(Debug)]
pub struct SharedMap<K, V>(Arc<BTreeMap<K, Arc<V>>>);

impl<K, V> Default for SharedMap<K, V> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K, V> Clone for SharedMap<K, V> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<K: PartialEq, V: PartialEq> PartialEq for SharedMap<K, V> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0 == other.0
    }
}

impl<K: Ord, V> FromIterator<(K, V)> for SharedMap<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        Self(Arc::new(entries.into_iter().map(|(key, value)| (key, Arc::new(value))).collect()))
    }
}

impl<K: Ord, V, const N: usize> From<[(K, V); N]> for SharedMap<K, V> {
    fn from(entries: [(K, V); N]) -> Self {
        entries.into_iter().collect()
    }
}

impl<K: Ord + Borrow<Q>, V, Q: Ord + ?Sized> Index<&Q> for SharedMap<K, V> {
    type Output = V;

    fn index(&self, key: &Q) -> &V {
        &self.0[key]
    }
}

impl<K, V> SharedMap<K, V> {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.0.iter().map(|(key, value)| (key, &**value))
    }

    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.0.keys()
    }

    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.0.values().map(|value| &**value)
    }
}

impl<K: Ord + Clone, V> SharedMap<K, V> {
    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.0.get(key).map(|value| &**value)
    }

    pub fn contains_key<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.0.contains_key(key)
    }

    /// Inserts an entry and returns whether the key is new.
    pub fn insert(&mut self, key: K, value: V) -> bool {
        Arc::make_mut(&mut self.0).insert(key, Arc::new(value)).is_none()
    }

    /// Removes an entry and returns whether it existed.
    pub fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        // Checked first, so that a miss copies nothing.
        self.0.contains_key(key) && Arc::make_mut(&mut self.0).remove(key).is_some()
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// The value, copied if it is shared.
    pub fn get_mut<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
        V: Clone,
    {
        Arc::make_mut(&mut self.0).get_mut(key).map(Arc::make_mut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_does_not_reach_the_clones() {
        let mut map = SharedMap::from([("a", vec![1]), ("b", vec![2])]);
        let before = map.clone();
        assert!(map.insert("c", vec![3]) && !map.insert("a", vec![7]));
        map.get_mut("b").unwrap().push(4);
        assert!(map.remove("c") && !map.remove("c"));
        assert_eq!(before, SharedMap::from([("a", vec![1]), ("b", vec![2])]));
        assert_eq!(map, SharedMap::from([("a", vec![7]), ("b", vec![2, 4])]));
        assert_eq!((map.keys().count(), map.len()), (2, 2));
    }

    #[test]
    fn a_map_that_is_not_shared_is_changed_in_place() {
        let mut map = SharedMap::from([("a", 1), ("b", 2)]);
        let (content, value): (*const _, *const i32) = (&raw const *map.0, &raw const map["b"]);
        map.insert("a", 3);
        assert!(!map.remove("z"));
        assert_eq!((content, value), (&raw const *map.0, &raw const map["b"]));
        let clone = map.clone();
        assert!(!map.remove("z"));
        assert_eq!(content, &raw const *map.0, "a miss copies nothing");
        map.insert("c", 4);
        assert_ne!(content, &raw const *map.0);
        assert_eq!(&raw const clone["b"], &raw const map["b"], "values stay shared");
    }
}
