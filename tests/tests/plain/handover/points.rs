//! Who takes part in a migration is killed at each of its steps, named by [`Point`].
//!
//! A point is seen from outside: a message that is about to leave, or what the controller ordered. The process that is
//! killed there goes on as another one with the same memory. A message of its own that shows the point leaves in half of
//! the runs; in the others it was killed just before.
//!
//! `BLUEBRIDGE_KILLS` sets how often each of them is killed at each point.

use std::{collections::BTreeMap, env};

use super::*;
use bluebridge_wire::{Command, Status};

/// A step of a migration.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Point {
    /// The giver obeyed the allowance.
    Allowed,
    /// The taker asks for a line.
    TakeSent,
    /// The giver leased it, and says so.
    TakeGranted,
    /// The taker asks for a page of the line.
    ReadSent,
    /// The giver sends a piece of it.
    PageSent,
    /// The line is staged in the taker's memory, and the taker asks whether it may keep it.
    KeepSent,
    /// The giver has set the mark, and says so.
    Marked,
    /// The taker serves the line.
    Served,
    /// The giver gives nothing more.
    Withdrawn,
    /// Nothing is on its way any more.
    Settled,
    /// The home knows who serves the lines.
    HomeTold,
    /// The giver forgot its marks.
    Forgotten,
    /// The taker released what was reserved.
    Released,
}

impl Point {
    const ALL: [Self; 13] = [
        Self::Allowed,
        Self::TakeSent,
        Self::TakeGranted,
        Self::ReadSent,
        Self::PageSent,
        Self::KeepSent,
        Self::Marked,
        Self::Served,
        Self::Withdrawn,
        Self::Settled,
        Self::HomeTold,
        Self::Forgotten,
        Self::Released,
    ];

    /// Whether each line gets there.
    const fn is_of_line(self) -> bool {
        matches!(
            self,
            Self::TakeSent
                | Self::TakeGranted
                | Self::ReadSent
                | Self::PageSent
                | Self::KeepSent
                | Self::Marked
                | Self::Served
        )
    }
}

/// Who is killed.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Victim {
    /// Any of the clients; its node goes on as the next incarnation.
    Client,
    /// It repeats the order that is due.
    Controller,
    Giver,
    Taker,
}

impl Victim {
    const ALL: [Self; 4] = [Self::Client, Self::Controller, Self::Giver, Self::Taker];
}

/// What is planned, and what happened.
#[derive(Debug, Default)]
pub(super) struct Points {
    /// Who is killed at which point, after it was seen so often.
    plan: Option<(Point, Victim, u32)>,
    /// Who is to be killed now.
    due: Option<Victim>,
    is_killed: bool,
    hits: BTreeMap<Point, u32>,
}

impl World {
    /// A point is reached; returns whether the message that shows it leaves.
    pub(super) fn reach(&mut self, point: Point) -> bool {
        let Points { plan, due, hits, .. } = &mut self.points;
        *hits.entry(point).or_default() += 1;
        let Some((planned, victim, count)) = plan else { return true };
        if *planned != point {
            return true;
        }
        if *count > 0 {
            *count -= 1;
            return true;
        }
        let sender = match point {
            Point::TakeGranted | Point::PageSent | Point::Marked => Some(Victim::Giver),
            Point::TakeSent | Point::ReadSent | Point::KeepSent => Some(Victim::Taker),
            _ => None,
        };
        let is_its_own = Some(*victim) == sender;
        *due = Some(*victim);
        *plan = None;
        !(is_its_own && self.rng.random_bool(0.5))
    }

