//! Makes the kernel equal to what is wanted, whatever state it finds.
//!
//! The one thing to know: the kernel is taken to be what was last put there, except for what is *in doubt*. A
//! doubt about one object is removed by putting the object again, a doubt about more by a snapshot. No message
//! from the kernel is trusted to say how things are, only that they may have changed.
//!
//! No clock and no task in here: the driver ([`KernelNetwork`](crate::KernelNetwork)) says when.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Mutex;
use std::time::SystemTime;

use crate::address::Subnet;
use crate::admit::{Delta, Peers};
use crate::kernel::{Doubts, Kernel, KernelError, Owned, Report};
use crate::lease::{LeaseSet, Origin, View};
use crate::name::LinkName;
use crate::network::{Failure, Status};
use crate::nexthops::{Ids, NexthopBlock, nexthop};
use crate::state::{Change, Key, Object, Route, State, Via, diff};

/// How many changes are handed to the kernel at once. More gains nothing (the kernel works at its own pace), and a
/// stop waits for at most one batch.
const BATCH: usize = 128;

/// Why an object is to be put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// A lease defined it anew.
    Lease,
    /// It may not be as we put it.
    Doubt,
}

/// Which answers that plans were given may no longer hold.
#[derive(Debug, Default)]
struct StaleFacts {
    all: bool,
    /// The link that routes are on changed: answers cannot wait.
    urgent: bool,
    under: BTreeSet<Subnet>,
}

/// Lets batches through until it is closed; closing waits for the batch in hand.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    closed: Mutex<bool>,
}

impl Gate {
    /// Does `work` unless the gate is closed; `None` if it is.
    fn pass<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        let closed = self.closed.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        (!*closed).then(work)
    }

    pub(crate) fn close(&self) {
        *self.closed.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = true;
    }
}

/// The gate was closed: leave everything as it is.
#[derive(Debug)]
pub(crate) struct Closed;

pub(crate) struct Reconciler {
    owned: Owned,
    base: State,
    peers: Peers,
    /// The ids of nexthop objects that stand in for the gateways of peers' routes; `None` before the kernel was read,
    /// and if it has no such objects or we are to use none.
    ids: Option<Ids>,
    leases: LeaseSet,
    live: bool,
    /// Wanted objects that are not known to be in place.
    put: BTreeMap<Key, Cause>,
    /// Objects of ours that are not wanted and not known to be gone.
    gone: BTreeMap<Key, Object>,
    /// Everything is in doubt: only a snapshot helps.
    unread: bool,
    /// Wanted links that are not there: nothing can be put on them.
    missing_links: BTreeSet<LinkName>,
    /// Something failed that did not fail before.
    newly_failing: bool,
    /// How many times the kernel was read.
    reads: u64,
    /// How many objects peers add to `base`.
    peer_objects: usize,
    stale_facts: StaleFacts,
    failing: BTreeMap<Key, Failure>,
    kernel_error: Option<KernelError>,
    lookup_error: Option<KernelError>,
    applied: u64,
    repaired: u64,
}

impl Reconciler {
    pub(crate) fn new(owned: Owned, base: State, peers: Peers) -> Self {
        Self {
            owned,
            base,
            peers,
            ids: None,
            leases: LeaseSet::default(),
            live: false,
            put: BTreeMap::new(),
            gone: BTreeMap::new(),
            unread: true,
            missing_links: BTreeSet::new(),
            newly_failing: false,
            reads: 0,
            peer_objects: 0,
            stale_facts: StaleFacts::default(),
            failing: BTreeMap::new(),
            kernel_error: None,
            lookup_error: None,
            applied: 0,
            repaired: 0,
        }
    }

    /// Takes in a newer view. Asks `kernel` what plans ask.
    pub(crate) fn view(&mut self, view: &View, kernel: &dyn Kernel) {
        let answers = Answers::new(kernel);
        let deltas = self.peers.update(view.leases.changes_since(&self.leases), &|a| answers.on_link(a));
        self.leases = view.leases.clone();
        self.live = matches!(view.origin, Origin::Live { .. });
        self.take(deltas);
        self.take_unanswered(answers);
    }

    /// Asks anew what plans asked, where the answer may have changed.
    pub(crate) fn recheck_facts(&mut self, kernel: &dyn Kernel) {
        let stale = std::mem::take(&mut self.stale_facts);
        let answers = Answers::new(kernel);
        let everything = stale.all.then_some(None);
        let parts = stale.under.into_iter().filter(|_| !stale.all).map(Some);
        for under in everything.into_iter().chain(parts) {
            let deltas = self.peers.recheck(under, &|a| answers.on_link(a));
            self.take(deltas);
        }
        if stale.all {
            self.lookup_error = None;
        }
        self.take_unanswered(answers);
    }

