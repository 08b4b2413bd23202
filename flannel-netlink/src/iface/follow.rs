//! Watches the chosen interface, and finds another choice when it changes.
//!
//! An interface stays chosen as long as it has the addresses and the MTU that it was chosen with.
//! This holds even if the selectors would now choose another interface, because a change of the
//! external interface interrupts traffic. As long as it holds, only the chosen interface is read,
//! and no routes, except for an interface that leads to no other host: its MTU is that of others.
//! An address never replaces one that is less doubtful ([`AddressDoubt`]). A less doubtful address
//! of the interface replaces the chosen one.

use std::convert::Infallible;
use std::time::Duration;

use flannel_core::address::Family;
use flannel_core::backend::{AddressDoubt, ExternalInterface};
use flannel_core::kernel::{KernelError, ROUTE_PROTOCOL};
use flannel_core::object::LinkName;
use flannel_core::runtime::blocking;
use neli::consts::rtnl::Rtm;
use nix::sys::socket::SockProtocol;
use tokio::sync::watch;

use super::choose::{least_doubt, mtu};
use super::facts::{facts, interface};
use super::{Interface, SelectError, Selectors, choose};
use crate::NetlinkKernel;
use crate::codec::{addr, link, route};
use crate::kernel::query::ENODEV;
use crate::transport::multicast::Multicast;
use crate::transport::socket::Socket;
use crate::transport::wire::Message;

/// The time between a message and the check that it causes. Addresses and links change in bursts,
/// so one check covers several messages.
const PAUSE: Duration = Duration::from_millis(200);
/// `RTNLGRP_…`: LINK, IPV4_IFADDR, IPV6_IFADDR.
const GROUPS: [u32; 3] = [1, 5, 9];
/// [`GROUPS`] with IPV4_ROUTE and IPV6_ROUTE.
const GROUPS_AND_ROUTES: [u32; 5] = [1, 5, 9, 7, 11];
/// The size of the receive buffer, in bytes.
const RECEIVE_BUFFER: usize = 1 << 20;

/// The state of the chosen interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum InterfaceState {
    /// It has the addresses and the MTU that it was chosen with.
    #[default]
    Kept,
    /// It changed, and another choice is possible. A change means that it does not exist, lacks an
    /// address that it was chosen with, has another MTU, or has an address that is less doubtful
    /// ([`ExternalInterface::doubts`]) than the chosen one.
    Other {
        /// The new choice: another interface, or the same one with its current values.
        now: Box<ExternalInterface>,
        /// The difference, as a sentence without a full stop.
        difference: String,
    },
    /// It changed, and no other choice is possible. The reason is a sentence without a full stop.
    Lost(String),
}

impl NetlinkKernel {
    /// Watches the chosen interface, and sends its state through `state` whenever the state
    /// changes. It runs until it fails or is dropped.
    ///
    /// An address is another choice only if it is not more doubtful than the chosen one
    /// ([`ExternalInterface::doubts`]). `selectors` and `families` must be the arguments with which
    /// `chosen` was chosen.
    ///
    /// Needs a tokio runtime with I/O and time. The kernel state is read on a blocking thread,
    /// through a socket that only this call uses.
    ///
    /// # Errors
    /// The kernel state cannot be watched or read.
    ///
    /// # Cancel safety
    /// The future can be dropped at any time.
    pub async fn follow_interface(
        &self,
        chosen: &ExternalInterface,
        selectors: &Selectors,
        families: &[Family],
        state: &watch::Sender<InterfaceState>,
    ) -> Result<Infallible, KernelError> {
        // Listen before the first check, so that no change is missed.
        let (mut changes, socket) =
            self.namespace().run(|| Ok::<_, KernelError>((changes()?, Socket::open()?)))??;
        let mut observer = Observer {
            socket,
            chosen: chosen.clone(),
            selectors: selectors.clone(),
            families: families.to_vec(),
            index: None,
            uplinks: None,
        };
        let mut listens_to_routes = false;
        loop {
            let (back, kept) = observe(observer, Observer::check).await;
            observer = back;
            let kept = kept?;
            let needs_routes = !kept && observer.depends_on_routes();
            if needs_routes != listens_to_routes {
                changes.join(if needs_routes { &GROUPS_AND_ROUTES } else { &GROUPS })?;
                listens_to_routes = needs_routes;
            }
            let now = if kept {
                InterfaceState::Kept
            } else {
                let (back, now) = observe(observer, Observer::choose).await;
                observer = back;
                now?
            };
            state.send_if_modified(|state| std::mem::replace(state, now) != *state);
            changes.wait_for(|message| observer.affects_choice(message)).await?;
            // The next check covers all changes until the end of the pause.
            let _ = tokio::time::timeout(PAUSE, async {
                while changes.wait_for(|_| true).await.is_ok() {}
            })
            .await;
        }
    }
}

