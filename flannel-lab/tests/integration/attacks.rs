//! Attacks on a cluster, with packets made by hand.

mod paths;
