//! Rules of any program that stop packets of pods.
//!
//! A packet passes only if each table accepts it. So an accepting rule in one table does not
//! override a drop in another table. The module asks the rules of nf_tables, and of the legacy
//! tables of iptables, what they do with packets of pods, hook by hook.

mod extension;
mod iptables;
mod memory;
mod nft;
mod packet;
mod text;
mod walk;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use flannel_core::address::{Dual, Family};
use flannel_core::kernel::KernelError;
use flannel_core::runtime::blocking;
use flannel_netlink::netfilter::NetfilterSocket;
use flannel_netlink::nftables::program::Translation;
use flannel_netlink::nftables::{self, Base, ChainHead, Table, TableFamily, verdict};

use self::iptables::IptablesTable;
pub use self::memory::LegacyMemory;
use self::nft::{Known, NftTable};
pub use self::packet::{Flow, PodPackets, TunnelPackets};
use self::packet::{Hook, Packet, Stage, TCP, UDP};
use self::walk::{Hit, Walk, Way};
use crate::error::Error;
use crate::iptables::legacy_tables;
use crate::iptables::program::Programs;
use crate::iptables::saved::Saved;

/// The tables of iptables, in the order in which a packet passes them.
const TABLES: [&str; 5] = ["raw", "mangle", "nat", "filter", "security"];
/// `NFT_TABLE_F_DORMANT`.
const DORMANT: u32 = 1;
/// The largest number of single pods whose packets are followed, and of rules that are asked for
/// all packets. Kubernetes has tens of thousands of rules, of which a packet meets half.
const MOST_PODS: usize = 64;
const MOST_RULES: usize = 4_000_000;
/// The start of the names of chains and tables that carry out network policies. What they do with
/// single pods is wanted.
const POLICIES: [&str; 6] =
    ["KUBE-POD-FW-", "KUBE-NWPLCY-", "cali-", "CILIUM_", "calico", "kube-network-policies"];

/// What a rule does with packets of pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Effect {
    /// Drops them silently.
    Drop,
    /// Drops them, with an answer to the sender.
    Reject,
    /// Gives them to a queue that no program reads, so that the kernel drops them.
    Queue,
    /// Gives packets between pods other addresses.
    Translate(Translation),
}

/// A rule or a policy of another program that stops or changes packets of pods.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stop {
    /// What it does.
    pub effect: Effect,
    /// The family of the packets.
    pub family: Family,
    /// The packets, at least one kind.
    pub flows: BTreeSet<Flow>,
    /// The pods whose packets it concerns. Empty if it concerns all.
    pub pods: BTreeSet<IpAddr>,
    /// The table in the notation of the tools: `ip filter`, `inet firewalld`.
    pub table: String,
    /// The chain that has the rule or the policy.
    pub chain: String,
    /// The name of the hook in `nft`, for example `forward`.
    pub hook: String,
    /// The rule. `None` for the policy of the chain.
    pub rule: Option<StoppingRule>,
    /// The chains that the packet has entered before, from the base chain on.
    pub entered: Vec<String>,
    /// Whether it is in the kernel's legacy tables, which only `iptables-legacy` shows.
    pub legacy: bool,
    /// The age of this information. It is 0 except for legacy tables from a [`LegacyMemory`].
    pub age: Duration,
}

/// A rule of a [`Stop`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoppingRule {
    /// The rule, in the notation of `nft` as far as this crate knows its parts, or in that of
    /// iptables.
    pub text: String,
    /// Its number in the chain, from 1.
    pub number: usize,
    /// The number by which `nft` names it. `None` in legacy tables.
    pub handle: Option<u64>,
}

impl Stop {
    /// What the policy of a chain does with packets of a family. The flows, the hook and the chains
    /// that they enter are to be filled in.
    pub fn new(effect: Effect, family: Family, table: &str, chain: &str) -> Self {
        Self {
            effect,
            family,
            flows: BTreeSet::new(),
            pods: BTreeSet::new(),
            table: table.to_owned(),
            chain: chain.to_owned(),
            hook: String::new(),
            rule: None,
            entered: Vec::new(),
            legacy: false,
            age: Duration::ZERO,
        }
    }
}

impl StoppingRule {
    /// A rule with its text, its number from 1, and its handle.
    pub fn new(text: impl Into<String>, number: usize, handle: Option<u64>) -> Self {
        Self { text: text.into(), number, handle }
    }
}

