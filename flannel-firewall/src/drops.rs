//! Who drops forwarded packets unless a rule accepts them: policies, ours and everybody else's.
//!
//! The one thing to know: each table judges for itself, so a rule that accepts in one of them helps nothing against the
//! policy of another.

use std::fmt;

use flannel_core::Family;
use flannel_netlink::netfilter::{Kind, NetfilterSocket};

use crate::error::Error;
use crate::iptables::program::{Programs, Variant};
use crate::iptables::script;
use crate::nft::expr::{find, number_in};
use crate::nft::table::{
    CHAIN_HOOK, CHAIN_NAME, CHAIN_POLICY, GETCHAIN, HOOK_NUMBER, SUBSYSTEM, TABLE, text_in,
};

/// `NF_INET_FORWARD`, `NF_DROP`.
const FORWARD: u32 = 2;
const DROP: u32 = 0;
/// `NFPROTO_INET`, and the two of its parts.
const PROTOCOLS: [(u8, &str, &[Family]); 3] =
    [(1, "inet", &Family::BOTH), (2, "ip", &[Family::V4]), (10, "ip6", &[Family::V6])];

/// A chain that sees forwarded packets and drops those that none of its rules accepts.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ForwardDrop {
    /// The family whose packets it drops.
    pub family: Family,
    /// Its table as the tools write it: `ip filter`, `inet firewalld`.
    pub table: String,
    /// Its name.
    pub chain: String,
    /// It is in the kernel's older tables, where only `iptables-legacy` sees it.
    pub legacy: bool,
    /// flannel's forward rules are in the same table, and accept what pods send before the policy is asked.
    pub accepts_pods: bool,
}

/// `chain FORWARD of table ip filter (iptables-legacy)`.
impl fmt::Display for ForwardDrop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "chain {} of table {}", self.chain, self.table)?;
        f.write_str(if self.legacy { " (iptables-legacy)" } else { "" })
    }
}

/// Every chain in this network namespace that drops forwarded packets by policy.
///
/// No program is run, unless the kernel has older tables in use.
///
/// # Errors
/// It may not be seen: that takes `CAP_NET_ADMIN`.
///
/// # Cancel safety
/// It only reads.
pub async fn forward_drops(programs: &Programs) -> Result<Vec<ForwardDrop>, Error> {
    let mut found = match tokio::task::spawn_blocking(nf_tables).await {
        Ok(Err(Error::NoNftables { .. })) => Vec::new(),
        Ok(found) => found?,
        // The runtime is shutting down.
        Err(_) => Vec::new(),
    };
    for family in Family::BOTH {
        if legacy_is_used(family) {
            let programs = Programs { variant: Variant::Legacy, ..programs.clone() };
            found.extend(in_saved(&programs.find(family)?.save().await?, family));
        }
    }
    Ok(found)
}

fn nf_tables() -> Result<Vec<ForwardDrop>, Error> {
    let about = |error| Error::kernel("nftables", error);
    let mut socket = NetfilterSocket::open().map_err(about)?;
    let ours: Vec<_> = script::forward_chains().collect();
    let mut found = Vec::new();
    for (protocol, word, families) in PROTOCOLS {
        let kind = Kind { subsystem: SUBSYSTEM, number: GETCHAIN, family: protocol };
        let chains = socket.dump(
            kind,
            |_| (),
            |told| {
                let attributes = told.attributes.0;
                let hook = find(attributes, CHAIN_HOOK).and_then(|hook| number_in(hook, HOOK_NUMBER));
                let drops = hook == Some(FORWARD) && number_in(attributes, CHAIN_POLICY) == Some(DROP);
                (told.kind.family == protocol)
                    .then(|| Some((text_in(attributes, TABLE)?, text_in(attributes, CHAIN_NAME)?, drops)))?
            },
        );
        let chains = chains.map_err(about)?;
        let is_ours = |table: &str| {
            chains.iter().any(|(t, c, _)| t == table && ours.contains(&(t.as_str(), c.as_str())))
        };
        for (table, chain, _) in chains.iter().filter(|(.., drops)| *drops) {
            found.extend(families.iter().map(|family| ForwardDrop {
                family: *family,
                table: format!("{word} {table}"),
                chain: chain.clone(),
                legacy: false,
                accepts_pods: protocol != 1 && is_ours(table),
            }));
        }
    }
    Ok(found)
}

/// The kernel has a filter table of the older kind in this network namespace.
fn legacy_is_used(family: Family) -> bool {
    let file = if family == Family::V4 { "ip_tables_names" } else { "ip6_tables_names" };
    let names = std::fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap_or_default();
    names.lines().any(|name| name == "filter")
}

/// The same in what `iptables-legacy-save` prints.
fn in_saved(saved: &str, family: Family) -> Option<ForwardDrop> {
    let filter = saved.lines().skip_while(|line| *line != "*filter").take_while(|line| *line != "COMMIT");
    let chains: Vec<&str> = filter.filter_map(|line| line.strip_prefix(':')).collect();
    let drops = chains.iter().any(|chain| chain.starts_with("FORWARD DROP "));
    let ours = |name: &str| chains.iter().any(|chain| chain.split(' ').next() == Some(name));
    drops.then(|| ForwardDrop {
        family,
        table: format!("{} filter", if family == Family::V4 { "ip" } else { "ip6" }),
        chain: "FORWARD".to_owned(),
        legacy: true,
        accepts_pods: script::forward_chains().any(|(table, chain)| table == "filter" && ours(chain)),
    })
}
