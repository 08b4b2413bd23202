//! Starts over existing objects: of an earlier run, plain or by nexthop object, Go flannel's,
//! or none.
//!
//! A listener records every deletion while the new run settles. So the test fails even if an object
//! is missing for a moment only.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use flannel_backend_hostgw::HostGw;
use flannel_backend_vxlan::VxlanBackend;
use flannel_core::address::Dual;
use flannel_core::backend::ExternalInterface;
use flannel_core::kernel::{Invalidation, KernelEvent, NexthopBlock};
use flannel_core::lease::{LeaseAttrs, Offer, Origin, View};
use flannel_core::object::{Key, Nexthop, Object, ObjectSet, Route, Via};
use flannel_core::status::Status;
use flannel_core::testing::FakeSubnets;
use flannel_core::{Backend, Kernel, Subnet, SubnetManager};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::testing::{bridge, in_netns_async, ip};
use flannel_route::{Host, JoinOptions, cleanup, ready_for_go};
use tokio::sync::watch;
use tokio::task::JoinHandle;

const PEERS: std::ops::Range<u8> = 2..12;

fn config(backend: &dyn Backend, n: u8) -> String {
    let kind = backend.kind();
    format!(
        r#"{{"Network":"10.{n}.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:{n}::/48",
            "Backend":{{"Type":"{kind}"}}}}"#
    )
}

fn uplink() {
    ip("link add eth0 type veth peer name wire");
    ip("link set wire up");
    ip("address add 192.0.2.1/24 dev eth0");
    ip("address add 2001:db8::1/64 dev eth0 nodad");
    ip("link set eth0 up");
}

/// The leases of a cluster with the pod network 10.n.0.0/16.
fn leases(backend: &dyn Backend, n: u8) -> FakeSubnets {
    let subnets = FakeSubnets::with_config(&config(backend, n));
    PEERS.for_each(|peer| put(&subnets, backend, n, peer, peer));
    subnets
}

