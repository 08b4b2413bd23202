#![no_main]

libfuzzer_sys::fuzz_target!(|datagram: &[u8]| {
    // It checks that a decoded peer is the same after encoding and decoding.
    flannel_netlink::testing::decode_wireguard(datagram);
});
