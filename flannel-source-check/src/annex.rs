//! The source check of a tunnel, as an annex: its records are the nodes of the subnets, and one for
//! the end of the tunnel here.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::kernel::{Annex, Changes, Invalidation, KernelError};
use flannel_core::object::{Change, Key, Object, Record};
use flannel_netlink::netfilter::{NetfilterEvents, NetfilterMessage, NetfilterSocket};
use flannel_nft::{Batches, GROUP, Table, TableFamily, at_one_moment};

use crate::table::{Before, Found, Sources, TunnelEnd, plan, trial};

/// The number of attempts for a table that changes while it is read or written.
const TRIES: usize = 16;
const EPERM: i32 = 1;
const ENOENT: i32 = 2;
const EAGAIN: i32 = 11;
const EBUSY: i32 = 16;
const EEXIST: i32 = 17;
const EINVAL: i32 = 22;
const EPROTONOSUPPORT: i32 = 93;
const EOPNOTSUPP: i32 = 95;
/// The texts of records.
const TUNNEL: &str = "checks sources of ";
const PORT: &str = " at UDP port ";
const FROM: &str = "from ";
/// The end of the text of a tunnel's record whose table another program changed.
const CHANGED: &str = ", changed by another program";

/// Drops the packets of a tunnel that do not come from the node of their source address.
///
/// The kernel takes packets of a tunnel from every host. This annex keeps a table of nf_tables that
/// accepts a packet only if its inner source address is in the subnet of a node, or is the address
/// of the node itself, and the datagram comes from the address of this node. Its records are the
/// end of the tunnel ([`Self::tunnel`]) and the nodes ([`Self::node`]). Without the former it drops
/// nothing. Tunnels are those of IPv4 ([`TunnelEnd`]).
///
/// A batch of datagrams that no network card has segmented (`UDP_SEGMENT`, from a container or a
/// virtual machine of the same host) is checked as one packet: by its first.
///
/// Needs `CAP_NET_ADMIN`, and works in the network namespace of the thread that uses it first. All
/// other calls must come from threads of that namespace. Clones are the same annex.
#[derive(Clone)]
pub struct SourceCheck {
    name: &'static str,
    /// The name of the table.
    table: Arc<str>,
    kernel: Arc<Mutex<Kernel>>,
}

/// The table of IPv4 with this name.
fn table(name: &str) -> Table<'_> {
    Table { family: TableFamily::Ip, name }
}

#[derive(Default)]
struct Kernel {
    socket: Option<NetfilterSocket>,
    /// The table as this annex left it; `None`: it must be read.
    placed: Option<Option<Found>>,
}

impl SourceCheck {
    /// The annex with this name. The table has the same name after `flannel-`.
    pub fn new(name: &'static str) -> Self {
        Self { name, table: format!("flannel-{name}").into(), kernel: Arc::default() }
    }

    /// The record of the end of the tunnel here. A table has one tunnel.
    pub fn tunnel(&self, end: TunnelEnd) -> Record {
        Record::new(
            self.name,
            Subnet::host(end.local.into()),
            format!("{TUNNEL}{}{PORT}{}", end.device, end.port),
        )
    }

    /// The record of a subnet of another node, from whose address `node` its packets come.
    pub fn node(&self, subnet: Subnet, node: Ipv4Addr) -> Record {
        Record::new(self.name, subnet, format!("{FROM}{node}"))
    }

    /// Checks that the kernel can keep the table: makes one and removes it in one transaction.
    /// Blocks for milliseconds, longer while the kernel loads modules.
    ///
    /// # Errors
    /// The kernel lacks a part of nf_tables, or this process lacks `CAP_NET_ADMIN`.
    pub fn may_check(&self) -> Result<(), KernelError> {
        let mut kernel = self.lock();
        let tried = kernel.commit(trial(&table(&format!("{}-trial", self.table))));
        tried.map_err(|error| self.about(error))
    }

    /// The number of packets that were dropped since the table was made; `None`: there is no table,
    /// or it cannot be read. Blocks.
    pub fn dropped(&self) -> Option<u64> {
        let mut kernel = self.lock();
        let socket = kernel.socket().ok()?;
        let table = self.table();
        table.head(socket).ok()??;
        table.counted(socket).ok()
    }

    /// The error with the name of the table.
    fn about(&self, error: KernelError) -> KernelError {
        let mut text = self.table().to_string();
        text.extend(error.detail.map(|detail| format!(": {detail}")));
        KernelError::explained(error.errno, text)
    }

    fn table(&self) -> Table<'_> {
        table(&self.table)
    }

    fn lock(&self) -> MutexGuard<'_, Kernel> {
        self.kernel.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a change into the values of the table.
    fn take(
        &self,
        change: &Change,
        sources: &mut Sources,
        before: &mut Before,
    ) -> Result<(), KernelError> {
        let Object::Record(record) = change.object() else {
            return Err(KernelError::explained(0, "it is no record"));
        };
        let wrong = || KernelError::explained(0, format!("{record} is not of a source check"));
        let is_put = matches!(change, Change::Put(_));
        if let Some(end) = record.data().strip_prefix(TUNNEL) {
            let (device, port) =
                end.trim_end_matches(CHANGED).split_once(PORT).ok_or_else(wrong)?;
            let (Ok(device), Ok(port), IpAddr::V4(local)) =
                (device.parse(), port.parse(), record.subnet.base())
            else {
                return Err(wrong());
            };
            let end = TunnelEnd { device, local, port };
            if is_put {
                sources.tunnel = Some(end);
            } else if sources.tunnel.is_some_and(|found| found.local == local) {
                sources.tunnel = None;
            }
            return Ok(());
        }
        let node = record.data().strip_prefix(FROM).and_then(|node| node.parse().ok());
        let node = node.filter(|_| record.subnet.family() == Family::V4).ok_or_else(wrong)?;
        sources.change(record.subnet, Some(node).filter(|_| is_put), before);
        Ok(())
    }
}

