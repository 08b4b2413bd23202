//! Runs a test with the right to make namespaces, for root and for an ordinary user alike.

use std::process::Command;

/// Runs `body` here if this process may make namespaces; else runs the test called `name` of this very program
/// again, as root of a user namespace. It fails where that is forbidden, and the lab's message says why.
pub(crate) fn as_root(name: &str, body: impl FnOnce()) {
    if flannel_lab::may_make_namespaces() {
        return body();
    }
    let this = std::env::current_exe().unwrap();
    let mut again = Command::new(env!("CARGO_BIN_EXE_lab"));
    let status = again.arg("enter").arg(this).args([name, "--exact", "--nocapture"]).status().unwrap();
    assert!(status.success(), "{name}, as root of a user namespace: {status}");
}
