//! READs that a program in the kernel answers, as a model: server, reader and clients take one step at a time, in any
//! order.
//!
//! It models the rules of `bluebridge_protocol::direct` and of memory that outlives its process, and not the code. A step
//! is one store to shared memory, one atomic operation, or one look of the reader. A request stays in the network until
//! somebody takes it, so a lost request is one that nobody takes; a copy may be taken later.
//!
//! The server's core has a store buffer. What it holds is not modelled apart: the server's only load of what somebody else
//! writes is that of the low water, and every other store may as well happen later. So the buffer shows only if the mark
//! that the server executes is a store of its own (`Mutant::EnterInTwo`): the load may then happen before it.

mod client;
pub(crate) mod model;
mod reader;
mod server;
mod takeover;
mod world;

/// The most pages of a scenario, which are one line.
pub(crate) const PAGES: usize = 2;

/// The tag of the allocation at the start; each CREATE uses the next one.
pub(crate) const FIRST_TAG: u8 = 1;
/// The tag of the first CREATE.
pub(crate) const SECOND_TAG: u8 = 2;

/// What a client does. Pages are named by number, allocations by tag; an allocation begins with page 0.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Op {
    Read(usize, u8),
    Write(usize, u8),
    /// Writes the first half of a page.
    WritePart(usize, u8),
    /// FETCH_ADD in the first half of a page.
    Add(usize, u8),
    /// Leases all pages.
    Update,
    /// Writes all pages.
    Commit,
    /// Allocates all pages.
    Create,
    /// Allocates all pages; the allocation is incomplete.
    Provide,
    /// Completes an allocation.
    Confirm(u8),
    Delete(u8),
}

impl Op {
    /// Whether it changes a page.
    pub(super) fn changes(self, page: usize) -> bool {
        match self {
            Self::Read(..) | Self::Update | Self::Confirm(_) => false,
            Self::Write(at, _) | Self::WritePart(at, _) | Self::Add(at, _) => at == page,
            Self::Commit | Self::Create | Self::Provide | Self::Delete(_) => true,
        }
    }
}

/// A client: an incarnation of a node.
#[derive(Clone, Debug)]
pub(crate) struct ClientSpec {
    pub(crate) node: u8,
    pub(crate) incarnation: u8,
    /// Whether it has a session at the start.
    pub(crate) is_open: bool,
    /// It is a further thread of another client, and uses its session, which must not end.
    pub(crate) thread_of: Option<u8>,
    pub(crate) ops: Vec<Op>,
}

/// What the pages are at the start.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Start {
    /// One allocation, which was written.
    Written,
    /// Free, with the bytes of an allocation that was complete.
    Freed,
}

/// A mistake, planted to see whether the checker finds it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Mutant {
    // The reader.
    /// Whether the shard is open is not looked at.
    ShardIgnored,
    /// Low water is raised between the copy of the page and the second look at its sequence.
    RaisedAfterCopy,
    /// Low water is raised after the second look at the page's sequence.
    RaisedAfterCheck,
    ExecutingIgnored,
    /// The exchange of the word compares everything but the use of the slot.
    UsesIgnored,
    /// Low water is raised to the number of the READ instead of the low water that it carries.
    RaisedToNumber,
    /// The session's id is compared before the word is loaded.
    FactsFirst,
    MarkIgnored,
    /// That another server serves a page is not looked at.
    ElsewhereIgnored,
    /// The sequence is not compared after the copy.
    SequenceOnce,
    /// A page is copied although its sequence is odd.
    OddIgnored,
    TagIgnored,
    /// Pages of an incomplete allocation are answered.
    IncompleteAnswered,
    /// Whether an allocation is complete is loaded before the role of its first page.
    CompleteBeforeRole,
    /// The bytes of a page with leftover are sent.
    LeftoverRaw,
    /// Which line has the place of a page is not looked at.
    NameIgnored,
    /// It is looked at before the page's sequence is loaded.
    NameFirst,
    /// Which memory the page has is looked up before its sequence is loaded.
    FrameFirst,
    /// The reader passes everything on.
    AlwaysPasses,

    // The server.
    /// The shard is closed after another server serves its pages.
    ClosedLate,
    /// The marks of a line that moves end with its lease.
    GivenUnmarked,
    /// The memory of a line that moved is used for another one, and the sequences of its pages stay.
    ReusedUnsequenced,
    /// The marks of a line that comes back are cleared before its bytes are stored.
    HereEarly,
    /// A place says which line it has after the marks of its pages are cleared.
    NamedLate,
    /// The low water that readers raised does not count.
    LowWaterUnmerged,
    /// It counts for one request, and then the server's own low water is stored.
    LeaveForgets,
    /// The low water is loaded before the session is marked.
    CheckThenEnter,
    /// The session is marked by a store, after which the low water is loaded.
    EnterInTwo,
    /// A higher incarnation leaves the sessions of the lower ones to the reader.
    OldIncarnationKept,
    /// It hides them after the reply to its OPEN.
    HiddenAfterAnswer,
    /// A session that ends is not hidden.
    EndedKept,
    /// The next session in a slot has the count of uses of the last one.
    UseNotCounted,
    /// The id of a session is shown before the rest of it.
    IdFirst,
    /// The marks of a lease are cleared before the last page is written.
    MarkClearedEarly,
    /// The marks are set after the reply to the UPDATE.
    MarkSetLate,
    WriteUnsequenced,
    /// The first half of a page is stored before the page's sequence is odd.
    OddLate,
    /// The sequence is even before the last half is stored.
    EvenEarly,
    CreateUnsequenced,
    DeleteUnsequenced,
    /// A new head counts as complete, as the last one, until the flag is stored apart.
    CompleteApart,
    /// The above, with the head first.
    CompleteApartHeadFirst,
    /// A page's state says that it is written before its sequence is odd.
    StateBeforeSequence,
    /// A page's state says that it is written before its bytes are.
    StateFirst,
    /// What a page held before a change is not in the redo record.
    RedoTakesKind,
    /// The two above.
    StateFirstRedoTakesKind,
    /// DELETE frees the head after the other pages.
    HeadLast,
    /// The above, without a redo record of the DELETE.
    HeadLastWithoutRedo,

    // The takeover.
    SequenceLeftOdd,
    /// The redo record has the addend of a FETCH_ADD.
    RedoAdds,
    CommitWithoutRedo,
    /// The incarnation stays that of the last process.
    NotJoined,
    /// The reader is not detached while the memory is recovered.
    AttachedEarly,
    /// The above, with all sequences odd while the redo record is repeated.
    AttachedEarlySequenced,
    /// The takeover begins although a reader that was detached still runs.
    DetachedBlind,
    /// The above, with all sequences odd meanwhile.
    DetachedBlindSequenced,
    /// The sessions of the last process stay visible.
    SessionsKept,
    /// Marks of leases are not cleared.
    MarksKept,
    /// The marks of lines that moved are not set.
    MovesForgotten,
}

