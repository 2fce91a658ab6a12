//! The difference between desired and installed state of a switch, in an order that does not disturb
//! traffic.
//!
//! A switch may reorder the updates of a batch, so order exists only between stages: a stage is
//! acknowledged before the next begins. First come objects that others refer to (MAC addresses of ports,
//! then groups), then routes to nodes, then permissions to send, then entries with several destinations; deletions
//! have the opposite order. A changed entry is modified in place, so that no packet misses it. Only entries for pages that
//! moved may go before others come, if there is no room for both: they are hints.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use bluebridge_p4::pipeline::{Key, SwitchPort};
use bluebridge_p4::words::PortNames;
use bluebridge_wire::address::NODE_PREFIX_LEN;

use crate::core::{Body, Tables, compared, entry_words, ports_words};

/// An object that can be programmed, with its value.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Object {
    /// A table entry.
    Entry(Key, Body),
    /// The group that `l2` floods through.
    FloodGroup(u16),
    /// A multicast group.
    Group(u16, BTreeSet<SwitchPort>),
    /// The clone session of `notify`.
    NotifySession,
}

/// One change of a switch. A deletion contains the deleted object; only its key counts.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum TableUpdate {
    /// Deletes an existing object.
    Delete(Object),
    /// Adds a new object.
    Insert(Object),
    /// Replaces an existing object.
    Modify(Object),
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Entry(key, body) => {
                let action = body.words(&BTreeMap::new(), &PortNames::new());
                write!(f, "{}, \"{action}\"", entry_words(key))
            }
            Self::FloodGroup(group) => write!(f, "the flood group of l2, group {group}"),
            Self::Group(group, ports) => write!(f, "group {group}, {}", ports_words(ports)),
            Self::NotifySession => f.write_str("the clone session"),
        }
    }
}

impl fmt::Display for TableUpdate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self {
            Self::Delete(_) => "delete",
            Self::Insert(_) => "add",
            Self::Modify(_) => "change",
        };
        write!(f, "{what} {}", self.object())
    }
}

impl TableUpdate {
    /// The changed object.
    #[must_use]
    pub const fn object(&self) -> &Object {
        match self {
            Self::Delete(object) | Self::Insert(object) | Self::Modify(object) => object,
        }
    }

    /// Applies the change to a copy of the switch's tables.
    pub fn apply_to(&self, tables: &mut Tables) {
        match self {
            Self::Insert(object) | Self::Modify(object) => match object.clone() {
                Object::Entry(key, body) => drop(tables.entries.insert(key, body)),
                Object::FloodGroup(group) => tables.flood_group = Some(group),
                Object::Group(group, ports) => drop(tables.groups.insert(group, ports)),
                Object::NotifySession => tables.notify_session = true,
            },
            Self::Delete(object) => match object {
                Object::Entry(key, _) => drop(tables.entries.remove(key)),
                Object::FloodGroup(_) => tables.flood_group = None,
                Object::Group(group, _) => drop(tables.groups.remove(group)),
                Object::NotifySession => tables.notify_session = false,
            },
        }
    }
}

/// Stages of additions and replacements; deletions have the opposite order.
const STAGES: usize = 5;

/// The stage of groups and the clone session.
const GROUP_STAGE: usize = 1;

/// The stage of a deletion, given that of the addition: the last addition is deleted first.
const fn last_call(stage: usize) -> usize {
    2 * STAGES - 1 - stage
}

/// Updates in stages; each stage must be acknowledged before the next.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Plan {
    stages: Vec<Vec<TableUpdate>>,
}

impl Plan {
    /// The plan that turns `actual` into `desired`, without redirects: they have a faster path
    /// ([`crate::redirect::Redirects`]).
    #[must_use]
    pub fn new(desired: &Tables, actual: &Tables) -> Self {
        Self::within(desired, actual, usize::MAX)
    }

    /// As [`Self::new`], for a switch whose `directory` has so many places. If old and new entries do not fit together,
    /// the old ones of pages go first: without them the home leads clients to pages that moved.
    #[must_use]
    pub fn within(desired: &Tables, actual: &Tables, directory_size: usize) -> Self {
        let all = actual
            .entries
            .keys()
            .chain(desired.entries.keys().filter(|key| !actual.entries.contains_key(key)));
        let lacks_room =
            all.filter(|key| matches!(key, Key::Directory { .. })).count() > directory_size;
        let mut room = Vec::new();
        let mut stages = vec![Vec::new(); 2 * STAGES];
        for (key, body) in compared(desired) {
            let object = || Object::Entry(*key, body.clone());
            match actual.entries.get(key) {
                None => stages[stage(key)].push(TableUpdate::Insert(object())),
                Some(there) if there != body => {
                    stages[stage(key)].push(TableUpdate::Modify(object()));
                }
                Some(_) => {}
            }
        }
        for (group, ports) in &desired.groups {
            let object = || Object::Group(*group, ports.clone());
            match actual.groups.get(group) {
                None => stages[GROUP_STAGE].push(TableUpdate::Insert(object())),
                Some(there) if there != ports => {
                    stages[GROUP_STAGE].push(TableUpdate::Modify(object()));
                }
                Some(_) => {}
            }
        }
        let foreign = compared(actual).filter(|(key, _)| !desired.entries.contains_key(key));
        for (key, body) in foreign {
            let update = TableUpdate::Delete(Object::Entry(*key, body.clone()));
            if lacks_room && is_of_pages(key) {
                room.push(update);
            } else {
                stages[last_call(stage(key))].push(update);
            }
        }
        let foreign = actual.groups.iter().filter(|(id, _)| !desired.groups.contains_key(id));
        for (group, ports) in foreign {
            let update = TableUpdate::Delete(Object::Group(*group, ports.clone()));
            stages[last_call(GROUP_STAGE)].push(update);
        }
        plan_settings(desired, actual, &mut stages);
        stages.insert(0, room);
        stages.retain(|stage| !stage.is_empty());
        Self { stages }
    }

    /// Whether it has no updates.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.stages.is_empty()
    }

    /// The stages in their order, none empty.
    #[must_use]
    pub fn stages(&self) -> &[Vec<TableUpdate>] {
        &self.stages
    }
}

fn plan_settings(desired: &Tables, actual: &Tables, stages: &mut [Vec<TableUpdate>]) {
    match (desired.notify_session, actual.notify_session) {
        (true, false) => stages[GROUP_STAGE].push(TableUpdate::Insert(Object::NotifySession)),
        (false, true) => {
            stages[last_call(GROUP_STAGE)].push(TableUpdate::Delete(Object::NotifySession));
        }
        _ => {}
    }
    match (desired.flood_group, actual.flood_group) {
        (Some(group), there) if there != Some(group) => {
            stages[STAGES - 1].push(TableUpdate::Modify(Object::FloodGroup(group)));
        }
        (None, Some(group)) => {
            stages[STAGES].push(TableUpdate::Delete(Object::FloodGroup(group)));
        }
        _ => {}
    }
}

/// Whether an entry is for pages, and not for whole nodes.
const fn is_of_pages(key: &Key) -> bool {
    matches!(key, Key::Directory { prefix_len, .. } if *prefix_len > NODE_PREFIX_LEN)
}

/// The stage in which an entry of a table is added.
const fn stage(key: &Key) -> usize {
    match key {
        Key::PortMac { .. } => 0,
        Key::Directory { .. } | Key::L2 { .. } | Key::Redirect { .. } => 2,
        Key::IngressGuard { .. } => 3,
        Key::Anycast { .. } | Key::Multicast { .. } | Key::Notify { .. } => 4,
    }
}

#[cfg(test)]
mod tests;
