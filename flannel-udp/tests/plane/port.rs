//! Processes of the same user, without capabilities, at the port of a data plane.

use std::net::Ipv6Addr;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, SockaddrStorage, bind, connect, recv, setsockopt,
    socket, sockopt,
};

use super::*;

const DATAGRAMS: u64 = 1000;

/// How a stranger binds its socket. The kernel prefers sockets that are connected, or bound to a
/// device.
#[derive(Debug, Clone, Copy)]
enum Way {
    Plain,
    ReuseAddress,
    Device,
    Connected,
    AllAddresses,
    MappedAddress,
}

const WAYS: [Way; 6] = [
    Way::Plain,
    Way::ReuseAddress,
    Way::Device,
    Way::Connected,
    Way::AllAddresses,
    Way::MappedAddress,
];

/// A socket of a stranger, which shares its port.
fn stranger(at: IpAddr, way: Way) -> nix::Result<OwnedFd> {
    let at = match (way, at) {
        (Way::MappedAddress, IpAddr::V4(v4)) => v4.to_ipv6_mapped().into(),
        (Way::AllAddresses, IpAddr::V4(_)) => [0, 0, 0, 0].into(),
        (Way::AllAddresses, IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
        (_, at) => at,
    };
    let family = if at.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let socket = socket(family, SockType::Datagram, flags, None)?;
    setsockopt(&socket, sockopt::ReusePort, &true)?;
    match way {
        Way::ReuseAddress => setsockopt(&socket, sockopt::ReuseAddr, &true)?,
        Way::Device => setsockopt(&socket, sockopt::BindToDevice, &"lo".into())?,
        Way::Plain | Way::Connected | Way::AllAddresses | Way::MappedAddress => {}
    }
    bind(socket.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(at, PORT)))?;
    if matches!(way, Way::Connected) {
        let peer = SocketAddr::new(at, PORT + 1);
        connect(socket.as_raw_fd(), &SockaddrStorage::from(peer))?;
    }
    Ok(socket)
}

fn received(socket: &OwnedFd) -> u64 {
    let mut count = 0;
    while recv(socket.as_raw_fd(), &mut [0; 16], MsgFlags::empty()).is_ok() {
        count += 1;
    }
    count
}

fn loopback(is_v6: bool) -> IpAddr {
    if is_v6 { Ipv6Addr::LOCALHOST.into() } else { [127, 0, 0, 1].into() }
}

fn on_loopback(queues: usize) -> Options {
    let local = vec![loopback(false), loopback(true)];
    Options { local, queues: Some(queues), ..options(&V4, 1) }
}

/// Sends datagrams that are counted as bad, each one from another port.
fn send(to: IpAddr) {
    for _ in 0..DATAGRAMS {
        let from = UdpSocket::bind((to, 0)).unwrap();
        from.send_to(b"x", (to, PORT)).unwrap();
    }
}

#[test]
fn no_stranger_gets_a_datagram() {
    in_netns(|| {
        ip("link set lo up");
        // With many sockets of one port the kernel has them in lists by address.
        for crowd in [0, 20] {
            let _crowd: Vec<OwnedFd> = (0..crowd)
                .map(|n| stranger([127, 0, 1, n + 1].into(), Way::Plain).unwrap())
                .collect();
            for queues in [1, 4] {
                let plane = Forwarder::start(on_loopback(queues), Vec::new(), fails_test).unwrap();
                let mut before = 0;
                for is_v6 in [false, true] {
                    let at = loopback(is_v6);
                    let opened: Vec<(Way, nix::Result<OwnedFd>)> =
                        WAYS.map(|way| (way, stranger(at, way))).into();
                    send(at);
                    before += DATAGRAMS;
                    let counted = || plane.counts().bad_datagram;
                    eventually(PATIENCE, || counted() == before, || format!("{}", counted()));
                    for (way, socket) in &opened {
                        let got = socket.as_ref().map_or(0, received);
                        assert_eq!(got, 0, "{way:?} {at} queues={queues} crowd={crowd}");
                        let refused = socket.as_ref().err();
                        assert_eq!(refused, Some(&Errno::EADDRINUSE), "{way:?} {at} {queues}");
                    }
                }
            }
        }
    });
}

/// It is named, and the data plane starts once it is gone.
#[test]
fn a_stranger_who_has_the_port_already_is_named() {
    in_netns(|| {
        ip("link set lo up");
        for queues in [1, 4] {
            for is_v6 in [false, true] {
                for way in WAYS {
                    if matches!(way, Way::MappedAddress) && is_v6 {
                        continue;
                    }
                    let at = loopback(is_v6);
                    // The threads of the data plane before may still close their sockets.
                    let socket =
                        eventually(PATIENCE, || stranger(at, way).ok(), || format!("{way:?} {at}"));
                    let of_family = Options { local: vec![at], ..on_loopback(queues) };
                    let start = || Forwarder::start(of_family.clone(), Vec::new(), fails_test);
                    let error = start().unwrap_err();
                    let me = format!("({}) of the user", std::process::id());
                    let text = error.to_string();
                    assert!(text.contains(&me), "{way:?} {at}: {text}");
                    drop(socket);
                    start().unwrap();
                }
            }
        }
    });
}
