//! The maps as a [`DataPlane`].

use std::{
    collections::BTreeSet,
    os::fd::{AsRawFd as _, BorrowedFd},
    time::Duration,
};

use bluebridge_p4::declaration::DROPS_SIZE;
use bluebridge_p4::pipeline::{
    Action, Counter, Entry, Impairment, Key, PACKET_IN_BYTES, SwitchPort, Ternary,
};

use super::{
    EbpfSwitch, Known,
    layout::{self, nanoseconds},
    port::{Attached, FLAG_IMPAIRED},
    store::{failed, set_first, sum},
    structs::{self, NotifyMatch, PortCounter, from_bytes},
};
use crate::{
    dataplane::{
        CloneSession, DataPlane, Drops, ImpairmentCounters, ImpairmentError, InstalledEntry,
        PacketIn, PlaneError, PortError, PortStatus, Table, TableError, action_ports, check_entry,
        check_group, check_impairment, notify_order, with_time_left,
    },
    draw::{Draw, threshold},
    packet_socket::{OFFLOAD_BYTES, PacketSocket},
};

const ETHERNET_BYTES: usize = 14;
/// Index in `drops` of the packet-ins that found no room: after the reasons.
#[expect(clippy::cast_possible_truncation, reason = "there are a dozen reasons")]
const LOST_PACKET_IN: u32 = DROPS_SIZE as u32;

impl EbpfSwitch {
    fn check(&self, entry: &Entry) -> Result<(), TableError> {
        check_entry(entry)?;
        let ports = action_ports(&entry.action);
        if let Some(&port) = ports.iter().find(|port| !self.ports.contains_key(port)) {
            return Err(TableError::UnknownPort(port));
        }
        match entry.action {
            Action::SetMulticastGroup { group } if !self.groups.contains_key(&group) => {
                Err(TableError::UnknownGroup(group))
            }
            _ => Ok(()),
        }
    }

    fn known(&self, key: &Key) -> Result<&Known, TableError> {
        let table = Table::of(key);
        self.known[table as usize].get(key).ok_or(TableError::NotFound(table))
    }

    /// Writes an entry into its map, and the agent's note beside it.
    pub(super) fn write(&mut self, entry: &Entry, index: u32) -> Result<Known, PlaneError> {
        let note_key = layout::note_key(&entry.key);
        match layout::encode_note(entry) {
            Some(note) => self.notes.insert(note_key, note, 0).map_err(|e| failed(&e))?,
            // A missing note is no error.
            None => drop(self.notes.remove(&note_key)),
        }
        let table = Table::of(&entry.key);
        let value = layout::encode_value(&entry.key, &entry.action, index, monotonic());
        self.stores[table as usize].put(&layout::encode_key(&entry.key), &value)?;
        let dead_at = layout::decode_end(table, &value);
        Ok(Known { entry: entry.clone(), index, dead_at })
    }

    /// Writes the state that is derived from the entries of a table: the compiled `notify`, and the counts
    /// with which programs skip empty tables.
    pub(super) fn refresh(&mut self, table: Table) -> Result<(), PlaneError> {
        let count = u32::try_from(self.known[table as usize].len()).unwrap_or(u32::MAX);
        match table {
            Table::Redirect => self.config.redirects = count,
            Table::Notify => {
                self.write_notify()?;
                self.config.notifies = count;
            }
            _ => return Ok(()),
        }
        self.write_config()
    }

    /// Compiles `notify`: for each value of each matched byte, the entries that it satisfies.
    fn write_notify(&mut self) -> Result<(), PlaneError> {
        let mut entries: Vec<_> = self.known[Table::Notify as usize].iter().collect();
        entries.sort_by_key(|(key, _)| notify_order(key));
        for (slot, (_, known)) in (0u32..).zip(&entries) {
            self.notify_index.set(slot, known.index, 0).map_err(|e| failed(&e))?;
        }
        for byte in 0..=u8::MAX {
            let mut bits = NotifyMatch::default();
            for (slot, (key, _)) in entries.iter().enumerate() {
                let Key::Notify { src_command, dst_command, src_status, .. } = key else {
                    continue;
                };
                let bit = |ternary| u64::from(satisfies(ternary, byte)) << slot;
                bits.src_command |= bit(*src_command);
                bits.dst_command |= bit(*dst_command);
                bits.src_status |= bit(*src_status);
            }
            self.notify_match.set(u32::from(byte), bits, 0).map_err(|e| failed(&e))?;
        }
        Ok(())
    }

