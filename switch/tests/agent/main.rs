//! The agent as its clients see it: pipelines, batches, restarts, clients that do not read.

mod clients;
mod support;

use std::net::Ipv6Addr;
use std::time::Duration;

use bluebridge_p4::entry::{decode, encode};
use bluebridge_p4::p4info::{DEVICE_CONFIG, p4info};
use bluebridge_p4::pipeline::{
    Action, DropReason, Entry, Forward, Key, MacAddr, SwitchPort, Ternary,
};
use bluebridge_p4::proto::bluebridge::switch::v1 as switch;
use bluebridge_p4::proto::google::rpc;
use bluebridge_p4::proto::p4::v1;
use bluebridge_switch::dataplane::DataPlane;
use bluebridge_testkit::UdpFrame;
use prost::Message as _;
use support::{Cabled, Running};
use switch::switch_client::SwitchClient;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};
use v1::p4_runtime_client::P4RuntimeClient;
use v1::set_forwarding_pipeline_config_request::Action as ConfigAction;
use v1::stream_message_request::Update as Request;
use v1::stream_message_response::Update as Received;
use v1::update::Type;

/// How long a response on a stream may take.
const SOON: Duration = Duration::from_secs(20);

/// A client with a stream.
struct Client {
    rpc: P4RuntimeClient<Channel>,
    requests: mpsc::Sender<v1::StreamMessageRequest>,
    responses: Streaming<v1::StreamMessageResponse>,
    election_id: v1::Uint128,
}

async fn channel(running: &Running) -> Channel {
    let endpoint = Channel::from_shared(format!("http://{}", running.address)).unwrap();
    endpoint.connect().await.unwrap()
}

impl Client {
    /// A client that has bid with an election id and received the response.
    async fn connect(running: &Running, election_id: u64) -> (Self, Code) {
        let mut rpc = P4RuntimeClient::new(channel(running).await);
        let (requests, receiver) = mpsc::channel(4096);
        let election_id = v1::Uint128 { high: 0, low: election_id };
        let bid = v1::MasterArbitrationUpdate {
            device_id: 1,
            election_id: Some(election_id),
            ..v1::MasterArbitrationUpdate::default()
        };
        send(&requests, Request::Arbitration(bid)).await;
        let responses =
            rpc.stream_channel(ReceiverStream::new(receiver)).await.unwrap().into_inner();
        let mut client = Self { rpc, requests, responses, election_id };
        let Received::Arbitration(response) = client.next_message().await else {
            panic!("a response")
        };
        let code = response.status.unwrap().code.into();
        (client, code)
    }

    /// A primary whose pipeline is committed.
    async fn primary(running: &Running) -> Self {
        let (mut client, code) = Self::connect(running, 10).await;
        assert_eq!(code, Code::Ok);
        client.push(ConfigAction::VerifyAndCommit, Some(config(7))).await.unwrap();
        client
    }

    async fn next_message(&mut self) -> Received {
        let message = tokio::time::timeout(SOON, self.responses.message()).await;
        message.expect("soon").unwrap().expect("the stream is open").update.unwrap()
    }

    async fn push(
        &mut self,
        action: ConfigAction,
        config: Option<v1::ForwardingPipelineConfig>,
    ) -> Result<(), Status> {
        let request = v1::SetForwardingPipelineConfigRequest {
            device_id: 1,
            election_id: Some(self.election_id),
            action: action.into(),
            config,
            ..v1::SetForwardingPipelineConfigRequest::default()
        };
        self.rpc.set_forwarding_pipeline_config(request).await.map(drop)
    }

    fn batch(&self, kind: Type, entities: Vec<v1::entity::Entity>) -> v1::WriteRequest {
        let updates = entities.into_iter().map(|entity| v1::Update {
            r#type: kind.into(),
            entity: Some(v1::Entity { entity: Some(entity) }),
        });
        v1::WriteRequest {
            device_id: 1,
            election_id: Some(self.election_id),
            updates: updates.collect(),
            ..v1::WriteRequest::default()
        }
    }

