//! The store and its benchmark: programs of redis, as they are.

use std::fs::File;
use std::io::{self, Read};
use std::net::{Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;

use super::resp::Connection;

/// The client's namespace is the experiment's own, so any port is free.
const PORT: u16 = 6379;
const ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V6(Ipv6Addr::LOCALHOST), PORT);
/// How long the store may take to respond.
const READY: Duration = Duration::from_secs(30);
/// How long it may take to end, with its memory in swap.
const ENDING: Duration = Duration::from_secs(60);
/// How long a benchmark may take.
const BENCHMARK: Duration = Duration::from_secs(1800);
const LOOK: Duration = Duration::from_millis(20);

/// A program is missing.
#[derive(Debug, thiserror::Error)]
#[error(
    "{program} was not found in {place}; install Debian's packages redis-server and redis-tools, or name the directory of \
     the programs with --redis"
)]
pub(super) struct ProgramMissing {
    program: &'static str,
    place: String,
}

/// Where the programs are.
#[derive(Clone, Debug)]
pub(super) struct Programs {
    server: PathBuf,
    benchmark: PathBuf,
}

impl Programs {
    pub(super) fn find(directory: Option<&Path>) -> Result<Self, ProgramMissing> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let places: Vec<PathBuf> = match directory {
            Some(directory) => vec![directory.to_owned()],
            None => std::env::split_paths(&path).collect(),
        };
        let place = directory.map_or("PATH".to_owned(), |place| place.display().to_string());
        let find = |program: &'static str| {
            let mut found = places.iter().map(|place| place.join(program));
            let found = found.find(|path| path.is_file());
            // The working directory may be another one for the program.
            let found = found.and_then(|path| std::path::absolute(path).ok());
            found.ok_or_else(|| ProgramMissing { program, place: place.clone() })
        };
        Ok(Self { server: find("redis-server")?, benchmark: find("redis-benchmark")? })
    }

    /// What the server says of its version.
    pub(super) fn version(&self) -> anyhow::Result<String> {
        let mut command = Command::new(&self.server);
        let output = command.arg("--version").stdin(Stdio::null()).output();
        let output = output.with_context(|| format!("cannot run {}", self.server.display()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let version = text.split_whitespace().find_map(|word| word.strip_prefix("v="));
        Ok(version.unwrap_or_default().to_owned())
    }

    /// The command of a store without files of its own.
    pub(super) fn server(&self, under: Option<Command>) -> Command {
        let mut command = match under {
            Some(mut command) => {
                command.arg("--").arg(&self.server);
                command
            }
            None => Command::new(&self.server),
        };
        let port = PORT.to_string();
        let options = ["--bind", "::1", "--port", &port, "--save", "", "--appendonly", "no"];
        command.args(options).args(["--daemonize", "no"]);
        command
    }

    /// Runs the benchmark with one command on random keys.
    pub(super) fn benchmark(
        &self,
        keys: u32,
        operations: u32,
        connections: u16,
        words: &[&str],
    ) -> anyhow::Result<Rate> {
        let mut command = Command::new(&self.benchmark);
        command.args(["-h", "::1", "-p", &PORT.to_string(), "--csv", "-e"]);
        command.args(["-r", &keys.to_string(), "-n", &operations.to_string()]);
        command.args(["-c", &connections.to_string()]).args(words);
        let text = output_within(&mut command, BENCHMARK).context("redis-benchmark failed")?;
        Rate::parse(&text).with_context(|| format!("redis-benchmark printed {text:?}"))
    }
}

/// The standard output of a program, which is killed if it takes too long.
fn output_within(command: &mut Command, deadline: Duration) -> anyhow::Result<String> {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let until = Instant::now() + deadline;
    // Its output is a few lines, which the pipes hold.
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status,
            None if Instant::now() > until => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(anyhow!("it took longer than {} s", deadline.as_secs()));
            }
            None => thread::sleep(LOOK),
        }
    };
    let read = |from: Option<&mut dyn Read>| {
        let mut text = String::new();
        from.map_or(Ok(0), |from| from.read_to_string(&mut text)).map(|_| text)
    };
    let output = read(child.stdout.as_mut().map(|it| it as &mut dyn Read))?;
    let errors = read(child.stderr.as_mut().map(|it| it as &mut dyn Read))?;
    if !status.success() {
        return Err(anyhow!("it ended with {status}: {}", errors.trim()));
    }
    Ok(output)
}

/// What a benchmark measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Rate {
    pub(super) per_second: f64,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
}

