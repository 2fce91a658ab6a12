//! Requests of clients, many at once, on the calling thread.

use std::ops::Range;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use bluebridge::{Client, Error, NodeId, Pointer, ReadRequest, Transport, WriteRequest};

use super::call::{Call, Failed, Round, silent_node};
use super::health::{Gate, PROBE};
use super::slabs::Piece;
use super::{Disk, Failure, is_of_missing_memory};

/// The most ranges of remote memory that one call of the client library reads or writes.
pub const PIECES: usize = 128;
/// The pause after a round in which nothing was done, and how long it becomes.
const PAUSE: Duration = Duration::from_millis(1);
/// See [`PAUSE`].
const PAUSE_MAX: Duration = Duration::from_millis(5);
/// The most time of a call: the order to stop is not seen while it runs.
const SLICE_MAX: Duration = Duration::from_secs(2);
/// The most bytes of one call that zeroes. All its lines are in flight at once, so none is begun near its end.
const ZERO_BYTES: u64 = 8 << 20;

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
    /// A server that did not respond in this round, and for how long.
    silent: Option<(NodeId, Duration)>,
    /// The same of all rounds.
    silence: Option<(NodeId, Duration)>,
    /// How much of a TRIM or WRITE_ZEROES is done, from its beginning.
    done: u64,
    /// A TRIM or WRITE_ZEROES goes on in the next round.
    goes_on: bool,
    /// The round had no time for it.
    waits: bool,
    /// When it last had its turn, or came.
    tried: Option<Instant>,
    /// When it fails unless it has made progress.
    until: Option<Instant>,
    /// Between two calls: how long it may then take, and its last call's most time.
    left: Option<(Duration, Duration)>,
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
            silence: None,
            done: 0,
            goes_on: false,
            waits: false,
            tried: None,
            until: None,
            left: None,
        }
    }

    fn is_pending(&self, operation: Operation) -> bool {
        self.result.is_none() && self.operation == operation
    }

    /// Keeps the failure that repeating helps least.
    fn fail(&mut self, failed: impl Into<Failed>) {
        let Failed { failure, silent, is_refused } = failed.into();
        if is_refused {
            // It was not silent until the end.
            self.silence = None;
        }
        if self.failure.is_none_or(|kept| kept == Failure::Unanswered) {
            self.failure = Some(failure);
        }
        // Pieces of one call waited together.
        if silent.is_some_and(|(_, time)| self.silent.is_none_or(|(_, kept)| kept < time)) {
            self.silent = silent;
        }
    }

    /// Whether it is done from its beginning to its end, which may take long, so that others come first.
    const fn is_long(&self) -> bool {
        matches!(self.operation, Operation::Trim | Operation::Zero { .. })
    }

    /// So much more is done, and what is left has the time of a new request.
    fn advance(&mut self, bytes: u64, round: &mut Round<'_>, deadline: Duration) {
        if bytes > 0 {
            self.done += bytes;
            self.silence = None;
            round.renew(deadline);
        }
    }

    /// Returns whether the round has no time left for the rest.
    fn is_paused(&mut self, end: Instant) -> bool {
        self.goes_on = self.done < self.length.into() && Instant::now() >= end;
        self.goes_on
    }

    /// Adds up for how long a server was silent; returns it.
    fn silence(&mut self) -> Option<(NodeId, Duration)> {
        if let Some((node, time)) = self.silent.take() {
            let earlier = self.silence.filter(|(other, _)| *other == node);
            self.silence = Some((node, time + earlier.map_or(Duration::ZERO, |(_, time)| time)));
        }
        self.silence
    }
}

/// A piece of a task that is being read or written.
#[derive(Clone, Copy)]
struct Owner {
    task: usize,
    piece: Piece,
}

type Reads<'a> = ArrayVec<ReadRequest<'a>, PIECES>;
type Writes<'a> = ArrayVec<WriteRequest<'a>, PIECES>;
type Owners = ArrayVec<Owner, PIECES>;

