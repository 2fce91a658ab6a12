//! The end that sends requests: operations go in, datagrams and completions come out.
//!
//! One [`Requester`] serves one calling thread and communicates with many servers at once. A step
//! is: [`Requester::start`] operations; send the datagrams of [`Requester::poll_transmit`] until it
//! returns `None`; take [`Requester::poll_completion`]; wait for datagrams until
//! [`Requester::poll_timeout`]; pass them to [`Requester::handle_datagram`], then the time to
//! [`Requester::handle_timeout`].
//!
//! Nothing is allocated per operation: slots, windows and queues are allocated with the requester,
//! and a session's window when its server is first used.
//!
//! * `session`: OPEN, NO_SESSION, and continuing in a new session.
//! * `admit`: numbers, window and credit; `transmit`: sending; `timer`: retransmission.
//! * `receive`: which replies are trusted, and how each status is handled; `join`: reassembly of
//!   READs.
//! * `lease`: grants, waiting for other endpoints' leases, and replies after redirects.
//! * `leave`: sessions that are abandoned.
//! * `progress`: pages that have to be requested again, and the end of an operation.
//! * `anywhere`: CREATE and ALLOC_WRITE to any memory node; `moved`: blocks that other nodes serve.
//! * `operation`: the kinds of operations; `op`: one in progress; `slab`: all of them; `peer`: the
//!   other ends of sessions; `rtt`: their round trips.
//!   other ends of sessions; `rtt`: their round trips.

mod admit;
mod anywhere;
mod config;
mod counters;
mod join;
mod lease;
mod leave;
mod moved;
mod op;
mod operation;
mod peer;
mod progress;
mod random;
mod receive;
mod rtt;
mod session;
mod slab;
#[cfg(test)]
mod tests;
mod timer;
mod transmit;

use std::collections::VecDeque;

use bluebridge_wire::{Command, Pointer, Status, address::LINE_BYTES, address::LINE_PAGES};

pub use config::{Config, Timing};
pub use counters::{Counters, Event};
pub use operation::{
    Buffers, Completion, Failure, Lease, Migration, Operation, OperationId, Output, PageStatuses,
    Server, StartError,
};
pub use transmit::{HEAD_BYTES_MAX, Origin, SealedRequest};

use crate::{Timestamp, pieces::Cut, pieces::PIECE_BYTES_MIN};
use core::time::Duration;
use moved::MovedTable;
use op::{
    Arrived, Grant, Holder, Link, NO_PAGE, Op, Pages, Place, Queue, Request, Route, Run, Stage,
};
use peer::{Peers, State};
use random::Random;
use slab::{List, NONE, Slab};

/// The most data of a PING, in bytes.
pub const PING_BYTES_MAX: u32 = 64;

/// The requester's state machine; see the module's documentation.
#[derive(Debug)]
pub struct Requester {
    config: Config,
    ops: Slab,
    peers: Peers,
    /// Operations with datagrams to send, in train order.
    ready: List,
    /// Peers whose OPEN is to be sent.
    opening: VecDeque<u16>,
    /// Sessions that were abandoned and are to be closed.
    leaving: VecDeque<leave::Leave>,
    /// Peers with operations that wait for window or credit.
    backpressured: VecDeque<u16>,
    /// Window or credit was released since the backpressured peers were tried.
    freed: bool,
    completions: VecDeque<Completion>,
    outstanding_pages: u32,
    moved: MovedTable,
    random: Random,
    counters: Counters,
    /// Not after any active timer or deadline.
    next_timeout: Timestamp,
    /// The round trip of requests in no session.
    anywhere_trip: rtt::RoundTrip,
}

impl Requester {
    /// A requester without sessions; all memory for operations is allocated now.
    ///
    /// An invalid piece size is replaced by the nearest valid one.
    #[must_use]
    pub fn new(mut config: Config) -> Self {
        config.piece_bytes = clamp_piece_bytes(config.piece_bytes);
        config.credit_pages = config.credit_pages.max(1);
        let ops = Slab::new(config.operation_count);
        let servers = usize::from(config.server_count) + 1;
        Self {
            completions: VecDeque::with_capacity(ops.limit()),
            ops,
            peers: Peers::new(config.server_count),
            ready: List::EMPTY,
            opening: VecDeque::with_capacity(servers),
            leaving: VecDeque::with_capacity(servers),
            backpressured: VecDeque::with_capacity(servers),
            freed: false,
            outstanding_pages: 0,
            moved: MovedTable::new(config.moved_count),
            random: Random::new(config.seed),
            counters: Counters::default(),
            next_timeout: Timestamp::MAX,
            anywhere_trip: rtt::RoundTrip::default(),
            config,
        }
    }

