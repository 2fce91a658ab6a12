//! One connection: negotiation, then rounds. A round takes the requests that have arrived, executes them together, and
//! sends their replies.

use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use bluebridge::{Client, Transport};
use bluebridge_transport::{Polled, Spin};

use super::socket::{Ready, Socket, await_readable, await_writable};
use super::{END_DEADLINE, Stop};
use crate::device::{Disk, Failure, Operation, Task};
use crate::nbd::{
    Command, Errno, Export, Negotiation, OPTION_BYTES_MAX, Parsed, Progress, REQUEST_BYTES,
    ReplyHead, Transmission, Violation,
};

/// Requests of a connection that are executed at once.
pub const IN_FLIGHT: usize = 128;
/// What a client may do with its connection, which has a thread to itself.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How long it may take until it has chosen an export.
    pub negotiation: Duration,
    /// How long it may take from the first byte of a request to the last.
    pub request: Duration,
    /// How long it may take nothing of the replies to its requests.
    pub replies: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            negotiation: Duration::from_secs(10),
            request: Duration::from_secs(120),
            replies: Duration::from_secs(120),
        }
    }
}

/// Bytes of requests without data that are taken at once.
const HEADS_BYTES: usize = 64 << 10;
/// Polls between two yields.
const POLLS: u32 = 8;

/// How a connection ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum End {
    /// The client ended it.
    Client,
    /// The server stops.
    Stopped,
}

/// Why a connection was closed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Closed {
    #[error("the client took none of its replies for {0:?}")]
    Deaf(Duration),
    #[error("the client chose no export within {0:?}")]
    Slow(Duration),
    #[error("the client did not send the rest of a request within {0:?}")]
    Unfinished(Duration),
    #[error("the server stopped, and the client did not take all its replies")]
    Stopped,
    #[error("the connection failed: {0}")]
    Socket(#[from] io::Error),
    #[error(transparent)]
    Violation(#[from] Violation),
}

impl Closed {
    /// Whether a client just went away, as some do instead of saying so.
    pub(super) fn is_of_client(&self) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};
        let Self::Socket(error) = self else { return false };
        matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset)
    }
}

/// The memory of one thread, for one connection after the other.
#[derive(Debug)]
pub(super) struct Buffers {
    input: Box<[u8]>,
    output: Box<[u8]>,
    batch: Batch,
    heads: Vec<ReplyHead>,
}

/// Requests that are executed together.
#[derive(Debug)]
struct Batch {
    tasks: Vec<Task>,
    /// Of the tasks.
    cookies: Vec<u64>,
    refused: Vec<(u64, Errno)>,
    output_bytes: usize,
}

impl Buffers {
    pub(super) fn new(payload_bytes_max: u32) -> Self {
        let payload = usize::try_from(payload_bytes_max).unwrap_or(usize::MAX);
        // Negotiation uses it too.
        let input = payload.saturating_add(HEADS_BYTES).max(OPTION_BYTES_MAX as usize + 64);
        let batch = Batch {
            tasks: Vec::with_capacity(IN_FLIGHT),
            cookies: Vec::with_capacity(IN_FLIGHT),
            refused: Vec::with_capacity(IN_FLIGHT),
            output_bytes: 0,
        };
        Self {
            input: vec![0; input].into(),
            output: vec![0; payload].into(),
            batch,
            heads: Vec::with_capacity(IN_FLIGHT),
        }
    }
}

impl Batch {
    fn clear(&mut self) {
        self.tasks.clear();
        self.cookies.clear();
        self.refused.clear();
        self.output_bytes = 0;
    }

    /// Forgets what was replied to. TRIMs and WRITE_ZEROES may be left, which have no data.
    fn keep_unfinished(&mut self) {
        let mut tasks = self.tasks.iter();
        self.cookies.retain(|_| tasks.next().is_some_and(|task| task.result.is_none()));
        self.tasks.retain(|task| task.result.is_none());
        self.refused.clear();
        self.output_bytes = 0;
    }

    fn is_empty(&self) -> bool {
        self.tasks.is_empty() && self.refused.is_empty()
    }

    fn is_full(&self) -> bool {
        self.tasks.len() + self.refused.len() >= IN_FLIGHT
    }
}

/// What has arrived and was not processed.
#[derive(Debug, Default)]
struct Arrived {
    from: usize,
    until: usize,
    /// Bytes to read over before the next request.
    skipped: usize,
    /// The refusal that is sent then: clients expect no reply to a request that they have not sent as a whole.
    refusal: Option<(u64, Errno)>,
}

