//! The flannel daemon.
fn main() {}
