//! `flannelctl lease`: the leases in the store, without a daemon.
//!
//! Every write is a compare-and-swap, as with the daemon.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

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
use crate::terminal::{Style, Terminal};
use crate::{Context, Output};

/// The subcommands of `lease`.
#[derive(Debug, Subcommand)]
pub(crate) enum LeaseVerb {
    /// List every lease in the store, and entries that are not leases
    List,
    /// Create a lease that never expires, or make one never expire
    #[command(
        long_about = "Creates a lease that never expires, for the node with this public address. \
            Or removes the end of an existing lease; the daemon that holds it keeps running and \
            keeps the subnet."
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
    },
    /// Delete a reservation, or with --force the lease of a node
    #[command(
        long_about = "Deletes a reservation, or with --force the lease of a node. This frees the \
            subnet for other nodes. A running daemon that holds the lease exits with status 1."
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
    let registry = context.global.open_registry().await?;
    let registry = &*registry;
    match verb {
        LeaseVerb::List => list(registry, context.terminal).await,
        LeaseVerb::Reserve { lease, public_ip, public_ipv6, backend_type } => {
            let public = Dual { v4: public_ip.map(IpAddr::V4), v6: public_ipv6.map(IpAddr::V6) };
            let backend_type = backend_type.clone().into();
            let attrs = LeaseAttrs::from(Offer { public, kind: backend_type, ..Offer::default() });
            reserve(registry, context.backends, lease, &attrs).await
        }
        LeaseVerb::Release { lease, force } => release(registry, lease, *force).await,
    }
}

async fn list(registry: &dyn Registry, terminal: &Terminal) -> Result<Output> {
    let mut listing = registry.list().await?;
    listing.entries.sort_by_key(|entry| entry.lease.subnets);
    let rows: Vec<_> = listing.entries.iter().map(row).collect();
    let mut page = terminal.table(&["SUBNET", "ADDRESS", "BACKEND", "HOLDER", "REVISION"], &rows);
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
        .map(|skipped| json!({ "key": skipped.key, "reason": skipped.reason }))
        .collect();
    let leases: Vec<Value> = listing.entries.iter().map(value).collect();
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

fn row(entry: &Entry) -> (Style, Vec<Vec<String>>) {
    let lease = &entry.lease;
    let backend =
        if lease.attrs.preferred.kind.is_empty() { "-" } else { &lease.attrs.preferred.kind };
    let holder = entry.holder.map_or_else(|| "reserved".to_owned(), |mark| mark.to_string());
    let cells = vec![
        lease.subnets.iter().map(|subnet| subnet.to_string()).collect(),
        lease.attrs.preferred.public.values().map(ToString::to_string).collect(),
        vec![backend.to_owned()],
        vec![holder],
        vec![lease.revision.to_string()],
    ];
    (Style::Plain, cells)
}

fn value(entry: &Entry) -> Value {
    let (lease, offer) = (&entry.lease, &entry.lease.attrs.preferred);
    json!({
        "key": lease.subnets.to_string(),
        "subnets": lease.subnets.iter().map(|subnet| subnet.to_string()).collect::<Vec<_>>(),
        "public": offer.public.values().map(ToString::to_string).collect::<Vec<_>>(),
        "backend": offer.kind,
        "reserved": entry.holder.is_none(),
        "holder": entry.holder.map(|mark| mark.to_string()),
        "revision": lease.revision.0,
    })
}

fn done(entry: &Entry, what: &str) -> Output {
    let lease = &entry.lease;
    let text = line(&format!("{} of {} {what}", lease.subnets, holder(&lease.attrs)));
    let value = json!({ "version": VERSION, "lease": value(entry), "result": what });
    Output { text, value, ok: true }
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
        let (now, given) = (&entry.lease.attrs.preferred.public, &attrs.preferred.public);
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
        return Err(Error::Refused(format!(
            "{subnets} is free: name its node with --public-ip or --public-ipv6"
        )));
    }
    let text = registry.config().await?;
    let config = Config::parse(&text.text)
        .map_err(|source| CoreError::Config { location: text.location, source })?;
    check(&config, subnets)?;
    let others = registry.list().await?.entries;
    if let Some(other) = others.iter().find(|entry| entry.lease.subnets.overlaps(subnets)) {
        let of = holder(&other.lease.attrs);
        return Err(Error::Refused(format!("{subnets} overlaps {} of {of}", other.lease.subnets)));
    }
    // A lease without a type is one of Go flannel's udp backend.
    let mut attrs = attrs.clone();
    if attrs.preferred.kind.is_empty() {
        attrs.preferred.kind = backends.lease_type(&config).to_owned().into();
    }
    let written = registry.create(subnets, &attrs, None).await?;
    Ok(done(&written, "is reserved"))
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
    let none = || Error::Refused(format!("{registry} has no lease {subnets}"));
    let entry = registry.entry(subnets).await?.ok_or_else(none)?;
    if entry.holder.is_some() && !force {
        return Err(Error::Refused(format!(
            "{subnets} is held by {}: its release makes that node's daemon stop; if that is \
             intended, or the node is gone for good, add --force",
            holder(&entry.lease.attrs)
        )));
    }
    registry.delete(subnets, entry.lease.revision).await?;
    Ok(done(&entry, "is released"))
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
        let listed = list(&registry, &Terminal { width: 80, colours: true }).await.unwrap();
        let released = release(&registry, &subnets, false).await.unwrap();
        for text in [listed.text, released.text] {
            assert!(text.contains(r"a\u001b[2J\u000a\u009b\u202eb"), "{text}");
        }
    }
}
