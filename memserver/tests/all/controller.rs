//! A controller that behaves as a test requires, with the API of the real one.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
};

use bluebridge_northbound::proto::{
    AllocationsRequest, AllocationsResponse, AttendRequest, AttendResponse, CancelMigrationRequest,
    CancelMigrationResponse, DrainRequest, DrainResponse, DrainsRequest, DrainsResponse,
    HeartbeatRequest, HeartbeatResponse, JoinRequest, JoinResponse, LeaveRequest, LeaveResponse,
    MigrateRequest, MigrateResponse, MigrationsRequest, MigrationsResponse, PurgeRequest,
    PurgeResponse, RebalanceRequest, RebalanceResponse, StatisticsRequest, StatisticsResponse,
    StatusRequest, StatusResponse, WatchRequest, WatchResponse,
    attend_request::Body as ReplyBody,
    attend_response::Body as QueryBody,
    controller_server::{Controller, ControllerServer},
    operations_server::{Operations, OperationsServer},
};
use tokio::{net::TcpListener, runtime::Runtime, sync::mpsc};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{
    Request, Response, Status, Streaming,
    transport::{Server, server::TcpIncoming},
};

use crate::peer::{SERVER, SPACE};

/// The generation of the arena that it assigns.
pub(crate) const GENERATION: u16 = 5;

/// The controller's next responses, and what it has received.
#[derive(Debug, Default)]
pub(crate) struct Script {
    pub(crate) range_epoch: u32,
    pub(crate) notices_wanted: bool,
    /// Responds to heartbeats as if another server had joined under the same name.
    pub(crate) expels: bool,
    /// Reserves the arena generations that are wanted.
    pub(crate) reserves: bool,
    pub(crate) free_pages: Vec<u64>,
    pub(crate) wanted_generations: Vec<u32>,
    pub(crate) leave_count: u32,
    /// The messages of the server's open call; the first one identifies it.
    pub(crate) messages: Vec<AttendRequest>,
    /// Sends queries to the server, once it attends.
    pub(crate) queries: Option<mpsc::UnboundedSender<Result<AttendResponse, Status>>>,
}

/// A running controller; dropping it stops it.
pub(crate) struct FakeController {
    script: Arc<Mutex<Script>>,
    uri: String,
    _runtime: Runtime,
}

struct Service(Arc<Mutex<Script>>);

#[tonic::async_trait]
impl Operations for Service {
    type AttendStream = UnboundedReceiverStream<Result<AttendResponse, Status>>;

    async fn attend(
        &self,
        request: Request<Streaming<AttendRequest>>,
    ) -> Result<Response<Self::AttendStream>, Status> {
        let (queries, outgoing) = mpsc::unbounded_channel();
        let mut messages = request.into_inner();
        let script = Arc::clone(&self.0);
        let mut queries = Some(queries);
        tokio::spawn(async move {
            while let Ok(Some(message)) = messages.message().await {
                let mut script = script.lock().expect("the script is not poisoned");
                if matches!(message.body, Some(ReplyBody::Member(_))) {
                    script.queries = queries.take();
                }
                script.messages.push(message);
            }
        });
        Ok(Response::new(UnboundedReceiverStream::new(outgoing)))
    }

    async fn allocations(
        &self,
        _: Request<AllocationsRequest>,
    ) -> Result<Response<AllocationsResponse>, Status> {
        Err(Status::unimplemented("a memory server does not call this"))
    }

    async fn purge(&self, _: Request<PurgeRequest>) -> Result<Response<PurgeResponse>, Status> {
        Err(Status::unimplemented("a memory server does not call this"))
    }

    async fn statistics(
        &self,
        _: Request<StatisticsRequest>,
    ) -> Result<Response<StatisticsResponse>, Status> {
        Err(Status::unimplemented("a memory server does not call this"))
    }

    async fn migrate(
        &self,
        _: Request<MigrateRequest>,
    ) -> Result<Response<MigrateResponse>, Status> {
        Err(Status::unimplemented("a memory server does not call this"))
    }

    async fn cancel_migration(
        &self,
        _: Request<CancelMigrationRequest>,
    ) -> Result<Response<CancelMigrationResponse>, Status> {
        Err(Status::unimplemented("a memory server does not call this"))
    }