/// For example ``rule `reject` of chain FORWARD of table ip filter (hook forward, iptables-legacy,
/// 8 s ago)``.
impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.rule {
            Some(rule) => write!(f, "rule `{}` of", rule.text)?,
            None => f.write_str("the policy of")?,
        }
        write!(f, " chain {} of table {} (hook {}", self.chain, self.table, self.hook)?;
        if self.legacy {
            f.write_str(", iptables-legacy")?;
            if self.age.as_secs() > 0 {
                write!(f, ", {} s ago", self.age.as_secs())?;
            }
        }
        f.write_str(")")
    }
}

/// The result of [`stopped_packets`].
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Stops {
    /// The rules and policies that could be read.
    pub found: Vec<Stop>,
    /// Why others could not be read. Reading needs `CAP_NET_ADMIN`. If the kernel has legacy
    /// tables, it also needs `iptables-legacy-save`.
    pub unread: Vec<Error>,
}

/// Finds the rules of other programs that stop packets of pods or of the tunnel, or translate
/// packets between pods, in the network namespace of the runtime's threads.
///
/// Only rules that surely match are found: a condition that this crate does not know, such as a set
/// of `ipset`, never makes a finding. The packets are the first ones of connections, of TCP and
/// UDP, with ports that no service has. Packets of a single pod are followed if a rule names its
/// address.
///
/// A program is run only if the kernel has legacy tables that are not in `memory`.
///
/// # Cancel safety
/// The call only reads, so it can be dropped.
pub async fn stopped_packets(
    programs: &Programs,
    pods: &Dual<PodPackets>,
    memory: &LegacyMemory,
) -> Stops {
    let of = pods.clone();
    let mut stops = Stops::default();
    match blocking(move || nf_tables(&of)).await {
        Err(Error::NoNftables { .. }) => {}
        followed => stops.take_in(followed),
    }
    for (family, pods) in pods.iter() {
        if legacy_tables(family).is_empty() {
            continue;
        }
        match memory.save(programs, family).await {
            Ok((age, saved)) => {
                let of = pods.clone();
                // A host may have tens of thousands of rules.
                let found = blocking(move || in_saved(&saved, &of, &Queues::read())).await;
                stops.take_in(found.map(|found| found.of_age(age)));
            }
            Err(error) => stops.unread.push(error),
        }
    }
    stops
}

impl Stops {
    fn take_in(&mut self, followed: Result<Followed, Error>) {
        match followed {
            Ok(Followed { stops, unread }) => {
                self.found.extend(stops);
                self.unread.extend(unread);
            }
            Err(error) => self.unread.push(error),
        }
    }
}

/// What was found by following packets.
#[derive(Debug, Default)]
struct Followed {
    stops: Vec<Stop>,
    /// Why other rules were not followed.
    unread: Vec<Error>,
}

impl Followed {
    fn of_age(mut self, age: Duration) -> Self {
        self.stops.iter_mut().for_each(|stop| stop.age = age);
        self
    }

    /// Notes that not all rules were followed if the number of rules that may be judged is used up.
    fn note(&mut self, what: String, budget: usize) {
        if budget == 0 {
            let detail = format!("packets of pods meet more than {MOST_RULES} rules");
            self.unread.push(Error::kernel(what, KernelError::Other(detail)));
        }
    }
}

/// The queues that programs read.
#[derive(Debug, Default)]
struct Queues {
    /// `None` if that is not known.
    read: Option<BTreeSet<u16>>,
}

impl Queues {
    /// The queues of this network namespace.
    fn read() -> Self {
        let file = std::fs::read_to_string("/proc/thread-self/net/netfilter/nfnetlink_queue");
        let number = |line: &str| line.split_whitespace().next()?.parse().ok();
        Self { read: file.ok().map(|text| text.lines().filter_map(number).collect()) }
    }

    /// Where a packet goes from a queue. `number` is `None` if it is not known.
    fn way(&self, number: Option<u16>, bypass: bool) -> Way {
        match (number, &self.read) {
            _ if bypass => Way::Accept,
            (Some(number), Some(read)) if !read.contains(&number) => Way::End(Effect::Queue),
            // The program decides.
            _ => Way::Accept,
        }
    }
}

