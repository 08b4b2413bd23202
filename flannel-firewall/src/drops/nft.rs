//! The rules of nf_tables: runs a rule for a packet, with registers of which each byte is known or
//! not.

use std::collections::HashMap;
use std::rc::Rc;

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::kernel::KernelError;
use flannel_netlink::netfilter::NetfilterSocket;
use flannel_netlink::nftables::program::{
    Comparison, Element, GOTO, Instruction, JUMP, Jump, Lookup, Program, Property, REGISTERS,
};
use flannel_netlink::nftables::{Table, meta, verdict};

use super::extension;
use super::packet::{Byte, Packet};
use super::walk::{Judgement, Match, Source, Way};
use super::{Effect, Queues};
use crate::error::Error;

/// `NFT_META_…` that [`meta`] lacks.
const PROTOCOL: u32 = 1;
const IN_INDEX: u32 = 4;
const OUT_INDEX: u32 = 5;
const PACKET_TYPE: u32 = 19;
/// `NFT_CT_…`, and the bits of states and of the status of a connection.
const STATE: u32 = 0;
const DIRECTION: u32 = 1;
const STATUS: u32 = 2;
const NEW: u32 = 8;
const UNTRACKED: u32 = 64;
/// `NFT_FIB_RESULT_ADDRTYPE`, `NFTA_FIB_F_SADDR`, `NFTA_FIB_F_PRESENT`, `RTN_UNICAST`,
/// `RTN_LOCAL`.
const ADDRESS_KIND: u32 = 3;
const OF_SOURCE: u32 = 1;
const PRESENT: u32 = 32;
const UNICAST: u32 = 1;
const LOCAL: u32 = 2;
/// `NF_QUEUE`, and the bits of a verdict without its parameters.
const QUEUE: u32 = 3;
const CODE: u32 = 0xffff;
/// `NFT_PAYLOAD_LL_HEADER`, and the offset of the type in an Ethernet header.
const LINK: u32 = 0;
const TRANSPORT: u32 = 2;
/// Instructions that only decide whether a rule matches, or load a value.
const CONDITIONS: [&str; 15] = [
    "limit",
    "connlimit",
    "quota",
    "osf",
    "socket",
    "hash",
    "numgen",
    "xfrm",
    "tunnel",
    "rt",
    "exthdr",
    "bitwise",
    "cmp",
    "meta",
    "inner",
];
const ETHERNET_TYPE: usize = 12;

/// A table whose rules are read when a packet reaches them.
pub(super) struct NftTable<'a> {
    pub(super) socket: &'a mut NetfilterSocket,
    pub(super) table: Table<'a>,
    pub(super) queues: &'a Queues,
    /// What was read already.
    pub(super) known: Known,
}

/// What was read of a table.
#[derive(Default)]
pub(super) struct Known {
    chains: HashMap<String, Rc<[Program]>>,
    key_lens: HashMap<String, Option<usize>>,
    elements: HashMap<(String, Vec<u8>), Option<Element>>,
}

fn about(error: KernelError) -> Error {
    Error::kernel("nftables", error)
}

impl Source for NftTable<'_> {
    type Rule = Program;

    fn rules(&mut self, chain: &str) -> Result<Rc<[Program]>, Error> {
        if let Some(known) = self.known.chains.get(chain) {
            return Ok(Rc::clone(known));
        }
        let rules: Rc<[Program]> = self.table.programs(self.socket, chain).map_err(about)?.into();
        self.known.chains.insert(chain.to_owned(), Rc::clone(&rules));
        Ok(rules)
    }

    fn judge(&mut self, rule: &Program, packet: &mut Packet) -> Result<Judgement, Error> {
        let mut run = Run {
            table: self,
            packet,
            registers: [None; REGISTERS],
            addresses: [None; REGISTERS],
            port: only_port(&rule.instructions),
            result: Judgement::new(Match::Yes, Way::On),
        };
        for instruction in &rule.instructions {
            let matches = run.step(instruction)?;
            run.result.matches = run.result.matches.and(matches);
            if run.result.matches == Match::No || run.result.way != Way::On {
                break;
            }
        }
        Ok(run.result)
    }
}

