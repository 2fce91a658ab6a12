//! The P4Runtime driver at an agent: refused pipelines, full tables, and two controllers at once.

use std::net::SocketAddr;

use bluebridge_controller::core::Body;
use bluebridge_controller::driver::{
    DriverError, OpenFlowAddress, OpenFlowConnector, P4RuntimeConnector, Pipeline,
    SwitchConnector as _, SwitchDriver, SwitchEvent, UpdateError,
};
use bluebridge_controller::plan::{Object, TableUpdate};
use bluebridge_controller::store::ElectionId;
use bluebridge_p4::pipeline::{Action, Forward, Key, MacAddr, SwitchPort, Ternary};
use bluebridge_p4::program::BMV2_CONFIG;
use bluebridge_testkit::own_loopback;

use crate::support::{Agent, runtime};

const SCOPE: u32 = 0xfdbb_0001;

const fn id(high: u64, low: u64) -> ElectionId {
    ElectionId { high, low }
}

fn node(number: u16) -> TableUpdate {
    let prefix = u128::from(SCOPE) << 80 | u128::from(number) << 64;
    let forward = Forward { port: SwitchPort(1), dst_mac: MacAddr([2, 0, 0, 0, 0, 1]) };
    let key = Key::Directory { prefix, prefix_len: 48 };
    TableUpdate::Insert(Object::Entry(key, Body::new(Action::Forward(forward))))
}

async fn ready(
    connector: &mut P4RuntimeConnector,
    election_id: ElectionId,
) -> Box<dyn SwitchDriver> {
    let mut driver = connector.connect(election_id).await.expect("it becomes the primary");
    driver.ensure_pipeline().await.expect("the agent takes its pipeline");
    driver
}

#[test]
fn a_refused_pipeline_leaves_the_entries() {
    let agent = Agent::start(4);
    let mut right = P4RuntimeConnector::new(&agent.uri(), 1);
    let mut other = P4RuntimeConnector::with_device_config(&agent.uri(), 1, BMV2_CONFIG.to_vec());
    runtime().block_on(async {
        let mut driver = ready(&mut right, id(1, 1)).await;
        assert_eq!(driver.apply(&[node(1)]).await, Ok(vec![Ok(())]));
        let before = driver.read().await.expect("the tables").tables;
        drop(driver);
        let mut driver = other.connect(id(1, 2)).await.expect("the greater id");
        match driver.ensure_pipeline().await {
            Err(DriverError::Refused { what: "the pipeline", reason }) => {
                assert!(reason.contains("InvalidArgument"), "{reason}");
            }
            unexpected => panic!("{unexpected:?}"),
        }
        drop(driver);
        let mut driver = right.connect(id(1, 3)).await.expect("the greatest id");
        assert_eq!(driver.ensure_pipeline().await, Ok(Pipeline::Kept));
        assert_eq!(driver.read().await.expect("the tables").tables, before);
    });
}

#[test]
fn the_loser_of_two_controllers_cannot_write() {
    let agent = Agent::start(4);
    let connector = || P4RuntimeConnector::new(&agent.uri(), 1);
    let (mut one, mut two) = (connector(), connector());
    runtime().block_on(async {
        let mut first = ready(&mut one, id(1, 1)).await;
        assert_eq!(first.apply(&[node(1)]).await, Ok(vec![Ok(())]));
        let mut second = two.connect(id(2, 1)).await.expect("greater");
        assert_eq!(second.ensure_pipeline().await, Ok(Pipeline::Kept));
        let refused = first.apply(&[node(2)]).await;
        assert!(refused.is_err(), "{refused:?}");
        let theirs = id(2, 1);
        let fenced = DriverError::Fenced { ours: id(1, 1), theirs };
        assert_eq!(first.next_event().await, SwitchEvent::Broken(fenced));
        let fenced = DriverError::Fenced { ours: id(1, 2), theirs };
        assert_eq!(one.connect(id(1, 2)).await.map(drop), Err(fenced));
        assert_eq!(second.apply(&[node(3)]).await, Ok(vec![Ok(())]));
        let tables = second.read().await.expect("the tables").tables;
        let TableUpdate::Insert(Object::Entry(refused, _)) = node(2) else { unreachable!() };
        assert_eq!((tables.entries.len(), tables.entries.get(&refused)), (2, None));
    });
}

#[test]
fn a_full_table_refuses_one_entry_and_keeps_the_others() {
    let agent = Agent::start(4);
    let mut connector = P4RuntimeConnector::new(&agent.uri(), 1);
    let notify = |priority| {
        let any = Ternary::default();
        let status = Ternary { value: u8::try_from(priority).expect("a byte"), mask: 0xff };
        let key = Key::Notify { src_command: any, dst_command: any, src_status: status, priority };
        TableUpdate::Insert(Object::Entry(key, Body::new(Action::CopyToController)))
    };
    runtime().block_on(async {
        let mut driver = ready(&mut connector, id(1, 1)).await;
        for priority in 1..=64 {
            assert_eq!(driver.apply(&[notify(priority)]).await, Ok(vec![Ok(())]));
        }
        let before = driver.read().await.expect("the tables").tables;
        let results = driver.apply(&[notify(65), node(1)]).await.expect("the connection holds");
        let full = matches!(&results[0], Err(UpdateError::Refused(why)) if why.contains("full"));
        assert!(full && results[1] == Ok(()), "{results:?}");
        let after = driver.read().await.expect("the tables").tables;
        assert_eq!(after.entries.len(), before.entries.len() + 1);
    });
}

#[test]
fn an_openflow_address_of_a_p4runtime_server_is_named() {
    let agent = Agent::start(1);
    let mut connector = OpenFlowConnector::new(OpenFlowAddress::Connect(agent.address));
    runtime().block_on(async {
        let failure = connector.look().await.map(drop).expect_err("it is another protocol");
        let address = agent.address;
        let expected = format!(
            "{address} looks like a P4Runtime server, not like an OpenFlow switch; \
             write p4runtime://{address} as the address of the switch"
        );
        assert_eq!(failure.to_string(), expected);
    });
    let closed = SocketAddr::from((own_loopback(), 1));
    let mut connector = OpenFlowConnector::new(OpenFlowAddress::Connect(closed));
    let failure = runtime().block_on(connector.look()).map(drop);
    assert!(matches!(failure, Err(DriverError::Lost(_))), "{failure:?}");
}
