//! Go flannel's options, one by one: names, defaults, variables and accepted values.
//!
//! **Source**: flannel `main.go: init`, klog, coreos `flagutil.SetFlagsFromEnv`.

use std::ffi::OsString;
use std::fmt::Display;

use flanneld::{Error, Options};

/// The value of a flag.
enum Kind {
    /// A text, and another one.
    Text(&'static str, &'static str),
    /// Two texts of a flag that may be repeated.
    Texts(&'static str, &'static str),
    /// A number: as written, its value, and a value out of range.
    Number(&'static str, &'static str, &'static str),
    /// A switch.
    Switch,
}
use Kind::{Number, Switch, Text, Texts};

struct Flag {
    name: &'static str,
    kind: Kind,
    default: &'static str,
    variable: &'static str,
    /// The value in the options.
    held: fn(&Options) -> String,
}

fn flag(
    name: &'static str,
    kind: Kind,
    default: &'static str,
    variable: &'static str,
    held: fn(&Options) -> String,
) -> Flag {
    Flag { name, kind, default, variable, held }
}

fn text<T: Display>(value: Option<&T>) -> String {
    value.map(ToString::to_string).unwrap_or_default()
}

#[cfg(feature = "etcd")]
fn path(path: &Option<std::path::PathBuf>) -> String {
    text(path.as_ref().map(|path| path.display()).as_ref())
}

#[rustfmt::skip]
fn flags() -> Vec<Flag> {
    let all = vec![
        flag("iface", Texts("eth7", "192.0.2.1"), "", "FLANNELD_IFACE",
            |o| o.interface.iface.join(" ")),
        flag("iface-regex", Texts("^eth", "192\\..*"), "", "FLANNELD_IFACE_REGEX",
            |o| o.interface.iface_regex.join(" ")),
        flag("iface-can-reach", Text("192.0.2.9", "2001:db8::9"), "", "FLANNELD_IFACE_CAN_REACH",
            |o| text(o.interface.iface_can_reach.as_ref())),
        flag("public-ip", Text("192.0.2.1", "198.51.100.1"), "", "FLANNELD_PUBLIC_IP",
            |o| text(o.interface.public_ip.as_ref())),
        flag("public-ipv6", Text("2001:db8::1", "2001:db8::2"), "", "FLANNELD_PUBLIC_IPV6",
            |o| text(o.interface.public_ipv6.as_ref())),
        flag("subnet-file", Text("/a/b.env", "/c.env"), "/run/flannel/subnet.env",
            "FLANNELD_SUBNET_FILE", |o| o.lease.subnet_file.display().to_string()),
        flag("subnet-lease-renew-margin", Number("0x3c", "60", "1440"), "60",
            "FLANNELD_SUBNET_LEASE_RENEW_MARGIN",
            |o| o.lease.subnet_lease_renew_margin.to_string()),
        flag("ip-masq", Switch, "false", "FLANNELD_IP_MASQ",
            |o| o.firewall.ip_masq.to_string()),
        flag("ip-masq-fully-random-disable", Switch, "false",
            "FLANNELD_IP_MASQ_FULLY_RANDOM_DISABLE",
            |o| o.firewall.ip_masq_fully_random_disable.to_string()),
        flag("kube-subnet-mgr", Switch, "false", "FLANNELD_KUBE_SUBNET_MGR",
            |o| o.kube.kube_subnet_mgr.to_string()),
        flag("kube-api-url", Text("https://k:6443", "http://k"), "", "FLANNELD_KUBE_API_URL",
            |o| o.kube.kube_api_url.clone()),
        flag("kube-annotation-prefix", Text("a.example", "b.example/x-"),
            "flannel.alpha.coreos.com", "FLANNELD_KUBE_ANNOTATION_PREFIX",
            |o| o.kube.kube_annotation_prefix.clone()),
        flag("kubeconfig-file", Text("/a", "/b"), "", "FLANNELD_KUBECONFIG_FILE",
            |o| o.kube.kubeconfig_file.clone()),
        flag("healthz-ip", Text("127.0.0.1", "::1"), "0.0.0.0", "FLANNELD_HEALTHZ_IP",
            |o| o.control.healthz_ip.to_string()),
        flag("healthz-port", Number("0x1f91", "8081", "65536"), "0", "FLANNELD_HEALTHZ_PORT",
            |o| o.control.healthz_port.to_string()),
        flag("iptables-resync", Number("012", "10", "0"), "5", "FLANNELD_IPTABLES_RESYNC",
            |o| o.firewall.iptables_resync.to_string()),
        flag("iptables-forward-rules", Switch, "true", "FLANNELD_IPTABLES_FORWARD_RULES",
            |o| o.firewall.iptables_forward_rules.to_string()),
        flag("tunnel-peers-only", Switch, "true", "FLANNELD_TUNNEL_PEERS_ONLY",
            |o| o.firewall.tunnel_peers_only.to_string()),
        flag("ip-blackhole-route", Switch, "false", "FLANNELD_IP_BLACKHOLE_ROUTE",
            |o| o.routes.ip_blackhole_route.to_string()),
        flag("net-config-path", Text("/n.json", "/m.json"), "/etc/kube-flannel/net-conf.json",
            "FLANNELD_NET_CONFIG_PATH", |o| o.kube.net_config_path.clone()),
        flag("set-node-network-unavailable", Switch, "true",
            "FLANNELD_SET_NODE_NETWORK_UNAVAILABLE",
            |o| o.kube.set_node_network_unavailable.to_string()),
        flag("v", Number("4", "4", "2147483648"), "0", "FLANNELD_V",
            |o| o.log.verbosity.to_string()),
        flag("vmodule", Text("main=4", "x=1,y=2"), "", "FLANNELD_VMODULE",
            |o| o.log.vmodule.clone()),
        flag("log_backtrace_at", Text("main.go:1", "x.go:2"), "", "FLANNELD_LOG_BACKTRACE_AT",
            |o| text(o.log.log_backtrace_at.as_ref())),
    ];
    #[cfg(feature = "etcd")]
    let all = all.into_iter().chain([
        flag("etcd-endpoints", Text("http://a:1,http://b:2", "c:3"),
            "http://127.0.0.1:4001,http://127.0.0.1:2379",
            "FLANNELD_ETCD_ENDPOINTS", |o| o.lease.etcd.endpoints.join(",")),
        flag("etcd-prefix", Text("/net", "/other/net"), "/coreos.com/network",
            "FLANNELD_ETCD_PREFIX", |o| o.lease.etcd.prefix.clone()),
        flag("etcd-keyfile", Text("/k", "/l"), "", "FLANNELD_ETCD_KEYFILE",
            |o| path(&o.lease.etcd.keyfile)),
        flag("etcd-certfile", Text("/c", "/d"), "", "FLANNELD_ETCD_CERTFILE",
            |o| path(&o.lease.etcd.certfile)),
        flag("etcd-cafile", Text("/a", "/b"), "", "FLANNELD_ETCD_CAFILE",
            |o| path(&o.lease.etcd.cafile)),
        flag("etcd-username", Text("u", "w"), "", "FLANNELD_ETCD_USERNAME",
            |o| text(o.lease.etcd.username.as_ref())),
        flag("etcd-password", Text("p", "-q=r"), "", "FLANNELD_ETCD_PASSWORD",
            |o| text(o.lease.etcd.password.as_ref())),
    ]).collect();
    all
}

fn parse(args: &[String], env: &[(&str, &str)]) -> Result<Options, Error> {
    let args = ["flanneld", "-registry=dir:/x"].into_iter().chain(args.iter().map(String::as_str));
    // Leases of Kubernetes need the node's name.
    let env = env.iter().chain([&("NODE_NAME", "node-1")]);
    Options::parse_from(args.map(OsString::from), |name| {
        env.clone().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value))
    })
}

