#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // It checks that the datagrams have the bytes of the packet.
    flannel_udp::testing::send(bytes);
});
