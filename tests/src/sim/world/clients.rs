//! The clients' actions: send, end operations, begin new ones.

use core::time::Duration;

use bluebridge_protocol::requester::{Failure, Output, StartError};
use bluebridge_wire::NodeId;
use rand::Rng;

use super::{Event, Phase, World};
use crate::sim::{
    client::Client,
    task::{Slot, Task},
    workload,
};

/// The time after which an outstanding operation is cancelled.
const CANCEL: Duration = Duration::from_micros(700);

/// How late after its deadline an operation may end: timers are checked once an event.
const LATE: Duration = Duration::from_micros(10);

impl World {
    /// Lets a client send, end and begin operations until it must wait.
    pub(super) fn pump(&mut self, client: usize) -> Result<(), String> {
        if self.is_frozen(client) {
            return Ok(());
        }
        loop {
            let now = self.local(client);
            let (share, working) = (self.plan.refuse, self.phase == Phase::Working);
            loop {
                let rng = &mut self.refusals;
                let refuse = || working && share > 0.0 && rng.random_bool(share);
                let Some(frame) = self.clients[client].poll_frame(now, refuse) else { break };
                self.send_up(client, frame);
            }
            let mut ended = false;
            while let Some((slot, completion)) = self.clients[client].poll_end() {
                ended = true;
                self.end(client, &slot, completion.result)?;
            }
            let began = self.begin(client)?;
            if !ended && !began {
                break;
            }
        }
        let due = self.clients[client].poll_timeout();
        self.set_timer(client, due);
        self.move_on();
        Ok(())
    }

    pub(super) fn end(
        &mut self,
        client: usize,
        slot: &Slot,
        result: Result<Output, Failure>,
    ) -> Result<(), String> {
        trace!(self, "client {client} ends {:?}: {result:?}", slot.task);
        let late = self.local(client).saturating_since(slot.deadline);
        if late > LATE && !self.report.frozen.contains(&client) {
            return Err(format!("{:?} ended {late:?} after its deadline", slot.task));
        }
        self.report.operations += 1;
        if self.phase == Phase::Reading && result.is_err() {
            return Err(format!(
                "{:?} ended with {result:?} though all faults are over",
                slot.task
            ));
        }
        let checked = self.ledger.complete(self.now, client, slot, result);
        checked.map_err(|error| format!("client {client}, {:?}: {error}", slot.task))
    }

    /// Begins an operation if the client may; returns whether it did.
    pub(super) fn begin(&mut self, client: usize) -> Result<bool, String> {
        let task = match self.phase {
            Phase::Working => {
                let busy = self.clients[client].slots.count() >= self.plan.depth;
                if busy || self.started >= self.plan.operation_count {
                    return Ok(false);
                }
                self.started += 1;
                self.faults()?;
                // The fault may concern this client.
                if self.is_frozen(client) {
                    return Ok(false);
                }
                self.workload.choose(&self.ledger, client, &mut self.rng)
            }
            Phase::Quiet => return Ok(false),
            Phase::Reading => {
                let mine = self.final_tasks.iter().position(|(owner, _)| *owner == client);
                let busy = self.clients[client].slots.count() >= 4;
                let Some(mine) = mine.filter(|_| !busy) else { return Ok(false) };
                self.final_tasks.remove(mine).expect("found a moment ago").1
            }
        };
        self.start(client, task)
    }

    pub(super) fn start(&mut self, client: usize, task: Task) -> Result<bool, String> {
        let nodes: Vec<_> = self.ledger.servers.iter().map(|facts| facts.node).collect();
        let operation = task.operation(&|region| self.ledger.pointer(region), &nodes);
        let now = self.local(client);
        let (least, most) = self.plan.deadlines;
        let patience = match self.phase {
            Phase::Working => least + (most - least).mul_f64(self.rng.random()),
            _ => Duration::from_secs(10),
        };
        let deadline = now + patience;
        trace!(self, "client {client} starts {task:?}: {operation:?}");
        self.ledger.begin(self.now, &task);
        let outgoing = workload::outgoing(&task, &mut self.rng);
        let incoming = workload::incoming(&task);
        let under_way = self.clients[client].slots.iter().map(|slot| slot.start);
        let oldest = under_way.min().unwrap_or(self.now);
        let slot = Slot { task, start: self.now, oldest, deadline, outgoing, incoming };
        let index = client;
        let Client { requester, slots, .. } = &mut self.clients[client];
        let token = slots.insert(slot);
        match requester.start_until(now, operation, token, deadline) {
            Ok(id) => {
                if self.phase == Phase::Working && self.rng.random_bool(self.plan.cancel) {
                    self.push(self.now + CANCEL, Event::Cancel { client: index, id, token });
                }
                Ok(true)
            }
            Err(StartError::Servers) if self.phase == Phase::Working => {
                let slot = slots.remove(token).ok_or("the slot of a moment ago")?;
                self.end(client, &slot, Err(Failure::TooManyServers { node: NodeId(0) }))?;
                Ok(true)
            }
            // Reads of another server must end first.
            Err(StartError::Servers) if slots.count() > 1 => {
                let slot = slots.remove(token).ok_or("the slot of a moment ago")?;
                self.final_tasks.push_back((client, slot.task));
                Ok(false)
            }
            Err(error) => Err(format!("{operation:?} was not begun: {error}")),
        }
    }
}
