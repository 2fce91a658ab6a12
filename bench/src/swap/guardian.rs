//! The guardian: a process of its own that makes the swap areas and the cgroups of an experiment, and removes them when
//! the experiment ends, in whatever way.
//!
//! It reads requests from a socket. The kernel closes the other end with the experiment, also if that is killed. The
//! guardian then ends the processes in the cgroups, which frees their memory, and turns swap off. If the guardian itself
//! was killed, the experiment does this.

use std::io::{self, BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::area::Area;
use super::cgroup::Cgroup;
use super::{Kind, SwapError, failed};

/// How long turning off one area may take. Its pages are free by then, except for those of other programs.
const SWITCH_OFF: Duration = Duration::from_secs(120);
/// How long killed processes may take to end; their memory is freed meanwhile.
const ENDING: Duration = Duration::from_secs(20);
/// How long a request may take.
const REQUEST: Duration = Duration::from_secs(150);
/// How long cleaning up may take.
const CLEANING: Duration = Duration::from_secs(300);
const LOOK: Duration = Duration::from_millis(10);

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
enum Request {
    /// Makes a file and turns it on.
    AddFile {
        area: Area,
        bytes: u64,
    },
    /// Makes a device and turns it on.
    AddZram {
        bytes: u64,
    },
    AddCgroup {
        group: Cgroup,
    },
    /// Turns an area off, and removes it.
    RemoveArea {
        area: Area,
    },
    /// Ends the processes of a cgroup, and removes it.
    RemoveCgroup {
        group: Cgroup,
    },
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
enum Reply {
    Area(Area),
    Done,
    Failed(String),
}

/// What has to be removed at the end.
#[derive(Debug, Default)]
struct Holdings {
    areas: Vec<Area>,
    groups: Vec<Cgroup>,
}

impl Holdings {
    fn serve(&mut self, request: Request) -> Reply {
        let done = match request {
            Request::AddFile { area, bytes } => self.add_file(area, bytes),
            Request::AddZram { bytes } => self.add_zram(bytes),
            Request::AddCgroup { group } => {
                self.groups.push(group.clone());
                let made = group.create().map(|()| Reply::Done);
                made.map_err(|error| format!("cannot make {}: {error}", group.path().display()))
            }
            Request::RemoveArea { area } => self.remove_area(&area).map(|()| Reply::Done),
            Request::RemoveCgroup { group } => {
                self.remove_group(group.path()).map(|()| Reply::Done)
            }
        };
        done.unwrap_or_else(Reply::Failed)
    }

    fn add_file(&mut self, area: Area, bytes: u64) -> Result<Reply, String> {
        let path = area.path.display().to_string();
        // Not ours: it must not be removed at the end.
        if area.path.exists() {
            return Err(format!("{path} is there already; remove it if no experiment is running"));
        }
        self.areas.push(area.clone());
        area.make_file(bytes)
            .map_err(|error| format!("cannot make the swap file {path}: {error}"))?;
        area.switch_on().map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => format!(
                "the file system of {path} cannot hold swap files; name a directory on ext4 or XFS with --swap-directory"
            ),
            _ => format!("cannot turn on the swap file {path}: {error}"),
        })?;
        Ok(Reply::Area(area))
    }

    fn add_zram(&mut self, bytes: u64) -> Result<Reply, String> {
        let area =
            Area::make_zram().map_err(|error| format!("cannot make a zram device: {error}"))?;
        self.areas.push(area.clone());
        let path = area.path.display();
        area.set_up_zram(bytes).map_err(|error| format!("cannot set up {path}: {error}"))?;
        area.switch_on().map_err(|error| format!("cannot turn on swap to {path}: {error}"))?;
        Ok(Reply::Area(area))
    }

    fn remove_area(&mut self, area: &Area) -> Result<(), String> {
        let path = area.path.display();
        area.switch_off(SWITCH_OFF).map_err(|error| {
            let remove = match area.kind {
                Kind::SwapFile => "remove the file",
                Kind::Zram => "write the device's number to /sys/class/zram-control/hot_remove",
            };
            format!("swap to {path} is still on: {error}; `swapoff {path}`, then {remove}")
        })?;
        area.remove().map_err(|error| format!("cannot remove {path}: {error}"))?;
        self.areas.retain(|held| held != area);
        Ok(())
    }

    fn remove_group(&mut self, path: &Path) -> Result<(), String> {
        let Some(at) = self.groups.iter().position(|group| group.path() == path) else {
            return Ok(());
        };
        let group = &self.groups[at];
        let removed = group.end_processes(ENDING).and_then(|()| group.remove(ENDING));
        let path = group.path().display();
        removed.map_err(|error| {
            format!(
                "cannot remove the cgroup {path}: {error}; end its processes, and `rmdir {path}`"
            )
        })?;
        self.groups.swap_remove(at);
        Ok(())
    }

    /// Removes everything; returns what could not be removed.
    fn release(&mut self) -> Vec<String> {
        let mut left = Vec::new();
        // The processes first: their pages need not return from swap.
        for group in &self.groups {
            if let Err(error) = group.end_processes(ENDING) {
                left.push(format!("processes in {} do not end: {error}", group.path().display()));
            }
        }
        for area in self.areas.clone() {
            left.extend(self.remove_area(&area).err());
        }
        for group in self.groups.clone() {
            left.extend(self.remove_group(group.path()).err());
        }
        left
    }
}

