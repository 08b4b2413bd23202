//! A command of the config: its words, and one run of it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{self, Child, ExitStatus};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// The last bytes of an output that are kept.
const OUTPUT: usize = 4096;
/// The longest pause before a look whether the command has ended.
const LOOK: u16 = 20;
/// Variables of the daemon with this prefix may be secrets, and are not passed on.
const OF_DAEMON: &str = "FLANNELD_";

/// The words of a command, in which variables are not replaced yet. No shell reads them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Words(Vec<String>);

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

/// Why a command failed, with the end of its output.
#[derive(Debug)]
pub(crate) struct Failure(pub(crate) String);

impl Words {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The first word, unless a variable has to be replaced in it.
    pub(crate) fn program(&self) -> Option<&str> {
        self.0.first().map(String::as_str).filter(|word| !word.contains('$'))
    }

    /// Runs the command, with `input` and a line feed as its standard input. Returns its trimmed
    /// output. If it does not end in time, it is killed with all processes of its group.
    ///
    /// # Blocking
    /// At most `timeout`.
    pub(crate) fn run(
        &self,
        variables: &BTreeMap<String, String>,
        input: &str,
        timeout: Duration,
    ) -> Result<String, Failure> {
        let value = |name: &str| match variables.get(name) {
            Some(value) => value.clone(),
            None if name.starts_with(OF_DAEMON) => String::new(),
            None => std::env::var(name).unwrap_or_default(),
        };
        let words: Vec<String> = self.0.iter().map(|word| expand(word, value)).collect();
        let Some((program, args)) = words.split_first().filter(|(first, _)| !first.is_empty())
        else {
            return Err(Failure("its first word is empty".to_owned()));
        };
        let mut command = process::Command::new(program);
        command.args(args).envs(variables).process_group(0);
        for (name, _) in std::env::vars_os() {
            if name.as_encoded_bytes().starts_with(OF_DAEMON.as_bytes()) {
                command.env_remove(name);
            }
        }
        let start = || -> io::Result<(Child, io::PipeReader)> {
            let (reader, writer) = io::pipe()?;
            fcntl(&reader, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
            command.stdout(writer.try_clone()?).stderr(writer).stdin(file_of(input)?);
            Ok((command.spawn()?, reader))
        };
        let (mut child, mut reader) =
            { start }().map_err(|error| Failure(format!("{program}: {error}")))?;
        // The command has the ends to write; this process would never see the end of the output.
        drop(command);
        let mut output = Vec::new();
        let ended = wait(&mut child, &mut reader, &mut output, timeout);
        let text = String::from_utf8_lossy(&output).trim().to_owned();
        let failed =
            |why: String| Failure(if text.is_empty() { why } else { format!("{why}: {text}") });
        match ended {
            Ok(Some(status)) if status.success() => Ok(text),
            Ok(Some(status)) => Err(failed(status.to_string())),
            Ok(None) => Err(failed(format!("it did not end within {} s", timeout.as_secs()))),
            Err(error) => Err(failed(error.to_string())),
        }
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

/// Waits for the end, and keeps the end of the output. `None`: the command was killed. A process
/// that the command leaves behind may hold the output open, so only the command's own end counts.
fn wait(
    child: &mut Child,
    reader: &mut io::PipeReader,
    output: &mut Vec<u8>,
    timeout: Duration,
) -> io::Result<Option<ExitStatus>> {
    let begin = Instant::now();
    let mut is_open = true;
    loop {
        let ended = child.try_wait()?;
        while is_open {
            let mut part = [0; OUTPUT];
            match reader.read(&mut part) {
                Ok(0) => is_open = false,
                Ok(length) => {
                    output.extend_from_slice(&part[..length]);
                    output.drain(..output.len().saturating_sub(OUTPUT));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        if ended.is_some() {
            return Ok(ended);
        }
        if begin.elapsed() >= timeout {
            // A process id of Linux fits. It is not reused before `wait`.
            let _ = killpg(Pid::from_raw(child.id() as i32), Signal::SIGKILL);
            child.wait()?;
            return Ok(None);
        }
        let mut ready = [PollFd::new(reader.as_fd(), PollFlags::POLLIN)];
        let ready = if is_open { &mut ready[..] } else { &mut [] };
        match poll(ready, PollTimeout::from(LOOK)) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Replaces `$NAME` and `${NAME}`.
///
/// **Source**: Go `os.Expand`: an unknown name is empty, `$` before another character stays, `${}`
/// and an open `${` vanish, and `$$`, `$1`, `$-` and the like are names of one character.
fn expand(word: &str, value: impl Fn(&str) -> String) -> String {
    let (mut expanded, mut rest) = (String::new(), word);
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
/// if the text is no name but vanishes, and `None` if `$` stands for itself.
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
            let of_name = |c: &u8| c.is_ascii_alphanumeric() || *c == b'_';
            let length = bytes.iter().take_while(|c| of_name(c)).count();
            ((length > 0).then(|| &text[..length]), length)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(json: &str) -> Words {
        serde_json::from_str(json).unwrap()
    }

    fn run(json: &str, input: &str) -> Result<String, String> {
        let variables =
            [("SUBNET", "10.1.7.0/24")].map(|(name, value)| (name.into(), value.into()));
        let timeout = Duration::from_secs(60);
        words(json).run(&variables.into(), input, timeout).map_err(|failure| failure.0)
    }

    /// A command that runs a script. In an argument, `$!` would be replaced.
    fn script_in(dir: &std::path::Path, script: &str) -> Words {
        let file = dir.join("script");
        std::fs::write(&file, script).unwrap();
        Words(vec!["sh".into(), file.to_str().unwrap().into()])
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
        assert!(words("\" \"").is_empty());
        assert_eq!(words("\"$A x\"").program(), None);
    }

    #[test]
    fn no_shell_reads_the_words_and_the_input() {
        let printf = r#"["printf","[%s]","$SUBNET","; id","'","","$(id)"]"#;
        // `$(` is no name.
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
        assert!(error.len() < OUTPUT + 100);
        let error = run("\"no-such-program x\"", "").unwrap_err();
        assert!(error.starts_with("no-such-program: No such file"), "{error}");
        assert_eq!(run("\"$NOTHING x\"", "").unwrap_err(), "its first word is empty");
    }

    #[test]
    fn a_command_that_takes_too_long_is_killed_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let script = format!("sleep 1000 & echo $! >{}; echo began; wait", file.display());
        let command = script_in(dir.path(), &script);
        let timeout = Duration::from_secs(1);
        let error = command.run(&BTreeMap::new(), "", timeout).unwrap_err().0;
        assert_eq!(error, "it did not end within 1 s: began");
        let pid = std::fs::read_to_string(&file).unwrap();
        let state = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
            stat.ok().map(|stat| stat.rsplit_once(") ").unwrap().1[..1].to_owned())
        };
        let is_gone = || state().is_none_or(|state| state == "Z");
        test_support::eventually(Duration::from_secs(20), is_gone, || format!("{:?}", state()));
    }

    #[test]
    fn a_process_that_is_left_behind_does_not_delay_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let command = script_in(dir.path(), "sleep 1000 & echo $!");
        // After the timeout there would be an error.
        let pid = command.run(&BTreeMap::new(), "", Duration::from_secs(60)).unwrap();
        nix::sys::signal::kill(Pid::from_raw(pid.parse().unwrap()), Signal::SIGKILL).unwrap();
    }
}
