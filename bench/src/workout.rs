//! Programs that use memory as HPBD's experiments do (Liang, Noronha, Panda: "Swapping to Remote Memory over
//! InfiniBand", 2005): `testswap` writes an array in order, `quicksort` sorts integers.

use std::time::Duration;

use rand::{RngCore, SeedableRng, rngs::SmallRng};
use serde::Serialize;

use crate::placement::now;

/// What is done with the memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workout {
    /// Every word is written once, in the order of addresses.
    Testswap,
    /// Random 32-bit integers are sorted by an unstable quicksort. Filling the memory is not timed.
    Quicksort,
}

/// Memory that a workout damaged.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("word {index} of the memory is wrong after the run")]
pub struct Damaged {
    /// The first wrong word.
    pub index: usize,
}

impl Workout {
    /// Runs once, in this memory; returns the time. The result is checked afterwards.
    ///
    /// # Errors
    /// [`Damaged`] if the memory does not hold what was written to it.
    pub fn run(self, memory: &mut [u32], seed: u64) -> Result<Duration, Damaged> {
        match self {
            Self::Testswap => testswap(memory),
            Self::Quicksort => quicksort(memory, seed),
        }
    }
}

fn testswap(memory: &mut [u32]) -> Result<Duration, Damaged> {
    let value = |index: usize| u32::try_from(index & 0xffff_ffff).unwrap_or(0).wrapping_add(1);
    let begun = now();
    for (index, word) in memory.iter_mut().enumerate() {
        *word = value(index);
    }
    let time = now() - begun;
    match memory.iter().enumerate().find(|(index, word)| **word != value(*index)) {
        Some((index, _)) => Err(Damaged { index }),
        None => Ok(time),
    }
}

fn quicksort(memory: &mut [u32], seed: u64) -> Result<Duration, Damaged> {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut sum = 0_u64;
    for word in &mut *memory {
        *word = random.next_u32();
        sum = sum.wrapping_add(u64::from(*word));
    }
    let begun = now();
    memory.sort_unstable();
    let time = now() - begun;
    let mut previous = 0;
    for (index, word) in memory.iter().enumerate() {
        if *word < previous {
            return Err(Damaged { index });
        }
        previous = *word;
        sum = sum.wrapping_sub(u64::from(*word));
    }
    if sum == 0 { Ok(time) } else { Err(Damaged { index: memory.len() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_leave_what_they_say() {
        let mut memory = vec![0; 10_000];
        Workout::Testswap.run(&mut memory, 1).expect("it is plain memory");
        assert_eq!((memory[0], memory[9999]), (1, 10_000));
        Workout::Quicksort.run(&mut memory, 1).expect("it is plain memory");
        assert!(memory.is_sorted());
    }
}