impl Arrived {
    fn make_room(&mut self, input: &mut [u8]) {
        if self.from > 0 {
            input.copy_within(self.from..self.until, 0);
            self.until -= self.from;
            self.from = 0;
        }
    }

    /// Whether a request has arrived in part.
    const fn is_partial(&self) -> bool {
        self.from < self.until || self.skipped > 0 || self.refusal.is_some()
    }
}

/// Serves a connection until its end.
pub(super) fn serve<T: Transport>(
    disk: &Disk,
    client: &mut Client<T>,
    socket: Socket,
    export: &Export,
    limits: Limits,
    buffers: &mut Buffers,
    stop: &Stop,
) -> Result<End, Closed> {
    let mut line = Line { socket, limits, stop, spin: Spin::learned(), left: None };
    let end = converse(disk, client, &mut line, export, buffers)?;
    if end == End::Stopped {
        // If it fails, the client has ended the connection itself.
        let _ = line.socket.end(Instant::now() + END_DEADLINE, &mut buffers.input);
    }
    Ok(end)
}

fn converse<T: Transport>(
    disk: &Disk,
    client: &mut Client<T>,
    line: &mut Line<'_>,
    export: &Export,
    buffers: &mut Buffers,
) -> Result<End, Closed> {
    let (limits, stop) = (line.limits, line.stop);
    // When the first byte of the request arrived that is not there as a whole.
    let mut partial: Option<Instant> = None;
    let mut arrived = Arrived::default();
    // The client sends no more.
    let mut is_last = false;
    let Some(rules) = negotiate(line, export, &mut buffers.input, &mut arrived)? else {
        return Ok(if line.is_stopping() { End::Stopped } else { End::Client });
    };
    // Of the connection before, requests may be left.
    buffers.batch.clear();
    loop {
        line.look_at_stop()?;
        if line.is_late() {
            return Err(Closed::Stopped);
        }
        if !is_last {
            let (input, output_bytes) = (&buffers.input, buffers.output.len());
            is_last = collect(&rules, input, output_bytes, &mut arrived, &mut buffers.batch)?;
        }
        if !buffers.batch.is_empty() {
            let (tasks, output) = (&mut buffers.batch.tasks, &mut buffers.output);
            disk.execute_some(client, tasks, &buffers.input, output, &stop.until);
            partial = None;
            reply(line, &rules, &buffers.batch, &mut buffers.heads, &buffers.output)?;
            buffers.batch.keep_unfinished();
            if !buffers.batch.is_empty() {
                // Others come between.
                if !is_last && !buffers.batch.is_full() {
                    line.take(&mut buffers.input, &mut arrived)?;
                }
                continue;
            }
            if is_last {
                return Ok(End::Client);
            }
        } else if is_last {
            return Ok(End::Client);
        } else {
            // What had arrived before the stop was answered.
            if line.left == Some(0) {
                return Ok(End::Stopped);
            }
            partial = arrived.is_partial().then(|| partial.unwrap_or_else(Instant::now));
            let until = partial.map(|since| since + limits.request);
            if until.is_some_and(|until| Instant::now() >= until) {
                return Err(Closed::Unfinished(limits.request));
            }
            match line.fill(&mut buffers.input, &mut arrived, until)? {
                Filled::Bytes => {}
                Filled::End => return Ok(End::Client),
                Filled::TimedOut => return Err(Closed::Unfinished(limits.request)),
            }
        }
    }
}

/// Lets the client choose the export; `None` if it ended, or if the server stops.
fn negotiate(
    line: &mut Line<'_>,
    export: &Export,
    input: &mut [u8],
    arrived: &mut Arrived,
) -> Result<Option<Transmission>, Closed> {
    let limit = line.limits.negotiation;
    let until = Instant::now() + limit;
    let mut output = Vec::with_capacity(4096);
    let mut negotiation = Negotiation::begin(export, &mut output);
    loop {
        line.look_at_stop()?;
        if Instant::now() >= until {
            return Err(Closed::Slow(limit));
        }
        let progress = match input.get(arrived.from..arrived.until) {
            Some(bytes) => negotiation.advance(bytes, &mut output)?,
            None => Progress::NeedsMore,
        };
        let chosen = match progress {
            Progress::Processed(count) => {
                arrived.from += count;
                continue;
            }
            Progress::Transmission(count, rules) => {
                arrived.from += count;
                Some(rules)
            }
            Progress::Ended | Progress::NeedsMore => None,
        };
        line.send(&mut [IoSlice::new(&output)])?;
        output.clear();
        let is_over = chosen.is_some() || matches!(progress, Progress::Ended);
        if is_over || line.is_stopping() {
            return Ok(chosen);
        }
        match line.fill(input, arrived, Some(until))? {
            Filled::Bytes => {}
            Filled::End => return Ok(None),
            Filled::TimedOut => return Err(Closed::Slow(limit)),
        }
    }
}

