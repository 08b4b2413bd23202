//! Measures the engines, each against a floor in the same run: a raw writer of the same objects.
//!
//! Machines differ and are noisy. Compare the ratios.

mod measure;
mod parts;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::measure::lease_storm::Room;
use crate::measure::{
    cni, cold_start, idle, kube, kube_heartbeat, lease_event, lease_memory, lease_storm,
    lost_device, memory, one_more, plot, ready, repair, resync, status,
};
use crate::parts::cluster::Families;
use crate::parts::report::Report;

/// Measures one thing and prints it as a table, or with --json as one JSON object.
#[derive(Debug, Parser)]
#[command(name = "bench", version)]
struct Options {
    #[command(subcommand)]
    bench: Bench,
    /// One JSON object on standard output, and nothing else there
    #[arg(long, global = true)]
    json: bool,
}

/// As many as fit into the addresses that the benches give out.
fn count() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=65_000)
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Peers that arrive all at once: from the lease set's update to the kernel's last
    /// acknowledgement
    #[command(alias = "arrive")]
    ColdStart {
        /// How many peers
        #[arg(long, default_value_t = 999, value_parser = count())]
        peers: u32,
        /// Which address families the pods have
        #[arg(long, value_enum, default_value_t = Families::Ipv4)]
        family: Families,
    },
    /// One new peer among many: from the lease set's update until the last of its objects is heard
    /// of
    OneMore {
        /// How many peers there are before
        #[arg(long, default_value_t = 50_000, value_parser = count())]
        peers: u32,
        /// Which address families the pods have
        #[arg(long, value_enum, default_value_t = Families::Ipv4)]
        family: Families,
        /// How many peers come one after the other
        #[arg(long, default_value_t = 2000, value_parser = count())]
        samples: u32,
    },
    /// Objects of random peers deleted or changed by somebody else: how long until each is as it
    /// was
    Repair {
        /// How many peers
        #[arg(long, default_value_t = 15_000, value_parser = count())]
        peers: u32,
        /// Which address families the pods have
        #[arg(long, value_enum, default_value_t = Families::Dual)]
        family: Families,
        /// How many objects at least, of all kinds together
        #[arg(long, default_value_t = 2000, value_parser = count())]
        samples: u32,
    },
    /// The tunnel device deleted by another program: until all peers are in place again, against the
    /// raw writer of the same objects
    LostDevice {
        /// How many peers
        #[arg(long, default_value_t = 10_000, value_parser = count())]
        peers: u32,
        /// Which address families the pods have
        #[arg(long, value_enum, default_value_t = Families::Ipv4)]
        family: Families,
    },
    /// Everything read from the kernel and compared, against a bare dump of the same tables
    Resync {
        /// How many peers
        #[arg(long, default_value_t = 30_000, value_parser = count())]
        peers: u32,
        /// Which address families the pods have
        #[arg(long, value_enum, default_value_t = Families::Ipv4)]
        family: Families,
    },
    /// Resident memory of a daemon, 5 s after the objects of all its peers are in place
    Memory {
        /// How many peers
        #[arg(long, default_value_t = 5000, value_parser = count())]
        peers: u32,
        /// Which address families the pods have
        #[arg(long, value_enum, default_value_t = Families::Ipv4)]
        family: Families,
        /// The daemon's program [default: what cargo builds of this workspace with profile dist]
        #[arg(long)]
        flanneld: Option<PathBuf>,
    },
    /// How often a daemon with peers wakes up while nothing happens: context switches of all its
    /// threads
    Idle {
        /// How many peers
        #[arg(long, default_value_t = 1000, value_parser = count())]
        peers: u32,
        /// Which address families the pods have
        #[arg(long, value_enum, default_value_t = Families::Dual)]
        family: Families,
        /// For how long it is watched
        #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
        seconds: u64,
        /// The daemon's program [default: what cargo builds of this workspace with profile dist]
        #[arg(long)]
        flanneld: Option<PathBuf>,
    },
    /// From a daemon's start until it says that it is ready, with an etcd on the same host
    Ready {
        /// How many peers
        #[arg(long, default_value_t = 1000, value_parser = count())]
        peers: u32,
        /// Which address families the pods have
        #[arg(long, value_enum, default_value_t = Families::Dual)]
        family: Families,
        /// The daemon's program [default: what cargo builds of this workspace with profile dist]
        #[arg(long)]
        flanneld: Option<PathBuf>,
    },
    /// How long a daemon with many peers takes to say how things stand
    Status {
        /// How many peers
        #[arg(long, default_value_t = 10_000, value_parser = count())]
        peers: u32,
        /// Which address families the pods have
        #[arg(long, value_enum, default_value_t = Families::Dual)]
        family: Families,
        /// How often it is asked
        #[arg(long, default_value_t = 200, value_parser = count())]
        samples: u32,
        /// The daemon's program [default: what cargo builds of this workspace with profile dist]
        #[arg(long)]
        flanneld: Option<PathBuf>,
    },
    /// Draws the growth of cold-start: JSON lines of cold-start on standard input, an SVG as the
    /// outcome
    Plot {
        /// Whose figures
        #[arg(long, value_enum, default_value_t = Families::Ipv4)]
        family: Families,
        /// The file to write
        #[arg(long, default_value = "docs/cold-start.svg")]
        out: PathBuf,
    },
    /// Nodes that ask one etcd for a lease at once: how long, at how many requests, and whether all
    /// get one
    LeaseStorm {
        /// How many nodes
        #[arg(long, default_value_t = 1000, value_parser = count())]
        nodes: u32,
        /// How much room there is
        #[arg(long, value_enum, default_value_t = Room::Sparse)]
        network: Room,
    },
    /// What the set of all leases costs in memory
    LeaseMemory {
        /// How many leases
        #[arg(long, default_value_t = 10_000, value_parser = count())]
        leases: u32,
    },
    /// The process that holds the leases for lease-memory
    #[command(hide = true)]
    HoldLeases {
        #[arg(long)]
        endpoint: String,
        #[arg(long)]
        leases: u32,
    },
    /// From a put in etcd to the set of leases, against a plain watch of etcd
    LeaseEvent {
        /// How many puts
        #[arg(long, default_value_t = 2000, value_parser = count())]
        events: u32,
    },
    /// Resident memory of a daemon, 5 s after the objects of all its peers are in place, with
    /// leases as nodes of 20 KB
    KubeMemory {
        /// How many nodes
        #[arg(long, default_value_t = 10_000, value_parser = count())]
        nodes: u32,
        /// The daemon's program [default: what cargo builds of this workspace with profile dist]
        #[arg(long)]
        flanneld: Option<PathBuf>,
    },
    /// From a changed node in the API server to the set of leases
    KubeEvent {
        /// How many nodes there are
        #[arg(long, default_value_t = 10_000, value_parser = count())]
        nodes: u32,
        /// How many changes
        #[arg(long, default_value_t = 2000, value_parser = count())]
        events: u32,
    },
    /// What 1,000 heartbeats of nodes per second cost, against skipping their bytes
    KubeHeartbeat {
        /// How many nodes there are
        #[arg(long, default_value_t = 10_000, value_parser = count())]
        nodes: u32,
        /// For how long each of the five rounds
        #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=600))]
        seconds: u64,
    },
    /// What the CNI plugin costs a pod: its start, and an ADD against a call of its delegate alone
    Cni {
        /// The plugin, as built with the profile `cni`
        #[arg(long)]
        plugin: PathBuf,
        /// How many calls of each kind
        #[arg(long, default_value_t = 300, value_parser = count())]
        calls: u32,
    },
}

