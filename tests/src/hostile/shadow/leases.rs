//! The expected leases: the owner, epoch and end of each page's lease; and the waiting requests.

use core::{ops::Range, time::Duration};
use std::collections::{BTreeMap, HashMap};

use bluebridge_protocol::Timestamp;
use bluebridge_wire::{Command, Datagram, Flags, Header, address::Fields};

use super::{Change, Counted, PAGE_BYTES, Requester, Seen, Session, Shadow, Verdict, first_page};

/// The durations of leases.
#[derive(Clone, Copy, Debug)]
pub struct LeaseTimes {
    /// Of an UPDATE without a time.
    pub usual: Duration,
    /// The longest.
    pub longest: Duration,
}

/// The last lease of a page.
#[derive(Clone, Copy, Debug)]
pub struct Lease {
    /// The owner.
    pub owner: Requester,
    /// Its number.
    pub epoch: u64,
    /// When it expires.
    pub until: Timestamp,
}

/// The leases of a server by page, and the waiting requests by session and number.
#[derive(Debug)]
pub(in crate::hostile) struct Leases {
    times: LeaseTimes,
    /// Expired leases stay here until the page is leased again.
    pub(in crate::hostile) held: BTreeMap<u64, Lease>,
    last_epoch: u64,
    waiting: HashMap<(u64, u64), Datagram<'static>>,
}

impl Leases {
    pub(super) fn new(times: LeaseTimes) -> Self {
        Self { times, held: BTreeMap::new(), last_epoch: 0, waiting: HashMap::new() }
    }

    /// The lease of a page that has not expired.
    fn running(&self, now: Timestamp, page: u64) -> Option<&Lease> {
        self.held.get(&page).filter(|lease| now < lease.until)
    }

    pub(super) fn forget(&mut self, first: u64, pages: u32) {
        let range = first..first + u64::from(pages);
        self.held.retain(|page, _| !range.contains(page));
    }

    /// Removes waiting requests below their sessions' low water.
    pub(super) fn forget_answered(&mut self, sessions: &HashMap<u64, Session>) {
        self.waiting.retain(|(session, sequence), _| {
            sessions.get(session).is_some_and(|session| *sequence >= session.low)
        });
    }

    fn millis_of(&self, request: &Datagram<'_>) -> u128 {
        let requested = Duration::from_millis(request.header.lease_remaining_ms.into());
        let time =
            if requested.is_zero() { self.times.usual } else { requested.min(self.times.longest) };
        time.as_millis()
    }
}

const fn number(header: &Header) -> (u64, u64) {
    (header.session, header.sequence)
}

/// Whether a reply is about the target of a request.
fn is_about(request: &Datagram<'_>, reply: &Seen) -> bool {
    let start = request.target.location;
    let target = Fields::unpack(reply.header.target);
    request.command().command() == reply.command
        && request.header.length == reply.header.length
        && target.is_some_and(|target| {
            let place = target.location.wrapping_sub(start);
            Fields { location: start, ..target } == request.target
                && place < u64::from(request.header.length)
        })
}

impl Shadow {
    /// Whether a reply responds to this request, and not to a waiting one.
    #[must_use]
    pub fn is_answer(&self, request: &Datagram<'_>, reply: &Seen) -> bool {
        let is_others = number(&reply.header) != number(&request.header)
            && reply.command != Some(Command::Open)
            && self.waits(reply);
        !reply.is_notice && !is_others
    }

    /// Whether a reply has the number of a waiting request.
    pub(super) fn waits(&self, reply: &Seen) -> bool {
        let waiting = self.leases.waiting.get(&number(&reply.header));
        waiting.is_some_and(|waiting| waiting.source == reply.to)
    }

    /// The pages of this server that a request covers.
    fn pages_of(&self, request: &Datagram<'_>) -> Option<Range<u64>> {
        let base = self.local(request.target)?;
        let end = base + u64::from(request.header.length);
        Some(base / PAGE_BYTES as u64..end.div_ceil(PAGE_BYTES as u64))
    }

    /// Only a COMMIT of the owner may change a leased page.
    pub(super) fn judge_unleased(&self, now: Timestamp, first: u64, pages: u32) -> Verdict {
        for page in first..first + u64::from(pages) {
            let lease = self.leases.running(now, page);
            demand!(lease.is_none(), "page {page} changed under {lease:?}");
        }
        Ok(())
    }

    pub(super) fn judge_holder(
        &self,
        now: Timestamp,
        request: &Datagram<'_>,
        page: u64,
    ) -> Verdict {
        let lease = self.leases.running(now, page);
        let named = (Requester::of(request), request.header.lease_epoch);
        let holds = lease.is_some_and(|lease| (lease.owner, lease.epoch) == named);
        demand!(holds, "page {page}: {named:?} is not {lease:?}");
        Ok(())
    }