impl Rate {
    /// From the benchmark's CSV: a line with names, and one with numbers. All fields are in quotes; the first is the
    /// command, which is the experiment's own and has none.
    fn parse(text: &str) -> anyhow::Result<Self> {
        let row = |line: &str| -> Vec<String> {
            let line = line.trim();
            let inner = line.strip_prefix('"').and_then(|line| line.strip_suffix('"'));
            inner.unwrap_or(line).split("\",\"").map(str::to_owned).collect()
        };
        let mut lines = text.lines().filter(|line| line.starts_with('"'));
        let names = row(lines.next().context("no line with names")?);
        let values = row(lines.next().context("no line with numbers")?);
        let number = |name: &str| {
            let at = names.iter().position(|known| known == name);
            let at = at.with_context(|| {
                format!("no column {name}; the experiment needs redis-benchmark 6.2 or newer")
            })?;
            let value = values.get(at).context("a line is short")?;
            value.parse::<f64>().with_context(|| format!("{name} is {value:?}"))
        };
        Ok(Self {
            per_second: number("rps")?,
            p50_ms: number("p50_latency_ms")?,
            p99_ms: number("p99_latency_ms")?,
        })
    }
}

/// A store that runs. It is killed if it is dropped.
pub(super) struct Server {
    child: Child,
    log: PathBuf,
}

impl Server {
    /// Starts it; its messages and those of `bluebridge run` go to a file.
    pub(super) fn start(mut command: Command, log: &Path) -> anyhow::Result<Self> {
        let file = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let messages = file.try_clone().context("cannot use the file of messages")?;
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command.stdin(Stdio::null()).stdout(file).stderr(messages).spawn();
        let child = child.with_context(|| format!("cannot start {name}"))?;
        Ok(Self { child, log: log.to_owned() })
    }

    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// A connection, as soon as the store responds.
    pub(super) fn connect(&mut self) -> anyhow::Result<Connection> {
        let until = Instant::now() + READY;
        loop {
            let tried = Connection::open(ADDRESS).and_then(|mut connection| {
                connection.ping()?;
                Ok(connection)
            });
            match tried {
                Ok(connection) => return Ok(connection),
                Err(error) if Instant::now() > until => {
                    let words = format!("redis-server does not respond: {error}{}", self.said());
                    return Err(anyhow!(words));
                }
                Err(_) => {}
            }
            if let Some(status) = self.child.try_wait()? {
                return Err(anyhow!("redis-server ended with {status}{}", self.said()));
            }
            thread::sleep(LOOK);
        }
    }

    /// The last line of its messages.
    fn said(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let last = text.lines().rev().find(|line| !line.trim().is_empty());
        last.map_or_else(String::new, |line| format!("; its last message: {line}"))
    }

    /// Ends it, and waits until it has ended.
    pub(super) fn end(mut self) -> anyhow::Result<()> {
        // `bluebridge run` passes it on.
        kill_process(Pid::from_child(&self.child), Signal::TERM).map_err(io::Error::from)?;
        let until = Instant::now() + ENDING;
        loop {
            match self.child.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => {
                    return Err(anyhow!("redis-server ended with {status}{}", self.said()));
                }
                None if Instant::now() > until => {
                    let seconds = ENDING.as_secs();
                    return Err(anyhow!("redis-server did not end within {seconds} s"));
                }
                None => thread::sleep(LOOK),
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CSV: &str = "\
\"test\",\"rps\",\"avg_latency_ms\",\"min_latency_ms\",\"p50_latency_ms\",\"p95_latency_ms\",\"p99_latency_ms\",\"max_latency_ms\"
\"GET\",\"119474.31\",\"0.050\",\"0.008\",\"0.047\",\"0.087\",\"0.111\",\"1.103\"
";

    #[test]
    fn the_benchmark_s_table_is_read_by_its_names() {
        let rate = Rate::parse(CSV).expect("two lines");
        assert_eq!(rate, Rate { per_second: 119_474.31, p50_ms: 0.047, p99_ms: 0.111 });
        let title = CSV.replace("\"GET\"", "\"SET key:__rand_int__ abc+/.\"");
        assert_eq!(Rate::parse(&title).expect("two lines"), rate);
        let old = Rate::parse("\"GET\",\"119474.31\"\n").expect_err("no names");
        assert!(old.to_string().contains("no line with numbers"), "{old}");
        let other = CSV.replace("p99_latency_ms", "p98_latency_ms");
        let other = Rate::parse(&other).expect_err("no such column");
        assert!(other.to_string().contains("6.2 or newer"), "{other}");
        for wrong in ["", "WARNING: none\n", &CSV.replace("0.111", "fast")] {
            assert!(Rate::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_missing_program_is_named_with_its_package() {
        let missing = Programs::find(Some(Path::new("/nonexistent"))).expect_err("it is missing");
        let words = missing.to_string();
        assert!(words.contains("redis-server was not found in /nonexistent"), "{words}");
        assert!(words.contains("Debian's packages redis-server and redis-tools"), "{words}");
    }

    #[test]
    fn a_program_that_takes_too_long_is_ended() {
        let mut command = Command::new("sleep");
        let late = output_within(command.arg("60"), Duration::from_millis(50));
        assert!(late.expect_err("it sleeps").to_string().contains("longer than"));
        let failed = output_within(Command::new("sh").args(["-c", "exit 1"]), READY);
        let failed = failed.expect_err("it fails");
        assert!(failed.to_string().contains("exit status: 1"), "{failed}");
    }
}
