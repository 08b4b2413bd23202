//! `lab`: a cluster on one machine, in one command.

mod cli;

use std::ffi::{OsStr, OsString};
use std::future::poll_fn;
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::Poll;
use std::time::Duration;

use clap::Parser;
use flannel_backends::{Started, ThisProgram};
use flannel_lab::{Error, Interrupter, Lab, Result, Signal};
use flannelctl::terminal::{self, Terminal};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};

use crate::cli::options::Options;
use crate::cli::outcome::Outcome;

fn main() -> ExitCode {
    let this = match flannel_backends::run_if_started() {
        Started::DataPlane(ended) => return ended,
        Started::Other(program) => program,
    };
    let mut args = std::env::args_os();
    let program = args.next().unwrap_or_else(|| "lab".into());
    let rest: Vec<OsString> = args.collect();
    match rest.first().and_then(|first| first.to_str()) {
        // The lab starts its daemons with this argument.
        Some("daemon") => daemon(program, rest, this),
        // In a host: `lab ctl status`, for example.
        Some("ctl") => {
            let args = std::iter::once(program).chain(rest.into_iter().skip(1));
            flannelctl::run(args, &flannel_backends::all())
        }
        // For tests: `lab enter PROGRAM ARGS…`.
        Some("enter") => match rest.split_at_checked(2) {
            Some((words, args)) => failed(&flannel_lab::enter_and_exec(&words[1], args)),
            None => failed(&"enter: expected a program to run"),
        },
        // For tests: `lab udp-process VERSION SOCKET`, a data plane that has another version.
        Some("udp-process") => match &rest[1..] {
            [version, socket] => udp_process(version, socket),
            _ => failed(&"udp-process: expected a version and a socket"),
        },
        _ => match Options::try_parse() {
            Ok(options) => run(&options),
            Err(usage) if usage.use_stderr() && rest.iter().any(|arg| arg == "--json") => {
                let error = usage.to_string();
                let error = error.trim().trim_start_matches("error: ");
                print(&format!("{}\n", serde_json::json!({ "ok": false, "error": error })));
                ExitCode::from(2)
            }
            Err(usage) => usage.exit(),
        },
    }
}

/// Runs flanneld.
fn daemon(program: OsString, mut args: Vec<OsString>, this: ThisProgram) -> ExitCode {
    if let Err(error) = flannel_lab::end_with_lab() {
        return failed(&error);
    }
    args[0] = program;
    flanneld::main_with(args, flannel_backends::all_in(this))
}

