//! A client: one operation at a time on pages that count, and an owner's endpoint beside it.

use core::time::Duration;
use std::collections::HashMap;

use bluebridge_protocol::{
    Instant,
    owner::{Committed, Owner, OwnerConfig, Policy},
    requester::{Answer, Buffers, Config, Failure, Lease, Operation, Requester},
};
use bluebridge_wire::{NodeId, Pointer, Space, address::PAGE_BYTES};

use crate::world::Plan;

pub(crate) const SPACE: Space = Space(7);
const BASE: u64 = 10_000_000_000;
const ADDED: usize = PAGE_BYTES - 8;

#[derive(Default)]
pub(crate) struct Memory(HashMap<u64, Vec<u8>>);

impl Buffers for Memory {
    fn outgoing(&self, token: u64) -> &[u8] {
        self.0.get(&token).map_or(&[], Vec::as_slice)
    }

    fn incoming(&mut self, token: u64) -> &mut [u8] {
        self.0.entry(token).or_default()
    }
}

/// What a page counts: the commits, told by all of it, and what was added to its last word.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Counted {
    pub(crate) commits: u64,
    pub(crate) added: u64,
}

impl Counted {
    /// Of a page that nobody tore.
    fn read(page: &[u8]) -> Self {
        let word = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().expect("8 bytes"));
        let counted = Self { commits: word(0), added: word(ADDED) };
        assert_eq!(page, counted.page(), "torn");
        counted
    }

    fn page(self) -> Vec<u8> {
        let fill = (self.commits % 251) as u8;
        let mut page = vec![fill; PAGE_BYTES];
        page[..8].copy_from_slice(&self.commits.to_le_bytes());
        page[ADDED..].copy_from_slice(&self.added.to_le_bytes());
        page
    }
}

/// What happened that the others are to know.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Done {
    Nothing,
    Granted(Counted),
    Committed,
    Added,
    /// A commit, or an addition, of which nobody can tell.
    Maybe,
    Read(Counted),
    ReadStale(Counted),
}

/// A page that this client believes it has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Holding {
    pub(crate) page: usize,
    pub(crate) lease: Lease,
    counted: Counted,
}

pub(crate) struct Client {
    pub(crate) node: NodeId,
    pub(crate) requester: Requester,
    pub(crate) owner: Owner,
    pub(crate) memory: Memory,
    /// Parts per million that the clock gains.
    rate: i64,
    lease_ms: u16,
    policy: Policy,
    serves_released: bool,
    pub(crate) holding: Option<Holding>,
    /// The page and what is under way on it.
    pub(crate) page: usize,
    operation: Option<Operation>,
}

impl Client {
    pub(crate) fn new(number: usize, seed: u64, plan: &Plan) -> Self {
        let Plan { lease_ms, policy, idle_ms, serves_released, .. } = *plan;
        let node = NodeId(100 + number as u16);
        let mut config = Config::new(SPACE, node, 1, seed ^ number as u64);
        config.operation_count = 4;
        config.timing.session_idle = Duration::from_millis(idle_ms);
        let mut owner = OwnerConfig::new(SPACE, node, 1);
        (owner.policy, owner.wait_count) = (policy, 2);
        owner.wait = Duration::from_millis(3);
        Self {
            node,
            requester: Requester::new(config),
            owner: Owner::new(owner),
            memory: Memory::default(),
            // Up to 0.7 %: two clocks differ by less than one part in 64.
            rate: (seed.rotate_left(number as u32 * 7) % 14_000) as i64 - 7000,
            lease_ms,
            policy,
            serves_released,
            holding: None,
            page: 0,
            operation: None,
        }
    }

    /// The client's clock at a true time in nanoseconds.
    pub(crate) fn clock(&self, time: u64) -> Instant {
        let gained = i128::from(time) * i128::from(self.rate) / 1_000_000;
        Instant::from_nanos(BASE + (i128::from(time) + gained) as u64)
    }

    /// The first true time at which the clock shows a moment.
    pub(crate) fn time(&self, moment: Instant) -> u64 {
        let shown = i128::from(moment.as_nanos().saturating_sub(BASE));
        let mut time = (shown * 1_000_000 / i128::from(1_000_000 + self.rate)) as u64;
        while self.clock(time) < moment {
            time += 1;
        }
        time
    }

