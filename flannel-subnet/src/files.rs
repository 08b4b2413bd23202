//! The files of a node: the cache of leases and `subnet.env`.

pub(crate) mod atomic;
pub(crate) mod cache;
pub(crate) mod lock;
pub(crate) mod own;
pub(crate) mod subnet_env;

/// FNV-1a, which detects every change of a single byte.
pub(crate) fn fnv1a(text: &[u8]) -> u64 {
    text.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
