//! The index against a plain list that is searched.

use bluebridge_wire::{NodeId, Space};
use proptest::prelude::*;

use super::*;

const LIMIT: u16 = 24;

#[derive(Clone, Copy, Debug)]
enum Step {
    Insert(u16, u32),
    Remove(usize),
    Touch(usize),
    /// A session was seen before this many others of its node.
    TouchBefore(usize, usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..5_u16, 0..3_u32).prop_map(|(node, incarnation)| Step::Insert(node, incarnation)),
        2 => any::<usize>().prop_map(Step::Remove),
        2 => any::<usize>().prop_map(Step::Touch),
        2 => (any::<usize>(), 0..6_usize).prop_map(|(at, count)| Step::TouchBefore(at, count)),
    ]
}

/// Slot, requester and nonce of every session, least recently seen first.
type Model = Vec<(u16, RequesterId, u64)>;

fn check(index: &SessionIndex, model: &Model) -> Result<(), TestCaseError> {
    for &(slot, requester, nonce) in model {
        prop_assert_eq!(index.opened_by(&requester, nonce), Some(slot));
        prop_assert_eq!(index.opened_by(&requester, nonce + 1000), None);
    }
    let of_node = |node: u16| {
        let is_of =
            move |(_, requester, _): &&(u16, RequesterId, u64)| requester.node == NodeId(node);
        model.iter().filter(is_of).map(|&(slot, ..)| slot).collect::<Vec<_>>()
    };
    for node in 0..5 {
        let holder = (Space(1), NodeId(node));
        prop_assert_eq!(index.count_of(holder), of_node(node).len());
        prop_assert_eq!(index.of_node(holder).collect::<Vec<_>>(), of_node(node));
    }
    for count in 0..8 {
        let named: Vec<_> = index.of_nodes_with_more(count).collect();
        let mut sorted = named.clone();
        sorted.sort_unstable();
        let more = (0..5).filter(|&node| of_node(node).len() > count);
        let mut expected: Vec<_> = more.flat_map(of_node).collect();
        expected.sort_unstable();
        prop_assert_eq!(sorted, expected);
        // Sessions of the nodes with most sessions come first.
        let size = |slot: &u16| {
            let of = model
                .iter()
                .find(|(other, ..)| other == slot)
                .map(|(_, requester, _)| requester.node);
            of.map_or(0, |NodeId(node)| of_node(node).len())
        };
        prop_assert!(named.is_sorted_by_key(|slot| core::cmp::Reverse(size(slot))));
    }
    Ok(())
}

proptest! {
    #[test]
    fn agrees_with_a_list(steps in prop::collection::vec(step(), 120)) {
        let mut index = SessionIndex::new(LIMIT);
        let mut model = Model::new();
        let mut vacant: Vec<_> = (0..LIMIT).collect();
        // A removed key may leave a mark that lowers the capacity until the map is tidied in place;
        // only a map that grew has a higher one.
        let (opens, holders) = (index.by_open.capacity(), index.by_holder.capacity());
        for (nonce, step) in (0..).zip(steps) {
            match step {
                Step::Insert(node, incarnation) => {
                    let Some(slot) = vacant.pop() else { continue };
                    let requester = RequesterId { space: Space(1), node: NodeId(node), incarnation };
                    index.insert(slot, requester, nonce);
                    model.push((slot, requester, nonce));
                }
                Step::Remove(at) if !model.is_empty() => {
                    let (slot, requester, nonce) = model.remove(at % model.len());
                    index.remove(slot, requester, nonce);
                    vacant.push(slot);
                }
                Step::Touch(at) if !model.is_empty() => {
                    let touched = model.remove(at % model.len());
                    index.touch(touched.0);
                    model.push(touched);
                }
                Step::TouchBefore(at, count) if !model.is_empty() => {
                    let touched = model.remove(at % model.len());
                    let is_of_node = |(_, (_, requester, _)): &(usize, &(u16, RequesterId, u64))| {
                        requester.node == touched.1.node
                    };
                    let others: Vec<_> = model.iter().enumerate().filter(is_of_node).collect();
                    let later = &others[others.len().saturating_sub(count)..];
                    let slots: Vec<_> = later.iter().map(|(_, session)| session.0).collect();
                    index.touch_before(touched.0, |slot| slots.contains(&slot));
                    let place = later.first().map_or(model.len(), |&(place, _)| place);
                    model.insert(place, touched);
                }
                Step::Remove(_) | Step::Touch(_) | Step::TouchBefore(..) => {}
            }
            check(&index, &model)?;
            prop_assert!(index.by_open.capacity() <= opens);
            prop_assert!(index.by_holder.capacity() <= holders);
        }
    }
}

#[test]
fn a_search_examines_few_sessions_in_any_table() {
    let mut index = SessionIndex::new(1000);
    for slot in 0..1000 {
        let requester = RequesterId { space: Space(1), node: NodeId(slot % 10), incarnation: 1 };
        index.insert(slot, requester, u64::from(slot));
    }
    assert_eq!(index.of_nodes_with_more(5).count(), SEARCH_LIMIT);
    assert_eq!(index.of_nodes_with_more(100).count(), 0);
}
