//! The async client against real memory nodes.
#![cfg(feature = "tokio")]

use core::time::Duration;

use bluebridge::{
    AsyncClient, Client, Decision, EndpointConfig, Error, MemoryNode, NodeId, Pointer, QUEUE_LENGTH,
};

use crate::rack::{LocalRack, SPACE};

fn client(rack: &LocalRack) -> AsyncClient {
    client_with(rack, Duration::from_secs(5))
}

fn client_with(rack: &LocalRack, deadline: Duration) -> AsyncClient {
    let mut config = EndpointConfig::new(SPACE, NodeId(1000), 1);
    config.memory_nodes = vec![MemoryNode { node: NodeId(1), shard_count: 1 }];
    config.deadline = deadline;
    AsyncClient::new(Client::open(config, rack.attach(NodeId(1000)))).expect("a thread")
}

#[tokio::test]
async fn calls_of_many_tasks_are_done() -> Result<(), Error> {
    let rack = LocalRack::start(&[NodeId(1)], 64 << 20);
    let client = client(&rack);
    let tasks: Vec<_> = (0..2 * QUEUE_LENGTH)
        .map(|task| {
            let client = client.clone();
            tokio::spawn(async move {
                let data = vec![u8::try_from(task % 251).expect("small"); 5000];
                let region = client.alloc_write(data.clone(), None).await?;
                client.write(region.base(), data[..10].to_vec()).await?;
                let back = client.read(region.base(), 5000).await?;
                assert!(back == data, "task {task}");
                client.zero(region.base(), 100).await?;
                client.fetch_add(region.base(), 5).await?;
                assert_eq!(client.compare_swap(region.base(), 5, 6).await?, 5);
                client.delete(region).await
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("it did not panic")?;
    }
    assert_eq!(client.stat(NodeId(1)).await?.used_pages, 0);
    Ok(())
}

#[tokio::test]
async fn a_dropped_call_leaves_the_others_alone() -> Result<(), Error> {
    let rack = LocalRack::start(&[NodeId(1)], 1 << 20);
    let client = client(&rack);
    let region = client.create(4096, None).await?;
    for _ in 0..100 {
        let add = client.fetch_add(region.base(), 1);
        drop(tokio::time::timeout(Duration::from_micros(1), add).await);
    }
    let total = client.fetch_add(region.base(), 0).await?;
    assert!(total <= 100, "each happened once or was never queued: {total}");
    let error = client.read(region.base(), 0).await.expect_err("nothing to read");
    assert!(matches!(error, Error::Length));
    Ok(())
}

#[tokio::test]
async fn a_finished_call_returns_while_others_of_the_round_wait() -> Result<(), Error> {
    let rack = LocalRack::start(&[NodeId(1)], 1 << 20);
    let client = client_with(&rack, Duration::from_secs(3));
    let region = client.create(20_000, None).await?;
    let nowhere = Pointer { node: NodeId(9), ..region.base() };
    // What is queued while the first READ waits for an absent node is one round.
    let (held, slow) = (client.read(nowhere, 1), client.read(nowhere, 1));
    let quick = async {
        let (read, write) = tokio::join!(
            client.read(region.base(), 20_000),
            client.write(region.base(), vec![1; 9000])
        );
        Ok::<_, Error>((read?.len(), write?))
    };
    tokio::pin!(held, slow, quick);
    // The worker begins with the first alone or with all of them; both rounds wait for node 9.
    tokio::select! {
        biased;
        _ = &mut held => panic!("it cannot be done so soon"),
        () = tokio::time::sleep(Duration::from_millis(100)) => {}
    }
    let (held, (slow_first, read)) = tokio::join!(held, async {
        tokio::select! {
            biased;
            slow = &mut slow => (slow.is_err(), quick.await),
            read = &mut quick => (false, read),
        }
    });
    held.expect_err("there is no such node");
    assert_eq!(read?.0, 20_000);
    assert!(!slow_first, "a finished call waited for the slowest of the round");
    slow.await.expect_err("there is no such node");
    Ok(())
}

#[tokio::test]
async fn an_update_is_a_call_with_a_closure() -> Result<(), Error> {
    let rack = LocalRack::start(&[NodeId(1)], 1 << 20);
    let client = client(&rack);
    let base = client.create(4096, None).await?.base();
    let tasks: Vec<_> = (0..50)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move {
                let increment = |bytes: &mut [u8]| {
                    bytes[0] += 1;
                    Decision::Commit
                };
                client.update(base, 8, increment).await
            })
        })
        .collect();
    for task in tasks {
        assert_eq!(task.await.expect("it did not panic")?.0, Decision::Commit);
    }
    let look = |bytes: &mut [u8]| {
        bytes[1] = 9;
        Decision::Abort
    };
    let (decision, seen) = client.update(base, 2, look).await?;
    assert_eq!((decision, seen), (Decision::Abort, vec![50, 9]));
    assert_eq!(client.read(base, 2).await?, [50, 0]);
    Ok(())
}
