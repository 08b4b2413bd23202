//! A backend whose tunnel has a guard.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use flannel_core::address::{Dual, Family};
use flannel_core::backend::{
    Blueprint, Datapath, ExternalInterface, Node, Plan, Prepared, SourceCheck,
};
use flannel_core::kernel::{Footprint, RecordKeeper};
use flannel_core::object::{LinkKind, LinkName, Object};
use flannel_core::runtime::blocking;
use flannel_core::{Backend, Config, Error, Result, Subnets};

use super::end::TunnelEnd;
use super::keeper::Guard;

/// What [`Guarded`] does if the config has no `SourceCheck`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Usual {
    /// Does not check packets, as with `"SourceCheck": false`.
    Off,
    /// Drops wrong packets, as with `"SourceCheck": true`, if the kernel can do it. If not, the
    /// status has a warning.
    IfPossible,
    /// Drops wrong packets, as with `"SourceCheck": true`. If the kernel cannot do it, the backend
    /// has to ([`Node::unguarded`](flannel_core::backend::Node::unguarded)).
    Always,
}

/// A backend with a tunnel, and a [`Guard`] of this tunnel. It has one more option:
/// [`SourceCheck`].
///
/// The [datapath](Backend::datapath) of the backend describes the tunnel: its devices and
/// transports. Each device carries packets of its family, between addresses of that family. If the
/// backend has one device for both families, a check is refused. The peers are the offers that the
/// plan of the backend accepts, with their public addresses.
///
/// ```
/// use flannel_backend_vxlan::VxlanBackend;
/// use flannel_core::Backend;
/// use flannel_firewall::{Guarded, Usual};
///
/// let backend = Guarded::new(VxlanBackend, "guard-vxlan", Usual::Off);
/// assert!(backend.option_names().is_some_and(|names| names.contains(&"SourceCheck")));
/// ```
#[derive(Debug)]
pub struct Guarded<B> {
    inner: B,
    guard: Guard,
    usual: Usual,
    option_names: OnceLock<Option<Vec<&'static str>>>,
}

impl<B: Backend> Guarded<B> {
    /// The backend `inner` with a guard, which has the name `name` ([`Guard::new`]).
    pub fn new(inner: B, name: &'static str, usual: Usual) -> Self {
        Self { inner, guard: Guard::new(name), usual, option_names: OnceLock::new() }
    }

    fn check(&self, config: &Config) -> Result<SourceCheck> {
        let check =
            SourceCheck::parse(&config.backend).map_err(|error| self.refuse(error.to_string()))?;
        Ok(match check {
            Some(check) => check,
            None if self.usual == Usual::Off => SourceCheck::Off,
            None => SourceCheck::Drop,
        })
    }

    fn refuse(&self, reason: String) -> Error {
        Error::Backend { backend: self.inner.kind().to_owned(), reason }
    }

    /// Why the kernel cannot keep the guard, or `None` if it can, or need not.
    ///
    /// # Errors
    /// The config demands it, and the backend cannot do it in place of the kernel.
    async fn unguarded(&self, config: &Config, check: SourceCheck) -> Result<Option<String>> {
        if check == SourceCheck::Off {
            return Ok(None);
        }
        let guard = self.guard.clone();
        let Err(error) = blocking(move || guard.may_guard()).await else { return Ok(None) };
        let why = format!("the kernel cannot check the sources of packets: {error}");
        let is_demanded = matches!(SourceCheck::parse(&config.backend), Ok(Some(_)));
        if is_demanded && self.usual != Usual::Always {
            let cure = "load the modules of nf_tables (modprobe -a nf_tables nft_fib_inet), or do \
                        not check them (\"SourceCheck\": false)";
            return Err(self.refuse(format!("{why}: {cure}")));
        }
        Ok(Some(why))
    }
}

