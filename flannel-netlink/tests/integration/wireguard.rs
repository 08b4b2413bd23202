//! WireGuard devices, on a kernel that has them.

use std::fs;
use std::net::{IpAddr, SocketAddr};

use flannel_core::Kernel;
use flannel_core::address::Dual;
use flannel_core::kernel::{Changes, Footprint, Invalidation, KernelEvent, Outcome};
use flannel_core::object::{
    Addr, Change, Key, Link, LinkName, Object, ObjectSet, Peer, PeerAttributes, PublicKey, Route,
    Secret, Via, Wireguard,
};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::testing::{in_netns, in_netns_async, ip, run};
use test_support::guest::in_qemu;

/// A private key has 32 times the same byte, except for the bits that are fixed.
struct KeyPair {
    private: u8,
    public: &'static str,
}

const KEYS: [KeyPair; 2] = [
    KeyPair { private: 0x11, public: "e06Qm75//kTEZaIgA31gjuNYl9Me+XLwf3SJLLD3PxM=" },
    KeyPair { private: 0x22, public: "D6poTtKIZ7l/Smot7l34zpdOdrcBjj8iocTPJnhXDyA=" },
];

fn name() -> LinkName {
    "flannel-wg".parse().unwrap()
}

fn footprint() -> Footprint {
    let networks = vec!["10.1.0.0/16".parse().unwrap(), "fd00:1::/32".parse().unwrap()];
    Footprint { links: [name()].into(), networks, ..Footprint::default() }
}

/// An end of the tunnel, 0 or 1.
struct End {
    n: usize,
    kernel: NetlinkKernel,
}

impl End {
    fn device(&self) -> Link {
        let mut key = [KEYS[self.n].private; 32];
        // The kernel fixes these bits of a key (RFC 7748, section 5).
        key[0] &= 248;
        key[31] = key[31] & 127 | 64;
        let kind = Wireguard { key: Secret::new(key), port: 51820 }.into();
        Link { name: name(), mtu: 1400, up: true, kind }
    }

    fn address(&self) -> IpAddr {
        [10, 1, self.n as u8, 0].into()
    }

    /// This end as a peer of the other end.
    fn peer(&self) -> Peer {
        let n = self.n;
        let endpoint: SocketAddr = format!("192.0.2.{n}:51820").parse().unwrap();
        let allowed = Dual {
            v4: format!("10.1.{n}.0/24").parse().ok(),
            v6: format!("fd00:1:{n}::/64").parse().ok(),
        };
        let psk = Some(Secret::new([7; 32]));
        let attributes = Box::new(PeerAttributes { endpoint, allowed, psk, keepalive: 0 });
        Peer { link: name(), key: public(n), attributes }
    }

    fn objects(&self, peer: Peer) -> Vec<Object> {
        let route =
            Route { dst: "10.1.0.0/16".parse().unwrap(), via: Via::Link(name()), mtu: None };
        let addr = Addr { link: name(), address: self.address(), len: 32 };
        vec![self.device().into(), addr.into(), peer.into(), route.into()]
    }

    fn put(&self, objects: &[Object]) {
        let changes: Vec<Change> = objects.iter().cloned().map(Change::Put).collect();
        for (change, outcome) in changes.iter().zip(self.kernel.apply(&footprint(), &changes)) {
            assert_eq!(outcome, Outcome::Done, "{change}");
        }
    }

    fn state(&self) -> ObjectSet {
        self.kernel.snapshot(&footprint()).unwrap()
    }

    fn assert_state(&self, objects: &[Object]) {
        let want: ObjectSet = objects.iter().cloned().collect();
        let text = |state: &ObjectSet| state.iter().map(ToString::to_string).collect::<Vec<_>>();
        let is = self.state();
        // The texts show a difference better, but lack some attributes.
        assert_eq!(text(&is), text(&want));
        assert_eq!(is, want);
        assert!(is.iter().all(|object| !is.is_inexact(&object.key())), "{is:?}");
    }
}

