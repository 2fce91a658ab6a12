//! The tables of the soft data plane: hash maps, and one per prefix length for LPM.

use std::{collections::BTreeMap, collections::HashMap, time::Instant};

use bluebridge_p4::pipeline::{Action, Counter, Entry, Key, Ternary};

use super::frame::Address;
use crate::{
    dataplane::{
        ANYCAST_SLOTS, InstalledEntry, Table, TableError, lifetime, location_mask, notify_order,
        with_time_left,
    },
    draw::anycast_slots,
};

/// An entry with additional state of the data path.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) entry: Entry,
    pub(super) counter: Counter,
    pub(super) last_hit: Instant,
    /// When the entry expires; `redirect_until` only.
    dead_at: Option<Instant>,
    /// The member of each anycast slot; empty in other tables.
    pub(super) choice: Option<Box<[u8; ANYCAST_SLOTS]>>,
}

impl Slot {
    fn new(entry: &Entry, now: Instant) -> Self {
        let mut slot = Self {
            entry: entry.clone(),
            counter: Counter::default(),
            last_hit: now,
            dead_at: None,
            choice: None,
        };
        slot.prepare(now);
        slot
    }

    /// Computes the data path's state from the action.
    fn prepare(&mut self, now: Instant) {
        self.dead_at = lifetime(&self.entry.action).map(|lifetime| now + lifetime);
        if let Action::Select(members) = &self.entry.action {
            self.choice = Some(Box::new(anycast_slots(members)));
        }
    }

    /// Counts a frame of `bytes` bytes.
    pub(super) fn hit(&mut self, now: Instant, bytes: usize) {
        // A controller may set a counter to any value, so it wraps like on a switch.
        self.counter.packets = self.counter.packets.wrapping_add(1);
        self.counter.bytes = self.counter.bytes.wrapping_add(bytes as u64);
        self.last_hit = now;
    }

    fn installed(&self, now: Instant) -> InstalledEntry {
        let since_hit = matches!(self.entry.key, Key::Redirect { .. })
            .then(|| now.saturating_duration_since(self.last_hit));
        let left = self.dead_at.map(|dead_at| dead_at.saturating_duration_since(now));
        let action = with_time_left(&self.entry.action, left);
        let entry = Entry { action, ..self.entry.clone() };
        InstalledEntry { entry, counter: self.counter, since_hit }
    }

    /// Whether it has not expired.
    pub(super) fn is_alive(&self, now: Instant) -> bool {
        self.dead_at.is_none_or(|dead_at| now < dead_at)
    }
}

/// All tables of one pipeline.
#[derive(Debug, Default)]
pub(super) struct Tables {
    maps: [HashMap<Key, Slot>; Table::ALL.len()],
    /// The number of directory entries of each prefix length.
    prefix_lens: BTreeMap<u8, usize>,
    /// The keys of `notify`, the winner first.
    notify: Vec<Key>,
}

impl Tables {
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(super) fn insert(&mut self, entry: &Entry, now: Instant) -> Result<(), TableError> {
        let table = Table::of(&entry.key);
        let map = &mut self.maps[table as usize];
        if map.contains_key(&entry.key) {
            return Err(TableError::Exists(table));
        }
        if map.len() >= table.capacity() {
            return Err(TableError::Full(table));
        }
        map.insert(entry.key, Slot::new(entry, now));
        self.index(&entry.key);
        Ok(())
    }

    pub(super) fn modify(&mut self, entry: &Entry, now: Instant) -> Result<(), TableError> {
        let slot = self.slot(&entry.key)?;
        slot.entry = entry.clone();
        slot.prepare(now);
        Ok(())
    }

    pub(super) fn delete(&mut self, key: &Key) -> Result<(), TableError> {
        let table = Table::of(key);
        if self.maps[table as usize].remove(key).is_none() {
            return Err(TableError::NotFound(table));
        }
        if let Key::Directory { prefix_len, .. } = key
            && let Some(count) = self.prefix_lens.get_mut(prefix_len)
        {
            *count -= 1;
            if *count == 0 {
                self.prefix_lens.remove(prefix_len);
            }
        }
        self.notify.retain(|notify| notify != key);
        Ok(())
    }

    pub(super) fn slot(&mut self, key: &Key) -> Result<&mut Slot, TableError> {
        let table = Table::of(key);
        self.maps[table as usize].get_mut(key).ok_or(TableError::NotFound(table))
    }

    pub(super) fn entry(&mut self, key: &Key, now: Instant) -> Result<InstalledEntry, TableError> {
        self.slot(key).map(|slot| slot.installed(now))
    }

    pub(super) fn entries(&self, table: Table, now: Instant) -> Vec<InstalledEntry> {
        let slots = self.maps[table as usize].values();
        let mut entries: Vec<_> = slots.map(|slot| slot.installed(now)).collect();
        entries.sort_by_key(|installed| installed.entry.key);
        entries
    }

    /// The entry of a table with an exact key.
    pub(super) fn exact(&mut self, key: &Key) -> Option<&mut Slot> {
        self.maps[Table::of(key) as usize].get_mut(key)
    }

    /// The directory entry with the longest prefix of an address.
    pub(super) fn directory(&mut self, dst: &Address) -> Option<&mut Slot> {
        let bits = dst.directory_bits();
        let map = &mut self.maps[Table::Directory as usize];
        let key = self.prefix_lens.keys().rev().find_map(|&prefix_len| {
            let key = Key::Directory { prefix: bits & location_mask(prefix_len), prefix_len };
            map.contains_key(&key).then_some(key)
        })?;
        map.get_mut(&key)
    }

    /// The `notify` entry with the greatest priority that matches.
    pub(super) fn notify(&mut self, src: &Address, dst: &Address) -> Option<&mut Slot> {
        let key = *self.notify.iter().find(|key| match **key {
            Key::Notify { src_command, dst_command, src_status, .. } => {
                matches(src_command, src.command)
                    && matches(dst_command, dst.command)
                    && matches(src_status, src.tag)
            }
            _ => false,
        })?;
        self.exact(&key)
    }

    fn index(&mut self, key: &Key) {
        match *key {
            Key::Directory { prefix_len, .. } => {
                *self.prefix_lens.entry(prefix_len).or_default() += 1;
            }
            Key::Notify { .. } => {
                self.notify.push(*key);
                self.notify.sort_by_key(notify_order);
            }
            _ => {}
        }
    }
}

const fn matches(ternary: Ternary, value: u8) -> bool {
    value & ternary.mask == ternary.value
}