    async fn write(&mut self, kind: Type, entries: &[Entry]) -> Result<(), Status> {
        let entities = entries.iter().map(|entry| table_entry(encode(entry).unwrap())).collect();
        let request = self.batch(kind, entities);
        self.rpc.write(request).await.map(drop)
    }

    async fn read(&mut self, wanted: v1::entity::Entity) -> Vec<v1::entity::Entity> {
        let request = v1::ReadRequest {
            device_id: 1,
            entities: vec![v1::Entity { entity: Some(wanted) }],
            ..v1::ReadRequest::default()
        };
        let mut response = self.rpc.read(request).await.unwrap().into_inner();
        let mut found = Vec::new();
        while let Some(message) = response.message().await.unwrap() {
            assert!(message.encoded_len() <= 256 * 1024, "responses come in parts");
            found.extend(message.entities.into_iter().filter_map(|entity| entity.entity));
        }
        found
    }

    async fn entries(&mut self) -> Vec<Entry> {
        let found = self.read(table_entry(v1::TableEntry::default())).await;
        let entries = found.into_iter().map(|entity| match entity {
            v1::entity::Entity::TableEntry(entry) => decode(&entry).unwrap(),
            other => panic!("unexpected {other:?}"),
        });
        entries.collect()
    }
}

async fn send(requests: &mpsc::Sender<v1::StreamMessageRequest>, update: Request) {
    requests.send(v1::StreamMessageRequest { update: Some(update) }).await.unwrap();
}

fn config(cookie: u64) -> v1::ForwardingPipelineConfig {
    v1::ForwardingPipelineConfig {
        p4info: Some(p4info()),
        p4_device_config: DEVICE_CONFIG.to_vec(),
        cookie: Some(v1::forwarding_pipeline_config::Cookie { cookie }),
    }
}

const fn table_entry(entry: v1::TableEntry) -> v1::entity::Entity {
    v1::entity::Entity::TableEntry(entry)
}

fn redirect(page: u64) -> Entry {
    Entry {
        key: Key::Redirect { dst_scope: 0xfdbb_0001, dst_node: 2, page },
        action: Action::Forward(Forward { port: SwitchPort(3), dst_mac: MacAddr([2; 6]) }),
        idle_timeout: None,
        metadata: page.to_be_bytes().to_vec(),
    }
}

fn multicast_group() -> v1::entity::Entity {
    let port = Some(v1::replica::PortKind::Port(vec![2]));
    let replica = v1::Replica { port_kind: port, instance: 4, ..v1::Replica::default() };
    let group = v1::MulticastGroupEntry {
        multicast_group_id: 6,
        replicas: vec![replica],
        metadata: b"group".to_vec(),
    };
    let kind = v1::packet_replication_engine_entry::Type::MulticastGroupEntry(group);
    v1::entity::Entity::PacketReplicationEngineEntry(v1::PacketReplicationEngineEntry {
        r#type: Some(kind),
    })
}

fn clone_session() -> v1::entity::Entity {
    let port = Some(v1::replica::PortKind::Port(vec![1, 254]));
    let session = v1::CloneSessionEntry {
        session_id: 99,
        replicas: vec![v1::Replica { port_kind: port, ..v1::Replica::default() }],
        ..v1::CloneSessionEntry::default()
    };
    let kind = v1::packet_replication_engine_entry::Type::CloneSessionEntry(session);
    v1::entity::Entity::PacketReplicationEngineEntry(v1::PacketReplicationEngineEntry {
        r#type: Some(kind),
    })
}

/// The codes of a refused batch, in the order of its updates.
fn codes(status: &Status) -> Vec<Code> {
    assert_eq!(status.code(), Code::Unknown);
    let details = rpc::Status::decode(status.details()).unwrap();
    assert_eq!(details.code, i32::from(Code::Unknown));
    assert_eq!(details.message, status.message());
    let errors = details.details.iter().map(|any| {
        assert_eq!(any.type_url, "type.googleapis.com/p4.v1.Error");
        Code::from(v1::Error::decode(any.value.as_slice()).unwrap().canonical_code)
    });
    errors.collect()
}

