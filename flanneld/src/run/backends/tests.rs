//! Tests of the record, and of the controllers that change it.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::address::Dual;
use flannel_core::backend::{ExternalInterface, Prepared};
use flannel_core::kernel::KernelError;
use flannel_core::lease::{Origin, Revision, View};
use flannel_core::object::{Change, Key, Link, Route, Secret, Via, Wireguard};
use flannel_core::status::{Failure, Status};
use flannel_core::testing::{FakeKernel, FakeSubnets};
use flannel_core::{Error as Cause, Lease, SubnetManager};
use flannel_subnet::DirLocation;
use test_support::{Logged, eventually_async};
use tokio::sync::watch;
use tokio::time::Instant;

use super::*;
use crate::config::StoreConfig;
use crate::error::Error;
use crate::run::controllers::Ended;
use crate::run::controllers::absent_backends::AbsentBackendController;
use crate::run::controllers::leftovers::old_devices::OldDevices;

fn config(kind: &str) -> Config {
    let text = r#"{"Network":"10.1.0.0/16","Backend":{"Type":"KIND","PSK":"psk-4711"}}"#;
    Config::parse(&text.replace("KIND", kind)).unwrap()
}

fn settings() -> DaemonConfig {
    let location: DirLocation = "dir:/nowhere".parse().unwrap();
    DaemonConfig::new(StoreConfig::Directory(location))
}

fn iface() -> ExternalInterface {
    let address: Dual<_> = [[192, 0, 2, 1].into()].into_iter().collect();
    ExternalInterface::new("eth0".parse().unwrap(), 1500, address).with_reason("test")
}

async fn backends(record: &BackendRecord, kind: &str) -> ActiveBackends {
    set_up(record, kind, "", None).await.unwrap()
}

/// The backends of a node that cannot prepare the backend `broken`. `user` is the node that is
/// reached only by a backend that is left out.
async fn set_up(
    record: &BackendRecord,
    kind: &str,
    broken: &str,
    user: Option<Arc<Lease>>,
) -> Result<ActiveBackends, Error> {
    let subnets = FakeSubnets::new("10.1.0.0/16");
    let prepare = async |it: &ActiveBackend| {
        if it.usage.lease_type == broken {
            let reason = "no such device".to_owned();
            return Err(Cause::Backend { backend: broken.to_owned(), reason }.into());
        }
        Ok(prepared())
    };
    let values =
        SetUp { settings: &settings(), subnets: &subnets, config: &config(kind), iface: &iface() };
    let ready = record.set_up(values, prepare, |_, _| user.clone()).await?;
    assert_eq!(ready.prepared.len(), ready.backends.all.len());
    Ok(ready.backends)
}

fn prepared() -> Prepared {
    Prepared::new(Default::default(), |_| unreachable!("nothing is built"))
}

fn names(backends: &ActiveBackends) -> String {
    let all = lease_types(backends.all.iter().map(|it| &it.usage)).join(" ");
    let offers = backends.order.offered().map(|usage| &*usage.lease_type);
    format!("{all} | {}", offers.collect::<Vec<_>>().join(" "))
}

#[tokio::test]
async fn a_restart_runs_all_backends_that_were_offered() {
    let dir = tempfile::tempdir().unwrap();
    let (logged, _guard) = Logged::collect();
    let record = || BackendRecord::open(dir.path());
    assert_eq!(names(&backends(&record(), "vxlan").await), "vxlan | vxlan");
    assert_eq!(names(&backends(&record(), "host-gw").await), "vxlan host-gw | vxlan");
    let first = record();
    let order = backends(&first, "host-gw").await.order;
    let next = NodeBackends::parse(&order.to_json().replace("false", "true")).unwrap();
    first.take(&next).await.unwrap();
    assert_eq!(names(&backends(&record(), "host-gw").await), "host-gw vxlan | vxlan host-gw");
    assert_eq!(names(&backends(&record(), "ipip").await), "vxlan host-gw ipip | vxlan host-gw");
    // A dropped one is kept in the file until its objects are gone.
    let last = record();
    last.state().dropped.push("vxlan".to_owned());
    assert_eq!(names(&backends(&last, "ipip").await), "host-gw ipip | host-gw");
    assert_eq!(names(&backends(&record(), "ipip").await), "host-gw ipip vxlan | host-gw");
    assert_eq!(logged.warnings(), [""; 0]);
    // A network that cannot run beside another one replaces it at once.
    assert_eq!(names(&backends(&record(), "alloc").await), "alloc | alloc");
    assert_eq!((logged.count("replaced at once"), logged.count("no longer run")), (1, 2));
    // Their devices are still there.
    assert_eq!(names(&backends(&record(), "vxlan").await), "vxlan host-gw ipip | vxlan");
    assert_eq!((logged.count("replaced at once"), logged.count("no longer run")), (2, 2));
}

