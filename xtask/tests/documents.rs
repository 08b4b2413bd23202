//! All texts of the repository pass the checks: language, links, generated parts.

use std::process::Command;

#[test]
fn all_texts_pass_the_checks() {
    let check = Command::new(env!("CARGO_BIN_EXE_xtask")).arg("check").output();
    let output = check.unwrap_or_else(|error| panic!("xtask: {error}"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
