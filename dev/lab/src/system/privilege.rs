//! The privilege to make namespaces, and reports of missing requirements.

use std::fs;
use std::process::Command;

use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{getegid, geteuid};

use crate::error::{Error, Result};
use crate::system::namespace::Namespace;

/// The privilege with which this process makes network namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Privilege {
    /// It has `CAP_SYS_ADMIN`.
    Root,
    /// It is root of its own user namespace, and an ordinary user outside.
    User,
}

/// Moves this process to an empty network namespace. Without the privilege to make one, the process
/// becomes root of a new user namespace first.
///
/// Call it first in `main`: the kernel refuses a user namespace to a process with more threads.
///
/// # Errors
/// [`Error::Missing`]: this machine forbids user namespaces. The error names the setting.
pub fn enter() -> Result<Privilege> {
    match unshare(CloneFlags::CLONE_NEWNET) {
        Ok(()) => return Ok(Privilege::Root),
        Err(Errno::EPERM) => {}
        Err(errno) => {
            return Err(forbidden(&format!("the kernel refused a network namespace ({errno})")));
        }
    }
    let user = geteuid();
    let group = getegid();
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET).map_err(why_no_user_namespace)?;
    let write = |file: &str, text: String| {
        let path = format!("/proc/self/{file}");
        fs::write(&path, &text)
            .map_err(|e| forbidden(&format!("writing {text:?} to {path} failed ({e})")))
    };
    write("setgroups", "deny".into())?;
    write("uid_map", format!("0 {user} 1"))?;
    write("gid_map", format!("0 {group} 1"))?;
    Ok(Privilege::User)
}

/// Checks the requirements of a lab: iproute2, IPv6 if wanted, links of kind bridge and veth.
///
/// # Errors
/// [`Error::Missing`]: the first missing requirement, and the remedy.
pub(crate) fn preflight(ipv6: bool) -> Result<()> {
    if ipv6 && !has_ipv6() {
        return Err(Error::Missing {
            what: "The kernel has no IPv6 (there is no /proc/sys/net/ipv6).".into(),
            remedy: "Boot without ipv6.disable=1, or use --family ipv4.".into(),
        });
    }
    let scratch = Namespace::new("a trial namespace")?;
    for kind in ["bridge", "veth"] {
        scratch.ip(&format!("link add trial-{kind} type {kind}\n")).map_err(|e| match e {
            Error::Command { output, .. } => Error::Missing {
                what: format!("The kernel makes no link of type {kind}: {output}"),
                remedy: format!(
                    "As root: modprobe {kind} (a minimal cloud kernel may need its package of \
                     extra modules)."
                ),
            },
            other => other,
        })?;
    }
    Ok(())
}

/// Checks that the machine allows `daemons` inotify instances, one for each daemon.
///
/// # Errors
/// [`Error::Missing`]: the machine's limit, and the remedy.
pub(crate) fn check_inotify_limit(daemons: usize) -> Result<()> {
    const INSTANCES: &str = "/proc/sys/fs/inotify/max_user_instances";
    let instances =
        fs::read_to_string(INSTANCES).ok().and_then(|text| text.trim().parse::<usize>().ok());
    let Some(instances) = instances.filter(|instances| *instances <= daemons) else {
        return Ok(());
    };
    let wanted = (daemons + 100).next_power_of_two();
    Err(Error::Missing {
        what: format!(
            "{daemons} daemons need an inotify instance each, but {INSTANCES} allows a user \
             {instances}."
        ),
        remedy: format!("As root: sysctl fs.inotify.max_user_instances={wanted}"),
    })
}

/// Whether the kernel has IPv6.
pub(crate) fn has_ipv6() -> bool {
    fs::exists("/proc/sys/net/ipv6").unwrap_or(false)
}

fn why_no_user_namespace(errno: Errno) -> Error {
    if errno == Errno::EINVAL {
        return Error::Unsuitable(
            "the kernel makes a user namespace only for a process with one thread: call enter() \
             first in main"
                .into(),
        );
    }
    forbidden(&format!("the kernel refused a user namespace ({errno})"))
}

/// The error if namespaces are forbidden. It names the settings that forbid them.
fn forbidden(symptom: &str) -> Error {
    let sysctl = |key: &str| {
        let path = format!("/proc/sys/{}", key.replace('.', "/"));
        fs::read_to_string(path).ok().map(|value| value.trim().to_owned())
    };
    let switches = [
        ("kernel.unprivileged_userns_clone", "0", "1"),
        ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
        ("user.max_user_namespaces", "0", "10000"),
        ("user.max_net_namespaces", "0", "10000"),
    ];
    let off: Vec<_> =
        switches.iter().filter(|(key, off, _)| sysctl(key).as_deref() == Some(off)).collect();
    let what =
        |why: &str| format!("This user may not make network namespaces here{why}: {symptom}.");
    if off.is_empty() {
        return Error::Missing {
            what: what(""),
            remedy:
                "Run as root; in a container, allow it CAP_SYS_ADMIN and `unshare` in its seccomp \
                 profile."
                    .into(),
        };
    }
    let names: Vec<String> = off.iter().map(|(key, value, _)| format!("{key} = {value}")).collect();
    let settings: Vec<String> = off.iter().map(|(key, _, on)| format!("{key}={on}")).collect();
    Error::Missing {
        what: what(&format!(" ({})", names.join(", "))),
        remedy: format!("Once as root: sysctl -w {}", settings.join(" ")),
    }
}

/// The prefix of a command that runs it in `namespace`, from a shell of the same user.
pub(crate) fn nsenter(namespace: &Namespace, process: Option<u32>) -> String {
    let rootless = fs::read_to_string("/proc/self/uid_map")
        .is_ok_and(|map| map.split_whitespace().nth(1).is_some_and(|outside| outside != "0"));
    let user = if rootless { " -U --preserve-credentials" } else { "" };
    match process {
        Some(pid) => format!("nsenter -t {pid}{user} -n"),
        None if rootless => {
            format!("nsenter -t {}{user} --net={}", std::process::id(), namespace.path().display())
        }
        None => format!("nsenter --net={}", namespace.path().display()),
    }
}

/// Calls [`enter`] and replaces this process by `program`. Returns only the error if that fails.
pub fn enter_and_exec(program: &std::ffi::OsStr, args: &[std::ffi::OsString]) -> Error {
    use std::os::unix::process::CommandExt;
    match enter() {
        Ok(_) => {
            let error = Command::new(program).args(args).exec();
            Error::Io { object: format!("starting {}", program.display()), source: error }
        }
        Err(error) => error,
    }
}
