//! Requests of clients, many at once, on the calling thread.

use std::ops::Range;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use bluebridge::{Client, Error, NodeId, Pointer, ReadRequest, Transport, WriteRequest};

use super::health::{Gate, PROBE};
use super::open::left;
use super::slabs::Piece;
use super::{Disk, Failure, is_of_missing_memory};

/// The most ranges of remote memory that one call of the client library reads or writes.
pub const PIECES: usize = 128;
/// The pause after a round in which nothing was done, and how long it becomes.
const PAUSE: Duration = Duration::from_millis(1);
/// See [`PAUSE`].
const PAUSE_MAX: Duration = Duration::from_millis(5);

/// What is to be done.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Operation {
    /// Nothing: what was acknowledged is in the servers' memory.
    Flush,
    /// Read.
    Read,
    /// Forget the contents.
    Trim,
    /// Write.
    Write,
    /// Write zeroes.
    Zero {
        /// Memory must be allocated.
        allocates: bool,
    },
}

/// A request.
#[derive(Clone, Debug)]
pub struct Task {
    /// What is to be done.
    pub operation: Operation,
    /// The first byte of the disk; the whole range lies in it.
    pub offset: u64,
    /// The bytes.
    pub length: u32,
    /// The request's own bytes in the caller's memory: in the input for writing, in the output for reading.
    pub data: Range<usize>,
    /// The result; `None` before it is known.
    pub result: Option<Result<(), Failure>>,
    /// A READ of nothing but zeroes, of which no byte is allocated.
    pub is_hole: bool,
    /// The worst failure of its pieces in this round.
    failure: Option<Failure>,
    /// A server that did not respond in this round.
    silent: Option<NodeId>,
    /// How much of a TRIM or WRITE_ZEROES is done, from its beginning.
    done: u64,
}

impl Task {
    /// A task that is to be executed.
    #[must_use]
    pub const fn new(operation: Operation, offset: u64, length: u32, data: Range<usize>) -> Self {
        Self {
            operation,
            offset,
            length,
            data,
            result: None,
            is_hole: false,
            failure: None,
            silent: None,
            done: 0,
        }
    }

    fn is_pending(&self, operation: Operation) -> bool {
        self.result.is_none() && self.operation == operation
    }

    /// Keeps the failure that repeating helps least.
    fn fail(&mut self, failure: Failure) {
        if self.failure.is_none_or(|kept| kept == Failure::Unanswered) {
            self.failure = Some(failure);
        }
    }
}

/// A piece of a task that is being read or written.
#[derive(Clone, Copy)]
struct Owner {
    task: usize,
    piece: Piece,
}

/// Zeroes that were not written.
struct Unzeroed {
    failure: Failure,
    /// The slab's server has nothing to do with it.
    is_of_map: bool,
}

type Reads<'a> = ArrayVec<ReadRequest<'a>, PIECES>;
type Writes<'a> = ArrayVec<WriteRequest<'a>, PIECES>;
type Owners = ArrayVec<Owner, PIECES>;

impl Disk {
    /// Executes tasks in any order, and sets their results. The data of READs must be in ascending places of `output`
    /// that do not overlap.
    ///
    /// A task whose server does not respond is repeated until the disk's deadline: nobody has its result before.
    pub fn execute<T: Transport>(
        &self,
        client: &mut Client<T>,
        tasks: &mut [Task],
        input: &[u8],
        output: &mut [u8],
    ) {
        self.execute_until(client, tasks, input, output, Instant::now() + self.deadline);
    }

