//! Secrets of a node.

use std::collections::HashMap;
use std::sync::Mutex;
use std::{fmt, io};

use async_trait::async_trait;

use crate::object::Secret;
use crate::runtime::lock;

/// Creates a secret, for example from random bytes.
pub type MakeSecret<'a> = dyn Fn() -> io::Result<Secret> + Send + Sync + 'a;

/// The secrets of this node, such as the private key of its tunnel device.
#[doc = include_str!("../../docs/secrets.md")]
#[async_trait]
pub trait Secrets: fmt::Debug + Send + Sync {
    /// The secret with this name, which consists of lower case letters, digits and `-`. If the node
    /// has no such secret, `make` creates it, and it is stored before this method returns.
    ///
    /// # Errors
    /// The secret cannot be read, created or stored, or the name has another character.
    ///
    /// # Cancel safety
    /// If the future is dropped, the secret may have been stored. The next call returns it.
    async fn get_or_create(&self, name: &str, make: &MakeSecret<'_>) -> io::Result<Secret>;
}

/// Secrets in memory. They are lost when the process ends.
#[derive(Debug, Default)]
pub struct MemorySecrets(Mutex<HashMap<String, Secret>>);

#[async_trait]
impl Secrets for MemorySecrets {
    async fn get_or_create(&self, name: &str, make: &MakeSecret<'_>) -> io::Result<Secret> {
        let mut secrets = lock(&self.0);
        if let Some(secret) = secrets.get(name) {
            return Ok(secret.clone());
        }
        let secret = make()?;
        secrets.insert(name.to_owned(), secret.clone());
        Ok(secret)
    }
}
