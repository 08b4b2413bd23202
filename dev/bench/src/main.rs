//! Measures the route engine, the stores and the daemon.
//!
//! Most benches compare their figure with a floor: the time of a raw writer of the same objects in
//! the same run. Machines differ, and other load disturbs a run. So compare ratios, not times.

mod measure;
mod parts;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use flannel_backends::Started;

use crate::measure::lease_storm::Room;
use crate::measure::{
    cni, cold_start, diagnosis, firewall, hostile_lease, idle, kube, kube_heartbeat, lease_event,
    lease_memory, lease_storm, lost_device, memory, one_more, paths, plot, quiet, ready, repair,
    resync, soak, status, udp, wireguard,
};
use crate::parts::cluster::Families;
use crate::parts::report::Report;

/// Measures one property, and prints the figures as a table, or with --json as one JSON object.
#[derive(Debug, Parser)]
#[command(name = "bench", version)]
struct Options {
    #[command(subcommand)]
    bench: Bench,
    /// Print one JSON object on standard output
    #[arg(long, global = true)]
    json: bool,
}

/// The range of counts. The addresses that the benches use suffice for the largest count.
fn count() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=65_000)
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Peers that arrive at once: the time from the update of the lease set to the kernel's last
    /// acknowledgement
    #[command(alias = "arrive")]
    ColdStart {
        /// The number of peers
        #[arg(long, default_value_t = 999, value_parser = count())]
        peers: u32,
        /// The address families of pods
        #[arg(long, value_enum, default_value_t = Families::Ipv4)]
        family: Families,
    },
    /// One new peer among many: the time from the update of the lease set to the kernel's event
    /// about the last object
    OneMore {
        /// The number of peers before
        #[arg(long, default_value_t = 50_000, value_parser = count())]
        peers: u32,
        /// The address families of pods
        #[arg(long, value_enum, default_value_t = Families::Ipv4)]
        family: Families,
        /// The number of peers that arrive one after the other
        #[arg(long, default_value_t = 2000, value_parser = count())]
        samples: u32,
    },
    /// Objects of random peers, deleted or changed by another program: the time until each is
    /// restored
    Repair {
        /// The number of peers
        #[arg(long, default_value_t = 15_000, value_parser = count())]
        peers: u32,
        /// The address families of pods
        #[arg(long, value_enum, default_value_t = Families::Dual)]
        family: Families,
        /// The minimum number of objects of all kinds together
        #[arg(long, default_value_t = 2000, value_parser = count())]
        samples: u32,
    },
    /// The tunnel device, deleted by another program: the time until all peers are in place again,
    /// against a raw writer of the same objects
    LostDevice {
        /// The number of peers
        #[arg(long, default_value_t = 10_000, value_parser = count())]
        peers: u32,
        /// The address families of pods
        #[arg(long, value_enum, default_value_t = Families::Ipv4)]
        family: Families,
    },
    /// WireGuard peers that arrive at once: the time, messages and bytes, against a bare writer. On
    /// a kernel without WireGuard it runs in a guest, which FLANNEL_QEMU names (CONTRIBUTING)
    Wireguard {
        /// The number of peers
        #[arg(long, default_value_t = 5000, value_parser = count())]
        peers: u32,
    },
    /// The backend udp between two pods: its throughput against the kernel's vxlan, also
    /// beside a flood, its memory, its wake-ups, and its return after a kill. The kernel's path is
    /// measured in a guest, which FLANNEL_QEMU names (CONTRIBUTING)
    Udp {
        /// A flanneld of Go with cgo, to compare with; it needs etcd and etcdctl
        #[arg(long)]
        go: Option<PathBuf>,
        /// The duration of each measurement, in seconds
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=60))]
        seconds: u64,
    },
    /// vxlan between two pods with the guard of its tunnel, against vxlan without it: one stream
    /// and 64-byte packets; and the time in which the kernel takes the pairs of the guard
    Guard {
        /// The number of pairs
        #[arg(long, default_value_t = 65_000, value_parser = count())]
        peers: u32,
        /// The duration of each measurement, in seconds
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=60))]
        seconds: u64,
    },
    /// A snapshot of the kernel and its comparison: the time, against a bare dump of the same
    /// tables
    Resync {
        /// The number of peers
        #[arg(long, default_value_t = 30_000, value_parser = count())]
        peers: u32,
        /// The address families of pods
        #[arg(long, value_enum, default_value_t = Families::Ipv4)]
        family: Families,
    },
    /// The resident memory of a daemon, 5 s after the objects of all its peers are in place
    Memory {
        /// The number of peers
        #[arg(long, default_value_t = 5000, value_parser = count())]
        peers: u32,
        /// The address families of pods
        #[arg(long, value_enum, default_value_t = Families::Ipv4)]
        family: Families,
        /// The program flanneld [default: built here with the profile dist]
        #[arg(long)]
        flanneld: Option<PathBuf>,
    },
    /// An idle daemon with peers: the context switches of all its threads
    Idle {
        /// The number of peers
        #[arg(long, default_value_t = 1000, value_parser = count())]
        peers: u32,
        /// The address families of pods
        #[arg(long, value_enum, default_value_t = Families::Dual)]
        family: Families,
        /// The duration, in seconds
        #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
        seconds: u64,
        /// The program flanneld [default: built here with the profile dist]
        #[arg(long)]
        flanneld: Option<PathBuf>,
    },
    /// The probes of paths, with peers that all answer: the processor time and the memory that they
    /// add to a daemon
    Paths {
        /// The number of peers
        #[arg(long, default_value_t = 5000, value_parser = count())]
        peers: u32,
        /// The duration, in seconds
        #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
        seconds: u64,
        /// The program flanneld [default: built here with the profile dist]
        #[arg(long)]
        flanneld: Option<PathBuf>,
    },
    /// Ten faults in a cluster of the lab, one after the other: the time in which the doctor names
    /// each
    Diagnosis {
        /// The address families of pods
        #[arg(long, value_enum, default_value_t = Families::Dual)]
        family: Families,
    },
    /// Rules in iptables that another program deletes: the time until they are restored
    Firewall {
        /// The number of deletions in each variant of iptables
        #[arg(long, default_value_t = 60, value_parser = count())]
        samples: u32,
    },
    /// The time from a daemon's start until /readyz answers 200, with an etcd on the same host
    Ready {
        /// The number of peers
        #[arg(long, default_value_t = 1000, value_parser = count())]
        peers: u32,
        /// The address families of pods
        #[arg(long, value_enum, default_value_t = Families::Dual)]
        family: Families,
        /// The program flanneld [default: built here with the profile dist]
        #[arg(long)]
        flanneld: Option<PathBuf>,
    },
    /// The time in which a daemon with many peers answers a request for its status
    Status {
        /// The number of peers
        #[arg(long, default_value_t = 10_000, value_parser = count())]
        peers: u32,
        /// The address families of pods
        #[arg(long, value_enum, default_value_t = Families::Dual)]
        family: Families,
        /// The number of requests
        #[arg(long, default_value_t = 200, value_parser = count())]
        samples: u32,
        /// The program flanneld [default: built here with the profile dist]
        #[arg(long)]
        flanneld: Option<PathBuf>,
    },
    /// One hostile lease among many others: what its changes cost a daemon, and the routes to the
    /// others
    HostileLease {
        /// The number of peers
        #[arg(long, default_value_t = 1000, value_parser = count())]
        peers: u32,
        /// The program flanneld [default: the daemon in this program]
        #[arg(long)]
        flanneld: Option<PathBuf>,
    },
    /// Draws the times of cold-start against the number of peers, from JSON lines of cold-start on
    /// standard input, as an SVG
    Plot {
        /// The address families of the figures
        #[arg(long, value_enum, default_value_t = Families::Ipv4)]
        family: Families,
        /// The file to write
        #[arg(long, default_value = "docs/cold-start.svg")]
        out: PathBuf,
    },
    /// Nodes that acquire leases from one etcd at once: the time, the requests, the failures
    LeaseStorm {
        /// The number of nodes
        #[arg(long, default_value_t = 1000, value_parser = count())]
        nodes: u32,
        /// The number of free subnets
        #[arg(long, value_enum, default_value_t = Room::Sparse)]
        network: Room,
    },
    /// The memory of the set of all leases
    LeaseMemory {
        /// The number of leases
        #[arg(long, default_value_t = 10_000, value_parser = count())]
        leases: u32,
    },
    /// Holds the leases for lease-memory
    #[command(hide = true)]
    HoldLeases {
        #[arg(long)]
        endpoint: String,
        #[arg(long)]
        leases: u32,
    },
    /// The time from a put in etcd to the set of leases, against a plain watch of etcd
    LeaseEvent {
        /// The number of puts
        #[arg(long, default_value_t = 2000, value_parser = count())]
        events: u32,
    },
    /// The resident memory of a daemon with leases as Kubernetes nodes of 20 KB, 5 s after the
    /// objects of all its peers are in place
    KubeMemory {
        /// The number of nodes
        #[arg(long, default_value_t = 10_000, value_parser = count())]
        nodes: u32,
        /// The program flanneld [default: built here with the profile dist]
        #[arg(long)]
        flanneld: Option<PathBuf>,
    },
    /// The time from a changed node in the API server to the set of leases
    KubeEvent {
        /// The number of nodes
        #[arg(long, default_value_t = 10_000, value_parser = count())]
        nodes: u32,
        /// The number of changes
        #[arg(long, default_value_t = 2000, value_parser = count())]
        events: u32,
    },
    /// The processor time for 1,000 heartbeats of nodes per second, against skipping their bytes
    KubeHeartbeat {
        /// The number of nodes
        #[arg(long, default_value_t = 10_000, value_parser = count())]
        nodes: u32,
        /// The duration of each of the five rounds, in seconds
        #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=600))]
        seconds: u64,
    },
    /// The times of the CNI plugin: its start, and an ADD against a call of its delegate alone
    Cni {
        /// The plugin, built with the profile dist
        #[arg(long)]
        plugin: PathBuf,
        /// The number of calls of each kind
        #[arg(long, default_value_t = 300, value_parser = count())]
        calls: u32,
    },
    /// Random faults on two clusters of the lab, vxlan on etcd and host-gw on a directory, while
    /// packets flow: no packet may be lost where nothing is broken, all is repaired, nothing grows
    Soak {
        /// The number of hosts of both clusters together
        #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(4..=40))]
        hosts: u32,
        /// The duration, in minutes
        #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=1440))]
        minutes: u64,
        /// Determines the faults [default: from the clock]
        #[arg(long)]
        seed: Option<u64>,
    },
    /// A large cluster of the lab in which nothing happens: the doctor finds nothing, nothing is
    /// logged, nothing grows
    Quiet {
        /// The number of hosts
        #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(2..=250))]
        hosts: u32,
        /// The duration after a warm-up of five minutes, in minutes
        #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=1440))]
        minutes: u64,
        /// The address families of pods
        #[arg(long, value_enum, default_value_t = Families::Ipv4)]
        family: Families,
    },
}

