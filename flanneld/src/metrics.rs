//! Metrics for Prometheus.
//!
//! Names, types and labels are an interface: `names.golden` lists them. No label names a peer, so a
//! page does not grow with the cluster.

mod network;
mod page;

use flannel_api::seconds;
use flannel_core::status::Damage;
use flannel_core::subnet::Confirmed;
use flannel_firewall::Packets;

use crate::observe::{Counters, Snapshot};
use crate::report::problems::first_error;
use crate::report::refused_config;
use network::of_network;
pub(crate) use page::Format;
use page::{Page, labels};

/// All metrics at one moment.
pub(crate) fn metrics(snapshot: &Snapshot, format: Format) -> String {
    let mut page = Page::default();
    daemon(&mut page, snapshot);
    configs(&mut page, snapshot);
    own_lease(&mut page, snapshot);
    store(&mut page, snapshot);
    counters(&mut page, &snapshot.counters);
    if let Some(network) = &snapshot.network {
        of_network(&mut page, network, snapshot);
    }
    page.encoded(format)
}

fn daemon(page: &mut Page, snapshot: &Snapshot) {
    let version = labels(&[("version", env!("CARGO_PKG_VERSION"))]);
    page.info("flannel_build_info", "The version of flanneld, as a label", version);
    page.seconds(
        "flannel_start_time_seconds",
        "When the daemon started, in seconds since 1970",
        seconds(snapshot.started),
    );
    let ready = first_error(snapshot).is_none();
    page.flag("flannel_ready", "1 if this node is ready, as /readyz says", ready);
    page.counter(
        "flannel_networks_total",
        "Networks that were built: 1, and one more for each rebuild",
        snapshot.facts.networks,
    );
}

fn configs(page: &mut Page, snapshot: &Snapshot) {
    page.flag(
        "flannel_config_waiting",
        "1 if the store holds a network config that is used only after a restart",
        snapshot.facts.waiting_config.is_some(),
    );
    page.flag(
        "flannel_config_refused",
        "1 if this node cannot follow the network config in the store, and runs the last good one",
        snapshot.network.is_some() && refused_config(snapshot).is_some(),
    );
    page.flag(
        "flannel_backend_move",
        "1 if this node moves to another backend, and runs several meanwhile",
        snapshot.facts.moving.is_some(),
    );
}

fn own_lease(page: &mut Page, snapshot: &Snapshot) {
    let held = snapshot.ownership.is_held();
    page.flag("flannel_lease_held", "1 if this node holds its lease", held);
    if let Some(left) = snapshot.ownership.remaining(snapshot.time) {
        page.seconds(
            "flannel_lease_remaining_seconds",
            "Time until this node's lease ends unless it is renewed; absent for a reservation",
            left.as_secs_f64(),
        );
    }
}

fn store(page: &mut Page, snapshot: &Snapshot) {
    let Some(store) = &snapshot.store else { return };
    page.flag(
        "flannel_store_up",
        "1 if the store has answered, and no request has failed since then",
        store.last_error.is_none() && store.confirmed.is_some(),
    );
    if let Some(Confirmed { revision, at }) = store.confirmed {
        let age = snapshot.time.duration_since(at).unwrap_or_default();
        page.seconds(
            "flannel_store_age_seconds",
            "Time since the last answer of the store",
            age.as_secs_f64(),
        );
        page.gauge(
            "flannel_store_revision",
            "The last revision that the store confirmed",
            revision.0,
        );
    }
    page.counters(
        "flannel_store_requests_total",
        "Requests sent to the store, by operation",
        store.calls.iter().map(|(call, calls)| (labels(&[("call", call)]), calls.sent)),
    );
    page.counters(
        "flannel_store_request_failures_total",
        "Requests to the store that failed, by operation",
        store.calls.iter().map(|(call, calls)| (labels(&[("call", call)]), calls.failed)),
    );
    page.gauge(
        "flannel_store_skipped_entries",
        "Entries in the store that are no leases",
        store.skipped.len() as u64,
    );
}