fn public(n: usize) -> PublicKey {
    KEYS[n].public.parse().unwrap()
}

/// Two ends, in this network namespace and in `far`.
fn ends() -> (End, End) {
    ip("link set lo up");
    ip("netns add far");
    ip("link add up0 type veth peer name up0 netns far");
    for (n, at) in [(0, ""), (1, "-n far ")] {
        ip(&format!("{at}link set lo up"));
        ip(&format!("{at}addr add 192.0.2.{n}/24 dev up0"));
        ip(&format!("{at}link set up0 up"));
    }
    let far = NetlinkKernel::open_in("/run/netns/far").unwrap();
    (End { n: 0, kernel: NetlinkKernel::open().unwrap() }, End { n: 1, kernel: far })
}

fn wg(args: &str) -> String {
    run("wg", args)
}

fn ping() {
    run("ping", "-c 1 -W 5 -q 10.1.1.0");
}

#[test]
fn packets_pass_and_changes_by_other_programs_are_undone() {
    in_qemu(&["veth", "wireguard"], || {
        in_netns(|| {
            let (near, far) = ends();
            near.kernel.may_change(&[near.device()]).unwrap();
            assert!(!ip("link show").contains("wireguard"), "the check makes no device");
            assert!(!ip("link show").contains("wg"), "the check makes no device");
            let objects = near.objects(far.peer());
            let others = far.objects(near.peer());
            near.put(&objects);
            far.put(&others);
            near.assert_state(&objects);
            far.assert_state(&others);
            ping();
            assert_eq!(wg("show flannel-wg public-key").trim(), public(0).to_string());
            let tunnel = near.kernel.tunnel(name()).unwrap();
            assert_eq!(tunnel.key, public(0));
            assert_eq!(tunnel.port, 51820);
            assert_eq!(tunnel.sessions.len(), 1);
            let session = &tunnel.sessions[0];
            assert!(session.is_fresh() && session.received > 0 && session.sent > 0);
            assert_eq!(session.key, public(1));
            assert_eq!(session.allowed, far.peer().attributes.allowed);
            assert_eq!(session.put, Some(far.peer().attributes.endpoint));
            assert_eq!(session.endpoint.unwrap().port(), 51820);

            fs::write("/run/psk", "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHv8=").unwrap();
            let key = public(1);
            for foreign in [
                "listen-port 51999".to_owned(),
                "fwmark 7".to_owned(),
                "private-key /run/psk".to_owned(),
                format!("peer {key} allowed-ips 10.1.1.0/24"),
                format!("peer {key} allowed-ips 10.1.1.0/24,fd00:1:1::/64,10.9.0.0/16"),
                format!("peer {key} preshared-key /run/psk"),
                format!("peer {key} persistent-keepalive 25"),
                format!("peer {key} remove"),
            ] {
                wg(&format!("set flannel-wg {foreign}"));
                let state = near.state();
                let mut changed = objects.clone();
                changed
                    .retain(|it| state.get(&it.key()) != Some(it) || state.is_inexact(&it.key()));
                assert_eq!(changed.len(), 1, "{foreign}: {state:?}");
                near.put(&objects);
                near.assert_state(&objects);
                ping();
            }
            // A key that is no longer wanted is removed.
            let mut without = far.peer();
            without.attributes.psk = None;
            near.put(&[without.clone().into()]);
            near.assert_state(&near.objects(without));
            near.put(&objects);

            // Subnets move to another peer. The old peer has no subnets until it is deleted.
            let moved = Peer { key: PublicKey([9; 32]), ..far.peer() };
            near.put(&[moved.clone().into()]);
            let is = near.state();
            let Some(Object::Peer(left)) = is.get(&Object::from(far.peer()).key()) else {
                panic!("{is:?}");
            };
            assert!(left.attributes.allowed.is_empty(), "{left:?}");
            let delete = |peer: &Peer| Change::Delete(peer.clone().into());
            let changes = [delete(&far.peer()), delete(&far.peer())];
            assert_eq!(near.kernel.apply(&footprint(), &changes), [Outcome::Done, Outcome::Done]);
            near.assert_state(&near.objects(moved));

            let changes = [Change::Delete(near.device().into())];
            near.kernel.apply(&footprint(), &changes).remove(0).into_result().unwrap();
            near.assert_state(&[]);
            assert!(near.kernel.tunnel(name()).unwrap_err().is_absent());
        });
    });
}

