//! The n-body simulation of Barnes and Hut ("A hierarchical O(N log N) force-calculation algorithm", 1986): bodies
//! that are far away attract as one.
//!
//! The bodies and the nodes of the octree are records in the memory, and refer to each other by number. All
//! arithmetic has a fixed order, so two runs with the same seed give the same bits.

use rand::{RngCore, SeedableRng, rngs::SmallRng};

/// A body: position, velocity and mass as 64-bit floats, then the next body of the same leaf, and a word of padding.
type Body = [u32; 16];
const POSITION: usize = 0;
const VELOCITY: usize = 6;
const MASS: usize = 12;
const NEXT: usize = 14;

/// A node: centre of mass, mass, and the square of the distance at which it counts as one body, as 64-bit floats;
/// then its octants.
type Node = [u32; 18];
const CENTRE: usize = 0;
const NODE_MASS: usize = 6;
const REACH: usize = 8;
const OCTANTS: usize = 10;
const EMPTY_NODE: Node = [0; 18];

/// Words of each pair of bodies: themselves, and a node. Bodies at random places need 0.9 nodes for each pair.
const PAIR_WORDS: usize = 2 * size_of::<Body>() / 4 + size_of::<Node>() / 4;

/// A node whose side is smaller than its distance counts as one body: the "tolerance" of SPLASH-2's Barnes.
const THETA: f64 = 1.0;
const TIME_STEP: f64 = 0.025;
/// Steps of a run.
const STEP_COUNT: usize = 2;
/// Avoids infinite forces between bodies that meet.
const SOFTENING: f64 = 1e-3;
/// Bodies that are still in one octant at this depth stay in one leaf.
const DEPTH_MAX: usize = 40;

/// What an octant, or the next body of a leaf, refers to; 0 is nothing.
#[derive(Clone, Copy)]
enum Reference {
    Nothing,
    Body(usize),
    Node(usize),
}

/// Marks the number of a node.
const IS_NODE: u32 = 1 << 31;
/// So that all numbers fit beside the mark, and 0 is free.
const BODIES_MAX: usize = (IS_NODE - 1) as usize;

impl Reference {
    const fn of(word: u32) -> Self {
        match word {
            0 => Self::Nothing,
            word if word & IS_NODE != 0 => Self::Node((word & !IS_NODE) as usize),
            word => Self::Body(word as usize - 1),
        }
    }

    #[allow(clippy::cast_possible_truncation, reason = "there are at most BODIES_MAX of both")]
    const fn word(self) -> u32 {
        match self {
            Self::Nothing => 0,
            Self::Body(number) => number as u32 + 1,
            Self::Node(number) => number as u32 | IS_NODE,
        }
    }
}

fn number(record: &[u32], at: usize) -> f64 {
    f64::from_bits(u64::from(record[at]) | u64::from(record[at + 1]) << 32)
}

#[allow(clippy::cast_possible_truncation, reason = "the two halves of the bits")]
fn set_number(record: &mut [u32], at: usize, value: f64) {
    let bits = value.to_bits();
    record[at] = bits as u32;
    record[at + 1] = (bits >> 32) as u32;
}

fn vector(record: &[u32], at: usize) -> [f64; 3] {
    [number(record, at), number(record, at + 2), number(record, at + 4)]
}

fn set_vector(record: &mut [u32], at: usize, value: [f64; 3]) {
    for (axis, value) in value.into_iter().enumerate() {
        set_number(record, at + 2 * axis, value);
    }
}

/// A cube of the tree.
#[derive(Clone, Copy)]
struct Cube {
    centre: [f64; 3],
    half: f64,
}

impl Cube {
    fn octant_of(&self, place: [f64; 3]) -> usize {
        (0..3).map(|axis| usize::from(place[axis] >= self.centre[axis]) << axis).sum()
    }

    fn octant(&self, octant: usize) -> Self {
        let half = self.half / 2.0;
        let mut centre = self.centre;
        for (axis, centre) in centre.iter_mut().enumerate() {
            *centre += if octant >> axis & 1 == 1 { half } else { -half };
        }
        Self { centre, half }
    }
}

/// The memory, divided.
struct System<'a> {
    bodies: &'a mut [Body],
    nodes: &'a mut [Node],
    /// Nodes in use; the first is the root.
    node_count: usize,
}

