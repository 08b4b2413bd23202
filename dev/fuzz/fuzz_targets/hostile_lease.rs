#![no_main]

use std::time::{Duration, Instant};

#[path = "../hostile.rs"]
mod hostile;

/// The time for the decisions of one input, with the checks of sanitizers.
const BUDGET: Duration = Duration::from_secs(1);

libfuzzer_sys::fuzz_target!(|text: &str| {
    let begin = Instant::now();
    hostile::hostile_lease(text);
    let took = begin.elapsed();
    assert!(took < BUDGET, "{took:?} for {} bytes", text.len());
});
