//! Planted bugs: the simulation must find each of them.

use core::ops::Range;
use std::collections::BTreeMap;

use bluebridge_protocol::store::{Access, Grant, LineStore, PageStore, StoreUsage};
use bluebridge_wire::{
    ArenaGeneration, Command, Datagram, Location, NodeId, Space, Status, Tag,
    address::PAGE_BYTES,
    header::{HEADER_BYTES, Header},
    seal,
};

use super::server::GENERATION_COUNT;

/// By how much a server with [`Bug::ServesLonger`] exaggerates: longer than any operation waits.
const MORE_SERVED_MICROS: u64 = 10_000_000;

/// A bug in a server, a store or the encoding of datagrams.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Bug {
    /// The store frees pages, and allocates as many that no client knows.
    DeleteLeaks,
    /// The store allocates pages with their earlier contents.
    DirtyPages,
    /// The store grants the same pages twice.
    DoubleGrant,
    /// The server executes a repeated request again.
    ForgetWindow,
    /// The store accepts every generation of its contents.
    IgnoreGenerations,
    /// The store accepts every tag.
    IgnoreTags,
    /// The store skips some writes.
    LoseWrites,
    /// The receiver ignores the CRC.
    NoCrc,
    /// A server that lost its contents keeps the arena generation.
    SameGeneration,
    /// The requester joins pieces of different versions of a page.
    SameVersion,
    /// The server states that its process has served longer than it has.
    ServesLonger,
}

impl Bug {
    /// Every bug.
    pub const ALL: [Self; 11] = [
        Self::DeleteLeaks,
        Self::DirtyPages,
        Self::DoubleGrant,
        Self::ForgetWindow,
        Self::IgnoreGenerations,
        Self::IgnoreTags,
        Self::LoseWrites,
        Self::NoCrc,
        Self::SameGeneration,
        Self::SameVersion,
        Self::ServesLonger,
    ];
}

/// A store with one of the bugs, or none.
pub(super) struct BuggyStore<S> {
    pub(super) inner: S,
    bug: Option<Bug>,
    granted: Option<(Space, u32, Grant)>,
    writes: u32,
    /// The highest incarnations of clients, as kept memory has them.
    fences: BTreeMap<(Space, NodeId), u32>,
}

impl<S: PageStore> BuggyStore<S> {
    pub(super) const fn new(inner: S, bug: Option<Bug>) -> Self {
        Self { inner, bug, granted: None, writes: 0, fences: BTreeMap::new() }
    }

    fn redirected(&self, access: Access) -> Access {
        let is_fit = |access: &Access| self.inner.check(*access).is_ok();
        let redirected = match self.bug {
            Some(Bug::IgnoreTags) => {
                (0..=u8::MAX).map(|tag| Access { tag: Tag(tag), ..access }).find(is_fit)
            }
            // A pointer to lost contents is still refused: that is another bug.
            Some(Bug::IgnoreGenerations) if access.location.generation() < self.generation() => {
                None
            }
            Some(Bug::IgnoreGenerations) => (0..GENERATION_COUNT)
                .filter_map(|more| {
                    let generation = self.generation().saturating_add(more);
                    let location = Location::new(generation, access.location.offset())?;
                    Some(Access { location, ..access })
                })
                .find(is_fit),
            _ => None,
        };
        redirected.unwrap_or(access)
    }
}

impl<S: PageStore> PageStore for BuggyStore<S> {
    fn generation(&self) -> ArenaGeneration {
        self.inner.generation()
    }

    fn create(&mut self, space: Space, pages: u32) -> Result<Grant, Status> {
        if self.bug == Some(Bug::DoubleGrant)
            && let Some((_, _, grant)) =
                self.granted.take_if(|last| (last.0, last.1) == (space, pages))
        {
            return Ok(grant);
        }
        let grant = self.inner.create(space, pages)?;
        self.granted = Some((space, pages, grant));
        if self.bug == Some(Bug::DirtyPages) {
            self.inner.write(grant.location.page(), 100, b"left behind");
        }
        Ok(grant)
    }

    fn delete(&mut self, access: Access, pages: u32) -> Result<u32, Status> {
        let access = self.redirected(access);
        let freed = self.inner.delete(access, pages)?;
        if self.bug == Some(Bug::DeleteLeaks) {
            self.inner.create(access.space, freed)?;
        }
        Ok(freed)
    }

    fn allocation(&self, access: Access, pages: u32) -> Result<Range<u64>, Status> {
        self.inner.allocation(self.redirected(access), pages)
    }

