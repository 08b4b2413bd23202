//! Handshakes in memory: which servers a client accepts, and what it says about others.

#![allow(clippy::unwrap_used, reason = "test helpers are test code")]

use std::sync::Arc;

use flannel_tls::{Error, Identity, Pem, Refusal, Trust, client_config};
use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, GeneralSubtree, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, NameConstraints, date_time_ymd,
};
use rustls::crypto::ring;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConnection, ServerConfig, ServerConnection};

/// The names of the servers of this test.
const NAMES: [&str; 2] = ["etcd.example", "192.0.2.1"];

/// A certificate, its key, and itself as an issuer.
struct Certified {
    pem: String,
    key: String,
    issuer: Issuer<'static, KeyPair>,
}

fn params(names: &[&str]) -> CertificateParams {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names).unwrap();
    params.not_before = date_time_ymd(2000, 1, 1);
    params.not_after = date_time_ymd(2100, 1, 1);
    params
}

fn ca() -> CertificateParams {
    let mut params = params(&[]);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let name = format!("ca {}", number());
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    params
}

/// A number that no other CA of this process has.
fn number() -> u32 {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn certify(params: CertificateParams, issuer: Option<&Certified>) -> Certified {
    let key = KeyPair::generate().unwrap();
    let certificate = match issuer {
        Some(issuer) => params.signed_by(&key, &issuer.issuer),
        None => params.self_signed(&key),
    };
    let (pem, serialized) = (certificate.unwrap().pem(), key.serialize_pem());
    Certified { pem, key: serialized, issuer: Issuer::new(params, key) }
}

fn pem(name: &str, text: &str) -> Pem {
    Pem { name: name.to_owned(), text: text.as_bytes().to_vec() }
}

/// The outcome of a handshake with the server `name`, which presents `chain`, for a client that
/// trusts the certificates in `trusted`.
fn handshake(server: &Certified, chain: &str, trust: Trust, name: &str) -> Result<(), Refusal> {
    let provider = Arc::new(ring::default_provider());
    let chain = rustls::pki_types::CertificateDer::pem_slice_iter(chain.as_bytes())
        .collect::<Result<Vec<_>, _>>()
        .unwrap();
    let key = PrivateKeyDer::from_pem_slice(server.key.as_bytes()).unwrap();
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    let mut server = ServerConnection::new(Arc::new(config)).unwrap();
    let config = client_config(trust, None).unwrap();
    let name = name.to_owned().try_into().unwrap();
    let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
    while client.is_handshaking() || server.is_handshaking() {
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).unwrap();
        server.read_tls(&mut bytes.as_slice()).unwrap();
        server.process_new_packets().unwrap();
        let mut bytes = Vec::new();
        server.write_tls(&mut bytes).unwrap();
        client.read_tls(&mut bytes.as_slice()).unwrap();
        // As in a real client, the error of TLS is inside an I/O error.
        client.process_new_packets().map_err(|error| {
            let error = std::io::Error::other(std::io::Error::other(error));
            Refusal::find(&error).unwrap_or_else(|| panic!("{error}"))
        })?;
    }
    Ok(())
}

fn trust(ca: &str) -> Trust {
    Trust::of(&pem("ca.pem", ca)).unwrap()
}

#[test]
fn a_certificate_in_the_ca_file_is_trusted_itself() {
    let root = certify(ca(), None);
    let intermediate = certify(ca(), Some(&root));
    let leaf = certify(params(&NAMES), Some(&intermediate));
    let self_signed = certify(params(&NAMES), None);
    let mut of_ca = ca();
    of_ca.subject_alt_names = params(&NAMES).subject_alt_names;
    let self_signed_ca = certify(of_ca.clone(), None);
    let issued_ca = certify(of_ca, Some(&root));
    let mut any = params(&NAMES);
    any.extended_key_usages = vec![ExtendedKeyUsagePurpose::Any];
    let any_purpose = certify(any, Some(&root));
    let chain = format!("{}{}", leaf.pem, intermediate.pem);
    for (case, server, chain, ca) in [
        ("its CA", &leaf, &chain, &root.pem),
        ("an intermediate", &leaf, &leaf.pem, &intermediate.pem),
        ("itself, issued", &leaf, &leaf.pem, &leaf.pem),
        ("itself, with its chain", &leaf, &chain, &leaf.pem),
        ("itself, self-signed", &self_signed, &self_signed.pem, &self_signed.pem),
        ("itself, a CA", &self_signed_ca, &self_signed_ca.pem, &self_signed_ca.pem),
        ("itself, an issued CA", &issued_ca, &issued_ca.pem, &issued_ca.pem),
        ("a CA, of its CA", &issued_ca, &issued_ca.pem, &root.pem),
        ("any purpose", &any_purpose, &any_purpose.pem, &root.pem),
    ] {
        // Others before it change nothing.
        for ca in [ca.clone(), format!("{}{ca}", certify(self::ca(), None).pem)] {
            for name in NAMES {
                assert_eq!(handshake(server, chain, trust(&ca), name), Ok(()), "{case}: {name}");
            }
            let refused = handshake(server, chain, trust(&ca), "192.0.2.2").unwrap_err();
            assert!(refused.to_string().contains("for another name"), "{case}: {refused}");
        }
    }
}

