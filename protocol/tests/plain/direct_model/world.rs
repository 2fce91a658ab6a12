//! The state of the model, and the record of what clients may know.

use super::{FIRST_TAG, Op, PAGES, Scenario, Start, reader::Reading, server::Store};

/// Half of a page: 0 is zeros, each change makes another number.
pub(super) type Half = u8;

/// The role of a page.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Role {
    Free,
    Head,
    Body,
}

/// What the memory of a page holds.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Holds {
    Zeros,
    /// Bytes of an earlier allocation; the page reads as zeros.
    Leftover,
    Written,
}

/// The part of a page's state that is stored at once.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Kind {
    pub(super) role: Role,
    pub(super) holds: Holds,
    pub(super) is_complete: bool,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Page {
    pub(super) sequence: u8,
    /// The bytes that its place has in each frame.
    pub(super) frames: [[Half; 2]; 2],
    pub(super) kind: Kind,
    pub(super) tag: u8,
    pub(super) is_leased: bool,
    /// The mark that another server serves it.
    pub(super) is_elsewhere: bool,
}

impl Page {
    /// What a READ returns.
    pub(super) fn served(&self, frame: usize) -> [Half; 2] {
        if self.kind.holds == Holds::Written { self.frames[frame] } else { [0; 2] }
    }
}

/// A session, as the reader sees it.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(super) struct Slot {
    /// 0: none.
    pub(super) id: u8,
    pub(super) word: Word,
    pub(super) client: u8,
}

#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(super) struct Word {
    pub(super) uses: u8,
    pub(super) is_executing: bool,
    pub(super) low: u8,
}

/// The new contents of a page.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Part {
    pub(super) page: usize,
    pub(super) new: [Option<Half>; 2],
    pub(super) before: Holds,
}

/// A change.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Change {
    /// Pages are written, together.
    Pages([Option<Part>; PAGES]),
    Create(u8),
    Delete,
}

/// A session, as the server knows it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Session {
    pub(super) id: u8,
    pub(super) client: u8,
    pub(super) slot: usize,
    pub(super) low: u8,
    /// The numbers that were executed.
    pub(super) done: u16,
}

/// What a process of the server has of its own.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub(super) struct Server {
    pub(super) sessions: Vec<Session>,
    pub(super) lease: Option<u8>,
    /// What it does next, in this order.
    pub(super) todo: Vec<Store>,
}

/// A request.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) struct Request {
    pub(super) client: u8,
    pub(super) op: u8,
    pub(super) session: u8,
    pub(super) number: u8,
    /// The lowest number for whose reply its client still waits.
    pub(super) low: u8,
    /// The reader has passed it on.
    pub(super) is_passed: bool,
}

/// What a client waits for.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Waits {
    /// Nothing: it sends its next request, or opens a session.
    Nothing,
    Open,
    Reply,
    /// Its incarnation is too low.
    Over,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Client {
    pub(super) next: u8,
    pub(super) waits: Waits,
    /// 0: none.
    pub(super) session: u8,
    /// The number of its last request.
    pub(super) number: u8,
    /// The last number in its session.
    pub(super) last_number: u8,
    /// The server's incarnation when the session was opened.
    pub(super) incarnation: u8,
    /// Its next request was sent before, in a session that ended.
    pub(super) is_repeated: bool,
    /// The requests that it gave up, and their numbers.
    pub(super) given_up: Vec<(u8, u8)>,
    pub(super) began: Began,
}

/// What was known when a READ began.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(super) struct Began {
    pub(super) floor: u8,
    /// Its session had ended.
    pub(super) is_ended: bool,
    /// The lease that its owner knew of.
    pub(super) lease: u8,
    /// The requests that were given up, with numbers below the low water.
    pub(super) given_up: u32,
}

/// What a page was from one change to the next.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Moment {
    /// 0: the page was free.
    pub(super) tag: u8,
    pub(super) halves: [Half; 2],
    /// The moment of the other page that must not come later.
    pub(super) other: u8,
    /// The request that began it; [`NOBODY`].
    pub(super) by: u8,
}

/// No request.
pub(super) const NOBODY: u8 = u8::MAX;

/// What happened, and what clients know of it.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub(super) struct Record {
    /// All moments of each page. The server's order is that of the changes.
    pub(super) moments: [Vec<Moment>; PAGES],
    /// The last moment of each page that a client knows of.
    pub(super) floor: [u8; PAGES],
    /// Requests that were executed, and those that must not be any more.
    pub(super) applied: u32,
    pub(super) dead: u32,
    /// Sessions of which somebody knows that they ended.
    pub(super) ended: u32,
    /// Tags of allocations that are complete.
    pub(super) complete: u16,
    /// Leases that were granted, and the one that its owner knows of.
    pub(super) leases: u8,
    pub(super) lease: u8,
}

