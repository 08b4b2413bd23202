//! A client certificate of X.509 v1, with its key and its CA. Many tools make such certificates,
//! and `rcgen` does not.
//!
//! ```sh
//! openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 36500 \
//!     -keyout ca.key -out ca.pem -subj /CN=test-ca
//! openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout client.key \
//!     -out client.csr -subj /O=system:nodes/CN=system:node:me
//! openssl x509 -req -days 36500 -in client.csr -CA ca.pem -CAkey ca.key -CAcreateserial
//! ```

/// The CA, which is X.509 v3.
pub const CA: &str = "\
-----BEGIN CERTIFICATE-----
MIIBezCCASGgAwIBAgIUatU4tnoMFFiHA076WJkmyUVOdyMwCgYIKoZIzj0EAwIw
EjEQMA4GA1UEAwwHdGVzdC1jYTAgFw0yNjExMjkxOTU4MTZaGA8yMTI2MTEwNTE5
NTgxNlowEjEQMA4GA1UEAwwHdGVzdC1jYTBZMBMGByqGSM49AgEGCCqGSM49AwEH
A0IABPfGJj0fQxzg+i9/NhJGot/nNIuVpUzXuUeyb/jIXW/NWoPxc+ZN1/Mjw/Wc
FlufCdfSjU6azGit1gC40CS6BPSjUzBRMB0GA1UdDgQWBBSmtGthFFULj29WjIvS
vZXVxXUyODAfBgNVHSMEGDAWgBSmtGthFFULj29WjIvSvZXVxXUyODAPBgNVHRMB
Af8EBTADAQH/MAoGCCqGSM49BAMCA0gAMEUCIGNSBnflbBwModkv7w7YeTmbfFYK
M83hoCZbh0CadvrMAiEA4rTw/N6aCXJmylxqM2lnZVqOpCHd6KHBazAp7M718yg=
-----END CERTIFICATE-----
";

/// The certificate of the user `system:node:me` in the group `system:nodes`.
pub const CLIENT: &str = "\
-----BEGIN CERTIFICATE-----
MIIBPTCB5QIUfHy3qo1tFMUt/j0UBIPeedHzCyEwCgYIKoZIzj0EAwIwEjEQMA4G
A1UEAwwHdGVzdC1jYTAgFw0yNjExMjkxOTU4MTZaGA8yMTI2MTEwNTE5NTgxNlow
MDEVMBMGA1UECgwMc3lzdGVtOm5vZGVzMRcwFQYDVQQDDA5zeXN0ZW06bm9kZTpt
ZTBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABNKZom8spBqXElnkZ4Fyc2np9INd
BcExw6++K0JDGwI7t/hToPsrH0qXvhxrmOX2CoPRH6aOQLmqqtXm0coTT/YwCgYI
KoZIzj0EAwIDRwAwRAIgKssC6X71ZHzFkJK+GLmtlfiveMY7Bu38Nm4eIlRJagsC
IFBTqDSfmPidMQnTVTaKqkwuuh9RYY7xZR6TOogDY++U
-----END CERTIFICATE-----
";

/// The key of [`CLIENT`].
pub const KEY: &str = "\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg9iN+ACJr4y8re9eP
uVhLFduGToJFe890cX13ZoPZrFGhRANCAATSmaJvLKQalxJZ5GeBcnNp6fSDXQXB
McOvvitCQxsCO7f4U6D7Kx9Kl74ca5jl9gqD0R+mjkC5qqrV5tHKE0/2
-----END PRIVATE KEY-----
";