    /// Whether the requester holds all pages of a request under the epoch that it names.
    fn holds_all(&self, now: Timestamp, request: &Datagram<'_>) -> Verdict {
        let Some(pages) = self.pages_of(request) else { return Err("of another node".into()) };
        demand!(!pages.is_empty(), "of no page");
        pages.into_iter().try_for_each(|page| self.judge_holder(now, request, page))
    }

    /// The leases of older incarnations end when a newer one appears, and only then.
    pub(super) fn judge_superseded(
        &mut self,
        now: Timestamp,
        request: &Datagram<'_>,
        counted: Counted,
    ) -> Verdict {
        if !counted.is_newer {
            demand!(counted.superseded == 0, "superseded without a newer incarnation");
            return Ok(());
        }
        let requester = Requester::of(request);
        let is_old = |lease: &Lease| {
            (lease.owner.space, lease.owner.node) == (requester.space, requester.node)
                && lease.owner.incarnation < requester.incarnation
        };
        let held = &mut self.leases.held;
        let ended = held.values().filter(|lease| is_old(lease) && now < lease.until).count();
        held.retain(|_, lease| !is_old(lease));
        demand!(ended as u64 == counted.superseded, "{ended} ended, counted {counted:?}");
        Ok(())
    }

    /// Judges a reply to a READ or UPDATE that may have waited: it belongs to the current request
    /// or to the waiting one.
    pub(super) fn judge_waiter(
        &mut self,
        now: Timestamp,
        request: Option<&Datagram<'_>>,
        reply: &Seen,
    ) -> Verdict {
        let key = number(&reply.header);
        let waiting = self.leases.waiting.get(&key).copied();
        let current = request.filter(|request| number(&request.header) == key);
        demand!(waiting.is_some() || current.is_some(), "unexpected {reply:?}");
        if !reply.status.is_ok() {
            return Ok(());
        }
        let both = [waiting, current.map(bare)];
        let fitting = || both.iter().flatten().filter(|candidate| is_about(candidate, reply));
        let Some(candidate) = fitting().next() else {
            return Err(format!("unexpected {reply:?}; there are {both:?}"));
        };
        demand!(fitting().any(|candidate| candidate.source == reply.to), "sent to {}", reply.to);
        self.judge_read(candidate, reply)?;
        if candidate.command().command() == Some(Command::Update) {
            let millis: Vec<_> =
                fitting().map(|candidate| self.leases.millis_of(candidate)).collect();
            return self.judge_grant(now, candidate, &millis, reply);
        }
        let local = self.local(candidate.target).unwrap_or(u64::MAX);
        let page = (local + u64::from(reply.header.offset)) / PAGE_BYTES as u64;
        // The owner reads what it holds if it names the lease.
        let is_own = fitting().any(|candidate| self.judge_holder(now, candidate, page).is_ok());
        let is_leased = self.leases.running(now, page).is_some() && !is_own;
        let is_stale = reply.header.flags.contains(Flags::LAST_COMMITTED);
        let takes_stale =
            fitting().any(|candidate| candidate.header.flags.contains(Flags::MAY_BE_STALE));
        demand!(is_leased == is_stale && (takes_stale || !is_stale), "read under a lease");
        Ok(())
    }

    /// A grant covers only pages without an owner, under a new epoch; or it repeats an earlier
    /// grant.
    fn judge_grant(
        &mut self,
        now: Timestamp,
        request: &Datagram<'_>,
        millis: &[u128],
        reply: &Seen,
    ) -> Verdict {
        let Header { node, lease_epoch: epoch, lease_remaining_ms, .. } = reply.header;
        let owner = Requester::of(request);
        demand!(node == owner.node.0, "granted to {node}, requested by {owner:?}");
        let Some(pages) = self.pages_of(request) else { return Err("leased elsewhere".into()) };
        let granted = u128::from(lease_remaining_ms);
        let is_known = |lease: &&Lease| lease.owner == owner && lease.epoch == epoch;
        let known = pages.clone().filter_map(|page| self.leases.running(now, page));
        let known: Vec<_> = known.filter(is_known).copied().collect();
        if !known.is_empty() {
            let all = known.len() as u64 == pages.end - pages.start;
            demand!(all, "a part of {pages:?} is not leased any more");
            let left = known.iter().map(|lease| (lease.until - now).as_millis());
            demand!(left.into_iter().any(|left| left == granted), "{granted} ms are not left");
            return Ok(());
        }
        demand!(epoch > self.leases.last_epoch, "epoch {epoch} was used before");
        demand!(millis.contains(&granted), "{granted} ms of {millis:?}");
        let until = now + Duration::from_millis(lease_remaining_ms.into());
        for page in pages {
            let other = self.leases.running(now, page);
            demand!(other.is_none(), "page {page} has two owners: {other:?} and {owner:?}");
            self.judge_access(request, page)?;
            self.leases.held.insert(page, Lease { owner, epoch, until });
        }
        self.leases.last_epoch = epoch;
        Ok(())
    }

