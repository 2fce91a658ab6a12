//! Whether this machine can be measured: nothing but the experiment's own swap, and room for it.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{statfs, statvfs};

use super::area::FILE_PREFIX;
use super::{Kind, SwapError, failed};

/// What is active, and where it is switched.
const SWAPS: &str = "/proc/swaps";
const ZSWAP: &str = "/sys/module/zswap/parameters/enabled";
/// Where zram devices are made.
pub(super) const ZRAM_CONTROL: &str = "/sys/class/zram-control";

/// Memory that must stay free for everything else, so that only the cgroup's processes are pressed into swap.
const MEMORY_RESERVE: u64 = 512 << 20;
/// Room that must stay free on the file system.
const DISK_RESERVE: u64 = 256 << 20;

/// Checks everything that can be known before.
///
/// # Errors
/// What stands against it.
pub fn check(
    kinds: &[Kind],
    directory: &Path,
    memory_bytes: u64,
    area_bytes: u64,
) -> Result<(), SwapError> {
    if !rustix::process::geteuid().is_root() {
        return Err(SwapError::NotRoot);
    }
    if kinds.contains(&Kind::SwapFile) {
        check_directory(directory, area_bytes)?;
    }
    let swaps = match fs::read_to_string(SWAPS) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(SwapError::NoSwap),
        other => other.map_err(failed(format!("read {SWAPS}")))?,
    };
    refuse_other(&areas(&swaps))?;
    if fs::read_to_string(ZSWAP).is_ok_and(|text| text.trim() == "Y") {
        return Err(SwapError::Zswap { setting: ZSWAP });
    }
    let info = fs::read_to_string("/proc/meminfo").map_err(failed("read /proc/meminfo"))?;
    let available = available_bytes(&info).unwrap_or(0);
    // zram holds what it cannot compress as it is, beside what is local.
    let needed = memory_bytes.saturating_mul(2).saturating_add(MEMORY_RESERVE);
    if needed > available {
        return Err(SwapError::Memory { needed: needed >> 20, available: available >> 20 });
    }
    if kinds.contains(&Kind::Zram) && !Path::new(ZRAM_CONTROL).exists() {
        return Err(SwapError::NoZram { control: ZRAM_CONTROL });
    }
    Ok(())
}

/// Checks that a directory can hold a swap file of a size.
///
/// # Errors
/// Its file system cannot hold swap files, or has no room.
pub fn check_directory(directory: &Path, bytes: u64) -> Result<(), SwapError> {
    let doing = || format!("use the directory {}", directory.display());
    let status = statfs(directory).map_err(|error| failed(doing())(error.into()))?;
    #[allow(clippy::unnecessary_cast, reason = "the type differs between machines")]
    if let Some(file_system) = without_swap_files(status.f_type as u64) {
        return Err(SwapError::FileSystem { directory: directory.to_owned(), file_system });
    }
    let room = statvfs(directory).map_err(|error| failed(doing())(error.into()))?;
    let free = room.f_bavail.saturating_mul(room.f_frsize);
    if bytes.saturating_add(DISK_RESERVE) > free {
        let directory = directory.to_owned();
        return Err(SwapError::Disk { directory, needed: bytes >> 20, free: free >> 20 });
    }
    Ok(())
}

/// The name of a file system (`statfs(2)`) that cannot hold swap files, or only after preparations.
const fn without_swap_files(magic: u64) -> Option<&'static str> {
    Some(match magic & 0xffff_ffff {
        0x0102_1994 => "tmpfs",
        0x8584_58f6 => "ramfs",
        0x794c_7630 => "overlayfs",
        0x9123_683e => "btrfs",
        0x0102_1997 => "9p",
        0x6573_5546 => "FUSE",
        0x6969 => "NFS",
        0x2fc1_2fc1 => "ZFS",
        _ => return None,
    })
}

/// The paths of the active areas in `/proc/swaps`.
pub(super) fn areas(swaps: &str) -> Vec<String> {
    let lines = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    // The kernel writes some characters as octal numbers; only spaces are likely.
    lines.map(|path| path.replace("\\040", " ")).collect()
}

fn refuse_other(areas: &[String]) -> Result<(), SwapError> {
    if areas.is_empty() {
        return Ok(());
    }
    let is_ours = |path: &&String| {
        let name = Path::new(path.as_str()).file_name().and_then(OsStr::to_str);
        name.is_some_and(|name| name.starts_with(FILE_PREFIX))
    };
    let remedy = match areas.iter().find(is_ours) {
        Some(path) => format!(
            "the file is that of an experiment; if none is running, `swapoff {path}` and remove the file"
        ),
        None => "turn it off for this time (`swapoff -a`), or leave out --compare".to_owned(),
    };
    Err(SwapError::InUse { areas: areas.join(", "), remedy })
}