/// A hit, with what is needed to report it.
struct Found {
    table: String,
    hook: Hook,
    hit: Hit,
    rule: Option<StoppingRule>,
    entered: Vec<String>,
}

/// The stops by the chain and the number of the rule.
type Collected = BTreeMap<(String, Hit), Stop>;

/// Follows the packets of a family. `walk` follows a packet through the chains of a hook.
fn follow(
    pods: &PodPackets,
    legacy: bool,
    mut walk: impl FnMut(Stage, &mut Packet) -> Result<Vec<Found>, Error>,
) -> Result<Vec<Stop>, Error> {
    let mut all = Collected::new();
    let mut pass = |packet: &mut Packet, stages: &[Stage]| {
        let mut found = Vec::new();
        for stage in stages {
            packet.from = stage.from;
            packet.to = stage.to;
            found.extend(walk(*stage, packet)?);
        }
        found.retain(|it| is_reported(it, packet.flow));
        Ok(found)
    };
    let mut of_single_pods = Vec::new();
    for protocol in [TCP, UDP] {
        for (packet, stages) in pods.packets(protocol) {
            let mut first = packet.clone();
            for found in pass(&mut first, &stages)? {
                note(&mut all, found, &packet, legacy, None);
            }
            if protocol == TCP {
                of_single_pods.push((packet, stages, first.named));
            }
        }
    }
    // Single pods come last, so that they do not use up the number of rules.
    for (packet, stages, named) in of_single_pods {
        for (address, port) in named.into_iter().take(MOST_PODS) {
            let Some(mut single) = pods.with(&packet, address, port) else { continue };
            for found in pass(&mut single, &stages)? {
                if !is_policy(&found) {
                    note(&mut all, found, &packet, legacy, Some(address));
                }
            }
        }
    }
    Ok(all.into_values().collect())
}

/// Whether a hit is worth a report: flannel's own rules are not, and translations only of packets
/// between pods.
fn is_reported(found: &Found, flow: Flow) -> bool {
    let table = found.table.split(' ').nth(1).unwrap_or_default();
    let is_ours = table.starts_with("flannel-") || found.hit.chain.starts_with("FLANNEL-");
    let matters = !matches!(found.hit.effect, Effect::Translate(_)) || flow.is_between_pods();
    matters && !is_ours
}

fn is_policy(found: &Found) -> bool {
    let table = found.table.split(' ').nth(1).unwrap_or_default();
    POLICIES.iter().any(|start| table.starts_with(start) || found.hit.chain.starts_with(start))
}

/// Adds a hit to the stops. `pod` is the only pod that it concerns.
fn note(all: &mut Collected, found: Found, packet: &Packet, legacy: bool, pod: Option<IpAddr>) {
    let Found { table, hook, hit, rule, entered } = found;
    let key = (table.clone(), hit.clone());
    let is_new = !all.contains_key(&key);
    let stop = all.entry(key).or_insert_with(|| Stop {
        hook: hook.to_string(),
        rule,
        entered,
        legacy,
        ..Stop::new(hit.effect, packet.family, &table, &hit.chain)
    });
    match pod {
        Some(_) if !is_new && stop.pods.is_empty() => {}
        Some(pod) => {
            stop.pods.insert(pod);
            stop.flows.insert(packet.flow);
        }
        None => {
            stop.pods.clear();
            stop.flows.insert(packet.flow);
        }
    }
}

/// A base chain.
struct Start {
    family: TableFamily,
    head: ChainHead,
    base: Base,
}

/// The stops in nf_tables.
fn nf_tables(pods: &Dual<PodPackets>) -> Result<Followed, Error> {
    let about = |error| Error::kernel("nftables", error);
    let mut socket = NetfilterSocket::open().map_err(about)?;
    let queues = Queues::read();
    nftables::at_one_moment(&mut socket, about, |socket| {
        let starts = starts(socket).map_err(about)?;
        let mut known: HashMap<(u8, String), Known> = HashMap::new();
        let mut all = Followed::default();
        for (packets, pods) in pods.iter() {
            let mut budget = MOST_RULES;
            all.stops.extend(follow(pods, false, |stage, packet| {
                let mut found = Vec::new();
                for start in &starts {
                    if !start.sees(stage, packet) {
                        continue;
                    }
                    let table = Table { family: start.family, name: &start.head.table };
                    let read = known
                        .entry((start.family.protocol(), start.head.table.clone()))
                        .or_default();
                    let mut source = NftTable {
                        socket: &mut *socket,
                        table,
                        queues: &queues,
                        known: std::mem::take(read),
                    };
                    let walked = start.walk(&mut source, stage, packet, &mut budget);
                    *read = source.known;
                    found.extend(walked?);
                }
                Ok(found)
            })?);
            all.note(format!("nftables, {packets} packets"), budget);
        }
        Ok(all)
    })
}

