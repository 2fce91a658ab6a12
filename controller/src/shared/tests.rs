use std::sync::atomic::AtomicBool;

use bluebridge_p4::pipeline::{MacAddr, SwitchPort};
use bluebridge_wire::Space;

use super::*;
use crate::core::{Attachment, Carrier, Join, JoinError, Ports, Role};

fn client(port: u16) -> Join {
    let [_, low] = port.to_be_bytes();
    Join {
        name: format!("c{port}"),
        role: Role::Client,
        space: Space(1),
        mac: MacAddr([2, 0, 0, 0, 0, low]),
        switch: String::new(),
        attachment: Attachment::Port(SwitchPort(port)),
        capacity_pages: 0,
        shard_count: 0,
        carrier: Carrier::Socket,
        mtu: 1500,
        nonce: 1,
        previous: None,
        notices: false,
    }
}

struct Bench {
    shared: Arc<SharedState>,
    broken: Arc<AtomicBool>,
    view: watch::Sender<SwitchView>,
}

impl Bench {
    fn new() -> Self {
        let (store, broken) = Store::breakable().unwrap();
        let ports = Ports::Unlisted;
        let (view, seen) = watch::channel(SwitchView { ports, ..SwitchView::default() });
        let desired = watch::channel(Desired::default()).0;
        let stored = store.load().unwrap();
        let switches = vec![SwitchEnds { desired, view: seen }];
        let shared = SharedState::new(CoreConfig::default(), Arc::new(store), stored, switches);
        let shared = Arc::new(shared);
        Self { shared, broken, view }
    }

    fn desired(&self) -> Desired {
        self.shared.switches().remove(0).1
    }

    async fn join(&self, port: u16) -> Result<Result<u16, JoinError>, Arc<StoreError>> {
        let join = client(port);
        let change = self
            .shared
            .change(move |core, now| core.join(now, &join, [1; 16]).map(|given| given.0.node));
        change.await
    }
}

#[tokio::test]
async fn nothing_unstored_is_answered_or_installed_and_the_controller_ends() {
    let bench = Bench::new();
    assert_eq!(bench.join(1).await.unwrap(), Ok(0xfffe));
    let before = bench.desired();
    bench.broken.store(true, Ordering::SeqCst);
    let error = bench.join(2).await.unwrap_err();
    assert!(matches!(*error, StoreError::Io(_)), "{error}");
    assert_eq!(bench.desired().tables, before.tables);
    let ended = tokio::time::timeout(Duration::from_secs(5), bench.shared.failed()).await;
    assert!(ended.is_ok(), "the failure is reported");
    bench.broken.store(false, Ordering::SeqCst);
    assert!(bench.join(3).await.is_err(), "no later change is based on an unstored one");
    assert_eq!(bench.desired().tables, before.tables);
}

#[tokio::test]
async fn a_caller_that_goes_away_leaves_no_half_change() {
    let bench = Bench::new();
    let version = bench.desired().version;
    {
        let joining = bench.join(1);
        tokio::pin!(joining);
        // Polled once, then dropped, as the server does when a connection breaks.
        let polled = std::future::poll_fn(|context| {
            std::task::Poll::Ready(joining.as_mut().poll(context).is_pending())
        });
        assert!(polled.await);
    }
    let mut desired = bench.shared.switches[0].desired.subscribe();
    let published = desired.wait_for(|desired| desired.version > version);
    tokio::time::timeout(Duration::from_secs(5), published).await.unwrap().unwrap();
    assert!(bench.shared.look(|core| core.node(NodeId(0xfffe)).is_some()).await);
}

#[tokio::test]
async fn installed_means_in_sync_with_what_is_desired_now() {
    let bench = Bench::new();
    bench.join(1).await.unwrap().unwrap();
    assert!(!bench.shared.installed(Duration::from_millis(10)).await);
    let version = bench.desired().version;
    bench.view.send_modify(|view| {
        view.version = version;
        view.state = SwitchState::InSync;
    });
    assert!(bench.shared.installed(Duration::from_secs(5)).await);
    bench.view.send_modify(|view| view.state = SwitchState::Disconnected);
    assert!(!bench.shared.is_installed_for(Some(SwitchId(0))));
}

#[tokio::test]
async fn a_closed_store_takes_nothing() {
    let bench = Bench::new();
    bench.shared.close();
    assert!(bench.join(1).await.is_err());
}
