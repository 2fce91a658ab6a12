//! What is stored of migrations.

use std::collections::BTreeSet;
use std::ops::Range;

use bluebridge_northbound::migration::{Contents, Generations, Refusal, ServedRow, Terms};
use bluebridge_wire::{ArenaGeneration, NodeId, Space};
use serde::{Deserialize, Serialize};

use super::pages::PageMap;

/// The contents of a memory node, as numbers: the node, and the first generation that it had with them.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub struct ContentsRecord {
    /// The node.
    pub node: u16,
    /// The generation.
    pub generation: u16,
}

impl ContentsRecord {
    /// The node.
    #[must_use]
    pub const fn id(self) -> NodeId {
        NodeId(self.node)
    }

    /// As it is sent.
    #[must_use]
    pub fn contents(self) -> Contents {
        Contents { node: NodeId(self.node), generation: generation(self.generation) }
    }
}

impl From<Contents> for ContentsRecord {
    fn from(Contents { node, generation }: Contents) -> Self {
        Self { node: node.0, generation: generation.number() }
    }
}

fn generation(number: u16) -> ArenaGeneration {
    ArenaGeneration::new(number).unwrap_or(ArenaGeneration::MAX)
}

/// The generations in the pointers to pages, from the first to the last.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub struct GenerationRange {
    /// The first.
    pub first: u16,
    /// The last.
    pub last: u16,
}

impl From<Generations> for GenerationRange {
    fn from(Generations { first, last }: Generations) -> Self {
        Self { first: first.number(), last: last.number() }
    }
}

/// Rows of pages that a server serves, as pages with generations.
pub(super) fn kept_pages(rows: &[ServedRow]) -> PageMap<GenerationRange> {
    rows.iter().map(|row| (row.pages.clone(), row.generations.into())).collect()
}

/// How far a migration is. Each stage is stored before the order that follows from it is sent.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub enum Stage {
    /// Nobody knows it; the taker is to reserve frames.
    Recorded,
    /// The taker has frames; the giver is to allow it.
    Reserved,
    /// The taker takes lines.
    Allowed,
    /// The giver is to withdraw its permission: it may have it still.
    Ending,
    /// The giver allows nothing more. Lines may be on their way.
    Withdrawn,
    /// No line is on its way. The home is to learn who serves the lines.
    Settled,
    /// The home knows. The giver is to forget the marks.
    Learned,
    /// The giver has forgotten. The taker is to free what is still reserved.
    Forgotten,
    /// Nothing is left to do.
    Closed,
}

/// Why a migration ends before all lines have moved.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum End {
    /// An operator cancelled it, or the controller did: then the reason of the migration says why.
    Cancelled,
    /// The giver lost its memory.
    GiverLost,
    /// The taker lost its memory, and with it the lines that it had taken.
    TakerLost,
    /// The taker was away before the giver knew of it, and others waited for it.
    TakerAway,
    /// A server refused an order.
    Refused {
        /// The server.
        node: u16,
        /// The reason.
        why: RefusalRecord,
    },
}

/// [`Refusal`], stored.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum RefusalRecord {
    /// Other terms are known there.
    Contradiction,
    /// A table is full there.
    Full,
    /// It was withdrawn or closed there.
    Late,
    /// Too little free memory.
    NoRoom,
    /// The range overlaps another one there.
    Overlap,
    /// The space is not served there.
    Space,
    /// The migration is not known there.
    Unknown,
    /// Another reason.
    Other(String),
}

/// The most characters of a reason that are stored: it comes from outside.
const REASON_MAX: usize = 256;

impl From<Refusal> for RefusalRecord {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Contradiction => Self::Contradiction,
            Refusal::Full => Self::Full,
            Refusal::Late => Self::Late,
            Refusal::NoRoom => Self::NoRoom,
            Refusal::Overlap => Self::Overlap,
            Refusal::Space => Self::Space,
            Refusal::Unknown => Self::Unknown,
            Refusal::Other(words) => {
                let shown = words.chars().filter(|it| !it.is_control()).take(REASON_MAX);
                Self::Other(shown.collect())
            }
            other => Self::Other(other.to_string()),
        }
    }
}

impl RefusalRecord {
    /// As it was sent.
    #[must_use]
    pub fn refusal(&self) -> Refusal {
        match self {
            Self::Contradiction => Refusal::Contradiction,
            Self::Full => Refusal::Full,
            Self::Late => Refusal::Late,
            Self::NoRoom => Refusal::NoRoom,
            Self::Overlap => Refusal::Overlap,
            Self::Space => Refusal::Space,
            Self::Unknown => Refusal::Unknown,
            Self::Other(words) => Refusal::Other(words.clone()),
        }
    }
}

/// A migration.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct MigrationRecord {
    /// Greater than that of every earlier one.
    pub id: u64,
    /// The contents that the pages are part of.
    pub home: ContentsRecord,
    /// The tenant.
    pub space: u16,
    /// Whole lines of one shard, as the home numbers its pages.
    pub pages: Range<u64>,
    /// Who serves the pages.
    pub giver: ContentsRecord,
    /// Who will serve them.
    pub taker: ContentsRecord,
    /// The taker's incarnation, under which it asks for lines.
    pub taker_incarnation: u32,
    /// Greater than that of every earlier migration, and than the epochs of the servers' own ranges.
    pub range_epoch: u32,
    /// How far it is.
    pub stage: Stage,
    /// What the taker serves of the range, according to its last report.
    pub kept: PageMap<GenerationRange>,
    /// Why it ends early.
    pub end: Option<End>,
    /// Why the controller chose it, for people; empty if an operator asked for it.
    #[serde(default)]
    pub reason: String,
}

impl MigrationRecord {
    /// Whether something is left to do.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.stage != Stage::Closed
    }

    /// Whether its pages can be in no other migration: as long as it is open, unless nothing has moved and only the taker
    /// has something left to do, which is to free what it reserved.
    #[must_use]
    pub fn holds_range(&self) -> bool {
        self.is_open() && !(self.stage == Stage::Forgotten && self.kept.is_empty())
    }

    /// The space.
    #[must_use]
    pub const fn space(&self) -> Space {
        Space(self.space)
    }

    pub(super) fn terms(&self) -> Terms {
        Terms {
            migration: self.id,
            range_epoch: self.range_epoch,
            home: self.home.contents(),
            space: self.space(),
            pages: self.pages.clone(),
            giver: self.giver.contents(),
            taker: self.taker.contents(),
            taker_incarnation: self.taker_incarnation,
        }
    }
}

/// A server that has pages of another node.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Placed {
    /// The server, with the contents that the pages are in now.
    pub at: ContentsRecord,
    /// The generations in the pointers to them.
    pub generations: GenerationRange,
}

/// Where the pages of a home are that are not at home.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ElsewhereRecord {
    /// The home's contents.
    pub home: ContentsRecord,
    /// The home's space.
    pub space: u16,
    /// Increases with every change.
    pub version: u64,
    /// A server lost its memory, and the servers that may have pages of the home have not all reported since.
    pub is_pending: bool,
    /// Rows and the servers that have them.
    pub rows: PageMap<Placed>,
    /// Rows that were lost with the memory of a server, while the home has its own.
    pub lost: PageMap<()>,
}

/// A node that lost its memory, and servers that do not know it yet.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct LossRecord {
    /// The node.
    pub node: u16,
    /// The first generation of its present contents; earlier ones are lost.
    pub began: u16,
    /// Who does not know it.
    pub unaware: BTreeSet<u16>,
}
