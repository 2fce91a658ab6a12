//! A switch in memory with injected failures.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bluebridge_p4::pipeline::{Action, Key};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::core::{Ports, Tables};
use crate::driver::{
    Capabilities, DriverError, Installed, PACKET_INS_AT_ONCE, Pipeline, SwitchConnector,
    SwitchDriver, SwitchEvent, UpdateError,
};
use crate::plan::{Object, TableUpdate};
use crate::redirect::PacketIn;
use crate::store::ElectionId;

/// The probability of each kind of failure, 0.0 to 1.0.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Trouble {
    /// An update is refused.
    pub(super) refuse: f64,
    /// An update is acknowledged but not applied.
    pub(super) lose: f64,
    /// A call breaks the connection after a part of it was executed.
    pub(super) break_off: f64,
    /// A call hangs.
    pub(super) hang: f64,
    /// A connection is refused.
    pub(super) unreachable: f64,
    /// Before a reading, all tables are gone.
    pub(super) wipe: f64,
}

/// Counts of each kind of failure.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Met {
    pub(super) refused: u64,
    pub(super) lost: u64,
    pub(super) broken: u64,
    pub(super) hung: u64,
    pub(super) unreachable: u64,
    pub(super) wiped: u64,
}

#[derive(Debug)]
struct State {
    tables: Tables,
    /// When entries were written, for those that expire.
    written: HashMap<Key, Instant>,
    pipeline: bool,
    /// Whether another client pushes a pipeline before the next reading.
    pushed_before_reading: bool,
    capacity: usize,
    highest: ElectionId,
    trouble: Trouble,
    met: Met,
    rng: SmallRng,
    tried_after_fence: bool,
    /// The delay of the response to a reading.
    reading_delay: Duration,
    /// Whether expired entries disappear from the tables.
    removes_ended: bool,
    ports: Ports,
}

impl State {
    fn push_another(&mut self) {
        self.tables = Tables::default();
        self.pipeline = false;
    }

    /// The tables as returned by a reading: entries have their remaining time, not the written one.
    fn read(&mut self) -> Tables {
        let mut tables = self.tables.clone();
        tables.entries.retain(|key, body| {
            let Some(Action::RedirectUntil { lease_ms, .. }) = &mut body.action else {
                return true;
            };
            let passed = self.written.get(key).map_or(0, |at| at.elapsed().as_millis());
            *lease_ms = lease_ms.saturating_sub(u16::try_from(passed).unwrap_or(u16::MAX));
            let stays = *lease_ms != 0 || !self.removes_ended;
            if !stays {
                self.tables.entries.remove(key);
            }
            stays
        });
        tables
    }
}

/// The switch; clones share it.
#[derive(Clone, Debug)]
pub(super) struct FakeSwitch {
    state: Arc<Mutex<State>>,
    /// Counts the times that every connection was cut.
    cuts: Arc<watch::Sender<u64>>,
    /// Copies for the next caller.
    copies: Arc<Mutex<VecDeque<PacketIn>>>,
    copied: Arc<Notify>,
    /// Whether changes are announced.
    announces: Arc<AtomicBool>,
    changed: Arc<Notify>,
}

impl FakeSwitch {
    pub(super) fn new(seed: u64) -> Self {
        let state = State {
            tables: Tables::default(),
            written: HashMap::new(),
            pipeline: false,
            pushed_before_reading: false,
            capacity: usize::MAX,
            highest: ElectionId::default(),
            trouble: Trouble::default(),
            met: Met::default(),
            rng: SmallRng::seed_from_u64(seed),
            tried_after_fence: false,
            reading_delay: Duration::ZERO,
            removes_ended: false,
            ports: Ports::Unlisted,
        };
        Self {
            state: Arc::new(Mutex::new(state)),
            cuts: Arc::new(watch::channel(0).0),
            copies: Arc::default(),
            copied: Arc::default(),
            announces: Arc::default(),
            changed: Arc::default(),
        }
    }

    /// Announces changes from now on.
    pub(super) fn announce(&self) {
        self.announces.store(true, Ordering::Relaxed);
    }

    fn announces(&self) -> bool {
        self.announces.load(Ordering::Relaxed)
    }

    /// Changes the tables as another client does.
    pub(super) fn meddle_openly(&self, change: impl FnOnce(&mut Tables)) {
        self.meddle(change);
        self.changed.notify_one();
    }

    pub(super) fn tables(&self) -> Tables {
        self.state.lock().unwrap().tables.clone()
    }

    /// Changes the tables without the controller.
    pub(super) fn meddle(&self, change: impl FnOnce(&mut Tables)) {
        change(&mut self.state.lock().unwrap().tables);
    }

