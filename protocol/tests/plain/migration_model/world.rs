//! The state of the model, and the record of what is true.

use super::{
    FIRST_TAG, LINES, PAGES, SERVERS, Scenario,
    lines::{Copy, Epoch, LEFTOVER, Link, Page, Slot, Value},
    messages::{Answer, Message, Pointer},
};

/// What a page holds at the start.
const WRITTEN_BEFORE: Value = 100;

/// The home of all lines.
pub(super) const HOME: u8 = 0;

/// A client's session, as its server knows it. A client has one request at a time.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(super) struct Session {
    pub(super) low: u8,
    pub(super) answer: Option<Answer>,
    /// What an ALLOC_WRITE has allocated whose other pieces are missing.
    pub(super) provided: Option<Pointer>,
    /// What became of each page of a WRITE.
    pub(super) pages: [Option<Answer>; PAGES],
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Server {
    pub(super) incarnation: u8,
    /// How often it began with empty memory.
    pub(super) life: u8,
    pub(super) slots: [Slot; LINES],
    pub(super) sessions: [Option<Session>; 3],
    /// The highest incarnation of each client's node.
    pub(super) fences: [u8; 2],
    pub(super) epochs: Epoch,
    /// Up to where lease epochs of lines go that came from others; it outlives the process.
    pub(super) floor: Epoch,
    /// The migration that it allows.
    pub(super) allowed: Option<u8>,
    /// The migration for which it has reserved frames.
    pub(super) reserved: Option<u8>,
    /// The allocation that it frees, of which parts are at other servers.
    pub(super) freeing: Option<Freeing>,
    /// What its frames of the first line are used for, if it is not the home.
    pub(super) frames: Frames,
    /// It lost its memory, and the others do not know it yet.
    pub(super) is_loss_unknown: bool,
}

/// An allocation that is being freed. That it is outlives the process; which parts were freed does not.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Freeing {
    /// The request of the client.
    pub(super) key: u8,
    /// The lines of which another server said that it has freed its part; one bit each.
    pub(super) freed: u8,
}

/// The use of a line's frames at a server that is not its home.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(super) enum Frames {
    #[default]
    Free,
    Reserved,
    /// They hold the line.
    Line,
    /// Pages of its own.
    Own,
}

/// Where the home believes a line of its first generation to be.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Forward {
    /// Here, or marked.
    Own,
    At(u8),
    /// Those that may have it have not reported.
    Pending,
    Gone,
}

/// A deputy that was replaced, with what it knew then.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Late {
    pub(super) incarnation: u8,
    pub(super) forwards: [Forward; LINES],
}

/// What a client does.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Doing {
    /// It sends its next request.
    Nothing,
    /// It waits for an answer of this server.
    Waits { server: u8 },
    /// It was refused, and asks this server again when that helps.
    Pauses { server: u8 },
    /// It lost its session while a change was under way.
    Asks { server: u8, incarnation: u8 },
    /// Its incarnation is too low.
    Over,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Client {
    pub(super) next: u8,
    pub(super) doing: Doing,
    /// The incarnation of each server with which it has a session.
    pub(super) sessions: [u8; SERVERS],
    /// Grows with each request that it gave up: a copy may still be on its way.
    pub(super) number: u8,
    /// Who serves each line, as far as it knows.
    pub(super) hints: [u8; LINES],
    /// The home said that it lost the allocation that is to be freed: the server of the first page frees it.
    pub(super) is_orphan: bool,
    /// Pages that a WRITE has written.
    pub(super) written: u8,
    pub(super) lease: Option<(Epoch, Value)>,
    pub(super) own: Option<Pointer>,
}

/// What the controller has recorded of a migration.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Stage {
    Recorded,
    /// The taker has reserved frames.
    Reserved,
    Allowed,
    /// No more lines are to move.
    Ending,
    /// The giver gives no more lines.
    Withdrawn,
    /// The home knows who serves the lines.
    Learned,
    Closed,
}

/// What is true of a page, whoever serves it.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(super) struct Truth {
    pub(super) value: Value,
    pub(super) tag: u8,
    pub(super) link: Link,
    /// The last lease epoch.
    pub(super) epoch: Epoch,
    /// What each version had, plus one.
    pub(super) versions: [Value; 8],
}