#[tokio::test]
async fn a_refused_backend_is_reported_once_and_leaves_no_device() {
    let dir = tempfile::tempdir().unwrap();
    let (logged, _guard) = Logged::collect();
    let usages = ["vxlan", "extension", "vlxan"].map(|kind| {
        let backend = serde_json::json!({ "Type": kind, "SubnetAddCommand": "true" });
        serde_json::json!({ "lease_type": kind, "offered": true, "backend": backend })
    });
    let text = serde_json::json!({ "backends": usages });
    fs::write(dir.path().join("backends"), text.to_string()).unwrap();
    let record = BackendRecord::open(dir.path());
    assert_eq!(names(&backends(&record, "host-gw").await), "vxlan host-gw | vxlan");
    assert_eq!(logged.count("replaced at once: nodes that"), 2);
    assert_eq!(logged.count("--allow-commands"), 1);
    assert_eq!((logged.count("\"vlxan\" is not"), logged.count("its devices stay")), (1, 1));
    let before = logged.warnings().len();
    let new = backends(&record, "host-gw").await;
    assert_eq!(logged.warnings().len(), before, "the network was only rebuilt");
    let alone = backends(&record, "alloc").await;
    let expected = ["vxlan host-gw | vxlan", "alloc | alloc"].map(str::to_owned);
    assert_eq!([names(&new), names(&alone)], expected);

    let kernel = FakeKernel::with_uplink("eth0");
    for name in ["flannel.1", "flannel.2"] {
        let kind = Wireguard { key: Secret::new([7; 32]), port: 51820 }.into();
        let name = name.parse().unwrap();
        kernel.foreign_put(Link { name, mtu: 1400, up: true, kind }, 0);
    }
    let mut status = Status::default();
    status.live = true;
    status.settled = true;
    let (_network, status) = watch::channel(Arc::new(status));
    let there = Arc::new(kernel.clone());
    let file = || fs::read_to_string(&record.file).unwrap();
    let in_file = || lease_types(NodeBackends::parse(&file()).unwrap().iter()).join(" ");
    // The record of an unknown backend stays for a version that knows it.
    // The file comes first.
    let done = async || in_file() == "alloc vlxan" && record.state().dropped == ["vlxan"];
    let settings = settings();
    let old = OldDevices { settings: &settings, backends: &alone, record: &record };
    tokio::select! {
        never = old.clear(there, status) => match never {},
        () = eventually_async(Duration::from_secs(10), done, file) => {}
    }
    let devices = kernel.dump();
    assert!(devices.len() == 1 && devices[0].contains("flannel.2"), "{devices:?}");
}

#[tokio::test]
async fn a_target_that_cannot_be_prepared_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (logged, _guard) = Logged::collect();
    let record = BackendRecord::open(dir.path());
    backends(&record, "vxlan").await;
    let read = || fs::read_to_string(dir.path().join("backends")).unwrap();
    let before = read();
    for kind in ["ipip", "udp", "alloc"] {
        let error = set_up(&record, kind, kind, None).await.err().unwrap().to_string();
        assert!(error.contains("no such device"), "{error}");
        assert_eq!((read(), record.state().dropped.len()), (before.clone(), 0), "{kind}");
    }
    assert_eq!(logged.warnings(), [""; 0]);
    assert_eq!(names(&backends(&record, "vxlan").await), "vxlan | vxlan");
}

/// A daemon of an earlier version records a backend before it sets it up.
#[tokio::test]
async fn a_recorded_backend_that_cannot_be_prepared_is_left_out_and_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let (logged, _guard) = Logged::collect();
    let first = BackendRecord::open(dir.path());
    backends(&first, "vxlan").await;
    let order = backends(&first, "ipip").await.order;
    let record = || BackendRecord::open(dir.path());
    let without = async |record: &BackendRecord, kind, broken| {
        let backends = set_up(record, kind, broken, None).await.unwrap();
        (names(&backends), lease_types(backends.absent.iter().map(|it| &it.usage)))
    };
    let expected = |names: &str, aside: &str| (names.to_owned(), vec![aside.to_owned()]);
    assert_eq!(without(&record(), "vxlan", "ipip").await, expected("vxlan | vxlan", "ipip"));
    // The offered one.
    let next = NodeBackends::parse(&order.to_json().replace("false", "true")).unwrap();
    first.take(&next).await.unwrap();
    let last = record();
    assert_eq!(without(&last, "ipip", "vxlan").await, expected("ipip | ipip", "vxlan"));
    assert_eq!(without(&last, "ipip", "vxlan").await, expected("ipip | ipip", "vxlan"));
    assert_eq!(logged.count("left out and tried again"), 2, "{:?}", logged.warnings());
    // It stays in the record, and runs again once it can.
    assert_eq!(names(&backends(&record(), "ipip").await), "ipip vxlan | ipip");
    assert_eq!(names(&backends(&last, "ipip").await), "ipip vxlan | ipip");
}

