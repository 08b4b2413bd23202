//! Sets of kernel objects, and the difference between two of them.

use std::collections::BTreeSet;

use super::{Change, Key, Object, ObjectKind, Route};

/// A set of kernel objects, one per key, in the order of creation.
///
/// A lookup costs the logarithm of their number. Collect or extend a set with many objects at once:
/// an insertion of one costs their number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    objects: Vec<Object>,
    /// Keys of the objects that are there with more than they express.
    inexact: BTreeSet<Key>,
}

impl State {
    /// Inserts `object`; returns the one with the same key that it replaces.
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

    /// Marks the object with this key as inexact: in the kernel it has attributes that no
    /// [`Object`] expresses. Examples are a route by another protocol than ours, with a preferred
    /// source, with metrics other than an MTU, or with an end of its lifetime; an address whose
    /// lifetime ends; a device with a TTL or without ARP. If the object is desired, it is put
    /// again.
    pub fn note_inexact(&mut self, key: Key) {
        self.inexact.insert(key);
    }

    /// The object with this key is inexact ([`State::note_inexact`]).
    pub fn is_inexact(&self, key: &Key) -> bool {
        self.inexact.contains(key)
    }

    /// The object that is there with the key of `like` is not inexact.
    pub fn is_exact(&self, like: &Object) -> bool {
        self.inexact.is_empty() || !self.is_inexact(&like.key())
    }

    /// The routes: they are created last.
    pub fn routes(&self) -> impl Iterator<Item = &Route> {
        let first = self.objects.partition_point(|object| !matches!(object, Object::Route(_)));
        self.objects[first..].iter().filter_map(|object| {
            let Object::Route(route) = object else { return None };
            Some(route)
        })
    }

    /// Removes an object.
    pub fn remove(&mut self, key: &Key) -> Option<Object> {
        self.inexact.remove(key);
        self.find(key).ok().map(|there| self.objects.remove(there))
    }

    /// The object with this key.
    pub fn get(&self, key: &Key) -> Option<&Object> {
        self.find(key).ok().map(|there| &self.objects[there])
    }

    fn find(&self, key: &Key) -> Result<usize, usize> {
        self.objects.binary_search_by(|object| object.key().cmp(key))
    }

    /// For finding many objects in about the order of their keys.
    pub fn finder(&self) -> Finder<'_> {
        Finder { state: self, next: [0; ObjectKind::ALL.len()] }
    }

    /// The objects in the order of creation.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Object> {
        self.objects.iter()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// Keeps the objects for which `keep` is true.
    pub fn retain(&mut self, keep: impl FnMut(&Object) -> bool) {
        self.objects.retain(keep);
        let mut inexact = std::mem::take(&mut self.inexact);
        inexact.retain(|key| self.get(key).is_some());
        self.inexact = inexact;
    }

    /// The changes that turn `actual` into `self`: puts in the order of creation, then deletions in
    /// the reverse order, so that a replacement is in place before the object that it replaces
    /// goes.
    ///
    /// Applying them to `actual` yields `self`; the diff of equal states is empty.
    pub fn diff(&self, actual: &Self) -> Vec<Change> {
        let mut changes = Vec::new();
        let mut stale = Vec::new();
        let mut there = actual.iter().peekable();
        for object in self.iter() {
            let key = object.key();
            while let Some(old) = there.next_if(|there| there.key() < key) {
                stale.push(Change::Delete(old.clone()));
            }
            match there.next_if(|there| there.key() == key) {
                Some(old) if old == object && !actual.is_inexact(&key) => {}
                _ => changes.push(Change::Put(object.clone())),
            }
        }
        stale.extend(there.map(|old| Change::Delete(old.clone())));
        changes.extend(stale.into_iter().rev());
        changes
    }
}

/// Finds objects of a state. If the objects of a kind are asked for in nearly their order, it looks
/// at one object each time, else at the logarithm of their number.
pub struct Finder<'a> {
    state: &'a State,
    /// For each kind, the place behind the object that was found last.
    next: [usize; ObjectKind::ALL.len()],
}

impl<'a> Finder<'a> {
    /// The place of the object that has the key of `like`, and the object if it differs.
    pub fn find(&mut self, like: &Object) -> Option<(usize, Option<&'a Object>)> {
        let (objects, next) = (&self.state.objects, &mut self.next[like.kind() as usize]);
        if objects.get(*next) == Some(like) {
            *next += 1;
            return Some((*next - 1, None));
        }
        let place = self.state.find(&like.key()).ok()?;
        *next = place + 1;
        Some((place, Some(&objects[place]).filter(|is| *is != like)))
    }
}

/// Sorts, and keeps the last one of each key.
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

/// Of two objects with one key the later one counts.
impl<O: Into<Object>> FromIterator<O> for State {
    fn from_iter<I: IntoIterator<Item = O>>(objects: I) -> Self {
        let mut state = Self::default();
        state.extend(objects);
        state
    }
}

