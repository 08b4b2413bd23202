//! Properties of all parsers of text: they never panic, and a parsed value that is written and
//! parsed again stays the same. The fuzz targets check random texts, and `cargo test` checks the
//! corpora.
//!
//! Each function returns whether the text was accepted.

use flannel_core::lease::LeaseAttrs;
use flannel_core::{Config, SubnetEnv, Subnets};

/// A parsed key equals the key parsed from its text, and the key made of its subnets.
pub(crate) fn lease_key(text: &str) -> bool {
    let subnets: Subnets = match text.parse() {
        Ok(subnets) => subnets,
        Err(error) => return refused(&error),
    };
    assert_eq!(subnets.to_string().parse(), Ok(subnets));
    assert_eq!(Subnets::new(subnets.iter()), Some(subnets));
    assert!(subnets.overlaps(&subnets));
    true
}

/// A parsed value that is written and parsed again is the same.
pub(crate) fn lease_value(text: &str) -> bool {
    let attrs = match LeaseAttrs::from_json(text) {
        Ok(attrs) => attrs,
        Err(error) => return refused(&error),
    };
    let written = attrs.to_json();
    let again = LeaseAttrs::from_json(&written).expect("a written value parses");
    assert_eq!(again.to_json(), written);
    assert_eq!(again, attrs);
    true
}

/// A parsed config has a range of subnets of the right length, in order, inside its network.
pub(crate) fn network_config(text: &str) -> bool {
    let config = match Config::parse(text) {
        Ok(config) => config,
        Err(error) => return refused(&error),
    };
    assert!(!config.networks.is_empty());
    for (family, network) in config.networks.iter() {
        assert!(network.min <= network.max, "{network:?}");
        for subnet in [network.min, network.max] {
            assert!(network.network.covers(&subnet), "{network:?}");
            assert_eq!((subnet.family(), subnet.len()), (family, network.subnet_len));
            assert!(Subnets::new([subnet]).is_some(), "{network:?}");
        }
        assert!(network.subnets() >= 1);
        assert_eq!(network.min.step(network.subnets() - 1), Some(network.max));
    }
    assert_eq!(config.backend.kind, config.backend.kind.to_lowercase());
    config.backend.fields().expect("the options are an object");
    true
}

/// A parsed file that is written and parsed again is the same.
pub(crate) fn subnet_env(text: &str) -> bool {
    let env = match SubnetEnv::parse(text) {
        Ok(env) => env,
        Err(error) => return refused(&error),
    };
    assert_eq!(SubnetEnv::parse(&env.to_string()).expect("a written value parses"), env);
    let _ = env.previous();
    true
}

fn refused(error: &dyn std::error::Error) -> bool {
    assert!(!error.to_string().is_empty());
    false
}
