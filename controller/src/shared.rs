//! The core, its store, the desired and the actual state of each switch, and the tasks that wait for them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use bluebridge_wire::NodeId;
use futures::future::select_all;
use tokio::sync::{Mutex, broadcast, watch};

use crate::core::{Change, Core, CoreConfig, MovedUse, Place, Ports, Stored, SwitchId};
use crate::reconcile::{Desired, SwitchState, SwitchView};
use crate::store::{ElectionId, Store, StoreError};

/// Changes that a watcher may be behind before it gets a new snapshot.
const WATCH_BACKLOG: usize = 1024;

/// How soon an order that a server refused, and that must be executed some time, is given again.
const ORDERS_RETRY: Duration = Duration::from_secs(10);

/// Bits of a version that count within one start.
const VERSION_BITS: u32 = 32;

/// Counters of the northbound API.
#[derive(Debug, Default)]
pub(crate) struct CallCounts {
    pub(crate) joins: AtomicU64,
    pub(crate) heartbeats: AtomicU64,
    pub(crate) leaves: AtomicU64,
    pub(crate) refused: AtomicU64,
}

/// The running state shared by all tasks.
#[derive(Debug)]
pub(crate) struct SharedState {
    core: Mutex<Core>,
    /// Empty once the controller has ended; open connections may exist a little longer.
    store: std::sync::Mutex<Option<Arc<Store>>>,
    /// By switch.
    switches: Vec<SwitchEnds>,
    altered: broadcast::Sender<NodeId>,
    /// The version of the orders of migrations that are due.
    orders: watch::Sender<u64>,
    /// Whether nothing is due in the core before its timeout.
    is_quiet: watch::Sender<bool>,
    /// Whether memory moves by itself, or an operator asks what would.
    rebalances: watch::Sender<bool>,
    failure: watch::Sender<Option<Arc<StoreError>>>,
    pub(crate) counts: CallCounts,
    pub(crate) started: Instant,
    /// Whether the store had no endpoints at the start.
    was_empty: bool,
}

/// The ends of the channels to the loop over a switch.
#[derive(Debug)]
pub(crate) struct SwitchEnds {
    pub(crate) desired: watch::Sender<Desired>,
    pub(crate) view: watch::Receiver<SwitchView>,
}

impl SharedState {
    /// The state of a controller of these switches, one for each of the configured topology.
    pub(crate) fn new(
        config: CoreConfig,
        store: Arc<Store>,
        stored: Stored,
        switches: Vec<SwitchEnds>,
    ) -> Self {
        let now = Instant::now();
        let was_empty = stored.nodes.is_empty();
        let first_version = store.start_count() << VERSION_BITS;
        let mut core = Core::new(config, stored, first_version, now);
        for (switch, ports) in ports_of(&switches) {
            core.learn_ports(switch, ports);
        }
        publish(&mut core, &switches);
        Self {
            core: Mutex::new(core),
            store: std::sync::Mutex::new(Some(store)),
            switches,
            altered: broadcast::channel(WATCH_BACKLOG).0,
            orders: watch::channel(0).0,
            is_quiet: watch::channel(false).0,
            rebalances: watch::channel(true).0,
            failure: watch::channel(None).0,
            counts: CallCounts::default(),
            started: now,
            was_empty,
        }
    }

    /// Records that another controller took the switch, so that a restart does not take it back.
    pub(crate) fn note_fenced(&self, by: ElectionId) {
        let store = self.store.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(Err(error)) = store.map(|store| store.note_fenced(by)) {
            tracing::error!(%error, "cannot record that another controller has the switch");
        }
    }