/// The guardian's work: serves requests until the other end is closed, then removes everything.
///
/// Returns what could not be removed.
#[must_use]
pub fn serve(socket: &UnixStream) -> Vec<String> {
    let mut holdings = Holdings::default();
    for line in BufReader::new(socket).lines() {
        let Ok(line) = line else { break };
        let reply = match serde_json::from_str(&line) {
            Ok(request) => holdings.serve(request),
            Err(error) => Reply::Failed(format!("the guardian got no request: {error}")),
        };
        if send(socket, &reply).is_err() {
            break;
        }
    }
    holdings.release()
}

fn send(mut socket: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    socket.write_all(&line)
}

/// The experiment's side.
#[derive(Debug)]
pub struct Guard {
    /// To close the connection while another thread waits for a reply.
    socket: UnixStream,
    talk: Mutex<Talk>,
    child: Mutex<Option<Child>>,
}

#[derive(Debug)]
struct Talk {
    replies: BufReader<UnixStream>,
    /// The same as the guardian's, in case that it is killed.
    holdings: Holdings,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Guard {
    /// Starts the guardian: a command that calls [`serve`] with its standard input.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(mut command: Command) -> Result<Self, SwapError> {
        let starting = || failed("start the guardian of swap");
        let (socket, other) = UnixStream::pair().map_err(starting())?;
        let replies = socket.try_clone().map_err(starting())?;
        replies.set_read_timeout(Some(REQUEST)).map_err(starting())?;
        let child = command.stdin(Stdio::from(OwnedFd::from(other))).stdout(Stdio::null()).spawn();
        let child = Mutex::new(Some(child.map_err(starting())?));
        let replies = BufReader::new(replies);
        let talk = Mutex::new(Talk { replies, holdings: Holdings::default() });
        Ok(Self { socket, talk, child })
    }

    /// Turns on swap to a new file.
    ///
    /// # Errors
    /// What stands against it.
    pub fn add_file(&self, directory: &Path, bytes: u64) -> Result<Area, SwapError> {
        let area = Area::file_in(directory);
        self.area(&Request::AddFile { area, bytes })
    }

    /// Turns on swap to a new zram device.
    ///
    /// # Errors
    /// What stands against it.
    pub fn add_zram(&self, bytes: u64) -> Result<Area, SwapError> {
        self.area(&Request::AddZram { bytes })
    }

    fn area(&self, request: &Request) -> Result<Area, SwapError> {
        let mut talk = lock(&self.talk);
        match self.request(&mut talk, request)? {
            Reply::Area(area) => {
                talk.holdings.areas.push(area.clone());
                Ok(area)
            }
            _ => Err(SwapError::Guardian("the guardian's reply has no swap area".to_owned())),
        }
    }

    /// Turns an area off, and removes it.
    ///
    /// # Errors
    /// It is still on.
    pub fn remove_area(&self, area: &Area) -> Result<(), SwapError> {
        let mut talk = lock(&self.talk);
        self.request(&mut talk, &Request::RemoveArea { area: area.clone() })?;
        talk.holdings.areas.retain(|held| held != area);
        Ok(())
    }

    /// Makes a cgroup.
    ///
    /// # Errors
    /// The machine has no memory cgroups, or it cannot be made.
    pub fn add_cgroup(&self, name: &str) -> Result<Cgroup, SwapError> {
        let group = Cgroup::named(name)?;
        let mut talk = lock(&self.talk);
        self.request(&mut talk, &Request::AddCgroup { group: group.clone() })?;
        talk.holdings.groups.push(group.clone());
        Ok(group)
    }

    /// Ends the processes of a cgroup, and removes it.
    ///
    /// # Errors
    /// A process does not end.
    pub fn remove_cgroup(&self, group: &Cgroup) -> Result<(), SwapError> {
        let mut talk = lock(&self.talk);
        self.request(&mut talk, &Request::RemoveCgroup { group: group.clone() })?;
        talk.holdings.groups.retain(|held| held.path() != group.path());
        Ok(())
    }

