//! Where new pages go.

use core::time::Duration;

use bluebridge_protocol::{Timestamp, requester::Server};
use bluebridge_wire::NodeId;

use crate::config::MemoryNode;

/// Where new pages go.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Placement {
    /// To the node that the switch chooses, by the free memory that the nodes report; two round trips,
    /// because the server is not known beforehand.
    Anywhere,
    /// To this memory node.
    Node(NodeId),
    /// To the one of two randomly chosen memory nodes that has more free memory; both are asked for their
    /// state first. This is the default, for [`crate::Client::open`] and [`crate::Client::join`].
    #[default]
    TwoChoices,
}

/// How long a node's report of its free pages counts as valid.
pub(crate) const FRESH: Duration = Duration::from_millis(100);

/// What is known about one serving core.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) server: Server,
    free_pages: u64,
    asked_at: Option<Timestamp>,
}

impl Place {
    /// The free pages that it reported, if that is recent.
    pub(crate) fn fresh(&self, now: Timestamp) -> Option<u64> {
        let asked_at = self.asked_at?;
        (now.saturating_since(asked_at) < FRESH).then_some(self.free_pages)
    }
}

/// All serving cores that pages can be placed on.
#[derive(Debug)]
pub(crate) struct Places {
    places: Vec<Place>,
    random: u64,
}

impl Places {
    pub(crate) fn new(nodes: &[MemoryNode], seed: u64) -> Self {
        let mut places = Self { places: Vec::new(), random: seed | 1 };
        places.replace(nodes);
        places
    }

    /// Applies the controller's newest list, and discards what the nodes reported.
    pub(crate) fn replace(&mut self, nodes: &[MemoryNode]) {
        let servers = nodes.iter().flat_map(|node| {
            let last = u8::try_from(node.shard_count.max(1) - 1).unwrap_or(u8::MAX);
            (0..=last).map(|shard| Server { node: node.node, shard })
        });
        self.places =
            servers.map(|server| Place { server, free_pages: 0, asked_at: None }).collect();
    }

    /// Two places drawn at random, different ones if there are two.
    pub(crate) fn draw_two(&mut self) -> Option<(usize, usize)> {
        let count = self.places.len();
        let first = self.draw(count)?;
        let Some(other) = self.draw(count - 1) else { return Some((first, first)) };
        Some((first, (first + 1 + other) % count))
    }

    /// One of a node's serving cores, drawn at random; the first if the node is not known.
    pub(crate) fn draw_of(&mut self, node: NodeId) -> Server {
        let of_node = |place: &&Place| place.server.node == node;
        let count = self.places.iter().filter(of_node).count();
        let chosen = self.draw(count).unwrap_or(0);
        let place = self.places.iter().filter(of_node).nth(chosen);
        place.map_or(Server { node, shard: 0 }, |place| place.server)
    }

    pub(crate) fn at(&self, place: usize) -> Option<&Place> {
        self.places.get(place)
    }

    /// Records what a place reported.
    pub(crate) fn note(&mut self, place: usize, free_pages: u64, now: Timestamp) {
        if let Some(place) = self.places.get_mut(place) {
            place.free_pages = free_pages;
            place.asked_at = Some(now);
        }
    }

    /// Counts pages that were allocated, so that further choices consider them as long as the
    /// node's report counts as valid.
    pub(crate) fn take(&mut self, place: usize, pages: u32) {
        if let Some(place) = self.places.get_mut(place) {
            place.free_pages = place.free_pages.saturating_sub(u64::from(pages));
        }
    }

    fn draw(&mut self, count: usize) -> Option<usize> {
        // Xorshift (Marsaglia, 2003): placement needs spread, not secrecy.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random >> 33).ok()?.checked_rem(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(nodes: &[(u16, u16)]) -> Places {
        let node = |&(node, shard_count)| MemoryNode { node: NodeId(node), shard_count };
        Places::new(&nodes.iter().map(node).collect::<Vec<_>>(), 7)
    }

    #[test]
    fn two_different_places_are_drawn_and_each_at_times() {
        assert_eq!(places(&[]).draw_two(), None);
        assert_eq!(places(&[(3, 1)]).draw_two(), Some((0, 0)));
        let mut places = places(&[(1, 1), (2, 2)]);
        let mut drawn = [[0; 3]; 3];
        for _ in 0..600 {
            let (first, second) = places.draw_two().expect("there are three");
            drawn[first][second] += 1;
        }
        for (first, row) in drawn.iter().enumerate() {
            for (second, count) in row.iter().enumerate() {
                assert_eq!(first == second, *count == 0, "{drawn:?}");
                assert!(first == second || *count > 50, "{drawn:?}");
            }
        }
    }

    #[test]
    fn what_a_place_told_is_believed_for_a_while() {
        let mut places = places(&[(1, 2)]);
        let now = Timestamp::from_nanos(1 << 40);
        let fresh = |places: &Places, now| places.at(1).expect("there are two").fresh(now);
        assert_eq!(fresh(&places, now), None);
        places.note(1, 100, now);
        places.take(1, 30);
        assert_eq!(fresh(&places, now), Some(70));
        assert_eq!(fresh(&places, now + FRESH), None);
        let shards: Vec<_> = (0..100).map(|_| places.draw_of(NodeId(1)).shard).collect();
        assert!(shards.contains(&0) && shards.contains(&1));
        assert_eq!(places.draw_of(NodeId(9)), Server { node: NodeId(9), shard: 0 });
    }
}
