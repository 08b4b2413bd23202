//! Chains of any program that drop forwarded packets by policy.
//!
//! A packet passes only if each table accepts it. So an accepting rule in one table does not
//! override the policy of a chain in another table.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_core::runtime::blocking;
use flannel_netlink::netfilter::NetfilterSocket;
use flannel_netlink::nftables::{ChainHead, Expr, Table, TableFamily, hook, meta, verdict};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use crate::error::Error;
use crate::iptables::program::{Programs, Variant};
use crate::iptables::{legacy_tables, script};

/// The families whose packets a table may drop.
const FAMILIES: [(TableFamily, &[Family]); 3] = [
    (TableFamily::Inet, &Family::BOTH),
    (TableFamily::Ip, &[Family::V4]),
    (TableFamily::Ip6, &[Family::V6]),
];

/// A chain that drops forwarded packets unless one of its rules accepts them.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ForwardDrop {
    /// The family of the dropped packets.
    pub family: Family,
    /// The table in the notation of the tools: `ip filter`, `inet firewalld`.
    pub table: String,
    /// The name of the chain.
    pub chain: String,
    /// Whether it is in the kernel's legacy tables, which only `iptables-legacy` shows.
    pub legacy: bool,
    /// Whether rules before the policy accept packets from and to the pod network: flannel's
    /// forward rules in the same table, or rules of the chain itself. Jumps to other chains are not
    /// followed.
    pub accepts_pods: bool,
    /// The age of this information. It is 0 except for legacy tables from a [`LegacyMemory`].
    pub age: Duration,
}

/// For example `chain FORWARD of table ip filter (iptables-legacy, 8 s ago)`.
impl fmt::Display for ForwardDrop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "chain {} of table {}", self.chain, self.table)?;
        if !self.legacy {
            return Ok(());
        }
        match self.age.as_secs() {
            0 => f.write_str(" (iptables-legacy)"),
            age => write!(f, " (iptables-legacy, {age} s ago)"),
        }
    }
}

/// [`LegacyMemory::forget`] keeps output younger than this, so that requests start few processes.
const MIN_AGE: Duration = Duration::from_secs(1);
/// The time limit for a program.
const PATIENCE: Duration = Duration::from_secs(2);

/// A cache of the output of `iptables-legacy-save`, or of its error. It saves processes: each read
/// of the legacy tables starts one, and the kernel reports no changes. The default caches nothing.
#[derive(Debug, Default)]
pub struct LegacyMemory {
    keep: Duration,
    saved: Mutex<Dual<Saved>>,
}

/// The output for a family, and when it was read.
#[derive(Debug, Clone)]
struct Saved {
    at: Instant,
    output: Result<String, Arc<Error>>,
}

impl LegacyMemory {
    /// A cache whose entries are valid for `keep`. If `keep` is zero, nothing is cached.
    pub fn new(keep: Duration) -> Self {
        Self { keep, saved: Mutex::default() }
    }

    /// Forgets the output, unless it is younger than a second.
    ///
    /// # Cancel safety
    /// The call can be dropped: it forgets everything or nothing.
    pub async fn forget(&self) {
        let mut saved = self.saved.lock().await;
        for family in Family::BOTH {
            saved[family].take_if(|saved| saved.at.elapsed() >= MIN_AGE);
        }
    }

    /// The output and its age. Simultaneous calls share one process.
    async fn save(&self, programs: &Programs, family: Family) -> Result<(Duration, String), Error> {
        let mut saved = self.saved.lock().await;
        if let Some(known) = &saved[family]
            && known.at.elapsed() < self.keep
        {
            let output = known.output.clone().map_err(Error::Again)?;
            return Ok((known.at.elapsed(), output));
        }
        let output = run_save(programs, family).await.map_err(Arc::new);
        saved[family] = Some(Saved { at: Instant::now(), output: output.clone() });
        Ok((Duration::ZERO, output.map_err(Error::Again)?))
    }
}

async fn run_save(programs: &Programs, family: Family) -> Result<String, Error> {
    let programs = Programs { variant: Variant::Legacy, ..programs.clone() };
    let tool = programs.find(family)?;
    timeout(PATIENCE, tool.save()).await.unwrap_or_else(|_| {
        Err(Error::Late { program: format!("{}-save", tool.name), seconds: PATIENCE.as_secs() })
    })
}

/// The result of [`forward_drops`].
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct ForwardDrops {
    /// The dropping chains that could be read.
    pub found: Vec<ForwardDrop>,
    /// Why other chains could not be read. Reading needs `CAP_NET_ADMIN`. If the kernel has legacy
    /// tables, it also needs `iptables-legacy-save`.
    pub unread: Vec<Error>,
}

