//! Commands that repair findings and problems.
//!
//! They are written for a host with a systemd unit and a registry. Kubernetes has neither, so
//! [`localize`] replaces them before the daemon or the doctor shows them.

use std::fmt::Display;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use flannel_api::Finding;
use flannel_core::{Error, Lease};

/// The command that shows the daemon's log.
pub const LOG: &str = "journalctl -u flanneld";
/// The command that writes a network config.
pub const SET_CONFIG: &str = "flannelctl config set FILE";
/// The command that lets the host's clock follow the time of other hosts.
pub(crate) const SET_CLOCK: &str = "timedatectl set-ntp true";
/// What to do before a file system is mounted for writing again.
pub(crate) const BEFORE_WRITING: &str =
    "first see dmesg: the kernel makes a damaged disk read-only";
/// A store that takes longer is slow.
pub const SLOW: Duration = Duration::from_secs(1);
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
        Error::Refused { .. } if store.starts_with("kube:") => {
            restore_store(store, &error.to_string())
        }
        Error::Store { .. } => restore_store(store, &error.to_string()),
        _ => LOG.to_owned(),
    }
}

/// The command that restores a store, by the store's name, such as `etcd:http://127.0.0.1:2379`,
/// and its `error`.
pub fn restore_store(store: &str, error: &str) -> String {
    let is_out_of_time = |text| error.to_lowercase().contains(text);
    if ["certificate expired", "certificate not valid yet"].into_iter().any(is_out_of_time) {
        return format!("{SET_CLOCK} # if date is wrong here or there; else renew the certificate");
    }
    match parts(store) {
        Some(("dir", path)) => restore_directory(path, error),
        Some(("etcd", endpoints)) => restore_etcd(endpoints, error),
        Some(("kube", url)) => restore_kubernetes(url, error),
        _ => LOG.to_owned(),
    }
}

/// The kind of a store and its place, without options, by its name.
fn parts(store: &str) -> Option<(&str, &str)> {
    let (kind, rest) = store.split_once(':')?;
    let end = if kind == "dir" { "?" } else { " (" };
    Some((kind, rest.split(end).next().unwrap_or_default()))
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
    } else if error.contains("certificate is not accepted") {
        let host = url.trim_start_matches("https://");
        format!(
            "openssl s_client -connect {host} </dev/null # shows the issuer of the certificate: \
             write its CA to the kubeconfig (certificate-authority), or restart the pod, which \
             gets the CA of the cluster"
        )
    } else if let Some((_, rest)) = error.split_once("the token ")
        && let Some((path, _)) = rest.split_once(": ")
    {
        format!("ls -l {} # the file of the token, which the kubeconfig names", quoted(path))
    } else {
        format!(
            "curl -k {url}/readyz # on this host: if it does not answer, the API server is down, \
             or kube-proxy does not serve its address"
        )
    }
}

/// The command that restores the directory of a store, by the error of a request to it.
fn restore_directory(path: &str, error: &str) -> String {
    let mount = mount_point(path);
    if error.contains("Read-only file system") {
        // The usual unit lets the daemon write only below some directories.
        format!(
            "mount -o remount,rw {mount} # {BEFORE_WRITING}; if it is rw already: systemctl edit \
             flanneld, with ReadWritePaths={path} under [Service]"
        )
    } else if error.contains("No space left on device") {
        format!("du -x {mount} | sort -n | tail # then delete files there")
    } else if let Some((_, holder)) = error.split_once(".lock: held by ") {
        free_lock(path, holder)
    } else {
        let path = quoted(path);
        format!(
            "mount {path} || ls -la {path} # restore its files: with an empty directory every \
             daemon loses its lease and stops"
        )
    }
}

