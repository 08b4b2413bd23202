//! A command: its words, and one run of it.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// The bytes of an output that are read at once.
const PART: usize = 4096;
/// The longest pause before a look whether the command has ended.
const LOOK: u16 = 20;
/// The time for a process to end that was killed.
const REAP: Duration = Duration::from_secs(5);
/// Variables of this program with this prefix may be secrets, and are not passed on.
const OF_DAEMON: &str = "FLANNELD_";
/// The variables of this program that a command gets besides those that every process gets.
const INHERITED: [&str; 6] = ["HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "TZ"];

/// The words of a command, in which variables are not replaced yet. No shell reads them.
///
/// In JSON it is a string, which is split at white space, or an array with one string for each
/// word. In each word `$NAME` and `${NAME}` are replaced as by Go's `os.Expand`. `Debug` shows only
/// the number of words, because they may be secrets.
#[derive(Clone, PartialEq, Eq, Serialize)]
pub struct Words(Vec<String>);

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Words({})", self.0.len())
    }
}

/// Takes the words as they are, without splitting them.
impl<S: Into<String>> FromIterator<S> for Words {
    fn from_iter<I: IntoIterator<Item = S>>(words: I) -> Self {
        Self(words.into_iter().map(Into::into).collect())
    }
}

impl<'de> Deserialize<'de> for Words {
    /// A string is split at white space. An array has one word in each element.
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Line(String),
            Words(Vec<String>),
        }
        Ok(Self(match Form::deserialize(deserializer)? {
            Form::Line(line) => line.split_whitespace().map(str::to_owned).collect(),
            Form::Words(words) => words,
        }))
    }
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The command is empty.
    #[error("its first word is empty")]
    NoProgram,
    /// The program cannot be started.
    #[error("{program}: {source}")]
    Start {
        /// The program, as the first word names it.
        program: String,
        /// The error of the host.
        source: io::Error,
    },
    /// The command failed, or was ended.
    #[error("{why}{}{output}", if .output.is_empty() { "" } else { ": " })]
    Failed {
        /// The exit status, or why the command was ended.
        why: String,
        /// The end of its output, which may have any characters.
        output: String,
    },
}

/// The limits of a run.
#[derive(Debug, Clone, Copy)]
pub struct Limits<'a> {
    /// The time limit.
    pub time: Duration,
    /// How many bytes of the output are kept. These are its last bytes.
    pub output: usize,
    /// The command is killed within 20 ms after this has become true.
    pub stopped: &'a AtomicBool,
}

/// The end of an output.
#[derive(Debug, Default)]
pub struct Output {
    /// The last bytes of the output.
    pub bytes: Vec<u8>,
    /// Whether the output was longer.
    pub is_cut: bool,
}

impl Output {
    fn add(&mut self, part: &[u8], most: usize) {
        self.bytes.extend_from_slice(part);
        let more = self.bytes.len().saturating_sub(most);
        self.bytes.drain(..more);
        self.is_cut |= more > 0;
    }

    /// The bytes as text, without white space around it.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).trim().to_owned()
    }
}

impl Words {
    /// Whether the command has no word, so that nothing can run.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The first word, unless a variable has to be replaced in it.
    fn program(&self) -> Option<&str> {
        self.0.first().map(String::as_str).filter(|word| !word.contains('$'))
    }

    /// The program of the command, if this host has no such file that may be executed. It is not
    /// known if a variable names the program.
    pub fn missing_program(&self) -> Option<&str> {
        let program = self.program()?;
        let is_there = if program.contains('/') {
            may_run(Path::new(program))
        } else {
            let path = std::env::var_os("PATH").unwrap_or_default();
            std::env::split_paths(&path).any(|dir| may_run(&dir.join(program)))
        };
        (!is_there).then_some(program)
    }

