//! What the observer of a server is told at once, and what it reads when it wants to.
//!
//! A shard that sleeps wakes nobody. Its observer sleeps as well, so the shard tells it what it waits for. Nothing is
//! told twice before the observer has read the numbers.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

/// What a shard tells.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum News {
    /// The thread of a shard has ended.
    Ended,
    /// The free pages are used up or available again, or half or double of what the observer knows.
    FreePages,
    /// Other arena generations are wanted than before.
    Generations,
    /// A migration to the shard has come to its end.
    Taken,
}

/// Is told; from the thread of a shard, so it must not wait.
pub type Bell = Arc<dyn Fn(News) + Send + Sync>;

/// The observer was told, and has not read the number yet.
const TOLD: u64 = u64::MAX;

/// Readings of a number that changes all the time. Its shard is awake then, and looks again soon.
const READINGS_MAX: usize = 8;

/// What the observer of one shard knows. The shard's thread alone calls [`Self::look`].
#[derive(Default)]
pub(crate) struct Watch {
    bell: OnceLock<Bell>,
    /// Free pages as the observer read them last, or [`TOLD`].
    free_pages: AtomicU64,
    wanted_generation: AtomicU64,
    has_ended: AtomicBool,
}

impl core::fmt::Debug for Watch {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

impl Watch {
    /// Tells `bell` from now on. The caller reads everything once afterwards. Only the first bell counts.
    pub(crate) fn tell(&self, bell: Bell) {
        let _ = self.bell.set(bell);
        // A shard that does not see the bell has stored before what the caller reads now.
        fence(Ordering::SeqCst);
    }

    /// Tells what is news in the present numbers, which were stored before.
    pub(crate) fn look(&self, free_pages: u64, wanted_generation: u64) {
        // Either the observer finds the new number when it checks its reading, or what it has read is found here.
        fence(Ordering::SeqCst);
        let Some(bell) = self.bell.get() else { return };
        let known = self.free_pages.load(Ordering::Relaxed);
        let is_leap = known.abs_diff(free_pages) > known.min(free_pages);
        // If the exchange fails, the observer has just read, and finds the new number.
        if known != TOLD
            && is_leap
            && self
                .free_pages
                .compare_exchange(known, TOLD, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
        {
            bell(News::FreePages);
        }
        if self.wanted_generation.swap(wanted_generation, Ordering::Relaxed) != wanted_generation {
            bell(News::Generations);
        }
    }

    /// Reads the free pages for the observer, who is told from now on if they differ much from these.
    pub(crate) fn read_free_pages(&self, published: &AtomicU64) -> u64 {
        let mut free_pages = published.load(Ordering::Relaxed);
        for _ in 0..READINGS_MAX {
            self.free_pages.store(free_pages, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            let again = published.load(Ordering::Relaxed);
            if again == free_pages {
                break;
            }
            free_pages = again;
        }
        free_pages
    }

    /// The thread of the shard ends.
    pub(crate) fn end(&self) {
        self.has_ended.store(true, Ordering::Relaxed);
        self.ring(News::Ended);
    }

    /// Tells what the observer reads in numbers that were stored before.
    pub(crate) fn ring(&self, news: News) {
        fence(Ordering::SeqCst);
        if let Some(bell) = self.bell.get() {
            bell(news);
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, Mutex};

    use super::*;

    /// A shard with its observer.
    struct Pair {
        watch: Watch,
        published: AtomicU64,
        told: Arc<Mutex<Vec<News>>>,
    }

    impl Pair {
        fn new(free_pages: u64) -> Self {
            let told = Arc::<Mutex<Vec<News>>>::default();
            let (watch, published) = (Watch::default(), AtomicU64::new(free_pages));
            let to = Arc::clone(&told);
            watch.tell(Arc::new(move |news| to.lock().unwrap().push(news)));
            let pair = Self { watch, published, told };
            pair.read();
            pair
        }

        fn read(&self) -> u64 {
            self.watch.read_free_pages(&self.published)
        }

        fn publish(&self, free_pages: u64, wanted: u64) -> Vec<News> {
            self.published.store(free_pages, Ordering::Relaxed);
            self.watch.look(free_pages, wanted);
            core::mem::take(&mut *self.told.lock().unwrap())
        }
    }

    #[test]
    fn free_pages_are_told_once_if_they_differ_much_from_what_was_read() {
        let pair = Pair::new(100);
        assert_eq!(pair.publish(50, 0), [], "no less than half");
        assert_eq!(pair.publish(49, 0), [News::FreePages]);
        assert_eq!(pair.publish(10, 0), [], "it was told and has not read");
        assert_eq!(pair.read(), 10);
        assert_eq!((pair.publish(20, 0), pair.publish(9, 0)), (vec![], vec![]));
        assert_eq!(pair.publish(21, 0), [News::FreePages], "more than double");
        assert_eq!(pair.read(), 21);
        assert_eq!(pair.publish(0, 0), [News::FreePages], "used up");
        assert_eq!(pair.read(), 0);
        assert_eq!((pair.publish(0, 0), pair.publish(1, 0)), (vec![], vec![News::FreePages]));
    }

    #[test]
    fn small_steps_are_told_when_they_add_up() {
        let pair = Pair::new(1000);
        let told: usize = (0..=600).map(|used| pair.publish(1000 - used, 0).len()).sum();
        assert_eq!(told, 1);
    }

    #[test]
    fn every_change_of_the_wanted_generation_and_the_end_are_told() {
        let pair = Pair::new(1);
        assert_eq!(pair.publish(1, 3), [News::Generations]);
        assert_eq!(pair.publish(1, 3), []);
        assert_eq!(pair.publish(1, 5), [News::Generations]);
        assert!(!pair.watch.has_ended());
        pair.watch.ring(News::Taken);
        pair.watch.end();
        assert!(pair.watch.has_ended());
        assert_eq!(*pair.told.lock().unwrap(), [News::Taken, News::Ended]);
    }

    #[test]
    fn without_an_observer_nothing_is_lost() {
        let watch = Watch::default();
        watch.look(7, 9);
        watch.end();
        let told = Arc::<Mutex<Vec<News>>>::default();
        let to = Arc::clone(&told);
        watch.tell(Arc::new(move |news| to.lock().unwrap().push(news)));
        assert!(watch.has_ended(), "who begins to observe sees it");
        watch.look(7, 9);
        assert_eq!(*told.lock().unwrap(), [News::FreePages, News::Generations]);
    }

    /// While one thread publishes and another one reads: in the end the observer knows how many pages are free, or was
    /// told and will read.
    #[test]
    fn no_news_is_lost_between_threads() {
        const ROUNDS: u64 = 2000;
        let pair = Pair::new(1);
        let together = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    together.wait();
                    pair.read();
                    together.wait();
                }
            });
            for round in 0..ROUNDS {
                let free_pages = 1 + 99 * (round % 2);
                together.wait();
                pair.publish(free_pages, 0);
                together.wait();
                let known = pair.watch.free_pages.load(Ordering::Relaxed);
                assert!([free_pages, TOLD].contains(&known), "{known}, and not {free_pages}");
            }
        });
    }
}