/// All base chains of tables that are in effect, in the order in which packets pass them.
fn starts(socket: &mut NetfilterSocket) -> Result<Vec<Start>, KernelError> {
    let mut starts = Vec::new();
    let mut dormant: HashMap<(u8, String), bool> = HashMap::new();
    for family in TableFamily::ALL {
        for head in ChainHead::all(socket, family)? {
            let Some(base) = head.base.clone() else { continue };
            let key = (family.protocol(), head.table.clone());
            let is_dormant = match dormant.get(&key) {
                Some(is_dormant) => *is_dormant,
                None => {
                    let table = Table { family, name: &head.table };
                    let found = table.head(socket)?.is_some_and(|it| it.flags & DORMANT != 0);
                    dormant.insert(key, found);
                    found
                }
            };
            if !is_dormant {
                starts.push(Start { family, head, base });
            }
        }
    }
    starts.sort_by_key(|start| start.base.priority);
    Ok(starts)
}

impl Start {
    /// Whether the packet passes the chain in this hook.
    fn sees(&self, stage: Stage, packet: &Packet) -> bool {
        let is_hook = stage.hook.number(self.family, packet.family) == Some(self.base.hook);
        let device = if stage.hook == Hook::Egress { stage.to } else { stage.from };
        let is_device = !stage.hook.is_of_devices()
            || self.head.devices.iter().any(|name| device.is(name) == Some(true));
        // Only the first translation counts.
        let is_translated = self.base.kind == "nat" && packet.translated;
        is_hook && is_device && !is_translated
    }

    fn walk(
        &self,
        source: &mut NftTable<'_>,
        stage: Stage,
        packet: &mut Packet,
        budget: &mut usize,
    ) -> Result<Vec<Found>, Error> {
        let family = packet.family;
        let policy = (self.base.policy == verdict::DROP).then_some(Effect::Drop);
        let mut walk = Walk { source, packet, hits: Vec::new(), entered: Vec::new(), budget };
        walk.base(&self.head.name, policy)?;
        let Walk { source, hits, entered, .. } = walk;
        let mut all = Vec::new();
        for hit in hits {
            let rules = walk::Source::rules(source, &hit.chain)?;
            let rule = hit.rule.and_then(|n| Some((n, rules.get(n)?)));
            all.push(Found {
                table: format!("{} {}", self.family, self.head.table),
                hook: stage.hook,
                rule: rule.map(|(n, rule)| {
                    let text = text::text(&rule.instructions, family);
                    StoppingRule::new(text, n + 1, Some(rule.handle))
                }),
                hit,
                entered: entered.clone(),
            });
        }
        Ok(all)
    }
}

/// The stops in the output of `iptables-legacy-save`.
fn in_saved(saved: &str, pods: &PodPackets, queues: &Queues) -> Result<Followed, Error> {
    let mut budget = MOST_RULES;
    let stops = saved_stops(saved, pods, queues, &mut budget)?;
    let mut followed = Followed { stops, unread: Vec::new() };
    followed.note(format!("iptables-legacy, {} packets", pods.network.family()), budget);
    Ok(followed)
}

