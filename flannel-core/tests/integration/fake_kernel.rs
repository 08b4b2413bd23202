//! The fake kernel passes the suite that the real kernel passes.

use flannel_core::testing::{FakeKernel, Fixture, kernel_suite};

#[tokio::test]
async fn fake_kernel_passes_the_kernel_suite() {
    let kernel = FakeKernel::with_uplink("eth0");
    let other = kernel.other();
    kernel_suite(&Fixture { kernel: &kernel, other: &other, uplink: "eth0".parse().unwrap() })
        .await;
}
