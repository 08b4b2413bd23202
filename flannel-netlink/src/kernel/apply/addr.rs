//! Steps for addresses.

use std::collections::hash_map::Entry;
use std::fs;
use std::path::Path;

use flannel_core::kernel::KernelError;
use flannel_core::object::{Addr, LinkName};

use super::{Steps, Writer};
use crate::codec::addr;
use crate::codec::addr::AddrMessage;

/// The directories of the IPv6 settings of each link.
const IPV6_SETTINGS: &str = "/proc/sys/net/ipv6/conf";

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
    ///
    /// An IPv6 address needs a link on which IPv6 is on.
    fn put(&self, writer: &mut Writer<'_>, n: usize, index: u32) -> Result<(), KernelError> {
        if self.address.is_ipv6() {
            writer.namespace.run(|| allow_ipv6(Path::new(IPV6_SETTINGS), self.link))??;
        }
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

/// Switches IPv6 on for a link. A new link gets the setting of `default`, and the kernel refuses
/// addresses on a link on which IPv6 is off.
///
/// # Errors
/// IPv6 is off, and the setting cannot be written. In containers it is usually read-only.
fn allow_ipv6(settings: &Path, link: LinkName) -> Result<(), KernelError> {
    let setting = settings.join(link.as_str()).join("disable_ipv6");
    // Without IPv6 in the kernel the file does not exist, and the kernel names the reason.
    let is_off = fs::read_to_string(&setting).is_ok_and(|text| text.trim() != "0");
    if !is_off {
        return Ok(());
    }
    fs::write(&setting, "0").map_err(|error| {
        let detail = format!(
            "net/ipv6/conf/{link}/disable_ipv6 is 1, so {link} can have no IPv6 address: set this \
             sysctl to 0 on the host, because it cannot be written here"
        );
        KernelError::from(error).about(detail)
    })?;
    tracing::info!(%link, "IPv6 was off on this link (disable_ipv6), it is switched on");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_setting_that_cannot_be_written_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let link: LinkName = "flannel-v6.1".parse().unwrap();
        allow_ipv6(dir.path(), link).unwrap();
        let settings = dir.path().join(link.as_str());
        fs::create_dir(&settings).unwrap();
        // Nobody can write to this file of the kernel, which has a number.
        symlink("/proc/sys/kernel/ngroups_max", settings.join("disable_ipv6")).unwrap();
        let error = allow_ipv6(dir.path(), link).unwrap_err().to_string();
        assert!(error.starts_with("net/ipv6/conf/flannel-v6.1/disable_ipv6 is 1"), "{error}");
        fs::remove_file(settings.join("disable_ipv6")).unwrap();
        fs::write(settings.join("disable_ipv6"), "1\n").unwrap();
        allow_ipv6(dir.path(), link).unwrap();
        assert_eq!(fs::read_to_string(settings.join("disable_ipv6")).unwrap(), "0");
    }
}
