//! Chooses the next operation of a client.

use bluebridge_protocol::requester::{Operation, Server};
use bluebridge_wire::{Location, NodeId, Pointer, Status, Tag, address::PAGE_BYTES};
use rand::{Rng, rngs::SmallRng, seq::IteratorRandom};

use super::{
    ledger::Ledger,
    region::{ADD_CELLS, Contents, Purpose, Region, SWAP_CELLS, State, stamp},
    task::Task,
};

const GONE: &[Status] = &[Status::StaleTag, Status::NotAllocated];

/// Draws tasks; every written value is new.
pub(super) struct Workload {
    next_value: u64,
}

impl Workload {
    pub(super) const fn new() -> Self {
        Self { next_value: 0 }
    }

    /// A task for a client.
    pub(super) fn choose(&mut self, ledger: &Ledger, client: usize, rng: &mut SmallRng) -> Task {
        for _ in 0..8 {
            let task = match rng.random_range(0..100) {
                0..4 => Some(create(ledger, rng)),
                4..7 => delete(ledger, client, rng),
                7..28 => private(ledger, client, rng),
                28..58 => self.shared(ledger, rng),
                58..74 => self.cells(ledger, rng),
                74..77 => Some(small(ledger, rng)),
                77..87 => gone(ledger, rng),
                _ => wrong(ledger, rng),
            };
            if let Some(task) = task {
                return task;
            }
        }
        small(ledger, rng)
    }

    fn value(&mut self) -> u64 {
        self.next_value += 1;
        self.next_value
    }

    fn shared(&mut self, ledger: &Ledger, rng: &mut SmallRng) -> Option<Task> {
        let Some(index) = pick(ledger, rng, |r| r.purpose() == Purpose::Shared && r.is_usable())
        else {
            return Some(make(ledger, rng, Purpose::Shared, 14));
        };
        let region = &ledger.regions[index];
        if rng.random_bool(0.5) {
            let (offset, length) = range(region, rng);
            return Some(Task::SharedRead { region: index, offset, length });
        }
        let first_page = rng.random_range(0..region.pages as usize);
        let in_line =
            8 - usize::try_from((region.page_range().start + first_page as u64) % 8).ok()?;
        let most = in_line.min(region.pages as usize - first_page);
        let pages = if rng.random_bool(0.5) { 1 } else { rng.random_range(1..=most) };
        Some(Task::SharedWrite { region: index, first_page, pages, value: self.value() << 8 })
    }

    fn cells(&mut self, ledger: &Ledger, rng: &mut SmallRng) -> Option<Task> {
        let Some(index) = pick(ledger, rng, |r| r.purpose() == Purpose::Cells && r.is_usable())
        else {
            return Some(make(ledger, rng, Purpose::Cells, 1));
        };
        let Contents::Cells { seen, .. } = &ledger.regions[index].contents else { return None };
        if rng.random_bool(0.6) {
            let addend = rng.random_range(1..1 << 40);
            return Some(Task::Add { region: index, cell: rng.random_range(0..ADD_CELLS), addend });
        }
        let cell = rng.random_range(0..SWAP_CELLS);
        Some(Task::Swap { region: index, cell, expected: seen[cell], new: self.value() })
    }
}

/// The bytes that a task sends.
pub(super) fn outgoing(task: &Task, rng: &mut SmallRng) -> Vec<u8> {
    let random = |length: usize, rng: &mut SmallRng| {
        let mut bytes = vec![0; length];
        rng.fill(&mut bytes[..]);
        bytes
    };
    match task {
        Task::Create { bytes, .. } => random(*bytes, rng),
        Task::Write { length, .. } | Task::Ping { length, .. } => random(*length, rng),
        // The model treats zeroed bytes as written ones.
        Task::Zero { length, .. } => vec![0; *length],
        Task::SharedWrite { first_page, pages, value, .. } => {
            (0..*pages).flat_map(|page| stamp(value | (first_page + page) as u64)).collect()
        }
        Task::Wrong { operation: Operation::Write { length, .. }, .. } => {
            random(*length as usize, rng)
        }
        _ => Vec::new(),
    }
}