impl NftTable<'_> {
    /// The element of a set with a key. `None` if the key is not known.
    fn element(&mut self, set: &str, key: &[Byte]) -> Result<Option<Option<Element>>, Error> {
        let len = match self.known.key_lens.get(set) {
            Some(len) => *len,
            None => {
                let len = self.table.key_len(self.socket, set).map_err(about)?;
                self.known.key_lens.insert(set.to_owned(), len);
                len
            }
        };
        let Some(key) = len.and_then(|len| key.get(..len)) else { return Ok(None) };
        let Some(key) = key.iter().copied().collect::<Option<Vec<u8>>>() else { return Ok(None) };
        let of = (set.to_owned(), key);
        if let Some(known) = self.known.elements.get(&of) {
            return Ok(Some(known.clone()));
        }
        let element = self.table.element(self.socket, set, &of.1).map_err(about)?;
        self.known.elements.insert(of, element.clone());
        Ok(Some(element))
    }
}

/// A run of a rule.
struct Run<'a, 'b> {
    table: &'a mut NftTable<'b>,
    packet: &'a mut Packet,
    registers: [Byte; REGISTERS],
    /// The bytes of an address of the packet: their numbers, at the places where they were loaded.
    addresses: [Option<usize>; REGISTERS],
    /// The only destination port that the rule asks for.
    port: Option<u16>,
    result: Judgement,
}

/// The only destination port that a rule asks for.
fn only_port(instructions: &[Instruction]) -> Option<u16> {
    let mut is_port = false;
    for instruction in instructions {
        match instruction {
            Instruction::Load { from, len, .. } => {
                is_port = *from == Property::Header { base: 2, offset: 2 } && *len == Some(2);
            }
            Instruction::Compare { how: Comparison::Equal, value, .. } if is_port => {
                return Some(u16::from_be_bytes(value.as_slice().try_into().ok()?));
            }
            Instruction::Match(it) => match extension::only_port(it) {
                None => {}
                port => return port,
            },
            _ => {}
        }
    }
    None
}

impl Run<'_, '_> {
    fn step(&mut self, instruction: &Instruction) -> Result<Match, Error> {
        match instruction {
            Instruction::Load { from, to, len } => self.load(from, *to, *len),
            Instruction::Value { to, value } => self.store(*to, &known(value)),
            Instruction::Mask { from, to, mask, xor } => self.mask(*from, *to, mask, xor),
            Instruction::Reorder { from, to, len, size } => {
                let mut bytes = self.at(*from, *len).to_vec();
                if cfg!(target_endian = "little") {
                    bytes.chunks_mut((*size).max(1)).for_each(<[Byte]>::reverse);
                }
                self.store(*to, &bytes);
            }
            Instruction::Compare { at, how, value } => {
                self.note(*at, value);
                return Ok(compare(self.at(*at, value.len()), *how, value));
            }
            Instruction::Range { at, inside, low, high } => {
                let value = self.at(*at, low.len());
                let within = compare(value, Comparison::GreaterOrEqual, low).and(compare(
                    value,
                    Comparison::LessOrEqual,
                    high,
                ));
                return Ok(within.negated(!inside));
            }
            Instruction::Lookup { set, at, then } => return self.lookup(set, *at, *then),
            Instruction::Verdict(jump) => self.result.way = self.way(jump),
            Instruction::SetMark { from } => {
                let mark = self.at(*from, 4);
                self.result.mark = Some(std::array::from_fn(|n| mark.get(n).copied().flatten()));
            }
            Instruction::Nat(how) => self.result.way = Way::End(Effect::Translate(*how)),
            Instruction::Reject => self.result.way = Way::End(Effect::Reject),
            Instruction::Queue { number, bypass } => {
                self.result.way = self.table.queues.way(*number, *bypass);
            }
            Instruction::Untrack => self.result.untracks = true,
            Instruction::Match(it) => return Ok(extension::matches(it, self.packet)),
            Instruction::Target(it) => {
                if it.name == "CT" || it.name == "NOTRACK" {
                    self.packet.tracked = None;
                }
                let (way, mark) = extension::target(it, self.packet, self.table.queues);
                self.result.way = way;
                self.result.mark = mark;
            }
            Instruction::Neutral => {}
            Instruction::Other(name) if name == "objref" => {}
            Instruction::Other(name) if CONDITIONS.contains(&&**name) => {
                return Ok(Match::Unknown);
            }
            // It may end the way of the packet, as `fwd`, `tproxy` and `synproxy` do.
            _ => {
                self.result.way = Way::Unknown;
                return Ok(Match::Unknown);
            }
        }
        Ok(Match::Yes)
    }

