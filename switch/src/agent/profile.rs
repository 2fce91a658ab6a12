//! Members and groups of the action profile of `anycast` (P4Runtime specification, section 9.2).
//!
//! The data plane stores only complete choices; only the agent records which member or group an
//! entry named. After a restart of the agent such entries read back as one-shot action sets.

use std::collections::BTreeMap;

use bluebridge_p4::declaration::{
    ANYCAST_GROUP_SIZE, ANYCAST_SELECTOR_ID, ANYCAST_SELECTOR_SIZE, TableDeclaration,
};
use bluebridge_p4::entry::{ActionSpec, decode_action};
use bluebridge_p4::pipeline::{Action, Forward, Key, WeightedForward};
use bluebridge_p4::proto::p4::v1;
use tonic::Code;
use v1::update::Type;

use super::refusal::{Refusal, invalid, not_found, unimplemented};
use super::state::AgentState;
use crate::dataplane::Table;

/// The member or group that an entry of `anycast` names.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Reference {
    Group(u32),
    Member(u32),
}

/// Every member, every group, and the entries that name them.
#[derive(Debug, Default)]
pub(super) struct Profile {
    members: BTreeMap<u32, (Forward, v1::ActionProfileMember)>,
    groups: BTreeMap<u32, v1::ActionProfileGroup>,
    references: BTreeMap<Key, Reference>,
}

impl Profile {
    /// The member or group that an entry names, if it is not a one-shot action set.
    pub(super) fn reference(&self, key: &Key) -> Option<v1::table_action::Type> {
        Some(match self.references.get(key)? {
            Reference::Group(id) => v1::table_action::Type::ActionProfileGroupId(*id),
            Reference::Member(id) => v1::table_action::Type::ActionProfileMemberId(*id),
        })
    }

    /// Records the member or group that an entry names now.
    pub(super) fn refer(&mut self, key: Key, reference: Option<Reference>) {
        match reference {
            Some(reference) => self.references.insert(key, reference),
            None => self.references.remove(&key),
        };
    }

    /// The choice that a reference stands for.
    fn choice(&self, reference: Reference) -> Result<Action, Refusal> {
        let group = match reference {
            Reference::Member(id) => {
                let weighted = WeightedForward { forward: self.member(id)?, weight: 1 };
                return Ok(Action::Select(vec![weighted]));
            }
            Reference::Group(id) => self
                .groups
                .get(&id)
                .ok_or_else(|| not_found(format!("group {id} does not exist")))?,
        };
        self.group_choice(group)
    }

    fn group_choice(&self, group: &v1::ActionProfileGroup) -> Result<Action, Refusal> {
        if group.members.is_empty() {
            return Err(unimplemented("a group that an entry names must have at least one member"));
        }
        let members = group.members.iter().map(|member| {
            Ok(WeightedForward {
                forward: self.member(member.member_id)?,
                weight: u16::try_from(member.weight).unwrap_or(u16::MAX),
            })
        });
        Ok(Action::Select(members.collect::<Result<_, Refusal>>()?))
    }

    fn member(&self, id: u32) -> Result<Forward, Refusal> {
        let member = self.members.get(&id);
        member.map(|(forward, _)| *forward).ok_or_else(|| missing(id))
    }

    /// The entries whose choice contains a member or group.
    fn affected(&self, changed: Reference) -> Vec<(Key, Reference)> {
        let touches = |reference: Reference| match (changed, reference) {
            (Reference::Member(id), Reference::Group(group)) => self
                .groups
                .get(&group)
                .is_some_and(|group| group.members.iter().any(|m| m.member_id == id)),
            _ => changed == reference,
        };
        let references = self.references.iter().map(|(key, reference)| (*key, *reference));
        references.filter(|(_, reference)| touches(*reference)).collect()
    }
}

fn missing(id: u32) -> Refusal {
    not_found(format!("member {id} does not exist"))
}

const fn anycast() -> &'static TableDeclaration {
    Table::Anycast.declaration()
}