impl<'a> System<'a> {
    fn new(memory: &'a mut [u32]) -> Self {
        let pairs = (memory.len() / PAIR_WORDS).clamp(1, BODIES_MAX / 2);
        let body_words = pairs * 2 * size_of::<Body>() / 4;
        let (bodies, nodes) = memory.split_at_mut(body_words.min(memory.len()));
        let (bodies, _) = bodies.as_chunks_mut();
        let (nodes, _) = nodes.as_chunks_mut();
        let node_count = nodes.len().min(pairs);
        Self { bodies, nodes: &mut nodes[..node_count], node_count: 0 }
    }

    fn step(&mut self) {
        if self.bodies.is_empty() || self.nodes.is_empty() {
            return;
        }
        let cube = self.bounds();
        self.build(cube);
        self.sum(0, cube);
        self.accelerate();
        for body in &mut *self.bodies {
            let (place, velocity) = (vector(body, POSITION), vector(body, VELOCITY));
            let moved = [0, 1, 2].map(|axis| place[axis] + velocity[axis] * TIME_STEP);
            set_vector(body, POSITION, moved);
        }
    }

    /// The cube of all bodies.
    fn bounds(&self) -> Cube {
        let (mut low, mut high) = ([f64::INFINITY; 3], [f64::NEG_INFINITY; 3]);
        for body in &*self.bodies {
            for (axis, value) in vector(body, POSITION).into_iter().enumerate() {
                low[axis] = low[axis].min(value);
                high[axis] = high[axis].max(value);
            }
        }
        let centre = [0, 1, 2].map(|axis| f64::midpoint(low[axis], high[axis]));
        let side = (0..3).map(|axis| high[axis] - low[axis]).fold(0.0, f64::max);
        Cube { centre, half: side / 2.0 }
    }

    fn build(&mut self, cube: Cube) {
        self.nodes[0] = EMPTY_NODE;
        self.node_count = 1;
        for body in 0..self.bodies.len() {
            self.insert(body, cube);
        }
    }

    fn insert(&mut self, body: usize, mut cube: Cube) {
        let place = vector(&self.bodies[body], POSITION);
        self.bodies[body][NEXT] = 0;
        let mut node = 0;
        for depth in 1.. {
            let octant = OCTANTS + cube.octant_of(place);
            match Reference::of(self.nodes[node][octant]) {
                Reference::Nothing => {
                    self.nodes[node][octant] = Reference::Body(body).word();
                    return;
                }
                Reference::Node(child) => node = child,
                Reference::Body(other) => {
                    // Without a free node they share the leaf as well: the result is the same, and more exact.
                    if depth == DEPTH_MAX || self.node_count == self.nodes.len() {
                        self.bodies[body][NEXT] = Reference::Body(other).word();
                        self.nodes[node][octant] = Reference::Body(body).word();
                        return;
                    }
                    let child = self.node_count;
                    self.node_count += 1;
                    self.nodes[child] = EMPTY_NODE;
                    let inner = cube.octant(octant - OCTANTS);
                    let other_place = vector(&self.bodies[other], POSITION);
                    let other_octant = OCTANTS + inner.octant_of(other_place);
                    self.nodes[child][other_octant] = Reference::Body(other).word();
                    self.nodes[node][octant] = Reference::Node(child).word();
                    node = child;
                }
            }
            cube = cube.octant(octant - OCTANTS);
        }
    }

    /// Sums up the mass in a node and those below, and finds its centre. The depth of the recursion is limited by that
    /// of the tree.
    fn sum(&mut self, node: usize, cube: Cube) -> (f64, [f64; 3]) {
        let (mut mass, mut moment) = (0.0, [0.0; 3]);
        let mut add = |part: f64, place: [f64; 3]| {
            mass += part;
            for (moment, place) in moment.iter_mut().zip(place) {
                *moment += part * place;
            }
        };
        for octant in 0..8 {
            let mut reference = Reference::of(self.nodes[node][OCTANTS + octant]);
            if let Reference::Node(child) = reference {
                let (part, place) = self.sum(child, cube.octant(octant));
                add(part, place);
            }
            while let Reference::Body(body) = reference {
                let body = &self.bodies[body];
                add(number(body, MASS), vector(body, POSITION));
                reference = Reference::of(body[NEXT]);
            }
        }
        let centre = moment.map(|moment| moment / mass);
        let offset = distance_squared(centre, cube.centre).sqrt();
        // The offset keeps a node closed to the bodies in it, whose own mass must not attract them (Barnes, 1994).
        let reach = 2.0 * cube.half / THETA + offset;
        let record = &mut self.nodes[node];
        set_vector(record, CENTRE, centre);
        set_number(record, NODE_MASS, mass);
        set_number(record, REACH, reach * reach);
        (mass, centre)
    }

