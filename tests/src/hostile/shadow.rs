//! The expected state of a server's memory, kept apart from the server; it judges every packet's
//! effect.

use core::ops::Range;
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::Ipv6Addr,
};

use bluebridge_protocol::{Timestamp, responder::Adopted, store::Access};
use bluebridge_wire::{
    Command, Datagram, Flags, Header, Location, NodeId, Space, Status,
    address::{Fields, PAGE_BYTES},
};

use super::watched::{Change, Watched};

macro_rules! demand {
    ($so:expr, $($why:tt)*) => { if !$so { return Err(format!($($why)*)); } };
}

mod leases;

use leases::Leases;
pub use leases::{Lease, LeaseTimes};

/// A requesting endpoint.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Requester {
    /// Its space.
    pub space: Space,
    /// Its node.
    pub node: NodeId,
    /// Its incarnation.
    pub incarnation: u32,
}

impl Requester {
    fn of(request: &Datagram<'_>) -> Self {
        let Fields { space, node, .. } = request.from;
        Self { space, node, incarnation: request.header.incarnation }
    }
}

/// Whether the owner of an allocation knows it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Hold {
    /// An anywhere-CREATE without CONFIRM: the server may free it.
    Anywhere(Requester, u64),
    /// Its pointer was returned or confirmed.
    Kept,
    /// Its ALLOC_WRITE is unfinished.
    Session(u64, u64),
}

/// An allocation.
#[derive(Clone, Copy, Debug)]
pub struct Allocation {
    /// Pages.
    pub pages: u32,
    /// The space that owns it.
    pub space: Space,
    /// Its colour: the generation and the tag.
    pub generation: u16,
    /// The tag.
    pub tag: u8,
    /// Whether its owner knows it.
    pub hold: Hold,
}

impl Allocation {
    /// The generation and the tag.
    #[must_use]
    pub const fn colour(&self) -> (u16, u8) {
        (self.generation, self.tag)
    }
}

/// A session, as the packets so far determine it.
#[derive(Debug)]
pub struct Session {
    /// The endpoint that opened it.
    pub requester: Requester,
    /// The lowest number that is not expired.
    pub low: u64,
    /// The piece size.
    pub piece_bytes: usize,
    answered: HashSet<u64>,
    lost: HashSet<u64>,
    pieces: Vec<Piece>,
}

#[derive(Debug)]
struct Piece {
    command: Command,
    sequence: u64,
    /// The epoch of a COMMIT; else 0.
    epoch: u64,
    location: u64,
    tag: u8,
    length: u32,
    offset: usize,
    data: Vec<u8>,
}

/// A reply that the server queued.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Its status.
    pub status: Status,
    /// The command that it responds to, or the kind of notice.
    pub command: Option<Command>,
    /// Whether it is a multicast notice and no reply.
    pub is_notice: bool,
    /// Its destination.
    pub to: Ipv6Addr,
    /// Its header.
    pub header: Header,
    /// Its data.
    pub data: Vec<u8>,
}

/// The expected memory of a server.
#[derive(Debug)]
pub struct Shadow {
    node: NodeId,
    bytes: Vec<u8>,
    adopted: Option<Adopted>,
    /// By first page.
    pub allocations: BTreeMap<u64, Allocation>,
    /// By id.
    pub sessions: HashMap<u64, Session>,
    pub(super) leases: Leases,
    /// Spaces in which notices are sent.
    notified_spaces: Vec<Space>,
}

/// What a server counted while it handled a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counted {
    /// The session's low water moved up.
    pub is_raised: bool,
    /// The requester has a higher incarnation than before.
    pub is_newer: bool,
    /// Leases that ended because of that.
    pub superseded: u64,
}

type Verdict = Result<(), String>;

impl Shadow {
    /// The shadow of a server without allocations.
    #[must_use]
    pub fn new(
        node: NodeId,
        pages: u32,
        adopted: Option<Adopted>,
        times: LeaseTimes,
        notified_spaces: Vec<Space>,
    ) -> Self {
        Self {
            node,
            bytes: vec![0; pages as usize * PAGE_BYTES],
            adopted,
            allocations: BTreeMap::new(),
            sessions: HashMap::new(),
            leases: Leases::new(times),
            notified_spaces,
        }
    }