impl Kernel {
    fn socket(&mut self) -> Result<&mut NetfilterSocket, KernelError> {
        match &mut self.socket {
            Some(socket) => Ok(socket),
            empty => Ok(empty.insert(NetfilterSocket::open()?)),
        }
    }

    /// The table as it was at one moment; `None`: there is none. A difference from the expected
    /// table must be there twice: the kernel leaves elements out of a set that it resizes.
    fn read(&mut self, table: &Table<'_>) -> Result<Option<Found>, KernelError> {
        let mut last = None;
        for _ in 0..TRIES {
            let read = |socket: &mut NetfilterSocket| Sources::read(socket, table);
            let found = at_one_moment(self.socket()?, |error| error, read)?;
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

impl Annex for SourceCheck {
    fn name(&self) -> &'static str {
        self.name
    }

    fn records(&self) -> Result<Vec<Record>, KernelError> {
        let mut kernel = self.lock();
        let found = match kernel.read(&self.table()) {
            Err(error) if is_missing(&error) || error.errno == EPERM => {
                tracing::debug!(table = &*self.table, %error, "no table can be read");
                None
            }
            found => found.map_err(|error| self.about(error))?,
        };
        let Some(Found { sources, is_intact }) = &found else {
            kernel.placed = Some(None);
            return Ok(Vec::new());
        };
        let tunnel = sources.tunnel.map(|end| {
            let record = self.tunnel(end);
            let changed = || format!("{}{CHANGED}", record.data());
            // It differs, so that the engine puts it, which repairs the table.
            if *is_intact { record } else { Record::new(self.name, record.subnet, changed()) }
        });
        let nodes = sources.peers.iter().map(|(subnet, node)| self.node(*subnet, *node));
        let records = tunnel.into_iter().chain(nodes).collect();
        kernel.placed = Some(found);
        Ok(records)
    }

    fn apply(&self, changes: &[Change]) -> Vec<Result<(), KernelError>> {
        let mut kernel = self.lock();
        let mut last = KernelError::new(EAGAIN);
        for _ in 0..TRIES {
            let found = match kernel.placed.take().map_or_else(|| kernel.read(&self.table()), Ok) {
                Ok(found) => found,
                Err(error) => return vec![Err(self.about(error)); changes.len()],
            };
            let is_intact = found.as_ref().map(|found| found.is_intact);
            let mut sources = found.map(|found| found.sources).unwrap_or_default();
            let mut before = sources.before();
            let take = |change| self.take(change, &mut sources, &mut before);
            let results: Vec<_> = changes.iter().map(take).collect();
            let found = is_intact.map(|is_intact| (&before, is_intact));
            match kernel.commit(plan(&self.table(), found, &sources)) {
                Ok(()) => {
                    let found = Some(Found { sources, is_intact: true });
                    kernel.placed = Some(found.filter(|found| !found.sources.is_empty()));
                    return results;
                }
                // Another program has changed the table since it was read. Without a table, the
                // kernel lacks a part.
                Err(error)
                    if matches!(error.errno, EEXIST | EBUSY)
                        || (error.errno == ENOENT && is_intact.is_some()) =>
                {
                    last = error;
                }
                Err(error) => return vec![Err(self.about(error)); changes.len()],
            }
        }
        vec![Err(self.about(last)); changes.len()]
    }

    fn changes(&self) -> Result<Box<dyn Changes>, KernelError> {
        let events = match self.lock().socket() {
            Ok(socket) => NetfilterEvents::listen(GROUP, socket.port()).map(Some),
            Err(error) if is_missing(&error) => Ok(None),
            Err(error) => Err(error),
        };
        let events = events.map_err(|error| self.about(error))?;
        Ok(Box::new(Events { table: Arc::clone(&self.table), events }))
    }

    /// Changes end before [`Annex::apply`] returns.
    fn wait(&self, _: &Key, _: Duration) -> Result<(), KernelError> {
        Ok(())
    }
}

/// Changes of the table by other programs.
struct Events {
    table: Arc<str>,
    /// `None`: the kernel has no netfilter.
    events: Option<NetfilterEvents>,
}

#[async_trait]
impl Changes for Events {
    async fn next(&mut self) -> Result<Invalidation, KernelError> {
        let table = table(&self.table);
        let concerns = |message: &NetfilterMessage<'_>| table.is_changed_by(message);
        match &mut self.events {
            Some(events) => events.changed(concerns).await?,
            None => std::future::pending().await,
        }
        Ok(Invalidation::Everything)
    }
}

impl fmt::Debug for SourceCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SourceCheck").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Whether the kernel has no nf_tables, and so no table.
fn is_missing(error: &KernelError) -> bool {
    matches!(error.errno, ENOENT | EINVAL | EPROTONOSUPPORT | EOPNOTSUPP)
}
