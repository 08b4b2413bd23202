//! Notifies systemd when the daemon is ready, reloads, stops or is alive, and of its state.
//!
//! Without `NOTIFY_SOCKET` in the environment nothing is sent. The messages and the watchdog's
//! limit come from the crate sd-notify. The socket is our own: sd-notify's would block the runtime
//! while the supervisor does not read, and cannot send to abstract addresses (`@name`).
//!
//! **Source**: `sd_notify(3)`; flannel `main.go`, which sends `READY=1` after the subnet file.

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use sd_notify::NotifyState;
use tokio::time::{Instant, sleep_until, timeout};

use crate::observe::Observer;
use crate::report::problems::line;

/// The shortest time between two status texts.
const GAP: Duration = Duration::from_secs(1);
/// The longest wait for a reload, because the store may not answer.
const RELOAD: Duration = Duration::from_secs(10);
/// The period of updates of the status text, because not every change of it is reported.
const REFRESH: Duration = Duration::from_secs(5);

/// The connection to systemd.
#[derive(Debug)]
pub(crate) struct Notifier {
    socket: UnixDatagram,
    address: SocketAddr,
    /// The period of the watchdog's messages.
    alive: Option<Duration>,
    /// `READY=1` was sent. Nothing can be reloaded before.
    ready: AtomicBool,
}

impl Notifier {
    /// Reads the environment of this process. Returns `None` without `NOTIFY_SOCKET`.
    ///
    /// # Errors
    /// `NOTIFY_SOCKET` is not an address that a socket of this kind can send to.
    pub(crate) fn from_env() -> io::Result<Option<Self>> {
        Self::new(std::env::var_os("NOTIFY_SOCKET"), sd_notify::watchdog_enabled())
    }

    /// With the values of `NOTIFY_SOCKET` and the watchdog's limit.
    fn new(socket: Option<OsString>, limit: Option<Duration>) -> io::Result<Option<Self>> {
        let Some(name) = socket.filter(|name| !name.is_empty()) else { return Ok(None) };
        let address = address(&name)?;
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        // Half of the limit, as sd_watchdog_enabled(3) recommends.
        let alive = limit.filter(|limit| !limit.is_zero()).map(|limit| limit / 2);
        Ok(Some(Self { socket, address, alive, ready: AtomicBool::new(false) }))
    }

    /// Sends one message. A supervisor that does not listen is not an error, but logged.
    fn send(&self, states: &[NotifyState<'_>]) {
        let states: Vec<String> = states.iter().map(ToString::to_string).collect();
        let text = states.join("\n");
        if let Err(error) = self.socket.send_to_addr(text.as_bytes(), &self.address) {
            tracing::debug!(?text, %error, "systemd was not notified");
        }
    }

    /// Keeps systemd informed: ready when a network runs for the first time, its state in a line,
    /// and the watchdog's messages.
    pub(crate) async fn inform(&self, observer: &Observer) -> Infallible {
        let mut changes = observer.changes();
        let mut sent = String::new();
        let mut news = true;
        let mut alive_next = Instant::now();
        let mut line_next = Instant::now();
        loop {
            let now = Instant::now();
            let ready = self.ready.load(Ordering::Relaxed);
            if !ready && observer.runs() {
                self.ready.store(true, Ordering::Relaxed);
                // In one message, so that an old status text is not shown after the start.
                sent = line(&observer.snapshot());
                self.send(&[NotifyState::Ready, NotifyState::Status(&sent)]);
                news = false;
                line_next = now + GAP;
            }
            if news && now >= line_next {
                let text = line(&observer.snapshot());
                if text != sent {
                    self.send(&[NotifyState::Status(&text)]);
                    sent = text;
                }
                news = false;
                line_next = now + GAP;
            }
            if let Some(pause) = self.alive.filter(|_| now >= alive_next) {
                self.send(&[NotifyState::Watchdog]);
                alive_next = now + pause;
            }
            tokio::select! {
                // Later changes go with the next line.
                () = changes.next(), if !news || !ready => news = true,
                () = sleep_until(line_next), if news => (),
                () = sleep_until(line_next - GAP + REFRESH), if !news => news = true,
                () = sleep_until(alive_next), if self.alive.is_some() => (),
            }
        }
    }

    /// Notifies that the daemon will stop.
    pub(crate) fn stopping(&self) {
        let status = NotifyState::Status("stopped; the data path stays in place");
        self.send(&[NotifyState::Stopping, status]);
    }
}

/// Reads everything again, and notifies systemd of it, unless it still waits for the first
/// `READY=1`.
pub(crate) async fn reload(notifier: Option<&Notifier>, observer: &Observer) {
    let notifier = notifier.filter(|notifier| notifier.ready.load(Ordering::Relaxed));
    if let Some(notifier) = notifier {
        // sd-notify's own reading of the clock overflows where seconds have 32 bits.
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC)
            .map_or(0, |now| Duration::from(now).as_micros() as i128);
        notifier.send(&[NotifyState::Reloading, NotifyState::MonotonicUsec(now)]);
    }
    match timeout(RELOAD, observer.reload()).await {
        Ok(found) => tracing::info!(result = %found, "SIGHUP: read again"),
        Err(_) => {
            let text = "SIGHUP: the store did not answer in time; nothing changes";
            tracing::warn!(timeout = ?RELOAD, "{text}");
        }
    }
    if let Some(notifier) = notifier {
        notifier.send(&[NotifyState::Ready]);
    }
}