    pub(super) fn set_trouble(&self, trouble: Trouble) {
        self.state.lock().unwrap().trouble = trouble;
    }

    pub(super) fn set_capacity(&self, entries: usize) {
        self.state.lock().unwrap().capacity = entries;
    }

    /// Makes readings slow: their contents are `delay` old when they arrive.
    pub(super) fn set_reading_delay(&self, delay: Duration) {
        self.state.lock().unwrap().reading_delay = delay;
    }

    /// Removes entries from the tables when they expire.
    pub(super) fn remove_ended(&self) {
        self.state.lock().unwrap().removes_ended = true;
    }

    pub(super) fn met(&self) -> Met {
        self.state.lock().unwrap().met
    }

    /// Another controller becomes the primary for a moment.
    pub(super) fn take_over(&self, election_id: ElectionId) {
        self.state.lock().unwrap().highest = election_id;
    }

    pub(super) fn was_tried_after_fence(&self) -> bool {
        self.state.lock().unwrap().tried_after_fence
    }

    /// Restarts without pipeline and tables.
    pub(super) fn restart(&self) {
        {
            let mut state = self.state.lock().unwrap();
            state.push_another();
            state.highest = ElectionId::default();
        }
        self.cut();
    }

    /// Another client pushes a pipeline, which empties the tables without breaking a connection.
    pub(super) fn push_another(&self) {
        self.state.lock().unwrap().push_another();
    }

    /// The same, between a controller's check of the pipeline and its reading of the tables.
    pub(super) fn push_another_before_reading(&self) {
        self.state.lock().unwrap().pushed_before_reading = true;
    }

    /// Copies a frame to the controller.
    pub(super) fn copy(&self, packet: PacketIn) {
        self.copies.lock().unwrap().push_back(packet);
        self.copied.notify_one();
    }

    /// Copies that were not requested yet.
    pub(super) fn waiting_copies(&self) -> usize {
        self.copies.lock().unwrap().len()
    }

    /// Breaks every connection.
    pub(super) fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }

    pub(super) fn ports(&self) -> Ports {
        self.state.lock().unwrap().ports.clone()
    }

    pub(super) fn set_ports(&self, ports: Ports) {
        self.state.lock().unwrap().ports = ports;
    }
}

#[tonic::async_trait]
impl SwitchConnector for FakeSwitch {
    fn uri(&self) -> String {
        "fake".to_owned()
    }

    async fn look(&mut self) -> Result<Installed, DriverError> {
        let mut state = self.state.lock().unwrap();
        if let chance @ 0.001.. = state.trouble.unreachable
            && state.rng.random_bool(chance)
        {
            state.met.unreachable += 1;
            return Err(DriverError::Lost("unreachable".to_owned()));
        }
        Ok(Installed { tables: state.read(), ..Installed::default() })
    }

    async fn connect(
        &mut self,
        election_id: ElectionId,
    ) -> Result<Box<dyn SwitchDriver>, DriverError> {
        let mut state = self.state.lock().unwrap();
        if let chance @ 0.001.. = state.trouble.unreachable
            && state.rng.random_bool(chance)
        {
            state.met.unreachable += 1;
            return Err(DriverError::Lost("unreachable".to_owned()));
        }
        if election_id < state.highest {
            return Err(DriverError::Fenced { ours: election_id, theirs: state.highest });
        }
        state.highest = election_id;
        let mut cuts = self.cuts.subscribe();
        cuts.mark_unchanged();
        // The former primary is notified.
        self.cuts.send_modify(|cuts| *cuts += 1);
        cuts.mark_unchanged();
        Ok(Box::new(FakeDriver { switch: self.clone(), election_id, cuts }))
    }
}

pub(super) struct FakeDriver {
    switch: FakeSwitch,
    election_id: ElectionId,
    cuts: watch::Receiver<u64>,
}

impl FakeDriver {
    fn check(&self) -> Result<(), DriverError> {
        let highest = self.switch.state.lock().unwrap().highest;
        if highest > self.election_id {
            return Err(DriverError::Fenced { ours: self.election_id, theirs: highest });
        }
        if self.cuts.has_changed().unwrap_or(true) {
            return Err(DriverError::Lost("cut".to_owned()));
        }
        Ok(())
    }

    async fn hang(&self) {
        let hangs = {
            let mut state = self.switch.state.lock().unwrap();
            let chance = state.trouble.hang;
            let hangs = state.rng.random_bool(chance);
            state.met.hung += u64::from(hangs);
            hangs
        };
        if hangs {
            tokio::time::sleep(Duration::from_secs(3600)).await;
        }
    }
}

