//! Steps for links.

use std::path::Path;
use std::{fs, io};

use flannel_core::kernel::{KernelError, Outcome};
use flannel_core::object::{Link, LinkKind, LinkName};
use libc::{EADDRINUSE, EALREADY, EBUSY, EPERM};

use super::{EEXIST, EINVAL, EOPNOTSUPP, Steps, Writer, unsupported};
use crate::codec::fou::Port;
use crate::codec::link::{self, LinkCodec, LinkMessage};
use crate::kernel::query::{find_link, get_link};
use crate::kernel::{fou, ports, wireguard};
use crate::transport::socket::Socket;

/// See [`Kernel::may_change`](flannel_core::Kernel::may_change). The kernel checks the privilege
/// and the kind of a link before it refuses the attributes of these requests with `EINVAL`. It
/// loads the module of the kind.
///
/// **Source**: linux `net/core/rtnetlink.c: rtnetlink_rcv_msg, rtnl_newlink`.
pub(in crate::kernel) fn may_change(
    socket: &mut Socket,
    links: &[Link],
) -> Result<(), KernelError> {
    let permitted = refused_as_invalid(socket.send_one(link::delete(0)));
    permitted.map_err(|error| {
        let detail = "this process needs CAP_NET_ADMIN in its network namespace";
        if error.is_denied() { KernelError::explained(EPERM, detail) } else { error }
    })?;
    for wanted in links {
        let kind = wanted.kind.attributes().kind();
        // The kernel would make a WireGuard device without attributes.
        if matches!(wanted.kind, LinkKind::Wireguard(_)) {
            wireguard::exists()?;
            continue;
        }
        if link::codec(&wanted.kind).is_some_and(LinkCodec::made_by_others) {
            continue;
        }
        let known = match &wanted.kind {
            LinkKind::Fou(_) => can_have_udp_headers(socket),
            _ => {
                refused_as_invalid(socket.send_one(link::refused(kind, link::codec(&wanted.kind))))
            }
        };
        known.map_err(|error| {
            if error != KernelError::new(EOPNOTSUPP) {
                return error;
            }
            error.about(format_args!("this kernel has no {kind} devices: run modprobe {kind}"))
        })?;
    }
    Ok(())
}

/// Checks that the kernel can put UDP headers around packets of ipip devices. It is asked for a
/// second device without addresses, which it refuses after the check of the headers.
///
/// **Source**: linux `net/ipv4/ipip.c: ipip_newlink`.
fn can_have_udp_headers(socket: &mut Socket) -> Result<(), KernelError> {
    fou::may_add()?;
    match socket.send_one(link::probe()) {
        Err(error) if error.is(EEXIST) => Ok(()),
        Err(error) if error.is(EINVAL) => {
            let detail = "this kernel puts no UDP headers around packets of ipip devices";
            Err(KernelError::explained(EOPNOTSUPP, detail))
        }
        // It has no device without addresses (`net.core.fb_tunnels_only_for_init_net`).
        Ok(()) => {
            let made = find_link(socket, link::probe_name())?;
            made.map_or(Ok(()), |made| socket.send_one(link::delete(made.index)))
        }
        result => result,
    }
}

/// The result of a request whose attributes are the last thing that the kernel checks. `EINVAL`
/// means that all other checks succeeded.
fn refused_as_invalid(result: Result<(), KernelError>) -> Result<(), KernelError> {
    match result {
        Err(error) if error.is(EINVAL) => Ok(()),
        result => result,
    }
}

impl Steps for Link {
    fn put(&self, writer: &mut Writer<'_>, n: usize, _: u32) -> Result<(), KernelError> {
        writer.flush();
        writer.put_link(n, self)
    }

    /// Deletes the device if it belongs to the same network, even if other attributes differ. A
    /// foreign device of the same name stays.
    fn delete(&self, writer: &mut Writer<'_>, _: usize, _: u32) -> Result<(), KernelError> {
        writer.flush();
        let is = get_link(writer.socket, self.name)?;
        if !link::codec(&self.kind).is_some_and(|codec| codec.is_same_network(&is)) {
            return Ok(());
        }
        writer.delete_link(&is)
    }
}