impl Flag {
    /// The value after this command line and environment.
    fn held(&self, args: &[String], env: &[(&str, &str)]) -> String {
        match parse(args, env) {
            Ok(options) => (self.held)(&options),
            // The flag is known, and its value is refused.
            Err(error) if self.name == "kube-subnet-mgr" && cfg!(not(feature = "kube")) => {
                let text = error.to_string();
                assert!(
                    text.contains("not in the Kubernetes API") && error.exit_code() == 2,
                    "{text}"
                );
                assert_eq!(text.contains(self.variable), args.is_empty(), "{text}");
                "true".to_owned()
            }
            Err(error) => panic!("{args:?} {env:?}: {error}"),
        }
    }

    /// Command lines that set `value`.
    fn forms(&self, value: &str) -> Vec<Vec<String>> {
        let name = self.name;
        let mut forms = vec![vec![format!("-{name}={value}")], vec![format!("--{name}={value}")]];
        match self.kind {
            Switch if value == "true" => {
                forms.extend([vec![format!("-{name}")], vec![format!("--{name}")]]);
            }
            Switch => {}
            _ => forms.extend(
                ["-", "--"].map(|dashes| vec![format!("{dashes}{name}"), value.to_owned()]),
            ),
        }
        forms
    }

    /// Checks that `written` gives `value`, on the command line and in the environment, and that
    /// the command line overrides `other` in the environment.
    fn takes(&self, written: &str, value: &str, other: &str) {
        for form in self.forms(written) {
            assert_eq!(self.held(&form, &[]), value, "{form:?}");
            assert_eq!(
                self.held(&form, &[(self.variable, other)]),
                value,
                "{form:?} overrides {other}"
            );
        }
        assert_eq!(self.held(&[], &[(self.variable, written)]), value, "{}", self.variable);
    }

