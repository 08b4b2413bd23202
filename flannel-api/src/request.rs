//! The targets of the requests that a [`Client`](crate::Client) sends.

use std::net::IpAddr;

/// `GET`: [`StatusReport`](crate::StatusReport).
pub const STATUS: &str = "/v1/status";
/// `GET`: [`StatusReport`](crate::StatusReport). The daemon repeats the checks that start a
/// process, at most once a second.
pub const FRESH_STATUS: &str = "/v1/status?fresh=true";
/// `GET`: [`PeersReport`](crate::PeersReport).
pub const PEERS: &str = "/v1/peers";
/// `GET`: [`PathsReport`](crate::PathsReport).
pub const PATHS: &str = "/v1/paths";
/// `POST`: [`ReloadReport`](crate::ReloadReport).
pub const RELOAD: &str = "/v1/reload";

/// `GET`: [`WhyReport`](crate::WhyReport) of an address.
pub fn why(address: IpAddr) -> String {
    format!("/v1/why?address={}", encode(&address.to_string()))
}

/// `POST`: [`TrialReport`](crate::TrialReport) of a network config. It leaves nothing behind.
pub fn trial(config: &str) -> String {
    format!("/v1/trial?config={}", encode(config))
}

/// `POST`: [`LogReport`](crate::LogReport) of a log filter.
pub fn log(filter: &str) -> String {
    format!("/v1/log?filter={}", encode(filter))
}

/// Percent encoding of a parameter's value.
fn encode(text: &str) -> String {
    text.bytes()
        .map(|b| match b {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b':' => {
                char::from(b).to_string()
            }
            _ => format!("%{b:02X}"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_percent_encoded() {
        assert_eq!(log("a b&\u{e9}=%"), "/v1/log?filter=a%20b%26%C3%A9%3D%25");
        assert_eq!(why("fd00::1".parse().unwrap()), "/v1/why?address=fd00::1");
    }
}
