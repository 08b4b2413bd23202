//! Commands that repair findings and problems.
//!
//! They are written for a host with a systemd unit and a registry. Kubernetes has neither, so
//! [`localize`] replaces them before the daemon or the doctor shows them.

use std::fmt::Display;
use std::net::IpAddr;
use std::sync::Arc;

use flannel_api::Finding;
use flannel_core::{Error, Lease};

/// The command that shows the daemon's log.
pub const LOG: &str = "journalctl -u flanneld";
/// The command that writes a network config.
pub const SET_CONFIG: &str = "flannelctl config set FILE";
const NODES: &str = "kubectl get nodes -o custom-columns=N:.metadata.name,C:.spec.podCIDRs";

/// Commands on a host, and their replacement in Kubernetes.
const REPLACEMENTS: [(&str, &str); 7] = [
    (LOG, "kubectl -n kube-flannel logs POD -c kube-flannel"),
    ("systemctl restart flanneld", "kubectl -n kube-flannel delete pod POD"),
    ("systemctl start flanneld", "kubectl -n kube-flannel delete pod POD"),
    ("systemctl stop flanneld", NODES),
    (
        "systemctl show -p CapabilityBoundingSet flanneld",
        "kubectl -n kube-flannel get daemonset kube-flannel-ds -o yaml",
    ),
    ("flannelctl lease list", NODES),
    (SET_CONFIG, "kubectl -n kube-flannel edit configmap kube-flannel-cfg"),
];

/// The command that removes the cause of an error of the store of this name.
pub fn cure(error: &Error, store: &str) -> String {
    match error {
        Error::NoConfig { .. } | Error::Config { .. } | Error::Backend { .. } => {
            SET_CONFIG.to_owned()
        }
        Error::OutOfSubnets { .. } => {
            "flannelctl lease list # lease release releases those of nodes that are gone; or \
             enlarge the network"
                .to_owned()
        }
        Error::NotReady { .. } => "flannelctl lease list # has this node a subnet?".to_owned(),
        Error::Store { .. } => restore_store(store, &error.to_string()),
        _ => LOG.to_owned(),
    }
}

/// The command that restores a store, by the store's name, such as `etcd:http://127.0.0.1:2379`,
/// and its `error`.
pub fn restore_store(store: &str, error: &str) -> String {
    match store.split_once(':') {
        Some(("dir", path)) => restore_directory(path.split('?').next().unwrap_or_default()),
        Some(("etcd", endpoints)) => restore_etcd(endpoints),
        Some(("kube", url)) => restore_kubernetes(url, error),
        _ => LOG.to_owned(),
    }
}

/// The command for a Kubernetes API that does not serve the daemon.
fn restore_kubernetes(url: &str, error: &str) -> String {
    if error.contains("(403,") {
        "kubectl apply -f kube-flannel.yml # restores the ClusterRole flannel and its binding, \
         which kubectl describe clusterrole flannel shows"
            .to_owned()
    } else if error.contains("(401,") {
        "kubectl -n kube-flannel rollout restart daemonset/kube-flannel-ds # new pods get a new \
         token of the service account flannel"
            .to_owned()
    } else {
        format!(
            "curl -k {url}/readyz # on this host: if it does not answer, the API server is down, \
             or kube-proxy does not serve its address"
        )
    }
}

/// The command that restores the directory of a store.
pub fn restore_directory(path: impl Display) -> String {
    format!(
        "mount {path} || ls -la {path} # restore its files: with an empty directory every daemon \
         loses its lease and stops"
    )
}

/// The command that restarts etcd.
pub fn restore_etcd(endpoints: &str) -> String {
    let host = |endpoint: &str| {
        let rest = endpoint.split_once("://").map_or(endpoint, |(_, rest)| rest);
        rest.rsplit_once(':').map_or(rest, |(host, _)| host).to_owned()
    };
    let hosts: Vec<String> = endpoints.split(',').map(host).collect();
    let each = if hosts.len() > 1 { ", where it does not run" } else { "" };
    let hosts = hosts.join(", ");
    format!(
        "systemctl restart etcd # on {hosts}{each}; to see which one answers: etcdctl --endpoints \
         {endpoints} endpoint health"
    )
}

/// How to know that a node is gone: a node that does not answer may still have pods.
const GONE: &str = " (no host has its HOLDER of flannelctl lease list in the file mark of its \
    --state-dir)";

/// The command that releases a lease. The key is quoted, because a dual-stack key contains `&`.
pub fn release(key: impl Display) -> String {
    format!("flannelctl lease release --force '{key}' # if that node is gone{GONE}")
}

/// The command about a lease with a public address that another node has too.
pub fn change_address(key: impl Display) -> String {
    format!("{}, else give it another --public-ip", release(key))
}