impl Mutant {
    pub(crate) const ALL: [Self; 59] = [
        Self::ShardIgnored,
        Self::RaisedAfterCopy,
        Self::RaisedAfterCheck,
        Self::ExecutingIgnored,
        Self::UsesIgnored,
        Self::RaisedToNumber,
        Self::FactsFirst,
        Self::MarkIgnored,
        Self::ElsewhereIgnored,
        Self::SequenceOnce,
        Self::OddIgnored,
        Self::TagIgnored,
        Self::IncompleteAnswered,
        Self::CompleteBeforeRole,
        Self::LeftoverRaw,
        Self::NameIgnored,
        Self::NameFirst,
        Self::FrameFirst,
        Self::AlwaysPasses,
        Self::ClosedLate,
        Self::GivenUnmarked,
        Self::ReusedUnsequenced,
        Self::HereEarly,
        Self::NamedLate,
        Self::LowWaterUnmerged,
        Self::LeaveForgets,
        Self::CheckThenEnter,
        Self::EnterInTwo,
        Self::OldIncarnationKept,
        Self::HiddenAfterAnswer,
        Self::EndedKept,
        Self::UseNotCounted,
        Self::IdFirst,
        Self::MarkClearedEarly,
        Self::MarkSetLate,
        Self::WriteUnsequenced,
        Self::OddLate,
        Self::EvenEarly,
        Self::CreateUnsequenced,
        Self::DeleteUnsequenced,
        Self::CompleteApart,
        Self::CompleteApartHeadFirst,
        Self::StateBeforeSequence,
        Self::StateFirst,
        Self::RedoTakesKind,
        Self::StateFirstRedoTakesKind,
        Self::HeadLast,
        Self::HeadLastWithoutRedo,
        Self::SequenceLeftOdd,
        Self::RedoAdds,
        Self::CommitWithoutRedo,
        Self::NotJoined,
        Self::AttachedEarly,
        Self::AttachedEarlySequenced,
        Self::DetachedBlind,
        Self::DetachedBlindSequenced,
        Self::SessionsKept,
        Self::MarksKept,
        Self::MovesForgotten,
    ];
}

/// A configuration of the model.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) clients: Vec<ClientSpec>,
    pub(crate) pages: usize,
    /// Sessions that fit.
    pub(crate) slots: usize,
    pub(crate) start: Start,
    /// Cores on which the reader runs.
    pub(crate) readers: usize,
    /// How many requests are taken twice.
    pub(crate) copies: u8,
    /// How many changes their clients give up.
    pub(crate) gives_up: u8,
    /// How many sessions end because they are idle.
    pub(crate) ends: u8,
    /// How often the server zeroes free pages.
    pub(crate) clears: u8,
    /// How often the server loses the authority over the shard to another one.
    pub(crate) closes: u8,
    /// Steps of a line that moves: to another server, its memory to another line, and back.
    pub(crate) moves: u8,
    /// The line is another server's, and has a place here: readers may take that of another line, or of an earlier time, for
    /// its.
    pub(crate) is_adopted: bool,
    /// How often the server is killed.
    pub(crate) crashes: u8,
    /// Whether the server's core has a store buffer.
    pub(crate) has_buffer: bool,
    pub(crate) mutant: Option<Mutant>,
}

impl Scenario {
    /// Clients of different nodes, each with a session.
    pub(crate) fn new(name: &'static str, pages: usize, clients: &[&[Op]]) -> Self {
        let clients: Vec<_> = (0..)
            .zip(clients)
            .map(|(node, ops)| ClientSpec {
                node,
                incarnation: 1,
                is_open: true,
                thread_of: None,
                ops: ops.to_vec(),
            })
            .collect();
        Self {
            name,
            slots: clients.len(),
            clients,
            pages,
            start: Start::Written,
            readers: 2,
            copies: 0,
            gives_up: 0,
            ends: 0,
            clears: 0,
            closes: 0,
            moves: 0,
            is_adopted: false,
            crashes: 0,
            has_buffer: true,
            mutant: None,
        }
    }

    pub(crate) fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// The client whose session a client uses.
    fn holder(&self, client: u8) -> u8 {
        self.clients[usize::from(client)].thread_of.unwrap_or(client)
    }

    fn has(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }
}