/// The command about the lock of a directory, by the text that names its `holder` first. If that is
/// a program of flannel, it waits for the disk, and its end would repair nothing.
fn free_lock(path: &str, holder: &str) -> String {
    let is_ours = ["flanneld (", "flannelctl ("].iter().any(|name| holder.starts_with(name));
    match process(holder) {
        _ if is_ours => "iostat -x 1 3 # flannel itself holds the lock of the store: most likely \
                         its disk is slow"
            .to_owned(),
        Some(pid) => format!("kill {pid} # it holds the lock of the store"),
        None => format!(
            "fuser -v {} # then end the process that holds the lock",
            quoted(&format!("{path}/.lock"))
        ),
    }
}

/// A word for the shell that has the mount point of a directory. The host finds it, because a
/// container may see the directory at another mount point.
pub(crate) fn mount_point(dir: &str) -> String {
    format!("\"$(findmnt -fno TARGET -T {})\"", quoted(dir))
}

/// A text as a single word for the shell. Quoted only if it has special characters.
pub(crate) fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:,@".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// The process that a text names last, because a program's name may have this form too: 4711 in
/// `flock (process 4711)`.
pub(crate) fn process(text: &str) -> Option<u32> {
    text.rsplit_once("(process ")?.1.split_once(')')?.0.parse().ok()
}

/// The command that restores etcd, by the error of a request to it.
fn restore_etcd(endpoints: &str, error: &str) -> String {
    let etcdctl = format!("etcdctl --endpoints {endpoints}");
    if error.contains("database space exceeded") {
        return format!(
            "{etcdctl} compact $({etcdctl} endpoint status -w fields | \
             awk '/\"Revision\"/{{print $3; exit}}'); {etcdctl} defrag; {etcdctl} alarm disarm"
        );
    }
    let host = |endpoint: &str| {
        let rest = endpoint.split_once("://").map_or(endpoint, |(_, rest)| rest);
        rest.rsplit_once(':').map_or(rest, |(host, _)| host).to_owned()
    };
    let hosts: Vec<String> = endpoints.split(',').map(host).collect();
    let each = if hosts.len() > 1 { ", where it does not run" } else { "" };
    let hosts = hosts.join(", ");
    format!(
        "systemctl restart etcd # on {hosts}{each}; to see which one answers: {etcdctl} endpoint \
         health"
    )
}

