//! The options of the daemon, from the command line and the environment.
//!
//! The one thing to know: flags may be written Go's way (`-iface eth0`, `--iface=eth0`), and each may come from
//! `FLANNELD_<FLAG>` in the environment instead. The command line wins; an empty variable counts as unset.
//!
//! **Source**: flannel `main.go`, Go `flag`, coreos `flagutil.SetFlagsFromEnv`.

use std::ffi::{OsStr, OsString};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::time::Duration;

use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches, Parser};
use flannel_core::address::{Dual, Family};
use flannel_core::backend::Backends;
use flannel_netlink::iface::Selectors;
#[cfg(feature = "etcd")]
use flannel_options::EtcdFlags;
use flannel_options::RegistryUrl;
use flannel_options::environment::{name_variable, variable};
use flannel_options::go_flags::{go_bool, go_int, go_style, is_given};

use crate::capabilities::Capabilities;
use crate::config::{DaemonConfig, NexthopObjects, StoreConfig};
use crate::control::ControlFlags;
use crate::error::Error;
use crate::firewall::FirewallFlags;
use crate::klog::KlogFlags;
use crate::kube::KubeFlags;
use crate::log_format::LogFormat;

/// What the daemon is told.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "flanneld",
    version,
    about = "Gives this host a subnet of the cluster's pod network, and makes its kernel reach every other host's."
)]
#[command(args_override_self = true)]
#[command(
    after_help = "Every option can come from the environment as FLANNELD_<OPTION>, for example FLANNELD_SUBNET_FILE. \
                  Options may be written Go's way: -iface eth0, -v=4.\n\
                  Exit status: 0 when it was told to stop, 1 if it cannot go on, 2 for wrong usage."
)]
#[non_exhaustive]
pub struct Options {
    /// Where leases are kept: etcd, dir:PATH, or dir:PATH?assign=static for a directory written beforehand
    #[arg(long, value_name = "URL", help_heading = "Leases")]
    #[cfg_attr(feature = "etcd", arg(default_value = "etcd"))]
    #[cfg_attr(
        not(feature = "etcd"),
        arg(required = false, required_unless_present = "kube_subnet_mgr",
            default_value_ifs(["1", "t", "T", "true", "TRUE", "True"].map(|on| ("kube_subnet_mgr", on, "dir:/var/lib/flannel/none"))))
    )]
    pub registry: RegistryUrl,

    /// Where etcd is.
    #[cfg(feature = "etcd")]
    #[command(flatten, next_help_heading = "Leases")]
    pub etcd: EtcdFlags,

    /// Renew the lease when this many minutes are left of it, 1 to 1439
    #[arg(long, value_name = "MINUTES", default_value = "60", value_parser = go_int(1..=1439),
        help_heading = "Leases")]
    pub subnet_lease_renew_margin: i64,

    /// The file that tells CNI plugins about this host's subnet
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/run/flannel/subnet.env",
        help_heading = "Leases"
    )]
    pub subnet_file: PathBuf,

    /// Where this host remembers which leases are its own
    #[arg(long, value_name = "DIR", default_value = "/var/lib/flannel", help_heading = "Leases")]
    pub state_dir: PathBuf,

    /// The interface towards the other hosts, by name or address; may be repeated, the first that fits is taken
    #[arg(long, value_name = "NAME|ADDRESS", help_heading = "External interface")]
    pub iface: Vec<String>,

    /// The same by regular expression, matched against addresses first and names second; after all --iface
    #[arg(long, value_name = "REGEX", value_parser = regex, help_heading = "External interface")]
    pub iface_regex: Vec<String>,

    /// Take the interface by which this address is reached, if nothing above fits
    #[arg(long, value_name = "ADDRESS", help_heading = "External interface")]
    pub iface_can_reach: Option<IpAddr>,

    /// The IPv4 address that other hosts reach this one by. Without --iface and the like it also selects the
    /// interface; an address that no interface has (behind NAT) needs --iface
    #[arg(long, value_name = "ADDRESS", help_heading = "External interface")]
    pub public_ip: Option<Ipv4Addr>,

    /// The same for IPv6
    #[arg(long, value_name = "ADDRESS", help_heading = "External interface")]
    pub public_ipv6: Option<Ipv6Addr>,

    /// Drop packets for those addresses of this host's subnet that no pod has, instead of sending them to the default
    /// route
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = false, value_parser = go_bool, action = clap::ArgAction::Set, help_heading = "Routes")]
    pub ip_blackhole_route: bool,

    /// Let IPv4 routes to other hosts go by nexthop objects, which makes thousands of them quick: where the kernel has
    /// them, or else stop, or never
    #[arg(
        long,
        value_name = "auto|on|off",
        default_value = "auto",
        hide_possible_values = true,
        help_heading = "Routes"
    )]
    pub nexthop_objects: NexthopObjects,

    /// What becomes of packets between pods and the rest of the world.
    #[command(flatten, next_help_heading = "Firewall")]
    pub firewall: FirewallFlags,

    /// Where the daemon can be asked how it is.
    #[command(flatten, next_help_heading = "Health and control")]
    pub control: ControlFlags,

    /// What the process may do: what changing the network takes and these options make necessary, or all that it was
    /// started with, which lets it name the programs that change routes
    #[arg(
        long,
        value_name = "least|all",
        default_value = "least",
        hide_possible_values = true,
        help_heading = "Health and control"
    )]
    pub capabilities: Capabilities,

    /// What to log: error, warn, info, debug, trace, or a filter such as info,flannel_core=debug; info if neither this
    /// nor -v is given
    #[arg(long, value_name = "FILTER", help_heading = "Log")]
    pub log: Option<String>,

    /// Where to log and how: lines of text or JSON on standard error, or the journal
    #[arg(
        long,
        value_name = "text|json|journald",
        default_value = "text",
        hide_possible_values = true,
        help_heading = "Log"
    )]
    pub log_format: LogFormat,

    /// Go flannel's log flags.
    #[command(flatten, next_help_heading = "Log")]
    pub klog: KlogFlags,

    /// Leases in the Kubernetes API.
    #[command(flatten, next_help_heading = "Kubernetes")]
    pub kube: KubeFlags,

    /// The flags and variables that were given and change nothing, by their ids.
    #[arg(skip)]
    without_effect: Vec<&'static str>,
}

