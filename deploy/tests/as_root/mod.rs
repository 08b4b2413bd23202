//! Runs a test with the right to make namespaces, for root and for an ordinary user alike.

use std::process::Command;

/// Set in a process that is root of a user namespace for a test.
const INSIDE: &str = "FLANNEL_DEPLOY_INSIDE_USER_NAMESPACE";

/// Runs `body` here if this process may make namespaces; else runs the test called `name` of this very program
/// again, as root of a user namespace. It fails where that is forbidden.
pub(crate) fn as_root(name: &str, body: impl FnOnce()) {
    if flannel_lab::may_make_namespaces() {
        return body();
    }
    assert!(std::env::var_os(INSIDE).is_none(), "{name}: root of a user namespace may not make namespaces");
    let mut again = Command::new("unshare");
    again.args(["--user", "--map-root-user", "--net", "--"]).arg(std::env::current_exe().unwrap());
    let status = again.args([name, "--exact", "--nocapture"]).env(INSIDE, "1").status();
    let status = status.unwrap_or_else(|error| panic!("`unshare` of util-linux is needed: {error}"));
    assert!(status.success(), "{name}, as root of a user namespace: {status}");
}
