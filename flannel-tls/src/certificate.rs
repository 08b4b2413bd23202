//! The fields of an X.509 certificate that `webpki` does not give, of any version.
//!
//! **Source**: RFC 5280, section 4.1; X.690 (DER).

use std::time::Duration;

use rustls::pki_types::UnixTime;

const BOOLEAN: u8 = 0x01;
const INTEGER: u8 = 0x02;
const BIT_STRING: u8 = 0x03;
const OCTET_STRING: u8 = 0x04;
const OID: u8 = 0x06;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const SEQUENCE: u8 = 0x30;
/// The tags of the optional fields of a certificate.
const VERSION: u8 = 0xa0;
const EXTENSIONS: u8 = 0xa3;

/// `id-ce-keyUsage`, `id-ce-basicConstraints`, `id-ce-extKeyUsage` and its purposes.
const KEY_USAGE: &[u8] = &[0x55, 0x1d, 0x0f];
const BASIC_CONSTRAINTS: &[u8] = &[0x55, 0x1d, 0x13];
const EXTENDED_KEY_USAGE: &[u8] = &[0x55, 0x1d, 0x25];
const ANY_PURPOSE: &[u8] = &[0x55, 0x1d, 0x25, 0x00];
const SERVER_AUTH: &[u8] = &[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x01];
/// The bit `keyCertSign` in the first byte of `keyUsage`.
const KEY_CERT_SIGN: u8 = 0x04;

/// What a certificate says about itself. Nothing is verified.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Certificate<'a> {
    /// 1 to 3.
    pub(crate) version: u8,
    pub(crate) not_before: UnixTime,
    pub(crate) not_after: UnixTime,
    pub(crate) key: PublicKey<'a>,
    /// The part that the issuer has signed.
    pub(crate) signed: &'a [u8],
    /// The name of the issuer, the algorithm of its signature, and the signature.
    pub(crate) issuer: &'a [u8],
    /// The name of the owner.
    pub(crate) subject: &'a [u8],
    pub(crate) signature_algorithm: &'a [u8],
    pub(crate) signature: &'a [u8],
    /// It is a CA: `CA:TRUE`.
    pub(crate) is_ca: bool,
    /// The largest number of intermediates below it, or `None` if there is no limit.
    pub(crate) path_length: Option<usize>,
    /// Its key may sign certificates: it names this usage, or none at all.
    pub(crate) key_may_sign: bool,
    /// It may be used by a server: it names this purpose, any purpose, or none at all.
    pub(crate) is_for_servers: bool,
}

impl<'a> Certificate<'a> {
    /// Reads a certificate in DER. `None` if it is not one.
    pub(crate) fn read(der: &'a [u8]) -> Option<Self> {
        let mut certificate = Reader(Reader(der).take(SEQUENCE)?);
        let whole = certificate.0;
        let mut fields = Reader(certificate.take(SEQUENCE)?);
        let signed = &whole[..whole.len() - certificate.0.len()];
        let signature_algorithm = certificate.take(SEQUENCE)?;
        let signature = certificate.take_bits()?;
        let version = match fields.take(VERSION) {
            Some(version) => match Reader(version).take(INTEGER)? {
                [coded @ 0..=2] => coded + 1,
                _ => return None,
            },
            None => 1,
        };
        fields.take(INTEGER)?; // the serial number
        fields.take(SEQUENCE)?; // the algorithm of the signature
        let issuer = fields.take(SEQUENCE)?;
        let mut validity = Reader(fields.take(SEQUENCE)?);
        let (not_before, not_after) = (validity.time()?, validity.time()?);
        let subject = fields.take(SEQUENCE)?;
        let key = PublicKey::of_content(fields.take(SEQUENCE)?)?;
        let mut read = Self {
            version,
            not_before,
            not_after,
            key,
            signed,
            issuer,
            subject,
            signature_algorithm,
            signature,
            is_ca: false,
            path_length: None,
            key_may_sign: true,
            is_for_servers: true,
        };
        while let Some(field) = fields.any() {
            if field.tag == EXTENSIONS {
                read.add_extensions(Reader(Reader(field.content).take(SEQUENCE)?))?;
            }
        }
        Some(read)
    }

    /// Whether it may sign certificates of servers.
    ///
    /// **Source**: Go `x509.Certificate.CheckSignatureFrom`, `checkChainForKeyUsage`.
    pub(crate) fn may_sign(&self) -> bool {
        (self.version < 3 || self.is_ca) && self.key_may_sign && self.is_for_servers
    }

