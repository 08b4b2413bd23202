#![no_main]

libfuzzer_sys::fuzz_target!(|datagram: &[u8]| {
    // It checks that a decoded object is the same after encoding and decoding.
    flannel_netlink::testing::decode(datagram);
});
