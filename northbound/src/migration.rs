//! Orders and reports of live migration between the controller and memory servers (`docs/migration.md`).
//!
//! Orders are idempotent: the controller repeats an order after every reconnect until it has the report that ends it.
//! Pages are numbered as in the pointers of the home node.

mod convert;

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use bluebridge_wire::{ArenaGeneration, Fence, NodeId, Space};

/// The contents of a memory node, from the start at which it was empty until it loses them.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Contents {
    /// The node.
    pub node: NodeId,
    /// The first arena generation that the node had with these contents.
    pub generation: ArenaGeneration,
}

impl fmt::Display for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {} generation {}", self.node, self.generation.number())
    }
}

/// Arena generations in the pointers to pages, from the first to the last.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Generations {
    /// The first.
    pub first: ArenaGeneration,
    /// The last; not below the first.
    pub last: ArenaGeneration,
}

/// A row of neighbouring pages, whole lines, that a server serves for their home.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ServedRow {
    /// The pages.
    pub pages: Range<u64>,
    /// The generations in the pointers to them.
    pub generations: Generations,
}

/// A migration, as the controller recorded it before it told anyone.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Terms {
    /// Its id; a later migration has a higher one.
    pub migration: u64,
    /// The range epoch that its requests name.
    pub range_epoch: u32,
    /// The contents of the home node that the pages are part of.
    pub home: Contents,
    /// The tenant.
    pub space: Space,
    /// Whole lines of one shard.
    pub pages: Range<u64>,
    /// Who serves the pages.
    pub giver: Contents,
    /// Who will serve them.
    pub taker: Contents,
    /// The incarnation under which the taker asks for lines, also after a restart with its memory.
    pub taker_incarnation: u32,
}

/// Where the pages of a home are. The home replaces what it has learned before, but what it serves itself stays its own.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Elsewhere {
    /// The home's contents, or earlier ones of the home that are lost.
    pub home: Contents,
    /// Increases with every change.
    pub version: u64,
    /// Rows, and the servers that have them.
    pub rows: Vec<(Range<u64>, NodeId)>,
    /// Rows that are lost, with the memory of the server that had them. Of contents that are lost as a whole, all other
    /// rows are lost, and this is empty.
    pub lost: Vec<Range<u64>>,
}

/// A row of neighbouring pages, whole lines, of contents that a memory node lost, as it learns of them when it joins.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct EarlierRow {
    /// The first generation of these contents.
    pub generation: ArenaGeneration,
    /// The pages.
    pub pages: Range<u64>,
    /// The server that has them; `None` if servers must report first which one does, or that none does.
    pub at: Option<NodeId>,
}

/// A node that is gone, and for which another server says where its pages are.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Deputyship {
    /// The node.
    pub home: NodeId,
    /// The incarnation under which the deputy answers.
    pub incarnation: u32,
    /// The space of its pages.
    pub space: Space,
    /// The range epoch of the incarnation.
    pub range_epoch: u32,
    /// The last generation that the node may have used.
    pub last_generation: ArenaGeneration,
    /// How long the node had served nothing when the deputy was chosen.
    pub idle: Duration,
    /// The version of the places.
    pub version: u64,
    /// The first generations of the contents of which it is known where their pages are. Pages that are in no row are lost.
    pub contents: Vec<ArenaGeneration>,
    /// The rows of these contents that other servers have, or may have.
    pub rows: Vec<EarlierRow>,
}

/// What the controller wants from a memory server.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Order {
    /// The taker may take lines: the giver allows it.
    Take {
        /// The migration. All of it, because a server that restarted with its memory may know only its lines.
        terms: Terms,
        /// The highest incarnations of clients that the giver has seen.
        fences: Vec<Fence>,
    },
    /// To the giver: let the taker take lines, and allocate no page of the range any more.
    Allow(Terms),
    /// To a deputy: answer for a node that is gone, from these places.
    Deputize(Deputyship),
    /// Forget free lines of contents that a home has lost: nobody leads here for them any more.
    Discard {
        /// The home's contents.
        home: Contents,
        /// Another one in each order, so that the same order can be given again.
        round: u64,
        /// Whole lines.
        pages: Vec<Range<u64>>,
    },
    /// To a deputy: answer for a node no more.
    Dismiss {
        /// The node.
        home: NodeId,
        /// The last incarnation under which it answered.
        incarnation: u32,
    },
    /// To the giver: the home knows who serves the lines, so forget the marks of this migration, and only of this one.
    Forget(u64),
    /// To the home: where its pages are.
    Learn(Elsewhere),
    /// A node lost its contents of earlier generations than this. What is marked for it, or leased to it for a migration,
    /// is no longer its own; lines in doubt of which it was the giver are lost; lines that are known to be there may be
    /// anywhere until the home learns where.
    Lose {
        /// The node.
        node: NodeId,
        /// The first generation of its present contents.
        began: ArenaGeneration,
    },
    /// To the taker: the migration is closed, so free what is still reserved for it.
    Release(u64),
    /// Report which pages of a home the server has. A server with lines of this home in doubt waits until it knows. The
    /// home itself does not report what it serves.
    Report {
        /// The home's contents.
        home: Contents,
        /// The number of the question.
        round: u64,
    },
    /// To the taker: reserve frames.
    Reserve(Terms),
    /// To a drained server: allocate nothing, or allocate again.
    Seal(bool),
    /// To the taker: take no more lines of this migration, and report when none is on its way.
    Settle(Terms),
    /// To the giver: allow nothing more.
    Withdraw(u64),
}