/// The buffer for the bytes of a READ.
pub(super) fn incoming(task: &Task) -> Vec<u8> {
    match task {
        Task::Read { length, .. } | Task::SharedRead { length, .. } => vec![0xee; *length],
        Task::CellRead { .. } => vec![0xee; 8],
        Task::Wrong { operation: Operation::Read { length, .. }, .. } => {
            vec![0xee; *length as usize]
        }
        _ => Vec::new(),
    }
}

/// Reads everything once more at the end of the run.
pub(super) fn final_tasks(ledger: &Ledger) -> Vec<(usize, Task)> {
    let mut tasks = Vec::new();
    for (index, region) in ledger.regions.iter().enumerate() {
        if region.state != State::Live || region.lost_at.is_some() {
            continue;
        }
        match &region.contents {
            Contents::Cells { .. } => {
                let cells = 0..ADD_CELLS + SWAP_CELLS;
                tasks.extend(
                    cells.map(|cell| (region.owner, Task::CellRead { region: index, cell })),
                );
            }
            Contents::Private(_) | Contents::Shared(_) => {
                let mut offset = 0;
                while offset < region.bytes() {
                    let in_arena = region.pointer.location.offset() + offset;
                    let in_line = Ledger::LINE - in_arena % Ledger::LINE;
                    let length = in_line.min(region.bytes() - offset);
                    let bytes = usize::try_from(length).expect("within a line");
                    let task = if region.purpose() == Purpose::Private {
                        Task::Read { region: index, offset, length: bytes }
                    } else {
                        Task::SharedRead { region: index, offset, length: bytes }
                    };
                    tasks.push((region.owner, task));
                    offset += length;
                }
            }
        }
    }
    tasks
}

fn pick(ledger: &Ledger, rng: &mut SmallRng, fits: impl Fn(&Region) -> bool) -> Option<usize> {
    let regions = ledger.regions.iter().enumerate();
    regions.filter(|(_, region)| fits(region)).map(|(index, _)| index).choose(rng)
}

fn make(ledger: &Ledger, rng: &mut SmallRng, purpose: Purpose, pages: u32) -> Task {
    let server = rng.random_bool(0.7).then(|| rng.random_range(0..ledger.servers.len()));
    Task::Create { purpose, server, pages, bytes: 0 }
}

fn create(ledger: &Ledger, rng: &mut SmallRng) -> Task {
    if rng.random_bool(0.5) {
        let pages = rng.random_range(1..=12);
        return make(ledger, rng, Purpose::Private, pages);
    }
    let bytes = if rng.random_bool(0.5) {
        rng.random_range(1..=PAGE_BYTES)
    } else {
        rng.random_range(1..=8 * PAGE_BYTES)
    };
    let pages = u32::try_from(bytes.div_ceil(PAGE_BYTES)).expect("at most 8");
    match make(ledger, rng, Purpose::Private, pages) {
        Task::Create { purpose, server, pages, .. } => {
            Task::Create { purpose, server, pages, bytes }
        }
        other => other,
    }
}

fn delete(ledger: &Ledger, client: usize, rng: &mut SmallRng) -> Option<Task> {
    let shared_too = rng.random_bool(0.15);
    let region = pick(ledger, rng, |region| {
        let mine = region.owner == client && (shared_too || region.purpose() == Purpose::Private);
        let here = region.lost_at.is_none() && !region.was_moved;
        mine && here && !region.busy && region.state != State::Deleted
    })?;
    let pages = if rng.random_bool(0.5) { 0 } else { ledger.regions[region].pages };
    Some(Task::Delete { region, pages })
}

fn private(ledger: &Ledger, client: usize, rng: &mut SmallRng) -> Option<Task> {
    let index = pick(ledger, rng, |region| {
        let mine = region.owner == client && region.purpose() == Purpose::Private;
        mine && !region.busy && region.is_usable()
    })?;
    let (offset, length) = range(&ledger.regions[index], rng);
    Some(match rng.random_range(0..5) {
        0 | 1 => Task::Read { region: index, offset, length },
        2 | 3 => Task::Write { region: index, offset, length },
        _ => Task::Zero { region: index, offset, length },
    })
}

/// A byte range of a region inside of one line: short, about a page, or long.
fn range(region: &Region, rng: &mut SmallRng) -> (u64, usize) {
    let offset = rng.random_range(0..region.bytes());
    let offset = if rng.random_bool(0.3) { offset & !0xfff } else { offset };
    let in_arena = region.pointer.location.offset() + offset;
    let most = (Ledger::LINE - in_arena % Ledger::LINE).min(region.bytes() - offset);
    let wanted = match rng.random_range(0..4) {
        0 => rng.random_range(1..=64),
        1 => PAGE_BYTES as u64,
        _ => rng.random_range(1..=Ledger::LINE),
    };
    (offset, usize::try_from(wanted.min(most)).expect("within a line"))
}

