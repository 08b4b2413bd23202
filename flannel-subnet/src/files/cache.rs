//! The last complete set of leases on disk, for a start while the store does not answer.
//!
//! A file that is damaged, belongs to another store or has a newer version is ignored. Peers'
//! leases from the cache create and replace objects but delete none. The own lease is valid only
//! until its end. The end counts by boot time if the machine was not restarted since the file was
//! written, else by wall clock.
//!
//! The file is text. The first line has the format, its version and a checksum of the rest. The
//! second line is a JSON object with common values. Each other line is a lease: key, `since`,
//! revision, and the store's value. Later builds must read this version.

use std::fmt::Write;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use std::{fs, io};

use flannel_core::lease::{LeaseAttrs, LeaseSet, Origin, Revision, TooLarge, View};
use flannel_core::text::fnv1a;
use flannel_core::{Lease, Subnets};
use serde::{Deserialize, Serialize};

use super::{atomic, own::read_own_file};
use crate::clock::Clock;
use crate::registry::{ConfigText, HolderId, HolderIdError};

const FORMAT: &str = "flannel-leases";
/// The version that this build writes and reads.
const VERSION: &str = "1";

/// The file with the last complete set.
#[derive(Debug, Clone)]
pub struct Cache {
    path: PathBuf,
    /// The content, instead of the file.
    #[cfg(feature = "testing")]
    memory: Option<std::sync::Arc<std::sync::Mutex<Option<Saved>>>>,
}

/// The content of a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    /// The store, as `Display` of the registry.
    pub store: String,
    /// The time of writing, by wall clock, in whole milliseconds.
    pub written: SystemTime,
    /// The leases of all nodes.
    pub leases: LeaseSet,
    /// The network config, or `None` if it is not known.
    pub config: Option<ConfigText>,
    /// The own lease and the ID of its holder, or `None` if this node held no lease.
    pub own: Option<(Lease, HolderId)>,
    /// The end of the own lease by boot time. It is `None` if the lease has no end, or if the store
    /// has not confirmed the lease since the machine was started.
    pub own_end: Option<BootTime>,
    /// The subnets of the last own lease if another node with this node's public address took it,
    /// else `None`.
    pub lost: Option<Subnets>,
}

/// A time after the start of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootTime {
    /// The start of the machine, as [`Clock::boot`].
    pub boot: String,
    /// The time since then, including suspended time, in whole milliseconds.
    #[serde(rename = "millis", with = "whole_millis")]
    pub time: Duration,
}

/// The end of a lease from a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SavedEnd {
    /// A reservation has no end.
    Never,
    /// The machine still runs, so its boot time counts, as if the daemon had not ended.
    SameBoot(Duration),
    /// The machine was started since. Only its wall clock can tell whether the end has passed.
    Wall(SystemTime),
}

impl Saved {
    /// The leases as a view with the origin [`Origin::Cached`].
    pub fn view(&self) -> View {
        View { leases: self.leases.clone(), origin: Origin::Cached { written: Some(self.written) } }
    }

    /// The own lease if `holder` holds it, even if it has ended.
    pub(crate) fn own(&self, holder: HolderId) -> Option<&Lease> {
        self.own.as_ref().filter(|(_, held_by)| *held_by == holder).map(|(lease, _)| lease)
    }

    /// The end of the own lease, or `None` if it has passed. If the machine was restarted and its
    /// wall clock is before the time of writing, the clock was set back, and the lease is not
    /// valid.
    pub(crate) fn own_end(&self, clock: &dyn Clock) -> Option<SavedEnd> {
        let (lease, _) = self.own.as_ref()?;
        let Some(wall) = lease.expires else { return Some(SavedEnd::Never) };
        let boot = clock.boot();
        match self.own_end.as_ref().filter(|end| boot.as_ref() == Some(&end.boot)) {
            Some(end) => (clock.boottime() < end.time).then_some(SavedEnd::SameBoot(end.time)),
            None => {
                let now = clock.wall();
                (self.written <= now && now < wall).then_some(SavedEnd::Wall(wall))
            }
        }
    }
}

