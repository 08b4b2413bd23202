//! The sockets that receive the datagrams of an address. No other process shares their port.
//!
//! A socket without `SO_REUSEPORT` has its port alone. Several queues need several sockets with one
//! port, and so they need that option, by which every process of the same user could join them. The
//! kernel refuses a new socket if the first socket in its list that has the port does not share it.
//! It adds sockets to the beginning or to the end of that list. So the first and the last socket of
//! a group are *guards*, which stop sharing when all sockets are bound. The kernel gives a datagram
//! to one of the other sockets, because a guard is connected to itself and a filter selects among
//! the others.
//!
//! **Source**: linux `net/ipv4/udp.c: udp_lib_get_port, compute_score`, `include/net/sock.h:
//! sk_add_node_rcu`, `net/core/sock_reuseport.c: run_bpf_filter`.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::libc::{sock_filter, sock_fprog};
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::stat::fstat;

use crate::ends::{Binding, Socket};
use crate::error::Error;
use crate::ports;

/// The longest time for the end of a process that has the port.
pub(crate) const ENDING: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(2);

/// The receiving sockets of an address.
#[derive(Debug)]
pub(crate) struct SocketGroup {
    /// One for each queue, or one for all.
    pub(crate) receivers: Vec<Socket>,
    /// The first and the last socket of a group of several.
    pub(crate) guards: Vec<Socket>,
}

impl SocketGroup {
    /// Opens `count` sockets for each address, or one if the kernel does not keep others from such
    /// a group.
    ///
    /// # Errors
    /// The node has no such address, or another socket has the port.
    pub(crate) fn open(addresses: &[SocketAddr], count: usize) -> Result<Vec<Self>, Error> {
        let open = |count| addresses.iter().map(move |address| Self::of(*address, count)).collect();
        if count == 1 {
            return open(1);
        }
        open(count).or_else(|error| {
            let groups = open(1)?;
            crate::report(&format!("one socket receives for all queues: {error}"));
            Ok(groups)
        })
    }

    fn of(address: SocketAddr, count: usize) -> Result<Self, Error> {
        if count == 1 {
            let receiver = Socket::bind(address, Binding::Receiver)?;
            return Ok(Self { receivers: vec![receiver], guards: Vec::new() });
        }
        // This fails if anybody has the port.
        let first = Socket::bind(address, Binding::FirstGuard)?;
        let mut receivers = Vec::new();
        for _ in 0..count {
            receivers.push(Socket::bind(address, Binding::SharedReceiver)?);
        }
        let last = Socket::bind(address, Binding::LastGuard)?;
        let group = Self { receivers, guards: vec![first, last] };
        group.close(address).map_err(|source| Error::Socket { address, source })?;
        Ok(group)
    }

    /// Lets no other socket into the group.
    ///
    /// # Errors
    /// One has joined already, or can.
    fn close(&self, address: SocketAddr) -> io::Result<()> {
        let Some(receiver) = self.receivers.first() else { return Ok(()) };
        attach_filter(receiver, address.is_ipv6(), self.receivers.len())?;
        for guard in &self.guards {
            setsockopt(guard, sockopt::ReusePort, &false)?;
        }
        match Socket::try_bind(address, Binding::SharedReceiver) {
            Ok(_) => {
                return Err(io::Error::other("this kernel does not keep others from its port"));
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(error),
        }
        let mut ours = Vec::new();
        for socket in self.receivers.iter().chain(&self.guards) {
            ours.push(fstat(socket.as_fd())?.st_ino);
        }
        let others = ports::sockets(address)?;
        if others.iter().any(|other| !ours.contains(&other.inode)) {
            return Err(io::Error::other("another program has joined its port"));
        }
        Ok(())
    }
}

/// Checks that a socket can have an address. If another socket has the port, waits at most
/// `patience` for its end.
///
/// # Errors
/// The node has no such address, or another socket has the port.
pub(crate) fn usable(address: SocketAddr, patience: Duration) -> Result<(), Error> {
    let begin = Instant::now();
    loop {
        match Socket::try_bind(address, Binding::Receiver) {
            Ok(_) => return Ok(()),
            Err(error)
                if error.kind() == io::ErrorKind::AddrInUse && begin.elapsed() < patience =>
            {
                std::thread::park_timeout(PAUSE);
            }
            Err(error) => return Err(Error::socket(address, error)),
        }
    }
}

/// Attaches the filter that selects a socket of a group by the sender's address and port. The
/// first socket, a guard, has the number 0. `count` receivers follow it. One of them gets the
/// filter for all.
fn attach_filter(receiver: &Socket, is_v6: bool, count: usize) -> io::Result<()> {
    // linux `include/uapi/linux/filter.h`: an offset from the network header.
    const NET: u32 = 0xfff0_0000;
    // The last 32 bits of the source address.
    let source = if is_v6 { 20 } else { 12 };
    let ports = if is_v6 { 40 } else { 20 };
    let mut random = [0; 4];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    // Nobody can choose ports so that all packets go to one queue.
    let factor = u32::from_ne_bytes(random) | 1;
    let step = |code: u16, k: u32| sock_filter { code, jt: 0, jf: 0, k };
    let mut filter = [
        step(LOAD, NET + source),
        step(MULTIPLY, factor),
        step(TO_X, 0),
        step(LOAD, NET + ports),
        step(ADD_X, 0),
        step(MULTIPLY, SPREAD),
        step(SHIFT_RIGHT, 16),
        // At most eight.
        step(MODULO, count as u32),
        step(ADD, 1),
        step(RETURN, 0),
    ];
    let program = sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    Ok(setsockopt(receiver, sockopt::AttachReusePortCbpf, &program)?)
}

// linux `include/uapi/linux/bpf_common.h`.
const LOAD: u16 = 0x20;
const ADD: u16 = 0x04;
const ADD_X: u16 = 0x0c;
const MULTIPLY: u16 = 0x24;
const SHIFT_RIGHT: u16 = 0x74;
const MODULO: u16 = 0x94;
const TO_X: u16 = 0x07;
/// Returns the result.
const RETURN: u16 = 0x16;
/// An odd number whose bits have no pattern, so that the upper half depends on all bits.
const SPREAD: u32 = 0x9e37_79b1;

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd;

