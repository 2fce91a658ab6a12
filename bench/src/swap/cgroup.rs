//! A memory cgroup, of version 1 or 2.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use super::{SwapError, failed};

/// How often it looks whether something has happened.
const LOOK: Duration = Duration::from_millis(10);
/// A limit to which little can stay.
const LITTLE: u64 = 1 << 20;

/// How often a cgroup is looked at; one that is stuck waits so long.
const RELIEF_LOOK: Duration = Duration::from_millis(10);
/// By how much a stuck cgroup may exceed its limit for a moment.
const RELIEF_BYTES: u64 = 1 << 20;

/// The version of the interface.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Version {
    /// A hierarchy for memory alone.
    One,
    /// One hierarchy for all.
    Two,
}

/// A memory cgroup; its processes are limited together.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Cgroup {
    version: Version,
    path: PathBuf,
}

impl Cgroup {
    /// A cgroup that is still to be made, at the top of the hierarchy.
    ///
    /// # Errors
    /// [`SwapError::NoCgroup`].
    pub fn named(name: &str) -> Result<Self, SwapError> {
        let mounts = fs::read_to_string("/proc/self/mountinfo");
        let mounts = mounts.map_err(failed("read /proc/self/mountinfo"))?;
        let is_enabled = |path: &Path| {
            let enabled = fs::read_to_string(path.join("cgroup.subtree_control"));
            enabled.is_ok_and(|text| text.split_whitespace().any(|word| word == "memory"))
        };
        let (version, top) = hierarchy(&mounts, is_enabled).ok_or(SwapError::NoCgroup)?;
        Ok(Self { version, path: top.join(name) })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn create(&self) -> io::Result<()> {
        fs::create_dir(&self.path)
    }

    /// Starts a program's process in the cgroup: all that it allocates counts.
    ///
    /// # Errors
    /// The system's.
    #[allow(unsafe_code, reason = "the new process moves before it becomes the program")]
    pub fn hold(&self, command: &mut Command) -> Result<(), SwapError> {
        let list = self.path.join("cgroup.procs");
        let doing = format!("open {}", list.display());
        let mut list = File::options().write(true).open(list).map_err(failed(doing))?;
        // SAFETY: between `fork` and `exec` it only writes to an open file, which is one system call. 0 is the process
        // that writes.
        unsafe { command.pre_exec(move || list.write_all(b"0")) };
        Ok(())
    }

    /// Limits the memory; `None` is no limit.
    ///
    /// # Errors
    /// The system's.
    pub fn set_limit(&self, bytes: Option<u64>) -> Result<(), SwapError> {
        let (name, none) = match self.version {
            Version::One => ("memory.limit_in_bytes", "-1"),
            Version::Two => ("memory.max", "max"),
        };
        let value = bytes.map_or_else(|| none.to_owned(), |bytes| bytes.to_string());
        self.write(name, &value)
    }

    /// The most memory that it had at once, in bytes.
    ///
    /// # Errors
    /// The system's; version 2 knows it from Linux 5.19 on.
    pub fn peak(&self) -> Result<u64, SwapError> {
        self.number(match self.version {
            Version::One => "memory.max_usage_in_bytes",
            Version::Two => "memory.peak",
        })
    }

    /// The memory that it has, in bytes.
    ///
    /// # Errors
    /// The system's.
    pub fn usage(&self) -> Result<u64, SwapError> {
        self.number(match self.version {
            Version::One => "memory.usage_in_bytes",
            Version::Two => "memory.current",
        })
    }

    /// Presses out what can be pressed out, under this limit.
    ///
    /// # Errors
    /// The system's.
    pub fn press(&self, limit_bytes: u64) -> Result<(), SwapError> {
        let pressed = match self.version {
            // The kernel reclaims before it refuses, and ends no process for this.
            Version::One => self.write("memory.limit_in_bytes", &LITTLE.to_string()),
            // A lower limit would end processes here.
            Version::Two => self.write("memory.reclaim", &self.usage()?.to_string()),
        };
        if self.version == Version::One {
            self.set_limit(Some(limit_bytes))?;
        }
        match pressed {
            Err(SwapError::System { source, .. })
                if matches!(
                    source.kind(),
                    // EAGAIN: less than all could be reclaimed.
                    io::ErrorKind::ResourceBusy | io::ErrorKind::WouldBlock
                ) =>
            {
                Ok(())
            }
            other => other,
        }
    }

    /// Whether all its processes wait because the kernel found nothing to press out. Only version 1 has this state.
    fn is_stuck(&self) -> bool {
        let control = fs::read_to_string(self.path.join("memory.oom_control"));
        control.is_ok_and(|text| text.lines().any(|line| line == "under_oom 1"))
    }

    fn write(&self, name: &str, value: &str) -> Result<(), SwapError> {
        let path = self.path.join(name);
        let doing = format!("write {value} to {}", path.display());
        fs::write(path, value).map_err(failed(doing))
    }

    fn number(&self, name: &str) -> Result<u64, SwapError> {
        let path = self.path.join(name);
        let doing = format!("read {}", path.display());
        let number = fs::read_to_string(path).and_then(|text| {
            let number = text.trim().parse();
            number.map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "not a number"))
        });
        number.map_err(failed(doing))
    }

    fn processes(&self) -> Vec<Pid> {
        let list = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        list.lines().filter_map(|line| Pid::from_raw(line.trim().parse().ok()?)).collect()
    }

    /// Ends its processes, and waits until they are gone.
    pub(super) fn end_processes(&self, deadline: Duration) -> io::Result<()> {
        let until = Instant::now() + deadline;
        loop {
            let processes = self.processes();
            if processes.is_empty() {
                return Ok(());
            }
            if Instant::now() > until {
                return Err(io::ErrorKind::TimedOut.into());
            }
            for process in processes {
                // One that has ended does not need it.
                let _ = kill_process(process, Signal::KILL);
            }
            thread::sleep(LOOK);
        }
    }

    /// Removes it, if it is there; without processes.
    pub(super) fn remove(&self, deadline: Duration) -> io::Result<()> {
        let until = Instant::now() + deadline;
        loop {
            match fs::remove_dir(&self.path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                // A process that has just ended counts for a moment.
                Err(error)
                    if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < until =>
                {
                    thread::sleep(LOOK);
                }
                other => return other,
            }
        }
    }
}