    /// COMMIT and ABORT release, RENEW sets the time again, all at their first reply.
    pub(super) fn judge_lease_done(
        &mut self,
        now: Timestamp,
        request: &Datagram<'_>,
        (command, is_repeated): (Command, bool),
        reply: &Seen,
    ) -> Verdict {
        if is_repeated && command != Command::Renew {
            return Ok(());
        }
        // The recorded reply is sent for a repetition, whatever epoch the repetition names.
        let header = &reply.header;
        let mut original = bare(request);
        if is_repeated {
            original.header.lease_epoch = header.lease_epoch;
        }
        self.holds_all(now, &original)?;
        let owner = (original.from.node.0, original.header.lease_epoch);
        demand!((header.node, header.lease_epoch) == owner, "the reply names another lease");
        let pages = self.pages_of(&original).unwrap_or_default();
        if command != Command::Renew {
            self.leases.held.retain(|page, _| !pages.contains(page));
            return Ok(());
        }
        let millis = u128::from(header.lease_remaining_ms);
        if is_repeated {
            let lease = self.leases.running(now, pages.start);
            let left = lease.map(|lease| (lease.until - now).as_millis());
            demand!(left == Some(millis), "{millis} ms are not left: {left:?}");
            return Ok(());
        }
        demand!(millis == self.leases.millis_of(request), "renewed for {millis} ms");
        let until = now + Duration::from_millis(header.lease_remaining_ms.into());
        for (_, lease) in self.leases.held.range_mut(pages) {
            lease.until = until;
        }
        Ok(())
    }

    /// BUSY names a lease that runs, of the requester's own space.
    pub(super) fn judge_busy(
        &mut self,
        now: Timestamp,
        request: &Datagram<'_>,
        reply: &Seen,
    ) -> Verdict {
        let Header { node, lease_epoch, flags, detail, .. } = reply.header;
        let is_named = |lease: &Lease| {
            let names_it = (lease.owner.node.0, lease.epoch) == (node, lease_epoch);
            names_it && now < lease.until && lease.owner.space == request.from.space
        };
        let exists = self.leases.held.values().any(is_named);
        demand!(exists || (node, lease_epoch) == (0, 0), "BUSY names a lease that does not run");
        if flags.contains(Flags::QUEUED) {
            demand!(request.header.flags.contains(Flags::QUEUED), "waits without QUEUED");
            demand!(detail > 0, "waits for no time");
            let command = request.command().command();
            demand!(matches!(command, Some(Command::Read | Command::Update)), "{command:?} waits");
            self.leases.waiting.insert(number(&request.header), bare(request));
        }
        Ok(())
    }

    /// The first reply to a number never says to the owner of a lease that the lease is lost.
    pub(super) fn judge_lost(
        &mut self,
        now: Timestamp,
        request: &Datagram<'_>,
        command: Command,
    ) -> Verdict {
        let holds = self.holds_all(now, request).is_ok();
        let Some(session) = self.sessions.get_mut(&request.header.session) else {
            return Err("lost in an unknown session".into());
        };
        let is_first = session.lost.insert(request.header.sequence);
        // A repetition of UPDATE is about the lease that it got, whatever epoch it names.
        demand!(!(is_first && holds) || command == Command::Update, "held, and called lost");
        Ok(())
    }

    /// A notice is sent once for a change of this request, and only in spaces with notices.
    /// `is_invalid` says that the request freed or zeroed something.
    pub(super) fn judge_notices(
        &self,
        request: &Datagram<'_>,
        is_invalid: bool,
        replies: &[Seen],
        journal: &[Change],
    ) -> Verdict {
        let space = request.from.space;
        let has_notices = self.notified_spaces.contains(&space);
        let mut invalid_count = 0;
        for notice in replies.iter().filter(|reply| reply.is_notice) {
            let Some(target) = Fields::unpack(notice.header.target) else {
                return Err("a notice without a target".into());
            };
            demand!(has_notices && target.space == space, "a notice in a space without notices");
            if notice.command == Some(Command::Invalidate) {
                invalid_count += 1;
                demand!(target == request.target, "a notice about another target");
                continue;
            }
            let page = self.local(target).map_or(u64::MAX, |at| at / PAGE_BYTES as u64);
            let given = self.allocations.get(&page).map(|held| (held.pages, held.tag, held.space));
            let noticed = (notice.header.length, target.tag, space);
            // Pages without CONFIRM are first confirmed and then freed.
            let is_freed = journal.iter().any(|change| match change {
                Change::Delete { access, pages } => {
                    (first_page(access), *pages, access.tag.0, access.space)
                        == (page, noticed.0, noticed.1, space)
                }
                _ => false,
            });
            demand!(
                given == Some(noticed) || is_freed,
                "{noticed:?} was in the notice, {given:?} is allocated"
            );
        }
        let is_due = has_notices && is_invalid;
        demand!(invalid_count == u32::from(is_due), "{invalid_count} notices of {journal:?}");
        Ok(())
    }
}

/// A request without its data.
const fn bare(request: &Datagram<'_>) -> Datagram<'static> {
    Datagram::bare(request.source, request.from, request.to, request.target, request.header)
}
