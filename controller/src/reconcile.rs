//! Installs the desired tables in a switch, and keeps them installed.
//!
//! Connect, read everything, write the difference, then watch for a new desired state, a broken
//! stream, and the time of the next full reading. After any failure of a connection a new one starts
//! from the first step; nothing of the old one is resumed.

use std::convert::Infallible;
use std::future::Future;
use std::mem::Discriminant;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::core::{Endpoints, GROUP_PORTS_MAX, MovedUse, Ports, Tables};
use crate::driver::{
    DriverError, Installed, Pipeline, SwitchConnector, SwitchDriver, SwitchEvent, UpdateError,
};
use crate::plan::{Plan, TableUpdate};
use crate::redirect::{LeaseCounts, PacketIn, Redirects};
use crate::store::{ElectionId, StoreError};

/// Timing of the loop.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// The interval at which the pipeline and all tables are read back.
    pub check_interval: Duration,
    /// The same while the switch announces each change, and has announced none: in case they were changed behind it.
    pub quiet_interval: Duration,
    /// Time limit of any call of a driver.
    pub call_deadline: Duration,
    /// The first wait after a failure; doubles up to `retry_max`.
    pub retry_min: Duration,
    /// The longest wait after a failure.
    pub retry_max: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            check_interval: Duration::from_millis(400),
            quiet_interval: Duration::from_secs(10),
            call_deadline: Duration::from_secs(10),
            retry_min: Duration::from_millis(50),
            retry_max: Duration::from_millis(250),
        }
    }
}

/// Reading back takes at most this share of the time, however large the tables are.
const CHECK_SHARE: u32 = 10;

/// The most changes or differences that a log line or the status names.
const SHOWN_MAX: usize = 4;

/// A desired state of the switch, and its version.
#[derive(Clone, Debug, Default)]
pub struct Desired {
    /// Counts the desired states.
    pub version: u64,
    /// The state.
    pub tables: Arc<Tables>,
    /// The endpoints with entries, to which redirects may lead.
    pub endpoints: Arc<Endpoints>,
    /// The ports for which it was computed. Nothing is written to a switch with other ports.
    pub ports: Ports,
    /// The places of `directory`.
    pub directory_size: usize,
    /// How many of them pages that moved need.
    pub moved: MovedUse,
}

/// The state of the connection to the switch.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum SwitchState {
    /// There is no connection.
    #[default]
    Disconnected,
    /// The switch has the desired tables.
    InSync,
    /// Tables are read or written.
    Syncing,
}

/// Counts since the start of the loop.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct SwitchCounts {
    /// Connections made.
    pub connects: u64,
    /// Pipelines pushed.
    pub pushes: u64,
    /// Full readings.
    pub readings: u64,
    /// Updates acknowledged.
    pub updates: u64,
    /// Updates refused.
    pub refused: u64,
    /// Differences that a reading after the first of a connection found.
    pub repaired: u64,
    /// Copies of frames.
    pub packet_ins: u64,
    /// Copies of frames that were lost because the loop was too slow.
    pub packet_ins_lost: u64,
    /// How often the switch had other ports than before.
    pub port_changes: u64,
    /// Readings that found differences, each of which `repaired` counts.
    pub differing_readings: u64,
}

/// The state of the switch, as the controller has it.
#[derive(Clone, Debug, Default)]
pub struct SwitchView {
    /// The address of the switch.
    pub uri: String,
    /// The state of the connection.
    pub state: SwitchState,
    /// The election id of the last connection.
    pub election_id: ElectionId,
    /// The last problem since everything was in sync.
    pub problem: Option<String>,
    /// Its ports.
    pub ports: Ports,
    /// The last change of its ports.
    pub port_change: Option<String>,
    /// The differences that a reading found last.
    pub difference: Option<String>,
    /// Its contents: as last read, with later writes.
    pub installed: Arc<Installed>,
    /// When it was last read.
    pub read_at: Option<std::time::Instant>,
    /// The greatest version of the desired state that was completely installed.
    pub version: u64,
    /// Counts of the loop.
    pub counts: SwitchCounts,
    /// The state of leases.
    pub leases: LeaseView,
    /// Notified by who wants the switch to be read now.
    pub look: Arc<Notify>,
    /// When it can be read again. Before that, the last reading is new.
    pub next_look: Option<std::time::Instant>,
}

