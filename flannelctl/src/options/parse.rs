//! Parses a command line and the environment.

use std::ffi::OsString;

use clap::FromArgMatches;
use clap::parser::ValueSource;
#[cfg(feature = "etcd")]
use flannel_options::RegistryUrl;
use flannel_options::environment::{FromEnvironment, misspelt};
use flannel_options::go_flags::go_bool;
use flannel_options::{Error as OptionsError, with_plain_usage};

use super::{Ctl, command};

/// Options of commands that flanneld also has, with the same meaning and the same variables.
const OF_DAEMON: [&str; 8] = [
    "doctor_port",
    "iface",
    "iface_regex",
    "iface_cidr",
    "iface_node_ip",
    "iface_can_reach",
    "public_ip",
    "public_ipv6",
];

/// Warnings about the misspelt ones of these variables of the environment.
pub(crate) fn misspelt_variables(names: impl Iterator<Item = OsString>) -> Vec<String> {
    let command = command();
    let global = command.get_arguments().filter(|arg| arg.get_action().takes_values());
    misspelt(names, global.filter_map(clap::Arg::get_long).chain(OF_DAEMON))
}

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
        // Options that flanneld also has are read from its variables.
        let mut environment = FromEnvironment::default();
        let mut take = |arg: &clap::Arg, args: &[OsString]| {
            let flag = arg.get_long().filter(|_| arg.get_action().takes_values())?;
            environment.argument(flag, args, &env)
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
        let matches = with_plain_usage(command).try_get_matches_from(args).map_err(|error| {
            if error.use_stderr() {
                environment.usage(error.render().to_string())
            } else {
                OptionsError::Help(error.render().to_string())
            }
        })?;
        let mut options = Self::from_arg_matches(&matches)
            .map_err(|error| OptionsError::Usage(error.to_string()))?;
        let set = |name: &str| env(name).filter(|value| !value.is_empty());
        let flag = set("FLANNELD_KUBE_SUBNET_MGR");
        let off =
            |value: &OsString| value.to_str().and_then(|text| go_bool(text).ok()) == Some(false);
        // Kubernetes sets the first one in each pod, and not for a daemon outside of pods.
        let in_kubernetes =
            set("KUBERNETES_SERVICE_HOST").is_some() || flag.is_some_and(|value| !off(&value));
        let given = |id| matches.value_source(id) == Some(ValueSource::CommandLine);
        let is_named = given("registry") || (cfg!(feature = "etcd") && given("endpoints"));
        options.global.only_kubernetes = in_kubernetes && !is_named;
        #[cfg(feature = "etcd")]
        if options.global.registry == Some(RegistryUrl::Etcd) {
            options.global.etcd.check().map_err(|text| environment.usage(format!("{text}\n")))?;
        }
        Ok(options)
    }
}
