//! Live migration as a model: servers, clients and the controller take one step at a time, in any order.
//!
//! It models the rules of `docs/migration.md`, before there is code. A step is one datagram that arrives, one order of
//! the controller, one decision, or one fault. A message stays in the network until somebody takes it, so a lost
//! request is one that nobody takes; a copy may be taken later. A client's answer arrives at once or never: what a
//! later one would tell is no news. The answers to KEEP stay in the network like requests.
//!
//! The switch is not modelled. A request that is sent to a pointer may arrive at any server, whatever entries there
//! are; one that is sent to an endpoint address arrives there.
//!
//! Whoever is refused and asks again does so when the next answer would be another one: asking earlier changes nothing,
//! and without it every run ends. So what must happen in the end is checked where nothing is left to do.

mod client;
mod controller;
mod deputy;
mod discard;
mod giver;
mod home;
mod lines;
mod memory;
mod messages;
pub(crate) mod model;
mod network;
pub(crate) mod properties;
mod server;
mod taker;
mod world;

pub(crate) use world::{Faults, World};

/// The most lines of a scenario.
pub(crate) const LINES: usize = 2;
/// The most pages of a line.
pub(crate) const PAGES: usize = 2;
/// The home, and two others.
pub(crate) const SERVERS: usize = 3;

/// The tag of the allocation at the start.
pub(crate) const FIRST_TAG: u8 = 1;

/// How long a lease lasts at most, in scenarios with a clock.
pub(crate) const LONGEST_LEASE: u8 = 2;

/// What a client does. Pages are named by line and number; all of the allocation at the start unless it says *own*.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Op {
    Read(u8, u8),
    /// WRITE of a line, which is a train.
    WriteLine(u8),
    /// FETCH_ADD, for all other changes that must be executed once.
    Add(u8, u8),
    Update(u8, u8),
    Commit(u8, u8),
    /// Extends the lease for as long as the server permits.
    RenewForEver(u8, u8),
    /// Allocates a page.
    Create,
    /// ALLOC_WRITE of a page, in two pieces.
    AllocWrite,
    /// READ of the page that it allocated.
    ReadOwn,
    /// Frees the whole allocation.
    Delete,
}

/// A client: an incarnation of a node.
#[derive(Clone, Debug)]
pub(crate) struct ClientSpec {
    pub(crate) node: u8,
    pub(crate) incarnation: u8,
    pub(crate) ops: Vec<Op>,
}

