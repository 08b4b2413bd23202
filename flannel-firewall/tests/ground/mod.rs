//! A node between four networks, and packets that tell what the node's firewall did to them.
//!
//! ```text
//!  pod 10.1.7.9 ────┐      ┌──── outside 192.0.2.9
//!                  node (this thread's namespace)
//!  peer 10.1.8.9 ───┘      └──── other 198.51.100.9
//! ```
//! The one thing to know: every probe uses a new port, because the kernel decides about address translation once for a
//! connection.

#![allow(dead_code, reason = "not every test file uses all of it")]

pub(crate) mod tools;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_firewall::{Firewall, Mode, Options, Rules, Status, Wish};
use flannel_netlink::testing::{Netns, ip};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use tokio::sync::watch;
use tools::Tools;

/// Everything that flannel can be asked for.
pub(crate) const ALL: Wish = Wish { masquerade: true, fully_random: true, forward: true };
const PATIENCE: Duration = Duration::from_secs(20);

/// A mode, and in which of the kernel's iptables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Nftables,
    IptablesNft,
    IptablesLegacy,
}

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::Nftables, Self::IptablesNft, Self::IptablesLegacy];

    pub(crate) fn mode(self) -> Mode {
        if self == Self::Nftables { Mode::Nftables } else { Mode::Iptables }
    }

    /// `-nft` or `-legacy`.
    pub(crate) fn suffix(self) -> &'static str {
        if self == Self::IptablesLegacy { "-legacy" } else { "-nft" }
    }
}

/// The places between which packets go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Pod,
    Peer,
    Outside,
    Other,
}

impl Place {
    pub(crate) const ALL: [Self; 4] = [Self::Pod, Self::Peer, Self::Outside, Self::Other];

    fn prefix(self, family: Family) -> Subnet {
        let (v4, v6) = match self {
            Self::Pod => ("10.1.7.0/24", "fd00:1:0:7::/64"),
            Self::Peer => ("10.1.8.0/24", "fd00:1:0:8::/64"),
            Self::Outside => ("192.0.2.0/24", "2001:db8:2::/64"),
            Self::Other => ("198.51.100.0/24", "2001:db8:3::/64"),
        };
        if family == Family::V4 { v4 } else { v6 }.parse().unwrap()
    }

    /// Its own address.
    pub(crate) fn address(self, family: Family) -> IpAddr {
        self.prefix(family).nth(9).unwrap()
    }

    /// The node's address there.
    pub(crate) fn node(self, family: Family) -> IpAddr {
        self.prefix(family).nth(1).unwrap()
    }
}

/// The node and its neighbours; the calling thread's namespace is the node's.
pub(crate) struct Ground {
    places: Vec<Netns>,
    pub(crate) tools: Tools,
}

