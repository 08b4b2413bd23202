//! Forwarding entries of vxlan devices. Their messages are read by [`neigh`](super::neigh).

use flannel_core::object::{Fdb, MacAddr};
use neli::consts::nl::NlmF;
use neli::consts::rtnl::{Nda, Ntf, Nud, Rtm};

use super::neigh::{BRIDGE, NeighMessage, header};
use super::put_flags;
use crate::transport::wire::Messages;

/// An attribute of a forwarding entry that requires another kind of put or deletion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Special {
    /// It has a port, a VNI or a device. A deletion with an outer destination does not match it.
    Attributes,
    /// It has nexthop objects. The same holds for deletions, and it must be deleted before a put.
    ByNexthop,
}

impl NeighMessage {
    /// The MAC address of a special forwarding entry; `None` for any other entry.
    pub(crate) fn special(&self) -> Option<(MacAddr, Special)> {
        let special = match (self.by_nexthop, self.unrepresentable) {
            (true, _) => Special::ByNexthop,
            (false, true) => Special::Attributes,
            (false, false) => return None,
        };
        self.mac.filter(|_| self.fdb).map(|mac| (mac, special))
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
    // Entries for broadcasts and multicasts may have several VTEPs. They are deleted together.
    let many = fdb.mac.0 == [0; 6] || fdb.mac.0[0] & 1 == 1;
    if !many {
        requests.ip(Nda::Dst, fdb.dst);
    }
}

/// Deletes an entry with any outer destination.
pub(crate) fn delete_any(requests: &mut Messages, mac: MacAddr, index: u32) {
    let header = header(BRIDGE, index, Nud::empty(), Ntf::SELF);
    requests.begin(Rtm::Delneigh, NlmF::empty(), &header).attr(Nda::Lladdr, &mac.0);
}

/// Requests all forwarding entries of a link.
pub(crate) fn on(index: u32) -> Messages {
    Messages::one(Rtm::Getneigh, NlmF::empty(), &header(BRIDGE, index, Nud::empty(), Ntf::empty()))
}
