//! A node whose lease an operator or a program writes, in a directory that every host has.
//!
//! The manager writes nothing. It finds its own entry by its addresses. It stops if the entry
//! differs from the attributes that the node will publish.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use async_trait::async_trait;
use flannel_core::lease::{LeaseAttrs, Origin, View};
use flannel_core::runtime::lock;
use flannel_core::subnet::{Hints, LeaseEnd, Loss, Ownership, StoreStatus};
use flannel_core::{Config, Error, Lease, Result, SubnetManager, Subnets};
use serde_json::Value;
use tokio::sync::watch;

use super::configs::{Configs, Fetched};
use super::lease_list::as_stored;
use crate::clock::SystemClock;
use crate::reflect::Reflector;
use crate::registry::{Entry, Metered, Registry};

/// Takes this node's lease from a registry that already has the leases of all nodes.
///
/// It is for a [`DirRegistry`](crate::DirRegistry) with `assign=static`, and only reads. Its lease
/// has no end and needs no renewal. `hold_lease` returns when the node's file is deleted, or has
/// other subnets. The methods need a tokio runtime with time and I/O enabled.
#[derive(Debug)]
pub struct AssignedManager {
    store: Arc<Metered>,
    local_addresses: Vec<IpAddr>,
    configs: Configs,
    reflector: Mutex<Option<Reflector>>,
    ownership: watch::Sender<Ownership>,
}

impl AssignedManager {
    /// A manager for the node with these addresses: all addresses of its host, and the public
    /// address from its options.
    pub fn new(registry: Arc<dyn Registry>, local_addresses: Vec<IpAddr>) -> Self {
        let store = Arc::new(Metered::new(registry, Arc::new(SystemClock)));
        Self {
            store,
            local_addresses,
            configs: Configs::default(),
            reflector: Mutex::default(),
            ownership: watch::channel(Ownership::NotAcquired).0,
        }
    }

    fn views(&self) -> watch::Receiver<View> {
        lock(&self.reflector)
            .get_or_insert_with(|| Reflector::start(Arc::clone(&self.store) as _))
            .views()
    }

    /// The config. This manager has no cache.
    async fn read_config(&self) -> Result<Fetched<Config>> {
        let config = self.configs.read(&self.store.config().await?)?;
        Ok(Fetched { value: config, is_cached: false })
    }

    fn refused(&self, reason: String) -> Error {
        Error::Refused { store: self.store.to_string(), reason: reason.into() }
    }

    /// The only entry whose public address is among `addresses`, or `None` if no entry has one.
    async fn own(&self, addresses: &[IpAddr]) -> Result<Option<Entry>> {
        let listing = self.store.list().await?;
        let mut own = listing.entries.into_iter().filter(|entry| {
            entry.lease.attrs.preferred.public.values().any(|a| addresses.contains(a))
        });
        let first = own.next();
        if let (Some(first), Some(second)) = (&first, own.next()) {
            return Err(self.refused(format!(
                "{} and {} both have a public address of this host: delete one of them",
                first.lease.subnets, second.lease.subnets
            )));
        }
        Ok(first)
    }

    /// Refuses the entry if an attribute differs from the attribute that this node will publish.
    fn check(&self, subnets: &Subnets, written: &LeaseAttrs, ours: &LeaseAttrs) -> Result<()> {
        let Some(difference) = difference(written, ours) else { return Ok(()) };
        let Difference { field, written, ours } = difference;
        Err(self.refused(format!(
            "subnets/{subnets}: {field} is {written}, but this host has {ours}: correct one of them"
        )))
    }
}

#[async_trait]
impl SubnetManager for AssignedManager {
    async fn network_config(&self) -> Result<Config> {
        self.read_config().await.map(|read| self.configs.hand_out(read))
    }

    fn use_config(&self, config: &Config) {
        self.configs.prefer(config);
    }

    async fn config_changed(&self, known: &Config) -> Result<Config> {
        self.configs.next_valid(&*self.store, known, |_| ()).await
    }

    /// The public addresses of this node's entry, and the attributes published last.
    async fn hints(&self) -> Result<Hints> {
        let Some(own) = self.own(&self.local_addresses).await? else { return Ok(Hints::default()) };
        Ok(Hints::default()
            .with_public(own.lease.attrs.preferred.public)
            .with_previous(Some(own.lease.subnets))
            .with_last_published(Some(own.lease.attrs.clone())))
    }

    fn publishes_attrs(&self) -> bool {
        false
    }

    async fn acquire_lease(&self, attrs: &LeaseAttrs) -> Result<Lease> {
        let attrs = as_stored(attrs);
        let addresses: Vec<IpAddr> = attrs.preferred.public.values().copied().collect();
        let Some(own) = self.own(&addresses).await? else {
            let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
            return Err(self.refused(format!(
                "no file in subnets/ has this host's public address {}: write one, such as \
                 subnets/10.1.5.0-24 with {{\"PublicIP\": \"{0}\"}}",
                addresses.join(" or ")
            )));
        };
        self.check(&own.lease.subnets, &own.lease.attrs, &attrs)?;
        self.configs.used_for_lease(self.configs.for_lease(self.read_config()).await?.value);
        self.ownership.send_replace(Ownership::Held { until: None });
        Ok(Arc::unwrap_or_clone(own.lease))
    }