    /// Checks that a wrong value is refused, on the command line and in the environment.
    fn refuses(&self, value: &str) {
        for form in self.forms(value) {
            let error = parse(&form, &[]).unwrap_err();
            let text = error.to_string();
            assert!(
                error.exit_code() == 2 && text.contains(self.name) && text.contains(value),
                "{form:?}: {text}"
            );
            assert!(!text.contains("FLANNELD_"), "{text}");
        }
        let error = parse(&[], &[(self.variable, value)]).unwrap_err();
        let text = error.to_string();
        assert!(error.exit_code() == 2 && text.contains(self.variable), "{text}");
    }
}

#[test]
fn every_option_of_go_flannel_is_accepted() {
    for flag in flags() {
        let name = flag.name;
        let default = flag.default;
        assert_eq!(flag.held(&[], &[]), default, "--{name}");
        assert_eq!(
            flag.held(&[], &[(flag.variable, "")]),
            default,
            "{} empty is unset",
            flag.variable
        );
        match flag.kind {
            Text(one, other) => {
                flag.takes(one, one, other);
                flag.takes(other, other, one);
                let twice = [format!("-{name}={one}"), format!("--{name}"), other.to_owned()];
                assert_eq!(flag.held(&twice, &[]), other, "--{name}: the last one wins");
                if default.is_empty() {
                    let none = [format!("--{name}=")];
                    assert_eq!(
                        flag.held(&none, &[(flag.variable, one)]),
                        "",
                        "--{name}= overrides the variable"
                    );
                }
            }
            Texts(one, other) => {
                flag.takes(one, one, other);
                let twice = [format!("-{name}={one}"), format!("--{name}"), other.to_owned()];
                assert_eq!(flag.held(&twice, &[(flag.variable, "x")]), format!("{one} {other}"));
            }
            Number(written, value, outside) => {
                flag.takes(written, value, "7");
                for wrong in [outside, "five", "1_0", "0x"] {
                    flag.refuses(wrong);
                }
                assert_eq!(parse(&[format!("--{name}=")], &[]).unwrap_err().exit_code(), 2);
            }
            Switch => {
                let written = [
                    "1", "t", "T", "true", "TRUE", "True", "0", "f", "F", "false", "FALSE", "False",
                ];
                for (n, text) in written.into_iter().enumerate() {
                    flag.takes(
                        text,
                        if n < 6 { "true" } else { "false" },
                        if n < 6 { "false" } else { "true" },
                    );
                }
                for wrong in ["yes", "on", "2"] {
                    flag.refuses(wrong);
                }
                assert_eq!(parse(&[format!("--{name}=")], &[]).unwrap_err().exit_code(), 2);
            }
        }
    }
}

#[test]
fn a_switch_does_not_take_a_separate_value() {
    let error = parse(&["--ip-masq".into(), "false".into()], &[]).unwrap_err();
    assert!(error.exit_code() == 2 && error.to_string().contains("--ip-masq=false"), "{error}");
}

