//! Options from the environment.

use std::ffi::OsString;

use crate::command_line::go_flags::is_given;
use crate::{Error, nearest};

/// The first part of all variables.
const PREFIX: &str = "FLANNELD_";

/// The variable of an option: `FLANNELD_SUBNET_FILE` for `subnet-file`.
pub(crate) fn variable(flag: &str) -> String {
    format!("{PREFIX}{}", flag.to_uppercase().replace(['-', '.'], "_"))
}

/// A warning for each misspelt variable of one of the `flags`. `names` are the names of all
/// variables of the environment. A name that is unlike all flags is not reported: Kubernetes, for
/// example, sets variables with the same prefix for a service `flanneld`.
pub fn misspelt<'a>(
    names: impl IntoIterator<Item = OsString>,
    flags: impl IntoIterator<Item = &'a str>,
) -> Vec<String> {
    let known: Vec<String> = flags.into_iter().map(variable).collect();
    names.into_iter().filter_map(|name| warning(name.to_str()?, &known)).collect()
}

/// The warning for a variable, if it is not `known` and is like one that is.
fn warning(name: &str, known: &[String]) -> Option<String> {
    if known.iter().any(|known| known == name) {
        return None;
    }
    let own_parts = known.iter().filter_map(|known| known.strip_prefix(PREFIX));
    let right = nearest(name.strip_prefix(PREFIX)?, own_parts)?;
    // The message does not have the value, which may be a password.
    Some(format!(
        "{name} in the environment has no effect, because no option has this variable; expected \
         {PREFIX}{right}"
    ))
}

/// The options whose values come from the environment.
#[derive(Debug, Default)]
pub struct FromEnvironment {
    /// The flags, with their variables.
    variables: Vec<(String, String)>,
}

impl FromEnvironment {
    /// The argument `--flag=value` with the value of the flag's variable. `None` if `args` have the
    /// flag, or if the variable is unset or empty.
    pub fn argument(
        &mut self,
        flag: &str,
        args: &[OsString],
        env: impl Fn(&str) -> Option<OsString>,
    ) -> Option<OsString> {
        if is_given(args, flag) {
            return None;
        }
        let name = variable(flag);
        let mut arg = OsString::from(format!("--{flag}="));
        arg.push(env(&name).filter(|value| !value.is_empty())?);
        self.variables.push((flag.to_owned(), name));
        Some(arg)
    }

    /// An error about options. It names the variable of a flag whose value comes from the
    /// environment.
    pub fn usage(&self, text: String) -> Error {
        let is_named = |flag: &str| {
            [" ", ":", "=", "["].iter().any(|end| text.contains(&format!("--{flag}{end}")))
        };
        Error::Usage(match self.variables.iter().find(|(flag, _)| is_named(flag)) {
            Some((_, name)) => {
                format!("{text}\n(the value comes from the environment: {name})\n")
            }
            None => text,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_variable_is_reported_with_the_right_one() {
        let warnings = |name: &str| misspelt([OsString::from(name)], ["iface", "subnet-file", "v"]);
        for (wrong, right) in [
            ("FLANNELD_IFCAE", "FLANNELD_IFACE"),
            ("FLANNELD_iface", "FLANNELD_IFACE"),
            ("FLANNELD_SUBNET-FILE", "FLANNELD_SUBNET_FILE"),
        ] {
            let all = warnings(wrong);
            let [warning] = &all[..] else { panic!("{wrong}: {all:?}") };
            assert!(warning.starts_with(wrong) && warning.ends_with(right), "{warning}");
        }
        for other in [
            "FLANNELD_IFACE",
            "FLANNELD_SUBNET_FILE",
            "FLANNELD_SERVICE_HOST",
            "FLANNELD_",
            "FLANNEL_IFCAE",
            "IFCAE",
        ] {
            assert_eq!(warnings(other), [""; 0], "{other}");
        }
    }
}
