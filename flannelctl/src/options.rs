//! The command line of `flannelctl`.
//!
//! Options that flanneld also has have the same names and the same environment variables. They may
//! precede or follow the command.

mod parse;

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, CommandFactory, Parser, Subcommand};
#[cfg(feature = "etcd")]
use flannel_options::EtcdFlags;
use flannel_options::{
    Error as OptionsError, InterfaceFlags, RegistryUrl, control, open_directory,
};
use flannel_subnet::Registry;

pub(crate) use self::parse::misspelt_variables;

use crate::error::{Error, Result};
use crate::verbs::docker_opts::DockerFlags;
use crate::verbs::lease::LeaseVerb;

/// The command line of `flannelctl`.
#[derive(Debug, Parser)]
#[command(
    name = "flannelctl",
    version,
    about = "Shows the state of this host's flannel daemon, and maintains its store and its kernel \
        objects.",
    args_override_self = true,
    subcommand_value_name = "COMMAND",
    subcommand_help_heading = "Commands",
    after_help = "Exit status: 0 for success, 1 for a problem or an error, 2 for wrong usage.\n\
        Options that flanneld also has are read from the same environment variables, for example \
        FLANNELD_REGISTRY."
)]
pub(crate) struct Ctl {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// The whole command line of `flannelctl`, for generators of documents.
pub fn command() -> clap::Command {
    Ctl::command().mut_args(|arg| match arg.get_id().as_str() {
        "help" | "version" => arg,
        _ => arg.global(true),
    })
}

/// Paths and addresses.
#[derive(Debug, Args)]
#[command(next_help_heading = "Paths and addresses")]
pub(crate) struct Global {
    /// The socket of the daemon, or off; by default flanneld.sock beside the subnet file, or
    /// NAME.sock beside a subnet file NAME.env
    #[arg(long, value_name = "FILE|off")]
    pub(crate) control_socket: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long, help_heading = "Options")]
    pub(crate) json: bool,

    /// The store of leases: etcd, dir:PATH, or dir:PATH?assign=static
    #[arg(long, value_name = "URL")]
    #[cfg_attr(feature = "etcd", arg(default_value = "etcd"))]
    pub(crate) registry: Option<RegistryUrl>,

    /// The file with this host's subnet for CNI plugins
    #[arg(long, value_name = "FILE", default_value = "/run/flannel/subnet.env")]
    pub(crate) subnet_file: PathBuf,

    /// The directory of the daemon's state, such as its holder id and the last set of leases
    #[arg(long, value_name = "DIR", default_value = "/var/lib/flannel")]
    pub(crate) state_dir: PathBuf,

    #[cfg(feature = "etcd")]
    #[command(flatten)]
    pub(crate) etcd: EtcdFlags,

    /// It runs in a pod of Kubernetes, and no store is named.
    #[arg(skip)]
    pub(crate) only_kubernetes: bool,
}

impl Global {
    /// The socket of a daemon with the same options; `None` if it has no socket.
    pub(crate) fn socket(&self) -> Option<PathBuf> {
        control::socket(self.control_socket.as_deref(), &self.subnet_file)
    }

    /// Opens an existing store. Does not create one: in a directory whose file system is not
    /// mounted, an empty store would make every daemon that uses it stop. A directory with neither
    /// `config` nor `subnets` counts as not mounted.
    pub(crate) async fn open_registry(&self) -> Result<Arc<dyn Registry>> {
        if let Some(RegistryUrl::Dir(location)) = &self.registry {
            let broken = |source: std::io::Error| flannel_core::Error::Store {
                store: format!("dir:{}", location.path.display()),
                source: source.into(),
            };
            std::fs::metadata(&location.path).map_err(broken)?;
            let has = |name| location.path.join(name).try_exists().map_err(broken);
            if !has("config")? && !has("subnets")? {
                let text =
                    "neither config nor subnets is in it; perhaps its file system is not mounted";
                return Err(broken(std::io::Error::new(std::io::ErrorKind::NotFound, text)).into());
            }
        }
        self.make_registry().await
    }

