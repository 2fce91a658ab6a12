//! CREATE and DELETE: granted and freed pages.

use bluebridge_protocol::{
    Timestamp,
    requester::{Failure, Output},
};
use bluebridge_wire::Status;

use super::{Ledger, Outcome, life_of};
use crate::sim::{
    region::{Contents, Part, Purpose, Region, State, parts},
    task::Slot,
};

impl Ledger {
    pub(super) fn created(
        &mut self,
        now: Timestamp,
        client: usize,
        (purpose, server, pages): (Purpose, Option<usize>, u32),
        slot: &Slot,
        result: Result<Output, Failure>,
    ) -> Result<(), String> {
        if let Some(server) = server {
            // As often as a session can have ended meanwhile, by its server's clock.
            let times = (now - slot.start).as_nanos() / self.session_idle.mul_f64(0.9).as_nanos();
            let orphans = (0..times.min(50)).map(|_| u64::from(pages));
            self.servers[server].orphans.extend(orphans);
        }
        let pointer = match result {
            Ok(Output::Pointer(pointer)) => pointer,
            Ok(other) => return Err(format!("a CREATE returned {other:?}")),
            Err(Failure::OutcomeUnknown { node, .. }) => {
                let at = server.or_else(|| self.servers.iter().position(|s| s.node == node));
                let at = at.ok_or("the outcome at no server is unknown")?;
                self.servers[at].orphans.push(pages.into());
                return Ok(());
            }
            Err(Failure::Refused {
                status: Status::OutOfMemory | Status::QuotaExceeded, ..
            }) => {
                return Ok(());
            }
            other => return self.must_not_refuse(slot.start, server.unwrap_or(0), &other),
        };
        let at = self.servers.iter().position(|facts| facts.node == pointer.node);
        let at = at.ok_or_else(|| format!("{pointer} is on no memory node"))?;
        if server.is_some_and(|server| server != at) {
            return Err(format!("{pointer} is on another server than requested"));
        }
        let mut region = Region::new(purpose, (pointer, pages), at, client);
        self.check_grant(&region)?;
        if !self.servers[at].is_of_now(pointer) {
            region.lost_at = Some(now);
        }
        if !slot.outgoing.is_empty()
            && let Contents::Private(contents) = &mut region.contents
        {
            for Part { page, start, data } in parts(0, slot.outgoing.len()) {
                contents[page].write(start, &slot.outgoing[data]);
            }
        }
        self.regions.push(region);
        Ok(())
    }

    /// No page may be granted twice.
    pub(super) fn check_grant(&mut self, new: &Region) -> Result<(), String> {
        let pages = new.page_range();
        let facts = &self.servers[new.server];
        if !new.pointer.location.is_page_aligned() || pages.end > facts.address_pages() {
            return Err(format!("{} is no place for pages", new.pointer));
        }
        // Another generation of the same contents is not another page.
        let life = life_of(new.pointer.location.generation());
        for old in &mut self.regions {
            let other = old.page_range();
            if old.server != new.server
                || life_of(old.pointer.location.generation()) != life
                || old.state == State::Deleted
                || other.end <= pages.start
                || pages.end <= other.start
            {
                continue;
            }
            if old.state == State::Live {
                return Err(format!("{} was granted over {}", new.pointer, old.pointer));
            }
            // The DELETE with the unknown outcome was done.
            old.state = State::Deleted;
        }
        Ok(())
    }

    pub(super) fn deleted(
        &mut self,
        now: Timestamp,
        slot: &Slot,
        index: usize,
        result: Result<Output, Failure>,
    ) -> Result<(), String> {
        let before = self.regions[index].deleted_at.is_some();
        let outcome = self.outcome(slot, index, &result)?;
        let region = &mut self.regions[index];
        let first_try = region.delete_count == 1;
        match (outcome, result) {
            (Outcome::Done, Ok(Output::Freed(pages))) if pages == region.pages && !before => {
                region.state = State::Deleted;
                region.deleted_at = Some(now);
                Ok(())
            }
            (Outcome::Done, result) => {
                Err(format!("a DELETE of {} pages: {result:?}", region.pages))
            }
            (Outcome::Unknown, _) => Ok(()),
            (
                Outcome::NotDone,
                Err(Failure::Refused { status: Status::StaleTag | Status::NotAllocated, .. }),
            ) => {
                if first_try && region.state == State::Doubtful {
                    return Err("the first DELETE found nothing to free".to_owned());
                }
                region.state = State::Deleted;
                region.deleted_at = Some(now);
                Ok(())
            }
            (Outcome::NotDone, _) => {
                if first_try && region.state == State::Doubtful {
                    region.state = State::Live;
                    region.deleting_from = None;
                }
                Ok(())
            }
        }
    }
}
