//! Metrics in Prometheus' text format, version 0.0.4.
//!
//! The one thing to know: names and labels are an interface. Counters that a network keeps begin again with each
//! network (`flannel_networks_total` counts those), which `rate()` and `increase()` expect of counters.

use std::collections::BTreeMap;
use std::fmt::{Display, Write};
use std::time::{Duration, SystemTime};

use flannel_api::{Problem, seconds};
use flannel_core::{Damage, Disbelief, Histogram, StoreStatus};

use crate::firewall::Rulebook;
use crate::observe::{NetworkSnapshot, Snapshot};
use crate::problems::problems;
use crate::report::subnets_used;

/// What `Content-Type` says.
pub(crate) const KIND: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What objects are called.
const KINDS: [&str; 6] = ["link", "address", "neigh", "fdb", "nexthop", "route"];

/// Everything that is measured, at one moment.
pub(crate) fn metrics(snapshot: &Snapshot) -> String {
    let mut page = Page::default();
    let ready = !problems(snapshot).iter().any(Problem::is_error);
    page.family("flannel_build_info", "gauge", "The version of flanneld, as a label");
    page.sample("flannel_build_info", &[("version", &env!("CARGO_PKG_VERSION"))], 1);
    page.gauge(
        "flannel_start_time_seconds",
        "When the daemon started, in seconds since 1970",
        seconds(snapshot.started),
    );
    page.gauge("flannel_ready", "1 if this node is ready, as /readyz says", u8::from(ready));
    page.counter(
        "flannel_networks_total",
        "Networks that were built: 1, and one more for each rebuild",
        snapshot.networks,
    );
    page.gauge(
        "flannel_config_waiting",
        "1 if the store holds a network config that is used only after a restart",
        u8::from(snapshot.waiting_config.is_some()),
    );
    own_lease(&mut page, snapshot);
    store(&mut page, snapshot);
    if let Some(network) = &snapshot.network {
        leases(&mut page, network, snapshot.store.as_ref());
        kernel(&mut page, network);
        firewall(&mut page, &network.running.rulebook.borrow());
    }
    page.0
}

fn own_lease(page: &mut Page, snapshot: &Snapshot) {
    let held = snapshot.ownership.is_held();
    page.gauge("flannel_lease_held", "1 if this node holds its lease", u8::from(held));
    if let Some(left) = snapshot.ownership.remaining(snapshot.time) {
        page.gauge(
            "flannel_lease_remaining_seconds",
            "How much longer this node's lease is its own unless renewed; absent for a reservation",
            left.as_secs_f64(),
        );
    }
}

fn store(page: &mut Page, snapshot: &Snapshot) {
    let Some(store) = &snapshot.store else { return };
    let age = |at: SystemTime| snapshot.time.duration_since(at).unwrap_or_default().as_secs_f64();
    page.gauge(
        "flannel_store_up",
        "1 if the store has answered, and not failed to since",
        u8::from(store.last_error.is_none() && store.confirmed.is_some()),
    );
    if let Some((revision, at)) = store.confirmed {
        page.gauge("flannel_store_age_seconds", "Since the store last answered anything", age(at));
        page.gauge(
            "flannel_store_revision",
            "The last revision that the store confirmed",
            revision.0,
        );
    }
    page.family(
        "flannel_store_requests_total",
        "counter",
        "Requests sent to the store, by what was asked",
    );
    for (call, calls) in &store.calls {
        page.sample("flannel_store_requests_total", &[("call", call)], calls.sent);
    }
    page.family(
        "flannel_store_request_failures_total",
        "counter",
        "Requests to the store that failed, by what was asked",
    );
    for (call, calls) in &store.calls {
        page.sample("flannel_store_request_failures_total", &[("call", call)], calls.failed);
    }
    page.gauge(
        "flannel_store_skipped_entries",
        "Entries in the store that are no leases",
        store.skipped.len(),
    );
}

/// What a disbelief is called in a label.
fn reason(why: &Disbelief) -> &'static str {
    match why {
        Disbelief::Outside { .. } => "outside",
        Disbelief::NoEnabledFamily => "no_enabled_family",
        Disbelief::OverlapsOwn { .. } => "overlaps_own",
        Disbelief::Overlaps { .. } => "overlaps",
        Disbelief::Contradicts { .. } => "contradicts",
        Disbelief::ContradictsOwn { .. } => "contradicts_own",
        Disbelief::Rejected(_) => "rejected",
        _ => "other",
    }
}

