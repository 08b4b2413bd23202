//! Options from the environment.

/// The variable of an option: `FLANNELD_SUBNET_FILE` for `subnet-file`.
pub fn variable(flag: &str) -> String {
    format!("FLANNELD_{}", flag.to_uppercase().replace(['-', '.'], "_"))
}

/// Appends the name of the variable to an error about an option whose value comes from the
/// environment. `variables` are pairs of an option and its variable.
pub fn name_variable(text: String, variables: &[(String, String)]) -> String {
    let names = |flag: &str| {
        [" ", ":", "=", "["].iter().any(|end| text.contains(&format!("--{flag}{end}")))
    };
    match variables.iter().find(|(flag, _)| names(flag)) {
        Some((_, name)) => format!("{text}\n(the value comes from the environment: {name})\n"),
        None => text,
    }
}
