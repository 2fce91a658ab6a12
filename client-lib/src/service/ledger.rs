//! The leases that a client's thread holds, for the service thread to read.
//!
//! Each slot holds the newest state of one lease, so a client that updates a hundred thousand
//! times a second needs neither a queue nor a wake-up. A slot has one writer at a time, and readers
//! check its version: it is odd while the slot is written, and different for every lease.

use core::ops::Range;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use std::net::Ipv6Addr;
use std::sync::{Mutex, PoisonError};

use bluebridge_protocol::Timestamp;
use bluebridge_wire::{Pointer, address::PAGE_BYTES};

use super::OwnerPolicy;

/// What the service needs to know about a lease.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Entry {
    /// The first byte.
    pub(crate) pointer: Pointer,
    /// Bytes, inside of one line.
    pub(crate) length: u32,
    pub(crate) epoch: u64,
    /// Expiry by the endpoint's clock.
    pub(crate) expires_at: Timestamp,
    /// The duration that the home granted, in milliseconds.
    pub(crate) granted_ms: u16,
    /// No RENEW is sent after this moment.
    pub(crate) renew_until: Timestamp,
    pub(crate) policy: OwnerPolicy,
    /// Its COMMIT is in progress.
    pub(crate) is_ending: bool,
    /// The guard was dropped and its ABORT got no response.
    pub(crate) is_abandoned: bool,
}

impl Entry {
    /// The pages that the lease is on, each with its part of the range.
    pub(crate) fn pages(&self) -> impl Iterator<Item = (Pointer, Range<usize>)> + use<> {
        let Self { pointer, length, .. } = *self;
        let (in_page, length) = (pointer.location.in_page(), length as usize);
        let count = (in_page + length).div_ceil(PAGE_BYTES);
        (0..count).filter_map(move |page| {
            let at = page * PAGE_BYTES;
            let start = pointer.page_start().checked_add(at as u64).ok()?;
            Some((start, at.saturating_sub(in_page)..(at + PAGE_BYTES - in_page).min(length)))
        })
    }

    /// When half of the lease is over.
    pub(crate) fn renew_at(&self) -> Timestamp {
        let half = u64::from(self.granted_ms) * (1_000_000 / 2);
        Timestamp::from_nanos(self.expires_at.as_nanos().saturating_sub(half))
    }
}

/// A lease in a ledger.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct SlotId {
    index: u16,
    version: u32,
}

const FREE: u8 = 0;
const HELD: u8 = 1;
const ABANDONED: u8 = 2;
/// The service has finished with an abandoned lease; its client can use the slot again.
const RETURNED: u8 = 3;
const ENDING: u8 = 4;

/// One lease. It takes two whole cache lines, so that neighbours do not share one.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Slot {
    version: AtomicU32,
    state: AtomicU8,
    policy: AtomicU8,
    /// The length in the upper half, the granted milliseconds in the lower half.
    extent: AtomicU64,
    high: AtomicU64,
    low: AtomicU64,
    epoch: AtomicU64,
    expires_at: AtomicU64,
    renew_until: AtomicU64,
    /// Written by the service alone: until when it renewed the lease, and of which version.
    renewed_version: AtomicU32,
    renewed_until: AtomicU64,
}

const _: () = assert!(size_of::<Slot>() == 128);

const fn code_of(policy: OwnerPolicy) -> u8 {
    match policy {
        OwnerPolicy::Reject => 0,
        OwnerPolicy::Serve => 1,
        OwnerPolicy::Wait => 2,
    }
}

const fn policy_of(code: u8) -> OwnerPolicy {
    match code {
        1 => OwnerPolicy::Serve,
        2 => OwnerPolicy::Wait,
        _ => OwnerPolicy::Reject,
    }
}

/// The contents of a lease's range when it was leased.
#[derive(Debug, Default)]
struct Contents {
    version: u32,
    bytes: Vec<u8>,
}

