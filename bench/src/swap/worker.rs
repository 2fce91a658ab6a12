//! The process in the cgroup: a program in plain memory, or accesses to pages that are out.
//!
//! It gets its job as a line of JSON, and answers with lines. Its socket is closed if the experiment ends.

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::cgroup::Cgroup;
use super::machine::{Compression, Traffic};
use super::pages::{self, PagesJob};
use super::{SwapError, failed};
use crate::workout::{Together, Workout};

/// What a worker does.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Job {
    /// Accesses pages that are out, in turns, until the socket is closed.
    Pages(PagesJob),
    /// Runs a program once.
    Workout(WorkoutJob),
}

/// A program that runs once.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct WorkoutJob {
    /// The program.
    pub workout: Workout,
    /// How many copies run at once.
    pub copies: usize,
    /// The cores of the copies.
    pub cores: Vec<usize>,
    /// The memory of all, in words of 32 bits.
    pub words: usize,
    /// What the contents depend on.
    pub seed: u64,
    /// The zram device, if there is one: its compression is noted at the end of what is timed.
    pub zram: Option<PathBuf>,
}

/// What a program showed.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct WorkoutResult {
    /// From the start of the first copy to the end of the last one.
    pub time: Duration,
    /// A digest of each copy's memory.
    pub digests: Vec<u64>,
    /// In the timed part, as what follows: faults that had to wait for a page.
    pub major_faults: u64,
    /// Pages that were read.
    pub pages_in: u64,
    /// Pages that were written.
    pub pages_out: u64,
    /// The size of zram's contents after compression, as a share, at the end of the timed part.
    pub compressed_share: Option<f64>,
}

/// A line of a worker.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
enum Line<T> {
    Result(T),
    Failed(String),
}

/// The worker's work: does what the socket asks for.
///
/// # Errors
/// The socket's; the work's own errors go to the other side.
pub fn serve(socket: UnixStream) -> Result<(), SwapError> {
    let mut requests = BufReader::new(socket);
    let Some(job) = receive::<Job>(&mut requests)? else { return Ok(()) };
    match job {
        Job::Workout(job) => answer(requests.get_ref(), work(&job)),
        Job::Pages(job) => pages::serve(&job, &mut requests),
    }
}

pub(super) fn receive<T: DeserializeOwned>(
    from: &mut impl BufRead,
) -> Result<Option<T>, SwapError> {
    let reading = || failed("read from the other process");
    let mut line = String::new();
    if from.read_line(&mut line).map_err(reading())? == 0 {
        return Ok(None);
    }
    serde_json::from_str(&line).map(Some).map_err(|error| reading()(error.into()))
}

fn send(mut to: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)
}

pub(super) fn answer<T: Serialize>(
    to: &UnixStream,
    result: Result<T, SwapError>,
) -> Result<(), SwapError> {
    let line = match result {
        Ok(result) => Line::Result(result),
        Err(error) => Line::Failed(error.to_string()),
    };
    send(to, &line).map_err(failed("write to the other process"))
}

/// What was counted until now.
struct Counts {
    traffic: Traffic,
    major_faults: u64,
    compressed_share: Option<f64>,
}

impl Counts {
    fn look(job: &WorkoutJob) -> Result<Self, SwapError> {
        let compression = job.zram.as_deref().and_then(Compression::of);
        Ok(Self {
            traffic: Traffic::look()?,
            major_faults: major_faults(libc::RUSAGE_SELF),
            compressed_share: compression.and_then(Compression::share),
        })
    }
}

fn work(job: &WorkoutJob) -> Result<WorkoutResult, SwapError> {
    let WorkoutJob { workout, copies, ref cores, words, seed, .. } = *job;
    let together = Together { workout, copies, cores: cores.clone() };
    let mut memory = vec![0_u32; words];
    let mut counts = Vec::new();
    let edge = || counts.push(Counts::look(job));
    let finished = together.run(&mut memory, seed, edge);
    let finished = finished.map_err(|error| SwapError::Worker(error.to_string()))?;
    let counts = counts.into_iter().collect::<Result<Vec<_>, _>>()?;
    let [begin, end] = &counts[..] else {
        return Err(SwapError::Worker("the program was not timed".to_owned()));
    };
    Ok(WorkoutResult {
        time: finished.time,
        digests: finished.digests,
        major_faults: end.major_faults - begin.major_faults,
        pages_in: end.traffic.pages_in - begin.traffic.pages_in,
        pages_out: end.traffic.pages_out - begin.traffic.pages_out,
        compressed_share: end.compressed_share,
    })
}