fn leases(page: &mut Page, network: &NetworkSnapshot, store: Option<&StoreStatus>) {
    let status = &network.status;
    page.gauge(
        "flannel_leases",
        "Leases in the store, this node's included",
        network.view.leases.len(),
    );
    page.gauge(
        "flannel_leases_live",
        "1 if they come from the store, 0 if from the cache",
        u8::from(status.live),
    );
    page.gauge("flannel_peers", "Other nodes whose leases are believed", status.peers);
    let known = [
        "outside",
        "no_enabled_family",
        "overlaps_own",
        "overlaps",
        "contradicts",
        "contradicts_own",
        "rejected",
    ];
    let mut reasons: BTreeMap<&str, u64> = known.map(|reason| (reason, 0)).into();
    for why in status.disbelieved.values() {
        *reasons.entry(reason(why)).or_default() += 1;
    }
    page.family("flannel_disbelieved_leases", "gauge", "Leases that are not believed, by why");
    for (reason, count) in &reasons {
        page.sample("flannel_disbelieved_leases", &[("reason", reason)], count);
    }
    let clash = |(reason, _): &(&&str, &u64)| {
        reason.starts_with("overlaps") || reason.starts_with("contradicts")
    };
    let conflicts: u64 = reasons.iter().filter(clash).map(|(_, count)| count).sum();
    page.gauge("flannel_conflicts", "Leases that clash with another one", conflicts);
    page.family(
        "flannel_subnets",
        "gauge",
        "Subnets between SubnetMin and SubnetMax; in Kubernetes those of this node's size in the network",
    );
    for room in subnets_used(network, store) {
        for (state, count) in [("total", room.total), ("used", room.used), ("free", room.free)] {
            page.sample("flannel_subnets", &[("family", &room.family), ("state", &state)], count);
        }
    }
}

/// Where no rules are asked for, all of them are in place.
fn firewall(page: &mut Page, rulebook: &Rulebook) {
    let (in_place, repairs) = match rulebook {
        Rulebook::Unwanted => (true, 0),
        Rulebook::Pending | Rulebook::Missing { .. } => (false, 0),
        Rulebook::Kept(status) => {
            let status = status.borrow();
            (status.in_place, status.repairs)
        }
    };
    page.gauge(
        "flannel_firewall_in_place",
        "1 if the firewall rules that are wanted are in place",
        u8::from(in_place),
    );
    page.counter(
        "flannel_firewall_repairs_total",
        "How often rules were put back that somebody else had changed",
        repairs,
    );
}

fn kernel(page: &mut Page, network: &NetworkSnapshot) {
    let status = &network.status;
    page.gauge(
        "flannel_in_sync",
        "1 if the kernel is what the leases say",
        u8::from(status.in_sync),
    );
    page.gauge(
        "flannel_kernel_readable",
        "1 if the kernel can be read and watched",
        u8::from(status.kernel_error.is_none()),
    );
    let wanted: BTreeMap<String, usize> =
        status.by_kind.iter().map(|(kind, count)| (kind.to_string(), *count)).collect();
    let (mut failing, mut absent) =
        (BTreeMap::<String, usize>::new(), BTreeMap::<String, usize>::new());
    for (key, failure) in status.failing.iter() {
        *failing.entry(key.kind().to_string()).or_default() += 1;
        // What cannot be deleted fails, too, and is not wanted.
        if failure.change.starts_with("put ") {
            *absent.entry(key.kind().to_string()).or_default() += 1;
        }
    }
    page.family(
        "flannel_objects",
        "gauge",
        "Objects that are wanted in the kernel, by kind and state; pending ones are not known to be in place",
    );
    let known = status.settled && status.kernel_error.is_none();
    for kind in KINDS {
        let count = |of: &BTreeMap<String, usize>| of.get(kind).copied().unwrap_or_default();
        let failing = count(&absent).min(count(&wanted));
        let others = count(&wanted) - failing;
        let (in_place, pending) = if known { (others, 0) } else { (0, others) };
        for (state, count) in [("in place", in_place), ("pending", pending), ("failing", failing)] {
            page.sample("flannel_objects", &[("object", &kind), ("state", &state)], count);
        }
    }
    page.family("flannel_failing_objects", "gauge", "Objects that the kernel refuses, by kind");
    for kind in KINDS {
        let count = failing.get(kind).copied().unwrap_or_default();
        page.sample("flannel_failing_objects", &[("object", &kind)], count);
    }
    page.counter(
        "flannel_changes_total",
        "Changes of the kernel that leases asked for",
        status.applied,
    );
    page.counter(
        "flannel_repairs_total",
        "Objects put right after somebody else had changed them",
        status.repaired,
    );
    page.family(
        "flannel_external_mutations_total",
        "counter",
        "What others did to objects, as far as it was repaired",
    );
    for ((kind, damage), count) in &status.repairs {
        let operation = match damage {
            Damage::Deletion => "delete",
            Damage::Modification => "modify",
            Damage::Addition => "add",
            _ => "other",
        };
        page.sample(
            "flannel_external_mutations_total",
            &[("object", kind), ("operation", &operation)],
            count,
        );
    }
    page.histogram(
        "flannel_lease_to_kernel_seconds",
        "From a lease's arrival to the kernel's acknowledgement, for each object",
        &status.latency,
    );
}

