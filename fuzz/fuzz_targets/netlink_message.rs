#![no_main]

libfuzzer_sys::fuzz_target!(|datagram: &[u8]| {
    // Checks by itself that what is read is what would be written.
    flannel_netlink::testing::decode(datagram);
});