#[test]
fn v_sets_the_log_level_unless_log_is_given() {
    let filter = |args: &[&str], env: &[(&str, &str)]| {
        let args: Vec<String> = args.iter().map(ToString::to_string).collect();
        parse(&args, env).unwrap().log.filter().to_owned()
    };
    for (v, level) in [
        ("-1", "info"),
        ("0", "info"),
        ("3", "info"),
        ("4", "debug"),
        ("5", "debug"),
        ("10", "trace"),
    ] {
        assert_eq!(filter(&[&format!("-v={v}")], &[]), level, "-v={v}");
        assert_eq!(filter(&["-v", v], &[]), level, "-v {v}");
    }
    assert_eq!(filter(&[], &[("FLANNELD_V", "4")]), "debug");
    assert_eq!(filter(&["-v=4", "--log=warn"], &[]), "warn");
    assert_eq!(filter(&["-v=4"], &[("FLANNELD_LOG", "error")]), "error");
}

#[test]
fn flags_without_effect_are_reported() {
    let reported = |args: &[&str], env: &[(&str, &str)]| {
        let args: Vec<String> = args.iter().map(ToString::to_string).collect();
        parse(&args, env).unwrap().without_effect()
    };
    assert_eq!(reported(&["-v=2", "--ip-masq"], &[]), None);
    assert_eq!(
        reported(
            &["-vmodule=x=1", "--kube-api-url", "http://k"],
            &[("FLANNELD_LOG_BACKTRACE_AT", "main.go:1")]
        ),
        Some("--vmodule, --log_backtrace_at, --kube-api-url".to_owned())
    );
}

/// Parses a command line without the values that [`parse`] adds.
fn bare(args: &[&str], env: &[(&str, &str)]) -> Result<Options, Error> {
    let args = ["flanneld"].into_iter().chain(args.iter().copied()).map(OsString::from);
    Options::parse_from(args, |name| {
        env.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value))
    })
}

/// Checks that a wrong value is refused on the command line and in the environment. The error names
/// the flag, the value, the right form, and the variable.
fn refuses(flag: &str, value: &str, others: &[&str], says: &[&str]) {
    let variable = format!("FLANNELD_{}", flag.to_uppercase().replace('-', "_"));
    let given = format!("--{flag}={value}");
    let error = bare(&[&[given.as_str()], others].concat(), &[("NODE_NAME", "n")]).unwrap_err();
    let text = error.to_string();
    assert_eq!(error.exit_code(), 2, "{text}");
    assert!(text.contains(&format!("--{flag}")) && !text.contains(&variable), "{text}");
    let error = bare(others, &[("NODE_NAME", "n"), (&variable, value)]).unwrap_err();
    assert_eq!(error.exit_code(), 2, "{text}");
    assert!(error.to_string().contains(&variable), "{error}");
    for says in says {
        assert!(text.contains(says) && error.to_string().contains(says), "{says}: {text}; {error}");
    }
}

#[cfg(feature = "etcd")]
#[test]
fn options_that_cannot_reach_etcd_are_wrong_usage() {
    for (value, says) in [
        ("nonsense", "\"nonsense\" has no port"),
        ("http://a:1,unix:///x", "\"unix:///x\" is a Unix socket"),
        ("http://a:99999", "from 1 to 65535"),
        (",", "at least one"),
    ] {
        refuses("etcd-endpoints", value, &[], &[says, "expected", "http://127.0.0.1:2379"]);
    }
    let both = "expected both or neither";
    for (flag, value, lacks) in [
        ("etcd-certfile", "/c.pem", "keyfile"),
        ("etcd-keyfile", "/k.pem", "certfile"),
        ("etcd-username", "flannel", "password"),
    ] {
        refuses(flag, value, &[], &[value, &format!("is given without {lacks}"), both]);
        // No error without etcd.
        assert!(bare(&[&format!("--{flag}={value}"), "--registry=dir:/x"], &[]).is_ok());
    }
    refuses("etcd-password", "hunter2", &[], &["is given without username", both]);
    assert!(!bare(&["--etcd-password=hunter2"], &[]).unwrap_err().to_string().contains("hunter2"));
    // One half from the environment, the other from the command line.
    assert!(bare(&["--etcd-username=u"], &[("FLANNELD_ETCD_PASSWORD", "p")]).is_ok());
}