/// A socket that receives messages about links and addresses.
fn changes() -> Result<Multicast, KernelError> {
    let socket = Multicast::open(SockProtocol::NetlinkRoute, RECEIVE_BUFFER)?;
    socket.join(&GROUPS)?;
    Ok(socket)
}

/// Runs `work` on a blocking thread. Returns the observer with the result.
async fn observe<T: Send + 'static>(
    mut observer: Observer,
    work: fn(&mut Observer) -> T,
) -> (Observer, T) {
    blocking(move || {
        let done = work(&mut observer);
        (observer, done)
    })
    .await
}

/// Compares the chosen interface with the kernel.
struct Observer {
    socket: Socket,
    chosen: ExternalInterface,
    selectors: Selectors,
    families: Vec<Family>,
    /// The index of the chosen interface, or `None` if the last check found a difference.
    index: Option<u32>,
    /// The interfaces that determine the MTU of a chosen interface that leads to no other host.
    /// `None` for other interfaces.
    uplinks: Option<Vec<LinkName>>,
}

impl Observer {
    /// Whether the interface has the values that it was chosen with, and no better address.
    fn check(&mut self) -> Result<bool, KernelError> {
        let found = match interface(&mut self.socket, self.chosen.name) {
            // The interface was deleted between the two reads, of its link and of its addresses.
            Err(error) if error.is(ENODEV) => None,
            found => found?,
        };
        let Some((index, interface)) = found else {
            self.index = None;
            return Ok(false);
        };
        if interface.isolated {
            self.uplinks.get_or_insert_default();
            self.index = Some(index);
            // Its MTU is that of others.
            return Ok(false);
        }
        self.uplinks = None;
        let is_kept = is_kept(&self.chosen, &interface, Some(interface.mtu));
        self.index = is_kept.then_some(index);
        Ok(is_kept && !has_better(&self.chosen, &interface))
    }

    /// Chooses again, and compares the new choice with the old one.
    fn choose(&mut self) -> Result<InterfaceState, KernelError> {
        let facts = facts(&mut self.socket, &self.selectors)?;
        if let Some(uplinks) = &mut self.uplinks {
            *uplinks = facts.default.iter().flat_map(|it| &it.hops).map(|hop| hop.link).collect();
        }
        let kept =
            facts.interfaces.iter().find(|interface| interface.name == self.chosen.name).filter(
                |interface| {
                    is_kept(&self.chosen, interface, mtu(interface, &self.families, &facts))
                },
            );
        if kept.is_some_and(|interface| !has_better(&self.chosen, interface)) {
            return Ok(InterfaceState::Kept);
        }
        let now = match choose(&self.selectors, self.families.iter().copied(), &facts) {
            Err(SelectError::Kernel(error)) => return Err(error),
            Err(_) if kept.is_some() => return Ok(InterfaceState::Kept),
            Err(error) => return Ok(InterfaceState::Lost(error.to_string())),
            Ok(now) => now,
        };
        Ok(match difference(&self.chosen, &now) {
            None => InterfaceState::Kept,
            Some(difference) => match worse(&self.chosen, &now) {
                Some(why) => InterfaceState::Lost(why),
                None => InterfaceState::Other { now: Box::new(now), difference },
            },
        })
    }

    /// Whether a change of a route can change the choice.
    fn depends_on_routes(&self) -> bool {
        self.selectors.by_default_route()
            || self.selectors.can_reach.is_some()
            || self.uplinks.is_some()
    }