#[test]
fn a_certificate_in_the_ca_file_is_verified() {
    let root = certify(ca(), None);
    let mut expired = params(&NAMES);
    expired.not_after = date_time_ymd(2001, 1, 1);
    let mut early = params(&NAMES);
    early.not_before = date_time_ymd(2099, 1, 1);
    let mut of_clients = params(&NAMES);
    of_clients.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let mut expired_ca = expired.clone();
    expired_ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let server = certify(expired_ca, Some(&root));
    let refused = handshake(&server, &server.pem, trust(&root.pem), NAMES[0]).unwrap_err();
    assert!(refused.to_string().contains("has expired"), "{refused}");
    for (params, says) in [
        (expired, "has expired, or the clock"),
        (early, "not valid yet, or the clock"),
        (of_clients, "expected serverAuth"),
    ] {
        for issuer in [None, Some(&root)] {
            let server = certify(params.clone(), issuer);
            let refused =
                handshake(&server, &server.pem, trust(&server.pem), NAMES[0]).unwrap_err();
            assert!(refused.to_string().contains(says), "{says}: {refused}");
        }
    }
}

#[test]
fn a_ca_in_the_ca_file_is_verified() {
    let mut expired = ca();
    expired.not_after = date_time_ymd(2001, 1, 1);
    let mut early = ca();
    early.not_before = date_time_ymd(2099, 1, 1);
    let mut not_of_certificates = ca();
    not_of_certificates.key_usages = vec![KeyUsagePurpose::CrlSign];
    let mut of_clients = ca();
    of_clients.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    for (params, says) in [
        (expired, "its CA in the CA file has expired, or the clock"),
        (early, "its CA in the CA file is not valid yet, or the clock"),
        (not_of_certificates, "expected keyCertSign in its keyUsage"),
        (of_clients, "expected serverAuth in its extendedKeyUsage, or none"),
    ] {
        let root = certify(params, None);
        let mut of_ca = ca();
        of_ca.subject_alt_names = self::params(&NAMES).subject_alt_names;
        for params in [self::params(&NAMES), of_ca] {
            let server = certify(params, Some(&root));
            let refused = handshake(&server, &server.pem, trust(&root.pem), NAMES[0]).unwrap_err();
            assert!(refused.to_string().contains(says), "{says}: {refused}");
            // Others in the file count.
            let other = certify(ca(), None);
            let server = certify(self::params(&NAMES), Some(&other));
            let both = format!("{}{}", root.pem, other.pem);
            assert_eq!(handshake(&server, &server.pem, trust(&both), NAMES[0]), Ok(()));
        }
    }
}

#[test]
fn a_chain_has_only_intermediates_that_its_root_allows() {
    let mut short = ca();
    short.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    let short = certify(short, None);
    let root = certify(ca(), None);
    let mut not_of_certificates = ca();
    not_of_certificates.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    for (params, root, says) in [
        (ca(), &short, Some("allows at most 0 intermediates")),
        (ca(), &root, None),
        (not_of_certificates, &root, Some("a CA that this node does not trust")),
    ] {
        let intermediate = certify(params, Some(root));
        let server = certify(self::params(&NAMES), Some(&intermediate));
        let chain = format!("{}{}", server.pem, intermediate.pem);
        let refused = handshake(&server, &chain, trust(&root.pem), NAMES[0]).err();
        let text = refused.map(|refused| refused.to_string());
        let fits = |says: &str| text.as_ref().is_some_and(|text| text.contains(says));
        assert!(says.map_or_else(|| text.is_none(), fits), "{says:?}: {text:?}");
    }
    // Superfluous certificates, such as the root, do not count.
    let server = certify(params(&NAMES), Some(&short));
    for more in [&short, &certify(ca(), Some(&root))] {
        let chain = format!("{}{}", server.pem, more.pem);
        assert_eq!(handshake(&server, &chain, trust(&short.pem), NAMES[0]), Ok(()));
    }
}