/// Keeps a cgroup from being ended although swap has room, until it is dropped.
///
/// The kernel decides which pages to press out by counts that are up to seconds old. If pages move fast, it finds none,
/// and ends the process: seen with Linux 6.18 and cgroups of version 1. To read the statistics brings the counts up to
/// date. If that is not enough, a process in version 1 waits instead of being ended, and its limit is higher for a moment;
/// this is counted.
#[derive(Debug)]
pub struct Relief {
    stop: Arc<AtomicBool>,
    count: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Relief {
    /// Begins to watch a cgroup with this limit.
    ///
    /// # Errors
    /// The system's.
    pub fn start(group: &Cgroup, limit_bytes: u64) -> Result<Self, SwapError> {
        let (stop, count) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let mut relief = Self { stop, count, thread: None };
        if group.version == Version::One {
            group.write("memory.oom_control", "1")?;
        }
        let (stop, count) = (Arc::clone(&relief.stop), Arc::clone(&relief.count));
        let group = group.clone();
        let watch = move || {
            while !stop.load(Ordering::Relaxed) {
                thread::sleep(RELIEF_LOOK);
                let _ = fs::read(group.path.join("memory.stat"));
                if group.version == Version::Two || !group.is_stuck() {
                    continue;
                }
                count.fetch_add(1, Ordering::Relaxed);
                // The process goes on. Lowering the limit again presses out, and fails as long as this has no success.
                let _ = group.set_limit(Some(limit_bytes.saturating_add(RELIEF_BYTES)));
                while group.set_limit(Some(limit_bytes)).is_err() && !stop.load(Ordering::Relaxed) {
                    thread::sleep(RELIEF_LOOK);
                }
            }
        };
        let spawned = thread::Builder::new().name("relief".to_owned()).spawn(watch);
        relief.thread = Some(spawned.map_err(failed("start a thread"))?);
        Ok(relief)
    }

    /// How often it helped.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

impl Drop for Relief {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It cannot panic.
            let _ = thread.join();
        }
    }
}

/// The hierarchy that limits memory, from `/proc/self/mountinfo`: version 2 if memory is enabled in it.
fn hierarchy(mounts: &str, is_enabled: impl Fn(&Path) -> bool) -> Option<(Version, PathBuf)> {
    let mut one = None;
    for line in mounts.lines() {
        let Some((before, after)) = line.split_once(" - ") else { continue };
        let Some(place) = before.split(' ').nth(4) else { continue };
        let place = PathBuf::from(place.replace("\\040", " "));
        let mut words = after.split(' ');
        let options = |options: &str| options.split(',').any(|option| option == "memory");
        match words.next() {
            Some("cgroup2") if is_enabled(&place) => return Some((Version::Two, place)),
            Some("cgroup") if words.next_back().is_some_and(options) => {
                one.get_or_insert((Version::One, place));
            }
            _ => {}
        }
    }
    one
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:26 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct
31 22 0:27 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory
32 22 0:28 / /sys/fs/cgroup/unified rw - cgroup2 none rw,nsdelegate
";

    #[test]
    fn the_hierarchy_of_memory_is_found() {
        let one = hierarchy(MOUNTS, |_| false).expect("version 1");
        assert_eq!(one, (Version::One, "/sys/fs/cgroup/memory".into()));
        let two = hierarchy(MOUNTS, |path| path.ends_with("unified")).expect("version 2");
        assert_eq!(two, (Version::Two, "/sys/fs/cgroup/unified".into()));
        let without = MOUNTS.replace("rw,memory", "rw,pids");
        assert_eq!(hierarchy(&without, |_| false), None);
        assert_eq!(hierarchy("", |_| true), None);
    }

    /// The files of both versions, in a directory instead of a cgroup.
    #[test]
    fn limits_are_written_in_the_words_of_each_version() {
        let scratch = bluebridge_testkit::Scratch::new("cgroup");
        for (version, limit, none, peak) in [
            (Version::One, "memory.limit_in_bytes", "-1", "memory.max_usage_in_bytes"),
            (Version::Two, "memory.max", "max", "memory.peak"),
        ] {
            let group = Cgroup { version, path: scratch.path().to_owned() };
            let written = |name: &str| fs::read_to_string(scratch.file(name)).expect("written");
            group.set_limit(Some(4096)).expect("a file");
            assert_eq!(written(limit), "4096");
            group.set_limit(None).expect("a file");
            assert_eq!(written(limit), none);
            fs::write(scratch.file(peak), "8192\n").expect("a file");
            assert_eq!(group.peak().expect("a number"), 8192);
            fs::write(scratch.file(peak), "many\n").expect("a file");
            assert!(group.peak().is_err());
        }
    }
}