    /// Whether the message may change the choice. While the interface is unchanged, only messages
    /// about that interface can.
    fn affects_choice(&self, message: &Message<'_>) -> bool {
        let at = |index| self.index.is_none_or(|chosen| chosen == index);
        match Rtm::from(message.kind) {
            Rtm::Newlink | Rtm::Dellink => link::read(message).is_none_or(|link| {
                let is_uplink =
                    self.uplinks.as_ref().is_some_and(|uplinks| uplinks.contains(&link.name));
                let is_it = at(link.index) || link.name == self.chosen.name;
                link.whole && (is_it || is_uplink)
            }),
            Rtm::Newaddr | Rtm::Deladdr => addr::read(message).is_none_or(|found| at(found.index)),
            Rtm::Newroute | Rtm::Delroute if self.index.is_none() || self.uplinks.is_some() => {
                route::read(message).is_some_and(|route| self.may_lead_elsewhere(&route))
            }
            _ => false,
        }
    }

    /// Whether a changed route may change the choice: the default route in the main table, or a
    /// route of another program to the address that must be reachable.
    fn may_lead_elsewhere(&self, route: &route::RouteMessage) -> bool {
        match self.selectors.can_reach {
            Some(address) => route.dst.contains(address) && route.protocol != ROUTE_PROTOCOL,
            None => route.dst.is_everything() && route.main,
        }
    }
}

/// Whether the interface has the addresses and the MTU that it was chosen with. `mtu` is its MTU
/// now, or `None` if it is not known, for example while an uplink has lost its route.
fn is_kept(chosen: &ExternalInterface, interface: &Interface, mtu: Option<u32>) -> bool {
    mtu.is_none_or(|mtu| mtu == chosen.mtu)
        && chosen
            .address
            .values()
            .all(|address| interface.addresses.iter().any(|found| found.address == *address))
}

/// Whether the interface has a usable address that is less doubtful than the chosen one.
fn has_better(chosen: &ExternalInterface, interface: &Interface) -> bool {
    chosen.doubts.iter().any(|(family, doubt)| {
        least_doubt(interface, family).is_some_and(|least| least < Some(*doubt))
    })
}

/// Why `now` must not replace `chosen`, as a sentence without a full stop, or `None` if it may. The
/// only reason is that one of its addresses is more doubtful.
pub fn worse(chosen: &ExternalInterface, now: &ExternalInterface) -> Option<String> {
    for (family, doubt) in now.doubts.iter() {
        // `chosen` lacks an address of a family that only the new network config enables.
        if chosen.address[family].is_none() || Some(*doubt) <= chosen.doubts[family] {
            continue;
        }
        let name = now.name;
        let address = now.address[family]?;
        return Some(match doubt {
            AddressDoubt::LinkLocal => {
                format!("{name} has only the link-local {family} address {address} now")
            }
            AddressDoubt::Movable => format!(
                "{name} has only the {family} address {address} now, which may move to another host"
            ),
            _ => format!("the default route leads by {name} now, which leads to no other host"),
        });
    }
    None
}

