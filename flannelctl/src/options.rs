//! The command line of `flannelctl`.
//!
//! Options that flanneld has too have the same names, and come from the same environment variables. They
//! may stand before or behind the verb.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use flannel_core::{Subnet, Subnets};
#[cfg(feature = "etcd")]
use flannel_options::EtcdFlags;
use flannel_options::control;
use flannel_options::environment::{name_variable, variable};
use flannel_options::go_flags::is_given;
use flannel_options::{Error as OptionsError, RegistryUrl, open_directory};
use flannel_subnet::Registry;

use crate::docker_opts::DockerFlags;
use crate::error::{Error, Result};

/// What `flannelctl` is told.
#[derive(Debug, Parser)]
#[command(
    name = "flannelctl",
    version,
    about = "Asks the flannel daemon of this host how it is, and looks after its store and its kernel objects.",
    args_override_self = true,
    subcommand_value_name = "VERB",
    subcommand_help_heading = "Verbs",
    after_help = "Exit status: 0 if all is well, 1 if it is not or could not be done, 2 for wrong usage.\n\
                  Options that flanneld has too can come from the environment as for flanneld, for example \
                  FLANNELD_REGISTRY."
)]
pub(crate) struct Ctl {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// The whole command line of `flannelctl`, for those who make documents of it.
pub fn command() -> clap::Command {
    Ctl::command().mut_args(|arg| match arg.get_id().as_str() {
        "help" | "version" => arg,
        _ => arg.global(true),
    })
}

/// Where things are.
#[derive(Debug, Args)]
#[command(next_help_heading = "Where things are")]
pub(crate) struct Global {
    /// The socket of the daemon, or off; flanneld.sock beside the subnet file if not given
    #[arg(long, value_name = "FILE|off")]
    pub(crate) control_socket: Option<PathBuf>,

    /// Say it for programs: one JSON object
    #[arg(long, help_heading = "Options")]
    pub(crate) json: bool,

    /// Where leases are kept: etcd, dir:PATH, or dir:PATH?assign=static
    #[arg(long, value_name = "URL")]
    #[cfg_attr(feature = "etcd", arg(default_value = "etcd"))]
    pub(crate) registry: Option<RegistryUrl>,

    /// The file that tells CNI plugins about this host's subnet
    #[arg(long, value_name = "FILE", default_value = "/run/flannel/subnet.env")]
    pub(crate) subnet_file: PathBuf,

    /// Where the daemon remembers which leases are its own, and the last good set of leases
    #[arg(long, value_name = "DIR", default_value = "/var/lib/flannel")]
    pub(crate) state_dir: PathBuf,

    #[cfg(feature = "etcd")]
    #[command(flatten)]
    pub(crate) etcd: EtcdFlags,
}

impl Global {
    /// The socket of a daemon that was told the same; `None`: it has none.
    pub(crate) fn socket(&self) -> Option<PathBuf> {
        control::socket(self.control_socket.as_deref(), &self.subnet_file)
    }

    /// Opens a store that is there. To look makes none: an empty one, made where a directory is not
    /// mounted, would order every daemon of the machine to stop. A directory with nothing of a
    /// store in it is a bare mount point.
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
                    "neither config nor subnets is in it, as in a directory that is not mounted";
                return Err(broken(std::io::Error::new(std::io::ErrorKind::NotFound, text)).into());
            }
        }
        self.make_registry().await
    }

    /// Opens the store, a new one if there is none.
    pub(crate) async fn make_registry(&self) -> Result<Arc<dyn Registry>> {
        let missing = || {
            Error::Refused("--registry names no store; for example dir:/etc/flannel/network".into())
        };
        let url = self.registry.as_ref().ok_or_else(missing)?;
        let registry = match url {
            RegistryUrl::Dir(location) => open_directory(location).await?,
            #[cfg(feature = "etcd")]
            RegistryUrl::Etcd => flannel_options::open_etcd(self.etcd.options())?,
            #[cfg(not(feature = "etcd"))]
            RegistryUrl::Etcd => return Err(Error::Refused("this build has no etcd".to_owned())),
        };
        Ok(registry)
    }
}