    fn at(&self, at: usize, len: usize) -> &[Byte] {
        &self.registers[at..REGISTERS.min(at + len)]
    }

    /// Stores a value, and zeros up to the end of its last word.
    fn store(&mut self, to: usize, value: &[Byte]) {
        let end = REGISTERS.min(to + value.len().next_multiple_of(4));
        for (n, place) in self.registers[to..end].iter_mut().enumerate() {
            *place = value.get(n).copied().unwrap_or(Some(0));
        }
        self.addresses[to..end].fill(None);
    }

    fn mask(&mut self, from: usize, to: usize, mask: &[u8], xor: &[u8]) {
        let addresses = self.addresses;
        let masked = |(n, byte): (usize, &Byte)| match (mask.get(n)?, xor.get(n).unwrap_or(&0)) {
            (0, xor) => Some(*xor),
            (mask, xor) => byte.map(|byte| (byte & mask) ^ xor),
        };
        let value: Vec<Byte> = self.at(from, mask.len()).iter().enumerate().map(masked).collect();
        self.store(to, &value);
        for n in 0..value.len() {
            self.addresses[to + n] = addresses[from + n].filter(|_| mask[n] != 0);
        }
    }

    fn load(&mut self, from: &Property, to: usize, len: Option<usize>) {
        let value = match from {
            Property::Header { base, offset } => {
                return self.load_header(*base, *offset, to, len.unwrap_or(0));
            }
            Property::Meta(key) => self.meta(*key),
            Property::Connection { key, .. } => self.connection(*key),
            Property::Route { result: ADDRESS_KIND, flags } if flags & PRESENT == 0 => {
                let flow = self.packet.flow;
                let is_of_source = flags & OF_SOURCE != 0;
                let of_host = if is_of_source { flow.is_sent_here() } else { flow.ends_here() };
                let kind = if of_host { LOCAL } else { UNICAST };
                kind.to_ne_bytes().map(Some).to_vec()
            }
            _ => vec![None; 16],
        };
        self.store(to, &value);
    }

    fn load_header(&mut self, base: u32, offset: usize, to: usize, len: usize) {
        let packet = &*self.packet;
        let (network, transport) = packet.headers();
        let link = || {
            let mut header = vec![None; 14];
            header[ETHERNET_TYPE..].copy_from_slice(&packet.ethernet().map(Some));
            header
        };
        let header = match base {
            LINK => link(),
            1 => network,
            TRANSPORT => transport,
            // What is behind the header of the transport, or in a tunnel.
            _ => Vec::new(),
        };
        let value: Vec<Byte> =
            (offset..offset + len).map(|n| header.get(n).copied().flatten()).collect();
        self.store(to, &value);
        if base == 1 {
            let first = if self.packet.family == Family::V4 { 12 } else { 8 };
            let len_of_address = usize::from(self.packet.family.bits() / 8);
            for n in 0..len.min(REGISTERS - to) {
                let place = (offset + n).checked_sub(first).filter(|n| *n < 2 * len_of_address);
                self.addresses[to + n] = place.map(|n| n % len_of_address);
            }
        }
    }

    fn meta(&self, key: u32) -> Vec<Byte> {
        let packet = &*self.packet;
        match key {
            PROTOCOL => packet.ethernet().map(Some).to_vec(),
            meta::MARK => packet.mark.to_vec(),
            IN_INDEX => packet.from.index().to_vec(),
            OUT_INDEX => packet.to.index().to_vec(),
            meta::IIFNAME => packet.from.name().to_vec(),
            meta::OIFNAME => packet.to.name().to_vec(),
            meta::NFPROTO => {
                vec![Some(flannel_netlink::nftables::TableFamily::from(packet.family).protocol())]
            }
            meta::L4PROTO => vec![Some(packet.protocol)],
            PACKET_TYPE => vec![Some(0)],
            _ => vec![None; 16],
        }
    }