    /// Closes the store: changes without a response are discarded.
    pub(crate) fn close(&self) {
        drop(self.store.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Whether this controller may respond to endpoints. With an empty store it may only once it has its
    /// switches: before that it may have been started by mistake beside another controller, or with a lost
    /// store, and its response "unknown" would expel the other one's clients.
    pub(crate) fn is_ready(&self) -> bool {
        let connected = |switch: &SwitchEnds| switch.view.borrow().counts.connects > 0;
        !self.was_empty || self.switches.iter().all(connected)
    }

    /// Reads the core.
    pub(crate) async fn look<T>(&self, look: impl FnOnce(&Core) -> T) -> T {
        look(&*self.core.lock().await)
    }

    /// Changes the core. When this returns, stored changes are on disk and the resulting tables are
    /// desired, even if the caller stops waiting.
    pub(crate) async fn change<T: Send + 'static>(
        self: &Arc<Self>,
        change: impl FnOnce(&mut Core, Instant) -> T + Send + 'static,
    ) -> Result<T, Arc<StoreError>> {
        let this = Arc::clone(self);
        let task = tokio::spawn(async move {
            let mut core = this.core.lock().await;
            if let Some(error) = this.failure.borrow().clone() {
                return Err(error);
            }
            let result = change(&mut core, Instant::now());
            if let Err(error) = this.commit(core.take_changes()).await {
                // From here on the core is ahead of the store, so this controller must end.
                let error = Arc::new(error);
                this.failure.send_replace(Some(Arc::clone(&error)));
                return Err(error);
            }
            // Logged only after it is stored, when it is final.
            for event in core.take_events() {
                event.log();
            }
            for id in core.take_altered() {
                // There may be no watcher.
                drop(this.altered.send(id));
            }
            publish(&mut core, &this.switches);
            // What orders follow from is on disk now.
            let version = core.migrations().version();
            this.orders.send_if_modified(|known| std::mem::replace(known, version) != version);
            let rebalances = core.rebalances(Instant::now());
            this.rebalances
                .send_if_modified(|known| std::mem::replace(known, rebalances) != rebalances);
            let is_quiet = core.is_quiet();
            this.is_quiet.send_if_modified(|known| std::mem::replace(known, is_quiet) != is_quiet);
            Ok(result)
        });
        task.await.unwrap_or_else(|error| Err(Arc::new(StoreError::Io(error.to_string()))))
    }

    async fn commit(&self, changes: Vec<Change>) -> Result<(), StoreError> {
        if changes.is_empty() {
            return Ok(());
        }
        let store = self.store.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let store = store.ok_or_else(|| StoreError::Io("it is closed".to_owned()))?;
        let committing = tokio::task::spawn_blocking(move || store.commit(&changes));
        committing.await.map_err(|error| StoreError::Io(error.to_string())).flatten()
    }

    /// Waits for the store to fail.
    pub(crate) async fn failed(&self) -> Arc<StoreError> {
        let mut failure = self.failure.subscribe();
        loop {
            if let Some(error) = failure.borrow_and_update().clone() {
                return error;
            }
            if failure.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// A receiver of node changes.
    pub(crate) fn watch(&self) -> broadcast::Receiver<NodeId> {
        self.altered.subscribe()
    }

    /// A receiver that learns when other orders of migrations may be due.
    pub(crate) fn orders(&self) -> watch::Receiver<u64> {
        self.orders.subscribe()
    }

    /// A receiver that learns when memory begins to move by itself.
    pub(crate) fn rebalances(&self) -> watch::Receiver<bool> {
        self.rebalances.subscribe()
    }

    /// Waits until every switch has the present desired state, at most for `limit`.
    pub(crate) async fn installed(&self, limit: Duration) -> bool {
        self.installed_where(limit, |_, view, version| has(view, version)).await
    }

    /// Waits until the switch of an endpoint, and every other one that is connected, has the present desired
    /// state, at most for `limit`. A lost switch of another rack must not delay this one.
    pub(crate) async fn installed_for(&self, own: Option<SwitchId>, limit: Duration) -> bool {
        let done = |id, view: &SwitchView, version| serves(own, id, view, version);
        self.installed_where(limit, done).await
    }

    async fn installed_where(
        &self,
        limit: Duration,
        done: impl Fn(SwitchId, &SwitchView, u64) -> bool,
    ) -> bool {
        let all = async {
            for (id, switch) in (0..).map(SwitchId).zip(&self.switches) {
                let version = switch.desired.borrow().version;
                switch.view.clone().wait_for(|view| done(id, view, version)).await?;
            }
            Ok::<_, watch::error::RecvError>(())
        };
        matches!(tokio::time::timeout(limit, all).await, Ok(Ok(())))
    }

    /// Whether the switches have the present desired state, as [`Self::installed_for`] wants it.
    pub(crate) fn is_installed_for(&self, own: Option<SwitchId>) -> bool {
        (0..).map(SwitchId).zip(&self.switches).all(|(id, switch)| {
            let version = switch.desired.borrow().version;
            serves(own, id, &switch.view.borrow(), version)
        })
    }

    /// The actual and the desired state of each switch.
    pub(crate) fn switches(&self) -> Vec<(SwitchView, Desired)> {
        let both =
            |switch: &SwitchEnds| (switch.view.borrow().clone(), switch.desired.borrow().clone());
        self.switches.iter().map(both).collect()
    }

    /// Has the switches read again whose last reading is not new any more, and waits for that, at most for `limit`.
    pub(crate) async fn read_switches(&self, limit: Duration) {
        let now = Instant::now();
        let reading = async {
            for switch in &self.switches {
                let mut view = switch.view.clone();
                let before = {
                    let view = view.borrow();
                    if view.next_look.is_none_or(|at| now < at) {
                        continue;
                    }
                    view.look.notify_one();
                    view.read_at
                };
                // The controller ends if its loop has ended.
                let is_over = |view: &SwitchView| {
                    view.read_at != before || view.state == SwitchState::Disconnected
                };
                let _ = view.wait_for(is_over).await;
            }
        };
        let _ = tokio::time::timeout(limit, reading).await;
    }

    /// Waits until a switch has other ports than these.
    async fn other_ports(&self, known: &[Ports]) -> Result<(), watch::error::RecvError> {
        let waits = self.switches.iter().zip(known).map(|(switch, known)| {
            let mut view = switch.view.clone();
            Box::pin(async move { view.wait_for(|view| view.ports != *known).await.map(drop) })
        });
        select_all(waits).await.0
    }

    /// Advances the core's time, and passes the switches' ports to it.
    ///
    /// While everything is in order, only missing heartbeats are expected, and their time is known. It sleeps less than
    /// an interval of heartbeats even then: how long this process was stopped shows at the end of a sleep, and is
    /// excused before nodes count as silent.
    pub(crate) async fn run_core(self: Arc<Self>) -> Arc<StoreError> {
        let pace = self.look(|core| core.config().heartbeat_interval).await / 4;
        let pace = pace.max(Duration::from_millis(10));
        let mut is_quiet = self.is_quiet.subscribe();
        let mut missing_before = Vec::new();
        let mut retried = Instant::now();
        let mut due = Instant::now();
        loop {
            let ports: Vec<_> = ports_of(&self.switches).collect();
            // A process that was stopped, or a host that was suspended, continues here, perhaps before
            // it reads the heartbeats that arrived meanwhile.
            let stalled = due.elapsed();
            let retries = retried.elapsed() >= ORDERS_RETRY;
            if retries {
                retried = Instant::now();
            }
            let tending = self.change(move |core, now| {
                if retries {
                    core.migrations_mut().retry();
                }
                if stalled > pace {
                    core.excuse_silence(now, stalled);
                }
                core.handle_timeout(now);
                for (switch, ports) in ports {
                    core.learn_ports(switch, ports);
                }
                let name = |place: Place| core.config().topology.name(place.switch).to_owned();
                core.missing_ports().into_iter().map(|it| (name(it), it.port)).collect::<Vec<_>>()
            });
            match tending.await {
                Ok(missing) => {
                    for place @ (switch, port) in &missing {
                        if !missing_before.contains(place) {
                            let port = port.0;
                            tracing::warn!(
                                switch,
                                port,
                                "the switch does not have this configured port"
                            );
                        }
                    }
                    missing_before = missing;
                }
                Err(error) => return error,
            }
            let was_quiet = *is_quiet.borrow_and_update();
            // The views change with every update, their ports rarely.
            let (ports, timeout) =
                self.look(|core| (core.all_ports().to_vec(), core.poll_timeout())).await;
            let now = Instant::now();
            due = now + if was_quiet { pace * 3 } else { pace };
            if let Some(timeout) = timeout {
                // One that has passed leads to nothing more.
                due = due.min(timeout.max(now + pace));
            }
            tokio::select! {
                () = tokio::time::sleep_until(due.into()) => {}
                Ok(()) = is_quiet.changed() => {}
                found = self.other_ports(&ports) => if found.is_err() {
                    // The loop over a switch has ended, and the controller will end soon.
                    tokio::time::sleep(pace).await;
                },
            }
        }
    }

    pub(crate) fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

fn has(view: &SwitchView, version: u64) -> bool {
    view.state == SwitchState::InSync && view.version >= version
}

/// Whether a switch has the desired state of a version, or may be without it for an endpoint of the switch `own`.
fn serves(own: Option<SwitchId>, id: SwitchId, view: &SwitchView, version: u64) -> bool {
    has(view, version) || Some(id) != own && view.state == SwitchState::Disconnected
}

/// The ports of each switch, as last seen.
fn ports_of(switches: &[SwitchEnds]) -> impl Iterator<Item = (SwitchId, Ports)> + '_ {
    (0..).map(SwitchId).zip(switches.iter().map(|switch| switch.view.borrow().ports.clone()))
}

/// Logs that pages that moved have no entries for lack of room, and that all have again.
fn log_use(switch: &str, before: MovedUse, now: MovedUse) {
    let MovedUse { needed, there, budget } = now;
    match (before.is_complete(), now.is_complete()) {
        (true, false) => tracing::warn!(
            switch,
            needed,
            there,
            budget,
            "too few directory entries for all pages that moved; their homes lead clients to the others"
        ),
        (false, true) => {
            tracing::info!(switch, there, "all pages that moved have directory entries again");
        }
        _ => {}
    }
}

fn publish(core: &mut Core, switches: &[SwitchEnds]) {
    if !core.take_dirty() {
        return;
    }
    for (switch, ends) in (0..).map(SwitchId).zip(switches) {
        let ((tables, moved), endpoints) = (core.desired_with_use(switch), core.endpoints(switch));
        let ports = core.ports(switch);
        let name = core.config().topology.name(switch);
        ends.desired.send_if_modified(|desired| {
            log_use(name, desired.moved, moved);
            desired.moved = moved;
            desired.directory_size = core.config().directory_size;
            let changed = *desired.tables != tables
                || *desired.endpoints != endpoints
                || desired.ports != *ports;
            if changed {
                desired.version += 1;
                desired.ports = ports.clone();
                desired.tables = Arc::new(tables);
                if *desired.endpoints != endpoints {
                    desired.endpoints = Arc::new(endpoints);
                }
            }
            changed
        });
    }
}

#[cfg(test)]
mod tests;
