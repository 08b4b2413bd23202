//! `flannelctl lease`: the leases in the store, without a daemon.
//!
//! Every write is a compare-and-swap, as with the daemon.

mod remaining;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use clap::Subcommand;
use flannel_api::VERSION;
use flannel_backends::Backends;
use flannel_core::address::Dual;
use flannel_core::error::holder;
use flannel_core::lease::{LeaseAttrs, Offer};
use flannel_core::{Config, Error as CoreError, Subnet, Subnets};
use flannel_options::printable::line;
use flannel_subnet::{Entry, Registry};
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::terminal::{Style, Terminal, span};
use crate::{Context, Output};
use remaining::remaining;

/// The subcommands of `lease`.
#[derive(Debug, Subcommand)]
pub(crate) enum LeaseVerb {
    /// List every lease in the store, and entries that are not leases
    List,
    /// Create a lease that never expires, or make one never expire
    #[command(
        long_about = "Creates a lease that never expires, for the node with this public address. \
            Or removes the end of an existing lease; the daemon that holds it keeps running and \
            keeps the subnet. With --count it creates leases for a range of nodes."
    )]
    Reserve {
        /// The subnet, such as 10.1.5.0/24; for dual stack 10.1.5.0/24,fd00:1:0:5::/64; or the
        /// lease key, such as 10.1.5.0-24
        #[arg(value_name = "SUBNET", value_parser = key)]
        lease: Subnets,

        /// The public IPv4 address of the node
        #[arg(long, value_name = "ADDRESS")]
        public_ip: Option<Ipv4Addr>,

        /// The public IPv6 address of the node
        #[arg(long, value_name = "ADDRESS")]
        public_ipv6: Option<Ipv6Addr>,

        /// The node's backend, such as vxlan; by default the network config's
        #[arg(long, value_name = "TYPE", default_value = "")]
        backend_type: String,

        /// Reserve this many subnets, from SUBNET on, for nodes with as many public addresses, from
        /// --public-ip and --public-ipv6 on
        #[arg(long, value_name = "NUMBER", default_value_t = 1)]
        #[arg(value_parser = clap::value_parser!(u32).range(1..=65536))]
        count: u32,
    },
    /// Delete a reservation, or with --force the lease of a node
    #[command(
        long_about = "Deletes a reservation, or with --force the lease of a node. This frees the \
            subnet for other nodes. A running daemon that holds the lease exits with status 1. \
            Its routes and its pods stay, so release only the lease of a node that is gone."
    )]
    Release {
        /// The subnet, such as 10.1.5.0/24, or the lease key, such as 10.1.5.0-24
        #[arg(value_name = "SUBNET", value_parser = key)]
        lease: Subnets,

        /// Required for a lease that a node holds; without it only a reservation is deleted
        #[arg(long)]
        force: bool,
    },
}

/// Parses the key of a lease, or its subnets separated by commas.
fn key(text: &str) -> Result<Subnets, String> {
    if let Ok(subnets) = text.parse() {
        return Ok(subnets);
    }
    let wrong = || {
        format!(
            "{text:?} is not a lease, expected its subnets, such as 10.1.5.0/24, or its key, such \
             as 10.1.5.0-24"
        )
    };
    let parts: Option<Vec<Subnet>> = text.split(',').map(|part| part.trim().parse().ok()).collect();
    let parts = parts.ok_or_else(wrong)?;
    let subnets =
        Subnets::new(parts.iter().copied()).filter(|subnets| subnets.iter().count() == parts.len());
    subnets.ok_or_else(wrong)
}

/// Runs a verb of `lease`.
pub(crate) async fn lease(context: Context<'_>, verb: &LeaseVerb) -> Result<Output> {
    let shared = context.global.open_registry().await?;
    let registry = &*shared;
    match verb {
        LeaseVerb::List => list(&shared, context.terminal).await,
        LeaseVerb::Reserve { lease, public_ip, public_ipv6, backend_type, count } => {
            let public = Dual { v4: public_ip.map(IpAddr::V4), v6: public_ipv6.map(IpAddr::V6) };
            let kind = Cow::from(backend_type.clone());
            let attrs = |public| LeaseAttrs::from(Offer::new(public).with_kind(kind.clone()));
            if *count == 1 {
                return reserve(registry, context.backends, lease, &attrs(public)).await;
            }
            let range = range(lease, &public, *count).ok_or_else(|| {
                Error::Refused(format!("{lease}: there are not {count} subnets and addresses"))
            })?;
            let range = range.into_iter().map(|(lease, public)| (lease, attrs(public))).collect();
            reserve_range(registry, context.backends, range).await
        }
        LeaseVerb::Release { lease, force } => release(registry, lease, *force).await,
    }
}

