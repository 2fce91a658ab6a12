//! Tables as values: the desired and the installed state of a switch.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use bluebridge_p4::declaration::Table;
use bluebridge_p4::pipeline::{Action, Entry, Key, SwitchPort};
use bluebridge_p4::words::{PortNames, act_of, match_of};

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

    /// The action, for people; `groups` are the ports of the multicast groups.
    pub(crate) fn words(&self, groups: &BTreeMap<u32, Vec<u16>>, names: &PortNames) -> String {
        match &self.action {
            None => "an action of another controller".to_owned(),
            Some(action) => act_of(action, groups, names).to_string(),
        }
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
        self.differences(other).count()
    }

    /// What differs in `found`.
    pub(crate) fn differences<'a>(
        &'a self,
        found: &'a Self,
    ) -> impl Iterator<Item = Difference<'a>> {
        let entries = compared(self)
            .map(|(key, body)| Difference::Entry(key, Some(body), found.entries.get(key)));
        let groups = self
            .groups
            .iter()
            .map(|(id, ports)| Difference::Group(*id, Some(ports), found.groups.get(id)));
        let more_entries = compared(found)
            .filter(|(key, _)| !self.entries.contains_key(key))
            .map(|(key, body)| Difference::Entry(key, None, Some(body)));
        let more_groups = found
            .groups
            .iter()
            .filter(|(id, _)| !self.groups.contains_key(id))
            .map(|(id, ports)| Difference::Group(*id, None, Some(ports)));
        let flood = Difference::FloodGroup(self.flood_group, found.flood_group);
        let session = Difference::NotifySession(self.notify_session, found.notify_session);
        entries
            .chain(groups)
            .chain(more_entries)
            .chain(more_groups)
            .chain([flood, session])
            .filter(Difference::is_one)
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

/// An entry, group or setting as it must be and as it was found. Its text is for people.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Difference<'a> {
    Entry(&'a Key, Option<&'a Body>, Option<&'a Body>),
    FloodGroup(Option<u16>, Option<u16>),
    Group(u16, Option<&'a BTreeSet<SwitchPort>>, Option<&'a BTreeSet<SwitchPort>>),
    NotifySession(bool, bool),
}

impl Difference<'_> {
    fn is_one(&self) -> bool {
        match self {
            Self::Entry(_, expected, found) => expected != found,
            Self::FloodGroup(expected, found) => expected != found,
            Self::Group(_, expected, found) => expected != found,
            Self::NotifySession(expected, found) => expected != found,
        }
    }
}

impl fmt::Display for Difference<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (expected, found) = match self {
            Self::Entry(key, expected, found) => {
                f.write_str(&entry_words(key))?;
                let words = |body: &Body| body.words(&BTreeMap::new(), &PortNames::new());
                (expected.map(words), found.map(words))
            }
            Self::FloodGroup(expected, found) => {
                f.write_str("the flood group of l2")?;
                let words = |group: &u16| format!("group {group}");
                (expected.as_ref().map(words), found.as_ref().map(words))
            }
            Self::Group(id, expected, found) => {
                write!(f, "group {id}")?;
                (expected.map(ports_words), found.map(ports_words))
            }
            Self::NotifySession(expected, found) => {
                f.write_str("the clone session")?;
                let words = |is_there: &bool| is_there.then(|| "to the controller".to_owned());
                (words(expected), words(found))
            }
        };
        match (expected, found) {
            (Some(expected), Some(found)) if expected == found => {
                write!(f, " has another timeout or metadata")
            }
            (Some(expected), Some(found)) => write!(f, " is \"{found}\", not \"{expected}\""),
            (Some(expected), None) => write!(f, " is missing (\"{expected}\")"),
            (None, Some(found)) => write!(f, " is foreign (\"{found}\")"),
            (None, None) => Ok(()),
        }
    }
}

/// The table and the key of an entry, for people.
pub(crate) fn entry_words(key: &Key) -> String {
    format!("{} {}", Table::of(key).name(), match_of(key, &PortNames::new()))
}

/// The ports of a group, for people.
pub(crate) fn ports_words(ports: &BTreeSet<SwitchPort>) -> String {
    let ports: Vec<String> = ports.iter().map(|port| port.0.to_string()).collect();
    if ports.is_empty() { "no ports".to_owned() } else { format!("ports {}", ports.join(" ")) }
}
