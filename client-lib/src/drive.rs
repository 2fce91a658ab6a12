//! Driving the requester over the carrier, on the calling thread.

use core::time::Duration;
use std::sync::Arc;

use arrayvec::ArrayVec;
use bluebridge_protocol::{
    Instant,
    requester::{Answer, Buffers, Operation, Requester, StartError, Transmit},
};
use bluebridge_transport::{Outgoing, Timestamp, Transport, Wait};
use bluebridge_wire::{Datagram, Pointer, UDP_PORT};

use crate::{error::Error, many::Closing, transfer};

/// Datagrams handed to the carrier at once.
const BATCH: usize = 64;

/// How long a carrier that takes nothing is asked again before the datagrams count as lost.
const BUSY_LIMIT: Duration = Duration::from_millis(2);

/// What a call has to do: transfers, each of one or more operations.
pub(crate) trait Work: Buffers {
    /// How many transfers there are.
    fn transfer_count(&self) -> usize;

    /// How many operations a transfer has.
    ///
    /// # Errors
    /// If it cannot be begun.
    fn line_count(&self, transfer: usize) -> Result<u32, Error>;

    /// One of them, and the memory it is about.
    ///
    /// # Errors
    /// If it cannot be begun.
    fn operation(&self, transfer: usize, line: u32) -> Result<(Operation, Option<Pointer>), Error>;

    /// An operation ended.
    fn settle(&mut self, transfer: usize, result: Result<Answer, Error>);

    /// Whether the rest of a transfer is of no use any more.
    fn is_failed(&self, transfer: usize) -> bool;
}

/// The requester and its carrier.
pub(crate) struct Driver<T> {
    pub(crate) transport: T,
    pub(crate) requester: Requester,
    pub(crate) spin: Duration,
    /// Datagrams that no requester could be found for: damaged, or no datagrams of ours.
    pub(crate) malformed_count: u64,
    /// Datagrams that the carrier was too busy for; they are sent again when their timer runs out.
    pub(crate) unsent_count: u64,
    /// What the carrier said when it last refused a datagram.
    refusal: Option<Arc<str>>,
}

/// Where a call stands in its work.
struct Cursor {
    transfer: usize,
    line: u32,
    in_flight: usize,
}

impl<T: Transport> Driver<T> {
    pub(crate) fn new(transport: T, requester: Requester, spin: Duration) -> Self {
        Self { transport, requester, spin, malformed_count: 0, unsent_count: 0, refusal: None }
    }

    pub(crate) fn now(&self) -> Instant {
        Instant::from_nanos(self.transport.now().as_nanos())
    }

    /// Does all the work; each operation's end is told to it.
    ///
    /// # Errors
    /// If the carrier failed for good; whatever was under way is given up.
    pub(crate) fn run(&mut self, work: &mut impl Work, deadline: Duration) -> Result<(), Error> {
        let mut now = self.now();
        let deadline = now + deadline;
        let mut cursor = Cursor { transfer: 0, line: 0, in_flight: 0 };
        loop {
            self.start(now, &mut cursor, work, deadline);
            self.flush(now, work)?;
            if self.complete(&mut cursor, work) {
                continue;
            }
            if cursor.in_flight == 0 && cursor.transfer >= work.transfer_count() {
                return Ok(());
            }
            now = self.wait(work)?;
        }
    }

    /// Starts operations until the work or the room for them is used up.
    fn start(&mut self, now: Instant, cursor: &mut Cursor, work: &mut impl Work, until: Instant) {
        while cursor.transfer < work.transfer_count() {
            let transfer = cursor.transfer;
            let lines = work.line_count(transfer);
            let done = lines.as_ref().is_ok_and(|lines| cursor.line >= *lines);
            if done || work.is_failed(transfer) {
                cursor.transfer += 1;
                cursor.line = 0;
                continue;
            }
            let operation = lines.and_then(|_| work.operation(transfer, cursor.line));
            let (operation, _) = match operation {
                Ok(operation) => operation,
                Err(error) => {
                    work.settle(transfer, Err(error));
                    continue;
                }
            };
            let token = transfer::token(transfer, cursor.line);
            match self.requester.start_until(now, operation, token, until) {
                Ok(_) => {
                    cursor.line += 1;
                    cursor.in_flight += 1;
                }
                Err(StartError::Full | StartError::Servers) if cursor.in_flight > 0 => return,
                Err(error) => work.settle(transfer, Err(Error::of_start(error))),
            }
        }
    }

