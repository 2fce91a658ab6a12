//! Requests about leases: granted, ended, renewed, waited for, and in conflict with others.

use bluebridge_wire::{
    Command, Flags,
    address::{Fields, LINE_BYTES, PAGE_BYTES},
};
use rand::{Rng, seq::IteratorRandom};

use super::{Draw, small};
use crate::hostile::{forge::Forged, shadow::Lease};

impl Draw<'_> {
    /// A request that takes a lease, or refers to one.
    pub(super) fn leased(&mut self) -> Vec<Forged> {
        match self.below(10) {
            0..3 => {
                let mut train = self.bytes(Command::Update);
                train.iter_mut().for_each(|datagram| self.lease_options(datagram));
                train
            }
            3..8 => {
                let commands = [Command::Commit, Command::Abort, Command::Renew];
                let command = commands.into_iter().choose(self.rng).unwrap_or(Command::Commit);
                self.end_or_renew(command)
            }
            _ => vec![self.in_the_way()],
        }
    }

    /// Sets the options of an UPDATE: a lease time, and whether to wait.
    pub(in crate::hostile) fn lease_options(&mut self, update: &mut Forged) {
        let millis = [0, 1, 2, 10, 60, 60_000].into_iter().choose(self.rng);
        update.header.lease_remaining_ms = millis.unwrap_or(0);
        if self.rng.random_bool(0.5) {
            update.header.flags = update.header.flags.with(Flags::QUEUED);
        }
    }

    /// A pointer to a leased page of the attacker's space, its lease, and the remaining bytes of
    /// the lease; mostly the attacker's own.
    pub(in crate::hostile) fn lease(&mut self) -> Option<(Fields, Lease, u64)> {
        let own_only = self.rng.random_bool(0.8);
        let shadow = &self.server.shadow;
        let (space, node) = (self.attacker.space, self.attacker.node);
        let fits =
            |lease: &Lease| lease.owner.space == space && (!own_only || lease.owner.node == node);
        let held = shadow.leases.held.iter().filter(|(_, lease)| fits(lease));
        let (&page, &lease) = held.choose(self.rng)?;
        let (_, held) = shadow.holding(page)?;
        let epoch_of = |page: u64| shadow.leases.held.get(&page).map(|lease| lease.epoch);
        let same = (0..8_u64).take_while(|more| {
            (page + more) / 8 == page / 8 && epoch_of(page + more) == Some(lease.epoch)
        });
        let bytes = same.count() as u64 * PAGE_BYTES as u64;
        let name = (held.generation, page);
        let (node, location) = self.server.named(name, self.rng.random_bool(0.5));
        Some((Fields { space, node, command: 0, tag: held.tag, location }, lease, bytes))
    }

    /// COMMIT, ABORT or RENEW of a lease, mostly of the attacker's own.
    pub(in crate::hostile) fn end_or_renew(&mut self, command: Command) -> Vec<Forged> {
        let Some((mut target, lease, bytes)) = self.lease() else {
            return self.bytes(command);
        };
        let skip = if self.rng.random_bool(0.3) { self.below(PAGE_BYTES as u64) } else { 0 };
        let most = bytes.min(LINE_BYTES as u64) - skip;
        let length = if self.rng.random_bool(0.6) { most } else { self.below(most) + 1 };
        target.location += skip;
        let mut datagram = self.bare(command, target, length);
        datagram.header.lease_epoch = match self.below(12) {
            0 => lease.epoch.wrapping_sub(1),
            1 => lease.epoch + 1,
            _ => lease.epoch,
        };
        if command != Command::Commit {
            self.lease_options(&mut datagram);
            return vec![datagram];
        }
        let piece_bytes = self.piece_bytes();
        self.train(&datagram, small(skip), small(length), piece_bytes)
    }

    /// Another request for a leased page.
    fn in_the_way(&mut self) -> Forged {
        let commands = [
            Command::Read,
            Command::Read,
            Command::Update,
            Command::Write,
            Command::FetchAdd,
            Command::Delete,
        ];
        let command = commands.into_iter().choose(self.rng).unwrap_or(Command::Read);
        let (target, bytes) = match self.lease() {
            Some((target, _, bytes)) => (target, bytes),
            None => self.pointer(),
        };
        let length = match command {
            Command::Read | Command::Update => self.below(bytes.min(8 * PAGE_BYTES as u64)) + 1,
            Command::Delete => 0,
            _ => 8,
        };
        let mut datagram = self.bare(command, target, length);
        if matches!(command, Command::Write | Command::FetchAdd) {
            datagram.data = vec![5; 8];
        }
        if self.rng.random_bool(0.5) {
            let flags = [Flags::MAY_BE_STALE, Flags::QUEUED, Flags::ZERO, Flags::PART];
            let flag = flags.into_iter().choose(self.rng).unwrap_or(Flags::QUEUED);
            datagram.header.flags = datagram.header.flags.with(flag);
            if command == Command::Delete && flag == Flags::PART {
                datagram.header.length = 1;
            }
        }
        datagram
    }
}