async fn list(registry: &Arc<dyn Registry>, terminal: &Terminal) -> Result<Output> {
    let mut listing = registry.list().await?;
    listing.entries.sort_by_key(|entry| entry.lease.subnets);
    let left = remaining(registry, &listing.entries).await;
    let left_of = |entry: &Entry| left.get(&entry.lease.subnets).copied();
    let rows: Vec<_> = listing.entries.iter().map(|entry| row(entry, left_of(entry))).collect();
    let head = ["SUBNET", "ADDRESS", "BACKEND", "HOLDER", "EXPIRES", "REVISION"];
    let mut page = terminal.table(&head, &rows);
    let reserved = listing.entries.iter().filter(|entry| entry.holder.is_none()).count();
    page +=
        &format!("{} leases in {registry}, {reserved} of them reserved\n", listing.entries.len());
    for skipped in &listing.skipped {
        page += &terminal.field(
            "skipped",
            Style::Warning,
            &format!("{}: {}", skipped.key, skipped.reason),
        );
    }
    let duplicates = duplicates(&listing.entries);
    for (address, keys) in &duplicates {
        let text = format!(
            "{address} is the public address of {}: each node receives packets for the other",
            keys.join(" and ")
        );
        page += &terminal.field("duplicate", Style::Warning, &text);
    }
    let skipped: Vec<Value> = listing
        .skipped
        .iter()
        .map(|skipped| json!({ "key": skipped.key, "reason": skipped.reason.to_string() }))
        .collect();
    let leases = listing.entries.iter().map(|entry| value(entry, left_of(entry)));
    let leases: Vec<Value> = leases.collect();
    let duplicates: Vec<Value> = duplicates
        .iter()
        .map(|(address, keys)| json!({ "address": address.to_string(), "leases": keys }))
        .collect();
    let value = json!({
        "version": VERSION,
        "store": registry.to_string(),
        "leases": leases,
        "skipped": skipped,
        "duplicates": duplicates,
    });
    Ok(Output { text: page, value, ok: true })
}

/// Public addresses of several leases, with the keys of these.
fn duplicates(entries: &[Entry]) -> Vec<(IpAddr, Vec<String>)> {
    let mut holders: BTreeMap<IpAddr, Vec<String>> = BTreeMap::new();
    for lease in entries.iter().map(|entry| &entry.lease) {
        for address in lease.attrs.preferred.public.values() {
            holders.entry(*address).or_default().push(lease.subnets.to_string());
        }
    }
    holders.into_iter().filter(|(_, keys)| keys.len() > 1).collect()
}

/// When a lease expires if it is not renewed.
fn expires(entry: &Entry, left: Option<Duration>) -> String {
    match (entry.holder, left) {
        (None, _) => "never".to_owned(),
        (_, Some(left)) => format!("in {}", span(left.as_secs_f64().ceil())),
        (_, None) => "not known".to_owned(),
    }
}

fn row(entry: &Entry, left: Option<Duration>) -> (Style, Vec<Vec<String>>) {
    let lease = &entry.lease;
    let backend =
        if lease.attrs.preferred.kind.is_empty() { "-" } else { &lease.attrs.preferred.kind };
    let holder = entry.holder.map_or_else(|| "reserved".to_owned(), |mark| mark.to_string());
    let cells = vec![
        lease.subnets.iter().map(|subnet| subnet.to_string()).collect(),
        lease.attrs.preferred.public.values().map(ToString::to_string).collect(),
        vec![backend.to_owned()],
        vec![holder],
        vec![expires(entry, left)],
        vec![lease.revision.to_string()],
    ];
    (Style::Plain, cells)
}

fn value(entry: &Entry, left: Option<Duration>) -> Value {
    let lease = &entry.lease;
    let offer = &lease.attrs.preferred;
    json!({
        "key": lease.subnets.to_string(),
        "subnets": lease.subnets.iter().map(|subnet| subnet.to_string()).collect::<Vec<_>>(),
        "public": offer.public.values().map(ToString::to_string).collect::<Vec<_>>(),
        "backend": offer.kind,
        "reserved": entry.holder.is_none(),
        "holder": entry.holder.map(|mark| mark.to_string()),
        "remaining": left.map(|left| left.as_secs()),
        "revision": lease.revision.0,
    })
}

