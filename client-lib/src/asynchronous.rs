//! The face for async code: a thread that owns the client and does what is queued in rounds.

use std::{io, thread};

use bluebridge_protocol::requester::{Answer, Buffers, Operation};
use bluebridge_transport::Transport;
use bluebridge_wire::{NodeId, Pointer, Region, Usage};
use tokio::sync::{mpsc, oneshot};

use crate::{
    client::Client,
    drive::Work,
    error::Error,
    many::{ReadRequest, Reads, WriteRequest, Writes},
    placement::Placement,
};

/// Calls that may wait; the next one waits for room.
pub const QUEUE_LENGTH: usize = 1024;

/// Calls that are done in one round.
const ROUND: usize = 256;

type Reply<R> = oneshot::Sender<Result<R, Error>>;

/// A call with its own memory, so that nothing is lost if its caller stops waiting.
enum Call {
    AllocWrite(Vec<u8>, Option<Placement>, Reply<Region>),
    CompareSwap { pointer: Pointer, expected: u64, new: u64, reply: Reply<u64> },
    Create(u64, Option<Placement>, Reply<Region>),
    Delete(Region, Reply<()>),
    FetchAdd { pointer: Pointer, addend: u64, reply: Reply<u64> },
    Read(Pointer, Vec<u8>, Reply<Vec<u8>>),
    Stat(NodeId, Reply<Usage>),
    Write(Pointer, Vec<u8>, Reply<()>),
    Zero(Pointer, u64, Reply<()>),
}

/// A client for async code; clones share one worker thread.
///
/// The READs and the WRITEs that are queued when a round begins are done together, pipelined over
/// all servers; calls that are awaited one after the other keep their order. A call whose future
/// is dropped still happens, once. The worker ends when the last clone is gone.
#[derive(Clone, Debug)]
pub struct AsyncClient {
    calls: mpsc::Sender<Call>,
}