/// What a server does not do, in a report.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum OrderKind {
    /// [`Order::Allow`].
    Allow,
    /// [`Order::Forget`].
    Forget,
    /// [`Order::Release`].
    Release,
    /// [`Order::Reserve`].
    Reserve,
    /// [`Order::Settle`].
    Settle,
    /// [`Order::Take`].
    Take,
    /// [`Order::Withdraw`].
    Withdraw,
}

/// Why a server does not execute an order.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// A migration with this id has other terms there; the controller is at fault.
    #[error("it knows other terms of this migration")]
    Contradiction,
    /// Its table of migrations or ranges is full.
    #[error("its table of ranges is full")]
    Full,
    /// The migration was withdrawn or closed there.
    #[error("the migration was withdrawn or closed there before")]
    Late,
    /// It has too little free memory.
    #[error("it has too little free memory")]
    NoRoom,
    /// Pages of the range are of another migration, or moved away.
    #[error("pages of the range are of another migration there, or moved away")]
    Overlap,
    /// It does not serve the space.
    #[error("it does not serve the space")]
    Space,
    /// It does not know the migration.
    #[error("it does not know the migration")]
    Unknown,
    /// Another reason, for people.
    #[error("{0}")]
    Other(String),
}

/// What a memory server reports.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Report {
    /// The giver allows it.
    Allowed {
        /// The migration.
        migration: u64,
        /// The highest incarnations of clients that it has seen.
        fences: Vec<Fence>,
    },
    /// The pages of a home that the server has.
    Claims {
        /// The home's contents.
        home: Contents,
        /// The number of the question.
        round: u64,
        /// What it serves.
        served: Vec<ServedRow>,
        /// What it marked for the takers of open migrations.
        given: Vec<Range<u64>>,
        /// Of the home itself: own rows that it had given to a server that lost its memory.
        lost: Vec<Range<u64>>,
    },
    /// The deputy answers for a node.
    Deputized {
        /// The node.
        home: NodeId,
        /// The incarnation under which it answers.
        incarnation: u32,
        /// The version of the places from which it answers.
        version: u64,
    },
    /// The server does not answer for a node.
    Dismissed {
        /// The node.
        home: NodeId,
        /// The last incarnation under which it answered.
        incarnation: u32,
    },
    /// The giver forgot the marks.
    Forgotten(u64),
    /// The lines of a home that the server has and of which no page is allocated, in place of what it reported before. As
    /// only the home allocates pages, they stay free while they are here. There may be more.
    Free {
        /// The home's contents.
        home: Contents,
        /// Whole lines.
        pages: Vec<Range<u64>>,
    },
    /// The home knows where its pages are.
    Learned {
        /// The home's contents.
        home: Contents,
        /// The version that it learned.
        version: u64,
    },
    /// The server knows that a node lost its contents.
    Lost {
        /// The node.
        node: NodeId,
        /// The first generation of its present contents.
        began: ArenaGeneration,
    },
    /// How far the taker is.
    Progress {
        /// The migration.
        migration: u64,
        /// What it serves of the range.
        kept: Vec<ServedRow>,
        /// Lines that it took and has not kept or dropped.
        on_the_way_count: u64,
        /// Those of them for which KEEP was sent and not answered.
        in_doubt_count: u64,
        /// Lines that are free as a whole, and stay at home.
        free_count: u64,
        /// Whether no line of the range is left to take.
        is_done: bool,
    },
    /// The server does not execute an order.
    Refused {
        /// The migration.
        migration: u64,
        /// The order.
        order: OrderKind,
        /// The reason.
        why: Refusal,
    },
    /// The taker freed what was reserved.
    Released(u64),
    /// The taker has frames.
    Reserved(u64),
    /// The server allocates nothing, or allocates again.
    Sealed(bool),
    /// The taker takes nothing more of the range, and nothing is on its way.
    Settled {
        /// The migration.
        migration: u64,
        /// What it serves of the range, for good.
        kept: Vec<ServedRow>,
    },
    /// The giver allows nothing more.
    Withdrawn(u64),
}
