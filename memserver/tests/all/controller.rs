//! A controller that does what a test says, over the same API as the real one.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
};

use bluebridge_northbound::proto::{
    HeartbeatRequest, HeartbeatResponse, JoinRequest, JoinResponse, LeaveRequest, LeaveResponse,
    StatusRequest, StatusResponse, WatchRequest, WatchResponse,
    controller_server::{Controller, ControllerServer},
};
use tokio::{net::TcpListener, runtime::Runtime};
use tonic::{
    Request, Response, Status,
    transport::{Server, server::TcpIncoming},
};

use crate::peer::{SERVER, SPACE};

/// The generation of the arena that it assigns.
pub(crate) const GENERATION: u16 = 5;

/// What the controller answers next, and what it has heard.
#[derive(Debug, Default)]
pub(crate) struct Script {
    pub(crate) range_epoch: u32,
    pub(crate) notices_wanted: bool,
    /// Answers heartbeats as if another server had joined under the same name.
    pub(crate) expels: bool,
    /// Reserves the arena generations that are wanted.
    pub(crate) reserves: bool,
    pub(crate) free_pages: Vec<u64>,
    pub(crate) wanted_generations: Vec<u32>,
    pub(crate) leave_count: u32,
}

/// A running controller; its drop ends it.
pub(crate) struct FakeController {
    script: Arc<Mutex<Script>>,
    uri: String,
    _runtime: Runtime,
}

struct Service(Arc<Mutex<Script>>);

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
        runtime.spawn(
            Server::builder().add_service(service).serve_with_incoming(TcpIncoming::from(listener)),
        );
        Self { script, uri: format!("http://{address}"), _runtime: runtime }
    }

    pub(crate) fn uri(&self) -> &str {
        &self.uri
    }

    pub(crate) fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().expect("no test failed with it")
    }
}

#[tonic::async_trait]
impl Controller for Service {
    async fn join(&self, _: Request<JoinRequest>) -> Result<Response<JoinResponse>, Status> {
        let script = self.0.lock().expect("no test failed with it");
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
        }))
    }

    async fn heartbeat(
        &self,
        request: Request<HeartbeatRequest>,
    ) -> Result<Response<HeartbeatResponse>, Status> {
        let mut script = self.0.lock().expect("no test failed with it");
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
        self.0.lock().expect("no test failed with it").leave_count += 1;
        Ok(Response::new(LeaveResponse {}))
    }

    type WatchStream =
        Pin<Box<dyn tokio_stream::Stream<Item = Result<WatchResponse, Status>> + Send>>;

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::unimplemented("a memory server does not watch"))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
        Err(Status::unimplemented("a memory server does not ask"))
    }
}
