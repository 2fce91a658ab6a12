//! Directed attacks, which random attacks make too seldom or never: each causes a specific event,
//! with any seed.

use core::time::Duration;

use bluebridge_wire::{Command, Location, Status, address::Fields};

use super::{Attacker, INCARNATION_REST, LEASE_WAIT, Seen, Shot, World, limits};
use crate::hostile::{
    attack::{Class, Route},
    draw::Draw,
    forge::Forged,
};

mod leases;

/// Nonces that random requests never use.
const NONCE: u64 = 1 << 40;

impl World {
    /// Runs all of them, at the first server.
    ///
    /// # Panics
    /// If a reply is not the expected one.
    pub(super) fn lead(&mut self) {
        let [first, second, third] = self.attackers.clone().try_into().expect("three attackers");
        self.press_the_buffers(&first, &third);
        self.take_more_than_a_share(&first, &second);
        self.claim_the_last_incarnation(&third);
        self.contend_for_leases(&first, &second);
    }

    /// More concurrent trains than a node has buffers, and together with another node more than the
    /// server has.
    fn press_the_buffers(&mut self, attacker: &Attacker, other: &Attacker) {
        let buffers = [limits(1).node_buffer_pages, limits(1).buffer_pages];
        let left = buffers[1] - buffers[0];
        for (attacker, trains) in [(attacker, buffers[0] + 1), (other, left + 1)] {
            self.begin_trains(attacker, trains);
        }
    }

    /// Begins this many trains, each with a piece of the same page.
    fn begin_trains(&mut self, attacker: &Attacker, count: u16) {
        let session = self.open_led(attacker, NONCE).expect("there is room").header.session;
        let create = self.draw_led(attacker, session, |draw| {
            let mut create = draw.bare(Command::Create, draw.endpoint(), 1);
            number(&mut create, 1, 0);
            create
        });
        let replies = self.shoot(&shot(None, &create));
        let target = Fields::unpack(replies[0].header.target).expect("a pointer");
        for ahead in 0..count {
            let piece = self.draw_led(attacker, session, |draw| {
                let mut piece = draw.bare(Command::Write, target, 4096);
                number(&mut piece, 2, ahead);
                piece.data = vec![7; 1024];
                piece
            });
            self.shoot(&shot(Some(Class::Contradictory), &piece));
        }
    }

    /// More anywhere-CREATEs than a node may have waiting; and a CONFIRM by another node.
    fn take_more_than_a_share(&mut self, attacker: &Attacker, other: &Attacker) {
        let mut given = None;
        for count in 0..=limits(1).node_provisional_count {
            let create = self.draw_led(attacker, 0, |draw| {
                let mut create = draw.anywhere(Command::Create);
                (create.header.sequence, create.header.length) = (NONCE + u64::from(count), 1);
                create
            });
            let replies = self.shoot(&shot(None, &create));
            given = given.or(Fields::unpack(replies[0].header.target));
            let is_beyond = count == limits(1).node_provisional_count;
            let expected = if is_beyond { Status::Overloaded } else { Status::Ok };
            assert_eq!(replies[0].status, expected, "the share of one node");
        }
        let target = given.filter(|target| Location::from_bits(target.location).is_some());
        let target = target.expect("a pointer");
        let session = self.open_led(other, NONCE).expect("there is room").header.session;
        let confirm = self.draw_led(other, session, |draw| {
            let mut confirm = draw.bare(Command::Confirm, target, 1);
            number(&mut confirm, 1, 0);
            confirm
        });
        let replies = self.shoot(&shot(Some(Class::Sealed), &confirm));
        assert_eq!(replies[0].status, Status::Forbidden, "only the creator may confirm");
    }

    /// The highest possible incarnation: it must not block the node permanently.
    fn claim_the_last_incarnation(&mut self, attacker: &Attacker) {
        let claim = Attacker { incarnation: u32::MAX, ..attacker.clone() };
        self.open_led(&claim, NONCE).expect("no higher incarnation is known");
        assert_eq!(self.open_led(attacker, NONCE + 1).unwrap_err(), Status::StaleIncarnation);
        // The time at which a node was last seen has a precision of about a second.
        self.now = self.now + INCARNATION_REST + Duration::from_secs(3);
        self.pass_time(0, 0);
        self.open_led(attacker, NONCE + 2).expect("the incarnation was forgotten");
    }

    fn open_led(&mut self, attacker: &Attacker, nonce: u64) -> Result<Seen, Status> {
        let open = self.draw_led(attacker, 0, |draw| {
            let mut open = draw.open();
            (open.header.sequence, open.header.length) = (nonce, 1024);
            open
        });
        let reply = self.shoot(&shot(None, &open)).remove(0);
        if reply.status.is_ok() { Ok(reply) } else { Err(reply.status) }
    }

    fn draw_led(
        &mut self,
        attacker: &Attacker,
        session: u64,
        draw: impl FnOnce(&mut Draw<'_>) -> Forged,
    ) -> Forged {
        draw(&mut Draw { rng: &mut self.rng, attacker, server: &self.servers[0], session })
    }
}

/// Behind the switch, which would choose a server for some of them.
fn shot(class: Option<Class>, datagram: &Forged) -> Shot {
    Shot { class, route: Route::Direct(0), frame: datagram.frame() }
}

/// Numbers a datagram: `ahead` above low water.
fn number(datagram: &mut Forged, low_water: u64, ahead: u16) {
    datagram.header.sequence = low_water + u64::from(ahead);
    datagram.header.answered_distance = ahead;
}