/// The reason why a cache is not used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// An error of the file system. It is `NotFound` if the cache does not exist yet.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The file is not a cache, or is damaged.
    #[error("{path}: {reason}", path = path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
}

/// The second line of the file. Builds that do not know `own_end` and `lost` ignore them.
#[derive(Serialize, Deserialize)]
struct CommonValues {
    store: String,
    /// Milliseconds since 1970.
    written: u64,
    /// The location and the text.
    config: Option<(String, String)>,
    own: Option<OwnLease>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    own_end: Option<BootTime>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lost: Option<String>,
}

/// The own lease in the second line.
#[derive(Serialize, Deserialize)]
struct OwnLease {
    /// The line of the lease.
    lease: String,
    #[serde(rename = "mark")]
    holder: String,
    /// Milliseconds since 1970.
    expires: Option<u64>,
}

fn millis(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn time(millis: u64) -> Result<SystemTime, String> {
    SystemTime::UNIX_EPOCH
        .checked_add(Duration::from_millis(millis))
        .ok_or_else(|| format!("{millis} is not a time"))
}

mod whole_millis {
    use super::{Deserialize, Duration};

    pub(super) fn serialize<S: serde::Serializer>(
        time: &Duration,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        // It overflows after 584 million years.
        serializer.serialize_u64(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
    }

    pub(super) fn deserialize<'de, D: serde::Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Duration, D::Error> {
        u64::deserialize(deserializer).map(Duration::from_millis)
    }
}

fn lease_line(lease: &Lease) -> String {
    format!("{} {} {} {}", lease.subnets, lease.since, lease.revision, lease.attrs.to_json())
}

fn parse_key(text: &str) -> Result<Subnets, String> {
    text.parse().map_err(|error: flannel_core::address::ParseError| error.to_string())
}

fn parse_revision(text: &str) -> Result<Revision, String> {
    text.parse().map(Revision).map_err(|_| format!("{text:?} is not a revision"))
}

/// The value in the line of a lease.
fn value_of(line: &str) -> &str {
    line.splitn(4, ' ').nth(3).unwrap_or_default()
}

fn parse_lease(line: &str) -> Result<Lease, String> {
    let mut parts = line.splitn(4, ' ');
    let mut part =
        || parts.next().ok_or_else(|| format!("{line:?} is not a lease: KEY SINCE REVISION VALUE"));
    let key = part()?;
    let since = part()?;
    let revision = part()?;
    let value = part()?;
    Ok(Lease {
        subnets: parse_key(key)?,
        attrs: LeaseAttrs::from_json(value).map_err(|error| format!("{key}: {error}"))?,
        expires: None,
        since: parse_revision(since)?,
        revision: parse_revision(revision)?,
    })
}

impl Cache {
    /// A cache in this file, which is not read or created yet.
    pub fn open(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            #[cfg(feature = "testing")]
            memory: None,
        }
    }

    /// A cache in memory instead of a file. All clones share its content, which stays as long as
    /// one of them.
    #[cfg(feature = "testing")]
    pub fn in_memory() -> Self {
        Self { path: PathBuf::from("memory"), memory: Some(std::sync::Arc::default()) }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the cache is a file, which takes time to write.
    pub(crate) fn is_file(&self) -> bool {
        #[cfg(feature = "testing")]
        return self.memory.is_none();
        #[cfg(not(feature = "testing"))]
        true
    }

    /// Replaces the file in one step, with mode 0600. Creates its directory with mode 0700.
    ///
    /// # Errors
    /// An error of the file system. The file is unchanged.
    ///
    /// # Blocking
    /// Writes and syncs a file of about a hundred bytes per lease.
    pub fn save(&self, saved: &Saved) -> Result<(), CacheError> {
        #[cfg(feature = "testing")]
        if let Some(memory) = &self.memory {
            *flannel_core::runtime::lock(memory) = Some(saved.clone());
            return Ok(());
        }
        if let Some(dir) = self.path.parent() {
            let mut builder = fs::DirBuilder::new();
            builder.recursive(true).mode(0o700).create(dir).map_err(|error| self.io(error))?;
        }
        atomic::replace(&self.path, text(saved).as_bytes(), 0o600, None)
            .map_err(|error| self.io(error))
    }

    fn io(&self, source: io::Error) -> CacheError {
        CacheError::Io { path: self.path.clone(), source }
    }

    /// Reads the file.
    ///
    /// # Errors
    /// The file does not exist or cannot be read, or is damaged. The message has the file and the
    /// reason.
    ///
    /// # Blocking
    /// Reads one file.
    pub fn load(&self) -> Result<Saved, CacheError> {
        #[cfg(feature = "testing")]
        if let Some(memory) = &self.memory {
            let saved = flannel_core::runtime::lock(memory).clone();
            return saved.ok_or_else(|| self.io(io::ErrorKind::NotFound.into()));
        }
        let bytes = read_own_file(&self.path).map_err(|error| self.io(error))?;
        parse(&bytes).map_err(|reason| CacheError::Content { path: self.path.clone(), reason })
    }

    /// Reads the file if it belongs to `store`. Returns `None` if the file does not exist. A file
    /// that is damaged or belongs to another store is ignored with a warning.
    ///
    /// # Blocking
    /// Reads one file.
    pub fn load_from(&self, store: &str) -> Option<Saved> {
        let reason = match self.load() {
            Ok(saved) if saved.store == store => return Some(saved),
            Ok(saved) => format!("it belongs to {}, not to {store}", saved.store),
            Err(CacheError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return None;
            }
            Err(error) => error.to_string(),
        };
        tracing::warn!(path = %self.path.display(), %reason, "the cache is ignored");
        None
    }
}

fn text(saved: &Saved) -> String {
    let own = saved.own.as_ref().map(|(lease, holder)| OwnLease {
        lease: lease_line(lease),
        holder: holder.to_string(),
        expires: lease.expires.map(millis),
    });
    let common = CommonValues {
        store: saved.store.clone(),
        written: millis(saved.written),
        config: saved.config.clone().map(|config| (config.location, config.text)),
        own,
        own_end: saved.own_end.clone(),
        lost: saved.lost.map(|subnets| subnets.to_string()),
    };
    // Serialization fails only for I/O and for maps with keys that are not strings.
    let mut body =
        serde_json::to_string(&common).expect("a struct of strings and numbers serializes");
    for lease in saved.leases.iter() {
        // Writing to a string does not fail.
        let _ = write!(body, "\n{}", lease_line(lease));
    }
    body.push('\n');
    format!("{FORMAT} {VERSION} {:016x}\n{body}", fnv1a(body.as_bytes()))
}

fn parse(bytes: &[u8]) -> Result<Saved, String> {
    let end = bytes.iter().position(|byte| *byte == b'\n').ok_or("its first line does not end")?;
    let first_line = String::from_utf8_lossy(&bytes[..end]);
    let body = &bytes[end + 1..];
    let malformed = || format!("its first line is not \"{FORMAT} VERSION CHECKSUM\"");
    let parts: Vec<&str> = first_line.split(' ').collect();
    let [FORMAT, version, rest @ ..] = &parts[..] else { return Err(malformed()) };
    if *version != VERSION {
        return Err(format!("it has version {version:?}, this build reads version {VERSION}"));
    }
    let [sum] = rest else { return Err(malformed()) };
    if *sum != format!("{:016x}", fnv1a(body)) {
        return Err(format!(
            "the checksum {sum:?} does not match the content: the file is damaged"
        ));
    }
    let body = std::str::from_utf8(body).map_err(|error| error.to_string())?;
    let mut lines = body.lines();
    let common: CommonValues = serde_json::from_str(lines.next().unwrap_or_default())
        .map_err(|error| format!("line 2: {error}"))?;
    Ok(Saved {
        store: common.store,
        written: time(common.written)?,
        // An earlier version may have written values of any size.
        leases: lines
            .filter(|line| TooLarge::check(value_of(line).len()).is_ok())
            .map(parse_lease)
            .collect::<Result<_, _>>()?,
        config: common.config.map(|(location, text)| ConfigText { location, text }),
        own: common.own.as_ref().map(parse_own).transpose()?,
        own_end: common.own_end,
        lost: common.lost.as_deref().map(parse_key).transpose()?,
    })
}

fn parse_own(own: &OwnLease) -> Result<(Lease, HolderId), String> {
    let lease = parse_lease(&own.lease)?;
    let expires = own.expires.map(time).transpose()?;
    let holder = own.holder.parse().map_err(|error: HolderIdError| error.to_string())?;
    Ok((Lease { expires, ..lease }, holder))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    use nix::time::ClockId;

    fn at(secs: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(secs)
    }

    fn peer(n: u32) -> Lease {
        let value = format!(
            r#"{{"PublicIP":"192.{}.{}.7","PublicIPv6":"2001:db8::{n:x}","BackendType":"vxlan",
            "BackendData":{{"VNI":1,"VtepMAC":"0a:00:00:00:00:07"}}}}"#,
            n / 256 % 256,
            n % 256
        );
        Lease {
            subnets: Subnets::new([
                format!("10.{}.{}.0/24", n / 256, n % 256).parse().unwrap(),
                format!("fd00:0:0:{n:x}::/64").parse().unwrap(),
            ])
            .unwrap(),
            attrs: LeaseAttrs::from_json(&value).unwrap(),
            expires: None,
            since: Revision(u64::from(n)),
            revision: Revision(u64::MAX),
        }
    }

    fn saved(peers: u32) -> Saved {
        let config = ConfigText {
            location: "file".into(),
            text: "{\n\"Network\": \"10.0.0.0/8\" }\n".into(),
        };
        Saved {
            store: "dir:/a b/\"c\"\n".into(),
            written: at(1_000),
            leases: (0..peers).map(peer).collect(),
            config: Some(config),
            own: Some((Lease { expires: Some(at(2_000)), ..peer(1) }, HolderId(7))),
            own_end: Some(BootTime { boot: "a b".into(), time: Duration::from_millis(500_001) }),
            lost: None,
        }
    }

    #[test]
    fn a_cache_is_loaded_only_for_its_store() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path().join("new/leases"));
        assert!(matches!(cache.load(), Err(CacheError::Io { .. })));
        assert_eq!(cache.load_from("any"), None);
        let lost = Some(peer(2).subnets);
        let none = Saved { own: None, own_end: None, config: None, lost, ..saved(0) };
        for saved in [saved(3), none] {
            cache.save(&saved).unwrap();
            assert_eq!(cache.load().unwrap(), saved);
            assert_eq!(cache.load_from(&saved.store), Some(saved));
            assert_eq!(cache.load_from("dir:/other"), None);
        }
        assert_eq!(fs::read_dir(dir.path().join("new")).unwrap().count(), 1);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&dir.path().join("new")), 0o700);
        assert_eq!(mode(cache.path()), 0o600);
        fs::rename(cache.path(), dir.path().join("target")).unwrap();
        std::os::unix::fs::symlink("../target", cache.path()).unwrap();
        let error = cache.load().unwrap_err().to_string();
        assert!(error.contains("a symbolic link"), "{error}");
    }

    /// Clocks that stand still.
    #[derive(Debug)]
    struct Still {
        boot: Option<&'static str>,
        boottime: u64,
        wall: u64,
    }

    #[async_trait::async_trait]
    impl Clock for Still {
        fn boottime(&self) -> Duration {
            Duration::from_secs(self.boottime)
        }

        fn boot(&self) -> Option<String> {
            self.boot.map(ToOwned::to_owned)
        }

        fn wall(&self) -> SystemTime {
            at(self.wall)
        }

        async fn sleep_until(&self, _: Duration) {}

        async fn sleep_until_wall(&self, _: SystemTime) {}
    }

    #[test]
    fn the_own_lease_belongs_to_its_holder() {
        assert!(saved(0).own(HolderId(7)).is_some() && saved(0).own(HolderId(8)).is_none());
    }

    #[test]
    fn the_own_lease_counts_until_its_end() {
        let wall = SavedEnd::Wall(at(2_000));
        let same = SavedEnd::SameBoot(Duration::from_millis(500_001));
        for (boot, boottime, now, end) in [
            (None, 9, 1_000, Some(wall)),
            (None, 9, 1_999, Some(wall)),
            (None, 9, 2_000, None),
            (None, 9, 999, None),
            // The machine was started since.
            (Some("c"), 9, 1_500, Some(wall)),
            (Some("c"), 900, 1_500, Some(wall)),
            (Some("c"), 9, 2_500, None),
            // The machine still runs: its wall clock does not count.
            (Some("a b"), 500, 1_500, Some(same)),
            (Some("a b"), 500, 1, Some(same)),
            (Some("a b"), 500, 9_999, Some(same)),
            (Some("a b"), 501, 1_500, None),
        ] {
            let clock = Still { boot, boottime, wall: now };
            assert_eq!(saved(0).own_end(&clock), end, "{clock:?}");
        }
        let reservation = Saved { own: Some((peer(1), HolderId(7))), own_end: None, ..saved(0) };
        for wall in [1, 9_999] {
            let clock = Still { boot: Some("c"), boottime: 9, wall };
            assert_eq!(reservation.own_end(&clock), Some(SavedEnd::Never));
        }
    }

    /// Written by a build without boot times.
    #[test]
    fn a_cache_without_a_boot_time_is_read() {
        let body = text(&Saved { own_end: None, ..saved(2) });
        assert!(!body.contains("own_end"), "{body}");
        assert_eq!(parse(body.as_bytes()).unwrap(), Saved { own_end: None, ..saved(2) });
    }

    #[test]
    fn any_damage_is_detected() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path().join("leases"));
        let good = text(&saved(2)).into_bytes();
        for end in 0..good.len() {
            parse(&good[..end]).unwrap_err();
        }
        for place in 0..good.len() {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[place] ^= 1 << bit;
                parse(&bad).unwrap_err();
            }
        }
        let other_version = text(&saved(2)).replacen(" 1 ", " 2 ", 1);
        let resealed =
            |body: &str| format!("{FORMAT} {VERSION} {:016x}\n{body}", fnv1a(body.as_bytes()));
        for (bad, says) in [
            (other_version, "version \"2\", this build reads version 1"),
            (String::new(), "first line"),
            ("{}\n".into(), "first line"),
            (text(&saved(2)).replace("2001", "2002"), "damaged"),
            (resealed("{}"), "line 2"),
            (resealed(""), "line 2"),
            (
                resealed("{\"store\":\"s\",\"written\":1,\"config\":null,\"own\":null}\nx 1 2"),
                "not a lease",
            ),
            (
                resealed("{\"store\":\"s\",\"written\":1,\"config\":null,\"own\":null}\nx 1 2 {}"),
                "\"x\" is not",
            ),
        ] {
            fs::write(cache.path(), bad).unwrap();
            let error = cache.load().unwrap_err().to_string();
            assert!(error.contains(says) && error.contains("leases: "), "{error}");
            assert_eq!(cache.load_from(&saved(2).store), None);
        }
    }

    #[test]
    fn a_cache_of_a_newer_version_is_ignored_and_not_changed() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path().join("leases"));
        let newer = "flannel-leases 2 sha256:00\n{\"new\":true}\n";
        for newer in [newer.to_owned(), text(&saved(2)).replacen(" 1 ", " 2 ", 1)] {
            fs::write(cache.path(), &newer).unwrap();
            assert_eq!(cache.load_from(&saved(2).store), None);
            assert_eq!(fs::read_to_string(cache.path()).unwrap(), newer);
        }
        cache.save(&saved(2)).unwrap();
        assert_eq!(cache.load_from(&saved(2).store), Some(saved(2)));
    }

    #[test]
    fn ten_thousand_leases_are_loaded_quickly() {
        let bytes = text(&saved(10_000)).into_bytes();
        // The time of this thread, because other processes may delay it.
        let computed = || Duration::from(ClockId::CLOCK_THREAD_CPUTIME_ID.now().unwrap());
        let begin = computed();
        let loaded = parse(&bytes).unwrap();
        let took = computed() - begin;
        let limit = Duration::from_millis(if cfg!(debug_assertions) { 1_500 } else { 100 });
        assert!(took < limit, "{took:?}");
        assert_eq!(loaded.leases.len(), 10_000);
    }
}
