//! Secrets of a node.

use std::collections::HashMap;
use std::sync::Mutex;
use std::{fmt, io};

use async_trait::async_trait;

use crate::object::Secret;
use crate::runtime::lock;

/// Makes a new secret, for example from random bytes.
pub type MakeSecret<'a> = dyn Fn() -> io::Result<Secret> + Send + Sync + 'a;

/// The secrets of this node, such as the private key of its tunnel device.
#[doc = include_str!("../../docs/secrets.md")]
#[async_trait]
pub trait Secrets: fmt::Debug + Send + Sync {
    /// The secret with this name, which consists of lower case letters, digits and `-`. If the node
    /// has none, `make` makes it, and it is stored before this returns.
    ///
    /// # Errors
    /// The secret cannot be read, made or stored, or the name is not of that form.
    ///
    /// # Cancel safety
    /// If the future is dropped, the secret may have been stored. The next call returns it.
    async fn get_or_create(&self, name: &str, make: &MakeSecret<'_>) -> io::Result<Secret>;
}

/// Secrets that are kept in memory only.
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