fn check_profile(id: u32, number: u32) -> Result<(), Refusal> {
    if id != ANYCAST_SELECTOR_ID {
        return Err(not_found(format!("the pipeline has no action profile with id {id:#010x}")));
    }
    if number == 0 {
        return Err(invalid("the id of a member or group must be at least 1"));
    }
    Ok(())
}

fn in_use(what: &str) -> Refusal {
    Refusal::Request(Code::FailedPrecondition, format!("the {what} is in use"))
}

impl AgentState {
    /// The action that an entry's action field stands for, and the member or group that it names.
    pub(super) fn resolve(
        &mut self,
        spec: ActionSpec,
        key: &Key,
    ) -> Result<(Action, Option<Reference>), Refusal> {
        let (action, reference) = match spec {
            ActionSpec::Direct(action) => (action, None),
            ActionSpec::Group(id) => {
                (self.profile.choice(Reference::Group(id))?, Some(Reference::Group(id)))
            }
            ActionSpec::Member(id) => {
                (self.profile.choice(Reference::Member(id))?, Some(Reference::Member(id)))
            }
        };
        if matches!(action, Action::Select(_)) {
            self.check_style(key, reference.is_some())?;
        }
        Ok((action, reference))
    }

    /// Refuses to mix one-shot action sets with members and groups (section 9.2.3).
    fn check_style(&mut self, key: &Key, indirect: bool) -> Result<(), Refusal> {
        let references = &self.profile.references;
        let mixed = if indirect {
            let entries = self.plane.entries(Table::Anycast)?;
            entries.iter().any(|e| e.entry.key != *key && !references.contains_key(&e.entry.key))
        } else {
            references.keys().any(|other| other != key)
        };
        if mixed {
            return Err(invalid("action sets cannot be mixed with members and groups"));
        }
        Ok(())
    }

    pub(super) fn write_member(
        &mut self,
        kind: Type,
        entry: &v1::ActionProfileMember,
    ) -> Result<(), Refusal> {
        let id = entry.member_id;
        check_profile(entry.action_profile_id, id)?;
        let exists = self.profile.members.contains_key(&id);
        self.check_existence(kind, exists, "member", id)?;
        if kind == Type::Delete {
            let mut groups = self.profile.groups.values();
            if groups.any(|group| group.members.iter().any(|m| m.member_id == id))
                || !self.profile.affected(Reference::Member(id)).is_empty()
            {
                return Err(in_use("member"));
            }
            self.profile.members.remove(&id);
            return Ok(());
        }
        if !exists && self.profile.members.len() >= ANYCAST_SELECTOR_SIZE as usize {
            let message = format!("the action profile is full ({ANYCAST_SELECTOR_SIZE} members)");
            return Err(Refusal::Request(Code::ResourceExhausted, message));
        }
        let given = entry.action.as_ref().ok_or_else(|| invalid("the action is missing"))?;
        let Action::Forward(forward) = decode_action(anycast(), given)? else {
            return Err(invalid("members forward"));
        };
        self.check_port(forward)?;
        self.profile.members.insert(id, (forward, entry.clone()));
        self.refresh(Reference::Member(id))
    }

    fn check_port(&mut self, forward: Forward) -> Result<(), Refusal> {
        if self.plane.ports()?.iter().any(|port| port.port == forward.port) {
            return Ok(());
        }
        Err(invalid(format!("the switch has no port {}", forward.port.0)))
    }