/// Faults of this process or thread that had to wait for a page.
#[allow(unsafe_code, reason = "getrusage")]
pub(super) fn major_faults(whose: libc::c_int) -> u64 {
    let mut usage = core::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the system call fills the structure, which lives longer.
    let result = unsafe { libc::getrusage(whose, usage.as_mut_ptr()) };
    debug_assert_eq!(result, 0, "both arguments are valid");
    // SAFETY: all bits zero are a valid structure of numbers, and so is what the kernel writes.
    let usage = unsafe { usage.assume_init() };
    u64::try_from(usage.ru_majflt).unwrap_or(0)
}

/// A worker, as the experiment sees it. It is killed when dropped.
#[derive(Debug)]
pub struct Worker {
    child: Child,
    socket: UnixStream,
    answers: BufReader<UnixStream>,
    /// For the error of an answer that is late.
    deadline: Duration,
}

impl Worker {
    /// Starts a worker in a cgroup: a command that calls [`serve`] with its standard input. Each answer may take as long
    /// as the deadline.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(
        mut command: Command,
        group: &Cgroup,
        job: &Job,
        deadline: Duration,
    ) -> Result<Self, SwapError> {
        let starting = || failed("start a process in the cgroup");
        let (socket, other) = UnixStream::pair().map_err(starting())?;
        let answers = socket.try_clone().map_err(starting())?;
        answers.set_read_timeout(Some(deadline)).map_err(starting())?;
        group.hold(&mut command)?;
        let child = command.stdin(Stdio::from(OwnedFd::from(other))).stdout(Stdio::null()).spawn();
        let child = child.map_err(starting())?;
        let worker = Self { child, socket, answers: BufReader::new(answers), deadline };
        send(&worker.socket, job).map_err(starting())?;
        Ok(worker)
    }

    /// Asks for more.
    ///
    /// # Errors
    /// The worker has ended.
    pub fn ask(&mut self, request: &impl Serialize) -> Result<(), SwapError> {
        send(&self.socket, request).map_err(failed("write to the process in the cgroup"))
    }

    /// Waits for the next answer.
    ///
    /// # Errors
    /// The worker's own, its end, or the deadline.
    pub fn answer<T: DeserializeOwned>(&mut self) -> Result<T, SwapError> {
        match receive::<Line<T>>(&mut self.answers) {
            Ok(Some(Line::Result(result))) => Ok(result),
            Ok(Some(Line::Failed(reason))) => Err(SwapError::Worker(reason)),
            Ok(None) => Err(self.ended()),
            Err(SwapError::System { source, .. })
                if matches!(source.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) =>
            {
                let seconds = self.deadline.as_secs();
                Err(SwapError::Deadline { what: "the process in the cgroup", seconds })
            }
            Err(error) => Err(error),
        }
    }

    fn ended(&mut self) -> SwapError {
        use std::os::unix::process::ExitStatusExt;
        let status = self.child.wait();
        let words = match status {
            Ok(status) if status.signal() == Some(libc::SIGKILL) => {
                "it was killed; if the command was not interrupted, the kernel found no more room in swap".to_owned()
            }
            Ok(status) => format!("it ended early ({status})"),
            Err(error) => error.to_string(),
        };
        SwapError::Worker(words)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_program_runs_as_in_this_process() {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        let serving = thread::spawn(move || serve(theirs));
        let job = WorkoutJob {
            workout: Workout::Quicksort,
            copies: 2,
            cores: Vec::new(),
            words: 10_000,
            seed: 3,
            zram: None,
        };
        send(&ours, &Job::Workout(job)).expect("sent");
        let line = receive::<Line<WorkoutResult>>(&mut BufReader::new(&ours)).expect("a line");
        let Some(Line::Result(result)) = line else { panic!("{line:?}") };
        serving.join().expect("no panic").expect("served");
        let together = Together { workout: Workout::Quicksort, copies: 2, cores: Vec::new() };
        let finished = together.run(&mut vec![0; 10_000], 3, || ()).expect("it runs");
        assert_eq!(result.digests, finished.digests);
        assert_eq!(result.compressed_share, None);
    }

    #[test]
    fn a_failure_reaches_the_other_side() {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        answer::<u64>(&theirs, Err(SwapError::Worker("no".to_owned()))).expect("sent");
        let line = receive::<Line<u64>>(&mut BufReader::new(&ours)).expect("a line");
        assert!(matches!(line, Some(Line::Failed(reason)) if reason.contains("no")));
        drop(theirs);
        assert!(receive::<Line<u64>>(&mut BufReader::new(&ours)).expect("the end").is_none());
    }
}
