//! The options of the daemon, from the command line and the environment.
//!
//! Flags may be written Go's way (`-iface eth0`, `--iface=eth0`). Each may come from
//! `FLANNELD_<FLAG>` in the environment instead. The command line wins. An empty variable counts as
//! unset.
//!
//! **Source**: flannel `main.go`, Go `flag`, coreos `flagutil.SetFlagsFromEnv`.

mod control;
mod firewall;
mod kube;
mod lease;
mod log;

use std::ffi::OsString;
use std::time::Duration;

use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches, Parser};
use flannel_backends::Backends;
use flannel_options::{CommandLine, EmptyOption, Error as Wrong, InterfaceFlags, RegistryUrl};

use crate::config::{DaemonConfig, StoreConfig};
use crate::error::Error;

pub use control::{Capabilities, ControlFlags};
pub use firewall::{FirewallFlags, RouteFlags};
pub use kube::KubeFlags;
pub use lease::LeaseFlags;
pub(crate) use log::log_filter;
pub use log::{LogFlags, LogFormat};

/// The options of the daemon.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "flanneld",
    version,
    about = "Gives this host a subnet of the cluster's pod network, and routes to the subnets of \
             all other hosts."
)]
#[command(args_override_self = true)]
#[command(
    after_help = "Every option can come from the environment as FLANNELD_<OPTION>, for example \
                  FLANNELD_SUBNET_FILE. Options may be written Go's way: -iface eth0, -v=4.\n\
                  Exit status: 0 after a signal to stop, 1 after an error, 2 for wrong usage."
)]
#[non_exhaustive]
pub struct Options {
    /// The store of leases, and the files of this host's lease.
    #[command(flatten, next_help_heading = "Leases")]
    pub lease: LeaseFlags,

    /// The choice of the external interface.
    #[command(flatten, next_help_heading = "External interface")]
    pub interface: InterfaceFlags,

    /// The kind of routes.
    #[command(flatten, next_help_heading = "Routes")]
    pub routes: RouteFlags,

    /// Masquerade and forward rules.
    #[command(flatten, next_help_heading = "Firewall")]
    pub firewall: FirewallFlags,

    /// The servers for health, metrics and control.
    #[command(flatten, next_help_heading = "Health and control")]
    pub control: ControlFlags,

    /// The capabilities to keep: those for changing the network and for these options, or all,
    /// which also lets the daemon name programs that change routes
    #[arg(
        long,
        value_name = "least|all",
        default_value = "least",
        hide_possible_values = true,
        help_heading = "Health and control"
    )]
    pub capabilities: Capabilities,

    /// The log.
    #[command(flatten, next_help_heading = "Log")]
    pub log: LogFlags,

    /// Leases in the Kubernetes API.
    #[command(flatten, next_help_heading = "Kubernetes")]
    pub kube: KubeFlags,

    /// The flags and variables that were given and change nothing, by their ids.
    #[arg(skip)]
    without_effect: Vec<&'static str>,

    /// The flags and variables that are empty, so that their defaults are used.
    #[arg(skip)]
    empty: Vec<EmptyOption>,
}