/// Finds the chains that drop forwarded packets by policy, in the network namespace of the
/// runtime's threads. Tells for each whether its rules accept the packets of the pod networks
/// `networks` before.
///
/// A program is run only if the kernel has a legacy table `filter` that is not in `memory`.
///
/// # Cancel safety
/// The call only reads, so it can be dropped.
pub async fn forward_drops(
    programs: &Programs,
    networks: &Dual<Subnet>,
    memory: &LegacyMemory,
) -> ForwardDrops {
    let pods = *networks;
    let mut drops = ForwardDrops::default();
    match blocking(move || nf_tables(&pods)).await {
        Ok(found) => drops.found = found,
        Err(Error::NoNftables { .. }) => {}
        Err(error) => drops.unread.push(error),
    }
    for family in Family::BOTH {
        if legacy_tables(family).iter().any(|table| table == "filter") {
            match memory.save(programs, family).await {
                Ok((age, saved)) => {
                    let drop = in_saved(&saved, family, networks[family]);
                    drops.found.extend(drop.map(|drop| ForwardDrop { age, ..drop }));
                }
                Err(error) => drops.unread.push(error),
            }
        }
    }
    drops
}

fn nf_tables(networks: &Dual<Subnet>) -> Result<Vec<ForwardDrop>, Error> {
    let about = |error| Error::kernel("nftables", error);
    let mut socket = NetfilterSocket::open().map_err(about)?;
    let mut found = Vec::new();
    for (table_family, families) in FAMILIES {
        let chains = ChainHead::all(&mut socket, table_family).map_err(about)?;
        for chain in chains.iter().filter(|chain| drops_forwarded(chain)) {
            let table = Table { family: table_family, name: &chain.table };
            let rules: Vec<Vec<Expr>> = table
                .rules(&mut socket)
                .map_err(about)?
                .into_iter()
                .filter(|(name, _)| *name == chain.name)
                .map(|(_, rule)| rule)
                .collect();
            // flannel has its forward rules of iptables in tables of one family.
            let has_our_rules =
                table_family != TableFamily::Inet && has_our_forward_chain(&chains, &chain.table);
            for family in families {
                let accepts_pods = has_our_rules
                    || networks[*family].is_some_and(|network| accept(&rules, network));
                found.push(ForwardDrop {
                    family: *family,
                    table: format!("{table_family} {}", chain.table),
                    chain: chain.name.clone(),
                    legacy: false,
                    accepts_pods,
                    age: Duration::ZERO,
                });
            }
        }
    }
    Ok(found)
}

/// Whether the chain drops forwarded packets by policy.
fn drops_forwarded(chain: &ChainHead) -> bool {
    chain
        .base
        .as_ref()
        .is_some_and(|base| base.hook == hook::FORWARD && base.policy == verdict::DROP)
}

/// Whether the table has one of flannel's forward chains of iptables.
fn has_our_forward_chain(chains: &[ChainHead], table: &str) -> bool {
    script::forward_chains().any(|(of, name)| {
        of == table && chains.iter().any(|chain| chain.table == table && chain.name == name)
    })
}

/// Whether the rules accept all packets from the network, and all packets to it.
fn accept(rules: &[Vec<Expr>], network: Subnet) -> bool {
    let accepted: Vec<Accepted> =
        rules.iter().filter_map(|rule| accepted_by(rule, network)).collect();
    let accepts = |wanted| accepted.iter().any(|it| *it == wanted || *it == Accepted::All);
    accepts(Accepted::From) && accepts(Accepted::To)
}

/// The packets that a rule accepts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Accepted {
    /// All packets from the pod network.
    From,
    /// All packets to the pod network.
    To,
    /// All packets of the family.
    All,
}

/// The packets that a rule accepts. `None` if it has other conditions, or does not accept.
fn accepted_by(rule: &[Expr], network: Subnet) -> Option<Accepted> {
    let family = network.family();
    // The offsets of the addresses in the IP header.
    let (source, destination) = if family == Family::V4 { (12, 16) } else { (8, 24) };
    let mut accepted = Accepted::All;
    let mut exprs = rule.iter().peekable();
    while let Some(expr) = exprs.next() {
        match expr {
            Expr::Counter => {}
            // The condition on the family, in `inet` tables.
            Expr::Meta(meta::NFPROTO) => match exprs.next()? {
                Expr::Compare { equal: true, value }
                    if value[..] == [TableFamily::from(family).protocol()] => {}
                _ => return None,
            },
            Expr::Header { offset, len }
                if [source, destination].contains(offset) && accepted == Accepted::All =>
            {
                let mask = exprs.next_if(|expr| matches!(expr, Expr::Mask(_)));
                let Expr::Compare { equal: true, value } = exprs.next()? else { return None };
                let bits = match mask {
                    Some(Expr::Mask(mask)) => mask.iter().map(|byte| byte.count_ones()).sum(),
                    _ => 8 * len,
                };
                let mut octets = value.clone();
                octets.resize(usize::from(network.family().bits() / 8), 0);
                let base: IpAddr = match network.family() {
                    Family::V4 => <[u8; 4]>::try_from(octets).ok()?.into(),
                    Family::V6 => <[u8; 16]>::try_from(octets).ok()?.into(),
                };
                if !Subnet::new(base, u8::try_from(bits).ok()?)?.covers(&network) {
                    return None;
                }
                accepted = if *offset == source { Accepted::From } else { Accepted::To };
            }
            Expr::Verdict(verdict::ACCEPT) => return Some(accepted),
            _ => return None,
        }
    }
    None
}