    /// Changes the velocities. The positions stay, because other bodies need them.
    fn accelerate(&mut self) {
        let mut open = Vec::with_capacity(8 * DEPTH_MAX);
        for body in 0..self.bodies.len() {
            let force = self.acceleration(body, &mut open);
            let record = &mut self.bodies[body];
            let velocity = vector(record, VELOCITY);
            let changed = [0, 1, 2].map(|axis| velocity[axis] + force[axis] * TIME_STEP);
            set_vector(record, VELOCITY, changed);
        }
    }

    /// The acceleration of a body; `open` is room for references that are still to be followed.
    fn acceleration(&self, body: usize, open: &mut Vec<u32>) -> [f64; 3] {
        let place = vector(&self.bodies[body], POSITION);
        let mut sum = [0.0; 3];
        open.clear();
        open.push(Reference::Node(0).word());
        while let Some(word) = open.pop() {
            let mut reference = Reference::of(word);
            if let Reference::Node(node) = reference {
                let node = &self.nodes[node];
                let centre = vector(node, CENTRE);
                if distance_squared(centre, place) > number(node, REACH) {
                    attract(&mut sum, place, number(node, NODE_MASS), centre);
                } else {
                    open.extend(node[OCTANTS..].iter().filter(|word| **word != 0));
                }
            }
            while let Reference::Body(other) = reference {
                let record = &self.bodies[other];
                if other != body {
                    attract(&mut sum, place, number(record, MASS), vector(record, POSITION));
                }
                reference = Reference::of(record[NEXT]);
            }
        }
        sum
    }
}

fn distance_squared(one: [f64; 3], other: [f64; 3]) -> f64 {
    let [x, y, z] = [0, 1, 2].map(|axis| (one[axis] - other[axis]) * (one[axis] - other[axis]));
    x + y + z
}

/// Adds the acceleration at a place towards a mass; the constant of gravitation is 1.
fn attract(sum: &mut [f64; 3], place: [f64; 3], mass: f64, centre: [f64; 3]) {
    let squared = distance_squared(centre, place) + SOFTENING * SOFTENING;
    let factor = mass / (squared * squared.sqrt());
    for axis in 0..3 {
        sum[axis] += factor * (centre[axis] - place[axis]);
    }
}

/// Bits of a coordinate that decide the order of the bodies.
const ORDER_BITS: u32 = 17;

/// Fills the memory with bodies of equal mass at random places of the unit cube. They are in the order of the octree's
/// leaves, so bodies that are near each other share pages; programs sort their bodies for this.
pub(super) fn prepare(memory: &mut [u32], seed: u64) {
    memory.fill(0);
    let system = System::new(memory);
    let count = system.bodies.len();
    // Sums of exponential steps, divided by the last sum, are sorted random numbers.
    let step = |random: &mut SmallRng| -(1.0 - unit(random)).ln();
    let mut random = SmallRng::seed_from_u64(seed);
    let total: f64 = (0..=count).map(|_| step(&mut random)).sum();
    let mut steps = SmallRng::seed_from_u64(seed);
    let mut sum = 0.0;
    #[allow(clippy::cast_precision_loss, reason = "a mass needs few digits")]
    let mass = 1.0 / count as f64;
    for body in &mut *system.bodies {
        sum += step(&mut steps);
        let cell = cell(sum / total);
        let place = cell.map(|cell| (f64::from(cell) + unit(&mut random)) / CELLS);
        set_vector(body, POSITION, place);
        set_vector(body, VELOCITY, [0; 3].map(|_| (unit(&mut random) - 0.5) * 0.1));
        set_number(body, MASS, mass);
    }
}

/// Cells along each axis.
const CELLS: f64 = (1_u32 << ORDER_BITS) as f64;

/// The cell at a share, from 0 to 1, of the way through all cells in the order of an octree.
fn cell(share: f64) -> [u32; 3] {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it is a share of the number of cells"
    )]
    let at = ((share * CELLS * CELLS * CELLS) as u64).min((1 << (3 * ORDER_BITS)) - 1);
    let mut cell = [0; 3];
    for bit in 0..ORDER_BITS {
        for (axis, cell) in (0..).zip(&mut cell) {
            *cell |= u32::from(at >> (3 * bit + axis) & 1 == 1) << bit;
        }
    }
    cell
}