/// A mistake, planted to see whether the checker finds it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Mutant {
    // The giver.
    /// KEEP is answered from the record of its session, and not from the mark.
    RecordInSession,
    /// KEEP does not check the lease of the last page of the line.
    LastPageUnchecked,
    /// Pages that are leased to the taker are served.
    TakenIsServed,
    /// MOVED does not raise the low water of the session.
    MovedUnnumbered,
    /// A WRITE of which the last page moved is MOVED as a whole.
    MovedAsWhole,
    /// A giver obeys a late order to allow a migration that it has withdrawn.
    LateOrderObeyed,
    /// An allowance that is repeated begins with new marks.
    MarksBeginAgain,
    /// A line is given while pieces of an ALLOC_WRITE are missing.
    UnfinishedTaken,
    /// Pages of the range are allocated after the allowance.
    CreatedInRange,
    /// A mark does not name the incarnation of the taker.
    MarkWithoutIncarnation,
    /// A taker that lost its memory may still keep what it had taken before.
    LostTakerKeeps,
    /// A home that lost its memory may still keep what it had taken before.
    LostHomeKeeps,
    /// RENEW extends a lease for which a TAKE waits.
    RenewedForEver,
    /// READs of a taken line do not name the lease.
    ReadsUnchecked,
    /// The contents outlive the process, but the marks do not.
    MarksNotKept,

    // The taker.
    /// It serves the line when it has sent KEEP.
    ServedUnheard,
    /// A line in doubt does not outlive the process, although the memory does.
    DoubtForgotten,
    /// It drops the line on LEASE_LOST for another lease, or of memory that did not grant it.
    LostOfAnyLease,
    /// It drops the line on LEASE_LOST of a giver that has lost its memory.
    LostOfAnotherLife,
    /// It drops the line only on LEASE_LOST of the process that granted the lease.
    LostOfSameProcess,
    /// It believes a late answer to KEEP although it has reported that it does not have the line.
    DoubtSurvivesReport,
    /// Lease epochs of the line are those of its own counter.
    OwnEpochs,
    /// The floor of the lease epochs does not outlive the process.
    FloorForgotten,
    /// It does, but is not raised above what the last process granted.
    FloorNotRaised,
    /// There is a floor for each line that came from another server, and not for all lines of the server.
    FloorPerLine,
    /// The versions of the pages begin again.
    VersionsRestart,
    /// A page that was not sent has the bytes that its frame had.
    FrameBytes,
    /// The last tag of a free page is not taken along.
    LastTagLost,
    /// A line on its way is BUSY.
    StagedIsBusy,

    // The home.
    /// Where a line is does not depend on the generation.
    MarkWithoutGeneration,
    /// After it has lost its memory it answers STALE_GENERATION before the takers have reported.
    HomeAnswersEarly,
    /// A server that has lost its memory reports before the others know of it.
    ReportBeforeLoss,
    /// The lines of a taker that lost its memory are lost, although they may have moved on.
    NextTakerUnasked,
    /// DELETE frees what its server has.
    DeleteOfPart,
    /// That an allocation is being freed does not outlive the process.
    DecisionForgotten,
    /// A part is freed although it is leased.
    LeasedPartFreed,
    /// The part with the first page is freed before others.
    FirstPartFirst,
    /// A part that was lost is waited for.
    LostPartAwaited,
    /// A line of lost contents is discarded of which a page is allocated.
    DiscardedInUse,
    /// A server discards a line before the home knows that nobody has it.
    DiscardedEarly,
    /// The home has a line again that was lost, although a page of it is allocated.
    ReclaimedInUse,
    /// The home has a line again that was lost, and does not know which tags its pages had.
    ReclaimedTags,

    // The deputy of a home that is drained and gone.
    /// It answers although the home still has lines.
    DeputyTooEarly,
    /// It answers before it knows where the lines are.
    DeputyWithoutMap,
    /// It does not learn what moves on.
    DeputyMapOld,
    /// It says that it executed a change.
    DeputyExecutes,
    /// The home comes back and answers before its deputy has stopped.
    HomeBesideDeputy,
    /// The next deputy has the incarnation of the one before.
    SuccessorsIncarnation,

    // The controller.
    /// It tells a taker in doubt that the line is its own.
    ControllersYours,
    /// The lines of a silent server count as lost.
    PresumedLost,
    /// It cancels at the taker first.
    CancelledAtTaker,
    /// It closes a migration when all lines are marked.
    ClosedInDoubt,
    /// A server that has lost its memory gets orders before the others know of it.
    OrderedBeforeLoss,
    /// A migration that ends gives the reserved frames back at once.
    FramesReleased,
    /// It does not tell the home again who serves a line when the home has lost its memory.
    HomeNotToldAgain,
    /// It closes a migration that the giver still allows.
    AllowanceLeft,
    /// The giver forgets before the home knows.
    ForgottenEarly,
    /// The taker does not learn which incarnations the giver has seen.
    FencesWithheld,
    /// It learns those that the giver has seen at the allowance.
    FencesAtAllowance,

    // The client.
    /// MOVED of a node that is not the one of the session is believed.
    MovedBelieved,
    /// NO_SESSION of such a node is believed.
    NoSessionBelieved,
    /// MOVED of the next process of the session's server is believed.
    NextProcessBelieved,
    /// NO_SESSION is believed of a process that was replaced before the session was opened.
    EarlierProcessBelieved,
    /// WRONG_NODE is believed that the session's server said at the pointer, before it looked at the session.
    WrongNodeBelieved,
    /// Retransmissions go to the pointer.
    AgainToPointer,
    /// A new generation of the home is believed without asking for the line.
    GenerationBelieved,
}