#[test]
fn a_wrong_regular_expression_is_wrong_usage() {
    for value in ["(", "[", "a{2,1}", "*"] {
        let quoted = format!("'{value}'");
        refuses("iface-regex", value, &["--registry=dir:/x"], &[&quoted, "expected one such as"]);
    }
    let good =
        bare(&["--registry=dir:/x", "-iface-regex", "^eth(0|1)$", "--iface-regex="], &[]).unwrap();
    assert_eq!(good.interface.iface_regex, ["^eth(0|1)$"]);
}

#[cfg(feature = "kube")]
#[test]
fn a_wrong_url_of_an_api_server_is_wrong_usage() {
    for value in ["nonsense", "k:6443", "ftp://k", "https://", "http://a b"] {
        refuses(
            "kube-api-url",
            value,
            &["--kube-subnet-mgr"],
            &[&format!("{value:?}"), "expected", "https://"],
        );
    }
    assert!(
        bare(
            &["--kube-subnet-mgr", "--kube-api-url=https://[2001:db8::1]:6443"],
            &[("NODE_NAME", "n")]
        )
        .is_ok()
    );
}

#[cfg(feature = "kube")]
#[test]
fn kube_subnet_mgr_needs_the_name_of_the_node_or_the_pod() {
    let parse =
        |args: &[&str], env: &[(&str, &str)]| bare(&[&["--kube-subnet-mgr"], args].concat(), env);
    for (args, env, says) in [
        (&[] as &[&str], &[] as &[(&str, &str)], "NODE_NAME"),
        (&[], &[("POD_NAME", "p")], "POD_NAMESPACE"),
        (
            &[],
            &[("NODE_NAME", "n"), ("EVENT_QUEUE_DEPTH", "many")],
            "EVENT_QUEUE_DEPTH in the environment: \"many\"",
        ),
        (
            &["--kube-annotation-prefix=Nonsense"],
            &[("NODE_NAME", "n")],
            "--kube-annotation-prefix: \"Nonsense\"",
        ),
    ] {
        let error = parse(args, env).unwrap_err();
        assert!(error.exit_code() == 2 && error.to_string().contains(says), "{error}");
    }
    let options = parse(&[], &[("POD_NAME", "p"), ("POD_NAMESPACE", "s")]).unwrap();
    assert_eq!((options.kube.pod_namespace.as_str(), options.kube.pod_name.as_str()), ("s", "p"));
    let env =
        [("NODE_NAME", "n"), ("EVENT_QUEUE_DEPTH", "5000"), ("CONT_WHEN_CACHE_NOT_READY", "true")];
    let options = parse(&["--registry=dir:/x"], &env).unwrap();
    assert_eq!(options.kube.node_name, "n");
    let expected = "--registry, EVENT_QUEUE_DEPTH, CONT_WHEN_CACHE_NOT_READY";
    assert_eq!(options.without_effect().as_deref(), Some(expected));
}

#[test]
fn help_and_version_do_not_depend_on_the_environment() {
    for ask in ["--help", "-h", "-help", "--version", "-version"] {
        let error = parse(&[ask.into()], &[("FLANNELD_HEALTHZ_PORT", "nonsense")]).unwrap_err();
        assert_eq!(error.exit_code(), 0, "{ask}: {error}");
    }
}

#[cfg(feature = "etcd")]
#[test]
fn no_error_shows_the_password() {
    let secret = "hunter2";
    for args in [
        vec!["--etcd-pasword=hunter2"],
        vec!["--etcd-pasword", "hunter2"],
        vec!["--etcd-password=hunter2", "--nonsense"],
        vec!["-etcd-password", "hunter2", "--healthz-port=x"],
    ] {
        let args: Vec<String> = args.into_iter().map(str::to_owned).collect();
        let error = parse(&args, &[]).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(!error.to_string().contains(secret), "{args:?}: {error}");
    }
    let error =
        parse(&["--healthz-port=x".into()], &[("FLANNELD_ETCD_PASSWORD", secret)]).unwrap_err();
    assert!(!format!("{error} {error:?}").contains(secret), "{error}");
}