impl Disk {
    /// Executes tasks in any order, and sets their results. The data of READs must be in ascending places of `output`
    /// that do not overlap.
    ///
    /// A task whose server does not respond is repeated until the disk's deadline: nobody has its result before. A TRIM
    /// or WRITE_ZEROES that makes progress gets that time anew.
    pub fn execute<T: Transport>(
        &self,
        client: &mut Client<T>,
        tasks: &mut [Task],
        input: &[u8],
        output: &mut [u8],
    ) {
        let never = OnceLock::new();
        while tasks.iter().any(|task| task.result.is_none()) {
            self.execute_some(client, tasks, input, output, &never);
        }
    }

    /// [`Self::execute`], but TRIMs and WRITE_ZEROES get a short time only: those without a result go on in the next call,
    /// which may have other tasks too. All others have a result. None goes on after `stop`, which may be set meanwhile.
    pub fn execute_some<T: Transport>(
        &self,
        client: &mut Client<T>,
        tasks: &mut [Task],
        input: &[u8],
        output: &mut [u8],
        stop: &OnceLock<Instant>,
    ) {
        let now = Instant::now();
        let (mut pause, mut slice) = (PAUSE, self.patience);
        for task in tasks.iter_mut().filter(|task| task.result.is_none()) {
            // Nobody works on it between two calls, so that time is not its own.
            let (left, last) = task.left.unwrap_or((self.deadline, self.patience));
            task.until = Some(now + left);
            task.tried.get_or_insert(now);
            slice = slice.max(last);
        }
        loop {
            let began = Instant::now();
            let pending = tasks.iter().filter(|task| task.result.is_none());
            let Some(first_end) = pending.filter_map(|task| task.until).min() else { return };
            let before = progress(tasks);
            let round = Round::new(stop, slice);
            // For no longer, to look at the order to stop.
            let refused = match self.ownership.enter(first_end.min(began + slice)) {
                Ok(_permit) => {
                    self.round(client, tasks, input, output, round);
                    // What needed no call counts as little without the lease as what did.
                    self.ownership.lease_end(Instant::now()).err()
                }
                Err(failure) => Some(failure),
            };
            let now = Instant::now();
            let is_stopped = stop.get().is_some_and(|stop| now >= *stop);
            for task in tasks.iter_mut().filter(|task| task.result.is_none()) {
                let has_ended = !task.waits && task.until.is_none_or(|until| now >= until);
                let is_over = is_stopped || has_ended;
                let goes_on = std::mem::take(&mut task.goes_on);
                let silence = task.silence();
                match task.failure.take().or(refused) {
                    Some(Failure::Unanswered) if !is_over => {}
                    Some(failure) => {
                        if let (Failure::Unanswered, Some((node, time))) = (failure, silence)
                            && time >= self.enough
                        {
                            self.note_silence(node);
                        }
                        task.result = Some(Err(failure));
                    }
                    None if goes_on && !is_over => {}
                    None if goes_on => task.result = Some(Err(Failure::Unanswered)),
                    None => task.result = Some(Ok(())),
                }
            }
            // Short at first, so that a server that does not respond keeps the others' requests waiting for a short time,
            // then longer, for what takes longer.
            slice = (slice * 2).min((self.deadline / 2).max(self.patience)).min(SLICE_MAX);
            if progress(tasks) > before {
                pause = PAUSE;
            } else {
                // What fails at once is not asked for without end.
                std::thread::sleep(pause.min(first_end.saturating_duration_since(now)));
                pause = (pause * 2).min(PAUSE_MAX);
            }
            let now = Instant::now();
            for task in tasks.iter_mut().filter(|task| task.result.is_none()) {
                if std::mem::take(&mut task.waits) {
                    // For the others of the batch, not for a server.
                    task.until = task.until.map(|until| until + (now - began));
                }
                let left = task.until.unwrap_or(now).saturating_duration_since(now);
                task.left = Some((left, slice));
            }
            if tasks.iter().all(|task| task.result.is_some() || task.is_long()) {
                return;
            }
        }
    }

