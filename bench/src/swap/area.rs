//! Swap areas of an experiment's own: a file, or a new zram device.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate};
use serde::{Deserialize, Serialize};

use super::Kind;
use super::machine::{ZRAM_CONTROL, areas};

/// What the names of the files begin with.
pub(super) const FILE_PREFIX: &str = "bluebridge-swap-";
const PAGE_BYTES: usize = 4096;
/// How long a new device may take to appear, and an old one to be free.
const DEVICE: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(10);
/// In the kernel's `swap.h`: the priority is given.
const PREFER: libc::c_int = 0x8000;
/// The algorithm of zram, if the kernel has it.
const ALGORITHM: &str = "lz4";

/// A place for pages.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Area {
    /// What it is.
    pub kind: Kind,
    /// The file or the device.
    pub path: PathBuf,
    /// The number of the device.
    number: Option<u32>,
}

impl Area {
    /// The name of a file in a directory, for a process.
    #[must_use]
    pub fn file_in(directory: &Path) -> Self {
        let name = format!("{FILE_PREFIX}{}", std::process::id());
        Self { kind: Kind::SwapFile, path: directory.join(name), number: None }
    }

    /// Makes the file, which must not be there, with room for all of it.
    pub(super) fn make_file(&self, bytes: u64) -> io::Result<()> {
        let mut options = File::options();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(&self.path)?;
        // A file with holes cannot be swap.
        fallocate(&file, FallocateFlags::empty(), 0, bytes)?;
        file.write_all_at(&header(bytes), 0)?;
        file.sync_all()
    }

    /// Makes a device that nobody else has.
    pub(super) fn make_zram() -> io::Result<Self> {
        let number = fs::read_to_string(Path::new(ZRAM_CONTROL).join("hot_add"))?;
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "not the number of a device");
        let number: u32 = number.trim().parse().map_err(|_| invalid())?;
        let path = PathBuf::from(format!("/dev/zram{number}"));
        Ok(Self { kind: Kind::Zram, path, number: Some(number) })
    }

    /// Gives the device its size.
    pub(super) fn set_up_zram(&self, bytes: u64) -> io::Result<()> {
        let Some(settings) = self.settings() else { return Ok(()) };
        let algorithms = fs::read_to_string(settings.join("comp_algorithm"))?;
        if algorithms.split([' ', '[', ']', '\n']).any(|word| word == ALGORITHM) {
            fs::write(settings.join("comp_algorithm"), ALGORITHM)?;
        }
        fs::write(settings.join("disksize"), bytes.to_string())?;
        // The system's daemon for devices can take a moment.
        let until = Instant::now() + DEVICE;
        let mut device = loop {
            match File::options().write(true).open(&self.path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound && Instant::now() < until => {
                    thread::sleep(LOOK);
                }
                other => break other?,
            }
        };
        device.write_all(&header(bytes))?;
        device.sync_all()
    }

    /// Its settings in sysfs, of a device.
    fn settings(&self) -> Option<PathBuf> {
        self.number.map(|number| PathBuf::from(format!("/sys/block/zram{number}")))
    }

    pub(super) fn switch_on(&self) -> io::Result<()> {
        let flags = PREFER | libc::c_int::from(self.kind.priority());
        swap_on(&self.path, flags)
    }

    /// Whether the kernel uses it.
    pub(super) fn is_on(&self) -> bool {
        let path = self.path.to_string_lossy();
        fs::read_to_string("/proc/swaps")
            .is_ok_and(|text| areas(&text).iter().any(|it| *it == path))
    }

    /// Turns it off; pages in it return to memory. A call that takes longer than the deadline goes on in the kernel until
    /// this process ends.
    pub(super) fn switch_off(&self, deadline: Duration) -> io::Result<()> {
        if !self.is_on() {
            return Ok(());
        }
        let path = self.path.clone();
        let (done, result) = channel();
        let call = move || drop(done.send(swap_off(&path)));
        thread::Builder::new().name("swapoff".to_owned()).spawn(call)?;
        match result.recv_timeout(deadline) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => Err(io::ErrorKind::TimedOut.into()),
            Err(RecvTimeoutError::Disconnected) => Err(io::ErrorKind::Other.into()),
        }
    }

    /// Removes the file or the device, if it is there; it must be off.
    pub(super) fn remove(&self) -> io::Result<()> {
        let Some(settings) = self.settings() else {
            return match fs::remove_file(&self.path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                other => other,
            };
        };
        if !settings.exists() {
            return Ok(());
        }
        let number = self.number.unwrap_or_default().to_string();
        let until = Instant::now() + DEVICE;
        loop {
            // The system's daemon for devices may look at it at this moment.
            let removed = fs::write(settings.join("reset"), "1")
                .and_then(|()| fs::write(Path::new(ZRAM_CONTROL).join("hot_remove"), &number));
            match removed {
                Err(error)
                    if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < until =>
                {
                    thread::sleep(LOOK);
                }
                other => return other,
            }
        }
    }

    /// The compression of a zram device.
    #[must_use]
    pub fn algorithm(&self) -> Option<String> {
        let algorithms = fs::read_to_string(self.settings()?.join("comp_algorithm")).ok()?;
        let (_, rest) = algorithms.split_once('[')?;
        Some(rest.split_once(']')?.0.to_owned())
    }
}

