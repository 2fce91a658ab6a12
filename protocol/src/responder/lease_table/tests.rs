//! The table against a map: random leases, ends, and time, in a table that is often full.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const LIMIT: usize = 12;
const NODE_LIMIT: usize = 7;

#[derive(Clone, Copy, Debug)]
enum Step {
    Abort(u64),
    Forget(u64, u64),
    Grant(u16, u64, u64, u64),
    Pass(u64),
    Renew(u64, u64),
    Supersede(u16),
    Sweep,
}

fn step() -> impl Strategy<Value = Step> {
    // Pages that collide in a small index, and are far apart.
    let page = || (0_u64..24).prop_map(|page| page * 1031);
    prop_oneof![
        3 => page().prop_map(Step::Abort),
        1 => (page(), 0_u64..9000).prop_map(|(page, count)| Step::Forget(page, count)),
        6 => (1_u16..4, page(), 1_u64..4, 1_u64..50)
            .prop_map(|(node, page, count, time)| Step::Grant(node, page, count, time)),
        3 => (1_u64..20).prop_map(Step::Pass),
        1 => (page(), 1_u64..50).prop_map(|(page, time)| Step::Renew(page, time)),
        1 => (1_u16..4).prop_map(Step::Supersede),
        1 => Just(Step::Sweep),
    ]
}

#[derive(Clone, Copy, Debug)]
struct Known {
    owner: RequesterId,
    epoch: u64,
    expires_at: u64,
    end: Option<LeaseEnd>,
}

struct World {
    table: LeaseTable,
    model: BTreeMap<u64, Known>,
    now: u64,
    incarnations: [u32; 4],
    /// The pages that are leased by the changes so far.
    marked: BTreeSet<u64>,
}

impl World {
    fn new() -> Self {
        let limits = Limits {
            lease_count: LIMIT as u16,
            node_lease_count: NODE_LIMIT as u16,
            ..Limits::default()
        };
        let mut table = LeaseTable::new(&limits, &[Space(1)], 0x0102_0304);
        table.track_changes(Some(LIMIT as u16));
        let (model, marked) = (BTreeMap::new(), BTreeSet::new());
        Self { table, model, now: 1, incarnations: [1; 4], marked }
    }

    /// The changes lead to the pages whose leases run.
    fn take_changes(&mut self) -> Result<(), TestCaseError> {
        while let Some((page, is_leased)) = self.table.take_change() {
            if is_leased {
                self.marked.insert(page);
            } else {
                self.marked.remove(&page);
            }
        }
        prop_assert_eq!(&self.marked, &running(&self.table));
        Ok(())
    }

    fn now(&self) -> Timestamp {
        Timestamp::from_nanos(self.now)
    }

    fn requester(&self, node: u16) -> RequesterId {
        let incarnation = self.incarnations[usize::from(node)];
        RequesterId { space: Space(1), node: NodeId(node), incarnation }
    }

    fn is_leased(&self, page: u64) -> bool {
        self.model
            .get(&page)
            .is_some_and(|known| known.end.is_none() && self.now < known.expires_at)
    }

