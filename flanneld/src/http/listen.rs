//! The sockets that the daemon listens on.

use std::fs::DirBuilder;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;
use std::{fs, io};

use nix::errno::Errno;
use socket2::{Domain, Socket, Type};
use tokio::net::{TcpListener, UnixListener};

/// The number of connections that the kernel keeps until they are accepted.
const BACKLOG: i32 = 1024;
/// The errors by which a kernel without IPv6 refuses an IPv6 socket or its address.
const NO_IPV6: [i32; 2] = [Errno::EAFNOSUPPORT as i32, Errno::EADDRNOTAVAIL as i32];

/// Listens at an address. An unspecified address of either family serves both families.
///
/// # Errors
/// The error of the socket.
///
/// **Source**: Go's `net.Listen("tcp", …)`, which Go flannel calls. A kubelet probes an IPv6-only
/// node at its IPv6 address, though flannel's manifest leaves `0.0.0.0` in force.
pub(crate) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let open = |address: SocketAddr| {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), None)?;
        if address.is_ipv6() {
            socket.set_only_v6(!address.ip().is_unspecified())?;
        }
        socket.set_reuse_address(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        TcpListener::from_std(socket.into())
    };
    if !address.ip().is_unspecified() {
        return open(address);
    }
    open((Ipv6Addr::UNSPECIFIED, address.port()).into()).or_else(|error| {
        match error.raw_os_error() {
            // This host has no IPv6.
            Some(errno) if NO_IPV6.contains(&errno) => {
                open((Ipv4Addr::UNSPECIFIED, address.port()).into())
            }
            _ => Err(error),
        }
    })
}

/// Creates the control socket atomically, with its mode and group. Replaces a dead socket.
///
/// # Errors
/// The reason: another daemon answers there, or an error of the file.
pub(crate) fn open_socket(path: &Path, group: Option<u32>) -> Result<UnixListener, String> {
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        return Err("another daemon answers there".to_owned());
    }
    let directory = path.parent().unwrap_or_else(|| Path::new(""));
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(directory)
        .map_err(|error| format!("{}: {error}", directory.display()))?;
    let name = path.file_name().ok_or("it is not the name of a file, expected one")?;
    let temporary =
        path.with_file_name(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
    let _ = fs::remove_file(&temporary);
    let listener = UnixListener::bind(&temporary).map_err(|error| error.to_string())?;
    let given = group.map_or(Ok(()), |group| {
        let given = std::os::unix::fs::chown(&temporary, None, Some(group));
        given.map_err(|error| format!("--control-group {group}: {error}"))
    });
    let placed = given.and_then(|()| {
        fs::set_permissions(&temporary, fs::Permissions::from_mode(0o660))
            .and_then(|()| fs::rename(&temporary, path))
            .map_err(|error| error.to_string())
    });
    if placed.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    placed.map(|()| listener)
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use flannel_netlink::testing::in_netns_async;
    use tokio::net::TcpStream;

    use super::*;

    /// A kubelet probes an IPv6-only node at its IPv6 address, with the options of the manifest.
    #[test]
    fn an_unspecified_address_serves_both_families() {
        in_netns_async(async || {
            for (port, everywhere) in
                [(8081, Ipv4Addr::UNSPECIFIED.into()), (8082, Ipv6Addr::UNSPECIFIED.into())]
            {
                let _listener = listen(SocketAddr::new(everywhere, port)).unwrap();
                for address in ["127.0.0.1", "::1"] {
                    let address: IpAddr = address.parse().unwrap();
                    let connected = TcpStream::connect((address, port)).await;
                    assert!(connected.is_ok(), "{everywhere} at {address}: {connected:?}");
                }
            }
            for (port, address, other) in [(8083, "127.0.0.1", "::1"), (8084, "::1", "127.0.0.1")] {
                let [address, other] = [address, other].map(|text| text.parse::<IpAddr>().unwrap());
                let _listener = listen(SocketAddr::new(address, port)).unwrap();
                assert!(TcpStream::connect((address, port)).await.is_ok(), "{address}");
                assert!(
                    TcpStream::connect((other, port)).await.is_err(),
                    "{other}, though only {address} is served"
                );
            }
        });
    }

    #[tokio::test]
    async fn a_dead_socket_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/flanneld.sock");
        let first = open_socket(&path, None).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path), 0o660);
        assert_eq!(mode(path.parent().unwrap()) & !0o755, 0, "nobody else may replace the socket");
        assert_eq!(open_socket(&path, None).unwrap_err(), "another daemon answers there");
        drop(first);
        let _second = open_socket(&path, None).unwrap();
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
