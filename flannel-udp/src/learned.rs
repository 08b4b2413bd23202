//! Nodes behind NAT: the addresses from which they send, if their leases have other ones.
//!
//! Datagrams have no signature, so a source address alone proves nothing. A node proves an address
//! by an echo: a request with a random number goes to the public address of its lease, and the
//! kernel of the node answers, Go flannel's too. Only a program that sees packets to the node can
//! know the number, and such a program could send from the public address as well. So nobody can
//! make another address count as the address of a node, and nothing is ever sent to a learned one.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::rand::{GetRandomFlags, getrandom};

use crate::control::Prefix;
use crate::table::{Peer, Table};

/// The shortest time between two requests to a node.
const GAP: Duration = Duration::from_secs(2);
/// The age of a proof after which another one is requested.
const RENEWAL: Duration = Duration::from_secs(60);
/// The age of a proof after which it counts no more.
const LIFETIME: Duration = Duration::from_secs(180);

/// What is known of a source address that is not the public one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// The node has proved that it sends from there.
    Learned,
    Foreign,
    /// This packet is the proof.
    Proof,
}

#[derive(Debug)]
struct Entry {
    /// The public address, to which requests are sent.
    public: SocketAddr,
    /// The last request, until it is answered.
    request: Option<ProofRequest>,
    proved: Option<Proof>,
}

/// A request to prove an address.
#[derive(Debug, Clone, Copy)]
struct ProofRequest {
    number: u64,
    at: Instant,
}

/// The address that a node has proved, and when.
#[derive(Debug, Clone, Copy)]
struct Proof {
    address: IpAddr,
    at: Instant,
}

/// The result of [`Learned::check`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Checked {
    pub(crate) source: Source,
    /// The number of a request that is to be sent to the node.
    pub(crate) request: Option<u64>,
}

/// The addresses of nodes by the subnets of their pods.
#[derive(Debug, Default)]
pub(crate) struct Learned(Mutex<HashMap<Prefix, Entry>>);

