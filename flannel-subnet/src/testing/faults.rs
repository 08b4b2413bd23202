//! Faults of a store in memory, and the actions of operators and foreign programs on it.

use std::time::Duration;

use crate::registry::{HolderId, LeaseGrant, MemoryRegistry};

impl MemoryRegistry {
    /// Writes any key with any value, like an operator or another program. Without `grant` it never
    /// expires.
    pub fn put_raw(&self, key: &str, value: &str, grant: Option<LeaseGrant>) {
        self.change(|store| store.put(key, value, grant));
    }

    /// Deletes a key, like an operator who stops its holder.
    pub fn delete_key(&self, key: &str) {
        self.change(|store| store.remove(key));
    }

    /// Forgets a holder and deletes its keys, as `etcdctl lease revoke` does.
    pub fn revoke(&self, holder: HolderId) {
        self.change(|store| store.end_holder(holder));
    }

    /// Forgets all history. A watch from an older revision has a gap.
    pub fn forget_history(&self) {
        self.lock().history.forget();
    }

    /// Starts or ends an outage, in which every request and watch fails. Leases still expire.
    pub fn set_outage(&self, outage: bool) {
        self.change(|store| store.outage = outage);
    }

    /// Delays the reply to each request. The request itself is carried out at once.
    pub fn set_reply_delay(&self, delay: Duration) {
        self.lock().delay = delay;
    }
}