#[tokio::test]
async fn without_a_pipeline_nothing_is_written_or_read() {
    let running = Running::start(Box::new(Cabled::new())).await;
    let (mut client, _) = Client::connect(&running, 1).await;
    let write = client.write(Type::Insert, &[redirect(1)]).await.unwrap_err();
    assert_eq!(write.code(), Code::FailedPrecondition);
    let request = v1::ReadRequest { device_id: 1, ..v1::ReadRequest::default() };
    let read = client.rpc.read(request).await.unwrap_err();
    assert_eq!(read.code(), Code::FailedPrecondition);
    let request = v1::GetForwardingPipelineConfigRequest { device_id: 1, response_type: 0 };
    let response = client.rpc.get_forwarding_pipeline_config(request).await.unwrap();
    assert_eq!(response.into_inner().config, None);
    running.stop().await;
}

#[tokio::test]
async fn only_this_pipeline_is_taken() {
    let running = Running::start(Box::new(Cabled::new())).await;
    let (mut client, _) = Client::connect(&running, 1).await;
    let mut other = config(1);
    other.p4info.as_mut().unwrap().tables[1].size = 5;
    let status = client.push(ConfigAction::Verify, Some(other)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("table ingress.redirect is declared differently"));
    let mut compiled = config(1);
    compiled.p4_device_config = b"{}".to_vec();
    let status = client.push(ConfigAction::VerifyAndCommit, Some(compiled)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    for (action, config, code) in [
        (ConfigAction::Unspecified, Some(config(1)), Code::InvalidArgument),
        (ConfigAction::VerifyAndSave, None, Code::InvalidArgument),
        (ConfigAction::Commit, None, Code::NotFound),
        (ConfigAction::Commit, Some(config(1)), Code::InvalidArgument),
    ] {
        let status = client.push(action, config).await.unwrap_err();
        assert_eq!(status.code(), code, "{action:?}");
    }
    running.stop().await;
}

#[tokio::test]
async fn pushing_empties_the_tables_and_reconciling_keeps_them() {
    let running = Running::start(Box::new(Cabled::new())).await;
    let mut client = Client::primary(&running).await;
    client.write(Type::Insert, &[redirect(1)]).await.unwrap();
    client.push(ConfigAction::Verify, Some(config(8))).await.unwrap();
    client.push(ConfigAction::ReconcileAndCommit, Some(config(8))).await.unwrap();
    assert_eq!(client.entries().await, [redirect(1)]);
    client.push(ConfigAction::VerifyAndSave, Some(config(9))).await.unwrap();
    assert_eq!(client.entries().await, [redirect(1)], "packets still meet the old tables");
    let early = client.write(Type::Insert, &[redirect(2)]).await.unwrap_err();
    assert_eq!(early.code(), Code::FailedPrecondition);
    let request = v1::GetForwardingPipelineConfigRequest { device_id: 1, response_type: 1 };
    let response = client.rpc.get_forwarding_pipeline_config(request).await.unwrap();
    let pushed = response.into_inner().config.unwrap();
    assert_eq!((pushed.cookie.unwrap().cookie, pushed.p4info), (8, None));
    client.push(ConfigAction::Commit, None).await.unwrap();
    assert_eq!(client.entries().await, []);
    let request = v1::GetForwardingPipelineConfigRequest { device_id: 1, response_type: 0 };
    let response = client.rpc.get_forwarding_pipeline_config(request).await.unwrap();
    assert_eq!(response.into_inner().config, Some(config(9)));
    running.stop().await;
}

#[tokio::test]
async fn whole_requests_are_refused_before_any_update() {
    let running = Running::start(Box::new(Cabled::new())).await;
    let mut client = Client::primary(&running).await;
    let good = client.batch(Type::Insert, vec![table_entry(encode(&redirect(1)).unwrap())]);
    for (request, code) in [
        (v1::WriteRequest { device_id: 2, ..good.clone() }, Code::NotFound),
        (v1::WriteRequest { role: "other".to_owned(), ..good.clone() }, Code::NotFound),
        (v1::WriteRequest { election_id: None, ..good.clone() }, Code::PermissionDenied),
        (v1::WriteRequest { atomicity: 1, ..good.clone() }, Code::Unimplemented),
        (v1::WriteRequest { atomicity: 2, ..good.clone() }, Code::Unimplemented),
    ] {
        let status = client.rpc.write(request).await.unwrap_err();
        assert_eq!(status.code(), code);
        assert!(status.details().is_empty());
    }
    assert_eq!(client.entries().await, []);
    running.stop().await;
}

#[tokio::test]
async fn batches_are_done_in_order_with_an_error_for_each_update() {
    let running = Running::start(Box::new(Cabled::new())).await;
    let mut client = Client::primary(&running).await;
    let batch = [redirect(1), redirect(1), redirect(2)];
    let status = client.write(Type::Insert, &batch).await.unwrap_err();
    assert_eq!(codes(&status), [Code::Ok, Code::AlreadyExists, Code::Ok]);
    assert_eq!(client.entries().await, [redirect(1), redirect(2)]);
    // Without their texts these details fit; with them they do not.
    let many: Vec<Entry> = (0..60).map(|_| redirect(1)).collect();
    let status = client.write(Type::Insert, &many).await.unwrap_err();
    assert_eq!(codes(&status), [Code::AlreadyExists; 60]);
    let more: Vec<Entry> = (2..1002).map(redirect).collect();
    let status = client.write(Type::Insert, &more).await.unwrap_err();
    assert!(status.details().is_empty());
    assert!(status.message().starts_with("1 of 1000 updates failed: #0 AlreadyExists;"));
    assert_eq!(client.entries().await.len(), 1001);
    running.stop().await;
}

/// Programs a data plane, ends its agent, and finds everything again through another one.
async fn restart(
    plane: Box<dyn DataPlane>,
    again: impl FnOnce(Box<dyn DataPlane>) -> Box<dyn DataPlane>,
) {
    let running = Running::start(plane).await;
    let mut client = Client::primary(&running).await;
    let timed = Entry { idle_timeout: Some(Duration::from_millis(200)), ..redirect(2) };
    client.write(Type::Insert, &[redirect(1), timed.clone()]).await.unwrap();
    let others = client.batch(Type::Insert, vec![multicast_group(), clone_session()]);
    client.rpc.write(others).await.unwrap();
    let plane = again(running.stop().await);

    let running = Running::start(plane).await;
    let (mut client, code) = Client::connect(&running, 1).await;
    assert_eq!(code, Code::Ok, "a restarted agent has seen no election id");
    assert_eq!(client.entries().await, [redirect(1), timed]);
    let request = v1::GetForwardingPipelineConfigRequest { device_id: 1, response_type: 0 };
    let response = client.rpc.get_forwarding_pipeline_config(request).await.unwrap();
    assert_eq!(response.into_inner().config, Some(config(7)));
    let Received::IdleTimeoutNotification(idle) = client.next_message().await else {
        panic!("an idle notification was expected")
    };
    assert_eq!(idle.table_entry.len(), 1);
    for entity in [multicast_group(), clone_session()] {
        let again = client.batch(Type::Insert, vec![entity.clone()]);
        let status = client.rpc.write(again).await.unwrap_err();
        assert_eq!(codes(&status), [Code::AlreadyExists]);
        let gone = client.batch(Type::Delete, vec![entity]);
        client.rpc.write(gone).await.unwrap();
    }
    running.stop().await;
}

#[tokio::test]
async fn what_the_soft_pipeline_holds_outlives_the_agent() {
    restart(Box::new(Cabled::new()), |plane| plane).await;
}

#[tokio::test]
async fn changes_of_the_tables_are_announced_until_the_agent_ends() {
    let running = Running::start(Box::new(Cabled::new())).await;
    let mut switch = SwitchClient::new(channel(&running).await);
    let request = switch::WatchTablesRequest {};
    let mut changes = switch.watch_tables(request).await.unwrap().into_inner();
    let mut next = async || {
        let next = tokio::time::timeout(SOON, changes.message()).await.expect("soon");
        next.expect("the agent works").map(|change| change.change_count)
    };
    assert_eq!(next().await, Some(0), "at once");
    // Pushes the pipeline.
    let mut client = Client::primary(&running).await;
    let pushed = next().await.expect("a change");
    client.write(Type::Insert, &[redirect(1)]).await.unwrap();
    let written = next().await.expect("a change");
    assert!(written > pushed && pushed > 0);
    client.entries().await;
    client.write(Type::Insert, &[redirect(1)]).await.unwrap_err();
    assert_eq!(
        next().await,
        Some(written + 1),
        "a refused request may have changed something; reading does not"
    );
    running.stop().await;
    assert_eq!(next().await, None);
}

#[tokio::test]
async fn an_idle_entry_is_noticed_also_if_none_was_there_for_a_while() {
    let running = Running::start(Box::new(Cabled::new())).await;
    let mut client = Client::primary(&running).await;
    for page in [2, 3] {
        // Longer than the agent needs to see that no entry can become idle.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let timed = Entry { idle_timeout: Some(Duration::from_millis(200)), ..redirect(page) };
        client.write(Type::Insert, std::slice::from_ref(&timed)).await.unwrap();
        let Received::IdleTimeoutNotification(idle) = client.next_message().await else {
            panic!("an idle notification was expected")
        };
        assert_eq!(idle.table_entry.len(), 1);
        client.write(Type::Delete, &[timed]).await.unwrap();
    }
    running.stop().await;
}

/// A request of node 7 to node 2, as the packet-out of port 1.
fn request() -> v1::PacketOut {
    let frame = UdpFrame {
        source_mac: [2, 0, 0, 0, 0, 7],
        destination_mac: [2, 0, 0, 0, 0, 1],
        source: Ipv6Addr::new(0xfdbb, 1, 7, 0, 0x8000, 0, 0, 0),
        destination: Ipv6Addr::new(0xfdbb, 1, 2, 0x0700, 0, 0, 0, 0x1000),
        source_port: 0x0fa0,
        destination_port: 0x0fa0,
        payload: &[],
    };
    let metadata = v1::PacketMetadata { metadata_id: 1, value: vec![1] };
    v1::PacketOut { payload: frame.bytes(), metadata: vec![metadata] }
}

/// Lets node 7 send through port 2 and copies its requests to the controller.
async fn copy_requests(client: &mut Client) {
    let guard = Entry {
        key: Key::IngressGuard { port: SwitchPort(2), src_scope: 0xfdbb_0001, src_node: 7 },
        action: Action::Allow,
        idle_timeout: None,
        metadata: Vec::new(),
    };
    let notify = Entry {
        key: Key::Notify {
            src_command: Ternary::default(),
            dst_command: Ternary { value: 7, mask: 0x3f },
            src_status: Ternary::default(),
            priority: 1,
        },
        action: Action::CopyToController,
        ..guard.clone()
    };
    let session = client.batch(Type::Insert, vec![clone_session()]);
    client.rpc.write(session).await.unwrap();
    client.write(Type::Insert, &[guard, notify]).await.unwrap();
}

#[tokio::test]
async fn client_that_does_not_read_delays_no_other() {
    const PACKETS: u64 = 50_000;
    let running = Running::start(Box::new(Cabled::new())).await;
    let mut client = Client::primary(&running).await;
    copy_requests(&mut client).await;
    for _ in 0..PACKETS {
        send(&client.requests, Request::Packet(request())).await;
    }
    let mut switch = SwitchClient::new(channel(&running).await);
    let all_sent = async {
        loop {
            let ports = switch.list_ports(switch::ListPortsRequest {}).await.unwrap().into_inner();
            if ports.ports[1].rx.unwrap().packets == PACKETS {
                return ports.packet_ins_lost;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let lost = tokio::time::timeout(SOON * 4, all_sent).await.expect("every packet is switched");
    assert!(lost > 0, "the client's HTTP/2 window and its queue hold fewer");
    // The slow client's own writes, and another client, are still served.
    client.write(Type::Insert, &[redirect(1)]).await.unwrap();
    let (mut other, code) = Client::connect(&running, 20).await;
    assert_eq!(code, Code::Ok);
    other.write(Type::Insert, &[redirect(2)]).await.unwrap();
    running.stop().await;
}

#[tokio::test]
async fn stream_ends_with_the_reason_when_a_bid_breaks_a_rule() {
    let running = Running::start(Box::new(Cabled::new())).await;
    let (_first, _) = Client::connect(&running, 3).await;
    let (mut second, code) = Client::connect(&running, 2).await;
    assert_eq!(code, Code::AlreadyExists);
    let bid = v1::MasterArbitrationUpdate {
        device_id: 1,
        election_id: Some(v1::Uint128 { high: 0, low: 3 }),
        ..v1::MasterArbitrationUpdate::default()
    };
    send(&second.requests, Request::Arbitration(bid)).await;
    let ended = tokio::time::timeout(SOON, second.responses.message()).await.expect("soon");
    assert_eq!(ended.unwrap_err().code(), Code::InvalidArgument);
    running.stop().await;
}

#[tokio::test]
async fn backup_sends_no_packets() {
    let running = Running::start(Box::new(Cabled::new())).await;
    let _primary = Client::primary(&running).await;
    let (mut backup, _) = Client::connect(&running, 2).await;
    send(&backup.requests, Request::Packet(request())).await;
    let Received::Error(error) = backup.next_message().await else {
        panic!("an error was expected")
    };
    assert_eq!(Code::from(error.canonical_code), Code::PermissionDenied);
    running.stop().await;
}

#[tokio::test]
async fn ports_and_impairments_are_there_beside_p4runtime() {
    let running = Running::start(Box::new(Cabled::new())).await;
    let mut client = SwitchClient::new(channel(&running).await);
    let response = client.list_ports(switch::ListPortsRequest {}).await.unwrap().into_inner();
    assert_eq!(response.data_plane, "soft");
    let names: Vec<_> =
        response.ports.iter().map(|port| (port.number, port.name.as_str())).collect();
    assert_eq!(names, [(1, "test1"), (2, "test2"), (3, "test3")]);
    assert_eq!(response.drops.len(), DropReason::ALL.len());
    let impair = |port, loss| switch::SetImpairmentRequest {
        port,
        impairment: Some(switch::Impairment { loss, ..switch::Impairment::default() }),
    };
    client.set_impairment(impair(1, 0.5)).await.unwrap();
    for (port, loss) in [(9, 0.5), (1, 1.5), (70_000, 0.5)] {
        let status = client.set_impairment(impair(port, loss)).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
    }
    running.stop().await;
}

mod root {
    use super::*;
    use crate::support::{Removed, cabled, in_kernel, in_namespace};

    #[test]
    fn what_the_kernel_holds_outlives_the_agent() {
        let removed = Removed(format!("agent-{}", std::process::id()));
        let name = removed.0.clone();
        in_namespace(move || {
            let plane = cabled(in_kernel(&name));
            let again = |plane: Box<dyn DataPlane>| -> Box<dyn DataPlane> {
                drop(plane);
                Box::new(in_kernel(&name))
            };
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(restart(plane, again));
        });
    }
}
