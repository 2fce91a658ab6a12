//! The soft pipeline over sockets, in its own thread.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, TryRecvError, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use bluebridge_p4::pipeline::{Counter, Entry, Impairment, Key, SwitchPort};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    io::Errno,
};

use super::{
    Offload, Pipeline,
    wires::{Wire, Wires},
};
use crate::{
    dataplane::{
        CloneSession, DataPlane, Drops, ImpairmentError, InstalledEntry, PacketIn, PlaneError,
        PortError, PortStatus, Table, TableError, check_port,
    },
    packet_socket::{BATCH, Batch},
};

/// How long a control request may take.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Control requests that may wait; the agent sends them one by one.
const COMMANDS_MAX: usize = 8;
/// The longest sleep without a check.
const SLEEP_MAX: Duration = Duration::from_secs(1);

type Command = Box<dyn FnOnce(&mut Worker) + Send>;

/// A soft switch: a thread that owns a [`Pipeline`] and a socket per port.
///
/// Its interfaces are those of the network namespace of the thread that starts it. It needs
/// `CAP_NET_RAW` there, which a user namespace gives. A port named `unix:PATH` needs no privileges: its link is a
/// pair of sockets ([`SocketLink`](crate::socket_link::SocketLink)). Dropping it ends the thread.
#[derive(Debug)]
pub struct Switch {
    commands: Option<SyncSender<Command>>,
    wake: Arc<OwnedFd>,
    events: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Switch {
    /// Starts a switch without ports that polls for `spin` after the last frame before it sleeps.
    ///
    /// # Errors
    /// If the system cannot create a thread or event descriptors.
    pub fn start(spin: Duration) -> Result<Self, PlaneError> {
        let failed = |source| PlaneError::Io { doing: "start the soft switch".to_owned(), source };
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let wake = Arc::new(eventfd(0, flags).map_err(|e| failed(e.into()))?);
        let events = Arc::new(eventfd(0, flags).map_err(|e| failed(e.into()))?);
        let (commands, requests) = sync_channel(COMMANDS_MAX);
        let worker = Worker {
            pipeline: Pipeline::new(Instant::now()),
            wires: Wires::default(),
            batch: Batch::new(),
            requests,
            wake: Arc::clone(&wake),
            events: Arc::clone(&events),
            spin,
        };
        let thread = thread::Builder::new()
            .name("soft-switch".to_owned())
            .spawn(move || worker.run())
            .map_err(failed)?;
        Ok(Self { commands: Some(commands), wake, events, thread: Some(thread) })
    }

    /// Runs a request in the data path's thread and waits for its result.
    fn call<T: Send + 'static>(
        &self,
        request: impl FnOnce(&mut Worker) -> T + Send + 'static,
    ) -> Result<T, PlaneError> {
        let (sender, receiver) = sync_channel(1);
        let command: Command = Box::new(move |worker| {
            // The caller may have given up waiting.
            let _ = sender.send(request(worker));
        });
        let commands = self.commands.as_ref().ok_or(PlaneError::Gone)?;
        commands.try_send(command).map_err(|_| PlaneError::Gone)?;
        signal(&self.wake);
        receiver.recv_timeout(RESPONSE_TIMEOUT).map_err(|_| PlaneError::Gone)
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        self.commands = None;
        signal(&self.wake);
        if let Some(thread) = self.thread.take() {
            // The panic of the thread was already reported by its hook.
            let _ = thread.join();
        }
    }
}

/// The thread's side.
struct Worker {
    pipeline: Pipeline,
    wires: Wires,
    batch: Batch,
    requests: Receiver<Command>,
    wake: Arc<OwnedFd>,
    events: Arc<OwnedFd>,
    spin: Duration,
}