/// The state of leases and redirects.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct LeaseView {
    /// Tracked leases.
    pub known: usize,
    /// The most redirects.
    pub budget: usize,
    /// Counts of copies and updates.
    pub counts: LeaseCounts,
}

/// Returns an election id above another controller's, if it can be stored.
pub type Outbid = Box<dyn Fn(ElectionId) -> Result<ElectionId, StoreError> + Send + Sync>;

/// The claim with which a controller takes a switch.
pub struct Claim {
    /// The first election id of this start.
    pub election_id: ElectionId,
    /// Whether the store has no endpoints; a switch that serves some then belongs to another
    /// controller.
    pub is_new: bool,
    /// Set if the controller must take the switch from another one, by an operator's decision. It
    /// applies until the switch is taken: after that a greater id fences this controller again.
    pub outbid: Option<Outbid>,
}

impl From<ElectionId> for Claim {
    fn from(election_id: ElectionId) -> Self {
        Self { election_id, is_new: false, outbid: None }
    }
}

/// A refused update, and the reason.
type Refusal = (TableUpdate, String);

/// The loop.
pub struct Reconciler<C> {
    connector: C,
    claim: Claim,
    timing: Timing,
    desired: watch::Receiver<Desired>,
    redirects: Redirects,
    view: watch::Sender<SwitchView>,
    /// Connections tried.
    try_count: u64,
    /// Whether updates of the last plan were refused. The next one then also deletes, because a full
    /// table could otherwise block the entries that replace its old ones.
    refused_before: bool,
    /// The refusal that was logged last since everything was in sync: the first one of its plan.
    refusal: Option<Refusal>,
    /// Whether it was logged that the switch has other tables than it acknowledged, since a reading without
    /// differences.
    differs: bool,
    /// The kinds of problems that were logged since everything was in sync.
    problems: Vec<Discriminant<DriverError>>,
    /// Whether it was logged that the tables are in sync.
    is_known_good: bool,
    /// When the switch is read again if nobody changes or wants anything, and if somebody does.
    next_check: Instant,
    next_look: Instant,
    look: Arc<Notify>,
}

impl<C: SwitchConnector> Reconciler<C> {
    /// A loop over one switch; its redirects are those of `redirects`.
    pub fn new(
        connector: C,
        claim: impl Into<Claim>,
        timing: Timing,
        redirects: Redirects,
        desired: watch::Receiver<Desired>,
    ) -> (Self, watch::Receiver<SwitchView>) {
        let uri = connector.uri();
        let look = Arc::<Notify>::default();
        let start = SwitchView { uri, look: Arc::clone(&look), ..SwitchView::default() };
        let (view, seen) = watch::channel(start);
        let now = Instant::now();
        let (try_count, refused_before) = (0, false);
        let reconciler = Self {
            connector,
            claim: claim.into(),
            timing,
            desired,
            redirects,
            view,
            try_count,
            refused_before,
            refusal: None,
            differs: false,
            problems: Vec::new(),
            is_known_good: false,
            next_check: now,
            next_look: now,
            look,
        };
        (reconciler, seen)
    }

