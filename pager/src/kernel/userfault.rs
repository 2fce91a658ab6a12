//! The userfaultfd descriptor: `userfaultfd(2)`, `ioctl_userfaultfd(2)`.
#![allow(unsafe_code, reason = "requests of userfaultfd that no safe crate covers")]

use std::ffi::c_int;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use linux_raw_sys::general as sys;
use linux_raw_sys::ioctl as request;

use super::PAGE_BYTES;

/// `_IOWR(0xAA, 8, struct uffdio_poison)`, which the bindings lack.
const UFFDIO_POISON: u32 = 0xc020_aa08;
/// `_IO(0xAA, 0)`: a userfaultfd from `/dev/userfaultfd`.
const USERFAULTFD_IOC_NEW: u32 = 0xaa00;
/// Most repetitions of a request that the kernel asks to repeat (EAGAIN).
const REPETITION_LIMIT: u32 = 10_000;

const _: () = assert!(size_of::<sys::uffdio_poison>() == 0x20);
const _: () = assert!(size_of::<sys::uffd_msg>() == 32);

/// Whose faults a descriptor reports.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum FaultScope {
    /// Faults of the program's own instructions, and of system calls on its behalf.
    UserAndKernel,
    /// Faults of the program's own instructions only. A system call on a page that is not local fails with EFAULT.
    UserOnly,
}

/// Who resolves faults.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Delivery {
    /// The faulting thread, by a SIGBUS (Linux 4.14 and newer).
    Signal,
    /// A thread that reads events from the descriptor.
    Events,
}

/// A page fault, as the descriptor reports it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct FaultEvent {
    pub(crate) address: u64,
    pub(crate) is_write: bool,
    /// The id of the faulting thread.
    pub(crate) thread: u32,
}