    /// Opens the store, or creates one.
    pub(crate) async fn make_registry(&self) -> Result<Arc<dyn Registry>> {
        let missing = || {
            OptionsError::Usage(
                "--registry is missing; expected dir:PATH, such as dir:/etc/flannel/network".into(),
            )
        };
        if self.only_kubernetes {
            return Err(Error::Refused(
                "in Kubernetes, leases are annotations of nodes (kubectl describe node NODE), and \
                 the network config is in a ConfigMap (kubectl -n kube-flannel edit configmap \
                 kube-flannel-cfg); for another store, give --registry or --etcd-endpoints"
                    .to_owned(),
            ));
        }
        let url = self.registry.as_ref().ok_or_else(missing)?;
        let registry = match url {
            RegistryUrl::Dir(location) => open_directory(location, false).await?,
            #[cfg(feature = "etcd")]
            RegistryUrl::Etcd => flannel_options::open_etcd(self.etcd.options())?,
            #[cfg(not(feature = "etcd"))]
            RegistryUrl::Etcd => {
                let text = "--registry etcd: this build has no etcd; expected dir:PATH";
                return Err(OptionsError::Usage(text.to_owned()).into());
            }
        };
        Ok(registry)
    }
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Show the state of this node: problems, lease, interface, backend, store and peers
    #[command(
        long_about = "Shows the state of this node: problems first, then its lease, interface, \
            backend, store and peers. Exit status 1 if it is not ready. Without a daemon it shows \
            the state that the last one left."
    )]
    Status,
    /// List every peer with its state; without a daemon, every lease in etcd or the directory
    Peers,
    /// List the paths to peers with the results of the daemon's probes
    #[command(
        long_about = "Lists the paths to peers with the results of the daemon's probes: failing \
            ones first, with their faults, then the longest round trips. Exit status 1 if a path \
            fails."
    )]
    Paths,
    /// Explain the path of packets to a pod's address
    #[command(
        long_about = "Explains the path of packets to a pod's address: the lease that holds it, \
            the kernel objects of that lease with their states, and the kernel's own route, with \
            foreign routes and rules. Exit status 1 if packets take another path than the lease's."
    )]
    Why {
        /// The address of a pod
        #[arg(value_name = "ADDRESS")]
        address: IpAddr,
    },
    /// Look for faults between the store and the wire, and print commands that repair them
    #[command(
        long_about = "Looks for faults between the store and the wire. It checks the store, the \
            daemon, this host's settings, devices and their MTU. It sends small and full-size \
            pings to the tunnel address and the public address of each peer. If a peer runs this \
            daemon, both send full-size TCP segments and report the direction of a loss. Each \
            finding has a command that repairs it. Exit status 1 if there is a finding. Without a \
            daemon it uses the store, the cache and the kernel; leases in Kubernetes need a daemon."
    )]
    Doctor(DoctorFlags),
    /// Show the status repeatedly, until interrupted
    #[command(
        long_about = "Shows the status repeatedly, until interrupted. A terminal is redrawn; \
            otherwise, and with --json (one object per line), the status is printed after each \
            change."
    )]
    Watch {
        /// Seconds between two requests
        #[arg(long, value_name = "SECONDS", default_value_t = 1)]
        #[arg(value_parser = clap::value_parser!(u64).range(1..=3600))]
        interval: u64,
    },
    /// Make the daemon read config and certificates again and reset its log filter, as SIGHUP does
    Reload,
    /// Set the daemon's log filter, until SIGHUP or reload
    Log {
        /// As for flanneld --log: error, warn, info, debug, trace, or a filter such as
        /// info,flannel_core=debug
        #[arg(value_name = "FILTER")]
        filter: String,
    },
    /// Remove the daemon's kernel objects, or prepare them for Go flannel
    #[command(
        long_about = "Removes the daemon's kernel objects: routes, nexthop objects, forwarding \
            entries, neighbours, addresses, devices, firewall rules; then the subnet file and the \
            cached leases. Pods lose their connection to other nodes. The daemon must not run, \
            because it would restore everything. The network config, in the store or as the daemon \
            last read it, determines the objects."
    )]
    Cleanup(CleanupFlags),
    /// Write this host's subnet as options for the Docker daemon, as mk-docker-opts.sh does
    #[command(
        long_about = "Writes this host's subnet as options for the Docker daemon: the flags and \
            the output of Go flannel's mk-docker-opts.sh. Exit status 1 if there is no subnet \
            file and no FLANNEL_SUBNET in the environment, or if the routing table sends this \
            subnet to another host."
    )]
    DockerOpts(DockerFlags),
    /// Check or write the network config
    #[command(subcommand)]
    Config(ConfigVerb),
    /// List, reserve or release leases
    #[command(subcommand)]
    Lease(LeaseVerb),
}

