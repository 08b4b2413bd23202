//! Makes the kernel equal to what is wanted, whatever state it finds.
//!
//! The one thing to know: the kernel is taken to be what was last put there, except for what is *in doubt*. A
//! doubt about one object is removed by putting the object again, a doubt about more by a snapshot. No message
//! from the kernel is trusted to say how things are, only that they may have changed.
//!
//! No task in here: the driver ([`KernelNetwork`](crate::KernelNetwork)) says when.

mod arrive;
mod doubt;
mod read;
mod tell;
mod write;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use self::arrive::{Coming, GROUP};
pub(crate) use self::write::Gate;
use crate::address::Subnet;
use crate::admit::{Changed, Delta, Peers};
use crate::kernel::{Culprit, Kernel, KernelError, Owned};
use crate::lease::{Lease, LeaseSet, Origin, Subnets, View};
use crate::ledger::Ledger;
use crate::name::LinkName;
use crate::nexthops::{Ids, nexthop};
use crate::roster::Id;
use crate::state::{Change, Key, Object, ObjectKind, Route, State, Via};
use crate::status::Damage;
use crate::tally::Tally;

/// Why an object is to be put or deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// Leases, or answers to what plans ask; and when the leases were there, if it was they.
    Lease(Option<Instant>),
    /// It may not be as we put it: somebody else seems to have done this.
    Doubt(Damage),
}

/// What only a snapshot can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Unread {
    Nothing,
    /// There may be objects that nobody wants; those that are wanted are known.
    Additions,
    Everything,
}

/// How often the kernel was read so far.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Reads {
    pub(crate) done: u64,
    pub(crate) tries: u64,
    /// How long all tries took together.
    pub(crate) took: Duration,
}

/// What failed: why it was tried, and what is to be deleted if it was a deletion.
#[derive(Debug)]
struct Failed {
    cause: Cause,
    deletion: Option<Object>,
}

/// Which answers that plans were given may no longer hold.
#[derive(Debug, Default)]
struct StaleFacts {
    all: bool,
    /// The link that routes are on changed: answers cannot wait.
    urgent: bool,
    under: BTreeSet<Subnet>,
}

pub(crate) struct Reconciler {
    owned: Owned,
    base: State,
    peers: Peers,
    /// The ids of nexthop objects that stand in for the gateways of peers' routes; `None` before the kernel was read,
    /// and if it has no such objects or we are to use none.
    ids: Option<Ids>,
    leases: LeaseSet,
    live: bool,
    /// Wanted objects that are not known to be in place, but for those that the kernel refused.
    put: BTreeMap<Key, Cause>,
    /// Leases of thousands of new peers, not yet looked at.
    coming: Coming,
    /// New peers of which nothing was put yet, and when their leases were there. What they define is not in `put`.
    fresh: VecDeque<(Id, Option<Instant>)>,
    /// Objects of ours that are not wanted and not known to be gone, but for those that the kernel kept.
    gone: BTreeMap<Key, (Object, Cause)>,
    /// What the kernel refused: not tried again until [`Reconciler::retry`] or a snapshot.
    failed: BTreeMap<Key, Failed>,
    /// Who is said to have changed what is in doubt.
    suspects: BTreeMap<Key, Culprit>,
    unread: Unread,
    /// Wanted links that are not there: nothing can be put on them.
    missing_links: BTreeSet<LinkName>,
    reads: Reads,
    /// The objects that peers add to `base`.
    peer_objects: Tally,
    stale_facts: StaleFacts,
    ledger: Ledger,
    kernel_error: Option<KernelError>,
    lookup_error: Option<KernelError>,
}

impl Reconciler {
    /// Wants these blackholes too, whatever the peers; before the first round.
    pub(crate) fn want_blackholes(&mut self, objects: impl Iterator<Item = Object>) {
        self.owned.blackholes = true;
        self.base.extend(objects);
    }

    pub(crate) fn new(owned: Owned, base: State, peers: Peers) -> Self {
        Self {
            owned,
            base,
            peers,
            ids: None,
            leases: LeaseSet::default(),
            live: false,
            put: BTreeMap::new(),
            coming: Coming::default(),
            fresh: VecDeque::new(),
            gone: BTreeMap::new(),
            failed: BTreeMap::new(),
            suspects: BTreeMap::new(),
            unread: Unread::Everything,
            missing_links: BTreeSet::new(),
            reads: Reads::default(),
            peer_objects: Tally::default(),
            stale_facts: StaleFacts::default(),
            ledger: Ledger::default(),
            kernel_error: None,
            lookup_error: None,
        }
    }

