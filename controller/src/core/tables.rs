//! Tables as values: the desired and the installed state of a switch.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bluebridge_p4::pipeline::{Action, Entry, Key, SwitchPort};

/// The action of an entry and its other properties except the key.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Body {
    /// The action; `None` for one that a read-back found and this pipeline does not have.
    pub action: Option<Action>,
    /// The idle timeout.
    pub idle_timeout: Option<Duration>,
    /// Opaque to the switch.
    pub metadata: Vec<u8>,
}

impl Body {
    /// An action without timeout or metadata.
    #[must_use]
    pub const fn new(action: Action) -> Self {
        Self { action: Some(action), idle_timeout: None, metadata: Vec::new() }
    }

    /// The entry with a key; `None` if the action is unknown.
    #[must_use]
    pub fn entry(&self, key: Key) -> Option<Entry> {
        let action = self.action.clone()?;
        Some(Entry {
            key,
            action,
            idle_timeout: self.idle_timeout,
            metadata: self.metadata.clone(),
        })
    }
}

/// The entries of a switch that are compared as a whole: all except the redirects.
pub(crate) fn compared(tables: &Tables) -> impl Iterator<Item = (&Key, &Body)> {
    tables.entries.iter().filter(|(key, _)| !matches!(key, Key::Redirect { .. }))
}

/// Everything that can be programmed.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Tables {
    /// Every table entry.
    pub entries: BTreeMap<Key, Body>,
    /// Every multicast group.
    pub groups: BTreeMap<u16, BTreeSet<SwitchPort>>,
    /// The group that `l2` floods through.
    pub flood_group: Option<u16>,
    /// Whether the clone session of `notify` exists.
    pub notify_session: bool,
}

impl Tables {
    /// The number of entries, groups and settings that differ from another's. Redirects, which expire by
    /// themselves, are compared elsewhere ([`crate::redirect::Redirects::compare`]).
    #[must_use]
    pub fn difference_count(&self, other: &Self) -> usize {
        let one_sided = |a: &Self, b: &Self| {
            compared(a).filter(|(key, body)| b.entries.get(key) != Some(body)).count()
                + a.groups.iter().filter(|(id, ports)| b.groups.get(id) != Some(ports)).count()
        };
        let only_there = compared(other).filter(|(key, _)| !self.entries.contains_key(key)).count()
            + other.groups.keys().filter(|id| !self.groups.contains_key(id)).count();
        one_sided(self, other)
            + only_there
            + usize::from(self.flood_group != other.flood_group)
            + usize::from(self.notify_session != other.notify_session)
    }

    /// The number of endpoints that may send. The store records every endpoint before the switch has its entries.
    #[must_use]
    pub fn endpoint_count(&self) -> usize {
        self.entries.keys().filter(|key| matches!(key, Key::IngressGuard { .. })).count()
    }

    /// The number of redirects.
    #[must_use]
    pub fn redirect_count(&self) -> usize {
        self.entries.len() - compared(self).count()
    }

    /// The ports of every group, also of those that only `other` has.
    #[must_use]
    pub fn group_ports(&self, other: &Self) -> BTreeMap<u32, Vec<u16>> {
        let both = other.groups.iter().chain(&self.groups);
        both.map(|(group, ports)| {
            (u32::from(*group), ports.iter().map(|SwitchPort(port)| *port).collect())
        })
        .collect()
    }

    /// The number of entries, groups and settings.
    #[must_use]
    pub fn count(&self) -> usize {
        self.entries.len()
            + self.groups.len()
            + usize::from(self.flood_group.is_some())
            + usize::from(self.notify_session)
    }
}
