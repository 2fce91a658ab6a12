use proptest::prelude::*;

use super::*;
use crate::declaration::{FORWARD, TABLES};
use crate::pipeline::{Action, Forward, Key, MacAddr, SwitchPort, Ternary, WeightedForward};
use v1::field_match::{Exact, FieldMatchType, Lpm};

fn port() -> impl Strategy<Value = SwitchPort> {
    (1..512_u16).prop_map(SwitchPort)
}

fn mac() -> impl Strategy<Value = MacAddr> {
    any::<[u8; 6]>().prop_map(MacAddr)
}

fn forward() -> impl Strategy<Value = Forward> {
    (port(), mac()).prop_map(|(port, dst_mac)| Forward { port, dst_mac })
}

fn ternary() -> impl Strategy<Value = Ternary> {
    any::<(u8, u8)>().prop_map(|(value, mask)| Ternary { value: value & mask, mask })
}

fn prefix() -> impl Strategy<Value = Key> {
    (any::<u128>(), 0..=112_u8).prop_map(|(bits, prefix_len)| {
        let rest = 112 - u32::from(prefix_len);
        let prefix = (bits >> 16).checked_shr(rest).unwrap_or(0) << rest.min(127);
        Key::Directory { prefix: if prefix_len == 0 { 0 } else { prefix }, prefix_len }
    })
}

fn select() -> impl Strategy<Value = Action> {
    let member =
        (forward(), 1..u16::MAX).prop_map(|(forward, weight)| WeightedForward { forward, weight });
    prop::collection::vec(member, 1..9).prop_map(Action::Select)
}

/// Keys with actions that their tables have.
fn rule() -> BoxedStrategy<(Key, Action)> {
    let scope = any::<u32>;
    let guard = (port(), scope(), any::<u16>(), any::<bool>()).prop_map(|(port, s, n, allow)| {
        let action = if allow { Action::Allow } else { Action::Drop };
        (Key::IngressGuard { port, src_scope: s, src_node: n }, action)
    });
    let redirect = (scope(), any::<u16>(), 0..1_u64 << 52, forward(), any::<Option<u16>>());
    let redirect = redirect.prop_map(|(s, n, page, f, lease_ms)| {
        let key = Key::Redirect { dst_scope: s, dst_node: n, page };
        let action = match lease_ms {
            Some(lease_ms) => Action::RedirectUntil { forward: f, lease_ms },
            None => Action::Forward(f),
        };
        (key, action)
    });
    let directory = (prefix(), forward(), any::<bool>()).prop_map(|(key, forward, drop)| {
        (key, if drop { Action::Drop } else { Action::Forward(forward) })
    });
    let anycast = (scope(), select()).prop_map(|(s, a)| (Key::Anycast { dst_scope: s }, a));
    let notify = (ternary(), ternary(), ternary(), 1..i32::MAX).prop_map(|(a, b, c, priority)| {
        let key = Key::Notify { src_command: a, dst_command: b, src_status: c, priority };
        (key, Action::CopyToController)
    });
    let l2 = (mac(), forward(), 1..u16::MAX, any::<bool>()).prop_map(|(dst_mac, f, group, one)| {
        let action = if one { Action::Forward(f) } else { Action::SetMulticastGroup { group } };
        (Key::L2 { dst_mac }, action)
    });
    let port_mac =
        (port(), mac()).prop_map(|(port, mac)| (Key::PortMac { port }, Action::SetDstMac(mac)));
    let multicast = (scope(), 1..u16::MAX).prop_map(|(s, group)| {
        (Key::Multicast { dst_scope: s }, Action::SetMulticastGroup { group })
    });
    prop_oneof![guard, redirect, directory, anycast, notify, l2, port_mac, multicast].boxed()
}

fn entry() -> impl Strategy<Value = Entry> {
    let timeout = prop::option::of((1..i64::MAX as u64).prop_map(Duration::from_nanos));
    (rule(), timeout, prop::collection::vec(any::<u8>(), 0..32)).prop_map(
        |((key, action), timeout, metadata)| Entry {
            idle_timeout: timeout.filter(|_| matches!(key, Key::Redirect { .. })),
            key,
            action,
            metadata,
        },
    )
}

/// Every byte string of a message with some zero bytes before it.
fn pad(message: &mut v1::TableEntry, zeros: usize) {
    let longer = |bytes: &mut Vec<u8>| {
        bytes.splice(0..0, vec![0; zeros]);
    };
    for field in &mut message.r#match {
        match field.field_match_type.as_mut().unwrap() {
            FieldMatchType::Exact(exact) => longer(&mut exact.value),
            FieldMatchType::Lpm(lpm) => longer(&mut lpm.value),
            FieldMatchType::Ternary(ternary) => {
                longer(&mut ternary.value);
                longer(&mut ternary.mask);
            }
            other => panic!("unexpected {other:?}"),
        }
    }
}

