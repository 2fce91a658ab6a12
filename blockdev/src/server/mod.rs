//! The NBD server: a fixed number of threads, each of which serves one connection at a time with a client of its own.
//!
//! All memory for requests is allocated before the first connection. A connection that cannot be served waits in the
//! socket's queue; requests that cannot be taken wait in the socket.

mod connection;
mod memory;
mod socket;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bluebridge::{Client, Transport};
use rustix::event::{EventfdFlags, eventfd};

pub use connection::{IN_FLIGHT, Limits};
pub use memory::{LockError, lock_memory, mark_as_io_thread};
pub use socket::Listener;

use crate::device::Disk;
use crate::nbd::Export;
use connection::{Buffers, End};
use socket::Ready;

/// The pause after a connection could not be accepted, for example because the process has too many open files.
const PAUSE: Duration = Duration::from_millis(100);

/// How long a server that stops goes on with what has arrived, whatever its clients do.
pub const STOP_DEADLINE: Duration = Duration::from_secs(4);
/// How long it then waits until a client has taken its last replies.
pub const END_DEADLINE: Duration = Duration::from_secs(1);

/// The order to stop.
#[derive(Debug)]
struct Stop {
    /// Readable from then on, for threads that wait.
    event: OwnedFd,
    /// When everything must have ended, for threads that do not.
    until: OnceLock<Instant>,
}

impl Stop {
    fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { event, until: OnceLock::new() })
    }

    fn set(&self) {
        let _ = self.until.set(Instant::now() + STOP_DEADLINE);
        // It stays readable, for all threads.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }
}

/// Threads that serve a disk.
#[derive(Debug)]
pub struct Server {
    stop: Arc<Stop>,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    /// Starts a thread for each client, all of which accept connections. Connections that exceed a limit are closed.
    ///
    /// # Errors
    /// If the system cannot start a thread, or has no file descriptor left; then none runs.
    pub fn start<T: Transport + Send + 'static>(
        disk: &Arc<Disk>,
        clients: Vec<Client<T>>,
        listener: Listener,
        export: Export,
        limits: Limits,
    ) -> io::Result<Self> {
        listener.set_nonblocking()?;
        let stop = Arc::new(Stop::new()?);
        let (listener, export) = (Arc::new(listener), Arc::new(export));
        let mut server = Self { stop, threads: Vec::with_capacity(clients.len()) };
        for (number, mut client) in clients.into_iter().enumerate() {
            let (disk, stop) = (Arc::clone(disk), Arc::clone(&server.stop));
            let (listener, export) = (Arc::clone(&listener), Arc::clone(&export));
            let mut buffers = Buffers::new(export.payload_bytes_max);
            let thread = std::thread::Builder::new().name(format!("disk-{number}"));
            let thread = thread.spawn(move || {
                if let Err(error) = mark_as_io_thread() {
                    tracing::debug!(%error, "the thread is not marked as one that frees memory");
                }
                accept(&disk, &mut client, &listener, &export, limits, &mut buffers, &stop);
                // No caller is left to receive an error.
                let _ = client.close();
            })?;
            server.threads.push(thread);
        }
        Ok(server)
    }

    /// Ends all connections: requests that have arrived are answered first, and no others are taken. Clients cannot make
    /// that longer than [`STOP_DEADLINE`] and [`END_DEADLINE`].
    pub fn stop(mut self) {
        self.join();
    }

    fn join(&mut self) {
        self.stop.set();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.join();
    }
}

/// Serves one connection after the other.
fn accept<T: Transport>(
    disk: &Disk,
    client: &mut Client<T>,
    listener: &Listener,
    export: &Export,
    limits: Limits,
    buffers: &mut Buffers,
    stop: &Stop,
) {
    loop {
        match socket::await_readable(listener.as_fd(), stop.event.as_fd(), None) {
            Ok(Ready::Yes) => {}
            Ok(Ready::Stop) => return,
            Ok(Ready::TimedOut) => continue,
            Err(error) => {
                tracing::warn!(%error, "cannot wait for connections");
                std::thread::sleep(PAUSE);
                continue;
            }
        }
        let socket = match listener.accept() {
            Ok(Some(socket)) => socket,
            // Another thread was faster.
            Ok(None) => continue,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                std::thread::sleep(PAUSE);
                continue;
            }
        };
        tracing::info!("a client has connected");
        match connection::serve(disk, client, socket, export, limits, buffers, stop) {
            Ok(End::Client) => tracing::info!("a client has disconnected"),
            Ok(End::Stopped) => return,
            Err(error) if error.is_of_client() => {
                tracing::info!(%error, "a client has disconnected")
            }
            Err(error) => tracing::warn!(%error, "a connection was closed"),
        }
    }
}