/// Of two objects with one key the later one counts.
impl<O: Into<Object>> Extend<O> for State {
    fn extend<I: IntoIterator<Item = O>>(&mut self, objects: I) {
        let mut new: Vec<Object> = objects.into_iter().map(Into::into).collect();
        if !self.inexact.is_empty() {
            for object in &new {
                self.inexact.remove(&object.key());
            }
        }
        sort(&mut new);
        // A snapshot adds each table behind the tables before it.
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
    use crate::object::{Addr, LinkName, MacAddr, Neigh, Via};
    use crate::testing::any_object;
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

    fn any_state() -> impl Strategy<Value = State> {
        prop::collection::vec(any_object(), 0..40).prop_map(State::from_iter)
    }

    fn apply(state: &State, changes: &[Change]) -> State {
        let mut state = state.clone();
        for change in changes {
            match change {
                Change::Put(object) => drop(state.insert(object.clone())),
                Change::Delete(object) => drop(state.remove(&object.key())),
            }
        }
        state
    }

    #[test]
    fn a_state_holds_one_object_per_key() {
        let mut state = State::default();
        assert!(state.is_empty());
        let addr = |len| Addr { link: name(1), address: address(1), len };
        let neigh = Neigh { link: name(1), address: address(1), mac: MacAddr::local([1; 6]) };
        state.extend([Object::from(addr(31)), neigh.into()]);
        assert_eq!(state.insert(addr(32)), Some(addr(31).into()));
        assert!(!state.is_empty() && state.len() == 2);
        state.retain(|object| matches!(object, Object::Addr(_)));
        assert_eq!(state, State::from_iter([addr(32)]));
        assert_eq!(state.remove(&Object::from(addr(32)).key()), Some(addr(32).into()));
        assert!(state.is_empty());
    }

    #[test]
    fn what_takes_the_place_of_an_inexact_route_is_exact() {
        let route =
            |n| Route { dst: Subnet::new(address(n), 24).unwrap(), via: Via::Blackhole, mtu: None };
        let (want, key) = (State::from_iter([route(1), route(2)]), Key::Route(route(1).dst));
        let replacements: [fn(&mut State, Route); 4] = [
            |state, route| {
                state.insert(route);
            },
            |state, route| state.extend([route]),
            |state, route| {
                state.remove(&Key::Route(route.dst));
                state.insert(route);
            },
            |state, route| {
                state.retain(|object| object.key() != Key::Route(route.dst));
                state.extend([route]);
            },
        ];
        for replace in replacements {
            let mut state = want.clone();
            state.note_inexact(key);
            state.extend([route(2)]);
            state.retain(|_| true);
            assert!(state.is_inexact(&key) && !state.is_inexact(&Key::Route(route(2).dst)));
            assert_eq!(want.diff(&state), [Change::Put(route(1).into())]);
            replace(&mut state, route(1));
            assert!(!state.is_inexact(&key));
            assert_eq!(want.diff(&state), []);
        }
    }

    proptest! {
        #[test]
        fn of_objects_with_one_key_the_last_one_stays_whatever_came_together(
            parts in prop::collection::vec(prop::collection::vec(any_object(), 0..20), 0..6),
        ) {
            let mut state = State::default();
            let mut model = std::collections::BTreeMap::new();
            for part in parts {
                model.extend(part.iter().map(|object| (object.key(), object.clone())));
                state.extend(part);
                prop_assert!(state.iter().eq(model.values()));
            }
        }

        #[test]
        fn whatever_the_order_of_asking_a_finder_finds_what_is_there(
            state in any_state(),
            asked in prop::collection::vec(any_object(), 0..40),
        ) {
            let mut finder = state.finder();
            // What is there in its order, too, so that one comes behind the other.
            for like in asked.iter().chain(state.iter()).chain(&asked) {
                let place = state.iter().position(|there| there.key() == like.key());
                let differs = state.get(&like.key()).filter(|there| *there != like);
                prop_assert_eq!(finder.find(like), place.map(|place| (place, differs)));
            }
        }

        #[test]
        fn diff_converges(want in any_state(), actual in any_state()) {
            prop_assert_eq!(apply(&actual, &want.diff(&actual)), want);
        }

        #[test]
        fn diff_is_idempotent(want in any_state(), actual in any_state()) {
            prop_assert_eq!(want.diff(&want), vec![]);
            let changes = want.diff(&actual);
            prop_assert_eq!(apply(&apply(&actual, &changes), &changes), want);
        }

        #[test]
        fn diff_is_ordered_and_minimal(want in any_state(), actual in any_state()) {
            let changes = want.diff(&actual);
            let split = changes.iter().position(|c| matches!(c, Change::Delete(_))).unwrap_or(changes.len());
            let keys = |part: &[Change]| part.iter().map(|c| c.object().key()).collect::<Vec<_>>();
            let (puts, deletes) = (keys(&changes[..split]), keys(&changes[split..]));
            prop_assert!(changes[split..].iter().all(|c| matches!(c, Change::Delete(_))));
            prop_assert!(puts.is_sorted() && deletes.iter().rev().is_sorted());
            for change in &changes {
                let (want, actual) = (want.get(&change.object().key()), actual.get(&change.object().key()));
                prop_assert!(want != actual);
            }
        }
    }
}