/// The text so far.
#[derive(Default)]
struct Page(String);

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing into a string does not fail.
        let _ = writeln!(self.0, "# HELP {name} {help}.\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &dyn Display)], value: impl Display) {
        let labels: Vec<String> =
            labels.iter().map(|(key, value)| format!("{key}=\"{}\"", escaped(value))).collect();
        let labels =
            if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(self.0, "{name}{labels} {value}");
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(name, "gauge", help);
        self.sample(name, &[], value);
    }

    fn counter(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(name, "counter", help);
        self.sample(name, &[], value);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.family(name, "histogram", help);
        let mut below = 0;
        for (bound, count) in histogram.buckets() {
            below += count;
            let bound = if bound == Duration::MAX {
                "+Inf".to_owned()
            } else {
                bound.as_secs_f64().to_string()
            };
            self.sample(&format!("{name}_bucket"), &[("le", &bound)], below);
        }
        self.sample(&format!("{name}_sum"), &[], histogram.sum().as_secs_f64());
        self.sample(&format!("{name}_count"), &[], histogram.count());
    }
}

fn escaped(value: &dyn Display) -> String {
    value.to_string().replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use flannel_core::{KernelError, ObjectKind, Ownership, Revision, Status};
    use prometheus_parse::{Scrape, Value};

    use super::*;
    use crate::observe::Observer;
    use crate::observe::tests::network;

    fn scrape(text: &str) -> Scrape {
        Scrape::parse(text.lines().map(|line| Ok(line.to_owned()))).unwrap()
    }

    #[tokio::test]
    async fn a_parser_reads_back_what_the_status_says() {
        let mut status = Status::default();
        (status.in_sync, status.live, status.peers, status.objects) = (true, true, 3, 11);
        status.settled = true;
        status.by_kind.insert(ObjectKind::Route, 3);
        status.repairs.insert((ObjectKind::Route, Damage::Deletion), 5);
        for millis in [1, 3, 20_000] {
            status.latency.record(Duration::from_millis(millis));
        }
        let observer = Observer::default();
        let _guard = observer.running(network(status).await.1);
        observer.subnet_file_written();
        let mut snapshot = observer.snapshot();
        let until = Some(snapshot.time + Duration::from_secs(3600));
        snapshot.ownership = Ownership::Held { until };
        let text = metrics(&snapshot);
        let scraped = scrape(&text);
        let value = |name: &str, labels: &[(&str, &str)]| {
            let sample = scraped.samples.iter().find(|sample| {
                sample.metric == name
                    && labels.iter().all(|(key, value)| sample.labels.get(key) == Some(*value))
            });
            match &sample.unwrap_or_else(|| panic!("{name} {labels:?} is not in:\n{text}")).value {
                Value::Gauge(value) | Value::Counter(value) | Value::Untyped(value) => *value,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(value("flannel_ready", &[]), 1.0);
        assert_eq!(value("flannel_peers", &[]), 3.0);
        assert_eq!(value("flannel_leases", &[]), 4.0);
        assert_eq!(value("flannel_lease_remaining_seconds", &[]), 3600.0);
        assert_eq!(value("flannel_subnets", &[("family", "IPv4"), ("state", "free")]), 251.0);
        assert_eq!(
            value(
                "flannel_external_mutations_total",
                &[("object", "route"), ("operation", "delete")]
            ),
            5.0
        );
        assert_eq!(value("flannel_failing_objects", &[("object", "neigh")]), 0.0);
        assert_eq!(value("flannel_objects", &[("object", "route"), ("state", "in place")]), 3.0);
        assert_eq!(value("flannel_objects", &[("object", "link"), ("state", "in place")]), 0.0);
        let latency = scraped
            .samples
            .iter()
            .find(|sample| sample.metric == "flannel_lease_to_kernel_seconds")
            .unwrap();
        let Value::Histogram(buckets) = &latency.value else { panic!("{latency:?}") };
        let counts: Vec<(f64, f64)> =
            buckets.iter().map(|bucket| (bucket.less_than, bucket.count)).collect();
        assert_eq!((counts[0], counts[3], counts[5]), ((0.0001, 0.0), (0.001, 1.0), (0.005, 2.0)));
        assert_eq!(*counts.last().unwrap(), (f64::INFINITY, 3.0));
        assert!(counts.is_sorted());
    }

    #[tokio::test]
    async fn objects_are_pending_while_they_are_not_known_to_be_in_place() {
        let mut status = Status::default();
        status.by_kind.insert(ObjectKind::Route, 5);
        for (settled, readable, expected) in [
            (true, true, [5.0, 0.0, 0.0]),
            (false, true, [0.0, 5.0, 0.0]),
            (true, false, [0.0, 5.0, 0.0]),
        ] {
            status.settled = settled;
            status.kernel_error = (!readable).then(|| KernelError::explained(105, "x"));
            let observer = Observer::default();
            let _guard = observer.running(network(status.clone()).await.1);
            let scraped = scrape(&metrics(&observer.snapshot()));
            let states = ["in place", "pending", "failing"].map(|state| {
                let is = |sample: &&prometheus_parse::Sample| {
                    sample.metric == "flannel_objects"
                        && sample.labels.get("object") == Some("route")
                        && sample.labels.get("state") == Some(state)
                };
                match scraped.samples.iter().find(is).unwrap().value {
                    Value::Gauge(value) => value,
                    ref other => panic!("{other:?}"),
                }
            });
            assert_eq!(states, expected, "settled {settled}, readable {readable}");
        }
    }

    #[test]
    fn a_store_that_has_never_answered_is_not_up() {
        let mut snapshot = Observer::default().snapshot();
        let status = |confirmed, last_error: Option<&str>| StoreStatus {
            store: "etcd".into(),
            confirmed,
            last_error: last_error.map(|error| (error.to_owned(), SystemTime::UNIX_EPOCH)),
            ..StoreStatus::default()
        };
        let answered = Some((Revision(7), SystemTime::UNIX_EPOCH));
        for (store, up) in [
            (status(None, None), 0),
            (status(answered, None), 1),
            (status(answered, Some("gone")), 0),
        ] {
            snapshot.store = Some(store);
            let text = metrics(&snapshot);
            assert!(text.contains(&format!("\nflannel_store_up {up}\n")), "{text}");
        }
    }

    /// What the parser above lets pass, and Prometheus does not.
    #[tokio::test]
    async fn every_sample_belongs_to_the_family_before_it_and_none_is_there_twice() {
        let observer = Observer::default();
        let _guard = observer.running(network(Status::default()).await.1);
        let (mut family, mut seen) = (String::new(), std::collections::BTreeSet::new());
        for line in metrics(&observer.snapshot()).lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                family = rest.split(' ').next().unwrap().to_owned();
                assert!(seen.insert(family.clone()), "{family} twice");
                assert_eq!(rest.ends_with(" counter"), family.ends_with("_total"), "{family}");
            } else if !line.starts_with('#') {
                let series = line.rsplit_once(' ').unwrap().0;
                assert!(series.starts_with(&family), "{series} below {family}");
                assert!(seen.insert(format!("{series} ")), "{series} twice");
            }
        }
        assert!(!seen.is_empty());
    }
}