impl Learned {
    /// Addresses that another process has learned.
    pub(crate) fn new(learned: &BTreeMap<Prefix, IpAddr>, table: &Table) -> Self {
        let at = Instant::now();
        let mut entries = HashMap::new();
        for (subnet, address) in learned {
            if let Some(peer) = table.get(subnet.address) {
                let proved = Some(Proof { address: *address, at });
                entries.insert(*subnet, Entry { public: peer.address, request: None, proved });
            }
        }
        Self(Mutex::new(entries))
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<Prefix, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides about a packet of a peer that comes from another address than the public one.
    /// `answer` is the number in the packet, if it is an echo.
    pub(crate) fn check(
        &self,
        peer: &Peer,
        from: IpAddr,
        answer: Option<u64>,
        now: Instant,
    ) -> Checked {
        let mut entries = self.entries();
        let subnet = Prefix { address: peer.subnet, len: peer.len };
        let new = || Entry { public: peer.address, request: None, proved: None };
        let entry = entries.entry(subnet).or_insert_with(new);
        if entry.public != peer.address {
            *entry = new();
        }
        if answer.is_some() && answer == entry.request.map(|request| request.number) {
            entry.request = None;
            entry.proved = Some(Proof { address: from, at: now });
            return Checked { source: Source::Proof, request: None };
        }
        let proof = entry.proved.filter(|proof| proof.address == from);
        let age = proof.map(|proof| now - proof.at);
        let source = match age {
            Some(age) if age < LIFETIME => Source::Learned,
            _ => Source::Foreign,
        };
        let is_young = age.is_some_and(|age| age < RENEWAL);
        if is_young || entry.request.is_some_and(|request| now - request.at < GAP) {
            return Checked { source, request: None };
        }
        let mut random = [0; 8];
        // A system without random numbers learns no address.
        let number = match getrandom(&mut random, GetRandomFlags::empty()) {
            Ok(8) => Some(u64::from_ne_bytes(random)),
            _ => None,
        };
        entry.request = number.map(|number| ProofRequest { number, at: now });
        Checked { source, request: number }
    }

    /// Forgets nodes that are not peers any more.
    pub(crate) fn retain(&self, table: &Table) {
        self.entries().retain(|subnet, entry| {
            table.get(subnet.address).is_some_and(|peer| peer.address == entry.public)
        });
    }

    /// The addresses that count now.
    pub(crate) fn list(&self) -> BTreeMap<Prefix, IpAddr> {
        self.entries()
            .iter()
            .filter_map(|(subnet, entry)| {
                let proof = entry.proved.filter(|proof| proof.at.elapsed() < LIFETIME)?;
                Some((*subnet, proof.address))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(n: u8) -> Peer {
        Peer { subnet: [10, 1, n, 0].into(), len: 24, address: ([192, 0, 2, n], 8285).into() }
    }

    fn host(n: u8) -> IpAddr {
        [203, 0, 113, n].into()
    }

    #[test]
    fn only_the_number_of_the_last_request_to_the_peer_is_a_proof() {
        let learned = Learned::default();
        let now = Instant::now();
        let check = |n, from, answer| {
            let checked = learned.check(&peer(n), host(from), answer, now);
            (checked.source, checked.request)
        };
        let (source, number) = check(7, 1, None);
        let number = number.unwrap();
        assert_eq!(source, Source::Foreign);
        // One request at a time: many packets do not cause many.
        assert_eq!(check(7, 2, None), (Source::Foreign, None));
        assert_eq!(check(7, 2, Some(number ^ 1)), (Source::Foreign, None));
        let (_, of_other) = check(8, 2, None);
        assert_eq!(check(7, 2, of_other), (Source::Foreign, None));
        assert_eq!(check(8, 2, Some(number)).0, Source::Foreign);
        assert_eq!(check(7, 1, Some(number)), (Source::Proof, None));
        assert_eq!(check(7, 1, None), (Source::Learned, None));
        // A number counts once, and the proof only for its sender.
        assert_eq!(check(7, 2, Some(number)).0, Source::Foreign);
        assert_eq!(check(7, 2, None).0, Source::Foreign);
        assert_eq!(check(8, 1, None).0, Source::Foreign);
        assert_eq!(learned.list().into_values().collect::<Vec<_>>(), [host(1)]);
    }

    #[test]
    fn a_proof_is_renewed_and_ends() {
        let learned = Learned::default();
        let start = Instant::now();
        let check = |from, answer, seconds| {
            let at = start + Duration::from_secs(seconds);
            let checked = learned.check(&peer(7), host(from), answer, at);
            (checked.source, checked.request)
        };
        let (_, lost) = check(1, None, 0);
        assert_eq!(check(1, None, 1), (Source::Foreign, None));
        let (_, number) = check(1, None, 2);
        assert!(number.is_some() && number != lost);
        assert_eq!(check(1, lost, 3).0, Source::Foreign, "of an old request");
        let (_, number) = check(1, None, 5);
        assert_eq!(check(1, number, 6).0, Source::Proof);
        assert_eq!(check(1, None, 65), (Source::Learned, None));
        let (source, number) = check(1, None, 66);
        assert_eq!(source, Source::Learned, "while the next one is requested");
        assert_eq!(check(1, number, 67).0, Source::Proof);
        assert_eq!(check(1, None, 246).0, Source::Learned);
        assert_eq!(check(1, None, 247).0, Source::Foreign);
        // The NAT has another address now.
        let (_, number) = check(2, None, 250);
        assert_eq!(check(2, number, 251).0, Source::Proof);
        assert_eq!(check(2, None, 252).0, Source::Learned);
        assert_eq!(check(1, None, 252).0, Source::Foreign);
    }

    #[test]
    fn what_was_learned_belongs_to_the_lease() {
        let learned = Learned::default();
        let now = Instant::now();
        let check = |peer: &Peer, answer| learned.check(peer, host(1), answer, now);
        let number = check(&peer(7), None).request;
        assert_eq!(check(&peer(7), number).source, Source::Proof);
        // Another process goes on with it.
        let table = Table::new(vec![peer(7)]);
        let next = Learned::new(&learned.list(), &table);
        assert_eq!(next.check(&peer(7), host(1), None, now).source, Source::Learned);
        next.retain(&table);
        assert_eq!(next.list(), learned.list());
        next.retain(&Table::default());
        assert!(next.list().is_empty());
        assert!(Learned::new(&learned.list(), &Table::default()).list().is_empty());
        let moved = Peer { address: ([192, 0, 2, 99], 8285).into(), ..peer(7) };
        assert_eq!(check(&moved, None).source, Source::Foreign);
        assert_eq!(check(&peer(7), None).source, Source::Foreign, "also when it is back");
    }
}