#[async_trait]
impl<B: Backend> Backend for Guarded<B> {
    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn lease_type(&self) -> &'static str {
        self.inner.lease_type()
    }

    fn can_move(&self) -> bool {
        self.inner.can_move()
    }

    fn option_names(&self) -> Option<&[&'static str]> {
        let names = self.option_names.get_or_init(|| {
            let mut names = self.inner.option_names()?.to_vec();
            if !names.contains(&SourceCheck::NAME) {
                names.push(SourceCheck::NAME);
            }
            Some(names)
        });
        names.as_deref()
    }

    fn runs_commands(&self) -> bool {
        self.inner.runs_commands()
    }

    fn validate(&self, config: &Config, uplink: Option<&ExternalInterface>) -> Result<()> {
        let check = self.check(config)?;
        self.inner.validate(config, uplink)?;
        let datapath = self.inner.datapath(config)?;
        // The rules of one family would refuse the packets of the other one. A backend that always
        // checks can do it without them.
        if check != SourceCheck::Off
            && self.usual != Usual::Always
            && let Some(device) = datapath.devices.v4
            && datapath.devices.v6 == Some(device)
        {
            return Err(self.refuse(format!(
                "SourceCheck cannot be used with the device {device}, which carries both \
                 families: expected \"SourceCheck\": false, or one family"
            )));
        }
        match datapath.carries_marks {
            // The mark by which the guard knows the sender of a packet would be replaced.
            Some(option) if check != SourceCheck::Off => Err(self.refuse(format!(
                "SourceCheck cannot be used with {option}, which gives packets the marks of their \
                 senders: expected \"SourceCheck\": false, or no {option}"
            ))),
            _ => Ok(()),
        }
    }

    fn datapath(&self, config: &Config) -> Result<Datapath> {
        self.inner.datapath(config)
    }

    fn footprint(&self, config: &Config, uplink: Option<LinkName>) -> Result<Footprint> {
        let mut footprint = self.inner.footprint(config, uplink)?;
        footprint.record_keepers.insert(self.guard.name());
        Ok(footprint)
    }

    fn record_keepers(&self, state_dir: Option<&Path>) -> Vec<Arc<dyn RecordKeeper>> {
        let mut record_keepers = self.inner.record_keepers(state_dir);
        record_keepers.push(Arc::new(self.guard.clone()));
        record_keepers
    }

    async fn prepare(&self, node: &Node<'_>, config: &Config) -> Result<Prepared> {
        let check = self.check(config)?;
        let unguarded = self.unguarded(config, check).await?;
        let node = node.clone().with_guard(unguarded.as_deref());
        let prepared = self.inner.prepare(&node, config).await?;
        let datapath = self.inner.datapath(config)?;
        let ends = Dual::from_fn(|family: Family| {
            config.networks[family].as_ref()?;
            Some(TunnelEnd {
                drops: check == SourceCheck::Drop,
                device: Some(datapath.devices[family]?),
                local: node.uplink.address[family]?,
                transports: datapath.transports.clone(),
            })
        });
        let guard = self.guard.clone();
        let is_wanted = check != SourceCheck::Off;
        Ok(prepared.map_blueprint(move |mut blueprint, lease| {
            blueprint.footprint.record_keepers.insert(guard.name());
            let by_program = moves_by_program(&blueprint, &ends);
            // A program checks the packets itself.
            guard.note_unable(unguarded.clone().filter(|_| !by_program));
            if is_wanted && unguarded.is_none() {
                let own = lease.lease().subnets;
                blueprint = guard_network(blueprint, &guard, &ends, by_program, own);
            }
            blueprint
        }))
    }
}

/// Whether a program has the other end of the tunnel's device.
fn moves_by_program(blueprint: &Blueprint, ends: &Dual<TunnelEnd>) -> bool {
    blueprint.base.iter().any(|object| match object {
        Object::Link(link) => {
            let is_of_tunnel = ends.values().any(|end| end.device == Some(link.name));
            is_of_tunnel && matches!(link.kind, LinkKind::Tun(_))
        }
        _ => false,
    })
}

/// Adds the records of the guard to a network.
fn guard_network(
    mut blueprint: Blueprint,
    guard: &Guard,
    ends: &Dual<TunnelEnd>,
    by_program: bool,
    own: Subnets,
) -> Blueprint {
    let families = ends.map(|_, _| ());
    for mut end in ends.values().cloned() {
        if by_program {
            end.device = None;
        }
        blueprint.base.insert(guard.tunnel(&end));
    }
    blueprint.plan = guarded_plan(blueprint.plan, guard.clone(), families, own);
    blueprint
}

/// A plan with the objects of `plan`, and a record of the guard for each subnet of a peer for which
/// `plan` has an object.
fn guarded_plan(plan: Box<Plan>, guard: Guard, families: Dual<()>, own: Subnets) -> Box<Plan> {
    Box::new(move |subnets, offer, env, objects| {
        let before = objects.len();
        plan(subnets, offer, env, objects)?;
        if *subnets == own {
            return Ok(());
        }
        let planned = objects.len();
        for end in offer.endpoints(subnets).filter(|end| families[end.subnet.family()].is_some()) {
            let is_reached = objects[before..planned].iter().any(|object| match object {
                Object::Route(route) => route.dst == end.subnet,
                Object::Record(record) => record.subnet == end.subnet,
                _ => false,
            });
            if let Some(public) = end.public.filter(|_| is_reached) {
                objects.push(guard.peer(end.subnet, public).into());
            }
        }
        Ok(())
    })
}