/// The leases of one client: written by its thread, read by the service's.
#[derive(Debug)]
pub(crate) struct Ledger {
    slots: Box<[Slot]>,
    /// One per slot, for leases under [`OwnerPolicy::Serve`] alone.
    contents: Box<[Mutex<Contents>]>,
    /// Slots from here on were never used.
    used_count: AtomicU32,
    /// Number of leases since the start.
    held_count: AtomicU64,
    /// The shortest lease since the service's last check, in milliseconds.
    shortest_ms: AtomicU64,
    /// 1 when the client has ended.
    closed: AtomicU8,
}

impl Ledger {
    pub(crate) fn new(slot_count: u16) -> Self {
        Self {
            slots: (0..slot_count).map(|_| Slot::default()).collect(),
            contents: (0..slot_count).map(|_| Mutex::default()).collect(),
            used_count: AtomicU32::new(0),
            held_count: AtomicU64::new(0),
            shortest_ms: AtomicU64::new(u64::MAX),
            closed: AtomicU8::new(0),
        }
    }

    /// Slots that may hold something, in their order.
    pub(super) fn used(&self) -> u16 {
        u16::try_from(self.used_count.load(Ordering::Acquire)).unwrap_or(u16::MAX)
    }

    /// Number of leases since the start.
    pub(super) fn held_count(&self) -> u64 {
        self.held_count.load(Ordering::Relaxed)
    }

    /// The shortest lease since the last call, in milliseconds; `None` if there was none.
    pub(super) fn take_shortest(&self) -> Option<u64> {
        let shortest = self.shortest_ms.swap(u64::MAX, Ordering::Relaxed);
        (shortest != u64::MAX).then_some(shortest)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire) != 0
    }

    /// A slot's lease and its version; `None` while there is none, or while it is written (the
    /// writer makes sure that the service checks again if that matters).
    pub(super) fn read(&self, index: u16) -> Option<(u32, Entry)> {
        let slot = self.slots.get(usize::from(index))?;
        let version = slot.version.load(Ordering::Acquire);
        let state = slot.state.load(Ordering::Relaxed);
        if version % 2 == 1 || !matches!(state, HELD | ENDING | ABANDONED) {
            return None;
        }
        let high = u128::from(slot.high.load(Ordering::Relaxed));
        let low = u128::from(slot.low.load(Ordering::Relaxed));
        let extent = slot.extent.load(Ordering::Relaxed);
        let epoch = slot.epoch.load(Ordering::Relaxed);
        let expires_at = Timestamp::from_nanos(slot.expires_at.load(Ordering::Relaxed));
        let renew_until = Timestamp::from_nanos(slot.renew_until.load(Ordering::Relaxed));
        let policy = policy_of(slot.policy.load(Ordering::Relaxed));
        let renewed = self.renewed(SlotId { index, version });
        // The fields above belong to this version only if the slot still has it.
        fence(Ordering::Acquire);
        if slot.version.load(Ordering::Relaxed) != version {
            return None;
        }
        let pointer = Pointer::from_ipv6(Ipv6Addr::from_bits(high << 64 | low)).ok()?;
        let entry = Entry {
            pointer,
            length: u32::try_from(extent >> 32).unwrap_or(u32::MAX),
            epoch,
            expires_at: renewed.map_or(expires_at, |renewed| renewed.max(expires_at)),
            granted_ms: u16::try_from(extent & 0xffff).unwrap_or(u16::MAX),
            renew_until,
            policy,
            is_ending: state == ENDING,
            is_abandoned: state == ABANDONED,
        };
        Some((version, entry))
    }

    /// Passes the contents that a lease's range had when it was leased, if its client stored them.
    pub(super) fn with_contents(&self, index: u16, version: u32, look: impl FnOnce(&[u8])) {
        let Some(contents) = self.contents.get(usize::from(index)) else { return };
        let contents = contents.lock().unwrap_or_else(PoisonError::into_inner);
        if contents.version == version {
            look(&contents.bytes);
        }
    }

    /// Records for the client until when its lease was renewed.
    pub(super) fn note_renewal(&self, index: u16, version: u32, until: Timestamp) {
        let Some(slot) = self.slots.get(usize::from(index)) else { return };
        slot.renewed_version.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        slot.renewed_until.store(until.as_nanos(), Ordering::Relaxed);
        slot.renewed_version.store(version, Ordering::Release);
    }

    /// Returns the slot of an abandoned lease.
    pub(super) fn give_back(&self, index: u16, version: u32) {
        let Some(slot) = self.slots.get(usize::from(index)) else { return };
        if slot.version.load(Ordering::Acquire) == version {
            // An abandoned slot is not written by its client.
            let _ = slot.state.compare_exchange(
                ABANDONED,
                RETURNED,
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
        }
    }

    /// Until when the service renewed the lease, if it did.
    fn renewed(&self, id: SlotId) -> Option<Timestamp> {
        let slot = self.slots.get(usize::from(id.index))?;
        if slot.renewed_version.load(Ordering::Acquire) != id.version {
            return None;
        }
        let until = slot.renewed_until.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let is_same = slot.renewed_version.load(Ordering::Relaxed) == id.version;
        is_same.then(|| Timestamp::from_nanos(until))
    }
}

