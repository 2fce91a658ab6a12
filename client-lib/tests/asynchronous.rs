//! The async face against real memory nodes.
#![cfg(feature = "tokio")]

include!("support/rack.rs");

use bluebridge::{AsyncClient, Client, EndpointConfig, Error, NodeId, QUEUE_LENGTH};
use rack::{Rack, SPACE};

fn client(rack: &Rack) -> AsyncClient {
    let config = EndpointConfig::new(SPACE, NodeId(1000), 1);
    AsyncClient::new(Client::open(config, rack.attach(NodeId(1000)))).expect("a thread")
}

#[tokio::test]
async fn calls_of_many_tasks_are_done() -> Result<(), Error> {
    let rack = Rack::start(&[NodeId(1)], 64 << 20);
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
    let rack = Rack::start(&[NodeId(1)], 1 << 20);
    let client = client(&rack);
    let region = client.create(4096, None).await?;
    for _ in 0..100 {
        let add = client.fetch_add(region.base(), 1);
        drop(tokio::time::timeout(core::time::Duration::from_micros(1), add).await);
    }
    let total = client.fetch_add(region.base(), 0).await?;
    assert!(total <= 100, "each happened once or was never queued: {total}");
    let error = client.read(region.base(), 0).await.expect_err("nothing to read");
    assert!(matches!(error, Error::Length));
    Ok(())
}