proptest! {
    #[test]
    fn entries_survive_the_round_trip(entry in entry(), zeros in 0..20_usize) {
        let mut message = encode(&entry).unwrap();
        prop_assert_eq!(decode(&message).unwrap(), entry.clone());
        message.r#match.reverse();
        pad(&mut message, zeros);
        prop_assert_eq!(decode(&message).unwrap(), entry);
    }

    #[test]
    fn what_decodes_encodes_to_the_shortest_form(entry in entry()) {
        let message = encode(&entry).unwrap();
        let mut padded = message.clone();
        pad(&mut padded, 1);
        prop_assert_eq!(encode(&decode(&padded).unwrap()).unwrap(), message);
    }

    #[test]
    fn no_message_makes_it_panic(
        table in 0_u32..10, fields in prop::collection::vec(
            (0_u32..5, prop::collection::vec(any::<u8>(), 0..20), any::<i32>(), 0..4_u8), 0..5),
        priority in any::<i32>(), action in 0_u32..9, param in any::<(u32, Vec<u8>)>(),
    ) {
        let r#match = fields.into_iter().map(|(field_id, value, prefix_len, kind)| {
            let field_match_type = match kind {
                0 => Some(FieldMatchType::Exact(Exact { value })),
                1 => Some(FieldMatchType::Lpm(Lpm { value, prefix_len })),
                2 => Some(FieldMatchType::Ternary(v1::field_match::Ternary {
                    mask: value.clone(), value,
                })),
                _ => None,
            };
            v1::FieldMatch { field_id, field_match_type }
        });
        let action = v1::Action {
            action_id: 0x0100_0000 | action,
            params: vec![v1::action::Param { param_id: param.0 % 4, value: param.1 }],
        };
        let message = v1::TableEntry {
            table_id: 0x0200_0000 | table, r#match: r#match.collect(), priority,
            action: Some(v1::TableAction {
                r#type: Some(v1::table_action::Type::Action(action)),
            }),
            ..v1::TableEntry::default()
        };
        if let Ok(entry) = decode(&message) {
            prop_assert!(encode(&entry).is_ok());
        }
    }
}

fn redirect() -> v1::TableEntry {
    encode(&Entry {
        key: Key::Redirect { dst_scope: 0xfdbb_0001, dst_node: 7, page: 0x12 },
        action: Action::Forward(Forward { port: SwitchPort(3), dst_mac: MacAddr([2; 6]) }),
        idle_timeout: None,
        metadata: Vec::new(),
    })
    .unwrap()
}

fn notify() -> v1::TableEntry {
    encode_key(&Key::Notify {
        src_command: Ternary { value: 0x80, mask: 0xff },
        dst_command: Ternary::default(),
        src_status: Ternary { value: 1, mask: 1 },
        priority: 9,
    })
    .unwrap()
}

fn exact(value: &[u8]) -> Option<FieldMatchType> {
    Some(FieldMatchType::Exact(Exact { value: value.to_vec() }))
}

/// The error of decoding a changed message.
fn refused(mut message: v1::TableEntry, change: impl FnOnce(&mut v1::TableEntry)) -> String {
    change(&mut message);
    let error = if message.action.is_some() {
        decode(&message).unwrap_err()
    } else {
        decode_key(&message).unwrap_err()
    };
    format!("{:?}: {error}", error.code())
}