/// The command for an advisory. If it is about a public address that nodes share, the youngest of
/// the `peers` with that address should release its lease.
pub fn for_advisory<'a>(text: &str, peers: impl Iterator<Item = &'a Arc<Lease>>) -> String {
    let address = text.split([' ', ',']).find_map(|word| word.parse::<IpAddr>().ok());
    let has_it = |lease: &&Arc<Lease>| {
        lease.attrs.preferred.public.values().any(|public| Some(*public) == address)
    };
    match peers.filter(has_it).max_by_key(|lease| lease.since) {
        Some(lease) => change_address(lease.subnets),
        None => "flannelctl peers".to_owned(),
    }
}

/// Whether the store of this name is Kubernetes.
pub fn is_kubernetes(store: Option<&str>) -> bool {
    store.is_some_and(|store| store.starts_with("kube:"))
}

/// The command for this store: a command of Kubernetes replaces one of a host.
pub fn localize(hint: String, store: Option<&str>) -> String {
    if !is_kubernetes(store) {
        return hint;
    }
    let replace = |hint: String, (here, there): (&str, &str)| hint.replace(here, there);
    if let Some((before, rest)) = hint.split_once("flannelctl config patch '")
        && let Some((patch, rest)) = rest.split_once('\'')
    {
        let rest = rest.strip_prefix(" # ").map(|rest| format!(": {rest}")).unwrap_or_default();
        return format!(
            "{before}kubectl -n kube-flannel edit configmap kube-flannel-cfg # with {patch} in \
             it{rest}"
        );
    }
    match hint.split_once("flannelctl lease release --force ") {
        // A deleted node has no subnet.
        Some((before, key)) => {
            let rest = key.split_once(" # ").map(|(_, rest)| format!(": {rest}"));
            let rest = rest.unwrap_or_default().replace(GONE, "");
            format!("{before}{NODES} # then kubectl delete node{rest}")
        }
        None => REPLACEMENTS.into_iter().fold(hint, replace),
    }
}

/// Localizes the commands of findings.
pub fn localize_findings(findings: &mut [Finding], store: Option<&str>) {
    for finding in findings {
        finding.repair = finding.repair.take().map(|repair| localize(repair, store));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_that_restores_a_store_matches_its_kind() {
        for (store, error, command) in [
            (
                "dir:/srv/flannel?assign=static",
                "",
                "mount /srv/flannel || ls -la /srv/flannel # restore its files",
            ),
            (
                "etcd:http://127.0.0.1:2379",
                "",
                "systemctl restart etcd # on 127.0.0.1; to see which one answers: \
                 etcdctl --endpoints http://127.0.0.1:2379 endpoint health",
            ),
            (
                "etcd:https://etcd-1:2379,https://[fd00::2]:2379",
                "",
                "systemctl restart etcd # on etcd-1, [fd00::2], where it does not run; to see \
                 which one answers: etcdctl --endpoints https://etcd-1:2379,https://[fd00::2]:2379 \
                 endpoint health",
            ),
            ("kube:https://10.96.0.1:443", "no route", "curl -k https://10.96.0.1:443/readyz # on"),
            (
                "kube:https://a",
                "the credentials (401, Unauthorized)",
                "kubectl -n kube-flannel rollout",
            ),
            (
                "kube:https://a",
                "forbidden: list nodes (403, x)",
                "kubectl apply -f kube-flannel.yml #",
            ),
            ("memory", "", LOG),
        ] {
            let restored = restore_store(store, error);
            assert!(restored.starts_with(command), "{restored}");
            assert_eq!(localize(restored.clone(), Some(store)), restored);
        }
    }

    #[test]
    fn commands_are_replaced_in_kubernetes_only() {
        let (kube, gone) = (Some("kube:https://10.96.0.1:443"), release("10.1.7.0-24"));
        for (here, there) in [
            (
                "journalctl -u flanneld",
                "kubectl -n kube-flannel logs POD -c kube-flannel".to_owned(),
            ),
            (
                "kill 7 # or flannelctl config set FILE, with another \"Port\"",
                "kill 7 # or kubectl -n kube-flannel edit configmap kube-flannel-cfg, with another \
                 \"Port\""
                    .to_owned(),
            ),
            (
                gone.as_str(),
                format!("{NODES} # then kubectl delete node: if that node is gone"),
            ),
            (
                "flannelctl config patch '{\"Backend\": {\"MTU\": 1400}}' # better known",
                "kubectl -n kube-flannel edit configmap kube-flannel-cfg # with {\"Backend\": \
                 {\"MTU\": 1400}} in it: better known"
                    .to_owned(),
            ),
            ("sysctl -w net.ipv4.ip_forward=1", "sysctl -w net.ipv4.ip_forward=1".to_owned()),
        ] {
            assert_eq!(localize(here.to_owned(), kube), there);
            assert_eq!(localize(here.to_owned(), Some("etcd:http://127.0.0.1:2379")), here);
            assert_eq!(localize(here.to_owned(), None), here);
        }
    }
}