    /// WRITEs and READs come first: the time of the others may be long.
    fn round<T: Transport>(
        &self,
        client: &mut Client<T>,
        tasks: &mut [Task],
        input: &[u8],
        output: &mut [u8],
        mut round: Round<'_>,
    ) {
        for operation in [Operation::Write, Operation::Read] {
            let is_it = |task: &&Task| task.is_pending(operation);
            let Some(until) = tasks.iter().filter(is_it).find_map(|task| task.until) else {
                continue;
            };
            round.until = until;
            if operation == Operation::Write {
                self.write(client, tasks, input, &mut round);
            } else {
                self.read(client, tasks, output, &mut round);
            }
        }
        let began = Instant::now();
        let (mut end, mut has_more) = (began + self.patience, false);
        loop {
            let is_left = |task: &&mut Task| {
                task.result.is_none() && task.is_long() && task.tried < Some(began)
            };
            if Instant::now() >= end {
                for task in tasks.iter_mut().filter(is_left) {
                    (task.waits, task.goes_on) = (true, true);
                }
                return;
            }
            // In turn: one that makes no progress does not keep the others from theirs.
            let next = tasks.iter_mut().filter(is_left).min_by_key(|task| task.tried);
            let Some((task, until)) = next.and_then(|task| task.until.map(|until| (task, until)))
            else {
                return;
            };
            task.tried = Some(Instant::now());
            round.until = until;
            match task.operation {
                Operation::Zero { allocates } => {
                    self.zero(client, task, allocates, &mut round, end);
                }
                _ => self.trim(client, task, &mut round, end),
            }
            task.until = Some(round.until);
            if task.failure == Some(Failure::Unanswered) && !has_more {
                // One that waited for a silent server has not used up the time of the others. Those for the same server
                // cost none now.
                (end, has_more) = (Instant::now() + self.patience, true);
            }
        }
    }