    /// [`Self::execute`] until another moment, if that is before the disk's deadline.
    pub fn execute_until<T: Transport>(
        &self,
        client: &mut Client<T>,
        tasks: &mut [Task],
        input: &[u8],
        output: &mut [u8],
        until: Instant,
    ) {
        let until = until.min(Instant::now() + self.deadline);
        let mut pause = PAUSE;
        loop {
            let before = progress(tasks);
            let permitted = self.ownership.enter(until);
            if let Ok(permit) = &permitted {
                self.round(client, tasks, input, output, permit.end());
            }
            let refused = permitted.err();
            let is_over = Instant::now() >= until;
            let mut is_done = true;
            for task in tasks.iter_mut().filter(|task| task.result.is_none()) {
                let failure = task.failure.take().or(refused);
                let silent = task.silent.take();
                match failure {
                    Some(Failure::Unanswered) if !is_over => is_done = false,
                    Some(failure) => {
                        if let (Failure::Unanswered, Some(node)) = (failure, silent) {
                            self.note_silence(node);
                        }
                        task.result = Some(Err(failure));
                    }
                    None => task.result = Some(Ok(())),
                }
            }
            if is_done {
                return;
            }
            if progress(tasks) > before {
                pause = PAUSE;
            } else {
                // What fails at once is not asked for without end.
                std::thread::sleep(pause.min(until.saturating_duration_since(Instant::now())));
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
    }

    fn round<T: Transport>(
        &self,
        client: &mut Client<T>,
        tasks: &mut [Task],
        input: &[u8],
        output: &mut [u8],
        until: Instant,
    ) {
        for task in tasks.iter_mut().filter(|task| task.result.is_none()) {
            match task.operation {
                Operation::Trim => self.trim(client, task, until),
                Operation::Zero { allocates } => self.zero(client, task, allocates, until),
                Operation::Flush | Operation::Read | Operation::Write => {}
            }
        }
        if tasks.iter().any(|task| task.is_pending(Operation::Write)) {
            self.write(client, tasks, input, until);
        }
        if tasks.iter().any(|task| task.is_pending(Operation::Read)) {
            self.read(client, tasks, output, until);
        }
    }

    fn read<T: Transport>(
        &self,
        client: &mut Client<T>,
        tasks: &mut [Task],
        output: &mut [u8],
        until: Instant,
    ) {
        let (mut rest, mut at) = (output, 0);
        let mut reads = Reads::new();
        let mut owners = Owners::new();
        for index in 0..tasks.len() {
            let Some(task) = tasks.get_mut(index).filter(|it| it.is_pending(Operation::Read))
            else {
                continue;
            };
            let skipped = task.data.start.saturating_sub(at);
            let taken = std::mem::take(&mut rest).split_at_mut_checked(skipped);
            let taken = taken.and_then(|(_, tail)| tail.split_at_mut_checked(task.data.len()));
            let Some((mut data, tail)) = taken else {
                // The caller gave it no place.
                task.fail(Failure::Lost);
                break;
            };
            (rest, at) = (tail, task.data.end);
            task.is_hole = true;
            for piece in self.slabs.pieces(task.offset, task.length.into()) {
                let length = usize::try_from(piece.length).unwrap_or(usize::MAX);
                let Some((part, tail)) = std::mem::take(&mut data).split_at_mut_checked(length)
                else {
                    break;
                };
                data = tail;
                let range = match self.slabs.pointer(piece.slab) {
                    None => {
                        part.fill(0);
                        continue;
                    }
                    Some(slab) => self.range(client, slab, piece),
                };
                let Some(task) = tasks.get_mut(index) else { break };
                task.is_hole = false;
                match range {
                    Ok(pointer) => {
                        reads.push(ReadRequest::new(pointer, part));
                        owners.push(Owner { task: index, piece });
                    }
                    Err(failure) => task.fail(failure),
                }
                if reads.is_full() {
                    self.read_now(client, &mut reads, &mut owners, tasks, until);
                }
            }
        }
        self.read_now(client, &mut reads, &mut owners, tasks, until);
    }

    fn read_now<T: Transport>(
        &self,
        client: &mut Client<T>,
        reads: &mut Reads<'_>,
        owners: &mut Owners,
        tasks: &mut [Task],
        until: Instant,
    ) {
        if reads.is_empty() {
            return;
        }
        client.set_deadline(left(until));
        let sent = client.read_many(reads);
        for (request, owner) in reads.drain(..).zip(owners.drain(..)) {
            let result = sent.clone().and(request.result);
            let Err(error) = result else { continue };
            let result = match self.slabs.pointer(owner.piece.slab) {
                // It was freed meanwhile, because nothing in it was wanted any more.
                None if is_of_missing_memory(&error) => {
                    request.buffer.fill(0);
                    Ok(())
                }
                Some(slab) if is_of_missing_memory(&error) => {
                    match slab.checked_add(owner.piece.offset) {
                        // And allocated again.
                        Ok(now) if now != request.pointer => client.read(now, request.buffer),
                        _ => Err(error),
                    }
                }
                _ => Err(error),
            };
            self.settle(tasks, owner, result);
        }
    }

    fn write<T: Transport>(
        &self,
        client: &mut Client<T>,
        tasks: &mut [Task],
        input: &[u8],
        until: Instant,
    ) {
        let mut writes = Writes::new();
        let mut owners = Owners::new();
        for index in 0..tasks.len() {
            let Some(task) = tasks.get_mut(index).filter(|it| it.is_pending(Operation::Write))
            else {
                continue;
            };
            let Some(mut data) = input.get(task.data.clone()) else {
                task.fail(Failure::Lost);
                continue;
            };
            for piece in self.slabs.pieces(task.offset, task.length.into()) {
                let length = usize::try_from(piece.length).unwrap_or(usize::MAX);
                let Some((part, tail)) = data.split_at_checked(length) else { break };
                data = tail;
                let begun = self.begin_writing(client, piece, until);
                let Some(task) = tasks.get_mut(index) else { break };
                match begun {
                    Ok(pointer) => {
                        writes.push(WriteRequest::new(pointer, part));
                        owners.push(Owner { task: index, piece });
                    }
                    Err(failure) => task.fail(failure),
                }
                if writes.is_full() {
                    self.write_now(client, &mut writes, &mut owners, tasks, until);
                }
            }
        }
        self.write_now(client, &mut writes, &mut owners, tasks, until);
    }

    fn write_now<T: Transport>(
        &self,
        client: &mut Client<T>,
        writes: &mut Writes<'_>,
        owners: &mut Owners,
        tasks: &mut [Task],
        until: Instant,
    ) {
        if writes.is_empty() {
            return;
        }
        client.set_deadline(left(until));
        let sent = client.write_many(writes);
        for (request, owner) in writes.drain(..).zip(owners.drain(..)) {
            // Now the data has arrived, or may have.
            let Piece { slab, offset, length } = owner.piece;
            self.slabs.want(slab, offset, length);
            self.slabs.leave(slab);
            if let Err(error) = sent.clone().and(request.result) {
                self.settle(tasks, owner, Err(error));
            }
        }
    }

    /// Enters a slab, and allocates it if needed; returns where the range is. On an error the slab is left again.
    fn begin_writing<T: Transport>(
        &self,
        client: &mut Client<T>,
        piece: Piece,
        until: Instant,
    ) -> Result<Pointer, Failure> {
        if !self.slabs.enter(piece.slab, until) {
            return Err(Failure::Unanswered);
        }
        let begun = self
            .allocated(client, piece.slab, until)
            .and_then(|slab| self.range(client, slab, piece));
        if begun.is_err() {
            self.slabs.leave(piece.slab);
        }
        begun
    }

    /// The pointer to a piece, if its server is not known to be silent.
    pub(super) fn range<T: Transport>(
        &self,
        client: &mut Client<T>,
        slab: Pointer,
        piece: Piece,
    ) -> Result<Pointer, Failure> {
        let pointer = slab.checked_add(piece.offset).map_err(|_| Failure::Lost)?;
        match self.health.gate(slab.node, Instant::now()) {
            Gate::Open => Ok(pointer),
            Gate::Closed => Err(Failure::Silent),
            Gate::Probe => {
                // At the slab itself: it may have moved to another server.
                client.set_deadline(PROBE);
                match client.read(pointer, &mut [0]) {
                    Err(error) if Failure::of(&error) == Failure::Unanswered => {
                        Err(Failure::Silent)
                    }
                    // Also a refusal is a response.
                    _ => {
                        self.note_response(slab.node);
                        Ok(pointer)
                    }
                }
            }
        }
    }

    /// Takes the result of a piece.
    fn settle(&self, tasks: &mut [Task], owner: Owner, result: Result<(), Error>) {
        let Err(error) = result else { return };
        let failure = Failure::of(&error);
        if failure != Failure::Unanswered {
            self.reported.failure(owner.piece.slab as u64, &error);
        }
        if let Some(task) = tasks.get_mut(owner.task) {
            self.fail_at(task, owner.piece.slab, failure);
        }
    }

    /// A piece in a slab failed.
    fn fail_at(&self, task: &mut Task, slab: usize, failure: Failure) {
        task.fail(failure);
        if failure == Failure::Unanswered {
            task.silent = self.slabs.pointer(slab).map(|pointer| pointer.node);
        }
    }

    /// A server responded that did not before.
    pub(super) fn note_response(&self, node: NodeId) {
        if self.health.responded(node) {
            tracing::info!(%node, "a memory server responds again");
        }
    }

    /// Suspects a server that did not respond until a request's deadline.
    pub(super) fn note_silence(&self, node: NodeId) {
        if self.health.suspect(node, Instant::now()) {
            tracing::warn!(%node, "a memory server does not respond; requests for its slabs fail");
        }
    }

    fn trim<T: Transport>(&self, client: &mut Client<T>, task: &mut Task, until: Instant) {
        for piece in self.rest(task) {
            if self.slabs.pointer(piece.slab).is_some() {
                if !self.slabs.enter(piece.slab, until) {
                    return task.fail(Failure::Unanswered);
                }
                let is_unwanted = self.slabs.discard(piece.slab, piece.offset, piece.length);
                self.slabs.leave(piece.slab);
                if is_unwanted {
                    // Trimming is a hint: a slab that cannot be freed now stays.
                    self.give_up(client, piece.slab, false, until);
                }
            }
            task.done += piece.length;
        }
    }

    /// What is left of a task that is done from its beginning to its end.
    fn rest(&self, task: &Task) -> impl Iterator<Item = Piece> + use<> {
        let length = u64::from(task.length).saturating_sub(task.done);
        self.slabs.pieces(task.offset.saturating_add(task.done), length)
    }

    fn zero<T: Transport>(
        &self,
        client: &mut Client<T>,
        task: &mut Task,
        allocates: bool,
        until: Instant,
    ) {
        for piece in self.rest(task) {
            if !self.slabs.enter(piece.slab, until) {
                return task.fail(Failure::Unanswered);
            }
            let zeroed = self.zero_entered(client, piece, allocates, until);
            self.slabs.leave(piece.slab);
            match zeroed {
                Ok(true) => {
                    // It reads as zeroes, whether or not it can be freed now.
                    self.give_up(client, piece.slab, false, until);
                }
                Ok(false) => {}
                Err(Unzeroed { failure, is_of_map: true }) => return task.fail(failure),
                Err(Unzeroed { failure, .. }) => return self.fail_at(task, piece.slab, failure),
            }
            task.done += piece.length;
        }
    }

    /// Zeroes a piece of a slab; returns whether nothing in the slab is wanted any more.
    fn zero_entered<T: Transport>(
        &self,
        client: &mut Client<T>,
        piece: Piece,
        allocates: bool,
        until: Instant,
    ) -> Result<bool, Unzeroed> {
        let Piece { slab, offset, length } = piece;
        if !allocates {
            if self.slabs.pointer(slab).is_none() {
                return Ok(false);
            }
            // Before the zeroes arrive: data that arrives after them is marked as wanted then.
            let is_unwanted = self.slabs.discard(slab, offset, length);
            // A whole slab is not zeroed if it can be freed.
            let is_whole = length == self.slabs.length(slab);
            if is_whole && is_unwanted && self.give_up(client, slab, true, until) {
                return Ok(false);
            }
            let zeroed = self.zero_there(client, piece, until);
            if zeroed.is_err() {
                self.slabs.want(slab, offset, length);
            }
            return zeroed.map(|()| is_unwanted);
        }
        let zeroed = self.zero_there(client, piece, until);
        self.slabs.want(slab, offset, length);
        zeroed.map(|()| false)
    }

    /// Zeroes a piece of a slab that is in the table then.
    fn zero_there<T: Transport>(
        &self,
        client: &mut Client<T>,
        piece: Piece,
        until: Instant,
    ) -> Result<(), Unzeroed> {
        let of_map = |failure| Unzeroed { failure, is_of_map: true };
        let of_slab = |failure| Unzeroed { failure, is_of_map: false };
        let slab = self.allocated(client, piece.slab, until).map_err(of_map)?;
        let pointer = self.range(client, slab, piece).map_err(of_slab)?;
        client.set_deadline(left(until));
        client.zero(pointer, piece.length).map_err(|error| {
            let failure = Failure::of(&error);
            if failure != Failure::Unanswered {
                self.reported.failure(piece.slab as u64, &error);
            }
            of_slab(failure)
        })
    }
}

/// How much is done: of a number of tasks, and of those that are not over.
fn progress(tasks: &[Task]) -> (usize, u64) {
    let over = tasks.iter().filter(|task| task.result.is_some()).count();
    (over, tasks.iter().map(|task| task.done).sum())
}
