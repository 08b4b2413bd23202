//! docs/configuration.md names every verb and option.

#[test]
fn every_verb_and_option_of_flannelctl_is_there() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/configuration.md");
    let text = std::fs::read_to_string(path).unwrap();
    let text = text.split("## Options of flannelctl").nth(1).unwrap();
    let mut all = vec![(String::new(), flannelctl::command())];
    while let Some((path, command)) = all.pop() {
        for verb in command.get_subcommands() {
            let path = format!("{path} {}", verb.get_name()).trim_start().to_owned();
            if verb.get_subcommands().next().is_none() {
                assert!(text.contains(&format!("`{path}")), "flannelctl {path}");
                for arg in verb.get_arguments() {
                    let flag = arg.get_long().map(|flag| format!("`--{flag}`"));
                    let flag = flag.or_else(|| arg.get_short().map(|flag| format!("`-{flag}`")));
                    let row = text.lines().find(|line| line.contains(&format!("`{path}"))).unwrap();
                    let known = flag.as_ref().is_none_or(|flag| row.contains(flag.as_str()));
                    assert!(known, "flannelctl {path}: {flag:?}: {row}");
                }
            }
            all.push((path, verb.clone()));
        }
    }
}
