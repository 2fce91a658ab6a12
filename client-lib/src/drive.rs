//! Driving the requester over the carrier, on the calling thread.

use core::time::Duration;
use std::sync::{Arc, OnceLock};

use arrayvec::ArrayVec;
use bluebridge_protocol::{
    Timestamp,
    requester::{Buffers, Requester, SealedRequest, StartError},
};
use bluebridge_transport::{Outgoing, Spin, TransmitError, Transport, Wait};
use bluebridge_wire::{Datagram, UDP_PORT};

use crate::{
    error::{Cause, Error},
    work::{self, Memory, NoMemory, Work},
};

/// Datagrams handed to the carrier at once.
const BATCH: usize = 64;

/// How long sending is retried with a carrier that takes nothing, before the datagrams count as lost.
const BUSY_LIMIT: Duration = Duration::from_millis(2);

/// The requester and its carrier.
pub(crate) struct Driver<T> {
    pub(crate) transport: T,
    pub(crate) requester: Requester,
    spin: Spin,
    /// Whether it spins.
    pub(crate) polls: bool,
    /// Received datagrams that belong to no requester: damaged, or not of this protocol.
    pub(crate) malformed_count: u64,
    /// Datagrams that the carrier was too busy to take; they are sent again when their timer expires.
    pub(crate) unsent_count: u64,
    /// The carrier's error when it last refused a datagram.
    refusal: Option<Cause>,
    /// Why the endpoint is no longer a member of the rack; `None` while it is one.
    pub(crate) expulsion: Option<Arc<OnceLock<Arc<str>>>>,
}

/// Where a call stands in its work: it moves forward only.
struct Cursor {
    task: usize,
    task_count: usize,
    /// The next operation of the task.
    number: u32,
    in_flight: usize,
}

impl Cursor {
    const fn is_at_end(&self) -> bool {
        self.task >= self.task_count
    }

    /// Skips the remaining operations of the task.
    const fn next_task(&mut self) {
        self.task += 1;
        self.number = 0;
    }
}

impl<T: Transport> Driver<T> {
    /// A driver that polls for a time before it sleeps; `None`: learned.
    pub(crate) fn new(transport: T, requester: Requester, spin: Option<Duration>) -> Self {
        Self {
            transport,
            requester,
            spin: spin.map_or_else(Spin::learned, Spin::fixed),
            polls: true,
            malformed_count: 0,
            unsent_count: 0,
            refusal: None,
            expulsion: None,
        }
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.transport.now()
    }

    /// Executes all operations of the work, and passes each result to it.
    ///
    /// # Errors
    /// If the carrier failed for good; operations in flight are abandoned.
    pub(crate) fn run(&mut self, work: &mut impl Work, deadline: Duration) -> Result<(), Error> {
        let mut now = self.now();
        let deadline = now + deadline;
        let task_count = work.task_count();
        let mut cursor = Cursor { task: 0, task_count, number: 0, in_flight: 0 };
        loop {
            self.start(now, &mut cursor, work, deadline);
            self.flush(now, &Memory(&mut *work))?;
            if self.complete(&mut cursor, work) {
                continue;
            }
            if cursor.in_flight == 0 && cursor.is_at_end() {
                return Ok(());
            }
            now = self.wait(work)?;
            if self.expelled().is_some() {
                // The switch does not forward anything to this endpoint any more.
                self.requester.expire_all();
            }
        }
    }

    fn expelled(&self) -> Option<&Arc<str>> {
        self.expulsion.as_deref().and_then(OnceLock::get)
    }

    /// Starts operations until none is left or no more fit.
    fn start(
        &mut self,
        now: Timestamp,
        cursor: &mut Cursor,
        work: &mut impl Work,
        until: Timestamp,
    ) {
        while !cursor.is_at_end() {
            let (task, number) = (cursor.task, cursor.number);
            let count = work.operation_count(task);
            if work.is_failed(task) || count.as_ref().is_ok_and(|count| number >= *count) {
                cursor.next_task();
                continue;
            }
            let operation = match (count, self.expelled()) {
                (Err(error), _) => Err(error),
                (Ok(_), Some(reason)) => {
                    let reason = Arc::clone(reason);
                    Err(Error::Expelled { reason, outcome_unknown: false })
                }
                (Ok(_), None) => work.operation(task, number),
            };
            let begun = operation.map(|(operation, _)| {
                let token = work::token(task, number);
                self.requester.start_until(now, operation, token, until)
            });
            let error = match begun {
                Ok(Ok(_)) => {
                    cursor.number += 1;
                    cursor.in_flight += 1;
                    continue;
                }
                Ok(Err(StartError::Full | StartError::Servers)) if cursor.in_flight > 0 => return,
                Ok(Err(error)) => Error::of_start(error),
                Err(error) => error,
            };
            // However the work handles the error, this operation is not tried again.
            cursor.next_task();
            work.settle(task, number, Err(error));
        }
    }

