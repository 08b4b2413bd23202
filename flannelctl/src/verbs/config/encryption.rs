//! The effect of `RequireEncryption` on the nodes that have leases.

use std::collections::{BTreeMap, BTreeSet};

use flannel_backends::Backends;
use flannel_core::Config;
use flannel_subnet::Registry;
use serde_json::json;

use crate::terminal::{Style, Terminal};
use crate::{Context, Output};

/// The backend types of each lease, the preferred one first; an error if they are not known.
pub(super) type Types = Result<Vec<Vec<String>>, String>;

/// The types in the leases of a store.
pub(super) async fn of_store(registry: &dyn Registry) -> Types {
    let listing = registry.list().await.map_err(|error| error.to_string())?;
    Ok(listing
        .entries
        .iter()
        .map(|entry| entry.lease.attrs.offers().map(|offer| offer.kind.to_string()).collect())
        .collect())
}

/// The types in the leases of the store that the options name. In Kubernetes only the daemon can
/// read the leases, and its answer has the preferred types.
pub(super) async fn of_cluster(context: &Context<'_>) -> Types {
    if context.global.only_kubernetes {
        let report = context.client.peers().map_err(|error| error.to_string())?;
        return Ok(report.peers.into_iter().map(|peer| vec![peer.backend]).collect());
    }
    let registry = context.global.open_registry().await.map_err(|error| error.to_string())?;
    of_store(&*registry).await
}

/// Adds to the output for a config that requires encryption which packets it drops.
pub(super) fn describe(
    output: &mut Output,
    config: &Config,
    types: &Types,
    backends: &Backends,
    terminal: &Terminal,
) {
    let encrypted = backends.encrypted_types(config);
    let mut say = |style, text: &str| output.text += &terminal.field("encryption", style, text);
    let encrypts = !backends.datapath(config).encrypted.is_empty();
    if encrypts {
        say(Style::Bold, "required: nodes send packets to other pods only by encrypted tunnels");
    } else {
        let kind = &config.backend.kind;
        let text = format!(
            "required, and the backend {kind} does not encrypt: nodes drop all packets to pods of \
             other nodes"
        );
        say(Style::Warning, &text);
    }
    let mut value = json!({ "required": true, "backend_encrypts": encrypts });
    match types {
        Ok(types) => {
            let plain = unencrypted(types, &encrypted);
            let count: usize = plain.values().sum();
            let by_type: Vec<_> = plain.iter().map(|(kind, n)| format!("{n} {kind}")).collect();
            let all = types.len();
            match count {
                0 => say(Style::Good, &format!("{all} leases, all with an encrypted offer")),
                _ => {
                    let text = format!(
                        "{count} of {all} leases have no encrypted offer ({}): nodes drop packets \
                         to their pods",
                        by_type.join(", ")
                    );
                    say(Style::Warning, &text);
                }
            }
            value["leases"] = json!(all);
            value["without_encrypted_offer"] = json!(count);
            value["by_type"] = json!(plain);
        }
        Err(why) => {
            let text =
                format!("the number of leases without an encrypted offer is not known: {why}");
            say(Style::Warning, &text);
            value["unknown"] = json!(why);
        }
    }
    let go = "Go flannel ignores RequireEncryption: its nodes go on to send packets unencrypted, \
              unless their backend encrypts";
    say(Style::Bold, go);
    output.value["encryption"] = value;
}

/// The number of leases without an encrypted offer, by preferred type.
fn unencrypted(types: &[Vec<String>], encrypted: &BTreeSet<&str>) -> BTreeMap<String, usize> {
    let mut plain = BTreeMap::new();
    for types in types {
        if types.iter().any(|kind| encrypted.contains(&**kind)) {
            continue;
        }
        let kind = types.first().filter(|kind| !kind.is_empty());
        *plain.entry(kind.map_or("without a type", |kind| kind).to_owned()).or_default() += 1;
    }
    plain
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::terminal::tests::assert_page;

    #[test]
    fn a_lease_with_any_encrypted_offer_is_reached() {
        let leases = [&["vxlan"][..], &["vxlan", "wireguard"], &["wireguard"], &["host-gw"], &[""]];
        let leases = leases.map(|types| types.iter().map(ToString::to_string).collect());
        let plain = unencrypted(&leases, &["wireguard"].into());
        let expected = [("host-gw", 1), ("vxlan", 1), ("without a type", 1)];
        assert_eq!(plain, expected.map(|(kind, n)| (kind.to_owned(), n)).into());
    }

    #[test]
    fn a_config_without_encryption_and_unknown_leases_are_told() {
        let text = r#"{"Network":"10.1.0.0/16","RequireEncryption":true}"#;
        let config = Config::parse(text).unwrap();
        let backends = flannel_backends::all();
        let known = Ok(vec![vec!["vxlan".to_owned()], vec!["host-gw".to_owned()]]);
        let unknown = Err("etcd:https://etcd-1:2379 does not answer".to_owned());
        assert_page("config_encryption", |terminal| {
            let mut output = Output { text: String::new(), value: Value::Null, ok: true };
            for types in [&known, &unknown] {
                describe(&mut output, &config, types, &backends, terminal);
            }
            assert_eq!(output.value["encryption"]["leases"], Value::Null);
            output.text
        });
    }
}
