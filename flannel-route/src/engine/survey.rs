//! Reading: a snapshot tells what is to be done, and which ids nexthop objects have.

use std::collections::BTreeMap;

use tokio::time::Instant;

use super::{Cause, Engine, Failed, Unread, expand};
use crate::nexthops::{Ids, nexthop};
use flannel_core::Kernel;
use flannel_core::Subnet;
use flannel_core::kernel::KernelError;
use flannel_core::kernel::NexthopBlock;
use flannel_core::object::{Change, Key, Object, ObjectKind, State};
use flannel_core::status::{Damage, Failure};

const EAGAIN: i32 = 11;

/// How what is there differs from what is wanted.
struct Comparison<'a> {
    /// What is wanted, and what is there instead; `None` if nothing is.
    wrong: Vec<(Object, Option<Object>)>,
    unwanted: Vec<&'a Object>,
    /// How many nexthop objects are wanted.
    nexthops: usize,
}

impl Engine {
    /// Chooses the ids of nexthop objects, once: before the first snapshot, which depends on them.
    fn choose_ids(&mut self, kernel: &dyn Kernel) -> Result<(), KernelError> {
        if self.reads.done > 0 {
            return Ok(());
        }
        let (block, there) = NexthopBlock::choose(kernel, &self.footprint)?;
        self.footprint.nexthops = block;
        self.ids = block.filter(|_| there.usable).map(Ids::new);
        Ok(())
    }

    /// Lets destinations keep the ids that they have in the kernel, and at first gives ids to those that have none.
    fn adopt_ids(&mut self, actual: &State) {
        let Some(ids) = &mut self.ids else { return };
        let (first, peers) = (self.reads.done == 0, &self.peers);
        let wanted = |dst: &Subnet| {
            peers.object(&Key::Route(*dst)).is_some_and(|o| nexthop(&o, 0).is_some())
        };
        ids.adopt(actual, |dst| first || !wanted(dst));
        if !first {
            return;
        }
        for object in self.peers.objects() {
            if ids.assign_to(object).is_some() {
                self.peer_objects.add(ObjectKind::Nexthop);
            }
        }
    }

    /// Forgets the ids of destinations that are neither wanted nor waiting to be deleted.
    fn release_ids(&mut self) {
        let Some(ids) = &mut self.ids else { return };
        let (peers, gone, failed) = (&self.peers, &self.gone, &self.failed);
        ids.retain(|id, dst| {
            let route = Key::Route(*dst);
            let wanted = peers.object(&route).is_some_and(|object| nexthop(&object, id).is_some());
            let waits = |key: &Key| gone.contains_key(key) || failed.contains_key(key);
            wanted || waits(&route) || waits(&Key::Nexthop(id))
        });
    }

    /// Reads the kernel and finds out what is to be done; false if it could not be read.
    ///
    /// A link in `links_put` that still is not as wanted is one that the kernel keeps as it is: say so
    /// instead of putting it for ever, and since when, if it failed before it was put.
    pub(super) fn read(
        &mut self,
        kernel: &dyn Kernel,
        links_put: &BTreeMap<Key, Option<Failure>>,
    ) -> bool {
        // What is there of leases that nobody looked at would seem to be nobody's.
        self.take_all_unprocessed(kernel);
        let started = Instant::now();
        let actual = self.choose_ids(kernel).and_then(|()| kernel.snapshot(&self.footprint));
        self.reads.tries += 1;
        self.reads.took += started.elapsed();
        let actual = match actual {
            Ok(actual) => actual,
            Err(error) => {
                // Chosen anew next time, when those of what is there by then are adopted and all are counted.
                if self.reads.done == 0 {
                    self.ids = None;
                }
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
            known.unwrap_or(if first { Cause::Lease(None) } else { Cause::Repair(damage) })
        };
        let Comparison { wrong, unwanted, nexthops } = self.compare(&actual);
        for object in unwanted {
            let key = object.key();
            self.gone.insert(key, (object.clone(), cause(&key, Damage::Addition)));
        }
        for (want, is) in wrong {
            let key = want.key();
            let damage = if is.is_some() { Damage::Modification } else { Damage::Deletion };
            let cause = cause(&key, damage);
            if let Some(before) = links_put.get(&key) {
                let is = is.map_or_else(|| "absent".into(), |is| is.to_string());
                self.ignored(want, &is, cause, before.as_ref());
            } else {
                self.put.insert(key, cause);
            }
        }
        // Mostly each has a nexthop object that is wanted.
        if !self.fresh.is_empty() || self.ids.as_ref().is_some_and(|ids| ids.len() != nexthops) {
            self.release_ids();
        }
        let (put, gone) = (&self.put, &self.gone);
        self.stats.keep_failing(|k| {
            put.contains_key(k) || gone.contains_key(k) || links_put.contains_key(k)
        });
        self.suspects.retain(|key, _| put.contains_key(key) || gone.contains_key(key));
        true
    }

    /// Of new peers only those stay fresh of which nothing is there. What others lack is noted in `put`.
    fn sort_out_fresh(
        &mut self,
        actual: &State,
        mut put: BTreeMap<Key, Cause>,
    ) -> BTreeMap<Key, Cause> {
        for (id, arrived) in std::mem::take(&mut self.fresh) {
            let (mut some, mut lacking) = (false, Vec::new());
            expand(self.peers.fresh_objects(id).unwrap_or_default(), self.ids.as_ref(), |object| {
                let key = object.key();
                let there = actual.get(&key);
                some |= there.is_some();
                if there != Some(&object) || !actual.is_exact(&object) {
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

    /// What is wanted, but for what fresh peers want, and is not there or not so; and what is there and not wanted. Goes through
    /// the peers in the order of their slots, which mostly is that of what they put.
    fn compare<'a>(&self, actual: &'a State) -> Comparison<'a> {
        let (mut wrong, mut is_wanted, mut finder) =
            (Vec::new(), vec![false; actual.len()], actual.finder());
        let mut nexthops = 0;
        let mut look = |want: Object| {
            nexthops += usize::from(matches!(want, Object::Nexthop(_)));
            match finder.find(&want) {
                Some((n, None)) if actual.is_exact(&want) => is_wanted[n] = true,
                Some((n, is)) => {
                    is_wanted[n] = true;
                    wrong.push((want.clone(), Some(is.cloned().unwrap_or(want))));
                }
                None => wrong.push((want, None)),
            }
        };
        self.base.iter().cloned().for_each(&mut look);
        expand(self.peers.settled_objects(), self.ids.as_ref(), look);
        let unwanted = actual.iter().zip(is_wanted).filter(|(_, is_wanted)| !is_wanted);
        Comparison { wrong, unwanted: unwanted.map(|(object, _)| object).collect(), nexthops }
    }

    /// The kernel says nothing against a change of a link, and does not make it.
    fn ignored(&mut self, want: Object, is: &str, cause: Cause, before: Option<&Failure>) {
        let detail = format!("the kernel did not take it over: it is now {is}");
        self.failed.insert(want.key(), Failed { cause, deletion: None });
        if let Some(before) = before {
            self.stats.fails_still(want.key(), before.clone());
        }
        self.stats.failed(&Change::Put(want), None, KernelError::explained(EAGAIN, detail));
    }
}
