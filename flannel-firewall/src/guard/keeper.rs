//! The guard of a tunnel, as a record keeper: its records are the peers of the subnets, and the
//! ends of the tunnel here.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use async_trait::async_trait;
use flannel_core::address::Family;
use flannel_core::kernel::{
    Changes, Invalidation, KernelError, LongDrops, Outcome, RecordKeeper, Refused,
};
use flannel_core::object::{Change, Object, Record};
use flannel_core::remedy::Trouble;
use flannel_core::runtime::lock;
use flannel_core::{Remedy, Subnet};
use flannel_netlink::netfilter::{NetfilterEvents, NetfilterSocket};
use flannel_netlink::nftables::{Batches, GROUP, Table, at_one_moment};
use libc::{EAGAIN, EBUSY, EEXIST, ENOENT};

use super::end::TunnelEnd;
use super::table::{Before, Found, Sources, plan, trial};
use super::table_named;
use crate::error::lacks_nftables;

/// The number of attempts for a table that changes while it is read or written.
const TRIES: usize = 16;
/// The text of the record of a peer.
const FROM: &str = "from ";
/// The end of the text of the tunnel's record whose table another program changed.
const CHANGED: &str = ", changed by another program";

/// Refuses the packets of a tunnel that do not come from the public address of a peer, or whose
/// source is neither in the subnets of that peer nor the peer itself. Also refuses the packets of
/// others, such as pods, that this node would send to the tunnels of nodes: masqueraded, they would
/// look like this node's.
///
/// The kernel takes packets of a tunnel from every host. This keeper keeps a table of nf_tables
/// (`inet flannel-NAME`) that drops or counts the wrong ones. Its records are the ends of the
/// tunnel ([`Self::tunnel`]), one in each family, and the peers ([`Self::peer`]). Without an end it
/// refuses nothing. With an end and without peers it refuses everything.
///
/// Fragments of IPv4 are assembled before they are checked. Fragments of IPv6 are assembled before
/// the check if connection tracking is active (`nf_defrag_ipv6`). Otherwise the guard checks the
/// packet by the sender of its first fragment. Each packet of a batch that no network card has
/// segmented (`UDP_SEGMENT`) is checked. Packets that travel without the tunnel are not its matter.
///
/// Needs `CAP_NET_ADMIN`. Each call works in the network namespace of its thread. Clones are the
/// same keeper.
#[derive(Clone)]
pub struct Guard {
    name: &'static str,
    /// The name of the table.
    table: Arc<str>,
    /// The first byte of its marks.
    tag: u8,
    /// By network namespace.
    kernels: Arc<Mutex<BTreeMap<u64, Kernel>>>,
    report: Arc<Mutex<Report>>,
}

#[derive(Default)]
struct Kernel {
    tag: u8,
    socket: Option<NetfilterSocket>,
    /// The table as this keeper left it, or `None` if it must be read.
    placed: Option<Option<Found>>,
    /// The values of the table at the last look or change, without peers. `None` if there was no
    /// table.
    frame: Option<Sources>,
    counts: Counts,
}

/// The packets that were refused, by reason, over all tables and rules. Counters of the kernel
/// begin anew with the rules.
#[derive(Default)]
struct Counts {
    /// Whether they were dropped.
    drops: bool,
    /// The packets that earlier rules counted.
    before: BTreeMap<&'static str, u64>,
    /// The packets that the rules in place had counted at the last look.
    seen: BTreeMap<&'static str, u64>,
}

impl Counts {
    /// Takes in the counters of the rules. Returns the sums.
    fn note(
        &mut self,
        drops: bool,
        counted: BTreeMap<&'static str, u64>,
    ) -> BTreeMap<&'static str, u64> {
        if self.drops != drops {
            // Dropped packets and packets that were only counted have separate counts.
            *self = Self { drops, ..Self::default() };
        }
        let are_new = counted
            .iter()
            .any(|(reason, packets)| self.seen.get(reason).is_some_and(|seen| packets < seen));
        if are_new {
            // Another program has reset them.
            self.begin_anew();
        }
        self.seen = counted;
        let before = |reason| self.before.get(reason).copied().unwrap_or(0);
        self.seen.iter().map(|(reason, seen)| (*reason, before(reason) + seen)).collect()
    }

    /// The rules are made again.
    fn begin_anew(&mut self) {
        for (reason, packets) in std::mem::take(&mut self.seen) {
            *self.before.entry(reason).or_default() += packets;
        }
    }
}

