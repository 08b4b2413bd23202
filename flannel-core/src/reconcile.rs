//! Makes the kernel equal to what is wanted, whatever state it finds.
//!
//! The one thing to know: the kernel is taken to be what was last put there, except for what is *in doubt*. A
//! doubt about one object is removed by putting the object again, a doubt about more by a snapshot. No message
//! from the kernel is trusted to say how things are, only that they may have changed.
//!
//! No task in here: the driver ([`KernelNetwork`](crate::KernelNetwork)) says when.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use crate::address::Subnet;
use crate::admit::{Changed, Delta, Peers};
use crate::kernel::{Culprit, Doubts, Kernel, KernelError, Owned, Report};
use crate::lease::{LeaseSet, Origin, Subnets, View};
use crate::ledger::Ledger;
use crate::name::LinkName;
use crate::nexthops::{Ids, NexthopBlock, nexthop};
use crate::roster::Id;
use crate::state::{Change, Key, Object, Route, State, Via};
use crate::status::{Damage, Explanation, Standing, Status};

/// How many changes are handed to the kernel at once. More gains nothing (the kernel works at its own pace), and a
/// stop waits for at most one batch.
const BATCH: usize = 128;

/// Of how many new peers the objects are put before anything else gets its turn. Bounds memory, and how long a repair
/// waits while thousands of peers arrive.
const ROUND: usize = 4096;

