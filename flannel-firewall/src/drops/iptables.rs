//! The rules of iptables, in the output of `iptables-save`.

use std::net::IpAddr;
use std::rc::Rc;

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_netlink::nftables::program::Translation;

use super::extension::{is_neutral, masked_mark, new_mark};
use super::packet::{FROM_PORT, Packet, TCP, UDP};
use super::walk::{Judgement, Match, Source, Way};
use super::{Effect, Queues};
use crate::error::Error;
use crate::iptables::saved::{SavedTable, words};

/// A table in the output of `iptables-save`.
pub(super) struct IptablesTable<'a> {
    pub(super) table: &'a SavedTable<'a>,
    pub(super) queues: &'a Queues,
}

impl<'a> Source for IptablesTable<'a> {
    type Rule = &'a str;

    fn rules(&mut self, chain: &str) -> Result<Rc<[&'a str]>, Error> {
        Ok(self.table.rules(chain).into())
    }

    fn judge(&mut self, rule: &&'a str, packet: &mut Packet) -> Result<Judgement, Error> {
        // Most rules of a large host are about one address, so it is compared first.
        if let Some(address) = rule.strip_prefix("-d ").or_else(|| rule.strip_prefix("-s ")) {
            let end = address.find(' ').unwrap_or(address.len());
            let side = if rule.starts_with("-d ") { packet.destination } else { packet.source };
            if is_in(&address[..end], side, only_port(rule), packet) == Match::No {
                return Ok(Judgement::new(Match::No, Way::On));
            }
        }
        Ok(self.read(&words(rule), packet))
    }
}

impl IptablesTable<'_> {
    fn read(&self, words: &[String], packet: &mut Packet) -> Judgement {
        let mut result = Judgement::new(Match::Yes, Way::On);
        let mut words = words.iter().map(String::as_str);
        let mut module = "";
        let mut negated = false;
        while let Some(word) = words.next() {
            let matches = match word {
                "!" => {
                    negated = true;
                    continue;
                }
                "-m" => {
                    module = words.next().unwrap_or_default();
                    continue;
                }
                "-j" | "-g" => {
                    let target = words.next().unwrap_or_default();
                    self.target(word, target, words, packet, &mut result);
                    break;
                }
                _ => condition(module, word, &mut words, packet),
            };
            result.matches = result.matches.and(matches.negated(negated));
            negated = false;
            if result.matches == Match::No {
                break;
            }
        }
        result
    }

    /// Takes in where a target leads the packet. `options` are the words after it.
    fn target<'w>(
        &self,
        how: &str,
        target: &str,
        options: impl Iterator<Item = &'w str>,
        packet: &mut Packet,
        result: &mut Judgement,
    ) {
        let options: Vec<&str> = options.collect();
        let option = |name: &str| {
            let n = options.iter().position(|word| *word == name)?;
            options.get(n + 1).copied()
        };
        result.way = match target {
            "ACCEPT" => Way::Accept,
            "DROP" => Way::End(Effect::Drop),
            "RETURN" => Way::Return,
            "REJECT" => Way::End(Effect::Reject),
            "MASQUERADE" => Way::End(Effect::Translate(Translation::Masquerade)),
            "SNAT" | "NETMAP" => Way::End(Effect::Translate(Translation::Source)),
            "DNAT" => Way::End(Effect::Translate(Translation::Destination)),
            "REDIRECT" => Way::End(Effect::Translate(Translation::Redirect)),
            "NFQUEUE" => {
                let number = option("--queue-num").and_then(|number| number.parse().ok());
                self.queues.way(number, options.contains(&"--queue-bypass"))
            }
            "MARK" => {
                let value = option("--set-xmark").and_then(mark_and_mask);
                let new = |(mark, mask)| new_mark(packet.mark, mark, mask);
                result.mark = Some(value.map_or([None; 4], new));
                Way::On
            }
            "CONNMARK" => {
                result.mark = Some([None; 4]);
                Way::On
            }
            "CT" | "NOTRACK" => {
                packet.tracked = None;
                Way::On
            }
            other if is_neutral(other) => Way::On,
            chain if self.table.chain(chain).is_none() => Way::Unknown,
            chain if how == "-g" => Way::Goto(chain.to_owned()),
            chain => Way::Jump(chain.to_owned()),
        };
    }
}

