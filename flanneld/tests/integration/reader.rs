//! A program whose output a test reads line by line. It is killed with its reader, even if the test
//! fails, because a process that is left would keep the test's output open.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Dropping it kills the process.
pub(crate) struct Reader {
    child: Child,
    lines: Receiver<String>,
}

impl Reader {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            while output.read_line(&mut line).unwrap() > 0 {
                if sender.send(std::mem::take(&mut line)).is_err() {
                    return;
                }
            }
        });
        Self { child, lines }
    }

    /// Waits for the next line.
    pub(crate) fn line(&mut self) -> String {
        let line = self.lines.recv_timeout(Duration::from_secs(20));
        let line = line.unwrap_or_else(|error| panic!("no line came: {error}"));
        assert!(line.ends_with('\n'), "it has ended: {line:?}");
        line
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}
