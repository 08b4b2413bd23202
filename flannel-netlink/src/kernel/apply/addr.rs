//! Steps for addresses.

use std::collections::hash_map::Entry;

use flannel_core::kernel::KernelError;
use flannel_core::object::Addr;

use super::{Steps, Writer};
use crate::codec::addr;
use crate::codec::addr::AddrMessage;

impl Steps for Addr {
    /// Adds the address, and deletes entries for the same address that have another prefix length,
    /// other end or scope.
    ///
    /// When the last IPv4 address of a link is deleted, the kernel deletes the IPv4 routes on the
    /// link (`fib_disable_ip`). So another IPv4 entry is deleted after the put. Some entries must
    /// be deleted before the put, because the kernel would keep their values: an IPv6 address with
    /// another prefix length, and an IPv4 address that differs only in the scope. In the IPv4 case
    /// a temporary entry, with another prefix length, keeps the routes until the put. An IPv4
    /// address with a peer is another entry only if the prefix is /32, as it is for flannel's
    /// addresses (`find_matching_ifa`).
    fn put(&self, writer: &mut Writer<'_>, n: usize, index: u32) -> Result<(), KernelError> {
        let there = writer.addrs_on(index)?;
        let is_other = |a: &AddrMessage| {
            let is_same = a.len == self.len && a.far.is_none() && a.is_universal();
            a.index == index && a.address == self.address && !is_same
        };
        let others: Vec<AddrMessage> = there.iter().copied().filter(is_other).collect();
        // A later put of the address in the same call must see the result of this put.
        there.retain(|a| a.address != self.address);
        there.push(AddrMessage::of(self, index));
        // Entries that the kernel considers the same as the new one. A put keeps their prefix
        // length (IPv6) or their scope (IPv4).
        let stays =
            |a: &&AddrMessage| a.address.is_ipv6() || (a.len == self.len && a.far.is_none());
        let (before, after): (Vec<&AddrMessage>, Vec<_>) = others.iter().partition(stays);
        let last = before.iter().any(|a| a.address.is_ipv4());
        let step = last.then(|| Self { len: self.len.saturating_sub(1), ..*self });
        if let Some(step) = &step {
            addr::put_step(writer.batch.put(n), step, index);
        }
        for old in before {
            addr::delete(writer.batch.delete(n), old);
        }
        addr::put(writer.batch.put(n), self, index);
        let step = step.map(|step| AddrMessage::of(&step, index));
        for old in after.into_iter().chain(&step) {
            addr::delete(writer.batch.delete(n), old);
        }
        Ok(())
    }

    /// Deletes all entries with this address and prefix length, whatever their other end and scope
    /// are.
    fn delete(&self, writer: &mut Writer<'_>, n: usize, index: u32) -> Result<(), KernelError> {
        let there = writer.addrs_on(index)?;
        let is_it =
            |a: &AddrMessage| (a.index, a.address, a.len) == (index, self.address, self.len);
        let gone: Vec<AddrMessage> = there.extract_if(.., |a| is_it(a)).collect();
        for found in &gone {
            addr::delete(writer.batch.delete(n), found);
        }
        Ok(())
    }
}

impl Writer<'_> {
    /// The addresses on a link. The kernel is read once per call of `apply`.
    fn addrs_on(&mut self, index: u32) -> Result<&mut Vec<AddrMessage>, KernelError> {
        Ok(match self.known.addrs.entry(index) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => {
                unknown.insert(self.socket.dump(addr::on(index), addr::read)?)
            }
        })
    }
}
