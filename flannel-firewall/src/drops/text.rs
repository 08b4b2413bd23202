//! Rules of nf_tables as text, in the notation of `nft` as far as the instructions allow it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use flannel_core::address::Family;
use flannel_netlink::nftables::program::{
    Comparison, GOTO, Instruction, JUMP, Jump, Lookup, Property, Translation,
};
use flannel_netlink::nftables::{meta, verdict};

/// What was loaded last.
#[derive(Default)]
struct Loaded {
    name: String,
    kind: Kind,
    /// The length of the prefix that a mask keeps.
    prefix: Option<u32>,
    /// Another mask.
    mask: Option<String>,
}

#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum Kind {
    #[default]
    Bytes,
    Address,
    Name,
    /// A number in the machine's byte order.
    Number,
    State,
}

/// The rule. `family` is that of the packets that reach it.
pub(super) fn text(instructions: &[Instruction], family: Family) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut loaded = Loaded::default();
    for instruction in instructions {
        match instruction {
            Instruction::Load { from, len, .. } => loaded = load(from, *len, family),
            Instruction::Mask { mask, .. } => {
                let bits = mask.iter().map(|byte| byte.count_ones()).sum();
                match loaded.kind {
                    Kind::Address => loaded.prefix = Some(bits),
                    _ => loaded.mask = Some(hex(mask)),
                }
            }
            // `nft` writes the condition on the family only where it matters.
            Instruction::Compare { .. } if loaded.name == "meta nfproto" => {}
            Instruction::Compare { how, value, .. } => parts.push(compare(&loaded, *how, value)),
            Instruction::Range { low, high, .. } => {
                parts.push(format!("{} {}-{}", loaded.name, hex(low), hex(high)));
            }
            Instruction::Lookup { set, then, .. } => parts.push(lookup(&loaded, set, *then)),
            Instruction::Verdict(jump) => parts.push(of_verdict(jump)),
            Instruction::SetMark { .. } => parts.push("meta mark set …".to_owned()),
            Instruction::Nat(how) => parts.push(translation(*how).to_owned()),
            Instruction::Reject => parts.push("reject".to_owned()),
            Instruction::Queue { .. } => parts.push("queue".to_owned()),
            Instruction::Untrack => parts.push("notrack".to_owned()),
            Instruction::Match(it) if it.name == "comment" => {}
            Instruction::Match(it) => parts.push(format!("-m {}", it.name)),
            Instruction::Target(it) => parts.push(format!("-j {}", it.name)),
            Instruction::Other(name) => parts.push(name.clone()),
            _ => {}
        }
    }
    parts.join(" ")
}

fn load(from: &Property, len: Option<usize>, family: Family) -> Loaded {
    let (name, kind) = match from {
        Property::Meta(meta::IIFNAME) => ("iifname".to_owned(), Kind::Name),
        Property::Meta(meta::OIFNAME) => ("oifname".to_owned(), Kind::Name),
        Property::Meta(4) => ("iif".to_owned(), Kind::Number),
        Property::Meta(5) => ("oif".to_owned(), Kind::Number),
        Property::Meta(meta::MARK) => ("meta mark".to_owned(), Kind::Number),
        Property::Meta(meta::NFPROTO) => ("meta nfproto".to_owned(), Kind::Bytes),
        Property::Meta(meta::L4PROTO) => ("meta l4proto".to_owned(), Kind::Bytes),
        Property::Meta(key) => (format!("meta {key}"), Kind::Bytes),
        Property::Header { base: 1, offset } => match (family, offset) {
            (Family::V4, 12) => ("ip saddr".to_owned(), Kind::Address),
            (Family::V4, 16) => ("ip daddr".to_owned(), Kind::Address),
            (Family::V6, 8) => ("ip6 saddr".to_owned(), Kind::Address),
            (Family::V6, 24) => ("ip6 daddr".to_owned(), Kind::Address),
            (Family::V4, 9) => ("ip protocol".to_owned(), Kind::Bytes),
            (Family::V6, 6) => ("ip6 nexthdr".to_owned(), Kind::Bytes),
            _ => (format!("@nh,{},{}", 8 * offset, 8 * len.unwrap_or(0)), Kind::Bytes),
        },
        Property::Header { base: 2, offset: 2 } => ("th dport".to_owned(), Kind::Bytes),
        Property::Header { base: 2, offset: 0 } => ("th sport".to_owned(), Kind::Bytes),
        Property::Header { base, offset } => {
            let header = if *base == 0 { "ll" } else { "th" };
            (format!("@{header},{},{}", 8 * offset, 8 * len.unwrap_or(0)), Kind::Bytes)
        }
        Property::Connection { key: 0, .. } => ("ct state".to_owned(), Kind::State),
        Property::Connection { key, .. } => (format!("ct {key}"), Kind::Bytes),
        Property::Route { .. } => ("fib".to_owned(), Kind::Number),
        Property::Other(name) => (name.clone(), Kind::Bytes),
        _ => ("…".to_owned(), Kind::Bytes),
    };
    let prefix = match kind {
        Kind::Address => len.map(|len| 8 * u32::try_from(len).unwrap_or(0)),
        _ => None,
    };
    Loaded { name, kind, prefix, mask: None }
}