#[derive(Default)]
struct Report {
    drops: LongDrops,
    /// Why no packets are refused, although they should be.
    unable: Option<String>,
}

impl Guard {
    /// The keeper with this name. The table has the same name after `flannel-`. Guards of one host
    /// have different names.
    pub fn new(name: &'static str) -> Self {
        // Marks of several tunnels differ, so that no packet passes with the mark of another one.
        let tag = name.bytes().fold(0x66, |tag: u8, byte| tag.rotate_left(1) ^ byte).max(1);
        let table = format!("flannel-{name}").into();
        Self { name, table, tag, kernels: Arc::default(), report: Arc::default() }
    }

    /// The record of the end of the tunnel in a family. A family has one end. The engine [puts this
    /// record last](Record::put_last). Before the records of the peers are in place, the guard
    /// would refuse the packets of these peers.
    pub fn tunnel(&self, end: &TunnelEnd) -> Record {
        Record::new(self.name, Subnet::host(end.local), end.to_string()).put_last()
    }

    /// The record of a subnet of a peer, from whose public address its packets come. Both are of
    /// one family.
    pub fn peer(&self, subnet: Subnet, public: IpAddr) -> Record {
        Record::new(self.name, subnet, format!("{FROM}{public}"))
    }

    /// Checks that the kernel can keep the table: makes one and removes it in one transaction.
    /// Blocks for milliseconds, longer while the kernel loads modules.
    ///
    /// # Errors
    /// The kernel lacks a part of nf_tables, or this process lacks `CAP_NET_ADMIN`.
    pub fn may_guard(&self) -> Result<(), KernelError> {
        let trial = trial(&table_named(&format!("{}-trial", self.table)));
        self.with_kernel(|kernel| kernel.commit(trial)).map_err(|error| self.about(error))
    }

    /// Sets the reason why this guard refuses no packets although the config asks for it.
    /// [`RecordKeeper::refused`] then reports the reason as a problem. Pass `None` if the guard
    /// works, or if the config does not ask for it.
    pub fn note_unable(&self, why: Option<String>) {
        self.report().unable = why;
    }

