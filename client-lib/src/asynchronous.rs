//! The client for async code: a thread owns the client and executes queued calls in rounds.

use std::{io, thread};

use bluebridge_protocol::requester::{Operation, Output};
use bluebridge_transport::Transport;
use bluebridge_wire::{NodeId, Pointer, Region, Usage};
use tokio::sync::{mpsc, oneshot};

use crate::{
    client::Client,
    error::{Error, cause},
    placement::Placement,
    work::{
        lines,
        transfer::{RangeStart, Transfer, Transfers},
    },
};

/// Calls that can be queued; a further one waits for a free place.
pub const QUEUE_LENGTH: usize = 1024;

/// Calls that are executed in one round.
const ROUND: usize = 256;

type Reply<R> = oneshot::Sender<Result<R, Error>>;

/// What an update's closure decides about its changes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Decision {
    /// Discard the changes and release the lease.
    Abort,
    /// Write the bytes back.
    Commit,
}

/// Changes the bytes while their lease lasts.
type Change = Box<dyn FnOnce(&mut [u8]) -> Decision + Send>;

/// A call with its own memory, so that nothing is lost if its caller stops waiting.
enum Call {
    AllocWrite(Vec<u8>, Option<Placement>, Reply<Region>),
    CompareSwap { pointer: Pointer, expected: u64, new: u64, reply: Reply<u64> },
    Create(u64, Option<Placement>, Reply<Region>),
    Delete(Region, Reply<()>),
    FetchAdd { pointer: Pointer, addend: u64, reply: Reply<u64> },
    Read(Pointer, Vec<u8>, Reply<Vec<u8>>),
    Stat(NodeId, Reply<Usage>),
    Update(Pointer, Vec<u8>, Change, Reply<(Decision, Vec<u8>)>),
    Write(Pointer, Vec<u8>, Reply<()>),
    Zero(Pointer, u64, Reply<()>),
}

/// A client for async code; clones share one worker thread.
///
/// The READs and the WRITEs that are queued when a round begins are done together, pipelined over
/// all servers, and each caller gets its result when its own call has ended; what is queued meanwhile waits for
/// the next round. Calls that are awaited one after the other keep their order. A call whose future
/// is dropped is still executed, once. The worker ends when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct AsyncClient {
    calls: mpsc::Sender<Call>,
}

impl AsyncClient {
    /// Hands the client to a worker thread.
    ///
    /// # Errors
    /// If the system cannot start a thread.
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

    /// [`Client::update`] as one call: leases `length` bytes, lets `change` see and change them, and
    /// commits or aborts as it decides; returns its decision and the bytes.
    ///
    /// `change` runs on the worker thread, so it should be short; while the lease is waited for, at
    /// most for the client's deadline, the worker does nothing else.
    ///
    /// # Errors
    /// [`Error`]; nothing was changed then unless it says so.
    pub async fn update(
        &self,
        pointer: Pointer,
        length: usize,
        change: impl FnOnce(&mut [u8]) -> Decision + Send + 'static,
    ) -> Result<(Decision, Vec<u8>), Error> {
        self.call(|reply| Call::Update(pointer, vec![0; length], Box::new(change), reply)).await
    }

    /// [`Client::stat`].
    ///
    /// # Errors
    /// [`Error`].
    pub async fn stat(&self, node: NodeId) -> Result<Usage, Error> {
        self.call(|reply| Call::Stat(node, reply)).await
    }

    async fn call<R>(&self, call: impl FnOnce(Reply<R>) -> Call) -> Result<R, Error> {
        let (reply, result) = oneshot::channel();
        let gone = || Error::Carrier { cause: cause("the client's worker thread ended") };
        self.calls.send(call(reply)).await.map_err(|_| gone())?;
        result.await.map_err(|_| gone())?
    }
}

fn work<T: Transport>(mut client: Client<T>, mut queue: mpsc::Receiver<Call>) {
    let mut calls = Vec::with_capacity(ROUND);
    let mut round = Vec::with_capacity(ROUND);
    while queue.blocking_recv_many(&mut calls, ROUND) > 0 {
        for call in calls.drain(..) {
            match call {
                Call::Read(pointer, buffer, reply) => {
                    round.push(Queued::new(pointer, Waiting::Read(buffer, reply)));
                }
                Call::Write(pointer, data, reply) => {
                    round.push(Queued::new(pointer, Waiting::Write(data, reply)));
                }
                other => alone(&mut client, other),
            }
        }
        together(&mut client, &mut round);
    }
    // No caller is left to receive an error.
    let _ = client.close();
}