    /// Reconciles until this controller is fenced, the switch is unusable, or the desired state is dropped.
    pub async fn run(mut self) -> DriverError {
        let mut retry = self.timing.retry_min;
        loop {
            let connected_before = self.view.borrow().counts.connects;
            let error = match self.connect_and_serve().await {
                Ok(never) => match never {},
                Err(error) => error,
            };
            self.log_problem(&error);
            // Only a connection on which everything was installed ends a series of failures: a refused pipeline
            // empties the switch with each attempt.
            let was_in_sync = self.view.borrow().problem.is_none();
            self.view.send_modify(|view| {
                view.state = SwitchState::Disconnected;
                view.problem = Some(error.to_string());
            });
            if error.is_final() || self.desired.has_changed().is_err() {
                return error;
            }
            if was_in_sync && self.view.borrow().counts.connects != connected_before {
                retry = self.timing.retry_min;
            }
            sleep(retry).await;
            retry = (retry * 2).min(self.timing.retry_max);
        }
    }

    async fn connect_and_serve(&mut self) -> Result<Infallible, DriverError> {
        let mut driver = self.connect().await?;
        self.view.send_modify(|view| {
            view.state = SwitchState::Syncing;
            view.counts.connects += 1;
        });
        self.serve(driver.as_mut()).await
    }

    /// Logs why there is no connection: each kind of problem once until everything is in sync again, and the
    /// reason for the end of the loop.
    fn log_problem(&mut self, error: &DriverError) {
        let kind = std::mem::discriminant(error);
        let uri = self.connector.uri();
        if error.is_final() {
            tracing::error!(uri, %error, "this controller cannot use the switch");
        } else if self.problems.contains(&kind) {
            tracing::debug!(uri, %error, "still no connection to the switch");
        } else {
            self.problems.push(kind);
            tracing::warn!(uri, %error, "no connection to the switch; trying again");
        }
    }

    /// Logs that the tables are in sync, if this is a change.
    fn log_in_sync(&mut self) {
        if self.is_known_good && self.problems.is_empty() && self.refusal.is_none() {
            return;
        }
        self.is_known_good = true;
        self.refusal = None;
        self.problems.clear();
        let uri = self.connector.uri();
        let (entries, id) = {
            let view = self.view.borrow();
            (view.installed.tables.count(), view.election_id)
        };
        tracing::info!(uri, entries, election_id = %id, "connected to the switch, its tables are in sync");
    }

    /// Logs that the switch has other tables than it acknowledged, once until a reading finds no difference: the
    /// repair may have to be repeated with every check.
    fn log_differences(&mut self, differences: usize, first: &str) {
        if differences == 0 {
            self.differs = false;
        } else if self.differs {
            tracing::debug!(
                differences,
                first,
                "the switch's tables still change; repairing them again"
            );
        } else if self.refused_before {
            // A switch may have executed an update whose failure it reported.
            tracing::debug!(
                differences,
                first,
                "the switch's tables differ after a refused update"
            );
        } else {
            self.differs = true;
            tracing::warn!(
                differences,
                first,
                "the switch's tables are not those that it acknowledged: another program changed them, or the \
                 switch does not keep them; repairing them"
            );
        }
    }

    /// Logs that updates of a plan were refused, once until the first of them is another one or is made.
    fn log_refused(&mut self, count: usize, refusal: Refusal) {
        let (update, error) = &refusal;
        if self.refusal.as_ref() == Some(&refusal) {
            tracing::debug!(count, %update, error, "updates were refused again");
            return;
        }
        tracing::warn!(
            count,
            %update,
            error,
            "the switch refused updates, of which this is the first; trying again until it has all its tables"
        );
        self.refusal = Some(refusal);
    }