    fn request(&self, talk: &mut Talk, request: &Request) -> Result<Reply, SwapError> {
        let ended = |error: io::Error| match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => SwapError::Deadline {
                what: "a request to the guardian",
                seconds: REQUEST.as_secs(),
            },
            _ => SwapError::Guardian(format!("the guardian of swap has ended: {error}")),
        };
        send(&self.socket, request).map_err(ended)?;
        let mut line = String::new();
        if talk.replies.read_line(&mut line).map_err(ended)? == 0 {
            return Err(ended(io::ErrorKind::UnexpectedEof.into()));
        }
        match serde_json::from_str(&line) {
            Ok(Reply::Failed(reason)) => Err(SwapError::Guardian(reason)),
            Ok(reply) => Ok(reply),
            Err(error) => Err(ended(error.into())),
        }
    }

    /// Removes everything, and waits until it is done.
    ///
    /// A request of another thread fails. A second call does nothing.
    ///
    /// # Errors
    /// What is left.
    pub fn end(&self) -> Result<(), SwapError> {
        let Some(mut child) = lock(&self.child).take() else { return Ok(()) };
        // It may have ended.
        let _ = self.socket.shutdown(Shutdown::Both);
        let until = Instant::now() + CLEANING;
        let status = loop {
            match child.try_wait().map_err(failed("wait for the guardian of swap"))? {
                Some(status) => break status,
                None if Instant::now() > until => {
                    let (what, seconds) = ("turning swap off", CLEANING.as_secs());
                    return Err(SwapError::Deadline { what, seconds });
                }
                None => thread::sleep(LOOK),
            }
        };
        if status.success() {
            return Ok(());
        }
        // Killed, or it could not remove everything: another try, by this process.
        let left = lock(&self.talk).holdings.release();
        if left.is_empty() { Ok(()) } else { Err(SwapError::Guardian(left.join("; "))) }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // The guardian's own messages say what is left.
        let _ = self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Serves in a thread of this process.
    fn guardian() -> (UnixStream, thread::JoinHandle<Vec<String>>) {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        ours.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
        (ours, thread::spawn(move || serve(&theirs)))
    }

    fn reply(socket: &UnixStream) -> Reply {
        let mut line = String::new();
        BufReader::new(socket).read_line(&mut line).expect("a reply");
        serde_json::from_str(&line).expect("JSON")
    }

    #[test]
    fn a_file_that_is_there_is_refused_and_stays() {
        let scratch = bluebridge_testkit::Scratch::new("guardian");
        let area = Area::file_in(scratch.path());
        std::fs::write(&area.path, "mine").expect("written");
        let (socket, serving) = guardian();
        send(&socket, &Request::AddFile { area: area.clone(), bytes: 1 << 20 }).expect("sent");
        assert!(matches!(reply(&socket), Reply::Failed(reason) if reason.contains("is there")));
        drop(socket);
        assert_eq!(serving.join().expect("it ends"), Vec::<String>::new());
        assert_eq!(std::fs::read_to_string(&area.path).expect("there"), "mine");
    }

    /// The kernel refuses swap to a file on tmpfs, so this test cannot turn any on.
    #[test]
    fn a_file_that_could_not_be_turned_on_is_removed_at_the_end() {
        let directory = Path::new("/dev/shm");
        let refused = crate::swap::machine::check_directory(directory, 1 << 20);
        assert!(matches!(refused, Err(SwapError::FileSystem { .. })), "{refused:?}");
        let area = Area::file_in(directory);
        let (socket, serving) = guardian();
        send(&socket, &Request::AddFile { area: area.clone(), bytes: 1 << 20 }).expect("sent");
        let Reply::Failed(reason) = reply(&socket) else { panic!("it must be refused") };
        assert!(reason.contains("swap file"), "{reason}");
        assert!(area.path.exists(), "the guardian has made it");
        drop(socket);
        assert!(serving.join().expect("it ends").is_empty());
        assert!(!area.path.exists());
    }

    #[test]
    fn what_is_no_request_is_refused_and_the_end_of_the_other_side_ends_it() {
        let (socket, serving) = guardian();
        (&socket).write_all(b"{\"add_everything\":1}\n").expect("sent");
        assert!(matches!(reply(&socket), Reply::Failed(_)));
        drop(socket);
        assert!(serving.join().expect("it ends").is_empty());
    }

    #[test]
    fn an_ended_guardian_is_an_error_and_not_a_wait() {
        let guard = Guard::start(Command::new("true")).expect("starts");
        let refused = guard.add_zram(1 << 20).expect_err("it has ended");
        assert!(matches!(refused, SwapError::Guardian(_)), "{refused}");
        guard.end().expect("nothing is left");
    }
}
