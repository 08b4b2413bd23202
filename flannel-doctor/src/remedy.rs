//! Renders remedies as commands.
//!
//! This is the only module that names commands of flannel's programs, of systemd's unit, of
//! Kubernetes and of firewalls. All other modules return a [`Remedy`].

pub(crate) mod firewall;

pub use firewall::{first_rule, who_changes_rules};

use std::fmt;
use std::net::IpAddr;

use flannel_api::Deployment;
use flannel_core::remedy::Remark;
use flannel_core::subnet::{LockHolder, StoreFailure, StoreKind};
use flannel_core::{Lease, Remedy, Subnets};

/// The command that lets the host's clock follow the time of other hosts.
pub(crate) const SET_CLOCK: &str = "timedatectl set-ntp true";
/// What to do before a file system is mounted for writing again.
pub(crate) const BEFORE_WRITING: &str =
    "first see dmesg: the kernel makes a damaged disk read-only";
/// The subnets of all nodes in Kubernetes.
const NODES: &str = "kubectl get nodes -o custom-columns=N:.metadata.name,C:.spec.podCIDRs";
/// The network config in Kubernetes.
const EDIT_CONFIG_MAP: &str = "kubectl -n kube-flannel edit configmap kube-flannel-cfg";
/// How to know that a node is gone: a node that does not answer may still have pods.
const GONE: &str = "if that node is gone (no host has its HOLDER of flannelctl lease list in the \
                    file mark of its --state-dir)";

/// The command of a remedy for a deployment. Remarks for people follow `#`.
pub fn render(remedy: &Remedy, deployment: Deployment) -> String {
    Rendered::new(remedy, deployment).to_string()
}

/// Shell commands, and remarks about them.
#[derive(Debug, Default)]
struct Rendered {
    /// One after the other.
    commands: Vec<String>,
    /// What the commands need to be right, such as the value to write. It comes before the remarks.
    detail: Option<String>,
    remarks: Vec<String>,
}

/// `command; command # detail: remark; remark`.
impl fmt::Display for Rendered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let remarks = self.remarks.join("; ");
        let after = match &self.detail {
            Some(detail) if remarks.is_empty() => detail.clone(),
            Some(detail) => format!("{detail}: {remarks}"),
            None => remarks,
        };
        f.write_str(&self.commands.join("; "))?;
        match (self.commands.is_empty(), after.is_empty()) {
            (_, true) => Ok(()),
            (true, false) => write!(f, "# {after}"),
            (false, false) => write!(f, " # {after}"),
        }
    }
}

impl Rendered {
    fn new(remedy: &Remedy, deployment: Deployment) -> Self {
        match remedy {
            Remedy::Run(command) => Self::command(command.as_str()),
            Remedy::Remarked { remedy, remark } => {
                let rendered = Self::new(remedy, deployment);
                match remark {
                    Remark::Text(text) => rendered.remark(text.as_str()),
                    Remark::Mention { before, remedy, after } => {
                        rendered.remark(format!("{before}{}{after}", render(remedy, deployment)))
                    }
                    _ => rendered,
                }
            }
            Remedy::All(all) => Self::all(all, deployment),
            Remedy::RestoreStore { store, failure } => restore_store(store, failure, deployment),
            Remedy::ReadLog
            | Remedy::StartDaemon
            | Remedy::RestartDaemon
            | Remedy::ShowCapabilities => of_daemon(remedy, deployment),
            Remedy::ListLeases
            | Remedy::ReleaseLease(_)
            | Remedy::ReleaseReservation(_)
            | Remedy::ReleaseOrReaddress(_)
            | Remedy::FreeSubnets => of_leases(remedy, deployment),
            Remedy::SetConfig | Remedy::PatchConfig(_) | Remedy::CheckConfig => {
                of_config(remedy, deployment)
            }
            Remedy::ShowStatus => Self::command("flannelctl status"),
            Remedy::WatchStatus => Self::command("flannelctl watch"),
            Remedy::ExamineNode => Self::command("flannelctl doctor"),
            Remedy::Explain(address) => Self::command(format!("flannelctl why {address}")),
            Remedy::ListPeers => Self::command("flannelctl peers"),
            // A later variant.
            _ => of_daemon(&Remedy::ReadLog, deployment),
        }
    }

    fn command(command: impl Into<String>) -> Self {
        Self { commands: vec![command.into()], ..Self::default() }
    }

    /// A remedy that no command carries out.
    fn words(text: &str) -> Self {
        Self::default().remark(text)
    }

