//! Endpoints that start before their controller. One test, because the log has one reader per process.

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::time::Duration;

use bluebridge_northbound::proto::controller_server::{Controller, ControllerServer};
use bluebridge_northbound::{
    Attachment, Carrier, Connection, Membership, MembershipError, Options, Registration, Role,
    proto,
};
use bluebridge_testkit::{Log, own_loopback, until};
use bluebridge_wire::Space;
use tokio::runtime::Runtime;
use tokio_stream::Stream;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

/// A controller that accepts every endpoint.
struct Willing;

#[tonic::async_trait]
impl Controller for Willing {
    async fn join(
        &self,
        _: Request<proto::JoinRequest>,
    ) -> Result<Response<proto::JoinResponse>, Status> {
        Ok(Response::new(proto::JoinResponse {
            node: 1,
            space: 1,
            incarnation: 1,
            arena_generation: 0,
            range_epoch: 1,
            piece_bytes: 4096,
            heartbeat_interval_ms: 50,
            token: vec![1; 16],
            installed: true,
            memory_nodes: None,
            notices_wanted: false,
            last_arena_generation: 0,
            earlier: vec![],
        }))
    }

    async fn heartbeat(
        &self,
        _: Request<proto::HeartbeatRequest>,
    ) -> Result<Response<proto::HeartbeatResponse>, Status> {
        Ok(Response::new(proto::HeartbeatResponse::default()))
    }

    async fn leave(
        &self,
        _: Request<proto::LeaveRequest>,
    ) -> Result<Response<proto::LeaveResponse>, Status> {
        Ok(Response::new(proto::LeaveResponse {}))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<proto::WatchResponse, Status>> + Send>>;

    async fn watch(
        &self,
        _: Request<proto::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::unimplemented("not needed here"))
    }

    async fn status(
        &self,
        _: Request<proto::StatusRequest>,
    ) -> Result<Response<proto::StatusResponse>, Status> {
        Err(Status::unimplemented("not needed here"))
    }
}

/// Serves until the runtime is dropped.
fn serve(address: SocketAddr) -> Runtime {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let incoming = runtime.block_on(async { TcpIncoming::bind(address) }).unwrap();
    let serving = Server::builder().add_service(ControllerServer::new(Willing));
    runtime.spawn(serving.serve_with_incoming(incoming));
    runtime
}

fn server() -> Registration {
    Registration {
        name: "s1".to_owned(),
        role: Role::Memory { capacity_pages: 10, shard_count: 1 },
        space: Space(1),
        mac: [2, 0, 0, 0, 0, 1],
        switch: String::new(),
        attachment: Attachment::Port(1),
        carrier: Carrier::Socket,
        mtu: 9000,
        previous: None,
        notices: false,
    }
}

#[test]
fn an_endpoint_waits_for_its_controller_and_says_so_once() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::INFO)
        .with_writer(move || writer.clone())
        .with_ansi(false)
        .init();
    let address = (own_loopback(), 7700).into();
    let uri = format!("http://{address}");
    let deadline = Duration::from_millis(200);
    let bounded = Options { join_deadline: deadline, ..Options::default() };
    let patient = Options { wait_for_controller: true, ..bounded.clone() };

    // A client's wait is limited, and its error names the controller.
    let refused = Membership::join_with(&uri, server(), bounded).unwrap_err();
    assert!(matches!(refused, MembershipError::Unreachable { .. }), "{refused}");
    assert!(refused.to_string().contains(&uri), "{refused}");
    assert_eq!(log.count("waiting for the controller"), 0);

    // A caller that is stopped while it waits returns.
    let given_up = Membership::join_while(&uri, server(), patient.clone(), |waited| {
        if waited > deadline * 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(matches!(given_up, Err(MembershipError::GivenUp)), "{given_up:?}");
    assert_eq!(log.count("waiting for the controller"), 1);

    // A memory server waits far beyond the deadline, until the controller is running.
    let mut runtime = None;
    let membership = Membership::join_while(&uri, server(), patient, |waited| {
        if waited > deadline * 5 && runtime.is_none() {
            runtime = Some(serve(address));
        }
        ControlFlow::Continue(())
    });
    let membership = membership.unwrap();
    assert_eq!(log.count("waiting for the controller"), 2, "once for each that waited");
    assert_eq!(log.count("joined the rack"), 1);

    // A lost controller is not logged with every heartbeat.
    drop(runtime);
    until("it is lost", || membership.snapshot().connection == Connection::Lost);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(log.count("lost the controller"), 1);
    let _runtime = serve(address);
    until("it is back", || membership.snapshot().connection == Connection::Connected);
    until("and said so", || log.count("the controller is back") == 1);
    membership.leave().unwrap();
}
