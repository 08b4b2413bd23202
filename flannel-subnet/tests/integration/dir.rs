//! `DirRegistry` beyond the suite: editors, crashes, other processes, and the files themselves.

#![allow(clippy::needless_pass_by_value, reason = "test helpers are test code")]

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use flannel_core::lease::{LeaseAttrs, Offer, Origin, Revision, View};
use flannel_core::subnet::LeaseEnd;
use flannel_core::{Error, SubnetManager, Subnets};
use flannel_subnet::{
    Assign, AssignedManager, DirLocation, DirOptions, DirRegistry, HolderId, Identity, LeaseGrant,
    LocalManager, Reflector, Registry,
};
use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tempfile::TempDir;
use test_support::{Logged, eventually_async};
use tokio::sync::watch;

const DAY: Duration = Duration::from_secs(86_400);
/// The time limit of a wait.
const PATIENCE: Duration = Duration::from_secs(60);
const VALUE: &str =
    r#"{"PublicIP":"192.0.2.1","PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1}}"#;

fn key(n: u8) -> Subnets {
    format!("10.1.{n}.0-24").parse().unwrap()
}

fn attrs(address: &str) -> LeaseAttrs {
    LeaseAttrs::from(Offer::new([address.parse().unwrap()].into_iter().collect()))
}

fn grant(holder: u64, ttl: Duration) -> Option<LeaseGrant> {
    Some(LeaseGrant { holder: HolderId(holder), ttl })
}

struct Net {
    dir: TempDir,
    registry: DirRegistry,
}

impl Net {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let registry = DirRegistry::open(dir.path(), DirOptions::default()).await.unwrap();
        fs::write(dir.path().join("config"), r#"{"Network":"10.1.0.0/16"}"#).unwrap();
        Self { dir, registry }
    }

    /// The registry of another process.
    async fn reopen(&self) -> DirRegistry {
        DirRegistry::open(self.dir.path(), DirOptions::default()).await.unwrap()
    }

    fn file(&self, name: impl ToString) -> PathBuf {
        self.dir.path().join("subnets").join(name.to_string())
    }

    fn names(&self) -> BTreeSet<String> {
        let names = fs::read_dir(self.dir.path().join("subnets")).unwrap();
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Starts to follow, and waits for the first list.
    async fn following(&self) -> (Reflector, watch::Receiver<View>) {
        let reflector = Reflector::start(Arc::new(self.reopen().await));
        let mut views = reflector.views();
        wait(&mut views, |view| matches!(view.origin, Origin::Live { .. })).await;
        (reflector, views)
    }
}

async fn wait(views: &mut watch::Receiver<View>, what: impl FnMut(&View) -> bool) -> View {
    let view = tokio::time::timeout(Duration::from_secs(20), views.wait_for(what)).await;
    view.expect("within 20 s").unwrap().clone()
}

fn node(registry: &DirRegistry, holder: u64) -> LocalManager {
    let identity =
        Identity { holder: HolderId(holder), previous: None, local_addresses: Vec::new() };
    LocalManager::new(Arc::new(registry.clone()), identity)
}

#[tokio::test]
async fn a_lease_file_is_formatted_and_a_renewal_sets_only_its_time() {
    let net = Net::new().await;
    let golden = "{\n  \"PublicIP\": \"192.0.2.1\",\n  \"PublicIPv6\": null,\n  \
                  \"BackendType\": \"vxlan\",\n  \"BackendData\": {\"VNI\":1},\n  \
                  \"Mark\": \"000000000000002a\",\n  \"TTL\": 86400\n}\n";
    let value = LeaseAttrs::from_json(VALUE).unwrap();
    net.registry.create(&key(5), &value, grant(42, DAY)).await.unwrap();
    let path = net.file("10.1.5.0-24");
    assert_eq!(fs::read_to_string(&path).unwrap(), golden);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o644);
    assert_eq!(mode(path.parent().unwrap()) & !0o755, 0, "only its owner may write to it");
    let config = net.dir.path().join("config");
    fs::remove_file(&config).unwrap();
    net.registry.write_config(None, r#"{"Network":"10.1.0.0/16"}"#).await.unwrap();
    assert_eq!(mode(&config), 0o644);
    assert_eq!(net.names(), ["10.1.5.0-24".to_owned()].into());

    let old = SystemTime::now() - Duration::from_secs(1000);
    File::open(&path).unwrap().set_modified(old).unwrap();
    assert_eq!(net.registry.keep_alive(&key(5), HolderId(42)).await.unwrap(), Some(DAY));
    assert!(fs::metadata(&path).unwrap().modified().unwrap() > old + Duration::from_secs(900));
    assert_eq!(fs::read_to_string(&path).unwrap(), golden);

    // Other holders renew nothing.
    File::open(&path).unwrap().set_modified(old).unwrap();
    assert_eq!(net.registry.keep_alive(&key(5), HolderId(43)).await.unwrap(), None);
    assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), old);
}

