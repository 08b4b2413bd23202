//! Helpers that the tests of several crates use.
//!
//! [`eventually`] and [`eventually_async`] wait until a condition holds, and panic after a deadline
//! with the place of the call and a message. A condition is a `bool`, or an `Option` whose value
//! is returned. [`Logged`] collects the log. [`write_script`] writes a program. [`receive_from`]
//! receives a datagram. [`guest`] runs a test in a kernel of its own. [`mod@unit`] has the
//! restrictions of the systemd unit. [`forge`] sends forged ICMP messages. [`packet`] makes packets
//! of UDP and of vxlan. [`v1_certificate`] is a client certificate of X.509 v1.
//!
//! ```
//! use std::time::{Duration, Instant};
//! use test_support::eventually;
//!
//! let start = Instant::now();
//! eventually(Duration::from_secs(10), || start.elapsed().as_millis() > 5, || "too early");
//! let mut numbers = 0..;
//! let found = eventually(
//!     Duration::from_secs(10),
//!     || numbers.next().filter(|number| *number == 3),
//!     || "3 is not among the numbers",
//! );
//! assert_eq!(found, 3);
//! ```

pub mod forge;
pub mod guest;
mod logged;
pub mod packet;
pub mod unit;
pub mod v1_certificate;

use std::fmt::Display;
use std::future::Future;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::panic::Location;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

pub use logged::{Collecting, Logged};

/// The pause between two checks of a condition.
const PAUSE: Duration = Duration::from_millis(5);

/// The result of one check of a condition.
pub trait Outcome {
    /// The result of the wait.
    type Value;

    /// The value, if the condition holds.
    fn value(self) -> Option<Self::Value>;
}

impl Outcome for bool {
    type Value = ();

    fn value(self) -> Option<()> {
        self.then_some(())
    }
}

impl<T> Outcome for Option<T> {
    type Value = T;

    fn value(self) -> Self {
        self
    }
}

/// Writes a shell script that can be executed at once. Another process writes it: the kernel
/// executes no file that is open for writing, and a child that another thread starts meanwhile
/// would have the file open.
///
/// # Panics
/// The file cannot be written.
pub fn write_script(path: &Path, text: &str) {
    let write = "printf '%s' \"$2\" >\"$1\" && chmod 755 \"$1\"";
    let status = Command::new("sh").args(["-c", write, "-"]).arg(path).arg(text).status();
    assert!(status.is_ok_and(|status| status.success()), "{}", path.display());
}

/// Receives a datagram, also if a child of this process ends meanwhile: a signal interrupts calls
/// that have a timeout.
///
/// # Errors
/// The call failed, or the timeout of the socket passed.
pub fn receive_from(socket: &UdpSocket, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
    loop {
        match socket.recv_from(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Waits until `condition` holds. Checks it at least once, and blocks the thread in between.
///
/// # Panics
/// The condition does not hold `within` this time. The message is the text of `otherwise`.
#[track_caller]
pub fn eventually<T: Outcome, M: Display>(
    within: Duration,
    mut condition: impl FnMut() -> T,
    otherwise: impl FnOnce() -> M,
) -> T::Value {
    let start = Instant::now();
    loop {
        if let Some(value) = condition().value() {
            return value;
        }
        if start.elapsed() >= within {
            panic!("not within {within:?}: {}", otherwise());
        }
        std::thread::park_timeout(PAUSE);
    }
}

/// Waits until a condition holds that is a future. Time is tokio's, so that a test may pause it.
///
/// # Panics
/// The condition does not hold `within` this time. The message is the text of `otherwise`. A check
/// that does not return is not interrupted.
#[track_caller]
pub fn eventually_async<T: Outcome, M: Display>(
    within: Duration,
    mut condition: impl AsyncFnMut() -> T,
    otherwise: impl FnOnce() -> M,
) -> impl Future<Output = T::Value> {
    let caller = Location::caller();
    async move {
        let start = tokio::time::Instant::now();
        loop {
            if let Some(value) = condition().await.value() {
                return value;
            }
            if start.elapsed() >= within {
                panic!("{caller}: not within {within:?}: {}", otherwise());
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "not within 20ms: the answer was 7")]
    fn a_timeout_panics_with_the_message() {
        eventually(Duration::from_millis(20), || false, || format!("the answer was {}", 7));
    }

    #[tokio::test(start_paused = true)]
    async fn the_value_of_a_later_check_is_returned() {
        let mut checks = 0;
        let check = async || {
            checks += 1;
            (checks == 1000).then_some("now")
        };
        assert_eq!(eventually_async(Duration::from_secs(60), check, || "never").await, "now");
        assert_eq!(checks, 1000);
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "src/lib.rs")]
    async fn a_timeout_names_the_place_of_the_call() {
        eventually_async(Duration::from_secs(60), async || false, || "it never holds").await;
    }
}
