//! Binds a key to the lease that publishes it: signatures of the subnets of the lease, made with
//! the private key of the tunnels. Each family has its own, because a node may see only the subnets
//! of the families that its config enables.
//!
//! The signatures are [XEdDSA](https://signal.org/docs/specifications/xeddsa/), which makes Ed25519
//! signatures with keys of Curve25519. The nonces are made as in Ed25519, without randomness.

use base64::Engine;
use base64::prelude::BASE64_STANDARD as BASE64;
use curve25519_dalek::{EdwardsPoint, MontgomeryPoint, Scalar};
use ed25519_dalek::hazmat::{ExpandedSecretKey, raw_sign};
use ed25519_dalek::{SIGNATURE_LENGTH, Signature, VerifyingKey};
use flannel_core::Subnet;
use flannel_core::json::Fields;
use flannel_core::object::PublicKey;
use sha2::{Digest, Sha512};

use crate::key::KeyPair;

/// What a signed message begins with, so that no other program signs the same message.
const CONTEXT: &str = "flannel wireguard lease\0";
/// What the hash begins with that makes nonces of the private key.
const NONCES: &[u8] = b"flannel wireguard nonces\0";

fn message(subnet: Subnet) -> Vec<u8> {
    format!("{CONTEXT}{subnet}").into_bytes()
}

/// The signature of this subnet, as base64.
pub(crate) fn sign(keys: &KeyPair, subnet: Subnet) -> String {
    let private: [u8; 32] = keys.private.expose().try_into().expect("made of 32 bytes");
    let scalar = Scalar::from_bytes_mod_order(private);
    // A key of Curve25519 stands for two points of Ed25519. XEdDSA uses the point with sign 0.
    let is_negative = EdwardsPoint::mul_base(&scalar).compress().to_bytes()[31] >> 7 == 1;
    let scalar = if is_negative { -scalar } else { scalar };
    let hash: [u8; 64] = Sha512::new().chain_update(NONCES).chain_update(private).finalize().into();
    let mut hash_prefix = [0; 32];
    hash_prefix.copy_from_slice(&hash[..32]);
    let key = ExpandedSecretKey { scalar, hash_prefix };
    let signature = raw_sign::<Sha512>(&key, &message(subnet), &VerifyingKey::from(&key));
    BASE64.encode(signature.to_bytes())
}

/// Whether the backend data has a signature of this subnet by the key.
pub(crate) fn is_signed(data: &str, key: &PublicKey, subnet: Subnet) -> bool {
    let Some(signature) = read(data) else { return false };
    let Some(point) = MontgomeryPoint(key.0).to_edwards(0) else { return false };
    VerifyingKey::from_bytes(point.compress().as_bytes())
        .is_ok_and(|key| key.verify_strict(&message(subnet), &signature).is_ok())
}

fn read(data: &str) -> Option<Signature> {
    let fields = Fields::parse(data, "BackendData").ok()?;
    let text: String = fields.take("Signature", "a signature").ok()??;
    let bytes: [u8; SIGNATURE_LENGTH] = BASE64.decode(text).ok()?.try_into().ok()?;
    Some(Signature::from_bytes(&bytes))
}

#[cfg(test)]
mod tests {
    use flannel_core::backend::MemorySecrets;

    use super::*;
    use crate::key;

    fn subnet() -> Subnet {
        "10.1.7.0/24".parse().unwrap()
    }

    fn data(signature: &str) -> String {
        format!(r#"{{"PublicKey":"unused","Port":1,"Signature":"{signature}"}}"#)
    }

    #[tokio::test]
    async fn only_the_key_of_the_lease_makes_a_valid_signature() {
        let lease = subnet();
        // Half of all keys have a point with sign 1.
        for _ in 0..16 {
            let keys = KeyPair::of(&MemorySecrets::default()).await.unwrap();
            let other = KeyPair::of(&MemorySecrets::default()).await.unwrap();
            let signature = sign(&keys, lease);
            assert_eq!(signature, sign(&keys, lease), "no lease is written again");
            assert!(is_signed(&data(&signature), &keys.public, lease));
            assert!(!is_signed(&data(&signature), &other.public, lease));
            assert!(!is_signed(&data(&sign(&other, lease)), &keys.public, lease));
            let elsewhere = "10.1.8.0/24".parse().unwrap();
            assert!(!is_signed(&data(&signature), &keys.public, elsewhere));
        }
    }

    #[tokio::test]
    async fn what_is_not_a_signature_proves_nothing() {
        let lease = subnet();
        let keys = KeyPair::of(&MemorySecrets::default()).await.unwrap();
        for data in [
            "".to_owned(),
            "{}".to_owned(),
            r#"{"Signature":7}"#.to_owned(),
            data(""),
            data("AAAA"),
            data(&BASE64.encode([0; 64])),
            data(&BASE64.encode([255; 64])),
        ] {
            assert!(!is_signed(&data, &keys.public, lease), "{data}");
        }
        // A point of small order, for which equations hold that do not depend on a private key.
        let zero = BASE64.encode([0; 64]);
        for weak in [PublicKey([0; 32]), PublicKey([255; 32])] {
            assert!(!is_signed(&data(&zero), &weak, lease));
        }
    }

    /// The expected values are from an independent program. The first key has a point with sign 0,
    /// the second one, of RFC 7748, section 6.1, has a point with sign 1.
    #[test]
    fn the_signatures_are_xeddsa() {
        for (private, public, expected) in [
            (
                "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=",
                "j0DFrbaPJWJK5bIU6nZ6bslNgp09e14a0bpvPiE4KF8=",
                "mK4f7yqN1uDKrTg+WNpO+dlvxhzW/BFOewGJcKhkt4H7TGO/cemwr7ASf1vOtvWJOzBsZrcD0Eujf+Si\
                 aDPcDA==",
            ),
            (
                "dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=",
                "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=",
                "M8JOjU0LhPLXkQN1so2ch3/ybA3od2x7XJuHHygaBQfTenqyQScP2NgBl77qLaBdNPt6dp/Xym65CPIu\
                 aMFfAQ==",
            ),
        ] {
            let keys = KeyPair::new(&key::decode(private.as_bytes()).unwrap());
            assert_eq!(keys.public.to_string(), public);
            assert_eq!(sign(&keys, subnet()), expected);
        }
    }
}