/// Why there is no usable userfaultfd.
#[derive(Debug, thiserror::Error)]
pub enum UserfaultError {
    /// The kernel refused to create one.
    #[error(
        "the kernel refuses userfaultfd: {0}; it needs CONFIG_USERFAULTFD, Linux 5.11 for ordinary users, \
         and no seccomp filter that forbids it"
    )]
    Refused(#[source] io::Error),
    /// The kernel is too old.
    #[error("the kernel's userfaultfd lacks {feature}; Linux {version} or newer has it")]
    Lacking {
        /// What is missing.
        feature: &'static str,
        /// The first version that has it.
        version: &'static str,
    },
    /// A range could not be registered.
    #[error("a range cannot be registered with userfaultfd: {0}")]
    Registration(#[source] io::Error),
}

/// Whose page faults the system lets this process resolve.
///
/// # Errors
/// [`UserfaultError`]: none, so there can be no remote memory.
pub fn probe() -> Result<FaultScope, UserfaultError> {
    Userfault::open(Delivery::Events).map(|userfault| userfault.scope())
}

/// A userfaultfd descriptor, ready for use.
#[derive(Debug)]
pub(crate) struct Userfault {
    descriptor: OwnedFd,
    scope: FaultScope,
    features: u64,
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Userfault {
    /// Opens a descriptor with the widest scope that the system grants.
    pub(crate) fn open(delivery: Delivery) -> Result<Self, UserfaultError> {
        // The kernel tells what it has only to a descriptor that then cannot be used.
        let (probe, _) = create(delivery)?;
        let known = handshake(&probe, 0).map_err(UserfaultError::Refused)?;
        let wanted = u64::from(match delivery {
            Delivery::Signal => sys::UFFD_FEATURE_SIGBUS,
            Delivery::Events => sys::UFFD_FEATURE_THREAD_ID,
        });
        let needed = wanted | u64::from(sys::UFFD_FEATURE_PAGEFAULT_FLAG_WP);
        if known & needed != needed {
            return Err(UserfaultError::Lacking { feature: "write protection", version: "5.7" });
        }
        let (descriptor, scope) = create(delivery)?;
        let useful = u64::from(sys::UFFD_FEATURE_POISON | sys::UFFD_FEATURE_EXACT_ADDRESS);
        let features = needed | (known & useful);
        handshake(&descriptor, features).map_err(UserfaultError::Refused)?;
        Ok(Self { descriptor, scope, features })
    }

    pub(crate) fn scope(&self) -> FaultScope {
        self.scope
    }

    /// Whether [`Self::poison`] works (Linux 6.6 and newer).
    pub(crate) fn has_poison(&self) -> bool {
        self.features & u64::from(sys::UFFD_FEATURE_POISON) != 0
    }

    /// Reports faults on missing and on protected pages of a range from now on.
    pub(crate) fn register(&self, start: u64, bytes: u64) -> Result<(), UserfaultError> {
        let mode = sys::UFFDIO_REGISTER_MODE_MISSING | sys::UFFDIO_REGISTER_MODE_WP;
        let range = sys::uffdio_range { start, len: bytes };
        let mut argument = sys::uffdio_register { range, mode: mode.into(), ioctls: 0 };
        self.request(request::UFFDIO_REGISTER, &mut argument).map_err(UserfaultError::Registration)
    }

    /// Fills missing pages with a copy of `data`, and wakes threads that wait for them.
    ///
    /// A page that is there already stays as it is: that is an error, EEXIST. With an error comes the number of bytes
    /// that were copied before.
    pub(crate) fn copy(
        &self,
        target: u64,
        data: &[u8],
        is_protected: bool,
    ) -> Result<(), (usize, io::Error)> {
        let mode = if is_protected { sys::UFFDIO_COPY_MODE_WP } else { 0 };
        let mut done: usize = 0;
        let mut most = data.len();
        for _ in 0..REPETITION_LIMIT {
            let end = done.saturating_add(most).min(data.len());
            let Some(rest) = data.get(done..end).filter(|rest| !rest.is_empty()) else {
                return Ok(());
            };
            let mut argument = sys::uffdio_copy {
                dst: target + done as u64,
                src: rest.as_ptr().expose_provenance() as u64,
                len: rest.len() as u64,
                mode: mode.into(),
                copy: 0,
            };
            match self.request(request::UFFDIO_COPY, &mut argument) {
                Ok(()) => done = end,
                // The range lies in two mappings: the program has protected a part, or given the kernel advice.
                Err(error)
                    if error.raw_os_error() == Some(libc::ENOENT) && rest.len() > PAGE_BYTES =>
                {
                    most = PAGE_BYTES;
                }
                // A part is copied, or none while another thread changes the mappings.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {
                    done += usize::try_from(argument.copy).unwrap_or(0);
                }
                Err(error) => return Err((done, error)),
            }
        }
        Err((done, io::Error::from_raw_os_error(libc::EAGAIN)))
    }

    /// Makes writes to pages that are there fault, or lets them pass and wakes threads that wait.
    pub(crate) fn protect(&self, start: u64, bytes: u64, is_protected: bool) -> io::Result<()> {
        const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1;
        let mode = if is_protected { UFFDIO_WRITEPROTECT_MODE_WP } else { 0 };
        let protect = |start: u64, bytes: u64| {
            let range = sys::uffdio_range { start, len: bytes };
            self.repeat(|| {
                let mut argument = sys::uffdio_writeprotect { range, mode };
                self.request(request::UFFDIO_WRITEPROTECT, &mut argument)
            })
        };
        match protect(start, bytes) {
            // Before Linux 5.19, a range must lie in one mapping.
            Err(error)
                if error.raw_os_error() == Some(libc::ENOENT) && bytes > PAGE_BYTES as u64 =>
            {
                let mut pages = (start..start + bytes).step_by(PAGE_BYTES);
                pages.try_for_each(|page| protect(page, PAGE_BYTES as u64))
            }
            result => result,
        }
    }

    /// Lets threads that wait for a page of the range try again.
    pub(crate) fn wake(&self, start: u64, bytes: u64) -> io::Result<()> {
        let mut argument = sys::uffdio_range { start, len: bytes };
        self.request(request::UFFDIO_WAKE, &mut argument)
    }

    /// Makes each access to missing pages fail with SIGBUS, and wakes threads that wait for them.
    pub(crate) fn poison(&self, start: u64, bytes: u64) -> io::Result<()> {
        let range = sys::uffdio_range { start, len: bytes };
        self.repeat(|| {
            let mut argument = sys::uffdio_poison { range, mode: 0, updated: 0 };
            self.request(UFFDIO_POISON, &mut argument)
        })
    }

    /// The faults that wait to be read, at most as many as `events` holds; does not block.
    pub(crate) fn read(&self, events: &mut Vec<FaultEvent>, limit: usize) -> io::Result<()> {
        const READ_COUNT: usize = 16;
        // SAFETY: the message consists of integers, for which zeros are valid.
        let mut messages: [sys::uffd_msg; READ_COUNT] = unsafe { std::mem::zeroed() };
        let bytes = limit.min(READ_COUNT) * size_of::<sys::uffd_msg>();
        // SAFETY: the kernel writes at most `bytes` bytes, which the array has.
        let count =
            unsafe { libc::read(self.descriptor.as_raw_fd(), messages.as_mut_ptr().cast(), bytes) };
        let Ok(count) = usize::try_from(count) else {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(()),
                _ => Err(error),
            };
        };
        for message in messages.iter().take(count / size_of::<sys::uffd_msg>()) {
            if u32::from(message.event) != sys::UFFD_EVENT_PAGEFAULT {
                continue;
            }
            // SAFETY: the event says that the union holds a page fault; all its bytes are initialized.
            let fault = unsafe { message.arg.pagefault };
            // SAFETY: the thread's id is the union's only member.
            let thread = unsafe { fault.feat.ptid };
            let is_write = fault.flags & u64::from(sys::UFFD_PAGEFAULT_FLAG_WRITE) != 0;
            events.push(FaultEvent { address: fault.address, is_write, thread });
        }
        Ok(())
    }

    /// Repeats a request that the kernel refuses while another thread changes the mappings.
    fn repeat(&self, mut once: impl FnMut() -> io::Result<()>) -> io::Result<()> {
        for _ in 0..REPETITION_LIMIT {
            match once() {
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                result => return result,
            }
        }
        Err(io::Error::from_raw_os_error(libc::EAGAIN))
    }

    fn request<T>(&self, request: u32, argument: &mut T) -> io::Result<()> {
        control(&self.descriptor, request, argument)
    }
}

