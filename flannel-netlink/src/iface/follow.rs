//! When the choice of the interface holds no longer.
//!
//! The one thing to know: an interface stays chosen for as long as it has the addresses and the MTU that it was chosen
//! with, even if the selectors would lead elsewhere by now: what works is not given up for what might.

use std::time::Duration;

use flannel_core::{Doubts, ExternalInterface, Family, KernelError, Key, LinkName, Object, Report};

use super::{Facts, SelectError, Selectors, choose};
use crate::NetlinkKernel;

/// Addresses and links change in bursts; one look in so much time is enough.
const PAUSE: Duration = Duration::from_millis(200);

impl NetlinkKernel {
    /// Waits until the chosen interface has lost an address it was chosen with, has another MTU or is gone, and
    /// another choice is possible: what is different, as a sentence without a full stop. While no other choice is
    /// possible it goes on waiting, and logs so once.
    ///
    /// # Errors
    /// The kernel cannot be watched.
    ///
    /// # Blocking
    /// Reads the kernel, as [`NetlinkKernel::external_interface`] does, when something has happened to the interface.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub async fn interface_changed(
        &self,
        chosen: &ExternalInterface,
        selectors: &Selectors,
        families: &[Family],
    ) -> Result<String, KernelError> {
        // Before the first look, so that nothing is missed between the two.
        let mut changes = flannel_core::Kernel::changes(self)?;
        let mut without = false;
        loop {
            let facts = self.facts(selectors)?;
            let kept = still_there(chosen, &facts);
            match choose(selectors, families.iter().copied(), &facts) {
                _ if kept => without = false,
                Ok(now) => {
                    if let Some(difference) = difference(chosen, &now) {
                        return Ok(difference);
                    }
                }
                Err(SelectError::Kernel(error)) => return Err(error),
                Err(error) => {
                    if !std::mem::replace(&mut without, true) {
                        tracing::warn!(
                            "{} is not what it was, everything stays as it is: {error}",
                            chosen.name
                        );
                    }
                }
            }
            while !bears_on(&changes.next().await?, chosen.name, kept) {}
            // What comes until then is in the next look.
            let rest = async { while changes.next().await.is_ok() {} };
            let _ = tokio::time::timeout(PAUSE, rest).await;
        }
    }
}

/// The interface is what it was when it was chosen.
fn still_there(chosen: &ExternalInterface, facts: &Facts) -> bool {
    let interface = facts.interfaces.iter().find(|interface| interface.name == chosen.name);
    interface.is_some_and(|interface| {
        let has = |address| interface.addresses.iter().any(|found| found.address == address);
        interface.mtu == chosen.mtu && chosen.address.values().all(|address| has(*address))
    })
}

/// What is different, if anything is.
fn difference(before: &ExternalInterface, now: &ExternalInterface) -> Option<String> {
    let name = now.name;
    if name != before.name {
        return Some(format!("the external interface is {name} now, not {}", before.name));
    }
    let changed = now.address.iter().find(|(family, address)| before.address[*family] != Some(**address));
    if let Some((family, address)) = changed {
        let before = before.address[family].map_or_else(|| "none".to_owned(), |before| before.to_string());
        return Some(format!("{name} has the {family} address {address} now, not {before}"));
    }
    (now.mtu != before.mtu).then(|| format!("{name} has the MTU {} now, not {}", now.mtu, before.mtu))
}

/// Whether the choice may be another one after this: while the interface is there only what happens to itself counts.
fn bears_on(doubts: &Doubts, chosen: LinkName, kept: bool) -> bool {
    let on = |key: &Key| match key {
        Key::Addr(link, _) => !kept || *link == chosen,
        Key::Route(dst) => !kept && dst.is_everything(),
        _ => false,
    };
    match doubts {
        Doubts::Everything => true,
        Doubts::Link(link) => !kept || *link == chosen,
        Doubts::Objects(reports, _) => reports.iter().any(|report| match report {
            Report::Now(object) => on(&Object::key(object)),
            Report::Other(key) | Report::Beside(key) | Report::Gone(key) => on(key),
        }),
    }
}