#[test]
fn values_are_in_the_shortest_form_and_wildcards_left_out() {
    let message = redirect();
    assert_eq!(message.r#match[1].field_match_type, exact(&[7]));
    let message = notify();
    let ids: Vec<u32> = message.r#match.iter().map(|field| field.field_id).collect();
    assert_eq!(ids, [1, 3]);
    let everything = encode_key(&Key::Directory { prefix: 0, prefix_len: 0 }).unwrap();
    assert!(everything.r#match.is_empty());
}

#[test]
fn broken_exact_fields_are_refused() {
    assert_eq!(
        refused(redirect(), |m| m.r#match[1].field_match_type = exact(&[1, 0, 0])),
        "InvalidArgument: redirect: match field dst_node: the value is wider than 16 bits"
    );
    assert_eq!(
        refused(redirect(), |m| m.r#match[1].field_match_type = exact(&[])),
        "InvalidArgument: redirect: match field dst_node: the byte string is empty"
    );
    assert_eq!(
        refused(redirect(), |m| m.r#match.truncate(2)),
        "InvalidArgument: redirect: match field page is missing; an exact field must be present"
    );
    assert_eq!(
        refused(redirect(), |m| m.r#match.push(m.r#match[0].clone())),
        "InvalidArgument: redirect: match field dst_scope is given twice"
    );
    assert_eq!(
        refused(redirect(), |m| m.r#match[0].field_id = 9),
        "InvalidArgument: redirect has no match field with id 9"
    );
    assert_eq!(
        refused(redirect(), |m| m.r#match[0].field_match_type = None),
        "InvalidArgument: redirect: match field dst_scope: the match is missing"
    );
}

fn directory(value: &[u8], prefix_len: i32) -> v1::TableEntry {
    let lpm = FieldMatchType::Lpm(Lpm { value: value.to_vec(), prefix_len });
    v1::TableEntry {
        table_id: TABLES[2].id,
        r#match: vec![v1::FieldMatch { field_id: 1, field_match_type: Some(lpm) }],
        ..v1::TableEntry::default()
    }
}

#[test]
fn broken_prefixes_are_refused() {
    let field = "InvalidArgument: directory: match field prefix:";
    let same = |_: &mut v1::TableEntry| {};
    assert_eq!(
        refused(directory(&[1], 111), same),
        format!("{field} bits after the prefix must be 0")
    );
    assert_eq!(
        refused(directory(&[0], 0), same),
        format!("{field} a field that matches everything must be omitted")
    );
    assert_eq!(
        refused(directory(&[0], 113), same),
        format!("{field} the prefix is longer than the field")
    );
    assert_eq!(
        refused(directory(&[0], -1), same),
        format!("{field} the prefix length is negative")
    );
    assert!(decode_key(&directory(&[1], 112)).is_ok());
}

#[test]
fn broken_ternary_fields_and_priorities_are_refused() {
    let set = |value: u8, mask: u8| {
        move |m: &mut v1::TableEntry| {
            m.r#match[0].field_match_type =
                Some(FieldMatchType::Ternary(v1::field_match::Ternary {
                    value: vec![value],
                    mask: vec![mask],
                }));
        }
    };
    let field = "InvalidArgument: notify: match field src_command:";
    assert_eq!(refused(notify(), set(3, 1)), format!("{field} bits outside the mask must be 0"));
    assert_eq!(
        refused(notify(), set(0, 0)),
        format!("{field} a field that matches everything must be omitted")
    );
    assert_eq!(
        refused(notify(), |m| m.priority = 0),
        "InvalidArgument: notify: an entry with a ternary field needs a priority of at least 1"
    );
    assert_eq!(
        refused(redirect(), |m| m.priority = 1),
        "InvalidArgument: redirect: an entry without a ternary field must not have a priority"
    );
}

fn change_action(change: impl FnOnce(&mut v1::Action)) -> impl FnOnce(&mut v1::TableEntry) {
    move |message| match message.action.as_mut().and_then(|action| action.r#type.as_mut()) {
        Some(v1::table_action::Type::Action(action)) => change(action),
        other => panic!("unexpected {other:?}"),
    }
}

#[test]
fn broken_actions_are_refused() {
    assert_eq!(
        refused(redirect(), change_action(|a| a.action_id = 0x0100_0001)),
        "InvalidArgument: redirect has no action with id 0x01000001"
    );
    assert_eq!(
        refused(redirect(), change_action(|a| a.action_id = 21_257_015)),
        "PermissionDenied: redirect allows the action NoAction only as the default action"
    );
    assert_eq!(
        refused(redirect(), change_action(|a| a.params.truncate(1))),
        "InvalidArgument: action forward: a parameter is missing"
    );
    assert_eq!(
        refused(redirect(), change_action(|a| a.params.push(a.params[0].clone()))),
        "InvalidArgument: action forward: a parameter is given twice"
    );
    assert_eq!(
        refused(redirect(), change_action(|a| a.params[0].value = vec![2, 0])),
        "InvalidArgument: action forward: parameter port: the value is wider than 9 bits"
    );
    assert_eq!(
        refused(redirect(), |m| m.action = Some(v1::TableAction::default())),
        "InvalidArgument: redirect: the action is missing"
    );
}

#[test]
fn what_the_table_lacks_is_refused() {
    let mut anycast = encode_key(&Key::Anycast { dst_scope: 1 }).unwrap();
    anycast.action = Some(v1::TableAction {
        r#type: Some(v1::table_action::Type::Action(v1::Action {
            action_id: FORWARD.id,
            ..v1::Action::default()
        })),
    });
    assert_eq!(
        refused(anycast, |_| {}),
        "InvalidArgument: anycast: the table chooses among members: use an action set, a member \
         or a group"
    );
    let mut l2 = encode_key(&Key::L2 { dst_mac: MacAddr([1; 6]) }).unwrap();
    l2.action = redirect().action;
    assert_eq!(
        refused(l2, |m| m.idle_timeout_ns = 1),
        "InvalidArgument: l2: the table has no idle timeouts"
    );
    assert_eq!(
        refused(redirect(), |m| m.idle_timeout_ns = -1),
        "InvalidArgument: redirect: the idle timeout is negative"
    );
    assert_eq!(
        refused(redirect(), |m| m.table_id = 5),
        "InvalidArgument: the pipeline has no table with id 0x00000005"
    );
}

#[test]
fn values_that_do_not_fit_are_not_sent() {
    let wide = Key::Redirect { dst_scope: 1, dst_node: 1, page: 1 << 52 };
    assert!(matches!(encode_key(&wide), Err(ConversionError::FieldValue { .. })));
    let far = Action::Forward(Forward { port: SwitchPort(512), dst_mac: MacAddr([0; 6]) });
    assert!(matches!(
        encode_table_action(&TABLES[1], &far),
        Err(ConversionError::ParamValue { .. })
    ));
}