fn compare(loaded: &Loaded, how: Comparison, value: &[u8]) -> String {
    let operator = match how {
        Comparison::Equal => "",
        Comparison::NotEqual => "!= ",
        Comparison::Less => "< ",
        Comparison::LessOrEqual => "<= ",
        Comparison::Greater => "> ",
        _ => ">= ",
    };
    let name = match &loaded.mask {
        // A mask with a state selects states.
        Some(mask) if loaded.kind == Kind::State && how == Comparison::NotEqual => {
            return format!("{} {mask}", loaded.name);
        }
        Some(mask) => format!("{} & {mask}", loaded.name),
        None => loaded.name.clone(),
    };
    let value = match loaded.kind {
        Kind::Address => address(value, loaded.prefix, !loaded.name.starts_with("ip6")),
        Kind::Name => {
            let end = value.iter().position(|byte| *byte == 0);
            let name = String::from_utf8_lossy(&value[..end.unwrap_or(value.len())]).into_owned();
            let rest = if end.is_none() && value.len() < 16 { "*" } else { "" };
            format!("\"{name}{rest}\"")
        }
        Kind::Number | Kind::State => match <[u8; 4]>::try_from(value) {
            Ok(bytes) => format!("{:#x}", u32::from_ne_bytes(bytes)),
            Err(_) => hex(value),
        },
        Kind::Bytes => match loaded.name.as_str() {
            "meta l4proto" | "ip protocol" | "ip6 nexthdr" => protocol(value),
            "th dport" | "th sport" if value.len() == 2 => {
                u16::from_be_bytes([value[0], value[1]]).to_string()
            }
            _ => hex(value),
        },
    };
    format!("{name} {operator}{value}")
}

fn address(value: &[u8], prefix: Option<u32>, is_v4: bool) -> String {
    let mut bytes = value.to_vec();
    bytes.resize(if is_v4 { 4 } else { 16 }, 0);
    let address: IpAddr = match (<[u8; 4]>::try_from(&bytes[..]), <[u8; 16]>::try_from(&bytes[..]))
    {
        (Ok(v4), _) => Ipv4Addr::from(v4).into(),
        (_, Ok(v6)) => Ipv6Addr::from(v6).into(),
        _ => return hex(value),
    };
    let bits = if is_v4 { 32 } else { 128 };
    match prefix {
        Some(prefix) if prefix < bits => format!("{address}/{prefix}"),
        _ => address.to_string(),
    }
}

fn protocol(value: &[u8]) -> String {
    match value {
        [1] => "icmp".to_owned(),
        [6] => "tcp".to_owned(),
        [17] => "udp".to_owned(),
        [58] => "ipv6-icmp".to_owned(),
        other => hex(other),
    }
}

fn lookup(loaded: &Loaded, set: &str, then: Lookup) -> String {
    let set = if set.starts_with("__") { "{ … }".to_owned() } else { format!("@{set}") };
    match then {
        Lookup::Continue(true) => format!("{} {set}", loaded.name),
        Lookup::Continue(false) => format!("{} != {set}", loaded.name),
        Lookup::Verdict => format!("{} vmap {set}", loaded.name),
        _ => format!("{} map {set}", loaded.name),
    }
}

fn of_verdict(jump: &Jump) -> String {
    let chain = jump.chain.as_deref().unwrap_or_default();
    match jump.code {
        JUMP => format!("jump {chain}"),
        GOTO => format!("goto {chain}"),
        verdict::ACCEPT => "accept".to_owned(),
        verdict::RETURN => "return".to_owned(),
        u32::MAX => "continue".to_owned(),
        code if code & 0xffff == verdict::DROP => "drop".to_owned(),
        _ => "queue".to_owned(),
    }
}

/// The word of `nft`.
pub(super) fn translation(how: Translation) -> &'static str {
    match how {
        Translation::Source => "snat",
        Translation::Masquerade => "masquerade",
        Translation::Destination => "dnat",
        _ => "redirect",
    }
}

fn hex(bytes: &[u8]) -> String {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let digits = digits.trim_start_matches('0');
    format!("0x{}", if digits.is_empty() { "0" } else { digits })
}