fn saved_stops(
    saved: &str,
    pods: &PodPackets,
    queues: &Queues,
    budget: &mut usize,
) -> Result<Vec<Stop>, Error> {
    let saved = Saved::read(saved);
    let table_family = TableFamily::from(pods.network.family());
    follow(pods, true, |stage, packet| {
        let mut found = Vec::new();
        let Some(chain) = stage.hook.built_in() else { return Ok(found) };
        for name in TABLES {
            let Some(table) = saved.table(name) else { continue };
            if table.chain(chain).is_none() || (name == "nat" && packet.translated) {
                continue;
            }
            let is_dropped = table.chain(chain).is_some_and(|it| it.policy == Some("DROP"));
            let mut source = IptablesTable { table, queues };
            let mut walk = Walk {
                source: &mut source,
                packet: &mut *packet,
                hits: Vec::new(),
                entered: Vec::new(),
                budget: &mut *budget,
            };
            walk.base(chain, is_dropped.then_some(Effect::Drop))?;
            let Walk { hits, entered, .. } = walk;
            found.extend(hits.into_iter().map(|hit| Found {
                table: format!("{table_family} {name}"),
                hook: stage.hook,
                rule: hit.rule.and_then(|n| {
                    let text = *table.rules(&hit.chain).get(n)?;
                    Some(StoppingRule::new(text, n + 1, None))
                }),
                hit,
                entered: entered.clone(),
            }));
        }
        Ok(found)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pods() -> PodPackets {
        PodPackets {
            network: "10.1.0.0/16".parse().unwrap(),
            own: "10.1.7.0/24".parse().unwrap(),
            peer: None,
            bridge: "cni0".parse().ok(),
            to_peers: vec!["flannel.1".parse().unwrap()],
            uplink: "eth0".parse().ok(),
            node: None,
            tunnel: None,
        }
    }

    /// The stops of a chain `FORWARD` with these rules, of other chains, and of a policy.
    fn forward(rules: &str, pods: &PodPackets) -> Vec<String> {
        let rules = rules.split("; ").map(|rule| format!("-A {rule}\n")).collect::<String>();
        let saved = format!(
            "*filter\n:FORWARD DROP [0:0]\n:A - [0:0]\n:B - [0:0]\n:END - [0:0]\n-A END -j DROP\n\
             {rules}-A FORWARD -s 10.1.0.0/16 -j ACCEPT\n-A FORWARD -i flannel.1 -j ACCEPT\n\
             COMMIT\n"
        );
        let queues = Queues { read: Some([3].into()) };
        let stops = in_saved(&saved, pods, &queues).unwrap().stops;
        let text = |stop: &Stop| {
            let rule = stop.rule.as_ref().map_or(0, |rule| rule.number);
            format!("{:?} {} {rule}", stop.effect, stop.chain)
        };
        stops.iter().map(text).collect()
    }

    /// A condition that is not known protects the rules behind it, unless nothing can end there.
    #[test]
    fn a_walk_finds_what_a_packet_surely_reaches() {
        for (rules, found) in [
            ("FORWARD -j A", &[][..]),
            ("FORWARD -j A; A -j END", &["Drop END 1"]),
            ("FORWARD -j A; A -j RETURN; A -j DROP", &[]),
            ("FORWARD -g A; A -j RETURN", &["Drop FORWARD 0"]),
            ("FORWARD -j A; A -g B; A -j DROP; B -i cni0 -j RETURN", &[]),
            ("FORWARD -m x --x -j END; FORWARD -j DROP", &[]),
            ("FORWARD -m x --x -j A; FORWARD -j DROP; A -j LOG", &["Drop FORWARD 2"]),
            ("FORWARD -m x --x -j A; FORWARD -j DROP; A -m y --y -j ACCEPT", &[]),
            ("FORWARD -j A; FORWARD -j DROP; A -m x --x -j RETURN", &["Drop FORWARD 2"]),
            ("FORWARD -j A; A -m x --x -j RETURN; A -j DROP; FORWARD -j REJECT", &[]),
            ("FORWARD -m x --x -g A; FORWARD -j DROP", &[]),
            ("FORWARD -j A; A -j B; B -j A", &[]),
            ("FORWARD -j NFQUEUE --queue-num 3", &[]),
            ("FORWARD -j NFQUEUE --queue-num 4", &["Queue FORWARD 1"]),
            ("FORWARD -j NFQUEUE --queue-num 4 --queue-bypass", &[]),
            ("FORWARD -j NEWTARGET; FORWARD -j DROP", &[]),
            ("FORWARD -p esp -j DROP; FORWARD -p ipencap -j DROP", &[]),
            ("FORWARD ! -p esp -j DROP", &["Drop FORWARD 1"]),
            ("FORWARD -p newproto -j ACCEPT; FORWARD -j DROP", &[]),
            ("FORWARD ! -p newproto -j DROP", &[]),
            ("FORWARD -m set ! --match-set x src -j DROP", &[]),
            ("FORWARD -m conntrack ! --ctstate NEW -j DROP", &[]),
        ] {
            assert_eq!(forward(rules, &pods()), found, "{rules}");
        }
    }

    /// Calico gives each pod a device of its own.
    #[test]
    fn without_a_bridge_no_rule_about_a_device_is_found() {
        let unknown = PodPackets { bridge: None, uplink: None, to_peers: Vec::new(), ..pods() };
        for rules in ["FORWARD -i cni0 -j DROP", "FORWARD ! -i cali+ -j DROP"] {
            assert_eq!(forward(rules, &unknown), [""; 0], "{rules}");
        }
        assert_eq!(forward("FORWARD -s 10.1.7.0/24 -j DROP", &unknown), ["Drop FORWARD 1"]);
    }

    /// The rules of a built-in chain that stop packets of a protocol of the tunnel or of this node.
    fn flows(chain: &str, rule: &str, pods: &PodPackets) -> Vec<Flow> {
        let saved = format!("*filter\n:{chain} ACCEPT [0:0]\n-A {chain} {rule}\nCOMMIT\n");
        let followed = in_saved(&saved, pods, &Queues::default()).unwrap();
        followed.stops.into_iter().flat_map(|stop| stop.flows).collect()
    }

    #[test]
    fn packets_that_this_node_sends_are_followed() {
        let ipip = flannel_core::backend::Transport::Protocol(4);
        let [from, to] = ["192.0.2.8", "192.0.2.7"].map(|address| address.parse().unwrap());
        let tunnel = Some(TunnelPackets { from, to, transports: vec![ipip] });
        let pods = PodPackets { tunnel, ..pods() };
        let out = Flow::TunnelOut(ipip);
        for (chain, rule, found) in [
            ("OUTPUT", "-j DROP", &[Flow::FromHost, out][..]),
            ("POSTROUTING", "-o eth0 -p ipencap -j DROP", &[out]),
            ("OUTPUT", "-s 192.0.2.7/32 -d 192.0.2.8/32 -j DROP", &[out]),
            ("OUTPUT", "-p gre -j DROP", &[]),
            ("INPUT", "-p ipencap -j DROP", &[Flow::Tunnel(ipip)]),
            ("OUTPUT", "-m addrtype --src-type LOCAL -j DROP", &[Flow::FromHost, out]),
            ("OUTPUT", "-m addrtype ! --src-type LOCAL -j DROP", &[]),
            ("OUTPUT", "-s 10.1.7.0/32 -j DROP", &[Flow::FromHost]),
        ] {
            assert_eq!(flows(chain, rule, &pods), found, "{chain} {rule}");
        }
        let uplink: flannel_core::object::LinkName = "eth0".parse().unwrap();
        let direct = PodPackets { to_peers: vec![uplink], node: Some(to), tunnel: None, ..pods };
        for (rule, found) in
            [("-s 192.0.2.7/32 -j DROP", &[Flow::FromHost][..]), ("-s 10.1.7.0/32 -j DROP", &[])]
        {
            assert_eq!(flows("OUTPUT", rule, &direct), found, "{rule}");
        }
    }

    /// The first packets of all kinds are followed before those of single pods.
    #[test]
    fn rules_that_are_not_followed_are_reported() {
        let saved = "*filter\n:FORWARD ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n\
                     -A FORWARD -s 10.1.7.9/32 -j DROP\n-A OUTPUT -j DROP\nCOMMIT\n";
        let (pods, queues) = (pods(), Queues::default());
        let mut most = usize::MAX;
        saved_stops(saved, &pods, &queues, &mut most).unwrap();
        // Two protocols pass FORWARD three times and OUTPUT once.
        let mut budget = 8;
        let stops = saved_stops(saved, &pods, &queues, &mut budget).unwrap();
        assert!(usize::MAX - most > 8);
        assert_eq!((budget, stops.len(), &*stops[0].chain), (0, 1, "OUTPUT"));
        let mut followed = Followed::default();
        followed.note("iptables-legacy, IPv4 packets".to_owned(), 1);
        assert!(followed.unread.is_empty());
        followed.note("iptables-legacy, IPv4 packets".to_owned(), budget);
        assert!(followed.unread[0].to_string().contains("more than 4000000 rules"));
    }
}