impl Options {
    /// Parses a command line (`args[0]` is the program's name) and the environment.
    ///
    /// # Errors
    /// [`Error::Options`] with the text to print, also for `--help` and `--version`.
    pub fn parse_from(
        args: impl IntoIterator<Item = OsString>,
        env: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, Error> {
        let line = CommandLine::parse(Self::command(), args, &env)?;
        let usage = |text| line.environment.usage(text);
        let mut options = Self::from_arg_matches(&line.matches)
            .map_err(|error| Wrong::Usage(error.to_string()))?;
        options.kube.complete(&env).map_err(usage)?;
        let key_file = &mut options.lease.wireguard_key_file;
        if key_file.is_none() {
            let of_go = env("WIREGUARD_KEY_FILE").filter(|file| !file.is_empty());
            *key_file = of_go.map(Into::into);
        }
        #[cfg(feature = "etcd")]
        if options.lease.registry == RegistryUrl::Etcd && !options.kube.kube_subnet_mgr {
            options.lease.etcd.check().map_err(usage)?;
        }
        log_filter(options.log.filter()).map_err(usage)?;
        if options.routes.path_mtu && options.control.path_interval == 0 {
            Err(usage("--path-mtu needs probes of paths; expected --path-interval > 0".into()))?;
        }
        options.firewall.check().map_err(usage)?;
        let is_given = |id: &&str| line.matches.value_source(id) == Some(ValueSource::CommandLine);
        let kube = options.kube.without_effect().iter().copied();
        let without_effect = LogFlags::WITHOUT_EFFECT.into_iter().chain(kube);
        options.firewall.forward_rules_given = is_given(&"iptables_forward_rules");
        options.without_effect = without_effect.filter(is_given).collect();
        if options.kube.kube_subnet_mgr {
            let variables = ["EVENT_QUEUE_DEPTH", "CONT_WHEN_CACHE_NOT_READY"].into_iter();
            options.without_effect.extend(variables.filter(|name| env(name).is_some()));
        }
        options.empty = line.empty;
        Ok(options)
    }

    /// The flags and variables that are empty, so that their defaults are used.
    pub fn empty(&self) -> &[EmptyOption] {
        &self.empty
    }

    /// The flags and variables that were given and change nothing, separated by commas, or `None`
    /// if each one has an effect.
    pub fn without_effect(&self) -> Option<String> {
        let flag = |id: &&str| match *id {
            variable if variable.starts_with(char::is_uppercase) => variable.to_owned(),
            // The one flag with underscores in its name.
            "log_backtrace_at" => format!("--{id}"),
            _ => format!("--{}", id.replace('_', "-")),
        };
        let all: Vec<String> = self.without_effect.iter().map(flag).collect();
        (!all.is_empty()).then(|| all.join(", "))
    }

    /// The configuration of a daemon that has these options and backends.
    ///
    /// # Errors
    /// [`Error::Options`]: the options of Kubernetes do not fit together.
    pub fn config(&self, backends: Backends) -> Result<DaemonConfig, Error> {
        let mut config = DaemonConfig::new(self.store()?);
        config.backends = if self.firewall.tunnel_peers_only {
            backends
        } else {
            flannel_backends::with_ipip_check_off(backends)
        };
        config.interface = self.interface.selectors();
        config.renew_margin = self.lease.renew_margin();
        config.subnet_file.clone_from(&self.lease.subnet_file);
        config.state_dir.clone_from(&self.lease.state_dir);
        config.wireguard_key_file.clone_from(&self.lease.wireguard_key_file);
        config.ip_blackhole_route = self.routes.ip_blackhole_route;
        config.nexthop_objects = self.routes.nexthop_objects;
        config.path_mtu = self.routes.path_mtu;
        config.allow_commands = self.routes.allow_commands;
        config.kernel_resync = Duration::from_secs(self.routes.kernel_resync.unsigned_abs());
        config.firewall = self.firewall.config();
        config.control = self.control.config();
        Ok(config)
    }

    fn store(&self) -> Result<StoreConfig, Error> {
        #[cfg(feature = "kube")]
        if self.kube.kube_subnet_mgr {
            return Ok(StoreConfig::Kubernetes { options: self.kube.options()? });
        }
        Ok(match &self.lease.registry {
            RegistryUrl::Dir(location) => StoreConfig::Directory(location.clone()),
            #[cfg(feature = "etcd")]
            RegistryUrl::Etcd => StoreConfig::Etcd(self.lease.etcd.options()),
            #[cfg(not(feature = "etcd"))]
            RegistryUrl::Etcd => {
                return Err(Wrong::Usage("this build has no etcd; expected dir:PATH".into()).into());
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ControlConfig, ControlSocket, NexthopObjects};

    fn parse(args: &[&str], env: &[(&str, &str)]) -> Result<Options, Error> {
        let args = std::iter::once("flanneld").chain(args.iter().copied()).map(OsString::from);
        Options::parse_from(args, |name| {
            env.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value))
        })
    }

    /// As when a unit expands a variable that is not set: `-etcd-prefix=$PREFIX`.
    #[test]
    fn an_empty_option_with_a_default_is_reported() {
        let empty = |args: &[&str], env: &[(&str, &str)]| {
            let options = parse(args, env).unwrap();
            let shown = |option: &EmptyOption| format!("{} {}", option.name, option.default);
            options.empty().iter().map(shown).collect::<Vec<_>>()
        };
        let prefix = "--etcd-prefix /coreos.com/network";
        let endpoints = "--etcd-endpoints http://127.0.0.1:4001,http://127.0.0.1:2379";
        let of_env = [("FLANNELD_ETCD_PREFIX", ""), ("FLANNELD_IP_MASQ", "")];
        for (args, env, expected) in [
            (&[] as &[&str], &[] as &[(&str, &str)], vec![]),
            (&["-etcd-endpoints=", "-etcd-prefix="], &[], vec![endpoints, prefix]),
            (&["--etcd-prefix", ""], &[("FLANNELD_ETCD_PREFIX", "/net")], vec![prefix]),
            (&["--etcd-prefix=", "--etcd-prefix=/net"], &[], vec![]),
            (&["--etcd-prefix=/net"], &of_env[..1], vec![]),
            (
                &[],
                &of_env,
                vec!["FLANNELD_ETCD_PREFIX /coreos.com/network", "FLANNELD_IP_MASQ false"],
            ),
            // They have no default.
            (&["--etcd-cafile=", "--iface", ""], &[("FLANNELD_PUBLIC_IP", "")], vec![]),
        ] {
            assert_eq!(empty(args, env), expected, "{args:?} {env:?}");
        }
    }

    #[test]
    fn flags_are_parsed_in_the_styles_of_go_and_clap() {
        let all = ["-registry=dir:/x", "-iface", "eth0", "--iface=eth1", "-public-ip", "192.0.2.1"];
        let options = parse(&all, &[]).unwrap();
        assert_eq!(options.interface.iface, ["eth0", "eth1"]);
        assert_eq!(options.interface.selectors().public.v4, Some("192.0.2.1".parse().unwrap()));
        assert_eq!(options.lease.subnet_file.to_str(), Some("/run/flannel/subnet.env"));
        assert_eq!(options.lease.renew_margin(), Duration::from_secs(3600));
        assert_eq!(options.routes.nexthop_objects, NexthopObjects::Auto);
        let resync = |options: &Options| {
            options.config(flannel_backends::all()).unwrap().kernel_resync.as_secs()
        };
        assert_eq!(resync(&options), 300);
        assert_eq!(resync(&parse(&all, &[("FLANNELD_KERNEL_RESYNC", "0")]).unwrap()), 0);
        assert_eq!(
            (options.control.healthz_ip.to_string().as_str(), options.control.healthz_port),
            ("0.0.0.0", 0)
        );
        let lowers = |env: &[(&str, &str)]| {
            parse(&all, env).unwrap().config(flannel_backends::all()).unwrap().path_mtu
        };
        assert!(!lowers(&[]) && lowers(&[("FLANNELD_PATH_MTU", "true")]));
        let env = [
            ("FLANNELD_HEALTHZ_PORT", "8471"),
            ("FLANNELD_HEALTHZ_IP", "::1"),
            ("FLANNELD_CONTROL_SOCKET", "off"),
        ];
        let control = parse(&all, &env).unwrap().control;
        assert_eq!((control.healthz_ip.to_string().as_str(), control.healthz_port), ("::1", 8471));
        assert_eq!(
            control.control_socket.as_deref().and_then(std::path::Path::to_str),
            Some("off")
        );
        let off = parse(&all, &[("FLANNELD_NEXTHOP_OBJECTS", "off")]).unwrap();
        assert_eq!(off.routes.nexthop_objects, NexthopObjects::Off);
    }

    #[test]
    fn the_program_has_servers_and_probes_that_the_library_has_not() {
        let options = parse(&["--registry=dir:/x"], &[]).unwrap();
        let program = options.config(flannel_backends::all()).unwrap();
        let library = DaemonConfig::new(program.store.clone());
        assert_eq!(program.control.health, None);
        assert_eq!(program.control.socket, ControlSocket::BesideSubnetFile);
        assert_eq!(program.control.doctor_port, 8473);
        assert_eq!(program.control.path_interval, Duration::from_secs(300));
        let silent = ControlConfig {
            health: None,
            socket: ControlSocket::Off,
            group: None,
            doctor_port: 0,
            path_interval: Duration::ZERO,
        };
        assert_eq!(library.control, silent);
        // Everything else is the same.
        let control = library.control.clone();
        let backends = library.backends.clone();
        let same = DaemonConfig { control, backends, ..program };
        assert_eq!(format!("{same:?}"), format!("{library:?}"));
    }

    #[test]
    fn help_has_groups_and_all_options() {
        let command = Options::command();
        for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
            let id = arg.get_id().as_str();
            assert!(
                arg.get_help_heading().is_some() || ["help", "version"].contains(&id),
                "{id} is in no group"
            );
            assert!(
                arg.get_help().is_some() || ["help", "version"].contains(&id),
                "{id} has no help"
            );
        }
        let help = parse(&["--help"], &[]).unwrap_err().to_string();
        for group in [
            "Leases:",
            "External interface:",
            "Routes:",
            "Firewall:",
            "Health and control:",
            "Log:",
        ] {
            assert_eq!(help.matches(group).count(), 1, "{group}: {help}");
        }
        let offered = help.matches("Kubernetes:").count();
        assert_eq!(
            offered,
            usize::from(cfg!(feature = "kube")),
            "a build without the feature hides its options"
        );
    }

    #[test]
    fn switches_are_parsed_as_in_go() {
        let masq = |args: &[&str], env: &[(&str, &str)]| {
            parse(args, env).map(|options| options.firewall.ip_masq.is_any())
        };
        for (args, expected) in [
            (&["-ip-masq"] as &[&str], true),
            (&["--ip-masq=T"], true),
            (&["--ip-masq", "--ip-masq=false"], false),
            (&["-ip-masq=0"], false),
            (&[], false),
        ] {
            let args = [&["-registry=dir:/x"], args].concat();
            assert_eq!(masq(&args, &[]).unwrap(), expected, "{args:?}");
        }
        assert!(masq(&["-registry=dir:/x"], &[("FLANNELD_IP_MASQ", "true")]).unwrap());
        assert!(
            !masq(&["-registry=dir:/x", "-ip-masq=false"], &[("FLANNELD_IP_MASQ", "true")])
                .unwrap()
        );
        let forward = |env: &[(&str, &str)]| {
            let firewall = parse(&["-registry=dir:/x"], env).unwrap().firewall;
            (firewall.iptables_forward_rules, firewall.forward_rules_given)
        };
        assert_eq!(forward(&[]), (true, false));
        assert_eq!(forward(&[("FLANNELD_IPTABLES_FORWARD_RULES", "true")]), (true, true));
        let error = masq(&["-registry=dir:/x", "--ip-masq=yes"], &[]).unwrap_err().to_string();
        assert!(
            error.contains("--ip-masq")
                && error.contains("'yes'")
                && error.contains("true or false"),
            "{error}"
        );
    }

    #[test]
    fn options_of_masquerading_come_from_the_command_line_or_the_environment() {
        use crate::config::MasqueradedFamilies;
        let firewall = |args: &[&str], env: &[(&str, &str)]| {
            let args = [&["-registry=dir:/x"], args].concat();
            parse(&args, env).map(|options| options.firewall.config())
        };
        let by_args = firewall(
            &[
                "--ip-masq=ipv6",
                "--ip-masq-exclude=10.0.0.0/8,fd00::/8",
                "--ip-masq-exclude",
                "192.0.2.0/24",
                "--ip-masq-source=192.0.2.7",
                "--ip-masq-source=2001:db8::7",
                "--ip-masq-ports=1024-2047",
                "--ip-masq-interface=eth1,eth2",
            ],
            &[],
        );
        let by_env = firewall(
            &[],
            &[
                ("FLANNELD_IP_MASQ", "ipv6"),
                ("FLANNELD_IP_MASQ_EXCLUDE", "10.0.0.0/8, fd00::/8,192.0.2.0/24"),
                ("FLANNELD_IP_MASQ_SOURCE", "192.0.2.7,2001:db8::7"),
                ("FLANNELD_IP_MASQ_PORTS", "1024-2047"),
                ("FLANNELD_IP_MASQ_INTERFACE", "eth1,eth2"),
            ],
        );
        let by_args = by_args.unwrap();
        assert_eq!(by_args, by_env.unwrap());
        assert_eq!(by_args.masquerade, MasqueradedFamilies::V6);
        assert_eq!(by_args.masquerade_exclude.len(), 3);
        assert_eq!(by_args.masquerade_devices.len(), 2);
        assert_eq!(by_args.masquerade_source.iter().count(), 2);
        for (args, says) in [
            (&["--ip-masq", "--ip-masq-exclude=0.0.0.0/0"][..], "for example 10.0.0.0/8"),
            (&["--ip-masq", "--ip-masq-exclude=10.0.0.1"], "for example 10.0.0.0/8"),
            (&["--ip-masq", "--ip-masq-ports=0-9"], "for example 1024-65535"),
            (&["--ip-masq", "--ip-masq-source=::1,::2"], "one IPv6 address"),
            (&["--ip-masq-exclude=10.0.0.0/8"], "expected --ip-masq"),
            (&["--ip-masq=both"], "expected true or false, ipv4 or ipv6"),
        ] {
            let error = firewall(args, &[]).unwrap_err();
            assert!(error.exit_code() == 2 && error.to_string().contains(says), "{error}");
        }
    }

    #[test]
    fn the_command_line_overrides_the_environment_and_empty_is_unset() {
        let env = [
            ("FLANNELD_REGISTRY", "dir:/env"),
            ("FLANNELD_IFACE", "eth7"),
            ("FLANNELD_SUBNET_FILE", ""),
        ];
        let options = parse(&[], &env).unwrap();
        assert_eq!(
            (options.lease.registry.to_string().as_str(), options.interface.iface),
            ("dir:/env", vec!["eth7".to_owned()])
        );
        assert_eq!(options.lease.subnet_file.to_str(), Some("/run/flannel/subnet.env"));
        let twice =
            ["--registry", "dir:/a", "--registry=dir:/b", "--public-ip=", "--iface=a", "--iface=b"];
        let options = parse(&twice, &env).unwrap();
        assert_eq!(
            (options.lease.registry.to_string().as_str(), options.interface.iface.len()),
            ("dir:/b", 2),
            "the last one wins"
        );
        let options = parse(&["--registry", "dir:/cli", "-iface=eth0"], &env).unwrap();
        assert_eq!(
            (options.lease.registry.to_string().as_str(), options.interface.iface),
            ("dir:/cli", vec!["eth0".to_owned()])
        );
    }

    #[test]
    fn usage_errors_name_the_option_the_value_and_the_variable() {
        for (args, env, says) in [
            #[cfg(not(feature = "etcd"))]
            (vec![], vec![], "--registry <URL>"),
            #[cfg(not(feature = "etcd"))]
            (vec!["--registry", "etcd"], vec![], "etcd"),
            (vec!["--registry", "consul:x"], vec![], "consul:x"),
            (vec!["--registry", "dir:/x?assign=magic"], vec![], "magic"),
            (vec!["--registry", "dir:/x", "--ifcae", "eth0"], vec![], "--iface"),
            (vec!["--registry", "dir:/x", "--public-ip", "::1"], vec![], "::1"),
            (vec!["--registry", "dir:/x", "--nexthop-objects", "maybe"], vec![], "auto, on, off"),
            (vec!["--registry", "dir:/x", "-subnet-lease-renew-margin=1440"], vec![], "1440"),
            (
                vec!["--registry", "dir:/x"],
                vec![("FLANNELD_PUBLIC_IP", "nonsense")],
                "FLANNELD_PUBLIC_IP",
            ),
            (vec!["--registry", "dir:/x", "--log", "warning"], vec![], "--log warning"),
            (
                vec!["--registry", "dir:/x", "--path-mtu", "--path-interval=0"],
                vec![],
                "--path-mtu needs probes of paths",
            ),
            (
                vec!["--registry", "dir:/x", "--log", "warn,flannel_core[span]=debug"],
                vec![],
                "flannel_core[span]=debug",
            ),
            (
                vec!["--registry", "dir:/x"],
                vec![("FLANNELD_LOG", "warning")],
                "comes from the environment: FLANNELD_LOG)",
            ),
        ] {
            let error = parse(&args, &env).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(says), "{args:?}: {error}");
        }
        assert_eq!(parse(&["--help"], &[]).unwrap_err().exit_code(), 0);
    }