    /// Takes the results of operations that ended; returns whether there were any.
    fn complete(&mut self, cursor: &mut Cursor, work: &mut impl Work) -> bool {
        let before = cursor.in_flight;
        while let Some(completion) = self.requester.poll_completion() {
            cursor.in_flight = cursor.in_flight.saturating_sub(1);
            let (task, number) = work::untoken(completion.token);
            let result = completion.result.map_err(|failure| {
                let pointer = work.operation(task, number).ok().and_then(|(_, pointer)| pointer);
                match self.expelled() {
                    Some(reason) => Error::of_expelled(failure, pointer, reason),
                    None => Error::of_failure(failure, pointer, self.refusal.as_ref()),
                }
            });
            work.settle(task, number, result);
        }
        cursor.in_flight < before
    }

    /// Hands all datagrams that are to be sent to the carrier.
    fn flush(&mut self, now: Timestamp, buffers: &impl Buffers) -> Result<(), Error> {
        loop {
            let mut batch = ArrayVec::<SealedRequest<'_>, BATCH>::new();
            while !batch.is_full()
                && let Some(transmit) = self.requester.poll_transmit(now, buffers)
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
        now: Timestamp,
        batch: &[SealedRequest<'_>],
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
                Err(TransmitError::Socket(error)) => {
                    return Err(self.carrier_failed(Arc::new(error)));
                }
                Err(
                    error @ (TransmitError::Refused { .. }
                    | TransmitError::TooLarge { .. }
                    | TransmitError::Unreachable { .. }),
                ) => {
                    self.refusal = Some(Arc::new(error));
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

    /// Waits for datagrams or the next timer, and handles both.
    fn wait(&mut self, work: &mut impl Work) -> Result<Timestamp, Error> {
        let timer = self.requester.poll_timeout().unwrap_or(Timestamp::ZERO);
        let spin = if self.polls { self.spin.next() } else { Duration::ZERO };
        let count = match self.transport.receive(Wait::spinning(spin, timer)) {
            Ok(count) => count,
            Err(error) => return Err(self.carrier_failed(Arc::new(error))),
        };
        let now = self.transport.received_at();
        self.spin.note(spin, self.transport.polled());
        for index in 0..count {
            let incoming = self.transport.incoming(index);
            let datagram = Datagram::parse(incoming.source, incoming.destination, incoming.payload);
            match datagram {
                Ok(datagram) if incoming.source_port == UDP_PORT => {
                    self.requester.handle_datagram(now, &datagram, &mut Memory(&mut *work));
                }
                _ => self.malformed_count += 1,
            }
        }
        self.requester.handle_timeout(now);
        Ok(now)
    }

    /// Abandons all operations: notifies each server once, without waiting for a response.
    pub(crate) fn leave(&mut self) {
        self.requester.leave();
        let now = self.now();
        // A session whose CLOSE is not sent expires at the server.
        let _ = self.flush(now, &NoMemory);
    }

    fn carrier_failed(&mut self, cause: Cause) -> Error {
        self.requester.cancel_all();
        Error::Carrier { cause }
    }
}

pub(crate) fn outgoing<'a>(transmit: &'a SealedRequest<'a>) -> Outgoing<'a> {
    Outgoing {
        source: transmit.source,
        destination: transmit.destination,
        destination_port: UDP_PORT,
        header: transmit.head(),
        data: transmit.data,
    }
}

#[cfg(test)]
mod tests {
    use bluebridge_protocol::requester::{Event, Failure, Operation, Output, Server};
    use bluebridge_transport::memory::{Hub, MemoryTransport};
    use bluebridge_wire::{NodeId, Pointer, Space};

    use super::*;
    use crate::{EndpointConfig, work::single::Single};

    /// Work of operations that cannot be begun, and which ignores every failure.
    struct Stubborn {
        count: Result<u32, Error>,
        operation: Result<Operation, Error>,
        errors: Vec<(usize, Error)>,
    }

    impl Work for Stubborn {
        fn task_count(&self) -> usize {
            // One more for each that failed.
            3 + self.errors.len()
        }

        fn operation_count(&self, _task: usize) -> Result<u32, Error> {
            self.count.clone()
        }

        fn operation(&self, _: usize, _: u32) -> Result<(Operation, Option<Pointer>), Error> {
            self.operation.clone().map(|operation| (operation, None))
        }

        fn settle(&mut self, task: usize, _number: u32, result: Result<Output, Error>) {
            self.errors.push((task, result.expect_err("it cannot be begun")));
            assert!(self.errors.len() <= 3, "an operation is begun without end");
        }
    }

    /// A driver on a carrier that is connected to nothing.
    fn lonely() -> Driver<MemoryTransport> {
        let config = EndpointConfig::new(Space(1), NodeId(1000), 1);
        let carrier = Hub::new(16).attach(4000, &[]).expect("there is room");
        let requester = Requester::new(config.requester(carrier.capabilities()));
        Driver::new(carrier, requester, config.spin)
    }

    #[test]
    fn a_call_of_an_endpoint_that_is_expelled_ends_at_once() {
        let mut driver = lonely();
        let expulsion = Arc::<OnceLock<Arc<str>>>::default();
        driver.expulsion = Some(Arc::clone(&expulsion));
        let node = NodeId(1);
        let ping = Operation::Ping { server: Server { node, shard: 0 }, length: 0 };
        // The test's own deadline is shorter.
        let forever = Duration::from_secs(24 * 3600);
        let begun = driver.transport.now();
        std::thread::scope(|scope| {
            scope.spawn(|| expulsion.set("another came".into()).expect("it is set once"));
            let mut nothing = [];
            let mut work = Single::new(ping, None, &[], &mut nothing);
            driver.run(&mut work, forever).expect("the carrier works");
            let error = work.result().expect_err("no server responds");
            assert!(error.to_string().contains("another came"), "{error}");
            assert!(!error.is_outcome_unknown(), "a PING changes nothing");
        });
        assert!(driver.now() - begun < forever, "it ended before its deadline");
        let sent = driver.requester.counters().of(Event::Transmit);
        let mut nothing = [];
        let mut work = Single::new(ping, None, &[], &mut nothing);
        driver.run(&mut work, forever).expect("the carrier works");
        let result = work.result();
        assert!(matches!(result, Err(Error::Expelled { outcome_unknown: false, .. })));
        assert_eq!(driver.requester.counters().of(Event::Transmit), sent, "nothing is sent");
    }

    #[test]
    fn what_was_known_of_a_failure_is_known_of_an_expelled_endpoint_too() {
        let node = NodeId(1);
        let reason = Arc::from("another came");
        let unknown = Failure::OutcomeUnknown { node, responding: true };
        for (failure, expected) in [(unknown, true), (Failure::Unreachable { node }, false)] {
            let error = Error::of_expelled(failure, None, &reason);
            assert!(matches!(error, Error::Expelled { .. }), "{error}");
            assert_eq!(error.is_outcome_unknown(), expected, "{error}");
        }
        let refused = Failure::Refused { status: bluebridge_wire::Status::StaleTag, node };
        let error = Error::of_expelled(refused, None, &reason);
        assert!(matches!(error, Error::Refused { .. }), "a response is not replaced: {error}");
    }

    #[test]
    fn work_that_cannot_be_begun_ends_whatever_it_says() {
        let mut driver = lonely();
        let nowhere = Server { node: NodeId::ANY, shard: 0 };
        let impossible = Operation::Create { server: Some(nowhere), pages: 1 };
        for (count, operation) in [
            (Ok(2), Ok(impossible)),
            (Ok(u32::MAX), Err(Error::NoMemoryNode)),
            (Err(Error::NoMemoryNode), Ok(impossible)),
        ] {
            let mut work = Stubborn { count, operation, errors: Vec::new() };
            driver.run(&mut work, Duration::from_secs(5)).expect("the carrier works");
            let tasks: Vec<_> = work.errors.iter().map(|(task, _)| *task).collect();
            assert_eq!(tasks, [0, 1, 2], "one error for each task: {:?}", work.errors);
            for (_, error) in &work.errors {
                assert!(
                    matches!(error, Error::NoMemoryNode | Error::WrongNode { node: NodeId::ANY }),
                    "{error}"
                );
            }
        }
    }
}