fn main() -> anyhow::Result<ExitCode> {
    let matches = Options::command().get_matches();
    let Options { bench, json } = Options::from_arg_matches(&matches)?;
    if let Bench::HoldLeases { endpoint, leases } = bench {
        lease_memory::hold(&endpoint, leases)?;
        return Ok(ExitCode::SUCCESS);
    }
    // One that could not be finished tells why in the same way; of one that panics standard error
    // has it.
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
        Bench::Resync { peers, family } => resync::run(peers, family),
        Bench::Memory { peers, family, flanneld } => memory::run(peers, family, flanneld),
        Bench::Idle { peers, family, seconds, flanneld } => {
            idle::run(peers, family, seconds, flanneld)
        }
        Bench::Ready { peers, family, flanneld } => ready::run(peers, family, flanneld),
        Bench::Status { peers, family, samples, flanneld } => {
            status::run(peers, family, samples, flanneld)
        }
        Bench::Plot { family, out } => plot::run(family.name(), &out),
        Bench::LeaseStorm { nodes, network } => lease_storm::run(nodes, network),
        Bench::LeaseMemory { leases } => lease_memory::run(leases),
        Bench::HoldLeases { .. } => anyhow::bail!("holds leases for another bench"),
        Bench::LeaseEvent { events } => lease_event::run(events),
        Bench::KubeMemory { nodes, flanneld } => kube::memory(nodes, flanneld),
        Bench::KubeEvent { nodes, events } => kube::event(nodes, events),
        Bench::KubeHeartbeat { nodes, seconds } => kube_heartbeat::run(nodes, seconds),
        Bench::Cni { plugin, calls } => cni::run(&plugin, calls),
    }
}