/// The client's side of its ledger.
#[derive(Debug)]
pub(crate) struct Writer {
    pub(super) ledger: std::sync::Arc<Ledger>,
    free: Vec<u16>,
}

impl Writer {
    pub(crate) fn new(ledger: std::sync::Arc<Ledger>) -> Self {
        let count = u16::try_from(ledger.slots.len()).unwrap_or(u16::MAX);
        // The lowest slots are reused first, so that the service reads few.
        Self { ledger, free: (0..count).rev().collect() }
    }

    /// Records a lease, and the contents of its range if they may be served; `None` if no slot is free.
    pub(crate) fn hold(&mut self, entry: &Entry, committed: &[u8]) -> Option<SlotId> {
        if self.free.is_empty() {
            self.take_back();
        }
        let index = self.free.pop()?;
        let slot = self.ledger.slots.get(usize::from(index))?;
        if entry.policy == OwnerPolicy::Serve
            && let Some(contents) = self.ledger.contents.get(usize::from(index))
        {
            let mut contents = contents.lock().unwrap_or_else(PoisonError::into_inner);
            contents.version = next_version(slot);
            contents.bytes.clear();
            contents.bytes.extend_from_slice(committed);
        }
        let version = write(slot, entry, HELD);
        let ledger = &self.ledger;
        let used = u32::from(index) + 1;
        if ledger.used_count.load(Ordering::Relaxed) < used {
            ledger.used_count.store(used, Ordering::Release);
        }
        let granted = u64::from(entry.granted_ms);
        if ledger.shortest_ms.load(Ordering::Relaxed) > granted {
            ledger.shortest_ms.store(granted, Ordering::Relaxed);
        }
        // Only this thread changes the counter.
        let held = ledger.held_count.load(Ordering::Relaxed);
        ledger.held_count.store(held + 1, Ordering::Relaxed);
        Some(SlotId { index, version })
    }