fn done(entry: &Entry, what: &str) -> Output {
    let lease = &entry.lease;
    let text = line(&format!("{} of {} {what}", lease.subnets, holder(&lease.attrs)));
    let value = json!({ "version": VERSION, "lease": value(entry, None), "result": what });
    Output { text, value, ok: true }
}

/// `count` reservations: the subnets and the public addresses of each follow the ones of the
/// reservation before it. `None` if the network or the addresses end before.
fn range(
    lease: &Subnets,
    public: &Dual<IpAddr>,
    count: u32,
) -> Option<Vec<(Subnets, Dual<IpAddr>)>> {
    (0..count)
        .map(|n| {
            let subnets = lease.iter().map(|subnet| subnet.step(n.into()));
            let subnets: Option<Vec<Subnet>> = subnets.collect();
            let public = public
                .try_map(|_, first| {
                    Subnet::host(*first).step(n.into()).map(|host| host.base()).ok_or(())
                })
                .ok()?;
            Some((Subnets::new(subnets?)?, public))
        })
        .collect()
}

/// Checks all reservations before it writes the first one.
async fn reserve_range(
    registry: &dyn Registry,
    backends: &Backends,
    range: Vec<(Subnets, LeaseAttrs)>,
) -> Result<Output> {
    let config = config(registry).await?;
    let there = registry.list().await?.entries;
    for (subnets, attrs) in &range {
        check(&config, subnets)?;
        free(subnets, &there)?;
        if attrs.preferred.public.is_empty() {
            return Err(unnamed(subnets));
        }
    }
    let mut text = String::new();
    let mut leases = Vec::new();
    for (subnets, attrs) in &range {
        let done = write(registry, backends, &config, subnets, attrs).await.map_err(|error| {
            let done = leases.len();
            let all = range.len();
            Error::Refused(format!("{error}; {done} of {all} subnets are reserved"))
        })?;
        text += &done.text;
        leases.push(done.value["lease"].clone());
    }
    let value = json!({ "version": VERSION, "leases": leases, "result": "is reserved" });
    Ok(Output { text, value, ok: true })
}

/// Checks that a lease overlaps none of these.
fn free(subnets: &Subnets, there: &[Entry]) -> Result<()> {
    match there.iter().find(|entry| entry.lease.subnets.overlaps(subnets)) {
        Some(other) => Err(Error::Refused(format!(
            "{subnets} overlaps {} of {}",
            other.lease.subnets,
            holder(&other.lease.attrs)
        ))),
        None => Ok(()),
    }
}

fn unnamed(subnets: &Subnets) -> Error {
    Error::Refused(format!("{subnets} is free: name its node with --public-ip or --public-ipv6"))
}

async fn config(registry: &dyn Registry) -> Result<Config> {
    let text = registry.config().await?;
    Ok(Config::parse(&text.text)
        .map_err(|source| CoreError::Config { location: text.location, source })?)
}

async fn reserve(
    registry: &dyn Registry,
    backends: &Backends,
    subnets: &Subnets,
    attrs: &LeaseAttrs,
) -> Result<Output> {
    if let Some(entry) = registry.entry(subnets).await? {
        let of = holder(&entry.lease.attrs);
        if entry.holder.is_none() {
            return Err(Error::Refused(format!("{subnets} is reserved already, for {of}")));
        }
        let now = &entry.lease.attrs.preferred.public;
        let given = &attrs.preferred.public;
        if !given.is_empty() && given != now {
            return Err(Error::Refused(format!(
                "{subnets} is held by {of}: release it first, or omit --public-ip and --public-ipv6"
            )));
        }
        let written =
            registry.update(subnets, entry.lease.revision, &entry.lease.attrs, None).await?;
        return Ok(done(&written, "never expires from now on"));
    }
    if attrs.preferred.public.is_empty() {
        return Err(unnamed(subnets));
    }
    let config = config(registry).await?;
    check(&config, subnets)?;
    free(subnets, &registry.list().await?.entries)?;
    write(registry, backends, &config, subnets, attrs).await
}