impl AsyncClient {
    /// Hands the client to a worker thread.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn new<T: Transport + Send + 'static>(client: Client<T>) -> io::Result<Self> {
        let (calls, queue) = mpsc::channel(QUEUE_LENGTH);
        thread::Builder::new()
            .name("bluebridge-client".to_owned())
            .spawn(move || work(client, queue))?;
        Ok(Self { calls })
    }

    /// [`Client::read`] into new memory.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn read(&self, pointer: Pointer, length: usize) -> Result<Vec<u8>, Error> {
        self.call(|reply| Call::Read(pointer, vec![0; length], reply)).await
    }

    /// [`Client::write`].
    ///
    /// # Errors
    /// [`Error`].
    pub async fn write(&self, pointer: Pointer, data: Vec<u8>) -> Result<(), Error> {
        self.call(|reply| Call::Write(pointer, data, reply)).await
    }

    /// [`Client::zero`].
    ///
    /// # Errors
    /// [`Error`].
    pub async fn zero(&self, pointer: Pointer, length: u64) -> Result<(), Error> {
        self.call(|reply| Call::Zero(pointer, length, reply)).await
    }

    /// [`Client::create`], or [`Client::create_at`] with a placement.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn create(&self, bytes: u64, placement: Option<Placement>) -> Result<Region, Error> {
        self.call(|reply| Call::Create(bytes, placement, reply)).await
    }

    /// [`Client::alloc_write`], or [`Client::alloc_write_at`] with a placement.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn alloc_write(
        &self,
        data: Vec<u8>,
        placement: Option<Placement>,
    ) -> Result<Region, Error> {
        self.call(|reply| Call::AllocWrite(data, placement, reply)).await
    }

    /// [`Client::delete`].
    ///
    /// # Errors
    /// [`Error`].
    pub async fn delete(&self, region: Region) -> Result<(), Error> {
        self.call(|reply| Call::Delete(region, reply)).await
    }

    /// [`Client::compare_swap`].
    ///
    /// # Errors
    /// [`Error`].
    pub async fn compare_swap(
        &self,
        pointer: Pointer,
        expected: u64,
        new: u64,
    ) -> Result<u64, Error> {
        self.call(|reply| Call::CompareSwap { pointer, expected, new, reply }).await
    }

    /// [`Client::fetch_add`].
    ///
    /// # Errors
    /// [`Error`].
    pub async fn fetch_add(&self, pointer: Pointer, addend: u64) -> Result<u64, Error> {
        self.call(|reply| Call::FetchAdd { pointer, addend, reply }).await
    }

    /// [`Client::stat`].
    ///
    /// # Errors
    /// [`Error`].
    pub async fn stat(&self, node: NodeId) -> Result<Usage, Error> {
        self.call(|reply| Call::Stat(node, reply)).await
    }

    async fn call<R>(&self, call: impl FnOnce(Reply<R>) -> Call) -> Result<R, Error> {
        let (reply, answer) = oneshot::channel();
        let gone = || Error::Carrier { reason: "the client's worker thread ended".into() };
        self.calls.send(call(reply)).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

fn work<T: Transport>(mut client: Client<T>, mut queue: mpsc::Receiver<Call>) {
    let mut calls = Vec::with_capacity(ROUND);
    while queue.blocking_recv_many(&mut calls, ROUND) > 0 {
        let mut round = Round::default();
        for call in calls.drain(..) {
            match call {
                Call::Read(pointer, buffer, reply) => round.reads.push((pointer, buffer, reply)),
                Call::Write(pointer, data, reply) => round.writes.push((pointer, data, reply)),
                other => alone(&mut client, other),
            }
        }
        round.run(&mut client);
    }
    // Nobody is left to be told of a failure.
    let _ = client.close();
}

/// What is done by itself: rare calls, and those of several steps.
fn alone<T: Transport>(client: &mut Client<T>, call: Call) {
    // A caller that stopped waiting does not want its answer.
    match call {
        Call::AllocWrite(data, placement, reply) => {
            let placement = placement.unwrap_or(client.placement);
            let _ = reply.send(client.alloc_write_at(&data, placement));
        }
        Call::CompareSwap { pointer, expected, new, reply } => {
            let _ = reply.send(client.compare_swap(pointer, expected, new));
        }
        Call::Create(bytes, placement, reply) => {
            let placement = placement.unwrap_or(client.placement);
            let _ = reply.send(client.create_at(bytes, placement));
        }
        Call::Delete(region, reply) => {
            let _ = reply.send(client.delete(region));
        }
        Call::FetchAdd { pointer, addend, reply } => {
            let _ = reply.send(client.fetch_add(pointer, addend));
        }
        Call::Read(pointer, mut buffer, reply) => {
            let _ = reply.send(client.read(pointer, &mut buffer).map(|()| buffer));
        }
        Call::Stat(node, reply) => {
            let _ = reply.send(client.stat(node));
        }
        Call::Write(pointer, data, reply) => {
            let _ = reply.send(client.write(pointer, &data));
        }
        Call::Zero(pointer, length, reply) => {
            let _ = reply.send(client.zero(pointer, length));
        }
    }
}

/// The READs and WRITEs of one round.
#[derive(Default)]
struct Round {
    reads: Vec<(Pointer, Vec<u8>, Reply<Vec<u8>>)>,
    writes: Vec<(Pointer, Vec<u8>, Reply<()>)>,
}

impl Round {
    fn run<T: Transport>(mut self, client: &mut Client<T>) {
        let reads = self.reads.iter_mut();
        let mut reads: Vec<_> =
            reads.map(|(pointer, buffer, _)| ReadRequest::new(*pointer, buffer)).collect();
        let writes = self.writes.iter();
        let mut writes: Vec<_> =
            writes.map(|(pointer, data, _)| WriteRequest::new(*pointer, data)).collect();
        let mut both = Both { reads: Reads(&mut reads), writes: Writes(&mut writes) };
        let carrier = client.driver.run(&mut both, client.deadline);
        let outcome = |result: Result<(), Error>| match (&carrier, result) {
            (Err(error), Ok(())) => Err(error.clone()),
            (_, result) => result,
        };
        let reads: Vec<_> = reads.into_iter().map(|request| outcome(request.result)).collect();
        let writes: Vec<_> = writes.into_iter().map(|request| outcome(request.result)).collect();
        for ((_, buffer, reply), result) in self.reads.into_iter().zip(reads) {
            let _ = reply.send(result.map(|()| buffer));
        }
        for ((_, _, reply), result) in self.writes.into_iter().zip(writes) {
            let _ = reply.send(result);
        }
    }
}

/// READs and WRITEs as one piece of work: the transfers of the READs come first.
struct Both<'a, 'b> {
    reads: Reads<'a, 'b>,
    writes: Writes<'a, 'b>,
}

impl Both<'_, '_> {
    /// The number of a WRITE among the WRITEs.
    fn write(&self, transfer: usize) -> Option<usize> {
        transfer.checked_sub(self.reads.transfer_count())
    }

    fn split(&self, token: u64) -> Result<u64, u64> {
        let (transfer, line) = crate::transfer::untoken(token);
        self.write(transfer).map_or(Err(token), |write| Ok(crate::transfer::token(write, line)))
    }
}

impl Buffers for Both<'_, '_> {
    fn outgoing(&self, token: u64) -> &[u8] {
        match self.split(token) {
            Ok(token) => self.writes.outgoing(token),
            Err(token) => self.reads.outgoing(token),
        }
    }

    fn incoming(&mut self, token: u64) -> &mut [u8] {
        match self.split(token) {
            Ok(token) => self.writes.incoming(token),
            Err(token) => self.reads.incoming(token),
        }
    }
}

impl Work for Both<'_, '_> {
    fn transfer_count(&self) -> usize {
        self.reads.transfer_count() + self.writes.transfer_count()
    }

    fn line_count(&self, transfer: usize) -> Result<u32, Error> {
        match self.write(transfer) {
            Some(write) => self.writes.line_count(write),
            None => self.reads.line_count(transfer),
        }
    }

    fn operation(&self, transfer: usize, line: u32) -> Result<(Operation, Option<Pointer>), Error> {
        match self.write(transfer) {
            Some(write) => self.writes.operation(write, line),
            None => self.reads.operation(transfer, line),
        }
    }

    fn settle(&mut self, transfer: usize, result: Result<Answer, Error>) {
        match self.write(transfer) {
            Some(write) => self.writes.settle(write, result),
            None => self.reads.settle(transfer, result),
        }
    }

    fn is_failed(&self, transfer: usize) -> bool {
        match self.write(transfer) {
            Some(write) => self.writes.is_failed(write),
            None => self.reads.is_failed(transfer),
        }
    }
}
