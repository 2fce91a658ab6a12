//! A switch that is programmed through a driver of the controller.

use bluebridge_controller::core::{Body, Tables as Contents};
use bluebridge_controller::driver::{
    DriverError, Installed, SwitchConnector, SwitchDriver, SwitchEvent,
};
use bluebridge_controller::plan::{Object, Plan, TableUpdate};
use bluebridge_controller::store::ElectionId;
use bluebridge_p4::pipeline::{Counter, DropReason, Entry, Key, SwitchPort};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::runtime::Runtime;

use crate::{Outputs, Tables};

/// How long a packet-in may take.
const PACKET_IN_DEADLINE: Duration = Duration::from_secs(5);

/// How long to wait for packet-ins that must not come.
const QUIET: Duration = Duration::from_millis(20);

/// A connection of this test, which is the switch's primary.
pub struct Driven {
    runtime: Runtime,
    driver: Box<dyn SwitchDriver>,
    /// What was dropped before the present vector: a driver cannot reset the counters.
    dropped_before: BTreeMap<DropReason, u64>,
}

impl Driven {
    /// Connects and installs the pipeline.
    ///
    /// # Errors
    /// [`DriverError`].
    ///
    /// # Panics
    /// If no runtime can be started.
    pub fn connect(connector: &mut dyn SwitchConnector) -> Result<Self, DriverError> {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).enable_all().build().expect("a runtime");
        let election_id = ElectionId { high: 1, low: 1 };
        let mut driver = runtime.block_on(connector.connect(election_id))?;
        runtime.block_on(driver.ensure_pipeline())?;
        Ok(Self { runtime, driver, dropped_before: BTreeMap::new() })
    }

    fn apply(&mut self, update: TableUpdate) -> Result<(), String> {
        let results = self.runtime.block_on(self.driver.apply(&[update]));
        let results = results.map_err(|error| error.to_string())?;
        results.into_iter().try_for_each(|result| result.map_err(|error| error.to_string()))
    }

    fn insert_object(&mut self, object: Object) -> Result<(), String> {
        self.apply(TableUpdate::Insert(object))
    }

    /// Reads everything.
    ///
    /// # Errors
    /// The driver's error as a text.
    pub fn read(&mut self) -> Result<Installed, String> {
        self.runtime.block_on(self.driver.read()).map_err(|error| error.to_string())
    }

    /// The packet-ins, which should be `expected`, with their ingress ports.
    ///
    /// # Errors
    /// The driver's error as a text.
    pub fn packet_ins(&mut self, expected: usize) -> Result<Outputs, String> {
        let mut found = Outputs::new();
        loop {
            let patience = if found.len() < expected { PACKET_IN_DEADLINE } else { QUIET };
            let event = async { tokio::time::timeout(patience, self.driver.next_event()).await };
            match self.runtime.block_on(event) {
                Err(_) => return Ok(found),
                Ok(SwitchEvent::Broken(error)) => return Err(error.to_string()),
                Ok(SwitchEvent::PortsChanged | SwitchEvent::TablesChanged) => {}
                Ok(SwitchEvent::PacketIns { packets, .. }) => {
                    found.extend(packets.into_iter().map(|it| (it.ingress_port, it.frame)));
                }
            }
        }
    }
}

const fn is_redirect(key: &Key) -> bool {
    matches!(key, Key::Redirect { .. })
}

impl Tables for Driven {
    fn clear(&mut self) -> Result<(), String> {
        let installed = self.read()?;
        // A plan has no redirects, which the controller manages by themselves.
        let redirects = installed.tables.entries.iter().filter(|(key, _)| is_redirect(key));
        let redirects: Vec<_> =
            redirects.map(|(key, body)| Object::Entry(*key, body.clone())).collect();
        redirects.into_iter().try_for_each(|object| self.apply(TableUpdate::Delete(object)))?;
        let plan = Plan::new(&Contents::default(), &installed.tables);
        let updates = plan.stages().iter().flatten();
        updates.cloned().try_for_each(|update| self.apply(update))?;
        let Installed { tables: left, drops, .. } = self.read()?;
        self.dropped_before = drops;
        if left == Contents::default() { Ok(()) } else { Err(format!("{left:?} is left")) }
    }

    fn insert(&mut self, entry: &Entry) -> Result<(), String> {
        let body = Body {
            action: Some(entry.action.clone()),
            idle_timeout: entry.idle_timeout,
            metadata: entry.metadata.clone(),
        };
        self.insert_object(Object::Entry(entry.key, body))
    }

    fn entry(&mut self, key: &Key) -> Result<(Entry, Counter), String> {
        let installed = self.read()?;
        let body = installed.tables.entries.get(key).ok_or("there is no such entry")?;
        let entry = body.entry(*key).ok_or("the entry is incomplete")?;
        Ok((entry, installed.counters.get(key).copied().unwrap_or_default()))
    }

    fn set_flood_group(&mut self, group: u16) -> Result<(), String> {
        self.apply(TableUpdate::Modify(Object::FloodGroup(group)))
    }

    fn set_group(&mut self, group: u16, ports: &[SwitchPort]) -> Result<(), String> {
        self.insert_object(Object::Group(group, ports.iter().copied().collect()))
    }

    fn set_clone_session(&mut self) -> Result<(), String> {
        self.insert_object(Object::NotifySession)
    }

    fn drops(&mut self, reason: DropReason) -> Result<u64, String> {
        let before = self.dropped_before.get(&reason).copied().unwrap_or_default();
        let now = self.read()?.drops.get(&reason).copied();
        let now = now.ok_or_else(|| format!("drops for {reason:?} are not counted"))?;
        Ok(now.saturating_sub(before))
    }
}
