//! Sets of kernel objects.

use std::collections::BTreeSet;

use super::{Key, Object};

/// A set of kernel objects, with at most one object for each key, in the order of creation.
///
/// A lookup is O(log n), the insertion of one object O(n). Add many objects with `extend`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ObjectSet {
    objects: Vec<Object>,
    /// See [`ObjectSet::note_inexact`].
    inexact: BTreeSet<Key>,
}

impl ObjectSet {
    /// Inserts `object`, which is exact. Returns the object that it replaces, or `None` if the key
    /// is new.
    pub fn insert(&mut self, object: impl Into<Object>) -> Option<Object> {
        let object = object.into();
        self.inexact.remove(&object.key());
        match self.find(&object.key()) {
            Ok(there) => Some(std::mem::replace(&mut self.objects[there], object)),
            Err(place) => {
                self.objects.insert(place, object);
                None
            }
        }
    }

    /// Marks the object with this key as inexact: in the kernel it has attributes that [`Object`]
    /// cannot express. Examples are a foreign route protocol, a preferred source, a limited
    /// lifetime, and the TTL of a device. If a network desires the object, it puts it again.
    pub fn note_inexact(&mut self, key: Key) {
        self.inexact.insert(key);
    }

    /// Whether the object with this key is [inexact](Self::note_inexact).
    pub fn is_inexact(&self, key: &Key) -> bool {
        self.inexact.contains(key)
    }

    /// Removes the object with this key and returns it, or `None` if it is absent.
    pub fn remove(&mut self, key: &Key) -> Option<Object> {
        self.inexact.remove(key);
        self.find(key).ok().map(|there| self.objects.remove(there))
    }

    /// The object with this key, or `None` if it is absent.
    pub fn get(&self, key: &Key) -> Option<&Object> {
        self.find(key).ok().map(|there| &self.objects[there])
    }

    fn find(&self, key: &Key) -> Result<usize, usize> {
        self.objects.binary_search_by(|object| object.key().cmp(key))
    }

    /// The index of the object with the key of `like`, with the object if it differs from `like`.
    /// `None` if the set has no object with this key. O(1) if the object at the index `near` is
    /// equal to `like`, else O(log n).
    pub fn find_near(&self, like: &Object, near: usize) -> Option<(usize, Option<&Object>)> {
        if self.objects.get(near) == Some(like) {
            return Some((near, None));
        }
        let place = self.find(&like.key()).ok()?;
        Some((place, Some(&self.objects[place]).filter(|is| *is != like)))
    }

    /// The objects in the order of creation.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Object> {
        self.objects.iter()
    }

    /// The number of objects.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Whether the set has no objects.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }
}

/// Sorts the objects, and keeps the last one with each key.
fn sort(objects: &mut Vec<Object>) {
    objects.sort_by(Object::cmp_key);
    objects.dedup_by(|later, earlier| {
        let same = later.cmp_key(earlier).is_eq();
        if same {
            std::mem::swap(later, earlier);
        }
        same
    });
}

/// If two objects have one key, the later one stays.
impl<O: Into<Object>> FromIterator<O> for ObjectSet {
    fn from_iter<I: IntoIterator<Item = O>>(objects: I) -> Self {
        let mut state = Self::default();
        state.extend(objects);
        state
    }
}

/// If two objects have one key, the later one stays.
impl<O: Into<Object>> Extend<O> for ObjectSet {
    fn extend<I: IntoIterator<Item = O>>(&mut self, objects: I) {
        let mut new: Vec<Object> = objects.into_iter().map(Into::into).collect();
        if !self.inexact.is_empty() {
            for object in &new {
                self.inexact.remove(&object.key());
            }
        }
        sort(&mut new);
        // A snapshot adds its tables in order, so that sorting is not needed.
        let behind = match (self.objects.last(), new.first()) {
            (Some(last), Some(first)) => last.cmp_key(first).is_lt(),
            _ => true,
        };
        if self.objects.is_empty() {
            self.objects = new;
        } else {
            self.objects.append(&mut new);
        }
        if !behind {
            sort(&mut self.objects);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::address::Subnet;
    use crate::object::{Addr, Change, LinkName, MacAddr, Neigh, Route, Via};
    use crate::testing::{any_object, diff};
    use proptest::prelude::*;

    fn name(n: u8) -> LinkName {
        format!("flannel.{n}").parse().unwrap()
    }

    fn address(n: u8) -> IpAddr {
        if n < 4 {
            IpAddr::from([10, 0, n, 0])
        } else {
            IpAddr::from([0xfd00, 0, 0, u16::from(n), 0, 0, 0, 0])
        }
    }

    fn any_state() -> impl Strategy<Value = ObjectSet> {
        prop::collection::vec(any_object(), 0..40).prop_map(ObjectSet::from_iter)
    }

    #[test]
    fn a_state_holds_one_object_per_key() {
        let mut state = ObjectSet::default();
        assert!(state.is_empty());
        let addr = |len| Addr { link: name(1), address: address(1), len };
        let neigh = Neigh { link: name(1), address: address(1), mac: MacAddr::local([1; 6]) };
        state.extend([Object::from(addr(31)), neigh.into()]);
        assert_eq!(state.insert(addr(32)), Some(addr(31).into()));
        assert!(!state.is_empty() && state.len() == 2);
        assert_eq!(state.remove(&Object::from(neigh).key()), Some(neigh.into()));
        assert_eq!(state, ObjectSet::from_iter([addr(32)]));
        assert_eq!(state.remove(&Object::from(addr(32)).key()), Some(addr(32).into()));
        assert!(state.is_empty());
    }

    #[test]
    fn the_replacement_of_an_inexact_route_is_exact() {
        let route =
            |n| Route { dst: Subnet::new(address(n), 24).unwrap(), via: Via::Blackhole, mtu: None };
        let want = ObjectSet::from_iter([route(1), route(2)]);
        let key = Key::Route(route(1).dst);
        let replacements: [fn(&mut ObjectSet, Route); 3] = [
            |state, route| {
                state.insert(route);
            },
            |state, route| state.extend([route]),
            |state, route| {
                state.remove(&Key::Route(route.dst));
                state.insert(route);
            },
        ];
        for replace in replacements {
            let mut state = want.clone();
            state.note_inexact(key);
            state.extend([route(2)]);
            assert!(state.is_inexact(&key) && !state.is_inexact(&Key::Route(route(2).dst)));
            assert_eq!(diff(&want, &state), [Change::Put(route(1).into())]);
            replace(&mut state, route(1));
            assert!(!state.is_inexact(&key));
            assert_eq!(diff(&want, &state), []);
        }
    }

    proptest! {
        #[test]
        fn of_objects_with_one_key_the_last_one_stays(
            parts in prop::collection::vec(prop::collection::vec(any_object(), 0..20), 0..6),
        ) {
            let mut state = ObjectSet::default();
            let mut model = std::collections::BTreeMap::new();
            for part in parts {
                model.extend(part.iter().map(|object| (object.key(), object.clone())));
                state.extend(part);
                prop_assert!(state.iter().eq(model.values()));
            }
        }

        #[test]
        fn an_object_is_found_from_any_index(
            state in any_state(),
            asked in prop::collection::vec(any_object(), 0..40),
        ) {
            for (near, like) in asked.iter().chain(state.iter()).enumerate() {
                let place = state.iter().position(|there| there.key() == like.key());
                let differs = state.get(&like.key()).filter(|there| *there != like);
                let expected = place.map(|place| (place, differs));
                for near in place.into_iter().chain([0, near, state.len()]) {
                    prop_assert_eq!(state.find_near(like, near), expected);
                }
            }
        }
    }
}
