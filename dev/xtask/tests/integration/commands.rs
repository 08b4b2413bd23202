//! The commands, run on this repository.

use std::fs;
use std::process::Command;

use clap::CommandFactory;

#[test]
fn completions_and_man_pages_know_every_option_and_verb() {
    let dir = tempfile::tempdir().unwrap();
    let output =
        Command::new(env!("CARGO_BIN_EXE_xtask")).arg("assets").arg(dir.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let read = |name: &str| {
        fs::read_to_string(dir.path().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    };
    for command in [flanneld::Options::command(), flannelctl::command()] {
        let name = command.get_name();
        // roff needs escaped dashes.
        let page = read(&format!("man/{name}.8")).replace('\\', "");
        let shells = [format!("{name}.bash"), format!("_{name}"), format!("{name}.fish")];
        let shells = shells.map(|file| read(&format!("completions/{file}")));
        let visible = command.get_arguments().filter(|arg| !arg.is_hide_set());
        for flag in visible.filter_map(clap::Arg::get_long) {
            assert!(page.contains(&format!("--{flag}")), "man page of {name}: --{flag}");
            assert!(
                shells.iter().all(|text| text.contains(flag)),
                "completions of {name}: --{flag}"
            );
        }
        for verb in command.get_subcommands() {
            let verb = verb.get_name();
            assert!(shells.iter().all(|text| text.contains(verb)), "completions of {name}: {verb}");
            assert!(read(&format!("man/{name}-{verb}.8")).contains(".TH "), "{verb}");
        }
    }
    assert!(read("man/flannelctl-lease-reserve.8").replace('\\', "").contains("--backend-type"));
    for file in ["flanneld.bash", "flannelctl.bash"] {
        let check = Command::new("bash")
            .arg("-n")
            .arg(dir.path().join("completions").join(file))
            .output()
            .unwrap();
        assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stderr));
    }
}

#[test]
fn all_texts_pass_the_checks() {
    let check = Command::new(env!("CARGO_BIN_EXE_xtask")).arg("check").output();
    let output = check.unwrap_or_else(|error| panic!("xtask: {error}"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
