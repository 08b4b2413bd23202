//! Commands that help, in the words of the place where flannel runs.
//!
//! The one thing to know: hints and mends are written for a host with a unit of systemd and a registry of ours; where the leases
//! are Kubernetes' own, neither is there, and whatever leaves the daemon or the doctor is put into its words here.

use flannel_api::Finding;

const NODES: &str = "kubectl get nodes -o custom-columns=N:.metadata.name,C:.spec.podCIDRs";

/// What it is called on a host, and there.
const WORDS: [(&str, &str); 7] = [
    ("journalctl -u flanneld", "kubectl -n kube-flannel logs daemonset/kube-flannel-ds"),
    (
        "systemctl restart flanneld",
        "kubectl -n kube-flannel rollout restart daemonset/kube-flannel-ds",
    ),
    (
        "systemctl start flanneld",
        "kubectl -n kube-flannel rollout restart daemonset/kube-flannel-ds",
    ),
    ("systemctl stop flanneld", NODES),
    (
        "systemctl show -p CapabilityBoundingSet flanneld",
        "kubectl -n kube-flannel get daemonset kube-flannel-ds -o yaml",
    ),
    ("flannelctl lease list", NODES),
    ("flannelctl config set FILE", "kubectl -n kube-flannel edit configmap kube-flannel-cfg"),
];

/// A store of this name is Kubernetes.
pub(crate) fn is_kubernetes(store: Option<&str>) -> bool {
    store.is_some_and(|store| store.starts_with("kube:"))
}

/// A command as it is said where this store is.
pub(crate) fn said(hint: String, store: Option<&str>) -> String {
    if !is_kubernetes(store) {
        return hint;
    }
    let words = |hint: String, (here, there): (&str, &str)| hint.replace(here, there);
    if let Some((before, rest)) = hint.split_once("flannelctl config patch '")
        && let Some((patch, rest)) = rest.split_once('\'')
    {
        let rest = rest.strip_prefix(" # ").map(|rest| format!(": {rest}")).unwrap_or_default();
        return format!(
            "{before}kubectl -n kube-flannel edit configmap kube-flannel-cfg # with {patch} in it{rest}"
        );
    }
    match hint.split_once("flannelctl lease release --force ") {
        // A node that is deleted has no subnet any more.
        Some((before, key)) => {
            let rest =
                key.split_once(" # ").map(|(_, rest)| format!(": {rest}")).unwrap_or_default();
            format!("{before}{NODES} # then kubectl delete node{rest}")
        }
        None => WORDS.into_iter().fold(hint, words),
    }
}

/// What mends a finding as it is said where this store is.
pub(crate) fn say(findings: &mut [Finding], store: Option<&str>) {
    for finding in findings {
        finding.mend = finding.mend.take().map(|mend| said(mend, store));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_helps_is_said_in_the_words_of_the_place() {
        let kube = Some("kube:https://10.96.0.1:443");
        for (here, there) in [
            ("journalctl -u flanneld", "kubectl -n kube-flannel logs daemonset/kube-flannel-ds".to_owned()),
            (
                "kill 7 # or flannelctl config set FILE, with another \"Port\"",
                "kill 7 # or kubectl -n kube-flannel edit configmap kube-flannel-cfg, with another \"Port\""
                    .to_owned(),
            ),
            (
                "flannelctl lease release --force '10.1.7.0-24' # if that node is gone",
                format!("{NODES} # then kubectl delete node: if that node is gone"),
            ),
            (
                "flannelctl config patch '{\"Backend\": {\"MTU\": 1400}}' # better known",
                "kubectl -n kube-flannel edit configmap kube-flannel-cfg # with {\"Backend\": {\"MTU\": 1400}} in it: better known"
                    .to_owned(),
            ),
            ("sysctl -w net.ipv4.ip_forward=1", "sysctl -w net.ipv4.ip_forward=1".to_owned()),
        ] {
            assert_eq!(said(here.to_owned(), kube), there);
            assert_eq!(said(here.to_owned(), Some("etcd:http://127.0.0.1:2379")), here);
            assert_eq!(said(here.to_owned(), None), here);
        }
    }
}