/// The first page of a swap area (`union swap_header` in the kernel's `swap.h`, which `mkswap` writes): version 1, the
/// number of the last page, no bad pages, and the signature at its end.
fn header(bytes: u64) -> [u8; PAGE_BYTES] {
    const START: usize = 1024;
    const SIGNATURE: &[u8; 10] = b"SWAPSPACE2";
    let mut page = [0; PAGE_BYTES];
    let last = u32::try_from(bytes / PAGE_BYTES as u64).unwrap_or(u32::MAX).saturating_sub(1);
    page[START..START + 4].copy_from_slice(&1_u32.to_ne_bytes());
    page[START + 4..START + 8].copy_from_slice(&last.to_ne_bytes());
    page[PAGE_BYTES - SIGNATURE.len()..].copy_from_slice(SIGNATURE);
    page
}

fn as_c(path: &Path) -> io::Result<CString> {
    let invalid = |_| io::Error::new(io::ErrorKind::InvalidInput, "the path has a zero byte");
    CString::new(path.as_os_str().as_bytes()).map_err(invalid)
}

#[allow(unsafe_code, reason = "swapon")]
fn swap_on(path: &Path, flags: libc::c_int) -> io::Result<()> {
    let path = as_c(path)?;
    // SAFETY: the system call reads a string that ends with zero, and changes nothing in this process.
    match unsafe { libc::swapon(path.as_ptr(), flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[allow(unsafe_code, reason = "swapoff")]
fn swap_off(path: &Path) -> io::Result<()> {
    let path = as_c(path)?;
    // SAFETY: the system call reads a string that ends with zero; pages that return to memory have the same contents.
    match unsafe { libc::swapoff(path.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use bluebridge_testkit::Scratch;

    use super::*;

    #[test]
    fn a_header_has_the_last_page_and_the_signature() {
        let page = header(10 << 20);
        assert_eq!(page[1024..1028], 1_u32.to_ne_bytes());
        assert_eq!(page[1028..1032], 2559_u32.to_ne_bytes());
        assert_eq!(&page[4086..], b"SWAPSPACE2");
        assert!(page[..1024].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_file_is_made_whole_and_private_and_never_replaces_another() {
        use std::os::unix::fs::MetadataExt;
        let scratch = Scratch::new("swap-area");
        let area = Area::file_in(scratch.path());
        area.make_file(1 << 20).expect("made");
        let file = fs::metadata(&area.path).expect("there");
        assert_eq!((file.len(), file.mode() & 0o777), (1 << 20, 0o600));
        assert!(file.blocks() * 512 >= 1 << 20, "it has holes");
        assert!(!area.is_on());
        assert!(area.make_file(1 << 20).is_err(), "it is there already");
        area.switch_off(Duration::from_secs(1)).expect("it is not on");
        area.remove().expect("removed");
        assert!(!area.path.exists());
        area.remove().expect("it is gone");
    }
}