    /// A property of a connection that begins.
    fn connection(&self, key: u32) -> Vec<Byte> {
        let number = |number: Option<u32>| match number {
            Some(number) => number.to_ne_bytes().map(Some).to_vec(),
            None => vec![None; 4],
        };
        match key {
            STATE => {
                number(self.packet.tracked.map(|tracked| if tracked { NEW } else { UNTRACKED }))
            }
            DIRECTION => vec![Some(0)],
            STATUS if !self.packet.translated => number(Some(0)),
            _ => vec![None; 16],
        }
    }

    /// Notes the address or the subnet that a rule compares with an address of the packet.
    fn note(&mut self, at: usize, value: &[u8]) {
        let len = usize::from(self.packet.family.bits() / 8);
        let is_start = self.addresses.get(at).copied().flatten() == Some(0);
        if !is_start || value.len() > len {
            return;
        }
        let mut bytes = value.to_vec();
        bytes.resize(len, 0);
        let bits = 8 * value.len();
        // A shorter prefix in whole bytes has a mask before: its zero bytes count as the mask.
        let zeros = bytes[..value.len()].iter().rev().take_while(|byte| **byte == 0).count();
        let masked =
            (0..value.len()).rev().take_while(|n| self.addresses[at + n].is_none()).count();
        let bits = bits - 8 * masked.min(zeros);
        let address = match self.packet.family {
            Family::V4 => <[u8; 4]>::try_from(bytes).map(Into::into),
            Family::V6 => <[u8; 16]>::try_from(bytes).map(Into::into),
        };
        let len = u8::try_from(bits).ok();
        if let (Ok(address), Some(len)) = (address, len)
            && let Some(subnet) = Subnet::new(address, len)
        {
            self.packet.note(subnet, self.port);
        }
    }

    fn lookup(&mut self, set: &str, at: usize, then: Lookup) -> Result<Match, Error> {
        let key = self.at(at, REGISTERS).to_vec();
        let found = self.table.element(set, &key)?;
        Ok(match (found, then) {
            (Some(found), Lookup::Continue(is_in)) => (found.is_some() == is_in).into(),
            (Some(Some(Element { verdict: Some(jump), .. })), Lookup::Verdict) => {
                self.result.way = self.way(&jump);
                Match::Yes
            }
            (Some(Some(element)), Lookup::Load(to)) => {
                self.store(to, &known(&element.value));
                Match::Yes
            }
            (Some(None), _) => Match::No,
            (_, Lookup::Load(to)) => {
                self.store(to, &[None; 16]);
                Match::Unknown
            }
            (_, Lookup::Verdict) => {
                self.result.way = Way::Unknown;
                Match::Unknown
            }
            _ => Match::Unknown,
        })
    }

    fn way(&self, jump: &Jump) -> Way {
        let chain = || jump.chain.clone().unwrap_or_default();
        match jump.code {
            JUMP => Way::Jump(chain()),
            GOTO => Way::Goto(chain()),
            verdict::RETURN => Way::Return,
            // NFT_CONTINUE.
            u32::MAX => Way::On,
            verdict::ACCEPT => Way::Accept,
            code if code & CODE == verdict::DROP => Way::End(Effect::Drop),
            code if code & CODE == QUEUE => {
                self.table.queues.way(u16::try_from(code >> 16).ok(), false)
            }
            _ => Way::Unknown,
        }
    }
}

fn known(value: &[u8]) -> Vec<Byte> {
    value.iter().map(|byte| Some(*byte)).collect()
}

/// Compares bytes, of which the first is the most significant.
fn compare(left: &[Byte], how: Comparison, right: &[u8]) -> Match {
    use std::cmp::Ordering;
    if left.len() < right.len() {
        return Match::Unknown;
    }
    if matches!(how, Comparison::Equal | Comparison::NotEqual) {
        let differs = left.iter().zip(right).any(|(l, r)| l.is_some_and(|l| l != *r));
        let equal = match () {
            () if differs => Match::No,
            () if left[..right.len()].iter().all(Option::is_some) => Match::Yes,
            () => Match::Unknown,
        };
        return equal.negated(how == Comparison::NotEqual);
    }
    let Some(left) = left[..right.len()].iter().copied().collect::<Option<Vec<u8>>>() else {
        return Match::Unknown;
    };
    let order = left[..].cmp(right);
    match how {
        Comparison::Less => order == Ordering::Less,
        Comparison::LessOrEqual => order != Ordering::Greater,
        Comparison::Greater => order == Ordering::Greater,
        _ => order != Ordering::Less,
    }
    .into()
}
