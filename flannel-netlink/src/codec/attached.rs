//! Programs, filters and queues that are attached to a device. flannel only reads them.

use neli::consts::nl::NlmF;
use neli::consts::rtnl::{Ifla, Rtm, Tca};

use crate::foreign::Attached;
use crate::transport::wire::{Attributes, Message, Messages, text_of, u32_at, u32_of};

/// Bytes of `struct ifinfomsg`.
const LINK_HEADER: usize = 16;
/// Bytes of `struct tcmsg`.
const TC_HEADER: usize = 20;
/// `IFLA_XDP_DRV_PROG_ID`, `IFLA_XDP_SKB_PROG_ID`, `IFLA_XDP_HW_PROG_ID`.
const XDP_PROGRAMS: std::ops::RangeInclusive<u16> = 5..=7;

/// The parents of filters in the queueing discipline `clsact`, for received and for sent packets.
/// The discipline `ingress` has one list of filters, for both numbers.
pub(crate) const INGRESS: u32 = 0xffff_fff2;
pub(crate) const EGRESS: u32 = 0xffff_fff3;

/// Reads the index of a link from `RTM_NEWLINK`, and what is attached to it except for filters.
/// `None` for other types of messages, and if the message is malformed.
pub(crate) fn read(message: &Message<'_>) -> Option<(u32, Attached)> {
    if message.kind != u16::from(Rtm::Newlink) {
        return None;
    }
    let (header, attributes) = message.split::<LINK_HEADER>()?;
    let mut attached = Attached::default();
    for (id, value) in attributes {
        match Ifla::from(id) {
            Ifla::Qdisc => attached.queue = text_of(value),
            Ifla::Xdp => {
                attached.xdp = Attributes(value)
                    .filter(|(mode, _)| XDP_PROGRAMS.contains(mode))
                    .filter_map(|(_, program)| u32_of(program))
                    .collect();
            }
            _ => {}
        }
    }
    Some((u32_at(header, 4)?, attached))
}

/// Requests all filters of a link with this parent.
pub(crate) fn filters(index: u32, parent: u32) -> Messages {
    let mut header = [0; TC_HEADER];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[12..16].copy_from_slice(&parent.to_ne_bytes());
    Messages::one(Rtm::Gettfilter, NlmF::empty(), &header)
}

/// Reads the kind of a filter from `RTM_NEWTFILTER`. `None` for other types of messages, and if the
/// message is malformed.
pub(crate) fn read_filter(message: &Message<'_>) -> Option<String> {
    if message.kind != u16::from(Rtm::Newtfilter) {
        return None;
    }
    let (_, mut attributes) = message.split::<TC_HEADER>()?;
    attributes.find(|(id, _)| Tca::from(*id) == Tca::Kind).and_then(|(_, value)| text_of(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::wire::messages;

    /// The kernel reports the mode of an XDP program, and then its id twice: as the program of this
    /// mode, and as the only program.
    #[test]
    fn xdp_programs_of_all_modes_are_read() {
        for modes in [vec![], vec![(6_u16, 41_u32)], vec![(5, 7), (6, 9)]] {
            let mut made = Messages::one(Rtm::Newlink, NlmF::empty(), &[0; LINK_HEADER]);
            made.text(Ifla::Qdisc, "noqueue").nest(Ifla::Xdp, |xdp| {
                for (mode, id) in &modes {
                    xdp.u32(*mode, *id);
                }
                xdp.attr(2_u16, &[u8::from(!modes.is_empty())]);
                if let [(_, id)] = modes[..] {
                    xdp.u32(4_u16, id);
                }
            });
            let bytes = made.ready(0..1, 0, NlmF::empty());
            let (_, found) = read(&messages(bytes).next().unwrap().unwrap()).unwrap();
            let ids: Vec<u32> = modes.into_iter().map(|(_, id)| id).collect();
            assert_eq!(found.xdp, ids);
            assert_eq!(found.queue.as_deref(), Some("noqueue"));
        }
    }
}