impl Ground {
    pub(crate) fn set() -> Self {
        let places: Vec<_> = Place::ALL.iter().map(|_| Netns::new().unwrap()).collect();
        for (n, (place, netns)) in Place::ALL.iter().zip(&places).enumerate() {
            let file =
                netns.path().display().to_string().replace("self", &std::process::id().to_string());
            ip(&format!("link add to{n} type veth peer name eth0 netns {file}"));
            ip(&format!("link set to{n} up"));
            netns.run(|| ip("link set eth0 up"));
            for family in Family::BOTH {
                let (len, nodad) =
                    (place.prefix(family).len(), if family == Family::V6 { "nodad" } else { "" });
                ip(&format!("addr add {}/{len} dev to{n} {nodad}", place.node(family)));
                netns.run(|| {
                    ip(&format!("addr add {}/{len} dev eth0 {nodad}", place.address(family)));
                    ip(&format!("route add default via {}", place.node(family)));
                });
            }
        }
        for file in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            std::fs::write(format!("/proc/sys/net/{file}"), "1").unwrap();
        }
        Self { places, tools: Tools::install() }
    }

    fn in_place<T: Send>(&self, place: Place, work: impl FnOnce() -> T + Send) -> T {
        self.places[place as usize].run(work)
    }

    /// From which address `to` sees a packet of `from`.
    pub(crate) fn seen(&self, family: Family, from: Place, to: Place) -> Option<IpAddr> {
        self.seen_at(family, from, to, 0, PATIENCE)
    }

    /// The same for a port, where 0 is any; `None` if no packet comes in time.
    pub(crate) fn seen_at(
        &self,
        family: Family,
        from: Place,
        to: Place,
        port: u16,
        patience: Duration,
    ) -> Option<IpAddr> {
        let sender = self.in_place(from, || UdpSocket::bind((from.address(family), 0)).unwrap());
        self.seen_from(&sender, family, to, port, patience)
    }

    /// The same for a packet of the node itself, sent from `source`.
    pub(crate) fn seen_of_node(&self, family: Family, source: IpAddr, to: Place) -> Option<IpAddr> {
        let sender = UdpSocket::bind((source, 0)).unwrap();
        self.seen_from(&sender, family, to, 0, PATIENCE)
    }

    fn seen_from(
        &self,
        sender: &UdpSocket,
        family: Family,
        to: Place,
        port: u16,
        patience: Duration,
    ) -> Option<IpAddr> {
        let receiver = self.in_place(to, || UdpSocket::bind((to.address(family), port)).unwrap());
        sender.send_to(b"who am I", receiver.local_addr().unwrap()).unwrap();
        Some(source_of_next(&receiver, patience)?.ip())
    }

    /// The port that `Pod` sends to `Outside` from, and the one that is seen there.
    pub(crate) fn ports(&self, family: Family) -> (u16, u16) {
        let [(from, sender), (to, receiver)] = [Place::Pod, Place::Outside].map(|place| {
            let socket =
                self.in_place(place, || UdpSocket::bind((place.address(family), 0)).unwrap());
            (socket.local_addr().unwrap(), socket)
        });
        sender.send_to(b"by which port", to).unwrap();
        (from.port(), source_of_next(&receiver, PATIENCE).unwrap().port())
    }

    /// From which address `Outside` sees what the node sends there from its pod address to a multicast group.
    pub(crate) fn multicast_seen(&self, family: Family) -> Option<IpAddr> {
        let v4 = Ipv4Addr::new(239, 1, 2, 3);
        let v6 = Ipv6Addr::new(0xff05, 0, 0, 0, 0, 0, 0, 0x123);
        let receiver = self.in_place(Place::Outside, || {
            let receiver = UdpSocket::bind((family.unspecified(), 0)).unwrap();
            match family {
                Family::V4 => receiver.join_multicast_v4(&v4, &Ipv4Addr::UNSPECIFIED),
                Family::V6 => receiver.join_multicast_v6(&v6, index_of("eth0")),
            }
            .unwrap();
            receiver
        });
        let domain = if family == Family::V4 { Domain::IPV4 } else { Domain::IPV6 };
        let sender = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP)).unwrap();
        sender.bind(&SocketAddr::new(Place::Pod.node(family), 0).into()).unwrap();
        let group: IpAddr = match Place::Outside.node(family) {
            IpAddr::V4(interface) => {
                sender.set_multicast_if_v4(&interface).unwrap();
                v4.into()
            }
            IpAddr::V6(_) => {
                sender.set_multicast_if_v6(index_of("to2")).unwrap();
                v6.into()
            }
        };
        let target = SocketAddr::new(group, receiver.local_addr().unwrap().port());
        sender.send_to(b"all of you", &SockAddr::from(target)).unwrap();
        Some(source_of_next(&receiver, PATIENCE)?.ip())
    }

    /// Everybody sees of everybody what the rules say.
    pub(crate) fn assert_masqueraded(&self, family: Family) {
        use Place::{Other, Outside, Peer, Pod};
        let own = |place: Place| place.address(family);
        for (from, to, want, why) in [
            (Pod, Outside, Outside.node(family), "pods are hidden from the outside"),
            (Pod, Peer, own(Pod), "pods see each other"),
            (Peer, Pod, own(Peer), "pods see each other"),
            (Outside, Pod, own(Outside), "own pods see who calls"),
            (
                Outside,
                Peer,
                Peer.node(family),
                "another node's pod has to answer through this node",
            ),
            (Peer, Other, Other.node(family), "pods of other nodes are hidden too"),
            (Outside, Other, own(Outside), "what is not of pods is not touched"),
        ] {
            let seen = self.seen(family, from, to);
            assert_eq!(seen, Some(want), "{family} {from:?} to {to:?}: {why}");
        }
    }
}