    fn check(&self, access: Access) -> Result<(), Status> {
        self.inner.check(self.redirected(access))
    }

    fn read(&self, page: u64, range: Range<usize>) -> &[u8] {
        self.inner.read(page, range)
    }

    fn write(&mut self, page: u64, start: usize, data: &[u8]) {
        self.writes += 1;
        if self.bug != Some(Bug::LoseWrites) || !self.writes.is_multiple_of(20) {
            self.inner.write(page, start, data);
        }
    }

    fn write_page(&mut self, page: u64, data: &[u8; PAGE_BYTES], crc: u32) {
        self.writes += 1;
        if self.bug != Some(Bug::LoseWrites) || !self.writes.is_multiple_of(20) {
            self.inner.write_page(page, data, crc);
        }
    }

    fn page_crc(&self, page: u64) -> Option<u32> {
        self.inner.page_crc(page)
    }

    fn zero(&mut self, page: u64, range: Range<usize>) {
        self.inner.zero(page, range);
    }

    fn version(&self, page: u64) -> u64 {
        self.inner.version(page)
    }

    fn keep_fence(&mut self, space: Space, node: NodeId, incarnation: u32) {
        match incarnation {
            0 => self.fences.remove(&(space, node)),
            _ => self.fences.insert((space, node), incarnation),
        };
    }

    fn fences(&self, each: &mut dyn FnMut(Space, NodeId, u32)) {
        for (&(space, node), &incarnation) in &self.fences {
            each(space, node, incarnation);
        }
    }

    fn complete(&mut self, location: Location) {
        self.inner.complete(location);
    }

    fn lines(&self) -> &dyn LineStore {
        self.inner.lines()
    }

    fn lines_mut(&mut self) -> &mut dyn LineStore {
        self.inner.lines_mut()
    }

    fn usage(&self, space: Space) -> StoreUsage {
        self.inner.usage(space)
    }
}

/// A datagram with another header, sealed again.
pub(super) fn rewritten(
    datagram: &Datagram<'_>,
    destination: std::net::Ipv6Addr,
    header: &Header,
) -> Vec<u8> {
    let mut head = vec![0; HEADER_BYTES];
    header.emit(&mut head, 0);
    seal(datagram.source, destination, &mut head, datagram.data);
    head.extend(datagram.data);
    head
}

/// Applies [`Bug::ForgetWindow`] to a request: a repetition gets its own number.
pub(super) fn forget_window(
    seen: &mut std::collections::HashSet<(u64, u64)>,
    datagram: &Datagram<'_>,
) -> Option<Vec<u8>> {
    let once = matches!(
        datagram.command().command(),
        Some(Command::Create | Command::FetchAdd | Command::CompareSwap | Command::Delete)
    );
    let header = datagram.header;
    if !once || header.session == 0 || seen.insert((header.session, header.sequence)) {
        return None;
    }
    // Far enough ahead for a number that is not in use, and inside the window.
    let ahead = 256;
    let header = Header {
        sequence: header.sequence + u64::from(ahead),
        answered_distance: header.answered_distance + ahead,
        ..header
    };
    Some(rewritten(datagram, datagram.to.to_ipv6(), &header))
}

/// Applies [`Bug::SameVersion`] to a piece of a READ.
pub(super) fn same_version(datagram: &Datagram<'_>) -> Option<Vec<u8>> {
    let is_piece = datagram.is_reply() && datagram.command().command() == Some(Command::Read);
    if !is_piece || datagram.data.is_empty() {
        return None;
    }
    let header = Header { page_version: 1, ..datagram.header };
    Some(rewritten(datagram, datagram.to.to_ipv6(), &header))
}

/// Applies [`Bug::ServesLonger`] to a reply to OPEN.
pub(super) fn serves_longer(datagram: &Datagram<'_>) -> Option<Vec<u8>> {
    let is_reply_to_open =
        datagram.is_reply() && datagram.command().command() == Some(Command::Open);
    if !is_reply_to_open {
        return None;
    }
    let longer = datagram.header.page_version + MORE_SERVED_MICROS;
    let header = Header { page_version: longer, ..datagram.header };
    Some(rewritten(datagram, datagram.to.to_ipv6(), &header))
}

/// Applies [`Bug::NoCrc`] to a damaged datagram.
pub(super) fn sealed_again(received: &super::network::Received<'_>) -> Option<Vec<u8>> {
    let mut payload = received.payload.to_vec();
    let (head, data) = payload.split_at_mut_checked(HEADER_BYTES)?;
    seal(received.source, received.destination, head, data);
    Some(payload)
}