    /// The allocation that holds a page, with its first page.
    #[must_use]
    pub fn holding(&self, page: u64) -> Option<(u64, Allocation)> {
        let (&first, allocation) = self.allocations.range(..=page).next_back()?;
        (page - first < u64::from(allocation.pages)).then_some((first, *allocation))
    }

    /// Whether a datagram belongs to an open session and its number is in the window.
    #[must_use]
    pub fn is_in_session(&self, request: &Datagram<'_>) -> bool {
        self.sessions.get(&request.header.session).is_some_and(|session| {
            session.requester == Requester::of(request)
                && request.header.sequence >= session.low
                && request.header.sequence - session.low < bluebridge_wire::SESSION_WINDOW
        })
    }

    /// Checks the changes and replies of a request, and applies the changes here. `replies` also
    /// contains those to other requesters that waited.
    ///
    /// # Errors
    /// A description of the violation.
    pub fn judge(
        &mut self,
        now: Timestamp,
        request: &Datagram<'_>,
        counted: Counted,
        replies: &[Seen],
        journal: &[Change],
    ) -> Verdict {
        self.note_request(request, counted.is_raised);
        self.judge_superseded(now, request, counted)?;
        let command = request.command().command();
        let own = || replies.iter().filter(|reply| self.is_answer(request, reply));
        let is_answered = own().next().is_some();
        let mut is_invalid = false;
        let is_refused = own().any(|reply| {
            !matches!(reply.status, Status::Ok | Status::Partial | Status::Incomplete)
        });
        for change in journal {
            if self.is_abandoned(change, request) {
                self.apply(change);
                continue;
            }
            demand!(!is_refused, "refused, and yet {change:?}");
            demand!(!request.is_reply(), "a reply, and yet {change:?}");
            match (change, command) {
                (Change::Create { space, pages, grant }, Some(command)) => {
                    let (pages, space) = (*pages, *space);
                    self.judge_create(request, command, (space, pages))?;
                    let hold = hold_of(request);
                    let (generation, tag) = (grant.location.generation().number(), grant.tag.0);
                    let first = grant.location.page();
                    let taken =
                        (first..first + u64::from(pages)).any(|p| self.holding(p).is_some());
                    demand!(!taken, "pages of another allocation were given");
                    let allocation = Allocation { pages, space, generation, tag, hold };
                    self.allocations.insert(first, allocation);
                    let bytes = page_bytes(first, 0..pages as usize * PAGE_BYTES);
                    self.bytes[bytes].fill(0);
                }
                (Change::Delete { access, pages }, Some(Command::Delete)) => {
                    self.judge_delete(request, access)?;
                    self.judge_unleased(now, first_page(access), *pages)?;
                    self.apply(change);
                    is_invalid = true;
                }
                (Change::Write { page, start, data }, Some(command)) => {
                    self.judge_write(request, command, (*page, *start, data), is_answered)?;
                    match command {
                        // The pages have no owner yet, but they may be leased by a requester that
                        // guessed them.
                        Command::AllocWrite => {}
                        Command::Commit => self.judge_holder(now, request, *page)?,
                        _ => self.judge_unleased(now, *page, 1)?,
                    }
                    self.apply(change);
                }
                (Change::Zero { page, range }, Some(Command::Delete)) => {
                    demand!(request.header.flags.contains(Flags::ZERO), "zeroed without a request");
                    demand!(is_answered, "zeroed without a reply");
                    self.judge_range(request, *page, range.clone())?;
                    self.judge_unleased(now, *page, 1)?;
                    self.apply(change);
                    is_invalid = true;
                }
                _ => return Err(format!("{command:?} may not do {change:?}")),
            }
        }
        self.judge_replies(now, request, replies, journal)?;
        self.judge_notices(request, is_invalid, replies, journal)?;
        self.leases.forget_answered(&self.sessions);
        Ok(())
    }