fn source_of_next(receiver: &UdpSocket, patience: Duration) -> Option<SocketAddr> {
    receiver.set_read_timeout(Some(patience)).unwrap();
    loop {
        match receiver.recv_from(&mut [0; 64]) {
            Ok((_, from)) => return Some(from),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return None,
            // A child of this process ended.
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => panic!("{error}"),
        }
    }
}

fn index_of(link: &str) -> u32 {
    ip(&format!("-o link show dev {link}")).split(':').next().unwrap().parse().unwrap()
}

/// A firewall at work.
pub(crate) struct Running {
    pub(crate) rules: watch::Sender<Rules>,
    pub(crate) status: watch::Receiver<Status>,
    task: tokio::task::JoinHandle<std::convert::Infallible>,
}

impl Running {
    pub(crate) async fn start(ground: &Ground, kind: Kind, rules: Rules, resync: Duration) -> Self {
        ground.tools.host_uses(kind);
        Self::with(kind, rules, Options { resync, programs: ground.tools.programs() }).await
    }

    pub(crate) async fn with(kind: Kind, rules: Rules, options: Options) -> Self {
        let firewall = Firewall::open(kind.mode(), ALL, options).await.unwrap();
        let status = firewall.status();
        let (sender, receiver) = watch::channel(rules);
        let mut running =
            Self { rules: sender, status, task: tokio::spawn(firewall.run(receiver)) };
        running.until(|status| status.in_place).await;
        running
    }

    /// Waits for a condition.
    pub(crate) async fn until(&mut self, condition: impl Fn(&Status) -> bool) -> Status {
        let wait = async {
            // Some counters wake nobody.
            while !condition(&self.status.borrow()) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let outcome = tokio::time::timeout(PATIENCE, wait).await;
        let status = self.status.borrow().clone();
        outcome.unwrap_or_else(|_| panic!("did not happen: {status:?}"));
        status
    }

    /// Wants other rules, and waits until they are in place.
    pub(crate) async fn want(&mut self, rules: Rules) {
        let changes = self.status.borrow().changes;
        self.rules.send_replace(rules);
        self.until(|status| status.changes > changes && status.in_place).await;
    }

    /// Ends it in the middle of whatever it does.
    pub(crate) async fn stop(self) {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
    }
}

/// The rules of the node that owns the subnet of `own`.
pub(crate) fn rules_of(own: Place, wish: Wish) -> Rules {
    let networks = Dual { v4: "10.1.0.0/16".parse().ok(), v6: "fd00:1::/48".parse().ok() };
    Rules::new(&networks, &Dual::from_fn(|family| Some(own.prefix(family))), wish).unwrap()
}

/// Makes a test of a function for every mode.
macro_rules! in_every_mode {
    ($($test:ident),* $(,)?) => {$(
        mod $test {
            use super::ground::{Ground, Kind};

            #[test]
            fn nftables() {
                flannel_netlink::testing::in_netns_async(|| super::$test(Ground::set(), Kind::Nftables));
            }

            #[test]
            fn iptables_nft() {
                flannel_netlink::testing::in_netns_async(|| super::$test(Ground::set(), Kind::IptablesNft));
            }

            #[test]
            fn iptables_legacy() {
                flannel_netlink::testing::in_netns_async(|| super::$test(Ground::set(), Kind::IptablesLegacy));
            }
        }
    )*};
}