/// A random number from 0 to 1.
#[allow(clippy::cast_precision_loss, reason = "53 bits fit")]
fn unit(random: &mut SmallRng) -> f64 {
    (random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
}

/// Simulates a few steps.
pub(super) fn work(memory: &mut [u32]) {
    let mut system = System::new(memory);
    for _ in 0..STEP_COUNT {
        system.step();
    }
}

/// The first word of a body that is at no place, if there is one.
pub(super) fn damage(memory: &mut [u32]) -> Option<usize> {
    let system = System::new(memory);
    let is_wrong = |body: &Body| !vector(body, POSITION).iter().all(|value| value.is_finite());
    system.bodies.iter().position(is_wrong).map(|body| body * size_of::<Body>() / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(bodies: usize) -> Vec<u32> {
        vec![0; bodies / 2 * PAIR_WORDS]
    }

    fn length(vector: [f64; 3]) -> f64 {
        distance_squared(vector, [0.0; 3]).sqrt()
    }

    /// The accelerations of all bodies, and those by direct summation.
    fn compared(system: &mut System<'_>) -> Vec<([f64; 3], [f64; 3])> {
        let cube = system.bounds();
        system.build(cube);
        system.sum(0, cube);
        let direct = |body: usize| {
            let place = vector(&system.bodies[body], POSITION);
            let mut sum = [0.0; 3];
            for (at, other) in system.bodies.iter().enumerate() {
                if at != body {
                    attract(&mut sum, place, number(other, MASS), vector(other, POSITION));
                }
            }
            sum
        };
        let all = 0..system.bodies.len();
        all.map(|body| (system.acceleration(body, &mut Vec::new()), direct(body))).collect()
    }

    /// The mean error of the accelerations, as a share of their mean length.
    fn error(compared: &[([f64; 3], [f64; 3])]) -> f64 {
        let difference = |(tree, direct): &([f64; 3], [f64; 3])| {
            length([0, 1, 2].map(|axis| tree[axis] - direct[axis]))
        };
        let wrong: f64 = compared.iter().map(difference).sum();
        wrong / compared.iter().map(|(_, direct)| length(*direct)).sum::<f64>()
    }

    #[test]
    fn the_forces_are_those_of_direct_summation_within_three_percent() {
        let mut memory = memory(2000);
        prepare(&mut memory, 1);
        let mut system = System::new(&mut memory);
        // Different masses, so that a centre of mass is no mean of places.
        for (body, weight) in system.bodies.iter_mut().zip((1..8_u32).cycle()) {
            set_number(body, MASS, f64::from(weight) / 8000.0);
        }
        let compared = compared(&mut system);
        let error = error(&compared);
        assert!(error > 0.0, "the tree was not used");
        assert!(error < 0.03, "{error}");
    }

    #[test]
    fn bodies_are_in_the_order_of_the_tree_and_it_fits() {
        let mut memory = memory(20_000);
        prepare(&mut memory, 2);
        let mut system = System::new(&mut memory);
        let near = system.bodies.windows(2).map(|pair| {
            distance_squared(vector(&pair[0], POSITION), vector(&pair[1], POSITION)).sqrt()
        });
        let mean = near.sum::<f64>() / 20_000.0;
        assert!(mean < 0.1, "neighbours in memory are {mean} apart");
        let cube = system.bounds();
        system.build(cube);
        let (mass, _) = system.sum(0, cube);
        assert!((mass - 1.0).abs() < 1e-9, "{mass}");
        let (used, all) = (system.node_count, system.nodes.len());
        assert!(used < all && used > all * 4 / 5, "{used} of {all} nodes");
    }

    /// They can never be separated by octants.
    #[test]
    fn bodies_at_one_place_share_a_leaf() {
        let mut memory = memory(200);
        prepare(&mut memory, 3);
        let mut system = System::new(&mut memory);
        for body in &mut system.bodies[..100] {
            set_vector(body, POSITION, [0.25; 3]);
        }
        let compared = compared(&mut system);
        assert!(error(&compared) < 0.03);
        work(&mut memory);
        assert_eq!(damage(&mut memory), None);
    }

    #[test]
    fn a_tree_without_free_nodes_is_exact() {
        let mut memory = memory(200);
        prepare(&mut memory, 4);
        let mut system = System::new(&mut memory);
        let System { bodies, nodes, .. } = &mut system;
        let mut small = System { bodies, nodes: &mut nodes[..1], node_count: 0 };
        assert!(error(&compared(&mut small)) < 1e-12);
    }

    #[test]
    fn any_memory_will_do_and_equal_seeds_give_equal_bits() {
        for words in (0..60).chain([PAIR_WORDS, 10_000]) {
            let run = |seed| {
                let mut memory = vec![7; words];
                prepare(&mut memory, seed);
                work(&mut memory);
                assert_eq!(damage(&mut memory), None, "{words} words");
                memory
            };
            assert_eq!(run(5), run(5));
            assert!(words < 40 || run(5) != run(6), "{words} words");
        }
    }
}
