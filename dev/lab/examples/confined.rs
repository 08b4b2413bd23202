//! Runs a program with the system calls and the kinds of sockets that the systemd unit of flanneld
//! allows: `confined PROGRAM ARGS…`.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use seccompiler::{BpfMap, TargetArch, apply_filter, compile_from_json};
use serde_json::{Value, json};
use test_support::unit;

const EPERM: u32 = 1;
const EAFNOSUPPORT: u32 = 97;

fn main() {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let (program, args) = args.split_first().expect("expected a program to run");
    let other: Vec<Value> = unit::socket_families()
        .map(|number| json!({ "index": 0, "type": "dword", "op": "ne", "val": number }))
        .collect();
    let socket = json!({ "syscall": "socket", "args": other });
    let forbids = json!({ "errno": EAFNOSUPPORT });
    apply(&compile(&json!("allow"), &forbids, &[socket]).expect("a filter of sockets"));

    let eperm = json!({ "errno": EPERM });
    let allow = json!("allow");
    let rules = unit::allowed_calls().into_iter().map(|name| json!({ "syscall": name }));
    // The groups also have the calls of other architectures.
    let rules: Vec<Value> = rules
        .filter(|rule| compile(&eperm, &allow, std::slice::from_ref(rule)).is_some())
        .collect();
    apply(&compile(&eperm, &allow, &rules).expect("a filter of known calls"));
    panic!("{}", Command::new(program).args(args).exec());
}

fn apply(filter: &BpfMap) {
    apply_filter(&filter["main"]).expect("Linux takes the filter");
}

fn compile(mismatch: &Value, matches: &Value, rules: &[Value]) -> Option<BpfMap> {
    let filter = json!({ "main": {
        "mismatch_action": mismatch, "match_action": matches, "filter": rules,
    } });
    let arch = TargetArch::try_from(std::env::consts::ARCH).expect("a known architecture");
    compile_from_json(filter.to_string().as_bytes(), arch).ok()
}
