//! Actions, and anycast choices as one-shot action sets.

use super::ConversionError;
use super::key::{mac, mac_number};
use crate::bytestring::{self, ByteStringError};
use crate::declaration::{
    ACTIONS, ALLOW, ANYCAST_GROUP_SIZE, ActionDeclaration, COPY_TO_CONTROLLER, DROP, FORWARD,
    REDIRECT_UNTIL, SET_DST_MAC, SET_MULTICAST_GROUP, Scope, TableDeclaration, action_of,
};
use crate::pipeline::{Action, Forward, SwitchPort, WeightedForward};
use crate::proto::p4::v1;
use v1::table_action::Type;

/// The most parameters of an action.
const PARAMS_MAX: usize = 3;

/// The contents of an entry's action field.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum ActionSpec {
    /// The action itself, or a one-shot action set.
    Direct(Action),
    /// A member of the action profile.
    Member(u32),
    /// A group of the action profile.
    Group(u32),
}

/// Converts an entry's action to a message; a choice becomes a one-shot action set.
///
/// # Errors
/// [`ConversionError`] if the table lacks the action or a value does not fit.
pub fn encode_table_action(
    table: &TableDeclaration,
    action: &Action,
) -> Result<v1::TableAction, ConversionError> {
    let encoded = match (action, table.action_profile) {
        (Action::Select(members), Some(_)) => {
            let actions = members.iter().map(|member| {
                Ok(v1::ActionProfileAction {
                    action: Some(encode_action(table, &Action::Forward(member.forward))?),
                    weight: i32::from(member.weight),
                    watch_kind: None,
                })
            });
            Type::ActionProfileActionSet(v1::ActionProfileActionSet {
                action_profile_actions: actions.collect::<Result<_, _>>()?,
                ..v1::ActionProfileActionSet::default()
            })
        }
        (_, Some(_)) => {
            let rule = "the table chooses among members";
            return Err(ConversionError::Entry { table: table.alias, rule });
        }
        (_, None) => Type::Action(encode_action(table, action)?),
    };
    Ok(v1::TableAction { r#type: Some(encoded) })
}

/// Converts an action to a message.
///
/// # Errors
/// [`ConversionError`] if the table lacks the action or a value does not fit.
pub fn encode_action(
    table: &TableDeclaration,
    action: &Action,
) -> Result<v1::Action, ConversionError> {
    let values: Vec<u64> = match action {
        Action::Allow | Action::Drop | Action::CopyToController => vec![],
        Action::Forward(forward) => vec![forward.port.0.into(), mac_number(forward.dst_mac)],
        Action::RedirectUntil { forward, lease_ms } => {
            vec![forward.port.0.into(), mac_number(forward.dst_mac), u64::from(*lease_ms)]
        }
        Action::SetMulticastGroup { group } => vec![u64::from(*group)],
        Action::SetDstMac(mac) => vec![mac_number(*mac)],
        Action::Select(_) => {
            let rule = "the table does not choose among members";
            return Err(ConversionError::Entry { table: table.alias, rule });
        }
    };
    let declaration = action_of(action);
    if !table.actions.iter().any(|reference| reference.action.id == declaration.id) {
        let action = declaration.id;
        return Err(ConversionError::UnknownAction { table: table.alias, action });
    }
    let params = declaration.params.iter().zip(values).map(|(param, value)| {
        if value.checked_shr(param.bitwidth).unwrap_or(0) != 0 {
            return Err(ConversionError::ParamValue {
                action: declaration.alias,
                param: param.name,
                source: ByteStringError::TooWide(param.bitwidth),
            });
        }
        let value = bytestring::encode(u128::from(value));
        Ok(v1::action::Param { param_id: param.id, value })
    });
    Ok(v1::Action { action_id: declaration.id, params: params.collect::<Result<_, _>>()? })
}

/// The action field of a message.
///
/// # Errors
/// [`ConversionError`] if the table does not allow it.
pub fn decode_table_action(
    table: &TableDeclaration,
    given: Option<&v1::TableAction>,
) -> Result<ActionSpec, ConversionError> {
    let rule = match (given.and_then(|given| given.r#type.as_ref()), table.action_profile) {
        (Some(Type::Action(action)), None) => {
            return decode_action(table, action).map(ActionSpec::Direct);
        }
        (Some(Type::ActionProfileMemberId(id)), Some(_)) => return Ok(ActionSpec::Member(*id)),
        (Some(Type::ActionProfileGroupId(id)), Some(_)) => return Ok(ActionSpec::Group(*id)),
        (Some(Type::ActionProfileActionSet(set)), Some(_)) => {
            return decode_action_set(table, set).map(ActionSpec::Direct);
        }
        (Some(Type::Action(_)), Some(_)) => {
            "the table chooses among members: use an action set, a member or a group"
        }
        (Some(_), None) => "the table has no action profile: use an action",
        (None, _) => "the action is missing",
    };
    Err(ConversionError::Entry { table: table.alias, rule })
}

fn decode_action_set(
    table: &TableDeclaration,
    set: &v1::ActionProfileActionSet,
) -> Result<Action, ConversionError> {
    let unsupported = |what| ConversionError::Unsupported { table: table.alias, what };
    let entry = |rule| ConversionError::Entry { table: table.alias, rule };
    // The selector's own mode: by hash, sized by members.
    if !matches!(set.action_selection_mode, 0 | 1) || !matches!(set.size_semantics, 0 | 2) {
        return Err(unsupported("selection modes other than its hash over members"));
    }
    let actions = &set.action_profile_actions;
    if actions.is_empty() || actions.len() > ANYCAST_GROUP_SIZE as usize {
        return Err(entry("an action set must have 1 to 256 actions"));
    }
    let members = actions.iter().map(|member| {
        if watches(member.watch_kind.as_ref()) {
            return Err(unsupported("watch ports"));
        }
        let weight = u16::try_from(member.weight).ok().filter(|weight| *weight != 0);
        let weight = weight.ok_or_else(|| entry("a weight must be 1 to 65535"))?;
        let given = member.action.as_ref().ok_or_else(|| entry("an action is missing"))?;
        match decode_action(table, given)? {
            Action::Forward(forward) => Ok(WeightedForward { forward, weight }),
            _ => Err(entry("members forward")),
        }
    });
    Ok(Action::Select(members.collect::<Result<_, _>>()?))
}

/// Whether a choice depends on a port; 0 and an empty string mean that it does not.
fn watches(kind: Option<&v1::action_profile_action::WatchKind>) -> bool {
    use v1::action_profile_action::WatchKind;
    match kind {
        None => false,
        #[expect(deprecated, reason = "clients of version 1.3 send it")]
        Some(WatchKind::Watch(port)) => *port != 0,
        Some(WatchKind::WatchPort(port)) => !port.is_empty(),
    }
}

/// An action of an entry, or of a member of the table's action profile.
///
/// # Errors
/// [`ConversionError`] if the table does not allow it in entries or the parameters are wrong.
pub fn decode_action(
    table: &TableDeclaration,
    given: &v1::Action,
) -> Result<Action, ConversionError> {
    decode_in(table, given, Scope::DefaultOnly, "as the default action")
}

/// An action as the default action of a table; whether it is constant is not checked here.
///
/// # Errors
/// [`ConversionError`] if the table does not allow it there or the parameters are wrong.
pub fn decode_default_action(
    table: &TableDeclaration,
    given: &v1::Action,
) -> Result<Action, ConversionError> {
    decode_in(table, given, Scope::TableOnly, "in entries")
}

fn decode_in(
    table: &TableDeclaration,
    given: &v1::Action,
    forbidden: Scope,
    only: &'static str,
) -> Result<Action, ConversionError> {
    let unknown = ConversionError::UnknownAction { table: table.alias, action: given.action_id };
    let reference = table.actions.iter().find(|reference| reference.action.id == given.action_id);
    let reference = reference.ok_or_else(|| unknown.clone())?;
    let action = reference.action.alias;
    if reference.scope == forbidden {
        return Err(ConversionError::ActionScope { table: table.alias, action, only });
    }
    let params = decode_params(reference.action, &given.params)?;
    typed(reference.action, params).ok_or(unknown)
}

fn decode_params(
    action: &'static ActionDeclaration,
    given: &[v1::action::Param],
) -> Result<[u128; PARAMS_MAX], ConversionError> {
    let broken = |rule| Err(ConversionError::Params { action: action.alias, rule });
    if given.iter().any(|g| !action.params.iter().any(|param| param.id == g.param_id)) {
        return broken("the action does not have one of the parameters");
    }
    if given.len() > action.params.len() {
        return broken("a parameter is given twice");
    }
    let mut values = [0; PARAMS_MAX];
    for (param, value) in action.params.iter().zip(&mut values) {
        let Some(given) = given.iter().find(|given| given.param_id == param.id) else {
            return broken("a parameter is missing");
        };
        *value = bytestring::decode(&given.value, param.bitwidth).map_err(|source| {
            ConversionError::ParamValue { action: action.alias, param: param.name, source }
        })?;
    }
    Ok(values)
}

#[expect(clippy::cast_possible_truncation, reason = "the widths were checked against the params")]
fn typed(action: &ActionDeclaration, [first, second, third]: [u128; PARAMS_MAX]) -> Option<Action> {
    debug_assert!(ACTIONS.iter().any(|known| known.id == action.id));
    Some(match action.id {
        id if id == ALLOW.id => Action::Allow,
        id if id == DROP.id => Action::Drop,
        id if id == FORWARD.id => {
            Action::Forward(Forward { port: SwitchPort(first as u16), dst_mac: mac(second) })
        }
        id if id == REDIRECT_UNTIL.id => Action::RedirectUntil {
            forward: Forward { port: SwitchPort(first as u16), dst_mac: mac(second) },
            lease_ms: third as u16,
        },
        id if id == SET_MULTICAST_GROUP.id => Action::SetMulticastGroup { group: first as u16 },
        id if id == COPY_TO_CONTROLLER.id => Action::CopyToController,
        id if id == SET_DST_MAC.id => Action::SetDstMac(mac(first)),
        _ => return None,
    })
}