impl Worker {
    fn run(mut self) {
        let mut last_frame = Instant::now();
        loop {
            let now = Instant::now();
            if !self.execute_requests(now) {
                return;
            }
            let had_events = !self.pipeline.events.is_empty();
            if self.switch_frames(now) {
                last_frame = now;
            }
            self.pipeline.handle_timeout(now, &mut &self.wires);
            if !had_events && !self.pipeline.events.is_empty() {
                signal(&self.events);
            }
            if now.duration_since(last_frame) >= self.spin {
                self.sleep(now);
            }
        }
    }

    /// Executes waiting requests; false when no caller is left.
    fn execute_requests(&mut self, now: Instant) -> bool {
        loop {
            match self.requests.try_recv() {
                Ok(request) => {
                    self.pipeline.now = self.pipeline.now.max(now);
                    request(self);
                }
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    /// Processes one batch of each port; false if there was none.
    fn switch_frames(&mut self, now: Instant) -> bool {
        let mut seen = false;
        for Wire { port, socket, .. } in self.wires.iter() {
            // A socket's error (its interface went down) is reported once and needs no action.
            let count = socket.receive(&mut self.batch).unwrap_or(0);
            seen |= count > 0;
            for received in self.batch.frames() {
                if received.is_tagged {
                    self.pipeline.refuse_tagged();
                } else if received.is_cut {
                    self.pipeline.refuse_malformed();
                } else {
                    let offload = Offload(received.offload);
                    let mut out = &self.wires;
                    self.pipeline.process(now, *port, received.frame, offload, &mut out);
                }
            }
            debug_assert!(count <= BATCH, "a batch is bounded");
        }
        seen
    }

    /// Sleeps until a frame, a request or a deadline.
    fn sleep(&self, now: Instant) {
        let until = self
            .pipeline
            .poll_timeout()
            .map_or(SLEEP_MAX, |due| due.saturating_duration_since(now).min(SLEEP_MAX));
        let timeout = Timespec {
            tv_sec: i64::try_from(until.as_secs()).unwrap_or(0),
            tv_nsec: i64::from(until.subsec_nanos()),
        };
        let sockets = self.wires.iter().map(|wire| wire.socket.as_fd());
        let mut fds: Vec<_> = sockets
            .chain([self.wake.as_fd()])
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        // An interrupted sleep is only a shorter one.
        let _ = poll(&mut fds, Some(&timeout));
        drain(&self.wake);
    }

    fn add_port(&mut self, port: SwitchPort, name: &str) -> Result<(), PortError> {
        check_port(port)?;
        let found = Wires::look_up(port, name)?;
        match self.wires.has(port, &found)? {
            Some(true) => return Ok(()),
            Some(false) => self.remove_port(port)?,
            None => {}
        }
        let socket = Wires::open(&found)?;
        self.pipeline.add_link(port, found.link.clone())?;
        self.wires.add(port, found, socket);
        Ok(())
    }

    fn remove_port(&mut self, port: SwitchPort) -> Result<(), PortError> {
        self.wires.remove(port);
        self.pipeline.remove_port(port)
    }

    fn poll(&mut self, limit: usize) -> Result<Vec<PacketIn>, PlaneError> {
        let mut out = Vec::new();
        self.pipeline.poll(limit, &mut out)?;
        if self.pipeline.events.is_empty() {
            drain(&self.events);
        }
        Ok(out)
    }
}

/// Makes an event descriptor readable.
fn signal(fd: &OwnedFd) {
    // It fails only if it is full, and then it is readable as well.
    let _: Result<usize, Errno> = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Makes an event descriptor unreadable.
fn drain(fd: &OwnedFd) {
    // It fails only if it is already empty.
    let _: Result<usize, Errno> = rustix::io::read(fd, &mut [0u8; 8]);
}

impl DataPlane for Switch {
    fn name(&self) -> &'static str {
        "soft"
    }

    fn insert(&mut self, entry: &Entry) -> Result<(), TableError> {
        let entry = entry.clone();
        self.call(move |worker| worker.pipeline.insert(&entry))?
    }

    fn modify(&mut self, entry: &Entry) -> Result<(), TableError> {
        let entry = entry.clone();
        self.call(move |worker| worker.pipeline.modify(&entry))?
    }

    fn delete(&mut self, key: &Key) -> Result<(), TableError> {
        let key = *key;
        self.call(move |worker| worker.pipeline.delete(&key))?
    }

    fn entry(&mut self, key: &Key) -> Result<InstalledEntry, TableError> {
        let key = *key;
        self.call(move |worker| worker.pipeline.entry(&key))?
    }

    fn entries(&mut self, table: Table) -> Result<Vec<InstalledEntry>, PlaneError> {
        self.call(move |worker| worker.pipeline.entries(table))?
    }

    fn set_counter(&mut self, key: &Key, counter: Counter) -> Result<(), TableError> {
        let key = *key;
        self.call(move |worker| worker.pipeline.set_counter(&key, counter))?
    }

    fn set_flood_group(&mut self, group: Option<u16>) -> Result<(), TableError> {
        self.call(move |worker| worker.pipeline.set_flood_group(group))?
    }

    fn flood_group(&mut self) -> Result<Option<u16>, PlaneError> {
        self.call(|worker| worker.pipeline.flood_group())?
    }

    fn set_group(&mut self, group: u16, ports: &[SwitchPort]) -> Result<(), TableError> {
        let ports = ports.to_vec();
        self.call(move |worker| worker.pipeline.set_group(group, &ports))?
    }

    fn delete_group(&mut self, group: u16) -> Result<(), TableError> {
        self.call(move |worker| worker.pipeline.delete_group(group))?
    }

    fn groups(&mut self) -> Result<Vec<(u16, Vec<SwitchPort>)>, PlaneError> {
        self.call(|worker| worker.pipeline.groups())?
    }

    fn set_clone_session(&mut self, session: Option<CloneSession>) -> Result<(), PlaneError> {
        self.call(move |worker| worker.pipeline.set_clone_session(session))?
    }

    fn clone_session(&mut self) -> Result<Option<CloneSession>, PlaneError> {
        self.call(|worker| worker.pipeline.clone_session())?
    }

    fn pipeline_cookie(&mut self) -> Result<Option<u64>, PlaneError> {
        self.call(|worker| worker.pipeline.pipeline_cookie())?
    }

    fn clear(&mut self, pipeline_cookie: Option<u64>) -> Result<(), PlaneError> {
        self.call(move |worker| worker.pipeline.clear(pipeline_cookie))?
    }

    fn drops(&mut self) -> Result<Drops, PlaneError> {
        self.call(|worker| worker.pipeline.drops())?
    }

    fn add_port(&mut self, port: SwitchPort, interface: &str) -> Result<(), PortError> {
        let name = interface.to_owned();
        self.call(move |worker| worker.add_port(port, &name))?
    }

    fn remove_port(&mut self, port: SwitchPort) -> Result<(), PortError> {
        self.call(move |worker| worker.remove_port(port))?
    }

    fn ports(&mut self) -> Result<Vec<PortStatus>, PlaneError> {
        self.call(|worker| worker.pipeline.ports())?
    }

    fn packet_out(&mut self, port: SwitchPort, frame: &[u8]) -> Result<(), PortError> {
        let frame = frame.to_vec();
        self.call(move |worker| worker.pipeline.packet_out(port, &frame))?
    }

    fn poll(&mut self, limit: usize, out: &mut Vec<PacketIn>) -> Result<(), PlaneError> {
        out.extend(self.call(move |worker| worker.poll(limit))??);
        Ok(())
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.events.as_fd())
    }

    fn events_lost(&mut self) -> Result<u64, PlaneError> {
        self.call(|worker| worker.pipeline.events_lost())?
    }

    fn set_impairment(
        &mut self,
        port: SwitchPort,
        impairment: Impairment,
    ) -> Result<(), ImpairmentError> {
        self.call(move |worker| worker.pipeline.set_impairment(port, impairment))?
    }
}
