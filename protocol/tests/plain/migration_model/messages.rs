//! What is sent.

use super::lines::{Epoch, Value};

/// The answer to a client's request.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Answer {
    /// The server needs more pieces.
    Nothing,
    Done,
    /// Some pages were written, and the others are with this server, or leased.
    Partial {
        written: u8,
        holder: Option<u8>,
    },
    Granted {
        epoch: Epoch,
        value: Value,
    },
    Created(Pointer),
    OutOfMemory,
    Busy,
    Moved(u8),
    NoAuthority,
    WrongNode,
    NoSession,
    StaleGeneration,
    NotAllocated,
    LeaseLost,
}

/// Where a page is, and what it is called.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Pointer {
    pub(super) line: u8,
    pub(super) page: u8,
    pub(super) generation: u8,
    pub(super) tag: u8,
}

#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) struct Request {
    pub(super) client: u8,
    pub(super) op: u8,
    pub(super) number: u8,
    /// The server of its session, and that one's incarnation.
    pub(super) server: u8,
    pub(super) incarnation: u8,
    /// Sent to the pointer, and not to the server's endpoint address.
    pub(super) to_pointer: bool,
    /// Not the first try.
    pub(super) is_again: bool,
    /// The pages that it asks for, and the one of which this is the piece, if it is a train.
    pub(super) asked: u8,
    pub(super) piece: u8,
}

/// KEEP.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) struct Keep {
    pub(super) migration: u8,
    pub(super) line: u8,
    pub(super) epoch: Epoch,
    /// Of the taker.
    pub(super) incarnation: u8,
    pub(super) session: u8,
}

/// The answer to KEEP.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) struct Kept {
    pub(super) keep: Keep,
    pub(super) is_ok: bool,
    /// Which process of the giver answers, and with which memory.
    pub(super) incarnation: u8,
    pub(super) life: u8,
    /// The highest incarnations that the giver has seen.
    pub(super) fences: [u8; 2],
}

#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) enum Message {
    Request(Request),
    Keep(Keep),
    Kept(Kept),
}
