//! Runs a program with the system calls and the kinds of sockets that the systemd unit of flanneld
//! allows: `confined PROGRAM ARGS…`.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use seccompiler::{BpfMap, TargetArch, apply_filter, compile_from_json};
use serde_json::{Value, json};

/// `AF_UNIX`, `AF_INET`, `AF_INET6` and `AF_NETLINK`.
const FAMILIES: [u32; 4] = [1, 2, 10, 16];
const EPERM: u32 = 1;

fn main() {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let (program, args) = args.split_first().expect("expected a program to run");
    let of_name = |name: &String| json!({ "syscall": name });
    let calls = test_support::unit::allowed_calls();
    let calls = calls.iter().filter(|name| *name != "socket").map(of_name);
    // The groups also have the calls of other architectures.
    let mut rules: Vec<Value> =
        calls.filter(|rule| compile(vec![rule.clone()]).is_some()).collect();
    rules.extend(FAMILIES.map(|family| {
        let is_family = json!({ "index": 0, "type": "dword", "op": "eq", "val": family });
        json!({ "syscall": "socket", "args": [is_family] })
    }));
    let filters = compile(rules).expect("a filter of known calls");
    apply_filter(&filters["main"]).expect("Linux takes the filter");
    panic!("{}", Command::new(program).args(args).exec());
}

fn compile(rules: Vec<Value>) -> Option<BpfMap> {
    let filter = json!({ "main": {
        "mismatch_action": { "errno": EPERM },
        "match_action": "allow",
        "filter": rules,
    } });
    let arch = TargetArch::try_from(std::env::consts::ARCH).expect("a known architecture");
    compile_from_json(filter.to_string().as_bytes(), arch).ok()
}