/// What was seen.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(crate) struct Witness {
    pub(super) is_stale: bool,
    pub(super) is_twice: bool,
    pub(super) is_late: bool,
    pub(super) is_epoch_old: bool,
    pub(super) is_grant_old: bool,
    pub(super) is_version_twice: bool,
    pub(super) is_different: bool,
    pub(super) is_unallocated: bool,
    pub(super) is_unknown: bool,
    pub(super) is_sent_astray: bool,
    pub(super) is_unfenced: bool,
    pub(super) is_colour_twice: bool,
    pub(super) is_named_twice: bool,
}

/// Faults that may still happen.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(crate) struct Faults {
    /// Messages that arrive and stay.
    pub(crate) copies: u8,
    /// Answers that are lost.
    pub(crate) losses: u8,
    /// First tries that somebody answers with MOVED although nothing has moved.
    pub(crate) lies: u8,
    /// Leases that end before their owners are done.
    pub(crate) ends: u8,
    /// Sessions between servers that end.
    pub(crate) sessions: u8,
    /// Requests that their clients give up.
    pub(crate) gives_up: u8,
    /// Requests that are sent again although they are still on their way.
    pub(crate) repeats: u8,
    pub(crate) cancels: u8,
    /// The home is taken away once it has no line, and a deputy answers for it.
    pub(crate) leaves: u8,
    /// Another deputy follows although the one before may still answer.
    pub(crate) successors: u8,
    /// What a deputy answers that should not answer any more.
    pub(crate) late_answers: u8,
    /// The home comes back with its memory, or without. This happens some time.
    pub(crate) returns: u8,
    pub(crate) empty_returns: u8,
    pub(crate) controller_crashes: u8,
    /// Pages that takers allocate for their own addresses.
    pub(crate) allocations: u8,
    /// How often each server is killed and goes on with kept memory.
    pub(crate) crashes: [u8; SERVERS],
    /// How often each server loses its memory.
    pub(crate) wipes: [u8; SERVERS],
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(crate) struct World {
    pub(super) servers: [Server; SERVERS],
    pub(super) clients: Vec<Client>,
    pub(super) network: Vec<Message>,

    // The home's memory.
    pub(super) generation: u8,
    pub(super) forwards: [Forward; LINES],
    /// Servers that have reported since the home asked, and which of them has each line. Its process forgets it.
    pub(super) reported: [bool; SERVERS],
    pub(super) claims: [Option<u8>; LINES],

    /// The home has freed the allocation at the start, of its present contents.
    pub(super) is_freed: bool,

    /// A server has lost its memory while it was freeing the allocation.
    pub(super) is_decision_lost: bool,

    /// A deputy answers in place of the home.
    pub(super) is_gone: bool,
    /// What the home still has while it is gone: free lines.
    pub(super) kept: Option<[Slot; LINES]>,
    /// A deputy that should not answer any more, and does.
    pub(super) late: Option<Late>,

    // The controller's record.
    pub(super) active: u8,
    pub(super) stage: Stage,

    pub(super) now: u8,
    pub(super) faults: Faults,

    pub(super) truth: [[[Truth; PAGES]; LINES]; 2],
    /// Requests that their clients gave up, and those of them that must not be executed any more.
    pub(super) given_up: u32,
    pub(super) dead: u32,
    /// Requests that were executed.
    pub(super) applied: u32,
    /// Lines of which a client was told that they are lost.
    pub(super) gone: [bool; LINES],
    /// Lines that were lost with the memory of a server.
    pub(super) is_lost: [bool; LINES],
    /// Free lines of lost contents that their server has discarded.
    pub(super) is_discarded: [bool; LINES],
    /// The highest incarnation of each node that was served, for each line.
    pub(super) newest: [[u8; 2]; LINES],
    pub(crate) witness: Witness,
}