    fn read<T: Transport>(
        &self,
        client: &mut Client<T>,
        tasks: &mut [Task],
        output: &mut [u8],
        round: &mut Round<'_>,
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
                // The caller gave it no place; those behind it have none either.
                task.fail(Failure::Lost);
                continue;
            };
            (rest, at) = (tail, task.data.end);
            task.is_hole = true;
            for piece in self.slabs.pieces(task.offset, task.length.into()) {
                let Some(task) = tasks.get_mut(index) else { break };
                let length = usize::try_from(piece.length).unwrap_or(usize::MAX);
                let Some((part, tail)) = std::mem::take(&mut data).split_at_mut_checked(length)
                else {
                    task.fail(Failure::Lost);
                    break;
                };
                data = tail;
                let range = match self.slabs.pointer(piece.slab) {
                    None => {
                        part.fill(0);
                        continue;
                    }
                    Some(slab) => self.range(client, slab, piece, round),
                };
                task.is_hole = false;
                match range {
                    Ok(pointer) => {
                        reads.push(ReadRequest::new(pointer, part));
                        owners.push(Owner { task: index, piece });
                    }
                    Err(failure) => task.fail(failure),
                }
                if reads.is_full() {
                    self.read_now(client, &mut reads, &mut owners, tasks, round);
                }
            }
        }
        self.read_now(client, &mut reads, &mut owners, tasks, round);
    }

    fn read_now<T: Transport>(
        &self,
        client: &mut Client<T>,
        reads: &mut Reads<'_>,
        owners: &mut Owners,
        tasks: &mut [Task],
        round: &mut Round<'_>,
    ) {
        if reads.is_empty() {
            return;
        }
        let call = match self.call(client, round.end(), round.slice) {
            Ok(call) => call,
            Err(failure) => {
                reads.clear();
                return fail_all(owners, tasks, failure);
            }
        };
        let sent = client.read_many(reads);
        let is_in_time = call.is_in_time();
        for (request, owner) in reads.drain(..).zip(owners.drain(..)) {
            let failed = match sent.clone().and(request.result) {
                Ok(()) if is_in_time => continue,
                Ok(()) => Failure::Unanswered.into(),
                Err(error) if is_of_missing_memory(&error) => {
                    match self.read_again(
                        client,
                        request.pointer,
                        request.buffer,
                        owner.piece,
                        round,
                    ) {
                        Some(Ok(())) => continue,
                        Some(Err(failed)) => failed,
                        None => self.failed_at(round, call, owner.piece, &error),
                    }
                }
                Err(error) => self.failed_at(round, call, owner.piece, &error),
            };
            if let Some(task) = tasks.get_mut(owner.task) {
                task.fail(failed);
            }
        }
    }

    /// Reads a piece whose memory was not there: its slab was freed meanwhile, because nothing in it was wanted any more,
    /// and perhaps allocated again. `None` if it was not.
    fn read_again<T: Transport>(
        &self,
        client: &mut Client<T>,
        pointer: Pointer,
        buffer: &mut [u8],
        piece: Piece,
        round: &mut Round<'_>,
    ) -> Option<Result<(), Failed>> {
        let Some(slab) = self.slabs.pointer(piece.slab) else {
            buffer.fill(0);
            return Some(Ok(()));
        };
        let now = slab.checked_add(piece.offset).ok().filter(|now| *now != pointer)?;
        let call = match self.call(client, round.end(), round.slice) {
            Ok(call) => call,
            Err(failure) => return Some(Err(failure.into())),
        };
        Some(match client.read(now, buffer) {
            Ok(()) if call.is_in_time() => Ok(()),
            Ok(()) => Err(Failure::Unanswered.into()),
            Err(error) => Err(self.failed_at(round, call, piece, &error)),
        })
    }

    fn write<T: Transport>(
        &self,
        client: &mut Client<T>,
        tasks: &mut [Task],
        input: &[u8],
        round: &mut Round<'_>,
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
                let Some(task) = tasks.get_mut(index) else { break };
                let length = usize::try_from(piece.length).unwrap_or(usize::MAX);
                let Some((part, tail)) = data.split_at_checked(length) else {
                    task.fail(Failure::Lost);
                    break;
                };
                data = tail;
                match self.begin_writing(client, piece, round) {
                    Ok(pointer) => {
                        writes.push(WriteRequest::new(pointer, part));
                        owners.push(Owner { task: index, piece });
                    }
                    Err(failed) => task.fail(failed),
                }
                if writes.is_full() {
                    self.write_now(client, &mut writes, &mut owners, tasks, round);
                }
            }
        }
        self.write_now(client, &mut writes, &mut owners, tasks, round);
    }

    fn write_now<T: Transport>(
        &self,
        client: &mut Client<T>,
        writes: &mut Writes<'_>,
        owners: &mut Owners,
        tasks: &mut [Task],
        round: &mut Round<'_>,
    ) {
        if writes.is_empty() {
            return;
        }
        let call = match self.call(client, round.end(), round.slice) {
            Ok(call) => call,
            Err(failure) => {
                writes.clear();
                owners.iter().for_each(|owner| self.leave(owner.piece.slab));
                return fail_all(owners, tasks, failure);
            }
        };
        let sent = client.write_many(writes);
        let is_in_time = call.is_in_time();
        for (request, owner) in writes.drain(..).zip(owners.drain(..)) {
            // Now the data has arrived, or may have.
            let Piece { slab, offset, length } = owner.piece;
            self.slabs.want(slab, offset, length);
            self.leave(slab);
            let failed = match sent.clone().and(request.result) {
                Ok(()) if is_in_time => continue,
                Ok(()) => Failure::Unanswered.into(),
                Err(error) => self.failed_at(round, call, owner.piece, &error),
            };
            if let Some(task) = tasks.get_mut(owner.task) {
                task.fail(failed);
            }
        }
    }

    /// Enters a slab, and allocates it if needed; returns where the range is. On an error the slab is left again.
    fn begin_writing<T: Transport>(
        &self,
        client: &mut Client<T>,
        piece: Piece,
        round: &mut Round<'_>,
    ) -> Result<Pointer, Failed> {
        if !self.slabs.enter(piece.slab, round.wait_end()) {
            return Err(Failure::Unanswered.into());
        }
        let begun = self
            .allocated(client, piece.slab, round)
            .and_then(|slab| self.range(client, slab, piece, round).map_err(Failed::from));
        if begun.is_err() {
            self.leave(piece.slab);
        }
        begun
    }

    /// Leaves a slab. If nothing in it is wanted, the keeper frees it.
    fn leave(&self, slab: usize) {
        if self.slabs.leave(slab) {
            self.owe(slab);
        }
    }

    /// The pointer to a piece, if its server is not known to be silent.
    fn range<T: Transport>(
        &self,
        client: &mut Client<T>,
        slab: Pointer,
        piece: Piece,
        round: &Round<'_>,
    ) -> Result<Pointer, Failure> {
        let pointer = slab.checked_add(piece.offset).map_err(|_| Failure::Lost)?;
        if round.is_silent(slab.node) {
            return Err(Failure::Unanswered);
        }
        match self.health.gate(slab.node, Instant::now()) {
            Gate::Open => Ok(pointer),
            Gate::Closed => Err(Failure::Silent),
            Gate::Probe => {
                // At the slab itself: it may have moved to another server.
                self.call(client, round.end(), PROBE)?;
                match client.read(pointer, &mut [0]) {
                    Err(error) if !is_response(&error) => Err(Failure::Silent),
                    _ => {
                        self.note_response(slab.node);
                        Ok(pointer)
                    }
                }
            }
        }
    }

    /// Takes the error of a call for a piece.
    fn failed_at(&self, round: &mut Round<'_>, call: Call, piece: Piece, error: &Error) -> Failed {
        let failed = Self::failed(round, call, error);
        if failed.failure != Failure::Unanswered {
            self.reported.failure(piece.slab as u64, error);
        }
        failed
    }

    /// A server responded that did not before.
    pub(super) fn note_response(&self, node: NodeId) {
        self.passed_over.responded(node);
        if self.health.responded(node) {
            tracing::info!(%node, "a memory server responds again");
        }
    }

    /// Suspects a server that did not respond until a request's deadline.
    fn note_silence(&self, node: NodeId) {
        if self.health.suspect(node, Instant::now()) {
            tracing::warn!(%node, "a memory server does not respond; requests for its slabs fail");
        }
    }

    fn trim<T: Transport>(
        &self,
        client: &mut Client<T>,
        task: &mut Task,
        round: &mut Round<'_>,
        end: Instant,
    ) {
        for piece in self.rest(task) {
            if self.slabs.pointer(piece.slab).is_some() {
                if !self.slabs.enter(piece.slab, round.wait_end()) {
                    return task.fail(Failure::Unanswered);
                }
                self.slabs.discard(piece.slab, piece.offset, piece.length);
                if self.slabs.leave(piece.slab) {
                    // Trimming is a hint: a slab that cannot be freed now stays for a while.
                    self.give_up(client, piece.slab, false, round);
                }
            }
            task.advance(piece.length, round, self.deadline);
            if task.is_paused(end) {
                return;
            }
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
        round: &mut Round<'_>,
        end: Instant,
    ) {
        for piece in self.rest(task) {
            if !self.slabs.enter(piece.slab, round.wait_end()) {
                return task.fail(Failure::Unanswered);
            }
            let (done, zeroed) = self.zero_entered(client, piece, allocates, round, end);
            if self.slabs.leave(piece.slab) {
                // It reads as zeroes, whether or not it can be freed now.
                self.give_up(client, piece.slab, false, round);
            }
            task.advance(done, round, self.deadline);
            if let Err(failed) = zeroed {
                return task.fail(failed);
            }
            if task.is_paused(end) {
                return;
            }
        }
    }

    /// Zeroes a piece of a slab, or a part of it from its beginning, if there is no time for more; returns how much.
    fn zero_entered<T: Transport>(
        &self,
        client: &mut Client<T>,
        piece: Piece,
        allocates: bool,
        round: &mut Round<'_>,
        end: Instant,
    ) -> (u64, Result<(), Failed>) {
        let Piece { slab, offset, length } = piece;
        if !allocates {
            if self.slabs.pointer(slab).is_none() {
                return (length, Ok(()));
            }
            // Before the zeroes arrive: data that arrives after them is marked as wanted then.
            let is_unwanted = self.slabs.discard(slab, offset, length);
            // A whole slab is not zeroed if it can be freed.
            let is_whole = length == self.slabs.length(slab);
            if is_whole && is_unwanted && self.give_up(client, slab, true, round) {
                return (length, Ok(()));
            }
            let (done, zeroed) = self.zero_there(client, piece, round, end);
            if done < length {
                self.slabs.want(slab, offset + done, length - done);
            }
            return (done, zeroed);
        }
        let zeroed = self.zero_there(client, piece, round, end);
        self.slabs.want(slab, offset, length);
        zeroed
    }

    /// Zeroes a piece of a slab that is in the table then, or a part of it; returns how much.
    fn zero_there<T: Transport>(
        &self,
        client: &mut Client<T>,
        piece: Piece,
        round: &mut Round<'_>,
        end: Instant,
    ) -> (u64, Result<(), Failed>) {
        let slab = self.allocated(client, piece.slab, round);
        let pointer = slab.and_then(|slab| Ok(self.range(client, slab, piece, round)?));
        let pointer = match pointer {
            Ok(pointer) => pointer,
            Err(failed) => return (0, Err(failed)),
        };
        let mut done = 0;
        while done < piece.length && (done == 0 || Instant::now() < end) {
            let bytes = (piece.length - done).min(ZERO_BYTES);
            if let Err(failed) = self.zero_now(client, pointer, piece, done, bytes, round) {
                return (done, Err(failed));
            }
            done += bytes;
            // The caller keeps how much is done, so this is not repeated.
            round.renew(self.deadline);
        }
        (done, Ok(()))
    }

    fn zero_now<T: Transport>(
        &self,
        client: &mut Client<T>,
        pointer: Pointer,
        piece: Piece,
        done: u64,
        bytes: u64,
        round: &mut Round<'_>,
    ) -> Result<(), Failed> {
        let next = pointer.checked_add(done).map_err(|_| Failure::Lost)?;
        let call = self.call(client, round.end(), round.slice)?;
        match client.zero(next, bytes) {
            Ok(()) if call.is_in_time() => Ok(()),
            Ok(()) => Err(Failure::Unanswered.into()),
            Err(error) => Err(self.failed_at(round, call, piece, &error)),
        }
    }
}

/// Whether an error came from a server.
pub(super) const fn is_response(error: &Error) -> bool {
    silent_node(error).is_none() && !matches!(error, Error::Carrier { .. })
}

/// The pieces were not sent.
fn fail_all(owners: &mut Owners, tasks: &mut [Task], failure: Failure) {
    for owner in owners.drain(..) {
        if let Some(task) = tasks.get_mut(owner.task) {
            task.fail(failure);
        }
    }
}

/// How much is done: of a number of tasks, and of those that are not over.
fn progress(tasks: &[Task]) -> (usize, u64) {
    let over = tasks.iter().filter(|task| task.result.is_some()).count();
    (over, tasks.iter().map(|task| task.done).sum())
}