    /// Takes what ended; whether anything did.
    fn complete(&mut self, cursor: &mut Cursor, work: &mut impl Work) -> bool {
        let before = cursor.in_flight;
        while let Some(completion) = self.requester.poll_completion() {
            cursor.in_flight = cursor.in_flight.saturating_sub(1);
            let (transfer, line) = transfer::untoken(completion.token);
            let result = completion.result.map_err(|failure| {
                let pointer = work.operation(transfer, line).ok().and_then(|(_, pointer)| pointer);
                Error::of_failure(failure, pointer, self.refusal.as_ref())
            });
            work.settle(transfer, result);
        }
        cursor.in_flight < before
    }

    /// Hands everything that is to be sent to the carrier.
    fn flush(&mut self, now: Instant, work: &impl Work) -> Result<(), Error> {
        loop {
            let mut batch = ArrayVec::<Transmit<'_>, BATCH>::new();
            while !batch.is_full()
                && let Some(transmit) = self.requester.poll_transmit(now, work)
            {
                batch.push(transmit);
            }
            if batch.is_empty() {
                return Ok(());
            }
            let outgoing: ArrayVec<Outgoing<'_>, BATCH> = batch.iter().map(outgoing).collect();
            self.send(now, &batch, &outgoing)?;
            if !batch.is_full() {
                return Ok(());
            }
        }
    }

    fn send(
        &mut self,
        now: Instant,
        batch: &[Transmit<'_>],
        outgoing: &[Outgoing<'_>],
    ) -> Result<(), Error> {
        let mut sent = 0;
        let mut busy_since: Option<Timestamp> = None;
        while let (Some(rest), Some(next)) = (outgoing.get(sent..), batch.get(sent)) {
            match self.transport.transmit(rest) {
                Ok(0) => {
                    let moment = self.transport.now();
                    let since = *busy_since.get_or_insert(moment);
                    if moment.saturating_since(since) > BUSY_LIMIT {
                        self.unsent_count += rest.len() as u64;
                        return Ok(());
                    }
                    std::thread::yield_now();
                }
                Ok(count) => {
                    sent += count;
                    busy_since = None;
                }
                Err(bluebridge_transport::TransmitError::Socket(error)) => {
                    return Err(self.carrier_failed(&error.to_string()));
                }
                Err(error) => {
                    self.refusal = Some(Arc::from(error.to_string()));
                    let same = batch.iter().skip(sent);
                    let same = same.take_while(|other| other.origin == next.origin).count();
                    let count = u32::try_from(same).unwrap_or(u32::MAX);
                    self.requester.transmit_refused(now, next.origin, count);
                    sent += same;
                }
            }
        }
        Ok(())
    }

    /// Waits for datagrams or the next timer, and takes both in.
    fn wait(&mut self, work: &mut impl Work) -> Result<Instant, Error> {
        let timer = self.requester.poll_timeout().map_or(0, Instant::as_nanos);
        let wait = Wait::spinning(self.spin, Timestamp::from_nanos(timer));
        let count = match self.transport.receive(wait) {
            Ok(count) => count,
            Err(error) => return Err(self.carrier_failed(&error.to_string())),
        };
        let now = Instant::from_nanos(self.transport.heard_at().as_nanos());
        for index in 0..count {
            let incoming = self.transport.incoming(index);
            let datagram = Datagram::parse(incoming.source, incoming.destination, incoming.payload);
            match datagram {
                Ok(datagram) if incoming.source_port == UDP_PORT => {
                    self.requester.handle_datagram(now, &datagram, work);
                }
                _ => self.malformed_count += 1,
            }
        }
        self.requester.handle_timeout(now);
        Ok(now)
    }

    /// Gives everything up; each server is told once, and none is waited for.
    pub(crate) fn leave(&mut self) {
        self.requester.leave();
        let now = self.now();
        // What is not sent ends at the server by its idleness.
        let _ = self.flush(now, &Closing(Vec::new()));
    }

    fn carrier_failed(&mut self, reason: &str) -> Error {
        self.requester.cancel_all();
        Error::Carrier { reason: Arc::from(reason) }
    }
}

pub(crate) fn outgoing<'a>(transmit: &'a Transmit<'a>) -> Outgoing<'a> {
    Outgoing {
        source: transmit.source,
        destination: transmit.destination,
        destination_port: UDP_PORT,
        header: transmit.head(),
        data: transmit.data,
    }
}