impl Options {
    /// Parses a command line (`args[0]` is the program's name) and the environment.
    ///
    /// # Errors
    /// [`Error::Usage`], with the text to print; `--help` and `--version` are [`Error::Help`].
    pub fn parse_from(
        args: impl IntoIterator<Item = OsString>,
        env: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, Error> {
        let command = Self::command();
        let long = |a: &clap::Arg| a.get_long().map(str::to_owned);
        let flags: Vec<String> = command.get_arguments().filter_map(long).collect();
        let with_value = command
            .get_arguments()
            .filter(|a| a.get_action().takes_values() && !a.is_require_equals_set());
        let given = go_style(args, &flags, &with_value.filter_map(long).collect::<Vec<_>>());
        let mut args: Vec<OsString> =
            given.iter().filter(|arg| !is_none(&command, arg)).cloned().collect();
        let mut variables = Vec::new();
        // Who asks for help is told, whatever the environment says.
        let asks = given
            .iter()
            .any(|arg| ["--help", "-h", "--version", "-V"].iter().any(|ask| arg == ask));
        for flag in flags.iter().filter(|flag| !asks && !is_given(&given, flag)) {
            let name = variable(flag);
            if let Some(value) = env(&name).filter(|value| !value.is_empty()) {
                let mut arg = OsString::from(format!("--{flag}="));
                arg.push(&value);
                variables.push((flag.clone(), name));
                // In front of positional words, which end the flags.
                args.insert(1.min(args.len()), arg);
            }
        }
        let usage = |text: String| Error::Usage(name_variable(text, &variables));
        let matches =
            command.try_get_matches_from(args).map_err(|error| match error.use_stderr() {
                true => usage(with_advice(&error)),
                false => Error::Help(error.render().to_string()),
            })?;
        let mut options =
            Self::from_arg_matches(&matches).map_err(|error| Error::Usage(error.to_string()))?;
        options.kube.complete(&env).map_err(usage)?;
        #[cfg(feature = "etcd")]
        if options.registry == RegistryUrl::Etcd && !options.kube.kube_subnet_mgr {
            options.etcd.check().map_err(usage)?;
        }
        crate::log_filter(options.log_filter()).map_err(usage)?;
        let is_given = |id: &&str| matches.value_source(id) == Some(ValueSource::CommandLine);
        let kube = options.kube.without_effect().iter().copied();
        let without_effect = KlogFlags::WITHOUT_EFFECT.into_iter().chain(kube);
        options.firewall.forward_rules_given = is_given(&"iptables_forward_rules");
        options.without_effect = without_effect.filter(is_given).collect();
        if options.kube.kube_subnet_mgr {
            let variables = ["EVENT_QUEUE_DEPTH", "CONT_WHEN_CACHE_NOT_READY"].into_iter();
            options.without_effect.extend(variables.filter(|name| env(name).is_some()));
        }
        Ok(options)
    }

    /// What to log: `--log`, else what `-v` asks for.
    pub(crate) fn log_filter(&self) -> &str {
        self.log.as_deref().unwrap_or_else(|| self.klog.filter())
    }

    /// Flags and variables that were given and change nothing, as a sentence without a full stop; `None` if there are none.
    pub(crate) fn without_effect(&self) -> Option<String> {
        let flag = |id: &&str| {
            if id.starts_with(|c: char| c.is_ascii_uppercase()) {
                return (*id).to_owned();
            }
            let name = if KlogFlags::WITHOUT_EFFECT.contains(id) {
                (*id).to_owned()
            } else {
                id.replace('_', "-")
            };
            format!("--{name}")
        };
        let all: Vec<String> = self.without_effect.iter().map(flag).collect();
        (!all.is_empty()).then(|| format!("without effect here: {}", all.join(", ")))
    }

    /// The same as typed values, with these backends.
    ///
    /// # Errors
    /// [`Error::Usage`]: the options of Kubernetes do not fit together.
    pub fn config(&self, backends: Backends) -> Result<DaemonConfig, Error> {
        let mut config = DaemonConfig::new(self.store()?);
        config.backends = backends;
        config.interface = Selectors {
            iface: self.iface.clone(),
            iface_regex: self.iface_regex.clone(),
            can_reach: self.iface_can_reach,
            public: self.public(),
        };
        config.renew_margin = self.renew_margin();
        config.subnet_file.clone_from(&self.subnet_file);
        config.state_dir.clone_from(&self.state_dir);
        config.ip_blackhole_route = self.ip_blackhole_route;
        config.nexthop_objects = self.nexthop_objects;
        config.firewall = self.firewall.config();
        config.control = self.control.config();
        Ok(config)
    }

    fn store(&self) -> Result<StoreConfig, Error> {
        #[cfg(feature = "kube")]
        if self.kube.kube_subnet_mgr {
            return self.kube.store();
        }
        Ok(match &self.registry {
            RegistryUrl::Dir(location) => StoreConfig::Directory(location.clone()),
            #[cfg(feature = "etcd")]
            RegistryUrl::Etcd => StoreConfig::Etcd(self.etcd.options()),
            #[cfg(not(feature = "etcd"))]
            RegistryUrl::Etcd => return Err(Error::Usage("this build has no etcd".to_owned())),
        })
    }

    /// The public addresses that were given.
    pub fn public(&self) -> Dual<IpAddr> {
        Dual::from_fn(|family| match family {
            Family::V4 => self.public_ip.map(IpAddr::V4),
            Family::V6 => self.public_ipv6.map(IpAddr::V6),
        })
    }

    /// How long before its end the lease is renewed.
    pub fn renew_margin(&self) -> Duration {
        Duration::from_secs(60 * self.subnet_lease_renew_margin.unsigned_abs())
    }
}

/// A regular expression, as it is written.
fn regex(text: &str) -> Result<String, String> {
    match regex_lite::Regex::new(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(format!("{error}; right would be one such as ^eth[0-9]")),
    }
}

/// An empty value is none, as for Go's text flags, and beats the environment all the same. What is empty where a
/// number or a switch is asked for is wrong; those are told by their defaults.
fn is_none(command: &clap::Command, arg: &OsStr) -> bool {
    let text = arg.to_str().and_then(|arg| arg.strip_prefix("--"));
    let Some(flag) =
        text.and_then(|text| text.strip_suffix('=')).filter(|flag| !flag.contains('='))
    else {
        return false;
    };
    let arg = command.get_arguments().find(|arg| arg.get_long() == Some(flag));
    let default = arg.and_then(|arg| arg.get_default_values().first()?.to_str());
    !default.is_some_and(|text| go_bool(text).is_ok() || go_int(i64::MIN..=i64::MAX)(text).is_ok())
}

/// What clap says, and what it does not know of Go's switches.
fn with_advice(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let word = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(word)) => go_bool(word).is_ok().then_some(word),
        _ => None,
    };
    match word {
        Some(word) => {
            format!("{text}\n  tip: a switch takes its value behind =, as in --ip-masq={word}\n")
        }
        None => text,
    }
}

