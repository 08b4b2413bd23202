//! Helpers for tests that need namespaces, as root or as an ordinary user, and streams of packets.

pub mod stream;

use std::process::Command;

use flannel_netlink::testing::test_name;

use crate::may_make_namespaces;

/// Set in a process that is root of a user namespace for a test.
const INSIDE: &str = "FLANNEL_LAB_INSIDE_USER_NAMESPACE";

/// Runs `body` if this process may make namespaces. Otherwise runs this test again as root of a
/// user namespace, with `unshare` of util-linux. The call must be the only statement of the test.
///
/// # Panics
/// The test fails, or user namespaces are forbidden. A test is never skipped.
pub fn as_root<F: FnOnce()>(body: F) {
    if may_make_namespaces() {
        return body();
    }
    let name = &test_name::<F>();
    // The name of another function than the test would run nothing, without an error.
    assert!(std::any::type_name::<F>().ends_with("{{closure}}"), "give `as_root` a closure");
    assert!(
        std::env::var_os(INSIDE).is_none(),
        "{name}: root of a user namespace may not make namespaces"
    );
    let this = std::env::current_exe().expect("a running program has a path");
    let mut again = Command::new("unshare");
    again.args(["--user", "--map-root-user", "--net", "--"]).arg(this);
    let status = again.args([name, "--exact", "--nocapture"]).env(INSIDE, "1").status();
    let status =
        status.unwrap_or_else(|error| panic!("`unshare` of util-linux is needed: {error}"));
    assert!(status.success(), "{name}, as root of a user namespace: {status}");
}
