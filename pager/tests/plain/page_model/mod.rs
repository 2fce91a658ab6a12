//! The page protocol of the pager as a model: every thread takes one step at a time, in any order.
//!
//! A step is one atomic operation on a page's word, one system call, or one remote request. A load and the
//! compare-and-swap that follows are one step, because the swap fails if the word is not as it was loaded; where
//! something else happens between the two, they are two steps.

mod background;
mod evict;
mod fault;
mod model;
mod program;
mod world;

/// What a thread of the program does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Op {
    Read(usize),
    Write(usize),
    WriteZero(usize),
    Pin(usize),
    PinMut(usize),
    Unpin(usize),
    Discard(usize),
    Flush,
}

/// Where the contents of a page are at the start.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Start {
    Zero,
    Remote,
    Clean,
    Dirty,
}

/// A mistake, planted to see whether the checker finds it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Mutant {
    /// A page that is being installed is not marked when its extent is lost. A second look follows a failed read.
    SecondLook,
    /// As above, without the second look.
    WalkSkipsBusy,
    /// The pointer is read before the word is looked at.
    PointerFirst,
    /// The pointer is read during the claim, but nobody looks whether the extent was lost before.
    PointerUnchecked,
    /// Pages of a lost extent that were written just before the loss count as written.
    WrittenBeforeLoss,
    /// The end of a claim sets the number of pins back to what it was at the beginning.
    PinsOfClaim,
    /// A flush does not repeat what was not written because the extent was lost.
    FlushGoesOn,
    /// A flush does not fail if an extent could not be allocated.
    AllocationForgotten,
    /// The evictor gets the news while a lane is held.
    TellInLane,
    CopyBeforeProtect,
    NoProtection,
    /// A page that was written leaves although the program wrote to it meanwhile.
    EndBlind,
    /// Only the state says whether it is still the same writing.
    NoGeneration,
    /// Clean pages are not claimed before they are discarded.
    DiscardUnclaimed,
    /// A page is claimed although it is not as it was seen.
    ClaimBlind,
    /// A dirty page that is zero is taken for stored if it was stored before.
    ZeroIsStored,
    PinnedIsTaken,
    PinnedLeaves,
    FrameEarly,
    /// A page whose write failed leaves.
    FailureIsSuccess,
    /// An extent is forgotten, but not its pages.
    NoWalk,
    /// An extent that is lost is allocated again, and clean pages stay clean.
    WalkSkipsClean,
    /// A page is dirty before writes to it pass.
    DirtyBeforeUnprotect,
    /// A read page is installed writable, and counts as clean.
    WritableIsClean,
    /// A missing page is claimed although it is not as it was seen.
    FaultClaimsBlind,
    /// A thread that waits for a page is not announced.
    NotAnnounced,
    /// Who waits in the kernel is not woken when a claim ends.
    NoWake,
    /// Who waits in the kernel is not woken when the evictor begins to write.
    NoWakeBeforeWriting,
    /// Who waits in the kernel is not woken if the page is there already.
    NoWakeIfPresent,
    /// A page that could not be read is refused by the kernel although another thread has claimed it.
    PoisonUnclaimed,
    /// The frame of a page that could not be read is kept.
    FrameKept,
    /// An error of one try makes a page lost for ever.
    FailureIsLoss,
    /// What was read in the background is taken whatever happened to the page meanwhile.
    BackgroundUnchecked,
    /// It is taken although the page may have been written meanwhile.
    BackgroundGeneration,
    /// The background thread looks at the word after it has read the page.
    BackgroundWordLate,
    /// What was read in the background is taken although the extent was lost during the claim.
    BackgroundForgotten,
}

impl Mutant {
    pub(crate) const ALL: [Self; 36] = [
        Self::SecondLook,
        Self::WalkSkipsBusy,
        Self::PointerFirst,
        Self::PointerUnchecked,
        Self::WrittenBeforeLoss,
        Self::PinsOfClaim,
        Self::FlushGoesOn,
        Self::AllocationForgotten,
        Self::TellInLane,
        Self::CopyBeforeProtect,
        Self::NoProtection,
        Self::EndBlind,
        Self::NoGeneration,
        Self::DiscardUnclaimed,
        Self::ClaimBlind,
        Self::ZeroIsStored,
        Self::PinnedIsTaken,
        Self::PinnedLeaves,
        Self::FrameEarly,
        Self::FailureIsSuccess,
        Self::NoWalk,
        Self::WalkSkipsClean,
        Self::DirtyBeforeUnprotect,
        Self::WritableIsClean,
        Self::FaultClaimsBlind,
        Self::NotAnnounced,
        Self::NoWake,
        Self::NoWakeBeforeWriting,
        Self::NoWakeIfPresent,
        Self::PoisonUnclaimed,
        Self::FrameKept,
        Self::FailureIsLoss,
        Self::BackgroundUnchecked,
        Self::BackgroundGeneration,
        Self::BackgroundWordLate,
        Self::BackgroundForgotten,
    ];
}

/// A configuration of the model.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// The program's threads.
    pub(crate) threads: Vec<Vec<Op>>,
    /// The pages, all of one extent.
    pub(crate) pages: Vec<Start>,
    /// Threads that resolve faults; without any, the faulting threads do it themselves.
    pub(crate) handlers: usize,
    /// Batches of the eviction thread.
    pub(crate) rounds: u8,
    /// The limit of local pages.
    pub(crate) limit: u8,
    /// How often the server loses its memory.
    pub(crate) losses: u8,
    /// How many reads in the background begin.
    pub(crate) background_reads: u8,
    /// How many remote requests fail.
    pub(crate) failures: u8,
    /// Pages that are read are installed writable.
    pub(crate) is_eager: bool,
    /// There is only one lane, and the queue of news is full whenever it matters.
    pub(crate) is_narrow: bool,
    pub(crate) mutant: Option<Mutant>,
}

impl Scenario {
    pub(crate) fn new(name: &'static str, pages: &[Start], threads: &[&[Op]]) -> Self {
        Self {
            name,
            threads: threads.iter().map(|ops| ops.to_vec()).collect(),
            pages: pages.to_vec(),
            handlers: 0,
            rounds: 1,
            limit: u8::try_from(pages.len()).expect("there are few"),
            losses: 0,
            background_reads: 0,
            failures: 0,
            is_eager: false,
            is_narrow: false,
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
}
