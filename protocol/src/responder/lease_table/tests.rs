//! The table against a map: random leases, ends, and time, in a table that is often full.

use std::collections::BTreeMap;

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
    // Pages that collide in a small index, and lie far apart.
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
    owner: Asker,
    epoch: u64,
    expires_at: u64,
    end: Option<LeaseEnd>,
}

struct World {
    table: LeaseTable,
    model: BTreeMap<u64, Known>,
    now: u64,
    incarnations: [u32; 4],
}

impl World {
    fn new() -> Self {
        let limits = Limits {
            lease_count: LIMIT as u16,
            node_lease_count: NODE_LIMIT as u16,
            ..Limits::default()
        };
        let table = LeaseTable::new(&limits, 0x0102_0304);
        Self { table, model: BTreeMap::new(), now: 1, incarnations: [1; 4] }
    }

    fn now(&self) -> Instant {
        Instant::from_nanos(self.now)
    }

    fn asker(&self, node: u16) -> Asker {
        let incarnation = self.incarnations[usize::from(node)];
        Asker { space: Space(1), node: NodeId(node), incarnation }
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
                    self.table.renew(page, Instant::from_nanos(self.now + time));
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
                let asker = self.asker(node);
                self.sweep()?;
                self.table.end_superseded(&asker, |_| {});
                for known in self.model.values_mut() {
                    if known.owner.node == asker.node && known.end.is_none() {
                        known.end = Some(LeaseEnd::Superseded);
                    }
                }
            }
            Step::Sweep => self.sweep()?,
            Step::Grant(node, first, count, time) => {
                self.grant(node, first..first + count, time)?
            }
        }
        Ok(())
    }

    /// All that ran out is found, each once.
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
        let owner = self.asker(node);
        let expires_at = Instant::from_nanos(self.now + time);
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

    /// Compares all that is known; what ended may be forgotten, what runs may not.
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
        let shares: usize = self.table.shares.iter().map(|share| share.count).sum();
        prop_assert_eq!(shares, self.table.running_count());
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
            world.run(step)?;
            world.check()?;
        }
    }
}

#[test]
fn epochs_never_come_twice_and_go_on_behind_the_largest() {
    let mut table = LeaseTable::new(&Limits::default(), 0xffff_ff07);
    assert_eq!(table.draw_epoch(), (7 << 40) + 1);
    assert_eq!(table.draw_epoch(), (7 << 40) + 2);
    table.last_epoch = LEASE_EPOCH_MAX - 1;
    assert_eq!((table.draw_epoch(), table.draw_epoch()), (LEASE_EPOCH_MAX, 1));
}