/// What was seen.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(super) struct Witness {
    pub(super) is_answered: bool,
    pub(super) is_torn: bool,
    pub(super) is_foreign: bool,
    pub(super) is_stale: bool,
    pub(super) is_late: bool,
    pub(super) is_twice: bool,
    pub(super) is_refused: bool,
    pub(super) is_ended: bool,
    pub(super) is_leased: bool,
    pub(super) is_incomplete: bool,
    pub(super) is_lost: bool,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(crate) struct World {
    // Shared memory.
    pub(super) pages: [Page; PAGES],
    pub(super) slots: Vec<Slot>,
    pub(super) redo: Option<Change>,
    /// The record that another server serves the line.
    pub(super) is_given: bool,
    /// Its memory is another line's.
    pub(super) is_reused: bool,
    /// The place says that it has another line.
    pub(super) is_named_other: bool,
    /// That other line is served here.
    pub(super) is_other_here: bool,
    /// The frame of the line, which is its memory.
    pub(super) frame: usize,
    /// Whether the shard is open.
    pub(super) is_open: bool,

    pub(super) is_attached: bool,
    pub(super) readers: Vec<Option<Reading>>,
    /// `None` after a crash.
    pub(super) server: Option<Server>,
    pub(super) incarnation: u8,
    /// The highest incarnation of each node.
    pub(super) fences: Vec<u8>,
    pub(super) network: Vec<Request>,
    pub(super) clients: Vec<Client>,
    pub(super) tags: u8,
    pub(super) ids: u8,

    pub(super) copies: u8,
    pub(super) gives_up: u8,
    pub(super) ends: u8,
    pub(super) clears: u8,
    pub(super) closes: u8,
    pub(super) moves: u8,
    /// How often a client writes to the line when it has moved.
    pub(super) writes_moved: u8,
    pub(super) crashes: u8,

    pub(super) record: Record,
    pub(super) witness: Witness,
}

impl World {
    pub(super) fn new(scenario: &Scenario) -> Self {
        let is_free = scenario.start == Start::Freed;
        let mut record = Record::default();
        let mut pages = [Page {
            sequence: 0,
            frames: [[0; 2]; 2],
            kind: Kind { role: Role::Free, holds: Holds::Zeros, is_complete: false },
            tag: FIRST_TAG,
            is_leased: false,
            is_elsewhere: false,
        }; PAGES];
        for (at, page) in pages.iter_mut().enumerate().take(scenario.pages) {
            let role = match at {
                _ if is_free => Role::Free,
                0 => Role::Head,
                _ => Role::Body,
            };
            page.frames[0] = [if at == 0 { 40 } else { 60 }; 2];
            page.kind = Kind { role, holds: Holds::Written, is_complete: at == 0 };
            record.moments[at].push(Moment {
                tag: if is_free { 0 } else { FIRST_TAG },
                halves: if is_free { [0; 2] } else { page.frames[0] },
                other: 0,
                by: NOBODY,
            });
        }
        record.complete = 1 << FIRST_TAG;
        let mut server = Server::default();
        let mut slots = vec![Slot::default(); scenario.slots];
        let mut fences = vec![0; scenario.clients.len()];
        let mut ids = 0;
        let mut clients = Vec::new();
        for (client, spec) in (0..).zip(&scenario.clients) {
            let mut session = 0;
            if let Some(holder) = spec.thread_of {
                session = clients.get(usize::from(holder)).map_or(0, |of: &Client| of.session);
            } else if spec.is_open {
                ids += 1;
                session = ids;
                let slot = server.sessions.len();
                let word = Word { uses: 1, is_executing: false, low: 1 };
                slots[slot] = Slot { id: session, word, client };
                server.sessions.push(Session { id: session, client, slot, low: 1, done: 0 });
                fences[usize::from(spec.node)] = spec.incarnation;
            }
            clients.push(Client {
                next: 0,
                waits: Waits::Nothing,
                session,
                number: 0,
                last_number: 0,
                incarnation: 1,
                is_repeated: false,
                given_up: Vec::new(),
                began: Began::default(),
            });
        }
        Self {
            pages,
            slots,
            redo: None,
            is_given: false,
            is_reused: false,
            is_named_other: false,
            is_other_here: false,
            frame: 0,
            is_open: true,
            is_attached: true,
            readers: vec![None; scenario.readers],
            server: Some(server),
            incarnation: 1,
            fences,
            network: Vec::new(),
            clients,
            tags: FIRST_TAG,
            ids,
            copies: scenario.copies,
            gives_up: scenario.gives_up,
            ends: scenario.ends,
            clears: scenario.clears,
            closes: scenario.closes,
            moves: scenario.moves,
            writes_moved: scenario.moves.min(1),
            crashes: scenario.crashes,
            record,
            witness: Witness::default(),
        }
    }

