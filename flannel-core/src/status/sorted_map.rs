//! The maps in a status.

use std::fmt;

/// A sorted map. With the value type `()` it is a sorted set. A clone is O(1).
#[derive(Clone, PartialEq, Eq)]
pub struct SortedMap<K: Ord, V = ()>(imbl::OrdMap<K, V>);

impl<K: Ord + Clone, V: Clone> SortedMap<K, V> {
    /// The value of `key`, or `None` if it is absent.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.0.get(key)
    }

    /// Whether the map has an entry for `key`.
    pub fn contains_key(&self, key: &K) -> bool {
        self.0.contains_key(key)
    }

    /// The number of entries.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the map has no entries.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All entries, by key.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.0.iter()
    }

    /// All keys, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.0.keys()
    }

    /// All values, by key.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.0.values()
    }

    /// The differences from `older`: the key, the old value and the present value of each changed
    /// entry. An absent value is `None`. O(changes) if one map was made from a clone of the other.
    pub fn changes_since<'a>(
        &'a self,
        older: &'a Self,
    ) -> impl Iterator<Item = (&'a K, Option<&'a V>, Option<&'a V>)>
    where
        V: PartialEq,
    {
        use imbl::ordmap::DiffItem;
        older.0.diff(&self.0).map(|item| match item {
            DiffItem::Add(key, now) => (key, None, Some(now)),
            DiffItem::Update { old: (_, then), new: (key, now) } => (key, Some(then), Some(now)),
            DiffItem::Remove(key, then) => (key, Some(then), None),
        })
    }

    /// Adds or replaces an entry. Returns the previous value, or `None` if the key is new.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        self.0.insert(key, value)
    }

    /// Removes an entry. Returns its value, or `None` if it was absent.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        // `OrdMap::remove` copies shared nodes even if the entry is absent.
        if self.0.contains_key(key) { self.0.remove(key) } else { None }
    }

    /// Removes the entries for whose keys `keep` returns false.
    pub fn retain(&mut self, keep: impl Fn(&K) -> bool) {
        let gone: Vec<K> = self.keys().filter(|key| !keep(key)).cloned().collect();
        gone.iter().for_each(|key| drop(self.remove(key)));
    }
}

impl<K: Ord, V> Default for SortedMap<K, V> {
    fn default() -> Self {
        Self(imbl::OrdMap::new())
    }
}

impl<K: Ord + Clone, V: Clone> FromIterator<(K, V)> for SortedMap<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(all: I) -> Self {
        Self(all.into_iter().collect())
    }
}

impl<K: Ord + fmt::Debug, V: fmt::Debug> fmt::Debug for SortedMap<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.0.iter()).finish()
    }
}