/// `/run/systemd/notify`, or `@name` for an abstract socket.
fn address(name: &OsStr) -> io::Result<SocketAddr> {
    match name.as_bytes() {
        [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest),
        [b'/', ..] => SocketAddr::from_pathname(name),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{name:?} is not an address, expected the path of a socket, or @NAME"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::tests::network;
    use flannel_core::status::Status;

    fn listener(name: &str) -> UnixDatagram {
        UnixDatagram::bind_addr(&address(OsStr::new(name)).unwrap()).unwrap()
    }

    fn receive(socket: &UnixDatagram) -> String {
        let mut buffer = [0; 4096];
        let len = socket.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..len]).into_owned()
    }

    #[tokio::test(start_paused = true)]
    async fn messages_arrive_over_both_kinds_of_socket() {
        let dir = tempfile::tempdir().unwrap();
        let abstract_name = format!("@flannel-test-{}", std::process::id());
        for name in [dir.path().join("notify").to_str().unwrap(), &abstract_name] {
            let socket = listener(name);
            let limit = Some(Duration::from_secs(3));
            let notifier = Notifier::new(Some(name.into()), limit).unwrap().unwrap();
            let observer = Observer::default();
            let scenario = async {
                tokio::task::yield_now().await;
                assert!(receive(&socket).starts_with("STATUS=not ready: "));
                assert_eq!(receive(&socket), "WATCHDOG=1");
                // Nothing is reloaded before a network runs, and `READY=1` is not sent.
                reload(Some(&notifier), &observer).await;
                let _guard = observer.running(network(Status::default()).await.1);
                observer.note(|facts| facts.subnet_file = true);
                tokio::time::sleep(Duration::from_millis(1400)).await;
                assert!(receive(&socket).starts_with("READY=1\nSTATUS=not ready: "));
                tokio::time::sleep(Duration::from_millis(200)).await;
                assert_eq!(receive(&socket), "WATCHDOG=1");
                reload(Some(&notifier), &observer).await;
                assert!(receive(&socket).starts_with("RELOADING=1\nMONOTONIC_USEC="));
                assert_eq!(receive(&socket), "READY=1");
            };
            tokio::select! {
                never = notifier.inform(&observer) => match never {},
                () = scenario => (),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_status_text_is_updated_without_an_event() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let socket = listener(path.to_str().unwrap());
        socket.set_nonblocking(true).unwrap();
        let notifier = Notifier::new(Some(path.into()), None).unwrap().unwrap();
        let observer = Observer::default();
        let mut status = Status::default();
        status.in_sync = true;
        status.live = true;
        let (sender, rules) = tokio::sync::watch::channel(crate::observe::FirewallRules::Unwanted);
        let (subnets, mut running) = network(status).await;
        observer.opened(std::sync::Arc::new(subnets));
        running.firewall_rules = rules;
        let _guard = observer.running(running);
        observer.note(|facts| facts.subnet_file = true);
        let scenario = async {
            tokio::time::sleep(2 * GAP).await;
            assert_eq!(receive(&socket), "READY=1\nSTATUS=ready: 10.1.1.0-24, 0 peers");
            sender.send_replace(crate::observe::FirewallRules::Pending);
            tokio::time::sleep(2 * REFRESH).await;
            assert_eq!(
                receive(&socket),
                "STATUS=not ready: the firewall rules are not in place yet"
            );
            tokio::time::sleep(10 * REFRESH).await;
            socket.recv(&mut [0; 4096]).unwrap_err();
        };
        tokio::select! {
            never = notifier.inform(&observer) => match never {},
            () = scenario => (),
        }
    }

    #[test]
    fn nothing_is_sent_without_a_socket_and_a_wrong_address_is_an_error() {
        for none in [None, Some("".into())] {
            assert!(Notifier::new(none, None).unwrap().is_none());
        }
        let error = Notifier::new(Some("vsock:2:1".into()), None).unwrap_err().to_string();
        assert!(error.contains("\"vsock:2:1\""), "{error}");
        let zero = Notifier::new(Some("/nowhere".into()), Some(Duration::ZERO)).unwrap().unwrap();
        assert_eq!(zero.alive, None);
    }

    /// The supervisor may read slowly, or never.
    #[test]
    fn a_supervisor_that_does_not_read_does_not_block() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let socket = listener(path.to_str().unwrap());
        let notifier = Notifier::new(Some(path.into()), None).unwrap().unwrap();
        for _ in 0..10_000 {
            notifier.send(&[NotifyState::Watchdog]);
        }
        assert_eq!(receive(&socket), "WATCHDOG=1");
    }
}