    /// Checks replies to waiting requests, before the next request is handled.
    ///
    /// # Errors
    /// A description of the violation.
    pub fn judge_waiters(&mut self, now: Timestamp, replies: &[Seen]) -> Verdict {
        replies.iter().try_for_each(|reply| self.judge_waiter(now, None, reply))
    }

    /// Checks changes and replies that follow from the passing of time.
    ///
    /// # Errors
    /// A description of the violation.
    pub fn judge_timeout(
        &mut self,
        now: Timestamp,
        replies: &[Seen],
        journal: &[Change],
    ) -> Verdict {
        for change in journal {
            let Change::Delete { access, .. } = change else {
                return Err(format!("time may not do {change:?}"));
            };
            let held = self.allocations.get(&access.location.page()).map(|held| held.hold);
            demand!(held.is_some_and(|hold| hold != Hold::Kept), "time freed {access:?}");
            self.apply(change);
        }
        self.judge_waiters(now, replies)
    }

    /// Compares the whole state with the server's.
    ///
    /// # Errors
    /// A description of the difference.
    pub fn audit(&self, store: &Watched) -> Verdict {
        use bluebridge_protocol::store::PageStore as _;
        for (page, bytes) in (0..).zip(self.bytes.chunks_exact(PAGE_BYTES)) {
            demand!(store.read(page, 0..PAGE_BYTES) == bytes, "page {page} differs");
        }
        let held: u64 = self.allocations.values().map(|held| u64::from(held.pages)).sum();
        let used = store.arena.arena_usage().used_pages;
        demand!(held == used, "{used} pages are allocated, {held} should be");
        Ok(())
    }

    fn note_request(&mut self, request: &Datagram<'_>, is_raised: bool) {
        let Header { session, sequence, length, offset, .. } = request.header;
        let Some(open) = self.sessions.get_mut(&session) else { return };
        if open.requester != Requester::of(request) {
            return;
        }
        let low = request.header.low_water();
        if is_raised {
            open.low = low;
            open.answered.retain(|answered| *answered >= low);
            open.lost.retain(|lost| *lost >= low);
            open.pieces.retain(|piece| piece.sequence >= low);
        }
        // An operation in a single datagram does not need earlier pieces.
        let is_piece = request.data.len() != length as usize && request.data.len() <= 4096;
        if let Some(command @ (Command::Write | Command::Commit)) = request.command().command()
            && is_piece
        {
            let Fields { location, tag, .. } = request.target;
            let (offset, data) = (usize::from(offset), request.data.to_vec());
            let epoch = epoch_of(request);
            let piece = Piece { command, sequence, epoch, location, tag, length, offset, data };
            open.pieces.push(piece);
        }
    }

    /// Whether a change frees an unfinished ALLOC_WRITE whose session continued or ended.
    fn is_abandoned(&self, change: &Change, request: &Datagram<'_>) -> bool {
        let Change::Delete { access, .. } = change else { return false };
        let held = self.allocations.get(&access.location.page());
        let Some(Hold::Session(session, sequence)) = held.map(|held| held.hold) else {
            return false;
        };
        let header = &request.header;
        match request.command().command() {
            // These end sessions: explicitly, to make room, or because the node has a new
            // incarnation.
            Some(Command::Open | Command::Close) => true,
            Some(command) if command.is_anycast() && header.session == 0 => true,
            _ => session == header.session && sequence < header.low_water(),
        }
    }

    fn judge_create(
        &self,
        request: &Datagram<'_>,
        command: Command,
        (space, pages): (Space, u32),
    ) -> Verdict {
        let length = request.header.length;
        let requested = match command {
            Command::Create => length,
            Command::AllocWrite => length.div_ceil(4096),
            _ => return Err(format!("{command} allocated")),
        };
        demand!(requested == pages, "{pages} pages were allocated, {requested} requested");
        demand!(space == request.from.space, "pages of another space were given");
        Ok(())
    }

    fn judge_delete(&self, request: &Datagram<'_>, access: &Access) -> Verdict {
        let held = self.allocations.get(&access.location.page());
        let Some(held) = held else { return Err(format!("freed what was free: {access:?}")) };
        demand!(!request.header.flags.contains(Flags::ZERO), "freed instead of zeroed");
        demand!(
            self.local(request.target) == Some(access.location.offset()),
            "freed another place: {access:?}"
        );
        demand!(
            (Some(held.colour()), held.space) == (self.colour(request.target), request.from.space),
            "freed the allocation of another: {held:?}"
        );
        Ok(())
    }

