//! Waits for the store, for a config in it and for a free subnet.
//!
//! Each reason is logged once, when it becomes the reason.

use std::pin::pin;
use std::time::Duration;

use flannel_core::subnet::{LastError, LeaseEnd};
use flannel_core::{Lease, SubnetManager, Subnets};
use flannel_subnet::Backoff;
use tokio::time::{Instant, interval_at, sleep};

use crate::error::Error;

/// The pause before a request to a failing store is repeated, while a network runs.
pub(crate) const STORE_AGAIN: Duration = Duration::from_secs(1);
/// The first pause between attempts.
const FIRST: Duration = Duration::from_millis(200);
/// The longest pause between attempts. An attempt may itself wait for a change in the store.
const LONGEST: Duration = Duration::from_secs(3);
/// The time after which a wait for the store is logged.
const SILENCE: Duration = Duration::from_millis(500);

/// A reason for waiting.
#[derive(Debug, PartialEq, Eq)]
enum Reason {
    /// The store does not answer, for any cause.
    Store,
    /// Something else, as text.
    Other(String),
}

/// The reasons in the log. An attempt may be slow because of the store, and then fail for another
/// reason, again and again.
#[derive(Debug, Default, PartialEq, Eq)]
struct Reasons {
    /// The reason of the last attempt that failed.
    last: Option<Reason>,
    /// The last error of the store during a slow attempt.
    slow: Option<String>,
}

/// Errors that are retried in addition to those that pass with time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Patience {
    /// A network has run: all errors of building the next one are retried. A changed password, an
    /// interface without an address or with too small an MTU, or a wrong backend option must not
    /// end a network that works.
    pub(crate) has_run: bool,
    /// Refusals of the store are retried: a cluster that boots may answer before it has loaded all
    /// permissions.
    pub(crate) refusals_pass: bool,
}

/// Repeats `start`, with growing random pauses, until it succeeds or fails with an error that does
/// not pass.
///
/// # Errors
/// The last one.
pub(crate) async fn patiently<T>(
    subnets: &dyn SubnetManager,
    patience: Patience,
    start: impl AsyncFn() -> Result<T, Error>,
) -> Result<T, Error> {
    let mut backoff = Backoff::new(FIRST, LONGEST);
    let mut logged = Reasons::default();
    loop {
        let error = match impatiently(subnets, &mut logged, start()).await {
            Ok(started) => {
                if logged != Reasons::default() {
                    tracing::info!("the wait is over");
                }
                return Ok(started);
            }
            Err(error) => error,
        };
        let text = error.to_string();
        let Some(reason) = reason(&error, patience) else { return Err(error) };
        if logged.failed(reason, &text) {
            backoff.reset();
        }
        sleep(backoff.pause()).await;
    }
}

/// Does `work`, and holds the lease meanwhile. Otherwise the node would lose its subnets during
/// long work, or not notice that it has lost them.
///
/// # Errors
/// The errors of `work`, and [`Error::LeaseLost`].
pub(crate) async fn holding<T>(
    subnets: &dyn SubnetManager,
    held: Option<&Lease>,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let lost = async {
        if let Some(held) = held
            && let Err(error @ Error::LeaseLost { .. }) = hold(subnets, held).await
        {
            return error;
        }
        // If this node has other subnets now, or the store refuses, `work` finds that out.
        std::future::pending().await
    };
    tokio::select! {
        biased;
        done = work => done,
        error = lost => Err(error),
    }
}

/// Keeps a lease until this node has another one. Returns its subnets.
///
/// # Errors
/// [`Error::LeaseLost`], or the lease cannot be kept.
pub(crate) async fn hold(subnets: &dyn SubnetManager, held: &Lease) -> Result<Subnets, Error> {
    match subnets.hold_lease(held).await? {
        LeaseEnd::Moved { to } => Ok(to),
        end => Err(Error::LeaseLost { subnets: held.subnets.into(), end: end.into() }),
    }
}