/// Takes the requests that have arrived as a whole, as many as fit; returns whether the client sends no more.
fn collect(
    rules: &Transmission,
    input: &[u8],
    output_bytes: usize,
    arrived: &mut Arrived,
    batch: &mut Batch,
) -> Result<bool, Violation> {
    while !batch.is_full() {
        let skipped = arrived.skipped.min(arrived.until - arrived.from);
        arrived.skipped -= skipped;
        arrived.from += skipped;
        if arrived.skipped > 0 {
            break;
        }
        if let Some(refusal) = arrived.refusal.take() {
            batch.refused.push(refusal);
            continue;
        }
        let Some(bytes) = input.get(arrived.from..arrived.until) else { break };
        let request = match rules.parse(bytes)? {
            Parsed::Incomplete => break,
            Parsed::Disconnect => return Ok(true),
            Parsed::Refused { cookie, errno, payload_bytes } => {
                arrived.from += REQUEST_BYTES;
                arrived.skipped = payload_bytes as usize;
                arrived.refusal = Some((cookie, errno));
                continue;
            }
            Parsed::Request(request) => request,
        };
        let length = request.length as usize;
        let begin = arrived.from + REQUEST_BYTES;
        let (operation, data) = match request.command {
            Command::Flush => (Operation::Flush, 0..0),
            Command::Trim => (Operation::Trim, 0..0),
            Command::WriteZeroes { no_hole } => (Operation::Zero { allocates: no_hole }, 0..0),
            Command::Read => {
                let begin = batch.output_bytes;
                if begin + length > output_bytes {
                    break;
                }
                batch.output_bytes += length;
                (Operation::Read, begin..begin + length)
            }
            Command::Write => {
                if begin + length > arrived.until {
                    break;
                }
                (Operation::Write, begin..begin + length)
            }
        };
        arrived.from = if operation == Operation::Write { begin + length } else { begin };
        batch.tasks.push(Task::new(operation, request.offset, request.length, data));
        batch.cookies.push(request.cookie);
    }
    Ok(false)
}

/// Sends the replies of a batch.
fn reply(
    line: &mut Line<'_>,
    rules: &Transmission,
    batch: &Batch,
    heads: &mut Vec<ReplyHead>,
    output: &[u8],
) -> Result<(), Closed> {
    heads.clear();
    for (cookie, errno) in &batch.refused {
        heads.push(rules.failed(*cookie, *errno));
    }
    let mut data = ArrayVec::<&[u8], IN_FLIGHT>::new();
    data.extend(batch.refused.iter().map(|_| &[][..]));
    for (task, cookie) in batch.tasks.iter().zip(&batch.cookies) {
        let (head, bytes): (_, &[u8]) = match (task.result, task.operation) {
            // It goes on.
            (None, _) => continue,
            (Some(Ok(())), Operation::Read) => {
                let hole = rules.hole(*cookie, task.offset, task.length).filter(|_| task.is_hole);
                match hole {
                    Some(hole) => (hole, &[]),
                    None => {
                        let bytes = output.get(task.data.clone()).unwrap_or_default();
                        (rules.data(*cookie, task.offset, task.length), bytes)
                    }
                }
            }
            (Some(Ok(())), _) => (rules.done(*cookie), &[]),
            (Some(Err(failure)), _) => (rules.failed(*cookie, errno(failure)), &[]),
        };
        heads.push(head);
        data.push(bytes);
    }
    let mut slices = ArrayVec::<IoSlice<'_>, { 2 * IN_FLIGHT }>::new();
    for (head, bytes) in heads.iter().zip(&data) {
        slices.push(IoSlice::new(head));
        if !bytes.is_empty() {
            slices.push(IoSlice::new(bytes));
        }
    }
    line.send(&mut slices)
}

const fn errno(failure: Failure) -> Errno {
    match failure {
        Failure::Lost | Failure::Silent | Failure::Unanswered => Errno::Io,
        Failure::NoSpace => Errno::NoSpace,
        Failure::Stopped => Errno::Shutdown,
    }
}

/// How waiting for bytes ended.
enum Filled {
    /// The connection goes on.
    Bytes,
    /// The client ended it.
    End,
    TimedOut,
}

/// A socket, and how it is waited for.
struct Line<'a> {
    socket: Socket,
    limits: Limits,
    stop: &'a Stop,
    spin: Spin,
    /// Once the server stops: the bytes that had arrived then and were not taken. Nothing is waited for any more.
    left: Option<usize>,
}

