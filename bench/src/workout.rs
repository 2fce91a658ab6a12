//! Programs that use memory as HPBD's experiments do (Liang, Noronha, Panda: "Swapping to Remote Memory over
//! InfiniBand", 2005, section 6): `testswap` writes an array in order, `quicksort` sorts integers, `barnes-hut`
//! simulates bodies that attract each other.

mod barnes_hut;
mod together;

use rand::{RngCore, SeedableRng, rngs::SmallRng};
use serde::{Deserialize, Serialize};

pub use together::{Finished, RunError, Together};

/// What is done with the memory.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workout {
    /// Bodies move in two steps of time, and attract each other through an octree. Their first places are not timed.
    BarnesHut,
    /// Random 32-bit integers are sorted by an unstable quicksort. Filling the memory is not timed.
    Quicksort,
    /// Every word is written once, in the order of addresses.
    Testswap,
}

/// Memory that a workout damaged.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("word {index} of the memory is wrong after the run")]
pub struct Damaged {
    /// The first wrong word.
    pub index: usize,
}

impl Workout {
    /// Its name, as in the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::BarnesHut => "barnes-hut",
            Self::Quicksort => "quicksort",
            Self::Testswap => "testswap",
        }
    }

    /// Fills the memory; returns the sum of its words if the work must keep it.
    fn prepare(self, memory: &mut [u32], seed: u64) -> Option<u64> {
        match self {
            Self::BarnesHut => barnes_hut::prepare(memory, seed),
            Self::Quicksort => {
                let mut random = SmallRng::seed_from_u64(seed);
                let mut sum = 0_u64;
                for word in memory {
                    *word = random.next_u32();
                    sum = sum.wrapping_add(u64::from(*word));
                }
                return Some(sum);
            }
            Self::Testswap => {}
        }
        None
    }

    /// What is timed.
    fn work(self, memory: &mut [u32]) {
        match self {
            Self::BarnesHut => barnes_hut::work(memory),
            Self::Quicksort => memory.sort_unstable(),
            Self::Testswap => {
                for (index, word) in memory.iter_mut().enumerate() {
                    *word = counted(index);
                }
            }
        }
    }

    /// Checks the memory after the work. Returns a digest of all words, because only the same run in other memory
    /// shows whether every bit of a simulation is right.
    fn check(self, memory: &mut [u32], sum: Option<u64>) -> Result<u64, Damaged> {
        if self == Self::BarnesHut
            && let Some(index) = barnes_hut::damage(memory)
        {
            return Err(Damaged { index });
        }
        let (mut digest, mut previous, mut left) = (0_u64, 0, sum.unwrap_or(0));
        for (index, word) in memory.iter().enumerate() {
            let is_right = match self {
                Self::BarnesHut => true,
                Self::Quicksort => *word >= previous,
                Self::Testswap => *word == counted(index),
            };
            if !is_right {
                return Err(Damaged { index });
            }
            previous = *word;
            left = left.wrapping_sub(u64::from(*word));
            digest = (digest.rotate_left(5) ^ u64::from(*word)).wrapping_mul(0x517c_c1b7_2722_0a95);
        }
        if sum.is_some() && left != 0 {
            return Err(Damaged { index: memory.len() });
        }
        Ok(digest)
    }
}

/// What `testswap` writes to a word.
fn counted(index: usize) -> u32 {
    u32::try_from(index & 0xffff_ffff).unwrap_or(0).wrapping_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Workout; 3] = [Workout::BarnesHut, Workout::Quicksort, Workout::Testswap];

    fn done(workout: Workout, memory: &mut [u32]) -> Result<u64, Damaged> {
        let sum = workout.prepare(memory, 1);
        workout.work(memory);
        workout.check(memory, sum)
    }

    #[test]
    fn they_leave_what_they_say() {
        let mut memory = vec![0; 10_000];
        done(Workout::Testswap, &mut memory).expect("it is plain memory");
        assert_eq!((memory[0], memory[9999]), (1, 10_000));
        done(Workout::Quicksort, &mut memory).expect("it is plain memory");
        assert!(memory.is_sorted());
    }

    #[test]
    fn a_wrong_word_is_seen() {
        for workout in ALL {
            let mut memory = vec![0; 10_000];
            let sum = workout.prepare(&mut memory, 1);
            workout.work(&mut memory);
            let digest = workout.check(&mut memory, sum).expect("it is plain memory");
            for wrong in [0, 5000, 9999] {
                let mut memory = memory.clone();
                memory[wrong] ^= 1;
                let seen = workout.check(&mut memory, sum).map_or(true, |other| other != digest);
                assert!(seen, "{workout:?}: word {wrong}");
            }
        }
    }

    #[test]
    fn a_body_at_no_place_is_damage() {
        let mut memory = vec![0; 10_000];
        done(Workout::BarnesHut, &mut memory).expect("it is plain memory");
        memory[161] = 0x7ff8_0000;
        let damaged = Workout::BarnesHut.check(&mut memory, None).expect_err("not a number");
        assert_eq!(damaged.index, 160);
    }
}
