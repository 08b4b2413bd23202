//! `flannelctl docker-opts`: this host's subnet as options for the Docker daemon.
//!
//! It replaces Go flannel's `mk-docker-opts.sh`, with the same flags and the same output to the
//! byte, because units read the file with `EnvironmentFile=`.
//!
//! **Source**: flannel `dist/mk-docker-opts.sh`.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use flannel_api::VERSION;
use flannel_core::Subnet;
use serde_json::json;

use crate::Output;
use crate::error::{Error, Result};

/// The prefix of variables with options for Docker, in the file and in the environment.
const PREFIX: &str = "DOCKER_OPT_";

/// The flags of `mk-docker-opts.sh`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct DockerFlags {
    /// The subnet file; by default the value of --subnet-file
    #[arg(short = 'f', value_name = "FILE")]
    env_file: Option<PathBuf>,

    /// The file to write
    #[arg(short = 'd', value_name = "FILE", default_value = "/run/docker_opts.env")]
    docker_file: PathBuf,

    /// Write one variable for each option, such as DOCKER_OPT_MTU; without -i and -c, both forms
    #[arg(short = 'i')]
    individual: bool,

    /// Write one variable with all options
    #[arg(short = 'c')]
    combined: bool,

    /// Leave out --ip-masq
    #[arg(short = 'm')]
    no_ip_masq: bool,

    /// The name of the variable with all options; if it is set already, its value comes first
    #[arg(short = 'k', value_name = "NAME", default_value = "DOCKER_OPTS", value_parser = name)]
    key: String,

    /// Print help, as -h does
    #[arg(short = '?', action = clap::ArgAction::Help)]
    usage: Option<bool>,
}

fn name(text: &str) -> std::result::Result<String, String> {
    let is_name = text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        && !text.starts_with(|c: char| c.is_ascii_digit())
        && !text.is_empty();
    if is_name {
        Ok(text.to_owned())
    } else {
        Err("expected the name of a variable, such as DOCKER_OPTS".into())
    }
}

type Variables = BTreeMap<String, String>;

/// Writes the file, and warns if Docker cannot use the subnet.
pub(crate) fn docker_opts(flags: &DockerFlags, subnet_file: &Path) -> Result<Output> {
    let path = flags.env_file.as_deref().unwrap_or(subnet_file);
    let mut variables: Variables = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    read_subnet_file(path, &mut variables)?;
    let text = options(flags, &variables)?;
    let file = flags.docker_file.display().to_string();
    fs::write(&flags.docker_file, &text)
        .map_err(|error| Error::Refused(format!("{file}: {error}")))?;
    let routes = fs::read_to_string("/proc/net/route").unwrap_or_default();
    if let Some(subnet) = variables.get("FLANNEL_SUBNET").and_then(|text| text.parse().ok())
        && let Some(route) = routed_away(&routes, subnet)
    {
        return Err(Error::Refused(format!(
            "Your routing table already contains the subnet: {route}"
        )));
    }
    let written: Variables = assignments(&text).collect();
    let value = json!({ "version": VERSION, "file": file, "variables": written });
    Ok(Output { text: String::new(), value, ok: true })
}

/// Adds the variables in the subnet file. Without the file, the environment must have the subnet.
fn read_subnet_file(path: &Path, variables: &mut Variables) -> Result<()> {
    let file = path.display();
    match fs::read_to_string(path) {
        Ok(text) => variables.extend(assignments(&text)),
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(Error::Refused(format!("{file}: {error}")));
        }
        Err(_) if variables.contains_key("FLANNEL_SUBNET") => {}
        Err(_) => {
            return Err(Error::Refused(format!(
                "there is no subnet file {file}: start flanneld, which writes it, or name the \
                 right file with -f"
            )));
        }
    }
    Ok(())
}