/// Makes one attempt. Logs the error of the store if the attempt takes longer than [`SILENCE`].
async fn impatiently<T>(
    subnets: &dyn SubnetManager,
    logged: &mut Reasons,
    attempt: impl Future<Output = T>,
) -> T {
    let mut attempt = pin!(attempt);
    let mut silence = interval_at(Instant::now() + SILENCE, SILENCE);
    loop {
        tokio::select! {
            done = &mut attempt => return done,
            _ = silence.tick() => {
                if let Some(LastError { text, .. }) = subnets.store_status().last_error {
                    logged.is_slow(text);
                }
            }
        }
    }
}

impl Reasons {
    /// Logs the error of the store during a slow attempt, unless the log has it already.
    fn is_slow(&mut self, text: String) {
        let known = match &self.last {
            Some(Reason::Store) => true,
            // After an attempt with this answer, a slow new attempt has the same reason.
            Some(Reason::Other(last)) => last.contains(&text),
            // The error of a slow attempt changes while members of the store come back.
            None => self.slow.is_some(),
        };
        if !known && self.slow.as_ref() != Some(&text) {
            tracing::warn!(reason = %text, "waiting for the store");
            self.slow = Some(text);
        }
    }

    /// Logs the reason of an attempt that failed, and returns true, if it is a new one.
    fn failed(&mut self, reason: Reason, text: &str) -> bool {
        let new = self.last.as_ref() != Some(&reason);
        if new {
            match reason {
                // Logged while the attempt was slow.
                Reason::Store if self.slow.is_some() => {}
                Reason::Store => tracing::warn!(reason = %text, "waiting for the store"),
                Reason::Other(_) => tracing::warn!(reason = %text, "waiting"),
            }
            self.last = Some(reason);
        }
        new
    }
}