/// Calls that are executed one by one: rare ones, and those of several steps.
fn alone<T: Transport>(client: &mut Client<T>, call: Call) {
    // A caller that stopped waiting does not need its result.
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
        Call::Update(pointer, buffer, change, reply) => {
            let _ = reply.send(update(client, pointer, buffer, change));
        }
        Call::Write(pointer, data, reply) => {
            let _ = reply.send(client.write(pointer, &data));
        }
        Call::Zero(pointer, length, reply) => {
            let _ = reply.send(client.zero(pointer, length));
        }
    }
}

fn update<T: Transport>(
    client: &mut Client<T>,
    pointer: Pointer,
    mut buffer: Vec<u8>,
    change: Change,
) -> Result<(Decision, Vec<u8>), Error> {
    let mut update = client.update(pointer, &mut buffer)?;
    let decision = change(&mut update);
    match decision {
        Decision::Abort => update.abort()?,
        Decision::Commit => update.commit()?,
    }
    Ok((decision, buffer))
}

/// A READ or WRITE of a round, with its caller's memory.
struct Queued {
    pointer: Pointer,
    length: u64,
    /// `None` once its caller has the result.
    call: Option<Waiting>,
    /// Lines whose operations have not ended yet.
    lines_left: u32,
    result: Result<(), Error>,
    start: RangeStart,
}

/// The bytes, and the caller that waits for them.
enum Waiting {
    Read(Vec<u8>, Reply<Vec<u8>>),
    Write(Vec<u8>, Reply<()>),
}

impl Queued {
    fn new(pointer: Pointer, call: Waiting) -> Self {
        let (Waiting::Read(bytes, _) | Waiting::Write(bytes, _)) = &call;
        let length = bytes.len() as u64;
        // An impossible length is reported when its turn comes.
        let lines_left = lines::count(pointer, length).unwrap_or(0);
        let start = RangeStart::UNKNOWN;
        Self { pointer, length, call: Some(call), lines_left, result: Ok(()), start }
    }

    /// Sends the result to the caller, which may have stopped waiting.
    fn finish(&mut self, result: Result<(), Error>) {
        match self.call.take() {
            Some(Waiting::Read(buffer, reply)) => drop(reply.send(result.map(|()| buffer))),
            Some(Waiting::Write(_, reply)) => drop(reply.send(result)),
            None => {}
        }
    }
}

impl Transfer for Queued {
    fn pointer(&self) -> Pointer {
        self.pointer
    }

    fn length(&self) -> u64 {
        self.length
    }

    fn operation(&self, pointer: Pointer, length: u32) -> Operation {
        match self.call {
            Some(Waiting::Write(..)) => Operation::Write { pointer, length },
            _ => Operation::Read { pointer, length },
        }
    }

    fn outgoing(&self) -> &[u8] {
        match &self.call {
            Some(Waiting::Write(data, _)) => data,
            _ => &[],
        }
    }

    fn incoming(&mut self) -> &mut [u8] {
        match &mut self.call {
            Some(Waiting::Read(buffer, _)) => buffer,
            _ => &mut [],
        }
    }

    /// Success is reported at once; a failure at the end of the round, when nothing of it can
    /// be in flight any more.
    fn settle(&mut self, line: u32, result: Result<Output, Error>) {
        self.lines_left = self.lines_left.saturating_sub(1);
        self.start.settle(&mut self.result, self.pointer, line, result);
        if self.result.is_ok() && self.lines_left == 0 {
            self.finish(Ok(()));
        }
    }

    fn is_failed(&self) -> bool {
        self.result.is_err()
    }
}

/// Executes the READs and WRITEs of one round together.
fn together<T: Transport>(client: &mut Client<T>, round: &mut Vec<Queued>) {
    let carrier = client.driver.run(&mut Transfers(round), client.deadline);
    for mut queued in round.drain(..) {
        let result = core::mem::replace(&mut queued.result, Ok(()));
        queued.finish(result.and_then(|()| carrier.clone()));
    }
}