/// The finding on a store that answers after a time, if that is long. `holder` looks who holds the
/// lock of its directory.
pub fn slow_store(
    store: &str,
    took: Duration,
    holder: impl FnOnce() -> Option<String>,
) -> Option<Finding> {
    if took < SLOW {
        return None;
    }
    let holder = holder();
    let by = holder.as_ref().map(|holder| format!(": {holder} holds its lock")).unwrap_or_default();
    let text = format!("{store} does not answer within {} s{by}", SLOW.as_secs());
    let repair = match (parts(store), &holder) {
        (Some(("etcd", endpoints)), _) => format!(
            "etcdctl --endpoints {endpoints} endpoint status -w table # is one down, or slow? \
             else its disk or its network is slow, or this host's; if a DB SIZE is large: etcdctl \
             defrag, one member at a time"
        ),
        (Some(("dir", path)), Some(holder)) => free_lock(path, holder),
        _ => LOG.to_owned(),
    };
    Some(Finding::warning("store", text).with_command(repair))
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
                "dir:/srv/flannel",
                "dir:/srv/flannel: subnets/10.1.7.0-24: Read-only file system (os error 30)",
                "mount -o remount,rw \"$(findmnt -fno TARGET -T /srv/flannel)\" # first see dmesg: \
                 the kernel makes a damaged disk read-only; if it is rw already: systemctl edit \
                 flanneld, with ReadWritePaths=/srv/flannel under [Service]",
            ),
            ("dir:/srv/a b", "", "mount '/srv/a b' || ls -la '/srv/a b' # restore its files"),
            (
                "dir:/srv/flannel",
                "subnets/10.1.7.0-24: No space left on device (os error 28)",
                "du -x \"$(findmnt -fno TARGET -T /srv/flannel)\" | sort -n | tail #",
            ),
            (
                "dir:/srv/flannel",
                "dir:/srv/flannel: .lock: held by flock (process 4711) for 10s",
                "kill 4711 # it holds the lock",
            ),
            (
                "dir:/srv/flannel",
                "dir:/srv/flannel: .lock: held by flanneld (process 4711) for 10s",
                "iostat -x 1 3 # flannel itself holds the lock",
            ),
            (
                "dir:/srv/flannel",
                "dir:/srv/flannel: .lock: held by another process for 10s",
                "fuser -v /srv/flannel/.lock # then end",
            ),
            (
                "etcd:http://a:2379",
                "etcdserver: mvcc: database space exceeded",
                "etcdctl --endpoints http://a:2379 compact $(etcdctl --endpoints http://a:2379 \
                 endpoint status -w fields | awk '/\"Revision\"/{print $3; exit}'); etcdctl \
                 --endpoints http://a:2379 defrag; etcdctl --endpoints http://a:2379 alarm disarm",
            ),
            (
                "etcd:http://a:2379 (prefix /net)",
                "",
                "systemctl restart etcd # on a; to see which one answers: etcdctl --endpoints \
                 http://a:2379 endpoint health",
            ),
            (
                "etcd:https://a:2379",
                "invalid peer certificate: certificate expired: verification time 17 (UNIX)",
                "timedatectl set-ntp true # if date is wrong",
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
                "kube:https://10.96.0.1:443",
                "get nodes: the token /nosuch/token: No such file or directory (os error 2)",
                "ls -l /nosuch/token # the file",
            ),
            (
                "kube:https://10.96.0.1:443",
                "the API server's certificate is not accepted (unknown issuer): expected one",
                "openssl s_client -connect 10.96.0.1:443 </dev/null # shows the issuer",
            ),
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
    fn a_text_is_a_single_word_for_the_shell() {
        for (text, word) in [
            ("/srv/flannel-1.0", "/srv/flannel-1.0"),
            ("", "''"),
            ("a b", "'a b'"),
            ("$(a)", "'$(a)'"),
            ("it's", r"'it'\''s'"),
        ] {
            assert_eq!(quoted(text), word);
        }
        assert_eq!(mount_point("/a b"), "\"$(findmnt -fno TARGET -T '/a b')\"");
    }

    #[test]
    fn a_store_is_slow_from_a_second_on() {
        let found = |store: &str, took, holder: Option<&str>| {
            let found = slow_store(store, took, || holder.map(str::to_owned))?;
            Some(format!("{} | {}", found.text, found.repair.unwrap_or_default()))
        };
        assert_eq!(found("etcd:http://a:2379", SLOW - Duration::from_millis(1), None), None);
        for (store, holder, expected) in [
            (
                "etcd:http://a:2379",
                None,
                "etcd:http://a:2379 does not answer within 1 s | etcdctl --endpoints http://a:2379 \
                 endpoint status -w table # is one down, or slow? else its disk or its network is \
                 slow, or this host's; if a DB SIZE is large: etcdctl defrag, one member at a time",
            ),
            (
                "dir:/srv/flannel",
                Some("flock (process 4711)"),
                "dir:/srv/flannel does not answer within 1 s: flock (process 4711) holds its lock \
                 | kill 4711 # it holds the lock of the store",
            ),
            (
                "dir:/srv/flannel",
                Some("flannelctl (process 4711)"),
                "dir:/srv/flannel does not answer within 1 s: flannelctl (process 4711) holds its \
                 lock | iostat -x 1 3 # flannel itself holds the lock of the store: most likely \
                 its disk is slow",
            ),
            (
                "dir:/srv/flannel",
                Some("another process"),
                "dir:/srv/flannel does not answer within 1 s: another process holds its lock | \
                 fuser -v /srv/flannel/.lock # then end the process that holds the lock",
            ),
        ] {
            assert_eq!(found(store, SLOW, holder).as_deref(), Some(expected));
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