/// The difference between two choices, or `None` if they are equal.
fn difference(before: &ExternalInterface, now: &ExternalInterface) -> Option<String> {
    let name = now.name;
    if name != before.name {
        return Some(format!("the external interface is {name} now, not {}", before.name));
    }
    for (family, address) in now.address.iter() {
        let old = match before.address[family] {
            Some(old) if old == *address => continue,
            Some(old) => old.to_string(),
            None => "none".to_owned(),
        };
        return Some(format!("{name} has the {family} address {address} now, not {old}"));
    }
    if now.mtu != before.mtu {
        return Some(format!("{name} has the MTU {} now, not {}", now.mtu, before.mtu));
    }
    None
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use flannel_core::address::Dual;
    use flannel_core::object::{Addr, Route, Via};
    use neli::consts::nl::NlmF;

    use super::*;
    use crate::testing::{in_netns, in_netns_async, ip};
    use crate::transport::wire::{Messages, messages};

    fn up0() -> LinkName {
        "up0".parse().unwrap()
    }

    fn chosen() -> ExternalInterface {
        ip("link add up0 type veth peer name far0");
        ip("link set up0 up");
        ip("address add 192.0.2.1/24 dev up0");
        NetlinkKernel::open().unwrap().external_interface(&selectors(None), [Family::V4]).unwrap()
    }

    fn selectors(can_reach: Option<&str>) -> Selectors {
        let can_reach = can_reach.map(|address| address.parse().unwrap());
        let iface = if can_reach.is_some() { vec![] } else { vec!["up0".into()] };
        Selectors { iface, can_reach, ..Selectors::default() }
    }

    /// An observer of up0. `index` is `Some(7)` if up0 is unchanged, and `None` if it has changed.
    fn observer(index: Option<u32>, selectors: Selectors) -> Observer {
        let chosen = ExternalInterface::new(up0(), 1500, Dual::default());
        let socket = Socket::open().unwrap();
        let uplinks = None;
        Observer { socket, chosen, selectors, families: vec![Family::V4], index, uplinks }
    }

    /// A message about a route has the format of the request for it.
    fn route_message(dst: &str) -> Vec<u8> {
        let mut messages = Messages::default();
        let via = Via::Gateway { gateway: [192, 0, 2, 9].into(), link: up0(), onlink: false };
        route::put(&mut messages, &Route { dst: dst.parse().unwrap(), via, mtu: None }, 7, false);
        messages.ready(0..1, 0, NlmF::empty()).to_vec()
    }

    fn is_relevant(observer: &Observer, message: &[u8]) -> bool {
        observer.affects_choice(&messages(message).next().unwrap().unwrap())
    }

    #[test]
    fn route_messages_are_relevant_only_if_the_interface_has_changed() {
        in_netns(|| {
            let kept = observer(Some(7), Selectors::default());
            let lost = observer(None, Selectors::default());
            for (dst, wanted) in
                [("0.0.0.0/0", true), ("10.1.7.0/24", false), ("192.0.2.0/24", false)]
            {
                assert!(!is_relevant(&kept, &route_message(dst)), "{dst}");
                assert_eq!(is_relevant(&lost, &route_message(dst)), wanted, "{dst}");
            }
            let far = observer(None, selectors(Some("198.51.100.7")));
            // A route of our protocol is not relevant, one of another protocol is.
            for dst in ["198.51.100.0/24", "0.0.0.0/0", "203.0.113.0/24"] {
                assert!(!is_relevant(&far, &route_message(dst)), "{dst}");
                let mut by_boot = route_message(dst);
                by_boot[16 + 5] = flannel_core::kernel::GO_ROUTE_PROTOCOL;
                assert_eq!(is_relevant(&far, &by_boot), dst != "203.0.113.0/24", "{dst}");
            }
            for (index, wanted) in [(7, true), (8, false)] {
                let mut messages = Messages::default();
                let addr = Addr { link: up0(), address: [192, 0, 2, 1].into(), len: 24 };
                addr::put(&mut messages, &addr, index);
                let message = messages.ready(0..1, 0, NlmF::empty()).to_vec();
                assert_eq!(is_relevant(&kept, &message), wanted);
                assert!(is_relevant(&lost, &message));
            }
        });
    }

    #[test]
    fn following_does_not_wait_for_a_running_change_of_routes() {
        in_netns_async(async || {
            let chosen = chosen();
            let kernel = Arc::new(NetlinkKernel::open().unwrap());
            let (locked, is_locked) = mpsc::channel();
            let (done, is_done) = mpsc::channel::<()>();
            let writer = std::thread::spawn({
                let kernel = Arc::clone(&kernel);
                move || {
                    let _writing = kernel.lock();
                    locked.send(()).unwrap();
                    is_done.recv_timeout(Duration::from_secs(20)).is_ok()
                }
            });
            is_locked.recv().unwrap();
            ip("link set up0 mtu 1400");
            let selectors = selectors(None);
            let (state, mut states) = watch::channel(InterfaceState::Kept);
            tokio::select! {
                ended = kernel.follow_interface(&chosen, &selectors, &[Family::V4], &state) => {
                    panic!("{ended:?}")
                }
                changed = states.changed() => changed.unwrap(),
            }
            let state = states.borrow().clone();
            let InterfaceState::Other { difference, .. } = state else { panic!("{state:?}") };
            assert_eq!(difference, "up0 has the MTU 1400 now, not 1500");
            let _ = done.send(());
            assert!(writer.join().unwrap(), "following waited for the writer");
        });
    }
}