    fn add_extensions(&mut self, mut extensions: Reader<'a>) -> Option<()> {
        while let Some(extension) = extensions.take(SEQUENCE) {
            let mut extension = Reader(extension);
            let id = extension.take(OID)?;
            let _critical = extension.take(BOOLEAN);
            let mut value = Reader(extension.take(OCTET_STRING)?);
            if id == BASIC_CONSTRAINTS {
                let mut value = Reader(value.take(SEQUENCE)?);
                self.is_ca = value.take(BOOLEAN).is_some_and(|is_ca| is_ca != [0]);
                // A length of more than one byte limits nothing.
                self.path_length = value.take(INTEGER).and_then(|length| match length {
                    [length] => Some(usize::from(*length)),
                    _ => None,
                });
            } else if id == KEY_USAGE {
                // As in Go, a usage without a bit limits nothing.
                let (_unused, bits) = value.take(BIT_STRING)?.split_first()?;
                self.key_may_sign = bits.iter().all(|byte| *byte == 0)
                    || bits.first().is_some_and(|bits| bits & KEY_CERT_SIGN != 0);
            } else if id == EXTENDED_KEY_USAGE {
                let mut value = Reader(value.take(SEQUENCE)?);
                let mut purposes = std::iter::from_fn(|| value.take(OID));
                self.is_for_servers = purposes.any(|id| [ANY_PURPOSE, SERVER_AUTH].contains(&id));
            }
        }
        Some(())
    }
}

/// A public key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PublicKey<'a> {
    pub(crate) algorithm: &'a [u8],
    pub(crate) bits: &'a [u8],
}

impl<'a> PublicKey<'a> {
    /// Reads the content of a `SubjectPublicKeyInfo`.
    pub(crate) fn of_content(content: &'a [u8]) -> Option<Self> {
        let mut fields = Reader(content);
        Some(Self { algorithm: fields.take(SEQUENCE)?, bits: fields.take_bits()? })
    }

    /// Reads a `SubjectPublicKeyInfo` in DER.
    pub(crate) fn of_der(der: &'a [u8]) -> Option<Self> {
        Self::of_content(Reader(der).take(SEQUENCE)?)
    }

    /// Whether it is a key of RSA with less than 2048 bits, which `ring` does not support.
    pub(crate) fn is_small_rsa(&self) -> bool {
        let modulus = Reader(self.bits).take(SEQUENCE).and_then(|key| Reader(key).take(INTEGER));
        modulus.is_some_and(|modulus| modulus.iter().skip_while(|byte| **byte == 0).count() < 256)
    }
}

/// The rest of a sequence of values in DER.
#[derive(Clone, Copy)]
struct Reader<'a>(&'a [u8]);

struct Value<'a> {
    tag: u8,
    content: &'a [u8],
}

impl<'a> Reader<'a> {
    /// The next value. `None` at the end, or if it is cut.
    fn any(&mut self) -> Option<Value<'a>> {
        let (&tag, rest) = self.0.split_first()?;
        let (&first, rest) = rest.split_first()?;
        let (length, rest) = match usize::from(first) {
            short @ ..=0x7f => (short, rest),
            // A length of up to four bytes.
            long @ 0x81..=0x84 => {
                let (bytes, rest) = rest.split_at_checked(long - 0x80)?;
                (bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte)), rest)
            }
            _ => return None,
        };
        let (content, rest) = rest.split_at_checked(length)?;
        self.0 = rest;
        Some(Value { tag, content })
    }

    /// The content of the next value if it has this tag. Otherwise, nothing is read.
    fn take(&mut self, tag: u8) -> Option<&'a [u8]> {
        let mut ahead = *self;
        let value = ahead.any().filter(|value| value.tag == tag)?;
        *self = ahead;
        Some(value.content)
    }

    /// The bits of the next value, a bit string of whole bytes.
    fn take_bits(&mut self) -> Option<&'a [u8]> {
        self.take(BIT_STRING)?.strip_prefix(&[0])
    }

    /// The next value, a time. A time before 1970 is 1970.
    fn time(&mut self) -> Option<UnixTime> {
        let Value { tag, content } = self.any()?;
        let text = std::str::from_utf8(content).ok()?.strip_suffix('Z')?;
        if !text.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let (year, rest) = match (tag, text.len()) {
            (UTC_TIME, 12) => {
                let year = text[..2].parse::<i64>().ok()?;
                (if year < 50 { 2000 + year } else { 1900 + year }, &text[2..])
            }
            (GENERALIZED_TIME, 14) => (text[..4].parse().ok()?, &text[4..]),
            _ => return None,
        };
        let field = |at: usize| rest[2 * at..2 * at + 2].parse::<i64>().ok();
        let (month, day) = (field(0)?, field(1)?);
        if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
            return None;
        }
        let seconds = (field(2)? * 60 + field(3)?) * 60 + field(4)?;
        let since = days_since_1970(year, month, day) * 86_400 + seconds;
        Some(UnixTime::since_unix_epoch(Duration::from_secs(since.try_into().unwrap_or(0))))
    }
}

