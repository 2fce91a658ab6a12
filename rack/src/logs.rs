//! The output of a rack's daemons, for `bluebridge rack logs`.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;

use crate::RackError;
use crate::state::RackState;

/// How much of an incomplete line is kept until its end is written.
const LINE_BYTES_MAX: usize = 64 << 10;

/// Reads logs line by line, as they grow.
#[derive(Debug)]
pub struct Logs {
    files: Vec<Log>,
    /// Whether lines start with the name of their daemon.
    named: bool,
}

#[derive(Debug)]
struct Log {
    daemon: String,
    path: PathBuf,
    file: Option<File>,
    /// The beginning of an incomplete line.
    begun: Vec<u8>,
}

impl Logs {
    /// The log of one daemon of the rack, or of all.
    ///
    /// # Errors
    /// [`RackError::NoDaemon`].
    pub fn of(state: &RackState, daemon: Option<&str>) -> Result<Self, RackError> {
        let wanted = state.daemons.iter().filter(|it| daemon.is_none_or(|name| it.name == name));
        let files: Vec<Log> = wanted
            .map(|it| Log {
                daemon: it.name.clone(),
                path: it.log.clone(),
                file: None,
                begun: Vec::new(),
            })
            .collect();
        match daemon {
            Some(name) if files.is_empty() => Err(RackError::NoDaemon(name.to_owned())),
            _ => Ok(Self { files, named: daemon.is_none() }),
        }
    }

    /// Writes the lines that were added since the last call; returns whether there were any.
    ///
    /// # Errors
    /// A log cannot be read, or `output` written.
    pub fn copy_new(&mut self, output: &mut impl Write) -> io::Result<bool> {
        let mut any = false;
        for log in &mut self.files {
            let prefix = if self.named { format!("{}: ", log.daemon) } else { String::new() };
            any |= log.copy_new(&prefix, output)?;
        }
        output.flush()?;
        Ok(any)
    }

    /// Writes the beginnings of incomplete lines.
    ///
    /// # Errors
    /// `output` cannot be written.
    pub fn copy_rest(&mut self, output: &mut impl Write) -> io::Result<()> {
        for log in &mut self.files {
            let prefix = if self.named { format!("{}: ", log.daemon) } else { String::new() };
            if !log.begun.is_empty() {
                log.begun.push(b'\n');
                write_line(&prefix, &log.begun, output)?;
                log.begun.clear();
            }
        }
        output.flush()
    }
}

impl Log {
    fn copy_new(&mut self, prefix: &str, output: &mut impl Write) -> io::Result<bool> {
        let file = match &mut self.file {
            Some(file) => file,
            none => match File::open(&self.path) {
                Ok(file) => none.insert(file),
                // A daemon that was never started has none.
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
                Err(error) => return Err(error),
            },
        };
        // The file was truncated by another program.
        if file.stream_position()? > file.metadata()?.len() {
            file.seek(SeekFrom::Start(0))?;
        }
        let mut chunk = [0; 8192];
        let mut any = false;
        loop {
            let length = file.read(&mut chunk)?;
            let Some(mut rest) = chunk.get(..length).filter(|it| !it.is_empty()) else {
                return Ok(any);
            };
            any = true;
            while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let (line, after) = rest.split_at(end + 1);
                self.begun.extend_from_slice(line);
                write_line(prefix, &self.begun, output)?;
                self.begun.clear();
                rest = after;
            }
            self.begun.extend_from_slice(rest);
            if self.begun.len() > LINE_BYTES_MAX {
                self.begun.push(b'\n');
                write_line(prefix, &self.begun, output)?;
                self.begun.clear();
            }
        }
    }
}

fn write_line(prefix: &str, line: &[u8], output: &mut impl Write) -> io::Result<()> {
    output.write_all(prefix.as_bytes())?;
    output.write_all(line)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use bluebridge_testkit::Scratch;

    use super::*;
    use crate::spec::{ByteSize, DataPlane, LinkMtus, Node, RackSpec, Redirects};
    use crate::state::DaemonRecord;

    fn state(scratch: &Scratch, names: &[&str]) -> RackState {
        let spec = RackSpec {
            name: "one".parse().expect("a name"),
            servers: 1,
            clients: 1,
            mtu: LinkMtus::default(),
            switch: DataPlane::Soft,
            memory: ByteSize(1 << 20),
            redirects: Redirects::default(),
            direct_reads: true,
        };
        let daemons = names.iter().map(|name| DaemonRecord {
            name: (*name).to_owned(),
            node: Node::Switch,
            arguments: Vec::new(),
            log: scratch.path().join(name),
            process: None,
            ready: false,
            kept_memory: None,
            arena_ids: Vec::new(),
        });
        RackState { daemons: daemons.collect(), ..RackState::new(spec) }
    }

    #[test]
    fn lines_are_copied_whole_and_once_as_logs_grow() {
        let scratch = Scratch::new("logs");
        let state = state(&scratch, &["a", "b"]);
        let write = |name: &str, text: &str| {
            let mut file =
                File::options().create(true).append(true).open(scratch.path().join(name));
            file.as_mut().expect("opened").write_all(text.as_bytes()).expect("written");
        };
        let mut logs = Logs::of(&state, None).expect("daemons");
        let copy = |logs: &mut Logs| {
            let mut output = Vec::new();
            logs.copy_new(&mut output).expect("copied");
            String::from_utf8(output).expect("text")
        };
        assert_eq!(copy(&mut logs), "");
        write("a", "one\ntw");
        write("b", "three\n");
        assert_eq!(copy(&mut logs), "a: one\nb: three\n");
        write("a", "o\n");
        assert_eq!(copy(&mut logs), "a: two\n");
        fs::write(scratch.path().join("b"), "4\n").expect("written");
        assert_eq!(copy(&mut logs), "b: 4\n", "a truncated log is read from its beginning");
        write("a", "end");
        assert_eq!(copy(&mut logs), "");
        let mut output = Vec::new();
        logs.copy_rest(&mut output).expect("copied");
        assert_eq!(output, b"a: end\n");

        let mut one = Logs::of(&state, Some("b")).expect("a daemon");
        assert_eq!(copy(&mut one), "4\n");
        assert!(matches!(Logs::of(&state, Some("c")), Err(RackError::NoDaemon(_))));
    }
}
