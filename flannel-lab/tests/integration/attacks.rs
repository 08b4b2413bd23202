//! Attacks on a running network. Its healthy nodes lose no packet, answer at once, and need little
//! more memory.

mod paths;
mod udp;
