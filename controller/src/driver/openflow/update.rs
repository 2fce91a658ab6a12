//! Executes updates of tables: flows and groups in an order in which nothing refers to what is missing.

use std::collections::{BTreeMap, BTreeSet};

use bluebridge_openflow::GroupCommand;
use bluebridge_p4::pipeline::{Key, SwitchPort};

use super::channel::{CHANGES_MAX, Change};
use super::compile::{Compiled, compile};
use super::flow::{self, Flow, FlowKey, Group};
use super::{OpenFlowDriver, layout, primary, reason};
use crate::core::Tables;
use crate::driver::{DriverError, UpdateError};
use crate::plan::{Object, TableUpdate};

/// The changes of one update: groups that its flows need, flows, and groups that nothing needs any more.
#[derive(Debug, Default)]
struct Changes {
    before: Vec<Change>,
    flows: Vec<Change>,
    after: Vec<Change>,
}

impl OpenFlowDriver {
    /// Executes a batch; see [`SwitchDriver::apply`](super::SwitchDriver::apply).
    pub(super) async fn execute(
        &mut self,
        batch: &[TableUpdate],
    ) -> Result<Vec<Result<(), UpdateError>>, DriverError> {
        let mut results: Vec<Result<(), UpdateError>> = vec![Ok(()); batch.len()];
        let (mut before, mut flows, mut after) = (Vec::new(), Vec::new(), Vec::new());
        for (number, (update, result)) in batch.iter().zip(&mut results).enumerate() {
            match self.changes(update) {
                Ok(changes) => {
                    let numbered = |change| (number, change);
                    before.extend(changes.before.into_iter().map(numbered));
                    flows.extend(changes.flows.into_iter().map(numbered));
                    after.extend(changes.after.into_iter().map(numbered));
                }
                Err(error) => *result = Err(error),
            }
        }
        for stage in [before, flows, after] {
            let is_good =
                |(number, _): &(usize, Change)| matches!(results.get(*number), Some(Ok(())));
            let good = stage.into_iter().filter(is_good).collect();
            self.send(good, &mut results).await?;
        }
        for (update, result) in batch.iter().zip(&results) {
            match result {
                Ok(()) => self.record(update),
                Err(_) => self.undo(update).await?,
            }
        }
        self.rewrite_groups(batch).await?;
        Ok(results)
    }

    /// Sends changes of updates, given by their numbers; the errors are added to `results`.
    pub(super) async fn send(
        &mut self,
        changes: Vec<(usize, Change)>,
        results: &mut [Result<(), UpdateError>],
    ) -> Result<(), DriverError> {
        let mut changes = changes.into_iter().peekable();
        while changes.peek().is_some() {
            let (numbers, batch): (Vec<_>, Vec<_>) = changes.by_ref().take(CHANGES_MAX).unzip();
            for (at, error) in self.channel.change(batch).await? {
                if error.is_not_primary() {
                    return Err(primary::lost(&mut self.channel, self.election_id).await);
                }
                let result = numbers.get(at).and_then(|number| results.get_mut(*number));
                if let Some(result) = result {
                    *result = Err(UpdateError::Refused(reason(&error)));
                }
            }
        }
        Ok(())
    }

    /// What an update changes, given what the switch has.
    fn changes(&self, update: &TableUpdate) -> Result<Changes, UpdateError> {
        let object = update.object();
        let tables = &self.contents.installed.tables;
        let refused = UpdateError::Refused;
        let old = present(object, tables);
        let old = old.and_then(|old| compile(&old, tables).ok()).unwrap_or_default();
        let new = match update {
            TableUpdate::Delete(_) => Compiled::default(),
            TableUpdate::Insert(_) | TableUpdate::Modify(_) => {
                compile(object, tables).map_err(refused)?
            }
        };
        let mut changes = Changes::default();
        for (id, group) in &new.groups {
            let command = self.group_command(*id);
            changes.before.push(group.message(command, *id).into());
        }
        changes.before.extend(self.egress_flows(&new));
        for flow in &new.flows {
            changes.flows.push(self.write_flow(flow).into());
        }
        let kept = |key: &FlowKey| new.flows.iter().any(|flow| flow.key() == *key);
        let mut gone: Vec<FlowKey> = old.flows.iter().map(Flow::key).collect();
        if matches!(update, TableUpdate::Delete(_)) && old.flows.is_empty() {
            // Deleting what is not known to be there is harmless.
            gone.extend(main_flow(object, tables));
        }
        changes
            .flows
            .extend(gone.iter().filter(|key| !kept(key)).map(|key| flow::delete(key).into()));
        let gone = old.groups.keys().filter(|id| !new.groups.contains_key(id));
        changes.after.extend(gone.map(|id| flow::delete_group(*id).into()));
        Ok(changes)
    }