impl Writer<'_> {
    /// Creates the device, changes it in place, or deletes it and creates it again. `n` is the
    /// number of the change.
    ///
    /// When the MAC address changes, the kernel deletes all neighbours on the device, even
    /// permanent ones (`neigh_changeaddr`). Routes stay.
    fn put_link(&mut self, n: usize, want: &Link) -> Result<(), KernelError> {
        let Some(codec) = link::codec(&want.kind) else {
            return Err(unsupported(&want.clone().into()));
        };
        let lower = want.kind.attributes().lower().map_or(Ok(0), |name| self.index(name))?;
        let Some(is) = find_link(self.socket, want.name)? else {
            return self.create_link(n, want, codec, lower);
        };
        let kind = want.kind.attributes().kind();
        if is.kind_name != kind && !codec.replaces(&is) {
            let other =
                if is.kind_name.is_empty() { "physical or built-in" } else { &is.kind_name };
            let detail = format!(
                "{} exists, but is a {other} device and no {kind} device: rename or remove it",
                want.name
            );
            return Err(KernelError::explained(EEXIST, detail));
        }
        if is.can_become(&want.kind) {
            let mut of_kind = link::change_kind(&is, codec, lower);
            let changes_kind = of_kind.len() > 0;
            let changed: Result<(), KernelError> =
                self.socket.send(&mut of_kind).into_iter().collect();
            let old_port = is.fou_port().filter(|_| changes_kind && changed.is_ok());
            // The change may reset the MTU (linux `ip_tunnel_update`).
            let now = if changes_kind { find_link(self.socket, want.name)? } else { None };
            let is = now.unwrap_or_else(|| is.clone());
            let own = self.configure(want, &is);
            // Also if the new one cannot be opened: nobody would know it later.
            let closed = match old_port {
                Some(port) if is.fou_port() != Some(port) => fou::delete(self.namespace, port),
                _ => Ok(()),
            };
            let own = own.and(closed);
            let mut send = |mut requests| -> Result<(), KernelError> {
                self.socket.send(&mut requests).into_iter().collect()
            };
            match changed {
                // The kernel cannot make this change in place, so the device is created again.
                Err(error) if error.is(EOPNOTSUPP) => {
                    tracing::debug!(link = %want.name, %error, "a change in place was refused");
                }
                changed => {
                    let released =
                        send(link::release(&is)).map_err(|error| unreleased(want.name, error));
                    let common = send(link::change(&is, want));
                    let common = common.map_err(|error| self.explained(error, want));
                    return changed.and(released).and(own).and(common);
                }
            }
        }
        self.delete_link(&is)?;
        self.create_link(n, want, codec, lower)
    }

    fn delete_link(&mut self, is: &LinkMessage) -> Result<(), KernelError> {
        self.forget(is.name);
        // First the port: without the device nobody would know it.
        is.fou_port().map_or(Ok(()), |port| fou::delete(self.namespace, port))?;
        self.socket.send_one(link::delete(is.index))
    }

    /// Creates the device. The put of a device that another program makes only starts here.
    fn create_link(
        &mut self,
        n: usize,
        want: &Link,
        codec: &dyn LinkCodec,
        lower: u32,
    ) -> Result<(), KernelError> {
        if codec.made_by_others() {
            self.outcomes[n] = Outcome::Started;
            return Ok(());
        }
        self.forget(want.name);
        match self.socket.send_one(link::create(want, codec, lower)) {
            Err(error) if error.is(EEXIST) => return self.rename_back(n, want, codec, error),
            created => created?,
        }
        let made = get_link(self.socket, want.name)?;
        if codec.carries_ipv6() {
            self.ignore_router_advertisements(want.name);
        }
        self.configure(want, &made)?;
        let up =
            if want.up { self.socket.send_one(link::set_up(made.index, true)) } else { Ok(()) };
        up.map_err(|error| self.explained(error, want))
    }

    /// Sets the attributes that are not in messages about links.
    fn configure(&mut self, want: &Link, is: &LinkMessage) -> Result<(), KernelError> {
        let configured = match &want.kind {
            LinkKind::Fou(device) => {
                fou::add(self.namespace, Port { local: device.local, port: device.port })
            }
            LinkKind::Wireguard(device) => {
                self.wireguard.configure(self.namespace, (want.name, is.index), device)
            }
            _ => Ok(()),
        };
        configured.map_err(|error| self.explained(error, want))
    }

    /// The error of setting a device up, or its port. If the port is in use, it names the device or
    /// the option.
    fn explained(&mut self, error: KernelError, want: &Link) -> KernelError {
        let (port, option) = match &want.kind {
            LinkKind::Fou(device) => (device.port, "Port"),
            LinkKind::Vxlan(device) => (device.port, "Port"),
            LinkKind::Wireguard(device) => (device.port, "ListenPort"),
            _ => return error,
        };
        if !error.is(EADDRINUSE) && !error.is(EALREADY) {
            return error;
        }
        let own = std::slice::from_ref(want);
        let holders = ports::holders(self.socket, self.namespace, self.wireguard, port, own);
        let detail = match holders.unwrap_or_default().first() {
            Some(holder) => format!(
                "{holder} has UDP port {port} already: remove that device, or set another {option}"
            ),
            None if matches!(want.kind, LinkKind::Fou(_)) => format!(
                "UDP port {port} is in use: stop its program (ss -ulpn), close the port of \
                 another tunnel (ip fou show), or set another {option}"
            ),
            None => format!("UDP port {port} is in use: stop its program, or set another {option}"),
        };
        KernelError::explained(EADDRINUSE, detail)
    }

    /// Called when the kernel refuses to create `want` with `error`, because a device excludes it.
    ///
    /// If that device has the MAC address of `want`, it is our device, which another program has
    /// renamed. It gets its name back, and all objects on it stay. A foreign device stays too, and
    /// the returned error names it. Without such a device the result is `error`.
    fn rename_back(
        &mut self,
        n: usize,
        want: &Link,
        codec: &dyn LinkCodec,
        error: KernelError,
    ) -> Result<(), KernelError> {
        let mut there = self.socket.dump(link::all(), link::read)?;
        there.retain(|is| codec.excludes(is));
        // The MAC address identifies our device. Without one no device is known to be ours.
        let has_mac = want.kind.attributes().mac().is_some();
        let ours = there.iter().find(|is| has_mac && is.has_mac_of(&want.kind));
        let Some(is) = ours else {
            let Some(is) = there.first() else { return Err(error) };
            let detail = format!("{} has {} already: remove it", is.name, codec.exclusive());
            return Err(KernelError::explained(EEXIST, detail));
        };
        let link = want.name;
        let new_name = &is.name;
        tracing::warn!(%link, %new_name, "a link was renamed, restoring its name");
        match self.socket.send_one(link::rename(is.index, want.name)) {
            // Kernels before 6.2 refuse to rename a device that is up.
            Err(error) if error.is(EBUSY) => {
                self.socket.send_one(link::set_up(is.index, false))?;
                self.socket.send_one(link::rename(is.index, want.name))?;
            }
            renamed => renamed?,
        }
        self.put_link(n, want)
    }

    /// Sets `accept_ra` of the device to 0, so that the other end of the tunnel cannot give this
    /// host addresses and routes. In containers the file is usually read-only. Then a warning names
    /// the command for the host.
    fn ignore_router_advertisements(&self, name: LinkName) {
        let path = Path::new("/proc/sys/net/ipv6/conf").join(name.as_str());
        let outcome = self
            .namespace
            .run(|| (fs::write(path.join("accept_ra"), "0"), accepts_advertisements(&path)));
        match outcome {
            Ok((Ok(()), _)) => {}
            Ok((Err(error), Ok(true))) => tracing::warn!(
                link = %name,
                %error,
                repair = %format!("on the host, run sysctl -w net/ipv6/conf/{name}/accept_ra=0"),
                "the link accepts router advertisements, because accept_ra cannot be written: the \
                 other end of the tunnel can give this host addresses and routes"
            ),
            // Without IPv6 the file does not exist.
            Ok((Err(error), accepts)) => {
                tracing::debug!(%error, ?accepts, link = %name, "accept_ra is left as it is");
            }
            Err(error) => tracing::debug!(%error, link = %name, "accept_ra is left as it is"),
        }
    }

    /// Removes the cached index and addresses of a link.
    fn forget(&mut self, name: LinkName) {
        if let Some(Ok(index)) = self.known.indexes.remove(&name) {
            self.known.addrs.remove(&index);
        }
    }
}