    /// Sets a counter, and the time of its last hit.
    fn write_counter(
        &mut self,
        index: u32,
        counter: Counter,
        hit: Duration,
    ) -> Result<(), PlaneError> {
        let Counter { packets, bytes } = counter;
        let value = structs::Counter { packets, bytes, last_hit_ns: nanoseconds(hit) };
        set_first(&mut self.counters, index, value)
    }

    /// The counter of an entry and the time of its last hit.
    fn counter(&self, index: u32) -> Result<(Counter, Duration), PlaneError> {
        let structs::Counter { packets, bytes, last_hit_ns } =
            sum(&self.counters, index, structs::Counter::plus)?;
        Ok((Counter { packets, bytes }, Duration::from_nanos(last_hit_ns)))
    }

    fn installed(&self, known: &Known) -> Result<InstalledEntry, PlaneError> {
        let (counter, hit) = self.counter(known.index)?;
        let since_hit = matches!(known.entry.key, Key::Redirect { .. })
            .then(|| monotonic().saturating_sub(hit));
        let left = known.dead_at.map(|dead_at| dead_at.saturating_sub(monotonic()));
        let action = with_time_left(&known.entry.action, left);
        let entry = Entry { action, ..known.entry.clone() };
        Ok(InstalledEntry { entry, counter, since_hit })
    }

    pub(super) fn read_groups(&mut self) -> Result<(), PlaneError> {
        for item in self.group_map.iter() {
            let (number, value) = item.map_err(|e| failed(&e))?;
            self.groups.insert(number, layout::decode_group(&value));
        }
        Ok(())
    }

    fn status(&self, port: SwitchPort, is: &Attached) -> Result<PortStatus, PlaneError> {
        let at = u32::from(port.0);
        let PortCounter { rx_packets, rx_bytes, tx_packets, tx_bytes } =
            sum(&self.port_counters, at, PortCounter::plus)?;
        let structs::Impairment { lost, duplicated, corrupted, .. } =
            self.impairments.get(&at, 0).map_err(|e| failed(&e))?;
        Ok(PortStatus {
            port,
            name: is.interface.name.clone(),
            mac: is.interface.mac,
            mtu: is.interface.mtu,
            rx: Counter { packets: rx_packets, bytes: rx_bytes },
            tx: Counter { packets: tx_packets, bytes: tx_bytes },
            impaired: ImpairmentCounters {
                lost,
                duplicated,
                corrupted,
                ..ImpairmentCounters::default()
            },
        })
    }
}