    /// Runs the command, with `input` and a line feed as its standard input. Returns the end of its
    /// output. If it does not end in time, it is killed with all processes of its group.
    /// Its environment has `variables`, and of this program's own `PATH`, `LD_LIBRARY_PATH`,
    /// `HOME`, `USER`, `LANG`, `LC_ALL`, `TMPDIR` and `TZ`.
    ///
    /// # Errors
    /// It cannot be started, failed, did not end in time, or was stopped.
    ///
    /// # Blocking
    /// At most the time limit, and five seconds for the end of a process that was killed.
    pub fn run(
        &self,
        variables: &BTreeMap<String, String>,
        input: &str,
        limits: Limits<'_>,
    ) -> Result<Output, Error> {
        let value = |name: &str| match variables.get(name) {
            Some(value) => value.clone(),
            None if name.starts_with(OF_DAEMON) => String::new(),
            None => std::env::var(name).unwrap_or_default(),
        };
        let words: Vec<String> = self.0.iter().map(|word| expand(word, value)).collect();
        let Some((program, args)) = words.split_first().filter(|(first, _)| !first.is_empty())
        else {
            return Err(Error::NoProgram);
        };
        let mut command = flannel_core::process::command(program, &INHERITED);
        command.args(args).envs(variables).process_group(0);
        let (mut child, mut reader) = start(command, input)
            .map_err(|source| Error::Start { program: program.clone(), source })?;
        let mut output = Output::default();
        let ended = wait(&mut child, &mut reader, &mut output, limits);
        let failed = |why: String| Error::Failed { why, output: output.text() };
        match ended {
            Ok(status) if status.success() => Ok(output),
            Ok(status) => Err(failed(status.to_string())),
            Err(why) => {
                kill(&mut child);
                Err(failed(why))
            }
        }
    }
}