fn counters(page: &mut Page, counters: &Counters) {
    page.counter(
        "flannel_changes_total",
        "Changes of the kernel because of leases",
        counters.applied,
    );
    page.counter(
        "flannel_refused_changes_total",
        "Changes that the kernel refused, also repeated ones",
        counters.refused,
    );
    page.counter(
        "flannel_repairs_total",
        "Objects that were repaired after another program had changed them",
        counters.repaired,
    );
    page.counter(
        "flannel_firewall_repairs_total",
        "Repairs of firewall rules that another program had changed",
        counters.firewall_repairs,
    );
    let Packets { unencrypted } = counters.dropped;
    let dropped = [("unencrypted", unencrypted)];
    page.counters(
        "flannel_firewall_dropped_packets_total",
        "Packets that were dropped, as rules in nftables count them: unencrypted ones to pods of \
         other nodes",
        dropped.map(|(reason, packets)| (labels(&[("reason", reason)]), packets)),
    );
    let mutations = counters.repairs.iter().map(|((kind, damage), count)| {
        let operation = match damage {
            Damage::Deletion => "delete",
            Damage::Modification => "modify",
            Damage::Addition => "add",
            _ => "other",
        };
        (labels(&[("object", &kind.to_string()), ("operation", operation)]), *count)
    });
    page.counters(
        "flannel_external_mutations_total",
        "Repaired changes of objects by other programs",
        mutations,
    );
    page.histogram(
        "flannel_lease_to_kernel_seconds",
        "From a lease's arrival to the kernel's acknowledgement, for each object",
        &counters.latency,
    );
    page.histogram(
        "flannel_path_round_trip_seconds",
        "Round trips of small packets to peers",
        &counters.round_trips,
    );
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;
    use std::time::{Duration, SystemTime};

    use flannel_core::kernel::{KernelError, PacketCount, Refused, Traffic};
    use flannel_core::lease::Revision;
    use flannel_core::object::ObjectKind;
    use flannel_core::status::Status;
    use flannel_core::subnet::{LastError, Ownership, StoreFailure, StoreKind, StoreStatus};
    use flannel_doctor::finding::Check;
    use flannel_doctor::paths::Paths;
    use flannel_netlink::NetlinkKernel;
    use prometheus_parse::{Scrape, Value};

    use super::*;
    use crate::observe::Observer;
    use crate::observe::tests::{network, tunnels_with};

    fn scrape(text: &str) -> Scrape {
        Scrape::parse(text.lines().map(|line| Ok(line.to_owned()))).unwrap()
    }

    /// A snapshot with a sample in every family of metrics.
    async fn full() -> (Observer, Snapshot) {
        let mut status = Status::default();
        for damage in [Damage::Deletion, Damage::Modification] {
            status.repairs.insert((ObjectKind::Route, damage), 5);
        }
        status.latency.record(Duration::from_millis(7));
        let observer = Observer::default();
        let mut running = network(status).await.1;
        running.paths = Some(Paths::new(Duration::from_secs(300)));
        running.encrypted = Some(Arc::new(NetlinkKernel::open().unwrap()));
        let guard = observer.running(running);
        let mut snapshot = observer.snapshot();
        drop(guard);
        let dropped = [("no_peer", 4), ("foreign_node", 5)].into();
        let sent = Some(PacketCount { packets: 7, bytes: 700 });
        let received = Some(PacketCount { packets: 3, bytes: 300 });
        let traffic = Traffic { sent, received, dropped, ..Traffic::default() };
        snapshot.network.as_mut().unwrap().traffic = Some(traffic);
        let packets = [("stranger", 6), ("foreign_source", 0), ("pod", 2)].into();
        let refused = Refused { drops: true, packets, ..Refused::default() };
        snapshot.network.as_mut().unwrap().refused = Some(refused);
        let until = Some(snapshot.time + Duration::from_secs(3600));
        snapshot.ownership = Ownership::Held { until };
        let calls = flannel_core::subnet::Calls { sent: 2, failed: 1 };
        snapshot.store = Some(
            StoreStatus::default()
                .with_confirmed(Some(Confirmed {
                    revision: Revision(7),
                    at: SystemTime::UNIX_EPOCH,
                }))
                .with_calls([("get", calls)].into()),
        );
        (observer, snapshot)
    }

    /// Name, type and labels of every family, sorted. Dashboards and alerts depend on them.
    #[tokio::test]
    async fn names_types_and_labels_match_the_golden_file() {
        let (_observer, snapshot) = full().await;
        let text = metrics(&snapshot, Format::Text);
        let mut families = BTreeMap::<&str, (&str, std::collections::BTreeSet<String>)>::new();
        for line in text.lines() {
            if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|l| l.split_once(' '))
            {
                families.insert(name, (kind, [].into()));
            } else if let Some((name, rest)) = line.split_once('{') {
                let name = name.strip_suffix("_bucket").unwrap_or(name);
                let labels = rest.rsplit_once('}').unwrap().0.split("\",");
                let names = labels.map(|label| label.split('=').next().unwrap());
                families.get_mut(name).unwrap().1.insert(names.collect::<Vec<_>>().join(","));
            }
        }
        let lines = families.into_iter().map(|(name, (kind, labels))| {
            let labels: Vec<String> = labels.into_iter().collect();
            format!("{name} {kind} {}", labels.join(" ")).trim_end().to_owned() + "\n"
        });
        assert_eq!(lines.collect::<String>(), include_str!("metrics/names.golden"));
    }

    #[tokio::test]
    async fn openmetrics_is_sent_to_clients_that_accept_it() {
        let prometheus = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,\
                          text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for (accept, format) in [
            ("", Format::Text),
            ("*/*", Format::Text),
            ("text/plain;version=0.0.4", Format::Text),
            ("application/openmetrics-text", Format::OpenMetrics),
            (prometheus, Format::OpenMetrics),
        ] {
            assert_eq!(Format::accepted(accept), format, "{accept}");
        }
        let (_observer, snapshot) = full().await;
        let text = metrics(&snapshot, Format::OpenMetrics);
        for lines in [
            "# TYPE flannel_build info\nflannel_build_info{version=",
            "# TYPE flannel_networks counter\nflannel_networks_total 1\n",
            "# TYPE flannel_leases gauge\nflannel_leases 4\n",
            "flannel_lease_to_kernel_seconds_bucket{le=\"+Inf\"} 1\n",
        ] {
            assert!(text.contains(lines), "{lines}: {text}");
        }
        assert!(text.ends_with("\n# EOF\n"));
        // Both formats have the same series, apart from the bounds of buckets, which are canonical.
        let series = |format| {
            let text = metrics(&snapshot, format);
            let lines = text.lines().filter(|line| !line.starts_with('#') && !line.contains("le="));
            let mut series: Vec<String> =
                lines.map(|line| line.rsplit_once(' ').unwrap().0.to_owned()).collect();
            series.sort();
            series
        };
        assert_eq!(series(Format::Text), series(Format::OpenMetrics));
    }

    #[tokio::test]
    async fn a_prometheus_parser_reads_the_values_of_the_status() {
        let mut status = Status::default();
        status.in_sync = true;
        status.live = true;
        status.peers = 3;
        status.objects = 11;
        status.settled = true;
        status.by_kind.insert(ObjectKind::Route, 3);
        status.repairs.insert((ObjectKind::Route, Damage::Deletion), 5);
        for millis in [1, 3, 20_000] {
            status.latency.record(Duration::from_millis(millis));
        }
        let observer = Observer::default();
        let _guard = observer.running(network(status).await.1);
        observer.note(|facts| facts.subnet_file = true);
        observer.note(|facts| {
            facts.findings = [Check::Xdp, Check::Xdp, Check::Arp]
                .map(|check| flannel_doctor::Finding::warning(check, "text"))
                .into();
        });
        let mut snapshot = observer.snapshot();
        let until = Some(snapshot.time + Duration::from_secs(3600));
        snapshot.ownership = Ownership::Held { until };
        let text = metrics(&snapshot, Format::Text);
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
        let findings = ["xdp", "arp", "qdisc"];
        let findings = findings.map(|check| value("flannel_findings", &[("check", check)]));
        assert_eq!(findings, [2.0, 1.0, 0.0]);
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
            let scraped = scrape(&metrics(&observer.snapshot(), Format::Text));
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

    #[tokio::test]
    async fn tunnels_are_counted_by_their_last_handshake() {
        let (_observer, mut snapshot) = full().await;
        let now = SystemTime::now();
        let ago = |seconds| Some(now - Duration::from_secs(seconds));
        let tunnels =
            tunnels_with([(ago(9), 7), (ago(100), 7), (ago(181), 7), (None, 7), (None, 0)]);
        snapshot.network.as_mut().unwrap().tunnels = Arc::new(tunnels);
        let text = metrics(&snapshot, Format::Text);
        for line in [
            "flannel_tunnels{state=\"fresh\"} 2",
            "flannel_tunnels{state=\"stale\"} 1",
            "flannel_tunnels{state=\"unanswered\"} 1",
            "flannel_tunnels{state=\"unused\"} 1",
            "flannel_tunnel_received_bytes 5",
            "flannel_tunnel_sent_bytes 28",
        ] {
            assert!(text.contains(&format!("\n{line}\n")), "{line} is not in:\n{text}");
        }
        let network = network(Status::default()).await.1;
        let observer = Observer::default();
        let _guard = observer.running(network);
        let text = metrics(&observer.snapshot(), Format::Text);
        assert!(!text.contains("flannel_tunnel"), "there is no encrypted tunnel");
    }

    #[tokio::test]
    async fn packets_of_a_data_plane_are_counted_if_there_is_one() {
        let text = metrics(&full().await.1, Format::Text);
        for line in [
            "packets_total{direction=\"sent\"} 7",
            "bytes_total{direction=\"received\"} 300",
            "dropped_packets_total{reason=\"foreign_node\"} 5",
        ] {
            assert!(text.contains(&format!("\nflannel_data_plane_{line}\n")), "{line}: {text}");
        }
        let observer = Observer::default();
        let _guard = observer.running(network(Status::default()).await.1);
        assert!(!metrics(&observer.snapshot(), Format::Text).contains("flannel_data_plane"));
    }

    #[test]
    fn a_store_that_has_never_answered_is_not_up() {
        let mut snapshot = Observer::default().snapshot();
        let status = |confirmed, last_error: Option<&str>| {
            StoreStatus::new("etcd", StoreKind::Other).with_confirmed(confirmed).with_last_error(
                last_error.map(|error| LastError {
                    text: error.to_owned(),
                    failure: StoreFailure::Other,
                    at: SystemTime::UNIX_EPOCH,
                }),
            )
        };
        let answered = Some(Confirmed { revision: Revision(7), at: SystemTime::UNIX_EPOCH });
        for (store, up) in [
            (status(None, None), 0),
            (status(answered, None), 1),
            (status(answered, Some("gone")), 0),
        ] {
            snapshot.store = Some(store);
            let text = metrics(&snapshot, Format::Text);
            assert!(text.contains(&format!("\nflannel_store_up {up}\n")), "{text}");
        }
    }

    /// Rules of Prometheus that the parser above does not check.
    #[tokio::test]
    async fn every_sample_follows_its_family_and_none_appears_twice() {
        let observer = Observer::default();
        let _guard = observer.running(network(Status::default()).await.1);
        let mut family = String::new();
        let mut seen = std::collections::BTreeSet::new();
        for line in metrics(&observer.snapshot(), Format::Text).lines() {
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