    pub(crate) fn has_urgent_facts(&self) -> bool {
        self.stale_facts.urgent
    }

    pub(crate) fn has_stale_facts(&self) -> bool {
        self.stale_facts.all || !self.stale_facts.under.is_empty()
    }

    /// Takes in news from the kernel.
    pub(crate) fn doubt(&mut self, doubts: &Doubts) {
        match doubts {
            Doubts::Everything => {
                self.unread = true;
                self.stale_facts.all = true;
            }
            Doubts::Link(name) => {
                let ours = self.owned.links.contains(name) || self.owned.routes_on.contains(name);
                self.unread |= ours;
                self.stale_facts.urgent |= self.owned.routes_on.contains(name);
                self.stale_facts.all |= self.stale_facts.urgent || self.peers.relies_on(*name);
            }
            Doubts::Objects(reports) => reports.iter().for_each(|report| self.doubt_object(report)),
        }
    }

    fn doubt_object(&mut self, report: &Report) {
        let key = match report {
            Report::Now(object) => object.key(),
            Report::Other(key) | Report::Gone(key) => *key,
        };
        let concerned = self.owned.concerns(&key);
        if let Key::Route(dst) = key
            && !concerned
            && self.peers.asks_under(dst)
        {
            self.stale_facts.under.insert(dst);
        }
        match (self.want(&key), report) {
            // Says what we want to hear: no reason for doubt (and none for trust: a doubt stays one).
            (Some(want), Report::Now(object)) if want == *object => {}
            // Its route went with it, without a word.
            (Some(Object::Nexthop(nexthop)), Report::Gone(_)) => {
                match self.ids.as_ref().and_then(|ids| ids.dst(nexthop.id)) {
                    Some(dst) => {
                        self.put.entry(key).or_insert(Cause::Doubt);
                        self.put.entry(Key::Route(dst)).or_insert(Cause::Doubt);
                    }
                    // One that a plan defined: which routes go by it is not known here.
                    None => self.unread = true,
                }
            }
            (Some(_), _) => {
                self.put.entry(key).or_insert(Cause::Doubt);
            }
            // Ours to remove, if it is one that a snapshot shows as ours.
            (None, Report::Now(object)) => self.unread |= concerned && self.owned.may_own(object),
            (None, _) => {}
        }
    }

    /// There is work for [`Reconciler::settle`].
    pub(crate) fn is_unsettled(&self) -> bool {
        self.unread || !self.put.is_empty() || (self.live && !self.gone.is_empty())
    }

    /// Brings the kernel to what is wanted, as far as it lets us; what it refuses is in the status. Blocks.
    ///
    /// # Errors
    /// [`Closed`]: the gate was closed before everything was done.
    pub(crate) fn settle(&mut self, kernel: &dyn Kernel, gate: &Gate) -> Result<(), Closed> {
        let mut links_put = BTreeSet::new();
        // A link that is put may take all that is on it with it, so the kernel is read again after each.
        while self.is_unsettled() {
            if self.unread && !self.read(kernel, &links_put) {
                // What leases brought needs no look at the kernel first.
                let by_lease = |key: &Key| self.put.get(key) == Some(&Cause::Lease);
                let changes: Vec<Change> = self.puts(by_lease).collect();
                return self.apply(kernel, gate, &changes);
            }
            let links: Vec<Change> = self.puts(|key| matches!(key, Key::Link(_))).collect();
            if links.is_empty() {
                break;
            }
            self.apply(kernel, gate, &links)?;
            let taken = links.iter().map(|change| change.object().key());
            let taken: Vec<Key> = taken.filter(|key| !self.failing.contains_key(key)).collect();
            for key in &taken {
                if let Key::Link(name) = key {
                    self.missing_links.remove(name);
                }
            }
            self.unread |= !taken.is_empty();
            links_put.extend(taken);
        }
        // Without its link nothing can be put; one failure in the status says more than ten thousand.
        let missing = |link: LinkName| self.missing_links.contains(&link);
        let on_missing_link = |key: &Key| self.want(key).and_then(|o| self.link_of(&o)).is_some_and(missing);
        let mut changes: Vec<Change> = self.puts(|key| !on_missing_link(key)).collect();
        if self.live {
            changes.extend(self.gone.values().rev().cloned().map(Change::Delete));
        }
        self.apply(kernel, gate, &changes)
    }

