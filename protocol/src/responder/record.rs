//! The state of one mutating request.

use bluebridge_wire::{Command, Status, address::LINE_PAGES};

/// How far a request is.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(u8)]
pub(super) enum Progress {
    /// Nothing of it arrived.
    #[default]
    Fresh,
    /// Some of its pieces arrived.
    Pieces,
    /// It waits for leased pages.
    Waiting,
    /// Its reply was sent.
    Replied,
}

/// No train.
pub(super) const NO_TRAIN: u16 = u16::MAX;

/// One request of a session's window: its reply, or its progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    /// CAS and FETCH_ADD with a reply: the earlier value. WRITE and ZERO: a status per page.
    /// ALLOC_WRITE with pieces missing: the pieces that arrived. UPDATE, COMMIT, ABORT and RENEW:
    /// the lease's epoch.
    pub(super) value: u64,
    /// Location bits: the target's for a WRITE or COMMIT with pieces missing and for an UPDATE or
    /// RENEW with a reply, the new pages' for a CREATE.
    pub(super) location: u64,
    /// Bytes or pages, as in the reply.
    pub(super) length: u32,
    /// The detail in the reply.
    pub(super) detail: u32,
    /// The node in the reply.
    pub(super) node: u16,
    /// Where the pieces of unfinished pages are.
    pub(super) train: u16,
    /// The place in the queue of a request that waits.
    pub(super) waiter: u16,
    pub(super) command: Command,
    pub(super) status: Status,
    /// Colour of the target or of the new pages.
    pub(super) tag: u8,
    pub(super) progress: Progress,
    /// One bit per page that is written or refused.
    pub(super) pages_done: u8,
    /// Whether the reply reports to the switch that the lease was contended.
    pub(super) contended: bool,
}

const _: () = assert!(size_of::<Record>() == 40);

impl Record {
    pub(super) const FRESH: Self = Self {
        value: 0,
        location: 0,
        length: 0,
        detail: 0,
        node: 0,
        train: NO_TRAIN,
        waiter: u16::MAX,
        command: Command::Ping,
        status: Status::Ok,
        tag: 0,
        progress: Progress::Fresh,
        pages_done: 0,
        contended: false,
    };

    /// A reply with nothing but a status and a length.
    pub(super) const fn reply(command: Command, status: Status, length: u32) -> Self {
        Self { command, status, length, progress: Progress::Replied, ..Self::FRESH }
    }

    /// Records the status of a page.
    pub(super) const fn finish_page(&mut self, page: usize, status: Status) {
        // Not by way of an array: to load the word after a store of a byte would wait for all stores before it, and those
        // are the page's.
        let shift = 8 * (LINE_PAGES - 1).saturating_sub(page);
        self.value = self.value & !(0xff << shift) | (status.code() as u64) << shift;
        self.pages_done |= 1 << page;
    }

    pub(super) const fn page_is_done(&self, page: usize) -> bool {
        self.pages_done & (1 << page) != 0
    }

    /// The statuses of the pages, in order.
    pub(super) fn page_statuses(&self) -> ([Status; LINE_PAGES], usize) {
        let statuses = self
            .value
            .to_be_bytes()
            .map(|code| Status::from_code(code).unwrap_or(Status::Internal));
        (statuses, self.pages_done.count_ones() as usize)
    }

    /// Ends an operation over pages: one status if all are equal, or PARTIAL.
    pub(super) fn conclude_pages(&mut self) {
        let (statuses, count) = self.page_statuses();
        let (first, rest) = (statuses[0], &statuses[1..count.max(1)]);
        self.status = if rest.iter().all(|&s| s == first) { first } else { Status::Partial };
        self.progress = Progress::Replied;
    }
}
