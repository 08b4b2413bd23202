//! What a status lists. The one thing to know: a copy shares what did not change with the original,
//! so a status is published, compared and kept at the cost of what changed.

use std::fmt;
use std::ops::Index;

/// A sorted list of what there is to say, by what it is said of. Cloning is O(1), comparing two
/// versions of one listing costs what changed.
#[derive(Clone, PartialEq, Eq)]
pub struct Listing<K: Ord, V = ()>(imbl::OrdMap<K, V>);

impl<K: Ord + Clone, V: Clone> Listing<K, V> {
    /// What is said of `key`.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.0.get(key)
    }

    /// Something is said of `key`.
    pub fn contains_key(&self, key: &K) -> bool {
        self.0.contains_key(key)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All, sorted.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.0.iter()
    }

    /// What something is said of, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.0.keys()
    }

    /// All that is said.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.0.values()
    }

    /// What is different from `older`: `(key, then, now)`, with `None` where nothing was or is
    /// said. Costs what changed, if one was made from a clone of the other.
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

    /// Adds an entry; the value that the key had before.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        self.0.insert(key, value)
    }

    /// Removes an entry: its value, if there was one.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        // Without a look first a copy would be made of what stays.
        if self.0.contains_key(key) { self.0.remove(key) } else { None }
    }

    /// Removes every entry whose key `keep` refuses.
    pub fn retain(&mut self, keep: impl Fn(&K) -> bool) {
        let gone: Vec<K> = self.keys().filter(|key| !keep(key)).cloned().collect();
        gone.iter().for_each(|key| drop(self.remove(key)));
    }
}

impl<K: Ord, V> Default for Listing<K, V> {
    fn default() -> Self {
        Self(imbl::OrdMap::new())
    }
}

impl<K: Ord + Clone, V: Clone> FromIterator<(K, V)> for Listing<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(all: I) -> Self {
        Self(all.into_iter().collect())
    }
}

impl<K: Ord + fmt::Debug, V: fmt::Debug> fmt::Debug for Listing<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.0.iter()).finish()
    }
}

/// # Panics
/// Nothing is said of the key.
impl<K: Ord + Clone, V: Clone> Index<&K> for Listing<K, V> {
    type Output = V;

    fn index(&self, key: &K) -> &V {
        self.get(key).expect("the caller knows that the key is listed")
    }
}