/// The options of `doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorFlags {
    /// The maximum number of peers to ask; peers with problems come first
    #[arg(long, value_name = "NUMBER", default_value_t = 64, value_parser = peers)]
    pub(crate) peers: usize,

    /// The port of the path-probe service of peers, the --doctor-port of their daemons; 0: no probe
    #[arg(long, value_name = "PORT")]
    #[arg(default_value = control::DOCTOR_PORT, value_parser = control::port)]
    pub(crate) doctor_port: u16,

    /// The external interface to assume if the daemon is not running.
    #[command(flatten, next_help_heading = "External interface, as for the daemon")]
    pub(crate) interface: InterfaceFlags,
}

fn peers(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| *number <= 10_000);
    number.ok_or_else(|| "expected a number from 0 to 10000".to_owned())
}

/// The options of `cleanup`.
#[derive(Debug, Args)]
pub(crate) struct CleanupFlags {
    /// Only print the changes; the daemon may run
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Change only objects that Go flannel cannot handle: routes by nexthop objects become plain
    /// ones in place, blackhole routes (--ip-blackhole-route, RequireEncryption), the guards of
    /// tunnels (SourceCheck) and the rules of encryption are removed; no packet is lost
    #[arg(long)]
    pub(crate) for_go: bool,

    /// The network config of the daemon, - for standard input; by default the one in the store
    #[arg(long, value_name = "FILE")]
    pub(crate) net_config_path: Option<PathBuf>,

    /// The external interface of the daemon.
    #[command(flatten, next_help_heading = "External interface, as for the daemon")]
    pub(crate) interface: InterfaceFlags,
}

/// The subcommands of `config`.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigVerb {
    /// Check a network config, and show it with all defaults
    #[command(
        long_about = "Checks a network config, and shows it with all defaults. Exit status 1 if it \
            has a mistake: a value that daemons refuse, an unknown field, a field that is there \
            twice, host bits in a network, or a network that pods cannot use; or if the daemon of \
            this node cannot build a network from it. Other nodes are not asked."
    )]
    Check {
        /// The file, - for standard input; by default the config in the store
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// Check a network config and write it to the store
    #[command(
        long_about = "Checks a network config and writes it to the store. Fails without writing if \
            the config has a mistake, if the daemon of this node cannot build a network from it, \
            or if another program changes the store's config meanwhile. Other nodes are not asked. \
            Running daemons apply backend options at once, and other pod networks or subnets at \
            their next start."
    )]
    Set {
        /// The file, - for standard input
        #[arg(value_name = "FILE")]
        file: PathBuf,

        /// Write the config even if it has mistakes, or this node cannot use it
        #[arg(long)]
        force: bool,
    },
    /// Change some fields of the network config in the store
    #[command(
        long_about = "Changes the fields of the network config in the store that a JSON object \
            names; null removes a field. The result is checked, and written as config set does."
    )]
    Patch {
        /// Such as '{"Backend": {"MTU": 1400}}'
        #[arg(value_name = "PATCH", value_parser = patch)]
        patch: String,

        /// Write the config even if it has mistakes, or this node cannot use it
        #[arg(long)]
        force: bool,
    },
}

