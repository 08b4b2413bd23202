//! Runs plans on the offers of a lease.

use flannel_core::Subnets;
use flannel_core::backend::{Env, Plan};
use flannel_core::lease::{LeaseAttrs, Offer};
use flannel_core::object::Object;
use flannel_core::status::Rejection;

/// The plan for the leases of one backend type.
pub struct OfferPlan {
    lease_type: Option<&'static str>,
    plan: Box<Plan>,
}

/// The objects of one lease.
#[derive(Debug, Default)]
pub(crate) struct Planned {
    /// First the objects of the chosen offer, then those of the other offers that a plan accepts.
    pub(crate) objects: Vec<Object>,
    /// The number of objects of the chosen offer. The kernel gets only these. The other objects are
    /// claims too: all nodes must accept the same leases, although they may choose other offers.
    pub(crate) chosen: usize,
}

impl OfferPlan {
    /// A plan for offers of `lease_type`; `None`: for every offer.
    pub fn new(lease_type: Option<&'static str>, plan: Box<Plan>) -> Self {
        Self { lease_type, plan }
    }

    /// Runs every plan on the offers that it understands. The first offer that a plan accepts is
    /// the chosen one.
    ///
    /// # Errors
    /// No plan accepts an offer.
    pub(crate) fn run(
        plans: &[Self],
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        env: &Env<'_>,
    ) -> Result<Planned, Rejection> {
        let (mut planned, mut accepted, mut rejected) = (Planned::default(), false, None);
        for plan in plans {
            let understands =
                |offer: &&Offer| plan.lease_type.is_none_or(|kind| kind == offer.kind);
            for offer in attrs.offers().filter(understands) {
                let before = planned.objects.len();
                match (plan.plan)(subnets, offer, env, &mut planned.objects) {
                    Ok(()) => {
                        keep_first_of_each_key(&mut planned.objects, before.max(1));
                        if !std::mem::replace(&mut accepted, true) {
                            planned.chosen = planned.objects.len();
                        }
                    }
                    Err(error) => {
                        planned.objects.truncate(before);
                        rejected.get_or_insert(error);
                    }
                }
            }
        }
        if accepted {
            return Ok(planned);
        }
        Err(rejected.unwrap_or_else(|| {
            let ours = plans.iter().filter_map(|plan| plan.lease_type);
            let ours: Vec<_> = ours.map(|kind| format!("{kind:?}")).collect();
            let theirs = &attrs.preferred.kind;
            Rejection::Rejected(format!(
                "its backend type is {theirs:?}, this node's is {}",
                ours.join(" or ")
            ))
        }))
    }
}

/// Keeps the first of several objects with one key. Objects before the `n`th are not checked.
fn keep_first_of_each_key(objects: &mut Vec<Object>, mut n: usize) {
    while n < objects.len() {
        let (before, rest) = objects.split_at(n);
        let key = rest[0].key();
        if before.iter().any(|object| object.key() == key) {
            objects.remove(n);
        } else {
            n += 1;
        }
    }
}