/// The error if the kernel refuses to release a port. `EOPNOTSUPP` means that the driver of the
/// other device cannot release its ports. The driver of Open vSwitch cannot.
fn unreleased(name: LinkName, error: KernelError) -> KernelError {
    let detail = format!(
        "{name} is a port of another device that cannot release it: remove it there with its tool"
    );
    if error.is(EOPNOTSUPP) { KernelError::explained(EOPNOTSUPP, detail) } else { error }
}

/// Whether a device accepts router advertisements. `settings` is its directory below
/// `/proc/sys/net/ipv6/conf`.
fn accepts_advertisements(settings: &Path) -> io::Result<bool> {
    let number = |name| fs::read_to_string(settings.join(name)).map(|text| text.trim().to_owned());
    let accepts = match number("accept_ra")?.as_str() {
        "0" => false,
        // 1 accepts them unless the host forwards packets, 2 accepts them always.
        "1" => number("forwarding")? == "0",
        _ => true,
    };
    Ok(accepts && number("disable_ipv6")? == "0")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_netns, ip};

    #[test]
    fn the_kernel_refuses_an_unknown_kind_before_missing_attributes() {
        in_netns(|| {
            let mut socket = Socket::open().unwrap();
            let mut errno = |kind| socket.send_one(link::refused(kind, None)).unwrap_err().errno();
            assert_eq!(["nosuchkind", "vxlan"].map(&mut errno), [Some(EOPNOTSUPP), Some(EINVAL)]);
        });
    }

    #[test]
    fn a_device_accepts_router_advertisements_as_its_settings_say() {
        in_netns(|| {
            ip("link add up0 type veth peer name far0");
            let settings = Path::new("/proc/sys/net/ipv6/conf/up0");
            for (accept_ra, forwarding, disable_ipv6, expected) in [
                ("0", "0", "0", false),
                ("1", "0", "0", true),
                ("1", "1", "0", false),
                ("2", "1", "0", true),
                ("2", "0", "1", false),
            ] {
                let values = [
                    ("forwarding", forwarding),
                    ("accept_ra", accept_ra),
                    ("disable_ipv6", disable_ipv6),
                ];
                for (name, value) in values {
                    fs::write(settings.join(name), value).unwrap();
                }
                assert_eq!(accepts_advertisements(settings).unwrap(), expected, "{values:?}");
            }
            assert!(accepts_advertisements(&settings.with_file_name("absent0")).is_err());
        });
    }
}