fn run(options: &Options) -> ExitCode {
    let signals = Signals::default();
    let outcome = lab(options, &signals);
    if let Err(error) = &outcome {
        if options.json {
            print(&format!("{}\n", Outcome::failed(options, error)));
        }
        print_error(&format!("lab: {error}"));
    }
    match outcome {
        _ if signals.received() != 0 => ExitCode::from(128 + signals.received()),
        Ok(true) => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

/// Makes the lab, waits, and reports. Returns whether every pod reached every other.
fn lab(options: &Options, signals: &Signals) -> Result<bool> {
    // Before any thread starts.
    flannel_lab::enter()?;
    signals.watch()?;
    raise_file_limit();
    print_progress(options, &format!("making {} hosts and a switch", options.hosts));
    let mut lab = Lab::builder()
        .hosts(options.hosts)
        .backend(options.backend.clone())
        .families(options.family.families().iter().copied())
        .interrupter(signals.interrupter.clone())
        .start()?;
    let outcome = report(options, &lab);
    let complete = *outcome.as_ref().unwrap_or(&false);
    if options.hold && outcome.is_ok() {
        hold(&lab);
        signals.interrupter.wait();
    }
    let interrupted = matches!(outcome, Err(Error::Interrupted));
    if options.keep || (!complete && !interrupted && !options.hold) {
        let dir = lab.keep_files();
        print_error(&format!("logs, leases and subnet.env files are kept in {}", dir.display()));
    }
    outcome
}

fn report(options: &Options, lab: &Lab) -> Result<bool> {
    lab.start_daemons()?;
    print_progress(options, "waiting until every pod reaches every other");
    let matrix = lab.wait_until_reachable(options.patience())?;
    let outcome = Outcome::new(options, lab, &matrix)?;
    if options.json {
        print(&format!("{outcome}\n"));
    } else {
        print(&cli::table::render(&outcome, &Terminal::of_stdout()));
    }
    Ok(outcome.ok)
}

/// Prints how to enter hosts and pods.
fn hold(lab: &Lab) {
    let mut text =
        String::from("\nThe lab stays up until interrupted (Ctrl-C). To enter a host or a pod:\n");
    for host in lab.hosts() {
        text += &format!("  {:<8} {} sh\n", host.name(), host.enter_command());
        if let Some(pod) = host.pod() {
            text += &format!("  {:<8} {} sh\n", pod.name(), pod.enter_command());
        }
    }
    print_error(&format!("{text}  files    {}", lab.dir().display()));
}

/// Prints progress. With `--json`, only on a terminal.
fn print_progress(options: &Options, text: &str) {
    if !options.json || io::stderr().is_terminal() {
        print_error(text);
    }
}

fn print_error(text: &str) {
    terminal::print_error(&format!("{text}\n"));
}

fn print(text: &str) {
    // A closed stdout, as with `head`, is not an error.
    let _ = Terminal::of_stdout().print(text);
}

/// A data plane of the backend `udp` with another version, until it is told to end.
fn udp_process(version: &OsStr, socket: &OsStr) -> ExitCode {
    match flannel_udp::serve(socket.as_ref(), &version.to_string_lossy()) {
        Ok(flannel_udp::Ended::Done) => ExitCode::SUCCESS,
        Ok(flannel_udp::Ended::Failed) => ExitCode::FAILURE,
        Err(error) => failed(&error),
    }
}

fn failed(error: &dyn std::fmt::Display) -> ExitCode {
    print_error(&format!("lab: {error}"));
    ExitCode::FAILURE
}

/// Raises the limit of open files: each host needs three, and many shells allow 1,024.
fn raise_file_limit() {
    if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // If this fails, a large lab reports the file that could not be opened.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
    }
}

/// SIGINT, SIGTERM and SIGHUP end the lab with its ordinary cleanup.
#[derive(Default)]
struct Signals {
    interrupter: Interrupter,
    received: Arc<AtomicU8>,
}

impl Signals {
    /// Waits for the first signal on a new thread.
    fn watch(&self) -> Result<()> {
        let failed =
            |source: io::Error| Error::Io { object: "listening for signals".into(), source };
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let guard = runtime.enter();
        let kinds = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];
        let streams = kinds.map(|kind| Ok((kind, signal(SignalKind::from_raw(kind as i32))?)));
        let mut streams = streams.into_iter().collect::<io::Result<Vec<_>>>().map_err(failed)?;
        drop(guard);
        let interrupter = self.interrupter.clone();
        let received = self.received.clone();
        std::thread::spawn(move || {
            let first = poll_fn(|context| {
                let ready =
                    streams.iter_mut().find_map(|(kind, stream)| match stream.poll_recv(context) {
                        Poll::Ready(_) => Some(*kind),
                        Poll::Pending => None,
                    });
                ready.map_or(Poll::Pending, Poll::Ready)
            });
            received.store(runtime.block_on(first) as u8, Ordering::SeqCst);
            interrupter.interrupt();
            // Later signals are ignored, because the lab is ending.
        });
        Ok(())
    }

    /// The number of the first signal, 0 if there was none.
    fn received(&self) -> u8 {
        self.received.load(Ordering::SeqCst)
    }
}

impl Options {
    /// The type of the backend.
    fn backend_type(&self) -> String {
        self.backend["Type"].as_str().unwrap_or_default().to_owned()
    }

    /// The time for every pod to reach every other.
    fn patience(&self) -> Duration {
        let pairs = self.hosts * self.hosts * self.family.families().len();
        Duration::from_millis(
            self.timeout.map_or(30_000 + 2 * pairs as u64, |seconds| seconds.saturating_mul(1000)),
        )
    }
}