fn make(state: &mut State, update: &TableUpdate) -> Result<(), UpdateError> {
    let trouble = state.trouble;
    if state.rng.random_bool(trouble.refuse) {
        state.met.refused += 1;
        return Err(UpdateError::Refused("on purpose".to_owned()));
    }
    let there = match update.object() {
        Object::Entry(key, _) => state.tables.entries.contains_key(key),
        Object::FloodGroup(_) => true,
        Object::Group(group, _) => state.tables.groups.contains_key(group),
        Object::NotifySession => state.tables.notify_session,
    };
    match update {
        TableUpdate::Insert(_) if there => return Err(UpdateError::Exists("fake".to_owned())),
        TableUpdate::Insert(Object::Entry(..)) if state.tables.entries.len() >= state.capacity => {
            return Err(UpdateError::Refused("the table is full".to_owned()));
        }
        TableUpdate::Modify(_) | TableUpdate::Delete(_) if !there => {
            return Err(UpdateError::NotFound("fake".to_owned()));
        }
        _ => {}
    }
    if state.rng.random_bool(trouble.lose) {
        state.met.lost += 1;
    } else {
        update.apply_to(&mut state.tables);
        if let Object::Entry(key, _) = update.object() {
            state.written.insert(*key, Instant::now());
        }
    }
    Ok(())
}

#[tonic::async_trait]
impl SwitchDriver for FakeDriver {
    fn capabilities(&self) -> Capabilities {
        let announces_changes = self.switch.announces();
        Capabilities { driver: "fake", batch_max: 3, keeps_time: true, announces_changes }
    }

    async fn ensure_pipeline(&mut self) -> Result<Pipeline, DriverError> {
        self.check()?;
        let mut state = self.switch.state.lock().unwrap();
        if std::mem::replace(&mut state.pipeline, true) {
            return Ok(Pipeline::Kept);
        }
        state.tables = Tables::default();
        Ok(Pipeline::Pushed)
    }

    async fn ports(&mut self) -> Result<Ports, DriverError> {
        self.check()?;
        Ok(self.switch.ports())
    }

    async fn apply(
        &mut self,
        batch: &[TableUpdate],
    ) -> Result<Vec<Result<(), UpdateError>>, DriverError> {
        self.hang().await;
        if let Err(error) = self.check() {
            let fenced = matches!(error, DriverError::Fenced { .. });
            self.switch.state.lock().unwrap().tried_after_fence |= fenced;
            return Err(error);
        }
        assert!(batch.len() <= 3 && !batch.is_empty());
        let mut state = self.switch.state.lock().unwrap();
        let mut order: Vec<usize> = (0..batch.len()).collect();
        order.shuffle(&mut state.rng);
        let chance = state.trouble.break_off;
        let breaks = state.rng.random_bool(chance);
        let made = if breaks { batch.len() / 2 } else { batch.len() };
        let mut results = vec![Ok(()); batch.len()];
        for index in order.into_iter().take(made) {
            results[index] = make(&mut state, &batch[index]);
        }
        if breaks {
            state.met.broken += 1;
            return Err(DriverError::Lost("on purpose".to_owned()));
        }
        Ok(results)
    }

    async fn read(&mut self) -> Result<Installed, DriverError> {
        self.hang().await;
        self.check()?;
        let (tables, delay) = {
            let mut state = self.switch.state.lock().unwrap();
            let chance = state.trouble.wipe;
            if state.rng.random_bool(chance) {
                state.met.wiped += 1;
                state.tables = Tables::default();
            }
            if std::mem::take(&mut state.pushed_before_reading) {
                state.push_another();
            }
            (state.read(), state.reading_delay)
        };
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        Ok(Installed { tables, ..Installed::default() })
    }

    async fn next_event(&mut self) -> SwitchEvent {
        loop {
            let copied = self.switch.copied.notified();
            let changed = self.switch.changed.notified();
            let packets: Vec<PacketIn> = {
                let mut copies = self.switch.copies.lock().unwrap();
                let count = copies.len().min(PACKET_INS_AT_ONCE);
                copies.drain(..count).collect()
            };
            if !packets.is_empty() {
                return SwitchEvent::PacketIns { packets, lost: 0 };
            }
            tokio::select! {
                biased;
                changed = self.cuts.changed() => {
                    debug_assert!(changed.is_ok(), "the switch outlives its connections");
                    break;
                }
                () = copied => {}
                () = changed, if self.switch.announces() => return SwitchEvent::TablesChanged,
            }
        }
        SwitchEvent::Broken(match self.check() {
            Err(error @ DriverError::Fenced { .. }) => error,
            _ => DriverError::Lost("cut".to_owned()),
        })
    }
}