    /// Becomes the primary, if this controller may take the switch.
    async fn connect(&mut self) -> Result<Box<dyn SwitchDriver>, DriverError> {
        let deadline = self.timing.call_deadline;
        if self.claim.is_new && self.claim.outbid.is_none() {
            // Before the election, which would end the present controller.
            let there = within(deadline, "looking", self.connector.look()).await?;
            let endpoints = there.tables.endpoint_count();
            if endpoints != 0 {
                return Err(DriverError::InUse { endpoints });
            }
        }
        loop {
            // Every try has its own id: a switch may still hold the one of the last try.
            let election_id = self.claim.election_id.connection(self.try_count);
            self.try_count += 1;
            self.view.send_modify(|view| view.election_id = election_id);
            let connecting = self.connector.connect(election_id);
            match (within(deadline, "connecting", connecting).await, &self.claim.outbid) {
                (Ok(driver), _) => {
                    tracing::debug!(uri = self.connector.uri(), %election_id, "primary of the switch");
                    self.claim.is_new = false;
                    self.claim.outbid = None;
                    return Ok(driver);
                }
                (Err(DriverError::Fenced { ours, theirs }), Some(outbid)) => {
                    tracing::warn!(%theirs, "taking the switch from another controller (--force)");
                    self.claim.election_id = outbid(theirs).map_err(|error| {
                        tracing::error!(%error, "cannot take the switch");
                        DriverError::Fenced { ours, theirs }
                    })?;
                }
                (Err(error), _) => return Err(error),
            }
        }
    }

    async fn serve(&mut self, driver: &mut dyn SwitchDriver) -> Result<Infallible, DriverError> {
        self.check(driver, true).await?;
        let mut retry = self.timing.retry_min;
        self.refused_before = false;
        loop {
            let desired = self.desired.borrow_and_update().clone();
            self.redirects.set_endpoints(&desired.endpoints);
            if desired.ports != self.view.borrow().ports {
                // The core will receive these ports and compute new tables.
                if self.wait(driver).await? {
                    self.check(driver, false).await?;
                }
                continue;
            }
            let size = desired.directory_size;
            let plan = Plan::within(&desired.tables, &self.view.borrow().installed.tables, size);
            if self.carry_out(driver, &plan).await? {
                self.view.send_modify(|view| {
                    view.state = SwitchState::InSync;
                    view.version = view.version.max(desired.version);
                    view.problem = None;
                });
                self.log_in_sync();
                self.refused_before = false;
                retry = self.timing.retry_min;
            } else {
                self.refused_before = true;
                self.next_check = Instant::now() + retry;
                retry = (retry * 2).min(self.timing.retry_max);
            }
            if self.wait(driver).await? {
                self.check(driver, false).await?;
            }
        }
    }

    /// Processes redirects until there is other work; returns whether that is the next check.
    /// Other work is checked after each batch.
    async fn wait(&mut self, driver: &mut dyn SwitchDriver) -> Result<bool, DriverError> {
        let look = Arc::clone(&self.look);
        loop {
            let next_check = self.next_check;
            let due = self.redirects.poll_timeout().map_or(next_check, Instant::from_std);
            let has_updates = self.redirects.has_updates();
            tokio::select! {
                biased;
                changed = self.desired.changed() => match changed {
                    Ok(()) => return Ok(false),
                    Err(_) => return Err(DriverError::Lost("the controller ends".to_owned())),
                },
                () = sleep_until(next_check) => return Ok(true),
                () = sleep_until(due) => self.redirects.handle_timeout(Instant::now().into_std()),
                () = look.notified() => self.next_check = next_check.min(self.next_look),
                () = std::future::ready(()), if has_updates => self.write_redirects(driver).await?,
                event = driver.next_event() => match event {
                    SwitchEvent::Broken(error) => return Err(error),
                    SwitchEvent::PortsChanged => self.read_ports(driver).await?,
                    // Perhaps before the last reading, or by this controller; it must be seen to be known.
                    SwitchEvent::TablesChanged => self.next_check = next_check.min(self.next_look),
                    SwitchEvent::PacketIns { packets, lost } => self.handle_packet_ins(&packets, lost),
                },
            }
        }
    }

    fn handle_packet_ins(&mut self, packets: &[PacketIn], lost: u64) {
        let now = Instant::now().into_std();
        for packet in packets {
            if let Err(refusal) = self.redirects.handle_packet_in(now, packet) {
                tracing::debug!(port = packet.ingress_port.0, ?refusal, "a copy was refused");
            }
        }
        self.view.send_modify(|view| {
            view.counts.packet_ins += u64::try_from(packets.len()).unwrap_or(u64::MAX);
            view.counts.packet_ins_lost += lost;
            view.leases = leases(&self.redirects);
        });
    }