impl DataPlane for EbpfSwitch {
    fn name(&self) -> &'static str {
        "ebpf"
    }

    fn insert(&mut self, entry: &Entry) -> Result<(), TableError> {
        self.check(entry)?;
        let table = Table::of(&entry.key);
        let at = table as usize;
        if self.known[at].contains_key(&entry.key) {
            return Err(TableError::Exists(table));
        }
        let index = self.free[at].pop().ok_or(TableError::Full(table))?;
        let done = self
            .write_counter(index, Counter::default(), monotonic())
            .and_then(|()| self.write(entry, index));
        let known = done.inspect_err(|_| self.free[at].push(index))?;
        self.known[at].insert(entry.key, known);
        Ok(self.refresh(table)?)
    }

    fn modify(&mut self, entry: &Entry) -> Result<(), TableError> {
        self.check(entry)?;
        let index = self.known(&entry.key)?.index;
        let known = self.write(entry, index)?;
        self.known[Table::of(&entry.key) as usize].insert(entry.key, known);
        Ok(())
    }

    fn delete(&mut self, key: &Key) -> Result<(), TableError> {
        let table = Table::of(key);
        let index = self.known(key)?.index;
        self.stores[table as usize].remove(&layout::encode_key(key))?;
        drop(self.notes.remove(&layout::note_key(key)));
        self.known[table as usize].remove(key);
        self.free[table as usize].push(index);
        Ok(self.refresh(table)?)
    }

    fn entry(&mut self, key: &Key) -> Result<InstalledEntry, TableError> {
        Ok(self.installed(self.known(key)?)?)
    }

    fn entries(&mut self, table: Table) -> Result<Vec<InstalledEntry>, PlaneError> {
        self.known[table as usize].values().map(|known| self.installed(known)).collect()
    }

    fn set_counter(&mut self, key: &Key, counter: Counter) -> Result<(), TableError> {
        let index = self.known(key)?.index;
        let (_, hit) = self.counter(index)?;
        Ok(self.write_counter(index, counter, hit)?)
    }

    fn set_flood_group(&mut self, group: Option<u16>) -> Result<(), TableError> {
        match group {
            Some(group) if !self.groups.contains_key(&group) => {
                Err(TableError::UnknownGroup(group))
            }
            _ => {
                self.config.flood_group = group.map_or(0, u32::from);
                Ok(self.write_config()?)
            }
        }
    }

    fn flood_group(&mut self) -> Result<Option<u16>, PlaneError> {
        Ok(u16::try_from(self.config.flood_group).ok().filter(|&group| group != 0))
    }

    fn set_group(&mut self, group: u16, ports: &[SwitchPort]) -> Result<(), TableError> {
        check_group(group, ports, self.groups.contains_key(&group), self.groups.len())?;
        if let Some(&port) = ports.iter().find(|port| !self.ports.contains_key(port)) {
            return Err(TableError::UnknownPort(port));
        }
        let ports: BTreeSet<_> = ports.iter().copied().collect();
        let value = layout::encode_group(group, &ports);
        self.group_map.insert(group, value, 0).map_err(|e| failed(&e))?;
        self.groups.insert(group, ports.into_iter().collect());
        Ok(())
    }

    fn delete_group(&mut self, group: u16) -> Result<(), TableError> {
        if !self.groups.contains_key(&group) {
            return Err(TableError::UnknownGroup(group));
        }
        self.group_map.remove(&group).map_err(|e| failed(&e))?;
        self.groups.remove(&group);
        Ok(())
    }

    fn groups(&mut self) -> Result<Vec<(u16, Vec<SwitchPort>)>, PlaneError> {
        Ok(self.groups.iter().map(|(&group, ports)| (group, ports.clone())).collect())
    }

    fn set_clone_session(&mut self, session: Option<CloneSession>) -> Result<(), PlaneError> {
        let bytes = session.map_or(0, |session| session.packet_bytes.clamp(1, PACKET_IN_BYTES));
        self.config.clone_bytes = u32::try_from(bytes).unwrap_or(0);
        self.write_config()
    }

    fn clone_session(&mut self) -> Result<Option<CloneSession>, PlaneError> {
        let packet_bytes = self.config.clone_bytes as usize;
        Ok((packet_bytes != 0).then_some(CloneSession { packet_bytes }))
    }

    fn pipeline_cookie(&mut self) -> Result<Option<u64>, PlaneError> {
        Ok(self.config.cookie())
    }

    fn clear(&mut self, pipeline_cookie: Option<u64>) -> Result<(), PlaneError> {
        for table in Table::ALL {
            let keys: Vec<_> = self.known[table as usize].keys().copied().collect();
            for key in keys {
                self.delete(&key).map_err(plane)?;
            }
        }
        let groups: Vec<_> = self.groups.keys().copied().collect();
        for group in groups {
            self.delete_group(group).map_err(plane)?;
        }
        self.config.clone_bytes = 0;
        self.config.flood_group = 0;
        self.config.set_cookie(pipeline_cookie);
        for reason in 0..=LOST_PACKET_IN {
            set_first(&mut self.drops, reason, 0)?;
        }
        self.write_config()
    }

    fn drops(&mut self) -> Result<Drops, PlaneError> {
        let mut drops = Drops::default();
        for (at, count) in (0u32..).zip(&mut drops.0) {
            *count = sum(&self.drops, at, u64::wrapping_add)?;
        }
        Ok(drops)
    }

    fn add_port(&mut self, port: SwitchPort, interface: &str) -> Result<(), PortError> {
        self.add_port_with(port, interface, None)
    }

    fn remove_port(&mut self, port: SwitchPort) -> Result<(), PortError> {
        if !self.ports.contains_key(&port) {
            return Err(PortError::Unknown(port));
        }
        Ok(self.detach(port)?)
    }

    fn ports(&mut self) -> Result<Vec<PortStatus>, PlaneError> {
        self.ports.iter().map(|(&port, is)| self.status(port, is)).collect()
    }

    fn packet_out(&mut self, port: SwitchPort, frame: &[u8]) -> Result<(), PortError> {
        let is = self.ports.get(&port).ok_or(PortError::Unknown(port))?;
        let longest = is.interface.mtu as usize + ETHERNET_BYTES;
        if !(ETHERNET_BYTES..=longest).contains(&frame.len()) {
            return Err(PortError::FrameSize(frame.len()));
        }
        let sent = PacketSocket::open(is.interface.index, false)
            .and_then(|socket| socket.send([0; OFFLOAD_BYTES], frame));
        Ok(sent.map_err(|source| PlaneError::Io {
            doing: format!("send a frame by {}", is.interface.name),
            source,
        })?)
    }

    fn poll(&mut self, limit: usize, out: &mut Vec<PacketIn>) -> Result<(), PlaneError> {
        for _ in 0..limit {
            let Some(record) = self.packet_ins.next() else { break };
            let structs::PacketIn { port, bytes, frame } = from_bytes(&record);
            let bytes = usize::from(bytes).min(PACKET_IN_BYTES);
            let frame = frame.get(..bytes).unwrap_or_default().to_vec();
            out.push(PacketIn { ingress_port: SwitchPort(port), frame });
        }
        Ok(())
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the ring's file descriptor is open as long as the ring, which `self` holds for
        // as long as the borrow lives.
        Some(unsafe { BorrowedFd::borrow_raw(self.packet_ins.as_raw_fd()) })
    }

    fn events_lost(&mut self) -> Result<u64, PlaneError> {
        sum(&self.drops, LOST_PACKET_IN, u64::wrapping_add)
    }

    fn set_impairment(
        &mut self,
        port: SwitchPort,
        impairment: Impairment,
    ) -> Result<(), ImpairmentError> {
        check_impairment(&impairment)?;
        if impairment.reorder > 0.0 {
            return Err(ImpairmentError::Unsupported("reorder"));
        }
        if !impairment.delay.is_zero() {
            return Err(ImpairmentError::Unsupported("delay"));
        }
        let at = u32::from(port.0);
        let is = self.ports.get_mut(&port).ok_or(ImpairmentError::UnknownPort(port))?;
        let shares = [impairment.loss, impairment.duplicate, impairment.corrupt].map(threshold);
        let is_on = shares.iter().any(|&share| share != 0);
        is.flags = if is_on { is.flags | FLAG_IMPAIRED } else { is.flags & !FLAG_IMPAIRED };
        let counted = self.impairments.get(&at, 0).map_err(|e| failed(&e))?;
        let state = Draw::new(impairment.seed, port).state();
        let [loss, duplicate, corrupt] = shares;
        let value = structs::Impairment { state, loss, duplicate, corrupt, ..counted };
        self.impairments.set(at, value, 0).map_err(|e| failed(&e))?;
        Ok(self.write_port(port)?)
    }
}

const fn satisfies(ternary: Ternary, byte: u8) -> bool {
    byte & ternary.mask == ternary.value
}

/// The clock of the programs' time stamps.
fn monotonic() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// Converts a table error where the caller cannot be at fault.
fn plane(error: TableError) -> PlaneError {
    match error {
        TableError::Plane(error) => error,
        other => PlaneError::Ebpf(other.to_string()),
    }
}