fn patch(text: &str) -> Result<String, String> {
    match serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(format!(
            "{error}; expected a JSON object such as '{{\"Backend\": {{\"MTU\": 1400}}}}'"
        )),
    }
}

#[cfg(test)]
mod tests {
    use flannel_netlink::iface::Selectors;

    use std::ffi::OsString;

    use super::*;

    fn parse(args: &[&str], env: &[(&str, &str)]) -> Result<Ctl, OptionsError> {
        let args = std::iter::once("flannelctl").chain(args.iter().copied()).map(OsString::from);
        Ctl::parse_from(args, |name| {
            env.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn global_options_may_follow_a_verb_and_override_the_environment() {
        let env = [
            ("FLANNELD_REGISTRY", "dir:/env"),
            ("FLANNELD_STATE_DIR", "/state"),
            ("FLANNELD_CONTROL_SOCKET", ""),
        ];
        for (args, registry) in [
            (&["status"] as &[&str], "dir:/env"),
            (&["--registry", "dir:/a", "status"], "dir:/a"),
            (&["status", "--registry=dir:/b"], "dir:/b"),
            (&["lease", "list", "--registry", "dir:/c", "--json"], "dir:/c"),
        ] {
            let options = parse(args, &env).unwrap();
            assert_eq!(options.global.registry.as_ref().unwrap().to_string(), registry, "{args:?}");
            assert_eq!(options.global.state_dir.to_str(), Some("/state"));
            assert_eq!(options.global.socket(), Some("/run/flannel/flanneld.sock".into()));
            assert_eq!(options.global.json, args.contains(&"--json"));
        }
    }

    #[test]
    fn the_socket_path_follows_the_variables_of_the_daemon() {
        for (env, expected) in [
            (("FLANNELD_SUBNET_FILE", "/run/other/subnet.env"), Some("/run/other/flanneld.sock")),
            (("FLANNELD_CONTROL_SOCKET", "/run/a.sock"), Some("/run/a.sock")),
            (("FLANNELD_CONTROL_SOCKET", "off"), None),
        ] {
            let options = parse(&["status"], &[env]).unwrap();
            assert_eq!(options.global.socket(), expected.map(PathBuf::from), "{env:?}");
        }
    }

    /// An empty variable counts as unset, and numbers are Go's, as for the daemon.
    #[test]
    fn options_of_a_verb_are_read_from_the_variables_of_the_daemon() {
        let doctor = |args: &[&str], env: &[(&str, &str)]| match parse(args, env)
            .map(|options| options.verb)
        {
            Ok(Verb::Doctor(flags)) => (flags.doctor_port, flags.interface.iface),
            other => panic!("{args:?} {env:?}: {other:?}"),
        };
        for (args, env, port) in [
            (&["doctor"] as &[&str], &[] as &[(&str, &str)], 8473),
            (&["doctor"], &[("FLANNELD_DOCTOR_PORT", "")], 8473),
            (&["doctor"], &[("FLANNELD_DOCTOR_PORT", "0x2119")], 8473),
            (&["--state-dir", "cleanup", "doctor"], &[("FLANNELD_DOCTOR_PORT", "9000")], 9000),
            (&["doctor", "--doctor-port", "0"], &[("FLANNELD_DOCTOR_PORT", "nonsense")], 0),
            (&["doctor", "--json"], &[("FLANNELD_DOCTOR_PORT", "-1")], 0),
        ] {
            assert_eq!(doctor(args, env).0, port, "{args:?} {env:?}");
        }
        assert_eq!(doctor(&["doctor"], &[("FLANNELD_IFACE", "eth7")]).1, ["eth7"]);
        assert_eq!(doctor(&["doctor"], &[("FLANNELD_IFACE", "")]).1, [""; 0]);
        assert_eq!(doctor(&["doctor", "--iface=a"], &[("FLANNELD_IFACE", "eth7")]).1, ["a"]);
        assert!(matches!(parse(&["cleanup"], &[("FLANNELD_IFACE", "eth7")]).unwrap().verb,
            Verb::Cleanup(flags) if flags.interface.iface == ["eth7"]));
        let all = [
            ("FLANNELD_IFACE_REGEX", "^eth"),
            ("FLANNELD_IFACE_CIDR", "192.0.2.0/24"),
            ("FLANNELD_IFACE_NODE_IP", "true"),
            ("FLANNELD_IFACE_CAN_REACH", "192.0.2.9"),
            ("FLANNELD_PUBLIC_IP", "192.0.2.1"),
            ("FLANNELD_PUBLIC_IPV6", "2001:db8::1"),
        ];
        let given = Selectors {
            iface_regex: vec!["^eth".to_owned()],
            iface_cidr: vec!["192.0.2.0/24".parse().unwrap()],
            by_node_address: true,
            can_reach: Some("192.0.2.9".parse().unwrap()),
            public: ["192.0.2.1", "2001:db8::1"]
                .map(|address| address.parse::<IpAddr>().unwrap())
                .into_iter()
                .collect(),
            ..Selectors::default()
        };
        for verb in ["cleanup", "doctor"] {
            let (Verb::Cleanup(CleanupFlags { interface, .. })
            | Verb::Doctor(DoctorFlags { interface, .. })) = parse(&[verb], &all).unwrap().verb
            else {
                panic!("{verb}")
            };
            assert_eq!(interface.selectors(), given, "{verb}");
        }
        // A verb without the option ignores its variable.
        assert!(parse(&["status"], &[("FLANNELD_DOCTOR_PORT", "nonsense")]).is_ok());
        for wrong in ["nonsense", "65536", "1_0"] {
            let error = parse(&["doctor"], &[("FLANNELD_DOCTOR_PORT", wrong)]).unwrap_err();
            let text = error.to_string();
            assert!(error.exit_code() == 2 && text.contains(&format!("'{wrong}'")), "{text}");
            assert!(
                text.contains("expected a number up to 65535")
                    && text.contains("FLANNELD_DOCTOR_PORT"),
                "{text}"
            );
            let error = parse(&["doctor", "--doctor-port", wrong], &[]).unwrap_err().to_string();
            assert!(error.contains("--doctor-port") && !error.contains("FLANNELD_"), "{error}");
        }
    }

    #[test]
    fn misspelt_variables_are_reported_and_those_of_the_daemon_alone_are_not() {
        let warnings = |name: &str| misspelt_variables([OsString::from(name)].into_iter());
        for (wrong, right) in [
            ("FLANNELD_REGISTYR", "FLANNELD_REGISTRY"),
            ("FLANNELD_STATEDIR", "FLANNELD_STATE_DIR"),
            ("FLANNELD_IFCAE", "FLANNELD_IFACE"),
            ("FLANNELD_DOCTER_PORT", "FLANNELD_DOCTOR_PORT"),
        ] {
            let all = warnings(wrong);
            assert!(all.len() == 1 && all[0].ends_with(right), "{wrong}: {all:?}");
        }
        // These are the variables that are most like a variable of flannelctl.
        for other in ["CONTROL_GROUP", "KUBECONFIG_FILE", "HEALTHZ_PORT", "IFACE_REGEX", "FORCE"] {
            assert_eq!(warnings(&format!("FLANNELD_{other}")), [""; 0]);
        }
    }

    #[test]
    fn in_kubernetes_a_store_must_be_named() {
        let pod = ("KUBERNETES_SERVICE_HOST", "10.96.0.1");
        let flag = ("FLANNELD_KUBE_SUBNET_MGR", "true");
        let named = ("FLANNELD_REGISTRY", "dir:/x");
        let only =
            |args: &[&str], env: &[(&str, &str)]| parse(args, env).unwrap().global.only_kubernetes;
        let list = &["lease", "list"];
        assert!(only(list, &[pod]) && only(list, &[flag]) && only(&["status"], &[pod]));
        assert!(!only(list, &[]) && !only(list, &[pod, named]));
        for off in ["false", "0"] {
            assert!(!only(list, &[("FLANNELD_KUBE_SUBNET_MGR", off)]), "{off}");
        }
        assert!(!only(&["lease", "list", "--registry", "dir:/x"], &[pod]));
        assert!(!only(&["--registry=dir:/x", "lease", "list"], &[pod]));
        #[cfg(feature = "etcd")]
        assert!(!only(&["lease", "list", "--etcd-endpoints=http://192.0.2.1:2379"], &[pod]));
    }

    #[cfg(feature = "etcd")]
    #[test]
    fn invalid_options_of_etcd_are_wrong_usage() {
        for (args, env, says) in [
            (
                &["status", "--etcd-endpoints=nonsense"] as &[&str],
                &[] as &[(&str, &str)],
                "--etcd-endpoints: the endpoint \"nonsense\"",
            ),
            (
                &["lease", "list"],
                &[("FLANNELD_ETCD_ENDPOINTS", "nonsense")],
                "FLANNELD_ETCD_ENDPOINTS",
            ),
            (&["lease", "list"], &[("FLANNELD_ETCD_USERNAME", "u")], "FLANNELD_ETCD_USERNAME"),
        ] {
            let error = parse(args, env).unwrap_err();
            assert!(error.exit_code() == 2 && error.to_string().contains(says), "{error}");
        }
        assert!(
            parse(&["lease", "list", "--registry=dir:/x"], &[("FLANNELD_ETCD_USERNAME", "u")])
                .is_ok()
        );
    }

    #[test]
    fn the_usage_line_of_an_error_lists_only_what_is_required() {
        for (args, names, usage) in [
            (&["cleanup", "--for-go", "--dry-run=x"] as &[&str], "--dry-run", "cleanup [OPTIONS]"),
            (&["--state-dir=/x", "config", "set"], "<FILE>", "config set [OPTIONS] <FILE>"),
            (&["why", "--json"], "<ADDRESS>", "why [OPTIONS] <ADDRESS>"),
            (&["lease", "reserve"], "<SUBNET>", "lease reserve [OPTIONS] <SUBNET>"),
            (&["statsu"], "statsu", "[OPTIONS] <COMMAND>"),
        ] {
            let error = parse(args, &[("FLANNELD_REGISTRY", "dir:/x")]).unwrap_err();
            let text = error.to_string();
            assert!(error.exit_code() == 2 && text.contains(names), "{text}");
            assert!(text.contains(&format!("Usage: flannelctl {usage}\n")), "{text}");
        }
        for wrong in ["1400", "{", "[]"] {
            let error = parse(&["config", "patch", wrong], &[]).unwrap_err();
            let text = error.to_string();
            assert!(error.exit_code() == 2 && text.contains("expected a JSON object"), "{text}");
        }
    }

    #[test]
    fn every_verb_has_help() {
        Ctl::command().debug_assert();
        let help = parse(&["--help"], &[]).unwrap_err().to_string();
        for word in [
            "status",
            "peers",
            "why",
            "watch",
            "cleanup",
            "config",
            "lease",
            "--control-socket",
            "Exit status",
        ] {
            assert!(help.contains(word), "{word}: {help}");
        }
        let wrong =
            parse(&["status"], &[("FLANNELD_REGISTRY", "consul:x")]).unwrap_err().to_string();
        assert!(wrong.contains("FLANNELD_REGISTRY"), "{wrong}");
        assert_eq!(parse(&["statsu"], &[]).unwrap_err().exit_code(), 2);
        assert_eq!(parse(&[], &[]).unwrap_err().exit_code(), 2);
    }
}