fn may_run(path: &Path) -> bool {
    let file = path.metadata();
    file.is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

/// Starts a command with this input. Returns the end of the pipe that reads its output. The command
/// is dropped, because it has the other end, and would keep the output open.
fn start(mut command: Command, input: &str) -> io::Result<(Child, io::PipeReader)> {
    let (reader, writer) = io::pipe()?;
    fcntl(&reader, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    command.stdout(writer.try_clone()?).stderr(writer).stdin(file_of(input)?);
    Ok((command.spawn()?, reader))
}

/// Kills a command with its group, and waits for its end.
fn kill(child: &mut Child) {
    // A process id of Linux fits. It is not reused before the child is waited for.
    if killpg(Pid::from_raw(child.id() as i32), Signal::SIGKILL).is_err() {
        let _ = child.kill();
    }
    let begin = Instant::now();
    while matches!(child.try_wait(), Ok(None)) && begin.elapsed() < REAP {
        std::thread::park_timeout(Duration::from_millis(LOOK.into()));
    }
}

/// A file in memory with `input` and a line feed. Unlike a pipe, it takes any number of bytes, even
/// if nobody reads them.
fn file_of(input: &str) -> io::Result<File> {
    let mut file = File::from(memfd_create("input", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(input.as_bytes())?;
    file.write_all(b"\n")?;
    file.rewind()?;
    Ok(file)
}

/// Waits for the end, and keeps the end of the output. A process that the command leaves behind may
/// hold the output open, so only the command's own end counts.
///
/// # Errors
/// The command did not end in time, was stopped, or cannot be waited for.
fn wait(
    child: &mut Child,
    reader: &mut io::PipeReader,
    output: &mut Output,
    limits: Limits<'_>,
) -> Result<ExitStatus, String> {
    let begin = Instant::now();
    let mut is_open = true;
    loop {
        let ended = child.try_wait().map_err(|error| error.to_string())?;
        // This reads all that a command wrote before its end, but not for ever if it writes all
        // the time.
        let mut parts = 0;
        while is_open && parts < 64 {
            let mut part = [0; PART];
            match reader.read(&mut part) {
                Ok(0) => is_open = false,
                Ok(length) => {
                    output.add(&part[..length], limits.output);
                    parts += 1;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.to_string()),
            }
        }
        if let Some(status) = ended {
            return Ok(status);
        }
        if limits.stopped.load(Ordering::Relaxed) {
            return Err("it was ended, because the keeper stops".to_owned());
        }
        if begin.elapsed() >= limits.time {
            return Err(format!("it did not end within {} s", limits.time.as_secs()));
        }
        let mut fds = [PollFd::new(reader.as_fd(), PollFlags::POLLIN)];
        let polled = if is_open { &mut fds[..] } else { &mut [] };
        match poll(polled, PollTimeout::from(LOOK)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.to_string()),
        }
    }
}

/// Replaces `$NAME` and `${NAME}`.
///
/// **Source**: Go `os.Expand`: an unknown name is empty, `$` before another character stays, `${}`
/// and an open `${` vanish, and `$$`, `$1`, `$-` and the like are names of one character.
fn expand(word: &str, value: impl Fn(&str) -> String) -> String {
    let mut expanded = String::new();
    let mut rest = word;
    while let Some((before, after)) = rest.split_once('$') {
        expanded += before;
        let (name, length) = name_in(after);
        match name {
            Some("") => {}
            Some(name) => expanded += &value(name),
            None => expanded.push('$'),
        }
        rest = &after[length..];
    }
    expanded + rest
}

/// The name at the beginning of a text behind `$`, and the length that it takes. The name is empty
/// if the text is not a name but vanishes, and `None` if `$` stands for itself.
fn name_in(text: &str) -> (Option<&str>, usize) {
    let is_special = |c: &u8| b"*#$@!?-0123456789".contains(c);
    let bytes = text.as_bytes();
    match bytes.first() {
        None => (None, 0),
        Some(b'{') => {
            if let (Some(second), Some(b'}')) = (bytes.get(1), bytes.get(2))
                && is_special(second)
            {
                return (Some(&text[1..2]), 3);
            }
            text.find('}').map_or((Some(""), 1), |end| (Some(&text[1..end]), end + 1))
        }
        Some(first) if is_special(first) => (Some(&text[..1]), 1),
        Some(_) => {
            let length =
                bytes.iter().take_while(|c| c.is_ascii_alphanumeric() || **c == b'_').count();
            ((length > 0).then(|| &text[..length]), length)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEPT: usize = 4096;

    fn words(json: &str) -> Words {
        serde_json::from_str(json).unwrap()
    }

    fn limits(seconds: u64) -> Limits<'static> {
        static STOPPED: AtomicBool = AtomicBool::new(false);
        Limits { time: Duration::from_secs(seconds), output: KEPT, stopped: &STOPPED }
    }

    fn run(json: &str, input: &str) -> Result<String, String> {
        let variables =
            [("SUBNET", "10.1.7.0/24")].map(|(name, value)| (name.into(), value.into()));
        let output = words(json).run(&variables.into(), input, limits(60));
        output.map(|output| output.text()).map_err(|error| error.to_string())
    }

    /// A command that runs a script. In an argument, `$!` would be replaced.
    fn script_in(dir: &Path, script: &str) -> Words {
        let file = dir.join("script");
        std::fs::write(&file, script).unwrap();
        ["sh", file.to_str().unwrap()].into_iter().collect()
    }

    #[test]
    fn variables_are_replaced_as_by_go() {
        let value = |name: &str| match name {
            "A" => "one".to_owned(),
            "1" | "$" | "-" | "*" => format!("<{name}>"),
            _ => String::new(),
        };
        for (word, expected) in [
            ("plain", "plain"),
            ("$A", "one"),
            ("x${A}y", "xoney"),
            ("$A$A.", "oneone."),
            ("$A_", ""),
            ("$UNKNOWN-", "-"),
            ("$1A", "<1>A"),
            ("${1}", "<1>"),
            ("$$A", "<$>A"),
            ("${$}", "<$>"),
            ("$-", "<->"),
            ("a$ b", "a$ b"),
            ("$.", "$."),
            ("${}x", "x"),
            ("${A", "A"),
            ("end$", "end$"),
            ("$é", "$é"),
            ("${é}$A", "one"),
        ] {
            assert_eq!(expand(word, value), expected, "{word}");
        }
    }

    #[test]
    fn a_string_is_split_and_an_array_is_not() {
        assert_eq!(
            words("\" ip  route\\tadd \\n$SUBNET \""),
            words(r#"["ip","route","add","$SUBNET"]"#)
        );
        assert_eq!(words(r#"["a b", ""]"#).0, ["a b", ""]);
        assert_eq!(["a b", ""].into_iter().collect::<Words>(), words(r#"["a b", ""]"#));
        assert!(words("\" \"").is_empty());
        assert_eq!(words("\"$A x\"").program(), None);
    }

    #[test]
    fn no_shell_reads_the_words_and_the_input() {
        let printf = r#"["printf","[%s]","$SUBNET","; id","'","","$(id)"]"#;
        // `$(` does not begin a name.
        assert_eq!(run(printf, "").unwrap(), "[10.1.7.0/24][; id]['][][$(id)]");
        let big = "x".repeat(1 << 20);
        assert_eq!(run(r#"["wc","-c"]"#, &big).unwrap(), (big.len() + 1).to_string());
        assert_eq!(run("\"true\"", &big).unwrap(), "", "nobody reads it");
        assert_eq!(run("\"cat\"", "a\n$(id)\u{1b}").unwrap(), "a\n$(id)\u{1b}");
    }

    #[test]
    fn a_failure_has_the_status_and_the_end_of_the_output() {
        let error = run(r#"["sh","-c","seq 9999; echo why >&2; exit 3"]"#, "").unwrap_err();
        assert!(error.starts_with("exit status: 3: ") && error.ends_with("9999\nwhy"), "{error}");
        assert!(error.len() < KEPT + 100);
        let error = run("\"no-such-program x\"", "").unwrap_err();
        assert!(error.starts_with("no-such-program: No such file"), "{error}");
        assert_eq!(run("\"$NOTHING x\"", "").unwrap_err(), "its first word is empty");
    }

    /// The command has begun, and runs a child whose process id is in the file.
    fn endless(dir: &Path) -> (Words, std::path::PathBuf) {
        let file = dir.join("pid");
        let script = format!("sleep 1000 & echo $! >{0}.new; mv {0}.new {0}; wait", file.display());
        (script_in(dir, &script), file)
    }

    fn child_is_gone(file: &Path) {
        let pid = std::fs::read_to_string(file).unwrap();
        let state = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
            stat.ok().map(|stat| stat.rsplit_once(") ").unwrap().1[..1].to_owned())
        };
        let is_gone = || state().is_none_or(|state| state == "Z");
        test_support::eventually(Duration::from_secs(20), is_gone, || format!("{:?}", state()));
    }

    #[test]
    fn a_command_that_takes_too_long_is_killed_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let (command, file) = endless(dir.path());
        let error = command.run(&BTreeMap::new(), "", limits(2)).unwrap_err().to_string();
        assert_eq!(error, "it did not end within 2 s");
        child_is_gone(&file);
        // One that writes all the time, and one whose output is closed.
        for script in ["yes", "exec >&- 2>&-; sleep 1000"] {
            let command = script_in(dir.path(), script);
            let error = command.run(&BTreeMap::new(), "", limits(1)).unwrap_err().to_string();
            assert!(error.starts_with("it did not end within 1 s"), "{error}");
        }
    }

    #[test]
    fn a_command_ends_when_the_record_keeper_stops() {
        let dir = tempfile::tempdir().unwrap();
        let (command, file) = endless(dir.path());
        let stopped = AtomicBool::new(false);
        let limits = Limits { stopped: &stopped, ..limits(600) };
        let error = std::thread::scope(|scope| {
            let running = scope.spawn(|| command.run(&BTreeMap::new(), "", limits));
            test_support::eventually(Duration::from_secs(60), || file.exists(), || "no child");
            stopped.store(true, Ordering::Relaxed);
            running.join().unwrap().unwrap_err().to_string()
        });
        assert_eq!(error, "it was ended, because the keeper stops");
        child_is_gone(&file);
    }

    #[test]
    fn a_process_that_is_left_behind_does_not_delay_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let command = script_in(dir.path(), "sleep 1000 & echo $!");
        // After the timeout there would be an error.
        let output = command.run(&BTreeMap::new(), "", limits(60)).unwrap();
        let pid = Pid::from_raw(output.text().parse().unwrap());
        nix::sys::signal::kill(pid, Signal::SIGKILL).unwrap();
    }
}