/// A descriptor before its handshake, and its scope.
fn create(delivery: Delivery) -> Result<(OwnedFd, FaultScope), UserfaultError> {
    // The faulting thread itself cannot help while it is in a system call.
    if delivery == Delivery::Events {
        if let Ok(descriptor) = userfaultfd(0) {
            return Ok((descriptor, FaultScope::UserAndKernel));
        }
        if let Ok(descriptor) = from_device() {
            return Ok((descriptor, FaultScope::UserAndKernel));
        }
    }
    let user_only = c_int::try_from(sys::UFFD_USER_MODE_ONLY).unwrap_or_default();
    match userfaultfd(user_only) {
        Ok(descriptor) => Ok((descriptor, FaultScope::UserOnly)),
        // Kernels before 5.11 do not know the flag.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => userfaultfd(0)
            .map(|descriptor| (descriptor, FaultScope::UserOnly))
            .map_err(UserfaultError::Refused),
        Err(error) => Err(UserfaultError::Refused(error)),
    }
}

fn userfaultfd(flags: c_int) -> io::Result<OwnedFd> {
    let flags = flags | libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: the system call has no memory arguments.
    let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    owned(descriptor)
}

fn from_device() -> io::Result<OwnedFd> {
    let device = std::fs::File::open("/dev/userfaultfd")?;
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: the request takes flags, no memory.
    let descriptor = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW.into(), flags) };
    owned(descriptor.into())
}

fn owned(descriptor: libc::c_long) -> io::Result<OwnedFd> {
    match c_int::try_from(descriptor) {
        // SAFETY: the kernel just created the descriptor, and nobody else owns it.
        Ok(descriptor) if descriptor >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Agrees on the features; returns those that the kernel knows.
fn handshake(descriptor: &OwnedFd, features: u64) -> io::Result<u64> {
    let mut argument = sys::uffdio_api { api: sys::UFFD_API.into(), features, ioctls: 0 };
    control(descriptor, request::UFFDIO_API, &mut argument)?;
    Ok(argument.features)
}

fn control<T>(descriptor: &OwnedFd, request: u32, argument: &mut T) -> io::Result<()> {
    // SAFETY: the callers in this file pass the structure that the request is declared with. The addresses
    // in it are of ranges that the descriptor's owner mapped, or else the kernel refuses them.
    let result = unsafe {
        libc::ioctl(descriptor.as_raw_fd(), request.into(), std::ptr::from_mut(argument))
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