impl Line<'_> {
    const fn is_stopping(&self) -> bool {
        self.left.is_some()
    }

    /// Sees that the server stops.
    fn look_at_stop(&mut self) -> io::Result<()> {
        if self.left.is_none() && self.stop.until.get().is_some() {
            self.left = Some(self.socket.arrived()?);
        }
        Ok(())
    }

    /// Whether the server has stopped for too long.
    fn is_late(&self) -> bool {
        self.stop.until.get().is_some_and(|until| Instant::now() >= *until)
    }

    /// Sends all bytes, also while the server stops: they are replies to what was done.
    fn send(&mut self, mut bytes: &mut [IoSlice<'_>]) -> Result<(), Closed> {
        // Empty slices are not sent.
        IoSlice::advance_slices(&mut bytes, 0);
        while !bytes.is_empty() {
            match self.socket.send(bytes)? {
                Some(0) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                Some(count) => IoSlice::advance_slices(&mut bytes, count),
                None => self.await_room()?,
            }
            if self.is_late() && !bytes.is_empty() {
                return Err(Closed::Stopped);
            }
        }
        Ok(())
    }

    fn await_room(&self) -> Result<(), Closed> {
        let (socket, stop) = (self.socket.as_fd(), self.stop);
        let (event, timeout) = match stop.until.get() {
            None => (Some(stop.event.as_fd()), self.limits.replies),
            Some(until) => (None, until.saturating_duration_since(Instant::now())),
        };
        match await_writable(socket, event, timeout)? {
            Ready::TimedOut if event.is_none() => Err(Closed::Stopped),
            Ready::TimedOut => Err(Closed::Deaf(self.limits.replies)),
            Ready::Yes | Ready::Stop => Ok(()),
        }
    }

    /// Takes bytes that are there, if there is room for some. Whether the client has ended the connection is seen later.
    fn take(&mut self, input: &mut [u8], arrived: &mut Arrived) -> io::Result<()> {
        arrived.make_room(input);
        let room = input.get_mut(arrived.until..).unwrap_or_default();
        let limit = self.left.map_or(room.len(), |left| left.min(room.len()));
        let Some(room) = room.get_mut(..limit).filter(|room| !room.is_empty()) else {
            return Ok(());
        };
        let Some(count) = self.socket.receive(room)? else { return Ok(()) };
        arrived.until += count;
        self.left = self.left.map(|left| left.saturating_sub(count));
        Ok(())
    }

    /// Waits for bytes and takes them. It also returns if the server stops.
    fn fill(
        &mut self,
        input: &mut [u8],
        arrived: &mut Arrived,
        until: Option<Instant>,
    ) -> Result<Filled, Closed> {
        arrived.make_room(input);
        let Some(room) = input.get_mut(arrived.until..).filter(|room| !room.is_empty()) else {
            // No request is longer than the buffer.
            return Err(io::Error::from(io::ErrorKind::InvalidData).into());
        };
        loop {
            // What arrives after the stop is not taken.
            let limit = self.left.map_or(room.len(), |left| left.min(room.len()));
            let Some(room) = room.get_mut(..limit).filter(|room| !room.is_empty()) else {
                return Ok(Filled::Bytes);
            };
            if let Some(count) = self.poll(room)? {
                arrived.until += count;
                self.left = self.left.map(|left| left.saturating_sub(count));
                return Ok(if count > 0 { Filled::Bytes } else { Filled::End });
            }
            if self.is_stopping() {
                // There is nothing, whatever was said.
                self.left = Some(0);
                return Ok(Filled::Bytes);
            }
            let timeout = until.map(|until| until.saturating_duration_since(Instant::now()));
            match await_readable(self.socket.as_fd(), self.stop.event.as_fd(), timeout)? {
                Ready::Yes => {}
                // Once more, for what has arrived.
                Ready::Stop => self.look_at_stop()?,
                Ready::TimedOut => return Ok(Filled::TimedOut),
            }
        }
    }

    /// Looks for bytes for as long as is worth it.
    fn poll(&mut self, room: &mut [u8]) -> io::Result<Option<usize>> {
        let budget = self.spin.next();
        let began = Instant::now();
        let mut polls = 0;
        loop {
            let received = self.socket.receive(room)?;
            let polled = began.elapsed();
            if received.is_some() {
                self.spin.note(budget, Polled::Found(polled));
                return Ok(received);
            }
            if polled >= budget || self.is_stopping() {
                self.spin.note(budget, Polled::Nothing);
                return Ok(None);
            }
            polls += 1;
            if polls % POLLS == 0 {
                std::thread::yield_now();
            }
        }
    }
}