/// What is to be done.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// How this node is, on one screen: its lease, interface, backend, store and peers, and first
    /// of all what is wrong
    #[command(
        long_about = "How this node is, on one screen: its lease, interface, backend, store and peers, and first \
        of all what is wrong. Exit status 1 if it is not ready. Without a daemon it says what the last one left."
    )]
    Status,
    /// Every peer with its state; without a daemon, every lease in the store
    Peers,
    /// Why packets for a pod's address go where they go
    #[command(
        long_about = "Why packets for a pod's address go where they go: which lease holds it, which objects that \
        lease wants in the kernel and how each stands, and what the kernel itself would do with a packet, foreign \
        routes and rules included. Exit status 1 if packets do not go where they should."
    )]
    Why {
        /// The address of a pod
        #[arg(value_name = "ADDRESS")]
        address: IpAddr,
    },
    /// Look for what is wrong anywhere between the store and the wire, and print the commands that repair it
    #[command(
        long_about = "Looks for what is wrong anywhere between the store and the wire: the store, the daemon, this host's \
        settings, devices and their MTU, and with ICMP echoes, small and of full size, whether each peer replies from its \
        tunnel address and its public one; where a peer runs this daemon, both send TCP segments of full size and say which \
        way they arrive. Each finding comes with the command that repairs it. Exit status 1 if there is \
        one. Without a daemon it goes as far as store, cache and kernel lead."
    )]
    Doctor(DoctorFlags),
    /// The status again and again, until interrupted
    #[command(
        long_about = "The status again and again, until interrupted. On a terminal the screen is drawn anew; \
        elsewhere, and with --json (one object a line), it is said whenever something has changed."
    )]
    Watch {
        /// Seconds between two looks
        #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
        interval: u64,
    },
    /// Let the daemon read config and certificates again, and set back its log, as SIGHUP does
    Reload,
    /// Set what the daemon logs, until SIGHUP or reload
    Log {
        /// As for flanneld --log: error, warn, info, debug, trace, or a filter such as
        /// info,flannel_core=debug
        #[arg(value_name = "FILTER")]
        filter: String,
    },
    /// Remove what the daemon put into the kernel, or make it fit for Go flannel
    #[command(
        long_about = "Removes what the daemon put into the kernel: routes, nexthop objects, forwarding entries, \
        neighbours, addresses, devices, firewall rules; then the subnet file and the leases that were kept. Pods lose their \
        way to other nodes. The daemon must not run, since it would put \
        everything back. What is ours follows from the network config, in the store or as the daemon last saw it."
    )]
    Cleanup(CleanupFlags),
    /// Write this host's subnet as options for the Docker daemon, as mk-docker-opts.sh does
    #[command(
        long_about = "Writes this host's subnet as options for the Docker daemon: the flags and the output of Go \
        flannel's mk-docker-opts.sh. Exit status 1 if the kernel sends the subnet to another host."
    )]
    DockerOpts(DockerFlags),
    /// Check or write the network config
    #[command(subcommand)]
    Config(ConfigVerb),
    /// See, reserve or release leases
    #[command(subcommand)]
    Lease(LeaseVerb),
}

/// How to look for what is wrong.
#[derive(Debug, Args)]
pub(crate) struct DoctorFlags {
    /// Ask at most so many peers, those in trouble first
    #[arg(long, value_name = "NUMBER", default_value_t = 64, value_parser = peers)]
    pub(crate) peers: usize,

    /// The port on which peers' daemons say what arrives, as for flanneld; 0: they are not asked
    #[arg(long, value_name = "PORT", default_value = control::DOCTOR_PORT, value_parser = control::port)]
    pub(crate) doctor_port: u16,

    /// The interface that the daemon uses, by name or address, if it does not run; if not given,
    /// the one with the default route
    #[arg(long, value_name = "NAME|ADDRESS")]
    pub(crate) iface: Vec<String>,
}

fn peers(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| *number <= 10_000);
    number.ok_or_else(|| "right would be a number up to 10000".to_owned())
}

/// How to clean up.
#[derive(Debug, Args)]
pub(crate) struct CleanupFlags {
    /// Change nothing, only say what would be changed; the daemon may run
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Remove only what Go flannel cannot handle: routes by nexthop objects become plain ones in
    /// place, the route of last resort goes, no packet is lost
    #[arg(long)]
    pub(crate) for_go: bool,