/// A NAT changes the port of a peer. The new port is in use while handshakes succeed, also after a
/// restart.
#[test]
fn a_peer_may_roam() {
    in_qemu(&["veth", "wireguard"], || {
        in_netns(|| {
            let (near, far) = ends();
            let objects = near.objects(far.peer());
            near.put(&objects);
            far.put(&far.objects(near.peer()));
            ping();
            run("ip", "netns exec far wg set flannel-wg listen-port 40000");
            run("ip", "netns exec far ping -c 1 -W 5 -q 10.1.0.0");
            let session = || near.kernel.tunnel(name()).unwrap().sessions.remove(0);
            let endpoint = || session().endpoint.unwrap().port();
            assert_eq!(endpoint(), 40000);
            assert_eq!(session().put.unwrap().port(), 51820);
            near.assert_state(&objects);
            near.put(&objects);
            assert_eq!(endpoint(), 40000, "a put of the same endpoint");

            let again = End { n: 0, kernel: NetlinkKernel::open().unwrap() };
            let roamed = again.state();
            assert_ne!(roamed.get(&objects[2].key()), Some(&objects[2]), "it is not known");
            again.put(&objects);
            assert_eq!(endpoint(), 40000, "a put after a restart");
            again.assert_state(&objects);
            ping();

            let mut moved = far.peer();
            moved.attributes.endpoint.set_port(50000);
            again.put(&[moved.into()]);
            assert_eq!(endpoint(), 50000, "the lease names another one");
        });
    });
}

#[test]
fn changes_of_peers_are_found_by_reading() {
    in_qemu(&["veth", "wireguard"], || {
        in_netns_async(async || {
            let (near, far) = ends();
            near.put(&near.objects(far.peer()));
            near.assert_state(&near.objects(far.peer()));
            let mut changes = near.kernel.changes().unwrap();
            // Time goes on as soon as the stream waits.
            tokio::time::pause();
            let other = PublicKey([9; 32]);
            wg(&format!("set flannel-wg peer {} persistent-keepalive 7", public(1)));
            wg(&format!("set flannel-wg peer {other}"));
            let events = peer_events(&mut *changes).await;
            assert!(
                matches!(events[..], [KernelEvent::Present(_), KernelEvent::Present(_)]),
                "{events:?}"
            );

            // A snapshot for another purpose hides no change.
            wg(&format!("set flannel-wg peer {} persistent-keepalive 9", public(1)));
            wg(&format!("set flannel-wg peer {} ", PublicKey([10; 32])));
            near.state();
            assert_eq!(peer_events(&mut *changes).await.len(), 2);
            wg(&format!("set flannel-wg peer {} remove", PublicKey([10; 32])));
            near.state();
            assert_eq!(peer_events(&mut *changes).await.len(), 1);

            // Changes of our own are not reported.
            near.put(&near.objects(far.peer()));
            wg(&format!("set flannel-wg peer {other} remove"));
            let deleted = KernelEvent::Deleted(Key::Peer(name(), other));
            assert_eq!(peer_events(&mut *changes).await, [deleted]);
            wg("set flannel-wg listen-port 40000");
            while changes.next().await != Ok(Invalidation::Link(name())) {}
        });
    });
}

/// The next events about peers. Events about neighbours on the uplink are ignored.
async fn peer_events(changes: &mut dyn Changes) -> Vec<KernelEvent> {
    loop {
        let Invalidation::Objects(mut events, _) = changes.next().await.unwrap() else { continue };
        events.retain(|event| matches!(event.key(), Key::Peer(..)));
        if !events.is_empty() {
            return events;
        }
    }
}