#[cfg(test)]
mod table;

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str], env: &[(&str, &str)]) -> Result<Options, Error> {
        let args = std::iter::once("flanneld").chain(args.iter().copied()).map(OsString::from);
        let find = |name: &str| {
            env.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value))
        };
        Options::parse_from(args, find)
    }

    #[test]
    fn flags_in_gos_way_and_ours() {
        let all = ["-registry=dir:/x", "-iface", "eth0", "--iface=eth1", "-public-ip", "192.0.2.1"];
        let options = parse(&all, &[]).unwrap();
        assert_eq!(options.iface, ["eth0", "eth1"]);
        assert_eq!(options.public().v4, Some("192.0.2.1".parse().unwrap()));
        assert_eq!(options.subnet_file.to_str(), Some("/run/flannel/subnet.env"));
        assert_eq!(options.renew_margin(), Duration::from_secs(3600));
        assert_eq!(options.nexthop_objects, NexthopObjects::Auto);
        assert_eq!(
            (options.control.healthz_ip.to_string().as_str(), options.control.healthz_port),
            ("0.0.0.0", 0)
        );
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
        assert_eq!(off.nexthop_objects, NexthopObjects::Off);
    }

    #[test]
    fn help_is_in_groups_and_tells_of_everything() {
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
        assert_eq!(offered, usize::from(cfg!(feature = "kube")), "what is not here is not offered");
    }

    #[test]
    fn switches_are_gos() {
        let masq = |args: &[&str], env: &[(&str, &str)]| {
            parse(args, env).map(|options| options.firewall.ip_masq)
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
    fn the_command_line_beats_the_environment_and_empty_is_unset() {
        let env = [
            ("FLANNELD_REGISTRY", "dir:/env"),
            ("FLANNELD_IFACE", "eth7"),
            ("FLANNELD_SUBNET_FILE", ""),
        ];
        let options = parse(&[], &env).unwrap();
        assert_eq!(
            (options.registry.to_string().as_str(), options.iface),
            ("dir:/env", vec!["eth7".to_owned()])
        );
        assert_eq!(options.subnet_file.to_str(), Some("/run/flannel/subnet.env"));
        let twice =
            ["--registry", "dir:/a", "--registry=dir:/b", "--public-ip=", "--iface=a", "--iface=b"];
        let options = parse(&twice, &env).unwrap();
        assert_eq!(
            (options.registry.to_string().as_str(), options.iface.len()),
            ("dir:/b", 2),
            "the last one wins"
        );
        let options = parse(&["--registry", "dir:/cli", "-iface=eth0"], &env).unwrap();
        assert_eq!(
            (options.registry.to_string().as_str(), options.iface),
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
        use flannel_subnet_etcd::EtcdOptions;

        let options = parse(&[], &[]).unwrap();
        assert_eq!(options.registry.to_string(), "etcd");
        assert_eq!(options.etcd.options(), EtcdOptions::default());
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
            cafile: Some("/ca".into()),
            certfile: Some("/cert".into()),
            keyfile: Some("/key".into()),
            username: Some("us".into()),
            password: Some("hunter2".into()),
            ..EtcdOptions::default()
        };
        assert_eq!(options.etcd.options(), expected);
        assert!(!format!("{options:?}").contains("hunter2"));
        for empty in [&["--etcd-cafile="] as &[&str], &["--etcd-cafile", ""], &["-etcd-cafile", ""]]
        {
            assert_eq!(
                parse(empty, &[("FLANNELD_ETCD_CAFILE", "/ca")]).unwrap().etcd.options().cafile,
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
                    parse(&args, &[]).unwrap().etcd.options().password,
                    password,
                    "{args:?}"
                );
            }
        }
        let twice = parse(&["--etcd-endpoints=a:1,b:2", "--etcd-endpoints", "c:3"], &[]).unwrap();
        assert_eq!(twice.etcd.options().endpoints, ["c:3"]);
    }
}
