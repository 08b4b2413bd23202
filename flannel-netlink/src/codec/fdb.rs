//! FDB entries (forwarding entries) of vxlan devices. [`neigh`](super::neigh) reads their messages,
//! because neighbours have messages of the same format.

use flannel_core::object::{Fdb, MacAddr};
use neli::consts::nl::NlmF;
use neli::consts::rtnl::{Nda, Ntf, Nud, Rtm};

use super::neigh::{BRIDGE, NeighMessage, header};
use super::put_flags;
use crate::transport::wire::Messages;

/// Why an FDB entry needs other requests than usual.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Special {
    /// It has a UDP port, a VNI or an outgoing device of its own. A deletion that names only the
    /// outer destination does not match it (`vxlan_fdb_find_rdst`), so [`delete_any`] is needed.
    Attributes,
    /// It uses nexthop objects instead of an outer destination. Only [`delete_any`] deletes it. A
    /// put would keep the nexthop objects (`vxlan_fdb_update_existing`), so the entry is deleted
    /// before a put.
    ByNexthop,
}

impl NeighMessage {
    /// The MAC address of a special FDB entry, and why it is special. `None` for any other entry.
    pub(crate) fn special(&self) -> Option<(MacAddr, Special)> {
        if !self.fdb {
            return None;
        }
        let special = if self.by_nexthop {
            Special::ByNexthop
        } else if self.unrepresentable {
            Special::Attributes
        } else {
            return None;
        };
        Some((self.mac?, special))
    }
}

pub(crate) fn put(requests: &mut Messages, fdb: &Fdb, index: u32) {
    let header = header(BRIDGE, index, Nud::PERMANENT, Ntf::SELF);
    requests
        .begin(Rtm::Newneigh, put_flags(), &header)
        .attr(Nda::Lladdr, &fdb.mac.0)
        .ip(Nda::Dst, fdb.dst);
}

/// Deletes an entry if it has this outer destination.
pub(crate) fn delete(requests: &mut Messages, fdb: &Fdb, index: u32) {
    delete_any(requests, fdb.mac, index);
    // An entry for an all-zero or multicast MAC address may have several outer destinations. It is
    // deleted with all of them.
    let many = fdb.mac.0 == [0; 6] || fdb.mac.0[0] & 1 == 1;
    if !many {
        requests.ip(Nda::Dst, fdb.dst);
    }
}

/// Deletes an entry, whatever its outer destinations are.
pub(crate) fn delete_any(requests: &mut Messages, mac: MacAddr, index: u32) {
    let header = header(BRIDGE, index, Nud::empty(), Ntf::SELF);
    requests.begin(Rtm::Delneigh, NlmF::empty(), &header).attr(Nda::Lladdr, &mac.0);
}

/// Requests all FDB entries of a link.
pub(crate) fn on(index: u32) -> Messages {
    Messages::one(Rtm::Getneigh, NlmF::empty(), &header(BRIDGE, index, Nud::empty(), Ntf::empty()))
}