#[tokio::test]
async fn a_lease_that_expired_before_the_start_is_absent_and_its_subnet_is_free() {
    let net = Net::new().await;
    net.registry.create(&key(5), &attrs("192.0.2.1"), grant(1, DAY)).await.unwrap();
    File::open(net.file(key(5))).unwrap().set_modified(SystemTime::now() - 2 * DAY).unwrap();
    let other = net.reopen().await;
    assert_eq!(other.list().await.unwrap().entries, []);
    assert_eq!(other.keep_alive(&key(5), HolderId(1)).await.unwrap(), None, "too late");
    let taken = other.create(&key(5), &attrs("192.0.2.2"), grant(2, DAY)).await.unwrap();
    assert_eq!(other.list().await.unwrap().entries, [taken]);
}

/// A time to live that no clock can reach.
#[tokio::test]
async fn a_lease_with_the_largest_time_to_live_never_expires() {
    let net = Net::new().await;
    let largest = Duration::from_secs(u64::MAX);
    net.registry.create(&key(5), &attrs("192.0.2.1"), grant(1, largest)).await.unwrap();
    let lease = node(&net.registry, 1).acquire_lease(&attrs("192.0.2.1")).await.unwrap();
    assert_eq!(lease.subnets, key(5));
    assert_eq!(lease.expires, None);
}

#[tokio::test]
async fn an_overlapping_key_is_refused() {
    let net = Net::new().await;
    net.registry.create(&key(5), &attrs("192.0.2.1"), grant(1, DAY)).await.unwrap();
    for overlapping in ["10.1.4.0-23", "10.1.5.128-25", "10.1.5.0-24&fd00::-64"] {
        let overlapping: Subnets = overlapping.parse().unwrap();
        let result = net.registry.create(&overlapping, &attrs("192.0.2.2"), grant(2, DAY)).await;
        assert!(matches!(result, Err(Error::Conflict { .. })), "{overlapping}: {result:?}");
    }
}