impl Mutant {
    pub(crate) const ALL: [Self; 66] = [
        Self::RecordInSession,
        Self::LastPageUnchecked,
        Self::TakenIsServed,
        Self::MovedUnnumbered,
        Self::MovedAsWhole,
        Self::LateOrderObeyed,
        Self::MarksBeginAgain,
        Self::UnfinishedTaken,
        Self::CreatedInRange,
        Self::MarkWithoutIncarnation,
        Self::LostTakerKeeps,
        Self::LostHomeKeeps,
        Self::RenewedForEver,
        Self::ReadsUnchecked,
        Self::MarksNotKept,
        Self::ServedUnheard,
        Self::DoubtForgotten,
        Self::LostOfAnyLease,
        Self::LostOfAnotherLife,
        Self::LostOfSameProcess,
        Self::DoubtSurvivesReport,
        Self::OwnEpochs,
        Self::FloorForgotten,
        Self::FloorNotRaised,
        Self::FloorPerLine,
        Self::VersionsRestart,
        Self::FrameBytes,
        Self::LastTagLost,
        Self::StagedIsBusy,
        Self::MarkWithoutGeneration,
        Self::HomeAnswersEarly,
        Self::ReportBeforeLoss,
        Self::NextTakerUnasked,
        Self::DeleteOfPart,
        Self::DecisionForgotten,
        Self::LeasedPartFreed,
        Self::FirstPartFirst,
        Self::LostPartAwaited,
        Self::DiscardedInUse,
        Self::DiscardedEarly,
        Self::ReclaimedInUse,
        Self::ReclaimedTags,
        Self::DeputyTooEarly,
        Self::DeputyWithoutMap,
        Self::DeputyMapOld,
        Self::DeputyExecutes,
        Self::HomeBesideDeputy,
        Self::SuccessorsIncarnation,
        Self::ControllersYours,
        Self::PresumedLost,
        Self::CancelledAtTaker,
        Self::ClosedInDoubt,
        Self::OrderedBeforeLoss,
        Self::FramesReleased,
        Self::HomeNotToldAgain,
        Self::AllowanceLeft,
        Self::ForgottenEarly,
        Self::FencesWithheld,
        Self::FencesAtAllowance,
        Self::MovedBelieved,
        Self::NoSessionBelieved,
        Self::NextProcessBelieved,
        Self::EarlierProcessBelieved,
        Self::WrongNodeBelieved,
        Self::AgainToPointer,
        Self::GenerationBelieved,
    ];
}

/// A configuration of the model.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) clients: Vec<ClientSpec>,
    /// The incarnations of the servers. Who was started more often has higher lease epochs.
    pub(crate) incarnations: [u8; SERVERS],
    /// Giver and taker of each migration, one after the other.
    pub(crate) migrations: Vec<(u8, u8)>,
    pub(crate) lines: usize,
    pub(crate) pages: usize,
    /// The pages of the allocation at the start, from the first one on; the others are free.
    pub(crate) allocated: usize,
    /// Those of them that were written.
    pub(crate) written: usize,
    /// A line of the home that is free as a whole is not taken.
    pub(crate) has_free_line: bool,
    pub(crate) faults: Faults,
    /// The last tick of the clock. Without a clock a lease lasts until a fault ends it.
    pub(crate) ticks: u8,
    pub(crate) mutant: Option<Mutant>,
}

impl Scenario {
    /// Clients of different nodes; the lines move from the home to the first other server.
    pub(crate) fn new(name: &'static str, clients: &[&[Op]]) -> Self {
        let clients = (0..)
            .zip(clients)
            .map(|(node, ops)| ClientSpec { node, incarnation: 1, ops: ops.to_vec() })
            .collect();
        Self {
            name,
            clients,
            incarnations: [2, 1, 1],
            migrations: vec![(0, 1)],
            lines: 1,
            pages: 1,
            allocated: 1,
            written: 1,
            has_free_line: false,
            faults: Faults::default(),
            ticks: 0,
            mutant: None,
        }
    }

    pub(crate) fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    fn has(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    fn line_numbers(&self) -> impl Iterator<Item = u8> + use<> {
        0..world::index(self.lines)
    }

    fn page_numbers(&self) -> impl Iterator<Item = u8> + use<> {
        0..world::index(self.pages)
    }
}