#[tokio::test]
async fn a_backend_that_a_node_needs_is_not_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let record = BackendRecord::open(dir.path());
    backends(&record, "vxlan").await;
    let read = || fs::read_to_string(dir.path().join("backends")).unwrap();
    let before = read();
    let subnets = FakeSubnets::new("10.1.0.0/16");
    let lease = Arc::new(subnets.acquire_lease(&Default::default()).await.unwrap());
    let error = set_up(&record, "host-gw", "vxlan", Some(lease)).await.err().unwrap();
    assert!(error.to_string().contains("is reached only by it"), "{error}");
    assert_eq!(read(), before);
}

/// The reason for which the network is rebuilt.
async fn revive(
    record: &BackendRecord,
    backends: &ActiveBackends,
    views: &watch::Receiver<View>,
    prepare: impl AsyncFn(&ActiveBackend) -> Result<Prepared, Error>,
) -> String {
    let own = "10.1.7.0-24".parse().unwrap();
    let views = views.clone();
    let controller = AbsentBackendController { record, backends, own, views, prepare };
    match controller.run().await {
        Ended::Rebuild(reason) => reason,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_backend_that_was_left_out_is_revived_or_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let first = BackendRecord::open(dir.path());
    backends(&first, "vxlan").await;
    backends(&first, "host-gw").await;
    let record = BackendRecord::open(dir.path());
    let backends = set_up(&record, "host-gw", "vxlan", None).await.unwrap();
    let (_views, views) = watch::channel(View {
        leases: Default::default(),
        origin: Origin::Live { revision: Revision(1) },
    });
    let reason = revive(&record, &backends, &views, async |_| Ok(prepared())).await;
    assert_eq!(reason, "vxlan can be set up again");
    let fails = async |_: &ActiveBackend| Err(Error::Stopped("no".to_owned()));
    let begin = Instant::now();
    let reason = revive(&record, &backends, &views, fails).await;
    assert_eq!(reason, "no node needs vxlan, which cannot be set up");
    assert!(begin.elapsed() >= Duration::from_secs(60));
    assert_eq!(record.state().dropped, ["vxlan"]);
}

/// Both have no type in leases.
#[tokio::test]
async fn a_change_from_udp_to_alloc_leaves_no_device() {
    let dir = tempfile::tempdir().unwrap();
    let record = BackendRecord::open(dir.path());
    assert_eq!(names(&backends(&record, "udp").await), "udp | udp");
    assert_eq!(names(&backends(&record, "alloc").await), "alloc | alloc");
    let state = record.state().clone();
    assert_eq!(
        (lease_types(state.kept.iter()).join(" "), state.dropped),
        ("alloc udp".into(), vec!["udp".to_owned()])
    );
    assert_eq!(names(&backends(&record, "udp").await), "udp | udp");
    assert_eq!(record.state().dropped, ["alloc"]);
}

#[tokio::test]
async fn a_damaged_file_is_moved_aside_and_not_shown() {
    let dir = tempfile::tempdir().unwrap();
    let (logged, _guard) = Logged::collect();
    drop(backends(&BackendRecord::open(dir.path()), "vxlan").await);
    let file = dir.path().join("backends");
    let damaged = fs::read_to_string(&file).unwrap().replace("offered", "ordered");
    assert!(damaged.contains("psk-4711"));
    fs::write(&file, &damaged).unwrap();
    assert_eq!(
        names(&backends(&BackendRecord::open(dir.path()), "host-gw").await),
        "host-gw | host-gw"
    );
    let aside = dir.path().join("backends.damaged");
    assert_eq!(fs::read_to_string(aside).unwrap(), damaged);
    assert_eq!(logged.count("backends.damaged"), 1, "{:?}", logged.warnings());
    assert_eq!(logged.count("psk"), 0);
}

#[tokio::test]
async fn only_devices_of_the_target_must_be_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let record = BackendRecord::open(dir.path());
    let old = backends(&record, "vxlan").await;
    let new = backends(&record, "host-gw").await;
    let mut status = Status::default();
    assert!(!new.is_in_place(&status), "not settled");
    status.settled = true;
    let device = Key::Link("flannel.1".parse().unwrap());
    let error = KernelError::new(95);
    let route = Route { dst: "10.1.1.0/24".parse().unwrap(), via: Via::LastResort, mtu: None };
    let change = Change::Put(route.into());
    status.failing.insert(device, Failure::new(&change, None, error));
    assert!(new.is_in_place(&status) && !old.is_in_place(&status));
}