    fn detail(self, text: impl Into<String>) -> Self {
        Self { detail: Some(text.into()), ..self }
    }

    fn remark(mut self, text: impl Into<String>) -> Self {
        self.remarks.push(text.into());
        self
    }

    /// All commands and all remarks, each once.
    fn all(remedies: &[Remedy], deployment: Deployment) -> Self {
        let mut joined = Self::default();
        for remedy in remedies {
            let Self { commands, detail, remarks } = Self::new(remedy, deployment);
            for command in commands {
                if !joined.commands.contains(&command) {
                    joined.commands.push(command);
                }
            }
            for remark in detail.into_iter().chain(remarks) {
                if !joined.remarks.contains(&remark) {
                    joined.remarks.push(remark);
                }
            }
        }
        joined
    }
}

/// A remedy about the process of the daemon.
fn of_daemon(remedy: &Remedy, deployment: Deployment) -> Rendered {
    match (remedy, deployment) {
        (Remedy::StartDaemon, Deployment::Embedded) => {
            Rendered::words("start the program that embeds flannel")
        }
        (Remedy::RestartDaemon, Deployment::Embedded) => {
            Rendered::words("restart the program that embeds flannel")
        }
        (Remedy::ShowCapabilities, Deployment::Embedded) => {
            Rendered::words("look at the capabilities of the program that embeds flannel")
        }
        (_, Deployment::Embedded) => {
            Rendered::words("see the log of the program that embeds flannel")
        }
        (Remedy::StartDaemon | Remedy::RestartDaemon, Deployment::Kubernetes) => {
            Rendered::command("kubectl -n kube-flannel delete pod POD")
        }
        (Remedy::ShowCapabilities, Deployment::Kubernetes) => {
            Rendered::command("kubectl -n kube-flannel get daemonset kube-flannel-ds -o yaml")
        }
        (_, Deployment::Kubernetes) => {
            Rendered::command("kubectl -n kube-flannel logs POD -c kube-flannel")
        }
        (Remedy::StartDaemon, _) => Rendered::command("systemctl start flanneld"),
        (Remedy::RestartDaemon, _) => Rendered::command("systemctl restart flanneld"),
        (Remedy::ShowCapabilities, _) => {
            Rendered::command("systemctl show -p CapabilityBoundingSet flanneld")
        }
        _ => Rendered::command("journalctl -u flanneld"),
    }
}

/// A remedy about the network config.
fn of_config(remedy: &Remedy, deployment: Deployment) -> Rendered {
    match (remedy, deployment) {
        (Remedy::PatchConfig(patch), Deployment::Kubernetes) => {
            Rendered::command(EDIT_CONFIG_MAP).detail(format!("with {patch} in it"))
        }
        (_, Deployment::Kubernetes) => Rendered::command(EDIT_CONFIG_MAP),
        (Remedy::PatchConfig(patch), _) => {
            Rendered::command(format!("flannelctl config patch '{patch}'"))
        }
        (Remedy::CheckConfig, _) => Rendered::command("flannelctl config check"),
        _ => Rendered::command("flannelctl config set FILE"),
    }
}

/// A remedy about leases in the store. A key is quoted, because a dual-stack key contains `&`.
fn of_leases(remedy: &Remedy, deployment: Deployment) -> Rendered {
    let is_kubernetes = deployment == Deployment::Kubernetes;
    match remedy {
        Remedy::ReleaseReservation(key) => {
            Rendered::command(format!("flannelctl lease release '{key}'"))
                .remark("if no other host has its public address")
        }
        // A deleted node has no subnet.
        Remedy::ReleaseLease(_) if is_kubernetes => Rendered::command(NODES)
            .detail("then kubectl delete node")
            .remark("if that node is gone"),
        Remedy::ReleaseOrReaddress(_) if is_kubernetes => Rendered::command(NODES)
            .detail("then kubectl delete node")
            .remark("if that node is gone, else give it another --public-ip"),
        Remedy::ReleaseLease(key) => {
            Rendered::command(format!("flannelctl lease release --force '{key}'")).remark(GONE)
        }
        Remedy::ReleaseOrReaddress(key) => {
            Rendered::command(format!("flannelctl lease release --force '{key}'"))
                .remark(format!("{GONE}, else give it another --public-ip"))
        }
        Remedy::FreeSubnets => {
            let release = if is_kubernetes { "kubectl delete node" } else { "lease release" };
            of_leases(&Remedy::ListLeases, deployment)
                .remark(format!("{release} releases those of nodes that are gone"))
                .remark("or enlarge the network")
        }
        _ if is_kubernetes => Rendered::command(NODES),
        _ => Rendered::command("flannelctl lease list"),
    }
}

