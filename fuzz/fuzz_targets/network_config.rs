#![no_main]

#[path = "../properties.rs"]
#[allow(dead_code, reason = "each target checks one of them")]
mod properties;

libfuzzer_sys::fuzz_target!(|text: &str| {
    properties::network_config(text);
});