    /// Writes one batch of redirects.
    async fn write_redirects(&mut self, driver: &mut dyn SwitchDriver) -> Result<(), DriverError> {
        let now = Instant::now().into_std();
        let batch = self.redirects.next_updates(now, driver.capabilities().batch_max.max(1));
        if batch.is_empty() {
            return Ok(());
        }
        let deadline = self.timing.call_deadline;
        let results = within(deadline, "writing redirects", driver.apply(&batch)).await?;
        let responded = Instant::now().into_std();
        let redirects = &mut self.redirects;
        self.view.send_modify(|view| {
            let installed = Arc::make_mut(&mut view.installed);
            for (update, result) in batch.iter().zip(&results) {
                redirects.handle_result(now, responded, update, result);
                let gone = matches!(update, TableUpdate::Delete(_))
                    && matches!(result, Err(UpdateError::NotFound(_)));
                if result.is_ok() || gone {
                    view.counts.updates += 1;
                    update.apply_to(&mut installed.tables);
                } else {
                    view.counts.refused += 1;
                }
            }
            view.leases = leases(redirects);
        });
        Ok(())
    }

    /// Lists the ports. The core computes new tables if they changed.
    async fn read_ports(&mut self, driver: &mut dyn SwitchDriver) -> Result<(), DriverError> {
        let deadline = self.timing.call_deadline;
        let ports = within(deadline, "listing the ports", driver.ports()).await?;
        if let Ports::Listed(listed) = &ports
            && listed.len() > GROUP_PORTS_MAX
        {
            return Err(DriverError::TooManyPorts { count: listed.len(), most: GROUP_PORTS_MAX });
        }
        if ports == self.view.borrow().ports {
            return Ok(());
        }
        let changes = ports.changes_since(&self.view.borrow().ports);
        let words = shortened(&changes, changes.len());
        if !changes.is_empty() {
            let uri = self.connector.uri();
            tracing::warn!(uri, changes = words, "the switch has other ports than before");
        }
        self.view.send_modify(|view| {
            view.ports = ports;
            if !changes.is_empty() {
                view.counts.port_changes += 1;
                view.port_change = Some(words);
            }
        });
        Ok(())
    }

    /// Ensures the pipeline and reads everything; sets the time of the next check.
    async fn check(
        &mut self,
        driver: &mut dyn SwitchDriver,
        first: bool,
    ) -> Result<(), DriverError> {
        let (began, deadline) = (Instant::now(), self.timing.call_deadline);
        let pipeline = within(deadline, "the pipeline", driver.ensure_pipeline()).await?;
        self.read_ports(driver).await?;
        let reading_began = Instant::now().into_std();
        let installed = within(deadline, "reading the tables", driver.read()).await?;
        let keeps_time = driver.capabilities().keeps_time;
        let now = Instant::now().into_std();
        self.redirects.handle_timeout(now);
        let entries = &installed.tables.entries;
        let redirect_differences = self.redirects.compare(reading_began, now, entries, keeps_time);
        let (differences, words) = if first {
            (0, None)
        } else {
            self.differences(redirect_differences, &installed.tables)
        };
        self.log_differences(differences, words.as_deref().unwrap_or_default());
        let least = began.elapsed() * CHECK_SHARE;
        self.next_look = Instant::now() + self.timing.check_interval.max(least);
        self.view.send_modify(|view| {
            view.counts.differing_readings += u64::from(differences != 0);
            if words.is_some() {
                view.difference = words;
            }
            view.counts.readings += 1;
            view.counts.pushes += u64::from(pipeline == Pipeline::Pushed);
            view.counts.repaired += u64::try_from(differences).unwrap_or(u64::MAX);
            view.leases = leases(&self.redirects);
            view.installed = Arc::new(installed);
            view.read_at = Some(now);
            view.next_look = Some(self.next_look.into_std());
        });
        // Differences may be made again and again, behind a switch that announces changes.
        let is_quiet = driver.capabilities().announces_changes && differences == 0;
        self.next_check = match is_quiet {
            true => Instant::now() + self.timing.quiet_interval.max(least),
            false => self.next_look,
        };
        Ok(())
    }

