//! Routing rules, and the tables that they name. flannel only reads rules.

use flannel_core::Subnet;
use flannel_core::address::Family;
use neli::consts::nl::NlmF;
use neli::consts::rtnl::{FrAct, Frattr, Rta, Rtm};

use super::{af, family_of};
use crate::foreign::{Rule, RuleAction, Share};
use crate::transport::wire::{Message, Messages, ip_of, text_of, u32_of};

/// Bytes of `struct fib_rule_hdr`, and of `struct rtmsg`.
const HEADER: usize = 12;
/// `FIB_RULE_INVERT`: the rule is for the packets that do not match.
const INVERT: u32 = 2;

/// Requests all rules of a family.
pub(crate) fn all(family: Family) -> Messages {
    let mut header = [0; HEADER];
    header[0] = af(family).into();
    Messages::one(Rtm::Getrule, NlmF::empty(), &header)
}

/// Reads `RTM_NEWRULE`. `None` for other types of messages and other address families, and if the
/// message is malformed.
pub(crate) fn read(message: &Message<'_>) -> Option<Rule> {
    if message.kind != u16::from(Rtm::Newrule) {
        return None;
    }
    let (&[family, dst_len, src_len, tos, table, _, _, action, flags @ ..], attributes) =
        message.split::<HEADER>()?;
    let mut rule = Rule {
        family: family_of(family.into())?,
        priority: 0,
        inverted: u32::from_ne_bytes(flags) & INVERT != 0,
        src: None,
        dst: None,
        iif: None,
        rest: if tos == 0 { Share::All } else { Share::Some },
        suppressed: None,
        action: RuleAction::Other,
    };
    let mut table = u32::from(table);
    let mut goto = 0;
    for (id, value) in attributes {
        match Frattr::from(id) {
            Frattr::Priority => rule.priority = u32_of(value)?,
            Frattr::Table => table = u32_of(value)?,
            Frattr::Goto => goto = u32_of(value)?,
            Frattr::Src => rule.src = Some(Subnet::new(ip_of(value)?, src_len)?),
            Frattr::Dst => rule.dst = Some(Subnet::new(ip_of(value)?, dst_len)?),
            Frattr::Iifname => rule.iif = Some(text_of(value)?),
            // It is -1 if no routes are suppressed.
            Frattr::SuppressPrefixlen => rule.suppressed = u8::try_from(u32_of(value)?).ok(),
            // The kernel looks up the routes of forwarded packets for the user 0.
            Frattr::UidRange if value.starts_with(&[0; 4]) => {}
            // The kernel reports a mark only if it is not 0. Forwarded packets have no socket.
            Frattr::Fwmark
            | Frattr::Oifname
            | Frattr::L3mdev
            | Frattr::TunId
            | Frattr::UidRange => rule.rest = Share::None,
            Frattr::IpProto
            | Frattr::SportRange
            | Frattr::DportRange
            | Frattr::Dscp
            | Frattr::Flowlabel => rule.rest = rule.rest.max(Share::Some),
            _ => {}
        }
    }
    rule.action = match FrAct::from(action) {
        FrAct::FrActToTbl => RuleAction::Table(table),
        FrAct::FrActGoto => RuleAction::Goto(goto),
        FrAct::FrActBlackhole => RuleAction::Discard("blackhole"),
        FrAct::FrActUnreachable => RuleAction::Discard("unreachable"),
        FrAct::FrActProhibit => RuleAction::Discard("prohibit"),
        _ => RuleAction::Other,
    };
    Some(rule)
}

/// The table of a route, which `RTM_NEWROUTE` reports, or `None` if the message is malformed.
pub(crate) fn table_of(message: &Message<'_>) -> Option<u32> {
    let (header, mut attributes) = message.split::<HEADER>()?;
    match attributes.find(|(id, _)| Rta::from(*id) == Rta::Table) {
        Some((_, table)) => u32_of(table),
        None => Some(header[4].into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::wire::messages;

    /// The rule in a message with this header and these attributes.
    fn rule(header: [u8; HEADER], attributes: &[(Frattr, &[u8])]) -> Rule {
        let mut made = Messages::one(Rtm::Newrule, NlmF::empty(), &header);
        for (kind, value) in attributes {
            made.attr(*kind, value);
        }
        let bytes = made.ready(0..1, 0, NlmF::empty());
        read(&messages(bytes).next().unwrap().unwrap()).unwrap()
    }

    #[test]
    fn every_selector_restricts_a_rule() {
        let header = |tos: u8, action: u8| [2, 0, 0, tos, 254, 0, 0, action, 0, 0, 0, 0];
        let of = |attribute: Frattr| rule(header(0, 1), &[(attribute, &[1, 0, 0, 0])]).rest;
        assert_eq!(rule(header(0, 1), &[]).rest, Share::All);
        assert_eq!(rule(header(4, 1), &[]).rest, Share::Some);
        for attribute in [Frattr::Protocol, Frattr::Fwmask, Frattr::Flow] {
            assert_eq!(of(attribute), Share::All, "{attribute:?} selects no packets");
        }
        for attribute in [Frattr::IpProto, Frattr::SportRange, Frattr::DportRange, Frattr::Dscp] {
            assert_eq!(of(attribute), Share::Some, "{attribute:?}");
        }
        for attribute in [Frattr::Fwmark, Frattr::Oifname, Frattr::L3mdev, Frattr::UidRange] {
            assert_eq!(of(attribute), Share::None, "{attribute:?}");
        }
        let users = [(Frattr::UidRange, &[0, 0, 0, 0, 9, 0, 0, 0][..])];
        assert_eq!(rule(header(0, 1), &users).rest, Share::All);
        let target = [(Frattr::Goto, &[200, 0, 0, 0][..])];
        assert_eq!(rule(header(0, 2), &target).action, RuleAction::Goto(200));
        let none = u32::MAX.to_ne_bytes();
        for (length, suppressed) in [(&none[..], None), (&[16, 0, 0, 0][..], Some(16))] {
            let length = [(Frattr::SuppressPrefixlen, length)];
            assert_eq!(rule(header(0, 1), &length).suppressed, suppressed);
        }
        for (action, read) in [
            (1, RuleAction::Table(254)),
            (2, RuleAction::Goto(0)),
            (3, RuleAction::Other),
            (6, RuleAction::Discard("blackhole")),
            (7, RuleAction::Discard("unreachable")),
            (8, RuleAction::Discard("prohibit")),
        ] {
            assert_eq!(rule(header(0, action), &[]).action, read);
        }
    }
}