    fn judge_write(
        &self,
        request: &Datagram<'_>,
        command: Command,
        (page, start, data): (u64, usize, &[u8]),
        is_answered: bool,
    ) -> Verdict {
        match command {
            Command::AllocWrite => {
                let found = self.holding(page);
                let Some((first, held)) = found else { return Err("filled a free page".into()) };
                demand!(held.hold == hold_of(request), "filled the page of another: {held:?}");
                let at = index(page - first) * PAGE_BYTES + start;
                demand!(at == usize::from(request.header.offset), "filled another place");
                demand!(data == request.data, "filled with something else");
                Ok(())
            }
            Command::CompareSwap | Command::FetchAdd => {
                demand!(is_answered, "an atomic without a reply");
                self.judge_range(request, page, start..start + data.len())?;
                let at = page_bytes(page, start..start + 8);
                let before = word(&self.bytes[at], u64::from_le_bytes);
                let first = word(request.data, u64::from_be_bytes);
                let expected = match command {
                    Command::FetchAdd => before.wrapping_add(first),
                    _ => {
                        demand!(first == before, "swapped though it was {before}");
                        word(&request.data[8..], u64::from_be_bytes)
                    }
                };
                demand!(word(data, u64::from_le_bytes) == expected, "the wrong word");
                Ok(())
            }
            Command::Commit | Command::Write => {
                demand!(command == Command::Write || is_answered, "a COMMIT without a reply");
                self.judge_range(request, page, start..start + data.len())?;
                let Some(base) = self.local(request.target) else { return Err("where?".into()) };
                let at = index(page) * PAGE_BYTES + start - index(base);
                demand!(
                    self.was_sent(request, at, data),
                    "written at {at} without a matching piece: {} bytes {:?}.. beside {}",
                    data.len(),
                    &data[..data.len().min(4)],
                    self.sent_of(request)
                );
                Ok(())
            }
            _ => Err(format!("{command} wrote")),
        }
    }

    /// Whether a range of a page is exactly what a request names of it, and in its requester's
    /// space.
    fn judge_range(&self, request: &Datagram<'_>, page: u64, range: Range<usize>) -> Verdict {
        let Some(base) = self.local(request.target) else { return Err("of another node".into()) };
        let (base, end) = (index(base), index(base) + request.header.length as usize);
        let page_start = index(page) * PAGE_BYTES;
        let named = base.max(page_start)..end.min(page_start + PAGE_BYTES);
        let is = page_start + range.start..page_start + range.end;
        demand!(named == is, "{named:?} was named, {is:?} changed");
        self.judge_access(request, page)
    }

    fn judge_access(&self, request: &Datagram<'_>, page: u64) -> Verdict {
        let Some((_, held)) = self.holding(page) else { return Err("of a free page".into()) };
        let is = (Some(held.colour()), held.space);
        let named = (self.colour(request.target), request.from.space);
        demand!(is == named, "{is:?} was accessed as {named:?}");
        Ok(())
    }

    /// Whether the session's pieces make up this part of an operation.
    fn was_sent(&self, request: &Datagram<'_>, start: usize, data: &[u8]) -> bool {
        let Some(session) = self.sessions.get(&request.header.session) else { return false };
        let Fields { location, tag, .. } = request.target;
        let Header { sequence, length, .. } = request.header;
        let Some(command) = request.command().command() else { return false };
        let named = (command, sequence, epoch_of(request), location, tag, length);
        if usize::from(request.header.offset) == start && request.data == data {
            return true;
        }
        let mut at = 0;
        while at < data.len() {
            let fits = |piece: &&Piece| {
                let Piece { command, sequence, epoch, location, tag, length, .. } = **piece;
                (command, sequence, epoch, location, tag, length) == named
                    && piece.offset == start + at
                    && !piece.data.is_empty()
                    && data[at..].starts_with(&piece.data)
            };
            // A refused piece may be a part of an accepted one.
            let longest = session.pieces.iter().filter(fits).map(|piece| piece.data.len()).max();
            let Some(bytes) = longest else { return false };
            at += bytes;
        }
        true
    }