fn put(subnets: &FakeSubnets, backend: &dyn Backend, n: u8, peer: u8, public: u8) {
    let data = |mac: String| Some(format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#).into());
    let attrs = LeaseAttrs::from(
        Offer::new(
            [format!("192.0.2.{public}"), format!("2001:db8::{public:x}")]
                .iter()
                .map(|a| a.parse::<IpAddr>().unwrap())
                .collect(),
        )
        .with_kind(backend.lease_type())
        .with_data(Dual {
            v4: data(format!("0a:00:00:00:04:{peer:02x}")),
            v6: data(format!("0a:00:00:00:06:{peer:02x}")),
        }),
    );
    subnets.put_attrs(&key(n, peer), attrs);
}

fn key(n: u8, peer: u8) -> String {
    format!("10.{n}.{peer}.0-24&fd00:{n}:0:{peer:x}::-64")
}

struct Run {
    uplink: &'static str,
    kernel: Arc<NetlinkKernel>,
    backend: &'static dyn Backend,
    config: flannel_core::Config,
    status: watch::Receiver<Arc<Status>>,
    task: JoinHandle<()>,
}

impl Run {
    async fn start(backend: &'static dyn Backend, subnets: &FakeSubnets, nexthops: bool) -> Self {
        Self::start_on("eth0", backend, subnets, nexthops).await
    }

    async fn start_on(
        uplink: &'static str,
        backend: &'static dyn Backend,
        subnets: &FakeSubnets,
        nexthops: bool,
    ) -> Self {
        let mut run = Self::begin(uplink, backend, subnets, nexthops, false).await;
        run.in_sync().await;
        run
    }

    /// With `cached` the leases come from the cache, until `subnets` change.
    async fn begin(
        uplink: &'static str,
        backend: &'static dyn Backend,
        subnets: &FakeSubnets,
        nexthops: bool,
        cached: bool,
    ) -> Self {
        let kernel = NetlinkKernel::open().unwrap();
        let kernel = Arc::new(if nexthops { kernel } else { kernel.without_nexthops() });
        let address: Dual<IpAddr> =
            ["192.0.2.1", "2001:db8::1"].iter().map(|a| a.parse::<IpAddr>().unwrap()).collect();
        let iface = ExternalInterface::new(uplink.parse().unwrap(), 1500, address)
            .with_reason("it is the only one");
        let host =
            Host::new(iface, kernel.clone(), Arc::new(subnets.clone())).with_machine_id("test");
        let config = subnets.network_config().await.unwrap();
        let network = host.join(backend, &config, JoinOptions::default()).await.unwrap().network;
        let status = network.handle().status;
        let views = subnets.watch_leases().await.unwrap();
        if cached {
            let leases = views.borrow().leases.clone();
            subnets.set_view(View { leases, origin: Origin::Cached { written: None } });
        }
        let task = tokio::spawn(async move { drop(network.run(views).await) });
        Self { uplink, kernel, backend, config, status, task }
    }

    async fn in_sync(&mut self) {
        self.status("in sync", |status| status.in_sync).await;
    }

    async fn status(&mut self, what: &str, is_so: impl Fn(&Status) -> bool) {
        let so = async { drop(self.status.wait_for(|status| is_so(status)).await.unwrap()) };
        if tokio::time::timeout(Duration::from_secs(20), so).await.is_err() {
            panic!("never {what}: {:#?}", self.status.borrow());
        }
    }

    /// Waits for a condition of the kernel.
    async fn until(&self, what: &str, done: impl Fn(&ObjectSet) -> bool) {
        let wait = async {
            while !done(&self.state()) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let in_time = tokio::time::timeout(Duration::from_secs(20), wait).await;
        assert!(in_time.is_ok(), "{what}: {:#?}", text(&self.state()));
    }

    fn footprint(&self) -> flannel_core::kernel::Footprint {
        let mut footprint =
            self.backend.footprint(&self.config, Some(self.uplink.parse().unwrap())).unwrap();
        footprint.nexthops = NexthopBlock::choose(&*self.kernel, &footprint).unwrap().0;
        footprint
    }

    fn state(&self) -> ObjectSet {
        self.kernel.snapshot(&self.footprint()).unwrap()
    }

    async fn stop(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

fn text(state: &ObjectSet) -> Vec<String> {
    state.iter().map(ToString::to_string).collect()
}

fn count(state: &ObjectSet) -> (usize, usize) {
    let nexthops = state.iter().filter(|o| matches!(o, Object::Nexthop(_))).count();
    (nexthops, state.iter().filter(|o| matches!(o, Object::Route(_))).count())
}

/// All changes in the namespace while `work` ran, by any process.
async fn recorded<T>(work: impl Future<Output = T>) -> (T, Vec<KernelEvent>) {
    let listener = NetlinkKernel::open().unwrap();
    let mut changes = listener.changes().unwrap();
    let mut reports = Vec::new();
    let mut by_nexthop = ByNexthop::read();
    let mut take = |doubts| match doubts {
        Invalidation::Objects(more, _) => {
            more.into_iter().for_each(|report| by_nexthop.take(report, &mut reports));
        }
        Invalidation::Link(_) => {}
        _ => panic!("messages were lost"),
    };
    let mut work = std::pin::pin!(work);
    let result = loop {
        tokio::select! {
            result = &mut work => break result,
            doubts = changes.next() => take(doubts.unwrap()),
        }
    };
    // The event of our own marker comes after the events of the last change.
    let mark = "neigh replace 192.0.2.250 lladdr 0a:00:00:00:00:fa dev eth0 nud permanent";
    ip(mark);
    let mark = Key::Neigh("eth0".parse().unwrap(), IpAddr::from([192, 0, 2, 250]));
    loop {
        let doubts = tokio::time::timeout(Duration::from_secs(20), changes.next()).await;
        let doubts = doubts.expect("an event of the marker").unwrap();
        let is_mark = |report: &KernelEvent| match report {
            KernelEvent::Present(object) => object.key() == mark,
            _ => false,
        };
        let last = matches!(&doubts, Invalidation::Objects(reports, _)
            if reports.iter().any(is_mark));
        take(doubts);
        if last {
            ip("neigh del 192.0.2.250 dev eth0");
            reports.retain(|report| !is_mark(report));
            return (result, reports);
        }
    }
}

/// The routes of each nexthop object. The kernel deletes them with it, without an event.
struct ByNexthop(BTreeMap<Subnet, u32>);

impl ByNexthop {
    fn read() -> Self {
        let routes: Vec<serde_json::Value> = serde_json::from_str(&ip("-j route show")).unwrap();
        let id = |route: &serde_json::Value| u32::try_from(route["nhid"].as_u64()?).ok();
        Self(
            routes
                .iter()
                .filter_map(|route| Some((route["dst"].as_str()?.parse().ok()?, id(route)?)))
                .collect(),
        )
    }

    /// Adds a report, and those that the kernel does not send.
    fn take(&mut self, report: KernelEvent, reports: &mut Vec<KernelEvent>) {
        match &report {
            KernelEvent::Present(Object::Route(Route { dst, via: Via::Nexthop(id), .. }))
            | KernelEvent::Inexact(Object::Route(Route { dst, via: Via::Nexthop(id), .. })) => {
                self.0.insert(*dst, *id);
            }
            KernelEvent::Present(object) | KernelEvent::Inexact(object) => {
                self.forget(&object.key());
            }
            KernelEvent::Unrepresentable(key) | KernelEvent::Deleted(key) => drop(self.forget(key)),
            _ => {}
        }
        let KernelEvent::Deleted(Key::Nexthop(id)) = report else { return reports.push(report) };
        reports.push(report);
        let orphans = self.0.iter().filter(|(_, by)| **by == id);
        reports.extend(orphans.map(|(dst, _)| KernelEvent::Deleted(Key::Route(*dst))));
        self.0.retain(|_, by| *by != id);
    }

    fn forget(&mut self, key: &Key) -> Option<u32> {
        if let Key::Route(dst) = key { self.0.remove(dst) } else { None }
    }
}

fn deleted(reports: &[KernelEvent]) -> Vec<Key> {
    reports
        .iter()
        .filter_map(|report| match report {
            KernelEvent::Deleted(key) => Some(*key),
            _ => None,
        })
        .collect()
}

/// The keys of live peers, whose objects must not be deleted.
fn of_live_peer(key: &Key) -> bool {
    let live = |address: IpAddr| match address {
        IpAddr::V4(a) => a.octets()[0] == 10 && PEERS.contains(&a.octets()[2]),
        IpAddr::V6(a) => a.segments()[0] == 0xfd00 && PEERS.contains(&(a.segments()[3] as u8)),
    };
    match key {
        Key::Route(dst) => matches!(dst.len(), 24 | 64) && live(dst.base()),
        Key::Neigh(link, address) => link.as_str() != "eth0" && live(*address),
        Key::Fdb(_, mac) => PEERS.contains(&mac.0[5]),
        _ => false,
    }
}

static BACKENDS: [&'static dyn Backend; 2] = [&VxlanBackend, &HostGw];

#[test]
fn a_moved_peer_needs_one_message_to_the_kernel() {
    in_netns_async(|| async {
        uplink();
        for backend in BACKENDS {
            let subnets = leases(backend, 1);
            let run = Run::start(backend, &subnets, true).await;
            assert_eq!(count(&run.state()), (10, 20), "{:#?}", text(&run.state()));
            let moved = async {
                put(&subnets, backend, 1, 7, 200);
                run.until("moved", |state| {
                    state.iter().any(|object| match object {
                        Object::Nexthop(Nexthop { gateway, .. }) => {
                            *gateway == IpAddr::from([192, 0, 2, 200])
                        }
                        Object::Fdb(fdb) => fdb.dst == IpAddr::from([192, 0, 2, 200]),
                        _ => false,
                    })
                })
                .await;
            };
            let ((), reports) = recorded(moved).await;
            let v4 = |report: &&KernelEvent| match report {
                KernelEvent::Present(Object::Nexthop(_)) => true,
                KernelEvent::Present(Object::Fdb(fdb)) => fdb.dst.is_ipv4(),
                // With a nexthop object the kernel also reports the routes by it.
                KernelEvent::Present(Object::Route(Route { via: Via::Nexthop(_), .. })) => false,
                KernelEvent::Present(Object::Route(route)) => route.dst.base().is_ipv4(),
                KernelEvent::Present(Object::Neigh(neigh)) => {
                    of_live_peer(&Key::Neigh(neigh.link, neigh.address)) && neigh.address.is_ipv4()
                }
                // The kernel adds a link-local route to a new device at any time.
                KernelEvent::Related(key) => of_live_peer(key),
                KernelEvent::Duplicate(object) => of_live_peer(&object.key()),
                KernelEvent::Inexact(_)
                | KernelEvent::Unrepresentable(_)
                | KernelEvent::Deleted(_) => true,
                _ => false,
            };
            let keys: Vec<_> = reports.iter().filter(v4).collect();
            let expected = |r: &KernelEvent| match r {
                KernelEvent::Present(Object::Nexthop(_)) => backend.kind() == "host-gw",
                KernelEvent::Present(Object::Fdb(_)) => backend.kind() == "vxlan",
                _ => false,
            };
            assert!(keys.len() == 1 && expected(keys[0]), "{}: {keys:#?}", backend.kind());
            let kernel = run.kernel.clone();
            let footprint = run.footprint();
            run.stop().await;
            let would = cleanup(&*kernel, &footprint, true).unwrap();
            assert_eq!(cleanup(&*kernel, &footprint, false).unwrap(), would);
            assert!(would.failed.is_empty() && kernel.snapshot(&footprint).unwrap().is_empty());
            assert_eq!(ip("nexthop show").trim(), "");
        }
    });
}

#[test]
fn a_start_adopts_existing_objects_and_deletes_none_of_a_live_peer() {
    in_netns_async(|| async {
        uplink();
        ip("route add 10.1.200.0/24 via 192.0.2.99 dev eth0");
        ip("nexthop add id 7 via 192.0.2.98 dev eth0 protocol static");
        ip("route add 10.1.201.0/24 nhid 7");
        for backend in BACKENDS {
            let subnets = leases(backend, 1);
            let plain = Run::start(backend, &subnets, false).await;
            let wanted_plain = plain.state();
            plain.stop().await;
            let first = Run::start(backend, &subnets, true).await;
            let want = first.state();
            first.stop().await;
            assert_eq!((count(&wanted_plain), count(&want)), ((0, 20), (10, 20)));
            for (before, after) in [(true, true), (true, false), (false, false), (false, true)] {
                let wanted = if after { &want } else { &wanted_plain };
                let case = format!("{} {before} {after}", backend.kind());
                // A peer that left while no daemon ran.
                let stale = leases(backend, 1);
                put(&stale, backend, 1, 77, 77);
                Run::start(backend, &stale, before).await.stop().await;
                let (run, reports) = recorded(Run::start(backend, &subnets, after)).await;
                let lost: Vec<_> = deleted(&reports).into_iter().filter(of_live_peer).collect();
                assert_eq!(lost, [], "{case}");
                assert!(
                    deleted(&reports).contains(&Key::Route("10.1.77.0/24".parse().unwrap())),
                    "{case}"
                );
                assert_eq!(text(&run.state()), text(wanted), "{case}");
                run.stop().await;
                // Cached leases delete nothing. Only the store's leases do.
                let left = Run::start(backend, &stale, before).await;
                let stale_objects = left.state();
                left.stop().await;
                let cached = async {
                    let mut run = Run::begin("eth0", backend, &subnets, after, true).await;
                    run.status("settled", |status| status.settled && status.peers == PEERS.len())
                        .await;
                    assert!(!run.status.borrow().in_sync);
                    run
                };
                let (mut run, reports) = recorded(cached).await;
                assert_eq!(deleted(&reports), [], "{case}");
                let there = run.state();
                assert!(
                    wanted.iter().all(|object| there.get(&object.key()) == Some(object)),
                    "{case}"
                );
                assert!(
                    stale_objects.iter().all(|object| there.get(&object.key()).is_some()),
                    "{case}"
                );
                let answer = async {
                    put(&subnets, backend, 1, PEERS.start, PEERS.start);
                    run.in_sync().await;
                };
                let ((), reports) = recorded(answer).await;
                let lost: Vec<_> = deleted(&reports).into_iter().filter(of_live_peer).collect();
                assert_eq!(lost, [], "{case}");
                assert_eq!(text(&run.state()), text(wanted), "{case}");
                run.stop().await;
            }
            let (again, reports) = recorded(Run::start(backend, &subnets, true)).await;
            assert_eq!(text(&again.state()), text(&want));
            assert_eq!(deleted(&reports), []);
            let kernel = again.kernel.clone();
            let footprint = again.footprint();
            again.stop().await;
            assert_eq!(
                text(&kernel.snapshot(&footprint).unwrap()),
                text(&want),
                "stopping leaves everything"
            );
            cleanup(&*kernel, &footprint, false).unwrap();
        }
        let foreign = ip("route show root 10.1.0.0/16");
        assert!(
            foreign.contains("10.1.200.0/24 via 192.0.2.99")
                && foreign.contains("10.1.201.0/24 nhid 7")
        );
        assert_eq!(foreign.trim().lines().count(), 2, "{foreign}");
    });
}

#[test]
fn objects_of_go_flannel_are_adopted() {
    in_netns_async(|| async {
        uplink();
        for (device, mtu, family, local, subnet, far) in [
            ("flannel.1", 1450, 4, "192.0.2.1", ["10.1.", ".0", "/32", "/24"], "192.0.2."),
            (
                "flannel-v6.1",
                1430,
                6,
                "2001:db8::1",
                ["fd00:1:0:", "::", "/128", "/64"],
                "2001:db8::",
            ),
        ] {
            ip(&format!(
                "link add {device} address 0a:00:00:00:0{family}:01 mtu {mtu} type vxlan id 1 \
                 dev eth0 local {local} dstport 8472 nolearning"
            ));
            let number = |n: u8| if family == 4 { n.to_string() } else { format!("{n:x}") };
            let [before, after, host, len] = subnet;
            let base = |n: u8| format!("{before}{}{after}", number(n));
            ip(&format!("address add {}{host} dev {device} nodad", base(1)));
            ip(&format!("link set {device} up"));
            for peer in PEERS.chain([77]) {
                let base = base(peer);
                let far = format!("{far}{}", number(peer));
                let mac = format!("0a:00:00:00:0{family}:{peer:02x}");
                ip(&format!("neigh add {base} lladdr {mac} dev {device} nud permanent"));
                bridge(&format!("fdb add {mac} dev {device} dst {far} self permanent"));
                ip(&format!("-{family} route add {base}{len} via {base} dev {device} onlink"));
            }
        }
        let subnets = leases(&VxlanBackend, 1);
        let (run, reports) = recorded(Run::start(&VxlanBackend, &subnets, true)).await;
        let lost: Vec<_> = deleted(&reports).into_iter().filter(of_live_peer).collect();
        assert_eq!(lost, []);
        for stale in ["10.1.77.0/24", "fd00:1:0:4d::/64"] {
            assert!(deleted(&reports).contains(&Key::Route(stale.parse().unwrap())), "{stale}");
        }
        let adopted = run.state();
        let kernel = run.kernel.clone();
        let footprint = run.footprint();
        run.stop().await;
        cleanup(&*kernel, &footprint, false).unwrap();
        let run = Run::start(&VxlanBackend, &subnets, true).await;
        let mac = |line: &String| !line.starts_with("link flannel");
        let lines = |state: &ObjectSet| text(state).into_iter().filter(mac).collect::<Vec<_>>();
        assert_eq!(lines(&adopted), lines(&run.state()), "the same end state as from nothing");
        run.stop().await;
    });
}

#[test]
fn host_gw_routes_of_go_flannel_are_adopted() {
    in_netns_async(|| async {
        uplink();
        // Go flannel's routes have the protocol boot.
        for peer in PEERS {
            ip(&format!("route add 10.1.{peer}.0/24 via 192.0.2.{peer} dev eth0"));
            ip(&format!("-6 route add fd00:1:0:{peer:x}::/64 via 2001:db8::{peer:x} dev eth0"));
        }
        let subnets = leases(&HostGw, 1);
        let (run, reports) = recorded(Run::start(&HostGw, &subnets, true)).await;
        let lost: Vec<_> = deleted(&reports).into_iter().filter(of_live_peer).collect();
        assert_eq!(lost, []);
        let adopted = run.state();
        let kernel = run.kernel.clone();
        let footprint = run.footprint();
        run.stop().await;
        cleanup(&*kernel, &footprint, false).unwrap();
        assert_eq!(ip("route show root 10.1.0.0/16").trim(), "", "adopted routes are removed too");
        let run = Run::start(&HostGw, &subnets, true).await;
        assert_eq!(text(&adopted), text(&run.state()), "the same end state as from nothing");
        run.stop().await;
    });
}

#[test]
fn ready_for_go_deletes_no_route_and_leaves_routes_that_go_flannel_can_delete() {
    in_netns_async(|| async {
        uplink();
        for backend in BACKENDS {
            let run = Run::start(backend, &leases(backend, 1), true).await;
            let kernel = run.kernel.clone();
            let footprint = run.footprint();
            run.stop().await;
            let way = async { ready_for_go(&*kernel, &footprint, false).unwrap() };
            let (report, reports) = recorded(way).await;
            assert!(report.failed.is_empty() && report.done.len() == 20, "{report:#?}");
            let gone = deleted(&reports);
            assert!(
                gone.iter().all(|key| matches!(key, Key::Nexthop(_))) && gone.len() == 10,
                "{gone:?}"
            );
            let state = kernel.snapshot(&footprint).unwrap();
            assert_eq!(count(&state), (0, 20));
            for object in state.iter() {
                let Object::Route(Route { dst, via: Via::Gateway { gateway, link, .. }, .. }) =
                    object
                else {
                    continue;
                };
                ip(&format!("route del {dst} via {gateway} dev {link}"));
            }
            assert_eq!(count(&kernel.snapshot(&footprint).unwrap()), (0, 0));
            cleanup(&*kernel, &footprint, false).unwrap();
        }
    });
}

/// The keys of the reports.
fn keys_of(reports: &[KernelEvent]) -> Vec<Key> {
    reports.iter().map(KernelEvent::key).collect()
}

#[test]
fn restarts_of_vxlan_and_host_gw_in_one_namespace_do_not_affect_each_other() {
    in_netns_async(|| async {
        uplink();
        let direct =
            config(&VxlanBackend, 1).replace(r#""Type""#, r#""DirectRouting":true,"Type""#);
        for vxlan_config in [config(&VxlanBackend, 1), direct] {
            let one = FakeSubnets::with_config(&vxlan_config);
            let other = leases(&HostGw, 2);
            PEERS.for_each(|peer| put(&one, &VxlanBackend, 1, peer, peer));
            for (before, after) in [(false, false), (true, true), (false, true), (true, false)] {
                let case = format!("{vxlan_config} {before} {after}");
                let vxlan = Run::start(&VxlanBackend, &one, before).await;
                let hostgw = Run::start(&HostGw, &other, before).await;
                let objects = |nexthops| if nexthops { (10, 20) } else { (0, 20) };
                assert_eq!(
                    [&vxlan, &hostgw].map(|run| count(&run.state())),
                    [objects(before); 2],
                    "{case}"
                );
                let theirs = hostgw.state();
                let footprint = [vxlan.footprint(), hostgw.footprint()];
                // Each is aborted at any point, and started while the other runs.
                let restart = async {
                    vxlan.stop().await;
                    Run::start(&VxlanBackend, &one, after).await
                };
                let (vxlan, reports) = recorded(restart).await;
                assert!(
                    !keys_of(&reports).iter().any(|key| theirs.get(key).is_some()),
                    "{case}: {reports:#?}"
                );
                let lost: Vec<_> = deleted(&reports).into_iter().filter(of_live_peer).collect();
                assert_eq!(lost, [], "{case}");
                let ours = vxlan.state();
                let restart = async {
                    hostgw.stop().await;
                    Run::start(&HostGw, &other, after).await
                };
                let (hostgw, again) = recorded(restart).await;
                assert!(
                    !keys_of(&again).iter().any(|key| ours.get(key).is_some()),
                    "{case}: {again:#?}"
                );
                let lost: Vec<_> = deleted(&again).into_iter().filter(of_live_peer).collect();
                assert_eq!(lost, [], "{case}");
                if before == after {
                    // No object of a peer is written again.
                    let touched: Vec<_> = keys_of(&reports)
                        .into_iter()
                        .chain(keys_of(&again))
                        .filter(|key| of_live_peer(key) || matches!(key, Key::Nexthop(_)))
                        .collect();
                    assert_eq!(touched, [], "{case}");
                }
                assert_eq!(
                    [&vxlan, &hostgw].map(|run| count(&run.state())),
                    [objects(after); 2],
                    "{case}"
                );
                // The objects of one are removed, and the objects of the other stay.
                let kernel = vxlan.kernel.clone();
                let theirs = hostgw.state();
                vxlan.stop().await;
                cleanup(&*kernel, &footprint[0], false).unwrap();
                assert_eq!(count(&kernel.snapshot(&footprint[0]).unwrap()), (0, 0), "{case}");
                assert_eq!(text(&hostgw.state()), text(&theirs), "{case}");
                hostgw.stop().await;
                cleanup(&*kernel, &footprint[1], false).unwrap();
                assert_eq!(left_by_flannel(), (0, 0), "{case}");
            }
        }
    });
}

/// All routes and nexthop objects of flannel's protocol.
fn left_by_flannel() -> (usize, usize) {
    let lines = |command: &str| ip(command).lines().filter(|line| !line.trim().is_empty()).count();
    let routes = ["-4", "-6"].map(|inet| lines(&format!("{inet} route show table all proto 241")));
    (lines("nexthop show protocol 241"), routes.iter().sum())
}

#[test]
fn another_backend_removes_the_old_objects_and_deletes_none_of_a_live_peer() {
    in_netns_async(|| async {
        uplink();
        for (before, after) in [(true, true), (true, false), (false, true), (false, false)] {
            for backends in [BACKENDS, [BACKENDS[1], BACKENDS[0]]] {
                let stale = leases(backends[0], 1);
                put(&stale, backends[0], 1, 77, 77);
                Run::start(backends[0], &stale, before).await.stop().await;
                let subnets = leases(backends[1], 1);
                let (run, reports) = recorded(Run::start(backends[1], &subnets, after)).await;
                let case = format!("{before} {after} {}", backends[1].kind());
                let lost: Vec<_> = deleted(&reports).into_iter().filter(of_live_peer).collect();
                assert_eq!(lost, [], "{case}");
                let (nexthops, routes) = count(&run.state());
                assert_eq!((nexthops, routes), (if after { 10 } else { 0 }, 20), "{case}");
                assert_eq!(
                    left_by_flannel(),
                    (nexthops, routes),
                    "{case}: {}",
                    ip("route show table all")
                );
                run.stop().await;
            }
        }
    });
}

#[test]
fn another_external_interface_leaves_no_object_on_the_old_one() {
    in_netns_async(|| async {
        uplink();
        ip("link add eth1 type veth peer name wire1");
        ip("link set wire1 up");
        ip("address add 192.0.2.1/24 dev eth1");
        ip("address add 2001:db8::1/64 dev eth1 nodad");
        ip("link set eth1 up");
        // Only the peers below are on a link.
        for name in ["eth0", "eth1"] {
            ip(&format!("route del 192.0.2.0/24 dev {name}"));
            ip(&format!("-6 route del 2001:db8::/64 dev {name}"));
        }
        let on_link = |name| {
            ip(&format!("route replace 192.0.2.0/24 dev {name}"));
            ip(&format!("-6 route replace 2001:db8::/64 dev {name}"));
        };
        for nexthops in [false, true] {
            let stale = leases(&HostGw, 1);
            put(&stale, &HostGw, 1, 77, 77);
            on_link("eth0");
            Run::start(&HostGw, &stale, nexthops).await.stop().await;
            let subnets = leases(&HostGw, 1);
            on_link("eth1");
            let (run, reports) = recorded(Run::start_on("eth1", &HostGw, &subnets, nexthops)).await;
            let lost: Vec<_> = deleted(&reports).into_iter().filter(of_live_peer).collect();
            assert_eq!(lost, [], "{nexthops}");
            assert_eq!(count(&run.state()), (if nexthops { 10 } else { 0 }, 20));
            assert_eq!(left_by_flannel(), count(&run.state()), "{}", ip("route show table all"));
            run.stop().await;
        }
    });
}
