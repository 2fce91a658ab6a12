//! Single rules.

use super::super::{
    Arrival, Replacement,
    duel::{Duel, Policy, Role},
    ghosts::Ghosts,
};

/// The first pages whose role is `role` if the capacity is 1000 pages.
fn pages_of(role: Role) -> impl Iterator<Item = u64> {
    let duel = Duel::new(1000);
    (0..).filter(move |&page| duel.role(page) == role)
}

#[test]
fn an_empty_set_has_no_victim() {
    let mut replacement = Replacement::new(0);
    assert_eq!(replacement.victim(), None);
    replacement.remove(3);
    replacement.touch(3);
    replacement.insert(u64::MAX, Arrival::Demand);
    assert_eq!(replacement.victim(), Some(u64::MAX));
    assert_eq!((replacement.victim(), replacement.len()), (None, 0));
}

#[test]
fn every_block_has_one_leader_of_each_policy() {
    for (capacity, shares) in [(0, 32), (1000, 32), (2000, 64), (4096, 128), (usize::MAX, 128)] {
        let duel = Duel::new(capacity);
        assert_eq!(duel.shares(), shares);
        let block_pages = shares as u64;
        for block in (0..1000).chain([u64::MAX / block_pages]) {
            for role in Role::ALL {
                let pages = block * block_pages..=block * block_pages + (block_pages - 1);
                let count = pages.filter(|&page| duel.role(page) == role).count();
                assert_eq!(count, duel.share(role));
            }
        }
    }
}

#[test]
fn a_page_that_returns_soon_outlasts_a_scan() {
    let mut replacement = Replacement::new(1000);
    let mut scan = pages_of(Role::Lead(Policy::Return));
    let page = scan.next().expect("endless");
    replacement.insert(page, Arrival::Demand);
    for other in scan.by_ref().take(31) {
        replacement.insert(other, Arrival::Demand);
    }
    assert_eq!(replacement.victim(), Some(page));
    replacement.insert(page, Arrival::Demand);
    for other in scan.take(10_000) {
        replacement.insert(other, Arrival::Demand);
        assert_ne!(replacement.victim(), Some(page));
    }
}

#[test]
fn only_a_late_touch_counts() {
    let victims_before_it = |others_before_touch| {
        let mut replacement = Replacement::new(1000);
        let mut others = pages_of(Role::Lead(Policy::Return));
        let page = others.next().expect("endless");
        replacement.insert(page, Arrival::Demand);
        for other in others.by_ref().take(others_before_touch) {
            replacement.insert(other, Arrival::Demand);
        }
        replacement.touch(page);
        for other in others.take(100 - others_before_touch) {
            replacement.insert(other, Arrival::Demand);
        }
        core::iter::from_fn(|| replacement.victim()).position(|victim| victim == page)
    };
    assert_eq!(victims_before_it(10), Some(0));
    assert!(victims_before_it(60) > Some(50));
}

#[test]
fn a_kept_page_does_not_block_the_others() {
    let duel = Duel::new(100);
    for kept in Role::ALL {
        let mut replacement = Replacement::new(100);
        for page in 0..100 {
            replacement.insert(page, Arrival::Demand);
        }
        let mut left = 0;
        for _ in 0..400 {
            let Some(page) = replacement.victim() else { break };
            if duel.role(page) == kept {
                replacement.keep(page);
                replacement.keep(page);
            } else {
                left += 1;
            }
        }
        let of_others = (0..100).filter(|&page| duel.role(page) != kept).count();
        assert_eq!((left, replacement.len()), (of_others, 100 - of_others));
    }
}

#[test]
fn ghosts_give_distance_and_returns_once() {
    let mut ghosts = Ghosts::new(100);
    let hash = |page: u64| super::super::hash(page);
    for page in 0..100 {
        ghosts.insert(hash(page), u8::try_from(page % 4).unwrap_or(0));
    }
    let found = (0..100u32).filter(|&page| {
        let Some(ghost) = ghosts.take(hash(u64::from(page))) else { return false };
        assert_eq!((ghost.distance, u32::from(ghost.returns)), (99 - page, page % 4));
        true
    });
    assert!(found.count() >= 95, "a bucket overflows seldom");
    assert!((0..1000).all(|page| ghosts.take(hash(page)).is_none()));
}