    /// The same for a message between the servers, if it shows a point.
    pub(super) fn reach_with(
        &mut self,
        source: Ipv6Addr,
        destination: Ipv6Addr,
        bytes: &[u8],
    ) -> bool {
        let datagram = Datagram::parse(source, destination, bytes).expect("it is well formed");
        let is_of_servers =
            [datagram.from, datagram.to].iter().all(|end| NODES.contains(&end.node));
        let is_ok = Status::from_code(datagram.from.tag).is_some_and(Status::is_ok);
        let point = match (datagram.command().command(), datagram.is_reply()) {
            (Some(Command::Take), false) => Point::TakeSent,
            (Some(Command::Take), true) if is_ok => Point::TakeGranted,
            (Some(Command::Read), false) => Point::ReadSent,
            (Some(Command::Read), true) if is_ok => Point::PageSent,
            (Some(Command::Keep), false) => Point::KeepSent,
            (Some(Command::Keep), true) if is_ok => Point::Marked,
            _ => return true,
        };
        !is_of_servers || self.reach(point)
    }

    /// Kills who is to be killed now.
    pub(super) fn kill_due(&mut self) {
        let Some(victim) = self.points.due.take() else { return };
        self.points.is_killed = true;
        match victim {
            Victim::Client => self.restart_client(),
            Victim::Controller => self.repeat_order(),
            Victim::Giver => self.restart(self.record.giver),
            Victim::Taker => self.restart(self.record.taker),
        }
        // What the home knew of its lines is told to its next process.
        if let Some(rows) = self.told.clone() {
            let Host { responder, arena, .. } = &mut self.hosts[HOME];
            responder.learn(self.now, &rows, &[], arena);
        }
    }

    /// What the process asked may still arrive; nothing of it is executed after a change of the next one.
    fn restart_client(&mut self) {
        let client = self.rng.random_range(0..self.clients.len());
        let Client { requester, job, memory, incarnation, .. } = &mut self.clients[client];
        *incarnation += 1;
        let node = NodeId(CLIENT + u16::try_from(client).expect("small"));
        let seed = self.seed * 100 + u64::from(*incarnation) * 10_000 + client as u64;
        *requester = Requester::new(requester::Config::new(SPACE, node, *incarnation, seed));
        (*job, *memory) = (None, Memory::default());
    }

    /// A controller that starts again gives the orders that are due.
    fn repeat_order(&mut self) {
        let Record { migration, giver, is_withdrawn, .. } = self.record;
        let allowances = self.allowances();
        let Host { responder, arena, .. } = &mut self.hosts[giver];
        if responder.given(migration.id).is_none() {
            // It was closed.
            return;
        }
        if is_withdrawn {
            responder.withdraw(self.now, migration.id, arena).expect("it is known");
            return;
        }
        for allowance in allowances {
            responder.allow(&allowance, arena).expect("it changes nothing");
        }
    }

    /// Moves what is ordered to the end, with all steps of the controller.
    fn move_all(&mut self) -> BTreeSet<usize> {
        self.allow_at_giver();
        self.reach(Point::Allowed);
        // The taker gets its order only now.
        if self.points.due == Some(Victim::Taker) {
            self.order();
            self.kill_due();
        } else {
            self.kill_due();
            self.order();
        }
        self.run(0.0, |_, _| {});
        self.withdraw();
        self.reach(Point::Withdrawn);
        self.kill_due();
        // A taker that begins anew asks for what is in doubt.
        self.run(0.0, |_, _| {});
        self.reach(Point::Settled);
        self.kill_due();
        self.run(0.0, |_, _| {});
        let Record { migration, giver, taker, .. } = self.record;
        let of_taker = self.hosts[taker].taker.as_ref().expect("it takes");
        let line = |page: u64| page as usize / LINE_PAGES;
        let here: BTreeSet<_> =
            of_taker.rows().flat_map(|row| line(row.pages.start)..line(row.pages.end)).collect();
        let marked = self.hosts[giver].responder.given(migration.id).expect("it is known");
        let marked = marked.map(|row| (row.end - row.start) as usize / LINE_PAGES).sum::<usize>();
        assert_eq!(here.len(), marked, "seed {}: each line has one server", self.seed);
        self.tell_home();
        self.reach(Point::HomeTold);
        self.kill_due();
        self.forget();
        self.reach(Point::Forgotten);
        self.kill_due();
        if let Some(taker) = self.hosts[taker].taker.take() {
            taker.finish(&mut self.hosts[self.record.taker].arena);
        }
        self.reach(Point::Released);
        self.kill_due();
        // A taker that begins anew after that has nothing to do.
        self.hosts[taker].taker = None;
        here
    }