/// Writes a reservation that was checked.
async fn write(
    registry: &dyn Registry,
    backends: &Backends,
    config: &Config,
    subnets: &Subnets,
    attrs: &LeaseAttrs,
) -> Result<Output> {
    // A lease without a type is one of Go flannel's udp backend.
    let mut attrs = attrs.clone();
    if attrs.preferred.kind.is_empty() {
        attrs.preferred.kind = backends.lease_type(config).to_owned().into();
    }
    Ok(done(&registry.create(subnets, &attrs, None).await?, "is reserved"))
}

/// Checks that a node can take the reservation.
fn check(config: &Config, subnets: &Subnets) -> Result<()> {
    for (family, pod) in config.networks.iter() {
        let wrong = |reason: String| Err(Error::Refused(format!("{subnets}: {reason}")));
        let Some(subnet) = subnets.family(family) else {
            return wrong(format!(
                "the network config enables {family}, so a lease needs an {family} subnet"
            ));
        };
        if !pod.network.covers(&subnet) {
            return wrong(format!("{subnet} lies outside the pod network {}", pod.network));
        }
        if subnet.len() != pod.subnet_len {
            return wrong(format!(
                "{subnet} is not a /{}, the subnet length of the network config",
                pod.subnet_len
            ));
        }
    }
    Ok(())
}