fn main() -> anyhow::Result<ExitCode> {
    let this = match flannel_backends::run_if_started() {
        Started::DataPlane(ended) => return Ok(ended),
        Started::Other(program) => program,
    };
    let daemon = |args| flanneld::main_with(args, flannel_backends::all_in(this));
    let args: Vec<OsString> = std::env::args_os().collect();
    match args.get(1).and_then(|first| first.to_str()) {
        // The lab of a long check starts its daemons by this program, and asks the doctor by it.
        Some("daemon") => {
            flannel_lab::end_with_lab()?;
            return Ok(daemon(args.into_iter().skip(1)));
        }
        // A bench ends the daemon that it has started.
        Some("flanneld") => return Ok(daemon(args.into_iter().skip(1))),
        Some("ctl") => {
            return Ok(flannelctl::run(args.into_iter().skip(1), &flannel_backends::all()));
        }
        _ => {}
    }
    let matches = Options::command().get_matches();
    let Options { bench, json } = Options::from_arg_matches(&matches)?;
    if let Bench::HoldLeases { endpoint, leases } = bench {
        lease_memory::hold(&endpoint, leases)?;
        return Ok(ExitCode::SUCCESS);
    }
    // An error is part of the report. The message of a panic is on standard error.
    let outcome = std::panic::catch_unwind(|| run(bench));
    let outcome = outcome.unwrap_or_else(|_| Err(anyhow::anyhow!("it panicked")));
    let mut report = outcome
        .unwrap_or_else(|error| Report { wrong: vec![format!("{error:#}")], ..Report::default() });
    report.bench = matches.subcommand_name().unwrap_or_default().to_owned();
    Ok(ExitCode::from(u8::from(!report.print(json)?)))
}