    /// Something failed that did not fail when this was last asked.
    pub(crate) fn take_newly_failing(&mut self) -> bool {
        std::mem::take(&mut self.newly_failing)
    }

    /// How many times the kernel was read so far.
    pub(crate) fn reads(&self) -> u64 {
        self.reads
    }

    pub(crate) fn is_failing(&self) -> bool {
        !self.failing.is_empty() || self.kernel_error.is_some() || self.lookup_error.is_some()
    }

    pub(crate) fn status(&self) -> Status {
        Status {
            in_sync: self.live && !self.is_unsettled() && !self.is_failing(),
            live: self.live,
            peers: self.peers.believed(),
            objects: self.base.len() + self.peer_objects,
            disbelieved: self.peers.disbelieved().clone(),
            failing: self.failing.clone(),
            kernel_error: self.kernel_error.clone().or_else(|| self.lookup_error.clone()),
            remarks: self.peers.remarks().collect(),
            applied: self.applied,
            repaired: self.repaired,
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
        self.peers.object(key).map(|object| self.by_nexthop(object))
    }

    /// All that is wanted, in the order of keys.
    fn wanted(&self) -> impl Iterator<Item = Object> {
        let ids = self.ids.iter().flat_map(Ids::iter);
        let nexthops = ids.filter_map(|(id, _)| self.nexthop(id));
        let peers = merge(nexthops, self.peers.objects().map(|object| self.by_nexthop(object)));
        merge(self.base.iter().cloned(), peers)
    }

    /// The nexthop object with this id that a peer's route needs.
    fn nexthop(&self, id: u32) -> Option<Object> {
        let dst = self.ids.as_ref()?.dst(id)?;
        Some(nexthop(self.peers.object(&Key::Route(dst))?, id)?.into())
    }

    /// A peer's object as the kernel is to have it.
    fn by_nexthop(&self, object: &Object) -> Object {
        by_nexthop(object, self.ids.as_ref().and_then(|ids| ids.of(&object.key())))
    }

    fn take(&mut self, deltas: Vec<Delta>) {
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
                self.replace(Key::Nexthop(id), part(&before, old), part(&after, new));
            }
            self.replace(key, before.map(|o| by_nexthop(&o, old)), after.map(|o| by_nexthop(&o, new)));
        }
    }

    /// The definition of an object changed, or seems so: a peer that moves keeps its route by the nexthop object.
    fn replace(&mut self, key: Key, before: Option<Object>, after: Option<Object>) {
        self.peer_objects += usize::from(after.is_some());
        self.peer_objects -= usize::from(before.is_some());
        match (before, after) {
            (before, after) if before == after => {}
            (_, Some(_)) => {
                self.gone.remove(&key);
                self.put.insert(key, Cause::Lease);
            }
            (Some(before), None) => {
                self.put.remove(&key);
                self.failing.remove(&key);
                self.gone.insert(key, before);
            }
            (None, None) => {}
        }
    }

    fn puts(&self, filter: impl Fn(&Key) -> bool) -> impl Iterator<Item = Change> {
        let keys = self.put.keys().filter(move |key| filter(key));
        keys.filter_map(|key| self.want(key)).map(Change::Put)
    }

    /// Chooses the ids of nexthop objects, once: before the first snapshot, which depends on them.
    fn choose_ids(&mut self, kernel: &dyn Kernel) -> Result<(), KernelError> {
        if self.reads > 0 {
            return Ok(());
        }
        let (block, there) = NexthopBlock::choose(kernel, &self.owned)?;
        self.owned.nexthops = block;
        self.ids = block.filter(|_| there.usable).map(Ids::new);
        Ok(())
    }

    /// Lets destinations keep the ids that they have in the kernel, and at first gives ids to those that have none.
    fn adopt_ids(&mut self, actual: &State) {
        let Some(ids) = &mut self.ids else { return };
        let (first, peers) = (self.reads == 0, &self.peers);
        let wanted = |dst: &Subnet| peers.object(&Key::Route(*dst)).is_some_and(|o| nexthop(o, 0).is_some());
        ids.adopt(actual, |dst| first || !wanted(dst));
        if !first {
            return;
        }
        for object in self.peers.objects().filter(|object| nexthop(object, 0).is_some()) {
            if let Object::Route(route) = object {
                self.peer_objects += usize::from(ids.assign(route.dst).is_some());
            }
        }
    }

    /// Forgets the ids of destinations that are neither wanted nor waiting to be deleted.
    fn release_ids(&mut self) {
        let Some(ids) = &mut self.ids else { return };
        let (peers, gone) = (&self.peers, &self.gone);
        ids.retain(|id, dst| {
            let route = Key::Route(*dst);
            let wanted = peers.object(&route).is_some_and(|object| nexthop(object, id).is_some());
            wanted || gone.contains_key(&route) || gone.contains_key(&Key::Nexthop(id))
        });
    }

    /// Reads the kernel and finds out what is to be done; false if it could not be read.
    ///
    /// A link in `links_put` that still is not as wanted is one that the kernel keeps as it is: say so
    /// instead of putting it for ever.
    fn read(&mut self, kernel: &dyn Kernel, links_put: &BTreeSet<Key>) -> bool {
        let actual = match self.choose_ids(kernel).and_then(|()| kernel.snapshot(&self.owned)) {
            Ok(actual) => actual,
            Err(error) => {
                self.kernel_error = Some(error);
                return false;
            }
        };
        self.kernel_error = None;
        self.unread = false;
        let absent = |object: &Object| match object {
            Object::Link(link) => actual.get(&object.key()).is_none().then_some(link.name),
            _ => None,
        };
        self.missing_links = self.base.iter().filter_map(absent).collect();
        self.adopt_ids(&actual);
        let cause = if self.reads == 0 { Cause::Lease } else { Cause::Doubt };
        self.reads += 1;
        let before = std::mem::take(&mut self.put);
        self.gone.clear();
        for change in diff(self.wanted(), &actual) {
            let key = change.object().key();
            match change {
                Change::Put(object) if links_put.contains(&key) => {
                    let now = actual.get(&key).map_or_else(|| "absent".to_owned(), ToString::to_string);
                    let detail = format!("the kernel did not take it over: it is now {now}");
                    let error = KernelError::explained(EAGAIN, detail);
                    self.fail(&Change::Put(object), error);
                }
                Change::Put(_) => {
                    self.put.insert(key, before.get(&key).copied().unwrap_or(cause));
                }
                Change::Delete(object) => {
                    self.gone.insert(key, object);
                }
            }
        }
        self.release_ids();
        let (put, gone) = (&self.put, &self.gone);
        self.failing
            .retain(|key, _| put.contains_key(key) || gone.contains_key(key) || links_put.contains(key));
        true
    }

    /// Applies changes batch by batch.
    fn apply(&mut self, kernel: &dyn Kernel, gate: &Gate, changes: &[Change]) -> Result<(), Closed> {
        for batch in changes.chunks(BATCH) {
            let results = gate.pass(|| kernel.apply(&self.owned, batch)).ok_or(Closed)?;
            for (change, result) in batch.iter().zip(results) {
                self.record(change, result);
            }
        }
        Ok(())
    }

    fn record(&mut self, change: &Change, result: Result<(), KernelError>) {
        let key = change.object().key();
        let cause = self.put.remove(&key);
        match result {
            Ok(()) => {
                self.failing.remove(&key);
                self.gone.remove(&key);
                if let (Change::Delete(_), Key::Nexthop(id), Some(ids)) = (change, key, &mut self.ids) {
                    ids.release(id);
                }
                match cause {
                    Some(Cause::Doubt) => self.repaired += 1,
                    _ => self.applied += 1,
                }
            }
            Err(error) => self.fail(change, error),
        }
    }

    fn fail(&mut self, change: &Change, error: KernelError) {
        let key = change.object().key();
        self.newly_failing |= !self.failing.contains_key(&key);
        let failure = self.failing.entry(key).or_insert_with(|| {
            tracing::debug!(%change, %error, "the kernel refused");
            Failure { change: String::new(), error: error.clone(), since: SystemTime::now(), tries: 0 }
        });
        failure.change = change.to_string();
        failure.error = error;
        failure.tries = failure.tries.saturating_add(1);
    }
}

const EAGAIN: i32 = 11;

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

/// Merges two sequences that are each in the order of keys.
fn merge(a: impl Iterator<Item = Object>, b: impl Iterator<Item = Object>) -> impl Iterator<Item = Object> {
    let (mut a, mut b) = (a.peekable(), b.peekable());
    std::iter::from_fn(move || match (a.peek(), b.peek()) {
        (Some(x), Some(y)) if y.key() < x.key() => b.next(),
        (Some(_), _) => a.next(),
        (None, _) => b.next(),
    })
}
