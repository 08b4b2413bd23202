//! Fakes of the traits in this crate, and a test suite for implementations of `Kernel`.
//!
//! A fake has state, as the real implementation has. Use a fake to test results. To test which
//! calls a function makes, mock the trait instead.

mod diff;
mod fake_kernel;
mod fake_subnets;
mod kernel_suite;
mod objects;

pub use diff::diff;
pub use fake_kernel::{Call, FakeKernel, Operation};
pub use fake_subnets::FakeSubnets;
pub use kernel_suite::{Fixture, kernel_suite};
pub use objects::any_object;