fn small(ledger: &Ledger, rng: &mut SmallRng) -> Task {
    let server = rng.random_range(0..ledger.servers.len());
    match rng.random_range(0..20) {
        0..10 => Task::Ping { server, length: rng.random_range(0..=64) },
        10..18 => Task::Stat { server },
        _ => Task::Close { server },
    }
}

/// An operation on pages that were deleted, or lost with their server's memory.
fn gone(ledger: &Ledger, rng: &mut SmallRng) -> Option<Task> {
    let index =
        pick(ledger, rng, |region| region.deleted_at.is_some() || region.lost_at.is_some())?;
    let region = &ledger.regions[index];
    let (refusals, name): (&[Status], _) = if region.lost_at.is_some() {
        (&[Status::StaleGeneration], "use after loss")
    } else {
        (GONE, "use after delete")
    };
    let (offset, length) = range(region, rng);
    let length = u32::try_from(length).ok()?;
    let pointer = region.at(offset);
    let operation = match rng.random_range(0..5) {
        0 => Operation::Read { pointer, length },
        1 => Operation::Write { pointer, length },
        2 => Operation::Zero { pointer, length },
        3 => Operation::FetchAdd { pointer: region.pointer, addend: 1 },
        _ => Operation::Delete { pointer: region.pointer, pages: 0 },
    };
    Some(Task::Wrong { operation, server: region.server, refusals, name })
}

/// An operation that every server must refuse.
fn wrong(ledger: &Ledger, rng: &mut SmallRng) -> Option<Task> {
    let server = rng.random_range(0..ledger.servers.len());
    let facts = &ledger.servers[server];
    let pointer = |offset: u64| Pointer {
        space: super::SPACE,
        node: facts.node,
        tag: Tag(0),
        location: Location::new(facts.generation, offset).expect("48 bits"),
    };
    let wrong = |operation, refusals, name| Some(Task::Wrong { operation, server, refusals, name });
    let live = pick(ledger, rng, |region| {
        region.is_usable() && region.server == server && !region.was_moved
    });
    let page = PAGE_BYTES as u64;
    let end = facts.address_pages() * page;
    match (rng.random_range(0..24), live) {
        (0, _) => {
            let node = Server { node: facts.node, shard: 0 };
            let operation = Operation::Create { server: Some(node), pages: 1 << 20 };
            wrong(operation, &[Status::OutOfMemory, Status::QuotaExceeded], "create too much")
        }
        (1, _) => {
            let pointer =
                pointer(end.next_multiple_of(Ledger::LINE) + rng.random_range(0..9) * page);
            wrong(Operation::Read { pointer, length: 64 }, &[Status::OutOfRange], "out of range")
        }
        (2, _) => {
            let pointer = pointer(rng.random_range(0..facts.arena_pages) * page);
            wrong(Operation::Write { pointer, length: 8 }, GONE, "colour 0")
        }
        (3, _) => {
            let node = NodeId(0x0777);
            let operation = Operation::Read { pointer: Pointer { node, ..pointer(0) }, length: 8 };
            wrong(operation, &[], "no such node")
        }
        (4, Some(live)) => {
            let pointer = ledger.regions[live].at(rng.random_range(1..8));
            wrong(Operation::FetchAdd { pointer, addend: 1 }, &[Status::Unaligned], "unaligned add")
        }
        (5, Some(live)) => {
            let pointer = ledger.regions[live].at(8);
            wrong(Operation::Delete { pointer, pages: 0 }, &[Status::Unaligned], "delete inside")
        }
        (6, Some(live)) => {
            let region = &ledger.regions[live];
            // A region that is being deleted may not exist when this arrives.
            if region.deleting_from.is_some() {
                return None;
            }
            let operation =
                Operation::Delete { pointer: region.pointer, pages: region.pages + 100 };
            wrong(
                operation,
                &[Status::BadLength, Status::NotAllocated, Status::StaleTag, Status::Unaligned],
                "delete of another length",
            )
        }
        _ => None,
    }
}