    #[cfg(feature = "etcd")]
    #[test]
    fn etcd_is_the_registry_if_none_is_named() {
        use flannel_core::Credential;
        use flannel_subnet_etcd::EtcdOptions;

        let options = parse(&[], &[]).unwrap();
        assert_eq!(options.lease.registry.to_string(), "etcd");
        assert_eq!(options.lease.etcd.options(), EtcdOptions::default());
        let given =
            ["-etcd-endpoints=https://a:1,https://b:2", "-etcd-prefix", "/net", "-etcd-cafile=/ca"];
        let env = [
            ("FLANNELD_ETCD_USERNAME", "us"),
            ("FLANNELD_ETCD_PASSWORD", "hunter2"),
            ("FLANNELD_ETCD_CERTFILE", "/cert"),
            ("FLANNELD_ETCD_KEYFILE", "/key"),
            ("FLANNELD_ETCD_PREFIX", "/other"),
        ];
        let options = parse(&given, &env).unwrap();
        let expected = EtcdOptions {
            endpoints: vec!["https://a:1".into(), "https://b:2".into()],
            prefix: "/net".into(),
            ca: Some(Credential::File("/ca".into())),
            certificate: Some(Credential::File("/cert".into())),
            key: Some(Credential::File("/key".into())),
            username: Some("us".into()),
            password: Some("hunter2".into()),
            ..EtcdOptions::default()
        };
        assert_eq!(options.lease.etcd.options(), expected);
        assert!(!format!("{options:?}").contains("hunter2"));
        for empty in [&["--etcd-cafile="] as &[&str], &["--etcd-cafile", ""], &["-etcd-cafile", ""]]
        {
            assert_eq!(
                parse(empty, &[("FLANNELD_ETCD_CAFILE", "/ca")]).unwrap().lease.etcd.options().ca,
                None
            );
        }
        for password in ["c2VjcmV0==", "-hunter2", "--", "a=b"] {
            let password = Some(password.to_owned());
            for args in [
                vec![format!("--etcd-password={}", password.as_deref().unwrap())],
                vec!["-etcd-password".to_owned(), password.clone().unwrap()],
            ] {
                let args: Vec<&str> =
                    args.iter().map(String::as_str).chain(["--etcd-username=u"]).collect();
                assert_eq!(
                    parse(&args, &[]).unwrap().lease.etcd.options().password,
                    password,
                    "{args:?}"
                );
            }
        }
        let twice = parse(&["--etcd-endpoints=a:1,b:2", "--etcd-endpoints", "c:3"], &[]).unwrap();
        assert_eq!(twice.lease.etcd.options().endpoints, ["c:3"]);
    }
}