    /// The interface that the daemon used, by name or address; if not given, the one with the
    /// default route
    #[arg(long, value_name = "NAME|ADDRESS")]
    pub(crate) iface: Vec<String>,

    /// The network config that the daemon used, - for standard input; if not given, the one in the
    /// store
    #[arg(long, value_name = "FILE")]
    pub(crate) net_config_path: Option<PathBuf>,
}

/// What to do with the config.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigVerb {
    /// Check a network config, and show it with every default filled in
    Check {
        /// The file, - for standard input; if not given, the config in the store
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// Check a network config and write it to the store
    #[command(
        long_about = "Checks a network config and writes it to the store, unless somebody else writes there at \
        the same moment. Running daemons apply backend options at once; other pod networks or subnets are used from \
        each daemon's next start on."
    )]
    Set {
        /// The file, - for standard input
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Change some fields of the network config in the store
    #[command(
        long_about = "Changes the fields of the network config in the store that a JSON object names, and no others; null \
        takes a field out. The result is checked, and written as config set does."
    )]
    Patch {
        /// Such as '{"Backend": {"MTU": 1400}}'
        #[arg(value_name = "PATCH")]
        patch: String,
    },
}

/// What to do with leases.
#[derive(Debug, Subcommand)]
pub(crate) enum LeaseVerb {
    /// Every lease in the store, and what in it is none
    List,
    /// Make a lease that never expires, or let one never expire
    #[command(
        long_about = "Makes a lease that never expires, for the node with this public address; or, if the lease \
        exists, lets it never expire, which its node notices and goes on."
    )]
    Reserve {
        /// The subnet, such as 10.1.5.0/24; a dual-stack lease is 10.1.5.0/24,fd00:1:0:5::/64 or
        /// the key's text
        #[arg(value_name = "SUBNET", value_parser = key)]
        lease: Subnets,

        /// The IPv4 address that peers reach the node by
        #[arg(long, value_name = "ADDRESS")]
        public_ip: Option<Ipv4Addr>,

        /// The same for IPv6
        #[arg(long, value_name = "ADDRESS")]
        public_ipv6: Option<Ipv6Addr>,

        /// The node's backend, such as vxlan, if not the network config's; its daemon fills in the
        /// rest
        #[arg(long, value_name = "TYPE", default_value = "")]
        backend_type: String,
    },
    /// Delete a lease
    #[command(
        long_about = "Deletes a lease. That orders its node's daemon, if it runs, to stop (exit status 1), and \
        frees the subnet for others: do it for nodes that are gone."
    )]
    Release {
        /// The subnet, such as 10.1.5.0/24, or the key's text
        #[arg(value_name = "SUBNET", value_parser = key)]
        lease: Subnets,

        /// Even if it is no reservation, so that its node may be alive
        #[arg(long)]
        force: bool,
    },
}

/// A lease by its key, or by its subnets separated by commas.
fn key(text: &str) -> Result<Subnets, String> {
    if let Ok(subnets) = text.parse() {
        return Ok(subnets);
    }
    let wrong = || {
        format!(
            "{text:?} is neither subnets, such as 10.1.5.0/24, nor the key of a lease, such as 10.1.5.0-24"
        )
    };
    let parts: Option<Vec<Subnet>> = text.split(',').map(|part| part.trim().parse().ok()).collect();
    let parts = parts.ok_or_else(wrong)?;
    let subnets =
        Subnets::new(parts.iter().copied()).filter(|subnets| subnets.iter().count() == parts.len());
    subnets.ok_or_else(wrong)
}

/// The options of verbs that the daemon has too, with the same meaning.
const OF_DAEMON: [&str; 2] = ["doctor_port", "iface"];