/// The commands that make a store answer again.
fn restore_store(store: &StoreKind, failure: &StoreFailure, deployment: Deployment) -> Rendered {
    if *failure == StoreFailure::CertificateTime {
        return Rendered::command(SET_CLOCK)
            .remark("if date is wrong here or there")
            .remark("else renew the certificate");
    }
    match store {
        StoreKind::Directory { path } => restore_directory(path, failure, deployment),
        StoreKind::Etcd { endpoints } => restore_etcd(endpoints, failure),
        StoreKind::Kubernetes { url } => restore_kubernetes(url, failure),
        _ => of_daemon(&Remedy::ReadLog, deployment),
    }
}

/// The command for a Kubernetes API that does not serve the daemon.
fn restore_kubernetes(url: &str, failure: &StoreFailure) -> Rendered {
    match failure {
        StoreFailure::Forbidden => Rendered::command("kubectl apply -f kube-flannel.yml").remark(
            "restores the ClusterRole flannel and its binding, which kubectl describe clusterrole \
             flannel shows",
        ),
        StoreFailure::Unauthorized => {
            Rendered::command("kubectl -n kube-flannel rollout restart daemonset/kube-flannel-ds")
                .remark("new pods get a new token of the service account flannel")
        }
        StoreFailure::ServerCertificate => {
            let host = url.trim_start_matches("https://");
            Rendered::command(format!("openssl s_client -connect {host} </dev/null")).remark(
                "shows the issuer of the certificate: write its CA to the kubeconfig \
                 (certificate-authority), or restart the pod, which gets the CA of the cluster",
            )
        }
        StoreFailure::Token { path } => Rendered::command(format!("ls -l {}", quoted(path)))
            .remark("the file of the token, which the kubeconfig names"),
        _ => Rendered::command(format!("curl -k {url}/readyz")).remark(
            "on this host: if it does not answer, the API server is down, or kube-proxy does not \
             serve its address",
        ),
    }
}

/// The command that restores the directory of a store.
fn restore_directory(path: &str, failure: &StoreFailure, deployment: Deployment) -> Rendered {
    let mount = mount_point(path);
    match failure {
        StoreFailure::ReadOnly => {
            let rendered =
                Rendered::command(format!("mount -o remount,rw {mount}")).remark(BEFORE_WRITING);
            // The usual unit lets the daemon write only below some directories.
            match deployment {
                Deployment::Systemd => rendered.remark(format!(
                    "if it is rw already: systemctl edit flanneld, with ReadWritePaths={path} \
                     under [Service]"
                )),
                _ => rendered,
            }
        }
        StoreFailure::NoSpace => Rendered::command(format!("du -x {mount} | sort -n | tail"))
            .remark("then delete files there"),
        StoreFailure::Locked { by } => free_lock(path, by.as_ref()),
        _ => {
            let path = quoted(path);
            Rendered::command(format!("mount {path} || ls -la {path}")).remark(
                "restore its files: with an empty directory every daemon loses its lease and stops",
            )
        }
    }
}

/// The command about the lock of a directory. If a program of flannel holds it, that program waits
/// for the disk, and its end would repair nothing.
fn free_lock(path: &str, holder: Option<&LockHolder>) -> Rendered {
    match holder {
        Some(LockHolder { name, .. }) if name == "flanneld" || name == "flannelctl" => {
            Rendered::command("iostat -x 1 3")
                .remark("flannel itself holds the lock of the store: most likely its disk is slow")
        }
        Some(LockHolder { pid, .. }) => {
            Rendered::command(format!("kill {pid}")).remark("it holds the lock of the store")
        }
        None => Rendered::command(format!("fuser -v {}", quoted(&format!("{path}/.lock"))))
            .remark("then end the process that holds the lock"),
    }
}

/// The command that restores etcd.
fn restore_etcd(endpoints: &[String], failure: &StoreFailure) -> Rendered {
    let etcdctl = format!("etcdctl --endpoints {}", endpoints.join(","));
    if *failure == StoreFailure::QuotaExceeded {
        return Rendered::command(format!(
            "{etcdctl} compact $({etcdctl} endpoint status -w fields | \
             awk '/\"Revision\"/{{print $3; exit}}'); {etcdctl} defrag; {etcdctl} alarm disarm"
        ));
    }
    let hosts: Vec<&str> = endpoints.iter().map(|endpoint| host_of(endpoint)).collect();
    let each = if hosts.len() > 1 { ", where it does not run" } else { "" };
    let hosts = hosts.join(", ");
    Rendered::command("systemctl restart etcd")
        .remark(format!("on {hosts}{each}"))
        .remark(format!("to see which one answers: {etcdctl} endpoint health"))
}