    /// Takes in a newer view, which was there at `arrived`. Asks `kernel` what plans ask.
    pub(crate) fn view(&mut self, view: &View, arrived: Instant, kernel: &dyn Kernel) {
        self.take_all_coming(kernel);
        self.peers.make_room(view.leases.len().saturating_sub(self.leases.len()));
        let leases = std::mem::replace(&mut self.leases, view.leases.clone());
        self.live = matches!(view.origin, Origin::Live { .. });
        let mut changes: Vec<_> = view.leases.changes_since(&leases).collect();
        if changes.len() > GROUP && !self.is_unread() {
            let is_new = |change: &mut (Subnets, Option<&Arc<Lease>>)| !self.peers.contains(&change.0);
            let new = changes.extract_if(.., is_new).filter_map(|(_, lease)| lease.cloned());
            self.coming = Coming::new(new.collect(), arrived);
        }
        self.take_in(changes.into_iter(), arrived, kernel);
    }

    fn take_in<'a>(
        &mut self,
        changes: impl Iterator<Item = (Subnets, Option<&'a Arc<Lease>>)>,
        arrived: Instant,
        kernel: &dyn Kernel,
    ) {
        let answers = Answers::new(kernel);
        let changed = self.peers.update(changes, &|a| answers.on_link(a));
        self.take(changed, Some(arrived));
        self.take_unanswered(answers);
    }

    /// Asks anew what plans asked, where the answer may have changed.
    pub(crate) fn recheck_facts(&mut self, kernel: &dyn Kernel) {
        let stale = std::mem::take(&mut self.stale_facts);
        let answers = Answers::new(kernel);
        let everything = stale.all.then_some(None);
        // A subnet stands directly before those inside it.
        let mut last: Option<Subnet> = None;
        let parts = stale.under.into_iter().filter(|under| {
            let new = !stale.all && last.is_none_or(|last| !last.covers(under));
            if new {
                last = Some(*under);
            }
            new
        });
        let parts = parts.map(Some);
        for under in everything.into_iter().chain(parts) {
            let changed = self.peers.recheck(under, &|a| answers.on_link(a));
            self.take(changed, None);
        }
        if stale.all {
            self.lookup_error = None;
        }
        self.take_unanswered(answers);
    }

    /// There is work for [`Reconciler::settle`].
    pub(crate) fn is_unsettled(&self) -> bool {
        self.is_unread() || !self.put.is_empty() || self.has_fresh() || (self.live && !self.gone.is_empty())
    }

    /// There are new peers of which nothing was put yet.
    pub(crate) fn has_fresh(&self) -> bool {
        !self.fresh.is_empty() || self.coming.len() > 0
    }

    /// There is work that begins with a snapshot.
    pub(crate) fn is_unread(&self) -> bool {
        self.unread > Unread::Nothing
    }

    /// What the kernel refused is to be tried again.
    pub(crate) fn retry(&mut self) {
        for (key, Failed { cause, deletion }) in std::mem::take(&mut self.failed) {
            match deletion {
                Some(object) => drop(self.gone.insert(key, (object, cause))),
                None => drop(self.put.entry(key).or_insert(cause)),
            }
        }
    }

    /// The link that an object needs, directly or through its nexthop.
    fn link_of(&self, object: &Object) -> Option<LinkName> {
        match object {
            Object::Route(Route { via: Via::Nexthop(id), .. }) => self.want(&Key::Nexthop(*id))?.link(),
            object => object.link(),
        }
    }

    /// What the kernel could not answer is asked again when it is read again.
    fn take_unanswered(&mut self, answers: Answers<'_>) {
        if let Some(error) = answers.error.into_inner() {
            self.stale_facts.all = true;
            self.lookup_error = Some(error);
        }
    }

    fn want(&self, key: &Key) -> Option<Object> {
        if let Some(object) = self.base.get(key) {
            return Some(object.clone());
        }
        if let Key::Nexthop(id) = key
            && let Some(nexthop) = self.nexthop(*id)
        {
            return Some(nexthop);
        }
        self.peers.object(key).map(|object| self.by_nexthop(&object))
    }

    /// The nexthop object with this id that a peer's route needs.
    fn nexthop(&self, id: u32) -> Option<Object> {
        let dst = self.ids.as_ref()?.dst(id)?;
        Some(nexthop(&self.peers.object(&Key::Route(dst))?, id)?.into())
    }

    /// A peer's object as the kernel is to have it.
    fn by_nexthop(&self, object: &Object) -> Object {
        by_nexthop(object, self.ids.as_ref().and_then(|ids| ids.of(&object.key())))
    }