    fn report(&self) -> MutexGuard<'_, Report> {
        lock(&self.report)
    }

    /// The error with the name of the table.
    fn about(&self, error: KernelError) -> KernelError {
        error.about(self.table())
    }

    fn table(&self) -> Table<'_> {
        table_named(&self.table)
    }

    /// Runs `work` with the kernel of this thread's network namespace.
    fn with_kernel<T>(&self, work: impl FnOnce(&mut Kernel) -> T) -> T {
        // The number of a namespace is not used again while a socket is in it. Without `/proc` all
        // threads count as one namespace.
        let namespace = std::fs::metadata("/proc/thread-self/ns/net").map_or(0, |it| it.ino());
        let mut kernels = lock(&self.kernels);
        let kernel = kernels.entry(namespace).or_default();
        kernel.tag = self.tag;
        work(kernel)
    }

    /// Takes a change into the values of the table.
    fn take(
        &self,
        change: &Change,
        sources: &mut Sources,
        before: &mut Before,
    ) -> Result<(), KernelError> {
        let Object::Record(record) = change.object() else {
            return Err(KernelError::Other("it is not a record".to_owned()));
        };
        let wrong = || KernelError::Other(format!("{record} is not of a guard"));
        let is_put = matches!(change, Change::Put(_));
        let family = record.subnet.family();
        if let Some(public) = record.data().strip_prefix(FROM) {
            let public: Option<IpAddr> = public.parse().ok();
            let public = public.filter(|it| Family::of(*it) == family).ok_or_else(wrong)?;
            sources.change(record.subnet, Some(public).filter(|_| is_put), before);
            return Ok(());
        }
        let local = record.subnet.base();
        let text = record.data().trim_end_matches(CHANGED);
        let end = TunnelEnd::parse(local, text).ok_or_else(wrong)?;
        if is_put {
            sources.ends[family] = Some(end);
        } else if sources.ends[family].as_ref().is_some_and(|found| found.local == local) {
            sources.ends[family] = None;
        }
        Ok(())
    }

    /// The packets that the table refused; `None` without a table.
    fn counted(&self, kernel: &mut Kernel) -> Option<Refused> {
        let sources = kernel.frame.clone()?;
        let drops = sources.ends.values().next()?.drops;
        let counters = kernel.socket().and_then(|socket| self.table().counters(socket));
        match counters {
            Ok(counters) => {
                let packets = kernel.counts.note(drops, sources.refused(&counters));
                Some(Refused { drops, packets, problems: Vec::new() })
            }
            // Another program has deleted the table. It is put again.
            Err(error) if lacks_nftables(&error) => None,
            Err(error) => Some(unread(drops, &error)),
        }
    }

    /// Adds what is wrong.
    fn explain(&self, counted: Option<Refused>, now: Instant) -> Option<Refused> {
        let mut report = self.report();
        if let Some(why) = &report.unable {
            let text = format!("packets of the tunnel are taken from every host: {why}");
            let off = Remedy::PatchConfig("{\"Backend\": {\"SourceCheck\": false}}".to_owned());
            let load = Remedy::run("modprobe -a nf_tables nft_fib_inet");
            let remedy = Remedy::All(vec![load, Remedy::RestartDaemon]);
            let remedy = remedy.mention("or do not check them: ", off, "");
            let mut counted = counted.unwrap_or_default();
            counted.problems.insert(0, Trouble::new(text, remedy));
            return Some(counted);
        }
        let mut counted = counted?;
        let verb = if counted.drops { "dropped" } else { "counted (\"SourceCheck\": \"count\")" };
        for (reason, packets) in &counted.packets {
            if !report.drops.note(reason, *packets, now) {
                continue;
            }
            counted.problems.push(problem(reason, verb));
        }
        Some(counted)
    }
}

/// The refused packets of a table whose counters cannot be read.
fn unread(drops: bool, error: &KernelError) -> Refused {
    let text = format!("the packets that the guard of the tunnel refuses cannot be read: {error}");
    let remedy = Remedy::run("nft list ruleset").remark("can the rules be read?");
    Refused { drops, problems: vec![Trouble::new(text, remedy)], ..Refused::default() }
}

/// What is wrong if packets are refused for this reason, and what helps.
fn problem(reason: &str, verb: &str) -> Trouble {
    match reason {
        "stranger" => Trouble::new(
            format!(
                "packets of the tunnel come from hosts that are not accepted peers, and are \
                 {verb}: a host forges them, the lease of a node is not accepted here, or a NAT \
                 changes the address of a node"
            ),
            Remedy::ListPeers.remark(
                "is the lease of a node rejected, and is its address the one from which its \
                 packets come?",
            ),
        ),
        "foreign_source" => Trouble::new(
            format!(
                "packets of the tunnel have the source address of another node than the one that \
                 sends them, and are {verb}: a node or its pods forge them, or the packets of two \
                 nodes come from one address"
            ),
            Remedy::ListPeers.remark("which subnet does each address have?"),
        ),
        _ => Trouble::new(
            format!(
                "pods, or hosts behind this node, send packets to the tunnel port or protocol of \
                 other nodes; these packets are {verb}"
            ),
            Remedy::run("tcpdump -ni any")
                .remark("which one sends to the port or protocol of the tunnel?"),
        ),
    }
}

impl Kernel {
    fn socket(&mut self) -> Result<&mut NetfilterSocket, KernelError> {
        match &mut self.socket {
            Some(socket) => Ok(socket),
            empty => Ok(empty.insert(NetfilterSocket::open()?)),
        }
    }