/// The host of a URL.
fn host_of(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    rest.rsplit_once(':').map_or(rest, |(host, _)| host)
}

/// A word for the shell that has the mount point of a directory. The host finds it, because a
/// container may see the directory at another mount point.
pub(crate) fn mount_point(dir: &str) -> String {
    format!("\"$(findmnt -fno TARGET -T {})\"", quoted(dir))
}

/// A text as a single word for the shell. Quoted only if it has special characters.
pub(crate) fn quoted(text: &str) -> String {
    let is_plain = text.chars().all(|c| c.is_ascii_alphanumeric() || "/._-+:,@".contains(c));
    if !text.is_empty() && is_plain {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// The remedy for nodes that share a public address: the youngest of the `peers` with that address
/// should release its lease, or have another address.
pub fn of_shared_address<'a>(address: IpAddr, peers: impl Iterator<Item = &'a Lease>) -> Remedy {
    let has_it =
        |lease: &&Lease| lease.attrs.preferred.public.values().any(|public| *public == address);
    match peers.filter(has_it).max_by_key(|lease| lease.since) {
        Some(lease) => readdress(&lease.subnets),
        None => Remedy::ListPeers,
    }
}

/// The remedy for nodes with different VNIs.
pub fn one_vni() -> Remedy {
    Remedy::SetConfig.remark(
        "with one VNI in the Backend for all nodes; restart Go flannel on its nodes, which does \
         not follow the config",
    )
}

/// The remedy for a lease with a public address that another node has too.
pub fn readdress(subnets: &Subnets) -> Remedy {
    Remedy::ReleaseOrReaddress(subnets.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(path: &str) -> StoreKind {
        StoreKind::Directory { path: path.into() }
    }

    fn etcd(endpoints: &[&str]) -> StoreKind {
        StoreKind::Etcd { endpoints: endpoints.iter().map(ToString::to_string).collect() }
    }

    fn kubernetes(url: &str) -> StoreKind {
        StoreKind::Kubernetes { url: url.into() }
    }

    fn locked(name: &str) -> StoreFailure {
        StoreFailure::Locked { by: Some(LockHolder { name: name.into(), pid: 4711 }) }
    }

    #[test]
    fn the_command_that_restores_a_store_matches_its_kind() {
        let api = "https://10.96.0.1:443";
        for (store, failure, command) in [
            (
                directory("/srv/flannel"),
                StoreFailure::Other,
                "mount /srv/flannel || ls -la /srv/flannel # restore its files",
            ),
            (
                directory("/srv/flannel"),
                StoreFailure::ReadOnly,
                "mount -o remount,rw \"$(findmnt -fno TARGET -T /srv/flannel)\" # first see dmesg: \
                 the kernel makes a damaged disk read-only; if it is rw already: systemctl edit \
                 flanneld, with ReadWritePaths=/srv/flannel under [Service]",
            ),
            (
                directory("/srv/a b"),
                StoreFailure::Other,
                "mount '/srv/a b' || ls -la '/srv/a b' # restore its files",
            ),
            (
                directory("/srv/flannel"),
                StoreFailure::NoSpace,
                "du -x \"$(findmnt -fno TARGET -T /srv/flannel)\" | sort -n | tail #",
            ),
            (directory("/srv/flannel"), locked("flock"), "kill 4711 # it holds the lock"),
            (
                directory("/srv/flannel"),
                locked("flanneld"),
                "iostat -x 1 3 # flannel itself holds the lock",
            ),
            (
                directory("/srv/flannel"),
                StoreFailure::Locked { by: None },
                "fuser -v /srv/flannel/.lock # then end",
            ),
            (
                etcd(&["http://a:2379"]),
                StoreFailure::QuotaExceeded,
                "etcdctl --endpoints http://a:2379 compact $(etcdctl --endpoints http://a:2379 \
                 endpoint status -w fields | awk '/\"Revision\"/{print $3; exit}'); etcdctl \
                 --endpoints http://a:2379 defrag; etcdctl --endpoints http://a:2379 alarm disarm",
            ),
            (
                etcd(&["http://a:2379"]),
                StoreFailure::Other,
                "systemctl restart etcd # on a; to see which one answers: etcdctl --endpoints \
                 http://a:2379 endpoint health",
            ),
            (
                etcd(&["https://a:2379"]),
                StoreFailure::CertificateTime,
                "timedatectl set-ntp true # if date is wrong",
            ),
            (
                etcd(&["https://etcd-1:2379", "https://[fd00::2]:2379"]),
                StoreFailure::Other,
                "systemctl restart etcd # on etcd-1, [fd00::2], where it does not run; to see \
                 which one answers: etcdctl --endpoints https://etcd-1:2379,https://[fd00::2]:2379 \
                 endpoint health",
            ),
            (kubernetes(api), StoreFailure::Other, "curl -k https://10.96.0.1:443/readyz # on"),
            (
                kubernetes(api),
                StoreFailure::Token { path: "/nosuch/token".into() },
                "ls -l /nosuch/token # the file",
            ),
            (
                kubernetes(api),
                StoreFailure::ServerCertificate,
                "openssl s_client -connect 10.96.0.1:443 </dev/null # shows the issuer",
            ),
            (kubernetes(api), StoreFailure::Unauthorized, "kubectl -n kube-flannel rollout"),
            (kubernetes(api), StoreFailure::Forbidden, "kubectl apply -f kube-flannel.yml #"),
            (StoreKind::Other, StoreFailure::Other, "journalctl -u flanneld"),
        ] {
            let remedy = Remedy::RestoreStore { store: store.clone(), failure };
            let restored = render(&remedy, Deployment::Systemd);
            assert!(restored.starts_with(command), "{restored}");
            if store.is_kubernetes() {
                assert_eq!(render(&remedy, Deployment::Kubernetes), restored);
            }
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
    fn each_deployment_has_its_own_command() {
        let gone = "# if that node is gone (no host has its HOLDER of flannelctl lease list in the \
                    file mark of its --state-dir)";
        let patch = || Remedy::PatchConfig("{\"Backend\": {\"MTU\": 1400}}".into());
        for (remedy, systemd, kubernetes, embedded) in [
            (
                Remedy::ReadLog,
                "journalctl -u flanneld",
                "kubectl -n kube-flannel logs POD -c kube-flannel",
                "# see the log of the program that embeds flannel",
            ),
            (
                Remedy::RestartDaemon.remark("here"),
                "systemctl restart flanneld # here",
                "kubectl -n kube-flannel delete pod POD # here",
                "# restart the program that embeds flannel; here",
            ),
            (
                Remedy::run("kill 7").mention("or ", Remedy::SetConfig, ", with another \"Port\""),
                "kill 7 # or flannelctl config set FILE, with another \"Port\"",
                "kill 7 # or kubectl -n kube-flannel edit configmap kube-flannel-cfg, with another \
                 \"Port\"",
                "kill 7 # or flannelctl config set FILE, with another \"Port\"",
            ),
            (
                Remedy::ReleaseLease("10.1.7.0-24".into()),
                &format!("flannelctl lease release --force '10.1.7.0-24' {gone}"),
                &format!("{NODES} # then kubectl delete node: if that node is gone"),
                &format!("flannelctl lease release --force '10.1.7.0-24' {gone}"),
            ),
            (
                Remedy::ReleaseOrReaddress("10.1.7.0-24".into()),
                &format!(
                    "flannelctl lease release --force '10.1.7.0-24' {gone}, else give it another \
                     --public-ip"
                ),
                &format!(
                    "{NODES} # then kubectl delete node: if that node is gone, else give it \
                     another --public-ip"
                ),
                &format!(
                    "flannelctl lease release --force '10.1.7.0-24' {gone}, else give it another \
                     --public-ip"
                ),
            ),
            (
                patch().remark("better known"),
                "flannelctl config patch '{\"Backend\": {\"MTU\": 1400}}' # better known",
                "kubectl -n kube-flannel edit configmap kube-flannel-cfg # with {\"Backend\": \
                 {\"MTU\": 1400}} in it: better known",
                "flannelctl config patch '{\"Backend\": {\"MTU\": 1400}}' # better known",
            ),
            (
                Remedy::run("sysctl -w net.ipv4.ip_forward=1"),
                "sysctl -w net.ipv4.ip_forward=1",
                "sysctl -w net.ipv4.ip_forward=1",
                "sysctl -w net.ipv4.ip_forward=1",
            ),
        ] {
            assert_eq!(render(&remedy, Deployment::Systemd), systemd);
            assert_eq!(render(&remedy, Deployment::Kubernetes), kubernetes);
            assert_eq!(render(&remedy, Deployment::Embedded), embedded);
        }
    }
}