    /// Accepts only the attributes of the entry.
    async fn publish(&self, held: &Lease, attrs: &LeaseAttrs) -> Result<Lease> {
        self.check(&held.subnets, &held.attrs, &as_stored(attrs))?;
        Ok(held.clone())
    }

    /// # Errors
    /// The entry was changed and differs from the attributes that this node published.
    async fn hold_lease(&self, held: &Lease) -> Result<LeaseEnd> {
        let mut views = self.views();
        loop {
            let view = views.borrow_and_update().clone();
            if let Origin::Live { .. } = view.origin {
                match view.leases.get(&held.subnets).filter(|lease| shares_address(lease, held)) {
                    Some(lease) => self.check(&held.subnets, &lease.attrs, &held.attrs)?,
                    None => {
                        let moved = view.leases.iter().find(|lease| shares_address(lease, held));
                        let end = match moved {
                            Some(lease) => LeaseEnd::Moved { to: lease.subnets },
                            None => LeaseEnd::Deleted,
                        };
                        self.ownership.send_replace(Ownership::Lost {
                            since: SystemTime::now(),
                            why: Loss::Ended(end.clone()),
                        });
                        return Ok(end);
                    }
                }
            }
            if views.changed().await.is_err() {
                // The reflector lives as long as this manager.
                std::future::pending::<()>().await;
            }
        }
    }

    async fn watch_leases(&self) -> Result<watch::Receiver<View>> {
        Ok(self.views())
    }

    fn ownership(&self) -> watch::Receiver<Ownership> {
        self.ownership.subscribe()
    }

    fn store_status(&self) -> StoreStatus {
        self.store.status().with_wrong_config(self.configs.wrong())
    }
}

fn shares_address(one: &Lease, other: &Lease) -> bool {
    one.attrs
        .preferred
        .public
        .values()
        .any(|address| other.attrs.preferred.public.values().any(|a| a == address))
}

/// An attribute that differs, with both values as text.
#[derive(Debug, PartialEq, Eq)]
struct Difference {
    field: String,
    written: String,
    ours: String,
}

/// The first attribute that differs.
fn difference(written: &LeaseAttrs, ours: &LeaseAttrs) -> Option<Difference> {
    let value = |attrs: &LeaseAttrs| serde_json::from_str(&attrs.to_json()).unwrap_or(Value::Null);
    let written = value(written);
    let ours = value(ours);
    ["PublicIP", "PublicIPv6", "BackendType", "BackendData", "BackendV6Data"]
        .into_iter()
        .find_map(|field| json_difference(field, &written[field], &ours[field]))
}

/// The first difference between two values. If both are objects, it is a difference of a field.
fn json_difference(path: &str, written: &Value, ours: &Value) -> Option<Difference> {
    let (Value::Object(written), Value::Object(ours)) = (written, ours) else {
        return (written != ours).then(|| Difference {
            field: path.to_owned(),
            written: shown(written),
            ours: shown(ours),
        });
    };
    ours.keys().chain(written.keys()).find_map(|name| {
        json_difference(&format!("{path}.{name}"), &field(written, name), &field(ours, name))
    })
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "absent".to_owned(),
        value if value == "0.0.0.0" => "absent".to_owned(),
        value => value.to_string(),
    }
}

/// The value of a field, or `null` if the object has no such field. Names are case-insensitive.
fn field(object: &serde_json::Map<String, Value>, name: &str) -> Value {
    let found = object.iter().find(|(other, _)| other.eq_ignore_ascii_case(name));
    found.map_or(Value::Null, |(_, value)| value.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_reported() {
        let attrs = |text| LeaseAttrs::from_json(text).unwrap();
        let ours = attrs(r#"{"PublicIP":"192.0.2.7","BackendType":"host-gw"}"#);
        for (written, expected) in [
            (r#"{"PublicIP":"192.0.2.7","BackendType":"host-gw"}"#, None),
            (
                r#"{"PublicIP":"192.0.2.7","BackendType":"vxlan","BackendData":{"VNI":1}}"#,
                Some(("BackendType", r#""vxlan""#, r#""host-gw""#)),
            ),
            ("{}", Some(("PublicIP", "absent", r#""192.0.2.7""#))),
            (
                r#"{"PublicIP":"192.0.2.7","PublicIPv6":"fd00::7","BackendType":"host-gw"}"#,
                Some(("PublicIPv6", r#""fd00::7""#, "absent")),
            ),
        ] {
            let expected = expected.map(|(field, written, ours)| Difference {
                field: field.to_owned(),
                written: written.to_owned(),
                ours: ours.to_owned(),
            });
            assert_eq!(difference(&attrs(written), &ours), expected, "{written}");
        }
    }
}