/// The days from 1970-01-01 to a date of the Gregorian calendar. `month` is 1 to 12.
///
/// **Source**: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", `days_from_civil`.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    // A year begins in March here, so that a leap day is its last day.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * month + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(time: UnixTime) -> u64 {
        time.as_secs()
    }

    #[test]
    fn times_are_seconds_since_1970() {
        let read = |tag: u8, text: &str| {
            let length = u8::try_from(text.len()).unwrap();
            let der = [&[tag, length], text.as_bytes()].concat();
            Reader(&der).time().map(seconds)
        };
        for (tag, text, expected) in [
            (UTC_TIME, "700101000000Z", Some(0)),
            (UTC_TIME, "491231235959Z", Some(2_524_607_999)),
            (UTC_TIME, "500101000000Z", Some(0)),
            (UTC_TIME, "000229120000Z", Some(951_825_600)),
            (GENERALIZED_TIME, "20500101000000Z", Some(2_524_608_000)),
            (GENERALIZED_TIME, "99991231235959Z", Some(253_402_300_799)),
            (GENERALIZED_TIME, "19691231235959Z", Some(0)),
            (UTC_TIME, "20500101000000Z", None),
            (UTC_TIME, "700101000000", None),
            (UTC_TIME, "70010100000+Z", None),
            (UTC_TIME, "701301000000Z", None),
            (INTEGER, "700101000000Z", None),
        ] {
            assert_eq!(read(tag, text), expected, "{text}");
        }
    }

    #[test]
    fn the_fields_of_a_certificate_are_read() {
        use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, KeyPair};
        let key = KeyPair::generate().unwrap();
        let with = |is_ca: IsCa, purposes: &[ExtendedKeyUsagePurpose]| {
            let mut params = CertificateParams::default();
            params.is_ca = is_ca;
            params.extended_key_usages = purposes.to_vec();
            params.not_before = rcgen::date_time_ymd(2001, 2, 3);
            params.not_after = rcgen::date_time_ymd(2050, 1, 1);
            params.self_signed(&key).unwrap().der().to_vec()
        };
        let ca = IsCa::Ca(BasicConstraints::Unconstrained);
        for (is_ca, purposes, expected_ca, expected_use) in [
            (ca, vec![], true, true),
            (IsCa::NoCa, vec![ExtendedKeyUsagePurpose::ClientAuth], false, false),
            (IsCa::ExplicitNoCa, vec![ExtendedKeyUsagePurpose::Any], false, true),
            (
                IsCa::NoCa,
                vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth],
                false,
                true,
            ),
        ] {
            let der = with(is_ca, &purposes);
            let read = Certificate::read(&der).unwrap();
            assert_eq!((read.is_ca, read.is_for_servers), (expected_ca, expected_use));
            assert_eq!(read.version, 3);
            assert_eq!(seconds(read.not_before), 981_158_400);
            assert_eq!(seconds(read.not_after), 2_524_608_000);
            assert_eq!(read.key.bits, key.public_key_raw());
            assert!(!read.key.is_small_rsa());
            let version = der.windows(5).position(|bytes| bytes == [VERSION, 3, INTEGER, 1, 2]);
            let mut of_no_version = der.clone();
            for byte in [3, 0xff] {
                of_no_version[version.unwrap() + 4] = byte;
                assert_eq!(Certificate::read(&of_no_version), None, "{byte}");
            }
            for cut in 0..der.len() {
                assert_eq!(Certificate::read(&der[..cut]), None, "{cut}");
            }
        }
    }
}