impl Ctl {
    /// Parses a command line and the environment.
    ///
    /// # Errors
    /// [`OptionsError::Usage`], [`OptionsError::Help`].
    pub(crate) fn parse_from(
        args: impl IntoIterator<Item = OsString>,
        env: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, OptionsError> {
        let command = command();
        let mut args: Vec<OsString> = args.into_iter().collect();
        // What flanneld knows too comes from its variables: where things are, and what stands
        // behind the verb.
        let mut variables = Vec::new();
        let mut take = |arg: &clap::Arg, args: &[OsString]| {
            let flag = arg
                .get_long()
                .filter(|flag| arg.get_action().takes_values() && !is_given(args, flag))?;
            let name = variable(flag);
            let mut given = OsString::from(format!("--{flag}="));
            given.push(env(&name).filter(|value| !value.is_empty())?);
            variables.push((flag.to_owned(), name));
            Some(given)
        };
        for arg in command.get_arguments() {
            if let Some(given) = take(arg, &args) {
                args.insert(1.min(args.len()), given);
            }
        }
        let verb = command.clone().ignore_errors(true).try_get_matches_from(&args).ok();
        let verb = verb.as_ref().and_then(clap::ArgMatches::subcommand_name);
        let own = verb.and_then(|verb| command.find_subcommand(verb)).into_iter();
        for arg in own
            .flat_map(clap::Command::get_arguments)
            .filter(|arg| OF_DAEMON.contains(&arg.get_id().as_str()))
        {
            if let Some(given) = take(arg, &args) {
                args.push(given);
            }
        }
        let usage = |text: String| OptionsError::Usage(name_variable(text, &variables));
        let matches =
            command.try_get_matches_from(args).map_err(|error| match error.use_stderr() {
                true => usage(error.render().to_string()),
                false => OptionsError::Help(error.render().to_string()),
            })?;
        let options = Self::from_arg_matches(&matches)
            .map_err(|error| OptionsError::Usage(error.to_string()))?;
        #[cfg(feature = "etcd")]
        if options.global.registry == Some(RegistryUrl::Etcd) {
            options.global.etcd.check().map_err(|text| usage(format!("{text}\n")))?;
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str], env: &[(&str, &str)]) -> Result<Ctl, OptionsError> {
        let args = std::iter::once("flannelctl").chain(args.iter().copied()).map(OsString::from);
        let find = |name: &str| {
            env.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value))
        };
        Ctl::parse_from(args, find)
    }

    #[test]
    fn where_things_are_stands_anywhere_and_the_environment_comes_last() {
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
    fn the_socket_is_looked_for_where_a_daemon_with_the_same_environment_has_it() {
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
    fn what_stands_behind_a_verb_comes_from_the_daemons_variables_too() {
        let doctor = |args: &[&str], env: &[(&str, &str)]| match parse(args, env)
            .map(|options| options.verb)
        {
            Ok(Verb::Doctor(flags)) => (flags.doctor_port, flags.iface),
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
            Verb::Cleanup(flags) if flags.iface == ["eth7"]));
        // A verb without the option does not mind.
        assert!(parse(&["status"], &[("FLANNELD_DOCTOR_PORT", "nonsense")]).is_ok());
        for wrong in ["nonsense", "65536", "1_0"] {
            let error = parse(&["doctor"], &[("FLANNELD_DOCTOR_PORT", wrong)]).unwrap_err();
            let text = error.to_string();
            assert!(error.exit_code() == 2 && text.contains(&format!("'{wrong}'")), "{text}");
            assert!(
                text.contains("right would be a number up to 65535")
                    && text.contains("FLANNELD_DOCTOR_PORT"),
                "{text}"
            );
            let error = parse(&["doctor", "--doctor-port", wrong], &[]).unwrap_err().to_string();
            assert!(error.contains("--doctor-port") && !error.contains("FLANNELD_"), "{error}");
        }
    }

    #[cfg(feature = "etcd")]
    #[test]
    fn what_cannot_reach_etcd_is_wrong_usage() {
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
    fn leases_are_named_by_subnet_or_key() {
        for (text, expected) in [
            ("10.1.5.0/24", "10.1.5.0-24"),
            ("10.1.5.0-24", "10.1.5.0-24"),
            ("10.1.5.0/24,fd00:1:0:5::/64", "10.1.5.0-24&fd00:1:0:5::-64"),
            ("fd00:1:0:5::/64", "0.0.0.0-0&fd00:1:0:5::-64"),
        ] {
            assert_eq!(key(text).unwrap().to_string(), expected);
        }
        for text in ["", "10.1.5.0", "10.1.5.0/24,10.1.6.0/24", "10.1.5.0/33"] {
            assert!(key(text).unwrap_err().contains(&format!("{text:?}")), "{text}");
        }
    }

    #[test]
    fn every_verb_explains_itself() {
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
