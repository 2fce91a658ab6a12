//! Anycast weights from free memory, coarse enough that small changes do not rewrite a table.

/// The greatest weight of a member.
const WEIGHT_MAX: u16 = 16;

/// The most members of a choice, and the largest sum of their weights: the number of slots of a
/// choice in a switch.
pub(super) const SLOTS: usize = bluebridge_p4::declaration::ANYCAST_GROUP_SIZE as usize;

/// The change of free memory, in levels, after which the level changes. More than half a
/// level, so that memory that varies around a boundary between two levels stays at one.
const HYSTERESIS: f64 = 0.75;

/// The level of this amount of free memory, two levels per doubling, given the former level; `None` for none.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a logarithm of 64 bits lies between 0 and 128"
)]
pub(super) fn level(free_pages: u64, before: Option<u8>) -> Option<u8> {
    if free_pages == 0 {
        return None;
    }
    let exact = (free_pages as f64).log2() * 2.0;
    match before {
        Some(level) if (exact - f64::from(level)).abs() <= HYSTERESIS => Some(level),
        _ => Some(exact.round() as u8),
    }
}

/// The approximate number of free pages of a level.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a float converts to the nearest integer"
)]
pub(super) fn pages(level: u8) -> u64 {
    (f64::from(level) / 2.0).exp2() as u64
}

/// The weights of members with these levels (at most [`SLOTS`] of them), proportional to their
/// free memory and at least 1.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the result lies between 0 and the scale"
)]
pub(super) fn weights(levels: &[u8]) -> Vec<u16> {
    let Some(greatest) = levels.iter().max() else { return Vec::new() };
    let fair = u16::try_from(SLOTS / levels.len()).unwrap_or(WEIGHT_MAX);
    let scale = f64::from(fair.clamp(1, WEIGHT_MAX));
    let weight = |level: &u8| {
        let share = (f64::from(*level) - f64::from(*greatest)) / 2.0;
        ((scale * share.exp2()).round() as u16).max(1)
    };
    levels.iter().map(weight).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn weights_follow_free_memory() {
        let levels: Vec<u8> =
            [1 << 20, 1 << 19, 1 << 10].iter().filter_map(|free| level(*free, None)).collect();
        assert_eq!(weights(&levels), [16, 8, 1]);
        assert_eq!(level(0, Some(9)), None);
    }

    #[test]
    fn small_changes_change_nothing() {
        let before = level(100_000, None);
        for free in (85_000..118_000).step_by(100) {
            assert_eq!(level(free, before), before, "{free}");
        }
        assert_ne!(level(200_000, before), before);
    }

    proptest! {
        #[test]
        fn weights_fit_a_switch(frees in prop::collection::vec(1_u64.., 1..=SLOTS)) {
            let levels: Vec<u8> = frees.iter().filter_map(|free| level(*free, None)).collect();
            let weights = weights(&levels);
            prop_assert_eq!(weights.len(), frees.len());
            prop_assert!(weights.iter().all(|weight| *weight >= 1));
            prop_assert!(weights.iter().map(|weight| usize::from(*weight)).sum::<usize>() <= SLOTS);
        }
    }
}
