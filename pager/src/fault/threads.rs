//! Handler threads: they read fault events from the descriptor, and sleep while there are none.
#![allow(unsafe_code, reason = "a signal is sent to a thread whose page is lost")]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::error::Error;
use crate::kernel::PAGE_BYTES;
use crate::kernel::userfault::FaultEvent;
use crate::page_table::State;
use crate::pager::{Access, Pager, Patience, Resolution};
use crate::report;

/// Events that a thread takes at once; others can be taken by the other threads.
const EVENT_COUNT: usize = 4;

/// Threads that resolve the faults of a pager until this is dropped.
pub(crate) struct Handlers {
    stop: Arc<OwnedFd>,
    threads: Vec<JoinHandle<()>>,
}

impl Handlers {
    pub(crate) fn start(pager: &Arc<Pager>, count: usize) -> Result<Self, Error> {
        let system = |what| move |error: std::io::Error| Error::System { what, error };
        let stop = eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|error| system("create an eventfd")(error.into()))?;
        let mut handlers = Self { stop: Arc::new(stop), threads: Vec::new() };
        for number in 0..count {
            let pager = Arc::clone(pager);
            let stop = Arc::clone(&handlers.stop);
            let thread =
                super::super::spawn(&format!("bb-fault-{number}"), move || serve(&pager, &stop))
                    .map_err(system("start a handler thread"))?;
            handlers.threads.push(thread);
        }
        Ok(handlers)
    }
}

impl Drop for Handlers {
    fn drop(&mut self) {
        // The descriptor's count cannot overflow by one write.
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        for thread in self.threads.drain(..) {
            // A thread that panicked has ended too.
            let _ = thread.join();
        }
    }
}

fn serve(pager: &Pager, stop: &OwnedFd) {
    let mut events = Vec::with_capacity(EVENT_COUNT);
    while !pager.stop.load(Ordering::Acquire) {
        events.clear();
        if let Err(error) = pager.memory.userfault().read(&mut events, EVENT_COUNT) {
            // Nobody would resolve the faults any more.
            panic!("cannot read page faults: {error}");
        }
        if events.is_empty() {
            let userfault = pager.memory.userfault().as_fd();
            let mut descriptors =
                [PollFd::new(&userfault, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
            // A signal or an error is a reason to look again.
            let _ = poll(&mut descriptors, None);
        }
        for event in &events {
            resolve(pager, event);
        }
    }
}

fn resolve(pager: &Pager, event: &FaultEvent) {
    let Some(page) = pager.memory.page_at(event.address) else { return };
    let access = if event.is_write { Access::Write } else { Access::Read };
    match pager.fault(page, access, event.thread.into(), Patience::Defer) {
        Ok(Resolution::Installed | Resolution::Deferred | Resolution::Postponed) => {}
        Ok(Resolution::Present) => {
            // Nobody can be woken who does not wait.
            let _ = pager.memory.wake(page);
        }
        Err(error) => {
            let start = event.address / PAGE_BYTES as u64 * PAGE_BYTES as u64;
            report::failed(start, &error);
            pager.give_up(page, &error);
            // A page that is not lost may be another thread's now; only who claimed a page changes what the kernel has.
            let is_lost = pager.table.load(page).state() == State::Lost;
            if !is_lost || pager.memory.poison(page).is_err() {
                // The kernel does not make the access fail, so the thread gets the signal from here.
                interrupt(event.thread);
            }
            let _ = pager.memory.wake(page);
        }
    }
}

/// Sends SIGBUS to a thread of this process.
fn interrupt(thread: u32) {
    let Ok(thread) = libc::pid_t::try_from(thread) else { return };
    let process = rustix::process::getpid().as_raw_nonzero().get();
    // SAFETY: the system call has no memory arguments; a thread that is gone is an error.
    unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGBUS) };
}