async fn release(registry: &dyn Registry, subnets: &Subnets, force: bool) -> Result<Output> {
    let entry = registry
        .entry(subnets)
        .await?
        .ok_or_else(|| Error::Refused(format!("{registry} has no lease {subnets}")))?;
    if let Some(id) = entry.holder.filter(|_| !force) {
        // The release is refused even if the remaining time cannot be read.
        let left = registry.remaining(subnets, id).await.unwrap_or_default();
        return Err(Error::Refused(format!(
            "{subnets} is held by {} with the holder ID {id}, and expires {}: its release makes \
             that node's daemon stop, and its pods stay while another node can get the subnet; if \
             the node is gone for good (no host has this ID in the file mark of its --state-dir), \
             add --force",
            holder(&entry.lease.attrs),
            expires(&entry, left),
        )));
    }
    registry.delete(subnets, entry.lease.revision).await?;
    let what = "is released: if a daemon still holds it, it stops with status 1, its routes and \
                pods stay, and its next start takes a subnet again";
    Ok(done(&entry, what))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use flannel_subnet::{HolderId, LeaseGrant, MemoryRegistry};

    use super::*;
    use crate::terminal::tests::assert_page;

    #[test]
    fn leases_are_parsed_from_subnets_or_a_key() {
        for (text, expected) in [
            ("10.1.5.0/24", "10.1.5.0-24"),
            ("10.1.5.0-24", "10.1.5.0-24"),
            ("10.1.5.0/24,fd00:1:0:5::/64", "10.1.5.0-24&fd00:1:0:5::-64"),
            ("fd00:1:0:5::/64", "0.0.0.0-0&fd00:1:0:5::-64"),
        ] {
            assert_eq!(key(text).unwrap().to_string(), expected);
        }
        for text in ["", "10.1.5.0", "10.1.5.0/24,10.1.6.0/24", "10.1.5.0/33"] {
            assert!(key(text).unwrap_err().contains(&format!("{text:?}")), "{text}");
        }
    }

    #[test]
    fn a_range_has_consecutive_subnets_and_addresses() {
        let public = |text: &[&str]| text.iter().map(|a| a.parse::<IpAddr>().unwrap()).collect();
        let lease = key("10.1.5.0/24,fd00:1:0:5::/64").unwrap();
        let all = range(&lease, &public(&["192.0.2.255", "2001:db8::9"]), 2).unwrap();
        let last = key("10.1.6.0/24,fd00:1:0:6::/64").unwrap();
        assert_eq!(all[1], (last, public(&["192.0.3.0", "2001:db8::a"])));
        assert_eq!((all.len(), all[0].0), (2, lease));
        let high = key("255.255.255.0/24").unwrap();
        assert_eq!(range(&high, &public(&["192.0.2.1"]), 2), None);
        assert_eq!(range(&lease, &public(&["255.255.255.255"]), 2), None);
    }

    #[tokio::test]
    async fn a_range_is_checked_as_a_whole() {
        let config = r#"{"Network":"10.1.0.0/16","Backend":{"Type":"vxlan"}}"#;
        let registry = MemoryRegistry::with_config(config);
        let backends = flannel_backends::all();
        let attrs = |n| {
            let value = format!(r#"{{"PublicIP":"192.0.2.{n}"}}"#);
            LeaseAttrs::from_json(&value).unwrap()
        };
        let range = |from: u8| -> Vec<_> {
            (from..from + 3).map(|n| (key(&format!("10.1.{n}.0/24")).unwrap(), attrs(n))).collect()
        };
        let done = reserve_range(&registry, &backends, range(7)).await.unwrap();
        assert_eq!(
            (done.text.lines().count(), done.value["leases"].as_array().unwrap().len()),
            (3, 3)
        );
        let error = reserve_range(&registry, &backends, range(5)).await.unwrap_err().to_string();
        assert!(error.contains("10.1.7.0-24 overlaps 10.1.7.0-24 of 192.0.2.7 (vxlan)"), "{error}");
        assert_eq!(registry.list().await.unwrap().entries.len(), 3);
    }

    #[tokio::test]
    async fn a_release_says_what_the_node_will_do_and_how_to_know_that_it_is_gone() {
        let registry = MemoryRegistry::with_config(r#"{"Network":"10.1.0.0/16"}"#);
        let subnets = key("10.1.7.0/24").unwrap();
        let ttl = Duration::from_secs(86_400);
        let grant = LeaseGrant { holder: HolderId(0x0a07), ttl };
        let attrs = LeaseAttrs::from_json(r#"{"PublicIP":"192.0.2.7"}"#).unwrap();
        registry.create(&subnets, &attrs, Some(grant)).await.unwrap();
        let refused = release(&registry, &subnets, false).await.unwrap_err().to_string();
        for part in ["192.0.2.7", "0000000000000a07, and expires in 1 d 0 h", "mark", "--force"] {
            assert!(refused.contains(part), "{refused}");
        }
        let released = release(&registry, &subnets, true).await.unwrap().text;
        assert!(released.contains("it stops with status 1"), "{released}");
        assert!(registry.list().await.unwrap().entries.is_empty());
    }

    #[tokio::test]
    async fn leases_are_listed_with_duplicate_addresses() {
        let registry = MemoryRegistry::with_config(r#"{"Network":"10.1.0.0/16"}"#);
        for (key, attrs, held) in [
            ("10.1.7.0-24", r#"{"PublicIP":"192.0.2.7","BackendType":"vxlan"}"#, Some(0x0a07)),
            ("10.1.8.0-24", r#"{"PublicIP":"192.0.2.7","BackendType":"vxlan"}"#, None),
            (
                "10.1.9.0-24&fd00:1:0:9::-64",
                r#"{"PublicIP":"192.0.2.9","PublicIPv6":"2001:db8::9","BackendType":"host-gw"}"#,
                Some(0x0a09),
            ),
        ] {
            let tenure = held.map(|mark| LeaseGrant {
                holder: HolderId(mark),
                ttl: Duration::from_secs(86_400),
            });
            registry
                .create(&key.parse().unwrap(), &LeaseAttrs::from_json(attrs).unwrap(), tenure)
                .await
                .unwrap();
        }
        let mut pages = Vec::new();
        let registry: Arc<dyn Registry> = Arc::new(registry);
        for width in [80, 120] {
            pages.push(list(&registry, &Terminal { width, colours: false }).await.unwrap().text);
        }
        assert_page("leases", |terminal| pages[usize::from(terminal.width == 120)].clone());
    }

    #[tokio::test]
    async fn a_backend_type_cannot_act_on_the_terminal_or_forge_a_line() {
        let registry = MemoryRegistry::with_config(r#"{"Network":"10.1.0.0/16"}"#);
        let subnets = key("10.1.7.0/24").unwrap();
        let attrs = r#"{"PublicIP":"192.0.2.7","BackendType":"a\u001b[2J\n\u009b\u202eb"}"#;
        registry.create(&subnets, &LeaseAttrs::from_json(attrs).unwrap(), None).await.unwrap();
        let shared: Arc<dyn Registry> = Arc::new(registry.clone());
        let listed = list(&shared, &Terminal { width: 80, colours: true }).await.unwrap();
        let released = release(&registry, &subnets, false).await.unwrap();
        for text in [listed.text, released.text] {
            assert!(text.contains(r"a\u001b[2J\u000a\u009b\u202eb"), "{text}");
        }
    }
}