    /// The home learns which lines are elsewhere.
    fn tell_home(&mut self) {
        let adopted = self.hosts[OTHER].responder.adopted();
        let row = |range: &responder::Adopted| {
            (range.first_page..range.first_page + range.page_count, NODES[OTHER])
        };
        let rows: Vec<_> = adopted.iter().map(row).collect();
        let given = (self.record.giver == OTHER).then(|| self.record.pages.clone());
        let rows: Vec<_> = rows
            .into_iter()
            .filter(|(row, _)| given.as_ref().is_none_or(|it| !it.contains(&row.start)))
            .collect();
        let Host { responder, arena, .. } = &mut self.hosts[HOME];
        responder.learn(self.now, &rows, &[], arena);
        self.told = Some(rows);
    }

    /// The giver forgets its marks, when its responses have left.
    fn forget(&mut self) {
        let Record { migration, giver, .. } = self.record;
        self.drain(giver);
        let Host { responder, arena, .. } = &mut self.hosts[giver];
        assert_eq!(responder.close_migration(migration.id, arena), Ok(()));
    }
}

/// A run in which one process is killed at one point, on the way there or back.
fn run_with(seed: u64, point: Point, victim: Victim) -> BTreeMap<Point, u32> {
    let mut world = World::new(seed);
    let is_way_back = world.rng.random_bool(0.5);
    let plan = |world: &mut World, lines: usize| {
        let count = if point.is_of_line() { world.rng.random_range(0..lines as u32) } else { 0 };
        world.points.plan = Some((point, victim, count));
    };
    if !is_way_back {
        plan(&mut world, LINES);
    }
    assert_eq!(world.move_all().len(), LINES);
    world.check();
    let mut returned = 0;
    // What is not together in the store of its server is in migrations of its own.
    for range in world.hosts[OTHER].responder.adopted().to_vec() {
        let first = range.first_page as usize / LINE_PAGES;
        let end = first + range.page_count as usize / LINE_PAGES;
        world.send_back(&(first..end).collect());
        if is_way_back && returned == 0 {
            plan(&mut world, end - first);
        }
        returned += world.move_all().len();
    }
    assert_eq!(returned, LINES);
    world.check();
    assert_eq!(world.hosts[OTHER].arena.arena_usage().used_pages, 0, "nothing is left there");
    assert!(world.points.is_killed, "{victim:?} was not killed at {point:?}");
    world.points.hits
}

#[test]
fn a_process_that_is_killed_at_any_step_loses_no_line() {
    let kills: u64 = env::var("BLUEBRIDGE_KILLS").map_or(4, |text| text.parse().expect("a number"));
    let mut hits: BTreeMap<Point, u32> = BTreeMap::new();
    let mut killed: BTreeMap<(Point, Victim), u64> = BTreeMap::new();
    let mut seed = 1 << 32;
    for point in Point::ALL {
        for victim in Victim::ALL {
            for _ in 0..kills {
                seed += 1;
                println!("seed {seed}: {victim:?} is killed at {point:?}");
                for (point, count) in run_with(seed, point, victim) {
                    *hits.entry(point).or_default() += count;
                }
                *killed.entry((point, victim)).or_default() += 1;
            }
        }
    }
    for point in Point::ALL {
        println!("| {point:?} | {} |", hits[&point]);
        for victim in Victim::ALL {
            assert_eq!(killed[&(point, victim)], kills);
        }
    }
}
