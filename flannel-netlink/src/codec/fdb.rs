//! Forwarding entries of vxlan devices. Their messages are read by [`neigh`](super::neigh).

use flannel_core::object::{Fdb, MacAddr};
use neli::consts::nl::NlmF;
use neli::consts::rtnl::{Nda, Ntf, Nud, Rtm};

use super::neigh::{BRIDGE, NeighMessage, header};
use super::put_flags;
use crate::wire::Messages;

/// Why a deletion that names the outer destination does not delete a forwarding entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Odd {
    /// It has a port, a VNI or a device of its own.
    Alien,
    /// It leads to nexthop objects, and must be deleted before ours can be put, too.
    ByNexthop,
}

impl NeighMessage {
    /// The MAC address of a forwarding entry that must be put or deleted differently, and why.
    pub(crate) fn odd(&self) -> Option<(MacAddr, Odd)> {
        let odd = match (self.by_nexthop, self.alien) {
            (true, _) => Odd::ByNexthop,
            (false, true) => Odd::Alien,
            (false, false) => return None,
        };
        self.mac.filter(|_| self.fdb).map(|mac| (mac, odd))
    }
}

pub(crate) fn put(requests: &mut Messages, fdb: &Fdb, index: u32) {
    let header = header(BRIDGE, index, Nud::PERMANENT, Ntf::SELF);
    requests
        .begin(Rtm::Newneigh, put_flags(), &header)
        .attr(Nda::Lladdr, &fdb.mac.0)
        .ip(Nda::Dst, fdb.dst);
}

pub(crate) fn delete(requests: &mut Messages, fdb: &Fdb, index: u32) {
    delete_any(requests, fdb.mac, index);
    // Broadcasts and multicasts may go to several VTEPs: all of them are one entry, and go
    // together.
    let many = fdb.mac.0 == [0; 6] || fdb.mac.0[0] & 1 == 1;
    if !many {
        requests.ip(Nda::Dst, fdb.dst);
    }
}

/// Deletes it whatever its outer destination is.
pub(crate) fn delete_any(requests: &mut Messages, mac: MacAddr, index: u32) {
    let header = header(BRIDGE, index, Nud::empty(), Ntf::SELF);
    requests.begin(Rtm::Delneigh, NlmF::empty(), &header).attr(Nda::Lladdr, &mac.0);
}

/// Asks for all forwarding entries of a link.
pub(crate) fn on(index: u32) -> Messages {
    Messages::one(Rtm::Getneigh, NlmF::empty(), &header(BRIDGE, index, Nud::empty(), Ntf::empty()))
}