/// The reason for waiting after an error, or `None` if the error does not pass.
fn reason(error: &Error, patience: Patience) -> Option<Reason> {
    use flannel_core::Error as Cause;

    let Patience { has_run, refusals_pass } = patience;
    let other = || Some(Reason::Other(error.to_string()));
    match error {
        Error::Network(Cause::Store { .. }) => Some(Reason::Store),
        Error::Network(
            Cause::NoConfig { .. }
            | Cause::Config { .. }
            | Cause::OutOfSubnets { .. }
            | Cause::NotReady { .. }
            | Cause::Conflict { .. },
        ) => other(),
        Error::Network(Cause::Refused { .. }) if refusals_pass => other(),
        // The network itself has ended, so it cannot be kept.
        Error::LeaseLost { .. } | Error::Stopped(_) => None,
        // The running network does not end for a next one that cannot be built.
        _ if has_run => other(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

    use std::cell::Cell;

    use flannel_backends::UnknownBackend;
    use flannel_core::Error as Cause;
    use flannel_core::lease::LeaseAttrs;
    use flannel_core::testing::FakeSubnets;

    use super::*;

    const START: Patience = Patience { has_run: false, refusals_pass: false };
    const RUNS: Patience = Patience { has_run: true, refusals_pass: false };

    fn refused() -> Cause {
        Cause::Refused { store: "store".into(), reason: "no".into() }
    }

    fn lost() -> Cause {
        Cause::Store { store: "store".into(), source: "gone".into() }
    }

    #[tokio::test(start_paused = true)]
    async fn transient_errors_are_retried_with_growing_pauses() {
        let subnets = FakeSubnets::new("10.1.0.0/16");
        let family = flannel_core::address::Family::V4;
        for cause in [
            lost as fn() -> Cause,
            || Cause::NoConfig { location: "key".into() },
            || Cause::OutOfSubnets { family: flannel_core::address::Family::V4, total: 1 },
            || Cause::NotReady { store: "store".into(), reason: "no PodCIDR".into() },
        ] {
            let begin = Instant::now();
            let attempts = Cell::new(0);
            let start = async || {
                attempts.set(attempts.get() + 1);
                if attempts.get() <= 20 { Err(Error::Network(cause())) } else { Ok(family) }
            };
            assert_eq!(patiently(&subnets, START, start).await.unwrap(), family);
            let waited = begin.elapsed();
            assert!(waited > Duration::from_secs(20) && waited < 20 * LONGEST, "{waited:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn errors_that_need_a_correction_end_a_start_and_are_retried_after_a_network_has_run() {
        let subnets = FakeSubnets::new("10.1.0.0/16");
        let unfit = || Error::UnfitInterface { name: "eth0".parse().unwrap(), reason: "no".into() };
        let too_small =
            || Cause::Backend { backend: "vxlan".into(), reason: "too small".into() }.into();
        let unknown =
            || Error::UnknownBackend(UnknownBackend { kind: "a".into(), known: "b".into() });
        let subnets_of = "10.1.7.0-24".parse().unwrap();
        let implicit = || Error::ImplicitUdp { subnets: Box::new(subnets_of), holder: "a".into() };
        let no_rules = || flannel_firewall::Error::Leftovers { chains: "a".into() }.into();
        let not_allowed = || Error::CommandsNotAllowed { kind: "extension" };
        let no_snapshot = || Error::Kernel(flannel_core::kernel::KernelError::new(105));
        let causes: [&dyn Fn() -> Error; 8] = [
            &|| refused().into(),
            &unfit,
            &too_small,
            &unknown,
            &implicit,
            &no_rules,
            &not_allowed,
            &no_snapshot,
        ];
        for cause in causes {
            let begin = Instant::now();
            patiently(&subnets, START, async || -> Result<(), Error> { Err(cause()) })
                .await
                .unwrap_err();
            assert_eq!(begin.elapsed(), Duration::ZERO);
            patiently(&subnets, RUNS, async || match begin.elapsed().as_secs() {
                ..60 => Err(cause()),
                _ => Ok(()),
            })
            .await
            .unwrap();
        }
        patiently(&subnets, RUNS, async || -> Result<(), Error> {
            Err(Error::Stopped("it".into()))
        })
        .await
        .unwrap_err();
    }

    #[tokio::test(start_paused = true)]
    async fn refusals_by_a_booting_cluster_are_retried_and_other_errors_are_not() {
        let subnets = FakeSubnets::new("10.1.0.0/16");
        let begin = Instant::now();
        let booting = Patience { refusals_pass: true, ..START };
        patiently(&subnets, booting, async || match begin.elapsed().as_secs() {
            ..60 => Err(refused().into()),
            _ => Ok(()),
        })
        .await
        .unwrap();
        let wrong =
            || Cause::Backend { backend: "vxlan".into(), reason: "too small".into() }.into();
        patiently(&subnets, booting, async || -> Result<(), Error> { Err(wrong()) })
            .await
            .unwrap_err();
    }

    /// A manager with the status of a store whose last answer was a refusal.
    #[derive(Debug)]
    struct Refusing(FakeSubnets);

    #[async_trait::async_trait]
    impl SubnetManager for Refusing {
        async fn network_config(&self) -> flannel_core::Result<flannel_core::Config> {
            self.0.network_config().await
        }

        async fn acquire_lease(&self, attrs: &LeaseAttrs) -> flannel_core::Result<Lease> {
            self.0.acquire_lease(attrs).await
        }

        async fn publish(&self, held: &Lease, attrs: &LeaseAttrs) -> flannel_core::Result<Lease> {
            self.0.publish(held, attrs).await
        }

        async fn hold_lease(&self, held: &Lease) -> flannel_core::Result<LeaseEnd> {
            self.0.hold_lease(held).await
        }

        async fn watch_leases(
            &self,
        ) -> flannel_core::Result<tokio::sync::watch::Receiver<flannel_core::lease::View>> {
            self.0.watch_leases().await
        }

        fn ownership(&self) -> tokio::sync::watch::Receiver<flannel_core::subnet::Ownership> {
            self.0.ownership()
        }

        fn store_status(&self) -> flannel_core::subnet::StoreStatus {
            let last_error = Some(LastError {
                text: "no".to_owned(),
                failure: flannel_core::subnet::StoreFailure::Other,
                at: std::time::SystemTime::now(),
            });
            self.0.store_status().with_last_error(last_error)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_refusal_is_not_logged_as_another_reason() {
        let subnets = Refusing(FakeSubnets::new("10.1.0.0/16"));
        let refusal = Some(Reason::Other(refused().to_string()));
        let elsewhere = Some(Reason::Other("elsewhere".into()));
        for (last, is_new) in
            [(refusal, false), (Some(Reason::Store), false), (None, true), (elsewhere, true)]
        {
            let mut logged = Reasons { last, slow: None };
            impatiently(&subnets, &mut logged, sleep(2 * SILENCE)).await;
            assert_eq!(logged.slow.is_some(), is_new, "{logged:?}");
        }
    }

    /// As if a node has no PodCIDR, and may not list nodes.
    #[tokio::test(start_paused = true)]
    async fn an_error_of_a_slow_store_and_another_reason_are_logged_once_each() {
        let lines = test_support::Logged::default();
        let attempts = Cell::new(0);
        let _guard = tracing::subscriber::set_default(lines.clone());
        let subnets = Refusing(FakeSubnets::new("10.1.0.0/16"));
        patiently(&subnets, START, async || {
            sleep(3 * SILENCE).await;
            attempts.set(attempts.get() + 1);
            let not_ready =
                || Cause::NotReady { store: "store".into(), reason: "PodCIDR".into() }.into();
            if attempts.get() <= 5 { Err(not_ready()) } else { Ok(()) }
        })
        .await
        .unwrap();
        let waits = ["waiting for the store reason=no", "waiting reason=store: PodCIDR"];
        assert_eq!(waits.map(|text| lines.count(text)), [1, 1], "{:?}", lines.warnings());
        assert_eq!(lines.warnings().len(), 2, "{:?}", lines.warnings());
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_is_held_during_other_work() {
        let subnets = FakeSubnets::new("10.1.0.0/16");
        let lasting = subnets.acquire_lease(&LeaseAttrs::default()).await.unwrap();
        let lease = Lease { expires: Some(std::time::SystemTime::now()), ..lasting.clone() };
        let work = || async {
            sleep(LONGEST).await;
            Ok(7)
        };
        for held in [None, Some(&lease), Some(&lasting)] {
            assert_eq!(holding(&subnets, held, work()).await.unwrap(), 7);
        }
        subnets.end_leases(LeaseEnd::Moved { to: lease.subnets });
        assert_eq!(holding(&subnets, Some(&lease), work()).await.unwrap(), 7);
        subnets.end_leases(LeaseEnd::Deleted);
        for held in [&lease, &lasting] {
            let lost = holding(&subnets, Some(held), work()).await;
            assert!(matches!(lost, Err(Error::LeaseLost { .. })), "{lost:?}");
        }
        assert_eq!(holding(&subnets, None, work()).await.unwrap(), 7);
    }

    #[test]
    fn a_reason_is_logged_once_and_a_lost_store_is_one_reason() {
        let mut logged = Reasons::default();
        let mut log = |cause: Cause| {
            let error = Error::Network(cause);
            logged.failed(reason(&error, START).unwrap(), &error.to_string())
        };
        let none = |key: &str| Cause::NoConfig { location: key.into() };
        let other = Cause::Store { store: "store".into(), source: "other words".into() };
        assert_eq!(
            [lost(), other, none("a"), none("a"), none("b"), lost()].map(&mut log),
            [true, false, true, false, true, true]
        );
    }
}
