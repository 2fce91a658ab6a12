//! The clients' operations, and their possible results.

use bluebridge_protocol::{
    Timestamp,
    requester::{Operation, Server},
};
use bluebridge_wire::{NodeId, Pointer, Status};

use super::region::Purpose;

/// One operation of a client, as the model sees it.
#[derive(Clone, Debug)]
pub(super) enum Task {
    /// Allocates; `bytes` is the number of bytes written at once, or 0.
    Create {
        purpose: Purpose,
        server: Option<usize>,
        pages: u32,
        bytes: usize,
    },
    /// Frees; `pages` may be 0.
    Delete {
        region: usize,
        pages: u32,
    },
    /// Any bytes of a private region.
    Read {
        region: usize,
        offset: u64,
        length: usize,
    },
    Write {
        region: usize,
        offset: u64,
        length: usize,
    },
    Zero {
        region: usize,
        offset: u64,
        length: usize,
    },
    /// Any bytes, and whole pages, of a shared region.
    SharedRead {
        region: usize,
        offset: u64,
        length: usize,
    },
    SharedWrite {
        region: usize,
        first_page: usize,
        pages: usize,
        value: u64,
    },
    Add {
        region: usize,
        cell: usize,
        addend: u64,
    },
    Swap {
        region: usize,
        cell: usize,
        expected: u64,
        new: u64,
    },
    /// Reads the word of an add cell (`cell` below `ADD_CELLS`) or a swap cell, at the end of the
    /// run.
    CellRead {
        region: usize,
        cell: usize,
    },
    Ping {
        server: usize,
        length: usize,
    },
    Stat {
        server: usize,
    },
    Close {
        server: usize,
    },
    /// An operation that must be refused with one of these statuses; without a request to a server
    /// if there is none.
    Wrong {
        operation: Operation,
        server: usize,
        refusals: &'static [Status],
        name: &'static str,
    },
}

impl Task {
    /// The name in reports.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Create { server: None, bytes: 0, .. } => "create anywhere",
            Self::Create { server: Some(_), bytes: 0, .. } => "create",
            Self::Create { server: None, .. } => "alloc_write anywhere",
            Self::Create { server: Some(_), .. } => "alloc_write",
            Self::Delete { .. } => "delete",
            Self::Read { .. } => "read",
            Self::Write { .. } => "write",
            Self::Zero { .. } => "zero",
            Self::SharedRead { .. } => "shared read",
            Self::SharedWrite { .. } => "shared write",
            Self::Add { .. } => "fetch_add",
            Self::Swap { .. } => "cas",
            Self::CellRead { .. } => "cell read",
            Self::Ping { .. } => "ping",
            Self::Stat { .. } => "stat",
            Self::Close { .. } => "close",
            Self::Wrong { name, .. } => name,
        }
    }

    /// The region that only this client may use until the task ends.
    pub(super) const fn holds(&self) -> Option<usize> {
        match self {
            Self::Delete { region, .. }
            | Self::Read { region, .. }
            | Self::Write { region, .. }
            | Self::Zero { region, .. } => Some(*region),
            _ => None,
        }
    }

    /// The operation that is sent.
    pub(super) fn operation(
        &self,
        place: &impl Fn(usize) -> Pointer,
        nodes: &[NodeId],
    ) -> Operation {
        let server = |index: usize| Server { node: nodes[index], shard: 0 };
        let length_of = |length: usize| u32::try_from(length).expect("within a line");
        let at = |region: usize, offset: u64| {
            place(region).checked_add(offset).expect("inside of the region")
        };
        match *self {
            Self::Create { server: to, pages, bytes: 0, .. } => {
                Operation::Create { server: to.map(server), pages }
            }
            Self::Create { server: to, bytes, .. } => {
                Operation::AllocWrite { server: to.map(server), length: length_of(bytes) }
            }
            Self::Delete { region, pages } => Operation::Delete { pointer: place(region), pages },
            Self::Read { region, offset, length } | Self::SharedRead { region, offset, length } => {
                Operation::Read { pointer: at(region, offset), length: length_of(length) }
            }
            Self::Write { region, offset, length } => {
                Operation::Write { pointer: at(region, offset), length: length_of(length) }
            }
            Self::Zero { region, offset, length } => {
                Operation::Zero { pointer: at(region, offset), length: length_of(length) }
            }
            Self::SharedWrite { region, first_page, pages, .. } => Operation::Write {
                pointer: at(region, first_page as u64 * 4096),
                length: length_of(pages * 4096),
            },
            Self::Add { region, cell, addend } => {
                Operation::FetchAdd { pointer: at(region, cell_offset(cell)), addend }
            }
            Self::Swap { region, cell, expected, new } => {
                let pointer = at(region, cell_offset(cell + super::region::ADD_CELLS));
                Operation::CompareSwap { pointer, expected, new }
            }
            Self::CellRead { region, cell } => {
                Operation::Read { pointer: at(region, cell_offset(cell)), length: 8 }
            }
            Self::Ping { server: to, length } => {
                Operation::Ping { server: server(to), length: length_of(length) }
            }
            Self::Stat { server: to } => Operation::Stat { server: server(to) },
            Self::Close { server: to } => Operation::Close { server: server(to) },
            Self::Wrong { operation, .. } => operation,
        }
    }
}

const fn cell_offset(cell: usize) -> u64 {
    cell as u64 * super::region::CELL_STRIDE
}

/// An outstanding task, with the client's memory for it.
pub(super) struct Slot {
    pub(super) task: Task,
    pub(super) start: Timestamp,
    /// When the client's oldest outstanding operation began, at the start of this one.
    pub(super) oldest: Timestamp,
    /// By the client's clock.
    pub(super) deadline: Timestamp,
    pub(super) outgoing: Vec<u8>,
    pub(super) incoming: Vec<u8>,
}