#[tokio::test]
async fn a_half_written_file_keeps_its_last_content_in_force() {
    let net = Net::new().await;
    fs::write(net.file(key(5)), r#"{"PublicIP": "192.0.2.1"}"#).unwrap();
    let (_reflector, mut views) = net.following().await;
    assert_eq!(views.borrow_and_update().leases.len(), 1);
    assert_eq!(net.registry.list().await.unwrap().entries.len(), 1);

    fs::write(net.file(key(5)), r#"{"PublicIP": "192.0"#).unwrap();
    let listing = net.registry.list().await.unwrap();
    assert_eq!(listing.skipped[0].key, "10.1.5.0-24");
    assert_eq!(listing.entries[0].lease.attrs, attrs("192.0.2.1"), "still in force");
    let at = listing.entries[0].lease.revision;
    let blind = net.registry.update(&key(5), at, &attrs("192.0.2.3"), None).await;
    assert!(matches!(blind, Err(Error::Conflict { .. })), "{blind:?}");

    fs::write(net.file(key(5)), r#"{"PublicIP": "192.0.2.2"}"#).unwrap();
    let view =
        wait(&mut views, |view| view.leases.get(&key(5)).unwrap().attrs == attrs("192.0.2.2"))
            .await;
    assert_eq!(view.leases.len(), 1);
    assert_eq!(net.registry.list().await.unwrap().skipped, []);
}

#[tokio::test]
async fn an_editor_that_renames_the_old_file_away_removes_no_peer() {
    let net = Net::new().await;
    fs::write(net.file(key(5)), r#"{"PublicIP": "192.0.2.1"}"#).unwrap();
    let mut watch = net.registry.watch(net.registry.list().await.unwrap().revision).await.unwrap();
    fs::rename(net.file(key(5)), net.file("10.1.5.0-24~")).unwrap();
    assert_eq!(net.registry.list().await.unwrap().entries.len(), 1, "it may come back");
    fs::write(net.file(".10.1.5.0-24.swp"), "x").unwrap();
    fs::write(net.file(key(5)), r#"{"PublicIP": "192.0.2.2"}"#).unwrap();
    let batch = watch.next().await.unwrap().unwrap();
    assert_eq!(batch.events.len(), 1);
    assert!(format!("{:?}", batch.events[0].now).contains("192.0.2.2"), "{batch:?}");
    assert_eq!(net.registry.list().await.unwrap().skipped, [], "files of editors are not keys");

    // The file is moved away and does not come back.
    let (_reflector, mut views) = net.following().await;
    fs::rename(net.file(key(5)), net.dir.path().join("elsewhere")).unwrap();
    wait(&mut views, |view| view.leases.is_empty()).await;
}

#[tokio::test]
async fn hard_links_and_symbolic_links_are_read() {
    let net = Net::new().await;
    let (_reflector, mut views) = net.following().await;
    let source = net.dir.path().join("source");
    fs::write(&source, r#"{"PublicIP": "192.0.2.1"}"#).unwrap();
    fs::hard_link(&source, net.file(key(1))).unwrap();
    wait(&mut views, |view| view.leases.len() == 1).await;
    std::os::unix::fs::symlink(&source, net.file(key(2))).unwrap();
    wait(&mut views, |view| view.leases.len() == 2).await;
    fs::create_dir(net.file(key(3))).unwrap();
    assert_eq!(net.registry.list().await.unwrap().entries.len(), 2);
}

#[tokio::test]
async fn a_replaced_directory_is_read_again() {
    let net = Net::new().await;
    fs::write(net.file(key(1)), "{}").unwrap();
    fs::write(net.file(key(2)), "{}").unwrap();
    let (_reflector, mut views) = net.following().await;
    let new = net.dir.path().join("new");
    fs::create_dir(&new).unwrap();
    fs::write(new.join("10.1.2.0-24"), "{}").unwrap();
    fs::write(new.join("10.1.3.0-24"), "{}").unwrap();
    fs::rename(net.dir.path().join("subnets"), net.dir.path().join("old")).unwrap();
    fs::rename(&new, net.dir.path().join("subnets")).unwrap();
    let keys = |view: &View| view.leases.iter().map(|lease| lease.subnets).collect::<Vec<_>>();
    wait(&mut views, |view| keys(view) == [key(2), key(3)]).await;
    // It is watched, too.
    fs::remove_file(net.file(key(2))).unwrap();
    wait(&mut views, |view| keys(view) == [key(3)]).await;
}

#[tokio::test]
async fn a_replaced_root_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("net");
    let new = dir.path().join("new");
    for (root, n) in [(&root, 1), (&new, 2)] {
        fs::create_dir_all(root.join("subnets")).unwrap();
        fs::write(root.join("subnets").join(key(n).to_string()), "{}").unwrap();
    }
    let registry = DirRegistry::open(&root, DirOptions::default()).await.unwrap();
    let reflector = Reflector::start(Arc::new(registry));
    let mut views = reflector.views();
    wait(&mut views, |view| view.leases.get(&key(1)).is_some()).await;
    fs::rename(&root, dir.path().join("old")).unwrap();
    fs::rename(&new, &root).unwrap();
    wait(&mut views, |view| view.leases.get(&key(2)).is_some() && view.leases.len() == 1).await;
    fs::write(root.join("subnets").join(key(3).to_string()), "{}").unwrap();
    wait(&mut views, |view| view.leases.len() == 2).await;
}

/// For example, the directory is not mounted.
#[tokio::test]
async fn a_missing_directory_is_not_a_store_without_leases() {
    let net = Net::new().await;
    fs::write(net.file(key(1)), "{}").unwrap();
    let (_reflector, views) = net.following().await;
    let subnets = net.dir.path().join("subnets");
    let away = net.dir.path().join("away");
    fs::rename(&subnets, &away).unwrap();
    fs::remove_file(net.dir.path().join("config")).unwrap();
    let reopened = DirRegistry::reopen(net.dir.path(), DirOptions::default()).await.unwrap();
    for registry in [&net.registry, &reopened] {
        let error = registry.list().await.unwrap_err();
        assert!(matches!(error, Error::Store { .. }), "{error}");
        let error = registry.config().await.unwrap_err();
        assert!(matches!(error, Error::Store { .. }), "{error}");
        let error = registry.create(&key(2), &attrs("192.0.2.2"), grant(2, DAY)).await.unwrap_err();
        assert!(matches!(error, Error::Store { .. }), "{error}");
        assert!(!subnets.exists());
    }
    assert_eq!(views.borrow().leases.len(), 1);
    fs::rename(&away, &subnets).unwrap();
    for registry in [&net.registry, &reopened] {
        assert_eq!(registry.list().await.unwrap().entries.len(), 1);
    }
}

#[tokio::test]
async fn an_overflow_of_the_event_queue_loses_nothing() {
    let net = Net::new().await;
    let listing = net.registry.list().await.unwrap();
    let limit: usize = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events")
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    let one = net.file(key(1));
    let two = net.file(key(2));
    fs::write(net.file(key(3)), "{}").unwrap();
    // Renames, because equal events would be merged.
    fs::write(&one, "{}").unwrap();
    for n in 0..=limit / 2 {
        let (from, to) = if n % 2 == 0 { (&one, &two) } else { (&two, &one) };
        fs::rename(from, to).unwrap();
    }
    fs::remove_file(net.file(key(3))).unwrap();
    fs::write(net.file(key(4)), "{}").unwrap();
    let left = if one.exists() { key(1) } else { key(2) };
    let mut watch = net.registry.watch(listing.revision).await.unwrap();
    let batch = watch.next().await.unwrap().unwrap();
    let held: BTreeSet<String> = batch.events.into_iter().map(|event| event.key).collect();
    assert_eq!(held, [left.to_string(), key(4).to_string()].into());
}

#[tokio::test]
async fn files_that_exist_at_the_start_are_listed_and_are_not_changes() {
    let net = Net::new().await;
    (1..=3).for_each(|n| fs::write(net.file(key(n)), "{}").unwrap());
    let again = net.reopen().await;
    let listing = again.list().await.unwrap();
    assert_eq!(listing.entries.len(), 3);
    let mut unlisted = again.watch(Revision(0)).await.unwrap();
    assert_eq!(unlisted.next().await.unwrap(), None, "there is no history");
    fs::write(net.file(key(4)), "{}").unwrap();
    let mut watch = again.watch(listing.revision).await.unwrap();
    let batch = watch.next().await.unwrap().unwrap();
    let changed: Vec<String> = batch.events.into_iter().map(|event| event.key).collect();
    assert_eq!(changed, [key(4).to_string()]);
}

#[tokio::test]
async fn only_small_regular_files_are_read() {
    let net = Net::new().await;
    for (n, mkdir) in [(4, "mkfifo"), (5, "mkdir")] {
        assert!(Command::new(mkdir).arg(net.file(key(n))).status().unwrap().success());
    }
    File::create(net.file(key(6))).unwrap().set_len(1 << 30).unwrap();
    let again = net.reopen().await;
    let listing = again.list().await.unwrap();
    let skipped: Vec<_> =
        listing.skipped.iter().map(|bad| (bad.key.clone(), bad.reason.to_string())).collect();
    let large = "the value of the lease has 1073741824 bytes, expected at most 16384";
    let expected = [
        ("10.1.4.0-24", "it is not a file"),
        ("10.1.5.0-24", "it is not a file"),
        ("10.1.6.0-24", large),
    ];
    let expected = expected.map(|(key, reason)| (key.to_owned(), reason.to_owned()));
    assert_eq!(listing.entries.len(), 0);
    assert_eq!(skipped, expected.to_vec());
    let created = again.create(&key(6), &attrs("192.0.2.1"), grant(1, DAY)).await;
    assert!(matches!(created, Err(Error::Conflict { .. })), "{created:?}");
    for n in 4..=5 {
        let created = again.create(&key(n), &attrs("192.0.2.1"), grant(1, DAY)).await;
        let error = created.unwrap_err().to_string();
        assert!(error.contains(&format!("subnets/{}", key(n))), "{error}");
    }
    let config = net.dir.path().join("config");
    fs::remove_file(&config).unwrap();
    assert!(Command::new("mkfifo").arg(&config).status().unwrap().success());
    for error in [again.config().await.map(drop), again.write_config(None, "{}").await] {
        let error = error.unwrap_err().to_string();
        assert!(error.contains("config") && error.contains("it is not a file"), "{error}");
    }
}

#[tokio::test]
async fn files_of_a_crashed_writer_are_removed_and_never_read() {
    let net = Net::new().await;
    let leftover = net.file(".flannel-tmp-10.1.5.0-24-0011223344556677");
    let of_config = net.dir.path().join(".flannel-tmp-config-0011223344556677");
    let of_other = net.dir.path().join(".flannel-tmp-other-0011223344556677");
    for path in [&leftover, &of_config, &of_other] {
        fs::write(path, "{").unwrap();
    }
    // Nothing that could keep a daemon from its start.
    fs::create_dir(net.file(".flannel-tmp-planted-0011223344556677")).unwrap();
    let listing = net.registry.list().await.unwrap();
    assert_eq!(listing.entries.len(), 0);
    assert_eq!(listing.skipped.len(), 0);
    net.reopen().await;
    let exist = [&leftover, &of_config, &of_other].map(|path| path.exists());
    assert_eq!(exist, [false, false, true]);
}

#[tokio::test]
async fn a_writer_waits_for_a_held_lock() {
    let net = Net::new().await;
    // Another process, which releases its lock when its input ends.
    let mut holder = Command::new("flock")
        .arg(net.dir.path().join(".lock"))
        .args(["sh", "-c", "echo locked; read line"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("flock(1) of util-linux");
    holder.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
    let key = key(1);
    let us = attrs("192.0.2.1");
    let mut create = Box::pin(net.registry.create(&key, &us, grant(1, DAY)));
    let logged = Logged::default();
    let _guard = tracing::subscriber::set_default(logged.clone());
    let waits = || logged.count("waiting for a lock");
    tokio::select! {
        early = &mut create => panic!("{early:?}"),
        () = eventually_async(PATIENCE, async || waits() == 1, || "it does not say so") => {}
    }
    assert!(!net.file(key).exists());
    assert_eq!(logged.count(&format!("(process {})", holder.id())), 1, "the holder is named");
    drop(holder.stdin.take());
    create.await.unwrap();
    holder.wait().unwrap();
}

const SHARED: &str = "FLANNEL_TEST_SHARED_DIR";
const FIRST: &str = "FLANNEL_TEST_FIRST_NODE";

/// 3 processes (this program with another argument) with 20 nodes each, for as many subnets.
#[tokio::test]
async fn many_processes_share_one_directory() {
    if let (Some(path), Ok(first)) = (std::env::var_os(SHARED), std::env::var(FIRST)) {
        return acquire_twenty(Path::new(&path), first.parse().unwrap()).await;
    }
    let net = Net::new().await;
    let config = r#"{"Network":"10.1.0.0/16","SubnetMin":"10.1.1.0","SubnetMax":"10.1.60.0"}"#;
    fs::write(net.dir.path().join("config"), config).unwrap();
    let (_reflector, mut views) = net.following().await;
    let mut workers = tokio::task::JoinSet::new();
    for first in [1, 21, 41] {
        let mut worker = Command::new(std::env::current_exe().unwrap());
        worker.args(["--exact", "dir::many_processes_share_one_directory", "--nocapture"]);
        worker.env(SHARED, net.dir.path()).env(FIRST, first.to_string());
        workers.spawn_blocking(move || worker.output().unwrap());
    }
    let mut leases = Vec::new();
    for output in workers.join_all().await {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        leases
            .extend(text.lines().filter_map(|line| line.split("lease ").nth(1)).map(str::to_owned));
    }
    assert_eq!(leases.len(), 60);
    assert_eq!(leases.iter().collect::<BTreeSet<_>>().len(), 60);
    wait(&mut views, |view| view.leases.len() == 60).await;
    let error = node(&net.registry, 99).acquire_lease(&attrs("192.0.2.99")).await.unwrap_err();
    assert!(matches!(error, Error::OutOfSubnets { total: 60, .. }), "{error}");
}

async fn acquire_twenty(path: &Path, first: u64) {
    let registry = DirRegistry::open(path, DirOptions::default()).await.unwrap();
    for n in first..first + 20 {
        let lease =
            node(&registry, n).acquire_lease(&attrs(&format!("192.0.2.{n}"))).await.unwrap();
        println!("lease {}", lease.subnets);
    }
}

#[tokio::test]
async fn deleting_a_file_stops_its_node() {
    let net = Net::new().await;
    let manager = Arc::new(node(&net.registry, 1));
    let lease = manager.acquire_lease(&attrs("192.0.2.1")).await.unwrap();
    let held = tokio::spawn({
        let manager = Arc::clone(&manager);
        let lease = lease.clone();
        async move { manager.hold_lease(&lease).await }
    });
    let mut views = manager.watch_leases().await.unwrap();
    wait(&mut views, |view| view.leases.len() == 1).await;
    fs::remove_file(net.file(lease.subnets)).unwrap();
    let end = tokio::time::timeout(Duration::from_secs(20), held).await.unwrap().unwrap().unwrap();
    assert_eq!(end, LeaseEnd::Deleted);
}

#[tokio::test]
async fn an_unusable_directory_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    for path in [file.clone(), file.join("below")] {
        let error = DirRegistry::open(&path, DirOptions::default()).await.unwrap_err().to_string();
        assert!(error.contains(&path.display().to_string()), "{error}");
    }
    let missing = dir.path().join("missing");
    let error =
        DirRegistry::open(&missing, DirOptions { assign: Assign::Static }).await.unwrap_err();
    assert!(error.to_string().contains("missing"), "{error}");
    assert!(!missing.exists(), "static directories are not created");
    let made = dir.path().join("a/b");
    let registry = DirRegistry::open(&made, DirOptions::default()).await.unwrap();
    let error = registry.config().await.unwrap_err();
    assert_eq!(error.to_string(), format!("{}/config holds no network config yet", made.display()));
}

/// A static directory with two nodes.
async fn assigned(dir: &Path, address: &str) -> AssignedManager {
    let subnets = dir.join("subnets");
    fs::create_dir_all(&subnets).unwrap();
    fs::write(dir.join("config"), r#"{"Network":"10.1.0.0/16"}"#).unwrap();
    fs::write(subnets.join("10.1.1.0-24"), VALUE).unwrap();
    fs::write(subnets.join("10.1.2.0-24"), VALUE.replace("192.0.2.1", "192.0.2.2")).unwrap();
    let location: DirLocation = format!("dir:{}?assign=static", dir.display()).parse().unwrap();
    let registry = DirRegistry::open(location.path, location.options).await.unwrap();
    AssignedManager::new(Arc::new(registry), vec![address.parse().unwrap()])
}

#[tokio::test]
async fn a_static_directory_assigns_leases_and_is_never_written() {
    let dir = tempfile::tempdir().unwrap();
    let manager = assigned(dir.path(), "192.0.2.1").await;
    let hints = manager.hints().await.unwrap();
    let written = LeaseAttrs::from_json(VALUE).unwrap();
    assert_eq!(hints.public, written.preferred.public);
    assert_eq!(hints.previous, Some(key(1)));
    assert_eq!(hints.last_published.as_ref(), Some(&written));
    let lease = manager.acquire_lease(&written).await.unwrap();
    assert_eq!(lease.subnets, key(1));
    assert_eq!(lease.expires, None);

    let mut ours = written.clone();
    ours.preferred.data.v4 = Some(r#"{"VNI":2}"#.into());
    let error = manager.acquire_lease(&ours).await.unwrap_err().to_string();
    assert!(
        error.contains("subnets/10.1.1.0-24: BackendData.VNI is 1, but this host has 2"),
        "{error}"
    );
    let kind = LeaseAttrs::from(written.clone().preferred.with_kind("host-gw"));
    let error = manager.acquire_lease(&kind).await.unwrap_err().to_string();
    assert!(error.contains(r#"BackendType is "vxlan", but this host has "host-gw""#), "{error}");
    let error = manager.acquire_lease(&attrs("192.0.2.9")).await.unwrap_err().to_string();
    assert!(
        error.contains("no file in subnets/ has this host's public address 192.0.2.9"),
        "{error}"
    );

    let names = |path: &Path| fs::read_dir(path).unwrap().count();
    assert_eq!(names(dir.path()), 2, "not even a lock");
    assert_eq!(names(&dir.path().join("subnets")), 2, "not even a lock");
    let location = DirOptions { assign: Assign::Static };
    let registry = DirRegistry::open(dir.path(), location).await.unwrap();
    let refused = registry.create(&key(9), &written, None).await.unwrap_err().to_string();
    assert!(refused.contains("assign=static"), "{refused}");
}

#[tokio::test]
async fn a_static_lease_ends_when_its_file_is_deleted_moved_or_changed() {
    for (what, expected) in
        [("gone", "Deleted"), ("moved", "Moved"), ("changed", "BackendData.VNI is 7")]
    {
        let dir = tempfile::tempdir().unwrap();
        let manager = assigned(dir.path(), "192.0.2.1").await;
        let lease = manager.acquire_lease(&LeaseAttrs::from_json(VALUE).unwrap()).await.unwrap();
        let mut views = manager.watch_leases().await.unwrap();
        wait(&mut views, |view| view.leases.len() == 2).await;
        let subnets = dir.path().join("subnets");
        match what {
            "gone" => fs::remove_file(subnets.join("10.1.1.0-24")).unwrap(),
            "moved" => {
                fs::rename(subnets.join("10.1.1.0-24"), subnets.join("10.1.8.0-24")).unwrap();
            }
            _ => fs::write(subnets.join("10.1.1.0-24"), VALUE.replace(":1}", ":7}")).unwrap(),
        }
        let end = tokio::time::timeout(Duration::from_secs(20), manager.hold_lease(&lease))
            .await
            .unwrap();
        let end = end.map_or_else(|error| error.to_string(), |end| format!("{end:?}"));
        assert!(end.contains(expected), "{what}: {end}");
    }
}

#[tokio::test]
async fn a_static_directory_reports_config_changes_and_its_networks_need_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let manager = assigned(dir.path(), "192.0.2.1").await;
    let first = manager.network_config().await.unwrap();
    manager.acquire_lease(&LeaseAttrs::from_json(VALUE).unwrap()).await.unwrap();
    let write = |text: &str| fs::write(dir.path().join("config"), text).unwrap();
    let changed = async |text: &str, seen| {
        write(text);
        tokio::time::timeout(Duration::from_secs(20), manager.config_changed(seen))
            .await
            .unwrap()
            .unwrap()
    };

    let mtu =
        changed(r#"{"Network":"10.1.0.0/16","Backend":{"Type":"vxlan","MTU":1300}}"#, &first).await;
    assert_eq!(manager.network_config().await.unwrap(), mtu);
    assert_eq!(mtu.networks, first.networks);

    let moved =
        changed(r#"{"Network":"10.9.0.0/16","Backend":{"Type":"vxlan","MTU":1200}}"#, &mtu).await;
    assert_ne!(moved.networks, first.networks, "the waiting config is reported");
    let used = manager.network_config().await.unwrap();
    assert_eq!(used.networks, first.networks);
    assert_eq!(used.backend, moved.backend);

    let wrong = manager.config_changed(&moved);
    tokio::pin!(wrong);
    write("nonsense");
    let noted = async {
        while manager.store_status().wrong_config.is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        config = &mut wrong => panic!("{config:?}"),
        noted = tokio::time::timeout(Duration::from_secs(20), noted) => noted.unwrap(),
    }
    // The lease can be restored under a wrong config.
    manager.acquire_lease(&LeaseAttrs::from_json(VALUE).unwrap()).await.unwrap();
    write(r#"{"Network":"10.1.0.0/16"}"#);
    let again = tokio::time::timeout(Duration::from_secs(20), wrong).await.unwrap().unwrap();
    assert_eq!(again, first);
    assert_eq!(manager.store_status().wrong_config, None);
}

/// A network and its lease are of the same config.
#[tokio::test]
async fn a_static_lease_is_acquired_from_the_returned_config() {
    let dir = tempfile::tempdir().unwrap();
    let manager = assigned(dir.path(), "192.0.2.1").await;
    let given = manager.network_config().await.unwrap();
    fs::write(dir.path().join("config"), r#"{"Network":"10.9.0.0/16"}"#).unwrap();
    manager.acquire_lease(&LeaseAttrs::from_json(VALUE).unwrap()).await.unwrap();
    assert_eq!(manager.network_config().await.unwrap().networks, given.networks);
}

#[tokio::test(start_paused = true)]
async fn a_quiet_directory_is_confirmed_every_minute_unless_it_is_unreadable() {
    let net = Net::new().await;
    let mut watch = net.registry.watch(net.registry.list().await.unwrap().revision).await.unwrap();
    for _ in 0..3 {
        let quiet = tokio::time::timeout(Duration::from_secs(61), watch.next()).await;
        assert_eq!(quiet.unwrap().unwrap().unwrap().events, []);
    }
    let dir = tempfile::tempdir().unwrap();
    let manager = assigned(dir.path(), "192.0.2.1").await;
    let mut views = manager.watch_leases().await.unwrap();
    wait(&mut views, |view| view.leases.len() == 2).await;
    let confirmed = || manager.store_status().confirmed.unwrap().at;
    let first = confirmed();
    let requests = manager.store_status().requests();
    let later = async {
        while confirmed() == first {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(3600), later).await.unwrap();
    assert!(!views.has_changed().unwrap(), "no receiver is notified");
    assert_eq!(manager.store_status().requests(), requests);

    fs::remove_dir_all(net.dir.path()).unwrap();
    watch.next().await.unwrap_err();
}

#[tokio::test]
async fn renewals_and_equal_writes_wake_no_watch() {
    let net = Net::new().await;
    net.registry.create(&key(1), &attrs("192.0.2.1"), grant(1, DAY)).await.unwrap();
    let inotify = Inotify::init(InitFlags::IN_NONBLOCK).unwrap();
    let all = AddWatchFlags::IN_ALL_EVENTS - AddWatchFlags::IN_ATTRIB - AddWatchFlags::IN_ACCESS;
    let reading = AddWatchFlags::IN_OPEN | AddWatchFlags::IN_CLOSE_NOWRITE;
    for watched in [net.dir.path(), &net.dir.path().join("subnets")] {
        inotify.add_watch(watched, all - reading).unwrap();
    }
    net.registry.keep_alive(&key(1), HolderId(1)).await.unwrap();
    assert_eq!(
        inotify.read_events().unwrap_err(),
        Errno::EAGAIN,
        "a renewal is only a change of time"
    );
    let other = net.reopen().await;
    let mut watch = other.watch(other.list().await.unwrap().revision).await.unwrap();
    net.registry.keep_alive(&key(1), HolderId(1)).await.unwrap();
    // Writing the same bytes is not a change either.
    let text = fs::read(net.file(key(1))).unwrap();
    fs::write(net.file(key(1)), text).unwrap();
    fs::write(net.file(key(2)), "{}").unwrap();
    let batch = watch.next().await.unwrap().unwrap();
    assert_eq!(
        batch.events.iter().map(|event| event.key.as_str()).collect::<Vec<_>>(),
        ["10.1.2.0-24"]
    );
}
