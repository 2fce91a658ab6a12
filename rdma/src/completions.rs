//! A completion queue, and how a thread waits for it.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::error::VerbError;
use crate::memory::Domain;
use crate::sys;

/// Completions that are taken from the device at a time.
const BATCH: usize = 16;

type PollCq = unsafe extern "C" fn(*mut sys::CompletionQueue, c_int, *mut sys::Completion) -> c_int;
type RequestNotify = unsafe extern "C" fn(*mut sys::CompletionQueue, c_int) -> c_int;

/// A completion queue of one queue pair, and the channel by which it wakes a thread.
#[derive(Debug)]
pub(crate) struct Completions {
    pub(crate) cq: NonNull<sys::CompletionQueue>,
    channel: NonNull<sys::CompletionChannel>,
    poll_cq: PollCq,
    request_notify: RequestNotify,
    /// What was taken from the device, and how much of it was passed on.
    batch: [sys::Completion; BATCH],
    taken: usize,
    passed_on: usize,
    /// The number of the queue pair, for an event of the queue; `None` only in `drop`.
    number: Option<Arc<AtomicU32>>,
    pub(crate) domain: Arc<Domain>,
}

impl Completions {
    pub(crate) fn new(domain: &Arc<Domain>, capacity: u32) -> Result<Self, VerbError> {
        let (library, context) = (domain.context.library, domain.context.raw.as_ptr());
        // SAFETY: the device is open.
        let channel = unsafe { (library.create_comp_channel)(context) };
        let channel =
            NonNull::new(channel).ok_or_else(|| VerbError::last("ibv_create_comp_channel"))?;
        let capacity = c_int::try_from(capacity).unwrap_or(c_int::MAX);
        let number = Arc::new(AtomicU32::new(0));
        let user: *mut c_void = Arc::as_ptr(&number).cast_mut().cast();
        // SAFETY: the device is open, and the channel is one of it, which stays until after the queue.
        let cq = unsafe { (library.create_cq)(context, capacity, user, channel.as_ptr(), 0) };
        let Some(cq) = NonNull::new(cq) else {
            let error = VerbError::last("ibv_create_cq");
            // SAFETY: the channel has no queue.
            unsafe { (library.destroy_comp_channel)(channel.as_ptr()) };
            return Err(error);
        };
        // SAFETY: the device is open.
        let operations = unsafe { &(*context).operations };
        let completions = Self {
            cq,
            channel,
            poll_cq: operations.poll_cq.unwrap_or(no_poll_cq),
            request_notify: operations.req_notify_cq.unwrap_or(no_request_notify),
            batch: [sys::Completion::default(); BATCH],
            taken: 0,
            passed_on: 0,
            number: Some(number),
            domain: Arc::clone(domain),
        };
        // An event must be waited for with a deadline, which the library does not do.
        rustix::io::ioctl_fionbio(completions.fd(), true)
            .map_err(|error| VerbError { verb: "ioctl", source: error.into() })?;
        Ok(completions)
    }

    /// Tells which queue pair has lost its completions if the queue fails.
    pub(crate) fn serve(&self, queue_pair: u32) {
        if let Some(number) = &self.number {
            number.store(queue_pair, Ordering::Relaxed);
        }
    }

    /// The queue pair of a queue, by an event of the device.
    ///
    /// # Safety
    /// The queue is one that [`Self::new`] made, and has not been destroyed.
    pub(crate) unsafe fn queue_pair_of(cq: *mut sys::CompletionQueue) -> u32 {
        // SAFETY: the queue exists, as the caller promises, and this field does not change.
        let user = unsafe { (*cq).user };
        // SAFETY: it is what the queue was made with, and stays until after the queue.
        let number = unsafe { &*user.cast_const().cast::<AtomicU32>() };
        number.load(Ordering::Relaxed)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel exists until `self` is dropped.
        let fd = unsafe { (*self.channel.as_ptr()).fd };
        // SAFETY: the descriptor is open as long as the channel exists.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    pub(crate) fn next(&mut self) -> Result<Option<sys::Completion>, VerbError> {
        if self.passed_on == self.taken {
            let most = c_int::try_from(BATCH).unwrap_or(c_int::MAX);
            // SAFETY: the queue exists, and so many completions are writable.
            let taken = unsafe { (self.poll_cq)(self.cq.as_ptr(), most, self.batch.as_mut_ptr()) };
            (self.taken, self.passed_on) = (0, 0);
            self.taken = usize::try_from(taken).map_err(|_| VerbError {
                verb: "ibv_poll_cq",
                source: io::Error::other("the device failed"),
            })?;
        }
        let next = self.batch.get(..self.taken).and_then(|batch| batch.get(self.passed_on));
        self.passed_on += usize::from(next.is_some());
        Ok(next.copied())
    }

    pub(crate) fn arm(&mut self) -> Result<(), VerbError> {
        // SAFETY: the queue exists.
        let code = unsafe { (self.request_notify)(self.cq.as_ptr(), 0) };
        VerbError::check("ibv_req_notify_cq", code)
    }

    pub(crate) fn sleep(&self, deadline: Instant) -> Result<(), VerbError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).ok();
        let mut fds = [PollFd::new(self, PollFlags::IN)];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(VerbError { verb: "poll", source: error.into() }),
        }
    }

    pub(crate) fn clear_events(&mut self) -> Result<(), VerbError> {
        let library = self.domain.context.library;
        loop {
            let (mut cq, mut user) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the channel exists, and both places are writable.
            let code = unsafe {
                (library.get_cq_event)(self.channel.as_ptr(), &raw mut cq, &raw mut user)
            };
            if code != 0 {
                let error = VerbError::last("ibv_get_cq_event");
                return match error.source.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(()),
                    _ => Err(error),
                };
            }
            // SAFETY: the event is of this queue, the only one of the channel, and is acknowledged once.
            unsafe { (library.ack_cq_events)(self.cq.as_ptr(), 1) };
        }
    }
}

impl AsFd for Completions {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd()
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        let library = self.domain.context.library;
        // SAFETY: the queue exists, and no thread uses it. If its queue pair could not be destroyed, this fails, and
        // both stay until the process ends.
        if unsafe { (library.destroy_cq)(self.cq.as_ptr()) } == 0 {
            // SAFETY: the channel has no queue any more.
            unsafe { (library.destroy_comp_channel)(self.channel.as_ptr()) };
        } else {
            // The device may still report an event of it.
            std::mem::forget(self.number.take());
        }
    }
}

// For a driver that lacks an operation, which none does.

unsafe extern "C" fn no_poll_cq(
    _: *mut sys::CompletionQueue,
    _: c_int,
    _: *mut sys::Completion,
) -> c_int {
    -1
}

unsafe extern "C" fn no_request_notify(_: *mut sys::CompletionQueue, _: c_int) -> c_int {
    libc::EOPNOTSUPP
}