    /// What it does next; `dice` chooses.
    pub(crate) fn begin(&mut self, now: Instant, page: usize, pointer: Pointer, dice: u64) {
        let length = PAGE_BYTES as u32;
        let (mut given, wait) = (vec![0; PAGE_BYTES], dice & 0x100 == 0);
        let operation = match (self.holding, dice % 16) {
            (Some(held), 0..=2) => {
                let (epoch, lease_ms) = (held.lease.epoch, self.lease_ms);
                Operation::Renew { pointer, length, epoch, lease_ms }
            }
            (Some(held), choice) => {
                // Before the end of the lease is known at home, nobody is to be told.
                if !self.serves_released {
                    self.owner.release(pointer, held.lease.epoch);
                }
                self.holding = None;
                let epoch = held.lease.epoch;
                let Counted { commits, added } = held.counted;
                given = Counted { commits: commits + 1, added }.page();
                if choice == 3 {
                    Operation::Abort { pointer, length, epoch }
                } else {
                    Operation::Commit { pointer, length, epoch }
                }
            }
            (None, 0..=2) => Operation::Read { pointer, length },
            (None, 3..=4) => Operation::ReadStale { pointer, length },
            (None, 5) => {
                let pointer = pointer.checked_add(ADDED as u64).expect("in the page");
                Operation::FetchAdd { pointer, addend: 1 }
            }
            (None, _) => Operation::Update { pointer, length, lease_ms: self.lease_ms, wait },
        };
        self.memory.0.insert(0, given);
        self.page = page;
        self.operation = Some(operation);
        self.requester.start(now, operation, 0).expect("there is room for one");
    }

    /// The end of what was begun, if it ended.
    pub(crate) fn end(&mut self, now: Instant, page: Pointer) -> Option<Done> {
        let completion = self.requester.poll_completion()?;
        let operation = self.operation.take().expect("one is under way");
        let counted = || Counted::read(&self.memory.0[&0]);
        Some(match (operation, completion.result) {
            (Operation::Update { .. }, Ok(Answer::Leased(lease))) => {
                let counted = counted();
                let bytes = &self.memory.0[&0];
                let committed = Some(Committed { start: 0, bytes });
                let (policy, end) = (Some(self.policy), lease.expires_at);
                let told = self.owner.hold(now, page, lease.epoch, end, policy, committed);
                told.expect("there is room");
                self.holding = Some(Holding { page: self.page, lease, counted });
                Done::Granted(counted)
            }
            (Operation::Renew { .. }, Ok(Answer::Leased(lease))) => {
                if let Some(held) = &mut self.holding {
                    held.lease = lease;
                    let told =
                        self.owner.hold(now, page, lease.epoch, lease.expires_at, None, None);
                    told.expect("it is held");
                }
                Done::Nothing
            }
            (Operation::Renew { .. }, Err(Failure::LeaseLost { .. })) => {
                if let Some(held) = self.holding.take() {
                    self.owner.release(page, held.lease.epoch);
                }
                Done::Nothing
            }
            (Operation::Commit { .. }, Ok(Answer::Done)) => Done::Committed,
            (
                Operation::Commit { .. } | Operation::FetchAdd { .. },
                Err(Failure::OutcomeUnknown { .. }),
            ) => Done::Maybe,
            (Operation::FetchAdd { .. }, Ok(Answer::Previous(_))) => Done::Added,
            (Operation::Read { .. }, Ok(Answer::Done)) => Done::Read(counted()),
            (Operation::ReadStale { .. }, Ok(Answer::Read { .. })) => Done::ReadStale(counted()),
            (Operation::Abort { .. }, Ok(Answer::Done))
            | (
                Operation::Abort { .. } | Operation::Commit { .. },
                Err(Failure::LeaseLost { .. }),
            )
            | (
                Operation::FetchAdd { .. } | Operation::Read { .. } | Operation::Update { .. },
                Err(Failure::Busy { .. }),
            ) => Done::Nothing,
            (operation, result) => panic!("{operation:?} ended in {result:?}"),
        })
    }
}
