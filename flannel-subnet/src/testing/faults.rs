//! Faults of a store in memory, and the actions of operators and foreign programs on it.

use std::time::Duration;

use crate::registry::{HolderId, LeaseGrant, MemoryRegistry};

impl MemoryRegistry {
    /// Writes any key with any value, as an operator or a foreign program would. Without `grant` it
    /// never expires.
    pub fn put_raw(&self, key: &str, value: &str, grant: Option<LeaseGrant>) {
        self.change(|state| state.put(key, value, grant));
    }

    /// Deletes a key, as an operator would to stop its holder.
    pub fn delete_key(&self, key: &str) {
        self.change(|state| state.remove(key));
    }

    /// Forgets a holder and deletes its keys, as `etcdctl lease revoke` does.
    pub fn revoke(&self, holder: HolderId) {
        self.change(|state| state.end_holder(holder));
    }

    /// Forgets all history: a watch that is not up to date, or begins at an older revision, has a
    /// gap.
    pub fn forget_history(&self) {
        self.lock().history.forget();
    }

    /// Begins or ends an outage, in which every request and watch fails. Time goes on meanwhile.
    pub fn set_outage(&self, outage: bool) {
        self.change(|state| state.outage = outage);
    }

    /// Delays the reply to each request by this time. The request itself is carried out at once.
    pub fn set_reply_delay(&self, delay: Duration) {
        self.lock().delay = delay;
    }
}
