//! Sockets of generic netlink, whose families have their numbers assigned at run time.
//!
//! **Source**: linux `net/netlink/genetlink.c`.

use flannel_core::kernel::KernelError;
use neli::consts::nl::NlmF;
use neli::consts::socket::NlFamily;

use crate::transport::socket::Socket;
use crate::transport::wire::{Messages, u16_of};

/// `GENL_ID_CTRL`: the family that knows all others.
const CONTROL: u16 = 16;
/// `CTRL_CMD_GETFAMILY`, version 2 of the family.
const GET_FAMILY: [u8; 4] = [3, 2, 0, 0];
/// `CTRL_ATTR_…`.
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

/// Opens a socket. Returns it with the number of a family. The kernel loads the module of the
/// family if the module has an alias for it. `wireguard` has one, `fou` does not.
pub(crate) fn open(family: &str) -> Result<(Socket, u16), KernelError> {
    let mut socket = Socket::open_to(NlFamily::Generic)?;
    let mut request = Messages::one(CONTROL, NlmF::empty(), &GET_FAMILY);
    request.text(FAMILY_NAME, family);
    let number = socket.ask(request, |message| {
        let (_, mut attributes) = message.split::<{ GET_FAMILY.len() }>()?;
        attributes.find(|(id, _)| *id == FAMILY_ID).and_then(|(_, value)| u16_of(value))
    })?;
    Ok((socket, number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_found_by_name() {
        let (_, number) = open("nlctrl").unwrap();
        assert_eq!(number, CONTROL);
        assert!(open("no such family").err().unwrap().is_absent());
    }
}
