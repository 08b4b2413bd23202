//! Keys of Curve25519.

use std::io;
use std::path::Path;

use base64::Engine;
use base64::prelude::BASE64_STANDARD as BASE64;
use curve25519_dalek::MontgomeryPoint;
use flannel_core::backend::Secrets;
use flannel_core::object::{PublicKey, Secret};

/// The name of the private key among the secrets of the node. Its content is base64.
pub const SECRET: &str = "wireguard-key";

/// The keys of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KeyPair {
    pub(crate) private: Secret,
    pub(crate) public: PublicKey,
}

impl KeyPair {
    /// The keys of this node. They are made if there are none.
    ///
    /// **Source**: flannel `pkg/backend/wireguard/device.go: setupKeys`, for the form of the key.
    pub(crate) async fn of(secrets: &dyn Secrets) -> io::Result<Self> {
        let make = || {
            let mut key = [0; 32];
            getrandom::fill(&mut key).map_err(io::Error::from)?;
            Ok(Secret::new(BASE64.encode(clamp(key)).into_bytes()))
        };
        let text = secrets.get_or_create(SECRET, &make).await?;
        let private = decode(text.expose()).ok_or_else(|| {
            let reason =
                format!("the secret {SECRET} is not 32 bytes as base64, as from wg genkey");
            io::Error::new(io::ErrorKind::InvalidData, reason)
        })?;
        Ok(Self::new(&private))
    }

    pub(crate) fn new(private: &Secret) -> Self {
        let bytes: [u8; 32] = private.expose().try_into().expect("decoded as 32 bytes");
        // The kernel clamps the key. A key that is not clamped would never be in place.
        let key = clamp(bytes);
        let public = PublicKey(MontgomeryPoint::mul_base_clamped(key).to_bytes());
        Self { private: Secret::new(key), public }
    }
}

/// Sets the bits that all private keys have in common (RFC 7748, section 5).
fn clamp(mut key: [u8; 32]) -> [u8; 32] {
    key[0] &= 248;
    key[31] = key[31] & 127 | 64;
    key
}

/// Decodes 32 bytes from base64, which white space may follow. Returns `None` for any other text.
pub(crate) fn decode(text: &[u8]) -> Option<Secret> {
    let bytes = BASE64.decode(text.trim_ascii_end()).ok()?;
    (bytes.len() == 32).then(|| Secret::new(bytes))
}

/// Whether a text is a key: 32 bytes as base64, which white space may follow.
pub fn is_key(text: &[u8]) -> bool {
    decode(text).is_some()
}

/// Reads the key that all nodes share from a file.
pub(crate) fn read(path: &Path) -> Result<Secret, String> {
    let content = std::fs::read(path)
        .map_err(|error| format!("Backend.PSKFile: {}: {error}", path.display()))?;
    let expected = "expected 32 bytes as base64, from `wg genpsk`";
    decode(&content).ok_or_else(|| format!("Backend.PSKFile: {}: {expected}", path.display()))
}

#[cfg(test)]
mod tests {
    use flannel_core::backend::MemorySecrets;

    use super::*;

    #[tokio::test]
    async fn keys_are_made_once_and_are_clamped() {
        let secrets = MemorySecrets::default();
        let keys = KeyPair::of(&secrets).await.unwrap();
        assert_eq!(KeyPair::of(&secrets).await.unwrap(), keys);
        let stored = secrets.get_or_create(SECRET, &|| panic!("it exists")).await.unwrap();
        assert_eq!(stored.expose().len(), 44, "as Go flannel writes it");
        assert_ne!(KeyPair::of(&MemorySecrets::default()).await.unwrap(), keys);
        let bytes = keys.private.expose();
        assert_eq!(bytes[0] & 7, 0);
        assert_eq!(bytes[31] & 192, 64);
    }

    #[tokio::test]
    async fn a_key_of_another_program_is_used() {
        let secrets = MemorySecrets::default();
        // RFC 7748, section 6.1. The key is not clamped.
        let alice = "dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=\n";
        let make = || Ok(Secret::new(alice.as_bytes()));
        secrets.get_or_create(SECRET, &make).await.unwrap();
        let keys = KeyPair::of(&secrets).await.unwrap();
        assert_eq!(keys.public.to_string(), "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=");
        assert_eq!(keys.private.expose()[0], 0x70);

        let secrets = MemorySecrets::default();
        secrets.get_or_create(SECRET, &|| Ok(Secret::new(*b"hunter2"))).await.unwrap();
        let error = KeyPair::of(&secrets).await.unwrap_err().to_string();
        assert!(error.contains(SECRET) && !error.contains("hunter2"), "{error}");
    }

    #[test]
    fn a_shared_key_is_read_from_a_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n").unwrap();
        assert_eq!(read(file.path()).unwrap().expose()[31], 31);
        std::fs::write(&file, "hunter2").unwrap();
        let error = read(file.path()).unwrap_err();
        assert!(error.contains("expected 32 bytes") && !error.contains("hunter2"), "{error}");
        assert!(read(Path::new("/nonexistent/psk")).unwrap_err().contains("/nonexistent/psk"));
    }
}