    async fn migrations(
        &self,
        _: Request<MigrationsRequest>,
    ) -> Result<Response<MigrationsResponse>, Status> {
        Err(Status::unimplemented("a memory server does not call this"))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<DrainResponse>, Status> {
        Err(Status::unimplemented("a memory server does not call this"))
    }

    async fn drains(&self, _: Request<DrainsRequest>) -> Result<Response<DrainsResponse>, Status> {
        Err(Status::unimplemented("a memory server does not call this"))
    }

    async fn rebalance(
        &self,
        _: Request<RebalanceRequest>,
    ) -> Result<Response<RebalanceResponse>, Status> {
        Err(Status::unimplemented("a memory server does not call this"))
    }
}

impl FakeController {
    pub(crate) fn start(script: Script) -> Self {
        let script = Arc::new(Mutex::new(script));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let listener = runtime.block_on(TcpListener::bind("[::1]:0")).expect("a port of loopback");
        let address = listener.local_addr().expect("it is bound");
        let service = ControllerServer::new(Service(Arc::clone(&script)));
        let operations = OperationsServer::new(Service(Arc::clone(&script)));
        let server = Server::builder().add_service(service).add_service(operations);
        runtime.spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
        Self { script, uri: format!("http://{address}"), _runtime: runtime }
    }

    pub(crate) fn uri(&self) -> &str {
        &self.uri
    }

    /// Sends a query in the server's open call; returns false without one.
    pub(crate) fn query(&self, id: u64, query: QueryBody) -> bool {
        let query = AttendResponse { id, body: Some(query) };
        let queries = self.script().queries.clone();
        queries.is_some_and(|queries| queries.send(Ok(query)).is_ok())
    }

    /// The server's last message about a query.
    pub(crate) fn reply(&self, id: u64) -> Option<ReplyBody> {
        let script = self.script();
        let last = script.messages.iter().rfind(|message| message.id == id);
        last.and_then(|message| message.body.clone())
    }

    /// Closes the server's open call.
    pub(crate) fn hang_up(&self) {
        self.script().queries = None;
    }

    pub(crate) fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().expect("the script is not poisoned")
    }
}

#[tonic::async_trait]
impl Controller for Service {
    async fn join(&self, _: Request<JoinRequest>) -> Result<Response<JoinResponse>, Status> {
        let script = self.0.lock().expect("the script is not poisoned");
        Ok(Response::new(JoinResponse {
            node: SERVER.0.into(),
            space: SPACE.0.into(),
            incarnation: 1,
            arena_generation: GENERATION.into(),
            range_epoch: script.range_epoch,
            piece_bytes: 4096,
            heartbeat_interval_ms: 10,
            token: vec![7; 16],
            installed: true,
            memory_nodes: None,
            notices_wanted: script.notices_wanted,
            last_arena_generation: GENERATION.into(),
            earlier: vec![],
        }))
    }

    async fn heartbeat(
        &self,
        request: Request<HeartbeatRequest>,
    ) -> Result<Response<HeartbeatResponse>, Status> {
        let mut script = self.0.lock().expect("the script is not poisoned");
        if script.expels {
            return Err(Status::failed_precondition("another server has this name now"));
        }
        let request = request.into_inner();
        script.free_pages.push(request.free_pages);
        script.wanted_generations.push(request.wanted_arena_generation);
        let last_arena_generation = match script.reserves {
            true => request.wanted_arena_generation.max(GENERATION.into()),
            false => 0,
        };
        Ok(Response::new(HeartbeatResponse {
            memory_nodes: None,
            range_epoch: script.range_epoch,
            piece_bytes: 4096,
            heartbeat_interval_ms: 10,
            installed: true,
            notices_wanted: script.notices_wanted,
            last_arena_generation,
        }))
    }

    async fn leave(&self, _: Request<LeaveRequest>) -> Result<Response<LeaveResponse>, Status> {
        self.0.lock().expect("the script is not poisoned").leave_count += 1;
        Ok(Response::new(LeaveResponse {}))
    }

    type WatchStream =
        Pin<Box<dyn tokio_stream::Stream<Item = Result<WatchResponse, Status>> + Send>>;

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::unimplemented("a memory server does not watch"))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
        Err(Status::unimplemented("a memory server does not call this"))
    }
}