    /// Sets another piece size, because the space's links changed: for sessions that are opened and
    /// anywhere-ALLOC_WRITEs that are started from now on.
    ///
    /// An invalid size is replaced by the nearest valid one.
    pub fn set_piece_bytes(&mut self, piece_bytes: u16) {
        let piece_bytes = clamp_piece_bytes(piece_bytes);
        let is_smaller = piece_bytes < self.config.piece_bytes;
        self.config.piece_bytes = piece_bytes;
        if is_smaller {
            // They proposed a size that the links do not carry; timers send the next ones.
            self.discard_opens();
        }
    }

    /// Starts an operation that ends at the configured deadline at the latest.
    ///
    /// `token` is returned with the completion and identifies the caller's memory to [`Buffers`].
    ///
    /// # Errors
    /// If the operation is invalid, or no slot is free; nothing was started.
    pub fn start(
        &mut self,
        now: Timestamp,
        operation: Operation,
        token: u64,
    ) -> Result<OperationId, StartError> {
        self.start_until(now, operation, token, now + self.config.timing.deadline)
    }

    /// Starts an operation that ends at `deadline` at the latest.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_until(
        &mut self,
        now: Timestamp,
        operation: Operation,
        token: u64,
        deadline: Timestamp,
    ) -> Result<OperationId, StartError> {
        self.check(&operation)?;
        if self.ops.live() + self.completions.len() >= self.ops.limit() {
            return Err(StartError::Full);
        }
        let peer = match self.server_of(&operation) {
            Some(server) => self.peer(server).ok_or(StartError::Servers)?,
            None => NONE,
        };
        let op = self.new_op(now, operation, token, deadline, peer);
        let index = self.ops.insert(op).ok_or(StartError::Full)?;
        // Some operations end at once, so the id is taken before.
        let id = self.ops.id(index);
        self.counters.count(Event::Start);
        self.arm(deadline);
        if peer == NONE {
            self.start_anywhere(index);
        } else {
            self.peers[peer].op_count += 1;
            self.set_run(index);
            self.enqueue(now, index);
        }
        Ok(id)
    }

    /// Cancels an operation without a completion; false if it has ended already.
    ///
    /// A mutating one that was sent may still be applied, once.
    pub fn cancel(&mut self, now: Timestamp, id: OperationId) -> bool {
        let Some(index) = self.ops.find(id) else { return false };
        self.counters.count(Event::Cancel);
        self.release(index);
        self.admit_backpressured(now);
        true
    }

    /// Whether an operation in progress waits at its server for a lease of somebody else, as that has said.
    #[must_use]
    pub fn is_queued(&self, id: OperationId) -> bool {
        let index = self.ops.find(id);
        index.is_some_and(|index| self.ops[index].request.queue == Queue::Home)
    }

    /// Cancels all operations, also those that ended and were not polled.
    pub fn cancel_all(&mut self) {
        for index in 0..self.ops.slots() {
            if self.ops.at(index).is_some() {
                self.counters.count(Event::Cancel);
                self.release(index);
            }
        }
        self.completions.clear();
    }

    /// The servers with which a session is open.
    pub fn open_servers(&self) -> impl Iterator<Item = Server> {
        let count = u16::try_from(self.peers.count()).unwrap_or(NONE);
        let peers = (0..count).filter_map(|peer| self.peers.at(peer));
        peers.filter(|peer| peer.state == State::Open).map(|peer| peer.server)
    }

    /// The next operation that ended.
    pub fn poll_completion(&mut self) -> Option<Completion> {
        self.completions.pop_front()
    }

    /// The latest time to call [`Self::handle_timeout`]; `None` if nothing is in progress.
    #[must_use]
    pub const fn poll_timeout(&self) -> Option<Timestamp> {
        if self.ops.live() == 0 { None } else { Some(self.next_timeout) }
    }

    /// Operations in progress.
    #[must_use]
    pub const fn operation_count(&self) -> usize {
        self.ops.live()
    }

    /// Events so far.
    #[must_use]
    pub const fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The configuration.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// The measured round trip to a server; `None` before the first reply.
    #[must_use]
    pub fn round_trip(&self, server: Server) -> Option<Duration> {
        let peer = self.peers.find(server)?;
        self.peers.at(peer)?.round_trip.smoothed()
    }

    fn check(&self, operation: &Operation) -> Result<(), StartError> {
        let length_is_good = match *operation {
            Operation::AllocWrite { length, .. } => {
                (1..=LINE_BYTES as u64).contains(&u64::from(length))
            }
            Operation::Create { pages, .. } => pages > 0,
            Operation::Ping { length, .. } => length <= PING_BYTES_MAX,
            _ => operation.range().is_none_or(|(pointer, length)| in_one_line(pointer, length)),
        };
        if !length_is_good {
            return Err(StartError::Length);
        }
        if let Some(pointer) = operation.pointer()
            && pointer.space != self.config.space
        {
            return Err(StartError::Space);
        }
        match self.server_of(operation) {
            Some(server) if !server.node.is_unicast() => Err(StartError::Node(server.node)),
            _ => Ok(()),
        }
    }

    /// The server to contact first; `None` for any.
    fn server_of(&self, operation: &Operation) -> Option<Server> {
        match *operation {
            Operation::AllocWrite { server, .. } | Operation::Create { server, .. } => server,
            Operation::Close { server }
            | Operation::Ping { server, .. }
            | Operation::Stat { server } => Some(server),
            _ if operation.giver().is_some() => operation.giver(),
            _ => {
                let pointer = operation.pointer()?;
                let home = Server::of(pointer);
                // A pointer without a single home node is refused, even if its line is in the cache
                // of moves.
                // The home frees what it has not lost, wherever it is.
                let is_for_home =
                    operation.command() == Command::Delete && operation.range().is_none();
                let is_led = home.node.is_unicast() && !is_for_home;
                let moved = self.moved.find(pointer).filter(|_| is_led);
                Some(Server { node: moved.unwrap_or(home.node), ..home })
            }
        }
    }

    fn peer(&mut self, server: Server) -> Option<u16> {
        let (peer, evicted) = self.peers.find_or_insert(server)?;
        if let Some(evicted) = evicted {
            self.counters.count(Event::ServerEvict);
            self.note_leave(leave::Leave::of(&evicted));
        }
        Some(peer)
    }

    fn new_op(
        &self,
        now: Timestamp,
        operation: Operation,
        token: u64,
        deadline: Timestamp,
        peer: u16,
    ) -> Op {
        let piece = usize::from(self.config.piece_bytes);
        let (in_page, length) = match (operation.range(), operation) {
            (Some((pointer, length)), _) => (pointer.location.in_page(), length),
            (None, Operation::AllocWrite { length, .. }) => (0, length),
            (None, _) => (0, 1),
        };
        // An operation without a range has one page and one piece; a range was checked before.
        let cut = Cut::new(in_page, length as usize, piece).unwrap_or(Cut::ONE);
        Op {
            operation,
            stage: if peer == NONE { Stage::Anywhere { entropy: 0 } } else { Stage::Direct },
            token,
            started: now,
            deadline,
            timer: Timestamp::MAX,
            pages: Pages {
                statuses: [Status::Ok; LINE_PAGES],
                pending: page_bits(cut.page_count()),
                stale: 0,
                one_by_one: false,
            },
            route: Route {
                peer,
                home: false,
                avoids_pointer: false,
                is_orphan: false,
                hops: 0,
                pauses: 0,
                moved_node: 0,
                moved_page: NO_PAGE,
                moved_block_pages: 0,
                holder: Holder::default(),
            },
            run: Run { cut, start: 0, first_page: 0 },
            request: Request {
                sequence: 0,
                first_sent: now,
                last_sent: now,
                sent_count: 0,
                to_send: 0,
                attempt: 0,
                expired: 0,
                cost: 1,
                probing: false,
                overloaded: false,
                queue: Queue::No,
            },
            arrived: Arrived {
                versions: [0; LINE_PAGES],
                done: 0,
                settled: 0,
                restarted: 0,
                from_owner: false,
            },
            grant: Grant {
                lease: Lease { epoch: 0, expires_at: now, granted_ms: 0 },
                sent_after: now,
            },
            link: Link { place: Place::Waiting, generation: 0, prev: NONE, next: NONE },
            may_be_applied: false,
            sent_before: false,
            is_question: false,
        }
    }

    /// Records a timer that expires at `when`.
    fn arm(&mut self, when: Timestamp) {
        self.next_timeout = self.next_timeout.min(when);
    }
}

const fn page_bits(count: usize) -> u8 {
    if count >= LINE_PAGES { u8::MAX } else { (1 << count) - 1 }
}

/// The piece size itself, or the nearest valid one.
fn clamp_piece_bytes(piece_bytes: u16) -> u16 {
    let page = bluebridge_wire::address::PAGE_BYTES;
    let piece = usize::from(piece_bytes).clamp(PIECE_BYTES_MIN, page);
    u16::try_from(piece).unwrap_or(piece_bytes)
}

const fn in_one_line(pointer: Pointer, length: u32) -> bool {
    let line = LINE_BYTES as u64;
    length > 0 && pointer.location.offset() % line + length as u64 <= line
}
