//! A sandbox for the examples, so that they touch nothing of the machine's own network.

use anyhow::Context;

/// Runs an example in a network namespace of its own that has an uplink `eth0` with `192.0.2.1/24`; as root or as an
/// ordinary user.
///
/// # Errors
/// What the example returns, or what is missing for a namespace.
pub fn in_sandbox<F>(example: impl FnOnce() -> F + Send) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<()>>,
{
    flannel_lab::enter()?;
    let namespace = flannel_lab::Namespace::new("example")?;
    namespace.ip("link set lo up\n\
         link add eth0 type veth peer name wire\n\
         link set wire up\n\
         link set eth0 up\n\
         address add 192.0.2.1/24 dev eth0")?;
    namespace.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.context("a runtime")?.block_on(example())
    })?
}

/// The code in the guide for embedding compiles.
#[cfg(doctest)]
#[doc = include_str!("../../docs/embedding.md")]
struct Embedding;

/// The code in the project's README compiles.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