fn run(bench: Bench) -> anyhow::Result<Report> {
    match bench {
        Bench::ColdStart { peers, family } => cold_start::run(peers, family),
        Bench::OneMore { peers, family, samples } => one_more::run(peers, family, samples),
        Bench::Repair { peers, family, samples } => repair::run(peers, family, samples as usize),
        Bench::LostDevice { peers, family } => lost_device::run(peers, family),
        Bench::Udp { go, seconds } => udp::run(seconds, go),
        Bench::Guard { peers, seconds } => udp::guard::run(peers, seconds),
        Bench::Wireguard { peers } => wireguard::run(peers),
        Bench::Resync { peers, family } => resync::run(peers, family),
        Bench::Memory { peers, family, flanneld } => memory::run(peers, family, flanneld),
        Bench::Idle { peers, family, seconds, flanneld } => {
            idle::run(peers, family, seconds, flanneld)
        }
        Bench::Diagnosis { family } => diagnosis::run(family),
        Bench::Firewall { samples } => firewall::run(samples),
        Bench::Paths { peers, seconds, flanneld } => paths::run(peers, seconds, flanneld),
        Bench::Ready { peers, family, flanneld } => ready::run(peers, family, flanneld),
        Bench::Status { peers, family, samples, flanneld } => {
            status::run(peers, family, samples, flanneld)
        }
        Bench::HostileLease { peers, flanneld } => hostile_lease::run(peers, flanneld),
        Bench::Plot { family, out } => plot::run(family.name(), &out),
        Bench::LeaseStorm { nodes, network } => lease_storm::run(nodes, network),
        Bench::LeaseMemory { leases } => lease_memory::run(leases),
        Bench::HoldLeases { .. } => anyhow::bail!("hold-leases is part of lease-memory"),
        Bench::LeaseEvent { events } => lease_event::run(events),
        Bench::KubeMemory { nodes, flanneld } => kube::memory(nodes, flanneld),
        Bench::KubeEvent { nodes, events } => kube::event(nodes, events),
        Bench::KubeHeartbeat { nodes, seconds } => kube_heartbeat::run(nodes, seconds),
        Bench::Cni { plugin, calls } => cni::run(&plugin, calls),
        Bench::Soak { hosts, minutes, seed } => soak::run(hosts as usize, minutes, seed),
        Bench::Quiet { hosts, minutes, family } => quiet::run(hosts as usize, minutes, family),
    }
}