/// The text of the file.
fn options(flags: &DockerFlags, variables: &Variables) -> Result<String> {
    let given = |key: &str| variables.get(key).filter(|value| !value.is_empty());
    let mut all: Variables = variables
        .iter()
        .filter(|(key, _)| key.starts_with(PREFIX))
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect();
    let mut set = |option: &str, value: String| all.insert(format!("{PREFIX}{option}"), value);
    if let Some(subnet) = given("FLANNEL_SUBNET") {
        set("BIP", format!("--bip={subnet}"));
    }
    if let Some(mtu) = given("FLANNEL_MTU") {
        set("MTU", format!("--mtu={mtu}"));
    }
    if let Some(masq) = given("FLANNEL_IPMASQ").filter(|_| !flags.no_ip_masq) {
        // Only one of Docker and flannel masquerades.
        let of_docker = match masq.as_str() {
            "true" => "false",
            "false" => "true",
            _ => return Err(Error::Refused(format!("Invalid value of FLANNEL_IPMASQ: {masq}"))),
        };
        set("IPMASQ", format!("--ip-masq={of_docker}"));
    }
    let both = flags.individual == flags.combined;
    let mut text = String::new();
    let mut combined = given(&flags.key).map(|value| format!("{value} ")).unwrap_or_default();
    for (key, value) in &all {
        if flags.individual || both {
            text += &format!("{key}=\"{value}\"\n");
        }
        combined += &format!(" {value}");
    }
    if flags.combined || both {
        text += &format!("{}=\"{combined}\"\n", flags.key);
    }
    Ok(text)
}

/// The variables that plain assignments in the text set in a shell.
fn assignments(text: &str) -> impl Iterator<Item = (String, String)> {
    text.lines()
        .filter_map(|line| {
            let line = line.trim();
            let (key, value) = line.strip_prefix("export ").unwrap_or(line).split_once('=')?;
            let quoted = ['"', '\'']
                .iter()
                .find_map(|quote| value.strip_prefix(*quote)?.strip_suffix(*quote));
            name(key).ok().map(|key| (key, quoted.unwrap_or(value).to_owned()))
        })
        .collect::<Vec<_>>()
        .into_iter()
}