impl World {
    pub(super) fn new(scenario: &Scenario) -> Self {
        let mut truth = [[[Truth::default(); PAGES]; LINES]; 2];
        let frame = Page { value: LEFTOVER, ..Page::default() };
        let mut slots = [Slot::default(); LINES];
        for (line, slot) in slots.iter_mut().enumerate().take(scenario.lines) {
            let mut pages = [frame; PAGES];
            for (at, page) in pages.iter_mut().enumerate().take(scenario.pages) {
                let index = line * scenario.pages + at;
                if index >= scenario.allocated {
                    continue;
                }
                page.link = if index == 0 { Link::Head } else { Link::Body };
                page.tag = FIRST_TAG;
                page.version = 1;
                if index < scenario.written {
                    (page.value, page.is_written) = (WRITTEN_BEFORE, true);
                }
                let of = &mut truth[0][line][at];
                (of.value, of.tag, of.link) = (page.served(), page.tag, page.link);
                of.versions[1] = of.value + 1;
            }
            slot.copy = Some(Copy { generation: 1, floor: 0, pages });
        }
        let server = |incarnation: u8, slots| Server {
            incarnation,
            life: 1,
            slots,
            sessions: [None; 3],
            fences: [0; 2],
            epochs: incarnation << 4,
            floor: 0,
            allowed: None,
            reserved: None,
            freeing: None,
            frames: Frames::Free,
            is_loss_unknown: false,
        };
        let empty = [Slot::default(); LINES];
        let [home, second, third] = scenario.incarnations;
        let servers = [server(home, slots), server(second, empty), server(third, empty)];
        let client = Client {
            next: 0,
            doing: Doing::Nothing,
            sessions: [0; SERVERS],
            number: 0,
            hints: [HOME; LINES],
            is_orphan: false,
            written: 0,
            lease: None,
            own: None,
        };
        Self {
            servers,
            clients: vec![client; scenario.clients.len()],
            network: Vec::new(),
            generation: 1,
            forwards: [Forward::Own; LINES],
            reported: [false; SERVERS],
            claims: [None; LINES],
            is_freed: false,
            is_decision_lost: false,
            is_gone: false,
            kept: None,
            late: None,
            active: 0,
            stage: Stage::Recorded,
            now: 0,
            faults: scenario.faults,
            truth,
            given_up: 0,
            dead: 0,
            applied: 0,
            gone: [false; LINES],
            is_lost: [false; LINES],
            is_discarded: [false; LINES],
            newest: [[0; 2]; LINES],
            witness: Witness::default(),
        }
    }

    pub(super) fn slot(&self, server: u8, line: u8) -> &Slot {
        &self.servers[usize::from(server)].slots[usize::from(line)]
    }

    pub(super) fn slot_mut(&mut self, server: u8, line: u8) -> &mut Slot {
        &mut self.servers[usize::from(server)].slots[usize::from(line)]
    }

    pub(super) fn server(&self, server: u8) -> &Server {
        &self.servers[usize::from(server)]
    }

    pub(super) fn server_mut(&mut self, server: u8) -> &mut Server {
        &mut self.servers[usize::from(server)]
    }

    pub(super) fn client(&self, client: u8) -> &Client {
        &self.clients[usize::from(client)]
    }

    pub(super) fn client_mut(&mut self, client: u8) -> &mut Client {
        &mut self.clients[usize::from(client)]
    }

    pub(super) fn truth_mut(&mut self, generation: u8, line: u8, page: u8) -> &mut Truth {
        &mut self.truth[usize::from(generation) - 1][usize::from(line)][usize::from(page)]
    }

    /// The contents of a line that a server answers for.
    pub(super) fn served(&self, server: u8, line: u8, generation: u8) -> Option<&Copy> {
        let slot = self.slot(server, line);
        let copy = slot.copy.as_ref().filter(|copy| copy.generation == generation)?;
        slot.mark.is_none().then_some(copy)
    }

    pub(super) fn send(&mut self, message: Message) {
        if let Err(place) = self.network.binary_search(&message) {
            self.network.insert(place, message);
        }
    }

    /// A page has a new version.
    pub(super) fn note_version(&mut self, generation: u8, line: u8, page: u8, of: Page) {
        let seen = self.truth_mut(generation, line, page).versions;
        let is_new = seen[usize::from(of.version)] == 0;
        let is_same = seen[usize::from(of.version)] == of.served() + 1;
        self.witness.is_version_twice |= !is_new && !is_same;
        self.truth_mut(generation, line, page).versions[usize::from(of.version)] = of.served() + 1;
    }
}

/// A position in a short list.
pub(super) fn index(at: usize) -> u8 {
    u8::try_from(at).expect("there are few")
}
