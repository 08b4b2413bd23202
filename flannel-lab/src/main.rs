//! A cluster on one machine.
fn main() {}