    /// The table as it was at one moment, or `None` without a table. A difference from the expected
    /// table must be there twice: the kernel leaves elements out of a set that it resizes.
    fn read(&mut self, table: &Table<'_>) -> Result<Option<Found>, KernelError> {
        let tag = self.tag;
        let mut last = None;
        for _ in 0..TRIES {
            let found = at_one_moment(
                self.socket()?,
                |error| error,
                |socket| Sources::read(socket, table, tag),
            )?;
            let is_expected = match &self.placed {
                Some(placed) => *placed == found,
                None => found.as_ref().is_none_or(|found| found.is_intact),
            };
            if is_expected || last.as_ref() == Some(&found) {
                return Ok(found);
            }
            last = Some(found);
        }
        Ok(last.flatten())
    }

    fn commit(&mut self, batches: Batches) -> Result<(), KernelError> {
        let socket = self.socket()?;
        let mut batches = batches.into_iter();
        batches.try_for_each(|batch| socket.commit(batch).map_err(KernelError::from))
    }
}

impl RecordKeeper for Guard {
    fn name(&self) -> &'static str {
        self.name
    }

    fn records(&self) -> Result<Vec<Record>, KernelError> {
        self.with_kernel(|kernel| {
            let found = match kernel.read(&self.table()) {
                Err(error) if lacks_nftables(&error) || error.is_denied() => {
                    tracing::debug!(table = &*self.table, %error, "no table can be read");
                    None
                }
                found => found.map_err(|error| self.about(error))?,
            };
            kernel.frame = found.as_ref().map(|found| found.sources.frame());
            let records = found.as_ref().map(|found| self.records_of(found)).unwrap_or_default();
            kernel.placed = Some(found);
            Ok(records)
        })
    }

    fn apply(&self, changes: &[Change]) -> Vec<Outcome> {
        self.with_kernel(|kernel| self.apply_in(kernel, changes))
    }

    fn changes(&self) -> Result<Box<dyn Changes>, KernelError> {
        let events = self.with_kernel(|kernel| match kernel.socket() {
            Ok(socket) => NetfilterEvents::listen(GROUP, socket.port()).map(Some),
            Err(error) => Err(error),
        });
        let events = match events {
            Err(error) if lacks_nftables(&error) || error.is_denied() => None,
            events => events.map_err(|error| self.about(error))?,
        };
        Ok(Box::new(Events { table: Arc::clone(&self.table), events }))
    }

    fn refused(&self) -> Option<Refused> {
        let counted = self.with_kernel(|kernel| self.counted(kernel));
        self.explain(counted, Instant::now())
    }
}

impl Guard {
    fn records_of(&self, Found { sources, is_intact }: &Found) -> Vec<Record> {
        let ends = sources.ends.values().map(|end| {
            let record = self.tunnel(end);
            // It differs, so that the engine puts it, which repairs the table.
            if *is_intact {
                record
            } else {
                Record::new(self.name, record.subnet, format!("{}{CHANGED}", record.data()))
                    .put_last()
            }
        });
        ends.chain(sources.peers.iter().map(|(subnet, node)| self.peer(*subnet, *node))).collect()
    }

    fn apply_in(&self, kernel: &mut Kernel, changes: &[Change]) -> Vec<Outcome> {
        let mut last = KernelError::new(EAGAIN);
        for _ in 0..TRIES {
            let found = match kernel.placed.take().map_or_else(|| kernel.read(&self.table()), Ok) {
                Ok(found) => found,
                Err(error) => return self.all_failed(changes, error),
            };
            let is_intact = found.as_ref().map(|found| found.is_intact);
            let mut sources = found.map_or_else(|| Sources::new(self.tag), |found| found.sources);
            let mut before = sources.before();
            let outcomes: Vec<Outcome> = changes
                .iter()
                .map(|change| self.take(change, &mut sources, &mut before).into())
                .collect();
            let found = is_intact.map(|is_intact| (&before, is_intact));
            let frame = Some(&sources).filter(|it| !it.is_empty()).map(Sources::frame);
            let is_anew = is_intact != Some(true) || frame != kernel.frame;
            if is_anew {
                // The last look at the counters of the rules that go.
                self.counted(kernel);
            }
            match kernel.commit(plan(&self.table(), found, &sources)) {
                Ok(()) => {
                    let sources = Some(sources).filter(|sources| !sources.is_empty());
                    kernel.frame = frame;
                    if is_anew {
                        kernel.counts.begin_anew();
                    }
                    kernel.placed = Some(sources.map(|sources| Found { sources, is_intact: true }));
                    return outcomes;
                }
                // Another program has changed the table since it was read. Without a table, the
                // kernel lacks a part.
                Err(error)
                    if error.is(EEXIST)
                        || error.is(EBUSY)
                        || (error.is(ENOENT) && is_intact.is_some()) =>
                {
                    last = error;
                }
                Err(error) => return self.all_failed(changes, error),
            }
        }
        self.all_failed(changes, last)
    }