    pub(super) fn write_profile_group(
        &mut self,
        kind: Type,
        entry: &v1::ActionProfileGroup,
    ) -> Result<(), Refusal> {
        let id = entry.group_id;
        check_profile(entry.action_profile_id, id)?;
        let known = self.profile.groups.get(&id);
        self.check_existence(kind, known.is_some(), "group", id)?;
        if kind == Type::Delete {
            if !self.profile.affected(Reference::Group(id)).is_empty() {
                return Err(in_use("group"));
            }
            self.profile.groups.remove(&id);
            return Ok(());
        }
        if known.is_some_and(|known| known.max_size != entry.max_size) {
            return Err(invalid("the max_size of a group cannot change"));
        }
        if known.is_none() && self.profile.groups.len() >= ANYCAST_SELECTOR_SIZE as usize {
            let message = format!("the action profile is full ({ANYCAST_SELECTOR_SIZE} groups)");
            return Err(Refusal::Request(Code::ResourceExhausted, message));
        }
        self.check_group(entry)?;
        if !self.profile.affected(Reference::Group(id)).is_empty() {
            self.profile.group_choice(entry)?;
        }
        self.profile.groups.insert(id, entry.clone());
        self.refresh(Reference::Group(id))
    }

    fn check_group(&self, entry: &v1::ActionProfileGroup) -> Result<(), Refusal> {
        let max_size = u32::try_from(entry.max_size).unwrap_or(0);
        if !(1..=ANYCAST_GROUP_SIZE).contains(&max_size) {
            return Err(invalid(format!(
                "the max_size of a group must be 1 to {ANYCAST_GROUP_SIZE}"
            )));
        }
        if entry.members.len() > max_size as usize {
            let message = "the group has more members than its max_size".to_owned();
            return Err(Refusal::Request(Code::ResourceExhausted, message));
        }
        for (index, member) in entry.members.iter().enumerate() {
            self.profile.member(member.member_id)?;
            if !(1..=i32::from(u16::MAX)).contains(&member.weight) {
                return Err(invalid("a weight must be 1 to 65535"));
            }
            if watches(member.watch_kind.as_ref()) {
                return Err(unimplemented("this switch has no watch ports"));
            }
            let before = entry.members.iter().take(index);
            if before.into_iter().any(|other| other.member_id == member.member_id) {
                return Err(invalid("a member is in the group twice"));
            }
        }
        Ok(())
    }

    /// Updates the choice of the entries that name a member or group.
    fn refresh(&mut self, changed: Reference) -> Result<(), Refusal> {
        for (key, reference) in self.profile.affected(changed) {
            let mut entry = self.plane.entry(&key)?.entry;
            entry.action = self.profile.choice(reference)?;
            self.plane.modify(&entry)?;
        }
        Ok(())
    }

    pub(super) fn read_members(
        &self,
        wanted: &v1::ActionProfileMember,
        out: &mut Vec<v1::Entity>,
    ) -> Result<(), Refusal> {
        check_wanted(wanted.action_profile_id)?;
        let members = self.profile.members.values().map(|(_, member)| member);
        let members = members.filter(|m| wanted.member_id == 0 || m.member_id == wanted.member_id);
        out.extend(members.map(|member| v1::Entity {
            entity: Some(v1::entity::Entity::ActionProfileMember(member.clone())),
        }));
        Ok(())
    }

    pub(super) fn read_profile_groups(
        &self,
        wanted: &v1::ActionProfileGroup,
        out: &mut Vec<v1::Entity>,
    ) -> Result<(), Refusal> {
        check_wanted(wanted.action_profile_id)?;
        let groups = self.profile.groups.values();
        let groups = groups.filter(|g| wanted.group_id == 0 || g.group_id == wanted.group_id);
        out.extend(groups.map(|group| v1::Entity {
            entity: Some(v1::entity::Entity::ActionProfileGroup(group.clone())),
        }));
        Ok(())
    }
}

/// Whether a member depends on a port; 0 and an empty string mean that it does not.
fn watches(kind: Option<&v1::action_profile_group::member::WatchKind>) -> bool {
    use v1::action_profile_group::member::WatchKind;
    match kind {
        None => false,
        #[expect(deprecated, reason = "clients of version 1.3 send it")]
        Some(WatchKind::Watch(port)) => *port != 0,
        Some(WatchKind::WatchPort(port)) => !port.is_empty(),
    }
}

fn check_wanted(profile: u32) -> Result<(), Refusal> {
    if profile == 0 { Ok(()) } else { check_profile(profile, 1) }
}
