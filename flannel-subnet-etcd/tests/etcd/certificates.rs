//! A certificate authority for tests.

use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};

/// The files of a certificate and its key.
pub(crate) struct Certified {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

/// A CA, with its certificate in a file.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub(crate) file: PathBuf,
}

impl Authority {
    pub(crate) fn new(dir: &Path, name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate().unwrap();
        let file = dir.join(format!("{name}.pem"));
        fs::write(&file, params.self_signed(&key).unwrap().pem()).unwrap();
        Self { issuer: Issuer::new(params, key), file }
    }

    /// A certificate for this machine and its key, in PEM, valid until `year`.
    pub(crate) fn sign(&self, name: &str, year: i32) -> (String, String) {
        let mut params =
            CertificateParams::new(vec!["127.0.0.1".into(), "localhost".into()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(year, 1, 1);
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }

    /// Writes a certificate for this machine and its key to files.
    pub(crate) fn sign_into(&self, dir: &Path, name: &str, year: i32) -> Certified {
        let (certificate, key) = self.sign(name, year);
        let files = Certified {
            certificate: dir.join(format!("{name}.pem")),
            key: dir.join(format!("{name}-key.pem")),
        };
        fs::write(&files.certificate, certificate).unwrap();
        fs::write(&files.key, key).unwrap();
        files
    }
}
