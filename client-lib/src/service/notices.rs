//! Notices of the space: memory that was freed, zeroed or created.

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::sync::{
    Arc, Mutex, PoisonError,
    mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
};

use bluebridge_protocol::owner::Notice;

/// The most notices that can wait in a subscription.
pub const NOTICES_WAITING_MAX: usize = 1024;

/// A subscription to the space's notices.
#[derive(Debug)]
pub struct Notices {
    receiver: Receiver<Notice>,
    lost_count: Arc<AtomicU64>,
}

impl Notices {
    /// A notice that waits; `None` if there is none.
    #[must_use]
    pub fn try_next(&self) -> Option<Notice> {
        self.receiver.try_recv().ok()
    }

    /// The next notice; `None` if none arrived in time, or the service ended.
    #[must_use]
    pub fn next_within(&self, timeout: Duration) -> Option<Notice> {
        self.receiver.recv_timeout(timeout).ok()
    }

    /// Notices that were dropped because [`NOTICES_WAITING_MAX`] waited.
    #[must_use]
    pub fn lost_count(&self) -> u64 {
        self.lost_count.load(Ordering::Relaxed)
    }
}

/// The subscribers.
#[derive(Debug, Default)]
pub(super) struct Subscribers(Mutex<Vec<Subscriber>>);

#[derive(Debug)]
struct Subscriber {
    sender: SyncSender<Notice>,
    lost_count: Arc<AtomicU64>,
}

impl Subscribers {
    pub(super) fn subscribe(&self) -> Notices {
        let (sender, receiver) = sync_channel(NOTICES_WAITING_MAX);
        let lost_count = Arc::<AtomicU64>::default();
        let subscriber = Subscriber { sender, lost_count: Arc::clone(&lost_count) };
        let mut subscribers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // If no notices arrive, nothing else removes subscriptions that were dropped.
        subscribers.retain(|other| Arc::strong_count(&other.lost_count) > 1);
        subscribers.push(subscriber);
        Notices { receiver, lost_count }
    }

    /// Passes a notice to all subscriptions; a full one loses it, and one that was dropped is removed.
    pub(super) fn notify(&self, notice: Notice) {
        let mut subscribers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        subscribers.retain(|subscriber| match subscriber.sender.try_send(notice) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => {
                subscriber.lost_count.fetch_add(1, Ordering::Relaxed);
                true
            }
            Err(TrySendError::Disconnected(_)) => false,
        });
    }
}

#[cfg(test)]
mod tests {
    use bluebridge_protocol::owner::NoticeKind;
    use bluebridge_wire::{ArenaGeneration, Location, NodeId, Pointer, Space, Tag};

    use super::*;

    #[test]
    fn who_waits_gets_the_next_notice_and_what_has_no_room_is_counted() {
        let location = Location::new(ArenaGeneration::default(), 4096).expect("small");
        let pointer = Pointer { space: Space(1), node: NodeId(7), tag: Tag(3), location };
        let notice = |pages| Notice { kind: NoticeKind::Invalidate, pointer, pages };
        let subscribers = Subscribers::default();
        let notices = subscribers.subscribe();
        subscribers.notify(notice(1));
        assert_eq!(notices.next_within(Duration::from_secs(20)), Some(notice(1)));
        for pages in (0_u32..).take(NOTICES_WAITING_MAX + 2) {
            subscribers.notify(notice(pages));
        }
        assert_eq!(notices.lost_count(), 2);
        let waiting = std::iter::from_fn(|| notices.try_next()).map(|notice| notice.pages);
        assert!(waiting.eq((0..).take(NOTICES_WAITING_MAX)));
    }

    #[test]
    fn who_is_gone_is_forgotten_though_no_notice_comes() {
        let subscribers = Subscribers::default();
        let stays = subscribers.subscribe();
        for _ in 0..10 {
            drop(subscribers.subscribe());
        }
        let _last = subscribers.subscribe();
        assert_eq!(subscribers.0.lock().expect("no thread panicked").len(), 2);
        assert!(stays.try_next().is_none());
        assert_eq!(stays.next_within(Duration::from_millis(1)), None, "it is kept, and waits");
    }
}
