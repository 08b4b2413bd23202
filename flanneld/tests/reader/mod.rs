//! A program that goes on printing, and goes with the test that reads it, also where that fails: what is left behind would hold
//! the test's own output open, and whoever waits for its end would wait for ever.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};

/// It is killed with the value.
pub(crate) struct Reader {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Reader {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    /// Waits for the next line.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert!(line.ends_with('\n'), "it has ended: {line:?}");
        line
    }

    /// Ends it and returns what it has printed since.
    pub(crate) fn rest(mut self) -> String {
        self.child.kill().unwrap();
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).unwrap();
        rest
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}