    /// A bit for a request of a client.
    pub(super) const fn bit(by: u8) -> u32 {
        1 << by
    }

    /// A request's number among those of all clients.
    pub(super) const fn key(client: u8, op: u8) -> u8 {
        client * 8 + op
    }

    /// Records that a change happens, completely or after a takeover.
    pub(super) fn happens(&mut self, scenario: &Scenario, change: &Change, by: u8) {
        if by != NOBODY {
            self.witness.is_twice |= self.record.applied & Self::bit(by) != 0;
            self.witness.is_late |= self.record.dead & Self::bit(by) != 0;
            self.record.applied |= Self::bit(by);
        }
        let counts: [u8; PAGES] = [0, 1].map(|page| index(self.record.moments[page].len()));
        let is_one = matches!(change, Change::Pages([_, None]) | Change::Pages([None, _]));
        for page in 0..scenario.pages {
            let Some(&last) = self.record.moments[page].last() else { continue };
            let (tag, halves) = match change {
                Change::Pages(parts) => {
                    let Some(part) = parts[page] else { continue };
                    (last.tag, [0, 1].map(|half| part.new[half].unwrap_or(last.halves[half])))
                }
                Change::Create(tag) => (*tag, [0; 2]),
                Change::Delete => (0, last.halves),
            };
            // A change of both pages happens at one moment.
            let other = if is_one || scenario.pages == 1 { last.other } else { counts[1 - page] };
            self.record.moments[page].push(Moment { tag, halves, other, by });
        }
    }

    /// A client learns that a page was at a moment.
    pub(super) fn know(&mut self, page: usize, moment: u8) {
        let other = self.record.moments[page][usize::from(moment)].other;
        let floor = &mut self.record.floor;
        floor[page] = floor[page].max(moment);
        floor[1 - page] = floor[1 - page].max(other);
    }

    /// Whether a client that knows of `floor` may find the page like this, and when it was so.
    pub(super) fn moment(&self, page: usize, floor: u8, tag: u8, halves: [Half; 2]) -> Option<u8> {
        let moments = (0..).zip(&self.record.moments[page]).skip(usize::from(floor));
        moments
            .filter(|(_, moment)| moment.tag == tag && (tag == 0 || moment.halves == halves))
            .map(|(at, _)| at)
            .next()
    }

    /// A client gets what a READ returned.
    pub(super) fn learn(
        &mut self,
        scenario: &Scenario,
        client: u8,
        (page, tag): (usize, u8),
        halves: [Half; 2],
        is_direct: bool,
    ) {
        let began = self.clients[usize::from(client)].began;
        if is_direct {
            self.witness.is_answered = true;
            self.witness.is_ended |= began.is_ended;
            self.witness.is_leased |= began.lease != 0 && began.lease == self.record.lease;
            self.witness.is_incomplete |= self.record.complete & (1 << tag) == 0;
        }
        let Some(moment) = self.moment(page, began.floor, tag, halves) else {
            let was = self.moment(page, 0, tag, halves).is_some();
            let others = self.record.moments[page].iter().filter(|moment| moment.tag != tag);
            let is_foreign = |half: &Half| {
                let mut own = self.record.moments[page].iter().filter(|m| m.tag == tag);
                *half != 0 && !own.any(|moment| moment.halves.contains(half))
            };
            match () {
                () if was => self.witness.is_stale = true,
                () if others.count() > 0 && halves.iter().any(is_foreign) => {
                    self.witness.is_foreign = true;
                }
                () => self.witness.is_torn = true,
            }
            return;
        };
        for key in (0..32).filter(|key| began.given_up & Self::bit(*key) != 0) {
            if !Self::op(scenario, key / 8, key % 8).changes(page) {
                continue;
            }
            let applied = self.record.moments[page].iter().position(|moment| moment.by == key);
            match applied {
                Some(at) => self.witness.is_late |= at > usize::from(moment),
                None => self.record.dead |= Self::bit(key),
            }
        }
        self.know(page, moment);
    }

    /// A client learns that a page does not have a tag.
    pub(super) fn learn_gone(&mut self, client: u8, (page, tag): (usize, u8)) {
        let floor = self.clients[usize::from(client)].began.floor;
        let mut moments = (0..).zip(&self.record.moments[page]).skip(usize::from(floor));
        match moments.find(|(_, moment)| moment.tag != tag).map(|(at, _)| at) {
            Some(moment) => self.know(page, moment),
            None => self.witness.is_lost = true,
        }
    }

    pub(super) fn op(scenario: &Scenario, client: u8, op: u8) -> Op {
        scenario.clients[usize::from(client)].ops[usize::from(op)]
    }
}

/// A position in a short list.
pub(super) fn index(at: usize) -> u8 {
    u8::try_from(at).expect("there are few")
}
