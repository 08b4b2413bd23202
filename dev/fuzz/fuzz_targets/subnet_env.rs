#![no_main]

#[path = "../properties.rs"]
#[allow(dead_code, reason = "each target uses one function")]
mod properties;

libfuzzer_sys::fuzz_target!(|text: &str| {
    properties::subnet_env(text);
});