    /// The outcomes of changes that all failed with this error.
    fn all_failed(&self, changes: &[Change], error: KernelError) -> Vec<Outcome> {
        vec![Outcome::Failed(self.about(error)); changes.len()]
    }
}

/// Changes of the table by other programs.
struct Events {
    table: Arc<str>,
    /// `None` if the kernel has no netfilter.
    events: Option<NetfilterEvents>,
}

#[async_trait]
impl Changes for Events {
    async fn next(&mut self) -> Result<Invalidation, KernelError> {
        let table = table_named(&self.table);
        match &mut self.events {
            Some(events) => events.changed(|message| table.is_changed_by(message)).await?,
            None => std::future::pending().await,
        }
        Ok(Invalidation::Everything)
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard").field("name", &self.name).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn packets_that_are_refused_for_long_are_a_problem() {
        let guard = Guard::new("guard-test");
        let start = Instant::now();
        let at = |seconds, stranger, drops| {
            let packets = [("stranger", stranger), ("foreign_source", 0), ("pod", 0)].into();
            let counted = Refused { drops, packets, ..Refused::default() };
            let refused = guard.explain(Some(counted), start + Duration::from_secs(seconds));
            refused.unwrap().problems
        };
        assert_eq!([at(0, 5, true), at(1, 6, true), at(20, 7, true)], [[], [], []]);
        let [Trouble { text, .. }] = &at(40, 8, true)[..] else { panic!("a problem") };
        assert!(text.contains("not accepted peers, and are dropped"), "{text}");
        let [Trouble { text, .. }] = &at(60, 8, false)[..] else { panic!("a problem") };
        assert!(text.contains(r#"are counted ("SourceCheck": "count")"#), "{text}");
        assert_eq!(at(1000, 8, true), [], "it is over");
    }

    #[test]
    fn a_guard_that_cannot_be_kept_is_a_problem() {
        let guard = Guard::new("guard-test");
        assert_eq!(guard.explain(None, Instant::now()), None);
        guard.note_unable(Some("no nf_tables".into()));
        let problems = guard.explain(None, Instant::now()).unwrap().problems;
        assert!(problems[0].text.ends_with("taken from every host: no nf_tables"), "{problems:?}");
        guard.note_unable(None);
        assert_eq!(guard.explain(None, Instant::now()), None);
    }

    #[test]
    fn counters_that_cannot_be_read_are_a_problem() {
        let guard = Guard::new("guard-test");
        let unread = || Some(unread(true, &KernelError::explained(EBUSY, "the table is busy")));
        let problems = guard.explain(unread(), Instant::now()).unwrap().problems;
        assert!(problems[0].text.contains("cannot be read: the table is busy"), "{problems:?}");
        guard.note_unable(Some("no nf_tables".into()));
        assert_eq!(guard.explain(unread(), Instant::now()).unwrap().problems.len(), 2);
    }

    #[test]
    fn guards_of_one_host_have_different_marks() {
        let tags = ["guard-vxlan", "guard-ipip", "guard-udp"].map(|name| Guard::new(name).tag);
        assert!(tags.iter().all(|tag| *tag != 0));
        assert!(tags[0] != tags[1] && tags[1] != tags[2] && tags[0] != tags[2], "{tags:?}");
    }
}