/// The chain `FORWARD` in the output of `iptables-legacy-save`, or `None` if it does not drop.
fn in_saved(saved: &str, family: Family, network: Option<Subnet>) -> Option<ForwardDrop> {
    let filter: Vec<&str> = saved
        .lines()
        .skip_while(|line| *line != "*filter")
        .take_while(|line| *line != "COMMIT")
        .collect();
    if !filter.iter().any(|line| line.starts_with(":FORWARD DROP ")) {
        return None;
    }
    let has_our_rules = script::forward_chains().any(|(table, chain)| {
        let start = format!(":{chain} ");
        table == "filter" && filter.iter().any(|line| line.starts_with(&start))
    });
    let accepts = |side: &str| {
        network.is_some_and(|network| {
            let rule = format!("-A FORWARD {side} {network} -j ACCEPT");
            filter.contains(&rule.as_str())
        })
    };
    Some(ForwardDrop {
        family,
        table: format!("{} filter", if family == Family::V4 { "ip" } else { "ip6" }),
        chain: "FORWARD".to_owned(),
        legacy: true,
        accepts_pods: has_our_rules || (accepts("-s") && accepts("-d")),
        age: Duration::ZERO,
    })
}

#[cfg(test)]
mod tests {
    use test_support::write_script;

    use super::*;

    /// Legacy programs that run these commands, and a file with a line for each run.
    fn programs(commands: &str) -> (tempfile::TempDir, Programs) {
        let dir = tempfile::tempdir().unwrap();
        let count = dir.path().join("count");
        for program in ["iptables-legacy-save", "iptables-legacy-restore"] {
            let text = format!("#!/bin/sh\necho once >> {}\n{commands}\n", count.display());
            write_script(&dir.path().join(program), &text);
        }
        let programs = Programs { path: Some(dir.path().into()), ..Programs::default() };
        (dir, programs)
    }

    #[tokio::test]
    async fn repeated_reads_start_one_process_even_if_it_fails() {
        let (dir, programs) = programs("echo broken >&2; exit 3");
        let memory = LegacyMemory::new(Duration::from_secs(3600));
        for _ in 0..5 {
            let error = memory.save(&programs, Family::V4).await.unwrap_err().to_string();
            assert!(error.contains("iptables-legacy-save") && error.contains("broken"), "{error}");
        }
        assert_eq!(std::fs::read_to_string(dir.path().join("count")).unwrap(), "once\n");
    }

    #[tokio::test]
    async fn output_younger_than_a_second_is_not_forgotten() {
        let (dir, programs) = programs("echo '*filter'");
        let memory = LegacyMemory::new(Duration::from_secs(3600));
        let (_, output) = memory.save(&programs, Family::V4).await.unwrap();
        assert_eq!(output, "*filter\n");
        // A time in the future, so that the test passes on slow machines.
        let looked = async |at| memory.saved.lock().await.v4.as_mut().unwrap().at = at;
        looked(Instant::now() + MIN_AGE).await;
        memory.forget().await;
        memory.save(&programs, Family::V4).await.unwrap();
        assert_eq!(std::fs::read_to_string(dir.path().join("count")).unwrap(), "once\n");
        looked(Instant::now() - 2 * MIN_AGE).await;
        memory.forget().await;
        memory.save(&programs, Family::V4).await.unwrap();
        assert_eq!(std::fs::read_to_string(dir.path().join("count")).unwrap(), "once\nonce\n");
    }

    #[tokio::test]
    async fn a_hanging_program_is_ended() {
        let (_dir, programs) = programs("exec sleep 600");
        let memory = LegacyMemory::new(Duration::from_secs(3600));
        let error = memory.save(&programs, Family::V4).await.unwrap_err().to_string();
        assert_eq!(error, "iptables-legacy-save did not end within 2 s");
    }
}