/// Whether the packet fulfils a condition, whose values are the next words.
fn condition<'w>(
    module: &str,
    option: &str,
    words: &mut impl Iterator<Item = &'w str>,
    packet: &mut Packet,
) -> Match {
    // An option without a value takes no word.
    let physdev = module == "physdev" && option == "--physdev-is-bridged";
    if physdev || option == "-f" {
        // Packets of pods are routed, and no fragments.
        return Match::No;
    }
    if !option.starts_with('-') {
        return Match::Unknown;
    }
    let known = |option: &str| {
        matches!(option, "-s" | "-d" | "-i" | "-o" | "-p" | "--comment" | "--mark" | "--state")
            || option.starts_with("--ct")
            || option.ends_with("port")
            || option.ends_with("ports")
            || option.ends_with("-type")
            || option == "--tcp-flags"
    };
    if !known(option) {
        return Match::Unknown;
    }
    let value = words.next().unwrap_or_default();
    match option {
        "--comment" => Match::Yes,
        "-s" => is_in(value, packet.source, None, packet),
        "-d" => is_in(value, packet.destination, None, packet),
        "-i" => packet.from.is(value).into(),
        "-o" => packet.to.is(value).into(),
        "-p" if value == "all" => Match::Yes,
        "-p" => protocol(value).map(|protocol| protocol == packet.protocol).into(),
        "--ctstate" | "--state" => {
            let word = packet.tracked.map(|tracked| if tracked { "NEW" } else { "UNTRACKED" });
            word.map(|word| value.split(',').any(|state| state == word)).into()
        }
        "--mark" if module == "mark" => match mark_and_mask(value) {
            Some((mark, mask)) => masked_mark(packet.mark, mark, mask).into(),
            None => Match::Unknown,
        },
        "--sport" | "--sports" | "--source-ports" => has_port(value, &[FROM_PORT]),
        "--dport" | "--dports" | "--destination-ports" => has_port(value, &[packet.port]),
        "--ports" => has_port(value, &[FROM_PORT, packet.port]),
        "--src-type" | "--dst-type" => {
            let flow = packet.flow;
            let is_source = option == "--src-type";
            let is_here = if is_source { flow.is_sent_here() } else { flow.ends_here() };
            let of_packet = if is_here { "LOCAL" } else { "UNICAST" };
            value.split(',').any(|kind| kind == of_packet).into()
        }
        "--tcp-flags" => {
            let wanted = words.next().unwrap_or_default();
            let is_asked = value.split(',').any(|flag| flag == "SYN" || flag == "ALL");
            ((wanted == "SYN" && is_asked) || (wanted == "NONE" && !is_asked)).into()
        }
        _ => Match::Unknown,
    }
}

/// The only destination port that a rule asks for.
fn only_port(rule: &str) -> Option<u16> {
    rule.split_once("--dport ")?.1.split(' ').next()?.parse().ok()
}

fn has_port(ranges: &str, ports: &[u16]) -> Match {
    let is_in = |range: &str| {
        let (low, high) = range.split_once(':').unwrap_or((range, range));
        let low = if low.is_empty() { Ok(0) } else { low.parse::<u16>() };
        let high = if high.is_empty() { Ok(u16::MAX) } else { high.parse::<u16>() };
        match (low, high) {
            (Ok(low), Ok(high)) => ports.iter().any(|port| (low..=high).contains(port)),
            _ => false,
        }
    };
    ranges.split(',').any(is_in).into()
}

/// The number of a protocol. `None` for a name that is not known: `iptables-save` writes those of
/// `/etc/protocols`.
fn protocol(name: &str) -> Option<u8> {
    Some(match name {
        "icmp" => 1,
        "igmp" => 2,
        "ipencap" | "ipip" | "ipv4" => 4,
        "tcp" => TCP,
        "udp" => UDP,
        "dccp" => 33,
        "ipv6" => 41,
        "gre" => 47,
        "esp" | "ipv6-crypt" => 50,
        "ah" | "ipv6-auth" => 51,
        "ipv6-icmp" | "icmpv6" => 58,
        "ospf" => 89,
        "pim" => 103,
        "vrrp" => 112,
        "l2tp" => 115,
        "sctp" => 132,
        "mh" | "ipv6-mh" | "mobility-header" => 135,
        "udplite" => 136,
        number => return number.parse().ok(),
    })
}

/// A mark and a mask in the machine's byte order, such as `0x4000/0x4000`.
fn mark_and_mask(text: &str) -> Option<([u8; 4], [u8; 4])> {
    let (mark, mask) = text.split_once('/').unwrap_or((text, "0xffffffff"));
    let number = |text: &str| u32::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    Some((number(mark)?.to_ne_bytes(), number(mask)?.to_ne_bytes()))
}

/// Whether the address is in the subnet, which is noted.
fn is_in(text: &str, address: IpAddr, port: Option<u16>, packet: &mut Packet) -> Match {
    let bits = if packet.family == Family::V4 { 32 } else { 128 };
    let full = if text.contains('/') { text.to_owned() } else { format!("{text}/{bits}") };
    let Ok(subnet) = full.parse::<Subnet>() else { return Match::Unknown };
    packet.note(subnet, port);
    subnet.contains(address).into()
}
