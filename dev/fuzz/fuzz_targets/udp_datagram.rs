#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // It checks that joined packets are those that arrived.
    flannel_udp::testing::receive(bytes);
});