    /// A summary of the pieces that were sent with a request's number.
    fn sent_of(&self, request: &Datagram<'_>) -> String {
        let Some(session) = self.sessions.get(&request.header.session) else {
            return "none".into();
        };
        let same = session.pieces.iter().filter(|piece| piece.sequence == request.header.sequence);
        let short = |piece: &Piece| {
            let Piece { location, tag, length, offset, data, .. } = piece;
            format!("{location:x}/{tag} {offset}+{} of {length} {:?}", data.len(), data.first())
        };
        same.map(short).collect::<Vec<_>>().join("; ")
    }

    fn judge_replies(
        &mut self,
        now: Timestamp,
        request: &Datagram<'_>,
        replies: &[Seen],
        journal: &[Change],
    ) -> Verdict {
        let header = &request.header;
        for reply in replies.iter().filter(|reply| !reply.is_notice) {
            if !self.is_answer(request, reply) {
                self.judge_waiter(now, Some(request), reply)?;
                continue;
            }
            demand!(reply.to == request.source || self.waits(reply), "sent to {}", reply.to);
            match (request.command().command(), reply.status) {
                (Some(Command::Read | Command::Update), Status::Ok) => {
                    self.judge_waiter(now, Some(request), reply)?;
                }
                (Some(Command::Open), Status::Ok) => self.note_session(request, reply),
                (Some(Command::Close), Status::Ok) | (_, Status::NoSession) => {
                    let requester =
                        self.sessions.get(&header.session).map(|session| session.requester);
                    if requester == Some(Requester::of(request)) {
                        self.sessions.remove(&header.session);
                    }
                }
                (Some(command), Status::Ok) if command.is_mutating() => {
                    self.judge_done(now, request, command, reply, journal)?;
                }
                (_, Status::Busy) => self.judge_busy(now, request, reply)?,
                (Some(command), Status::LeaseLost) => {
                    self.judge_lost(now, request, command)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn judge_read(&self, request: &Datagram<'_>, reply: &Seen) -> Verdict {
        let Some(base) = self.local(request.target) else { return Err("read elsewhere".into()) };
        let start = index(base) + usize::from(reply.header.offset);
        let end = start + reply.data.len();
        demand!(end <= index(base) + request.header.length as usize, "read more than requested");
        demand!(self.bytes[start..end] == reply.data, "read something else");
        self.judge_access(request, (start / PAGE_BYTES) as u64)
    }

    fn note_session(&mut self, request: &Datagram<'_>, reply: &Seen) {
        let piece_bytes = reply.header.length as usize;
        self.sessions.entry(reply.header.session).or_insert_with(|| Session {
            requester: Requester::of(request),
            low: 1,
            piece_bytes,
            answered: HashSet::new(),
            lost: HashSet::new(),
            pieces: Vec::new(),
        });
    }

    /// Checks that the effect of a request with its first OK reply happened with this packet.
    fn judge_done(
        &mut self,
        now: Timestamp,
        request: &Datagram<'_>,
        command: Command,
        reply: &Seen,
        journal: &[Change],
    ) -> Verdict {
        let header = &request.header;
        let location =
            Fields::unpack(reply.header.target).and_then(|t| Location::from_bits(t.location));
        let granted = location.map_or(u64::MAX, Location::page);
        if header.session == 0 {
            return Ok(());
        }
        let Some(session) = self.sessions.get_mut(&header.session) else {
            return Err("done in an unknown session".into());
        };
        demand!(session.requester == Requester::of(request), "done in another's session");
        let is_repeated = !session.answered.insert(header.sequence);
        if matches!(command, Command::Abort | Command::Commit | Command::Renew) {
            self.judge_lease_done(now, request, (command, is_repeated), reply)?;
        }
        if is_repeated {
            return Ok(());
        }
        if command == Command::Confirm {
            let page = self.local(request.target).map_or(u64::MAX, |at| at / PAGE_BYTES as u64);
            let held = self.allocations.get(&page).map(|held| held.hold);
            // Others may send a CONFIRM too, but it does not keep the pages.
            if matches!(held, Some(Hold::Anywhere(requester, _)) if requester == Requester::of(request))
            {
                self.keep(page);
            }
        }
        let is_whole = request.data.len() == header.length as usize;
        let changed = |what: fn(&Change) -> bool| journal.iter().any(what);
        let done = match command {
            Command::Create => changed(|change| matches!(change, Change::Create { .. })),
            Command::Write if is_whole => changed(|change| matches!(change, Change::Write { .. })),
            Command::Commit => {
                let written = journal.iter().map(|change| match change {
                    Change::Write { data, .. } => data.len(),
                    _ => 0,
                });
                written.sum::<usize>() == header.length as usize
            }
            Command::FetchAdd => changed(|change| matches!(change, Change::Write { .. })),
            Command::Delete if header.flags.contains(Flags::ZERO) => {
                let zeroed = journal.iter().map(|change| match change {
                    Change::Zero { range, .. } => range.len(),
                    _ => 0,
                });
                zeroed.sum::<usize>() == header.length as usize
            }
            // A part may have been freed before.
            Command::Delete if header.flags.contains(Flags::PART) => true,
            Command::Delete => changed(|change| matches!(change, Change::Delete { .. })),
            _ => true,
        };
        demand!(done, "{command} has the reply OK but was not executed");
        if matches!(command, Command::Create | Command::AllocWrite) {
            self.keep(granted);
        }
        Ok(())
    }

    fn keep(&mut self, first: u64) {
        if let Some(allocation) = self.allocations.get_mut(&first) {
            allocation.hold = Hold::Kept;
        }
    }

    /// The generation and tag of a target, if its generation is one of this server's contents.
    fn colour(&self, target: Fields) -> Option<(u16, u8)> {
        let generation = Location::from_bits(target.location)?.generation();
        if target.node == self.node {
            return Some((generation.number(), target.tag));
        }
        let adopted = self.adopted.filter(|adopted| adopted.node == target.node)?;
        let is_its = generation >= adopted.generation;
        is_its.then_some((generation.number(), target.tag))
    }

    fn local(&self, target: Fields) -> Option<u64> {
        let location = Location::from_bits(target.location)?;
        if target.node == self.node {
            return Some(location.offset());
        }
        let adopted = self.adopted.filter(|adopted| adopted.node == target.node)?;
        let within = location.page().checked_sub(adopted.first_page)?;
        let page = adopted.local_page + within;
        (within < adopted.page_count).then(|| page * PAGE_BYTES as u64 + location.in_page() as u64)
    }

    fn apply(&mut self, change: &Change) {
        match change {
            Change::Create { .. } => {}
            Change::Delete { access, pages } => {
                self.allocations.remove(&access.location.page());
                self.leases.forget(first_page(access), *pages);
            }
            Change::Write { page, start, data } => {
                self.bytes[page_bytes(*page, *start..start + data.len())].copy_from_slice(data);
            }
            Change::Zero { page, range } => {
                self.bytes[page_bytes(*page, range.clone())].fill(0);
            }
        }
    }
}

fn hold_of(request: &Datagram<'_>) -> Hold {
    let Header { session, sequence, .. } = request.header;
    if session == 0 {
        Hold::Anywhere(Requester::of(request), sequence)
    } else {
        Hold::Session(session, sequence)
    }
}

/// The epoch, which all pieces of one COMMIT share.
fn epoch_of(request: &Datagram<'_>) -> u64 {
    let is_commit = request.command().command() == Some(Command::Commit);
    if is_commit { request.header.lease_epoch } else { 0 }
}

const fn first_page(access: &Access) -> u64 {
    access.location.page()
}

fn page_bytes(page: u64, range: Range<usize>) -> Range<usize> {
    let start = index(page) * PAGE_BYTES;
    start + range.start..start + range.end
}

fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

fn word(bytes: &[u8], decode: fn([u8; 8]) -> u64) -> u64 {
    bytes.first_chunk().map_or(0, |chunk| decode(*chunk))
}