#[test]
fn a_session_is_not_resumed() {
    let config = client_config(Trust::Anyone, None).unwrap();
    let disabled = rustls::client::Resumption::disabled();
    assert_eq!(format!("{:?}", config.resumption), format!("{disabled:?}"));
}

#[test]
fn another_certificate_is_refused_with_what_is_expected() {
    let root = certify(ca(), None);
    let leaf = certify(params(&NAMES), Some(&root));
    let mut other_name = params(&NAMES);
    other_name.distinguished_name.push(rcgen::DnType::CommonName, "twin");
    let twin = certify(other_name, None);
    let named = ca();
    let made_again = certify(named.clone(), None);
    let of_named = certify(params(&NAMES), Some(&certify(named.clone(), None)));
    let mut of_ca = ca();
    of_ca.subject_alt_names = params(&NAMES).subject_alt_names;
    let issued_ca = certify(of_ca.clone(), Some(&root));
    // A CA of the same name that has not signed it.
    let ca_of_named = certify(of_ca.clone(), Some(&certify(named.clone(), None)));
    let mut constrained = ca();
    constrained.name_constraints = Some(NameConstraints {
        permitted_subtrees: vec![GeneralSubtree::DnsName("example".to_owned())],
        excluded_subtrees: Vec::new(),
    });
    let constrained = certify(constrained, None);
    let ca_of_constrained = certify(of_ca, Some(&constrained));
    // The key of a server signs no other server.
    let of_leaf = certify(params(&NAMES), Some(&leaf));
    for (server, ca, says) in [
        (&of_leaf, &leaf.pem, "a CA that this node does not trust"),
        (&ca_of_named, &made_again.pem, "is a CA itself"),
        (&ca_of_constrained, &constrained.pem, "is a CA itself"),
        (&leaf, &twin.pem, "a CA that this node does not trust"),
        (&twin, &leaf.pem, "a CA that this node does not trust"),
        (&of_named, &made_again.pem, "another CA of the same name has signed"),
        (&issued_ca, &twin.pem, "expected this certificate in the CA file, or one with CA:FALSE"),
    ] {
        let refused = handshake(server, &server.pem, trust(ca), NAMES[0]).unwrap_err();
        assert!(matches!(refused, Refusal::Server(_)));
        assert!(refused.to_string().contains(says), "{says}: {refused}");
    }
}

#[test]
fn anyone_is_accepted_only_if_that_is_asked_for() {
    let server = certify(params(&["other.example"]), None);
    assert_eq!(handshake(&server, &server.pem, Trust::Anyone, NAMES[0]), Ok(()));
}

#[test]
fn the_clients_certificate_may_be_of_any_version() {
    use test_support::v1_certificate::{CLIENT, KEY};
    Identity::of(&pem("client.pem", CLIENT), &pem("client-key.pem", KEY)).unwrap();
    let other = KeyPair::generate().unwrap().serialize_pem();
    let error = Identity::of(&pem("client.pem", CLIENT), &pem("client-key.pem", &other));
    assert_eq!(
        error.unwrap_err().to_string(),
        "the key in client-key.pem does not belong to the client certificate in client.pem"
    );
}

#[test]
fn errors_name_the_file() {
    let signed = certify(params(&NAMES), None);
    let encrypted = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE \
                     KEY-----\n";
    let small = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
    for (certificate, key, says) in [
        ("", &*signed.key, "cert.pem contains no PEM certificate"),
        (&signed.key, &signed.key, "cert.pem contains no PEM certificate"),
        (&signed.pem, &signed.pem, "key.pem contains no PEM key"),
        (&signed.pem, encrypted, "key.pem contains an encrypted key: expected one without"),
        (&signed.pem, small, "the key in key.pem cannot be used"),
        ("-----BEGIN CERTIFICATE-----\n!\n", &signed.key, "cert.pem is damaged"),
        (
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            &signed.key,
            "cert.pem is damaged: its first certificate is not X.509",
        ),
    ] {
        let error = Identity::of(&pem("cert.pem", certificate), &pem("key.pem", key));
        let text = error.unwrap_err().to_string();
        assert!(text.starts_with(says), "{text}");
    }
    let of_ca = |text: &str| Trust::of(&pem("ca.pem", text)).unwrap_err();
    assert_eq!(of_ca(""), Error::NoCertificate { name: "ca.pem".to_owned() });
    let nonsense = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    assert!(of_ca(nonsense).to_string().contains("ca.pem is damaged"));
    // As in Go, a certificate that cannot be read does not hide the others.
    trust(&format!("{nonsense}{}", signed.pem));
}
