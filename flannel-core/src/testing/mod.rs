//! Fakes of the traits in this crate, and the suites that fakes and real implementations both pass.
//!
//! A fake holds state and behaves; use it for tests of results. For tests of calls, mock the trait.

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