/// Whom to suspect of additions is remembered for so many of them; the wanted objects bound the rest.
const MOST_SUSPECTS: usize = 1024;

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
    /// Wanted objects that are not known to be in place, but for those that the kernel refused.
    put: BTreeMap<Key, Cause>,
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
    /// How many objects peers add to `base`.
    peer_objects: usize,
    stale_facts: StaleFacts,
    ledger: Ledger,
    kernel_error: Option<KernelError>,
    lookup_error: Option<KernelError>,
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
            fresh: VecDeque::new(),
            gone: BTreeMap::new(),
            failed: BTreeMap::new(),
            suspects: BTreeMap::new(),
            unread: Unread::Everything,
            missing_links: BTreeSet::new(),
            reads: Reads::default(),
            peer_objects: 0,
            stale_facts: StaleFacts::default(),
            ledger: Ledger::default(),
            kernel_error: None,
            lookup_error: None,
        }
    }

    /// Takes in a newer view, which was there at `arrived`. Asks `kernel` what plans ask.
    pub(crate) fn view(&mut self, view: &View, arrived: Instant, kernel: &dyn Kernel) {
        let answers = Answers::new(kernel);
        let changed = self.peers.update(view.leases.changes_since(&self.leases), &|a| answers.on_link(a));
        self.leases = view.leases.clone();
        self.live = matches!(view.origin, Origin::Live { .. });
        self.take(changed, Some(arrived));
        self.take_unanswered(answers);
    }

    /// Asks anew what plans asked, where the answer may have changed.
    pub(crate) fn recheck_facts(&mut self, kernel: &dyn Kernel) {
        let stale = std::mem::take(&mut self.stale_facts);
        let answers = Answers::new(kernel);
        let everything = stale.all.then_some(None);
        let parts = stale.under.into_iter().filter(|_| !stale.all).map(Some);
        for under in everything.into_iter().chain(parts) {
            let changed = self.peers.recheck(under, &|a| answers.on_link(a));
            self.take(changed, None);
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
                self.unread = Unread::Everything;
                self.stale_facts.all = true;
            }
            Doubts::Link(name) => {
                if self.owned.links.contains(name) || self.owned.routes_on.contains(name) {
                    self.unread = Unread::Everything;
                }
                self.stale_facts.urgent |= self.owned.routes_on.contains(name);
                self.stale_facts.all |= self.stale_facts.urgent || self.peers.facts().rely_on(*name);
            }
            Doubts::Objects(reports, by) => {
                reports.iter().for_each(|report| self.doubt_object(report, by.as_ref()));
            }
        }
    }

    fn doubt_object(&mut self, report: &Report, by: Option<&Culprit>) {
        let key = match report {
            Report::Now(object) => object.key(),
            Report::Other(key) | Report::Beside(key) | Report::Gone(key) => *key,
        };
        let concerned = self.owned.concerns(&key);
        if let Key::Route(dst) = key
            && !concerned
            && self.peers.facts().are_under(dst)
        {
            self.stale_facts.under.insert(dst);
        }
        match (self.want(&key), report) {
            (_, Report::Beside(_)) => {}
            // Says what we want to hear: no reason for doubt (and none for trust: a doubt stays one).
            (Some(want), Report::Now(object)) if want == *object => {}
            (Some(_), Report::Gone(_)) => {
                // Its routes went with it, without a word about each.
                if let Key::Nexthop(id) = key {
                    let dst = self.ids.as_ref().and_then(|ids| ids.dst(id));
                    // One that a plan defined has routes that the plan defined too.
                    let routes = dst.map(|dst| vec![Key::Route(dst)]).or_else(|| self.peers.routes_by(&key));
                    if routes.is_none() {
                        self.unread = Unread::Everything;
                    }
                    for route in routes.into_iter().flatten() {
                        self.suspect(route, Damage::Deletion, by);
                    }
                }
                self.suspect(key, Damage::Deletion, by);
            }
            (Some(_), _) => self.suspect(key, Damage::Modification, by),
            // Ours to remove, if it is one that a snapshot shows as ours.
            (None, Report::Now(object)) if concerned && self.owned.may_own(object) => {
                self.unread = self.unread.max(Unread::Additions);
                if let Some(by) = by.filter(|_| self.suspects.len() < MOST_SUSPECTS + self.put.len()) {
                    self.suspects.insert(key, by.clone());
                }
            }
            (None, _) => {}
        }
    }

    /// A wanted object is in doubt.
    fn suspect(&mut self, key: Key, damage: Damage, by: Option<&Culprit>) {
        let known = self.failed.remove(&key).map(|failed| failed.cause);
        self.put.entry(key).or_insert_with(|| known.unwrap_or(Cause::Doubt(damage)));
        if let Some(by) = by {
            self.suspects.insert(key, by.clone());
        }
    }

    /// There is work for [`Reconciler::settle`].
    pub(crate) fn is_unsettled(&self) -> bool {
        self.is_unread() || !self.put.is_empty() || self.has_fresh() || (self.live && !self.gone.is_empty())
    }

    /// There are new peers of which nothing was put yet.
    pub(crate) fn has_fresh(&self) -> bool {
        !self.fresh.is_empty()
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

    /// Brings the kernel to what is wanted, as far as it lets us; what it refuses is in the status. Of new peers it
    /// puts so many as a round may take: while there [are more](Self::has_fresh), nothing is deleted. Unless it
    /// `may_read` the kernel, it does what can be done without. Blocks.
    ///
    /// # Errors
    /// [`Closed`]: the gate was closed before everything was done.
    pub(crate) fn settle(
        &mut self,
        kernel: &dyn Kernel,
        gate: &Gate,
        mut may_read: bool,
    ) -> Result<(), Closed> {
        let mut links_put = BTreeSet::new();
        // A link that is put may take all that is on it with it, so the kernel is read again after each.
        while self.is_unsettled() {
            let known = !self.is_unread() || (may_read && self.read(kernel, &links_put));
            if !known && self.unread == Unread::Everything {
                // What leases brought needs no look at the kernel first.
                let by_lease = |key: &Key| matches!(self.put.get(key), Some(Cause::Lease(_)));
                let changes: Vec<Change> = self.puts(by_lease).collect();
                self.apply(kernel, gate, &changes, None)?;
                return self.put_fresh(kernel, gate);
            }
            let links = self.put.keys().take_while(|key| matches!(key, Key::Link(_)));
            let links: Vec<Change> = links.filter_map(|key| self.want(key)).map(Change::Put).collect();
            if links.is_empty() {
                break;
            }
            self.apply(kernel, gate, &links, None)?;
            let taken = links.iter().map(|change| change.object().key());
            let taken: Vec<Key> = taken.filter(|key| !self.ledger.failing().contains_key(key)).collect();
            for key in &taken {
                if let Key::Link(name) = key {
                    self.missing_links.remove(name);
                }
            }
            if !taken.is_empty() {
                (self.unread, may_read) = (Unread::Everything, true);
            }
            links_put.extend(taken);
        }
        let changes: Vec<Change> =
            self.puts(|_| true).filter(|change| !self.lacks_link(change.object())).collect();
        self.apply(kernel, gate, &changes, None)?;
        self.put_fresh(kernel, gate)?;
        if !self.live || self.has_fresh() {
            return Ok(());
        }
        let gone = self.gone.values().rev();
        let changes: Vec<Change> = gone.map(|(object, _)| Change::Delete(object.clone())).collect();
        self.apply(kernel, gate, &changes, None)
    }

    /// Without its link nothing can be put; one failure in the status says more than ten thousand.
    fn lacks_link(&self, object: &Object) -> bool {
        !self.missing_links.is_empty()
            && self.link_of(object).is_some_and(|link| self.missing_links.contains(&link))
    }

    /// Puts what new peers define, as much of it as a round may take.
    fn put_fresh(&mut self, kernel: &dyn Kernel, gate: &Gate) -> Result<(), Closed> {
        let Some((_, arrived)) = self.fresh.front().copied() else { return Ok(()) };
        let mut changes = Vec::new();
        for _ in 0..ROUND {
            if self.fresh.front().is_none_or(|(_, at)| *at != arrived) {
                break;
            }
            let Some((id, _)) = self.fresh.pop_front() else { break };
            let objects = self.peers.take_fresh(id).unwrap_or_default();
            expand(objects, self.ids.as_ref(), |object| changes.push(Change::Put(object)));
        }
        if !self.missing_links.is_empty() {
            changes.retain(|change| {
                let lacks = self.lacks_link(change.object());
                if lacks {
                    self.put.insert(change.object().key(), Cause::Lease(arrived));
                }
                !lacks
            });
        }
        // The order of creation.
        changes.sort_by_key(|change| change.object().kind());
        self.apply(kernel, gate, &changes, Some(Cause::Lease(arrived)))
    }

    /// Something failed that did not fail when this was last asked.
    pub(crate) fn take_newly_failing(&mut self) -> bool {
        self.ledger.take_newly_failing()
    }

    pub(crate) fn reads(&self) -> Reads {
        self.reads
    }

    /// The kernel cannot be read.
    pub(crate) fn is_unreadable(&self) -> bool {
        self.kernel_error.is_some()
    }

    pub(crate) fn is_failing(&self) -> bool {
        !self.ledger.failing().is_empty() || self.kernel_error.is_some() || self.lookup_error.is_some()
    }

    /// Costs nothing that grows with the number of peers.
    pub(crate) fn status(&self) -> Status {
        let mut status = Status {
            in_sync: self.live && !self.is_unsettled() && !self.is_failing(),
            live: self.live,
            peers: self.peers.believed(),
            objects: self.base.len() + self.peer_objects,
            disbelieved: self.peers.disbelieved().clone(),
            kernel_error: self.kernel_error.clone().or_else(|| self.lookup_error.clone()),
            remarks: self.peers.remarks().clone(),
            ..Status::default()
        };
        self.ledger.copy_to(&mut status);
        status
    }

    /// The peer whose subnet holds `address`, and how what it wants stands.
    pub(crate) fn explain(&self, address: IpAddr) -> Option<Explanation> {
        let peer = self.peers.holder_of(address)?;
        let standing = |object: &Object| {
            let key = object.key();
            if !peer.believed {
                Standing::Unwanted
            } else if let Some(failure) = self.ledger.failing().get(&key) {
                Standing::Failing(failure.clone())
            } else if peer.fresh || self.put.contains_key(&key) || self.unread == Unread::Everything {
                Standing::Pending
            } else {
                Standing::InPlace
            }
        };
        let mut objects = Vec::new();
        expand(&peer.objects, self.ids.as_ref(), |object| objects.push((standing(&object), object)));
        let objects = objects.into_iter().map(|(how, object)| (object, how)).collect();
        let disbelief = self.peers.disbelieved().get(&peer.lease.subnets).cloned();
        Some(Explanation { lease: Arc::clone(&peer.lease), disbelief, objects })
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

    /// The nexthop object with this id that a peer's route needs.
    fn nexthop(&self, id: u32) -> Option<Object> {
        let dst = self.ids.as_ref()?.dst(id)?;
        Some(nexthop(self.peers.object(&Key::Route(dst))?, id)?.into())
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
        for id in &fresh {
            for object in self.peers.fresh_objects(*id).unwrap_or_default() {
                let new = |ids: &mut Ids| ids.assign_to(object);
                let id = self.ids.as_mut().and_then(new);
                self.peer_objects += 1 + usize::from(id.is_some());
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
        self.peer_objects += usize::from(after.is_some());
        self.peer_objects -= usize::from(before.is_some());
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

    /// Chooses the ids of nexthop objects, once: before the first snapshot, which depends on them.
    fn choose_ids(&mut self, kernel: &dyn Kernel) -> Result<(), KernelError> {
        if self.reads.done > 0 {
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
        let (first, peers) = (self.reads.done == 0, &self.peers);
        let wanted = |dst: &Subnet| peers.object(&Key::Route(*dst)).is_some_and(|o| nexthop(o, 0).is_some());
        ids.adopt(actual, |dst| first || !wanted(dst));
        if !first {
            return;
        }
        for object in self.peers.objects() {
            self.peer_objects += usize::from(ids.assign_to(object).is_some());
        }
    }

    /// Forgets the ids of destinations that are neither wanted nor waiting to be deleted.
    fn release_ids(&mut self) {
        let Some(ids) = &mut self.ids else { return };
        let (peers, gone, failed) = (&self.peers, &self.gone, &self.failed);
        ids.retain(|id, dst| {
            let route = Key::Route(*dst);
            let wanted = peers.object(&route).is_some_and(|object| nexthop(object, id).is_some());
            let waits = |key: &Key| gone.contains_key(key) || failed.contains_key(key);
            wanted || waits(&route) || waits(&Key::Nexthop(id))
        });
    }

    /// Reads the kernel and finds out what is to be done; false if it could not be read.
    ///
    /// A link in `links_put` that still is not as wanted is one that the kernel keeps as it is: say so
    /// instead of putting it for ever.
    fn read(&mut self, kernel: &dyn Kernel, links_put: &BTreeSet<Key>) -> bool {
        let started = Instant::now();
        let actual = self.choose_ids(kernel).and_then(|()| kernel.snapshot(&self.owned));
        self.reads.tries += 1;
        self.reads.took += started.elapsed();
        let actual = match actual {
            Ok(actual) => actual,
            Err(error) => {
                self.kernel_error = Some(error);
                return false;
            }
        };
        self.kernel_error = None;
        self.unread = Unread::Nothing;
        let absent = |object: &Object| match object {
            Object::Link(link) => actual.get(&object.key()).is_none().then_some(link.name),
            _ => None,
        };
        self.missing_links = self.base.iter().filter_map(absent).collect();
        self.adopt_ids(&actual);
        // What is there before anything was put is what a predecessor left.
        let first = self.reads.done == 0;
        self.reads.done += 1;
        let (put, gone) = (std::mem::take(&mut self.put), std::mem::take(&mut self.gone));
        let failed = std::mem::take(&mut self.failed);
        let put = self.sort_out_fresh(&actual, put);
        let cause = |key: &Key, damage| {
            let gone = || gone.get(key).map(|(_, cause)| *cause);
            let failed = || failed.get(key).map(|failed| failed.cause);
            let known = put.get(key).copied().or_else(gone).or_else(failed);
            known.unwrap_or(if first { Cause::Lease(None) } else { Cause::Doubt(damage) })
        };
        let mut seen = 0;
        for object in actual.iter() {
            let key = object.key();
            let Some(want) = self.want(&key) else {
                self.gone.insert(key, (object.clone(), cause(&key, Damage::Addition)));
                continue;
            };
            seen += 1;
            if want == *object {
                continue;
            }
            let cause = cause(&key, Damage::Modification);
            if links_put.contains(&key) {
                self.ignored(want, object.to_string(), cause);
            } else {
                self.put.insert(key, cause);
            }
        }
        if seen < self.base.len() + self.peer_objects {
            for object in self.absent(&actual) {
                let key = object.key();
                let cause = cause(&key, Damage::Deletion);
                if links_put.contains(&key) {
                    self.ignored(object, "absent".to_owned(), cause);
                } else {
                    self.put.insert(key, cause);
                }
            }
        }
        self.release_ids();
        let (put, gone) = (&self.put, &self.gone);
        self.ledger.keep_failing(|k| put.contains_key(k) || gone.contains_key(k) || links_put.contains(k));
        self.suspects.retain(|key, _| put.contains_key(key) || gone.contains_key(key));
        true
    }

    /// Of new peers only those stay fresh of which nothing is there. What others lack is noted in `put`.
    fn sort_out_fresh(&mut self, actual: &State, mut put: BTreeMap<Key, Cause>) -> BTreeMap<Key, Cause> {
        for (id, arrived) in std::mem::take(&mut self.fresh) {
            let (mut some, mut lacking) = (false, Vec::new());
            expand(self.peers.fresh_objects(id).unwrap_or_default(), self.ids.as_ref(), |object| {
                let key = object.key();
                let there = actual.get(&key);
                some |= there.is_some();
                if there != Some(&object) {
                    lacking.push(key);
                }
            });
            if some {
                self.peers.take_fresh(id);
                put.extend(lacking.into_iter().map(|key| (key, Cause::Lease(arrived))));
            } else {
                self.fresh.push_back((id, arrived));
            }
        }
        put
    }

    /// Wanted objects that are not there, without those of fresh peers.
    fn absent(&self, actual: &State) -> Vec<Object> {
        let mut absent: Vec<Object> = Vec::new();
        let mut look = |object: Object| {
            if actual.get(&object.key()).is_none() {
                absent.push(object);
            }
        };
        self.base.iter().cloned().for_each(&mut look);
        expand(self.peers.settled_objects(), self.ids.as_ref(), look);
        absent
    }

    /// The kernel says nothing against a change of a link, and does not make it.
    fn ignored(&mut self, want: Object, is: String, cause: Cause) {
        let detail = format!("the kernel did not take it over: it is now {is}");
        self.failed.insert(want.key(), Failed { cause, deletion: None });
        self.ledger.failed(&Change::Put(want), None, KernelError::explained(EAGAIN, detail));
    }

    /// Applies changes batch by batch. `cause` is that of changes that are noted nowhere.
    fn apply(
        &mut self,
        kernel: &dyn Kernel,
        gate: &Gate,
        changes: &[Change],
        cause: Option<Cause>,
    ) -> Result<(), Closed> {
        for batch in changes.chunks(BATCH) {
            let results = gate.pass(|| kernel.apply(&self.owned, batch)).ok_or(Closed)?;
            let now = Instant::now();
            for (change, result) in batch.iter().zip(results) {
                self.record(change, result, now, cause);
            }
        }
        Ok(())
    }

    fn record(
        &mut self,
        change: &Change,
        result: Result<(), KernelError>,
        now: Instant,
        cause: Option<Cause>,
    ) {
        let object = change.object();
        let key = object.key();
        let put = self.put.remove(&key);
        let gone = self.gone.remove(&key).map(|(_, cause)| cause);
        let cause = put.or(gone).or(cause).unwrap_or(Cause::Lease(None));
        self.failed.remove(&key);
        if let (Change::Delete(_), Ok(()), Key::Nexthop(id), Some(ids)) =
            (change, &result, key, &mut self.ids)
        {
            ids.release(id);
        }
        match (result, cause) {
            (Err(error), cause) => {
                let deletion = matches!(change, Change::Delete(_)).then(|| object.clone());
                let peer = self.peer_of(&key);
                self.failed.insert(key, Failed { cause, deletion });
                self.ledger.failed(change, peer, error);
            }
            (Ok(()), Cause::Lease(arrived)) => {
                self.ledger.clear(&key);
                self.ledger.applied(arrived.map(|arrived| now.saturating_duration_since(arrived)));
            }
            (Ok(()), Cause::Doubt(damage)) => {
                self.ledger.clear(&key);
                let peer = self.peer_of(&key);
                self.ledger.repaired(object, damage, peer, self.suspects.remove(&key));
            }
        }
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

/// What peers define as the kernel is to have it: each route by a gateway becomes one by its nexthop object.
fn expand<'a>(
    objects: impl IntoIterator<Item = &'a Object>,
    ids: Option<&Ids>,
    mut each: impl FnMut(Object),
) {
    for object in objects {
        let id = ids.and_then(|ids| ids.of_route(object));
        if let Some(nexthop) = id.and_then(|id| nexthop(object, id)) {
            each(nexthop.into());
        }
        each(by_nexthop(object, id));
    }
}
