//! Probes the path to each peer of a flannel network, and keeps the latest result.
//!
//! - Each path is probed about once in an interval, 5 minutes by default. With few paths, each is
//!   probed more often, at a rate of up to four probes a second in all. No path is probed twice
//!   within a second. Paths that are new or have lost echoes get further probes, at most at the
//!   same rate. So the cost on a node is bounded, whatever the number of peers.
//! - A probe is three ICMP echoes: a small one and one of full size to the tunnel address, and a
//!   small one to the public address. While the route has a lower MTU, there is one of that size
//!   too. The kernel of the peer answers, so a Go node is probed too. A peer without a tunnel gets
//!   a small echo and one of full size at its public address.
//! - A path that lost an echo is probed again at once. It fails after three probes with a loss.
//!   Then the [path probe](crate::path_probe) finds the direction, and the size that passes.
//! - A peer that has never answered anything is `unknown`, not failing.
//! - If only packets of full size are lost, `Paths::mtus` has the MTU for the route to the peer,
//!   until three probes of full size pass. Echoes ignore the MTU of the route.
//!
//! | item | purpose |
//! |---|---|
//! | `probe` | probes the peers of a network until it is dropped |
//! | `Paths` | the latest results, for a status, a list, metrics, and the MTUs of routes |
//!
//! The crate needs a tokio runtime, Linux, and `CAP_NET_RAW`. Without that capability the summary
//! has the reason.

mod agenda;
mod change_log;
mod flights;
mod pinger;
mod prober;
mod record;
mod results;
mod verdict;

pub use prober::{ProbeSettings, probe};
pub use results::Paths;