    fn run(&mut self, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Pass(time) => self.now += time,
            Step::Abort(page) => {
                if self.is_leased(page) {
                    self.table.end(page, LeaseEnd::Aborted);
                    self.model.get_mut(&page).unwrap().end = Some(LeaseEnd::Aborted);
                }
            }
            Step::Renew(page, time) => {
                if self.is_leased(page) {
                    self.table.renew(page, Timestamp::from_nanos(self.now + time));
                    self.model.get_mut(&page).unwrap().expires_at = self.now + time;
                }
            }
            Step::Forget(first, count) => {
                let pages = first..first + count;
                self.table.forget(pages.clone(), |page| assert!(pages.contains(&page)));
                self.model.retain(|page, _| !pages.contains(page));
            }
            Step::Supersede(node) => {
                self.incarnations[usize::from(node)] += 1;
                let requester = self.requester(node);
                let mut ended = BTreeMap::new();
                self.table.end_superseded(self.now(), &requester, |page, how| {
                    ended.insert(page, how);
                });
                for (page, known) in &mut self.model {
                    if known.owner.node == requester.node && known.end.is_none() {
                        let is_over = known.expires_at <= self.now;
                        let how = if is_over { LeaseEnd::Expired } else { LeaseEnd::Superseded };
                        prop_assert_eq!(ended.remove(page), Some(how));
                        known.end = Some(how);
                    }
                }
                prop_assert!(ended.is_empty());
            }
            Step::Sweep => self.sweep()?,
            Step::Grant(node, first, count, time) => {
                self.grant(node, first..first + count, time)?
            }
        }
        Ok(())
    }

    /// All expired leases are found, each once.
    fn sweep(&mut self) -> Result<(), TestCaseError> {
        let mut ended = Vec::new();
        self.table.end_expired(self.now(), |page| ended.push(page));
        for page in ended {
            let known = self.model.get_mut(&page).unwrap();
            prop_assert!(known.end.is_none() && known.expires_at <= self.now);
            known.end = Some(LeaseEnd::Expired);
        }
        let is_left = |known: &Known| known.end.is_none() && known.expires_at <= self.now;
        prop_assert!(!self.model.values().any(is_left), "the sweep left something out");
        Ok(())
    }

    fn grant(&mut self, node: u16, pages: Range<u64>, time: u64) -> Result<(), TestCaseError> {
        let now = self.now();
        let is_free = self.table.holder_in(now, pages.clone()).is_none();
        prop_assert_eq!(is_free, !pages.clone().any(|page| self.is_leased(page)));
        if !is_free {
            return Ok(());
        }
        let owner = self.requester(node);
        let expires_at = Timestamp::from_nanos(self.now + time);
        self.sweep()?;
        let own = self
            .model
            .iter()
            .filter(|&(&page, known)| known.owner.node == owner.node && self.is_leased(page));
        let (own, all) = (own.count(), self.model.keys().filter(|&&page| self.is_leased(page)));
        let (all, count) = (all.count(), pages.clone().count());
        let expected = if own + count > NODE_LIMIT {
            Err(NoRoom::Node)
        } else if all + count > LIMIT {
            Err(NoRoom::Table)
        } else {
            Ok(())
        };
        let granted = self.table.grant(now, owner, pages.clone(), expires_at);
        prop_assert_eq!(granted.map(|_| ()), expected);
        if let Ok(epoch) = granted {
            for page in pages {
                let expires_at = self.now + time;
                self.model.insert(page, Known { owner, epoch, expires_at, end: None });
            }
        }
        Ok(())
    }

    /// Compares all entries; those of ended leases may be missing, those of running leases may not.
    fn check(&self) -> Result<(), TestCaseError> {
        let now = self.now();
        for (&page, known) in &self.model {
            let held = self.table.held(now, page, &known.owner, known.epoch);
            if self.is_leased(page) {
                prop_assert!(held.is_ok());
                let holder = self.table.holder(now, page).unwrap();
                prop_assert_eq!((holder.owner, holder.epoch), (known.owner, known.epoch));
                continue;
            }
            prop_assert!(self.table.holder(now, page).is_none());
            let end = held.expect_err("it is not leased").end;
            let expected = known.end.unwrap_or(LeaseEnd::Expired);
            prop_assert!(end == expected || end == LeaseEnd::Unknown, "{:?} {:?}", end, expected);
        }
        let running = self.model.values().filter(|known| known.end.is_none()).count();
        prop_assert!(self.table.running_count() <= running);
        let count = self.table.running_count();
        prop_assert_eq!(self.table.shares.totals(), (count, count));
        let slots = self.table.vacant.len() + self.table.ended_count + self.table.running_count();
        prop_assert_eq!(slots, LIMIT);
        let found = self.table.index.iter().filter(|&&slot| slot != NONE).count();
        prop_assert_eq!(found + self.table.vacant.len(), LIMIT);
        Ok(())
    }
}

proptest! {
    #[test]
    fn agrees_with_a_map(steps in prop::collection::vec(step(), 200)) {
        let mut world = World::new();
        for step in steps {
            // As the responder does before each request, but after some other calls.
            if matches!(step, Step::Grant(..) | Step::Pass(_)) {
                world.take_changes()?;
            }
            world.run(step)?;
            world.check()?;
        }
        world.take_changes()?;
    }
}

fn running(table: &LeaseTable) -> BTreeSet<u64> {
    let slots = table.index.iter().filter(|&&slot| slot != NONE);
    let leases = slots.map(|&slot| &table.slots[slot as usize].lease);
    leases.filter(|lease| lease.end.is_none()).map(|lease| lease.page).collect()
}

