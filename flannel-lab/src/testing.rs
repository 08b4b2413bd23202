//! For tests that need namespaces, whoever runs them.

use std::process::Command;

use crate::may_make_namespaces;

/// Set in a process that is root of a user namespace for a test.
const INSIDE: &str = "FLANNEL_LAB_INSIDE_USER_NAMESPACE";

/// Runs `body` here if this process may make namespaces; else runs the test called `name` of this very program again,
/// as root of a user namespace, with util-linux's `unshare`.
///
/// # Panics
/// The test fails, also where an ordinary user may make no user namespaces: it is never passed over.
pub fn as_root(name: &str, body: impl FnOnce()) {
    if may_make_namespaces() {
        return body();
    }
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
