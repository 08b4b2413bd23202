//! How fast the engines are, each measured against a floor in the same run: a raw writer of the same objects.
//!
//! Machines differ and are noisy; the ratio is what to look at.

mod arrive;
mod cluster;
mod etcd;
mod floor;
mod ground;
mod lease_event;
mod lease_memory;
mod lease_storm;
mod report;
mod witness;

use clap::{Parser, Subcommand};

use crate::cluster::Families;
use crate::lease_storm::Room;

/// Measures one thing and prints it as a table, or with --json as one JSON object.
#[derive(Debug, Parser)]
#[command(name = "bench", version)]
struct Options {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Peers that arrive all at once: from the lease set's update to the kernel's last acknowledgement
    Arrive {
        /// How many peers
        #[arg(long, default_value_t = 999, value_parser = clap::value_parser!(u32).range(1..=65_000))]
        peers: u32,
        /// Which address families the pods have
        #[arg(long, value_enum, default_value_t = Families::Dual)]
        family: Families,
        /// One JSON object on standard output, and nothing else there
        #[arg(long)]
        json: bool,
    },
    /// Nodes that ask one etcd for a lease at once: how long, at how many requests, and whether all get one
    LeaseStorm {
        /// How many nodes
        #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=60_000))]
        nodes: u32,
        /// How much room there is
        #[arg(long, value_enum, default_value_t = Room::Sparse)]
        network: Room,
        /// One JSON object on standard output, and nothing else there
        #[arg(long)]
        json: bool,
    },
    /// What the set of all leases costs in memory
    LeaseMemory {
        /// How many leases
        #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=60_000))]
        leases: u32,
        /// One JSON object on standard output, and nothing else there
        #[arg(long)]
        json: bool,
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
        #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=60_000))]
        events: u32,
        /// One JSON object on standard output, and nothing else there
        #[arg(long)]
        json: bool,
    },
}

fn main() -> anyhow::Result<std::process::ExitCode> {
    let Options { bench } = Options::parse();
    let ok = match bench {
        Bench::Arrive { peers, family, json } => {
            let report = arrive::run(peers, family)?;
            report.print(json)?;
            report.ok
        }
        Bench::LeaseStorm { nodes, network, json } => {
            let report = lease_storm::run(nodes, network)?;
            report.print(json)?;
            report.ok
        }
        Bench::LeaseMemory { leases, json } => {
            let report = lease_memory::run(leases)?;
            report.print(json)?;
            report.ok
        }
        Bench::HoldLeases { endpoint, leases } => {
            lease_memory::hold(&endpoint, leases)?;
            true
        }
        Bench::LeaseEvent { events, json } => {
            let report = lease_event::run(events)?;
            report.print(json)?;
            report.ok
        }
    };
    Ok(std::process::ExitCode::from(u8::from(!ok)))
}
