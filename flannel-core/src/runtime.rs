//! Blocking work in async functions.

/// Runs `work` on a blocking thread of tokio. Dropping the future does not stop work that has
/// begun. If the runtime shuts down before the work begins, the future never ends.
///
/// # Panics
/// `work` panics, or there is no tokio runtime.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await.map_err(tokio::task::JoinError::try_into_panic) {
        Ok(done) => done,
        Err(Ok(panic)) => std::panic::resume_unwind(panic),
        Err(Err(_)) => std::future::pending().await,
    }
}
