//! One hostile lease, with any value, takes nothing from others.

#[path = "../../../dev/fuzz/hostile.rs"]
mod any_lease;

use any_lease::{hostile_lease, signature, subnets_of};
use flannel_core::object::{MacAddr, PublicKey};
use proptest::prelude::*;

/// One offer as JSON: with a MAC address, key and public address of its own, of another node, or
/// that none can have.
fn offer() -> impl Strategy<Value = String> {
    let kinds = ["vxlan", "wireguard", "", "ipip", "host-gw", "vxlan"];
    let kind = prop::sample::select(kinds.to_vec());
    (kind, 0..24u8, 0..24u8, 0..3u8).prop_map(|(kind, public, victim, form)| {
        let net = if form == 0 { "192.0.2" } else { "198.51.100" };
        let named = MacAddr::derived_from([192, 0, 2, victim].into());
        let own = MacAddr::derived_from([198, 51, 100, public].into());
        let mac = if form == 2 { own } else { named };
        let key = PublicKey([victim; 32]);
        // A copy of the victim's.
        let signature = signature(&key, &subnets_of(victim));
        let data =
            format!(r#"{{"VtepMAC":"{mac}","PublicKey":"{key}","Signature":"{signature}"}}"#);
        let public = format!("{net}.{public}");
        format!(r#"{{"PublicIP":"{public}","BackendType":"{kind}","BackendData":{data}}}"#)
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_hostile_lease_takes_no_object_of_another(
        preferred in offer(),
        others in prop::collection::vec(offer(), 0..60),
    ) {
        let preferred = preferred.strip_suffix('}').unwrap();
        hostile_lease(&format!(r#"{preferred},"OtherOffers":[{}]}}"#, others.join(",")));
    }

    #[test]
    fn any_text_takes_no_object_of_another(text in ".{0,200}") {
        hostile_lease(&text);
    }
}

/// Without a limit of offers, one such lease took the routes to 50 nodes.
#[test]
fn a_lease_with_the_macs_of_all_nodes_takes_none() {
    let offer = |n: u8| {
        let mac = MacAddr::derived_from([192, 0, 2, n].into());
        let data = format!(r#"{{"VtepMAC":"{mac}"}}"#);
        format!(r#"{{"PublicIP":"198.51.100.9","BackendType":"vxlan","BackendData":{data}}}"#)
    };
    for first in 0..24 {
        let others: Vec<String> = (0..24).map(offer).collect();
        let preferred = offer(first);
        let preferred = preferred.strip_suffix('}').unwrap();
        hostile_lease(&format!(r#"{preferred},"OtherOffers":[{}]}}"#, others.join(",")));
    }
}