/// The route that sends the subnet to another host, in the kernel's table of IPv4 routes.
fn routed_away(table: &str, subnet: Subnet) -> Option<String> {
    // Numbers are words of memory in the host's byte order.
    let address =
        |text: &str| Some(Ipv4Addr::from(u32::from_str_radix(text, 16).ok()?.to_ne_bytes()));
    table.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [link, dst, gateway, _, _, _, _, mask, ..] = *fields else { return None };
        let len = address(mask)?.to_bits().leading_ones();
        let is_it = std::net::IpAddr::from(address(dst)?) == subnet.base()
            && len == u32::from(subnet.len());
        let gateway = address(gateway).filter(|gateway| !gateway.is_unspecified() && is_it)?;
        Some(format!("{subnet} via {gateway} dev {link}"))
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flags: DockerFlags,
    }

    const ENV: &str = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.74.1/24\nFLANNEL_MTU=1472\n\
        FLANNEL_IPMASQ=false\n";

    fn written(args: &str, env: &[(&str, &str)], file: &str) -> Result<String> {
        let line = Line::try_parse_from(format!("x {args}").split_whitespace()).unwrap();
        let env = env.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        options(&line.flags, &env.chain(assignments(file)).collect())
    }

    /// The output of `mk-docker-opts.sh` in dash.
    #[test]
    fn the_output_equals_that_of_mk_docker_opts() {
        const ALL: &str = "DOCKER_OPT_BIP=\"--bip=10.1.74.1/24\"\n\
            DOCKER_OPT_IPMASQ=\"--ip-masq=true\"\nDOCKER_OPT_MTU=\"--mtu=1472\"\n";
        const COMBINED: &str = "\" --bip=10.1.74.1/24 --ip-masq=true --mtu=1472\"\n";
        let no_masq = "DOCKER_OPT_BIP=\"--bip=10.1.74.1/24\"\nDOCKER_OPT_MTU=\"--mtu=1472\"\n";
        let masq = ENV.replace("false", "true");
        let quoted = "# c\nexport FLANNEL_SUBNET=\"10.1.74.1/24\"\nFLANNEL_MTU='1472'\n";
        let v6 = "FLANNEL_IPV6_SUBNET=fd00::1/64\nFLANNEL_MTU=1430\nFLANNEL_IPMASQ=true\n";
        let none: &[(&str, &str)] = &[];
        for (args, env, file, expected) in [
            ("", none, ENV, format!("{ALL}DOCKER_OPTS={COMBINED}")),
            ("-i", none, ENV, ALL.to_owned()),
            ("-c", none, ENV, format!("DOCKER_OPTS={COMBINED}")),
            ("-ic", none, ENV, format!("{ALL}DOCKER_OPTS={COMBINED}")),
            ("-k CUSTOM_KEY", none, ENV, format!("{ALL}CUSTOM_KEY={COMBINED}")),
            ("-m", none, ENV, format!("{no_masq}DOCKER_OPTS=\" --bip=10.1.74.1/24 --mtu=1472\"\n")),
            (
                "-i -c -m -k X",
                none,
                ENV,
                format!("{no_masq}X=\" --bip=10.1.74.1/24 --mtu=1472\"\n"),
            ),
            (
                "-c",
                &[("DOCKER_OPTS", "--debug -H tcp://x")],
                ENV,
                "DOCKER_OPTS=\"--debug -H tcp://x  --bip=10.1.74.1/24 --ip-masq=true --mtu=1472\"\n"
                    .to_owned(),
            ),
            (
                "",
                &[("DOCKER_OPT_FOO", "--foo=1")],
                ENV,
                format!(
                    "{}DOCKER_OPTS=\" --bip=10.1.74.1/24 --foo=1 --ip-masq=true --mtu=1472\"\n",
                    ALL.replacen('\n', "\nDOCKER_OPT_FOO=\"--foo=1\"\n", 1)
                ),
            ),
            ("-i", &[("DOCKER_OPT_BIP", "--bip=1.1.1.1/8")], ENV, ALL.to_owned()),
            ("-i", none, &masq, ALL.replace("--ip-masq=true", "--ip-masq=false")),
            (
                "",
                none,
                quoted,
                format!("{no_masq}DOCKER_OPTS=\" --bip=10.1.74.1/24 --mtu=1472\"\n"),
            ),
            ("-c", none, v6, "DOCKER_OPTS=\" --ip-masq=false --mtu=1430\"\n".to_owned()),
            ("", none, "", "DOCKER_OPTS=\"\"\n".to_owned()),
            (
                "",
                &[("FLANNEL_MTU", "1400")],
                "",
                "DOCKER_OPT_MTU=\"--mtu=1400\"\nDOCKER_OPTS=\" --mtu=1400\"\n".to_owned(),
            ),
        ] {
            assert_eq!(written(args, env, file).unwrap(), expected, "{args} {env:?}");
        }
        let error = written("", &[], "FLANNEL_IPMASQ=maybe\n").unwrap_err().to_string();
        assert_eq!(error, "Invalid value of FLANNEL_IPMASQ: maybe");
        assert!(Line::try_parse_from(["x", "-k", "a b"]).is_err());
    }

    #[test]
    fn without_a_subnet_file_the_environment_must_have_the_subnet() {
        let missing = Path::new("/nowhere/subnet.env");
        let error = read_subnet_file(missing, &mut Variables::new()).unwrap_err().to_string();
        assert_eq!(
            error,
            "there is no subnet file /nowhere/subnet.env: start flanneld, which writes it, or name \
             the right file with -f"
        );
        let mut given: Variables = assignments(ENV).collect();
        read_subnet_file(missing, &mut given).unwrap();
        assert_eq!(given, assignments(ENV).collect::<Variables>());
    }

    #[test]
    fn a_route_to_the_subnet_by_a_gateway_is_found() {
        let row = |dst: [u8; 4], gateway: [u8; 4], mask: [u8; 4]| {
            let [dst, gateway, mask] =
                [dst, gateway, mask].map(|a| format!("{:08X}", u32::from_ne_bytes(a)));
            format!("eth0\t{dst}\t{gateway}\t0003\t0\t0\t0\t{mask}\t0\t0\t0\n")
        };
        let head =
            "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n";
        let table = |dst, gateway, mask| format!("{head}{}", row(dst, gateway, mask));
        let subnet: Subnet = "10.1.74.0/24".parse().unwrap();
        let net = [10, 1, 74, 0];
        let gateway = [192, 0, 2, 9];
        let mask = [255, 255, 255, 0];
        let found = routed_away(&table(net, gateway, mask), subnet);
        assert_eq!(found.as_deref(), Some("10.1.74.0/24 via 192.0.2.9 dev eth0"));
        for other in [
            table(net, [0; 4], mask),
            table([10, 1, 75, 0], gateway, mask),
            table(net, gateway, [255, 255, 0, 0]),
            head.to_owned(),
            String::new(),
        ] {
            assert_eq!(routed_away(&other, subnet), None, "{other}");
        }
    }
}