    fn group_command(&self, id: u32) -> GroupCommand {
        if self.contents.groups.contains_key(&id) {
            GroupCommand::Modify
        } else {
            GroupCommand::Add
        }
    }

    /// Flows of ports to which no entry led before.
    fn egress_flows(&self, new: &Compiled) -> Vec<Change> {
        let new = new.egress.iter().filter(|port| !self.contents.egress.contains(port));
        new.flat_map(|port| layout::egress(*port)).map(|flow| flow.add().into()).collect()
    }

    /// A flow that exists is modified in place, which keeps its counters, unless its time limits start anew.
    fn write_flow(&self, flow: &Flow) -> bluebridge_openflow::FlowMod {
        let is_lease = flow.hard_seconds != 0;
        let expected =
            self.contents.flows.get(&flow.key()).map(|known| Flow { steps: flow.steps, ..*known });
        if expected == Some(*flow) && !is_lease { flow.modify() } else { flow.add() }
    }

    /// Enters an executed update.
    fn record(&mut self, update: &TableUpdate) {
        let tables = &self.contents.installed.tables;
        let old = present(update.object(), tables).and_then(|old| compile(&old, tables).ok());
        if let Some(old) = old {
            for flow in &old.flows {
                self.contents.flows.remove(&flow.key());
            }
            old.groups.keys().for_each(|id| drop(self.contents.groups.remove(id)));
        }
        update.apply_to(&mut self.contents.installed.tables);
        let tables = &self.contents.installed.tables;
        if let TableUpdate::Insert(object) | TableUpdate::Modify(object) = update
            && let Ok(new) = compile(object, tables)
        {
            self.contents.flows.extend(new.flows.iter().map(|flow| (flow.key(), *flow)));
            self.contents.groups.extend(new.groups);
            self.contents.egress.extend(new.egress);
        }
    }

    /// Removes what a refused update left.
    async fn undo(&mut self, update: &TableUpdate) -> Result<(), DriverError> {
        let tables = &self.contents.installed.tables;
        let (TableUpdate::Insert(object) | TableUpdate::Modify(object)) = update else {
            return Ok(());
        };
        let Ok(new) = compile(object, tables) else { return Ok(()) };
        let mut changes: Vec<Change> = Vec::new();
        let flows = new.flows.iter().filter(|flow| !self.contents.flows.contains_key(&flow.key()));
        changes.extend(flows.map(|flow| flow::delete(&flow.key()).into()));
        let groups = new.groups.keys().filter(|id| !self.contents.groups.contains_key(id));
        changes.extend(groups.map(|id| flow::delete_group(*id).into()));
        self.channel.change(changes).await.map(drop)
    }

    /// Gives the groups whose copies leave through ports with other MAC addresses their new contents, once for
    /// all updates of a batch.
    async fn rewrite_groups(&mut self, batch: &[TableUpdate]) -> Result<(), DriverError> {
        let ports: BTreeSet<SwitchPort> = batch
            .iter()
            .filter_map(|update| match update.object() {
                Object::Entry(Key::PortMac { port }, _) => Some(*port),
                _ => None,
            })
            .collect();
        let tables = &self.contents.installed.tables;
        let known = &self.contents.groups;
        let changed: BTreeMap<u32, Group> = tables
            .groups
            .iter()
            .filter(|(_, members)| !members.is_disjoint(&ports))
            .filter_map(|(id, members)| compile(&Object::Group(*id, members.clone()), tables).ok())
            .flat_map(|compiled| compiled.groups)
            .filter(|(id, group)| known.get(id).is_some_and(|known| known != group))
            .collect();
        let changes =
            changed.iter().map(|(id, group)| group.message(GroupCommand::Modify, *id).into());
        let errors = self.channel.change(changes.collect::<Vec<Change>>()).await?;
        match errors.into_values().next() {
            None => self.contents.groups.extend(changed),
            Some(error) if error.is_not_primary() => {
                return Err(primary::lost(&mut self.channel, self.election_id).await);
            }
            // The next reading finds the old contents and writes the group again.
            Some(error) => tracing::warn!(%error, "a group did not get the new address of a port"),
        }
        Ok(())
    }
}

/// The object that a switch has in place of this one.
fn present(object: &Object, tables: &Tables) -> Option<Object> {
    Some(match object {
        Object::Entry(key, _) => Object::Entry(*key, tables.entries.get(key)?.clone()),
        Object::FloodGroup(_) => Object::FloodGroup(tables.flood_group?),
        Object::Group(group, _) => Object::Group(*group, tables.groups.get(group)?.clone()),
        Object::NotifySession => tables.notify_session.then_some(Object::NotifySession)?,
    })
}

/// The flows of an object that the switch is not known to have.
fn main_flow(object: &Object, tables: &Tables) -> Vec<FlowKey> {
    compile(object, tables)
        .map_or_else(|_| Vec::new(), |it| it.flows.iter().map(Flow::key).collect())
}