    use flannel_netlink::testing::{in_netns, ip};
    use nix::sys::socket::{MsgFlags, recv};

    use super::*;

    const PORT: u16 = 8285;

    /// Addresses of the loopback device.
    fn addresses() -> [SocketAddr; 2] {
        ip("link set lo up");
        let v4 = ([127, 0, 0, 1], PORT).into();
        [v4, (std::net::Ipv6Addr::LOCALHOST, PORT).into()]
    }

    fn bind(address: SocketAddr, binding: Binding) -> Socket {
        Socket::bind(address, binding).unwrap()
    }

    fn received(socket: &Socket) -> usize {
        let mut count = 0;
        while recv(socket.as_fd().as_raw_fd(), &mut [0; 9], MsgFlags::MSG_DONTWAIT).is_ok() {
            count += 1;
        }
        count
    }

    /// Each one gets a share, and a guard gets nothing.
    #[test]
    fn datagrams_are_spread_over_the_receivers() {
        in_netns(|| {
            for address in addresses() {
                let groups = SocketGroup::open(&[address], 4).unwrap();
                let group = &groups[0];
                for _ in 0..400 {
                    let from = UdpSocket::bind((address.ip(), 0)).unwrap();
                    from.send_to(b"x", address).unwrap();
                }
                let shares: Vec<usize> = group.receivers.iter().map(received).collect();
                assert!(shares.iter().all(|share| (25..200).contains(share)), "{shares:?}");
                assert_eq!(shares.iter().sum::<usize>(), 400, "{shares:?}");
                assert!(group.guards.iter().all(|guard| received(guard) == 0));
            }
        });
    }

    /// Between the first bind and the last one, every process of the user can join.
    #[test]
    fn a_group_with_a_stranger_is_not_used() {
        in_netns(|| {
            for address in addresses() {
                let first = bind(address, Binding::FirstGuard);
                let receivers = vec![bind(address, Binding::SharedReceiver)];
                let stranger = bind(address, Binding::SharedReceiver);
                let group = SocketGroup {
                    receivers,
                    guards: vec![first, bind(address, Binding::LastGuard)],
                };
                let error = group.close(address).unwrap_err();
                assert!(error.to_string().contains("has joined"), "{error}");
                drop(group);
                let error = SocketGroup::open(&[address], 2).unwrap_err();
                assert!(matches!(error, Error::PortTaken { .. }), "{error}");
                drop(stranger);
                SocketGroup::open(&[address], 2).unwrap();
            }
        });
    }

    /// A kernel with another order of its list.
    #[test]
    fn a_group_that_others_can_join_is_not_used() {
        in_netns(|| {
            for address in addresses() {
                let receivers = [(); 2].map(|()| bind(address, Binding::SharedReceiver)).into();
                let group = SocketGroup { receivers, guards: Vec::new() };
                let error = group.close(address).unwrap_err();
                assert!(error.to_string().contains("does not keep others"), "{error}");
            }
        });
    }
}
