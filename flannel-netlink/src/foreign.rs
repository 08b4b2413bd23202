//! Settings of other programs that can redirect or drop packets before flannel's routes apply:
//! routing rules, and programs and filters that are attached to a device. The diagnosis of a host
//! reads them. flannel never changes them.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::kernel::KernelError;
use flannel_core::object::LinkName;
use libc::{EAFNOSUPPORT, ENOENT, EOPNOTSUPP};
use neli::consts::rtnl::Rtn;

use crate::NetlinkKernel;
use crate::codec::route::RouteMessage;
use crate::codec::{attached, link, route, rule};
use crate::kernel::query::{ENODEV, name_of};
use crate::transport::wire::Message;

/// A share of some packets. The values are in the order from all to none, so the share of packets
/// that fulfil two conditions is the larger value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Share {
    /// All of them.
    All,
    /// Some of them, or it is not known which.
    Some,
    /// None of them.
    None,
}

/// A routing rule (`ip rule`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The family of its packets.
    pub family: Family,
    /// The kernel applies the rules in the order of their priorities, the smallest first.
    pub priority: u32,
    /// Whether it applies to the packets that its selectors do not match (`not`).
    pub inverted: bool,
    /// The source of its packets, or `None` for any source.
    pub src: Option<Subnet>,
    /// The destination of its packets, or `None` for any destination.
    pub dst: Option<Subnet>,
    /// The device on which its packets arrive, or `None` for any device.
    pub iif: Option<String>,
    /// How many forwarded packets without a mark match the selectors of the rule that have no field
    /// here, such as TOS, protocol, ports and mark. [`Share::All`] without such a selector.
    pub rest: Share,
    /// Routes with a prefix of at most this length are ignored in its table
    /// (`suppress_prefixlength`).
    pub suppressed: Option<u8>,
    /// What the kernel does with the packets.
    pub action: RuleAction,
}

/// What the kernel does with the packets of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleAction {
    /// Looks up their route in this table. If it has no route, the next rule applies.
    Table(u32),
    /// Drops or refuses them: `blackhole`, `unreachable` or `prohibit`.
    Discard(&'static str),
    /// Goes on with the first rule of this priority. Without such a rule, the next rule
    /// applies.
    Goto(u32),
    /// Something else, such as nothing (`nop`).
    Other,
}

/// A route in a table that a rule names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableRoute {
    /// Its destination.
    pub dst: Subnet,
    /// Its device, or `None` if it has several devices or no device.
    pub link: Option<LinkName>,
    /// Its gateway, or `None` if the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// Whether it makes the kernel go on with the next rule (type `throw`).
    pub throw: bool,
}

/// What is attached to a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attached {
    /// The ids of XDP programs.
    pub xdp: Vec<u32>,
    /// The kinds of the filters for received and for sent packets (`tc filter`).
    pub filters: BTreeSet<String>,
    /// The kind of the queueing discipline for sent packets, such as `noqueue`. `None` if the
    /// kernel has no traffic control.
    pub queue: Option<String>,
}

/// Formats the rule as arguments of `ip rule`. The selectors in `rest` are left out.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { priority, inverted, src, dst, iif, action, .. } = self;
        write!(f, "pref {priority}{}", if *inverted { " not" } else { "" })?;
        for (word, subnet) in [("from", src), ("to", dst)] {
            if let Some(subnet) = subnet {
                write!(f, " {word} {subnet}")?;
            }
        }
        if let Some(iif) = iif {
            write!(f, " iif {iif}")?;
        }
        match action {
            RuleAction::Table(table) => write!(f, " lookup {table}"),
            RuleAction::Discard(kind) => write!(f, " {kind}"),
            RuleAction::Goto(target) => write!(f, " goto {target}"),
            RuleAction::Other => Ok(()),
        }
    }
}

/// Formats the route as arguments of `ip route`.
impl fmt::Display for TableRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.throw { "throw " } else { "" }, self.dst)?;
        if let Some(gateway) = self.gateway {
            write!(f, " via {gateway}")?;
        }
        if let Some(link) = self.link {
            write!(f, " dev {link}")?;
        }
        Ok(())
    }
}

impl NetlinkKernel {
    /// The routing rules of a family, in the order in which the kernel applies them. Empty if the
    /// kernel does not support rules or this family.
    ///
    /// # Errors
    /// The rules cannot be read.
    pub fn rules(&self, family: Family) -> Result<Vec<Rule>, KernelError> {
        match self.lock().dump(rule::all(family), rule::read) {
            Err(error) if error.is(EOPNOTSUPP) || error.is(EAFNOSUPPORT) => Ok(Vec::new()),
            rules => rules,
        }
    }

    /// The routes of a table to addresses in `within`. Empty if the table does not exist.
    ///
    /// # Errors
    /// The routes cannot be read.
    pub fn table(&self, table: u32, within: Subnet) -> Result<Vec<TableRoute>, KernelError> {
        let mut socket = self.lock();
        let read = |message: &Message<'_>| {
            // Kernels before 4.20 send the routes of all tables.
            if rule::table_of(message) != Some(table) {
                return None;
            }
            route::read(message).filter(|found| found.dst.overlaps(&within))
        };
        let all = match socket.dump(route::in_table(within.family(), table), read) {
            Err(error) if error.is(ENOENT) => Vec::new(),
            all => all?,
        };
        let mut routes = Vec::new();
        for RouteMessage { dst, index, multipath, gateway, kind, .. } in all {
            let has_link = index != 0 && !multipath;
            let link = if has_link { name_of(&mut socket, index)? } else { None };
            routes.push(TableRoute { dst, link, gateway, throw: kind == Rtn::Throw });
        }
        Ok(routes)
    }

    /// What is attached to a device. Empty if the device does not exist. Programs that use `tcx`
    /// (Linux 6.6) are not included, because the kernel reports them only to `bpf(2)`.
    ///
    /// # Errors
    /// The device or its filters cannot be read.
    pub fn attached(&self, device: LinkName) -> Result<Attached, KernelError> {
        let mut socket = self.lock();
        let (index, mut attached) = match socket.ask(link::by_name(device), attached::read) {
            Err(error) if error.is(ENODEV) => return Ok(Attached::default()),
            found => found?,
        };
        for parent in [attached::INGRESS, attached::EGRESS] {
            match socket.dump(attached::filters(index, parent), attached::read_filter) {
                // The kernel has no filters.
                Err(error) if error.is(EOPNOTSUPP) => {}
                filters => attached.filters.extend(filters?),
            }
        }
        Ok(attached)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_written_as_arguments_of_ip() {
        let subnet = |text: &str| Some(text.parse::<Subnet>().unwrap());
        let rule = Rule {
            family: Family::V4,
            priority: 100,
            inverted: true,
            src: subnet("10.1.0.0/16"),
            dst: subnet("10.1.7.0/24"),
            iif: Some("cni0".to_owned()),
            rest: Share::All,
            suppressed: None,
            action: RuleAction::Table(7),
        };
        let text = "pref 100 not from 10.1.0.0/16 to 10.1.7.0/24 iif cni0 lookup 7";
        assert_eq!(rule.to_string(), text);
        let goto = Rule {
            inverted: false,
            src: None,
            dst: None,
            iif: None,
            action: RuleAction::Goto(200),
            ..rule
        };
        assert_eq!(goto.to_string(), "pref 100 goto 200");
    }
}
