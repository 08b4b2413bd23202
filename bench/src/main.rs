//! How fast the engines are, each measured against a floor in the same run: a raw writer of the same objects.
//!
//! Machines differ and are noisy; the ratio is what to look at.

mod arrive;
mod cluster;
mod floor;
mod ground;
mod report;
mod witness;

use clap::{Parser, Subcommand};

use crate::cluster::Families;

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
}

fn main() -> anyhow::Result<std::process::ExitCode> {
    let Options { bench } = Options::parse();
    let (report, json) = match bench {
        Bench::Arrive { peers, family, json } => (arrive::run(peers, family)?, json),
    };
    report.print(json)?;
    Ok(std::process::ExitCode::from(u8::from(!report.ok)))
}