    /// Removes a lease.
    pub(crate) fn release(&mut self, id: SlotId) {
        let Some(slot) = self.slot(id) else { return };
        slot.version.store(id.version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        slot.state.store(FREE, Ordering::Relaxed);
        slot.version.store(id.version.wrapping_add(2), Ordering::Release);
        self.free.push(id.index);
    }

    /// Records that the COMMIT of a lease is in progress.
    pub(crate) fn begin_end(&self, id: SlotId) {
        if let Some(slot) = self.slot(id) {
            slot.state.store(ENDING, Ordering::Release);
        }
    }

    /// Leaves the ABORT of a lease to the service.
    pub(crate) fn abandon(&self, id: SlotId) {
        if let Some(slot) = self.slot(id) {
            slot.state.store(ABANDONED, Ordering::Release);
        }
    }

    /// Reclaims the slots of abandoned leases although no service has finished with them, because the
    /// service has ended.
    pub(crate) fn reclaim(&mut self) {
        for (index, slot) in (0..).zip(&self.ledger.slots) {
            if matches!(slot.state.load(Ordering::Acquire), ABANDONED | RETURNED) {
                slot.state.store(FREE, Ordering::Relaxed);
                self.free.push(index);
            }
        }
    }

    /// Until when the service renewed the lease, if it did.
    pub(crate) fn renewed(&self, id: SlotId) -> Option<Timestamp> {
        self.ledger.renewed(id)
    }

    /// Slots that no lease has.
    pub(crate) fn room(&mut self) -> usize {
        self.take_back();
        self.free.len()
    }

    /// The slot, if it is of that version.
    fn slot(&self, id: SlotId) -> Option<&Slot> {
        let slot = self.ledger.slots.get(usize::from(id.index))?;
        (slot.version.load(Ordering::Relaxed) == id.version).then_some(slot)
    }

    fn take_back(&mut self) {
        for (index, slot) in (0..).zip(&self.ledger.slots) {
            if slot.state.load(Ordering::Acquire) == RETURNED {
                slot.state.store(FREE, Ordering::Relaxed);
                self.free.push(index);
            }
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.ledger.closed.store(1, Ordering::Release);
    }
}

fn write(slot: &Slot, entry: &Entry, state: u8) -> u32 {
    let version = slot.version.load(Ordering::Relaxed);
    slot.version.store(version.wrapping_add(1), Ordering::Relaxed);
    // A reader that sees a field below also sees the odd version.
    fence(Ordering::Release);
    let bits = entry.pointer.to_ipv6().to_bits();
    let word = |bits: u128| u64::try_from(bits & u128::from(u64::MAX)).unwrap_or(0);
    slot.high.store(word(bits >> 64), Ordering::Relaxed);
    slot.low.store(word(bits), Ordering::Relaxed);
    let extent = u64::from(entry.length) << 32 | u64::from(entry.granted_ms);
    slot.extent.store(extent, Ordering::Relaxed);
    slot.epoch.store(entry.epoch, Ordering::Relaxed);
    slot.expires_at.store(entry.expires_at.as_nanos(), Ordering::Relaxed);
    slot.renew_until.store(entry.renew_until.as_nanos(), Ordering::Relaxed);
    slot.policy.store(code_of(entry.policy), Ordering::Relaxed);
    slot.state.store(state, Ordering::Relaxed);
    let version = version.wrapping_add(2);
    slot.version.store(version, Ordering::Release);
    version
}

/// The version that the slot's next lease has.
fn next_version(slot: &Slot) -> u32 {
    slot.version.load(Ordering::Relaxed).wrapping_add(2)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;
    use std::time::{Duration, Instant};

    use bluebridge_wire::{ArenaGeneration, Location, NodeId, Space, Tag};

    use super::*;

    fn entry(number: u64) -> Entry {
        let location = Location::new(ArenaGeneration::default(), number * 4096).expect("small");
        Entry {
            pointer: Pointer { space: Space(1), node: NodeId(7), tag: Tag(3), location },
            length: u32::try_from(number % 4096).expect("small") + 1,
            epoch: number,
            expires_at: Timestamp::from_nanos(number),
            granted_ms: 1000,
            renew_until: Timestamp::from_nanos(number),
            policy: OwnerPolicy::Wait,
            is_ending: false,
            is_abandoned: false,
        }
    }

    #[test]
    fn what_is_held_is_read_until_it_is_released() {
        let ledger = Arc::new(Ledger::new(2));
        let mut writer = Writer::new(Arc::clone(&ledger));
        let first = writer.hold(&entry(1), &[]).expect("room");
        let second = writer.hold(&entry(2), &[]).expect("room");
        assert!(writer.hold(&entry(3), &[]).is_none(), "it is full");
        assert_eq!((ledger.used(), ledger.held_count()), (2, 2));
        assert_eq!(ledger.take_shortest(), Some(1000));
        assert_eq!(ledger.take_shortest(), None);
        let (version, read) = ledger.read(0).expect("it is held");
        assert_eq!(read, entry(1));
        let later = Timestamp::from_nanos(99);
        ledger.note_renewal(0, version, later);
        assert_eq!(writer.renewed(first), Some(later));
        assert_eq!(ledger.read(0).expect("it is held").1.expires_at, later);
        assert_eq!(writer.renewed(second), None);
        writer.release(first);
        writer.release(first);
        assert!(ledger.read(0).is_none());
        let third = writer.hold(&entry(4), &[]).expect("room");
        assert_eq!(writer.renewed(third), None, "another's renewal");
        writer.begin_end(first);
        assert!(!ledger.read(0).expect("it is held").1.is_ending, "that was another lease");
        writer.begin_end(third);
        assert!(ledger.read(0).expect("it is held").1.is_ending);
        assert!(!ledger.is_closed());
        ledger
            .with_contents(0, ledger.read(0).expect("it is held").0, |_| panic!("none was given"));
        writer.release(third);
        let served = Entry { policy: OwnerPolicy::Serve, ..entry(5) };
        writer.hold(&served, b"before").expect("room");
        let (version, read) = ledger.read(0).expect("it is held");
        assert_eq!(read, served);
        let mut seen = Vec::new();
        ledger.with_contents(0, version, |bytes| seen.extend_from_slice(bytes));
        assert_eq!(seen, b"before");
        drop(writer);
        assert!(ledger.is_closed());
    }

    #[test]
    fn an_abandoned_lease_comes_back_when_the_service_is_done() {
        let ledger = Arc::new(Ledger::new(1));
        let mut writer = Writer::new(Arc::clone(&ledger));
        let id = writer.hold(&entry(1), &[]).expect("room");
        writer.abandon(id);
        let (version, read) = ledger.read(0).expect("it is there");
        assert!(read.is_abandoned);
        assert_eq!(writer.room(), 0);
        ledger.give_back(0, version.wrapping_add(2));
        assert!(writer.hold(&entry(2), &[]).is_none(), "it was another's");
        ledger.give_back(0, version);
        assert!(ledger.read(0).is_none());
        assert_eq!(writer.room(), 1);
        let id = writer.hold(&entry(2), &[]).expect("room again");
        writer.reclaim();
        assert_eq!(writer.room(), 0, "it is held");
        writer.abandon(id);
        writer.reclaim();
        assert_eq!(writer.room(), 1);
        writer.hold(&entry(3), &[]).expect("room again");
        assert!(writer.hold(&entry(4), &[]).is_none(), "it came back once");
    }

    #[test]
    fn a_reader_sees_no_mixture_of_two_leases() {
        let ledger = Arc::new(Ledger::new(1));
        let mut writer = Writer::new(Arc::clone(&ledger));
        let saw = Arc::new(AtomicU8::new(0));
        let reader = thread::spawn({
            let (ledger, saw) = (Arc::clone(&ledger), Arc::clone(&saw));
            move || {
                while !ledger.is_closed() {
                    if let Some((_, read)) = ledger.read(0) {
                        assert_eq!(read, entry(read.epoch));
                        saw.store(1, Ordering::Relaxed);
                    }
                }
            }
        });
        let (mut number, began) = (1, Instant::now());
        while number < 200_000 || saw.load(Ordering::Relaxed) == 0 && !reader.is_finished() {
            let id = writer.hold(&entry(number), &[]).expect("room");
            writer.release(id);
            number += 1;
            assert!(began.elapsed() < Duration::from_secs(20), "nothing was ever read");
        }
        drop(writer);
        reader.join().expect("it saw no mixture");
    }
}