/// Bytes that programs can allocate without swapping (`/proc/meminfo`).
fn available_bytes(info: &str) -> Option<u64> {
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// Pages that were swapped in and out since the machine's start (`/proc/vmstat`).
///
/// While only the experiment's swap is on, they are its own.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Traffic {
    /// Read.
    pub pages_in: u64,
    /// Written.
    pub pages_out: u64,
}

impl Traffic {
    /// Until now.
    ///
    /// # Errors
    /// The system's.
    pub fn look() -> Result<Self, SwapError> {
        let text = fs::read_to_string("/proc/vmstat").map_err(failed("read /proc/vmstat"))?;
        Ok(Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let count = |name: &str| {
            let mut words = text.lines().filter_map(|line| line.split_once(' '));
            words.find(|(word, _)| *word == name).and_then(|(_, count)| count.trim().parse().ok())
        };
        Self { pages_in: count("pswpin").unwrap_or(0), pages_out: count("pswpout").unwrap_or(0) }
    }
}

/// The first page of a swap area.
const HEADER_BYTES: u64 = 4096;

/// How well zram compressed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Compression {
    original_bytes: u64,
    compressed_bytes: u64,
}

impl Compression {
    /// Of the device at a path such as `/dev/zram1`.
    #[must_use]
    pub fn of(device: &Path) -> Option<Self> {
        let name = device.file_name()?;
        let path = PathBuf::from("/sys/block").join(name).join("mm_stat");
        Self::parse(&fs::read_to_string(path).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split_whitespace().map(str::parse);
        let original_bytes = numbers.next()?.ok()?;
        let compressed_bytes = numbers.next()?.ok()?;
        Some(Self { original_bytes, compressed_bytes })
    }

    /// The size after compression, as a share of that before; nothing if the device has only its header.
    #[allow(clippy::cast_precision_loss, reason = "a share needs few digits")]
    #[must_use]
    pub fn share(self) -> Option<f64> {
        let whole = self.original_bytes;
        (whole > HEADER_BYTES).then(|| self.compressed_bytes as f64 / whole as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: &str = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";

    #[test]
    fn swap_of_others_is_refused_and_what_a_killed_experiment_left_is_named() {
        assert!(refuse_other(&areas(NONE)).is_ok());
        let partition = format!("{NONE}/dev/sda2   partition\t1000\t0\t-2\n");
        assert_eq!(areas(&partition), ["/dev/sda2"]);
        let refused = refuse_other(&areas(&partition)).expect_err("it is in use").to_string();
        assert!(refused.contains("/dev/sda2") && refused.contains("swapoff -a"), "{refused}");
        let left = format!("{NONE}/var/my\\040tmp/{FILE_PREFIX}17   file\t1000\t0\t1\n");
        let refused = refuse_other(&areas(&left)).expect_err("it is in use").to_string();
        assert!(refused.contains("`swapoff /var/my tmp/bluebridge-swap-17`"), "{refused}");
    }

    #[test]
    fn numbers_of_the_kernel_are_read() {
        let info = "MemTotal:  2048 kB\nMemFree:  10 kB\nMemAvailable:   1024 kB\n";
        assert_eq!(available_bytes(info), Some(1 << 20));
        assert_eq!(available_bytes("MemAvailable:"), None);
        let text = "pgpgin 5\npswpin 7\npswpout 9\npswpin_other 11\n";
        assert_eq!(Traffic::parse(text), Traffic { pages_in: 7, pages_out: 9 });
        let empty = Compression::parse("4096 74 12288 0 0 0 0 0 0\n").expect("numbers");
        assert_eq!(empty.share(), None);
        let half = Compression::parse("   8192 4096 12288 0").expect("numbers");
        assert_eq!(half.share(), Some(0.5));
        assert_eq!(Compression::parse("8192"), None);
    }

    #[test]
    fn directories_without_swap_files_are_refused() {
        let refused = check_directory(Path::new("/dev/shm"), 1 << 20);
        match refused {
            Err(SwapError::FileSystem { file_system, .. }) => assert_eq!(file_system, "tmpfs"),
            // It is missing on some machines.
            Err(SwapError::System { .. }) => {}
            other => panic!("{other:?}"),
        }
        let missing = check_directory(Path::new("/nonexistent"), 1).expect_err("it is missing");
        assert!(missing.to_string().contains("/nonexistent"), "{missing}");
        assert_eq!(without_swap_files(0xef53), None);
    }

    #[test]
    fn a_file_that_does_not_fit_is_refused() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        match check_directory(here, u64::MAX / 2) {
            Err(SwapError::Disk { .. } | SwapError::FileSystem { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
}