#[test]
fn changes_are_bounded_and_none_is_lost() {
    let limits = Limits { lease_count: 8, ..Limits::default() };
    let mut table = LeaseTable::new(&limits, &[Space(1)], 1);
    let owner = RequesterId { space: Space(1), node: NodeId(1), incarnation: 1 };
    let (now, later) = (Timestamp::default(), Timestamp::from_nanos(100));
    let grant = |table: &mut LeaseTable, pages| table.grant(now, owner, pages, later);
    assert!(grant(&mut table, 0..4).is_ok());
    assert_eq!((table.has_changes(), table.take_change()), (false, None));
    // Those that run already are the first changes.
    table.track_changes(Some(8));
    assert!(table.has_changes());
    let mut marked = BTreeSet::new();
    let mut take = |table: &mut LeaseTable| {
        while let Some((page, is_leased)) = table.take_change() {
            if is_leased {
                marked.insert(page)
            } else {
                marked.remove(&page)
            };
        }
        marked.clone()
    };
    assert_eq!(take(&mut table), (0..4).collect());
    // Whatever begins and ends before the changes are taken, the older leases can end too.
    let mut page = 8;
    while grant(&mut table, page..page + 3).is_ok() {
        table.forget(page..page + 3, |_| {});
        page += 3;
    }
    assert_eq!((page, grant(&mut table, page..page + 3)), (20, Err(NoRoom::Table)));
    table.forget(0..4, |_| {});
    assert_eq!(table.changes.as_ref().unwrap().capacity(), 32, "it did not grow");
    assert_eq!((take(&mut table), running(&table)), (BTreeSet::new(), BTreeSet::new()));
    assert!(grant(&mut table, 0..8).is_ok());
    table.track_changes(None);
    assert!(!table.has_changes());
}

#[test]
fn epochs_never_repeat_and_wrap_after_the_largest() {
    let mut table = LeaseTable::new(&Limits::default(), &[Space(1)], 0xffff_ff07);
    assert_eq!(table.next_epoch(), (7 << 40) + 1);
    assert_eq!(table.next_epoch(), (7 << 40) + 2);
    table.last_epoch = LEASE_EPOCH_MAX - 1;
    assert_eq!((table.next_epoch(), table.next_epoch()), (LEASE_EPOCH_MAX, 1));
}

#[test]
fn a_space_leaves_the_shares_of_the_others_alone() {
    let limits = Limits { lease_count: 49, node_lease_count: 12, ..Limits::default() };
    let spaces = [Space(5), Space(2), Space(9)];
    let mut table = LeaseTable::new(&limits, &spaces, 1);
    let (now, later) = (Timestamp::default(), Timestamp::from_nanos(100));
    let mut page = 0;
    for space in [2, 9, 5] {
        let mut grant = |node, count| {
            let owner = RequesterId { space: Space(space), node: NodeId(node), incarnation: 1 };
            page += count;
            table.grant(now, owner, page - count..page, later)
        };
        assert!(grant(1, 8).is_ok());
        assert_eq!(grant(1, 5), Err(NoRoom::Node));
        assert!(grant(2, 7).is_ok());
        assert_eq!(grant(3, 2), Err(NoRoom::Space));
        assert!(grant(4, 1).is_ok());
    }
    assert_eq!(table.running_count(), 48);
    // An ended lease frees its share of the space.
    table.end_expired(later, |_| {});
    assert_eq!(table.shares.totals(), (0, 0));
}

#[test]
fn a_refused_grant_searches_few_slots() {
    let mut table = LeaseTable::new(&Limits::default(), &[Space(1)], 1);
    let owner = |node| RequesterId { space: Space(1), node: NodeId(node), incarnation: 1 };
    let ends_at = Timestamp::from_nanos(1000);
    for page in 0..3000 {
        table.grant(Timestamp::default(), owner(1), page..page + 1, ends_at).unwrap();
    }
    // Each call finds the expired leases in a few slots.
    let now = Timestamp::from_nanos(900_000);
    let mut ended = Vec::new();
    for calls in 1..=6 {
        table.end_some_expired(now, |page| ended.push(page));
        assert_eq!(ended.len(), (calls * SWEEP_SLOTS).min(3000));
    }
    assert_eq!(table.running_count(), 0);
    // Leases that were granted or renewed in between are not missed.
    for page in 0..2000 {
        table.grant(now, owner(1), page..page + 1, now + Duration::from_nanos(100)).unwrap();
    }
    let then = now + Duration::from_nanos(50);
    table.renew(1999, then);
    table.end_some_expired(then, |_| {});
    table.renew(7, then + Duration::from_nanos(1));
    for _ in 0..4 {
        table.end_some_expired(then, |page| assert_eq!(page, 1999));
    }
    assert_eq!(table.running_count(), 1999);
    let mut last = Vec::new();
    for _ in 0..4 {
        table.end_some_expired(then + Duration::from_nanos(1), |page| last.push(page));
    }
    assert_eq!(last, [7]);
}