    /// The differences between the tables that the switch acknowledged and those that were found: their number, and
    /// some of them for people.
    fn differences(&self, redirects: usize, found: &Tables) -> (usize, Option<String>) {
        let view = self.view.borrow();
        let acknowledged = &view.installed.tables;
        let count = acknowledged.difference_count(found) + redirects;
        if count == 0 {
            return (0, None);
        }
        let entries = acknowledged.differences(found).map(|it| it.to_string()).take(SHOWN_MAX);
        let redirects = (redirects != 0).then(|| format!("redirects: {redirects}"));
        let shown: Vec<String> = entries.chain(redirects).take(SHOWN_MAX).collect();
        (count, Some(shortened(&shown, count)))
    }

    /// Executes the updates of a plan; returns whether all succeeded.
    async fn carry_out(
        &mut self,
        driver: &mut dyn SwitchDriver,
        plan: &Plan,
    ) -> Result<bool, DriverError> {
        if plan.is_empty() {
            return Ok(true);
        }
        self.view.send_modify(|view| view.state = SwitchState::Syncing);
        let batch_max = driver.capabilities().batch_max.max(1);
        let mut all_made = true;
        let (mut count, mut first) = (0, None);
        for stage in plan.stages() {
            for batch in stage.chunks(batch_max) {
                let deadline = self.timing.call_deadline;
                let results = within(deadline, "writing", driver.apply(batch)).await?;
                all_made &= results.len() == batch.len();
                count += self.record(batch, &results, &mut first);
            }
            all_made &= count == 0;
            if !all_made && !self.refused_before {
                break;
            }
        }
        if let Some(first) = first {
            self.log_refused(count, first);
        }
        Ok(all_made)
    }

    /// Records the results of a batch; returns the number of refused updates, and sets the first of the plan.
    fn record(
        &self,
        batch: &[TableUpdate],
        results: &[Result<(), UpdateError>],
        first: &mut Option<Refusal>,
    ) -> usize {
        let mut count = 0;
        self.view.send_modify(|view| {
            let installed = Arc::make_mut(&mut view.installed);
            for (update, result) in batch.iter().zip(results) {
                let gone = matches!(update, TableUpdate::Delete(_));
                match result {
                    Ok(()) => view.counts.updates += 1,
                    // The object of a deletion is already gone.
                    Err(UpdateError::NotFound(_)) if gone => {}
                    Err(error) => {
                        let error = error.to_string();
                        view.counts.refused += 1;
                        view.problem = Some(format!("an update was refused: {error}"));
                        count += 1;
                        first.get_or_insert_with(|| (update.clone(), error));
                        continue;
                    }
                }
                update.apply_to(&mut installed.tables);
            }
        });
        count
    }
}

/// Some of a list of `count`, and how many more there are.
fn shortened(list: &[String], count: usize) -> String {
    let shown = list.iter().take(SHOWN_MAX).map(String::as_str).collect::<Vec<_>>().join("; ");
    match count.saturating_sub(SHOWN_MAX) {
        0 => shown,
        more => format!("{shown}; and {more} more"),
    }
}

fn leases(redirects: &Redirects) -> LeaseView {
    let (known, budget) = (redirects.lease_count(), redirects.budget());
    LeaseView { known, budget, counts: *redirects.counts() }
}

async fn within<T>(
    deadline: Duration,
    what: &'static str,
    call: impl Future<Output = Result<T, DriverError>> + Send,
) -> Result<T, DriverError> {
    timeout(deadline, call).await.unwrap_or(Err(DriverError::Timeout(what)))
}

#[cfg(test)]
mod fake;
#[cfg(test)]
mod tests;