    fn take(&mut self, changed: Changed, arrived: Option<Instant>) {
        let Changed { deltas, fresh, unput } = changed;
        for Delta { key, before, after } in deltas {
            let old = self.ids.as_ref().and_then(|ids| ids.of(&key));
            let gains = after.as_ref().is_some_and(|object| nexthop(object, 0).is_some());
            let new = match (&mut self.ids, key) {
                (Some(ids), Key::Route(dst)) if gains => ids.assign(dst),
                _ => old,
            };
            let part =
                |object: &Option<Object>, id: Option<u32>| nexthop(object.as_ref()?, id?).map(Object::from);
            if let Some(id) = new {
                self.replace(Key::Nexthop(id), part(&before, old), part(&after, new), arrived);
            }
            self.replace(
                key,
                before.map(|o| by_nexthop(&o, old)),
                after.map(|o| by_nexthop(&o, new)),
                arrived,
            );
        }
        self.take_fresh(fresh, arrived);
        self.take_unput(unput, arrived);
    }

    /// What peers define is to be put when it is their turn.
    fn take_fresh(&mut self, fresh: Vec<Id>, arrived: Option<Instant>) {
        if let Some(ids) = &mut self.ids {
            ids.reserve(fresh.len());
        }
        for id in &fresh {
            for object in self.peers.fresh_objects(*id).unwrap_or_default() {
                let new = |ids: &mut Ids| ids.assign_to(&object);
                if self.ids.as_mut().and_then(new).is_some() {
                    self.peer_objects.add(ObjectKind::Nexthop);
                }
                self.peer_objects.add(object.kind());
            }
        }
        self.fresh.extend(fresh.into_iter().map(|id| (id, arrived)));
    }

    /// What was about to be put is still to be put if it is wanted now.
    fn take_unput(&mut self, unput: Vec<Key>, arrived: Option<Instant>) {
        for key in unput {
            let nexthop = self.ids.as_ref().and_then(|ids| ids.of(&key)).map(Key::Nexthop);
            for key in nexthop.into_iter().chain([key]) {
                if self.want(&key).is_some() {
                    self.put.entry(key).or_insert(Cause::Lease(arrived));
                }
            }
        }
    }

    /// The definition of an object changed, or seems so: a peer that moves keeps its route by the nexthop object.
    fn replace(&mut self, key: Key, before: Option<Object>, after: Option<Object>, arrived: Option<Instant>) {
        if after.is_some() {
            self.peer_objects.add(key.kind());
        }
        if before.is_some() {
            self.peer_objects.remove(key.kind());
        }
        match (before, after) {
            (before, after) if before == after => {}
            (_, Some(_)) => {
                self.gone.remove(&key);
                self.failed.remove(&key);
                self.put.insert(key, Cause::Lease(arrived));
            }
            (Some(before), None) => {
                self.failed.remove(&key);
                self.put.remove(&key);
                self.ledger.clear(&key);
                self.gone.insert(key, (before, Cause::Lease(arrived)));
            }
            (None, None) => {}
        }
    }

    /// The peer that an object is of.
    fn peer_of(&self, key: &Key) -> Option<Subnets> {
        let dst =
            if let Key::Nexthop(id) = key { self.ids.as_ref().and_then(|ids| ids.dst(*id)) } else { None };
        self.peers.definer(&dst.map_or(*key, Key::Route))
    }

    fn puts(&self, filter: impl Fn(&Key) -> bool) -> impl Iterator<Item = Change> {
        let keys = self.put.keys().filter(move |key| filter(key));
        keys.filter_map(|key| self.want(key)).map(Change::Put)
    }
}

/// A kernel's answers to what plans ask. What it cannot answer is asked again soon.
struct Answers<'a> {
    kernel: &'a dyn Kernel,
    error: RefCell<Option<KernelError>>,
}

impl<'a> Answers<'a> {
    fn new(kernel: &'a dyn Kernel) -> Self {
        Self { kernel, error: RefCell::default() }
    }

    fn on_link(&self, address: IpAddr) -> Option<Option<LinkName>> {
        let answer = self.kernel.lookup(address).map_err(|error| self.error.replace(Some(error)));
        Some(answer.ok()?.on_link())
    }
}

/// A peer's object as the kernel is to have it: a route by a gateway becomes one by its nexthop object.
fn by_nexthop(object: &Object, id: Option<u32>) -> Object {
    match (object, id) {
        (Object::Route(route), Some(id)) if nexthop(object, id).is_some() => route.by_nexthop(id).into(),
        _ => object.clone(),
    }
}

/// What peers define as the kernel is to have it: each route by a gateway becomes one by its nexthop object.
fn expand(objects: impl IntoIterator<Item = Object>, ids: Option<&Ids>, mut each: impl FnMut(Object)) {
    for object in objects {
        let id = ids.and_then(|ids| ids.of_route(&object));
        if let Some(nexthop) = id.and_then(|id| nexthop(&object, id)) {
            each(nexthop.into());
        }
        each(by_nexthop(&object, id));
    }
}
